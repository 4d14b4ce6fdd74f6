"""The tuning cache keeps what it is told among processes, survives accidents to files, and believes no file blindly."""

import json
import multiprocessing
import os
import shutil
import signal
import sqlite3
import statistics
import tempfile
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from pace import limit, processor_seconds

from sparsecomp.errors import CacheError
from sparsecomp.lowering.cache import database as store
from sparsecomp.lowering.cache.entry import KIND, VERSION, Document, dump
from sparsecomp.lowering.cache.signature import Device, KernelSignature
from sparsecomp.lowering.cache.tuning_cache import CacheWarning, Entry, TuningCache, default_cache, read_results

H100 = Device("NVIDIA H100 80GB HBM3", "9.0", "3.6.0")
A100 = Device("NVIDIA A100-SXM4-80GB", "8.0", "3.6.0")


def signature(number: int = 0, **changes: Any) -> KernelSignature:
    parts: dict[str, Any] = {
        "op": "binary_conv", "device": H100, "dtypes": ("int8", "float32"), "accumulator": "int32",
        "sizes": (("pixels", 4096), ("channels", 64)), "parameters": (("kernel", 3), ("number", number)),
    }  # fmt: skip
    return KernelSignature(**{**parts, **changes})


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[TuningCache]:
    cache = TuningCache(tmp_path / "tuning.sqlite")
    yield cache
    cache.close()


@pytest.fixture(autouse=True)
def no_surprises() -> Iterator[None]:
    """A warning is an error, unless a test expects it."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", CacheWarning)
        yield


# What is remembered


def test_results_of_candidates_add_up_and_the_fastest_verified_is_the_best(cache: TuningCache, tmp_path: Path) -> None:
    assert cache.get(signature()) is None
    cache.put(signature(), times={"a": 3.0, "b": 2.0, "c": 1.0}, rejected={"d": "wrong\n  by 2\x1b[31m"})
    assert cache.put(signature()).best is None
    cache.put(signature(), verified=["a", "b"])
    entry = cache.get(signature())
    assert entry is not None and entry.best == "b"
    # the last word on a candidate counts
    cache.put(signature(), times={"a": 1.5}, verified=["d"], rejected={"b": "wrong after all"})
    for reader in (cache, TuningCache(tmp_path / "tuning.sqlite")):
        entry = reader.get(signature())
        assert entry is not None and entry.best == "a" and entry.fields == signature().fields
        assert (entry.times, entry.verified) == ({"a": 1.5, "b": 2.0, "c": 1.0}, {"a", "d"})
        assert entry.rejected == {"b": "wrong after all"} and entry.device == H100


def test_a_reason_is_one_printable_line(cache: TuningCache) -> None:
    entry = cache.put(signature(), rejected={"d": "wrong\n  by 2\x1b[31m", "e": "x" * 5000})
    assert entry.rejected["d"] == "wrong by 2[31m" and len(entry.rejected["e"]) == 1000


def test_equal_times_are_told_apart_by_name(cache: TuningCache) -> None:
    assert cache.put(signature(), times={"b": 1.0, "a": 1.0}, verified=["a", "b"]).best == "a"


@pytest.mark.parametrize(
    "results",
    [
        {"times": {"a": float("nan")}}, {"times": {"a": 0.0}}, {"times": {"a": float("inf")}}, {"times": {"a": -1.0}},
        {"times": {"a": True}}, {"verified": ["\x1b"]}, {"times": {"a" * 1001: 1.0}},
    ],
)  # fmt: skip
def test_no_result_that_means_nothing_is_kept(cache: TuningCache, results: dict[str, Any]) -> None:
    with pytest.raises(CacheError, match="put"):
        cache.put(signature(), **results)
    assert cache.get(signature()) is None


def test_old_candidates_make_room(cache: TuningCache) -> None:
    for first in (0, 6000):
        times = {f"kernel@{number}": 1.0 for number in range(first, first + 6000)}
        entry = cache.put(signature(), times=times, verified=times)
    assert len(entry.times) == 10_000 and "kernel@11999" in entry.times and "kernel@1999" not in entry.times
    assert TuningCache(cache.path).get(signature()) == entry


def test_facts_of_a_card(cache: TuningCache, tmp_path: Path) -> None:
    assert cache.fact("ceilings", H100) is None
    cache.put_fact("ceilings", H100, {"bandwidth": 3.0e12})
    cache.put_fact("ceilings", H100, {"bandwidth": 3.1e12, "int8": 1.2e15})
    assert TuningCache(cache.path).fact("ceilings", H100) == {"bandwidth": 3.1e12, "int8": 1.2e15}
    assert cache.fact("ceilings", replace(H100, triton="3.9.0")) is None
    cache.export(tmp_path / "facts.json")
    other = TuningCache(None)
    assert other.take(read_results(tmp_path / "facts.json")) == 0
    assert other.fact("ceilings", H100) == {"bandwidth": 3.1e12, "int8": 1.2e15}
    with pytest.raises(CacheError, match="positive"):
        cache.put_fact("ceilings", H100, {"bandwidth": float("nan")})


def test_stats_count_lookups_and_what_is_stored(cache: TuningCache) -> None:
    cache.get(signature())
    cache.put(signature(), times={"a": 1.0})
    cache.get(signature())
    cache.get(signature())
    found = cache.stats()
    assert (found.hits, found.misses, found.entries, found.path, found.writable) == (2, 1, 1, cache.path, True)
    assert found.bytes == len(signature().key) + len('{"times":{"a":1.0},"verified":[],"rejected":{},"postponed":{}}')


def test_a_hit_takes_microseconds_and_writes_nothing(cache: TuningCache, capsys: pytest.CaptureFixture[str]) -> None:
    cache.put(signature(), times={"a": 1.0})
    assert cache.path is not None
    before = [(path.name, path.stat().st_mtime_ns) for path in sorted(cache.path.parent.iterdir())]
    times = {"the same": [], "an equal": []}
    for kind, took in times.items():
        for _ in range(3000):
            wanted = signature() if kind == "an equal" else signature_of_all_time
            start = time.perf_counter_ns()
            cache.get(wanted)
            took.append((time.perf_counter_ns() - start) / 1e3)
    medians = {kind: statistics.median(took) for kind, took in times.items()}
    with capsys.disabled():
        print(f"\nmedian hit, µs: {medians}")
    assert max(medians.values()) < limit(20)
    assert [(path.name, path.stat().st_mtime_ns) for path in sorted(cache.path.parent.iterdir())] == before


signature_of_all_time = signature()


# Bounds


def test_the_least_recently_used_goes_first(tmp_path: Path) -> None:
    cache = TuningCache(tmp_path / "tuning.sqlite", max_entries=3)
    for number in range(3):
        cache.put(signature(number), times={"a": 1.0})
    cache.get(signature(0))
    cache.put(signature(3), times={"a": 1.0})
    assert [cache.get(signature(number)) is not None for number in range(4)] == [True, False, True, True]
    cache.close()
    assert TuningCache(tmp_path / "tuning.sqlite").stats().entries == 3


def test_what_a_process_only_read_counts_as_used_when_it_closes(tmp_path: Path) -> None:
    first = TuningCache(tmp_path / "tuning.sqlite", max_entries=2)
    first.put(signature(0), times={"a": 1.0})
    first.put(signature(1), times={"a": 1.0})
    second = TuningCache(tmp_path / "tuning.sqlite", max_entries=2)
    second.get(signature(0))
    second.close()
    first.put(signature(2), times={"a": 1.0})
    assert TuningCache(tmp_path / "tuning.sqlite").get(signature(0)) is not None
    assert TuningCache(tmp_path / "tuning.sqlite").get(signature(1)) is None


def test_bytes_are_bounded(tmp_path: Path) -> None:
    size = TuningCache(None).put(signature(0), times={"a": 1.0})
    one = len(size.key) + len('{"times":{"a":1.0},"verified":[],"rejected":{},"postponed":{}}')
    cache = TuningCache(tmp_path / "tuning.sqlite", max_bytes=5 * one)
    for number in range(9):
        cache.put(signature(number), times={"a": 1.0})
    assert cache.stats().entries == 5 and cache.stats().bytes == 5 * one
    assert cache.get(signature(8)) is not None and cache.get(signature(3)) is None


def test_pruning_keeps_the_facts_of_this_device_where_no_other_has_any(cache: TuningCache) -> None:
    cache.put_fact("ceilings", H100, {"fp32": 6e13})
    assert cache.prune(H100) == 0 and cache.fact("ceilings", H100) == {"fp32": 6e13}
    cache.put(signature(device=A100), times={"a": 1.0})
    assert cache.prune(H100) == 1 and cache.fact("ceilings", H100) == {"fp32": 6e13}


def test_prune_and_clear(cache: TuningCache) -> None:
    devices = [H100, A100, replace(H100, triton="3.9.0")]
    for device in devices:
        cache.put(signature(device=device), times={"a": 1.0})
        cache.put_fact("ceilings", device, {"fp32": 6e13})
    assert cache.prune() == 0
    assert cache.prune(H100) == 2
    assert [cache.get(signature(device=device)) is not None for device in devices] == [True, False, False]
    assert [cache.fact("ceilings", device) is not None for device in devices] == [True, False, False]
    assert cache.clear() == 1
    assert cache.get(signature()) is None and cache.stats().entries == 0 and cache.facts() == []


@pytest.mark.slow(reason="a hundred thousand rows")
def test_a_hundred_thousand_entries(tmp_path: Path) -> None:
    entries = [Entry({**signature(number).fields}, {"a": 1.0 + number}, frozenset(["a"])) for number in range(100_000)]
    cache = TuningCache(tmp_path / "tuning.sqlite")
    cache.take(Document(entries, []))
    took = []
    for number in range(0, 100_000, 500):
        wanted = signature(number)
        cache.get(wanted)
        start = time.perf_counter()
        found = cache.get(wanted)
        took.append(time.perf_counter() - start)
        assert found is not None and found.times == {"a": 1.0 + number}
    assert statistics.median(took) < limit(20e-6)
    exported = tmp_path / "all.json"
    assert processor_seconds(lambda: cache.export(exported)) < limit(5)
    assert len(json.loads(exported.read_text())["entries"]) == 100_000
    assert processor_seconds(lambda: cache.explain_miss(signature(7, epilogue="relu"))) < limit(5)
    miss = cache.explain_miss(signature(7, epilogue="relu"))
    assert miss is not None and miss.differing == (("epilogue", "relu", ""),)
    assert processor_seconds(lambda: cache.put(signature(100_000), times={"a": 1.0})) < limit(0.5)
    assert cache.stats().entries == 100_000 and cache.get(signature(100_000)) is not None


# Misses


def test_a_miss_names_the_fields_that_differ_from_the_nearest(cache: TuningCache) -> None:
    empty = cache.explain_miss(signature())
    assert empty is not None and empty.nearest is None and "empty" in str(empty)
    cache.put(signature(0, device=A100), times={"a": 1.0})
    cache.put(signature(0, op="lif"), times={"a": 1.0})
    cache.put(signature(5), times={"a": 1.0})
    assert cache.explain_miss(signature(5)) is None
    miss = cache.explain_miss(signature(6, epilogue="bias"))
    assert miss is not None and miss.nearest is not None and miss.nearest.fields == signature(5).fields
    assert miss.differing == (("epilogue", "bias", ""), ("parameter.number", "6", "5"))
    assert "epilogue (wanted bias, has none), parameter.number (wanted 6, has 5)" in str(miss)
    other_op = cache.explain_miss(signature(5, op="event_conv"))
    assert other_op is not None and other_op.differing == (("op", "event_conv", "binary_conv"),)


def test_another_processs_entry_shows_after_a_miss(cache: TuningCache) -> None:
    assert cache.get(signature()) is None and cache.get(signature()) is None
    other = TuningCache(cache.path)
    other.put(signature(), times={"a": 1.0})
    assert cache.get(signature()) is not None
    assert cache.get(signature(1)) is None
    cache.put(signature(1), times={"a": 1.0})
    assert cache.get(signature(1)) is not None


# Many at once


def test_threads_lose_nothing(cache: TuningCache) -> None:
    def work(thread: int) -> None:
        for number in range(20):
            cache.put(signature(number % 5), times={f"{thread}.{number}": 1.0})
            cache.get(signature(number % 5))
            cache.get(signature(1000 + thread))

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(len(entry.times) for entry in TuningCache(cache.path).entries()) == 8 * 20
    assert (cache.stats().hits, cache.stats().misses) == (8 * 20, 8 * 20)


def _tune(cache: TuningCache, process: int, victim: bool) -> None:
    """Sixteen entries of its own and one candidate in a common one; the victim dies within its ninth write."""
    for number in range(16):
        if victim and number == 8:
            store.evict = lambda db, most: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
        cache.put(signature(100 * process + number), times={"a": 1.0 + number}, verified=["a"])
    cache.put(signature(9999), times={f"of {process}": 1.0})
    cache.close()


def test_eight_processes_of_which_one_is_killed_while_it_writes(cache: TuningCache) -> None:
    cache.put(signature(9999), times={"of the parent": 1.0})  # the children inherit an open connection
    processes = multiprocessing.get_context("fork")
    children = [processes.Process(target=_tune, args=(cache, number, number == 3)) for number in range(8)]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
    assert [child.exitcode for child in children] == [-9 if number == 3 else 0 for number in range(8)]
    fresh = TuningCache(cache.path)
    for process in range(8):
        for number in range(8 if process == 3 else 16):
            entry = fresh.get(signature(100 * process + number))
            assert entry is not None and entry.times == {"a": 1.0 + number} and entry.best == "a"
    common = fresh.get(signature(9999))
    assert common is not None
    assert set(common.times) == {"of the parent", *(f"of {number}" for number in range(8) if number != 3)}
    cache.put(signature(1), times={"a": 1.0})  # the parent's connection still works
    assert fresh.put(signature(308), times={"a": 1.0}).times == {"a": 1.0}


def _put_after_fork(cache: TuningCache) -> None:
    cache.put(signature(1), times={"a": 1.0})
    os._exit(0 if cache.get(signature(0)) is not None else 1)


def test_a_fork_while_another_thread_writes_does_not_hang(cache: TuningCache) -> None:
    done = threading.Event()

    def write() -> None:
        while not done.is_set():
            cache.put(signature(0), times={"a": 1.0})

    writer = threading.Thread(target=write)
    writer.start()
    children = [multiprocessing.get_context("fork").Process(target=_put_after_fork, args=(cache,)) for _ in range(4)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 on: forking with threads is what is tested
        for child in children:
            child.start()
    for child in children:
        child.join(30)
    done.set()
    writer.join()
    assert [child.exitcode for child in children] == [0] * 4


# Accidents


def _executed(statement: str) -> Callable[[Path], None]:
    def execute(path: Path) -> None:
        with sqlite3.connect(path) as db:
            db.execute(statement)
        db.close()

    return execute


_another_database = _executed("CREATE TABLE poems (line TEXT)")


def _overwritten(path: Path) -> None:
    with open(path, "r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * (path.stat().st_size - 4096))


BROKEN = {
    "garbage": lambda path: path.write_bytes(os.urandom(5000)),
    "text": lambda path: path.write_text("not a database"),
    "its first 50 bytes": lambda path: os.truncate(path, 50),
    "its first 5000 bytes": lambda path: os.truncate(path, 5000),
    "half of it": lambda path: os.truncate(path, path.stat().st_size // 2 // 4096 * 4096),
    "pages overwritten": _overwritten,
    "another database": lambda path: (path.unlink(), _another_database(path)),
    "another version": _executed("UPDATE meta SET value = 999"),
    "without a version": _executed("DELETE FROM meta"),
    "another column": _executed("ALTER TABLE entries DROP COLUMN crc"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_file_is_set_aside_with_one_warning(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "tuning.sqlite"
    cache = TuningCache(path)
    for number in range(60):
        cache.put(signature(number), times={"a": 1.0})
    cache.close()
    BROKEN[kind](path)
    cache = TuningCache(path)
    with pytest.warns(CacheWarning, match="begun anew") as caught:
        found = [cache.get(signature(number)) for number in range(60)]
        cache.put(signature(0), times={"b": 2.0})
        cache.put(signature(100), times={"a": 1.0})
    assert len(caught) == 1
    assert all(entry is None or entry.times == {"a": 1.0} for entry in found)  # a part may have been read before
    entry = TuningCache(path).get(signature(100))
    assert entry is not None and entry.times == {"a": 1.0} and cache.stats().writable
    assert len(list(tmp_path.glob("*.broken-*[0-9]"))) == 1


def test_a_file_that_breaks_while_it_is_open_is_set_aside_once_for_all(tmp_path: Path) -> None:
    path = tmp_path / "tuning.sqlite"
    caches = [TuningCache(path) for _ in range(3)]
    for number, cache in enumerate(caches):
        cache.put(signature(number), times={"a": 1.0})
    for name in path.parent.iterdir():
        name.write_bytes(os.urandom(10_000))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number, cache in enumerate(caches):
            cache.put(signature(10 + number), times={"b": 1.0})
    assert len(caught) <= len(caches) and all(issubclass(warning.category, CacheWarning) for warning in caught)
    for number, cache in enumerate(caches):
        entry = cache.get(signature(10 + number))
        assert entry is not None and entry.times == {"b": 1.0}


def test_bytes_altered_anywhere_never_crash_nor_change_a_result(tmp_path: Path) -> None:
    path = tmp_path / "tuning.sqlite"
    cache = TuningCache(path)
    for number in range(40):
        cache.put(signature(number), times={"a": 1.0 + number}, verified=["a"])
    cache.put_fact("ceilings", H100, {"fp32": 6e13})
    cache.close()
    good, random = path.read_bytes(), Random(0)
    found = 0
    for _ in range(100):
        altered = bytearray(good)
        for _ in range(random.choice([1, 5, 50])):
            altered[random.randrange(len(good))] = random.randrange(256)
        path.write_bytes(altered[: random.choice([len(good), random.randrange(len(good))])])
        cache = TuningCache(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            entries = [cache.get(signature(number)) for number in range(40)]
            assert all(entry is None or entry.times == {"a": 1.0 + n} for n, entry in enumerate(entries))
            assert cache.fact("ceilings", H100) in (None, {"fp32": 6e13})
            cache.explain_miss(signature(40))
            cache.put(signature(40), times={"z": 1.0})
            exported = cache.export(tmp_path / "x.json")
        assert TuningCache(None).take(read_results(tmp_path / "x.json")) == exported
        cache.close()
        for name in tmp_path.iterdir():
            name.unlink()
        found += sum(entry is not None for entry in entries)
    assert 0 < found < 100 * 40


def test_an_empty_file_is_an_empty_cache(tmp_path: Path) -> None:
    (tmp_path / "tuning.sqlite").touch()
    cache = TuningCache(tmp_path / "tuning.sqlite")
    cache.put(signature(), times={"a": 1.0})
    assert TuningCache(tmp_path / "tuning.sqlite").get(signature()) is not None


@pytest.mark.parametrize(
    "body", ["", "[]", "{}", "[" * 5000, '{"times":{"a":NaN},"verified":[],"rejected":{},"postponed":{}}']
)
def test_a_row_that_makes_no_sense_is_a_miss(cache: TuningCache, body: str) -> None:
    cache.put(signature(0), times={"a": 1.0})
    cache.put(signature(1), times={"a": 1.0})
    assert cache.path is not None
    with sqlite3.connect(cache.path) as db:
        crc = zlib.crc32(f"{signature(0).key}\0{body}".encode())
        db.execute("UPDATE entries SET body = ?, crc = ? WHERE key = ?", (body, crc, signature(0).key))
    fresh = TuningCache(cache.path)
    assert fresh.get(signature(0)) is None and len(list(fresh.entries())) == 1
    assert fresh.put(signature(0), times={"b": 1.0}).times == {"b": 1.0}


@pytest.fixture
def foreign() -> Iterator[Path]:
    """A directory that this process may read but not write, even as root."""
    directory = Path(tempfile.mkdtemp())
    directory.chmod(0o755)
    user = os.geteuid()
    yield directory
    if user == 0:
        os.seteuid(user)
    directory.chmod(0o755)
    shutil.rmtree(directory)


def _lock(directory: Path) -> None:
    directory.chmod(0o555)
    if os.geteuid() == 0:
        os.seteuid(65534)


@pytest.mark.parametrize("closed", [True, False])
def test_a_read_only_directory_is_read_and_new_results_stay_in_memory(foreign: Path, closed: bool) -> None:
    writer = TuningCache(foreign / "tuning.sqlite")
    writer.put(signature(0), times={"a": 1.0}, verified=["a"])
    if closed:
        writer.close()
    _lock(foreign)
    cache = TuningCache(foreign / "tuning.sqlite")
    with pytest.warns(CacheWarning, match="stay in memory") as caught:
        entry = cache.get(signature(0))
        cache.put(signature(0), times={"b": 0.5}, verified=["b"])
        cache.put(signature(1), times={"a": 1.0})
        cache.close()
    assert len(caught) == 1 and entry is not None and entry.best == "a"
    entry = cache.get(signature(0))
    assert entry is not None and entry.best == "b" and not cache.stats().writable and cache.stats().entries == 2


def test_no_directory_can_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    cache = TuningCache(tmp_path / "file" / "tuning.sqlite")
    with pytest.warns(CacheWarning, match="stay in memory") as caught:
        cache.put(signature(), times={"a": 1.0})
    assert len(caught) == 1 and cache.get(signature()) is not None


def test_a_full_disk(cache: TuningCache, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.put(signature(0), times={"a": 1.0})
    cache.close()
    connect, database = sqlite3.connect, cache.path
    with closing(connect(database)) as db:
        (pages,) = db.execute("PRAGMA page_count").fetchone()

    def full(place: Any, **kwargs: Any) -> sqlite3.Connection:
        db = connect(place, **kwargs)
        if place != ":memory:":
            db.execute(f"PRAGMA max_page_count = {pages}")
        return db

    monkeypatch.setattr(sqlite3, "connect", full)
    cache = TuningCache(database)
    with pytest.warns(CacheWarning, match=r"full.*stay in memory") as caught:
        for number in range(1, 100):
            cache.put(signature(number), times={"a": 1.0 + number})
    assert len(caught) == 1
    assert [cache.put(signature(number)).times for number in range(100)] == [{"a": 1.0 + n} for n in range(100)]
    kept = list(TuningCache(cache.path).entries())
    assert 1 <= len(kept) < 100 and all(entry.times for entry in kept)


def test_a_database_that_stays_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "PATIENCE", 0.3)
    writer = TuningCache(tmp_path / "tuning.sqlite")
    writer.put(signature(), times={"a": 1.0})
    writer.close()
    holder = sqlite3.connect(tmp_path / "tuning.sqlite", isolation_level=None)
    holder.execute("PRAGMA locking_mode = EXCLUSIVE")
    holder.execute("PRAGMA journal_mode = DELETE")
    holder.execute("BEGIN EXCLUSIVE")
    cache = TuningCache(tmp_path / "tuning.sqlite")
    with pytest.warns(CacheWarning, match=r"locked.*stay in memory"):
        cache.put(signature(1), times={"b": 1.0})
    assert cache.get(signature(1)) is not None
    holder.close()


def test_a_database_that_is_locked_for_a_moment_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "PATIENCE", 20.0)
    writer = TuningCache(tmp_path / "tuning.sqlite")
    writer.put(signature(), times={"a": 1.0})
    writer.close()
    holder = sqlite3.connect(tmp_path / "tuning.sqlite", isolation_level=None, check_same_thread=False)
    holder.execute("PRAGMA locking_mode = EXCLUSIVE")
    holder.execute("PRAGMA journal_mode = DELETE")
    holder.execute("BEGIN EXCLUSIVE")
    threading.Timer(0.3, holder.close).start()
    (entry,) = store.read_database(tmp_path / "tuning.sqlite").entries
    assert entry.times == {"a": 1.0}
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        store.until(time.monotonic() - 1)(sqlite3.SQLITE_BUSY, 1, 1)
    store.until(time.monotonic() + 9)(sqlite3.SQLITE_BUSY, 1, 1)
    store.until(time.monotonic() - 1)(sqlite3.SQLITE_DONE, 0, 1)


def test_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "XDG_CACHE_HOME", "SPARSECOMP_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)
    with pytest.warns(CacheWarning, match="SPARSECOMP_CACHE_DIR") as caught:
        default_cache().put(signature(), times={"a": 1.0})
        default_cache().put(signature(), times={"b": 1.0})
    entry = default_cache().get(signature())
    assert len(caught) == 1 and entry is not None and len(entry.times) == 2 and default_cache().path is None


def test_the_default_follows_the_setting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPARSECOMP_CACHE_DIR", str(tmp_path / "one"))
    first = default_cache()
    first.put(signature(), times={"a": 1.0})
    assert default_cache() is first and first.path == tmp_path / "one" / "tuning.sqlite"
    monkeypatch.setenv("SPARSECOMP_CACHE_DIR", str(tmp_path / "two"))
    assert default_cache().get(signature()) is None
    monkeypatch.setenv("SPARSECOMP_CACHE_DIR", str(tmp_path / "one"))
    assert default_cache() is not first and default_cache().get(signature()) is not None


# Files from elsewhere


def test_an_export_serves_a_fresh_cache_but_no_other_card_or_compiler(cache: TuningCache, tmp_path: Path) -> None:
    for number in range(20):
        cache.put(signature(number), times={"a": 2.0, "b": 1.0}, verified=["a"], rejected={"b": "wrong"})
    assert cache.export(tmp_path / "h100.json") == 20
    assert sorted(path.name for path in tmp_path.glob("*.json*")) == ["h100.json"]
    fresh = TuningCache(tmp_path / "fresh" / "tuning.sqlite")
    assert fresh.take(read_results(tmp_path / "h100.json")) == 20
    assert [fresh.get(signature(number)) for number in range(20)] == [cache.get(signature(n)) for n in range(20)]
    assert (fresh.stats().hits, fresh.stats().misses) == (20, 0)
    assert fresh.export(tmp_path / "again.json") == 20
    assert (tmp_path / "again.json").read_text() == (tmp_path / "h100.json").read_text()
    for change, name, wanted in (("name", "gpu", A100.name), ("triton", "triton", "3.9.0")):
        stranger = signature(3, device=replace(H100, **{change: wanted}))
        miss = fresh.explain_miss(stranger)
        assert fresh.get(stranger) is None and miss is not None
        assert miss.differing == ((name, wanted, signature().fields[name]),) and wanted in str(miss)


def test_own_measurements_stay_when_others_come_in(cache: TuningCache, tmp_path: Path) -> None:
    other = TuningCache(tmp_path / "other.sqlite")
    other.put(signature(0), times={"a": 9.0, "b": 0.5}, verified=["b"], rejected={"a": "wrong over there"})
    other.put(signature(1), times={"a": 1.0}, verified=["a"])
    other.put_fact("ceilings", H100, {"fp32": 1.0})
    other.close()
    cache.put(signature(0), times={"a": 1.0}, verified=["a"])
    cache.put_fact("ceilings", H100, {"fp32": 2.0})
    assert cache.get(signature(1)) is None
    assert cache.take(read_results(tmp_path / "other.sqlite")) == 2
    entry = cache.get(signature(0))
    assert entry is not None and entry.times == {"a": 1.0, "b": 0.5} and entry.verified == {"a", "b"}
    assert cache.get(signature(1)) is not None and cache.fact("ceilings", H100) == {"fp32": 2.0}
    other.export(tmp_path / "other.json")
    assert TuningCache(None).take(read_results(tmp_path / "other.json")) == 2


def _file(**changes: Any) -> dict[str, Any]:
    entry = Entry(signature().fields, {"a": 1.0}, frozenset(["a"])).to_json()
    return {"kind": KIND, "version": VERSION, "entries": [entry], "facts": [], **changes}


def _with(**changes: Any) -> str:
    return json.dumps(_file(entries=[{**_file()["entries"][0], **changes}]))


FIELDS = dict(signature().fields)
DEVICE = {"name": "x", "capability": "", "triton": ""}
HOSTILE = {
    "nothing": "",
    "no JSON": "import os",
    "no UTF-8": b'{"kind": "\xff\xfe"}',
    "cut off": json.dumps(_file())[:-3],
    "another kind": json.dumps(_file(kind="recipes")),
    "another version": json.dumps(_file(version=VERSION + 1)),
    "a version that equals ours": json.dumps(_file(version=True)),
    "a list": "[]",
    "an extra key": json.dumps(_file(code="print(1)")),
    "a missing key": json.dumps({key: value for key, value in _file().items() if key != "facts"}),
    "entries that are no list": json.dumps(_file(entries={})),
    "an entry that is no object": json.dumps(_file(entries=[1])),
    "an extra key in an entry": _with(code="x"),
    "fields that are no texts": _with(fields={**FIELDS, "op": 3}),
    "a field without a name": _with(fields={**FIELDS, "": "x"}),
    "a field of a strange name": _with(fields={**FIELDS, "size.__class__.x": "x"}),
    "no operation": _with(fields={key: value for key, value in FIELDS.items() if key != "op"}),
    "escapes in a field": _with(fields={**FIELDS, "op": "\x1b[2J"}),
    "a lone surrogate": _with(fields={**FIELDS, "op": "\ud800"}),
    "a huge text": _with(fields={**FIELDS, "op": "x" * 10_000}),
    "many fields": _with(fields={**FIELDS, **{f"size.x{number}": "1" for number in range(300)}}),
    "times that are texts": _with(times={"a": "1"}),
    "times that are true": _with(times={"a": True}),
    "a negative time": _with(times={"a": -1.0}),
    "no time at all": _with(times={"a": 0}),
    "NaN": _with(times={"a": float("nan")}),
    "infinity": _with(times={"a": float("inf")}),
    "beyond doubles": _with().replace('{"a": 1.0}', '{"a": 1e999}'),
    "a huge integer": _with().replace('{"a": 1.0}', '{"a": 1' + "0" * 400 + "}"),
    "an endless integer": _with().replace('{"a": 1.0}', '{"a": 1' + "0" * 10_000 + "}"),
    "verified that is no list": _with(verified={"a": 1}),
    "verified twice": _with(verified=["a", "a"]),
    "verified numbers": _with(verified=[1]),
    "many verified": _with(verified=[str(number) for number in range(10_001)]),
    "verified and rejected": _with(rejected={"a": "wrong"}),
    "reasons that are no texts": _with(rejected={"b": None}),
    "an entry twice": json.dumps(_file(entries=_file()["entries"] * 2)),
    "a name twice": json.dumps(_file()).replace('{"a": 1.0}', '{"a": 1.0, "a": 2.0}'),
    "a deep list": '{"kind": ' + "[" * 100_000 + "]" * 100_000 + "}",
    "a deep object": '{"kind":' * 50_000 + "1" + "}" * 50_000,
    "a fact of texts": json.dumps(_file(facts=[{"name": "f", "device": DEVICE, "values": {"x": "1"}}])),
    "a fact of no device": json.dumps(_file(facts=[{"name": "f", "device": "x", "values": {"x": 1}}])),
    "a fact without a name": json.dumps(_file(facts=[{"name": [], "device": DEVICE, "values": {"x": 1}}])),
    "a fact twice": json.dumps(_file(facts=[{"name": "f", "device": DEVICE, "values": {"x": 1}}] * 2)),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_file_with_one_bad_value_is_refused_whole(kind: str, tmp_path: Path) -> None:
    text = HOSTILE[kind]
    good = Entry({**FIELDS, "op": "good"}, {"a": 1.0})
    if isinstance(text, str) and '"entries": [{' in text:
        text = text.replace('"entries": [', f'"entries": [{json.dumps(good.to_json())}, ', 1)
    path = tmp_path / "file.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
    cache = TuningCache(tmp_path / "tuning.sqlite")
    cache.put(signature(1), times={"a": 1.0})
    with pytest.raises(CacheError):
        cache.take(read_results(path))
    assert cache.stats().entries == 1 and cache.facts() == []


def test_the_untouched_file_of_the_cases_above_is_good(tmp_path: Path) -> None:
    (tmp_path / "file.json").write_text(json.dumps(_file()))
    assert TuningCache(None).take(read_results(tmp_path / "file.json")) == 1
    (tmp_path / "file.json").write_text(json.dumps(_file(), indent=4, sort_keys=True))
    assert TuningCache(None).take(read_results(tmp_path / "file.json")) == 1


def test_a_file_too_large_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(dump([Entry(FIELDS, {"a": 1.0})], []))
    (tmp_path / "file.json").write_text(text)
    monkeypatch.setattr("sparsecomp.lowering.cache.entry.MAX_BYTES", len(text) - 1)
    with pytest.raises(CacheError, match="at most"):
        TuningCache(None).take(read_results(tmp_path / "file.json"))


def test_a_database_of_others_is_checked_as_well_and_left_alone(cache: TuningCache, tmp_path: Path) -> None:
    path = tmp_path / "other.sqlite"
    other = TuningCache(path)
    other.put(signature(), times={"a": 1.0})
    other.put(signature(1), times={"a": 1.0})
    other.close()
    body = '{"times":{"a":-1.0},"verified":[],"rejected":{},"postponed":{}}'
    for crc, message in ((0, "damaged"), (zlib.crc32(f"{signature(1).key}\0{body}".encode()), "positive")):
        with sqlite3.connect(path) as db:
            db.execute("UPDATE entries SET body = ?, crc = ? WHERE rowid = 2", (body, crc))
        db.close()
        with pytest.raises(CacheError, match=message):
            cache.take(read_results(path))
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(CacheError, match="no readable database"):
        cache.take(read_results(path))
    assert cache.stats().entries == 0 and path.stat().st_size == 5000


@pytest.mark.parametrize("name", ["missing.json", "."])
def test_files_that_cannot_be_read_or_written(cache: TuningCache, tmp_path: Path, name: str) -> None:
    with pytest.raises(CacheError, match="cannot be read"):
        cache.take(read_results(tmp_path / name))
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "no such directory" / "x.json", tmp_path / "file" / "x.json", tmp_path):
        with pytest.raises(CacheError, match="cannot be written"):
            cache.export(path)
    assert [path.name for path in tmp_path.glob("*") if "sqlite" not in path.name] == ["file"]


def test_an_export_that_fails_leaves_the_old_file(cache: TuningCache, tmp_path: Path) -> None:
    cache.put(signature(), times={"a": 1.0})
    (tmp_path / "x.json").write_text("old")

    def broken(entries: Any, facts: Any) -> Iterator[str]:
        yield "half"
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sparsecomp.lowering.cache.tuning_cache.dump", broken)
        with pytest.raises(CacheError, match="No space"):
            cache.export(tmp_path / "x.json")
    assert (tmp_path / "x.json").read_text() == "old" and len(list(tmp_path.glob("*x.json*"))) == 1


def test_a_store_in_memory_keeps_what_it_has_in_a_forked_child() -> None:
    kept = store.Store(None, store.Totals(10, 10**6))
    opened = kept.changes()
    kept.forked()
    assert kept.changes() == opened and not kept.writable
