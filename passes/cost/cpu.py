"""Seconds of a product with a sparse weight on a CPU, by what torch's own products take there.

Each is the host's time for the operator in a compiled graph and, over all threads, the elements that it touches. The
rates are nanoseconds of one thread, measured on 2 cores with AVX-512 (`bench/cpu.py`; torch 2.13): what counts is their
ratio, which is much the same from one CPU to another.
"""

from math import prod
from typing import NamedTuple

import torch

from sparsecomp.lowering.tuning import host


class Work(NamedTuple):
    """A product S (m, k) times dense (k, n).

    Attributes:
        format: the layout of S, as of `reference.patterns.Layout`, which a dense product has no use for.
        entry: height and width of a block, or nothing where entries are single elements.
        m, k, n: sizes.
        stored: numbers of S.
    """

    format: str
    entry: tuple[int, ...]
    m: int
    k: int
    n: int
    stored: int

    @property
    def gathered(self) -> float:
        """Numbers of the dense operand, or of the result, that are touched for each one stored."""
        return self.n * sum(1 / side for side in self.entry) if self.entry else self.n


class Rates(NamedTuple):
    """Of the product and of the gradient by S: seconds of a call on the host, and of each nanoseconds for each number
    stored and for each one gathered."""

    call: float
    product: tuple[float, float]
    sampling: tuple[float, float]


_RATES = {
    "csr": Rates(35e-6, (0.4, 0.03), (1.8, 0.09)),
    "bsr": Rates(80e-6, (1.4, 1.7), (3.0, 2.2)),
    "nm": Rates(80e-6, (1.5, 0.04), (6.0, 0.09)),
    "narrow": Rates(80e-6, (13.0, 0.03), (17.0, 0.09)),
    "bitmap": Rates(80e-6, (30.0, 0.03), (30.0, 0.09)),
}
"""By layout; the last two at 70 % zeros, CSR or the dense weight being made in each call. Another is taken for
the one of these whose entries are as its own: blocks, or single elements."""


def sparse_on_cpu(work: Work, trained: bool) -> float:
    """Seconds of the product, in training also of both gradients."""
    rates = _RATES.get(work.format) or _RATES["bsr" if work.entry else "csr"]
    product, sampling = (_touching(work, rates.call, *each) for each in (rates.product, rates.sampling))
    reordering = _seconds(0.0, work.stored + 0.7 * work.stored / prod(work.entry))  # and a look at each index
    return 2 * product + reordering + sampling if trained else product


def dense_on_cpu(work: Work, trained: bool, written: bool) -> float:
    """Seconds of the same with the weight written out, which `written` says is done already."""
    writing = 0.0 if written else _seconds(host.CPU_WRITING, 0.4 * work.m * work.k + 4.0 * work.stored)
    reading = _seconds(host.CPU_WRITING, 0.3 * work.m * work.k + 4.0 * work.stored) if trained else 0.0
    return layer_seconds(work, trained) + writing + reading


def layer_seconds(work: Work, trained: bool) -> float:
    """Seconds of a dense layer of these sizes, in training also of both gradients."""
    return (3 if trained else 1) * _seconds(host.CPU_MATMUL, work.m * work.k * (0.15 + 0.0125 * work.n))


def _touching(work: Work, call: float, stored: float, gathered: float) -> float:
    """Seconds at these nanoseconds each, with dense operand and result transposed; as long for S transposed."""
    each, transposing = stored + gathered * work.gathered, 1.1 * work.n * (work.m + work.k)
    return _seconds(call, work.stored * each + transposing)


def _seconds(call: float, nanoseconds: float) -> float:
    return call + nanoseconds * 1e-9 / torch.get_num_threads()
