"""A product with a SparseTensor and what follows it become one `sparsecomp::sparse_matmul`.

A product is written as linear, matmul, `@`, mm, addmm or a module, with the sparse operand on either side; behind it
may stand what `sparsecomp.passes.sparse.chain` fuses. On CUDA, where the estimate says that dense is faster, the weight
is made dense in the graph instead, for finite operands; under precision='exact' it is not.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

import sparsecomp.ops  # noqa: F401  (registers the operators)
from sparsecomp.passes.cost.sparse import Product, beside_the_layer
from sparsecomp.passes.engine.rule import Context, Plan, Refusal, Rule, Verdict, Why, call, known_sizes, refuse
from sparsecomp.passes.graph.canonicalize import CanonicalOp, example_of, op_of
from sparsecomp.passes.sparse.chain import (
    Chain,
    added,
    autocast_dtype,
    circumstances,
    copied_behind,
    decided,
    ending_at,
    is_sparse,
    problem_of_writes,
)
from sparsecomp.passes.spiking.operand import attribute, cast

_MATMUL = torch.ops.sparsecomp.sparse_matmul.default


def consider(node: fx.Node, ctx: Context) -> Verdict:
    """Judge one node: every last node of a sparse product and what can be fused behind it is a site."""
    chain = ending_at(node, _product, ctx)
    if chain is not None:
        return replace(_judged(chain, node, ctx), layer=chain.nodes[0])
    op = op_of(node)
    if op is None or op.name not in ("matmul", "addmm") or _product(node) is not None:
        return None
    if any(map(is_sparse, node.all_input_nodes)):
        return refuse(Why.SPARSE_AS_WRITTEN, detail=f"{op.name} in this form is not fused")
    return None


RULE = Rule("sparse_matmul", consider, after=("gather_dot", "static_stem"))


def _judged(chain: Chain, node: fx.Node, ctx: Context) -> Plan | Refusal:
    if ctx.options.implementation == "dense":
        return refuse(Why.FORCED_DENSE)
    problem = _problem(chain, ctx)
    return problem if isinstance(problem, Refusal) else _plan(chain, problem, node, ctx)


def _plan(chain: Chain, product: Product, node: fx.Node, ctx: Context) -> Plan:
    decision = decided(product, ctx)
    dead, estimate = chain.dead, beside_the_layer(product, decision)
    if decision.dense:
        reason = f"{product.described}: {decision.reason}"
        build = lambda: {node: _build_dense(chain, node)}  # noqa: E731
        return Plan(build, reason, "dense", "", dead, estimate)
    reason = f"{product.described} by {decision.implementation}{chain.fused}; {decision.reason}"
    build = lambda: {node: _build(chain, node)}  # noqa: E731
    return Plan(build, reason, product.layout.format, "", dead, estimate)


def _product(node: fx.Node) -> Chain | None:
    """The product that a node computes, if one operand is sparse and the form is one of those that can be fused."""
    if node.target is _MATMUL and not _is_default_call(node):
        return None
    if node.target is _MATMUL:
        arguments: Any = node.args
        sparse, dense, bias, residual, linear, _, activation, scale, _ = arguments
        chain = Chain((node,), sparse, False, dense, linear, bias, residual, activation, scale)
        return chain if is_sparse(sparse) else None
    op = op_of(node)
    if op is None:
        return None
    if op.name == "linear" and is_sparse(op.get("weight")):
        return Chain((node,), op.get("weight"), False, op.input, True, op.get("bias"))
    if op.name == "matmul":
        return _of_two(node, op.input, op.get("other"))
    if op.name == "addmm":
        return _of_addmm(node, op)
    return None


def _is_default_call(node: fx.Node) -> bool:
    """Whether a `sparse_matmul` has its bias by column and no dtype of its own, so that more can be added to it."""
    return len(node.args) == 9 and not node.kwargs and bool(node.args[5] == "column") and node.args[8] is None


def _of_two(node: fx.Node, left: Any, right: Any) -> Chain | None:
    if is_sparse(right):
        return Chain((node,), right, True, left, True)
    if is_sparse(left) and len(example_of(right).shape) > 1:
        return Chain((node,), left, False, right, False)
    return None


def _of_addmm(node: fx.Node, op: CanonicalOp) -> Chain | None:
    chain = _of_two(node, op.get("mat1"), op.get("mat2"))
    if chain is None or op.get("beta") != 1 or not isinstance(op.get("alpha"), int | float):
        return None
    return added(replace(chain, scale=float(op.get("alpha"))), op.input, node)


def _problem(chain: Chain, ctx: Context) -> Product | Refusal:
    """The product's numbers, or why it stays as written."""
    problem = problem_of_writes(chain, ctx)
    if problem is not None:
        return problem
    sparse, out = example_of(chain.sparse), example_of(chain.nodes[-1])
    shape, size = known_sizes(chain.dense), known_sizes(chain.sparse)
    if out is None or shape is None or size is None:
        return refuse(Why.UNKNOWN_SHAPE)
    fused = (chain.bias is not None, chain.residual is not None, chain.activation)
    operand = sparse.t() if chain.flip else sparse
    return Product.of_tensor(operand, shape, chain.linear, out, *fused, **circumstances(chain, ctx, out.device))


def _build(chain: Chain, node: fx.Node) -> fx.Node:
    sparse, bias = _operand(chain, "weight", chain.sparse), _operand(chain, "bias", chain.bias)
    dense, dtype = chain.dense, autocast_dtype(chain)
    if dtype is not None:
        sparse, dense = cast(sparse, dtype, node), cast(dense, dtype, node)
    if chain.flip:
        sparse = call(node.graph, node, torch.Tensor.t, sparse)
    return call(
        node.graph, node, _MATMUL, sparse, dense, bias, chain.residual, chain.linear, "column",
        chain.activation, chain.scale, None,
    )  # fmt: skip


def _build_dense(chain: Chain, node: fx.Node) -> fx.Node:
    """The chain as written, with the sparse operand made dense first."""
    sparse, dtype = _operand(chain, "weight", chain.sparse), autocast_dtype(chain)
    weight = call(node.graph, node, torch.ops.sparsecomp.sparse_to_dense.default, sparse)
    first, copies = chain.nodes[0], {chain.sparse: weight}
    if first.op == "call_module":
        made = call(node.graph, node, F.linear, chain.dense, weight, _operand(chain, "bias", chain.bias))
    else:
        if dtype is not None:
            copies = {old: cast(copies.get(old, old), dtype, node) for old in first.all_input_nodes}
        made = node.graph.node_copy(first, lambda old: copies.get(old, old))
    return copied_behind(chain, made, copies)


def _operand(chain: Chain, name: str, value: Any) -> Any:
    """A node for an operand that may be a called module's own parameter."""
    if value is None or isinstance(value, fx.Node):
        return value
    op = op_of(chain.nodes[0])
    assert op is not None
    return attribute(op, name)
