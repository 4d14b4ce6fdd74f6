"""What an attention with a mask is to a rule, however it is written."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from sparsecomp.passes.engine.rule import call
from sparsecomp.passes.graph.canonicalize import example_of

Steps = tuple[tuple[str, tuple[Any, ...]], ...]
THREE: Steps = (("unsqueeze", (1,)),)
"""How (batch, length, depth) becomes one of a single head."""
GROUPS: Steps = (("flatten", (1, 2)),)
"""How (batch, heads of keys, group, length, depth) becomes one of all heads."""
FIRST: Steps = (("select", (2, 0)),)
"""How it does if all of a group are the same."""


class View(NamedTuple):
    """A node, and the calls of methods by which it becomes (batch, heads, length, depth), or the other way round."""

    node: fx.Node
    steps: Steps = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the view, if the node's sizes are numbers."""
        return tuple(self.lying.shape)

    @property
    def lying(self) -> Tensor:
        """The view on the device meta, if the node's sizes are numbers."""
        example = example_of(self.node)
        return stepped(torch.empty_strided(example.shape, example.stride(), device="meta"), self.steps)


def by_groups(node: fx.Node) -> Steps:
    """Steps from keys or values (batch, heads of keys, group or 1, length, depth) to (batch, heads, length, depth)."""
    example = example_of(node)
    alike = example.shape[2] == 1 or example.stride()[2] == 0
    return FIRST if alike else GROUPS


def shares_heads(query: View, shared: View) -> bool:
    """Whether keys or values have as many heads as the queries, or one for all, or one for each group of theirs."""
    (batch, heads), (other, kv_heads) = query.shape[:2], shared.shape[:2]
    if batch != other or kv_heads in (1, heads):
        return batch == other
    by_group = query.steps[-1:] == GROUPS and shared.steps[-1:] != GROUPS
    return by_group and View(query.node, query.steps[:-1]).shape[1] == kv_heads


def mask_steps(have: int, dims: int) -> Steps:
    """Steps from a mask of `have` dimensions to (batch, heads, queries, keys), where scores have `dims`, of which one
    of five does not tell the heads of a group apart."""
    more: dict[int, Steps] = {3: THREE, 5: FIRST}
    return (("unsqueeze", (0,)),) * (dims - have) + more.get(dims, ())


def stepped(tensor: Any, steps: Sequence[tuple[str, tuple[Any, ...]]]) -> Any:
    """What the calls of methods give, one after another."""
    for name, arguments in steps:
        tensor = getattr(tensor, name)(*arguments)
    return tensor


def viewed(node: fx.Node, steps: Sequence[tuple[str, tuple[Any, ...]]], like: fx.Node) -> fx.Node:
    """The calls of methods, one after another."""
    for name, arguments in steps:
        node = call(like.graph, like, getattr(Tensor, name), node, *arguments)
    return node


class Mask(NamedTuple):
    """What decides which pairs are kept.

    Attributes:
        node: the mask, which broadcasts to the scores (batch, heads, queries, keys), without heads where `dims` is 3;
            where it is 5 to (batch, heads of keys, group, queries, keys), without telling heads apart.
        use: "keep" of a bool mask that is True where a pair is kept, "drop" of the opposite, "add" of numbers that are
            added to scores: 0 keeps, -inf drops; without a softmax "multiply" of numbers: 1 keeps, 0 drops.
        reader: the call that masks the scores; what is written to the mask later does not count.
        fill: what dropped scores become, where "drop" or "keep" says which; without a softmax 0 counts as -inf.
        scale: what masked scores are multiplied by afterwards.
    """

    node: fx.Node
    use: str
    reader: fx.Node
    fill: float = -torch.inf
    scale: float = 1.0


@dataclass(frozen=True)
class AttentionSite:
    """An attention with a mask.

    Attributes:
        nodes: the calls, in order, the last of which gives the result.
        query, key, value: (batch, heads, length, depth); keys may have fewer heads.
        mask: see `Mask`.
        dims: of the scores as written, 3 to 5.
        scale: of the scores.
        back: steps from the result (batch, heads, queries, depth) to what was written.
        gives_nan: a query that keeps nothing gives NaN as written, else zeros.
        finite: its operands are known to be.
        softcap: c where scores are c · tanh(scale · q kᵀ / c); 0 for none.
        dropout: the chance that a weight is dropped.
    """

    nodes: tuple[fx.Node, ...]
    query: View
    key: View
    value: View
    mask: Mask
    dims: int
    scale: float
    back: tuple[tuple[str, tuple[Any, ...]], ...]
    gives_nan: bool
    softcap: float = 0.0
    dropout: float = 0.0
    finite: bool = False

    @property
    def result(self) -> fx.Node:
        """The node that is replaced."""
        return self.nodes[-1]

    @property
    def operands(self) -> tuple[View, View, View]:
        """Query, key and value."""
        return self.query, self.key, self.value
