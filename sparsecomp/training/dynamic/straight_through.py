"""Dense weights of which only the largest are computed with, chosen anew in each forward, while more of them learn.

The masked weight is a parametrization of torch's: any loop, optimizer, checkpoint and compiler takes it, processes with
the same weights choose the same, and a run goes on from the weights alone.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from sparsecomp.errors import ConfigError, MaskError
from sparsecomp.reference.selection import select_top
from sparsecomp.training.distributed import bare
from sparsecomp.training.pruning.layouts import NM, Unstructured
from sparsecomp.training.pruning.scores import n_of_m_mask

_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Exactly these: attention reads its projection's weight itself."""

Filter = Callable[[nn.Module, str], bool]


def sr_ste(
    model: nn.Module, config: NM | Unstructured, *, decay: float = 2e-4, filter: Filter | None = None
) -> list[str]:
    """Compute with the largest weights alone and give the gradient by them to all: SR-STE (Zhou et al. 2021).

        sr_ste(model, NM(2, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ...
        sparsecomp.sparsify(model, NM(2, 4))

    Args:
        model: whose linear and convolution layers are masked, in place; an optimizer that has their weights keeps them.
        config: `NM(2, 4)`, in groups along the inputs or input channels, or `Unstructured(0.9)`, of each layer; both by
            magnitude. Equal ones go to the lowest index, and NaN is the largest, so that a diverged weight is seen.
        decay: times a weight that is left out, added to its gradient; 0 is the plain straight-through estimator.
        filter: of a layer and its name, whether to take it; all by default.

    Returns:
        Names of the layers.

    Raises:
        ConfigError: a setting outside its domain, or no layer to take. The model is unchanged.
        MaskError: groups that do not divide a layer's inputs. The model is unchanged.
    """
    if not isinstance(config, NM | Unstructured) or config.by != "magnitude":
        raise ConfigError(f"config is {config!r}: give NM(2, 4) or Unstructured(0.9), which rank by magnitude")
    kept = _choices(layers := _layers(model, filter), config)
    return _register(layers, {name: ChosenWeight(one, None, 0.0, decay) for name, one in kept.items()})


def top_kast(
    model: nn.Module, config: Unstructured, backward: Unstructured, *, decay: float = 1e-4,
    filter: Filter | None = None,
) -> list[str]:  # fmt: skip
    """Compute with the largest weights alone (set A) and train these and the next ones (set B): Top-KAST (Jayakumar et
    al. 2020). What is in neither gets no gradient; an optimizer's momentum and decay may move it all the same.

    Args:
        model, filter: as of `sr_ste`.
        config: of A, such as `Unstructured(0.9)`.
        backward: of B, such as `Unstructured(0.8)`: no sparser than A in any layer.
        decay: λ of the exploration's L2 penalty: λ times a weight of A, and λ over A's density times another one of B,
            are added to their gradients.

    Returns, and raises, as `sr_ste`; ConfigError too where B has fewer weights than A.
    """
    for one in (config, backward):
        if not isinstance(one, Unstructured) or one.by != "magnitude":
            raise ConfigError(f"{one!r} is no set of weights: give Unstructured(0.9), which ranks by magnitude")
    layers = _layers(model, filter)
    kept, trained = _choices(layers, config), _choices(layers, backward)
    made = {}
    for name, layer in layers.items():
        size, few, more = layer.weight.numel(), kept[name].keep, trained[name].keep
        if more < few:
            raise ConfigError(f"{name or 'the layer'}: backward trains {more} weights, fewer than the {few} in use")
        made[name] = ChosenWeight(kept[name], trained[name], decay, decay * size / max(few, 1))
    return _register(layers, made)


class _OfGroups(NamedTuple):
    """The largest n of each m."""

    n: int
    m: int

    def __call__(self, scores: Tensor) -> Tensor:
        return n_of_m_mask(scores, self.n, self.m, refuse_nan=False)


class _OfLayer(NamedTuple):
    """The largest of a layer."""

    keep: int

    def __call__(self, scores: Tensor) -> Tensor:
        return select_top(scores.flatten(), self.keep).view(scores.shape)


class ChosenWeight(nn.Module):
    """A parametrization: the weight where it is chosen, 0 elsewhere; which see a gradient, and what is added to it.

    Args:
        kept: the mask of magnitudes that are computed with.
        trained: that of those that get a gradient; None for all.
        kept_decay, decay: times the kept weights, and the other trained ones, added to their gradients.
    """

    def __init__(
        self, kept: Callable[[Tensor], Tensor], trained: Callable[[Tensor], Tensor] | None, kept_decay: float,
        decay: float,
    ) -> None:  # fmt: skip
        super().__init__()
        for given in (kept_decay, decay):
            if not given >= 0:
                raise ConfigError(f"decay is {given}: it is 0 or more")
        self.kept, self.trained, self.kept_decay, self.decay = kept, trained, kept_decay, decay

    def forward(self, weight: Tensor) -> Tensor:
        """Of the weight's shape."""
        scores = weight.detach().abs().nan_to_num(nan=torch.inf)
        kept = self.kept(scores)
        trained = torch.ones_like(kept) if self.trained is None else self.trained(scores)
        return _Chosen.apply(weight, kept, trained, self.kept_decay, self.decay)  # pyright: ignore[reportReturnType]


class _Chosen(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(weight: Tensor, kept: Tensor, *_: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return torch.where(kept, weight, 0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        weight, kept, trained, ctx.kept_decay, ctx.decay = inputs
        ctx.save_for_backward(weight, kept, trained)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        weight, kept, trained = ctx.saved_tensors
        decayed = torch.where(kept, weight * ctx.kept_decay, weight * ctx.decay)
        return torch.where(trained, grad + decayed, 0), None, None, None, None


def _layers(model: nn.Module, filter: Filter | None) -> dict[str, Any]:
    found = {
        name: layer for name, layer in bare(model).named_modules()
        if type(layer) in _LAYERS and (filter is None or filter(layer, name))
    }  # fmt: skip
    if not found:
        raise ConfigError("the model has no plain linear or convolution layer to mask, or the filter takes none")
    return found


def _choices(layers: dict[str, Any], config: NM | Unstructured) -> dict[str, Any]:
    """What each layer keeps."""
    if isinstance(config, NM):
        for name, layer in layers.items():
            if layer.weight.shape[1] % config.m:
                raise MaskError(f"{name or 'the layer'}: groups of {config.m} do not divide {layer.weight.shape[1]} "
                                "input channels; a filter can leave the layer out")  # fmt: skip
        return dict.fromkeys(layers, _OfGroups(config.n, config.m))
    sizes = {name: layer.weight.numel() for name, layer in layers.items()}
    shared = config.shared({name: layer.weight.shape for name, layer in layers.items()})
    return {name: _OfLayer(size - round(shared[name].sparsity * size)) for name, size in sizes.items()}


def _register(layers: dict[str, Any], made: dict[str, ChosenWeight]) -> list[str]:
    for name, layer in layers.items():
        parametrize.register_parametrization(layer, "weight", made[name])
    return list(layers)
