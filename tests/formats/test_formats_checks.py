"""Wrong arrays are refused, each fault with one error that says where it is."""

import itertools
import math

import pytest
import torch

from sparsecomp.errors import FormatError, SparsecompError
from sparsecomp.formats import BCSC, BSR, COO, CSC, CSR, NM


def ints(*numbers: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(numbers, dtype=dtype)


ONES = torch.ones(3)
BLOCKS = torch.ones(2, 2, 2)
EDGE = torch.tensor([[[1.0, 0.0], [0.0, 0.0]]])

# each: what builds it, and what the error must say; the right arrays of each come first, in test_right_arrays_pass
WRONG = {
    "coo row beyond": (
        lambda: COO.from_arrays(ints(0, 1, 2), ints(0, 1, 1), ONES, (2, 2)),
        r"row\[2\] is 2, needs 0 to 1",
    ),
    "coo col below": (
        lambda: COO.from_arrays(ints(0, 1, 1), ints(0, -1, 1), ONES, (2, 2)),
        r"col\[1\] is -1, needs 0 to 1",
    ),
    "coo unsorted": (
        lambda: COO.from_arrays(ints(1, 0, 1), ints(0, 0, 1), ONES, (2, 2)),
        r"ascend.*entry 1 at \(0, 0\) follows \(1, 0\)",
    ),
    "coo repeated": (
        lambda: COO.from_arrays(ints(0, 1, 1), ints(0, 1, 1), ONES, (2, 2)),
        r"each once.*coalesce=True.*entry 2 at \(1, 1\)",
    ),
    "coo lengths": (lambda: COO.from_arrays(ints(0, 1), ints(0, 1, 1), ONES, (2, 2)), "row has 2 entries, needs 3"),
    "triplets beyond": (lambda: COO.from_triplets(ints(1, 9, 0), ints(0, 0, 0), ONES, (2, 2)), r"row\[1\] is 9"),
    "no tensor": (lambda: COO.from_arrays([0], ints(0), torch.ones(1), (1, 1)), "row is a list, needs a torch.Tensor"),
    "sparse values": (
        lambda: COO.from_arrays(ints(0), ints(0), torch.ones(1).to_sparse(), (1, 1)),
        "values has layout torch.sparse_coo",
    ),
    "integer values": (
        lambda: COO.from_arrays(ints(0), ints(0), ints(1), (1, 1)),
        "values has dtype torch.int32, needs float16",
    ),
    "complex values": (
        lambda: CSR.from_dense(torch.ones(2, 2, dtype=torch.complex64)),
        "dense has dtype torch.complex64",
    ),
    "two batches": (
        lambda: COO.from_arrays(ints(0), ints(0), torch.ones(1, 1, 1), (1, 1)),
        r"shape \(1, 1, 1\), needs 1 dim",
    ),
    "float index": (
        lambda: COO.from_arrays(ONES, ONES, ONES, (2, 2)),
        "row has dtype torch.float32, needs torch.int32",
    ),
    "narrow index": (
        lambda: COO.from_arrays(ints(0, dtype=torch.int16), ints(0, dtype=torch.int16), torch.ones(1), (1, 1)),
        "row has dtype torch.int16, needs torch.int32 or torch.int64",
    ),
    "byte index": (
        lambda: CSR.from_arrays(ints(0, 1, dtype=torch.uint8), ints(0, dtype=torch.uint8), torch.ones(1), (1, 1)),
        "crow has dtype torch.uint8, needs torch.int32 or torch.int64",
    ),
    "mixed index": (
        lambda: COO.from_arrays(ints(0), ints(0, dtype=torch.int64), torch.ones(1), (1, 1)),
        "row has dtype torch.int32 and col torch.int64",
    ),
    "flat index": (lambda: COO.from_arrays(ints(0)[None], ints(0), torch.ones(1), (1, 1)), r"row has shape \(1, 1\)"),
    "devices": (
        lambda: COO.from_arrays(ints(0).to("meta"), ints(0), torch.ones(1), (1, 1)),
        "row is on meta, values on cpu: move",
    ),
    "shape of three": (lambda: COO.from_arrays(ints(), ints(), torch.ones(0), (1, 1, 1)), r"shape is \(1, 1, 1\)"),
    "negative shape": (lambda: COO.from_arrays(ints(), ints(), torch.ones(0), (-1, 1)), r"shape is \(-1, 1\)"),
    "real shape": (lambda: COO.from_arrays(ints(), ints(), torch.ones(0), (1.0, 1)), r"shape is \(1.0, 1\)"),
    "crow length": (lambda: CSR.from_arrays(ints(0, 3), ints(0, 1, 1), ONES, (2, 2)), "crow has 2 entries, needs 3"),
    "crow below": (
        lambda: CSR.from_arrays(ints(-1, 1, 3), ints(0, 0, 1), ONES, (2, 2)),
        "crow must not be negative: .* -1",
    ),
    "crow falls": (
        lambda: CSR.from_arrays(ints(0, 2, 1), ints(0, 1, 1), ONES, (2, 2)),
        r"crow\[1\] is 2, crow\[2\] is 1",
    ),
    "crow beyond": (
        lambda: CSR.from_arrays(ints(0, 1, 4), ints(0, 0, 1), ONES, (2, 2)),
        "beyond the 3 entries: its last is 4",
    ),
    "col lengths": (lambda: CSR.from_arrays(ints(0, 1, 2), ints(0, 0), ONES, (2, 2)), "col has 2 entries, needs 3"),
    "col beyond": (lambda: CSR.from_arrays(ints(0, 1, 3), ints(0, 0, 2), ONES, (2, 2)), r"col\[2\] is 2, needs 0 to 1"),
    "col unsorted": (
        lambda: CSR.from_arrays(ints(0, 1, 3), ints(0, 1, 0), ONES, (2, 2)),
        "col must ascend within each row.*coalesce=True.*in row 1 .*0 follows 1",
    ),
    "col repeated": (lambda: CSR.from_arrays(ints(0, 1, 3), ints(0, 1, 1), ONES, (2, 2)), "each once.* 1 follows 1"),
    "ccol length": (lambda: CSC.from_arrays(ints(0, 1, 3), ints(0, 0, 1), ONES, (2, 3)), "ccol has 3 entries, needs 4"),
    "row beyond": (lambda: CSC.from_arrays(ints(0, 1, 3), ints(0, 0, 3), ONES, (3, 2)), r"row\[2\] is 3, needs 0 to 2"),
    "row unsorted": (
        lambda: CSC.from_arrays(ints(0, 1, 3), ints(0, 1, 0), ONES, (2, 2)),
        "row must ascend within each column",
    ),
    "block pointers": (lambda: BSR.from_arrays(ints(0, 2), ints(0, 1), BLOCKS, (3, 3)), "crow has 2 entries, needs 3"),
    "block beyond": (
        lambda: BSR.from_arrays(ints(0, 1, 2), ints(0, 2), BLOCKS, (4, 4)),
        r"col\[1\] is 2, needs 0 to 1",
    ),
    "block repeated": (lambda: BSR.from_arrays(ints(0, 2), ints(1, 1), BLOCKS, (2, 4)), "each once"),
    "block of nothing": (
        lambda: BSR.from_arrays(ints(0, 0), ints(), torch.ones(0, 0, 2), (0, 2)),
        r"blocks of \(0, 2\)",
    ),
    "padding": (
        lambda: BSR.from_arrays(ints(0, 1), ints(0), BLOCKS[:1], (1, 1)),
        r"beyond the shape \(1, 1\) must be 0.*1\.0",
    ),
    "padding NaN": (
        lambda: BCSC.from_arrays(ints(0, 1), ints(0), EDGE * math.nan, (1, 1)),
        r"beyond the shape.*flatten\(\)\[1\] is nan",
    ),
    "block layout": (lambda: BSR.from_dense(torch.eye(2), block=(0, 2)), r"block is \(0, 2\), needs"),
    "no block": (lambda: COO.from_dense(torch.eye(2)).to(BSR), "BSR needs block="),
    "foreign layout": (lambda: CSR.from_dense(torch.eye(2)).to(COO, block=(2, 2)), "COO has no block: leave it out"),
    "n of m": (lambda: NM.from_dense(torch.eye(2), n=3, m=2), "n is 3 and m 2"),
    "m of 17": (lambda: NM.from_dense(torch.eye(2), n=1, m=17), "n is 1 and m 17"),
    "no m": (lambda: NM.from_dense(torch.eye(2), n=1), "NM needs m="),
    "nm indices": (lambda: NM.from_arrays(torch.ones(1, 2), ints(0, 1)[None], (1, 4), 2, 4), "int32, need torch.uint8"),
    "nm list of indices": (
        lambda: NM.from_arrays(torch.ones(1, 2), [[0, 1]], (1, 4), 2, 4),
        "indices is a list, needs a torch.Tensor",
    ),
    "nm devices": (
        lambda: NM.from_arrays(torch.ones(1, 2), torch.zeros(1, 2, dtype=torch.uint8, device="meta"), (1, 4), 2, 4),
        "indices are on meta, values on cpu: move",
    ),
    "nm batch of indices": (
        lambda: NM.from_arrays(torch.ones(1, 1, 2), ints(0, 1, dtype=torch.uint8)[None, None], (1, 4), 2, 4),
        r"indices have shape \(1, 1, 2\), need \(1, 2\)",
    ),
    "nm order": (lambda: nm(1, 1), "ascend in each group, each once: not so in row 0, group 0"),
    "nm range": (lambda: nm(1, 4), "below 4: not so in row 0, group 0"),
    "nm columns": (lambda: nm(0, 3, cols=3), "beyond the 3 columns must be 0: not so in row 0, group 0"),
    "nm shape": (lambda: nm(0, 1, cols=5), r"values have shape \(1, 2\), need \(1, 4\)"),
    "threshold": (lambda: COO.from_dense(torch.eye(2), -1.0), "threshold is -1.0"),
    "threshold NaN": (lambda: COO.from_dense(torch.eye(2), math.nan), "threshold is nan"),
    "flat dense": (lambda: COO.from_dense(torch.ones(3)), r"dense has shape \(3,\), needs 2 dim"),
    "dense of lists": (lambda: COO.from_dense([[1.0]]), "dense is a list"),
    "hybrid": (lambda: COO.from_torch(torch.ones(2, 2, 2).to_sparse(1)), "1 sparse and 2 dense dimensions"),
    "dense block CSR": (
        lambda: CSR.from_torch(torch.ones(2, 2, 2).to_sparse_csr(dense_dim=1)),
        "needs 2 sparse dimensions",
    ),
}


def nm(*index: int, cols: int = 4) -> NM:
    return NM.from_arrays(torch.ones(1, 2), ints(*index, dtype=torch.uint8)[None], (1, cols), 2, 4)


@pytest.mark.parametrize("fault", WRONG)
def test_each_fault_has_its_error(fault) -> None:
    build, message = WRONG[fault]
    with pytest.raises(FormatError, match=message) as caught:
        build()
    assert isinstance(caught.value, SparsecompError) and isinstance(caught.value, ValueError)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_right_arrays_pass_and_are_kept(dtype) -> None:
    pointers, indices = ints(0, 1, 3, dtype=dtype), ints(0, 0, 1, dtype=dtype)
    right = {
        COO: (COO.from_arrays(ints(0, 1, 1, dtype=dtype), indices, ONES, (2, 2)), [[1, 0], [1, 1]]),
        CSR: (CSR.from_arrays(pointers, indices, ONES, (2, 2)), [[1, 0], [1, 1]]),
        CSC: (CSC.from_arrays(pointers, indices, ONES, (2, 2)), [[1, 1], [0, 1]]),
        BSR: (BSR.from_arrays(ints(0, 1, dtype=dtype), ints(0, dtype=dtype), EDGE, (1, 1)), [[1]]),
        BCSC: (BCSC.from_arrays(ints(0, 1, dtype=dtype), ints(0, dtype=dtype), EDGE, (1, 1)), [[1]]),
        NM: (nm(1, 2), [[0, 1, 1, 0]]),
    }
    for kind, (matrix, dense) in right.items():
        assert type(matrix) is kind
        assert matrix.to_dense().tolist() == dense
    assert right[CSR][0].values is ONES and right[CSR][0].arrays["col"] is indices


def test_coalesce_sorts_and_sums_instead() -> None:
    crow, col = ints(0, 3, 4), ints(2, 0, 2, 1)
    values = torch.tensor([1.0, 2.0, 4.0, 8.0])
    matrix = CSR.from_arrays(crow, col, values, (2, 3), coalesce=True)
    matrix.validate()
    assert (matrix.crow.tolist(), matrix.col.tolist()) == ([0, 2, 3], [0, 2, 1])
    assert matrix.values.tolist() == [2.0, 5.0, 8.0]
    assert CSC.from_arrays(crow, col, values, (3, 2), coalesce=True).mT.allclose(matrix)
    blocks = torch.stack([torch.eye(2), torch.ones(2, 2)])
    summed = BSR.from_arrays(ints(0, 2), ints(1, 1), blocks, (2, 4), coalesce=True)
    assert summed.to_dense().tolist() == [[0, 0, 2, 1], [0, 0, 1, 2]]
    with pytest.raises(FormatError, match=r"col\[0\] is 2"):
        CSR.from_arrays(crow, col, values, (2, 2), coalesce=True)


def test_check_false_looks_at_nothing() -> None:
    wrong = CSR.from_arrays(ints(0, 9), ints(7), torch.ones(1), (1, 1), check=False)
    with pytest.raises(FormatError, match="beyond the 1 entries"):
        wrong.validate()
    for fault, row, values in (
        (r"row\[0\] is 5", ints(5), torch.ones(1)),
        ("dtype torch.int16", ints(0, dtype=torch.int16), torch.ones(1)),
        ("row has 2 entries, needs 1", ints(0, 0), torch.ones(1)),
        ("values has dtype torch.int64", ints(0), torch.ones(1).long()),
    ):
        by_hand = COO.from_arrays(row, torch.zeros_like(row), values, (1, 1), check=False)
        with pytest.raises(FormatError, match=fault):
            by_hand.validate()
    on_meta = CSR.from_arrays(
        ints(0, 1).to("meta"), ints(0).to("meta"), torch.ones(1, device="meta"), (1, 1), check=False
    )
    assert on_meta.device.type == "meta"
    assert nm_unchecked().indices.tolist() == [[9, 9]]


def nm_unchecked() -> NM:
    index = ints(9, 9, dtype=torch.uint8)[None]
    return NM.from_arrays(torch.ones(1, 2), index, (1, 4), 2, 4, check=False)


@pytest.mark.parametrize("group", list(itertools.product(range(4), repeat=3)))
def test_groups_of_three_ascend_or_are_refused(group: tuple[int, ...]) -> None:
    arrays = torch.ones(1, 6), torch.tensor([[0, 1, 2, *group]], dtype=torch.uint8)
    if group == tuple(sorted(set(group))):
        assert NM.from_arrays(*arrays, (1, 8), 3, 4).indices.tolist() == [[0, 1, 2, *group]]
    else:
        with pytest.raises(FormatError, match="ascend in each group, each once: not so in row 0, group 1"):
            NM.from_arrays(*arrays, (1, 8), 3, 4)
