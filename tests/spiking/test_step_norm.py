"""Batch-norm in training that is called once a step: each step by its own statistics, the running ones in order."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hand_written import currents
from rewriting import rewritten, site
from test_trained_loops import FIRES
from torch import Tensor, nn

import sparsecomp
from sparsecomp.passes.spiking import fuse_steps

pytestmark = pytest.mark.quick_cases(1)

Call = Callable[..., Any]
OPTIONS = {"neurons": "fuse", "implementation": "auto", "strict": True}
LAYERS: dict[str, Call] = {
    "linear": lambda a, b: nn.Linear(a, b, bias=False),
    "one": lambda a, b: nn.Conv1d(a, b, 3, padding=1, bias=False),
    "two": lambda a, b: nn.Conv2d(a, b, 3, padding=1, bias=False),
    "three": lambda a, b: nn.Conv3d(a, b, 3, padding=1, bias=False),
}
NORMS: dict[str, Call] = {
    "linear": nn.BatchNorm1d, "one": nn.BatchNorm1d, "two": nn.BatchNorm2d, "three": nn.BatchNorm3d
}  # fmt: skip
SIZES: dict[str, tuple[int, ...]] = {"linear": (), "one": (7,), "two": (5, 6), "three": (3, 4, 2)}


class Net(nn.Module):
    """Two layers, each with batch-norm and neurons behind it, in a loop over time steps."""

    def __init__(self, kind: str = "two", norm: Call | None = None, between: Call = lambda x: x) -> None:
        super().__init__()
        torch.manual_seed(0)
        norm = norm or NORMS[kind]
        self.first, self.second = LAYERS[kind](3, 8), LAYERS[kind](8, 4)
        self.norms, self.between = nn.ModuleList([norm(8), norm(4)]), between

    def forward(self, x: Tensor) -> Any:
        v: Any = 0.0
        w: Any = 0.0
        out = []
        for step in x:
            v = v * 0.5 + self.between(self.norms[0](self.first(step)))
            s = FIRES["arctan"](v - 0.5)
            v = v * (1 - s)
            w = w * 0.5 + self.norms[1](self.second(s))
            out.append(FIRES["triangle"](w - 0.5))
            w = w - 0.5 * out[-1]
        return torch.stack(out), w


def given(kind: str = "two", steps: int = 4) -> Tensor:
    return currents(steps, 6, 3, *SIZES[kind])


def as_eager(make: Call, x: Tensor, run: Call | None = None, times: int = 1, rtol: float = 1e-4) -> Any:
    """Results, gradients and running statistics are eager's to rounding; the report of the last call."""
    model, eager, report = make(), make(), None
    weights = torch.randn(x.shape[0], generator=torch.Generator().manual_seed(3))

    def gradients(found: Any, of: nn.Module) -> Any:
        loss = (found[0].flatten(1).float().sum(1) * weights).sum() + found[1].float().square().sum()
        return torch.autograd.grad(loss, [*of.parameters()])

    for _ in range(times):
        found, report = run(model, x) if run else rewritten(model, x, **OPTIONS)
        expected = eager(x)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=rtol, atol=rtol)
        for one, other in zip(gradients(found, model), gradients(expected, eager), strict=True):
            torch.testing.assert_close(one, other, rtol=rtol, atol=rtol * float(other.abs().max()) + 1e-6)
    for (name, one), other in zip(model.named_buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(one, other, rtol=rtol, atol=1e-6, msg=name)
        assert not one.requires_grad
    return report


def runs_once(report: Any, layers: int = 2) -> None:
    """Neurons too, which need the currents of all steps before the first spike is read."""
    assert site(report, "fuse_steps").reason.count("batch_norm") == layers
    assert "batch_norm(" not in report.graph_after
    assert [one.rewritten for one in report.sites if one.rule == "unrolled_neurons"] == [True] * layers


@pytest.mark.parametrize("kind", LAYERS)
def test_each_step_has_its_own_statistics(kind: str) -> None:
    runs_once(as_eager(lambda: Net(kind), given(kind), times=2))


OTHERS: dict[str, Call] = {
    "without weights": lambda n: nn.BatchNorm2d(n, affine=False),
    "without running statistics": lambda n: nn.BatchNorm2d(n, track_running_stats=False),
    "of another momentum": lambda n: nn.BatchNorm2d(n, momentum=0.7, eps=0.1),
    "of no momentum": lambda n: nn.BatchNorm2d(n, momentum=0.0),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_norms(name: str) -> None:
    runs_once(as_eager(lambda: Net(norm=OTHERS[name]), given()))


@pytest.mark.slow(reason="traces two loops")
def test_one_step_s_statistics_are_not_another_s() -> None:
    """What the above compares with differs where steps are normalised together, and where running ones move once."""
    x = given() * torch.tensor([0.1, 1.0, 10.0, 100.0]).view(-1, 1, 1, 1, 1)
    runs_once(as_eager(Net, x))
    layer = Net().first
    each, together = (F.batch_norm(layer(one), None, None, training=True) for one in (x[0], x.flatten(0, 1)))
    assert not torch.allclose(each, together[:6], atol=0.1)


@pytest.mark.slow(reason="traces two loops")
def test_values_far_from_zero_keep_their_digits() -> None:
    """Variances of numbers around 300: differences of squares would lose them."""
    model, eager, x = Net("linear"), Net("linear").double(), given("linear") * 0.1 + 300
    for one in (model, eager):
        nn.init.constant_(one.first.weight, 1 / 3)
    (_, found), report = rewritten(model, x, **OPTIONS)
    runs_once(report)
    torch.testing.assert_close(found.double(), eager(x.double())[1], rtol=0, atol=2e-2)
    for one, other in zip(model.norms[0].buffers(), eager.norms[0].buffers(), strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=1e-3, atol=1e-5)


@pytest.mark.slow(reason="traces two loops")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_normalised_in_float32(dtype: torch.dtype) -> None:
    def both(model: nn.Module, x: Tensor) -> Any:
        with torch.autocast("cpu", dtype):
            return rewritten(model, x, **OPTIONS)

    class Cast(Net):
        def forward(self, x: Tensor) -> Any:
            with torch.autocast("cpu", dtype):
                return super().forward(x)

    runs_once(as_eager(Cast, given(), both, rtol=4 * torch.finfo(dtype).eps))


@pytest.mark.slow(reason="traces two loops")
def test_layouts_are_kept() -> None:
    def make() -> nn.Module:
        return Net().to(memory_format=torch.channels_last)

    x = given().flatten(0, 1).to(memory_format=torch.channels_last).unflatten(0, (4, 6))
    runs_once(as_eager(make, x))
    found = rewritten(make(), x, **OPTIONS)[0]
    assert [one.stride() for one in found] == [one.stride() for one in make()(x)]


def test_parts_of_a_loop_move_the_statistics_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many steps as there is room for at once: 6 · 8 · 5 · 6 numbers of 4 bytes each."""
    monkeypatch.setattr(fuse_steps, "MOST_BYTES", 2 * 6 * 8 * 5 * 6 * 4)
    report = as_eager(Net, given(steps=6))
    assert site(report, "fuse_steps").reason.count("batch_norm") > 2
    assert "batch_norm(" not in report.graph_after


# ---- what stays ---------------------------------------------------------------------------------------------------


class Shared(Net):
    """One batch-norm behind both layers, whose running statistics move by turns."""

    def __init__(self) -> None:
        super().__init__(norm=lambda n: nn.BatchNorm2d(8))
        self.second = LAYERS["two"](8, 8)
        self.norms[1] = self.norms[0]


class Reading(Net):
    """Reads the running statistics between the steps."""

    def forward(self, x: Tensor) -> Any:
        found, means = super().forward(x[:2]), self.norms[0].running_mean.clone()
        later, w = super().forward(x[2:])
        return torch.cat((found[0], later)), w + means.sum()


class Views(Net):
    """The running statistics of both lie in one piece of memory."""

    def __init__(self) -> None:
        super().__init__()
        memory = torch.zeros(12)
        self.norms[0].running_mean, self.norms[1].running_mean = memory[:8], memory[8:]


def in_place(x: Tensor) -> Tensor:
    return x.mul_(2)


class AsBias(Net):
    """Reads the running means as biases, which each call finds as the one before left them."""

    def __init__(self) -> None:
        super().__init__()
        for norm in self.norms:
            del norm.bias
            norm.bias = norm.running_mean


class OneOfBoth(Net):
    """Keeps both running statistics in one tensor."""

    def __init__(self) -> None:
        super().__init__()
        for norm in self.norms:
            norm.running_mean = norm.running_var


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("make", [Shared, Reading, Views, AsBias, OneOfBoth, lambda: Net(between=in_place)])
def test_what_may_not_be_moved_stays(make: Call) -> None:
    report = as_eager(make, given())
    assert "batch_norm(" in report.graph_after


@pytest.mark.slow(reason="traces two loops")
def test_evaluation_is_no_concern_of_it() -> None:
    model = Net().eval()
    with torch.no_grad():
        found, report = rewritten(model, given(), **OPTIONS)
        expected = model(given())
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    assert "running_mean" in report.graph_after and "copy_" not in report.graph_after


# ---- compiled -----------------------------------------------------------------------------------------------------


def compiled(options: dict[str, Any]) -> Call:
    made: dict[nn.Module, Any] = {}

    def run(model: nn.Module, x: Tensor) -> Any:
        if model not in made:
            torch._dynamo.reset()
            made[model] = torch.compile(model, backend="sparsecomp", options=options)
        found = [one.clone() for one in made[model](x)]
        return found, sparsecomp.last_report()

    return run


@pytest.mark.slow(reason="compiles with Inductor")
def test_compiled_by_inductor() -> None:
    runs_once(as_eager(Net, given(), compiled(OPTIONS), times=2))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_on_a_gpu_statistics_are_eagers(mode: str) -> None:
    """And spikes, but where a current is within rounding of a threshold."""
    model, eager, x = Net().cuda(), Net().cuda(), given().cuda()
    run = compiled({**OPTIONS, "mode": mode})
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        for _ in range(3):
            model.zero_grad()  # a graph's gradients are there until it runs again
            (spikes, _), report = run(model, x)
            expected, _ = eager(x)
            runs_once(report)
            assert (spikes == expected).float().mean() > 0.999
            spikes.sum().backward()
    for one, other in zip(model.norms[0].buffers(), eager.norms[0].buffers(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
