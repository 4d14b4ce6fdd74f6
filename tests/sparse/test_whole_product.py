"""The product of two sparse matrices at every place that it reaches: kernels, operator and graphs, beside float64."""

import importlib
import math
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from compile_kernel import compile_in_subprocess
from kernel_devices import DEVICES, KERNEL_DEVICES, graph_of, interpreted
from matrices import FOLDER, REAL
from rewriting import operators_run
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from bench.sparse.matrices import read
from sparsecomp.formats import CSR, bounded_matmul
from sparsecomp.ops.sparse.whole_product import whole_product

pytestmark = pytest.mark.quick_cases(4)

OP = torch.ops.sparsecomp.whole_product.default
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
TOLERANCE = {F64: 1e-12, F32: 1e-5, F16: 4e-3, BF16: 3e-2}
SIZES = [(7, 9, 8), (6, 40, 70), (2, 150, 33), (3, 1, 60), (33, 6, 1)]


def dense_of(rows: int, cols: int, seed: int, density: float = 0.3) -> torch.Tensor:
    """With an empty row and a full one where there are more; a stored zero is none."""
    generator = torch.Generator().manual_seed(seed)
    kept = torch.rand(rows, cols, generator=generator) < density
    kept[1:2], kept[2:3] = False, True
    return (torch.randn(rows, cols, generator=generator, dtype=F64) + 0.1) * kept


def operand(dense, dtype=F32, index=torch.int32, spare=(0, 0), device="cpu"):
    """Values, pointers and indices, with entries around them that are none."""
    matrix = CSR.from_dense(dense)
    values = F.pad(matrix.values, spare, value=math.nan).to(device, dtype)
    return values, (matrix.crow + spare[0]).to(device, index), F.pad(matrix.col, spare, value=2**30).to(device, index)


def check(found, a, b, dtype, spare=0) -> None:
    """Beside the dense product; stored is every place that a product of stored elements reaches, and no other."""
    values, pointers, indices = (one.cpu() for one in found)
    reached = (a != 0).double() @ (b != 0).double()
    matrix = CSR(pointers, indices, values.double(), (a.shape[0], b.shape[1]))
    matrix.validate()
    assert matrix.nnz == reached.count_nonzero() == values.shape[-1] - spare
    assert not values[..., matrix.nnz :].any()
    whole, tolerance = a.to(dtype).double() @ b.to(dtype).double(), TOLERANCE[dtype]
    torch.testing.assert_close(matrix.to_dense(), whole, rtol=tolerance, atol=tolerance * 10)


@pytest.fixture
def lowered():
    """The launcher."""
    pytest.importorskip("triton", reason="the launcher is of kernels")
    return importlib.import_module("sparsecomp.lowering.sparse.whole_product")


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("kept", [True, False], ids=["a bitmap a row", "a bitmap a program"])
@pytest.mark.parametrize(("dtype", "index"), [(F32, torch.int32), (F16, torch.int64), (BF16, torch.int32),
                                              (F64, torch.int64)])  # fmt: skip
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_kernels_are_the_dense_product(sizes, dtype, index, kept, device, lowered, monkeypatch):
    if not kept:
        monkeypatch.setattr(lowered, "KEPT_WORDS", 0)
        monkeypatch.setattr(lowered, "PROGRAMS", 3)
    a, b = dense_of(*sizes[:2], 1), dense_of(*sizes[1:], 2)
    operands = *operand(a, dtype, index, (3, 2), device), *operand(b, dtype, torch.int32, (1, 4), device)
    found = OP.direct_cuda(*operands, sizes[2], None)
    assert found[0].dtype is dtype and found[1].dtype is found[2].dtype is index
    check(found, a, b, dtype)
    meet = int(((a != 0).double() @ (b != 0).double()).sum())
    room = max(meet, 1) + 5
    check(OP.direct_cuda(*operands, sizes[2], room), a, b, dtype, room - found[0].numel())
    if meet > 1:
        assert OP.direct_cuda(*operands, sizes[2], meet - 1)[0].isnan().all()


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("capacity", [None, 200])
def test_batches_share_patterns_and_the_cpu_agrees(capacity, device):
    a, b = dense_of(7, 9, 1), dense_of(9, 8, 2)
    factors = torch.tensor([1.0, -2.0, 0.5], dtype=F64)[:, None]
    left, right = operand(a, F64, device=device), operand(b, F64, device=device)
    times = factors.to(device)
    for operands in (
        (times * left[0], *left[1:], *right), (*left, times * right[0], *right[1:]),
        (times * left[0], *left[1:], times * right[0], *right[1:]),
    ):  # fmt: skip
        values, *arrays = (one.cpu() for one in OP.direct_cuda(*operands, 8, capacity))
        on_cpu = OP(*(one.cpu() for one in operands), 8, capacity)
        torch.testing.assert_close((values, *arrays), tuple(on_cpu), rtol=1e-12, atol=1e-12)
        both = operands[0].dim() == operands[3].dim() == 2
        for item in values / (factors * factors if both else factors):
            check((item, *arrays), a, b, F64, 0 if capacity is None else capacity - int(arrays[0][-1]))


@pytest.mark.filterwarnings("ignore:invalid value")  # the interpreter multiplies masked lanes too
@pytest.mark.parametrize("device", KERNEL_DEVICES)
def test_zeros_that_are_stored_or_cancel_and_what_is_not_finite_stay_at_their_places(device):
    left = torch.tensor([1.0, 1.0, -0.0, math.inf]), torch.tensor([0, 2, 3, 4]), torch.tensor([0, 1, 2, 1])
    right = torch.tensor([2.0, -2.0, 5.0]), torch.tensor([0, 1, 2, 3]), torch.tensor([0, 0, 1])
    values, pointers, indices = (
        one.cpu() for one in OP.direct_cuda(*(one.to(device) for one in (*left, *right)), 2, None)
    )
    assert pointers.tolist() == [0, 1, 2, 3] and indices.tolist() == [0, 1, 0]
    assert values.tolist() == [0.0, 0.0, -math.inf]  # each meets the elements of one row alone


@interpreted
@pytest.mark.parametrize("capacity", [None, 3])
def test_nothing_stored_and_no_rows(capacity):
    a, b = dense_of(4, 5, 1), dense_of(5, 6, 2)
    for one, other in ((a * 0, b), (a, b * 0), (a[:0], b), (a[:, :0], b[:0]), (a, b[:, :0])):
        found = OP.direct_cuda(*operand(one), *operand(other), other.shape[1], capacity)
        assert found[0].shape == found[2].shape == (capacity or 0,) and not found[0].any()
        assert found[1].tolist() == [0] * (one.shape[0] + 1)


@pytest.mark.parametrize("capacity", [None, 200])
def test_the_operator_is_as_its_schema_says(capacity):
    a, b = dense_of(7, 9, 1), dense_of(9, 8, 2)
    one, other = operand(a, F64), operand(b, F64)
    one[0].requires_grad_(), other[0].requires_grad_()
    torch.library.opcheck(OP, (*one, *other, 8, capacity))
    grads = torch.autograd.grad(whole_product(*one, *other, 8, capacity)[0].square().sum(), (one[0], other[0]))
    dense = a.clone().requires_grad_(), b.clone().requires_grad_()
    wanted = torch.autograd.grad((dense[0] @ dense[1]).square().sum(), dense)
    for found, whole, where in zip(grads, wanted, (a, b), strict=True):
        torch.testing.assert_close(found, whole[where != 0])
    call = lambda x, y: OP(x, *one[1:], y, *other[1:], 8, capacity)[0]  # noqa: E731
    assert torch.autograd.gradcheck(call, (one[0], other[0]))


def test_the_dispatcher_is_passed_by_only_where_it_has_nothing_to_decide(monkeypatch):
    one, other = operand(dense_of(7, 9, 1), F64), operand(dense_of(9, 8, 2), F64)
    operands, past = (*one, *other, 8, 300), []
    direct = OP.direct_cpu
    monkeypatch.setattr(OP, "direct_cpu", lambda *given: past.append(given) or direct(*given))
    wanted = OP(*operands)
    assert not past and all(map(torch.equal, whole_product(*operands), wanted)) and len(past) == 1
    leaf = one[0].clone().requires_grad_()
    assert whole_product(leaf, *operands[1:])[0].requires_grad
    many = torch.func.vmap(lambda values: whole_product(values, *operands[1:])[0])(torch.stack([one[0]] * 2))
    assert torch.equal(many[1], wanted[0])
    seen: list[Any] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    class WatchFunctions(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    for watch in (Watch(), WatchFunctions()):
        seen.clear()
        with watch:
            whole_product(*operands)
        assert OP in seen and len(past) == 1
    assert "sparsecomp::whole_product" in operators_run(whole_product, *operands) and len(past) == 1
    traced = torch.jit.trace(lambda values: whole_product(values, *operands[1:])[0], (one[0],), check_trace=False)
    assert "sparsecomp::whole_product" in str(traced.graph) and len(past) == 1
    with torch.no_grad():
        whole_product(leaf, *operands[1:])
    assert len(past) == 2


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("trained", [True, False])
def test_autocast_leaves_it_alone(trained, dtype, device):
    """It multiplies what it is given, as kernels do: torch has no product of sparse matrices in half precision."""
    a, b = dense_of(7, 9, 1), dense_of(9, 8, 2)
    one, other = operand(a, device=device), operand(b, device=device)
    with torch.autocast(device, dtype):
        found = whole_product(one[0].requires_grad_(trained), *one[1:], *other, 8)
    assert found[0].dtype is F32 and found[0].requires_grad is trained
    check([one.detach() for one in found], a, b, F32)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("sparsecomp", marks=pytest.mark.slow(reason="compiled by Inductor"))]
)
def test_a_graph_holds_a_product_of_bounded_size_and_its_gradients(backend, device):
    a, b, x = dense_of(7, 9, 1), dense_of(9, 8, 2), torch.randn(8, 3, dtype=F64, device=device)
    one, other = operand(a, F64, device=device), operand(b, F64, device=device)

    def product(left, right):
        values, pointers, indices = whole_product(left, *one[1:], right, *other[1:], 8, 300)
        return torch.matmul(CSR(pointers, indices, values.sin(), (7, 8)), x)

    leaves = [values[0].clone().requires_grad_() for values in (one, other)]
    found = torch.compile(product, backend=backend, fullgraph=True)(*leaves)
    dense = [matrix.clone().requires_grad_() for matrix in (a, b)]
    expected = (dense[0] @ dense[1]).sin() @ x.cpu()
    torch.testing.assert_close(found.cpu(), expected)
    grads, wanted = (torch.autograd.grad(out.square().sum(), ins) for out, ins in ((found, leaves), (expected, dense)))
    for mine, theirs, where in zip(grads, wanted, (a, b), strict=True):
        torch.testing.assert_close(mine.cpu(), theirs[where != 0])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("columns", [1800, 70_000])
def test_a_large_product_is_the_same_each_time(columns):
    a, b = dense_of(2500, 1500, 1, 0.02), dense_of(1500, columns, 2, 0.01)
    one, other = (CSR.from_dense(dense.float()).to("cuda") for dense in (a, b))
    found = [one @ other for _ in range(3)]
    check((found[0].values, found[0].crow, found[0].col), a.float().double(), b.float().double(), F32)
    for again in found[1:]:
        assert torch.equal(again.values, found[0].values) and torch.equal(again.col, found[0].col)
    leaf = one.values.clone().requires_grad_()
    torch.cuda.synchronize()
    (mine,) = torch.autograd.grad((one.with_values(leaf) @ other).values.sum(), leaf)
    wanted = b.float().double().sum(1)[one.col.long().cpu()]
    torch.testing.assert_close(mine.cpu().double(), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("real", REAL)
def test_products_of_real_matrices_are_scipys(real, device):
    """With the transpose; graphs, of which long rows are few, and weights of few rows or of nearly none.

    scipy leaves out what cancels, so that it gives the pattern of a product of ones.
    """
    sparse = pytest.importorskip("scipy.sparse", reason="scipy multiplies")
    found = cast(CSR, read(FOLDER / real.file).to(CSR))
    matrix = found.with_values(torch.randn(found.nnz, generator=torch.Generator().manual_seed(0), dtype=F64))
    ones, theirs = found.with_values(torch.ones(found.nnz, dtype=F64)).to_scipy(), matrix.to_scipy()
    reached, wanted = sparse.csr_array(ones @ ones.T), CSR.from_scipy(sparse.csr_array(theirs @ theirs.T))
    reached.sort_indices()
    one, other = matrix.to(device), cast(CSR, matrix.mT.to(CSR)).to(device)
    for product in (one @ other, bounded_matmul(one, other, int(reached.data.sum()) or 1)):
        product = product.to("cpu")
        assert product.crow.tolist() == reached.indptr.tolist()
        assert product.col[: product.nnz].tolist() == reached.indices.tolist()
        assert product.compact().allclose(wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_captured_product_of_bounded_size_follows_its_patterns_and_waits_for_nothing():
    a, b = dense_of(40, 130, 1), dense_of(130, 33, 2)
    one, other = CSR.from_dense(a).to("cuda"), CSR.from_dense(b).to("cuda")
    room = int(((a != 0).double() @ (b != 0).double()).sum())
    graph, found = graph_of(lambda: bounded_matmul(one, other, room))
    torch.cuda.set_sync_debug_mode("error")
    try:
        bounded_matmul(one, other, room)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    one.values.mul_(2)
    changed = b.clone()
    changed[0, b[0] != 0] = 0  # its first row ends where it begins
    other.values[: int((b[0] != 0).sum())] = math.nan
    other.crow[0] = other.crow[1]
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(found.to("cpu").to_dense(), 2 * a @ changed, rtol=1e-10, atol=1e-10)


@pytest.mark.slow(reason="builds for a GPU")
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(("index", "dtype"), [("i32", "fp32"), ("i32", "bf16"), ("i64", "fp16"), ("i64", "fp64")])
def test_the_kernels_build(index, dtype, capability):
    printed = compile_in_subprocess(f"""
        from sparsecomp.lowering.sparse.kernels.whole_product import count_columns_kernel, fill_columns_kernel
        arrays = {{f"{{one}}_{{part}}_ptr": "*{index}" for one in ("a", "b") for part in ("pointers", "indices")}}
        memory = dict(bits_ptr="*i32", ranks_ptr="*i64", counts_ptr="*i64", pairs_ptr="*i64", rows="i32", words="i32")
        wide = "*fp64" if "{dtype}" == "fp64" else "*fp32"
        out = dict(a_ptr="*{dtype}", b_ptr="*{dtype}", pointers_ptr="*{index}", indices_ptr="*{index}", out_ptr=wide)
        built = [build(kernel, arrays | memory | out, dict(KEPT=kept, K=4, W=32, S=256), {capability}, whole=(),
                       num_warps=2) for kernel in (count_columns_kernel, fill_columns_kernel) for kept in (False, True)]
        print(all(len(one.asm["cubin"]) > 0 for one in built))
    """)
    assert printed.strip() == "True"


@pytest.mark.parametrize("shapes", [((3, 4), (4, 5)), ((3, 0), (0, 5))])
def test_a_product_of_bounded_size_of_a_matrix_without_elements_has_gradients(shapes):
    a, b = CSR.from_dense(torch.zeros(shapes[0])), CSR.from_dense(torch.ones(shapes[1]))
    a, b = (one.with_values(one.values.clone().requires_grad_()) for one in (a, b))
    found = bounded_matmul(a, b, 3).values
    assert found.tolist() == [0.0] * 3
    assert all(not grad.any() for grad in torch.autograd.grad(found.sum(), [a.values, b.values]))
