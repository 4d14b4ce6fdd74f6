"""Sparse products as operators, held against scipy in float64, closed forms and finite differences."""

import json
import math
from importlib import import_module

import numpy as np
import pytest
import scipy.sparse
import scipy.special
import torch
from kernel_devices import DEVICES, KERNEL_DEVICES
from matrices import FOLDER, REAL, of_every_layout
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from bench.sparse.matrices import read
from sparsecomp.errors import FormatError
from sparsecomp.formats import BITMAP, BSR, CSR, NARROW, NM, SparseMatrix
from sparsecomp.formats.indices import lines_of, searched_lines
from sparsecomp.ops import Layout, sddmm, sparse_matmul, spmm
from sparsecomp.ops.sparse.linear import sparse_linear
from sparsecomp.reference.patterns import transposed_arrays
from sparsecomp.reference.precision import without_autocast
from sparsecomp.tensor.index_arrays import IndexArrays
from sparsecomp.tensor.sparse_tensor import SparseTensor

pytestmark = pytest.mark.quick_cases(2)

KINDS = of_every_layout({
    "csr": (CSR, {}), "bsr": (BSR, {"block": (2, 3)}), "nm": (NM, {"n": 4, "m": 4}), "2:4": (NM, {"n": 2, "m": 4}),
    "narrow": (NARROW, {}),
    "bitmap": (BITMAP, {}),
})  # fmt: skip
TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def sample(kind: str, rows: int = 37, cols: int = 53, dtype: torch.dtype = torch.float64, density: float = 0.2):
    """A dense matrix with empty rows, and values, pattern and layout of it."""
    generator = torch.Generator().manual_seed(rows)
    dense = torch.randn(rows, cols, generator=generator, dtype=torch.float64)
    dense *= torch.rand(rows, cols, generator=generator) < density
    if kind == "2:4":
        padded = torch.nn.functional.pad(dense, (0, -cols % 4)).view(rows, -(-cols // 4), 4)
        small = padded.abs().argsort(-1, descending=True)[..., 2:]
        dense = padded.scatter(-1, small, 0.0).flatten(1)[:, :cols]
    dense[1::5] = 0
    dense = dense.to(dtype)
    format, layout = KINDS[kind]
    return dense, *arrays(format.from_dense(dense, **layout))


def arrays(matrix: SparseMatrix) -> tuple[Tensor, list[Tensor], Layout]:
    values, pattern = IndexArrays.of(matrix)
    return values, list(pattern.arrays), pattern.layout


def lying(how: str, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """A random tensor of these strides."""
    full = torch.randn(*shape[:-2], shape[-1] * 2, shape[-2] * 2, generator=torch.Generator().manual_seed(1)).to(dtype)
    by_column = full[..., : shape[-1], : shape[-2]].mT
    return {"rows": by_column.contiguous(), "columns": by_column.mT.contiguous().mT, "strided": full.mT[..., ::2, ::2]}[
        how
    ]


def relative(found: Tensor, right: np.ndarray) -> float:
    return float(np.linalg.norm(found.double().numpy() - right) / max(np.linalg.norm(right), 1e-30))


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", KINDS)
def test_the_product_is_scipys(kind, dtype, transpose):
    dense, values, pattern, layout = sample(kind, dtype=dtype)
    matrix = scipy.sparse.csr_array(dense.double().numpy())
    matrix = matrix.T if transpose else matrix
    for how in ("rows", "columns", "strided"):
        right = lying(how, (matrix.shape[1], 6), dtype)
        kept = transposed_arrays(pattern, layout)
        for given in (pattern, [*pattern, *kept]):
            out = spmm(values, given, right, layout, transpose=transpose, by_column=how == "columns")
            assert out.dtype is dtype and out.stride() == ((1, out.shape[0]) if how == "columns" else (6, 1))
            assert relative(out, matrix @ right.double().numpy()) < TOLERANCE[dtype]


@pytest.mark.parametrize("real", REAL)
def test_real_matrices(real):
    stored = read(FOLDER / real.file).to(CSR)
    matrix = stored.with_values(torch.randn(stored.nnz, dtype=torch.float64)).to_scipy()
    values, own, layout = arrays(CSR.from_scipy(matrix))
    for transpose, left in ((False, matrix), (True, matrix.T)):
        right = torch.randn(left.shape[1], 4, dtype=torch.float64)
        assert relative(spmm(values, own, right, layout, transpose=transpose), left @ right.numpy()) < 1e-13


@pytest.mark.parametrize("kind", ["csr", "bsr", "2:4", "narrow"])
def test_batches_of_values_and_of_dense(kind):
    dense, values, pattern, layout = sample(kind)
    right = torch.randn(3, 53, 4, dtype=torch.float64)
    many = torch.stack([values, 2 * values, -values])
    singles = dense.numpy() @ right.numpy()
    assert relative(spmm(values, pattern, right, layout), singles) < 1e-13
    scaled = singles * np.array([1.0, 2.0, -1.0])[:, None, None]
    assert relative(spmm(many, pattern, right, layout), scaled) < 1e-13
    assert relative(spmm(many, pattern, right[0], layout)[1], 2 * (dense.numpy() @ right[0].numpy())) < 1e-13


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("a_size", [(37, 4), (3, 37, 4), (0, 37, 4)])
@pytest.mark.parametrize("b_size", [(53, 4), (3, 53, 4), (0, 53, 4)])
def test_sampled_products_of_batches(kind, a_size, b_size):
    dense, values, pattern, layout = sample(kind)
    if {a_size[0], b_size[0]} == {0, 3}:
        return
    a, b = (torch.randn(size, dtype=torch.float64) for size in (a_size, b_size))
    products = torch.matmul(a, b.mT).view(-1, 37, 53) * (dense != 0)
    format, options = KINDS[kind]
    ones = arrays(format.from_dense((dense != 0).double(), **options))[0]  # a stored place may hold a zero
    expected = [arrays(format.from_dense(torch.where(dense != 0, one, 0.0), **options))[0] for one in products]
    found = sddmm(a, b, pattern, layout)
    batched = a.dim() == 3 or b.dim() == 3
    assert found.shape == ((len(products), *values.shape) if batched else values.shape)
    for one, right in zip(found if batched else [found], expected, strict=True):
        torch.testing.assert_close(one * ones, right, rtol=1e-12, atol=1e-12)


ACTIVATIONS = {
    "none": lambda x: x,
    "relu": lambda x: np.maximum(x, 0),
    "gelu": lambda x: x * scipy.special.ndtr(x),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "silu": lambda x: x * scipy.special.expit(x),
    "sigmoid": scipy.special.expit,
    "tanh": np.tanh,
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("axis", ["row", "column"])
def test_the_epilogue(activation, axis):
    dense, values, pattern, layout = sample("csr", dtype=torch.float16)
    right, residual = torch.randn(53, 4).half(), torch.randn(37, 4)
    bias = torch.randn(37 if axis == "row" else 4).bfloat16()
    out = spmm(
        values, pattern, right, layout, bias=bias, bias_axis=axis, residual=residual, activation=activation, scale=0.5,
        dtype=torch.float32,
    )  # fmt: skip
    added = bias.double().numpy()[:, None] if axis == "row" else bias.double().numpy()
    wanted = ACTIVATIONS[activation](0.5 * (dense.double().numpy() @ right.double().numpy()) + added + residual.numpy())
    assert out.dtype is torch.float32 and relative(out, wanted) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("kind", ["csr", "nm", "2:4", "narrow"])
def test_what_is_not_stored_is_not_multiplied(kind, transpose, dtype):
    """A group's filler neither; against the sum of what is stored, entry by entry."""
    dense, values, pattern, layout = sample(kind, dtype=dtype)
    whole = dense.T if transpose else dense
    right = torch.randn(whole.shape[1], 4, dtype=dtype)
    right[:, 0], right[3, 1], right[20, 2] = math.inf, math.nan, -math.inf

    def wanted(scale):
        terms = scale * whole.double()[:, :, None] * right.double()
        return torch.where(whole[:, :, None] != 0, terms, 0).sum(1).to(dtype)

    out = spmm(values, pattern, right, layout, transpose=transpose)
    torch.testing.assert_close(out, wanted(1), equal_nan=True)
    assert out[:, 1].isfinite().any() and out[:, 1].isnan().any() and out[:, 2].isfinite().any()
    many = spmm(torch.stack([values, -2 * values]), pattern, right, layout, transpose=transpose)
    torch.testing.assert_close(many, torch.stack([wanted(1), wanted(-2)]), equal_nan=True)


@pytest.mark.slow(reason="finite differences")
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_by_finite_differences(kind, transpose):
    _, values, pattern, layout = sample(kind, 7, 10, density=0.4)
    rows, cols = layout.shape[::-1] if transpose else layout.shape
    values, right, bias, residual = (
        torch.randn(shape, dtype=torch.float64, requires_grad=True)
        for shape in (values.shape, (2, cols, 3), (rows,), (2, rows, 3))
    )
    for activation in ACTIVATIONS if kind == "csr" else ("none",):

        def product(*given: Tensor, activation: str = activation) -> Tensor:
            return spmm(
                given[0], pattern, given[1], layout, transpose=transpose, bias=given[2], bias_axis="row",
                residual=given[3], activation=activation, scale=0.5,
            )  # fmt: skip

        assert torch.autograd.gradcheck(product, (values, right, bias, residual))
    plain = (values, right)
    assert torch.autograd.gradgradcheck(lambda v, d: spmm(v, pattern, d, layout, transpose=transpose), plain)


@pytest.mark.parametrize("kind", KINDS)
def test_sampled_product_and_its_gradients(kind):
    dense, _, pattern, layout = sample(kind, 7, 10, density=0.4)
    a, b = (torch.randn(2, size, 4, dtype=torch.float64, requires_grad=True) for size in (7, 10))
    found = sddmm(a, b, pattern, layout, scale=0.5)
    whole = 0.5 * (a @ b.mT).detach()
    form = IndexArrays(layout.format.upper(), layout, tuple(pattern))
    back = [form.matrix(item.detach(), False).to_dense() for item in found]
    stored = torch.stack(back) != 0
    assert torch.equal(stored[0] | (dense == 0), torch.ones_like(stored[0]))
    torch.testing.assert_close(torch.stack(back), whole * stored)
    assert torch.autograd.gradcheck(lambda a, b: sddmm(a, b, pattern, layout, scale=0.5), (a, b))


def test_a_graph_of_sampled_products_takes_any_batch():
    _, _, pattern, layout = sample("csr")
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda a, b: sddmm(a, b, pattern, layout), backend=graphs, dynamic=True, fullgraph=True)
    counts = []
    for batch in (3, 5):
        a, b = (torch.randn(batch, size, 4, dtype=torch.float64) for size in (37, 53))
        torch.testing.assert_close(compiled(a, b), sddmm(a, b, pattern, layout))
        counts.append(graphs.frame_count)
    assert counts[0] == counts[1]


@pytest.mark.parametrize("kind", KINDS)
def test_opcheck(kind):
    _, values, pattern, layout = sample(kind, 7, 10, density=0.4, dtype=torch.float32)
    right, bias, residual = torch.randn(10, 3, requires_grad=True), torch.randn(3), torch.randn(7, 3)
    values.requires_grad_()
    rest = (False, "column", "relu", 2.0, None, True)
    torch.library.opcheck(torch.ops.sparsecomp.spmm.default, (values, pattern, right, bias, residual, *layout, *rest))
    a, b = torch.randn(7, 4, requires_grad=True), torch.randn(10, 4, requires_grad=True)
    torch.library.opcheck(torch.ops.sparsecomp.sddmm.default, (a, b, pattern, *layout, 0.5))


def test_opcheck_of_the_operators_that_take_one_sparse_tensor():
    """Given a dense tensor they mean the dense product."""
    ours, weight = torch.ops.sparsecomp, torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    x, bias = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 3, 5), (4,)))
    residual = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    for activation in ("relu", "gelu"):
        rest = (True, "column", activation, 0.5, None)
        torch.library.opcheck(ours.sparse_matmul.default, (weight, x, bias, residual, *rest))
        given = (weight, x, bias, residual)
        assert torch.autograd.gradcheck(lambda *g, rest=rest: ours.sparse_matmul.default(*g, *rest), given)
    grad = torch.randn(2, 3, 4, dtype=torch.float64)
    torch.library.opcheck(ours.sparse_sampled.default, (weight.detach(), grad, x.detach(), True, 0.5))
    torch.library.opcheck(ours.sparse_to_dense.default, (weight,))
    torch.library.opcheck(ours.sparse_gather.default, (weight.detach(), torch.randn(4, 5)))
    torch.library.opcheck(ours.sparse_rows.default, (weight, torch.tensor([[1, 2]])))
    torch.library.opcheck(
        ours.sparse_rows_gradient.default, (weight.detach(), torch.tensor([1, 2]), torch.randn(2, 5).double())
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "cols", "n"), [(0, 5, 3), (5, 0, 3), (0, 0, 2), (1, 1, 1), (6, 4, 0), (8, 12, 2)])
def test_empty_and_tiny_matrices(kind, rows, cols, n):
    dense, values, pattern, layout = sample(kind, rows, cols, density=1.1 if rows == 1 and kind != "2:4" else 0.0)
    for transpose in (False, True):
        left = dense.mT if transpose else dense
        right = torch.randn(left.shape[1], n, dtype=torch.float64, requires_grad=True)
        given = values.clone().requires_grad_()
        out = spmm(given, pattern, right, layout, transpose=transpose, activation="relu")
        torch.testing.assert_close(out, (left @ right).relu())
        out.sum().backward()
        assert given.grad.shape == values.shape and right.grad.shape == right.shape


def test_int64_indices_and_spare_capacity():
    dense, values, (crow, col), layout = sample("csr")
    spare = torch.full((3,), 7, dtype=torch.int64)
    pattern = [crow.long() + 3, torch.cat([spare, col.long(), spare])]
    wide = torch.cat([torch.full((3,), math.nan), values, torch.full((3,), math.nan)]).double().requires_grad_()
    right = torch.randn(53, 4, dtype=torch.float64, requires_grad=True)
    for transpose, operand in ((False, right), (True, right[:37])):
        left = dense.mT if transpose else dense
        out = spmm(wide, pattern, operand, layout, transpose=transpose)
        torch.testing.assert_close(out, left @ operand)
        grad, _ = torch.autograd.grad(out.sum(), (wide, right))
        assert (grad[:3] == 0).all() and (grad[-3:] == 0).all() and grad.isfinite().all()


def test_a_pattern_used_twice_adds_up_and_empty_rows_give_nothing():
    dense, values, pattern, layout = sample("csr", 20, 20, density=0.08)
    values.requires_grad_()
    right = torch.randn(20, 3, dtype=torch.float64, requires_grad=True)
    out = spmm(values, pattern, spmm(values, pattern, right, layout), layout)
    weights = torch.randn_like(out)
    found = torch.autograd.grad((out * weights).sum(), (values, right))
    left = dense.clone().requires_grad_()
    wanted = torch.autograd.grad((left @ (left @ right) * weights).sum(), (left, right))
    torch.testing.assert_close(found[0], wanted[0][dense != 0])
    torch.testing.assert_close(found[1], wanted[1])
    unread = (dense == 0).all(0)
    assert unread.any() and (found[1][unread] == 0).all()


def test_backward_keeps_to_what_is_stored(tmp_path):
    n, nnz, columns = 110_000, 860_000, 8
    generator = torch.Generator().manual_seed(0)
    places = torch.randint(n * n, (nnz,), generator=generator).unique()
    row, col = places // n, (places % n).int()
    pattern = [torch.searchsorted(row, torch.arange(n + 1), out_int32=True), col]
    layout = Layout("csr", (1, 1), (n, n))
    pattern += transposed_arrays(pattern, layout)
    values = torch.randn(col.numel(), generator=generator).requires_grad_()
    right = torch.randn(n, columns, generator=generator).requires_grad_()
    out = spmm(values, pattern, right, layout)
    grad = torch.ones_like(out)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        grads = torch.autograd.grad(out, (values, right), grad)
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    events = [
        event
        for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        if event["name"] == "[memory]"
    ]
    held = np.cumsum([event["args"]["Bytes"] for event in sorted(events, key=lambda event: event["ts"])])
    sizes = {"nnz": 4 * col.numel(), "dense": 4 * n * columns}
    assert held.max() >= sum(4 * g.numel() for g in grads)
    assert held.max() <= 3 * sizes["nnz"] + 2 * sizes["dense"] + 8 * n
    matrix = scipy.sparse.csr_array((values.detach().double().numpy(), col, pattern[0]), shape=(n, n))
    assert relative(out.detach(), matrix @ right.detach().double().numpy()) < 2e-6
    assert relative(grads[1], matrix.T @ np.ones((n, columns))) < 2e-6
    assert relative(grads[0], right.detach().double().sum(1).numpy()[col]) < 2e-6


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("kind", ["csr", "bsr", "2:4", "narrow"])
def test_kernels_behind_the_operators(kind, transpose, device):
    """The CUDA implementations; the interpreter runs them on a CPU."""
    dense, values, pattern, layout = sample(kind, 32, 48, dtype=torch.float32)
    if kind == "bsr":
        values, pattern, layout = arrays(BSR.from_dense(dense, block=(16, 16)))
    values, pattern = values.to(device), [array.to(device) for array in pattern]
    left = (dense.mT if transpose else dense).double()
    right, residual = torch.randn(left.shape[1], 16), torch.randn(left.shape[0], 16)
    bias = torch.randn(left.shape[0])
    out = torch.ops.sparsecomp.spmm.default.direct_cuda(
        values, pattern, right.to(device), bias.to(device), residual.to(device), *layout, transpose, "row", "relu", 0.5,
        None, True,
    )  # fmt: skip
    wanted = (0.5 * (left @ right.double()) + bias[:, None] + residual).relu()
    assert relative(out.cpu(), wanted.numpy()) < 2e-6 and out.stride(0) == 1
    a, b = torch.randn(32, 16), torch.randn(48, 16)
    found = torch.ops.sparsecomp.sddmm.default.direct_cuda(a.to(device), b.to(device), pattern, *layout, 0.5)
    again = sddmm(a.double(), b.double(), [array.cpu() for array in pattern], layout, scale=0.5)
    assert relative(found.cpu(), again.numpy()) < 2e-6


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("kind", ["nm", "2:4"])
@pytest.mark.parametrize("kept", [False, True])
def test_an_inputs_nan_reaches_only_the_rows_that_use_it(kind, transpose, kept, device):
    """An N:M product, layer and their gradients by the kernels, against the sum of what is stored, entry by entry."""
    dense, values, pattern, layout = sample(kind, 32, 48, dtype=torch.float32)
    pattern = [*pattern, *transposed_arrays(pattern, layout)] if kept else pattern
    whole = dense.mT if transpose else dense
    x = torch.randn(16, whole.shape[1])
    x[0, 3], x[1, 20], x[2, 7], x[3] = math.nan, math.inf, -math.inf, math.nan
    terms = x[:, None, :].double() * whole.double()
    wanted = torch.where(whole != 0, terms, 0).sum(-1)
    values, pattern = values.to(device), [array.to(device) for array in pattern]
    product = torch.ops.sparsecomp.spmm.default.direct_cuda(
        values, pattern, x.mT.to(device), None, None, *layout, transpose, "column", "none", 1.0, None, False
    )
    of_layer = torch.ops.sparsecomp.sparse_linear.default.direct_cuda(
        x.to(device), values, pattern, None, None, layout.written(), transpose, "none", ""
    )
    assert wanted.isfinite().any(1)[:3].all() and wanted.isnan().any()
    for found in (product.mT.cpu(), of_layer.cpu()):
        torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-4, equal_nan=True)
    grad = torch.randn(wanted.shape)
    of_values = torch.ops.sparsecomp.sparse_linear_values.default.direct_cuda(
        x.to(device), grad.to(device), pattern, layout.written(), transpose
    )
    by_hand = grad.double().mT @ x.double()
    by_hand = by_hand.mT if transpose else by_hand
    places = layout.kind.entry_places([pattern[0].cpu()], layout.block, layout.shape)
    torch.testing.assert_close(
        of_values.cpu().double(), by_hand[torch.broadcast_tensors(*places)], rtol=1e-4, atol=1e-4, equal_nan=True
    )


def test_errors_say_what_is_needed():
    _, values, pattern, layout = sample("csr")
    right = torch.randn(53, 4, dtype=torch.float64)
    wrong = [
        (dict(dense=right[:50]), "needs \\(53, n\\)"),
        (dict(dense=right.float()), "convert one"),
        (dict(bias=torch.randn(5)), "one a column"),
        (dict(residual=torch.randn(3, 3)), "needs the result's"),
        (dict(activation="softplus"), "need one of"),
        (dict(values=values[:-1]), "values have shape"),
        (dict(pattern=pattern[:1]), "the pattern has 1 arrays"),
        (dict(layout=layout._replace(format="coo")), "needs one of"),
        (dict(layout=layout._replace(shape=(40, 53))), "one more than rows"),
    ]
    for change, message in wrong:
        with pytest.raises(FormatError, match=message):
            spmm(**{"values": values, "pattern": pattern, "dense": right, "layout": layout, **change})
    with pytest.raises(FormatError, match="do not give"):
        sddmm(right, right, pattern, layout)


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_refuses_what_is_added_in_another_shape(kind):
    """As many numbers in another shape are others."""
    dense, values, pattern, layout = sample(kind, dtype=torch.float32)
    x, sparse = torch.randn(2, 53), SparseTensor(CSR.from_dense(dense))
    for shape in ((37, 2), (74,), (1, 2, 37)):
        residual = torch.randn(shape)
        with pytest.raises(FormatError, match="residual"):
            sparse_linear(x, values, pattern, layout.written(), residual=residual)
        with pytest.raises(FormatError, match="residual"):
            sparse_matmul(sparse, x, residual=residual, linear=True)
    with pytest.raises(FormatError, match=r"x is \(\)"):
        sparse_linear(x[0, 0], values, pattern, layout.written())


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_around_the_operators_changes_nothing(kind):
    """They say themselves what they compute in; the plain torch they are written in must not be cast."""
    dense, values, pattern, layout = sample(kind, dtype=torch.float32)
    right, a, b = torch.randn(53, 4), torch.randn(37, 8), torch.randn(53, 8)
    values.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out, sampled = spmm(values, pattern, right, layout), sddmm(a, b, pattern, layout)
        (grad,) = torch.autograd.grad(out, values, right[:37])
        whole = torch.ops.sparsecomp.sparse_matmul.default(dense, right, None, None, False, "row", "none", 1.0, None)
    matrix = dense.double().numpy()
    assert out.dtype is whole.dtype is torch.float32 and relative(whole, matrix @ right.double().numpy()) < 2e-6
    assert relative(out.detach(), matrix @ right.double().numpy()) < 2e-6
    torch.testing.assert_close(sampled, sddmm(a.double(), b.double(), pattern, layout).float())
    torch.testing.assert_close(grad, sddmm(right[:37].double(), right.double(), pattern, layout).float())


@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_what_spare_capacity_holds_reaches_nothing_in_the_references(device, everywhere, monkeypatch):
    """Also where, as on a GPU, it is not looked at where entries begin and end."""
    reference = import_module("sparsecomp.reference.sparse")
    if everywhere:
        monkeypatch.setattr(reference, "entry_range", lambda pointers, indices: (0, indices.numel()))
        monkeypatch.setattr(reference, "lines_of", searched_lines)
    spare = torch.full((3,), 2**30, dtype=torch.int32)
    pointers, indices = torch.tensor([3, 5, 5, 8], dtype=torch.int32), torch.tensor([0, 2, 0, 1, 2], dtype=torch.int32)
    pattern = [pointers.to(device), torch.cat([spare, indices, spare]).to(device)]
    layout = Layout("bsr", (2, 3), (6, 9))
    a, b = torch.randn(6, 4, dtype=torch.float64), torch.randn(9, 4, dtype=torch.float64)
    dense = torch.randn(9, 5, dtype=torch.float64)
    values = torch.full((11, 2, 3), math.nan, dtype=torch.float64)
    values[3:8] = torch.randn(5, 2, 3, dtype=torch.float64)
    dense[0, 0] = b[0, 0] = math.inf
    given = [tensor.to(device) for tensor in (a, b, dense, values)]
    sampled = import_module("sparsecomp.ops.sparse.sddmm").sddmm(given[0], given[1], pattern, layout).cpu()
    product = spmm(given[3], pattern, given[2], layout).cpu()
    places = [(0, 0), (0, 2), (2, 0), (2, 1), (2, 2)]
    assert (sampled[:3] == 0).all() and (sampled[8:] == 0).all()
    wanted, whole_product = torch.zeros(6, 5, dtype=torch.float64), a @ b.mT
    for entry, (line, column) in enumerate(places, 3):
        rows, cols = slice(2 * line, 2 * line + 2), slice(3 * column, 3 * column + 3)
        torch.testing.assert_close(sampled[entry], whole_product[rows, cols])
        wanted[rows] += values[entry] @ dense[cols]
    torch.testing.assert_close(product, wanted)
    assert torch.equal(product[2:4], torch.zeros(2, 5, dtype=torch.float64))
    of_elements = reference.gathered_elements(given[0], given[1], *pattern_of_elements(device)).cpu()
    torch.testing.assert_close(of_elements[2:5], whole_product[[0, 3, 5], [1, 8, 2]])
    assert (of_elements[:2] == 0).all() and (of_elements[5:] == 0).all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("device", DEVICES)
def test_the_row_of_each_entry(device, dtype):
    """As scipy has it, by counts and by search; what is no entry counts to a row next to it."""
    counts = np.array([0, 3, 0, 0, 2, 1, 0])
    pointers = torch.tensor(np.concatenate([[0], counts.cumsum()]), dtype=dtype, device=device)
    matrix = scipy.sparse.csr_array((np.ones(6), np.arange(6), pointers.cpu().numpy()), shape=(7, 6))
    rows = torch.from_numpy(matrix.tocoo().coords[0]).long()
    for found in (lines_of(pointers, 0, 6), searched_lines(pointers, 0, 6), lines_of(pointers + 4, 4, 10)):
        assert torch.equal(found.cpu(), rows)
    around = searched_lines(pointers + 2, 0, 10).cpu()
    assert torch.equal(around[2:8], rows) and around.min() >= 0 and around.max() <= 6


def pattern_of_elements(device: str) -> tuple[Tensor, Tensor]:
    """Three elements of a (6, 9) matrix between spare capacity."""
    pointers = torch.tensor([2, 3, 3, 3, 4, 4, 5], dtype=torch.int64)
    return pointers.to(device), torch.tensor([99, 99, 1, 8, 2, 99], dtype=torch.int64).to(device)


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("rows", [1, 2, 3, 9, 31, 32, 200])
def test_layers_of_any_number_of_rows_against_float64(rows, dtype, transpose):
    """Each way that a CPU's product takes, and sampled products of rows that fill no vector."""
    generator = torch.Generator().manual_seed(rows)
    dense = torch.randn(37, 50, generator=generator) * (torch.rand(37, 50, generator=generator) < 0.2)
    dense[3], dense[:, 7] = 0, 0
    values, pattern = IndexArrays.of(CSR.from_dense(dense.to(dtype)))
    weight = dense.to(dtype).double().mT if transpose else dense.to(dtype).double()
    x, grad = torch.randn(rows, weight.shape[1]).to(dtype), torch.randn(rows, weight.shape[0]).to(dtype)
    bias, values = torch.randn(weight.shape[0]).to(dtype), values.clone().requires_grad_()
    x.requires_grad_()
    out = sparse_linear(x, values, pattern.arrays, pattern.layout.written(), transpose=transpose, bias=bias)
    by_x, by_values = torch.autograd.grad(out, (x, values), grad)
    assert out.is_contiguous()
    sampled = (x.detach().double().mT @ grad.double()) if transpose else (grad.double().mT @ x.detach().double())
    wanted = (x.detach().double() @ weight.mT + bias, grad.double() @ weight, sampled[dense.to(dtype) != 0])
    near = {torch.float16: 2**-10, torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
    for found, exactly in zip((out, by_x, by_values), wanted, strict=True):
        torch.testing.assert_close(found.double(), exactly.double(), rtol=near, atol=near)


def test_products_keep_their_dtype_under_autocast_and_on_meta():
    dense, values, pattern, layout = sample("csr", dtype=torch.float32)
    right = torch.randn(53, 4)
    plain = spmm(values, pattern, right, layout)
    for device in ("cpu", "meta"):
        assert torch.is_autocast_enabled("cpu") is False
        with without_autocast(torch.empty(0, device=device)):
            assert (dense @ right).dtype is torch.float32
        with torch.autocast("cpu", dtype=torch.bfloat16), without_autocast(torch.empty(0, device=device)):
            assert (dense @ right).dtype is (torch.float32 if device == "cpu" else torch.bfloat16)
        assert not torch.is_autocast_enabled("cpu")
    assert plain.dtype is torch.float32 and relative(plain, (dense @ right).numpy()) < 2e-6
