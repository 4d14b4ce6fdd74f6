"""Who reads whom in the benchmarks: on square grids the nearest, or anyone."""

import math

import torch
from torch import Tensor

from sparsecomp.nn import build_geo_connectivity

PATTERNS = ("local", "random")


def radius_for(k: int) -> int:
    """Of the smallest square neighbourhood with k cells."""
    return (math.isqrt(k - 1) + 1) // 2


def index_of(n: int, k: int, pattern: str) -> Tensor:
    """(n, k), int32: the nearest of each neuron of a square grid, or inputs drawn from the whole grid."""
    if pattern == "random":
        return torch.randint(n, (n, k), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    side = math.isqrt(n)
    return build_geo_connectivity((side, n // side), k=k, radius=radius_for(k), device="cpu")
