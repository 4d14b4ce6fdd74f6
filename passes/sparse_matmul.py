"""A product with a SparseTensor and what follows it become one `sparsecomp::sparse_matmul`.

A product is written as linear, matmul, `@`, mm, addmm or a module, with the sparse operand on either side; behind it
may stand an added bias, an added residual and an activation, each read by nobody else. On CUDA, where the estimate says
that dense is faster, the weight is made dense in the graph instead, or in inference once for all calls.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

import sparsecomp.ops  # noqa: F401  (registers the operators)
from sparsecomp import _compat
from sparsecomp.passes.canonicalize import CanonicalOp, example_of, op_of
from sparsecomp.passes.rule import Context, Plan, Refusal, Rule, Verdict, Why, call, refuse, sizes
from sparsecomp.passes.sparse_cost import Product, decide
from sparsecomp.passes.spike_operand import attribute, cast
from sparsecomp.sparse_tensor import SparseTensor

_SMOOTH = ("gelu", "gelu_tanh", "silu")
_MATMUL = torch.ops.sparsecomp.sparse_matmul.default
COPIES = "dense copy"
"""The implementation, for the report, that keeps a dense copy of the weight."""
_COPY_MATMUL = torch.ops.sparsecomp.dense_copy_matmul.default


@dataclass(frozen=True, slots=True)
class _Chain:
    """A product and what is fused behind it.

    Attributes:
        nodes: of the graph, in order; the product first.
        sparse: the sparse operand, a node or a module's parameter.
        flip: multiply by its transpose.
        dense: the other operand.
        linear: as of `sparsecomp.ops.sparse_matmul`; so are the rest.
    """

    nodes: tuple[fx.Node, ...]
    sparse: Any
    flip: bool
    dense: fx.Node
    linear: bool
    bias: Any = None
    residual: fx.Node | None = None
    activation: str = "none"
    scale: float = 1.0

    @property
    def fused(self) -> list[str]:
        """What is fused behind the product, by name."""
        named = {"bias": self.bias is not None, "residual": self.residual is not None}
        return [*(name for name, there in named.items() if there), *({self.activation} - {"none"})]


def consider(node: fx.Node, ctx: Context) -> Verdict:
    """Judge one node: every last node of a sparse product and what can be fused behind it is a site."""
    for start in _products_before(node):
        chain = _extended(start, ctx)
        if chain.nodes[-1] is not node:
            continue
        if ctx.options.implementation == "dense":
            return refuse(Why.FORCED_DENSE)
        problem = _problem(chain, ctx)
        return problem if isinstance(problem, Refusal) else _plan(chain, problem, node, ctx)
    op = op_of(node)
    if op is None or op.name not in ("matmul", "addmm", "linear") or _product(node) is not None:
        return None
    if any(map(_is_sparse, (*node.all_input_nodes, op.get("weight")))):
        return refuse(Why.SPARSE_AS_WRITTEN, detail=f"{op.name} in this form is not fused")
    return None


RULE = Rule("sparse_matmul", consider)


def _plan(chain: _Chain, product: Product, node: fx.Node, ctx: Context) -> Plan:
    decision = decide(product)
    fused = f", fused with {', '.join(chain.fused)}" if chain.fused else ""
    dead = tuple(reversed(chain.nodes[:-1]))
    if decision.dense and product.constant:
        reason = f"{product.described}: a dense copy is kept; {decision.reason}"
        return Plan(lambda: {node: _build_copy(chain, node)}, reason, COPIES, "", decision.gain, dead)
    if decision.dense:
        reason = f"{product.described}: {decision.reason}"
        return Plan(lambda: {node: _build_dense(chain, node)}, reason, "dense", "", decision.gain, dead)
    reason = f"{product.described} by {decision.kernel}{fused}; {decision.reason}"
    return Plan(lambda: {node: _build(chain, node)}, reason, product.format, "", decision.gain, dead)


def _products_before(node: fx.Node) -> Iterator[_Chain]:
    """Sparse products that `node` is, or that lie up to three operators before it."""
    front, seen = [node], 0
    while front and seen < 16:
        current = front.pop()
        seen += 1
        product = _product(current)
        if product is not None:
            yield product
        elif _fusible_name(current) is not None:
            front += [argument for argument in current.all_input_nodes if len(argument.users) == 1]


def _fusible_name(node: fx.Node) -> str | None:
    op = op_of(node)
    return op.name if op is not None and op.name in ("add", "relu", "gelu", "silu") else None


def _product(node: fx.Node) -> _Chain | None:
    """The product that a node computes, if one operand is sparse and the form is one of those that can be fused."""
    if node.target is _MATMUL and not _is_default_call(node):
        return None
    if node.target is _MATMUL:
        arguments: Any = node.args
        sparse, dense, bias, residual, linear, _, activation, scale, _ = arguments
        chain = _Chain((node,), sparse, False, dense, linear, bias, residual, activation, scale)
        return chain if _is_sparse(sparse) else None
    op = op_of(node)
    if op is None or op.out is not None or op.inplace or op.step_mode != "s":
        return None
    if op.name == "linear" and _is_sparse(op.get("weight")) and isinstance(op.input, fx.Node):
        return _Chain((node,), op.get("weight"), False, op.input, True, op.get("bias"))
    if op.name == "matmul" and op.known:
        return _of_two(node, op.input, op.get("other"))
    if op.name == "addmm":
        return _of_addmm(node, op)
    return None


def _is_default_call(node: fx.Node) -> bool:
    """Whether a `sparse_matmul` has its bias by column and no dtype of its own, so that more can be added to it."""
    return len(node.args) == 9 and not node.kwargs and node.args[5] == "column" and node.args[8] is None


def _of_two(node: fx.Node, left: Any, right: Any) -> _Chain | None:
    if not isinstance(left, fx.Node) or not isinstance(right, fx.Node) or _is_sparse(left) == _is_sparse(right):
        return None
    if _is_sparse(right):
        return _Chain((node,), right, True, left, True)
    return _Chain((node,), left, False, right, False) if len(example_of(right).shape) > 1 else None


def _of_addmm(node: fx.Node, op: CanonicalOp) -> _Chain | None:
    chain = _of_two(node, op.get("mat1"), op.get("mat2"))
    if chain is None or op.get("beta") != 1 or not isinstance(op.get("alpha"), int | float):
        return None
    return _added(replace(chain, scale=float(op.get("alpha"))), op.input, node)


def _extended(chain: _Chain, ctx: Context) -> _Chain:
    """The product with all that can be fused behind it."""
    while len(chain.nodes[-1].users) == 1 and chain.activation == "none":
        user = next(iter(chain.nodes[-1].users))
        longer = None if _autocast_changes(chain.nodes[-1], user) else _with(chain, user, ctx)
        if longer is None:
            return chain
        chain = replace(longer, nodes=(*chain.nodes, user))
    return chain


def _autocast_changes(first: fx.Node, last: fx.Node) -> bool:
    """Whether autocast is switched between two nodes: a product that moved across would have another dtype."""
    while first is not last:
        first = first.next
        if _compat.sets_autocast(first):
            return True
    return False


def _with(chain: _Chain, user: fx.Node, ctx: Context) -> _Chain | None:
    op, last = op_of(user), chain.nodes[-1]
    if op is None or op.out is not None or (op.inplace and op.input is not last):
        return None
    if op.name == "add" and op.get("alpha", 1) == 1:
        other = op.get("other") if op.input is last else op.input
        return None if other is last else _added(chain, other, user)
    activation = op.name
    if op.name == "gelu" and op.get("approximate", "none") == "tanh":
        activation = "gelu_tanh"
    if activation not in ("relu", *_SMOOTH):
        return None
    if activation in _SMOOTH and _differentiated(chain, ctx):
        return None  # its gradient needs the value before it, which only an unfused graph keeps
    return replace(chain, activation=activation)


def _added(chain: _Chain, other: Any, reader: fx.Node) -> _Chain | None:
    """The chain with another tensor added, as bias by column or as residual, whichever it can be."""
    given, result, product = example_of(other), example_of(reader), example_of(chain.nodes[0])
    if not isinstance(other, fx.Node) or given is None or result is None or _is_sparse(other):
        return None
    casts = reader is chain.nodes[0] and _autocast_dtype(chain)  # a product under autocast casts what it adds
    if result.dtype is not product.dtype or not (given.dtype is result.dtype or casts):
        return None
    shape, wanted = _shape(given), _shape(result)
    if len(shape) == 1 and shape == wanted[-1:] and chain.bias is None:
        return replace(chain, bias=other)
    if shape == wanted and len(shape) > 1 and chain.residual is None:
        return replace(chain, residual=other)
    return None


def _shape(tensor: Any) -> list[Any]:
    return [_compat.size_expression(size) for size in tensor.shape]


def _autocast_dtype(chain: _Chain) -> torch.dtype | None:
    """What autocast casts the operands to: only it makes half results of other operands. None where it does not."""
    dtype = example_of(chain.nodes[0]).dtype
    operands = {example_of(chain.sparse).dtype, example_of(chain.dense).dtype}
    lower = dtype in (torch.float16, torch.bfloat16) and operands != {dtype}
    return dtype if lower and operands <= {torch.float32, torch.float16, torch.bfloat16} else None


def _differentiated(chain: _Chain, ctx: Context) -> bool:
    operands = (chain.sparse, chain.dense, chain.bias, chain.residual)
    examples = [example_of(operand) for operand in operands if operand is not None]
    return ctx.gradients and any(getattr(example, "requires_grad", False) for example in examples)


def _is_sparse(value: Any) -> bool:
    return isinstance(example_of(value), SparseTensor)


def _problem(chain: _Chain, ctx: Context) -> Product | Refusal:
    """The product's numbers, or why it stays as written."""
    reads = (chain.sparse, chain.dense, chain.bias, chain.residual)
    if not all(ctx.analysis.unchanged(read, chain.nodes[0]) for read in reads):
        return refuse(Why.SPARSE_AS_WRITTEN, detail="an operand is written to before the result is complete")
    sparse, dense, out = example_of(chain.sparse), example_of(chain.dense), example_of(chain.nodes[-1])
    shape, size = sizes(chain.dense), sizes(chain.sparse)
    if dense is None or out is None or shape is None or size is None:
        return refuse(Why.UNKNOWN_SHAPE)
    if not (dense.dtype == sparse.dtype == out.dtype or _autocast_dtype(chain)):
        return refuse(Why.MIXED_DTYPES, input=dense.dtype, weight=sparse.dtype)
    if dense.device != sparse.device:
        return refuse(Why.MIXED_DTYPES, input=dense.device, weight=sparse.device)
    operand = sparse.t() if chain.flip else sparse
    product = Product.of(operand, shape, chain.linear, out, chain.bias is not None, chain.residual, chain.activation)
    return product._replace(constant=_constant(chain, ctx))


def _constant(chain: _Chain, ctx: Context) -> bool:
    """Whether the sparse operand is the graph's own from call to call, and is promised to stay."""
    given = not isinstance(chain.sparse, fx.Node) or chain.sparse.op in ("placeholder", "get_attr")
    product = _product(chain.nodes[0])  # what its own node has fused must be a linear layer's bias
    assert product is not None
    plain = (product.residual, product.activation, product.scale) == (None, "none", 1.0)
    plain = plain and (product.linear or product.bias is None)
    seen = ctx.promised(example_of(chain.sparse))
    return given and plain and seen and not _differentiated(chain, ctx) and _autocast_dtype(chain) is None


def _build(chain: _Chain, node: fx.Node) -> fx.Node:
    sparse, bias = _operand(chain, "weight", chain.sparse), _operand(chain, "bias", chain.bias)
    dense, dtype = chain.dense, _autocast_dtype(chain)
    if dtype is not None:
        sparse, dense = cast(sparse, dtype, node), cast(dense, dtype, node)
    if chain.flip:
        sparse = call(node.graph, node, torch.Tensor.t, sparse)
    return call(
        node.graph, node, _MATMUL, sparse, dense, bias, chain.residual, chain.linear, "column",
        chain.activation, chain.scale, None,
    )  # fmt: skip


def _build_copy(chain: _Chain, node: fx.Node) -> fx.Node:
    """The product by a copy of the sparse operand that is kept, and behind it the rest as written."""
    sparse, first, *rest = _operand(chain, "weight", chain.sparse), *chain.nodes
    if chain.flip:
        sparse = call(node.graph, node, torch.Tensor.t, sparse)
    product = _product(first)
    assert product is not None
    bias = _operand(chain, "bias", product.bias)
    made = call(node.graph, node, _COPY_MATMUL, sparse, chain.dense, bias, chain.linear)
    copies = {first: made}
    for old in rest:
        copies[old] = node.graph.node_copy(old, lambda argument: copies.get(argument, argument))
    return copies[chain.nodes[-1]]


def _build_dense(chain: _Chain, node: fx.Node) -> fx.Node:
    """The chain as written, with the sparse operand made dense first."""
    sparse, dtype = _operand(chain, "weight", chain.sparse), _autocast_dtype(chain)
    weight = call(node.graph, node, torch.ops.sparsecomp.sparse_to_dense.default, sparse)
    first, *rest = chain.nodes
    copies = {chain.sparse: weight}
    if first.op == "call_module":
        made = call(node.graph, node, F.linear, chain.dense, weight, _operand(chain, "bias", chain.bias))
    else:
        if dtype is not None:
            copies = {old: cast(copies.get(old, old), dtype, node) for old in first.all_input_nodes}
        made = node.graph.node_copy(first, lambda old: copies.get(old, old))
    copies[first] = made
    for old in rest:
        copies[old] = node.graph.node_copy(old, lambda argument: copies.get(argument, argument))
    return copies[chain.nodes[-1]]


def _operand(chain: _Chain, name: str, value: Any) -> Any:
    """A node for an operand that may be a called module's own parameter."""
    if value is None or isinstance(value, fx.Node):
        return value
    op = op_of(chain.nodes[0])
    assert op is not None
    return attribute(op, name)
