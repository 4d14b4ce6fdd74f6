"""Whether a 2:4 layer of few rows is the fastest by packed positions, its host included."""

from sparsecomp.lowering.sparse.packed_linear import MOST, PACKED_LINEAR, order_for, takes_packed
from sparsecomp.lowering.tuning.ceilings import target_of
from sparsecomp.passes.cost.alone import packed_problem
from sparsecomp.passes.cost.decision import Decision, fastest
from sparsecomp.passes.cost.sparse import Product, fastest_candidate


def decide(product: Product, rivals: Decision) -> Decision | None:
    """The faster way by estimate, if that is by packed positions.

    Args:
        product: of a weight that stays as it is.
        rivals: what was decided without.
    """
    p = product
    if p.layout.format != "nm" or p.layout.block != (2, 4) or not p.linear or not rivals.seconds:
        return None
    if p.n > MOST or p.device.type != "cuda" or p.trained or not takes_packed(p.k, p.n, p.dtype, order_for(p.n)):
        return None
    device, card = p.target or target_of(p.device)
    problem = packed_problem(p)
    time, kernel = fastest_candidate(PACKED_LINEAR.candidates(problem, device), problem, p, card)
    if not kernel:
        return None
    found = fastest({**rivals.seconds, kernel: p.waited(time)})
    return found if found.implementation == kernel else None
