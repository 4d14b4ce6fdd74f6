"""A module whose weight is a sparse matrix, held as plain tensors.

The stored numbers are an ordinary parameter and the index arrays ordinary buffers, so that optimizers, autocast and
gradient scalers, data parallelism, checkpoints, shared memory and compiled graphs need to know nothing of them.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn

from sparsecomp.errors import FormatError
from sparsecomp.formats import SparseMatrix
from sparsecomp.ops.patterns import skew_of
from sparsecomp.sparse_pattern import Pattern
from sparsecomp.sparse_tensor import SparseTensor

_OWN = {"csr": ("pointers", "indices"), "bsr": ("pointers", "indices"), "nm": ("indices",)}
"""Names of the index arrays by layout."""
_TRANSPOSED = ("transposed_pointers", "transposed_indices", "transposed_order")


class StoredWeight(nn.Module):
    """The weight of a sparse layer.

    Args:
        weight: (rows, columns), without a batch; its arrays are kept, not copied.
        requires_grad: whether `values` takes a gradient.

    Attributes:
        values: the stored numbers, a parameter: (entries,), (blocks, height, width) or (rows, groups · n).
        pointers, indices: buffers, as `sparsecomp.ops.patterns` describes them. N:M has no pointers.
        transposed_pointers, transposed_indices, transposed_order: buffers that follow from those and are in no
            checkpoint; None where no product needs them.
        format: name of the class in `sparsecomp.formats`.

    Raises:
        FormatError: the weight is a batch or no sparse matrix.
    """

    values: nn.Parameter
    pointers: Tensor
    indices: Tensor
    transposed_pointers: Tensor
    transposed_indices: Tensor
    transposed_order: Tensor | None

    def __init__(self, weight: SparseMatrix | SparseTensor, requires_grad: bool = True) -> None:
        super().__init__()
        if not isinstance(weight, SparseMatrix | SparseTensor):
            raise FormatError(f"weight is a {type(weight).__name__}, needs a matrix of sparsecomp.formats")
        values, pattern = Pattern.of(weight.matrix if isinstance(weight, SparseTensor) else weight)
        self.values = nn.Parameter(values.detach().contiguous(), requires_grad)
        self.format, self._by_columns = pattern.format, pattern.stored_by_columns(False)
        for name, array in zip(_OWN[pattern.layout.format], pattern.arrays, strict=True):
            self.register_buffer(name, array)
        for name in _TRANSPOSED:
            self.register_buffer(name, None, persistent=False)
        self._describe(pattern)

    def _describe(self, pattern: Pattern) -> None:
        """Keep what follows from the index arrays; reads from the device."""
        if self.values.requires_grad or self._by_columns:
            pattern.keep_transposed()
            for name, array in zip(_TRANSPOSED, pattern.transposed or (), strict=True):
                setattr(self, name, array)
        self._layout, self._written = pattern.layout, pattern.layout.written()

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the weight."""
        rows, cols = self._layout.shape
        return (cols, rows) if self._by_columns else (rows, cols)

    @property
    def weight(self) -> SparseTensor:
        """The weight as a tensor on the same memory, to look at or to multiply with; gradients flow to `values`."""
        pattern = Pattern(self.format, self._layout, tuple(self._own()), tuple(self._kept_transposed()) or None)
        return cast(SparseTensor, _View.apply(self.values, pattern))

    def _own(self) -> list[Tensor]:
        return [self.indices] if self.format == "NM" else [self.pointers, self.indices]

    def _kept_transposed(self) -> list[Tensor]:
        if self.transposed_order is None:
            return []
        return [self.transposed_pointers, self.transposed_indices, self.transposed_order]

    def _pattern(self) -> list[Tensor]:
        """Index arrays for an operator; those of the transpose only where they are read."""
        if torch.is_grad_enabled():
            missing = self.transposed_order is None and self.values.requires_grad
            if missing and not torch.compiler.is_compiling():
                self._describe(Pattern(self.format, self._layout, tuple(self._own())))
            return self._own() + self._kept_transposed()
        return self._own() + self._kept_transposed() if self._by_columns else self._own()

    # -- checkpoints

    def _load_from_state_dict(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], strict: bool, *rest: Any
    ) -> None:
        """Take values and pattern of a checkpoint, whatever pattern the layer had; one of version 0.1 has a `weight`.

        Raises:
            FormatError: the checkpoint's weight is no matrix of this format and shape.
        """
        weight = state_dict.get(f"{prefix}weight")
        if weight is not None:
            state_dict = {key: value for key, value in state_dict.items() if key != f"{prefix}weight"}
            state_dict |= self._state_of(weight, prefix)
        given = [state_dict.get(f"{prefix}{name}") for name in ("values", *_OWN[self._layout.format])]
        arrays = [tensor for tensor in given if isinstance(tensor, Tensor) and not tensor.is_meta]
        # before anything of the layer changes
        pattern = self._checked(*arrays) if len(arrays) == len(given) else None
        for name, tensor in zip(("values", "indices"), (given[0], given[-1]), strict=True):
            if tensor is not None:
                self._make_room(name, tensor)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, *rest)
        if pattern is not None and not self.values.is_meta:
            self._describe(Pattern(self.format, pattern.layout, tuple(self._own())))

    def _state_of(self, weight: Tensor, prefix: str) -> dict[str, Tensor]:
        if not isinstance(weight, SparseTensor) or (weight.format, tuple(weight.shape)) != (self.format, self.shape):
            given = weight.format if isinstance(weight, SparseTensor) else "dense"
            raise FormatError(
                f"the checkpoint's weight is {given} {tuple(weight.shape)}, the layer's {self.format} {self.shape}: "
                "make the layer of that format and shape"
            )
        values, pattern = Pattern.of(weight.matrix)
        arrays = zip(_OWN[self._layout.format], pattern.arrays, strict=True)
        return {f"{prefix}values": values, **{f"{prefix}{name}": array for name, array in arrays}}

    def _make_room(self, name: str, given: Tensor) -> None:
        """Have as many entries as the checkpoint has; all else must be as it is, which torch checks."""
        own = getattr(self, name)
        if own.dim() == given.dim() and own.shape[1:] == given.shape[1:] and own.shape[0] != given.shape[0]:
            if name == "values":
                self.values.data = own.data.new_empty(given.shape)
            elif name == "indices":
                self.indices = own.new_empty(given.shape)

    def _checked(self, values: Tensor, *arrays: Tensor) -> Pattern:
        """The pattern of a checkpoint's arrays, with the layout that follows from them.

        Raises:
            FormatError: they are no compact matrix of this format and shape.
        """
        layout = self._layout._replace(skews=("even", "even"))
        pattern = Pattern(self.format, layout, arrays)
        pattern.matrix(values.detach(), False).validate()
        if layout.format == "nm":
            return pattern
        pointers, entries = arrays[0], arrays[1].numel()
        if (int(pointers[0]), int(pointers[-1])) != (0, entries):
            raise FormatError(f"{entries} entries but pointers to other ones: save a compact matrix in the checkpoint")
        return Pattern(self.format, layout._replace(skews=(skew_of(pointers), "even")), arrays)

    def extra_repr(self) -> str:
        """Sizes and format, for print."""
        return f"{self.shape[0]}, {self.shape[1]}, format={self.format}"


class _View(torch.autograd.Function):
    """A SparseTensor of values, whose gradient goes back to them."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, pattern: Pattern) -> Tensor:
        return SparseTensor._make(values.detach(), pattern, False)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        (grad,) = grads
        return grad._values, None
