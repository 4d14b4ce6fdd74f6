"""What a layout says of arrays, and the products of a CPU on them: by hand, and against dense products in float64."""

import itertools

import pytest
import torch

from sparsecomp import formats
from sparsecomp.errors import FormatError
from sparsecomp.reference import sparse
from sparsecomp.reference.patterns import (
    Layout,
    compressed,
    elements_of,
    evenness,
    layout_of,
    skew_of,
    skew_of_counts,
    stored_by_rows,
    stored_shape,
    transposed_arrays,
)


@pytest.mark.parametrize(
    ("variation", "name"),
    [(0.0, "even"), (0.4999, "even"), (0.5, "mixed"), (1.9999, "mixed"), (2.0, "skewed"), (15.999, "skewed"),
     (16.0, "extreme"), (1e9, "extreme")],
)  # fmt: skip
def test_names_of_unevenness_begin_where_the_layout_says(variation, name):
    assert evenness(variation) == name


@pytest.mark.parametrize(
    ("counts", "name"),
    [
        ([], "even"), ([0, 0], "even"), ([3], "even"), ([1, 2], "even"),  # deviation 1/2 over mean 3/2: a third
        ([1, 3], "mixed"),  # 1 over 2
        ([0, 2], "mixed"),  # 1 over 1
        ([0, 0, 0, 0, 0, 0, 10], "skewed"),  # sqrt(6)
        ([0] * 3 + [4], "mixed"),  # sqrt(3)
        ([0] * 255 + [1], "skewed"), ([0] * 257 + [1], "extreme"),  # sqrt(255) and sqrt(257)
    ],
)  # fmt: skip
def test_unevenness_is_deviation_over_mean(counts, name):
    assert skew_of_counts(torch.tensor(counts, dtype=torch.int32)) == name
    assert skew_of(torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)) == name


def _matrix(format: str) -> tuple[torch.Tensor, formats.SparseMatrix]:
    dense = torch.zeros(5, 8)
    dense[0, 1], dense[0, 6], dense[2, 1], dense[3, 7], dense[4, 0] = 1.0, 2.0, 3.0, 4.0, 5.0
    how = {"BSR": {"block": (2, 4)}, "BCSC": {"block": (2, 4)}, "NM": {"n": 2, "m": 4}}.get(format, {})
    return dense, getattr(formats, format).from_dense(dense, **how)


WORDS = {
    # layout, plain, own arrays, shape of an entry, padded shape, shape of the values
    "CSR": ("csr 1x1 5x8 mixed even", True, 2, (), (5, 8), (5,)),
    "CSC": ("csr 1x1 8x5 mixed even", True, 2, (), (8, 5), (5,)),
    "BSR": ("bsr 2x4 5x8 even even", False, 2, (2, 4), (6, 8), (5, 2, 4)),
    "BCSC": ("bsr 4x2 8x5 even even", False, 2, (4, 2), (8, 6), (5, 4, 2)),
    "NM": ("nm 2x4 5x8 even even", False, 1, (), (5, 8), (5, 4)),
}


@pytest.mark.parametrize("format", WORDS)
def test_what_a_layout_says(format):
    written, plain, own, entry, padded, shape = WORDS[format]
    dense, matrix = _matrix(format)
    values, arrays, layout = stored_by_rows(matrix)
    assert layout.written() == written and Layout.read(written) == layout
    assert (layout.plain, layout.own, layout.entry, layout.padded_shape) == (plain, own, entry, padded)
    assert stored_shape(arrays, layout) == shape == tuple(values.shape)
    by_rows = dense.T if format in ("CSC", "BCSC") else dense
    for transpose in (False, True):
        found = compressed(values, arrays, layout, transpose)
        assert torch.equal(_written_out(found, layout), by_rows.T if transpose else by_rows)
        assert found.skew == layout.skews[transpose]


def _written_out(found, layout) -> torch.Tensor:
    """Entry by entry."""
    height, width = found.values.shape[1:] if layout.entry else (1, 1)
    rows, cols = found.shape
    out = torch.zeros(-(-rows // height) * height, -(-cols // width) * width)
    for row in range(found.pointers.numel() - 1):
        for entry in range(found.pointers[row], found.pointers[row + 1]):
            top, left = row * height, int(found.indices[entry]) * width
            out[top : top + height, left : left + width] += found.values[entry]
    return out[:rows, :cols]


def test_arrays_of_the_transpose_that_are_kept_are_taken_as_they_are():
    _, matrix = _matrix("CSR")
    _, arrays, layout = stored_by_rows(matrix)
    computed = transposed_arrays(arrays, layout)
    assert [one.tolist() for one in computed] == [[0, 1, 3, 3, 3, 3, 3, 4, 5], [4, 0, 2, 0, 3], [4, 0, 2, 1, 3]]
    kept = transposed_arrays((*arrays, *computed), layout)
    assert all(mine is given for mine, given in zip(kept, computed, strict=True))


def test_a_part_of_longer_arrays_is_transposed_by_itself():
    """Two rows of the five: entries 2 to 4, which stay where they lie."""
    _, matrix = _matrix("CSR")
    _, arrays, layout = stored_by_rows(matrix)
    part = layout._replace(shape=(2, 8))
    pointers, rows, order = transposed_arrays((arrays[0][2:5], arrays[1]), part)
    assert (pointers.tolist(), rows.tolist(), order.tolist()) == ([0, 0, 1, 1, 1, 1, 1, 1, 2], [0, 1], [2, 3])


@pytest.mark.parametrize(
    "text", ["csr 1x1 5x8 even", "csr 1x1 5x8 even even even", "csr 1x1 5 even even", "csr 1x1x1 5x8 even even", "csr"]
)
def test_what_describes_no_layout(text):
    with pytest.raises(FormatError, match="describes no layout"):
        Layout.read(text)


@pytest.mark.parametrize("place", range(3))
def test_a_layout_takes_pairs(place):
    given = [[1, 1], [5, 8], ["even", "mixed"]]
    assert layout_of("csr", *given) == Layout("csr", (1, 1), (5, 8), ("even", "mixed"))
    given[place] = given[place] + given[place][:1]
    with pytest.raises(FormatError, match="need two entries each"):
        layout_of("csr", *given)


@pytest.mark.parametrize("format", ["CSR", "csc", "coo", "bcsc", "no such"])
def test_only_a_format_by_rows_is_a_layout(format):
    with pytest.raises(FormatError, match="needs one of bitmap, bsr, csr, narrow, nm"):
        _ = Layout(format, (1, 1), (5, 8)).kind


@pytest.mark.parametrize("by_column", [False, True])
@pytest.mark.parametrize("columns", [1, 2, 3, 31, 32, 33, 127, 128, 129, 300])
def test_a_product_of_any_width_and_a_wide_one_lies_as_its_operand(columns, by_column):
    """Each width has its way through torch."""
    random = torch.Generator().manual_seed(columns)
    matrix = torch.randn(7, 11, generator=random) * (torch.rand(7, 11, generator=random) > 0.6)
    dense = torch.randn(columns, 11, generator=random).mT if by_column else torch.randn(11, columns, generator=random)
    values, (pointers, indices), _ = stored_by_rows(formats.CSR.from_dense(matrix))
    out = sparse.compact_product(pointers, indices, values, (7, 11), dense)
    torch.testing.assert_close(out.double(), matrix.double() @ dense.double(), rtol=1e-5, atol=1e-5)
    assert columns < 32 or out.mT.is_contiguous() == by_column


@pytest.mark.parametrize("width", [0, 1, 2, 7, 8, 9])
def test_sampled_products_of_any_depth(width):
    random = torch.Generator().manual_seed(width)
    a, b = torch.randn(5, width, generator=random), torch.randn(8, width, generator=random)
    dense, matrix = _matrix("CSR")
    _, (pointers, indices), layout = stored_by_rows(matrix)
    wanted = (a.double() @ b.double().T)[dense != 0]
    for found in (sparse.compact_sampled(a, b, pointers, indices), sparse.gathered_elements(a, b, pointers, indices),
                  sparse.sampled(a, b, (pointers, indices), layout, torch.float32)):  # fmt: skip
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chunk", [1, 5, 1 << 22])
def test_parts_cover_all_and_hold_what_is_asked(chunk, monkeypatch):
    monkeypatch.setattr(sparse, "CHUNK", chunk)
    assert sparse.in_parts(0, 3, 10) == []
    for count, each, budget in ((1, 3, 1), (10, 3, 7), (10, 0, 7), (10, 100, 7), (9, 3, 9)):
        step = max(max(budget, chunk) // max(each, 1), 1)
        parts = [list(range(count))[part] for part in sparse.in_parts(count, each, budget)]
        assert sum(parts, []) == list(range(count)) and {len(part) for part in parts[:-1]} <= {step}


@pytest.mark.parametrize("format", ["BSR", "CSR"])
def test_products_some_at_a_time_are_those_at_once(format, monkeypatch):
    dense, matrix = _matrix(format)
    values, arrays, layout = stored_by_rows(matrix)
    right, left = torch.randn(8, 3), torch.randn(5, 3)
    at_once = sparse.reference_product(values, arrays, right, layout, False, torch.float32)
    torch.testing.assert_close(at_once, dense @ right)
    sampled = sparse.sampled(left, right, arrays, layout, torch.float32)
    monkeypatch.setattr(sparse, "CHUNK", 1)
    assert torch.equal(sparse.reference_product(values, arrays, right, layout, False, torch.float32), at_once)
    assert torch.equal(sparse.sampled(left, right, arrays, layout, torch.float32), sampled)
    pointers, columns = elements_of(arrays, layout)
    if format == "CSR":
        torch.testing.assert_close(sparse.gathered_elements(left, right, pointers, columns), sampled)
