"""Real matrices, as scipy holds them: pruned layers, a stiffness matrix, graphs."""

import numpy as np
import pytest
import scipy.io
import scipy.sparse
import torch
from matrices import FOLDER, REAL

from bench.sparse.matrices import read
from sparsecomp.formats import BCSC, BSR, COO, CSC, CSR, SparseMatrix


@pytest.mark.parametrize("real", REAL)
def test_a_real_matrix_has_its_figures_in_every_format(real, tmp_path) -> None:
    matrix = read(FOLDER / real.file).to(CSR)
    matrix.validate()
    found = matrix.statistics()
    assert (matrix.shape, matrix.nnz, found.row_max) == (real.shape, real.nnz, real.row_max)
    assert found.row_mean == pytest.approx(real.row_mean, abs=0.05)
    assert found.row_variation == pytest.approx(real.row_variation, abs=0.005)
    assert sum(found.row_histogram) == real.shape[0]
    assert (matrix.crow.diff() == 0).sum() == real.empty_rows
    expected = scipy.sparse.csr_array(
        (matrix.values.numpy(), matrix.col.numpy(), matrix.crow.numpy()), shape=real.shape
    )
    as_scipy_has_it(matrix, expected)

    matrix.save(tmp_path / "matrix")
    assert SparseMatrix.load(tmp_path / "matrix").allclose(matrix)
    half = real.shape[0] // 32 * 16
    parts = [matrix.slice_rows(0, half), matrix.slice_rows(half, real.shape[0])]
    assert sum(part.nnz for part in parts) == real.nnz
    assert not (parts[1].to_scipy() != expected[half:]).nnz


def as_scipy_has_it(matrix: CSR, expected: scipy.sparse.csr_array) -> None:
    """Every conversion, there and back, without making the matrix dense."""
    for target, layout in ((COO, {}), (CSC, {}), (BSR, {"block": (4, 4)}), (BCSC, {"block": (2, 8)})):
        converted = matrix.to(target, **layout)
        converted.validate()
        assert not (scipy.sparse.csr_array(converted.to_scipy()) != expected).nnz
        assert converted.allclose(matrix)
        assert not (scipy.sparse.csr_array(converted.mT.to_scipy()) != expected.T).nnz
    csc, coo = matrix.to(CSC), matrix.to(COO)
    assert np.array_equal(csc.row.numpy(), expected.tocsc().indices)
    shuffled = torch.randperm(coo.nnz, generator=torch.Generator().manual_seed(0))
    again = COO.from_triplets(coo.row[shuffled], coo.col[shuffled], coo.values[shuffled], coo.shape)
    assert torch.equal(again.to(CSR).col, matrix.col) and torch.equal(again.values, coo.values)


@pytest.mark.parametrize("real", [real for real in REAL if real.values[0].file.endswith(".mtx.gz")])
def test_the_reader_reads_what_scipy_reads(real) -> None:
    ours, theirs = read(FOLDER / real.file), scipy.io.mmread(str(FOLDER / real.file)).tocsr()
    assert ours.nnz == theirs.nnz
    assert not (ours.to(CSR).to_scipy() != theirs).nnz
