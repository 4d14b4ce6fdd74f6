"""Masks that are data: inputs, buffers without a promise, and what is computed of them, such as padding or documents.

Their block lists are made on the device by `sparsecomp::scanned_mask` in each call, once for all layers that read the
same mask.
"""

import operator
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import fx

import sparsecomp.ops.attention.mask_scan  # noqa: F401  (registers the operator)
from sparsecomp.passes.attention.kept import as_added, chosen_by_booleans
from sparsecomp.passes.attention.place import may_be_trained
from sparsecomp.passes.attention.site import AttentionSite, Steps, View, mask_steps, viewed
from sparsecomp.passes.engine.ordered import is_kept
from sparsecomp.passes.engine.rule import Context, Refusal, Why, call, refuse
from sparsecomp.passes.graph.canonicalize import example_of, op_of
from sparsecomp.passes.graph.operators import Trait
from sparsecomp.reference.attention.blocks import DEFAULT_BLOCK
from sparsecomp.reference.precision import KERNEL_DTYPES

_TENSORS = 10
"""Of block lists."""
_LEVELLED = torch.ops.sparsecomp.levelled_mask.default


class DataMask(NamedTuple):
    """A mask that is scanned in each call.

    Attributes:
        node: the mask.
        use: as of `sparsecomp.passes.attention.site.Mask`.
        dims: of the scores.
        lengths: queries and keys.
        unwritten: whether nothing writes to a node of the graph after it is made.
    """

    node: fx.Node
    use: str
    dims: int
    lengths: tuple[int, int]
    unwritten: Callable[[fx.Node], bool]

    def build(self, like: fx.Node, trained: bool = False) -> tuple[list[fx.Node], fx.Node | None]:
        """The block lists as nodes, and what is added to scores, of which they are made: levelled, if gradients are
        wanted."""
        mask = viewed(self.node, self._steps, like)
        if trained and self.use == "add":
            mask = call(like.graph, like, _LEVELLED, mask)
        arguments = (*self.lengths, *DEFAULT_BLOCK, self.use != "drop")
        target = torch.ops.sparsecomp.scanned_mask.default
        scan = self._there_is(target, mask, arguments, like) or call(like.graph, like, target, mask, *arguments)
        lists = [call(like.graph, like, operator.getitem, scan, place) for place in range(_TENSORS)]
        return lists, mask if self.use == "add" else None

    @property
    def sizes(self) -> tuple[int, ...]:
        """Batch entries, heads, queries and keys that the mask tells apart, 1 where it tells none."""
        return View(self.node, self._steps).shape

    @property
    def _steps(self) -> Steps:
        return mask_steps(example_of(self.node).dim(), self.dims)

    def described(self, share: float, seen: bool) -> str:
        """Where it comes from, for the report.

        Args:
            share: of the blocks that are thought to be kept.
            seen: that follows from the call that the graph is compiled for.
        """
        told = "are assumed to be kept" + (", by the call that it is compiled for" if seen else "")
        return f"its mask `{self.node.name}` is scanned in each call, {share:.0%} of its blocks {told}"

    def _there_is(self, target: object, mask: fx.Node, arguments: tuple[object, ...], like: fx.Node) -> fx.Node | None:
        """A scan of the same mask, made for a layer before."""
        for node in like.graph.nodes:
            if node is like:
                break
            if node.op == "call_function" and node.target is target and node.args[1:] == arguments:
                scanned = node.args[0]
                if isinstance(scanned, fx.Node) and self._same(scanned, mask):
                    return node
        return None

    def _same(self, one: fx.Node, other: fx.Node) -> bool:
        """Whether two nodes are the same view of one that nothing writes to, levelled or not."""
        if one is other:
            return self.unwritten(one)
        alike = one.target == other.target and len(one.args) == len(other.args) and one.kwargs == other.kwargs
        if not (alike and self._repeats(one) and self._repeats(other)):
            return False
        (first, *rest), (second, *others) = one.args, other.args
        if rest != others or not (isinstance(first, fx.Node) and isinstance(second, fx.Node)):
            return False
        return self._same(first, second)

    def _repeats(self, node: fx.Node) -> bool:
        """Whether a node gives the same of the same."""
        if node.target is _LEVELLED:
            return True
        op = op_of(node)
        return op is not None and not op.inplace and op.has(Trait.VIEW) and all(
            not isinstance(one, fx.Node) for one in node.args[1:]
        )


def data_mask(site: AttentionSite, ctx: Context) -> DataMask | Refusal:
    """The mask of a site, to be scanned; the booleans behind it where they say the same."""
    mask, out = site.mask, example_of(site.result)
    booleans = _booleans_behind(site, ctx)
    if booleans is not None:
        return booleans
    example = example_of(mask.node)
    problem = ""
    if example.device != out.device:
        problem = f"its mask is on {example.device}, not {out.device}"
    elif mask.reader is not site.result and not is_kept(mask.node, ctx, mask.reader):
        problem = "its mask is written to before the result is complete"
    elif mask.use != "add" and example.dtype is not torch.bool:
        problem = f"its mask is of {example.dtype}, not of booleans"
    elif mask.use != "add" and mask.fill != -torch.inf:
        problem = f"scores that it drops become {mask.fill:g}, which is no -inf"
    elif mask.use == "add" and (example.dtype not in KERNEL_DTYPES or mask.scale != 1):
        problem = f"its mask adds numbers of {example.dtype}, times {mask.scale:g}"
    if problem:
        return refuse(Why.ATTENTION_AS_WRITTEN, detail=problem)
    return _scanned(mask.node, mask.use, site, ctx)


def _scanned(node: fx.Node, use: str, site: AttentionSite, ctx: Context) -> DataMask:
    lengths = (site.query.shape[2], site.key.shape[2])
    return DataMask(node, use, site.dims, lengths, lambda node: _unwritten(node, ctx))


def _booleans_behind(site: AttentionSite, ctx: Context) -> DataMask | None:
    """The mask of booleans by which added numbers are 0 or -inf, which is smaller and is not added; None without one.

    Not where gradients of a query that keeps nothing are asked for and are NaN: they are others where scores are
    replaced.
    """
    mask, unchanged = site.mask, ctx.analysis.unchanged
    if mask.use != "add" or (site.gives_nan and may_be_trained(site, ctx)):
        return None
    found = chosen_by_booleans(mask.node, ctx)
    if found is None or as_added(found[2], site) != -torch.inf:
        return None
    node, drops, _, choice = found
    example = example_of(node)
    alike = example is not None and example.dtype is torch.bool and example.device == example_of(site.result).device
    there = alike and all(unchanged(one, one, mask.reader) for one in (mask.node, choice))
    if not (there and unchanged(node, choice, site.result)):
        return None
    return _scanned(node, "drop" if drops else "keep", site, ctx)


def _unwritten(node: fx.Node, ctx: Context) -> bool:
    return node in ctx.analysis.order and is_kept(node, ctx)
