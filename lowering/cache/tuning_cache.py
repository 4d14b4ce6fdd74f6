"""The tuning cache: what was measured for each kernel signature, kept among processes and carried between machines.

A hit is one dictionary lookup and writes nothing; a miss asks the database, once until another process writes. What is
remembered is in :mod:`sparsecomp.lowering.cache.entry`, how it is kept in :mod:`sparsecomp.lowering.cache.database`.
"""

import atexit
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from weakref import WeakSet

from filelock import FileLock, Timeout

from sparsecomp.environment import Settings
from sparsecomp.errors import CacheError
from sparsecomp.files.whole_file import check_regular, written_whole
from sparsecomp.lowering.cache.database import FILE, CacheWarning, Store, Totals, is_database, read_database
from sparsecomp.lowering.cache.entry import (
    MAX_BYTES,
    Document,
    Entry,
    Fact,
    dump,
    entry_of,
    fact,
    json_values,
    parse,
    sentence,
)
from sparsecomp.lowering.cache.signature import Device, KernelSignature

__all__ = [
    "CacheWarning", "Entry", "Fact", "Miss", "Stats", "TuningCache", "default_cache", "observers", "read_results",
]  # fmt: skip

_LONGEST_TURN = 120.0
"""Seconds; a full effort has 30 for a signature, and then compiles what it began."""

observers: list[Callable[[Entry], None]] = []
"""Told of each entry that the process's own cache reads or writes."""


@dataclass(frozen=True)
class Stats:
    """How a cache is used.

    Attributes:
        hits, misses: of this process's lookups.
        entries, bytes: what is stored, by any process.
        path: the database, None in memory.
        writable: whether new results outlive the process.
    """

    hits: int
    misses: int
    entries: int
    bytes: int
    path: Path | None
    writable: bool


@dataclass(frozen=True)
class Miss:
    """Why a signature has no entry.

    Attributes:
        nearest: the entry with the most equal fields, of the same operation if there is one; None in an empty cache.
        differing: the fields that differ, as (field, wanted, nearest); empty text for one that is absent.
    """

    nearest: Entry | None
    differing: tuple[tuple[str, str, str], ...]

    def __str__(self) -> str:
        if self.nearest is None:
            return "the cache is empty"
        parts = (f"{name} (wanted {wanted or 'none'}, has {found or 'none'})" for name, wanted, found in self.differing)
        return f"the nearest entry differs in {', '.join(parts)}"


class TuningCache:
    """Tuning results by kernel signature.

    Args:
        path: the database, made when needed; None keeps everything in memory.
        max_entries, max_bytes: bounds on the stored entries; the least recently used go first.
        on_use: told of each entry when this process first reads it, and whenever it writes one.

    May be shared by threads, and the path by processes on one machine. A damaged or unwritable file is a
    :class:`CacheWarning`, never an error.
    """

    def __init__(
        self,
        path: Path | None,
        max_entries: int = 100_000,
        max_bytes: int = 256 << 20,
        on_use: Callable[[Entry], None] | None = None,
    ) -> None:
        self.path = path
        self._store = Store(path, Totals(max_entries, max_bytes))
        self._max_entries = max_entries
        self._on_use = on_use
        self._known: dict[str, Entry] = {}
        self._absent: set[str] = set()
        self._changes: tuple[int, int] | None = None
        self._used: set[str] = set()
        # one object, as a process may enter again
        self._turn = None if path is None else FileLock(f"{path}.tuning")
        self._counting = threading.Lock()
        self._hits = self._misses = 0
        _caches.add(self)

    def get(self, signature: KernelSignature) -> Entry | None:
        """What is known for ``signature``; None if nothing is. A repeated lookup costs microseconds.

        Raises:
            SignatureError: a size is still symbolic.
        """
        key = _canonical(signature).key
        entry = self._known.get(key)
        if entry is None:
            entry = self._look_up(key)
        with self._counting:
            if entry is None:
                self._misses += 1
            else:
                self._hits += 1
                self._used.add(key)
        return entry

    def put(
        self,
        signature: KernelSignature,
        times: Mapping[str, float] | None = None,
        verified: Iterable[str] = (),
        rejected: Mapping[str, str] | None = None,
        postponed: Mapping[str, str] | None = None,
    ) -> Entry:
        """Add results to the entry of ``signature``; candidates not named keep theirs.

        Args:
            times: milliseconds by candidate.
            verified: candidates whose results the reference confirmed.
            rejected: why a candidate must not be used; overrides ``verified``.
            postponed: the effort whose time budget left a candidate out.

        Returns:
            The entry with what other processes have added, too.

        Raises:
            CacheError: a time is not finite and positive, or a name is no printable text.
            SignatureError: a size is still symbolic.
        """
        reasons = {name: sentence(why) for name, why in (rejected or {}).items()}
        confirmed = sorted(set(verified) - reasons.keys())
        results = {
            "times": dict(times or {}), "verified": confirmed, "rejected": reasons, "postponed": dict(postponed or {}),
        }  # fmt: skip
        fields = dict(_canonical(signature).fields)
        (entry,) = self._write(Document([entry_of({"fields": fields, **results}, "put")], []))
        return entry

    @contextmanager
    def alone(self, signature: KernelSignature) -> Iterator[None]:
        """Within, no other process that uses this database is within; what one before has found is read anew.

        Waits for as long as one other may tune a signature. Where no file can be locked, nobody waits.

        Raises:
            CacheError: another process is within for longer.
        """
        if self._turn is None:
            yield
            return
        try:
            self._turn.acquire(timeout=_LONGEST_TURN)
        except Timeout:
            raise CacheError(f"another process has tuned for {_LONGEST_TURN:.0f} seconds") from None
        except (OSError, NotImplementedError):
            yield
            return
        try:
            with self._store.lock:
                self._known.pop(_canonical(signature).key, None)
            yield
        finally:
            self._turn.release()

    def fact(self, name: str, device: Device) -> dict[str, float] | None:
        """Numbers that :meth:`put_fact` keeps for ``device``; None if there are none."""
        found = (item for item in self._store.facts() if (item.name, item.device) == (name, device))
        return next((dict(item.values) for item in found), None)

    def put_fact(self, name: str, device: Device, values: Mapping[str, float]) -> None:
        """Keep numbers measured on ``device``, in place of those before.

        Raises:
            CacheError: a value is not finite and positive.
        """
        self._write(Document([], [fact(name, device, values)]))

    def facts(self) -> list[Fact]:
        """All facts, by name."""
        return self._store.facts()

    def entries(self, op: str | None = None) -> Iterator[Entry]:
        """All entries, or one operation's."""
        return self._store.entries(op)

    def stats(self) -> Stats:
        """Hits and misses of this object, and what is stored."""
        totals = self._store.totals()
        with self._counting:
            hits, misses = self._hits, self._misses
        return Stats(hits, misses, totals.entries, totals.bytes, self.path, self._store.writable)

    def explain_miss(self, signature: KernelSignature) -> Miss | None:
        """Which fields differ from the nearest entry; None if ``signature`` has an entry."""
        if self._store.entry(signature.key) is not None:
            return None
        wanted = set(signature.fields.items())
        keys = self._store.keys(signature.op) or self._store.keys()
        ranked = sorted(keys, key=lambda key: _likeness(wanted, key), reverse=True)
        entry = next(filter(None, map(self._store.entry, ranked)), None)
        if entry is None:
            return Miss(None, ())
        names = sorted(signature.fields.keys() | entry.fields.keys())
        pairs = ((name, signature.fields.get(name, ""), entry.fields.get(name, "")) for name in names)
        return Miss(entry, tuple(pair for pair in pairs if pair[1] != pair[2]))

    def export(self, path: str | os.PathLike[str]) -> int:
        """Write everything as JSON, whole or not at all; returns the number of entries.

        Raises:
            CacheError: the file cannot be written.
        """
        count = 0

        def counted() -> Iterator[Entry]:
            nonlocal count
            for entry in self._store.entries():
                count += 1
                yield entry

        _write_file(Path(path), dump(counted(), self._store.facts()))
        return count

    def take(self, document: Document) -> int:
        """Add checked results in one transaction; own results stay. Returns the number of entries."""
        self._write(document, keep=True)
        self._start_over()
        return len(document.entries)

    def prune(self, device: Device | None = None) -> int:
        """Forget entries and facts of any device or Triton but ``device``'s, and entries beyond the bounds.

        Returns:
            The number of entries that went.
        """
        before = self._store.totals().entries
        if device is not None:
            keys = [entry.key for entry in self._store.entries() if entry.device != device]
            self._store.delete(keys, [item for item in self._store.facts() if item.device != device])
        self._write(Document([], []))
        self._start_over()
        return before - self._store.totals().entries

    def clear(self) -> int:
        """Forget everything; returns the number of entries that went."""
        count = self._store.totals().entries
        self._store.delete(None, None)
        self._start_over()
        return count

    def close(self) -> None:
        """Write which entries were used, and close the file; the next use opens it again."""
        if self._used:
            self._write(Document([], []))
        self._store.close()

    def _look_up(self, key: str) -> Entry | None:
        with self._store.lock:
            changes = self._store.changes()
            if changes != self._changes or len(self._absent) > self._max_entries:
                self._absent.clear()
                self._changes = changes
            if key in self._absent:
                return None
            entry = self._store.entry(key)
            if entry is None:
                self._absent.add(key)
            else:
                self._remember([entry])
            return entry

    def _write(self, document: Document, keep: bool = False) -> list[Entry]:
        with self._counting:
            used, self._used = self._used, set()
        with self._store.lock:
            entries, gone = self._store.write(document, used, keep)
            if not keep:
                self._remember(entries)
            for key in gone:
                self._known.pop(key, None)
        return entries

    def _remember(self, entries: list[Entry]) -> None:
        for entry in entries:
            if len(self._known) >= self._max_entries:
                self._known.clear()
            self._known[entry.key] = entry
            self._absent.discard(entry.key)
            if self._on_use is not None:
                self._on_use(entry)

    def _start_over(self) -> None:
        with self._store.lock:
            self._known.clear()
            self._absent.clear()
        _forget_choices()


@lru_cache(maxsize=8192)
def _canonical(signature: KernelSignature) -> KernelSignature:
    """The first equal signature, whose key is derived already: callers make the same signature anew for each call."""
    return signature


def _likeness(wanted: set[tuple[str, str]], key: str) -> int:
    """How many fields a key has in common; less than none if it is damaged."""
    try:
        return len(wanted.intersection(json_values(key).items()))
    except (CacheError, AttributeError, TypeError):
        return -1


def _forget_choices() -> None:
    """Have kernels that were chosen by what is no longer in the cache chosen again."""
    dispatch = sys.modules.get("sparsecomp.lowering.launch.dispatch")  # not loaded, it has chosen nothing
    if dispatch is not None:
        dispatch.forget()


def read_results(path: str | os.PathLike[str]) -> Document:
    """What an exported file or another cache's database holds.

    Raises:
        CacheError: the file cannot be read, or one value in it is not what it should be.
    """
    path = Path(path)
    text = None if is_database(path) else _read_file(path)
    try:
        return read_database(path) if text is None else parse(text)
    except CacheError as error:
        raise CacheError(f"{path}: {error}") from None


def _read_file(path: Path) -> bytes:
    try:
        check_regular(path)
        with open(path, "rb") as file:
            return file.read(MAX_BYTES + 1)
    except OSError as error:
        raise CacheError(f"{path} cannot be read: {error.strerror}") from None


def _write_file(path: Path, pieces: Iterable[str]) -> None:
    try:
        with written_whole(path) as partial, open(partial, "x", encoding="utf-8") as file:
            file.writelines(pieces)
    except OSError as error:
        raise CacheError(f"{path} cannot be written: {error.strerror}") from None


_caches: WeakSet[TuningCache] = WeakSet()
_default: TuningCache | None = None
_choosing = threading.Lock()


def _after_fork() -> None:
    """Locks that another thread held when it was left behind in the parent."""
    global _choosing
    _choosing = threading.Lock()
    for cache in list(_caches):
        cache._counting = threading.Lock()
        cache._turn = None if cache.path is None else FileLock(f"{cache.path}.tuning")


os.register_at_fork(after_in_child=_after_fork)


def default_cache() -> TuningCache:
    """The process's cache, at ``Settings.cache_dir``; another one once that has changed.

    Raises:
        OptionError: a malformed environment variable.
    """
    global _default
    directory = Settings.from_environment().cache_dir
    path = None if directory is None else directory / FILE
    with _choosing:
        if _default is None or _default.path != path:
            _close_default()
            _default = TuningCache(path, on_use=_observe)
            if path is None:
                advice = "tuning results stay in memory: set SPARSECOMP_CACHE_DIR, there is no home directory"
                warnings.warn(advice, CacheWarning, stacklevel=2)
        return _default


def _observe(entry: Entry) -> None:
    for observer in observers:
        observer(entry)


@atexit.register
def _close_default() -> None:
    if _default is not None:
        _default.close()
