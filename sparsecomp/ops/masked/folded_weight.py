"""Weights that are a formula of other tensors, such as mask * weight: computed in each call, or once and kept.

Nothing tells of every write to a tensor, so that a weight is kept only where the caller promised that there is none:
see `sparsecomp.ops.frozen_weights` and the option `frozen`. A write that a version counter tells of, or other memory,
is followed all the same, since asking costs next to nothing; the replay of a CUDA graph cannot ask. Under
``SPARSECOMP_DEBUG=1`` each call compares the sources with what they were.
"""

import hashlib
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor, UntypedStorage, fx

from sparsecomp.environment import Settings
from sparsecomp.errors import FormatError
from sparsecomp.formats import CSR
from sparsecomp.ops.promise import check_kept
from sparsecomp.reference.frozen import promise_here
from sparsecomp.reference.patterns import Layout, layout_kind, stored_by_rows
from sparsecomp.reference.ready import Ready

Keep = Literal["asked", "always", "prepared"]
"""When a weight is kept: within `frozen_weights`; always; or always, but made when a model is compiled and never later,
since calls may run in the memory of a CUDA graph, which is no place for what stays."""

_FORMULAS: dict[str, Callable[..., Tensor]] = {}


def formula(gm: fx.GraphModule) -> str:
    """A name for the function that a graph without attributes computes, the same in every process."""
    return named_formula(hashlib.sha256(gm.code.encode()).hexdigest()[:16], gm.forward)


def named_formula(name: str, function: Callable[..., Tensor]) -> str:
    """Have `name`, which stands for nothing else, mean a function of the sources; returns it."""
    _FORMULAS[name] = function
    return name


def named(name: str) -> Callable[..., Tensor]:
    """The function of the sources that a name means.

    Raises:
        FormatError: no graph of this process has that formula.
    """
    if name not in _FORMULAS:
        raise FormatError(f"formula {name!r} is unknown in this process: compile the model here")
    return _FORMULAS[name]


def computed(sources: Sequence[Tensor], name: str) -> Tensor:
    """What the formula of that name gives.

    Raises:
        FormatError: as in `named`.
    """
    with torch.no_grad():
        return named(name)(*sources)


class Recipe(NamedTuple):
    """How an operator gets its weight, in one argument: each one that an operator has costs the host half a
    microsecond a call.

    Attributes:
        formula: from `formula`.
        format, block: in which it is kept, as in `packed`.
        keep: when.
    """

    formula: str
    format: str
    block: tuple[int, int]
    keep: Keep

    def written(self) -> str:
        """As the operator's argument."""
        return f"{self.formula} {self.format} {self.block[0]}x{self.block[1]} {self.keep}"

    @staticmethod
    @lru_cache(maxsize=8192)
    def read(text: str) -> "Recipe":
        """What was written."""
        formula, format, block, keep = text.rsplit(" ", 3)
        height, width = map(int, block.split("x"))
        return Recipe(formula, format, (height, width), cast(Keep, keep))


class Packed(NamedTuple):
    """A weight as a product takes it.

    Attributes:
        values: (rows, columns) or a convolution's, if dense; else the stored values.
        pattern: index arrays; see `sparsecomp.reference.patterns`.
        layout: of a sparse matrix, None if dense.
    """

    values: Tensor
    pattern: tuple[Tensor, ...] = ()
    layout: Layout | None = None


def packed(weight: Tensor, format: str, block: tuple[int, int]) -> Packed:
    """A weight in a format: "dense", "csr", "bsr" of this (height, width) or "nm" of this (n, m).

    A weight that does not keep to the n of N:M becomes CSR: the sources may have changed since the format was chosen.

    Raises:
        FormatError: another format, or no matrix.
    """
    if format == "dense":
        return Packed(weight)
    kind = layout_kind(format)
    try:
        matrix = kind.from_dense(weight, **kind.layout_of(block))
    except FormatError:
        if not kind.FILLED:
            raise
        matrix = CSR.from_dense(weight)
    return Packed(*stored_by_rows(matrix))


_ALWAYS = object()
"""The promise that an option gives."""


class _Source(NamedTuple):
    """A tensor that a weight was made of. It is not referred to itself, so that it can be swapped for another.

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
    """A packed weight and what it was made of.

    Attributes:
        promise: that its sources stay.
        ready: where and when it was made.
        seen: what the sources held, if that is to be checked.
        names: of the sources, for an error; empty if unknown.
        captured: weights of these sources that CUDA graphs read, and so must live on.
    """

    weight: Packed
    promise: object
    sources: tuple[_Source, ...]
    ready: Ready
    seen: tuple[Tensor, ...]
    names: tuple[str, ...]
    captured: list[Packed]

    def current(self, sources: Sequence[Tensor], promise: object) -> bool:
        """Whether it may be read under a promise."""
        if self.promise is not promise and self.promise is not _ALWAYS:
            return False
        for source, (memory, version, shape, strides, dtype) in zip(sources, self.sources, strict=True):
            if memory() is not source.untyped_storage() or (version is not None and source._version != version):
                return False
            if source.shape != shape or source.stride() != strides or source.dtype is not dtype:
                return False
        return True

    def check(self, sources: Sequence[Tensor]) -> None:
        """Look whether the promise was kept.

        Raises:
            FrozenWeightError: it was not.
        """
        numbered = (f"source {place + 1} of {len(sources)}" for place in range(len(sources)))
        check_kept(sources, self.seen, [f"`{name}`" for name in self.names] or list(numbered))


def _key(sources: Sequence[Tensor], name: str, format: str, block: tuple[int, int]) -> tuple[object, ...]:
    """What a packed weight is found by."""
    return (name, format, block, *[source.data_ptr() for source in sources])


def _captures(tensor: Tensor) -> bool:
    """Whether what happens to a tensor now becomes part of a CUDA graph."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


class Folds:
    """Packed weights by formula, format and sources, each kept as long as its sources' memory.

    Attributes:
        made: how often a weight has been made to be kept.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[object, ...], _Kept] = {}
        self.made = 0

    def of(
        self, sources: Sequence[Tensor], name: str, format: str, block: tuple[int, int], keep: Keep = "asked"
    ) -> Packed:
        """The weight that a formula gives: packed if it is kept, else dense; safe to read on the current stream."""
        return self.kept(sources, name, format, block, keep) or Packed(computed(sources, name))

    def kept(
        self, sources: Sequence[Tensor], name: str, format: str, block: tuple[int, int], keep: Keep
    ) -> Packed | None:
        """The weight that is kept, made if need be; None if none may be, here and now.

        Raises:
            FrozenWeightError: a source was written to, and ``SPARSECOMP_DEBUG=1`` was set when the weight was made.
        """
        promise = promise_here() if keep == "asked" else _ALWAYS
        if promise is None:
            return None
        kept = self._kept.get(_key(sources, name, format, block))
        if kept is None or not kept.current(sources, promise):
            if keep == "prepared" or any(map(_captures, sources)):
                return None
            kept = self._keep(sources, name, format, block, promise)
        if _captures(kept.weight.values):
            kept.captured.append(kept.weight)
            return kept.weight
        if kept.seen:
            kept.check(sources)
        kept.ready.await_(kept.weight.values, *kept.weight.pattern)
        return kept.weight

    def prepare(
        self, sources: Sequence[Tensor], name: str, format: str, block: tuple[int, int], keep: Keep,
        names: Sequence[object] = (),
    ) -> Packed:  # fmt: skip
        """Make a weight that is to be kept from now on, whatever was promised of its sources before."""
        promise = promise_here() if keep == "asked" else _ALWAYS
        assert promise is not None
        return self._keep(sources, name, format, block, promise, tuple(map(str, names))).weight

    def _keep(
        self, sources: Sequence[Tensor], name: str, format: str, block: tuple[int, int], promise: object,
        names: tuple[str, ...] = (),
    ) -> _Kept:  # fmt: skip
        key = _key(sources, name, format, block)

        def forget(dead: "weakref.ref[UntypedStorage]") -> None:
            found = self._kept.get(key)
            if found is not None and any(dead is source.memory for source in found.sources):
                del self._kept[key]

        def described(source: Tensor) -> _Source:
            version = None if source.is_inference() else source._version
            memory = weakref.ref(source.untyped_storage(), forget)
            return _Source(memory, version, source.shape, source.stride(), source.dtype)

        self.made += 1
        before, weight = self._kept.get(key), packed(computed(sources, name), format, block)
        kept = self._kept[key] = _Kept(
            weight, promise, tuple(map(described, sources)), Ready.now(weight.values.device),
            tuple(source.detach().clone() for source in sources) if Settings.from_environment().debug else (),
            names or (before.names if before else ()), before.captured if before else [],
        )  # fmt: skip
        return kept


FOLDS = Folds()
