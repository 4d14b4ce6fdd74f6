"""A program under construction: a graph, the tensors it is called with, and what every node gives.

Operators run as they are added, on real tensors, so that a program is one that eager accepts, and the next operator can
be chosen by what shapes and dtypes are there.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from sparsecomp import _compat

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
SPECIAL = (float("nan"), float("inf"), float("-inf"), -0.0, 1e30, 1e-40, 1.0, 2.0**24)
LARGEST = 4096
"""Elements of a tensor; what would be larger is refused."""


class Refused(Exception):
    """Eager does not accept an operator, or it would give too much."""


class Program:
    """A graph that grows by one operator at a time.

    Attributes:
        seed: what everything random about the program is made from.
        rng: the source of choices.
        training: gradients are asked for.
        inputs: the tensors that placeholders stand for, as they are before the call.
        values: what the nodes gave.
        exact: float64 computes the same function (nothing random, no bits read as another dtype).
    """

    def __init__(self, seed: int) -> None:
        self.seed, self.rng = seed, random.Random(seed)
        self.training = self.rng.random() < 0.4
        self.graph = fx.Graph()
        self.inputs: dict[fx.Node, Tensor] = {}
        self.values: dict[fx.Node, Any] = {}
        self.layers: list[fx.Node] = []
        self.exact = True

    # ---- nodes --------------------------------------------------------------------------------------------------

    def input(self, value: Tensor, name: str) -> fx.Node:
        """A new placeholder that stands for `value`."""
        last = next(reversed(self.inputs), None)
        with self.graph.inserting_after(last):
            node = self.graph.placeholder(f"{name}_{len(self.inputs)}")
        self.inputs[node] = value.detach().clone().requires_grad_(value.requires_grad)
        self.values[node] = value
        return node

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """A call of a function."""
        return self._node("call_function", target, args, kwargs)

    def method(self, name: str, *args: Any, **kwargs: Any) -> fx.Node:
        """A call of a method of the first argument."""
        return self._node("call_method", name, args, kwargs)

    def _node(self, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        real, named = fx.map_arg((args, kwargs), self.values.__getitem__)
        function = getattr(torch.Tensor, target) if op == "call_method" else target
        try:
            with torch.set_grad_enabled(self.training):
                value = function(*real, **named)
        except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError) as error:
            raise Refused(str(error)) from error
        if isinstance(value, Tensor) and not 0 < value.numel() <= LARGEST:
            raise Refused("too large or empty")
        node = self.graph.create_node(op, target, args, kwargs)
        self.values[node] = value
        return node

    # ---- choices ------------------------------------------------------------------------------------------------

    def tensors(self, accepted: Callable[[Tensor], bool] = lambda value: True) -> list[fx.Node]:
        """The nodes that hold tensors of some kind, the latest last."""
        return [node for node, value in self.values.items() if isinstance(value, Tensor) and accepted(value)]

    def pick(self, accepted: Callable[[Tensor], bool] = lambda value: True) -> fx.Node:
        """A tensor of some kind; later ones are likelier, so that programs grow deep."""
        try:
            found = [node for node in self.tensors(accepted) if not node.name.startswith("weight")]
        except RuntimeError as error:  # a view that an operator in place has made invalid
            raise Refused(str(error)) from error
        if not found:
            raise Refused("no such tensor")
        return found[max(self.rng.randrange(len(found)), self.rng.randrange(len(found)))]

    def floating(self, rank: int | None = None) -> fx.Node:
        """A tensor of a float dtype."""
        return self.pick(lambda value: value.is_floating_point() and rank in (None, value.dim()))

    def spikes(self, accepted: Callable[[Tensor], bool]) -> fx.Node:
        """A tensor of a float dtype for a layer to read: mostly one that looks as if it held spikes or counts."""
        wanted = self.rng.random() < 0.8

        def fits(value: Tensor) -> bool:
            if not value.is_floating_point() or not accepted(value):
                return False
            small = value.detach().abs().max() < 8
            return not wanted or bool(small and (value == value.round()).all())

        return self.pick(fits)

    def like(self, node: fx.Node) -> fx.Node:
        """A tensor of the same shape, mostly."""
        shape = self.values[node].shape
        return self.pick(lambda value: value.shape == shape if self.rng.random() < 0.9 else value.dim() > 0)

    def one(self, choices: Sequence[Any]) -> Any:
        """One of the choices."""
        return self.rng.choice(choices)

    def dim(self, node: fx.Node) -> int:
        """A dimension of a tensor, from either end."""
        rank = self.values[node].dim()
        if rank == 0:
            raise Refused("no dimension")
        return self.rng.randrange(-rank, rank)

    def size(self, node: fx.Node, dim: int) -> int:
        """The length of one dimension."""
        return self.values[node].shape[dim]

    def data(self, shape: Sequence[int], dtype: torch.dtype = torch.float32, special: bool = False) -> Tensor:
        """Multiples of 1/8, which are exact in every dtype and so are sums of them, and perhaps special values."""
        numel = torch.Size(shape).numel()
        numbers = [self.rng.randrange(-24, 25) / 8 for _ in range(numel)]
        if special and numel:
            for _ in range(self.rng.randrange(1, 4)):
                numbers[self.rng.randrange(numel)] = self.one(SPECIAL)
        return torch.tensor(numbers).reshape(tuple(shape)).to(dtype)

    # ---- the whole ----------------------------------------------------------------------------------------------

    def finish(self) -> fx.GraphModule:
        """The graph module, with stand-ins for the values as Dynamo leaves them."""
        made = [node for node in self.tensors() if node not in self.inputs]
        results = list(dict.fromkeys([*self.layers, *made[-3:]]))
        self.graph.output(tuple(results))
        gm = fx.GraphModule(nn.Module(), self.graph)
        annotate(gm, list(self.inputs.values()))
        return gm


def annotate(gm: fx.GraphModule, inputs: Sequence[Tensor]) -> None:
    """Give every node the example that Dynamo would: one stand-in a tensor, changed in place where the graph does."""
    mode = _compat.FakeTensorMode()
    fakes = [mode.from_tensor(value.detach()) for value in inputs]
    with mode, torch.no_grad():
        Annotator(gm, garbage_collect_values=False).run(*fakes)


class Annotator(fx.Interpreter):
    """Runs a graph on stand-ins and keeps them."""

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.op != "output":
            n.meta["example_value"] = value
        return value
