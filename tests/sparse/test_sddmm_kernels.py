"""Sampled dense-dense products in every schedule against float64, through the interpreter and on the GPU."""

import pytest
import torch
from compile_kernel import compile_in_subprocess
from kernel_devices import KERNEL_DEVICES
from kernel_schedules import captured, schedules

from sparsecomp.errors import FormatError, TuningError
from sparsecomp.lowering.cache.signature import Device, device_of
from sparsecomp.lowering.sparse.sddmm import sddmm
from sparsecomp.lowering.tuning.trial import fault

pytest.importorskip("triton")

pytestmark = pytest.mark.quick_cases(2)

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
TOLERANCE = {F32: 1e-6, F16: 1e-3, BF16: 8e-3}
H100 = Device("NVIDIA H100 80GB HBM3", "9.0", "3.6.0")


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def pattern(m, n, density, index=torch.int32, device="cpu"):
    """Pointers, columns and rows of random places; row 1 is empty."""
    kept = torch.rand(m, n, generator=torch.Generator().manual_seed(0)) < density
    kept[1:2] = False
    row, col = kept.nonzero().unbind(1)
    crow = torch.nn.functional.pad(kept.sum(1).cumsum(0), (1, 0))
    return crow.to(device, index), col.to(device, index), row, col


def error(out, expected):
    return ((out.double().cpu() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize(
    ("dtype", "out_dtype", "index", "d", "layout"),
    [
        (F32, F32, torch.int32, 40, "rows"), (F32, F32, torch.int64, 33, "columns"),
        (F16, F32, torch.int32, 64, "rows"), (F16, F16, torch.int32, 100, "mixed"),
        (BF16, BF16, torch.int64, 16, "rows"), (F32, F16, torch.int32, 1, "rows"),
        (F32, F32, torch.int32, 24, "strided"),
    ],
)  # fmt: skip
def test_matches_float64(device, dtype, out_dtype, index, d, layout):
    crow, col, rows, cols = pattern(37, 45, 0.2, index, device)
    a, b = random(37, d).to(device, dtype), random(45, d, seed=1).to(device, dtype)
    if layout in ("columns", "mixed"):
        b = b.mT.contiguous().mT
    if layout == "columns":
        a = a.mT.contiguous().mT
    if layout == "strided":
        a, b = a.repeat_interleave(2, 1)[:, ::2], b.repeat_interleave(2, 0)[::2]
    out = torch.empty(col.numel(), dtype=out_dtype, device=device)
    expected = 0.3 * (a.cpu().double()[rows] * b.cpu().double()[cols]).sum(1)
    for name, got in schedules(lambda: sddmm(crow, col, a, b, out, scale=0.3), out, 2):
        assert error(got, expected) <= TOLERANCE[out_dtype], name


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("shared", ["none", "a", "b"])
def test_batches_share_a_pattern(device, shared):
    crow, col, rows, cols = pattern(12, 20, 0.3, device=device)
    a = random(12, 16).to(device) if shared == "a" else random(3, 12, 16).to(device)
    b = random(20, 16, seed=1).to(device) if shared == "b" else random(3, 20, 16, seed=1).to(device)
    out = torch.empty(3, col.numel(), device=device)
    left, right = a.cpu().double().expand(3, 12, 16), b.cpu().double().expand(3, 20, 16)
    expected = (left[:, rows] * right[:, cols]).sum(-1)
    for name, got in schedules(lambda: sddmm(crow, col, a, b, out), out):
        assert error(got, expected) <= 1e-6, name


@pytest.mark.parametrize("device", KERNEL_DEVICES)
def test_row_slices_and_spare_capacity_are_neither_read_nor_written(device):
    crow, col, rows, cols = pattern(30, 25, 0.2, device=device)
    wild = torch.full((9,), 2**30, dtype=torch.int32, device=device)
    a, b = random(10, 20).to(device), random(25, 20, seed=1).to(device)
    padded = torch.cat([wild, col, wild])
    out = torch.empty(padded.numel(), device=device)
    inside = (rows >= 12) & (rows < 22)
    expected = (a.cpu().double()[rows[inside] - 12] * b.cpu().double()[cols[inside]]).sum(1)
    for name, got in schedules(lambda: sddmm(crow[12:23] + 9, padded, a, b, out), out):
        first = int(crow[12]) + 9
        last = first + int(inside.sum())
        assert error(got[first:last], expected) <= 1e-6, name
        assert got[:first].isnan().all() and got[last:].isnan().all(), name


@pytest.mark.parametrize("device", KERNEL_DEVICES)
def test_what_is_not_finite_reaches_its_own_places_only(device):
    crow, col, rows, cols = pattern(20, 30, 0.3, device=device)
    a, b = random(20, 16).to(device), random(30, 16, seed=1).to(device)
    a[4, 3], b[7, 2], b[9, 0] = torch.nan, torch.inf, -torch.inf
    out = torch.empty(col.numel(), device=device)
    touched = (rows == 4) | (cols == 7) | (cols == 9)
    for name, got in schedules(lambda: sddmm(crow, col, a, b, out), out):
        assert torch.equal(~got.cpu().isfinite(), touched), name


@pytest.mark.parametrize("device", KERNEL_DEVICES)
def test_large_times_small_is_in_range_however_large_and_small(device):
    """A large number that meets a zero must not hide the small ones of its row."""
    crow, col, rows, cols = pattern(12, 15, 0.5, device=device)
    a, b = torch.zeros(12, 16, device=device), torch.zeros(15, 16, device=device)
    a[:, 0], a[:, 1], b[:, 2], b[:, 1] = 1e-34, 1e-40, 1e34, 1e25
    a[3, :3], b[4, :3] = torch.tensor([3e38, 0.0, 0.0]), torch.tensor([1e-25, 0.0, 0.0])
    out = torch.empty(col.numel(), device=device)
    expected = (a.cpu().double() @ b.cpu().double().T)[rows, cols]
    for name, got in schedules(lambda: sddmm(crow, col, a, b, out), out):
        assert ((got.cpu().double() - expected).abs() <= 2.0**-18 * expected.abs() + 2.0**-149).all(), name


@pytest.mark.parametrize("device", KERNEL_DEVICES)
def test_edges(device):
    """Nothing stored, no depth, one element, and one row that holds everything."""
    crow, col = (torch.tensor(x, dtype=torch.int64, device=device) for x in ([0, 1], [0]))
    one, out = torch.full((1, 1), 3.0, device=device), torch.empty(1, device=device)
    for name, got in schedules(lambda: sddmm(crow, col, one, one / 2, out), out):
        assert got.item() == 4.5, name
    for name, got in schedules(lambda: sddmm(crow, col, one[:, :0], one[:, :0], out), out):
        assert got.item() == 0, name
    assert captured(lambda: sddmm(crow[:1].expand(2), col[:0], one, one, out[:0])) is None
    counts = torch.zeros(50, dtype=torch.int64)
    counts[17] = 300
    crow = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(device)
    col = torch.arange(300, device=device)
    a, b, out = random(50, 24).to(device), random(300, 24, seed=1).to(device), torch.empty(300, device=device)
    expected = b.cpu().double() @ a[17].cpu().double()
    for name, got in schedules(lambda: sddmm(crow, col, a, b, out, skew="skewed"), out):
        assert error(got, expected) <= 1e-6, name


@pytest.mark.parametrize("device", KERNEL_DEVICES)
def test_rows_lie_beyond_2_to_the_31_elements(device):
    far = 2**31
    a = torch.empty(far + 8, dtype=torch.float16, device=device).as_strided((2, 8), (far, 1))
    a.copy_(torch.arange(16.0).view(2, 8))
    crow, col = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 1, 2], [0, 1]))
    b, out = torch.eye(2, 8, device=device).half(), torch.empty(2, device=device)
    for name, got in schedules(lambda: sddmm(crow, col, a, b, out), out):
        assert got.tolist() == [0, 9], name


@pytest.mark.parametrize("device", KERNEL_DEVICES)
def test_the_tuner_can_time_and_check_candidates(device):
    crow, col, _, _ = pattern(48, 40, 0.2)
    a, b, out = random(2, 24, 48).mT, random(40, 24), torch.empty(2, col.numel())
    operation, problem, _ = captured(lambda: sddmm(crow, col, a, b, out, skew="mixed"))
    where = torch.device(device, 0) if device == "cuda" else torch.device("cpu")
    candidates = operation.candidates(problem, device_of(where))
    assert {candidate.template.name for candidate in candidates} == {"sddmm", "sddmm_dense"}
    if device == "cpu":
        candidates = [candidates[0], candidates[-1]]
    assert [fault(operation, problem, where, candidate) for candidate in candidates] == [None] * len(candidates)
    signature = operation.signature(problem, H100)
    assert operation.signature(operation.representative(signature), H100).key == signature.key
    assert "268435456" in operation.refusals(problem._replace(m=2**15, n=2**13), H100)["sddmm_dense"]


def test_bad_operands_are_named():
    crow, col, _, _ = pattern(8, 9, 0.4)
    a, b, out = random(8, 5), random(9, 5), torch.empty(col.numel())
    with pytest.raises(TuningError, match="float64"):
        sddmm(crow, col, a.double(), b.double(), out.double())
    for call in (
        lambda: sddmm(crow, col, a[:7], b, out), lambda: sddmm(crow, col, a, b[:, :4], out),
        lambda: sddmm(crow, col, a, b.half(), out), lambda: sddmm(crow, col, a, b, out[1:]),
        lambda: sddmm(crow, col, a, b, out, skew="odd"), lambda: sddmm(crow.long(), col, a, b, out),
        lambda: sddmm(crow, col, a.expand(2, 8, 5), b, out),
        lambda: sddmm(crow, col, a.expand(col.numel(), 8, 5), b, out),
        lambda: sddmm(crow, col, a.expand(2, 8, 5), b.expand(3, 9, 5), out.expand(2, -1)),
    ):  # fmt: skip
        with pytest.raises(FormatError, match="do not give values|one value a column"):
            call()


@pytest.mark.slow(reason="builds for a GPU")
@pytest.mark.parametrize(("capability", "element"), [(80, "*fp32"), (90, "*bf16")])
def test_kernels_build(capability, element):
    """Also for sizes of one, which Triton makes constants; the dot products read whole vectors."""
    printed = compile_in_subprocess(
        f"""
        from sparsecomp.lowering.sparse.kernels.sddmm import sddmm_kernel
        from sparsecomp.lowering.sparse.kernels.sddmm_dense import sample_kernel
        from sparsecomp.lowering.sparse.kernels.sddmm_few import sddmm_few_kernel
        few = sddmm_few_kernel, dict(BR=8, BD=8, E=32)
        for kernel, sizes in ((sddmm_kernel, dict(P=32, BD=128)), (sample_kernel, dict(P=512)), few):
            pointers = dict(crow_ptr="*i32", col_ptr="*i32", a_ptr="{element}", b_ptr="{element}", out_ptr="{element}",
                            full_ptr="*fp32", scale="fp32")
            types = {{n: pointers.get(n, "i32") for n in kernel.arg_names}}
            ones = {{n: 1 for n in kernel.arg_names if n not in pointers and n not in sizes}}
            print(len(build(kernel, types, sizes | ones, {capability}).asm["cubin"]) > 0)
            near = ("a_m", "b_n") if kernel is sddmm_few_kernel else ("a_d", "b_d")
            constants = sizes | {{n: 1 for n in near if n in kernel.arg_names}}
            whole = {{"D", "a_b", "a_m", "b_b", "b_n"}} - {{*near}}
            built = build(kernel, types, constants, {capability}, whole=whole, num_warps=4)
            ptx = built.asm["ptx"]
            print(".local" not in ptx, kernel is not sddmm_kernel or "ld.global.v4" in ptx)
        """
    )
    assert printed.split() == ["True"] * 9
