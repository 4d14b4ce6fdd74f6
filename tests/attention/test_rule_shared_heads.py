"""Heads of keys that several heads of queries share: one for all of them, or in five dimensions one for each group."""

import math
from collections.abc import Callable

import attention_models as models
import pytest
import torch
import torch.nn.functional as F
from test_rule_block_attention import judged
from torch import Tensor

BATCH, GROUPS, EACH, TOKENS, DEPTH = 2, 2, 3, 70, 8
Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def grouped(q: Tensor) -> Tensor:
    return q.unflatten(1, (GROUPS, EACH))


def by_einsum(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    scores = torch.einsum("btkd,bskgd->bkgst", k.transpose(1, 2), grouped(q).permute(0, 3, 1, 2, 4)) * 0.3
    weights = scores.masked_fill(~m, -math.inf).softmax(-1)
    return torch.einsum("bkgst,bktd->bskgd", weights, v).flatten(2, 3).transpose(1, 2)


def by_products(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    scores = torch.where(m, grouped(q) @ k[:, :, None].mT * 0.3, -math.inf)
    return (scores.softmax(-1) @ v[:, :, None]).flatten(1, 2)


ATTENDS: dict[str, Attend] = {
    "one for all": lambda q, k, v, m: F.scaled_dot_product_attention(q, k[:, :1], v[:, 1:], m),
    "one for all by hand": lambda q, k, v, m: (q @ k[:, :1].mT).masked_fill(~m, -math.inf).softmax(-1) @ v[:, 1:],
    "groups": lambda q, k, v, m: F.scaled_dot_product_attention(
        grouped(q), k[:, :, None], v[:, :, None], m, scale=0.3
    ).flatten(1, 2),
    "groups, expanded": lambda q, k, v, m: F.scaled_dot_product_attention(
        grouped(q), *(one.unsqueeze(2).expand(-1, -1, EACH, -1, -1) for one in (k, v)), m
    ).flatten(1, 2),
    "groups, copied": lambda q, k, v, m: F.scaled_dot_product_attention(
        grouped(q), *(one.unsqueeze(2).expand(-1, -1, EACH, -1, -1).contiguous() for one in (k, v)), m[None, None, None]
    ).flatten(1, 2),
    "groups by hand": by_products,
    "groups by einsum": by_einsum,
}


def given() -> list[Tensor]:
    random = torch.Generator().manual_seed(0)
    heads = (GROUPS * EACH, GROUPS, GROUPS)
    return [torch.randn(BATCH, n, TOKENS, DEPTH, generator=random, requires_grad=True) for n in heads]


@pytest.mark.parametrize("name", ATTENDS)
def test_results_and_gradients_are_those_of_eager(name: str) -> None:
    operands = given()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ATTENDS[name](q, k, v, models.by_tril(TOKENS))

    found, seen = judged(attend, *operands)
    assert seen.rewritten, seen.reason
    right = attend(*operands)
    torch.testing.assert_close(found, right, atol=2e-6, rtol=1e-4)
    grads = [torch.autograd.grad(one.square().sum(), operands) for one in (found, right)]
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)


def test_a_mask_of_each_sequence_in_five_dimensions() -> None:
    mask = (torch.arange(TOKENS) < torch.tensor([TOKENS, 20])[:, None])[:, None, None, None]
    found, seen = judged(by_products, *given(), mask)
    assert seen.rewritten, seen.reason
    torch.testing.assert_close(found, by_products(*given(), mask), atol=2e-6, rtol=1e-4)


def heads_in_turns(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    """Each head of keys serves every second head of queries, not some in a row."""
    turned = q[:, :4].unflatten(1, (2, GROUPS))
    return ((turned @ k[:, None].mT).masked_fill(~m, -math.inf).softmax(-1) @ v[:, None]).flatten(1, 2)


def a_mask_of_each_head(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    kept = m & (torch.arange(TOKENS) > torch.arange(EACH)[:, None, None])
    return by_products(q, k, v, kept)


@pytest.mark.parametrize("attend", [heads_in_turns, a_mask_of_each_head])
def test_what_is_shared_otherwise_is_right(attend: Attend) -> None:
    """It may stay; it may not be taken for heads in a row."""
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    found, _ = judged(attend, *given(), mask)
    torch.testing.assert_close(found, attend(*given(), mask), atol=2e-6, rtol=1e-4, equal_nan=True)
