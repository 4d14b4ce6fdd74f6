"""Which of torch's products a CPU runs, how the operands lie there, and the parts that are computed at a time."""

import pytest
import torch
from torch import Tensor

from sparsecomp.reference import sparse
from sparsecomp.reference.sparse import compact_product, compact_sampled, in_parts

S = (torch.rand(9, 11, generator=torch.Generator().manual_seed(0)) < 0.4) * torch.arange(1.0, 100).view(9, 11)


def arrays(dense: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    csr = dense.to_sparse_csr()
    return csr.crow_indices().int(), csr.col_indices().int(), csr.values()


@pytest.fixture
def ways(monkeypatch) -> list[str]:
    """What runs, in order."""
    ran: list[str] = []
    matrix, bags = torch.sparse_compressed_tensor, torch.embedding_bag

    def seen_matrix(*arrays, layout, **options):
        ran.append(str(layout).removeprefix("torch.sparse_"))
        return matrix(*arrays, layout=layout, **options)

    def seen_bags(*args):
        ran.append(f"bags of {args[0].shape[1]}")
        return bags(*args)

    monkeypatch.setattr(torch, "sparse_compressed_tensor", seen_matrix)
    monkeypatch.setattr(torch, "embedding_bag", seen_bags)
    return ran


@pytest.mark.parametrize(
    ("columns", "by_column", "dtype", "expected"),
    [
        (1, True, torch.float32, ["csc"]), (2, True, torch.float32, ["csc"]), (3, True, torch.float32, ["csr"]),
        (2, False, torch.float32, ["csr"]), (2, True, torch.float64, ["csc"]),
        (31, True, torch.float32, ["csr"]), (31, False, torch.float32, ["csr"]),
        (32, True, torch.float32, ["bags of 32"]), (32, False, torch.float32, ["bags of 32"]),
        (32, False, torch.float64, ["csr"]), (128, True, torch.float32, ["bags of 128"]),
        (129, False, torch.float32, ["bags of 128", "bags of 1"]),
        (300, True, torch.float32, ["bags of 128", "bags of 128", "bags of 44"]),
    ],
)  # fmt: skip
def test_the_way_follows_from_the_columns(columns, by_column, dtype, expected, ways):
    dense = torch.arange(11.0 * columns).view(11, columns).to(dtype) % 7
    dense = dense.mT.contiguous().mT if by_column else dense
    pointers, indices, values = arrays(S.to(dtype))
    found = compact_product(pointers, indices, values, (9, 11), dense)
    assert ways == expected
    assert torch.equal(found, S.to(dtype) @ dense) and found.dtype is dtype
    assert found.mT.is_contiguous() if by_column and expected != ["csr"] else found.is_contiguous()


def test_of_nothing_stored_torch_sums_nothing(ways):
    pointers, indices, values = arrays(torch.zeros(9, 11))
    assert compact_product(pointers, indices, values, (9, 11), torch.ones(11, 40)).eq(0).all() and ways == ["csr"]


@pytest.mark.parametrize(("depth", "given"), [(0, None), (1, 1), (2, 8), (7, 8), (8, 8), (9, 16), (16, 16)])
def test_rows_are_padded_to_whole_vectors(depth, given, monkeypatch):
    ran, product = [], torch.sparse.sampled_addmm

    def seen(pattern, a, b, *, beta):
        ran.append((a.shape[1], b.shape[0], beta))
        return product(pattern, a, b, beta=beta)

    monkeypatch.setattr(torch.sparse, "sampled_addmm", seen)
    a, b = torch.arange(9.0 * depth).view(9, depth) % 5, torch.arange(11.0 * depth).view(11, depth) % 3
    pointers, indices, _ = arrays(S)
    found = compact_sampled(a, b, pointers, indices)
    assert torch.equal(found, (a @ b.mT)[S != 0])
    assert ran == ([] if given is None else [(given, given, 0.0)])


@pytest.mark.parametrize(
    ("count", "each", "budget", "chunk", "lengths"),
    [
        (10, 2, 0, 8, [4, 4, 2]), (10, 2, 10, 8, [5, 5]), (10, 100, 10, 8, [1] * 10), (0, 2, 10, 8, []),
        (10, 0, 4, 8, [8, 2]), (7, 1, 100, 8, [7]),
    ],
)  # fmt: skip
def test_parts_hold_the_budget_or_a_chunk(count, each, budget, chunk, lengths, monkeypatch):
    monkeypatch.setattr(sparse, "CHUNK", chunk)
    parts = in_parts(count, each, budget)
    assert [part.stop - part.start for part in parts] == lengths
    assert [place for part in parts for place in range(part.start, part.stop)] == [*range(count)]
