"""Layers on a masked weight: in inference the weight is folded, in training one with a theta is merged in one pass.

Without gradients a weight that is a formula of parameters and buffers is a constant, where the caller promised that
they are not written to. By the option `frozen` it becomes a constant of the graph, and the layer stays as it was
written. Where a sparse kernel is estimated to be faster, or where the promise is `frozen_weights`, after which each
call asks, the operators of `sparsecomp.ops.masked.folded_layer` keep it, in the fastest format. With gradients, as
without a promise, the multiplication by a mask is one elementwise operator, which Inductor fuses by itself; what
scatters a vector to the pruned elements it does not (`sparsecomp.passes.masked.merged_weight`).

`torch.nn.utils.prune` sets the product as an attribute of its module in each call, so that the graph gives it out. It
gets the weight that is kept. Other readers may write to a weight that they are given, which is then computed in each
call.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import fx, nn

import sparsecomp.ops.masked.folded_layer  # noqa: F401  (registers the operators)
from sparsecomp.ops.masked.folded_weight import Folded, Recipe, computed, formula
from sparsecomp.passes.cost.masked import decide_fold
from sparsecomp.passes.engine.constants import promised_node
from sparsecomp.passes.engine.rule import Context, Plan, Refusal, Rule, Verdict, Why, call, refuse
from sparsecomp.passes.graph.canonicalize import CanonicalOp, example_of, op_of
from sparsecomp.passes.masked.fold import FoldedForm, choose_fold
from sparsecomp.passes.masked.formula import (
    LAYERS,
    Formula,
    constants_of,
    factors,
    formula_of,
    has_writes,
    is_mask,
    is_parameter,
    is_view,
    varies,
)
from sparsecomp.passes.masked.merged_weight import merge_weight
from sparsecomp.passes.spiking.operand import cast
from sparsecomp.reference.memo import MEMO, Keep

_SPARSE = ", and sparsecomp.sparsify(model, sparsecomp.FromMask()) a sparse layer"


def consider(node: fx.Node, ctx: Context) -> Verdict:
    """Judge one node: every layer whose weight is masked in the graph is a site."""
    op = op_of(node)
    if op is None or op.module is not None or op.name not in LAYERS:
        return None
    argument = LAYERS[op.name]
    weights = node.all_input_nodes if argument is None else [op.get(argument)]
    for weight in weights:
        masked = formula_of(weight, node, ctx) if isinstance(weight, fx.Node) else None
        verdict = None if masked is None else _judged(op, masked, ctx)
        if masked is not None and isinstance(verdict, Refusal) and masked.by_torchs_pruning():
            return _pruned(verdict, masked, node, ctx)
        if verdict is not None:
            return verdict
    return None


def _judged(op: CanonicalOp, masked: Formula, ctx: Context) -> Verdict:
    values = constants_of(masked, ctx)
    evidence = _evidence(masked, values, ctx)
    if evidence is not True:
        return evidence if isinstance(evidence, Refusal) else None
    if ctx.options.implementation == "dense":
        return refuse(Why.FORCED_DENSE)
    problem = varies(masked, op.node, values, ctx)
    if problem is None and ctx.gradients and _needs_gradient(op.node, masked, values):
        return merge_weight(op, masked, values, ctx)
    keep = ctx.keep(*values.values())
    problem = problem or _unfit(op, masked, keep, ctx)
    if problem is not None:
        return refuse(Why.MASKED_AS_WRITTEN, detail=problem)
    if keep is None:
        return refuse(Why.NOT_FROZEN, option="frozen=True")
    return _folded(op, masked, values, keep, ctx)


def _pruned(refusal: Refusal, masked: Formula, layer: fx.Node, ctx: Context) -> Refusal:
    """With what to do about torch's pruning. On a CPU the promise would save no more than that does without one."""
    if refusal.why is Why.NOT_FROZEN and ctx.device(example_of(masked.result).device).type == "cpu":
        refusal = refuse(Why.MASKED_AS_WRITTEN, detail="it is multiplied by its mask in each call")
    return refuse(Why.PRUNED, reason=refusal, sparse=_SPARSE if _can_be_sparse(masked, layer, ctx) else "")


def _can_be_sparse(masked: Formula, layer: fx.Node, ctx: Context) -> bool:
    """Whether `sparsify` stores this layer's weight sparse: that of an `nn.Linear` which is half zeros or more."""
    stack = layer.meta.get("nn_module_stack") or {"": ("", None)}
    masks = [value for node, value in constants_of(masked, ctx).items() if not is_parameter(node, ctx)]
    return list(stack.values())[-1][1] is nn.Linear and any(2 * int(mask.sum()) <= mask.numel() for mask in masks)


RULE = Rule("masked_weight", consider, after=("spike_conv", "spike_conv_transpose", "spike_linear"))
"""Spikes gain more than zeros in a weight do."""


def _evidence(masked: Formula, values: Mapping[fx.Node, torch.Tensor], ctx: Context) -> bool | Refusal:
    """Whether the formula masks a weight; a refusal where it multiplies by a buffer that is no mask."""
    if len(values) < len(masked.sources) and not any(is_parameter(source, ctx) for source in masked.sources):
        return False  # masked activations
    products = list(factors(masked))
    if has_writes(masked) or any(_is_binary(factor, masked, ctx) for pair in products for factor in pair):
        return True
    if not products or len(values) < len(masked.sources):
        return False
    known = masked.values(values)
    if any(is_mask(known[factor]) for pair in products for factor in pair):
        return True
    buffers = [node for node in masked.sources if not is_parameter(node, ctx)]
    alike = [node for node in buffers if values[node].shape == example_of(masked.result).shape]
    if not alike:
        return False
    return refuse(Why.MASKED_AS_WRITTEN, detail=f"`{alike[0].target}` holds other values than 0 and 1")


def _is_binary(factor: fx.Node, masked: Formula, ctx: Context) -> bool:
    fact, example = ctx.fact(factor, masked.result), example_of(factor)
    return (fact is not None and fact.is_binary) or (example is not None and example.dtype is torch.bool)


def _needs_gradient(layer: fx.Node, masked: Formula, values: Mapping[fx.Node, torch.Tensor]) -> bool:
    read = (values.get(node, example_of(node)) for node in (*layer.all_input_nodes, *masked.sources))
    return any(getattr(value, "requires_grad", False) for value in read)


def _unfit(op: CanonicalOp, masked: Formula, keep: Keep | None, ctx: Context) -> str | None:
    """Why a fold would not pay, or cannot be expressed; None if it may."""
    if ctx.eager:
        return "the graph runs op by op and may be asked for gradients"
    if op.inplace or op.get("max_norm") is not None:
        return f"{op.name} writes to it"
    if keep is None or (_is_constant(masked, ctx) and not is_given_out(masked, op.node, keep)):
        return None
    decision = decide_fold(example_of(masked.result).numel())
    return decision.reason if decision.dense else None


def _folded(
    op: CanonicalOp, masked: Formula, values: Mapping[fx.Node, torch.Tensor], keep: Keep, ctx: Context
) -> Verdict:
    found = masked.values(values)[masked.result]
    weight = found.to(getattr(example_of(op.node), "dtype", found.dtype))
    choice = choose_fold(op, weight, ctx)
    base = masked.base()
    outside = masked.outside(op.node)
    beside = next((user for user in outside if base in user.all_input_nodes and not is_view(user)), None)
    given_out = is_given_out(masked, op.node, keep)
    if choice.format == "dense" and beside is not None and not given_out:
        return refuse(Why.MASKED_AS_WRITTEN, detail=f"`{beside.name}` reads it too, so it is computed all the same")
    kernel = f"torch's {op.name}" if choice.decision.dense else choice.decision.implementation
    reason = (
        f"{masked.spelled()} of parameters and buffers is folded, since they are promised to stay; "
        f"{choice.described} by {kernel}: {choice.decision.reason}"
    )

    def build() -> dict[fx.Node, fx.Node]:
        given = {masked.result: _build_kept(op, masked, None, values, keep)} if given_out else {}
        if choice.format != "dense":
            return {op.node: _build_sparse(op, masked, choice, values, keep)} | given
        read = given or {
            masked.result: _build_constant(op, masked, weight.dtype, values) if _is_constant(masked, ctx)
            else _build_kept(op, masked, weight.dtype, values, keep)
        }  # fmt: skip
        return {op.node: op.node.graph.node_copy(op.node, lambda old: read.get(old, old))} | given

    dead = tuple(node for node in masked.nodes[::-1] if not (given_out and node is masked.result))
    return Plan(build, reason, choice.name, "", dead, choice.decision.estimate)


def is_given_out(masked: Formula, layer: fx.Node, keep: Keep) -> bool:
    """Whether nobody reads the weight but the layer and, for torch's pruning, the module that it is an attribute of,
    which gets the one that is kept. What a CUDA graph gives out must be its own."""
    outside = masked.outside(layer)
    alone = len(outside) == 1 and outside[0].op == "output" and set(masked.result.users) == {layer, outside[0]}
    return keep != "prepared" and alone and masked.by_torchs_pruning()


def _is_constant(masked: Formula, ctx: Context) -> bool:
    """Whether the weight may become a constant of the graph, rather than be kept by an operator."""
    return all(ctx.constant(source) is not None for source in masked.sources)


def _build_constant(
    op: CanonicalOp, masked: Formula, dtype: torch.dtype, values: Mapping[fx.Node, torch.Tensor]
) -> fx.Node:
    names = [f"`{source.target}`" for source in masked.sources]
    made = _Computed(formula(masked.module(dtype)))
    return promised_node(op.node, made, masked.sources, [values[source] for source in masked.sources], names)


class _Computed(NamedTuple):
    """A weight by its formula."""

    formula: str

    def __call__(self, *sources: torch.Tensor) -> torch.Tensor:
        return computed(sources, self.formula)


def _build_kept(
    op: CanonicalOp, masked: Formula, dtype: torch.dtype | None, values: Mapping[fx.Node, torch.Tensor], keep: Keep
) -> fx.Node:
    """The weight, of another dtype if one is given, by an operator that keeps it."""
    recipe = _prepared(masked, dtype, ("dense", (1, 1)), values, keep)
    return call(op.node.graph, op.node, torch.ops.sparsecomp.folded_weight.default, list(masked.sources), recipe)


def _prepared(
    masked: Formula, cast_to: torch.dtype | None, form: tuple[str, tuple[int, int]],
    values: Mapping[fx.Node, torch.Tensor], keep: Keep,
) -> str:  # fmt: skip
    """The recipe of the weight in a format and block, by which it is kept already: the first call may run in the
    memory of a CUDA graph."""
    folded = Folded(formula(masked.module(cast_to)), *form)
    read, names = zip(*((values[source], source.target) for source in masked.sources), strict=True)
    MEMO.prepare(folded, read, keep, names)
    return Recipe(folded, keep).written()


def _build_sparse(
    op: CanonicalOp, masked: Formula, choice: FoldedForm, values: Mapping[fx.Node, torch.Tensor], keep: Keep
) -> fx.Node:
    node, dtype = op.node, example_of(op.node).dtype
    recipe = _prepared(masked, dtype, (choice.format, choice.block), values, keep)
    x, bias = cast(op.input, dtype, node), op.get("bias")
    bias = None if bias is None else cast(bias, dtype, node)
    target = torch.ops.sparsecomp.folded_linear.default
    return call(node.graph, node, target, x, list(masked.sources), bias, recipe)
