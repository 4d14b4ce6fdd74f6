"""Layers of a model put in place of others, wherever the model holds them, with what users added to them."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

from sparsecomp import _compat
from sparsecomp.attention.positions import causal
from sparsecomp.errors import InputError
from sparsecomp.formats import CSR
from sparsecomp.nn.attention.multihead import SparseMultiheadAttention
from sparsecomp.nn.masked.layers import RESUConv2d, RESULinear, RESUMultiheadAttention
from sparsecomp.nn.sparse.embedding import SparseEmbedding
from sparsecomp.nn.sparse.linear import SparseLinear


@cache
def _example(kind: type[nn.Module]) -> nn.Module:
    """A layer with nothing but what its class gives it."""
    if issubclass(kind, SparseLinear | SparseEmbedding):
        return kind(CSR.from_dense(torch.ones(1, 1, device="cpu")))
    if issubclass(kind, SparseMultiheadAttention):
        return kind(causal(), 1, 1, device="meta")
    return kind(*(1,) * _SIZES[kind], device="meta")


_SIZES: dict[type[nn.Module], int] = {
    nn.Linear: 2, nn.Embedding: 2, nn.Conv2d: 3, nn.MultiheadAttention: 2, RESULinear: 2, RESUConv2d: 3,
    RESUMultiheadAttention: 2,
}  # fmt: skip
"""How many sizes each is made with."""


def check_model(model: Any) -> None:
    """Raise InputError unless it is a module."""
    if not isinstance(model, nn.Module):
        raise InputError(f"model is a {type(model).__name__}, needs an nn.Module, such as nn.Sequential(layers)")


def replace_layers(model: nn.Module, new: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """Put new layers in place of old ones, in place, with what was added to those; the model, or what replaces it."""
    for old, layer in new.items():
        _carry(old, layer)
    for module in list(model.modules()):
        for name, child in _compat.children_of(module).items():
            if child in new:
                setattr(module, name, new[child])
    return new.get(model, model)


def refresh_pruned(layer: nn.Module) -> None:
    """Write what torch's pruning masks anew to the layer's attributes, as its hooks do before each forward."""
    for hook in _pruning(layer):
        hook(layer, ())


def end_pruning(layer: nn.Module) -> None:
    """Make what torch's pruning masks plain parameters again, with zeros."""
    for hook in _pruning(layer):
        prune.remove(layer, cast(Any, hook)._tensor_name)


def obstacle(layer: nn.Module, kind: type[nn.Module]) -> str:
    """What a layer would lose if one of this kind replaced it; empty where it is nothing."""
    example, extras = _example(kind), _extras(layer)
    taken = sorted(name for name in extras if hasattr(example, name) or _is_bound(layer, name))
    if taken:
        return f"its own {', '.join(taken)}, which a {kind.__name__} cannot have"
    parametrized = set(getattr(layer, "parametrizations", ())) - _usual(layer)
    if parametrized:
        return f"parametrizations of {', '.join(sorted(parametrized))}, which is no parameter of its class"
    pruned = {cast(Any, hook)._tensor_name for hook in _pruning(layer)}
    computed = [name for name in ("weight", "bias", "values") if isinstance(vars(layer).get(name), Tensor)]
    if not pruned.issuperset(computed):
        return f"a hook that computes its {', '.join(computed)}, as torch's old weight_norm does: remove it first"
    if any(not hook.__module__.startswith(_OURS) for hook in _compat.state_hooks_of(layer)):
        return "hooks on its state, whose names the replacement does not have"
    return ""


_OURS = ("sparsecomp.", "torch.nn.utils.")
"""Where hooks on a state come from that belong to what is replaced: masks and parametrizations."""


def told(reasons: Mapping[str, str]) -> str:
    """Reasons by the names of layers, as one sentence that gives each only once."""
    names: defaultdict[str, list[str]] = defaultdict(list)
    for name, reason in reasons.items():
        names[reason].append(name or "the model")
    return "; ".join(f"{', '.join(those)} ({reason})" for reason, those in names.items())


def _carry(old: nn.Module, new: nn.Module) -> None:
    """Give a layer what users added to the one that it replaces, and that one's hooks and mode."""
    new.train(old.training)
    for name in _extras(old):
        if name in old._parameters:
            new.register_parameter(name, old._parameters[name])
        elif name in old._buffers:
            new.register_buffer(name, old._buffers[name], persistent=_compat.is_persistent(old, name))
        elif name in old._modules:
            new.add_module(name, old._modules[name])
        else:
            setattr(new, name, vars(old)[name])
    usual = _usual(old)
    _compat.share_hooks(old, new, [hook for hook in _pruning(old) if cast(Any, hook)._tensor_name in usual])


def _usual(layer: nn.Module) -> set[str]:
    """Names of what the layer's class gives it."""
    return set(_compat.names_of(_example(parametrize.type_before_parametrizations(layer))))


def _extras(layer: nn.Module) -> list[str]:
    """Names of what was added to a layer; what pruning or parametrizations made of its own parameters is not."""
    usual = _usual(layer)
    made = {f"{name}_{part}" for name in usual for part in ("orig", "mask")} if _pruning(layer) else set()
    return [name for name in _compat.names_of(layer) if name not in usual | made | {"parametrizations"}]


def _is_bound(layer: nn.Module, name: str) -> bool:
    return getattr(vars(layer).get(name), "__self__", None) is layer


def _pruning(layer: nn.Module) -> Sequence[prune.BasePruningMethod]:
    return [hook for hook in _compat.hooks_of(layer) if isinstance(hook, prune.BasePruningMethod)]
