"""Runs the rewrite rules over one graph, in order, and keeps the graph whole whatever a rule does.

A rule first judges every node while nothing changes; then its plans are carried out one by one. A plan that fails is
undone by erasing what it inserted, so one bad site costs nothing but itself; what was replaced goes only once the
whole rule has been verified. Everything is linear in the graph's size.
"""

import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import fx

from sparsecomp import _compat
from sparsecomp.errors import RuleError
from sparsecomp.lowering.tuning.ceilings import Target
from sparsecomp.options import Options
from sparsecomp.passes.attention.merged_masks import merge_masks
from sparsecomp.passes.attention.multi_head import write_out_masked_attention
from sparsecomp.passes.engine.location import user_location
from sparsecomp.passes.engine.rule import TAG, Context, Density, Plan, Refusal, Rule, Why, module_path, refuse
from sparsecomp.passes.facts.analysis import Analysis, analyse
from sparsecomp.passes.facts.registry import LostKind
from sparsecomp.passes.find_rules import RULES, enabled
from sparsecomp.passes.graph.canonicalize import RESHAPED, binding_once, example_of, op_of
from sparsecomp.passes.graph.contract import reorder
from sparsecomp.passes.record import Record
from sparsecomp.report import PassRecord, Report, Site
from sparsecomp.training.dynamic.told import told_of

log = logging.getLogger("sparsecomp")
_compat.register_logger("sparsecomp")
_OF_ATTENTION = ("block_attention", "decode_attention")


@binding_once()
def run_rules(
    gm: fx.GraphModule,
    options: Options,
    *,
    values: Mapping[fx.Node, torch.Tensor] | None = None,
    densities: Mapping[str, Density] | None = None,
    eager: bool = False,
    target: Target | None = None,
    rules: Iterable[Rule] | None = None,
) -> Report:
    """Rewrite `gm` in place.

    Args:
        gm: a graph at the level of torch functions and modules, with `example_value` in its nodes' meta.
        options: what the user asked for.
        values: real tensors behind placeholders and attributes.
        densities: measured densities, by `rule.site_key`.
        eager: the result will run op by op, not through Inductor.
        target: the card to estimate for, None for the devices of the tensors.
        rules: the rules to run, in order; by default those that the options leave on.

    Raises:
        RuleError: a rule failed, under `options.strict`.
    """
    ran = tuple(enabled(options) if rules is None else rules)
    if not eager and any(rule.name in _OF_ATTENTION for rule in ran):
        write_out_masked_attention(gm)
        merge_masks(gm)
    report = Report(disabled=tuple(rule.name for rule in RULES if rule not in ran) if rules is None else ())
    for node, value in (values or {}).items():
        if told := told_of(value):
            report.note(f"{_layer_of(node)}: {told}")
    context = last = None
    record = Record()
    for rule in ran:
        start = time.perf_counter()
        if context is None:
            analysis = _analysed(gm, options, report)
            if analysis is None:
                break
            context = Context(gm, options, report, analysis, values or {}, densities or {}, eager, target)
            if not report.passes:
                with _reporting(context):
                    record.begin(context)
        last = context
        done = _run_rule(rule, context, record)
        report.passes.append(PassRecord(rule.name, time.perf_counter() - start, done))
        if done:
            context = None
    if last is not None:
        analysis = _analysed(gm, options, report) if context is None else context.analysis
        with _reporting(last):
            report.before, report.after = record.graphs(last, analysis)
    return report


def _layer_of(values: fx.Node) -> str:
    """Path of the module that reads an input or attribute, or the node's name."""
    return next((path for user in values.users if (path := module_path(user))), values.name)


@contextmanager
def _reporting(ctx: Context) -> Iterator[None]:
    """What goes wrong within it leaves the report without a graph."""
    try:
        yield
    except Exception as error:
        if ctx.options.strict:
            raise RuleError(f"the report of the graph failed: {error}") from error
        log.warning("the report has no graph", exc_info=True)
        ctx.report.note(f"no graph, since its report failed: {_brief(error)}")


def _analysed(gm: fx.GraphModule, options: Options, report: Report) -> Analysis | None:
    try:
        analysis = analyse(gm)
    except Exception as error:
        if options.strict:
            raise RuleError(f"the analysis failed: {error}") from error
        log.warning("the analysis failed: everything stays dense", exc_info=True)
        report.note(f"the analysis failed, everything stays dense: {_brief(error)}")
        return None
    for node, why in analysis.reasons.items():
        if why.kind is LostKind.FAILED:
            if options.strict:
                raise RuleError(f"the analysis failed at {node.name}: {why}")
            report.note(f"the analysis failed at {node.name}: {why}")
    return analysis


def _run_rule(rule: Rule, ctx: Context, record: Record) -> int:
    plans: list[tuple[fx.Node, Plan, Site]] = []
    for node in ctx.gm.graph.nodes:
        verdict = _considered(rule, node, ctx)
        if verdict is None:
            continue
        if isinstance(verdict, Refusal) and TAG in node.meta and not rule.of_rewritten:
            continue  # an earlier rule wrote it, and its site says so
        site = _site(rule, node, verdict, ctx)
        ctx.report.sites.append(site)
        record.judged(node, site)
        if isinstance(verdict, Plan):
            plans.append((node, verdict, site))
        log.debug("%s: %s %s: %s", rule.name, "rewrite" if verdict else "leave", node.name, site.reason)
    if not plans:
        return 0
    if not ctx.report.graph_before:
        ctx.report.graph_before = _compat.readable(ctx.gm, TAG)
    changes: list[tuple[_Change, Site]] = []
    replaced: dict[fx.Node, fx.Node] = {}
    for node, plan, site in plans:
        change = _apply(node, plan, site, ctx, replaced)
        if change is not None:
            changes.append((change, site))
            replaced.update((old, new) for old, new, _ in change.uses)
    try:
        _verify(ctx)
    except Exception as error:
        for change, _ in reversed(changes):
            change.undo()
        _failed(rule.name, error, ctx, [site for _, _, site in plans])
        return 0
    erased: set[fx.Node] = set()
    for change, site in changes:
        change.finish(erased)
        record.replaced(change.added, [new for _, new, _ in change.uses], site)
    ctx.gm.recompile()
    ctx.report.graph_after = _compat.readable(ctx.gm, TAG)
    return len(changes)


def _considered(rule: Rule, node: fx.Node, ctx: Context) -> Plan | Refusal | None:
    try:
        verdict = rule.consider(node, ctx)
        return refuse(Why.TRANSFORMED) if isinstance(verdict, Plan) and node in ctx.transformed else verdict
    except Exception as error:
        if ctx.options.strict:
            raise RuleError(f"rule {rule.name} failed at {node.name}: {error}") from error
        log.warning("rule %s failed at %s: the site stays dense", rule.name, node.name, exc_info=True)
        return refuse(Why.FAILED, detail=_brief(error))


@dataclass(slots=True)
class _Change:
    """One plan carried out. What it replaced stays in the graph, unused, until the whole rule has been verified.

    `before` is the order that the nodes were in, where the plan asked for another.
    """

    node: fx.Node
    added: list[fx.Node]
    uses: list[tuple[fx.Node, fx.Node, list[fx.Node]]]
    dead: tuple[fx.Node, ...]
    before: list[fx.Node]

    def undo(self) -> None:
        """Put the graph back; the latest change first."""
        for old, new, users in self.uses:
            for user in users:
                user.replace_input_with(new, old)
        _erase(reversed(self.added))
        reorder(self.before)

    def finish(self, erased: set[fx.Node]) -> None:
        """Erase what was replaced, and what only that read; `erased` is what an earlier change erased."""
        self._erase_replaced(erased)
        dead = _unread([node for node in self.dead if node not in erased])
        if dead:
            _erase(dead)
            erased.update(dead)
            self._erase_replaced(erased)

    def _erase_replaced(self, erased: set[fx.Node]) -> None:
        for old in (*(old for old, _, _ in self.uses), self.node):
            if not old.users and old not in erased:
                _erase([old])
                erased.add(old)


def _unread(dead: list[fx.Node]) -> dict[fx.Node, None]:
    """Those that are read by each other alone: another plan may have had one more reader read one of them, and then
    the others go still, such as a batch-norm whose running statistics its successor moves. Of writes in place all or
    nothing: a write has no users itself, but what it writes to, maybe through a view, may have."""
    left = dict.fromkeys(dead)
    while read := [node for node in left if any(user not in left for user in node.users)]:
        if any(map(_may_write, dead)):
            return {}
        for node in read:
            del left[node]
    return left


def _may_write(node: fx.Node) -> bool:
    op = op_of(node)
    return op is None or not op.known or op.inplace or op.out is not None


def _apply(
    node: fx.Node, plan: Plan, site: Site, ctx: Context, replaced: Mapping[fx.Node, fx.Node]
) -> _Change | None:
    """Carry out one plan, or leave the graph as it was.

    A plan may name nodes that earlier ones have `replaced`: it reads what took their place.
    """
    graph = ctx.gm.graph
    before = [*graph.nodes] if plan.order else []
    reorder(plan.order)
    spans = [(place.prev, place) for place in plan.places or (node,)]
    try:
        with graph.inserting_before(node):
            replacements = plan.build()
        added = _added(spans)
        for new in added:
            for stale in replaced.keys() & set(new.all_input_nodes):
                new.replace_input_with(stale, replaced[stale])
        _annotate(added, replacements, f"{site.rule}: {plan.reason}", ctx)
    except Exception as error:
        _erase(reversed(_added(spans)))
        reorder(before)
        _failed(site.rule, error, ctx, [site])
        return None
    # what goes, and may stand before what takes a node's place, reads it to the end; what takes the place may be made
    # of the node itself, which those before it go on reading
    gone = frozenset(plan.dead)
    uses = [
        (old, new, old.replace_all_uses_with(new, delete_user_cb=lambda user, new=new: user not in gone and new < user))
        for old, new in replacements.items()
    ]
    return _Change(node, added, uses, plan.dead, before)


def _annotate(added: list[fx.Node], replacements: Mapping[fx.Node, fx.Node], tag: str, ctx: Context) -> None:
    """Tag new nodes and give them example values, under autocast where the graph has it on.

    A replacement has the value of what it replaces; under `verify` it is computed and compared. Examples that
    the plan gave stay.
    """
    replaced, own = {new: old for old, new in replacements.items()}, frozenset(added)
    with _compat.autocast_followed() as follow:
        for node in ctx.gm.graph.nodes if ctx.modes else added:
            follow(node)
            if node in own:
                _annotate_one(node, replaced.get(node), tag, ctx.options.verify)


def _annotate_one(node: fx.Node, old: fx.Node | None, tag: str, verify: bool) -> None:
    node.meta[TAG] = tag
    if old is not None and not verify and "example_value" in old.meta:
        node.meta["example_value"] = old.meta["example_value"]
    elif "example_value" not in node.meta and node.op != "get_attr" and _inputs_known(node):
        node.meta["example_value"] = _compat.propagate_fakes(node)
    if old is not None:
        _check_same(old, node)


def _erase(nodes: Iterable[fx.Node]) -> None:
    for node in nodes:
        node.graph.erase_node(node)


def _added(spans: Iterable[tuple[fx.Node, fx.Node]]) -> list[fx.Node]:
    """The nodes between each two that were neighbours."""
    nodes = []
    for first, last in spans:
        node = first.next
        while node is not last:
            nodes.append(node)
            node = node.next
    return nodes


def _inputs_known(node: fx.Node) -> bool:
    """Whether the call can be made on examples: none is missing, or of a tensor whose shape changes in place."""
    if RESHAPED in node.meta:
        return False
    return all("example_value" in argument.meta and RESHAPED not in argument.meta for argument in node.all_input_nodes)


def _check_same(old: fx.Node, new: fx.Node) -> None:
    """A replacement has the dtype, device, shape and memory format of what it replaces."""
    a, b = example_of(old), new.meta.get("example_value")
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return
    if (a.dtype, a.device, a.shape) != (b.dtype, b.device, b.shape):
        raise AssertionError(f"{new.name} is {b.dtype} {tuple(b.shape)}, {old.name} {a.dtype} {tuple(a.shape)}")


def _verify(ctx: Context) -> None:
    """The graph is well formed; under `verify`, every node still has the shape and dtype it had."""
    ctx.gm.graph.lint()
    if not ctx.options.verify:
        return
    with _compat.autocast_followed() as follow:
        for node in ctx.gm.graph.nodes:
            follow(node)
            known = node.meta.get("example_value")
            if node.op != "call_function" or not _inputs_known(node) or not isinstance(known, torch.Tensor):
                continue
            found = _compat.propagate_fakes(node)
            if (known.dtype, known.shape) != (found.dtype, found.shape):
                raise AssertionError(f"{node.name} was {known.dtype} {known.shape}, is {found.dtype} {found.shape}")


def _failed(rule: str, error: Exception, ctx: Context, sites: Iterable[Site]) -> None:
    if ctx.options.strict:
        raise RuleError(f"rule {rule} failed: {error}") from error
    log.warning("rule %s failed: its sites stay dense", rule, exc_info=error)
    for site in sites:
        site.rewritten, site.implementation, site.expected_gain, site.precision = False, "dense", None, ""
        site.reason, site.why = str(refuse(Why.FAILED, detail=_brief(error))), Why.FAILED.name
        site.estimate = None


def _site(rule: Rule, node: fx.Node, verdict: Plan | Refusal, ctx: Context) -> Site:
    layer = verdict.layer or node
    density, source = ctx.density(layer)
    site = Site(
        rule.name, node.name, bool(verdict), "", user_location(layer), module_path(layer), density.share, source
    )  # fmt: skip
    if isinstance(verdict, Plan):
        site.reason, site.implementation = verdict.reason, verdict.implementation
        site.precision, site.estimate = verdict.precision, verdict.estimate
        site.expected_gain = None if verdict.estimate is None else verdict.estimate.gain
    else:
        site.reason, site.why, site.estimate = str(verdict), verdict.why.name, verdict.estimate
    return site


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
