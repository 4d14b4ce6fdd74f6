"""A sparse linear layer split among processes, for torch's tensor parallelism.

    mesh = init_device_mesh("cuda", (2,))
    parallelize_module(model, mesh, {"up": SparseColwise(), "down": SparseRowwise()})

Each process stores a part of the weight's rows or columns, as plain tensors, and multiplies with it alone; summed among
them is what torch's ColwiseParallel and RowwiseParallel sum for dense layers. The model's state has the whole weight:
a checkpoint is that of one process and loads into any number of them.
"""

from collections.abc import Mapping
from typing import Any, cast
from zlib import crc32

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import ParallelStyle

from sparsecomp.errors import FormatError
from sparsecomp.formats import COO, SparseMatrix
from sparsecomp.formats.base import FORMATS
from sparsecomp.nn.sparse.linear import SparseLinear
from sparsecomp.nn.sparse.stored_weight import ReadState
from sparsecomp.reference.patterns import Layout
from sparsecomp.tensor.index_arrays import IndexArrays


class SplitLinear(SparseLinear):
    """One process's part of a `SparseLinear`, made in place by a style.

    Attributes:
        mesh: the processes, in one dimension.
        by_rows: whether it is split by the weight's rows, its outputs, or else by columns.

    `state_dict()` is called by all processes, as it gathers the whole weight in each. An optimizer's state is each
    process's own.
    """

    mesh: DeviceMesh
    by_rows: bool
    _whole: Layout

    def _split(self, mesh: DeviceMesh, by_rows: bool, entries: int) -> None:
        """Keep this process's part of what the first one stores, so many entries."""
        self.mesh, self.by_rows, self._whole = mesh, by_rows, self._layout
        bias, stored = self.bias, [one.detach() for one in self._stored()]
        if entries != stored[0].numel() and mesh.get_local_rank():  # of another pattern: only pointers have its size
            stored = [one if "pointers" in name else one.new_empty(entries)
                      for name, one in zip(self.stored_names, stored, strict=True)]  # fmt: skip
        values, *arrays = (_of_the_first(one, mesh) for one in stored)
        matrix = IndexArrays(self.format, self._layout, tuple(arrays)).matrix(values, False)
        self._hold(self._part_of(matrix), self.values.requires_grad)
        if bias is not None:
            whole = _of_the_first(bias.detach(), mesh)
            self.bias = nn.Parameter(self._share(whole).clone() if by_rows else whole, bias.requires_grad)

    def _stored_matrix(self) -> SparseMatrix:
        values, *arrays = self._stored()
        return IndexArrays(self.format, self._layout, tuple(arrays)).matrix(values.detach(), False)

    def _share(self, tensor: Any) -> Any:
        """This process's rows of a tensor or matrix."""
        size, place = tensor.shape[0] // self.mesh.size(), self.mesh.get_local_rank()
        return tensor[place * size : (place + 1) * size]

    def _part_of(self, matrix: SparseMatrix) -> SparseMatrix:
        part = self._share(matrix) if self.by_rows else self._share(matrix.mT).mT
        return part.to(FORMATS[self.format]).compact()

    def forward(self, x: Tensor) -> Tensor:
        """By rows: (…, in_features) that all have, to this process's part of (…, out_features).

        By columns: from its part of the former to the whole of the latter.
        """
        if self.by_rows:
            shared = DTensor.from_local(x, self.mesh, (Replicate(),))
            return super().forward(shared.to_local(grad_placements=(Partial(),)))
        terms = DTensor.from_local(self._product(x, None), self.mesh, (Partial(),))
        total = terms.redistribute(placements=(Replicate(),)).to_local()
        return total if self.bias is None else total + self.bias

    # -- checkpoints

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if f"{prefix}values" not in destination:
            return
        destination |= self._named(prefix, *IndexArrays.of(self._gathered()))
        if self.bias is not None and self.by_rows:
            destination[f"{prefix}bias"] = torch.cat(self._from_all(self.bias.detach()))

    @torch.no_grad()
    def _gathered(self) -> SparseMatrix:
        """The whole weight."""
        matrix = self._stored_matrix()
        part = matrix.to(COO)
        rows, cols = matrix.shape
        place, count = self.mesh.get_local_rank(), self.mesh.size()
        row, col = part.row.long(), part.col.long()
        row, col = (row + place * rows, col) if self.by_rows else (row, col + place * cols)
        shape = (rows * count, cols) if self.by_rows else (rows, cols * count)
        parts = [torch.cat(self._from_all(one)) for one in (row, col, part.values)]
        row, col = (one.to(part.row.dtype) for one in parts[:2])
        return COO.from_arrays(row, col, parts[2], shape, coalesce=True, check=False).to(type(matrix))

    def _from_all(self, tensor: Tensor) -> list[Tensor]:
        """The tensors (count,) of all processes, which differ in their counts."""
        sizes = [int(one) for one in self._alike(torch.tensor(tensor.shape[0], device=tensor.device))]
        sent = F.pad(tensor, (0, max(sizes) - tensor.shape[0]))
        return [one[:size] for one, size in zip(self._alike(sent), sizes, strict=True)]

    def _alike(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all processes, of one size."""
        found = [torch.empty_like(tensor) for _ in range(self.mesh.size())]
        dist.all_gather(found, tensor, group=self.mesh.get_group())
        return found

    def read_state(self, state: Mapping[str, Any], prefix: str, strict_pattern: bool) -> ReadState:
        """As of `SparseLinear`, of a checkpoint of the whole layer, which stays whole in what is returned."""
        return super().read_state(self._taken(state, prefix), prefix, strict_pattern)._replace(state=dict(state))

    def _taken(self, state: Mapping[str, Any], prefix: str) -> Mapping[str, Any]:
        state = dict(state)
        if isinstance(weight := state.get(f"{prefix}weight"), Tensor):
            state[f"{prefix}weight"] = self._share(weight) if self.by_rows else self._share(weight.mT).mT
        arrays = [state.get(f"{prefix}{name}") for name in self.stored_names]
        if all(isinstance(one, Tensor) for one in arrays):
            values, *indices = cast(list[Tensor], arrays)
            matrix = IndexArrays(self.format, self._whole, tuple(indices)).matrix(values.detach(), False)
            matrix.validate()
            values, pattern = IndexArrays.of(self._part_of(matrix))
            state |= self._named(prefix, values, pattern)
        if isinstance(bias := state.get(f"{prefix}bias"), Tensor) and self.by_rows:
            state[f"{prefix}bias"] = self._share(bias)
        return state

    def _named(self, prefix: str, values: Tensor, pattern: IndexArrays) -> dict[str, Tensor]:
        return {f"{prefix}{name}": one for name, one in zip(self.stored_names, (values, *pattern.arrays), strict=True)}


class _Style(ParallelStyle):
    by_rows: bool

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        problem = self._problem(module, device_mesh)
        if device_mesh.ndim != 1:
            raise FormatError(problem)
        entries = _check_alike(module, problem, device_mesh)
        module.__class__ = SplitLinear
        cast(SplitLinear, module)._split(device_mesh, self.by_rows, entries)
        return module

    def _problem(self, module: nn.Module, mesh: DeviceMesh) -> str:
        """Why this process's module cannot be split; empty if it can."""
        if type(module) is not SparseLinear or module.format not in ("CSR", "CSC") or module.capacity:
            given = getattr(module, "format", "")
            return (
                f"{type(module).__name__} {given} is not split: give a SparseLinear in CSR or CSC without spare "
                "capacity, once, and torch's own styles to dense layers"
            )
        size, count = module.shape[not self.by_rows], mesh.size()
        if mesh.ndim != 1 or size % count:
            return (
                f"{size} {'outputs' if self.by_rows else 'inputs'}, and a mesh of {mesh.ndim} dimensions and "
                f"{count} processes: needs one dimension, whose size divides them"
            )
        return ""


def _check_alike(module: Any, problem: str, mesh: DeviceMesh) -> int:
    """Entries of the first process's layer.

    Raises:
        FormatError: in all processes, since one that leaves alone has the others wait: one of them has a problem, or
            another layer than the first.
    """
    number, entries, told = 0, 0, ""
    if not problem:
        stored, bias = module._stored(), module.bias
        dtypes = [one.dtype for one in (*stored, *([] if bias is None else [bias]))]
        told, entries = repr((module.shape, module.format, dtypes)), stored[0].numel()
        number = 1 + crc32(told.encode())
    mine = torch.tensor([number, entries], device=mesh.device_type)
    found = [torch.empty_like(mine) for _ in range(mesh.size())]
    dist.all_gather(found, mine, group=mesh.get_group())
    numbers = [int(one[0]) for one in found]
    if 0 in numbers:
        raise FormatError(problem or "another process has a layer that cannot be split: its message says why")
    if len(set(numbers)) > 1:
        raise FormatError(f"the processes have layers of other sizes, formats or dtypes, here {told}: make them alike")
    return int(found[0][1])


def _of_the_first(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """The first process's tensor, of one size and dtype in all."""
    group, sent = mesh.get_group(), tensor.clone(memory_format=torch.contiguous_format)
    dist.broadcast(sent, dist.get_global_rank(group, 0), group=group)
    return sent


class SparseColwise(_Style):
    """For `parallelize_module`: split a `SparseLinear` by its outputs, as ColwiseParallel does a dense one.

    All processes have the input; each gets its part of the output, (…, out_features / processes). A backward sums the
    input's gradient. Weight and bias are those of the first process, as with torch's own styles. Make the optimizer
    afterwards: the parameters are new.

    Raises:
        FormatError: in all processes: one has no `SparseLinear` in CSR or CSC, or a size that the number of processes
            does not divide, or one of another size, format or dtype than the first. The layer is as it was.
    """

    by_rows = True


class SparseRowwise(_Style):
    """For `parallelize_module`: split a `SparseLinear` by its inputs, as RowwiseParallel does a dense one.

    Each process has its part of the input, as `SparseColwise` gives it; a forward sums the output, which all get. The
    rest is as of `SparseColwise`.
    """

    by_rows = False
