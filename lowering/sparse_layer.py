"""A sparse layer's products, found again by what its tensors look like.

To describe a product takes the host longer than to launch it. A layer's tensors look the same in each call, so its
launches are kept under shapes and dtypes, and a call allocates its result and fills in addresses.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from sparsecomp.lowering import dispatch, sddmm, semi_structured, spmm_bsr, spmm_csr, spmm_nm
from sparsecomp.lowering.epilogue import output_of
from sparsecomp.ops.library import KERNEL_DTYPES

_Launch = Callable[..., None]


def product(
    x: Tensor, values: Tensor, own: Sequence[Tensor], bias: Tensor | None, residual: Tensor | None, format: str,
    block: tuple[int, int], skew: str, rows: int, activation: str, kernel: str,
) -> Tensor | None:  # fmt: skip
    """activation(x @ S.mT + bias + residual) for S of `rows` rows.

    Args:
        x: (..., k), contiguous; all tensors are.
        values, own: of S by rows: pointers and indices of "csr" and "bsr", indices of "nm".
        skew: as of `spmm_csr.run`.
        kernel: name of the template that is to do it; empty for the one with the least device time.

    Returns:
        (..., rows), contiguous; None if no launch can be kept: there is nothing to compute, no kernel takes the dtypes,
        or sparse tensor cores, which keep a copy of the weight, are expected to be the fastest.
    """
    key = (
        x.shape, x.dtype, x.device, values.shape, values.dtype, own[0].dtype, None if bias is None else bias.dtype,
        None if residual is None else residual.dtype, format, block, skew, rows, activation, kernel,
    )  # fmt: skip
    launch: _Launch | None = dispatch.recalled(
        key, lambda: _product(x, values, own, bias, residual, format, block, skew, rows, activation, kernel)
    )
    if launch is None:
        return None
    out = x.new_empty((*x.shape[:-1], rows))
    if format == "nm":
        launch(values, own[0], x, bias, residual, out)
    else:
        launch(own[0], own[1], values, x, bias, residual, out)
    return out


def _product(
    x: Tensor, values: Tensor, own: Sequence[Tensor], bias: Tensor | None, residual: Tensor | None, format: str,
    block: tuple[int, int], skew: str, rows: int, activation: str, kernel: str,
) -> _Launch | None:  # fmt: skip
    dense = x.reshape(-1, x.shape[-1]).mT
    out = x.new_empty((dense.shape[1], rows)).mT
    dtypes = [one.dtype for one in (x, values, bias, residual) if one is not None]
    if out.numel() == 0 or values.numel() == 0 or not all(dtype in KERNEL_DTYPES for dtype in dtypes):
        return None
    beside = None if residual is None else residual.reshape(dense.shape[1], rows).mT
    described = output_of(out, bias, "row", beside, activation, 1.0)
    if format == "nm":
        problem: Any = spmm_nm.problem_of(values, own[0], *block, dense, out, described)
        if block == (2, 4) and kernel != "spmm_nm" and semi_structured.refusal(problem, x.device) is None:
            return None
        return dispatch.launch_of(spmm_nm.SPMM_NM, problem, x.device, kernel)
    family, operation = (spmm_bsr, spmm_bsr.SPMM_BSR) if format == "bsr" else (spmm_csr, spmm_csr.SPMM_CSR)
    problem = family.problem_of(own[0], own[1], values, dense, out, described, skew)
    return dispatch.launch_of(operation, problem, x.device, kernel)


def sampled(a: Tensor, b: Tensor, pointers: Tensor, indices: Tensor, skew: str) -> Tensor | None:
    """a.mT @ b at the stored places of a csr pattern, for a (..., rows) and b (..., columns), contiguous.

    Returns:
        (entries,) of their dtype; 0 in spare capacity. None as for `product`.
    """
    key = ("sampled", a.shape, b.shape, a.dtype, a.device, indices.shape, indices.dtype, skew)
    launch: _Launch | None = dispatch.recalled(key, lambda: _sampled(a, b, pointers, indices, skew))
    if launch is None:
        return None
    out = a.new_zeros(indices.shape)
    launch(pointers, indices, a, b, out)
    return out


def _sampled(a: Tensor, b: Tensor, pointers: Tensor, indices: Tensor, skew: str) -> _Launch | None:
    left, right = a.reshape(-1, a.shape[-1]).mT, b.reshape(-1, b.shape[-1]).mT
    if indices.numel() == 0 or 0 in left.shape or a.dtype not in KERNEL_DTYPES:
        return None
    out = a.new_empty(indices.shape)
    problem = sddmm.problem_of(pointers, indices, left, right, out, 1.0, skew)
    return dispatch.launch_of(sddmm.SDDMM, problem, a.device)
