"""A promise of the caller's that weights are not written to, on which what was worked out of them is trusted."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from sparsecomp import _compat

_promise: ContextVar[object | None] = ContextVar("sparsecomp_frozen_weights", default=None)
_open: set[object] = set()
"""The promises that are being kept, in whatever thread."""


@contextmanager
def frozen_weights() -> Iterator[None]:
    """Promise that, in here, nothing writes to weights, masks and what else weights are computed of.

    Nothing tells of every write: fused and compiled optimizers, `.data`, collectives, and other processes count no
    version. So a weight that is a formula of others is computed in each call, and a 2:4 product looks on the device
    whether its copy still holds. In here both are trusted: what a call made is read by the next. A model that is
    compiled in here keeps its weights whenever it is called in such a promise; without one it computes them. A CUDA
    graph captured in here keeps the weights and the masks as they are. The promise is for this thread, and for backward
    passes, which have threads of their own; each one begins with nothing kept. The option `frozen` promises it for
    good.
    """
    if _promise.get() is not None:
        yield
        return
    promise = object()
    token = _promise.set(promise)
    _open.add(promise)
    try:
        yield
    finally:
        _open.discard(promise)
        _promise.reset(token)


def promise_here() -> object | None:
    """The promise that holds here, another one each time that it is given; None if there is none."""
    promise = _promise.get()
    if promise is None and _open and _compat.in_backward():
        given = tuple(_open)
        return given[0] if len(given) == 1 else None  # which of several it runs for, nothing tells
    return promise


def are_frozen() -> bool:
    """Whether the promise is given here."""
    return promise_here() is not None
