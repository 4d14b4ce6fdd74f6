"""How many parameters networks on a grid have, by formula, and the dense network that has as many."""

import math
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

from torch import nn

from sparsecomp.errors import ConfigError
from sparsecomp.nn.local.activations import activation_of
from sparsecomp.nn.local.block import norm_of
from sparsecomp.nn.local.config import GeoSparseConfig


def count_params(model: nn.Module, *, trainable_only: bool = False) -> int:
    """Elements of a model's parameters, or of those that take a gradient."""
    return sum(one.numel() for one in model.parameters() if one.requires_grad or not trainable_only)


def sparse_linear_params(out_features: int, k: int, *, bias: bool = True) -> int:
    """Parameters of `GeoSparseLinear`."""
    return out_features * (k + bias)


def dense_linear_params(in_features: int, out_features: int, *, bias: bool = True) -> int:
    """Parameters of `torch.nn.Linear`."""
    return out_features * (in_features + bias)


def geo_sparse_block_params(
    features: int, k: int, *, bias: bool = True, norm: str = "rms", activation_type: str = "psann",
    activation_config: Mapping[str, Any] | None = None,
) -> int:  # fmt: skip
    """Parameters of `GeoSparseResidualBlock`: two layers, the norm's, the activation's, and alpha."""
    beside = count_params(norm_of(norm, 1)) + count_params(activation_of(activation_type, 1, activation_config))
    return 2 * sparse_linear_params(features, k, bias=bias) + beside * features + 1


def geo_sparse_net_params(*, output_dim: int, input_dim: int | None = None, **settings: Any) -> int:
    """Parameters of `GeoSparseNet`.

    Args:
        output_dim: features of the result.
        input_dim: features of the data; None means as many as the first grid has cells.
        settings: of `GeoSparseConfig`.

    Raises:
        ConfigError: a setting is unknown, of another type or outside its domain.
    """
    config = GeoSparseConfig(**settings)
    cells = [height * width for height, width in config.grids]
    kind = {"activation_type": config.activation_type, "activation_config": config.activation_config}
    blocks = (geo_sparse_block_params(one, config.k, bias=config.bias, norm=config.norm, **kind) for one in cells)
    projected = config.input_shape is None and input_dim not in (None, cells[0])
    entry = dense_linear_params(input_dim or 0, cells[0]) if projected else 0
    return entry + sum(blocks) + dense_linear_params(cells[-1], output_dim)


def dense_mlp_params(*, input_dim: int, output_dim: int, hidden_dim: int, depth: int, bias: bool = True) -> int:
    """Parameters of a dense network of `depth` hidden layers of one width."""
    sizes = [input_dim, *[hidden_dim] * depth, output_dim]
    return sum(dense_linear_params(*pair, bias=bias) for pair in pairwise(sizes))


def match_dense_width(
    *, target_params: int, input_dim: int, output_dim: int, depth: int, bias: bool = True
) -> tuple[int, int]:
    """The width at which a dense network of this depth comes nearest to a number of parameters, and how many it is off.

    Raises:
        ConfigError: a number that is not positive.
    """
    sizes = {"target_params": target_params, "input_dim": input_dim, "output_dim": output_dim, "depth": depth}
    for name, size in sizes.items():
        if size < 1:
            raise ConfigError(f"{name} is {size}, needs 1 or more")
    # parameters are square · w² + linear · w + constant, and grow with w
    square, linear = depth - 1, input_dim + output_dim + bias * depth
    missing = max(target_params - bias * output_dim, 0)
    root = (math.sqrt(linear * linear + 4 * square * missing) - linear) / (2 * square) if square else missing / linear

    def failing(width: int) -> int:
        given = {"input_dim": input_dim, "output_dim": output_dim, "depth": depth, "bias": bias}
        return abs(dense_mlp_params(hidden_dim=width, **given) - target_params)

    width = min((max(int(root), 1), int(root) + 1), key=failing)
    return width, failing(width)


class DenseMatch(NamedTuple):
    """The dense network that comes nearest to a number of parameters."""

    width: int
    depth: int
    parameters: int
    mismatch: float
    """By which share of the wanted number it fails."""
    matches: bool
    """Whether that is within the tolerance."""

    def __str__(self) -> str:
        says = "match" if self.matches else "no match; the nearest"
        size = f"{self.depth} hidden layers of {self.width}, {self.parameters:,} parameters"
        return f"{says}: {size}, {self.mismatch:.2%} off"


def match_dense(
    target_params: int, input_dim: int, output_dim: int, *, depths: Iterable[int] = range(1, 9), bias: bool = True,
    tolerance: float = 0.01,
) -> DenseMatch:  # fmt: skip
    """The dense network, of these depths and any width, whose number of parameters is nearest.

    Raises:
        ConfigError: a number that is not positive.
    """
    sizes = {"input_dim": input_dim, "output_dim": output_dim, "bias": bias}
    tried = [(*match_dense_width(target_params=target_params, depth=depth, **sizes), depth) for depth in depths]
    width, failing, depth = min(tried, key=lambda one: (one[1], one[2]))
    parameters = dense_mlp_params(hidden_dim=width, depth=depth, **sizes)
    share = failing / target_params
    return DenseMatch(width, depth, parameters, share, share <= tolerance)
