"""Tuning results travel with torch's compilation artifacts, and are checked on arrival."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sparsecomp import _compat
from sparsecomp.lowering.cache import artifact
from sparsecomp.lowering.cache.signature import Device, KernelSignature
from sparsecomp.lowering.cache.tuning_cache import CacheWarning, TuningCache, default_cache, observers

H100 = Device("NVIDIA H100 80GB HBM3", "9.0", "3.6.0")


def signature(size: int) -> KernelSignature:
    return KernelSignature("binary_conv", H100, ("int8", "float32"), sizes=(("pixels", size),))


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("SPARSECOMP_CACHE_DIR", str(tmp_path / "first"))
    known = list(observers)
    yield tmp_path
    observers[:] = known


def saved() -> bytes:
    artifacts = torch.compiler.save_cache_artifacts()
    assert artifacts is not None
    return artifacts[0]


@pytest.mark.skipif(not artifact.install(), reason="this torch takes no artifacts of others")
def test_used_and_written_results_reach_another_cache(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    somebody = TuningCache(default_cache().path)
    somebody.put(signature(1), times={"a": 1.0}, verified=["a"])
    somebody.put(signature(4), times={"a": 1.0}, verified=["a"])
    assert default_cache().get(signature(1)) is not None  # used; 4 is not
    default_cache().put(signature(2), times={"a": 2.0}, verified=["a"])
    default_cache().put(signature(2), times={"b": 1.5}, verified=["b"])
    content = saved()
    monkeypatch.setenv("SPARSECOMP_CACHE_DIR", str(directory / "second"))
    info = torch.compiler.load_cache_artifacts(content)
    assert info is not None and len(info.artifacts[artifact.TYPE]) >= 3
    found = default_cache().get(signature(2))
    assert default_cache().path == directory / "second" / "tuning.sqlite"
    assert found is not None and found.best == "b" and found.times == {"a": 2.0, "b": 1.5}
    assert default_cache().get(signature(1)) is not None and default_cache().get(signature(4)) is None


SCRIPT = f"""
import sys, torch
from sparsecomp.lowering.cache import artifact
from sparsecomp.lowering.cache.signature import Device, KernelSignature
from sparsecomp.lowering.cache.tuning_cache import default_cache
artifact.install()
with open(sys.argv[1], "rb") as file:
    assert torch.compiler.load_cache_artifacts(file.read()) is not None
print(default_cache().get({signature(8)!r}).best)
"""


@pytest.mark.slow(reason="starts processes")
@pytest.mark.skipif(not artifact.install(), reason="this torch takes no artifacts of others")
def test_to_another_process(directory: Path) -> None:
    default_cache().put(signature(8), times={"a": 1.0}, verified=["a"])
    (directory / "artifacts").write_bytes(saved())
    environment = os.environ | {"SPARSECOMP_CACHE_DIR": str(directory / "second")}
    command = [sys.executable, "-c", SCRIPT, str(directory / "artifacts")]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment, cwd=root)
    assert done.stdout.strip() == "a"


@pytest.mark.parametrize("content", [b"", b"\x80\x04N.", json.dumps({"kind": "x"}).encode(), b"[" * 100_000])
def test_a_bad_artifact_is_left_out_with_a_warning(content: bytes) -> None:
    with pytest.warns(CacheWarning, match="left out"):
        artifact.load_artifact(content)
    assert default_cache().stats().entries == 0


def test_a_torch_without_artifacts_rides_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.compiler._cache", None)  # importing it fails
    assert _compat.register_artifact("other", artifact.load_artifact) is None
    before = list(observers)
    assert artifact.install.__wrapped__() is False and observers == before
