"""The one registration of `torch.ops.sparsecomp`; each operator file defines its own operators in it.

A call of a registered operator passes torch's dispatcher twice, for autograd and for the device, which costs the host
more than many a kernel costs the GPU. In a compiled graph neither has anything left to decide, so each implementation
also stands at its operator, where generated code calls it: `torch.ops.sparsecomp.lif.default.direct_cuda`.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from itertools import islice
from typing import Any

import torch
from torch.utils._pytree import tree_map

from sparsecomp import _compat
from sparsecomp.ops.forward_mode import forward_mode


class _Library(torch.library.Library):
    """A library whose implementations can be called past the dispatcher."""

    def impl(self, op_name: Any, fn: Callable[..., Any], dispatch_key: str = "", **kwargs: Any) -> None:
        if dispatch_key == "Autograd":
            fn = forward_mode(getattr(torch.ops.sparsecomp, op_name).default, fn, kwargs.get("with_keyset", False))
        super().impl(op_name, fn, dispatch_key, **kwargs)
        if dispatch_key in ("CPU", "CUDA"):
            overload = getattr(torch.ops.sparsecomp, op_name).default
            setattr(overload, f"direct_{dispatch_key.lower()}", fn)
            if TAGS[1] in overload.tags:
                DIRECT.add(overload)


DIRECT: set[Any] = set()
"""Overloads that a compiled graph may call past the dispatcher: those whose tags say how their operands must lie."""
KEPT: set[Any] = set()
"""Overloads that give the same memory again in another call: a compiled graph must not use it for something else."""
ON_SPIKES: set[Any] = set()
"""Overloads whose first argument is spikes, at full width or as bytes, and whose last says whether to keep it."""
_DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {}
library = _Library("sparsecomp", "DEF")

_OWN = (torch.Tensor, torch.nn.Parameter)

TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
"""Of an operator whose implementation relies on the strides that its fake gives, or that it was traced with."""


def implement(
    name: str, cpu: Callable[..., Any], cuda: Callable[..., Any] | None = None, fake: Callable[..., Any] | None = None
) -> None:
    """Give an operator its implementations; the CPU's is also what is not given."""
    library.impl(name, cpu, "CPU")
    library.impl(name, cuda or cpu, "CUDA")
    torch.library.register_fake(f"sparsecomp::{name}", fake or cpu, lib=library)


def decompose(name: str, decomposition: Callable[..., Any]) -> None:
    """Say what Inductor makes of an operator."""
    _DECOMPOSITIONS[getattr(torch.ops.sparsecomp, name).default] = decomposition


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Decompositions for Inductor: op overload to function of fake or proxy tensors."""
    return dict(_DECOMPOSITIONS)


def differentiable(name: str, backward: Callable[..., Any], setup_context: Callable[..., None]) -> None:
    """Give an operator a gradient, as `torch.library.register_autograd` does, that transforms of torch.func take too.

    Args:
        name: of an operator of this library.
        backward, setup_context: as of `torch.library.register_autograd`; gradients of a list of tensors are a list.
    """
    overload = getattr(torch.ops.sparsecomp, name).default

    def forward(*flat: Any) -> Any:
        *leaves, lengths = flat
        with _compat.below_autograd():
            return overload(*_grouped(leaves, lengths))

    def recording(*flat: Any) -> Any:
        with _compat.next_level() if _compat.inside_transform() else nullcontext():
            return forward(*flat)

    def remember(ctx: Any, inputs: Any, output: Any) -> None:
        *leaves, ctx.lengths = inputs
        setup_context(ctx, _grouped(leaves, ctx.lengths), output)

    def gradients(ctx: Any, *grads: Any) -> Any:
        found = backward(_Wanting(ctx, _grouped(ctx.needs_input_grad[:-1], ctx.lengths)), *grads)
        found = found if isinstance(found, tuple) else (found,)
        return *_leaves(found, [isinstance(one, list) for one in found]), None

    members = {"forward": staticmethod(recording), "setup_context": staticmethod(remember)}
    function: Any = type(f"{name}_", (_compat.OneLevelFunction,), {**members, "backward": staticmethod(gradients)})

    def recorded(*args: Any) -> Any:
        if torch.is_grad_enabled():
            lists = [_holds_tensors(arg) for arg in args]
            leaves = _leaves(args, lists)
            if any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves):
                lengths = tuple(len(arg) if is_list else None for arg, is_list in zip(args, lists, strict=True))
                # within a transform the dispatcher has come here for one of its levels
                with _compat.one_level() if _compat.inside_transform() else nullcontext():
                    return function.apply(*leaves, lengths)
        with _compat.below_autograd():
            return overload(*args)

    library.impl(name, recorded, "Autograd")
    torch.library.register_vmap(overload, _each_alone(overload), lib=library)


def call_at_once(overload: Any, *arguments: Any) -> Any:
    """overload(*arguments), at less host time where the dispatcher has nothing to decide: nobody looks on, no argument
    wants a gradient, and all tensors are torch's own.

    Args:
        arguments: a tensor first.
    """
    if not _compat.plain_eager() or _compat.calls_are_told():
        return overload(*arguments)
    records = torch.is_grad_enabled()
    for argument in arguments:
        if isinstance(argument, torch.Tensor) and (type(argument) not in _OWN or (records and argument.requires_grad)):
            return overload(*arguments)
    return getattr(overload, f"direct_{arguments[0].device.type}", overload)(*arguments)


def _holds_tensors(value: object) -> bool:
    """Whether an argument is a list of tensors, whose gradients torch wants one by one."""
    return isinstance(value, list) and any(isinstance(item, torch.Tensor) for item in value)


def _leaves(values: Sequence[Any], lists: Sequence[bool]) -> list[Any]:
    """The values, of those that are lists each item."""
    return [leaf for value, is_list in zip(values, lists, strict=True) for leaf in (value if is_list else (value,))]


def _grouped(leaves: Iterable[Any], lengths: Sequence[int | None]) -> list[Any]:
    """The values whose `_leaves` these are, from the lengths of those that are lists, None of others."""
    rest = iter(leaves)
    return [next(rest) if length is None else list(islice(rest, length)) for length in lengths]


class _Wanting:
    """A context whose `needs_input_grad` is by argument, not by tensor."""

    def __init__(self, ctx: Any, wanted: Any) -> None:
        self._ctx, self.needs_input_grad = ctx, wanted

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)


def _each_alone(overload: Any) -> Callable[..., Any]:
    """The rule of vmap that calls the operator once an item."""

    def rule(info: Any, in_dims: Any, *args: Any) -> Any:
        outs = []
        for item in range(info.batch_size):
            outs.append(overload(*(_item(arg, dim, item) for arg, dim in zip(args, in_dims, strict=True))))
        return tree_map(lambda *items: torch.stack(items), *outs), tree_map(lambda _: 0, outs[0])

    return rule


def _item(arg: Any, dim: Any, item: int) -> Any:
    """One item of a batched argument, or of each in a list."""
    if isinstance(arg, torch.Tensor):
        return arg if dim is None else arg.select(dim, item)
    return [_item(one, its, item) for one, its in zip(arg, dim, strict=True)] if isinstance(arg, list) else arg
