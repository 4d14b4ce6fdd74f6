"""What the report keeps of a graph: its nodes before and after rewriting, with facts, densities and times.

The times of layers that rules judged are the rules' own estimates. Those of other products of matrices and of
convolutions are estimated here, where the card is known; of everything else, which Inductor fuses in ways that nobody
foresees, no time is claimed.
"""

import math
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import fx

from sparsecomp.lowering.tuning.cards import Card
from sparsecomp.lowering.tuning.ceilings import known_card
from sparsecomp.passes.cost import cpu as cpu_cost
from sparsecomp.passes.cost.dense import DenseWork, conv_work, matmul_work, time_of
from sparsecomp.passes.engine.location import user_location
from sparsecomp.passes.engine.rule import Context, is_static, known_sizes, module_path, replays
from sparsecomp.passes.facts.analysis import Analysis
from sparsecomp.passes.graph.canonicalize import CanonicalOp, example_of, op_of, target_name
from sparsecomp.passes.graph.operators import Trait, record_of, spelling_of
from sparsecomp.reference.geometry import is_channels_last
from sparsecomp.report import Node, Site
from sparsecomp.report.node import Timing

_FREE = ("placeholder", "get_attr", "output")
_OPERANDS = {
    **dict.fromkeys(("conv1d", "conv2d", "conv3d", "linear"), ("input", "weight")),
    "matmul": ("input", "other"), "addmm": ("mat1", "mat2"), "baddbmm": ("batch1", "batch2"),
}  # fmt: skip
"""Of the products whose time can be told."""


class Record:
    """Follows a graph through the rules."""

    def __init__(self) -> None:
        self._before: dict[fx.Node, Node] = {}
        # what a rule made of a node, or why it left it alone
        self._sites: dict[fx.Node, Site] = {}
        # of which site a node is that a rule made
        self._made: dict[fx.Node, Site] = {}

    def begin(self, ctx: Context) -> None:
        """The graph as it was captured, before any rule."""
        self._before = {node: _node(node, ctx.analysis) for node in ctx.gm.graph.nodes}

    def judged(self, node: fx.Node, site: Site) -> None:
        """A rule looked at a node; the latest counts, but one without an estimate for nothing against one with."""
        known = self._sites.get(node)
        if known is None or known.estimate is None:
            self._sites[node] = site

    def replaced(self, added: Iterable[fx.Node], results: Iterable[fx.Node], site: Site) -> None:
        """A rule put nodes in the place of a site, among them those of its results."""
        self._made |= dict.fromkeys(added, site)
        self._sites |= dict.fromkeys(results, site)

    def graphs(self, ctx: Context, analysis: Analysis | None) -> tuple[list[Node], list[Node]]:
        """The nodes as they were captured, all dense, and as they are now, of which `analysis` tells."""
        now = {node: self._timed(node, _node(node, analysis), ctx) for node in ctx.gm.graph.nodes}
        before = []
        for node, kept in self._before.items():
            # what was replaced has lost its operands, by which it would be estimated
            timed = replace(now[node], fact=kept.fact) if node in now else self._judged(node, kept)
            before.append(replace(timed, implementation="", seconds=timed.dense_seconds))
        return before, list(now.values())

    def _timed(self, node: fx.Node, kept: Node, ctx: Context) -> Node:
        made = self._made.get(node)
        if made is not None:  # the layer's own line, not that of what is fused into it
            location, module = made.location or kept.location, made.module or kept.module
            kept = replace(kept, rule=made.rule, location=location, module=module)
        known = self._judged(node, kept)
        if made is not None and made.estimate is not None and made is not self._sites.get(node):
            return replace(known, timing=Timing.INCLUDED, seconds=None, dense_seconds=None)
        seconds = _dense_seconds(node, ctx) if known.timing is Timing.UNKNOWN else None
        if seconds is None:
            return known
        return replace(known, timing=Timing.ESTIMATED, seconds=seconds, dense_seconds=seconds)

    def _judged(self, node: fx.Node, kept: Node) -> Node:
        """With what a rule knew of it."""
        site = self._sites.get(node)
        if site is None:
            return kept
        known = replace(kept, density=site.density, implementation=site.implementation)
        if site.estimate is None:
            return known
        timing, seconds, dense = Timing(site.estimate.source), site.estimate.seconds, site.estimate.dense_seconds
        return replace(known, timing=timing, seconds=seconds, dense_seconds=dense)


def _node(node: fx.Node, analysis: Analysis | None) -> Node:
    fact = None if analysis is None else analysis.fact(node)
    return Node(
        node.name, _called(node), tuple(read.name for read in node.all_input_nodes),
        "" if fact is None else fact.described(), timing=Timing.NONE if _is_free(node) else Timing.UNKNOWN,
        location=user_location(node), module=module_path(node),
    )  # fmt: skip


def _called(node: fx.Node) -> str:
    if node.op == "placeholder":
        of_module = isinstance(example_of(node), torch.nn.Parameter) or is_static(node)
        return "parameter" if of_module else "input"
    if node.op in ("get_attr", "output"):
        return "parameter" if node.op == "get_attr" else "output"
    return target_name(node) or getattr(node.target, "__name__", str(node.target))


def _is_free(node: fx.Node) -> bool:
    if node.op in _FREE or isinstance(node.meta.get("example_value"), int | torch.SymInt | torch.Size):
        return True
    name = _name(node)
    return name == "getitem" or bool(record_of(name).traits & Trait.VIEW)


def _name(node: fx.Node) -> str:
    """The canonical operator's, without its arguments, which take the longest to bind; empty if there is none."""
    if node.op == "call_module":
        op = op_of(node)
        return "" if op is None else op.name
    raw = target_name(node) if node.op in ("call_function", "call_method") else None
    return "" if raw is None else spelling_of(raw)[0]


def _dense_seconds(node: fx.Node, ctx: Context) -> float | None:
    """Of a product or a convolution that is torch's own; None where there is no estimate.

    Within a transform of torch.func there is none: the example has one sample's sizes, and its layout cannot be asked.
    """
    known = _name(node) in _OPERANDS and node not in ctx.transformed
    op, out = op_of(node) if known else None, example_of(node)
    if op is None or not isinstance(out, torch.Tensor):
        return None
    trained = ctx.gradients and not ctx.eager and out.requires_grad
    work, card = _work(op, out), _card(ctx, out.device)
    if card is None:
        return _seconds_on_cpu(op, out, trained)
    time = None if work is None else time_of(work, card)
    if time is None:
        return None
    if trained:
        time = time.plus(time, time)
    return time.waited(not ctx.eager and replays(ctx.options, ctx.device(out.device)))


def _seconds_on_cpu(op: CanonicalOp, out: torch.Tensor, trained: bool) -> float | None:
    """Of a linear layer; how fast a CPU convolves is not known here."""
    x, weight = known_sizes(op.input), known_sizes(op.get("weight"))
    if op.name != "linear" or out.device.type != "cpu" or out.dtype is not torch.float32:
        return None
    if x is None or weight is None or len(weight) != 2:
        return None
    work = cpu_cost.Work("", (), *weight, n=math.prod(x[:-1]), stored=0)
    return cpu_cost.dense_on_cpu(work, trained, written=True)


def _card(ctx: Context, device: torch.device) -> Card | None:
    if ctx.target is not None:
        return ctx.target.card
    return known_card(device) if device.type == "cuda" else None


def _work(op: CanonicalOp, out: torch.Tensor) -> DenseWork | None:
    shapes = [known_sizes(operand) for operand in (*map(op.get, _OPERANDS[op.name]), op.node)]
    known = [shape for shape in shapes if shape]
    if len(known) != 3:
        return None
    left, right, result = known
    if not op.name.startswith("conv"):
        return matmul_work(left, right, result, out.dtype)
    x = example_of(op.input)
    return conv_work(left, right, result, out.dtype, x is not None and is_channels_last(x))
