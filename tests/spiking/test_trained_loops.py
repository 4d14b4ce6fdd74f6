"""Neurons written by hand in training: one operator with eager's spikes and gradients, and what must stay as it was."""

import ast
import copy
import itertools
import math
import operator
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from compile_kernel import compile_in_subprocess
from hand_written import Call, Channels, currents, loop
from kernel_devices import KERNEL_DEVICES
from rewriting import rewritten, site
from torch import Tensor, fx, nn

import sparsecomp
from sparsecomp.passes.spiking.spike_function import spike_function

pytestmark = pytest.mark.quick_cases(1)

RULE = "unrolled_neurons"


# ---- spike functions ----------------------------------------------------------------------------------------------


def function(backward: Call, fires: Call = lambda u: u >= 0) -> Call:
    """A spike function of one argument, whose backward is given that and a gradient."""

    class Spike(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, u: Tensor) -> Tensor:
            ctx.save_for_backward(u)
            return fires(u).to(u.dtype)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return backward(*ctx.saved_tensors, grads[0])

    return Spike.apply


def in_place(u: Tensor, g: Tensor) -> Tensor:
    g = g.clone()
    g[u.abs() > 0.5] = 0
    return g


def powered(u: Tensor, g: Tensor) -> Tensor:
    grad = (math.pi / 2 * 2.0 * u).pow_(2)
    grad.add_(1)
    return 2.0 / 2 / grad * g


def masked(u: Tensor, g: Tensor) -> Tensor:
    inside = (u > -1) & (u < 1)
    return g * inside * 0.5


def pieces(u: Tensor, g: Tensor) -> Tensor:
    return torch.where((u < -1) | (u > 1), torch.zeros_like(g), g * (1 - u.abs()).clamp(min=0))


def sigmoid_slope(u: Tensor, g: Tensor) -> Tensor:
    s = torch.sigmoid(4.0 * u)
    return g * 4.0 * (1.0 - s) * s


class WithNumber(torch.autograd.Function):
    """A surrogate of a width, which is given as a number, as snnTorch's are."""

    @staticmethod
    def forward(ctx: Any, u: Tensor, slope: float) -> Tensor:
        ctx.save_for_backward(u)
        ctx.slope = slope
        return (u > 0).to(u)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (u,) = ctx.saved_tensors
        return grads[0].clone() / (ctx.slope * torch.abs(u) + 1.0) ** 2, None


class WithThreshold(torch.autograd.Function):
    """Compares with a tensor, to which no gradient goes."""

    @staticmethod
    def forward(ctx: Any, v: Tensor, threshold: Tensor) -> Tensor:
        over = v - threshold
        ctx.save_for_backward(over)
        out = torch.zeros_like(v)
        out[over > 0] = 1.0
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (over,) = ctx.saved_tensors
        return grads[0] * torch.exp(-over * over / 2) / math.sqrt(2 * math.pi), None


class Asked(torch.autograd.Function):
    """Looks whether anybody wants the gradient, and keeps its spikes too."""

    @staticmethod
    def forward(ctx: Any, u: Tensor) -> Tensor:
        out = torch.heaviside(u, torch.zeros_like(u))
        ctx.save_for_backward(u, out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        u, out = ctx.saved_tensors
        if not ctx.needs_input_grad[0]:
            return None
        return grads[0] * (0.5 + 0.5 * out) * torch.relu(1 - u.abs())


WIDTH = torch.tensor(2.0)


class SetUp(torch.autograd.Function):
    """Its context is made by a method of its own, and it reads a tensor that nobody hands it."""

    @staticmethod
    def forward(u: Tensor) -> Tensor:
        return torch.where(u * WIDTH > 0, torch.ones_like(u), torch.zeros_like(u))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.inside = (inputs[0].abs() * WIDTH).lt(1)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return torch.where(ctx.inside, grads[0] / WIDTH, 0.0)


TRAINED = nn.Parameter(torch.tensor(0.7))
FIRES: dict[str, Call] = {
    "arctan": (_arctan := function(lambda u, g: g / (1 + (math.pi / 2 * u * 2.0) ** 2))),
    "sigmoid": function(sigmoid_slope),
    "fast sigmoid": function(lambda u, g: g / (1 + 5 * u.abs()).square(), lambda u: u > 0),
    "rectangle": function(lambda u, g: g * (u.abs() < 0.5).to(g.dtype)),
    "rectangle in place": function(in_place),
    "triangle": function(lambda u, g: g * torch.clamp(1.0 - torch.abs(u), min=0.0)),
    "maximum": function(lambda u, g: torch.maximum(1 - u.abs(), torch.zeros_like(u)) * 0.3 * g),
    "bell": function(lambda u, g: g * torch.exp(-(u**2) / 2) / math.sqrt(2 * math.pi)),
    "exponential": function(lambda u, g: torch.mul(torch.exp(-u.abs().mul(2.0)), g)),
    "tanh": function(lambda u, g: g * (1 - torch.tanh(u).pow(2))),
    "powered": function(powered),
    "masked": function(masked),
    "pieces": function(pieces),
    "filled": function(lambda u, g: g.masked_fill(u.abs() > 1, 0.0)),
    "identity": function(lambda u, g: g),
    "clipped": function(lambda u, g: torch.clamp(g / (1 + u * u), -0.5, 0.25)),
    "reciprocal": function(lambda u, g: g * (1 + u * u).reciprocal().sqrt(), lambda u: ~(u < 0)),
    "number": lambda u: WithNumber.apply(u, 25.0),
    "asked": Asked.apply,
}  # fmt: skip
"""Of how far a membrane is over its threshold."""
CHARGES: dict[str, Call] = {
    "leak": lambda x, v: v * 0.3 + x,
    "tau": lambda x, v: v + (x - v) / 3.0,
    "tau apart": lambda x, v: v - v / 3.0 + x,
    "integrate": lambda x, v: v + x,
    "stopped": lambda x, v: v.detach() * 0.9 + x if isinstance(v, Tensor) else v * 0.9 + x,
}
RESETS: dict[str, Call] = {
    "hard": lambda h, s: h * (1 - s),
    "hard detached": lambda h, s: h * (1 - s.detach()),
    "soft": lambda h, s: h - s * 0.7,
    "soft detached": lambda h, s: h - 0.7 * s.detach(),
    "to a value": lambda h, s: (1.0 - s) * h + 0.1 * s,
    "where": lambda h, s: torch.where(s > 0, 0.1, h),
    "masked": lambda h, s: h.masked_fill(s > 0.5, 0.0),
    "none": lambda h, s: h,
}


def over(fire: Call) -> Call:
    """The function, of a membrane whose threshold is 0.7."""
    return lambda h: fire(h - 0.7)


# ---- comparing ----------------------------------------------------------------------------------------------------


def tensors(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else [one for part in value for one in tensors(part)]


def back(outs: Any, given: Sequence[Tensor], read: Sequence[bool] | None = None) -> list[Tensor | None]:
    """Gradients of what is returned, with weights that differ from element to element."""
    random, loss = torch.Generator().manual_seed(7), 0
    for index, one in enumerate(tensors(outs)):
        weights = torch.randn(one.shape, generator=random, dtype=torch.float64).to(one.dtype)
        if one.requires_grad and (read is None or read[index]):
            loss = loss + (one * weights).sum()
    assert isinstance(loss, Tensor)
    return [*torch.autograd.grad(loss, given, allow_unused=True)]


def trained(run: Call, *inputs: Tensor, sites: int | None = 1, **options: Any) -> Any:
    """What the rule makes of it gives eager's bits, and the gradients of eager in float64, to rounding.

    `sites`: how many neurons there are; None for one that may stay as it is, for which None is returned.
    """
    asking = [one for one in (*inputs, *_parameters(run)) if one.requires_grad]
    found, report = rewritten(run, *inputs, neurons="fuse", strict=True, **options)
    expected = run(*inputs)
    for one, other in zip(tensors(found), tensors(expected), strict=True):
        assert torch.equal(one, other) and one.requires_grad == other.requires_grad
    if not any(one.requires_grad for one in tensors(expected)):
        return None
    ours, eager, exact = back(found, asking), back(expected, asking), _exact_gradients(run, inputs, expected)
    for one, rounded, other in zip(ours, eager, exact, strict=True):
        assert (one is None) == (rounded is None) == (other is None)
        if one is not None and other is not None:
            torch.testing.assert_close(one.double(), other, rtol=2e-5, atol=2e-5)
    assert any(one is not None and one.any() for one in exact)
    taken = [one.rewritten for one in report.sites if one.rule == RULE]
    if sites is None:
        return report if taken == [True] else None
    assert taken == [True] * sites, report
    return report


def _parameters(run: Call) -> list[Tensor]:
    return [*run.parameters()] if isinstance(run, nn.Module) else []


def _exact_gradients(run: Call, inputs: Sequence[Tensor], expected: Any) -> list[Tensor | None]:
    """Eager's in float64, of the same spikes."""
    wide = copy.deepcopy(run).double() if isinstance(run, nn.Module) else run
    exact = [one.detach().double().requires_grad_(one.requires_grad) for one in inputs]
    outs = wide(*exact)
    same = [torch.equal(one.float(), other) for one, other in zip(tensors(outs), tensors(expected), strict=True)]
    assert any(same), "another neuron fires in float64"
    return back(outs, [one for one in (*exact, *_parameters(wide)) if one.requires_grad])


def stays(run: Call, *inputs: Tensor, reason: str, **options: Any) -> None:
    """It stays as it was written, for a reason, and gives what eager gives."""
    found, report = rewritten(run, *inputs, strict=True, **{"neurons": "fuse", **options})
    asking, expected = [one for one in inputs if one.requires_grad], run(*inputs)
    for one, other in zip(tensors(found), tensors(expected), strict=True):
        assert torch.equal(one, other)
    for one, other in zip(back(found, asking), back(expected, asking), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    assert not site(report, RULE).rewritten
    assert reason in site(report, RULE).reason


# ---- what is taken ------------------------------------------------------------------------------------------------

FORMS = [
    *(("leak", fire, "soft") for fire in FIRES),
    *((charge, "arctan", "hard") for charge in CHARGES),
    *(("tau", "fast sigmoid", reset) for reset in RESETS),
]


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(("charge", "fire", "reset"), FORMS)
def test_every_form_has_eagers_spikes_and_gradients(charge: str, fire: str, reset: str) -> None:
    run = loop(CHARGES[charge], over(FIRES[fire]), RESETS[reset])
    report = trained(run, currents(4, 40, 50).requires_grad_())
    assert "4 time steps in one pass, and one for their gradients" in site(report, RULE).reason
    assert "sparsecomp.trained_neuron" in report.graph_after and "autograd_function_apply" not in report.graph_after


def test_a_function_may_read_a_tensor_that_nobody_hands_it() -> None:
    report = trained(_one(SetUp.apply), currents(4, 40, 50).requires_grad_())
    assert "p0" in site(report, RULE).reason


def channels() -> Channels:
    decay = torch.randn(4, 1, 1, generator=torch.Generator().manual_seed(0))
    return Channels(decay, torch.sigmoid, lambda v, threshold: FIRES["sigmoid"](v - threshold))


def test_decays_and_thresholds_that_are_trained_and_a_state_handed_on() -> None:
    x, v = currents(5, 2, 4, 3, 3), currents(2, 4, 3, 3, seed=1)
    report = trained(channels(), x.requires_grad_(), v.requires_grad_())
    assert "p1" in site(report, RULE).reason


@pytest.mark.slow(reason="traces two loops")
def test_parameters_alone_are_trained() -> None:
    trained(channels(), currents(5, 2, 4, 3, 3), currents(2, 4, 3, 3, seed=1))


class Parametric(nn.Module):
    """A rate that all neurons share and that is trained, and a threshold that is but a number to the gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = nn.Parameter(torch.tensor(-0.3))
        self.threshold = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        v, out = torch.zeros_like(x[0]), []
        for step in x:
            v = v + (step - v) * torch.sigmoid(self.rate)
            s = WithThreshold.apply(v, self.threshold)
            v = v * (1 - s)
            out.append(s)
        return torch.stack(out)


def test_a_threshold_to_which_no_gradient_goes_gets_none() -> None:
    trained(Parametric(), currents(5, 3, 16).requires_grad_())
    model = Parametric()
    model(currents(5, 3, 16)).sum().backward()
    assert model.threshold.grad is None and model.rate.grad is not None, "what the above compares with"


@pytest.mark.slow(reason="traces two loops")
def test_a_current_that_decays_is_a_state() -> None:
    def run(x: Tensor) -> Any:
        i, v, out = torch.zeros_like(x[0]), torch.zeros_like(x[0]), []
        for step in x:
            i = 0.7 * i + step
            v = 0.9 * v + i
            out.append(FIRES["triangle"](v - 1.0))
            v = v - out[-1].detach()
        return torch.stack(out), i, v

    trained(run, currents(6, 2, 8).requires_grad_())


@pytest.mark.slow(reason="traces two loops")
def test_the_spike_before_as_a_state() -> None:
    def run(x: Tensor) -> Tensor:
        v, s, out = torch.zeros_like(x[0]), torch.zeros_like(x[0]), []
        for step in x:
            v = 0.25 * v * (1 - s) + step
            s = FIRES["bell"](v - 0.5)
            out.append(s)
        return torch.stack(out)

    trained(run, currents(6, 2, 8).requires_grad_())


def cut(x: Tensor) -> Any:
    """Spikes with a gradient and without, and a state without."""
    v, out, counts = torch.zeros_like(x[0]), [], []
    for step in x:
        v = v * 0.5 + step
        s = FIRES["arctan"](v - 0.7)
        v = v - 0.7 * s
        out.append(s)
        counts.append(s.detach())
    return torch.stack(out), torch.stack(counts), out[1].detach() * 2, v.detach()


def mixed(x: Tensor) -> Any:
    """Joined are spikes of which every other has a gradient."""
    v, out = torch.zeros_like(x[0]), []
    for t, step in enumerate(x):
        v = v * 0.5 + step
        s = FIRES["arctan"](v - 0.7)
        v = v - 0.7 * s
        out.append(s if t % 2 else s.detach())
    return torch.stack(out), v


def hard(x: Tensor) -> Any:
    """Spikes without a gradient, of a membrane with one."""
    v, out = torch.zeros_like(x[0]), []
    for step in x:
        v = v * 0.5 + step
        s = (v >= 0.7).float()
        v = v * (1 - s)
        out.append(s)
    return torch.stack(out), v


def truths(x: Tensor) -> Any:
    """Spikes as truth values beside a membrane with a gradient."""
    v, out = torch.zeros_like(x[0]), []
    for step in x:
        v = v * 0.5 + step
        out.append(v >= 0.7)
        v = v.masked_fill(out[-1], 0.0)
    return torch.stack(out), v


def scaled(x: Tensor) -> Any:
    v, out = torch.zeros_like(x[0]), []
    for step in x:
        v = v * 0.5 + step
        s = FIRES["number"](v - 0.7)
        v = v - s * 0.7
        out.append(s * 0.3)
    return torch.stack(out), out[0] + 1


def untrained(x: Tensor) -> Any:
    """Nothing that is read of the neurons has a gradient."""
    spikes = hard(x)[0]
    return spikes * x


@pytest.mark.parametrize("run", [cut, mixed, hard, truths, scaled, untrained])
def test_what_has_no_gradient_in_eager_has_none(run: Call) -> None:
    trained(run, currents(4, 3, 8).requires_grad_())


@pytest.mark.slow(reason="traces two loops")
def test_neurons_of_which_nothing_is_trained_give_bytes() -> None:
    report = trained(untrained, currents(4, 3, 8).requires_grad_())
    assert "sparsecomp.neuron.default" in report.graph_after


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_inputs_of_half_precision_and_a_membrane_of_float32(dtype: torch.dtype) -> None:
    """As under autocast, whose layers give halves, where states are float32 from the first step on."""
    run = loop(CHARGES["leak"], over(FIRES["arctan"]), RESETS["hard"], lambda x: torch.zeros(x.shape))
    x = currents(4, 30, 40).to(dtype).requires_grad_()
    found, report = rewritten(run, x, neurons="fuse", strict=True)
    exact = x.detach().double().requires_grad_()
    expected, wide = run(x), loop(CHARGES["leak"], over(FIRES["arctan"]), RESETS["hard"])(exact)
    assert site(report, RULE).rewritten
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other) and one.dtype is torch.float32
    assert torch.equal(found[0].double(), wide[0])
    ((ours,), (theirs,)) = back(found, [x]), back(wide, [exact])
    assert ours is not None and theirs is not None and ours.dtype is dtype
    torch.testing.assert_close(ours.double(), theirs, rtol=torch.finfo(dtype).eps, atol=torch.finfo(dtype).tiny)
    with torch.no_grad():
        found, report = rewritten(run, x, neurons="fuse", strict=True)
    assert site(report, RULE).rewritten and all(map(torch.equal, found, expected))


@pytest.mark.parametrize("steps", [2, pytest.param(70, marks=pytest.mark.slow(reason="traces many steps"))])
@pytest.mark.parametrize("join", ["stack", "cat", "list", "last dimension"])
def test_steps_are_joined_in_any_way(steps: int, join: str) -> None:
    joins: dict[str, Call] = {
        "stack": torch.stack, "cat": torch.cat, "list": tuple, "last dimension": lambda out: torch.stack(out, -1),
    }  # fmt: skip
    run = loop(CHARGES["leak"], over(FIRES["arctan"]), RESETS["soft"], lambda _: 0.0, joins[join])
    trained(run, currents(steps, 3, 4).requires_grad_())


@pytest.mark.slow(reason="traces two loops")
def test_returned_spikes_are_tensors_of_their_own() -> None:
    run = loop(CHARGES["leak"], over(FIRES["arctan"]), RESETS["soft"], join=lambda out: (torch.stack(out), *out))
    (whole, *steps), _ = rewritten(run, currents(4, 3, 8).requires_grad_(), neurons="fuse", strict=True)[0]
    assert len({one.untyped_storage().data_ptr() for one in (whole, *steps)}) == 5


@pytest.mark.slow(reason="traces two loops")
def test_under_no_grad_a_function_gives_bytes() -> None:
    run = loop(CHARGES["leak"], over(FIRES["arctan"]), RESETS["soft"])
    x = currents(4, 3, 8)
    with torch.no_grad():
        found, report = rewritten(run, x, neurons="fuse", strict=True)
        expected = run(x)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
    assert "sparsecomp.neuron.default" in report.graph_after


class Random(nn.Module):
    """A neuron of a random form: of its charge, spike function and reset, its parameters, and where gradients stop."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.random = torch.Generator().manual_seed(seed)
        self.fire, self.reset = self._one(list(FIRES)), self._one(list(RESETS))
        self.charge = self._one(["current", "trained", *CHARGES])
        self.steps, self.stopped = self._one(range(2, 7)), self._one(range(6))
        self.decay = nn.Parameter(self._uniform(5) if self._one([0, 1]) else self._uniform())
        self.threshold = nn.Parameter(self._uniform(1, 5) if self._one([0, 1]) else self._uniform())
        self.threshold.requires_grad_(self._one([False, True]))
        self.start, self.read = self._one(["number", "zeros", "tensor"]), self._one(["both", "spikes", "some"])

    def _one(self, choices: Sequence[Any]) -> Any:
        return choices[int(torch.randint(len(choices), (), generator=self.random))]

    def _uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.random) * 0.5 + 0.3

    def forward(self, x: Tensor) -> Any:
        v: Any = {"number": 0.0, "zeros": torch.zeros_like(x[0]), "tensor": x[0].abs() * 0.1}[self.start]
        i, out = torch.zeros_like(x[0]), []
        for t in range(self.steps):
            current = x[t]
            if self.charge == "current":
                current = i = i * self.decay + current
            if self.charge == "trained":
                h = v * torch.sigmoid(self.decay) + (1 - torch.sigmoid(self.decay)) * current * 2
            else:
                h = CHARGES["leak" if self.charge == "current" else self.charge](current, v)
            s = FIRES[self.fire](h - self.threshold)
            out.append(s)
            v = RESETS[self.reset](h, s)
            if self.stopped == 0:
                v = v.detach()
        spikes = torch.stack(out)
        if self.read == "spikes":
            return spikes
        return (spikes, v) if self.read == "both" else (out[-1] * 2, out[0].detach(), v.detach(), spikes)


@pytest.mark.slow(reason="many compilations")
@pytest.mark.parametrize("first", range(0, 96, 12))
@pytest.mark.slow_cases(3)
def test_random_neurons_have_eagers_spikes_and_gradients(first: int) -> None:
    """But for a threshold that nothing else reads, all are taken."""
    taken = 0
    for seed in range(first, first + 12):
        x = currents(6, 3, 5, seed=seed).requires_grad_(seed % 4 > 0)
        taken += trained(Random(seed), x, sites=None) is not None
    assert taken > 7


# ---- what stays ---------------------------------------------------------------------------------------------------


ROWS = torch.tensor([1.0, 0.0, 1.0])


def rows(u: Tensor, g: Tensor) -> Tensor:
    """Without a gradient for whole rows."""
    g = g.clone()
    g[ROWS > 0] = 0
    return g


class TwoGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, v: Tensor, threshold: Tensor) -> Tensor:
        ctx.save_for_backward(v - threshold)
        return (v > threshold).to(v.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad = grads[0] / (1 + ctx.saved_tensors[0].abs())
        return grad, -grad


class TwoResults(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, u: Tensor) -> Any:
        ctx.save_for_backward(u)
        return (u > 0).to(u.dtype), u * 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] / (1 + ctx.saved_tensors[0].abs()) + grads[1]


class Constant(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, u: Tensor) -> Tensor:
        return (u > 0).to(u.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return torch.ones_like(grads[0])


class Written(torch.autograd.Function):
    """Writes to the gradient that it is given."""

    @staticmethod
    def forward(ctx: Any, u: Tensor) -> Tensor:
        ctx.save_for_backward(u)
        return (u > 0).to(u.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (u,) = ctx.saved_tensors
        return grads[0].mul_(u.abs() < 1)


def adapting(x: Tensor) -> Tensor:
    """The threshold, and with it the slope, moves with a current."""
    i, v, out = torch.zeros_like(x[0]), torch.zeros_like(x[0]), []
    for step in x:
        i = i * 0.5 + step
        v = v * 0.5 + i
        s = WithThreshold.apply(v, 0.1 * i.detach())
        v = v * (1 - s)
        out.append(s)
    return torch.stack(out)


def two_slopes(x: Tensor) -> Tensor:
    v, out = torch.zeros_like(x[0]), []
    for step in x:
        v = v * 0.5 + step
        s, z = FIRES["arctan"](v - 0.7), FIRES["sigmoid"](v - 0.7)
        v = v * (1 - z)
        out.append(s)
    return torch.stack(out)


def of_a_sum(spikes: Call) -> Call:
    """A neuron whose spikes are a sum, of where it fires and of something smooth."""

    def run(x: Tensor) -> Tensor:
        v, out = torch.zeros_like(x[0]), []
        for step in x:
            v = v * 0.5 + step
            s = spikes(v >= 0.7, torch.sigmoid(4 * (v - 0.7)))
            v = v - 0.7 * s
            out.append(s)
        return torch.stack(out)

    return run


# rounded: (1 - s) + s need not be 1
straight_through = of_a_sum(lambda fires, soft: (fires.float() - soft).detach() + soft)
# nothing is added, but NaN where the membrane is
added_nothing = of_a_sum(lambda fires, soft: fires.to(soft.dtype) + (soft - soft.detach()))


def _one(fire: Call, reset: str = "soft detached") -> Call:
    return loop(CHARGES["leak"], over(fire), RESETS[reset])


STAY: dict[str, tuple[Call, str]] = {
    "erf": (_one(function(lambda u, g: g * torch.erf(u.abs()))), "it computes erf"),
    "mean": (_one(function(lambda u, g: g * u.abs().mean())), "it computes mean"),
    "a power": (_one(function(lambda u, g: g * u.abs() ** 1.5)), "it computes a power of 1.5"),
    "a sum of truth values": (
        _one(function(lambda u, g: g * ((u > -1) + (u < 1)))), "it computes add of truth values"
    ),
    "rows": (_one(function(rows)), "it writes to a part of a tensor"),
    "a power of a tensor": (_one(function(lambda u, g: g * 0.5**u)), "it computes a power"),
    "the first row": (_one(function(lambda u, g: torch.cat((g[:1] * 0, g[1:])))), "it computes"),
    "a constant": (_one(Constant.apply), "not known to be 0 where that of its spikes is"),
    "a gradient of its own": (_one(function(lambda u, g: g + 0.1 * u)), "not known to be 0"),
    "one that does not vanish": (_one(function(lambda u, g: torch.clamp(g * u, min=0.1))), "not known to be 0"),
    "two gradients": (
        loop(CHARGES["leak"], lambda h: TwoGradients.apply(h, TRAINED), RESETS["hard"]), "have a gradient, and not one"
    ),
    "written": (_one(Written.apply), "mul writes to what it is given"),
    "written by another name": (
        _one(function(lambda u, g: g.detach().mul_(u.abs() < 1))), "mul writes to what it is given"
    ),
    "a threshold that moves": (adapting, "depends on more than one value of a step"),
    "straight through": (straight_through, "told from a sum"),
    "straight through, added": (added_nothing, "told from a sum"),
    "two slopes": (two_slopes, "is neither a spike nor a last state"),
}


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", STAY)
def test_what_no_description_holds_stays_and_says_why(name: str) -> None:
    run, reason = STAY[name]
    stays(run, currents(4, 3, 8).requires_grad_(), reason=reason)


def changing(x: Tensor) -> Tensor:
    """A slope that depends on the step."""
    v, out = torch.zeros_like(x[0]), []
    for t, step in enumerate(x):
        v = v * 0.5 + step
        s = WithNumber.apply(v - 0.7, 5.0 + t)
        v = v - 0.7 * s
        out.append(s)
    return torch.stack(out)


def two_results(x: Tensor) -> Tensor:
    v, out = torch.zeros_like(x[0]), []
    for step in x:
        v = v * 0.5 + step
        s, more = TwoResults.apply(v - 0.7)
        v = v - 0.7 * s
        out.append(s + more)
    return torch.stack(out)


def soft_function(x: Tensor) -> Tensor:
    """A function with a backward of its own, whose results are no spikes."""
    v, out = torch.zeros_like(x[0]), []
    for step in x:
        v = Squared.apply(v * 0.5 + step)
        out.append(v)
    return torch.stack(out)


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, u: Tensor) -> Tensor:
        ctx.save_for_backward(u)
        return torch.tanh(u * u)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * ctx.saved_tensors[0]


def spikes_of_two(function: type[torch.autograd.Function]) -> Call:
    """A neuron by the first of two results of a function; nobody reads the other."""
    return loop(CHARGES["leak"], over(lambda u: function.apply(u)[0]), RESETS["soft"])


class Beside(torch.autograd.Function):
    """Gives a membrane's distance as well, which the gradient of spikes knows nothing of."""

    @staticmethod
    def forward(ctx: Any, u: Tensor) -> Any:
        ctx.save_for_backward(u)
        return (u > 0).to(u.dtype), u.abs()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] / (1 + ctx.saved_tensors[0].abs())


@pytest.mark.slow(reason="traces two loops")
def test_a_result_that_nobody_reads_stands_in_no_way() -> None:
    trained(spikes_of_two(Beside), currents(4, 3, 8).requires_grad_())
    stays(spikes_of_two(TwoResults), currents(4, 3, 8).requires_grad_(), reason="it reads")


@pytest.mark.parametrize("run", [changing, two_results, soft_function])
def test_what_is_no_trained_neuron_is_eagers(run: Call) -> None:
    x = currents(4, 3, 8).requires_grad_()
    found, report = rewritten(run, x, neurons="fuse", strict=True)
    expected = run(x)
    assert not [one for one in report.sites if one.rule == RULE]
    for one, other in zip(tensors(found), tensors(expected), strict=True):
        assert torch.equal(one, other) and one.requires_grad == other.requires_grad
    torch.testing.assert_close(back(found, [x]), back(expected, [x]))


@pytest.mark.slow(reason="traces two loops")
def test_options_leave_it() -> None:
    run, x = _one(FIRES["arctan"]), currents(4, 3, 8).requires_grad_()
    stays(run, x, reason="neurons='fuse' makes it one operator", neurons="auto")
    stays(run, x, reason="implementation='dense' was asked for", implementation="dense")


SHAPES = ["tuple", "intermediates", "context"]


def applied(shape: str, result: int = 0, read: Sequence[int] = (0,), **more: Any) -> fx.Node:
    """A call of a function as Dynamo puts it into a graph.

    Args:
        shape: "tuple" as of torch 2.12 and later, whose bodies give tuples; "intermediates" as of 2.11, whose forward
            also gives what it computes on the way; "context" of releases before, whose bodies are given one first.
        result: the place of the spikes among the results.
        read: the results that are read.
    """
    bodies, older, further = {}, shape == "context", shape == "intermediates"

    def in_order(*results: Any) -> tuple[Any, ...]:
        return (results if result == 0 else results[::-1]) if further else results[:1]

    for name in ("forward", "backward"):
        body = fx.Graph()
        if older:
            body.placeholder("ctx")
        if name == "forward":
            u = body.placeholder("u")
            fires = body.call_function(operator.ge, (u, 0))
            out = body.call_method("to", (fires, torch.float32))
            example(fires, torch.bool)
            body.output((out, [u]) if older else (in_order(out, fires), (u,)))
        else:
            grads = {one: body.placeholder(one) for one in in_order("g", "unused")}
            u = body.placeholder("u")
            out = body.call_function(operator.mul, (grads["g"], body.call_method("abs", (u,))))
            body.output(out if older else (out,))
        example(out)
        bodies[f"{name}_body"] = fx.GraphModule(nn.Module(), body)
    graph = fx.Graph()
    u = graph.placeholder("u")
    example(u)
    keywords = {"args_tensor_mask": [True]} if older else {"saved_for_backward_idx": [0]}
    target = torch.ops.higher_order.autograd_function_apply
    args = graph.get_attr("forward_body"), graph.get_attr("backward_body"), u
    call = graph.call_function(target, args, {"non_differentiable_idx": [], **keywords, **more})
    for one in () if older else read:
        graph.call_function(operator.getitem, (call, one))
    graph.owning_module = fx.GraphModule(bodies, graph)  # nodes find their bodies through it
    return call


def example(node: fx.Node, dtype: torch.dtype = torch.float32) -> None:
    node.meta["example_value"] = torch.empty(3, 4, dtype=dtype)


@pytest.mark.parametrize("shape", SHAPES)
def test_bodies_are_read_in_the_shapes_of_all_releases(shape: str) -> None:
    found = spike_function(applied(shape))
    assert found is not None and not found.obstacle
    assert [line.operation for line in found.code] == ["ge", "float", "abs", "mul"] and found.slope == "t3"
    assert (found.of, found.result) == (0, None if shape == "context" else 0)


def test_the_result_that_is_read_gives_the_spikes_and_has_the_gradient() -> None:
    found = spike_function(applied("intermediates", result=1, read=[1, 1]))
    assert found is not None and (found.result, found.obstacle, found.slope) == (1, "", "t3")


@pytest.mark.parametrize(("result", "read"), [(0, [0, 1]), (1, [0]), (0, []), (0, [-2])])
def test_a_function_whose_other_results_are_read_is_none_of_spikes(result: int, read: list[int]) -> None:
    """Or one by a number that counts from the end."""
    assert spike_function(applied("intermediates", result, read)) is None


@pytest.mark.parametrize("name", ["non_differentiable_idx", "dirty_idx", "of_another_kind"])
def test_what_a_function_marks_is_not_read(name: str) -> None:
    found = spike_function(applied("tuple", **{name: [0]}))
    assert found is not None and "it marks what it gives" in found.obstacle


# ---- kernels ------------------------------------------------------------------------------------------------------


def described(fire: str) -> tuple[str, list[float]]:
    """The description of a leaky neuron that fires in some way, and its numbers."""
    _, report = rewritten(_one(FIRES[fire]), currents(2, 3, 4).requires_grad_(), neurons="fuse", strict=True)
    found = re.search(r"\.default\(l_x_, \[None\], \[0\.0\], \[\], (\[.*?\]), '(.*?)', 1\)", report.graph_after)
    assert found is not None
    return found[2], ast.literal_eval(found[1])


@pytest.mark.slow(reason="interprets both kernels")
@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("fire", FIRES)
def test_kernels_have_eagers_spikes_and_gradients(fire: str, device: str) -> None:
    from sparsecomp.lowering.spiking.neuron import launch_trained
    from sparsecomp.lowering.spiking.neuron_gradients import launch_gradients

    step, numbers = described(fire)
    x = currents(3, 4, 50)
    exact, random = x.double().requires_grad_(), torch.Generator().manual_seed(5)
    grads = [torch.randn(x.shape, generator=random), torch.randn(x[0].shape, generator=random)]
    spikes, v = _one(FIRES[fire])(exact)
    (expected,) = torch.autograd.grad((spikes * grads[0]).sum() + (v * grads[1]).sum(), exact)
    found = launch_trained(x.to(device), [None], [0.0], [], numbers, step)
    assert torch.equal(found[0].cpu().double(), spikes)
    ours, _ = launch_gradients(
        [one.to(device) for one in grads], x.to(device), [None], [0.0], [], numbers, step, [True, False]
    )
    torch.testing.assert_close(ours.cpu().double(), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.slow(reason="compiles for two GPUs in a process of its own")
def test_kernels_of_every_spike_function_compile_for_gpus_that_are_not_there() -> None:
    texts = [described(fire)[0] for fire in FIRES]
    compile_in_subprocess(
        f"""
        from sparsecomp.lowering.spiking.kernels.neuron_gradients import neuron_gradients_kernel as kernel
        from sparsecomp.lowering.spiking.neuron import code_of
        from sparsecomp.reference.neuron import neuron_of
        from sparsecomp.reference.neuron_gradient import step_back

        types = {{name: "*fp32" if name.endswith("_ptr") else "fp32" if name[0] in "n" or "start" in name else "i32"
                 for name in kernel.arg_names}} | dict(numel="i32")
        for text in {texts!r}:
            neuron = neuron_of(text)
            back = step_back(neuron)
            constants = dict(STEPS=2, CODE=code_of(neuron.code), AFTER=neuron.states, BACK=code_of(back.code),
                             WIDE=False, ALIKE=(0,) * 6, SUMMED=False, OF_X=back.x,
                             OF=(*back.states, *back.parameters), BLOCK=512)
            for capability in (80, 90):
                build(kernel, types, constants, capability, num_warps=4, enable_fp_fusion=False)
        """
    )


# ---- whole networks -----------------------------------------------------------------------------------------------


class Network(nn.Module):
    """Two layers of neurons in a loop, of which the second has a rate that is trained."""

    def __init__(self, outputs: int = 3) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 32), nn.Linear(32, outputs)
        self.rate = nn.Parameter(torch.tensor(0.2))

    def forward(self, x: Tensor) -> Tensor:
        a: Any = 0.0
        b: Any = 0.0
        out = []
        for step in x:
            a = a * 0.5 + self.first(step)
            s = FIRES["arctan"](a - 0.5)
            a = a * (1 - s.detach())
            b = b + (self.second(s) - b) * self.rate.sigmoid()
            z = FIRES["powered"](b - 0.3)
            b = b - 0.3 * z
            out.append(z)
        return torch.stack(out)


def steps_of(model: nn.Module, run: Call, x: Tensor, count: int = 3) -> list[Tensor]:
    """Losses and, in the end, the parameters of steps of SGD."""
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), []
    target = torch.linspace(0, 1, x.shape[1] * 3, device=x.device).view(-1, 3)
    for _ in range(count):
        optimizer.zero_grad()
        loss = (run(x).mean(0) - target).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(one.detach() for one in model.parameters())]


def seeded() -> Network:
    torch.manual_seed(3)
    return Network()


def test_a_network_s_loop_runs_once_for_all_steps() -> None:
    model, eager = seeded(), seeded()
    reports: list[Any] = []

    def run(x: Tensor) -> Tensor:
        found, report = rewritten(model, x, neurons="fuse", implementation="auto", strict=True)
        reports.append(report)
        return found

    found, expected = (steps_of(one, call, currents(4, 6, 8), 1) for one, call in ((model, run), (eager, eager)))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    for report in reports:
        assert site(report, "fuse_steps").rewritten
        assert [one.rewritten for one in report.sites if one.rule == RULE] == [True, True]
        assert report.graph_after.count("sparsecomp.trained_neuron.default") == 2
        assert report.graph_after.count("nn.linear(") == 2


class Currents(nn.Module):
    """A layer whose neurons hand on a current, to which the decay of their membranes gives no gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.head, self.decay = nn.Linear(8, 16), nn.Linear(16, 3), nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> Any:
        i = v = torch.zeros(x.shape[1], 16)
        out = []
        for step in x:
            i = i * 0.5 + self.layer(step)
            v = v * self.decay.sigmoid() + i
            s = FIRES["arctan"](v - 0.3)
            v = v * (1 - s)
            out.append(self.head(s))
        return torch.stack(out), i


@pytest.mark.slow(reason="traces two loops")
@pytest.mark.parametrize("verify", [True, False])
def test_results_to_which_not_all_parameters_give_a_gradient(verify: bool) -> None:
    """What a layer gives asks for gradients, though a rule has made it."""
    model = Currents()
    x = currents(4, 5, 8)
    found, report = rewritten(model, x, neurons="fuse", implementation="auto", strict=True, verify=verify)
    expected, given = model(x), [*model.parameters()]
    assert [site(report, rule).rewritten for rule in ("fuse_steps", RULE)] == [True, True]
    for one, other in zip(back(found, given), back(expected, given), strict=True):
        torch.testing.assert_close(one, other)
    assert torch.equal(found[1], expected[1])


@pytest.mark.slow(reason="compiles with Inductor")
def test_a_compiled_training_step() -> None:
    model, eager = seeded(), seeded()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="sparsecomp", options={"neurons": "fuse", "strict": True})
    found, expected = steps_of(model, compiled, currents(4, 6, 8)), steps_of(eager, eager, currents(4, 6, 8))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    report = sparsecomp.last_report()
    assert report is not None and [one.rewritten for one in report.sites if one.rule == RULE] == [True, True]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_training_step_on_a_gpu(mode: str) -> None:
    model, eager = seeded().cuda(), seeded().cuda()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="sparsecomp", options={"neurons": "fuse", "strict": True, "mode": mode})
    x = currents(4, 6, 8).cuda()
    found, expected = steps_of(model, compiled, x), steps_of(eager, eager, x)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    report = sparsecomp.last_report()
    assert report is not None and [one.rewritten for one in report.sites if one.rule == RULE] == [True, True]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(("charge", "fire", "reset"), zip(itertools.cycle(CHARGES), FIRES, itertools.cycle(RESETS)))
def test_on_a_gpu_it_has_eagers_spikes_and_gradients(charge: str, fire: str, reset: str) -> None:
    """Dividing by a number is a product with its inverse there, and nothing is contracted."""
    run = loop(CHARGES[charge], over(FIRES[fire]), RESETS[reset])
    x = currents(4, 32, 512).cuda().requires_grad_()
    torch._dynamo.reset()
    found = torch.compile(run, backend="sparsecomp", options={"neurons": "fuse", "strict": True})(x)
    expected = run(x)
    assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1], rtol=0, atol=0)
    weights = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).cuda()
    mine, theirs = (torch.autograd.grad((out[0] * weights).sum() + out[1].sum(), x)[0] for out in (found, expected))
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    report = sparsecomp.last_report()
    assert report is not None and site(report, RULE).rewritten
