"""Attention and a block in the style of Longformer (Beltagy et al., 2020, section 3)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsecomp.attention.functional import attention
from sparsecomp.attention.pattern import AttentionPattern
from sparsecomp.attention.positions import GlobalTokens, LocalWindow
from sparsecomp.errors import ConfigError


class LongformerAttention(nn.Module):
    """A sliding window, and first tokens that attend to all, with projections of their own, and that all attend to.

    Args:
        embed_dim: features.
        num_heads: heads, which divide them.
        window: keys on each side of a query.
        global_tokens: first tokens that are global; 0 for none.
        dilation: of the window, as of `sparsecomp.attention.LocalWindow`.
        autoregressive: only keys up to the query's position; without global tokens.
        bias: of the projections.

    Raises:
        ConfigError: heads that do not divide the features, or autoregressive global tokens, which would see what is
            to come.
        PatternError: a window, tokens or dilation that cannot be.
    """

    def __init__(
        self, embed_dim: int, num_heads: int, window: int, global_tokens: int = 0, *, dilation: int = 1,
        autoregressive: bool = False, bias: bool = True, device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if num_heads < 1 or embed_dim % num_heads:
            raise ConfigError(f"num_heads is {num_heads}, needs a number that divides embed_dim, {embed_dim}")
        if autoregressive and global_tokens:
            raise ConfigError("global tokens attend to all that follows: leave them out, or autoregressive")
        self.num_heads, self.global_tokens = num_heads, global_tokens
        kept: AttentionPattern = LocalWindow(window, 0 if autoregressive else window, dilation)
        self.pattern = kept | GlobalTokens(global_tokens, as_queries=False) if global_tokens else kept
        self.local = nn.Linear(embed_dim, 3 * embed_dim, bias, device, dtype)
        self.all = nn.Linear(embed_dim, 3 * embed_dim, bias, device, dtype) if global_tokens else None
        self.out = nn.Linear(embed_dim, embed_dim, bias, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, embed_dim) to the same."""
        found = attention(*self._heads(self.local(x)), self.pattern)
        if self.all is not None:
            queries, keys, values = self._heads(self.all(x))
            first = F.scaled_dot_product_attention(queries[:, :, : self.global_tokens], keys, values)
            found = torch.cat((first, found[:, :, self.global_tokens :]), 2)
        return self.out(found.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        queries, keys, values = x.unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        return queries, keys, values

    def extra_repr(self) -> str:
        """Heads and pattern."""
        return f"heads={self.num_heads}, {self.pattern}"


class LongformerBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)).

    Args:
        embed_dim, num_heads, window, global_tokens, dilation, autoregressive: as of `LongformerAttention`.
        hidden: features within the MLP; four times `embed_dim` by default.
        dropout: of what is added to x.

    Raises:
        ConfigError, PatternError: as `LongformerAttention`.
    """

    def __init__(
        self, embed_dim: int, num_heads: int, window: int, global_tokens: int = 0, *, hidden: int | None = None,
        dilation: int = 1, autoregressive: bool = False, dropout: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        hidden = 4 * embed_dim if hidden is None else hidden
        self.norm1, self.norm2 = nn.LayerNorm(embed_dim), nn.LayerNorm(embed_dim)
        self.attention = LongformerAttention(
            embed_dim, num_heads, window, global_tokens, dilation=dilation, autoregressive=autoregressive
        )
        self.mlp = nn.Sequential(nn.Linear(embed_dim, hidden), nn.GELU(), nn.Linear(hidden, embed_dim))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, embed_dim) to the same."""
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))
