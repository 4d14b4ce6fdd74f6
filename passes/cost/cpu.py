"""Seconds of a product with a sparse weight on a CPU, by what torch's own products take there.

Each is the host's time for the operator in a compiled graph and, over all threads, the elements that it touches. The
rates are nanoseconds of one thread, measured on 2 cores with AVX-512 (`bench/cpu.py`; torch 2.13): what counts is their
ratio, which is much the same from one CPU to another.
"""

from typing import NamedTuple

import torch

from sparsecomp.lowering.tuning import host


class Work(NamedTuple):
    """A product S (m, k) times dense (k, n).

    Attributes:
        format: "csr", "bsr" or "nm", which a dense product has no use for.
        block: height and width of "bsr".
        m, k, n: sizes.
        stored: numbers of S.
    """

    format: str
    block: tuple[int, int]
    m: int
    k: int
    n: int
    stored: int


def sparse_seconds(work: Work, trained: bool) -> float:
    """Seconds of the product, in training also of both gradients."""
    forward = _sparse_product(work)
    if not trained:
        return forward
    flipped = work._replace(m=work.k, k=work.m, block=work.block[::-1])
    return forward + _sparse_product(flipped) + _seconds(0.0, 1.0 * work.stored) + _sampling(work)


def dense_seconds(work: Work, trained: bool, written: bool) -> float:
    """Seconds of the same with the weight written out, which `written` says is done already."""
    writing = 0.0 if written else _seconds(host.CPU_WRITING, 0.4 * work.m * work.k + 4.0 * work.stored)
    reading = _seconds(host.CPU_WRITING, 0.3 * work.m * work.k + 4.0 * work.stored) if trained else 0.0
    return layer_seconds(work, trained) + writing + reading


def layer_seconds(work: Work, trained: bool) -> float:
    """Seconds of a dense layer of these sizes, in training also of both gradients."""
    return (3 if trained else 1) * _seconds(host.CPU_MATMUL, work.m * work.k * (0.15 + 0.0125 * work.n))


def _sparse_product(work: Work) -> float:
    each = {"csr": 0.4 + 0.03 * work.n, "nm": 1.5 + 0.04 * work.n, "bsr": 1.4 + 1.7 * _gathered(work)}[work.format]
    return _seconds(host.CPU_SPARSE[work.format], work.stored * each + _transposing(work))


def _sampling(work: Work) -> float:
    each = {"csr": 1.8 + 0.09 * work.n, "nm": 6.0 + 0.09 * work.n, "bsr": 3.0 + 2.2 * _gathered(work)}[work.format]
    return _seconds(host.CPU_SPARSE[work.format], work.stored * each + _transposing(work))


def _gathered(work: Work) -> float:
    """Numbers that a product of blocks brings together for each one stored."""
    return work.n * (1 / work.block[0] + 1 / work.block[1])


def _transposing(work: Work) -> float:
    return 1.1 * work.n * (work.m + work.k)


def _seconds(call: float, nanoseconds: float) -> float:
    return call + nanoseconds * 1e-9 / torch.get_num_threads()
