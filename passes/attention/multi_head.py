"""`F.multi_head_attention_forward`, which `nn.MultiheadAttention` and the layers of `nn.Transformer` call, written out.

Dynamo leaves it one call, in which no rule sees an attention with a mask. Written out as torch computes it, its
projections and `F.scaled_dot_product_attention` are calls like any other; the mask of padding keeps one row for all
heads of a sequence, which torch copies for each.
"""

import inspect
import logging
import operator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from sparsecomp import _compat
from sparsecomp.passes.attention.inserted import inserted
from sparsecomp.passes.attention.merged_masks import something_in_place
from sparsecomp.passes.attention.one_number import one_number
from sparsecomp.passes.graph.canonicalize import example_of, op_of

log = logging.getLogger("sparsecomp")
_SIGNATURE = inspect.signature(F.multi_head_attention_forward)
_LEFT = ("bias_k", "bias_v", "static_k", "static_v")


def write_out_masked_attention(gm: fx.GraphModule) -> None:
    """Write out the calls with a mask whose weights nobody reads; one that fails stays as it is."""
    calls = [node for node in gm.graph.nodes if node.target is F.multi_head_attention_forward]
    if not calls:
        return
    masks: dict[tuple[object, ...], fx.Node] = {}
    with _compat.autocast_followed() as follow:
        for node in list(gm.graph.nodes):
            follow(node)
            if node in calls:
                _try(node, masks)


def _try(node: fx.Node, masks: dict[tuple[object, ...], fx.Node]) -> None:
    before = node.prev
    try:
        given = _SIGNATURE.bind(*node.args, **node.kwargs)
        given.apply_defaults()
        attention = _Attention(node, given.arguments, masks)
        if attention.is_plain:
            attention.write_out()
    except Exception:
        log.warning("%s stays one call, since to write it out failed", node.name, exc_info=True)
        masks.clear()
        while node.prev is not before:
            node.graph.erase_node(node.prev)


def _dropped_by(mask: fx.Node, reader: fx.Node) -> fx.Node | None:
    """The booleans, True for what is dropped, by which a layer made a mask of -inf among zeros; None if it did not, or
    something may be written to before the mask is read."""
    example, op = example_of(mask), op_of(mask)
    if example.dtype is torch.bool:
        return mask
    if op is None or op.name != "masked_fill" or one_number(op.get("value")) != -torch.inf:
        return None
    zeros, dropped = op_of(op.input), op.get("mask")
    if zeros is None or zeros.name not in ("zeros", "zeros_like") or example_of(dropped).dtype is not torch.bool:
        return None
    alone = list(zeros.node.users) == [mask] and example_of(dropped).shape == example.shape
    return dropped if alone and not something_in_place(mask, reader) else None


class _Attention:
    """One call, with its arguments by name, and the masks that were made for others."""

    def __init__(self, node: fx.Node, given: dict[str, Any], masks: dict[tuple[object, ...], fx.Node]) -> None:
        self.node, self.given, self.masks = node, given, masks

    @property
    def is_plain(self) -> bool:
        """Whether it has a mask, nobody reads its weights, and it has none of the additions that few know."""
        g = self.given
        hinted = g["is_causal"] and not g["need_weights"]
        masked = g["key_padding_mask"] is not None or (g["attn_mask"] is not None and not hinted)
        few = not g["add_zero_attn"] and all(g[name] is None for name in _LEFT)
        if any("example_value" not in one.meta for one in (self.node, *self.node.all_input_nodes)):
            return False  # nothing says what it is given
        shapes = [example_of(g[name]).shape for name in ("query", "key", "value")]
        static = all(len(shape) == 3 and all(type(size) is int for size in shape) for shape in shapes)
        read = [user.args[1:] for user in self.node.users if user.target is operator.getitem]
        return masked and few and static and len(read) == len(self.node.users) and all(one == (0,) for one in read)

    def write_out(self) -> None:
        """Put other calls in the place of this one."""
        g, (tokens, batch, width) = self.given, example_of(self.given["query"]).shape
        heads, keys = g["num_heads"], example_of(g["key"]).shape[0]
        q, k, v = (
            self.then(Tensor.permute, self.then(Tensor.view, one, length, batch, heads, width // heads), (1, 2, 0, 3))
            for one, length in zip(self.projected(), (tokens, keys, keys), strict=True)
        )
        dropout = g["dropout_p"] if g["training"] else 0.0
        sizes = (batch, heads, tokens, keys)
        which = (g["key_padding_mask"], g["attn_mask"], example_of(g["query"]).dtype, g["need_weights"], *sizes)
        known = self.masks.get(which)
        mask = self.mask(*sizes) if known is None or something_in_place(known, self.node) else known
        self.masks[which] = mask
        by = self.by_weights if g["need_weights"] else partial(self.then, F.scaled_dot_product_attention)
        out = by(q, k, v, mask, dropout)
        out = self.then(Tensor.flatten, self.then(Tensor.permute, out, (2, 0, 1, 3)), 2)
        out = self.then(F.linear, out, g["out_proj_weight"], g["out_proj_bias"])
        right, found = self.node.meta["example_value"][0], example_of(out)
        if (found.shape, found.dtype) != (right.shape, right.dtype):
            raise AssertionError(f"{tuple(found.shape)} of {found.dtype}, not {tuple(right.shape)} of {right.dtype}")
        for user in list(self.node.users):
            user.replace_all_uses_with(out)
            self.node.graph.erase_node(user)
        self.node.graph.erase_node(self.node)

    def by_weights(self, q: fx.Node, k: fx.Node, v: fx.Node, mask: fx.Node, dropout: float) -> fx.Node:
        """As torch computes the result where weights are asked for: NaN of a query that keeps nothing."""
        scaled = self.then(torch.mul, q, example_of(q).shape[3] ** -0.5)
        scores = self.then(torch.add, self.then(torch.matmul, scaled, self.then(Tensor.transpose, k, -2, -1)), mask)
        weights = self.then(F.softmax, scores, dim=-1)
        return self.then(torch.matmul, self.then(F.dropout, weights, dropout) if dropout else weights, v)

    def projected(self) -> list[fx.Node]:
        """Queries, keys and values."""
        g, of_all = self.given, self.given["in_proj_weight"]
        given = [g[name] for name in ("query", "key", "value")]
        bias = g["in_proj_bias"]
        if not g["use_separate_proj_weight"] and given[0] is given[1] is given[2]:
            every = self.then(F.linear, given[0], of_all, bias)
            return self.thirds(every, -1)
        if g["use_separate_proj_weight"]:
            weights = [g[name] for name in ("q_proj_weight", "k_proj_weight", "v_proj_weight")]
        else:
            weights = self.thirds(of_all)
        biases = [None] * 3 if bias is None else self.thirds(bias)
        return [self.then(F.linear, *one) for one in zip(given, weights, biases, strict=True)]

    def thirds(self, one: fx.Node, dim: int = 0) -> list[fx.Node]:
        """Three equal parts."""
        parts = self.then(Tensor.chunk, one, 3, dim)
        return [self.then(operator.getitem, parts, place) for place in range(3)]

    def mask(self, batch: int, heads: int, tokens: int, keys: int) -> fx.Node:
        """What is added to the scores (batch, heads, tokens, keys), or which of them are kept."""
        padding, mask = self.given["key_padding_mask"], self.given["attn_mask"]
        given = [one for one in (padding, mask) if one is not None]
        dropped = [found for one in given if (found := _dropped_by(one, self.node)) is not None]
        booleans = len(dropped) == len(given) and not self.given["need_weights"]
        found = dropped if booleans else [self.numbers(one) for one in given]
        if padding is not None:
            found[0] = self.then(Tensor.reshape, found[0], batch, 1, 1, keys)
        if mask is not None:
            leading = (batch, heads) if example_of(mask).dim() == 3 else (1, 1)
            found[-1] = self.then(Tensor.reshape, found[-1], *leading, tokens, keys)
        joined = found[0] if len(found) == 1 else self.then(torch.logical_or if booleans else torch.add, *found)
        return self.then(torch.logical_not, joined) if booleans else joined

    def numbers(self, mask: fx.Node) -> fx.Node:
        """A mask whose booleans, True for what is dropped, are made numbers."""
        if example_of(mask).dtype is not torch.bool:
            return mask
        zeros = self.then(torch.zeros_like, mask, dtype=example_of(self.given["query"]).dtype)
        return self.then(Tensor.masked_fill, zeros, mask, -torch.inf)

    def then(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """The next call, with its example."""
        return inserted(self.node, target, *args, **kwargs)
