"""Sums, products and greatest of spikes that are bytes are made in bytes, and widened for whoever reads floats.

The sum that ends a block of SEW-ResNet is read by the next layer and by the next sum. In bytes it is a quarter of the
traffic, made once for all its readers, and an operator that writes spikes can write the sum in their place.
"""

import operator

import torch
from torch import fx

from sparsecomp.passes.engine.rule import Context, Plan, Rule, Verdict, call
from sparsecomp.passes.graph.canonicalize import CanonicalOp, example_of, op_of
from sparsecomp.passes.graph.operators import Trait
from sparsecomp.passes.spiking.widened import in_bytes, moved_from, on_bytes, widened_from

_IN_BYTES = {"add": operator.add, "sub": operator.sub, "rsub": torch.rsub, "mul": operator.mul}
_OURS = "sparsecomp::"
"""Operators that write to nothing, and whose results are their own."""
_POOLS = ("max_pool1d", "max_pool2d", "max_pool3d")
_MOST = 64
"""Sums that a sum may be made of, so that judging them all takes no longer than so many times the graph."""


def consider(node: fx.Node, ctx: Context) -> Verdict:
    """Judge one node: every sum, difference, product and max-pool of floats that are widened bytes is a site."""
    if ctx.gradients or not _is_joined(node, ctx):
        return None
    return Plan(lambda: {node: _build(node)}, "its operands are bytes, and it fits a byte", "bytes")


RULE = Rule(
    "byte_sums", consider, after=("fuse_neurons", "spike_conv", "spike_conv_transpose", "spike_linear", "spike_matmul")
)


def _is_joined(node: fx.Node, ctx: Context) -> bool:
    """Whether a node's float result is what bytes at hand make in bytes, with all sums that it is made of."""
    pending, seen = [node], {node}
    while pending:
        made = pending.pop()
        operands = [_base(x, made, ctx) for x in _operands(made, ctx)]
        if not operands or len(seen) > _MOST:
            return False
        for base in operands:
            if base is None:
                return False
            if widened_from(base) is None and base not in seen:
                seen.add(base)
                pending.append(base)
    return True


def _operands(node: fx.Node, ctx: Context) -> list[fx.Node]:
    """The tensors that make a sum which fits a byte, where they are bytes as well; empty if it is no such sum."""
    op, made = op_of(node), example_of(node)
    if op is None or op.name not in (*_IN_BYTES, *_POOLS) or op.get("alpha", 1) != 1:
        return []
    if op.out is not None or op.module is not None or not op.known or made is None or not made.dtype.is_floating_point:
        return []
    fact, operands = ctx.fact(node, node.next), (op.input, op.get("other"))
    if fact is None or not fact.fits_int8 or fact.scale != 1.0:
        return []
    if op.name in _POOLS:
        return [op.input]
    if op.name == "mul" and not all(_is_positive(one, node, ctx) for one in operands):
        return []  # 0 times a number below 0 is another zero
    if op.inplace and (moved_from(op.input, ctx) is not None or not _is_last_read(op, ctx)):
        return []
    tensors = [one for one in operands if isinstance(one, fx.Node)]
    return tensors if all(map(_is_byte, (one for one in operands if one not in tensors))) else []


def _is_byte(number: object) -> bool:
    """Whether a number is whole and fits a byte; 0 is left out, whose sign a float tells."""
    return isinstance(number, int | float) and number % 1 == 0 and 0 < abs(number) < 128


def _base(x: fx.Node, reader: fx.Node, ctx: Context) -> fx.Node | None:
    """The node whose elements an operand holds, as it was made and, if it was widened, as its bytes are; else None."""
    unchanged, before = ctx.analysis.unchanged, reader.prev  # what the reader itself writes to, it has read
    while unchanged(x, x, before):
        source = widened_from(x)
        if source is not None:
            lies_alike = example_of(source).stride() == example_of(x).stride()  # by which the sum lies
            return x if lies_alike and unchanged(source, x, before) else None
        moved = moved_from(x, ctx)
        if moved is None:
            return x
        x = moved
    return None


def _is_positive(operand: object, reader: fx.Node, ctx: Context) -> bool:
    if isinstance(operand, fx.Node):
        fact = ctx.fact(operand, reader)
        return fact is not None and fact.non_negative
    return isinstance(operand, int | float) and operand >= 0


def _is_last_read(op: CanonicalOp, ctx: Context) -> bool:
    """Whether nobody else sees what an operator in place writes: it is the last to read its first argument."""
    order, place = ctx.analysis.order, ctx.analysis.order[op.node]
    views, seen = [op.input], set()
    while views:
        for user in views.pop().users:
            if user is op.node or user in seen:
                continue
            if order[user] > place:
                return False
            seen.add(user)
            read = op_of(user)
            own = read is not None and (read.name.startswith(_OURS) or (read.known and not read.inplace))
            if read is None or not own or read.has(Trait.ALIAS):
                views.append(user)
    return True


def _build(node: fx.Node) -> fx.Node:
    """The same in bytes, of operands that are widened bytes or numbers, now that each sum before has become such."""
    op = op_of(node)
    assert op is not None
    if op.name in _POOLS:  # of bytes torch has none, and Inductor's writes what it is cast to
        made = call(node.graph, node, torch.Tensor.to, on_bytes(node, {}, node), torch.int8)
    else:
        operands = op.input, op.get("other")
        narrow = (in_bytes(one, node) if isinstance(one, fx.Node) else int(one) for one in operands)
        made = call(node.graph, node, _IN_BYTES[op.name], *narrow)
    return call(node.graph, node, torch.Tensor.to, made, example_of(node).dtype)
