"""Files that are written whole or not at all, and are regular ones: a pipe or a device would be waited for without end.

What a writer that was killed leaves is removed by the next one in the same folder. A lock tells the dead from the
living: the kernel drops it with the process, on this machine or another.
"""

import errno
import fcntl
import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

_PARTIAL = re.compile(r"\..*\.[0-9a-f]{32}\.partial", re.DOTALL)
_KINDS = {
    stat.S_IFDIR: "a directory", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}  # fmt: skip


def check_regular(path: str | os.PathLike[str]) -> int:
    """The size of a regular file, or of one that a link leads to.

    Raises:
        OSError: it is something else, or not there.
    """
    found = os.stat(path)
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "something else")
        number = errno.EISDIR if stat.S_ISDIR(found.st_mode) else errno.EINVAL
        raise OSError(number, f"it is {kind}: give the path of a regular file", os.fspath(path))
    return found.st_size


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A place near `path` to write to, which is moved to `path` when the block ends and removed if it raises.

    A link stays one, and leads to the new file.

    Raises:
        OSError: there is something else than a file, or the file cannot be made, synced or moved.
    """
    path = path.resolve()
    with suppress(FileNotFoundError):
        check_regular(path)
    _remove_leftovers(path.parent)
    folder, descriptor = _locked_folder(path)
    try:
        partial = folder / path.name
        yield partial
        _sync(partial)
        os.replace(partial, path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def _locked_folder(path: Path) -> tuple[Path, int]:
    """A folder of our own beside `path`, which also takes what a library makes while it writes."""
    while True:
        folder = path.with_name(f".{path.name}.{uuid4().hex}.partial")
        folder.mkdir(0o700)
        with suppress(FileNotFoundError):
            descriptor = os.open(folder, os.O_RDONLY)
            with suppress(OSError):  # where there are no locks, nobody can take it for a leftover
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if folder.exists():
                return folder, descriptor
            os.close(descriptor)  # somebody took it for one before it was locked


def _remove_leftovers(folder: Path) -> None:
    """Remove what dead writers left; what cannot be looked at stays."""
    with suppress(OSError), os.scandir(folder) as found:
        for path in (entry.path for entry in found if _PARTIAL.fullmatch(entry.name)):
            with suppress(OSError):
                _remove_unlocked(path)


def _remove_unlocked(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            shutil.rmtree(path)
        else:
            os.unlink(path)
    finally:
        os.close(descriptor)


def _sync(path: Path) -> None:
    """Have the file on the disk before its name is."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
