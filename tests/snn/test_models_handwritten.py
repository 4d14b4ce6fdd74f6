"""Hand-written networks in every state style, through the whole backend where that is quick."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rewriting import Surrogate
from snn_zoo import Run, Tapped, assert_exact, gradients_beside_eager, images, run_beside_eager, sixteenths
from torch import Tensor, nn

from sparsecomp import _compat

pytestmark = pytest.mark.quick_cases(1)


class Fire(nn.Module):
    """A threshold with a surrogate gradient, as a module so that a hook sees its spikes."""

    def forward(self, v: Tensor) -> Tensor:
        return Surrogate.apply(v - 1.0)  # pyright: ignore[reportReturnType]


class Attribute(nn.Module):
    """The potential is an attribute: None, then a tensor."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.fire = Fire()
        self.v: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        v = x if self.v is None else 0.5 * self.v + x
        spike = self.fire(v)
        self.v = v * (1 - spike)
        return spike

    def reset(self) -> None:
        self.v = None


class Buffer(nn.Module):
    """The potential is a buffer, updated in place."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.fire = Fire()
        self.register_buffer("v", torch.zeros(shape))

    def forward(self, x: Tensor) -> Tensor:
        self.v = self.v.detach() * 0.5 + x
        spike = self.fire(self.v)
        self.v = self.v * (1 - spike)
        return spike

    def reset(self) -> None:
        self.v = torch.zeros_like(self.v)


class OneStep(nn.Module):
    """conv → LIF → conv → LIF → linear, one step a call, the state in the neurons."""

    def __init__(self, neuron: Callable[[tuple[int, ...]], nn.Module]) -> None:
        super().__init__()
        self.conv1, self.lif1 = nn.Conv2d(2, 8, 3), neuron((2, 8, 6, 6))
        self.conv2, self.lif2 = nn.Conv2d(8, 16, 3), neuron((2, 16, 4, 4))
        self.head = nn.Linear(256, 5)

    def forward(self, x: Tensor) -> Tensor:
        spikes = self.lif2(self.conv2(self.lif1(self.conv1(x))))
        return self.head(spikes.flatten(1))


def _layers() -> tuple[nn.Conv2d, nn.Conv2d, nn.Linear, nn.Module]:
    return nn.Conv2d(2, 8, 3), nn.Conv2d(8, 16, 3), nn.Linear(256, 5), Fire()


class CallersTuple(nn.Module):
    """The same, the state in a tuple that the caller carries."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2, self.head, self.fire = _layers()

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        first = 0.5 * state[0] + self.conv1(x)
        spikes = self.fire(first)
        second = 0.5 * state[1] + self.conv2(spikes)
        fired = self.fire(second)
        return self.head(fired.flatten(1)), (first * (1 - spikes), second * (1 - fired))


class Written(nn.Module):
    """T steps a call; each step's spikes are written into a tensor with `out[t] = s`."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2, self.head, self.fire = _layers()

    def lif(self, current: Tensor) -> Tensor:
        out, v = torch.zeros_like(current), torch.zeros_like(current[0])
        for t in range(current.shape[0]):
            v = 0.5 * v + current[t]
            out[t] = self.fire(v)
            v = v * (1 - out[t])
        return out

    def forward(self, x: Tensor) -> Tensor:
        steps = x.shape[:2]
        spikes = self.lif(self.conv1(x.flatten(0, 1)).unflatten(0, steps))
        spikes = self.lif(self.conv2(spikes.flatten(0, 1)).unflatten(0, steps))
        return self.head(spikes.flatten(2))


STATEFUL = {"attribute": Attribute, "buffer": Buffer}


def _reset(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, Attribute | Buffer):
            module.reset()


def _frames(count: int, seed: int = 0) -> list[tuple[Any, ...]]:
    return [(images(2, 2, 8, 8, seed=seed + call),) for call in range(count)]


def _all_rewritten(run: Run) -> set[int]:
    return {run.rewritten(graph) for graph in range(len(run.reports))}


@pytest.mark.parametrize("how", ["graph", "aot"])
@pytest.mark.parametrize("style", STATEFUL)
def test_state_in_the_neuron(style, how):
    model = sixteenths(OneStep(STATEFUL[style])).eval()
    run = run_beside_eager(model, _frames(4), (Fire,), how=how, reset=_reset, rounds=2)
    assert_exact(run)
    assert _all_rewritten(run) == {2}


@pytest.mark.parametrize("how", ["graph", "aot"])
def test_state_in_the_callers_tuple(how):
    calls = [(x, (images(2, 8, 6, 6, seed=i), images(2, 16, 4, 4, seed=i))) for i, (x,) in enumerate(_frames(4))]
    run = run_beside_eager(sixteenths(CallersTuple()).eval(), calls, (Fire,), how=how)
    assert_exact(run)
    assert _all_rewritten(run) == {2}


@pytest.mark.parametrize("how", ["graph", "aot"])
def test_spikes_written_step_by_step(how):
    run = run_beside_eager(sixteenths(Written()).eval(), [(images(4, 2, 2, 8, 8),)], (Fire,), how=how)
    assert_exact(run)
    assert _all_rewritten(run) == {2}


@pytest.mark.parametrize("how", ["graph", "aot"])
def test_training_has_the_same_gradients(how):
    model = sixteenths(Written()).train()
    expected, found = gradients_beside_eager(model, (images(4, 2, 2, 8, 8),), (Fire,), how=how)
    assert (found.rewritten, found.flips(expected)) == (2, 0)
    found.assert_close(expected)


def _flips_from_float64(model: nn.Module, x: Tensor, backend: str, **options: Any) -> int:
    torch._dynamo.reset()
    exact = Tapped(copy.deepcopy(model).double(), (Fire,))
    compiled = torch.compile(Tapped(copy.deepcopy(model), (Fire,)), backend=backend, **options)
    with torch.no_grad():
        pairs = zip(exact(x.double())[1], compiled(x)[1], strict=True)
        return sum(int((a != b).sum()) for a, b in pairs)


@pytest.mark.slow(reason="compiles many graphs")
def test_random_weights_flip_no_more_spikes_than_inductor():
    """Against a float64 run, over 80,000 spikes a neuron and step; both through Inductor's generated code."""
    torch.manual_seed(0)
    model = Written().eval()
    with torch.no_grad():
        model.conv1.weight.mul_(3), model.conv2.weight.mul_(4)
    x = torch.randn(4, 256, 2, 8, 8)
    ours = _flips_from_float64(model, x, "sparsecomp", options={"implementation": "binary"})
    assert ours <= _flips_from_float64(model, x, "inductor")


def _compilations(backend: str, model: nn.Module, calls: list[Any], reset: Callable[[], None], rounds: int) -> tuple:
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    compiled = torch.compile(
        model, backend=backend, options={"implementation": "binary"} if backend != "eager" else None
    )
    with torch.no_grad():
        for _ in range(rounds):
            for call in calls:
                compiled(*call)
            reset()
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()), counters["frames"]["ok"]


@pytest.mark.parametrize("style", STATEFUL)
def test_no_recompilation_that_eager_does_not_have(style, monkeypatch):
    monkeypatch.setattr(_compat, "compile_fx", lambda gm, *_: gm.forward)
    counts = []
    for backend in ("eager", "sparsecomp"):
        model = sixteenths(OneStep(STATEFUL[style])).eval()
        counts.append(_compilations(backend, model, _frames(4), lambda m=model: _reset(m), rounds=6))
    assert counts[0] == counts[1] and counts[0][1] == 0


@pytest.mark.slow(reason="compiles many graphs")
def test_changing_batches_compile_as_often_as_eager(monkeypatch):
    monkeypatch.setattr(_compat, "compile_fx", lambda gm, *_: gm.forward)
    calls = [(images(4, batch, 2, 8, 8),) for batch in (2, 2, 1, 3)]
    counts = [
        _compilations(backend, sixteenths(Written()).eval(), calls, lambda: None, 1)
        for backend in ("eager", "sparsecomp")
    ]
    assert counts[0] == counts[1]


def test_changing_batches_are_exact():
    calls = [(images(4, batch, 2, 8, 8, seed=batch),) for batch in (2, 2, 1, 3)]
    run = run_beside_eager(sixteenths(Written()).eval(), calls, (Fire,))
    assert_exact(run)
    assert _all_rewritten(run) == {2}


@pytest.mark.slow(reason="compiles many graphs")
def test_two_forwards_with_one_backward():
    eager = sixteenths(OneStep(Attribute)).train()
    model = copy.deepcopy(eager)
    compiled = torch.compile(model, backend="sparsecomp", options={"implementation": "binary"})
    frames = _frames(2)
    for net in (eager, compiled):
        (net(*frames[0]) + net(*frames[1])).square().sum().backward()
    for (name, p), q in zip(eager.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-4 * float(p.grad.abs().max()), msg=name)


@pytest.mark.slow(reason="compiles training")
def test_forgetting_to_reset_raises_as_in_eager():
    """The second backward goes through the first step's graph, which is freed."""
    eager = sixteenths(OneStep(Attribute)).train()
    compiled = torch.compile(copy.deepcopy(eager), backend="sparsecomp", options={"implementation": "binary"})
    for net in (eager, compiled):
        net(*_frames(1)[0]).sum().backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            net(*_frames(1)[0]).sum().backward()


class Listed(torch.autograd.Function):
    """Keeps in its class what its caller is to pass, as sinabs' spike functions do."""

    states: list[str] = ["v"]

    @staticmethod
    def forward(ctx: Any, *states: Tensor) -> Tensor:
        ctx.count = len(states)
        return (sum(states) >= 1).float()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return grads * ctx.count


def test_a_list_in_the_class_of_a_function_is_read_in_one_graph_which_serves_while_it_stays(monkeypatch):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fire, self.last = Listed, nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            state = {"v": x, "i": 0.5 * x}
            return self.last(self.fire.apply(*[state[name] for name in self.fire.states]))

    model, x, graphs = Net(), images(3, 6).requires_grad_(), []

    def backend(gm: Any, inputs: Any) -> Any:
        graphs.append(gm)
        return gm

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend)
    for count, states in enumerate((["v"], ["v", "i"]), start=1):
        monkeypatch.setattr(Listed, "states", states)
        expected = model(x)
        found = compiled(x)
        assert torch.equal(found, expected) and len(graphs) == count
        (mine,), (theirs,) = torch.autograd.grad(found.sum(), x), torch.autograd.grad(expected.sum(), x)
        assert torch.equal(mine, theirs)
