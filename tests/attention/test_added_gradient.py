"""Gradients by numbers that are added to scores: their kernel, the operator and attention, beside float64."""

import math

import pytest
import torch
import torch.nn.functional as F
from candidates import check_candidates
from compile_kernel import compile_in_subprocess
from kernel_devices import KERNEL_DEVICES, graph_of, needs_triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from sparsecomp.attention import LocalWindow, attention
from sparsecomp.errors import MaskError
from sparsecomp.lowering.attention import block_attention as lowered
from sparsecomp.lowering.attention import block_attention_gradients as lowered_gradients
from sparsecomp.lowering.attention.added_gradient import ATTENTION_BY_ADDED, AddedGradient
from sparsecomp.lowering.cache.signature import Device, KernelSignature
from sparsecomp.reference.attention.block_attention import Scoring
from sparsecomp.reference.attention.scan import scanned

BATCH, HEADS, Q_LEN, K_LEN = 2, 4, 70, 90
SIZES = {
    "heads": (1, 4, 70, 90), "batch entries": (2, 1, 70, 90), "one for all": (1, 1, 70, 90), "each": (2, 4, 70, 90),
    "of keys": (1, 4, 1, 90), "of queries": (2, 4, 70, 1), "a number": (1, 4, 1, 1),
}  # fmt: skip


def numbers(sizes: tuple[int, ...], dropped: bool, dtype: torch.dtype = torch.float64) -> Tensor:
    """Of which a third drop a pair; the first query of the first head drops all of its own, if there are such."""
    random = torch.Generator().manual_seed(1)
    found = torch.randn(sizes, generator=random, dtype=dtype)
    if dropped:
        found[torch.rand(sizes, generator=random) < 0.3] = -math.inf
        found[:, :1, :1, : K_LEN if sizes[2] == Q_LEN else 0] = -math.inf
    return found


def operands(dtype: torch.dtype, kv_heads: int = 2) -> list[Tensor]:
    random = torch.Generator().manual_seed(0)
    shapes = ((BATCH, HEADS, Q_LEN, 16), (BATCH, kv_heads, K_LEN, 16), (BATCH, kv_heads, K_LEN, 24))
    return [torch.randn(shape, generator=random).to(dtype).requires_grad_() for shape in shapes]


def torchs(q: Tensor, k: Tensor, v: Tensor, added: Tensor) -> Tensor:
    k, v = (one.repeat_interleave(q.shape[1] // one.shape[1], 1) for one in (k, v))
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, added)


@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("name", SIZES)
def test_attention_beside_torchs(name: str, dropped: bool) -> None:
    given, added = operands(torch.float64), numbers(SIZES[name], dropped).requires_grad_()
    found, right = attention(*given, added), torchs(*given, added)
    grad = torch.randn(right.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    pairs = zip((found, *torch.autograd.grad(found, (*given, added), grad)),
                (right, *torch.autograd.grad(right, (*given, added), grad)), strict=True)  # fmt: skip
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_it_is_taken_where_nothing_else_wants_a_gradient() -> None:
    given, added = [one.detach() for one in operands(torch.float64)], numbers(SIZES["heads"], True).requires_grad_()
    (found,) = torch.autograd.grad(attention(*given, added).square().sum(), added)
    (right,) = torch.autograd.grad(torchs(*given, added).square().sum(), added)
    torch.testing.assert_close(found, right, rtol=1e-10, atol=1e-12)


@pytest.mark.slow(reason="differentiates twice, by differences")
def test_derivatives_of_all_orders() -> None:
    random = torch.Generator().manual_seed(0)
    given = [torch.randn(shape, generator=random, dtype=torch.float64, requires_grad=True)
             for shape in ((2, 2, 3, 2), (2, 1, 4, 2), (2, 1, 4, 2), (1, 2, 3, 4))]  # fmt: skip
    assert torch.autograd.gradcheck(attention, given)
    assert torch.autograd.gradgradcheck(attention, given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_of_large_numbers(dtype: torch.dtype) -> None:
    """Which are levelled, by which their gradients do not change."""
    given, added = operands(dtype), (numbers(SIZES["heads"], False) + 1e4).to(dtype).requires_grad_()
    exact = [one.detach().double().requires_grad_() for one in (*given, added)]
    (found,) = torch.autograd.grad(attention(*given, added).square().sum(), added)
    (right,) = torch.autograd.grad(torchs(*exact).square().sum(), exact[3])
    torch.testing.assert_close(found.double(), right, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("device", KERNEL_DEVICES)
def test_zeros_beside_large_numbers(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is added in blocks of zeros alone: of what levelling leaves, not of what was given."""
    random, added = torch.Generator().manual_seed(0), torch.zeros(1, 1, 64, 192)
    added[..., :20] = 70.0
    q, k, v = (torch.randn(1, 1, n, 16, generator=random) for n in (64, 192, 192))
    q, k, v, added = (one.to(device) for one in (q, k, v, added))
    out, sums = torch.empty_like(q), torch.empty(1, 1, 64, device=device)

    def by_kernels(q, k, v, blocks, added, **how):
        lowered.block_attention(q, k, v, blocks[4:], Scoring(0.25, added=added), out, sums)
        return out, sums

    monkeypatch.setattr("sparsecomp.attention.functional.attend_blocks", by_kernels)
    attention(q, k, v, added)
    torch.testing.assert_close(out, torchs(q, k, v, added), rtol=1e-5, atol=1e-5)


def test_dropout_and_a_gradient_of_the_logsumexp() -> None:
    """By numbers alone the result is differentiable: differences of it are what gradients say."""
    given, added = [one.detach() for one in operands(torch.float64)], numbers(SIZES["heads"], False)
    lists = scanned(added, Q_LEN, K_LEN, (32, 64), True)[4:]
    seed, along = torch.tensor([5]), torch.randn(added.shape, dtype=torch.float64)

    def summed(added: Tensor) -> Tensor:
        out, sums = torch.ops.sparsecomp.block_attention.default(
            *given, list(lists), 0.3, 2.0, None, added, seed, 40000
        )  # fmt: skip
        return out.square().sum() + sums.sin().sum()

    (found,) = torch.autograd.grad(summed(added.requires_grad_()), added)
    step = 1e-5 * along
    difference = (summed(added.detach() + step) - summed(added.detach() - step)) / 2e-5
    torch.testing.assert_close((found * along).sum(), difference, rtol=1e-7, atol=1e-7)


def test_lists_that_tell_more_apart() -> None:
    given, added = operands(torch.float32), torch.zeros(1, 1, Q_LEN, K_LEN, requires_grad=True)
    blocks = scanned(torch.zeros(1, HEADS, Q_LEN, K_LEN), Q_LEN, K_LEN, (32, 32), True)[4:]
    out, _ = torch.ops.sparsecomp.block_attention.default(*given, list(blocks), 0.3, 0.0, None, added)
    with pytest.raises(MaskError, match="by expand"):
        out.sum().backward()


TOLERANCE = {torch.float32: 4e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", SIZES)
@pytest.mark.quick_cases(2)
def test_kernels_beside_float64(name: str, dtype: torch.dtype, device: str) -> None:
    """Strided operands, blocks of all kinds, a cap, a gradient of the logsumexp, numbers of another dtype."""
    added = numbers(SIZES[name], True).float()
    given = [one.detach() for one in operands(dtype)]
    wide = [one.double().requires_grad_() for one in (*given, added)]
    blocks = scanned(added, Q_LEN, K_LEN, (64, 32), True)[4:]
    scores = 2 * torch.tanh(wide[0] @ wide[1].repeat_interleave(2, 1).mT * 0.15) + wide[3]
    some = (scores > -torch.inf).any(-1, keepdim=True)
    scores = scores.where(some, 0)
    sums = scores.logsumexp(-1).where(some[..., 0], 0)
    right = torch.softmax(scores, -1) * some @ wide[2].repeat_interleave(2, 1)
    random = torch.Generator().manual_seed(4)
    grad, beside = torch.randn(right.shape, generator=random).to(dtype), torch.randn(sums.shape, generator=random)
    by = torch.autograd.grad((right, sums), wide, (grad.double(), beside.double()))

    q, k, v = (one.to(device).transpose(1, 2).contiguous().transpose(1, 2) for one in given)
    grad, beside, added = grad.to(device), beside.to(device), added.to(device)
    blocks, scoring = [one.to(device) for one in blocks], Scoring(0.3, 2.0, added=added)
    out, logsumexp = torch.empty_like(grad), torch.empty(sums.shape, device=device)
    lowered.block_attention(q, k, v, blocks, scoring, out, logsumexp)
    found = [torch.full_like(one, torch.nan) for one in (q, k, v, added)]
    lowered_gradients.block_attention_gradients(grad, q, k, v, out, logsumexp, beside, blocks, scoring, *found)
    for one, other in zip(found, by, strict=True):
        error = torch.linalg.vector_norm(one.cpu().double() - other)
        assert error <= TOLERANCE[dtype] * torch.linalg.vector_norm(other)


@pytest.mark.parametrize("device", KERNEL_DEVICES)
def test_windows_of_many_sequences(device: str) -> None:
    """One short mask for many: sums are in parts, and two calls give the same bits."""
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(12, 2, 20, 8, generator=random).to(device).requires_grad_() for _ in range(3))
    added = torch.randn(1, 2, 20, 20, generator=random).to(device).requires_grad_()
    problem = _problem("float32", (12, 2, 20, 20), (1, 2, 20, 20))
    assert problem.sums > 1
    blocks = [one.to(device) for one in scanned(added.detach().cpu(), 20, 20, (64, 64), True)[4:]]
    scoring, out, sums = Scoring(0.3, added=added.detach()), torch.empty_like(q), torch.empty(12, 2, 20, device=device)
    q, k, v = (one.detach() for one in (q, k, v))
    lowered.block_attention(q, k, v, blocks, scoring, out, sums)
    results = []
    for _ in range(2):
        found = [torch.full_like(one, torch.nan) for one in (q, k, v, scoring.added)]
        lowered_gradients.block_attention_gradients(2 * out, q, k, v, out, sums, None, blocks, scoring, *found)
        results.append(found[3])
    assert torch.equal(*results)
    exact = [one.double().requires_grad_() for one in (q, k, v, scoring.added)]
    right = torch.softmax(exact[0] @ exact[1].mT * 0.3 + exact[3], -1) @ exact[2]
    (by,) = torch.autograd.grad(right.square().sum(), exact[3])
    torch.testing.assert_close(results[0].double(), by, rtol=1e-4, atol=1e-4)


H100 = Device("NVIDIA H100 80GB HBM3", "9.0", "3.6.0")


def _problem(
    dtype: str, sizes: tuple[int, int, int, int], added: tuple[int, int, int, int], depth: int = 16,
    block: tuple[int, int] = (64, 64), device: Device = H100,
) -> AddedGradient:  # fmt: skip
    batch, heads, q_len, k_len = sizes
    given = {"batch": batch, "heads": heads, "q_len": q_len, "k_len": k_len, "width": -(-k_len // block[1]),
             "k_width": -(-q_len // block[0])}  # fmt: skip
    apart = (size > 1 for size in added)
    parameters = {
        "group": 1, "depth": depth, "v_depth": depth, "block_q": block[0], "block_k": block[1],
        **dict.fromkeys(("capped", "biased", "added", "dropped"), 1),
        **dict(zip(("added_batch", "added_heads", "added_rows"), map(int, apart), strict=False)),
    }  # fmt: skip
    return ATTENTION_BY_ADDED.representative(KernelSignature(
        "attention_by_added", device, dtypes=(dtype,), sizes=tuple(given.items()), parameters=tuple(parameters.items())
    ))  # fmt: skip


@pytest.mark.slow(reason="holds configurations against float64")
@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", SIZES)
def test_the_tuner_can_check_candidates(name: str, dtype: str, device: str) -> None:
    problem = _problem(dtype, (BATCH, HEADS, Q_LEN, K_LEN), SIZES[name])
    check_candidates(ATTENTION_BY_ADDED, problem, device, 2)
    signature = ATTENTION_BY_ADDED.signature(problem, H100)
    again = ATTENTION_BY_ADDED.representative(signature)
    assert ATTENTION_BY_ADDED.signature(again, H100).key == signature.key


@needs_triton
@pytest.mark.parametrize("capability", ["8.0", "8.6", "9.0"])
@pytest.mark.parametrize(("dtype", "depth"), [("float32", 128), ("bfloat16", 256), ("float16", 16)])
def test_every_depth_has_kernels_on_every_card(dtype: str, depth: int, capability: str) -> None:
    card = Device("card", capability, "3.6.0")
    problem = _problem(dtype, (1, 2, 4096, 4096), (1, 2, 4096, 4096), depth, (128, 128), card)
    assert ATTENTION_BY_ADDED.candidates(problem, card)


@pytest.mark.slow(reason="compiles the largest configurations")
@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile_and_fit_in_shared_memory(capability: int) -> None:
    kinds = [("float32", "fp32", 64), ("float32", "fp32", 128), ("bfloat16", "bf16", 64), ("bfloat16", "bf16", 128),
             ("float16", "fp16", 256)]  # fmt: skip
    printed = compile_in_subprocess(
        f"""
        from sparsecomp.lowering.attention.added_gradient import ATTENTION_BY_ADDED
        from sparsecomp.lowering.attention.kernels.attention_by_added import shared_of_added
        from sparsecomp.lowering.cache.signature import Device, KernelSignature
        device = Device("card", "{capability / 10}", "3.6.0")
        own = dict(logsumexp_ptr="*fp32", delta_ptr="*fp32", alibi_ptr="*fp32", added_ptr="*fp32", seed_ptr="*i64",
                   out_ptr="*fp32", part_ptr="*fp32", scale="fp32", cap="fp32")
        own |= dict.fromkeys(("count_ptr", "index_ptr", "tile_ptr", "bits_ptr"), "*i32")
        for dtype, short, depth in {kinds}:
            sizes = dict(batch=2, heads=2, q_len=512, k_len=512, width=4, k_width=4)
            given = dict(group=1, depth=depth, v_depth=depth, block_q=64, block_k=64, capped=1, biased=1, added=1)
            given |= dict(dropped=1, added_batch=0, added_heads=1, added_rows=1)
            problem = ATTENTION_BY_ADDED.representative(KernelSignature(
                "", device, dtypes=(dtype,), sizes=tuple(sizes.items()), parameters=tuple(given.items())))
            most = max(ATTENTION_BY_ADDED.candidates(problem, device),
                       key=lambda one: shared_of_added(problem, one.config))
            made = most.template.prepare(problem, most.config)
            for launch in [step.launch for step in made.steps]:
                fixed = dict(launch.named)
                options = {{name: fixed.pop(name) for name in ("num_warps", "num_stages") if name in fixed}}
                types = {{n: own.get(n, "*" + short if n.endswith("_ptr") else "i32") for n in launch.kernel.arg_names}}
                rows = [n for n in launch.kernel.arg_names if n.endswith(("_row", "_head", "_batch"))]
                built = build(launch.kernel, types, fixed, {capability}, whole=rows, **options)
                fits = built.metadata.shared <= shared_of_added(problem, most.config)
                print(fits, dtype, depth, most.config, built.metadata.shared, shared_of_added(problem, most.config))
        """
    )
    assert printed.count("True") == 2 * len(kinds), printed


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
class TestOnAGpu:
    @pytest.mark.parametrize("sizes", [(1, 4, 1000, 1100), (2, 1, 1000, 1100), (1, 4, 1, 1100), (1, 1, 1000, 1100)])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    def test_attention_beside_float64(self, dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
        random = torch.Generator("cuda").manual_seed(0)
        given = [torch.randn(2, n, length, 64, device="cuda", generator=random).to(dtype).requires_grad_()
                 for n, length in ((4, 1000), (2, 1100), (2, 1100))]  # fmt: skip
        added = torch.randn(sizes, device="cuda", generator=random).to(dtype)
        if sizes[2] > 1:
            window = LocalWindow(200, 100).to_dense(1000, 1100, device=torch.device("cuda"))
            added = added.masked_fill(~window, -torch.inf)
        exact = [one.detach().double().requires_grad_() for one in (*given, added)]
        added.requires_grad_()
        found, right = attention(*given, added), torchs(*exact)
        by = torch.autograd.grad(found.float().square().sum(), (*given, added))
        bound = {torch.float32: 2e-5, torch.float16: 6e-3, torch.bfloat16: 4e-2}[dtype]
        pairs = zip((found, *by), (right, *torch.autograd.grad(right.square().sum(), exact)), strict=True)
        for one, other in pairs:
            assert float((one.double() - other).norm() / other.norm()) < bound
        again = torch.autograd.grad(attention(*given, added).float().square().sum(), added)[0]
        assert torch.equal(again, by[3])

    def test_a_captured_step_reads_what_is_there_now(self) -> None:
        given = [torch.randn(2, 2, 300, 32, device="cuda", requires_grad=True) for _ in range(3)]
        added = torch.randn(1, 2, 300, 300, device="cuda", requires_grad=True)

        def step() -> Tensor:
            return torch.autograd.grad(attention(*given, added).square().sum(), added)[0]

        graph, found = graph_of(step)
        with torch.no_grad():
            added.normal_()
        graph.replay()
        torch.testing.assert_close(found, step(), rtol=1e-4, atol=1e-5)
