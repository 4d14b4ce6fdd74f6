"""Whether an unstructured layer of few rows is the fastest by a bitmap with its values, its host included."""

from collections.abc import Sequence
from math import inf

from sparsecomp.formats import BITMAP
from sparsecomp.lowering.sparse.bitmap_linear import takes_bitmap
from sparsecomp.lowering.sparse.bitmap_siblings import SIBLINGS
from sparsecomp.lowering.tuning.ceilings import target_of
from sparsecomp.passes.cost.alone import bitmap_time
from sparsecomp.passes.cost.decision import MIN_GAIN, Decision, fastest
from sparsecomp.passes.cost.shared_copies import decide as decide_copies
from sparsecomp.passes.cost.siblings import decide_siblings
from sparsecomp.passes.cost.sparse import Product

OFFERED = (1, 2)
"""How many neighbours in a row share a bit. Two are more bytes and fewer instructions, which are the time."""


def decide(
    product: Product, rivals: Decision, beside: Sequence[tuple[Product, Decision]] = ()
) -> tuple[Decision, int] | None:
    """The faster way by estimate, if that is by a bitmap, and how many neighbours share a bit of it.

    Args:
        product: of a weight that stays as it is, and of which a copy may be kept. One that is a bitmap itself is among
            the rivals by what it stores.
        rivals: what was decided without.
        beside: layers with which it could share a launch, and what was decided of each without. It has the share of
            that which it has of what all take without, so that all find it faster, or none; one dense copy of all is a
            rival.
    """
    p = product
    if p.layout.entry or not p.linear or not rivals.seconds or not p.constant:
        return None
    if p.device.type != "cuda" or not takes_bitmap(p.k, p.n, p.dtype):
        return None
    device, card = p.target or target_of(p.device)
    found: list[tuple[float, int, str]] = []
    for grain in OFFERED:
        time, kernel = bitmap_time(p, grain, device, card)
        if not kernel or (grain == 1 and p.layout.format == BITMAP.OPERAND):
            continue
        found.append((p.waited(time), grain, kernel))
        if beside:
            found.append((_share(p, rivals, beside, grain), grain, SIBLINGS[1 + len(beside)].name))
    if not found:
        return None
    seconds, grain, kernel = min(found)
    name = f"{kernel} by twos" if kernel in rivals.seconds else kernel
    decision = fastest({**rivals.seconds, name: seconds})
    return (decision, grain) if decision.implementation == name else None


def _share(product: Product, rivals: Decision, beside: Sequence[tuple[Product, Decision]], grain: int) -> float:
    together = decide_siblings([product, *(one for one, _ in beside)], grain)
    seconds = [seconds for name, seconds in together.seconds.items() if name != "dense"]
    decisions = [rivals, *(decision for _, decision in beside)]
    without = [min(one.seconds.values()) for one in decisions]
    best = sum(without)
    if product.n == 1 and not product.tuned and all(one.dense for one in decisions):
        best = min(best, *decide_copies([product, *(one for one, _ in beside)]).seconds.values())
    found = min(seconds, default=inf)
    return found * without[0] / sum(without) if MIN_GAIN * found <= best else inf
