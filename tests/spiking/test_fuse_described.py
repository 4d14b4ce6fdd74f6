"""Layers fused with neurons that are written by hand, also in half precision, and with what is added on the way."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from multi_step import block, by_kernels, functional, images, lif, lively, neuron
from rewriting import dyadic, rewritten, site
from torch import Tensor, nn

import sparsecomp

pytestmark = pytest.mark.quick_cases(1)

RULE, WRITTEN = "fuse_conv_neuron", "unrolled_neurons"
TOGETHER = "with the neurons behind it in one launch, 4 time steps"
HALVES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])


def compared(make: Callable[[], nn.Module], x: Tensor, calls: int = 1, **options: Any) -> Any:
    """A network's report; its spikes are eager's, bit for bit."""
    eager, model = make().eval(), make().eval()
    with torch.no_grad():
        for _ in range(calls):
            expected = eager(x)
            found, report = rewritten(model, x, neurons="fuse", strict=True, **options)
            torch.testing.assert_close(found, expected, rtol=0, atol=0)
            assert 0.02 < (expected[0] if isinstance(expected, tuple) else expected).float().mean() < 0.98
    return report


def network(dtype: torch.dtype, *makes: Callable[[], nn.Module]) -> nn.Module:
    """Blocks of convolution, batch-norm and neurons whose sums are exact in half precision too."""
    blocks = [one for i, make in enumerate(makes) for one in block(8 if i else 3, 8, make)]
    model = dyadic(nn.Sequential(*blocks))
    for norm in (one for one in model if isinstance(one, nn.BatchNorm2d)):
        nn.init.constant_(norm.running_var, 0.125)
        nn.init.constant_(norm.weight, 1.0)
        nn.init.constant_(norm.bias, 0.25)
        norm.eps = 0.125
    return model.to(dtype)


@HALVES
@pytest.mark.parametrize("make", [lif, lambda: neuron.IFNode(step_mode="m", v_reset=None)], ids=["hard", "soft"])
def test_a_library_s_neurons_in_half_precision(make: Callable[[], nn.Module], dtype: torch.dtype) -> None:
    """They are a loop there. The second call goes on from the membranes of the first."""
    x = images().to(dtype)
    report = compared(lambda: network(dtype, make, make), x, calls=2)
    judged = [one for one in report.sites if one.rule == RULE]
    assert len(judged) == 1 and TOGETHER in judged[0].reason
    assert report.graph_after.count("sparsecomp.conv_neuron") == 1
    taken = [one.rewritten for one in report.sites if one.rule == "neuron_norm"]
    assert taken == [True] and "batch_norm(" not in report.graph_after, "that of the stem is in its neurons' step"


class Loop(nn.Module):
    """A layer, and neurons that are written by hand."""

    def __init__(self, decay: Tensor | float, linear: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8) if linear else nn.Conv2d(8, 8, 3, padding=1)
        self.decay = nn.Parameter(decay) if isinstance(decay, Tensor) else decay

    def forward(self, x: Tensor) -> Any:
        currents = self.layer((x > 0.5).to(x.dtype).flatten(0, 1)).unflatten(0, x.shape[:2])
        v, out = torch.zeros_like(currents[0]), []
        for current in currents:
            v = self.decay * v + current
            spike = (v > 0.5).to(v.dtype)
            v = v * (1 - spike)
            out.append(spike)
        return torch.stack(out), v


class Cast(Loop):
    """Neurons of another dtype than the layer's, whose results are numbers that bfloat16 does not hold."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(0.5, linear=True)
        self.cast = dtype

    def forward(self, x: Tensor) -> Any:
        v, out = torch.zeros(x.shape[1:], dtype=self.cast), []
        for current in self.layer((x > 0.5).to(x.dtype).flatten(0, 1)).unflatten(0, x.shape[:2]).to(self.cast):
            v = self.decay * v + current
            out.append((v > 0.5).to(v.dtype))
            v = v * (1 - out[-1])
        return torch.stack(out), v


@pytest.mark.parametrize(
    ("dtype", "cast", "fused"),
    [
        (torch.float16, torch.bfloat16, False), (torch.bfloat16, torch.float16, False),
        (torch.float16, torch.float32, True), (torch.float16, torch.float16, True),
    ],
)  # fmt: skip
def test_a_cast_that_rounds_is_not_skipped(dtype: torch.dtype, cast: torch.dtype, fused: bool) -> None:
    def make() -> nn.Module:
        model = dyadic(Cast(cast))
        nn.init.constant_(model.layer.bias, 0.5 + 2.0**-10)
        return model.to(dtype)

    x = torch.rand(4, 2, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    report = compared(make, x)
    judged = [one.rewritten for one in report.sites if one.rule == RULE]
    assert site(report, WRITTEN).rewritten and judged == [True] * fused


LOOPS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], bool]] = {
    "a number": (lambda: Loop(0.5), (6, 6), True),
    "a number a channel": (lambda: Loop(torch.arange(8).view(8, 1, 1) / 8), (6, 6), True),
    "one for all": (lambda: Loop(torch.tensor(0.75)), (6, 6), True),
    "a number a column": (lambda: Loop(torch.arange(6) / 8), (6, 6), False),
    "linear": (lambda: Loop(torch.arange(8) / 8, linear=True), (), True),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", LOOPS)
def test_neurons_written_by_hand(name: str, dtype: torch.dtype) -> None:
    make, size, fused = LOOPS[name]
    x = torch.rand(4, 2, 8, *size, generator=torch.Generator().manual_seed(0)).to(dtype)
    x = x.flatten(0, 1).contiguous(memory_format=torch.channels_last).unflatten(0, (4, 2)) if size else x
    report = compared(lambda: dyadic(make()).to(dtype), x)
    assert site(report, WRITTEN).rewritten and site(report, RULE).rewritten == fused
    assert fused or "neither one number nor one a channel" in site(report, RULE).reason


class Residual(nn.Module):
    """The end of a block of a spiking ResNet, or of MS-ResNet: something is added to what the neurons are given."""

    def __init__(self, kind: str, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.kind = kind
        self.layer, self.norm, self.skip = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1)
        self.first, self.neurons = make(), make()
        nn.init.constant_(self.norm.running_var, 0.125)
        self.norm.eps = 0.125

    def forward(self, x: Tensor) -> Any:
        spikes = self.first(x)
        made = self.norm(self.layer(spikes.flatten(0, 1)))
        added = {"spikes": spikes, "skip": self.skip(spikes.flatten(0, 1)), "analog": x}[self.kind.split()[0]]
        if "in place" in self.kind:
            made += added.view(made.shape)
        elif "frames" in self.kind:
            made = added.view(made.shape) + made
        else:
            made = made.unflatten(0, x.shape[:2]) + added.view(x.shape)
        out = self.neurons(made.view(x.shape))
        return (out, made) if "read" in self.kind else out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kind", [
    "spikes", "spikes in place", "spikes frames", "skip", "skip in place", "analog", "analog in place", "analog read",
])  # fmt: skip
def test_what_is_added_to_the_current(kind: str, dtype: torch.dtype) -> None:
    def make() -> nn.Module:
        model = dyadic(Residual(kind, lif))
        nn.init.constant_(model.norm.weight, 1.0)
        return model.to(dtype)

    report = compared(make, (images(4, 8) * 16).round().to(dtype) / 8)
    judged = site(report, RULE)
    assert judged.rewritten, judged.reason
    assert ("what the neurons are given is written for others" in judged.reason) == ("read" in kind), judged.reason
    name = "conv_lif" if dtype is torch.float32 else "conv_neuron"
    assert f"torch.ops.sparsecomp.{name}" in report.graph_after and ", None, 'add', " in report.graph_after
    assert "batch_norm(" not in report.graph_after


@pytest.mark.slow(reason="the interpreter runs whole networks")
@pytest.mark.slow_cases(4)
@HALVES
@pytest.mark.parametrize("seed", range(4))
def test_networks_on_kernels_equal_their_launches_apart(seed: int, dtype: torch.dtype) -> None:
    x, found = images().to(dtype), []
    for disable in ((), (RULE,)):
        model = lively(nn.Sequential(*block(3, 16, lif), *block(16, 24, lif), *block(24, 8, lif)), images(), seed)
        with torch.no_grad():
            for norm in (one for one in model if isinstance(one, nn.BatchNorm2d)):
                norm.running_var.copy_(torch.full_like(norm.running_var, 0.125))
                norm.running_mean.copy_((norm.running_mean * 8).round() / 8)
                norm.eps = 0.125
            result, report = by_kernels(model.to(dtype), x, disable=disable)
            found.append(result)
    assert 0.02 < found[0].float().mean() < 0.98
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


def test_a_residual_of_spikes_is_joined_in_half_precision_too() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.body = network(torch.float16, lif), network(torch.float16, lif, lif)[3:]

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            return x + self.body(x)

    report = compared(Block, images().half())
    assert site(report, "fuse_residual").rewritten and site(report, "byte_sums").rewritten


def test_autocast_is_half_precision() -> None:
    x = images()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        model = network(torch.float32, lif, lif).eval()
        expected = model(x)
        functional.reset_net(model)
        found, report = rewritten(model, x, neurons="fuse", strict=True)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert site(report, RULE).rewritten, report


@pytest.mark.slow(reason="a layer that is large enough for a card runs on the CPU")
def test_a_card_takes_neurons_that_pay() -> None:
    """Nobody asks for it: in one launch with the layer ahead if that is on spikes and large enough, else alone."""
    model = dyadic(nn.Sequential(*block(3, 64, lif), *block(64, 128, lif))).half().eval()
    model = model.to(memory_format=torch.channels_last)
    for disable, images_of_a_step, expected in (((), 8, [True]), ((), 4, []), ((RULE,), 8, [])):
        x = torch.rand(4 * images_of_a_step, 3, 32, 32).half().contiguous(memory_format=torch.channels_last)
        x = x.unflatten(0, (4, -1))
        options = {"disable": disable}
        with torch.no_grad():
            report = sparsecomp.explain(model, x, device="h200", mode="reduce-overhead", options=options)
        told = [(one.rewritten, one.reason) for one in report.sites if one.rule == WRITTEN]
        assert [taken for taken, _ in told] == [True, True], report
        assert told[0][1].endswith("as it was written")
        assert told[1][1].endswith("as it was written, with the layer ahead") == bool(expected)
        assert [one.rewritten for one in report.sites if one.rule == RULE] == expected
    with torch.no_grad():
        report = sparsecomp.explain(model.float(), x.float(), device="h200", mode="reduce-overhead")
        assert not [one for one in report.sites if one.rule == WRITTEN]  # the library's own operators


def test_in_float32_a_card_leaves_a_loop_behind_a_dense_layer() -> None:
    x = torch.rand(4, 2, 8, 6, 6)
    with torch.no_grad():
        report = sparsecomp.explain(Loop(0.5), x.add(0.5).sqrt(), device="h200", options={"disable": ("spike_conv",)})
    assert "not measured on a GPU" in site(report, WRITTEN).reason
