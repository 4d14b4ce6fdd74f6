"""The registry: every entry's domain against what the neuron gives when it runs."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fact_checker import check, check_values
from torch import fx, nn

import sparsecomp
from sparsecomp.errors import InputError
from sparsecomp.reference.facts import SparsityFact, binary, integers, interval
from sparsecomp.snn import norse as norse_table
from sparsecomp.snn import sinabs as sinabs_table
from sparsecomp.snn import snntorch as snntorch_table
from sparsecomp.snn import spikingjelly as spikingjelly_table
from sparsecomp.snn.registry import domain_of, inspect, is_neuron, register_neuron
from sparsecomp.snn.spec import NotASource

SPIKINGJELLY: dict[str, tuple[Callable[[Any], nn.Module], tuple[int, ...]]] = {
    **{
        name: (lambda m, name=name: getattr(m, name)(step_mode="m"), (4, 2, 8))
        for name in [
            "IFNode",
            "LIFNode",
            "ParametricLIFNode",
            "SimpleIFNode",
            "QIFNode",
            "EIFNode",
            "IzhikevichNode",
            "KLIFNode",
            "ComplementaryLIFNode",
            "RAFNode",
            "HalfThresholdIFNode",
            "ActivationAwareIFNode",
            "TernaryIFNode",
            "TernaryLIFNode",
            "ILIFNode",
        ]
    },
    "SimpleLIFNode": (lambda m: m.SimpleLIFNode(2.0, True, step_mode="m"), (4, 2, 8)),
    "CUBALIFNode": (lambda m: m.CUBALIFNode(c_decay=0.5, v_decay=0.75), (2, 8)),
    "GatedLIFNode": (lambda m: m.GatedLIFNode(T=4, step_mode="m"), (4, 2, 8)),
    "PSN": (lambda m: m.PSN(T=4), (4, 2, 8)),
    "MaskedPSN": (lambda m: m.MaskedPSN(k=2, T=4, step_mode="m"), (4, 2, 8)),
    "SlidingPSN": (lambda m: m.SlidingPSN(k=2, step_mode="m"), (4, 2, 8)),
    "SLTTLIFNode": (lambda m: m.SLTTLIFNode(), (2, 8)),
    "OTTTLIFNode": (lambda m: m.OTTTLIFNode(), (2, 8)),
    "MPBNLIFNode": (lambda m: m.MPBNLIFNode(out_features=8), (2, 8)),
    "STBIFNode": (lambda m: m.STBIFNode(0.3, 8, sym=True, step_mode="m"), (4, 2, 8)),
    "ILCIFNode": (lambda m: m.ILCIFNode(2, 4), (4, 2, 8)),
    "ILCLIFNode": (lambda m: m.ILCLIFNode(2, 4), (4, 2, 8)),
    "ILCCUBALIFNode": (lambda m: m.ILCCUBALIFNode(2, 4), (4, 2, 8)),
    "NoisyCUBALIFNode": (lambda m: m.NoisyCUBALIFNode(8, is_training=False, T=4), (4, 2, 8)),
    "NoisyILCCUBALIFNode": (lambda m: m.NoisyILCCUBALIFNode(2, 4, is_training=False, T=4), (4, 2, 8)),
}


def tensor_of(out: Any) -> torch.Tensor:
    return out[0] if isinstance(out, tuple | list) else out


def agrees(module: nn.Module, x: torch.Tensor, *state: Any) -> torch.Tensor:
    """Runs a registered neuron and checks its output, and the form of its result, against the registry."""
    verdict = inspect(module)
    assert verdict.fact is not None, verdict.reason
    with torch.no_grad():
        out = module(x, *state)
    assert isinstance(out, tuple | list) == verdict.returns_tuple
    spikes, scale = tensor_of(out), verdict.fact.scale
    factor = getattr(module, scale) if isinstance(scale, str) else scale
    check_values(spikes, verdict.fact, factor, type(module).__name__)
    return spikes


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("name", SPIKINGJELLY)
def test_spikingjelly_domains(name: str, train: bool) -> None:
    neuron = pytest.importorskip("spikingjelly.activation_based.neuron")
    make, shape = SPIKINGJELLY[name]
    torch.manual_seed(0)
    agrees(make(neuron).train(train), 3 * torch.randn(shape))


@pytest.mark.parametrize("name", ["DSRIFNode", "DSRLIFNode"])
def test_spikingjelly_dsr_spikes_carry_the_threshold(name: str) -> None:
    neuron = pytest.importorskip("spikingjelly.activation_based.neuron")
    module = getattr(neuron, name)(T=4)
    fact = domain_of(module)
    assert fact is not None and fact.is_scaled_binary
    factor = module.v_threshold / (module.delta_t if name == "DSRLIFNode" else 1)
    with torch.no_grad():
        check_values(module(9 * torch.rand(4, 2, 8)), fact, factor, name)


@pytest.mark.parametrize(
    "make",
    [
        lambda m: m.LIAFNode(torch.relu, False),
        lambda m: m.NonSpikingIFNode(),
        lambda m: m.NonSpikingLIFNode(),
        lambda m: m.NoisyCUBALIFNode(8, is_training=True),
        lambda m: m.FewSpikeNode(m.FewSpikeTable([1.0], [1.0], [1.0])),
    ],
)
def test_spikingjelly_analog_neurons_are_no_source(make: Callable[[Any], nn.Module]) -> None:
    module = make(pytest.importorskip("spikingjelly.activation_based.neuron"))
    assert is_neuron(module) and domain_of(module) is None and inspect(module).reason


def test_a_soft_or_unknown_surrogate_is_no_source() -> None:
    neuron = pytest.importorskip("spikingjelly.activation_based.neuron")
    surrogate = pytest.importorskip("spikingjelly.activation_based.surrogate")
    assert domain_of(neuron.LIFNode(surrogate_function=surrogate.ATan(spiking=False))) is None
    assert domain_of(neuron.LIFNode(surrogate_function=surrogate.MultiLevelSpikeCount(4))) is None
    assert domain_of(neuron.LIFNode(surrogate_function=nn.Sigmoid())) is None


def test_every_spikingjelly_class_is_registered() -> None:
    neuron = pytest.importorskip("spikingjelly.activation_based.neuron")
    bases = {"BaseNode", "SimpleBaseNode", "NonSpikingBaseNode", "AdaptBaseNode", "ILCBaseNode", "MPBNBaseNode"}
    bases |= {"NoisyBaseNode", "NoisyILCBaseNode", "NoisyNonSpikingBaseNode"}
    names = {n for n, c in vars(neuron).items() if isinstance(c, type) and issubclass(c, nn.Module)} - bases
    known = {name.rpartition(".")[2] for name in spikingjelly_table.NEURONS}
    assert names <= known


# ---- subclasses -----------------------------------------------------------------------------------------------------


def test_a_subclass_that_keeps_the_firing_is_found() -> None:
    neuron = pytest.importorskip("spikingjelly.activation_based.neuron")

    class Charged(neuron.SimpleLIFNode):
        def neuronal_charge(self, x: torch.Tensor) -> None:
            self.v = self.v * 0.5 + 2 * x

    module = Charged(2.0, False)
    fact = domain_of(module)
    assert fact is not None and fact.is_binary
    agrees(module, torch.randn(2, 8))


def test_a_subclass_that_changes_the_firing_is_unknown() -> None:
    neuron = pytest.importorskip("spikingjelly.activation_based.neuron")

    class Doubled(neuron.SimpleIFNode):
        def neuronal_fire(self) -> torch.Tensor:
            return 2 * super().neuronal_fire()

    verdict = inspect(Doubled())
    assert verdict.fact is None and "neuronal_fire" in verdict.reason


def test_an_instance_with_its_own_forward_is_unknown() -> None:
    neuron = pytest.importorskip("spikingjelly.activation_based.neuron")
    module = neuron.IFNode()
    module.forward = lambda x: x
    assert domain_of(module) is None


# ---- the other libraries --------------------------------------------------------------------------------------------

SNNTORCH: dict[str, Callable[[Any], nn.Module]] = {
    "Leaky": lambda m: m.Leaky(0.9, graded_spikes_factor=0.7),
    "Leaky plain": lambda m: m.Leaky(0.9, init_hidden=True),
    "Leaky hidden": lambda m: m.Leaky(0.9, init_hidden=True, output=True, graded_spikes_factor=2.0),
    "Leaky inhibition": lambda m: m.Leaky(0.9, inhibition=True, graded_spikes_factor=0.7),
    "Synaptic": lambda m: m.Synaptic(0.9, 0.8),
    "Alpha": lambda m: m.Alpha(0.9, 0.8),
    "Lapicque": lambda m: m.Lapicque(0.9),
    "RLeaky": lambda m: m.RLeaky(0.9, all_to_all=False),
    "RSynaptic": lambda m: m.RSynaptic(0.9, 0.8, all_to_all=False),
    "SLSTM": lambda m: m.SLSTM(8, 8, threshold=0.1),
}


@pytest.mark.parametrize("name", SNNTORCH)
def test_snntorch_domains(name: str) -> None:
    module = SNNTORCH[name](pytest.importorskip("snntorch"))
    agrees(module, 3 * torch.randn(4, 8))


def test_snntorch_sequence_neurons_apply_their_factor_twice() -> None:
    snntorch = pytest.importorskip("snntorch")
    x = 3 * torch.randn(5, 4, 8)
    agrees(snntorch.StateLeaky(torch.full((8,), 0.9), 8), x)
    agrees(snntorch.LinearLeaky(torch.full((8,), 0.9), 8, 8), x)
    plain = domain_of(snntorch.StateLeaky(torch.full((8,), 0.9), 8))
    assert plain is not None and plain.is_binary
    doubled = domain_of(snntorch.StateLeaky(torch.full((8,), 0.9), 8, graded_spikes_factor=0.7))
    assert doubled is not None and not doubled.integral
    assert domain_of(snntorch.StateLeaky(torch.full((8,), 0.9), 8, output=False)) is None


def test_snntorch_leaky_parallel_and_delta() -> None:
    snntorch = pytest.importorskip("snntorch")
    agrees(snntorch.LeakyParallel(8, 8, beta=0.9, graded_spikes_factor=0.7), 3 * torch.randn(5, 4, 8))
    agrees(snntorch.DeltaLeaky(beta=0.9, init_hidden=True), 3 * torch.randn(4, 8))


def test_snntorch_own_gradient_function_is_unknown() -> None:
    snntorch = pytest.importorskip("snntorch")
    assert domain_of(snntorch.Leaky(0.9, spike_grad=torch.sigmoid)) is None


def test_snntorch_names_exist() -> None:
    snntorch = pytest.importorskip("snntorch")
    assert all(hasattr(snntorch, name.rpartition(".")[2]) for name in snntorch_table.NEURONS)


NORSE = ["LIF", "LIFCell", "LIFBoxCell", "LIFRefracCell", "LIFAdEx", "LIFAdExCell", "LIFAdExRefracCell", "LIFEx"]
NORSE += ["LIFExCell", "LSNN", "LSNNCell", "IAF", "IAFCell"]


@pytest.mark.parametrize("name", NORSE)
def test_norse_domains(name: str) -> None:
    norse = pytest.importorskip("norse.torch")
    module = getattr(norse, name)()
    agrees(module, 900 * torch.randn(3, 2, 8))


@pytest.mark.parametrize("name", ["LIFRecurrent", "LIFRecurrentCell", "LSNNRecurrent", "LIFAdExRecurrentCell"])
def test_norse_recurrent_domains(name: str) -> None:
    norse = pytest.importorskip("norse.torch")
    x = 900 * torch.randn(3, 2, 8)
    agrees(getattr(norse, name)(8, 5), x[0] if name.endswith("Cell") else x)


def test_norse_names_exist_and_integrators_are_analog() -> None:
    norse = pytest.importorskip("norse.torch")
    missing = [name for name in norse_table.NEURONS if not hasattr(norse, name.rpartition(".")[2])]
    assert not missing
    assert is_neuron(norse.LICell()) and domain_of(norse.LICell()) is None


@pytest.mark.parametrize("fire", ["SingleSpike", "MultiSpike", "MaxSpike"])
def test_sinabs_domains(fire: str) -> None:
    sinabs = pytest.importorskip("sinabs")
    function = getattr(sinabs.activation, fire)
    function = function(3) if fire == "MaxSpike" else function
    for make in (lambda **k: sinabs.layers.IAF(**k), lambda **k: sinabs.layers.LIF(tau_mem=10.0, **k)):
        module = make(spike_fn=function)
        agrees(module, 30 * torch.randn(2, 4, 8))
        fact = domain_of(module)
        assert fact is not None and fact.is_binary == (fire == "SingleSpike")


def test_sinabs_analog_and_names() -> None:
    sinabs = pytest.importorskip("sinabs")
    assert domain_of(sinabs.layers.ExpLeak(tau_mem=10.0)) is None
    missing = {
        name.rpartition(".")[2] for name in sinabs_table.NEURONS if not hasattr(sinabs.layers, name.rpartition(".")[2])
    }
    assert missing <= {"ALIFSqueeze"}  # defined in sinabs.layers.alif, not exported


# ---- registering and leaves -----------------------------------------------------------------------------------------


@register_neuron(domain=binary())
class MyNeuron(nn.Module):
    """A user's neuron."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x > 0).float()


@register_neuron(domain=integers(-1, 1), returns_tuple=True)
class MyTuple(nn.Module):
    """A user's neuron that gives its state, too."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.sign(x), x


class Leaves(fx.Tracer):
    """Registered neurons stay one node."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return is_neuron(m) or super().is_leaf_module(m, module_qualified_name)


def traced(model: nn.Module) -> fx.GraphModule:
    return fx.GraphModule(model, Leaves().trace(model))


def test_leaves_of_a_symbolic_trace() -> None:
    gm = traced(nn.Sequential(nn.Conv2d(2, 2, 3), MyNeuron(), nn.MaxPool2d(2), nn.Conv2d(2, 2, 3)))
    analysis = check(gm, torch.randn(2, 2, 12, 12)).analysis
    last = [node for node in gm.graph.nodes if node.op == "call_module"][-1]
    fact = analysis.fact(last.args[0], at=last)
    assert fact is not None and fact.is_binary and fact.source == "MyNeuron"


def test_only_item_zero_of_a_tuple_is_spikes() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.neuron = MyTuple()

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            spikes, state = self.neuron(x)
            return spikes, state

    gm = traced(Model())
    analysis = check(gm, torch.randn(2, 8)).analysis
    spikes, state = next(node for node in gm.graph.nodes if node.op == "output").args[0]
    assert analysis.fact(spikes).fits_int8 and analysis.fact(state) is None


def test_snntorch_leaf_names_the_factor_by_its_path() -> None:
    snntorch = pytest.importorskip("snntorch")
    neuron = snntorch.Leaky(0.9, init_hidden=True, graded_spikes_factor=0.7)
    gm = traced(nn.Sequential(neuron, nn.Conv2d(2, 2, 3)))
    analysis = check(gm, 3 * torch.randn(2, 2, 8, 8)).analysis
    last = [node for node in gm.graph.nodes if node.op == "call_module"][-1]
    fact = analysis.fact(last.args[0], at=last)
    assert fact is not None and fact.scale == "0.graded_spikes_factor"


def test_a_hook_on_a_neuron_ends_its_domain() -> None:
    neuron = MyNeuron()
    neuron.register_forward_hook(lambda module, args, out: out * 2)
    gm = traced(nn.Sequential(neuron, nn.Conv2d(2, 2, 3)))
    last = [node for node in gm.graph.nodes if node.op == "call_module"][-1]
    assert check(gm, torch.randn(2, 2, 8, 8)).analysis.fact(last.args[0]) is None


def test_registering_by_name_and_not_a_source() -> None:
    class Later(nn.Module):
        pass

    register_neuron(f"{__name__}.{Later.__qualname__}", domain=NotASource("analog"))
    assert is_neuron(Later()) and inspect(Later()).reason == "analog"
    assert not is_neuron(nn.ReLU()) and domain_of(nn.ReLU()) is None


class Opaque(nn.Module):
    """Levels below its input, up to a highest one, by a way that no graph shows."""

    highest = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        levels, noise = torch.zeros_like(x), torch.rand(x.shape, generator=torch.Generator().manual_seed(0))
        for level in range(self.highest):
            levels[x > 0.1 + 0.1 * level + 0.01 * noise] = level + 1.0
        return levels


class Counting(Opaque):
    highest = 3


class ByName(Opaque):
    pass


class ByFunction(Counting):
    pass


class NotNegative(Opaque):
    pass


class Analog(Opaque):
    pass


@pytest.mark.usefixtures("op_by_op")
def test_a_users_own_neuron_is_rewritten_by_public_names_alone() -> None:
    from sparsecomp import snn

    assert snn.register_neuron is sparsecomp.register_neuron and sparsecomp.snn is snn
    snn.register_neuron(Counting, domain=snn.integers(0, 3))
    snn.register_neuron(f"{__name__}.ByName", domain=snn.binary())
    snn.register_neuron(ByFunction, domain=lambda module: snn.integers(0, module.highest))
    snn.register_neuron(NotNegative, domain=snn.interval(0, None))
    snn.register_neuron(Analog, domain=snn.NotASource("gives a membrane"))
    x = torch.randn(2, 4, 6, 6)
    for neuron in (Opaque, Counting, ByName, ByFunction, NotNegative, Analog):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(4, 8, 3), neuron(), nn.Conv2d(8, 8, 3)).eval()
        with torch.no_grad():
            optimized = sparsecomp.optimize(model, x, implementation="binary")
            spikes = model[1](model[0](x))
            wanted = nn.functional.conv2d(spikes.double(), model[2].weight.double(), model[2].bias.double())
            assert spikes.max() == neuron.highest
            torch.testing.assert_close(optimized(x).double(), wanted, rtol=1e-5, atol=1e-5)
        whole_numbers = neuron in (Counting, ByName, ByFunction)
        assert [site.module for site in optimized.report.rewritten] == (["2"] if whole_numbers else [])


def test_a_domain_that_is_none_is_refused() -> None:
    for domain in (None, 1, "binary", (0, 1), NotASource):
        with pytest.raises(InputError, match="give one of sparsecomp.snn"):
            register_neuron(Opaque, domain=domain)  # pyright: ignore[reportCallIssue, reportArgumentType]
    for target in (3, Opaque(), "", " "):
        with pytest.raises(InputError, match="give a class or its name"):
            register_neuron(target, domain=binary())  # pyright: ignore[reportCallIssue, reportArgumentType]
    for wrong in ({"returns_tuple": "yes"}, {"returns_tuple": int}, {"writes_input": "no"}):
        with pytest.raises(InputError, match=f"{next(iter(wrong))} is .*give True"):
            register_neuron(Opaque, domain=binary(), **wrong)


@pytest.mark.parametrize(
    ("make", "bounds", "message"),
    [
        (integers, (1, -1), "no value is from 1 to -1"), (integers, (float("nan"), 1), "nan is no whole"),
        (integers, (0.5, 1), "0.5 is no whole"), (integers, ("a", 2), "'a' is no whole"),
        (interval, (2, 1), "no value is from 2 to 1"), (interval, ("a", None), "'a' is no finite"),
        (lambda lo, hi: SparsityFact(lo, hi, True), (1, -1), "no value is from 1 to -1"),
    ],
)  # fmt: skip
def test_bounds_that_hold_no_value_are_refused(make: Any, bounds: tuple[Any, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        register_neuron("nowhere.Neuron", domain=make(*bounds))


@pytest.mark.parametrize("answer", [lambda _: 1 / 0, lambda _: None, lambda _: integers(2, 1)])
def test_a_function_that_fails_leaves_its_neuron_unknown_and_the_rest_as_it_was(answer: Any) -> None:
    @register_neuron(domain=answer)
    class Failing(Opaque):
        highest = 1

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x > 0).to(x.dtype)

    @register_neuron(domain=binary())
    class Sound(Failing):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x > 0).to(x.dtype)

    assert "Failing failed: " in inspect(Failing()).reason
    layers = (nn.Linear(8, 8), Failing(), nn.Linear(8, 8), Sound(), nn.Linear(8, 8))
    with torch.no_grad():
        report = sparsecomp.optimize(nn.Sequential(*layers).eval(), torch.rand(2, 8), implementation="binary").report
    assert [site.module for site in report.rewritten] == ["4"]
    (unknown,) = (site for site in report.sites if site.module == "2")
    assert "Failing failed: " in unknown.reason


def test_no_library_is_imported() -> None:
    code = (
        "import sys, sparsecomp.passes.facts.analysis, sparsecomp.snn.registry;"
        "print([m for m in ('spikingjelly', 'snntorch', 'norse', 'sinabs', 'triton', 'torch._inductor') "
        "if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
