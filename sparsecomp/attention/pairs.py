"""Pairs of queries and keys, and ranges of them, as patterns are asked about them."""

from typing import NamedTuple

import torch
from torch import Tensor


class Pairs(NamedTuple):
    """Pairs of a query and a key.

    Attributes:
        batch, head, query, key: int64 tensors that broadcast to one another: whose they are, and their positions.
        lengths: numbers of queries and keys of the whole attention.
    """

    batch: Tensor
    head: Tensor
    query: Tensor
    key: Tensor
    lengths: tuple[int, int]


class Ranges(NamedTuple):
    """Ranges of queries and keys, first and last included; otherwise as `Pairs`."""

    batch: Tensor
    head: Tensor
    first_query: Tensor
    last_query: Tensor
    first_key: Tensor
    last_key: Tensor
    lengths: tuple[int, int]


class Bounds(NamedTuple):
    """Of ranges, bool tensors that broadcast to them.

    Attributes:
        some: False where surely no pair is kept.
        all: True where surely every pair is.
    """

    some: Tensor
    all: Tensor


def entry(number: Tensor, count: int) -> Tensor:
    """Which of `count` batch entries or heads: the number itself, or 0 where one stands for all."""
    return number if count > 1 else torch.zeros_like(number)
