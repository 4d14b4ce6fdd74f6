"""Tensors with memory on both sides that nobody may write to."""

import torch
from torch import Tensor


class Margins:
    """Copies of tensors on a device, each in the middle of memory of its own.

    Attributes:
        inner: the copies.
    """

    EDGE, MARK = 40, -77

    def __init__(self, tensors: "list[Tensor] | tuple[Tensor, ...]", device: str | torch.device) -> None:
        self._memories = [
            torch.full((one.numel() + 2 * self.EDGE,), self.MARK, dtype=one.dtype, device=device) for one in tensors
        ]
        self.inner = [memory[self.EDGE : -self.EDGE] for memory in self._memories]
        for inner, one in zip(self.inner, tensors, strict=True):
            inner.copy_(one)

    def are_untouched(self) -> bool:
        """Whether nothing beside the copies was written to."""
        edges = (edge for memory in self._memories for edge in (memory[: self.EDGE], memory[-self.EDGE :]))
        return all(bool((edge == self.MARK).all()) for edge in edges)
