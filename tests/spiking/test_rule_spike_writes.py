"""Writes, between forward and backward, to what a layer on spikes has read: results and errors are eager's."""

import copy
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import min_cut_rematerialization_partition
from rewriting import Surrogate
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd

import sparsecomp
from sparsecomp.options import Options
from sparsecomp.passes import pipeline

pytestmark = pytest.mark.quick_cases(3)

SOURCES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cast": lambda state: (state > 0).float(),
    "bool": lambda state: state.bool().float(),
    "chosen": lambda state: torch.where(state > 0, 1.0, 0.0),
    "expanded": lambda state: (state[:1] > 0).float().expand(3, 4, 6, 6),
    "viewed": lambda state: (state > 0).float().view(3, 4, 6, 6).contiguous(),
    "pooled": lambda state: F.max_pool2d((state > 0).float(), 3, 1, 1),
    "scaled": lambda state: (state > 0).float() * 0.25,
    "summed": lambda state: (state > 0).float() + (state > 1).float(),
    "of bytes": lambda state: (state > 0).to(torch.int8).float(),
}
"""Spikes of a state, which eager keeps and not the state."""
WRITES: dict[str, Callable[[nn.Module, torch.Tensor], object]] = {
    "copy": lambda model, y: model.state.copy_((y[:, :4] > 0.5).to(model.state.dtype)),
    "fill": lambda model, y: model.state.fill_(1),
    "data": lambda model, y: model.state.data.fill_(1),
    "item": lambda model, y: set_first(model.state),
    "other": lambda model, y: setattr(model, "state", (y[:, :4] > 0.5).to(model.state.dtype)),
}


def set_first(state: torch.Tensor) -> None:
    state[0] = 1


class Recurrent(nn.Module):
    """Spikes of a state that is written behind the layer, in the same graph or after a graph break."""

    def __init__(self, source: str, write: str, layer: str, apart: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.source, self.write, self.layer, self.apart = SOURCES[source], WRITES[write], layer, apart
        start = torch.randint(0, 2, (3, 4, 6, 6), generator=torch.Generator().manual_seed(0))
        self.register_buffer("state", start.to(dtype))
        shape = (4, 4, 3, 3) if layer == "conv" else (6, 6)
        self.weight = nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(1)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spikes = self.source(self.state).to(self.weight.dtype)
        y = (F.conv2d(spikes, self.weight, padding=1) if self.layer == "conv" else F.linear(spikes, self.weight)) + x
        if self.apart:
            torch._dynamo.graph_break()
        self.write(self, y)
        return y


def partitioned(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """Rewritten, and cut in forward and backward as for Inductor, whose code takes seconds to build."""
    report = pipeline.run_rules(gm, Options.parse(None, {"implementation": IMPLEMENTATION.get(), "strict": True}))
    assert report.rewritten or "linear" not in gm.code and "conv" not in gm.code
    run = aot_autograd(
        fw_compiler=lambda graph, _: graph,
        partition_fn=partial(min_cut_rematerialization_partition, compiler="inductor"),
        decompositions=sparsecomp.ops.decompositions(),
    )
    return run(gm, example_inputs)


IMPLEMENTATION = ContextVar("implementation", default="binary")
BACKENDS: dict[str, Any] = {"cut": partitioned, "inductor": "sparsecomp"}


def compiled(model: Callable[..., Any], backend: str = "cut") -> Callable[..., Any]:
    torch._dynamo.reset()
    options = {"implementation": IMPLEMENTATION.get(), "strict": True} if backend == "inductor" else None
    return torch.compile(model, backend=BACKENDS[backend], options=options)


def gradient(call: Callable[..., torch.Tensor], model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    call(x).square().sum().backward()
    assert model.weight.grad is not None
    return model.weight.grad


def check(model: nn.Module, backend: str = "cut") -> None:
    """The gradient after the write is that of the same model, run by eager in float64."""
    x = torch.randn(3, 4, 6, 6, generator=torch.Generator().manual_seed(2))
    exact = copy.deepcopy(model)
    exact.weight.data = exact.weight.data.double()
    expected = gradient(exact, exact, x.double())
    found = gradient(compiled(model, backend), model, x)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("apart", [True, False], ids=["apart", "together"])
@pytest.mark.parametrize("write, backend", [*((write, "cut") for write in WRITES), ("copy", "inductor")])
def test_a_write_to_what_spikes_were_made_of(write, apart, backend):
    check(Recurrent("cast", write, "linear", apart, torch.bool), backend)


@pytest.mark.parametrize("layer", ["linear", "conv"])
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("implementation", ["binary", "event"])
def test_spikes_however_they_were_made(source, layer, implementation):
    before = IMPLEMENTATION.set(implementation)
    try:
        check(Recurrent(source, "fill", layer, True, torch.uint8))
    finally:
        IMPLEMENTATION.reset(before)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.float16, torch.float64])
def test_states_of_any_dtype(dtype):
    check(Recurrent("cast", "fill", "linear", True, dtype))


def returned(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    spikes = (x > 0).float()
    return F.linear(spikes, weight), spikes


def returned_view(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    spikes = (x > 0).float()
    return F.linear(spikes, weight), spikes.view(-1)


def returned_source(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    fired = x > 0
    return F.linear(fired.float(), weight), fired


def returned_bytes(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    fired = (x > 0).to(torch.int8)
    return F.linear(fired.float(), weight), fired


def returned_membrane(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    membrane = (x * 4).to(torch.float16)
    return F.linear((membrane > 0).float(), weight), membrane


def surrogate(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    spikes = Surrogate.apply(x)
    return F.linear(spikes, weight), spikes


def outcome(call: Callable[..., tuple[torch.Tensor, ...]], dtype: torch.dtype) -> torch.Tensor | str:
    """The weight's gradient after the second result was written to, or the kind of error."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(5, 6, generator=random).to(dtype).requires_grad_()
    weight = torch.randn(4, 6, generator=random).to(dtype).requires_grad_()
    y, seen = call(x, weight)
    with torch.no_grad():
        seen.fill_(1)
    try:
        y.square().sum().backward()
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
        return "refused"
    assert weight.grad is not None
    return weight.grad.double()


@pytest.mark.parametrize("model", [
    returned, returned_view, returned_source, returned_bytes, returned_membrane, surrogate,
])  # fmt: skip
@pytest.mark.parametrize("implementation", ["binary", "event"])
def test_a_write_to_what_the_graph_returns(model, implementation):
    expected = outcome(model, torch.float32)
    before = IMPLEMENTATION.set(implementation)
    try:
        found = outcome(compiled(model), torch.float32)
    finally:
        IMPLEMENTATION.reset(before)
    assert isinstance(found, str) == isinstance(expected, str), (found, expected)
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("trained", [True, False])
def test_a_write_to_a_factor(trained):
    """Eager needs it where spikes are trained, for their gradient, and nowhere else."""

    def model(x, weight, factor):
        return F.linear(Surrogate.apply(x) * factor, weight)

    outcomes = []
    for call in (model, compiled(model)):
        random = torch.Generator().manual_seed(0)
        x = torch.randn(5, 6, generator=random).requires_grad_(trained)
        weight, factor = torch.randn(4, 6, generator=random).requires_grad_(), torch.tensor(0.3)
        y = call(x, weight, factor)
        factor.fill_(7.0)
        try:
            y.square().sum().backward()
        except RuntimeError:
            outcomes.append(None)
        else:
            outcomes.append(weight.grad)
    assert (outcomes[0] is None) == (outcomes[1] is None) == trained
    if not trained:
        torch.testing.assert_close(outcomes[1], outcomes[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("layer", ["linear", "conv"])
def test_a_write_to_the_weight_behind_the_layer(layer, trained):
    """Eager's linear saves its weight only for the gradient of its input; its convolution always does."""

    def model(x, weight):
        spikes = Surrogate.apply(x)
        y = F.linear(spikes, weight) if layer == "linear" else F.conv2d(spikes, weight)
        with torch.no_grad():
            weight.mul_(0.9)
        return y

    outcomes = []
    for call in (model, compiled(model)):
        random = torch.Generator().manual_seed(0)
        x = torch.randn(3, 4, 6, 6, generator=random).requires_grad_(trained)
        weight = torch.randn((5, 6) if layer == "linear" else (5, 4, 3, 3), generator=random).requires_grad_()
        try:
            call(x, weight).square().sum().backward()
        except Exception as error:  # a compiler may find it before there is a backward pass
            assert "modified by an inplace operation" in str(error)
            outcomes.append(None)
        else:
            outcomes.append((weight.grad, weight.detach()))
    assert (outcomes[0] is None) == (outcomes[1] is None) == (trained or layer == "conv")
    if outcomes[0] is not None:
        torch.testing.assert_close(outcomes[1], outcomes[0], rtol=1e-4, atol=1e-4)
