"""What is known to repeat, held against the values that flow, and against what one step of each call computes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rewriting import Examples
from torch import Tensor, fx

from sparsecomp.passes.facts.equal import equal_calls
from sparsecomp.passes.facts.repeats import Flow, Repeats, flow_from

T = 3
SIZES = (2, 5, 4, 6)
NOTHING = None
"""The last operator is not said to repeat anything."""


def numbers(*sizes: int) -> Tensor:
    """Integers that no two places are likely to share."""
    generator = torch.Generator().manual_seed(sum(sizes))
    return torch.randint(-999, 1000, sizes, generator=generator).double()


class Values(Examples):
    """Also keeps the values themselves."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.values: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        self.values[n] = result.clone() if isinstance(result, Tensor) else result
        return result


def run(function: Callable[[Tensor], Any], x: Tensor) -> tuple[fx.GraphModule, dict[fx.Node, Any]]:
    gm = fx.symbolic_trace(function)
    values = Values(gm)
    torch.manual_seed(0)
    values.run(x.clone())
    return gm, values.values


def over(x: Tensor) -> Tensor:
    """Time in front."""
    return x.unsqueeze(0).repeat(T, 1, 1, 1, 1)


def along(x: Tensor, dim: int) -> Tensor:
    return x.repeat(*[T if index == dim else 1 for index in range(4)])


def within(x: Tensor) -> Tensor:
    """Time behind the batch."""
    return x.unsqueeze(1).repeat(1, T, 1, 1, 1)


CASES: dict[str, tuple[Callable[[Tensor], Any], Any]] = {
    # ---- what repeats something
    "repeat": (lambda x: x.repeat(T, 1, 1, 1), (0, T)),
    "repeat, channels": (lambda x: x.repeat(1, T, 1, 1), (1, T)),
    "repeat, two dimensions": (lambda x: x.repeat(1, 2, T, 1), (1, 2)),
    "repeat, another dimension": (lambda x: x.repeat(2, 1, 1, 1, 1), (0, 2)),
    "repeat once": (lambda x: x.repeat(1, 1, 1, 1), NOTHING),
    "repeat nothing": (lambda x: x[:0].repeat(T, 1, 1, 1), NOTHING),
    "tile": (lambda x: x.tile(T, 1), (2, T)),
    "expand": (lambda x: x.expand(T, *SIZES), (0, T)),
    "expand as it is": (lambda x: x.expand(*SIZES), NOTHING),
    "expand to one": (lambda x: x.expand(1, *SIZES), NOTHING),
    "expand by two dimensions": (lambda x: x.expand(1, T, *SIZES), (1, T)),
    "expand behind the batch": (lambda x: x.unsqueeze(1).expand(-1, T, -1, -1, -1), (1, T)),
    "expand what happens to be one": (lambda x: x[:, :1].expand(-1, T, -1, -1), {True: (1, T), False: NOTHING}),
    "expand nothing": (lambda x: x[:0].expand(T, 0, 5, 4, 6), NOTHING),
    "repeat_interleave": (lambda x: x.repeat_interleave(T, 0), (0, T, True)),
    "repeat_interleave, last": (lambda x: x.repeat_interleave(T, -1), (3, T, True)),
    "repeat_interleave twice": (lambda x: x.repeat_interleave(2, 1), (1, 2, True)),
    "repeat_interleave, counts": (lambda x: x.repeat_interleave(torch.tensor([1, 2]), 0), NOTHING),
    "repeat_interleave once": (lambda x: x.repeat_interleave(1, 0), NOTHING),
    "repeat_interleave, flat": (lambda x: x.repeat_interleave(T), NOTHING),
    "stack": (lambda x: torch.stack([x] * T), (0, T)),
    "stack, last": (lambda x: torch.stack([x] * T, -1), (4, T)),
    "stack of two": (lambda x: torch.stack([x] * 2, 1), (1, 2)),
    "stack of one": (lambda x: torch.stack([x]), NOTHING),
    "cat": (lambda x: torch.cat([x] * T, 1), (1, T)),
    "cat, last": (lambda x: torch.cat([x] * T, -1), (3, T)),
    "cat of different": (lambda x: torch.cat([x, x + 1, x]), NOTHING),
    "cat of nothing": (lambda x: torch.cat([x[:0]] * T), NOTHING),
    # ---- one element after the other
    "a number": (lambda x: over(x) + 1, (0, T)),
    "a weight": (lambda x: over(x) * numbers(5, 1, 1), (0, T)),
    "the input": (lambda x: over(x) - x, (0, T)),
    "a weight of the same rank": (lambda x: over(x) * numbers(1, 2, 5, 4, 6), (0, T)),
    "each step its own": (lambda x: over(x) * numbers(T, 1, 1, 1, 1), NOTHING),
    "channels each their own": (lambda x: along(x, 1) * numbers(5 * T, 1, 1), NOTHING),
    "a channel's number": (lambda x: along(x, 1) * numbers(1, 1, 1), (1, T)),
    "an input that happens to be one": (
        lambda x: along(x, 1) * x.sum(1, keepdim=True), {True: (1, T), False: NOTHING}),
    "an input that was made one": (lambda x: along(x, 1) * x[:, 0].unsqueeze(1), (1, T)),
    "an input that was made one, counted from behind": (lambda x: along(x, 1) * x[:, 0].unsqueeze(-3), (1, T)),
    "an input that was made one elsewhere": (
        lambda x: along(x, 1) * x[:, :1, 0].unsqueeze(2), {True: (1, T), False: NOTHING}),
    "more dimensions": (lambda x: over(x) + numbers(7, 1, 2, 5, 4, 6), (1, T)),
    "more dimensions, each step its own": (lambda x: over(x) + numbers(7, T, 2, 5, 4, 6), NOTHING),
    "with itself": (lambda x: (r := over(x)) * (r + 1), (0, T)),
    "with itself along another dimension": (
        lambda x: (r := x.unsqueeze(0).repeat(2, 1, 1, 1, 1)) + r.transpose(0, 1), NOTHING),
    "where": (lambda x: torch.where(over(x) > 0, over(x) * 0, x), NOTHING),  # each `over` is a source of its own
    "where of one source": (lambda x: torch.where((r := over(x)) > 0, r, 0.5), (0, T)),
    "masked_fill": (lambda x: (r := over(x)).masked_fill(r > 0, 2.0), (0, T)),
    "relu": (lambda x: F.relu(over(x)), (0, T)),
    "cast": (lambda x: over(x).float(), (0, T)),
    "clone": (lambda x: over(x).clone(), (0, T)),
    "contiguous": (lambda x: over(x).contiguous(), (0, T)),
    "no dropout": (lambda x: F.dropout(over(x), 0.5, False), (0, T)),
    "dropout": (lambda x: F.dropout(over(x), 0.5, True), NOTHING),
    "in place": (lambda x: over(x).add_(1), NOTHING),
    "out": (lambda x: torch.add(over(x), 1, out=torch.empty(T, *SIZES, dtype=torch.double)), NOTHING),
    "tril": (lambda x: along(x, 2).tril(), NOTHING),
    "of two sources": (lambda x: over(x) + over(x), NOTHING),
    "an unknown operator": (lambda x: torch.fft.fft(over(x)), NOTHING),
    "cumsum": (lambda x: over(x).cumsum(0), NOTHING),
    "sum": (lambda x: over(x).sum(0), NOTHING),
    # ---- layers
    "linear": (lambda x: F.linear(over(x), numbers(7, 6), numbers(7)), (0, T)),
    "linear, rows": (lambda x: F.linear(along(x, 2), numbers(7, 6)), (2, T)),
    "linear, features": (lambda x: F.linear(along(x, 3), numbers(7, 6 * T)), NOTHING),
    "conv2d": (lambda x: F.conv2d(along(x, 0), numbers(7, 5, 3, 3)), (0, T)),
    "conv2d, channels": (lambda x: F.conv2d(along(x, 1), numbers(7, 5 * T, 3, 3)), NOTHING),
    "conv2d, height": (lambda x: F.conv2d(along(x, 2), numbers(7, 5, 3, 3)), NOTHING),
    "conv2d, its weight": (lambda x: F.conv2d(numbers(2, 5, 5, 7), along(x, 0)), NOTHING),
    "conv2d, both": (lambda x: F.conv2d(r := along(x, 0), r), NOTHING),
    "conv2d of one image": (lambda x: F.conv2d(x[0].repeat(T, 1, 1), numbers(7, 5 * T, 3, 3)), NOTHING),
    "conv1d": (lambda x: F.conv1d(x[0].repeat(T, 1, 1), numbers(7, 4, 3)), (0, T)),
    "conv_transpose2d": (lambda x: F.conv_transpose2d(along(x, 0), numbers(5, 7, 3, 3)), (0, T)),
    "conv_transpose2d, channels": (lambda x: F.conv_transpose2d(along(x, 1), numbers(5 * T, 7, 3, 3)), NOTHING),
    "conv3d, time is the depth": (
        lambda x: F.conv3d(over(x).permute(1, 2, 0, 3, 4), numbers(7, 5, 3, 3, 3)), NOTHING),
    "max_pool2d": (lambda x: F.max_pool2d(along(x, 0), 2), (0, T)),
    "max_pool2d, channels": (lambda x: F.max_pool2d(along(x, 1), 2), (1, T)),
    "max_pool2d, height": (lambda x: F.max_pool2d(along(x, 2), 2), NOTHING),
    "max_pool2d, indices": (
        lambda x: torch.ops.aten.max_pool2d_with_indices(along(x, 0), [2, 2])[0], NOTHING),
    "avg_pool2d": (lambda x: F.avg_pool2d(along(x, 1), 2), (1, T)),
    "avg_pool2d, width": (lambda x: F.avg_pool2d(along(x, 3), 2), NOTHING),
    "avg_pool3d": (lambda x: F.avg_pool3d(over(x), 2), (0, T)),
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(along(x, 1), 1), (1, T)),
    "adaptive_avg_pool2d, height": (lambda x: F.adaptive_avg_pool2d(along(x, 2), 1), NOTHING),
    "batch_norm": (lambda x: F.batch_norm(along(x, 0), numbers(5), numbers(5) ** 2), (0, T)),
    "batch_norm, channels": (
        lambda x: F.batch_norm(along(x, 1), numbers(5 * T), numbers(5 * T) ** 2), NOTHING),
    "batch_norm in training": (
        lambda x: F.batch_norm(along(x, 0), numbers(5), numbers(5) ** 2, training=True),
        {True: (0, T), False: NOTHING}),
    "group_norm": (lambda x: F.group_norm(along(x, 0), 5), (0, T)),
    "group_norm, channels": (lambda x: F.group_norm(along(x, 1), 5), NOTHING),
    "group_norm, height": (lambda x: F.group_norm(along(x, 2), 5), NOTHING),
    "layer_norm": (lambda x: F.layer_norm(along(x, 2), [6]), (2, T)),
    "layer_norm of two": (lambda x: F.layer_norm(along(x, 2), [4 * T, 6]), NOTHING),
    "layer_norm of two, channels": (lambda x: F.layer_norm(along(x, 1), [4, 6]), (1, T)),
    "rms_norm": (lambda x: F.rms_norm(along(x, 3), [6 * T]), NOTHING),
    "pad": (lambda x: F.pad(along(x, 2), (1, 2)), (2, T)),
    "pad there": (lambda x: F.pad(along(x, 3), (1, 2)), NOTHING),
    "pad two": (lambda x: F.pad(along(x, 2), (1, 2, 1, 1)), NOTHING),
    "pad two, channels": (lambda x: F.pad(along(x, 1), (1, 2, 1, 1)), (1, T)),
    "interpolate": (lambda x: F.interpolate(along(x, 0), scale_factor=2), (0, T)),
    "interpolate, channels": (lambda x: F.interpolate(along(x, 1), scale_factor=2), NOTHING),
    "unfold": (lambda x: F.unfold(along(x, 0), 2), (0, T)),
    "unfold, channels": (lambda x: F.unfold(along(x, 1), 2), NOTHING),
    # ---- products
    "matmul": (lambda x: over(x) @ numbers(6, 7), (0, T)),
    "matmul, rows": (lambda x: along(x, 2) @ numbers(6, 7), (2, T)),
    "matmul, rows of a matrix by batches": (lambda x: x[0, 0].repeat(T, 1) @ numbers(5, 6, 7), (1, T)),
    "matmul, inner": (lambda x: along(x, 3) @ numbers(6 * T, 7), NOTHING),
    "matmul, second operand": (lambda x: numbers(7, 4) @ over(x), (0, T)),
    "matmul, second operand, rows": (lambda x: numbers(1, 4 * T) @ along(x, 2), NOTHING),
    "matmul, second operand, columns": (lambda x: numbers(1, 4) @ along(x, 3), NOTHING),
    "matmul, each step its own": (lambda x: over(x) @ numbers(T, 1, 1, 6, 7), NOTHING),
    "matmul by itself": (lambda x: (r := over(x)) @ r.transpose(-1, -2), (0, T)),
    "matmul by itself, rows": (lambda x: (r := along(x, 2)) @ r.transpose(-1, -2), NOTHING),
    "matmul by a vector": (lambda x: over(x) @ numbers(6), NOTHING),
    "a vector's matmul": (lambda x: numbers(4) @ over(x), NOTHING),
    # ---- another shape
    "permute": (lambda x: over(x).permute(1, 2, 0, 3, 4), (2, T)),
    "permute, counted from behind": (lambda x: over(x).permute(-4, -3, -2, -1, 0), (4, T)),
    "transpose": (lambda x: over(x).transpose(0, 1), (1, T)),
    "transpose, counted from behind": (lambda x: over(x).transpose(-1, 0), (4, T)),
    "transpose of others": (lambda x: over(x).transpose(1, 2), (0, T)),
    "t": (lambda x: x[0, 0].repeat(T, 1).t(), (1, T)),
    "t back": (lambda x: x[0, 0].repeat(1, T).t(), (0, T)),
    "unsqueeze in front": (lambda x: along(x, 1).unsqueeze(0), (2, T)),
    "unsqueeze there": (lambda x: along(x, 1).unsqueeze(1), (2, T)),
    "unsqueeze behind": (lambda x: along(x, 1).unsqueeze(2), (1, T)),
    "unsqueeze last": (lambda x: along(x, 1).unsqueeze(-1), (1, T)),
    "flatten": (lambda x: over(x).flatten(0, 1), (0, T)),
    "flatten all": (lambda x: over(x).flatten(), (0, T)),
    "flatten behind": (lambda x: over(x).flatten(2), (0, T)),
    "flatten time behind the batch": (lambda x: within(x).flatten(0, 1), {True: (0, T, True), False: NOTHING}),
    "flatten time with channels": (lambda x: within(x).flatten(1, 2), {True: (1, T), False: NOTHING}),
    "view": (lambda x: along(x, 0).view(T, 2, 5, 4, 6), (0, T)),
    "view, inferred": (lambda x: along(x, 0).view(T, -1, 5, 4, 6), (0, T)),
    "view, time inferred": (lambda x: along(x, 0).view(-1, 2, 5, 4, 6), {True: (0, T), False: NOTHING}),
    "view, two dimensions": (lambda x: over(x).view(2 * T, -1), (0, T)),
    "view, the rest inferred": (lambda x: over(x).view(T, -1), (0, T)),
    "view, batch before time": (lambda x: along(x, 0).view(2, T, 5, 4, 6), NOTHING),
    "view of elements that repeat": (
        lambda x: x.repeat_interleave(T, 0).view(2, T, 5, 4, 6), {True: (1, T), False: NOTHING}),
    "view of elements that repeat, time first": (lambda x: x.repeat_interleave(T, 0).view(T, 2, 5, 4, 6), NOTHING),
    "flatten elements that repeat": (lambda x: x.repeat_interleave(T, 0).flatten(0, 1), NOTHING),
    "view that splits time": (lambda x: x.repeat(6, 1, 1, 1).view(3, 4, 5, 4, 6), NOTHING),
    "view that joins steps": (lambda x: x.repeat(6, 1, 1, 1).view(2, 6, 5, 4, 6), NOTHING),
    "view as other bits": (lambda x: over(x).view(torch.int64), NOTHING),
    "unflatten": (lambda x: along(x, 0).unflatten(0, (T, 2)), (0, T)),
    "unflatten, inferred": (lambda x: along(x, 0).unflatten(0, (T, -1)), (0, T)),
    "unflatten, time inferred": (lambda x: along(x, 0).unflatten(0, (-1, 2)), {True: (0, T), False: NOTHING}),
    "unflatten, counted from behind": (lambda x: along(x, 0).unflatten(-4, (T, 2)), (0, T)),
    "unflatten channels": (lambda x: along(x, 1).unflatten(1, (T, 5)), {True: (1, T), False: NOTHING}),
    "unflatten another": (lambda x: over(x).unflatten(-1, (2, 3)), (0, T)),
    "reshape of permuted": (
        lambda x: over(x).permute(1, 0, 2, 3, 4).reshape(2, -1), {True: (1, T), False: NOTHING}),
}  # fmt: skip


@pytest.mark.quick_cases(40)
@pytest.mark.parametrize("fixed", [True, False], ids=["fixed", "any size"])
@pytest.mark.parametrize(("function", "expected"), CASES.values(), ids=CASES)
def test_what_is_said_to_repeat_does(function, expected, fixed):
    gm, values = run(function, numbers(*SIZES))
    order = {node: place for place, node in enumerate(gm.graph.nodes)}
    (last,) = gm.graph.output_node().all_input_nodes
    found = NOTHING
    for source in gm.graph.nodes:
        flow = flow_from(source, order, fixed, lambda op, flow: True)
        if flow is not None:
            _holds(flow, values)
            found = flow.of(last) or found
    if isinstance(expected, dict):
        expected = expected[fixed]
    assert found == (expected and Repeats(*expected))


def _holds(flow: Flow, values: dict[fx.Node, Any]) -> None:
    """Every value is copies of one step, which the call for one step gives."""
    ones: dict[fx.Node, Tensor] = {}
    for node, step in flow.steps.items():
        dim, times, inner = step.repeats
        assert times > 1
        parts = values[node].unflatten(dim, (-1, times) if inner else (times, -1)).movedim(dim + inner, 0)
        assert all(torch.allclose(part, parts[0], rtol=1e-12, equal_nan=True) for part in parts)
        given = (node.args, node.kwargs) if step.target is None else (step.args, {})
        args, kwargs = fx.map_arg(given, lambda one: ones[one] if one in ones else values[one])
        if step.target is None and node.op == "call_method":
            ones[node] = getattr(args[0], str(node.target))(*args[1:], **kwargs)
        else:
            ones[node] = (step.target or node.target)(*args, **kwargs)
        torch.testing.assert_close(ones[node], parts[0], rtol=1e-12, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (lambda x: over(x).permute(1, 2, 0, 3, 4), []),
        (lambda x: F.conv2d(over(x).flatten(0, 1), numbers(7, 5, 3, 3)), []),
        (lambda x: F.conv3d(over(x).permute(1, 2, 0, 3, 4), numbers(7, 5, 3, 3, 3)), ["conv3d"]),
        (lambda x: F.linear(along(x, 3), numbers(7, 6 * T)).relu(), ["linear"]),
        (lambda x: F.conv2d(numbers(2, 5, 5, 7), along(x, 0)), []),
        (lambda x: along(x, 3).sum(), []),
    ],
)
def test_products_that_mix_steps_are_the_ends(function, names):
    gm, _ = run(function, numbers(*SIZES))
    order = {node: place for place, node in enumerate(gm.graph.nodes)}
    (flow,) = [flow for node in gm.graph.nodes if (flow := flow_from(node, order, True, lambda op, flow: True))]
    assert [op.name for op in flow.ends] == names


def test_what_is_not_admitted_is_looked_at_no_further():
    gm, _ = run(lambda x: F.linear(over(x).relu(), numbers(7, 6)).tanh(), numbers(*SIZES))
    order = {node: place for place, node in enumerate(gm.graph.nodes)}
    (source,) = gm.graph.find_nodes(op="call_method", target="repeat")
    flow = flow_from(source, order, True, lambda op, flow: op.name != "linear")
    assert flow is not None and [node.name for node in flow.steps] == ["repeat", "relu"]
    assert [op.name for op in flow.ends] == ["linear"]
    assert flow_from(source, order, True, lambda op, flow: op.name != "repeat") is None


# ---- equal calls ------------------------------------------------------------------------------------------------

W = numbers(7, 6)

EQUAL: dict[str, tuple[Callable[[Tensor], Any], dict[str, str] | dict[bool, dict[str, str]]]] = {
    # each call, and the earlier one that stands for it
    "a layer": (lambda x: F.linear(x, W) * F.linear(x, W), {"linear_1": "linear"}),
    "what follows": (lambda x: F.linear(x, W).relu() * F.linear(x, W).relu(), {"linear_1": "linear", "relu_1": "relu"}),
    "three": (lambda x: torch.stack([x.relu() for _ in range(3)]), {"relu_1": "relu", "relu_2": "relu"}),
    "keywords": (lambda x: x.sum(dim=0, keepdim=True) + x.sum(keepdim=True, dim=0), {}),
    "other numbers": (lambda x: (x + 1) * (x + 2), {}),
    "other operands": (lambda x: (x + x) * (x + (x + 1)), {}),
    "other operators": (lambda x: x.relu() * x.tanh(), {}),
    "random": (lambda x: F.dropout(x, 0.5, True) + F.dropout(x, 0.5, True), {}),
    "random behind a layer": (
        lambda x: F.dropout(x.relu(), 0.5, True) + F.dropout(x.relu(), 0.5, True), {"relu_1": "relu"}),
    "behind other numbers": (lambda x: (y := x + 1).relu() * y.relu() + (x + 2), {"relu_1": "relu"}),
    "behind equal calls": (lambda x: (y := x.relu()).tanh() * y.tanh() + x.relu().tanh(),
                           {"relu_1": "relu", "tanh_1": "tanh", "tanh_2": "tanh"}),
    "in place": (lambda x: x.add_(1) + x.add_(1), {}),
    "one call": (lambda x: x.relu() + x.tanh(), {}),
    "views": (lambda x: x.relu().view(-1) + x.relu().view(-1), {"relu_1": "relu", "view_1": "view"}),
    "different results of equal calls": (
        lambda x: (x.relu() + 1) * (x.relu() + 2) + (x.relu() + 1), {"relu_1": "relu", "relu_2": "relu", "add_2": "add"}
    ),
    "steps of a stack": (lambda x: (s := torch.stack([x, x]))[0].relu() + s[1].relu(),
                         {"getitem_1": "getitem", "relu_1": "relu"}),
    "steps of unbound": (lambda x: (s := torch.stack([x, x]).unbind(0))[0].relu() + s[1].relu(),
                         {"getitem_1": "getitem", "relu_1": "relu"}),
    "selected steps": (lambda x: (s := x.expand(3, *SIZES)).select(0, 0) + s.select(0, 2), {"select_1": "select"}),
    "steps of another dimension": (lambda x: (s := torch.stack([x, x], 1))[0] + s[1], {}),
    "selected of another dimension": (lambda x: (s := torch.stack([x, x])).select(1, 0) + s.select(1, 1), {}),
    "places of a step": (lambda x: (s := torch.cat([x, x]))[0] + s[1], {}),
    "places of elements that repeat": (lambda x: (s := x.repeat_interleave(2, 0))[0] + s[2], {}),
    "slices": (lambda x: (s := torch.stack([x, x, x]))[0:1] + s[1:2], {}),
    "steps of a repeated step": (lambda x: (s := x[:1].repeat(3, 1, 1, 1))[0] + s[1],
                                 {True: {"getitem_2": "getitem_1"}, False: {}}),
}  # fmt: skip


@pytest.mark.parametrize("fixed", [True, False], ids=["fixed", "any size"])
@pytest.mark.parametrize(("function", "expected"), EQUAL.values(), ids=EQUAL)
def test_equal_calls_give_the_same(function, expected, fixed):
    gm, values = run(function, numbers(*SIZES))
    order = {node: place for place, node in enumerate(gm.graph.nodes)}
    merged: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        found = equal_calls(node, order, fixed, lambda node, op: 0)
        assert merged.keys().isdisjoint(found)
        merged |= found
    for node, earlier in merged.items():
        assert order[earlier] < order[node]
        torch.testing.assert_close(values[node], values[earlier], rtol=0, atol=0)
    if True in expected:
        expected = expected[fixed]
    assert {node.name: earlier.name for node, earlier in merged.items()} == expected


def test_equal_calls_under_another_mode_stay():
    gm, _ = run(lambda x: torch.stack([x.relu() for _ in range(4)]), numbers(*SIZES))
    order = {node: place for place, node in enumerate(gm.graph.nodes)}
    first = next(iter(gm.graph.find_nodes(op="call_method", target="relu")))
    modes = {"relu": 1, "relu_1": 2, "relu_2": 1, "relu_3": None}
    merged = equal_calls(first, order, True, lambda node, op: modes.get(node.name))
    assert {node.name: earlier.name for node, earlier in merged.items()} == {"relu_2": "relu"}
