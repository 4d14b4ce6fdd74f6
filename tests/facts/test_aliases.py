"""Storage groups against a plain list of edges: what may share storage is what a path of unions connects."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from sparsecomp.passes.facts.registry import Items
from sparsecomp.passes.graph.aliases import AliasGroups

SIZE = 7
NODES = [fx.Graph().placeholder(f"x{index}") for index in range(SIZE)]


class Edges:
    """The same knowledge, kept as lists and searched anew for each question."""

    def __init__(self) -> None:
        self.unions: list[tuple[int, int, bool]] = []
        self.external: set[int] = set()
        self.writes: list[tuple[int, int]] = []
        self.live: set[int] = set()
        self.factors: list[tuple[int, int]] = []

    def reached(self, start: int) -> set[int]:
        found = {start}
        for _ in range(SIZE):
            found |= {y for a, b, _ in self.unions for x, y in ((a, b), (b, a)) if x in found}
        return found

    def is_external(self, start: int) -> bool:
        return bool(self.reached(start) & self.external)

    def last_write(self, nodes: set[int]) -> int:
        return max((position for node, position in self.writes if node in nodes), default=-1)


STEPS = st.lists(
    st.tuples(st.sampled_from(["union", "bits", "write", "live", "dead", "depends"]),
              st.integers(0, SIZE - 1), st.integers(0, SIZE - 1)),
    max_size=25,
)  # fmt: skip


@given(st.sets(st.integers(0, SIZE - 1)), STEPS)
def test_groups_are_what_unions_connect(external: set[int], steps: list[tuple[str, int, int]]) -> None:
    groups, edges = AliasGroups(), Edges()
    edges.external = external
    for node in NODES:
        groups.add(node)
    for node in external:
        groups.mark_external(NODES[node])
    for position, (name, a, b) in enumerate(steps):
        if name in ("union", "bits"):
            groups.union(NODES[a], NODES[b], reinterpreted=name == "bits")
            edges.unions.append((a, b, name == "bits"))
        elif name == "write":
            groups.wrote(NODES[a], position)
            edges.writes.append((a, position))
        elif name in ("live", "dead"):
            (groups.set_live if name == "live" else groups.set_dead)(NODES[a])
            (edges.live.add if name == "live" else edges.live.discard)(a)
        elif name == "depends":
            groups.depends(NODES[a], NODES[b])
            edges.factors.append((a, b))
    _agree(groups, edges)


def _agree(groups: AliasGroups, edges: Edges) -> None:
    outside = {node for node in range(SIZE) if edges.is_external(node)}
    for start, node in enumerate(NODES):
        mine = edges.reached(start)
        assert {other for other in range(SIZE) if groups.same(node, NODES[other])} == mine
        assert {other for other in range(SIZE) if groups.root(NODES[other]) == groups.root(node)} == mine
        assert groups.size(node) == len(mine)
        assert groups.reinterpreted(node) == any(bits for a, _, bits in edges.unions if a in mine)
        assert groups.last_write(node) == edges.last_write(mine)
        may_be_reached = mine | outside if start in outside else mine
        assert set(groups.live_aliases(node)) == {NODES[other] for other in edges.live & may_be_reached}
        # an input that was written to before it met another group's storage counts as written for all inputs
        assert groups.last_possible_write(node) >= groups.last_write(node)
    for start, node in enumerate(NODES):
        mine = edges.reached(start)
        assert set(groups.dependants(node)) == {NODES[b] for a, b in edges.factors if a in mine}
        edges.factors = [(a, b) for a, b in edges.factors if a not in mine]


def test_inputs_may_overlap_without_the_graph_showing_it() -> None:
    groups = AliasGroups()
    for node in NODES:
        groups.add(node)
    first, second, own, view = NODES[:4]
    groups.mark_external(first)
    groups.mark_external(second)
    groups.union(view, second)
    groups.wrote(first, 3)
    assert [groups.last_write(node) for node in (first, second, own, view)] == [3, -1, -1, -1]
    assert [groups.last_possible_write(node) for node in (first, second, own, view)] == [3, 3, -1, 3]
    groups.wrote(own, 5)
    assert [groups.last_possible_write(node) for node in (first, second, own, view)] == [3, 3, 5, 3]


def test_adding_again_changes_nothing() -> None:
    groups = AliasGroups()
    groups.add(NODES[0])
    groups.wrote(NODES[0], 2)
    groups.add(NODES[0])
    assert groups.last_write(NODES[0]) == 2 and groups.size(NODES[0]) == 1


def test_items_of_a_tuple_are_apart_only_where_that_is_known() -> None:
    groups = AliasGroups()
    for node in NODES:
        groups.add(node)
    fresh, unknown, first, again, second = NODES[:5]
    groups.mark_tuple(fresh)
    for node, index in ((first, 0), (again, 0), (second, 1)):
        groups.union(node, groups.item_key(fresh, index))
    assert groups.same(first, again) and not groups.same(first, second)
    assert groups.item_key(unknown, 0) is unknown and groups.item_key(fresh, slice(1)) is fresh


@pytest.mark.parametrize(
    "items,index,expected",
    [
        (Items(("a", "b"), "r"), 0, "a"),  # type: ignore[arg-type]
        (Items(("a", "b"), "r"), 1, "b"),  # type: ignore[arg-type]
        (Items(("a", "b"), "r"), 2, "r"),  # type: ignore[arg-type]
        (Items(("a", "b"), "r"), -1, None),  # type: ignore[arg-type]
        (Items((), "r"), -1, "r"),  # type: ignore[arg-type]
        (Items((), "r"), 5, "r"),  # type: ignore[arg-type]
    ],
)
def test_the_last_item_is_known_only_where_all_are_alike(items: Items, index: int, expected: Any) -> None:
    """How many items there are is not known, so an index from the end names one of them."""
    assert items.at(index) == expected


def test_what_meets_an_input_may_be_reached_through_every_input() -> None:
    groups = AliasGroups()
    for node in NODES:
        groups.add(node)
    first, second, own, other, another = NODES[:5]
    groups.mark_external(first)
    groups.mark_external(second)
    for node in (own, other, another):
        groups.set_live(node)
    groups.union(other, another)
    assert groups.live_aliases(second) == [] and set(groups.live_aliases(other)) == {other, another}
    groups.union(own, first)
    assert groups.live_aliases(second) == [own] and groups.external(own) and not groups.external(other)
    groups.union(another, second)
    assert set(groups.live_aliases(first)) == {own, other, another}
    groups.set_dead(own)
    assert set(groups.live_aliases(first)) == {other, another}
