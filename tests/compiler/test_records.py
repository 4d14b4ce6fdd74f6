"""Records do not change once they are made; what counts or collects does. Whoever adds a class says which it is."""

import importlib
import inspect

import pytest
from package_modules import modules

pytest.importorskip("triton")  # the modules of kernels import it

COLLECTS = {
    "LayerProfile", "Profile", "Outcome", "_Group", "_Change", "Context", "Site", "PassRecord", "Flow",
    "Report", "_Layer", "RESUCycle", "History", "TuningStats", "EarlyStopping", "_Walk",
    "Steps", "spike_function._Value",
}  # fmt: skip
"""Filled in step by step."""
ONESELF = {"Handle", "Ready", "Template", "Operation", "_Kept", "LayerProfile", "Documents", "FromTensor"}
"""Two of them with the same contents are two: they own something, are the name of something, or hold a tensor, and two
tensors give no one answer."""


def _records() -> dict[str, type]:
    found = [importlib.import_module(name) for name in modules() if not name.endswith("__main__")]
    classes = [value for module in found for value in vars(module).values() if inspect.isclass(value)]
    return {f"{one.__module__}.{one.__qualname__}": one for one in classes
            if "__dataclass_params__" in vars(one) and one.__module__.startswith("sparsecomp.")}  # fmt: skip


RECORDS = _records()


@pytest.mark.parametrize("name", sorted(RECORDS))
def test_a_record_is_frozen_and_compared_by_contents(name: str) -> None:
    record = RECORDS[name]
    parameters = record.__dataclass_params__  # type: ignore[attr-defined]
    short = {record.__name__, ".".join(name.split(".")[-2:])}
    assert parameters.frozen == (not short & COLLECTS)
    assert parameters.eq == (not short & ONESELF)
