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
    assert found.reasons[-1].endswith("keep it dense")
    assert formats.best(torch.eye(3).double()).format is CSR  # smaller than any block
    with pytest.raises(FormatError, match="dimensions"):
        formats.best(torch.ones(3))
