"""What the tests would not notice: `python -m tests.mutate --package passes --count 100 --seed 0`.

Makes one small change at a time at a random place of the package's code (a comparison turned, a condition removed, a
number moved by one, an operator swapped), runs the tests that read that file, and says which changes they did not
notice. A copy of the source tree is changed, never the tree itself. Some changes are equivalent: they change nothing
that can be observed. Those are for a person to judge.
"""

import argparse
import ast
import collections
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {"passes": "passes", "lowering": "lowering", "ops": "sparsecomp/ops", "formats": "sparsecomp/formats",
            "nn": "sparsecomp/nn", "runtime": "sparsecomp/runtime", "sparsecomp": "sparsecomp"}  # fmt: skip
SECONDS = 400
"""A run of the tests of one file; what takes longer counts as noticed, as an endless loop would be."""
COMPARISONS = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.Is: "is not",
    ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
ARITHMETIC = {ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "*", ast.Pow: "*"}
ALWAYS = {"passes": ["test_vocabulary", "test_facts", "test_transfer_table", "test_analysis", "test_fuzz"]}
"""Tests that judge a whole package, whichever file is changed; the slowest last."""


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
    """Every change that can be made on one line of a file."""
    text = path.read_text()
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        for target, new in _changes(node, text):
            if target.lineno != target.end_lineno:
                continue
            line = lines[target.lineno - 1].encode()
            old = line[target.col_offset : target.end_col_offset].decode()
            mutation = Mutation(path, target.lineno, target.col_offset, target.end_col_offset, old, new)
            if new != old and _compiles(mutation.applied(text)):
                yield mutation


def _changes(node: ast.AST, text: str) -> Iterator[tuple[ast.expr, str]]:
    def source(part: ast.AST) -> str:
        return ast.get_source_segment(text, part) or ""

    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        yield node, f"{source(node.left)} {COMPARISONS[type(node.ops[0])]} {source(node.comparators[0])}"
    elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC and not isinstance(node.left, ast.JoinedStr):
        yield node, f"{source(node.left)} {ARITHMETIC[type(node.op)]} {source(node.right)}"
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


def _compiles(text: str) -> bool:
    try:
        compile(text, "mutated", "exec")
    except SyntaxError:
        return False
    return True


def tests_of(path: Path, package: str) -> list[str]:
    """The test files that judge the whole package, and a few that name the module."""
    name = path.stem
    word = re.compile(rf"\b(test_)?{re.escape(name)}\b")
    found = [test for test in sorted((ROOT / "tests").glob("test_*.py")) if word.search(test.read_text())]
    always = [ROOT / "tests" / f"{stem}.py" for stem in ALWAYS.get(package, [])]
    related = sorted(found, key=lambda test: (name not in test.stem, len(test.read_text())))[:3]
    return [str(test.relative_to(ROOT)) for test in dict.fromkeys([*always[:-1], *related, *always[-1:]])]


def copied(folder: Path) -> Path:
    """A copy of the tree that Python imports before any installed sparsecomp."""
    copy = folder / "copy"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", "__pycache__", "build", "*.egg-info"))
    for package in ("passes", "lowering"):  # where an installed sparsecomp has them
        (copy / "sparsecomp" / package).symlink_to(copy / package)
    question = "import sparsecomp.passes, sparsecomp.lowering; print(sparsecomp.passes.__file__)"
    found = subprocess.run([sys.executable, "-c", question], cwd=copy, env=_environment(copy), capture_output=True)
    if str(copy) not in found.stdout.decode():
        raise SystemExit(f"tests would not run on the copy, but on {found.stdout.decode()}{found.stderr.decode()}")
    return copy


def _environment(copy: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}


def is_noticed(mutation: Mutation, copy: Path, tests: list[str]) -> bool:
    """Whether a test fails with the change."""
    place = copy / mutation.path.relative_to(ROOT)
    before = place.read_text()
    place.write_text(mutation.applied(before))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    try:
        done = subprocess.run(command, cwd=copy, env=_environment(copy), capture_output=True, timeout=SECONDS)
        return done.returncode != 0
    except subprocess.TimeoutExpired:
        return True
    finally:
        place.write_text(before)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutate", description=__doc__)
    parser.add_argument("--package", choices=[*PACKAGES, "all"], default="all")
    parser.add_argument("--count", type=int, default=20, help="changes to make")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    names = list(PACKAGES)[:-1] if options.package == "all" else [options.package]
    files = [(name, path) for name in names for path in sorted((ROOT / PACKAGES[name]).rglob("*.py"))]
    places = [(name, mutation) for name, path in files for mutation in mutations(path)]
    chosen = random.Random(options.seed).sample(places, min(options.count, len(places)))
    made, noticed = collections.Counter(), collections.Counter()
    with tempfile.TemporaryDirectory() as folder:
        copy = copied(Path(folder))
        for name, mutation in chosen:
            killed = is_noticed(mutation, copy, tests_of(mutation.path, name))
            made[name] += 1
            noticed[name] += killed
            print(f"| {'killed' if killed else '**survived**'} | {mutation} |", flush=True)
    print("\n| package | changes | noticed |\n|---|---|---|")
    for name in made:
        print(f"| {name} | {made[name]} | {noticed[name]} ({noticed[name] / made[name]:.0%}) |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
