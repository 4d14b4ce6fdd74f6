"""Rows of a table read at many places, and the gradient by the table: the operator and its kernel, beside float64."""

import math

import pytest
import torch
import torch.nn.functional as F
from candidates import check_candidates
from compile_kernel import compile_in_subprocess
from kernel_devices import KERNEL_DEVICES, graph_of
from torch import Tensor

from sparsecomp import ops
from sparsecomp.errors import FormatError
from sparsecomp.lowering.attention.bias_table import TABLE_GRADIENT, TableGradient, table_gradient
from sparsecomp.lowering.cache.signature import Device

GRADIENT = torch.ops.sparsecomp.table_rows_gradient.default


def distances(tokens: int, farthest: int, device: str = "cpu") -> Tensor:
    place = torch.arange(tokens, device=device)
    return (place[:, None] - place).clamp(-farthest, farthest) + farthest


def numbers(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)


def summed(grad: Tensor, index: Tensor, rows: int) -> Tensor:
    """In float64, row by row."""
    return torch.stack([grad.double()[(index == row) | (index == row - rows)].sum(0) for row in range(rows)])


@pytest.mark.parametrize("shape", [(9,), (9, 3)])
@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_rows_and_gradients_are_those_of_indexing(shape: tuple[int, ...], kind: torch.dtype) -> None:
    index = torch.randint(-9, 9, (4, 5), generator=torch.Generator().manual_seed(0)).to(kind)
    table = numbers(*shape).requires_grad_()
    found, right = ops.table_rows(table, index.mT), table[index.mT]
    assert torch.equal(found, right) and found.is_contiguous()
    by, right_by = (torch.autograd.grad(one.square().sum(), table)[0] for one in (found, right))
    torch.testing.assert_close(by, right_by)


@pytest.mark.parametrize("padding", [-1, 2])
def test_derivatives_of_all_orders(padding: int) -> None:
    index = torch.tensor([[0, 2, 2, -1], [3, -2, 0, 0]])
    table, grad = numbers(4, 2).requires_grad_(), numbers(2, 4, 2).requires_grad_()
    if padding < 0:
        assert torch.autograd.gradcheck(lambda one: ops.table_rows(one, index), table)
        assert torch.autograd.gradgradcheck(lambda one: ops.table_rows(one, index), table)
    assert torch.autograd.gradcheck(lambda one: GRADIENT(one, index, 4, padding), grad)
    assert torch.autograd.gradgradcheck(lambda one: GRADIENT(one, index, 4, padding), grad)
    torch.library.opcheck(torch.ops.sparsecomp.table_rows.default, (table, index, padding))
    torch.library.opcheck(GRADIENT, (grad, index, 4, padding))


def test_padding_is_that_of_an_embedding() -> None:
    index, table, along = torch.tensor([[0, 2, 2], [3, 2, 0]]), numbers(4, 2).requires_grad_(), numbers(4, 2)
    results = []
    for found in (ops.table_rows(table, index, 2), F.embedding(index, table, padding_idx=2)):
        (by,) = torch.autograd.grad(found.pow(3).sum(), table, create_graph=True)
        (twice,) = torch.autograd.grad((by * along).sum(), table)
        results.append((found, by, twice))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)
    assert not results[0][1][2].any()


def test_bad_operands() -> None:
    table, index = torch.zeros(4, 2), torch.tensor([0])
    for given in ((table[None], index), (table.long(), index), (table, index > 0), (table, index.short())):
        with pytest.raises(FormatError):
            ops.table_rows(*given)
    with pytest.raises(FormatError, match="counted from 0"):
        ops.table_rows(table, index, -2)
    for outside in (4, -5):
        with pytest.raises(IndexError):
            ops.table_rows(table, torch.tensor([0, outside]))


TOLERANCE = {torch.float32: 2e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}
PROBLEMS = {
    "distances": (41, 6, distances(37, 20)), "a number": (9, 1, distances(20, 4) - 9),
    "many rows": (300, 20, torch.arange(900).remainder(301).sub(1).int()),
    "wide": (17, 70, torch.randint(-17, 17, (3, 111), generator=torch.Generator().manual_seed(1)).int()),
    "one row": (1, 3, torch.zeros(500, dtype=torch.int64)),
}  # fmt: skip


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.quick_cases(6)
def test_kernels_beside_float64(name: str, dtype: torch.dtype, device: str) -> None:
    """Heads outermost, as attention gives them."""
    rows, features, index = PROBLEMS[name]
    grad = numbers(features, *index.shape, dtype=dtype).movedim(0, -1).flatten(0, -2)
    found = [torch.full((rows, features), math.nan, dtype=dtype, device=device) for _ in range(2)]
    for out in found:
        table_gradient(grad.to(device), index.flatten().to(device), -1, out)
    right = summed(grad, index.flatten(), rows)
    error = torch.linalg.vector_norm(found[0].cpu().double() - right)
    assert error <= TOLERANCE[dtype] * torch.linalg.vector_norm(right)
    assert torch.equal(*found)


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_not_finite_reaches_its_own_row(dtype: torch.dtype, device: str) -> None:
    """Of rows in one block of places; and so do numbers beside which others are lost, and padding."""
    index = torch.arange(120).remainder(12)
    grad = numbers(120, 2, dtype=dtype)
    grad[3, 0], grad[4], grad[5, 1], grad[17, 1] = math.nan, math.inf, math.inf, -math.inf
    grad[6, 0], grad[18, 0], grad[7] = 3.0e38, 3.0e38, math.nan
    out = torch.full((12, 2), math.nan, dtype=dtype, device=device)
    table_gradient(grad.to(device), index.to(device), 7, out)
    right = summed(grad, index, 12).to(dtype)
    right[7] = 0
    assert right.isnan().sum() == 2 and right.isinf().sum() == 3
    torch.testing.assert_close(out.cpu(), right, equal_nan=True)


@pytest.mark.parametrize("device", KERNEL_DEVICES)
def test_float32_is_summed_without_a_rest(device: str) -> None:
    """Each place reads its own row, whose gradient is its number."""
    grad = numbers(64, 16, dtype=torch.float32) * 2.0 ** torch.arange(-60, 68)[:64, None]
    grad[0, 0], grad[1, 0] = 3.4e38, -1e-30
    out = torch.empty_like(grad, device=device)
    table_gradient(grad.to(device), torch.arange(64, device=device), -1, out)
    # tensor cores may cut the last bit off
    torch.testing.assert_close(out.cpu(), grad, rtol=0 if device == "cpu" else 1.2e-7, atol=0)


@pytest.mark.parametrize("device", KERNEL_DEVICES)
def test_sums_are_long(device: str) -> None:
    """Of numbers of one sign that no float is; of a large one before small ones; of halves that half precision does not
    hold the sum of."""
    places, index = 20_000, torch.zeros(20_000, dtype=torch.int64)
    large_first = torch.cat((torch.tensor([1e7]), torch.full((places - 1,), 0.1)))
    halves = torch.tensor([60000.0, -60000.0]).repeat(places // 2)
    halves[-1] = 0.0
    for grad in (torch.full((places,), 0.1), large_first, halves.half()):
        out = torch.full((1, 1), math.nan, dtype=grad.dtype, device=device)
        table_gradient(grad[:, None].to(device), index.to(device), -1, out)
        right = grad.double().sum().to(grad.dtype)
        for found in (out.cpu()[0, 0], GRADIENT(grad, index, 1, -1)[0]):
            torch.testing.assert_close(found, right, rtol=4e-6, atol=0)


@pytest.mark.slow(reason="holds configurations against float64")
@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("strides", [(1, 900), (6, 1)])
def test_the_tuner_can_check_candidates(dtype: str, strides: tuple[int, int], device: str) -> None:
    problem, card = TableGradient(900, 150, 6, *strides, -1, "int64", dtype), Device("card", "9.0", "3.6.0")
    check_candidates(TABLE_GRADIENT, problem, device, 4)
    signature = TABLE_GRADIENT.signature(problem, card)
    assert TABLE_GRADIENT.representative(signature) == problem


@pytest.mark.slow(reason="compiles configurations")
@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile_for_every_card(capability: int) -> None:
    """In at most the shared memory that every card gives without being asked."""
    printed = compile_in_subprocess(
        f"""
        from sparsecomp.lowering.attention.bias_table import TABLE_GRADIENT, TableGradient
        from sparsecomp.lowering.cache.signature import Device
        device, shorts = Device("card", "{capability / 10}", "3.6.0"), dict(float32="fp32", bfloat16="bf16")
        for (dtype, short), features in zip(shorts.items(), (64, 16)):
            problem = TableGradient(2**22, 513, features, 1, 2**22, -1, "int64", dtype)
            tallest = TABLE_GRADIENT.candidates(problem, device)[-1]
            for launch in [step.launch for step in tallest.template.prepare(problem, tallest.config).steps]:
                fixed = dict(launch.named)
                options = {{name: fixed.pop(name) for name in ("num_warps", "num_stages") if name in fixed}}
                own = dict(index_ptr="*i64", out_ptr="*fp32", part_ptr="*fp32")
                types = {{n: own.get(n, "*" + short if n.endswith("_ptr") else "i32") for n in launch.kernel.arg_names}}
                whole = ("feature_stride", "EACH", "PLACES")
                print(build(launch.kernel, types, fixed, {capability}, whole=whole, **options).metadata.shared <= 49152)
        """
    )
    assert printed.split() == ["True"] * 4, printed


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
class TestOnAGpu:
    @pytest.mark.parametrize("rows", [33, 257, 2047])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    def test_distances_beside_float64(self, dtype: torch.dtype, rows: int) -> None:
        index = distances(1024, rows // 2, "cuda")
        random = torch.Generator("cuda").manual_seed(0)
        grad = torch.randn(1, 12, 1024, 1024, device="cuda", generator=random).to(dtype)
        table = torch.zeros(rows, 12, device="cuda", dtype=dtype, requires_grad=True)
        by = [torch.autograd.grad(ops.table_rows(table, index).permute(2, 0, 1)[None], table, grad)[0] for _ in "12"]
        right = torch.zeros(rows, 12, device="cuda", dtype=torch.float64)
        right.index_add_(0, index.flatten(), grad[0].flatten(1).mT.double())
        assert float((by[0].double() - right).norm() / right.norm()) < 2 * TOLERANCE[dtype]
        assert torch.equal(*by)

    def test_a_captured_gradient_reads_what_is_there_now(self) -> None:
        index, grad = distances(200, 30, "cuda"), torch.randn(200, 200, 4, device="cuda")
        graph, found = graph_of(lambda: GRADIENT(grad, index, 61, -1))
        grad.normal_()
        index.copy_(index.flip(0))
        graph.replay()
        torch.testing.assert_close(found.double(), summed(grad, index, 61), rtol=1e-5, atol=1e-4)
