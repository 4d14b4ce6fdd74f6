"""A 2:4 layer of few rows is multiplied by packed positions, kept under the promise that the pattern stays.

The weight's bytes are the time of such a layer. Its values are read as they lie; of the positions, which take a byte
each as they are stored, a copy of two bits each is kept. Products of more rows in the same graph take the layer's own.
"""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor, fx

import sparsecomp.ops.sparse.packed_linear  # noqa: F401  (registers the operator)
from sparsecomp.lowering.sparse.packed_linear import PackedPositions, order_for, positions_shape
from sparsecomp.passes.cost.decision import Decision
from sparsecomp.passes.cost.packed_linear import decide
from sparsecomp.passes.cost.sparse import Product, beside_the_layer
from sparsecomp.passes.engine.constants import promised_node
from sparsecomp.passes.engine.rule import Plan, call
from sparsecomp.passes.sparse.chain import Chain

_PACKED = torch.ops.sparsecomp.packed_linear.default


def packed_plan(
    chain: Chain, product: Product, rivals: Decision, pattern: Sequence[fx.Node], kept: Sequence[Tensor]
) -> Plan | None:  # fmt: skip
    """The layer by packed positions, where that is faster than what was decided without.

    Args:
        pattern: nodes of the index arrays.
        kept: what values and index arrays hold, and are promised to hold.
    """
    decision = None if chain.flip else decide(product, rivals)
    if decision is None:
        return None
    node, packed = chain.nodes[-1], PackedPositions(order_for(product.n))
    size = 4 * prod(positions_shape(product.m, product.k, packed.order)) / 2**20
    reason = (
        f"{product.described} by {decision.implementation}{chain.fused}; {decision.reason}; packed positions are kept, "
        f"{size:.3g} MiB, under the promise that the pattern stays"
    )

    def build() -> dict[fx.Node, fx.Node]:
        name = f"the index array `{getattr(pattern[0], 'target', pattern[0])}`"
        positions = promised_node(node, packed, pattern[:1], kept[1:2], [name])
        return {node: call(
            node.graph, node, _PACKED, chain.dense, chain.sparse, pattern[0], positions, chain.bias, chain.residual,
            chain.activation,
        )}  # fmt: skip

    return Plan(build, reason, "packed copy", "", chain.dead, beside_the_layer(product, decision))
