"""Block lists that kernels make of a mask on the device, and attention by them, beside the mask itself."""

import math

import pytest
import torch
import torch.nn.functional as F
from compile_kernel import compile_in_subprocess
from kernel_devices import KERNEL_DEVICES, graph_of, needs_triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from sparsecomp.errors import MaskError
from sparsecomp.lowering.attention import block_attention as lowered
from sparsecomp.lowering.attention import block_attention_gradients as lowered_gradients
from sparsecomp.lowering.attention.mask_scan import MASK_SCAN, MaskScan, mask_scan
from sparsecomp.lowering.cache.signature import Device
from sparsecomp.ops import scanned_blocks
from sparsecomp.reference.attention.block_attention import Scoring, block_attention_reference
from sparsecomp.reference.attention.blocks import AttentionBlocks, blocks_of, dense_mask

Q_LEN, K_LEN = 100, 150


def kept(leading: tuple[int, int] = (2, 1), q_len: int = Q_LEN, k_len: int = K_LEN) -> Tensor:
    """Blocks of 32 of all kinds, a query that keeps nothing, rows of lists that are empty."""
    random = torch.Generator().manual_seed(q_len)
    coarse = torch.rand((*leading, -(-q_len // 32), -(-k_len // 32)), generator=random)
    coarse = coarse.repeat_interleave(32, 2).repeat_interleave(32, 3)[..., :q_len, :k_len]
    mask = (coarse < 0.3) | (coarse < 0.6) & (torch.rand(coarse.shape, generator=random) < 0.3)
    mask[..., q_len // 3, :] = False
    mask[..., 64:96] = False
    return mask


def scanned_by_kernels(mask: Tensor, block: tuple[int, int], sizes: tuple[int, int], keeps: bool = True):
    return AttentionBlocks(*sizes, *block, *mask_scan(mask, *sizes, block, keeps))


def alike(found: AttentionBlocks, right: AttentionBlocks) -> None:
    """The same lists up to their ends, whose entries have the same bits."""
    for at, bits in ((0, 4), (5, 9)):
        count, partial, index, tile = found[4 + at : 8 + at]
        for one, other in zip((count, partial), right[4 + at : 6 + at], strict=True):
            assert torch.equal(one.cpu(), other.cpu())
        width = right[6 + at].shape[3]
        listed = torch.arange(width, device=count.device) < count[..., None]
        assert torch.equal(index[..., :width][listed].cpu(), right[6 + at][listed.cpu()].cpu())
        numbers, others = tile[..., :width][listed].cpu(), right[7 + at][listed.cpu()].cpu()
        assert torch.equal(numbers < 0, others < 0)
        inside = numbers >= 0
        assert torch.equal(found[4 + bits].cpu()[numbers[inside].long()], right[4 + bits].cpu()[others[inside].long()])
        assert index.shape[3] == found[9 - at].shape[2]


@needs_triton
@pytest.mark.parametrize("sizes", [(1, 1, 300_000, 64), (70_000, 1, 64, 64)])
def test_grids_are_none_that_a_card_refuses(sizes: tuple[int, int, int, int]) -> None:
    """Which has up to 65535 programs along the second axis."""
    problem, card = MaskScan(*sizes, 64, 64, (0, 0, 0, 1), "float32"), Device("card", "9.0", "3.6.0")
    (candidate,) = MASK_SCAN.candidates(problem, card)
    grids = [launch.grid for launch, _ in candidate.template.prepare(problem, candidate.config).steps]
    assert len(grids) == 4 and max(size for grid in grids for size in grid[1:]) < 2**16


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("block", [(32, 32), (64, 32), (32, 128)])
def test_kernels_find_what_blocks_of_finds(block: tuple[int, int], device: str) -> None:
    mask = kept((2, 2)).transpose(0, 1)
    alike(scanned_by_kernels(mask.to(device), block, (Q_LEN, K_LEN)), blocks_of(mask, block))
    alike(scanned_by_kernels(~mask.to(device), block, (Q_LEN, K_LEN), False), blocks_of(mask, block))


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("block", [(256, 128), (256, 256)])
def test_blocks_of_more_pairs_than_a_program_counts_are_not_its(block: tuple[int, int], device: str) -> None:
    mask = torch.ones(1, 1, 300, 300, dtype=torch.bool)
    mask[..., 280:, 5] = False
    found = torch.ops.sparsecomp.scanned_mask.default.direct_cuda(mask.to(device), 300, 300, *block)
    alike(AttentionBlocks(300, 300, *block, *found), blocks_of(mask, block))


@pytest.mark.parametrize("block", [(32, 32), (64, 128)])
def test_the_cpu_finds_what_blocks_of_finds(block: tuple[int, int]) -> None:
    mask = kept()
    found = scanned_blocks(mask, Q_LEN, K_LEN, block)
    alike(found, blocks_of(mask, block))
    assert torch.equal(dense_mask(found), mask)
    alike(scanned_blocks(~mask, Q_LEN, K_LEN, block, kept=False), blocks_of(mask, block))


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("shape", [(2, 1, 1, K_LEN), (1, 3, Q_LEN, 1), (1, 1, 1, 1)])
def test_masks_that_broadcast(shape: tuple[int, ...], device: str) -> None:
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.7
    right = blocks_of(mask.expand(*shape[:2], Q_LEN, K_LEN), (32, 64))
    alike(scanned_by_kernels(mask.to(device), (32, 64), (Q_LEN, K_LEN)), right)
    alike(scanned_blocks(mask, Q_LEN, K_LEN, (32, 64)), right)


def biases(dtype: torch.dtype) -> Tensor:
    """-inf, numbers as low as there are, other numbers, and queries that have only one of the first two."""
    mask, random = kept(), torch.Generator().manual_seed(4)
    low = -math.inf if dtype is torch.float16 else torch.finfo(dtype).min
    bias = torch.where(mask, 0.0, torch.where(torch.rand(mask.shape, generator=random) < 0.5, -math.inf, low))
    bias = bias.to(dtype)
    bias[:, :, :32, :32] = torch.randn((2, 1, 32, 32), generator=random).to(dtype)
    bias[:, :, 40] = low
    bias[:, :, 40, 9] = bias[:, :, 41] = -math.inf
    return bias


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_numbers_that_are_added(dtype: torch.dtype, device: str) -> None:
    bias = biases(dtype)
    alike(scanned_by_kernels(bias.to(device), (32, 32), (Q_LEN, K_LEN)), scanned_blocks(bias, Q_LEN, K_LEN, (32, 32)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_what_numbers_keep_is_what_their_softmax_keeps(dtype: torch.dtype) -> None:
    """Pairs that are not kept have no weight; blocks that are kept whole add nothing."""
    bias = biases(dtype)
    blocks = scanned_blocks(bias, Q_LEN, K_LEN, (32, 32))
    assert torch.equal(dense_mask(blocks), torch.softmax(bias.float(), -1).nan_to_num(0.0) > 0)
    whole = blocks._replace(bits=torch.zeros_like(blocks.bits))
    assert int(dense_mask(whole).sum()) > 0 and not bias[dense_mask(whole)].any()


def attention_in_doubles(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """As float32 adds such numbers: scores vanish beside those that are as low as there are."""
    lowest = (bias <= -1e30) & bias.isfinite()
    dead = ((bias <= -1e30) & (bias < bias.amax(-1, keepdim=True))) | (bias == -math.inf)
    scores = q @ k.mT * 0.3
    scores = torch.where(lowest, scores - scores.detach(), scores + bias.double()).masked_fill(dead, -math.inf)
    return torch.softmax(scores, -1).nan_to_num(0.0) @ v


@pytest.mark.slow(reason="interprets attention")
@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_with_numbers_added_beside_float64(dtype: torch.dtype, device: str) -> None:
    random, bias = torch.Generator().manual_seed(2), biases(dtype)
    q, k, v, grad = (torch.randn(2, 2, n, 16, generator=random) for n in (Q_LEN, K_LEN, K_LEN, Q_LEN))
    wide = [one.double().requires_grad_() for one in (q, k, v)]
    right = attention_in_doubles(*wide, bias)
    by = torch.autograd.grad(right, wide, grad.double())
    if dtype is torch.float32:  # the oracle is what torch computes
        singles = [one.detach().float().requires_grad_() for one in wide]
        with sdpa_kernel(SDPBackend.MATH):
            torchs = F.scaled_dot_product_attention(*singles, bias, scale=0.3)
        for one, other in zip((torchs, *torch.autograd.grad(torchs, singles, grad)), (right, *by), strict=True):
            torch.testing.assert_close(one, other.float(), rtol=1e-4, atol=1e-5)

    q, k, v, grad, bias = (one.to(device) for one in (q, k, v, grad, bias))
    blocks = scanned_by_kernels(bias, (32, 32), (Q_LEN, K_LEN))[4:]
    scoring, out, sums = Scoring(0.3, added=bias), torch.empty_like(q), torch.empty(q.shape[:3], device=device)
    lowered.block_attention(q, k, v, blocks, scoring, out, sums)
    found = [torch.full_like(one, torch.nan) for one in (q, k, v)]
    lowered_gradients.block_attention_gradients(grad, q, k, v, out, sums, None, blocks, scoring, *found)
    for one, other in zip((out, *found), (right, *by), strict=True):
        error = torch.linalg.vector_norm(one.cpu().double() - other) / torch.linalg.vector_norm(other)
        assert error < 3e-6
    assert out[:, :, 40].any() and not out[:, :, 41].any()


def test_the_reference_with_numbers_added() -> None:
    random, bias = torch.Generator().manual_seed(2), biases(torch.float32)
    q, k, v = (torch.randn(2, 2, n, 16, generator=random, dtype=torch.float64) for n in (Q_LEN, K_LEN, K_LEN))
    blocks = scanned_blocks(bias, Q_LEN, K_LEN, (64, 32))[4:]
    found, _ = block_attention_reference(q, k, v, blocks, Scoring(0.3, added=bias))
    torch.testing.assert_close(found, attention_in_doubles(q, k, v, bias), rtol=1e-10, atol=1e-12)


def test_opcheck_and_nothing() -> None:
    for mask in (kept(), biases(torch.float32)):
        torch.library.opcheck(torch.ops.sparsecomp.scanned_mask.default, (mask, Q_LEN, K_LEN, 32, 64, True))
    torch.library.opcheck(torch.ops.sparsecomp.levelled_mask.default, (biases(torch.float32) - 1e4,))
    torch.library.opcheck(torch.ops.sparsecomp.apart.default, (torch.randn(2, 3, 4).mT.requires_grad_(),))
    assert scanned_blocks(torch.ones(1, 1, 1, 1, dtype=torch.bool), 0, 7).k_count.tolist() == [[[0]]]


@pytest.mark.parametrize(
    ("mask", "told"),
    [
        (torch.ones(1, 1, 4, 9, dtype=torch.bool), "needs"), (torch.ones(4, 8, dtype=torch.bool), "needs"),
        (torch.ones(1, 1, 4, 8, dtype=torch.int32), "int32"),
    ],
)  # fmt: skip
def test_masks_that_are_none(mask: Tensor, told: str) -> None:
    with pytest.raises(MaskError, match=told):
        scanned_blocks(mask, 4, 8)
    with pytest.raises(MaskError, match="powers of two"):
        scanned_blocks(torch.ones(1, 1, 4, 8, dtype=torch.bool), 4, 8, (16, 48))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_captured_scan_reads_what_is_there_now() -> None:
    mask = kept((2, 1), 1000, 1500).cuda()
    graph, found = graph_of(lambda: scanned_blocks(mask, 1000, 1500))
    mask.logical_not_()
    graph.replay()
    alike(found, blocks_of(mask))


@pytest.mark.slow(reason="compiles kernels for two targets")
@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile(capability: int) -> None:
    printed = compile_in_subprocess(
        f"""
        from sparsecomp.lowering.attention.kernels import mask_scan
        fixed = dict(KEPT=True, ADDED=True, BLOCK_Q=64, BLOCK_K=128, ROWS=4, COLUMNS=1024, WIDE=2048)
        for kernel in (mask_scan.tops_kernel, mask_scan.kinds_kernel, mask_scan.lists_kernel):
            own = dict(mask_ptr="*bf16", top_ptr="*fp32")
            types = {{n: own.get(n, "*i32" if n.endswith("_ptr") else "i32") for n in kernel.arg_names}}
            tile = {{n: value for n, value in fixed.items() if n in kernel.arg_names}}
            print("ld.global" in build(kernel, types, tile, {capability}, whole=()).asm["ptx"])
        """
    )
    assert printed.split() == ["True"] * 3
