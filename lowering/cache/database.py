"""Entries and facts in one SQLite file that many threads and processes share, and that no accident makes fatal.

A file that SQLite or the schema does not recognise is set aside and a new one begun. Where nothing can be written (no
permission, no space, a file system without locks) the contents are copied to memory, and the process goes on there.
Either way one warning says so.
"""

import os
import sqlite3
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import cache
from pathlib import Path
from threading import RLock
from typing import Any, NamedTuple, TypeVar
from weakref import WeakSet
from zlib import crc32

from filelock import FileLock

from sparsecomp.errors import CacheError
from sparsecomp.files.whole_file import check_regular
from sparsecomp.lowering.cache.entry import Document, Entry, Fact, compact, entry_of, fact, json_values
from sparsecomp.lowering.cache.signature import Device

T = TypeVar("T")

FILE = "tuning.sqlite"
"""Of the database in the cache's directory."""
_SQLITE = b"SQLite format 3\0"
"""With which such a file begins."""
VERSION = 1
"""Of the schema."""

_SCHEMA = (
    "CREATE TABLE meta (name TEXT PRIMARY KEY, value INTEGER NOT NULL)",
    "CREATE TABLE entries (key TEXT PRIMARY KEY, op TEXT NOT NULL, body TEXT NOT NULL,"
    " used REAL NOT NULL, size INTEGER NOT NULL, crc INTEGER NOT NULL)",
    "CREATE INDEX by_use ON entries (used, size)",
    "CREATE INDEX by_op ON entries (op, key)",
    "CREATE TABLE facts (name TEXT, gpu TEXT, capability TEXT, triton TEXT, body TEXT NOT NULL,"
    " crc INTEGER NOT NULL, PRIMARY KEY (name, gpu, capability, triton))",
    f"INSERT INTO meta VALUES ('version', {VERSION})",
)
_PUT = (
    "INSERT INTO entries VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (key) DO UPDATE"
    " SET body = excluded.body, used = excluded.used, size = excluded.size, crc = excluded.crc"
)
MOST_BYTES = 2 << 30
"""Of a database, several times what its bounds let it hold: it is read through to be checked and copied."""

PATIENCE = 30.0
"""Seconds to wait for another process's transaction."""
_PAGE = 1000
"""Rows read at a time."""


class CacheWarning(UserWarning):
    """Tuning results could not be read, or will not be kept."""


_FAILURES = (sqlite3.DatabaseError, UnicodeDecodeError)
"""What SQLite raises; the latter if the text of its own error holds bytes of a damaged file."""


class _BrokenError(sqlite3.DatabaseError):
    """A database, but not one of ours."""


class Totals(NamedTuple):
    """Entries, and the bytes of their text."""

    entries: int
    bytes: int


class Store:
    """The table of entries and the table of facts.

    Args:
        path: the database; None keeps everything in memory.
        most: bounds beyond which the least recently used entries go.

    Opens at first use. Every method may be called from any thread, and after a fork from both processes.
    """

    def __init__(self, path: Path | None, most: Totals) -> None:
        self.path = path
        self.lock = RLock()
        self._most = most
        self._connection: sqlite3.Connection | None = None
        self._in_memory = path is None
        self._opened = 0
        _stores.add(self)

    @property
    def writable(self) -> bool:
        """Whether what is put outlives the process."""
        with self.lock:
            self._open()
            return not self._in_memory

    def changes(self) -> tuple[int, int]:
        """A value that differs once another process has written."""
        return self._run(lambda db: (self._opened, db.execute("PRAGMA data_version").fetchone()[0]))

    def entry(self, key: str) -> Entry | None:
        """The entry of a signature's key; None if there is none, or none that passes the checks."""
        return self._run(lambda db: _stored(db, key))

    def entries(self, op: str | None = None) -> Iterator[Entry]:
        """All entries, or one operation's, in the order of their keys."""
        where, values = _of(op)
        query = f"SELECT rowid FROM entries {where} ORDER BY key"
        places = [place for (place,) in self._run(lambda db: db.execute(query, values).fetchall())]
        for start in range(0, len(places), _PAGE):
            rows = self._run(lambda db, page=places[start : start + _PAGE]: _rows(db, page))
            yield from filter(None, (_entry(*row) for row in rows))

    def keys(self, op: str | None = None) -> list[str]:
        """Keys of all entries, or one operation's, most recently used first."""
        where, values = _of(op)
        query = f"SELECT key FROM entries {where} ORDER BY used DESC"
        return [key for (key,) in self._run(lambda db: db.execute(query, values).fetchall())]

    def facts(self) -> list[Fact]:
        """All facts that pass the checks, by name."""
        rows = self._run(lambda db: db.execute("SELECT * FROM facts ORDER BY name, gpu, triton").fetchall())
        return [found for row in rows if (found := _fact(*row)) is not None]

    def totals(self) -> Totals:
        """What the entries amount to."""
        return self._run(_totals)

    def write(self, document: Document, used: Iterable[str] = (), keep: bool = False) -> tuple[list[Entry], list[str]]:
        """Add results to the stored ones in one transaction, and forget what is then too much.

        Args:
            document: what to add.
            used: keys that were used since the last write.
            keep: the stored word on a candidate and stored facts stay; else the new ones replace them.

        Returns:
            The entries as they now are, and the keys that were forgotten.
        """
        touched = [(time.time(), key) for key in used]

        def write(db: sqlite3.Connection) -> tuple[list[Entry], list[str]]:
            with _transaction(db):
                db.executemany("UPDATE entries SET used = ? WHERE key = ?", touched)
                merged = [_merged(db, entry, keep) for entry in document.entries]
                db.executemany(_PUT, map(_row, merged))
                verb = "IGNORE" if keep else "REPLACE"
                db.executemany(f"INSERT OR {verb} INTO facts VALUES (?, ?, ?, ?, ?, ?)", map(_fact_row, document.facts))
                return merged, evict(db, self._most)

        return self._run(write)

    def delete(self, keys: Sequence[str] | None, facts: Sequence[Fact] | None) -> None:
        """Forget these entries and facts; None is all of them."""

        def delete(db: sqlite3.Connection) -> None:
            with _transaction(db):
                if keys is None:
                    db.execute("DELETE FROM entries")
                else:
                    db.executemany("DELETE FROM entries WHERE key = ?", [(key,) for key in keys])
                if facts is None:
                    db.execute("DELETE FROM facts")
                else:
                    query = "DELETE FROM facts WHERE name = ? AND gpu = ? AND capability = ? AND triton = ?"
                    db.executemany(query, [_fact_row(item)[:4] for item in facts])

        self._run(delete)

    def close(self) -> None:
        """Close the file; the next use opens it again. What is in memory only stays."""
        with self.lock:
            if self._connection is not None and not self._in_memory:
                self._connection.close()
                self._connection = None

    def _run(self, operation: Callable[[sqlite3.Connection], T]) -> T:
        """The operation's result: on the file, on a new file if this one is broken, else in memory."""
        with self.lock:
            for rescue in (self._rebuild, self._retreat):
                try:
                    return operation(self._open())
                except _FAILURES as error:
                    if self._in_memory or isinstance(error, sqlite3.ProgrammingError):
                        raise
                    rescue(error)
            return operation(self._open())

    def _open(self) -> sqlite3.Connection:
        if self._connection is None:
            self._opened += 1
            if self.path is None:
                self._connection = _prepared(":memory:")
            else:
                try:
                    self._connection = _from_file(self.path, suspect=False)
                except (OSError, *_FAILURES) as error:
                    self._retreat(error)
        assert self._connection is not None
        return self._connection

    def _rebuild(self, error: Exception) -> None:
        if not _is_broken(error):
            return self._retreat(error)
        assert self.path is not None
        self.close()
        with suppress(OSError, *_FAILURES):  # opening fails again, and then retreats
            self._connection = _from_file(self.path, suspect=True)
            self._opened += 1

    def _retreat(self, error: Exception) -> None:
        """Go on in memory, with a copy of what can be read."""
        assert self.path is not None
        copy = None if _is_broken(error) else _copied(self.path)
        self.close()
        self._connection, self._in_memory = copy or _prepared(":memory:"), True
        self._opened += 1
        _warn(f"tuning results cannot be kept in {self.path} ({error}): they stay in memory for this process")

    def forked(self) -> None:
        """In a forked child: leave the parent's connection alone, which must neither be used nor closed here."""
        self.lock = RLock()
        if not self._in_memory and self._connection is not None:
            _inherited.append(self._connection)
            self._connection = None


_stores: WeakSet[Store] = WeakSet()
_inherited: list[sqlite3.Connection] = []


def _before_fork() -> None:
    for store in list(_stores):
        store.lock.acquire()


def _after_fork_in_parent() -> None:
    for store in list(_stores):
        with suppress(RuntimeError):  # it was made while we forked
            store.lock.release()


def _after_fork_in_child() -> None:
    for store in list(_stores):
        store.forked()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)


def is_database(path: Path) -> bool:
    """Whether a file is a database, of whatever tables; what cannot be read is none."""
    with suppress(OSError):
        check_regular(path)
        with open(path, "rb") as file:
            return file.read(len(_SQLITE)) == _SQLITE
    return False


def read_database(path: Path) -> Document:
    """What another cache's database holds, which is left as it is.

    Raises:
        CacheError: it is none.
    """
    copy = _copied(path)
    if copy is None:
        raise CacheError("this is no readable database of tuning results of this version")
    rows = copy.execute("SELECT key, body, crc FROM entries").fetchall()
    entries = [_checked_entry(*row) for row in rows]
    facts = [_checked_fact(*row) for row in copy.execute("SELECT * FROM facts")]
    copy.close()
    return Document(entries, facts)


def _from_file(path: Path, suspect: bool) -> sqlite3.Connection:
    """The database at `path`, begun anew if it is broken. One process at a time, or two would set files aside."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _check_files(path)
    with FileLock(f"{path}.lock", timeout=PATIENCE):
        try:
            _check_size(path)
            return _prepared(path, suspect)
        except _FAILURES as error:
            if not _is_broken(error):
                raise
            aside = _set_aside(path)
            _warn(f"the tuning results in {path} cannot be read ({error}): kept as {aside.name}, and begun anew")
            return _prepared(path)


def _check_files(path: Path) -> None:
    """OSError unless the database, and what SQLite keeps beside it, are regular files: it would wait for a pipe."""
    for suffix in ("", "-wal", "-shm", "-journal", ".lock"):
        with suppress(FileNotFoundError):
            check_regular(f"{path}{suffix}")


def _check_size(path: Path) -> None:
    with suppress(FileNotFoundError):
        size = check_regular(path)
        if size > MOST_BYTES:
            raise _BrokenError(f"it has {size} bytes, at most {MOST_BYTES} are read")


def _prepared(path: Path | str, suspect: bool = False) -> sqlite3.Connection:
    """A connection to a database that has our tables, new ones if it has none.

    Raises:
        sqlite3.DatabaseError: it is no database, has other tables or another version, or is damaged.
    """
    db = _connect(path)
    try:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")  # a power cut may lose the last results, not the file
        with _transaction(db):
            if not _objects(db):
                _make(db)
        _check(db, thoroughly=suspect)
    except BaseException:
        db.close()
        raise
    return db


def _connect(path: Path | str, uri: bool = False) -> sqlite3.Connection:
    # transactions are begun by hand; the store's lock stands for the check of threads
    db = sqlite3.connect(path, timeout=PATIENCE, isolation_level=None, check_same_thread=False, uri=uri)
    db.text_factory = _decoded
    return db


def _decoded(text: bytes) -> str:
    """Damaged text is text, too: the row's checksum tells."""
    return text.decode(errors="replace")


def _objects(db: sqlite3.Connection) -> set[tuple[str, str]]:
    """Tables, indexes, views and triggers but SQLite's own: the name of each, and the statement that made it."""
    ours = "type IN ('view', 'trigger') OR name NOT LIKE 'sqlite^_%' ESCAPE '^'"
    return {(str(name), str(sql)) for name, sql in db.execute(f"SELECT name, sql FROM sqlite_master WHERE {ours}")}


@cache
def _our_objects() -> set[tuple[str, str]]:
    with closing(_connect(":memory:")) as db:
        _make(db)
        return _objects(db)


def _make(db: sqlite3.Connection) -> None:
    for statement in _SCHEMA:
        db.execute(statement)


def _check(db: sqlite3.Connection, thoroughly: bool) -> None:
    # to the letter: a constraint, a trigger or a computed column of others could do anything
    strange = sorted(name for name, _ in _objects(db) ^ _our_objects())
    if strange:
        raise _BrokenError(f"its {strange[0][:80]!r} is not as this sparsecomp makes it")
    (version,) = db.execute("SELECT max(value) FROM meta WHERE name = 'version'").fetchone()
    if version != VERSION:
        raise _BrokenError(f"it has version {str(version)[:80]!r}, this sparsecomp reads {VERSION}")
    if thoroughly and (fault := db.execute("PRAGMA integrity_check(1)").fetchone()[0]) != "ok":
        raise _BrokenError(str(fault))


def _copied(path: Path) -> sqlite3.Connection | None:
    """A copy in memory of a database of ours; None if it cannot be read. Writes nothing beside it, if need be."""
    for way in ("mode=ro", "immutable=1"):
        memory = _connect(":memory:")
        try:
            _check_files(path)
            _check_size(path)
            source = _connect(f"{path.absolute().as_uri()}?{way}", uri=True)
            try:
                source.backup(memory, progress=until(time.monotonic() + PATIENCE))
            finally:
                source.close()
            _check(memory, thoroughly=True)
        except (OSError, *_FAILURES):
            memory.close()
        else:
            return memory
    return None


def until(deadline: float) -> Callable[[int, int, int], None]:
    """For a backup, which else waits for a locked database for ever."""

    def check(status: int, remaining: int, total: int) -> None:
        if status != sqlite3.SQLITE_DONE and time.monotonic() > deadline:
            raise sqlite3.OperationalError("it is locked")

    return check


def _is_broken(error: Exception) -> bool:
    if isinstance(error, _BrokenError | UnicodeDecodeError):
        return True
    code = getattr(error, "sqlite_errorcode", None)
    return code is not None and code & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def _set_aside(path: Path) -> Path:
    """Rename a broken database, and what SQLite keeps beside it, which would else be taken for the new one's."""
    aside = path.with_name(f"{path.name}.broken-{time.time_ns()}")
    for suffix in ("-wal", "-shm", ""):
        with suppress(FileNotFoundError):
            os.replace(f"{path}{suffix}", f"{aside}{suffix}")
    return aside


@contextmanager
def _transaction(db: sqlite3.Connection) -> Iterator[None]:
    """Read and write as one step that no other process comes between."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        with suppress(sqlite3.Error):  # a full disk has rolled it back already
            db.execute("ROLLBACK")
        raise


def _merged(db: sqlite3.Connection, entry: Entry, keep: bool) -> Entry:
    stored = _stored(db, entry.key)
    if stored is None:
        return entry
    return entry.updated(stored) if keep else stored.updated(entry)


def evict(db: sqlite3.Connection, most: Totals) -> list[str]:
    count, size = _totals(db)
    gone: dict[int, str] = {}
    if count > most.entries or size > most.bytes:
        query = "SELECT rowid, key, CAST(size AS INTEGER) FROM entries ORDER BY used, rowid"
        for place, key, bytes_ in db.execute(query):
            if count <= most.entries and size <= most.bytes:
                break
            gone[place] = key
            count, size = count - 1, size - bytes_
        db.executemany("DELETE FROM entries WHERE rowid = ?", [(place,) for place in gone])
    return list(gone.values())


def _totals(db: sqlite3.Connection) -> Totals:
    return Totals(*db.execute("SELECT count(*), CAST(total(size) AS INTEGER) FROM entries").fetchone())


def _of(op: str | None) -> tuple[str, tuple[str, ...]]:
    """The clause that picks one operation's entries, or all."""
    return ("", ()) if op is None else ("WHERE op = ?", (op,))


def _rows(db: sqlite3.Connection, places: list[int]) -> list[tuple[str, str, int]]:
    """By place, for which no damaged key can stand."""
    listed = ",".join(map(str, places))
    return db.execute(f"SELECT key, body, crc FROM entries WHERE rowid IN ({listed}) ORDER BY key").fetchall()


def _row(entry: Entry) -> tuple[str, str, str, float, int, int]:
    body = compact(entry.results())
    return entry.key, entry.fields["op"], body, time.time(), len(entry.key) + len(body), _crc(entry.key, body)


def _stored(db: sqlite3.Connection, key: str) -> Entry | None:
    row = db.execute("SELECT body, crc FROM entries WHERE key = ?", (key,)).fetchone()
    return _entry(key, *row) if row else None


def _entry(key: str, body: str, crc: int) -> Entry | None:
    try:
        return _checked_entry(key, body, crc)
    except CacheError:
        return None


def _checked_entry(key: str, body: str, crc: int) -> Entry:
    """The entry of a row, which may come from anywhere.

    Raises:
        CacheError: it makes no sense, or was damaged.
    """
    _match(crc, key, body)
    return entry_of({"fields": json_values(key), **_object(body)}, f"the entry of {key[:80]!r}")


def _fact_row(item: Fact) -> tuple[str, str, str, str, str, int]:
    texts = (item.name, item.device.name, item.device.capability, item.device.triton, compact(dict(item.values)))
    return *texts, _crc(*texts)


def _fact(*row: Any) -> Fact | None:
    try:
        return _checked_fact(*row)
    except CacheError:
        return None


def _checked_fact(name: str, gpu: str, capability: str, triton: str, body: str, crc: int) -> Fact:
    _match(crc, name, gpu, capability, triton, body)
    return fact(name, Device(gpu, capability, triton), _object(body))


def _crc(*texts: str) -> int:
    return crc32("\0".join(texts).encode())


def _match(crc: int, *texts: object) -> None:
    if not all(isinstance(text, str) for text in texts) or crc != _crc(*map(str, texts)):
        raise CacheError(f"the row of {str(texts[0])[:80]!r} was damaged")


def _object(body: str) -> dict[str, Any]:
    found = json_values(body)
    if not isinstance(found, dict):
        raise CacheError("a stored row is no object")
    return found


def _warn(message: str) -> None:
    warnings.warn(message, CacheWarning, stacklevel=2)
