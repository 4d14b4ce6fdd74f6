"""What things take the host, in seconds, and what a caller waits for the host and the device together.

Figures of machines with an H100 (`bench/results`). Kernels are the device's business; a CPU's own products are in
`sparsecomp.passes.cost.cpu`.
"""

from typing import NamedTuple

LAUNCH = 8e-6
"""A launch of a kernel, of ours or Inductor's."""
ALLOCATION = 1.5e-6
"""A workspace."""
OPERATOR = 5e-6
"""An operator of ours in a compiled graph of static shapes, beside its launches: it is done again by address
(`lowering/launch/replay.py`), which takes half to a third of a call."""
CUSPARSELT = 45e-6
"""The library's call with its plan, the two launches of its guard included."""
MATMUL, CONV = 16e-6, 24e-6
"""A matrix product and a convolution of torch's in a compiled graph."""
MATMUL_RELU = 5e-6
"""What such a product takes more with a ReLU in it, which Inductor has no call for."""
SPIKE_LAYER = {"binary": 28e-6, "direct": 24e-6, "event": 64e-6, "skip": 56e-6}
"""An operator on spikes by implementation, from Python to its last launch, done again by address (one H200); direct,
which has a launch less than binary, was not measured and counts as torch's own."""
CALL = {False: 45e-6, True: 400e-6}
"""A compiled call but for its products, without and with gradients and an optimizer's step
(`bench/results/loop.json`)."""

AUTOGRAD = 24e-6
"""What each product of torch's and each operator of ours takes the host more in a training step. Of host-bound steps of
one layer (the same file) those with two operators more than stock took 93 us more on an H200's host and 185 on an
H100's, those with operators of ours in place of torch's products 83 us less and 18 more."""

CPU_MATMUL, CPU_WRITING = 3e-6, 25e-6
"""On a CPU (`bench/results/cpu.json`): torch's product in a compiled graph, and our operator that writes a weight
out."""


def besides(trained: bool, products: int) -> float:
    """The share of one of a graph's products in what a call takes the host whichever way the product runs."""
    return CALL[trained] / products


class Time(NamedTuple):
    """Seconds of the device and of the host, which work at the same time."""

    device: float
    host: float

    def plus(self, *others: "Time") -> "Time":
        """The time of all, one after another."""
        every = (self, *others)
        return Time(sum(one.device for one in every), sum(one.host for one in every))

    def waited(self, replayed: bool, besides: float = 0.0) -> float:
        """What a caller waits: the device alone where a CUDA graph is replayed, else the mean of a call that the host
        is the first to be done with, and one it is not.

        Args:
            besides: seconds of the host that come on top. As long as they last, the device waits: a way that gives the
                device less to do and the host more gains nothing.
        """
        if replayed:
            return self.device
        return (max(self) + max(self.device, self.host + besides)) / 2
