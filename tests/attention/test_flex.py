"""Patterns to and from FlexAttention, and the masks of its collection of examples against its own results."""

from collections.abc import Callable
from functools import partial
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


DOCUMENTS_ON = {"cpu": DOCUMENTS}
if torch.cuda.is_available():
    DOCUMENTS_ON["cuda"] = DOCUMENTS.cuda()


def in_document(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    document = DOCUMENTS_ON[q.device.type]
    return document[q] == document[k]


def in_prefix(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return k < 60


def dilated(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (torch.abs(q - k) <= 30) & ((q - k) % 3 == 0)


def of_heads(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return torch.where(h == 0, q >= k, torch.abs(q - k) < 9)


def near_in_an_image(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Neighbourhood attention (Hassani et al., 2023): tokens are pixels of rows of 25."""
    return (torch.abs(q // 25 - k // 25) <= 2) & (torch.abs(q % 25 - k % 25) <= 3)


MASKS: dict[str, tuple[MaskMod, AttentionPattern]] = {
    "causal": (is_causal, causal()),
    "sliding window": (and_masks(is_causal, in_window), LocalWindow(40, 0)),
    "document": (in_document, Documents(DOCUMENTS)),
    "causal document": (and_masks(is_causal, in_document), Documents.of_lengths([50, 130, 70]) & causal()),
    "prefix LM": (or_masks(in_prefix, is_causal), PrefixLM(60)),
    "dilated window": (dilated, LocalWindow(10, 10, 3)),
    "neighbourhood": (near_in_an_image, FromFunction(near_in_an_image)),
    "causal document by a window": (
        and_masks(is_causal, in_document, in_window), Documents(DOCUMENTS) & LocalWindow(40, 0)
    ),
    "head by head": (of_heads, PerHead((causal(), LocalWindow(8, 8)))),
}


def operands(device: str = "cpu", dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 2, N, 16, generator=generator, dtype=torch.float64).to(device, dtype) for _ in range(3)]


@pytest.mark.parametrize("name", MASKS)
def test_attention_is_that_of_flex_attention(name: str) -> None:
    mask_mod, pattern = MASKS[name]
    heads = 2 if pattern.sizes[1] > 1 else None
    block_mask = create_block_mask(mask_mod, None, heads, N, N, device="cpu")
    given = operands()
    right = flex_attention(*given, block_mask=block_mask)
    torch.testing.assert_close(attention(*given, pattern), right)
    torch.testing.assert_close(attention(*given, from_flex(block_mask)), right)
    torch.testing.assert_close(flex_attention(*given, block_mask=pattern.to_flex(N)), right)


SLOPES = torch.exp2(-8 * torch.arange(1, 3) / 2)


def with_alibi(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return score + (k - q) * SLOPES[h]


def with_softcap(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return 1.5 * torch.tanh(score / 1.5)


def with_both(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return with_alibi(with_softcap(score, b, h, q, k), b, h, q, k)


CHANGED = [
    (with_alibi, {"alibi": SLOPES}), (with_softcap, {"softcap": 1.5}), (with_both, {"alibi": SLOPES, "softcap": 1.5})
]  # fmt: skip


@pytest.mark.parametrize("name", ["causal", "document"])
@pytest.mark.parametrize(("score_mod", "given"), CHANGED, ids=["ALiBi", "softcap", "both"])
def test_scores_are_changed_as_by_flex_attention(
    score_mod: Callable[..., Tensor], given: dict[str, Any], name: str
) -> None:
    mask_mod, pattern = MASKS[name]
    block_mask, of = create_block_mask(mask_mod, None, None, N, N, device="cpu"), operands()
    right = flex_attention(*of, score_mod=score_mod, block_mask=block_mask)
    torch.testing.assert_close(attention(*of, pattern, **given), right)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("softcap", [0.0, 1.5])
def test_results_and_gradients_of_flex_attention_on_a_gpu(name: str, softcap: float) -> None:
    """Ours and FlexAttention's in bfloat16, both held against FlexAttention's in float32."""
    mask_mod, pattern = MASKS[name]
    score_mod, given = (with_softcap, {"softcap": softcap}) if softcap else (None, {})
    block_mask = create_block_mask(mask_mod, None, 2 if pattern.sizes[1] > 1 else None, N, N, device="cuda")
    flex = torch.compile(partial(flex_attention, score_mod=score_mod, block_mask=block_mask), dynamic=False)

    def with_gradients(attend: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        of = [one.requires_grad_() for one in operands("cuda", dtype)]
        out = attend(*of)
        weight = torch.linspace(-1, 1, out.numel(), dtype=dtype, device="cuda").view_as(out)
        return [one.float() for one in (out, *torch.autograd.grad(out, of, weight))]

    right = with_gradients(flex, torch.float32)
    ours = with_gradients(partial(attention, pattern=pattern, **given), torch.bfloat16)
    theirs = with_gradients(flex, torch.bfloat16)
    for one, other, wanted in zip(ours, theirs, right, strict=True):
        mine, its = (float((x - wanted).norm() / wanted.norm()) for x in (one, other))
        assert mine <= max(1.5 * its, 5e-3), (mine, its)


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
