"""Residuals joined with spikes in the launch that makes them: which are, and that bytes stay the same."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from multi_step import block, by_kernels, functional, images, layer, lif, lively
from rewriting import Examples, dyadic, rewritten
from torch import Tensor, fx, nn

import sparsecomp
from sparsecomp.options import Options
from sparsecomp.passes.pipeline import run_rules
from sparsecomp.passes.spiking import fuse_residual

pytestmark = pytest.mark.quick_cases(1)

RULE = "fuse_residual"
Join = Callable[[Tensor, Tensor], Tensor]


def in_place(residual: Tensor, spikes: Tensor) -> Tensor:
    spikes += residual
    return spikes


JOINS: dict[str, tuple[Join, str]] = {
    "add": (lambda residual, spikes: residual + spikes, "residual + spikes"),
    "spikes first": (lambda residual, spikes: spikes + residual, "residual + spikes"),
    "in place": (in_place, "residual + spikes"),
    "and": (lambda residual, spikes: residual * spikes, "residual · spikes"),
    "iand": (lambda residual, spikes: residual * (1.0 - spikes), "residual · (1 - spikes)"),
    "iand, spikes first": (lambda residual, spikes: torch.rsub(spikes, 1) * residual, "residual · (1 - spikes)"),
}


class Block(nn.Module):
    """A block of SEW-ResNet; `skip` is its layer beside the others, if its sizes change."""

    def __init__(self, join: Join, inputs: int, outputs: int, skips: bool = False) -> None:
        super().__init__()
        self.join = join
        self.body = nn.Sequential(*block(inputs, outputs, lif), *block(outputs, outputs, lif))
        self.skip = nn.Sequential(*block(inputs, outputs, lif)) if skips else None

    def forward(self, x: Tensor) -> Tensor:
        # spikingjelly's come in this order
        spikes = self.body(x)
        return self.join(x if self.skip is None else self.skip(x), spikes)


def network(join: Join) -> nn.Module:
    """A stem with a pool, and three blocks, of which the second has a layer beside it."""
    blocks = Block(join, 16, 16), Block(join, 16, 24, skips=True), Block(join, 24, 24)
    return nn.Sequential(*block(3, 16, lif), layer.MaxPool2d(3, 2, 1, step_mode="m"), *blocks)


@pytest.mark.parametrize("join", JOINS)
@pytest.mark.slow_cases(4)
def test_bits_equal_eager_over_two_calls(join):
    x = images()
    make, told = JOINS[join]
    eager, model = (lively(network(make), x) for _ in range(2))
    with torch.no_grad():
        for _ in range(2):
            expected = eager(x)
            found, report = rewritten(model, x, neurons="fuse", strict=True)
            assert 0.005 < (expected != 0).float().mean() < 0.98
            torch.testing.assert_close(found, expected, rtol=0, atol=0)
            torch.testing.assert_close(model[-1].body[-1].v, eager[-1].body[-1].v, rtol=1e-5, atol=1e-6)
    judged = [one for one in report.sites if one.rule == RULE]
    assert [one.reason for one in judged] == [f"{told} in the launch that makes the spikes"] * 3
    # of two layers it is the one that comes later, if both are as good
    second = "5.body.5" if "iand" in join else "5.skip.2"
    assert [one.module for one in judged] == ["4.body.5", second, "6.body.5"]
    assert report.graph_after.count(" = torch.ops.sparsecomp.conv_lif") == 7


@pytest.mark.slow(reason="the interpreter runs whole networks")
@pytest.mark.parametrize("join", ["add", "and", "iand"])
@pytest.mark.slow_cases(3)
def test_on_kernels_bytes_equal_those_of_launches_apart(join):
    x, found = images(), []
    for disable in ((), (RULE,), (RULE, "byte_sums")):
        model = lively(network(JOINS[join][0]), x)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) / 50)
            result, report = by_kernels(model, x, disable=disable)
        found.append((result, model[-1].body[-1].v))
        assert len([one for one in report.sites if one.rule == RULE and one.rewritten]) == (0 if disable else 3)
    assert found[0][0].any()
    for other in found[1:]:
        torch.testing.assert_close(found[0], other, rtol=0, atol=0)


@pytest.mark.slow(reason="Inductor compiles a network twice")
def test_compiled_over_two_calls():
    x = images()
    eager, model = (lively(network(JOINS["in place"][0]), x) for _ in range(2))
    options = {"implementation": "binary", "neurons": "fuse"}
    compiled = torch.compile(model, backend="sparsecomp", options=options)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(compiled(x), eager(x), rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("join", ["add", "and", "iand"])
def test_on_a_card_bits_equal_those_of_residuals_apart(join, mode):
    x, found = images(), []
    for disable in ((), (RULE,), (RULE, "byte_sums")):
        torch._dynamo.reset()
        model = lively(network(JOINS[join][0]), x).cuda().to(memory_format=torch.channels_last)
        options = {"implementation": "binary", "neurons": "fuse", "mode": mode, "disable": disable}
        compiled, results = torch.compile(model, backend="sparsecomp", options=options), []
        with torch.no_grad():
            for scale in (1.0, 1.0, 0.7):  # the last one replays
                functional.reset_net(model)
                results.append(compiled(scale * x.cuda()).clone())
        report = sparsecomp.last_report()
        assert report is not None
        assert len([one for one in report.sites if one.rule == RULE and one.rewritten]) == (0 if disable else 3)
        found.append(results)
    assert all(one.any() for one in found[0]) and not torch.equal(found[0][0], found[0][2])
    for other in found[1:]:
        torch.testing.assert_close(found[0], other, rtol=0, atol=0)


class Joined(nn.Module):
    """Spikes, a layer with its neurons, and what is done with their spikes."""

    def __init__(self, join: Callable[["Joined", Tensor, Tensor], Any], layer: nn.Module | None = None) -> None:
        super().__init__()
        self.join, self.layer, self.neurons = join, layer or nn.Conv2d(8, 8, 3, padding=1), lif()

    def forward(self, x: Tensor) -> Any:
        residual = (x > 0.5).to(torch.int8)
        return self.join(self, residual.float(), self.fired(residual.float()))

    def fired(self, x: Tensor) -> Tensor:
        if isinstance(self.layer, nn.Linear):
            return self.neurons(self.layer(x))
        return self.neurons(self.layer(x.flatten(0, 1)).unflatten(0, x.shape[:2]))


def turned(x: Tensor) -> Tensor:
    """The same numbers, lying in another order."""
    return x.to(torch.int8).transpose(0, 1).contiguous().transpose(0, 1).float()


JUDGED: dict[str, tuple[Callable[[], nn.Module], str | None]] = {
    "plain": (lambda: Joined(lambda _, r, s: r + s), "residual + spikes in"),
    "read twice": (lambda: Joined(lambda _, r, s: (r + s, r * s)), "somebody else reads the spikes"),
    "returned": (lambda: Joined(lambda _, r, s: (r + s, s)), "somebody else reads the spikes"),
    "sum read twice": (lambda: Joined(lambda _, r, s: (y := r + s, y.mean(), y * 0.3)), "residual + spikes in"),
    "with itself": (lambda: Joined(lambda _, r, s: s + s), "somebody else reads the spikes"),
    "one step": (lambda: Joined(lambda _, r, s: r[:1].to(torch.int8).float() + s), "the residual is (1, 2, 8, 6, 6)"),
    "another order": (lambda: Joined(lambda _, r, s: turned(r) + s), "lies in another order"),
    "of floats": (lambda: Joined(lambda _, r, s: r * 0.3 + s), None),
    "three of them": (lambda: Joined(lambda _, r, s: r + (r + s)), "residual + spikes in"),
    "times two": (lambda: Joined(lambda _, r, s: 2 * s), None),
    "linear": (lambda: Joined(lambda _, r, s: s * r, nn.Linear(8, 8)), "residual · spikes in"),
}


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("name", JUDGED)
def test_which_residuals_are_joined(name):
    make, told = JUDGED[name]
    x = torch.rand(4, 6, 8, generator=torch.Generator().manual_seed(1)) if name == "linear" else images(4, 8)
    model = dyadic(make()).eval()
    with torch.no_grad():
        expected = model(x)
        functional.reset_net(model)
        found, report = rewritten(model, x, neurons="fuse", strict=True)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    judged = [one for one in report.sites if one.rule == RULE]
    assert told in judged[0].reason if told else not judged


def late(x: Tensor) -> Tensor:
    """Of the steps' images one behind the other, a residual that is made behind the layer."""
    return x.unflatten(0, (4, 2)).clone()


IN_BYTES: dict[str, tuple[Callable[[Tensor, Tensor, Tensor, Tensor], Any], str | None]] = {
    "plain": (lambda x, r, s, v: s + r, "residual + spikes in"),
    "late": (lambda x, r, s, v: late(x) + s, "residual + spikes in"),
    "residual written": (lambda x, r, s, v: (x.add_(1), r + s), "the residual is written to before it is read"),
    "written before": (lambda x, r, s, v: (y := late(x), x.zero_(), y + s), "what the layer reads is written to"),
    "written behind": (lambda x, r, s, v: (late(x) + s, x.zero_()), "residual + spikes in"),
    "spikes written": (lambda x, r, s, v: (s.mul_(2), r + s), "somebody else reads the spikes"),
    "made of the membranes": (
        lambda x, r, s, v: (v > 0.1).to(torch.int8).expand(4, 2, 8, 6, 6).clone() * s,
        "is read before the residual is there",
    ),
    "membranes read behind": (lambda x, r, s, v: (late(x) + s, v.mean()), "residual + spikes in"),
    "membranes read between": (lambda x, r, s, v: (v.mean(), r + s), "residual + spikes in"),
    "viewed": (lambda x, r, s, v: x + s.flatten(0, 1), "another view of the spikes"),
    "of shorts": (lambda x, r, s, v: r.short() + s, None),
    "twice": (lambda x, r, s, v: torch.add(r, s, alpha=2), None),
    "in place": (lambda x, r, s, v: r.clone().add_(s), None),
    "beyond a byte": (lambda x, r, s, v: 127 * r + s, "residual + spikes in"),
    "taken from two": (lambda x, r, s, v: r * (2 - s), None),
}


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("name", IN_BYTES)
def test_which_sums_of_bytes_are_joined(name):
    join, told = IN_BYTES[name]

    def model(x: Tensor) -> Any:
        fired = (x > 0.5).to(torch.int8)
        residual = fired.unflatten(0, (4, 2))
        how = ([1, 1], [1, 1], [1, 1], 1, 3, 1.0, 20.0, False, 4, None, 0.0, None, None, None, None)
        neuron = (0.0, "if", 1.0, None, False, 0.5, 0.0, True)
        spikes, last, _ = torch.ops.sparsecomp.conv_lif.default(fired, weight, None, *how, *neuron)
        return join(fired, residual, spikes, last)

    weight = torch.randn(8, 8, 3, 3, generator=torch.Generator().manual_seed(0)) / 8
    x = images(4, 8).flatten(0, 1).contiguous()
    with torch.no_grad():
        found, report = rewritten(model, x, strict=True)
        expected = model(x)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    judged = [one for one in report.sites if one.rule == RULE]
    assert told in judged[0].reason if told else not judged


@pytest.mark.parametrize(("index", "kept"), [(0, False), (-3, False), (1, True), (2, True), (None, True)])
def test_spikes_that_are_taken_twice_stay(index, kept):
    """As no graph of Dynamo's has them, but of a tracer."""
    x = torch.randint(0, 2, (8, 8, 6, 6), generator=torch.Generator().manual_seed(1), dtype=torch.int8)
    weight = torch.randn(8, 8, 3, 3, generator=torch.Generator().manual_seed(0)) / 8
    how = ([1, 1], [1, 1], [1, 1], 1, 3, 1.0, 20.0, False, 4, None, 0.0, None, None, None, None)

    def model(x: Tensor) -> tuple[Tensor, ...]:
        both = torch.ops.sparsecomp.conv_lif.default(x, weight, None, *how, 0.0, "if", 1.0, None, False, 0.5, 0.0, True)
        other = both[0] if index is None else both[index]
        joined = x.unflatten(0, (4, 2)) + (other if index is None else both[0])
        return (joined,) if index is None else (joined, other)

    gm = fx.symbolic_trace(model)
    Examples(gm).run(x)
    report = run_rules(gm, Options(strict=True), rules=[fuse_residual.RULE])
    assert [one.rewritten for one in report.sites] == [kept]
    torch.testing.assert_close(gm(x), model(x), rtol=0, atol=0)
