"""M*W + (1-M)*Phi(theta) in one pass, and its gradients in another: no Phi(theta), no 1-M, no dense index list.

Where an element of theta goes follows from how many pruned elements lie before it. ``pruned_before`` counts them for
each block of the flat weight once for a mask; within a block the kernel counts.
"""

from typing import Any

import torch
from torch import Tensor

from sparsecomp.ops.library import KERNEL_DTYPES, library

BLOCK = 1024
"""Elements of the flat weight that one count stands for."""

library.define(
    "effective_weight(Tensor weight, Tensor theta, Tensor mask, Tensor before) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
library.define(
    "effective_weight_gradients(Tensor grad, Tensor mask, Tensor before, SymInt pruned) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def pruned_before(mask: Tensor) -> Tensor:
    """Pruned elements in front of each block of ``BLOCK``, (blocks,) int64, of a bool mask; reads nothing back."""
    flat = mask.reshape(-1)
    blocks = -(-flat.numel() // BLOCK)
    counts = torch.nn.functional.pad(~flat, (0, blocks * BLOCK - flat.numel())).view(blocks, BLOCK).sum(1)
    return counts.cumsum(0) - counts


def effective_weight(weight: Tensor, theta: Tensor, mask: Tensor, before: Tensor | None = None) -> Tensor:
    """The weight where ``mask`` (bool, of its shape) is True, and theta in order where it is not.

    Args:
        weight: of any shape; NaN in a pruned element does not reach the result.
        theta: (pruned,) of the weight's dtype, in ascending flat order; how many there are is not checked.
        before: ``pruned_before(mask)``, to be kept with a mask that is used more than once.

    Returns:
        A tensor of the weight's shape, contiguous. Gradients are copies: of W at active elements, of theta at the rest.
    """
    before = pruned_before(mask) if before is None else before
    return torch.ops.sparsecomp.effective_weight.default(weight, theta, mask, before)


def split_pruned(
    whole: Tensor, mask: Tensor, pruned: int, before: Tensor | None = None, *, active: bool = True
) -> tuple[Tensor | None, Tensor]:
    """The two parts that ``effective_weight`` puts together: ``whole`` with zeros where ``mask`` is False, and theta.

    Args:
        whole: of the mask's shape.
        pruned: how many elements of the mask are False; not checked.
        before: as of ``effective_weight``.
        active: False leaves the first part out: None stands for it.

    Returns:
        The active part, contiguous, and (pruned,) the rest in ascending flat order. Both have gradients.
    """
    if not active and not whole.is_cuda:
        return None, whole.masked_select(~mask)
    before = pruned_before(mask) if before is None else before
    kept, theta = torch.ops.sparsecomp.effective_weight_gradients.default(whole, mask, before, pruned)
    return kept if active else None, theta


def _forward(weight, theta, mask, before):
    return weight.contiguous().masked_scatter(~mask, theta)


def _gradients(grad, mask, before, pruned):
    return grad.contiguous().masked_fill(~mask, 0), grad.masked_select(~mask)


def _cuda_forward(weight, theta, mask, before):
    if weight.dtype not in KERNEL_DTYPES:
        return _forward(weight, theta, mask, before)
    from sparsecomp.lowering import effective_weight  # loads Triton

    return effective_weight.forward(weight.contiguous(), theta.contiguous(), mask.contiguous(), before)


def _cuda_gradients(grad, mask, before, pruned):
    if grad.dtype not in KERNEL_DTYPES:
        return _gradients(grad, mask, before, pruned)
    from sparsecomp.lowering import effective_weight  # loads Triton

    return effective_weight.gradients(grad.contiguous(), mask.contiguous(), before, pruned)


def _fake_gradients(grad, mask, before, pruned):
    return torch.empty_like(grad, memory_format=torch.contiguous_format), grad.new_empty(pruned)


def _save(ctx: Any, inputs: Any, output: Tensor) -> None:
    _, theta, mask, before = inputs
    ctx.save_for_backward(mask, before)
    ctx.pruned = theta.shape[0]


def _backward(ctx: Any, grad: Tensor) -> Any:
    mask, before = ctx.saved_tensors
    found = torch.ops.sparsecomp.effective_weight_gradients.default(grad, mask, before, ctx.pruned)
    return (*(one if wanted else None for one, wanted in zip(found, ctx.needs_input_grad, strict=False)), None, None)


def _save_gradients(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[1:3])


def _backward_gradients(ctx: Any, of_weight: Tensor, of_theta: Tensor) -> Any:
    # two copies that share nothing: the adjoint puts them back where they came from
    return torch.ops.sparsecomp.effective_weight.default(of_weight, of_theta, *ctx.saved_tensors), None, None, None


library.impl("effective_weight", _forward, "CPU")
library.impl("effective_weight", _cuda_forward, "CUDA")
library.impl("effective_weight_gradients", _gradients, "CPU")
library.impl("effective_weight_gradients", _cuda_gradients, "CUDA")
torch.library.register_fake(
    "sparsecomp::effective_weight", lambda weight, *rest: weight.new_empty(weight.shape), lib=library
)
torch.library.register_fake("sparsecomp::effective_weight_gradients", _fake_gradients, lib=library)
torch.library.register_autograd("sparsecomp::effective_weight", _backward, setup_context=_save, lib=library)
torch.library.register_autograd(
    "sparsecomp::effective_weight_gradients", _backward_gradients, setup_context=_save_gradients, lib=library
)
