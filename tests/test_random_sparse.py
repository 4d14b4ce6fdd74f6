"""Random patterns are CSR arrays of exactly the entries that were asked for, as uneven as was asked for."""

import numpy as np
import pytest
import scipy.sparse
import torch

from sparsecomp.lowering.random_sparse import SKEWS, density_of, random_pattern, rows_of
from sparsecomp.lowering.signature import Rows


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
    assert rows_of(6, 4, 0.5) == Rows(1.5, 0.5) and rows_of(0, 0, 0.0) == Rows(0.0, 0.0)
