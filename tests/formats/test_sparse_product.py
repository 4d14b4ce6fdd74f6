"""Products of two sparse matrices beside dense ones and scipy's, with gradients, on made and on real matrices."""

import gzip

import pytest
import torch
from matrices import FOLDER

from sparsecomp import SparseTensor
from sparsecomp.errors import FormatError, PatternError, SparseOperatorError
from sparsecomp.formats import BSR, COO, CSC, CSR, NM, Pattern, bounded_matmul, dots, masked_matmul

pytestmark = pytest.mark.quick_cases(3)

ELEMENTS = pytest.mark.parametrize("kind", [COO, CSR, CSC], ids=lambda kind: kind.__name__)
GRAPHS = ["bcsstk13.mtx.gz", "ca-CondMat.mtx.gz", "p2p-Gnutella31.mtx.gz"]


def dense_of(rows: int, cols: int, density: float = 0.3, seed: int = 0, dtype=torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    kept = torch.rand(rows, cols, generator=generator) < density
    return (torch.randn(rows, cols, generator=generator, dtype=torch.float64) * kept).to(dtype)


@ELEMENTS
@pytest.mark.parametrize("other", [COO, CSR, CSC, BSR], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("sizes", [(5, 7, 6), (1, 9, 1), (4, 1, 4), (0, 3, 2), (3, 0, 2), (3, 2, 0)], ids=str)
def test_the_product_is_the_dense_one(kind, other, sizes):
    a, b = dense_of(*sizes[:2]), dense_of(*sizes[1:], seed=1)
    found = kind.from_dense(a) @ other.from_dense(b, **({"block": (2, 2)} if other is BSR else {}))
    assert type(found) is kind and found.dtype is torch.float64
    found.validate()
    torch.testing.assert_close(found.to_dense(), a @ b)
    torch.testing.assert_close(torch.matmul(kind.from_dense(a), CSR.from_dense(b)).to_dense(), a @ b)
    if other is not BSR:  # every place that a product of stored elements reaches, and no other
        assert found.nnz == ((a != 0).double() @ (b != 0).double()).count_nonzero()


def test_a_list_of_edges_multiplies_by_its_columns():
    """Arrays that are columns of one tensor, of which torch's own product reads what lies between them."""
    dense = dense_of(30, 30)
    edges, stored = dense.nonzero().int().contiguous(), dense[dense != 0]
    weights = torch.stack([stored, torch.full_like(stored, 7)], 1)
    graph = COO.from_arrays(edges[:, 0], edges[:, 1], weights[:, 0], (30, 30))
    assert graph.row.stride() == graph.col.stride() == graph.values.stride() == (2,)
    for found in (graph @ graph, graph.to(CSR) @ graph, graph @ CSR.from_dense(dense)):
        found.validate()
        torch.testing.assert_close(found.to_dense(), dense @ dense)


def test_stored_zeros_and_cancelled_sums_are_stored():
    one = CSR.from_arrays(torch.tensor([0, 2]), torch.tensor([0, 1]), torch.tensor([1.0, 1.0]), (1, 2))
    other = CSR.from_dense(torch.tensor([[2.0], [-2.0]]))
    found = one @ other
    assert found.nnz == 1 and found.to_dense().tolist() == [[0]]


def test_blocks_and_slices_multiply_too():
    a, b = dense_of(6, 8), dense_of(8, 4, seed=1)
    blocks = BSR.from_dense(a, block=(2, 2)) @ BSR.from_dense(b, block=(2, 2))
    assert isinstance(blocks, BSR) and blocks.block == (2, 2)
    torch.testing.assert_close(blocks.to_dense(), a @ b)
    torch.testing.assert_close((CSR.from_dense(a)[2:5] @ CSR.from_dense(b)).to_dense(), a[2:5] @ b)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_sums_of_halves_are_float32(dtype):
    a, b = dense_of(40, 500, dtype=dtype), dense_of(500, 30, seed=1, dtype=dtype)
    found = (CSR.from_dense(a) @ CSR.from_dense(b)).to_dense()
    expected = (a.double() @ b.double()).to(dtype)
    assert found.dtype is dtype
    torch.testing.assert_close(found, expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.quick_cases(1)
@ELEMENTS
def test_first_and_second_gradients(kind):
    a, b = kind.from_dense(dense_of(5, 6)), CSR.from_dense(dense_of(6, 4, seed=1))

    def product(values: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        return (a.with_values(values) @ b.with_values(others)).to_dense()

    inputs = (a.values.clone().requires_grad_(), b.values.clone().requires_grad_())
    assert torch.autograd.gradcheck(product, inputs)
    assert torch.autograd.gradgradcheck(product, inputs)


def test_a_gradient_for_one_of_two_and_for_empty_operands():
    a, b = CSR.from_dense(dense_of(5, 6)), CSR.from_dense(torch.zeros(6, 4, dtype=torch.float64))
    values = a.values.clone().requires_grad_()
    (a.with_values(values) @ b).to_dense().sum().backward()
    assert values.grad.tolist() == [0.0] * values.numel()


def test_a_compiled_function_breaks_its_graph_for_a_product():
    matrix, x = CSR.from_dense(dense_of(6, 6)), dense_of(6, 3)
    for product in (
        lambda x: masked_matmul(matrix, matrix, Pattern.of(matrix)).mT @ x, lambda x: (matrix @ matrix) @ x,
        lambda x: torch.matmul(matrix, matrix) @ x,
    ):  # fmt: skip
        torch._dynamo.reset()
        torch.testing.assert_close(torch.compile(product, backend="eager")(x), product(x))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(product, backend="eager", fullgraph=True)(x)


def test_what_has_no_product():
    a = CSR.from_dense(torch.ones(2, 3))
    batch, other_batch = CSR.from_dense(torch.ones(2, 2, 3)), CSR.from_dense(torch.ones(3, 3, 3))
    for one, other in ((a, a), (a, a.mT.to(torch.float64)), (batch, other_batch)):
        with pytest.raises(FormatError, match="have no product"):
            one @ other
        with pytest.raises(FormatError, match="have no product"):
            masked_matmul(one, other, torch.ones(2, other.shape[1]))
    with pytest.raises(FormatError, match="does not fit a product"):
        masked_matmul(a, a.mT, Pattern.of(torch.eye(3)))
    with pytest.raises(PatternError, match="has no pattern"):
        masked_matmul(a, a.mT, None)
    with pytest.raises(SparseOperatorError, match="two SparseTensors"):
        masked_matmul(SparseTensor(a), torch.ones(3, 2), torch.eye(2))
    with pytest.raises(FormatError):
        NM.from_dense(torch.eye(4), n=1, m=4) @ NM.from_dense(torch.ones(4, 4), n=4, m=4)  # rows of four, not of one
    with pytest.raises(SparseOperatorError, match="to_dense"):
        a @ torch.eye(3).to_sparse()


def real(name: str) -> CSR:
    scipy_io = pytest.importorskip("scipy.io", reason="scipy reads the files")
    if not (FOLDER / name).exists():
        pytest.skip(f"no real matrices: set SPARSECOMP_TEST_DATA ({FOLDER / name} is not there)")
    with gzip.open(FOLDER / name) as file:
        return CSR.from_scipy(scipy_io.mmread(file).astype("float64"))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", GRAPHS)
def test_squares_of_real_matrices_are_scipys(name):
    matrix = real(name)
    theirs = matrix.to_scipy() @ matrix.to_scipy()
    assert (matrix @ matrix).allclose(CSR.from_scipy(theirs), rtol=1e-12)


def test_the_triangles_of_a_real_graph_are_the_published_number():
    graph = real("ca-CondMat.mtx.gz")
    row, col = graph.to(COO).row, graph.to(COO).col
    edges = COO.from_triplets(row[row != col], col[row != col], torch.ones(int((row != col).sum())), graph.shape).to(
        CSR
    )
    # each triangle is six closed walks of three steps; 173,361 stands in the Stanford Large Network Dataset Collection
    assert (edges * (edges @ edges)).sum() / 6 == masked_matmul(edges, edges, edges).sum() / 6 == 173_361
    # and one of edges from low to high numbers
    upper = COO.from_triplets(row[row < col], col[row < col], torch.ones(int((row < col).sum())), graph.shape)
    assert masked_matmul(upper, upper, upper).sum() == 173_361


@ELEMENTS
@pytest.mark.parametrize("other", [COO, CSR, CSC, BSR], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("sizes", [(5, 7, 6), (1, 9, 1), (9, 1, 4), (0, 3, 2), (3, 0, 2), (3, 2, 0)], ids=str)
def test_a_masked_product_is_the_dense_one_where_the_pattern_says(kind, other, sizes, monkeypatch):
    monkeypatch.setitem(dots.AT_ONCE, "cpu", 3)
    a, b = dense_of(*sizes[:2]), dense_of(*sizes[1:], seed=1)
    mask = dense_of(sizes[0], sizes[2], seed=2) != 0
    found = masked_matmul(
        kind.from_dense(a), other.from_dense(b, **({"block": (2, 2)} if other is BSR else {})), mask.double()
    )
    assert type(found) is kind and found.nnz == mask.sum()
    found.validate()
    torch.testing.assert_close(found.to_dense(), (a @ b) * mask)


@pytest.mark.parametrize("name", GRAPHS)
def test_a_masked_square_of_a_real_matrix_is_scipys(name):
    matrix = real(name)
    theirs = matrix.to_scipy() @ matrix.to_scipy()
    found = masked_matmul(matrix, matrix, matrix)
    pattern = matrix.with_values(torch.ones_like(matrix.values)).to_scipy()
    assert found.nnz == matrix.nnz and found.allclose(CSR.from_scipy(theirs.multiply(pattern).tocsr()), rtol=1e-10)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("batch", [(), (3,)], ids=str)
def test_gradients_of_a_masked_product(batch):
    a, b = CSR.from_dense(dense_of(5, 6)), CSC.from_dense(dense_of(6, 4, seed=1))
    at = Pattern.of(dense_of(5, 4, density=0.6, seed=2))

    def product(values: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        return masked_matmul(a.with_values(values), b.with_values(others), at).values

    inputs = (dense_of(*batch, a.nnz, density=1) if batch else a.values.clone(), b.values.clone())
    inputs = tuple(values.requires_grad_() for values in inputs)
    assert torch.autograd.gradcheck(product, inputs) and torch.autograd.gradgradcheck(product, inputs)


def test_a_masked_product_of_tensors_and_of_infinities():
    a, b, mask = dense_of(5, 6), dense_of(6, 4, seed=1), dense_of(5, 4, density=0.6, seed=2)
    leaves = [SparseTensor.from_dense(dense).requires_grad_() for dense in (a, b)]
    found = masked_matmul(*leaves, SparseTensor.from_dense(mask))
    torch.testing.assert_close(found.to_dense(), (a @ b) * (mask != 0))
    found.to_dense().sum().backward()
    kept = (mask != 0).double()
    torch.testing.assert_close(leaves[0].grad.to_dense(), (kept @ b.T) * (a != 0))
    torch.testing.assert_close(leaves[1].grad.to_dense(), (a.T @ kept) * (b != 0))
    endless, one = CSR.from_dense(torch.tensor([[torch.inf, 0.0]])), CSR.from_dense(torch.tensor([[0.0], [1.0]]))
    assert masked_matmul(endless, one, torch.ones(1, 1)).values.tolist() == [0]  # they meet nowhere


@pytest.mark.parametrize("kind", [COO, CSR, CSC, BSR], ids=lambda kind: kind.__name__)
def test_a_batch_times_a_batch_of_other_patterns(kind):
    layout = {"block": (2, 2)} if kind is BSR else {}
    a, b = (torch.stack([dense_of(*size, seed=seed) for seed in (3, 4)]) for size in ((4, 6), (6, 5)))
    one, other = kind.from_dense(a, **layout), CSR.from_dense(b)
    one, other = (matrix.with_values(matrix.values.requires_grad_()) for matrix in (one, other))
    for found, wanted in (
        (one @ other, a @ b), (torch.bmm(one, other), a @ b), (one.unbatch()[0] @ other, a[0] @ b),
        (one @ other.unbatch()[1], a @ b[1]),
        (masked_matmul(one, other, torch.ones(4, 5)), a @ b),
    ):  # fmt: skip
        assert type(found) is kind and found.batch == 2
        torch.testing.assert_close(found.to_dense(), wanted)
    (mine,) = torch.autograd.grad((one @ other).to_dense().sum(), other.values)
    torch.testing.assert_close(other.with_values(mine).to_dense(), a.sum(1)[:, :, None] * (b != 0).any(0))
    torch.testing.assert_close(one.with_values(one.values[1:]).to_dense(), a[1:])  # a slice of a batch
    with pytest.raises(FormatError, match="bmm takes"):
        torch.bmm(one, other.unbatch()[0])


def pairs(a: torch.Tensor, b: torch.Tensor) -> int:
    """Pairs of elements of a and b that meet."""
    return int(((a != 0).double() @ (b != 0).double()).sum())


@pytest.mark.parametrize("kind", [COO, CSR], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("sizes", [(5, 7, 6), (1, 9, 1), (4, 1, 4), (0, 3, 2), (3, 0, 2), (3, 2, 0)], ids=str)
@pytest.mark.parametrize("spare", [0, 5])
def test_a_product_of_bounded_size_is_the_dense_one(kind, sizes, spare):
    a, b = dense_of(*sizes[:2]), dense_of(*sizes[1:], seed=1)
    found = bounded_matmul(kind.from_dense(a), CSR.from_dense(b), max(pairs(a, b), 1) + spare)
    found.validate()
    assert found.values.numel() == max(pairs(a, b), 1) + spare
    torch.testing.assert_close(found.to_dense(), a @ b)
    assert found.nnz == (kind.from_dense(a) @ CSR.from_dense(b)).nnz
    torch.testing.assert_close(found @ b.T, a @ b @ b.T)


def test_a_bounded_product_reads_nothing_outside_of_the_pointers_and_tells_of_too_little_room():
    a, b = dense_of(8, 7), dense_of(7, 6, seed=1)
    sliced, whole = CSR.from_dense(a)[2:5], CSR.from_dense(b)
    needed = pairs(a[2:5], b)
    sliced.values[: int(sliced.crow[0])] = torch.nan
    torch.testing.assert_close(bounded_matmul(sliced, whole, needed).to_dense(), a[2:5] @ b)
    torch.testing.assert_close(
        bounded_matmul(whole.mT.to(CSR), bounded_matmul(CSR.from_dense(a.T), CSR.from_dense(a), 400).mT.to(CSR), 900)
        .to_dense(), b.T @ (a.T @ a)
    )  # fmt: skip
    assert bounded_matmul(sliced, whole, needed - 1).values.isnan().all()
    for wrong in (0, 2.0, True, None):
        with pytest.raises(FormatError, match="capacity is"):
            bounded_matmul(sliced, whole, wrong)
    for one in (CSC.from_dense(a), CSR.from_dense(torch.stack([a, a]))):
        with pytest.raises(FormatError, match="takes CSR or COO"):
            bounded_matmul(one, whole, 9)
    with pytest.raises(FormatError, match="have no product"):
        bounded_matmul(whole, whole, 9)
    half = bounded_matmul(CSR.from_dense(dense_of(4, 500).half()), CSR.from_dense(dense_of(500, 4).half()), 800)
    expected = dense_of(4, 500).half().double() @ dense_of(500, 4).half().double()
    torch.testing.assert_close(half.to_dense(), expected.half(), rtol=2e-3, atol=1e-5)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("backend", ["aot_eager", "sparsecomp"])
def test_a_bounded_product_is_in_one_graph_with_its_gradients(backend):
    torch.compiler.reset()
    a, b = CSR.from_dense(dense_of(5, 6)), CSR.from_dense(dense_of(6, 4, seed=1))
    x = dense_of(4, 3, density=1, seed=2)

    def whole(values: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        found = bounded_matmul(a.with_values(values), b.with_values(others), 40)
        return torch.matmul(found, x).relu()

    grads = []
    for call in (whole, torch.compile(whole, backend=backend, fullgraph=True)):
        inputs = a.values.clone().requires_grad_(), b.values.clone().requires_grad_()
        out = call(*inputs)
        grads.append((out.detach(), *torch.autograd.grad(out.square().sum(), inputs)))
    torch.testing.assert_close(*grads)
    torch.testing.assert_close(grads[0][0], (dense_of(5, 6) @ dense_of(6, 4, seed=1) @ x).relu())
    assert torch.autograd.gradcheck(whole, inputs)


def test_a_galerkin_product_keeps_symmetry():
    matrix = real("bcsstk13.mtx.gz")
    size = matrix.shape[0]
    groups = torch.arange(size) // 3
    prolong = COO.from_triplets(
        torch.arange(size), groups, torch.ones(size, dtype=torch.float64), (size, int(groups[-1]) + 1)
    )
    coarse = prolong.mT.to(CSR) @ matrix @ prolong
    assert coarse.shape == (668, 668) and coarse.allclose(coarse.mT)
    torch.testing.assert_close(coarse.sum(), matrix.sum())  # constants are prolonged to constants


@pytest.mark.parametrize("other", [CSR, CSC], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("sparsecomp", marks=pytest.mark.slow(
    reason="compiles through Inductor"))])  # fmt: skip
def test_a_masked_product_is_in_one_graph_with_its_gradients(backend, other):
    torch.compiler.reset()
    a, b, at = (CSR.from_dense(dense_of(*sizes, seed=seed)) for seed, sizes in enumerate([(5, 6), (6, 7), (5, 7)]))
    b = b.to(other)

    def product(values: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        return masked_matmul(a.with_values(values), b.with_values(others), at).values.sin()

    inputs = [one.values.clone().requires_grad_() for one in (a, b)]
    assert torch.autograd.gradcheck(product, inputs)
    found = torch.compile(product, backend=backend, fullgraph=True)(*inputs)
    dense = [one.to_dense().requires_grad_() for one in (a, b)]
    expected = (dense[0] @ dense[1])[at.to_dense() != 0].sin()
    torch.testing.assert_close(found, expected)
    wanted = torch.autograd.grad(expected.sum(), dense)
    for mine, theirs, one in zip(torch.autograd.grad(found.sum(), inputs), wanted, (a, b), strict=True):
        torch.testing.assert_close(one.with_values(mine).to_dense(), theirs * (one.to_dense() != 0))


def test_places_with_spare_entries_and_rows_of_a_slice():
    a, b = dense_of(6, 7), dense_of(7, 5, seed=1)
    at = bounded_matmul(CSR.from_dense(dense_of(6, 4, seed=2)), CSR.from_dense(dense_of(4, 5, seed=3)), 60)
    found = masked_matmul(CSR.from_dense(a), CSR.from_dense(b), at)
    torch.testing.assert_close(found.to_dense(), (a @ b) * at.to_dense().ne(0))
    assert found.col is at.col and not found.values[int(at.crow[-1]) :].any()
    sliced = masked_matmul(CSR.from_dense(a)[2:5], CSR.from_dense(b), CSR.from_dense(a @ b)[2:5])
    torch.testing.assert_close(sliced.to_dense(), (a @ b)[2:5])
    for wrong in (CSR.from_dense(torch.ones(5, 6)), CSR.from_dense(torch.ones(6, 6))):
        with pytest.raises(FormatError, match="does not fit a product"):
            masked_matmul(CSR.from_dense(a), CSR.from_dense(b), wrong)
