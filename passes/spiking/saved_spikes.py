"""What a training graph keeps of its spikes from forward to backward: bits, where torch keeps floats.

AOTAutograd traces forward and backward as one joint graph, and a partitioner decides what the forward hands over. For a
layer of neurons behind a convolution torch keeps three tensors of full width: what the convolution gave, the membranes
and the spikes. The membranes follow from what the convolution gave by the forward's own arithmetic, in the backward's
own kernel, which reads that anyway. A tensor that is proved to hold small counts is handed over in the fewest bits, and
widened in front of its first reader. No operator is needed for either: Inductor fuses both with their neighbours.

Bits that lie in one byte belong to different time steps, where the steps were put together from tensors of their own:
so the kernel of the neurons, which has them all at hand, writes the byte.
"""

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

import sparsecomp.ops  # noqa: F401  (registers the operator)
from sparsecomp.passes.facts.analysis import Analysis, analyse
from sparsecomp.passes.graph.canonicalize import dtype_of, example_of, numel_of, op_of
from sparsecomp.passes.graph.operators import Trait
from sparsecomp.reference.facts import Origin, SparsityFact, is_dyadic

aten: Any = torch.ops.aten
_CAST: Any = torch.ops.prims.convert_element_type.default
_OPERANDS = {
    aten.convolution.default: (0, 1), aten.mm.default: (0, 1), aten.bmm.default: (0, 1), aten.addmm.default: (1, 2)
}  # fmt: skip
"""Layers that a backward may compute once more, and their operands."""
_MARKED = "sparsecomp_recomputed"
"""Key of the meta of nodes that are marked here, and not by the user's own checkpoints."""
_TRAINED: Any = torch.ops.sparsecomp.trained_neuron.default
_BYTE = 8

Graphs = tuple[fx.GraphModule, fx.GraphModule]


def has_spikes(gm: fx.GraphModule) -> bool:
    """Whether any floats of a graph are proved to be spikes."""
    analysis = analyse(gm)
    facts = {node: _fact(node, analysis) for node in gm.graph.nodes}
    spikes = [node for node, fact in facts.items() if fact is not None and fact.origin is Origin.SPIKE]
    return any(_code(node, facts[node]) is not None and dtype_of(node) is not torch.bool for node in spikes)


def partitioned(joint: fx.GraphModule, split: Callable[[], Graphs], results: int, low: bool) -> Graphs:
    """Forward and backward of a joint graph.

    Args:
        joint: the graph; changed in place.
        split: torch's partitioner.
        results: how many of the forward's results the user gets; the others are for the backward.
        low: give up speed for memory: a layer on spikes is computed again in the backward, and every count is kept in
            the fewest bits, which takes a pass over those that were not put together step by step.
    """
    _select_steps(joint.graph)
    _recompute_currents(joint.graph)
    if low:
        _recompute_layers(joint)
    try:
        forward, backward = split()
    except RuntimeError:  # what is marked cannot be computed again of anything that can be kept
        _unmark(joint.graph)
        forward, backward = split()
    _pack_saved(forward, backward, results, low)
    return forward, backward


class _Code(NamedTuple):
    """Elements are whole numbers of so many `bits`, times `scale`."""

    bits: int
    scale: float


def _code(node: fx.Node, fact: SparsityFact | None) -> _Code | None:
    """How a tensor can be kept in less memory; None if no way is known."""
    example = example_of(node)
    if not isinstance(example, torch.Tensor) or not example.dim():
        return None
    if example.dtype is torch.bool:
        return _Code(1, 1.0)
    if fact is None or not (fact.integral and fact.exact and fact.finite and example.is_floating_point()):
        return None
    bits = next((bits for bits in (1, 2, 4, _BYTE) if fact.within(0, 2**bits - 1)), None)
    scale = fact.scale if is_dyadic(fact.scale) else None
    return _Code(bits, scale) if bits is not None and isinstance(scale, float) else None


def _fact(node: fx.Node, analysis: Analysis) -> SparsityFact | None:
    """What holds of a result when it is made: a traced graph writes to nothing but inputs, behind all that reads."""
    return analysis.fact(node, node.next)


def _select_steps(graph: fx.Graph) -> None:
    """Time steps become views of one tensor, not of a tuple: a partitioner recomputes nothing behind a tuple."""
    for node in graph.find_nodes(op="call_function", target=aten.unbind.int):
        for step in list(node.users):
            with graph.inserting_before(step):
                selected = _emit(graph, aten.select.int, node.args[0], *(node.args[1:] or (0,)), step.args[1])
            selected.meta.update(step.meta)
            step.replace_all_uses_with(selected)
            graph.erase_node(step)
        graph.erase_node(node)


def _recompute_currents(graph: fx.Graph) -> None:
    """Marks for the partitioner what neurons are given, up to what a layer gave: batch-norm is computed again.

    The partitioner would rather keep what an operator reads in the backward than have it written there, though what it
    is made of is kept anyway, for the gradient of batch-norm.
    """
    pending = [node.args[0] for node in graph.find_nodes(op="call_function", target=_TRAINED)]
    while pending:
        node = pending.pop()
        op = op_of(node) if isinstance(node, fx.Node) and node.op == "call_function" else None
        if op is None or node.target is operator.getitem or "recompute" in node.meta:
            continue
        if op.has(Trait.VIEW | Trait.ELEMENTWISE | Trait.CAST) or node.target is _CAST:
            _mark(node)
            # statistics and parameters are the partitioner's business
            pending += [one for one in node.all_input_nodes if numel_of(one) == numel_of(node)]


def _recompute_layers(joint: fx.GraphModule) -> None:
    """Marks layers for the partitioner whose operands are kept in bits or are there anyway, and copies of inputs.

    A layer of two operands that are light counts as light itself: behind it comes the second product of attention. An
    input that is one image at all steps is copied for its layer, so many times as large.
    """
    analysis, light = analyse(joint), set[fx.Node]()
    backward = _of_backward(joint.graph)
    for node in joint.graph.nodes:
        if node in backward:
            continue
        operands = [_base(node.args[place]) for place in _OPERANDS.get(node.target, ())]
        if operands and all(one in light for one in operands) and "recompute" not in node.meta:
            _mark(node)
            for one in operands:
                if one.op == "call_function" and one.target not in _OPERANDS and "recompute" not in one.meta:
                    one.meta |= {"recompute": CheckpointPolicy.MUST_SAVE, _MARKED: True}
            light.add(node)
        elif node.target is aten.clone.default and _is_given(_base(node.args[0])):
            _mark(node)
            light.add(node)
        elif _is_given(node) or (node.target is aten.clone.default and _base(node.args[0]) in light):
            light.add(node)
        elif _code(node, _fact(node, analysis)) is not None:
            light.add(_base(node))


def _is_given(node: fx.Node) -> bool:
    """Whether a node is an input that is not written to."""
    return node.op == "placeholder" and not any(user.target is aten.copy_.default for user in node.users)


def _mark(node: fx.Node) -> None:
    """Has the partitioner compute a node again."""
    node.meta |= {"recompute": CheckpointPolicy.MUST_RECOMPUTE, "ac_graph_id": 0, _MARKED: True}


def _unmark(graph: fx.Graph) -> None:
    for node in graph.nodes:
        if node.meta.pop(_MARKED, False):
            node.meta.pop("recompute")
            node.meta.pop("ac_graph_id", None)


def _of_backward(graph: fx.Graph) -> set[fx.Node]:
    """What depends on the gradients that the backward is given."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        given = node.op == "placeholder" and "tangents" in str(node.target)
        if given or any(argument in found for argument in node.all_input_nodes):
            found.add(node)
    return found


def _base(node: fx.Node) -> fx.Node:
    """What a view shows, and what a cast is made of."""
    while (op := op_of(node)) is not None and (op.has(Trait.VIEW) or node.target is _CAST):
        if not isinstance(op.input, fx.Node) or (node.target is operator.getitem and not _gives_views(op.input)):
            break
        node = op.input
    return node


def _gives_views(node: fx.Node) -> bool:
    """Whether a tuple is one of views, rather than of results that an operator makes."""
    op = op_of(node)
    return op is not None and op.has(Trait.VIEW)


def _pack_saved(forward: fx.GraphModule, backward: fx.GraphModule, results: int, low: bool) -> None:
    output = forward.graph.output_node()
    values = list(output.args[0])  # pyright: ignore[reportArgumentType]
    analysis = analyse(forward)
    places = {node.name: node for node in backward.graph.find_nodes(op="placeholder")}
    # what the user gets may be written to before the backward, which is then an error that torch finds
    seen = {_base(node) for node in values[:results] if isinstance(node, fx.Node)}
    for place, node in enumerate(values[results:], results):
        if not isinstance(node, fx.Node) or node.name not in places or _base(node) in seen:
            continue
        packing = _Packing.of(node, analysis, low)
        if packing is not None and _base(node).op == "call_function":
            values[place] = packed = packing.pack(node)
            packing.unpack(places[node.name], packed)
    output.update_arg(0, tuple(values))
    for gm in (forward, backward):
        gm.graph.lint()
        gm.recompile()


class _Packing(NamedTuple):
    """How one tensor lies in bytes.

    Attributes:
        order: its dimensions from the outermost in memory, which is the first, to the innermost.
        parts: what it is the concatenation of, along its first dimension; each gives some bits of a byte.
        places: how many; where `parts` are not given, equal slices.
        flat: bytes have one dimension: those of images Inductor would lay out as channels-last, in any order of theirs.
    """

    code: _Code
    order: tuple[int, ...]
    parts: tuple[fx.Node, ...]
    places: int
    flat: bool

    @classmethod
    def of(cls, node: fx.Node, analysis: Analysis, low: bool) -> "_Packing | None":
        code = _code(node, _fact(node, analysis))
        order = None if code is None else _order(node.meta["val"])
        if code is None or order is None:
            return None
        most, example = _BYTE // code.bits, node.meta["val"]
        parts = tuple(_steps(node, code, analysis))
        if not 1 < len(parts) <= most:
            parts = ()
        size = example.shape[0]
        places = len(parts) or next(n for n in (most, 4, 2, 1) if n <= most and (n == 1 or low and _divides(n, size)))
        flat = example.dim() > 3 and all(type(one) is int for one in example.shape)
        return cls(code, order, parts, places, flat) if example.element_size() * places > 1 else None

    def pack(self, node: fx.Node) -> fx.Node:
        """The bytes, in the forward graph."""
        graph = node.graph
        with graph.inserting_before(node.next):
            packed = None
            for place, part in enumerate(self._steps(node) if self.parts else self._slices(node)):
                counts = self._counts(self._flat(_emit(graph, aten.permute.default, part, list(self.order))))
                if place:
                    counts = _emit(graph, aten.mul.Tensor, counts, 2 ** (self.code.bits * place))
                packed = counts if packed is None else _emit(graph, aten.bitwise_or.Tensor, packed, counts)
        assert packed is not None
        return packed

    def unpack(self, kept: fx.Node, packed: fx.Node) -> None:
        """The tensor in front of its first reader in the backward graph, which is given the bytes in its stead."""
        graph, example, bits = kept.graph, kept.meta["val"], self.code.bits
        with graph.inserting_before(kept):
            given = graph.placeholder(f"{kept.name}_packed")
        given.meta = {**kept.meta, "val": packed.meta["val"]}
        given.meta.pop("tensor_meta", None)
        with graph.inserting_before(next(node for node in graph.nodes if node in kept.users)):
            parts = []
            for place in range(self.places):
                mask = (2**bits - 1) << bits * place
                part = given if self.places == 1 else _emit(graph, aten.bitwise_and.Scalar, given, mask)
                parts.append(self._elements(part, place, example.dtype))
            whole = _emit(graph, aten.cat.default, parts) if len(parts) > 1 else parts[0]
            if self.flat:
                whole = _emit(graph, aten.view.default, whole, [example.shape[dim] for dim in self.order])
            back = [self.order.index(dim) for dim in range(len(self.order))]
            whole = _emit(graph, aten.permute.default, whole, back)
        kept.replace_all_uses_with(whole)
        graph.erase_node(kept)

    def _flat(self, part: fx.Node) -> fx.Node:
        return _emit(part.graph, aten.reshape.default, part, [-1]) if self.flat else part

    def _steps(self, node: fx.Node) -> Iterator[fx.Node]:
        shape = node.meta["val"].shape
        for part in self.parts:
            same = part.meta["val"].shape[1:] == shape[1:]
            yield part if same else _emit(node.graph, aten.view.default, part, [shape[0] // self.places, *shape[1:]])

    def _slices(self, node: fx.Node) -> Iterator[fx.Node]:
        if self.places == 1:
            yield node
            return
        rows = node.meta["val"].shape[0] // self.places
        for place in range(self.places):
            yield _emit(node.graph, aten.slice.Tensor, node, 0, rows * place, rows * (place + 1))

    def _counts(self, part: fx.Node) -> fx.Node:
        graph, scale = part.graph, self.code.scale
        if self.code.bits == 1 and part.meta["val"].dtype is not torch.bool:
            part = _emit(graph, aten.ne.Scalar, part, 0)
        elif scale != 1.0:
            part = _emit(graph, aten.mul.Tensor, part, 1 / scale)
        return _emit(graph, _CAST, part, torch.uint8)

    def _elements(self, part: fx.Node, place: int, dtype: torch.dtype) -> fx.Node:
        """Exact in any dtype: each number has as many digits as the count, and powers of two take none."""
        graph, scale = part.graph, self.code.scale
        if self.code.bits == 1:
            part = _emit(graph, aten.ne.Scalar, part, 0)
        else:
            scale /= 2 ** (self.code.bits * place)
        if dtype is torch.bool:
            return part
        part = _emit(graph, _CAST, part, dtype)
        return part if scale == 1.0 else _emit(graph, aten.mul.Tensor, part, scale)


def _order(example: torch.Tensor) -> tuple[int, ...] | None:
    """The dimensions of a dense tensor as they lie in memory, its channels first or last; None of any other."""
    dims = tuple(range(example.dim()))
    orders = (dims, (0, *dims[2:], 1)) if len(dims) > 2 else (dims,)
    return next((order for order in orders if example.permute(order).is_contiguous()), None)


def _steps(node: fx.Node, code: _Code, analysis: Analysis) -> Sequence[fx.Node]:
    """The tensors that one was concatenated of along its first dimension, each a time step; none of any other."""
    source = node
    while source.target in (aten.view.default, _CAST) and isinstance(source.args[0], fx.Node):
        source = source.args[0]
    is_cat = source.target is aten.cat.default and (*source.args[1:], 0)[0] == 0
    if not is_cat or source is not node and _code(source, _fact(source, analysis)) != code:
        return ()
    steps: Any = source.args[0]
    shape, first = node.meta["val"].shape, steps[0].meta["val"].shape
    if any(step.meta["val"].shape != first for step in steps):
        return ()
    if source.meta["val"].shape == shape:
        return steps
    static = all(type(size) is int for size in shape)
    return steps if static and shape[0] % len(steps) == 0 else ()


def _divides(count: int, size: int | torch.SymInt) -> bool:
    return type(size) is int and size % count == 0


def _emit(graph: fx.Graph, target: Any, *args: Any) -> fx.Node:
    """A call at the graph's place of insertion, with what it gives on the examples of its arguments."""
    node = graph.call_function(target, args)
    with torch.no_grad():
        node.meta["val"] = target(*fx.map_arg(args, lambda one: one.meta["val"]))
    return node
