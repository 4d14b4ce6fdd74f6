"""What is timed, what is checked, what is chosen: on an operation that can be told to fail, against a clock of ours."""

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from math import inf

import pytest
import torch
from kernel_devices import KERNEL_DEVICES
from torch import nn
from tuning_operations import Bench, Triple

from sparsecomp.compiler import warmup
from sparsecomp.environment import Settings
from sparsecomp.errors import SignatureError, TuningError
from sparsecomp.lowering.cache.signature import Device, KernelSignature, Rows, device_of
from sparsecomp.lowering.cache.tuning_cache import TuningCache
from sparsecomp.lowering.launch import dispatch
from sparsecomp.lowering.tuning import autotune, operations, progress
from sparsecomp.lowering.tuning.apart import apart
from sparsecomp.lowering.tuning.autotune import Tuner, effort_scope
from sparsecomp.lowering.tuning.measure import measure_ms, settled_median
from sparsecomp.lowering.tuning.trial import relative_error

pytest.importorskip("triton")  # templates hold their kernels

CPU = torch.device("cpu")


def tuner(bench: Bench, cache: TuningCache | None = None, **settings) -> Tuner:
    return Tuner(cache or TuningCache(None), Settings(**settings), bench.measure, bench.clock)


def choose(tuner: Tuner, bench: Bench, effort="full", problem: Triple | None = None, notes: list[str] | None = None):
    """Tile and source of what is chosen for a problem under an effort."""
    with bench.installed(), effort_scope(effort, note=[].append if notes is None else notes.append):
        choice = tuner.choose(bench.operation, problem or Triple(), CPU)
    return choice.candidate.config["TILE"], choice.source


def entry(cache: TuningCache, bench: Bench):
    found = cache.get(bench.operation.signature(Triple(), device_of(CPU)))
    assert found is not None
    return found


def counts(tuner: Tuner) -> tuple[int, int, int]:
    return tuner.stats.timings, tuner.stats.checks, tuner.stats.signatures


def test_without_effort_the_cheapest_is_the_default_and_nothing_runs():
    bench = Bench({64: 1.0, 16: 3.0, 32: 2.0})
    with bench.installed():
        choice = tuner(bench).choose(bench.operation, Triple(), CPU)
    assert (choice.candidate.config["TILE"], choice.source) == (16, "default")
    assert bench.ran == []


def test_full_effort_times_every_candidate_once_and_chooses_the_fastest():
    bench = Bench({64: 2.0, 16: 3.0, 32: 1.0, 128: 4.0})
    tuned = tuner(bench)
    assert choose(tuned, bench) == (32, "tuned")
    assert bench.timed == [16, 32, 64, 128], "in the cost model's order"
    assert bench.rivals == [inf, 3.0, 1.0, 1.0], "each against the best so far"
    assert bench.ran[-1] == 32 and counts(tuned) == (4, 1, 1)
    ran = len(bench.ran)
    assert choose(tuned, bench) == choose(tuned, bench, "quick") == choose(tuned, bench, "none") == (32, "tuned")
    assert len(bench.ran) == ran and counts(tuned) == (4, 1, 1)


def test_quick_effort_times_the_six_cheapest_and_full_the_rest_later():
    bench = Bench({tile: float(100 - tile) for tile in range(1, 10)})
    tuned = tuner(bench)
    assert choose(tuned, bench, "quick") == (6, "tuned")
    assert bench.timed == [1, 2, 3, 4, 5, 6]
    assert choose(tuned, bench, "full") == (9, "tuned")
    assert bench.timed[6:] == [7, 8, 9] and counts(tuned) == (9, 2, 2)


@pytest.mark.parametrize(
    ("asked", "set_to", "timings"), [("full", "none", 0), ("none", "quick", 6), ("full", "quick", 6)]
)
def test_the_environment_overrides_the_scope(asked, set_to, timings):
    bench = Bench({tile: 1.0 + tile for tile in range(8)})
    tuned = tuner(bench, autotune=set_to)
    choose(tuned, bench, asked)
    assert tuned.stats.timings == timings


def test_a_scope_ends_and_the_inner_one_rules():
    bench = Bench({1: 1.0})
    tuned = tuner(bench)
    with effort_scope("full"):
        with pytest.raises(KeyError), effort_scope("quick"):
            assert tuned.effort() == "quick"
            raise KeyError
        assert tuned.effort() == "full"
        with effort_scope("none"):
            assert tuned.effort() is None
    assert tuned.effort() is None


def test_of_two_processes_one_tunes_and_the_other_takes_its_choice(tmp_path):
    """Each with a stopwatch that would prefer another tile."""
    bench = Bench({16: 3.0, 32: 1.0, 64: 2.0})
    begin, found, entered = threading.Barrier(2, timeout=60), {}, []

    def process(number: int) -> None:
        cache = TuningCache(tmp_path / "tuning.db")

        def measure(calls, **options):
            entered.append(number)
            time.sleep(0.05)  # the other one wants to enter
            took = bench.measure(calls, **options)
            return took if number == 0 else 10 - took

        begin.wait()
        with effort_scope("full"):
            choice = Tuner(cache, Settings(), measure, bench.clock).choose(bench.operation, Triple(), CPU)
        found[number] = (choice.candidate.config["TILE"], choice.source)
        cache.close()

    threads = [threading.Thread(target=process, args=(number,)) for number in range(2)]
    with bench.installed():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(set(entered)) == 1 and len(entered) == 3
    assert found[0] == found[1] == ((32, 16)[entered[0]], "tuned")


def test_who_waits_too_long_takes_the_default(tmp_path, monkeypatch):
    monkeypatch.setattr("sparsecomp.lowering.cache.tuning_cache._LONGEST_TURN", 0.1)
    bench, notes = Bench({16: 3.0, 32: 1.0}), list[str]()
    caches = [TuningCache(tmp_path / "tuning.db") for _ in range(2)]
    with caches[0].alone(bench.operation.signature(Triple(), device_of(CPU))):
        assert choose(tuner(bench, caches[1]), bench, notes=notes) == (16, "default")
    assert "another process has tuned" in notes[0] and not bench.timed
    assert choose(tuner(bench, caches[1]), bench) == (32, "tuned")


def test_a_single_candidate_needs_no_tuning_and_none_is_an_error():
    bench = Bench({16: 1.0})
    tuned = tuner(bench)
    assert choose(tuned, bench) == (16, "default") and bench.ran == []
    with pytest.raises(TuningError, match="triple: no such thing"):
        choose(tuned, bench, problem=Triple(supported=False))


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("wrong", "relative error 1.3e+00 of result 1"),  # ‖2·3·(1, 3, 5, 7)‖ over ‖3·(1, …, 8)‖ is √(4·84/204)
        ("idle", "relative error nan of result 1"),
        ("nan", "relative error nan of result 1"),
        ("raises", "RuntimeError: out of shared memory: 300000 > 232448"),
    ],
)
def test_a_fast_candidate_that_is_wrong_or_fails_is_never_chosen(fault, why, caplog):
    bench = Bench({16: 3.0, 32: 1.0, 64: 2.0}, {32: fault})
    cache, notes = TuningCache(None), []
    tuned = tuner(bench, cache)
    assert choose(tuned, bench, notes=notes) == (64, "tuned")
    found = entry(cache, bench)
    assert found.rejected.keys() == {bench.name(32)} and found.rejected[bench.name(32)].startswith(why)
    assert found.verified == {bench.name(64)}
    assert len(notes) == 1 and bench.name(32) in notes[0] and why in notes[0] and "\n" not in notes[0]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert counts(tuned) == (3, 1 if fault == "raises" else 2, 1)
    ran = len(bench.ran)
    assert choose(tuner(bench, cache), bench) == choose(tuned, bench) == (64, "tuned") and len(bench.ran) == ran


def test_when_every_candidate_is_rejected_that_is_an_error_with_the_reasons():
    bench = Bench({16: 3.0, 32: 1.0}, {16: "nan", 32: "raises"})
    with pytest.raises(TuningError, match="(?s)TILE=16: relative error nan.*TILE=32: RuntimeError: out of shared"):
        choose(tuner(bench), bench)


def test_a_rejected_candidate_is_not_even_a_default():
    bench = Bench({16: 1.0, 32: 2.0, 64: 3.0}, {16: "nan", 32: "nan"})
    cache = TuningCache(None)
    cache.put(bench.operation.signature(Triple(), device_of(CPU)), rejected={bench.name(16): "wrong"})
    assert choose(tuner(bench, cache), bench, "none") == (32, "default")


def test_one_candidate_added_is_the_only_one_timed():
    bench, cache = Bench({16: 3.0, 32: 2.0}), TuningCache(None)
    assert choose(tuner(bench, cache), bench) == (32, "tuned")
    bench.times[64] = 1.0
    later = tuner(bench, cache)
    assert choose(later, bench, "none") == (32, "tuned")
    assert choose(later, bench) == (64, "tuned")
    assert bench.timed == [16, 32, 64] and counts(later) == (1, 1, 1)


def test_what_another_version_of_the_kernel_measured_is_left_alone():
    bench, cache = Bench({16: 3.0, 32: 2.0}), TuningCache(None)
    signature = bench.operation.signature(Triple(), device_of(CPU))
    cache.put(signature, times={"triple@0123456789ab:TILE=16": 0.1}, verified=["triple@0123456789ab:TILE=16"])
    assert choose(tuner(bench, cache), bench, "none") == (16, "default")
    tuned = tuner(bench, cache)
    assert choose(tuned, bench) == (32, "tuned") and tuned.stats.timings == 2
    assert bench.rivals == [inf, 3.0]
    assert len(entry(cache, bench).times) == 3


def test_forced_tuning_times_all_anew_once_a_signature():
    bench, cache = Bench({16: 1.0, 32: 2.0}, {16: "nan"}), TuningCache(None)
    assert choose(tuner(bench, cache), bench) == (32, "tuned")
    bench.faults.clear()
    forced = tuner(bench, cache, force_autotune=True)
    assert choose(forced, bench, "none") == (32, "tuned") and forced.stats.timings == 0
    assert [choose(forced, bench) for _ in range(3)] == [(16, "tuned")] * 3
    assert counts(forced) == (2, 1, 1)
    assert entry(cache, bench).rejected == {}
    assert choose(forced, bench, problem=Triple(100))[0] == 16 and counts(forced) == (4, 2, 2)


def test_the_budget_ends_tuning_with_the_best_so_far():
    bench, cache = Bench({16: 3.0, 32: 2.0, 64: 1.0, 128: 4.0}, seconds=7.5), TuningCache(None)
    tuned = tuner(bench, cache)
    assert choose(tuned, bench, "quick") == (32, "tuned"), "ten seconds: over after the second candidate"
    assert choose(tuned, bench, "quick", Triple(7)) == (32, "tuned"), "the bucket's budget is spent"
    assert bench.timed == [16, 32]
    assert choose(tuner(bench, cache), bench, "quick") == (32, "tuned"), "in every process"
    assert bench.timed == [16, 32]
    assert choose(tuner(bench, cache), bench, "full") == (64, "tuned"), "more effort goes on"
    assert bench.timed == [16, 32, 64, 128]
    assert entry(cache, bench).postponed == {}


def test_what_a_candidate_launches_is_tuned_in_seconds_of_its_own(monkeypatch):
    bench, cache = Bench({16: 3.0, 32: 2.0, 64: 1.0}, seconds=4.0), TuningCache(None)
    tuned, inner = tuner(bench, cache), replace(bench.template, name="inner", op="inner")
    within = replace(bench.operation, name="inner", signature=lambda problem, device: KernelSignature("inner", device))

    def prepare(problem, config):
        def launch(*tensors):
            tuned.choose(within, problem, CPU)
            bench.template.prepare(problem, config)(*tensors)

        return launch

    templates = {"inner": (inner,), "triple": (replace(bench.template, prepare=prepare),)}
    monkeypatch.setattr("sparsecomp.lowering.tuning.template.of_operation", templates.__getitem__)
    with effort_scope("quick"):
        assert tuned.choose(bench.operation, Triple(), CPU).candidate.config["TILE"] == 64
    assert bench.timed == [16, 32, 64, 16, 32, 64] and not entry(cache, bench).postponed


def test_an_interrupt_keeps_what_was_measured():
    bench, cache = Bench({16: 3.0, 32: 2.0, 64: 1.0}, {64: "interrupted"}), TuningCache(None)
    tuned = tuner(bench, cache)
    with pytest.raises(KeyboardInterrupt):
        choose(tuned, bench)
    found = entry(cache, bench)
    assert found.times == {bench.name(16): 3.0, bench.name(32): 2.0} and not found.verified and not found.rejected
    bench.faults.clear()
    assert choose(tuned, bench) == (64, "tuned")
    assert bench.timed == [16, 32, 64], "an interrupted timing is no timing; the others are not repeated"


def test_memory_that_runs_out_is_not_the_candidates_fault(caplog):
    bench, cache, notes = Bench({16: 3.0, 32: 2.0, 64: 1.0}, {32: "memory"}), TuningCache(None), []
    assert choose(tuner(bench, cache), bench, notes=notes) == (16, "default")
    assert notes == ["tuning of triple failed: OutOfMemoryError: CUDA out of memory. Tried to allocate 64 GiB"]
    assert entry(cache, bench).rejected == {} and entry(cache, bench).times == {bench.name(16): 3.0}
    assert [record.levelname for record in caplog.records] == ["WARNING"]


@pytest.mark.parametrize("broken", ["operands", "reference", "tolerance", "shape"])
def test_an_operation_that_cannot_be_tried_runs_its_default_and_rejects_nothing(broken, caplog):
    bench, cache, notes = Bench({16: 3.0, 32: 1.0}), TuningCache(None), []

    def fails(*arguments):
        raise NotImplementedError("not in float64")

    other_shape = {"reference": lambda problem, operands: (torch.zeros(problem.size, 1),)}
    bench.operation = replace(bench.operation, **(other_shape if broken == "shape" else {broken: fails}))
    assert choose(tuner(bench, cache), bench, notes=notes) == (16, "default")
    assert len(notes) == len(caplog.records) == 1 and notes[0].startswith("tuning of triple failed: ")
    assert not entry(cache, bench).rejected and not entry(cache, bench).verified


def test_a_lost_gpu_rejects_its_candidate_alone_and_stops(monkeypatch):
    bench, cache = Bench({16: 3.0, 32: 2.0, 64: 1.0}, {32: "raises", 64: "raises"}), TuningCache(None)

    def synchronize(device):
        if bench.ran and bench.ran[-1] == 32:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(autotune, "synchronized", synchronize)
    with pytest.raises(TuningError, match="TILE=32 made the GPU unusable .*illegal memory access"):
        choose(tuner(bench, cache), bench)
    assert entry(cache, bench).rejected.keys() == {bench.name(32)}


def test_tuning_cannot_run_in_a_graph_capture_or_under_fake_tensors(monkeypatch):
    bench, cache, notes = Bench({16: 3.0, 32: 2.0}), TuningCache(None), []
    tuned = tuner(bench, cache)
    with monkeypatch.context() as patch:
        for asked in ("is_available", "is_current_stream_capturing"):
            patch.setattr(torch.cuda, asked, lambda: True)
        assert choose(tuned, bench, notes=notes) == (16, "default")
    with torch._subclasses.FakeTensorMode():
        assert choose(tuned, bench, notes=notes) == (16, "default")
    assert bench.ran == [] and notes == [
        "default configuration of triple: tuning cannot run during CUDA graph capture",
        "default configuration of triple: tuning cannot run while a graph is traced",
    ]
    assert choose(tuned, bench) == (32, "tuned"), "what a capture put off is done at the next chance"
    for asked in ("is_available", "is_current_stream_capturing"):
        monkeypatch.setattr(torch.cuda, asked, lambda: True)
    assert choose(tuned, bench, notes=notes) == (32, "tuned") and len(notes) == 2


def test_the_callers_gradients_and_autocast_are_not_the_candidates():
    bench = Bench({16: 3.0, 32: 2.0})
    seen = set()
    reference = bench.operation.reference
    spied = replace(
        bench.operation, reference=lambda problem, operands: (
            seen.add((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"))), reference(problem, operands)
        )[1],
    )  # fmt: skip
    with bench.installed(), effort_scope("full"), torch.autocast("cpu"), torch.enable_grad():
        tuner(bench).choose(spied, Triple(), CPU)
        assert torch.is_autocast_enabled("cpu") and torch.is_grad_enabled()
    assert seen == {(False, False)}


def test_four_threads_on_one_cold_key_tune_once():
    bench = Bench({16: 3.0, 32: 1.0, 64: 2.0})
    tuned, chosen, start = tuner(bench), [], threading.Barrier(4)

    def work():
        start.wait()
        with effort_scope("full"):
            chosen.append(tuned.choose(bench.operation, Triple(), CPU).candidate.config["TILE"])

    with bench.installed():
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert chosen == [32] * 4
    assert counts(tuned) == (3, 1, 1)


def test_timings_of_different_keys_never_overlap():
    bench = Bench({16: 3.0, 32: 1.0})
    inside, most, start = [0], [0], threading.Barrier(4)

    def measure(calls, *, best, samples):
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        threading.Event().wait(0.01)
        inside[0] -= 1
        return 1.0

    tuned = Tuner(TuningCache(None), Settings(), measure, bench.clock)

    def work(size):
        start.wait()
        with effort_scope("full"):
            tuned.choose(bench.operation, Triple(size), CPU)

    with bench.installed():
        threads = [threading.Thread(target=work, args=(8 << index,)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert counts(tuned) == (8, 4, 4) and most == [1]


_CHILD = """
import json, torch
from tuning_operations import Bench, Triple
from sparsecomp.lowering.tuning import autotune
bench = Bench({16: 3.0, 32: 1.0, 64: 2.0})
with bench.installed(), autotune.effort_scope("full"):
    choice = autotune.tuner().choose(bench.operation, Triple(), torch.device("cpu"))
print(json.dumps([choice.candidate.config["TILE"], choice.source, autotune.tuner().stats.timings, len(bench.ran)]))
"""


@pytest.mark.slow(reason="starts processes")
def test_a_second_process_times_nothing(tmp_path):
    cache, bench = TuningCache(tmp_path / "tuning.sqlite"), Bench({16: 3.0, 32: 1.0, 64: 2.0})
    assert choose(tuner(bench, cache), bench) == (32, "tuned")
    assert len(bench.ran) == 7  # two sets of operands a timing, and one check
    cache.close()
    environment = {**os.environ, "SPARSECOMP_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.path.dirname(__file__)}
    environment.pop("SPARSECOMP_AUTOTUNE", None)
    command = [sys.executable, "-c", _CHILD]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert json.loads(child.stdout) == [32, "tuned", 0, 0]


def test_relative_error_is_the_frobenius_norms():
    right = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert relative_error(torch.tensor([3.0, 4.5]), right) == pytest.approx(0.1)
    assert relative_error(right.int(), right) == 0
    assert relative_error(torch.zeros(2), torch.zeros(2)) == 0
    assert relative_error(torch.tensor([0.0, 1e-9]), torch.zeros(2)) == inf
    assert relative_error(torch.empty(0), torch.empty(0)) == 0
    for poison in (float("nan"), inf):
        assert not relative_error(torch.tensor([3.0, poison]), right) <= 1e30


@pytest.mark.parametrize(
    ("samples", "best", "median", "drawn"),
    [
        ([1.0] * 60, inf, 1.0, 9),  # the median has been the same three times
        ([2.0] * 60, 1.0, 2.0, 3),  # more than half slower than the best
        ([1.4] * 60, 1.0, 1.4, 9),  # slower, but not clearly
        ([9.0, 1.0, 1.0] + [1.0] * 57, 1.0, 1.0, 9),  # one outlier is none of the candidate's
        ([float(2**i) for i in range(12)], inf, 2**5.5, 12),  # never settles
    ],
)
def test_sampling_stops_when_settled_or_hopeless(samples, best, median, drawn):
    left = iter(samples)
    most = min(len(samples), 12)
    found = settled_median(lambda number: [next(left) for _ in range(number)], best, most)
    assert found == pytest.approx(median, rel=0.07)
    assert len(list(left)) == len(samples) - drawn


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the device's clock is used")
def test_without_a_gpu_one_run_is_timed():
    runs = []
    took = measure_ms([lambda: runs.append(threading.Event().wait(0.02)), lambda: runs.append(None)])
    assert 20 <= took < 2000 and len(runs) == 1


@pytest.mark.parametrize("device", KERNEL_DEVICES[1:])
def test_on_a_gpu_twice_the_bytes_take_twice_the_time(device):
    def copies(size):
        memory = [torch.zeros(2, size, dtype=torch.uint8, device=device) for _ in range(2)]
        return [partial(pair[0].copy_, pair[1]) for pair in memory]

    assert 1.6 < measure_ms(copies(2**28)) / measure_ms(copies(2**27)) < 2.4


@pytest.mark.parametrize("device", KERNEL_DEVICES[1:])
def test_what_tuning_holds_is_not_in_the_pool_of_a_callers_graph(device):
    pool, held = torch.cuda.MemPool(), []
    with torch.cuda.use_mem_pool(pool):
        held.append(torch.zeros(2**22, dtype=torch.uint8, device=device))
        before = sum(segment["total_size"] for segment in pool.snapshot())
        apart(torch.device(device), lambda: held.append(torch.zeros(2**26, dtype=torch.uint8, device=device)))
        assert sum(segment["total_size"] for segment in pool.snapshot()) == before > 0
    assert len(held) == 2


def test_a_thread_apart_has_the_callers_scope_alone_and_gives_its_errors_back():
    seen: list[tuple[str | None, bool, threading.Thread]] = []

    def work() -> None:
        seen.append((tuner(Bench({16: 1.0})).effort(), torch.is_grad_enabled(), threading.current_thread()))

    def within() -> None:
        work()
        apart(torch.device("cuda"), work)
        raise ZeroDivisionError

    with effort_scope("quick"), torch.no_grad(), pytest.raises(ZeroDivisionError):
        apart(torch.device("cuda"), within)
    apart(CPU, work)
    (first, second, here), ours = seen, threading.current_thread()
    assert first[:2] == second[:2] == ("quick", True) and first[2] is second[2] is not ours
    assert here == (None, True, ours)


@pytest.mark.parametrize("device", KERNEL_DEVICES[1:])
def test_a_real_capture_is_noticed(device):
    bench, notes, x = Bench({16: 3.0, 32: 2.0}), [], torch.zeros(1, device=device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x += 1
        assert choose(tuner(bench), bench, notes=notes) == (16, "default")
    assert len(notes) == 1 and not bench.ran


def test_progress_shows_after_a_second_on_a_terminal_alone(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    for terminal, patience, shown in ((True, 0.5, False), (False, 2.0, False), (True, 2.0, True)):
        monkeypatch.setattr(progress.sys.stderr, "isatty", lambda terminal=terminal: terminal)
        with progress.Progress("tuning triple", 3) as bar:
            now[0] += patience
            bar.advance()
        assert ("tuning triple" in capsys.readouterr().err) is shown


@pytest.fixture
def process_tuner(monkeypatch):
    """A bench whose operation is the only one of the process, and the process's tuner for it."""
    bench = Bench({16: 3.0, 32: 1.0, 64: 2.0})
    tuned = tuner(bench)
    monkeypatch.setattr(autotune, "tuner", lambda: tuned)
    monkeypatch.setattr(operations, "all_operations", lambda: {"triple": bench.operation})
    with bench.installed():
        yield bench, tuned
    dispatch.forget()


def launch(bench: Bench) -> int:
    """The tile that a call runs now."""
    x, out = torch.arange(8.0), torch.zeros(8)
    dispatch.launch(bench.operation, Triple(), x, out)
    assert torch.equal(out, 3 * x)
    return bench.ran[-1]


def test_warming_up_by_signature_makes_later_calls_tuned(process_tuner):
    bench, tuned = process_tuner
    assert launch(bench) == 16
    elsewhere = bench.operation.signature(Triple(), Device("NVIDIA H100", "9.0", "3.6.0"))
    chosen = warmup.tune_signatures([elsewhere.fields, replace(elsewhere, sizes=(("size", 100),))])
    assert [(one.signature.device, one.choice.candidate.config["TILE"], one.choice.source) for one in chosen] == [
        (device_of(CPU), 32, "tuned")
    ] * 2
    assert counts(tuned) == (6, 2, 2)
    assert launch(bench) == 32 and tuned.stats.timings == 6


@pytest.mark.slow(reason="tunes a model through the interpreter")
def test_warming_up_a_model_runs_it_once_and_leaves_it_as_it_was(process_tuner):
    bench, tuned = process_tuner

    class Tripled(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(1))

        def forward(self, x):
            self.calls += 1
            return triple(x)

    @torch.compiler.disable
    def triple(x):
        out = torch.empty_like(x)
        dispatch.launch(bench.operation, Triple(), x, out)
        return out

    model = Tripled()
    chosen = warmup.tune(model, torch.arange(8.0), effort="quick")
    assert [one.choice.candidate.config["TILE"] for one in chosen] == [32] and counts(tuned) == (3, 1, 1)
    assert model.calls.item() == 0
    assert launch(bench) == 32
    with pytest.raises(ValueError, match="needs inputs"):
        warmup.tune(model)


def test_warming_up_refuses_what_it_cannot_stand_for_before_it_tunes(process_tuner):
    bench, tuned = process_tuner
    good = bench.operation.signature(Triple(), device_of(CPU))
    for bad, error, why in (
        (replace(good, op="quadruple"), TuningError, "'quadruple' is no operation that is tuned; these are: triple"),
        (replace(good, epilogue="relu"), TuningError, "stands for no problem of triple: it gives Triple"),
        (replace(good, sizes=()), TuningError, "stands for no problem of triple: KeyError"),
        ({**good.fields, "density": "a lot"}, SignatureError, "are no signature's fields"),
        ({**good.fields, "size.size": "100"}, SignatureError, "they would read"),
        ({"op": "triple"}, SignatureError, "are no signature's fields"),
    ):
        with pytest.raises(error, match=why):
            warmup.tune_signatures([good, bad])
    assert tuned.stats.timings == 0


def test_a_signature_is_read_back_from_its_fields():
    plain = KernelSignature("triple", Device("interpreter", "", "3.9"))
    full = KernelSignature(
        "spmm", Device("NVIDIA H100 80GB", "9.0", "3.6.0"), ("float16", "float32"), "float32", ("bsr16x16",), "int32",
        ("nhwc", "nchw"), "bias+relu", (("n", 100), ("rows", 0)), (("block", -16), ("select", "all")), 0.05,
        Rows(17.2, 1.2),
    )  # fmt: skip
    for signature in (plain, full, replace(full, density=0.0, rows=Rows(3.0, 9.0)), replace(full, density=1.0)):
        assert warmup.signature_of(signature.fields).fields == signature.fields
