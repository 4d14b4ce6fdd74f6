"""A sparse layer whose rows all store k elements is one of fixed fan-in, its values and indices seen as (n_out, k).

That the rows are so long is read off the pointers, under the promise that buffers stay. Where a change of the pattern
is seen and its rows are uneven, Dynamo compiles anew. Indices and values stay the layer's own, so that another pattern
of as long rows is simply read.
"""

from typing import NamedTuple

import torch
from torch import Tensor, fx

from sparsecomp import _compat
from sparsecomp.passes.cost.sparse import Product, beside_the_layer
from sparsecomp.passes.engine.constants import checked
from sparsecomp.passes.engine.proofs import take_for_granted
from sparsecomp.passes.engine.rule import Context, Plan, call
from sparsecomp.passes.graph.canonicalize import dtype_of, example_of
from sparsecomp.passes.local.operator import beside, fixed_fan_in, lists_of, operator_of, spread_now
from sparsecomp.passes.sparse.chain import Chain, ending_at
from sparsecomp.passes.sparse.linear import arrays_of, numbers_of, sparse_layer, way_of


class EvenRows(NamedTuple):
    """The claim that so many rows all store as many elements, of the pointers."""

    rows: int
    fan_in: int

    def __call__(self, pointers: Tensor) -> bool:
        expected = torch.arange(self.rows + 1, dtype=pointers.dtype, device=pointers.device) * self.fan_in
        return torch.equal(pointers, expected)


def consider_stored(node: fx.Node, ctx: Context) -> Plan | None:
    """The plan for a sparse layer and what can be fused behind it; None where `sparse_linear` judges it."""
    chain = ending_at(node, sparse_layer, ctx)
    unasked = ctx.options.implementation == "dense" or not _compat.asks_in_each_call()
    rows = None if chain is None or unasked else _rows(chain, ctx)
    if chain is None or rows is None:
        return None
    product = numbers_of(chain, ctx)
    return _plan(chain, rows, product, ctx) if isinstance(product, Product) else None


def _rows(chain: Chain, ctx: Context) -> EvenRows | None:
    """The rows of a layer in CSR, if each stores as many elements and that is promised to stay."""
    pattern, layout = arrays_of(chain)
    if not layout.plain or chain.flip or any(dtype_of(array) is not torch.int32 for array in pattern):
        return None
    held, entries, outputs = ctx.constant(pattern[0]), example_of(pattern[1]).shape[0], layout.shape[0]
    if held is None or type(entries) is not int or not outputs or not entries or entries % outputs:
        return None
    rows = EvenRows(outputs, entries // outputs)
    return rows if rows(held) else None


def _plan(chain: Chain, rows: EvenRows, product: Product, ctx: Context) -> Plan | None:
    (pointers, indices, *_), _ = arrays_of(chain)
    spread, kept = spread_now(indices, rows, ctx), ctx.constant(indices) is not None or not product.trained
    layer = fixed_fan_in(chain, rows, spread, kept, ctx)
    decision = beside(layer, way_of(chain, product, ctx))
    held = ctx.constant(pointers)
    if decision.dense or held is None:
        return None

    def build() -> dict[fx.Node, fx.Node]:
        last = chain.nodes[-1]
        weight, index = (call(last.graph, last, Tensor.reshape, one, tuple(rows)) for one in (chain.sparse, indices))
        lists = lists_of(indices, layer, (), last, ctx)
        take_for_granted(last, pointers, held, rows)
        index = checked(index, last, [pointers], [held], [f"the pattern `{pointers.target}`"])
        return {last: operator_of(chain, chain.dense, weight, index, chain.bias, lists, spread)}

    reason = (
        f"{product.described}, {rows.fan_in} in each row{chain.fused}, under the promise that it stays; "
        f"{decision.reason}"
    )
    return Plan(build, reason, "gather_dot", "", chain.dead, beside_the_layer(product, decision), chain.nodes[0])
