"""On a device: patterns, attention by them, and models that are compiled unchanged, beside float64 and eager."""

import copy

import attention_models as models
import pytest
import torch
import torch.nn.functional as F
from attention_models import WIDTH, Written, sdpa
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import sparsecomp
from sparsecomp.attention import (
    AttentionPattern,
    Documents,
    GlobalTokens,
    LocalWindow,
    PerHead,
    attention,
    big_bird,
    causal,
    longformer,
)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
DEVICE = torch.device("cuda")
N = 1500
PATTERNS: dict[str, AttentionPattern] = {
    "window": LocalWindow(200, 0),
    "longformer": longformer(64, (0, 700)),
    "big bird": big_bird(64, seed=3),
    "documents": Documents.of_lengths([300, 7, 800, 200], N) & causal(),
    "heads": PerHead((causal(), LocalWindow(33, 33), LocalWindow(None, None), GlobalTokens(5))),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_lists_are_those_of_a_cpu(name: str) -> None:
    pattern = PATTERNS[name]
    for one, other in zip(pattern.to_blocks(N, device=DEVICE), pattern.to_blocks(N), strict=True):
        assert torch.equal(one.cpu(), other) if isinstance(one, Tensor) else one == other


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_attention_by_a_pattern(name: str, dtype: torch.dtype) -> None:
    random = torch.Generator(DEVICE).manual_seed(0)
    inputs = [torch.randn(2, 4, N, 64, device=DEVICE, generator=random).to(dtype).requires_grad_() for _ in range(3)]
    doubles = [one.detach().double().requires_grad_() for one in inputs]
    found = attention(*inputs, PATTERNS[name])
    with sdpa_kernel(SDPBackend.MATH):
        right = F.scaled_dot_product_attention(*doubles, PATTERNS[name].to_dense(N, device=DEVICE))
    bound = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    pairs = [(found, right)]
    pairs += zip(
        torch.autograd.grad(found.float().square().sum(), inputs), torch.autograd.grad(right.square().sum(), doubles),
        strict=True,
    )  # fmt: skip
    for one, other in pairs:
        assert float((one.double() - other).norm() / other.norm()) < bound


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("attend", [sdpa, models.filled, models.einsums])
def test_a_model_compiled_unchanged(mode: str, attend) -> None:
    model = Written(attend, buffer=models.by_tril(N)).to(DEVICE)
    options = {"frozen": "buffers", "implementation": "skip", "mode": mode}
    compiled = torch.compile(model, backend="sparsecomp", options=options)
    x = torch.randn(2, N, WIDTH, device=DEVICE)
    with torch.no_grad():
        for step in range(5):
            if step == 3:
                model.mask.copy_(models.by_arange(N))  # a write that torch counts
            torch.testing.assert_close(compiled(x).clone(), model(x), atol=2e-3, rtol=2e-3)
    assert [one.rewritten for one in sparsecomp.last_report().sites if one.rule == "block_attention"] == [True]


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_model_trained_unchanged(mode: str) -> None:
    def by_positions(n: int) -> Tensor:
        position = torch.arange(n, device=DEVICE)
        return (position[:, None] - position).abs() < 100

    model = Written(models.filled, by_positions).to(DEVICE)
    eager = copy.deepcopy(model)
    compiled = torch.compile(model, backend="sparsecomp", options={"implementation": "skip", "mode": mode})
    x = torch.randn(2, N, WIDTH, device=DEVICE)
    for _ in range(4):
        for run in (compiled, eager):
            torch.compiler.cudagraph_mark_step_begin()
            run(x).square().mean().backward()
        for one, other in zip(model.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, atol=2e-3, rtol=2e-2)
            one.grad = other.grad = None  # the memory of a replayed graph's result is its own


def test_a_large_window_by_estimate() -> None:
    """At 4096 tokens with nine blocks of ten empty the estimate takes it, in half precision."""
    def by_positions(n: int) -> Tensor:
        position = torch.arange(n, device=DEVICE)
        distance = position[:, None] - position
        return (distance >= 0) & (distance < 256)

    model = Written(sdpa, by_positions).to(DEVICE, torch.bfloat16)
    compiled = torch.compile(model, backend="sparsecomp")
    x = torch.randn(8, 4096, WIDTH, device=DEVICE, dtype=torch.bfloat16)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), atol=2e-2, rtol=2e-2)
    assert [one.rewritten for one in sparsecomp.last_report().sites if one.rule == "block_attention"] == [True]


@pytest.mark.parametrize("compiles", [False, True])
def test_a_training_step_of_wide_heads_with_a_long_window_takes_blocks_of_128(compiles: bool) -> None:
    pattern, random = LocalWindow(1300, 0), torch.Generator(DEVICE).manual_seed(0)
    inputs = [torch.randn(1, heads, 4096, 128, device=DEVICE, generator=random).bfloat16().requires_grad_()
              for heads in (4, 2, 2)]  # fmt: skip
    call = torch.compile(attention, backend="sparsecomp", fullgraph=True) if compiles else attention
    found = call(*inputs, pattern)
    assert any(name.startswith("_kept_4096_4096_128_") for name in vars(pattern))
    doubles = [one.detach().double().requires_grad_() for one in inputs]
    with sdpa_kernel(SDPBackend.MATH):
        mask = pattern.to_dense(4096, device=DEVICE)
        right = F.scaled_dot_product_attention(*doubles, mask, enable_gqa=True)
    grads = [torch.autograd.grad(one.float().square().sum(), given)
             for one, given in ((found, inputs), (right, doubles))]  # fmt: skip
    for one, other in zip((found, *grads[0]), (right, *grads[1]), strict=True):
        assert float((one.double() - other).norm() / other.norm()) < 3e-2


def test_layers_of_torch_with_padding_are_trained_unchanged() -> None:
    layer = torch.nn.TransformerEncoderLayer(64, 4, 64, dropout=0.0, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).to(DEVICE).train()
    compiled = torch.compile(model, backend="sparsecomp", options={"implementation": "skip"})
    x = torch.randn(2, N, 64, device=DEVICE)
    padding = torch.arange(N, device=DEVICE) >= torch.tensor([[N], [700]], device=DEVICE)
    results, weight = [], torch.randn(2, N, 64, device=DEVICE) * ~padding[..., None]
    for run in (compiled, model):
        out = run(x, src_key_padding_mask=padding)
        results.append((out, *torch.autograd.grad((out * weight).sum(), list(model.parameters()))))
    assert [one.rewritten for one in sparsecomp.last_report().sites if one.rule == "block_attention"] == [True] * 2
    for one, other in zip(*results, strict=True):
        assert float((one - other).norm() / other.norm()) < 5e-3
