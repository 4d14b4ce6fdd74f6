"""The pages build without a warning: links between them, headings and names in docstrings are there."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow(reason="builds all pages")
def test_the_pages_build_without_a_warning(tmp_path: Path) -> None:
    for name in ("sphinx", "myst_parser", "furo"):
        pytest.importorskip(name, reason="the extra `docs` is not installed")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html"]
    folders = ["-d", str(tmp_path / "trees"), "docs", str(tmp_path / "html")]
    done = subprocess.run([*command, *folders], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    names = (tmp_path / "html" / "api.html").read_text()
    for name in ("sparsecomp.sparsify", "sparsecomp.nn.SparseLinear", "sparsecomp.runtime.RESUTrainer"):
        assert name.rpartition(".")[2] in names
