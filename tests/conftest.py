"""Triton reads TRITON_INTERPRET when it is imported, so it is set before anything else.

Tests keep their tuning results to themselves: what a user's cache holds must not decide what they run.

The quick run leaves out what is marked `slow`. A file of many cases says `pytestmark = pytest.mark.quick_cases(n)`:
of each of its tests n cases are quick, and the others are slow. Of these, the ones that show no value of a parameter
that no other case showed are marked `every_case` as well, if they need no device; all but n where a test says
`slow_cases(n)`.

A rule or an analysis that fails costs a user one site and a warning. Here it fails the test, unless that is marked
``fails_inside``.
"""

import gc
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from itertools import groupby
from typing import Any

import pytest
import torch
from quick_cases import Choice, covering
from spared_work import spare_work

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# tables are as wide as the terminal, which has no say in what tests look for
os.environ["COLUMNS"] = "160"

_cache = tempfile.TemporaryDirectory(prefix="sparsecomp-tests-", ignore_cleanup_errors=True)
os.environ["SPARSECOMP_CACHE_DIR"] = _cache.name


@pytest.fixture(autouse=True)
def compiles_anew():
    """No test runs what another one compiled."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


@pytest.fixture(autouse=True)
def keeps_precisions():
    """Which products of float32 may be in TF32, as a benchmark lets them, is what it was before the test."""
    every: Any = torch.backends
    matmul, cudnn = every.cuda.matmul, every.cudnn
    before = every.fp32_precision, matmul.fp32_precision, cudnn.conv.fp32_precision
    yield
    if (every.fp32_precision, matmul.fp32_precision, cudnn.conv.fp32_precision) != before:
        every.fp32_precision = before[0]
        # by their old names, which raise where the new ones say something else
        torch.set_float32_matmul_precision("highest")
        matmul.fp32_precision = before[1]
        cudnn.allow_tf32 = before[2] == "tf32"


@pytest.fixture(autouse=True, scope="session")
def launches_keep_their_dtypes():
    """A launch that is kept under less than it depends on reads memory as another dtype on a GPU, past Triton. Here
    each shows that by its tensors, in the interpreter too."""
    from sparsecomp.lowering.launch.launch import Launch

    def checked(launch: Any, *tensors: torch.Tensor | None) -> None:
        dtypes = [None if tensor is None else (tensor.dtype, tensor.device) for tensor in tensors]
        first = launch.__dict__.setdefault("of_first_call", dtypes)
        assert first == dtypes, f"{launch.kernel} is launched with {dtypes} after {first}"
        unchecked(launch, *tensors)

    unchecked, Launch.__call__ = Launch.__call__, checked
    yield
    Launch.__call__ = unchecked


@pytest.fixture
def one_thread():
    """Small tensors on one thread: where other processes hold the cores, threads wait for one another at each step."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def op_by_op(monkeypatch):
    """What is compiled runs op by op, traced, differentiated and split as for Inductor, but without a C++ compiler: for
    tests of graphs, of what they are guarded by and of what is told of them."""
    from functorch.compile import min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop

    def compile_fx(gm, example_inputs, mode, patches, decompositions, partition=None):
        assert not patches and partition is None, "it is for Inductor"
        backend = aot_autograd(
            fw_compiler=boxed_nop, bw_compiler=boxed_nop, partition_fn=min_cut_rematerialization_partition,
            decompositions=decompositions and decompositions(), keep_inference_input_mutations=True,
        )  # fmt: skip
        return backend(gm, example_inputs)

    monkeypatch.setattr("sparsecomp._compat.compile_fx", compile_fx)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported and collected is there to stay: walking it for garbage, again and again, takes half the time.
    Tests, which compile much, are interrupted for it less often than by default."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.set_threshold(50_000)
        gc.enable()
    spare_work()


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for _, group in groupby(items, lambda item: item.nodeid.partition("[")[0]):
        cases = list(group)
        quick, slow = (cases[0].get_closest_marker(name) for name in ("quick_cases", "slow_cases"))
        if quick is not None or slow is not None:
            _share(cases, quick.args[0] if quick else 0, slow.args[0] if slow else None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    errors, logger = _Errors(), logging.getLogger("sparsecomp")
    logger.addHandler(errors)
    try:
        yield
    finally:
        logger.removeHandler(errors)
    assert not errors.told or item.get_closest_marker("fails_inside"), f"caught and logged: {errors.told}"


class _Errors(logging.Handler):
    """What was logged together with an error that was caught."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.told.append(f"{record.getMessage()}: {record.exc_info[1]!r}")


def _share(cases: list[pytest.Item], quick: int, slow: int | None) -> None:
    """Which cases are quick, which slow, and which of these show nothing new."""
    choices = [_choices(case) for case in cases]
    first = set() if cases[0].get_closest_marker("slow") else covering(choices, quick)
    second = covering(choices, None if slow is None else len(first) + slow) - first
    for number, case in enumerate(cases):
        if number not in first:
            case.add_marker("slow")
            if number not in second and not case.get_closest_marker("gpu"):
                case.add_marker("every_case")


def _choices(item: pytest.Item) -> set[Choice]:
    """Which value each parameter of a case has; none where the case needs a device, so that others come first. Cases
    that have the same value have the same object; their indices are numbers of cases in newer versions of pytest."""
    call = getattr(item, "callspec", None)
    if call is None or item.get_closest_marker("gpu"):
        return set()
    return {(name, id(value)) for name, value in call.params.items()}
