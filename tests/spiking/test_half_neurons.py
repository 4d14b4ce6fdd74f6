"""Neurons written by hand whose membranes are of half precision, as under autocast: eager's bits, step by step."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from compile_kernel import compile_in_subprocess
from hand_written import Call, currents, loop
from kernel_devices import KERNEL_DEVICES
from rewriting import rewritten, site
from test_trained_loops import CHARGES, FIRES, RESETS, Network, Parametric, back, over, seeded, tensors
from torch import Tensor, nn

import sparsecomp
from sparsecomp.reference.neuron import ROUNDINGS, neuron_of

pytestmark = pytest.mark.quick_cases(1)

RULE = "unrolled_neurons"
HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
FORMS = [
    *(("leak", fire, "soft") for fire in FIRES),
    *((charge, "arctan", "hard") for charge in CHARGES),
    *(("tau", "fast sigmoid", reset) for reset in RESETS),
]
STARTS: dict[str, Call] = {"a number": lambda _: 0.0, "zeros": torch.zeros_like, "ones": torch.ones_like}


def eagers(run: Call, *inputs: Tensor) -> Any:
    """What the rule makes of it gives eager's bits, and gradients that differ from eager's by its own rounding."""
    found, report = rewritten(run, *inputs, neurons="fuse", strict=True)
    expected, taken = run(*inputs), [one.rewritten for one in report.sites if one.rule == RULE]
    assert taken and all(taken), report
    compared(found, expected, inputs)
    return report


def compared(found: Any, expected: Any, inputs: Sequence[Tensor]) -> None:
    for one, other in zip(tensors(found), tensors(expected), strict=True):
        assert torch.equal(one, other) and one.dtype is other.dtype
    asking = [one for one in inputs if one.requires_grad]
    for one, other in zip(back(found, asking), back(expected, asking), strict=True):
        assert one is not None and other is not None and one.dtype is other.dtype and other.any()
        most = 8 * torch.finfo(one.dtype).eps * other.float().abs().max().item()
        torch.testing.assert_close(one.float(), other.float(), rtol=0, atol=most)


@HALVES
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize(("charge", "fire", "reset"), FORMS)
def test_every_form_has_eagers_bits(charge: str, fire: str, reset: str, start: str, dtype: torch.dtype) -> None:
    x = currents(4, 30, 40).to(dtype).requires_grad_()
    report = eagers(loop(CHARGES[charge], over(FIRES[fire]), RESETS[reset], STARTS[start]), x)
    assert f"each operation rounded to {str(dtype).removeprefix('torch.')}" in site(report, RULE).reason


@pytest.mark.slow(reason="traces two loops")
@HALVES
def test_inference_has_eagers_bits(dtype: torch.dtype) -> None:
    x, run = currents(4, 30, 40).to(dtype), loop(CHARGES["tau"], lambda h: (h >= 0.7).to(h), RESETS["hard"])
    with torch.no_grad():
        found, report = rewritten(run, x, neurons="fuse", strict=True)
    assert site(report, RULE).rewritten and all(map(torch.equal, found, run(x)))
    assert [one.dtype for one in found] == [dtype, dtype]
    assert f"True, {dtype}" in report.graph_after and "f32[" not in report.graph_after, "last states are not cast"


@pytest.mark.slow(reason="traces three loops")
@HALVES
@pytest.mark.parametrize(("shape", "wide"), [((30, 40), False), ((40,), False), ((40,), True)])
def test_states_in_inference_are_of_the_dtype_of_the_steps(
    shape: tuple[int, ...], wide: bool, dtype: torch.dtype
) -> None:  # fmt: skip
    start = torch.rand(shape, generator=torch.Generator().manual_seed(6)).to(torch.float32 if wide else dtype)
    x = currents(4, 30, 40).to(dtype)

    def run(x: Tensor, v: Tensor) -> Any:
        out = []
        for step in x:
            v = v * 0.9 + step
            out.append((v > 0.7).to(v))
            v = v * (1 - out[-1])
        return torch.stack(out), v

    with torch.no_grad():
        found, report = rewritten(run, x, start, neurons="fuse", strict=True)
    assert site(report, RULE).rewritten and (f"True, {dtype}" in report.graph_after) != wide
    for one, other in zip(found, run(x, start), strict=True):
        assert torch.equal(one, other) and one.dtype is start.dtype


@HALVES
def test_more_steps_than_a_kernel_unrolls_hand_on_states_in_half_precision(dtype: torch.dtype) -> None:
    x, run = currents(70, 3, 8).to(dtype), loop(CHARGES["tau"], lambda h: (h >= 0.7).to(h), RESETS["soft"])
    with torch.no_grad():
        found, report = rewritten(run, x, neurons="fuse", strict=True)
    assert report.graph_after.count(f"True, {dtype}") == 2 and all(map(torch.equal, found, run(x)))


def compares(x: Tensor) -> Tensor:
    """Fires by a number that is none of half precision, on which membranes lie."""
    v, out = torch.zeros_like(x[0]), []
    for step in x:
        v = v * 0.5 + step
        out.append((v >= 0.7).to(v.dtype))
        v = v.masked_fill(v > 0.3, 0.1)
    return torch.stack(out)


@HALVES
def test_numbers_are_rounded_where_eager_rounds_them(dtype: torch.dtype) -> None:
    """A membrane is the number that 0.7 is rounded to, up or down: it is no smaller, and no larger."""
    x = torch.tensor([0.7, 0.3]).to(dtype).expand(3, 5, 2)
    with torch.no_grad():
        found, report = rewritten(compares, x, neurons="fuse", strict=True)
    assert site(report, RULE).rewritten
    assert torch.equal(found, compares(x)) and found[0, 0].tolist() == [1, 0]


@HALVES
def test_numbers_as_tensors(dtype: torch.dtype) -> None:
    """A decay that is trained, and a threshold: float32 tensors without dimensions leave results in half precision."""
    model = Parametric()
    eagers(model, currents(5, 3, 16).to(dtype).requires_grad_())


def per_channel(decay: Tensor) -> Call:
    """A decay for each neuron, in float32: so are membranes from the second step on."""

    def run(x: Tensor) -> Any:
        v, out = torch.zeros(x[0].shape), []
        for step in x:
            v = v * decay + step
            out.append(FIRES["arctan"](v - 0.7))
            v = v - 0.7 * out[-1]
        return torch.stack(out), v

    return run


@HALVES
def test_parameters_of_either_precision(dtype: torch.dtype) -> None:
    decay = torch.rand(16, generator=torch.Generator().manual_seed(0))
    x = currents(5, 3, 16).to(dtype).requires_grad_()
    assert "rounded" not in site(eagers(per_channel(decay), x), RULE).reason
    assert "rounded" not in site(eagers(per_channel(decay.to(dtype)), x), RULE).reason


@pytest.mark.slow(reason="traces two loops")
def test_states_of_half_precision_are_handed_on() -> None:
    def run(x: Tensor, v: Tensor) -> Any:
        out = []
        for step in x:
            v = v * 0.9 + step
            out.append(FIRES["triangle"](v - 0.7))
            v = v * (1 - out[-1])
        return torch.stack(out), v

    x, v = (currents(*shape).bfloat16().requires_grad_() for shape in ((5, 3, 16), (3, 16)))
    eagers(run, x, v)


def of_number(decay: Tensor) -> Call:
    """Starts from a number that half precision does not hold, which is not rounded before it is multiplied."""

    def run(x: Tensor) -> Any:
        v: Any = 1.003
        out = []
        for step in x:
            v = v * decay + step
            out.append(FIRES["arctan"](v - 0.7))
            v = v * (1 - out[-1])
        return torch.stack(out), v

    return run


@pytest.mark.slow(reason="traces two loops")
@HALVES
def test_a_start_that_half_precision_does_not_hold(dtype: torch.dtype) -> None:
    x, decay = currents(4, 3, 500).to(dtype), torch.rand(500, generator=torch.Generator().manual_seed(2)).to(dtype)
    assert not torch.equal(1.003 * decay, torch.tensor(1.003).to(dtype) * decay)
    eagers(of_number(decay), x.requires_grad_())


def mixed(x: Tensor, tau: float, threshold: Tensor) -> Tensor:
    """Of half precision in the first step and, by a threshold for each neuron, of float32 in the others."""
    v, out = torch.zeros_like(x[0]), []
    for step in x:
        v = v + step if tau == 1 else v + (step - v) / tau
        out.append((v >= threshold).to(threshold))
        v = v - out[-1] * threshold
    return torch.stack(out)


@HALVES
def test_a_first_step_that_rounds_nothing_may_be_of_half_precision(dtype: torch.dtype) -> None:
    """A sum with zero has the same bits in both; a quotient has not, and the report says what to do."""
    x, threshold = currents(4, 3, 500).to(dtype), torch.rand(500, generator=torch.Generator().manual_seed(4)) + 0.2
    for tau, reason in ((1.0, "4 time steps in one pass"), (3.0, "in half precision in some steps")):
        with torch.no_grad():
            found, report = rewritten(mixed, x, tau, threshold, neurons="fuse", strict=True)
        assert reason in site(report, RULE).reason
        assert torch.equal(found, mixed(x, tau, threshold))


def by(decay: Call) -> Call:
    """Membranes of zeros times a decay that is a tensor without dimensions, and then of float32."""

    def run(x: Tensor, parameter: Tensor, threshold: Tensor) -> Tensor:
        v, out = torch.zeros_like(x[0]), []
        for step in x:
            v = decay(parameter) * v + step
            out.append((v >= threshold).to(threshold))
            v = v - out[-1] * threshold
        return torch.stack(out)

    return run


@pytest.mark.parametrize("decay", [torch.sigmoid, lambda p: p.clamp(0, 1), lambda p: p.clamp(min=0), lambda p: p])
def test_zero_times_what_may_be_infinite_in_half_precision_is_no_zero(decay: Call) -> None:
    """Then the product is a membrane's first value as it was computed."""
    x, threshold = currents(3, 4, 50).half(), torch.ones(50)
    for number in (0.5, 1e6):
        with torch.no_grad():
            found, report = rewritten(by(decay), x, torch.tensor(number), threshold, neurons="fuse", strict=True)
        expected = by(decay)(x, torch.tensor(number), threshold)
        assert torch.equal(found, expected) and site(report, RULE).rewritten
        assert expected.any() == (decay(torch.tensor(number)) < 2**15), "else membranes are no numbers"


# ---- networks under autocast --------------------------------------------------------------------------------------


class Zeros(Network):
    """Whose membranes are float32 from the first step on."""

    def forward(self, x: Tensor) -> Tensor:
        a, out = torch.zeros(x.shape[1], 32), []
        for step in x:
            a = a * 0.5 + self.first(step)
            s = FIRES["arctan"](a - 0.5)
            a = a * (1 - s.detach())
            out.append(self.second(s))
        return torch.stack(out)


class Inside(nn.Module):
    """Turns autocast on itself, and off before what it returns."""

    def __init__(self, network: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.network, self.dtype = network, dtype

    def forward(self, x: Tensor) -> Tensor:
        scaled = x * 1.5
        with torch.autocast("cpu", self.dtype):
            found = self.network(scaled)
        return found.float() * 1.5


@HALVES
@pytest.mark.parametrize("network", [Network, Zeros])
@pytest.mark.parametrize("inside", [True, False])
def test_a_network_under_autocast_runs_once_for_all_steps(
    network: type[Network], inside: bool, dtype: torch.dtype
) -> None:  # fmt: skip
    torch.manual_seed(3)
    model, x = network(), currents(4, 6, 8)
    run = Inside(model, dtype) if inside else model
    with torch.autocast("cpu", dtype, enabled=not inside):
        found, report = rewritten(run, x, neurons="fuse", implementation="auto", strict=True)
        expected = run(x)
    assert site(report, "fuse_steps").rewritten
    taken = [one.rewritten for one in report.sites if one.rule == RULE]
    assert taken == [True] * (2 if network is Network else 1), report
    assert report.graph_after.count("nn.linear(") == 2
    assert torch.equal(found, expected)
    given = [*model.parameters()] if network is Network else [*model.parameters()][1:]
    for one, other in zip(back(found, given), back(expected, given), strict=True):
        assert one is not None and other is not None
        most = 16 * torch.finfo(dtype).eps * other.abs().max().item()
        torch.testing.assert_close(one, other, rtol=0, atol=most)


def test_a_layer_stays_on_its_side_of_autocast() -> None:
    layer = nn.Linear(8, 8)

    def run(x: Tensor) -> Any:
        first = layer(torch.relu(x[0]).round())
        with torch.autocast("cpu", torch.bfloat16):
            second = layer(torch.relu(x[1]).round())
        return first, second, layer(torch.relu(x[2]).round())

    found, report = rewritten(run, x := currents(3, 4, 8), neurons="fuse", implementation="auto", strict=True)
    assert [one.dtype for one in found] == [torch.float32, torch.bfloat16, torch.float32]
    assert not any(one.rewritten for one in report.sites if one.rule == "fuse_steps")
    assert all(map(torch.equal, found, run(x)))


# ---- kernels ------------------------------------------------------------------------------------------------------


def described(fire: str, dtype: torch.dtype) -> tuple[Any, ...]:
    """The arguments of the operator that a loop becomes: numbers and description."""
    import ast
    import re

    run = loop(CHARGES["leak"], over(FIRES[fire]), RESETS["soft"])
    x = currents(2, 3, 4).to(dtype).requires_grad_()
    _, report = rewritten(run, x, neurons="fuse", strict=True)
    found = re.search(r"\.default\(l_x_, \[None\], \[0\.0\], \[\], (\[.*?\]), '(.*?)', 1\)", report.graph_after)
    assert found is not None
    return ast.literal_eval(found[1]), found[2]


@HALVES
@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("fire", ["arctan", "rectangle"])
def test_kernels_have_eagers_bits(fire: str, device: str, dtype: torch.dtype) -> None:
    from sparsecomp.lowering.spiking.neuron import launch_neuron, launch_trained
    from sparsecomp.lowering.spiking.neuron_gradients import launch_gradients

    numbers, step = described(fire, dtype)
    x, random = currents(3, 4, 50).to(dtype).requires_grad_(), torch.Generator().manual_seed(5)
    spikes, v = loop(CHARGES["leak"], over(FIRES[fire]), RESETS["soft"])(x)
    grads = [torch.randn(x.shape, generator=random).to(dtype), torch.randn(x[0].shape, generator=random)]
    (expected,) = torch.autograd.grad((spikes * grads[0]).sum() + (v.float() * grads[1]).sum(), x)
    given = x.detach().to(device), [None], [0.0], [], numbers, step
    found = launch_trained(*given)
    assert torch.equal(found[0].cpu(), spikes) and torch.equal(found[1].cpu(), v.float())
    plain = launch_neuron(given[0].float(), *given[1:], True)
    assert torch.equal(plain[0].cpu(), spikes.char()) and torch.equal(plain[1].cpu(), v.float())
    ours, _ = launch_gradients([one.to(device) for one in grads], *given, [True, False])
    most = 8 * torch.finfo(dtype).eps * expected.float().abs().max().item()
    torch.testing.assert_close(ours.cpu().float(), expected.float(), rtol=0, atol=most)


@pytest.mark.parametrize("name", ROUNDINGS)
def test_an_instruction_rounds_to_nearest_even_and_lets_the_gradient_through(name: str) -> None:
    """By torch's own conversion, at ties and at the ends of the range."""
    step = f"t0 = add v0 x; t1 = {name} t0; t2 = gt t1 n0; t3 = fire t2 t1; spike t3; v0 t1; b0 = mul g n0; pull b0"
    eps = torch.finfo(ROUNDINGS[name]).eps
    x = torch.tensor([[1 + eps / 2, 1 + eps * 1.5, 1e-8, 7e4, 1e39, float("nan")]]).requires_grad_()
    _, last, _ = sparsecomp.ops.trained_neuron(x, [None], [0.0], [], [0.5], step)
    torch.testing.assert_close(last, x.detach()[0].to(ROUNDINGS[name]).float(), rtol=0, atol=0, equal_nan=True)
    assert last[:2].tolist() == [1, 1 + 2 * eps]
    (grad,) = torch.autograd.grad(last.sum(), x)
    assert grad.tolist() == [[1.0] * 6]
    assert str(neuron_of(step)) == step


@pytest.mark.slow(reason="compiles for two GPUs in a process of its own")
@HALVES
def test_kernels_that_round_compile_for_gpus_that_are_not_there(dtype: torch.dtype) -> None:
    _, text = described("arctan", dtype)
    conversion = "cvt.rn.bf16" if dtype is torch.bfloat16 else "cvt.rn.f16"
    printed = compile_in_subprocess(
        f"""
        from sparsecomp.lowering.spiking.kernels.neuron_gradients import neuron_gradients_kernel as kernel
        from sparsecomp.lowering.spiking.neuron import code_of
        from sparsecomp.reference.neuron import neuron_of
        from sparsecomp.reference.neuron_gradient import step_back

        types = {{name: "*fp32" if name.endswith("_ptr") else "fp32" if name[0] in "n" or "start" in name else "i32"
                 for name in kernel.arg_names}} | dict(numel="i32")
        neuron = neuron_of({text!r})
        back = step_back(neuron)
        constants = dict(STEPS=2, CODE=code_of(neuron.code), AFTER=neuron.states, BACK=code_of(back.code),
                         WIDE=False, ALIKE=(0,) * 6, SUMMED=True, OF_X=back.x,
                         OF=(*back.states, *back.parameters), BLOCK=512)
        for capability in (80, 90):
            built = build(kernel, types, constants, capability, num_warps=4, enable_fp_fusion=False)
            print({conversion!r} in built.asm["ptx"])
        """
    )
    assert printed.split() == ["True", "True"]


# ---- on a GPU -----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@HALVES
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize(("charge", "fire", "reset"), FORMS)
def test_on_a_gpu_it_has_eagers_bits(charge: str, fire: str, reset: str, start: str, dtype: torch.dtype) -> None:
    run = loop(CHARGES[charge], over(FIRES[fire]), RESETS[reset], STARTS[start])
    x = currents(4, 32, 512).to("cuda", dtype).requires_grad_()
    torch._dynamo.reset()
    found = torch.compile(run, backend="sparsecomp", options={"neurons": "fuse", "strict": True})(x)
    report, expected = sparsecomp.last_report(), run(x)
    assert report is not None and site(report, RULE).rewritten
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other) and one.dtype is other.dtype
    weights = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(x)
    mine, theirs = (torch.autograd.grad((out[0] * weights).sum() + out[1].sum(), x)[0] for out in (found, expected))
    most = 8 * torch.finfo(dtype).eps * theirs.float().abs().max().item()
    torch.testing.assert_close(mine.float(), theirs.float(), rtol=0, atol=most)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@HALVES
def test_numbers_are_rounded_on_a_gpu_where_eager_rounds_them(dtype: torch.dtype) -> None:
    x = torch.tensor([0.7, 0.3]).to("cuda", dtype).expand(3, 5, 2).contiguous()
    model, given = Parametric().cuda(), currents(5, 3, 1600).to("cuda", dtype)
    options = {"neurons": "fuse", "strict": True}
    for run, one in ((compares, x), (model, given)):
        torch._dynamo.reset()
        with torch.no_grad():
            found, expected = torch.compile(run, backend="sparsecomp", options=options)(one), run(one)
        report = sparsecomp.last_report()
        assert report is not None and site(report, RULE).rewritten
        assert torch.equal(found, expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@HALVES
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_training_step_under_autocast_on_a_gpu(mode: str, dtype: torch.dtype) -> None:
    model, x = seeded().cuda(), currents(4, 6, 8).cuda()
    torch._dynamo.reset()
    options = {"neurons": "fuse", "strict": True, "mode": mode}
    compiled, grads = torch.compile(model, backend="sparsecomp", options=options), []
    for run in (compiled, compiled, model):
        model.zero_grad()
        with torch.autocast("cuda", dtype):
            loss = run(x).float().mean(0).square().sum()
        loss.backward()
        grads.append([loss.detach().clone(), *(one.grad.clone() for one in model.parameters() if one.grad is not None)])
    report = sparsecomp.last_report()
    assert report is not None and [one.rewritten for one in report.sites if one.rule == RULE] == [True, True]
    for found in grads[:2]:
        for one, other in zip(found, grads[2], strict=True):
            most = 16 * torch.finfo(dtype).eps * other.abs().max().item()
            torch.testing.assert_close(one, other, rtol=0, atol=most)
