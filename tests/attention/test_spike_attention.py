"""Attention of spikes over listed blocks: the operator beside float64, its gradients, and its kernel."""

import pytest
import torch
from candidates import check_candidates
from compile_kernel import compile_in_subprocess
from kernel_devices import KERNEL_DEVICES, graph_of
from torch import Tensor

from sparsecomp.errors import FormatError, MaskError
from sparsecomp.lowering.cache.signature import Device
from sparsecomp.ops import decompositions, spike_attention
from sparsecomp.reference.attention.blocks import blocks_of

OPS = torch.ops.sparsecomp
SHAPES = [
    # batch, heads, queries, keys, depth, depth of v; batch and heads of the mask; block; share kept
    ((2, 2, 65, 98, 24, 40), (1, 1), (64, 32), 0.3),
    ((1, 2, 129, 150, 32, 32), (1, 2), (128, 128), 0.9),
    ((2, 1, 1, 200, 16, 16), (2, 1), (32, 64), 0.5),
]
"""Lengths that are no multiples of a block."""


def counts(*shape: int, hi: int = 1, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, hi + 1, shape, generator=generator).to(dtype)


def operands(sizes: tuple[int, ...], hi: int = 1, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """As a network splits them in heads: tokens lie before heads."""
    batch, heads, q_len, k_len, depth, v_depth = sizes
    shapes = (batch, q_len, heads, depth), (batch, k_len, heads, depth), (batch, k_len, heads, v_depth)
    return [counts(*shape, hi=hi, seed=seed, dtype=dtype).transpose(1, 2) for seed, shape in enumerate(shapes)]


def mask_of(sizes: tuple[int, ...], leading: tuple[int, int], block: tuple[int, int], share: float) -> Tensor:
    """Blocks of all kinds, and a few queries that keep nothing."""
    mask = torch.rand((*leading, *sizes[2:4]), generator=torch.Generator().manual_seed(7)) < share
    mask[..., : block[0] // 2, :32] = True
    mask[..., :64, 64:96] = False
    mask[..., sizes[2] // 2 : sizes[2] // 2 + 3, :] = sizes[2] == 1
    return mask


def written(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    return (q @ k.mT).masked_fill(~mask, 0) @ v * scale


@pytest.mark.parametrize(("sizes", "leading", "block", "share"), SHAPES)
def test_counts_give_the_numbers_of_float64(sizes, leading, block, share):
    given, mask = operands(sizes, hi=3), mask_of(sizes, leading, block, share)
    found = spike_attention(*given, blocks_of(mask, block), scale=0.125)
    assert torch.equal(found.double(), written(*(one.double() for one in given), mask, 0.125))


def test_gradients_are_those_of_eager_again_and_again():
    sizes = (1, 2, 9, 40, 3, 2)
    mask = mask_of(sizes, (1, 2), (32, 32), 0.4)
    given = [torch.randn_like(one, dtype=torch.float64).requires_grad_() for one in operands(sizes)]
    blocks, grad = blocks_of(mask, (32, 32)), torch.randn(1, 2, 9, 2, dtype=torch.float64)
    found = torch.autograd.grad(spike_attention(*given, blocks, scale=-0.3), given, grad)
    right = torch.autograd.grad(written(*given, mask, -0.3), given, grad)
    torch.testing.assert_close(found, right)
    small, few = [one[:, :, :2, :2] for one in given], blocks_of(mask[..., :2, :2], (32, 32))
    torch.autograd.gradgradcheck(lambda *small: spike_attention(*small, few, scale=-0.3), small)


def test_only_wanted_gradients_are_computed():
    q, k, v = operands(SHAPES[0][0])
    blocks = blocks_of(mask_of(*SHAPES[0]), (64, 32))
    total = spike_attention(q, k.requires_grad_(), v, blocks).sum()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        total.backward()
    assert [event.count for event in seen.key_averages() if event.key == "sparsecomp::spike_attention"] == [1]


@pytest.mark.slow(reason="traces and compiles it")
def test_opcheck():
    q, k, v = (one.requires_grad_() for one in operands((1, 2, 9, 40, 3, 2)))
    lists = list(blocks_of(mask_of((1, 2, 9, 40, 3, 2), (1, 1), (32, 32), 0.4), (32, 32))[4:])
    for operator in (OPS.spike_attention.default, OPS.counted_attention.default):
        torch.library.opcheck(operator, (q, k, v, lists, 0.5))
    halves = (one.detach().half() for one in (q, k, v))
    torch.library.opcheck(OPS.spike_attention_counts.default, (*halves, lists, 0.5, torch.float32))


def test_the_decomposition_multiplies_halves():
    given, lists = operands(SHAPES[0][0], hi=3), list(blocks_of(mask_of(*SHAPES[0]), (64, 32))[4:])
    found = decompositions()[OPS.counted_attention.default](*given, lists, 0.3)
    right = OPS.spike_attention(*given, lists, 0.3)
    assert torch.equal(found, right) and found.stride() == right.stride()


def test_no_keys_and_no_queries_give_zeros():
    q, k, v = operands((1, 2, 5, 0, 3, 2))
    assert torch.equal(spike_attention(q, k, v, blocks_of(torch.ones(1, 1, 5, 0).bool())), torch.zeros(1, 2, 5, 2))
    q, k, v = operands((1, 2, 0, 5, 3, 2))
    assert spike_attention(q, k, v, blocks_of(torch.ones(1, 1, 0, 5).bool())).shape == (1, 2, 0, 2)


def test_autocast_takes_operands_as_torch_does():
    sizes, leading, block, share = SHAPES[0]
    given, mask = operands(sizes), mask_of(sizes, leading, block, share)
    with torch.autocast("cpu", torch.bfloat16):
        found = spike_attention(*given, blocks_of(mask, block), scale=0.125)
    assert found.dtype is torch.bfloat16
    assert torch.equal(found, written(*(one.double() for one in given), mask, 0.125).bfloat16())


def test_operands_that_do_not_belong_together():
    q, k, v = operands((1, 2, 9, 40, 3, 2))
    blocks = blocks_of(torch.ones(1, 1, 9, 40).bool(), (32, 32))
    with pytest.raises(FormatError, match="one number of heads"):
        spike_attention(q, k[:, :1], v[:, :1], blocks)
    with pytest.raises(FormatError, match="one floating dtype"):
        spike_attention(q.int(), k.int(), v.int(), blocks)
    with pytest.raises(MaskError, match="9 queries and 40 keys, q has 8"):
        spike_attention(q[:, :, :8], k, v, blocks)
    with pytest.raises(MaskError, match="the ten of AttentionBlocks"):
        OPS.spike_attention(q, k, v, list(blocks[4:9]), 1.0)


TYPES = [("float32", ""), ("float16", ""), ("bfloat16", ""), ("float16", "float32"), ("float16", "bfloat16"),
         ("tf32", "")]  # fmt: skip


@pytest.mark.slow(reason="holds several configurations against float64")
@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize(("dtype", "result"), TYPES)
def test_the_tuner_can_check_candidates(dtype, result, device):
    from sparsecomp.lowering.attention.problem import BlockAttention, contiguous
    from sparsecomp.lowering.attention.spike_attention import SPIKE_ATTENTION

    sizes = (2, 2, 1, 130, 170, 24, 40, 64, 32, 3, 2, True, True)
    how, dtype = {"result": result, "single": dtype == "tf32"}, dtype.replace("tf32", "float32")
    problem = contiguous(BlockAttention(*sizes, dtype, -0.3, (), **how), "qkvo")
    check_candidates(SPIKE_ATTENTION, problem, device, 3)
    card = Device("card", "9.0", "3.6.0")
    signature = SPIKE_ATTENTION.signature(problem, card)
    assert SPIKE_ATTENTION.representative is not None
    assert SPIKE_ATTENTION.signature(SPIKE_ATTENTION.representative(signature), card).key == signature.key


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize(("sizes", "leading", "block", "share"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("given_as", ["counts", "numbers"])
def test_the_kernel_is_exact(given_as, dtype, sizes, leading, block, share, device):
    """By a scale that is no power of two, too: the result is rounded once."""
    from sparsecomp.lowering.attention.spike_attention import spike_attention as launch

    given, mask = operands(sizes, hi=3, dtype=dtype), mask_of(sizes, leading, block, share)
    blocks = [one.to(device) for one in blocks_of(mask, block)[4:]]
    inner = [one.to(device, torch.float16 if given_as == "counts" else dtype) for one in given]
    out = torch.full((*inner[0].shape[:3], sizes[5]), torch.nan, dtype=dtype, device=device)
    for scale in (0.125, 0.3):
        launch(*inner, blocks, scale, out)
        right = written(*(one.double() for one in given), mask, scale).to(dtype)
        if scale == 0.125:
            assert torch.equal(out.cpu(), right)
        torch.testing.assert_close(out.cpu(), right, rtol=3e-7 if dtype is torch.float32 else 1e-3, atol=0)


@pytest.mark.parametrize("device", KERNEL_DEVICES)
def test_blocks_that_are_not_listed_are_not_read(device):
    from sparsecomp.lowering.attention.spike_attention import spike_attention as launch

    q, k, v = (one.contiguous() for one in operands((1, 1, 96, 96, 16, 16)))
    mask = torch.zeros(1, 1, 96, 96, dtype=torch.bool)
    mask[..., :32] = True
    k[..., 32:, :] = v[..., 32:, :] = torch.nan
    out = torch.empty_like(q, device=device)
    blocks = [one.to(device) for one in blocks_of(mask, (32, 32))[4:]]
    launch(*(one.to(device) for one in (q, k, v)), blocks, 0.25, out)
    assert torch.equal(out.cpu(), (q @ k[:, :, :32].mT) @ v[:, :, :32] * 0.25)


@pytest.mark.slow(reason="builds for a GPU")
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(
    ("dtype", "result", "precision"),
    [("bf16", "bf16", "ieee"), ("fp16", "fp32", "ieee"), ("fp32", "fp32", "tf32x3"), ("fp32", "fp32", "tf32")],
)
@pytest.mark.slow_cases(4)
def test_compiles_to_tensor_cores(capability, dtype, result, precision):
    printed = compile_in_subprocess(
        f"""
        from sparsecomp.lowering.attention.kernels.spike_attention import spike_attention_kernel as kernel
        types = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr"), "*{dtype}")
        types |= dict(out_ptr="*{result}", power="fp32", rest="fp32")
        types |= dict.fromkeys(("count_ptr", "partial_ptr", "index_ptr", "tile_ptr", "bits_ptr"), "*i32")
        types = {{n: types.get(n, "i32") for n in kernel.arg_names}}
        fixed = dict(D=64, DV=64, BD=64, BDV=64, BLOCK_Q=64, BLOCK_K=64, BM=64, BN=32, CHECK_ROWS=True, JOINT=False,
                     PRECISION="{precision}")
        rows = [n for n in kernel.arg_names if n.endswith(("_row", "_head", "_batch"))]
        built = build(kernel, types, fixed, {capability}, whole=rows, num_warps=4, num_stages=2)
        ptx = built.asm["ptx"]
        print(ptx.count("mma.sync") + ptx.count("wgmma.mma_async"), "ld.local" in ptx)
        """
    )
    products, spills = printed.split()
    assert int(products) >= 2 and spills == "False"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
class TestOnAGpu:
    @pytest.mark.parametrize(("q_len", "k_len", "depth"), [(1000, 777, 64), (333, 2048, 32), (1024, 1024, 128)])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
    def test_spikes_give_float64s_bits_and_gradients_are_its(self, dtype, q_len, k_len, depth):
        sizes = (3, 4, q_len, k_len, depth, depth)
        mask = mask_of(sizes, (1, 4), (64, 64), 0.2).cuda()
        mask[..., 128:256, 256:384] = True
        given = [one.to("cuda", dtype).requires_grad_() for one in operands(sizes)]
        wide = [one.detach().double().requires_grad_() for one in given]
        right = written(*wide, mask, 0.125)
        grad = torch.randn(right.shape, device="cuda", dtype=dtype)
        wanted = torch.autograd.grad(right, wide, grad.double())
        for counted in (False, True):
            out = spike_attention(*given, blocks_of(mask), scale=0.125, counts=counted)
            assert torch.equal(out, right.to(dtype))
            for one, other in zip(torch.autograd.grad(out, given, grad), wanted, strict=True):
                error = torch.linalg.vector_norm(one.double() - other) / torch.linalg.vector_norm(other)
                assert error <= {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]

    def test_tf32_is_as_exact_of_spikes(self):
        sizes = (2, 4, 300, 500, 64, 64)
        mask = mask_of(sizes, (1, 4), (64, 64), 0.3).cuda()
        given = [one.cuda().requires_grad_() for one in operands(sizes)]
        grad = torch.randn(2, 4, 300, 64, device="cuda")
        wide = [one.detach().double().requires_grad_() for one in given]
        right = written(*wide, mask, 0.125)
        before, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, True
        try:
            out = spike_attention(*given, blocks_of(mask), scale=0.125)
            found = torch.autograd.grad(out, given, grad)
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before
        assert torch.equal(out.double(), right)
        for one, other in zip(found, torch.autograd.grad(right, wide, grad.double()), strict=True):
            error = torch.linalg.vector_norm(one.double() - other) / torch.linalg.vector_norm(other)
            assert 1e-6 < error < 2e-3

    def test_a_captured_call_reads_what_is_there_now(self):
        sizes, leading, block, share = SHAPES[1]
        given = [one.cuda().contiguous() for one in operands(sizes)]
        mask = mask_of(sizes, leading, block, share).cuda()
        blocks = blocks_of(mask, block)
        graph, out = graph_of(lambda: spike_attention(*given, blocks, counts=True))
        for one in given:
            one.copy_(1 - one)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out.double(), written(*(one.double() for one in given), mask, 1.0))
