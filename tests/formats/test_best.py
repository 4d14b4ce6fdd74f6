"""The format that is picked is the one a matrix was made for, and its estimates are of the arrays it really has."""

import pytest
import torch

from sparsecomp import formats
from sparsecomp.errors import FormatError
from sparsecomp.formats import BSR, CSR, NM


def in_blocks(size: int, share: float) -> torch.Tensor:
    kept = torch.rand(128 // size, 256 // size, generator=torch.Generator().manual_seed(0)) < share
    return torch.ones(128, 256) * kept.repeat_interleave(size, 0).repeat_interleave(size, 1)


def two_of_four() -> torch.Tensor:
    order = torch.rand(128, 64, 4, generator=torch.Generator().manual_seed(0)).argsort(-1)
    return (order < 2).float().view(128, 256)


def scattered(share: float) -> torch.Tensor:
    return (torch.rand(128, 256, generator=torch.Generator().manual_seed(0)) < share).float()


@pytest.mark.parametrize(
    ("dense", "format", "layout", "why"),
    [
        (scattered(0.02), CSR, {}, "% of the matrix"),
        (in_blocks(16, 0.2), BSR, {"block": (16, 16)}, "blocks of 16x16, 100.0% full"),
        (in_blocks(32, 0.3), BSR, {"block": (32, 32)}, "blocks of 32x32, 100.0% full"),
        (two_of_four(), NM, {"n": 2, "m": 4}, "no group of 4 columns holds more than 2, 100.0% full"),
        (torch.zeros(128, 256), CSR, {}, "0 elements"),
    ],
    ids=["scattered", "blocks of 16", "blocks of 32", "2:4", "empty"],
)
def test_a_matrix_gets_the_format_it_was_made_for(dense, format, layout, why):
    found = formats.best(CSR.from_dense(dense), columns=1)
    assert (found.format, found.layout) == (format, layout) and why in found.reasons[0] and why in str(found)
    order = [(one.full < 0.5, one.moved) for one in found.estimates]
    assert order == sorted(order)
    for one in found.estimates:
        assert one.nbytes == one.format.from_dense(dense, **one.layout).nbytes
    assert found.statistics.nnz == int(dense.sum())
    assert formats.best(dense, columns=1) == found


def test_no_format_is_chosen_that_is_mostly_filler():
    found = formats.best(scattered(0.1), columns=64)
    assert found.format is CSR and any(one.moved < found.estimates[0].moved for one in found.estimates)
    assert "more filler than elements" in found.reasons[1]


def test_it_says_what_does_not_fit_and_when_dense_is_smaller():
    found = formats.best(torch.rand(33, 65) + 1)
    assert any("no N:4: a group of 4 columns holds 4" in reason for reason in found.reasons)
    assert found.format is None and found.layout == {} and found.reasons[0].startswith("dense: keep it dense")
    assert str(found).startswith(f"dense: {33 * 65 * 4} bytes stored")
    assert found.estimates[1].format is not None and all(one.nbytes >= 33 * 65 * 4 for one in found.estimates)
    assert formats.best(torch.eye(3).double()).format is CSR  # smaller than any block
    with pytest.raises(FormatError, match="dimensions"):
        formats.best(torch.ones(3))


@pytest.mark.parametrize("share", [0.1, 0.4, 0.5, 0.6, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_matrix_stays_dense_where_scipys_csr_is_no_smaller(share, dtype):
    """An element takes its value and a column of four bytes; scattered ones leave no block and no group to anything."""
    dense = scattered(share).to(dtype)
    found, theirs = formats.best(dense), CSR.from_dense(dense.float()).to_scipy()
    stored = theirs.nnz * (dtype.itemsize + 4) + theirs.indptr.nbytes
    assert (found.format is None) == (stored >= dense.nbytes)


def test_what_is_no_matrix_or_no_number_of_columns():
    matrix = CSR.from_dense(torch.eye(8))
    for given, columns, message in (
        (matrix, 0, "columns is 0"), (matrix, "many", "columns is 'many'"), (matrix, True, "columns"),
        (matrix.to("meta"), 64, "no numbers"), (torch.ones(2, 2, device="meta"), 64, "meta device"),
        ([[1.0]], 64, "list"), (None, 64, "NoneType"), (torch.ones(2, 2).long(), 64, "int64"),
    ):  # fmt: skip
        with pytest.raises(FormatError, match=message):
            formats.best(given, columns)
    with pytest.raises(FormatError, match="None is no format"):
        matrix.to(formats.best(torch.ones(8, 8)).format)
