"""What random programs are made of: each function adds one operator, or one small idiom, to a program.

Every operator is to be met in all its spellings, with the arguments that change its meaning.
"""

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from tests.fuzz.program import FLOATS, Program, Refused

NUMBERS = (0, 1, 2, -1, 3, 0.5, 0.25, -0.5, 1.5, 0.3, 1 / 3, 1e5, 1e30, 1e-50, True)
BOUNDS = (None, 0, 1, 2, -1, 0.5, -0.25, 6, 2049, 1e30, math.inf, -math.inf, math.nan)
FACTORS = (0.3, 0.5, 2.0, -1.5)
"""One-element factors that a program holds in a tensor."""
INTEGERS = (torch.int8, torch.uint8, torch.int32, torch.int64)
Step = Callable[[Program], Any]
STEPS: dict[str, Step] = {}


def step(function: Step) -> Step:
    """Registers a step under its name."""
    STEPS[function.__name__] = function
    return function


def _mask(p: Program, x: fx.Node) -> fx.Node:
    """Bits of the shape of `x`."""
    source = p.like(x)
    if p.values[source].dtype is torch.bool:
        return source
    return p.call(p.one([operator.gt, operator.ge, torch.lt, torch.le, torch.eq]), source, p.one((0, 0.5, 1)))


# ---- spikes -----------------------------------------------------------------------------------------------------


@step
def threshold(p: Program) -> None:
    x = p.floating()
    compare = p.one([operator.gt, operator.ge, operator.lt, torch.gt, torch.le, torch.ne])
    bits = p.call(compare, x, p.one((0, 0.5, 1.0, -0.25)))
    dtype = p.values[x].dtype
    p.one([
        lambda: p.method("to", bits, dtype), lambda: p.method("float", bits), lambda: p.method("type_as", bits, x),
        lambda: p.method("to", bits, x), lambda: p.method("to", bits, p.one((*FLOATS, *INTEGERS))), lambda: bits,
    ])()  # fmt: skip


@step
def spike_where(p: Program) -> None:
    x = p.floating()
    condition = p.call(operator.gt, x, p.one((0, 1)))
    p.one([
        lambda: p.call(torch.where, condition, 1.0, 0.0), lambda: p.call(torch.where, condition, x, 0.0),
        lambda: p.method("where", x, condition, 0.0), lambda: p.method("where", x, condition, p.like(x)),
        lambda: p.call(torch.Tensor.where, x, condition, 0.0), lambda: p.call(torch.where, condition, p.like(x), x),
    ])()  # fmt: skip


@step
def heaviside(p: Program) -> None:
    x = p.floating()
    values = p.call(p.one([torch.zeros_like, torch.ones_like, torch.clone]), x)
    p.one([lambda: p.call(torch.heaviside, x, values), lambda: p.method("heaviside", x, values)])()


@step
def straight_through(p: Program) -> None:
    x = p.floating()
    hard = p.method("to", p.call(operator.gt, x, p.one((0, 0.5))), p.values[x].dtype)
    soft = p.one([lambda: p.call(torch.sigmoid, x), lambda: p.call(torch.tanh, x), lambda: p.like(x)])()
    form = p.rng.randrange(3)
    if form == 0:
        p.call(operator.add, p.method("detach", p.call(operator.sub, hard, soft)), soft)
    elif form == 1:
        p.call(operator.add, hard, p.call(operator.sub, soft, p.method("detach", soft)))
    else:
        p.call(operator.sub, p.call(operator.add, hard, soft), soft)


@step
def neuron(p: Program) -> None:
    """A few steps of a hand-written neuron, its spikes gathered in one of the usual ways.

    Now and then something else happens between two steps, or a step is another than the others."""
    x = p.pick(lambda value: value.is_floating_point() and value.dim() > 1 and value.shape[0] <= 4)
    dtype, spikes = p.values[x].dtype, []
    charge, fire, reset = p.one(_CHARGES), p.one(_FIRES), p.one(_RESETS)
    decays, before = p.rng.random() < 0.2, p.call(torch.zeros_like, p.call(operator.getitem, x, 0))
    first = p.call(operator.getitem, x, 0)
    v: Any = p.one([
        lambda: p.call(torch.zeros_like, first), lambda: p.call(torch.full_like, first, 0.25), lambda: 0.0,
        lambda: p.like(first),
    ])()  # fmt: skip
    way = p.one(("stack", "cat", "zeros"))  # what is not initialised could be read as it is
    out = p.call(torch.zeros_like, x) if way == "zeros" else None
    for t in range(p.size(x, 0)):
        if p.rng.random() < 0.05:
            charge = p.one(_CHARGES)
        current = p.call(operator.getitem, x, t)
        if decays:  # takes up what it was before
            current = before = p.call(torch.add, p.call(torch.mul, before, 0.5), current)
        h = charge(p, current, v)
        spikes.append(fire(p, h, dtype))
        v = reset(p, h, spikes[-1])
        if p.rng.random() < 0.05:
            p.one((write, write_part, write_view, pair, threshold))(p)
        if out is not None:
            p.call(operator.setitem, out, t, spikes[-1])
    if out is None:
        p.call(torch.stack if way == "stack" else torch.cat, spikes)
    else:
        p.method("clone", out)
    if p.rng.random() < 0.5:
        p.call(operator.add, v, spikes[-1])


def _leaked(p: Program, v: Any, by: Callable[..., Any], number: float) -> Any:
    """What Python computes of a number does not show in a graph."""
    return p.call(by, v, number) if isinstance(v, fx.Node) else by(v, number)


_CHARGES: tuple[Callable[[Program, fx.Node, Any], fx.Node], ...] = (
    lambda p, x, v: p.call(operator.add, _leaked(p, v, operator.mul, 0.5), x),
    lambda p, x, v: p.call(operator.add, x, _leaked(p, v, operator.mul, 0.3)),
    lambda p, x, v: p.call(operator.add, v, p.call(operator.truediv, p.call(operator.sub, x, v), 3.0)),
    lambda p, x, v: p.call(operator.add, v, p.call(operator.mul, p.call(operator.sub, x, v), 0.3)),
    lambda p, x, v: p.call(operator.add, v, x),
    lambda p, x, v: p.call(torch.add, _leaked(p, v, operator.truediv, 2), p.call(operator.mul, x, 0.5)),
)
_FIRES: tuple[Callable[[Program, fx.Node, torch.dtype], fx.Node], ...] = (
    lambda p, h, dtype: p.method("to", p.call(operator.ge, h, 1.0), dtype),
    lambda p, h, dtype: p.method("to", p.call(torch.gt, p.call(operator.sub, h, 0.5), 0), dtype),
    lambda p, h, dtype: p.call(torch.heaviside, p.call(operator.sub, h, 0.5), p.call(torch.ones_like, h)),
    lambda p, h, dtype: p.method("type_as", p.call(torch.logical_not, p.call(operator.lt, h, 0.5)), h),
    lambda p, h, dtype: p.call(torch.where, p.call(operator.ge, h, 0.5), 1.0, 0.0),
)
_RESETS: tuple[Callable[[Program, fx.Node, fx.Node], fx.Node], ...] = (
    lambda p, h, s: p.call(operator.mul, h, p.call(operator.sub, 1.0, s)),
    lambda p, h, s: p.call(operator.sub, h, p.call(operator.mul, s, 0.5)),
    lambda p, h, s: p.call(torch.where, p.call(operator.gt, s, 0), 0.25, h),
    lambda p, h, s: p.method("masked_fill", h, p.call(operator.gt, s, 0.5), 0.0),
    lambda p, h, s: p.method("clone", h),
    lambda p, h, s: h,
)


@step
def random_bits(p: Program) -> None:
    p.exact = False
    x = p.floating()
    drop = p.one((F.dropout, F.dropout1d, F.dropout2d))
    p.one([
        lambda: p.call(drop, x, p.one((0.5, 0.75, 0.2, 0.0, 1.0)), True),
        lambda: p.call(torch.bernoulli, p.call(torch.sigmoid, x)), lambda: p.call(torch.rand_like, x),
    ])()  # fmt: skip


@step
def constants(p: Program) -> None:
    x, number = p.pick(), p.one((0, 1, 2, 0.5, 0.3, 1e5, True))
    shape = tuple(p.values[x].shape)
    dtype = p.one((torch.float32, torch.float16, torch.int8, torch.int64, torch.bool))
    p.one([
        lambda: p.call(torch.zeros_like, x), lambda: p.call(torch.ones_like, x, dtype=dtype),
        lambda: p.call(torch.full_like, x, number), lambda: p.method("new_zeros", x, shape),
        lambda: p.method("new_ones", x, *shape), lambda: p.method("new_full", x, shape, number),
        lambda: p.call(torch.full, shape, number, dtype=dtype), lambda: p.call(torch.zeros, *shape, dtype=dtype),
        lambda: p.call(torch.tensor, number, dtype=dtype), lambda: p.call(torch.as_tensor, x, dtype=dtype),
        lambda: p.call(torch.tensor, [0, 1, number], dtype=dtype), lambda: p.call(torch.as_tensor, x),
        lambda: p.call(F.one_hot, p.method("to", p.call(operator.gt, x, 0), torch.int64), 2),
    ])()  # fmt: skip


# ---- arithmetic -------------------------------------------------------------------------------------------------

PAIRS = {
    "add": (operator.add, torch.add, "add"), "sub": (operator.sub, torch.sub, "sub"),
    "mul": (operator.mul, torch.mul, "mul"), "rsub": (torch.rsub,), "div": (operator.truediv, torch.div, "div"),
    "floor_divide": (operator.floordiv, torch.floor_divide), "maximum": (torch.maximum, "maximum", torch.max, "max"),
    "minimum": (torch.minimum, torch.min), "pow": (operator.pow, torch.pow), "remainder": (torch.remainder,),
    "fmod": (torch.fmod,), "atan2": (torch.atan2,),
}  # fmt: skip


@step
def pair(p: Program) -> None:
    target = p.one(PAIRS[p.one(("add", "add", "mul", "mul", "sub", *PAIRS))])
    x = p.pick()
    other = p.like(x) if p.rng.random() < 0.6 else p.one(NUMBERS)
    kwargs: dict[str, Any] = {}
    if target in (torch.add, torch.sub, "add", "sub") and p.rng.random() < 0.2:
        kwargs["alpha"] = p.one((1, 2, -1))
    if target in (torch.div, "div") and p.rng.random() < 0.4:
        kwargs["rounding_mode"] = p.one((None, "floor", "trunc"))
    operands = (other, x) if not isinstance(target, str) and not kwargs and p.rng.random() < 0.2 else (x, other)
    _call(p, target, *operands, **kwargs)


def _call(p: Program, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    return p.method(target, *args, **kwargs) if isinstance(target, str) else p.call(target, *args, **kwargs)


@step
def factor(p: Program) -> None:
    """Spikes times a number that only a tensor holds."""
    x, value = p.floating(), p.one(FACTORS)
    held = p.input(torch.full(p.one(((), (1,))), value, dtype=p.one((torch.float32, p.values[x].dtype))), "factor")
    p.one([lambda: p.call(operator.mul, x, held), lambda: p.call(operator.mul, held, x)])()


UNARY = (
    torch.abs, torch.neg, torch.sign, torch.sgn, torch.round, torch.floor, torch.ceil, torch.trunc, torch.square,
    torch.relu, F.relu, F.relu6, F.leaky_relu, F.gelu, F.silu, F.elu, torch.sigmoid, torch.tanh, torch.exp, torch.sqrt,
    torch.nan_to_num, torch.erf, torch.sin, F.hardtanh, F.hardsigmoid, F.softsign, torch.isnan, torch.isinf,
    torch.isfinite, torch.logical_not, torch.bitwise_not, torch.clone, torch.detach, torch.reciprocal, torch.frac,
    "abs", "neg", "round", "sign", "relu", "contiguous", "bool", "positive", operator.neg, operator.abs, "logical_not",
)  # fmt: skip


@step
def unary(p: Program) -> None:
    _call(p, p.one(UNARY), p.pick())


@step
def clamp(p: Program) -> None:
    x, low, high = p.pick(), p.one(BOUNDS), p.one(BOUNDS)
    p.one([
        lambda: p.call(torch.clamp, x, low, high), lambda: p.method("clamp", x, min=low, max=high),
        lambda: p.method("clamp", x, max=high), lambda: p.call(torch.clamp_min, x, 0 if low is None else low),
        lambda: p.call(torch.clamp_max, x, 0 if high is None else high), lambda: p.call(torch.clamp, x, p.like(x)),
        lambda: p.call(torch.clip, x, 0, 1), lambda: p.call(F.hardtanh, x, -1, p.one((0.5, 2))),
        lambda: p.call(F.threshold, x, 0.5, p.one((0, 2.0))),
        lambda: p.call(torch.round, x, decimals=p.one((0, 1, -1))),
    ])()  # fmt: skip


@step
def power(p: Program) -> None:
    x = p.pick()
    p.one([
        lambda: p.call(operator.pow, x, p.one((2, 3, 0.5, 1, 0, -1, 0.0, math.inf))),
        lambda: p.call(torch.square, x), lambda: p.method("pow", x, p.like(x)), lambda: p.call(torch.pow, 2, x),
    ])()  # fmt: skip


@step
def logical(p: Program) -> None:
    x = p.pick()
    a = _mask(p, x)
    b = _mask(p, x)
    both = p.one([operator.and_, operator.or_, operator.xor, torch.logical_and, torch.logical_or, torch.bitwise_and])
    p.one([
        lambda: p.call(both, a, b), lambda: p.call(operator.invert, a), lambda: p.call(torch.logical_xor, a, x),
        lambda: p.call(torch.logical_and, x, p.like(x)), lambda: p.call(both, p.pick(), p.like(x)),
    ])()  # fmt: skip


@step
def select_values(p: Program) -> None:
    x = p.pick()
    mask, other = _mask(p, x), p.one([p.like(x), *NUMBERS])
    p.one([
        lambda: p.call(torch.where, mask, x, other), lambda: p.method("where", x, mask, other),
        lambda: p.call(torch.where, mask, other, x), lambda: p.method("masked_fill", x, mask, p.one((0, 1, 0.5, -1))),
        lambda: p.call(torch.masked_fill, x, mask, p.one((0, 1e4))),
        lambda: p.call(torch.masked_scatter, x, mask, p.like(x)), lambda: p.call(torch.where, mask, 1, 0),
        lambda: p.call(torch.where, mask, other, p.one(NUMBERS)), lambda: p.call(operator.mul, x, mask),
    ])()  # fmt: skip


@step
def convert(p: Program) -> None:
    x = p.pick()
    dtype = p.one((*FLOATS, *INTEGERS, torch.bool, torch.float64))
    p.one([
        lambda: p.method("to", x, dtype), lambda: p.method("to", x, dtype=dtype), lambda: p.method("type", x, dtype),
        lambda: p.method("to", x, "cpu", dtype), lambda: p.method("type_as", x, p.pick()),
        lambda: p.method(p.one(("float", "half", "bfloat16", "int", "long", "byte", "bool", "double")), x),
    ])()  # fmt: skip


@step
def reinterpret(p: Program) -> None:
    x = p.pick(lambda value: value.dtype in (torch.float16, torch.bfloat16))
    p.exact = False
    p.one([
        lambda: p.method("view", x, torch.int16), lambda: p.method("view", x, dtype=torch.int16),
        lambda: p.method("view", x, torch.float16),
    ])()  # fmt: skip


# ---- reductions and pooling -------------------------------------------------------------------------------------


@step
def reduce(p: Program) -> None:
    x, keep = p.pick(), p.one((True, False))
    dim = p.dim(x)
    name = p.one(("sum", "sum", "mean", "amax", "amin", "any", "all", "prod", "std", "argmax", "norm"))
    dtype = p.one((None, torch.float16, torch.int64, torch.float32)) if name in ("sum", "mean") else None
    kwargs = {} if dtype is None else {"dtype": dtype}
    p.one([
        lambda: p.method(name, x, **kwargs), lambda: p.method(name, x, dim, keepdim=keep, **kwargs),
        lambda: p.call(getattr(torch, name), x, dim=dim), lambda: p.method(name, x, (dim,), keep, **kwargs),
        lambda: p.call(torch.cumsum, x, dim), lambda: p.method("cumsum", x, dim, dtype=p.one((None, torch.float16))),
        lambda: p.method("max", x), lambda: p.call(torch.min, x),
    ])()  # fmt: skip


@step
def extremum(p: Program) -> None:
    x = p.pick()
    found = p.call(p.one((torch.max, torch.min)), x, p.dim(x))
    p.call(operator.getitem, found, p.one((0, 0, 1, -1, -2)))


@step
def pool(p: Program) -> None:
    x = p.floating(rank=p.one((3, 4)))
    rank = p.values[x].dim() - 2
    pools = ((F.max_pool1d, F.avg_pool1d), (F.max_pool2d, F.avg_pool2d))[rank - 1]
    kernel, stride = p.one((1, 2, 3, 4)), p.one((None, 1, 2))
    padding, ceil, inside = p.one((0, 0, 1)), p.one((False, True)), p.one((True, False))
    divisor = {"divisor_override": p.one((None, 1, 2, 3, 8))} if rank == 2 else {}
    indices = p.rng.random() < 0.2
    p.one([
        lambda: p.call(pools[0], x, kernel, stride, padding, p.one((1, 1, 2)), ceil, indices),
        lambda: p.call(pools[0], x, kernel, stride, padding, ceil_mode=ceil),
        lambda: p.call(pools[1], x, kernel, stride, padding, ceil, inside, **divisor),
        lambda: p.call(pools[1], x, (kernel,) * rank, ceil_mode=ceil, count_include_pad=inside, padding=padding),
        lambda: p.call((F.adaptive_avg_pool1d, F.adaptive_avg_pool2d)[rank - 1], x, p.one((1, 2, 3))),
        lambda: p.call((F.adaptive_max_pool1d, F.adaptive_max_pool2d)[rank - 1], x, p.one((1, 2))),
    ])()  # fmt: skip
    last = next(iter(reversed(p.graph.nodes)))  # of torch 2.11 no iterator
    if isinstance(p.values[last], tuple):
        p.call(operator.getitem, last, p.one((0, 1)))


@step
def resize(p: Program) -> None:
    x = p.pick(lambda value: value.dim() == 4)
    pads = [p.one((0, 1, 2, -1)) for _ in range(4)]
    p.one([
        lambda: p.call(F.pad, x, pads), lambda: p.call(F.pad, x, pads, value=p.one((1, 0.5, 2.0))),
        lambda: p.call(F.pad, x, (1, 1, 1, 1), p.one(("reflect", "replicate"))),
        lambda: p.call(F.interpolate, x, scale_factor=2), lambda: p.call(F.interpolate, x, None, 2, "bilinear"),
        lambda: p.call(F.unfold, x, p.one((1, 2)), padding=p.one((0, 1))), lambda: p.call(F.unfold, x, 2, 1, 1),
        lambda: p.method("unfold", x, 2, 2, 2), lambda: p.call(F.pixel_shuffle, x, 2),
    ])()  # fmt: skip


# ---- shapes and views -------------------------------------------------------------------------------------------


@step
def reshape(p: Program) -> None:
    x = p.pick()
    value, dim = p.values[x], p.dim(x)
    rank = value.dim()
    order = p.rng.sample(range(rank), rank)
    p.one([
        lambda: p.method("view", x, -1), lambda: p.method("reshape", x, (-1, value.shape[-1])),
        lambda: p.call(torch.flatten, x, p.one((0, 1))), lambda: p.method("flatten", x, -2),
        lambda: p.method("transpose", x, dim, 0), lambda: p.method("permute", x, *order),
        lambda: p.call(torch.permute, x, order), lambda: p.method("unsqueeze", x, 0), lambda: p.method("squeeze", x),
        lambda: p.method("expand", x, 2, *value.shape), lambda: p.call(getattr, x, p.one(("T", "mT", "data"))),
        lambda: p.method("unflatten", x, dim, (-1, 2)), lambda: p.call(torch.movedim, x, dim, 0),
        lambda: p.method("view_as", x, p.like(x)), lambda: p.method("expand_as", x, p.pick()),
        lambda: p.method("reshape", x, p.values[p.pick()].shape),
    ])()  # fmt: skip


@step
def part(p: Program) -> None:
    x = p.pick()
    dim = p.dim(x)
    length = p.size(x, dim)
    rows = p.input(torch.tensor([p.rng.randrange(length) for _ in range(p.one((1, length)))]), "rows")
    p.one([
        lambda: p.call(operator.getitem, x, 0), lambda: p.call(operator.getitem, x, (slice(None), slice(0, 2))),
        lambda: p.call(operator.getitem, x, (Ellipsis, slice(None, None, 2))), lambda: p.method("select", x, dim, -1),
        lambda: p.method("narrow", x, dim, 0, max(1, length // 2)), lambda: p.call(torch.index_select, x, dim, rows),
        lambda: p.method("repeat", x, *(1 for _ in p.values[x].shape[1:]), 2), lambda: p.call(torch.roll, x, 1, dim),
        lambda: p.call(torch.flip, x, [dim]), lambda: p.call(torch.repeat_interleave, x, 2, dim),
        lambda: p.call(operator.getitem, x, rows), lambda: p.call(operator.getitem, x, (None, Ellipsis)),
        lambda: p.call(torch.tril, x), lambda: p.method("triu", x, 1), lambda: p.call(torch.diagonal, x, 0, 0, -1),
        lambda: p.call(torch.masked_select, x, _mask(p, x)), lambda: p.method("tile", x, (2,)),
        lambda: p.call(torch.take_along_dim, x, p.call(torch.argmax, x, dim, keepdim=True), dim),
        lambda: p.call(torch.gather, x, dim, p.call(torch.argmax, x, dim, keepdim=True)),
    ])()  # fmt: skip


@step
def pieces(p: Program) -> None:
    x = p.pick()
    dim = p.dim(x)
    several = p.one([
        lambda: p.method("chunk", x, 2, dim), lambda: p.call(torch.split, x, p.one((1, 2)), dim),
        lambda: p.method("split", x, 2, dim=dim), lambda: p.method("unbind", x, dim),
        lambda: p.call(torch.tensor_split, x, 2, dim),
    ])()  # fmt: skip
    item = p.call(operator.getitem, several, p.one((0, -1)))
    if p.rng.random() < 0.4:
        p.method("add_", item, p.one((1, p.like(item))))
        p.call(torch.neg, x)


@step
def join(p: Program) -> None:
    x = p.pick()
    others = [p.like(x) for _ in range(p.one((1, 2)))]
    p.one([
        lambda: p.call(torch.cat, [x, *others], p.one((0, -1))), lambda: p.call(torch.stack, [x, *others]),
        lambda: p.call(torch.hstack, [x, *others]), lambda: p.call(torch.vstack, (x, *others)),
        lambda: p.call(torch.concat, [x, p.pick()], dim=0),
    ])()  # fmt: skip


# ---- writes -----------------------------------------------------------------------------------------------------


@step
def write(p: Program) -> None:
    x = p.pick()
    other, number = p.like(x), p.one(NUMBERS)
    name = p.one(("add_", "mul_", "sub_", "div_", "copy_", "clamp_", "logical_and_", "pow_"))
    mask = _mask(p, x)
    p.one([
        lambda: p.method(name, x, other), lambda: p.method(name, x, number), lambda: p.method("zero_", x),
        lambda: p.method("fill_", x, number), lambda: p.method("relu_", x), lambda: p.method("neg_", x),
        lambda: p.call(F.relu, x, inplace=True), lambda: p.call(F.relu, x, True), lambda: p.method("round_", x),
        lambda: p.method("masked_fill_", x, mask, number), lambda: p.call(operator.iadd, x, other),
        lambda: p.call(operator.imul, x, number), lambda: p.call(torch.add, x, other, out=p.like(x)),
        lambda: p.method("index_fill_", x, 0, p.input(torch.tensor([0]), "rows"), p.one((0, 1, 2))),
        lambda: p.method("gt_", x, 0), lambda: p.call(F.leaky_relu, x, 0.1, True), lambda: p.method("exp_", x),
        lambda: p.method("masked_scatter_", x, mask, other), lambda: p.call(F.threshold, x, 0.5, 0, True),
    ])()  # fmt: skip


@step
def write_part(p: Program) -> None:
    x = p.pick(lambda value: value.dim() > 0)
    source = p.one([p.one(NUMBERS), p.pick()])
    rows = p.input(torch.tensor([p.rng.randrange(p.size(x, 0))]), "rows")
    row = p.call(operator.getitem, p.like(x), slice(0, 1))
    p.one([
        lambda: p.call(operator.setitem, x, 0, source), lambda: p.call(operator.setitem, x, slice(0, 2), source),
        lambda: p.call(operator.setitem, x, _mask(p, x), p.one(NUMBERS)),
        lambda: p.method("index_copy_", x, 0, rows, row),
        lambda: p.method("index_put_", x, (rows,), row), lambda: p.method("index_put_", x, (rows,), row, True),
        lambda: p.method("index_add_", x, 0, rows, row), lambda: p.call(torch.index_fill, x, 0, rows, p.one((0, 1))),
        lambda: p.method("scatter_", x, 0, p.call(torch.argmax, x, 0, True), p.one((1, 0, 2))),
        lambda: p.method("scatter", x, 0, p.call(torch.argmax, x, 0, True), row),
        lambda: p.method("scatter_", x, 0, p.call(torch.argmax, x, 0, True), row, reduce="add"),
    ])()  # fmt: skip


@step
def write_view(p: Program) -> None:
    """A write through a view, and a reader of what it is a view of."""
    x = p.pick(lambda value: value.dim() > 0)
    view = p.one([
        lambda: p.method("view", x, -1), lambda: p.call(operator.getitem, x, 0), lambda: p.method("detach", x),
        lambda: p.method("transpose", x, 0, -1), lambda: p.method("reshape", x, -1), lambda: p.method("contiguous", x),
        lambda: p.call(torch.flatten, x), lambda: p.method("expand_as", x, x), lambda: p.method("to", x, torch.float32),
        lambda: p.call(F.dropout, x, 0.5, False), lambda: p.call(torch.as_tensor, x), lambda: p.call(torch.squeeze, x),
    ])()  # fmt: skip
    p.method(p.one(("add_", "mul_", "fill_")), view, p.one((2, 0.5, 3, -1)))
    p.call(p.one((torch.neg, torch.clone, torch.relu)), x)


@step
def reshape_in_place(p: Program) -> None:
    x = p.pick(lambda value: value.dim() > 1)
    p.one([
        lambda: p.method("unsqueeze_", x, p.one((0, 1))), lambda: p.method("transpose_", x, 0, 1),
        lambda: p.method("squeeze_", x), lambda: p.method("t_", x),
    ])()  # fmt: skip
    p.method(p.one(("sum", "mean", "amax")), x, 0)


@step
def state(p: Program) -> None:
    """A buffer that the program reads, then writes."""
    x = p.pick()
    dtype = p.values[x].dtype
    held = p.input(p.data(p.values[x].shape).gt(0).to(dtype), "state")
    read = p.one([lambda: held, lambda: p.call(operator.gt, held, 0.5), lambda: p.call(operator.add, held, x)])()
    if p.rng.random() < 0.7:
        p.method("copy_", held, p.like(x))
    p.call(torch.clone, read)


# ---- layers -----------------------------------------------------------------------------------------------------


def _weight(p: Program, *shape: int, dtype: torch.dtype) -> fx.Node:
    return p.input(p.data(shape, dtype).requires_grad_(p.training), "weight")


def _bias(p: Program, size: int, dtype: torch.dtype) -> fx.Node | None:
    return _weight(p, size, dtype=dtype) if p.rng.random() < 0.5 else None


@step
def linear(p: Program) -> None:
    x = p.spikes(lambda value: value.dim() > 0)
    dtype = p.values[x].dtype
    weight = _weight(p, 3, p.size(x, -1), dtype=dtype)
    p.layers.append(
        p.one([
            lambda: p.call(F.linear, x, weight, _bias(p, 3, dtype)), lambda: p.call(F.linear, x, weight),
            lambda: p.call(operator.matmul, x, p.method("t", weight)),
        ])()
    )  # fmt: skip


@step
def convolution(p: Program) -> None:
    x = p.spikes(lambda value: value.dim() in (3, 4))
    rank, dtype, channels = p.values[x].dim() - 2, p.values[x].dtype, p.size(x, 1)
    function = (F.conv1d, F.conv2d)[rank - 1]
    groups = p.one((1, 1, channels))
    size = p.one((1, 2, 3))
    weight = _weight(p, 2 * groups, channels // groups, *([size] * rank), dtype=dtype)
    stride, padding, dilation = p.one((1, 2)), p.one((0, 1, "same", "valid")), p.one((1, 1, 2))
    # torch 2.13 on a CPU dies (SIGSEGV) of a strided, padded float16 kernel of size 1 with dilation 2.
    dilation = 1 if size == 1 else dilation
    p.layers.append(p.call(function, x, weight, _bias(p, 2 * groups, dtype), stride, padding, dilation, groups))


@step
def transposed_convolution(p: Program) -> None:
    x = p.spikes(lambda value: value.dim() in (3, 4))
    rank, dtype, channels = p.values[x].dim() - 2, p.values[x].dtype, p.size(x, 1)
    groups, size, stride, padding, dilation = p.one((1, channels)), p.one((2, 3)), p.one((1, 2, 3)), 1, p.one((1, 2))
    more = p.rng.randrange(max(stride, dilation))
    function = (F.conv_transpose1d, F.conv_transpose2d)[rank - 1]
    out = [(n - 1) * stride - 2 * padding + dilation * (size - 1) + more + 1 for n in p.values[x].shape[2:]]
    padding = padding if min(out) > 0 else 0
    weight = _weight(p, channels, 2, *([size] * rank), dtype=dtype)
    bias = _bias(p, 2 * groups, dtype)
    p.layers.append(p.call(function, x, weight, bias, stride, padding, more, groups, dilation))


@step
def static(p: Program) -> None:
    """A layer on the same at every time step, in one of the spellings, and what reads it."""
    # the sum of gradients of all steps times infinity is not the sum of the products
    x = p.pick(lambda value: value.is_floating_point() and 1 < value.dim() < 5 and bool(value.isfinite().all()))
    value, times = p.values[x], p.one((2, 3))
    rank = value.dim()
    repeated = p.one([
        lambda: p.method("repeat", x, times, *[1] * rank), lambda: p.method("expand", x, times, *value.shape),
        lambda: p.call(torch.stack, [x] * times, p.one((0, 1))), lambda: p.call(torch.cat, [x] * times),
        lambda: p.method("expand", p.call(operator.getitem, x, (slice(None), None)), -1, times, *value.shape[1:]),
        lambda: p.method("repeat_interleave", x, times, 0), lambda: p.method("tile", x, (times, *[1] * rank)),
        lambda: p.call(torch.cat, [x, x, p.like(x)]), lambda: x,
    ])()  # fmt: skip
    for _ in range(p.one((0, 1, 2))):
        repeated = _read(p, repeated, times)
    weight = _weight(p, 2, p.size(repeated, -1), dtype=value.dtype)
    calls = [p.call(F.linear, _step_of(p, repeated, times, t), weight) for t in range(p.one((1, 1, 2, 3)))]
    read = [_read(p, p.one([lambda one=one: one, lambda one=one: p.call(torch.tanh, one)])(), times) for one in calls]
    p.one([
        lambda: p.call(torch.neg, read[-1]), lambda: p.call(torch.stack, read), lambda: p.call(torch.sum, read[-1], 0),
        lambda: p.method("add_", read[-1], 1), lambda: p.call(torch.cumsum, read[-1], 0), lambda: read[-1],
        lambda: p.call(torch.add, read[0], read[-1]), lambda: p.method("mul_", repeated, 2),
    ])()  # fmt: skip


def _step_of(p: Program, x: fx.Node, times: int, t: int) -> fx.Node:
    if p.rng.random() < 0.6:
        return x
    return p.one([lambda: p.call(operator.getitem, x, t % times), lambda: p.method("relu", x)])()


def _read(p: Program, x: fx.Node, times: int) -> fx.Node:
    """What keeps the steps apart, mostly."""
    value = p.values[x]
    rows = math.prod(value.shape[:-1])
    return p.one([
        lambda: p.call(torch.flatten, x, 0, 1), lambda: p.method("unflatten", x, 0, (times, -1)),
        lambda: p.method("reshape", x, -1, value.shape[-1]), lambda: p.method("reshape", x, times, -1, value.shape[-1]),
        lambda: p.method("reshape", x, rows // times, times, -1), lambda: p.method("transpose", x, 0, 1),
        lambda: p.call(torch.mul, x, p.one((0.5, 2))), lambda: p.call(torch.add, x, p.like(x)),
        lambda: p.call(torch.sub, x, p.call(operator.getitem, x, slice(0, 1))), lambda: p.method("clone", x),
        lambda: p.call(F.avg_pool1d, x, 1), lambda: p.method("unsqueeze", x, p.dim(x)),
        lambda: p.call(F.pad, x, (0, 1)), lambda: p.call(F.pad, x, (0, 0, 1, 0)),
        lambda: p.call(F.dropout, x, 0.5, False), lambda: x,
    ])()  # fmt: skip


@step
def loop(p: Program) -> None:
    """A layer that runs at each time step on its own, in one of the spellings, and what reads its results."""
    x = p.spikes(lambda value: 1 < value.dim() < 5 and 1 < value.shape[0] <= 4)
    times, weight = p.size(x, 0), _weight(p, 3, p.size(x, -1), dtype=p.values[x].dtype)
    whole, take = p.one([
        lambda: (x, lambda t: p.call(operator.getitem, x, t)), lambda: (x, lambda t: p.method("select", x, 0, t)),
        lambda: (parts := p.method("unbind", x), lambda t: p.call(operator.getitem, parts, t)),
    ])()  # fmt: skip
    places = p.one([range(times), range(times), range(1, times), range(-times, 0), range(times - 1, -1, -1), (0, 0)])
    before, behind = (p.one([
        lambda one: one, lambda one: one, lambda one: p.method("unsqueeze", one, 0), lambda one: p.call(F.relu, one),
        lambda one: p.method("flatten", one), lambda one: p.method("unsqueeze", one, 1), lambda one: p.method("t", one),
        lambda one: p.method("reshape", one, p.size(one, 0), -1), lambda one: p.call(operator.getitem, one, 0),
        lambda one: p.call(F.max_pool1d, one, 1), lambda one: p.call(operator.mul, one, 2),
    ]) for _ in range(2))  # fmt: skip
    results = [behind(p.call(F.linear, before(take(t)), weight)) for t in places]
    p.one([
        lambda: p.call(torch.stack, results), lambda: p.call(torch.stack, results[::-1]), lambda: whole,
        lambda: p.call(torch.stack, results, -1), lambda: p.call(torch.cat, results),
        lambda: p.call(torch.add, results[0], results[-1]), lambda: p.method("add_", results[-1], 1),
    ])()  # fmt: skip


@step
def product(p: Program) -> None:
    x = p.pick(lambda value: value.dim() > 1)
    y = p.like(x)
    p.one([
        lambda: p.call(operator.matmul, x, p.method("transpose", y, -1, -2)), lambda: p.call(torch.matmul, x, y),
        lambda: p.call(torch.mm, x, y), lambda: p.call(torch.bmm, x, y), lambda: p.call(torch.einsum, "...i->...", x),
        lambda: p.call(torch.outer, p.method("flatten", x), p.method("flatten", y)),
    ])()  # fmt: skip


@step
def attention(p: Program) -> None:
    """A product of three tensors, mostly of spikes, whose middle is mostly the larger way to compute it."""
    q = p.spikes(lambda value: value.dim() > 1)
    shape = p.values[q].shape
    k, v = (p.spikes(lambda value: value.shape == shape) for _ in range(2))
    rows, columns = (" nd", " md") if shape[-2] > shape[-1] else (" dn", " dm")
    turned = [p.method("transpose", one, -1, -2) for one in (q, k, v)]
    tokens, keys, values = (q, turned[1], v) if rows == " nd" else (turned[0], k, turned[2])
    scores = p.one([
        lambda: p.call(operator.matmul, tokens, keys),
        lambda: p.call(torch.einsum, f"...{rows},...{columns}->...nm", q, k),
    ])()  # fmt: skip
    if p.rng.random() < 0.5:
        scores = p.call(operator.mul, scores, 0.25)
    p.layers.append(p.call(operator.matmul, scores, values))


@step
def normalise(p: Program) -> None:
    x = p.floating()
    if p.values[x].dim() < 2:
        raise Refused("no channels")
    channels, dtype = p.size(x, 1), p.values[x].dtype
    mean = p.input(torch.zeros(channels, dtype=dtype), "mean")
    var = p.input(torch.ones(channels, dtype=dtype), "var")
    p.one([
        lambda: p.call(F.batch_norm, x, mean, var, None, None, p.one((False, True))),
        lambda: p.call(torch.batch_norm, x, None, None, mean, var, p.training, 0.1, 1e-5, False),
        lambda: p.call(F.layer_norm, x, p.values[x].shape[-1:]), lambda: p.call(F.softmax, x, -1),
        lambda: p.call(torch.log_softmax, x, 1), lambda: p.call(F.normalize, x),
    ])()  # fmt: skip


WEIGHTS = {
    "threshold": 6, "neuron": 2, "pair": 4, "linear": 4, "convolution": 4, "pool": 3, "unary": 3, "clamp": 2,
    "static": 2, "loop": 2,
}  # fmt: skip
"""How much likelier than once a step is."""


def generate(seed: int) -> Program:
    """The program of a seed."""
    p = Program(seed)
    shapes = ((2, 3, 4, 4), (2, 3, 4, 4), (2, 2, 5, 3), (3, 4, 6), (3, 4, 6), (4, 8), (2, 4))
    shape = p.one(shapes)
    for _ in range(p.one((1, 1, 2))):
        dtype = p.one((torch.float32, torch.float32, torch.float32, *FLOATS))
        value = p.data(shape, dtype, special=p.rng.random() < 0.3)
        p.input(value.requires_grad_(p.training and p.rng.random() < 0.5), "x")
    names = list(STEPS)
    weights = [WEIGHTS.get(name, 1) for name in names]
    length = p.rng.randrange(4, 14)
    for name in ["threshold", *p.rng.choices(names, weights, k=length), p.one(("linear", "convolution"))]:
        try:
            STEPS[name](p)
        except Refused:
            continue
    return p
