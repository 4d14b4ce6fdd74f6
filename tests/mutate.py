"""What the tests would not notice: `python -m tests.mutate --count 100 --seed 0 [--package passes]`.

Makes one small change at a time at a random place of the package's code (a comparison turned, a condition removed, a
number moved by one, an operator swapped), runs the tests that call its function, and says which changes they did not
notice. A copy of the source tree is changed, never the tree itself. Some changes are equivalent: they change nothing
that can be observed. Those are for a person to judge.

Which tests call a function is read from a map, which `python -m tests.mutate --make-map` writes once, in little more
than the quick run takes. The map is of the quick run; what that does not notice is left to the other cases of the
tests that call the function, unless `--quick` is given. Without a map, and for what no test was seen to call (code
that Dynamo traces or another process runs), the test files that name the module judge.
"""

import argparse
import ast
import collections
import cProfile
import functools
import importlib
import itertools
import json
import os
import queue
import random
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Container, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
_ONE_FORK = threading.Lock()
"""Libraries that guard what they hold against a fork (filelock) refuse two at once."""
_INNER = ("compiler", "files", "formats", "nn", "ops", "reference", "snn", "tensor", "training")
PACKAGES = {"passes": "passes", "lowering": "lowering", **{name: f"sparsecomp/{name}" for name in _INNER},
            "sparsecomp": "sparsecomp"}  # fmt: skip
FIRST, ALL = 10.0, 60.0
"""Seconds of the fastest tests, which run first and where most changes fall, and of each list that follows."""
LIMIT = 400.0
"""Seconds for a file's tests; what takes longer counts as noticed, as an endless loop would be."""
COMPARISONS = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.Is: "is not",
    ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
ARITHMETIC = {ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "*", ast.Pow: "*"}


@dataclass(frozen=True)
class Mutation:
    """One change: the source text between two places of a line becomes another."""

    path: Path
    line: int
    start: int
    end: int
    old: str
    new: str

    def applied(self, text: str) -> str:
        lines = text.splitlines(keepends=True)
        line = lines[self.line - 1].encode()
        lines[self.line - 1] = (line[: self.start] + self.new.encode() + line[self.end :]).decode()
        return "".join(lines)

    def __str__(self) -> str:
        return f"`{self.path.relative_to(ROOT)}:{self.line}` | `{self.old}` → `{self.new}`"


def mutations(path: Path) -> Iterator[Mutation]:
    """Every change on one line of a file; a few of them `_compiles` refuses."""
    text = path.read_text()
    lines = text.splitlines()
    tree = ast.parse(text)
    # a check of zip's, which code that is right passes with or without
    checks = {one.value for one in ast.walk(tree) if isinstance(one, ast.keyword) and one.arg == "strict"}
    for node in ast.walk(tree):
        for target, new in [] if node in checks else _changes(node, text):
            if target.lineno != target.end_lineno:
                continue
            line = lines[target.lineno - 1].encode()
            old = line[target.col_offset : target.end_col_offset].decode()
            mutation = Mutation(path, target.lineno, target.col_offset, target.end_col_offset, old, new)
            if new != old:
                yield mutation


def _changes(node: ast.AST, text: str) -> Iterator[tuple[ast.expr, str]]:
    def source(part: ast.AST) -> str:
        return ast.get_source_segment(text, part) or ""

    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        yield node, f"({source(node.left)}) {COMPARISONS[type(node.ops[0])]} ({source(node.comparators[0])})"
    elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC and not isinstance(node.left, ast.JoinedStr):
        yield node, f"({source(node.left)}) {ARITHMETIC[type(node.op)]} ({source(node.right)})"
    elif isinstance(node, ast.BoolOp):
        word = " and " if isinstance(node.op, ast.And) else " or "
        for left_out in node.values:
            yield node, word.join(f"({source(value)})" for value in node.values if value is not left_out)
    elif isinstance(node, ast.IfExp):
        yield node, source(node.body)
        yield node, source(node.orelse)
    elif isinstance(node, ast.If | ast.While):
        yield node.test, f"not ({source(node.test)})"
        yield node.test, "False"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node, source(node.operand)
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield node, str(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield node, str(node.value + 1)


def _compiles(mutation: Mutation) -> bool:
    try:
        compile(mutation.applied(mutation.path.read_text()), "mutated", "exec")
    except SyntaxError:
        return False
    return True


@dataclass(frozen=True)
class Map:
    """Which tests call a function, by its file and its first line, and the seconds that each takes."""

    seconds: dict[str, float]
    functions: dict[str, dict[int, list[str]]]

    def calling(self, mutation: Mutation) -> set[str]:
        """The tests that call the innermost function around a change."""
        called = self.functions.get(str(mutation.path.relative_to(ROOT)), {})
        return {test for line in _first_lines(mutation) for test in called.get(line, ())}

    def tests_of(self, mutation: Mutation) -> list[str]:
        """`calling`, or, outside of functions, the tests that call any function of the file; fastest first."""
        called = self.functions.get(str(mutation.path.relative_to(ROOT)), {})
        found = self.calling(mutation) or {test for tests in called.values() for test in tests}
        return sorted(found, key=lambda test: self.seconds[test])


def _first_lines(mutation: Mutation) -> range:
    """The lines from the first decorator to the body of the innermost function around a change; none outside of one.

    Python calls a function by its first decorator's line, Triton's interpreter by that of its `def`.
    """
    found = range(0)
    for node in ast.walk(ast.parse(mutation.path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[0].lineno
            if body <= mutation.line <= (node.end_lineno or body):
                found = range(min(one.lineno for one in (node, *node.decorator_list)), max(body, node.lineno + 1))
    return found


def named_tests(path: Path) -> list[str]:
    """Four test files that are named after the module, import it or say what it defines, or one that imports it.

    The module's own come first, then those of its room, and a name says more than an import. A part of a rule that has
    none of its own is also judged by its room's tests of rules.
    """
    rules = path.is_relative_to(ROOT / "passes")  # what they define, no test calls
    defined = [] if rules else re.findall(r"^(?:def|class) ([A-Za-z]\w+)", path.read_text(), re.MULTILINE)
    says = re.compile(rf"\b({'|'.join(defined)})\b" if defined else "$^")
    nearness: dict[Path, tuple[bool, bool, bool, bool, int]] = {}
    for module in (path, *_importing(path)):
        for test in (ROOT / "tests").rglob("test_*.py"):
            elsewhere = test.parent.name not in path.parts
            names = {module.stem, module.parent.name} - {test.parent.name}
            named = test.stem == f"test_{module.stem}" or (
                not elsewhere and any(f"_{name}_" in f"{test.stem}_" for name in names)
            )
            imports = _imports(test, module)
            if named or imports or (module == path and says.search(test.read_text())):
                near = module != path, elsewhere, not named, not imports, test.stat().st_size
                nearness[test] = min(near, nearness.get(test, near))
    found = sorted(nearness, key=lambda test: nearness[test])[:4]
    if rules and all(nearness[test][0] for test in found):
        found += [test for test in (ROOT / "tests" / path.parent.name).glob("test_rule_*.py") if test not in found]
    return [str(test.relative_to(ROOT)) for test in found]


def _importing(path: Path) -> list[Path]:
    """The package's modules that import a module."""
    folders = (ROOT / "passes", ROOT / "lowering", ROOT / "sparsecomp")
    return [source for folder in folders for source in folder.rglob("*.py") if _imports(source, path)]


def _imports(importing: Path, module: Path) -> bool:
    name = rf"{re.escape(module.stem)}\b"
    imported = rf"\.{re.escape(module.parent.name)}(\.{name}| import [^\n]*\b{name}| import \([^)]*\b{name})"
    return re.search(imported, importing.read_text()) is not None


def copied(folder: Path) -> Path:
    """A copy of the tree that Python imports before any installed sparsecomp."""
    copy = folder / "copy"

    def left_out(folder: str, names: list[str]) -> list[str]:
        needless = {".git", "__pycache__", "build", ".hypothesis"}
        return [name for name in names if name in needless or (Path(folder) / name).is_symlink()]

    shutil.copytree(ROOT, copy, ignore=left_out)
    return copy


def forked(copy: Path, work: Callable[[], int], limit: float) -> int | None:
    """What `work` returns in a process that has the copy's sparsecomp before it; None past the limit of seconds."""
    with _ONE_FORK:
        child = os.fork()
    if child == 0:
        status = 3
        try:
            _enter(copy)
            status = work()
        finally:
            os._exit(status)
    end = time.monotonic() + limit
    while time.monotonic() < end:
        if (done := os.waitpid(child, os.WNOHANG))[0]:
            return os.waitstatus_to_exitcode(done[1])
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def _enter(copy: Path) -> None:
    os.setsid()
    os.chdir(copy)
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nothing, stream)
    sys.path[:] = [str(copy), *(place for place in sys.path if Path(place or ".").resolve() != ROOT)]
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "bench", "sparsecomp")]:
        del sys.modules[name]
    os.environ.update(PYTHONPATH=str(copy), PYTHONDONTWRITEBYTECODE="1", OMP_NUM_THREADS="1")


def prepare() -> None:
    """Imports once, for all forks, what takes seconds and is not ours; Triton's interpreter as the tests have it."""
    sys.path.insert(0, str(ROOT / "tests"))  # where pytest looks for what tests share
    for name in ("tests.conftest", "torch._inductor.compile_fx", "scipy.sparse", "hypothesis"):
        importlib.import_module(name)


def is_noticed(mutation: Mutation, copy: Path, known: Map | None, quick: bool) -> bool:
    """Whether a test fails with the change."""
    place = copy / mutation.path.relative_to(ROOT)
    before, times = place.read_text(), place.stat()
    place.write_text(mutation.applied(before))
    try:
        return (
            any(_fails(copy, tests) for tests in _rounds(mutation, known))
            or (known is not None and _fails(copy, named_tests(mutation.path), known.seconds))
            or any(
                _fails(copy, tests, marks="slow", too_long=False)
                for tests in ([] if quick else _slow_cases(mutation, known))
            )
        )
    finally:
        place.write_text(before)
        os.utime(place, (times.st_atime, times.st_mtime))


def _fails(
    copy: Path, tests: list[str], left_out: Container[str] = (), marks: str = "not slow", too_long: bool = True
) -> bool:
    """Whether a test fails, or all take longer than the limit: an endless loop, unless they may take so long.

    Args:
        left_out: what the map knows, where those are asked that are newer.
    """
    files = sorted({file for test in tests if (copy / (file := test.partition("::")[0])).exists()})
    if not files:
        return False
    arguments = ["-q", "-x", "-p", "no:cacheprovider", "-m", marks, *files]
    status = forked(copy, lambda: int(pytest.main(arguments, plugins=[Asked(tests, left_out)])), LIMIT)
    return too_long if status is None else status not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)


class Asked:
    """A plug-in of pytest that keeps the tests asked for, in their order: a map may name some that are gone.

    Args:
        tests: tests, functions with all their cases, or whole files.
        left_out: tests that do not run.
    """

    def __init__(self, tests: list[str], left_out: Container[str]) -> None:
        self.places = {test: place for place, test in enumerate(tests)}
        self.left_out = left_out

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        placed = [(self._place(item.nodeid), item) for item in items if item.nodeid not in self.left_out]
        items[:] = [item for _, item in sorted((one for one in placed if one[0] >= 0), key=lambda one: one[0])]

    def _place(self, test: str) -> int:
        names = (test, test.partition("[")[0], test.partition("::")[0])
        return next((self.places[name] for name in names if name in self.places), -1)


def _rounds(mutation: Mutation, known: Map | None) -> Iterator[list[str]]:
    """Lists of tests to run one after another: the fastest, those of files that name the module, and all others."""
    named = named_tests(mutation.path)
    tests = known.tests_of(mutation) if known else []
    if not known or not tests:
        yield named
        return
    about = [test for test in tests if test.partition("::")[0] in named]
    tried: set[str] = set()
    for several, most in ((tests, FIRST), (about, ALL), (tests, ALL)):
        spent = itertools.accumulate(known.seconds[test] for test in several)
        chosen = [
            test for test, sum_so_far in zip(several, spent, strict=True) if sum_so_far <= most or test == several[0]
        ]
        left = [test for test in chosen if test not in tried]
        tried.update(left)
        if left:
            yield left


def _slow_cases(mutation: Mutation, known: Map | None) -> Iterator[list[str]]:
    """The tests that call the changed function, whose other cases are not in the quick run: one file at a time.

    Files that name the module come first, and no more than three are asked.
    """
    tests = known.tests_of(mutation) if known else []
    functions = sorted({test.partition("[")[0] for test in tests if "[" in test})
    files = {name: list(group) for name, group in itertools.groupby(functions, lambda test: test.partition("::")[0])}
    named = named_tests(mutation.path)
    yield from [files[name] for name in sorted(files, key=lambda name: (name not in named, -len(files[name])))][:3]


class Recorder:
    """A plug-in of pytest that keeps which functions below a folder each test calls, and the seconds it takes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seconds: dict[str, float] = {}
        self.functions: dict[str, dict[int, list[str]]] = collections.defaultdict(lambda: collections.defaultdict(list))
        self.failed: set[str] = set()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        profile = cProfile.Profile(subcalls=False, builtins=False)
        start = time.monotonic()
        profile.enable()
        yield
        profile.disable()
        seconds = time.monotonic() - start
        if item.nodeid in self.failed:
            return
        self.seconds[item.nodeid] = seconds
        for entry in profile.getstats():
            path = Path(entry.code.co_filename) if isinstance(entry.code, types.CodeType) else Path()
            if path.is_relative_to(self.folder) and not path.is_relative_to(self.folder / "tests"):
                self.functions[str(path.relative_to(self.folder))][entry.code.co_firstlineno].append(item.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome != "passed":
            self.failed.add(report.nodeid)


def _recorded(test_file: str, into: Path) -> int:
    """Runs a file's tests and writes which functions each calls."""
    recorder = Recorder(Path.cwd())
    pytest.main(["-q", "-p", "no:cacheprovider", test_file], plugins=[recorder])
    into.write_text(json.dumps({"seconds": recorder.seconds, "functions": recorder.functions}))
    return 0


def make_map(copy: Path, test_files: Iterable[str], folder: Path, jobs: int) -> None:
    """Writes a file for each test file; those that are there already stay."""
    folder.mkdir(parents=True, exist_ok=True)

    def one(test_file: str) -> None:
        into = folder / f"{Path(test_file).stem}.json"
        start = time.monotonic()
        if not into.exists():
            status = forked(copy, functools.partial(_recorded, test_file, into), 3 * LIMIT)
            print(f"{test_file}: {status}, {time.monotonic() - start:.0f} s", flush=True)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(one, test_files))


def read_map(folder: Path) -> Map | None:
    """What `make_map` wrote; None where nothing was."""
    seconds, functions = {}, collections.defaultdict(lambda: collections.defaultdict(list))
    for part in sorted(folder.glob("test_*.json")):
        read = json.loads(part.read_text())
        seconds.update(read["seconds"])
        for path, places in read["functions"].items():
            for line, tests in places.items():
                functions[path][int(line)] += tests
    return Map(seconds, functions) if seconds else None


def chosen(package: str, count: int, seed: int) -> list[tuple[str, Mutation]]:
    """A random sample of all changes that can be made, each with its package's name."""
    names = list(PACKAGES) if package == "all" else [package]
    folders = [(name, ROOT / PACKAGES[name]) for name in names]
    files = [(name, path) for name, folder in folders
             for path in sorted(folder.glob("*.py") if name == "sparsecomp" else folder.rglob("*.py"))]  # fmt: skip
    places = [(name, mutation) for name, path in files for mutation in mutations(path)]
    random.Random(seed).shuffle(places)
    return list(itertools.islice((place for place in places if _compiles(place[1])), count))


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--package", choices=[*PACKAGES, "all"], default="all")
    parser.add_argument("--count", type=int, default=20, help="changes to make")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--map", type=Path, default=Path(tempfile.gettempdir()) / "sparsecomp-tests-map", help="folder of the map"
    )
    parser.add_argument(
        "--make-map", nargs="*", metavar="TEST_FILE", help="write the map; of all test files or of these"
    )
    parser.add_argument("--quick", action="store_true", help="leave out the cases that are slow")
    parser.add_argument("--jobs", type=int, default=1, help="processes that run tests side by side")
    options = parser.parse_args()
    prepare()
    with tempfile.TemporaryDirectory() as folder:
        if options.make_map is not None:
            every = sorted(str(test.relative_to(ROOT)) for test in (ROOT / "tests").rglob("test_*.py"))
            make_map(copied(Path(folder)), options.make_map or every, options.map, options.jobs)
            return 0
        copies = [copied(Path(folder) / str(job)) for job in range(options.jobs)]
        judge(chosen(options.package, options.count, options.seed), copies, read_map(options.map), options.quick)
    return 0


def judge(sample: list[tuple[str, Mutation]], copies: list[Path], known: Map | None, quick: bool) -> None:
    """Prints each change with what became of it, then the table by package; no test calls what is `unseen`.

    Each copy of the tree holds one change at a time.
    """
    made, noticed = collections.Counter(), collections.Counter()
    free: queue.SimpleQueue[Path] = queue.SimpleQueue()
    for copy in copies:
        free.put(copy)

    def one(change: tuple[str, Mutation]) -> None:
        name, mutation = change
        copy = free.get()
        killed = is_noticed(mutation, copy, known, quick)
        free.put(copy)
        made[name] += 1
        noticed[name] += killed
        unseen = known is not None and not killed and _first_lines(mutation) and not known.calling(mutation)
        print(f"| {'killed' if killed else '**survived**'}{' unseen' * bool(unseen)} | {mutation} |", flush=True)

    with ThreadPoolExecutor(len(copies)) as pool:
        list(pool.map(one, sample))
    print("\n| package | changes | noticed |\n|---|---|---|")
    for name in made:
        print(f"| {name} | {made[name]} | {noticed[name]} ({noticed[name] / made[name]:.0%}) |")


if __name__ == "__main__":
    sys.exit(main())
