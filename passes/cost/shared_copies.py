"""Whether dense layers on one x are faster as one that has the rows of all, than one after another."""

from collections.abc import Sequence

from sparsecomp.lowering.tuning import host
from sparsecomp.passes.cost.decision import Decision, fastest
from sparsecomp.passes.cost.sparse import Product, dense_layer_time

TOGETHER = "one layer"


def decide(products: Sequence[Product]) -> Decision:
    """`TOGETHER`, or `dense`, which stands for a layer each, if that is not slower by estimate."""
    first = products[0]
    shape = sum(one.m for one in products), first.k
    together = first._replace(layout=first.layout._replace(shape=shape))
    apart, *others = map(dense_layer_time, products)
    # all layers' shares of a call, which takes as long besides
    besides = len(products) * host.besides(first.trained, first.products)
    times = {"dense": apart.plus(*others), TOGETHER: dense_layer_time(together)}
    seconds = {name: time.waited(first.replayed, besides) for name, time in times.items()}
    return fastest(seconds, rival=f"as {len(products)} layers")
