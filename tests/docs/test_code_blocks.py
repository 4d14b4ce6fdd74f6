"""Every block of code in README.md and docs/ runs, in the order of its page, in an empty folder.

Commands that install, or that measure on a GPU, are for `.ci/run` and for people.
"""

import re
import shlex
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from sparsecomp import cli

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_NEEDS = {"generation.md": "transformers", "local.md": "sklearn", "masked.md": "sklearn"}
_NO_CODE = {"{toctree}", "{include}", "{literalinclude}", "{eval-rst}"}


class Block(NamedTuple):
    """A fenced block of a page."""

    language: str
    code: str


def blocks(page: Path) -> list[Block]:
    """All of them, with what stands behind the fence."""
    found = re.findall(r"^```(\S*).*?\n(.*?)^```$", page.read_text(), re.M | re.S)
    return [Block(language, code) for language, code in found if language not in _NO_CODE]


def test_nothing_else_is_fenced() -> None:
    assert {block.language for page in PAGES for block in blocks(page)} == {"python", "bash"}


@pytest.mark.slow(reason="compiles models")
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.name)
@pytest.mark.usefixtures("one_thread")
def test_the_blocks_of_a_page_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if page.name in _NEEDS:
        pytest.importorskip(_NEEDS[page.name], reason=f"the code of {page.name} imports {_NEEDS[page.name]}")
    monkeypatch.chdir(tmp_path)
    torch.compiler.reset()  # other tests may have taken nn.Sequential's forward to Dynamo's limit of compilations
    torch.manual_seed(0)
    names: dict[str, Any] = {"__name__": "page"}
    for block in blocks(page):
        if block.language == "python":
            exec(compile(block.code, page.name, "exec"), names)
        else:
            for line in block.code.splitlines():
                if line.startswith("sparsecomp "):
                    assert cli.main(shlex.split(line)[1:]) == 0
