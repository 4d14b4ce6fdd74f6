"""The effective weight M*W + (1-M)*Phi(theta), in the form with a separate theta and the form that shares a buffer.

The separate form is the reference. In the shared form theta lies in the pruned positions of the buffer, so that a
forward pass costs no more than a dense one; both hold the same bits.
"""

import torch
from torch.autograd.function import FunctionCtx

from sparsecomp.errors import MaskError
from sparsecomp.nn.masked.mask import SparseMask


def scatter_pruned(theta: torch.Tensor, mask: SparseMask) -> torch.Tensor:
    """Phi: a tensor of the mask's shape with ``theta`` (1-d, one value a pruned element) at P and zeros elsewhere."""
    pruned = _pruned_for(theta, mask)
    flat = theta.new_zeros(mask.mask.numel())
    return flat.index_copy(0, pruned.long(), theta).reshape(mask.mask.shape)


def gather_pruned(weight: torch.Tensor, mask: SparseMask) -> torch.Tensor:
    """The inverse of Phi: the pruned elements of ``weight`` (the mask's shape) as a 1-d tensor, in ascending order."""
    mask.check_weight(weight)
    return weight.reshape(-1).index_select(0, mask.pruned)


def effective_weight(weight: torch.Tensor, theta: torch.Tensor, mask: SparseMask) -> torch.Tensor:
    """M*W + (1-M)*Phi(theta), of the mask's shape; NaN in a pruned element of W does not reach the result.

    ``weight`` has the mask's shape, ``theta`` one value a pruned element in ascending flat order, and the weight's
    dtype. The gradient of W is that of its active part, zero at P; theta's is the gather of dL/dW_eff at P. Both are
    copies, hence exact. Raises MaskError for parts that do not fit one another.
    """
    mask.check_weight(weight)
    pruned = _pruned_for(theta, mask)
    if theta.dtype != weight.dtype:
        raise MaskError(f"theta is {theta.dtype}, the weight {weight.dtype}: convert theta with theta.to(weight.dtype)")
    # the indices are taken now: the mask may change between the forward and the backward pass
    return _EffectiveWeight.apply(weight, theta, pruned)


class _EffectiveWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, weight: torch.Tensor, theta: torch.Tensor, pruned: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(pruned)
        return weight.reshape(-1).index_copy(0, pruned.long(), theta).reshape(weight.shape)

    @staticmethod
    def backward(ctx, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        (pruned,), (grad,) = ctx.saved_tensors, grad_outputs
        flat = grad.reshape(-1)
        of_weight = flat.index_fill(0, pruned.long(), 0).reshape(grad.shape) if ctx.needs_input_grad[0] else None
        of_theta = flat.index_select(0, pruned) if ctx.needs_input_grad[1] else None
        return of_weight, of_theta, None


def load_theta_(weight: torch.Tensor, theta: torch.Tensor, mask: SparseMask) -> torch.Tensor:
    """Put ``theta`` in the pruned positions of ``weight`` in place: the shared form. Same bits as the separate form.

    The gradient of the buffer is then the dense one: ``gather_pruned`` of it is theta's, the rest is W's.
    Raises MaskError for parts that do not fit one another, with the weight unchanged.
    """
    mask.check_weight(weight)
    _pruned_for(theta, mask)
    with torch.no_grad():
        return weight.masked_scatter_(~mask.mask, theta.to(weight.dtype))


def _pruned_for(theta: torch.Tensor, mask: SparseMask) -> torch.Tensor:
    """The pruned positions; MaskError unless theta has one value for each."""
    pruned = mask.pruned
    if theta.shape != pruned.shape or theta.device != pruned.device:
        raise MaskError(
            f"theta is {tuple(theta.shape)} on {theta.device}; the mask on {pruned.device} has "
            f"{pruned.numel()} pruned elements: gather theta again after a change of the mask"
        )
    return pruned
