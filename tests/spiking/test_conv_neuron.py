"""A convolution and described neurons in one launch, held against the launches that it replaces, bit for bit."""

import pytest
import torch
from compile_kernel import compile_in_subprocess
from kernel_devices import KERNEL_DEVICES
from test_conv_lif import JOINED, LAYERS, PLANE, assert_same, sample
from torch.utils._pytree import tree_map_only

from sparsecomp import ops
from sparsecomp.errors import InputError
from sparsecomp.reference.digits import SPREAD

pytestmark = pytest.mark.quick_cases(1)

PLAIN = "t0 = mul v0 n0; t1 = add t0 x; t2 = ge t1 n1; t3 = float t2; t4 = sub n2 t3; t5 = mul t1 t4; spike t2; v0 t5"
BY_CHANNEL = "t0 = mul v0 p0; t1 = add t0 x; t2 = gt t1 p1; t3 = where t2 n0 t1; spike t2; v0 t3"
TWO_STATES = (
    "t0 = mul v1 n0; t1 = add t0 x; t2 = mul v0 p0; t3 = add t2 t1; t4 = lt t3 n1; t5 = not t4; t6 = where t5 n2 t3; "
    "spike t5; v0 t6; v1 t1"
)
ROUNDED = (
    "t0 = sub x v0; t1 = {0} t0; t2 = mul t1 n0; t3 = {0} t2; t4 = add v0 t3; t5 = {0} t4; t6 = sub t5 n1; "
    "t7 = {0} t6; t8 = ge t7 n2; t9 = float t8; t10 = sub n1 t9; t11 = mul t10 t5; t12 = {0} t11; spike t8; v0 t12"
)
NEURONS = {
    "plain": (PLAIN, (0.1,), 0, (0.75, 0.7, 1.0)), "by channel": (BY_CHANNEL, (0.0,), 2, (0.0,)),
    "two states": (TWO_STATES, (0.25, 0.5), 1, (0.5, 0.6, 0.0)), "rounded": (ROUNDED, (0.0,), 0, (0.5, 0.5, 0.0)),
}  # fmt: skip
"""Description, starts, how many parameters, and numbers."""
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def neuron_of(name, channels, dtype, device):
    """What the operator takes of a neuron, its states beside."""
    step, starts, count, numbers = NEURONS[name]
    random = torch.Generator().manual_seed(3)
    parameters = [torch.rand(channels if i == 0 else 1, generator=random).to(device) * 0.9 for i in range(count)]
    return starts, parameters, numbers, step.format(dtype if dtype != "float32" else "stop")


EPS = 0.125
"""With the variances below a power of four, whose root is exact."""


def statistics(channels, dtype, device):
    """A batch-norm whose every operation is exact."""
    random = torch.Generator().manual_seed(1)
    mean, gamma, beta = (
        (torch.randint(-4, 5, (channels,), generator=random) / 4).to(device, dtype) for _ in range(3)
    )
    return mean, torch.full_like(mean, 0.125), gamma + 1, beta


def both(x, weight, bias, window, groups, digits, channels_last, steps, norm, states, neuron, keep=True, **joins):
    """Spikes and last states of one launch, and of the launches apart, and what the neurons are given where it is asked
    for."""
    from sparsecomp.lowering.spiking import conv_neuron, spike_conv
    from sparsecomp.lowering.spiking import neuron as neurons
    from sparsecomp.lowering.spiking.packing import to_bytes
    from sparsecomp.reference.layer_current import joined_current

    counts, how, (starts, parameters, *described) = to_bytes(x), (*window, groups, digits), neuron
    *fused, currents = conv_neuron.launch_conv_neuron(
        counts, weight, bias, *how, 0.5, SPREAD, channels_last, steps, *norm, EPS, states, starts, parameters,
        *described, keep, **joins,
    )  # fmt: skip
    sums = spike_conv.launch_counts(counts, weight, bias, *how, "binary", 0.5, None, SPREAD, channels_last)
    sums = sums.unflatten(0, (steps, -1))
    made = joined_current(sums, *norm, EPS, joins.get("added"))
    current = made.float()
    trailing = (-1, *[1] * (current.dim() - 3))
    states = [None if v is None else v.reshape(current.shape[1:]) for v in states]
    parameters = [one.reshape(trailing) for one in parameters]
    apart = neurons.launch_neuron(
        current, states, starts, parameters, *described, keep, joins.get("state_dtype")
    )  # fmt: skip
    if joins.get("currents"):
        return (*fused, currents), (*apart, made)
    assert currents.shape == (0,)
    return tuple(fused), apart


@pytest.mark.slow(reason="interprets both ways")
@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NEURONS)
@pytest.mark.parametrize(("steps", "norm"), [(4, True), (3, False), (1, True)])
def test_bits_equal_the_launches_apart(device, dtype, name, steps, norm):
    x, weight, bias = sample((2 * steps, 64, 5, 3), (72, 64, 3, 3), device)
    weight, bias = ((8 * one).round() / 16 for one in (weight, bias))
    weight, bias = (one.to(DTYPES[dtype]) for one in (weight, bias))
    norms = statistics(72, torch.float32 if dtype == "bfloat16" else DTYPES[dtype], device) if norm else (None,) * 4
    neuron = neuron_of(name, 72, dtype, device)
    starts = [None] * len(neuron[0])
    fused, apart = both(x, weight, bias, PLANE, 1, 3, True, steps, norms, starts, neuron, currents=True)
    assert 0.02 < fused[0].float().mean() < 0.98
    assert_same(fused, apart)


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_layers_of_every_kind(name, device, dtype):
    shape, kernel, window, groups, digits, channels_last = LAYERS[name]
    x, weight, bias = sample(shape, kernel, device, high=3)
    weight, bias = ((8 * one).round().to(DTYPES[dtype]) / 16 for one in (weight, bias))
    neuron = neuron_of("rounded", kernel[0], dtype, device)
    fused, apart = both(
        x, weight, bias, window, groups, digits, channels_last, 4, statistics(kernel[0], DTYPES[dtype], device), [None],
        neuron,
    )  # fmt: skip
    assert 0.02 < fused[0].float().mean() < 0.98 or not fused[0].numel()
    assert_same(fused, apart)


@pytest.mark.slow(reason="interprets both ways")
@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("connect", [None, *JOINED])
@pytest.mark.parametrize("kind", ["int8", "float16"])
@pytest.mark.parametrize("name", ["contiguous", "linear", "volumes", "no images"])
def test_what_is_added_and_what_is_joined(name, kind, connect, device):
    shape, kernel, window, groups, digits, channels_last = LAYERS[name]
    x, weight, bias = sample(shape, kernel, device, high=3)
    weight, bias = ((8 * one).round().half() / 16 for one in (weight, bias))
    neuron, random = neuron_of("rounded", kernel[0], "float16", device), torch.Generator().manual_seed(2)
    how = (window, groups, digits, channels_last, 4, (None,) * 4, [None], neuron)
    alone, _ = both(x, weight, bias, *how)
    added = torch.randint(-2, 3, alone[0].shape, generator=random).to(device, getattr(torch, kind))
    fused, apart = both(x, weight, bias, *how, added=added, currents=True)
    assert_same(fused, apart)
    assert not alone[0].numel() or not torch.equal(fused[0], alone[0])
    if connect is not None:
        residual = torch.randint(-128, 128, alone[0].shape, generator=random, dtype=torch.int8).to(device)
        joins = {"added": added, "residual": residual, "connect": connect, "currents": True}
        made, _ = both(x, weight, bias, *how, **joins)
        expected = JOINED[connect](fused[0], residual)
        assert_same(made, (torch.empty_like(fused[0]).copy_(expected), *fused[1:]))


@pytest.mark.parametrize("device", KERNEL_DEVICES)
def test_states_go_on_and_need_not_be_kept(device):
    x, weight, bias = sample((4, 32, 4, 3), (40, 32, 3, 3), device)
    neuron = neuron_of("two states", 40, "float32", device)
    start = torch.linspace(-2, 0.5, 2 * 40 * 12, device=device).view(2, 40, 4, 3)
    fused, apart = both(x, weight, bias, PLANE, 1, 3, True, 2, (None,) * 4, [start, None], neuron)
    torch.testing.assert_close(fused, apart, rtol=0, atol=0)
    without, _ = both(x, weight, bias, PLANE, 1, 3, True, 2, (None,) * 4, [start, None], neuron, keep=False)
    assert torch.equal(without[0], fused[0]) and [one.numel() for one in without[1:]] == [0, 0]


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_states_are_handed_on_in_half_precision(dtype, device):
    x, weight, bias = sample((4, 32, 4, 3), (40, 32, 3, 3), device)
    weight, bias = ((8 * one).round().to(DTYPES[dtype]) / 16 for one in (weight, bias))
    neuron, norm = neuron_of("rounded", 40, dtype, device), (None,) * 4
    whole, _ = both(x, weight, bias, PLANE, 1, 3, True, 2, norm, [None], neuron)
    asked = {"state_dtype": DTYPES[dtype]}
    (first, between, _), _ = both(x[:2], weight, bias, PLANE, 1, 3, True, 1, norm, [None], neuron, **asked)
    (rest, last, unused), apart = both(x[2:], weight, bias, PLANE, 1, 3, True, 1, norm, [between], neuron, **asked)
    assert between.dtype is last.dtype is unused.dtype is DTYPES[dtype] and last.any()
    assert torch.equal(torch.cat((first, rest)), whole[0]) and torch.equal(last.float(), whole[1])
    assert_same((rest, last, unused), apart)


@pytest.mark.parametrize("device", KERNEL_DEVICES)
def test_a_layer_is_launched_anew_for_operands_of_another_dtype(device, monkeypatch):
    """A launch reads what it was compiled for: statistics in float32, as autocast leaves them, are no halves."""
    from sparsecomp.lowering.launch import dispatch
    from sparsecomp.lowering.spiking.fused_layer import FusedLayer

    problems, prepared = set(), dispatch.prepared
    monkeypatch.setattr(dispatch, "prepared", lambda *given: problems.add(given[1]) or prepared(*given))
    x, weight, bias = sample((4, 32, 4, 3), (40, 32, 3, 3), device)
    weight, bias = ((8 * one).round().half() / 16 for one in (weight, bias))
    starts, parameters, *described = neuron_of("by channel", 40, "float32", device)
    kinds = [(dtype, own) for dtype in (torch.float16, torch.float32) for own in (torch.float16, torch.float32)]
    for dtype, own in kinds:
        given = [(8 * one).round().to(own) / 8 for one in parameters]
        norm = statistics(40, dtype, device)
        assert_same(*both(x, weight, bias, PLANE, 1, 2, True, 2, norm, [None], (starts, given, *described)))
    assert len({one for one in problems if isinstance(one, FusedLayer)}) == len(kinds)


@pytest.mark.parametrize("linear", [False, True])
def test_operator(linear):
    """Its schema, fake and strides are as it says; on the CPU it is the operators apart."""
    x, weight, bias = sample((8, 16, 1, 1) if linear else (8, 16, 5, 4), (24, 16) if linear else (24, 16, 3, 3), "cpu")
    window, norms = ([1, 1], [0, 0], [1, 1]) if linear else PLANE, statistics(24, torch.float16, "cpu")
    starts, parameters, numbers, step = neuron_of("two states", 24, "float16", "cpu")
    layer = (x, weight.half(), bias.half(), *window, 1, 2, 0.5, SPREAD, True, 4)
    neuron = ([None, None], list(starts), parameters, list(numbers), step)
    shape = (4, 2, 24) if linear else (4, 2, 24, 5, 4)
    added, residual = torch.full(shape, 0.5).half(), torch.ones(shape, dtype=torch.int8)
    args = (*layer, *norms, EPS, *neuron, True, residual, "add", added)
    torch.library.opcheck(torch.ops.sparsecomp.conv_neuron.default, args)
    sums = torch.ops.sparsecomp.spike_conv_counts(
        x, weight.half(), bias.half(), *window, 1, 2, "binary", 0.5, None, SPREAD, True
    )  # fmt: skip
    wide = sums.double().unflatten(0, (4, 2))
    mean, _, gamma, beta = (one.double().view(-1, 1, 1) for one in norms)
    current = ((wide - mean) * 2 * gamma + beta).half() + added.view(wide.shape)
    spikes, *last = ops.neuron(current.float(), *neuron[:2], [parameters[0].view(-1, 1, 1)], *neuron[3:])
    assert 0.02 < spikes.float().mean() < 0.98
    *found, _ = ops.conv_neuron(*args)
    torch.testing.assert_close(found, [spikes + 1, *last], rtol=0, atol=0)
    *again, given = ops.conv_neuron(*args, True)
    torch.testing.assert_close(again, found, rtol=0, atol=0)
    torch.testing.assert_close(given, current, rtol=0, atol=0)
    torch.library.opcheck(torch.ops.sparsecomp.conv_neuron.default, (*args, True))
    rounded = ops.conv_neuron(*args, True, state_dtype=torch.float16)[1:3]
    torch.testing.assert_close(rounded, [one.half() for one in found[1:]], rtol=0, atol=0)
    torch.library.opcheck(torch.ops.sparsecomp.conv_neuron.default, (*args, True, torch.float16))


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"steps": 3}, "8 images are no whole number for each of 3"), ({"channels": 15}, "does not fit 16 channels"),
        ({"start": 3}, "are not those of a step"), ({"norm": 23}, "give one number for each of 24 channels"),
        ({"double": True}, "a weight in float32, float16 or bfloat16"), ({"parameter": 7}, "parameters of .7. numbers"),
        ({"added": torch.float32}, "give int8 or torch.float16 of the shape"), ({"step": "spike x"}, "no neuron"),
    ],
)  # fmt: skip
def test_operands_that_do_not_fit_are_errors(device, changed, told):
    from sparsecomp.lowering.spiking.conv_neuron import launch_conv_neuron

    x, weight, bias = sample((8, 16, 5, 4), (24, changed.get("channels", 16), 3, 3), device)
    weight = weight.double() if "double" in changed else weight.half()
    starts, _, numbers, step = neuron_of("by channel", 24, "float16", device)
    parameters = [torch.ones(changed.get("parameter", 24), device=device), torch.ones(1, device=device)]
    state = torch.zeros(changed.get("start", 2), 24, 5, 4, device=device)
    added = torch.zeros(4, 2, 24, 5, 4, dtype=changed.get("added", torch.float16), device=device)
    norm = statistics(changed.get("norm", 24), torch.float16, device)
    with pytest.raises(InputError, match=told):
        launch_conv_neuron(
            x, weight, bias.half(), *PLANE, 1, 2, 1.0, SPREAD, True, changed.get("steps", 4),
            *norm, EPS, [state], starts, parameters, numbers, changed.get("step", step), True, None, "add", added,
        )  # fmt: skip


@pytest.mark.parametrize("device", [*KERNEL_DEVICES, "meta"])
@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"states": [None] * 3, "starts": [0.0] * 3}, "has 1 states: give as many of both"),
        ({"states": [], "starts": []}, "has 1 states: give as many of both"), ({"start": 3}, "not those of a step"),
        ({"parameters": 7}, "7 parameters"), ({"numbers": [0.5] * 9}, "9 numbers"), ({"step": "x"}, "no neuron"),
    ],
)  # fmt: skip
def test_more_or_less_than_a_description_has_is_the_same_error_everywhere(device, changed, told):
    """A fake that gives more results than there are would end the process."""
    from sparsecomp.lowering.spiking.conv_neuron import launch_conv_neuron

    x, weight, _ = sample((8, 16, 5, 4), (24, 16, 3, 3), "cpu")
    states = changed.get("states", [torch.zeros(changed.get("start", 2), 24, 5, 4)])
    layer, norm = (x, weight, None, *PLANE, 1, 2, 1.0, SPREAD, True, 4), (None, None, None, None, 0.0)
    args = [
        *layer, *norm, states, changed.get("starts", [0.0]), [torch.ones(1)] * changed.get("parameters", 0),
        changed.get("numbers", [0.5, 0.5, 1.0]), changed.get("step", PLAIN), True,
    ]  # fmt: skip
    given = tree_map_only(torch.Tensor, lambda one: one.to(device), args)
    for run in (ops.conv_neuron, *([launch_conv_neuron] if device != "meta" else [])):
        with pytest.raises(InputError, match=told):
            run(*given)


KERNEL_TYPES = """
from sparsecomp.lowering.spiking.neuron import code_of
from sparsecomp.reference.neuron import OPERATIONS, neuron_of
F = "*fp32"
pointers = ("scale_ptr", "mean_ptr", "var_ptr", "gamma_ptr", "beta_ptr", "v0_ptr", "v1_ptr", "last0_ptr", "last1_ptr")
types = {n: F for n in (*pointers, *(f"p{i}_ptr" for i in range(6)))}
types |= {n: "fp32" for n in ("multiplier", "eps", "start0", "start1", *(f"n{i}" for i in range(8)))}
types |= dict(x_ptr="*i8", w_ptr="*i8", residual_ptr="*i8", spikes_ptr="*i8", added_ptr=W, weight_ptr=W, bias_ptr=W,
              current_ptr=W)
whole = ("C", "K", "CP", "out_pixel", "out_image")
neuron = neuron_of(STEP)
constants = dict(v0_ptr=None, v1_ptr=None, R=3, S=3, GROUPS=1, DIGITS=2, HAS_BIAS=True, SCALED=False, STEPS=4, SLOTS=4,
                 CODE=code_of(neuron.code), SPIKE=neuron.spike, AFTER=neuron.states, CONNECT="add",
                 ROUND=OPERATIONS.index(KIND) if KIND else -1, out_channel=1)
constants |= {f"p{i}_ptr": None for i in range(PARAMETERS, 6)} | {f"each{i}": 1 for i in range(6)}
if len(neuron.states) == 1:
    constants["last1_ptr"] = None
"""


def kernel_types(kind, name):
    step, _, parameters, _ = NEURONS[name]
    weight = {"": "*fp32", "float16": "*fp16", "bfloat16": "*bf16"}[kind]
    given = f"KIND, W, PARAMETERS, STEP = {kind!r}, {weight!r}, {parameters}, {step.format(kind or 'stop')!r}\n"
    return given + KERNEL_TYPES


CASES = [("float16", "rounded"), ("", "two states"), ("bfloat16", "rounded"), ("", "by channel")]


@pytest.mark.slow(reason="builds for a GPU")
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_compiles_to_int8_tensor_core_instructions(capability, kind, name):
    printed = compile_in_subprocess(
        kernel_types(kind, name)
        + f"""
from sparsecomp.lowering.spiking.kernels.conv_neuron import conv_neuron_kernel as kernel
constants |= dict(T=1, VOLUMES=False, D=1, OD=1, stride_d=1, dil_d=1, EVEN_C=True, VECTOR=16, BM=64, BN=64, BK=64)
signature = {{n: types.get(n, "i32") for n in kernel.arg_names}}
built = build(kernel, signature, constants, {capability}, whole=whole, num_warps=4, num_stages=3)
print(built.asm["ptx"])
"""
    )
    hopper = "wgmma.mma_async.sync.aligned.m64n64k32.s32.s8.s8"
    assert (hopper if capability == 90 else "mma.sync.aligned.m16n8k32") in printed
    assert ".local" not in printed


@pytest.mark.slow(reason="builds for a GPU")
@pytest.mark.parametrize(("kind", "name", "blocks"), [(*case, (128, 64, 4)) for case in CASES] + [
    ("float16", "rounded", (256, 64, 8)), ("float16", "rounded", (128, 128, 8))
])  # fmt: skip
def test_hopper_kernel_compiles_without_spills(kind, name, blocks):
    printed = compile_in_subprocess(
        kernel_types(kind, name)
        + f"""
from triton.experimental.gluon._runtime import GluonASTSource
from sparsecomp.lowering.spiking.kernels.conv_neuron_hopper import conv_neuron_hopper_kernel as kernel
BM, BN, WARPS = {blocks}
constants |= dict(BM=BM, BN=BN, BK=64, STAGES=4, num_warps=WARPS)
signature = {{n: types.get(n, "i32") for n in kernel.arg_names}}
built = build(kernel, signature, constants, 90, source=GluonASTSource, whole=whole, num_warps=WARPS)
print(built.asm["ptx"])
"""
    )
    assert "wgmma.mma_async.sync.aligned.m64n" in printed and "k32.s32.s8.s8" in printed
    assert ".local" not in printed
    assert f"st.global.v{blocks[1] // 32}.b32" in printed  # a thread's channels of one pixel and step
