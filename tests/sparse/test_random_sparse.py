"""Random patterns are CSR arrays of exactly the entries that were asked for, as uneven as was asked for."""

import numpy as np
import pytest
import scipy.sparse
import torch

from sparsecomp.compiler.warmup import signature_of
from sparsecomp.lowering.cache.signature import Device, Rows
from sparsecomp.lowering.launch.epilogue import Output
from sparsecomp.lowering.launch.strided import Strides, order_of, strides_from
from sparsecomp.lowering.sparse.random_sparse import SKEWS, density_of, random_pattern, row_lengths
from sparsecomp.lowering.sparse.sddmm import SDDMM, Sddmm
from sparsecomp.lowering.sparse.spmm_csr import SPMM_CSR, SpmmCsr


@pytest.mark.parametrize("variation", SKEWS.values())
@pytest.mark.parametrize(("rows", "columns", "entries"), [(200, 300, 6000), (64, 16, 1000), (7, 5, 35), (5, 9, 1)])
@pytest.mark.parametrize("index", ["int32", "int64"])
def test_a_pattern_is_what_scipy_takes_for_one(rows, columns, entries, variation, index):
    crow, col, row = random_pattern(rows, columns, entries, variation, index, torch.Generator().manual_seed(3))
    assert crow.dtype is col.dtype is getattr(torch, index)
    assert crow[0] == 0 and crow[-1] == entries == col.numel()
    matrix = scipy.sparse.csr_array((np.ones(entries), col.numpy(), crow.numpy()), (rows, columns))
    matrix.check_format(full_check=True)
    assert matrix.has_canonical_format and matrix.nnz == entries and (matrix.toarray() <= 1).all()
    assert np.array_equal(row.numpy(), matrix.tocoo().row)
    counts = np.diff(matrix.indptr)
    if variation == 0:
        assert counts.max() - counts.min() <= 1
    elif rows == 200:  # there is room for unevenness
        assert counts.std() / counts.mean() > 0.5


def test_columns_spread_over_the_whole_row():
    """The mean of a uniform column is half of the row; eight columns of eight are all of them."""
    _, col, _ = random_pattern(400, 1000, 400 * 4, 0, "int64", torch.Generator().manual_seed(0))
    assert abs(col.double().mean() - 499.5) < 15 and col.min() < 10 and col.max() > 990
    _, col, _ = random_pattern(3, 8, 24, 0, "int64", torch.Generator().manual_seed(0))
    assert col.view(3, 8).tolist() == [list(range(8))] * 3


def test_the_generator_alone_decides():
    state = torch.get_rng_state()
    one, other = (random_pattern(9, 9, 30, 4, "int32", torch.Generator().manual_seed(1)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert torch.equal(state, torch.get_rng_state())


def test_shares_of_what_there_is():
    assert density_of(6, 2, 4) == 0.75 and density_of(100, 2, 4) == 1.0
    assert density_of(0, 0, 4) == density_of(5, 3, 0) == 0.0
    assert row_lengths(6, 4, 0.5) == Rows(1.5, 0.5) and row_lengths(0, 0, 0.0) == Rows(0.0, 0.0)


FLOAT32 = ("float32", "float32")
OUTPUT = Output(Strides(63, 7, 1), "float32", "", "", "", Strides(0, 0, 0), "none", 1.0)


@pytest.mark.parametrize("room", [0, 5, 200])
@pytest.mark.parametrize(
    ("operation", "problem", "entries"),
    [
        (SPMM_CSR, SpmmCsr(9, 8, 7, 1, 40, 1, 0, Strides(0, 7, 1), *FLOAT32, "int32", OUTPUT), 40),
        (SDDMM, Sddmm(9, 8, 3, 2, 40, 1, Strides(27, 3, 1), Strides(24, 3, 1), 40, 1.0, *FLOAT32, "int64"), 40),
    ],
)
def test_problems_are_timed_with_as_many_entries_as_they_have(operation, problem, entries, room):
    """No more than there are places, however much room there is."""
    problem = problem._replace(nnz=entries + room)
    stored = min(entries + room, 72)
    crow, col, *_, out = operation.operands(problem, torch.device("cpu"), 0)
    assert crow[-1] == stored and col.numel() == entries + room
    assert len({(row, int(col[at])) for row in range(9) for at in range(crow[row], crow[row + 1])}) == stored
    unwritten = out.isnan() if operation is SPMM_CSR else out[:, :stored].isnan()
    assert unwritten.all()
    again = operation.operands(problem, torch.device("cpu"), 0)
    assert all(torch.equal(a, b) for a, b in zip((crow, col), again, strict=False))


@pytest.mark.parametrize("operation", [SPMM_CSR, SDDMM], ids=lambda one: one.name)
@pytest.mark.parametrize(
    ("m", "k", "entries"),
    [(10, 100, 1000), (1, 1, 1), (100, 7, 0), (73, 2433, 109), (2016, 925, 1957), (3, 23, 24), (4096, 4096, 10**6)],
)
def test_what_is_timed_for_a_signature_has_that_signature(operation, m, k, entries):
    """A signature that is read has rounded numbers, which need not agree: others of their buckets are tried."""
    device = Device("H100", "9.0", "3.6.0")
    if operation is SPMM_CSR:
        problem = SpmmCsr(m, k, 7, 1, entries, 0, 0, Strides(0, 7, 1), *FLOAT32, "int32", OUTPUT)
    else:
        problem = Sddmm(m, k, 3, 1, entries, 0, Strides(0, 3, 1), Strides(0, 3, 1), entries, 1.0, *FLOAT32, "int64")
    signature = operation.signature(problem, device)
    stand_in = operation.representative(signature_of(signature.fields))
    assert operation.signature(stand_in, device).key == signature.key


@pytest.mark.parametrize("layout", ["rows", "uneven rows", "columns", "strided"])
@pytest.mark.parametrize(("rows", "columns"), [(3, 16), (5, 7), (8, 9), (20, 64)])
def test_strides_for_a_layout_have_it_and_no_two_elements_share_a_place(layout, rows, columns):
    strides = strides_from(layout, rows, columns)
    assert order_of(strides, columns) == layout
    batch, row, column = (torch.arange(size) * step for size, step in zip((3, rows, columns), strides, strict=True))
    places = batch[:, None, None] + row[:, None] + column
    assert places.unique().numel() == 3 * rows * columns
