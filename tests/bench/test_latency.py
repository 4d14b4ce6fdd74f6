"""The benchmark of latency, on the CPU: what its rivals are, and that its rows hold what they say."""

from typing import Any

import pytest
import torch
from torch import nn

from bench.parallel import gathered
from bench.spiking import latency
from bench.spiking.latency import Case, HandWritten, Leaky, ann_of

TINY = Case("hand_written", 3, 2, "cpu", 8)


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency, "HandWritten", lambda: HandWritten((4, 8)))


def test_the_network_fires_and_its_ann_has_relu_for_neurons() -> None:
    net, x = latency.network(TINY)
    assert x.shape == (3, 2, 3, 8, 8)
    assert len(latency.rates(net, x)) == 2 and all(0.02 < rate < 0.6 for rate in latency.rates(net, x))
    ann = ann_of(net)
    with torch.no_grad():
        y: Any = x[0]
        for layer, norm in zip(net.layers, net.norms, strict=True):
            y = norm(layer(y)).relu()
        torch.testing.assert_close(ann(x[:1]), net.head(y.mean((2, 3))))
    assert any(isinstance(module, Leaky) for module in net.modules()), "the network itself stays"


def test_a_neuron_alone_fires_as_its_equations_say() -> None:
    net, x = latency.network(TINY._replace(name="neuron"))
    v, expected = torch.zeros_like(x[0]), []
    for step in x:
        v = 0.5 * v + step
        expected.append((v >= 1).float())
        v = v - expected[-1]
    assert torch.equal(net(x), torch.stack(expected)) and 0 < net(x).mean() < 1
    assert torch.equal(ann_of(net)(x[:1]), x[:1].relu())


def test_the_ann_of_a_librarys_network() -> None:
    neuron = pytest.importorskip("spikingjelly.activation_based.neuron")
    net = nn.Sequential(nn.Linear(3, 3), neuron.LIFNode(step_mode="m"))
    x = torch.randn(1, 2, 3)
    torch.testing.assert_close(ann_of(net)(x), net[0](x).relu())


def test_each_rival_of_a_case_is_compiled_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(latency, "measured", lambda prepare, calls, workers, **more: asked.extend(calls) or [])
    assert not [*latency.run(["hand_written", "spikformer"], ["default"], [1], [1, 8], workers=3)]
    assert len(asked) == len(set(asked)) == 2 * (5 + 3)
    assert {one.rival for one in asked if one.case.name == "spikformer"} == {"stock", "ANN", "sparsecomp"}


@pytest.mark.slow(reason="compiles five networks")
@pytest.mark.every_case
def test_rows_have_all_rivals_and_say_what_was_fused() -> None:
    calls = [latency.Call(TINY, rival, "default") for rival in latency.rivals(TINY)]
    *_, row = gathered([latency.prepared(call)() for call in calls], ("network", "steps", "batch"))
    assert (row["network"], row["steps"], row["batch"]) == ("hand_written", 3, 2) and len(row["rates"]) == 2
    assert set(row["ms"]) == {f"{rival}, default" for rival in latency.RIVALS}
    assert "left out" not in row and all(ms > 0 for ms in row["ms"].values())
    fused = {name: sites.count("unrolled_neurons: fused") for name, sites in row["sites"].items()}
    assert fused == {"sparsecomp, default": 0, "loop fused, default": 2, "layers fused, default": 0}
    assert "fuse_steps: batched" in row["sites"]["layers fused, default"]
    header, _, line, *_ = latency.table([row]).splitlines()
    assert header.count("|") == line.count("|") and "(" in line
