"""The product of two tensors of counts: its operator, and its kernel in the interpreter and on a GPU."""

import pytest
import torch
from compile_kernel import compile_in_subprocess
from kernel_devices import KERNEL_DEVICES, graph_of
from torch import Tensor

import sparsecomp.ops as ops

pytestmark = pytest.mark.quick_cases(2)


def counts(*shape: int, lo: int = 0, hi: int = 1, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(lo, hi + 1, shape, generator=generator).to(torch.int8)


OPERANDS: dict[str, tuple[Tensor, Tensor]] = {
    "matrices": (counts(33, 40), counts(40, 17, seed=1)),
    "one number": (counts(1, 1, lo=1), counts(1, 1, lo=1)),
    "heads": (counts(2, 3, 20, 4, 8).transpose(2, 3), counts(2, 3, 20, 4, 8, seed=1).permute(0, 1, 3, 4, 2)),
    "columns": (counts(3, 16, 50).mT, counts(3, 70, 16, seed=1).mT),
    "all bytes": (counts(2, 40, 300, lo=-128, hi=127), counts(2, 300, 33, lo=-128, hi=127, seed=1)),
    "every second": (counts(2, 40, 64)[:, ::2, ::2], counts(2, 32, 40, seed=1)[..., 1::2]),
    "shared": (counts(20, 32).expand(5, 20, 32), counts(5, 32, 20, seed=1)),
    "of no two strides": (
        counts(2, 5, 3, 20, 8).permute(1, 0, 2, 3, 4)[:, :, ::2],
        counts(5, 2, 2, 8, 20, seed=1),
    ),
    "no rows": (counts(2, 0, 8), counts(2, 8, 3)),
    "no depth": (counts(2, 4, 0), counts(2, 0, 3)),
    "no batch": (counts(0, 4, 8), counts(0, 8, 3)),
}


@pytest.mark.quick_cases(len(OPERANDS))
@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("name", OPERANDS)
def test_sums_are_exact_in_any_strides(device, name):
    from sparsecomp.lowering.spiking.spike_matmul import launch_spike_matmul

    a, b = (operand.to(device) for operand in OPERANDS[name])
    found = launch_spike_matmul(a, b, 0.25, torch.float32)
    exact = (a.cpu().long() @ b.cpu().long()).double() * 0.25
    assert torch.equal(found.cpu().double(), exact) and found.is_contiguous()


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int32, torch.int8])
def test_results_are_rounded_once(device, dtype):
    from sparsecomp.lowering.spiking.spike_matmul import launch_spike_matmul

    if device == "cpu" and dtype is torch.bfloat16:
        pytest.skip("the interpreter truncates where a GPU rounds to bfloat16")
    lo, hi = (0, 1) if dtype is torch.int8 else (-20, 20)
    a, b = counts(2, 40, 100, lo=lo, hi=hi).to(device), counts(2, 100, 33, lo=lo, hi=hi, seed=1).to(device)
    scale = 0.5 if dtype.is_floating_point else 1.0
    exact = (a.cpu().long() @ b.cpu().long()).double() * scale
    assert torch.equal(launch_spike_matmul(a, b, scale, dtype).cpu(), exact.to(dtype))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_on_a_gpu_operator_and_graph_give_float64s_bits(dtype):
    q, k = (counts(4, 8, 64, 12, 32, seed=seed).cuda().to(dtype).transpose(2, 3) for seed in (0, 1))
    exact = (q.double() @ k.mT.double() * 0.5).to(dtype)
    assert torch.equal(ops.spike_matmul(q * 0.5, k.mT, 0.5), exact)
    graph, result = graph_of(lambda: ops.spike_matmul(q * 0.5, k.mT, 0.5))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(result, exact)


@pytest.mark.parametrize("depth", [1024, 1025])
def test_on_a_cpu_sums_are_exact_at_any_depth(depth):
    """1024 products of two bytes are at most 2^24; of one more, float32 may lose the last bit."""
    a, b = torch.full((1, depth), -128, dtype=torch.int8), torch.full((depth, 1), -128, dtype=torch.int8)
    a[0, -1], b[-1, 0] = 1, 1
    found = torch.ops.sparsecomp.spike_matmul_counts(a, b, 1.0, torch.int32)
    assert found.item() == (depth - 1) * 2**14 + 1


def test_the_operator_is_matmul_and_its_gradients_are():
    operands = [(counts(2, 5, 7, hi=3, seed=seed).double() * 0.5).requires_grad_() for seed in (0, 1)]
    a, b = operands[0], operands[1].mT
    seed = torch.randn(2, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    out = ops.spike_matmul(a, b, 0.5, 0.5)
    assert torch.equal(out, a @ b) and not out._is_view()
    for found, expected in zip(torch.autograd.grad(out, operands, seed), torch.autograd.grad(a @ b, operands, seed),
                               strict=True):  # fmt: skip
        assert torch.equal(found, expected)
    torch.autograd.gradgradcheck(lambda a, b: ops.spike_matmul(a, b.mT, 0.5, 0.5), operands)


def test_opcheck():
    a, b = (counts(2, 5, 7, seed=seed).float().requires_grad_() for seed in (0, 1))
    torch.library.opcheck(torch.ops.sparsecomp.spike_matmul.default, (a, b.mT))
    counted = (counts(2, 5, 7), counts(2, 5, 7, seed=1).mT, 0.5, torch.float16)
    torch.library.opcheck(torch.ops.sparsecomp.spike_matmul_counts.default, counted)


def test_the_decomposition_multiplies_bytes():
    a, b = (counts(2, 3, 5, 7, hi=3, seed=seed).float() * scale for seed, scale in ((0, 0.5), (1, 4.0)))
    decompose = ops.decompositions()[torch.ops.sparsecomp.spike_matmul.default]
    found = decompose(a, b.mT, 0.5, 4.0)
    assert torch.equal(found, a @ b.mT) and found.stride() == (a @ b.mT).stride()


@pytest.mark.slow(reason="builds for a GPU")
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("transposed", [False, True])
def test_compiles_to_int8_tensor_cores(capability, transposed):
    printed = compile_in_subprocess(
        f"""
        from sparsecomp.lowering.spiking.kernels.spike_matmul import spike_matmul_kernel as kernel
        types = dict(a_ptr="*i8", b_ptr="*i8", out_ptr="*fp32", scale="fp32")
        types = {{n: types.get(n, "i32") for n in kernel.arg_names}}
        ones = dict(a_column=1, **{{"b_row" if {transposed} else "b_column": 1}})
        whole = ("M", "N", "K", "a_row", "a_inner", "a_outer", "b_inner", "b_outer", "b_row", "b_column")
        constants = dict(BM=64, BN=64, BK=64, **ones)
        built = build(kernel, types, constants, {capability}, whole=whole, num_warps=4, num_stages=2)
        ptx = built.asm["ptx"]
        print(ptx.count("s32.s8.s8"), "ld.local" in ptx)
        """
    )
    products, spills = printed.split()
    assert int(products) >= 1 and spills == "False"


@pytest.mark.parametrize("trained", [0, 1])
def test_only_what_a_gradient_needs_is_saved(trained):
    operands = [counts(5, 5, seed=seed).float() for seed in (0, 1)]
    operands[trained].requires_grad_()
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        ops.spike_matmul(*operands).sum().backward()
    assert [tensor.data_ptr() for tensor in saved] == [operands[1 - trained].data_ptr()]
