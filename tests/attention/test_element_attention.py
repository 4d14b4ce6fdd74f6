"""Attention over listed pairs beside torch's own by the dense mask, in float64: the operator, and its kernels."""

from typing import Any

import pytest
import torch
from candidates import check_candidates, place
from compile_kernel import compile_in_subprocess
from kernel_devices import DEVICES, KERNEL_DEVICES, graph_of
from torch import Tensor

from sparsecomp.attention import LocalWindow, RandomKeys
from sparsecomp.errors import FormatError, MaskError
from sparsecomp.formats import CSR
from sparsecomp.lowering.cache.signature import Device, device_of
from sparsecomp.ops import element_attention
from sparsecomp.reference.attention.blocks import blocks_of
from sparsecomp.reference.attention.elements import (
    AttentionElements,
    dense_mask_of_elements,
    elements_of_blocks,
    elements_of_mask,
    elements_of_matrix,
)

pytestmark = pytest.mark.quick_cases(1)

TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
H100 = Device("NVIDIA H100 80GB HBM3", "9.0", "3.6.0")

SHAPES = [
    # batch, heads, heads of k, queries, keys, depth, depth of v; batch and heads of the mask; share kept
    ((2, 2, 1, 17, 30, 16, 24), (1, 1), 0.1),
    ((2, 3, 1, 11, 21, 9, 16), (2, 3), 0.3),
    ((1, 2, 2, 1, 40, 32, 8), (1, 2), 0.9),
]


def mask_of(leading: tuple[int, ...], q_len: int, k_len: int, share: float) -> Tensor:
    """A query and a key that keep nothing, a query that keeps everything, and runs of empty ones."""
    mask = torch.rand((*leading, q_len, k_len), generator=torch.Generator().manual_seed(q_len)) < share
    mask[..., 5:9] = False
    mask[..., q_len // 3, :] = True
    mask[..., k_len // 2] = False
    mask[..., q_len // 2, :] = q_len == 1
    return mask


def operands(sizes: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    """q, k, v and a gradient, as models have them: heads behind tokens."""
    batch, heads, kv_heads, q_len, k_len, depth, v_depth = sizes
    random = torch.Generator().manual_seed(depth)
    shapes = ((batch, q_len, heads, depth), (batch, k_len, kv_heads, depth), (batch, k_len, kv_heads, v_depth),
              (batch, q_len, heads, v_depth))  # fmt: skip
    return [torch.randn(shape, generator=random).to(device, dtype).transpose(1, 2) for shape in shapes]


def masked(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float = 0.0, alibi: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The result, and the logsumexp with 0 where it is -inf."""
    group = q.shape[1] // k.shape[1]
    k, v = (one.repeat_interleave(group, 1) for one in (k, v))
    score = q @ k.mT * scale
    score = softcap * torch.tanh(score / softcap) if softcap else score
    if alibi is not None:
        place = torch.arange(k.shape[2], device=q.device) - torch.arange(q.shape[2], device=q.device)[:, None]
        score = score + alibi.double()[:, None, None] * place
    score = score.masked_fill(~mask, -torch.inf)
    sums = score.logsumexp(-1)
    return torch.softmax(score, -1).nan_to_num(0.0) @ v, sums.masked_fill(sums == -torch.inf, 0)


HOW: list[dict[str, Any]] = [{}, {"softcap": 1.5}, {"biased": True, "scale": -0.3}]


def settings(how: dict[str, Any], heads: int, device: str) -> dict[str, Any]:
    given = {"scale": 0.3, **how}
    if given.pop("biased", False):
        given["alibi"] = torch.arange(1, heads + 1, device=device) * 0.02
    return given


def assert_near(found: tuple[Tensor, ...], right: tuple[Tensor, ...], dtype: torch.dtype) -> None:
    for one, other in zip(found, right, strict=True):
        assert torch.linalg.vector_norm(one.double() - other) <= TOLERANCE[dtype] * torch.linalg.vector_norm(other)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("sizes", "leading", "share"), SHAPES)
@pytest.mark.parametrize("how", HOW, ids=str)
def test_results_and_gradients_are_those_of_the_mask(sizes, leading, share, how, device):
    mask, given = mask_of(leading, sizes[3], sizes[4], share).to(device), settings(how, sizes[1], device)
    beside = torch.linspace(-1, 1, sizes[0] * sizes[1] * sizes[3], device=device).view(sizes[0], sizes[1], sizes[3])
    for dtype in TOLERANCE:
        q, k, v, grad = operands(sizes, dtype, device)
        of = [one.requires_grad_() for one in (q, k, v)]
        wide = [one.detach().double().requires_grad_() for one in of]
        outs = masked(*wide, mask, **given)
        right = (*outs, *torch.autograd.grad(outs, wide, (grad.double(), beside.double())))
        out, logsumexp = element_attention(*of, elements_of_mask(mask), **given)
        assert torch.equal(logsumexp == -torch.inf, ~mask.any(-1).expand_as(logsumexp))
        assert not out[~mask.any(-1).expand_as(logsumexp)].any()
        sums = logsumexp.masked_fill(logsumexp == -torch.inf, 0)
        by = torch.autograd.grad((out, sums), of, (grad, beside.to(sums.dtype)))
        assert out.dtype is dtype and out.shape == right[0].shape
        assert_near((out, sums, *by), right, dtype)


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize(("sizes", "leading", "share"), SHAPES)
@pytest.mark.parametrize("how", HOW, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_kernels_beside_float64(dtype, sizes, leading, share, how, device):
    from sparsecomp.lowering.attention import element_attention as lowered
    from sparsecomp.lowering.attention import element_gradients as gradients
    from sparsecomp.reference.attention.scores import Scores

    mask, given = mask_of(leading, sizes[3], sizes[4], share).to(device), settings(how, sizes[1], device)
    beside = torch.linspace(-1, 1, sizes[0] * sizes[1] * sizes[3], device=device).view(sizes[0], sizes[1], sizes[3])
    lists = list(elements_of_mask(mask)[2:])
    scores = Scores(given["scale"], given.get("softcap", 0.0), given.get("alibi"))
    q, k, v, grad = operands(sizes, dtype, device)
    wide = [one.double().requires_grad_() for one in (q, k, v)]
    outs = masked(*wide, mask, **given)
    right = (*outs, *torch.autograd.grad(outs, wide, (grad.double(), beside.double())))
    out = torch.full_like(right[0], torch.nan, dtype=dtype)
    logsumexp = torch.full(q.shape[:3], torch.nan, device=device)
    lowered.element_attention(q, k, v, lists, scores, out, logsumexp)
    by = [torch.full_like(one, torch.nan) for one in (q, k, v)]
    gradients.element_gradients(grad, q, k, v, out, logsumexp, beside, lists, scores, *by)
    assert_near((out, logsumexp.masked_fill(logsumexp == -torch.inf, 0), *by), right, dtype)


@pytest.mark.parametrize("device", KERNEL_DEVICES)
def test_kernels_where_no_pair_is_kept(device):
    from sparsecomp.lowering.attention import element_attention as lowered
    from sparsecomp.lowering.attention import element_gradients as gradients
    from sparsecomp.reference.attention.scores import Scores

    q, k, v, grad = operands((1, 2, 1, 5, 7, 16, 16), torch.float32, device)
    lists = list(elements_of_mask(torch.zeros(1, 1, 5, 7, dtype=torch.bool, device=device))[2:])
    out, logsumexp = torch.full_like(grad, torch.nan), torch.full(q.shape[:3], torch.nan, device=device)
    lowered.element_attention(q, k, v, lists, Scores(0.25), out, logsumexp)
    assert not out.any() and bool((logsumexp == -torch.inf).all())
    by = [torch.full_like(one, torch.nan) for one in (q, k, v)]
    gradients.element_gradients(grad, q, k, v, out, logsumexp, None, lists, Scores(0.25), *by)
    assert not any(one.any() for one in by)


@pytest.mark.slow(reason="holds many configurations against float64")
@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("name", ["element_attention", "elements_by_query", "elements_by_key"])
def test_the_tuner_can_check_candidates(name, device):
    from sparsecomp.lowering.attention.element_attention import ElementAttention
    from sparsecomp.lowering.tuning.operations import all_operations

    operation = all_operations()[name]
    for dtype, softcap, biased in (("float32", 0.0, False), ("bfloat16", 2.0, True)):
        given = ElementAttention(1, 4, 2, 13, 21, 24, 32, 60, False, False, dtype, 0.2, (), softcap, biased)
        problem = operation.representative(operation.signature(given, device_of(place(device))))
        assert operation.signature(problem, H100).key == operation.signature(given, H100).key
        check_candidates(operation, problem._replace(by_head=True), device, 3)


def test_lists_are_those_of_the_mask():
    mask = mask_of((2, 3), 40, 50, 0.2)
    elements = elements_of_mask(mask)
    assert torch.equal(dense_mask_of_elements(elements), mask)
    turned = AttentionElements(elements.k_len, elements.q_len, *elements[4:], *elements[2:4])
    assert torch.equal(dense_mask_of_elements(turned), mask.mT)
    for one, other in zip(elements_of_blocks(blocks_of(mask, (32, 64))), elements, strict=True):
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other
    matrix = CSR.from_dense(mask[0, 0].float())
    for one, other in zip(elements_of_matrix(matrix), elements_of_mask(mask[:1, :1]), strict=True):
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other
    for pattern in (RandomKeys(3, seed=1, heads=2), LocalWindow(9, 3)):
        found = elements_of_blocks(pattern.to_blocks(70, 90, (32, 32)))
        assert torch.equal(dense_mask_of_elements(found), pattern.to_dense(70, 90))
    assert not elements_of_mask(torch.zeros(1, 1, 3, 4, dtype=torch.bool)).index.numel()
    for wrong in (mask.float(), mask[0]):
        with pytest.raises(MaskError, match=r"torch\.bool"):
            elements_of_mask(wrong)


def test_what_is_not_listed_is_not_read():
    q, k, v, _ = operands((1, 2, 1, 20, 30, 16, 16), torch.float64)
    mask = torch.ones(1, 1, 20, 30, dtype=torch.bool)
    mask[..., 7] = False
    wild = [one.clone() for one in (k, v)]
    for one in wild:
        one[:, :, 7] = torch.nan
    found = element_attention(q, *wild, elements_of_mask(mask))[0]
    torch.testing.assert_close(found, masked(q, k, v, mask, 0.25)[0])


def test_nothing_at_all():
    q, k, v, _ = operands((1, 2, 1, 20, 30, 16, 16), torch.float32)
    out, logsumexp = element_attention(q, k, v, elements_of_mask(torch.zeros(1, 1, 20, 30, dtype=torch.bool)))
    assert not out.any() and logsumexp.eq(-torch.inf).all()
    out, _ = element_attention(q, k[:, :, :0], v[:, :, :0], elements_of_mask(torch.ones(1, 1, 20, 0, dtype=torch.bool)))
    assert not out.any()
    everything = elements_of_mask(torch.ones(1, 1, 20, 30, dtype=torch.bool))
    assert element_attention(q[:0], k[:0], v[:0], everything)[0].numel() == 0


@pytest.mark.slow(reason="differentiates twice, by numbers")
def test_gradcheck_once_and_twice():
    given = [one.double().requires_grad_() for one in operands((1, 2, 1, 3, 9, 2, 1), torch.float64)[:3]]
    mask = torch.rand(1, 2, 3, 9, generator=torch.Generator().manual_seed(0)) < 0.4
    mask[..., 0] = True  # the logsumexp of a query that keeps nothing is no function
    lists = elements_of_mask(mask)
    assert torch.autograd.gradcheck(lambda *args: element_attention(*args, lists), given, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(lambda *args: element_attention(*args, lists, softcap=2.0), given)


@pytest.mark.slow(reason="traces the operator and its gradients")
def test_the_registered_operator():
    of = [one.requires_grad_() for one in operands((2, 4, 2, 6, 9, 8, 8), torch.float64)[:3]]
    lists = list(elements_of_mask(mask_of((1, 4), 6, 9, 0.4))[2:])
    torch.library.opcheck(torch.ops.sparsecomp.element_attention.default, (*of, lists, 0.3))


def test_what_does_not_fit_is_refused():
    q, k, v, _ = operands((2, 4, 2, 20, 30, 16, 16), torch.float32)
    lists = elements_of_mask(mask_of((1, 1), 20, 30, 0.3))
    for given, how, error, why in [
        ((q[:, :, :10], k, v, lists), {}, MaskError, "20 queries"),
        ((q, k, v, lists._replace(index=lists.index.long())), {}, MaskError, "int32"),
        ((q, k, v, elements_of_mask(mask_of((1, 3), 20, 30, 0.3))), {}, MaskError, "heads 1 or 4"),
        ((q[0], k, v, lists), {}, FormatError, "need"),
        ((q.half(), k, v, lists), {}, FormatError, "one floating dtype"),
        ((q, k, v[:1], lists), {}, FormatError, "one batch"),
        ((q[:, :3], k, v, lists), {}, FormatError, "must divide"),
        ((q, k, v, lists), {"softcap": -1.0}, FormatError, "softcap"),
        ((q, k, v, lists), {"scale": float("inf")}, FormatError, "scale"),
        ((q, k, v, lists), {"alibi": torch.zeros(3)}, FormatError, "alibi"),
    ]:  # fmt: skip
        with pytest.raises(error, match=why):
            element_attention(*given, **how)


@pytest.mark.slow(reason="compiles all kernels for two targets")
@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile(capability):
    printed = compile_in_subprocess(
        f"""
        from sparsecomp.lowering.attention.kernels.element_attention import element_attention_kernel
        from sparsecomp.lowering.attention.kernels.element_gradients import elements_by_key_kernel
        from sparsecomp.lowering.attention.kernels.element_gradients import elements_by_query_kernel
        own = dict(pointers_ptr="*i32", index_ptr="*i32", logsumexp_ptr="*fp32", grad_logsumexp_ptr="*fp32",
                   delta_ptr="*fp32", alibi_ptr="*fp32", scale="fp32", cap="fp32")
        for dtype in ("bf16", "fp32"):
            for kernel in (element_attention_kernel, elements_by_query_kernel, elements_by_key_kernel):
                tile = dict(GROUP=2, D=64, DV=40, BD=64, BDV=64, BM=4, BN=8, CAPPED=True, BIASED=True)
                types = {{n: own.get(n, "*" + dtype if n.endswith("_ptr") else "i32") for n in kernel.arg_names}}
                rows = [n for n in kernel.arg_names if n.endswith(("_row", "_head", "_batch")) and "list" not in n]
                built = build(kernel, types, tile, {capability}, whole=rows, num_warps=4, num_stages=2)
                print("ld.global" in built.asm["ptx"] or "cp.async" in built.asm["ptx"])
        """
    )
    assert printed.split() == ["True"] * 6


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
class TestOnAGpu:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    @pytest.mark.parametrize(
        "sizes", [(2, 8, 2, 700, 900, 64, 64), (1, 4, 4, 512, 512, 128, 128), (1, 2, 1, 300, 1000, 80, 40)]
    )
    def test_the_operator_and_its_gradients(self, sizes, dtype):
        mask = mask_of((1, sizes[1]), sizes[3], sizes[4], 0.03).cuda()
        q, k, v, grad = operands(sizes, dtype, "cuda")
        of = [one.requires_grad_() for one in (q, k, v)]
        wide = [one.detach().double().requires_grad_() for one in of]
        right = masked(*wide, mask, sizes[5] ** -0.5)[0]
        out, _ = element_attention(*of, elements_of_mask(mask))
        wanted = (right, *torch.autograd.grad(right, wide, grad.double()))
        assert_near((out, *torch.autograd.grad(out, of, grad)), wanted, dtype)

    def test_a_captured_call_gives_the_same_bits(self):
        q, k, v, _ = operands((2, 4, 2, 300, 300, 64, 64), torch.bfloat16, "cuda")
        of = [one.requires_grad_() for one in (q, k, v)]
        lists = elements_of_mask(mask_of((1, 1), 300, 300, 0.05).cuda())

        def step() -> tuple[Tensor, ...]:
            out, _ = element_attention(*of, lists)
            return out, *torch.autograd.grad(out, of, out.detach())

        graph, results = graph_of(step)
        with torch.no_grad():
            for one in of:
                one.mul_(-1.5)
        graph.replay()
        for one, other in zip(results, step(), strict=True):
            assert torch.equal(one, other)
