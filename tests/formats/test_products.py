"""Matrices multiply and add, eager and compiled: against float64 dense and scipy."""

import operator
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from matrices import of_every_format
from torch import Tensor

from sparsecomp import SparseTensor
from sparsecomp.errors import FormatError, SparseOperatorError
from sparsecomp.formats import BCSC, BITMAP, BSR, COO, CSC, CSR, NARROW, NM, SparseMatrix, stack

pytestmark = pytest.mark.quick_cases(1)

KINDS = of_every_format({
    CSR: {}, CSC: {}, COO: {}, BSR: {"block": (2, 3)}, BCSC: {"block": (3, 2)}, NM: {"n": 2, "m": 4}, NARROW: {},
    BITMAP: {},
})  # fmt: skip
EVERY = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


def dense_of(rows: int = 7, cols: int = 10, seed: int = 0) -> Tensor:
    """Random, 2 of each 4 columns at most, with an empty row."""
    generator = torch.Generator().manual_seed(seed)
    dense = torch.randn(rows, cols, generator=generator, dtype=torch.float64)
    dense[:, 2::4] = dense[:, 3::4] = 0
    dense[rows // 2] = 0
    return dense


def matrix_of(kind: type[SparseMatrix], dense: Tensor) -> SparseMatrix:
    return kind.from_dense(dense, **KINDS[kind])


def close(found: Tensor, wanted: Tensor) -> None:
    assert found.shape == wanted.shape
    torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=1e-5)


def by_operators(matrix, left, right):
    return matrix @ right, left @ matrix


def by_functions(matrix, left, right):
    return torch.matmul(matrix, right), torch.mm(left, matrix), F.linear(right.mT, matrix)


@EVERY
@pytest.mark.parametrize("backend", [None, "eager", "sparsecomp"])
@pytest.mark.parametrize("products", [by_operators, by_functions])
def test_products_are_those_of_the_dense_matrix(kind, backend, products):
    dense = dense_of()
    matrix = matrix_of(kind, dense).to(torch.float32)
    whole = products is by_functions
    run = products if backend is None else torch.compile(products, backend=backend, fullgraph=whole)
    operands = torch.randn(4, 7, requires_grad=True), torch.randn(10, 4, requires_grad=True)
    found = run(matrix, *operands)
    exact = [operand.detach().double().requires_grad_() for operand in operands]
    wanted = products(dense, *exact)
    for one, other in zip(found, wanted, strict=True):
        close(one, other)
    for one, other in zip(
        torch.autograd.grad(sum(one.sin().sum() for one in found), operands),
        torch.autograd.grad(sum(one.sin().sum() for one in wanted), exact),
        strict=True,
    ):
        close(one, other)


def test_the_operator_in_an_unbroken_graph_says_what_to_write():
    """Of a square matrix Dynamo tells S @ x from x @ S in nothing."""
    matrix = CSR.from_dense(dense_of(8, 8))
    for product in (lambda x: matrix @ x, lambda x: x @ matrix):
        with pytest.raises(torch._dynamo.exc.Unsupported, match=r"write torch.matmul, or use SparseTensor"):
            torch.compile(product, backend="eager", fullgraph=True)(torch.eye(8).double())
        found = torch.compile(lambda x, product=product: product(x) + 1, backend="eager")(torch.eye(8).double())
        close(found, dense_of(8, 8) + 1)


@EVERY
def test_every_shape_of_the_dense_operand(kind):
    dense = dense_of()
    matrix = matrix_of(kind, dense)
    for shape in ((10,), (10, 4), (2, 10, 4), (2, 3, 10, 4), (10, 0)):
        x = torch.randn(shape, dtype=torch.float64)
        close(matrix @ x, dense @ x)
    for shape in ((7,), (4, 7), (2, 4, 7), (2, 3, 4, 7), (0, 7)):
        x = torch.randn(shape, dtype=torch.float64)
        close(x @ matrix, x @ dense)
    close(torch.mv(matrix, torch.ones(10).double()), dense.sum(1))  # pyright: ignore[reportArgumentType]


@EVERY
@pytest.mark.parametrize("backend", [None, "sparsecomp"])
def test_a_batch_multiplies_matrix_by_matrix(kind, backend):
    dense = torch.stack([dense_of(), dense_of() * 2, dense_of() - 3 * (dense_of() != 0)])
    batch = stack([matrix_of(kind, one) for one in dense.where(dense != 0, 0)])
    right, left = torch.randn(3, 10, 4).double(), torch.randn(3, 5, 7).double()

    def products(batch, left, right):
        return torch.bmm(batch, right), torch.bmm(left, batch), torch.matmul(batch, right), torch.matmul(left, batch)

    run = products if backend is None else torch.compile(products, backend=backend, fullgraph=True)
    for one, other in zip(run(batch, left, right), products(dense, left, right), strict=True):
        close(one, other)
    for x in (right[0], right[0, :, 0]):
        close(batch @ x, dense @ x)
    for x in (left[0], left[0, 0]):
        close(x @ batch, x @ dense)


LEADING = ((), (3,), (1,), (5, 3), (5, 1), (0, 3), (2, 1, 3), (2,), (3, 2))
"""Axes before a dense operand's last two; the last two cases fit no batch of 3."""


def outcome(product, *operands):
    """The product; or what kind of error it is, which is one of ours for a matrix."""
    try:
        return product(*operands)
    except (RuntimeError, FormatError) as error:
        return type(error)


def operands_of(kind, batch):
    """A matrix, or several, and its dense form: leaves of their gradients, with the places that are stored."""
    dense = torch.stack([dense_of() * (number + 1) for number in range(batch or 1)])
    matrix = stack([matrix_of(kind, one) for one in dense])
    matrix = matrix if batch else matrix.unbatch()[0]
    values, whole = matrix.values.clone().requires_grad_(), (dense if batch else dense[0]).requires_grad_()
    stored = matrix.with_values(torch.ones_like(values)).to_dense() != 0
    return matrix.with_values(values), values, whole, stored


@EVERY
@pytest.mark.parametrize("batch", [None, 1, 3])
def test_batches_broadcast_as_in_torch(kind, batch):
    matrix, values, whole, stored = operands_of(kind, batch)
    for leading in LEADING:
        for shape, product in (((10, 4), operator.matmul), ((4, 7), lambda s, x: x @ s)):
            x, exact = (torch.randn(*leading, *shape, dtype=torch.float64) for _ in range(2))
            exact.copy_(x)
            found = outcome(product, matrix, x.requires_grad_())
            wanted = outcome(product, whole, exact.requires_grad_())
            if wanted is RuntimeError:
                assert found is FormatError and batch == 3 and leading[-1] == 2
                continue
            close(found, wanted)
            by_values, by_x = torch.autograd.grad(found.sin().sum(), (values, x))
            by_whole, by_exact = torch.autograd.grad(wanted.sin().sum(), (whole, exact))
            close(by_x, by_exact)
            close(matrix.with_values(by_values).to_dense(), by_whole * stored)


@pytest.mark.slow_cases(8)
@pytest.mark.parametrize("batch", [3, None])
@pytest.mark.parametrize(("backend", "kind"), [*(("aot_eager", kind) for kind in KINDS), ("sparsecomp", CSR)])
def test_batches_broadcast_in_compiled_code(kind, batch, backend):
    matrix, values, whole, stored = operands_of(kind, batch)

    def products(matrix, right, left):
        found = [torch.matmul(matrix, x) for x in right] + [torch.matmul(x, matrix) for x in left]
        return torch.stack([one.square().sum() for one in found])

    right, left = ([torch.randn(*leading, *shape, dtype=torch.float64).requires_grad_() for leading in LEADING[:5]]
                   for shape in ((10, 4), (4, 7)))  # fmt: skip
    found = torch.compile(products, backend=backend, fullgraph=True)(matrix, right, left)
    wanted = products(whole, right, left)
    close(found, wanted)
    by_values, *by_many = torch.autograd.grad(found.sum(), (values, *right, *left))
    by_whole, *by_exact = torch.autograd.grad(wanted.sum(), (whole, *right, *left))
    for one, other in zip(by_many, by_exact, strict=True):
        close(one, other)
    close(matrix.with_values(by_values).to_dense(), by_whole * stored)


@EVERY
def test_what_torch_refuses_of_its_stricter_products(kind):
    matrix, tensor = matrix_of(kind, dense_of()), SparseTensor(matrix_of(kind, dense_of()))
    batch = stack([matrix, matrix])
    for one, dense in ((matrix, dense_of()), (tensor, dense_of()), (batch, torch.stack([dense_of()] * 2))):
        for product in (torch.mm, torch.mv, torch.bmm, lambda s, x: F.linear(x.mT if x.dim() > 1 else x, s)):
            for shape in ((10,), (10, 4), (2, 10, 4), (1, 10, 4), (3, 10, 4), ()):
                if product is torch.bmm and one is tensor:
                    continue
                x = torch.ones(shape).double()
                found, wanted = outcome(product, one, x), outcome(product, dense, x)
                if isinstance(wanted, Tensor):
                    close(found, wanted)
                else:
                    assert found is FormatError or found is SparseOperatorError, (product, shape)


@EVERY
def test_gradients_reach_the_values(kind):
    dense = dense_of()
    matrix = matrix_of(kind, dense)
    values = matrix.values.clone().requires_grad_()
    x = torch.randn(10, 4, dtype=torch.float64)
    (matrix.with_values(values) @ x).sin().sum().backward()
    whole = dense.clone().requires_grad_()
    (whole @ x).sin().sum().backward()
    assert values.grad is not None and whole.grad is not None
    found = matrix.with_values(values.grad).to_dense()
    close(found, whole.grad * (matrix.with_values(torch.ones_like(values)).to_dense() != 0))


@EVERY
def test_sums_are_scipys(kind):
    one, other = dense_of(seed=1), dense_of(seed=2)
    left, right = matrix_of(kind, one), CSR.from_dense(other)
    for combine in (operator.add, operator.sub):
        found = combine(left, right)
        wanted = combine(left.to(CSR).to_scipy(), right.to_scipy())
        assert type(found) is kind and np.array_equal(found.to(CSR).to_scipy().todense(), wanted.todense())
    assert torch.equal((-left / 2).to_dense(), -one / 2)
    assert torch.equal(left - 1.0, one - 1) and torch.equal(1.0 - left, 1 - one)
    assert torch.equal(torch.ones(10) - left, 1 - one) and torch.equal(torch.mul(other, left).to_dense(), other * one)
    batch = stack([left, left * 2])
    assert torch.equal((batch + right).to_dense(), torch.stack([one + other, 2 * one + other]))
    assert torch.equal((left + batch).to_dense(), torch.stack([2 * one, 3 * one]))


@EVERY
def test_rows_are_sliced(kind):
    dense = dense_of(12, 10)
    matrix = matrix_of(kind, dense)
    assert len(matrix) == 12 and torch.equal(matrix.T.to_dense(), dense.T)
    close(matrix.T @ torch.ones(12).double(), dense.sum(0))
    for rows in (slice(6), slice(6, None), slice(-6, -2), slice(4, 2), slice(2, 100), slice(None)):
        part = matrix[rows]
        assert type(part) is kind and torch.equal(part.to_dense(), dense[rows])
        close(part @ torch.ones(10).double(), dense[rows].sum(1))
    for index in (0, slice(0, 4, 2), [1, 2], torch.tensor([1]), (slice(2), slice(3))):
        with pytest.raises(SparseOperatorError, match="slice of rows"):
            _ = matrix[index]  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError):
        iter(matrix)  # pyright: ignore[reportCallIssue, reportArgumentType]


@EVERY
@pytest.mark.parametrize("of", [lambda matrix: matrix, SparseTensor], ids=["matrix", "tensor"])
def test_to_takes_what_torch_takes_or_a_format(kind, of):
    matrix = of(matrix_of(kind, dense_of()))
    for args, kwargs in (
        ((), {}), (("cpu",), {}), ((torch.float64,), {}), ((torch.device("cpu"),), {}), ((dense_of(),), {}),
        ((matrix,), {}), ((), {"device": "cpu", "dtype": torch.float64}), (("cpu", torch.float64, True), {}),
        ((torch.float64,), {"non_blocking": True}),
    ):  # fmt: skip
        assert matrix.to(*args, **kwargs) is matrix
    half = CSR.from_dense(torch.ones(1, 1).half())
    for args, kwargs in (
        ((torch.float16,), {}), (("cpu", torch.float16), {}), ((half,), {}), ((SparseTensor(half),), {}),
        ((torch.ones(2).half(),), {}), ((None, torch.float16), {}), ((), {"dtype": torch.float16, "device": "cpu"}),
        ((torch.device("cpu"),), {"dtype": torch.float16}),
    ):  # fmt: skip
        found = matrix.to(*args, **kwargs)
        assert type(found) is type(matrix) and found.dtype is torch.float16
        assert torch.equal(found.to_dense(), dense_of().half())
    copied = matrix.to("cpu", copy=True)
    assert copied is not matrix and torch.equal(copied.to_dense(), dense_of())
    moved = matrix.to("meta", torch.float16)
    assert moved.device.type == "meta" and moved.dtype is torch.float16
    assert matrix.to("csr").to_dense().equal(dense_of())
    for target in ("bsr", BSR):
        blocks = matrix.to(target, block=(2, 2))
        assert torch.equal(blocks.to_dense(), dense_of()) and "BSR" in repr(blocks)
    for wrong in ("csx", 3.5, None, [], object()):
        with pytest.raises(FormatError, match="no format"):
            matrix.to(wrong)
    with pytest.raises(FormatError, match="name them"):
        matrix.to("bsr", (2, 2))
    with pytest.raises(FormatError, match="no format"):
        matrix.to(device="csx")


@EVERY
def test_a_matrix_goes_to_no_other_dtype(kind):
    matrix = matrix_of(kind, dense_of())
    assert matrix.to(kind) is matrix and type(matrix.to("csr")) is CSR
    for args, kwargs, message in (((torch.int32,), {}, "int32"), (("cpu",), {"block": (2, 2)}, "neither for a format")):
        with pytest.raises(FormatError, match=message):
            matrix.to(*args, **kwargs)


def test_what_is_stored_is_what_scipy_stores():
    matrix = CSR.from_dense(dense_of(40, 50))
    theirs = matrix.to_scipy()
    stored = theirs.data.nbytes + theirs.indices.nbytes + theirs.indptr.nbytes
    assert matrix.nbytes == stored == SparseTensor(matrix).nbytes == SparseTensor(matrix).t().nbytes
    assert matrix[10:20].nbytes < stored / 2


@EVERY
def test_what_is_not_supported_says_what_to_do(kind):
    matrix = matrix_of(kind, dense_of())
    for call in (
        lambda: matrix @ 2.0, lambda: torch.exp(matrix),
        lambda: torch.cat([matrix, matrix]), lambda: torch.mul(matrix, 2, out=torch.ones(1)),
    ):  # fmt: skip
        with pytest.raises(SparseOperatorError, match=r"to_dense\(\)"):
            call()
    for call in (
        lambda: matrix @ torch.ones(7), lambda: torch.ones(10) @ matrix, lambda: matrix @ torch.ones(9, 10),
        lambda: matrix @ torch.tensor(1.0), lambda: torch.bmm(matrix, torch.ones(10, 2)), lambda: matrix + matrix.mT,
        lambda: matrix @ torch.ones(10), lambda: matrix + matrix.to("meta"),
    ):  # fmt: skip
        with pytest.raises(FormatError):
            call()


@pytest.mark.slow(reason="starts processes")
def test_operators_load_with_the_first_product():
    code = """
import sys, torch
from sparsecomp.formats import CSR
matrix = CSR.from_dense(torch.eye(3))
before = "sparsecomp.ops" in sys.modules
print(before, (torch.ones(3) @ matrix).tolist())
"""
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert found.strip() == "False [1.0, 1.0, 1.0]"


@EVERY
@pytest.mark.slow_cases(8)
@pytest.mark.parametrize("backend", [None, "sparsecomp"])
def test_a_tensor_times_a_dense_one_and_its_sum(kind, backend):
    dense, factor = dense_of(), torch.randn(7, 10, dtype=torch.float64)
    stored = SparseTensor(matrix_of(kind, torch.ones_like(dense).where(dense != 0, 0))).to_dense()
    sparse, factors = SparseTensor(matrix_of(kind, dense), requires_grad=True), factor.clone().requires_grad_()

    def combine(sparse, factor):
        return ((sparse * factor) @ factor.mT).sum() + (factor[0] * sparse * 2).sum()

    run = combine if backend is None else torch.compile(combine, backend=backend, fullgraph=True)
    whole, exact = dense.clone().requires_grad_(), factor.clone().requires_grad_()
    wanted = combine(whole, exact)
    wanted.backward()
    found = run(sparse, factors)
    found.backward()
    close(found, wanted)
    assert sparse.grad is not None and whole.grad is not None and factors.grad is not None and exact.grad is not None
    close(sparse.grad.to_dense() * stored, whole.grad * stored)
    close(factors.grad, exact.grad)


def test_a_tensor_changes_its_format_and_gives_its_rows():
    dense = dense_of()
    sparse = SparseTensor(CSR.from_dense(dense))
    for found in (sparse.to("bsr", block=2), sparse.to(BSR, block=(2, 2))):
        assert found.format == "BSR" and torch.equal(found.to_dense(), dense)
    assert sparse.to("cpu") is sparse and sparse.to(torch.float16).dtype is torch.float16
    assert len(sparse) == 7 and torch.equal(sparse[2:4].to_dense(), dense[2:4])
    trained = SparseTensor(CSR.from_dense(dense), requires_grad=True)
    whole = torch.ones(2, 7, 10)
    for call in (lambda: trained.to("csc"), lambda: sparse[0], lambda: sparse * whole):
        with pytest.raises(SparseOperatorError, match=r"detach\(\)|to_dense\(\)"):
            call()


@pytest.mark.parametrize("other", [3, torch.tensor(3.0), torch.full((1, 2), 3)], ids=["number", "0-dim", "integers"])
def test_a_quotient_is_torchs_own(other):
    for dense in (torch.tensor([[1e-5, 0.0], [0.0, 2.0]]).half(), torch.eye(2).double() / 7):
        found = CSR.from_dense(dense) / other
        assert found.dtype == (dense / other).dtype and torch.equal(found.to_dense(), dense / other)


@pytest.mark.parametrize("call", [
    lambda s, x: s + x, lambda s, x: x + s, lambda s, x: x - s, lambda s, x: s - x,
    lambda s, x: (x * s).to_dense(), lambda s, x: (s * x).to_dense(),
])  # fmt: skip
def test_sums_and_products_in_compiled_code(call):
    matrix, x = CSR.from_dense(torch.eye(4)), torch.rand(4, 4, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(torch.compile(lambda x: call(matrix, x), backend="eager")(x), call(matrix, x))
