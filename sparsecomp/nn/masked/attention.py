"""Attention whose projections are pruned and resurrected, on whichever of torch's paths it is computed.

Torch reads the projections' weights inside one function, or one fused kernel. So the weights themselves read as what is
effective, while the forward runs.
"""

from typing import Any, Self, cast

from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from sparsecomp.nn.masked.layer_state import Masked, guard_state, settled, shared_mask
from sparsecomp.nn.masked.masked_weight import MaskedWeight, Mode


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


PROJECTIONS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")


class RESUMultiheadAttention(nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention` whose projections can be pruned and resurrected; takes the same arguments.

    Attributes:
        masked: by the parameter's name, with `out_proj` for the output projection.
    """

    in_proj_weight = _seen_through("in_proj_weight")
    q_proj_weight = _seen_through("q_proj_weight")
    k_proj_weight = _seen_through("k_proj_weight")
    v_proj_weight = _seen_through("v_proj_weight")
    masked: nn.ModuleDict
    _within: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        adopt_attention(self, {})

    @property
    def mode(self) -> Mode:
        """The mode of the projections' weights, which change it together unless taken one by one; the latest."""
        return max(masked.mode for _, masked in self.masked_weights().values())

    def masked_weights(self) -> Masked:
        """The projections' weights, by their names in this module."""
        names = {"out_proj": "out_proj.weight"}
        own = dict(self.named_parameters(remove_duplicate=False))
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
        return settled(super().train(mode), mode)


def adopt_attention(module: nn.Module, known: dict[int, MaskedWeight]) -> None:
    """Give a RESUMultiheadAttention what it lacks after its class was changed; `known` as of `shared_mask`."""
    own = dict(module.named_parameters(recurse=False, remove_duplicate=False))
    projection = cast(nn.Linear, module.out_proj)
    found = {name: shared_mask(own[name], known) for name in PROJECTIONS if name in own}
    module.masked = nn.ModuleDict({**found, "out_proj": shared_mask(projection.weight, known)})
    guard_state(module)
    projection.__class__ = _Projection
