"""What a training graph keeps between forward and backward: counted against arithmetic, gradients against eager's.

Partitioned graphs run op by op, so that a case takes no code generation; one test goes through Inductor.
"""

import copy
import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch._inductor.lowering  # torch 2.11 decomposes pooling by what stands there, and does not load it
import torch.nn.functional as F
from functorch.compile import min_cut_rematerialization_partition
from rewriting import Surrogate
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch.utils.checkpoint import checkpoint

import sparsecomp
from sparsecomp.passes.spiking import saved_spikes

pytestmark = pytest.mark.quick_cases(1)

STEPS, BATCH, CHANNELS, SIZE = 4, 2, 8, 16


class Arctan(Surrogate):
    """A step whose gradient needs the membrane."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grads[0] / (1 + (3 * x) ** 2)


class Neurons(nn.Module):
    """Leaky neurons with a detached hard reset, that see their time steps one by one."""

    def forward(self, x: Tensor) -> Tensor:
        v, fired = 0.0, []
        for current in x.unbind(0):
            h = v + (current - v) / 2
            spike = Arctan.apply(h - 0.25)
            v = h * (1 - spike.detach())
            fired.append(spike)
        return torch.stack(fired)


class Net(nn.Module):
    """Convolutions with batch-norm and neurons; `link` makes of spikes what the next convolution reads."""

    def __init__(self, link: Callable[[Tensor], Tensor] = lambda s: s, layers: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        widths = [3, *[CHANNELS] * (layers - 1)]
        self.convs = nn.ModuleList(nn.Conv2d(width, CHANNELS, 3, padding=1, bias=False) for width in widths)
        self.norms = nn.ModuleList(nn.BatchNorm2d(CHANNELS) for _ in self.convs)
        self.neurons, self.link = Neurons(), link

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = x if conv is self.convs[0] else self.link(x)
            steps = x.shape[:2]
            x = self.neurons(norm(conv(x.flatten(0, 1))).unflatten(0, steps))
        return x.flatten(2).mean(2)


class Graphs:
    """A backend that partitions as ours does, or as torch does (`memory=None`), and keeps what it made."""

    def __init__(self, memory: str | None) -> None:
        self.memory = memory
        self.forward: list[fx.GraphModule] = []

    def __call__(self, gm: fx.GraphModule, inputs: list[Any]) -> Any:
        run = aot_autograd(
            fw_compiler=lambda graph, _: self.forward.append(graph) or graph, bw_compiler=lambda graph, _: graph,
            partition_fn=self.partition, decompositions=select_decomp_table(),
        )  # fmt: skip
        return run(gm, inputs)

    def partition(self, joint: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        self.results = kwargs["num_fwd_outputs"]
        split = functools.partial(min_cut_rematerialization_partition, joint, inputs, **kwargs)
        if self.memory is None:
            return split()
        return saved_spikes.partitioned(joint, split, self.results, self.memory == "low")

    @property
    def kept(self) -> list[Tensor]:
        """Stand-ins for what the first forward made for its backward, of more than one number a channel."""
        values: Any = self.forward[0].graph.output_node().args[0]
        made = [node.meta["val"] for node in values[self.results :] if node.op == "call_function"]
        return [value for value in made if isinstance(value, torch.Tensor) and value.numel() > CHANNELS]


def bytes_of(kept: list[Tensor]) -> int:
    return sum(int(value.numel()) * value.element_size() for value in kept)


def stepped(
    model: nn.Module, x: Tensor, memory: str | None, context: Any = nullcontext, **options: Any
) -> tuple[Graphs, dict[str, Tensor]]:
    """The graphs of a training step, and its gradients."""
    torch._dynamo.reset()
    graphs, model = Graphs(memory), copy.deepcopy(model)
    torch.manual_seed(1)
    with context():
        out = torch.compile(model, backend=graphs, **options)(x)
    (out.float() * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
    return graphs, {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


def images(steps: int = STEPS) -> Tensor:
    return torch.rand(steps, BATCH, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0))


ELEMENTS = STEPS * BATCH * CHANNELS * SIZE * SIZE
IMAGES = 4 * STEPS * BATCH * 3 * SIZE * SIZE


@pytest.mark.slow(reason="Inductor compiles")
@pytest.mark.parametrize(
    ("memory", "expected"),
    # three convolutions of floats, two maps of spikes of which a byte holds one element of each of four time steps
    [("auto", IMAGES + 3 * 4 * ELEMENTS + 2 * ELEMENTS // 4), ("low", IMAGES + 2 * ELEMENTS // 4)],
)
def test_bytes_kept_are_those_of_convolutions_and_bits(memory, expected):
    model = Net()
    stock, eager = stepped(model, images(), None)
    # and floats of spikes and of membranes
    assert bytes_of(stock.kept) == IMAGES + 3 * 4 * ELEMENTS + 2 * 4 * ELEMENTS + 3 * 4 * ELEMENTS
    ours, found = stepped(model, images(), memory)
    assert bytes_of(ours.kept) == expected
    assert all(torch.equal(found[name], grad) and grad.abs().max() > 0 for name, grad in eager.items())


# the backward of torch 2.11 asks for what a maximum was taken of: its spikes are kept too, four time steps to a byte
_POOLED = (1 / 2, 1 / 4 + 1 / 32) if torch.__version__ < (2, 12) else (1 / 4, 1 / 32)
LINKS: dict[str, tuple[Callable[[Tensor], Tensor], float | None, float | None]] = {
    "pooled": (lambda s: F.max_pool2d(s.flatten(0, 1), 2).unflatten(0, s.shape[:2]), *_POOLED),
    "averaged": (lambda s: F.avg_pool2d(s.flatten(0, 1), 2).unflatten(0, s.shape[:2]), 1 / 2, 3 / 8),
    "spread": (lambda s: F.adaptive_avg_pool2d(s.flatten(0, 1), 2 * SIZE).unflatten(0, s.shape[:2]), 17 / 4, 3 / 4),
    "added": (lambda s: s + s.transpose(3, 4), 1, 1 / 4),
    "doubled": (lambda s: s * 2, 1, 1 / 4),
    "many": (lambda s: s * 19 + s.transpose(3, 4), 1, 1),
    "dropped": (lambda s: F.dropout(s, 0.5), 1, None),
    "channels last": (lambda s: to_channels_last(s.flatten(0, 1)).unflatten(0, s.shape[:2]), 1, 1 / 8),
    "third": (lambda s: s / 3, 0, 0),
    "negative": (lambda s: s - s.transpose(3, 4), 0, 0),
    "strided": (lambda s: s.transpose(3, 4), 0, 0),
    "sums": (lambda s: s.cumsum(0) / 7, 0, 0),
}
"""What the next convolution reads, and the bytes kept of spikes for each element of a map, by default and low: of an
average also the map itself, of which four time steps share a byte."""


def to_channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(("memory", "expected"), [("auto", IMAGES + 2 * 4 * ELEMENTS), ("low", 0)])
def test_an_image_that_is_shown_at_all_steps_is_kept_once(memory: str, expected: int) -> None:
    """A copy of it for each step is made again in the backward, where memory is to be low."""
    model, x = Net(layers=2), images(1).expand(STEPS, -1, -1, -1, -1)
    _, eager = stepped(model, x, None)
    ours, found = stepped(model, x, memory)
    assert bytes_of(ours.kept) == expected + ELEMENTS // 4  # and the spikes
    assert all(torch.equal(found[name], grad) and grad.abs().max() > 0 for name, grad in eager.items())


@pytest.mark.parametrize("memory", ["auto", "low"])
@pytest.mark.parametrize("link", LINKS)
def test_what_is_made_of_spikes_is_kept_in_its_fewest_bits(link, memory):
    make, *shares = LINKS[link]
    model, share = Net(make, layers=2), shares[memory == "low"]
    _, expected = stepped(model, images(), None)
    ours, found = stepped(model, images(), memory)
    assert all(torch.equal(found[name], grad) for name, grad in expected.items())
    assert share is None or spike_bytes(ours) == ELEMENTS * share


def spike_bytes(graphs: Graphs) -> int:
    return bytes_of([value for value in graphs.kept if value.dtype is torch.uint8])


@pytest.mark.parametrize("memory", ["auto", "low"])
@pytest.mark.parametrize("steps", [1, 2, 3, 8, 10])
def test_any_number_of_time_steps(steps, memory):
    model = Net(layers=2)
    _, expected = stepped(model, images(steps), None)
    ours, found = stepped(model, images(steps), memory)
    assert all(torch.equal(found[name], grad) for name, grad in expected.items())
    elements = ELEMENTS // STEPS * steps
    # of one step, and of more than a byte has bits, a byte holds one element, or in the low mode one of equal slices
    low = memory == "low"
    assert spike_bytes(ours) == elements // {1: 2 if low else 1, 2: 2, 3: 3, 8: 8, 10: 4 if low else 1}[steps]


CONTEXTS = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "saved hooks": lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t),
}


@pytest.mark.parametrize("memory", ["auto", "low"])
@pytest.mark.parametrize("context", CONTEXTS)
def test_under(context, memory):
    stock, expected = stepped(Net(), images(), None, CONTEXTS[context])
    ours, found = stepped(Net(), images(), memory, CONTEXTS[context])
    assert all(torch.equal(found[name], grad) for name, grad in expected.items())
    assert bytes_of(ours.kept) < 0.8 * bytes_of(stock.kept)


@pytest.mark.parametrize("memory", ["auto", "low"])
@pytest.mark.slow(reason="compiles a network")
def test_half_precision(memory):
    model = Net().to(torch.bfloat16)
    _, expected = stepped(model, images().bfloat16(), None)
    _, found = stepped(model, images().bfloat16(), memory)
    assert all(torch.equal(found[name], grad) for name, grad in expected.items())


@pytest.mark.parametrize("memory", ["auto", "low"])
@pytest.mark.slow(reason="compiles a network for each size")
def test_a_batch_of_any_size(memory):
    def trained(graphs: Graphs) -> Net:
        torch._dynamo.reset()
        model = Net(layers=2)
        compiled = torch.compile(model, backend=graphs)
        for batch in (4, 6):  # gradients add up
            x = torch.rand(STEPS, batch, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(batch))
            torch._dynamo.mark_dynamic(x, 1)
            compiled(x).sum(0).square().sum().backward()
        return model

    theirs, ours = Graphs(None), Graphs(memory)
    for expected, found in zip(trained(theirs).parameters(), trained(ours).parameters(), strict=True):
        assert found.grad is not None and expected.grad is not None and torch.equal(found.grad, expected.grad)
    assert len(ours.forward) == len(theirs.forward) and spike_bytes(ours) > 0


@pytest.mark.parametrize("memory", ["auto", "low"])
@pytest.mark.slow(reason="compiles a network twice")
def test_checkpoints_of_the_user_stay(memory):
    class Checkpointed(Net):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)

    stock, expected = stepped(Checkpointed(), images(), None)
    ours, found = stepped(Checkpointed(), images(), memory)
    assert all(torch.equal(found[name], grad) for name, grad in expected.items())
    assert bytes_of(ours.kept) <= bytes_of(stock.kept)


@pytest.mark.parametrize("memory", [None, "auto", "low"])
def test_what_the_user_writes_to_is_missed_as_ever(memory):
    class Returned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            spikes = Surrogate.apply(self.first(x))
            return self.second(spikes), spikes

    torch._dynamo.reset()
    out, spikes = torch.compile(Returned(), backend=Graphs(memory))(torch.randn(8, 4))
    with torch.no_grad():
        spikes.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.slow(reason="compiles training")
@pytest.mark.parametrize(("memory", "share"), [("auto", 0.45), ("low", 0.15)])
def test_through_inductor_less_is_saved(memory, share):
    def step(backend: str, **options: Any) -> tuple[int, list[Tensor]]:
        torch._dynamo.reset()
        saved: list[Tensor] = []
        model = Net()
        own = {one.data_ptr() for one in model.parameters()}
        compiled = torch.compile(model, backend=backend, options=options)
        compiled(images())
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            out = compiled(images())
        (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
        return bytes_of([one for one in saved if one.data_ptr() not in own]), [p.grad for p in model.parameters()]

    stock, expected = step("inductor")
    ours, found = step("sparsecomp", memory=memory)
    assert ours <= share * stock
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("trains", "spikes"), [(True, True), (True, False), (False, True)])
def test_only_a_spiking_network_that_trains_is_partitioned(monkeypatch, trains, spikes):
    seen: list[Any] = []

    def compile_fx(gm: fx.GraphModule, inputs: Any, mode: str, patches: Any, table: Any, partition: Any = None) -> Any:
        seen.append(partition)
        return gm.forward

    monkeypatch.setattr("sparsecomp._compat.compile_fx", compile_fx)
    torch._dynamo.reset()
    model = Net() if spikes else nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    with torch.set_grad_enabled(trains):
        torch.compile(model, backend="sparsecomp")(images() if spikes else torch.ones(1, 4))
    assert [one is not None for one in seen] == [trains and spikes]
    report = sparsecomp.last_report()
    assert report is not None
    assert any("gets spikes as bits" in note for note in report.notes) == (trains and spikes)
