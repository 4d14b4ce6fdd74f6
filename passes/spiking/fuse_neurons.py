"""spikingjelly's neuron operators, with the batch-norm in front, become `sparsecomp::lif`, which writes bytes.

On CUDA `sj_lif`, `sj_if` and `sj_plif` are Triton kernels that Inductor cannot look into: batch-norm before and the
cast to one byte after are then passes over memory of their own. Plain operators in the graph are no better: every time
step reads what the one before left, and Inductor compiles three kernels. One operator needs one pass.
"""

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

import sparsecomp.ops  # noqa: F401  (registers the operator)
from sparsecomp.passes.engine.rule import Context, Plan, Rule, Verdict, Why, call, refuse
from sparsecomp.passes.graph.canonicalize import CanonicalOp, example_of, op_of
from sparsecomp.passes.graph.operators import Trait
from sparsecomp.passes.spiking.lying import laid_as
from sparsecomp.passes.spiking.neuron_call import (
    MAX_STEPS,
    NEURON_CALLS,
    SPIKES,
    arguments,
    gives_more,
    starting_number,
)
from sparsecomp.passes.spiking.operand import attribute

_CHARGES: Mapping[str, str] = dict(zip(NEURON_CALLS, ("if", "lif", "plif"), strict=True))


def consider(node: fx.Node, ctx: Context) -> Verdict:
    """Judge one node: every neuron operator is a candidate."""
    op = op_of(node)
    if op is None or op.name not in _CHARGES:
        return None
    x = example_of(node.args[0])
    if x is None:
        return refuse(Why.UNKNOWN_SHAPE)
    args = arguments(node)
    refusal = _obstacle(node, args, x, ctx)
    if refusal is not None:
        return refuse(Why.NOT_FUSED, detail=refusal)
    norm = _batch_norm(node, args, x, ctx)
    reason = f"{x.shape[0]} time steps in one pass" + ("" if norm is None else ", batch-norm included")
    return Plan(lambda: _build(node, _CHARGES[op.name], args, norm), reason, "fused", dead=_orphans(node, args, norm))


RULE = Rule("fuse_neurons", consider, after=("unrolled_neurons",))


def _obstacle(node: fx.Node, args: Mapping[str, Any], x: torch.Tensor, ctx: Context) -> str | None:
    if ctx.options.implementation == "dense":
        return "implementation='dense' was asked for"
    if ctx.device(x.device).type != "cuda" and ctx.options.neurons != "fuse":
        return "on the CPU the operator is no Triton kernel, and nothing is gained"
    if ctx.gradients:
        return "gradients are enabled, so the operator keeps its own backward; use torch.no_grad()"
    if x.dtype is not torch.float32 or x.dim() < 3:
        return f"{x.dtype} input of {x.dim()} dimensions; the kernel takes float32 of three and more"
    if not isinstance(x.shape[0], int) or not 0 < x.shape[0] <= MAX_STEPS:
        return f"{x.shape[0]} time steps: unrolled up to {MAX_STEPS}"
    if args["store_v_seq"]:
        return "the membrane of every step is stored"
    if not ctx.analysis.unchanged(args["v_init"], args["v_init"]):
        return "its first membrane is written to in place"
    if gives_more(node):
        return "more than its spikes and last membrane is used"
    return None


def _batch_norm(
    node: fx.Node, args: Mapping[str, Any], x: torch.Tensor, ctx: Context
) -> tuple[CanonicalOp, fx.Node] | None:
    """The evaluation-mode batch-norm whose result is `x_seq` with its time axis put back, and the view that does it.

    Only if nobody else reads either: the normalised tensor would have to be made after all. And only if nothing that
    batch-norm read, nor its result, is written to before the neuron reads.
    """
    x_seq = args["x_seq"]
    reshape = op_of(x_seq)
    if reshape is None or not reshape.has(Trait.ROW_MAJOR) or not _read_only_by(node, args, x_seq):
        return None
    op = op_of(reshape.input)
    if op is None or op.name != "batch_norm" or len(op.node.users) != 1 or op.get("training"):
        return None
    before = example_of(op.input)
    if before is None or before.dtype is not torch.float32 or before.shape[1:] != x.shape[2:]:
        return None
    unchanged = ctx.analysis.unchanged
    if not unchanged(x_seq, x_seq) or not all(unchanged(read, op.node) for read in op.node.all_input_nodes):
        return None
    return op, x_seq


def _read_only_by(node: fx.Node, args: Mapping[str, Any], x_seq: fx.Node) -> bool:
    """Whether all that is read of `x_seq`, apart from the neuron, is the shape of its first membrane."""
    v = args["v_init"]
    templates = {v} if starting_number(v) is not None and set(v.users) == {node} else set()
    # what nobody reads may still matter: the graph's output, or a write
    return all(
        user is node or user in templates or (user.users and set(user.users) <= templates) for user in x_seq.users
    )


def _orphans(
    node: fx.Node, args: Mapping[str, Any], norm: tuple[CanonicalOp, fx.Node] | None
) -> tuple[fx.Node, ...]:
    """What only the replaced operator read, users before what they use."""
    v = args["v_init"]
    template = () if starting_number(v) is None else (v,)
    if norm is None:
        return template
    op, view = norm
    return (*template, *(user for user in view.users if user is not node and user not in template), view, op.node)


def _build(
    node: fx.Node, charge: str, args: Mapping[str, Any], norm: tuple[CanonicalOp, fx.Node] | None
) -> Mapping[fx.Node, fx.Node]:
    def emit(target: Any, *inputs: Any, **options: Any) -> fx.Node:
        made = call(node.graph, node, target, *inputs)
        made.kwargs = options
        return made

    x, statistics = args["x_seq"], (None, None, None, None, 0.0)
    if norm is not None:
        op, view = norm
        made = node.graph.node_copy(view, lambda old: op.input if old is op.node else old)
        made.meta.pop("example_value", None)
        x = made
        parts = [attribute(op, name) for name in ("running_mean", "running_var", "weight", "bias")]
        statistics = (*parts, op.get("eps"))
    # a membrane that starts at one number everywhere is passed as that number, not read from memory
    start = starting_number(args["v_init"])
    v, v0 = (args["v_init"], 0.0) if start is None else (None, start)
    rate = emit(torch.sigmoid, emit(torch.Tensor.float, args["w"])) if charge == "plif" else None
    tau = args["tau"] if charge == "lif" else 1.0
    decay = args["decay_input"] if charge != "if" else False
    both = emit(
        torch.ops.sparsecomp.lif.default,
        x, v, v0, *statistics, charge, tau, rate, decay, args["threshold"], args["reset"],
    )  # fmt: skip
    results: dict[fx.Node, fx.Node] = {}
    for item in node.users:
        part = emit(operator.getitem, both, item.args[1])
        results[item] = emit(torch.Tensor.to, part, torch.float32) if item.args[1] == SPIKES else part
    return {item: laid_as(made, item) for item, made in results.items()}
