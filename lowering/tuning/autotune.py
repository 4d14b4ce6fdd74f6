"""Which candidate carries out a problem: the fastest that was measured and found right, else the cost model's first.

How much is measured is the effort: nothing, a few promising candidates (quick), or all of them (full). Each candidate's
time is kept by the cache, so that only those without one are ever timed; and none is chosen for its time before its
results have been compared with the reference's.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, partial
from math import inf
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import torch

from sparsecomp import _compat
from sparsecomp.environment import Effort, Settings
from sparsecomp.errors import CacheError, TuningError
from sparsecomp.lowering.cache.entry import Entry, sentence
from sparsecomp.lowering.cache.signature import KernelSignature, device_of
from sparsecomp.lowering.cache.tuning_cache import TuningCache, default_cache
from sparsecomp.lowering.tuning import cost
from sparsecomp.lowering.tuning.apart import apart
from sparsecomp.lowering.tuning.ceilings import card_of
from sparsecomp.lowering.tuning.measure import measure_ms
from sparsecomp.lowering.tuning.progress import Progress
from sparsecomp.lowering.tuning.template import Candidate, Operation
from sparsecomp.lowering.tuning.trial import fault, first_line, timed_operands

P = TypeVar("P", bound=NamedTuple)

log = logging.getLogger("sparsecomp")

_SHORTEST_MS = 1e-6


class Measure(Protocol):
    """As :func:`sparsecomp.lowering.tuning.measure.measure_ms`."""

    def __call__(self, calls: Sequence[Callable[[], None]], *, best: float, samples: int) -> float: ...


@dataclass(frozen=True)
class Choice:
    """A candidate, and whether it was measured and checked (`"tuned"`) or comes first by cost (`"default"`)."""

    candidate: Candidate[Any]
    source: Literal["tuned", "default"]


@dataclass
class TuningStats:
    """What a tuner has done: candidates it timed, candidates it checked, and signatures it tuned."""

    timings: int = 0
    checks: int = 0
    signatures: int = 0


class Chosen(NamedTuple):
    """What was chosen for a signature."""

    signature: KernelSignature
    choice: Choice


class _Limits(NamedTuple):
    candidates: int | None
    samples: int
    seconds: float


_LIMITS: dict[Effort, _Limits] = {"quick": _Limits(6, 15, 10.0), "full": _Limits(None, 60, 30.0)}
"""By effort: the most candidates (the cheapest by the cost model), timed calls of one, and seconds for a problem."""


class _Scope(NamedTuple):
    effort: Effort
    note: Callable[[str], None]
    chosen: list["Chosen"]


_scope: ContextVar[_Scope | None] = ContextVar("sparsecomp_effort", default=None)


@contextmanager
def effort_scope(effort: Effort, note: Callable[[str], None] = lambda text: None) -> Iterator[list[Chosen]]:
    """Tune what is launched inside (in this thread) with `effort`, unless the environment says otherwise.

    Args:
        note: told of whatever was not as it should be: a candidate that is wrong, a problem that could not be tuned.

    Yields:
        The list that fills with what was chosen among several candidates inside.
    """
    scope = _Scope(effort, note, [])
    token = _scope.set(scope)
    try:
        yield scope.chosen
    finally:
        _scope.reset(token)


def scoped_effort() -> Effort | None:
    """The effort in force here, None where nothing is to be measured."""
    return tuner().effort()


@cache
def tuner() -> "Tuner":
    """The process's tuner, over the cache and settings of the environment as it was at the first call."""
    return Tuner(default_cache(), Settings.from_environment())


class Tuner:
    """Chooses candidates, and measures them where the effort in force asks for it.

    Args:
        cache: what was measured before, and where new measurements go.
        settings: `autotune` overrides the effort of any scope; `force_autotune` measures anew what the cache
            knows, once a signature.
        measure: the stopwatch.
        clock: seconds, for the time budget.

    Any number of threads may call it; one tunes at a time, since timings must not overlap. Of the processes that share
    a database, such as those of a training on one machine, one tunes a signature, and others wait and take its choice.
    """

    def __init__(
        self,
        cache: TuningCache,
        settings: Settings,
        measure: Measure = measure_ms,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stats = TuningStats()
        self._cache = cache
        self._settings = settings
        self._measure = measure
        self._clock = clock
        # reentrant: making a trial's operands, or a candidate, may launch other operations
        self._lock = threading.RLock()
        self._spent = 0.0
        self._tuned: set[tuple[str, Effort]] = set()

    def effort(self) -> Effort | None:
        """The effort in force, None where nothing is to be measured."""
        scope = _scope.get()
        effort = self._settings.autotune or (scope.effort if scope else None)
        return None if effort == "none" else effort

    def choose(self, operation: Operation[P], problem: P, device: torch.device, only: str = "") -> Choice:
        """The candidate for `problem`, measured now if the effort in force asks for it and the cache lacks times.

        Args:
            only: name of the template to choose among, if that takes the problem; any if empty.

        Raises:
            TuningError: no template takes the problem, every candidate was rejected, or one made the GPU unusable.
        """
        where = device_of(device)
        candidates = operation.candidates(problem, where)
        candidates = [one for one in candidates if one.template.name == only] or candidates
        if len(candidates) == 1:
            return Choice(candidates[0], "default")
        if not candidates:
            refusals = operation.refusals(problem, where)
            reasons = "; ".join(f"{name}: {reason}" for name, reason in refusals.items())
            raise TuningError(f"no kernel of {operation.name} can run {problem} on {where.name}: {reasons}")
        task = _Task(operation, problem, device, operation.signature(problem, where), candidates)
        effort = self.effort()
        if effort is not None and self._unfinished(task, effort):
            self._try_to_tune(task, effort)
        choice = task.choice(self._known(task))
        scope = _scope.get()
        if scope is not None:
            scope.chosen.append(Chosen(task.signature, choice))
        return choice

    def _known(self, task: "_Task") -> Entry:
        return self._cache.get(task.signature) or Entry(task.signature.fields)

    def _unfinished(self, task: "_Task", effort: Effort) -> bool:
        if (task.signature.key, effort) in self._tuned:
            return False
        known = self._known(task)
        return self._forced(task) or bool(task.untimed(known, effort)) or task.unchecked(known) is not None

    def _forced(self, task: "_Task") -> bool:
        renewed = any((task.signature.key, effort) in self._tuned for effort in _LIMITS)
        return self._settings.force_autotune and not renewed

    def _try_to_tune(self, task: "_Task", effort: Effort) -> None:
        hindrance = _hindrance()
        if hindrance is not None:
            _note(f"default configuration of {task.operation.name}: {hindrance}", logging.INFO)
            return
        apart(task.device, partial(self._tune_alone, task, effort))

    def _tune_alone(self, task: "_Task", effort: Effort) -> None:
        with self._lock, ExitStack() as turn:
            try:
                turn.enter_context(self._cache.alone(task.signature))
            except CacheError as error:
                _note(f"default configuration of {task.operation.name}: {error}", logging.WARNING)
                return
            if self._unfinished(task, effort):  # unless another thread or process has done it meanwhile
                self._tune_in_turn(task, effort)

    def _tune_in_turn(self, task: "_Task", effort: Effort) -> None:
        start = self._clock()
        try:
            with _quiet(task.device):
                self._tune(task, effort)
        except TuningError:
            raise
        except Exception as error:
            _note(f"tuning of {task.operation.name} failed: {first_line(error)}", logging.WARNING)
        self._spent += self._clock() - start
        # what the budget left out stays out in this process
        self._tuned.add((task.signature.key, effort))

    def _tune(self, task: "_Task", effort: Effort) -> None:
        synchronized(task.device)  # what went wrong before is no candidate's fault
        results = _Results(Entry(task.signature.fields) if self._forced(task) else self._known(task))
        self.stats.signatures += 1
        try:
            self._time(task, effort, results)
            self._check(task, results)
        finally:
            new = results.new
            self._cache.put(task.signature, new.times, new.verified, new.rejected, new.postponed)

    def _time(self, task: "_Task", effort: Effort, results: "_Results") -> None:
        untimed, limits = task.untimed(results.known, effort), _LIMITS[effort]
        if not untimed:
            return
        deadline = self._clock() + limits.seconds - self._spent
        operands = timed_operands(task.operation, task.problem, task.device)
        with Progress(f"tuning {task.operation.name}", len(untimed)) as progress:
            for candidate in untimed:
                fastest = task.fastest(results.known)
                best = inf if fastest is None else results.known.times[fastest.name]
                self.stats.timings += 1
                try:
                    launch = candidate.template.prepare(task.problem, candidate.config)
                    calls = [partial(launch, *each) for each in operands]
                    took = self._measure(calls, best=best, samples=limits.samples)
                except torch.OutOfMemoryError:
                    raise
                except Exception as error:
                    _reject(task, candidate, first_line(error), results)
                else:
                    results.add(times={candidate.name: max(took, _SHORTEST_MS)})
                progress.advance()
                if self._clock() > deadline + self._spent:  # what candidates launch has a budget of its own
                    left = [one.name for one in untimed if one.name not in results.known.times]
                    results.add(postponed=dict.fromkeys(left, effort))
                    break

    def _check(self, task: "_Task", results: "_Results") -> None:
        """Check the fastest until it is right."""
        while (candidate := task.unchecked(results.known)) is not None:
            self.stats.checks += 1
            why = fault(task.operation, task.problem, task.device, candidate)
            if why is None:
                results.add(verified=frozenset({candidate.name}))
            else:
                _reject(task, candidate, why, results)


class _Results:
    """What is known of a signature's candidates, and what of it is new."""

    def __init__(self, known: Entry) -> None:
        self.known = known
        self.new = Entry(known.fields)

    def add(self, **results: Any) -> None:
        newer = Entry(self.known.fields, **results)
        self.known, self.new = self.known.updated(newer), self.new.updated(newer)


@dataclass(frozen=True)
class _Task:
    operation: Operation[Any]
    problem: Any
    device: torch.device
    signature: KernelSignature
    candidates: Sequence[Candidate[Any]]

    def ranked(self) -> Sequence[Candidate[Any]]:
        return cost.rank(self.candidates, self.problem, card_of(self.device))

    def untimed(self, known: Entry, effort: Effort) -> list[Candidate[Any]]:
        """What the effort wants timed and is not, in the order of expectation."""
        if not any(_is_open(candidate, known, effort) for candidate in self.candidates):
            return []
        wanted = self.ranked()[: _LIMITS[effort].candidates]
        return [candidate for candidate in wanted if _is_open(candidate, known, effort)]

    def fastest(self, known: Entry) -> Candidate[Any] | None:
        timed = [one for one in self.candidates if one.name in known.times and one.name not in known.rejected]
        return min(timed, key=lambda candidate: known.times[candidate.name], default=None)

    def unchecked(self, known: Entry) -> Candidate[Any] | None:
        """The fastest, if nobody has checked it."""
        fastest = self.fastest(known)
        return None if fastest is None or fastest.name in known.verified else fastest

    def choice(self, known: Entry) -> Choice:
        right = [one for one in self.candidates if one.name in known.verified and one.name in known.times]
        if right:
            return Choice(min(right, key=lambda candidate: known.times[candidate.name]), "tuned")
        for candidate in self.ranked():
            if candidate.name not in known.rejected:
                return Choice(candidate, "default")
        reasons = "; ".join(f"{candidate.name}: {known.rejected[candidate.name]}" for candidate in self.candidates)
        raise TuningError(f"every kernel of {self.operation.name} was rejected for {self.problem}: {reasons}")


def _is_open(candidate: Candidate[Any], known: Entry, effort: Effort) -> bool:
    """Whether a candidate was neither timed nor rejected, nor left out by the budget of as great an effort."""
    if candidate.name in known.times or candidate.name in known.rejected:
        return False
    return known.postponed.get(candidate.name) not in (effort, "full")


def _reject(task: _Task, candidate: Candidate[Any], why: str, results: _Results) -> None:
    results.add(rejected={candidate.name: sentence(why)})
    _note(f"{candidate.name} is never used for {task.problem}: {why}", logging.WARNING)
    try:
        synchronized(task.device)
    except Exception as error:
        raise TuningError(
            f"{candidate.name} made the GPU unusable ({first_line(error)}): it is rejected from now on; start the "
            "process anew"
        ) from error


def _note(text: str, level: int) -> None:
    log.log(level, text)
    scope = _scope.get()
    if scope is not None:
        scope.note(text)


def _hindrance() -> str | None:
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return "tuning cannot run during CUDA graph capture"
    if torch.compiler.is_compiling() or _compat.is_fake(torch.empty(0)):
        return "tuning cannot run while a graph is traced"
    return None


@contextmanager
def _quiet(device: torch.device) -> Iterator[None]:
    """Nothing of the caller's: not its gradients, not its autocast, not its current device."""
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.autocast(device.type, enabled=False))
        if device.type == "cuda":
            stack.enter_context(torch.cuda.device(device))
        yield


def synchronized(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
