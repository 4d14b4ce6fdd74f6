"""Layers whose weights are pruned and resurrected, and the switch that makes them of a model's own layers.

The layers are torch's: their parameters keep names and identity, so that optimizers, tied weights and checkpoints stay
valid. Each has a `sparsecomp.runtime.masked_weight.MaskedWeight` beside each weight, and computes with what that calls
effective. Outside of a layer's own forward its ``weight`` is the parameter, as ever.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Self, cast

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from sparsecomp.errors import MaskError
from sparsecomp.runtime.masked_weight import MaskedWeight, Mode

Masked = dict[str, tuple[nn.Parameter, MaskedWeight]]
"""Weights and what is known of them, by the names of ``named_parameters``."""


class _OneWeight(nn.Module):
    """What layers with one weight share."""

    weight: Tensor
    masked: MaskedWeight

    @property
    def mode(self) -> Mode:
        """The weight's mode: DENSE, SPARSE or RESU."""
        return self.masked.mode

    def masked_weights(self) -> Masked:
        """The layer's weight, by its name."""
        return {"weight": (cast(nn.Parameter, self.weight), self.masked)}

    def train(self, mode: bool = True) -> Self:
        """As torch's; to be evaluated, pruned elements are zeroed in memory, for those who read it directly."""
        return _settled(super().train(mode), mode)


class RESULinear(_OneWeight, nn.Linear):
    """`torch.nn.Linear` with a weight that can be pruned and resurrected; takes the same arguments."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _adopt_one(self, {})

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.masked.effective(self.weight), self.bias)


class RESUConv2d(_OneWeight, nn.Conv2d):
    """`torch.nn.Conv2d` with a weight that can be pruned and resurrected; takes the same arguments."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _adopt_one(self, {})

    def forward(self, input: Tensor) -> Tensor:
        return self._conv_forward(input, self.masked.effective(self.weight), self.bias)


def _seen_through(name: str) -> Any:
    """A parameter that reads as its effective weight while the module's forward runs."""

    def get(self: Any) -> Any:
        parameters = self.__dict__["_parameters"]
        if name not in parameters:
            raise AttributeError(name)
        weight = parameters[name]
        return weight if weight is None or self.__dict__.get("_within") is None else self._within(name, weight)

    return property(get)


class _Projection(NonDynamicallyQuantizableLinear):
    weight = _seen_through("weight")


_PROJECTIONS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")


class RESUMultiheadAttention(nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention` whose projections can be pruned and resurrected; takes the same arguments.

    Attributes:
        masked: by the parameter's name, with ``out_proj`` for the output projection.
    """

    in_proj_weight = _seen_through("in_proj_weight")
    q_proj_weight = _seen_through("q_proj_weight")
    k_proj_weight = _seen_through("k_proj_weight")
    v_proj_weight = _seen_through("v_proj_weight")
    masked: nn.ModuleDict
    _within: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _adopt_attention(self, {})

    @property
    def mode(self) -> Mode:
        """The mode of the projections' weights, which change it together unless taken one by one; the latest."""
        return max(masked.mode for _, masked in self.masked_weights().values())

    def masked_weights(self) -> Masked:
        """The projections' weights, by their names in this module."""
        names = {"out_proj": "out_proj.weight"}
        own = dict(self.named_parameters())
        return {
            name: (own[name], cast(MaskedWeight, masked))
            for name, masked in ((names.get(key, key), masked) for key, masked in self.masked.items())
        }

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        projection: Any = self.out_proj
        self._within = self._effective
        projection._within = lambda _, weight: self._effective("out_proj", weight)
        try:
            return super().forward(*args, **kwargs)
        finally:
            self._within = projection._within = None

    def _effective(self, name: str, weight: Tensor) -> Tensor:
        return cast(MaskedWeight, self.masked[name]).effective(weight)

    def train(self, mode: bool = True) -> Self:
        """As torch's; to be evaluated, pruned elements are zeroed in memory, for fused kernels that read it."""
        return _settled(super().train(mode), mode)


def wrap_module(model: nn.Module, skip: Iterable[str] = ()) -> nn.Module:
    """Make prunable, in place, every `Linear`, `Conv2d` and `MultiheadAttention` of a model, and return the model.

    Parameters, hooks, device, dtype and training flag stay; only the classes change, and a mask is added to each
    weight. Modules of other classes, derived ones too, are left as they are. Weights that are tied share a mask; a
    module of another class that reads the same weight, such as an embedding, sees what the memory holds.

    Args:
        skip: names of modules (as in ``named_modules``) to leave dense, with what they contain.

    Raises:
        MaskError: a name of no module or of an attention's part, or a layer whose weight is computed from other
            parameters; the model is unchanged.
    """
    skip = tuple(skip)
    modules = dict(model.named_modules())
    unknown = [name for name in skip if name not in modules]
    if unknown:
        raise MaskError(f"skip names {', '.join(map(repr, unknown))}, which are no modules: see named_modules()")
    parts = [name for name in skip if isinstance(modules[name], NonDynamicallyQuantizableLinear)]
    if parts:
        raise MaskError(f"skip names {', '.join(parts)}, a part of an attention: skip the attention as a whole")
    known = {id(weight): masked for weight, masked in masked_weights(model).values()}
    taken = {
        name: module for name, module in modules.items()
        if type(module) in _ADOPT and not any(name == one or name.startswith(f"{one}.") for one in skip)
    }  # fmt: skip
    for name, module in taken.items():
        _check_own_weights(name, module)
    for module in taken.values():
        module.__class__ = _ADOPT[type(module)]
        adopt = _adopt_attention if isinstance(module, RESUMultiheadAttention) else _adopt_one
        adopt(module, known)
    return model


def masked_weights(model: nn.Module) -> Masked:
    """All weights of a model that can be pruned, by their names in it; a tied one once, by its first name."""
    found, seen = {}, set()
    for prefix, module in model.named_modules():
        if not isinstance(module, _OneWeight | RESUMultiheadAttention):
            continue
        for name, (weight, masked) in module.masked_weights().items():
            if id(weight) not in seen:
                seen.add(id(weight))
                found[f"{prefix}.{name}" if prefix else name] = (weight, masked)
    return found


def _settled(module: Any, training: bool) -> Any:
    if not training:
        for weight, masked in module.masked_weights().values():
            masked.apply_(weight)
    return module


def _guard_loading(module: nn.Module) -> None:
    """Refuse a bad mask before the weight is taken; settle what an optimizer left in pruned elements after."""
    module.register_load_state_dict_pre_hook(_check_before_load)
    module.register_load_state_dict_post_hook(_settle_after_load)


def _check_before_load(module: nn.Module, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
    for name, part in module.named_modules():
        if isinstance(part, MaskedWeight):
            part.check_state(state, f"{prefix}{name}.")


def _settle_after_load(module: Any, _: Any) -> None:
    _settled(module, module.training)


def _check_own_weights(name: str, module: nn.Module) -> None:
    own = dict(module.named_parameters())
    for weight in ("weight", *_PROJECTIONS, "out_proj.weight"):
        value: Any = module
        for part in weight.split("."):
            value = getattr(value, part, None)
        if isinstance(value, Tensor) and weight not in own:
            raise MaskError(
                f"{weight} of {name or 'the model'} is no parameter but computed from others, as by weight_norm or "
                "torch's pruning: make it one again (torch.nn.utils.prune.remove) or put the layer in skip"
            )


def _adopt_one(module: nn.Module, known: dict[int, MaskedWeight]) -> None:
    module.masked = _known(cast(Tensor, module.weight), known)
    _guard_loading(module)


def _adopt_attention(module: nn.Module, known: dict[int, MaskedWeight]) -> None:
    own = dict(module.named_parameters(recurse=False))
    projection = cast(nn.Linear, module.out_proj)
    found = {name: _known(own[name], known) for name in _PROJECTIONS if name in own}
    module.masked = nn.ModuleDict({**found, "out_proj": _known(projection.weight, known)})
    _guard_loading(module)
    projection.__class__ = _Projection


def _known(weight: Tensor, known: dict[int, MaskedWeight]) -> MaskedWeight:
    return known.setdefault(id(weight), MaskedWeight(weight))


_ADOPT: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: RESULinear, nn.Conv2d: RESUConv2d, nn.MultiheadAttention: RESUMultiheadAttention,
}  # fmt: skip
