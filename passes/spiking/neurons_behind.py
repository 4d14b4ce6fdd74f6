"""Which neurons alone read what a layer gives, and through what: asked when the layer is judged, when neurons that are
written by hand are, and when both become one launch."""

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

import sparsecomp.ops  # noqa: F401  (registers the operators)
from sparsecomp.lowering.spiking.lif import is_power_of_two
from sparsecomp.passes.cost.conv_neuron import Behind
from sparsecomp.passes.engine.rule import Context
from sparsecomp.passes.graph.canonicalize import CanonicalOp, dtype_of, example_of, op_of
from sparsecomp.passes.graph.operators import Trait
from sparsecomp.passes.spiking.lying import lie_alike
from sparsecomp.passes.spiking.widened import in_bytes, widened_from
from sparsecomp.reference.geometry import is_channels_last
from sparsecomp.reference.neuron import ROUNDINGS, Neuron, neuron_of
from sparsecomp.reference.precision import KERNEL_DTYPES

LIF, DESCRIBED = torch.ops.sparsecomp.lif.default, torch.ops.sparsecomp.neuron.default
MOST_STEPS = 16
"""A block holds all steps of its pixels; with more, few pixels would share what is loaded of a weight."""
DISABLED_BY = "fuse_conv_neuron"
_READS_NO_VALUE = Trait.VIEW | Trait.CAST | Trait.FILL


@dataclass(frozen=True, slots=True)
class Between:
    """How a layer's result becomes what neurons are given.

    Attributes:
        layer: the layer.
        chain: the nodes between, the last first.
        norm: a batch-norm in evaluation among them.
        joint: a sum with something else among them, in place or not.
        added: what that is.
    """

    layer: fx.Node
    chain: tuple[fx.Node, ...]
    norm: CanonicalOp | None = None
    joint: fx.Node | None = None
    added: fx.Node | None = None

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        """All that is computed in the launch if both become one, but for the neurons, the last first."""
        return (*self.chain, self.layer)

    @property
    def given(self) -> fx.Node:
        """What makes the numbers that the neurons are given, of which all behind it are views or a cast."""
        return self.joint or (self.norm and self.norm.node) or self.layer

    def others(self, readers: set[fx.Node]) -> list[fx.Node]:
        """Who reads what the neurons, these `readers`, are given besides them: it has to be written for them."""
        behind = self.nodes[: self.nodes.index(self.given) + 1]
        inside = {*readers, *self.nodes}.union(*map(idle_readers, self.nodes))
        return [user for one in behind for user in one.users if user not in inside]

    def on_the_way(self, behind: Behind, readers: set[fx.Node]) -> Behind:
        """Neurons, these `readers`, with what is between the layer and them."""
        return behind._replace(written=bool(self.others(readers)), joined=self.joint is not None)

    def bytes_added(self) -> fx.Node | None:
        """What is added, if it is widened bytes: the widened tensor, behind views."""
        views, base = unviewed(self.added)
        return base if isinstance(base, fx.Node) and widened_from(base) is not None else None

    def added_in_bytes(self, like: fx.Node) -> fx.Node | None:
        """What is added, in bytes where it was widened from such."""
        return self.added if self.added is None or self.bytes_added() is None else in_bytes(self.added, like)


def behind_of(neurons: fx.Node, between: Between) -> Behind:
    """What a call of neurons does with what a layer gives, for an estimate."""
    steps = example_of(neurons.args[0]).shape[0]
    if neurons.target is DESCRIBED:
        return between.on_the_way(behind_described(steps, neuron_of(str(neurons.args[5]))), {neurons})
    *_, charge, tau = neurons.args[:10]
    assert isinstance(tau, int | float)
    return between.on_the_way(Behind(steps, divides=charge == "lif" and not is_power_of_two(tau)), {neurons})


def behind_described(steps: int, neuron: Neuron) -> Behind:
    """The same of a description; to round is two instructions, there and back."""
    divides = any(one.operation == "div" for one in neuron.code)
    instructions = sum(1 + (one.operation in ROUNDINGS) for one in neuron.code)
    return Behind(steps, divides, instructions)


def neurons_behind(layer: fx.Node, linear: bool, ctx: Context) -> Behind | None:
    """The neurons that a card can run with a layer in one launch, if there are such."""
    out = example_of(layer)
    if DISABLED_BY in ctx.options.disable or out is None or not (linear or is_channels_last(out)):
        return None
    for neurons in _neurons_that_read(layer):
        between = between_of(neurons, lambda node: node is layer)
        if between is not None and not why_apart(neurons, between, linear, ctx):
            return behind_of(neurons, between)
    return None


def _neurons_that_read(node: fx.Node) -> Iterator[fx.Node]:
    """The neurons that are given a node, or what views, a batch-norm, a sum or a cast make of it, the first first."""
    for reader in node.users:
        op = op_of(reader)
        if reader.target in (LIF, DESCRIBED):
            yield reader
        elif op is not None and (op.has(Trait.VIEW | Trait.CAST) or op.name in ("add", "batch_norm")):
            yield from _neurons_that_read(reader)


def between_of(neurons: fx.Node, is_layer: Callable[[fx.Node], bool]) -> Between | None:
    """What leads from a layer to neurons, if nothing does but views, a batch-norm, a sum, and a cast of what is given
    to described ones."""
    x: Any = neurons.args[0]
    described = neurons.target is DESCRIBED
    views, given = unviewed(x)
    cast = op_of(given) if isinstance(given, fx.Node) and described else None
    if cast is not None and cast.has(Trait.CAST) and not cast.inplace and _rounds_nothing(cast):
        x, views = cast.input, [*views, cast.node]
    else:
        views = []
    has_norm = not described and neurons.args[3] is not None
    return next(_ways(x, Between(neurons, tuple(views)), is_layer, has_norm), None)


def _rounds_nothing(cast: CanonicalOp) -> bool:
    before = dtype_of(cast.input)
    return before in ROUNDINGS.values() and dtype_of(cast.node) in (before, torch.float32)


def leads_to(x: Any, is_layer: Callable[[fx.Node], bool]) -> Between | None:
    """The same of what is given, of neurons that are no operator yet."""
    return next(_ways(x, Between(x, ()), is_layer, False), None)


def _ways(x: Any, found: Between, is_layer: Callable[[fx.Node], bool], has_norm: bool) -> Iterator[Between]:
    """Ways from a layer to a value, `found` being the way on from there; `has_norm`: neurons have a batch-norm."""
    views, node = unviewed(x)
    if not isinstance(node, fx.Node):
        return
    chain, op = (*found.chain, *views), op_of(node)
    if is_layer(node):
        yield Between(node, chain, found.norm, found.joint, found.added)
    elif op is None or op.out is not None or has_norm:
        return
    elif op.name == "add" and op.get("alpha", 1) == 1 and found.joint is None and found.norm is None:
        operands = op.input, op.get("other")
        # in place it writes to its first operand
        for ours, other in (operands,) if op.inplace else (operands, operands[::-1]):
            if isinstance(ours, fx.Node) and isinstance(other, fx.Node) and ours is not other:
                yield from _ways(ours, Between(node, (*chain, node), None, node, other), is_layer, has_norm)
    elif op.name == "batch_norm" and is_evaluated(op) and found.norm is None:
        yield from _ways(op.input, Between(node, (*chain, node), op, found.joint, found.added), is_layer, has_norm)


def is_evaluated(op: CanonicalOp) -> bool:
    """Whether a batch-norm goes by its running statistics, over all that it is given."""
    statistics = op.get("running_mean"), op.get("running_var")
    kept = op.get("training") is False or (op.module is not None and not op.module.training)
    return kept and op.step_mode == "s" and not op.inplace and None not in statistics


def why_apart(neurons: fx.Node, between: Between, linear: bool, ctx: Context) -> str | None:
    """Why a layer and neurons cannot be one launch, None if they can."""
    current, out, x = example_of(neurons.args[0]), example_of(between.layer), example_of(op_input(between.layer))
    if current is None or out is None or x is None:
        return "its shape is unknown"
    if neurons.target is LIF and out.dtype is not torch.float32:
        return f"its result is {out.dtype}; the neurons take float32"
    found = _between_obstacle(between, {neurons}, ctx)
    if found is None and launched_before(neurons, between, ctx) is None:
        found = "somebody else reads its result before all is there that the neurons read"
    if found is not None:
        return found
    if any(user.target is not operator.getitem for user in neurons.users):
        return "the neurons' results are read together"
    found = shape_obstacle(current, between, linear) or _layout_obstacle(between, {neurons})
    return found or (_parameter_obstacle(neurons, current) if neurons.target is DESCRIBED else None)


def launched_before(neurons: fx.Node, between: Between, ctx: Context) -> fx.Node | None:
    """The node before which one launch has to stand, of the neurons and who else reads what they are given the first;
    None if something that the neurons read is not there yet, or other than when they would run."""
    order, unchanged = ctx.analysis.order, ctx.analysis.unchanged
    place = min((neurons, *between.others({neurons})), key=order.__getitem__)
    read = [one for one in neurons.all_input_nodes if one is not neurons.args[0]]
    if place is neurons or all(order[one] < order[place] and unchanged(one, place, neurons) for one in read):
        return place
    return None


def op_input(layer: fx.Node) -> Any:
    """What a layer reads."""
    op = op_of(layer)
    return layer.args[0] if op is None else op.input


def written_obstacle(x: fx.Node, readers: set[fx.Node], between: Between, linear: bool, ctx: Context) -> str | None:
    """As :func:`why_apart`, of neurons that are no operator yet, but these nodes that read `x` (T, N, K, …)."""
    found, order = _between_obstacle(between, readers, ctx), ctx.analysis.order
    if any(order[user] < order[reader] for user in between.others(readers) for reader in readers):
        return "somebody else reads its result before the neurons do"
    return found or shape_obstacle(example_of(x), between, linear) or _layout_obstacle(between, readers)


def shape_obstacle(current: torch.Tensor, between: Between, linear: bool) -> str | None:
    """What of the shapes of neurons' input (T, N, K, …), and of all that leads to it, stands against one launch."""
    out = example_of(between.layer)
    if current.shape[0] > MOST_STEPS:
        return f"{current.shape[0]} time steps: blocks hold up to {MOST_STEPS}"
    if not fits(current, out, linear):
        return "the neurons' channels are not its outputs"
    if between.norm is not None and example_of(between.norm.node).shape != out.shape:
        return "the batch-norm's channels are not its outputs"
    if between.added is not None:
        joint, added = example_of(between.joint), example_of(between.added)
        if added is None or added.shape != joint.shape or joint.numel() != current.numel():
            return "what is added is of another shape"
        if added.dtype is not out.dtype or added.device != out.device:
            return f"what is added is {added.dtype}, and its result {out.dtype}"
        if not fits(joint if joint.dim() == current.dim() else joint.unflatten(0, current.shape[:2]), out, linear):
            return "what is added is of another shape"
    return None


def _layout_obstacle(between: Between, readers: set[fx.Node]) -> str | None:
    """What neurons are given would be written as the layer's result lies."""
    given, out = example_of(between.given), example_of(between.layer)
    if not between.others(readers) or lie_alike(given, out.reshape(given.shape)):
        return None
    return "somebody else reads its result, which lies in another order"


def _between_obstacle(between: Between, readers: set[fx.Node], ctx: Context) -> str | None:
    unchanged, out, joint = ctx.analysis.unchanged, example_of(between.layer), between.joint
    passed = [one for one in (joint, between.norm and between.norm.node) if one is not None]
    if out.dtype not in KERNEL_DTYPES or any(dtype_of(one) is not out.dtype for one in passed):
        return f"its result is {out.dtype}, and another dtype on its way to the neurons"
    behind = between.nodes if joint is None else between.nodes[: between.nodes.index(joint) + 1]
    before = between.nodes[len(behind) :]
    # a sum in place writes to what it is made of, which nobody reads any more
    written = [one for one in behind if not unchanged(one, one)]
    written += [one for one in before if joint is not None and not unchanged(one, one, joint.prev)]
    if written:
        return "its result is written to in place"
    others = between.others(readers)
    inside = {*readers, *between.nodes}.union(*map(idle_readers, between.nodes))
    if any(user not in inside and user not in others for one in between.nodes for user in one.users):
        return "somebody else reads its result"
    read = [(one, between.layer) for one in between.layer.all_input_nodes]
    if between.norm is not None:
        read += [(one, between.norm.node) for one in between.norm.node.all_input_nodes if one not in between.nodes]
    if between.added is not None and joint is not None:
        bytes_read = between.bytes_added()
        read += [(one, joint) for one in (between.added, bytes_read and widened_from(bytes_read)) if one is not None]
    if not all(unchanged(one, since) for one, since in read):
        return "what it reads is written to before the neurons read"
    return None


def _parameter_obstacle(neurons: fx.Node, current: torch.Tensor) -> str | None:
    """Parameters have one number, or one for each channel of a step (N, K, …)."""
    parameters: Any = neurons.args[3]
    others = [one.name for one in parameters if not is_by_channel(one, current)]
    return f"{others[0]} is neither one number nor one a channel" if others else None


def is_by_channel(parameter: fx.Node, current: torch.Tensor) -> bool:
    """Whether a parameter of neurons that are given (T, N, K, …) is one number, or one for each of K channels."""
    example = example_of(parameter)
    several = [dim - example.dim() for dim, size in enumerate(example.shape) if size != 1]
    return not several or (several == [2 - current.dim()] and example.numel() == current.shape[2])


def fits(current: torch.Tensor, out: torch.Tensor, linear: bool) -> bool:
    """Whether neurons take a layer's result (T · N, K, …), or (…, K) of a linear one, step by step, by its channels."""
    if linear:
        return current.dim() == 3 and current.shape[2] == out.shape[-1]
    return current.shape[2:] == out.shape[1:]


def reshaped(node: fx.Node) -> fx.Node | None:
    """What a node gives in another shape, as it lies; None if it does anything else."""
    op = op_of(node)
    return op.input if op is not None and op.has(Trait.ROW_MAJOR) and op.has(Trait.VIEW) else None


def are_steps_of(x: torch.Tensor, frames: torch.Tensor) -> bool:
    """Whether (T, N, C, …) has the sizes of frames (T · N, C, …), apart by steps."""
    return x.shape[2:] == frames.shape[1:] and x.shape[0] * x.shape[1] == frames.shape[0]


def unviewed(node: Any) -> tuple[list[fx.Node], Any]:
    """The nodes, the last first, that give another one in other shapes, as it lies, and that one."""
    views = []
    while isinstance(node, fx.Node) and (viewed := reshaped(node)) is not None:
        views.append(node)
        node = viewed
    return views, node


def idle_readers(node: fx.Node) -> list[fx.Node]:
    """Views and casts of a node, and what has its shape alone, that nobody reads, the last first.

    Of a view, a first membrane was made that is now a number; spikes were widened for readers that take bytes now.
    """
    found = []
    for user in node.users:
        op = op_of(user)
        if op is None or not op.has(_READS_NO_VALUE) or op.inplace:
            continue
        behind = idle_readers(user)
        if all(one in behind for one in user.users):
            found += [*behind, user]
    return found
