"""Compile many cases at once and measure one at a time, since a benchmark of compiled models mostly compiles.

Worker processes prepare their cases side by side. Nobody measures before all have prepared, and then one at a time, so
that a call that is measured has the machine to itself.
"""

import gc
import math
import multiprocessing
import os
import queue
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier, Lock
from typing import Any, TypeVar

import torch

from bench.timing import wait

Measure = Callable[[], dict[str, Any]]
Case = TypeVar("Case")


def measured(
    prepare: Callable[[Case], Measure], cases: Sequence[Case], workers: int, batch: int, seconds: float = math.inf,
    threads: int = 1, turns: int = 1,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """The row of each case, in no particular order, as often as it is measured.

    Args:
        prepare: compiles a case and returns what measures it; a function of a module, or a `partial` of one.
        cases: taken by the workers in turn, so that like ones should stand together.
        workers: processes.
        batch: cases that a worker holds compiled at a time.
        seconds: after which no more rows come.
        threads: of Inductor's, in which each worker compiles kernels.
        turns: how often each worker measures what it holds, one worker after the other: rivals in processes of their
            own see the same machine only if they take turns.

    Raises:
        RuntimeError: a worker ended before it had measured its cases.
    """
    end = time.monotonic() + seconds
    context = multiprocessing.get_context("spawn")
    barrier, turn, rows = context.Barrier(workers), context.Lock(), context.Queue()
    rounds = math.ceil(len(cases) / workers / batch)
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = str(threads)
    processes = [
        context.Process(target=_work, args=(prepare, cases[place::workers], rounds, batch, turns, barrier, turn, rows))
        for place in range(workers)
    ]
    for process in processes:
        process.start()
    try:
        for _ in range(len(cases) * turns):
            row = _next(rows, processes, end)
            if row is None:
                break
            yield row
    finally:
        for process in processes:
            process.terminate()


def gathered(rows: Iterable[dict[str, Any]], names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Rows that agree in what `names` name, as one, as far as it is known: of several times the least counts."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        whole = found.setdefault(tuple(row[name] for name in names), row)
        for part, value in row.items():
            if part == "ms":
                whole["ms"] = {**value, **{of: min(ms, value.get(of, ms)) for of, ms in whole["ms"].items()}}
            elif isinstance(value, dict):
                whole[part] = {**whole.get(part, {}), **value}
            else:
                whole.setdefault(part, value)
        yield whole


def _next(rows: Queue, processes: Sequence[BaseProcess], end: float) -> dict[str, Any] | None:
    while time.monotonic() < end:
        try:
            return rows.get(timeout=1)
        except queue.Empty:
            failed = [process.exitcode for process in processes if process.exitcode]
            if failed:
                raise RuntimeError(f"a worker ended with exit code {failed[0]}: its error is above") from None


def _work(
    prepare: Callable[[Case], Measure], cases: Sequence[Case], rounds: int, batch: int, turns: int, barrier: Barrier,
    turn: Lock, rows: Queue,
) -> None:  # fmt: skip
    for place in range(rounds):
        ready = [prepare(case) for case in cases[place * batch : (place + 1) * batch]]
        wait()
        barrier.wait()
        for _ in range(turns):
            with turn:
                for measure in ready:
                    rows.put(measure())
            barrier.wait()
        ready.clear()
        torch.compiler.reset()
        gc.collect()
        torch.cuda.empty_cache()
