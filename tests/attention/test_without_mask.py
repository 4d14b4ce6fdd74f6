"""Attention whose mask keeps everything, or is causal, becomes torch's function without the mask."""

import math
from collections.abc import Callable

import attention_models as models
import pytest
import torch
import torch.nn.functional as F
from attention_models import N, Written, sdpa
from kernel_devices import needs_triton
from rewriting import rewritten, rewritten_for, site
from test_rule_block_attention import judged, tokens
from torch import Tensor

import sparsecomp


def causal(n: int) -> Tensor:
    return torch.ones(n, n, dtype=torch.bool).tril()


CAUSAL: dict[str, Callable[[int], Tensor]] = {
    "tril": causal,
    "positions": lambda n: torch.arange(n)[:, None] >= torch.arange(n),
    "of infinities": models.of_infinities,
    "of each head": lambda n: causal(n).expand(1, models.HEADS, n, n),
}
WHOLE: dict[str, Callable[[int], Tensor]] = {
    "pairs": lambda n: torch.ones(n, n, dtype=torch.bool),
    "keys": lambda n: (torch.arange(n) < n).view(1, 1, 1, n),
    "numbers": lambda n: torch.zeros(n, n),
}


def as_function(model: Callable[..., Tensor], *inputs: Tensor, **options: object) -> str:
    """The graph's code, if the model was rewritten to torch's function, to what eager gives."""
    found, report = rewritten(model, *inputs, strict=True, implementation="auto", **options)
    seen = site(report, "block_attention")
    assert seen.implementation == "sdpa", seen.reason
    torch.testing.assert_close(found, model(*inputs), atol=2e-6, rtol=1e-4)
    return report.graph_after or ""


@pytest.mark.parametrize("name", [*CAUSAL, *WHOLE])
def test_masks_that_are_known_to_need_no_tensor(name: str) -> None:
    with torch.no_grad():
        code = as_function(Written(sdpa, {**CAUSAL, **WHOLE}[name]), tokens())
    assert f"None, 0.0, {name in CAUSAL}" in code and not any(one in code for one in ("arange", "tril", "ones"))


def by_hand(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, dropout: object) -> Tensor:
    return (q @ k.mT * 0.3).masked_fill(~mask, -math.inf).softmax(-1) @ v


def of_three(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, dropout: object) -> Tensor:
    q, k, v = (one.flatten(0, 1) for one in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, mask, scale=0.7).unflatten(0, (-1, models.HEADS))


def grouped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, dropout: object) -> Tensor:
    return F.scaled_dot_product_attention(q, k[:, :1], v[:, :1], mask, enable_gqa=True)


@pytest.mark.parametrize("attend", [by_hand, of_three, grouped])
def test_with_gradients_in_every_way_of_writing(attend: Callable[..., Tensor]) -> None:
    model, x = Written(attend, causal), tokens().requires_grad_()
    found, seen = judged(model, x, implementation="auto")
    assert seen.implementation == "sdpa", seen.reason
    right = model(x)
    torch.testing.assert_close(found, right, atol=2e-6, rtol=1e-4)
    grads = [torch.autograd.grad(one.square().sum(), x)[0] for one in (found, right)]
    torch.testing.assert_close(*grads, atol=1e-5, rtol=1e-4)


def test_a_result_lies_as_it_was_written() -> None:
    """Torch's function gives heads behind tokens, of which this is no view."""

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, dropout: object) -> Tensor:
        return by_hand(q, k, v, mask, dropout).flatten(0, 1).view(-1).view_as(q)

    with torch.no_grad():
        as_function(Written(attend, causal), tokens(1))


@needs_triton
def test_dropout_is_left_to_torch() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, dropout: object) -> Tensor:
        return F.dropout((q @ k.mT).masked_fill(~mask, -math.inf).softmax(-1), 0.5) @ v

    found, report, code = rewritten_for("h200", Written(attend, causal), tokens())
    assert site(report, "block_attention").implementation == "sdpa", site(report, "block_attention").reason
    assert "None, 0.5, True, scale = 1.0" in code and not found.isnan().any()


OTHERS: dict[str, tuple[Callable[..., Tensor], Callable[[int], Tensor]]] = {
    "another diagonal": (sdpa, lambda n: torch.ones(n, n, dtype=torch.bool).tril(1)),
    "fewer keys": (
        lambda q, k, v, m, _: F.scaled_dot_product_attention(q, k[:, :, :90], v[:, :, :90], m[:, :90]), causal
    ),
    "a cap": (
        lambda q, k, v, m, _: (5 * torch.tanh(q @ k.mT / 5)).masked_fill(~m, -math.inf).softmax(-1) @ v, causal
    ),
    "a shallow value": (
        lambda q, k, v, m, _: F.scaled_dot_product_attention(q, k, v[..., :8], m).repeat(1, 1, 1, 2), causal
    ),
    "one head of two": (sdpa, lambda n: torch.stack([causal(n), causal(n).logical_not_().fill_diagonal_(True)])),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_what_torchs_flags_do_not_say(name: str) -> None:
    model = Written(*OTHERS[name])
    with torch.no_grad():
        found, seen = judged(model, tokens(), implementation="auto")
        assert seen.implementation != "sdpa", seen.reason
        torch.testing.assert_close(found, model(tokens()), atol=2e-6, rtol=1e-4)


def infinite(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, dropout: object) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, mask, scale=math.inf)


def infinite_by_hand(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, dropout: object) -> Tensor:
    return (q @ k.mT * 1e200 * 1e200).masked_fill(~mask, -math.inf).softmax(-1) @ v


@pytest.mark.parametrize("attend", [infinite, infinite_by_hand])
def test_an_infinite_scale_stays_as_written(attend: Callable[..., Tensor]) -> None:
    model = Written(attend, causal)
    with torch.no_grad():
        found, seen = judged(model, tokens(), implementation="auto")
        assert seen.reason.endswith("its scale is inf")
        torch.testing.assert_close(found, model(tokens()), equal_nan=True, atol=2e-6, rtol=1e-4)


def test_a_promised_buffer_that_is_written_to_is_followed() -> None:
    model, x = Written(by_hand, buffer=causal(N)), tokens()
    compiled = torch.compile(model, backend="sparsecomp", options={"frozen": "buffers"})
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), atol=2e-6, rtol=1e-4)
        assert site(sparsecomp.last_report(compiled), "block_attention").implementation != "sdpa"
        model.mask.copy_(models.by_arange(N))
        torch.testing.assert_close(compiled(x), model(x), atol=2e-6, rtol=1e-4)
