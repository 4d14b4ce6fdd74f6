"""Lists that are long beside the rest, in parts: the same results, and the same bits again."""

from collections.abc import Iterator

import pytest
import torch
from compile_kernel import compile_in_subprocess
from kernel_devices import KERNEL_DEVICES, needs_triton
from torch import Tensor

from sparsecomp.attention import GlobalTokens, LocalWindow, attention
from sparsecomp.lowering.attention import block_attention as lowered
from sparsecomp.lowering.attention import block_attention_gradients as lowered_gradients
from sparsecomp.lowering.attention.problem import problem_of
from sparsecomp.lowering.launch import dispatch
from sparsecomp.reference.attention.block_attention import Scoring, block_attention_reference, gradients
from sparsecomp.reference.attention.blocks import blocks_of

pytestmark = needs_triton
N = 290


@pytest.fixture
def short() -> Iterator[None]:
    """Parts of two blocks are no part too small."""
    from sparsecomp.lowering.attention.kernels import long_lists

    dispatch.forget()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(long_lists, "LEAST", 2)
        yield
    dispatch.forget()


def mask_of(kind: str) -> Tensor:
    place = torch.arange(N)
    distance = (place[:, None] - place).abs()
    mask = (distance < 20)[None, None].repeat(2, 2, 1, 1)
    if kind == "heads":
        mask[:, 1, 150] = mask[0, 0, :, 280] = True
        mask[1, 1, :, :70] = True
        return mask
    mask = mask[:1, :1]
    mask[..., [3, 250], :] = mask[..., [3, 250]] = True
    mask[..., 250, 100:230] = False
    mask[..., 260, :] = False
    return mask


CASES = [("shared", 2, 1, (32, 32)), ("shared", 4, 2, (32, 32)), ("heads", 2, 2, (32, 32)), ("heads", 2, 1, (32, 32))]


@pytest.mark.slow(reason="walks over long lists in the interpreter")
@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize(("kind", "heads", "kv_heads", "block"), CASES)
@pytest.mark.usefixtures("short")
@pytest.mark.slow_cases(2)
def test_parts_give_what_whole_lists_give(kind: str, heads: int, kv_heads: int, block: tuple[int, int], device) -> None:
    random = torch.Generator().manual_seed(0)
    shapes = [(2, N, n, depth) for n, depth in ((heads, 16), (kv_heads, 16), (kv_heads, 24), (heads, 24))]
    q, k, v, grad = (torch.randn(shape, generator=random).transpose(1, 2).to(device) for shape in shapes)
    blocks = [one.to(device) for one in blocks_of(mask_of(kind), block)[4:]]
    scoring = Scoring(0.3, softcap=20.0, seed=torch.tensor([5], device=device), kept=60_000, parts=3)
    out, sums = torch.full_like(grad, torch.nan), torch.full(q.shape[:3], torch.nan, device=device)
    lowered.block_attention(q, k, v, blocks, scoring, out, sums)
    problem = problem_of(q, k, v, blocks, scoring, (q, k, v, out))
    steps = dispatch.prepared(lowered.BLOCK_ATTENTION, problem, q.device).steps  # pyright: ignore
    assert len(steps) == 4
    found = [torch.full_like(one, torch.nan) for one in (q, k, v)]
    lowered_gradients.block_attention_gradients(grad, q, k, v, out, sums, None, blocks, scoring, *found)
    wide = [one.double() for one in (q, k, v)]
    right, logsumexp = block_attention_reference(*wide, blocks, scoring)
    wanted = gradients(grad.double(), *wide, right, logsumexp, None, blocks, scoring)
    assert torch.equal(sums == -torch.inf, logsumexp == -torch.inf)
    finite = logsumexp > -torch.inf
    torch.testing.assert_close(sums[finite].double(), logsumexp[finite], rtol=1e-5, atol=1e-5)
    for one, other in zip((out, *found), (right, *wanted), strict=True):
        assert torch.linalg.vector_norm(one.double() - other) <= 4e-6 * torch.linalg.vector_norm(other)


@pytest.mark.parametrize("device", KERNEL_DEVICES)
def test_a_plan_has_all_parts_of_long_lists_in_order(device: str) -> None:
    from sparsecomp.lowering.attention.kernels.long_lists import plan_list_parts_kernel

    counts = torch.full((3, 100), 9, dtype=torch.int32)
    counts[0, [4, 70]] = torch.tensor([130, 40], dtype=torch.int32)
    counts[1, :30] = 130  # too many for any part
    plan, limit = torch.full((3, 16, 2), 77, dtype=torch.int32, device=device), torch.zeros(3, dtype=torch.int32)
    limit = limit.to(device)
    plan_list_parts_kernel[(3,)](counts.to(device), plan, limit, 100, 130, LEAST_PART=9, ROOM=16, PADDED=16, ALL=128)
    size = int(limit[0])
    assert size == 17  # by the next shorter one, 9, there were 15 + 5 parts
    right = [(4, part) for part in range(-(-130 // size))] + [(70, part) for part in range(-(-40 // size))]
    assert plan[0].tolist()[: len(right)] == [list(one) for one in right]
    assert (plan[0, len(right) :, 0] == -1).all()
    assert limit.tolist()[1:] == [130, 9] and (plan[1:, :, 0] == -1).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.usefixtures("short")
def test_long_sequences_with_global_tokens(dtype: torch.dtype) -> None:
    """At 16,384 tokens parts are at work, and two calls give the same bits."""
    length, pattern = 16_384, LocalWindow(100, 100) | GlobalTokens((5, 9000))
    random = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(1, 2, length, 64, device="cuda", generator=random).to(dtype).requires_grad_()
               for _ in range(3))  # fmt: skip
    results = []
    for _ in range(2):
        out = attention(q, k, v, pattern)
        results.append((out, *torch.autograd.grad(out.float().square().sum(), (q, k, v))))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
    wide = [one.detach().double().requires_grad_() for one in (q, k, v)]
    rows = torch.cat((torch.arange(0, 80), torch.arange(8900, 9100)))
    mask = pattern.to_dense(length, device="cuda")[0, 0, rows]
    scores = (wide[0][:, :, rows] @ wide[1].mT / 8).masked_fill(~mask, -torch.inf)
    right = scores.softmax(-1) @ wide[2]
    found = results[0][0][:, :, rows].double()
    bound = 1e-5 if dtype is torch.float32 else 2e-2
    assert torch.linalg.vector_norm(found - right) <= bound * torch.linalg.vector_norm(right)
    by_key = torch.autograd.grad(right.square().sum(), wide)[0][:, :, rows]
    assert torch.linalg.vector_norm(results[0][1][:, :, rows].double() - by_key) <= 2 * bound * by_key.norm()


@pytest.mark.slow(reason="compiles kernels for two targets")
@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile(capability: int) -> None:
    printed = compile_in_subprocess(
        f"""
        from sparsecomp.lowering.attention.kernels.long_lists import merge_list_parts_kernel, plan_list_parts_kernel
        fixed = dict(LEAST_PART=16, ROOM=64, PADDED=64, ALL=512, D=40, BD=64, BLOCK=64, ROWS=32)
        own = dict(part_ptr="*fp32", sums_ptr="*fp32", logsumexp_ptr="*fp32", out_ptr="*bf16")
        for kernel, none in ((plan_list_parts_kernel, {{}}), (merge_list_parts_kernel, {{}}),
                             (merge_list_parts_kernel, dict(sums_ptr=None, logsumexp_ptr=None))):
            types = {{n: own.get(n, "*i32" if n.endswith("_ptr") else "i32") for n in kernel.arg_names}}
            tile = {{n: value for n, value in fixed.items() if n in kernel.arg_names}} | none
            print("ld.global" in build(kernel, types, tile, {capability}, whole=()).asm["ptx"])
        """
    )
    assert printed.split() == ["True"] * 3
