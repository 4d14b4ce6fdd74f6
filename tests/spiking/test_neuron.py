"""The operator of described neurons against equations written out in plain torch, and its kernel against it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from compile_kernel import compile_in_subprocess
from kernel_devices import KERNEL_DEVICES, interpreted
from torch import Tensor

import sparsecomp.ops as ops
from sparsecomp.errors import InputError
from sparsecomp.reference.neuron import Neuron, neuron_of

pytestmark = pytest.mark.quick_cases(1)

LEAKY = "t0 = mul v0 n0; t1 = add t0 x; t2 = ge t1 n1; t3 = float t2; t4 = sub n2 t3; t5 = mul t1 t4; spike t2; v0 t5"


class Case(NamedTuple):
    """A description, its operands, and the same step as a function of x, states, parameters."""

    text: str
    numbers: list[float]
    parameters: list[tuple[int, ...]]
    step: Callable[..., tuple[Tensor, ...]]


def _leaky(x: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    h = v * 0.3 + x
    s = (h >= 0.7).float()
    return s, h * (1 - s)


def _channels(x: Tensor, v: Tensor, tau: Tensor, threshold: Tensor) -> tuple[Tensor, ...]:
    h = v + (x - v) / tau
    fires = h > threshold
    return fires.float(), torch.where(fires, 0.1, h)


def _two_states(x: Tensor, v: Tensor, s: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
    h = beta * v * (1 - s) + x
    spike = (~(h < 0.5)).float()
    return spike, h.neg().neg(), spike


def _rounded(x: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    h = (v * 0.3).bfloat16().float() + x
    s = (h.half().float() >= 0.7).float()
    return s, h.bfloat16().float() * (1 - s)


CASES = {
    "leaky": Case(LEAKY, [0.3, 0.7, 1.0], [], _leaky),
    "by channel": Case(
        "t0 = sub x v0; t1 = div t0 p0; t2 = add v0 t1; t3 = gt t2 p1; t4 = where t3 n0 t2; spike t3; v0 t4",
        [0.1], [(5, 1, 1), ()], _channels,
    ),
    "two states": Case(
        "t0 = mul p0 v0; t1 = sub n0 v1; t2 = mul t0 t1; t3 = add t2 x; t4 = lt t3 n1; t5 = not t4; t6 = float t5; "
        "t7 = neg t3; t8 = neg t7; spike t5; v0 t8; v1 t6",
        [1.0, 0.5], [(1, 5, 1, 1)], _two_states,
    ),
    "rounded": Case(
        "t0 = mul v0 n0; t1 = bfloat16 t0; t2 = add t1 x; t3 = float16 t2; t4 = ge t3 n1; t5 = float t4; "
        "t6 = sub n2 t5; t7 = bfloat16 t2; t8 = mul t7 t6; spike t4; v0 t8",
        [0.3, 0.7, 1.0], [], _rounded,
    ),
}  # fmt: skip


def sample(layout: str = "contiguous", shape: tuple[int, ...] = (3, 2, 5, 4, 3)) -> Tensor:
    x = 2 * torch.randn(shape, generator=torch.Generator().manual_seed(0))
    if layout == "channels_last":
        x = x.flatten(0, 1).contiguous(memory_format=torch.channels_last).unflatten(0, shape[:2])
    if layout == "time_inside":
        x = x.movedim(0, 1).contiguous().movedim(1, 0)
    if layout == "sliced":
        x = torch.cat((x, x), 3)[:, :, :, ::2]
    if layout == "repeated":
        x = x[:1].expand(shape)
    return x


def arguments(case: Case, x: Tensor, started: bool = True) -> tuple[Any, ...]:
    random = torch.Generator().manual_seed(1)
    count = len(neuron_of(case.text).states)
    states = [torch.rand(x.shape[1:], generator=random).round(decimals=1) if started else None for _ in range(count)]
    parameters = [torch.rand(shape, generator=random) + 0.5 for shape in case.parameters]
    return x, states, [0.0] * count, parameters, case.numbers, case.text, True


def written_out(case: Case, args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    x, states, starts, parameters, *_ = args
    now = [torch.full_like(x[0], start) if v is None else v for v, start in zip(states, starts, strict=True)]
    spikes = []
    for current in x:
        spike, *now = case.step(current, *now, *parameters)
        spikes.append(spike.to(torch.int8))
    return torch.stack(spikes), *now


def on(device: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    def moved(arg: Any) -> Any:
        if isinstance(arg, list):
            return [moved(one) for one in arg]
        return arg.to(device) if isinstance(arg, Tensor) else arg

    return tuple(map(moved, args))


def assert_same_bits(found: Tensor, expected: Tensor) -> None:
    """Equal, with the sign of zeros; NaN is NaN whatever its bits."""
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    if found.is_floating_point():
        assert torch.equal(found.signbit() & ~found.isnan(), expected.signbit() & ~expected.isnan())


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("started", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_equations(name: str, started: bool) -> None:
    args = arguments(CASES[name], sample(), started)
    found, expected = ops.neuron(*args), written_out(CASES[name], args)
    assert 0.05 < found[0].float().mean() < 0.95
    for ours, theirs in zip(found, expected, strict=False):
        assert_same_bits(ours, theirs)
    assert [one.numel() for one in found[len(expected) :]] == [0] * (3 - len(expected))


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "time_inside", "sliced", "repeated"])
@pytest.mark.parametrize("name", CASES)
def test_kernel_in_any_layout(device: str, layout: str, name: str) -> None:
    from sparsecomp.lowering.spiking.neuron import launch_neuron

    args = arguments(CASES[name], sample(layout), started=layout != "sliced")
    found = launch_neuron(*on(device, args))
    for ours, theirs in zip(found, ops.neuron(*args), strict=True):
        assert_same_bits(ours.cpu(), theirs)
    assert found[0].stride() == torch.empty_like(args[0]).stride()


@pytest.mark.parametrize("device", KERNEL_DEVICES)
def test_what_is_no_number_and_the_sign_of_zero(device: str) -> None:
    from sparsecomp.lowering.spiking.neuron import launch_neuron

    x = torch.zeros(3, 1, 6)
    x[0, 0] = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1e-45, 3e38])
    x[2, 0] = torch.tensor([1.0, -float("inf"), float("inf"), -0.0, -1e-45, 3e38])
    args = (x, [None], [-0.0], [], [0.3, 0.7, 1.0], LEAKY, True)
    expected = ops.neuron(*args)
    assert expected[0][0, 0].tolist() == [0, 1, 0, 0, 0, 1]
    for ours, theirs in zip(launch_neuron(*on(device, args)), expected, strict=True):
        assert_same_bits(ours.cpu(), theirs)


@pytest.mark.parametrize("device", KERNEL_DEVICES)
def test_products_and_sums_round_apart(device: str) -> None:
    """v · n + x of which one rounding and two differ: with a fused multiply-add the neuron fires."""
    from sparsecomp.lowering.spiking.neuron import launch_neuron

    v = torch.full((1, 1), 1 + 2.0**-12)
    x = torch.full((1, 1, 1), -1 - 2.0**-11)
    text = "t0 = mul v0 p0; t1 = add t0 x; t2 = gt t1 n0; spike t2; v0 t1"  # (1 + 2^-12)² has 2^-24, which goes
    spikes, last, _ = launch_neuron(*on(device, (x, [v], [0.0], [v[0, 0].clone()], [0.0], text, True)))
    assert spikes.item() == 0 and last.item() == 0


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("name", ["by channel", "two states"])
def test_opcheck(name: str, keep: bool) -> None:
    args = arguments(CASES[name], sample("channels_last"), started=keep)
    torch.library.opcheck(torch.ops.sparsecomp.neuron.default, (*args[:-1], keep))


@interpreted
@pytest.mark.parametrize("shape", [(1, 3), (5, 7), (2, 0, 3), (3, 1, 1, 1)])
def test_shapes(shape: tuple[int, ...]) -> None:
    from sparsecomp.lowering.spiking.neuron import launch_neuron

    args = (sample(shape=shape), [None], [0.1], [], [0.3, 0.7, 1.0], LEAKY, True)
    triples = zip(launch_neuron(*args), ops.neuron(*args), written_out(CASES["leaky"], args), strict=False)
    for ours, theirs, expected in triples:
        assert_same_bits(ours, theirs)
        assert_same_bits(theirs, expected)


@pytest.mark.parametrize("name", CASES)
def test_text_and_description_are_one(name: str) -> None:
    neuron = neuron_of(CASES[name].text)
    assert str(neuron) == CASES[name].text
    assert isinstance(neuron, Neuron) and len(neuron.states) == (2 if name == "two states" else 1)


def test_formulas() -> None:
    assert neuron_of(LEAKY).formula([0.3, 0.7, 1.0]) == "h1 = (v0 · 0.3) + x; s = h1 ≥ 0.7; v0 = (h1 · (1 - s))"
    assert neuron_of(CASES["rounded"].text).formula([0.3, 0.7, 1.0]) == (
        "h1 = (v0 · 0.3) + x; s = h1 ≥ 0.7; v0 = (h1 · (1 - s))"
    ), "roundings are not shown"


@pytest.mark.parametrize("text", ["", "spike x", "t0 = add v0; spike t0; v0 t0", "t0 = pow v0 x; spike t0; v0 t0",
                                  "t0 = add v0 t9; spike t0; v0 t0", "t0 = add v0 x; v0 t0",
                                  "t0 = add v0 x; spike t0; v1 t0"])  # fmt: skip
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="describes no neuron"):
        neuron_of(text)


@pytest.mark.slow(reason="builds for a GPU")
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("states", ["fp32", "fp16", "bf16"])
def test_compiles(states: str, capability: int) -> None:
    printed = compile_in_subprocess(
        f"""
        from sparsecomp.lowering.spiking.kernels.neuron import neuron_kernel as kernel
        from sparsecomp.lowering.spiking.neuron import Neurons, Axis
        from sparsecomp.reference.neuron import neuron_of
        problem = Neurons(960, 960, 960, (Axis(1, 1),) * 6, (0.0, 0.0), (0.5,) * 8, 4, neuron_of({LEAKY!r}),
                          (True, False), (False,) * 6, True)
        constants = dict(problem.constants, BLOCK=1024, v1_ptr=None, p0_ptr=None, p1_ptr=None, p2_ptr=None,
                         p3_ptr=None, p4_ptr=None, p5_ptr=None, last1_ptr=None)
        pointers = dict(x_ptr="*fp32", v0_ptr="*{states}", last0_ptr="*{states}", spikes_ptr="*i8")
        floats = {{n: "fp32" for n in kernel.arg_names if n in ("start0", "start1") or n[0] == "n" and n[1:].isdigit()}}
        types = {{n: pointers.get(n, floats.get(n, "i32")) for n in kernel.arg_names}}
        built = build(kernel, types, constants, {capability}, num_warps=4, enable_fp_fusion=False)
        ptx = built.asm["ptx"]
        wide = [f"extsi %{{step}}" in built.asm["ttir"] for step in ("x_step", "spikes_step")]
        print(ptx.count("st.global"), ptx.count("cvt.rn.{states.replace('fp', 'f')}"), ptx.count("fma"), *wide)
        """
    )
    stores, rounded, fused, *wide = printed.split()
    assert int(stores) >= 5 and (int(rounded) > 0) == (states != "fp32"), "of the description, nothing rounds"
    assert fused == "0", "a product and a sum are rounded apart"
    assert wide == ["True", "True"], "the offset of a time step must not overflow 32 bits"


@interpreted
@pytest.mark.parametrize("size", [(3,), (5,), (7, 1), (2, 1, 4), (5, 4), (2, 1, 1, 1), (0,)])
def test_a_kernel_is_not_launched_on_parameters_of_other_sizes(size):
    step = "t0 = mul v0 p0; t1 = add t0 x; t2 = ge t1 n0; t3 = where t2 n1 t1; spike t2; v0 t3"
    given = torch.randn(3, 2, 5, 4), [None], [0.0], [torch.rand(size)], [0.3, 0.0], step
    for operator, more in ((torch.ops.sparsecomp.neuron, [True]), (torch.ops.sparsecomp.trained_neuron, [1])):
        with pytest.raises(InputError, match="a parameter is"):
            operator.default.direct_cuda(*given, *more)


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_an_input_of_half_precision_becomes_float32_first(dtype: torch.dtype, device: str) -> None:
    """States are float32, whatever the input is."""
    from sparsecomp.lowering.spiking.neuron import launch_neuron

    x = torch.randn(4, 3, 50, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    neuron = ([None], [0.1], [], [0.3, 0.7, 1.0], LEAKY, True)
    expected = ops.neuron(x.float().cpu(), *neuron)
    found = launch_neuron(x, *neuron)
    assert found[1].dtype is torch.float32 and 0.02 < expected[0].float().mean() < 0.98
    torch.testing.assert_close([one.cpu() for one in found], list(expected), rtol=0, atol=0)
    torch.library.opcheck(torch.ops.sparsecomp.neuron.default, (x.cpu(), *neuron))
    torch.testing.assert_close(ops.neuron(x.cpu(), *neuron), expected, rtol=0, atol=0)


ROUNDED = "t0 = mul v0 n0; t1 = {0} t0; t2 = add t1 x; t3 = {0} t2; t4 = gt t3 n1; t5 = where t4 n2 t3; spike t4; v0 t5"


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("layout", ["contiguous", "sliced"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_states_are_handed_on_in_half_precision(dtype: torch.dtype, layout: str, device: str) -> None:
    """Where a step rounds its states to it, they are what they are in float32, in two bytes; two calls are one."""
    from sparsecomp.lowering.spiking.neuron import launch_neuron

    x, text = sample(layout).to(dtype), ROUNDED.format(str(dtype).removeprefix("torch."))
    neuron = [0.0], [], [0.3, 0.7, 0.0], text, True
    spikes, wide, _ = ops.neuron(x, [None], *neuron)
    assert 0.05 < spikes.float().mean() < 0.95 and torch.equal(wide, wide.to(dtype).float()) and wide.any()
    for run, place in ((launch_neuron, device), (ops.neuron, "cpu")):
        first, between, _ = run(x[:1].to(place), [None], *neuron, dtype)
        rest, last, unused = run(x[1:].to(place), [between], *neuron, dtype)
        assert between.dtype is last.dtype is unused.dtype is dtype and unused.shape == (0,)
        assert torch.equal(torch.cat((first, rest)).cpu(), spikes) and torch.equal(last.cpu().float(), wide)
        assert last.stride() == torch.empty_like(x[0]).stride()
    torch.library.opcheck(torch.ops.sparsecomp.neuron.default, (x, [wide.to(dtype)], *neuron, dtype))


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("layout", ["contiguous", "time_inside"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_spikes_at_full_width(dtype: torch.dtype, layout: str, device: str) -> None:
    from sparsecomp.lowering.spiking.neuron import launch_neuron

    args = arguments(CASES["leaky"], sample(layout))
    expected = ops.neuron(*args)
    for run, place in ((launch_neuron, device), (ops.neuron, "cpu")):
        spikes, last, _ = run(*on(place, args), None, dtype)
        assert spikes.dtype is dtype and torch.equal(spikes.cpu(), expected[0].to(dtype))
        assert spikes.stride() == expected[0].stride() and torch.equal(last.cpu(), expected[1])
    torch.library.opcheck(torch.ops.sparsecomp.neuron.default, (*args, None, dtype))
    with pytest.raises(InputError, match="spike_dtype=torch.int32"):
        ops.neuron(*args, None, torch.int32)


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize(
    ("state", "asked", "told"),
    [(torch.float16, None, "a first state is torch.float16"), (torch.float32, torch.int8, "needed is float32, float16"),
     (torch.float32, torch.float16, "states are torch.float16")],
)  # fmt: skip
def test_states_of_another_dtype_are_an_error(state: torch.dtype, asked: Any, told: str, device: str) -> None:
    from sparsecomp.lowering.spiking.neuron import launch_neuron

    x = sample()
    for run, place in ((launch_neuron, device), (ops.neuron, "cpu"), (ops.neuron, "meta")):
        given = x.to(place), [x[0].to(place, state)], [0.0], [], [0.3, 0.7, 1.0], LEAKY, True, asked
        with pytest.raises(InputError, match=told):
            run(*given)


MISFITS: dict[str, tuple[dict[str, Any], str]] = {
    "no step": ({"x": torch.zeros(0, 4, 5)}, "needed are real numbers"),
    "a number": ({"x": torch.tensor(1.0)}, "needed are real numbers"),
    "complex": ({"x": torch.zeros(3, 4, 5, dtype=torch.complex64)}, "needed are real numbers"),
    "no states": ({"states": [], "starts": []}, "has 1 states: give as many of both"),
    "three states": ({"states": [None] * 3, "starts": [0.0] * 3}, "has 1 states: give as many of both"),
    "no starts": ({"starts": []}, "has 1 states: give as many of both"),
    "a state of several steps": ({"states": [torch.zeros(2, 4, 5)]}, "a first state is \\(2, 4, 5\\), needs the shape"),
    "a state of another step": ({"states": [torch.zeros(3, 5)]}, "a first state is \\(3, 5\\), needs the shape"),
    "a parameter of two dimensions": ({"parameters": [torch.zeros(4, 5)]}, "a parameter is \\(4, 5\\), needs one"),
    "parameters": ({"parameters": [torch.zeros(5)] * 7}, "7 parameters and 3 numbers; a description has room for 6"),
    "numbers": ({"numbers": [0.5] * 9}, "0 parameters and 9 numbers; a description has room for 6 and 8"),
    "a text": ({"step": "spike x"}, "describes no neuron"),
}  # fmt: skip


@interpreted
@pytest.mark.parametrize("name", MISFITS)
def test_what_does_not_fit_is_the_same_error_everywhere(name: str) -> None:
    """Before anything is launched, which would read and write past the end."""
    changed, told = MISFITS[name]
    given = {"x": torch.zeros(3, 4, 5), "states": [None], "starts": [0.0], "parameters": [], "numbers": [0.3, 0.7, 1.0]}
    args = [*{**given, "step": LEAKY, **changed}.values()]
    for operator, more in ((torch.ops.sparsecomp.neuron, [True]), (torch.ops.sparsecomp.trained_neuron, [1])):
        for run in (operator.default, operator.default.direct_cuda):
            with pytest.raises(InputError, match=told):
                run(*args, *more)
        with pytest.raises(InputError, match=told):
            operator.default(*on("meta", args), *more)


@interpreted
def test_doubles_are_computed_in_doubles_where_there_is_no_kernel_for_them() -> None:
    x = sample().double()
    args = x, [None], [0.0], [], [0.3, 0.7, 1.0], LEAKY, True
    expected, found = ops.neuron(*args), torch.ops.sparsecomp.neuron.default.direct_cuda(*args)
    assert all(map(torch.equal, found, expected)) and found[1].dtype is torch.float64
    assert not torch.equal(found[1], found[1].float().double())
