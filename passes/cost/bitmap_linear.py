"""Whether an unstructured layer of few rows is the fastest by a bitmap with its values, its host included."""

from collections.abc import Sequence
from math import inf

from sparsecomp.formats import BITMAP
from sparsecomp.lowering.cache.signature import Device
from sparsecomp.lowering.sparse.bitmap_linear import BITMAP_LINEAR, BitmapLinear, random_longest, takes_bitmap
from sparsecomp.lowering.sparse.bitmap_siblings import SIBLINGS
from sparsecomp.lowering.tuning import host
from sparsecomp.lowering.tuning.cards import Card
from sparsecomp.lowering.tuning.ceilings import target_of
from sparsecomp.lowering.tuning.host import Time
from sparsecomp.passes.cost.decision import MIN_GAIN, Decision, fastest
from sparsecomp.passes.cost.shared_copies import decide as decide_copies
from sparsecomp.passes.cost.sparse import Product, fastest_candidate

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


def bitmap_time(product: Product, grain: int, device: Device, card: Card) -> tuple[Time, str]:
    """Time and template of the kernel for a bitmap whose bits are so many neighbours; infinite if there is none."""
    p, problem = product, bitmap_problem(product, grain)
    return fastest_candidate(BITMAP_LINEAR.candidates(problem, device), problem, p, card)


def bitmap_problem(product: Product, grain: int) -> BitmapLinear:
    """The layer as the kernel for such a bitmap takes it."""
    p, longest = product, random_longest(product.m, product.k, product.stored, grain)
    return BitmapLinear.of_layer(
        p.m, p.k, p.n, p.stored, grain, longest, p.dtype, p.bias, p.residual, p.activation
    )  # fmt: skip


def decide_siblings(products: Sequence[Product], grain: int) -> Decision:
    """The kernel for two or three layers on one x, or `dense`, which stands for as many launches, if those are not
    slower by estimate."""
    one, count = products[0], len(products)
    device, card = one.target or target_of(one.device)
    problem = siblings_problem(products, grain)
    together, kernel = fastest_candidate(SIBLINGS[count].candidates(problem, device), problem, one, card)
    if not kernel:
        return Decision("dense", "; ".join(SIBLINGS[count].refusals(problem, device).values()))
    first, *others = (bitmap_time(product, grain, device, card)[0] for product in products)
    # all layers' shares of a call, which takes as long besides
    besides = count * host.besides(one.trained, one.products)
    times = {"dense": first.plus(*others), kernel: together}
    seconds = {name: time.waited(one.replayed, besides) for name, time in times.items()}
    return fastest(seconds, rival=f"as {count} launches")


def siblings_problem(products: Sequence[Product], grain: int) -> BitmapLinear:
    """Layers on one x as one launch."""
    each = [bitmap_problem(product, grain) for product in products]
    return each[0]._replace(
        m=sum(one.m for one in each), nnz=sum(one.nnz for one in each), longest=max(one.longest for one in each),
        parts=tuple(one.m for one in each),
    )  # fmt: skip
