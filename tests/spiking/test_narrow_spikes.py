"""Layers on spikes read bytes, where what they read is made of bytes that were widened; results are eager's bits."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rewriting import dyadic, rewritten
from torch import Tensor, fx, nn

import sparsecomp
from sparsecomp._compat import FakeTensorMode
from sparsecomp.passes.facts.analysis import analyse
from sparsecomp.passes.spiking.narrow_spikes import consider


def bytes_of(x: Tensor) -> Tensor:
    return (x > 0).to(torch.int8)


def flipped(x: Tensor, times: int) -> Tensor:
    for _ in range(times):
        x = x.flip(0)
    return x


def written(x: Tensor, whole: bool) -> Tensor:
    fired = bytes_of(x)
    spikes = fired.float()
    (fired if whole else spikes[0]).zero_()
    return spikes


INPUTS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "float": (lambda x: bytes_of(x).float(), True),
    "to": (lambda x: bytes_of(x).to(torch.float32), True),
    "of bools": (lambda x: (x > 0).float(), False),
    "of short": (lambda x: (x > 0).short().float(), False),
    "sum": (lambda x: bytes_of(x).float() + bytes_of(-x).float().flip(0), True),
    "sum with bools": (lambda x: bytes_of(x).float() + (x > 0.5).float(), False),
    "sum with truth of bytes": (lambda x: bytes_of(-x).float() + (bytes_of(x) + bytes_of(x)).bool(), False),
    "sum with a number": (lambda x: bytes_of(x).float() + 1, True),
    "sum with twice": (lambda x: torch.add(bytes_of(x).float(), bytes_of(-x).float(), alpha=2), False),
    "sum in place": (lambda x: bytes_of(x).float().add_(bytes_of(-x).float()), True),
    "difference": (lambda x: bytes_of(x).float() - bytes_of(-x).float(), True),
    "viewed in place": (lambda x: bytes_of(x).float().view(-1).unsqueeze_(0).view(3, 4), False),
    "many moves": (lambda x: flipped(bytes_of(x).float(), 63), True),
    "more moves": (lambda x: flipped(bytes_of(x).float(), 64), False),
    "written": (lambda x: written(x, False), False),
    "bytes written behind": (lambda x: written(x, True), False),
}


@pytest.mark.parametrize("name", INPUTS)
def test_which_bytes_are_read(name):
    make, narrowed = INPUTS[name]
    weight = torch.arange(20.0).view(5, 4) / 4
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))

    def model(x, weight):
        return F.linear(make(x), weight)

    with torch.no_grad():
        found, report = rewritten(model, x, weight, strict=True)
        assert torch.equal(found, model(x, weight))
    assert [site.rewritten for site in report.sites if site.rule == "narrow_spikes"] == [True] * narrowed


def test_what_eager_keeps_for_a_backward_is_not_read_as_bytes():
    """Whoever has the widened spikes may write to them, of which the gradient must tell."""
    weight = torch.ones(5, 4, requires_grad=True)

    def model(x, weight):
        spikes = bytes_of(x).float()
        return F.linear(spikes, weight), spikes

    (found, _), report = rewritten(model, torch.ones(3, 4), weight, strict=True)
    assert [(site.rule, site.rewritten) for site in report.sites] == [("spike_linear", True)]
    found.sum().backward()
    assert torch.equal(weight.grad, torch.full((5, 4), 3.0))


def test_modules_between_stay():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.flatten, self.layer = nn.Flatten(), dyadic(nn.Linear(12, 5))

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.flatten(bytes_of(x).float()))

    model, x = Net().eval(), torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    optimized = sparsecomp.optimize(model, x, implementation="binary")
    assert [(site.rule, site.rewritten) for site in optimized.report.sites] == [("spike_linear", True)]
    assert torch.equal(optimized(x), model(x))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_bytes_on_another_device_are_not_at_hand(device):
    graph = fx.Graph()
    fired, weight = graph.placeholder("fired"), graph.placeholder("weight")
    spikes = graph.call_method("to", (fired, device, torch.float32))
    arguments = (spikes, weight, None, 3, "binary", 1.0, None, False, 20.0, False)
    layer = graph.call_function(torch.ops.sparsecomp.spike_linear.default, arguments)
    graph.output(layer)
    with FakeTensorMode():
        examples = {fired: torch.zeros(3, 4, dtype=torch.int8), spikes: torch.zeros(3, 4, device=device),
                    weight: torch.zeros(5, 4, device=device)}  # fmt: skip
    for node, example in examples.items():
        node.meta["example_value"] = example
    context: Any = SimpleNamespace(analysis=analyse(fx.GraphModule(nn.Module(), graph)), gradients=False)
    assert (consider(layer, context) is not None) == (device == "cpu")
