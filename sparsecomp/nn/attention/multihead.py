"""`torch.nn.MultiheadAttention` whose queries attend to the keys of a pattern."""

from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsecomp.attention.functional import attention
from sparsecomp.attention.pattern import AttentionPattern, pattern_of
from sparsecomp.errors import PatternError


class SparseMultiheadAttention(nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention` by the mask of a pattern, with its parameters and its state_dict.

    Where nothing is asked for but the result, only pairs that the pattern keeps are computed, in blocks. Weights that
    are asked for, masks that come on top, dropout in training, `add_bias_kv` and `add_zero_attn` are computed as torch
    does, over all pairs by the pattern's mask. A query that keeps nothing gives what a value of zeros would; with
    weights, NaN, as torch does.

    Args:
        pattern: which keys each query attends to; it may tell heads apart, and batch entries.
        embed_dim, num_heads, settings: as of `torch.nn.MultiheadAttention`.

    Raises:
        PatternError: no pattern, or one of another number of heads.
    """

    def __init__(self, pattern: AttentionPattern, embed_dim: int, num_heads: int, *args: Any, **settings: Any) -> None:
        super().__init__(embed_dim, num_heads, *args, **settings)
        self._follow(pattern)

    @classmethod
    def from_attention(cls, layer: nn.MultiheadAttention, pattern: AttentionPattern) -> Self:
        """A layer of torch's with a pattern; the parameters are the same ones.

        Raises:
            PatternError: no pattern, or one of another number of heads.
        """
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        own = {"_parameters": dict(layer._parameters), "_modules": dict(layer._modules)}
        made.__dict__.update({**layer.__dict__, **own})
        made._follow(pattern)
        return made

    def _follow(self, pattern: AttentionPattern) -> None:
        if pattern_of(pattern).sizes[1] not in (1, self.num_heads):
            raise PatternError(f"the pattern tells {pattern.sizes[1]} heads apart, the layer has {self.num_heads}")
        self.pattern = pattern
        # a TransformerEncoderLayer that reads True computes attention itself in evaluation, and over all pairs
        self._qkv_same_embed_dim = False

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None,
        need_weights: bool = False, attn_mask: Tensor | None = None, average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """As `torch.nn.MultiheadAttention.forward`, but weights are not given unless they are asked for.

        Args:
            query: (batch, q_len, embed_dim) where `batch_first`, else (q_len, batch, embed_dim); or without batch.
            key, value: the same of k_len, with `kdim` and `vdim` features.
            key_padding_mask: (batch, k_len), True or -inf where a key is left out.
            attn_mask: (q_len, k_len) or (batch · heads, q_len, k_len), True or -inf where a pair is left out, beside
                those that the pattern leaves out.

        Returns:
            The result, shaped as `query`, and the weights, if they are asked for.

        Raises:
            PatternError: the pattern is for other lengths.
            MaskError: the pattern tells other numbers of batch entries apart.
        """
        given = key_padding_mask is not None or attn_mask is not None or is_causal or need_weights
        if given or (self.training and self.dropout > 0) or self.bias_k is not None or self.add_zero_attn:
            masks = (key_padding_mask, attn_mask)
            return self._over_all_pairs(query, key, value, *masks, need_weights, average_attn_weights, is_causal)
        turned = self.batch_first or query.dim() == 2
        q, k, v = (self._heads(one if turned else one.transpose(0, 1)) for one in self._projected(query, key, value))
        found = attention(q, k, v, self.pattern).transpose(1, 2).flatten(2)
        if query.dim() == 2:
            found = found.squeeze(0)
        return self.out_proj(found if turned else found.transpose(0, 1)), None

    def _heads(self, x: Tensor) -> Tensor:
        """(batch, heads, length, depth) of (batch, length, features), or of one without batch."""
        return (x if x.dim() == 3 else x.unsqueeze(0)).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        packed = self.in_proj_weight  # read once: of a layer that is pruned each reading computes what is effective
        if packed is not None and query is key and key is value:
            return F.linear(query, packed, self.in_proj_bias).chunk(3, -1)
        weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight) if packed is None else packed.chunk(3)
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        return tuple(F.linear(*one) for one in zip((query, key, value), weights, biases, strict=True))

    def _over_all_pairs(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None, attn_mask: Tensor | None,
        need_weights: bool, average_attn_weights: bool, is_causal: bool,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        turned = self.batch_first and query.dim() == 3
        q, k, v = (one.transpose(0, 1) if turned else one for one in (query, key, value))
        if attn_mask is not None or not is_causal:  # without a mask the hint is an error, which torch raises
            attn_mask, is_causal = self._masked(attn_mask, q, k), False
        out, weights = F.multi_head_attention_forward(
            q, k, v, self.embed_dim, self.num_heads, self.in_proj_weight, self.in_proj_bias, self.bias_k, self.bias_v,
            self.add_zero_attn, self.dropout, self.out_proj.weight, self.out_proj.bias, training=self.training,
            key_padding_mask=key_padding_mask, need_weights=need_weights, attn_mask=attn_mask, is_causal=is_causal,
            use_separate_proj_weight=self.in_proj_weight is None, q_proj_weight=self.q_proj_weight,
            k_proj_weight=self.k_proj_weight, v_proj_weight=self.v_proj_weight,
            average_attn_weights=average_attn_weights,
        )  # fmt: skip
        return (out.transpose(0, 1) if turned else out), weights

    def _masked(self, attn_mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor:
        """What is left out: by the pattern, and by a mask of the caller's."""
        dropped = ~self.pattern.kept_mask(len(query), len(key), query.device)
        if dropped.shape[:2] == (1, 1):
            dropped = dropped[0, 0]
        else:
            batch = query.shape[1] if query.dim() == 3 else 1
            dropped = dropped.expand(batch, self.num_heads, -1, -1).flatten(0, 1)
        if attn_mask is None:
            return dropped
        if attn_mask.dtype is torch.bool:
            return attn_mask | dropped
        return attn_mask.masked_fill(dropped, -torch.inf)

    def extra_repr(self) -> str:
        """The pattern."""
        return f"{self.pattern}"
