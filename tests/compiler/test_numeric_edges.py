"""Odd shapes, odd values, autocast, layouts, random streams, changing weights, real spike maps and random graphs.

Small networks run through our decompositions (packed bytes) but not through Inductor's code generation.
"""

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from rewriting import OnSpikes, spikes
from snn_zoo import compiler, images, sixteenths
from torch import Tensor, nn

DATA = Path(os.environ.get("SPARSECOMP_TEST_DATA", Path(__file__).parents[3] / "shared" / "data")) / "spikes"


def _compiled(model: Callable[..., Any], how: str = "aot", **options: Any) -> Any:
    """`model` compiled; the result has `rewritten()`, the weight layers rewritten in all graphs."""
    reports: list[Any] = []
    call = torch.compile(model, backend=compiler(reports, how, **options))

    def rewritten() -> int:
        return sum(s.rewritten for r in reports for s in r.sites if s.rule in ("spike_conv", "spike_linear"))

    call.rewritten = rewritten  # type: ignore[attr-defined]
    return call


def _same(model: nn.Module, *inputs: Tensor, count: int = 1, how: str = "aot", **tolerance: float) -> Tensor:
    call = _compiled(model, how)
    with torch.no_grad():
        expected, found = model(*inputs), call(*inputs)
    assert call.rewritten() == count
    torch.testing.assert_close(found, expected, **(tolerance or {"rtol": 0, "atol": 0}))
    assert _significant(found) == _significant(expected)
    return found


def _significant(x: Tensor) -> list[int]:
    """The strides that matter: those of dimensions longer than one."""
    return [stride for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1]


@pytest.mark.parametrize("size", [(7, 7), (1, 1), (13, 9)])
@pytest.mark.parametrize("channels", [3, 16, 17, 48])
def test_odd_maps_and_channels(size, channels):
    model = sixteenths(OnSpikes(nn.Conv2d(channels, channels + 1, 3, padding=1)))
    _same(model, images(2, channels, *size))


@pytest.mark.parametrize("channels", [3, 16, 17, 48])
def test_odd_linears(channels):
    _same(sixteenths(OnSpikes(nn.Linear(channels, 5))), images(2, 3, channels))


def _map(kind: str) -> Tensor:
    x = torch.zeros(1, 3, 6, 5)
    if kind == "one":
        x += 1
    if kind == "corner":
        x[0, 2, 5, 4] = 1
    return x


@pytest.mark.parametrize("kind", ["zero", "one", "corner"])
def test_silent_full_and_corner_maps_against_the_closed_form(kind):
    conv = sixteenths(nn.Conv2d(3, 4, 3, padding=1))
    found = _same(OnSpikes(conv), _map(kind))
    assert conv.bias is not None
    bias = conv.bias[:, None, None].expand(4, 6, 5)
    inner = {"zero": bias, "one": bias + conv.weight.sum((1, 2, 3))[:, None, None], "corner": bias}[kind]
    torch.testing.assert_close(found[0, :, 1:-2, 1:-2], inner[:, 1:-2, 1:-2], rtol=0, atol=0)
    if kind == "corner":
        torch.testing.assert_close(found[0, :, 5, 4], conv.bias + conv.weight[:, 2, 1, 1], rtol=0, atol=0)
        torch.testing.assert_close(found[0, :, 4, 3], conv.bias + conv.weight[:, 2, 2, 2], rtol=0, atol=0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_give_what_eager_gives(value):
    model = sixteenths(OnSpikes(nn.Conv2d(3, 4, 3)))
    with torch.no_grad():
        model.layer.weight[1, 0, 0, 0] = value
    call = _compiled(model)
    x = images(1, 3, 6, 6)
    with torch.no_grad():
        torch.testing.assert_close(call(x), model(x), rtol=0, atol=0, equal_nan=True)
    assert call.rewritten() == 0


def test_a_weight_that_becomes_nan_later_makes_its_channel_nan():
    model = sixteenths(OnSpikes(nn.Conv2d(3, 4, 3)))
    call, x = _compiled(model), images(1, 3, 6, 6)
    with torch.no_grad():
        call(x)
        model.layer.weight[1] = float("nan")
        torch.testing.assert_close(call(x), model(x), rtol=0, atol=0, equal_nan=True)
    assert call.rewritten() == 1


class _Reached(nn.Module):
    """Spikes, and NaN where the input is not finite."""

    def forward(self, x: Tensor) -> Tensor:
        return spikes(x) + (x - x.detach())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_inputs_that_are_not_finite_give_what_eager_gives(value):
    """A threshold makes bits of them; where they reach the layer, it stays dense and gives NaN as eager does."""
    x = images(1, 3, 6, 6)
    x[0, 0, 2, 2] = value
    conv = sixteenths(nn.Conv2d(3, 4, 3))
    _same(OnSpikes(conv), x)
    reached = _same(nn.Sequential(_Reached(), conv), x, count=0, rtol=0, atol=0, equal_nan=True)
    assert bool(reached.isnan().any()) and not bool(reached.isnan().all())


def test_bias_that_is_not_finite():
    model = sixteenths(OnSpikes(nn.Conv2d(3, 2, 3)))
    with torch.no_grad():
        model.layer.bias.copy_(torch.tensor([float("inf"), float("nan")]))
        call, x = _compiled(model), images(1, 3, 6, 6)
        torch.testing.assert_close(call(x), model(x), rtol=0, atol=0, equal_nan=True)


def test_weights_changed_after_compilation_are_seen():
    model, other = sixteenths(OnSpikes(nn.Conv2d(3, 4, 3))), sixteenths(OnSpikes(nn.Conv2d(3, 4, 3)), seed=1)
    call, x = _compiled(model), images(1, 3, 6, 6)
    with torch.no_grad():
        before = call(x)
        model.layer.weight.mul_(2)
        torch.testing.assert_close(call(x), model(x), rtol=0, atol=0)
        assert not torch.equal(call(x), before)
        model.load_state_dict(other.state_dict())
        torch.testing.assert_close(call(x), other(x), rtol=0, atol=0)
    assert call.rewritten() == 1


class Tied(nn.Module):
    """Two layers, one weight; the second also scales it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(spikes(self.first(spikes(x)))) + F.linear(spikes(x), 2 * self.first.weight)


def test_tied_weights():
    model = sixteenths(Tied())
    _same(model, images(4, 16), count=3)
    eager, call = copy.deepcopy(model), _compiled(model)
    for net in (eager, call):
        net(images(4, 16)).square().sum().backward()
    torch.testing.assert_close(model.first.weight.grad, eager.first.weight.grad, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("how", ["graph", "aot"])
def test_channels_last_strides(how):
    model = sixteenths(OnSpikes(nn.Conv2d(16, 8, 3, padding=1))).to(memory_format=torch.channels_last)
    x = images(2, 16, 6, 6).contiguous(memory_format=torch.channels_last)
    assert _same(model, x, how=how).is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("layer", [nn.Conv2d(16, 8, 3), nn.Linear(6, 8)])
def test_autocast(layer):
    """Weights and sums are rounded to bfloat16 in another place: one unit in the last place apart."""
    model = sixteenths(OnSpikes(layer), bound=1)
    x = images(2, 16, 6, 6)
    call = _compiled(model)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found, expected = call(x), model(x)
    assert call.rewritten() == 1
    assert found.dtype is expected.dtype is torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=2**-8, atol=0)


class Stochastic(nn.Module):
    """A Bernoulli or Poisson encoder before the layer, and dropout behind it."""

    def __init__(self, poisson: bool) -> None:
        super().__init__()
        self.poisson, self.conv = poisson, nn.Conv2d(2, 8, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        drawn = torch.poisson(x).clamp(max=1) if self.poisson else torch.bernoulli(x)
        out = self.conv(drawn)
        return drawn, out, F.dropout(out, 0.5, True)


@pytest.mark.parametrize("poisson", [False, True])
def test_the_random_stream_is_eagers(poisson):
    model, x = sixteenths(Stochastic(poisson)), torch.rand(2, 2, 6, 6, generator=torch.Generator().manual_seed(0))
    call = _compiled(model, "graph")
    with torch.no_grad():
        for seed in range(2):
            torch.manual_seed(seed)
            expected = model(x)
            torch.manual_seed(seed)
            torch.testing.assert_close(call(x), expected, rtol=0, atol=0)
    # nothing bounds a Poisson count of unknown rate
    assert call.rewritten() == (0 if poisson else 1)


@pytest.mark.parametrize("groups,stride,dilation", [(1, 2, 1), (4, 1, 2), (8, 1, 1)])
def test_gradients_of_a_convolution_in_float64(groups, stride, dilation):
    """Weight, bias and input gradients against float64 autograd on the same spikes."""
    conv = nn.Conv2d(8, 8, 3, stride, dilation, dilation, groups)
    x = spikes(torch.randn(2, 8, 7, 6)).requires_grad_()
    args = (conv.weight, conv.bias, [stride] * 2, [dilation] * 2, [dilation] * 2, groups)
    found = torch.ops.sparsecomp.spike_conv.default(x, *args, 3, "binary")
    weight = torch.randn(found.shape)
    (found * weight).sum().backward()
    exact, twin = copy.deepcopy(conv).double(), x.detach().double().requires_grad_()
    exact.zero_grad()
    (exact(twin) * weight.double()).sum().backward()
    for mine, theirs in ((conv.weight, exact.weight), (conv.bias, exact.bias), (x, twin)):
        torch.testing.assert_close(mine.grad.double(), theirs.grad, rtol=1e-5, atol=1e-5)


def _real_maps() -> list[tuple[str, str]]:
    files = sorted(DATA.glob("*.npz")) if DATA.is_dir() else []
    return [(f.name, key.removesuffix(".bits")) for f in files for key in np.load(f).files if key.endswith(".bits")]


def _real_map(file: str, layer: str) -> Tensor:
    stored = np.load(DATA / file)
    shape = tuple(stored[f"{layer}.shape"])
    bits = np.unpackbits(stored[f"{layer}.bits"], count=int(np.prod(shape)))
    return torch.from_numpy(bits.reshape(shape)).float()


@pytest.mark.skipif(not _real_maps(), reason=f"no real spike maps: set SPARSECOMP_TEST_DATA ({DATA} is not there)")
def test_real_spike_maps_against_float64():
    """The packed operator, relative to the sum of magnitudes; the stated bound is 1e-6."""
    generator = torch.Generator().manual_seed(0)
    for file, layer in _real_maps():
        x = _real_map(file, layer)
        conv = x.dim() == 4
        shape = (8, x.shape[1], 3, 3) if conv else (8, x.shape[-1])
        weight = torch.randn(shape, generator=generator)
        dense = F.conv2d if conv else F.linear
        exact = dense(x.double(), weight.double())
        scale = dense(x.double(), weight.double().abs())
        frames = x if conv else x[:, :, None, None]
        found = torch.ops.sparsecomp.spike_conv_counts.default(
            frames.to(torch.int8), weight, None, [1, 1], [0, 0], [1, 1], 1, 3, "binary", 1.0, None, 20.0, False
        ).reshape(exact.shape)
        error = ((found.double() - exact).abs() / scale.clamp_min(1)).max()
        assert error < 1e-6, f"{file} {layer}"
        assert 0 < x.mean() < 1


_STEPS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "pool": lambda x, _: F.max_pool2d(x, 3, 1, 1),
    "average": lambda x, _: F.avg_pool2d(x, 2, 1),
    "double": lambda x, _: x + x,
    "flip": lambda x, _: x + x.flip(-1),
    "iand": lambda x, _: x * (1 - spikes(x.roll(1, 2))),
    "pad": lambda x, _: F.pad(x, (1, 0, 0, 1)),
    "fire": lambda x, _: spikes(x - 0.5),
    "half": lambda x, _: 0.5 * x,
    "shift": lambda x, _: x - 1,
    "write": lambda x, i: _written(x, i),
    "swap": lambda x, _: x.transpose(2, 3),
    "cat": lambda x, _: torch.cat([x, spikes(x)], 1)[:, ::2],
}


def _written(x: Tensor, i: int) -> Tensor:
    out = torch.zeros_like(x)
    out[:, i % x.shape[1]] = spikes(x)[:, 0]
    return out


class RandomGraph(nn.Module):
    """Steps between spikes, convolutions and a linear, in any order."""

    def __init__(self, program: list[str]) -> None:
        super().__init__()
        self.program = program
        self.convs = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for name in program if name == "conv")
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x, convs = spikes(x), iter(self.convs)
        for i, name in enumerate(self.program):
            x = next(convs)(x) if name == "conv" else _STEPS[name](x, i)
        return self.head(x.amax((2, 3)))


@pytest.mark.slow(reason="many graphs")
@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@example(["conv", "fire", "conv"], "graph")
@example(["conv"], "aot")
@given(st.lists(st.sampled_from(["conv", "fire", *_STEPS]), min_size=1, max_size=8), st.sampled_from(["graph", "aot"]))
def test_random_graphs_equal_eager(program, how):
    """In multiples of 1/16 a wrong site shows as a large difference, never as rounding; float64 is the judge."""
    torch._dynamo.reset()  # or the class reaches its limit of graphs
    model = sixteenths(RandomGraph(program), bound=4)
    x = images(2, 4, 6, 6)
    call = _compiled(model, how)
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(x.double())
        torch.testing.assert_close(call(x).double(), exact, rtol=1e-5, atol=1e-5)
    # a layer that comes first reads plain spikes, so something has been rewritten
    assert program[0] != "conv" or call.rewritten() > 0
