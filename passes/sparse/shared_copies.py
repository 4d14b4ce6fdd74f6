"""Dense copies of sparse weights that one row of x is multiplied by are one, such as those of queries, keys and values.

A small layer leaves a card half empty, and each takes a launch. The copies are kept under the promise anyway, so that
one with the rows of all takes no more memory. Its results are parts of one row, as they would lie by themselves; of
several rows they would have to be copied apart. Under max-autotune they stay apart: Inductor's kernels for one row do
what follows them too.
"""

from collections.abc import Mapping
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from sparsecomp.passes.cost.shared_copies import decide
from sparsecomp.passes.cost.sparse import Product
from sparsecomp.passes.engine.constants import constant_behind, promised_node
from sparsecomp.passes.engine.rule import (
    Context,
    Plan,
    Rule,
    Verdict,
    Why,
    call,
    known_sizes,
    module_path,
    refuse,
    replays,
    writes_one_row,
)
from sparsecomp.passes.graph.canonicalize import example_of
from sparsecomp.passes.sparse.linear import WrittenOut
from sparsecomp.reference.patterns import Layout


def consider(node: fx.Node, ctx: Context) -> Verdict:
    """Judge one node: the first of such layers is a site."""
    layers = _together(node, ctx)
    if len(layers) < 2:
        return None
    x, last = node.args[0], layers[-1]
    if ctx.mode_changes(node, last):
        return refuse(Why.LAUNCHES_APART, detail="gradients or autocast are switched between them")
    if not ctx.analysis.unchanged(x, node, last):
        return refuse(Why.LAUNCHES_APART, detail="an operand is written to between them")
    decision = decide([_product(one, ctx) for one in layers])
    if decision.dense:
        return refuse(Why.LAUNCHES_APART, detail=decision.reason)
    *names, end = (f"`{module_path(one) or one.name}`" for one in layers)
    reason = f"{', '.join(names)} and {end} by one dense copy; {decision.reason}"
    return Plan(lambda: _build(node, layers, ctx), reason, "shared copy", dead=_unread(layers))


RULE = Rule("shared_copies", consider, after=("sparse_linear", "shared_input"), of_rewritten=True)


class Stacked(NamedTuple):
    """The dense weights of several sparse ones, one under another.

    Attributes:
        makes: what gives each.
        lengths: how many tensors each is made of.
    """

    makes: tuple[WrittenOut, ...]
    lengths: tuple[int, ...]

    def __call__(self, *tensors: Tensor) -> Tensor:
        ends = list(accumulate(self.lengths))
        each = zip(self.makes, ends, self.lengths, strict=True)
        return torch.cat([make(*tensors[end - length : end]) for make, end, length in each])


def _together(node: fx.Node, ctx: Context) -> list[fx.Node]:
    """The layers that can be one with this one, which is the first of them; none if it is not."""
    if not _is_one_row(node, ctx):
        return []
    x: Any = node.args[0]
    dtype = example_of(node.args[1]).dtype
    found = [one for one in x.users if _is_one_row(one, ctx) and one.args[0] is x]
    alike = sorted((one for one in found if example_of(one.args[1]).dtype is dtype), key=ctx.analysis.order.__getitem__)
    return alike if alike[0] is node else []


def _is_one_row(node: fx.Node, ctx: Context) -> bool:
    """Whether a node is one row times a dense copy, without bias, on a GPU."""
    if node.target is not F.linear or len(node.args) < 2 or any(one is not None for one in node.args[2:]):
        return False
    if writes_one_row(ctx.options):
        return False
    constant, shape, out = constant_behind(node.args[1]), known_sizes(node.args[0]), example_of(node)
    if constant is None or not isinstance(constant.make, WrittenOut) or shape is None or out is None:
        return False
    return torch.Size(shape[:-1]).numel() == 1 and not node.kwargs and ctx.device(out.device).type == "cuda"


def _product(node: fx.Node, ctx: Context) -> Product:
    weight, device = example_of(node.args[1]), torch.device("cuda")
    how = {"target": ctx.target, "replayed": replays(ctx.options, device), "products": ctx.products}
    return Product(
        device, Layout("csr", (1, 1), tuple(weight.shape)), 1, 1, weight.numel(), weight.dtype, True, False, False,
        "none", "", constant=True, **how,
    )  # fmt: skip


def _unread(layers: list[fx.Node]) -> tuple[fx.Node, ...]:
    """The copies that nobody else reads, the last first."""
    weights: list[Any] = [one.args[1] for one in reversed(layers)]
    behind = [one.args[0] for one in weights if one.op != "get_attr"]
    return tuple(one for one in (*weights, *behind) if len(one.users) == 1)


def _build(node: fx.Node, layers: list[fx.Node], ctx: Context) -> Mapping[fx.Node, fx.Node]:
    constants = [constant for one in layers if (constant := constant_behind(one.args[1])) is not None]
    makes: Any = tuple(one.make for one in constants)
    sources = [source for one in constants for source in one.sources]
    held = [tensor for source in sources if (tensor := ctx.constant(source)) is not None]
    names = [f"the weight `{source.target}`" for source in sources]
    made = Stacked(makes, tuple(len(one.sources) for one in constants))
    out = call(node.graph, node, F.linear, node.args[0], promised_node(node, made, sources, held, names))
    rows = [example_of(one).shape[-1] for one in layers]
    begins = accumulate(rows, initial=0)
    return {
        one: call(node.graph, one, torch.narrow, out, -1, begin, size)
        for one, begin, size in zip(layers, begins, rows, strict=False)
    }
