"""Whether layers of few rows on one x are faster as one launch than as one each."""

from collections.abc import Sequence
from typing import Any

from sparsecomp.lowering.sparse import bitmap_siblings, narrow_siblings, packed_siblings
from sparsecomp.lowering.sparse.siblings import siblings_problem
from sparsecomp.lowering.tuning import host
from sparsecomp.lowering.tuning.ceilings import target_of
from sparsecomp.lowering.tuning.template import Operation
from sparsecomp.passes.cost.alone import alone_time, problem_alone
from sparsecomp.passes.cost.decision import Decision, fastest
from sparsecomp.passes.cost.sparse import Product, fastest_candidate


def decide_siblings(products: Sequence[Product], grain: int) -> Decision:
    """The kernel for two or three layers on one x, or `dense`, which stands for as many launches, if those are not
    slower by estimate.

    Args:
        grain: as of `alone_time`; of all.
    """
    one, count = products[0], len(products)
    device, card = one.target or target_of(one.device)
    operation, problem = _operation(one, grain, count), siblings_problem([problem_alone(p, grain) for p in products])
    together, kernel = fastest_candidate(operation.candidates(problem, device), problem, one, card)
    if not kernel:
        return Decision("dense", "; ".join(operation.refusals(problem, device).values()))
    first, *others = (alone_time(product, grain, device, card) for product in products)
    # all layers' shares of a call, which takes as long besides
    besides = count * host.besides(one.trained, one.products)
    times = {"dense": first.plus(*others), kernel: together}
    seconds = {name: time.waited(one.replayed, besides) for name, time in times.items()}
    return fastest(seconds, rival=f"as {count} launches")


def _operation(product: Product, grain: int, count: int) -> Operation[Any]:
    if grain:
        return bitmap_siblings.SIBLINGS[count]
    return (packed_siblings if product.layout.format == "nm" else narrow_siblings).SIBLINGS[count]
