"""Layers whose weight is masked, in every spelling of it that people use."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SHAPES = {"linear": (384, 352), "conv2d": (128, 128, 3, 3)}
INPUTS = {"linear": (3, 5, 352), "conv2d": (2, 128, 5, 4)}


class Masked(nn.Module):
    """A layer whose weight a test gives."""

    def __init__(
        self, effective: Callable[[Any], Tensor], layer: str = "linear", values: Any = None, shape: Any = None
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        shape = shape or SHAPES[layer]
        mask = torch.rand(shape, generator=generator) > 0.7
        self.weight = nn.Parameter(torch.randn(shape, generator=generator))
        self.phi = nn.Parameter(torch.randn(shape, generator=generator))
        self.theta = nn.Parameter(torch.randn(int((~mask).sum()), generator=generator))
        self.bias = nn.Parameter(torch.randn(shape[0], generator=generator))
        self.register_buffer("mask", mask)
        self.register_buffer("numbers", mask.float() if values is None else torch.where(mask, *values))
        self.register_buffer("index", (~mask).flatten().nonzero()[:, 0])
        self.register_buffer("places", (~mask).nonzero().t().contiguous())
        self.effective, self.layer = effective, layer

    def forward(self, x: Tensor) -> Tensor:
        weight = self.effective(self)
        return F.linear(x, weight, self.bias) if self.layer == "linear" else F.conv2d(x, weight, self.bias, padding=1)


def by_setitem(m: Any) -> Tensor:
    weight = m.weight.clone()
    weight[~m.mask] = m.theta
    return weight


def by_view(m: Any) -> Tensor:
    weight = torch.zeros_like(m.weight)
    weight.view(-1)[m.index] = m.theta
    return m.mask * m.weight + weight


def by_diagonal(m: Any) -> Tensor:
    weight = m.mask * m.weight
    weight.diagonal().mul_(2)
    return weight


SPELLINGS: dict[str, Callable[[Any], Tensor]] = {
    "mask * weight": lambda m: m.mask * m.weight,
    "numbers * weight": lambda m: m.numbers * m.weight,
    "weight * mask.float()": lambda m: m.weight * m.mask.float(),
    "mul method": lambda m: m.weight.mul(m.mask.to(m.weight.dtype)),
    "blend": lambda m: m.numbers * m.weight + (1 - m.numbers) * m.phi,
    "blend, inverted": lambda m: m.mask * m.weight + ~m.mask * m.phi,
    "where": lambda m: torch.where(m.mask, m.weight, 0),
    "where phi": lambda m: torch.where(m.mask, m.weight, m.phi),
    "where not": lambda m: torch.where(~m.mask, 0.0, m.weight),
    "where of numbers": lambda m: torch.where(m.numbers > 0.5, m.weight, m.phi),
    "masked_fill": lambda m: m.weight.masked_fill(~m.mask, 0),
    "masked_scatter": lambda m: m.weight.masked_scatter(~m.mask, m.theta),
    "index_put": lambda m: m.weight.index_put(tuple(m.places), m.theta),
    "scatter": lambda m: m.weight.flatten().scatter(0, m.index, m.theta).view_as(m.weight),
    "index_copy": lambda m: m.weight.flatten().index_copy(0, m.index, m.theta).view(m.weight.shape),
    "setitem": by_setitem,
    "setitem of a view": by_view,
    "diagonal in place": by_diagonal,
    "in place": lambda m: m.weight.clone().mul_(m.mask),
    "by scores": lambda m: m.weight * (m.phi.sigmoid() > 0.5),
    "by blocks": lambda m: m.weight * m.mask[::2].repeat_interleave(2, 0),
    "moved": lambda m: (m.weight.movedim(0, 1) * m.mask.movedim(0, 1)).movedim(1, 0).contiguous(),
    "twice": lambda m: m.weight * m.mask * (m.weight.abs() > 0.1),
}
FACTORS = ("weight", "theta", "phi", "bias")
