"""Where spikes come from: what turns an analog membrane into a small set of values.

Plain comparisons are in `transfer.comparison`. Here are the forms that need more than one operator or a look inside:
`heaviside`, the straight-through idiom, surrogate-gradient functions (Dynamo shows them as
`autograd_function_apply` with the forward body as a sub-graph) and the custom operators of spiking libraries.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from sparsecomp.passes.facts.registry import Facts, Items, Kept, Lost, LostKind, Result, transfer
from sparsecomp.passes.graph.canonicalize import CanonicalOp, dtype_of, numel_of, op_of
from sparsecomp.passes.graph.operators import Trait
from sparsecomp.reference import facts as algebra
from sparsecomp.reference.facts import Origin, SparsityFact
from sparsecomp.snn import registry as neurons

_BODY_ARGUMENT_OFFSET = {
    "autograd_function_apply": 2,
    "tag_activation_checkpoint": 1,
    "wrap": 1,
    "invoke_subgraph": 2,
}


@transfer("heaviside")
def heaviside(op: CanonicalOp, facts: Facts) -> Result:
    """0 below zero, 1 above, `values` at zero. torch gives 0 for NaN (numpy gives NaN), so no NaN arises."""
    at_zero = facts.of(op.get("values"))
    bits = algebra.binary(op.node.name, Origin.SPIKE)
    if at_zero is not None:
        return algebra.join((bits, at_zero))
    unknown = SparsityFact(None, None, origin=Origin.SPIKE, exact_zeros=True, source=op.node.name)
    message = f"heaviside with `{op.get('values')}` at zero, whose value is unknown, is not binary"
    return Kept(unknown, Lost(LostKind.UNKNOWN_OPERAND, message))


def straight_through(left: Any, right: Any, minus: bool, facts: Facts) -> Result:
    """The fact of `left + right` (or `left - right`) if it is a straight-through estimator, else None.

    - `soft - soft` is zero, so `hard + (soft - soft.detach())` is exactly `hard`; `add` does the rest.
    - `(hard - soft).detach() + soft` and `(hard + soft) - soft`: zeros come out exact, ones within a few units in the
      last place if `|soft| <= 1`. A larger `soft` can swallow `hard` altogether: then only the zeros are promised.
    """
    if minus and facts.same_value(left, right):
        soft = facts.of(right)
        zero = algebra.constant(0)
        assert zero is not None
        return replace(zero, finite=soft is not None and soft.finite)
    for outer, soft in ((left, right), (right, left)):
        hard = _hard_part(outer, soft, minus, facts)
        if hard is not None:
            return _approximate(hard, facts.of(soft), f"{outer}")
        if minus:
            break
    return None


def _hard_part(outer: Any, soft: Any, minus: bool, facts: Facts) -> SparsityFact | None:
    """`hard` if `outer` is `hard - soft` (for a sum) or `hard + soft` (for a difference) of the same `soft`."""
    inner = strip_copies(outer)
    op = op_of(inner) if isinstance(inner, fx.Node) else None
    if op is None or op.inplace or op.name != ("add" if minus else "sub") or op.get("alpha") != 1:
        return None
    candidates = [(op.input, op.get("other"))]
    if minus:
        candidates.append((op.get("other"), op.input))
    for hard, subtracted in candidates:
        fact = facts.of(hard)
        same_hard = not isinstance(hard, fx.Node) or facts.current(op.node, hard)
        unchanged = same_hard and facts.current(op.node, subtracted) and facts.same_value(outer, op.node)
        if fact is not None and unchanged and facts.same_value(subtracted, soft):
            return fact
    return None


def _approximate(hard: SparsityFact, soft: SparsityFact | None, source: str) -> Result:
    if hard.integral and hard.exact and hard.scale == 1.0 and hard.within(-1, 1) and soft and soft.within(-1, 1):
        return replace(hard, exact=False, finite=hard.finite and soft.finite)
    kept = replace(algebra.zeros_kept(hard, finite=False), source=hard.source or source)
    return Kept(kept, Lost(LostKind.RESCALES, "straight-through with an unbounded soft value can lose its spikes"))


def strip_copies(value: Any) -> Any:
    """The node whose values `value` copies or aliases without change, such as detach and clone."""
    while isinstance(value, fx.Node):
        op = op_of(value)
        if op is None or not op.has(Trait.SAME):
            return value
        value = op.input
    return value


@transfer(*(f"higher_order::{name}" for name in _BODY_ARGUMENT_OFFSET))
def call_body(op: CanonicalOp, facts: Facts) -> Result:
    """A function with its forward body as a sub-graph: the body says what comes out."""
    name = op.name.removeprefix("higher_order::")
    args = op.node.args
    body = facts.body(args[0]) if args else None
    if body is None:
        return Lost(LostKind.OPAQUE, f"the body of {name} is not in the graph")
    return facts.call_body(body, tuple(args[_BODY_ARGUMENT_OFFSET[name] :]), op.node)


def _binary_first(op: CanonicalOp) -> Result:
    return Items((algebra.binary(op.name),))


def _counts(op: CanonicalOp) -> Result:
    """`sj_ilif::forward(x, v, tau, count, …)`: rounds into 0 … count; NaN and infinity in the input come out as NaN."""
    count = op.node.args[3] if len(op.node.args) > 3 else None
    if not isinstance(count, int | float) or not float(count).is_integer() or count < 0:
        return Lost(LostKind.UNSUPPORTED, f"{op.name} with a count that is not a whole number")
    return Items((replace(algebra.integers(0, int(count), op.name), finite=False),))


def _ternary_scaled(op: CanonicalOp) -> Result:
    """`sj_stbif::forward(x, q, acc_q, q_threshold, …)`: -q, 0 or q."""
    factor = op.node.args[3] if len(op.node.args) > 3 else None
    if not isinstance(factor, fx.Node) or numel_of(factor) != 1 or dtype_of(factor) is None:
        return Lost(LostKind.UNKNOWN_OPERAND, f"{op.name} with a threshold of unknown size")
    return Items((replace(algebra.integers(-1, 1, op.name), scale=factor.name),))


_SPIKE_OPS: dict[str, Callable[[CanonicalOp], Result]] = {
    **{
        f"sj_{kind}::forward": _binary_first
        for kind in ("if", "lif", "plif", "qif", "eif", "izhikevich", "clif", "activation_aware_if")
    },
    **{
        f"sj_{kind}::multistep_{kind}_{variant}": _binary_first
        for kind in ("if", "lif", "plif")
        for variant in ("forward", "inference", "mp_forward", "mp_inference")
    },
    "sparsecomp::lif": _binary_first,
    "sparsecomp::neuron": _binary_first,
    "sparsecomp::trained_neuron": _binary_first,
    "sj_ilif::forward": _counts,
    "sj_stbif::forward": _ternary_scaled,
}
"""Item 0 of each operator's result is the spike sequence, the other items are membranes."""


RESIDUAL = {"sparsecomp::conv_lif": 26, "sparsecomp::conv_neuron": 23}
"""Its place among the arguments of a layer with its neurons; how it is joined, and what is added to the neurons' input,
follow."""


@transfer(*_SPIKE_OPS)
def spike_op(op: CanonicalOp, facts: Facts) -> Result:
    """The neuron operators of spikingjelly 2, and those that replace neurons."""
    return _SPIKE_OPS[op.name](op)


@transfer(*RESIDUAL)
def layer_with_neurons(op: CanonicalOp, facts: Facts) -> Result:
    """A layer with its neurons: spikes, or what they are joined with a residual to."""
    if op.node.kwargs:
        return Lost(LostKind.UNSUPPORTED, f"{op.name} with arguments by name is not analysed")
    spikes, (residual, *how) = algebra.binary(op.name), op.node.args[RESIDUAL[op.name] :] or (None,)
    if residual is None:
        return Items((spikes,))
    fact = facts.of(residual)
    if fact is None:
        return facts.lost(residual)
    # 1 - spike is as binary as a spike is
    join = algebra.add_facts if how[:1] in ([], ["add"]) else algebra.multiply_facts
    return Items((join(fact, spikes, torch.int8),))


def neuron_call(module: nn.Module, target: str) -> Result:
    """The facts of a leaf neuron's result: item 0 of a tuple, or the tensor itself.

    A factor held by the module is named by its path, `target.graded_spikes_factor`.
    """
    verdict = neurons.inspect(module)
    if verdict.fact is None:
        return Lost(LostKind.NOT_A_SOURCE, f"`{target}`: {verdict.reason}")
    fact = verdict.fact
    if isinstance(fact.scale, str):
        fact = replace(fact, scale=f"{target}.{fact.scale}")
    return Items((fact,)) if verdict.returns_tuple else fact
