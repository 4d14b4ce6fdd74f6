"""What is worked out of tensors and kept: folded weights, proofs about masks, index lists, compressed copies.

Nothing tells of every write to a tensor, so that a result is kept only where the caller promised that there is none
(`sparsecomp.ops.frozen_weights`, the option `frozen`), or where its reader looks on the device whether it still holds.
A write that a version counter tells of, or other memory, is followed all the same, since asking costs next to nothing;
the replay of a CUDA graph cannot ask. Under `SPARSECOMP_DEBUG=1` each call compares the sources with what they were.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, UntypedStorage

from sparsecomp.environment import Settings
from sparsecomp.errors import FrozenWeightError
from sparsecomp.reference.frozen import promise_here
from sparsecomp.reference.ready import Ready

T = TypeVar("T")

Keep = Literal["asked", "always", "prepared", "guarded", "followed"]
"""When a result is kept: within `frozen_weights`; always; always, but made when a model is compiled and never later,
since calls may run in the memory of a CUDA graph, which is no place for what stays; always, by a reader that looks
itself whether it still holds, unless it was made within the `frozen_weights` that it is read in; or as `prepared`, by a
reader that brings it up to date in each call, whatever was written to its sources."""

_ALWAYS = object()
"""The promise that an option gives."""
_ADDRESS = Tensor.data_ptr


class _Source(NamedTuple):
    """A tensor that a result was made of. It is not referred to itself, so that it can be swapped for another.

    Attributes:
        version: None where autograd counts none.
    """

    memory: "weakref.ref[UntypedStorage]"
    version: int | None
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, eq=False, slots=True)
class _Kept:
    """A result and what it was made of.

    Attributes:
        tensors: in the result.
        version: of the first of them, which who was given it may write to; None where autograd counts none.
        promise: that its sources stay; None if they may be written to.
        ready: where and when it was made.
        seen: what the sources held, if that is to be checked.
        names: of the sources, for an error; empty if unknown.
        captured: results of these sources that CUDA graphs read, and so must live on.
    """

    result: Any
    tensors: tuple[Tensor, ...]
    version: int | None
    promise: object | None
    sources: tuple[_Source, ...]
    ready: Ready
    seen: tuple[Tensor, ...]
    names: tuple[str, ...]
    captured: list[Any]

    def current(self, sources: Sequence[Tensor], promise: object | None) -> bool:
        """Whether it may be read under a promise, or without one by who looks himself."""
        if promise is not None and self.promise is not promise and self.promise is not _ALWAYS:
            return False
        if self.version is not None and self.tensors[0]._version != self.version:
            return False
        for source, (memory, version, shape, strides, dtype) in zip(sources, self.sources, strict=False):
            if (
                memory() is not source.untyped_storage()
                or (version is not None and source._version != version)
                or source.dtype is not dtype
                or source.shape != shape
                or source.stride() != strides
            ):
                return False
        return True

    def check(self, sources: Sequence[Tensor]) -> None:
        """Look whether the promise was kept.

        Raises:
            FrozenWeightError: it was not.
        """
        numbered = (f"source {place + 1} of {len(sources)}" for place in range(len(sources)))
        check_kept(sources, self.seen, [f"`{name}`" for name in self.names] or list(numbered))


class Memo:
    """Results by function and sources, each kept as long as its sources' memory.

    A function is hashable, such as a named tuple with `__call__`; it returns a tensor, or a tuple with tensors.

    Attributes:
        made: how often a result has been made to be kept.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[object, ...], _Kept] = {}
        self.made = 0

    def __len__(self) -> int:
        """How many are kept now."""
        return len(self._kept)

    def of(self, function: Callable[..., T], sources: Sequence[Tensor], keep: Keep = "asked") -> T:
        """The result, kept or made now; safe to read on the current stream."""
        found = self.kept(function, sources, keep)
        return function(*sources) if found is None else found

    def kept(self, function: Callable[..., T], sources: Sequence[Tensor], keep: Keep = "asked") -> T | None:
        """The result that is kept, made if need be; None if none may be, here and now.

        Raises:
            FrozenWeightError: a source was written to, and `SPARSECOMP_DEBUG=1` was set when the result was made.
        """
        promise = promise_here() if keep in ("asked", "guarded") else _ALWAYS
        if promise is None and keep == "asked":
            return None
        kept = self._kept.get((function, *map(_ADDRESS, sources)))
        if kept is None or not kept.current(sources, promise):
            if keep in ("prepared", "followed") or any(map(_captures, sources)):
                return None
            kept = self._make(function, sources, promise)
        if kept.tensors[0].is_cuda:
            if torch.cuda.is_current_stream_capturing():
                kept.captured.append(kept.result)
                return kept.result
            kept.ready.await_(*kept.tensors)
        if kept.seen and promise is not None:
            kept.check(sources)
        return kept.result

    def prepare(
        self, function: Callable[..., T], sources: Sequence[Tensor], keep: Keep, names: Sequence[object] = ()
    ) -> T:
        """Make a result that is to be kept from now on, whatever was promised of its sources before.

        Args:
            names: of the sources, for an error.
        """
        promise = promise_here() if keep == "asked" else _ALWAYS
        assert promise is not None
        return self._make(function, sources, promise, tuple(map(str, names)), keep == "followed").result

    def results(self, kind: type[T]) -> list[T]:
        """What is kept now of a kind."""
        return [kept.result for kept in self._kept.values() if isinstance(kept.result, kind)]

    def _make(
        self, function: Callable[..., Any], sources: Sequence[Tensor], promise: object | None,
        names: tuple[str, ...] = (), followed: bool = False,
    ) -> _Kept:  # fmt: skip
        key = (function, *map(_ADDRESS, sources))

        def forget(dead: "weakref.ref[UntypedStorage]") -> None:
            found = self._kept.get(key)
            if found is not None and any(dead is source.memory for source in found.sources):
                del self._kept[key]

        def described(source: Tensor) -> _Source:
            memory = weakref.ref(source.untyped_storage(), forget)
            return _Source(memory, None if followed else _version(source), source.shape, source.stride(), source.dtype)

        self.made += 1
        with torch.no_grad():
            before, result = self._kept.get(key), function(*sources)
        tensors, debugged = tuple(_tensors_in(result)), not followed and Settings.from_environment().debug
        kept = self._kept[key] = _Kept(
            result, tensors, None if followed else _version(tensors[0]), promise, tuple(map(described, sources)),
            Ready.now(tensors[0].device),
            tuple(source.detach().clone() for source in sources) if debugged else (),
            names or (before.names if before else ()), before.captured if before else [],
        )  # fmt: skip
        return kept


MEMO = Memo()


def _version(tensor: Tensor) -> int | None:
    """How often a tensor was written to as far as autograd counts; None where it does not."""
    return None if tensor.is_inference() else tensor._version


def _captures(tensor: Tensor) -> bool:
    """Whether what happens to a tensor now becomes part of a CUDA graph."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _tensors_in(result: Any) -> Iterator[Tensor]:
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, tuple):
        for part in result:
            yield from _tensors_in(part)


def check_kept(sources: Sequence[Tensor], seen: Sequence[Tensor], names: Sequence[str]) -> None:
    """Look whether `sources` hold what was `seen`; waits for the device.

    Bits are compared, not numbers: NaN that stays is no write, and -0.0 in the place of 0.0 is one.

    Args:
        names: of each source, for the error.

    Raises:
        FrozenWeightError: one holds something else.
    """
    for source, one, name in zip(sources, seen, names, strict=True):
        if source.dtype is not one.dtype or source.shape != one.shape or not torch.equal(_bytes(source), _bytes(one)):
            raise FrozenWeightError(
                f"{name} ({source.dtype}, {'x'.join(map(str, source.shape))}) was promised to stay, but it was "
                "written to: write to it outside of sparsecomp.ops.frozen_weights(), compile without the option "
                "frozen, or compile again after the write"
            )


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)
