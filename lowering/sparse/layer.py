"""A sparse layer's products, found again by what its tensors look like.

To describe a product takes the host longer than to launch it. A layer's tensors look the same in each call, so its
launches are kept under shapes and dtypes, and a call allocates its result and fills in addresses.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sparsecomp.lowering.cache.signature import device_of
from sparsecomp.lowering.launch.dispatch import prepared, recorded
from sparsecomp.lowering.launch.epilogue import described_output
from sparsecomp.lowering.launch.launch import aligned
from sparsecomp.lowering.launch.watch import allocate
from sparsecomp.lowering.sparse.launcher import launcher_of, multiplied_as
from sparsecomp.lowering.sparse.sddmm import SDDMM, weight_gradient
from sparsecomp.lowering.sparse.semi_structured import refusal
from sparsecomp.reference.frozen import are_frozen
from sparsecomp.reference.patterns import Layout
from sparsecomp.reference.precision import KERNEL_DTYPES

_Launch = Callable[..., None]
_Kind = tuple[torch.dtype, torch.Size]


def layer_product(
    x: Tensor, values: Tensor, own: Sequence[Tensor], bias: Tensor | None, residual: Tensor | None, layout: Layout,
    activation: str, kernel: str, filled: bool = False,
) -> Tensor | None:  # fmt: skip
    """activation(x @ S.mT + bias + residual).

    Args:
        x: (..., k), contiguous; all tensors are.
        values, own: of S; more arrays than the layout's own are not read.
        kernel: name of the template that is to do it; empty for the one with the least device time.
        filled: of csr, as in `spmm_csr`.

    Returns:
        (..., rows), contiguous; None if no launch can be kept: the operands do not belong together, there is nothing to
        compute, no kernel takes the dtypes, its arrays must be made in each call, or sparse tensor cores, which keep a
        copy of the weight, are expected to be the fastest.
    """
    launch = _product(
        x.device, x.shape, x.dtype, values.shape, values.dtype, own[0].dtype, own[layout.own - 1].dtype,
        None if bias is None else (bias.dtype, bias.shape),
        None if residual is None else (residual.dtype, residual.shape), layout, activation, kernel, filled,
        layout.format == "nm" and are_frozen(),
    )  # fmt: skip
    if launch is None:
        return None
    if layout.kind.ALIGNED:
        x, values, own = aligned(x), aligned(values), [aligned(one) for one in own[: layout.own]]
    rows = layout.shape[0]
    out = allocate((x.shape[0], rows), (rows, 1), x.dtype, x.device) if x.dim() == 2 else x.new_empty(
        (*x.shape[:-1], rows)
    )  # fmt: skip
    first = (values, *own[: layout.own]) if layout.kind.ARRAYS[0] == "values" else (*own[: layout.own], values)
    launch(*first, x, bias, residual, out)
    return out


@recorded
def _product(
    device: torch.device, x_shape: torch.Size, x_dtype: torch.dtype, stored: torch.Size, dtype: torch.dtype,
    index: torch.dtype, last: torch.dtype, bias: _Kind | None, residual: _Kind | None, layout: Layout, activation: str,
    kernel: str, filled: bool, promised: bool,
) -> _Launch | None:  # fmt: skip
    (rows, columns), count = layout.shape, x_shape[:-1].numel()
    beside = ((bias, (rows,)), (residual, (*x_shape[:-1], rows)))
    if x_shape[-1:] != (columns,) or any(one is not None and one[1] != shape for one, shape in beside):
        return None
    bias_dtype, residual_dtype = (None if one is None else one[0] for one in (bias, residual))
    dtypes = [one for one in (x_dtype, dtype, bias_dtype, residual_dtype) if one is not None]
    if count * rows == 0 or stored.numel() == 0 or not all(one in KERNEL_DTYPES for one in dtypes):
        return None
    if multiplied_as(layout) != layout:
        return None
    launcher, values = launcher_of(layout), torch.empty(stored, dtype=dtype, device="meta")
    dense, out = (values.new_empty(count, size, dtype=x_dtype).mT for size in (columns, rows))
    described = described_output(out, "row", bias_dtype, residual_dtype, activation)
    kinds = (index,) if layout.own < 3 else (index, last)
    problem = launcher.problem_of(values, layout, dense, out, described, *kinds)
    own, *libraries = launcher.operations(layout)
    if libraries and kernel != own.name and refusal(problem._replace(guarded=not promised), device) is None:
        return None
    if not own.candidates(problem, device_of(device)):
        return None
    problem = problem._replace(filled=True) if filled else problem
    return prepared(own, problem, device, kernel, alike=(index, last))


def layer_sampled(a: Tensor, b: Tensor, pointers: Tensor, indices: Tensor, skew: str) -> Tensor | None:
    """a.mT @ b at the stored places of a csr pattern, for a (..., rows) and b (..., columns), contiguous.

    Args:
        indices: as many as there are entries, without spare capacity.

    Returns:
        (entries,) of their dtype. None as for `layer_product`.
    """
    launch = _sampled(a.device, a.shape, b.shape, a.dtype, indices.numel(), indices.dtype, pointers.dtype, skew)
    if launch is None:
        return None
    out = a.new_empty(indices.shape)
    launch(pointers, indices, a, b, out)
    return out


@recorded
def _sampled(
    device: torch.device, a_shape: torch.Size, b_shape: torch.Size, dtype: torch.dtype, entries: int,
    index: torch.dtype, pointer: torch.dtype, skew: str,
) -> _Launch | None:  # fmt: skip
    count, rows = a_shape[:-1].numel(), a_shape[-1]
    if entries == 0 or count * rows == 0 or dtype not in KERNEL_DTYPES:
        return None
    problem = weight_gradient(count, rows, b_shape[-1], entries, dtype, index, skew)
    return prepared(SDDMM, problem, device, alike=(pointer,))
