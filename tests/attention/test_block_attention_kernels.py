"""Kernels of attention over listed blocks: candidates, shapes, strides, gradients beside float64, graphs on a GPU."""

from itertools import product

import pytest
import torch
from candidates import check_candidates, place
from compile_kernel import compile_in_subprocess
from kernel_devices import KERNEL_DEVICES, graph_of, needs_triton
from torch import Tensor

from sparsecomp.lowering.attention import block_attention as lowered
from sparsecomp.lowering.attention import block_attention_gradients as lowered_gradients
from sparsecomp.lowering.attention.problem import BlockAttention, representative
from sparsecomp.lowering.cache.signature import Device, KernelSignature, device_of
from sparsecomp.lowering.tuning.trial import fault
from sparsecomp.ops import block_attention
from sparsecomp.reference.attention.block_attention import Scoring
from sparsecomp.reference.attention.blocks import blocks_of

pytestmark = pytest.mark.quick_cases(1)

H100 = Device("NVIDIA H100 80GB HBM3", "9.0", "3.6.0")
TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
OPERATIONS = {
    "qkvo": lowered.BLOCK_ATTENTION, "qkvooq": lowered_gradients.ATTENTION_BY_QUERY,
    "qkvokv": lowered_gradients.ATTENTION_BY_KEY,
}  # fmt: skip


PLAIN = ("capped", "biased", "added", "dropped")


def problem(shapes: str, dtype: str, *sizes: int) -> BlockAttention:
    names = ("batch", "heads", "q_len", "k_len", "width", "k_width")
    given = ("group", "depth", "v_depth", "block_q", "block_k")
    return representative(
        KernelSignature(
            "", H100, dtypes=(dtype,), sizes=tuple(zip(names, sizes[:6], strict=True)),
            parameters=(*zip(given, sizes[6:], strict=True), *dict.fromkeys(PLAIN, 0).items()),
        ), shapes,
    )  # fmt: skip


PROBLEMS = [
    ("float32", 1, 4, 130, 170, 2, 2, 2, 24, 32, 64, 64),
    ("float16", 2, 1, 64, 256, 3, 2, 1, 16, 16, 32, 128),
    ("bfloat16", 1, 2, 200, 128, 1, 2, 2, 64, 64, 128, 128),
    ("bfloat16", 1, 1, 1, 300, 4, 1, 1, 40, 72, 64, 64),
]


@pytest.mark.slow(reason="holds many configurations against float64")
@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("shapes", OPERATIONS)
@pytest.mark.parametrize("sizes", PROBLEMS, ids=str)
def test_the_tuner_can_check_candidates(sizes, shapes, device):
    operation, given = OPERATIONS[shapes], problem(shapes, *sizes)
    given = given._replace(by_batch=given.batch > 1, by_head=given.heads > 1)
    check_candidates(operation, given, device, 3)
    signature = operation.signature(given, H100)
    assert operation.signature(operation.representative(signature), H100).key == signature.key


@pytest.mark.slow(reason="holds many configurations against float64")
@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("shapes", OPERATIONS)
@pytest.mark.parametrize(("softcap", "biased"), [(3.0, False), (0.0, True), (2.0, True)])
def test_scores_that_are_capped_and_biased(softcap, biased, shapes, device):
    where, operation = place(device), OPERATIONS[shapes]
    given = problem(shapes, *PROBLEMS[0])._replace(softcap=softcap, biased=biased)
    for candidate in operation.candidates(given, device_of(where))[::13]:
        assert fault(operation, given, where, candidate) is None, candidate.name
    signature = operation.signature(given, H100)
    assert operation.signature(operation.representative(signature), H100).key == signature.key


def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The result and the logsumexp in float64."""
    group = q.shape[1] // k.shape[1]
    k, v = (one.repeat_interleave(group, 1) for one in (k, v))
    score = (q @ k.mT * scale).masked_fill(~mask, -torch.inf)
    return torch.softmax(score, -1).nan_to_num(0.0) @ v, score.logsumexp(-1)


SHAPES = [
    # batch, heads, heads of k, queries, keys, depth, depth of v; batch and heads of the mask; block; share kept
    ((2, 2, 1, 65, 98, 24, 40), (1, 1), (64, 32), 0.3),
    ((1, 2, 1, 129, 150, 32, 32), (1, 2), (128, 128), 0.9),
    ((2, 2, 2, 1, 200, 16, 16), (2, 1), (32, 64), 0.5),
]


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize(("sizes", "leading", "block", "share"), SHAPES)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_results_and_gradients_beside_float64(dtype, sizes, leading, block, share, device):
    """Strided operands, queries that keep nothing, blocks of all kinds, a gradient of the logsumexp."""
    batch, heads, kv_heads, q_len, k_len, depth, v_depth = sizes
    random = torch.Generator().manual_seed(3)
    mask = torch.rand((*leading, q_len, k_len), generator=random) < share
    mask[..., : block[0] // 2, :32] = True
    mask[..., :64, 64:96] = False
    mask[..., q_len // 2 : q_len // 2 + 3, :] = q_len == 1
    shapes = ((batch, q_len, heads, depth), (batch, k_len, kv_heads, depth), (batch, k_len, kv_heads, v_depth))
    q, k, v, grad = (torch.randn(shape, generator=random).to(device, dtype).transpose(1, 2)
                     for shape in (*shapes, (batch, q_len, heads, v_depth)))  # fmt: skip
    v = v.mT.contiguous().mT
    beside = torch.randn((batch, heads, q_len), generator=random).to(device)
    wide = [one.double().requires_grad_() for one in (q, k, v)]
    right, sums = masked(*wide, mask.to(device), 0.3)
    outs = (right, sums.masked_fill(sums == -torch.inf, 0))
    by = torch.autograd.grad(outs, wide, (grad.double(), beside.double()))

    blocks = [one.to(device) for one in blocks_of(mask, block)[4:]]
    out = torch.full_like(right, torch.nan, dtype=dtype)
    logsumexp = torch.full(q.shape[:3], torch.nan, device=device)
    lowered.block_attention(q, k, v, blocks, Scoring(0.3), out, logsumexp)
    found = [torch.full_like(one, torch.nan) for one in (q, k, v)]
    lowered_gradients.block_attention_gradients(grad, q, k, v, out, logsumexp, beside, blocks, Scoring(0.3), *found)
    assert torch.equal(logsumexp == -torch.inf, sums == -torch.inf)
    torch.testing.assert_close(logsumexp.double(), sums, rtol=1e-5, atol=1e-5 if dtype is torch.float32 else 1e-2)
    for one, other in zip((out, *found), (right, *by), strict=True):
        assert torch.linalg.vector_norm(one.double() - other) <= TOLERANCE[dtype] * torch.linalg.vector_norm(other)
    assert not out[:, :, (sums == -torch.inf).all(1).all(0)].any()


@pytest.mark.parametrize("device", KERNEL_DEVICES)
def test_a_gradient_of_the_logsumexp_comes_and_goes(device):
    """Calls that are alike but for it: a kept launch has a place for each tensor, and no more."""
    draw = torch.Generator().manual_seed(4)
    q, k, v, grad = torch.randn(4, 1, 1, 32, 16, generator=draw).to(device).requires_grad_()
    mask = torch.ones(1, 1, 32, 32, dtype=torch.bool, device=device).tril()
    blocks = blocks_of(mask, (32, 32))
    with torch.no_grad():
        out, logsumexp = block_attention(q, k, v, blocks)
    operator = torch.ops.sparsecomp.block_attention_gradients.default.direct_cuda
    eager, its_logsumexp = masked(*(one.double() for one in (q, k, v)), mask, 0.25)
    for beside in (None, torch.ones_like(logsumexp), None):
        wanted = (eager * grad).sum() + (0 if beside is None else its_logsumexp.sum())
        right = torch.autograd.grad(wanted, (q, k, v), retain_graph=True)
        with torch.no_grad():
            found = operator(grad, q, k, v, out, logsumexp, beside, list(blocks[4:]), 0.25)[:3]
        for one, other in zip(found, right, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", KERNEL_DEVICES)
def test_a_scale_of_zero_gives_the_mean_of_what_is_kept(device):
    q, k, v, grad = (torch.randn(1, 1, 40, 16, generator=torch.Generator().manual_seed(n)).to(device) for n in range(4))
    mask = torch.rand(1, 1, 40, 40, generator=torch.Generator().manual_seed(4)) < 0.3
    mask[..., 0], mask[..., 7, :] = True, False
    kept = mask.to(device).double()
    blocks = [one.to(device) for one in blocks_of(mask, (32, 32))[4:]]
    out, logsumexp = torch.empty_like(v), torch.empty(1, 1, 40, device=device)
    lowered.block_attention(q, k, v, blocks, Scoring(0.0), out, logsumexp)
    share = kept / kept.sum(-1, keepdim=True).clamp(min=1)
    torch.testing.assert_close(out.double(), share @ v.double(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logsumexp.double(), kept.sum(-1).log(), rtol=1e-5, atol=1e-5)
    found = [torch.empty_like(q) for _ in range(3)]
    lowered_gradients.block_attention_gradients(grad, q, k, v, out, logsumexp, None, blocks, Scoring(0.0), *found)
    for one, right in zip(found, (0 * q, 0 * k, share.mT @ grad.double()), strict=True):
        torch.testing.assert_close(one.double(), right.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", KERNEL_DEVICES)
def test_blocks_that_are_not_listed_are_not_read(device):
    q, k, v = (torch.randn(1, 1, 96, 16, generator=torch.Generator().manual_seed(5)) for _ in range(3))
    mask = torch.zeros(1, 1, 96, 96, dtype=torch.bool)
    mask[..., :32] = True
    k[..., 32:, :] = v[..., 32:, :] = torch.nan
    out, logsumexp = torch.empty_like(q, device=device), torch.empty(1, 1, 96, device=device)
    blocks = [one.to(device) for one in blocks_of(mask, (32, 32))[4:]]
    lowered.block_attention(*(one.to(device) for one in (q, k, v)), blocks, Scoring(0.25), out, logsumexp)
    right, _ = masked(*(one.double() for one in (q, k[:, :, :32], v[:, :, :32])), mask[..., :32], 0.25)
    torch.testing.assert_close(out.cpu().double(), right, rtol=1e-5, atol=1e-5)


@needs_triton
def test_every_depth_has_kernels_on_every_card():
    for operation, capability, (dtype, depth) in product(
        OPERATIONS.items(), ("8.0", "8.6", "9.0"), (("float32", 128), ("bfloat16", 256), ("float16", 16))
    ):
        given = problem(operation[0], dtype, 1, 2, 4096, 4096, 4, 4, 1, depth, depth, 128, 128)
        assert operation[1].candidates(given, Device("card", capability, "3.6.0")), (operation[0], capability, depth)


@pytest.mark.slow(reason="compiles the largest configurations")
@pytest.mark.slow_cases(4)
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("shapes", OPERATIONS)
@pytest.mark.parametrize("more", ["", "added=1", "dropped=1"])
def test_every_configuration_fits_in_shared_memory(shapes, capability, more):
    """What Triton takes is no more than was counted, for the configuration of each dtype and depth that counts most."""
    kinds = [("bfloat16", "bf16", 128)]  # what a mask or dropout takes hangs on neither dtype nor depth
    if not more:
        kinds += [("float32", "fp32", 64), ("float32", "fp32", 128), ("bfloat16", "bf16", 64)]
        kinds += [("bfloat16", "bf16", 256)]
    printed = compile_in_subprocess(
        f"""
        from sparsecomp.lowering.attention import block_attention, block_attention_gradients as gradients
        from sparsecomp.lowering.attention.kernels.block_tiles import Walk, shared_bytes_of
        from sparsecomp.lowering.cache.signature import Device, KernelSignature
        operation = {{one.name: one for one in (block_attention.BLOCK_ATTENTION, gradients.ATTENTION_BY_QUERY,
                                               gradients.ATTENTION_BY_KEY)}}["{OPERATIONS[shapes].name}"]
        device = Device("card", "{capability / 10}", "3.6.0")
        own = dict(logsumexp_ptr="*fp32", grad_logsumexp_ptr="*fp32", delta_ptr="*fp32", alibi_ptr="*fp32",
                   added_ptr="*fp32", seed_ptr="*i64", scale="fp32", cap="fp32")
        own |= dict.fromkeys(("count_ptr", "partial_ptr", "index_ptr", "tile_ptr", "bits_ptr", "plan_ptr", "limit_ptr"),
                             "*i32")
        own |= dict.fromkeys(("part_ptr", "part_sums_ptr", "other_part_ptr"), "*fp32")
        for dtype, short, depth in {kinds}:
            sizes = dict(batch=1, heads=2, q_len=4096, k_len=4096, width=4, k_width=4)
            given = dict(group=1, depth=depth, v_depth=depth, block_q=128, block_k=128, capped=1, biased=1)
            given |= dict(added=0, dropped=0) | dict({more})
            problem = operation.representative(KernelSignature(
                "", device, dtypes=(dtype,), sizes=tuple(sizes.items()), parameters=tuple(given.items())))
            walk = Walk({shapes == "qkvokv"}, depth if {shapes == "qkvo"} else 2 * depth)
            most = max(operation.candidates(problem, device),
                       key=lambda one: shared_bytes_of(problem, one.config, walk))
            launch = most.template.prepare(problem, most.config).steps[0].launch
            fixed = dict(launch.named)
            options = {{name: fixed.pop(name) for name in ("num_warps", "num_stages", "maxnreg") if name in fixed}}
            types = {{n: own.get(n, "*" + short if n.endswith("_ptr") else "i32") for n in launch.kernel.arg_names}}
            rows = [n for n in launch.kernel.arg_names if n.endswith(("_row", "_head", "_batch"))]
            built = build(launch.kernel, types, fixed, {capability}, whole=rows, **options)
            print(built.metadata.shared <= shared_bytes_of(problem, most.config, walk), dtype, depth, most.config,
                  built.metadata.shared, shared_bytes_of(problem, most.config, walk))
        """
    )
    assert printed.count("True") == len(kinds), printed


gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def on_gpu(q_len: int, k_len: int, depth: int, dtype: torch.dtype, kv_heads: int = 2) -> tuple[list[Tensor], Tensor]:
    torch.manual_seed(q_len + depth)
    shapes = ((2, 4, q_len, depth), (2, kv_heads, k_len, depth), (2, kv_heads, k_len, depth))
    operands = [torch.randn(shape, device="cuda").to(dtype).requires_grad_() for shape in shapes]
    distance = torch.arange(q_len, device="cuda")[:, None] - torch.arange(k_len, device="cuda")
    mask = (distance.abs() <= 150)[None, None].repeat(1, 4, 1, 1)
    mask[:, 1] |= distance % 5 == 0
    mask[:, 2] |= torch.rand(mask[:, 2].shape, device="cuda") < 0.3
    mask[:, 3, q_len // 2] = False
    return operands, mask


class TestOnAGpu:
    pytestmark = gpu

    @pytest.mark.parametrize(
        ("q_len", "k_len", "depth", "dtype", "block"),
        [
            (1000, 777, 64, torch.bfloat16, (128, 128)), (333, 2048, 64, torch.float16, (64, 64)),
            (1, 500, 64, torch.float32, (128, 128)), (1000, 777, 128, torch.bfloat16, (64, 64)),
            (333, 2048, 128, torch.float32, (128, 128)), (1024, 1024, 128, torch.float16, (128, 64)),
            (1000, 777, 16, torch.float16, (64, 128)), (1000, 777, 40, torch.bfloat16, (128, 128)),
            (333, 2048, 80, torch.float32, (64, 64)), (1024, 1024, 96, torch.bfloat16, (32, 32)),
            (1000, 777, 192, torch.bfloat16, (128, 128)), (333, 2048, 256, torch.float16, (128, 128)),
            (1000, 777, 256, torch.float32, (128, 128)),
        ],
    )  # fmt: skip
    def test_the_operator_and_its_gradients(self, block, q_len, k_len, depth, dtype):
        operands, mask = on_gpu(q_len, k_len, depth, dtype)
        wide = [one.detach().double().requires_grad_() for one in operands]
        right, _ = masked(*wide, mask, depth**-0.5)
        out, _ = block_attention(*operands, blocks_of(mask, block))
        grad = torch.randn_like(out)
        found = (out, *torch.autograd.grad(out, operands, grad))
        wanted = (right, *torch.autograd.grad(right, wide, grad.double()))
        for one, other in zip(found, wanted, strict=True):
            error = torch.linalg.vector_norm(one.double() - other) / torch.linalg.vector_norm(other)
            assert error <= 2 * TOLERANCE[dtype]

    def test_two_calls_give_the_same_bits(self):
        operands, mask = on_gpu(1000, 1000, 64, torch.bfloat16)
        blocks = blocks_of(mask, (128, 128))
        first, second = ((out, *torch.autograd.grad(out.sum(), operands)) for out in
                         (block_attention(*operands, blocks)[0] for _ in range(2)))  # fmt: skip
        for one, other in zip(first, second, strict=True):
            assert torch.equal(one, other)

    def test_a_captured_call_reads_what_is_there_now(self):
        operands, mask = on_gpu(300, 300, 64, torch.bfloat16)
        blocks = blocks_of(mask, (64, 64))

        def step() -> tuple[Tensor, ...]:
            out, _ = block_attention(*operands, blocks)
            return out, *torch.autograd.grad(out, operands, out.detach())

        graph, results = graph_of(step)
        with torch.no_grad():
            for one in operands:
                one.mul_(-1.5)
        graph.replay()
        for one, other in zip(results, step(), strict=True):
            assert torch.equal(one, other)

    def test_compiled_it_is_the_same(self):
        operands, mask = on_gpu(300, 300, 64, torch.bfloat16)
        blocks = blocks_of(mask, (64, 64))
        compiled = torch.compile(lambda *args: block_attention(*args)[0], fullgraph=True)
        assert torch.equal(compiled(*operands, blocks), block_attention(*operands, blocks)[0])


@pytest.mark.slow(reason="compiles all kernels for two targets")
@pytest.mark.parametrize(("dtype", "splits"), [("bf16", (1, 2)), ("fp32", (0,))])
@pytest.mark.parametrize(("capability", "instruction"), [(80, "mma.sync"), (90, "wgmma")])
def test_kernels_compile_to_tensor_core_instructions(capability, instruction, dtype, splits):
    printed = compile_in_subprocess(
        f"""
        from sparsecomp.lowering.attention.kernels.attention_by_key import attention_by_key_kernel
        from sparsecomp.lowering.attention.kernels.attention_by_query import attention_by_query_kernel
        from sparsecomp.lowering.attention.kernels.block_attention import block_attention_kernel
        tile = dict(GROUP=2, D=32, DV=24, BD=32, BDV=32, BLOCK_Q=128, BLOCK_K=128, BM=64, BN=64, CHECK_ROWS=True,
                    JOINT=True, CAPPED=True, BIASED=True, ADDED=True, DROPPED=True,
                    PRECISION="tf32x3" if "{dtype}" == "fp32" else "ieee", ROOM=16)
        own = dict(count_ptr="*i32", partial_ptr="*i32", index_ptr="*i32", tile_ptr="*i32", bits_ptr="*i32",
                   logsumexp_ptr="*fp32", grad_logsumexp_ptr="*fp32", delta_ptr="*fp32", alibi_ptr="*fp32",
                   added_ptr="*fp32", seed_ptr="*i64", plan_ptr="*i32", limit_ptr="*i32", part_ptr="*fp32",
                   part_sums_ptr="*fp32", other_part_ptr="*fp32", scale="fp32", cap="fp32")
        for kernel in (block_attention_kernel, attention_by_query_kernel, attention_by_key_kernel):
            types = {{n: own.get(n, "*{dtype}" if n.endswith("_ptr") else "i32") for n in kernel.arg_names}}
            rows = [n for n in kernel.arg_names if n.endswith(("_row", "_head", "_batch"))]
            for split in {splits}:
                built = build(kernel, types, tile | dict(SPLIT=split), {capability}, whole=rows, num_warps=4,
                              num_stages=2)
                print(built.asm["ptx"].count("{instruction}") > 0)
        """
    )
    assert printed.split() == ["True"] * 3 * len(splits)
