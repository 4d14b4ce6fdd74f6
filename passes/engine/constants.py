"""Constants of a graph: what was worked out of inputs that the option `frozen` promises to stay as they are.

They are buffers of the graph's module, so that compiled code reads them as any weight. A promise covers what the inputs
hold, not which they are. So a graph with constants serves the one module that they belong to (`Context.constant` knows
no other inputs), and before each call the host looks whether the inputs are those that the constants were made of, and
makes them anew in place if not. It sees other tensors, other memory and counted writes; hidden ones are the promise's,
and ``SPARSECOMP_DEBUG=1`` finds them. An input that the graph itself writes to, such as a cache of keys, may be another
tensor in each call, but not one in the memory of what was promised to stay: the host looks for that, too.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from sparsecomp import _compat
from sparsecomp.environment import Settings
from sparsecomp.errors import FrozenWeightError
from sparsecomp.ops import promise  # noqa: F401  (registers the operator)
from sparsecomp.passes.engine.proofs import Seen, assume_proofs
from sparsecomp.passes.engine.rule import call
from sparsecomp.passes.facts.analysis import analyse
from sparsecomp.passes.graph.canonicalize import example_of

_KEY = "sparsecomp_constants"
"""Of the graph module's meta, where rules leave the constants for the backend."""


class Constant(NamedTuple):
    """A buffer of a graph's module.

    Attributes:
        make: what gives it for tensors in the place of the sources; equal ones make equal buffers.
        sources: placeholders.
        part: which of several tensors that `make` gives; None where it gives one.
    """

    make: Callable[..., Any]
    sources: tuple[fx.Node, ...]
    part: int | None = None


def promised_node(
    like: fx.Node, make: Callable[..., Tensor], sources: Sequence[fx.Node], held: Sequence[Tensor], names: Sequence[str]
) -> fx.Node:  # fmt: skip
    """A node for what is made of inputs that are promised to stay as they are.

    Under ``SPARSECOMP_DEBUG=1`` each call looks whether they did.

    Args:
        sources, held: the inputs, and what they hold.
        names: of them, for the error.
    """
    node = _buffer(like, Constant(make, tuple(sources)), lambda: _made(make, held))
    return checked(node, like, sources, held, names)


def promised_nodes(
    like: fx.Node, make: Callable[..., Sequence[Tensor]], parts: int, sources: Sequence[fx.Node],
    held: Sequence[Tensor], names: Sequence[str],
) -> list[fx.Node]:  # fmt: skip
    """`promised_node` for each of so many tensors that are made together; without sources they are just constants."""
    made = cache(partial(_made, make, held))
    nodes = [
        _buffer(like, Constant(make, tuple(sources), part), lambda part=part: made()[part]) for part in range(parts)
    ]  # fmt: skip
    return [checked(nodes[0], like, sources, held, names), *nodes[1:]] if sources else nodes


def checked(
    node: fx.Node, like: fx.Node, sources: Sequence[fx.Node], held: Sequence[Tensor], names: Sequence[str]
) -> fx.Node:  # fmt: skip
    """A node that, under ``SPARSECOMP_DEBUG=1``, looks in each call whether promised inputs hold what they held."""
    if not Settings.from_environment().debug:
        return node
    seen = [
        _buffer(like, Constant(torch.clone, (source,)), partial(_made, torch.clone, [one]))
        for source, one in zip(sources, held, strict=True)
    ]
    return call(like.graph, like, torch.ops.sparsecomp.promised.default, node, list(sources), seen, list(names))


def constant_behind(node: Any) -> Constant | None:
    """What a node that reads a constant, looked at in each call or not, was worked out of; None for other nodes."""
    if isinstance(node, fx.Node) and node.target is torch.ops.sparsecomp.promised.default:
        node = node.args[0]
    if not isinstance(node, fx.Node) or node.op != "get_attr" or node.graph.owning_module is None:
        return None
    names: dict[Constant, str] = node.graph.owning_module.meta.get(_KEY, {})
    return next((constant for constant, name in names.items() if name == node.target), None)


def _buffer(like: fx.Node, constant: Constant, made: Callable[[], Tensor]) -> fx.Node:
    module = like.graph.owning_module
    assert module is not None
    names: dict[Constant, str] = module.meta.setdefault(_KEY, {})
    if constant not in names:
        names[constant] = _compat.add_constant(module, made())
    node = like.graph.get_attr(names[constant])
    value = module.get_buffer(names[constant])
    node.meta["example_value"] = _compat.fake_of(value, beside=example_of(like.all_input_nodes[0]))
    return node


def _made(make: Callable[..., Any], held: Sequence[Tensor]) -> Any:
    with torch.inference_mode(False), torch.no_grad():
        return make(*held)


class Constants:
    """The constants of a graph that is compiled, and the inputs that they were made of."""

    def __init__(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> None:
        """Takes them off the graph's module, and has what was proved of inputs asked before each call."""
        proved = assume_proofs(gm)
        places = {node: place for place, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
        read, names = {node.target for node in gm.graph.find_nodes(op="get_attr")}, gm.meta.pop(_KEY, {})
        self._made = [
            (gm.get_buffer(name), constant.make, tuple(places[source] for source in constant.sources), constant.part)
            for constant, name in names.items() if name in read and constant.sources
        ]  # fmt: skip
        for name in names.values():
            if name not in read:  # a later rule has found something better
                _compat.remove_constant(gm, name)
        written = analyse(gm).written_inputs if self._made else ()
        self._written = [
            (place, str(node.target)) for node, place in places.items()
            if place in written and type(inputs[place]) in (Tensor, torch.nn.Parameter)  # others may have no memory
        ]  # fmt: skip
        self._places = sorted({place for _, _, sources, _ in self._made for place in sources})
        _compat.serve_one_module([node for node, place in places.items() if place in self._places or node in proved])
        self._wait()
        self._set_apart(inputs)
        self._remember(inputs)

    def __bool__(self) -> bool:
        return bool(self._made)

    def follow(self, inputs: Sequence[Any]) -> bool:
        """Make the constants anew if an input is another tensor than before, or was written to; whether it was.

        Raises:
            FrozenWeightError: an input that the graph writes to lies in the memory of one that is promised to stay.
        """
        for place, address in self._apart:
            if inputs[place].data_ptr() != address:
                self._set_apart(inputs)
                break
        for place, tensor, address_of, address, version in self._known:
            # `Seen.still`, without the host's time for calling it
            if inputs[place] is not tensor or address_of() != address:
                break
            if version is not None and tensor._version != version:
                break
        else:
            return False
        self._set_apart(inputs)  # before a constant is made of what must not serve
        self._wait()
        made: dict[Any, Any] = {}
        for _, make, sources, _ in self._made:  # all before any is written: one may fail
            if (make, sources) not in made:
                made[make, sources] = _made(make, [inputs[place] for place in sources])
        for buffer, make, sources, part in self._made:
            buffer.copy_(made[make, sources] if part is None else made[make, sources][part])
        self._wait()
        self._remember(inputs)
        return True

    def _set_apart(self, inputs: Sequence[Any]) -> None:
        """Look whether what is written to lies apart from what is promised to stay, and remember where it lies."""
        promised = {_compat.storage_of(inputs[place]) for place in self._places}
        for place, name in self._written:
            if _compat.storage_of(inputs[place]) in promised:
                raise FrozenWeightError(
                    f"the graph writes to its input `{name}`, which lies in the memory of a tensor that the option "
                    "frozen promises to stay as it is; give it memory of its own, or compile without the promise"
                )
        # an address tells enough, and keeps no cache alive that its owner gives up
        self._apart = [(place, inputs[place].data_ptr()) for place, _ in self._written]

    def _wait(self) -> None:
        """For whoever reads or makes the constants: calls may come on any stream."""
        for device in {buffer.device for buffer, *_ in self._made if buffer.is_cuda}:
            if not torch.cuda.is_current_stream_capturing():
                torch.cuda.synchronize(device)

    def _remember(self, inputs: Sequence[Any]) -> None:
        # the tensors themselves: torch swaps none that has a weak reference
        # whose memory stays, so that no other lies at its address
        self._seen = [Seen.of(inputs[place]) for place in self._places]
        self._known = [
            (place, inputs[place], inputs[place].data_ptr, seen.address, seen.version)
            for place, seen in zip(self._places, self._seen, strict=True)
        ]
