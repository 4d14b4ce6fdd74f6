"""Every transfer function: what it must say of spikes and counts, and that it holds for whatever flows.

`s` are spikes, `c` counts from {1, 2}, `x` anything. What is claimed is written down by hand as (least, greatest,
scale), with False behind where it may be NaN or infinite; every case also runs under the checker on odd inputs, with
and without shapes.
"""

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fact_checker import FactChecker, check
from torch import Tensor, fx, nn
from torch.fx.passes.shape_prop import ShapeProp

import sparsecomp.ops  # noqa: F401  (registers the operators)
from sparsecomp.passes.facts.analysis import analyse
from sparsecomp.passes.facts.registry import TRANSFERS, Items, LostKind
from sparsecomp.reference.facts import SparsityFact

ANY = "anything: only the checker judges"
NOTHING = None
"""No grid of values may be claimed, and no zeros."""
ZEROS = "no grid, but zeros"

CASES: dict[str, list[tuple[Callable[..., Any], Any]]] = {
    "add": [
        (lambda s, c, x: s + s, (0, 2, 1.0)),
        (lambda s, c, x: c + 1, (2, 3, 1.0)),
        (lambda s, c, x: s + 0.5, (1, 3, 0.5)),
        (lambda s, c, x: torch.add(s, c, alpha=2), NOTHING),
        (lambda s, c, x: s + x, NOTHING),
        (lambda s, c, x: x + s, NOTHING),
        (lambda s, c, x: x + 1, NOTHING),
        (lambda s, c, x: s + 0.3, NOTHING),
        (lambda s, c, x: s + float("nan"), NOTHING),
        (lambda s, c, x: s * 0.3 + s * 0.3, ZEROS),
        (lambda s, c, x: s + 1e30, NOTHING),
    ],
    "sub": [(lambda s, c, x: c - s, (0, 2, 1.0)), (lambda s, c, x: s - s, (0, 0, 1.0)), (lambda s, c, x: x - x, ANY)],
    "rsub": [(lambda s, c, x: 1 - s, (0, 1, 1.0)), (lambda s, c, x: torch.rsub(c, s), (-2, 0, 1.0))],
    "mul": [
        (lambda s, c, x: s * c, (0, 2, 1.0)),
        (lambda s, c, x: s * 0.3, (0, 1, 0.3)),
        (lambda s, c, x: c * -1, (-2, -1, 1.0)),
        (lambda s, c, x: s * x, ZEROS),
        (lambda s, c, x: x * s, ZEROS),
        (lambda s, c, x: x * 2, NOTHING),
        (lambda s, c, x: s * x[0, 0, 0, 0], ANY),
        (lambda s, c, x: c * x, NOTHING),
        (lambda s, c, x: s * 1e-50, ZEROS),
        (lambda s, c, x: s * 1e38 * 10, ANY),
        (lambda s, c, x: s * 70000, ANY),
        (lambda s, c, x: s * 0 * x, ANY),
    ],
    "div": [
        (lambda s, c, x: c / 4, (1, 2, 0.25)),
        (lambda s, c, x: c / True, (1, 2, 1.0)),
        (lambda s, c, x: s / 3, (0, 1, 1 / 3)),
        (lambda s, c, x: c / 3, NOTHING),
        (lambda s, c, x: s / -3, ZEROS),
        (lambda s, c, x: s / float("inf"), ZEROS),
        (lambda s, c, x: s / 1e-320, ZEROS),
        (lambda s, c, x: s / x, ZEROS),
        (lambda s, c, x: s / 0, ZEROS),
        (lambda s, c, x: s / float("nan"), ZEROS),
        (lambda s, c, x: torch.div(s, c, rounding_mode="floor"), (None, None, 1.0, False)),
        (lambda s, c, x: torch.div(s, x, rounding_mode="trunc"), (None, None, 1.0, False)),
    ],
    "floor_divide": [
        (lambda s, c, x: c // 2, (None, None, 1.0, False)),
        (lambda s, c, x: s // x, (None, None, 1.0, False)),
        (lambda s, c, x: x // 2, (None, None, 1.0, False)),
    ],
    "neg": [(lambda s, c, x: -c, (-2, -1, 1.0)), (lambda s, c, x: -x, NOTHING)],
    "abs": [
        (lambda s, c, x: (s - c).abs(), (0, 2, 1.0)),
        (lambda s, c, x: abs(s * -0.3), ZEROS),
        (lambda s, c, x: abs(s * x[0, 0, 0, 0]), ZEROS),
        (lambda s, c, x: (c * -0.5).abs(), (1, 2, 0.5)),
        (lambda s, c, x: x.abs(), NOTHING),
        (lambda s, c, x: (-3 * c).abs(), (3, 6, 1.0)),
    ],
    "square": [
        (lambda s, c, x: torch.square(s - c), (0, 4, 1.0)),
        (lambda s, c, x: torch.square(x), NOTHING),
        (lambda s, c, x: torch.square((6 * c).to(torch.int8)), (None, None, 1.0)),
    ],
    "pow": [
        (lambda s, c, x: s**2, (0, 1, 1.0)),
        (lambda s, c, x: c**2, NOTHING),
        (lambda s, c, x: x**2, NOTHING),
        (lambda s, c, x: s**0, NOTHING),
        (lambda s, c, x: s**-1, NOTHING),
        (lambda s, c, x: 2**s, NOTHING),
        (lambda s, c, x: s**c, NOTHING),
        (lambda s, c, x: s ** float("inf"), (0, 1, 1.0)),
        (lambda s, c, x: s ** float("nan"), NOTHING),
    ],
    "relu": [
        (lambda s, c, x: F.relu(s - c), (0, 0, 1.0)),
        (lambda s, c, x: torch.relu(c), (1, 2, 1.0)),
        (lambda s, c, x: x.relu(), ZEROS),
        (lambda s, c, x: torch.relu(-s * 0.5), ZEROS),
        (lambda s, c, x: torch.relu(torch.sigmoid(x)), ZEROS),
        (lambda s, c, x: torch.relu(torch.round(x)), (0, None, 1.0, False)),
    ],
    "clamp": [
        (lambda s, c, x: (s + s).clamp(max=1), (0, 1, 1.0)),
        (lambda s, c, x: c.clamp(2, 5), (2, 2, 1.0)),
        (lambda s, c, x: c.clamp(3, 1), (1, 1, 1.0)),
        (lambda s, c, x: s.clamp(0, 0.5), ZEROS),
        (lambda s, c, x: x.clamp(-1, 1), NOTHING),
        (lambda s, c, x: s.clamp(max=float("inf")), (0, 1, 1.0)),
        (lambda s, c, x: s.clamp(min=float("-inf")), (0, 1, 1.0)),
        (lambda s, c, x: s.clamp(min=float("nan")), NOTHING),
        (lambda s, c, x: s.clamp(min=float("inf")), NOTHING),
        (lambda s, c, x: s.clamp(max=float("-inf")), NOTHING),
        (lambda s, c, x: s.clamp(min=x), NOTHING),
        (lambda s, c, x: x.clamp(min=x), NOTHING),
        (lambda s, c, x: x.clamp(2, -1), NOTHING),
        (lambda s, c, x: c.clamp(min=300), (300, 300, 1.0)),
        (lambda s, c, x: torch.round(x).clamp(-3, 5), (-3, 5, 1.0, False)),
        (lambda s, c, x: c.to(torch.int8).clamp(-128, 127), (1, 2, 1.0)),
        (lambda s, c, x: x.clamp(0, 1), ZEROS),
        (lambda s, c, x: (s * 1e4).clamp(2049, 2051), ANY),
        (lambda s, c, x: x.clamp(1e30), ANY),
        (lambda s, c, x: (s * 0.5).clamp(0, 1), ZEROS),
        (lambda s, c, x: s.to(torch.uint8).clamp(min=-1), NOTHING),
    ],
    "clamp_min": [
        (lambda s, c, x: torch.clamp_min(s - c, -1), (-1, 0, 1.0)),
        (lambda s, c, x: torch.clamp_min(x, 2), NOTHING),
    ],
    "clamp_max": [
        (lambda s, c, x: torch.clamp_max(c, 1), (1, 1, 1.0)),
        (lambda s, c, x: torch.clamp_max(x, -2), NOTHING),
    ],
    "relu6": [(lambda s, c, x: F.relu6(4 * c), (4, 6, 1.0)), (lambda s, c, x: F.relu6(x), ZEROS)],
    "hardtanh": [(lambda s, c, x: F.hardtanh(c - 3), (-1, -1, 1.0)), (lambda s, c, x: F.hardtanh(x, -0.5, 2), NOTHING)],
    "round": [
        (lambda s, c, x: torch.round(c), (1, 2, 1.0)),
        (lambda s, c, x: torch.round(s * 0.5), ANY),
        (lambda s, c, x: torch.round(s * 0.3, decimals=1), NOTHING),
        (lambda s, c, x: torch.round(_nearly(s, x)), (0, 1, 1.0, False)),
    ],
    "floor": [
        (lambda s, c, x: torch.floor(s * 0.5), (0, 1, 1.0)),
        (lambda s, c, x: torch.floor(_nearly(s, x)), (-1, 2, 1.0, False)),
        (lambda s, c, x: torch.floor(x), ANY),
    ],
    "ceil": [(lambda s, c, x: torch.ceil(s * 0.5), (0, 1, 1.0)), (lambda s, c, x: torch.ceil(x), ANY)],
    "trunc": [(lambda s, c, x: torch.trunc(-c * 0.5), (-1, 0, 1.0)), (lambda s, c, x: torch.trunc(x), ANY)],
    "sign": [
        (lambda s, c, x: torch.sign(c), (0, 1, 1.0)),
        (lambda s, c, x: torch.sign(s - c), (-1, 1, 1.0)),
        (lambda s, c, x: torch.sign(x), (-1, 1, 1.0, False)),
    ],
    "sgn": [
        (lambda s, c, x: torch.sgn(s), (0, 1, 1.0)),
        (lambda s, c, x: torch.sgn(F.relu(x)), (0, 1, 1.0, False)),
        (lambda s, c, x: torch.sgn(x), (-1, 1, 1.0, False)),
    ],
    "maximum": [(lambda s, c, x: torch.maximum(s, c), (0, 2, 1.0)), (lambda s, c, x: torch.maximum(s, x), NOTHING)],
    "minimum": [(lambda s, c, x: torch.minimum(s, c), (0, 2, 1.0)), (lambda s, c, x: torch.minimum(x, s), NOTHING)],
    "where": [
        (lambda s, c, x: torch.where(x > 0, c, 5), (1, 5, 1.0)),
        (lambda s, c, x: x.where(x > 0, s), NOTHING),
        (lambda s, c, x: s.where(x > 0, c), (0, 2, 1.0)),
        (lambda s, c, x: torch.where(x > 0, x, s), NOTHING),
        (lambda s, c, x: torch.where(s > 0)[0], NOTHING),
        (lambda s, c, x: torch.where(x > 0, s.half(), 1e5), ANY),
        (lambda s, c, x: torch.where(x > 0, s.to(torch.uint8), -1), ANY),
    ],
    "masked_fill": [
        (lambda s, c, x: s.masked_fill(x > 0, 3), (0, 3, 1.0)),
        (lambda s, c, x: x.masked_fill(x > 0, 0), ZEROS),
        (lambda s, c, x: x.masked_fill(x > 0, 1), NOTHING),
        (lambda s, c, x: x.masked_fill(x > 0, float("nan")), NOTHING),
        (lambda s, c, x: s.masked_fill(x > 0, float("nan")), NOTHING),
        (lambda s, c, x: s.to(torch.uint8).masked_fill(x > 0, -1), ANY),
    ],
    "bitwise_and": [
        (lambda s, c, x: x.float().view(torch.int32) & s.to(torch.int32), NOTHING),
        (lambda s, c, x: s.to(torch.int32) & x.float().view(torch.int32), NOTHING),
        (lambda s, c, x: (x > 0) & (s > 0), (0, 1, 1.0)),
        (lambda s, c, x: s.int() & c.int(), NOTHING),
        (lambda s, c, x: x.int() & x.int(), NOTHING),
    ],
    "bitwise_or": [(lambda s, c, x: s.int() | (x > 0), (0, 1, 1.0)), (lambda s, c, x: c.int() | c.int(), NOTHING)],
    "bitwise_xor": [(lambda s, c, x: (x > 0) ^ (s > 0), (0, 1, 1.0)), (lambda s, c, x: c.int() ^ s.int(), NOTHING)],
    "bitwise_not": [
        (lambda s, c, x: ~(x > 0), (0, 1, 1.0)),
        (lambda s, c, x: ~s.int(), NOTHING),
        (lambda s, c, x: ~x.int(), NOTHING),
    ],
    "sigmoid": [(lambda s, c, x: torch.sigmoid(x), NOTHING)],
    "softmax": [(lambda s, c, x: F.softmax(x, -1), NOTHING), (lambda s, c, x: torch.softmax(s, 1), NOTHING)],
    "hardsigmoid": [(lambda s, c, x: F.hardsigmoid(x), NOTHING)],
    "tanh": [(lambda s, c, x: torch.tanh(x), NOTHING)],
    "sin": [(lambda s, c, x: torch.sin(x), NOTHING)],
    "cos": [(lambda s, c, x: torch.cos(s), NOTHING)],
    "erf": [(lambda s, c, x: torch.erf(x), NOTHING)],
    "dropout": [
        (lambda s, c, x: F.dropout(s, 0.5, True), (0, 2, 1.0)),
        (lambda s, c, x: F.dropout(c, 0.5, False), (1, 2, 1.0)),
        (lambda s, c, x: F.dropout(x, 0.3, True), ZEROS),
        (lambda s, c, x: F.dropout(c, 0.0, True), (1, 2, 1.0)),
        (lambda s, c, x: torch.dropout(s, 0.75, True), (0, 4, 1.0)),
        (lambda s, c, x: F.dropout(-c, 0.3, True), ZEROS),
        (lambda s, c, x: F.dropout(s * 0.5, 0.3, True), ZEROS),
        (lambda s, c, x: F.dropout(c, 1.0, True), ANY),
    ],
    "alpha_dropout": [
        (lambda s, c, x: F.alpha_dropout(c, 0.5, False), (1, 2, 1.0)),
        (lambda s, c, x: F.alpha_dropout(s, 0.5, True), NOTHING),
    ],
    "feature_alpha_dropout": [
        (lambda s, c, x: F.feature_alpha_dropout(c, 0.5, False), (1, 2, 1.0)),
        (lambda s, c, x: torch.feature_alpha_dropout(s, 0.5, True), NOTHING),
    ],
    "dropout1d": [(lambda s, c, x: F.dropout1d(s[0], 0.5, True), (0, 2, 1.0))],
    "dropout2d": [(lambda s, c, x: F.dropout2d(c, 0.5, True), (0, 4, 1.0))],
    "dropout3d": [(lambda s, c, x: F.dropout3d(s, 0.5, True), (0, 2, 1.0))],
    **{
        name: [
            (lambda s, c, x, f=f: f(s), ZEROS),
            (lambda s, c, x, f=f: f(x), NOTHING),
            (lambda s, c, x, f=f: f(c), NOTHING),
        ]
        for name, f in {
            "leaky_relu": F.leaky_relu,
            "gelu": F.gelu,
            "silu": F.silu,
            "mish": F.mish,
            "elu": F.elu,
            "selu": F.selu,
            "celu": F.celu,
            "sqrt": torch.sqrt,
            "softsign": F.softsign,
        }.items()
    },
    "to": [
        (lambda s, c, x: c.to(torch.float16), (1, 2, 1.0)),
        (lambda s, c, x: c.to(torch.int8, True), (1, 2, 1.0)),
        (lambda s, c, x: (s * 0.5).to(torch.int32), NOTHING),
        (lambda s, c, x: (s * 0.5).to(x), (0, 1, 0.5)),
        (lambda s, c, x: _nearly(s, torch.rand_like(x)).to(torch.int32), NOTHING),
        (lambda s, c, x: c.to(torch.complex64).real, NOTHING),
        (lambda s, c, x: (s * 0.5).to(torch.complex64).real, NOTHING),
        (lambda s, c, x: (s * 1e30).half(), ZEROS),
        (lambda s, c, x: c.to(dtype=torch.bool), (0, 1, 1.0)),
        (lambda s, c, x: c.to("cpu"), (1, 2, 1.0)),
        (lambda s, c, x: (x > 0).to(x), (0, 1, 1.0)),
        (lambda s, c, x: (c * 200).to(torch.int8), ANY),
        (lambda s, c, x: (s * 0.3).to(torch.float16), ZEROS),
        (lambda s, c, x: x.to(torch.int64), NOTHING),
        (lambda s, c, x: (c * 3000).to(torch.bfloat16), ANY),
        (lambda s, c, x: (x / x).abs().to(torch.int32), NOTHING),
    ],
    "type_as": [(lambda s, c, x: (x > 0).type_as(x), (0, 1, 1.0))],
    "type": [(lambda s, c, x: c.type(torch.int64), (1, 2, 1.0))],
    **{
        name: [(lambda s, c, x, n=name: getattr(c, n)(), (1, 2, 1.0)), (lambda s, c, x, n=name: getattr(x, n)(), ANY)]
        for name in ("float", "double", "half", "bfloat16", "int", "long", "short", "byte", "char")
    },
    "bool": [(lambda s, c, x: c.bool(), (0, 1, 1.0)), (lambda s, c, x: x.bool(), (0, 1, 1.0))],
    **{
        name: [(lambda s, c, x, n=name: getattr(torch, n)(x, 0.5), (0, 1, 1.0))]
        for name in ("ge", "gt", "le", "lt", "eq", "ne")
    },
    **{
        name: [(lambda s, c, x, n=name: getattr(torch, n)(x, s), (0, 1, 1.0))]
        for name in ("logical_and", "logical_or", "logical_xor")
    },
    **{
        name: [(lambda s, c, x, n=name: getattr(torch, n)(x), (0, 1, 1.0))]
        for name in ("logical_not", "isnan", "isinf", "isfinite", "any", "all")
    },
    "heaviside": [
        (lambda s, c, x: torch.heaviside(x, torch.zeros_like(x)), (0, 1, 1.0)),
        (lambda s, c, x: torch.heaviside(x, torch.full_like(x, 2)), (0, 2, 1.0)),
        (lambda s, c, x: torch.heaviside(x, x + 1), ZEROS),
    ],
    "zeros": [(lambda s, c, x: _in_graph(torch.zeros, s, 4), (0, 0, 1.0))],
    "zeros_like": [(lambda s, c, x: torch.zeros_like(x), (0, 0, 1.0))],
    "new_zeros": [(lambda s, c, x: x.new_zeros(4), (0, 0, 1.0))],
    "zero": [(lambda s, c, x: c.clone().zero_(), (0, 0, 1.0))],
    "ones": [(lambda s, c, x: _in_graph(torch.ones, s, 2, 2), (1, 1, 1.0))],
    "ones_like": [(lambda s, c, x: torch.ones_like(x), (1, 1, 1.0))],
    "new_ones": [(lambda s, c, x: x.new_ones(2, 2), (1, 1, 1.0))],
    "full": [(lambda s, c, x: _in_graph(torch.full, s, (2, 2), 0.5), (1, 1, 0.5))],
    "full_like": [
        (lambda s, c, x: torch.full_like(x, 3), (3, 3, 1.0)),
        (lambda s, c, x: torch.full_like(x, 0.3), (1, 1, 0.3)),
        (lambda s, c, x: torch.full_like(x, 0.5, dtype=torch.int32), NOTHING),
        (lambda s, c, x: torch.full_like(x, 1e30), ANY),
        (lambda s, c, x: torch.full_like(x, 2, dtype=torch.bool), ANY),
        (lambda s, c, x: torch.full_like(x, float("nan")), NOTHING),
    ],
    "new_full": [(lambda s, c, x: x.new_full((2,), 2), (2, 2, 1.0))],
    "tensor": [
        (lambda s, c, x: _in_graph(torch.tensor, s, [0, 1, 3]), (0, 3, 1.0)),
        (lambda s, c, x: _in_graph(torch.tensor, s, 0.25), (1, 1, 0.25)),
        (lambda s, c, x: _in_graph(torch.tensor, s, []), NOTHING),
        (lambda s, c, x: _in_graph(torch.tensor, s, [[2]]), NOTHING),
    ],
    "as_tensor": [
        (lambda s, c, x: _in_graph(torch.as_tensor, c, c), (1, 2, 1.0)),
        (lambda s, c, x: _in_graph(torch.as_tensor, x, x), NOTHING),
    ],
    "scalar_tensor": [(lambda s, c, x: _in_graph(torch.scalar_tensor, s, 2.0), (2, 2, 1.0))],
    "empty": [(lambda s, c, x: _in_graph(torch.empty, s, 2), NOTHING)],
    "empty_like": [(lambda s, c, x: torch.empty_like(s), NOTHING)],
    "new_empty": [(lambda s, c, x: s.new_empty(2), NOTHING)],
    "rand": [(lambda s, c, x: _in_graph(torch.rand, s, 4), NOTHING)],
    "rand_like": [(lambda s, c, x: torch.rand_like(x), NOTHING)],
    "uniform": [(lambda s, c, x: s.clone().uniform_(2, 3), NOTHING)],
    "bernoulli": [
        (lambda s, c, x: torch.bernoulli(s), (0, 1, 1.0)),
        (lambda s, c, x: s.clone().bernoulli_(0.3), (0, 1, 1.0)),
    ],
    "one_hot": [(lambda s, c, x: F.one_hot(s.long(), 3), (0, 1, 1.0))],
    "tril": [(lambda s, c, x: torch.tril(c), (0, 2, 1.0)), (lambda s, c, x: torch.tril(x), ZEROS)],
    "triu": [(lambda s, c, x: c.triu(1), (0, 2, 1.0))],
    "setitem": [
        (lambda s, c, x: _written(operator.setitem, c, 0, 5), (1, 5, 1.0)),
        (lambda s, c, x: _written(operator.setitem, c, 0, x[0]), NOTHING),
    ],
    "copy": [(lambda s, c, x: c.clone().copy_(s), (0, 1, 1.0)), (lambda s, c, x: s.int().copy_(s * 0.5), NOTHING)],
    "fill": [(lambda s, c, x: s.clone().fill_(7), (7, 7, 1.0)), (lambda s, c, x: s.bool().fill_(2), ANY)],
    "index_fill": [(lambda s, c, x: c.index_fill(0, _rows(s), 0), (0, 2, 1.0))],
    "index_copy": [(lambda s, c, x: c.index_copy(0, _rows(s), s[:1]), (0, 2, 1.0))],
    "masked_scatter": [(lambda s, c, x: c.masked_scatter(x > 0, s), (0, 2, 1.0))],
    "index_put": [
        (lambda s, c, x: c.index_put((_rows(s),), s[:1]), (0, 2, 1.0)),
        (lambda s, c, x: s.index_put((_rows(s),), c[:1], True), NOTHING),
    ],
    "scatter": [
        (lambda s, c, x: c.scatter(0, (s > 0).long(), s), (0, 2, 1.0)),
        (lambda s, c, x: s.scatter(0, (s > 0).long(), 3), (0, 3, 1.0)),
        (lambda s, c, x: s.scatter(0, (s > 0).long(), c, reduce="add"), NOTHING),
        (lambda s, c, x: s.scatter(0, (s > 0).long(), value=3), (0, 3, 1.0)),
    ],
    "max_pool1d": [(lambda s, c, x: F.max_pool1d(c[0], 2), (1, 2, 1.0))],
    "max_pool2d": [
        (lambda s, c, x: F.max_pool2d(c, 3, 1, 1), (1, 2, 1.0)),
        (lambda s, c, x: F.max_pool2d(s, 2, 1, 1, dilation=3), NOTHING),
        (lambda s, c, x: F.max_pool2d(c, 2, 1, 0, dilation=(1, 2)), (1, 2, 1.0)),
        (lambda s, c, x: _in_graph(F.max_pool2d, s, s, 2, None, 0, 1, False, True)[0], (0, 1, 1.0)),
        (lambda s, c, x: _in_graph(F.max_pool2d, s, s, 2, None, 0, 1, False, True)[1], NOTHING),
        (lambda s, c, x: _in_graph(F.max_pool2d, s, s, 2, None, 0, 1, False, True)[-1], NOTHING),
        (lambda s, c, x: torch.max_pool2d(s, 2), (0, 1, 1.0)),
    ],
    "max_pool3d": [(lambda s, c, x: F.max_pool3d(c, 2, ceil_mode=True), (1, 2, 1.0))],
    "adaptive_max_pool1d": [
        (lambda s, c, x: F.adaptive_max_pool1d(c[0], 2), (1, 2, 1.0)),
        (lambda s, c, x: torch.adaptive_max_pool1d(c[0], 2)[1], NOTHING),
    ],
    "adaptive_max_pool2d": [
        (lambda s, c, x: F.adaptive_max_pool2d(c, 2), (1, 2, 1.0)),
        (lambda s, c, x: F.adaptive_max_pool2d(c, 2, True)[1], NOTHING),
    ],
    "adaptive_max_pool3d": [(lambda s, c, x: F.adaptive_max_pool3d(c, 2), (1, 2, 1.0))],
    "avg_pool1d": [
        (lambda s, c, x: F.avg_pool1d(c[0], 2), (2, 4, 0.5)),
        (lambda s, c, x: F.avg_pool1d(s[0], 3), ZEROS),
    ],
    "avg_pool2d": [
        (lambda s, c, x: F.avg_pool2d(c, 2), (4, 8, 0.25)),
        (lambda s, c, x: F.avg_pool2d(c, [2], [2], [1]), (0, 8, 0.25)),
        (lambda s, c, x: F.avg_pool2d(c, 2, 1, 1), (0, 8, 0.25)),
        (lambda s, c, x: F.avg_pool2d(c, 2, 1, 1, count_include_pad=False), ZEROS),
        (lambda s, c, x: F.avg_pool2d(c, 3, 2, ceil_mode=True), ZEROS),
        (lambda s, c, x: F.avg_pool2d(c, (2, 2), divisor_override=1), (4, 8, 1.0)),
        (lambda s, c, x: F.avg_pool2d(c, 3, 2, 0, True, True, 2), (0, 18, 0.5)),
        (lambda s, c, x: F.avg_pool2d(s, 2, divisor_override=-1), ZEROS),
        (lambda s, c, x: F.avg_pool2d(x, 2), NOTHING),
        (lambda s, c, x: F.avg_pool2d(c, 4, 4, 1, True, True, 1), (0, 32, 1.0)),
        (lambda s, c, x: F.avg_pool2d(c, 2, 2, ceil_mode=True), ANY),
    ],
    "avg_pool3d": [(lambda s, c, x: F.avg_pool3d(s, 2), (0, 8, 0.125))],
    "adaptive_avg_pool1d": [(lambda s, c, x: F.adaptive_avg_pool1d(s[0], 2), (0, 2, 0.5))],
    "adaptive_avg_pool2d": [
        (lambda s, c, x: F.adaptive_avg_pool2d(s, 1), (0, 16, 1 / 16)),
        (lambda s, c, x: F.adaptive_avg_pool2d(s, 3), ZEROS),
        (lambda s, c, x: F.adaptive_avg_pool2d(c, (12, 2)), (2, 4, 0.5)),
        (lambda s, c, x: F.adaptive_avg_pool2d(s, (6, 8)), ZEROS),
        (lambda s, c, x: torch.ops.aten._adaptive_avg_pool2d.default(s, (8, 8)), (0, 1, 1.0)),
    ],
    "adaptive_avg_pool3d": [
        (lambda s, c, x: F.adaptive_avg_pool3d(s, 2), (0, 8, 0.125)),
        (lambda s, c, x: torch.ops.aten._adaptive_avg_pool3d.default(s, (4, 8, 2)), (0, 2, 0.5)),
    ],
    "pad": [
        (lambda s, c, x: F.pad(c, (1, 1)), (0, 2, 1.0)),
        (lambda s, c, x: F.pad(c, (1, 0), value=3.0), (1, 3, 1.0)),
        (lambda s, c, x: F.pad(c, (1, 1, 1, 1), "reflect"), (1, 2, 1.0)),
        (lambda s, c, x: F.pad(c.int(), (1, 1), value=0.5), NOTHING),
        (lambda s, c, x: F.pad(s, (1, 1), value=float("nan")), NOTHING),
    ],
    "im2col": [
        (lambda s, c, x: F.unfold(c, 2), (1, 2, 1.0)),
        (lambda s, c, x: F.unfold(c, 2, padding=1), (0, 2, 1.0)),
        (lambda s, c, x: F.unfold(c, 2, 1, 1), (0, 2, 1.0)),
    ],
    "interpolate": [
        (lambda s, c, x: F.interpolate(c, scale_factor=2), (1, 2, 1.0)),
        (lambda s, c, x: F.interpolate(c, None, 2, "bilinear"), NOTHING),
        (lambda s, c, x: F.interpolate(c, 3, mode="nearest-exact"), (1, 2, 1.0)),
    ],
    "mean": [
        (lambda s, c, x: c.mean(1), (4, 8, 0.25)),
        (lambda s, c, x: s.mean(), (0, 128, 1 / 128)),
        (lambda s, c, x: x.mean(), NOTHING),
        (lambda s, c, x: (s * 0.5).mean(1, dtype=torch.float32), (0, 4, 0.125)),
    ],
    "sum": [
        (lambda s, c, x: s.sum(), (0, 128, 1.0)),
        (lambda s, c, x: c.sum(1), (4, 8, 1.0)),
        (lambda s, c, x: c.sum((0, -1)), (8, 16, 1.0)),
        (lambda s, c, x: torch.sum(s, dim=[]), (0, 128, 1.0)),
        (lambda s, c, x: (s * 0.5).sum(1, dtype=torch.int64), NOTHING),
        (lambda s, c, x: (c * 100).sum(1, dtype=torch.int8), ANY),
        (lambda s, c, x: (-c * 2000).sum(dtype=torch.float16), ANY),
        (lambda s, c, x: x.sum(1), NOTHING),
        (lambda s, c, x: c.sum(1, keepdim=True), (4, 8, 1.0)),
        (lambda s, c, x: (s * 1000).sum().half(), ANY),
        (lambda s, c, x: s.sum(x.dim() - 1), ZEROS),
    ],
    "cumsum": [
        (lambda s, c, x: c.cumsum(1), (1, 8, 1.0)),
        (lambda s, c, x: torch.cumsum(-c, -1), (-8, -1, 1.0)),
        (lambda s, c, x: x.cumsum(0), NOTHING),
        (lambda s, c, x: (s * 0.5).cumsum(1, dtype=torch.int32), NOTHING),
    ],
    "max": [
        (lambda s, c, x: c.max(), (1, 2, 1.0)),
        (lambda s, c, x: c.max(1)[0], (1, 2, 1.0)),
        (lambda s, c, x: c.max(1)[1], NOTHING),
        (lambda s, c, x: torch.max(c, 1)[-1], NOTHING),
        (lambda s, c, x: torch.max(c, 1)[-2], NOTHING),
        (lambda s, c, x: torch.max(s, c), (0, 2, 1.0)),
        (lambda s, c, x: torch.max(s, other=c), (0, 2, 1.0)),
        (lambda s, c, x: torch.max(s, x), NOTHING),
    ],
    "min": [
        (lambda s, c, x: c.min(0)[0], (1, 2, 1.0)),
        (lambda s, c, x: torch.min(c, s), (0, 2, 1.0)),
        (lambda s, c, x: c.min(0)[-1], NOTHING),
    ],
    "amax": [(lambda s, c, x: c.amax((1, 2)), (1, 2, 1.0))],
    "amin": [(lambda s, c, x: c.amin(), (1, 2, 1.0))],
    "argmax": [(lambda s, c, x: s.argmax(1), NOTHING)],
    "argmin": [(lambda s, c, x: s.argmin(), NOTHING)],
    "matmul": [
        (lambda s, c, x: s @ c, (0, 8, 1.0)),
        (lambda s, c, x: torch.bmm(c[0], c[1]), (4, 16, 1.0)),
        (lambda s, c, x: s @ x, NOTHING),
        (lambda s, c, x: torch.matmul(c * 300, s), NOTHING),
        (lambda s, c, x: (s * 0.5) @ -c, (-8, 0, 0.5)),
        (lambda s, c, x: (s * 0.3) @ s, NOTHING),
    ],
    **{
        name: [(call, NOTHING)]
        for name, call in {
            "linear": lambda s, c, x: F.linear(s, x[0, 0]),
            "conv1d": lambda s, c, x: F.conv1d(s[0], x[0]),
            "conv2d": lambda s, c, x: F.conv2d(s, x),
            "conv3d": lambda s, c, x: F.conv3d(s[None], x[:, :2, None]),
            "conv_transpose1d": lambda s, c, x: F.conv_transpose1d(s[0], x[0]),
            "conv_transpose2d": lambda s, c, x: F.conv_transpose2d(s[:, :2], x),
            "conv_transpose3d": lambda s, c, x: F.conv_transpose3d(s[None], x[:, :, None]),
            "addmm": lambda s, c, x: torch.addmm(s[0, 0], s[0, 0], s[0, 1]),
            "baddbmm": lambda s, c, x: torch.baddbmm(s[0], s[0], s[1]),
            "scaled_dot_product_attention": lambda s, c, x: F.scaled_dot_product_attention(s, s, s),
            "bilinear": lambda s, c, x: F.bilinear(s, s, x[:, 0]),
            "embedding": lambda s, c, x: F.embedding(s.long(), s[0, 0]),
            "batch_norm": lambda s, c, x: F.batch_norm(s, x[0, 0, 0], x[0, 0, 1].abs()),
            "layer_norm": lambda s, c, x: F.layer_norm(s, (4,)),
            "group_norm": lambda s, c, x: F.group_norm(s, 2),
            "instance_norm": lambda s, c, x: F.instance_norm(s),
            "rms_norm": lambda s, c, x: F.rms_norm(s, (4,)),
            "local_response_norm": lambda s, c, x: F.local_response_norm(s, 2),
        }.items()
    },
    **{
        name: [(call, (1, 2, 1.0))]
        for name, call in {
            "identity": lambda s, c, x: _identity(c),
            "reshape": lambda s, c, x: torch.reshape(c, shape=(-1,)),
            "flatten": lambda s, c, x: c.flatten(1),
            "unflatten": lambda s, c, x: c.unflatten(1, (2, 2)),
            "permute": lambda s, c, x: c.permute(3, 2, 1, 0),
            "transpose": lambda s, c, x: torch.swapaxes(c, axis0=0, axis1=1),
            "t": lambda s, c, x: c[0, 0].t(),
            "T": lambda s, c, x: _as_method(c[0, 0], "T"),
            "mT": lambda s, c, x: _as_method(c, "mT"),
            "movedim": lambda s, c, x: c.movedim(0, 1),
            "squeeze": lambda s, c, x: c[:1].squeeze(),
            "unsqueeze": lambda s, c, x: c.unsqueeze(0),
            "expand": lambda s, c, x: c.expand(2, -1, -1, -1, -1),
            "expand_as": lambda s, c, x: c[:1].expand_as(c),
            "view_as": lambda s, c, x: c.view_as(x),
            "reshape_as": lambda s, c, x: c.reshape_as(x),
            "narrow": lambda s, c, x: c.narrow(0, 0, 1),
            "select": lambda s, c, x: c.select(0, -1),
            "diagonal": lambda s, c, x: torch.diagonal(c),
            "unfold": lambda s, c, x: c.unfold(2, 2, 1),
            "contiguous": lambda s, c, x: c.contiguous(),
            "clone": lambda s, c, x: c.clone(),
            "detach": lambda s, c, x: c.detach(),
            "cpu": lambda s, c, x: c.cpu(),
            "alias": lambda s, c, x: torch.ops.aten.alias.default(c),
            "repeat": lambda s, c, x: c.repeat(1, 1, 1, 2),
            "lift_fresh_copy": lambda s, c, x: _in_graph(torch.ops.aten.lift_fresh_copy.default, c, c),
            "tile": lambda s, c, x: c.tile((2,)),
            "requires_grad": lambda s, c, x: c.clone().requires_grad_(False),
            "roll": lambda s, c, x: c.roll(1),
            "flip": lambda s, c, x: c.flip(0),
            "index_select": lambda s, c, x: c.index_select(0, _rows(s)),
            "gather": lambda s, c, x: c.gather(0, s.long()),
            "take_along_dim": lambda s, c, x: c.take_along_dim(s.long(), 0),
            "masked_select": lambda s, c, x: c.masked_select(x == x),
            "view": lambda s, c, x: c.view(-1),
            "cat": lambda s, c, x: torch.cat([c, c]),
            "stack": lambda s, c, x: torch.stack([c, c]),
            "hstack": lambda s, c, x: torch.hstack([c, c]),
            "vstack": lambda s, c, x: torch.vstack([c]),
            "chunk": lambda s, c, x: c.chunk(2)[1],
            "split": lambda s, c, x: c.split(1, dim=1)[-1],
            "tensor_split": lambda s, c, x: c.tensor_split(2)[0],
            "unbind": lambda s, c, x: c.unbind(1)[0],
            "getitem": lambda s, c, x: c[0],
            "getattr": lambda s, c, x: c.data,
            "repeat_interleave": lambda s, c, x: c.repeat_interleave(2, 0),
            "cuda": lambda s, c, x: c.cpu(),
        }.items()
    },
}
MORE = {
    "one and one as bits": (
        lambda s, c, x: torch.full_like(x, 3).type_as(x > 0) + torch.full_like(x, 3).type_as(x > 0),
        ANY,
    ),
    "indices of counts": (lambda s, c, x: torch.repeat_interleave(s.long().flatten()), NOTHING),
    "bits as numbers": (lambda s, c, x: s.view(dtype=torch.int32), NOTHING),
    "bits as numbers, by place": (lambda s, c, x: s.view(torch.int32), NOTHING),
    "cat of dtypes": (lambda s, c, x: torch.cat([c.int() * 3001, s.half()]), ANY),
    "cat with anything": (lambda s, c, x: torch.cat([c, x]), NOTHING),
    "slice of a tuple": (lambda s, c, x: torch.max(c, 1)[0:1][0], NOTHING),
    "max of dtypes": (lambda s, c, x: torch.max(c.int() * 3001, s.half()), ANY),
    "gradient": (lambda s, c, x: c.clone().requires_grad_(False).is_leaf, ANY),
}


def _in_graph(function: Callable[..., Any], like: fx.Proxy, *args: Any) -> Any:
    """A call that has no traced argument, put in the graph all the same."""
    return like.tracer.create_proxy("call_function", function, args, {})


def _nearly(s: fx.Proxy, x: fx.Proxy) -> fx.Proxy:
    """Spikes up to rounding, as a straight-through estimator makes them."""
    y = torch.tanh(x)
    return (s - y).detach() + y


def _as_method(x: fx.Proxy, name: str) -> Any:
    """An attribute as Dynamo writes it for some versions: a call of a method of that name."""
    return getattr(x, name)


def _rows(like: fx.Proxy) -> Any:
    return _in_graph(torch.tensor, like, [0])


def _written(function: Callable[..., Any], x: fx.Proxy, *args: Any) -> Any:
    target = x.clone()
    target.tracer.create_proxy("call_function", function, (target, *args), {})
    return target.view(-1)


def _identity(x: fx.Proxy) -> Any:
    return x.tracer.create_proxy("call_module", "identity", (x,), {})


class _Root(nn.Module):
    """What a traced case may call."""

    def __init__(self) -> None:
        super().__init__()
        self.identity = nn.Identity()


def _traced(case: Callable[..., Any]) -> fx.GraphModule:
    root = _Root()
    tracer = fx.Tracer()
    tracer.root = root
    tracer.graph, tracer.tensor_attrs = fx.Graph(tracer_cls=fx.Tracer), {}
    x = tracer.create_proxy("placeholder", "x", (), {})
    s = (x > 0.25).to(x)
    c = (x > 1).to(x) + 1
    tracer.create_proxy("output", "output", (case(s, c, x),), {})
    return fx.GraphModule(root, tracer.graph)


def _inputs() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 4, 4, 4, generator=generator) * 1.5
    odd = x.clone()
    odd[0, 0, 0], odd[1, :, 1, 2] = torch.tensor([float("nan"), float("inf"), float("-inf"), -0.0]), 3e4
    return {
        "plain": x, "odd": odd, "half": odd.half(), "bfloat16": odd.bfloat16(),
        "low": x.abs() * 0.1, "high": x.abs() + 2, "negative": -x.abs() - 1,
    }  # fmt: skip


INPUTS = _inputs()
ALL = [(name, *case) for name, cases in CASES.items() for case in cases] + [
    (name, *case) for name, case in MORE.items()
]
EACH = pytest.mark.parametrize(
    "name,case,expected", ALL, ids=[f"{index}-{entry[0]}" for index, entry in enumerate(ALL)]
)


@pytest.mark.quick_cases(60)
@EACH
def test_what_is_claimed_is_written_down(name: str, case: Callable[..., Any], expected: Any) -> None:
    fact = _checked(case, INPUTS["plain"])
    if expected is NOTHING or expected is ZEROS:
        assert fact is None or not fact.integral, str(fact)
        assert (isinstance(fact, SparsityFact) and fact.exact_zeros) == (expected is ZEROS), str(fact)
    elif expected is not ANY:
        assert isinstance(fact, SparsityFact) and fact.integral, str(fact)
        assert (fact.lo, fact.hi, fact.scale, fact.finite) == (*expected, True)[:4] and fact.exact
        if fact.lo is not None and fact.hi is not None:
            assert fact.exact_zeros == (fact.lo <= 0 <= fact.hi)
    bare = _traced(case)
    torch.manual_seed(0)
    FactChecker(bare, analyse(bare)).run(INPUTS["plain"].clone())


@pytest.mark.quick_cases(60)
@EACH
def test_what_is_claimed_holds(name: str, case: Callable[..., Any], expected: Any) -> None:
    for kind, x in INPUTS.items():
        try:
            ShapeProp(_traced(case)).propagate(x.clone())
        except RuntimeError:
            assert kind in ("half", "bfloat16", "odd", "low"), "eager refuses the case"
            continue
        _checked(case, x)
        torch.manual_seed(0)
        bare = _traced(case)
        FactChecker(bare, analyse(bare)).run(x.clone())


def _checked(case: Callable[..., Any], x: Tensor) -> SparsityFact | Items | None:
    """The fact of what a case returns, after a checked run; no transfer function failed."""
    gm = _traced(case)
    ShapeProp(gm).propagate(x.clone())
    torch.manual_seed(0)
    analysis = check(gm, x.clone()).analysis
    assert not [why for why in analysis.reasons.values() if why.kind is LostKind.FAILED]
    output = next(iter(reversed(gm.graph.nodes)))
    return analysis.fact(output.args[0], at=output)


UNSHAPED: dict[str, tuple[Callable[..., Any], tuple[int | None, int | None, float, bool] | None]] = {
    # (least, greatest, scale, finite) where no dtype is known: what holds in bool, bytes and halves alike
    "float": (lambda s, c, x: c.float(), (1, 2, 1.0, True)),
    "double": (lambda s, c, x: (c * -1).double(), (None, None, 1.0, False)),
    "half": (lambda s, c, x: c.half(), (1, 2, 1.0, True)),
    "bfloat16": (lambda s, c, x: c.bfloat16(), (1, 2, 1.0, True)),
    "int": (lambda s, c, x: c.int(), (1, 2, 1.0, True)),
    "long": (lambda s, c, x: c.long(), (1, 2, 1.0, True)),
    "short": (lambda s, c, x: c.short(), (1, 2, 1.0, True)),
    "byte": (lambda s, c, x: c.byte(), (1, 2, 1.0, True)),
    "char": (lambda s, c, x: c.char(), (1, 2, 1.0, True)),
    "bool": (lambda s, c, x: c.bool(), (0, 1, 1.0, True)),
    "to bool": (lambda s, c, x: c.to(torch.bool), (0, 1, 1.0, True)),
    "to char of what may be infinite": (lambda s, c, x: (c * -100).char(), None),
    "to the dtype of another": (lambda s, c, x: c.to(x), (1, 2, 1.0, True)),
    "counts from 3 in what may be bool": (lambda s, c, x: (c + 2).to(x), (1, 4, 1.0, True)),
    "halves to the dtype of another": (lambda s, c, x: (s * 0.5).to(x), None),
    "127": (lambda s, c, x: s * 127, (0, 127, 1.0, True)),
    "128": (lambda s, c, x: s * 128, (None, None, 1.0, False)),
    "negative": (lambda s, c, x: -s, (None, None, 1.0, False)),
    "difference": (lambda s, c, x: 1 - s, (0, 1, 1.0, True)),
    "third": (lambda s, c, x: s * 0.3, (0, 1, 0.3, True)),
    "subnormal half": (lambda s, c, x: s * 6e-5, None),
    "infinite half": (lambda s, c, x: s * 65537, (0, 1, 65537.0, False)),
    "largest half": (lambda s, c, x: s * 65504, (None, None, 1.0, False)),
    "clamp to a byte": (lambda s, c, x: s.clamp(0, 127), (0, 1, 1.0, True)),
    "clamp beyond a byte": (lambda s, c, x: s.clamp(max=128), None),
    "clamp from below zero": (lambda s, c, x: s.clamp(min=-1), None),
    "counts from 128": (lambda s, c, x: c.float().clamp(min=128), None),
    "where": (lambda s, c, x: torch.where(x > 0, s, 2), (0, 2, 1.0, True)),
    "where below zero": (lambda s, c, x: torch.where(x > 0, s, -1), (None, None, 1.0, False)),
    "fill": (lambda s, c, x: s.masked_fill(x > 0, 2), (0, 2, 1.0, True)),
    "fill below zero": (lambda s, c, x: s.masked_fill(x > 0, -1), (None, None, 1.0, False)),
    "absolute": (lambda s, c, x: x.abs(), None),
    "absolute spikes": (lambda s, c, x: s.abs(), (0, 1, 1.0, True)),
    "absolute difference": (lambda s, c, x: (s - c).abs(), (None, None, 1.0, False)),
    "square": (lambda s, c, x: torch.square(c), (1, 4, 1.0, True)),
    "sign": (lambda s, c, x: torch.sign(x), (-1, 1, 1.0, False)),
    "complement": (lambda s, c, x: ~(x > 0), None),
    "both": (lambda s, c, x: (x > 0) & (s > 0), (0, 1, 1.0, True)),
    "dropout": (lambda s, c, x: F.dropout(s, 0.5, True), (0, 2, 1.0, True)),
    "dropout of a computed rate": (lambda s, c, x: F.dropout(s, x, True), None),
    "sum": (lambda s, c, x: s.sum(0), None),
    "cumulative sum": (lambda s, c, x: torch.cumsum(s, 0), None),
    "product": (lambda s, c, x: s @ s, None),
    "300": (lambda s, c, x: s.new_full((2,), 300), (None, None, 1.0, False)),
    "a half": (lambda s, c, x: s.new_full((2,), 0.5), None),
    "3": (lambda s, c, x: torch.full_like(s, 3), (1, 3, 1.0, True)),
}


@pytest.mark.parametrize("name", UNSHAPED)
def test_what_is_claimed_without_shapes_and_dtypes(name: str) -> None:
    case, expected = UNSHAPED[name]
    gm = _traced(case)
    fact = analyse(gm).fact(next(iter(reversed(gm.graph.nodes))).args[0])
    claimed = (fact.lo, fact.hi, fact.scale, fact.finite) if fact is not None and fact.integral else None
    assert claimed == expected, str(fact)


def _all(names: str, *reasons: str) -> dict[str, list[str]]:
    return {name: [reason.format(name) for reason in reasons] for name in names.split()}


OF_X, UNKNOWN = "`x` is an input of the graph", "{} with `x`, whose values are unknown, ends the domain"
OVER, ITS = "division by `{}` keeps zeros but not the domain", "the values of `{}` are unknown"
KEEPS, RANDOM = "{} keeps zeros but not the domain", "{} holds arbitrary values until all of it is written"
AVERAGES, DROPS = f"{KEEPS}: it averages", "dropout in training rescales its input: zeros stay, the domain ends"
UNCOUNTED = "sum over an unknown or too large number of elements ends the domain"
REASONS: dict[str, list[str]] = {
    # of each operator, why its cases are off the grid, in their order
    **_all("maximum minimum", UNKNOWN),
    **_all("bitwise_or bitwise_xor", "{} of integers is not analysed"),
    **_all("leaky_relu gelu silu mish elu selu celu sqrt softsign", KEEPS, OF_X, "{} ends the domain"),
    **_all("neg float double half bfloat16 int long short byte char as_tensor mean", OF_X),
    **_all("empty empty_like new_empty", RANDOM),
    **_all("argmax argmin", "{} gives indices"),
    **_all("avg_pool1d", AVERAGES),
    **_all("adaptive_avg_pool2d", AVERAGES, AVERAGES),
    **_all(
        "linear conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d addmm baddbmm "
        "scaled_dot_product_attention bilinear embedding",
        "{} ends the domain: it mixes values through weights",
    ),
    **_all(
        "batch_norm layer_norm group_norm instance_norm rms_norm local_response_norm",
        "{} ends the domain: it shifts and scales",
    ),
    "add": ["add with alpha is not analysed", UNKNOWN.format("add"), UNKNOWN.format("add"), OF_X,
            "add of values on different grids ends the domain",
            "add with `nan`, whose values are unknown, ends the domain",
            "add of values on different grids ends the domain",
            "add with `1e+30`, whose values are unknown, ends the domain"],
    "mul": [UNKNOWN.format("mul"), UNKNOWN.format("mul"), OF_X, UNKNOWN.format("mul")],
    "div": [OVER.format(by) for by in ("3", "-3", "inf", "1e-320", "x", "0", "nan")],
    "pow": ["power 2 ends the domain", OF_X, "power 0 ends the domain", "power -1 ends the domain",
            "power to ends the domain", "power add ends the domain", "power nan ends the domain"],
    "clamp": ["clamp to NaN or infinity ends the domain"] * 3 + ["clamp with tensor bounds is not analysed", OF_X,
              "clamp to what its dtype cannot hold ends the domain"],
    "round": ["round is not analysed"],
    "where": [UNKNOWN.format("where")] * 2 + ["where with one argument gives indices"],
    "masked_fill": [UNKNOWN.format("masked_fill"), UNKNOWN.format("masked_fill"),
                    "masked_fill with `nan`, whose values are unknown, ends the domain"],
    "bitwise_and": ["bitwise_and of integers is not analysed"] * 3 + [OF_X],
    "bitwise_not": ["bitwise not of integers is not analysed", OF_X],
    "dropout": [DROPS] * 4,
    "alpha_dropout": ["alpha_dropout in training drops to a number other than zero"],
    "feature_alpha_dropout": ["feature_alpha_dropout in training drops to a number other than zero"],
    "to": [*["conversion to torch.int32 of values off the integer grid ends the domain"] * 2,
           "conversion to torch.complex64 is not analysed", "conversion to torch.complex64 is not analysed", OF_X,
           "conversion to torch.int32 of values off the integer grid ends the domain"],
    "heaviside": ["heaviside with `add_1` at zero, whose value is unknown, is not binary"],
    "full_like": [OF_X] * 3,
    "tensor": ["nothing is known about `tensor`"] * 2,
    "uniform": ["uniform_ makes random values"],
    "setitem": ["setitem writes `getitem`, whose values are unknown"],
    "copy": ["nothing is known about `copy_`"],
    "index_put": ["index_put with accumulate adds an unknown number of times"],
    "scatter": ["scatter is not analysed"],
    "max_pool2d": ["dilated max pooling with padding can give -inf"] + [ITS.format("max_pool2d")] * 2,
    "adaptive_max_pool1d": [ITS.format("adaptive_max_pool1d")],
    "adaptive_max_pool2d": ["adaptive_max_pool2d_with_indices is not analysed"],
    "avg_pool2d": [AVERAGES.format("avg_pool2d")] * 3 + [OF_X, AVERAGES.format("avg_pool2d")],
    "pad": ["nothing is known about `pad`"] * 2,
    "interpolate": ["bilinear interpolation mixes values and ends the domain"],
    "sum": ["conversion to torch.int64 of values off the integer grid ends the domain", UNCOUNTED, UNCOUNTED, OF_X,
            UNCOUNTED],
    "cumsum": [OF_X, "conversion to torch.int32 of values off the integer grid ends the domain"],
    "max": [ITS.format("max_1")] * 3 + [UNKNOWN.format("max")],
    "min": [ITS.format("min_1")],
    "matmul": ["matmul ends the domain: it mixes values through weights"] * 3,
}  # fmt: skip


@pytest.mark.quick_cases(30)
@pytest.mark.parametrize("name", CASES)
def test_what_is_lost_has_its_reason(name: str) -> None:
    reasons = []
    for case, _ in CASES[name]:
        gm = _traced(case)
        ShapeProp(gm).propagate(INPUTS["plain"].clone())
        reasons.append(analyse(gm).why_not(next(iter(reversed(gm.graph.nodes))).args[0]))
    assert [str(why) for why in reasons if why is not None] == REASONS.get(name, [])


def _takes_two(name: str, x: Tensor) -> bool:
    try:
        return isinstance(getattr(torch, name)(x, x), Tensor)
    except (AttributeError, TypeError, RuntimeError):
        return False


KNOWN_OR_NOT = {
    "float": lambda s, c, x: (s, c, x), "int": lambda s, c, x: (s.int(), c.int(), x.view(torch.int32)),
    "bool": lambda s, c, x: (s > 0, c > 0, x.view(torch.int32).view(torch.bool)[..., :4]),
}  # fmt: skip
DTYPES = {"float": torch.float32, "int": torch.int32, "bool": torch.bool}
LOOKUPS = ("embedding", "take_along_dim", "floor_divide")
"""Not every number is a place, or divides."""
TWO_OPERANDS = [
    (name, kind) for name in sorted(TRANSFERS) for kind in DTYPES
    if "::" not in name and name not in LOOKUPS and _takes_two(name, torch.ones(4, 4, dtype=DTYPES[kind]))
]  # fmt: skip
"""Functions of two tensors, by what they can be given."""


@pytest.mark.quick_cases(24)
@pytest.mark.parametrize(("name", "kind"), TWO_OPERANDS)
def test_either_operand_may_be_unknown(name: str, kind: str) -> None:
    function, given = getattr(torch, name), KNOWN_OR_NOT[kind]
    for first, second in ((0, 2), (2, 0), (2, 2)):
        _checked(lambda s, c, x, a=first, b=second: _of_two(function, given(s, c, x), a, b), INPUTS["plain"])


def _of_two(function: Callable[..., Any], operands: Any, first: int, second: int) -> Any:
    return _in_graph(function, operands[0], *(operands[which][0, 0] for which in (first, second)))


def test_every_transfer_function_has_a_case() -> None:
    assert set(CASES) == {name for name in TRANSFERS if "::" not in name}


def test_every_case_is_of_its_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """A case must reach the transfer function that it stands for."""
    called: set[str] = set()
    for name, function in list(TRANSFERS.items()):
        monkeypatch.setitem(TRANSFERS, name, _noting(name, function, called))
    missing = []
    for name, cases in CASES.items():
        called.clear()
        for case, _ in cases:
            analyse(_traced(case))
        if name not in called:
            missing.append(name)
    assert missing == ["T", "mT", "cuda"]


def _noting(name: str, function: Any, called: set[str]) -> Any:
    def noted(op: Any, facts: Any) -> Any:
        called.add(name)
        return function(op, facts)

    return noted
