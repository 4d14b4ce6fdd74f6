"""A residual block of two layers of fixed fan-in.

On a GPU it is one operator as long as its parts are those it was made with, and have no hooks: those would not run.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sparsecomp import _compat
from sparsecomp.errors import ConfigError
from sparsecomp.nn.local.activations import PhaseSineParam, SineParam, activation_of
from sparsecomp.nn.local.config import NORMS, check_number, check_probability
from sparsecomp.nn.local.linear import GeoSparseLinear
from sparsecomp.ops.local.residual_block import residual_block
from sparsecomp.reference.precision import KERNEL_DTYPES, accumulator

_NORMS: dict[type[nn.Module], str] = {nn.RMSNorm: "rms", nn.LayerNorm: "layer", nn.Identity: "none"}
_PLAIN: dict[type[nn.Module], str] = {nn.ReLU: "relu", nn.Tanh: "tanh", nn.GELU: "gelu"}


class GeoSparseResidualBlock(nn.Module):
    """x + alpha · DropPath(fc2(act(fc1(norm(x))))), where both layers read the same inputs.

    Args:
        features: size of the last axis.
        in_index_per_out: (features, k), of both layers.
        activation_type, activation_config: see `activation_of`.
        norm: "rms", "layer" or "none".
        drop_path: probability with which a sample goes past the block in training.
        residual_alpha_init: alpha, which is learned, at the start. At exactly 0 no weight of the block gets a first
            gradient.
        bias, compute_mode: of the layers.

    Raises:
        ConfigError, FormatError: arguments that do not fit.
    """

    def __init__(
        self, features: int, in_index_per_out: Tensor, *, activation_type: str = "psann",
        activation_config: Mapping[str, Any] | None = None, norm: str = "rms", drop_path: float = 0.0,
        residual_alpha_init: float = 0.01, bias: bool = True, compute_mode: str = "compiled",
    ) -> None:  # fmt: skip
        super().__init__()
        check_number("residual_alpha_init", residual_alpha_init)
        self.norm = norm_of(norm, features)
        self.fc1 = GeoSparseLinear(features, features, in_index_per_out, bias=bias, compute_mode=compute_mode)
        self.act = activation_of(activation_type, features, activation_config)
        self.fc2 = GeoSparseLinear(features, features, in_index_per_out, bias=bias, compute_mode=compute_mode)
        self.drop_path = DropPath(drop_path)
        self.alpha = nn.Parameter(torch.tensor([float(residual_alpha_init)]))

    def forward(self, x: Tensor) -> Tensor:
        """(..., features) to the same."""
        if self.is_one_operator(x):
            return self._at_once(x)
        return x + self.alpha * self.drop_path(self.fc2(self.act(self.fc1(self.norm(x)))))

    def is_one_operator(self, x: Tensor) -> bool:
        """Whether the operator gives what the parts would, result dtype and hooks included."""
        layers = self.fc1, self.fc2
        return (
            x.is_cuda and x.dim() > 1 and x.shape[-1] == self.fc1.in_features and x.dtype in KERNEL_DTYPES
            and (x.dtype is torch.float32 or not torch.is_autocast_enabled("cuda"))
            and all(type(one) is GeoSparseLinear and one.compute_mode == "compiled" for one in layers)
            and all(one.dtype is x.dtype for one in (self.alpha, self.fc1.weight, self.fc2.weight))
            and type(self.norm) in _NORMS and type(self.drop_path) is DropPath and _word_of(self.act) is not None
            and not any(_compat.hooks_of(part) for part in (self.norm, *layers, self.act, self.drop_path))
        )  # fmt: skip

    def _at_once(self, x: Tensor) -> Tensor:
        (first, first_index), (second, second_index) = (
            ([one for one in (layer.weight, layer.bias) if one is not None], [layer.in_index_per_out, *layer.lists()])
            for layer in (self.fc1, self.fc2)
        )
        norm, act, factor = self.norm, self.act, self.drop_path.factor(x)
        operands = [one for one in (getattr(norm, "weight", None), getattr(norm, "bias", None)) if one is not None]
        eps = getattr(norm, "eps", 0.0)
        return residual_block(
            x, first, second, self.alpha if factor is None else self.alpha * factor, first_index, second_index,
            norm=operands, kind=_NORMS[type(norm)],
            eps=torch.finfo(accumulator(x.dtype)).eps if eps is None else eps,
            sine=act.shape() if isinstance(act, SineParam) else (),
            activation=_word_of(act) or "",
            spread=self.fc1.spread,
        )  # fmt: skip


def _word_of(activation: nn.Module) -> str | None:
    """The operator's word for it; None if it has none."""
    if type(activation) in (SineParam, PhaseSineParam):
        return f"sine_{activation.decay_mode}"
    return _PLAIN.get(type(activation)) if getattr(activation, "approximate", "none") == "none" else None


class DropPath(nn.Module):
    """In training, zero for each sample (a place of the first axis) with a probability, and scaled up otherwise.

    Raises:
        ConfigError: the probability is outside [0, 1).
    """

    def __init__(self, probability: float) -> None:
        super().__init__()
        check_probability("drop_path", probability)
        self.probability = probability

    def forward(self, x: Tensor) -> Tensor:
        """Any shape."""
        factor = self.factor(x)
        return x if factor is None else x * factor

    def factor(self, x: Tensor) -> Tensor | None:
        """What each sample is multiplied by in this call, drawn anew: (x.shape[0], 1, ..., 1); None if by nothing."""
        if not self.training or not self.probability:
            return None
        kept = 1 - self.probability
        return x.new_empty(x.shape[:1] + (1,) * (x.dim() - 1)).bernoulli_(kept).div_(kept)

    def extra_repr(self) -> str:
        """The probability, for print."""
        return f"{self.probability}"


def norm_of(kind: str, features: int) -> nn.Module:
    """A normalisation by name.

    Raises:
        ConfigError: an unknown name.
    """
    if kind not in NORMS:
        raise ConfigError(f"norm is {kind!r}, needs one of {', '.join(NORMS)}")
    return {"rms": nn.RMSNorm, "layer": nn.LayerNorm}[kind](features) if kind != "none" else nn.Identity()
