"""A layer of fixed fan-in that is our operator already takes in what follows it, or is written out for Inductor.

`sparsecomp.nn.GeoSparseLinear` calls the operator whatever compiles it. Where the same estimate that judges a layer as
people write it says that Inductor's loop is faster, the operator becomes that form. Else an added residual and an
activation behind it become its arguments.
"""

import operator
from typing import Any

import torch
from torch import fx

from sparsecomp.passes.cost.local import FixedFanIn, decide
from sparsecomp.passes.engine.ordered import is_kept
from sparsecomp.passes.engine.rule import Context, Plan, Verdict, Why, call, known_sizes, refuse
from sparsecomp.passes.graph.canonicalize import example_of
from sparsecomp.passes.local.operator import GATHER_DOT, fixed_fan_in, lists_of, operator_of
from sparsecomp.passes.sparse.chain import Chain, copied_behind, differentiated, ending_at
from sparsecomp.reference.precision import accumulator


def consider_own(node: fx.Node, ctx: Context) -> Verdict:
    """Judge one node: every last node of an operator and what can be fused behind it is a site."""
    chain = ending_at(node, _layer, ctx)
    if chain is None:
        return None
    if ctx.options.implementation == "dense":
        return refuse(Why.FORCED_DENSE)
    first = chain.nodes[0]
    if not all(is_kept(one, ctx, first) for one in (*first.all_input_nodes, chain.bias, chain.residual)):
        return refuse(Why.GATHERED_AS_WRITTEN, detail="an operand is written to before the result is complete")
    problem = _problem(chain, ctx)
    if problem is None:
        return refuse(Why.UNKNOWN_SHAPE)
    decision = decide(problem)
    written = decision.dense and not ctx.eager  # op by op, the gathered inputs would exist
    build = (lambda: {node: _written(chain, node)}) if written else (lambda: {node: _fused(chain, problem, node, ctx)})
    fused = "" if written else chain.fused
    reason = f"{problem.fan_in} inputs for each of {problem.outputs} outputs{fused}; {decision.reason}"
    return Plan(build, reason, "dense" if written else "gather_dot", "", chain.dead, decision.estimate, first)


def _problem(chain: Chain, ctx: Context) -> FixedFanIn | None:
    """The layer's numbers; None if a shape is unknown."""
    arguments: Any = chain.nodes[0].args
    shape, fan = known_sizes(chain.dense), known_sizes(arguments[2])
    if shape is None or fan is None:
        return None
    *_, transposed, _, spread = arguments
    kept = bool(transposed) or not differentiated(chain, ctx)
    followed = len(transposed) > 2 and ctx.constant(arguments[2]) is None
    return fixed_fan_in(chain, (fan[0], fan[1]), spread, kept, ctx, followed)


def _fused(chain: Chain, layer: FixedFanIn, like: fx.Node, ctx: Context) -> fx.Node:
    arguments: Any = chain.nodes[0].args
    x, weight, index, *_, transposed, _, spread = arguments
    lists = lists_of(index, layer, transposed, like, ctx)
    return operator_of(chain, x, weight, index, chain.bias, lists, spread)


def _layer(node: fx.Node) -> Chain | None:
    if node.target is not GATHER_DOT:
        return None
    arguments: Any = node.args
    x, weight, _, bias, residual, _, activation, *_ = arguments
    if residual is not None or activation != "none":
        return None  # its caller has fused what there is
    return Chain((node,), weight, False, x, True, bias)


def _written(chain: Chain, like: fx.Node) -> fx.Node:
    """The layer as one writes it in torch, summed in as many bits, and behind it the rest as written."""
    arguments: Any = chain.nodes[0].args
    dtype, graph = example_of(chain.dense).dtype, like.graph
    wide = accumulator(dtype)

    def cast(value: fx.Node, to: torch.dtype) -> fx.Node:
        return value if wide is dtype else call(graph, like, torch.Tensor.to, value, to)

    x, weight, index, bias = arguments[:4]
    gathered = call(graph, like, operator.getitem, cast(x, wide), (Ellipsis, index))
    out = call(graph, like, torch.sum, call(graph, like, torch.mul, gathered, cast(weight, wide)), -1)
    if bias is not None:
        out = call(graph, like, torch.add, out, cast(bias, wide))
    return copied_behind(chain, cast(out, dtype), {})
