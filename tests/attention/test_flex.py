"""Patterns to and from FlexAttention, and the masks of its collection of examples against its own results."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, and_masks, create_block_mask, flex_attention, or_masks

from sparsecomp.attention import (
    AttentionPattern,
    Documents,
    FromFunction,
    GlobalTokens,
    LocalWindow,
    PerHead,
    PrefixLM,
    attention,
    big_bird,
    causal,
    from_flex,
    random_blocks,
)
from sparsecomp.errors import PatternError

pytestmark = pytest.mark.quick_cases(3)
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
DOCUMENTS = torch.tensor([0] * 50 + [1] * 130 + [2] * 70)
N = len(DOCUMENTS)


def is_causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def in_window(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q - k <= 40


def in_document(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return DOCUMENTS[q] == DOCUMENTS[k]


def in_prefix(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return k < 60


def dilated(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (torch.abs(q - k) <= 30) & ((q - k) % 3 == 0)


def of_heads(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return torch.where(h == 0, q >= k, torch.abs(q - k) < 9)


MASKS: dict[str, tuple[MaskMod, AttentionPattern]] = {
    "causal": (is_causal, causal()),
    "sliding window": (and_masks(is_causal, in_window), LocalWindow(40, 0)),
    "document": (in_document, Documents(DOCUMENTS)),
    "causal document": (and_masks(is_causal, in_document), Documents.of_lengths([50, 130, 70]) & causal()),
    "prefix LM": (or_masks(in_prefix, is_causal), PrefixLM(60)),
    "dilated window": (dilated, LocalWindow(10, 10, 3)),
    "head by head": (of_heads, PerHead((causal(), LocalWindow(8, 8)))),
}


def operands() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 2, N, 16, generator=generator, dtype=torch.float64) for _ in range(3)]


@pytest.mark.parametrize("name", MASKS)
def test_attention_is_that_of_flex_attention(name: str) -> None:
    mask_mod, pattern = MASKS[name]
    heads = 2 if pattern.sizes[1] > 1 else None
    block_mask = create_block_mask(mask_mod, None, heads, N, N, device="cpu")
    right = flex_attention(*operands(), block_mask=block_mask)
    torch.testing.assert_close(attention(*operands(), pattern), right)
    torch.testing.assert_close(attention(*operands(), from_flex(block_mask)), right)
    torch.testing.assert_close(flex_attention(*operands(), block_mask=pattern.to_flex(N)), right)


SLOPES = torch.exp2(-8 * torch.arange(1, 3) / 2)


def with_alibi(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return score + (k - q) * SLOPES[h]


def with_softcap(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return 1.5 * torch.tanh(score / 1.5)


CHANGED = [(with_alibi, {"alibi": SLOPES}), (with_softcap, {"softcap": 1.5})]


@pytest.mark.parametrize(("score_mod", "given"), CHANGED, ids=["ALiBi", "softcap"])
def test_scores_are_changed_as_by_flex_attention(score_mod: Callable[..., Tensor], given: dict[str, Any]) -> None:
    block_mask = create_block_mask(is_causal, None, None, N, N, device="cpu")
    right = flex_attention(*operands(), score_mod=score_mod, block_mask=block_mask)
    torch.testing.assert_close(attention(*operands(), causal(), **given), right)


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("block", [64, 128])
def test_a_block_mask_is_the_one_that_torch_makes(name: str, block: int) -> None:
    mask_mod, pattern = MASKS[name]
    right = create_block_mask(mask_mod, None, pattern.sizes[1], N, N, "cpu", block)
    found = pattern.to_flex(N, block=block)
    assert isinstance(found, BlockMask) and found.BLOCK_SIZE == right.BLOCK_SIZE and found.shape == right.shape
    assert torch.equal(found.to_dense(), right.to_dense())
    for one, other in ((found.kv_num_blocks, right.kv_num_blocks), (found.q_num_blocks, right.q_num_blocks)):
        assert torch.equal(one, other)
    assert found.full_kv_num_blocks is not None and right.full_kv_num_blocks is not None
    if N % block == 0:
        assert torch.equal(found.full_kv_num_blocks, right.full_kv_num_blocks)


@pytest.mark.parametrize("lengths", [(200, 128), (64, 250)])
def test_a_pattern_comes_back_from_a_block_mask(lengths: tuple[int, int]) -> None:
    for pattern in (big_bird(32, random=2) | GlobalTokens(3), random_blocks(2, 16, heads=2) & causal()):
        again = from_flex(pattern.to_flex(*lengths, block=64))
        assert torch.equal(again.to_dense(*lengths), pattern.to_dense(*lengths))


def test_a_block_mask_without_full_blocks() -> None:
    lists = torch.tensor([[[1, 2]]], dtype=torch.int32), torch.tensor([[[[1, 0], [0, 1]]]], dtype=torch.int32)
    mask = BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=32, mask_mod=is_causal)
    whole = from_flex(mask).to_dense(64)[0, 0]
    right = causal().to_dense(64)[0, 0].clone()
    right[:32, :32] = False  # the block is not listed
    assert torch.equal(whole, right)


def test_only_a_block_mask_is_one() -> None:
    with pytest.raises(PatternError, match="no BlockMask"):
        from_flex(torch.ones(4, 4))  # pyright: ignore[reportArgumentType]
    flipped = FromFunction(is_causal, 2, 3)
    assert flipped.to_flex(40).shape == (2, 3, 40, 40)
