"""A small table that is trained and read at many places gets a gradient of our own: `sparsecomp::table_rows`.

Biases by relative position are such tables. The rows are read as written; what changes is the gradient by the table,
which Inductor scatters. It comes behind the rules of attention, which look at how a bias was made.
"""

import math

import torch
from torch import Tensor, fx

from sparsecomp import _compat
from sparsecomp.ops.attention.bias_table import NO_PADDING
from sparsecomp.passes.attention.example_numbers import is_computed, is_real
from sparsecomp.passes.cost.bias_table import ReadTable, decide
from sparsecomp.passes.engine.rule import (
    Context,
    Plan,
    Refusal,
    Rule,
    Verdict,
    Why,
    call,
    is_static,
    known_sizes,
    refuse,
    replays,
)
from sparsecomp.passes.graph.canonicalize import CanonicalOp, example_of, op_of
from sparsecomp.passes.masked.formula import computed_by, is_parameter
from sparsecomp.reference.precision import KERNEL_DTYPES


def consider(node: fx.Node, ctx: Context) -> Verdict:
    """Judge one node: rows of a table that wants a gradient, read by an index, are a site where a GPU is to run it."""
    op, out = op_of(node), example_of(node)
    if op is None or out is None or not ctx.gradients or not out.requires_grad:
        return None
    found = _read(op)
    if found is None or ctx.device(out.device).type != "cuda":
        return None
    problem = _problem(op, out, ctx)
    return _judged(op, *found, ctx) if problem is None else problem


RULE = Rule("bias_table", consider, after=("block_attention", "gather_dot", "spike_attention"))


def _read(op: CanonicalOp) -> tuple[fx.Node, fx.Node] | None:
    """The table and the index; None of another operator."""
    if op.out is not None or op.module is not None or not op.known:
        return None
    if op.name == "embedding":
        table, index = op.get("weight"), op.get("input")
    elif op.name == "getitem":
        table, index = op.input, _along_rows(op.get("index"))
    else:
        return None
    if not isinstance(table, fx.Node) or not isinstance(index, fx.Node):
        return None
    read, places = example_of(table), example_of(index)
    # of a SparseTensor, or a table in shards, others know the gradient
    if not _is_plain(read) or not _is_plain(places) or places.dtype not in (torch.int32, torch.int64):
        return None
    return (table, index) if read.requires_grad and read.dim() in (1, 2) else None


def _is_plain(example: object) -> bool:
    return _compat.is_fake(example) or type(example) in (Tensor, torch.nn.Parameter)


def _along_rows(index: object) -> object:
    """What `table[index]` reads along its first dimension, if it takes all of the others."""
    first, *more = index if isinstance(index, tuple) and index else (index,)
    return None if any(one is not Ellipsis and one != slice(None) for one in more) else first


def _problem(op: CanonicalOp, out: Tensor, ctx: Context) -> Refusal | None:
    """Why torch's own gradient stays; None if nothing is against ours."""
    detail = ""
    if ctx.options.implementation == "dense":
        return refuse(Why.FORCED_DENSE)
    if out.dtype not in KERNEL_DTYPES:
        return refuse(Why.DTYPE, dtype=out.dtype)
    if ctx.eager:
        detail = "the graph runs op by op, and there torch sorts the index"
    elif op.get("max_norm") is not None or op.get("scale_grad_by_freq") or op.get("sparse"):
        detail = "it has max_norm, scale_grad_by_freq or sparse"
    return refuse(Why.TABLE_AS_WRITTEN, detail=detail) if detail else None


def _skipped(op: CanonicalOp, rows: int) -> int:
    """The row that gets no gradient. -1 is the last one to torch.nn.functional, and none in torch's own schema, which
    has no max_norm."""
    padding = op.get("padding_idx")
    if padding is None or padding < 0 and "max_norm" not in op.args:
        return NO_PADDING
    return padding if padding >= 0 else padding + rows


def _judged(op: CanonicalOp, table: fx.Node, index: fx.Node, ctx: Context) -> Plan | Refusal:
    node = op.node
    sizes, places = known_sizes(table), known_sizes(index)
    if sizes is None or places is None:
        return refuse(Why.UNKNOWN_SHAPE)
    rows, features, count = sizes[0], math.prod(sizes[1:]), math.prod(places)
    if not rows * features * count:
        return refuse(Why.TABLE_AS_WRITTEN, detail="it has no elements")
    where = ctx.device(example_of(node).device)
    read = ReadTable(
        where, count, rows, features, count, example_of(table).dtype, example_of(index).dtype,
        replays(ctx.options, where), ctx.products, ctx.target,
    )  # fmt: skip
    # first as if one row were read everywhere: few tables are worth a look at their index
    decision = decide(read)
    if not decision.dense:
        read = read._replace(busiest=_busiest(node, index, rows, ctx) or count / rows)
        decision = decide(read)
    if decision.dense:
        return Refusal(Why.GATE, {"detail": f"{read.described}; {decision.reason}"}, decision.estimate)

    def build() -> dict[fx.Node, fx.Node]:
        arguments = (table, index, _skipped(op, rows))
        return {node: call(node.graph, node, torch.ops.sparsecomp.table_rows.default, *arguments)}

    reason = f"the gradient by its table is summed without atomics: {read.described}; {decision.reason}"
    return Plan(build, reason, "table_rows", "", (), decision.estimate)


def _busiest(node: fx.Node, index: fx.Node, rows: int, ctx: Context) -> int | None:
    """Places that read the row that is read most, by an index computed of positions and of what modules hold; None if
    it is none. Waits for its device. What a graph is given is another in each call, and says nothing."""
    found = computed_by(index, node, is_computed, ctx)
    for source in found.sources:
        held = is_static(source) or source.op == "get_attr" or is_parameter(source, ctx)
        if not held or not is_real(ctx.values.get(source)):
            return None
    with torch.inference_mode(False), torch.no_grad():
        places = found.values(ctx.values)[index].flatten().long()
        places = torch.where(places < 0, places + rows, places)
        if places.is_meta or not bool(((places >= 0) & (places < rows)).all()):
            return None
        return int(torch.bincount(places, minlength=rows).max())
