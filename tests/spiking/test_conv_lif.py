"""A convolution and its neurons in one launch, held against the two launches that it replaces, bit for bit."""

import re

import pytest
import torch
import torch.nn.functional as F
from compile_kernel import compile_in_subprocess
from kernel_devices import KERNEL_DEVICES

from sparsecomp import ops
from sparsecomp.errors import InputError
from sparsecomp.reference.digits import SPREAD

pytestmark = pytest.mark.quick_cases(1)


def neuron_arguments(charge="lif", decay=True, reset=0.0, v=None, norm=None, threshold=0.7, tau=1.7, device="cpu"):
    rate = torch.tensor(0.37, device=device) if charge == "plif" else None
    return (v, 0.1, *(norm or (None,) * 4), 1e-5, charge, tau, rate, decay, threshold, reset)


def statistics(channels, device, affine=True):
    random = torch.Generator().manual_seed(1)
    mean, gamma, beta = (torch.randn(channels, generator=random).to(device) for _ in range(3))
    var = (torch.rand(channels, generator=random) + 0.5).to(device)
    return (mean, var, gamma, beta) if affine else (mean, var, None, None)


def both(x, weight, bias, window, groups, digits, channels_last, steps, neuron, scale=1.0, keep=True, **joins):
    """Spikes and last membranes of one launch, and of the two launches, and what the neurons are given where `joins`
    asks for it, which has also what is added, a residual, and how."""
    from sparsecomp.lowering.spiking import conv_lif, lif, spike_conv
    from sparsecomp.lowering.spiking.packing import to_bytes

    counts = to_bytes(x)
    how = (*window, groups, digits)
    *fused, currents = conv_lif.launch_conv_lif(
        counts, weight, bias, *how, scale, SPREAD, channels_last, steps, *neuron, keep, **joins
    )  # fmt: skip
    current = spike_conv.launch_counts(counts, weight, bias, *how, "binary", scale, None, SPREAD, channels_last)
    apart = lif.launch_lif(current.unflatten(0, (steps, -1)), *neuron)
    assert joins.get("currents") or currents.shape == (0,)
    return (*fused, currents) if joins.get("currents") else tuple(fused), apart


def sample(shape, kernel, device, seed=0, high=1):
    random = torch.Generator().manual_seed(seed)
    x = (torch.rand(shape, generator=random) < 0.3) * torch.randint(1, high + 1, shape, generator=random)
    weight = torch.randn(kernel, generator=random) / 4
    return x.to(device, torch.int8), weight.to(device), torch.randn(kernel[0], generator=random).to(device) / 8


def assert_same(fused, apart):
    for ours, theirs in zip(fused, apart, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
        of_several = [dim for dim, size in enumerate(ours.shape) if size > 1 and ours.numel()]
        assert [ours.stride(dim) for dim in of_several] == [theirs.stride(dim) for dim in of_several]


PLANE = ([1, 1], [1, 1], [1, 1])
JOINED = {"add": lambda s, r: r + s, "and": lambda s, r: r & -s, "iand": lambda s, r: r & (s - 1)}
"""Of bytes, by their bits."""


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize(
    ("charge", "decay", "reset", "norm", "steps"),
    [
        ("lif", True, 0.0, "affine", 4), ("if", False, 0.25, "none", 3), ("plif", True, None, "plain", 2),
        ("lif", False, None, "none", 1), ("plif", False, 0.0, "affine", 5), ("if", True, None, "affine", 8),
        ("lif", True, 0.25, "plain", 16), ("lif", False, 0.25, "affine", 4), ("plif", True, 0.25, "none", 4),
        ("if", False, 0.0, "plain", 1), ("lif", True, None, "affine", 6),
    ],
)  # fmt: skip
@pytest.mark.slow(reason="interprets both ways")
def test_bits_equal_the_two_launches(device, charge, decay, reset, norm, steps):
    x, weight, bias = sample((2 * steps, 64, 5, 3), (72, 64, 3, 3), device)
    norms = None if norm == "none" else statistics(72, device, norm == "affine")
    neuron = neuron_arguments(charge, decay, reset, norm=norms, tau=2.0 if steps % 4 else 1.7, device=device)
    fused, apart = both(x, weight, None if norm == "affine" else bias, PLANE, 1, 3, True, steps, neuron)
    assert 0.02 < fused[0].float().mean() < 0.98
    assert_same(fused, apart)


LAYERS = {
    "contiguous": ((8, 32, 5, 4), (40, 32, 3, 3), PLANE, 1, 3, False),
    "strided": ((8, 32, 9, 7), (33, 32, 3, 2), ([2, 1], [1, 0], [1, 2]), 1, 2, True),
    "four digits": ((4, 64, 4, 4), (32, 64, 3, 3), PLANE, 1, 4, True),
    "groups": ((8, 64, 5, 3), (96, 32, 3, 3), PLANE, 2, 3, True),
    "odd channels": ((8, 19, 5, 3), (21, 19, 3, 3), PLANE, 1, 3, True),
    "one output channel": ((8, 32, 4, 3), (1, 32, 3, 3), PLANE, 1, 3, True),
    "linear": ((36, 40, 1, 1), (70, 40), ([1, 1], [0, 0], [1, 1]), 1, 3, True),
    "signals": ((8, 32, 9), (40, 32, 3), ([2], [1], [1]), 1, 3, True),
    "volumes": ((8, 16, 3, 4, 3), (24, 16, 3, 1, 2), ([1, 2, 1], [1, 0, 1], [1, 1, 1]), 1, 3, True),
    "no images": ((0, 32, 5, 5), (8, 32, 3, 3), PLANE, 1, 3, True),
}


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_every_kind(name, device):
    shape, kernel, window, groups, digits, channels_last = LAYERS[name]
    x, weight, bias = sample(shape, kernel, device, high=3)
    neuron = neuron_arguments("lif", norm=statistics(kernel[0], device), device=device)
    fused, apart = both(x, weight, bias, window, groups, digits, channels_last, 4, neuron)
    assert_same(fused, apart)


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("connect", JOINED)
@pytest.mark.parametrize("name", ["odd channels", "contiguous", "groups", "linear", "volumes", "no images"])
def test_a_residual_is_joined_with_the_spikes(name, connect, device):
    """Sums of a byte wrap around, as those of torch do."""
    shape, kernel, window, groups, digits, channels_last = LAYERS[name]
    x, weight, bias = sample(shape, kernel, device, high=3)
    neuron = neuron_arguments("lif", norm=statistics(kernel[0], device), device=device)
    alone, _ = both(x, weight, bias, window, groups, digits, channels_last, 4, neuron)
    assert 0.02 < alone[0].float().mean() < 0.98 or not alone[0].numel()
    residual = torch.randint(-128, 128, alone[0].shape, generator=torch.Generator().manual_seed(2), dtype=torch.int8)
    residual = residual.flatten(2) if name == "linear" else residual
    fused, _ = both(
        x, weight, bias, window, groups, digits, channels_last, 4, neuron, residual=residual.to(device), connect=connect
    )
    expected = JOINED[connect](alone[0], residual.to(device).view_as(alone[0]))
    assert_same(fused, (torch.empty_like(alone[0]).copy_(expected), alone[1]))


@pytest.mark.slow(reason="interprets both ways")
@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("kind", [torch.int8, torch.float32])
@pytest.mark.parametrize("name", ["odd channels", "contiguous", "linear", "no images"])
def test_what_neurons_are_given_besides(name, kind, device):
    """A sum behind the batch-norm, which then is apart from the neurons."""
    from sparsecomp.lowering.spiking import lif, spike_conv

    shape, kernel, window, groups, digits, channels_last = LAYERS[name]
    x, weight, bias = sample(shape, kernel, device, high=3)
    neuron = neuron_arguments("lif", device=device)
    norm = (torch.zeros(kernel[0], device=device), torch.full((kernel[0],), 0.25, device=device))
    plain, _ = both(x, weight, bias, window, groups, digits, channels_last, 4, neuron)
    added = torch.randint(-2, 3, plain[0].shape, generator=torch.Generator().manual_seed(4)).to(device, kind)
    normed = (*neuron[:2], *norm, None, None, 0.0, *neuron[7:])
    joins = {"added": added, "currents": True}
    fused, _ = both(x, weight, bias, window, groups, digits, channels_last, 4, normed, **joins)
    how = (*window, groups, digits, "binary", 1.0, None, SPREAD, channels_last)
    current = 2 * spike_conv.launch_counts(x, weight, bias, *how).unflatten(0, (4, -1)) + added
    assert_same(fused, (*lif.launch_lif(current, *neuron), torch.empty_like(fused[2]).copy_(current)))
    assert fused[2].stride() == fused[0].stride()
    assert not plain[0].numel() or not torch.equal(fused[0], plain[0])


@pytest.mark.parametrize("device", KERNEL_DEVICES)
def test_a_window_that_has_no_place_is_refused_as_eager_does(device):
    x, weight, bias = sample((8, 32, 2, 2), (8, 32, 3, 3), device, high=3)
    neuron = neuron_arguments("lif", norm=statistics(8, device), device=device)
    with pytest.raises(InputError, match="would give maps of"):
        both(x, weight, bias, ([1, 1], [0, 0], [1, 1]), 1, 3, True, 4, neuron)


@pytest.mark.slow(reason="float products are slow in the interpreter")
@pytest.mark.parametrize("device", KERNEL_DEVICES)
def test_membranes_scales_and_weights_that_lose_their_digits(device):
    """One channel of the weight has an outlier, one is not finite: both are multiplied with their floats."""
    x, weight, bias = sample((8, 4, 6, 5), (40, 4, 3, 3), device, high=3)
    weight[3, 1, 1, 1] *= 1e5
    weight[7, 2, 0, 1] = torch.nan
    start = torch.linspace(-2, 0.6, 2 * 40 * 30, device=device).view(2, 40, 6, 5)
    neuron = neuron_arguments("lif", v=start.contiguous(memory_format=torch.channels_last), device=device)
    fused, apart = both(x, weight, bias, PLANE, 1, 3, True, 4, neuron, scale=0.25)
    torch.testing.assert_close(fused, apart, rtol=0, atol=0, equal_nan=True)
    assert fused[1][:, 7].isnan().any() and not fused[1][:, :7].isnan().any()
    without, _ = both(x, weight, bias, PLANE, 1, 3, True, 4, neuron, scale=0.25, keep=False)
    assert torch.equal(without[0], fused[0]) and without[1].shape == (0,)


@pytest.mark.parametrize("connect", JOINED)
def test_operator_with_a_residual(connect):
    x, weight, bias = sample((8, 16, 5, 4), (24, 16, 3, 3), "cpu")
    window = ([1, 1], [1, 1], [1, 1])
    given = (x, weight, bias, *window, 1, 3, 1.0, SPREAD, True, 4, *neuron_arguments("if"), True)
    residual = torch.randint(0, 100, (4, 2, 24, 5, 4), dtype=torch.int8)
    torch.library.opcheck(torch.ops.sparsecomp.conv_lif.default, (*given, residual, connect))
    alone, last, _ = ops.conv_lif(*given)
    *found, _ = ops.conv_lif(*given, residual, connect)
    assert_same(found, (torch.empty_like(alone).copy_(JOINED[connect](alone, residual)), last))
    with pytest.raises(InputError, match="a residual of torch.int8 .8, 24, 5, 4.: give int8 of the shape"):
        ops.conv_lif(*given, residual.flatten(0, 1), connect)
    with pytest.raises(InputError, match="torch.float32"):
        ops.conv_lif(*given, residual.float(), connect)
    with pytest.raises(InputError, match="connect='or': use one of add, and, iand"):
        ops.conv_lif(*given, residual, "or")


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("linear", [False, True])
def test_operator(keep, linear):
    """Its schema, fake and strides are as it says; on the CPU it is the operators apart, bit for bit."""
    x, weight, bias = sample((8, 16, 1, 1) if linear else (8, 16, 5, 4), (24, 16) if linear else (24, 16, 3, 3), "cpu")
    window = ([1, 1], [0, 0], [1, 1]) if linear else PLANE
    norms, start = statistics(24, "cpu"), torch.full((2, 24, 1, 1) if linear else (2, 24, 5, 4), 0.3)
    neuron = neuron_arguments("plif", v=start, norm=norms)
    args = (x, weight, bias, *window, 1, 3, 0.5, SPREAD, True, 4, *neuron, keep)
    torch.library.opcheck(torch.ops.sparsecomp.conv_lif.default, args)
    current = torch.ops.sparsecomp.spike_conv_counts(
        x, weight, bias, *window, 1, 3, "binary", 0.5, None, SPREAD, True
    )  # fmt: skip
    spikes, last = ops.lif(current.unflatten(0, (4, 2)), *neuron)
    *found, none = ops.conv_lif(*args)
    assert none.shape == (0,)
    assert 0.02 < spikes.float().mean() < 0.98
    torch.testing.assert_close(found, [spikes, last if keep else last.new_empty(0)], rtol=0, atol=0)


KERNEL_TYPES = """
F = "*fp32"
types = dict(x_ptr="*i8", w_ptr="*i8", scale_ptr=F, weight_ptr=F, bias_ptr=F, v_ptr=F, mean_ptr=F, var_ptr=F,
             gamma_ptr=F, beta_ptr=F, rate_ptr=F, residual_ptr="*i8", spikes_ptr="*i8", last_ptr=F, current_ptr=F,
             multiplier="fp32", v0="fp32", eps="fp32", tau="fp32", threshold="fp32", reset="fp32")
whole = ("C", "K", "CP", "out_pixel", "out_image")
"""


@pytest.mark.slow(reason="builds for a GPU")
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(
    ("charge", "slots", "maps"),
    [
        ("lif", 4, "T=1, VOLUMES=False, D=1, OD=1, stride_d=1, dil_d=1, rate_ptr=None, CONNECT='add'"),
        (
            "plif", 16,
            "T=3, VOLUMES=True, mean_ptr=None, var_ptr=None, gamma_ptr=None, beta_ptr=None, last_ptr=None, "
            "CONNECT='', residual_ptr=None, current_ptr=None",
        ),
        (
            "if", 1,
            "T=1, VOLUMES=False, D=1, OD=1, stride_d=1, dil_d=1, rate_ptr=None, gamma_ptr=None, beta_ptr=None, "
            "CONNECT='iand', current_ptr=None",
        ),
    ],
)  # fmt: skip
def test_compiles_to_int8_tensor_core_instructions(capability, charge, slots, maps):
    printed = compile_in_subprocess(
        KERNEL_TYPES
        + f"""
from sparsecomp.lowering.spiking.kernels.conv_lif import conv_lif_kernel as kernel
constants = dict(v_ptr=None, added_ptr=None, R=3, S=3, GROUPS=1, DIGITS=3, HAS_BIAS=True, EVEN_C=True, VECTOR=16,
                 SCALED=True, STEPS={slots}, SLOTS={slots}, CHARGE="{charge}", HALVES=False, DECAY_INPUT=True,
                 SOFT_RESET=False, BM=64, BN=64, BK=64, out_channel=1, {maps})
signature = {{n: types.get(n, "i32") for n in kernel.arg_names}}
built = build(kernel, signature, constants, {capability}, whole=whole, num_warps=4, num_stages=3)
print(built.asm["ptx"])
"""
    )
    hopper = "wgmma.mma_async.sync.aligned.m64n64k32.s32.s8.s8"
    assert (hopper if capability == 90 else "mma.sync.aligned.m16n8k32") in printed
    assert ".local" not in printed


@pytest.mark.slow(reason="builds for a GPU")
@pytest.mark.parametrize(
    ("digits", "slots", "charge", "blocks", "connect", "currents"),
    [
        (2, 4, "if", (256, 64, 8), "", False), (3, 4, "lif", (128, 128, 8), "add", False),
        (3, 2, "lif", (128, 64, 4), "and", False), (4, 16, "plif", (64, 64, 4), "", False),
        (3, 1, "if", (128, 64, 8), "iand", False), (3, 4, "lif", (128, 64, 4), "add", False),
        (3, 4, "lif", (256, 64, 8), "add", False), (3, 4, "lif", (128, 128, 8), "", True),
        (3, 4, "lif", (128, 64, 4), "", True),
    ],
)  # fmt: skip
def test_hopper_kernel_compiles_without_spills_to_whole_vectors(digits, slots, charge, blocks, connect, currents):
    printed = compile_in_subprocess(
        KERNEL_TYPES
        + f"""
from triton.experimental.gluon._runtime import GluonASTSource
from sparsecomp.lowering.spiking.kernels.conv_lif_hopper import conv_lif_hopper_kernel as kernel
BM, BN, WARPS = {blocks}
constants = dict(v_ptr=None, added_ptr=None, R=3, S=3, GROUPS=1, DIGITS={digits}, HAS_BIAS=True, SCALED=False,
                 STEPS={slots}, SLOTS={slots}, CHARGE="{charge}", HALVES=True, DECAY_INPUT=True, SOFT_RESET=False,
                 BM=BM, BN=BN, BK=64, STAGES=4, num_warps=WARPS, out_channel=1, CONNECT="{connect}")
if not "{connect}":
    constants["residual_ptr"] = None
if not {currents}:
    constants["current_ptr"] = None
if "{charge}" != "plif":
    constants["rate_ptr"] = None
if "{charge}" == "if":
    constants |= dict(gamma_ptr=None, beta_ptr=None)
signature = {{n: types.get(n, "i32") for n in kernel.arg_names}}
built = build(kernel, signature, constants, 90, source=GluonASTSource, whole=whole, num_warps=WARPS)
print(built.asm["ptx"])
"""
    )
    assert "wgmma.mma_async.sync.aligned.m64n" in printed and "k32.s32.s8.s8" in printed
    assert ".local" not in printed
    assert f"st.global.v{blocks[1] // 32}.b32" in printed  # a thread's channels of one pixel and step
    assert not connect or f"ld.global.v{blocks[1] // 32}.b32" in printed
    # what is written to shared memory behind the loop lies where its copies go, those of the last steps too
    behind = printed[printed.rindex("wgmma.wait_group") :]
    waited = re.search(r"cp\.async\.wait_group\s+0;\s+bar\.sync\s+0;", behind)
    assert waited is not None and waited.start() < behind.index("st.shared")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(("depth", "stages"), [(64, 3), (64, 4), (64, 6), (128, 3), (128, 4), (128, 6)])
def test_blocks_of_short_loops_have_the_bits_of_float64(depth, stages):
    """A loop of one to four steps ends while its copies are under way. What is summed are small whole numbers."""
    from sparsecomp.lowering.cache.signature import device_of
    from sparsecomp.lowering.spiking.conv_lif import CONV_LIF, conv_lif_problem
    from sparsecomp.lowering.spiking.convolution import Convolution
    from sparsecomp.reference.digits import split_weight
    from sparsecomp.reference.geometry import Window

    device, random = torch.device("cuda", 0), torch.Generator("cuda").manual_seed(0)
    neuron = (0.0, 1e-5, 2.0, 40.0, 0.0, 4, "if", False, True, False, False, False, False)
    tried = 0
    for steps in (1, 2, 3, 4):
        conv = Convolution.of((128, depth * steps, 14, 14), (512,), Window.centred((1, 1), (2, 2)))
        problem = conv_lif_problem(conv, 3, neuron)
        operands = list(CONV_LIF.operands(problem, device, 0))
        operands[3] = weight = torch.randint_like(operands[3], -127, 128)
        operands[1:3] = split_weight(weight, 3)
        x = (torch.rand(operands[0].shape, generator=random, device=device) < 0.2).to(torch.int8)
        operands[0] = x.contiguous(memory_format=torch.channels_last)
        membrane, spikes = 0.0, []
        for current in F.conv2d(x[:, :, ::2, ::2].double(), weight.double()).unflatten(0, (4, 32)):
            membrane = membrane + current
            spikes.append(membrane >= 40)
            membrane = membrane - 40.0 * spikes[-1]
        for candidate in CONV_LIF.candidates(problem, device_of(device)):
            if (candidate.config["BK"], candidate.config["stages"]) == (depth, stages):
                launch = candidate.template.prepare(problem, candidate.config)
                for _ in range(10):
                    operands[-3].fill_(77), operands[-2].fill_(torch.nan)
                    launch(*operands)
                    assert torch.equal(operands[-3], torch.stack(spikes).to(torch.int8)), (candidate.config, steps)
                    assert torch.equal(operands[-2].double(), membrane), (candidate.config, steps)
                    tried += 1
    if not tried:
        pytest.skip("no kernel for this card has such blocks")


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"steps": 3}, "8 images are no whole number for each of 3"), ({"steps": 0}, "no whole number"),
        ({"channels": 15}, "does not fit 16 channels"), ({"membrane": 3}, "are not those of a step"),
        ({"norm": 23}, "give one number for each of 24 channels"), ({"half": True}, "give counts in int8"),
    ],
)  # fmt: skip
def test_operands_that_do_not_fit_are_errors(device, changed, told):
    from sparsecomp.lowering.spiking.conv_lif import launch_conv_lif

    channels, steps = changed.get("channels", 16), changed.get("steps", 4)
    x, weight, bias = sample((8, 16, 5, 4), (24, channels, 3, 3), device)
    weight = weight.half() if "half" in changed else weight
    start = torch.zeros(changed.get("membrane", 2), 24, 5, 4, device=device)
    neuron = neuron_arguments("lif", v=start, norm=statistics(changed.get("norm", 24), device), device=device)
    with pytest.raises(InputError, match=told):
        launch_conv_lif(x, weight, bias, *PLANE, 1, 3, 1.0, SPREAD, True, steps, *neuron, True)
