"""Attention with a bias that is trained, in the ways in which models write it, gives the gradients that eager gives."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from attention_models import N
from kernel_devices import needs_triton
from rewriting import rewritten, site
from test_rule_block_attention import judged
from torch import Tensor, nn

import sparsecomp

FARTHEST = 20


def positions() -> Tensor:
    place = torch.arange(N)
    return place[:, None] - place


def near() -> Tensor:
    return positions().clamp(-FARTHEST, FARTHEST) + FARTHEST


def window() -> Tensor:
    return (positions() >= 0) & (positions() < 40)


def by_hand(q: Tensor, k: Tensor, v: Tensor, added: Tensor) -> Tensor:
    return (q @ k.mT * 0.25 + added).softmax(-1) @ v


def filled_by_hand(q: Tensor, k: Tensor, v: Tensor, added: Tensor) -> Tensor:
    scores = q @ k.mT / 4 + added
    return scores.masked_fill(~window(), -math.inf).softmax(-1) @ v


def chosen_by_hand(q: Tensor, k: Tensor, v: Tensor, added: Tensor) -> Tensor:
    scores = torch.where(window(), q @ k.mT / 4 + added, -math.inf)
    return F.dropout(scores.softmax(-1), 0.0) @ v


sdpa = F.scaled_dot_product_attention
TRAINED: dict[str, tuple[Callable[..., Tensor], tuple[int, ...], int]] = {
    "a number for each pair": (sdpa, (1, 2, N, N), 100), "one for all heads": (sdpa, (N, N), 100),
    "by hand": (by_hand, (2, N, N), 100), "of keys": (by_hand, (2, 1, N), 100),
    "of queries and heads": (sdpa, (1, 2, N, 1), 100),
    "filled": (lambda q, k, v, b: sdpa(q, k, v, b.masked_fill(~window(), -math.inf)), (2, N, N), 56),
    "filled by hand": (filled_by_hand, (2, N, N), 56), "chosen by hand": (chosen_by_hand, (1, 2, N, N), 56),
    "beside a mask": (
        lambda q, k, v, b: sdpa(q, k, v, b + torch.zeros(N, N).masked_fill(~window(), -math.inf)), (2, N, N), 56
    ),
    "a table": (lambda q, k, v, t: sdpa(q, k, v, t[near()].permute(2, 0, 1)[None]), (2 * FARTHEST + 1, 2), 100),
    "an embedding": (
        lambda q, k, v, t: by_hand(q, k, v, F.embedding(near(), t).permute(2, 0, 1)), (2 * FARTHEST + 1, 2), 100
    ),
    "slopes": (lambda q, k, v, s: filled_by_hand(q, k, v, -s[:, None, None] * positions()), (2,), 56),
}  # fmt: skip


class Trained(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.attend, shape, _ = TRAINED[name]
        self.bias = nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(3)))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.attend(q, k, v, self.bias)


def given() -> list[Tensor]:
    random = torch.Generator().manual_seed(0)
    return [torch.randn(2, 2, N, 16, generator=random, requires_grad=True) for _ in range(3)]


def alike(found: Tensor, right: Tensor, wanted: list[Tensor]) -> None:
    torch.testing.assert_close(found, right, atol=5e-6, rtol=1e-4, equal_nan=True)
    grads = [torch.autograd.grad(one.square().sum(), wanted) for one in (found, right)]
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4, equal_nan=True)


@pytest.mark.parametrize("name", TRAINED)
def test_gradients_are_those_of_eager(name: str) -> None:
    model, operands, (_, _, share) = Trained(name), given(), TRAINED[name]
    found, seen = judged(model, *operands)
    assert seen.rewritten, seen.reason
    assert f"{share}% of its blocks are assumed to be kept, by the call" in seen.reason
    alike(found, model(*operands), [*operands, model.bias])


@pytest.mark.parametrize("attend", [sdpa, by_hand])
def test_of_queries_that_keep_nothing(attend: Callable[..., Tensor]) -> None:
    """By hand all is NaN that they reach: their numbers, their head's keys and values."""
    operands = given()
    bias = torch.randn(1, 2, N, N, generator=torch.Generator().manual_seed(3))
    bias[:, 1, 5] = -math.inf
    bias.requires_grad_()
    found, seen = judged(attend, *operands, bias)
    assert seen.rewritten, seen.reason
    alike(found, attend(*operands, bias), [*operands, bias])


@pytest.mark.parametrize("made", [window, lambda: positions() > 0])
def test_what_is_filled_in_by_data_or_leaves_a_query_nothing_stays(made: Callable[[], Tensor]) -> None:
    """In training: scores that are replaced have no gradient, which those have that a number is added to."""
    bias = torch.randn(2, N, N, generator=torch.Generator().manual_seed(3), requires_grad=True)

    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, *kept: Tensor) -> Tensor:
        (mask,) = kept or (made(),)
        return (q @ k.mT / 4 + bias).masked_fill(~mask, -math.inf).softmax(-1) @ v

    operands = given()
    found, report = rewritten(attend, *operands, bias, *([made()] if made is window else []), strict=True)
    assert not site(report, "block_attention").rewritten
    alike(found, attend(*operands, bias), [*operands, bias])


class Layers(nn.Module):
    """Two layers that share a bias, as those of T5."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2 * FARTHEST + 1, 2)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        bias = self.table(near()).permute(2, 0, 1)[None]
        return by_hand(by_hand(q, k, v, bias), k, v, bias)


def test_layers_share_a_scan() -> None:
    model, operands = Layers(), given()
    found, report = rewritten(model, *operands, strict=True)
    assert [one.rewritten for one in report.sites if one.rule == "block_attention"] == [True, True]
    scan = "torch.ops.sparsecomp.scanned_mask.default(levelled_mask_default, "
    assert report.graph_after.count("torch.ops.sparsecomp.scanned_mask.default(") == report.graph_after.count(scan) == 1
    alike(found, model(*operands), [*operands, *model.parameters()])


@pytest.mark.slow(reason="compiles a model")
@pytest.mark.parametrize("autocast", [False, True])
def test_the_whole_compiler(autocast: bool) -> None:
    model, operands = Layers(), given()
    compiled = torch.compile(model, backend="sparsecomp", options={"implementation": "skip"})
    bound = 5e-2 if autocast else 1e-4
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16, autocast):
            found, right = compiled(*operands), model(*operands)
        wanted = [*operands, *model.parameters()]
        grads = [torch.autograd.grad(one.float().square().sum(), wanted) for one in (found, right)]
        for one, other in zip((found, *grads[0]), (right, *grads[1]), strict=True):
            assert float((one - other).norm() / other.norm()) < bound
        with torch.no_grad():
            model.table.weight.mul_(0.5)
    assert all(one.rewritten for one in sparsecomp.last_report(compiled).sites if one.rule == "block_attention")


class Windowed(nn.Module):
    """A table by distance, of a window of 200; by hand, so that it can be held against itself in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(65, 4, generator=torch.Generator().manual_seed(3)))

    def bias(self, tokens: int) -> Tensor:
        place = torch.arange(tokens, device=self.table.device)
        distance = place[:, None] - place
        bias = F.embedding(distance.clamp(-32, 32) + 32, self.table).permute(2, 0, 1)[None]
        return bias.masked_fill((distance < 0) | (distance > 200), -math.inf)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa(q, k, v, self.bias(q.shape[2]))

    def exact(self, *operands: Tensor) -> list[Tensor]:
        """The result, and the gradients of the sum of its squares by operands and table, in float64."""
        q, k, v = (one.detach().double().requires_grad_() for one in operands)
        wide = Windowed().to(q)
        wide.table.data.copy_(self.table)
        found = (q @ k.mT / 8 + wide.bias(q.shape[2])).softmax(-1) @ v
        return [found, *torch.autograd.grad(found.square().sum(), [q, k, v, wide.table])]


NAMES = ("the result", "queries", "keys", "values", "the table")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_on_a_gpu(mode: str) -> None:
    model, random = Windowed().cuda(), torch.Generator("cuda").manual_seed(0)
    operands = [torch.randn(2, 4, 1000, 64, device="cuda", generator=random, requires_grad=True) for _ in range(3)]
    compiled = torch.compile(model, backend="sparsecomp", options={"implementation": "skip", "mode": mode})
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        out = compiled(*operands)
        found = [out, *torch.autograd.grad(out.square().sum(), [*operands, model.table])]
        pairs = zip(NAMES, [one.double() for one in found], model.exact(*operands), strict=True)
        errors = {name: float((one - other).norm() / other.norm()) for name, one, other in pairs}
        assert all(error < 2e-5 for error in errors.values()), errors
        with torch.no_grad():
            model.table.mul_(0.7)
    report = sparsecomp.last_report(compiled)
    assert report is not None
    assert {one.rule: one.rewritten for one in report.sites} == {"block_attention": True, "bias_table": True}


@needs_triton
@pytest.mark.slow(reason="computes dense attention over 4096 tokens")
def test_on_a_card_a_window_pays_and_the_reason_says_so() -> None:
    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(1, 4, 4096, 4096, dtype=torch.bfloat16))

        def forward(self, x: Tensor) -> Tensor:
            heads = x.unflatten(-1, (-1, 64)).transpose(1, 2)
            place = torch.arange(4096, device=x.device)
            distance = place[:, None] - place
            dropped = (distance < 0) | (distance > 256)
            return sdpa(heads, heads, heads, self.bias.masked_fill(dropped, -math.inf))

    x = torch.zeros(4, 4096, 256, dtype=torch.bfloat16, requires_grad=True)
    seen = site(sparsecomp.explain(Biased(), x, device="h100"), "block_attention")
    assert seen.rewritten and (seen.expected_gain or 0) > 1.5, seen.reason
