"""Importing sparsecomp is free: scripts pay for Triton and Inductor only when they compile."""

import importlib.util
import pkgutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from pace import limit

import sparsecomp

ROOT = Path(__file__).parents[2]


def _python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def test_import_loads_neither_triton_nor_inductor():
    code = """
import sys, torch
before = set(sys.modules)
import sparsecomp
new = set(sys.modules) - before
print([name for name in new if name.split(".")[0] == "triton" or name.startswith("torch._inductor")])
"""
    assert _python(code) == "[]"


def test_the_package_of_operators_registers_them_all():
    """A graph that was exported is loaded by a process that has imported nothing else."""
    code = """
import importlib, pkgutil, torch, sparsecomp.ops
def registered():
    return {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("sparsecomp::")}
before = registered()
for module in pkgutil.walk_packages(sparsecomp.ops.__path__, "sparsecomp.ops."):
    importlib.import_module(module.name)
print(len(before) > 50, sorted(registered() - before))
"""
    assert _python(code) == "True []"


def test_import_takes_under_0_3_seconds_beyond_torch():
    """Of processor time, whatever else the machine is busy with."""
    code = "import torch, time; start = time.process_time(); import sparsecomp; print(time.process_time() - start)"
    assert any(float(_python(code)) < limit(0.3) for _ in range(3))


def test_the_package_is_not_within_itself():
    """Who walks over all modules comes to an end, as torch does for `TORCH_LOGS="+sparsecomp"`."""
    found = {module.name for module in pkgutil.iter_modules(sparsecomp.__path__)}
    assert "compiler" in found and not found & {"sparsecomp", "bench", "tests"}
    assert importlib.util.find_spec("sparsecomp.passes.engine") and not importlib.util.find_spec("sparsecomp.tests")


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", ["Options", "Report", "explain", "optimize", "profile", "last_report", "OptionError"])
@pytest.mark.slow_cases(4)
def test_public_names_load_on_use_and_are_not_hidden_by_modules(name):
    code = f"""
import sparsecomp, inspect
import sparsecomp.compiler.backend
print(name := {name!r}, name in dir(sparsecomp), not inspect.ismodule(getattr(sparsecomp, name)))
"""
    assert _python(code) == f"{name} True True"


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", ["passes", "runtime", "cache", "distributed", "formats", "nn", "ops", "snn"])
@pytest.mark.slow_cases(4)
def test_packages_load_on_use(name):
    code = f"""
import sys, sparsecomp
print("sparsecomp.{name}" in sys.modules, sparsecomp.{name}.__name__, {name!r} in dir(sparsecomp))
"""
    assert _python(code) == f"False sparsecomp.{name} True"


def test_an_unknown_name_raises_as_any_module_does():
    import sparsecomp

    with pytest.raises(AttributeError, match="nonsense"):
        _ = sparsecomp.nonsense


def test_every_package_is_installed():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = (path.parent.relative_to(ROOT) for top in ("sparsecomp", "passes", "lowering")
             for path in (ROOT / top).rglob("__init__.py"))  # fmt: skip
    names = (".".join(path.parts) for path in found)
    assert sorted(listed) == sorted(name if name.startswith("sparsecomp") else f"sparsecomp.{name}" for name in names)
