"""How one tensor is handed from forward to backward: in how many bytes, and that the backward gets it as it was.

Forward and backward are traced apart and packed, so that a case takes milliseconds.
"""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy

from sparsecomp.passes.spiking.saved_spikes import partitioned

FLOATS = torch.float32
CHANNELS_LAST = torch.channels_last
cast: Any = torch.ops.prims.convert_element_type.default


def spikes(x: Tensor, dtype: torch.dtype = FLOATS) -> Tensor:
    return cast(x > 0, dtype)


def counts(x: Tensor, most: int) -> Tensor:
    return torch.clamp(torch.round(torch.nan_to_num(spikes(x) * most)), 0, most)


def steps(x: Tensor, count: int) -> list[Tensor]:
    """So many tensors of a row or more each, made of different numbers."""
    return [spikes(x.roll(step, 1)) for step in range(count)]


def nothing() -> fx.GraphModule:
    """A graph that does nothing."""
    graph = fx.Graph()
    graph.output(())
    return fx.GraphModule({}, graph)


def packed(make: Callable[[Tensor], Tensor], x: Tensor, low: bool, returned: bool = False) -> tuple[Tensor, Tensor]:
    """What forward hands over of what `make` gives, and the same in the backward; held against the tensor itself."""
    forward = make_fx(lambda x: [y := make(x), y] if returned else [x + 1, make(x)], tracing_mode="fake")(x)
    saved = forward.graph.output_node().args[0][1]
    graph = fx.Graph()
    given = graph.placeholder(saved.name)
    given.meta = {"val": saved.meta["val"]}
    graph.output(graph.call_function(torch.ops.aten.alias.default, (given,)))
    backward = fx.GraphModule({}, graph)
    expected = make(x)
    partitioned(nothing(), lambda: (forward, backward), 1, low)
    _, handed = forward(x)
    found = backward(handed)
    assert found.dtype == expected.dtype and torch.equal(found, expected) and found.stride() == expected.stride()
    assert expected.unique().numel() > 1
    return handed, expected


X = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
MAPS = torch.randn(8, 4, 3, 2, generator=torch.Generator().manual_seed(1))

# bytes handed over by default and under low memory, for 48 numbers
CASES: dict[str, tuple[Callable[[Tensor], Tensor], Tensor, int, int]] = {
    "spikes": (spikes, X, 48, 6),
    "spikes of halves": (lambda x: spikes(x, torch.float16), X, 48, 6),
    "bools": (lambda x: x > 0, X, 48, 6),
    "up to 3": (lambda x: spikes(x) + spikes(x - 1) + spikes(x + 1), X, 48, 12),
    "up to 2": (lambda x: spikes(x) + spikes(x - 1), X, 48, 12),
    "up to 15": (lambda x: spikes(x) * 15, X, 48, 24),
    "up to 16": (lambda x: spikes(x) * 16, X, 48, 48),
    "up to 255": (lambda x: spikes(x) * 255, X, 48, 48),
    "up to 256": (lambda x: spikes(x) * 256, X, 192, 192),
    "negative": (lambda x: spikes(x) - spikes(-x), X, 192, 192),
    "scaled": (lambda x: spikes(x) * 0.25, X, 48, 6),
    "scaled counts": (lambda x: (spikes(x) + spikes(x - 1)) * 4, X, 48, 24),  # up to 8
    "quarters": (lambda x: (spikes(x) + spikes(x - 1)) * 0.25, X, 48, 12),
    "thirds": (lambda x: spikes(x) * 0.3, X, 192, 192),
    "anything": (lambda x: x * 2, X, 192, 192),
    "an input": (lambda x: x, X, 192, 192),
    "views": (lambda x: torch.ops.aten.view.default(spikes(x), [4, 12]), X, 48, 12),
    "rows of no number that divides": (lambda x: spikes(x[:7]), X, 42, 42),
    "six rows": (lambda x: spikes(x[:6]), X, 36, 18),
    "transposed": (lambda x: spikes(x).t(), X, 192, 192),
    "images": (spikes, MAPS, 192, 24),
    "channels last": (lambda x: spikes(x.contiguous(memory_format=CHANNELS_LAST)), MAPS, 192, 24),
    "channels last counts": (lambda x: spikes(x.contiguous(memory_format=CHANNELS_LAST)) * 3, MAPS, 192, 48),
    # ---- put together step by step: a byte has one element of each
    "two steps": (lambda x: torch.cat(steps(x, 2)), X, 48, 48),
    "eight steps": (lambda x: torch.cat(steps(x, 8)), X, 48, 48),
    "nine steps": (lambda x: torch.cat(steps(x, 9)), X, 432, 54),
    "one step": (lambda x: torch.cat(steps(x, 1)), X, 48, 6),
    "steps of counts": (lambda x: torch.cat([one * 3 for one in steps(x, 4)]), X, 48, 48),
    "five steps of counts": (lambda x: torch.cat([one * 3 for one in steps(x, 5)]), X, 240, 60),
    "steps along another dimension": (lambda x: torch.cat(steps(x, 2), 1), X, 96, 12),
    "steps of other sizes": (lambda x: torch.cat([spikes(x), spikes(x[:4])]), X, 72, 18),
    "steps of bools": (lambda x: torch.cat([x > 0, x > 1]), X, 48, 48),
    "steps seen as another shape": (
        lambda x: torch.ops.aten.view.default(torch.cat(steps(x, 4)), [4, 48]), X, 48, 48),
    "steps that a view cuts": (lambda x: torch.ops.aten.view.default(torch.cat(steps(x, 4)), [2, 96]), X, 192, 96),
    "steps of bools, seen as numbers": (lambda x: cast(torch.cat([x > 0, x > 1]), FLOATS), X, 48, 48),
    "steps that are multiplied": (lambda x: torch.cat(steps(x, 2)) * 2, X, 96, 24),
}  # fmt: skip


@pytest.mark.parametrize("low", [False, True], ids=["auto", "low"])
@pytest.mark.parametrize(("make", "x", "auto_bytes", "low_bytes"), CASES.values(), ids=CASES)
def test_bytes_handed_over(make, x, auto_bytes, low_bytes, low):
    handed, _ = packed(make, x, low)
    assert handed.nbytes == (low_bytes if low else auto_bytes)


def test_what_the_user_gets_is_handed_over_as_it_is():
    handed, expected = packed(spikes, X, True, returned=True)
    assert handed.dtype is torch.float32 and handed.shape == expected.shape


def test_a_byte_has_an_element_of_each_step_the_first_lowest():
    handed, _ = packed(lambda x: torch.cat(steps(x, 3)), X, False)
    by_hand = sum((X.roll(step, 1) > 0).int() << step for step in range(3))
    assert torch.equal(handed.int(), by_hand)


# ---- which layers a backward computes once more -------------------------------------------------------------------

aten: Any = torch.ops.aten
AGAIN, SAVED = CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.MUST_SAVE


class Joint:
    """A joint graph under construction: square inputs and weights, and a gradient."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.x, self.w, self.bias, self.gradient = (
            self.graph.placeholder(name) for name in ("primals_1", "primals_2", "primals_3", "tangents_1")
        )
        for node in self.graph.nodes:
            node.meta["val"] = torch.ones(4, 4, device="meta")
        self.fired = self.call(aten.gt.Scalar, self.x, 0)
        self.spikes = self.call(cast, self.fired, FLOATS)

    def call(self, target: Any, *args: Any) -> fx.Node:
        node = self.graph.call_function(target, args)
        node.meta["val"] = target(*fx.map_arg(args, lambda one: one.meta["val"]))
        return node

    def marks(self, *results: fx.Node) -> dict[str, Any]:
        """What the layers' pass marks, by name."""
        self.graph.output(results)
        partitioned(fx.GraphModule({}, self.graph), lambda: (nothing(), nothing()), 0, True)
        marked = [node for node in self.graph.nodes if "recompute" in node.meta]
        return {re.sub("_(default|scalar)", "", node.name): node.meta["recompute"] for node in marked}


LAYERS: dict[str, tuple[Callable[[Joint], fx.Node], dict[str, Any]]] = {
    "on spikes": (lambda j: j.call(aten.mm.default, j.spikes, j.w), {"gt": SAVED, "mm": AGAIN}),
    "on a view of spikes": (
        lambda j: j.call(aten.mm.default, j.call(aten.t.default, j.spikes), j.w), {"gt": SAVED, "mm": AGAIN}),
    "with a bias": (
        lambda j: j.call(aten.addmm.default, j.call(aten.tanh.default, j.bias), j.spikes, j.w),
        {"gt": SAVED, "addmm": AGAIN}),
    "on an input": (lambda j: j.call(aten.mm.default, j.x, j.w), {"mm": AGAIN}),
    "on anything else": (lambda j: j.call(aten.mm.default, j.call(aten.tanh.default, j.x), j.w), {}),
    "of another weight": (lambda j: j.call(aten.mm.default, j.spikes, j.call(aten.tanh.default, j.w)), {}),
    "of a layer": (
        lambda j: j.call(aten.mm.default, j.call(aten.mm.default, j.spikes, j.w), j.spikes),
        {"gt": SAVED, "mm": AGAIN, "mm_1": AGAIN}),
    "of a layer on anything else": (
        lambda j: j.call(aten.mm.default, j.call(aten.mm.default, j.call(aten.tanh.default, j.x), j.w), j.spikes), {}),
    "in the backward": (lambda j: j.call(aten.mm.default, j.gradient, j.w), {}),
    "of what the backward made": (
        lambda j: j.call(aten.mm.default, j.call(aten.neg.default, j.gradient), j.spikes), {}),
    "another operator": (lambda j: j.call(aten.mul.Tensor, j.spikes, j.w), {}),
}  # fmt: skip


@pytest.mark.parametrize(("make", "expected"), LAYERS.values(), ids=LAYERS)
def test_layers_on_what_is_kept_in_bits_are_computed_again(make, expected):
    joint = Joint()
    assert joint.marks(make(joint)) == expected


def test_a_weight_that_the_graph_writes_to_is_not_there_any_more():
    joint = Joint()
    layer = joint.call(aten.mm.default, joint.spikes, joint.w)
    written = joint.call(aten.copy_.default, joint.w, joint.bias)
    assert joint.marks(layer, written) == {}


def test_what_the_user_asked_for_stays():
    joint = Joint()
    layer = joint.call(aten.mm.default, joint.spikes, joint.w)
    layer.meta["recompute"] = CheckpointPolicy.PREFER_SAVE
    joint.fired.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
    other = joint.call(aten.mm.default, joint.w, joint.spikes)
    assert joint.marks(layer, other) == {
        "gt": CheckpointPolicy.PREFER_RECOMPUTE, "mm": CheckpointPolicy.PREFER_SAVE, "mm_1": AGAIN,
    }  # fmt: skip
