"""Products of two matrices, reductions, softmax and concatenation, beside the dense ones, gradients included."""

import math

import pytest
import torch
from matrices import of_every_format

from sparsecomp.errors import FormatError
from sparsecomp.formats import BCSC, BITMAP, BSR, COO, CSC, CSR, NARROW, NM, cat

pytestmark = pytest.mark.quick_cases(3)

KINDS = list(of_every_format({
    COO: {}, CSR: {}, CSC: {}, NARROW: {}, BITMAP: {}, BSR: {"block": (2, 3)}, BCSC: {"block": (2, 3)},
    NM: {"n": 2, "m": 4},
}).items())  # fmt: skip
EVERY = pytest.mark.parametrize(
    ("kind", "layout"), KINDS, ids=lambda one: one.__name__ if isinstance(one, type) else ""
)
LINES = pytest.mark.parametrize(
    ("kind", "layout"), KINDS[:5], ids=lambda one: one.__name__ if isinstance(one, type) else ""
)


def dense_of(kind: type, rows: int = 7, cols: int = 8, seed: int = 0) -> torch.Tensor:
    """Half zeros, one empty row and one full one; what N:M can hold."""
    generator = torch.Generator().manual_seed(seed)
    dense = torch.randn(rows, cols, generator=generator, dtype=torch.float64)
    dense *= torch.rand(rows, cols, generator=generator) < 0.5
    if kind is NM:
        dense.view(rows, -1, 4)[..., 2:] = 0
    else:
        dense[3], dense[:, 2] = -1 - torch.rand(cols, generator=generator), 2.5
    dense[5] = 0
    return dense


def pair(kind: type, layout: dict, dense: torch.Tensor):
    """A matrix whose values want gradients, and the dense one of them."""
    found = kind.from_dense(dense, **layout)
    found = found.with_values(found.values.detach().requires_grad_())
    return found, found.to_dense()


@EVERY
@pytest.mark.parametrize("dim", [None, 0, 1, -1, -2])
@pytest.mark.parametrize("name", ["sum", "mean", "amax", "amin"])
def test_reductions_are_the_dense_ones(kind, layout, dim, name):
    matrix, dense = pair(kind, layout, dense_of(kind))
    found = getattr(matrix, name)(dim)
    expected = getattr(dense, name)(*(() if dim is None else (dim,)))
    torch.testing.assert_close(found, expected)
    weights = torch.randn(found.shape, dtype=found.dtype, generator=torch.Generator().manual_seed(9))
    (mine,) = torch.autograd.grad((found * weights).sum(), matrix.values, retain_graph=True)
    (theirs,) = torch.autograd.grad((expected * weights).sum(), matrix.values)
    if name in ("sum", "mean"):
        torch.testing.assert_close(mine, theirs)
    else:  # zeros that share an extreme share its gradient, and most are not stored
        touched = matrix.values != 0
        torch.testing.assert_close(mine[touched], theirs[touched])


def test_a_batch_and_slices_reduce_each():
    dense = torch.stack([dense_of(CSR), dense_of(CSR, seed=1)])
    matrix = CSR.from_dense(dense)
    for dim in (0, 1):
        torch.testing.assert_close(matrix.sum(dim), dense.sum(dim + 1))
        torch.testing.assert_close(matrix.amax(dim), dense.amax(dim + 1))
    torch.testing.assert_close(matrix.sum(), dense.sum((1, 2)))
    torch.testing.assert_close(matrix[2:5].amin(1), dense[:, 2:5].amin(2))
    torch.testing.assert_close(abs(matrix).amax(), dense.abs().amax((1, 2)))
    torch.testing.assert_close(matrix[1:4].softmax().to_dense(), matrix.softmax().to_dense()[:, 1:4])


def test_halves_sum_in_float32_and_empty_matrices_are_told():
    many = CSR.from_dense(torch.full((1, 4096), 1.0, dtype=torch.float16))
    assert many.sum(1).item() == 4096 and many.sum().dtype is torch.float16
    empty = CSR.from_dense(torch.zeros(0, 3))
    assert empty.sum(0).tolist() == [0, 0, 0] and empty.sum(1).shape == (0,) and math.isnan(empty.mean())
    for dim in (0, None):
        with pytest.raises(FormatError, match="no elements"):
            empty.amax(dim)
    for wrong in (2, -3, 0.0, True):
        with pytest.raises(FormatError, match="dim is"):
            many.sum(wrong)


@LINES
@pytest.mark.parametrize("dim", [0, 1])
def test_softmax_is_over_what_is_stored(kind, layout, dim):
    matrix, dense = pair(kind, layout, dense_of(kind))
    found = matrix.softmax(dim)
    expected = dense.masked_fill(dense == 0, -math.inf).softmax(dim).nan_to_num(nan=0)
    torch.testing.assert_close(found.to_dense(), expected)
    weights = torch.randn(7, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    (mine,) = torch.autograd.grad((found.to_dense() * weights).sum(), matrix.values)
    reference = dense.detach().clone().requires_grad_()
    kept = reference.masked_fill(dense == 0, -1e300).softmax(dim)
    (theirs,) = torch.autograd.grad((kept * weights).sum(), reference)
    torch.testing.assert_close(matrix.with_values(mine).to_dense(), theirs.masked_fill(dense == 0, 0))


def test_softmax_of_large_values_and_of_filler():
    rows = CSR.from_dense(torch.tensor([[1000.0, 1001.0, 0.0], [0.0, -1000.0, 0.0]], dtype=torch.float16))
    torch.testing.assert_close(
        rows.softmax().to_dense(),
        torch.tensor([[0.2689, 0.7311, 0], [0, 1, 0]], dtype=torch.float16),
        atol=1e-3,
        rtol=0,
    )
    for kind, layout in KINDS[5:]:
        with pytest.raises(FormatError, match="convert to CSR first"):
            kind.from_dense(dense_of(NM), **layout).softmax()


@EVERY
@pytest.mark.parametrize("other", [CSR, COO, BSR], ids=lambda kind: kind.__name__)
def test_a_product_stores_what_both_store(kind, layout, other):
    dense, theirs = dense_of(kind), dense_of(CSR, seed=4)
    matrix = kind.from_dense(dense, **layout)
    second = other.from_dense(theirs, **({"block": (2, 2)} if other is BSR else {}))
    second = second.with_values(second.values.requires_grad_())
    found = matrix * second
    assert type(found) is kind and torch.equal(found.to_dense(), dense * theirs)
    if other is not BSR:
        assert found.to(CSR).nnz == ((dense != 0) & (theirs != 0)).sum()
        (mine,) = torch.autograd.grad(found.to_dense().square().sum(), second.values)
        torch.testing.assert_close(second.with_values(mine).to_dense(), (2 * dense * dense * theirs) * (theirs != 0))


def test_products_of_batches_other_dtypes_and_shapes():
    dense = torch.stack([dense_of(CSR), dense_of(CSR, seed=1)])
    one, other = CSR.from_dense(dense), CSR.from_dense(dense_of(CSR, seed=2).float())
    assert torch.equal((one * other).to_dense(), dense * other.to_dense()) and (other * one).dtype is torch.float64
    assert torch.equal((other * one).to_dense(), dense * other.to_dense())
    nothing = CSR.from_dense(torch.zeros(7, 8))
    assert (nothing * other).nnz == (other * nothing).nnz == 0
    with pytest.raises(FormatError, match="have no product: they need one shape"):
        one * CSR.from_dense(torch.ones(7, 7))


@EVERY
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_concatenation_is_the_dense_one(kind, layout, dim):
    parts = [dense_of(kind, seed=seed) for seed in range(3)]
    matrices = [pair(kind, layout, part)[0] for part in parts]
    found = cat(matrices, dim)
    assert type(found) is kind and torch.equal(found.to_dense(), torch.cat(parts, dim))
    found.to_dense().square().sum().backward()
    for matrix in matrices:
        torch.testing.assert_close(matrix.values.grad, 2 * matrix.values.detach())


def test_what_cannot_be_concatenated():
    one = CSR.from_dense(torch.ones(2, 3))
    for others, message in (
        ([one, CSR.from_dense(torch.ones(2, 4))], "matrix 1 is"), ([one, one.to(torch.float64)], "matrix 1 is"),
        ([], "no matrices"), ([CSR.from_dense(torch.ones(2, 2, 3))], "is a batch"),
    ):  # fmt: skip
        with pytest.raises(FormatError, match=message):
            cat(others)
    with pytest.raises(FormatError, match="dim is 2"):
        cat([one], 2)


@pytest.mark.parametrize("kind", [BSR, BCSC], ids=lambda kind: kind.__name__)
def test_zeros_of_blocks_have_gradients(kind):
    dense = torch.tensor([[1.0, 0, 0], [0, 2, 0], [0, 0, 3]], dtype=torch.float64)  # odd, with a zero in each block
    other = CSR.from_dense(torch.ones(3, 3, dtype=torch.float64))
    for combine in (
        lambda one: one * other, lambda one: one + other, lambda one: one @ other, lambda one: cat([one, one], 0),
    ):  # fmt: skip
        matrix, whole = pair(kind, {"block": (2, 2)}, dense)
        (mine,) = torch.autograd.grad(combine(matrix).to_dense().sum(), matrix.values)
        if combine(matrix).shape == (6, 3):
            expected = 2 * torch.ones(3, 3, dtype=torch.float64)
        else:
            expected = torch.full(
                (3, 3), 3.0 if torch.equal(combine(matrix).to_dense(), dense @ other.to_dense()) else 1.0
            )
        (theirs,) = torch.autograd.grad((whole * expected).sum(), matrix.values)
        torch.testing.assert_close(mine, theirs)
