"""Gradients of described neurons: the operator against functions written out in eager, its kernel against float64."""

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from compile_kernel import compile_in_subprocess
from kernel_devices import KERNEL_DEVICES
from torch import Tensor

import sparsecomp.ops as ops
from sparsecomp.errors import InputError
from sparsecomp.reference.neuron import neuron_of

pytestmark = pytest.mark.quick_cases(1)


class FastSigmoid(torch.autograd.Function):
    """1 from 0 on, with the gradient g / (1 + 5 |u|)^2."""

    @staticmethod
    def forward(ctx, u):
        ctx.save_for_backward(u)
        return (u >= 0).to(u.dtype)

    @staticmethod
    def backward(ctx, *grads):
        (u,) = ctx.saved_tensors
        return grads[0] / (1 + 5 * u.abs()) ** 2


class Bell(torch.autograd.Function):
    """1 above 0, with the gradient g · exp(-u²) where |u| < 2, and a tenth of it elsewhere."""

    @staticmethod
    def forward(ctx, u):
        ctx.save_for_backward(u)
        return (u > 0).to(u.dtype)

    @staticmethod
    def backward(ctx, *grads):
        (u,) = ctx.saved_tensors
        bell = grads[0] * torch.exp(-(u * u))
        return torch.where(u.abs() < 2, bell, bell * 0.1)


def leaky(x, v):
    h = v * 0.9 + x
    s = FastSigmoid.apply(h - 1.0)
    return s, h * (1.0 - s)


def detached(x, v):
    h = v * 0.9 + x
    s = FastSigmoid.apply(h - 1.0)
    return s, h * (1.0 - s.detach())


def trained(x, v, i, tau, threshold):
    """A current and a membrane, whose decay and threshold are trained."""
    i = i * tau + x
    h = v + (i - v) / 2.0
    s = Bell.apply(h - threshold)
    return s, torch.where(h > threshold, 0.1, h) - 0.2 * s, i


def normed(x, v, mean, factor, bias):
    h = v * 0.9 + ((x - mean) * factor + bias)
    s = FastSigmoid.apply(h - 1.0)
    return s, h * (1.0 - s)


class Case(NamedTuple):
    """A description, its numbers and parameters, and the same step as a function."""

    text: str
    numbers: list[float]
    parameters: list[tuple[int, ...]]
    step: Any


_LEAKY = (
    "t0 = mul v0 n0; t1 = add t0 x; t2 = sub t1 n1; t3 = ge t2 n2; t4 = fire t3 t2; t5 = sub n1 {}; t6 = mul t1 t5; "
    "spike t4; v0 t6; b0 = abs u; b1 = mul n3 b0; b2 = add n1 b1; b3 = mul b2 b2; b4 = div g b3; pull b4"
)
_NORMED = (
    "t0 = sub x p0; t1 = mul t0 p1; t2 = add t1 p2; t3 = mul v0 n0; t4 = add t3 t2; t5 = sub t4 n1; t6 = ge t5 n2; "
    "t7 = fire t6 t5; t8 = sub n1 t7; t9 = mul t4 t8; spike t7; v0 t9; b0 = abs u; b1 = mul n3 b0; b2 = add n1 b1; "
    "b3 = mul b2 b2; b4 = div g b3; pull b4"
)
CASES = {
    "leaky": Case(_LEAKY.format("t4"), [0.9, 1.0, 0.0, 5.0], [], leaky),
    "detached": Case(
        _LEAKY.format("t7").replace("t5 = sub", "t5 = stop t4; t6 = sub").replace("sub n1 t7", "sub n1 t5")
        .replace("t6 = mul t1 t5", "t7 = mul t1 t6").replace("v0 t6", "v0 t7"),
        [0.9, 1.0, 0.0, 5.0], [], detached,
    ),
    "trained": Case(
        "t0 = mul v1 p0; t1 = add t0 x; t2 = sub t1 v0; t3 = div t2 n0; t4 = add v0 t3; t5 = sub t4 p1; "
        "t6 = gt t5 n1; t7 = fire t6 t5; t8 = gt t4 p1; t9 = where t8 n2 t4; t10 = mul n3 t7; t11 = sub t9 t10; "
        "spike t7; v0 t11; v1 t1; b0 = mul u u; b1 = neg b0; b2 = exp b1; b3 = mul g b2; b4 = abs u; b5 = lt b4 n0; "
        "b6 = mul b3 n2; b7 = where b5 b3 b6; pull b7",
        [2.0, 0.0, 0.1, 0.2], [(5, 1, 1), ()], trained,
    ),
    "normed": Case(_NORMED, [0.9, 1.0, 0.0, 5.0], [(5, 1, 1)] * 3, normed),
    "of one bias": Case(_NORMED, [0.9, 1.0, 0.0, 5.0], [(5, 1, 1), (5, 1, 1), ()], normed),
}  # fmt: skip
EACH = pytest.mark.parametrize("name", CASES)


def sample(case: Case, steps: int = 4, dtype: torch.dtype = torch.float32, started: bool = True) -> list[Any]:
    """Input, states and parameters."""
    random = torch.Generator().manual_seed(steps)
    x = 2 * torch.randn((steps, 2, 5, 4, 3), generator=random, dtype=dtype)
    count = len(neuron_of(case.text).states)
    states = [torch.rand(x.shape[1:], generator=random, dtype=dtype) if started else None for _ in range(count)]
    return [x, states, [torch.rand(shape, generator=random, dtype=dtype) + 0.5 for shape in case.parameters]]


def written_out(case: Case, x: Tensor, states: list[Any], parameters: list[Tensor]) -> list[Tensor]:
    now = [torch.zeros_like(x[0]) if one is None else one for one in states]
    spikes = []
    for current in x.unbind():
        spike, *now = case.step(current, *now, *parameters)
        spikes.append(spike)
    return [torch.stack(spikes), *now]


def as_operator(case: Case, x: Tensor, states: list[Any], parameters: list[Tensor]) -> list[Tensor]:
    found = ops.trained_neuron(x, states, [0.0] * len(states), parameters, case.numbers, case.text)
    return [*found[: 1 + len(states)]]


def gradients(function, case: Case, x: Tensor, states: list[Any], parameters: list[Tensor]) -> list[Tensor]:
    given = [one.detach().requires_grad_() for one in (x, *states, *parameters) if one is not None]
    rest = iter(given)
    x, states = next(rest), [one if one is None else next(rest) for one in states]
    outs = function(case, x, states, [*rest])
    random = torch.Generator().manual_seed(9)
    loss = sum(
        (out * torch.randn(out.shape, generator=random, dtype=torch.float64).to(out)).sum()
        for out in outs if out.requires_grad
    )
    return [out.detach() for out in outs] + [*torch.autograd.grad(loss, given, materialize_grads=True)]


@EACH
@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("started", [True, False])
def test_the_operator_and_its_gradients_are_the_function_s(name, steps, started):
    case = CASES[name]
    given = sample(case, steps, torch.float64, started)
    found, expected = (gradients(one, case, *given) for one in (as_operator, written_out))
    assert 0.05 < found[0].mean() < 0.95
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("name", "asked"), [("normed", [False, True, True]), ("of one bias", [True, True, True])])
@pytest.mark.parametrize("of_bias", [True, False])
def test_a_mean_s_gradient_follows_from_that_of_the_bias_behind_it(name, asked, of_bias, monkeypatch):
    """A kernel sums it for none of several shapes, and in float64 both ways give the same."""
    summed, gradients_of = [], torch.ops.sparsecomp.neuron_gradients.default
    monkeypatch.setattr(
        torch.ops.sparsecomp, "neuron_gradients",
        SimpleNamespace(default=lambda *given: summed.append(given[-2][2:]) or gradients_of(*given)),
    )  # fmt: skip
    case = CASES[name]
    x, states, parameters = sample(case, 3, torch.float64)
    found = []
    for function in (as_operator, written_out):
        given = [one.clone().requires_grad_(i < 2 or of_bias) for i, one in enumerate(parameters)]
        spikes, v = function(case, x, states, given)
        found.append(torch.autograd.grad(spikes.square().sum() + v.sum(), [one for one in given if one.requires_grad]))
    assert len(summed) == 1 and summed[0] == [*asked[:2], of_bias or name == "normed"]
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def launched(case: Case, x: Tensor, states: list[Any], parameters: list[Tensor], device: str) -> list[Tensor]:
    """Results and gradients of the kernels, for the loss of :func:`gradients`."""
    from sparsecomp.lowering.spiking.neuron import launch_trained
    from sparsecomp.lowering.spiking.neuron_gradients import launch_gradients

    def moved(values):
        return [None if one is None else one.to(device) for one in values]

    how = x.to(device), moved(states), [0.0] * len(states), moved(parameters), case.numbers, case.text
    outs = launch_trained(*how)
    random = torch.Generator().manual_seed(9)
    grads = [torch.randn(out.shape, generator=random, dtype=torch.float64).to(out) for out in outs]
    wanted = [True, *(one is not None for one in states), *[True] * len(parameters)]
    found = launch_gradients(grads, *how, wanted)
    return [one.cpu() for one in (*outs, *(one for one, wants in zip(found, wanted, strict=True) if wants))]


@pytest.mark.quick_cases(3)
@EACH
@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("steps", [1, 4, 11])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "sliced"])
@pytest.mark.slow(reason="interprets both kernels")
def test_kernels_give_the_gradients_of_the_same_spikes(name, layout, steps, device):
    """In float64 the neurons fire alike, but where a membrane is within rounding of its threshold."""
    case = CASES[name]
    x, states, parameters = sample(case, steps, started=layout != "sliced")
    if layout == "channels_last":
        x = x.flatten(0, 1).contiguous(memory_format=torch.channels_last).unflatten(0, x.shape[:2])
    if layout == "sliced":
        x = torch.cat((x, x), 3)[:, :, :, ::2]
    found = launched(case, x, states, parameters, device)
    doubled = [x.double(), [None if one is None else one.double() for one in states], [p.double() for p in parameters]]
    expected, eager = gradients(written_out, case, *doubled), gradients(written_out, case, x, states, parameters)
    assert torch.equal(found[0].double(), expected[0]) and torch.equal(found[0], eager[0])
    for ours, theirs in zip(found[1:], expected[1:], strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("layout", ["steps inside", "sliced channels-last"])
def test_gradients_of_steps_that_are_not_dense_lie_as_compiled_code_takes_them_to(layout, device):
    from sparsecomp.lowering.spiking.neuron_gradients import launch_gradients

    case = CASES["detached"]
    x, states, parameters = sample(case)
    if layout == "steps inside":
        x = x.transpose(0, 1).contiguous().transpose(0, 1)
    else:
        x = torch.cat((x, x), 3).transpose(2, 4).contiguous().transpose(2, 4)[:, :, :, ::2]
    x, states = x.to(device), [one.to(device) for one in states]
    how = x, states, [0.0], parameters, case.numbers, case.text, [True, True]
    like = [torch.empty_like(x), torch.empty_like(x[0])]
    found = launch_gradients([torch.ones_like(one) for one in like], *how)
    assert [one.stride() for one in found] == [one.stride() for one in like]


@pytest.mark.quick_cases(2)
@EACH
@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("channels_last", [False, True])
def test_one_step_that_all_are_given_has_the_sum_of_their_gradients(name, channels_last, device):
    """Held against a tensor of all steps, whose gradient is summed by torch, as an operator and on kernels."""
    from sparsecomp.lowering.spiking.neuron import launch_trained
    from sparsecomp.lowering.spiking.neuron_gradients import launch_gradients

    case, times = CASES[name], 4
    x, states, parameters = sample(case, 1)
    x = x.flatten(0, 1).contiguous(memory_format=torch.channels_last).unflatten(0, (1, -1)) if channels_last else x
    how = [0.0] * len(states), parameters, case.numbers, case.text
    whole, one = x.expand(times, *x.shape[1:]).contiguous().requires_grad_(), x.clone().requires_grad_()
    outs, ours = ops.trained_neuron(whole, states, *how), ops.trained_neuron(one, states, *how, times)
    torch.testing.assert_close(ours, outs, rtol=0, atol=0)
    random = torch.Generator().manual_seed(9)
    grads = [torch.randn(out.shape, generator=random) for out in outs[: 1 + len(states)]]
    (expected,) = torch.autograd.grad(outs[: 1 + len(states)], whole, grads, allow_unused=True)
    (found,) = torch.autograd.grad(ours[: 1 + len(states)], one, grads, allow_unused=True)
    torch.testing.assert_close(found, expected.sum(0, keepdim=True))
    assert expected.any()

    def moved(values):
        return [None if value is None else value.detach().to(device) for value in values]

    seen = one.detach().to(device)
    given = moved(states), how[0], moved(parameters), *how[2:]
    spikes, *_ = launch_trained(seen.expand(times, *seen.shape[1:]), *given)
    assert torch.equal(spikes.cpu(), outs[0])
    wanted = [True, *(v is not None for v in states), *[False] * len(parameters)]
    by_x, *_ = launch_gradients(moved(grads), seen, *given, wanted, times)
    assert by_x.shape == x.shape and by_x.stride()[1:] == x.stride()[1:]
    torch.testing.assert_close(by_x.cpu(), found, rtol=2e-5, atol=2e-5)


def test_several_steps_are_not_seen_several_times():
    case = CASES["detached"]
    x, states, parameters = sample(case, 2)
    with pytest.raises(InputError, match="times=4 of x"):
        ops.trained_neuron(x, states, [0.0], parameters, case.numbers, case.text, 4)


@EACH
@pytest.mark.parametrize("of_the_input", [False, True])
def test_gradients_of_gradients(name, of_the_input):
    """States may be made of the input, whose gradient is then none of theirs."""
    case = CASES[name]
    x, states, parameters = sample(case, 3, torch.float64)
    results = []
    for function in (as_operator, written_out):
        given = x.clone().requires_grad_()
        made = [one if one is None or not of_the_input else one + given[0] * 0.5 for one in states]
        loss = function(case, given, made, parameters)[1].square().sum()
        first = torch.autograd.grad(loss, given, create_graph=True)
        results.append(torch.autograd.grad(first[0].square().sum(), given)[0])
    torch.testing.assert_close(*results)
    assert results[0].any()


@EACH
@pytest.mark.slow(reason="traces the operators many times")
def test_the_operators_pass_opcheck(name):
    case = CASES[name]
    x, states, parameters = sample(case, 3)
    given = (x.requires_grad_(), states, [0.0] * len(states), parameters, case.numbers, case.text)
    torch.library.opcheck(torch.ops.sparsecomp.trained_neuron.default, (*given, 1))
    grads = [one.detach() for one in ops.trained_neuron(*given)][: 1 + len(states)]
    wanted = [True] * (1 + len(states) + len(parameters))
    torch.library.opcheck(torch.ops.sparsecomp.neuron_gradients.default, (grads, x.detach(), *given[1:], wanted))


@pytest.mark.parametrize(
    "text",
    [
        "t0 = add v0 x; t1 = ge t0 n0; t2 = fire t1 t0; spike t2; v0 t0",
        "t0 = add v0 x; t1 = ge t0 n0; spike t1; v0 t0; pull g",
        "t0 = add v0 x; t1 = ge t0 n0; t2 = fire t1 t0; spike t2; v0 t0; b0 = mul x g; pull b0",
    ],
)
def test_firing_and_its_gradient_go_together(text):
    with pytest.raises(InputError, match="describes no neuron"):
        neuron_of(text)


@pytest.mark.slow(reason="compiles for two GPUs in a process of its own")
def test_the_kernel_compiles_for_gpus_that_are_not_there():
    texts = [case.text for case in CASES.values()]
    compile_in_subprocess(
        f"""
        from sparsecomp.lowering.spiking.kernels.neuron_gradients import neuron_gradients_kernel as kernel
        from sparsecomp.reference.neuron import OPERATIONS, neuron_of
        from sparsecomp.reference.neuron_gradient import step_back

        def tuples(code):
            return tuple((OPERATIONS.index(one.operation), one.a, one.b, one.c) for one in code)

        types = {{name: "*fp32" if name.endswith("_ptr") else "fp32" if name[0] in "n" or "start" in name else "i32"
                 for name in kernel.arg_names}} | dict(numel="i32")
        for capability, steps, half in ((80, 4, False), (90, 4, False), (90, 11, True)):
            for name in ("x_ptr", "spikes_ptr", "by_x_ptr"):
                types[name] = "*fp16" if half else "*fp32"
            for text in {texts!r}:
                neuron = neuron_of(text)
                back = step_back(neuron)
                constants = dict(STEPS=steps, CODE=tuples(neuron.code), AFTER=neuron.states, BACK=tuples(back.code),
                                 WIDE=False, ALIKE=(0,) * 6, SUMMED=half, OF_X=back.x,
                                 OF=(*back.states, *back.parameters), BLOCK=512)
                build(kernel, types, constants, capability, num_warps=4, enable_fp_fusion=False)
        """
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@EACH
def test_gradients_on_a_gpu(name):
    case = CASES[name]
    x, states, parameters = sample(case, 4)
    given = x.cuda(), [one.cuda() for one in states], [one.cuda() for one in parameters]
    for ours, theirs in zip(gradients(as_operator, case, *given), gradients(written_out, case, *given), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
