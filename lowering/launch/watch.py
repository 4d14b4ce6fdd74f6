"""Who is told of allocations and launches in this thread: one call of an operator that is noted down (`replay`)."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from sparsecomp import _compat

if TYPE_CHECKING:
    from sparsecomp.lowering.launch.launch import Launch


class Watcher(Protocol):
    """Is told what an operator's implementation does past torch's dispatcher."""

    def allocated(self, tensor: Tensor) -> None:
        """An uninitialised tensor was made."""
        ...

    def launched(self, launch: "Launch", tensors: Sequence[Tensor | None]) -> None:
        """A kernel was launched on tensors, in its order."""
        ...

    def belonged(self, source: Tensor, kept: Sequence[Tensor]) -> None:
        """Tensors are read that are kept for the memory of an operand."""
        ...

    def gave_up(self) -> None:
        """Something was done that cannot be noted."""
        ...


class _Here(threading.local):
    watcher: Watcher | None = None


HERE = _Here()


@contextmanager
def watched_by(watcher: Watcher) -> Iterator[None]:
    """Within it, `watcher` is told."""
    before, HERE.watcher = HERE.watcher, watcher
    try:
        yield
    finally:
        HERE.watcher = before


def allocate(
    shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Tensor:  # fmt: skip
    """`torch.empty_strided` at little host time."""
    made = _compat.empty_of(device)(shape, stride, dtype)
    if HERE.watcher is not None:
        HERE.watcher.allocated(made)
    return made


def note_kept(source: Tensor, *kept: Tensor) -> None:
    """Called before tensors are read that belong to an operand's memory, whatever that holds: with other memory the
    implementation runs again."""
    if HERE.watcher is not None:
        HERE.watcher.belonged(source, kept)


def do_not_note() -> None:
    """Called before work on a GPU that is neither torch's nor a `Launch`, or that hangs on more than its operands."""
    if HERE.watcher is not None:
        HERE.watcher.gave_up()
