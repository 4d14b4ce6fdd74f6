"""A promise of the caller's that weights are written to in plain sight only, so that copies of them are trusted."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_frozen: ContextVar[bool] = ContextVar("sparsecomp_frozen_weights", default=False)


@contextmanager
def frozen_weights() -> Iterator[None]:
    """Promise that sparse weights are written to by eager operators only, if at all: not through ``.data``, in a
    compiled graph or in the replay of a CUDA graph.

    A 2:4 product multiplies a copy of its weight. Ordinarily it looks on the device whether that copy still holds, in
    the time that reading the weight takes; in here (in this thread) it does not. A CUDA graph captured in here keeps
    the weights as they are.
    """
    token = _frozen.set(True)
    try:
        yield
    finally:
        _frozen.reset(token)


def are_frozen() -> bool:
    """Whether the promise is given here."""
    return _frozen.get()
