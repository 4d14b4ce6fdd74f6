"""N:M times dense as an operation: out = activation(scale · (S @ dense) + bias + residual), summed in float32.

What S does not store, a group's filler included, which is 0, is never multiplied: tiles with a sum that is not finite
are computed again by gathering.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from sparsecomp.errors import FormatError
from sparsecomp.lowering.cache.signature import Device, KernelSignature
from sparsecomp.lowering.launch import dispatch
from sparsecomp.lowering.launch.epilogue import Output, finished, output_from_text, output_of, random_operands
from sparsecomp.lowering.launch.strided import (
    Strides,
    dtype_name,
    gather_product,
    order_of,
    random_tensor,
    strides_from,
    strides_of,
)
from sparsecomp.lowering.sparse.spmm_csr import TOLERANCE, check_shapes
from sparsecomp.lowering.tuning.template import Operation

MOST_GROUP = 16


class SpmmNM(NamedTuple):
    """The sizes, strides and types of a product; its launch adds the addresses.

    Attributes:
        m, k, n: S is (m, k), dense (k, n).
        batch: products with one pattern.
        keep, group: S stores `keep` values in each `group` columns.
        values_batch, values_row, indices_row: strides; a row's elements are neighbours.
        dense: strides of dense.
        dtype, dense_dtype: of values and dense; kernels want the same.
        output: the output and its epilogue.
        guarded: whether a library that multiplies a copy of S looks in each call if that still holds.
    """

    m: int
    k: int
    n: int
    batch: int
    keep: int
    group: int
    values_batch: int
    values_row: int
    indices_row: int
    dense: Strides
    dtype: str
    dense_dtype: str
    output: Output
    guarded: bool = True

    @property
    def groups(self) -> int:
        """Of a row."""
        return -(-self.k // self.group)

    @classmethod
    def of(
        cls, values: Tensor, indices: Tensor, keep: int, group: int, dense: Tensor, out: Tensor, described: Output
    ) -> "SpmmNM":
        """The product of these tensors, as `spmm_nm` takes them, a row's values and indices side by side.

        Raises:
            FormatError: shapes that do not belong together, or an unknown word.
        """
        batched = values.dim() == 3
        check_shapes(values.shape[-2], batched, values.shape[:-2], dense, out)
        k, n = dense.shape[-2:]
        groups = -(-k // group)
        if not 1 <= keep <= group <= MOST_GROUP or indices.shape != (values.shape[-2], groups * keep) or (
            values.shape[-1] != groups * keep or indices.dtype is not torch.uint8
        ):
            raise FormatError(
                f"values {tuple(values.shape)} and indices {tuple(indices.shape)} {indices.dtype} are not "
                f"{keep}:{group} of {k} columns: {groups * keep} a row are needed, indices uint8, groups of at "
                f"most {MOST_GROUP}"
            )
        return cls(
            values.shape[-2], k, n, out.shape[0] if out.dim() == 3 else 1, keep, group,
            values.stride(0) if batched else 0, values.stride(-2), indices.stride(0), strides_of(dense),
            dtype_name(values), dtype_name(dense), described,
        )  # fmt: skip


def spmm_nm(
    values: Tensor, indices: Tensor, keep: int, group: int, dense: Tensor, out: Tensor, *, bias: Tensor | None = None,
    bias_axis: str = "column", residual: Tensor | None = None, activation: str = "none", scale: float = 1.0,
) -> None:  # fmt: skip
    """Write activation(scale · (S @ dense) + bias + residual) to `out`.

    Args:
        values: (m, groups · keep) or (batch, m, groups · keep), a row's elements side by side.
        indices: (m, groups · keep) uint8: each value's column within its group, each once in a group.
        keep, group: values in a group, and its columns, at most 16.

    Everything else is as in `spmm_csr`.

    Raises:
        FormatError: shapes that do not belong together, or an unknown word.
        TuningError: no kernel takes these dtypes.
    """
    described = output_of(out, bias, bias_axis, residual, activation, scale)
    values = values if values.stride(-1) == 1 else values.contiguous()
    indices = indices if indices.stride(-1) == 1 else indices.contiguous()
    problem = SpmmNM.of(values, indices, keep, group, dense, out, described)
    if out.numel():
        dispatch.launch(SPMM_NM, problem, values, indices, dense, bias, residual, out)


def _signature(problem: SpmmNM, device: Device) -> KernelSignature:
    p = problem
    return KernelSignature(
        "spmm_nm", device, dtypes=(p.dtype, p.dense_dtype, p.output.dtype), accumulator="float32",
        formats=(f"{p.keep}:{p.group}",), index="uint8",
        layouts=(order_of(p.dense, p.n), order_of(p.output.strides, p.n)), epilogue=p.output.text,
        sizes=(("m", p.m), ("groups", p.groups), ("n", p.n), ("batch", p.batch)),
        parameters=(("keep", p.keep), ("group", p.group)), density=p.keep / p.group,
    )  # fmt: skip


def _representative(signature: KernelSignature) -> SpmmNM:
    sizes, given = dict(signature.sizes), dict(signature.parameters)
    m, groups, n, batch = (int(sizes[name]) for name in ("m", "groups", "n", "batch"))
    keep, group = int(given["keep"]), int(given["group"])
    k, row = groups * group, groups * keep
    dense, out = strides_from(signature.layouts[0], k, n), strides_from(signature.layouts[1], m, n)
    output = output_from_text(signature.epilogue, signature.dtypes[2], out)
    values, dense_dtype, _ = signature.dtypes
    return SpmmNM(
        m, k, n, batch, keep, group, m * row, row, row, dense, dtype=values, dense_dtype=dense_dtype,
        output=output,
    )  # fmt: skip


def _operands(problem: SpmmNM, device: torch.device, seed: int) -> tuple[Tensor | None, ...]:
    p, random = problem, torch.Generator(device).manual_seed(seed)
    order = torch.rand(p.m, p.groups, p.group, generator=random, device=device).argsort(-1)[..., : p.keep]
    indices = torch.empty(max(p.m * p.indices_row, 1), dtype=torch.uint8, device=device)
    indices = indices.as_strided((p.m, p.groups * p.keep), (p.indices_row, 1))
    indices.copy_(order.sort(-1).values.flatten(1))
    values = random_tensor((p.batch, p.m, p.groups * p.keep), (p.values_batch, p.values_row, 1), p.dtype, random)
    values.masked_fill_(_columns(p, indices) >= p.k, 0.0)
    dense = random_tensor((p.batch, p.k, p.n), p.dense, p.dense_dtype, random)
    return values, indices, dense, *random_operands(p.output, (p.batch, p.m, p.n), random)


def _columns(problem: SpmmNM, indices: Tensor) -> Tensor:
    group = torch.arange(problem.groups * problem.keep, device=indices.device) // problem.keep
    return indices.long() + group * problem.group


def _reference(problem: SpmmNM, operands: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    values, indices, dense, bias, residual, _ = operands
    assert values is not None and indices is not None and dense is not None
    col = _columns(problem, indices)
    row = torch.arange(problem.m, device=col.device)[:, None].expand_as(col)
    parts = [
        gather_product(row[stored], col[stored], one[stored][None], right[None], problem.m)
        for one, right, stored in zip(values, dense, (values != 0) & (col < problem.k), strict=True)
    ]
    return (finished(problem.output, torch.cat(parts), bias, residual),)


SPMM_NM = Operation(
    "spmm_nm", _signature, _representative, _operands, (5,), _reference, lambda problem: TOLERANCE[problem.output.dtype]
)
