"""Attention with a known mask becomes one operator over its blocks; any other stays as written, and says why."""

import copy
import math
from collections.abc import Callable
from typing import Any

import attention_models as models
import pytest
import torch
import torch.nn.functional as F
from attention_models import BY_HAND, MASKS, WIDTH, N, Written, heads_of, sdpa
from kernel_devices import needs_triton
from rewriting import rewritten, site
from torch import Tensor, nn

import sparsecomp
from sparsecomp.compiler.capture import Graph
from sparsecomp.options import Options
from sparsecomp.report import Site

pytestmark = pytest.mark.quick_cases(2)


def tokens(batch: int = 2, n: int = N, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(batch, n, WIDTH, generator=torch.Generator().manual_seed(1), dtype=dtype)


def in_doubles(model: nn.Module, *inputs: Tensor) -> Tensor:
    doubles = [one.double() if one.is_floating_point() else one for one in inputs]
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return copy.deepcopy(model).double()(*doubles)
    finally:
        torch.set_default_dtype(default)


def judged(model: Callable[..., Any], *inputs: Tensor, **options: Any) -> tuple[Tensor, Site]:
    """The result of what a model was rewritten to, and its site."""
    found, report = rewritten(model, *inputs, strict=True, **options)
    return found, site(report, "block_attention")


def becomes_one(model: nn.Module, *inputs: Tensor, **options: Any) -> Site:
    """Judge that it is rewritten, to what eager gives in float64."""
    found, seen = judged(model, *inputs, **options)
    assert seen.rewritten, seen.reason
    torch.testing.assert_close(found.double(), in_doubles(model, *inputs), atol=2e-6, rtol=1e-4)
    return seen


def stays(model: nn.Module, *inputs: Tensor, **options: Any) -> Site:
    found, seen = judged(model, *inputs, **options)
    assert not seen.rewritten, seen.reason
    torch.testing.assert_close(found, model(*inputs), equal_nan=True, atol=1e-6, rtol=1e-5)
    return seen


@pytest.mark.parametrize("name", MASKS)
def test_masks_that_the_graph_computes_of_positions(name: str) -> None:
    seen = becomes_one(Written(sdpa, MASKS[name]), tokens())
    assert "positions alone" in seen.reason and "for finite inputs" in seen.reason


@pytest.mark.parametrize("name", BY_HAND)
def test_attention_by_hand(name: str) -> None:
    becomes_one(Written(BY_HAND[name], models.by_tril), tokens())


@pytest.mark.slow(reason="more models of what others have in the quick run")
def test_nothing_is_left_of_what_was_written() -> None:
    for attend in (sdpa, models.filled, models.filled_in_place, models.added):
        model = Written(attend, models.by_arange)
        _, report = rewritten(model, tokens(), strict=True)
        graph = "\n".join(line for line in report.graph_after.splitlines() if not line.strip().startswith("#"))
        assert graph.count("sparsecomp.block_attention") == 1
        assert not any(word in graph for word in ("softmax", "masked_fill", "arange", "scaled_dot"))


def spelled(call: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]) -> Written:
    return Written(lambda q, k, v, mask, dropout: call(q, k, v, mask), models.by_tril)


SPELLINGS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "by name": lambda q, k, v, m: F.scaled_dot_product_attention(
        query=q, key=k, value=v, attn_mask=m, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
    ),
    "by place": lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m, 0.0, False),
    "scaled": lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m, scale=0.7),
    "whole scale": lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m, scale=1),
    "aten": lambda q, k, v, m: torch.ops.aten.scaled_dot_product_attention.default(q, k, v, m),
    "grouped": lambda q, k, v, m: F.scaled_dot_product_attention(q, k[:, :1], v[:, :1], m, enable_gqa=True),
    "three dimensions": lambda q, k, v, m: F.scaled_dot_product_attention(
        q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), m
    ).unflatten(0, (-1, models.HEADS)),
    "four of a mask": lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m[None, None]),
    "fewer keys": lambda q, k, v, m: F.scaled_dot_product_attention(q, k[:, :, :90], v[:, :, :90], m[:, :90]),
    "a shallow value": lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v[..., :8], m).repeat(1, 1, 1, 2),
    "a view of it": lambda q, k, v, m: F.scaled_dot_product_attention(q.contiguous(), k, v, m).view(-1, 2, N, 16),
}  # fmt: skip


@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings_of_torchs_function(name: str) -> None:
    becomes_one(spelled(SPELLINGS[name]), tokens())


@pytest.mark.parametrize("name", ["filled", "added", "sdpa", "chosen"])
def test_a_buffer_needs_a_promise(name: str) -> None:
    """Or it is data, which does not pay by estimate."""
    model = Written(sdpa if name == "sdpa" else BY_HAND[name], buffer=models.by_tril(N))
    assert "scanned in each call" in becomes_one(model, tokens()).reason
    seen = stays(model, tokens(), implementation="auto")
    assert seen.why == "MASK_NOT_FROZEN" and "frozen='buffers'" in seen.reason
    seen = becomes_one(model, tokens(), frozen="buffers")
    assert "mask" in seen.reason and "promise" in seen.reason
    becomes_one(model, tokens(), frozen=True)


@pytest.mark.slow(reason="more models of what others have in the quick run")
def test_a_buffer_longer_than_the_sequence() -> None:
    class Sliced(Written):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x, self.mask[:, :, : x.shape[1], : x.shape[1]])

    mask = torch.tril(torch.ones(256, 256)).view(1, 1, 256, 256)
    becomes_one(Sliced(models.filled, buffer=mask), tokens(), frozen="buffers")


@pytest.mark.slow(reason="compiles models")
@pytest.mark.parametrize("attend", [sdpa, models.filled])
def test_a_promised_mask_that_is_written_to_all_the_same(attend: Callable[..., Tensor]) -> None:
    model = Written(attend, buffer=models.by_tril(N))
    compiled = torch.compile(model, backend="sparsecomp", options={"frozen": "buffers", "implementation": "skip"})
    x = tokens()
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), atol=1e-5, rtol=1e-4)
        model.mask.copy_(models.by_arange(N))
        torch.testing.assert_close(compiled(x), model(x), atol=1e-5, rtol=1e-4)
        model.mask.fill_(True)
        torch.testing.assert_close(compiled(x), model(x), atol=1e-5, rtol=1e-4)
        model.mask = torch.rand(N, N, generator=torch.Generator().manual_seed(2)) < 0.5
        torch.testing.assert_close(compiled(x), model(x), atol=1e-5, rtol=1e-4)
    assert any(one.rewritten for one in sparsecomp.last_report().sites)


@pytest.mark.slow(reason="compiles models")
def test_a_promised_mask_that_becomes_something_else_is_no_wrong_result() -> None:
    model = Written(sdpa, buffer=models.of_floats(N))
    compiled = torch.compile(model, backend="sparsecomp", options={"frozen": "buffers", "implementation": "skip"})
    with torch.no_grad():
        compiled(tokens())
        model.mask.fill_(-0.5)
        with pytest.raises(sparsecomp.errors.FrozenWeightError, match="adds other numbers"):
            compiled(tokens())


@pytest.mark.slow(reason="compiles models")
def test_a_hidden_write_is_found_under_debug(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSECOMP_DEBUG", "1")
    model = Written(sdpa, buffer=models.by_tril(N))
    compiled = torch.compile(model, backend="sparsecomp", options={"frozen": "buffers", "implementation": "skip"})
    with torch.no_grad():
        torch.testing.assert_close(compiled(tokens()), model(tokens()), atol=1e-5, rtol=1e-4)
        model.mask.data.fill_(True)
        with pytest.raises(sparsecomp.errors.FrozenWeightError, match="mask"):
            compiled(tokens())


@pytest.mark.slow(reason="compiles models")
def test_optimize_gives_what_eager_gives() -> None:
    model = Written(sdpa, models.by_tril)
    with torch.no_grad():
        optimized = sparsecomp.optimize(model, tokens(), implementation="skip")
        torch.testing.assert_close(optimized(tokens()), model(tokens()), atol=1e-5, rtol=1e-4)
    assert list(optimized.state_dict()) == list(model.state_dict())


class Refused(nn.Module):
    def __init__(self, call: Callable[..., Tensor], mask: Tensor | None = None) -> None:
        super().__init__()
        self.call = call
        self.mask = nn.Parameter(mask) if mask is not None else None

    def forward(self, x: Tensor, *given: Tensor) -> Tensor:
        q, k, v = heads_of(torch.cat([x, x.flip(1), x * 0.5], -1))
        mask = given[0] if given else models.by_tril(x.shape[1]) if self.mask is None else self.mask
        return self.call(q, k, v, mask)


def weights_too(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    weights = (q @ k.mT).masked_fill(~mask, -math.inf).softmax(-1)
    return weights @ v + weights.mean()


def masked_twice(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (q @ k.mT).masked_fill(~mask, -math.inf).masked_fill(~mask, -1e4).softmax(-1) @ v


def written_between(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    q, v = q.clone(), v.clone()
    scores = q @ k.mT
    q.zero_()
    return scores.masked_fill(~mask, -math.inf).softmax(-1) @ v


def filled_with(value: float) -> Callable[..., Tensor]:
    return lambda q, k, v, mask: (q @ k.mT).masked_fill(~mask, value).softmax(-1) @ v


REFUSED: dict[str, tuple[Callable[..., Tensor], str]] = {
    "negative scale": (lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m, scale=-1.0), "scale"),
    "a finite number": (filled_with(-1e9), "become -1e+09"),
    "weights are read": (weights_too, "reads its weights or scores too"),
    "masked twice": (masked_twice, "more than once"),
    "written between": (written_between, "written to"),
    "broadcast": (lambda q, k, v, m: F.scaled_dot_product_attention(q, k[:1], v[:1], m), "broadcast"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_stays_as_written(name: str) -> None:
    call, told = REFUSED[name]
    seen = stays(Refused(call), tokens())
    assert told in seen.reason and seen.why == "ATTENTION_AS_WRITTEN"


def test_a_mask_that_is_trained_is_read_in_each_call() -> None:
    seen = becomes_one(Refused(F.scaled_dot_product_attention, torch.zeros(N, N)), tokens(), frozen=True)
    assert "scanned in each call" in seen.reason


def test_dynamic_sizes_stay() -> None:
    seen: list[Site] = []

    def backend(gm, inputs):
        options = Options(implementation="skip", strict=True)
        seen.append(site(Graph.of_dynamo(gm, inputs, {}, options).rewrite(options), "block_attention"))
        return gm.forward

    torch.compile(Written(sdpa, models.by_tril), backend=backend, dynamic=True)(tokens())
    assert "dynamic" in seen[0].reason


@pytest.mark.slow(reason="more models of what others have in the quick run")
def test_options_that_leave_it() -> None:
    model = Written(sdpa, models.by_tril)
    assert "precision" in stays(model, tokens(), precision="exact").reason
    assert stays(model, tokens(), implementation="dense").why == "FORCED_DENSE"
    _, report = rewritten(model, tokens(), disable=("block_attention",))
    assert not [one for one in report.sites if one.rule == "block_attention"]


@pytest.mark.slow(reason="more models of what others have in the quick run")
def test_without_a_mask_or_a_softmax_over_keys_it_is_no_site() -> None:
    for call in (
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        lambda q, k, v, m: (q @ k.mT).softmax(-1) @ v,
        lambda q, k, v, m: (q @ k.mT).masked_fill(~m, -math.inf).softmax(-2) @ v,
        lambda q, k, v, m: (q @ k.mT).masked_fill(~m, 0.0) @ v,
        lambda q, k, v, m: (q @ k.mT).masked_fill(~m, -math.inf).tanh().softmax(-1) @ v,
    ):
        _, report = rewritten(Refused(call), tokens())
        assert not [one for one in report.sites if one.rule == "block_attention"]


@pytest.mark.slow(reason="more models of what others have in the quick run")
def test_axes_are_read_and_not_guessed() -> None:
    """Sizes that are equal hide which is which: queries and keys swapped, or heads and tokens."""
    square = 16

    def swapped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        weights = torch.einsum("bhqd,bhkd->bhqk", q, k).masked_fill(~mask, -math.inf).softmax(-1)
        return torch.einsum("bhqk,bhqd->bhkd", weights, v)

    def heads_permuted(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return (q @ k.permute(0, 3, 2, 1)).masked_fill(~mask, -math.inf).softmax(-1) @ v

    q = torch.randn(2, square, square, square, generator=torch.Generator().manual_seed(3))
    mask = models.by_tril(square)
    for attend in (swapped, heads_permuted):
        found, report = rewritten(lambda q, attend=attend: attend(q, q * 2, q - 1, models.by_tril(square)), q)
        torch.testing.assert_close(found, attend(q, q * 2, q - 1, mask))


@pytest.mark.parametrize("attend", [sdpa, models.filled, models.einsums])
def test_training(attend: Callable[..., Tensor]) -> None:
    model = Written(attend, models.by_tril)
    x = tokens().requires_grad_()
    found, seen = judged(model, x)
    assert seen.rewritten
    wide = copy.deepcopy(model).double()
    doubled = x.detach().double().requires_grad_()
    grads = torch.autograd.grad(found.square().sum(), [x, *model.parameters()])
    right = torch.autograd.grad(wide(doubled).square().sum(), [doubled, *wide.parameters()])
    for one, other in zip(grads, right, strict=True):
        torch.testing.assert_close(one.double(), other, atol=1e-4, rtol=1e-4)


@pytest.mark.slow(reason="more models of what others have in the quick run")
def test_queries_without_keys_are_zero_as_in_eager() -> None:
    def half(n: int) -> Tensor:
        return models.by_tril(n) & (torch.arange(n) > 70)[:, None]

    becomes_one(Written(sdpa, half), tokens())


@pytest.mark.slow(reason="more models of what others have in the quick run")
def test_layers_that_share_a_mask_share_its_lists() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = Written(sdpa), Written(models.filled)

        def forward(self, x: Tensor) -> Tensor:
            mask = models.by_tril(x.shape[1])
            return self.two(self.one(x, mask), mask)

    model = Two()
    found, report = rewritten(model, tokens(), strict=True)
    assert sum(one.rewritten for one in report.sites if one.rule == "block_attention") == 2
    torch.testing.assert_close(found, model(tokens()), atol=1e-5, rtol=1e-4)
    assert "_sparsecomp_constant10" in report.graph_after  # sdpa takes queries without keys, the other does not
    _, report = rewritten(nn.Sequential(*(Written(sdpa, models.by_tril) for _ in range(3))), tokens(), strict=True)
    assert "_sparsecomp_constant9" in report.graph_after and "_sparsecomp_constant10" not in report.graph_after


@pytest.mark.slow(reason="more models of what others have in the quick run")
def test_under_autocast() -> None:
    model = Written(sdpa, models.by_tril)

    def run(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    found, seen = judged(run, tokens())
    assert seen.rewritten and found.dtype is torch.bfloat16
    torch.testing.assert_close(found.double(), in_doubles(model, tokens()), atol=3e-2, rtol=3e-2)


@pytest.mark.slow(reason="compiles models")
def test_the_whole_compiler() -> None:
    """Through Inductor, in inference and in training, of a model whose mask leaves most blocks empty."""
    n = 400
    model = Written(models.filled, models.by_arange)
    compiled = torch.compile(model, backend="sparsecomp", options={"implementation": "skip"})
    x = tokens(1, n)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), atol=1e-5, rtol=1e-4)
    assert [one.rewritten for one in sparsecomp.last_report().sites if one.rule == "block_attention"] == [True]
    compiled(x).sum().backward()
    found = [one.grad.clone() for one in model.parameters()]
    model.zero_grad()
    model(x).sum().backward()
    for one, other in zip(found, (one.grad for one in model.parameters()), strict=True):
        torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-4)


class Heads(nn.Module):
    """Causal attention in a window of 100, of heads so wide."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.depth = depth

    def forward(self, x: Tensor) -> Tensor:
        place = torch.arange(x.shape[1], device=x.device)
        distance = place[:, None] - place
        heads = x.unflatten(-1, (-1, self.depth)).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads, (distance >= 0) & (distance < 100))


@needs_triton
@pytest.mark.parametrize(("depth", "found"), [(64, True), (320, False)])
def test_on_a_card_that_is_not_there(depth: int, found: bool) -> None:
    with torch.no_grad():
        x = torch.zeros(8, 1024, 2 * depth, dtype=torch.bfloat16)
        report = sparsecomp.explain(Heads(depth), x, device="h100", mode="reduce-overhead")
    (one,) = [one for one in report.sites if one.rule == "block_attention"]
    assert one.rewritten == found
    assert found or "heads of 256 numbers at most" in one.reason


@needs_triton
@pytest.mark.slow(reason="judges models of a card's sizes")
@pytest.mark.parametrize(("tokens", "parts"), [((0, 5000), 3), ((), 0)])
def test_on_a_card_lists_of_global_tokens_are_walked_over_in_parts(tokens: tuple[int, ...], parts: int) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        place = torch.arange(q.shape[2], device=q.device)
        kept = (place[:, None] - place).abs() < 256
        for token in tokens:
            kept = kept | (place == token) | (place[:, None] == token)
        return F.scaled_dot_product_attention(q, k, v, kept)

    operands = [torch.zeros(1, 2, 8192, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    report = sparsecomp.explain(attend, *operands, device="h100", mode="reduce-overhead")
    assert site(report, "block_attention").rewritten
    (line,) = [one for one in report.graph_after.splitlines() if "sparsecomp.block_attention.default(" in one]
    assert line.split(");")[0].endswith(f"False, {parts}")
