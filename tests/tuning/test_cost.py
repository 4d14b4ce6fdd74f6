"""Rooflines by hand, break-even against bisection, the order of configurations against measured ones, and ceilings."""

import json
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from statistics import geometric_mean
from types import SimpleNamespace
from typing import Any

import pytest
import sympy
import torch

from bench.tuning import problem_of
from sparsecomp.errors import SignatureError
from sparsecomp.lowering.cache.signature import Device
from sparsecomp.lowering.spiking import binary_cost
from sparsecomp.lowering.spiking.binary_conv import BinaryConv, binary_conv_problem
from sparsecomp.lowering.spiking.binary_cost import binary_conv_cost
from sparsecomp.lowering.spiking.convolution import Convolution
from sparsecomp.lowering.tuning import ceilings as ceilings_module
from sparsecomp.lowering.tuning.cards import H100, KNOWN, Ceilings
from sparsecomp.lowering.tuning.ceilings import card_of, measure
from sparsecomp.lowering.tuning.cost import Cost, break_even, rank, seconds, sizes, waves
from sparsecomp.lowering.tuning.operations import all_operations
from sparsecomp.lowering.tuning.template import of_operation
from sparsecomp.reference.geometry import Window

CEILINGS = Ceilings(
    bandwidth=1e12, fp32=1e13, tf32=1e14, half=2e14, int8=4e14, launch=2e-6, processors=100
)  # fmt: skip
CARD = replace(H100, capability="8.9", **asdict(CEILINGS))
n, m, tile, density, processors = sizes("n m TILE density processors")
"""Names as in problems, configurations and ceilings."""

pytest.importorskip("triton")  # templates hold their kernels

TEMPLATES = [template for op in all_operations() for template in of_operation(op)]

PRODUCT = Cost(
    bytes=8 * n * m, operations=2 * n * m**2, rate="half", launches=sympy.Integer(3),
    seconds=waves(n / tile, processors) * 1e-6,
)  # fmt: skip


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"n": 1_000_000, "m": 10, "TILE": 1000}, 8e7 / 1e12 + 3 * 2e-6 + 10 * 1e-6),  # traffic; 1000 tiles in 10 waves
        ({"n": 1_000_000, "m": 2000, "TILE": 990}, 8e12 / 2e14 + 3 * 2e-6 + 11 * 1e-6),  # arithmetic; 1010.1 tiles
    ],
)
def test_a_cost_is_its_roofline_launches_and_the_rest(values, expected):
    assert PRODUCT.estimate(values, CARD) == pytest.approx(expected, rel=1e-12)
    in_parts = PRODUCT.expression(CARD, m=values["m"]).subs({n: values["n"], tile: values["TILE"]})
    assert float(in_parts.evalf()) == pytest.approx(expected, rel=1e-12)


CONVOLUTION = {
    "conv.m": 1024, "conv.in_pixels": 2048, "conv.taps": 9, "conv.c": 60, "conv.k": 192, "conv.groups": 3,
    "conv.cp": 64, "digits": 3, "BM": 128, "BN": 64, "BK": 64, "warps": 4, "stages": 3, "processors": 4,
    "shared": 200_000, "shared_rate": 1e11, "int8_portable": 0.5,
}  # fmt: skip
"""24 tiles in 6 waves of 9 steps, each of which copies (128 + 3 · 64) · 64 = 20480 bytes."""


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("hopper", "change", "reads", "products", "ahead", "waves_of_resident"),
    [
        # by registers 65536 / (128 · 64 · 3 + 30 · 32 · 4) = 2.3 tiles, by shared memory 200000 / (3 · 20480) = 3.3
        (True, {}, 64 * 128 * (2 + 3), 0.0, 1, 3), (False, {}, 64 * (128 + 4 * 3 * 64), 0.0, 2, 3),
        (True, {"shared": 100_000}, 64 * 128 * (2 + 3), 0.0, 1, 6),
        (True, {"shared": 10_000}, 64 * 128 * (2 + 3), 0.0, 1, 6),
        (True, {"int8": 1e12}, 0, 128 * 64 * 64 * 3 * 4 / 1e12, 1, 3),
        (False, {"int8": 1e12}, 0, 128 * 64 * 64 * 3 * 4 / 0.5e12, 2, 3),
    ],
)  # fmt: skip
def test_a_convolution_on_int8_by_hand(hopper, change, reads, products, ahead, waves_of_resident):
    """What the processors do, what is copied, the wait for it and the traffic, as four sides of a box."""
    work = 6 * 9 * max(reads / 1e11, products)
    copies = 6 * 9 * 20480 / 5e10
    wait = waves_of_resident * 9 * (5e-7 + 20480 / 5e10) / ahead
    traffic = (2048 * 60 + 3 * 192 * 9 * 64) / 1e12
    written = 6 * 1024 * 192 / 1e12
    expected = (work**2 + copies**2 + wait**2 + traffic**2) ** 0.5 + 3e-6 + written + 2e-6
    found = binary_conv_cost(hopper).expression(CARD, **{**CONVOLUTION, **change})
    assert float(found) == pytest.approx(expected, rel=1e-9)


def test_two_planes_of_a_wide_tile_lie_beside_each_other():
    """Four digits of 128 columns are two pairs of two instructions each; of 64 columns two of one."""
    for digits, columns, instructions in ((4, 128, 4), (4, 64, 2), (2, 128, 2), (3, 128, 3), (2, 64, 1)):
        read = 64 * 128 * (instructions + digits * columns / 64)
        values = {"BM": 128, "BK": 64, "BN": columns, "digits": digits}
        expression = binary_cost.bytes_read(True)
        assert int(expression.subs({symbol: values[str(symbol)] for symbol in expression.free_symbols})) == read


@pytest.mark.parametrize(
    ("warps", "steps", "programs", "expected"),
    [
        # registers 40 + 7 · 128 / 128 a thread, so 65536 / (47 · 128) = 10.9 programs a processor
        (4, 10, 1e6, 1e6 / (100 * 65536 / (47 * 128)) * 8.5e-6), (4, 10, 1, 8.5e-6), (4, 0.25, 1, 1.85e-6),
        (1, 10, 1e6, 1e6 / (100 * 65536 / (68 * 32)) * 8.5e-6),  # 40 + 7 · 128 / 32
        (32, 10, 1e6, 1e6 / (100 * 65536 / (40.875 * 1024)) * 8.5e-6),
    ],
)  # fmt: skip
def test_a_walk_by_hand(warps, steps, programs, expected):
    from sparsecomp.lowering.sparse.kernels.spmm_csr_rows import walk_seconds

    values = {"U": 4, "BR": 1, "E": 2, "BN": 64, "warps": warps, "processors": 100}
    found = walk_seconds(sympy.Float(steps), sympy.Float(programs))
    missing = {str(symbol) for symbol in found.free_symbols} - values.keys()
    assert not missing
    assert float(found.subs({symbol: values[str(symbol)] for symbol in found.free_symbols})) == pytest.approx(expected)


def test_an_estimate_takes_little_time_and_says_what_it_lacks():
    values = {"n": 1000, "m": 10, "TILE": 16, "unused": "text"}
    PRODUCT.estimate(values, CARD)
    start = time.thread_time()
    for _ in range(1000):
        PRODUCT.estimate(values, CARD)
    assert time.thread_time() - start < 1000 * 100e-6  # five times what is promised, for a slow processor
    with pytest.raises(SignatureError, match="depends on TILE, m:"):
        PRODUCT.estimate({"n": 1}, CARD)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("template", TEMPLATES, ids=lambda template: template.name)
def test_compiled_costs_equal_sympys(template):
    expression = template.cost.expression(H100)
    for changes in ({}, {"stages": 6, "warps": 4, "BM": 128, "out_channel": 49}, {"digits": 2, "BK": 128, "n": 7}):
        values = dict.fromkeys(map(str, expression.free_symbols), 64) | {"digits": 3, "stages": 4, "warps": 8} | changes
        exact = expression.subs({symbol: values[str(symbol)] for symbol in expression.free_symbols}).evalf()
        assert template.cost.estimate(values, H100) == pytest.approx(float(exact), rel=1e-9)


def test_candidates_are_ranked_by_estimate_and_equals_stay_in_order():
    problem = SimpleNamespace(n=10_000, m=1, dtype="float16")
    template = SimpleNamespace(cost=replace(PRODUCT, bytes=sympy.Symbol("itemsize") * n))
    candidates = [SimpleNamespace(template=template, config={"TILE": tile}) for tile in (10, 50, 100, 200, 99)]
    ranked = rank(candidates, problem, CARD)
    # 10, 2, 1, 1 and 2 waves of 100 tiles
    assert [candidate.config["TILE"] for candidate in ranked] == [100, 200, 50, 99, 10]
    assert seconds(ranked[0], problem, CARD) == pytest.approx(2e-8 + 6e-6 + 1e-6), "two bytes an element"


FIXED, RATE = sympy.Float(3e-6), sympy.Float(4e-5)


@pytest.mark.parametrize(
    "cost",
    [
        FIXED + RATE * density,
        sympy.Max(RATE * density, 2 * FIXED) + FIXED,
        FIXED + 2 * sympy.Max(RATE * density, sympy.Max(FIXED, 3 * RATE * density - FIXED)),
        FIXED / 2 + sympy.Max(RATE * density, FIXED) + sympy.Max(density * FIXED, FIXED / 2),
    ],
)
@pytest.mark.parametrize("rival", [1.2e-5, 2.5e-5])
def test_the_break_even_is_where_bisection_finds_it(cost, rival):
    compiled = sympy.lambdify(density, cost)
    low, high = 0.0, 10.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if compiled(middle) <= rival else (low, middle)
    assert float(break_even(cost, sympy.Float(rival), density)) == pytest.approx(low, rel=1e-9)


def test_break_even_without_a_crossing():
    assert break_even(FIXED, RATE, density) == sympy.oo
    never = sympy.Max(density * RATE, 2 * FIXED)
    assert break_even(never, FIXED, density) == -sympy.oo
    with pytest.raises(ValueError, match="not linear in density"):
        break_even(density**2, FIXED, density)


def test_break_even_in_symbols_is_the_solution_of_the_equation():
    cost = Cost(bytes=sympy.Integer(0), operations=2 * n * m * density, seconds=8 * n / sympy.Symbol("bandwidth"))
    dense = Cost(bytes=4 * n, operations=2 * n * m, rate="half")
    batch = sympy.Symbol("s0", integer=True, positive=True)
    bound = break_even(cost.expression(CARD, n=4 * batch), dense.expression(CARD, n=4 * batch, m=1000), density)
    for images, columns in ((1, 10), (100, 1000)):
        known = {batch: images, m: columns}
        by_hand = (max(16 * images / 1e12, 8000 * images / 2e14) - 32 * images / 1e12) * 1e13 / (8 * images * columns)
        assert float(bound.subs(known)) == pytest.approx(by_hand, rel=1e-9)


HOPPER, AMPERE = Device("NVIDIA H100 80GB HBM3", "9.0", "3.6.0"), Device("NVIDIA A100-SXM4-80GB", "8.0", "3.6.0")
TUNING = json.loads((Path(__file__).parents[2] / "bench" / "results" / "tuning.json").read_text())
MEASURED = [row for row in TUNING["result"] if row["case"] == "binary_conv"]
"""Milliseconds of every configuration of a problem, on an H100."""


def _held_against(row: dict[str, Any]) -> tuple[list[float], float]:
    """Measured times in the order of the estimates, and the first's estimate."""
    problem = problem_of(row)
    ranked = rank(all_operations()["binary_conv"].candidates(problem, HOPPER), problem, H100)
    names = [f"{candidate.template.name}:{candidate.config}" for candidate in ranked]
    return [row["ms"][name] for name in names if name in row["ms"]], seconds(ranked[0], problem, H100) * 1e3


def test_the_first_binary_convolutions_by_estimate_were_measured_to_be_the_fastest():
    losses = []
    for row in MEASURED:
        times, estimate = _held_against(row)
        losses.append(times[0] / min(times))
        assert losses[-1] < 1.2, row["problem"]
        assert min(times[:6]) < 1.03 * min(times), row["problem"]
        assert estimate == pytest.approx(times[0], rel=0.25), row["problem"]
    assert len(losses) >= 20 and geometric_mean(losses) < 1.05


@pytest.mark.parametrize("digits", [2, 3, 4])
@pytest.mark.parametrize(("c", "size"), [(64, 56), (128, 28), (256, 14), (512, 7)])
def test_the_portable_kernels_fastest_is_among_its_first_three(c, size, digits):
    """The fastest of a few that were measured."""
    config = f"BK=64,BM=128,BN=64,stages=4,warps={8 if digits == 4 else 4}"
    if digits == 2 and c > 64:
        config = "BK=128,BM=128,BN=64,stages=3,warps=4"
    problem = _stage(c, size, digits)
    ranked = rank(all_operations()["binary_conv"].candidates(problem, AMPERE), problem, H100)
    assert config in [str(candidate.config) for candidate in ranked[:3]]


def test_few_pixels_take_small_tiles():
    problem = _stage(512, 7, 3, batch=1)
    for device in (HOPPER, AMPERE):
        assert rank(all_operations()["binary_conv"].candidates(problem, device), problem, H100)[0].config["BM"] == 64


def _stage(c: int, size: int, digits: int, batch: int = 128) -> BinaryConv:
    dtype = "float16" if digits == 2 else "float32"
    window = Window.centred((3, 3), (1, 1))
    return binary_conv_problem(Convolution.of((batch, c, size, size), (c, c, 3, 3), window, dtype=dtype), digits)


class _Cache:
    def __init__(self) -> None:
        self.facts: dict[tuple[str, Device], dict[str, float]] = {}

    def fact(self, name, device):
        return self.facts.get((name, device))

    def put_fact(self, name, device, values):
        self.facts[name, device] = dict(values)


@pytest.fixture
def card(monkeypatch):
    """A CUDA device that is not there, of a name nobody knows; counts its measurements."""
    state = SimpleNamespace(cache=_Cache(), measured=0, capturing=False, full=False, name="Some GPU")

    def counted(device: torch.device) -> Ceilings:
        if state.full:
            raise torch.OutOfMemoryError("no memory")
        state.measured += 1
        return CEILINGS

    properties = SimpleNamespace(multi_processor_count=66)
    monkeypatch.setattr(ceilings_module, "default_cache", lambda: state.cache)
    monkeypatch.setattr(ceilings_module, "device_of", lambda device: Device(state.name, "8.9", "3.6.0"))
    monkeypatch.setattr(ceilings_module, "measure", counted)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    ceilings_module.settled_card.cache_clear()
    yield state
    ceilings_module.settled_card.cache_clear()


CUDA = torch.device("cuda", 0)


def test_ceilings_are_measured_once_and_kept(card):
    assert [card_of(CUDA), card_of(CUDA), card.measured] == [CARD, CARD, 1]
    ceilings_module.settled_card.cache_clear()  # as in another process
    assert [card_of(CUDA), card.measured] == [CARD, 1]
    (stored,) = card.cache.facts.values()
    assert stored == asdict(CEILINGS)


def test_facts_of_another_version_are_measured_anew(card):
    card.cache.put_fact("ceilings", Device(card.name, "8.9", "3.6.0"), {"bandwidth": 1.0})
    assert [card_of(CUDA), card.measured] == [CARD, 1]


def test_a_known_card_is_not_measured_unless_somebody_stored_it(card):
    card.name = "NVIDIA H100 80GB HBM3"
    assert [card_of(CUDA), card.measured] == [H100, 0]
    ceilings_module.settled_card.cache_clear()
    card.cache.put_fact("ceilings", Device(card.name, "8.9", "3.6.0"), asdict(CEILINGS))
    assert [card_of(CUDA), card.measured] == [CARD, 0]


@pytest.mark.parametrize("hindrance", ["capturing", "full"])
def test_what_cannot_be_measured_now_is_in_proportion_to_the_processors_and_measured_later(card, hindrance):
    setattr(card, hindrance, True)
    half = card_of(CUDA)
    assert (half.bandwidth, half.int8) == (H100.bandwidth / 2, H100.int8 / 2)
    assert (half.processors, half.capability, half.launch) == (66, "8.9", H100.launch)
    setattr(card, hindrance, False)
    assert [card_of(CUDA), card.measured] == [CARD, 1]


def test_without_a_gpu_the_ceilings_are_an_h100s():
    assert card_of(torch.device("cpu")) is H100


def test_estimates_load_neither_triton_nor_inductor():
    code = """
import sys, torch
before = set(sys.modules)
import sparsecomp.passes.cost.spiking, sparsecomp.lowering.spiking.binary_cost
print([name for name in set(sys.modules) - before if name.startswith(("triton", "torch._inductor"))])
"""
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "[]\n"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_measured_ceilings_are_plausible_soon_there_and_leave_no_trace():
    torch.cuda.init()
    before = [torch.cuda.get_rng_state(), torch.backends.cuda.matmul.fp32_precision]
    measure(CUDA)  # loads the libraries, which keep their workspaces
    before.append(torch.cuda.memory_allocated())
    start = time.perf_counter()
    found = measure(CUDA)
    assert time.perf_counter() - start < 0.5
    assert torch.equal(torch.cuda.get_rng_state(), before[0])
    assert (torch.backends.cuda.matmul.fp32_precision, torch.cuda.memory_allocated()) == tuple(before[1:])
    assert found.fp32 <= found.tf32 < found.half < found.int8
    assert 5e-7 < found.launch < 2e-5
    if torch.cuda.get_device_name(CUDA) in KNOWN:
        known = asdict(KNOWN[torch.cuda.get_device_name(CUDA)])
        # other processes may share the card
        assert all(0.3 < value / known[name] < 1.7 for name, value in asdict(found).items() if name != "launch"), found
