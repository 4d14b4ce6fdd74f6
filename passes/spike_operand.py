"""What every rule for a layer on spikes must check, and how it turns its input into whole numbers of one byte.

A layer is linear in its input, so a scale in front of the spikes may move to the weight: `layer(s * f, w)` becomes
`layer(s, w * f)`. Both the move and the test that it is allowed live here, for convolution and linear alike.
"""

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import fx

from sparsecomp import _compat, gate
from sparsecomp.lowering.autotune import scoped_effort, tuner
from sparsecomp.lowering.cache import default_cache
from sparsecomp.lowering.ceilings import H100, Ceilings, ceilings_of
from sparsecomp.lowering.signature import device_of
from sparsecomp.lowering.strategies import SPIKE_CONV
from sparsecomp.ops.library import KERNEL_DTYPES
from sparsecomp.passes.canonicalize import CanonicalOp, example_of, has_hooks
from sparsecomp.passes.facts import SparsityFact, is_dyadic
from sparsecomp.passes.rule import Context, Plan, Refusal, Why, call, refuse
from sparsecomp.sparse_tensor import SparseTensor

_DIGITS = {"exact": 3, "tf32": 2, "half": 2}
_RANGE = 20.0
"""Greatest weight of a channel, in medians, for which `_DIGITS` keep the promised precision.

The rounding error of D digits is at most 2^(1-8D) of the greatest weight, its root mean square 2^(2-8D) / sqrt(12).
Next to normally distributed weights (median 0.67) that reaches 1e-6 at D=3, and 2.4e-4 at D=2, for a range of 21. Every
further digit allows 256 times the range.
"""
_MOST_DIGITS = 4


@dataclass(frozen=True, slots=True)
class Operands:
    """The operands of one legal site.

    Attributes:
        op: the layer.
        fact: what is known about its input.
        dtype: dtype of the layer's arithmetic and result (autocast's, where that is active).
        device: device type.
        precision, digits: numeric mode and the weight digits it takes.
    """

    op: CanonicalOp
    fact: SparsityFact
    dtype: torch.dtype
    device: str
    precision: str
    digits: int


def hooked(node: fx.Node, ctx: Context, layer: type[torch.nn.Module]) -> bool:
    """Whether a node calls a layer whose hooks could replace its input, result or gradients."""
    if node.op != "call_module":
        return False
    module = ctx.gm.get_submodule(str(node.target))
    return isinstance(module, layer) and has_hooks(module)


def check(op: CanonicalOp, ctx: Context) -> Operands | Refusal:
    """Whether a layer may run on its input as spikes, whatever its geometry."""
    fact = _spike_fact(op, ctx)
    if isinstance(fact, Refusal):
        return fact
    x, weight, out = example_of(op.input), example_of(op.get("weight")), example_of(op.node)
    if x is None or weight is None:
        return refuse(Why.UNKNOWN_SHAPE)
    if isinstance(weight, SparseTensor):
        return refuse(Why.SPARSE_AS_WRITTEN, detail="its weight has no dense form to split")
    dtype = x.dtype if out is None else out.dtype
    if dtype not in KERNEL_DTYPES:
        return refuse(Why.DTYPE, dtype=dtype)
    if x.dtype != weight.dtype and dtype in (x.dtype, weight.dtype) and not _autocast(dtype):
        return refuse(Why.MIXED_DTYPES, input=x.dtype, weight=weight.dtype)
    if x.device != weight.device:
        return refuse(Why.MIXED_DTYPES, input=x.device, weight=weight.device)
    spread = _weight_range(op.get("weight"), ctx)
    if spread is None:
        return refuse(Why.WEIGHT_NOT_FINITE)
    precision = _precision(ctx.options.precision, dtype)
    digits = _DIGITS[precision]
    while spread > _RANGE and digits <= _MOST_DIGITS:
        spread, digits = spread / 256, digits + 1
    if digits > _MOST_DIGITS:
        return refuse(Why.WEIGHT_RANGE, precision=precision)
    return Operands(op, fact, dtype, x.device.type, precision, digits)


def choose(operands: Operands, site: gate.SiteInfo, ctx: Context, build: Callable[[str], fx.Node]) -> Plan | Refusal:
    """Let the gate, or the user, pick the implementation."""
    forced = ctx.options.implementation
    if forced == "dense":
        return refuse(Why.FORCED_DENSE)
    ceilings, measured = _card(operands, site)
    if forced != "auto":
        strategy, reason = forced, f"implementation={forced!r} was asked for"
        gain = gate.estimate(site, forced, ceilings)
    elif site.device == "cuda" and not _triton_available():
        ctx.report.note("Triton is not installed: everything stays dense")
        return refuse(Why.GATE, detail="Triton is not installed")
    else:
        decision = gate.decide(site, ceilings, measured)
        strategy, gain, reason = decision.strategy, decision.expected_gain, decision.reason
    if strategy == "dense":
        return refuse(Why.GATE, detail=reason)
    node = operands.op.node
    reason = f"input is {operands.fact.described()}; {reason}"
    return Plan(lambda: {node: build(strategy)}, reason, strategy, operands.precision, gain)


def _card(operands: Operands, site: gate.SiteInfo) -> tuple[Ceilings, Mapping[str, float] | None]:
    """The ceilings of the site's card, and the times of its implementations, measured now where tuning is asked for."""
    x = example_of(operands.op.input)
    if x is None or x.device.type != "cuda" or not (torch.cuda.is_available() and _triton_available()):
        return H100, None
    if scoped_effort() is not None:
        tuner().choose(SPIKE_CONV, site, x.device)
    entry = default_cache().get(site.signature(device_of(x.device)))
    if entry is None:
        return ceilings_of(x.device), None
    # a candidate is named after its strategy, before the version
    times = {name.partition("@")[0]: ms for name, ms in entry.times.items() if name not in entry.rejected}
    return ceilings_of(x.device), times


def writes_bytes(operands: Operands, ctx: Context) -> bool:
    """Whether the input's producer can be expected to write bytes instead of full-width spikes.

    It does under Inductor, but only where every reader of the spikes takes bytes. In half precision most layers stay
    dense, so the spikes are written at full width all the same and the bytes would come on top.
    """
    return not ctx.eager and operands.dtype is torch.float32


def build_inputs(operands: Operands, ctx: Context) -> tuple[fx.Node, fx.Node, fx.Node | None]:
    """Input, weight and bias of the sparse operator: whole numbers, with any scale moved to the weight."""
    op, node, graph = operands.op, operands.op.node, operands.op.node.graph
    x = op.input
    weight, bias = attribute(op, "weight"), attribute(op, "bias")
    assert isinstance(weight, fx.Node)
    scale = _scale_node(operands.fact.scale, node, ctx)
    if operands.fact.scale != 1.0 and is_dyadic(operands.fact.scale):
        assert isinstance(operands.fact.scale, float)
        x = call(graph, node, torch.mul, x, 1.0 / operands.fact.scale)
    elif operands.fact.scale != 1.0 or not operands.fact.exact:
        x = _binarised(x, scale, node, ctx)
    if operands.fact.scale != 1.0:
        weight = call(graph, node, torch.mul, weight, scale)
    return (
        cast(x, operands.dtype, node),
        cast(weight, operands.dtype, node),
        None if bias is None else cast(bias, operands.dtype, node),
    )


def attribute(op: CanonicalOp, name: str) -> fx.Node | None:
    """A parameter of a layer as a node: the argument of a functional call, or read off the called module."""
    value = op.get(name)
    if value is None or isinstance(value, fx.Node):
        return value
    return _get_attr(f"{op.node.target}.{name}", value, op.node)


def cast(value: fx.Node, dtype: torch.dtype, like: fx.Node) -> fx.Node:
    """`value` in `dtype`, as autocast would cast it."""
    tensor = example_of(value)
    if tensor is not None and tensor.dtype == dtype:
        return value
    return call(like.graph, like, torch.Tensor.to, value, dtype)


def _spike_fact(op: CanonicalOp, ctx: Context) -> SparsityFact | Refusal:
    fact = ctx.fact(op.input, op.node)
    if fact is None:
        return refuse(Why.NOT_SPIKES, detail=_explained(op, ctx))
    binary_up_to_scale = fact.integral and fact.finite and fact.within(0, 1) and fact.exact_zeros
    if binary_up_to_scale or (fact.fits_int8 and is_dyadic(fact.scale)):
        return fact
    if fact.fits_int8:
        return refuse(Why.SCALED, scale=fact.scale)
    reason = ctx.analysis.why_not(op.input) if isinstance(op.input, fx.Node) else None
    return refuse(Why.WRONG_DOMAIN, detail="; ".join([fact.described(), *([str(reason)] if reason else [])]))


def _explained(op: CanonicalOp, ctx: Context) -> str:
    reason = ctx.analysis.why_not(op.input) if isinstance(op.input, fx.Node) else None
    return str(reason) if reason else "nothing is known about it"


def _binarised(x: fx.Node, scale: fx.Node | float, like: fx.Node, ctx: Context) -> fx.Node:
    """Exactly 1 where `x` is not zero, with the gradient of `x / scale`.

    Dividing would be simpler, but fast division gives 0.99999994 for f / f, which a cast to int8 makes 0.
    """
    graph, tensor = like.graph, example_of(x)
    ones = call(graph, like, torch.Tensor.to, call(graph, like, torch.ne, x, 0), tensor.dtype)
    if not ctx.gradients:
        return ones
    zero = call(graph, like, torch.sub, x, call(graph, like, torch.Tensor.detach, x))
    return call(graph, like, torch.add, ones, call(graph, like, torch.div, zero, scale))


def _scale_node(scale: float | str, like: fx.Node, ctx: Context) -> fx.Node | float:
    """The factor as a number, or as a detached scalar: the layer's result does not depend on where it is applied."""
    if not isinstance(scale, str):
        return scale
    graph = like.graph
    node = next((node for node in graph.nodes if node.name == scale), None)
    if node is None:
        path, _, name = scale.rpartition(".")
        node = _get_attr(scale, getattr(ctx.gm.get_submodule(path), name), like)
    detached = call(graph, like, torch.Tensor.detach, node)
    return call(graph, like, torch.Tensor.reshape, detached, ())


def _get_attr(target: str, value: torch.Tensor, like: fx.Node) -> fx.Node:
    node = like.graph.get_attr(target)
    node.meta["example_value"] = _compat.fake_of(value, beside=example_of(like.all_input_nodes[0]))
    return node


def _precision(wanted: str, dtype: torch.dtype) -> str:
    if wanted != "auto":
        return wanted
    return "exact" if dtype is torch.float32 else "half"


def _autocast(dtype: torch.dtype) -> bool:
    """Half results of float32 operands can only come from autocast, whose state the graph may set itself."""
    return dtype is not torch.float32


def _weight_range(weight: object, ctx: Context) -> float | None:
    """Largest ratio of a channel's greatest weight to the median of its non-zero ones; None if a weight is not finite.

    Not to their mean or root mean square: one outlier would hide in either, while its input may never fire.
    Weights whose values the capture does not know (computed, or still fake) count as ordinary.
    """
    value = ctx.values.get(weight) if isinstance(weight, fx.Node) else weight
    if not isinstance(value, torch.Tensor) or _compat.is_fake(value) or value.numel() == 0:
        return 1.0
    with torch.no_grad():
        rows = value.detach().float().abs().flatten(1)
        top = rows.amax(1)
        typical = rows.masked_fill(rows == 0, torch.nan).nanmedian(1).values  # NaN for a channel of zeros
        ratio = (top / typical).nan_to_num(1.0).amax()
        finite, widest = torch.stack((torch.isfinite(top).all().float(), ratio)).tolist()
    return widest if finite else None


@cache
def _triton_available() -> bool:
    return importlib.util.find_spec("triton") is not None
