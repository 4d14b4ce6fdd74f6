"""Files of every kind: what is no regular file is refused at once, and only what dead writers left is removed.

Each test that would wait for ever without the refusal runs under an alarm.
"""

import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from sparsecomp.errors import CacheError, CheckpointError, FormatError
from sparsecomp.files import json_text, whole_file
from sparsecomp.files.whole_file import written_whole
from sparsecomp.formats import CSR, SparseMatrix
from sparsecomp.lowering.cache.database import MOST_BYTES
from sparsecomp.lowering.cache.entry import KIND, VERSION
from sparsecomp.lowering.cache.signature import Device, KernelSignature
from sparsecomp.lowering.cache.tuning_cache import CacheWarning, TuningCache, read_results
from sparsecomp.training.loop.checkpoint import load_tree, save_tree

SIGNATURE = KernelSignature("lif", Device("card", "9.0", "3.6.0"), dtypes=("float32",), accumulator="float32")


@pytest.fixture(autouse=True)
def no_waiting() -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TimeoutError("this waits for ever")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(path))  # the system's limit on its length is short


PLACES: dict[str, Callable[[Path], Any]] = {
    "a pipe": os.mkfifo,
    "a directory": Path.mkdir,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a socket": _socket,
}
READERS: dict[str, Callable[[Path], Any]] = {
    "import": lambda path: TuningCache(None).take(read_results(path)),
    "matrix": SparseMatrix.load,
    "checkpoint": load_tree,
}
WRITERS: dict[str, Callable[[Path], Any]] = {
    "export": lambda path: TuningCache(None).export(path),
    "matrix": CSR.from_dense(torch.eye(2)).save,
    "checkpoint": lambda path: save_tree(path, {"a": torch.ones(2)}),
}


@pytest.mark.parametrize("kind", PLACES)
def test_only_regular_files_are_read_and_replaced(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "place"
    PLACES[kind](path)
    before = path.lstat()
    for way in (*READERS.values(), *WRITERS.values()):
        with pytest.raises((OSError, CacheError), match=f"it is {kind}: give the path of a regular file"):
            way(path)
    assert os.path.samestat(before, path.lstat()) and os.listdir(tmp_path) == ["place"]


@pytest.mark.parametrize("suffix", ["", "-wal", "-shm", "-journal", ".lock"])
def test_a_database_or_its_companion_that_is_a_pipe_leaves_results_in_memory(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / "tuning.sqlite"
    TuningCache(path).close()
    os.mkfifo(f"{path}{suffix}")
    cache = TuningCache(path)
    with pytest.warns(CacheWarning, match="it is a pipe"):
        cache.put(SIGNATURE, times={"a": 1.0})
    entry = cache.get(SIGNATURE)
    assert entry is not None and entry.times == {"a": 1.0} and not cache.stats().writable


def test_a_huge_database_of_holes_is_neither_copied_nor_kept(tmp_path: Path) -> None:
    path = tmp_path / "other.sqlite"
    other = TuningCache(path)
    other.put(SIGNATURE, times={"a": 1.0})
    other.close()
    os.truncate(path, MOST_BYTES + 1)
    with pytest.raises(CacheError, match="no readable database"):
        TuningCache(None).take(read_results(path))
    with pytest.warns(CacheWarning, match="at most"):
        assert TuningCache(path).get(SIGNATURE) is None


def test_a_matrix_larger_than_memory_is_an_os_error(tmp_path: Path) -> None:
    size = 1 << 43
    header = json.dumps({"x": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}).encode()
    header = header[:-1] + b', "__metadata__": {"sparsecomp": "{\\"version\\": 1}"}}'
    path = tmp_path / "matrix"
    with open(path, "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        try:
            file.truncate(8 + len(header) + size)
        except OSError:
            pytest.skip("this file system has no files of 8 TiB")
    with pytest.raises(OSError, match="does not fit into memory"):
        CSR.load(path)


# Writers that die


_WRITER = """
import sys, time
from pathlib import Path
from sparsecomp.files.whole_file import written_whole
with written_whole(Path(sys.argv[1])) as partial:
    partial.write_text("half")
    print(flush=True)
    time.sleep(600)
"""


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process in the middle of writing `tmp_path / "one"`."""
    child = subprocess.Popen([sys.executable, "-c", _WRITER, tmp_path / "one"], stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline()
    yield child
    child.kill()
    child.wait()


@pytest.mark.parametrize("name", ["one", "two"])
def test_what_a_killed_writer_left_goes_with_the_next_write_and_a_living_ones_stays(
    writer: subprocess.Popen[bytes], tmp_path: Path, name: str
) -> None:
    (theirs,) = tmp_path.iterdir()
    save_tree(tmp_path / name, {"a": 1})
    assert [path.read_text() for path in theirs.iterdir()] == ["half"]
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    save_tree(tmp_path / name, {"a": 2})
    assert os.listdir(tmp_path) == [name] and load_tree(tmp_path / name) == {"a": 2}


def test_leftovers_of_older_versions_go_and_what_looks_like_them_stays(tmp_path: Path) -> None:
    (tmp_path / f".x.{'0' * 32}.partial").write_text("a file")
    stay = [f".x.{'0' * 31}.partial", f"x.{'0' * 32}.partial", f".x.{'0' * 32}.partial.txt", ".partial"]
    for name in stay:
        (tmp_path / name).write_text("mine")
    os.mkfifo(tmp_path / f".y.{'1' * 32}.partial")
    (tmp_path / f".z.{'2' * 32}.partial").symlink_to(tmp_path / ".partial")
    save_tree(tmp_path / "run", {"a": 1})
    assert set(os.listdir(tmp_path)) >= {"run", *stay, f".z.{'2' * 32}.partial"}
    assert f".x.{'0' * 32}.partial" not in os.listdir(tmp_path)


@pytest.mark.slow(reason="starts processes")
def test_writers_of_one_file_leave_one_whole_file(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom pathlib import Path\nfrom sparsecomp.files.whole_file import written_whole\n"
        "for _ in range(150):\n    with written_whole(Path(sys.argv[1])) as partial:\n"
        "        partial.write_text(sys.argv[2] * 1000)\n"
    )
    children = [subprocess.Popen([sys.executable, "-c", script, tmp_path / "x", letter]) for letter in "abc"]
    assert [child.wait() for child in children] == [0, 0, 0]
    assert (tmp_path / "x").read_text() in {letter * 1000 for letter in "abc"} and os.listdir(tmp_path) == ["x"]


def test_a_folder_taken_for_a_leftover_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, taken = whole_file.fcntl.flock, []

    def flock(descriptor: int, how: int) -> None:
        lock(descriptor, how)
        if not taken:
            taken.extend(tmp_path.iterdir())
            taken[0].rmdir()

    monkeypatch.setattr(whole_file.fcntl, "flock", flock)
    with written_whole(tmp_path / "x") as partial:
        assert partial.parent != taken[0]
        partial.write_text("whole")
    assert (tmp_path / "x").read_text() == "whole" and os.listdir(tmp_path) == ["x"]


def test_where_there_are_no_locks_files_are_written_and_nothing_is_taken_for_a_leftover(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(descriptor: int, how: int) -> None:
        raise OSError(95, "Operation not supported")

    (tmp_path / f".x.{'0' * 32}.partial").mkdir()
    monkeypatch.setattr(whole_file.fcntl, "flock", flock)
    save_tree(tmp_path / "x", {"a": 1})
    assert load_tree(tmp_path / "x") == {"a": 1} and len(os.listdir(tmp_path)) == 2


# JSON that nests


DEPTHS = [*range(1, 30), json_text.MOST_NESTED, *range(900, 1010, 3), 5_000, 100_000]


@pytest.mark.parametrize(("key", "refusal", "read"), [
    ("sparsecomp", FormatError, SparseMatrix.load), ("sparsecomp.checkpoint", CheckpointError, load_tree),
])  # fmt: skip
def test_a_header_nested_to_any_depth_at_any_place_is_refused(
    key: str, refusal: type[Exception], read: Callable[[Path], Any], tmp_path: Path
) -> None:
    path = tmp_path / "file"
    good = {"version": 1, "tree": 0, "digest": "x", "format": "CSR", "shape": [1, 1], "layout": {}}
    for place in (*good, None):
        for depth in DEPTHS:
            deep = "[" * depth + "]" * depth
            parts = {name: json.dumps(value) for name, value in good.items()} | ({place: deep} if place else {})
            header = "{" + ", ".join(f'"{name}": {value}' for name, value in parts.items()) + "}"
            save_file({"a": torch.ones(1)}, path, {key: header if place else deep})
            with pytest.raises(refusal):
                read(path)


def test_tuning_results_nested_to_any_depth_at_any_place_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    good: dict[str, Any] = {"kind": KIND, "version": VERSION, "entries": [], "facts": []}
    for place in (*good, "other"):
        for depth in DEPTHS:
            deep = "[" * depth + "]" * depth
            parts = {name: json.dumps(value) for name, value in good.items()} | {place: deep}
            if (place, depth) not in {("entries", 1), ("facts", 1)}:
                path.write_text("{" + ", ".join(f'"{name}": {value}' for name, value in parts.items()) + "}")
                with pytest.raises(CacheError):
                    TuningCache(None).take(read_results(path))


def test_the_bound_on_nesting_is_exact() -> None:
    most = json_text.MOST_NESTED
    assert json_text.loads("[" * most + "]" * most) and json_text.loads("3") == 3
    for text in ("[" * (most + 1) + "]" * (most + 1), '{"a": ' * (most + 1) + "1" + "}" * (most + 1)):
        with pytest.raises(ValueError, match="nested"):
            json_text.loads(text)


def test_a_tree_that_nests_too_deep_or_in_itself_is_no_checkpoint(tmp_path: Path) -> None:
    tree: dict[str, Any] = {}
    for _ in range(100):
        tree = {"a": tree}
    save_tree(tmp_path / "run", tree)
    assert load_tree(tmp_path / "run") == tree
    around: list[Any] = []
    around.append(around)
    for bad in ({"a": tree}, {"a": around}):
        with pytest.raises(CheckpointError, match="nested more than 100 deep"):
            save_tree(tmp_path / "run", bad)


def test_a_key_of_a_lone_surrogate_comes_back(tmp_path: Path) -> None:
    save_tree(tmp_path / "run", {"\ud800": torch.ones(2)})
    assert torch.equal(load_tree(tmp_path / "run")["\ud800"], torch.ones(2))


# Databases that are nearly ours


FOREIGN = {
    "a constraint": "ALTER TABLE entries ADD COLUMN more INTEGER CHECK (more < 3)",
    "a trigger that fails": "CREATE TRIGGER t BEFORE INSERT ON entries BEGIN SELECT RAISE(ABORT, 'no'); END",
    "a trigger without end": "CREATE TRIGGER t AFTER INSERT ON entries BEGIN INSERT INTO meta"
    " WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT 'x', max(i) FROM n; END",
    "a view": "CREATE VIEW v AS SELECT * FROM entries",
    "an index": "CREATE UNIQUE INDEX i ON entries (op)",
    "another table": "CREATE TABLE t (x)",
    "no index": "DROP INDEX by_use",
}


def _altered(path: Path, *statements: str) -> None:
    cache = TuningCache(path)
    cache.put(SIGNATURE, times={"a": 1.0})
    cache.close()
    db = sqlite3.connect(path)
    for statement in statements:
        db.execute(statement)
    db.commit()
    db.close()


def _remade(change: Callable[[str], str]) -> list[str]:
    """Statements that make the tables of `entries` anew, with another definition."""
    table = (
        "CREATE TABLE entries (key TEXT PRIMARY KEY, op TEXT NOT NULL, body TEXT NOT NULL,"
        " used REAL NOT NULL, size INTEGER NOT NULL, crc INTEGER NOT NULL)"
    )
    made = change(table)
    assert made != table
    return ["ALTER TABLE entries RENAME TO old", made, "INSERT INTO entries SELECT * FROM old", "DROP TABLE old",
            "CREATE INDEX by_use ON entries (used, size)", "CREATE INDEX by_op ON entries (op, key)"]  # fmt: skip


REMADE = {
    "a check": _remade(lambda text: text.replace("op TEXT NOT NULL", "op TEXT NOT NULL CHECK (length(op) < 4)")),
    "no key": _remade(lambda text: text.replace(" PRIMARY KEY", "")),
    "unique operations": _remade(lambda text: text.replace("op TEXT NOT NULL", "op TEXT NOT NULL UNIQUE")),
    "a collation": _remade(lambda text: text.replace("key TEXT", "key TEXT COLLATE NOCASE")),
    "no rowid": _remade(lambda text: f"{text} WITHOUT ROWID"),
}


@pytest.mark.parametrize("kind", [*FOREIGN, *REMADE])
def test_a_database_with_rules_of_others_is_set_aside_and_not_imported(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "tuning.sqlite"
    _altered(path, *([FOREIGN[kind]] if kind in FOREIGN else REMADE[kind]))
    with pytest.raises(CacheError, match="no readable database"):
        TuningCache(None).take(read_results(path))
    cache = TuningCache(path)
    with pytest.warns(CacheWarning, match="begun anew"):
        cache.put(SIGNATURE, times={"b": 2.0})
    entry = TuningCache(path).get(SIGNATURE)
    assert entry is not None and entry.times == {"b": 2.0}


def test_statistics_that_a_user_had_sqlite_gather_do_no_harm(tmp_path: Path) -> None:
    _altered(tmp_path / "tuning.sqlite", "ANALYZE")
    assert TuningCache(None).take(read_results(tmp_path / "tuning.sqlite")) == 1
    assert TuningCache(tmp_path / "tuning.sqlite").get(SIGNATURE) is not None


VALUES = ["NULL", "''", "x'ff'", "CAST(x'ff' AS TEXT)", "5", "-1", "9e999", "'9e999'", "9223372036854775807", "1.5"]


@pytest.mark.parametrize("column", ["key", "op", "body", "used", "size", "crc"])
def test_rows_of_any_values_are_misses_and_can_be_evicted(column: str, tmp_path: Path) -> None:
    for value in VALUES:
        path = tmp_path / f"{VALUES.index(value)}.sqlite"
        _altered(path, f"UPDATE OR IGNORE entries SET {column} = {value}")
        cache = TuningCache(path, max_entries=1)
        assert (column in ("used", "size", "op")) == (cache.get(SIGNATURE) is not None) or value == "NULL"
        assert cache.stats().entries == 1 and len(list(cache.entries())) <= 1
        cache.explain_miss(SIGNATURE)
        cache.prune(SIGNATURE.device)
        time.sleep(0.01)  # a later time of use
        other = KernelSignature("other", SIGNATURE.device, dtypes=("float32",), accumulator="float32")
        cache.put(other, times={"b": 1.0})
        assert cache.stats().entries == 1, value
        cache.export(tmp_path / "x.json")
        cache.clear()
        assert cache.stats().entries == 0
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            cache.close()


def test_a_thousand_keys_that_are_no_text_end(tmp_path: Path) -> None:
    path = tmp_path / "tuning.sqlite"
    rows = " WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 2500)"
    _altered(path, f"INSERT INTO entries{rows} SELECT CAST(x'ff' || i AS TEXT), 'x', '', 0, 0, 0 FROM n")
    assert [entry.times for entry in TuningCache(path).entries()] == [{"a": 1.0}]
    assert TuningCache(path).stats().entries == 2501
