"""spikingjelly's neurons in training, as one operator with gradients, against the library's own."""

import copy
import functools
from typing import Any

import pytest
import torch
from functorch.compile import min_cut_rematerialization_partition
from rewriting import rewritten, site
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table

import sparsecomp
from sparsecomp import ops
from sparsecomp.compiler.capture import Graph
from sparsecomp.options import Options
from sparsecomp.passes.spiking import saved_spikes

neuron, functional, surrogate, layer = (
    pytest.importorskip(f"spikingjelly.activation_based.{name}")
    for name in ("neuron", "functional", "surrogate", "layer")
)
pytest.importorskip("spikingjelly._ops.lif")

pytestmark = pytest.mark.quick_cases(1)

SURROGATES = ("Sigmoid", "ATan", "PiecewiseQuadratic", "PiecewiseExp", "SoftSign", "SuperSpike", "Erf")
NEURONS = {
    "lif": lambda **more: neuron.LIFNode(tau=3.0, step_mode="m", **more),
    "lif no decay": lambda **more: neuron.LIFNode(tau=3.0, decay_input=False, step_mode="m", **more),
    "lif soft reset": lambda **more: neuron.LIFNode(v_reset=None, v_threshold=0.7, step_mode="m", **more),
    "lif reset to 0.1": lambda **more: neuron.LIFNode(v_reset=0.1, detach_reset=True, step_mode="m", **more),
    "if": lambda **more: neuron.IFNode(step_mode="m", **more),
    "if soft reset": lambda **more: neuron.IFNode(v_reset=None, detach_reset=True, step_mode="m", **more),
    "plif": lambda **more: neuron.ParametricLIFNode(init_tau=1.7, step_mode="m", **more),
    "plif no decay": lambda **more: neuron.ParametricLIFNode(v_reset=None, decay_input=False, step_mode="m", **more),
}


def sample(steps: int = 4, seed: int = 0) -> Tensor:
    return 3 * torch.randn(steps, 2, 3, 5, 5, generator=torch.Generator().manual_seed(seed))


def trained(call: Any, module: nn.Module, x: Tensor) -> list[Tensor]:
    """Spikes, the last membrane, and gradients of both for the input and parameters, of two calls in a row."""
    given, module_given = x.clone().requires_grad_(), [*module.parameters()]
    first, second = call(given), call(given * 0.9)
    weights = torch.linspace(-1, 1, x.numel()).view(x.shape).to(x.dtype)
    loss = (first * weights).sum() + (second * weights).sum() + module.v.square().sum()
    return [first.detach(), second.detach(), module.v.detach(), *torch.autograd.grad(loss, [given, *module_given])]


def through_aot(
    function: Any, split_by: Any = min_cut_rematerialization_partition, **options: Any
) -> tuple[Any, list[Any], list[fx.GraphModule]]:
    """The function with its graphs rewritten and differentiated ahead of time, their reports, and its forwards."""
    reports: list[Any] = []
    forwards: list[fx.GraphModule] = []
    parsed = Options.parse(None, {"verify": True, "strict": True, "neurons": "fuse", **options})

    def partition(joint: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        split = functools.partial(split_by, joint, inputs, **kwargs)
        parts = saved_spikes.partitioned(joint, split, kwargs["num_fwd_outputs"], parsed.memory == "low")
        forwards.append(parts[0])
        return parts

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        reports.append(Graph.of_dynamo(gm, inputs, {}, parsed).rewrite(parsed))
        run = aot_autograd(
            fw_compiler=lambda graph, _: graph, bw_compiler=lambda graph, _: graph, partition_fn=partition,
            decompositions={**select_decomp_table(), **ops.decompositions()},
        )  # fmt: skip
        return run(gm, inputs)

    torch._dynamo.reset()
    return torch.compile(function, backend=backend), reports, forwards


@pytest.mark.parametrize("kind", SURROGATES)
@pytest.mark.parametrize("name", NEURONS)
def test_spikes_have_the_bits_and_gradients_the_values_of_the_library_s(name, kind):
    eager = NEURONS[name](surrogate_function=getattr(surrogate, kind)())
    module = copy.deepcopy(eager)
    expected = trained(eager, eager, sample())
    compiled, reports, _ = through_aot(module)
    found = trained(compiled, module, sample())
    assert all(site.rewritten for report in reports for site in report.sites if site.rule == "train_neurons")
    assert any(site.rule == "train_neurons" for report in reports for site in report.sites)
    for ours, theirs in zip(found[:3], expected[:3], strict=True):
        assert torch.equal(ours, theirs) and ours.any()
    for ours, theirs in zip(found[3:], expected[3:], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


class Operator(nn.Module):
    """The library's operator, whose membrane is float32 whatever its input is."""

    def forward(self, x: Tensor) -> Tensor:
        v = torch.zeros_like(x[0], dtype=torch.float32)
        return torch.ops.sj_lif.forward.default(x, v, 3.0, True, 1.0, 0.0, False, 4.0, False, 0)[0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_charges_in_float32(dtype):
    compiled, reports, _ = through_aot(Operator())
    results = []
    for call in (Operator(), compiled):
        x = sample().to(dtype).requires_grad_()
        spikes = call(x)
        results.append((spikes.detach(), *torch.autograd.grad((spikes * sample(seed=1).to(dtype)).sum(), x)))
    assert [site.rewritten for site in reports[0].sites if site.rule == "train_neurons"] == [True]
    assert results[1][0].dtype is results[1][1].dtype is dtype and torch.equal(results[0][0], results[1][0])
    torch.testing.assert_close(results[1][1], results[0][1], rtol=1e-2, atol=1e-2)


class Net(nn.Module):
    """Convolutions with batch-norm and the library's neurons."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convs = nn.ModuleList(nn.Conv2d(before, width, 3, padding=1) for before in (3, width, width))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in self.convs)
        self.neurons = nn.ModuleList(neuron.LIFNode(step_mode="m") for _ in self.convs)

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm, fire in zip(self.convs, self.norms, self.neurons, strict=True):
            x = fire(norm(conv(x.flatten(0, 1))).unflatten(0, x.shape[:2]))
        return x.flatten(2).mean(2)


@pytest.mark.parametrize("memory", ["auto", "low"])
def test_charges_are_not_kept(memory):
    """Of three layers what their convolutions gave, or nothing but spikes where memory is to be low."""
    eager, x = Net(), torch.rand(4, 2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    module = copy.deepcopy(eager)
    compiled, _, forwards = through_aot(module, memory=memory)
    for call in (eager, compiled):
        call(x).square().sum().backward()
    for ours, theirs in zip(module.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)
    (forward,) = forwards
    kept = [node.meta["val"] for node in forward.graph.output_node().args[0] if isinstance(node, fx.Node)]
    elements = 4 * 2 * 8 * 16 * 16
    floats = [one for one in kept if one.dtype is torch.float32 and one.numel() == elements]
    assert len(floats) == (3 if memory == "auto" else 0)
    assert sum(one.dtype is torch.uint8 for one in kept) == 2


@pytest.mark.parametrize("memory", ["auto", "low"])
def test_of_a_static_stem_one_step_is_kept(memory):
    """Its neurons read one step of what the batch-norm gave, and give the sum of the gradients of all."""
    eager, x = Net(), torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0)).expand(4, 2, 3, 16, 16)
    module = copy.deepcopy(eager)
    compiled, reports, forwards = through_aot(module, memory=memory)
    for call in (eager, compiled):
        call(x).square().sum().backward()
    for ours, theirs in zip(module.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)
    assert site(reports[0], "static_stem").rewritten
    (forward,) = forwards
    first, *others = forward.graph.find_nodes(
        op="call_function", target=torch.ops.sparsecomp.trained_neuron.default
    )
    assert first.args[0].meta["val"].shape == (1, 2, 8, 16, 16) and first.args[6] == 4
    assert [one.args[6] for one in others] == [1, 1]
    kept = [node.meta["val"] for node in forward.graph.output_node().args[0] if isinstance(node, fx.Node)]
    floats = [one.numel() for one in kept if one.dtype is torch.float32 and one.numel() >= 2 * 8 * 16 * 16]
    one_step = 2 * 8 * 16 * 16
    # membranes are three of these results
    assert sorted(floats) == [one_step] * (3 + 1) + [4 * one_step] * (2 if memory == "auto" else 0)


def test_a_partitioner_that_cannot_is_asked_without_marks():
    asked = []

    def split(joint: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        asked.append(sum("recompute" in node.meta for node in joint.graph.nodes))
        if asked[-1]:
            raise RuntimeError("no cut")
        return min_cut_rematerialization_partition(joint, inputs, **kwargs)

    eager, x = Net(), torch.rand(4, 2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    module = copy.deepcopy(eager)
    for call in (eager, through_aot(module, split, memory="low")[0]):
        call(x).square().sum().backward()
    assert len(asked) == 2 and asked[0] > 3 and asked[1] == 0
    for ours, theirs in zip(module.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.slow(reason="compiles a network in two modes")
@pytest.mark.parametrize("memory", ["auto", "low"])
@pytest.mark.slow_cases(3)
def test_networks_learn_through_inductor(memory):
    torch._dynamo.reset()
    eager, x = Net(), torch.rand(4, 2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    module = copy.deepcopy(eager)
    compiled = torch.compile(module, backend="sparsecomp", options={"neurons": "fuse", "memory": memory})
    for call in (eager, compiled):
        call(x).square().sum().backward()
    report = sparsecomp.last_report(compiled)
    assert {one.implementation for one in report.sites if one.rule == "train_neurons"} == {"fused"}
    for ours, theirs in zip(module.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "steps", "reason"),
    [
        ({}, 4, "on the CPU"), ({"neurons": "fuse"}, 65, "65 time steps"),
        ({"neurons": "fuse", "implementation": "dense"}, 4, "'dense' was asked for"),
    ],
)  # fmt: skip
def test_what_stays_an_operator_says_why(options, steps, reason):
    _, report = rewritten(neuron.LIFNode(step_mode="m"), sample(steps), **options)
    assert not site(report, "train_neurons").rewritten and reason in site(report, "train_neurons").reason


@pytest.mark.parametrize(
    ("options", "dtype", "taken"),
    [
        ({}, torch.float32, True), ({"mode": "reduce-overhead"}, torch.float32, False), ({}, torch.float16, False),
        ({"mode": "reduce-overhead", "memory": "low"}, torch.float16, True), ({"neurons": "fuse"}, torch.float16, True),
    ],
)  # fmt: skip
def test_what_was_not_measured_is_asked_for(options, dtype, taken):
    report = sparsecomp.explain(Operator(), sample().to(dtype), device="h100", **options)
    (found,) = [one for one in report.sites if one.rule == "train_neurons"]
    assert found.rewritten == taken and (taken or "not measured" in found.reason)


def test_stored_membranes_stay_the_library_s():
    module = neuron.LIFNode(step_mode="m", store_v_seq=True)
    _, report = rewritten(module, sample(), neurons="fuse")
    assert "the membrane of every step is stored" in site(report, "train_neurons").reason


def test_without_gradients_nothing_is_said():
    with torch.no_grad():
        _, report = rewritten(neuron.LIFNode(step_mode="m"), sample(), neurons="fuse")
    assert not [one for one in report.sites if one.rule == "train_neurons"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("memory", ["auto", "low"])
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_networks_learn_on_a_gpu_as_the_library_s_do(mode, memory, monkeypatch):
    """Batch-norm rounds in another way than the library's, so that a few neurons next to their threshold differ."""
    torch.compiler.reset()
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    eager, x = Net(64).cuda(), torch.rand(4, 2, 3, 16, 16, generator=torch.Generator().manual_seed(0)).cuda()
    module = copy.deepcopy(eager)
    compiled = torch.compile(module, backend="sparsecomp", options={"mode": mode, "memory": memory, "neurons": "fuse"})
    for _ in range(3):
        for net, call in ((eager, eager), (module, compiled)):
            functional.reset_net(net)
            net.zero_grad()
            call(x).square().sum().backward()
    report = sparsecomp.last_report(compiled)
    assert {one.implementation for one in report.sites if one.rule == "train_neurons"} == {"fused"}
    for ours, theirs in zip(module.parameters(), eager.parameters(), strict=True):
        assert (ours.grad - theirs.grad).norm() <= 0.1 * theirs.grad.norm() + 1e-5


def test_a_batch_norm_whose_statistics_were_read_before_stays():
    """The backward of its first call keeps them, and finds a write that autograd sees."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.neurons = nn.BatchNorm2d(3), NEURONS["lif"]()

        def forward(self, x: Tensor) -> Tensor:
            before = self.norm(x.flatten(0, 1) + 1)
            return self.neurons(self.norm(x.flatten(0, 1)).unflatten(0, (4, -1))) * before.unflatten(0, (4, -1))

    eager, model, x = Twice(), Twice(), sample()
    compiled, reports, _ = through_aot(model)
    found, expected = compiled(x), eager(x)
    torch.testing.assert_close(found, expected)
    ours, right = (
        torch.autograd.grad(out.square().sum(), [*of.parameters()])
        for out, of in ((found, model), (expected, eager))
    )
    torch.testing.assert_close(ours, right, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close([*model.buffers()], [*eager.buffers()])
    assert site(reports[0], "train_neurons").rewritten
