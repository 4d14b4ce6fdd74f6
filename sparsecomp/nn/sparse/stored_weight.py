"""A module whose weight is a sparse matrix, held as plain tensors.

The stored numbers are an ordinary parameter and the index arrays ordinary buffers, so that optimizers, autocast and
gradient scalers, data parallelism, checkpoints, shared memory and compiled graphs need to know nothing of them.
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, fx, is_grad_enabled, nn
from torch.compiler import is_compiling

from sparsecomp import _compat
from sparsecomp.errors import FormatError, SparseOperatorError
from sparsecomp.formats import SparseMatrix
from sparsecomp.nn.derived import moved_whole
from sparsecomp.ops.sparse.dense_weight import dense_to_stored
from sparsecomp.reference.patterns import skew_of
from sparsecomp.tensor.index_arrays import IndexArrays
from sparsecomp.tensor.sparse_tensor import SparseTensor, view_of

_TRANSPOSED = ("transposed_pointers", "transposed_indices", "transposed_order", "transposed_source")


class ReadState(NamedTuple):
    """A checkpoint as a sparse layer reads it.

    Attributes:
        state: the checkpoint with the layer's own names.
        pattern: what the layer has with it; None where it gives none or its arrays have no contents.
        dropped: non-zero elements of a dense weight for which the layer's pattern has no place.
    """

    state: dict[str, Any]
    pattern: IndexArrays | None
    dropped: int


def told_of_dropped(count: int) -> str:
    """What to say of non-zero weights that a load leaves out."""
    return (
        f"{count} non-zero weights of the dense checkpoint are dropped, for which the sparse layers' patterns have no "
        "place: load it into the dense model and prune that, or refuse it by strict_pattern=True"
    )


class StoredWeight(nn.Module):
    """The weight of a sparse layer.

    Args:
        weight: (rows, columns), without a batch; its arrays are kept, not copied.
        requires_grad: whether `values` takes a gradient.

    Attributes:
        values: the stored numbers, a parameter: (entries,), (blocks, height, width) or (rows, groups · n).
        pointers, indices: buffers, as `sparsecomp.reference.patterns` describes them. N:M has no pointers,
            NARROW has `starts`, `chunks` and `bases` in their place, BITMAP `starts` and `heads` in place of both.
        transposed_pointers, transposed_indices, transposed_order, transposed_source: buffers that follow from those, of
            `sparsecomp.reference.patterns.kept_transpose`, and are in no checkpoint; None where no product needs them.
        format: name of the class in `sparsecomp.formats`.
        capacity: entries that the arrays have room for, `reserve`; 0 for no more than there are. What lies
            behind the last entry is read by no product and in no checkpoint.
        strict_pattern: whether a checkpoint of another pattern is refused; False unless set. For a whole model, and so
            that a refusal changes nothing of it: `sparsecomp.load_state_dict`.

    Raises:
        FormatError: the weight is a batch or no sparse matrix.
    """

    strict_pattern: bool = False
    capacity: int = 0
    values: nn.Parameter
    pointers: Tensor
    indices: Tensor
    transposed_pointers: Tensor
    transposed_indices: Tensor
    transposed_order: Tensor | None
    transposed_source: Tensor

    def __init__(self, weight: SparseMatrix | SparseTensor, requires_grad: bool = True) -> None:
        super().__init__()
        self.capacity = 0  # Dynamo finds it sooner than the class's
        if not isinstance(weight, SparseMatrix | SparseTensor):
            raise FormatError(f"weight is a {type(weight).__name__}, needs a matrix of sparsecomp.formats")
        self._hold(weight, requires_grad)

    def _hold(self, weight: SparseMatrix | SparseTensor, requires_grad: bool) -> None:
        """Have a new parameter and new buffers, of a weight of any shape."""
        values, pattern = IndexArrays.of(weight.matrix if isinstance(weight, SparseTensor) else weight)
        self.values = nn.Parameter(values.detach().contiguous(), requires_grad)
        self.format, self._by_columns = pattern.format, pattern.stored_by_columns(False)
        self._names = pattern.layout.kind.INDICES
        for name, array in zip(self._names, pattern.arrays, strict=True):
            self.register_buffer(name, array)
        for name in _TRANSPOSED:
            self.register_buffer(name, None, persistent=False)
        self._describe(pattern)

    def _describe(self, pattern: IndexArrays) -> None:
        """Keep what follows from the index arrays; reads from the device."""
        self._derive(pattern)
        self._layout, self._written = pattern.layout, pattern.layout.written()
        self._remember()

    @torch.no_grad()
    def store(self, values: Tensor, *arrays: Tensor) -> None:
        """Store other elements; nothing is checked.

        Written into the memory that is there where the sizes allow it, so that compiled and captured graphs follow;
        how even the rows were told to be stays, since only speed depends on it. Reads nothing from a GPU.

        Args:
            values: as `self.values`, for the entries of `arrays`.
            arrays: index arrays, in the order of the format's; see `sparsecomp.reference.patterns`.
        """
        for name, given in zip(self.stored_names, (values, *arrays), strict=True):
            padded = self._padded(name, given)
            self._make_room(name, padded)
            getattr(self, name).copy_(padded)
        layout = self._layout._replace(block=self._block_for(values))
        self._layout, self._written = layout, layout.written()
        self._derive(IndexArrays(self.format, layout, tuple(self._own())), measured=False)
        self._remember()

    def _block_for(self, values: Tensor) -> tuple[int, int]:
        """The layout's block for these values."""
        return self._layout.kind.block_for(self._layout.block, values.shape[0])

    def reserve(self, capacity: int) -> None:
        """Have room for so many entries, so that a change of the pattern to as many or fewer compiles nothing again.

        Entries of the capacity that the pattern does not use are read by no product, whatever x holds, and their values
        and gradients are 0; `weight` and checkpoints leave them out. The parameter and an optimizer's state have the
        capacity's size: reserve before a state is loaded, or by `PatternManager.reserve`, which takes it along. A
        pattern of more entries makes room for them, as without. 0 gives what is spare back.

        Raises:
            FormatError: less than the layer stores, a format other than CSR and CSC, or values that are computed.
        """
        if not isinstance(self.values, nn.Parameter):
            raise FormatError("the layer's values are computed, by a parametrization: remove it first")
        if self.format not in ("CSR", "CSC"):
            raise FormatError(f"the layer is in {self.format}: one in CSR or CSC can have spare capacity")
        if type(capacity) is not int or 0 != capacity < self._entries:
            raise FormatError(
                f"capacity is {capacity!r}, needs a whole number of {self._entries} or more, the entries, or 0 for none"
            )
        stored = [one.detach() for one in self._stored()]
        self.capacity = capacity
        self.store(*stored)

    def _live(self) -> Tensor:
        """The values, with 0 in spare capacity, and 0 as its gradient, whatever a kernel leaves there."""
        if not self.capacity:
            return self.values
        places = torch.arange(self.values.shape[0], dtype=self.pointers.dtype, device=self.values.device)
        return torch.where(places < self.pointers[-1], self.values, 0)

    def _remember(self) -> None:
        """Which arrays are described. Somebody may write to them, which each product sees by itself."""
        self._described = self._last, self.transposed_order

    def _derive(self, pattern: IndexArrays, measured: bool = True) -> None:
        # what is there stays that of the pattern: a gradient by x reads it, frozen values or not
        if self.values.requires_grad or self._by_columns or self.transposed_order is not None:
            pattern.keep_transposed(measured)
            for name, array in zip(_TRANSPOSED, pattern.transposed or (), strict=True):
                self._write(name, array)

    def _write(self, name: str, array: Tensor) -> None:
        """Into the buffer that is there, which a captured graph reads, if it fits."""
        kept = getattr(self, name)
        if kept is None or (kept.shape, kept.dtype, kept.device) != (array.shape, array.dtype, array.device):
            setattr(self, name, array)
        else:
            kept.copy_(array)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        described = self._is_described()
        with moved_whole(self, _TRANSPOSED, lambda: self._last.device):
            super()._apply(fn, recurse)
        if described:
            self._remember()
        return self

    def _is_described(self) -> bool:
        """Whether the index arrays are those that `_describe` was given, and none of `torch.func.functional_call`."""
        return self._last is self._described[0]

    @property
    def _last(self) -> Tensor:
        """The last of the index arrays."""
        return getattr(self, self._names[-1])

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the weight."""
        rows, cols = self._layout.shape
        return (cols, rows) if self._by_columns else (rows, cols)

    @property
    def weight(self) -> SparseTensor:
        """The weight as a tensor on the same memory, to look at or to multiply with; gradients flow to `values`."""
        transposed = [] if self.capacity else self._kept_transposed()
        values, *own = self._stored()
        return view_of(values, own + transposed, self.format, self._written)

    @property
    def stored_names(self) -> tuple[str, ...]:
        """Names of the parameter and buffers whose sizes are those of the pattern."""
        return ("values", *self._names)

    def _own(self) -> list[Tensor]:
        return [getattr(self, name) for name in self._names]

    def _stored(self) -> list[Tensor]:
        """The parameter and buffers of `stored_names` without spare capacity."""
        return [self._compact(name, getattr(self, name)) for name in self.stored_names]

    @property
    def _entries(self) -> int:
        """How many there are; reads from the device where there is room for more."""
        return int(self.pointers[-1]) if self.capacity and not self.pointers.is_meta else self.values.shape[0]

    def _compact(self, name: str, array: Tensor) -> Tensor:
        """One of the arrays without spare capacity."""
        return array if not self.capacity or "pointers" in name else array[: self._entries]

    def _padded(self, name: str, array: Tensor) -> Tensor:
        """One of the arrays with the capacity behind it: zeros, which are indices too."""
        spare = self.capacity - array.shape[0]
        return array if "pointers" in name or spare <= 0 else F.pad(array, (0, spare))

    def _kept_transposed(self) -> list[Tensor]:
        # functional_call may have put another pattern in place of the layer's, without its transpose
        if self.transposed_order is None or self._is_described() != (self.transposed_order is self._described[1]):
            return []
        return [getattr(self, name) for name in _TRANSPOSED]

    def _pattern(self) -> list[Tensor]:
        """Index arrays for an operator; those of the transpose only where they are read."""
        if is_grad_enabled():
            missing = self.transposed_order is None and self.values.requires_grad and self._is_described()
            if missing and not is_compiling():
                self._describe(IndexArrays(self.format, self._layout, tuple(self._own())))
        elif not self._by_columns and (is_compiling() or not _compat.jit_traces()):
            return self._own()  # a trace is checked with and without gradients
        return self._own() + self._kept_transposed()

    def _as_node(self, x: fx.Proxy) -> fx.Proxy:
        """The call as one node of the graph that `torch.fx` traces, which is what it makes of torch's own layers.

        Raises:
            SparseOperatorError: the layer has hooks, or is traced alone.
        """
        path = cast(fx.Tracer, x.tracer).path_of_module(self)
        if not path or _compat.hooks_of(self):
            raise SparseOperatorError(
                "torch.fx traces a sparse layer as one node: not one that is the whole model, nor one with hooks, "
                "which would run in tracing too. Trace a module that holds it by a Tracer whose is_leaf_module knows it"
            )
        return x.tracer.create_proxy("call_module", path, (x,), {})

    # -- parametrizations

    def __setattr__(self, name: str, value: Any) -> None:
        is_torchs = name == "parametrizations" and isinstance(value, nn.ModuleDict)
        super().__setattr__(name, _Parametrizations(dict(value.items())) if is_torchs else value)

    # -- checkpoints

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in self.stored_names:
            if (saved := destination.get(f"{prefix}{name}")) is not None:
                destination[f"{prefix}{name}"] = self._compact(name, saved)

    def _load_from_state_dict(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], strict: bool, *rest: Any
    ) -> None:
        """Take values and pattern of a checkpoint, whatever pattern the layer had.

        Raises:
            FormatError: as `read_state`. The layer is as it was.
        """
        state_dict, pattern, dropped = StoredWeight.read_state(
            self, self._taken(state_dict, prefix), prefix, self.strict_pattern
        )
        for name in self.stored_names:
            if (found := state_dict.get(f"{prefix}{name}")) is not None:
                state_dict[f"{prefix}{name}"] = padded = self._padded(name, found)
                self._make_room(name, padded)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, *rest)
        if pattern is not None and not self.values.is_meta:
            self._describe(IndexArrays(self.format, pattern.layout, tuple(self._own())))
        if dropped:
            warnings.warn(f"{prefix}weight: {told_of_dropped(dropped)}", stacklevel=2)

    def _taken(self, state: Mapping[str, Any], prefix: str) -> Mapping[str, Any]:
        """The part of a checkpoint that this layer is."""
        return state

    def read_state(self, state: Mapping[str, Any], prefix: str, strict_pattern: bool) -> ReadState:
        """What the layer makes of a checkpoint. Changes nothing.

        A whole `weight` becomes values and index arrays: a dense one by the layer's pattern, of which what that stores
        is taken, or the SparseTensor of version 0.1.

        Args:
            state: of a model.
            prefix: of the layer's names in it.
            strict_pattern: refuse a checkpoint of another pattern.

        Raises:
            FormatError: the checkpoint's weight is no matrix of this format and shape, or not of the layer's pattern
                where that is strict.
        """
        state = dict(state)
        names = ("weight", *self.stored_names, *self._parameters)
        if wrong := [name for name in names if not isinstance(state.get(f"{prefix}{name}"), Tensor | None)]:
            raise FormatError(f"the checkpoint's {', '.join(dict.fromkeys(wrong))} must be tensors")
        weight, dropped = state.pop(f"{prefix}weight", None), 0
        if weight is not None:
            if f"{prefix}values" in state:
                raise FormatError("the checkpoint has both weight and values: leave one out")
            stored = self._state_of(weight)
            dropped = _dropped(weight, stored["values"])
            if dropped and strict_pattern:
                raise FormatError(
                    f"the checkpoint's dense weight has {dropped} non-zero elements that the layer, whose pattern is "
                    "strict, does not store: leave strict_pattern out to drop them"
                )
            state |= {f"{prefix}{name}": array for name, array in stored.items()}
        given = {name: found for name in self.stored_names if (found := state.get(f"{prefix}{name}")) is not None}
        pattern = self._pattern_of(given, strict_pattern)
        self._check_others(state, prefix)
        return ReadState(state, pattern, dropped)

    def _state_of(self, weight: Tensor) -> dict[str, Tensor]:
        """Values and index arrays of a checkpoint that has a whole weight: a SparseTensor, or a dense one."""
        sparse = isinstance(weight, SparseTensor)
        given = weight.format if sparse else "dense"
        if tuple(weight.shape) != self.shape or (sparse and weight.format != self.format):
            raise FormatError(
                f"the checkpoint's weight is {given} {tuple(weight.shape)}, the layer's {self.format} {self.shape}: "
                "make the layer of that format and shape"
            )
        if sparse:
            values, pattern = IndexArrays.of(weight.matrix)
            return {"values": values, **dict(zip(self._names, pattern.arrays, strict=True))}
        if self._last.is_meta:
            raise FormatError(
                f"the checkpoint's weight is dense and the layer, {self.format} {self.shape}, is on the meta device, "
                "where it has no pattern: make the layer elsewhere"
            )
        arrays = [array.to(weight.device) for array in self._stored()[1:]]
        values = dense_to_stored(weight.detach(), arrays, self._written, self._by_columns)
        return {"values": values, **dict(zip(self._names, arrays, strict=True))}

    def _pattern_of(self, given: dict[str, Tensor], strict: bool) -> IndexArrays | None:
        """The pattern that the layer has with these arrays; None where they have no contents."""
        # values may be missing, being computed by a parametrization; what is there must fit what stays
        own = self._stored()
        tensors = [given.get(name, mine) for name, mine in zip(self.stored_names, own, strict=True)]
        sizes = f"{self._sizes(tensors)}, the layer's are {self._sizes(own)}"
        has_contents = given and not any(tensor.is_meta for tensor in tensors)
        if strict and has_contents:
            self._compare(tensors, sizes)
        try:
            pattern = self._checked(*tensors) if has_contents else None
            self._check_room(tensors, own)
            return pattern
        except FormatError as error:
            raise FormatError(
                f"the checkpoint is no {self.format} matrix of the layer's shape {self.shape}: {error}. Its arrays are "
                f"{sizes}: make the layer of the checkpoint's format and shape"
            ) from error

    def _compare(self, tensors: Sequence[Tensor], sizes: str) -> None:
        """Raise FormatError unless the index arrays of these, behind the values, are the layer's."""
        pairs = list(zip(tensors, self._stored(), strict=True))
        alike = all(one.shape == other.shape for one, other in pairs)
        if not alike or not all(torch.equal(one.to(other.device), other) for one, other in pairs[1:]):
            how = "as many, but its indices differ" if alike else f"its are {sizes}"
            raise FormatError(
                f"the checkpoint stores other elements than the layer, whose pattern is strict: {how}: "
                "leave strict_pattern out to take its pattern"
            )

    def _check_room(self, tensors: Sequence[Tensor], own: Sequence[Tensor]) -> None:
        """Raise FormatError unless each tensor differs from the layer's in its number of entries alone."""
        for name, one, mine in zip(self.stored_names, tensors, own, strict=True):
            if one.dim() != mine.dim() or one.shape[1:] != mine.shape[1:] or (
                name == "pointers" and one.shape != mine.shape
            ):  # fmt: skip
                raise FormatError(f"{name} {tuple(one.shape)} do not fit the layer's {tuple(mine.shape)}")

    def _sizes(self, tensors: Sequence[Tensor]) -> str:
        named = zip(self.stored_names, tensors, strict=True)
        return ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in named)

    def _check_others(self, state_dict: Mapping[str, Any], prefix: str) -> None:
        """Raise FormatError unless what the layer has besides, such as a bias, keeps its shape."""
        for name, own in self._parameters.items():
            found = None if name == "values" or own is None else state_dict.get(f"{prefix}{name}")
            if own is not None and found is not None and found.shape != own.shape:
                raise FormatError(
                    f"the checkpoint's {name} has shape {tuple(found.shape)}, the layer's {tuple(own.shape)}: make the "
                    "layer of the checkpoint's sizes"
                )

    def _make_room(self, name: str, given: Tensor) -> None:
        """Have as many entries as the checkpoint has."""
        own = getattr(self, name)
        if name == "values" and own.shape != given.shape:
            # of another dtype for a moment: else torch keeps the node of an earlier graph that adds up gradients,
            # for as long as somebody holds a loss of it, and with it the former size
            fresh = own.data.new_empty(given.shape)
            other = torch.float64 if fresh.dtype is torch.float32 else torch.float32
            self.values.data = fresh.new_empty(0, dtype=other)
            self.values.data = fresh
            self.values.grad = None  # of other elements
        elif name != "values" and (own.shape != given.shape or own.itemsize < given.itemsize):
            setattr(self, name, own.new_empty(given.shape, dtype=given.dtype))

    def _checked(self, values: Tensor, *arrays: Tensor) -> IndexArrays:
        """The pattern of a checkpoint's arrays, with the layout that follows from them.

        Raises:
            FormatError: they are no compact matrix of this format and shape.
        """
        layout = self._layout._replace(skews=("even", "even"), block=self._block_for(values))
        pattern = IndexArrays(self.format, layout, arrays)
        matrix = pattern.matrix(values.detach(), False)
        matrix.validate()
        if "pointers" not in self._names:
            return IndexArrays.of(matrix)[1]
        pointers, entries = arrays[0], arrays[1].numel()
        if (int(pointers[0]), int(pointers[-1])) != (0, entries):
            raise FormatError(f"{entries} entries but pointers to other ones: save a compact matrix in the checkpoint")
        return IndexArrays(self.format, layout._replace(skews=(skew_of(pointers), "even")), arrays)

    def extra_repr(self) -> str:
        """Sizes and format, for print."""
        return f"{self.shape[0]}, {self.shape[1]}, format={self.format}"


def _dropped(weight: Tensor, values: Tensor) -> int:
    """How many non-zero elements a dense weight has beside those that are stored."""
    if isinstance(weight, SparseTensor) or weight.is_meta:
        return 0
    return int(weight.count_nonzero() - values.count_nonzero())


class _Parametrizations(nn.ModuleDict):
    """Parametrizations by parameter: torch's own container refuses the name `values`, which is one of its methods."""

    @property
    def values(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """No method: nn.Module looks for a module of that name."""
        raise AttributeError("values")
