"""Effective weights that a model writes in plain torch, trained as `sparsecomp.ops.effective_weight`.

People write M * W + (1 - M) * Phi(theta) in many ways, by masks and by lists of positions. A way is not recognised by
its operators but tried: it is linear in the weight and in theta, so that where it gives the effective weight of random
numbers it gives that of all. The masks and positions it reads are buffers: what was proved of them is kept as a folded
weight is, where the caller promised that they stay. Without a promise, or where it no longer holds, the operators
compute what was written.
"""

import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from sparsecomp import _compat
from sparsecomp.ops.library import TAGS, implement, library
from sparsecomp.ops.masked.effective_weight import (
    fits_kernels,
    merge_at,
    merge_by,
    pruned_positions,
    ranks_of,
    split_at,
    split_by,
)
from sparsecomp.ops.masked.folded_weight import computed, formula, named, named_formula
from sparsecomp.reference.memo import MEMO, Keep

log = logging.getLogger("sparsecomp")

library.define(
    "merged_weight(Tensor weight, Tensor theta, Tensor[] selectors, str formula, str keep) -> Tensor", tags=TAGS
)
library.define(
    "merged_weight_grads(Tensor grad, SymInt[] theta, Tensor[] selectors, str formula, str keep, bool active, "
    "bool rest) -> (Tensor, Tensor)",
    tags=TAGS,
)
_PROBES = 4
"""Sets of random numbers. Two numbers of a set are the same bfloat16 in one case of a hundred."""
_FORMS: dict[str, "MergedForm"] = {}
"""What a formula that was proved, by its name, is given."""


class MergedForm(NamedTuple):
    """What a formula is given beside its selectors: tensors of one dtype on one device.

    Attributes:
        weight, theta: shapes.
    """

    weight: tuple[int, ...]
    theta: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def merging(
    gm: fx.GraphModule, form: MergedForm, selectors: list[Tensor], keep: Keep, names: Sequence[object] = ()
) -> str | None:
    """A name for the function `(weight, theta, *selectors)` that a graph computes; None unless it is the effective
    weight now.

    Args:
        gm: without attributes, pure, and linear in both of the first arguments.
        form: what they are like.
        selectors: what it reads else.
        keep: when what is proved of them is kept.
        names: of the selectors, for an error.

    Returns:
        What `merged_weight` is to be given as `formula`.
    """
    name = named_formula(f"{formula(gm)} of {form}", gm.forward)
    _FORMS[name] = form
    return name if MEMO.prepare(Proof(name), selectors, keep, names).dim() else None


def merged_weight(
    weight: Tensor, theta: Tensor, selectors: list[Tensor], formula: str, keep: Keep = "asked"
) -> Tensor:
    """What a formula gives, in one pass where it is the effective weight of `weight` and `theta`.

    Args:
        weight, theta, selectors: as the formula was proved with.
        formula: from `merging`.
        keep: as was given there.

    Returns:
        Of the weight's shape and dtype. Gradients flow to weight and theta.

    Raises:
        FormatError: an unknown formula.
    """
    return torch.ops.sparsecomp.merged_weight.default(weight, theta, selectors, formula, keep)


class Proof(NamedTuple):
    """What a formula's selectors prove of it."""

    formula: str

    def __call__(self, *selectors: Tensor) -> Tensor:
        return _proved(named(self.formula), _FORMS[self.formula], selectors)


def _proved(function: Callable[..., Tensor], form: MergedForm, selectors: tuple[Tensor, ...]) -> Tensor:
    """The mask of which a function is the effective weight, as the kernel reads it on CUDA, else its positions; 0-d if
    it is none."""
    factory: dict[str, Any] = {"dtype": form.dtype, "device": form.device}
    random = torch.Generator(form.device).manual_seed(0)
    nothing = torch.empty((), device=form.device)
    mask = function(torch.ones(form.weight, **factory), torch.zeros(form.theta, **factory), *selectors) == 1
    if mask.numel() - int(mask.sum()) != torch.Size(form.theta).numel():
        return nothing
    by_kernel = form.device.type == "cuda" and fits_kernels(torch.empty(form.weight, dtype=form.dtype, device="meta"))
    pruned = ranks_of(mask) if by_kernel else pruned_positions(mask)
    for _ in range(_PROBES):
        weight, theta = (torch.randn(shape, generator=random, **factory) for shape in (form.weight, form.theta))
        if not torch.equal(function(weight, theta, *selectors), _merge_pruned(weight, theta, pruned)):
            return nothing
    return pruned


def _merge_pruned(weight: Tensor, theta: Tensor, pruned: Tensor) -> Tensor:
    # called as functions: operators within operators would take the host as long again
    merge = merge_at if pruned.dim() == 1 else merge_by
    return merge(weight, theta.reshape(-1), pruned)


def _pruned(selectors: list[Tensor], name: str, keep: Keep) -> Tensor | None:
    """What `_proved` found for what the selectors hold; None if the formula is to be computed as it was written."""
    proof = MEMO.kept(Proof(name), selectors, keep)
    if proof is None or proof.dim():
        return proof
    tell_once(name)
    return None


@cache
def tell_once(name: str) -> None:
    log.warning("masks and positions of a merged weight do not fit together: it is computed as written (%s)", name)


def _merge(weight: Tensor, theta: Tensor, selectors: list[Tensor], formula: str, keep: Keep) -> Tensor:
    pruned = _pruned(selectors, formula, keep)
    if pruned is None:
        return computed([weight, theta, *selectors], formula).clone(memory_format=torch.contiguous_format)
    return _merge_pruned(weight, theta, pruned)


def _grads(
    grad: Tensor, theta: list[int], selectors: list[Tensor], formula: str, keep: Keep, active: bool, rest: bool
) -> tuple[Tensor, Tensor]:
    pruned = _pruned(selectors, formula, keep)
    if pruned is None:
        return _grads_as_written(grad, theta, selectors, formula, active, rest)
    if pruned.dim() == 1:
        whole, vector = split_at(grad, pruned, active, rest)
    else:
        whole, vector = split_by(grad, pruned, torch.Size(theta).numel(), active, rest)
    return whole, vector.view(theta) if rest else vector


def _grads_as_written(
    grad: Tensor, theta: list[int], selectors: list[Tensor], formula: str, active: bool, rest: bool
) -> tuple[Tensor, Tensor]:
    with _compat.above_autograd():
        inputs = torch.zeros_like(grad, requires_grad=active), grad.new_zeros(theta).requires_grad_(rest)
        out = named(formula)(*inputs, *selectors)
        wanted = [one for one in inputs if one.requires_grad]
        found = list(torch.autograd.grad(out, wanted, grad, materialize_grads=True))
    nothing = grad.new_empty(0)
    whole, vector = found.pop(0) if active else nothing, found.pop(0) if rest else nothing
    return whole.clone(memory_format=torch.contiguous_format), vector.clone(memory_format=torch.contiguous_format)


def _fake_merge(weight: Tensor, theta: Tensor, selectors: list[Tensor], formula: str, keep: Keep) -> Tensor:
    return weight.new_empty(weight.shape)


def _fake_grads(
    grad: Tensor, theta: list[int], selectors: list[Tensor], formula: str, keep: Keep, active: bool, rest: bool
) -> tuple[Tensor, Tensor]:
    return grad.new_empty(grad.shape if active else (0,)), grad.new_empty(theta if rest else (0,))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, theta, selectors, ctx.formula, ctx.keep = inputs
    ctx.theta = theta.shape
    ctx.save_for_backward(*selectors)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    active, rest = ctx.needs_input_grad[:2]
    of_weight, of_theta = torch.ops.sparsecomp.merged_weight_grads.default(
        grad, ctx.theta, list(ctx.saved_tensors), ctx.formula, ctx.keep, active, rest
    )
    return of_weight if active else None, of_theta if rest else None, [None] * len(ctx.saved_tensors), None, None


implement("merged_weight", _merge, fake=_fake_merge)
implement("merged_weight_grads", _grads, fake=_fake_grads)
torch.library.register_autograd("sparsecomp::merged_weight", _backward, setup_context=_save, lib=library)
