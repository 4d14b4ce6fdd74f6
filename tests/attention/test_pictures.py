"""The page's pictures are what its patterns look like."""

import re
from pathlib import Path

import pytest

from sparsecomp import attention

PAGE = (Path(__file__).parents[2] / "docs" / "attention.md").read_text()
PICTURES = re.findall(r"^`(.+?)`: .+\n\n((?:    [+|].*\n)+)", PAGE, re.M)


def test_there_are_pictures() -> None:
    assert len(PICTURES) >= 10


@pytest.mark.parametrize(("pattern", "picture"), PICTURES, ids=[pattern for pattern, _ in PICTURES])
def test_a_picture_is_that_of_its_pattern(pattern: str, picture: str) -> None:
    drawn = eval(pattern, dict(vars(attention))).spy(48, width=24)
    assert drawn.splitlines() == [line.removeprefix("    ") for line in picture.splitlines()]
