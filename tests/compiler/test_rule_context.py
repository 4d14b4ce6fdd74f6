"""What a rule is told: which tensors are promised to stay, how a density is known, what a chain of nodes leaves."""

from typing import Any

import pytest
import torch
from rewriting import rewritten
from torch import fx, nn

import sparsecomp.ops.masked.folded_layer  # noqa: F401  (registers the operators)
from sparsecomp import _compat
from sparsecomp._compat import FakeTensorMode
from sparsecomp.ops import frozen_weights
from sparsecomp.options import Options
from sparsecomp.passes.engine.rule import OWNED, Context, Density, call, known_sizes, module_path, site_key
from sparsecomp.passes.facts.analysis import analyse
from sparsecomp.passes.sparse.chain import Chain
from sparsecomp.report import Report


def context(options: Options, *, static: bool = False, **densities: Density) -> tuple[Context, dict[str, fx.Node]]:
    """A graph that reads a parameter, a buffer, a fake parameter and one that nobody gave."""
    graph = fx.Graph()
    nodes = {name: graph.placeholder(name) for name in ("parameter", "buffer", "fake", "unknown")}
    layer = graph.call_function(torch.nn.functional.linear, (nodes["buffer"], nodes["parameter"]))
    graph.output((*nodes.values(), layer))
    if static:
        nodes["buffer"].meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}
    gm = fx.GraphModule(nn.Module(), graph)
    values = {
        nodes["parameter"]: nn.Parameter(torch.ones(2, 2)), nodes["buffer"]: torch.ones(3, 2),
        nodes["fake"]: FakeTensorMode().from_tensor(torch.ones(2)),
    }  # fmt: skip
    known = {site_key(layer): density for density in densities.values()}
    return Context(gm, options, Report(), analyse(gm), values, known, False), {**nodes, "layer": layer}


@pytest.mark.parametrize("frozen", [False, "buffers", True])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("owned", [False, True])
def test_only_what_is_promised_and_known_is_constant(frozen: Any, static: bool, owned: bool) -> None:
    ctx, nodes = context(Options(frozen=frozen), static=static)
    for name in ("parameter", "buffer", "fake"):
        nodes[name].meta[OWNED] = owned
    found = {name for name in nodes if ctx.constant(nodes[name]) is not None}
    # a tensor that is no module's may be another one in the next call
    promised = {"parameter": owned and frozen is True, "buffer": owned and static and frozen is not False}
    assert found == {name for name, holds in promised.items() if holds}
    if frozen is True and owned:
        constant = ctx.constant(nodes["parameter"])
        assert constant is not None and not constant.requires_grad
        assert constant.data_ptr() == ctx.values[nodes["parameter"]].data_ptr()
    assert ctx.constant(3) is None and ctx.constant(None) is None


@pytest.mark.parametrize(
    ("frozen", "inside", "parameter", "buffer"),
    [(False, False, None, None), (False, True, "asked", "asked"), ("buffers", False, None, "always"),
     ("buffers", True, "asked", "always"), (True, False, "always", "always"), (True, True, "always", "always")],
)  # fmt: skip
def test_when_results_may_be_kept(frozen: Any, inside: bool, parameter: str | None, buffer: str | None) -> None:
    ctx, nodes = context(Options(frozen=frozen))
    one, other = ctx.values[nodes["parameter"]], ctx.values[nodes["buffer"]]

    def kept() -> list[Any]:
        return [ctx.keep(one), ctx.keep(other), ctx.keep(one, other)]

    if inside:
        with frozen_weights():
            found = kept()
    else:
        found = kept()
    assert found == [parameter, buffer, parameter]


def test_a_density_is_measured_else_assumed_else_unknown() -> None:
    measured, assumed = Density(0.25, 0.5), Options(density=0.125)
    for options in (Options(), assumed):
        ctx, nodes = context(options, layer=measured)
        assert ctx.density(nodes["layer"]) == (measured, "measured")
    ctx, nodes = context(assumed)
    assert ctx.density(nodes["layer"]) == (Density(0.125), "assumed")
    ctx, nodes = context(Options())
    assert ctx.density(nodes["layer"]) == (Density(), "unknown")


def test_a_fact_is_asked_for_where_it_is_read() -> None:
    ctx, nodes = context(Options())
    assert ctx.fact(nodes["buffer"], nodes["layer"]) is None and ctx.fact(1.0, nodes["layer"]) is None


@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_a_chain_leaves_all_but_its_last_node_the_last_first(length: int) -> None:
    graph = fx.Graph()
    nodes = tuple(graph.placeholder(f"n{index}") for index in range(length))
    chain = Chain(nodes, nodes[0], False, nodes[0], True)
    assert chain.dead == tuple(reversed(nodes[:-1]))
    assert chain.fused == ""


@pytest.mark.parametrize(
    ("changes", "text"),
    [({"bias": 1}, ", fused with bias"), ({"residual": 1}, ", fused with residual"),
     ({"activation": "relu"}, ", fused with relu"),
     ({"bias": 1, "residual": 1, "activation": "gelu"}, ", fused with bias, residual, gelu")],
)  # fmt: skip
def test_what_is_fused_is_named(changes: dict[str, Any], text: str) -> None:
    node = fx.Graph().placeholder("x")
    given = {name: node if value == 1 else value for name, value in changes.items()}
    assert Chain((node,), node, False, node, True, **given).fused == text


def test_products_are_counted_whoever_put_them_in_the_graph() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    for target in (torch.mm, torch.matmul, torch.nn.functional.conv_transpose2d, torch.add, torch.relu):
        graph.call_function(target, (x, x) if target is not torch.relu else (x,))
    graph.call_function(torch.ops.sparsecomp.folded_linear.default, (x, [x], None, ""))
    graph.call_method("bmm", (x, x))
    graph.output(x)
    gm = fx.GraphModule(nn.Module(), graph)
    assert Context(gm, Options(), Report(), analyse(gm)).products == 5


@pytest.mark.parametrize("frozen", [False, True])
def test_the_module_of_an_input_is_looked_for_only_under_the_promise(frozen: bool, monkeypatch: Any) -> None:
    looked = []
    monkeypatch.setattr(_compat, "has_module", lambda node: looked.append(node.name) is None)
    rewritten(nn.Linear(4, 4), torch.ones(2, 4), frozen=frozen)
    assert len(looked) == (3 if frozen else 0)


def _context(graph: fx.Graph, **how: Any) -> Context:
    gm = fx.GraphModule(nn.Module(), graph)
    return Context(gm, Options(), Report(), analyse(gm), **how)


@pytest.mark.parametrize(
    ("enabled", "switch", "eager", "expected"),
    [(False, None, False, False), (True, None, False, True), (False, None, True, True), (False, True, False, True),
     (False, False, False, False), (True, False, False, True)],
)  # fmt: skip
def test_gradients_are_on_where_the_capture_or_the_graph_has_them(enabled, switch, eager, expected) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    if switch is not None:
        graph.call_function(torch._C._set_grad_enabled, (switch,))
    graph.output(x)
    with torch.set_grad_enabled(enabled):
        found = _context(graph, eager=eager)
    assert found.gradients == expected
    assert found.switches == (() if switch is None else (1,))


def test_what_is_written_is_every_input_of_that_memory() -> None:
    graph, memory = fx.Graph(), torch.zeros(4)
    nodes = {name: graph.placeholder(name) for name in ("written", "same", "other", "unknown")}
    nodes["written"].meta["example_value"], nodes["same"].meta["example_value"] = memory[:2], memory[2:]
    nodes["other"].meta["example_value"] = torch.zeros(2)
    kept, changed = graph.get_attr("kept"), graph.get_attr("changed")
    kept.meta["example_value"], changed.meta["example_value"] = torch.zeros(2), torch.zeros(2)
    for node in (nodes["written"], changed):
        graph.call_method("add_", (node, 1))
    graph.output((*nodes.values(), kept, changed))
    root = nn.Module()
    root.kept, root.changed = nn.Buffer(torch.zeros(2)), nn.Buffer(torch.zeros(2))
    gm = fx.GraphModule(root, graph)
    found = {node.name for node in Context(gm, Options(), Report(), analyse(gm)).written}
    assert found == {"written", "same", "kept", "changed"}  # attributes may be one tensor


@pytest.mark.parametrize("told", ["example_value", "values"])
def test_a_parameter_stays_where_the_graph_writes_to_other_memory(told: str) -> None:
    graph, memory = fx.Graph(), torch.zeros(4)
    weight, cache = graph.placeholder("weight"), graph.placeholder("cache")
    view = graph.call_method("view", (cache, -1))
    graph.call_method("add_", (view, 1))
    graph.output((weight, cache))
    weight.meta[OWNED] = True
    for shares, held in ((False, torch.zeros(4)), (True, memory[1:3])):
        values = {weight: nn.Parameter(memory)}
        if told == "values":
            values[cache] = held
        else:
            weight.meta[told], cache.meta[told] = memory, held
        gm = fx.GraphModule(nn.Module(), graph)
        ctx = Context(gm, Options(frozen=True), Report(), analyse(gm), values)
        assert (ctx.constant(weight) is None) == shares


@pytest.mark.parametrize(
    ("stack", "path"),
    [
        (None, ""), ({}, ""), ({"a": ("L['self'].layers.0", nn.Linear)}, "layers.0"),
        ({"a": ("L['fn']", nn.Linear)}, ""),
        ({"a": ("L['self']", nn.Module), "b": ("L['self'].net.__self__", nn.Linear)}, "net.__self__"),
        ({"a": ("L['model'].__self__.head", nn.Linear)}, "head"), ({"a": ("head", nn.Linear)}, "head"),
    ],
)  # fmt: skip
def test_a_module_is_named_without_dynamos_spelling(stack, path) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    node, called = graph.call_function(torch.relu, (x,)), graph.call_module("net.layer", (x,))
    if stack is not None:
        node.meta["nn_module_stack"] = stack
    assert module_path(node) == path and site_key(node) == f"{path}:relu"
    assert module_path(called) == "net.layer"


def test_a_call_has_the_place_of_another_and_its_own_values() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    like = graph.call_function(torch.relu, (x,))
    like.meta = {"stack_trace": "here", "example_value": torch.ones(2), "val": 1, "tensor_meta": 2}
    for target, op in ((torch.Tensor.to, "call_method"), (torch.neg, "call_function")):
        made = call(graph, like, target, x, torch.float16)
        assert (made.op, made.args, made.meta) == (op, (x, torch.float16), {"stack_trace": "here"})
    assert known_sizes(like) == [2] and known_sizes(x) is None and known_sizes(3) is None
