"""The launcher that multiplies a format's matrices, found by the name that the format gives it.

A module of this room that defines `multiply` and `layer_problem` is one; Triton loads with it.
"""

import importlib
from collections.abc import Sequence
from functools import cache
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from sparsecomp.lowering.launch.epilogue import Output
from sparsecomp.lowering.tuning.template import Operation
from sparsecomp.reference.patterns import Layout


class Launcher(Protocol):
    """What a launcher's module defines."""

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

    def layer_problem(
        self, values: Tensor, index: torch.dtype, layout: Layout, dense: Tensor, out: Tensor, described: Output,
        kernel: str, device: torch.device,
    ) -> tuple[Operation[Any], Any] | None:  # fmt: skip
        """The product that these tensors on the meta device describe, of which a layer may keep the launch.

        Args:
            index: dtype of the index arrays, which are contiguous, as the values are.
            kernel: name of the template that is to do it; empty for the best.

        Returns:
            Operation and problem, whose launches take the format's arrays in the order of its constructor; None if no
            launch can be kept.
        """
        ...


def launcher_of(layout: Layout, transpose: bool = False) -> Launcher:
    """The launcher for a matrix of this layout, or for its transpose."""
    return _loaded(launcher_name(layout, transpose))


def launcher_name(layout: Layout, transpose: bool) -> str:
    """The module of the launcher: the format's own, or for a transpose, whose entries are sorted by rows, CSR's or
    BSR's."""
    return layout.kind.KERNEL if not transpose else "spmm_bsr" if layout.entry else "spmm_csr"


@cache
def _loaded(name: str) -> Launcher:
    return cast(Launcher, importlib.import_module(f"sparsecomp.lowering.sparse.{name}"))
