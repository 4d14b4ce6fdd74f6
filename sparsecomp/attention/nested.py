"""Nested tensors of torch (`torch.nested`, layout jagged) as packed attention takes them: the values of all sequences,
one behind another, and the offsets at which each begins."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsecomp.errors import FormatError


class Jagged(NamedTuple):
    """A nested tensor.

    Attributes:
        packed: (tokens, heads, depth).
        offsets: (sequences + 1,), as the tensor has them.
        tokens_at: its dimension of tokens: 1 of (batch, tokens, heads, depth), 2 of (batch, heads, tokens, depth).
        tokens: its size of tokens, which is another for any other offsets.
    """

    packed: Tensor
    offsets: Tensor
    tokens_at: int
    tokens: Any

    @classmethod
    def of(cls, tensor: Tensor) -> "Jagged":
        """Of a nested tensor of either order; differentiable.

        Raises:
            FormatError: another layout or order, or one with holes between its sequences.
        """
        nested: Any = tensor
        jagged = tensor.is_nested and tensor.layout is torch.jagged
        if not jagged or tensor.dim() != 4 or nested.lengths() is not None:
            told = f"{tensor.dim()} dimensions, nested: {tensor.is_nested}, layout {tensor.layout}"
            raise FormatError(
                f"an operand has {told}: beside a nested one each needs to be nested, in the layout torch.jagged and"
                " without holes, of (batch, tokens, heads, depth) or (batch, heads, tokens, depth)"
            )
        values, offsets = tensor.values(), nested.offsets()
        tokens_at = 1 if type(tensor.shape[1]) is not int else 2
        packed = values if tokens_at == 1 else values.transpose(0, 1)
        return cls(packed, offsets, tokens_at, tensor.shape[tokens_at])

    def nested(self, packed: Tensor) -> Tensor:
        """A result (tokens, heads, depth) as a tensor that is nested alike."""
        if self.tokens_at == 1:
            return torch.nested.nested_tensor_from_jagged(packed, self.offsets)
        return torch.nested.nested_tensor_from_jagged(packed.transpose(0, 1), self.offsets, jagged_dim=2)

