"""What every test of a real model does: run it compiled beside eager, and compare each neuron's spikes."""

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd

import sparsecomp.ops
from sparsecomp.compiler.capture import Graph
from sparsecomp.options import Options
from sparsecomp.report import Report

WEIGHT_RULES = ("spike_conv", "spike_linear")
_LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class Tapped(nn.Module):
    """A model that also returns what each of its neurons fired, in the order of the calls."""

    def __init__(self, model: nn.Module, neurons: tuple[type[nn.Module], ...]) -> None:
        super().__init__()
        self.model = model
        self.fired: list[Tensor] = []
        for module in model.modules():
            if isinstance(module, neurons):
                module.register_forward_hook(self._keep)

    def _keep(self, module: nn.Module, args: Any, output: Any) -> None:
        self.fired.append(output[0] if isinstance(output, tuple | list) else output)

    def forward(self, *args: Any) -> tuple[Any, list[Tensor]]:
        """The model's result and the spikes."""
        self.fired = []
        return self.model(*args), self.fired


@dataclass
class Run:
    """One model run eagerly and compiled.

    Attributes:
        expected, found: (result, spikes of each neuron), a call.
        reports: one a compiled graph.
    """

    expected: list[tuple[Any, list[Tensor]]]
    found: list[tuple[Any, list[Tensor]]]
    reports: list[Report]

    @property
    def flips(self) -> int:
        """Spikes that differ from eager's."""
        pairs = zip(self.expected, self.found, strict=True)
        return sum(int((a != b).sum()) for e, f in pairs for a, b in zip(e[1], f[1], strict=True))

    @property
    def rates(self) -> list[float]:
        """Share of non-zero results of each neuron, in all calls."""
        return [float((fired != 0).float().mean()) for _, spikes in self.expected for fired in spikes]

    def rewritten(self, graph: int = 0) -> int:
        """Weight layers that one graph computes from spikes."""
        sites = self.reports[graph].sites
        return sum(site.rewritten for site in sites if site.rule in WEIGHT_RULES)


def compiler(reports: list[Report], how: str = "graph", **options: Any) -> Callable[..., Any]:
    """A torch.compile backend that runs the rewritten graph without Inductor's code generation.

    Args:
        reports: gets one report a graph.
        how: `graph` runs Dynamo's graph op by op; `aot` traces it through AOTAutograd with our decompositions first.
        **options: options of the sparsecomp backend.
    """
    parsed = Options.parse(None, {"implementation": "binary", "verify": True, "strict": True, **options})

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        reports.append(Graph.of_dynamo(gm, example_inputs, {}, parsed).rewrite(parsed))
        return gm.forward if how == "graph" else _aot(gm, example_inputs)

    return backend


def _aot(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    run = aot_autograd(fw_compiler=lambda graph, _: graph, decompositions=sparsecomp.ops.decompositions())
    return run(gm, example_inputs)


def run_beside_eager(
    model: nn.Module,
    calls: Iterable[Sequence[Any]],
    neurons: tuple[type[nn.Module], ...],
    how: str = "graph",
    reset: Callable[[nn.Module], None] | None = None,
    rounds: int = 1,
    **options: Any,
) -> Run:
    """Call a copy of `model` eagerly and `model` compiled, with the same inputs in the same order.

    Args:
        model, calls, neurons: the model, its inputs in each call, and the classes whose results are spikes.
        how, **options: see `compiler`.
        reset: forgets the state, between rounds.
        rounds: how often to make all the calls.
    """
    torch._dynamo.reset()
    eager, model = Tapped(copy.deepcopy(model), neurons), Tapped(model, neurons)
    reports: list[Report] = []
    compiled = torch.compile(model, backend=compiler(reports, how, **options))
    run = Run([], [], reports)
    calls = list(calls)
    with torch.no_grad():
        for _ in range(rounds):
            for inputs in calls:
                run.expected.append(eager(*inputs))
                run.found.append(compiled(*inputs))
            if reset:
                reset(eager), reset(model)
    return run


@dataclass
class Step:
    """One training step: spikes, the gradients of all parameters and of the input, and what was compiled for it."""

    fired: list[Tensor]
    grads: dict[str, Tensor]
    rewritten: int = 0
    graphs: int = 0

    def flips(self, other: "Step") -> int:
        """Spikes that differ."""
        return sum(int((a != b).sum()) for a, b in zip(self.fired, other.fired, strict=True))

    def assert_close(self, other: "Step", tolerance: float = 1e-5) -> None:
        """Gradients within `tolerance` of each one's largest entry, or a rounding of the largest of all: batch-norm
        leaves nothing else of the gradient of a bias before it."""
        assert self.grads.keys() == other.grads.keys()
        assert any(grad.abs().max() > 0 for grad in other.grads.values()), "no gradient at all proves nothing"
        rounding = torch.finfo(torch.float32).eps * max(float(grad.abs().max()) for grad in other.grads.values())
        for name, grad in other.grads.items():
            bound = max(tolerance * float(grad.abs().max()), rounding)
            torch.testing.assert_close(self.grads[name], grad, rtol=0, atol=bound, msg=lambda m, n=name: f"{n}: {m}")


def gradients_beside_eager(
    model: nn.Module,
    inputs: Sequence[Tensor],
    neurons: tuple[type[nn.Module], ...],
    how: str = "graph",
    **options: Any,
) -> tuple[Step, Step]:
    """One training step of a copy of `model` run eagerly, and of `model` compiled, with the same random numbers."""
    torch._dynamo.reset()
    eager, model = Tapped(copy.deepcopy(model), neurons), Tapped(model, neurons)
    reports: list[Report] = []
    expected = _training_step(eager, eager, inputs)
    found = _training_step(model, torch.compile(model, backend=compiler(reports, how, **options)), inputs)
    found.rewritten, found.graphs = Run([], [], reports).rewritten(), len(reports)
    return expected, found


def _training_step(model: nn.Module, call: Callable[..., Any], inputs: Sequence[Tensor]) -> Step:
    inputs = [x.clone().requires_grad_() for x in inputs]
    torch.manual_seed(1)
    out, fired = call(*inputs)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    (out * weight).sum().backward()
    leaves = dict(model.named_parameters()) | {f"input {i}": x for i, x in enumerate(inputs)}
    return Step([s.detach() for s in fired], {name: x.grad for name, x in leaves.items() if x.grad is not None})


def assert_exact(run: Run, tolerance: float = 0.0) -> None:
    """Not one flipped spike, the same result, and a network that fires."""
    assert run.flips == 0
    assert max(run.rates) > 0.05, "a dead network proves nothing"
    for (expected, _), (found, _) in zip(run.expected, run.found, strict=True):
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def sixteenths(model: nn.Module, seed: int = 0, bound: int = 16) -> nn.Module:
    """Weights that are small multiples of 1/16 and batch-norms that multiply by 1: sums are exact in any order."""
    generator = torch.Generator().manual_seed(seed)

    def draw(parameter: Tensor) -> None:
        parameter.copy_(torch.randint(-bound, bound + 1, parameter.shape, generator=generator) / 16)

    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, _LAYERS):
                for parameter in module.parameters(recurse=False):
                    draw(parameter)
            elif isinstance(module, _NORMS):
                module.weight.fill_(1), draw(module.bias)
                module.running_mean.zero_(), module.running_var.fill_(1 - module.eps)
    return model


def images(*shape: int, seed: int = 0) -> Tensor:
    """Pixels that are multiples of 1/4."""
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)) / 4
