"""An order of a graph in which each of several groups of nodes stands together, where dataflow allows one.

A loop that Dynamo unrolled runs a layer, then a neuron, then the next layer, and all again at the next step. If no call
of a layer reaches another call of it, all of them can run one behind the other, and then as one.
"""

import heapq
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import pairwise

import networkx
from torch import fx


def contractible(
    graph: fx.Graph, groups: Sequence[Collection[fx.Node]], chains: Sequence[Sequence[fx.Node]],
    fences: Collection[fx.Node] = (),
) -> list[int]:  # fmt: skip
    """Indices of the groups that can all stand together at once.

    Args:
        graph: what they are of.
        groups: disjoint; within each of them a node may read another only if nothing outside lies between.
        chains: nodes of which each list has to stay in its order.
        fences: nodes that no other passes.
    """
    kept = set(range(len(groups)))
    while True:
        member = {node: index for index in kept for node in groups[index]}
        flow = _flow(graph, member, chains, fences)
        circles = [one for one in networkx.strongly_connected_components(flow) if len(one) > 1]
        if not circles:
            return sorted(kept)
        kept -= {group for circle in circles for group in circle if isinstance(group, int)}


def contracted(
    graph: fx.Graph, groups: Sequence[Collection[fx.Node]], chains: Sequence[Sequence[fx.Node]],
    fences: Collection[fx.Node] = (),
) -> tuple[fx.Node, ...]:  # fmt: skip
    """All nodes, each group together, otherwise as near to the order they were in as that allows."""
    position = {node: index for index, node in enumerate(graph.nodes)}
    member = {node: index for index, group in enumerate(groups) for node in group}
    flow = _flow(graph, member, chains, fences)
    together = {one: sorted(groups[one], key=position.__getitem__) if isinstance(one, int) else [one] for one in flow}
    waiting = {one: flow.in_degree(one) for one in flow}
    ready = [(position[together[one][0]], one) for one, count in waiting.items() if not count]
    heapq.heapify(ready)
    order: list[fx.Node] = []
    while ready:
        _, one = heapq.heappop(ready)
        order += together[one]
        for reader in flow.successors(one):
            waiting[reader] -= 1
            if not waiting[reader]:
                heapq.heappush(ready, (position[together[reader][0]], reader))
    return tuple(order)


def reorder(order: Iterable[fx.Node]) -> None:
    """Put nodes, of which each stands somewhere behind the first, one behind the other."""
    for before, node in pairwise(order):
        if before.next is not node:
            before.append(node)


def _flow(
    graph: fx.Graph, member: dict[fx.Node, int], chains: Sequence[Sequence[fx.Node]], fences: Collection[fx.Node]
) -> networkx.DiGraph:  # fmt: skip
    """Who reads whom, each group being one."""
    flow = networkx.DiGraph()
    flow.add_nodes_from(member.get(node, node) for node in graph.nodes)
    edges = [(one, node) for node in graph.nodes for one in node.all_input_nodes]
    # inputs come first, and the output last
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    edges += [edge for chain in chains or [[]] for edge in pairwise([*inputs, *chain])]
    edges += _fenced(graph, fences)
    last = next(iter(reversed(graph.nodes)))
    edges += [(node, last) for node in graph.nodes if node is not last]
    pairs = ((member.get(one, one), member.get(node, node)) for one, node in edges)
    flow.add_edges_from((one, node) for one, node in pairs if one != node)
    return flow


def _fenced(graph: fx.Graph, fences: Collection[fx.Node]) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Each node between two fences, behind the one and before the other."""
    fence, between = None, []
    for node in graph.nodes:
        if fence is not None:
            yield fence, node
        if node in fences:
            yield from ((one, node) for one in between)
            fence, between = node, []
        else:
            between.append(node)
