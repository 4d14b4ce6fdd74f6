"""Spikes travel between layers as bytes where only spike operators and additions read them.

`sparsecomp::lif` makes bytes, and the graph widens them to float32 for whoever reads them. A spike convolution narrows
its input again; where what it reads are widened bytes, or sums and views of such, it can read the bytes. The sums of a
residual network (SEW-ResNet) are then a quarter of the traffic too. Runs last, when every site is rewritten.
"""

from typing import Any

from torch import fx

from sparsecomp.ops.library import ON_SPIKES
from sparsecomp.passes.engine.rule import Context, Plan, Rule, Verdict, call
from sparsecomp.passes.graph.canonicalize import op_of
from sparsecomp.passes.spiking.widened import moved_from, on_bytes, widened_from

_DEPTH = 64
"""Sums are followed this far back: the longest chain of residual additions before a neuron resets it."""


def consider(node: fx.Node, ctx: Context) -> Verdict:
    """Judge one node: every spike operator whose input was widened from bytes is a site."""
    if node.target not in ON_SPIKES:
        return None
    x: Any = node.args[0]
    keep_input = node.args[-1]  # bytes are other memory than what eager keeps
    if keep_input or not _narrow(x, ctx, _DEPTH):
        return None
    return Plan(lambda: {node: _build(node, x)}, "reads the bytes its input was widened from", "bytes")


_MAKE_READERS = ("spike_conv", "spike_conv_transpose", "spike_linear")

RULE = Rule("narrow_spikes", consider, after=("fuse_neurons", *_MAKE_READERS, "fold_batch_norm", "byte_sums"))


def _narrow(x: object, ctx: Context, depth: int) -> bool:
    """Whether the int8 tensor that `x` was widened from is at hand, or can be made of such tensors.

    A sum that does not fit a byte wraps around, and back in the sum that a layer reads, which fits one.
    """
    if not isinstance(x, fx.Node) or depth == 0 or not ctx.analysis.unchanged(x, x):
        return False
    source = widened_from(x)
    if source is not None:
        # eager keeps the widened ones for its backward, which a write to the bytes outside of the graph does not reach
        written = ctx.gradients and source in ctx.analysis.seen_outside
        return ctx.analysis.unchanged(source, x) and not written
    moved, op = moved_from(x, ctx), op_of(x)
    if moved is not None:
        return _narrow(moved, ctx, depth - 1)
    if op is not None and op.module is None and op.name == "add" and op.get("alpha") == 1:
        return all(_narrow(part, ctx, depth - 1) for part in (op.input, op.get("other")))
    return False


def _build(node: fx.Node, x: fx.Node) -> fx.Node:
    """The same call on bytes."""
    return call(node.graph, node, node.target, _bytes(x, node), *node.args[1:])


def _bytes(x: Any, like: fx.Node) -> Any:
    source = widened_from(x)
    if source is not None:
        return source
    op = op_of(x)
    assert op is not None
    inputs = (op.input, op.get("other")) if op.name == "add" else (op.input,)
    return on_bytes(x, {old: _bytes(old, like) for old in inputs}, like)
