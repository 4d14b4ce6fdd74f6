"""Every error sparsecomp raises on purpose, so that callers can catch them by type.

Each message says what was given, what is needed and what to do.
"""

import inspect
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from functools import wraps
from typing import Any, TypeVar

T = TypeVar("T")


class SparsecompError(Exception):
    """Base class of all errors raised by sparsecomp."""


class OptionError(SparsecompError, ValueError):
    """An option of the backend, or an environment variable, is unknown or has a value outside its domain."""


class InputError(SparsecompError, ValueError):
    """What a verb such as `explain`, `optimize` or `sparsify` was given is no model, or nothing to call it with."""


class ExtraError(SparsecompError, ImportError):
    """A library that an optional part needs is missing; the message names the extra that brings it."""


class RuleError(SparsecompError, RuntimeError):
    """A rewrite rule failed unexpectedly; raised only under `options={"strict": True}`."""


class FormatError(SparsecompError, ValueError):
    """A sparse matrix's arrays, layout, file or partner in an operation do not fit what the format can hold."""


class SignatureError(SparsecompError, ValueError):
    """A kernel signature holds a size or share that no call can have, or one that is not known yet."""


class CacheError(SparsecompError, ValueError):
    """A file of tuning results cannot be read or is not what it should be; nothing of it was taken."""


class TuningError(SparsecompError, RuntimeError):
    """No candidate of an operation could be used."""


class LibraryError(SparsecompError, RuntimeError):
    """A library of the GPU's maker is missing or too old, or refused a call."""


class SparseOperatorError(SparsecompError, RuntimeError):
    """An operator that a SparseTensor or a matrix does not take; nothing was made dense behind the caller's back."""


class PatternError(SparsecompError, ValueError):
    """Patterns do not fit one another: elements that differ where they must not, shapes, devices, or a change of a
    pattern that its rules refuse."""


class MaskError(SparsecompError, ValueError):
    """A mask, or the scores that make one, do not fit their weight; the old mask stays."""


class ReplicaError(SparsecompError, RuntimeError):
    """Processes of a distributed run hold other patterns, masks or settings, or one of them failed; all raise it."""


class FrozenWeightError(SparsecompError, RuntimeError):
    """A tensor was written to although the caller promised that it was not: looked for under `SPARSECOMP_DEBUG=1`.

    Looked for always: that a graph writes to no memory of promised tensors.
    """


class ScheduleError(SparsecompError, ValueError):
    """A sparsity, amnesty rate, cycle or layer budget lies outside its domain."""


class ConfigError(SparsecompError, ValueError):
    """A setting of the training cycle is unknown, of another type or outside its domain."""


class CheckpointError(SparsecompError, ValueError):
    """A checkpoint is damaged, of another model, config or data, or cannot hold a value; nothing was changed."""


class DataError(SparsecompError, RuntimeError):
    """The data ended before the training cycle did, or gave no batch at all."""


class DivergedError(SparsecompError, ArithmeticError):
    """The loss or a weight became NaN or infinite; checkpoints written before it are good."""


def nearest(names: Iterable[Any], known: Iterable[str]) -> str:
    """What misspelt names may have meant, for a message; empty if they are like nothing."""
    found = [match for name in names for match in get_close_matches(str(name), list(known), 1)]
    return f" (did you mean {' or '.join(map(repr, found))}?)" if found else ""


def typed_arguments(error: type[SparsecompError]) -> Callable[[type[T]], type[T]]:
    """A decorator of settings: arguments that the class does not take, or that it misses, are such an error."""

    def decorate(cls: type[T]) -> type[T]:
        initialise = cls.__init__
        signature = inspect.signature(initialise)
        names = list(signature.parameters)[1:]
        takes = f"its settings are {', '.join(names)}" if names else "it has no settings"

        @wraps(initialise)
        def checked(self: Any, *args: Any, **given: Any) -> None:
            try:
                signature.bind(self, *args, **given)
            except TypeError as problem:
                meant = nearest([name for name in given if name not in names], names)
                raise error(f"{cls.__name__}: {problem}{meant}; {takes}") from None
            initialise(self, *args, **given)

        cls.__init__ = checked
        return cls

    return decorate
