"""The settings of a network on a grid, checked where they are given."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from sparsecomp.errors import ConfigError, typed_arguments
from sparsecomp.nn.local.activations import activation_of
from sparsecomp.nn.local.linear import COMPUTE_MODES
from sparsecomp.reference.local.connectivity import check_grid

NORMS = ("rms", "layer", "none")
Shape = tuple[int, int]


@typed_arguments(ConfigError)
@dataclass(frozen=True)
class GeoSparseConfig:
    """Settings of `GeoSparseNet`.

    Args:
        shape: (H, W) of the grid, or one for each block; between blocks of different grids features are resampled.
        depth: blocks.
        k, pattern, radius, offsets, wrap_mode, seed: of `build_geo_connectivity`; a block is a layer of the seed.
        activation_type: "relu", "tanh", "gelu", "psann" or "phase_psann".
        activation_config: keywords of the two sines.
        norm: in front of each block: "rms", "layer" or "none".
        drop_path_max: probability in [0, 1) with which the last block is left out in training; earlier ones linearly
            less, the first never.
        residual_alpha_init: what a block's sum is scaled by at the start. At exactly 0 the block's weights get no first
            gradient, so it is near 0 by default.
        bias: of the sparse layers.
        compute_mode: of `GeoSparseLinear`.
        input_shape: (H, W) of the data where it is a grid of another size, which is resampled; otherwise data of
            another size than the first grid goes through a dense layer.

    Raises:
        ConfigError: a setting is unknown, of another type or outside its domain.
    """

    shape: Shape | Sequence[Shape]
    depth: int = 4
    k: int = 8
    pattern: str = "local"
    radius: int = 1
    offsets: Sequence[tuple[int, int]] | None = None
    wrap_mode: str = "clamp"
    activation_type: str = "psann"
    activation_config: Mapping[str, Any] | None = None
    norm: str = "rms"
    drop_path_max: float = 0.0
    residual_alpha_init: float = 0.01
    bias: bool = True
    compute_mode: str = "compiled"
    seed: int | None = None
    input_shape: Shape | None = None

    def __post_init__(self) -> None:
        if type(self.depth) is not int or self.depth < 1:
            raise ConfigError(f"depth is {self.depth!r}, needs a whole number of 1 or more")
        if not self.grids or len(self.grids) != self.depth:
            raise ConfigError(f"shape has {len(self.grids)} grids, depth is {self.depth}: give (H, W), or one a block")
        if self.input_shape is not None:
            check_grid(self.input_shape)
        for name, known in (("norm", NORMS), ("compute_mode", COMPUTE_MODES)):
            if getattr(self, name) not in known:
                raise ConfigError(f"{name} is {getattr(self, name)!r}, needs one of {', '.join(known)}")
        check_probability("drop_path_max", self.drop_path_max)
        check_number("residual_alpha_init", self.residual_alpha_init)
        activation_of(self.activation_type, 1, self.activation_config)

    @property
    def grids(self) -> list[Shape]:
        """(H, W) of each block."""
        shape = self.shape
        if isinstance(shape, Sequence) and shape and all(isinstance(one, Sequence) for one in shape):
            return [check_grid(one) for one in shape]
        return [check_grid(cast(Any, shape))] * self.depth


def check_probability(name: str, given: Any) -> None:
    """Raise ConfigError unless it lies in [0, 1)."""
    check_number(name, given)
    if not 0 <= given < 1:
        raise ConfigError(f"{name} is {given}, needs a number from 0 to below 1")


def check_number(name: str, given: Any) -> None:
    """Raise ConfigError unless it is a finite number."""
    if isinstance(given, bool) or not isinstance(given, int | float) or not math.isfinite(given):
        raise ConfigError(f"{name} is {given!r}, needs a finite number")
