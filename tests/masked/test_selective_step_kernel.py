"""The selective step as an operator and a kernel: against torch's AdamW, closed forms and float64."""

import pytest
import torch
from compile_kernel import compile_in_subprocess
from kernel_devices import DEVICES, KERNEL_DEVICES, graph_of

from sparsecomp.errors import MaskError
from sparsecomp.lowering.cache.signature import Device, device_of
from sparsecomp.lowering.masked import selective_step as lowered
from sparsecomp.lowering.tuning.trial import fault
from sparsecomp.ops import selective_step

pytestmark = pytest.mark.quick_cases(2)

H100 = Device("NVIDIA H100 80GB HBM3", "9.0", "3.6.0")
SETTINGS = {
    "lr": 0.02, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "tau": 0.5, "delta": 1e-12, "warm_up": 10,
}  # fmt: skip


def start(device="cpu", dtype=torch.float32, index=torch.int32, shape=(30, 50)):
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=random).to(device, dtype)
    pruned = (torch.rand(shape, generator=random) > 0.3).reshape(-1).nonzero().reshape(-1).to(device, index)
    slots = [torch.zeros(pruned.numel(), device=device) for _ in range(3)]
    return weight, pruned, slots, torch.zeros((), dtype=torch.int64, device=device)


def kernel(weight, grad, pruned, mean, size, square, steps, *, lr, **settings):
    """What the operator does on CUDA, in the interpreter too."""
    lr = lr if isinstance(lr, torch.Tensor) else torch.full((), lr, dtype=torch.float64, device=weight.device)
    if settings.get("count") is not None:
        settings["count"] = torch.as_tensor(settings["count"], device=weight.device)
    lowered.selective_step(weight, grad, pruned, (mean, size, square), steps, lr, **settings)


STEPS = [
    *(pytest.param(kernel, *one.values, id=f"kernel-{one.id}", marks=one.marks) for one in KERNEL_DEVICES),
    pytest.param(selective_step, "cpu", id="operator"),
]


def gradients(count, shape=(30, 50), noise=0.5):
    random = torch.Generator().manual_seed(7)
    drift = torch.randn(shape, generator=random)
    return [drift + noise * torch.randn(shape, generator=random) for _ in range(count)]


@pytest.mark.parametrize(("step", "device"), STEPS)
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_with_everything_selected_it_is_torch_s_adamw(step, device, index):
    weight, pruned, slots, steps = start(device, index=index)
    before = weight.clone()
    theta = weight.view(-1)[pruned.long()].clone().requires_grad_()
    settings = {key: SETTINGS[key] for key in ("lr", "betas", "eps", "weight_decay")}
    theirs = torch.optim.AdamW([theta], **settings, foreach=False)
    for grad in gradients(8):
        steps += 1
        step(weight, grad.to(device), pruned, *slots, steps, **settings, tau=0.0, delta=1e-12, warm_up=0)
        theta.grad = grad.to(device).view(-1)[pruned.long()]
        theirs.step()
    torch.testing.assert_close(weight.view(-1)[pruned.long()], theta.detach(), rtol=2e-6, atol=2e-6)
    untouched = torch.ones_like(weight, dtype=torch.bool)
    untouched.view(-1)[pruned.long()] = False
    assert torch.equal(weight[untouched], before[untouched])


@pytest.mark.parametrize(("step", "device"), STEPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_what_agrees_moves_by_lr_and_nothing_else_or_before_the_warm_up(step, device, dtype):
    """A constant gradient gives C = 1 and Adam's step sign(g); one that alternates gives C near 0; NaN gives NaN."""
    weight, pruned, slots, steps = start(device, dtype)
    weight.fill_(1.0)
    grad = torch.full_like(weight, 2.0)
    settings = {**SETTINGS, "lr": 0.125, "weight_decay": 0.0}
    wild, still = pruned[:100].long(), pruned[100:200].long()
    for count in range(12):
        grad.view(-1)[wild] = 2.0 * (-1) ** count
        grad.view(-1)[still] = torch.nan if count == 3 else 2.0
        steps += 1
        step(weight, grad, pruned, *slots, steps, **settings)
        if count < 10:
            assert weight.eq(1).all(), "C is not meaningful yet"
    flat = weight.view(-1)
    assert flat[wild].eq(1).all() and flat[still].eq(1).all()
    # two steps of 1/8, on the way exact in every dtype but for Adam's own roundings
    torch.testing.assert_close(
        flat[pruned[200:].long()].float(), torch.full_like(slots[0][200:], 0.75), rtol=0, atol=4e-3
    )
    assert int((weight != 1).sum()) == pruned.numel() - 200


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.slow(reason="every candidate")
def test_the_tuner_can_check_every_candidate(device):
    where = torch.device(device, 0) if device == "cuda" else torch.device("cpu")
    numbers = (10, 0.9, 0.999, 0.5, 1e-12, 1e-8, 0.1)
    problems = [
        lowered.SelectiveStep(phase, pruned, 3000, whole, *numbers, *dtypes)
        for phase in ("all", "average", "move")
        for pruned, whole, *dtypes in (
            (2000, 0, "float32", "float32", "int32", "float64"),
            (2000, 1, "float16", "float32", "int64", "float32"),
            (3000, 1, "float32", "bfloat16", "uint8", "float64"),
        )
    ]
    for problem in problems:
        candidates = lowered.SELECTIVE_STEP.candidates(problem, device_of(where))
        assert len(candidates) > 5
        faults = [fault(lowered.SELECTIVE_STEP, problem, where, candidate) for candidate in candidates]
        assert faults == [None] * len(candidates)
        signature = lowered.SELECTIVE_STEP.signature(problem, H100)
        again = lowered.SELECTIVE_STEP.representative(signature)
        assert lowered.SELECTIVE_STEP.signature(again, H100).key == signature.key


@pytest.mark.parametrize("device", KERNEL_DEVICES)
def test_a_rate_on_the_device_is_the_same_as_a_number(device):
    found = []
    for lr in (0.02, torch.tensor(0.02, device=device), torch.tensor(0.02, dtype=torch.float64, device=device)):
        weight, pruned, slots, steps = start(device)
        for grad in gradients(14):
            steps += 1
            kernel(weight, grad.to(device), pruned, *slots, steps, **{**SETTINGS, "lr": lr})
        found.append(weight)
    assert torch.equal(found[0], found[2])
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("step", "device"), STEPS)
def test_a_count_takes_the_most_consistent_and_of_equals_the_first(step, device):
    weight, pruned, slots, steps = start(device)
    before, noise = weight.clone(), 3.0
    for count in range(12):
        grad = torch.full_like(weight, 1.0)
        grad.view(-1)[pruned[:50].long()] += noise * (-1) ** count
        steps += 1
        step(weight, grad, pruned, *slots, steps, **SETTINGS, count=70)
    moved = (weight != before).reshape(-1).nonzero().reshape(-1)
    assert torch.equal(moved, pruned[50:120].long())


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("step", "device"), STEPS)
@pytest.mark.parametrize("count", [None, 300])
def test_averages_may_lie_in_the_weight_s_own_moments(step, device, count):
    weight, pruned, slots, steps = start(device)
    held, size = weight.clone(), slots[1].clone()
    moments = [torch.full_like(weight, 7.0) for _ in range(2)]
    for moment in moments:
        moment.view(-1)[pruned.long()] = 0
    for grad in gradients(14):
        steps += 1
        step(weight, grad.to(device), pruned, *slots, steps, **SETTINGS, count=count)
        step(held, grad.to(device), pruned, moments[0], size, moments[1], steps, **SETTINGS, count=count, whole=True)
    assert torch.equal(held, weight) and torch.equal(size, slots[1])
    for moment, slot in zip(moments, (slots[0], slots[2]), strict=True):
        assert torch.equal(moment.view(-1)[pruned.long()], slot)
        assert int((moment == 7).sum()) == weight.numel() - pruned.numel()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("step", "device"), STEPS)
@pytest.mark.parametrize("count", [None, 300])
def test_a_mask_means_what_the_positions_mean(step, device, count):
    """To the bit; and what is not pruned of the averages keeps its bits, NaN too."""
    weight, pruned, slots, steps = start(device)
    held, places = weight.clone(), pruned.long()
    mask = torch.zeros_like(weight, dtype=torch.bool).view(-1).index_fill_(0, places, True).view_as(weight)
    averages = [torch.full_like(weight, float("nan")) for _ in range(3)]  # they begin anew at the first step
    places_of = count if count is None else torch.tensor(count, device=device)
    for number, grad in enumerate(gradients(14)):
        if number == 5:
            grad[0] = float("nan")
        steps += 1
        step(weight, grad.to(device), pruned, *slots, steps, **SETTINGS, count=count)
        step(held, grad.to(device), mask, *averages, steps, **SETTINGS, count=places_of)
    torch.testing.assert_close(held, weight, rtol=0, atol=0, equal_nan=True)
    for average, slot in zip(averages, slots, strict=True):
        torch.testing.assert_close(average.view(-1)[places], slot, rtol=0, atol=0, equal_nan=True)
        assert average[~mask].isnan().all()


@pytest.mark.parametrize(("step", "device"), STEPS)
def test_averages_begin_at_the_first_step_whatever_is_there(step, device):
    weight, pruned, slots, steps = start(device)
    held, others = weight.clone(), [torch.full_like(slot, float("nan")) for slot in slots]
    for grad in gradients(12):
        steps += 1
        step(weight, grad.to(device), pruned, *slots, steps, **SETTINGS)
        step(held, grad.to(device), pruned, *others, steps, **SETTINGS)
    assert torch.equal(held, weight) and all(map(torch.equal, others, slots))


@pytest.mark.parametrize("device", DEVICES)
def test_a_weight_of_any_strides_and_what_is_written_is_counted(device):
    weight, pruned, slots, steps = start(device)
    turned = torch.nn.Parameter(weight.t().contiguous().t())
    assert not turned.is_contiguous()
    for grad in gradients(14):
        steps += 1
        versions = [one._version for one in (turned, *slots)]
        selective_step(turned, grad.to(device).t().contiguous().t(), pruned, *slots, steps, **SETTINGS)
        assert all(one._version > old for one, old in zip((turned, *slots), versions, strict=True))
    held, _, others, steps = start(device)
    for grad in gradients(14):
        steps += 1
        selective_step(held, grad.to(device), pruned, *others, steps, **SETTINGS)
    assert torch.equal(turned, held) and not torch.equal(held, weight)


def test_no_pruned_elements_and_float64():
    weight, pruned, slots, steps = start(dtype=torch.float64)
    selective_step(weight, weight, pruned[:0], *(slot[:0] for slot in slots), steps + 1, **SETTINGS)
    for grad in gradients(11):
        steps += 1
        selective_step(weight, grad.double(), pruned, *slots, steps, **SETTINGS)
    assert weight.dtype is torch.float64 and not torch.equal(weight, weight.float().double()), "theta keeps its digits"


def test_bad_operands_are_named_and_the_operator_is_well_formed():
    weight, pruned, slots, steps = start(shape=(4, 6))
    numbers = (0.9, 0.999, 1e-8, 0.1, 0.5, 1e-12, 0)
    for count in (None, torch.tensor(3)):
        torch.library.opcheck(
            torch.ops.sparsecomp.selective_step.default,
            (weight, weight.clone(), pruned, *slots, steps + 1, torch.tensor(0.1), *numbers, count, False),
        )
        moments = [torch.zeros_like(weight) for _ in range(3)]
        torch.library.opcheck(
            torch.ops.sparsecomp.selective_step.default,
            (weight, weight.clone(), weight > 0, *moments, steps + 1, torch.tensor(0.1), *numbers, count, True),
        )
    unlike = [slots[0], slots[1][1:], slots[2]]
    for call in (
        lambda: selective_step(weight, weight[1:], pruned, *slots, steps, **SETTINGS),
        lambda: selective_step(weight, weight, pruned, *unlike, steps, **SETTINGS),
        lambda: selective_step(weight, weight, pruned, *(slot.double() for slot in slots), steps, **SETTINGS),
        lambda: selective_step(weight, weight, pruned.float(), *slots, steps, **SETTINGS),
        lambda: selective_step(weight, weight, weight > 0, *slots, steps, **SETTINGS),
        lambda: selective_step(weight, weight, weight[1:] > 0, *slots, steps, **SETTINGS),
        lambda: selective_step(weight, weight, pruned, *slots, steps.float(), **SETTINGS),
        lambda: selective_step(weight, weight, pruned, *slots, steps.to("meta"), **SETTINGS),
        lambda: selective_step(weight, weight, pruned, *slots, steps, **SETTINGS, count=len(pruned) + 1),
        lambda: selective_step(weight, weight, pruned, *slots, steps, **SETTINGS, whole=True),
    ):
        with pytest.raises(MaskError, match="match|averages|floating|0-d|device|selected"):
            call()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_cuda_graph_reads_steps_rate_and_gradient_anew():
    weight, pruned, slots, steps = start("cuda", shape=(300, 500))
    expected, _, others, number = start("cuda", shape=(300, 500))
    grad, rate = torch.zeros_like(weight), torch.tensor(0.0, device="cuda")

    def step():
        steps.add_(1)
        selective_step(weight, grad, pruned, *slots, steps, **{**SETTINGS, "lr": rate})

    graph, _ = graph_of(step)
    for held in (steps, *slots):
        held.zero_()
    for place, new in enumerate(gradients(14, (300, 500))):
        grad.copy_(new)
        rate.fill_(0.01 * place)
        graph.replay()
        number += 1
        selective_step(expected, grad, pruned, *others, number, **{**SETTINGS, "lr": rate})
    assert torch.equal(weight, expected) and int(steps) == 14
    assert not torch.equal(weight, start("cuda", shape=(300, 500))[0])


@pytest.mark.slow(reason="builds for a GPU")
@pytest.mark.parametrize("by_mask", [False, True])
@pytest.mark.parametrize(("capability", "element"), [(80, "*fp32"), (90, "*bf16")])
def test_the_kernel_builds_with_whole_vectors(capability, element, by_mask):
    printed = compile_in_subprocess(
        f"""
        from sparsecomp.lowering.masked.kernels.selective_step import selective_step_kernel as kernel
        constants = dict(BLOCK=512, PHASE="all", WHOLE={by_mask}, MASK={by_mask}, consistency_ptr=None,
                         selected_ptr=None)
        types = {{n: "*fp32" if n.endswith("_ptr") else "fp32" for n in kernel.arg_names}}
        listed = "*u8" if {by_mask} else "*i32"
        types |= dict(weight_ptr="{element}", grad_ptr="{element}", pruned_ptr=listed, step_ptr="*i64")
        types |= dict(rate_ptr="*fp64", pruned="i32", warm_up="i32")
        ptx = build(kernel, types, constants, {capability}, whole=(), num_warps=4).asm["ptx"]
        print(ptx.count("ld.global.v4"), ptx.count("st.global.v4"), ".local" not in ptx)
        """
    )
    loads, stores, clean = printed.split()
    # positions and three averages, and the averages back, whatever the number of elements; a mask's bytes are one word
    of_gradient = 1 if element == "*fp32" else 0
    assert int(loads) == (3 + of_gradient if by_mask else 4) and int(stores) == 3 and clean == "True"


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("strided", [False, True])
def test_cuda_steps_like_the_reference_whatever_the_weights_memory(dtype, strided, device):
    """A kernel steps a contiguous copy of a strided weight; other dtypes than its own are the reference's."""
    from importlib import import_module

    module = import_module("sparsecomp.ops.masked.selective_step")
    found = []
    for step in (module.step_cuda, module.step_reference):
        weight, pruned, slots, steps = start(device, dtype)
        weight = weight.T.contiguous().T if strided else weight
        lr = torch.tensor(0.02, dtype=torch.float64, device=device)
        for grad in gradients(3):
            grad = grad.to(device, dtype)
            steps += 1
            version = weight._version
            step(
                weight, grad.T.contiguous().T if strided else grad, pruned, *slots, steps, lr, 0.9, 0.999, 1e-8, 0.1,
                0.5, 1e-12, 1, None, False,
            )  # fmt: skip
            assert weight._version > version
        found.append([tensor.double().cpu() for tensor in (weight, *slots)])
    bound = 2e-2 if dtype is torch.bfloat16 else 1e-5  # three roundings apart
    for ours, right in zip(*found, strict=True):
        torch.testing.assert_close(ours, right, rtol=bound, atol=bound)
    assert not torch.equal(found[0][0], start(dtype=dtype)[0].double())
