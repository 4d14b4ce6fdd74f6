"""Which modules symbolic tracing captures, why not others, and that tracing leaves them as they were."""

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from sparsecomp.compiler.call import Call
from sparsecomp.compiler.trace import Assumptions, CaptureError, trace
from sparsecomp.options import Options

X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))


class Model(nn.Module):
    """Some layers, and a forward pass that `run` writes."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.norm, self.drop = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.calls, self.kept, self.scale = 0, None, 2.0
        self.run = run

    def forward(self, x: Any, y: Any = None) -> Any:
        return self.run(self, x) if y is None else self.run(self, x, y)


def within(context: Callable[[], Any]) -> Callable[[Model, Any], Any]:
    def run(m: Model, x: Any) -> Any:
        with context():
            return m.layer(x)

    return run


def counted(m: Model, x: Any) -> Any:
    m.calls += 1
    return m.layer(x)


def hooked(m: Model) -> Model:
    m.layer = nn.Sequential(nn.Linear(4, 4))
    m.layer.register_forward_hook(lambda module, args, result: result + 1)
    return m


TAKEN: dict[str, Callable[[], nn.Module]] = {
    "a layer": lambda: Model(lambda m, x: m.layer(x)),
    "dropout in evaluation": lambda: Model(lambda m, x: m.layer(m.drop(x))),
    "numbers": lambda: Model(lambda m, x: m.layer(x) * m.scale),
    "statistics": lambda: Model(lambda m, x: m.norm(x) + m.norm.running_mean),
    "several results": lambda: Model(lambda m, x: (m.layer(x), x + 1)),
    "gradients on, as they are": lambda: Model(within(torch.enable_grad)),
}
LEFT: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "gradients off": (lambda: Model(within(torch.no_grad)), "switches gradients or autocast"),
    "inference mode": (lambda: Model(within(torch.inference_mode)), "switches gradients or autocast"),
    "autocast": (lambda: Model(within(lambda: torch.autocast("cpu", torch.bfloat16))), "switches gradients or"),
    "a branch": (lambda: Model(lambda m, x: x if x.sum() > 0 else -x), "symbolic tracing failed"),
    "a count": (lambda: Model(counted), r"changes its state while it is traced \(calls\)"),
    "hooks": (lambda: hooked(Model(lambda m, x: m.layer(x))), "layer has hooks"),
    "another constant": (lambda: Model(lambda m, x: x + random.random()), "gives other results"),
    "a tensor of its own": (lambda: Model(lambda m, x: x + torch.ones(4)), r"\(_tensor_constant0\)"),
    "a result the more": (lambda: Model(lambda m, x: (x, x) if torch.is_tensor(x) else (x,)), "gives other results"),
    "a number for a tensor": (lambda: Model(lambda m, x: x if torch.is_tensor(x) else 1), "gives other results"),
    "another dtype": (lambda: Model(lambda m, x: x if torch.is_tensor(x) else x.half()), "gives other results"),
    "another shape": (lambda: Model(lambda m, x: x if torch.is_tensor(x) else x[:1]), "gives other results"),
}  # fmt: skip


def call_of(model: nn.Module, *args: Any) -> Call:
    return Call(model, args, {}, Options())


@pytest.mark.parametrize("make", TAKEN.values(), ids=TAKEN)
def test_what_is_captured_computes_the_same(make):
    model = make().eval()
    graph = trace(call_of(model, X))
    found, expected = graph.gm(X), model(X)
    torch.testing.assert_close(found, expected)
    examples = [node.meta["example_value"] for node in graph.gm.graph.nodes if node.op not in ("output",)]
    assert examples[0].shape == X.shape and graph.eager
    for node, value in graph.values.items():
        assert node.op == "get_attr" and torch.equal(value, model.get_buffer(str(node.target)))


@pytest.mark.parametrize(("make", "why"), LEFT.values(), ids=LEFT)
def test_what_is_not_captured_says_why_and_is_as_it_was(make, why):
    model = make().eval()
    with pytest.raises(CaptureError, match=why):
        trace(call_of(model, X))
    assert (model.calls, model.kept, model.training) == (0, None, False)


def test_inputs_are_as_many_as_the_example_has():
    model = Model(lambda m, x, y: m.layer(x) + y).eval()
    torch.testing.assert_close(trace(call_of(model, X, X)).gm(X, X), model(X, X))
    with pytest.raises(CaptureError, match="takes 2 positional arguments, the example has 3"):
        trace(call_of(model, X, X, X))
    with pytest.raises(CaptureError, match="positional arguments are traced"):
        trace(Call(model, (X,), {"y": X}, Options()))


CHANGES: dict[str, Callable[[Model], Any]] = {
    "training": lambda m: m.train(),
    "a layer in training": lambda m: m.drop.train(),
    "a number": lambda m: setattr(m, "scale", 3.0),
    "a hook": lambda m: m.block.register_forward_hook(lambda *_: None),
    "another layer": lambda m: setattr(m, "layer", nn.Linear(4, 4)),
    "another forward": lambda m: setattr(m, "forward", lambda x: x),
    "a parameter that was not there": lambda m: setattr(m, "absent", nn.Parameter(torch.zeros(4))),
    "another layer in a block": lambda m: m.block.__setitem__(0, nn.Linear(4, 4)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_graph_holds_until_what_tracing_read_changes(change):
    model = Model(lambda m, x: m.block(m.layer(x)) * m.scale).eval()
    model.block = nn.Sequential(nn.Linear(4, 4)).eval()
    model.register_parameter("absent", None)
    model.scale = math.nan  # which equals nothing, not even itself
    assumed = Assumptions(trace(call_of(model, X)).gm, model)
    model.layer.weight.data.mul_(2)
    model.layer.register_forward_hook(lambda *_: None)  # the graph calls it
    model.register_forward_hook(lambda *_: None)  # runs around the graph
    assert assumed.hold()
    change(model)
    assert not assumed.hold()
