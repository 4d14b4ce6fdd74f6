"""Spikes and states of neurons lie as eager's, whose views a program may take."""

from typing import Any

import pytest
import torch
from hand_written import currents, loop
from rewriting import rewritten, site
from torch import Tensor

pytestmark = pytest.mark.quick_cases(1)

RUN = loop(lambda x, v: v + (x - v) * 0.5, lambda h: (h >= 0.7).to(h), lambda h, s: h * (1 - s))
INPUTS = {
    "transposed": lambda: currents(4, 5, 7).transpose(1, 2), "steps inside": lambda: currents(5, 4, 7).transpose(0, 1),
    "channels last": lambda: currents(4, 7, 3, 5).permute(0, 3, 1, 2), "a part": lambda: currents(4, 5, 7)[:, :, 2:5],
    "images": lambda: currents(4, 2, 7, 3, 5).permute(0, 1, 4, 2, 3), "of one": lambda: currents(4, 5, 7)[:, :, 2:3],
    "of one step": lambda: currents(1, 5, 7).transpose(1, 2).expand(4, 7, 5),
}  # fmt: skip


def held(run: Any, x: Tensor, rule: str = "unrolled_neurons") -> None:
    """What a rule makes of it gives eager's numbers, lying as eager's."""
    found, report = rewritten(run, x, neurons="fuse", implementation="auto", strict=True)
    for one, other in zip(found, run(x), strict=True):
        assert torch.equal(one, other) and one.dtype is other.dtype
        strides = [[given.stride(dim) for dim, size in enumerate(given.shape) if size > 1] for given in (one, other)]
        assert strides[0] == strides[1]
    assert site(report, rule).rewritten


@pytest.mark.parametrize("graded", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", INPUTS)
def test_results_lie_as_eagers(name: str, dtype: torch.dtype, graded: bool) -> None:
    with torch.set_grad_enabled(graded):
        held(RUN, INPUTS[name]().to(dtype).requires_grad_(graded))


def test_a_view_of_spikes_that_eager_can_take() -> None:
    with torch.no_grad():
        held(lambda x: (RUN(x)[0].view(4, -1), RUN(x)[0][2].view(-1)), INPUTS["transposed"]())


@pytest.mark.parametrize("join", [torch.stack, torch.cat])
def test_steps_that_lie_otherwise_than_what_joins_them(join: Any) -> None:
    run = loop(lambda x, v: v * 0.5 + x, lambda h: (h >= 0.7).to(h), lambda h, s: h - s, join=join)
    with torch.no_grad():
        held(run, INPUTS["transposed"]())


@pytest.mark.parametrize("graded", [False, True])
@pytest.mark.parametrize("kind", ["LIFNode", "ParametricLIFNode"])
@pytest.mark.parametrize("name", ["transposed", "images"])
def test_results_of_the_library_s_neurons_lie_as_eagers(name: str, kind: str, graded: bool) -> None:
    pytest.importorskip("spikingjelly._ops.lif")
    neuron = pytest.importorskip("spikingjelly.activation_based.neuron")
    node = getattr(neuron, kind)(step_mode="m")

    def run(x: Tensor) -> Any:
        node.reset()
        return node(x), node.v

    with torch.set_grad_enabled(graded):
        held(run, INPUTS[name]().requires_grad_(graded), "train_neurons" if graded else "fuse_neurons")
