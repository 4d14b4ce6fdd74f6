"""Which nodes may share storage, and when it was last written to.

A union-find over nodes (and over items of tuple-valued nodes). Precise enough for in-place layers and `out[t] = s`,
and conservative everywhere else: one group may hold nodes that do not alias, never the other way round.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from torch import fx


@dataclass
class _Group:
    """One set of nodes that may share storage."""

    size: int = 1
    last_write: int = -1
    external: bool = False
    reinterpreted: bool = False
    live: set[fx.Node] = field(default_factory=set)
    dependants: set[fx.Node] = field(default_factory=set)


class AliasGroups:
    """Storage groups of the nodes visited so far."""

    def __init__(self) -> None:
        self._parent: dict[Hashable, Hashable] = {}
        self._groups: dict[Hashable, _Group] = {}
        self._tuples: set[fx.Node] = set()
        self._external_live: set[fx.Node] = set()
        self._external_write = -1
        self.positions: set[int] = set()
        """Of all writes."""

    def add(self, key: Hashable) -> None:
        """A new value in storage of its own."""
        if key not in self._parent:
            self._parent[key] = key
            self._groups[key] = _Group()

    def mark_external(self, node: fx.Node) -> None:
        """An input or attribute: two of them may overlap without the graph showing it."""
        self._group(node).external = True

    def external(self, node: fx.Node) -> bool:
        """Whether `node` may share storage with an input or attribute."""
        return self._group(node).external

    def mark_tuple(self, node: fx.Node) -> None:
        """A tuple of fresh tensors that do not share storage with one another."""
        self._tuples.add(node)

    def item_key(self, node: fx.Node, index: Any) -> Hashable:
        """The storage of `node[index]`."""
        if node not in self._tuples or not isinstance(index, int):
            return node
        key = (node, index)
        self.add(key)
        return key

    def union(self, a: Hashable, b: Hashable, *, reinterpreted: bool = False) -> None:
        """`a` and `b` may share storage; `reinterpreted`: and may read its bits as another type."""
        root_a, root_b = self._find(a), self._find(b)
        if root_a == root_b:
            self._groups[root_a].reinterpreted |= reinterpreted
            return
        if self._groups[root_a].size < self._groups[root_b].size:
            root_a, root_b = root_b, root_a
        kept, merged = self._groups[root_a], self._groups.pop(root_b)
        self._parent[root_b] = root_a
        kept.size += merged.size
        kept.last_write = max(kept.last_write, merged.last_write)
        kept.reinterpreted |= merged.reinterpreted or reinterpreted
        if kept.external != merged.external:
            self._external_live |= kept.live | merged.live
        kept.external |= merged.external
        kept.live |= merged.live
        kept.dependants |= merged.dependants

    def same(self, a: Hashable, b: Hashable) -> bool:
        """Whether `a` and `b` may share storage."""
        return self._find(a) == self._find(b)

    def root(self, node: fx.Node) -> Hashable:
        """What names the storage group of `node` until the next union."""
        return self._find(node)

    def size(self, node: fx.Node) -> int:
        """The number of nodes that may share storage with `node`, itself included."""
        return self._group(node).size

    def set_live(self, node: fx.Node) -> None:
        """`node` has a fact that a write would weaken."""
        group = self._group(node)
        group.live.add(node)
        if group.external:
            self._external_live.add(node)

    def set_dead(self, node: fx.Node) -> None:
        """`node` has no fact any more."""
        self._group(node).live.discard(node)
        self._external_live.discard(node)

    def live_aliases(self, node: fx.Node) -> list[fx.Node]:
        """The nodes with facts that a write to `node` may reach."""
        group = self._group(node)
        reached = group.live | self._external_live if group.external else group.live
        return list(reached)

    def depends(self, factor: fx.Node, node: fx.Node) -> None:
        """The fact of `node` names `factor` as its scale."""
        self._group(factor).dependants.add(node)

    def dependants(self, node: fx.Node) -> list[fx.Node]:
        """Nodes whose scale a write to `node` changes."""
        group = self._group(node)
        found = list(group.dependants)
        group.dependants.clear()
        return found

    def reinterpreted(self, node: fx.Node) -> bool:
        """Whether the bits of `node` may be read or written as another type."""
        return self._group(node).reinterpreted

    def wrote(self, node: fx.Node, position: int) -> None:
        """The storage of `node` is written to at `position`."""
        group = self._group(node)
        group.last_write = position
        self.positions.add(position)
        if group.external:
            self._external_write = position

    def last_write(self, node: fx.Node) -> int:
        """The position of the last write that shows as one to the storage of `node`, -1 if there was none."""
        return self._group(node).last_write

    def last_possible_write(self, node: fx.Node) -> int:
        """As `last_write`, but any input may overlap any other."""
        group = self._group(node)
        return max(group.last_write, self._external_write) if group.external else group.last_write

    def _group(self, key: Hashable) -> _Group:
        return self._groups[self._find(key)]

    def _find(self, key: Hashable) -> Hashable:
        root = key
        while self._parent[root] != root:
            root = self._parent[root]
        while self._parent[key] != root:
            self._parent[key], key = root, self._parent[key]
        return root
