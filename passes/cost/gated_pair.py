"""Whether a gated pair of sparse layers is faster as one launch than as two and the product of what they give."""

from typing import Any

from sparsecomp.lowering.sparse.bitmap_pair import BITMAP_PAIR
from sparsecomp.lowering.sparse.gated_pair import PAIRS
from sparsecomp.lowering.sparse.packed_linear import PACKED_LINEAR
from sparsecomp.lowering.tuning import host
from sparsecomp.lowering.tuning.cards import Card
from sparsecomp.lowering.tuning.ceilings import target_of
from sparsecomp.lowering.tuning.host import Time
from sparsecomp.lowering.tuning.template import Operation
from sparsecomp.passes.cost.alone import alone_time, bitmap_problem, packed_problem
from sparsecomp.passes.cost.decision import Decision, fastest
from sparsecomp.passes.cost.sparse import Product, fastest_candidate, problem_of


def decide(gate: Product, up: Product, grains: tuple[int, int] = (0, 0)) -> Decision:
    """The pair's kernel, or `dense`, which stands for both layers apart, if that is not slower by estimate.

    Args:
        gate, up: of one kind; one of 2:4 is multiplied by packed positions.
        grains: how many neighbours share a bit of the bitmap by which the layer runs apart, 0 where there is none.
    """
    device, card = gate.target or target_of(gate.device)
    ways = _ways(gate, up, grains)
    found = [fastest_candidate(one.candidates(problem, device), problem, gate, card) for one, problem in ways]
    together = {kernel: time for time, kernel in found if kernel}
    if not together:
        refusals = [reason for one, problem in ways for reason in one.refusals(problem, device).values()]
        return Decision("dense", "; ".join(refusals))
    alone = [alone_time(one, grain, device, card) for one, grain in zip((gate, up), grains, strict=True)]
    apart = alone[0].plus(alone[1], _multiplying(gate, card))
    # both layers' shares of a call: the pair's products are one fewer, and a call takes as long besides
    besides = 2 * host.besides(gate.trained, gate.products)
    seconds = {name: time.waited(gate.replayed, besides) for name, time in {"dense": apart, **together}.items()}
    return fastest(seconds, rival="as two launches and their product")


def _ways(gate: Product, up: Product, grains: tuple[int, int]) -> list[tuple[Operation[Any], Any]]:
    """Operations on both at once, with their problems."""
    if gate.layout.format == "nm":
        return [(PACKED_LINEAR, packed_problem(gate, pair=True))]
    mean = gate._replace(entries=(gate.entries + up.entries + 1) // 2)
    ways: list[tuple[Operation[Any], Any]] = []
    if gate.layout.format in PAIRS:
        ways.append((PAIRS[gate.layout.format], problem_of(mean)[1]))
    if grains[0] and grains[0] == grains[1]:
        ways.append((BITMAP_PAIR, bitmap_problem(mean, grains[0])))
    return ways


def _multiplying(product: Product, card: Card) -> Time:
    """To read what two layers gave and write their product, a kernel of Inductor's."""
    traffic = 3 * product.m * product.n * product.dtype.itemsize
    return Time(traffic / card.bandwidth + card.launch, host.LAUNCH)
