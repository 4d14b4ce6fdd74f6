"""Modules of sparse attention beside torch's own by the same mask, in float64."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsecomp.attention import AttentionPattern, GlobalTokens, LocalWindow, PerHead, PrefixLM, causal, longformer
from sparsecomp.errors import ConfigError, MaskError, PatternError
from sparsecomp.nn import LongformerAttention, LongformerBlock, SparseMultiheadAttention

PATTERN = LocalWindow(5, 0) | GlobalTokens(1)


def pair(
    pattern: AttentionPattern = PATTERN, **settings: Any
) -> tuple[nn.MultiheadAttention, SparseMultiheadAttention]:  # fmt: skip
    """Torch's layer and ours with the same parameters."""
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(24, 3, dtype=torch.float64, **settings)
    ours = SparseMultiheadAttention(pattern, 24, 3, dtype=torch.float64, **settings)
    ours.load_state_dict(layer.state_dict(), strict=True)
    assert list(ours.state_dict()) == list(layer.state_dict())
    return layer, ours


def inputs(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes]


def dropped(q_len: int, k_len: int, pattern: AttentionPattern = PATTERN, batch: int = 2) -> Tensor:
    mask = ~pattern.to_dense(q_len, k_len)
    return mask[0, 0] if mask.shape[:2] == (1, 1) else mask.expand(batch, 3, -1, -1).flatten(0, 1)


@pytest.mark.parametrize("settings", [{}, {"batch_first": True}, {"bias": False}, {"dropout": 0.5}])
@pytest.mark.parametrize("batched", [True, False])
def test_self_attention(settings: dict[str, Any], batched: bool) -> None:
    layer, ours = pair(**settings)
    layer.eval(), ours.eval()
    shape = (40, 24) if not batched else (2, 40, 24) if settings.get("batch_first") else (40, 2, 24)
    (x,) = inputs(shape)
    found, weights = ours(x, x, x)
    right, _ = layer(x, x, x, attn_mask=dropped(40, 40), need_weights=False)
    assert weights is None
    torch.testing.assert_close(found, right)
    grads = (torch.autograd.grad(one.square().sum(), [x, *parameters]) for one, parameters in (
        (found, ours.parameters()), (right, layer.parameters())))  # fmt: skip
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("settings", [{}, {"kdim": 10, "vdim": 12}, {"kdim": 10, "bias": False}])
def test_attention_to_others(settings: dict[str, int]) -> None:
    layer, ours = pair(batch_first=True, **settings)
    x, k, v = inputs((2, 20, 24), (2, 33, settings.get("kdim", 24)), (2, 33, settings.get("vdim", 24)))
    right, _ = layer(x, k, v, attn_mask=dropped(20, 33), need_weights=False)
    torch.testing.assert_close(ours(x, k, v)[0], right)


def test_heads_and_batch_entries_with_patterns_of_their_own() -> None:
    pattern = PerHead((causal(), LocalWindow(2, 2), LocalWindow(0, None))) & PrefixLM((3, 30))
    layer, ours = pair(pattern, batch_first=True)
    (x,) = inputs((2, 40, 24))
    right, weights = layer(x, x, x, attn_mask=dropped(40, 40, pattern))
    torch.testing.assert_close(ours(x, x, x)[0], right)
    found, ours_weights = ours(x, x, x, need_weights=True)
    torch.testing.assert_close(found, right)
    torch.testing.assert_close(ours_weights, weights)


@pytest.mark.parametrize("batch_first", [True, False])
def test_what_comes_on_top_is_computed_as_torch_does(batch_first: bool) -> None:
    layer, ours = pair(batch_first=batch_first)
    (x,) = inputs((2, 40, 24) if batch_first else (40, 2, 24))
    padding = torch.zeros(2, 40, dtype=torch.bool)
    padding[1, 30:] = True
    extra = torch.arange(40) % 7 == 3
    extra = extra.expand(40, 40) & ~torch.eye(40, dtype=torch.bool)
    right = layer(x, x, x, attn_mask=dropped(40, 40) | extra, key_padding_mask=padding, need_weights=False)[0]
    torch.testing.assert_close(ours(x, x, x, key_padding_mask=padding, attn_mask=extra)[0], right)
    numbers = torch.randn(40, 40, dtype=torch.float64)
    both = numbers.masked_fill(dropped(40, 40), -torch.inf)
    for average in (True, False):
        right = layer(x, x, x, attn_mask=both, average_attn_weights=average)
        found = ours(x, x, x, attn_mask=numbers, need_weights=True, average_attn_weights=average)
        for one, other in zip(found, right, strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("settings", [{"add_bias_kv": True}, {"add_zero_attn": True}, {"dropout": 0.3}])
def test_settings_that_need_all_pairs(settings: dict[str, Any]) -> None:
    layer, ours = pair(batch_first=True, **settings)
    (x,) = inputs((2, 40, 24))
    torch.manual_seed(5)
    right, _ = layer(x, x, x, attn_mask=dropped(40, 40), need_weights=False)
    torch.manual_seed(5)
    torch.testing.assert_close(ours(x, x, x)[0], right)


def test_a_layer_of_torchs_becomes_one() -> None:
    layer, _ = pair(batch_first=True)
    ours = SparseMultiheadAttention.from_attention(layer, PATTERN)
    assert all(one is other for one, other in zip(ours.parameters(), layer.parameters(), strict=True))
    (x,) = inputs((2, 40, 24))
    torch.testing.assert_close(ours(x, x, x)[0], layer(x, x, x, attn_mask=dropped(40, 40), need_weights=False)[0])
    again = copy.deepcopy(ours)
    torch.testing.assert_close(again(x, x, x)[0], ours(x, x, x)[0])
    assert layer(x, x, x)[1] is not None  # still torch's


@pytest.mark.parametrize("training", [True, False])
def test_in_torchs_encoder_layer(training: bool) -> None:
    torch.manual_seed(0)
    stock = nn.TransformerEncoderLayer(24, 2, 48, dropout=0.0, batch_first=True, dtype=torch.float64).train(training)
    ours = copy.deepcopy(stock)
    ours.self_attn = SparseMultiheadAttention.from_attention(ours.self_attn, PATTERN)
    (x,) = inputs((2, 40, 24))
    with torch.no_grad():
        right = stock(x, src_mask=dropped(40, 40))
        torch.testing.assert_close(ours(x), right)
        torch.testing.assert_close(nn.TransformerEncoder(ours, 1).train(training)(x), right)


@pytest.mark.slow(reason="compiles a model")
def test_compiled_in_one_graph() -> None:
    layer, ours = (one.float() for one in pair(batch_first=True))
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    x = inputs((2, 40, 24))[0].float()
    right, _ = layer(x, x, x, attn_mask=dropped(40, 40), need_weights=False)
    torch.testing.assert_close(compiled(x, x, x)[0], right)
    torch.testing.assert_close(compiled(x, x, x, need_weights=True)[0], right)


def test_longformer_is_a_window_and_global_tokens_of_their_own_projections() -> None:
    torch.manual_seed(0)
    layer = LongformerAttention(24, 3, window=4, global_tokens=2, dtype=torch.float64)
    (x,) = inputs((2, 50, 24))

    def by_mask(projection: nn.Linear, mask: Tensor) -> Tensor:
        q, k, v = (one.unflatten(-1, (3, 8)).transpose(1, 2) for one in projection(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)

    assert layer.all is not None
    right = torch.cat((
        by_mask(layer.all, torch.ones(50, 50, dtype=torch.bool))[:, :2],
        by_mask(layer.local, longformer(4, 2).to_dense(50)[0, 0])[:, 2:],
    ), 1)  # fmt: skip
    torch.testing.assert_close(layer(x), layer.out(right))
    with pytest.raises(ConfigError, match="divides"):
        LongformerAttention(24, 5, 4)
    with pytest.raises(ConfigError, match="all that follows"):
        LongformerAttention(24, 3, 4, 1, autoregressive=True)


def test_a_block_sees_no_further_than_its_window() -> None:
    torch.manual_seed(0)
    block = LongformerBlock(24, 3, 4, autoregressive=True, dropout=0.1).double().eval()
    (x,) = inputs((1, 50, 24))
    (grad,) = torch.autograd.grad(block(x)[0, 30].sum(), x)
    seen = grad[0].abs().sum(-1).nonzero().flatten().tolist()
    assert seen == [26, 27, 28, 29, 30]
    assert block.train()(x).shape == x.shape


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(PatternError, match="heads apart"):
        SparseMultiheadAttention(PerHead((causal(), causal())), 24, 3)
    with pytest.raises(PatternError, match="no pattern"):
        SparseMultiheadAttention(torch.ones(4, 4), 24, 3)  # pyright: ignore[reportArgumentType]
    _, ours = pair(PrefixLM((1, 2, 3)), batch_first=True)
    with pytest.raises(MaskError):
        ours(*inputs((2, 40, 24)) * 3)
    with pytest.raises(RuntimeError, match="attn_mask"):
        pair()[1](*inputs((40, 2, 24)) * 3, is_causal=True)
