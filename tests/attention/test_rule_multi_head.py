"""`nn.MultiheadAttention` and the layers of `nn.Transformer` with a mask are found as they are."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rewriting import rewritten, site
from torch import Tensor, nn

from sparsecomp.report import Report

BATCH, TOKENS, WIDTH, HEADS = 2, 70, 32, 4


def padding() -> Tensor:
    """True where a token is not there; one sequence is shorter."""
    return torch.arange(TOKENS) >= torch.tensor([[TOKENS], [40]])


def window() -> Tensor:
    place = torch.arange(TOKENS)
    return (place[:, None] - place).abs() > 5


def by_head() -> Tensor:
    far = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)
    return torch.stack([far < head for head in range(HEADS)]).repeat(BATCH, 1, 1)


def layer(**how: Any) -> nn.MultiheadAttention:
    torch.manual_seed(0)
    return nn.MultiheadAttention(WIDTH, HEADS, **{"batch_first": True, **how})


def tokens(width: int = WIDTH, seed: int = 1) -> Tensor:
    return torch.randn(BATCH, TOKENS, width, generator=torch.Generator().manual_seed(seed))


Attend = Callable[..., Tensor]
FOUND: dict[str, tuple[nn.Module, Attend]] = {
    "padding": (layer(), lambda m, x, y: m(x, x, x, key_padding_mask=padding(), need_weights=False)[0]),
    "weights that nobody reads": (layer(), lambda m, x, y: m(
        x, x, x, key_padding_mask=padding(), attn_mask=torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1))[0]),
    "a causal hint beside weights": (layer(), lambda m, x, y: m(x, x, x, attn_mask=window(), is_causal=True)[0]),
    "a window": (layer(bias=False), lambda m, x, y: m(x, x, x, attn_mask=window(), need_weights=False)[0]),
    "both": (layer(), lambda m, x, y: m(
        x, x, x, key_padding_mask=padding(), attn_mask=window(), need_weights=False)[0]),
    "a causal one with padding": (layer(), lambda m, x, y: m(
        x, x, x, key_padding_mask=padding(), attn_mask=torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1),
        need_weights=False, is_causal=True)[0]),
    "of each head": (layer(), lambda m, x, y: m(x, x, x, attn_mask=by_head(), need_weights=False)[0]),
    "of numbers": (layer(), lambda m, x, y: m(
        x, x, x, attn_mask=torch.zeros(TOKENS, TOKENS).masked_fill(window(), -torch.inf), need_weights=False)[0]),
    "of another sequence": (layer(), lambda m, x, y: m(x, y, y, key_padding_mask=padding(), need_weights=False)[0]),
    "of three": (layer(), lambda m, x, y: m(x, y, y + x, key_padding_mask=padding(), need_weights=False)[0]),
    "of other widths": (layer(kdim=WIDTH, vdim=20), lambda m, x, y: m(
        x, y, x[..., :20], key_padding_mask=padding(), need_weights=False)[0]),
    "tokens first": (layer(batch_first=False), lambda m, x, y: m(
        *[x.transpose(0, 1)] * 3, key_padding_mask=padding(), need_weights=False)[0]),
    "an encoder's layer": (
        nn.TransformerEncoderLayer(WIDTH, HEADS, 64, dropout=0.0, batch_first=True),
        lambda m, x, y: m(x, src_key_padding_mask=padding(), src_mask=window()),
    ),
    "a decoder's layer": (
        nn.TransformerDecoderLayer(WIDTH, HEADS, 64, dropout=0.0, batch_first=True),
        lambda m, x, y: m(x, y, tgt_mask=window(), memory_key_padding_mask=padding()),
    ),
}  # fmt: skip


def judged(name_or_case: tuple[nn.Module, Attend], *given: Tensor) -> tuple[Tensor, Report]:
    model, attend = name_or_case
    return rewritten(lambda x, y: attend(model, x, y), *given, strict=True)


@pytest.mark.parametrize("name", FOUND)
def test_results_and_gradients_are_those_of_eager(name: str) -> None:
    model, attend = FOUND[name]
    model.train()
    given = [one.requires_grad_() for one in (tokens(), tokens(seed=2))]
    found, report = judged(FOUND[name], *given)
    sites = [one for one in report.sites if one.rule == "block_attention"]
    assert len(sites) == (2 if name == "a decoder's layer" else 1)
    assert all(one.rewritten for one in sites), [one.reason for one in sites]
    right = attend(model, *given)
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)
    leaves = [*given, *model.parameters()]
    grads = [torch.autograd.grad(one.square().sum(), leaves, allow_unused=True) for one in (found, right)]
    for one, other in zip(*grads, strict=True):
        assert (one is None) == (other is None)
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


def test_in_inference_and_under_autocast() -> None:
    case = FOUND["padding"]
    case[0].eval()
    with torch.no_grad():
        found, report = judged(case, tokens(), tokens())
        torch.testing.assert_close(found, case[1](case[0], tokens(), tokens()), rtol=1e-4, atol=1e-5)
    assert site(report, "block_attention").rewritten

    def rounded(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return case[1](case[0], x, x)

    case[0].train()
    found, report = rewritten(rounded, tokens(), strict=True)
    assert site(report, "block_attention").rewritten and found.dtype is torch.bfloat16
    torch.testing.assert_close(found, rounded(tokens()), rtol=3e-2, atol=3e-2)


def test_the_padding_that_is_scanned_has_one_row_a_sequence() -> None:
    case = FOUND["padding"]
    case[0].train()
    _, report = judged(case, tokens(), tokens())
    (scan,) = [line for line in report.graph_after.splitlines() if "scanned_mask.default(" in line]
    name = scan.split("scanned_mask.default(")[1].split(",")[0]
    assert f'{name}: "b8[{BATCH}, 1, 1, {TOKENS}]"' in report.graph_after


LEFT: dict[str, tuple[nn.Module, Attend]] = {
    "no mask": (layer(), lambda m, x, y: m(x, x, x, need_weights=False)[0]),
    "weights": (layer(), lambda m, x, y: (found := m(x, x, x, attn_mask=window()))[0] + found[1].sum()),
    "a causal hint": (layer(), lambda m, x, y: m(
        x, x, x, attn_mask=torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1), need_weights=False,
        is_causal=True)[0]),
    "a bias of keys": (layer(add_bias_kv=True), lambda m, x, y: m(
        x, x, x, attn_mask=window(), need_weights=False)[0]),
    "a zero": (layer(add_zero_attn=True), lambda m, x, y: m(x, x, x, attn_mask=window(), need_weights=False)[0]),
    "no batch": (layer(), lambda m, x, y: m(*[x[0]] * 3, attn_mask=window(), need_weights=False)[0]),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_what_stays_one_call(name: str) -> None:
    model, attend = LEFT[name]
    model.train()
    found, report = judged(LEFT[name], tokens(), tokens())
    assert not report.sites or not any(one.rule == "block_attention" for one in report.sites)
    torch.testing.assert_close(found, attend(model, tokens(), tokens()), rtol=1e-5, atol=1e-6)


def test_without_the_rules_of_attention_it_stays_one_call() -> None:
    model = FOUND["padding"][0].train()
    _, report = rewritten(
        lambda x: F.relu(FOUND["padding"][1](model, x, x)), tokens(), disable=("block_attention", "decode_attention")
    )
    assert "scaled_dot_product_attention" not in report.graph_after


@pytest.mark.slow(reason="compiles a model")
def test_the_whole_compiler() -> None:
    model = FOUND["an encoder's layer"][0].train()
    attend = FOUND["an encoder's layer"][1]
    compiled = torch.compile(
        lambda x: attend(model, x, x), backend="sparsecomp", options={"implementation": "skip"}
    )  # fmt: skip
    x, again = tokens().requires_grad_(), tokens().requires_grad_()
    found, right = compiled(x), attend(model, again, again)
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)
    found.square().sum().backward()
    right.square().sum().backward()
    torch.testing.assert_close(x.grad, again.grad, rtol=1e-3, atol=1e-3)


def test_booleans_that_are_written_to_before_the_mask_is_read_are_not_read_instead() -> None:
    model = FOUND["padding"][0].train()
    weights = (model.in_proj_weight, model.in_proj_bias, None, None, False, 0.0, model.out_proj.weight, None)

    def attend(x: Tensor, dropped: Tensor) -> Tensor:
        dropped, x = dropped.clone(), x.transpose(0, 1)
        mask = torch.zeros_like(dropped, dtype=x.dtype).masked_fill_(dropped, -torch.inf)
        dropped.logical_not_()
        how = {"key_padding_mask": mask, "need_weights": False}
        return F.multi_head_attention_forward(x, x, x, WIDTH, HEADS, *weights, **how)[0]  # pyright: ignore

    found, report = rewritten(attend, tokens(), padding(), strict=True)
    assert site(report, "block_attention").rewritten
    torch.testing.assert_close(found, attend(tokens(), padding()), rtol=1e-4, atol=1e-5)


def test_layers_share_a_scan() -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 64, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).train()
    found, report = rewritten(lambda x, p: model(x, src_key_padding_mask=p), tokens(), padding(), strict=True)
    assert report.graph_after.count("scanned_mask.default(") == 1
    torch.testing.assert_close(found, model(tokens(), src_key_padding_mask=padding()), rtol=1e-4, atol=1e-5)


def test_beside_weights_queries_that_keep_nothing_give_nan() -> None:
    model = layer().train()

    def attend(x: Tensor, p: Tensor) -> Tensor:
        return model(x, x, x, key_padding_mask=p, attn_mask=window())[0]

    found, report = rewritten(attend, tokens(), padding(), strict=True)
    assert site(report, "block_attention").rewritten
    right = attend(tokens(), padding())
    assert right.isnan().any() and not right.isnan().all()
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5, equal_nan=True)
