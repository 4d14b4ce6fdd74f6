"""Which tensors of a graph hold spikes, counts or exact zeros: a forward dataflow analysis over an fx graph.

One pass in graph order gives each node a `SparsityFact`, or the reason why it has none. Writes are the hard part: a
write through any alias changes what every other alias holds from there on, so facts belong to a node *and a
position*. Nodes that may share storage are kept in one group; a write to the group weakens the facts of all its
members, and a reader that comes later sees the weakened fact. What an unknown operator returns may alias all that it
was given; what an opaque module was given may have been written to.
"""

import logging
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from sparsecomp.passes.facts import spike_sources
from sparsecomp.passes.facts.registry import TRANSFERS, Items, Kept, Lost, LostKind, Result, Transfer
from sparsecomp.passes.facts.transfer import pointwise
from sparsecomp.passes.graph.aliases import AliasGroups
from sparsecomp.passes.graph.canonicalize import (
    RESHAPED,
    CanonicalOp,
    dtype_of,
    has_hooks,
    op_of,
    shape_of,
)
from sparsecomp.passes.graph.functions import calls_function
from sparsecomp.passes.graph.operators import Trait
from sparsecomp.passes.graph.writes import also_written, may_write
from sparsecomp.reference import facts as algebra
from sparsecomp.reference.facts import Origin, SparsityFact
from sparsecomp.snn import registry as neurons

__all__ = ["Analysis", "analyse"]

log = logging.getLogger("sparsecomp")

_OWN_OPERATORS = "sparsecomp::"
"""What an earlier rule put in the graph: functional, with results of their own."""


@dataclass(frozen=True)
class Analysis:
    """The facts of one graph.

    Attributes:
        graph: the analysed graph.
        histories: for each node the (position, value) pairs at which its knowledge changed, oldest first.
        reasons: why a node has no fact, or a weaker one than its operands.
        order: the position of each node.
        outputs: the value of the graph's output, for callers that analyse a body.
        output_inputs: indices of the placeholders that an output may share storage with.
        written_inputs: indices of the placeholders that the graph writes to.
        outputs_share: two outputs may share storage with each other.
        last_writes: the position of the last possible write to each node's storage, -1 if there is none.
        writes: the positions of all writes, ascending.
        seen_outside: the nodes that may share storage with an input, an attribute or an output.
    """

    graph: fx.Graph
    histories: Mapping[fx.Node, list[tuple[int, SparsityFact | Items | None]]]
    reasons: Mapping[fx.Node, Lost]
    order: Mapping[fx.Node, int]
    outputs: tuple[SparsityFact | Items | None, ...] = ()
    output_inputs: frozenset[int] = frozenset()
    written_inputs: frozenset[int] = frozenset()
    outputs_share: bool = False
    last_writes: Mapping[fx.Node, int] = field(default_factory=dict)
    writes: tuple[int, ...] = ()
    seen_outside: frozenset[fx.Node] = frozenset()

    def unchanged(self, node: Any, since: fx.Node, until: fx.Node | None = None) -> bool:
        """Whether nothing writes to `node` after `since` has run, so that a later reader sees what `since` saw.

        Args:
            until: as far as the later readers are; by default the end of the graph.
        """
        begin = self.order[since]
        if not isinstance(node, fx.Node) or self.last_writes.get(node, -1) <= begin:
            return True
        place = bisect_right(self.writes, begin)
        return until is not None and (place == len(self.writes) or self.writes[place] > self.order[until])

    def fact(self, node: Any, at: fx.Node | None = None) -> SparsityFact | None:
        """What every element of `node` obeys when `at` reads it.

        Without `at`: what it obeys from its creation to its last reader, whatever is written to it in between.
        """
        history = self.histories.get(node)
        if not history:
            return None
        if at is None:
            return algebra.join(value if isinstance(value, SparsityFact) else None for _, value in history)
        limit = self.order[at]
        current: SparsityFact | Items | None = None
        for position, value in history:
            if position >= limit:
                break
            current = value
        return current if isinstance(current, SparsityFact) else None

    def why_not(self, node: Any) -> Lost | None:
        """Why `node` is not on a grid of known values; None if it is."""
        fact = self.fact(node)
        if fact is not None and fact.integral and fact.exact and fact.finite:
            return None
        return self.reasons.get(node)


def analyse(gm: fx.GraphModule) -> Analysis:
    """Facts for every node of `gm`: a graph from Dynamo, or one from `torch.fx.symbolic_trace` with neurons as leaves.

    Linear in the size of the graph. Shapes and dtypes are read from `node.meta` (`example_value`, `val` or
    `tensor_meta`) where present; without them fewer facts can be proved, never wrong ones.
    """
    return _Run(gm).run()


class _Run:
    """The state of one analysis; implements the `Facts` protocol for transfer functions."""

    def __init__(self, gm: fx.GraphModule, inputs: Mapping[int, SparsityFact] | None = None) -> None:
        self.gm = gm
        self.modules = dict(gm.named_modules())
        self.inputs = inputs or {}
        self.current_facts: dict[fx.Node, SparsityFact | Items] = {}
        self.histories: dict[fx.Node, list[tuple[int, SparsityFact | Items | None]]] = {}
        self.reasons: dict[fx.Node, Lost] = {}
        self.order: dict[fx.Node, int] = {}
        self.last_use: dict[fx.Node, int] = {}
        self.groups = AliasGroups()
        self.placeholders: list[fx.Node] = []
        self.by_name: dict[str, fx.Node] = {}
        self.coverage: dict[fx.Node, tuple[set[int], SparsityFact]] = {}
        self.position = 0
        self.outputs: tuple[SparsityFact | Items | None, ...] = ()
        self.output_nodes: list[fx.Node] = []
        self.body_effects: dict[fx.Node, tuple[tuple[Any, ...], Analysis]] = {}

    def run(self) -> Analysis:
        self.order = {node: position for position, node in enumerate(self.gm.graph.nodes)}
        self._mark_reshaped()
        self.last_use = {
            node: max((self.order[user] for user in node.users), default=-1) for node in self.gm.graph.nodes
        }
        for node, position in self.order.items():
            self.position = position
            self.by_name[node.name] = node
            self._visit(node)
        written = {i for i, node in enumerate(self.placeholders) if self.groups.last_write(node) >= 0}
        shared, distinct = self._shared_outputs()
        return Analysis(
            graph=self.gm.graph,
            histories=self.histories,
            reasons=self.reasons,
            order=self.order,
            outputs=self.outputs,
            output_inputs=frozenset(shared),
            written_inputs=frozenset(written),
            outputs_share=not distinct,
            last_writes={node: self.groups.last_possible_write(node) for node in self.order},
            writes=tuple(sorted(self.groups.positions)),
            seen_outside=self._seen_outside(),
        )

    def _mark_reshaped(self) -> None:
        """Marks the nodes that are one tensor with one whose shape an operator changes in place."""
        same: dict[fx.Node, fx.Node] = {}
        reshaped: set[fx.Node] = set()
        for node in self.order:
            node.meta.pop(RESHAPED, None)
            op = op_of(node, self.modules)
            if op is None:
                continue
            # a conversion to the dtype that is there already gives the very tensor
            may_be_input = op.inplace or op.has(Trait.ALIAS) or op.name not in TRANSFERS
            if may_be_input and isinstance(op.input, fx.Node):
                same[node] = same.get(op.input, op.input)
                if op.inplace and op.has(Trait.RESIZES):
                    reshaped.add(same[node])
            outs = op.out if isinstance(op.out, tuple | list) else (op.out,)
            reshaped |= {same.get(out, out) for out in outs if isinstance(out, fx.Node)}
        for node in self.order:
            if same.get(node, node) in reshaped:
                node.meta[RESHAPED] = True

    def _shared_outputs(self) -> tuple[set[int], bool]:
        """The inputs that outputs may alias, and whether all outputs have storage of their own."""
        roots = [self.groups.root(node) for node in self.output_nodes]
        known = set(roots)
        shared = {i for i, node in enumerate(self.placeholders) if self.groups.root(node) in known}
        return shared, len(known) == len(roots)

    def _seen_outside(self) -> frozenset[fx.Node]:
        """The nodes that may share storage with an input, an attribute or an output."""
        returned = {self.groups.root(node) for node in self.output_nodes}
        return frozenset(
            node for node in self.order if self.groups.external(node) or self.groups.root(node) in returned
        )

    # ---- the Facts protocol -------------------------------------------------------------------------------------

    def of(self, value: Any) -> SparsityFact | None:
        if isinstance(value, fx.Node):
            fact = self.current_facts.get(value)
            if fact is None and dtype_of(value) is torch.bool:
                return algebra.binary(value.name, Origin.MASK)
            return fact if isinstance(fact, SparsityFact) else None
        if isinstance(value, bool | int | float):
            return algebra.constant(float(value)) if abs(value) < 2**53 else None
        return None

    def value(self, node: Any) -> SparsityFact | Items | None:
        return self.current_facts.get(node)

    def lost(self, value: Any) -> Lost:
        if isinstance(value, fx.Node) and value in self.reasons:
            return self.reasons[value]
        return Lost(LostKind.UNKNOWN_OPERAND, f"the values of `{value}` are unknown")

    def same_value(self, a: Any, b: Any) -> bool:
        if not isinstance(a, fx.Node) or not isinstance(b, fx.Node):
            return False
        root_a, root_b = spike_sources.strip_copies(a), spike_sources.strip_copies(b)
        if root_a is not root_b:
            return False
        # A copy made before a write differs from one made after it, so no write may have come since the root was made.
        born = self.order[root_a]
        return all(self.groups.last_possible_write(node) <= born for node in (a, b, root_a))

    def current(self, outer: fx.Node, inner: Any) -> bool:
        return isinstance(inner, fx.Node) and self.groups.last_possible_write(inner) <= self.order[outer]

    def body(self, node: Any) -> fx.GraphModule | None:
        if not isinstance(node, fx.Node) or node.op != "get_attr":
            return None
        module = self.modules.get(str(node.target))
        return module if isinstance(module, fx.GraphModule) else None

    def call_body(self, body: fx.GraphModule, args: tuple[Any, ...], caller: fx.Node) -> Result:
        placeholders = [node for node in body.graph.nodes if node.op == "placeholder"]
        if len(placeholders) < len(args):
            return Lost(LostKind.OPAQUE, "a sub-graph takes fewer arguments than it is given")
        # Older versions pass the autograd context first, so arguments are matched from the end.
        skipped = len(placeholders) - len(args)
        inputs = {skipped + i: fact for i, arg in enumerate(args) if (fact := self.of(arg)) is not None}
        inner = _Run(body, inputs).run()
        self.body_effects[caller] = ((None,) * skipped + args, inner)
        names = {node.name: arg for node, arg in zip(placeholders[skipped:], args, strict=True)}
        values = inner.outputs
        if calls_function(caller):
            # (outputs, saved values): the caller sees the outputs only.
            first = values[0] if values else None
            return _outer(first, names) if first is not None else self._body_reason(inner)
        return Items(tuple(_outer_fact(value, names) for value in values))

    def _body_reason(self, inner: Analysis) -> Lost:
        output = inner.graph.output_node()
        for node in output.all_input_nodes:
            if node in inner.reasons:
                return inner.reasons[node]
        return Lost(LostKind.OPAQUE, "the body of a function gives unknown values")

    # ---- one node -----------------------------------------------------------------------------------------------

    def _visit(self, node: fx.Node) -> None:
        self.groups.add(node)
        if node.op == "placeholder":
            self._visit_placeholder(node)
        elif node.op == "get_attr":
            self.groups.mark_external(node)
            self.reasons[node] = Lost(LostKind.INPUT, f"`{node.target}` is a parameter or buffer")
        elif node.op == "output":
            self._visit_output(node)
        else:
            self._visit_call(node)

    def _visit_placeholder(self, node: fx.Node) -> None:
        index = len(self.placeholders)
        self.placeholders.append(node)
        self.groups.mark_external(node)
        fact = self.inputs.get(index)
        if fact is not None:
            self._set(node, fact)
        else:
            self.reasons[node] = Lost(LostKind.INPUT, f"`{node.target}` is an input of the graph")

    def _visit_output(self, node: fx.Node) -> None:
        result = node.args[0] if node.args else ()
        parts = result if isinstance(result, tuple | list) else (result,)
        self.outputs = tuple(self._output_value(part) for part in parts)
        self.output_nodes = list(node.all_input_nodes)

    def _output_value(self, part: Any) -> SparsityFact | Items | None:
        if isinstance(part, tuple | list):
            return Items(tuple(self.of(item) for item in part))
        return self.value(part) if isinstance(part, fx.Node) else None

    def _visit_call(self, node: fx.Node) -> None:
        op = op_of(node, self.modules)
        if op is None:
            self._visit_opaque(node)
            return
        function = TRANSFERS.get(op.name) if op.known or "::" in op.name else None
        result = self._transfer(op, function)
        if op.out is not None:
            self._write_out(op, result)
        elif op.inplace:
            self._write(op, result)
        else:
            self._alias(op, known=function is not None)
            self._apply_effects(op, known=function is not None)
            self._record(node, result)

    def _transfer(self, op: CanonicalOp, function: Transfer | None) -> Result:
        if op.step_mode == "m" and op.name in ("flatten", "unflatten"):
            return self.of(op.input)
        if function is not None:
            result = self._guarded(function, op)
        else:
            result = Lost(LostKind.UNSUPPORTED, f"{op.name} is not analysed") if self._any_fact(op.node) else None
        if result is None:
            result = self._first_reason(op.node)
        return result

    def _guarded(self, function: Transfer, op: CanonicalOp) -> Result:
        """What a transfer function says; if it fails, that costs the fact of one node."""
        try:
            return function(op, self)
        except Exception as error:
            log.warning("%s could not be analysed", op.node.name, exc_info=True)
            return Lost(LostKind.FAILED, f"{op.name} could not be analysed: {type(error).__name__}: {error}")

    def _any_fact(self, node: fx.Node) -> bool:
        return any(argument in self.current_facts for argument in node.all_input_nodes)

    def _first_reason(self, node: fx.Node) -> Lost:
        for argument in node.all_input_nodes:
            if argument not in self.current_facts and argument in self.reasons:
                return self.reasons[argument]
        return Lost(LostKind.UNSUPPORTED, f"nothing is known about `{node.name}`")

    def _visit_opaque(self, node: fx.Node) -> None:
        """A leaf module that is no layer of torch's: a registered neuron, or anything at all."""
        module = self.modules.get(str(node.target)) if node.op == "call_module" else None
        if module is not None and not has_hooks(module) and neurons.is_neuron(module):
            if neurons.inspect(module).writes_input:
                self._write_all(node, f"{node.target} writes to its input")
            self._record(node, spike_sources.neuron_call(module, str(node.target)))
            return
        name = str(node.target) if module is not None else getattr(node.target, "__name__", str(node.target))
        only_reads = _is_our_function(node.target) if module is None else _is_pure_layer(module)
        if not only_reads:
            self._write_all(node, f"`{name}` is opaque and may write to its arguments")
        for argument in node.all_input_nodes:
            self.groups.union(node, argument, reinterpreted=True)
        hooked = module is not None and has_hooks(module)
        why = "has hooks, which may change its result" if hooked else "is opaque to the analysis"
        self._record(node, Lost(LostKind.OPAQUE, f"`{name}` {why}"))

    def _record(self, node: fx.Node, result: Result) -> None:
        if isinstance(result, Kept):
            self.reasons[node] = result.lost
            self._set(node, result.fact)
        elif isinstance(result, Lost):
            self.reasons[node] = result
        elif result is not None:
            self._set(node, result)

    def _set(self, node: fx.Node, value: SparsityFact | Items) -> None:
        self.current_facts[node] = value
        history = self.histories.setdefault(node, [])
        if not history and self.position > self.order[node]:
            history.append((self.order[node], None))  # nothing was known before this write
        history.append((self.position, value))
        self.groups.set_live(node)
        for fact in _facts_in(value):
            factor = self.by_name.get(fact.scale) if isinstance(fact.scale, str) else None
            if factor is not None:
                self.groups.depends(factor, node)

    def _forget(self, node: fx.Node, reason: Lost) -> None:
        if self.current_facts.pop(node, None) is not None:
            self.histories[node].append((self.position, None))
        self.groups.set_dead(node)
        self.reasons[node] = reason

    # ---- aliases and writes -------------------------------------------------------------------------------------

    def _alias(self, op: CanonicalOp, known: bool) -> None:
        """Joins the storage groups of the result and what it may be a view of."""
        node = op.node
        if op.name == "getitem" and isinstance(op.input, fx.Node):
            key = self.groups.item_key(op.input, op.get("index"))
            self.groups.union(node, key)
        elif op.has(Trait.ALIAS) and op.known:
            if isinstance(op.input, fx.Node) and not _is_copy(op):
                self.groups.union(node, op.input, reinterpreted=op.reinterprets())
        elif node in self.body_effects:
            self._alias_body(node)
        elif "::" in op.name and known and not op.name.startswith("higher_order::"):
            self.groups.mark_tuple(node)
        elif not known and not op.name.startswith(_OWN_OPERATORS):
            for argument in node.all_input_nodes:
                self.groups.union(node, argument, reinterpreted=True)

    def _alias_body(self, node: fx.Node) -> None:
        args, inner = self.body_effects[node]
        if not inner.output_inputs and not inner.outputs_share:
            self.groups.mark_tuple(node)
        for index in inner.output_inputs:
            if isinstance(args[index], fx.Node):
                self.groups.union(node, args[index])

    def _apply_effects(self, op: CanonicalOp, known: bool) -> None:
        """What a call that is not an in-place operator writes to nevertheless."""
        node = op.node
        if node in self.body_effects:
            args, inner = self.body_effects[node]
            for index in inner.written_inputs:
                if isinstance(args[index], fx.Node):
                    self._overwrite(args[index], None, Lost(LostKind.MUTATED, f"`{node.name}` writes to it"))
        elif may_write(op, known):
            self._write_all(node, f"`{op.name}` may write to its arguments")
        elif op.known:
            for written in also_written(op):
                self._overwrite(written, None, Lost(LostKind.MUTATED, f"`{node.name}` updates it"))

    def _write_all(self, node: fx.Node, why: str) -> None:
        for argument in node.all_input_nodes:
            self._overwrite(argument, None, Lost(LostKind.MUTATED, why))

    def _write_out(self, op: CanonicalOp, result: Result) -> None:
        """`out=`: the destination takes the result's values, in its own dtype; nothing is claimed about them."""
        outs = op.out if isinstance(op.out, tuple | list) else (op.out,)
        reason = Lost(LostKind.MUTATED, f"`{op.node.name}` writes it through out=")
        for out in outs:
            if isinstance(out, fx.Node):
                self._overwrite(out, None, reason)
                self.groups.union(op.node, out, reinterpreted=True)
        self._record(op.node, reason)

    def _write(self, op: CanonicalOp, result: Result) -> None:
        """An in-place operator: its result is what the first argument holds from now on."""
        target = op.input
        if not op.known or not isinstance(target, fx.Node):
            self._write_unknown(op)
            return
        if op.name == "setitem" and self._covered(op):
            return
        result = self._outlives(result, target)
        fact = result.fact if isinstance(result, Kept) else result if isinstance(result, SparsityFact) else None
        self._overwrite(target, fact, Lost(LostKind.MUTATED, f"`{op.node.name}` writes to it in place"))
        if op.name != "setitem":
            self.groups.union(op.node, target)
            self._record(op.node, result)
        self.reasons.pop(target, None)
        self._record(target, result)

    def _outlives(self, result: Result, target: fx.Node) -> Result:
        """`result` once it is written to `target`: it cannot be a multiple of a factor that lies there itself."""
        if isinstance(result, SparsityFact) and isinstance(result.scale, str):
            factor = self.by_name.get(result.scale)
            if factor is not None and self.groups.same(factor, target):
                return algebra.zeros_kept(result, finite=False)
        return result

    def _write_unknown(self, op: CanonicalOp) -> None:
        """An in-place operator without a signature here: it may write to, and alias, all that it is given."""
        self._write_all(op.node, f"`{op.node.name}` writes to its arguments")
        for argument in op.node.all_input_nodes:
            self.groups.union(op.node, argument, reinterpreted=True)
        self._record(op.node, Lost(LostKind.MUTATED, f"`{op.name}` writes unknown values in place"))

    def _overwrite(self, target: fx.Node, written: SparsityFact | None, reason: Lost) -> None:
        """Elements of `target`'s storage now hold `written` values (None: unknown)."""
        if self.groups.reinterpreted(target):
            written = None
        self.coverage.pop(target, None)
        for node in self.groups.live_aliases(target):
            if self.last_use[node] < self.position and node is not target:
                self.groups.set_dead(node)  # nobody reads it any more; this keeps long chains of writes linear
                continue
            value = self.current_facts.get(node)
            weaker = algebra.join((value, written)) if isinstance(value, SparsityFact) else None
            if weaker is None:
                self._forget(node, reason)
            elif weaker != value:
                self._set(node, weaker)
        for node in self.groups.dependants(target):
            value = self.current_facts.get(node)
            if isinstance(value, SparsityFact) and isinstance(value.scale, str):
                self._set(node, algebra.zeros_kept(value, finite=False))
            elif isinstance(value, Items):
                self._forget(node, reason)
        self.groups.wrote(target, self.position)

    def _covered(self, op: CanonicalOp) -> bool:
        """`out = empty(T, …); out[t] = s` for every t: known once every row has been written, and nothing else has."""
        base, index = op.input, op.get("index")
        made_by = op_of(base, self.modules)
        shape = shape_of(base)
        if made_by is None or made_by.name not in ("empty", "empty_like", "new_empty") or made_by.inplace:
            return False
        rows = shape[0] if shape else None
        value = pointwise.stored(self, op.get("value"), base)
        fresh = self.groups.last_write(base) < 0 or base in self.coverage
        if not rows or type(index) is not int or value is None or not fresh or self.groups.size(base) != 1:
            return False
        done, fact = self.coverage.get(base, (set(), value))
        joined = algebra.join((fact, value))
        if joined is None or not -rows <= index < rows:
            return False
        done = done | {index % rows}
        self.groups.wrote(base, self.position)
        self.coverage[base] = (done, joined)
        if len(done) == rows:
            self._set(base, joined)
            self.reasons.pop(base, None)
        return True


def _facts_in(value: SparsityFact | Items) -> Iterable[SparsityFact]:
    if isinstance(value, SparsityFact):
        return (value,)
    return [fact for fact in (*value.facts, value.rest) if fact is not None]


def _outer(value: SparsityFact | Items, names: Mapping[str, Any]) -> SparsityFact | Items:
    if isinstance(value, SparsityFact):
        return _rename_scale(value, names)
    return Items(tuple(_outer_fact(fact, names) for fact in value.facts), _outer_fact(value.rest, names))


def _outer_fact(value: SparsityFact | Items | None, names: Mapping[str, Any]) -> SparsityFact | None:
    return _rename_scale(value, names) if isinstance(value, SparsityFact) else None


def _rename_scale(fact: SparsityFact, names: Mapping[str, Any]) -> SparsityFact:
    """A scale held by a body's placeholder is held by the caller's argument outside; other nodes are not visible."""
    if not isinstance(fact.scale, str):
        return fact
    outer = names.get(fact.scale)
    if isinstance(outer, fx.Node):
        return SparsityFact(
            fact.lo, fact.hi, True, outer.name, fact.origin, fact.exact_zeros, fact.exact, fact.finite, fact.source
        )
    return algebra.zeros_kept(fact, finite=False)


def _is_copy(op: CanonicalOp) -> bool:
    before, after = dtype_of(op.input), dtype_of(op.node)
    return op.has(Trait.CAST) and before is not None and after is not None and before is not after


def _is_our_function(target: object) -> bool:
    """Whether Dynamo has left a function on SparseTensors in the graph, such as the making of one: they only read."""
    return (getattr(target, "__module__", None) or "").startswith("sparsecomp.tensor.")


def _is_pure_layer(module: nn.Module) -> bool:
    """torch's own layers do not write to their inputs unless they say `inplace`."""
    parts = list(module.modules())
    return all(type(part).__module__.startswith("torch.nn.modules.") for part in parts) and not any(
        getattr(part, "inplace", False) or has_hooks(part) for part in parts
    )
