"""Spikes found by structure in the graphs that Dynamo really makes, checked by running those graphs."""

import importlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fact_checker import check, fact_at
from rewriting import Surrogate
from snn_fixtures import FIRE, GATHER, HandLIF, NeuronConv, capture, stub_torchvision
from torch import fx, nn
from torch.fx.passes.shape_prop import ShapeProp

from sparsecomp.passes.facts import spike_sources
from sparsecomp.passes.facts.analysis import Analysis, analyse
from sparsecomp.passes.facts.registry import TRANSFERS, Lost
from sparsecomp.passes.graph.canonicalize import CanonicalOp
from sparsecomp.reference.facts import SparsityFact

pytestmark = pytest.mark.quick_cases(4)

MODES = [False, True]


def analysed(model: nn.Module, *inputs: Any, train: bool = False, graph: int = -1) -> Analysis:
    """The analysis of one captured graph, after every captured graph has run under the checker."""
    analyses = [check(gm, *args).analysis for gm, args in capture(model, *inputs, train=train)]
    return analyses[graph]


def conv_input(analysis: Analysis) -> SparsityFact | None:
    """The fact of what the last convolution reads."""
    calls = [node for node in analysis.graph.nodes if "conv2d" in str(getattr(node.target, "__name__", ""))]
    return analysis.fact(calls[-1].args[0], at=calls[-1])


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize("train", MODES)
@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("gather", GATHER)
@pytest.mark.parametrize("fire", FIRE)
def test_hand_written(fire: str, gather: str, steps: int, train: bool) -> None:
    analysis = analysed(HandLIF(fire, gather, pool=True), torch.randn(steps, 2, 2, 8, 8), train=train)
    fact = conv_input(analysis)
    assert fact is not None
    if fire == "straight_through":
        assert fact.is_nearly_binary and not fact.is_binary and fact.exact_zeros
    else:
        assert fact.is_binary


@pytest.mark.parametrize("train", MODES)
def test_analog_layers_are_not_spikes(train: bool) -> None:
    model = nn.Sequential(nn.Conv2d(2, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Conv2d(2, 2, 3))
    fact = conv_input(analysed(model, torch.randn(2, 2, 8, 8), train=train))
    assert fact is not None and not fact.integral and fact.non_negative and fact.exact_zeros


def test_batch_norm_between_spikes_and_conv_is_the_reason() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.conv = nn.BatchNorm2d(2), nn.Conv2d(2, 2, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.conv(self.norm(Surrogate.apply(x)))

    analysis = analysed(Model(), torch.randn(2, 2, 8, 8))
    assert fact_at(analysis, "conv2d") is None
    conv = next(node for node in analysis.graph.nodes if "conv2d" in str(getattr(node.target, "__name__", "")))
    assert "batch_norm ends the domain" in str(analysis.why_not(conv.args[0]))


@pytest.mark.parametrize("train,binary", [(False, True), (True, False)])
def test_dropout_ends_the_domain_in_training_only(train: bool, binary: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop, self.conv = nn.Dropout(0.5), nn.Conv2d(2, 2, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.conv(self.drop(Surrogate.apply(x)))

    fact = conv_input(analysed(Model(), torch.randn(2, 2, 8, 8), train=train))
    assert fact is not None and fact.is_binary == binary and fact.exact_zeros


@pytest.mark.parametrize("analog", [False, True])
def test_a_write_between_spike_and_conv_is_seen(analog: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(2, 2, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            s = (x > 0).float()
            s.view(-1)[::2].add_(x.view(-1)[::2] if analog else 0.5)
            return self.conv(s)

    fact = conv_input(analysed(Model(), torch.randn(2, 2, 8, 8)))
    if analog:
        assert fact is None
    else:  # adding a constant stays on a grid of halves
        assert fact is not None and not fact.is_binary and (fact.scale, fact.lo, fact.hi) == (0.5, 0, 3)


def test_heaviside_gives_no_nan() -> None:
    assert torch.heaviside(torch.tensor([float("nan")] * 9), torch.tensor(1.0)).tolist() == [0.0] * 9

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(2, 2, 3)

        def forward(self, x: torch.Tensor, at_zero: torch.Tensor) -> torch.Tensor:
            return self.conv(torch.heaviside(x, torch.tensor(1.0))) + self.conv(torch.heaviside(x, at_zero))

    x = torch.randn(2, 2, 8, 8)
    x[0, 0, 0] = float("nan")
    x[0, 0, 1] = 0.0
    analysis = analysed(Model(), x, torch.tensor(0.5))
    known, unknown = fact_at(analysis, "conv2d", which=0), fact_at(analysis, "conv2d", which=1)
    assert known is not None and known.is_binary
    assert unknown is not None and not unknown.integral and unknown.exact_zeros


@pytest.mark.parametrize("soft_scale,nearly", [(1.0, True), (1e9, False)])
def test_straight_through_needs_a_bounded_soft_value(soft_scale: float, nearly: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(2, 2, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            soft = torch.sigmoid(x) if soft_scale == 1.0 else x * soft_scale
            hard = (x > 0).float()
            return self.conv((hard - soft).detach() + soft)

    fact = conv_input(analysed(Model(), torch.randn(2, 2, 8, 8)))
    assert fact is not None and fact.is_nearly_binary == nearly and fact.exact_zeros


def test_a_surrogate_that_scales_its_spikes_is_found_with_its_factor() -> None:
    class Graded(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
            return (x > 0).float() * factor

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            return grads[0], None

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.factor = nn.Conv2d(2, 2, 3), nn.Parameter(torch.tensor(0.7))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.conv(Graded.apply(x * self.factor, self.factor))

    fact = conv_input(analysed(Model(), torch.randn(2, 2, 8, 8), train=True))
    assert fact is not None and fact.is_scaled_binary and not fact.is_binary and isinstance(fact.scale, str)


# ---- libraries ------------------------------------------------------------------------------------------------------


def sequence(steps: int) -> torch.Tensor:
    return 2 * torch.randn(steps, 2, 2, 6, 6)


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("train", MODES)
@pytest.mark.parametrize("steps", [0, 1, 4])
@pytest.mark.parametrize("kind", ["IFNode", "LIFNode", "ParametricLIFNode", "QIFNode", "EIFNode", "KLIFNode"])
def test_spikingjelly(kind: str, steps: int, train: bool) -> None:
    neuron = pytest.importorskip("spikingjelly.activation_based.neuron")
    model = NeuronConv(getattr(neuron, kind)(step_mode="m" if steps else "s"))
    x = sequence(steps) if steps else sequence(1)[0]
    fact = conv_input(analysed(model, x, train=train))
    assert fact is not None and fact.is_binary


@pytest.mark.slow(reason="Inductor compiles")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_spikingjelly_in_half(dtype: torch.dtype) -> None:
    neuron = pytest.importorskip("spikingjelly.activation_based.neuron")
    surrogate = pytest.importorskip("spikingjelly.activation_based.surrogate")
    model = NeuronConv(neuron.LIFNode(step_mode="m", surrogate_function=surrogate.LeakyKReLU())).to(dtype)
    fact = conv_input(analysed(model, sequence(4).to(dtype)))
    assert fact is not None and fact.is_binary


@pytest.mark.parametrize("step_mode", ["s", "m"])
def test_spikingjelly_ilif_counts(step_mode: str) -> None:
    neuron = pytest.importorskip("spikingjelly.activation_based.neuron")
    x = 4 * sequence(4)
    fact = conv_input(analysed(NeuronConv(neuron.ILIFNode(step_mode=step_mode)), x if step_mode == "m" else x[0]))
    assert fact is not None and fact.integral and (fact.lo, fact.hi) == (0, 4) and not fact.is_binary
    assert not fact.finite


def test_spikingjelly_ternary_is_not_binary() -> None:
    neuron = pytest.importorskip("spikingjelly.activation_based.neuron")
    fact = conv_input(analysed(NeuronConv(neuron.TernaryIFNode(step_mode="m")), sequence(4)))
    assert fact is not None and fact.fits_int8 and fact.lo == -1 and not fact.is_binary


@pytest.mark.parametrize("train", MODES)
def test_snntorch_spikes_carry_their_factor(train: bool) -> None:
    snntorch = pytest.importorskip("snntorch")
    model = NeuronConv(snntorch.Leaky(beta=0.9, init_hidden=True, graded_spikes_factor=0.7))
    fact = conv_input(analysed(model, sequence(1)[0], train=train))
    assert fact is not None and fact.is_scaled_binary and "graded_spikes_factor" in str(fact.scale)


@pytest.mark.parametrize("train", MODES)
def test_norse_with_its_state_passed_in(train: bool) -> None:
    norse = pytest.importorskip("norse.torch")
    cell = norse.LIFCell()
    x = sequence(1)[0]
    state = norse.LIFFeedForwardState(v=torch.zeros_like(x), i=torch.randn_like(x) * 900)
    fact = conv_input(analysed(NeuronConv(cell), x, state, train=train))
    assert fact is not None and fact.is_binary


def test_sinabs_with_a_spike_limit_counts() -> None:
    sinabs = pytest.importorskip("sinabs")
    layer = sinabs.layers.IAF(spike_fn=sinabs.activation.MaxSpike(3))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.neuron, self.conv = layer, nn.Conv2d(2, 2, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.conv(self.neuron(x).flatten(0, 1))

    graphs = capture(Model(), 3 * torch.randn(2, 4, 2, 6, 6))
    for gm, inputs in graphs:
        check(gm, *inputs)
    fact = conv_input(analyse(graphs[-1][0]))
    assert fact is not None and fact.integral and fact.hi == 3 and not fact.is_binary


@pytest.mark.slow(reason="traces a large network")
@pytest.mark.parametrize("train", MODES)
def test_sew_resnet_18(train: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    neuron = pytest.importorskip("spikingjelly.activation_based.neuron")
    functional = pytest.importorskip("spikingjelly.activation_based.functional")
    stub_torchvision(monkeypatch)
    zoo = importlib.import_module("spikingjelly.activation_based.model.sew_resnet")
    model = zoo.sew_resnet18(spiking_neuron=neuron.IFNode, cnf="ADD", num_classes=4)
    functional.set_step_mode(model, "m")
    gm, inputs = capture(model, torch.randn(2, 1, 3, 32, 32), train=train)[-1]
    analysis = check(gm, *inputs).analysis
    convs = [node for node in gm.graph.nodes if "conv2d" in str(getattr(node.target, "__name__", ""))]
    facts = [analysis.fact(node.args[0], at=node) for node in convs]
    assert len(convs) == 20 and facts[0] is None  # the stem reads the image
    assert all(fact is not None and fact.fits_int8 for fact in facts[1:])
    assert max(fact.hi for fact in facts[1:] if fact is not None and fact.hi is not None) > 1  # residual sums
    assert sum(fact is not None and fact.is_binary for fact in facts) >= 9


def _operator(name: str, *args: Any, like: torch.Tensor | None = None) -> Any:
    """What an operator of spikingjelly's gives, whose third argument stands for a tensor like `like`."""
    graph = fx.Graph()
    x, factor = graph.placeholder("x"), graph.placeholder("factor")
    if like is not None:
        factor.meta["example_value"] = like
    given = (x, x, x, *(factor if argument == "factor" else argument for argument in args))
    node = graph.call_function(torch.add, given)
    return TRANSFERS[name](CanonicalOp(name, {}, node), None)  # type: ignore[arg-type]


@pytest.mark.parametrize("count,hi", [(4, 4), (4.0, 4), (1, 1), (-1, None), (2.5, None), ("factor", None)])
def test_an_integer_neuron_counts_up_to_its_count(count: Any, hi: int | None) -> None:
    found = _operator("sj_ilif::forward", count, 0.5)
    if hi is None:
        assert isinstance(found, Lost) and "not a whole number" in str(found)
        return
    fact = found.at(0)
    assert (fact.lo, fact.hi, fact.integral, fact.exact, fact.finite, fact.scale) == (0, hi, True, True, False, 1.0)
    assert found.at(1) is None


@pytest.mark.parametrize("like,known", [((), True), ((1,), True), ((2,), False), (None, False)])
def test_a_ternary_neuron_fires_its_threshold_up_or_down(like: tuple[int, ...] | None, known: bool) -> None:
    found = _operator("sj_stbif::forward", "factor", like=None if like is None else torch.ones(like))
    if not known:
        assert isinstance(found, Lost) and "unknown size" in str(found)
        return
    fact = found.at(0)
    assert (fact.lo, fact.hi, fact.integral, fact.scale, fact.finite) == (-1, 1, True, "factor", True)


@pytest.mark.parametrize("name", ["sj_ilif::forward", "sj_stbif::forward"])
@pytest.mark.parametrize("factor", [0.5, 1.5])
def test_a_neuron_without_a_known_count_or_threshold_is_no_source(name: str, factor: float) -> None:
    assert isinstance(_operator(name, factor), Lost) and isinstance(_operator(name), Lost)


@pytest.mark.parametrize("name", ["sj_lif::forward", "sj_plif::multistep_plif_mp_inference", "sparsecomp::lif"])
def test_the_first_result_of_a_neurons_operator_is_spikes(name: str) -> None:
    found = _operator(name)
    assert found.at(0).is_binary and found.at(0).source == name and found.at(1) is None


def test_copies_are_looked_through_and_nothing_else() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    copied = graph.call_method("clone", (graph.call_method("detach", (graph.call_method("contiguous", (x,)),)),))
    assert spike_sources.strip_copies(copied) is x and spike_sources.strip_copies(3) == 3
    negative = graph.call_method("neg", (x,))
    assert spike_sources.strip_copies(graph.call_method("clone", (negative,))) is negative


ESTIMATORS = {
    # hard and soft value: least and greatest of what comes out, up to rounding; None where ones can be lost
    "spikes": (lambda x: (x > 0).to(x), torch.tanh, (0, 1)),
    "signs": (lambda x: (x > 0).to(x) - (x < 0).to(x), torch.sigmoid, (-1, 1)),
    "counts": (lambda x: (x > 0).to(x) + (x > 1).to(x), torch.tanh, None),
    "negative counts": (lambda x: -(x > 0).to(x) - (x > 1).to(x), torch.tanh, None),
    "halves": (lambda x: (x > 0).to(x) * 0.5, torch.tanh, None),
    "bounded values": (F.hardtanh, torch.tanh, None),
    "unbounded soft value": (lambda x: (x > 0).to(x), torch.exp, None),
    "large soft value": (lambda x: (x > 0).to(x), lambda x: 2 * torch.tanh(x), None),
    "estimates of estimates": (lambda x: _estimated(x, 40), torch.tanh, None),  # each rounds once more
}


def _estimated(x: torch.Tensor, times: int) -> torch.Tensor:
    spikes = (x > 0).to(x)
    for i in range(times):
        soft = torch.tanh(x * (0.1 + 0.01 * i))
        spikes = (spikes - soft).detach() + soft
    return spikes


@pytest.mark.quick_cases(18)
@pytest.mark.parametrize("difference", [False, True])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_straight_through_estimator_keeps_small_integers(name: str, difference: bool) -> None:
    hard_of, soft_of, kept = ESTIMATORS[name]

    def estimate(x: torch.Tensor) -> torch.Tensor:
        hard, soft = hard_of(x), soft_of(x)
        return (hard + soft) - soft if difference else (hard - soft).detach() + soft

    gm = fx.symbolic_trace(estimate)
    x = torch.linspace(-3, 3, 41)
    ShapeProp(gm).propagate(x)
    analysis = check(gm, x).analysis
    fact = analysis.fact(next(iter(reversed(gm.graph.nodes))).args[0])
    if kept is None:
        assert fact is None or not fact.integral, str(fact)
    else:
        assert fact is not None and fact.integral and not fact.exact and (fact.lo, fact.hi) == kept, str(fact)
