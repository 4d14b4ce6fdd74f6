"""A network of residual blocks whose neurons sit on grids."""

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from sparsecomp.errors import ConfigError, FormatError
from sparsecomp.nn.local.block import GeoSparseResidualBlock
from sparsecomp.nn.local.config import GeoSparseConfig, Shape
from sparsecomp.nn.local.linear import GeoSparseLinear
from sparsecomp.reference.local.connectivity import build_geo_connectivity


class GeoSparseNet(nn.Module):
    """Residual blocks of fixed fan-in on (H, W) grids, and a dense head.

    Args:
        input_dim: features of the data. As many as the first grid has cells are taken as that grid, row by row;
            otherwise they are resampled (`input_shape`) or go through a dense layer.
        output_dim: features of the result.
        config: the settings; or give them as keywords.

    Raises:
        ConfigError: a setting is unknown, of another type or outside its domain.
    """

    def __init__(
        self, input_dim: int, output_dim: int, config: GeoSparseConfig | None = None, **settings: Any
    ) -> None:
        super().__init__()
        if config is not None and settings:
            raise ConfigError(f"config and {', '.join(settings)} are given: change the config instead")
        for name, size in (("input_dim", input_dim), ("output_dim", output_dim)):
            if type(size) is not int or size < 1:
                raise ConfigError(f"{name} is {size!r}, needs a whole number of 1 or more")
        self.config = config = GeoSparseConfig(**settings) if config is None else config
        self.input_dim, self.output_dim = input_dim, output_dim
        grids = config.grids
        self.entry = _entry(input_dim, config.input_shape, grids[0])
        self.resample = nn.ModuleList(
            nn.Identity() if one == other else GridResample(one, other)
            for one, other in zip([grids[0], *grids], grids, strict=False)
        )
        self.blocks = nn.ModuleList(_block(config, layer) for layer in range(config.depth))
        self.head = nn.Linear(_cells(grids[-1]), output_dim)

    def forward(self, x: Tensor) -> Tensor:
        """(..., input_dim) to (..., output_dim).

        Raises:
            FormatError: x has another number of features.
        """
        if x.shape[-1:] != (self.input_dim,):
            raise FormatError(f"x has shape {tuple(x.shape)}, needs (..., {self.input_dim})")
        x = self.entry(x)
        for resample, block in zip(self.resample, self.blocks, strict=True):
            x = block(resample(x))
        return self.head(x)


    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """`torch.nn.Module.load_state_dict` of a checkpoint with the same pattern; see `adopt_patterns`.

        Raises:
            CheckpointError: it has another pattern; nothing was changed.
        """
        for name, layer in self.named_modules():
            if isinstance(layer, GeoSparseLinear):
                layer.pattern_of(state_dict, f"{name}.")
        return super().load_state_dict(state_dict, strict, assign)


class GridResample(nn.Module):
    """(..., H · W) to (..., H' · W'): each new cell is the mean of the old ones that it covers, whole or in part."""

    def __init__(self, before: Shape, after: Shape) -> None:
        super().__init__()
        self.before, self.after = before, after

    def forward(self, x: Tensor) -> Tensor:
        """Features of the old grid, row by row, to those of the new one."""
        samples = x.reshape(x.shape[:-1].numel(), 1, *self.before)
        return F.adaptive_avg_pool2d(samples, self.after).view(*x.shape[:-1], _cells(self.after))

    def extra_repr(self) -> str:
        """Both grids, for print."""
        return f"{self.before}, {self.after}"


def _entry(input_dim: int, input_shape: Shape | None, grid: Shape) -> nn.Module:
    if input_shape is not None:
        if _cells(input_shape) != input_dim:
            raise ConfigError(f"input_shape is {input_shape}, input_dim {input_dim}: H · W must be input_dim")
        return nn.Identity() if tuple(input_shape) == grid else GridResample(input_shape, grid)
    return nn.Identity() if input_dim == _cells(grid) else nn.Linear(input_dim, _cells(grid))


def _block(config: GeoSparseConfig, layer: int) -> GeoSparseResidualBlock:
    grid = config.grids[layer]
    index = build_geo_connectivity(
        grid, k=config.k, pattern=config.pattern, radius=config.radius, offsets=config.offsets,
        wrap_mode=config.wrap_mode, seed=config.seed, layer=layer,
    )  # fmt: skip
    return GeoSparseResidualBlock(
        _cells(grid), index, activation_type=config.activation_type, activation_config=config.activation_config,
        norm=config.norm, drop_path=config.drop_path_max * layer / max(config.depth - 1, 1),
        residual_alpha_init=config.residual_alpha_init, bias=config.bias, compute_mode=config.compute_mode,
    )  # fmt: skip


def _cells(grid: Shape) -> int:
    return grid[0] * grid[1]
