"""Each example runs as a user runs it, and holds what it claims."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.slow(reason="trains and compiles")
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(example: Path, tmp_path: Path) -> None:
    if "scikit-learn" in example.read_text() and find_spec("sklearn") is None:
        pytest.skip("scikit-learn is not installed")
    given = {key: value for key, value in os.environ.items() if not key.startswith(("SPARSECOMP_", "TRITON_INTERPRET"))}
    environment = given | {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), given.get("PYTHONPATH"))))}
    command = [sys.executable, str(example)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    if done.stdout.startswith("skipped"):
        pytest.skip(done.stdout.strip())
    assert done.stdout.strip()
