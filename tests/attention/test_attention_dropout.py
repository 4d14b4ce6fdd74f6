"""Dropout of attention: one rule says which weights are dropped, and kernels and gradients follow it."""

import pytest
import torch
from kernel_devices import KERNEL_DEVICES, graph_of
from torch import Tensor

from sparsecomp.attention import LocalWindow, attention
from sparsecomp.errors import FormatError
from sparsecomp.lowering.attention import block_attention as lowered
from sparsecomp.lowering.attention import block_attention_gradients as lowered_gradients
from sparsecomp.ops import block_attention
from sparsecomp.reference.attention.block_attention import Scoring
from sparsecomp.reference.attention.blocks import blocks_of
from sparsecomp.reference.attention.dropout import ALWAYS, chances, drawn_pairs, philox_words

SEED = torch.tensor([0x0123456789ABCDEF])


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((7, 0, 2**31), -1, None),
    ],
)
def test_numbers_are_those_ofphilox_words(counter: tuple[int, ...], key: int, words: tuple[int, ...] | None) -> None:
    """The published answer of Random123 for zeros, and plain whole numbers for others."""
    found = [int(one) for one in philox_words(torch.tensor([key]), *(torch.tensor([one]) for one in counter))]
    assert found == list(words or philox_of_numbers([*counter, 0], key % 2**64))


def philox_of_numbers(count: list[int], key: int) -> list[int]:
    low, high = key % 2**32, key >> 32
    for _ in range(10):
        one, other = 0xD2511F53 * count[0], 0xCD9E8D57 * count[2]
        count = [(other >> 32) ^ count[1] ^ low, other % 2**32, (one >> 32) ^ count[3] ^ high, one % 2**32]
        low, high = (low + 0x9E3779B9) % 2**32, (high + 0xBB67AE85) % 2**32
    return count


def drawn(heads: int, q_len: int, k_len: int, kept: int, seed: Tensor = SEED, batch: int = 1) -> Tensor:
    query, key = torch.arange(q_len)[:, None], torch.arange(k_len + -k_len % 8)[None]
    each = [drawn_pairs(seed, stream, query, key, kept)[:, :k_len] for stream in range(batch * heads)]
    return torch.stack(each).view(batch, heads, q_len, k_len)


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
def test_as_many_are_kept_as_should_be_in_every_row_and_column(probability: float) -> None:
    kept = drawn(2, 1000, 1000, chances(probability)).double()
    deviation = (probability * (1 - probability)) ** 0.5
    assert abs(float(kept.mean()) - (1 - probability)) < 4 * deviation / 2e6**0.5
    for dim in (2, 3):
        assert float((kept.mean(dim) - (1 - probability)).abs().max()) < 5 * deviation / 1000**0.5
    centred = (kept - kept.mean()) / deviation
    for one, other in ((centred[:, :, 1:], centred[:, :, :-1]), (centred[..., 1:], centred[..., :-1]),
                       (centred[:, 1:], centred[:, :-1])):  # fmt: skip
        assert abs(float((one * other).mean())) < 6 / one.numel() ** 0.5  # neighbours tell nothing of each other


def dropped_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, enlarged: Tensor) -> Tensor:
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~mask, -torch.inf)
    return (torch.softmax(scores, -1).nan_to_num(0.0) * enlarged) @ v


def case(dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], Tensor]:
    random = torch.Generator().manual_seed(0)
    operands = [torch.randn(2, 2, n, 16, generator=random).to(dtype) for n in (70, 140, 140)]
    mask = torch.rand(1, 1, 70, 140, generator=random) < 0.6
    mask[..., :64, 64:128] = True
    mask[..., 9, :] = False
    return operands, mask


def given_by(operands: list[Tensor], mask: Tensor, kept: int) -> tuple[Tensor, ...]:
    """The result and its gradients in float64."""
    wide = [one.double().cpu().requires_grad_() for one in operands]
    right = dropped_attention(*wide, mask, drawn(2, 70, 140, kept, batch=2) * (ALWAYS / kept))
    return right, *torch.autograd.grad(right.square().sum(), wide)


@pytest.mark.slow(reason="interprets three kernels")
@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("block", [(32, 128), (64, 64)])
def test_kernels_and_their_gradients(block: tuple[int, int], device: str) -> None:
    (q, k, v), mask = case()
    right, *by = given_by([q, k, v], mask, 50_000)
    q, k, v, seed = (one.to(device) for one in (q, k, v, SEED))
    blocks, scoring = [one.to(device) for one in blocks_of(mask, block)[4:]], Scoring(0.25, seed=seed, kept=50_000)
    out, sums = torch.empty_like(q), torch.empty(q.shape[:3], device=device)
    lowered.block_attention(q, k, v, blocks, scoring, out, sums)
    found = [torch.full_like(one, torch.nan) for one in (q, k, v)]
    lowered_gradients.block_attention_gradients(2 * out, q, k, v, out, sums, None, blocks, scoring, *found)
    for one, other in zip((out, *found), (right, *by), strict=True):
        assert torch.linalg.vector_norm(one.cpu().double() - other) <= 3e-6 * torch.linalg.vector_norm(other)


def test_the_operator_and_its_gradients() -> None:
    (q, k, v), mask = case(torch.float64)
    wide = [one.requires_grad_() for one in (q, k, v)]
    found, _ = block_attention(*wide, blocks_of(mask, (32, 32)), dropout=0.25, seed=SEED)
    grads = torch.autograd.grad(found.square().sum(), wide)
    for one, other in zip((found, *grads), given_by([q.detach(), k.detach(), v.detach()], mask, 49_152), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)


@pytest.mark.slow(reason="differentiates twice, by numbers")
def test_gradcheck_once_and_twice() -> None:
    random = torch.Generator().manual_seed(1)
    given = [torch.randn(1, 2, n, 2, generator=random, dtype=torch.float64, requires_grad=True) for n in (3, 34, 34)]
    blocks = blocks_of(torch.ones(1, 1, 3, 34, dtype=torch.bool), (32, 32))

    def call(*operands: Tensor) -> Tensor:
        return block_attention(*operands, blocks, dropout=0.5, seed=SEED)[0]

    assert torch.autograd.gradcheck(call, given, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(call, given)


def test_torchs_generator_draws_the_seed() -> None:
    (q, k, v), _ = case()
    pattern = LocalWindow(30, 80)
    torch.manual_seed(5)
    first, second = (attention(q, k, v, pattern, dropout=0.3) for _ in range(2))
    torch.manual_seed(5)
    assert torch.equal(attention(q, k, v, pattern, dropout=0.3), first) and not torch.equal(first, second)
    assert torch.equal(attention(q, k, v, pattern, dropout=0.0), attention(q, k, v, pattern))
    one, other = (attention(q, k, v, pattern, dropout=0.3, seed=SEED) for _ in range(2))
    assert torch.equal(one, other)


def test_compiled_and_opcheck() -> None:
    (q, k, v), mask = case()
    blocks = blocks_of(mask, (32, 32))
    args = (q, k, v, list(blocks[4:]), 0.25, 0.0, None, None, SEED, 40_000)
    torch.library.opcheck(torch.ops.sparsecomp.block_attention.default, args)
    pattern = LocalWindow(9, 9)
    compiled = torch.compile(lambda *one: attention(*one, pattern, dropout=0.5), backend="aot_eager")
    torch.manual_seed(2)
    first, second = compiled(q, k, v), compiled(q, k, v)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("probability", [-0.1, 1.0, 1.5, float("nan"), 0.999999])
def test_chances_that_are_none(probability: float) -> None:
    (q, k, v), _ = case()
    with pytest.raises(FormatError, match="probability"):
        attention(q, k, v, LocalWindow(9, 9), dropout=probability)


@pytest.mark.parametrize("seed", [torch.tensor(3), torch.tensor([3], dtype=torch.int32)])
def test_seeds_that_are_none(seed: Tensor) -> None:
    (q, k, v), _ = case()
    with pytest.raises(FormatError, match="seed"):
        attention(q, k, v, LocalWindow(9, 9), dropout=0.5, seed=seed)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
class TestOnAGpu:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_the_operator_and_its_gradients(self, dtype: torch.dtype) -> None:
        operands, mask = case(dtype)
        right = given_by(operands, mask, 49_152)
        given = [one.cuda().requires_grad_() for one in operands]
        found, _ = block_attention(*given, blocks_of(mask.cuda()), dropout=0.25, seed=SEED.cuda())
        grads = torch.autograd.grad(found.float().square().sum(), given)
        bound = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype]
        for one, other in zip((found, *grads), right, strict=True):
            assert torch.linalg.vector_norm(one.cpu().double() - other) <= bound * torch.linalg.vector_norm(other)

    def test_each_replay_of_a_graph_draws_anew(self) -> None:
        q, k, v = (one.cuda() for one in case()[0])
        graph, out = graph_of(lambda: attention(q, k, v, LocalWindow(30, 80), dropout=0.5))
        torch.cuda.manual_seed(3)
        graph.replay()
        first = out.clone()
        graph.replay()
        assert not torch.equal(out, first)
        torch.cuda.manual_seed(3)
        graph.replay()
        assert torch.equal(out, first)
