"""spikingjelly's neuron operators in training become `sparsecomp::trained_neuron`, which keeps its input alone.

`sj_lif`, `sj_if` and `sj_plif` keep the charge of every time step for their backward, at full width, and nobody can
compute it again but they. Ours computes it again from the input, and of that the partitioner knows how it was made: by
batch-norm from what a convolution gave, which is kept anyway. Charge, reset and surrogate gradient are the library's,
each operation in its order, so that the same spikes come out.
"""

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

import sparsecomp.ops  # noqa: F401  (registers the operator)
from sparsecomp.passes.engine.ordered import is_kept
from sparsecomp.passes.engine.rule import Context, Plan, Rule, Verdict, Why, call, refuse, replays
from sparsecomp.passes.graph.canonicalize import example_of, op_of
from sparsecomp.passes.spiking.half_precision import rounding
from sparsecomp.passes.spiking.lying import laid_as
from sparsecomp.passes.spiking.neuron_call import MAX_STEPS, NEURON_CALLS, arguments, gives_more, starting_number
from sparsecomp.passes.spiking.neurons_behind import unviewed
from sparsecomp.passes.spiking.norm_ahead import NormAhead, norm_ahead
from sparsecomp.reference.neuron import NUMBERS
from sparsecomp.reference.precision import KERNEL_DTYPES

_PLIF = "sj_plif::forward"


def consider(node: fx.Node, ctx: Context) -> Verdict:
    """Judge one node: every neuron operator in a graph that may be trained is a candidate."""
    op = op_of(node)
    if op is None or op.name not in NEURON_CALLS or not ctx.gradients:
        return None
    args, x = arguments(node), example_of(node.args[0])
    if x is None:
        return refuse(Why.UNKNOWN_SHAPE)
    obstacle = _obstacle(node, args, x, ctx)
    if obstacle is not None:
        return refuse(Why.NOT_FUSED, detail=obstacle)
    norm = norm_ahead(node, ctx) if _is_asked(ctx) else None
    reason = f"{x.shape[0]} time steps in one pass, and one for their gradients, which computes the charges again"
    dead, places = ((), ()) if norm is None else (norm.dead, (norm.place, node))
    reason = f"{'' if norm is None else 'with the batch-norm before it, '}{reason}"
    return Plan(lambda: _build(node, op.name, args, norm), reason, "fused", dead=dead, places=places)


RULE = Rule("train_neurons", consider, after=("fuse_neurons",))


def _obstacle(node: fx.Node, args: Mapping[str, Any], x: torch.Tensor, ctx: Context) -> str | None:
    if ctx.eager or ctx.transformed or ctx.options.implementation == "dense":
        return "the graph runs op by op or in a transform, or implementation='dense' was asked for"
    if ctx.device(x.device).type != "cuda" and ctx.options.neurons != "fuse":
        return "on the CPU the operator is no Triton kernel, and nothing is gained"
    if not _is_asked(ctx) and (x.dtype is not torch.float32 or replays(ctx.options, ctx.device(x.device))):
        return "memory='low' or neurons='fuse' asks for it: its time in half precision and CUDA graphs was not measured"
    v = example_of(node.args[1])
    if x.dtype not in KERNEL_DTYPES or x.dim() < 2 or v is None or v.dtype is not torch.float32:
        return f"{x.dtype} input of {x.dim()} dimensions, or a membrane that is not float32"
    if not isinstance(x.shape[0], int) or not 0 < x.shape[0] <= MAX_STEPS:
        return f"{x.shape[0]} time steps: unrolled up to {MAX_STEPS}"
    if args.get("surrogate_id") not in _SLOPES or not {"alpha", "detach_reset", "threshold", "reset"} <= {*args}:
        return "its surrogate gradient is not known"
    if args["store_v_seq"]:
        return "the membrane of every step is stored"
    if not all(is_kept(one, ctx) for one in node.all_input_nodes):
        return "what it reads is written to in place"
    if gives_more(node):
        return "more than its spikes and last membrane is used"
    return None


def _is_asked(ctx: Context) -> bool:
    return ctx.options.neurons == "fuse" or ctx.options.memory == "low"


def _build(
    node: fx.Node, name: str, args: Mapping[str, Any], norm: NormAhead | None
) -> Mapping[fx.Node, fx.Node]:
    x, v = node.args[:2]
    assert isinstance(v, fx.Node)
    x, times = _seen(x, node)
    rate = []
    if name == _PLIF:
        assert isinstance(args["w"], fx.Node)
        rate = [call(node.graph, node, torch.sigmoid, call(node.graph, node, torch.Tensor.float, args["w"]))]
    half = rounding(example_of(node.args[0]).dtype)
    if norm is not None:
        x, normed = norm.build()
        rate += normed
    step, numbers = description(name, args, norm is not None, half)
    start = starting_number(v)
    state = v if start is None else None
    target = torch.ops.sparsecomp.trained_neuron.default
    made = call(node.graph, node, target, x, [state], [start or 0.0], rate, numbers, step, times)
    items = {user: call(node.graph, node, operator.getitem, made, user.args[1]) for user in node.users}
    return {user: laid_as(item, user) for user, item in items.items()}


def _seen(x: Any, like: fx.Node) -> tuple[Any, int]:
    """What the neurons are given (T, …), and 1; or one step (1, …), and T, where a static stem shows it to all."""
    _, found = unviewed(x)
    op, example, shape = op_of(found), example_of(found), example_of(x).shape
    if op is None or op.name != "expand" or example is None:
        return x, 1
    before = example_of(op.input)
    if before is None or before.shape != (1, *example.shape[1:]) or shape[0] != example.shape[0]:
        return x, 1
    return call(like.graph, like, torch.reshape, op.input, (1, *shape[1:])), shape[0]


def description(
    name: str, args: Mapping[str, Any], normed: bool = False, half: str = ""
) -> tuple[str, list[float]]:  # fmt: skip
    """A step of one of spikingjelly's operators and its numbers, from its arguments by name.

    Args:
        normed: the last three parameters are a mean, a factor and a bias, which come first.
        half: what the result of that is rounded to, if not to float32.
    """
    text, x = _Text(), "x"
    if normed:
        mean, factor, bias = (f"p{i + (name == _PLIF)}" for i in range(3))
        x = text.emit("add", text.emit("mul", text.emit("sub", "x", mean), factor), bias)
        x = text.emit(half, x) if half else x
    reset, threshold = args["reset"], args["threshold"]
    rest, one = text.number(0.0 if reset is None else reset), text.number(1.0)
    if name == "sj_if::forward":
        charge = text.emit("add", "v0", x)
    else:
        over = ("mul", "p0") if name == _PLIF else ("div", text.number(args["tau"]))
        away = text.emit("sub", "v0", rest)
        leak = text.emit("sub", x, away) if args["decay_input"] else away
        leak = text.emit(over[0], leak, over[1])
        if args["decay_input"]:
            charge = text.emit("add", "v0", leak)
        else:
            charge = text.emit("add", text.emit("sub", "v0", leak), x)
    at = text.number(threshold)
    fires = text.emit("ge", charge, at)
    spike = text.emit("fire", fires, text.emit("sub", charge, at))
    again = text.emit("stop", spike) if args["detach_reset"] else spike
    if reset is None:
        after = text.emit("sub", charge, text.emit("mul", again, at))
    else:
        kept = text.emit("mul", text.emit("sub", one, again), charge)
        after = text.emit("add", text.emit("mul", again, rest), kept)
    pulled = text.pull("mul", "g", _SLOPES[args["surrogate_id"]](text, float(args["alpha"])))
    return "; ".join([*text.lines, f"spike {spike}", f"v0 {after}", *text.pulls, f"pull {pulled}"]), text.numbers


class _Text:
    """A description as it is written."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.pulls: list[str] = []
        self.numbers: list[float] = []

    def number(self, value: float) -> str:
        """The name of a number."""
        if float(value) not in self.numbers:
            self.numbers.append(float(value))
        assert len(self.numbers) <= NUMBERS
        return f"n{self.numbers.index(float(value))}"

    def emit(self, operation: str, *operands: str) -> str:
        """The name of an operation's result."""
        self.lines.append(f"t{len(self.lines)} = {' '.join((operation, *operands))}")
        return f"t{len(self.lines) - 1}"

    def pull(self, operation: str, *operands: str) -> str:
        """The same, of the gradient of firing."""
        self.pulls.append(f"b{len(self.pulls)} = {' '.join((operation, *operands))}")
        return f"b{len(self.pulls) - 1}"


def _sigmoid(text: _Text, alpha: float) -> str:
    s = text.pull("sigmoid", text.pull("mul", "u", text.number(alpha)))
    return text.pull("mul", text.pull("mul", text.pull("sub", text.number(1.0), s), s), text.number(alpha))


def _arctan(text: _Text, alpha: float) -> str:
    z = text.pull("mul", "u", text.number(math.pi / 2 * alpha))
    return text.pull("div", text.number(alpha / 2), text.pull("add", text.number(1.0), text.pull("mul", z, z)))


def _piecewise_quadratic(text: _Text, alpha: float) -> str:
    down = text.pull("mul", text.number(alpha * alpha), text.pull("abs", "u"))
    return text.pull("max", text.pull("sub", text.number(alpha), down), text.number(0.0))


def _piecewise_exp(text: _Text, alpha: float) -> str:
    down = text.pull("exp", text.pull("mul", text.number(-alpha), text.pull("abs", "u")))
    return text.pull("mul", text.number(alpha / 2), down)


def _soft_sign(text: _Text, alpha: float) -> str:
    z = text.pull("add", text.number(1 / alpha), text.pull("abs", "u"))
    return text.pull("div", text.number(1 / (2 * alpha)), text.pull("mul", z, z))


def _super_spike(text: _Text, alpha: float) -> str:
    z = text.pull("add", text.number(1.0), text.pull("abs", "u"))
    return text.pull("div", text.number(alpha), text.pull("mul", z, z))


def _erf(text: _Text, alpha: float) -> str:
    z = text.pull("mul", text.number(alpha), "u")
    down = text.pull("exp", text.pull("neg", text.pull("mul", z, z)))
    return text.pull("mul", text.number(alpha / math.sqrt(math.pi)), down)


_SLOPES: Mapping[int, Callable[[_Text, float], str]] = dict(
    enumerate((_sigmoid, _arctan, _piecewise_quadratic, _piecewise_exp, _soft_sign, _super_spike, _erf))
)
"""Slopes of the library's surrogates by its numbers for them."""
