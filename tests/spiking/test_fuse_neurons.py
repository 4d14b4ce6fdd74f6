"""spikingjelly's neuron operators, fused, against the operators themselves."""

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rewriting import Examples, dyadic, rewritten, site
from torch import Tensor, fx, nn

import sparsecomp
from sparsecomp.options import Options
from sparsecomp.passes.engine.rule import Context, Plan
from sparsecomp.passes.facts.analysis import analyse
from sparsecomp.passes.spiking.fuse_neurons import consider
from sparsecomp.report import Report

neuron, functional, surrogate, layer = (
    pytest.importorskip(f"spikingjelly.activation_based.{name}")
    for name in ("neuron", "functional", "surrogate", "layer")
)
pytest.importorskip("spikingjelly._ops.lif")

pytestmark = pytest.mark.quick_cases(3)

NEURONS = {
    "lif": lambda: neuron.LIFNode(tau=3.0, step_mode="m"),
    "lif no decay": lambda: neuron.LIFNode(tau=3.0, decay_input=False, step_mode="m"),
    "lif soft reset": lambda: neuron.LIFNode(v_reset=None, v_threshold=0.7, step_mode="m"),
    "lif reset to 0.1": lambda: neuron.LIFNode(v_reset=0.1, step_mode="m"),
    "lif atan": lambda: neuron.LIFNode(surrogate_function=surrogate.ATan(), step_mode="m"),
    "if": lambda: neuron.IFNode(step_mode="m"),
    "if soft reset": lambda: neuron.IFNode(v_reset=None, step_mode="m"),
    "plif": lambda: neuron.ParametricLIFNode(init_tau=1.7, step_mode="m"),
    "plif soft reset": lambda: neuron.ParametricLIFNode(v_reset=None, decay_input=False, step_mode="m"),
    "single-step": lambda: neuron.LIFNode(),
}


def _input(steps: int = 4, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(steps, 2, 3, 5, 5, generator=torch.Generator().manual_seed(seed))


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("make", NEURONS.values(), ids=NEURONS)
def test_bits_equal_the_operators(make):
    eager, module = make(), make()
    with torch.no_grad():
        for seed in range(2):  # the second call starts from the first one's potential
            expected = eager(_input(seed=seed))
            found, report = rewritten(module, _input(seed=seed), neurons="fuse")
            assert 0 < expected.mean() < 1
            torch.testing.assert_close(found, expected, rtol=0, atol=0)
            torch.testing.assert_close(module.v, eager.v, rtol=0, atol=0)
    found_site = site(report, "fuse_neurons")
    assert found_site.rewritten and found_site.implementation == "fused"


def test_a_convolution_behind_still_sees_spikes():
    model = nn.Sequential(neuron.LIFNode(step_mode="m"), nn.Flatten(0, 1), nn.Conv2d(3, 4, 3))
    with torch.no_grad():
        expected = model(_input())
        functional.reset_net(model)
        found, report = rewritten(model, _input(), neurons="fuse")
    torch.testing.assert_close(found, expected)
    assert site(report, "fuse_neurons").rewritten and site(report, "spike_conv").rewritten


@pytest.mark.parametrize(
    ("options", "steps", "grad", "reason"),
    [
        ({}, 4, False, "on the CPU"),
        ({"neurons": "fuse"}, 65, False, "65 time steps"),
        ({"neurons": "fuse"}, 4, True, "gradients are enabled"),
        ({"neurons": "fuse", "implementation": "dense"}, 4, False, "'dense' was asked for"),
    ],
)
def test_what_stays_an_operator_says_why(options, steps, grad, reason):
    with torch.set_grad_enabled(grad):
        _, report = rewritten(neuron.LIFNode(step_mode="m"), _input(steps), **options)
    assert not site(report, "fuse_neurons").rewritten
    assert reason in site(report, "fuse_neurons").reason


def _lif(x: Tensor, v: Tensor, store: bool = False) -> Any:
    return torch.ops.sj_lif.forward.default(x, v, 2.0, True, 1.0, 0.0, False, 4.0, store, 0)


def _considered(model: Callable[..., Any], *inputs: Tensor) -> str:
    """What is said of the neuron in a graph, alone."""
    gm = fx.symbolic_trace(model)
    with torch.no_grad():
        Examples(gm).run(*inputs)
        context = Context(gm, Options(neurons="fuse"), Report(), analyse(gm))
        (found,) = (said for node in gm.graph.nodes if (said := consider(node, context)) is not None)
    return found.reason if isinstance(found, Plan) else str(found)


def _each(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    found = _lif(x, v)
    return found[0], found[1]


def _template_written(x: Tensor, v: Tensor) -> Tensor:
    start = torch.zeros_like(x[0])
    start.add_(0.5)
    return _lif(x, start)[0]


def _written_behind(x: Tensor, v: Tensor) -> Tensor:
    start = v + 0
    spikes = _lif(x, start)[0]
    start.add_(0.5)
    return spikes


JUDGED: dict[str, tuple[Callable[..., Any], tuple[int, ...], torch.dtype, str]] = {
    "spikes": (lambda x, v: _lif(x, v)[0], (4, 2, 3), torch.float32, "4 time steps in one pass"),
    "both": (lambda x, v: _lif(x, v)[:2], (4, 2, 3), torch.float32, "more than its spikes and last membrane"),
    "each": (_each, (4, 2, 3), torch.float32, "4 time steps in one pass"),
    "charged": (lambda x, v: _lif(x, v)[2], (4, 2, 3), torch.float32, "more than its spikes and last membrane"),
    "all": (lambda x, v: _lif(x, v), (4, 2, 3), torch.float32, "more than its spikes and last membrane"),
    "stored": (lambda x, v: _lif(x, v, True)[0], (4, 2, 3), torch.float32, "the membrane of every step is stored"),
    "double": (lambda x, v: _lif(x, v)[0], (4, 2, 3), torch.float64, "torch.float64 input of 3 dimensions"),
    "rows": (lambda x, v: _lif(x, v)[0], (4, 3), torch.float32, "torch.float32 input of 2 dimensions"),
    "64 steps": (lambda x, v: _lif(x, v)[0], (64, 1, 1), torch.float32, "64 time steps in one pass"),
    "65 steps": (lambda x, v: _lif(x, v)[0], (65, 1, 1), torch.float32, "65 time steps: unrolled up to 64"),
    "template written": (_template_written, (4, 2, 3), torch.float32, "its first membrane is written to in place"),
    "written behind": (_written_behind, (4, 2, 3), torch.float32, "its first membrane is written to in place"),
}  # fmt: skip


@pytest.mark.parametrize("name", JUDGED)
def test_which_calls_are_taken(name):
    model, shape, dtype, told = JUDGED[name]
    x = torch.ones(shape, dtype=dtype)
    assert told in _considered(model, x, x[0])


def test_no_steps_and_unknown_ones_are_not_taken():
    graph = fx.Graph()
    x, v = graph.placeholder("x"), graph.placeholder("v")
    found = graph.call_function(torch.ops.sj_lif.forward.default, (x, v, 2.0, True, 1.0, 0.0, False, 4.0, False, 0))
    graph.output(graph.call_function(operator.getitem, (found, 0)))
    gm = fx.GraphModule(nn.Module(), graph)
    with torch.no_grad():
        context = Context(gm, Options(neurons="fuse"), Report(), analyse(gm))
        assert "shape of the input" in str(consider(found, context))
        x.meta["example_value"] = torch.ones(0, 2, 3)
        assert "0 time steps" in str(consider(found, context))


_STATISTICS = torch.zeros(3), torch.ones(3)


def _normalised(x: Tensor, training: bool = False) -> Tensor:
    return F.batch_norm(x, *_STATISTICS, training=training)


def _reshaped_in_place(x: Tensor) -> Tensor:
    x = x.flatten(0, 1) + 0
    x.unsqueeze_(0)
    x.squeeze_(0)
    return _normalised(x).view(4, 2, 3, 5, 6)


NORMS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "view": (lambda x: _normalised(x.flatten(0, 1)).view(4, 2, 3, 5, 6), True),
    "unflatten": (lambda x: _normalised(x.flatten(0, 1)).unflatten(0, (4, 2)), True),
    "training": (lambda x: _normalised(x.flatten(0, 1), True).view(4, 2, 3, 5, 6), False),
    "other order": (lambda x: _normalised(x.flatten(0, 1)).unflatten(0, (4, 2)).transpose(3, 4), False),
    "channels elsewhere": (lambda x: _normalised(x.flatten(0, 1)).view(4, 3, 2, 5, 6), False),
    "halves as floats": (
        lambda x: _normalised(x.flatten(0, 1).half()).view(torch.float32).view(4, 2, 3, 5, 3), False,
    ),
    "reshaped in place": (_reshaped_in_place, False),
    "nothing": (lambda x: x.relu(), False),
    "a ReLU": (lambda x: x.flatten(0, 1).relu().view(4, 2, 3, 5, 6), False),
    "two": (lambda x: _normalised(x.flatten(0, 1)).view(4, 2, 3, 5, 6) + x, False),
}  # fmt: skip


@pytest.mark.parametrize("name", NORMS)
def test_which_batch_norms_join(name):
    make, joins = NORMS[name]

    def model(x: Tensor, v: Tensor) -> Tensor:
        current = make(x)
        return _lif(current, torch.zeros_like(current[0]))[0]

    x = torch.ones(4, 2, 3, 5, 6)
    told = _considered(model, x, x[0])
    assert told == "4 time steps in one pass" + (", batch-norm included" if joins else "")


def test_an_estimate_for_a_card_fuses_them():
    with torch.no_grad():
        report = sparsecomp.explain(neuron.LIFNode(step_mode="m"), _input(), device="h100")
    assert site(report, "fuse_neurons").rewritten


def test_a_neuron_that_is_not_unrolled_stays_opaque_but_known():
    model = nn.Sequential(neuron.QIFNode(step_mode="m"), nn.Flatten(0, 1), nn.Conv2d(3, 4, 3))
    with torch.no_grad():
        _, report = rewritten(model, _input(), neurons="fuse")
    assert not [found for found in report.sites if found.rule == "fuse_neurons"]
    assert site(report, "spike_conv").rewritten


class Residual(nn.Module):
    """Two multi-step convolution, batch-norm, LIF blocks whose spikes are added (SEW, Fang et al., 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                layer.Conv2d(16, 16, 3, padding=1, bias=False, step_mode="m"),
                layer.BatchNorm2d(16, step_mode="m"),
                neuron.LIFNode(step_mode="m"),
            )
            for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.blocks[0](x)
        second = self.blocks[1](first) + first
        return self.blocks[2](second)


def test_batch_norm_joins_the_neuron_and_sums_travel_as_bytes():
    torch.manual_seed(0)
    model = Residual().eval()
    for block in model.blocks:
        block[1].running_var.fill_(0.01)
    x = torch.rand(4, 2, 16, 6, 6)
    with torch.no_grad():
        expected = model(x)
        functional.reset_net(model)
        found, report = rewritten(model, x, neurons="fuse")
    assert 0.05 < expected.mean() < 0.9
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    fused = [s for s in report.sites if s.rule == "fuse_neurons"]
    assert len(fused) == 3 and all(s.rewritten and "batch-norm included" in s.reason for s in fused)
    narrowed = [s for s in report.sites if s.rule == "narrow_spikes"]
    assert len(narrowed) == 2 and all(s.rewritten for s in narrowed)
    assert "batch_norm" not in report.graph_after


@pytest.mark.parametrize("started", [False, True])
def test_a_batch_norm_that_joined_is_not_computed_all_the_same(started):
    """Also where the membrane is a tensor that somebody else made, which stays."""
    norm, node = nn.BatchNorm2d(3).eval(), neuron.LIFNode(step_mode="m")
    norm.running_mean.fill_(0.25)

    def model(x, v):
        node.v = v if started else 0.0
        return node(norm(x.flatten(0, 1)).view(x.shape))

    start = torch.linspace(-1, 0.9, 150).view(2, 3, 5, 5)
    with torch.no_grad():
        expected = model(_input(), start)
        found, report = rewritten(model, _input(), start, neurons="fuse")
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert "batch-norm included" in site(report, "fuse_neurons").reason
    assert "batch_norm" not in report.graph_after


class WrittenInBetween(nn.Module):
    """Spikes, or what batch-norm read, written to in place before the next reader."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.norm, self.neuron, self.conv = nn.BatchNorm2d(16), neuron.LIFNode(step_mode="m"), nn.Conv2d(16, 16, 3)
        self.where = where

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = 2 * x.flatten(0, 1)
        z = self.norm(y)
        if self.where == "input":
            y.zero_()
        if self.where == "result":
            z.add_(1)
        s = self.neuron(z.view(x.shape))
        if self.where == "spikes":
            s.mul_(0)
        frames = s.flatten(0, 1)
        if self.where == "view":
            frames[:, 3:].zero_()
        return self.conv(frames) + y.mean()


@pytest.mark.parametrize("where", ["nowhere", "input", "result", "spikes", "view"])
def test_a_write_in_between_is_seen(where):
    torch.manual_seed(0)
    model = WrittenInBetween(where).eval()
    x = torch.randn(4, 2, 16, 6, 6) + 1
    with torch.no_grad():
        expected = model(x)
        functional.reset_net(model)
        found, report = rewritten(model, x, neurons="fuse")
    torch.testing.assert_close(found, expected)
    assert site(report, "fuse_neurons").rewritten
    assert ("batch-norm included" in site(report, "fuse_neurons").reason) == (where in ("nowhere", "spikes", "view"))
    narrowed = [s for s in report.sites if s.rule == "narrow_spikes"]
    assert bool(narrowed) == (where not in ("spikes", "view"))


def test_a_neuron_that_reads_another_one_reads_the_fused_one():
    node = neuron.LIFNode(step_mode="m")

    def model(x):
        return node(node(x)), node.v

    with torch.no_grad():
        expected = model(_input())
        functional.reset_net(node)
        found, report = rewritten(model, _input(), neurons="fuse")
    for ours, eager in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, eager, rtol=0, atol=0)
    assert [found.rewritten for found in report.sites] == [True, True]
    assert "sj_lif" not in report.graph_after, "the replaced operator would run as well"


def test_gradients_enabled_inside_the_graph_are_kept():
    node, scale = neuron.LIFNode(step_mode="m"), torch.ones(1, requires_grad=True)

    def model(x):
        with torch.enable_grad():
            return node(x * scale)

    with torch.no_grad():
        found, report = rewritten(model, _input(), neurons="fuse")
        functional.reset_net(node)
        expected = model(_input())
    assert not site(report, "fuse_neurons").rewritten
    ours, eager = (torch.autograd.grad(out.sum(), scale)[0] for out in (found, expected))
    torch.testing.assert_close(ours, eager)
    assert eager.item() != 0


@pytest.mark.parametrize("also", ["current", "normalised", "first step", "template"])
def test_what_is_read_besides_the_neuron_stays(also):
    norm, node = nn.BatchNorm2d(3).eval(), neuron.LIFNode(step_mode="m")
    norm.running_mean.fill_(0.25)

    def model(x):
        normalised = norm(x.flatten(0, 1))
        current = normalised.view_as(x)
        node.v = torch.zeros_like(current[0]) if also == "template" else 0.0
        start = node.v
        spikes = node(current)
        return spikes, {"current": current, "normalised": normalised, "first step": current[0], "template": start}[also]

    with torch.no_grad():
        expected = model(_input())
        found, report = rewritten(model, _input(), neurons="fuse")
    assert "batch-norm included" not in site(report, "fuse_neurons").reason
    for ours, eager in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, eager, rtol=0, atol=0)


def _by_index_then_written(s, index):
    part = s.index_select(1, index)
    index.add_(1)
    return part.flatten(0, 1)


@pytest.mark.parametrize(
    ("moved", "narrowed"),
    [
        (lambda s, i: s.flatten(0, 1), True), (lambda s, i: s[-1], True), (lambda s, i: s.detach()[0], True),
        (lambda s, i: s.movedim(0, 1).flatten(0, 1), True), (lambda s, i: s.flip(0).flatten(0, 1), True),
        (lambda s, i: s.chunk(2, 1)[1].flatten(0, 1), True), (lambda s, i: s.index_select(1, i).flatten(0, 1), True),
        (lambda s, i: s.transpose(0, 1).contiguous().view(-1, 3, 5, 5), True),
        (lambda s, i: s.flatten(0, 1) * 2, True), (lambda s, i: s.flatten(0, 1) * 0.5, False),
        (_by_index_then_written, False),
    ],
)  # fmt: skip
def test_bytes_are_moved_as_spikes_are(moved, narrowed):
    node, conv = neuron.LIFNode(step_mode="m"), dyadic(nn.Conv2d(3, 4, 3))

    def model(x, index):
        spikes = node(x)
        return conv(moved(spikes, index))

    with torch.no_grad():
        expected = model(_input(), torch.zeros(2, dtype=torch.long))
        functional.reset_net(node)
        found, report = rewritten(model, _input(), torch.zeros(2, dtype=torch.long), neurons="fuse", strict=True)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert any(one.rule == "narrow_spikes" and one.rewritten for one in report.sites) == narrowed


def test_a_batch_norm_joins_where_its_result_gets_one_time_step():
    norm, node = nn.BatchNorm2d(3).eval(), neuron.LIFNode(step_mode="m")

    def model(x):
        return node(norm(x).unsqueeze(0))

    with torch.no_grad():
        expected = model(_input()[0])
        functional.reset_net(node)
        found, report = rewritten(model, _input()[0], neurons="fuse")
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert "batch-norm included" in site(report, "fuse_neurons").reason
