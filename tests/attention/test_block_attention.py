"""The operator against torch's own attention by the dense boolean mask, in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sparsecomp.errors import FormatError, MaskError
from sparsecomp.ops import block_attention
from sparsecomp.reference.attention.blocks import blocks_of

TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def operands(
    batch: int, heads: int, kv_heads: int, q_len: int, k_len: int, depth: int, v_depth: int,
    dtype: torch.dtype = torch.float64,
) -> list[Tensor]:  # fmt: skip
    random = torch.Generator().manual_seed(q_len + depth)
    shapes = ((batch, heads, q_len, depth), (batch, kv_heads, k_len, depth), (batch, kv_heads, k_len, v_depth))
    return [torch.randn(shape, generator=random, dtype=torch.float64).to(dtype) for shape in shapes]


def mask_of(batch: int, heads: int, q_len: int, k_len: int) -> Tensor:
    """Empty, full and partial blocks of 32, and a query that keeps nothing."""
    random = torch.Generator().manual_seed(q_len * k_len)
    shape = (batch, heads, q_len, k_len)
    coarse = torch.rand((batch, heads, -(-q_len // 32), -(-k_len // 32)), generator=random)
    fine = coarse.repeat_interleave(32, 2).repeat_interleave(32, 3)[..., :q_len, :k_len]
    mask = (fine < 0.3) | (fine < 0.6) & (torch.rand(shape, generator=random) < 0.2)
    mask[..., q_len // 2, :] = False
    return mask


def dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None = None) -> Tensor:
    group = q.shape[1] // k.shape[1]
    k, v = (one.repeat_interleave(group, 1) for one in (k, v))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, mask, scale=scale)


SHAPES = [
    # batch, heads, heads of k, queries, keys, depth, depth of v; batch and heads of the mask; block
    ((2, 3, 3, 70, 100, 16, 16), (2, 3), (32, 32)),
    ((2, 4, 2, 65, 130, 24, 40), (1, 1), (64, 32)),
    ((1, 4, 1, 129, 33, 32, 32), (1, 4), (32, 64)),
    ((2, 2, 2, 1, 200, 8, 8), (2, 1), (32, 128)),
]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("sizes", "leading", "block"), SHAPES)
def test_it_is_torchs_attention_by_the_mask(sizes, leading, block, dtype):
    q, k, v = operands(*sizes, dtype=dtype)
    mask = mask_of(*leading, sizes[3], sizes[4])
    out, logsumexp = block_attention(q, k, v, blocks_of(mask, block))
    right = dense(q.double(), k.double(), v.double(), mask)
    assert out.dtype is dtype and out.shape == right.shape and out.stride() == right.contiguous().stride()
    torch.testing.assert_close(out.double(), right, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert not out[:, :, sizes[3] // 2].any()
    group = sizes[1] // sizes[2]
    score = q.double() @ k.double().repeat_interleave(group, 1).mT / sizes[5] ** 0.5
    sums = score.masked_fill(~mask, -torch.inf).logsumexp(-1)
    torch.testing.assert_close(logsumexp.double(), sums, rtol=max(TOLERANCE[dtype] / 100, 1e-11), atol=1e-5)


@pytest.mark.parametrize(("sizes", "leading", "block"), SHAPES[:3])
def test_gradients_are_those_of_torchs_attention(sizes, leading, block):
    given = [one.requires_grad_() for one in operands(*sizes)]
    mask = mask_of(*leading, sizes[3], sizes[4])
    out, _ = block_attention(*given, blocks_of(mask, block), scale=-0.3)
    right = dense(*given, mask, scale=-0.3)
    grad = torch.randn_like(out)
    for one, other in zip(torch.autograd.grad(out, given, grad), torch.autograd.grad(right, given, grad), strict=True):
        assert one.isfinite().all()
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("softcap", "biased"), [(1.5, False), (0.0, True), (1.5, True)])
def test_capped_and_biased_scores_beside_the_formula(softcap, biased):
    sizes = (2, 4, 2, 70, 100, 16, 24)
    q, k, v = given = [one.requires_grad_() for one in operands(*sizes)]
    mask = mask_of(1, 4, 70, 100)
    mask[..., 0] = True
    alibi = torch.tensor([0.01, 0.02, 0.04, -0.08]) if biased else None
    out, logsumexp = block_attention(*given, blocks_of(mask, (32, 32)), scale=0.4, softcap=softcap, alibi=alibi)
    score = 0.4 * q @ k.repeat_interleave(2, 1).mT
    if softcap:
        score = softcap * torch.tanh(score / softcap)
    if alibi is not None:
        score = score + alibi.double()[:, None, None] * (torch.arange(100) - torch.arange(70)[:, None])
    score = score.masked_fill(~mask, -torch.inf)
    right = score.softmax(-1) @ v.repeat_interleave(2, 1)
    torch.testing.assert_close(out, right, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(logsumexp, score.logsumexp(-1), rtol=1e-10, atol=1e-10)
    grad = torch.randn_like(out)
    for one, other in zip(torch.autograd.grad(out, given, grad), torch.autograd.grad(right, given, grad), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("more", [{"softcap": -1.0}, {"softcap": float("nan")}, {"alibi": torch.zeros(2)},
                                  {"alibi": torch.zeros(3, dtype=torch.float64)}])  # fmt: skip
def test_caps_and_slopes_that_are_none(more):
    q, k, v = operands(1, 3, 3, 8, 8, 4, 4)
    with pytest.raises(FormatError, match="needs"):
        block_attention(q, k, v, blocks_of(torch.ones(1, 1, 8, 8, dtype=torch.bool)), **more)


@pytest.mark.slow(reason="differentiates twice, by numbers")
def test_gradcheck_once_and_twice():
    given = [one.requires_grad_() for one in operands(1, 2, 1, 3, 34, 2, 1)]
    mask = mask_of(1, 2, 3, 34)
    mask[..., 0, :] = True
    mask[..., 1:, 0] = mask[..., 1:, 33] = True  # the logsumexp of a query that keeps nothing is no function
    blocks = blocks_of(mask, (32, 32))
    assert torch.autograd.gradcheck(lambda *args: block_attention(*args, blocks), given, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(lambda *args: block_attention(*args, blocks, softcap=2.0), given)


def test_any_strides_and_results_that_lie_as_q_does():
    q, k, v = (one.transpose(1, 2).contiguous().transpose(1, 2) for one in operands(2, 3, 3, 40, 40, 16, 16))
    v = v.mT.contiguous().mT
    mask = mask_of(1, 1, 40, 40)
    out, _ = block_attention(q, k, v, blocks_of(mask, (32, 32)))
    assert out.stride() == q.stride()
    torch.testing.assert_close(out, dense(q, k, v, mask), rtol=1e-11, atol=1e-11)


def test_what_is_not_kept_is_not_read_and_what_is_not_finite_stays_in_its_row():
    q, k, v = operands(1, 1, 1, 64, 96, 8, 8)
    mask = torch.zeros(1, 1, 64, 96, dtype=torch.bool)
    mask[..., :64] = True
    v[..., 64:, :] = k[..., 64:, :] = torch.nan
    q[0, 0, 3, 0] = torch.nan
    k[0, 0, :, 1], q[0, 0, 5, 1] = k[0, 0, :, 1].abs(), -torch.inf
    out, logsumexp = block_attention(q, k, v, blocks_of(mask, (32, 32)))
    assert out[0, 0, 3].isnan().all() and logsumexp[0, 0, 3].isnan()
    assert not out[0, 0, 5].any() and logsumexp[0, 0, 5] == -torch.inf
    finite = torch.ones(64, dtype=torch.bool)
    finite[[3, 5]] = False
    right = dense(q[:, :, finite], k[..., :64, :], v[..., :64, :], mask[..., finite, :64])
    torch.testing.assert_close(out[:, :, finite], right)


@pytest.mark.parametrize("sizes", [(0, 2, 2, 8, 8, 4, 4), (1, 2, 2, 0, 8, 4, 4), (1, 2, 2, 8, 0, 4, 4)])
def test_nothing(sizes):
    given = [one.requires_grad_() for one in operands(*sizes)]
    out, logsumexp = block_attention(*given, blocks_of(torch.ones(1, 1, *sizes[3:5], dtype=torch.bool)))
    assert out.shape == (*sizes[:2], sizes[3], sizes[6]) and not out.any() and (logsumexp == -torch.inf).all()
    for one, by in zip(given, torch.autograd.grad(out.sum(), given), strict=True):
        assert by.shape == one.shape and not by.any()


def test_opcheck_and_compile():
    given = [one.requires_grad_() for one in operands(1, 2, 1, 40, 50, 16, 16, torch.float32)]
    blocks = blocks_of(mask_of(1, 1, 40, 50), (32, 32))
    torch.library.opcheck(torch.ops.sparsecomp.block_attention.default, (*given, list(blocks[4:]), 0.25, 0.0, None))
    compiled = torch.compile(lambda *args: block_attention(*args)[0], backend="aot_eager", fullgraph=True)
    right = block_attention(*given, blocks)[0]
    found = compiled(*given, blocks)
    assert torch.equal(found, right)
    grads = [torch.autograd.grad(one, given, torch.ones_like(one)) for one in (found, right)]
    for one, other in zip(*grads, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("change", ["heads", "depth", "dtype", "batch", "dimensions", "length"])
def test_operands_that_do_not_belong_together(change):
    q, k, v = operands(1, 3, 3, 8, 8, 4, 4)
    q, k, v = {
        "heads": (q, k[:, :2], v[:, :2]), "depth": (q, k[..., :3], v), "dtype": (q, k.float(), v),
        "batch": (q.repeat(2, 1, 1, 1), k, v), "dimensions": (q[0], k, v), "length": (q, k, v[:, :, :7]),
    }[change]  # fmt: skip
    with pytest.raises(FormatError, match="need|must"):
        block_attention(q, k, v, blocks_of(torch.ones(1, 1, 8, 8, dtype=torch.bool)))


@pytest.mark.parametrize("shape", [(1, 1, 9, 8), (1, 1, 8, 9), (3, 1, 8, 8), (1, 2, 8, 8)])
def test_blocks_of_another_attention(shape):
    q, k, v = operands(2, 3, 3, 8, 8, 4, 4)
    with pytest.raises(MaskError, match="need|make"):
        block_attention(q, k, v, blocks_of(torch.ones(shape, dtype=torch.bool)))
