"""A sparse layer of few rows as earlier rules left it in the graph: how it runs, and on what operands."""

from typing import Any, NamedTuple

import torch
from torch import fx

import sparsecomp.ops.sparse.bitmap_linear
import sparsecomp.ops.sparse.packed_linear  # noqa: F401  (registers the operators)
from sparsecomp.formats import BITMAP
from sparsecomp.lowering.cache.signature import has_triton
from sparsecomp.lowering.sparse.bitmap_linear import random_longest
from sparsecomp.lowering.sparse.gated_pair import PAIRS
from sparsecomp.passes.cost.sparse import Product
from sparsecomp.passes.engine.rule import Context, known_sizes
from sparsecomp.passes.graph.canonicalize import example_of
from sparsecomp.passes.sparse.chain import Chain, circumstances
from sparsecomp.reference.patterns import Layout
from sparsecomp.reference.precision import KERNEL_DTYPES

_LINEAR = torch.ops.sparsecomp.sparse_linear.default
_COPY = torch.ops.sparsecomp.bitmap_linear.default
_PACKED = torch.ops.sparsecomp.packed_linear.default


class FewRows(NamedTuple):
    """A sparse layer of a form that has a kernel for pairs.

    Attributes:
        chain: its operands; the layer is its only node.
        arrays: index arrays of its layout; of 2:4 packed positions behind them.
        bitmap: what it reads by a bitmap: a copy that is kept, or what is stored, values last.
        grain: how many neighbours share a bit of that; 0 without one.
        longest: what its kernel has to know of that.
    """

    chain: Chain
    layout: Layout
    arrays: tuple[fx.Node, ...]
    bitmap: tuple[fx.Node, ...] = ()
    grain: int = 0
    longest: int = 0

    @property
    def node(self) -> fx.Node:
        """That computes it."""
        return self.chain.nodes[0]

    @property
    def copy(self) -> list[fx.Node]:
        """What is kept of a bitmap beside what is stored."""
        return [] if self.bitmap[-1:] == (self.chain.sparse,) else list(self.bitmap)

    @property
    def kind(self) -> tuple[object, ...]:
        """Equal for layers that one kernel takes as a pair, if they read one x."""
        # those of distances in NARROW may differ
        arrays = self.arrays[:-1] if self.layout.format == "narrow" else self.arrays
        operands = (self.chain.sparse, *arrays, self.chain.bias)
        dtypes = [None if operand is None else example_of(operand).dtype for operand in operands]
        block = () if self.layout.format == BITMAP.OPERAND else self.layout.block
        # packed positions of one row and of several lie in orders of their own
        return (self.layout.format, block, self.layout.shape, example_of(self.arrays[-1]).dim(), *dtypes)


def few_rows_layer(node: Any) -> FewRows | None:
    """The layer that a node is, if it is of a form that has a kernel for pairs."""
    if not isinstance(node, fx.Node):
        return None
    arguments: Any = node.args
    if node.target is _PACKED:
        x, values, indices, positions, bias, residual, activation = arguments
        layout = Layout("nm", (2, 4), (example_of(values).shape[0], 2 * example_of(values).shape[1]))
        return FewRows(Chain((node,), values, False, x, True, bias, residual, activation), layout, (indices, positions))
    if node.target is _LINEAR:
        x, values, pattern, bias, residual, written, transpose, activation, _ = arguments
        layout = Layout.read(written)
        chain = Chain((node,), values, False, x, True, bias, residual, activation)
        arrays = tuple(pattern[: layout.own])
        if layout.format == BITMAP.OPERAND and not transpose:
            room = layout.block[0] or random_longest(*layout.shape, example_of(values).shape[0], 1)
            return FewRows(chain, layout, arrays, (*arrays, values), 1, room)
        if layout.format in PAIRS and not transpose:
            return FewRows(chain, layout, arrays)
    if node.target is _COPY:
        x, values, pattern, written, copy, grain, longest, bias, residual, activation = arguments
        chain = Chain((node,), values, False, x, True, bias, residual, activation)
        return FewRows(chain, Layout.read(written), tuple(pattern), tuple(copy), grain, longest)
    return None


def runs_kernels(layer: FewRows, ctx: Context) -> bool:
    """Whether it runs where there are kernels."""
    out = example_of(layer.node)
    return ctx.device(out.device).type == "cuda" and out.dtype in KERNEL_DTYPES and has_triton()


def product_of_layer(layer: FewRows, ctx: Context) -> Product | None:
    """The layer's numbers; None if they are not known."""
    chain, layout, out = layer.chain, layer.layout, example_of(layer.node)
    shape, stored = known_sizes(chain.dense), known_sizes(chain.sparse)
    if shape is None or stored is None:
        return None
    fused = (chain.bias is not None, chain.residual is not None, chain.activation)
    entries = torch.Size(stored).numel() // torch.Size(layout.entry).numel()
    return Product.of(layout, entries, False, shape, True, out, *fused, **circumstances(chain, ctx, out.device))
