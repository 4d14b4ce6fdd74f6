"""What a sparse layer of few rows takes by itself: by a bitmap, by packed positions, or by what is stored."""

from typing import Any

from sparsecomp.lowering.cache.signature import Device
from sparsecomp.lowering.sparse.bitmap_linear import BITMAP_LINEAR, BitmapLinear, random_longest
from sparsecomp.lowering.sparse.packed_linear import PACKED_LINEAR, PackedLinear
from sparsecomp.lowering.tuning.cards import Card
from sparsecomp.lowering.tuning.host import Time
from sparsecomp.passes.cost.sparse import Product, fastest_candidate, problem_of, product_time


def alone_time(product: Product, grain: int, device: Device, card: Card) -> Time:
    """Time of the layer's best kernel.

    Args:
        grain: how many neighbours share a bit of the bitmap by which it runs, 0 where there is none.
    """
    if grain:
        return bitmap_time(product, grain, device, card)[0]
    if product.layout.format != "nm":
        return product_time(product, device, card)[0]
    problem = packed_problem(product)
    return fastest_candidate(PACKED_LINEAR.candidates(problem, device), problem, product, card)[0]


def problem_alone(product: Product, grain: int) -> Any:
    """The layer as that kernel takes it."""
    if grain:
        return bitmap_problem(product, grain)
    return packed_problem(product) if product.layout.format == "nm" else problem_of(product)[1]


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


def packed_problem(product: Product, pair: bool = False) -> PackedLinear:
    """The layer, or a pair of such layers, as the kernels by packed positions see it."""
    p = product
    return PackedLinear.of_layer(p.m, p.k, p.n, p.dtype, p.bias, p.residual, p.activation, pair)
