"""A sparse layer's product and its weight's gradient as CUDA runs them: found again by shapes, launched directly."""

from importlib import import_module
from typing import Any

import pytest
import torch
from kernel_devices import KERNEL_DEVICES
from matrices import of_every_layout
from torch import Tensor

from sparsecomp.errors import FormatError
from sparsecomp.formats import BITMAP, BSR, CSR, NARROW, NM, SparseMatrix
from sparsecomp.lowering.launch import dispatch
from sparsecomp.lowering.sparse import layer as sparse_layer
from sparsecomp.tensor.index_arrays import IndexArrays

pytestmark = pytest.mark.quick_cases(2)

sparse_linear, dense_linear, _ = (
    import_module(f"sparsecomp.ops.sparse.{name}") for name in ("linear", "dense_linear", "dense_weight")
)
OPS = torch.ops.sparsecomp
KINDS: dict[str, tuple[type[SparseMatrix], dict[str, Any]]] = of_every_layout({
    "csr": (CSR, {}), "bsr": (BSR, {"block": (16, 16)}), "nm": (NM, {"n": 2, "m": 4}), "narrow": (NARROW, {}),
    "bitmap": (BITMAP, {}),
})  # fmt: skip
ROWS, COLUMNS = 16, 32
TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.float64: 1e-12}


def weight(kind: str) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    dense = torch.randn(ROWS, COLUMNS, generator=generator)
    if kind == "nm":
        kept = dense.view(ROWS, -1, 4).abs().topk(2, -1).indices
        mask = torch.zeros(ROWS, COLUMNS // 4, 4).scatter_(-1, kept, 1.0).flatten(1)
    else:
        side = 16 if kind == "bsr" else 1
        blocks = torch.rand(ROWS // side, COLUMNS // side, generator=generator) < (0.4 if side == 1 else 0.7)
        mask = blocks.float().repeat_interleave(side, 0).repeat_interleave(side, 1)
    return dense * mask


def stored(kind: str, dtype: torch.dtype, device: str, *, both: bool) -> tuple[Tensor, Tensor, list[Tensor], str]:
    """The weight in float64, and values, pattern and layout as the operator takes them; `both` with the transpose's."""
    dense = weight(kind).to(dtype)
    format, told = KINDS[kind]
    values, pattern = IndexArrays.of(format.from_dense(dense, **told))
    if both:
        pattern.keep_transposed()
    arrays = [array.to(device) for array in (pattern.operands() if both else pattern.arrays)]
    return dense.double(), values.to(device), arrays, pattern.layout.written()


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize(
    ("x", "bias", "residual"),
    [((3, COLUMNS + 8), None, None), ((3, COLUMNS - 8), None, None), ((), None, None), ((3, COLUMNS), (5,), None),
     ((3, COLUMNS), None, (1, ROWS)), ((3, COLUMNS), None, (3, 1))],
)  # fmt: skip
def test_operands_that_do_not_belong_together_are_not_launched(x, bias, residual, device):
    _, values, pattern, layout = stored("csr", torch.float32, device, both=False)
    x, bias, residual = (None if shape is None else torch.ones(shape, device=device) for shape in (x, bias, residual))
    with pytest.raises(FormatError, match=r"needs \(..., 32\)|bias and residual have shapes"):
        OPS.sparse_linear.default.direct_cuda(x, values, pattern, bias, residual, layout, False, "none", "")


def refused(*_: object, **__: object) -> Tensor:
    raise AssertionError("it is not launched directly")


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize(("leading", "finished"), [((5,), True), ((2, 3), True), ((), False)])
def test_a_product_is_the_dense_one(kind, transpose, leading, finished, device, monkeypatch):
    dtype = torch.float32
    dense, values, pattern, layout = stored(kind, dtype, device, both=transpose)
    op = dense.T if transpose else dense
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(*leading, op.shape[1], generator=generator)
    bias = torch.randn(op.shape[0], generator=generator) if finished else None
    residual = torch.randn(*leading, op.shape[0], generator=generator) if finished else None
    expected = x.double() @ op.T
    if bias is not None and residual is not None:
        expected = (expected + bias + residual).relu()
    given = [None if tensor is None else tensor.to(device) for tensor in (bias, residual)]
    # blocks, sparse tensor cores, and bitmaps of another dtype than half precision
    elsewhere = (transpose and kind == "bsr", kind == "nm" and device == "cuda", kind == "bitmap" and not transpose)
    if not any(elsewhere):
        monkeypatch.setattr(sparse_linear, "run_spmm", refused)
    out = OPS.sparse_linear.default.direct_cuda(
        x.to(device), values, pattern, *given, layout, transpose, "relu" if finished else "none", ""
    )  # fmt: skip
    assert out.shape == expected.shape and out.is_contiguous() and out.dtype == dtype
    assert (out.cpu() - expected).norm() <= TOLERANCE[dtype] * expected.norm()


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("transpose", [False, True])
def test_a_layers_spare_capacity_is_read_by_no_product(transpose, device):
    """Behind the last entry lie NaN values and valid indices, as `StoredWeight.reserve` leaves them."""
    dense, values, pattern, layout = stored("csr", torch.float32, device, both=True)
    room = torch.nn.functional.pad
    padded = [array if place in (0, 2) else room(array, (0, 70)) for place, array in enumerate(pattern)]
    wide = room(values, (0, 70), value=float("nan"))
    op = dense.T if transpose else dense
    generator = torch.Generator().manual_seed(2)
    x, grad = (torch.randn(5, size, generator=generator) for size in op.shape[::-1])
    x[0, 0] = float("inf")
    operands = (None, None, layout, transpose, "none", "")
    found, expected = (
        OPS.sparse_linear.default.direct_cuda(x.to(device), numbers, arrays, *operands)
        for numbers, arrays in ((wide, padded), (values, pattern))
    )
    torch.testing.assert_close(found, expected, equal_nan=True)
    torch.testing.assert_close(found[1:].double().cpu(), x[1:].double() @ op.T, rtol=1e-5, atol=1e-5)
    gradients = [
        OPS.sparse_linear_values.default.direct_cuda(x.to(device), grad.to(device), arrays[:2], layout, transpose)
        for arrays in (padded, pattern)
    ]
    torch.testing.assert_close(gradients[0][: values.numel()], gradients[1], equal_nan=True)
    full = OPS.stored_to_dense.default.direct_cuda(wide, padded, layout, transpose)
    torch.testing.assert_close(full.cpu().double(), op)


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("leading", [(5,), (2, 3)])
def test_a_gradient_by_the_values_is_the_dense_ones_at_their_places(kind, transpose, leading, device, monkeypatch):
    dense, values, pattern, layout = stored(kind, torch.float32, device, both=False)
    op = dense.T if transpose else dense
    generator = torch.Generator().manual_seed(2)
    x, grad = (torch.randn(*leading, size, generator=generator) for size in op.shape[::-1])
    wide = grad.flatten(0, -2).double().T @ x.flatten(0, -2).double()
    by_place = (wide.T if transpose else wide) * (weight(kind) != 0)
    if kind == "csr":
        monkeypatch.setattr(sparse_linear, "run_sddmm", refused)
    found = OPS.sparse_linear_values.default.direct_cuda(x.to(device), grad.to(device), pattern, layout, transpose)
    assert found.shape == values.shape
    format, told = KINDS[kind]
    expected, _ = IndexArrays.of(format.from_dense(by_place, **told))
    assert (found.cpu() - expected).norm() <= 3e-6 * expected.norm()


CASES = {
    "strided input": lambda x, v, p: (x.repeat_interleave(2, 1)[:, ::2], v, p),
    "strided values": lambda x, v, p: (x, v.repeat_interleave(2)[::2], p),
    "double": lambda x, v, p: (x.double(), v.double(), p),
    "half": lambda x, v, p: (x.half(), v.half(), p),
    "no rows": lambda x, v, p: (x[:0], v, p),
    "no entries": lambda x, v, p: (x, v[:0], [torch.zeros_like(p[0]), p[1][:0]]),
    "wide indices": lambda x, v, p: (x, v, [array.long() for array in p]),
}


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("name", CASES)
def test_what_is_not_launched_directly_is_right_as_well(name, device):
    dense, values, pattern, layout = stored("csr", torch.float32, device, both=False)
    x = torch.randn(4, COLUMNS, generator=torch.Generator().manual_seed(2)).to(device)
    x, values, pattern = CASES[name](x, values, pattern)
    out = OPS.sparse_linear.default.direct_cuda(x, values, pattern, None, None, layout, False, "none", "")
    expected = x.cpu().double() @ dense.T * (name != "no entries")
    assert out.dtype == x.dtype and out.shape == expected.shape
    assert (out.cpu() - expected).norm() <= TOLERANCE[x.dtype] * expected.norm()
    grad = torch.ones(x.shape[0], ROWS, dtype=x.dtype, device=device)
    found = OPS.sparse_linear_values.default.direct_cuda(x, grad, pattern, layout, False)
    at_places = x.cpu().double().sum(0)[pattern[1].cpu().long()]
    assert found.shape == pattern[1].shape
    assert (found.cpu() - at_places).norm() <= TOLERANCE[x.dtype] * at_places.norm() + 1e-30


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("kernel", ["spmm_csr_rows", "spmm_csr_merge", "spmm_csr_dense"])
def test_the_kernel_that_is_asked_for_does_it(kernel, device, monkeypatch):
    dense, values, pattern, layout = stored("csr", torch.float16, device, both=False)
    x = torch.randn(2, 3, COLUMNS, generator=torch.Generator().manual_seed(2)).half().to(device)
    launched = []
    prepared = sparse_layer.prepared
    monkeypatch.setattr(sparse_layer, "prepared", lambda *a, **of: launched.append(a[-1]) or prepared(*a, **of))
    dispatch.forget()
    for _ in range(2):
        out = OPS.sparse_linear.default.direct_cuda(x, values, pattern, None, None, layout, False, "none", kernel)
    assert launched == [kernel], "the second call finds the launch of the first"
    expected = x.cpu().double() @ dense.T
    assert (out.cpu() - expected).norm() <= 2e-3 * expected.norm()


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("strided", [False, True])
def test_a_weight_written_out_and_read_again(kind, transpose, both, strided, device):
    dense, values, pattern, layout = stored(kind, torch.float32, device, both=both)
    written = values.repeat_interleave(2, 0)[::2] if strided else values
    arrays = [array.repeat_interleave(2, 0)[::2] if strided else array for array in pattern]
    out = OPS.stored_to_dense.default.direct_cuda(written, arrays, layout, transpose)
    assert out.is_contiguous() and torch.equal(out.cpu().double(), dense.T if transpose else dense)
    found = OPS.dense_to_stored.default.direct_cuda(out, arrays, layout, transpose)
    assert found.shape == values.shape and torch.equal(found, values)


@pytest.mark.parametrize("size", [(5, 8), (2, 3, 8), (8,), (0, 8), (2, 0, 8)])
def test_a_dense_layer_with_relu_is_one_product(size, monkeypatch):
    calls = []
    addmm_relu = dense_linear._compat.addmm_relu
    monkeypatch.setattr(dense_linear._compat, "addmm_relu", lambda *a: calls.append(a) or addmm_relu(*a))
    generator = torch.Generator().manual_seed(2)
    x, weight, bias = (torch.randn(shape, generator=generator) for shape in (size, (6, 8), (6,)))
    out = OPS.dense_linear_relu.default.direct_cuda(x, weight, bias)
    torch.testing.assert_close(out, torch.relu(x @ weight.T + bias))
    assert len(calls) == bool(x.numel()) and out.is_contiguous()
    nothing = OPS.dense_linear_relu.default.direct_cuda(x, weight[:0], bias[:0])
    torch.testing.assert_close(nothing, x.new_zeros((*size[:-1], 0)))
