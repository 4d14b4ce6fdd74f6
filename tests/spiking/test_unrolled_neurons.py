"""Neurons written by hand, in loops over time: one operator with eager's bits, and what must stay a chain of steps."""

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hand_written import Channels, currents, loop
from rewriting import Surrogate, rewritten, site
from snn_zoo import images
from torch import Tensor, nn

import sparsecomp
from sparsecomp.options import Options
from sparsecomp.passes.pipeline import run_rules
from sparsecomp.passes.spiking import unrolled_neurons
from tests.fuzz import oracle
from tests.fuzz.operators import STEPS
from tests.fuzz.program import Program, Refused

pytestmark = pytest.mark.quick_cases(1)

RULE = "unrolled_neurons"
Step = Callable[..., Any]

CHARGES: dict[str, Step] = {
    "leak": lambda x, v: v * 0.3 + x,
    "leak behind": lambda x, v: x + 0.3 * v,
    "tau": lambda x, v: v + (x - v) / 3.0,
    "rate": lambda x, v: v + (x - v) * (1 / 3.0),
    "tau apart": lambda x, v: v - v / 3.0 + x,
    "integrate": lambda x, v: v + x,
    "average": lambda x, v: v * 0.9 + (1 - 0.9) * x,
    "rest": lambda x, v: v - (v - 0.1) / 3.0 + x,
    "methods": lambda x, v: torch.add(torch.mul(v, 0.3), x),
}
FIRES: dict[str, Step] = {
    "ge": lambda h: (h >= 0.7).float(),
    "gt": lambda h: (h > 0.7).to(h.dtype),
    "distance": lambda h: ((h - 0.7) >= 0).float(),
    "reversed": lambda h: torch.le(torch.full_like(h, 0.7), h) * 1.0,
    "heaviside": lambda h: torch.heaviside(h - 0.7, torch.ones_like(h)),
    "heaviside at 0": lambda h: torch.heaviside(h - 0.7, h.new_zeros(())),
    "surrogate": lambda h: Surrogate.apply(h - 0.7),
    "where": lambda h: torch.where(h >= 0.7, 1.0, 0.0),
    "type of the distance": lambda h: (lambda u: (u > 0).to(u))(h - 0.7),
    "heaviside of the distance": lambda h: (lambda u: torch.heaviside(u, torch.zeros_like(u)))(h - 0.7),
    "not": lambda h: (~(h < 0.7)).type_as(h),
}
RESETS: dict[str, Step] = {
    "hard": lambda h, s: h * (1 - s),
    "hard reversed": lambda h, s: (1.0 - s) * h,
    "soft": lambda h, s: h - s * 0.7,
    "to a value": lambda h, s: h * (1 - s) + 0.1 * s,
    "where": lambda h, s: torch.where(s > 0, 0.1, h),
    "masked": lambda h, s: h.masked_fill(s > 0.5, 0.0),
    "detached": lambda h, s: h - 0.7 * s.detach().clone(),
    "none": lambda h, s: h,
}
STARTS: dict[str, Step] = {
    "number": lambda x: 0.0,
    "zeros": lambda x: torch.zeros_like(x),
    "value": lambda x: torch.full_like(x, 0.25),
    "tensor": lambda x: x.abs() * 0.1,
    "scalar": lambda x: torch.tensor(0.25),
}


def assert_same_bits(found: Any, expected: Any) -> None:
    """Equal, with the sign of zeros; NaN is NaN whatever its bits."""
    for ours, theirs in zip(_tensors(found), _tensors(expected), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
        if not ours.is_floating_point():
            continue
        assert torch.equal(ours.signbit() & ~ours.isnan(), theirs.signbit() & ~theirs.isnan())


def _tensors(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else [one for part in value for one in _tensors(part)]


def fused(run: Step, *inputs: Tensor, sites: int = 1, **options: Any) -> Any:
    """What it gives with its neurons fused, which is what eager gives."""
    with torch.no_grad():
        expected = run(*inputs)
        found, report = rewritten(run, *inputs, neurons="fuse", strict=True, **options)
    assert_same_bits(found, expected)
    assert [one.rewritten for one in report.sites if one.rule == RULE] == [True] * sites, report
    return report


def stays(run: Step, *inputs: Tensor, reason: str, **options: Any) -> None:
    """It stays as it was written, for a reason, and gives what eager gives."""
    with torch.no_grad():
        expected = run(*[one.clone() for one in inputs])
        found, report = rewritten(run, *[one.clone() for one in inputs], strict=True, **{"neurons": "fuse", **options})
    assert_same_bits(found, expected)
    assert not site(report, RULE).rewritten
    assert reason in site(report, RULE).reason


# ---- what is taken ------------------------------------------------------------------------------------------------

PAIRS = [
    *((charge, "ge", "hard", "zeros") for charge in CHARGES),
    *(("leak", fire, "soft", "zeros") for fire in FIRES),
    *(("tau", "ge", reset, "number") for reset in RESETS),
    *(("leak", "gt", "to a value", start) for start in STARTS),
]


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize(("charge", "fire", "reset", "start"), PAIRS)
def test_every_form_has_eagers_bits(charge: str, fire: str, reset: str, start: str) -> None:
    run = loop(CHARGES[charge], FIRES[fire], RESETS[reset], STARTS[start])
    x = currents(5, 3, 16, special=True)
    report = fused(run, x)
    assert "5 time steps in one pass" in site(report, RULE).reason
    assert "sparsecomp.neuron" in report.graph_after


@pytest.mark.slow(reason="many compilations")
@pytest.mark.parametrize("seed", range(8))
def test_forms_in_any_combination(seed: int) -> None:
    forms = list(itertools.product(CHARGES, FIRES, RESETS, STARTS))
    # Python computes the first leak towards 0.1 of a number, from which that cannot be told
    forms = [form for form in forms if (form[0], form[3]) != ("rest", "number")]
    order = torch.randperm(len(forms), generator=torch.Generator().manual_seed(seed)).tolist()
    for place in order[:12]:
        charge, fire, reset, start = forms[place]
        run = loop(CHARGES[charge], FIRES[fire], RESETS[reset], STARTS[start])
        fused(run, currents(2 + place % 5, 3, 16, seed=place, special=True))


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("steps", [2, 3, 7, pytest.param(70, marks=pytest.mark.slow(reason="traces many steps"))])
@pytest.mark.parametrize("join", ["stack", "cat", "list", "last dimension", "written", "sum"])
def test_steps_are_joined_in_any_way(steps: int, join: str) -> None:
    def write(out: list[Tensor]) -> Tensor:
        joined = torch.empty(len(out), *out[0].shape)
        for t, one in enumerate(out):
            joined[t] = one
        return joined

    joins: dict[str, Step] = {
        "stack": torch.stack, "cat": torch.cat, "list": tuple, "last dimension": lambda out: torch.stack(out, -1),
        "written": write, "sum": lambda out: sum(out) / len(out),
    }  # fmt: skip
    run = loop(CHARGES["leak"], FIRES["ge"], RESETS["soft"], STARTS["number"], joins[join])
    fused(run, currents(steps, 3, 4))


def test_one_step_is_no_loop() -> None:
    run = loop(CHARGES["leak"], FIRES["ge"], RESETS["soft"], STARTS["zeros"])
    with torch.no_grad():
        found, report = rewritten(run, x := currents(1, 3, 4), neurons="fuse", strict=True)
        assert_same_bits(found, run(x))
    assert not [one for one in report.sites if one.rule == RULE]


def channels() -> Channels:
    decay = torch.rand(4, 1, 1, generator=torch.Generator().manual_seed(0))
    return Channels(decay, lambda decay: decay.clamp(0, 1), lambda v, threshold: (v >= threshold).float()).eval()


def test_parameters_of_channels_and_a_state_handed_on() -> None:
    model, x = channels(), currents(5, 2, 4, 3, 3, special=True)
    v = currents(2, 4, 3, 3, seed=1)
    report = fused(model, x, v)
    assert "p0" in site(report, RULE).reason
    last = x.flatten(0, 1).contiguous(memory_format=torch.channels_last).unflatten(0, (5, 2))
    fused(model, last, v)


def test_the_spike_before_as_a_state() -> None:
    def run(x: Tensor) -> Tensor:
        v, s, out = torch.zeros_like(x[0]), torch.zeros_like(x[0]), []
        for step in x:
            v = 0.25 * v * (1 - s) + step
            s = (v > 0.5).float()
            out.append(s)
        return torch.stack(out)

    report = fused(run, currents(6, 2, 8, special=True))
    assert "v1 = s" in site(report, RULE).reason


@pytest.mark.parametrize("factor", [0.3, "tensor"])
def test_spikes_of_another_size(factor: Any) -> None:
    factor = torch.tensor(0.3) if factor == "tensor" else factor

    def run(x: Tensor) -> Tensor:
        v, out = torch.zeros_like(x[0]), []
        for step in x:
            v = v * 0.5 + step
            s = (v >= 0.7).float()
            v = v - s * 0.7
            out.append(s * factor)
        return torch.stack(out)

    report = fused(run, currents(4, 3, 8))
    assert "select" not in report.graph_after, "the factor is multiplied with the spikes of all steps"


def test_a_current_that_decays_is_a_state() -> None:
    def run(x: Tensor) -> Any:
        i, v, out = torch.zeros_like(x[0]), torch.zeros_like(x[0]), []
        for step in x:
            i = 0.7 * i + step
            v = 0.9 * v + i
            out.append((v >= 1.0).float())
            v = v - out[-1]
        return torch.stack(out), i, v

    report = fused(run, currents(6, 2, 8, special=True))
    assert "v1 = h1" in site(report, RULE).reason


def test_an_image_that_stays() -> None:
    def run(image: Tensor) -> Tensor:
        v, out = 0.0, []
        current = image * 2
        for _ in range(5):
            v = v * 0.5 + current
            out.append((v >= 1.0).float())
            v = v * (1 - out[-1])
        return torch.stack(out)

    fused(run, currents(3, 4, 5))


def test_for_a_gpu_a_division_by_a_number_is_a_product_with_its_inverse() -> None:
    """As torch computes it there; on a CPU it divides."""
    run, x = loop(CHARGES["tau"], FIRES["ge"], RESETS["hard"], STARTS["zeros"]), currents(4, 3, 8)
    formulas = {"h100": "h1 = v0 + ((x - v0) · 0.333333)", None: "h1 = v0 + ((x - v0) / 3)"}
    for device, formula in formulas.items():
        with torch.no_grad():
            report = sparsecomp.explain(run, x, device=device, options={"neurons": "fuse"})
        assert formula in site(report, RULE).reason


@pytest.mark.parametrize("steps", [4, pytest.param(70, marks=pytest.mark.slow(reason="traces many steps"))])
@pytest.mark.parametrize("residual", [False, True])
def test_layers_of_a_loop_and_their_neurons_run_once_for_all_steps(residual: bool, steps: int) -> None:
    """Together with `fuse_steps`."""
    first, middle, second = (nn.Conv2d(2, 2, 3, padding=1, bias=False) for _ in range(3))

    def fire(v: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        v = v / 2 + x
        s = (v >= 0.5).float()
        return s, v * (1 - s)

    def run(x: Tensor) -> Tensor:
        a: Any = 0.0
        b: Any = 0.0
        c: Any = 0.0
        out = []
        for t in range(x.shape[0]):
            s, a = fire(a, first(x[t]))
            z, b = fire(b, middle(s) + s if residual else middle(s))
            y, c = fire(c, second(z))
            out.append(y)
        return torch.stack(out)

    with torch.no_grad():
        for conv in (first, middle, second):
            conv.weight.copy_(torch.randint(-8, 9, conv.weight.shape) / 8)
    x = images(steps, 2, 2, 6, 6)
    report = fused(run, x, sites=3)
    assert site(report, "fuse_steps").rewritten
    alone, with_a_layer = (report.graph_after.count(f"sparsecomp.{name}.default") for name in ("neuron", "conv_neuron"))
    assert (alone, with_a_layer) == ((6, 0) if steps == 70 else (2, 1) if residual else (1, 2))
    left = [line for line in report.graph_after.splitlines() if not line.lstrip().startswith("#")]
    assert not [line for line in left if ">=" in line or " / 2" in line]
    assert all(one.rewritten for one in report.sites if one.rule == "spike_conv")


# ---- what stays ---------------------------------------------------------------------------------------------------


def escaping(x: Tensor) -> Any:
    v, out, trace = 0.0, [], []
    for t in range(x.shape[0]):
        v = v * 0.5 + x[t]
        out.append((v >= 0.7).float())
        trace.append(v)
        v = v * (1 - out[-1])
    return torch.stack(out), torch.stack(trace)


def written_state(x: Tensor) -> Any:
    v, out = torch.zeros_like(x[0]), []
    for t in range(x.shape[0]):
        h = v * 0.5 + x[t]
        out.append((h >= 0.7).float())
        h.mul_(1 - out[-1])
        v = h
    return torch.stack(out), v


def written_input(x: Tensor) -> Any:
    """The input of a step is written to once the spikes of the step before are there."""
    y = x + 0
    v, out = torch.zeros_like(x[0]), []
    for t in range(x.shape[0]):
        v = v * 0.5 + y[t]
        out.append((v >= 0.7).float())
        v = v * (1 - out[-1])
        y[-1] += out[-1]
    return torch.stack(out)


def written_spikes(x: Tensor) -> Any:
    v, out = torch.zeros_like(x[0]), []
    for t in range(x.shape[0]):
        v = v * 0.5 + x[t]
        s = (v >= 0.7).float()
        v = v * (1 - s)
        out.append(s)
    out[0].zero_()
    return torch.stack(out), v


def feedback(x: Tensor) -> Any:
    """What others make of a spike reaches the next step's input."""
    v, out = torch.zeros_like(x[0]), []
    back = torch.zeros_like(x[0])
    for t in range(x.shape[0]):
        v = v * 0.5 + F.max_pool1d(x[t] + back, 1)
        s = (v >= 0.7).float()
        v = v * (1 - s)
        back = F.max_pool1d(s, 3, 1, 1)
        out.append(s)
    return torch.stack(out)


def two_thresholds(x: Tensor) -> Any:
    v, out = torch.zeros_like(x[0]), []
    for t in range(x.shape[0]):
        v = v * 0.5 + x[t]
        s = (v >= 0.7).float() - (v <= -0.7).float()
        v = v - 0.7 * s
        out.append(s)
    return torch.stack(out)


STAY: dict[str, tuple[Step, str]] = {
    "the membrane of every step is read": (escaping, "is neither a spike nor a last state"),
    "a spike is written to": (written_spikes, "written to in place"),
    "an input is written to": (written_input, "written to in place"),
    "feedback": (feedback, "before its last input is there"),
    "two thresholds": (two_thresholds, "is neither a spike nor a last state"),
}


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", STAY)
def test_what_stays_a_chain_says_why(name: str) -> None:
    run, reason = STAY[name]
    stays(run, currents(4, 3, 8), reason=reason)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"neurons": "auto"}, "neurons='fuse' makes it one operator"),
        ({"implementation": "dense"}, "implementation='dense' was asked for"),
    ],
)
def test_options_leave_it(options: dict[str, Any], reason: str) -> None:
    run = loop(CHARGES["leak"], FIRES["ge"], RESETS["hard"], STARTS["zeros"])
    stays(run, currents(4, 3, 8), reason=reason, **options)


def changing(x: Tensor) -> Any:
    """A decay that depends on the step."""
    v, out = torch.zeros_like(x[0]), []
    for t in range(x.shape[0]):
        v = v * (0.5 + 0.1 * t) + x[t]
        s = (v >= 0.7).float()
        v = v * (1 - s)
        out.append(s)
    return torch.stack(out)


@pytest.mark.parametrize("run", [changing, written_state, lambda x: (x[0] > 0, (x[0] * 2) > 0)])
def test_what_is_no_neuron_is_none_of_its_business(run: Step) -> None:
    with torch.no_grad():
        expected = run(x := currents(4, 3, 8))
        found, report = rewritten(run, x, neurons="fuse", strict=True)
    assert_same_bits(found, expected)
    assert not [one for one in report.sites if one.rule == RULE and one.rewritten]


def test_float64_stays() -> None:
    run = loop(CHARGES["leak"], lambda h: (h >= 0.7).to(h.dtype), RESETS["hard"], STARTS["zeros"])
    with torch.no_grad():
        found, report = rewritten(run, x := currents(4, 3, 8).double(), neurons="fuse", strict=True)
        assert_same_bits(found, run(x))
    assert not [one for one in report.sites if one.rule == RULE and one.rewritten]


def test_training_has_eagers_gradients() -> None:
    run = loop(CHARGES["tau"], FIRES["ge"], RESETS["hard"], STARTS["zeros"])
    x = currents(4, 3, 8).requires_grad_()
    found, report = rewritten(run, x, neurons="fuse", strict=True)
    expected = run(x)
    assert site(report, RULE).rewritten
    mine, theirs = (torch.autograd.grad((out[0] * x).sum() + out[1].sum(), x)[0] for out in (found, expected))
    torch.testing.assert_close(mine, theirs)
    assert not found[0].requires_grad and theirs.abs().max() > 0


def test_returned_spikes_are_tensors_of_their_own() -> None:
    """Eager's are: a write to one reaches none of the others."""
    run = loop(CHARGES["leak"], FIRES["ge"], RESETS["hard"], STARTS["zeros"], lambda out: (torch.stack(out), *out))
    with torch.no_grad():
        (whole, *steps), _ = rewritten(run, currents(4, 3, 8), neurons="fuse", strict=True)[0]
    storages = {one.untyped_storage().data_ptr() for one in (whole, *steps)}
    assert len(storages) == 5


@pytest.mark.slow(reason="compiles three times")
def test_a_state_that_a_module_keeps() -> None:
    class Kept(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.v: Any = 0.0

        def forward(self, x: Tensor) -> Tensor:
            out = []
            for t in range(x.shape[0]):
                self.v = self.v * 0.5 + x[t]
                out.append((self.v >= 0.7).float())
                self.v = self.v * (1 - out[-1])
            return torch.stack(out)

    eager, ours = Kept(), Kept()
    with torch.no_grad():
        for seed in range(3):
            x = currents(4, 3, 8, seed=seed)
            found, report = rewritten(ours, x, neurons="fuse", strict=True)
            assert_same_bits((found, ours.v), (eager(x), eager.v))
            assert site(report, RULE).rewritten


# ---- random programs ----------------------------------------------------------------------------------------------

PIECES = {"neuron": 6, "pair": 2, "write": 1, "write_part": 1, "write_view": 1, "threshold": 1, "reshape": 1}
PROGRAMS = 12


def _program(seed: int) -> Program:
    """Neurons of random forms and lengths, on each other's results, with writes and readers between."""
    p = Program(seed)
    p.training = False
    for _ in range(2):
        p.input(p.data((p.one((2, 3, 4)), 2, 6), special=p.rng.random() < 0.5), "x")
    for name in p.rng.choices([*PIECES], [*PIECES.values()], k=6):
        with contextlib.suppress(Refused):
            STEPS[name](p)
    return p


@pytest.mark.quick_cases(1)
@pytest.mark.slow_cases(8)
@pytest.mark.parametrize("first", range(0, 20 * PROGRAMS, PROGRAMS))
@pytest.mark.filterwarnings("ignore")
def test_random_programs_keep_their_bits(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "empty_like", torch.zeros_like)  # what nobody wrote to is compared as well
    done = 0
    for seed in range(first, first + PROGRAMS):
        case = oracle.case_of(_program(seed))
        with torch.no_grad():
            try:
                expected = oracle.run(case.gm, case.fresh(), False)
            except oracle.Broken:
                continue
            report = run_rules(case.gm, Options(neurons="fuse", strict=True), rules=[unrolled_neurons.RULE])
            found = oracle.run(case.gm, case.fresh(), False)
        done += len(report.rewritten)
        assert_same_bits((found.outputs, found.written), (expected.outputs, expected.written))
    assert done > 2


# ---- libraries ----------------------------------------------------------------------------------------------------


def _snntorch(**options: Any) -> nn.Module:
    snntorch = pytest.importorskip("snntorch")

    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.neuron = snntorch.Leaky(beta=0.9, **options)

        def forward(self, x: Tensor) -> Any:
            mem, out = self.neuron.init_leaky(), []
            for t in range(x.shape[0]):
                spikes, mem = self.neuron(x[t], mem)
                out.append(spikes)
            return torch.stack(out), mem

    return Loop()


def _norse() -> nn.Module:
    norse = pytest.importorskip("norse.torch")

    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.neuron = norse.LIFCell()

        def forward(self, x: Tensor) -> Any:
            state, out = None, []
            for t in range(x.shape[0]):
                spikes, state = self.neuron(20 * x[t], state)
                out.append(spikes)
            return torch.stack(out), state

    return Loop()


def _sinabs() -> nn.Module:
    layers, activation = pytest.importorskip("sinabs.layers"), pytest.importorskip("sinabs.activation")

    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.neuron = layers.LIF(tau_mem=10.0, spike_fn=activation.SingleSpike)

        def forward(self, x: Tensor) -> Any:
            return self.neuron(5 * x.transpose(0, 1))

    return Loop()


LIBRARIES: dict[str, Step] = {
    "snntorch subtract": lambda: _snntorch(), "snntorch zero": lambda: _snntorch(reset_mechanism="zero"),
    "norse": _norse, "sinabs": _sinabs,
}  # fmt: skip


@pytest.mark.parametrize("name", LIBRARIES)
def test_neurons_of_libraries_that_show_as_operations(name: str) -> None:
    x = currents(5, 2, 16)
    with torch.no_grad():
        (spikes, *_), *_ = [LIBRARIES[name]()(x)]
        expected = LIBRARIES[name]()(x)
        found, report = rewritten(LIBRARIES[name](), x, neurons="fuse", strict=True)
    assert 0 < spikes.mean() < 1
    assert_same_bits(found, expected)
    assert site(report, RULE).rewritten


@pytest.mark.parametrize("name", LIBRARIES)
def test_neurons_of_libraries_in_training(name: str) -> None:
    """Their surrogates are read off the backward of their functions."""
    x = currents(5, 2, 16).requires_grad_()
    expected = LIBRARIES[name]()(x)
    found, report = rewritten(LIBRARIES[name](), x, neurons="fuse", strict=True)
    assert_same_bits(found, expected)
    weights = currents(5, 2, 16, seed=1)
    spikes = [_tensors(one)[0] for one in (found, expected)]
    mine, theirs = (torch.autograd.grad((one * weights.view_as(one)).sum(), x)[0] for one in spikes)
    torch.testing.assert_close(mine, theirs)
    assert theirs.any() and site(report, RULE).rewritten
    assert "sparsecomp.trained_neuron" in report.graph_after


@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_neurons_of_libraries_on_currents_of_half_precision(name: str, dtype: torch.dtype) -> None:
    """As under autocast."""
    x = currents(5, 2, 16).to(dtype).requires_grad_()
    expected = LIBRARIES[name]()(x)
    found, report = rewritten(LIBRARIES[name](), x, neurons="fuse", strict=True)
    assert_same_bits(found, expected)
    spikes = [_tensors(one)[0] for one in (found, expected)]
    assert spikes[0].dtype is spikes[1].dtype and site(report, RULE).rewritten
    mine, theirs = (torch.autograd.grad(one.sum(), x)[0] for one in spikes)
    torch.testing.assert_close(mine, theirs, rtol=0, atol=8 * torch.finfo(dtype).eps * float(theirs.abs().max()))


# ---- compiled -----------------------------------------------------------------------------------------------------


@pytest.mark.slow(reason="compiles with Inductor")
def test_compiled_by_inductor() -> None:
    model, x, v = channels(), currents(5, 2, 4, 3, 3), currents(2, 4, 3, 3, seed=1)
    with torch.no_grad():
        expected = model(x, v)
        found = torch.compile(model, backend="sparsecomp", options={"neurons": "fuse", "strict": True})(x, v)
    assert_same_bits(found, expected)
    report = sparsecomp.last_report()
    assert report is not None and site(report, RULE).rewritten


ON_A_GPU = [
    (charge, fire, reset, start, "default")
    for charge, fire, reset, start in zip(
        CHARGES, FIRES, itertools.cycle(RESETS), itertools.cycle(("number", "zeros", "value", "tensor")), strict=False
    )
]
"""Every charge and every way to fire."""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(
    ("charge", "fire", "reset", "start", "mode"), [*ON_A_GPU, ("tau", "ge", "hard", "zeros", "reduce-overhead")]
)
def test_on_a_gpu_it_has_eagers_bits(charge: str, fire: str, reset: str, start: str, mode: str) -> None:
    """Dividing by a number is a product with its inverse there, and nothing is contracted."""
    run = loop(CHARGES[charge], FIRES[fire], RESETS[reset], STARTS[start])
    x = currents(5, 32, 512, special=True).cuda()
    with torch.no_grad():
        expected = run(x)
        torch._dynamo.reset()
        compiled = torch.compile(run, backend="sparsecomp", options={"neurons": "fuse", "strict": True, "mode": mode})
        for _ in range(3):
            found = compiled(x)
    assert_same_bits(found, expected)
    report = sparsecomp.last_report()
    assert report is not None and site(report, RULE).rewritten
