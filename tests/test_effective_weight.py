"""The effective weight and the selective step as operators and kernels: against plain torch, float64, and builds."""

import pytest
import torch
from compile_kernel import compile_in_subprocess
from kernel_devices import KERNEL_DEVICES

from sparsecomp.lowering import effective_weight as lowered
from sparsecomp.lowering import selective_step as step
from sparsecomp.lowering.signature import Device, device_of
from sparsecomp.lowering.trial import fault
from sparsecomp.ops import effective_weight, selective_step
from sparsecomp.ops.effective_weight import pruned_before, split_pruned

H100 = Device("NVIDIA H100 80GB HBM3", "9.0", "3.6.0")
SHAPES = [(0,), (1,), (3, 5), (1024,), (1025,), (40, 100), (3, 7, 5, 31)]


def operands(shape, share=0.3, dtype=torch.float32, device="cpu"):
    random = torch.Generator().manual_seed(len(shape))
    mask = torch.rand(shape, generator=random) < share
    weight = torch.randn(shape, generator=random).to(dtype)
    theta = torch.randn(int((~mask).sum()), generator=random).to(dtype)
    return weight.to(device), theta.to(device), mask.to(device)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_the_parts_go_where_they_came_from(shape, dtype, share):
    weight, theta, mask = operands(shape, share, dtype)
    out = effective_weight(weight, theta, mask)
    assert torch.equal(out[mask], weight[mask]) and torch.equal(out[~mask], theta)
    kept, back = split_pruned(out, mask, theta.shape[0])
    assert torch.equal(back, theta) and torch.equal(kept, weight * mask)
    assert split_pruned(out, mask, theta.shape[0], active=False)[0] is None
    flat, before = (~mask).reshape(-1), pruned_before(mask)
    assert before.tolist() == [int(flat[: 1024 * block].sum()) for block in range(len(before))]


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("shape", [(1,), (3, 5), (1025,), (40, 100)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_agree_with_plain_torch_to_the_bit(device, shape, dtype):
    weight, theta, mask = operands(shape, 0.4, dtype, device)
    weight[~mask] = torch.nan  # what is pruned is not read
    before = pruned_before(mask)
    out = lowered.forward(weight, theta, mask, before)
    assert torch.equal(out, weight.masked_scatter(~mask, theta))
    kept, back = lowered.gradients(out, mask, before, theta.shape[0])
    assert torch.equal(kept, out.masked_fill(~mask, 0)) and torch.equal(back, theta)


@pytest.mark.parametrize("device", KERNEL_DEVICES)
def test_the_tuner_can_check_every_candidate(device):
    where = torch.device("cpu" if device == "interpreter" else device)
    problems = [
        (lowered.EFFECTIVE_WEIGHT, lowered.Effective(3000, "float32")),
        (lowered.EFFECTIVE_GRADIENTS, lowered.Effective(3000, "float16")),
    ]
    signature = step._signature(
        step.SelectiveStep(700, 10, 0.9, 0.999, -0.1, -0.001, 1.0, 1e-3, 1e-8, 0.5, 1e-12, "float32", "float32", "int32"),
        H100,
    )  # fmt: skip
    problems.append((step.SELECTIVE_STEP, step._representative(signature)))
    for operation, problem in problems:
        for candidate in operation.candidates(problem, device_of(where)):
            assert fault(operation, problem, where, candidate) is None
        again = operation.representative(operation.signature(problem, H100))
        assert operation.signature(again, H100).key == operation.signature(problem, H100).key


def test_gradients_are_copies_and_the_operators_are_well_formed():
    weight, theta, mask = operands((6, 9), 0.4, torch.float64)
    weight.requires_grad_(), theta.requires_grad_()
    assert torch.autograd.gradcheck(lambda w, t: effective_weight(w, t, mask), (weight, theta))
    assert torch.autograd.gradgradcheck(lambda w, t: effective_weight(w, t, mask), (weight, theta))
    effective_weight(weight, theta, mask).backward(gradient := torch.randn(6, 9, dtype=torch.float64))
    assert torch.equal(weight.grad, gradient * mask) and torch.equal(theta.grad, gradient[~mask])
    inputs = (weight, theta, mask, pruned_before(mask))
    torch.library.opcheck(torch.ops.sparsecomp.effective_weight.default, inputs)
    torch.library.opcheck(
        torch.ops.sparsecomp.effective_weight_gradients.default, (gradient, mask, inputs[3], theta.shape[0])
    )


def stepped(device, dtype, index, run):
    weight, _, mask = operands((30, 50), 0.3, dtype, device)
    pruned = (~mask).reshape(-1).nonzero().reshape(-1).to(index)
    slots = [torch.zeros(pruned.numel(), device=device) for _ in range(3)]
    steps = torch.zeros((), dtype=torch.int64, device=device)
    random = torch.Generator().manual_seed(7)
    drift = torch.randn(30, 50, generator=random)
    for _ in range(15):
        grad = (drift + 0.5 * torch.randn(30, 50, generator=random)).to(device, dtype)
        steps += 1
        run(weight, grad, pruned, *slots, steps)
    return weight, slots


SETTINGS = {
    "lr": 0.02,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.1,
    "tau": 0.5,
    "delta": 1e-12,
    "warm_up": 10,
}


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize(("dtype", "index"), [(torch.float32, torch.int32), (torch.float16, torch.int64)])
def test_the_kernel_s_step_is_the_reference_s(device, dtype, index):
    def kernel(weight, grad, pruned, mean, size, square, steps):
        numbers = {**SETTINGS, "beta": 0.9, "beta2": 0.999}
        del numbers["betas"]
        step.run(weight, grad, pruned, mean, size, square, steps, **numbers)

    ours, slots = stepped(device, dtype, index, kernel)
    theirs, expected = stepped("cpu", dtype, index, lambda *tensors: selective_step(*tensors, **SETTINGS))
    tolerance = 1e-5 if dtype is torch.float32 else 5e-3
    torch.testing.assert_close(ours.cpu(), theirs, rtol=tolerance, atol=tolerance)
    for slot, other in zip(slots, expected, strict=True):
        torch.testing.assert_close(slot.cpu(), other, rtol=1e-4, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_everything_runs_in_a_cuda_graph():
    weight, theta, mask = operands((300, 500), device="cuda")
    before = pruned_before(mask)
    pruned = (~mask).reshape(-1).nonzero().reshape(-1).int()
    slots = [torch.zeros(pruned.numel(), device="cuda") for _ in range(3)]
    steps, held = torch.zeros((), dtype=torch.int64, device="cuda"), weight.clone()
    grad = torch.randn_like(weight)

    def all_of_it():
        steps.add_(1)
        selective_step(held, grad, pruned, *slots, steps, **SETTINGS)
        return split_pruned(effective_weight(weight, theta, mask, before), mask, theta.shape[0], before)

    all_of_it()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept, back = all_of_it()
    for _ in range(15):
        graph.replay()
    assert torch.equal(kept, weight * mask) and torch.equal(back, theta) and int(steps) == 16
    assert not torch.equal(held, weight) and torch.equal(held[mask], weight[mask])


@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_build_without_spills(capability):
    printed = compile_in_subprocess(
        f"""
from sparsecomp.lowering.templates.effective_weight import effective_gradients_kernel, effective_weight_kernel
from sparsecomp.lowering.templates.selective_step import selective_step_kernel
for kernel in (effective_weight_kernel, effective_gradients_kernel, selective_step_kernel):
    types = {{n: "i32" if n in ("count", "pruned", "warm_up") else "fp32" for n in kernel.arg_names}}
    pointers = {{n: "*fp32" for n in kernel.arg_names if n.endswith("_ptr")}} | {{"mask_ptr": "*i1"}}
    types |= {{n: kind for n, kind in pointers.items() if n in types}}
    types |= {{n: "*i64" for n in ("before_ptr", "steps_ptr") if n in types}}
    types |= {{"pruned_ptr": "*i32"}} if "pruned_ptr" in types else {{}}
    kinds = {{n: "constexpr" if n == "B" else types[n] for n in kernel.arg_names}}
    aligned = {{(i,): [["tt.divisibility", 16]] for i, n in enumerate(kernel.arg_names) if kinds[n][0] == "*"}}
    source = ASTSource(kernel, kinds, {{"B": 1024}}, aligned)
    built = triton.compile(source, target=GPUTarget("cuda", {capability}, 32), options=dict(num_warps=4))
    print(".local" not in built.asm["ptx"], "st.global" in built.asm["ptx"])
"""
    )
    assert printed.split() == ["True", "True"] * 3
