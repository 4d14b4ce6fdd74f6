"""A batch-norm in evaluation before neurons that are written by hand is part of their step: stock's spikes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hand_written import currents
from rewriting import rewritten, site
from torch import Tensor, nn

import sparsecomp
from sparsecomp.passes.spiking import neuron_norm

pytestmark = pytest.mark.quick_cases(1)

RULE = "neuron_norm"
DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
NORMS: dict[str, Callable[[], nn.Module]] = {
    "images": lambda: nn.BatchNorm2d(6), "tokens": lambda: nn.BatchNorm1d(6, eps=0.1),
    "features": lambda: nn.BatchNorm1d(6), "without weights": lambda: nn.BatchNorm2d(6, affine=False),
}  # fmt: skip
SHAPES = {"images": (5, 7), "tokens": (35,), "features": ()}


class Normed(nn.Module):
    """A batch-norm and leaky neurons (T, N, C, …)."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.norm = NORMS[name]()
        random = torch.Generator().manual_seed(7)
        for one in (*self.norm.parameters(), *self.norm.buffers()):
            if one.is_floating_point():
                one.data.copy_(torch.rand(one.shape, generator=random) + 0.3)

    def normed(self, x: Tensor) -> Tensor:
        return self.norm(x.flatten(0, 1)).unflatten(0, x.shape[:2])

    def forward(self, x: Tensor) -> Any:
        return self.fired(self.normed(x))

    def fired(self, x: Tensor) -> tuple[Tensor, Tensor]:
        v, out = torch.zeros_like(x[0]), []
        for step in x:
            v = v + (step - v) * 0.3
            out.append((v >= 0.7).to(v))
            v = v * (1 - out[-1])
        return torch.stack(out), v


class Read(Normed):
    """Somebody else reads what the batch-norm gives."""

    def forward(self, x: Tensor) -> Any:
        normed = self.normed(x)
        return *self.fired(normed), normed


class Pooled(Normed):
    """Something is between the two."""

    def forward(self, x: Tensor) -> Any:
        normed = nn.functional.max_pool2d(self.norm(x.flatten(0, 1)), 2)
        return self.fired(normed.unflatten(0, x.shape[:2]))


class Written(Normed):
    """What it read is written to before the neurons read."""

    def forward(self, x: Tensor) -> Any:
        x = x * 1.0
        normed = self.normed(x)
        x.mul_(0)
        return *self.fired(normed), x


def given(name: str, dtype: torch.dtype) -> Tensor:
    return currents(4, 3, 6, *SHAPES.get(name, (5, 7))).to(dtype)


def stock(model: Callable[[Tensor], Any], x: Tensor) -> Any:
    torch._dynamo.reset()
    with torch.no_grad():
        return torch.compile(model)(x)


@pytest.mark.slow(reason="compiles what Inductor makes of it")
@DTYPES
@pytest.mark.parametrize("name", NORMS)
def test_spikes_are_those_of_inductor_s_batch_norm(name: str, dtype: torch.dtype) -> None:
    """Of a kernel for both Inductor rounds nothing to half precision on the way, which eager's neurons do."""
    model, x = Normed(name).to(dtype).eval(), given(name, dtype)
    with torch.no_grad():
        found, report = rewritten(model, x, neurons="fuse", strict=True)
    assert site(report, RULE).rewritten and "batch_norm(" not in report.graph_after
    with torch.no_grad():
        expected = model.fired(stock(model.normed, x))
    exact = {"rtol": 0, "atol": 0} if dtype.itemsize == 2 else {"rtol": 1e-5, "atol": 1e-6}  # of 1 / √ in float32
    torch.testing.assert_close(found, expected, **exact)
    assert 0.05 < found[0].float().mean() < 0.95


@DTYPES
@pytest.mark.parametrize("name", NORMS)
def test_spikes_are_those_of_the_formula(name: str, dtype: torch.dtype) -> None:
    """Of (x - mean) · (1 / √(var + ε)) · weight + bias, in float32, rounded once."""
    model, x = Normed(name).to(dtype).eval(), given(name, dtype)
    with torch.no_grad():
        found, report = rewritten(model, x, neurons="fuse", strict=True)
        norm, trailing = model.norm, (-1, *[1] * (x.dim() - 3))
        mean, var = (one.float().view(trailing) for one in (norm.running_mean, norm.running_var))
        value = (x.float() - mean) * (1 / (var + norm.eps).sqrt())
        if norm.affine:
            value = value * norm.weight.float().view(trailing) + norm.bias.float().view(trailing)
        expected = model.fired(value.to(dtype))
    judged = site(report, RULE)
    assert judged.rewritten and judged.implementation == "fused" and all(map(torch.equal, found, expected))


@pytest.mark.slow(reason="a wide map, op by op")
@DTYPES
def test_eager_differs_where_a_membrane_is_at_the_threshold_alone(dtype: torch.dtype) -> None:
    model, x = Normed("images").to(dtype).eval(), currents(4, 20, 6, 30, 30).to(dtype)
    with torch.no_grad():
        found, report = rewritten(model, x, neurons="fuse", strict=True)
        assert site(report, RULE).rewritten
        assert (found[0] != model(x)[0]).float().mean() < 8 * torch.finfo(dtype).eps


@pytest.mark.parametrize(
    ("make", "told"),
    [(Read, "somebody else reads its result"), (Written, "is written to"), (Pooled, "")],
)  # fmt: skip
def test_others_stay(make: type[Normed], told: str) -> None:
    model, x = make("images").half().eval(), given("images", torch.float16)
    with torch.no_grad():
        found, report = rewritten(model, x, neurons="fuse", strict=True)
        expected = model(x)
    assert site(report, "unrolled_neurons").rewritten and report.graph_after.count("batch_norm(") == 1
    judged = [one for one in report.sites if one.rule == RULE]
    assert [told in one.reason and not one.rewritten for one in judged] == [True] * bool(told)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("room", ["PARAMETERS", "NUMBERS"])
def test_a_description_that_is_full(room: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neuron_norm, room, 3)
    with torch.no_grad():
        _, report = rewritten(Normed("images").eval(), given("images", torch.float32), neurons="fuse", strict=True)
    assert "no room" in site(report, RULE).reason and "batch_norm(" in report.graph_after


def test_in_training_mode_it_stays() -> None:
    model, x = Normed("images"), given("images", torch.float32)
    with torch.no_grad():
        _, report = rewritten(model, x, neurons="fuse", strict=True)
    assert not [one for one in report.sites if one.rule == RULE] and "batch_norm(" in report.graph_after


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@DTYPES
@pytest.mark.parametrize("name", NORMS)
def test_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    """Inductor's kernel may contract a product with a sum there: membranes at the threshold may differ."""
    model, x = Normed(name).to("cuda", dtype).eval(), currents(4, 20, 6, *[30] * len(SHAPES.get(name, (5, 7))))
    x = x.to("cuda", dtype)
    torch._dynamo.reset()
    options = {"neurons": "fuse", "strict": True}
    with torch.no_grad():
        found = torch.compile(model, backend="sparsecomp", options=options)(x)
        report = sparsecomp.last_report()
        assert report is not None and site(report, RULE).rewritten
        for other in (model(x), model.fired(stock(model.normed, x))):
            assert (found[0] != other[0]).float().mean() < 8 * torch.finfo(dtype).eps
