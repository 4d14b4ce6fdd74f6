"""Products of two sparse matrices at given places: kernels, operators and graphs, beside dense products in float64."""

import pytest
import torch
import torch.nn.functional as F
from compile_kernel import compile_in_subprocess
from kernel_devices import DEVICES, KERNEL_DEVICES, graph_of, interpreted

from sparsecomp.formats import CSR
from sparsecomp.ops.sparse.row_products import row_dots, row_products, turned_pattern

pytestmark = pytest.mark.quick_cases(4)

OPS = torch.ops.sparsecomp
SIZES = [(7, 9, 8), (20, 70, 17), (1, 300, 5), (3, 1, 60)]
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
TOLERANCE = {F64: 1e-12, F32: 1e-5, F16: 4e-3, BF16: 3e-2}


def sparse(rows: int, cols: int, seed: int, density: float = 0.4) -> torch.Tensor:
    """With an empty row and a full one where there are more."""
    generator = torch.Generator().manual_seed(seed)
    kept = torch.rand(rows, cols, generator=generator) < density
    kept[1:2], kept[2:3] = False, True
    return torch.randn(rows, cols, generator=generator, dtype=F64) * kept


def arrays(dense: torch.Tensor, index=torch.int32, spare: tuple[int, int] = (0, 0), device="cpu"):
    """Pointers and indices with entries around them that are none, and which elements those between are."""
    matrix = CSR.from_dense(dense)
    indices = F.pad(matrix.col, spare, value=2**30)  # what is read of a spare entry would be seen
    return (matrix.crow + spare[0]).to(device, index), indices.to(device, index)


def values_of(dense: torch.Tensor, pattern: torch.Tensor, spare=(0, 0), dtype=F32, device="cpu") -> torch.Tensor:
    stored = dense[..., pattern != 0]
    return F.pad(stored, spare, value=float("nan")).to(device, dtype)


def problem(sizes, index=torch.int32, dtype=F32, spare=(0, 0), batch=(False, False), device="cpu"):
    """Operands of a @ b at some places: values, arrays, and the dense matrices behind them."""
    rows, inner, cols = sizes
    a, b, at = sparse(rows, inner, 1), sparse(inner, cols, 2), sparse(rows, cols, 3)
    dense = []
    for matrix, batched in zip((a, b), batch, strict=True):
        factors = torch.tensor([1.0, -2.0, 0.5], dtype=F64)[:, None, None] if batched else 1.0
        dense.append((matrix * factors).to(dtype).double())
    left = values_of(dense[0], a, spare, dtype, device), *arrays(a, index, spare, device)
    right = values_of(dense[1], b, spare, dtype, device), *arrays(b, index, spare, device)
    return left, right, arrays(at, index, spare, device), dense, at


def expected(dense, at, spare=(0, 0)) -> torch.Tensor:
    found = (dense[0] @ dense[1])[..., at != 0]
    return F.pad(found, spare)


def close(found: torch.Tensor, wanted: torch.Tensor, dtype) -> None:
    torch.testing.assert_close(found.double().cpu(), wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * 10)


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize(("dtype", "index"), [(F32, torch.int32), (F16, torch.int64), (BF16, torch.int32),
                                              (F64, torch.int64)])  # fmt: skip
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_kernels_are_the_dense_product(sizes, dtype, index, device):
    left, right, at, dense, pattern = problem(sizes, index, dtype, (3, 2), device=device)
    wanted = expected(dense, pattern, (3, 2))
    close(OPS.row_products.default.direct_cuda(*left, *right, *at, sizes[2]), wanted, dtype)
    turned = turned_of(dense[1], index, dtype, device)
    close(OPS.row_dots.default.direct_cuda(*left, *turned, *at, sizes[1]), wanted, dtype)
    # the other's rows are the shorter ones here or there
    mirrored = F.pad((dense[1].mT @ dense[0].mT)[pattern.mT != 0], (1, 0))
    across = arrays(pattern.mT, index, (1, 0), device)
    close(OPS.row_dots.default.direct_cuda(*turned, *left, *across, sizes[1]), mirrored, dtype)


def turned_of(dense, index=torch.int32, dtype=F32, device="cpu"):
    """The transpose of a matrix or batch: values and arrays."""
    pattern = ((dense.mT if dense.dim() == 2 else dense[0].mT) != 0).double()
    return values_of(dense.mT, pattern, dtype=dtype, device=device), *arrays(pattern, index, (0, 0), device)


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("batch", [(True, False), (False, True), (True, True)])
def test_batches_share_patterns(batch, device):
    left, right, at, dense, pattern = problem(SIZES[0], batch=batch, device=device)
    wanted = expected(dense, pattern)
    close(OPS.row_products.default.direct_cuda(*left, *right, *at, 8), wanted, F32)
    close(OPS.row_dots.default.direct_cuda(*left, *turned_of(dense[1], device=device), *at, 9), wanted, F32)


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_reaches_only_places_that_meet_it(bad, device):
    left, right, at, dense, pattern = problem(SIZES[0], device=device)
    row, inner = 2, 2  # of a full row, in front of another
    left[0][((dense[0] != 0).nonzero() == torch.tensor([row, inner])).all(1).nonzero().item()] = bad
    meets = torch.zeros_like(pattern, dtype=torch.bool)
    meets[row, dense[1][inner] != 0] = True
    for found in (
        OPS.row_products.default.direct_cuda(*left, *right, *at, 8),
        OPS.row_dots.default.direct_cuda(*left, *turned_of(dense[1], device=device), *at, 9),
    ):
        assert torch.equal(~found.cpu().isfinite(), meets[pattern != 0]) and meets[pattern != 0].any()


@interpreted
def test_nothing_stored_and_no_places():
    left, right, at, *_ = problem(SIZES[0])
    empty = torch.zeros(0), torch.zeros(8, dtype=torch.int32), torch.zeros(0, dtype=torch.int32)
    assert not OPS.row_products.default.direct_cuda(*empty, *right, *at, 8).any()
    turned = turned_of(sparse(9, 8, 2))
    assert not OPS.row_dots.default.direct_cuda(*empty, *turned, *at, 9).any()
    assert OPS.row_products.default.direct_cuda(*left, *right, *empty[1:], 8).shape == (0,)
    assert OPS.row_dots.default(*left, *turned, *empty[1:], 9).shape == (0,)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("spare", [(0, 0), (2, 3)])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_a_transpose_has_its_spare_entries_last(index, spare, device):
    dense = sparse(7, 9, 1)
    pointers, indices, order = (one.cpu() for one in turned_pattern(*arrays(dense, index, spare, device), 9))
    wanted, count = CSR.from_dense(dense.mT), int((dense != 0).sum())
    assert pointers.dtype is indices.dtype is index and indices.numel() == order.numel() == count + sum(spare)
    assert torch.equal(pointers, wanted.crow.to(index)) and torch.equal(indices[:count], wanted.col.to(index))
    stored = values_of(dense, dense, spare, F64)
    assert torch.equal(stored[order[:count].long()], wanted.values)
    assert not indices[count:].any() and not order[count:].any()


@pytest.mark.parametrize("spare", [(0, 0), (2, 3)])
def test_operators_are_as_their_schemas_say(spare):
    left, right, at, dense, pattern = problem(SIZES[0], dtype=F64, spare=spare)
    turned = turned_of(dense[1], torch.int32, F64, "cpu")
    left[0].nan_to_num_(), right[0].nan_to_num_()
    for one in (left, right, turned):
        one[0].requires_grad_()
    torch.library.opcheck(OPS.turned_pattern.default, (*at, 8))
    torch.library.opcheck(OPS.row_products.default, (*left, *right, *at, 8))
    torch.library.opcheck(OPS.row_dots.default, (*left, *turned, *at, 9))
    close(row_products(*left, *right, *at, 8).detach(), expected(dense, pattern, spare), F64)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("sparsecomp", marks=pytest.mark.slow(reason="compiled by Inductor"))]
)
def test_a_graph_holds_a_product_and_its_gradients_at_the_operands_places(backend, device):
    left, right, at, dense, pattern = problem((7, 9, 8), dtype=F64, device=device)

    def loss(a, b):
        found = row_products(a, *left[1:], b, *right[1:], *at, 8)
        return (found * found.cos()).sum() + row_dots(found, *at, b, *right[1:], *left[1:], 8).square().sum()

    leaves = [one[0].requires_grad_() for one in (left, right)]
    found = torch.autograd.grad(torch.compile(loss, backend=backend, fullgraph=True)(*leaves), leaves)
    a, b = (one.clone().requires_grad_() for one in dense)
    product = (a @ b) * (pattern != 0)
    value = (product * product.cos()).sum() + ((product @ b.mT)[dense[0] != 0]).square().sum()
    wanted = torch.autograd.grad(value, (a, b))
    for one, whole, where in zip(found, wanted, dense, strict=True):
        close(one, whole[where != 0], F64)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_captured_product_follows_its_patterns_and_waits_for_nothing():
    left, right, at, dense, pattern = problem((40, 130, 33), device="cuda")

    def call():
        turned = turned_pattern(*right[1:], 33)
        return row_products(*left, *right, *at, 33), row_dots(*left, right[0][turned[2]], *turned[:2], *at, 130)

    graph, found = graph_of(call)
    left[0].mul_(2)
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph.replay()
    torch.cuda.synchronize()
    for one in found:
        close(one, 2 * expected(dense, pattern), F32)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_large_product_is_the_same_each_time_where_that_is_asked_for():
    dense = [sparse(2000, 1500, 1, 0.02), sparse(1500, 1800, 2, 0.02)]
    at = sparse(2000, 1800, 3, 0.05)
    left, right = ((values_of(one, one, device="cuda"), *arrays(one, device="cuda")) for one in dense)
    places = arrays(at, device="cuda")
    wanted = (dense[0].float().double() @ dense[1].float().double())[at != 0]
    close(row_products(*left, *right, *places, 1800), wanted, F32)
    torch.use_deterministic_algorithms(True)
    try:
        found = [row_products(*left, *right, *places, 1800) for _ in range(3)]
    finally:
        torch.use_deterministic_algorithms(False)
    close(found[0], wanted, F32)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.slow(reason="builds for a GPU")
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(("index", "dtype"), [("i32", "fp32"), ("i32", "bf16"), ("i64", "fp16"), ("i64", "fp64")])
def test_the_kernels_build(index, dtype, capability):
    printed = compile_in_subprocess(f"""
        from sparsecomp.lowering.sparse.kernels.row_products import dots_kernel, products_kernel
        numbers = dict.fromkeys(("rows", "entries", "x_batch", "y_batch", "a_batch", "b_batch"), "i32")
        numbers |= dict.fromkeys(("row_halvings", "halvings"), "i32")
        arrays = {{f"{{one}}_{{part}}_ptr": "*{index}" for one in ("x", "y", "a", "b", "at") for part in
                  ("pointers", "indices")}}
        data = dict.fromkeys(("x_ptr", "y_ptr", "a_ptr", "b_ptr"), "*{dtype}")
        wide = "*fp64" if "{dtype}" == "fp64" else "*fp32"
        signature = numbers | arrays | data
        tile = dict(E=32, W=16)
        built = [build(dots_kernel, signature | dict(out_ptr="*{dtype}"),
                       dict(TURN=turn, DOUBLE="{dtype}" == "fp64", **tile), {capability}, num_warps=4)
                 for turn in (False, True)]
        built.append(build(products_kernel, signature | dict(out_ptr=wide), tile, {capability}, num_warps=4))
        print(all(len(one.asm["cubin"]) > 0 for one in built))
    """)
    assert printed.strip() == "True"
