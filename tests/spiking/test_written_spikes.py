"""Spikes that are written into zeros, as spike functions are in inference, are read as the mask that they are."""

from collections.abc import Callable

import pytest
import torch
from hand_written import currents
from rewriting import rewritten, site
from test_trained_loops import Parametric, WithThreshold
from torch import Tensor, nn

import sparsecomp

pytestmark = pytest.mark.quick_cases(2)

RULE = "written_spikes"
Write = Callable[[Tensor], Tensor]


def by_index(u: Tensor) -> Tensor:
    out = torch.zeros_like(u)
    out[u > 0] = 1.0
    return out


def by_method(u: Tensor) -> Tensor:
    return u.new_zeros(u.shape).masked_fill_(u >= 0, 1)


def then_scaled(u: Tensor) -> Tensor:
    return by_index(u).mul_(0.5)


def loop(fire: Write) -> Write:
    def run(x: Tensor) -> Tensor:
        v, out = torch.zeros_like(x[0]), []
        for step in x:
            v = v * 0.5 + step
            out.append(fire(v - 0.7))
            v = v * (1 - out[-1])
        return torch.stack(out)

    return run


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fire", [by_index, by_method])
def test_a_neuron_that_writes_its_spikes_is_one_operator(fire: Write, dtype: torch.dtype) -> None:
    x = currents(5, 3, 16).to(dtype)
    with torch.no_grad():
        found, report = rewritten(loop(fire), x, neurons="fuse", strict=True)
    assert site(report, RULE).reason.startswith("5 tensors of zeros") and site(report, "unrolled_neurons").rewritten
    assert "setitem" not in report.graph_after and "masked_fill_" not in report.graph_after
    expected = loop(fire)(x)
    assert torch.equal(found, expected) and 0.05 < expected.mean() < 0.95


class Network(nn.Module):
    """Two layers with neurons behind them, whose spike function Dynamo inlines in inference."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.threshold = nn.Linear(8, 32), nn.Linear(32, 16), torch.tensor(0.2)

    def forward(self, x: Tensor) -> Tensor:
        v, w, out = torch.zeros(x.shape[1], 32), torch.zeros(x.shape[1], 16), []
        for step in x:
            v = v * 0.5 + self.first(step)
            s = WithThreshold.apply(v, self.threshold)
            v = v * (1 - s)
            w = w * 0.5 + self.second(s)
            out.append(WithThreshold.apply(w, self.threshold))
            w = w - out[-1]
        return torch.stack(out)


def test_layers_between_such_neurons_run_once() -> None:
    model, x = Network(), currents(4, 6, 8)
    with torch.no_grad():
        found, report = rewritten(model, x, neurons="fuse", implementation="auto", strict=True)
        expected = model(x)
    assert torch.equal(found, expected) and expected.any()
    assert report.graph_after.count("nn.linear(") == 2
    assert [one.rewritten for one in report.sites if one.rule == "unrolled_neurons"] == [True, True]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_function_in_inference_has_the_bits_of_eager(dtype: torch.dtype) -> None:
    model, x = Parametric(), currents(5, 3, 1600).to(dtype)
    with torch.no_grad():
        found, report = rewritten(model, x, neurons="fuse", strict=True)
        expected = model(x)
    assert site(report, "unrolled_neurons").rewritten and torch.equal(found, expected) and expected.any()


def test_who_writes_to_the_spikes_later_writes_to_memory_of_their_own() -> None:
    x = currents(3, 4)
    found, report = rewritten(lambda x: (then_scaled(x), x > 0), x, neurons="fuse", strict=True)
    assert site(report, RULE).rewritten
    assert torch.equal(found[0], then_scaled(x)) and torch.equal(found[1], x > 0)


def read_before(u: Tensor) -> Tensor:
    out = torch.zeros_like(u)
    before = out + u
    out[u > 0] = 1.0
    return out + before


def named_before(u: Tensor) -> Tensor:
    out = torch.zeros_like(u)
    view = out.view(-1)
    out[u > 0] = 1.0
    return view + 1


def by_row(u: Tensor) -> Tensor:
    out = torch.zeros_like(u)
    out[u[:, 0] > 0] = 1.0
    return out


def by_channels_last(u: Tensor) -> Tensor:
    out = torch.zeros_like(u).t().contiguous().t()
    out[u > 0] = 1.0
    return out


def of_two(u: Tensor) -> Tensor:
    out = torch.zeros_like(u)
    out[u > 0] = 2.0
    return out


def of_ones(u: Tensor) -> Tensor:
    out = torch.ones_like(u)
    out[u > 0] = 1.0
    return out


def of_a_tensor(u: Tensor) -> Tensor:
    out = torch.zeros_like(u)
    out[u > 0] = u.amax()
    return out


def of_places(u: Tensor) -> Tensor:
    out = torch.zeros_like(u)
    out[(u[:, 0] > 0).long()] = 1.0
    return out


def of_whole_numbers(u: Tensor) -> Tensor:
    out = torch.zeros_like(u, dtype=torch.int32)
    out[u > 0] = 1
    return out


OTHERS = [
    read_before, named_before, by_row, by_channels_last, of_two, of_ones, of_a_tensor, of_places, of_whole_numbers,
]  # fmt: skip


@pytest.mark.parametrize("write", OTHERS)
def test_other_writes_stay(write: Write) -> None:
    x = currents(6, 4)
    found, report = rewritten(write, x, neurons="fuse", strict=True)
    assert not [one for one in report.sites if one.rule == RULE]
    assert torch.equal(found, write(x))


def test_an_input_is_written_to_as_before() -> None:
    def run(x: Tensor, out: Tensor) -> Tensor:
        out[x > 0] = 1.0
        return out + 1

    x, given, other = currents(6, 4), torch.zeros(6, 4), torch.zeros(6, 4)
    found, report = rewritten(run, x, given, neurons="fuse", strict=True)
    assert torch.equal(found, run(x, other)) and torch.equal(given, other) and given.any()
    assert not [one for one in report.sites if one.rule == RULE]


def test_it_is_asked_for() -> None:
    report = sparsecomp.explain(loop(by_index), currents(3, 4))
    assert not [one for one in report.sites if one.rule == RULE]
