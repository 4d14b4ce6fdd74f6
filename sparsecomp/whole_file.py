"""Files that are written whole or not at all: no reader and no crash ever meets half of one."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A place beside ``path`` to write to, which is moved to ``path`` when the block ends and removed if it raises.

    Raises:
        OSError: the file cannot be synced or moved.
    """
    partial = path.with_name(f".{path.name}.{uuid4().hex}.partial")
    try:
        yield partial
        _sync(partial)
        os.replace(partial, path)
    finally:
        with suppress(OSError):
            partial.unlink()


def _sync(path: Path) -> None:
    """Have the file on the disk before its name is."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
