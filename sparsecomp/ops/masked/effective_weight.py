"""The effective weight of a pruned layer, M * W + (1 - M) * Phi(theta), as one operator, and its inverse.

Theta is one number a pruned element, in ascending flat order; Phi puts each in its place. Both operators copy bits and
compute nothing, so they and their gradients are exact in every dtype, and each is the other's gradient.
"""

from typing import Any

import torch
from torch import Tensor

from sparsecomp.errors import MaskError
from sparsecomp.ops.library import TAGS, implement, library
from sparsecomp.reference.masks import MOST
from sparsecomp.reference.memo import MEMO

library.define("effective_weight(Tensor weight, Tensor theta, Tensor mask) -> Tensor", tags=TAGS)
library.define(
    "split_pruned(Tensor whole, Tensor mask, SymInt pruned, bool active, bool rest) -> (Tensor, Tensor)", tags=TAGS
)

_KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def effective_weight(weight: Tensor, theta: Tensor, mask: Tensor) -> Tensor:
    """where(mask, weight, Phi(theta)), in one pass and without a Phi(theta) in memory.

    NaN or infinity in a pruned element of the weight does not reach the result.

    Args:
        weight: of any shape and floating dtype.
        theta: (pruned elements,), of the weight's dtype, in ascending flat order.
        mask: bool of the weight's shape, True where the weight is active.

    Returns:
        Contiguous, of the weight's shape and dtype. Gradients flow to weight, where it is active, and to theta.

    Raises:
        MaskError: operands that do not belong together. On CUDA the mask's pruned elements are not counted, which would
            wait for the device: a theta of another length gives NaN at all of them.

    What the mask's bits say is worked out in each call, and kept within `sparsecomp.ops.frozen_weights`.
    """
    return torch.ops.sparsecomp.effective_weight.default(weight, theta, mask)


def split_pruned(
    whole: Tensor, mask: Tensor, pruned: int, *, active: bool = True, rest: bool = True
) -> tuple[Tensor, Tensor]:
    """The inverse: (where(mask, whole, 0), the pruned elements as a vector in ascending flat order), in one pass.

    Args:
        whole: of any shape and floating dtype.
        mask: bool of its shape.
        pruned: how many elements the mask prunes; given, since counting them would wait for the device.
        active, rest: which of the two are wanted; the other is an empty tensor.

    Raises:
        MaskError: as in `effective_weight`; with another number of pruned elements, the vector is NaN on CUDA.
    """
    return torch.ops.sparsecomp.split_pruned.default(whole, mask, pruned, active, rest)


def check_mask(weight: Tensor, mask: Tensor) -> None:
    """MaskError unless `mask` is bool, of the weight's shape and on its device."""
    if mask.dtype is not torch.bool or mask.shape != weight.shape or mask.device != weight.device:
        raise MaskError(
            f"the mask is {mask.dtype} {tuple(mask.shape)} on {mask.device}, the weight {tuple(weight.shape)} on "
            f"{weight.device}: a bool mask of the weight's shape is needed"
        )


def _check(whole: Tensor, mask: Tensor, pruned: int) -> None:
    check_mask(whole, mask)
    if not whole.dtype.is_floating_point:
        raise MaskError(f"the weight is {whole.dtype}: a floating dtype is needed")
    if not 0 <= pruned <= whole.numel():
        raise MaskError(f"{pruned} of {whole.numel()} elements cannot be pruned: gather theta again with this mask")


def _check_merge(weight: Tensor, theta: Tensor, mask: Tensor) -> None:
    if theta.dim() != 1 or theta.dtype != weight.dtype or theta.device != weight.device:
        raise MaskError(
            f"theta is {theta.dtype} {tuple(theta.shape)} on {theta.device}, the weight {weight.dtype} on "
            f"{weight.device}: a vector of the weight's dtype on its device is needed"
        )
    _check(weight, mask, theta.shape[0])


def merge_at(weight: Tensor, theta: Tensor, positions: Tensor) -> Tensor:
    """`effective_weight` by the flat positions of the pruned elements, without checks."""
    out = weight.clone(memory_format=torch.contiguous_format)
    out.view(-1).index_copy_(0, positions, theta)
    return out


def split_at(whole: Tensor, positions: Tensor, active: bool, rest: bool) -> tuple[Tensor, Tensor]:
    """`split_pruned` likewise."""
    nothing = whole.new_empty(0)
    kept = whole.clone(memory_format=torch.contiguous_format) if active else nothing
    if active:
        kept.view(-1).index_fill_(0, positions, 0)
    return kept, whole.reshape(-1).index_select(0, positions) if rest else nothing


def pruned_positions(mask: Tensor) -> Tensor:
    """The flat positions of the pruned elements; waits for the device."""
    return (~mask).reshape(-1).nonzero()[:, 0]


def _kept_positions(mask: Tensor, pruned: int) -> Tensor | None:
    """The flat positions of the pruned elements where they may be kept; it pays to list them for more than one call."""
    kept = MEMO.kept(pruned_positions, [mask])
    found = mask.numel() - int(mask.count_nonzero()) if kept is None else kept.shape[0]
    if found != pruned:
        raise MaskError(f"the mask prunes {found} elements, not {pruned}: gather theta again after a change")
    return kept


def _merge_cpu(weight: Tensor, theta: Tensor, mask: Tensor) -> Tensor:
    _check_merge(weight, theta, mask)
    positions = _kept_positions(mask, theta.shape[0])
    return merge_in_torch(weight, theta, mask) if positions is None else merge_at(weight, theta, positions)


def _split_cpu(whole: Tensor, mask: Tensor, pruned: int, active: bool, rest: bool) -> tuple[Tensor, Tensor]:
    _check(whole, mask, pruned)
    positions = _kept_positions(mask, pruned)
    return split_at(whole, pruned_positions(mask) if positions is None else positions, active, rest)


def merge_in_torch(weight: Tensor, theta: Tensor, mask: Tensor) -> Tensor:
    """`effective_weight` without a kernel and without waiting for the device."""
    return weight.contiguous().masked_scatter(~mask, theta)


def split_in_torch(whole: Tensor, mask: Tensor, pruned: int, active: bool, rest: bool) -> tuple[Tensor, Tensor]:
    """`split_pruned` likewise."""
    kept = torch.where(mask, whole, 0).contiguous() if active else whole.new_empty(0)
    if not rest:
        return kept, whole.new_empty(0)
    # `whole[~mask]` would wait for the device; what is active goes to a place behind the end
    gone = ~mask.reshape(-1)
    place = (gone.cumsum(0) - 1).masked_fill_(~gone, pruned)
    return kept, whole.new_empty(pruned + 1).scatter_(0, place, whole.reshape(-1))[:pruned].clone()


def fits_kernels(whole: Tensor) -> bool:
    """Whether the kernels can merge and split a weight like this one, on CUDA."""
    return whole.dtype in _KERNEL_DTYPES and 0 < whole.numel() <= MOST


def merge_by(weight: Tensor, theta: Tensor, table: Tensor) -> Tensor:
    """`effective_weight` by the kernel and what `ranks_of` a mask are, without checks."""
    from sparsecomp.lowering.masked import effective_weight as lowered  # loads Triton

    return lowered.merge_pruned(weight.contiguous(), theta.contiguous(), table)


def split_by(whole: Tensor, table: Tensor, pruned: int, active: bool, rest: bool) -> tuple[Tensor, Tensor]:
    """`split_pruned` likewise."""
    from sparsecomp.lowering.masked import effective_weight as lowered  # loads Triton

    return lowered.split_pruned_weight(whole.contiguous(), table, pruned, active, rest)


def ranks_of(mask: Tensor) -> Tensor:
    """A mask on CUDA as its kernels read it."""
    from sparsecomp.lowering.masked import effective_weight as lowered  # loads Triton

    return lowered.ranks(mask.contiguous())


def merge_cuda(weight: Tensor, theta: Tensor, mask: Tensor) -> Tensor:
    """`effective_weight` on CUDA."""
    _check_merge(weight, theta, mask)
    if not fits_kernels(weight):
        return merge_in_torch(weight, theta, mask)
    return merge_by(weight, theta, MEMO.of(ranks_of, [mask]))


def split_cuda(whole: Tensor, mask: Tensor, pruned: int, active: bool, rest: bool) -> tuple[Tensor, Tensor]:
    """`split_pruned` likewise."""
    _check(whole, mask, pruned)
    if not fits_kernels(whole):
        return split_in_torch(whole, mask, pruned, active, rest)
    return split_by(whole, MEMO.of(ranks_of, [mask]), pruned, active, rest)


def _fake_merge(weight: Tensor, theta: Tensor, mask: Tensor) -> Tensor:
    _check_merge(weight, theta, mask)
    return weight.new_empty(weight.shape)


def _fake_split(whole: Tensor, mask: Tensor, pruned: int, active: bool, rest: bool) -> tuple[Tensor, Tensor]:
    _check(whole, mask, pruned)
    return whole.new_empty(whole.shape if active else (0,)), whole.new_empty(pruned if rest else 0)


def _save_merge(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, theta, mask = inputs
    ctx.save_for_backward(mask)
    ctx.pruned = theta.shape[0]


def _merge_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (mask,) = ctx.saved_tensors
    active, rest = ctx.needs_input_grad[:2]
    of_weight, of_theta = split_pruned(grad, mask, ctx.pruned, active=active, rest=rest)
    return of_weight if active else None, of_theta if rest else None, None


def _save_split(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, mask, pruned, active, rest = inputs
    ctx.save_for_backward(mask)
    ctx.how = pruned, active, rest


def _split_backward(ctx: Any, of_active: Tensor, of_rest: Tensor) -> tuple[Tensor | None, ...]:
    (mask,) = ctx.saved_tensors
    pruned, active, rest = ctx.how
    if not active:
        of_active = of_rest.new_zeros(mask.shape)
    if not rest:
        of_rest = of_active.new_zeros(pruned)
    return effective_weight(of_active, of_rest, mask), None, None, None, None


implement("effective_weight", _merge_cpu, merge_cuda, _fake_merge)
torch.library.register_autograd("sparsecomp::effective_weight", _merge_backward, setup_context=_save_merge, lib=library)
implement("split_pruned", _split_cpu, split_cuda, _fake_split)
torch.library.register_autograd("sparsecomp::split_pruned", _split_backward, setup_context=_save_split, lib=library)
