"""One verb for a whole model: its linear layers become sparse ones."""

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from sparsecomp.errors import FormatError, InputError, MaskError
from sparsecomp.nn.masked.existing_mask import bias_of, is_trained
from sparsecomp.nn.masked.layers import RESULinear
from sparsecomp.nn.sparse.linear import SparseLinear
from sparsecomp.training.pruning.calibration import Statistics, TokenMask, calibrate
from sparsecomp.training.pruning.layouts import Pruning
from sparsecomp.training.replacement import check_model, obstacle, replace_layers, told

Filter = Callable[[nn.Module, str], bool]

_TAKEN = (nn.Linear, RESULinear)
"""Exactly these: a derived class may compute something else, and attention reads its projection's weight itself."""


def sparsify(
    model: nn.Module,
    config: Pruning,
    *,
    filter: Filter | None = None,
    batches: Iterable[Any] | None = None,
    forward: Callable[[Any], Any] | None = None,
    token_mask: TokenMask | None = None,
) -> nn.Module:
    """Prune a model's linear layers and store their weights sparse, in place.

    Hooks around forward and backward, and what was added to a layer (attributes, parameters, buffers, modules), go over
    to its replacement, with its bias; the gradient and the hooks of its old weight do not. Handles remove hooks from
    both, but where torch pruned the layer from the old one only. A layer of which something would be lost, such as a
    forward of its own, and one that is sparse already stay as they are, and a warning says so.

    Args:
        model: whose `nn.Linear` and RESU linear layers are replaced by `sparsecomp.nn.SparseLinear`; its own layers
            are left unchanged. Layers of an `nn.MultiheadAttention` stay.
        config: `Unstructured(0.9)`, `NM(2, 4)`, `Block(16, 0.8)` or `FromMask()`, for masks and zeros that are there.
        filter: of a layer (one that is sparse already, too) and its name in the model, whether to take it: True or
            False. All by default.
        batches: inputs of the model, for pruners that rank by what reaches a layer (wanda, sparsegpt).
        forward: runs the model on one of them; by default `model(batch)`.
        token_mask: of a batch, a bool tensor that is False at padding.

    Returns:
        The model, or its replacement where it is itself such a layer.

    Raises:
        InputError: `model` is no module, `filter` or `batches` not what they should be, or the model takes no batch.
        MaskError: no layer is taken, a taken layer shares its weight with another, the pruner needs batches, or a
            layer's weight cannot be ranked. The model is unchanged.
        FormatError: a layer's sizes do not fit the config, or it is on the meta device. The model is unchanged.
    """
    check_model(model)
    if isinstance(config, type) or not isinstance(config, Pruning):
        raise MaskError(
            f"config is {config!r}: give one such as Unstructured(0.9), NM(2, 4), Block(16, 0.8) or FromMask()"
        )
    layers, kept = _layers(model, filter)
    _check_unshared(model, layers)
    statistics = _statistics(model, layers, config, batches, forward or _called(model), token_mask)
    with torch.inference_mode(False), torch.no_grad():
        found = _sparse(layers, config, statistics)
    kept |= {name: f"too few zeros for {config}" for name, layer in layers.items() if layer not in found}
    if kept:
        warnings.warn(f"sparsify leaves layers as they are: {told(kept)}", stacklevel=2)
    return replace_layers(model, found)


def _sparse(layers: Mapping[str, nn.Linear], config: Pruning, statistics: Statistics) -> dict[nn.Module, nn.Module]:
    """Sparse layers by what they are to replace, without those that the config leaves dense."""
    found: dict[nn.Module, nn.Module] = {}
    configs = config.shared({name: layer.weight.shape for name, layer in layers.items()})
    for name, layer in layers.items():
        try:
            matrix = configs[name].matrix(layer, statistics.get(name, ()))
        except (FormatError, MaskError) as error:
            raise type(error)(f"{name or 'the layer'}: {error}; a filter can leave the layer out") from error
        if matrix is not None and isinstance(getattr(layer, "bias_mask", None), Tensor):
            warnings.warn(
                f"the mask of {name or 'the layer'}'s bias is applied once, here: in training its zeros move",
                stacklevel=3,
            )
        if matrix is not None:
            found[layer] = SparseLinear(matrix, bias_of(layer), is_trained(layer))
    return found


def _layers(model: nn.Module, filter: Filter | None) -> tuple[dict[str, nn.Linear], dict[str, str]]:
    """What is to be made sparse, and why others that the filter takes are not, by their names."""
    if not (filter is None or callable(filter)):
        raise InputError(f"filter is {filter!r}, needs a function of a layer and its name")
    linear = {name: one for name, one in model.named_modules() if _is_linear(one)}
    sparse = {name: one for name, one in model.named_modules() if isinstance(one, SparseLinear)}
    layers = {name: layer for name, layer in linear.items() if _is_chosen(filter, layer, name)}
    done = {name: _DONE for name, layer in sparse.items() if _is_chosen(filter, layer, name)}
    if not layers and not done:
        if not sparse:
            names = ", ".join(name or "the model itself" for name in list(linear)[:5])
            raise MaskError(
                f"the filter takes none of the model's linear layers, such as {names}" if linear else
                "the model has no nn.Linear, the one kind of layer that sparsify stores sparse"
            )  # fmt: skip
        done = dict.fromkeys(sparse, _DONE)
    kept = {name: why for name, layer in layers.items() if (why := obstacle(layer, SparseLinear))}
    for name, layer in layers.items():
        if layer.weight.is_meta:
            raise FormatError(f"{name or 'the layer'} is on the meta device, which has no numbers: load it elsewhere")
    return {name: cast(nn.Linear, one) for name, one in layers.items() if name not in kept}, done | kept


_DONE = "sparse already, and pruned anew only after densify(model)"


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and parametrize.type_before_parametrizations(module) in _TAKEN


def _is_chosen(filter: Filter | None, layer: nn.Module, name: str) -> bool:
    chosen = filter is None or filter(layer, name)
    if not isinstance(chosen, bool):
        raise InputError(f"filter gave {chosen!r} for {name!r}, needs True or False: write bool(…) around it")
    return chosen


def _check_unshared(model: nn.Module, layers: Mapping[str, nn.Linear]) -> None:
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(name)
    for name, layer in layers.items():
        others = [one for one in owners.get(id(layer.weight), []) if one != name]
        if others:
            raise MaskError(
                f"{name} shares its weight with {', '.join(others)}, which a sparse copy would end: "
                "leave it out by a filter, or untie them"
            )


def _called(model: nn.Module) -> Callable[[Any], Any]:
    """`model(batch)`, whose failure on a batch of several parts, as data loaders give them, says how to pick one."""

    def call(batch: Any) -> Any:
        try:
            return model(batch)
        except Exception as error:
            if not isinstance(batch, list | tuple | Mapping):
                raise
            way = "model(**batch)" if isinstance(batch, Mapping) else "model(batch[0])"
            raise InputError(
                f"a batch is a {type(batch).__name__}, and model(batch) fails: {type(error).__name__}: {error}; say "
                f"how to run the model on one, such as forward=lambda batch: {way}"
            ) from error

    return call


def _statistics(
    model: nn.Module, layers: Mapping[str, nn.Linear], config: Pruning, batches: Iterable[Any] | None,
    forward: Callable[[Any], Any], token_mask: TokenMask | None,
) -> Statistics:  # fmt: skip
    pruner = config.pruner
    if not pruner.calibrated:
        return {}
    if batches is None:
        raise MaskError(f"{type(pruner).__name__} ranks by what reaches a layer: give batches=, inputs of the model")
    weights: dict[str, Tensor] = {name: layer.weight for name, layer in layers.items()}
    if not (hasattr(batches, "__iter__") or hasattr(batches, "__getitem__")):
        raise InputError(f"batches is a {type(batches).__name__}, needs inputs of the model, one after another")
    statistics = calibrate(model, batches, forward, token_mask, pruner.products, weights)
    unseen = sorted(weights.keys() - statistics.keys())
    if unseen:
        raise MaskError(
            f"no batch reached {', '.join(unseen)} (or their weights are computed in each call, as by torch's pruning: "
            "prune.remove ends that): give batches that do, or leave them out by a filter"
        )
    return statistics
