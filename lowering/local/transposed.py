"""The lists of who reads an input, seen to be those of the index as it is, in one launch and without the host.

Lists that are kept are made anew in place, on the device, where somebody wrote another index. Entries of it that are no
inputs are in no list.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sparsecomp.lowering.launch import dispatch
from sparsecomp.reference.local.transposed import lists_fit, transposed_lists


def compared_lists(index: Tensor, inputs: int, lists: Sequence[Tensor]) -> Sequence[Tensor]:
    """Pointers and order; see ``sparsecomp.reference.local.transposed``, whose `current_lists` is the CPU's."""
    if not lists_fit(index, inputs, lists):
        return transposed_lists(index, inputs)
    if len(lists) > 2 and index.numel():
        pointers, order, source = lists
        launch = _comparison(index.device, index.shape, inputs)
        launch(index.contiguous(), None, pointers, None, order, source, None, None)
    return lists[:2]


@dispatch.recorded
def _comparison(device: torch.device, shape: torch.Size, inputs: int) -> Callable[..., None]:
    from sparsecomp.lowering.sparse.kernels.transposed import compare_launch

    return compare_launch(inputs, shape.numel())
