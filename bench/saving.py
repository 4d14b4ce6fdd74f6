"""Results as JSON, a row a line for those who compare two files, with the machine that gave them."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench.timing import machine


def save(path: Path, result: object, **more: object) -> None:
    """Write what is measured so far, with the machine and whatever else a reader has to know."""
    rows = result if isinstance(result, list) else [result]
    lines = ",\n".join(json.dumps(row) for row in rows)
    found = f"[\n{lines}\n]" if isinstance(result, list) else lines
    beside = "".join(f"{json.dumps(name)}: {json.dumps(value)}, " for name, value in more.items())
    path.write_text(f'{{"machine": {json.dumps(machine())}, {beside}"result": {found}}}\n')


def save_each(path: Path, rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """All rows, of which those that there are lie in the file while others are measured.

    A row may come again when more is known of it.
    """
    found: list[dict[str, Any]] = []
    for row in rows:
        if row not in found:
            found.append(row)
        save(path, found)
    return found


def save_last(path: Path, rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The one row that comes again and again; the file holds it alone, not in a list."""
    last: dict[str, Any] = {}
    for last in rows:
        save(path, last)
    return [last]


def known(path: Path) -> list[dict[str, Any]]:
    """Rows of a file, to go on from; none if there is no file, or another machine wrote it."""
    if not path.exists():
        return []
    found = json.loads(path.read_text())
    if found["machine"] != machine():
        print(f"{path} is of another machine, {found['machine']}: it is made anew", flush=True)
        return []
    return found["result"]
