"""Sparse times dense in every schedule against scipy in float64, through the interpreter and on the GPU."""

from importlib import import_module

import numpy as np
import pytest
import scipy.sparse
import torch
import torch.nn.functional as F
from compile_kernel import compile_in_subprocess
from kernel_devices import KERNEL_DEVICES
from kernel_schedules import captured, schedules
from matrices import FOLDER

from sparsecomp.errors import FormatError, TuningError
from sparsecomp.lowering.cache.signature import Device, device_of
from sparsecomp.lowering.launch.epilogue import output_of
from sparsecomp.lowering.sparse.spmm_bsr import spmm_bsr
from sparsecomp.lowering.sparse.spmm_csr import SpmmCsr, spmm_csr
from sparsecomp.lowering.sparse.spmm_nm import spmm_nm
from sparsecomp.lowering.tuning.template import of_operation
from sparsecomp.lowering.tuning.trial import fault

pytest.importorskip("triton")
pytestmark = pytest.mark.quick_cases(1)

TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
H100 = Device("NVIDIA H100 80GB HBM3", "9.0", "3.6.0")


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def csr(m, k, density, seed=0, dtype=torch.float32, index=torch.int32, device="cpu"):
    """Arrays of a random CSR matrix with an empty row, and the same as scipy's, whose product visits nonzeros only."""
    matrix = scipy.sparse.random_array((m, k), density=density, rng=np.random.default_rng(seed), dtype=np.float32)
    matrix = matrix.tolil()
    matrix[m // 2] = 0
    matrix = scipy.sparse.csr_array(matrix)
    matrix.eliminate_zeros()
    matrix.data[:] = random(matrix.nnz, seed=seed).to(dtype).float().numpy()
    arrays = (torch.from_numpy(matrix.indptr).to(device, index), torch.from_numpy(matrix.indices).to(device, index),
              torch.from_numpy(matrix.data).to(device, dtype))  # fmt: skip
    return arrays, matrix


def exact(matrix, dense):
    """The float64 product by scipy."""
    return torch.from_numpy(matrix.astype(np.float64) @ dense.detach().cpu().double().numpy())


def error(out, expected):
    return ((out.double().cpu() - expected).norm() / expected.norm().clamp_min(1e-30)).item()


def laid_out(dense, layout):
    """The same numbers in another layout, on the same device."""
    if layout == "columns":
        return dense.mT.contiguous().mT
    if layout == "strided":
        return dense.new_full((*dense.shape[:-1], 3 * dense.shape[-1]), torch.nan)[..., ::3].copy_(dense)
    if layout == "unaligned":
        memory = dense.new_full((dense.numel() + 1,), torch.nan)[1:]
        return memory.view(dense.shape).copy_(dense)
    return dense


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize(
    ("dtype", "index", "layout", "n"),
    [
        (torch.float32, torch.int32, "rows", 32), (torch.float32, torch.int64, "columns", 17),
        (torch.float32, torch.int32, "strided", 9), (torch.float32, torch.int64, "unaligned", 70),
        (torch.float32, torch.int32, "rows", 1), (torch.float16, torch.int32, "rows", 64),
        (torch.float16, torch.int64, "columns", 12), (torch.bfloat16, torch.int32, "rows", 16),
        (torch.bfloat16, torch.int64, "columns", 8),
    ],
)  # fmt: skip
def test_csr_matches_float64(device, dtype, index, layout, n):
    arrays, matrix = csr(41, 53, 0.2, dtype=dtype, index=index, device=device)
    dense = laid_out(random(53, n, seed=1).to(device, dtype), layout)
    out = laid_out(torch.empty(41, n, dtype=dtype, device=device), layout)
    expected = exact(matrix, dense)
    for name, got in schedules(lambda: spmm_csr(*arrays, dense, out), out, 2):
        assert error(got, expected) <= TOLERANCE[dtype], name


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.float16])
def test_csr_sums_half_precision_in_float32_and_rounds_once(device, out_dtype):
    """4096 + 64 · 0.5 + … would stay 4096 in float16, whose neighbours there are 4 apart."""
    crow, col = torch.tensor([0, 65], dtype=torch.int32), torch.arange(65, dtype=torch.int32)
    values = torch.full((65,), 0.5, dtype=torch.float16)
    values[0] = 4096
    out = torch.empty(1, 8, dtype=out_dtype, device=device)
    arrays = [array.to(device) for array in (crow, col, values, torch.ones(65, 8, dtype=torch.float16))]
    for name, got in schedules(lambda: spmm_csr(*arrays, out), out):
        assert (got == 4128).all(), name


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("batched", ["both", "values", "dense"])
def test_csr_batches_share_a_pattern(device, batched):
    (crow, col, _), matrix = csr(13, 21, 0.3, device=device)
    values = random(3, col.numel(), seed=3).to(device) if batched != "dense" else random(col.numel()).to(device)
    dense = random(3, 21, 10, seed=4).to(device) if batched != "values" else random(21, 10, seed=4).to(device)
    out = torch.empty(3, 13, 10, device=device)
    every_value, every_dense = values.expand(3, -1), dense.expand(3, -1, -1)
    expected = torch.stack([
        exact(scipy.sparse.csr_array((every_value[i].cpu().numpy(), matrix.indices, matrix.indptr), matrix.shape),
              every_dense[i])
        for i in range(3)
    ])  # fmt: skip
    for name, got in schedules(lambda: spmm_csr(crow, col, values, dense, out), out):
        assert error(got, expected) <= 1e-6, name


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("filled", [False, True])
def test_zeros_that_fill_rows_up_are_not_multiplied(device, dtype, batched, filled):
    """Against a sum of what is stored, entry by entry; without `filled` a stored zero times NaN is NaN."""
    (crow, col, values), _ = csr(13, 21, 0.3, device=device)
    values = values.to(dtype)
    values = torch.stack([values, values.roll(1)]) if batched else values
    values[..., ::3], values[..., 1::6] = 0.0, -0.0
    dense = random(21, 10, seed=4).to(dtype)
    dense[3, 1], dense[5, 2], dense[8, 3], dense[9] = float("nan"), float("inf"), -float("inf"), float("nan")
    expected = torch.zeros(*values.shape[:-1], 13, 10, dtype=torch.float64)
    for row in range(13):
        for entry in range(int(crow[row]), int(crow[row + 1])):
            terms = values[..., entry, None].cpu().double() * dense[int(col[entry])].double()
            stored = (values[..., entry, None].cpu() != 0) | (not filled)
            expected[..., row, :] += torch.where(stored, terms, 0.0)
    out, dense = torch.empty(expected.shape, dtype=dtype, device=device), dense.to(device)
    for name, got in schedules(lambda: spmm_csr(crow, col, values, dense, out, filled=filled), out, 2):
        assert torch.equal(got.cpu().isnan(), expected.isnan()), name
        torch.testing.assert_close(got.cpu().double(), expected, rtol=1e-3, atol=1e-3, equal_nan=True, msg=name)


EPILOGUES = [
    ("row", False, "relu"), ("column", True, "gelu"), (None, True, "gelu_tanh"), ("row", True, "silu"),
    (None, False, "gelu"), ("column", False, "none"), ("row", True, "sigmoid"), ("row", False, "tanh"),
]  # fmt: skip
ACTIVATIONS = {
    "none": lambda x: x, "relu": F.relu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu, "sigmoid": torch.sigmoid, "tanh": torch.tanh,
}  # fmt: skip


def epilogue(m, n, axis, has_residual, device):
    bias = None if axis is None else random(m if axis == "row" else n, seed=5).to(device)
    residual = random(n, m, seed=6).to(device).mT if has_residual else None
    return bias, residual


def finished(product, scale, bias, axis, residual, activation):
    value = scale * product
    if bias is not None:
        value = value + (bias.cpu().double()[:, None] if axis == "row" else bias.cpu().double())
    if residual is not None:
        value = value + residual.cpu().double()
    return ACTIVATIONS[activation](value)


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize(("axis", "has_residual", "activation"), EPILOGUES)
def test_epilogue_of_every_product(device, axis, has_residual, activation):
    """Empty rows get the epilogue of zero; a bias of float32 with values of float16 is not rounded to them."""
    m, k, n = 19, 24, 11
    bias, residual = epilogue(m, n, axis, has_residual, device)
    given = {"bias": bias, "bias_axis": axis or "column", "residual": residual, "activation": activation, "scale": 0.7}
    out, dense = torch.empty(m, n, device=device), random(k, n, seed=1).to(device)
    arrays, matrix = csr(m, k, 0.3, device=device)
    expected = finished(exact(matrix, dense), 0.7, bias, axis, residual, activation)
    for name, got in schedules(lambda: spmm_csr(*arrays, dense, out, **given), out):
        assert error(got, expected) <= 1e-6, name
    (crow, col, values), full = bsr(m, k, 4, 8, 0.4, device=device)
    expected = finished(full @ dense.cpu().double(), 0.7, bias, axis, residual, activation)
    for name, got in schedules(lambda: spmm_bsr(crow, col, values, dense, out, **given), out):
        assert error(got, expected) <= 1e-6, name
    values, indices, full = n_of_m(m, k, 2, 4, device=device)
    expected = finished(full @ dense.cpu().double(), 0.7, bias, axis, residual, activation)
    for name, got in schedules(lambda: spmm_nm(values, indices, 2, 4, dense, out, **given), out):
        assert error(got, expected) <= 1e-6, name


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize(("m", "k", "n"), [(5, 7, 8), (5, 0, 8), (1, 1, 1), (3, 4, 1)])
def test_csr_without_nonzeros_is_the_epilogue_of_zero(device, m, k, n):
    crow = torch.zeros(m + 1, dtype=torch.int64, device=device)
    col, values = torch.empty(0, dtype=torch.int64, device=device), torch.empty(0, device=device)
    dense, out, bias = torch.ones(k, n, device=device), torch.empty(m, n, device=device), torch.arange(n).float() - 1
    for name, got in schedules(lambda: spmm_csr(crow, col, values, dense, out, bias=bias.to(device)), out):
        assert torch.equal(got.cpu(), bias.expand(m, n)), name


@pytest.mark.parametrize("device", KERNEL_DEVICES)
def test_products_of_no_elements_launch_nothing_and_one_element_is_exact(device):
    one = torch.tensor([0, 1], dtype=torch.int32, device=device)
    zero, value = one[:1], torch.tensor([3.0], device=device)
    out = torch.empty(1, 1, device=device)
    for name, got in schedules(lambda: spmm_csr(one, zero, value, value[None] / 2, out), out):
        assert got.item() == 4.5, name
    spmm_bsr(one, zero, value[:, None, None], value[None] / 2, out)
    assert out.item() == 4.5
    spmm_nm(value[None], zero[None].to(torch.uint8), 1, 1, value[None] / 2, out)
    assert out.item() == 4.5
    empty = torch.empty(0, 4, device=device)
    assert captured(lambda: spmm_csr(zero, zero[:0], value[:0], torch.ones(3, 4, device=device), empty)) is None
    none = torch.empty(1, 0, device=device)
    assert captured(lambda: spmm_csr(one, zero, value, torch.empty(1, 0, device=device), none)) is None


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("where", ["dense", "values"])
def test_csr_spreads_what_is_not_finite_only_along_what_is_stored(device, where):
    (crow, col, values), matrix = csr(40, 30, 0.15, device=device)
    dense = random(30, 12, seed=1).to(device)
    if where == "dense":
        dense[3, 2], dense[7, 5], dense[8, 5], dense[20, 11] = torch.inf, torch.nan, -torch.inf, torch.inf
    else:
        values[4], values[17], values[-1] = torch.nan, torch.inf, -torch.inf
        matrix.data[:] = values.cpu().numpy()
    expected = exact(matrix, dense)
    assert 0 < expected.isfinite().sum() < expected.numel()
    out = torch.empty(40, 12, device=device)
    bias, residual = random(40, seed=7).to(device), random(40, 12, seed=8).to(device)
    expected = expected + bias.cpu().double()[:, None] + residual.cpu().double()

    def call():
        spmm_csr(crow, col, values, dense, out, bias=bias, bias_axis="row", residual=residual)

    for name, got in schedules(call, out, 2):
        torch.testing.assert_close(got.cpu().double(), expected, rtol=1e-5, atol=1e-5, equal_nan=True, msg=name)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_csr_gathers_what_is_not_finite_from_each_item_of_a_batch(device, dtype):
    """Tiles that are repaired take their own item's values and dense."""
    (crow, col, _), matrix = csr(18, 12, 0.3, device=device)
    values = random(3, col.numel(), seed=3).to(device, dtype)
    dense = random(3, 12, 8, seed=4).to(device, dtype)
    dense[0, 3, 2], dense[2, 7, 5] = torch.inf, torch.nan
    expected = torch.stack([
        exact(scipy.sparse.csr_array((value.cpu().float().numpy(), matrix.indices, matrix.indptr), matrix.shape), right)
        for value, right in zip(values, dense, strict=True)
    ])  # fmt: skip
    assert expected[1].isfinite().all() and 0 < expected[2].isnan().sum() < 18
    out = torch.empty(3, 18, 8, device=device)
    for name, got in schedules(lambda: spmm_csr(crow, col, values, dense, out), out, 2):
        torch.testing.assert_close(got.cpu().double(), expected, rtol=1e-3, atol=1e-3, equal_nan=True, msg=name)


@pytest.mark.parametrize("device", KERNEL_DEVICES)
def test_row_slices_and_spare_capacity_hide_what_lies_outside(device):
    (crow, col, values), matrix = csr(30, 25, 0.25, device=device)
    poison = torch.full((5,), torch.nan, device=device)
    wild = torch.full((5,), 2**30, dtype=torch.int32, device=device)
    col, values = torch.cat([wild, col, wild]), torch.cat([poison, values, poison])
    dense = random(25, 20, seed=1).to(device)
    out = torch.empty(12, 20, device=device)
    expected = exact(matrix, dense)[10:22]
    for name, got in schedules(lambda: spmm_csr(crow[10:23] + 5, col, values, dense, out), out):
        assert error(got, expected) <= 1e-6, name


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("long", [0, 5, 39])
def test_csr_rows_that_span_many_chunks_and_many_empty_rows(device, long):
    """One row with 700 of 710 nonzeros, behind spare ones: pieces of it lie in several chunks of the merge schedule."""
    counts = torch.zeros(40, dtype=torch.int32)
    counts[long], counts[[2, 20]] = 700, 5
    crow = F.pad(counts.cumsum(0), (1, 0)).int()
    col = torch.cat([torch.arange(n, dtype=torch.int32) for n in counts.tolist()])
    values, dense = random(col.numel()), random(700, 9, seed=1)
    matrix = scipy.sparse.csr_array((values.numpy(), col.numpy(), crow.numpy()), (40, 700))
    out = torch.empty(40, 9, device=device)
    bias = random(9, seed=2)
    expected = exact(matrix, dense) + bias.double()
    spare = torch.zeros(130, dtype=torch.int32)
    crow, col, values = crow + 130, torch.cat([spare, col]), torch.cat([spare / 0, values])
    arrays = [array.to(device) for array in (crow.int(), col, values, dense)]
    operation, problem, tensors = captured(
        lambda: spmm_csr(*arrays, out, bias=bias.to(device), skew="skewed")
    )  # fmt: skip
    template = next(one for one in of_operation("spmm_csr") if one.name == "spmm_csr_merge")
    space = template.space(problem, device_of(out.device))
    for tokens in (128, 256, 1024):
        config = next(config for config in space if config["T"] == tokens)
        out.fill_(torch.nan)
        template.prepare(problem, config)(*tensors)
        assert error(out, expected) <= 1e-6, config
    rows = next(one for one in of_operation("spmm_csr") if one.name == "spmm_csr_rows")
    ahead = [config for config in rows.space(problem, device_of(out.device)) if config["AHEAD"]]
    for config in (ahead[0], ahead[-1]):
        out.fill_(torch.nan)
        rows.prepare(problem, config)(*tensors)
        assert error(out, expected) <= 1e-6, config


def tridiagonal(rows, device):
    """The second difference of 0, 1, 2, …: -1 first, n last, 0 between."""
    index = torch.arange(rows, device=device)
    col = torch.stack([index - 1, index, index + 1], 1).flatten()[1:-1].int()
    values = torch.tensor([-1.0, 2.0, -1.0], device=device).repeat(rows)[1:-1]
    crow = (3 * torch.arange(rows + 1, device=device) - 1).clamp(0, 3 * rows - 2).int()
    expected = torch.zeros(rows, device=device)
    expected[0], expected[-1] = -1, rows
    return crow, col, values, index.float()[:, None], expected[:, None]


@pytest.mark.slow(reason="long rows through the interpreter")
@pytest.mark.parametrize("device", KERNEL_DEVICES)
def test_csr_tridiagonal_against_its_closed_form(device):
    """A million rows on a GPU; two thousand in the interpreter, which is slow."""
    rows = 1_000_000 if device == "cuda" else 2000
    crow, col, values, dense, expected = tridiagonal(rows, device)
    out = torch.empty(rows, 1, device=device)
    for name, got in schedules(lambda: spmm_csr(crow, col, values, dense, out), out):
        assert torch.equal(got, expected), name


@pytest.mark.slow(reason="long rows through the interpreter")
@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.skipif(not FOLDER.exists(), reason="the collection of real matrices is not here")
def test_csr_of_values_from_1e_minus_24_to_1e12(device):
    """bcsstk13: each element within the bound of float32 sums, |error| ≤ (nonzeros a row + 2) · eps · Σ|a||b|.

    All rows on a GPU; every tenth in the interpreter, which is slow.
    """
    from bench.sparse.matrices import read

    matrix = scipy.sparse.csr_array(read(FOLDER / "bcsstk13.mtx.gz").to_scipy())
    matrix = matrix if device == "cuda" else matrix[::10]
    matrix.data[:] = matrix.data.astype(np.float32)
    arrays = [torch.from_numpy(array).to(device) for array in (matrix.indptr, matrix.indices)]
    values = torch.from_numpy(matrix.data.astype(np.float32)).to(device)
    dense, out = random(2003, 8, seed=1).to(device), torch.empty(matrix.shape[0], 8, device=device)
    expected = exact(matrix, dense)
    size = exact(abs(matrix), dense.abs())
    terms = torch.from_numpy(np.diff(matrix.indptr))[:, None] + 2
    for name, got in schedules(lambda: spmm_csr(*arrays, values, dense, out, skew="mixed"), out):
        # halves keep 20 bits of what is small beside its row: an eighth of float32's accuracy at worst
        slack = 8 if "halves" in name else 1
        assert ((got.cpu().double() - expected).abs() <= slack * terms * 2.0**-23 * size).all(), name


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_csr_at_the_ends_of_float32s_range(device, layout):
    """Large times small: only the product is in range. A large number that meets a zero hides none that does not."""
    sparse, dense = torch.zeros(3, 70), torch.zeros(70, 9)
    sparse[0, 0] = 3e38
    sparse[1, 1:3] = torch.tensor([1e-34, 1e-40])
    sparse[2, 4] = 1e-38
    dense[0], dense[2], dense[3], dense[4] = 1e-20, 1e25, 1e34, 1e-3
    matrix = scipy.sparse.csr_array(sparse.numpy())
    arrays = [torch.from_numpy(array).to(device) for array in (matrix.indptr, matrix.indices, matrix.data)]
    given, out = laid_out(dense.to(device), layout), torch.empty(3, 9, device=device)
    expected = exact(matrix, dense)
    for name, got in schedules(lambda: spmm_csr(*arrays, given, out), out):
        assert ((got.cpu().double() - expected).abs() <= 2.0**-18 * expected + 2.0**-149).all(), name


@pytest.mark.slow(reason="large matrices through the interpreter")
@pytest.mark.parametrize("device", KERNEL_DEVICES)
def test_csr_at_99_9_percent_sparsity(device):
    arrays, matrix = csr(150, 400, 0.001, device=device)
    dense, out = random(400, 16, seed=1).to(device), torch.empty(150, 16, device=device)
    for name, got in schedules(lambda: spmm_csr(*arrays, dense, out), out):
        assert error(got, exact(matrix, dense)) <= 1e-6, name


@pytest.mark.parametrize("device", KERNEL_DEVICES)
def test_csr_reaches_beyond_2_to_the_31_elements(device):
    """Rows of `dense` and of `out` lie 2^31 elements apart, in memory that is reserved and hardly touched."""
    far = 2**31
    memory = torch.empty(far + 32, dtype=torch.float16, device=device)
    dense = memory.as_strided((2, 8), (far, 1))
    out = memory[16:].as_strided((2, 8), (far, 1))
    dense.copy_(torch.arange(16.0).view(2, 8))
    crow, col = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 2, 3], [0, 1, 1]))
    values = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float16, device=device)
    expected = torch.stack([3 * torch.arange(8.0) + 16, 3 * torch.arange(8.0, 16.0)])
    for name, got in schedules(lambda: spmm_csr(crow, col, values, dense, out), out):
        assert torch.equal(got.cpu().float(), expected), name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_csr_results_repeat_bit_for_bit():
    arrays, _ = csr(500, 400, 0.1, device="cuda")
    dense, out = random(400, 96, seed=1).cuda(), torch.empty(500, 96, device="cuda")
    first = dict(schedules(lambda: spmm_csr(*arrays, dense, out), out))
    for _ in range(5):
        for name, got in schedules(lambda: spmm_csr(*arrays, dense, out), out):
            assert torch.equal(got, first[name]), name


@pytest.mark.parametrize("device", KERNEL_DEVICES)
def test_csr_expanded_operands_and_the_chosen_schedule(device):
    arrays, matrix = csr(20, 16, 0.3, device=device)
    column = random(16, 1, seed=1).to(device)
    out, residual = torch.empty(20, 24, device=device), random(24, seed=2).to(device).expand(20, 24)
    spmm_csr(*arrays, column.expand(16, 24), out, residual=residual)
    assert error(out, exact(matrix, column.expand(16, 24)) + residual.cpu().double()) <= 1e-6


# -- BSR


def bsr(m, k, height, width, density, dtype=torch.float32, index=torch.int32, device="cpu", batch=None):
    """Arrays of a random BSR matrix, its second block row empty, and the whole of it in float64."""
    rows, cols = -(-m // height), -(-k // width)
    kept = torch.rand(rows, cols, generator=torch.Generator().manual_seed(0)) < density
    kept[1:2] = False
    shape = (rows * height, cols * width) if batch is None else (batch, rows * height, cols * width)
    full = random(*shape, seed=2).to(dtype).double()
    full *= kept.repeat_interleave(height, 0).repeat_interleave(width, 1)
    full[..., m:, :] = 0
    full[..., k:] = 0
    blocks = full.unflatten(-1, (cols, width)).unflatten(-3, (rows, height)).transpose(-3, -2)[..., kept, :, :]
    crow = F.pad(kept.sum(1).cumsum(0), (1, 0))
    arrays = crow.to(device, index), kept.nonzero()[:, 1].to(device, index), blocks.to(device, dtype)
    return arrays, full[..., :m, :k]


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize(
    ("block", "dtype", "layout", "index"),
    [
        ((4, 4), torch.float32, "rows", torch.int32), ((8, 8), torch.float16, "columns", torch.int64),
        ((16, 16), torch.bfloat16, "rows", torch.int32), ((32, 32), torch.float16, "rows", torch.int32),
        ((64, 64), torch.float32, "columns", torch.int32), ((128, 128), torch.float16, "rows", torch.int64),
        ((4, 32), torch.float32, "strided", torch.int32), ((32, 8), torch.float16, "unaligned", torch.int32),
        ((12, 20), torch.float32, "rows", torch.int32), ((128, 16), torch.float32, "rows", torch.int32),
        ((1, 3), torch.float32, "rows", torch.int32),
    ],
)  # fmt: skip
def test_bsr_matches_float64(device, block, dtype, layout, index):
    """Blocks that divide the shape and, of the same size, blocks that reach beyond it."""
    for beyond in (0, 1):
        m, k = 3 * block[0] - min(beyond, block[0] - 1), 4 * block[1] - min(beyond, block[1] - 1)
        arrays, full = bsr(m, k, *block, 0.6, dtype=dtype, index=index, device=device)
        dense = laid_out(random(k, 33, seed=1).to(device, dtype), layout)
        out = laid_out(torch.empty(m, 33, dtype=dtype, device=device), layout)
        expected = full @ dense.cpu().double()
        for name, got in schedules(lambda: spmm_bsr(*arrays, dense, out), out, 2):  # noqa: B023
            assert error(got, expected) <= TOLERANCE[dtype], name


@pytest.mark.parametrize("device", KERNEL_DEVICES)
def test_bsr_batches_transposed_blocks_and_spare_capacity(device):
    (crow, col, values), full = bsr(48, 40, 16, 8, 0.5, device=device, batch=2)
    poison = torch.full_like(values[:, :1], torch.nan)
    values = torch.cat([poison, values, poison], 1).mT.contiguous().mT
    col = torch.cat([col[:1] + 1000, col, col[:1] + 1000])
    dense, out = random(2, 40, 24, seed=1).to(device), torch.empty(2, 32, 24, device=device)
    expected = (full @ dense.cpu().double())[:, 16:]
    for name, got in schedules(lambda: spmm_bsr(crow[1:] + 1, col, values, dense, out), out):
        assert error(got, expected) <= 1e-6, name


@pytest.mark.parametrize("device", KERNEL_DEVICES)
def test_bsr_spreads_infinities_to_the_rows_of_blocks_that_meet_them(device):
    """A block's zeros count: 0 · inf in it is NaN, and nowhere else."""
    (crow, col, values), full = bsr(24, 32, 4, 8, 0.4, device=device)
    values[0, 1] = 0
    dense = random(32, 20, seed=1).to(device)
    dense[9, 4] = torch.inf
    met = torch.zeros(24, 20, dtype=torch.bool)
    for block_row in range(6):
        if 1 in col[crow[block_row] : crow[block_row + 1]].tolist():
            met[4 * block_row : 4 * block_row + 4, 4] = True
    assert met.any() and not met[:, 4].all()
    out = torch.empty(24, 20, device=device)
    for name, got in schedules(lambda: spmm_bsr(crow, col, values, dense, out), out):
        assert torch.equal(~got.cpu().isfinite(), met), name


# -- N:M


def n_of_m(m, k, keep, group, dtype=torch.float32, device="cpu", batch=None):
    """Values and indices of a random N:M matrix, and the whole of it in float64."""
    groups = -(-k // group)
    order = torch.rand(m, groups, group, generator=torch.Generator().manual_seed(0)).argsort(-1)[..., :keep]
    index = order.sort(-1).values
    values = random(*((m,) if batch is None else (batch, m)), groups, keep, seed=2).to(dtype)
    values = values * (index + group * torch.arange(groups)[:, None] < k)
    full = torch.zeros(*values.shape[:-1], group, dtype=torch.float64)
    full.scatter_(-1, index.expand(values.shape), values.double())
    return (
        values.flatten(-2).to(device, dtype), index.flatten(-2).to(device, torch.uint8), full.flatten(-2)[..., :k]
    )  # fmt: skip


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize(
    ("keep", "group", "k", "n", "dtype", "layout"),
    [
        (2, 4, 64, 33, torch.float32, "rows"), (1, 4, 70, 5, torch.float16, "columns"),
        (4, 8, 48, 64, torch.bfloat16, "rows"), (3, 5, 33, 16, torch.float32, "strided"),
        (7, 16, 50, 20, torch.float32, "unaligned"), (1, 1, 9, 8, torch.float32, "rows"),
        (2, 4, 128, 16, torch.float16, "columns"), (8, 8, 24, 1, torch.float32, "rows"),
    ],
)  # fmt: skip
def test_n_of_m_matches_float64(device, keep, group, k, n, dtype, layout):
    values, indices, full = n_of_m(37, k, keep, group, dtype, device)
    dense = laid_out(random(k, n, seed=1).to(device, dtype), layout)
    out = laid_out(torch.empty(37, n, dtype=dtype, device=device), layout)
    expected = full @ dense.cpu().double()
    for name, got in schedules(lambda: spmm_nm(values, indices, keep, group, dense, out), out, 2):
        assert error(got, expected) <= TOLERANCE[dtype], name


@pytest.mark.parametrize("device", KERNEL_DEVICES)
def test_n_of_m_batches_row_slices_and_what_is_not_finite(device):
    values, indices, full = n_of_m(40, 36, 2, 4, device=device, batch=2)
    values, indices, full = values[:, 8:35], indices[8:35], full[:, 8:35]
    dense = random(36, 10, seed=1).to(device)
    dense[5, 3], dense[17, 8] = torch.inf, torch.nan
    stored = (full != 0).double()
    clean = dense.cpu().double().nan_to_num(0, 0, 0)
    expected = full @ clean
    expected[stored[..., 17] > 0, 8] = torch.nan
    expected[..., 3] += torch.where(full[..., 5] != 0, full[..., 5] * torch.inf, 0)
    out = torch.empty(2, 27, 10, device=device)
    assert 0 < stored[..., 5].sum() < 54 and 0 < stored[..., 17].sum() < 54
    for name, got in schedules(lambda: spmm_nm(values, indices, 2, 4, dense, out), out, 2):
        torch.testing.assert_close(got.cpu().double(), expected, rtol=1e-5, atol=1e-5, equal_nan=True, msg=name)


def by_entries(full, dense):
    """The float64 product where only what is stored, so is not 0, multiplies."""
    terms = full[..., None] * dense.cpu().double()[..., None, :, :]
    return torch.where(full[..., None] != 0, terms, 0).sum(-2)


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize(("keep", "group", "batch"), [(1, 4, None), (2, 4, 2), (3, 5, None), (4, 8, None)])
def test_filler_of_a_group_is_not_multiplied(device, keep, group, batch):
    """Groups with fewer values than they have places for, and an Inf or NaN where a filler points."""
    values, indices, _ = n_of_m(40, 37, keep, group, device=device, batch=batch)
    values = torch.where(random(*values.shape, seed=3).to(device) < 0, values, 0)
    groups = values.cpu().double().unflatten(-1, (-1, keep))
    full = torch.zeros(*groups.shape[:-1], group, dtype=torch.float64)
    full = full.scatter_(-1, indices.cpu().long().view(40, -1, keep).expand(groups.shape), groups)
    full = full.flatten(-2)[..., :37]
    dense = random(37, 10, seed=1).to(device)
    dense[:, 3], dense[9, 4], dense[:30, 5] = torch.inf, torch.nan, -torch.inf
    expected = by_entries(full, dense)
    assert expected[..., 4].isnan().any() and expected[..., 4].isfinite().any()
    out = torch.empty(expected.shape, device=device)
    for name, got in schedules(lambda: spmm_nm(values, indices, keep, group, dense, out), out, 2):
        torch.testing.assert_close(got.cpu().double(), expected, rtol=1e-5, atol=1e-5, equal_nan=True, msg=name)


# -- as operations


def problems():
    out = torch.empty(48, 40)
    arrays, _ = csr(48, 64, 0.2)
    yield captured(lambda: spmm_csr(*arrays, random(64, 40), out, bias=random(40), activation="relu", skew="mixed"))
    (crow, col, values), _ = bsr(48, 64, 16, 8, 0.5)
    yield captured(lambda: spmm_bsr(crow, col, values.half(), random(64, 40).half(), out.half()))
    values, indices, _ = n_of_m(48, 64, 2, 4)
    yield captured(
        lambda: spmm_nm(values.half(), indices, 2, 4, random(40, 64).half().mT, out, residual=random(48, 40))
    )


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("which", range(3), ids=["csr", "bsr", "nm"])
def test_the_tuner_can_time_and_check_candidates(device, which):
    operation, problem, _ = list(problems())[which]
    where = torch.device(device, 0) if device == "cuda" else torch.device("cpu")
    candidates = operation.candidates(problem, device_of(where))
    assert len(candidates) == len({candidate.name for candidate in candidates}) > 1
    if device == "cpu":
        candidates = [candidates[0], candidates[-1]]
    assert [fault(operation, problem, where, candidate) for candidate in candidates] == [None] * len(candidates)
    signature = operation.signature(problem, H100)
    stand_in = operation.representative(signature)
    assert operation.signature(stand_in, H100).key == signature.key


@pytest.mark.parametrize("capability", ["8.0", "8.6", "9.0", "10.0", ""])
def test_every_card_has_a_configuration(capability):
    for operation, problem, _ in problems():
        assert operation.candidates(problem, Device("some card", capability, "3.6.0"))


def test_float64_and_mixed_dtypes_are_refused_or_gathered():
    arrays, _ = csr(8, 8, 0.5)
    crow, col, values = arrays
    with pytest.raises(TuningError, match="float64"):
        spmm_csr(crow, col, values.double(), random(8, 8).double(), torch.empty(8, 8, dtype=torch.float64))
    mixed, halves = "tensor cores multiply one dtype, not", "splits float32, not"
    for given, other, name, said in ((values, "float16", "halves", halves), (values.half(), "float32", "dense", mixed)):
        right = random(8, 8).to(getattr(torch, other))
        operation, problem, _ = captured(
            lambda given=given, right=right: spmm_csr(crow, col, given, right, torch.empty(8, 8))
        )
        refusal = operation.refusals(problem, H100)[f"spmm_csr_{name}"]
        assert refusal == f"{said} {str(given.dtype).removeprefix('torch.')} with {other}"
    values_of, indices, _ = n_of_m(8, 8, 2, 4)
    operation, problem, _ = captured(
        lambda: spmm_nm(values_of, indices, 2, 4, random(8, 8).half(), torch.empty(8, 8))
    )
    assert operation.refusals(problem, H100) == {"spmm_nm": f"{mixed} float32 with float16"}
    operation, problem, _ = captured(lambda: spmm_csr(*arrays, random(8, 8), torch.empty(8, 8)))
    large = problem._replace(m=2**15, k=2**14)
    assert "268435456" in operation.refusals(large, H100)["spmm_csr_halves"]
    assert operation.refusals(problem, H100)["spmm_csr_dense"] == "float32 is split in halves: spmm_csr_halves"


def test_values_of_any_stride_are_taken_as_they_are_counted():
    crow, col = torch.tensor([0, 1, 2], dtype=torch.int32), torch.tensor([1, 0], dtype=torch.int32)
    values = torch.tensor([2.0, torch.nan, 3.0, torch.nan])[::2]
    out = torch.empty(2, 2)
    for name, got in schedules(lambda: spmm_csr(crow, col, values, torch.eye(2), out), out):
        assert got.tolist() == [[0, 2], [3, 0]], name


def test_the_estimate_of_blocks_counts_the_programs_that_are_launched():
    module = import_module("sparsecomp.lowering.sparse.kernels.spmm_bsr")
    (crow, col, values), _ = bsr(48, 64, 16, 8, 0.5)
    for dense in (random(64, 40), random(3, 64, 33)):
        out = torch.empty(*dense.shape[:-2], 48, dense.shape[-1])
        operation, problem, _ = captured(lambda dense=dense, out=out: spmm_bsr(crow, col, values, dense, out))
        for candidate in operation.candidates(problem, H100):
            known = problem._asdict() | {name: candidate.config[name] for name in ("BM", "BN")}
            count = module.programs.subs({symbol: known[symbol.name] for symbol in module.programs.free_symbols})
            assert candidate.template.prepare(problem, candidate.config).grid == (int(count),)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_estimated_traffic_is_the_bytes_of_the_operands(dtype):
    dense, out = random(64, 40).to(dtype), torch.empty(48, 40, dtype=dtype)
    (crow, col, of_csr), _ = csr(48, 64, 0.2, dtype=dtype)
    (block_crow, block_col, of_bsr), _ = bsr(48, 64, 16, 8, 0.5, dtype=dtype)
    of_nm, indices, _ = n_of_m(48, 64, 2, 4, dtype)
    for name, call, stored in (
        ("spmm_csr_rows", lambda: spmm_csr(crow, col, of_csr, dense, out), (col, of_csr)),
        ("spmm_bsr", lambda: spmm_bsr(block_crow, block_col, of_bsr, dense, out), (of_bsr,)),
        ("spmm_nm", lambda: spmm_nm(of_nm, indices, 2, 4, dense, out), (of_nm, indices)),
    ):
        operation, problem, _ = captured(call)
        (template,) = (one for one in of_operation(operation.name) if one.name == name)
        known = problem._asdict() | {"itemsize": dtype.itemsize}
        count = template.cost.bytes.subs({symbol: known[symbol.name] for symbol in template.cost.bytes.free_symbols})
        assert count == sum(tensor.nbytes for tensor in (dense, out, *stored)), name


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("name", ["spmm_csr_rows", "spmm_csr_merge"])
def test_a_copied_operand_gets_the_whole_epilogue(device, name):
    arrays, matrix = csr(19, 24, 0.3, device=device)
    dense, out = laid_out(random(24, 11, seed=1).to(device), "columns"), torch.empty(19, 11, device=device)
    bias, residual = epilogue(19, 11, "column", True, device)
    expected = finished(exact(matrix, dense), 0.7, bias, "column", residual, "relu")
    operation, problem, tensors = captured(
        lambda: spmm_csr(*arrays, dense, out, bias=bias, residual=residual, activation="relu", scale=0.7)
    )
    (template,) = (one for one in of_operation(operation.name) if one.name == name)
    config = next(config for config in template.space(problem, device_of(out.device)) if config["COPY"])
    template.prepare(problem, config)(*tensors)
    assert error(out, expected) <= 1e-6


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize(("k", "n"), [(1, 2), (64, 64), (65, 63), (63, 65), (129, 130)])
@pytest.mark.parametrize(("batch", "shared"), [(1, False), (3, False), (3, True)])
def test_a_copy_by_rows_has_every_row_and_column(device, k, n, batch, shared):
    """At the edges of its blocks of 64 by 64 too; rows are padded to eight columns, one batch may serve all."""
    from sparsecomp.lowering.sparse.kernels.spmm_csr_rows import row_major_copy

    dense = random(1 if shared else batch, n, k).to(device).mT
    arrays, _ = csr(5, k, 0.5, device=device)
    operand, out = dense.expand(batch, k, n), torch.empty(batch, 5, n, device=device)
    described = output_of(out, None, "column", None, "none", 1.0)
    problem = SpmmCsr.of(*arrays, operand, out, described, "even")
    (size, dtype), launch, by_rows = row_major_copy(problem)
    workspace = torch.full(size, torch.nan, dtype=dtype, device=device)
    launch(dense, workspace)
    width = -(-n // 8) * 8
    assert size == (len(dense) * k, width)
    assert by_rows.dense == (k * width if len(dense) > 1 else 0, width, 1)
    found = workspace.view(len(dense), k, width)
    assert torch.equal(found[..., :n], dense) and found[..., n:].isnan().all()


def test_a_dense_operand_by_columns_is_copied_only_where_the_configuration_says_so():
    (crow, col, values), _ = csr(64, 64, 0.3)
    operation, problem, _ = captured(
        lambda: spmm_csr(crow, col, values, laid_out(random(64, 64), "columns"), torch.empty(64, 64))
    )
    for name, steps in (("spmm_csr_rows", 1), ("spmm_csr_merge", 2)):
        template = next(one for one in of_operation("spmm_csr") if one.name == name)
        found = {config["COPY"]: template.prepare(problem, config) for config in template.space(problem, H100)}
        assert set(found) == {0, 1}
        counts = {copy: len(getattr(made, "steps", [made])) for copy, made in found.items()}
        assert counts == {0: steps, 1: steps + 1}


def test_bad_operands_are_named():
    (crow, col, values), _ = csr(8, 8, 0.5)
    dense, out, blocks = random(8, 4), torch.empty(8, 4), values[:, None, None].expand(-1, 2, 2)
    wrong = [
        (FormatError, "does not fit", lambda: spmm_csr(crow, col, values, dense, out[:7])),
        (FormatError, "bias has shape", lambda: spmm_csr(crow, col, values, dense, out, bias=random(5))),
        (FormatError, "residual has shape", lambda: spmm_csr(crow, col, values, dense, out, residual=dense[:4])),
        (FormatError, "softplus", lambda: spmm_csr(crow, col, values, dense, out, activation="softplus")),
        (FormatError, "skew is", lambda: spmm_csr(crow, col, values, dense, out, skew="odd")),
        (FormatError, "one column index", lambda: spmm_csr(crow, col[1:], values, dense, out)),
        (FormatError, "block rows", lambda: spmm_bsr(crow, col, blocks, dense, out)),
        (FormatError, "are not 2:4", lambda: spmm_nm(dense, col[:24].view(8, 3), 2, 4, dense, out)),
    ]  # fmt: skip
    for kind, message, call in wrong:
        with pytest.raises(kind, match=message):
            call()


# -- builds for cards that need not be present

BUILD = """
FACTORS = ("factor_ptr", "of_row_ptr", "row_factor_ptr", "col_factor_ptr")
import os, re, subprocess, tempfile
from triton import knobs
def stack(built):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        return int(re.search(r"STACK:(\\d+)", subprocess.run(command, capture_output=True, text=True).stdout)[1])
def made(kernel, element, index, constants, capability, **options):
    pointers = {n: element for n in kernel.arg_names if n.endswith("_ptr")}
    pointers |= dict.fromkeys(("crow_ptr", "col_ptr"), index) | {"pieces_ptr": "*fp32", "indices_ptr": "*i8"}
    pointers |= {"bad_ptr": "*i8", "scale": "fp32"} | dict.fromkeys(FACTORS, "*fp32")
    if "halves" in kernel.__name__ or "split" in kernel.__name__:
        pointers |= dict.fromkeys(("a_ptr", "b_ptr", "halves_ptr"), "*fp16")
    types = {n: pointers.get(n, "i32") for n in kernel.arg_names}
    constants = {n: constants[n] for n in kernel.arg_names if n in constants}
    return divisible(kernel, types, constants, capability, **options)
def divisible(kernel, types, constants, capability, **options):
    # as Triton specialises whole rows: every size and stride a multiple of 16
    whole = [n for n in kernel.arg_names if n not in constants and types[n] == "i32" and n != "M"]
    return build(kernel, types, constants, capability, whole=whole, **options)
PLAIN = dict(bias_ptr=None, residual_ptr=None, BIAS_ROWS=False, ACTIVATION="none", dense_n=1, out_n=1)
FULL = dict(BIAS_ROWS=True, ACTIVATION="gelu", dense_k=1, out_m=1)
"""


@pytest.mark.slow(reason="builds for a GPU")
@pytest.mark.parametrize(("capability", "element"), [(80, "*fp32"), (90, "*fp32"), (90, "*bf16")])
def test_csr_kernels_build_without_spills_and_read_whole_vectors(capability, element):
    printed = compile_in_subprocess(
        BUILD
        + f"""
from sparsecomp.lowering.sparse.kernels.spmm_csr_rows import spmm_csr_rows_kernel, copy_rows_kernel
from sparsecomp.lowering.sparse.kernels.spmm_csr_few import spmm_csr_few_kernel
from sparsecomp.lowering.sparse.kernels.spmm_csr_merge import spmm_csr_merge_kernel, finish_rows_kernel
from sparsecomp.lowering.sparse.kernels.spmm_csr_dense import repair_kernel
from sparsecomp.lowering.sparse.kernels.stored_places import densify_kernel
from sparsecomp.lowering.sparse.kernels.spmm_csr_halves import densify_halves_kernel
from sparsecomp.lowering.sparse.kernels.halves_product import halves_product_kernel, split_rows_kernel
for kernel, index, epilogue, sizes, warps in (
    (spmm_csr_rows_kernel, "*i32", PLAIN, dict(FILLED=False, BR=1, U=1, E=8, BN=128, GROUP=0), 1),
    (spmm_csr_rows_kernel, "*i32", PLAIN, dict(FILLED=True, BR=2, U=8, E=2, BN=64, GROUP=8), 1),
    (spmm_csr_rows_kernel, "*i64", FULL, dict(FILLED=False, BR=4, U=1, E=32, BN=1, GROUP=0), 1),
    (spmm_csr_few_kernel, "*i32", dict(dense_k=1) | PLAIN, dict(FILLED=False, BR=4, BN=16, E=32), 4),
    (spmm_csr_few_kernel, "*i64", dict(dense_k=1) | FULL, dict(FILLED=True, BR=2, BN=8, E=64), 2),
    (spmm_csr_merge_kernel, "*i32", PLAIN, dict(FILLED=True, T=256, BR=1, U=8, E=1, BN=128), 2),
    (finish_rows_kernel, "*i64", FULL, dict(T=256, E=8, BN=128), 2),
    (repair_kernel, "*i32", PLAIN, dict(FILLED=True, BM=128, BN=128, GROUP=8, ROWS=16, BR=2, E=4, WIDE=64), 4),
    (densify_kernel, "*i32", dict(), dict(ZEROS=4096, ENTRIES=256, VECTOR=16), 8),
    (densify_kernel, "*i64", dict(), dict(ZEROS=4096, ENTRIES=4096, VECTOR=16), 8),
    (densify_halves_kernel, "*i32", dict(), dict(ZEROS=4096, ENTRIES=128), 4),
    (split_rows_kernel, "*i32", dict(x_l=1), dict(BR=4, BL=512), 4),
    (copy_rows_kernel, "*i32", dict(dense_k=1), dict(BK=64, BN=64), 4),
):
    built = made(kernel, "{element}", index, epilogue | sizes, {capability}, num_warps=warps)
    several = kernel is spmm_csr_rows_kernel and epilogue is PLAIN or sizes.get("ENTRIES") == 4096
    print(stack(built), not several or "ld.global.v4" in built.asm["ptx"])
"""
    )
    assert printed.split() == ["0", "True"] * 13


@pytest.mark.slow(reason="builds for a GPU")
@pytest.mark.parametrize(
    ("capability", "element", "precision"),
    [(80, "*fp32", "tf32x3"), (90, "*fp32", "tf32x3"), (80, "*bf16", "ieee"), (90, "*fp16", "ieee")],
)
def test_tensor_core_kernels_build_without_spills(capability, element, precision):
    """On Hopper with warpgroup instructions where tiles have 64 rows, and copies in flight everywhere."""
    printed = compile_in_subprocess(
        BUILD
        + f"""
from sparsecomp.lowering.sparse.kernels.dense_product import product_kernel
from sparsecomp.lowering.sparse.kernels.halves_product import halves_product_kernel
from sparsecomp.lowering.sparse.kernels.spmm_bsr import spmm_bsr_kernel
from sparsecomp.lowering.sparse.kernels.spmm_nm import nm_repair_kernel, spmm_nm_kernel
depth, half = (32, False) if "{precision}" == "tf32x3" else (64, True)
tall, low = (128, 64) if half or {capability} == 90 else (64, 32)
for kernel, sizes, warps in (
    (halves_product_kernel, dict(BM=128, BN=2 * low, BK=32, GROUP=8, a_k=1, b_n=1, col_factor_ptr=None), 8)
    if not half else (product_kernel, dict(BM=128, BN=128, BK=depth, GROUP=8, a_k=1, b_n=1), 8),
    (spmm_bsr_kernel, dict(HEIGHT=64, WIDTH=64, WHOLE=True, BM=64, BN=128, BK=depth, values_j=1), 8),
    (spmm_bsr_kernel, dict(HEIGHT=16, WIDTH=16, WHOLE=True, BM=16, BN=128, BK=depth, values_j=1), 4),
    (spmm_bsr_kernel, dict(HEIGHT=4, WIDTH=4, WHOLE=False, BM=16, BN=64, BK=depth, values_j=1), 2),
    (spmm_nm_kernel, dict(KEEP=2, MEMBERS=4, WIDE=4, BM=tall, BN=128, G=depth // 4, GROUP=8), 8),
    (spmm_nm_kernel, dict(KEEP=2, MEMBERS=4, WIDE=4, BM=low, BN=16, G=depth // 4, GROUP=8), 4),
    (nm_repair_kernel, dict(KEEP=2, MEMBERS=4, BM=128, BN=128, GROUP=8, ROWS=16, E=8), 4),
):
    built = made(kernel, "{element}", "*i32", PLAIN | dict(PRECISION="{precision}") | sizes, {capability},
                 num_warps=warps, num_stages=3)
    ptx = built.asm["ptx"]
    product = "wgmma" if "wgmma.mma_async" in ptx else "mma" if "mma.sync" in ptx else "none"
    print(stack(built), product, "cp.async" in ptx)
"""
    )
    large = "wgmma" if capability == 90 else "mma"
    kinds = [large, large, "mma", "mma", large, large, "none"]
    assert printed.split() == [word for kind in kinds for word in ("0", kind, str(kind != "none"))]


@pytest.mark.slow(reason="builds for a GPU")
def test_kernels_build_for_sizes_of_one():
    """Triton makes a constant of an argument that is 1."""
    printed = compile_in_subprocess(
        BUILD
        + """
from sparsecomp.lowering.sparse.kernels.spmm_csr_rows import spmm_csr_rows_kernel, copy_rows_kernel
from sparsecomp.lowering.sparse.kernels.spmm_csr_few import spmm_csr_few_kernel
from sparsecomp.lowering.sparse.kernels.spmm_csr_merge import spmm_csr_merge_kernel, finish_rows_kernel
from sparsecomp.lowering.sparse.kernels.spmm_csr_dense import repair_kernel
from sparsecomp.lowering.sparse.kernels.stored_places import densify_kernel
from sparsecomp.lowering.sparse.kernels.spmm_csr_halves import densify_halves_kernel
from sparsecomp.lowering.sparse.kernels.halves_product import halves_product_kernel, split_rows_kernel
from sparsecomp.lowering.sparse.kernels.dense_product import product_kernel
from sparsecomp.lowering.sparse.kernels.spmm_bsr import spmm_bsr_kernel
from sparsecomp.lowering.sparse.kernels.spmm_nm import nm_repair_kernel, spmm_nm_kernel
sizes = dict(BR=16, U=1, E=8, BN=16, T=128, BM=32, BK=32, GROUP=8, ROWS=16, WIDE=4, ZEROS=64, ENTRIES=128, VECTOR=16,
             HEIGHT=1, BL=64, WIDTH=1, WHOLE=True, KEEP=1, MEMBERS=1, G=32, PRECISION="tf32x3", BIAS_ROWS=False,
             FILLED=True, ACTIVATION="silu")
for kernel in (spmm_csr_rows_kernel, copy_rows_kernel, spmm_csr_few_kernel, spmm_csr_merge_kernel, finish_rows_kernel,
               densify_kernel, repair_kernel, product_kernel, spmm_bsr_kernel, nm_repair_kernel, spmm_nm_kernel,
               densify_halves_kernel, split_rows_kernel, halves_product_kernel):
    ones = {n: 1 for n in kernel.arg_names if not n.endswith("_ptr") and n not in sizes and n != "scale"}
    own = dict(WIDE=1) if kernel is spmm_nm_kernel else {}
    print(len(made(kernel, "*fp32", "*i32", sizes | ones | own, 90).asm["cubin"]) > 0)
"""
    )
    assert printed.split() == ["True"] * 14


def batches():
    """Two matrices of one pattern, each with a dense operand of its own."""
    (crow, col, values), _ = csr(48, 64, 0.2)
    out = torch.empty(2, 48, 40)
    yield captured(lambda: spmm_csr(crow, col, torch.stack([values] * 2), random(2, 64, 40), out))
    (crow, col, values), _ = bsr(48, 64, 16, 8, 0.5)
    yield captured(lambda: spmm_bsr(crow, col, torch.stack([values] * 2), random(2, 64, 40), out))
    values, indices, _ = n_of_m(48, 64, 2, 4)
    yield captured(lambda: spmm_nm(torch.stack([values] * 2), indices, 2, 4, random(2, 64, 40), out))


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("which", range(3), ids=["csr", "bsr", "nm"])
def test_no_two_elements_of_what_is_timed_for_a_batch_share_a_place(which):
    operation, problem, _ = list(batches())[which]
    stand_in = operation.representative(operation.signature(problem, H100))
    operands = [one for one in operation.operands(stand_in, torch.device("cpu"), 0) if one is not None]
    assert [one.shape[0] for one in operands if one.dim() > 1 and one.shape[0] == 2] == [2, 2, 2]
    for one in operands:
        places = sum(
            (torch.arange(size) * stride).view(-1, *[1] * (one.dim() - 1 - dim))
            for dim, (size, stride) in enumerate(zip(one.shape, one.stride(), strict=True))
        )
        assert places.unique().numel() == one.numel()
