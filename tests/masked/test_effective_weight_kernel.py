"""The effective weight and its inverse as operators and kernels, against boolean indexing, to the bit."""

import pytest
import torch
from compile_kernel import compile_in_subprocess
from kernel_devices import DEVICES, KERNEL_DEVICES, graph_of, needs_triton

from sparsecomp.errors import MaskError
from sparsecomp.lowering.cache.signature import Device, device_of
from sparsecomp.lowering.masked import effective_weight as lowered
from sparsecomp.lowering.tuning.trial import fault
from sparsecomp.ops import effective_weight, frozen_weights, split_pruned
from sparsecomp.ops.masked.effective_weight import fits_kernels, merge_cuda, merge_in_torch, split_cuda, split_in_torch

pytestmark = pytest.mark.quick_cases(2)

H100 = Device("NVIDIA H100 80GB HBM3", "9.0", "3.6.0")
SHAPES = [(1,), (3, 5), (32,), (1025,), (40, 100), (3, 7, 5, 31)]


def operands(shape, active=0.3, dtype=torch.float32, device="cpu"):
    random = torch.Generator().manual_seed(len(shape))
    mask = torch.rand(shape, generator=random) < active
    weight = torch.randn(shape, generator=random).to(dtype)
    theta = torch.randn(int((~mask).sum()), generator=random).to(dtype)
    return weight.to(device), theta.to(device), mask.to(device)


def by_indexing(weight, theta, mask):
    out = weight.clone()
    out[~mask] = theta
    return out


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(0,), *SHAPES])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
@pytest.mark.parametrize("active", [0.0, 0.3, 1.0])
def test_operators_put_the_parts_together_and_take_them_apart(device, shape, dtype, active):
    weight, theta, mask = operands(shape, active, dtype, device)
    out = effective_weight(weight, theta, mask)
    assert torch.equal(out, by_indexing(weight, theta, mask))
    kept, rest = split_pruned(out, mask, theta.shape[0])
    assert torch.equal(kept, weight * mask) and torch.equal(rest, theta)
    assert torch.equal(split_pruned(out, mask, theta.shape[0], active=False)[1], theta)
    assert torch.equal(split_pruned(out, mask, theta.shape[0], rest=False)[0], kept)


@pytest.mark.parametrize("shape", [(0,), *SHAPES])
@pytest.mark.parametrize("active", [0.0, 0.3, 1.0])
def test_weights_that_no_kernel_takes(shape, active):
    weight, theta, mask = operands(shape, active)
    out, pruned = by_indexing(weight, theta, mask), theta.shape[0]
    assert torch.equal(merge_in_torch(weight, theta, mask), out)
    kept, rest = split_in_torch(out, mask, pruned, True, True)
    assert torch.equal(kept, torch.where(mask, weight, 0)) and torch.equal(rest, theta)
    assert split_in_torch(out, mask, pruned, False, True)[0].numel() == 0
    assert split_in_torch(out, mask, pruned, True, False)[1].numel() == 0


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_kernels_copy_bits(device, shape, dtype):
    weight, theta, mask = operands(shape, 0.4, dtype, device)
    weight.view(-1)[::3] = -0.0
    weight[~mask] = torch.nan  # what is pruned is not read
    theta[:1] = torch.inf
    table = lowered.ranks(mask)
    out = lowered.merge_pruned(weight, theta, table)
    kept, rest = lowered.split_pruned_weight(out, table, theta.shape[0], True, True)
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}[weight.itemsize]
    assert torch.equal(out.view(kinds), by_indexing(weight, theta, mask).view(kinds))
    assert torch.equal(rest, theta) and torch.equal(kept, torch.where(mask, weight, 0))


@pytest.mark.parametrize("device", KERNEL_DEVICES)
def test_a_theta_of_another_length_is_nan_not_a_wrong_number(device):
    weight, theta, mask = operands((40, 100), device=device)
    table = lowered.ranks(mask)
    for wrong in (theta[1:].clone(), torch.cat([theta, theta[:1]]), theta[:0]):
        out = lowered.merge_pruned(weight, wrong, table)
        assert out[~mask].isnan().all() and torch.equal(out[mask], weight[mask])
        assert lowered.split_pruned_weight(weight, table, wrong.numel(), True, True)[1].isnan().all()


@needs_triton
@pytest.mark.quick_cases(4)
@pytest.mark.parametrize(("active", "rest"), [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_what_is_not_wanted_is_no_operand_of_what_is_timed(active, rest):
    whole, table, kept, pruned = lowered.SPLIT.operands(lowered.Split(90, 40, 4, active, rest), torch.device("cpu"), 0)
    assert whole.shape == (90,) and table.dtype is torch.int32
    assert (kept is None) != active and (pruned is None) != rest
    assert not active or kept.shape == whole.shape
    assert not rest or pruned.shape == (40,)


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.slow(reason="every candidate")
def test_the_tuner_can_check_every_candidate(device):
    where = torch.device(device, 0) if device == "cuda" else torch.device("cpu")
    problems = [
        (lowered.PACK_MASK, lowered.PackMask(3000)), (lowered.MERGE, lowered.Merge(3000, 2950, 4)),
        (lowered.MERGE, lowered.Merge(3008, 1000, 2)), (lowered.SPLIT, lowered.Split(3000, 2100, 4, 1, 1)),
    ]  # fmt: skip
    for operation, problem in problems:
        candidates = operation.candidates(problem, device_of(where))
        assert len(candidates) > 5
        assert [fault(operation, problem, where, candidate) for candidate in candidates] == [None] * len(candidates)
        signature = operation.signature(problem, H100)
        assert operation.signature(operation.representative(signature), H100).key == signature.key


@pytest.mark.parametrize("device", KERNEL_DEVICES)
def test_a_mask_is_packed_once_for_each_of_its_states(device):
    """The CUDA implementations themselves, in the interpreter too."""
    weight, theta, mask = operands((40, 100), device=device)
    found = []
    for _ in range(2):
        merged = merge_cuda(weight, theta, mask)
        found.append(torch.equal(split_cuda(merged, mask, theta.shape[0], False, True)[1], theta))
        mask.copy_(mask.flip(0))
    assert torch.equal(merge_cuda(weight, theta, mask), by_indexing(weight, theta, mask))
    turned = weight.t()
    assert torch.equal(
        merge_cuda(turned, theta, mask.reshape(100, 40)), by_indexing(turned, theta, mask.reshape(100, 40))
    )
    assert found == [True, True]


@pytest.mark.parametrize(("active", "rest"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("pruned", [0, 1, 20, 35])
def test_what_the_kernels_do_not_take_is_split_and_merged_in_torch(pruned, active, rest):
    """As on a GPU for other dtypes and sizes, where boolean indexing would wait."""
    mask = torch.ones(35, dtype=torch.bool)
    mask[torch.randperm(35, generator=torch.Generator().manual_seed(pruned))[:pruned]] = False
    mask, whole = mask.view(5, 7), torch.arange(1.0, 36.0).view(5, 7)
    whole[~mask] *= -1
    kept, gone = split_in_torch(whole, mask, pruned, active, rest)
    numbers = torch.arange(1.0, 36.0)[~mask.flatten()]
    assert torch.equal(kept, whole.clamp(min=0)) if active else kept.numel() == 0
    assert torch.equal(gone, -numbers) if rest else gone.numel() == 0
    assert torch.equal(merge_in_torch(whole.abs(), -numbers, mask), whole)


def test_gradients_are_copies_and_the_operators_are_well_formed():
    weight, theta, mask = operands((6, 9), 0.4, torch.float64)
    weight.requires_grad_(), theta.requires_grad_()
    assert torch.autograd.gradcheck(lambda w, t: effective_weight(w, t, mask), (weight, theta))
    assert torch.autograd.gradgradcheck(lambda w, t: effective_weight(w, t, mask), (weight, theta))
    pruned = theta.shape[0]
    for active, rest in ((True, True), (False, True), (True, False)):
        assert torch.autograd.gradcheck(
            lambda w, active=active, rest=rest: split_pruned(w, mask, pruned, active=active, rest=rest), (weight,)
        )
        torch.library.opcheck(torch.ops.sparsecomp.split_pruned.default, (weight, mask, pruned, active, rest))
    torch.library.opcheck(torch.ops.sparsecomp.effective_weight.default, (weight, theta, mask))
    gradient = torch.randn(6, 9, dtype=torch.float64)
    gradient[0, 0] = torch.inf
    effective_weight(weight, theta, mask).backward(gradient)
    assert torch.equal(weight.grad, gradient.masked_fill(~mask, 0)) and torch.equal(theta.grad, gradient[~mask])


def test_a_frozen_weight_leaves_theta_its_gradient_and_both_compile():
    weight, theta, mask = operands((6, 9), 0.4)
    theta.requires_grad_()
    x = torch.randn(4, 9)

    def loss(w, t):
        return (x @ effective_weight(w, t, mask).mT).square().sum()

    torch.compile(loss, backend="aot_eager", fullgraph=True)(weight, theta).backward()
    whole = by_indexing(weight, theta.detach(), mask).requires_grad_()
    (x @ whole.mT).square().sum().backward()
    assert weight.grad is None
    torch.testing.assert_close(theta.grad, whole.grad[~mask])


def test_bad_operands_are_named():
    weight, theta, mask = operands((6, 9))
    for call in (
        lambda: effective_weight(weight, theta[1:], mask), lambda: effective_weight(weight, theta, mask.float()),
        lambda: effective_weight(weight, theta.double(), mask), lambda: effective_weight(weight, theta, mask[:5]),
        lambda: effective_weight(weight, theta[:, None], mask), lambda: split_pruned(weight, mask, 60),
        lambda: split_pruned(weight, mask, theta.shape[0] - 1), lambda: split_pruned(weight.int(), mask, len(theta)),
        lambda: effective_weight(weight, theta, mask.to("meta")),
    ):  # fmt: skip
        with pytest.raises(MaskError, match="needed|cannot be pruned|prunes"):
            call()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("frozen", [False, True])
def test_a_cuda_graph_reads_the_mask_anew_unless_it_was_promised_to_stay(frozen):
    weight, theta, mask = operands((300, 500), device="cuda")
    first = mask.clone()

    def both():
        whole = effective_weight(weight, theta, mask)
        return whole, *split_pruned(whole, mask, theta.shape[0])

    with frozen_weights() if frozen else torch.no_grad():
        graph, (whole, kept, rest) = graph_of(both)
    mask.copy_(mask.flip(0))
    weight.neg_()
    graph.replay()
    seen = first if frozen else mask
    assert torch.equal(whole, by_indexing(weight, theta, seen))
    assert torch.equal(kept, weight * seen) and torch.equal(rest, theta)
    assert torch.equal(effective_weight(weight, theta, mask), by_indexing(weight, theta, mask))


@pytest.mark.slow(reason="builds for a GPU")
@pytest.mark.parametrize(("capability", "element"), [(80, "*i32"), (90, "*i16")])
def test_kernels_build_with_whole_vectors_and_population_counts(capability, element):
    printed = compile_in_subprocess(
        f"""
        from sparsecomp.lowering.masked.kernels.effective_weight import merge_kernel, pack_mask_kernel, split_kernel
        for kernel, more in ((merge_kernel, dict(ACTIVE_ONLY=False)), (split_kernel, {{}}), (pack_mask_kernel, {{}})):
            types = {{n: "{element}" if n.endswith("_ptr") else "i32" for n in kernel.arg_names}}
            types |= dict(table_ptr="*i32", mask_ptr="*u8")
            built = build(kernel, types, dict(ROWS=32, **more), {capability}, whole=("numel",), num_warps=4)
            ptx = built.asm["ptx"]
            vectors = kernel is pack_mask_kernel or ("ld.global.v4" in ptx and "st.global.v4" in ptx)
            print(vectors, "popc.b32" in ptx or kernel is pack_mask_kernel, ".local" not in ptx)
        """
    )
    assert printed.split() == ["True"] * 9


@pytest.mark.parametrize(
    ("size", "dtype", "fits"),
    [(0, torch.float32, False), (1, torch.float32, True), (2**31 - 2**16, torch.float16, True),
     (2**31 - 2**16 + 1, torch.float16, False), (4, torch.float64, True), (4, torch.int32, False)],
)  # fmt: skip
def test_kernels_take_what_they_can_count_in_32_bits(size, dtype, fits):
    assert fits_kernels(torch.empty(size, dtype=dtype, device="meta")) == fits
