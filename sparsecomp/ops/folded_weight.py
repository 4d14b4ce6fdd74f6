"""Weights that are a formula of other tensors, such as mask * weight: computed once, packed, and kept.

Such a weight is made anew when one of its sources has another version, other memory or another shape. Version counters
tell of all that autograd counts: optimizers, ``load_state_dict``, operators in place, compiled or not. They miss writes
to a parameter's memory under another name, such as ``.data`` or a flat buffer, and the replay of a CUDA graph that
holds a training step: after those, call ``torch.autograd.graph.increment_version`` on what was written to. What a CUDA
graph captures is computed from the sources in each replay, except within ``frozen_weights``.
"""

import hashlib
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, fx

from sparsecomp.errors import FormatError
from sparsecomp.formats import BSR, CSR, NM
from sparsecomp.lowering.frozen import are_frozen
from sparsecomp.lowering.ready import Ready
from sparsecomp.ops.patterns import Layout, skew_of

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


class Packed(NamedTuple):
    """A weight as a product takes it.

    Attributes:
        values: (rows, columns) or a convolution's, if dense; else the stored values.
        pattern: index arrays; see `sparsecomp.ops.patterns`.
        layout: of a sparse matrix, None if dense.
    """

    values: Tensor
    pattern: tuple[Tensor, ...] = ()
    layout: Layout | None = None


def packed(weight: Tensor, format: str, block: tuple[int, int]) -> Packed:
    """A weight in a format: "dense", "csr", "bsr" of this (height, width) or "nm" of this (n, m).

    An N:M weight that does not keep to its n becomes CSR: the sources may have changed since the format was chosen.

    Raises:
        FormatError: another format, or no matrix.
    """
    if format == "dense":
        return Packed(weight)
    if format == "nm":
        try:
            matrix = NM.from_dense(weight, n=block[0], m=block[1])
        except FormatError:
            return packed(weight, "csr", (1, 1))
        return Packed(matrix.values, (matrix.indices,), Layout("nm", block, matrix.shape))
    if format not in ("csr", "bsr"):
        raise FormatError(f"format is {format!r}, needs one of dense, csr, bsr, nm")
    stored = BSR.from_dense(weight, block=block) if format == "bsr" else CSR.from_dense(weight)
    skews = (skew_of(stored.pointers), "even")
    return Packed(stored.values, (stored.pointers, stored.indices), Layout(format, block, stored.shape, skews))


@dataclass(frozen=True, eq=False, slots=True)
class _Kept:
    """A packed weight and what it was made of.

    Attributes:
        sources: the tensors.
        memory: aliases of theirs, which no other tensor can get the memory of.
        versions: of the sources.
        ready: where and when it was made.
    """

    weight: Packed
    sources: tuple["weakref.ref[Tensor]", ...]
    memory: tuple[Tensor, ...]
    versions: tuple[int, ...]
    ready: Ready

    def current(self, sources: Sequence[Tensor]) -> bool:
        """Whether it still is what the formula gives."""
        made_of = zip(sources, self.sources, self.versions, self.memory, strict=True)
        return all(
            source._version == version and _unchanged(known(), source, version) and source.is_set_to(memory)
            for source, known, version, memory in made_of
        )


def key_of(sources: Sequence[Tensor], name: str, format: str, block: tuple[int, int]) -> tuple[object, ...]:
    """What a packed weight is found by."""
    return (name, format, block, *(source.data_ptr() for source in sources))


def _unchanged(known: Tensor | None, source: Tensor, version: int) -> bool:
    """Whether a source is a known tensor, or an alias of one that is as it was, such as a backward pass is given."""
    return known is source or (known is not None and known._version == version)


class Folds:
    """Packed weights by formula, format and sources, each kept as long as its sources live.

    Attributes:
        made: how often a weight has been computed.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[object, ...], _Kept] = {}
        self._captured: set[_Kept] = set()
        self.made = 0

    def of(self, sources: Sequence[Tensor], name: str, format: str, block: tuple[int, int]) -> Packed:
        """The weight that a formula gives now, packed; safe to read on the current stream."""
        if any(source.is_inference() for source in sources):
            return self._make(sources, name, format, block)  # such tensors have no version
        key = key_of(sources, name, format, block)
        kept = self._kept.get(key)
        if any(source.is_cuda for source in sources) and torch.cuda.is_current_stream_capturing():
            if kept is None or not are_frozen() or not kept.current(sources):
                return self._make(sources, name, "dense", block)
            self._captured.add(kept)
            return kept.weight
        if kept is None or not kept.current(sources):
            kept = self._keep(key, sources, self._make(sources, name, format, block))
        kept.ready.await_(kept.weight.values, *kept.weight.pattern)
        return kept.weight

    def _make(self, sources: Sequence[Tensor], name: str, format: str, block: tuple[int, int]) -> Packed:
        self.made += 1
        return packed(computed(sources, name), format, block)

    def _keep(self, key: tuple[object, ...], sources: Sequence[Tensor], weight: Packed) -> _Kept:
        def forget(dead: "weakref.ref[Tensor]") -> None:
            found = self._kept.get(key)
            if found is not None and dead in found.sources:
                del self._kept[key]

        kept = _Kept(
            weight, tuple(weakref.ref(source, forget) for source in sources),
            tuple(source.detach() for source in sources), tuple(source._version for source in sources),
            Ready.now(weight.values.device),
        )  # fmt: skip
        self._kept[key] = kept
        return kept


FOLDS = Folds()
