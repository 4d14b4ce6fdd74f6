"""The imports keep to the floors of ARCHITECTURE.md, and packages form no circle."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import networkx
import pytest
from package_modules import ROOT, modules


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports() -> list[tuple[str, str]]:
    """Modules of ours, each with one of ours that its file names, wherever it does."""
    known, found = modules(), []
    for module, path in known.items():
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "sparsecomp":
                full = [f"{node.module}.{one.name}" for one in node.names]
                found += [(module, name if name in known else str(node.module)) for name in full]
            elif isinstance(node, ast.Import):
                found += [(module, one.name) for one in node.names if one.name.split(".")[0] == "sparsecomp"]
    return found


def graph(package_of) -> networkx.DiGraph:
    """Which package imports which, packages being what `package_of` calls a module's."""
    found = networkx.DiGraph()
    for module, other in imports():
        if module != "sparsecomp" and other != "sparsecomp" and package_of(module) != package_of(other):
            found.add_edge(package_of(module), package_of(other), example=f"{module} imports {other}")
    return found


def floor_of(module: str) -> str:
    return module.split(".")[1]


def floors() -> dict[str, int]:
    """Height of each package, from the document."""
    table = (ROOT / "ARCHITECTURE.md").read_text().split("| --- | --- |\n")[1].split("\n\n")[0].splitlines()
    rows = [re.findall(r"`(\w+)`", line.split("|")[1]) for line in table]
    return {name: len(rows) - height for height, names in enumerate(rows) for name in names}


def test_every_package_has_a_floor() -> None:
    assert {floor_of(module) for module in modules() if module != "sparsecomp"} == set(floors())


def test_no_floor_imports_one_above_it() -> None:
    height = floors()
    upwards = [data["example"] for one, other, data in graph(floor_of).edges(data=True) if height[one] < height[other]]
    assert upwards == []


def test_packages_form_no_circle() -> None:
    assert list(networkx.simple_cycles(graph(floor_of))) == []


@pytest.mark.parametrize("floor", ["passes", "lowering", "ops", "nn", "training"])
def test_rooms_form_no_circle(floor: str) -> None:
    rooms = graph(lambda module: ".".join(module.split(".")[:3]))
    inside = rooms.subgraph([room for room in rooms if room.split(".")[1] == floor])
    assert [cycle for cycle in networkx.simple_cycles(inside)] == []


SHARED = {
    "consider": "of every rule", "decide": "whether a room's rewrites pay", "compare": "the same, for a given card",
    "multiply": "of a format's `Launcher`", "problem_of": "of a format's `Launcher`", "operations": "of a `Launcher`",
    "csr_matrix": "of a format's `Launcher`",
    "NM": "the format, and what `sparsify` makes of a layer", "merge": "public in `cache`, and of reports",
}  # fmt: skip
"""Public names that several modules define, and what they mean everywhere. An operator's launcher has its name, too."""


def test_no_public_name_is_there_twice() -> None:
    homes: dict[str, set[str]] = {}
    for module, path in modules().items():
        for node in tree(path).body if ".facts.transfer." not in module else ():  # called by a table
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                in_room = module.split(".", 2)[-1] if floor_of(module) in ("ops", "lowering") else module
                homes.setdefault(node.name, set()).add(in_room)
    assert {name: found for name, found in homes.items() if len(found) > 1 and name not in SHARED} == {}


FOREIGN = {
    "_version": "torch counts a tensor's writes in it", "_parameters": "torch keeps a module's parameters in it",
    "_inductor": "a module of torch", "_as_parameter_": "ctypes passes it", "_repr_html_": "notebooks call it",
}  # fmt: skip
"""Names that our sources write, too, but that others give a meaning."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_" and name not in FOREIGN


def private_names() -> set[str]:
    """What our sources define under a name of one underscore."""
    found: set[str] = set()
    for path in [*modules().values(), *(ROOT / "bench").rglob("*.py")]:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.id if isinstance(node, ast.Name) else node.attr)
    return set(filter(is_private, found))


def names_read(text: str) -> Iterator[tuple[int, str]]:
    """Line and name of attributes of others that a test reads, by name too, and of what it imports of ours."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and not (isinstance(node.value, ast.Name) and node.value.id == "self"):
            yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("sparsecomp.", "bench.")):
            yield from ((node.lineno, one.name) for one in node.names)
        elif isinstance(node, ast.Call | ast.Subscript):
            given = node.args if isinstance(node, ast.Call) else [node.slice]
            texts = [one.value for one in given if isinstance(one, ast.Constant)]
            yield from ((node.lineno, text) for text in texts if isinstance(text, str))


def test_tests_read_nothing_private() -> None:
    ours = private_names()
    texts = {path.relative_to(ROOT): path.read_text() for path in (ROOT / "tests").rglob("*.py")}
    read = [
        f"{path}:{line} {name}" for path, text in texts.items()
        if not ours.isdisjoint(re.findall(r"\b_\w+", text))  # few need to be parsed
        for line, name in names_read(text) if name in ours
    ]  # fmt: skip
    assert len(ours) > 500
    assert not read, "\n".join(read)


def test_every_path_of_the_document_is_there() -> None:
    quoted = re.findall(r"`([\w./*-]+)`", (ROOT / "ARCHITECTURE.md").read_text())
    paths = [text for text in quoted if "/" in text or text.endswith((".py", ".md", ".toml", ".json"))]
    assert len(paths) > 40
    assert not [path for path in paths if not any(any(folder.glob(path)) for folder in (ROOT, ROOT / "sparsecomp"))]


def test_a_source_tree_needs_no_installation(tmp_path: Path) -> None:
    for name in ("sparsecomp", "passes", "lowering", "pyproject.toml"):
        (tmp_path / name).symlink_to(ROOT / name)
    question = "import sparsecomp.passes, sparsecomp.lowering; print(sparsecomp.lowering.__file__)"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", question]
    found = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert found.stdout.strip().startswith(str(tmp_path)), found.stderr
