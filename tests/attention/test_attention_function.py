"""Attention by a pattern beside torch's, in float64: values, gradients, and under compilation."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from sparsecomp.attention import (
    AttentionPattern,
    Documents,
    FromFunction,
    GlobalTokens,
    LocalWindow,
    PerHead,
    attention,
    causal,
    longformer,
)
from sparsecomp.errors import ConfigError, FormatError, MaskError, PatternError


def operands(q_len: int, k_len: int, heads: int = 2, kv_heads: int = 2, dtype=torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, heads, q_len, 16), (2, kv_heads, k_len, 16), (2, kv_heads, k_len, 16))
    return [torch.randn(shape, generator=generator, dtype=dtype, requires_grad=True) for shape in shapes]


def expected(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None = None) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])


PATTERNS: dict[str, AttentionPattern] = {
    "window": LocalWindow(9, 4),
    "tokens": longformer(6, 2, autoregressive=True),
    "documents": Documents(torch.tensor([0] * 30 + [1] * 40 + [-1] * 30)),
    "heads": PerHead((causal(), LocalWindow(0, 20))),
    "nothing": ~LocalWindow(None, None),
}


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("lengths", [(70, 70), (33, 100)])
def test_values_and_gradients_are_those_of_the_mask(name: str, lengths: tuple[int, int]) -> None:
    pattern, inputs = PATTERNS[name], operands(*lengths)
    weight = torch.randn(2, 2, lengths[0], 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = attention(*inputs, pattern, scale=0.3, block=(32, 32))
    right = expected(*inputs, pattern.to_dense(*lengths), 0.3)
    torch.testing.assert_close(found, right)
    for one, other in zip(
        torch.autograd.grad((found * weight).sum(), inputs), torch.autograd.grad((right * weight).sum(), inputs),
        strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(one, other)


def position_bias() -> Tensor:
    """Of each head, by distance, and no key that is far behind; one query attends to nothing."""
    distance = torch.arange(70)[:, None] - torch.arange(70)
    bias = -torch.tensor([0.1, 0.5], dtype=torch.float64)[:, None, None] * distance.abs()
    return bias.masked_fill((distance > 20) | (torch.arange(70) == 33)[:, None], -torch.inf)


NUMBERS = {
    "by position": position_bias, "of sequences": lambda: torch.where(
        torch.arange(70) < torch.tensor([70, 9])[:, None], 0.0, -torch.inf
    ).double()[:, None, None],
    "of keys": lambda: torch.arange(70).double() * 0.01, "all": lambda: torch.full((1, 1), -torch.inf).double(),
}  # fmt: skip


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_that_are_added(name: str) -> None:
    inputs, bias = operands(70, 70), NUMBERS[name]()
    found, right = attention(*inputs, bias, block=(32, 64)), expected(*inputs, bias.expand(2, 2, 70, 70))
    torch.testing.assert_close(found, right)
    grads = [torch.autograd.grad(one.square().sum(), inputs) for one in (found, right)]
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)


def test_numbers_lie_where_the_query_does() -> None:
    inputs = operands(70, 70, dtype=torch.float32)
    with pytest.raises(MaskError, match="broadcasts"):
        attention(*inputs, torch.zeros(69))
    right = expected(*inputs, position_bias().float().expand(2, 2, 70, 70))
    torch.testing.assert_close(attention(*inputs, position_bias()), right, atol=1e-5, rtol=1e-4)


def test_fewer_heads_of_keys() -> None:
    inputs = operands(64, 64, heads=4, kv_heads=2)
    right = expected(*inputs, causal().to_dense(64))
    torch.testing.assert_close(attention(*inputs, causal()), right)


def test_the_last_queries_of_a_sequence() -> None:
    q, k, v = operands(64, 64)
    window = LocalWindow(10, 0)
    whole = expected(q, k, v, window.to_dense(64))
    torch.testing.assert_close(attention(q[:, :, 60:], k, v, window.shifted(60)), whole[:, :, 60:])


def test_block_lists_are_made_once() -> None:
    asked = []

    def keeps(batch, head, query, key):
        asked.append(None)
        return key <= query

    pattern, inputs = FromFunction(keeps), operands(64, 64)
    attention(*inputs, pattern)
    made = len(asked)
    attention(*inputs, pattern)
    assert made and len(asked) == made
    attention(*operands(32, 64), pattern)
    assert len(asked) > made


def test_lists_made_in_inference_serve_training() -> None:
    pattern, inputs = LocalWindow(7, 7) & causal(), operands(40, 40)
    with torch.inference_mode():
        attention(*inputs, pattern)
    attention(*inputs, pattern).sum().backward()
    assert inputs[0].grad is not None


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pattern = LocalWindow(8, 0) | GlobalTokens(1)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q * 2, k, v, self.pattern)


@pytest.mark.slow(reason="compiles a model for three lengths")
@pytest.mark.parametrize("backend", ["aot_eager", "sparsecomp"])
def test_compiled_in_one_graph(backend: str) -> None:
    layer, inputs = Layer(), operands(48, 48, dtype=torch.float32)
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    for lengths in ((48, 48), (40, 40), (40, 56)):  # of the third on sizes are dynamic
        inputs = operands(*lengths, dtype=torch.float32)
        doubles = [one.detach().double().requires_grad_() for one in inputs]
        right = expected(doubles[0] * 2, *doubles[1:], layer.pattern.to_dense(*lengths))
        found = compiled(*inputs)
        torch.testing.assert_close(found.double(), right, atol=2e-6, rtol=1e-5)
        for one, other in zip(
            torch.autograd.grad(found.sum(), inputs), torch.autograd.grad(right.sum(), doubles), strict=True
        ):
            torch.testing.assert_close(one.double(), other, atol=5e-6, rtol=1e-5)


@pytest.mark.parametrize("by", ["blocks", "elements", "dense"])
@pytest.mark.parametrize("strict", [False, True])
def test_exported_before_its_lists_are_made(strict: bool, by: str) -> None:
    class Attention(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attention(q, k, v, pattern, by=by)

    pattern = LocalWindow(11 + strict, ["blocks", "elements", "dense"].index(by))
    inputs = tuple(one.detach() for one in operands(45, 45))
    exported = torch.export.export(Attention(), inputs, strict=strict)
    torch.testing.assert_close(exported.module()(*inputs), expected(*inputs, pattern.to_dense(45)))
    assert not any("set_grad" in str(node.target) for node in exported.graph.nodes)


def test_what_does_not_fit_is_refused() -> None:
    q, k, v = operands(32, 32)
    with pytest.raises(PatternError, match="no pattern"):
        attention(q, k, v, "causal")  # pyright: ignore[reportArgumentType]
    with pytest.raises(MaskError, match=r"needs one of torch\.bool"):
        attention(q, k, v, torch.ones(32, 32).long())
    with pytest.raises(MaskError, match="needs"):
        attention(q, k, v, torch.ones(32, 31, dtype=torch.bool))
    with pytest.raises(MaskError):
        attention(q, k, v, PerHead((causal(),) * 3))
    with pytest.raises(FormatError):
        attention(q, k[:, :, :, :8], v, causal())
    for block in ((48, 48), (32,), 64):
        with pytest.raises(MaskError, match="powers of two"):
            attention(q, k, v, causal(), block=block)


def test_an_infinite_value_reaches_no_query_behind_the_end_of_its_list() -> None:
    q, k, v = (one.detach() for one in operands(100, 100))
    v[:, :, 0, 3] = float("inf")
    pattern = LocalWindow(0, 40)  # the last queries read fewer blocks than others
    found = attention(q, k, v, pattern, block=(32, 32))
    assert found[:, :, 0, 3].isposinf().all() and found[:, :, 32:].isfinite().all()


@pytest.mark.parametrize("by", ["dense", "elements", "rows"])
def test_masks_and_dropout_are_computed_by_blocks_alone(by: str) -> None:
    q, k, v = operands(32, 32)
    with pytest.raises(ConfigError, match="by blocks alone"):
        attention(q, k, v, torch.ones(32, 32, dtype=torch.bool), by=by)
    with pytest.raises(ConfigError, match="by blocks alone"):
        attention(q, k, v, causal(), dropout=0.5, by=by)


def test_a_mask_is_scanned_in_each_call() -> None:
    q, k, v = operands(100, 130)
    mask = torch.rand(100, 130, generator=torch.Generator().manual_seed(0)) < 0.3
    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True)
    for call in (attention, compiled):
        for kept in (mask, ~mask):
            right = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), kept, enable_gqa=True)
            torch.testing.assert_close(call(q, k, v, kept).double(), right, rtol=1e-4, atol=1e-5)


def test_no_heads_of_queries() -> None:
    q, k, v = operands(32, 32, heads=0, kv_heads=1)
    found = attention(q, k, v, causal())
    found.sum().backward()
    assert found.shape == (2, 0, 32, 16) and not k.grad.any()


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_no_keys(dtype: torch.dtype) -> None:
    q, k = torch.randn(2, 2, 5, 8), torch.randn(2, 2, 0, 8)
    q.requires_grad_()
    found = attention(q, k, k, torch.zeros(5, 0, dtype=dtype))
    (grad,) = torch.autograd.grad(found.sum(), q)
    assert found.shape == q.shape and not found.any() and not grad.any()


def test_documents_without_tokens() -> None:
    for documents in (Documents.of_lengths([]), Documents(torch.zeros(2, 0, dtype=torch.int64))):
        assert documents.to_dense(0).shape[2:] == (0, 0)


def test_forward_mode() -> None:
    inputs, pattern = [one.detach() for one in operands(40, 40)], LocalWindow(9, 4)
    along = tuple(one.cos() for one in inputs)
    mask = pattern.to_dense(40)
    found = torch.func.jvp(lambda *of: attention(*of, pattern), tuple(inputs), along)
    right = torch.func.jvp(lambda *of: expected(*of, mask), tuple(inputs), along)
    torch.testing.assert_close(found, right)
