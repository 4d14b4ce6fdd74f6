"""Who reads an input: the lists that a gradient by the input goes through, so that it scatters nothing.

An index of fixed fan-in (n_out, k) says which input each weight multiplies. Its transpose is a list for each input i:
`order[pointers[i] : pointers[i + 1]]` are the places, in the flat (n_out, k) weight, of the weights that multiply it.
The output that a place belongs to is place // k, so that no third list is needed.

Who keeps the lists while somebody may write to the index keeps a third array, `kept_lists`, by which each gradient sees
that and makes them anew in place, as `sparsecomp.reference.patterns` has it of sparse matrices.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsecomp.formats.indices import pointers_of, sorted_keys
from sparsecomp.reference.local.connectivity import check_index
from sparsecomp.reference.patterns import made_of, renew


def transposed_lists(index: Tensor, inputs: int) -> tuple[Tensor, Tensor]:
    """Pointers (inputs + 1,) and order (n_out · k,) of an index (n_out, k) into `inputs`, both int32."""
    places, order = sorted_keys(index.flatten(), inputs)
    return pointers_of(places, inputs, torch.int32), order.int()


def kept_lists(index: Tensor, inputs: int) -> tuple[Tensor, Tensor, Tensor]:
    """`transposed_lists` to be kept, and a copy of the index, flat, with two numbers that a kernel counts with."""
    return *transposed_lists(index, inputs), F.pad(index.flatten(), (0, 2))


def lists_fit(index: Tensor, inputs: int, lists: Sequence[Tensor]) -> bool:
    """Whether the lists are of an index of this size; looks at no contents."""
    sizes = inputs + 1, index.numel(), index.numel() + 2
    return len(lists) > 1 and all(array.numel() == size for array, size in zip(lists, sizes, strict=False))


def current_lists(index: Tensor, inputs: int, lists: Sequence[Tensor]) -> Sequence[Tensor]:
    """Pointers and order of the index as it is: the given ones, made anew in place where they are kept and of another.

    On a GPU, where it waits for nothing, `lowering.local.transposed` does that.

    Raises:
        FormatError: somebody wrote an index that reads beyond the inputs.
    """
    if not lists_fit(index, inputs, lists):
        return transposed_lists(index, inputs)
    if len(lists) > 2 and not made_of(lists[2], (index,)):
        renew(lists, kept_lists(check_index(index, inputs, index.shape[0]), inputs))
    return lists[:2]


def outputs_of(order: Tensor, fan_in: int) -> Tensor:
    """The output that each place belongs to."""
    # on a CPU a division of integers takes twice as long
    return order.double().div_(fan_in).int()
