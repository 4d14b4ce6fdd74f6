"""What every rule for a layer on spikes must check, and how it turns its input into whole numbers of one byte.

A number in front of the spikes is handed to the operator beside them, which multiplies with it last: a factor that is
known only by its name may be anything. What is promised of an input, and the test that it may be, live here, for
convolution and linear alike.
"""

import math
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from sparsecomp import _compat
from sparsecomp.lowering.cache.signature import NO_TRITON, device_of, has_triton
from sparsecomp.lowering.cache.tuning_cache import default_cache
from sparsecomp.lowering.spiking.implementations import SPIKE_CONV
from sparsecomp.lowering.tuning.autotune import scoped_effort, tuner
from sparsecomp.lowering.tuning.cards import H100, Card
from sparsecomp.lowering.tuning.ceilings import card_of
from sparsecomp.passes.cost import conv_neuron
from sparsecomp.passes.cost import spiking as gate
from sparsecomp.passes.cost.decision import Decision
from sparsecomp.passes.engine.rule import Context, Plan, Refusal, Why, call, refuse, replays
from sparsecomp.passes.graph.canonicalize import CanonicalOp, example_of, has_hooks, op_of
from sparsecomp.passes.graph.operators import Trait
from sparsecomp.passes.spiking.neuron_call import NEURON_CALLS
from sparsecomp.passes.spiking.neurons_behind import unviewed
from sparsecomp.passes.spiking.widened import made_of_bytes
from sparsecomp.reference.digits import SPREAD
from sparsecomp.reference.facts import SparsityFact, is_dyadic
from sparsecomp.reference.geometry import KERNEL_DIMS, TransposedWindow, by_output
from sparsecomp.reference.precision import KERNEL_DTYPES
from sparsecomp.tensor.sparse_tensor import SparseTensor

_DIGITS = {"exact": 3, "tf32": 2, "half": 2}
_MOST_DIGITS = 4
_TRAINED = 100.0
"""How far apart the weights of a channel are expected to grow in training, in medians."""
_DIGIT = 128
"""Greatest product of a spike with one byte of a weight."""


CONVOLUTIONS = {f"conv{dims}d": dims for dims in range(1, KERNEL_DIMS + 1)}
"""Dimensions of a convolution that kernels index, by its name."""
TRANSPOSED = {f"conv_transpose{dims}d": dims for dims in range(1, KERNEL_DIMS + 1)}
"""The same of transposed ones."""
TAKEN = ("linear", *CONVOLUTIONS, *TRANSPOSED)
"""Products that a rule of this room takes; how sparse their inputs are is measured."""


@dataclass(frozen=True, slots=True)
class Promise:
    """What the operator is told of the values of its input: arguments of `sparsecomp::spike_conv`.

    Attributes:
        binary: the input is zero or not, and need not be whole.
        scale: the number, as the input's dtype holds it.
        factor: name of the node or attribute that holds it, where it is a tensor.
    """

    binary: bool
    scale: float = 1.0
    factor: str | None = None


@dataclass(frozen=True, slots=True)
class Operands:
    """The operands of one legal site.

    Attributes:
        op: the layer.
        fact: what is known about its input.
        dtype: dtype of the layer's arithmetic and result (autocast's, where that is active).
        device: device type.
        precision, digits: numeric mode and the weight digits it takes.
        spread: how wide a channel's weights may be for them.
        promise: what the operator may count on.
    """

    op: CanonicalOp
    fact: SparsityFact
    dtype: torch.dtype
    device: str
    precision: str
    digits: int
    spread: float
    promise: Promise


def hooked(node: fx.Node, ctx: Context, layer: type[torch.nn.Module]) -> bool:
    """Whether a node calls a layer whose hooks could replace its input, result or gradients."""
    if node.op != "call_module":
        return False
    module = ctx.gm.get_submodule(str(node.target))
    return isinstance(module, layer) and has_hooks(module)


def unsupported_layer(op: CanonicalOp, inputs: Iterable[Any], ctx: Context) -> Refusal | None:
    """The refusal of a product that no rule takes, if spikes are among its inputs."""
    reached = op.has(Trait.PRODUCT) and any(ctx.fact(one, op.node) is not None for one in inputs)
    return refuse(Why.UNSUPPORTED_OP, op=op.name) if reached else None


def check_layer(op: CanonicalOp, ctx: Context) -> Operands | Refusal:
    """Whether a layer may run on its input as spikes, whatever its geometry."""
    fact = _spike_fact(op, ctx)
    if isinstance(fact, Refusal):
        return fact
    x, weight, out = example_of(op.input), example_of(op.get("weight")), example_of(op.node)
    if x is None or weight is None or out is None:
        return refuse(Why.UNKNOWN_SHAPE)
    if isinstance(weight, SparseTensor):
        return refuse(Why.SPARSE_AS_WRITTEN, detail="its weight has no dense form to split")
    dtype = out.dtype
    if dtype not in KERNEL_DTYPES:
        return refuse(Why.DTYPE, dtype=dtype)
    if 0 in weight.shape:
        return refuse(Why.NO_FEATURES)
    depth = math.prod(_by_output(weight, op).shape[1:])
    if depth * _DIGIT * fact.largest >= 2**31:
        return refuse(Why.TOO_DEEP, depth=depth)
    promise = _promise(fact, x, dtype, ctx)
    if isinstance(promise, Refusal):
        return promise
    width = _weight_range(op, ctx)
    if width is None:
        return refuse(Why.WEIGHT_NOT_FINITE)
    precision = _precision(ctx.options.precision, dtype)
    # weights that are trained grow apart: a digit more, before channels have to pay with floats
    width = max(width, _TRAINED) if trains(ctx) else width
    digits, spread = _DIGITS[precision], SPREAD
    while width > spread and digits <= _MOST_DIGITS:
        spread, digits = spread * 256, digits + 1
    if digits > _MOST_DIGITS:
        return refuse(Why.WEIGHT_RANGE, precision=precision)
    return Operands(op, fact, dtype, ctx.device(x.device).type, precision, digits, spread, promise)


def together_or_written(
    operands: Operands, site: gate.SiteInfo, behind: conv_neuron.Behind, ctx: Context
) -> Decision:  # fmt: skip
    """The decision about one launch of a layer and neurons behind it that are written by hand."""
    card, measured = card_and_times(operands, site) if ctx.target is None else (ctx.target.card, None)
    return conv_neuron.beside_written(gate.decide(site, card, measured), site, behind, card)


def choose(
    operands: Operands, site: gate.SiteInfo, ctx: Context, build: Callable[[str], fx.Node],
    behind: conv_neuron.Behind | None = None,
) -> Plan | Refusal:
    """Let the gate, or the user, pick the implementation.

    `behind`: the neurons behind the layer that can run with it in one launch.
    """
    forced = ctx.options.implementation
    if forced == "dense":
        return refuse(Why.FORCED_DENSE)
    card, measured = card_and_times(operands, site) if ctx.target is None else (ctx.target.card, None)
    if forced != "auto":
        decision = gate.forced(site, forced, card)
    elif site.device == "cuda" and ctx.target is None and not has_triton():
        ctx.report.note(f"everything stays dense. {NO_TRITON}")
        return refuse(Why.GATE, detail=NO_TRITON)
    else:
        decision = gate.decide(site, card, measured)
        if behind is not None:
            decision = conv_neuron.with_neurons(decision, site, behind, card)
    if decision.dense:
        return Refusal(Why.GATE, {"detail": decision.reason}, decision.estimate)
    node, strategy = operands.op.node, decision.implementation
    reason = f"input is {operands.fact.described()}; {decision.reason}"
    return Plan(
        lambda: {node: build(strategy)}, reason, strategy, operands.precision, estimate=decision.estimate
    )  # fmt: skip


def card_and_times(operands: Operands, site: gate.SiteInfo) -> tuple[Card, Mapping[str, float] | None]:
    """The site's card, and the times of its implementations, measured now where tuning is asked for."""
    x = example_of(operands.op.input)
    if x is None or x.device.type != "cuda" or not (torch.cuda.is_available() and has_triton()):
        return H100, None
    if isinstance(site.window, TransposedWindow):  # whose implementations are not timed as wholes
        return card_of(x.device), None
    if scoped_effort() is not None:
        tuner().choose(SPIKE_CONV, site, x.device)
    entry = default_cache().get(site.signature(device_of(x.device)))
    if entry is None:
        return card_of(x.device), None
    # a candidate is named after its strategy, before the version
    times = {name.partition("@")[0]: ms for name, ms in entry.times.items() if name not in entry.rejected}
    return card_of(x.device), times


def writes_bytes(operands: Operands, ctx: Context) -> bool:
    """Whether the input's producer can be expected to write bytes instead of full-width spikes.

    It does under Inductor, but only where every reader of the spikes takes bytes. In half precision most layers stay
    dense, so the spikes are written at full width all the same and the bytes would come on top, unless they are widened
    bytes. So they do behind a neuron that is trained, an operator into which Inductor cannot look, the library's as
    ours.
    """
    trained = ctx.gradients and _is_of_neuron(operands.op.input)
    if ctx.eager or trained:
        return False
    return operands.dtype is torch.float32 or made_of_bytes(operands.op.input, ctx)


def _is_of_neuron(x: Any) -> bool:
    """Whether x is what a library's neuron operator gives, in whatever shape."""
    _, made = unviewed(x)
    given: Any = made.args[0] if isinstance(made, fx.Node) and made.target is operator.getitem else made
    op = op_of(given)
    return op is not None and op.name in NEURON_CALLS


def trains(ctx: Context) -> bool:
    """Whether both gradients of a layer are to be expected. A graph that runs op by op may run in any mode."""
    return ctx.gradients and not ctx.eager


def hosted(operands: Operands, ctx: Context) -> bool:
    """Whether the host calls the layer's kernels each time, rather than replay them."""
    return ctx.eager or not replays(ctx.options, torch.device(operands.device))


def build_inputs(operands: Operands, ctx: Context) -> tuple[fx.Node, fx.Node, fx.Node | None, tuple[Any, ...]]:
    """Input, weight and bias of the sparse operator, and the last of its arguments: what it may count on."""
    op, node, promise = operands.op, operands.op.node, operands.promise
    weight, bias = attribute(op, "weight"), attribute(op, "bias")
    assert isinstance(weight, fx.Node)
    x, factor, read = cast(op.input, operands.dtype, node), None, []
    if promise.factor is not None:
        # in the dtype of the input first: that is what the spikes were multiplied with
        example = example_of(op.input)
        assert example is not None
        factor = cast(cast(_named(promise.factor, node, ctx), example.dtype, node), operands.dtype, node)
        read = _holders(promise.factor, ctx)
    keep_input = ctx.gradients and not ctx.analysis.seen_outside.isdisjoint((x, *read))
    return (
        x,
        cast(weight, operands.dtype, node),
        None if bias is None else cast(bias, operands.dtype, node),
        (promise.scale, factor, promise.binary, operands.spread, keep_input),
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
        return refuse(Why.NOT_SPIKES, detail=ctx.analysis.why_not(op.input) or "nothing is known about it")
    binary_up_to_scale = fact.integral and fact.finite and fact.within(0, 1) and fact.exact_zeros
    if binary_up_to_scale or (fact.fits_int8 and is_dyadic(fact.scale)):
        return fact
    if fact.fits_int8:
        return refuse(Why.SCALED, scale=fact.scale)
    reason = ctx.analysis.why_not(op.input)
    return refuse(Why.WRONG_DOMAIN, detail="; ".join([fact.described(), *([str(reason)] if reason else [])]))


def _promise(fact: SparsityFact, x: torch.Tensor, dtype: torch.dtype, ctx: Context) -> Promise | Refusal:
    """What the operator may be told of an input that obeys `fact`."""
    if isinstance(fact.scale, str):
        holders = _holders(fact.scale, ctx)
        if any(_changes(holder, ctx) for holder in holders):
            return refuse(Why.FACTOR, factor=fact.scale, detail="is written to in place")
        example = example_of(holders[0]) if holders else None
        if example is not None and example.device != x.device:
            return refuse(Why.FACTOR, factor=fact.scale, detail=f"is on {example.device}")
        return Promise(binary=True, factor=fact.scale)
    if is_dyadic(fact.scale):
        return Promise(not fact.exact, fact.scale)
    scale = float(torch.tensor(fact.scale, dtype=torch.float64, device="cpu").to(x.dtype).to(dtype))
    if not math.isfinite(scale):
        return refuse(Why.FACTOR, factor=fact.scale, detail=f"is beyond {dtype}")
    return Promise(True, scale)


def _changes(holder: fx.Node, ctx: Context) -> bool:
    given = holder.op in ("placeholder", "get_attr")
    return holder in ctx.written if given else not ctx.analysis.unchanged(holder, holder)


def _holders(name: str, ctx: Context) -> list[fx.Node]:
    """The nodes that a factor's name may mean."""
    return [n for n in ctx.gm.graph.nodes if n.name == name or (n.op == "get_attr" and n.target == name)]


def _named(name: str, like: fx.Node, ctx: Context) -> fx.Node:
    """The node that holds a factor, or an attribute read anew."""
    node = next((node for node in like.graph.nodes if node.name == name), None)
    if node is not None:
        return node
    path, _, last = name.rpartition(".")
    return _get_attr(name, getattr(ctx.gm.get_submodule(path), last), like)


def _get_attr(target: str, value: torch.Tensor, like: fx.Node) -> fx.Node:
    node = like.graph.get_attr(target)
    node.meta["example_value"] = _compat.fake_of(value, beside=example_of(like.all_input_nodes[0]))
    return node


def _precision(wanted: str, dtype: torch.dtype) -> str:
    if wanted != "auto":
        return wanted
    return "exact" if dtype is torch.float32 else "half"


def _by_output(weight: torch.Tensor, op: CanonicalOp) -> torch.Tensor:
    """A layer's weight with output channels first."""
    return by_output(weight, op.get("groups")) if op.name in TRANSPOSED else weight


def _weight_range(op: CanonicalOp, ctx: Context) -> float | None:
    """Largest ratio of a channel's greatest weight to the median of its non-zero ones; None if a weight is not finite.

    Not to their mean or root mean square: one outlier would hide in either, while its input may never fire.
    Weights whose values the capture does not know (computed, or still fake) count as ordinary.
    """
    weight = op.get("weight")
    value = ctx.values.get(weight) if isinstance(weight, fx.Node) else weight
    if not isinstance(value, torch.Tensor) or _compat.is_fake(value):
        return 1.0
    with torch.no_grad():
        rows = _by_output(value.detach(), op).float().abs().flatten(1)
        top = rows.amax(1)
        typical = rows.masked_fill(rows == 0, torch.nan).nanmedian(1).values  # NaN for a channel of zeros
        ratio = (top / typical).nan_to_num(1.0).amax()
        finite, widest = torch.stack((torch.isfinite(top).all().float(), ratio)).tolist()
    return widest if finite else None
