"""An unstructured layer of few rows is multiplied by a bitmap, kept under the promise that the weight stays.

The time of such a layer is to read its weight and to find each value's place. A copy of the values and of bits for
their places, in the order in which a kernel decodes them, is fewer bytes than the dense weight, and takes fewer
instructions than columns do. Products of more rows in the same graph take the layer's own.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, fx

import sparsecomp.ops.sparse.bitmap_linear  # noqa: F401  (registers the operator)
from sparsecomp.lowering.sparse.bitmap_linear import BitmapChunks, copy_bytes, longest_chunk
from sparsecomp.passes.cost.bitmap_linear import decide
from sparsecomp.passes.cost.decision import Decision
from sparsecomp.passes.cost.sparse import Product, beside_the_layer
from sparsecomp.passes.engine.constants import promised_nodes
from sparsecomp.passes.engine.rule import Plan, call
from sparsecomp.passes.sparse.chain import Chain
from sparsecomp.reference.patterns import Layout

COPIED = ("csr", "narrow", "bitmap")
"""Formats of weights of which a bitmap may be kept."""
_BITMAP = torch.ops.sparsecomp.bitmap_linear.default


def bitmap_plan(
    chain: Chain, product: Product, rivals: Decision, pattern: Sequence[fx.Node], layout: Layout,
    kept: Sequence[Tensor], beside: Sequence[tuple[Product, Decision]],
) -> Plan | None:  # fmt: skip
    """The layer by a bitmap, where that is faster than what was decided without.

    Args:
        pattern: nodes of the index arrays of its layout.
        kept: what values and index arrays hold, and are promised to hold.
        beside: layers with which it could share a launch (`passes.sparse.shared_input`), and what was decided of each.
    """
    chosen = None if chain.flip or layout.format not in COPIED else decide(product, rivals, beside)
    if chosen is None:
        return None
    decision, grain = chosen
    node, size = chain.nodes[-1], copy_bytes(product.m, product.k, product.stored, grain) / 2**20
    reason = (
        f"{product.described} by {decision.implementation}{chain.fused}; {decision.reason}; a bitmap with the values "
        f"is kept, {size:.3g} MiB, under the promise that the weight stays"
    )

    def build() -> dict[fx.Node, fx.Node]:
        names = [f"`{getattr(one, 'target', one)}`" for one in (chain.sparse, *pattern)]
        longest = longest_chunk(kept[1:], layout, grain)
        make = BitmapChunks(layout.written(), grain)
        copy = promised_nodes(node, make, 3, (chain.sparse, *pattern), kept, names)
        return {node: call(
            node.graph, node, _BITMAP, chain.dense, chain.sparse, list(pattern), layout.written(), copy, grain,
            longest, chain.bias, chain.residual, chain.activation,
        )}  # fmt: skip

    return Plan(build, reason, "bitmap copy", "", chain.dead, beside_the_layer(product, decision))
