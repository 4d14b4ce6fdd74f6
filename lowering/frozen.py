"""A promise of the caller's that weights are written to in plain sight only, so that copies of them are trusted."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from sparsecomp import _compat

_frozen: ContextVar[bool] = ContextVar("sparsecomp_frozen_weights", default=False)
_open: set[object] = set()
"""One object for each promise that is being kept, in whatever thread."""


@contextmanager
def frozen_weights() -> Iterator[None]:
    """Promise that sparse weights are written to by eager operators only, if at all: not through ``.data``, in a
    compiled graph or in the replay of a CUDA graph.

    A 2:4 product multiplies a copy of its weight. Ordinarily it looks on the device whether that copy still holds, in
    the time that reading the weight takes; in here it does not. A CUDA graph captured in here keeps the weights and the
    masks as they are. The promise is for this thread, and for backward passes, which have threads of their own.
    """
    promise, token = object(), _frozen.set(True)
    _open.add(promise)
    try:
        yield
    finally:
        _open.discard(promise)
        _frozen.reset(token)


def are_frozen() -> bool:
    """Whether the promise is given here."""
    return _frozen.get() or (bool(_open) and _compat.in_backward())
