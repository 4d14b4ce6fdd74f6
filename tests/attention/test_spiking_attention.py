"""Attention of spikes by patterns, beside eager in float64: lengths, steps, heads, gradients, half precision."""

import random
from typing import Any

import pytest
import torch
from rewriting import Surrogate
from torch import Tensor

from sparsecomp.attention import (
    AttentionPattern,
    Documents,
    FromFunction,
    FromTensor,
    GlobalTokens,
    LocalWindow,
    PerHead,
    PrefixLM,
    RandomKeys,
    big_bird,
    causal,
    spiking_attention,
)
from sparsecomp.errors import FormatError, MaskError, PatternError


def written(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """As a network writes it."""
    return ((q @ k.transpose(-2, -1)) * mask) @ v * scale


def spikes(*shape: int, seed: int = 0, most: int = 1) -> Tensor:
    return torch.randint(0, most + 1, shape, generator=torch.Generator().manual_seed(seed)).float()


def split(steps: int, batch: int, tokens: int, heads: int, depth: int, seed: int, most: int = 1) -> Tensor:
    """(T, B, heads, N, depth), as networks make it of (T, B, N, C)."""
    return spikes(steps, batch, tokens, heads, depth, seed=seed, most=most).transpose(2, 3)


def twice(steps: int, q_len: int, k_len: int, seed: int) -> AttentionPattern:
    """A pattern of two batch entries and three heads."""
    kept = torch.rand(2, 3, q_len, k_len, generator=torch.Generator().manual_seed(seed)) < 0.2
    return FromTensor(kept)


PATTERNS: dict[str, AttentionPattern] = {
    "causal": causal(), "window": LocalWindow(9, 4), "prefix": PrefixLM(20) & LocalWindow(40, None),
    "big_bird": big_bird(block=16, random=1, seed=1), "global": LocalWindow(3, 3) | GlobalTokens(2),
    "documents": Documents.of_lengths([30, 41, 20], total=101) & causal(), "nothing": ~LocalWindow(None, None),
    "heads": PerHead((causal(), RandomKeys(4), ~LocalWindow(30, 30))),
    "function": FromFunction(lambda b, h, q, k: (q + k + h) % 3 == 0), "batch": twice(2, 101, 101, 0),
}  # fmt: skip


@pytest.mark.parametrize("name", PATTERNS)
def test_patterns_in_steps_give_the_numbers_of_float64(name: str) -> None:
    q, k, v = (split(2, 2, 101, 3, 8, seed, most=2) for seed in range(3))
    found = spiking_attention(q, k, v, PATTERNS[name], scale=0.125)
    right = written(*(one.double() for one in (q, k, v)), PATTERNS[name].to_dense(101), 0.125)
    assert torch.equal(found.double(), right)


@pytest.mark.parametrize("seed", range(12))
def test_random_programs(seed: int) -> None:
    """Results and gradients, of patterns, lengths and sizes that are drawn."""
    draw = random.Random(seed)
    steps, batch, heads, depth = (draw.randint(1, most) for most in (4, 3, 3, 20))
    q_len, k_len = draw.randint(1, 150), draw.randint(1, 150)
    drawn = [LocalWindow(draw.randint(0, 40), draw.randint(0, 40)), GlobalTokens(draw.randint(1, 5)), causal(),
             RandomKeys(draw.randint(1, 5), seed=seed)]  # fmt: skip
    one, other = draw.sample(drawn, 2)
    pattern = draw.choice([one | other, one & ~other, ~(one & other)])
    lead = draw.choice([(steps, batch, heads), (batch, heads)])
    shapes = ((*lead, q_len, depth), (*lead, k_len, depth), (*lead, k_len, draw.randint(1, 20)))
    given = [spikes(*shape, seed=seed + n, most=draw.choice([1, 4])).requires_grad_() for n, shape in enumerate(shapes)]
    wide = [one.detach().double().requires_grad_() for one in given]
    scale, block = draw.choice([0.125, 1.0, -0.3, 0.0]), draw.choice([(64, 64), (32, 128), (128, 32)])
    found = spiking_attention(*given, pattern, scale=scale, block=block)
    right = written(*wide, pattern.to_dense(q_len, k_len), scale)
    torch.testing.assert_close(found.double(), right, rtol=1e-7, atol=0)
    grad = torch.randn(right.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    by = zip(torch.autograd.grad(found, given, grad.float()), torch.autograd.grad(right, wide, grad), strict=True)
    for one, other in by:
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-4)


def test_a_pair_that_is_dropped_may_be_anything_in_a_block_that_is_not_listed() -> None:
    q, k, v = (spikes(1, 1, 128, 8, seed=seed) for seed in range(3))
    v[..., 64:, :], k[..., 100:, :] = torch.inf, torch.nan
    found = spiking_attention(q, k, v, FromFunction(lambda b, h, q, k: k < 64))
    assert torch.equal(found, q @ k[..., :64, :].mT @ v[..., :64, :])


def test_a_value_that_is_not_finite_reaches_the_queries_of_its_blocks() -> None:
    q, k, v = (spikes(1, 1, 128, 8, seed=seed) for seed in range(3))
    v[..., 3, :] = torch.nan
    found = spiking_attention(q, k, v, LocalWindow(0, 0))
    assert found[..., :64, :].isnan().all() and not found[..., 64:, :].isnan().any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_and_autocast(dtype: torch.dtype) -> None:
    q, k, v = (split(2, 1, 70, 2, 8, seed) for seed in range(3))
    right = written(*(one.double() for one in (q, k, v)), causal().to_dense(70), 0.125).to(dtype)
    assert torch.equal(spiking_attention(*(one.to(dtype) for one in (q, k, v)), causal(), scale=0.125), right)
    with torch.autocast("cpu", dtype):
        assert torch.equal(spiking_attention(q, k, v, causal(), scale=0.125), right)


@pytest.mark.slow(reason="compiles")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_in_one_graph(backend: str) -> None:
    pattern, given = LocalWindow(6, 2), [split(2, 2, 40, 3, 8, seed).requires_grad_() for seed in range(3)]
    compiled: Any = torch.compile(lambda *of: spiking_attention(*of, pattern, scale=0.5), backend=backend)
    found, right = compiled(*given), written(*given, pattern.to_dense(40), 0.5)
    assert torch.equal(found, right)
    for one, other in zip(*(torch.autograd.grad(out.square().sum(), given) for out in (found, right)), strict=True):
        torch.testing.assert_close(one, other)


def test_a_network_is_trained_by_it() -> None:
    """Behind a surrogate the gradients are those of the same network as it is written."""
    pattern, x = causal(), torch.randn(2, 2, 3, 20, 8, generator=torch.Generator().manual_seed(0))
    weights = [torch.randn(8, 8, generator=torch.Generator().manual_seed(n)) for n in (1, 2, 3)]
    found = []
    for attend in (lambda *of: spiking_attention(*of, pattern, scale=0.25),
                   lambda *of: written(*of, pattern.to_dense(20), 0.25)):  # fmt: skip
        leaves = [weight.clone().requires_grad_() for weight in weights]
        fired: list[Any] = [Surrogate.apply(x @ leaf) for leaf in leaves]
        found.append(torch.autograd.grad(attend(*fired).square().sum(), leaves))
    assert all(bool(one.any()) for one in found[0])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_what_does_not_belong_together() -> None:
    q, k, v = (split(2, 2, 40, 3, 8, seed) for seed in range(3))
    with pytest.raises(FormatError, match="time steps in front"):
        spiking_attention(q, k[:1], v, causal())
    with pytest.raises(FormatError, match="time steps in front"):
        spiking_attention(q[0, 0], k[0, 0], v[0, 0], causal())
    with pytest.raises(FormatError, match="k of the depth of q"):
        spiking_attention(q, k[..., :4], v, causal())
    with pytest.raises(PatternError):
        spiking_attention(q, k, v, torch.ones(40, 40))  # pyright: ignore[reportArgumentType]
    with pytest.raises(PatternError):
        spiking_attention(q, k, v, Documents.of_lengths([30], total=30))
    with pytest.raises(MaskError, match="powers of two"):
        spiking_attention(q, k, v, causal(), block=(10, 64))
    with pytest.raises(MaskError, match="the blocks have lists"):
        spiking_attention(q, k, v, PerHead((causal(), causal())))
