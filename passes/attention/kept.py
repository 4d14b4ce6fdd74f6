"""The mask of an attention over a cache, for an operator that walks from the first key that is kept to the last.

It is a mask of booleans, or of numbers that are chosen by one, such as 0 and -inf, or of any numbers that are added.
Whatever it is computed of, it is read as it is in each call. Where the keys are that it keeps is found once for all
layers that read it.
"""

import math
import operator
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, fx

import sparsecomp.ops.attention.masked_decode  # noqa: F401  (registers the operator)
from sparsecomp.passes.attention.site import AttentionSite, Mask, mask_steps, viewed
from sparsecomp.passes.engine.ordered import is_kept
from sparsecomp.passes.engine.rule import Context, Refusal, Why, call, refuse
from sparsecomp.passes.graph.canonicalize import CanonicalOp, example_of, op_of
from sparsecomp.passes.graph.operators import Trait
from sparsecomp.passes.spiking.operand import cast
from sparsecomp.reference.attention.blocks import SURELY_ZERO
from sparsecomp.reference.precision import KERNEL_DTYPES

_NOT = ("bitwise_not", "logical_not")
_KEY = "sparsecomp_kept"
"""Of a node's meta: which mask it was made of, and what of it it is."""


class Read(NamedTuple):
    """Nodes that an operator reads of a mask.

    Attributes:
        kept: (batch or 1, heads or 1, queries or 1, keys) bool, or numbers that are added, -inf of what is dropped.
        ranges: as of `sparsecomp.ops.attention.masked_decode.kept_range`.
        empty: (…, 1), where a query keeps nothing and then weighs all keys alike; None if it gives zeros.
    """

    kept: fx.Node
    ranges: fx.Node
    empty: fx.Node | None


class KeptMask(NamedTuple):
    """The mask of a site, or one of booleans behind it.

    Attributes:
        node: the mask.
        drops: of booleans: True where a pair is dropped.
        least: of booleans: dropped scores become a finite number, by which a query that keeps nothing weighs all keys
            alike.
        dims: of the scores.
        sizes: batch and keys.
        shared: nothing in the graph writes to it, so that what is found of it holds for all that read it.
        added: it is of numbers that are added, in this dtype; None of booleans.
    """

    node: fx.Node
    drops: bool
    least: bool
    dims: int
    sizes: tuple[int, int]
    shared: bool
    added: torch.dtype | None = None

    @property
    def readers(self) -> int:
        """Calls that read it, or the same view."""
        name, inputs = _spelled(self.node), self.node.all_input_nodes
        alike = [one for one in (inputs[0].users if inputs else ()) if _spelled(one) == name] or [self.node]
        return max(sum(len(one.users) for one in alike), 1) if self.shared else 1

    def build(self, like: fx.Node) -> Read:
        """What is read of it, by nodes that are there for a layer before, or new ones."""
        name = f"{_spelled(self.node)} {self.drops} {self.least} {self.dims} {self.sizes} {self.added}"
        before = self._made(name, like) if self.shared else {}
        read = self._read(like) if not before else Read(before["kept"], before["ranges"], before.get("empty"))
        if self.shared and not before:
            for role, node in read._asdict().items():
                if node is not None:
                    node.meta[_KEY] = (name, role)
        return read

    @staticmethod
    def _made(name: str, like: fx.Node) -> dict[str, fx.Node]:
        found: dict[str, fx.Node] = {}
        for node in like.graph.nodes:
            if node is like:
                break
            made, role = node.meta.get(_KEY, ("", ""))
            if made == name:
                found[role] = node
        return found

    def _read(self, like: fx.Node) -> Read:
        batch, keys = self.sizes

        def then(target: object, *args: object) -> fx.Node:
            return call(like.graph, like, target, *args)

        kept = then(Tensor.logical_not, self.node) if self.drops else self.node
        kept = kept if self.added is None else _cast_to(kept, self.added, like)
        kept = viewed(kept, mask_steps(example_of(self.node).dim(), self.dims), like)
        kept = then(Tensor.expand, kept, -1, -1, -1, keys)
        empty = None
        if self.added is not None:
            both = then(torch.ops.sparsecomp.seen_numbers.default, kept)
            kept, empty = (then(operator.getitem, both, place) for place in range(2))
            seen = then(Tensor.ne, kept, -math.inf)
            return Read(kept, then(torch.ops.sparsecomp.kept_range.default, seen, batch), empty)
        if self.least:
            empty = then(Tensor.logical_not, then(Tensor.any, kept, -1, True))
            kept = then(Tensor.logical_or, kept, empty)
        return Read(kept, then(torch.ops.sparsecomp.kept_range.default, kept, batch), empty)


def _spelled(node: fx.Node) -> str:
    """What two views have in common that are the same one of the same node."""
    steps = ""
    while (op := op_of(node)) is not None and op.has(Trait.VIEW) and not op.inplace:
        if len(node.all_input_nodes) != 1 or node.args[:1] != (op.input,):
            break
        steps += f" {op.name} {node.args[1:]} {node.kwargs}"
        node = node.all_input_nodes[0]
    return f"{node.name}{steps}"


def kept_mask(site: AttentionSite, ctx: Context) -> KeptMask | Refusal:
    """The mask of a site: of booleans, if there is one behind it."""
    mask, out, unchanged = site.mask, example_of(site.result), ctx.analysis.unchanged
    node, drops, since, fill = mask.node, mask.use == "drop", mask.reader, mask.fill
    if mask.use == "add":
        found = chosen_by_booleans(mask.node, ctx)
        if found is None or (mask.scale == 1 and as_added(found[2], site) > SURELY_ZERO):
            return _kept_numbers(site, ctx)
        node, drops, fill, since = found
        if not all(unchanged(one, one, mask.reader) for one in (mask.node, since)):
            return _as_written("its mask is written to before it is added")
    while (op := op_of(node)) is not None and op.name in _NOT and not op.inplace and op.out is None:
        inner = op.input
        same = unchanged(node, node, since) and unchanged(inner, node, site.result)
        if not isinstance(inner, fx.Node) or not same or not _is_bool(inner):
            break
        node, drops, since = inner, not drops, node
    example = example_of(node)
    if not _is_bool(node):
        return _as_written(f"its mask `{node.name}` is not of booleans")
    if example.device != out.device:
        return _as_written(f"its mask is on {example.device}, not {out.device}")
    if not unchanged(node, since, site.result):
        return _as_written("its mask is written to before the result is complete")
    fill = as_added(fill, site)
    if not fill <= SURELY_ZERO:
        return _as_written(f"scores that it drops become {fill:g} or less by that, which is no -inf")
    sizes = (site.query.shape[0], site.key.shape[2])
    return KeptMask(node, drops, fill > -torch.inf, site.dims, sizes, is_kept(node, ctx))


def _kept_numbers(site: AttentionSite, ctx: Context) -> KeptMask | Refusal:
    mask, out, example = site.mask, example_of(site.result), example_of(site.mask.node)
    if example.device != out.device:
        return _as_written(f"its mask is on {example.device}, not {out.device}")
    if example.dtype not in KERNEL_DTYPES or mask.scale != 1:
        return _as_written(f"its mask adds numbers of {example.dtype}, times {mask.scale:g}")
    if mask.reader is not site.result and not ctx.analysis.unchanged(mask.node, mask.reader, site.result):
        return _as_written("its mask is written to before the result is complete")
    sizes = (site.query.shape[0], site.key.shape[2])
    return KeptMask(mask.node, False, False, site.dims, sizes, is_kept(mask.node, ctx), _dtype_as_added(mask))


def _dtype_as_added(mask: Mask) -> torch.dtype:
    """That numbers of a mask are rounded to where they are added: under autocast, or by a sum in place, they may become
    -inf."""
    given, sums = example_of(mask.node).dtype, example_of(mask.reader).dtype
    return sums if sums.itemsize < given.itemsize else given


def _cast_to(node: fx.Node, dtype: torch.dtype, like: fx.Node) -> fx.Node:
    given = example_of(node)
    if dtype is given.dtype:
        return node
    rounded = cast(node, dtype, like)
    rounded.meta["example_value"] = given.to(dtype)
    return rounded


def numbers_as_added(site: AttentionSite) -> fx.Node:
    """The mask of a site, of numbers in the dtype that they are rounded to where they are added."""
    return _cast_to(site.mask.node, _dtype_as_added(site.mask), site.result)


def as_added(number: float, site: AttentionSite) -> float:
    """What a number of a site's mask adds to scores: autocast, and a sum in place, round it to what these are of."""
    return _rounded(number, [example_of(site.mask.reader).dtype]) * site.mask.scale


def _is_bool(node: fx.Node) -> bool:
    example = example_of(node)
    return example is not None and example.dtype is torch.bool


def _as_written(detail: str) -> Refusal:
    return refuse(Why.ATTENTION_AS_WRITTEN, detail=detail)


def chosen_by_booleans(node: fx.Node, ctx: Context) -> tuple[fx.Node, bool, float, fx.Node] | None:
    """Of numbers that are 0 or another one by a mask of booleans: the mask, whether it is True where they are not 0,
    the other number as it is added, and the call that chooses."""
    dtypes, choice = [], node
    while (op := op_of(choice)) is not None and op.has(Trait.CAST) and isinstance(op.input, fx.Node):
        dtypes.append(example_of(choice).dtype)
        choice = op.input
    if op is None or op.inplace or op.out is not None:
        return None
    found = _by_where(op, ctx) if op.name == "where" else _by_fill(op, ctx) if op.name == "masked_fill" else None
    if found is None or not all(dtype.is_floating_point for dtype in (example_of(choice).dtype, *dtypes)):
        return None
    mask, drops, number = found
    return mask, drops, _rounded(number, (example_of(choice).dtype, *dtypes[::-1])), choice


def _rounded(number: float, dtypes: Sequence[torch.dtype]) -> float:
    """The number, cast to one dtype after another: the least of float32 is -inf in bfloat16."""
    rounded = torch.tensor(number, dtype=torch.float64, device="cpu")
    for dtype in dtypes:
        rounded = rounded.to(dtype)
    return float(rounded)


def _by_where(op: CanonicalOp, ctx: Context) -> tuple[fx.Node, bool, float] | None:
    condition, chosen = op.get("condition"), (op.get("input"), op.get("other"))
    first, second = (_number(one, op.node, ctx) for one in chosen)
    if not isinstance(condition, fx.Node) or first is None or second is None or 0 not in (first, second):
        return None
    return (condition, False, second) if first == 0 else (condition, True, first)


def _by_fill(op: CanonicalOp, ctx: Context) -> tuple[fx.Node, bool, float] | None:
    mask, value = op.get("mask"), _number(op.get("value"), op.node, ctx)
    if not isinstance(mask, fx.Node) or value is None or _number(op.input, op.node, ctx) != 0:
        return None
    return mask, True, value


def _number(value: object, reader: fx.Node, ctx: Context) -> float | None:
    """The one number that a value is everywhere; None if that is not known."""
    if isinstance(value, int | float):
        return float(value)
    fact, op = ctx.fact(value, reader), op_of(value) if isinstance(value, fx.Node) else None
    if fact is not None and fact.is_zero:
        return 0.0
    if op is None or op.name not in ("tensor", "scalar_tensor", "full") or op.out is not None:
        return None
    number = op.get("data", op.get("fill_value"))
    fixed = isinstance(number, int | float) and ctx.analysis.unchanged(value, op.node, reader)
    return float(number) if fixed else None
