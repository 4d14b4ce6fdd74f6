"""A residual block of two layers of fixed fan-in."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sparsecomp.errors import ConfigError
from sparsecomp.nn.local.activations import activation_of
from sparsecomp.nn.local.config import NORMS, check_number, check_probability
from sparsecomp.nn.local.linear import GeoSparseLinear


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
        return x + self.alpha * self.drop_path(self.fc2(self.act(self.fc1(self.norm(x)))))


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
        if not self.training or not self.probability:
            return x
        kept = 1 - self.probability
        return x * x.new_empty(x.shape[:1] + (1,) * (x.dim() - 1)).bernoulli_(kept).div_(kept)

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
