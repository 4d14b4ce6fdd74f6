"""A sparse layer of few rows as earlier rules left it in the graph: how it runs, and on what operands."""

from typing import Any, NamedTuple

import torch
from torch import fx

import sparsecomp.ops.sparse.bitmap_linear
import sparsecomp.ops.sparse.packed_linear  # noqa: F401  (registers the operators)
from sparsecomp.lowering.sparse.gated_pair import PAIRS
from sparsecomp.passes.cost.sparse import Product
from sparsecomp.passes.engine.rule import Context, known_sizes
from sparsecomp.passes.graph.canonicalize import example_of
from sparsecomp.passes.sparse.chain import Chain, circumstances
from sparsecomp.reference.patterns import Layout

LINEAR = torch.ops.sparsecomp.sparse_linear.default
BITMAP = torch.ops.sparsecomp.bitmap_linear.default
PACKED = torch.ops.sparsecomp.packed_linear.default


class FewRows(NamedTuple):
    """A sparse layer of a form that has a kernel for pairs.

    Attributes:
        chain: its operands; the layer is its only node.
        arrays: index arrays of its layout; of 2:4 packed positions behind them.
        bitmap: what it reads by a bitmap instead.
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
    def kind(self) -> tuple[object, ...]:
        """Equal for layers that one kernel takes as a pair, if they read one x."""
        # those of distances in NARROW may differ
        arrays = self.arrays[:-1] if self.layout.format == "narrow" else self.arrays
        operands = (self.chain.sparse, *arrays, self.chain.bias)
        dtypes = [None if operand is None else example_of(operand).dtype for operand in operands]
        # packed positions of one row and of several lie in orders of their own
        return (self.layout.format, self.layout.block, self.layout.shape, example_of(self.arrays[-1]).dim(), *dtypes)


def few_rows_layer(node: Any) -> FewRows | None:
    """The layer that a node is, if it is of a form that has a kernel for pairs."""
    if not isinstance(node, fx.Node):
        return None
    arguments: Any = node.args
    if node.target is PACKED:
        x, values, indices, positions, bias, residual, activation = arguments
        layout = Layout("nm", (2, 4), (example_of(values).shape[0], 2 * example_of(values).shape[1]))
        return FewRows(Chain((node,), values, False, x, True, bias, residual, activation), layout, (indices, positions))
    if node.target is LINEAR:
        x, values, pattern, bias, residual, written, transpose, activation, _ = arguments
        layout = Layout.read(written)
        if layout.format in PAIRS and not transpose:
            chain = Chain((node,), values, False, x, True, bias, residual, activation)
            return FewRows(chain, layout, tuple(pattern[: layout.own]))
    if node.target is BITMAP:
        x, values, pattern, written, copy, grain, longest, bias, residual, activation = arguments
        chain = Chain((node,), values, False, x, True, bias, residual, activation)
        return FewRows(chain, Layout.read(written), tuple(pattern), tuple(copy), grain, longest)
    return None


def product_of_layer(layer: FewRows, ctx: Context) -> Product | None:
    """The layer's numbers; None if they are not known."""
    chain, layout, out = layer.chain, layer.layout, example_of(layer.node)
    shape, stored = known_sizes(chain.dense), known_sizes(chain.sparse)
    if shape is None or stored is None:
        return None
    fused = (chain.bias is not None, chain.residual is not None, chain.activation)
    entries = torch.Size(stored).numel() // torch.Size(layout.entry).numel()
    return Product.of(layout, entries, False, shape, True, out, *fused, **circumstances(chain, ctx, out.device))
