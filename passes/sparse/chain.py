"""A sparse product and what can be fused behind it: an added bias, an added residual and an activation.

Each is read by nobody else, and none of what it reads is written to before the result is complete.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from sparsecomp import _compat
from sparsecomp.passes.cost.decision import Decision
from sparsecomp.passes.cost.sparse import Product, decide
from sparsecomp.passes.engine.rule import Context, Refusal, Why, refuse, replays
from sparsecomp.passes.graph.canonicalize import example_of, op_of
from sparsecomp.tensor.sparse_tensor import SparseTensor

_SMOOTH = ("gelu", "gelu_tanh", "silu", "sigmoid", "tanh")


@dataclass(frozen=True, slots=True)
class Chain:
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
    def fused(self) -> str:
        """What is fused behind the product, for the report; empty if nothing is."""
        there = {"bias": self.bias is not None, "residual": self.residual is not None}
        there[self.activation] = self.activation != "none"
        names = [name for name, is_there in there.items() if is_there]
        return f", fused with {', '.join(names)}" if names else ""

    @property
    def dead(self) -> tuple[fx.Node, ...]:
        """What nobody reads once the last node is replaced, the last first."""
        return self.nodes[-2::-1]


def ending_at(node: fx.Node, product_of: Callable[[fx.Node], Chain | None], ctx: Context) -> Chain | None:
    """The sparse product whose last node this is, with all that can be fused behind it.

    Args:
        product_of: the product that a node is, without what is behind it; None if it is none.
    """
    chains = (extended(start, ctx) for start in _products_before(node, product_of))
    return next((chain for chain in chains if chain.nodes[-1] is node), None)


def _products_before(node: fx.Node, product_of: Callable[[fx.Node], Chain | None], depth: int = 3) -> Iterator[Chain]:
    """Sparse products that `node` is, or that lie up to `depth` operators before it."""
    product = product_of(node)
    if product is not None:
        yield product
    elif depth:
        for argument in node.all_input_nodes:
            if len(argument.users) == 1:
                yield from _products_before(argument, product_of, depth - 1)


def extended(chain: Chain, ctx: Context) -> Chain:
    """The product with all that can be fused behind it."""
    while len(chain.nodes[-1].users) == 1 and chain.activation == "none":
        user = next(iter(chain.nodes[-1].users))
        longer = None if ctx.mode_changes(chain.nodes[-1], user) else _with(chain, user, ctx)
        if longer is None:
            return chain
        chain = replace(longer, nodes=(*chain.nodes, user))
    return chain


def _with(chain: Chain, user: fx.Node, ctx: Context) -> Chain | None:
    """The chain with what a reader of its last node does; None if that cannot be fused."""
    op, last = op_of(user), chain.nodes[-1]
    if op is None or op.out is not None or (op.inplace and op.input is not last):
        return None
    if op.is_identity:
        return chain
    if op.name == "add" and op.get("alpha", 1) == 1:
        other = op.get("other") if op.input is last else op.input
        return None if other is last else added(chain, other, user)
    activation = op.name
    if op.name == "gelu" and op.get("approximate", "none") == "tanh":
        activation = "gelu_tanh"
    if activation not in ("relu", *_SMOOTH):
        return None
    if activation in _SMOOTH and differentiated(chain, ctx):
        return None  # its gradient needs the value before it, which only an unfused graph keeps
    return replace(chain, activation=activation)


def added(chain: Chain, other: Any, reader: fx.Node) -> Chain | None:
    """The chain with another tensor added, as bias by column or as residual, whichever it can be."""
    given, result, product = example_of(other), example_of(reader), example_of(chain.nodes[0])
    if not isinstance(other, fx.Node) or given is None or result is None:
        return None
    casts = reader is chain.nodes[0] and autocast_dtype(chain)  # a product under autocast casts what it adds
    if result.dtype is not product.dtype or not (given.dtype is result.dtype or casts):
        return None
    shape, wanted = _shape(given), _shape(result)
    if wanted != _shape(product):
        return None
    if len(shape) == 1 and shape == wanted[-1:] and chain.bias is None:
        return replace(chain, bias=other)
    if shape == wanted and len(shape) > 1 and chain.residual is None:
        return replace(chain, residual=other)
    return None


def problem_of_writes(chain: Chain, ctx: Context, *beside: fx.Node) -> Refusal | None:
    """Why the chain stays as written, if one of its operands, or `beside`, changes before the result is complete."""
    reads = (chain.sparse, *beside, chain.dense, chain.bias, chain.residual)
    if all(ctx.analysis.unchanged(read, chain.nodes[0], chain.nodes[-1]) for read in reads):
        return None
    return refuse(Why.SPARSE_AS_WRITTEN, detail="an operand is written to before the result is complete")


def copied_behind(chain: Chain, product: fx.Node, copies: Mapping[fx.Node, fx.Node]) -> fx.Node:
    """What follows the product, as written, behind another product; `copies` stand for nodes that it reads."""
    known = {**copies, chain.nodes[0]: product}
    for old in chain.nodes[1:]:
        known[old] = product.graph.node_copy(old, lambda argument: known.get(argument, argument))
    return known[chain.nodes[-1]]


def _shape(tensor: Any) -> list[Any]:
    return [_compat.size_expression(size) for size in tensor.shape]


def autocast_dtype(chain: Chain) -> torch.dtype | None:
    """What autocast casts the operands to: only it makes half results of other operands. None where it does not."""
    dtype = example_of(chain.nodes[0]).dtype
    operands = {example_of(chain.sparse).dtype, example_of(chain.dense).dtype}
    lower = dtype in (torch.float16, torch.bfloat16) and operands != {dtype}
    return dtype if lower and operands <= {torch.float32, torch.float16, torch.bfloat16} else None


def decided(product: Product, ctx: Context) -> Decision:
    """What runs: what is estimated to be faster, but what is sparse stays so under precision='exact'.

    A dense product multiplies the zeros too, so that NaN and infinity in the other operand reach results that nothing
    is stored for.
    """
    decision = decide(product)
    if not decision.dense:
        return decision
    if ctx.options.precision == "exact":
        reason = f"precision='exact' keeps it sparse, be its input NaN or infinite; {decision.reason}"
        return decision._replace(implementation=f"spmm_{product.layout.format}", reason=reason)
    return decision._replace(reason=f"{decision.reason}; for finite inputs")


def circumstances(chain: Chain, ctx: Context, device: torch.device) -> dict[str, Any]:
    """What an estimate of the product must know beside its numbers; see `passes.cost.sparse.Product`."""
    return {
        "target": ctx.target,
        "trained": differentiated(chain, ctx),
        "replayed": replays(ctx.options, ctx.device(device)),
        "products": ctx.products,
    }


def differentiated(chain: Chain, ctx: Context) -> bool:
    operands = (chain.sparse, chain.dense, chain.bias, chain.residual)
    examples = [example_of(operand) for operand in operands if operand is not None]
    return ctx.gradients and any(getattr(example, "requires_grad", False) for example in examples)


def is_sparse(value: Any) -> bool:
    return isinstance(example_of(value), SparseTensor)
