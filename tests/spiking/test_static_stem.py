"""What sees the same image at every time step runs once: spellings, what is refused, gradients, real networks."""

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rewriting import dyadic, rewritten, site
from snn_fixtures import stub_torchvision
from torch import Tensor, nn

import sparsecomp
from sparsecomp.compiler.capture import Graph
from sparsecomp.lowering.spiking import lif as neurons
from sparsecomp.options import Options
from sparsecomp.reference.lif import lif_reference
from sparsecomp.report import Report, Site

pytestmark = pytest.mark.quick_cases(2)

T = 4
RULE = "static_stem"
Forward = Callable[[nn.Module, Tensor], Tensor]


def fire(x: Tensor) -> Tensor:
    """Leaky neurons over the first dimension, which tell its steps apart."""
    v, spikes = torch.zeros_like(x[0]), []
    for step in range(x.shape[0]):
        v = v / 2 + x[step]
        spikes.append((v > 0.5).to(x.dtype))
        v = v * (1 - spikes[-1])
    return torch.stack(spikes)


class Net(nn.Module):
    """Layers for the forward function that it is given. On dyadic numbers every kernel gives the same bits."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.deeper, self.linear = nn.Conv2d(8, 4, 3), nn.Linear(8, 5)
        self.run = forward
        dyadic(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def image(batch: int = 2, side: int = 8) -> Tensor:
    return torch.randint(-8, 9, (batch, 3, side, side), generator=torch.Generator().manual_seed(batch)) / 8


def stem(net: nn.Module, x: Tensor) -> Tensor:
    return net.norm(net.conv(x))


def over_time(net: nn.Module, x: Tensor) -> Tensor:
    """spikingjelly's `seq_to_ann_forward`."""
    y = stem(net, x.flatten(0, 1))
    return fire(y.view(x.shape[0], x.shape[1], *y.shape[1:]))


def checked(net: nn.Module, *inputs: Tensor, **options: Any) -> list[Site]:
    """The rule's sites, after the rewritten network was held against eager's bits."""
    expected = net(*inputs)
    found, report = rewritten(net, *inputs, strict=True, implementation="auto", **options)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    return [one for one in report.sites if one.rule == RULE]


SPELLINGS: dict[str, Forward] = {
    "repeat": lambda net, x: over_time(net, x.unsqueeze(0).repeat(T, 1, 1, 1, 1)),
    "repeat adds the dimension": lambda net, x: over_time(net, x.repeat(T, 1, 1, 1, 1)),
    "expand": lambda net, x: over_time(net, x.unsqueeze(0).expand(T, -1, -1, -1, -1)),
    "expand adds the dimension": lambda net, x: over_time(net, x.expand(T, *x.shape)),
    "expand by index": lambda net, x: over_time(net, x[None].expand(T, -1, -1, -1, -1)),
    "broadcast_to": lambda net, x: over_time(net, torch.broadcast_to(x, (T, *x.shape))),
    "stack": lambda net, x: over_time(net, torch.stack([x] * T)),
    "cat": lambda net, x: fire(stem(net, torch.cat([x] * T)).unflatten(0, (T, -1))),
    "cat of steps": lambda net, x: over_time(net, torch.cat([x[None]] * T)),
    "repeat of the batch": lambda net, x: fire(stem(net, x.repeat(T, 1, 1, 1)).view(T, -1, 8, 8, 8)),
    "tile": lambda net, x: fire(stem(net, x.tile(T, 1, 1, 1)).reshape(T, x.shape[0], 8, 8, 8)),
    "batch first": lambda net, x: fire(
        stem(net, x.unsqueeze(1).repeat(1, T, 1, 1, 1).flatten(0, 1)).unflatten(0, (-1, T)).transpose(0, 1)
    ),
    "repeat_interleave": lambda net, x: fire(
        stem(net, x.repeat_interleave(T, 0)).view(-1, T, 8, 8, 8).permute(1, 0, 2, 3, 4)
    ),
    "stack along the batch": lambda net, x: fire(
        stem(net, torch.stack([x] * T, 1).reshape(-1, 3, 8, 8)).unflatten(0, (-1, T)).movedim(1, 0)
    ),
}


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("forward", SPELLINGS.values(), ids=SPELLINGS)
def test_a_repeated_image_is_seen_once(forward):
    with torch.no_grad():
        (found,) = checked(Net(forward).eval(), image())
    assert found.rewritten and found.implementation == "hoisted" and found.module == "conv"
    assert found.reason == "static stem: 2 operators run once instead of 4 times (conv2d, batch_norm)"


@pytest.mark.parametrize("training", [False, True])
def test_an_input_that_was_expanded_is_seen_once(training):
    """As a training loop has it that repeats its images before it calls the network."""
    net, x = Net(over_time).train(training), image()
    found = [one.reason for one in checked(net, x.expand(T, *x.shape)) if one.rewritten]
    assert found == ["static stem: 2 operators run once instead of 4 times (conv2d, batch_norm)"]


def test_gradients_behind_an_expanded_input_are_sums_over_time():
    def forward(net: nn.Module, x: Tensor) -> Tensor:
        seen = stem(net, x.flatten(0, 1)).unflatten(0, (T, -1))
        return (seen * torch.arange(1.0, 1 + T).view(T, 1, 1, 1, 1)).square().mean()

    net, x = Net(forward).train(), image().expand(T, 2, 3, 8, 8)
    found, report = rewritten(net, x, strict=True, implementation="auto")
    assert site(report, RULE).rewritten
    weights = [net.conv.weight, net.norm.weight]
    for ours, eager in zip(torch.autograd.grad(found, weights), torch.autograd.grad(net(x), weights), strict=True):
        torch.testing.assert_close(ours, eager)


def test_expanded_inputs_that_have_a_gradient_or_are_written_to_are_not():
    x = image()

    def written(net: nn.Module, x: Tensor) -> Tensor:
        x[0].mul_(2)
        return over_time(net, x)

    net = Net(over_time).eval()
    assert not any(one.rewritten for one in checked(net, x.clone().requires_grad_().expand(T, *x.shape)))
    found = rewritten(Net(written).eval(), x.expand(T, *x.shape), strict=True, implementation="auto")[1]
    assert not any(one.rewritten for one in found.sites if one.rule == RULE)


@pytest.mark.slow(reason="Inductor compiles")
def test_inputs_of_the_same_sizes_that_were_not_expanded_are_seen_at_every_step():
    net, x = Net(over_time).eval(), image()
    compiled = torch.compile(net, backend="sparsecomp")
    several = torch.stack([x, x + 1, x * 2, x - 1])
    with torch.no_grad():
        for seen in (x.expand(T, *x.shape), several, x.expand(T, *x.shape), several[:, :1].expand(T, 2, -1, -1, -1)):
            torch.testing.assert_close(compiled(seen), net(seen))
    torch._dynamo.reset()
    torch._dynamo.mark_dynamic(several, 1)
    dynamic = torch.compile(net, backend="sparsecomp", dynamic=None)
    with torch.no_grad():
        one = x.expand(T, *x.shape)
        torch._dynamo.mark_dynamic(one, 1)
        torch.testing.assert_close(dynamic(one), net(one))
        torch.testing.assert_close(dynamic(several), net(several))
        more = image(3).expand(T, 3, -1, -1, -1)
        torch.testing.assert_close(dynamic(more), net(more))


def _stepwise(net: nn.Module, x: Tensor, steps: Sequence[Tensor]) -> Tensor:
    return fire(torch.stack([stem(net, one) for one in steps]))


LOOPS: dict[str, Forward] = {
    "one image": lambda net, x: _stepwise(net, x, [x] * T),
    "steps of a repeated image": lambda net, x: _stepwise(net, x, [x.repeat(T, 1, 1, 1, 1)[t] for t in range(T)]),
    "steps of an expanded image": lambda net, x: _steps_of(net, x.expand(T, *x.shape)),
    "unbind": lambda net, x: _stepwise(net, x, torch.stack([x] * T).unbind(0)),
    "prepared at each step": lambda net, x: _stepwise(net, x, [(x - 0.5) * 2 for _ in range(T)]),
}


def _steps_of(net: nn.Module, seen: Tensor) -> Tensor:
    return _stepwise(net, seen, [seen[t] for t in range(T)])


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("forward", LOOPS.values(), ids=LOOPS)
def test_a_loop_calls_the_stem_once(forward):
    with torch.no_grad():
        found = [one for one in checked(Net(forward).eval(), image()) if one.rewritten]
    (merged,) = found
    assert merged.implementation == "merged"
    assert "conv2d, batch_norm" in merged.reason and "once instead of 4 times" in merged.reason


def test_a_loop_in_which_the_image_is_changed_calls_it_each_time():
    def forward(net: nn.Module, x: Tensor) -> Tensor:
        y, outs = x.clone(), []
        for _ in range(T):
            outs.append(net.conv(y))
            y.add_(1)
        return fire(torch.stack(outs))

    with torch.no_grad():
        assert not any(one.rewritten for one in checked(Net(forward), image()))


def test_only_equal_calls_of_a_loop_are_merged():
    def forward(net: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            half = net.conv(x)
        return fire(torch.stack([net.conv(x), net.conv(x), half.float(), F.conv2d(x, net.conv.weight, padding=1)]))

    with torch.no_grad():
        (found,) = checked(Net(forward), image(), verify=False)
    assert found.reason == "static stem: 1 operator runs once instead of 2 times (conv2d)"


def test_what_follows_the_stem_is_computed_once_up_to_what_tells_steps_apart():
    def forward(net: nn.Module, x: Tensor) -> Tensor:
        x = (x.repeat(T, 1, 1, 1, 1) - 0.5).flatten(0, 1)
        y = F.max_pool2d(F.relu(F.dropout(stem(net, x), 0.5, False)), 2)
        y = F.pad(net.deeper(y), (1, 1))
        return fire(y.unflatten(0, (T, -1)) + torch.arange(T).view(T, 1, 1, 1, 1))

    with torch.no_grad():
        (found,) = checked(Net(forward).eval(), image())
    assert found.reason.endswith("times (conv2d, batch_norm, dropout, relu, max_pool2d, conv2d, pad)")


def test_products_of_steps_each_for_itself():
    def forward(net: nn.Module, x: Tensor) -> Tensor:
        x = net.linear(x.expand(T, *x.shape))
        return fire(x @ x.transpose(-1, -2))

    with torch.no_grad():
        (found,) = checked(Net(forward), image(side=8))
    assert found.reason == "static stem: 2 operators run once instead of 4 times (linear, matmul)"


# ---- what stays -------------------------------------------------------------------------------------------------


def _repeated(x: Tensor) -> Tensor:
    return x.unsqueeze(0).repeat(T, 1, 1, 1, 1)


def _step_written(net: nn.Module, x: Tensor) -> Tensor:
    seen = _repeated(x)
    seen[1].add_(1)
    return over_time(net, seen)


def _result_written(net: nn.Module, x: Tensor) -> Tensor:
    y = net.conv(_repeated(x).flatten(0, 1)).unflatten(0, (T, -1))
    y[1] += 1
    return fire(y)


def _noise(net: nn.Module, x: Tensor) -> Tensor:
    return over_time(net, F.dropout(_repeated(x), 0.5, True) * 0 + torch.arange(T).view(T, 1, 1, 1, 1))


def _of_steps(net: nn.Module, x: Tensor) -> Tensor:
    """Every step has weights of its own."""
    y = net.conv(_repeated(x).flatten(0, 1)).unflatten(0, (T, -1))
    return fire(y * torch.arange(T).view(T, 1, 1, 1, 1))


def _over_steps(net: nn.Module, x: Tensor) -> Tensor:
    """A convolution whose depth is time."""
    weight = net.conv.weight.unsqueeze(2).expand(-1, -1, 2, -1, -1)
    return fire(F.conv3d(_repeated(x).permute(1, 2, 0, 3, 4), weight).permute(2, 0, 1, 3, 4))


STAYS: dict[str, tuple[Forward, str]] = {
    "a step is written to": (_step_written, ""),
    "the result is written to": (_result_written, "conv2d is written to in place"),
    "time is the depth": (_over_steps, "conv3d reads several steps at once"),
    "another input at each step": (lambda net, x: over_time(net, torch.stack([x, x + 1, x, x])), ""),
    "the result is returned": (lambda net, x: net.conv(_repeated(x).flatten(0, 1)), "is returned"),
    "random": (_noise, ""),
    "no layer": (lambda net, x: fire(_repeated(x)), ""),
}


@pytest.mark.parametrize(("forward", "reason"), STAYS.values(), ids=STAYS)
def test_what_cannot_run_once_stays(forward, reason):
    with torch.no_grad():
        sites = checked(Net(forward).eval(), image())
    assert not any(one.rewritten for one in sites)
    assert any(reason in one.reason for one in sites) if reason else not sites


def test_only_the_part_before_what_tells_steps_apart_runs_once():
    with torch.no_grad():
        (found,) = checked(Net(_of_steps), image())
    assert found.reason == "static stem: 1 operator runs once instead of 4 times (conv2d)"


def test_an_activation_in_place_stays_behind_the_stem():
    def forward(net: nn.Module, x: Tensor) -> Tensor:
        return fire(F.relu(stem(net, _repeated(x).flatten(0, 1)), inplace=True).unflatten(0, (T, -1)))

    with torch.no_grad():
        (found,) = checked(Net(forward).eval(), image())
    assert found.reason == "static stem: 1 operator runs once instead of 4 times (conv2d)"


def test_a_write_to_the_image_behind_the_stem_is_seen_outside():
    def forward(net: nn.Module, x: Tensor) -> Tensor:
        y = over_time(net, x.expand(T, *x.shape))
        x.mul_(2)
        return y

    net, x = Net(forward).eval(), image()
    with torch.no_grad():
        expected = net(x.clone())
        found, _ = rewritten(net, seen := x.clone(), strict=True)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    torch.testing.assert_close(seen, 2 * x, rtol=0, atol=0)


def test_an_operator_that_asks_how_its_input_lies_gets_it_as_it_was():
    strides = []

    @torch.library.custom_op("static_stem_test::reader", mutates_args=())
    def reader(x: Tensor) -> Tensor:
        strides.append(x.stride())
        return x.view(-1).clone()

    reader.register_fake(lambda x: x.new_empty(x.numel()))

    def forward(net: nn.Module, x: Tensor) -> Tensor:
        return reader(net.conv(_repeated(x).flatten(0, 1)).unflatten(0, (T, -1))) + 1

    with torch.no_grad():
        (found,) = checked(Net(forward), image())
    assert found.rewritten and len(strides) == 2 and strides[0] == strides[1]


def _steps(y: Tensor) -> Tensor:
    """What tells steps apart, and lies as its operand does."""
    return y.unflatten(0, (T, -1)) * torch.arange(T).view(T, 1, 1, 1, 1)


LAID_OUT: dict[str, Forward] = {
    "expanded, then viewed": lambda net, x: _steps(net.conv(x.expand(T, *x.shape).flatten(0, 1))).view(T, 2, -1),
    "batch before time": lambda net, x: _steps(net.conv(x.repeat(T, 1, 1, 1)).relu()).transpose(0, 1) + 1,
    "time moved behind": lambda net, x: (
        (net.conv(x.repeat(T, 1, 1, 1)).permute(1, 2, 3, 0) * torch.arange(2 * T)).permute(3, 0, 1, 2).view(2 * T, -1)
    ),
    "time last": lambda net, x: (
        net.conv(x.repeat(T, 1, 1, 1)).unflatten(0, (T, -1)).permute(1, 2, 3, 4, 0) * torch.arange(T)
    ),
    "time within the batch": lambda net, x: (
        net.conv(x.unsqueeze(1).expand(-1, T, -1, -1, -1).flatten(0, 1)).unflatten(0, (-1, T)).transpose(0, 1)
        * torch.arange(T).view(T, 1, 1, 1, 1)
    ),
}


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("forward", LAID_OUT.values(), ids=LAID_OUT)
def test_results_lie_as_eagers(forward, channels_last):
    net, x = Net(forward).eval(), image()
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
    with torch.no_grad():
        expected = net(x)
        found, report = rewritten(net, x, strict=True, implementation="auto")
    assert site(report, RULE).rewritten and found.stride() == expected.stride()
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_disabled():
    with torch.no_grad():
        assert not checked(Net(SPELLINGS["repeat"]).eval(), image(), disable=(RULE,))


# ---- training ---------------------------------------------------------------------------------------------------


def _sigmoid_fire(x: Tensor) -> Tensor:
    v, out = torch.zeros_like(x[0]), []
    for step in range(T):
        v = v / 2 + x[step]
        out.append(torch.sigmoid(v))
    return torch.stack(out)


TRAINED: dict[str, Forward] = {
    "repeat": lambda net, x: _sigmoid_fire(stem(net, _repeated(x).flatten(0, 1)).unflatten(0, (T, -1))),
    "expand": lambda net, x: _sigmoid_fire(stem(net, x.expand(T, *x.shape).flatten(0, 1)).unflatten(0, (T, -1))),
    "loop": lambda net, x: _sigmoid_fire(torch.stack([stem(net, x) for _ in range(T)])),
    "read twice": lambda net, x: _twice(stem(net, _repeated(x).flatten(0, 1))),
}


def _twice(seen: Tensor) -> Tensor:
    return _sigmoid_fire(F.relu(seen).unflatten(0, (T, -1))) + seen.unflatten(0, (T, -1)).cumsum(0)


@pytest.mark.parametrize("train", [False, True], ids=["evaluation", "training"])
@pytest.mark.parametrize("forward", TRAINED.values(), ids=TRAINED)
def test_gradients_and_statistics_are_eagers(forward, train):
    ours, theirs = Net(forward).train(train).double(), Net(forward).train(train).double()
    x, y = (image().double().requires_grad_() for _ in range(2))
    found, report = rewritten(ours, x, strict=True)
    expected = theirs(y)
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    (found * weight).sum().backward()
    (expected * weight).sum().backward()
    assert site(report, RULE).rewritten
    # in float64 batch-norm in training runs on every step
    assert ("batch_norm" in site(report, RULE).reason) is not train
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(x.grad, y.grad)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)
    for mine, other in zip(ours.buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["repeat", "expand", "read twice"])
@pytest.mark.parametrize("channels_last", [False, True])
def test_batch_norm_in_training_takes_its_statistics_of_one_step(name, channels_last):
    """The running variance is that of all elements, of which there are more than of one step."""
    ours, theirs = Net(TRAINED[name]).train(), Net(TRAINED[name]).train().double()
    if channels_last:
        ours = ours.to(memory_format=torch.channels_last)
    found, report = rewritten(ours, image(), strict=True)
    expected = theirs(image().double())
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    (found * weight).sum().backward()
    (expected * weight).sum().backward()
    assert "4 times (conv2d, batch_norm" in site(report, RULE).reason and "batch_norm(" not in report.graph_after
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        if other.grad is not None and mine is not ours.conv.bias:  # whose gradient is none but for rounding
            torch.testing.assert_close(mine.grad.double(), other.grad, rtol=1e-4, atol=1e-4)
    for mine, other in zip(ours.buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(mine.double(), other.double(), rtol=1e-5, atol=1e-6)


def test_gradients_of_a_part_without_gradients_stay_none():
    def forward(net: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            seen = _repeated(x).flatten(0, 1)
        return _sigmoid_fire(net.conv(seen).unflatten(0, (T, -1)))

    net, x = Net(forward), image().requires_grad_()
    found, report = rewritten(net, x, strict=True)
    found.sum().backward()
    assert site(report, RULE).rewritten and x.grad is None and net.conv.weight.grad is not None


def test_a_stem_under_autocast_runs_in_its_precision():
    def forward(net: nn.Module, x: Tensor) -> Tensor:
        seen = x.repeat(T, 1, 1, 1, 1)
        with torch.autocast("cpu", torch.bfloat16):
            y = stem(net, seen.flatten(0, 1))
        return fire(y.unflatten(0, (T, -1)))

    with torch.no_grad():
        (found,) = checked(Net(forward).eval(), image(), verify=False)
    assert found.rewritten


# ---- sizes that change ------------------------------------------------------------------------------------------


def _compiled(net: nn.Module, **how: Any) -> tuple[Callable[..., Tensor], list[Report]]:
    reports: list[Report] = []
    options = Options.parse(None, {"strict": True})

    def backend(gm, example_inputs):
        reports.append(Graph.of_dynamo(gm, example_inputs, {}, options).rewrite(options))
        return gm.forward

    torch._dynamo.reset()
    return torch.compile(net, backend=backend, **how), reports


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", SPELLINGS)
def test_one_graph_serves_every_batch(name):
    net = Net(SPELLINGS[name]).eval()
    first = image(T)  # as large as T: sizes are told apart by their symbols
    torch._dynamo.mark_dynamic(first, 0)
    compiled, reports = _compiled(net)
    with torch.no_grad():
        for x in (first, image(5), image(7)):
            torch.testing.assert_close(compiled(x), net(x), rtol=0, atol=0)
    assert len(reports) == 1 and site(reports[0], RULE).rewritten


def test_a_batch_in_the_place_of_time_is_not_taken_for_it():
    """At a batch of T both readings have the same shapes."""

    def forward(net: nn.Module, x: Tensor) -> Tensor:
        y = net.conv(x.repeat(T, 1, 1, 1))
        return fire(y.view(x.shape[0], T, 8, 8, 8).transpose(0, 1))

    net, first = Net(forward), image(T)
    torch._dynamo.mark_dynamic(first, 0)
    compiled, _ = _compiled(net)
    with torch.no_grad():
        for x in (first, image(5)):
            torch.testing.assert_close(compiled(x), net(x), rtol=0, atol=0)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", ["repeat", "stack", "repeat of the batch", "batch first"])
@pytest.mark.usefixtures("op_by_op")
def test_a_traced_model_takes_every_batch(name):
    net = Net(SPELLINGS[name]).eval()
    with torch.no_grad():
        found = sparsecomp.optimize(net, image(T), strict=True)
        for x in (image(T), image(5), image(6)):
            torch.testing.assert_close(found(x), net(x), rtol=0, atol=0)
    if name != "batch first":
        assert site(found.report, RULE).rewritten


# ---- through Inductor, and with the fused neuron ----------------------------------------------------------------


@pytest.mark.slow(reason="compiles through Inductor")
@pytest.mark.parametrize("name", ["repeat", "expand", "one image"])
def test_through_inductor(name):
    net = Net({**SPELLINGS, **LOOPS}[name]).eval()
    torch._dynamo.reset()
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(net, backend="sparsecomp")(image()), net(image()))


def test_the_fused_neuron_reads_one_step_without_a_copy():
    pytest.importorskip("spikingjelly._ops.lif")
    neuron = pytest.importorskip("spikingjelly.activation_based.neuron")

    def forward(net: nn.Module, x: Tensor) -> Tensor:
        return net.neuron(stem(net, _repeated(x).flatten(0, 1)).view(T, -1, 8, 8, 8))

    net = Net(forward).eval()
    net.neuron = neuron.LIFNode(step_mode="m")
    with torch.no_grad():
        expected = net(image())
        net.neuron.reset()
        found, report = rewritten(net, image(), neurons="fuse")
        assert site(report, RULE).rewritten and site(report, "fuse_neurons").rewritten
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert not [one for one in report.after if "clone" in one.name]


@pytest.mark.parametrize("channels_last", [False, True])
def test_the_neurons_kernel_reads_one_step_at_all_times(channels_last):
    pytest.importorskip("triton")
    x = 3 * torch.randn(1, 2, 3, 5, 4, generator=torch.Generator().manual_seed(0))
    if channels_last:
        x = x[0].contiguous(memory_format=torch.channels_last)[None]
    seen = x.expand(T, -1, -1, -1, -1)
    rest = (None, 0.0, None, None, None, None, 0.0, "lif", 2.0, None, True, 1.0, 0.0)
    found, expected = neurons.launch_lif(seen, *rest), lif_reference(seen.contiguous(), *rest)
    assert found[0].any() and found[0].stride() == torch.empty_like(seen).stride()
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


# ---- real networks ----------------------------------------------------------------------------------------------


class Shown(nn.Module):
    """A network that is shown an image T times."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.unsqueeze(0).repeat(T, 1, 1, 1, 1))


def _network(monkeypatch: pytest.MonkeyPatch, module: str, build: Callable[[Any, Any], nn.Module]) -> nn.Module:
    library = "spikingjelly.activation_based"
    pytest.importorskip(library)
    stub_torchvision(monkeypatch)
    torch.manual_seed(0)
    net = build(importlib.import_module(f"{library}.model.{module}"), importlib.import_module(f"{library}.neuron"))
    importlib.import_module(f"{library}.functional").set_step_mode(net, "m")
    return dyadic(Shown(net)).eval()


def _sew(zoo: Any, neuron: Any) -> nn.Module:
    return zoo.sew_resnet18(spiking_neuron=neuron.IFNode, cnf="ADD", num_classes=4)


def _vgg(zoo: Any, neuron: Any) -> nn.Module:
    with torch.device("meta"):
        layers = [8, "M", 8]
        net = zoo.SpikingVGG(layers, True, num_classes=4, init_weights=False, spiking_neuron=neuron.LIFNode)
    net.classifier = nn.Identity()
    return net.to_empty(device="cpu")


def _spikformer(zoo: Any, neuron: Any) -> nn.Module:
    return zoo.Spikformer(
        T=T, img_size_h=16, img_size_w=16, patch_size=4, num_classes=4, embed_dims=32, num_heads=2, depths=1
    )


NETWORKS = {
    "SEW-ResNet-18": ("sew_resnet", _sew, 32),
    "spiking VGG": ("spiking_vgg", _vgg, 16),
    "Spikformer": ("spikformer", _spikformer, 16),
}


@pytest.mark.slow(reason="compiles a network")
@pytest.mark.parametrize(("module", "build", "side"), NETWORKS.values(), ids=NETWORKS)
def test_real_networks_see_their_image_once(module, build, side, monkeypatch):
    net = _network(monkeypatch, module, build)
    for buffer in net.buffers():
        if buffer.is_floating_point():
            buffer.fill_(1.0 if buffer.min() == 1 or module == "spiking_vgg" else 0.0)
    reset = importlib.import_module("spikingjelly.activation_based.functional").reset_net
    x = image(2, side)
    with torch.no_grad():
        expected = net(x)
        reset(net)
        found, report = rewritten(net, x, strict=True, neurons="fuse", implementation="auto")
    torch.testing.assert_close(found, expected)
    (stem_site,) = (one for one in report.sites if one.rule == RULE and one.rewritten)
    assert "conv2d" in stem_site.reason and "once instead of 4 times" in stem_site.reason


def test_statistics_that_were_read_before_are_left_to_batch_norm():
    """Its backward keeps them, and finds a write that autograd sees."""

    def forward(net: nn.Module, x: Tensor) -> Tensor:
        other = stem(net, torch.cat([x, x + 1, x * 2, x - 1]))
        return fire(other.unflatten(0, (T, -1))) * over_time(net, x.unsqueeze(0).repeat(T, 1, 1, 1, 1)) + other.mean()

    net = Net(forward).train()
    found, _ = rewritten(net, image(), strict=True, implementation="auto")
    weights = [net.conv.weight, net.norm.weight]
    for ours, eager in zip(
        torch.autograd.grad(found.sum(), weights), torch.autograd.grad(net(image()).sum(), weights), strict=True
    ):
        torch.testing.assert_close(ours, eager)


def test_two_passes_over_one_image_move_statistics_twice():
    """Both read the one convolution that is left of two."""

    def forward(net: nn.Module, x: Tensor) -> Tensor:
        once, again = (over_time(net, x.unsqueeze(0).repeat(T, 1, 1, 1, 1)) for _ in range(2))
        return once + again

    nets = [Net(forward).train() for _ in range(2)]
    expected, (found, _) = nets[0](image()), rewritten(nets[1], image(), strict=True, implementation="auto")
    torch.testing.assert_close(found, expected)
    for ours, eager in zip(nets[1].buffers(), nets[0].buffers(), strict=True):
        torch.testing.assert_close(ours, eager)
