"""Numbers that are written where a mask is true, as spikes in inference and resets are, are read as choices by it."""

import random
from collections.abc import Callable

import pytest
import torch
from hand_written import currents
from rewriting import rewritten, site
from test_trained_loops import Parametric, WithThreshold
from torch import Tensor, nn

import sparsecomp

pytestmark = pytest.mark.quick_cases(2)

RULE = "masked_writes"
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
    assert site(report, RULE).reason.startswith("5 in-place writes") and site(report, "unrolled_neurons").rewritten
    assert "setitem" not in report.graph_after and "masked_fill_" not in report.graph_after
    expected = loop(fire)(x)
    assert torch.equal(found, expected) and 0.05 < expected.mean() < 0.95


def resets(x: Tensor) -> Tensor:
    """To 0.1, in the membrane, which the comparison has read before."""
    v, out = torch.zeros_like(x[0]), []
    for step in x:
        v = v * 0.5 + step
        fired = v > 0.7
        v[fired] = 0.1
        out.append(fired.to(v.dtype))
    return torch.stack(out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_reset_that_is_written_into_the_membrane_is_read(dtype: torch.dtype) -> None:
    x = currents(5, 3, 400).to(dtype)
    found, report = rewritten(resets, x, neurons="fuse", strict=True)
    reason = site(report, "unrolled_neurons").reason
    assert "where" in reason and torch.equal(found, resets(x)) and 0.05 < found.mean() < 0.95


def leaking(x: Tensor) -> Tensor:
    """Membranes that are set to 0 where they are large; their gradients are 0 there."""
    v, out = torch.zeros_like(x[0]), []
    for step in x:
        v = v * 0.5 + step
        v[v > 0.7] = 0.0
        out.append(v)
    return torch.stack(out)


def test_gradients_are_those_of_the_write() -> None:
    x = currents(4, 3, 50).requires_grad_()
    found, report = rewritten(leaking, x, neurons="fuse", strict=True)
    expected = leaking(x)
    assert site(report, RULE).rewritten and torch.equal(found, expected)
    ours, theirs = (torch.autograd.grad(one.square().sum(), x)[0] for one in (found, expected))
    torch.testing.assert_close(ours, theirs)
    assert (theirs == 0).any() and theirs.any()


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


def of_a_view(u: Tensor) -> Tensor:
    whole = u * 2
    out = whole[:3]
    out[u[:3] > 0] = 1.0
    return whole


def named_by_itself(u: Tensor) -> Tensor:
    out = u * 2
    same = out.float()
    out[u > 0] = 1.0
    return same + 1


def without_gradients(u: Tensor) -> Tensor:
    """The write does not cut off the gradient of what is written to."""
    out = u * 2
    with torch.no_grad():
        out[u > 0] = 1.0
    return out + 1


OTHERS = [
    named_before, by_row, by_channels_last, of_a_tensor, of_places, of_whole_numbers, of_a_view, named_by_itself,
    without_gradients,
]  # fmt: skip


def of_all(u: Tensor) -> Tensor:
    """Of several kinds, one behind the other."""
    return read_before(u) + of_two(by_index(u) - 0.5) * of_ones(u) + twice(u)


def twice(u: Tensor) -> Tensor:
    out = u * 2
    out[u > 0] = 3.0
    read = out + 1
    out[read < 0] = 4.0
    return out * read


@pytest.mark.parametrize("write", [read_before, of_two, of_ones, twice, of_all])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_who_reads_before_reads_what_was_there(write: Write, dtype: torch.dtype) -> None:
    x = currents(6, 4).to(dtype)
    found, report = rewritten(write, x, neurons="fuse", strict=True)
    assert site(report, RULE).rewritten and torch.equal(found, write(x)) and found.dtype is dtype


@pytest.mark.parametrize("write", OTHERS)
def test_other_writes_stay(write: Write) -> None:
    x = currents(6, 4)
    found, report = rewritten(write, x, neurons="fuse", strict=True)
    assert not [one for one in report.sites if one.rule == RULE]
    assert torch.equal(found, write(x))


def program(seed: int) -> Write:
    """A dozen operations drawn at random: new tensors, other names of them, and writes to either."""
    draw = random.Random(seed)
    steps = [(draw.choice([*KINDS]), draw.random(), draw.random(), draw.choice([0.0, 1.0, 2.5])) for _ in range(12)]

    def run(x: Tensor) -> Tensor:
        pool = [x * 2, torch.zeros_like(x)]
        for kind, first, second, number in steps:
            one, other = (pool[int(place * len(pool))] for place in (first, second))
            if kind == "write":
                one[other > 0.3] = number
            elif kind == "fill":
                one.masked_fill_(other <= number, number)
            elif kind == "in place":
                one.mul_(0.5).add_(other)
            else:
                pool.append(KINDS[kind](one, other))
        return torch.stack(pool)

    return run


KINDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": lambda a, b: a + b, "zeros": lambda a, _: torch.zeros_like(a), "name": lambda a, _: a.float(),
    "view": lambda a, _: a.view(-1).view_as(a), "copy": lambda a, _: a.clone(),
    **dict.fromkeys(("write", "fill", "in place"), torch.add),
}  # fmt: skip


@pytest.mark.parametrize("seed", range(40))
def test_random_programs(seed: int) -> None:
    x = currents(6, 4)
    found, _ = rewritten(program(seed), x.clone(), neurons="fuse", strict=True)
    assert torch.equal(found, program(seed)(x))


def test_random_programs_have_such_writes_and_others() -> None:
    taken = []
    for seed in range(12):
        _, report = rewritten(program(seed), currents(6, 4), neurons="fuse", strict=True)
        sites = [one for one in report.sites if one.rule == RULE]
        taken.append(bool(sites) and "setitem" in report.graph_after)
    assert any(taken)


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
