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
from sparsecomp.passes.engine.rule import OWNED, Context, Density, site_key
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
