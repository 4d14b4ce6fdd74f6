"""Small spiking models, and what the rewrite pipeline makes of them, run op by op so that a test takes milliseconds."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn

from sparsecomp._compat import FakeTensorMode, is_fake
from sparsecomp.compiler.capture import Graph
from sparsecomp.lowering.tuning.ceilings import target_named
from sparsecomp.options import Options
from sparsecomp.report import Report, Site, merge


def rewritten(function: Callable[..., Any], *inputs: Any, **options: Any) -> tuple[Any, Report]:
    """What `function` returns under the rewrite alone, and the report of all its graphs."""
    reports: list[Report] = []
    parsed = Options.parse(None, {"implementation": "binary", "verify": True, **options})

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        reports.append(Graph.of_dynamo(gm, example_inputs, {}, parsed).rewrite(parsed))
        return gm.forward

    torch._dynamo.reset()
    result = torch.compile(function, backend=backend)(*inputs)
    return result, merge(reports, "test")


def rewritten_for(
    card: str, function: Callable[..., Any], *inputs: Any, **options: Any
) -> tuple[Any, Report, str]:  # fmt: skip
    """What `function` returns without gradients if its one graph is rewritten as for a card in CUDA graphs, and run
    op by op on a CPU; the report; and the graph's code."""
    parsed = Options.parse(None, {"mode": "reduce-overhead", **options})
    found: list[tuple[Report, str]] = []

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        report = Graph.of_dynamo(gm, example_inputs, {}, parsed).rewrite(parsed, target_named(card))
        found.append((report, gm.code))
        return gm.forward

    torch._dynamo.reset()
    with torch.no_grad():
        result = torch.compile(function, backend=backend)(*inputs)
    ((report, code),) = found
    return result, report, code


def operators_run(function: Callable[..., Any], *inputs: Any) -> set[str]:
    """Names of torch's operators, and ours, that a call runs."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        function(*inputs)
    return {event.key for event in seen.key_averages()}


class Examples(fx.Interpreter):
    """Runs a graph, and leaves with each node what stands for what it gave."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.fakes = FakeTensorMode()

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if isinstance(result, torch.Tensor):
            n.meta["example_value"] = result if is_fake(result) else self.fakes.from_tensor(result)
        return result


def site(report: Report, rule: str, index: int = -1) -> Site:
    """One site of a rule, the last by default."""
    return [found for found in report.sites if found.rule == rule][index]


def dyadic(model: nn.Module, seed: int = 0) -> nn.Module:
    """The model with parameters that are small multiples of 1/16: sums of them are exact in float32, in any order."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randint(-16, 17, parameter.shape, generator=generator) / 16)
    return model


def spikes(x: torch.Tensor) -> torch.Tensor:
    """Ones where `x` is positive."""
    return (x > 0).to(x.dtype)


class OnSpikes(nn.Module):
    """A layer that is given spikes, in a domain of choice: `layer(shape(spikes(x)))`."""

    def __init__(self, layer: nn.Module, shape: Callable[[torch.Tensor], torch.Tensor] = lambda s: s) -> None:
        super().__init__()
        self.layer, self.shape = layer, shape

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.shape(spikes(x)))


class AttributeLIF(nn.Module):
    """A hand-written neuron that keeps its potential in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.v: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        v = torch.zeros_like(x) if self.v is None else self.v
        v = v * 0.5 + x
        spike = self.fire(v - 1.0)
        self.v = v * (1 - spike)
        return spike

    def fire(self, over: torch.Tensor) -> torch.Tensor:
        """The threshold, without a gradient."""
        return (over >= 0).to(over.dtype)


class Surrogate(torch.autograd.Function):
    """A step whose gradient is a box."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return (x >= 0).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return grads[0] * (x.abs() < 1).to(x.dtype)


class SurrogateLIF(AttributeLIF):
    """The same neuron with a surrogate gradient."""

    def fire(self, over: torch.Tensor) -> torch.Tensor:
        return Surrogate.apply(over)  # pyright: ignore[reportReturnType]


class ConvNet(nn.Module):
    """conv → batch-norm → LIF → conv → LIF → linear, single-step."""

    def __init__(self, neuron: Callable[[], nn.Module] = AttributeLIF) -> None:
        super().__init__()
        self.first, self.norm, self.fire1 = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), neuron()
        self.second, self.fire2 = nn.Conv2d(16, 32, 3, padding=1), neuron()
        self.head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.fire1(self.norm(self.first(x)))
        return self.head(self.fire2(self.second(x)).amax((2, 3)))
