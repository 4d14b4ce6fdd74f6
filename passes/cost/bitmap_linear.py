"""Whether an unstructured layer of few rows is the fastest by a bitmap with its values, its host included."""

from sparsecomp.lowering.sparse.bitmap_linear import BITMAP_LINEAR, BitmapLinear, random_longest, takes_bitmap
from sparsecomp.lowering.tuning.ceilings import target_of
from sparsecomp.passes.cost.decision import Decision, fastest
from sparsecomp.passes.cost.sparse import Product, fastest_candidate

GRAIN = 1
"""Neighbours in a row that share a bit. Two are more bytes and fewer instructions, and not measured yet."""


def decide(product: Product, rivals: Decision, longest: int | None = None) -> Decision | None:
    """The faster way by estimate, if that is by a bitmap.

    Args:
        product: of a weight that stays as it is, and of which a copy may be kept.
        rivals: what was decided without.
        longest: bytes of its longest chunk; by default what they are if its values lie at random.
    """
    p = product
    if p.layout.entry or not p.linear or not rivals.seconds or not p.constant:
        return None
    if p.device.type != "cuda" or not takes_bitmap(p.k, p.n, p.dtype):
        return None
    device, card = p.target or target_of(p.device)
    longest = random_longest(p.m, p.k, p.stored, GRAIN) if longest is None else longest
    problem = BitmapLinear.of_layer(
        p.m, p.k, p.n, p.stored, GRAIN, longest, p.dtype, p.bias, p.residual, p.activation
    )  # fmt: skip
    time, kernel = fastest_candidate(BITMAP_LINEAR.candidates(problem, device), problem, p, card)
    if not kernel:
        return None
    found = fastest({**rivals.seconds, kernel: p.waited(time)})
    return found if found.implementation == kernel else None
