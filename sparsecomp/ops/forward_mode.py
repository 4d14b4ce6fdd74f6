"""Forward-mode derivatives (`torch.func.jvp`, `jacfwd`, `hessian`) of operators that have a backward only.

torch drops the tangents of such an operator without a word. A backward is linear in the gradient it is given, so the
derivative of that map, taken backward once more, is the Jacobian times a tangent: any operator whose backward can be
differentiated by its gradient has its forward mode by that.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from sparsecomp import _compat


def forward_mode(operator: Callable[..., Any], kernel: Callable[..., Any], with_keyset: bool) -> Callable[..., Any]:
    """`kernel`, an implementation of an operator for autograd, taught what tangents mean.

    Args:
        with_keyset: the kernel's first argument is the dispatcher's and not the operator's.
    """

    def dispatched(*args: Any, **kwargs: Any) -> Any:
        if _compat.inside_forward_mode():
            given, spec = tree_flatten((args[1:] if with_keyset else args, kwargs))
            duals = [cast(Any, forward_ad).unpack_dual(leaf, level=0) if _is_dense(leaf) else None for leaf in given]
            places = [place for place, dual in enumerate(duals) if dual is not None and dual.tangent is not None]
            if places:
                # or Dynamo would trace what the operator calls, in the midst of the transform
                push = cast(Any, torch.compiler.disable)(_pushed)
                return push(operator, given, spec, {place: duals[place] for place in places})
        return kernel(*args, **kwargs)

    return dispatched


def _is_dense(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _pushed(operator: Callable[..., Any], given: list[Any], spec: Any, duals: dict[int, Any]) -> Any:
    """The operator's result, with tangents; `duals` are the arguments that have some, by their places in `given`."""
    records, tangents = torch.is_grad_enabled(), [dual.tangent for dual in duals.values()]
    with torch.enable_grad():
        primals = [dual.primal for dual in duals.values()]
        points = [primal if primal.requires_grad else _compat.leaf_of(primal) for primal in primals]
        for place, point in zip(duals, points, strict=True):
            given[place] = point
        args, kwargs = tree_unflatten(given, spec)
        return tree_map(lambda out: _dual(out, points, tangents, records), operator(*args, **kwargs))


def _dual(out: Tensor, points: list[Tensor], tangents: list[Tensor], records: bool) -> Tensor:
    if not out.requires_grad:
        return out
    cotangent = _compat.leaf_of(torch.zeros_like(out))
    pulled = torch.autograd.grad(out, points, cotangent, create_graph=True, materialize_grads=True)
    (tangent,) = torch.autograd.grad(pulled, cotangent, tangents, create_graph=records, materialize_grads=True)
    primal = out if records else out.detach()
    return forward_ad.make_dual(primal, tangent if records else tangent.detach(), level=0)
