"""Sums, products, reductions, comparisons and slices of SparseTensors beside dense ones, with gradients and graphs."""

import math
import operator
from collections.abc import Callable

import pytest
import torch
from matrices import LAYOUTS
from torch import Tensor

from sparsecomp import SparseTensor, formats
from sparsecomp.errors import FormatError, PatternError, SparseOperatorError
from sparsecomp.formats import Pattern, bounded_matmul, masked_matmul
from sparsecomp.tensor.index_arrays import IndexArrays
from sparsecomp.tensor.sparse_tensor import view_of

pytestmark = pytest.mark.quick_cases(2)

FORMATS = pytest.mark.parametrize("name", LAYOUTS)
ELEMENTS = pytest.mark.parametrize("name", ["COO", "CSR", "CSC"])
DENSE = torch.linspace(-2, 3, 56, dtype=torch.float64).view(7, 8)


def masked(name: str, seed: int = 0) -> Tensor:
    """Half zeros, an empty row and a full one of negatives, which NM of four in four holds too."""
    generator = torch.Generator().manual_seed(seed)
    dense = torch.randn(7, 8, generator=generator, dtype=torch.float64)
    dense *= torch.rand(7, 8, generator=generator) < 0.5
    dense[3], dense[5] = -torch.linspace(1, 2, 8), 0
    return dense


def stored(name: str, seed: int = 0) -> tuple[Tensor, Callable[[Tensor], SparseTensor]]:
    """Values, and the tensor of them, whose gradient comes back to them."""
    matrix = getattr(formats, name).from_dense(masked(name, seed), **LAYOUTS[name])
    values, pattern = IndexArrays.of(matrix)

    def make(values: Tensor) -> SparseTensor:
        return view_of(values, pattern.arrays, pattern.format, pattern.layout.written())

    return values.clone().requires_grad_(), make


def plain(found: object) -> Tensor:
    return found.to_dense() if isinstance(found, SparseTensor) else found


ONE: dict[str, Callable[[Tensor], Tensor]] = {
    "plus dense": lambda s: s + DENSE,
    "dense plus a row": lambda s: DENSE[0] + s,
    "plus a number": lambda s: s + 2,
    "from a number": lambda s: 2.0 - s,
    "minus dense": lambda s: torch.sub(s, DENSE, alpha=3),
    "from dense": lambda s: DENSE - s,
    "times dense": lambda s: s * DENSE,
    "times a row": lambda s: DENSE[0] * s,
    "times a column": lambda s: torch.mul(s, DENSE[:, :1]),
    "transposed times a row": lambda s: s.t() * DENSE[:, 0],
    "sum of columns": lambda s: s.sum(0),
    "sum of rows": lambda s: torch.sum(s, dim=(-1,), keepdim=True),
    "sum": lambda s: s.sum(),
    "sum in two dimensions": lambda s: s.sum((0, 1), keepdim=True),
    "sum of a transpose": lambda s: s.t().sum(0),
    "mean of rows": lambda s: s.mean(1),
    "largest of rows": lambda s: torch.amax(s, 1),
    "smallest of columns of a transpose": lambda s: s.mT.amin(0, keepdim=True),
    "largest": lambda s: s.amax(),
    "magnitudes": lambda s: abs(s),
    "rows": lambda s: s[2:6],
    "rows of a sum with itself": lambda s: (s + s * 2)[2:4],
}  # fmt: skip
TWO: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": lambda s, t: s + t,
    "difference": lambda s, t: torch.sub(s, t, alpha=2),
    "elementwise product": lambda s, t: s * t,
    "product": lambda s, t: s @ t.t(),
    "product of transposes": lambda s, t: torch.mm(s.t(), t),
    "one below the other": lambda s, t: torch.cat([s, t]),
    "side by side": lambda s, t: torch.cat((s, t), dim=-1),
}


@pytest.mark.quick_cases(12)
@FORMATS
@pytest.mark.parametrize("what", ONE)
def test_one_is_as_the_dense_one(name, what):
    values, make = stored(name)
    weights = torch.linspace(1, 2, 112, dtype=torch.float64)
    grads = []
    for tensor in (make(values), make(values).to_dense()):
        found = plain(ONE[what](tensor))
        grads.append((found, *torch.autograd.grad(found.flatten() @ weights[: found.numel()], values)))
    (mine, by_mine), (wanted, by_wanted) = grads
    torch.testing.assert_close(mine, wanted)
    counted = values != 0 if "est of" in what else slice(None)  # zeros of a block tie, with more that are not stored
    torch.testing.assert_close(by_mine[counted], by_wanted[counted])


@pytest.mark.quick_cases(8)
@FORMATS
@pytest.mark.parametrize("what", TWO)
def test_two_are_as_the_dense_ones(name, what):
    (one, of_one), (other, of_other) = stored(name), stored("CSR", seed=1)
    operands = of_one(one), of_other(other)
    found, wanted = TWO[what](*operands), TWO[what](*(operand.to_dense() for operand in operands))
    assert isinstance(found, SparseTensor) and found.requires_grad
    torch.testing.assert_close(found.to_dense(), wanted)
    grads = [torch.autograd.grad(plain(out).square().sum(), (one, other)) for out in (found, wanted)]
    if name == "NM":  # a zero in a group is no element
        grads = [(by_one[one != 0], by_other) for by_one, by_other in grads]
    torch.testing.assert_close(*grads)


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize("name", ["CSR", "BSR"])
@pytest.mark.parametrize("what", [*TWO, "softmax", "times dense", "largest of rows"])
def test_gradients_are_those_of_differences(name, what):
    (one, of_one), (other, of_other) = stored(name), stored("CSR", seed=1)
    if what in TWO:
        assert torch.autograd.gradcheck(lambda a, b: plain(TWO[what](of_one(a), of_other(b))), (one, other))
    elif what == "softmax":
        assert torch.autograd.gradcheck(lambda b: torch.sparse.softmax(of_other(b), 0).to_dense(), (other,))
    elif (what, name) != ("largest of rows", "BSR"):  # whose zeros tie
        assert torch.autograd.gradcheck(lambda a: plain(ONE[what](of_one(a))), (one,))


def test_a_dense_factors_gradient_is_summed_where_it_broadcasts():
    values, make = stored("CSR")
    row = DENSE[0].clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda row, values: (make(values) * row).to_dense(), (row, values))


@ELEMENTS
@pytest.mark.parametrize("dim", [0, -1])
def test_softmax_is_torchs_over_what_is_stored(name, dim):
    values, make = stored(name)
    wanted = torch.sparse.softmax(masked(name).to_sparse(), dim % 2).to_dense()
    torch.testing.assert_close(torch.sparse.softmax(make(values), dim).to_dense(), wanted)
    torch.testing.assert_close(torch.sparse.softmax(make(values).t(), 1 - dim % 2).to_dense(), wanted.T)
    half = torch.sparse.softmax(make(values).half(), dim, dtype=torch.float32)
    assert half.dtype is torch.float32


@FORMATS
def test_comparisons_are_patterns_of_where_they_hold(name):
    one, other = (make(values.detach()) for values, make in (stored(name), stored(name, 1)))
    dense, theirs = masked(name), masked(name, 1)
    for compare in (operator.gt, operator.lt, operator.ne):
        for found, wanted in ((compare(one, 0), compare(dense, 0)), (compare(one, other), compare(dense, theirs))):
            assert isinstance(found, Pattern) and torch.equal(found.mask(), wanted)
    assert torch.equal((one >= 0.5).mask(), dense >= 0.5) and torch.equal((-one).lt(-0.5).mask(), dense > 0.5)
    assert torch.equal(one.t().gt(torch.tensor(0.0)).mask(), dense.T > 0)
    assert torch.equal(one == DENSE, dense == DENSE) and torch.equal(one < DENSE[:1], dense < DENSE[:1])
    assert torch.equal((one == dense[3, 3].item()).mask(), dense == dense[3, 3])


def test_a_comparison_that_holds_where_nothing_is_stored_is_refused():
    one = SparseTensor.from_dense(torch.eye(3))
    for wrong in (lambda: one >= 0, lambda: one == one, lambda: one < 1, lambda: one != math.nan):
        with pytest.raises(PatternError, match="wherever nothing is stored"):
            wrong()
    assert (one > math.nan).nnz == 0
    with pytest.raises(PatternError, match="do not belong together"):
        torch.gt(one, SparseTensor.from_dense(torch.ones(2, 3)))


def test_misuses_are_told():
    one = SparseTensor.from_dense(torch.eye(4, 6))
    for told, wrong in (
        ("dim is 2", lambda: one.sum(2)), ("have no product", lambda: one @ one),
        ("matrix 1", lambda: torch.cat([one, one.t()])), ("have no sum", lambda: one + one.t()),
        ("block's", lambda: one.to("bsr", block=(2, 2))[1:3]),
        ("convert to CSR", lambda: torch.sparse.softmax(one.to("bsr", block=(2, 2)), 1)),
    ):  # fmt: skip
        with pytest.raises(FormatError, match=told):
            wrong()


def test_what_has_a_size_known_beforehand_is_in_one_graph():
    values, make = stored("CSC")
    row = DENSE[0]

    def whole(s: Tensor) -> Tensor:
        scaled = torch.sparse.softmax(s * row, 1)
        return scaled @ DENSE.t() + (s + DENSE).sum() * s.amax(1) - abs(s).mean(1) + (s * s).sum(0).mean()

    leaf = make(values.detach()).detach().requires_grad_()
    grads = []
    for call in (whole, torch.compile(whole, backend="aot_eager", fullgraph=True)):
        out = call(leaf)
        grads.append((out.detach(), torch.autograd.grad(out.square().sum(), leaf)[0].to_dense()))
    torch.testing.assert_close(*grads)


def test_a_compiled_result_that_is_sparse_has_its_gradient():
    leaf = stored("CSR")[1](stored("CSR")[0].detach()).detach().requires_grad_()
    found = torch.compile(lambda s: s * DENSE, backend="aot_eager", fullgraph=True)(leaf)
    found.to_dense().sum().backward()
    torch.testing.assert_close(leaf.grad.to_dense(), DENSE * (masked("CSR") != 0))


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("what", TWO)
def test_a_graph_breaks_where_contents_decide_and_is_right(what):
    leaves = [stored("CSR", seed)[1](stored("CSR", seed)[0].detach()).detach().requires_grad_() for seed in (0, 1)]
    call = lambda s, t: (TWO[what](s, t) * 2).sum(1)  # noqa: E731
    grads = []
    for one in (call, torch.compile(call, backend="aot_eager")):
        out = one(*leaves)
        grads.append((out.detach(), *(grad.to_dense() for grad in torch.autograd.grad(out.square().sum(), leaves))))
    torch.testing.assert_close(*grads)
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(call, backend="aot_eager", fullgraph=True)(*leaves)


BOUNDED: dict[str, Callable[[Tensor, Tensor, Callable[[Tensor, Tensor], Tensor]], Tensor]] = {
    "times dense": lambda s, t, product: product(s, t) @ DENSE.t(),
    "dense times": lambda s, t, product: DENSE[:, :7] @ (product(s, t) * 2),
    "of its transpose": lambda s, t, product: product(s, t).t() @ DENSE,
    "made dense": lambda s, t, product: plain(product(s, t)),
    "times a column": lambda s, t, product: plain(product(s, t) * DENSE[:7, :1]),
    "itself": lambda s, t, product: product(s, t),
    "sum of rows": lambda s, t, product: product(s, t).sum(1),
    "rows and a number": lambda s, t, product: product(s, t)[1:4] + 1,
    "cat": lambda s, t, product: torch.cat([product(s, t), t]),
    "in a product": lambda s, t, product: product(product(s, t), t.t().t()).sum(),
}
BROKEN = ("sum of rows", "rows and a number", "cat", "in a product")


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("what", BOUNDED)
def test_products_of_bounded_size_are_the_dense_ones_eager_and_in_one_graph(what):
    torch.compiler.reset()
    a, b = masked("CSR")[:, :7], masked("CSR", 1)
    leaves = [SparseTensor.from_dense(dense).requires_grad_() for dense in (a, b)]
    bounded = lambda s, t: bounded_matmul(s, t, 400)  # noqa: E731
    if what == "in a product":
        leaves[1] = SparseTensor.from_dense(b := masked("CSR", 1)[:, :7].contiguous()).requires_grad_()
    dense = [one.detach().to_dense().requires_grad_() for one in leaves]
    wanted = BOUNDED[what](*dense, torch.matmul)
    expected = torch.autograd.grad(wanted.square().sum(), dense)
    compiled = torch.compile(BOUNDED[what], backend="aot_eager", fullgraph=what not in BROKEN)
    for call in (BOUNDED[what], compiled):
        found = plain(call(*leaves, bounded))
        torch.testing.assert_close(found, wanted)
        for mine, theirs, one in zip(torch.autograd.grad(found.square().sum(), leaves), expected, (a, b), strict=True):
            torch.testing.assert_close(mine.to_dense(), theirs * (one != 0))


@pytest.mark.slow(reason="compiles through Inductor")
def test_a_bounded_product_under_the_backend_and_its_copies():
    one, other = (stored("CSR", seed)[1](stored("CSR", seed)[0].detach()).detach() for seed in (0, 1))
    other = SparseTensor(other.matrix.mT.to(formats.CSR)).requires_grad_()
    call = lambda s, t: (bounded_matmul(s, t, 300) @ DENSE[:, :7]).relu()  # noqa: E731
    torch.testing.assert_close(torch.compile(call, backend="sparsecomp", fullgraph=True)(one, other), call(one, other))
    found = bounded_matmul(one, other, 300)
    for copied in (found.double(), found.detach().clone(), SparseTensor(found.matrix), found.detach().to("cpu")):
        torch.testing.assert_close(copied.to_dense(), one.to_dense() @ other.to_dense())
    assert found.detach().fill_(1).to_dense().sum() == found.matrix.nnz < 300
    for product in (bounded_matmul, masked_matmul):
        with pytest.raises(SparseOperatorError, match="two SparseTensors"):
            product(one, DENSE, 3)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    "backend", ["eager", "aot_eager", pytest.param("sparsecomp", marks=pytest.mark.slow(reason="Inductor"))]
)
def test_a_masked_product_stands_in_a_graph_with_gradients_of_the_operands_patterns(backend, transposed):
    torch.compiler.reset()
    dense = [masked("CSR")[:, :7].contiguous(), masked("CSR", 1)[:7, :].contiguous()]
    places = (torch.rand(7, 8, generator=torch.Generator().manual_seed(4)) < 0.4).double()
    at = SparseTensor.from_dense(places)
    leaves = [SparseTensor.from_dense(one).requires_grad_() for one in dense]
    if transposed:  # stored by columns, as its transpose in CSR is
        leaves[1] = SparseTensor.from_dense(dense[1].mT.contiguous()).requires_grad_()

    def call(s, t):
        found = masked_matmul(s, t.mT if transposed else t, at)
        return found @ DENSE.mT

    found = (call if backend == "eager" else torch.compile(call, backend=backend, fullgraph=True))(*leaves)
    a, b = (one.clone().requires_grad_() for one in dense)
    wanted = ((a @ b) * places) @ DENSE.mT
    torch.testing.assert_close(found, wanted)
    grads = torch.autograd.grad(found.square().sum(), leaves)
    for mine, theirs, one in zip(grads, torch.autograd.grad(wanted.square().sum(), (a, b)), (a, b), strict=True):
        mine = mine.to_dense()
        torch.testing.assert_close(mine.mT if mine.shape != one.shape else mine, theirs * (one != 0))


@pytest.mark.slow(reason="compiles eight graphs")
def test_masked_products_of_other_formats_and_at_patterns():
    a, b = masked("COO"), masked("COO", 1).mT.contiguous()
    for one, at in (
        (SparseTensor.from_dense(a, formats.COO), SparseTensor.from_dense(a @ b)), (SparseTensor.from_dense(a), a @ b),
        (SparseTensor.from_dense(a.mT.contiguous()).mT, SparseTensor.from_dense(a @ b, formats.COO)),
        (SparseTensor.from_dense(a), Pattern.of(a @ b)),
    ):  # fmt: skip
        for other in (SparseTensor.from_dense(b), SparseTensor.from_dense(b, formats.COO)):
            call = lambda s, t, at=at: masked_matmul(s, t, at).to_dense()  # noqa: E731
            torch.testing.assert_close(call(one, other), a @ b)
            torch.compiler.reset()
            torch.testing.assert_close(torch.compile(call, backend="eager")(one, other), a @ b)
