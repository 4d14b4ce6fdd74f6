"""Where sparse libraries go wrong: each trap at the level of operators and tensors, against a value known otherwise."""

import math

import numpy as np
import pytest
import scipy.sparse
import torch
import torch.nn.functional as F
from kernel_devices import DEVICES
from matrices import FOLDER, of_every_format, of_every_layout
from rewriting import rewritten
from torch import Tensor

from bench.sparse.matrices import read
from sparsecomp import SparseTensor, _compat
from sparsecomp.errors import FormatError
from sparsecomp.formats import BCSC, BITMAP, BSR, COO, CSC, CSR, NARROW, NM, SparseMatrix
from sparsecomp.ops import Layout, sddmm, spmm
from sparsecomp.reference.patterns import elements_of
from sparsecomp.tensor.index_arrays import IndexArrays

FORMATS: dict[type[SparseMatrix], dict[str, object]] = of_every_format({
    COO: {}, CSR: {}, CSC: {}, BSR: {"block": (2, 3)}, BCSC: {"block": (3, 2)}, NM: {"n": 4, "m": 4}, NARROW: {},
    BITMAP: {},
})  # fmt: skip
KINDS = of_every_layout({CSR: {}, BSR: {"block": (2, 3)}, NM: {"n": 4, "m": 4}, NARROW: {}, BITMAP: {}})


def random(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def thinned(rows: int, cols: int, density: float = 0.3, seed: int = 0) -> Tensor:
    """A random float64 matrix without elements in its second row and third column."""
    kept = torch.rand(rows, cols, generator=torch.Generator().manual_seed(seed)) < density
    kept[1], kept[:, 2] = False, False
    return random(rows, cols, seed=seed) * kept


def arrays(dense: Tensor, kind: type[SparseMatrix], **layout: object) -> tuple[Tensor, list[Tensor], Layout]:
    values, pattern = IndexArrays.of(kind.from_dense(dense, **layout))
    return values, list(pattern.arrays), pattern.layout


# -- alpha, beta and what must not be read


@pytest.mark.parametrize("compiled", [False, True])
def test_alpha_and_beta_are_the_formulas_and_beta_0_does_not_read(compiled):
    dense, right, added = thinned(6, 9), random(9, 4, seed=1), random(6, 4, seed=2)
    for format, layout in FORMATS.items():
        weight = SparseTensor.from_dense(dense, format, **layout)
        for alpha in (0.0, 1.0, -2.5):
            for beta in (0.0, 1.0, 0.5, -1.0):
                given = torch.full_like(added, math.nan) if beta == 0 else added

                def call(x: Tensor, y: Tensor, w=weight, alpha=alpha, beta=beta) -> Tensor:
                    return torch.addmm(y, w, x, alpha=alpha, beta=beta)

                if compiled and (format is CSR and alpha == -2.5):
                    out, _ = rewritten(call, right, given, implementation="auto", strict=True)
                else:
                    out = call(right, given)
                wanted = alpha * (dense.numpy() @ right.numpy()) + (beta * added.numpy() if beta else 0.0)
                np.testing.assert_allclose(out.numpy(), wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("device", DEVICES)
def test_results_are_written_whole(device):
    """New memory is filled with NaN: none may be left, neither of spare capacity nor of empty rows."""
    dense = thinned(6, 9)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(1, device=device).isnan()
        for kind, layout in KINDS.items():
            values, pattern, form = arrays(dense, kind, **layout)
            for dtype in (torch.float64, torch.float32):
                given, own = values.to(device, dtype), [array.to(device) for array in pattern]
                right, left = random(9, 5, dtype=dtype).to(device), random(6, 5, dtype=dtype).to(device)
                for by_column in (False, True):
                    assert not spmm(given, own, right, form, by_column=by_column).isnan().any()
                    assert not spmm(given, own, left, form, transpose=True, by_column=by_column).isnan().any()
                assert not sddmm(left, right, own, form).isnan().any()
    finally:
        torch.use_deterministic_algorithms(False)


# -- sizes


def test_results_beyond_2_to_the_31_elements_have_their_shape():
    """2**17 rows by 2**15 columns; nothing is computed."""
    m, k, n = 2**17, 64, 2**15
    meta = {"device": "meta"}
    pointers, indices = torch.empty(m + 1, dtype=torch.int32, **meta), torch.empty(5, dtype=torch.int32, **meta)
    layout = Layout("csr", (1, 1), (m, k))
    with _compat.FakeTensorMode(allow_non_fake_inputs=True):
        values, dense = torch.empty(5), torch.empty(k, n)
        pattern = [torch.empty(m + 1, dtype=torch.int32), torch.empty(5, dtype=torch.int32)]
        for by_column, stride in ((False, (n, 1)), (True, (1, m))):
            out = spmm(values, pattern, dense, layout, by_column=by_column)
            assert out.shape == (m, n) and out.stride() == stride and out.numel() == 2**32
        assert sddmm(torch.empty(m, n), torch.empty(k, n), pattern, layout).shape == (5,)
    places = torch.empty(m, n, dtype=torch.uint8, **meta)
    pointers, indices = elements_of([places], Layout("nm", (2, 4), (m, 2 * n)))
    assert pointers.dtype is indices.dtype is torch.int64 and indices.numel() == 2**32


@pytest.mark.parametrize("device", DEVICES)
def test_operands_whose_rows_lie_beyond_2_to_the_31_elements(device):
    far = 2**31
    long = torch.empty(far + 8, dtype=torch.float16, device=device).as_strided((2, 8), (far, 1))
    long.copy_(torch.arange(16.0).view(2, 8))
    values, pattern, layout = arrays(torch.tensor([[0.0, 2.0], [1.0, 0.0]]).half(), CSR)
    values, pattern = values.to(device), [array.to(device) for array in pattern]
    wanted = torch.stack([2 * torch.arange(8.0, 16.0), torch.arange(8.0)]).half()
    assert torch.equal(spmm(values, pattern, long, layout).cpu(), wanted)
    assert torch.equal(spmm(values, pattern, long, layout, residual=long).cpu(), wanted + long.cpu())
    eye = torch.eye(2, 8, dtype=torch.float16, device=device)
    assert sddmm(long, eye, pattern, layout).tolist() == [1.0, 8.0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_tridiagonal_matrix_of_a_million_rows_has_its_closed_form(dtype, device):
    """The second difference of i is 0 but at the ends; the gradients of sum(i mod 7 · y) are single products."""
    rows = 1_000_000
    index = torch.arange(rows)
    col = torch.stack([index - 1, index, index + 1], 1).flatten()[1:-1].int()
    crow = (3 * torch.arange(rows + 1) - 1).clamp(0, 3 * rows - 2).int()
    values = torch.tensor([-1.0, 2.0, -1.0], dtype=dtype).repeat(rows)[1:-1]
    weight = SparseTensor(CSR.from_arrays(crow, col, values, (rows, rows))).to(device).requires_grad_()
    x = index.to(device, dtype)[:, None].requires_grad_()
    out = weight @ x
    wanted = torch.zeros(rows, 1, dtype=dtype)
    wanted[0], wanted[-1] = -1, rows
    assert torch.equal(out.detach().cpu(), wanted)
    factor = (index % 7).to(dtype)
    out.backward(factor.to(device)[:, None])
    beside = F.pad(factor, (1, 1))
    assert torch.equal(x.grad.cpu()[:, 0], 2 * factor - beside[:-2] - beside[2:])
    row = torch.repeat_interleave(index, crow.diff(), output_size=col.numel())
    torch.testing.assert_close(weight.grad.values().cpu(), factor[row] * col.to(dtype), rtol=1e-6, atol=0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.skipif(not FOLDER.exists(), reason="the collection of real matrices is not here")
def test_bcsstk13_within_the_bound_of_its_rows(dtype, device):
    """Values of 1e-24 to 1e12: |error| ≤ (nonzeros a row + 2) · eps · Σ|a||x| (Higham, Accuracy and Stability, 3.1)."""
    matrix = read(FOLDER / "bcsstk13.mtx.gz").to(CSR)
    matrix = matrix.with_values(matrix.values.to(dtype))
    x, grad = random(2003, 3, dtype=dtype).to(device).requires_grad_(), random(2003, 3, dtype=dtype, seed=1)
    weight = SparseTensor(matrix.to_device(device)).requires_grad_()
    out = weight @ x
    out.backward(grad.to(device))
    wide = matrix.values.numpy().astype(np.longdouble)
    rows, cols = np.repeat(np.arange(2003), matrix.crow.diff().numpy()), matrix.col.numpy()
    eps, counts = torch.finfo(dtype).eps, matrix.crow.diff().numpy()[:, None]  # the pattern is symmetric
    for found, of, source, target in ((out, x, cols, rows), (x.grad, grad, rows, cols)):
        right = of.detach().cpu().numpy().astype(np.longdouble)[source]
        exact, size = np.zeros((2003, 3), np.longdouble), np.zeros((2003, 3), np.longdouble)
        np.add.at(exact, target, wide[:, None] * right)
        np.add.at(size, target, np.abs(wide[:, None] * right))
        error = np.abs(found.detach().cpu().numpy() - exact)
        assert size.max() > 1e10 and (error <= (counts + 2) * eps * size).all()
    products = grad.numpy().astype(np.longdouble)[rows] * x.detach().cpu().numpy().astype(np.longdouble)[cols]
    error = np.abs(weight.grad.values().cpu().numpy() - products.sum(1))
    assert (error <= 5 * eps * np.abs(products).sum(1)).all()


@pytest.mark.parametrize("format", FORMATS)
def test_one_nonzero_in_a_thousand(format):
    dense = random(400, 300) * (torch.rand(400, 300, generator=torch.Generator().manual_seed(3)) < 0.001)
    weight = SparseTensor.from_dense(dense, format, **FORMATS[format]).requires_grad_()
    x = random(5, 300, seed=1).requires_grad_()
    out = F.linear(x, weight)
    torch.testing.assert_close(out, x @ dense.mT)
    out.sum().backward()
    torch.testing.assert_close(x.grad, dense.sum(0).expand(5, -1))
    empty = (dense == 0).all(1)
    assert empty.sum() > 200 and torch.equal(out[:, empty], torch.zeros(5, int(empty.sum())).double())


# -- how operands lie


def spread(shape: tuple[int, ...]) -> list[Tensor]:
    """Tensors of a shape: expanded along each axis, transposed, every second element, and from the end of another."""
    plain = random(*shape)
    expanded = [plain.narrow(axis, 0, 1).expand(shape) for axis in range(len(shape))]
    doubled = torch.zeros([2 * size for size in shape], dtype=torch.float64)
    strided = doubled[tuple(slice(None, None, 2) for _ in shape)]
    strided.copy_(plain)
    return [*expanded, plain.mT.contiguous().mT, strided, torch.cat([plain, plain])[shape[0] :], plain.flip(-1)]


@pytest.mark.parametrize("kind", KINDS)
def test_operands_may_lie_anyhow(kind):
    dense = thinned(6, 9)
    values, pattern, layout = arrays(dense, kind, **KINDS[kind])
    stored = IndexArrays(kind.__name__, layout, tuple(pattern)).matrix(torch.ones_like(values), False).to_dense()
    for right, left, residual in zip(spread((9, 4)), spread((6, 4)), spread((6, 4)), strict=True):
        bias = random(1).expand(6)
        out = spmm(values, pattern, right, layout, residual=residual, bias=bias, bias_axis="row")
        torch.testing.assert_close(out, dense @ right + bias[:, None] + residual)
        found = sddmm(left, right, pattern, layout)
        found = IndexArrays(kind.__name__, layout, tuple(pattern)).matrix(found, False).to_dense()
        torch.testing.assert_close(found, (left @ right.mT) * stored)
    for right in spread((2, 9, 4)):
        torch.testing.assert_close(spmm(values, pattern, right, layout), dense @ right)


@pytest.mark.parametrize("kind", KINDS)
def test_values_and_indices_may_be_views(kind):
    """Every second element of longer arrays, and a slice of rows with spare capacity before and behind it."""
    dense = thinned(8, 9)
    values, pattern, layout = arrays(dense, kind, **KINDS[kind])
    far = torch.stack([values, torch.full_like(values, math.nan)], -1)[..., 0]
    apart = [torch.stack([array, array + 100 if array.dtype is not torch.uint8 else array], -1)[..., 0]
             for array in pattern]  # fmt: skip
    right = random(9, 4, seed=1)
    torch.testing.assert_close(spmm(far, apart, right, layout), dense @ right)
    torch.testing.assert_close(spmm(far, apart, right[:8], layout, transpose=True), dense.mT @ right[:8])
    weight = SparseTensor(kind.from_dense(dense, **KINDS[kind]).slice_rows(2, 6)).requires_grad_()
    x = random(3, 9, seed=2)
    torch.testing.assert_close(F.linear(x, weight), x @ dense[2:6].mT)
    F.linear(x, weight).sum().backward()
    stored = weight.detach().with_values(torch.ones_like(weight.values())).to_dense()
    torch.testing.assert_close(weight.grad.to_dense(), x.sum(0).expand(4, -1) * stored)


def test_unsorted_and_repeated_elements_are_summed_or_refused():
    row, col = torch.tensor([2, 0, 2, 2, 0]), torch.tensor([1, 3, 0, 1, 3])
    values = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0], dtype=torch.float64)
    theirs = scipy.sparse.coo_array((values.numpy(), (row.numpy(), col.numpy())), shape=(4, 5))
    x = random(5, 3)
    for format, layout in FORMATS.items():
        weight = SparseTensor(COO.from_triplets(row, col, values, (4, 5)).to(format, **layout))
        np.testing.assert_allclose((weight @ x).numpy(), theirs @ x.numpy(), rtol=1e-14)
    crow = torch.tensor([0, 2, 2, 5, 5])
    for columns, what in (([3, 3, 0, 1, 1], "3 follows 3"), ([3, 4, 1, 0, 2], "0 follows 1")):
        given = (crow, torch.tensor(columns), values, (4, 5))
        with pytest.raises(FormatError, match=what):
            CSR.from_arrays(*given)
        summed = CSR.from_arrays(*given, coalesce=True)
        scipys = scipy.sparse.csr_array((values.numpy(), np.array(columns), crow.numpy()), shape=(4, 5))
        assert np.array_equal(summed.to_dense().numpy(), scipys.toarray())


# -- gradients


@pytest.mark.slow(reason="finite differences")
@pytest.mark.parametrize("format", FORMATS)
def test_gradients_of_tensors_by_finite_differences(format):
    """By x, bias and residual directly; by the values through a change of each."""
    dense = thinned(5, 6, 0.5)
    weight = SparseTensor.from_dense(dense, format, **FORMATS[format]).requires_grad_()
    x, added = random(2, 3, 6, seed=1).requires_grad_(), random(2, 3, 5, seed=2).requires_grad_()

    def run(x: Tensor, added: Tensor) -> Tensor:
        return torch.tanh(F.linear(x, weight.detach(), added[0, 0]) + added) @ weight.detach()

    assert torch.autograd.gradcheck(run, (x, added)) and torch.autograd.gradgradcheck(run, (x, added))
    torch.tanh(F.linear(x, weight)).sum().backward()
    found, values = weight.grad.to_dense(), weight.values()
    for place in range(0, values.numel(), 3):
        step = torch.zeros(values.numel(), dtype=torch.float64)
        step[place] = 1e-6
        step = step.view(values.shape)
        moved = [weight.with_values(values + sign * step) for sign in (1, -1)]
        high, low = (torch.tanh(F.linear(x, each)).sum() for each in moved)
        where = (weight.with_values(step).to_dense() != 0).nonzero()
        if where.numel():
            torch.testing.assert_close(found[tuple(where[0])], (high - low) / 2e-6, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_by_a_batch_of_values(kind):
    values, pattern, layout = arrays(thinned(4, 6), kind, **KINDS[kind])
    many, right = torch.stack([values, -values]).requires_grad_(), random(6, 3, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(lambda v, r: spmm(v, pattern, r, layout, activation="silu"), (many, right))
    left = random(2, 4, 3, seed=2).requires_grad_()
    assert torch.autograd.gradcheck(lambda a, b: sddmm(a, b, pattern, layout), (left, right))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_pattern_used_twice_and_a_row_without_elements(compiled):
    """The gradient adds up over both uses; what no element reads or writes gets none."""
    dense = thinned(6, 6, 0.4)
    weight = SparseTensor.from_dense(dense).requires_grad_()
    exact = dense.clone().requires_grad_()

    def twice(w: Tensor, x: Tensor) -> Tensor:
        return torch.relu(F.linear(x, w)) @ w

    x, right = (random(3, 6, seed=1).requires_grad_() for _ in range(2))
    call = torch.compile(twice, backend="aot_eager", fullgraph=True) if compiled else twice
    call(weight, x).square().sum().backward()
    twice(exact, right).square().sum().backward()
    torch.testing.assert_close(weight.grad.to_dense(), exact.grad * (dense != 0))
    torch.testing.assert_close(x.grad, right.grad)
    assert (x.grad[:, 2] == 0).all() and (weight.grad.to_dense()[1] == 0).all()
