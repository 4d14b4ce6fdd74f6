"""Masks that are known when a graph is compiled, as block lists.

Such a mask is computed of positions alone, by `arange`, `tril`, comparisons and the like, or of buffers that the option
`frozen` promises to stay. It is computed once, as the graph has it, and its block lists become constants of the graph.
Those of buffers have room for any other mask of the same size: where a write is seen, they are made anew in place.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from sparsecomp.errors import FrozenWeightError
from sparsecomp.lowering.attention.block_choice import of_faster_block
from sparsecomp.ops.masked.folded_weight import computed, formula
from sparsecomp.passes.attention.place import may_be_trained
from sparsecomp.passes.attention.site import AttentionSite, Mask, mask_steps, stepped
from sparsecomp.passes.engine.constants import promised_nodes
from sparsecomp.passes.engine.rule import Context, Refusal, Why, is_static, refuse
from sparsecomp.passes.graph.canonicalize import example_of, op_of
from sparsecomp.passes.graph.operators import Trait
from sparsecomp.passes.masked.formula import Formula, computed_by, is_parameter, is_pure, writes_elsewhere
from sparsecomp.reference.attention.blocks import (
    DEFAULT_BLOCK,
    FULL,
    SURELY_ZERO,
    WIDE_BLOCK,
    AttentionBlocks,
    blocks_of,
)

OF_NUMBERS = frozenset({
    "arange", "eye", "linspace", "cat", "stack", "cumsum", "diff", "outer", "searchsorted", "any", "all", "sum",
    "mod", "remainder",
})  # fmt: skip
"""Operators beside the elementwise ones that give the same for the same arguments, such as those that count."""
_TENSORS = 10
"""Of block lists."""


class MaskLists(NamedTuple):
    """What gives the tensors of block lists for the sources of a mask.

    Attributes:
        formula: of the mask.
        use, fill: as of `Mask`.
        surely_zero: a score that is dropped if a number so low is added, or if it becomes that.
        dims: of the scores.
        lengths: queries and keys.
        gives_nan: every query must keep a pair, since one that keeps none gives NaN as written.
        roomy: the lists have room for any mask of this size.
        block: queries and keys of a block.
    """

    formula: str
    use: str
    fill: float
    surely_zero: float
    dims: int
    lengths: tuple[int, int]
    gives_nan: bool
    roomy: bool
    block: tuple[int, int] = DEFAULT_BLOCK

    def __call__(self, *sources: Tensor) -> tuple[Tensor, ...]:
        found = self.blocks(*sources)
        if isinstance(found, str):
            raise FrozenWeightError(
                f"a mask of attention was promised to stay, but it was written to, and now {found}: compile without the"
                " option frozen, or compile again after the write"
            )
        return tuple((_roomy(found) if self.roomy else found)[-_TENSORS:])

    def blocks(self, *sources: Tensor) -> AttentionBlocks | str:
        """The block lists, or why the mask has none; waits for the device."""
        kept = self.kept(*sources)
        return kept if isinstance(kept, str) else blocks_of(kept, self.block)

    def kept(self, *sources: Tensor) -> Tensor | str:
        """The pairs (batch or 1, heads or 1, queries, keys) that are kept, or why they are no mask; waits for the
        device."""
        mask = computed(sources, self.formula)
        if self.use == "add":
            kept, dropped = mask == 0, mask <= self.surely_zero
            if not bool((kept | dropped).all()):
                return "it adds other numbers than 0 and -inf to scores"
            least_sure = bool((mask[dropped] > -math.inf).any())
        elif self.use == "multiply":
            kept, least_sure = mask == 1, False
            if not bool((kept | (mask == 0)).all()):
                return "it multiplies scores by other numbers than 0 and 1"
        elif not self.fill <= self.surely_zero:
            return f"scores that it drops become {self.fill:g}, which is no -inf"
        else:
            kept, least_sure = (mask if self.use == "keep" else ~mask), self.fill > -math.inf
        kept = stepped(kept, mask_steps(kept.dim(), self.dims)).expand(-1, -1, *self.lengths)
        if (self.gives_nan or least_sure) and not bool(kept.any(-1).all()):
            return "a query keeps no key, which gives other than zeros as written"
        return kept


def _roomy(blocks: AttentionBlocks) -> AttentionBlocks:
    """With room in the lists for every block, and for as many tiles."""
    (batch, heads, rows), columns = blocks.count.shape, blocks.k_count.shape[2]
    spare = batch * heads * rows * columns - len(blocks.bits)

    def widened(listed: Tensor, width: int, value: int) -> Tensor:
        return F.pad(listed, (0, max(width - listed.shape[3], 0)), value=value)

    return blocks._replace(
        index=widened(blocks.index, columns, 0), tile=widened(blocks.tile, columns, FULL),
        bits=F.pad(blocks.bits, (0, 0, 0, 0, 0, spare)), k_index=widened(blocks.k_index, rows, 0),
        k_tile=widened(blocks.k_tile, rows, FULL), k_bits=F.pad(blocks.k_bits, (0, 0, 0, 0, 0, spare)),
    )  # fmt: skip


class KnownMask(NamedTuple):
    """A mask that was proved.

    Attributes:
        lists: what gives its block lists.
        blocks: those.
        formula: how it is computed.
        held: what its sources hold.
        whole, causal: it is known to stay, and keeps all pairs, or each query and what is before it.
    """

    lists: MaskLists
    blocks: AttentionBlocks
    formula: Formula
    held: tuple[Tensor, ...]
    whole: bool = False
    causal: bool = False

    def build(self, like: fx.Node) -> list[fx.Node]:
        """The block lists as nodes."""
        sources = self.formula.sources
        names = [f"the mask `{source.target}`" for source in sources]
        return promised_nodes(like, self.lists, _TENSORS, sources, self.held, names)

    @property
    def described(self) -> str:
        """Where it comes from, for the report."""
        if not self.formula.sources:
            return "its mask is computed of positions alone"
        names = " and ".join(f"`{source.target}`" for source in self.formula.sources)
        return f"its mask is computed of {names}, under the promise that it stays"


def known_mask(site: AttentionSite, ctx: Context) -> KnownMask | Refusal:
    """The mask of a site, if it is known now; looks at it on its device."""
    mask = site.mask
    found = computed_by(mask.node, mask.reader, is_known, ctx)
    shapes = {source: stand_in for source in found.sources if (stand_in := _shape_only(source, found)) is not None}
    sources = tuple(source for source in found.sources if source not in shapes)
    problem = _not_known(found, sources, mask, ctx)
    if problem is not None:
        return problem
    held = [ctx.constant(source) for source in sources]
    missing = [source for source, one in zip(sources, held, strict=True) if one is None]
    if missing:
        return refuse(Why.MASK_NOT_FROZEN, name=missing[0].target, option="frozen='buffers'")
    device = example_of(site.query.node).device
    if example_of(mask.node).device != device:
        return refuse(Why.ATTENTION_AS_WRITTEN, detail=f"its mask is on {example_of(mask.node).device}, not {device}")
    lists = MaskLists(
        formula(_module(found, shapes)), mask.use, mask.fill, SURELY_ZERO / mask.scale, site.dims,
        (site.query.shape[2], site.key.shape[2]), site.gives_nan, bool(sources),
    )  # fmt: skip
    known = tuple(one for one in held if one is not None)
    with torch.inference_mode(False), torch.no_grad():
        kept = lists.kept(*known)
        if isinstance(kept, str):
            return refuse(Why.ATTENTION_AS_WRITTEN, detail=f"its mask is known, but {kept}")
        # lists of buffers are made anew where a write is seen; torch's own flags are not
        flags = (False, False) if sources else (bool(kept.all()), _is_causal(kept))
        blocks = _blocks(kept, site, ctx)
        lists = lists._replace(block=(blocks.block_q, blocks.block_k))
        return KnownMask(lists, blocks, replace(found, sources=sources), known, *flags)


def _blocks(kept: Tensor, site: AttentionSite, ctx: Context) -> AttentionBlocks:
    """The block lists of a mask, of the faster of two sizes."""
    blocks, out = blocks_of(kept, DEFAULT_BLOCK), example_of(site.result)
    depth, trained = max(site.query.shape[3], site.value.shape[3]), may_be_trained(site, ctx)
    if ctx.device(out.device).type != "cuda":
        return blocks
    return of_faster_block(blocks, lambda: blocks_of(kept, WIDE_BLOCK), depth, out.dtype, trained)


def _is_causal(kept: Tensor) -> bool:
    queries, keys = kept.shape[-2:]
    if queries != keys:  # torch's kernels do not agree about where the diagonal is
        return False
    return bool((kept == kept.new_ones(queries, keys).tril()).all())


def is_known(node: fx.Node) -> bool:
    """Whether a call gives the same numbers for the same arguments, and does no more than masks of positions need."""
    op = op_of(node)
    return is_pure(node) or (op is not None and op.out is None and op.module is None and op.name in OF_NUMBERS)


def _may_write(user: fx.Node, node: fx.Node) -> bool:
    op = op_of(user)
    if op is None or not op.known or op.record.update is not None or op.out is not None:
        return True
    gives = op.inplace or op.has(Trait.VIEW | Trait.ALIAS | Trait.CAST | Trait.DROPOUT)
    return gives and op.input is node


def _shape_only(source: fx.Node, found: Formula) -> Tensor | None:
    """What stands for a source of which a mask takes nothing but shape, dtype and device; None for any other."""
    users = [op_of(user) for user in source.users if user in found.nodes]
    filled = all(op is not None and op.has(Trait.FILL) and op.input is source for op in users)
    example = example_of(source)
    if not users or not filled or example is None or any(type(size) is not int for size in example.shape):
        return None
    return example


def _not_known(
    found: Formula, sources: tuple[fx.Node, ...], mask: Mask, ctx: Context
) -> Refusal | None:
    """Why the mask is not known when the graph is compiled; None if it may be."""
    for source in sources:
        if source.op not in ("placeholder", "get_attr"):
            return _as_written(f"its mask depends on `{source.name}`, which is computed in each call")
        if not isinstance(example_of(source), Tensor):
            return _as_written(f"its mask depends on `{source.target}`, a size that is not the same in each call")
        if source not in ctx.values or not (is_static(source) or is_parameter(source, ctx)):
            return _as_written(f"its mask depends on `{source.target}`, which is an input of the graph")
        if ctx.gradients and ctx.values[source].requires_grad:
            return _as_written(f"its mask is computed of `{source.target}`, which is trained")
    written = writes_elsewhere(replace(found, sources=sources), mask.reader, ctx, _may_write)
    return None if written is None else _as_written(f"`{written.name}` may be written to in this graph")


def _as_written(detail: str) -> Refusal:
    return refuse(Why.ATTENTION_AS_WRITTEN, detail=detail)


def _module(found: Formula, shapes: Mapping[fx.Node, Tensor]) -> fx.GraphModule:
    """The formula as a function of its sources; the others are made of their shapes."""
    graph, copies = fx.Graph(), {}
    for index, source in enumerate(source for source in found.sources if source not in shapes):
        copies[source] = graph.placeholder(f"source_{index}")
    for index, (source, like) in enumerate(shapes.items()):
        one = graph.create_node(
            "call_function", torch.empty, ((),), {"dtype": like.dtype, "device": like.device}, f"like_{index}"
        )
        copies[source] = graph.call_method("expand", (one, tuple(like.shape)))
    for index, node in enumerate(found.nodes):
        args, kwargs = fx.map_arg((node.args, node.kwargs), copies.__getitem__)
        # named by its place, so that the same formula elsewhere reads the same
        copies[node] = graph.create_node(node.op, node.target, args, kwargs, f"value_{index}")
    graph.output(copies[found.result])
    return fx.GraphModule(torch.nn.Module(), graph)
