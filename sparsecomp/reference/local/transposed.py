"""Who reads an input: the lists that a gradient by the input goes through, so that it scatters nothing.

An index of fixed fan-in (n_out, k) says which input each weight multiplies. Its transpose is a list for each input i:
`order[pointers[i] : pointers[i + 1]]` are the places, in the flat (n_out, k) weight, of the weights that multiply it.
The output that a place belongs to is place // k, so that no third list is needed.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from sparsecomp.formats.indices import pointers_of, sorted_keys


def transposed_lists(index: Tensor, inputs: int) -> tuple[Tensor, Tensor]:
    """Pointers (inputs + 1,) and order (n_out · k,) of an index (n_out, k) into `inputs`, both int32."""
    places, order = sorted_keys(index.flatten(), inputs)
    return pointers_of(places, inputs, torch.int32), order.int()


def lists_fit(index: Tensor, inputs: int, lists: Sequence[Tensor]) -> bool:
    """Whether the lists are those of this index, and not of one that it was before; waits for the device."""
    pointers, order = lists
    if pointers.numel() != inputs + 1 or order.numel() != index.numel():
        return False
    read = index.flatten().index_select(0, order)
    numbers = torch.arange(inputs, dtype=read.dtype, device=read.device)
    return torch.equal(numbers.repeat_interleave(pointers.diff(), output_size=order.numel()), read)


def outputs_of(order: Tensor, fan_in: int) -> Tensor:
    """The output that each place belongs to."""
    # on a CPU a division of integers takes twice as long
    return order.double().div_(fan_in).int()
