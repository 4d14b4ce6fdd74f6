"""The vocabulary of rewrite rules: what a rule sees, and the plan or the reason it answers with.

A rule looks at one node at a time and never changes the graph while it decides. It returns None where the node is none
of its business, a `Refusal` where a condition failed, and a `Plan` where it wants to rewrite; the pipeline does the
rest.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MethodDescriptorType
from typing import Any, NamedTuple

import torch
from torch import fx

from sparsecomp import _compat
from sparsecomp.lowering.tuning.ceilings import Target
from sparsecomp.options import Options
from sparsecomp.passes.facts.analysis import Analysis
from sparsecomp.passes.graph.canonicalize import example_of, target_name
from sparsecomp.passes.graph.operators import OWN_PRODUCTS, Trait, record_of, spelling_of
from sparsecomp.reference.facts import SparsityFact
from sparsecomp.reference.frozen import are_frozen
from sparsecomp.reference.memo import Keep
from sparsecomp.report import Estimate, Report

_DYNAMO_ROOT = re.compile(r"^L\['\w+'\](\.__self__)?\.?")

OWNED = "sparsecomp_owned"
"""Key of the meta of an input that says whether it is an attribute of a module that the graph can be tied to; it is
there under the option `frozen`."""
TAG = "sparsecomp"
"""Key of `node.meta` that says which rule made a node, and why."""


class Why(Enum):
    """Every reason for which a rule leaves a site alone; the value is the message's format."""

    NOT_SPIKES = "the input is not proved to be spikes: {detail}"
    WRONG_DOMAIN = "the input is sparse, but not small integers: {detail}"
    SCALED = "the input is spikes times {scale}, which is not a power of two: the result would round differently"
    UNKNOWN_SHAPE = "the shape of the input or the weight is unknown"
    UNSUPPORTED_OP = "{op} on spikes is not supported"
    PADDING = "padding {padding!r} is not symmetric"
    PADDING_MODE = "padding mode {mode!r} is not zeros"
    DTYPE = "dtype {dtype} stays dense: only float32, float16 and bfloat16 have kernels"
    WEIGHT_NOT_FINITE = "the weight has NaN or infinite values, which a zero must turn into NaN"
    WEIGHT_RANGE = "a channel's weights differ so much that small ones would be lost: no {precision} result"
    FACTOR = "the factor {factor} of the spikes {detail}"
    NO_FEATURES = "the layer has no features: there is nothing to gain"
    TOO_DEEP = "sums over {depth} inputs could pass 32 bits"
    TRANSFORMED = "a transform of torch.func is at work here, of which our operators know nothing"
    GATE = "it would not pay: {detail}"
    FORCED_DENSE = "implementation='dense' was asked for"
    HOOKED = "the module has hooks"
    NOT_FOLDED = "batch-norm stays: {detail}"
    NOT_HOISTED = "the stem runs at every step: {detail}"
    NOT_BATCHED = "the loop over time stays: {detail}"
    NOT_REORDERED = "the products stay in their order: {detail}"
    NOT_FUSED = "the neuron stays its library's operator: {detail}"
    NOT_WITH_NEURONS = "the layer and the neurons behind it stay two launches: {detail}"
    RESIDUAL_APART = "the residual is joined with the spikes in a launch of its own: {detail}"
    NOT_ONE_NEURON = "the neuron stays a chain of steps, as it was written: {detail}"
    SPARSE_AS_WRITTEN = "the sparse product stays as it was written: {detail}"
    GATHERED_AS_WRITTEN = "the layer of fixed fan-in stays as it was written: {detail}"
    ACTIVE_AS_WRITTEN = (
        "all its weights are read: frozen=True promises that they stay, and those of inputs that are zero are left out "
        "then; {detail}"
    )
    PAIR_APART = "the gated pair stays two layers and their product: {detail}"
    LAUNCHES_APART = "the layers that read one input stay launches of their own: {detail}"
    MASKED_AS_WRITTEN = "the masked weight stays as it was written: {detail}"
    ATTENTION_AS_WRITTEN = "the attention stays as it was written: {detail}"
    TABLE_AS_WRITTEN = "the gradient by the table stays torch's: {detail}"
    MASK_NOT_FROZEN = (
        "the attention stays as it was written: its mask `{name}` may be written to where nothing tells of it; "
        "{option} promises that it is not"
    )
    NOT_FROZEN = (
        "the masked weight stays as it was written: what it is made of may be written to where nothing tells of it; "
        "{option} promises that it is not"
    )
    PRUNED = "{reason}; once it is trained, torch.nn.utils.prune.remove makes it a plain weight{sparse}"
    FAILED = "the rule failed and the site was left as it was: {detail}"


@dataclass(frozen=True, slots=True)
class Refusal:
    """A condition that failed. The message is formatted only if somebody reads it.

    Attributes:
        estimate: seconds, for the report.
        layer: as of `Plan`.
    """

    why: Why
    details: Mapping[str, object] = field(default_factory=dict)
    estimate: Estimate | None = None
    layer: fx.Node | None = None

    def __bool__(self) -> bool:
        return False

    def __str__(self) -> str:
        return self.why.value.format(**self.details)


def refuse(why: Why, **details: object) -> Refusal:
    """A `Refusal` with the details of its message."""
    return Refusal(why, details)


@dataclass(frozen=True, slots=True)
class Plan:
    """A rewrite that is legal and pays.

    Attributes:
        build: makes the replacement; called with insertion before the node, returns what takes each old node's place.
        reason: why, for the report.
        implementation, precision: for the report.
        dead: nodes to erase after the replaced one, the last first, if nothing else reads any of them.
        estimate: seconds, for the report.
        layer: whose module and line the report gives, if that is not the node that was judged.
        places: the nodes before which `build` inserts, in order, if not only before the one that was judged.
        order: all nodes of the graph, in the order that they are to have before `build` is called, if not as they are.
    """

    build: Callable[[], Mapping[fx.Node, fx.Node]]
    reason: str
    implementation: str
    precision: str = ""
    dead: tuple[fx.Node, ...] = ()
    estimate: Estimate | None = None
    layer: fx.Node | None = None
    places: tuple[fx.Node, ...] = ()
    order: tuple[fx.Node, ...] = ()


Verdict = Plan | Refusal | None


class Density(NamedTuple):
    """How sparse the input of a layer is.

    Attributes:
        share: share of non-zero elements; None if unknown.
        active: share of output pixels whose window holds a non-zero element; None if unknown.
    """

    share: float | None = None
    active: float | None = None


@dataclass(slots=True)
class Context:
    """What a rule may look at, for one graph.

    Attributes:
        gm: the graph under rewrite.
        options: what the user asked for.
        report: where sites and notes go.
        analysis: facts about every node of the current graph.
        values: real tensors behind placeholders and attributes, where the capture knows them.
        densities: measured ones, by `site_key`.
        eager: the result runs op by op, not through Inductor.
        target: the card to estimate for, which need not be there; None for the devices of the tensors.
        switches: the positions at which the graph switches gradients or inference mode on or off.
        modes: those, and the positions at which it begins or ends autocast.
        gradients: somebody may ask for gradients: they are enabled here, or within the graph, or it runs in any mode.
        written: parameters, buffers and inputs that the graph writes to, through whatever name.
        transformed: nodes within a transform of torch.func (grad, vmap, jvp, …).
        products: how many the graph has, at least one: matrix products and convolutions, dense or sparse.
    """

    gm: fx.GraphModule
    options: Options
    report: Report
    analysis: Analysis
    values: Mapping[fx.Node, torch.Tensor] = field(default_factory=dict)
    densities: Mapping[str, Density] = field(default_factory=dict)
    eager: bool = False
    target: Target | None = None
    switches: tuple[int, ...] = field(init=False)
    modes: tuple[int, ...] = field(init=False)
    gradients: bool = field(init=False)
    written: frozenset[fx.Node] = field(init=False)
    transformed: frozenset[fx.Node] = field(init=False)
    products: int = field(init=False)

    def __post_init__(self) -> None:
        nodes = self.gm.graph.nodes
        switches = [node for node in nodes if _compat.sets_grad_mode(node) or _compat.sets_inference_mode(node)]
        self.switches = tuple(self.analysis.order[node] for node in switches)
        autocast = (self.analysis.order[node] for node in nodes if _compat.sets_autocast(node))
        self.modes = tuple(sorted((*self.switches, *autocast)))
        turned_on = (node.args[0] for node in switches if _compat.sets_grad_mode(node))
        self.gradients = self.eager or torch.is_grad_enabled() or any(turned_on)
        self.written = _written(self.analysis, self.values)
        self.transformed = _transformed(self.gm.graph)
        self.products = max(1, sum(map(_is_product, nodes)))

    def device(self, device: torch.device) -> torch.device:
        """Where an operator on tensors of a device is to run."""
        return device if self.target is None else torch.device("cuda")

    def fact(self, value: object, reader: fx.Node) -> SparsityFact | None:
        """What is known about the values of an argument when `reader` reads it."""
        return self.analysis.fact(value, at=reader) if isinstance(value, fx.Node) else None

    def switched(self, first: fx.Node, last: fx.Node) -> bool:
        """Whether gradients or inference mode are switched between two nodes: who computes both at one place would give
        other gradients."""
        return self._lies_between(self.switches, first, last)

    def mode_changes(self, first: fx.Node, last: fx.Node) -> bool:
        """The same of gradients, inference mode and autocast, which gives results of another dtype."""
        return self._lies_between(self.modes, first, last)

    def _lies_between(self, positions: tuple[int, ...], first: fx.Node, last: fx.Node) -> bool:
        begin, end = self.analysis.order[first], self.analysis.order[last]
        return any(begin < position < end for position in positions)

    def keep(self, *sources: torch.Tensor) -> Keep | None:
        """When an operator may keep what it works out of these tensors: by the option `frozen`, or by `frozen_weights`
        where each call can ask whether that still holds; None if the caller promised nothing."""
        replayed = any(replays(self.options, source.device) for source in sources)
        if self.options.promises(*sources):
            return "prepared" if replayed else "always"
        return "asked" if are_frozen() and not replayed else None

    def constant(self, value: object) -> torch.Tensor | None:
        """The tensor behind an operand that is a module's parameter or buffer, of which the option `frozen` promises
        that it stays as it is, and which nothing in the graph writes to.

        Another tensor may take its place where it is the argument of a function, or where the graph runs op by op.
        """
        tensor = self.values.get(value) if isinstance(value, fx.Node) else None
        if tensor is None or self.eager or _compat.is_fake(tensor) or not self.options.promises(tensor):
            return None
        assert isinstance(value, fx.Node)
        known = (is_static(value) or isinstance(tensor, torch.nn.Parameter)) and value.meta.get(OWNED, False)
        return tensor.detach() if known and value not in self.written else None

    def density(self, node: fx.Node) -> tuple[Density, str]:
        """Density of the input of a site, and where the number comes from."""
        measured = self.densities.get(site_key(node))
        if measured is not None:
            return measured, "measured"
        if self.options.density is not None:
            return Density(self.options.density), "assumed"
        return Density(), "unknown"


def _written(analysis: Analysis, values: Mapping[fx.Node, torch.Tensor]) -> frozenset[fx.Node]:
    """What the graph writes to of what it is given. Inputs share memory as they did in the example, or not at all."""
    inputs = [node for node in analysis.graph.nodes if node.op == "placeholder"]
    memories = {one for index in analysis.written_inputs for one in _memories(inputs[index], values)}
    attributes = [node for node in analysis.graph.nodes if node.op == "get_attr" and example_of(node) is not None]
    found = [node for node in attributes if analysis.last_writes.get(node, -1) >= 0]
    return frozenset([*found, *(node for node in inputs if not memories.isdisjoint(_memories(node, values)))])


def _is_product(node: fx.Node) -> bool:
    name = target_name(node)
    return name is not None and (name in OWN_PRODUCTS or Trait.PRODUCT in record_of(spelling_of(name)[0]).traits)


def _memories(node: fx.Node, values: Mapping[fx.Node, torch.Tensor]) -> set[object]:
    """What inputs of one memory have in common: the node itself, and the memory of its example and of what it holds."""
    known = (example_of(node), values.get(node))
    return {node, *(_compat.storage_of(one) for one in known if isinstance(one, torch.Tensor))}


def _transformed(graph: fx.Graph) -> frozenset[fx.Node]:
    found, depth = set(), 0
    for node in graph.nodes:
        depth += _compat.transform_nesting(node)
        if depth:
            found.add(node)
    return frozenset(found)


@dataclass(frozen=True, slots=True)
class Rule:
    """A named rewrite: `consider` judges one node; the rules named in `after` have run before.

    `of_rewritten`: it judges what earlier rules wrote, so that its refusals of that are told as well.

    A module in a room of `passes` that defines one adds it to the compiler (see `sparsecomp.passes.find_rules`).
    """

    name: str
    consider: Callable[[fx.Node, Context], Verdict]
    after: tuple[str, ...] = ()
    of_rewritten: bool = False


def site_key(node: fx.Node) -> str:
    """A name of a site that two captures of the same model share: module path and node name."""
    return f"{module_path(node)}:{node.name}"


def module_path(node: fx.Node) -> str:
    """Dotted path of the innermost module that made the call, without Dynamo's spelling; empty if unknown."""
    if node.op == "call_module":
        return str(node.target)
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    return _DYNAMO_ROOT.sub("", list(stack.values())[-1][0])


def known_sizes(node: object) -> list[int] | None:
    """The shape a node had in the example, None if unknown."""
    tensor = example_of(node)
    if tensor is None:
        return None
    hints = [_compat.size_hint(size) for size in tensor.shape]
    return None if any(hint is None for hint in hints) else [hint for hint in hints if hint is not None]


def call(graph: fx.Graph, like: fx.Node, target: Any, *args: Any) -> fx.Node:
    """A new call with the stack trace and module stack of `like`; the pipeline computes its example value."""
    # a method by name: a graph that names its descriptor cannot be pickled
    is_method = isinstance(target, MethodDescriptorType)
    node = graph.call_method(target.__name__, args) if is_method else graph.call_function(target, args)
    node.meta = new_meta(like)
    return node


def new_meta(like: fx.Node) -> dict[str, Any]:
    """What a new node in the place of `like` shares with it: its traces, but no example value."""
    return {key: value for key, value in like.meta.items() if key not in ("example_value", "val", "tensor_meta")}


def is_static(node: fx.Node) -> bool:
    """Whether an input has Dynamo's mark on the parameters and buffers of modules."""
    return "_dynamo_static_input_type" in (node.meta.get("tensor_dict") or {})


def writes_one_row(options: Options) -> bool:
    """Whether Inductor writes a kernel of its own for a dense layer of one row without bias on a GPU, as it does under
    max-autotune, and leaves none to cuBLAS."""
    asked = options.inductor.get("coordinate_descent_tuning")
    return options.mode.startswith("max-autotune") if asked is None else bool(asked)


def replays(options: Options, device: torch.device) -> bool:
    """Whether torch.compile replays CUDA graphs under these options, which runs no code of the host's."""
    asked = options.mode in ("reduce-overhead", "max-autotune") or bool(options.inductor.get("triton.cudagraphs"))
    return asked and device.type == "cuda"

