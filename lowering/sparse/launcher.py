"""The launcher that multiplies a format's matrices, found by the name that the format gives it.

A module of this room that defines what `Launcher` does is one; Triton loads with it.
"""

import importlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from sparsecomp.formats import BSR, CSR
from sparsecomp.lowering.launch.epilogue import Output
from sparsecomp.lowering.tuning.template import Operation
from sparsecomp.reference.patterns import Layout


class Launcher(Protocol):
    """What a launcher's module defines.

    One may have `csr_matrix(values, pattern, layout)` besides, which makes CSR's own arrays of a format's and gives
    them with their layout: a weight is then transposed, and written out, by CSR's kernels. One that is a `Writer` too
    writes it out itself.
    """

    def multiply(
        self, values: Tensor, pattern: Sequence[Tensor], layout: Layout, transpose: bool, dense: Tensor, out: Tensor,
        **finish: Any,
    ) -> None:  # fmt: skip
        """Write activation(scale · (op(S) @ dense) + bias + residual) to `out`.

        Args:
            values, pattern, layout, transpose: as of `sparsecomp.ops.spmm`; a format's own launcher is not asked for
                transposes unless it is that of CSR or BSR.
            finish: `bias`, `bias_axis`, `residual`, `activation` and `scale`.
        """
        ...

    def problem_of(
        self, values: Tensor, layout: Layout, dense: Tensor, out: Tensor, described: Output, *index: torch.dtype
    ) -> Any:
        """The product that these tensors on the meta device describe.

        Args:
            index: dtype of the index arrays, which are contiguous, as the values are, and where there are more than two
                of the last one; by default the usual ones.
        """
        ...

    def operations(self, layout: Layout) -> tuple[Operation[Any], ...]:
        """Those that can do such a product: our own, whose launches take the format's arrays in the order of its
        constructor, and others that keep a copy of the weight."""
        ...


class Writer(Protocol):
    """What the launcher of a format defines that has kernels of its own for the dense form."""

    def written_dense(self, values: Tensor, pattern: Sequence[Tensor], layout: Layout) -> Tensor:
        """The matrix (rows, columns), contiguous and of the dtype of the values; zero where it stores nothing.

        Args:
            values, pattern: contiguous, without a batch.
        """
        ...

    def read_dense(self, dense: Tensor, pattern: Sequence[Tensor], layout: Layout, out: Tensor) -> None:
        """out (entries,) = dense (rows, columns), of any strides, at the stored places."""
        ...


@lru_cache(maxsize=8192)
def launcher_of(layout: Layout, transpose: bool = False) -> Launcher:
    """The launcher for a matrix of this layout, or for its transpose."""
    name = multiplied_as(layout, transpose).kind.KERNEL
    return cast(Launcher, importlib.import_module(f"sparsecomp.lowering.sparse.{name}"))


def multiplied_as(layout: Layout, transpose: bool = False) -> Layout:
    """The layout in which a matrix, or its transpose, is multiplied: its own if that has a launcher of its own; else,
    and for a transpose, whose entries are sorted by rows, CSR's or BSR's."""
    general = BSR if layout.entry else CSR
    if not transpose and layout.kind.KERNEL != general.KERNEL:
        return layout
    (rows, cols), (height, width) = layout.shape, layout.block if layout.entry else (1, 1)
    if not transpose:
        return Layout(general.OPERAND, (height, width), (rows, cols), layout.skews)
    return Layout(general.OPERAND, (width, height), (cols, rows), (layout.skews[1], layout.skews[0]))


def as_csr(
    values: Tensor, pattern: Sequence[Tensor], layout: Layout
) -> tuple[Tensor, Sequence[Tensor], Layout]:  # fmt: skip
    """A matrix as CSR where its format's launcher can make that; others as they are."""
    made = None if layout.plain else getattr(launcher_of(layout), "csr_matrix", None)
    return (values, pattern, layout) if made is None else made(values, pattern, layout)


def writer_of(layout: Layout) -> Writer | None:
    """The format's launcher if that is a `Writer`."""
    launcher = None if layout.plain else launcher_of(layout)
    return cast(Writer, launcher) if hasattr(launcher, "written_dense") else None
