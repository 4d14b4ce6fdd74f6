"""The benchmark of training steps, on the CPU: a row says which network, steps, batch and rivals its figures are of."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparsecomp
from bench.parallel import gathered
from bench.spiking import snn_training
from bench.spiking.handwritten import Handwritten
from bench.spiking.snn_training import Case


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    neuron = pytest.importorskip("spikingjelly.activation_based.neuron")
    layer = pytest.importorskip("spikingjelly.activation_based.layer")

    def network(name: str, steps: int) -> nn.Module:
        conv = layer.Conv2d(3, 4, 3, step_mode="m")
        head = layer.SeqToANNContainer(nn.Flatten(), nn.Linear(4 * 6 * 6, 10))
        return nn.Sequential(conv, neuron.LIFNode(step_mode="m"), head)

    monkeypatch.setattr(snn_training, "network", network)
    monkeypatch.setattr(snn_training, "NETWORKS", {"tiny": (2, 8)})
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 << 20)


def test_all_rivals_of_a_network_are_asked_for_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(snn_training, "measured", lambda prepare, cases, workers, **more: asked.extend(cases) or [])
    assert not [*snn_training.run(["default"], ["tiny"], ["tf32"], [1, 4], [8])]
    assert {(one.steps, one.batch, one.rival) for one in asked} == {
        (steps, 8, rival) for steps in (1, 4) for rival in snn_training.RIVALS
    }


@pytest.mark.slow(reason="compiles four networks")
@pytest.mark.every_case
def test_rows_have_all_rivals() -> None:
    cases = [Case("tiny", "tf32", 2, 2, "default", rival, "cpu") for rival in snn_training.RIVALS]
    *_, row = gathered([snn_training.prepared(case)() for case in cases], ("network", "precision", "steps", "batch"))
    assert "left out" not in row and (row["steps"], row["batch"]) == (2, 2)
    assert set(row["ms"]) == set(row["MiB"]) == {f"{rival}, default" for rival in snn_training.RIVALS}
    assert set(row["sites"]) == {f"{rival}, default" for rival in snn_training.RIVALS if "sparsecomp" in rival}
    header, _, line, *_ = snn_training.table([row]).splitlines()
    assert header.count("|") == line.count("|") and " MiB (" in line


@pytest.mark.parametrize("norm", [False, pytest.param(True, marks=pytest.mark.slow(reason="traces a network"))])
def test_the_network_that_is_written_by_hand_fires_and_is_fused(norm: bool) -> None:
    """A dead network's times mean nothing."""
    torch.manual_seed(0)
    model, rates = Handwritten(16, norm=norm), []

    def count(_: Any, inputs: tuple[Tensor, ...]) -> None:
        rates.append(float((inputs[0] == 1).float().mean()))

    for layer in (*model.convolutions[1:], model.head):
        layer.register_forward_pre_hook(count)
    x = torch.rand(2, 3, 32, 32).expand(4, 2, 3, 32, 32)
    model(x)
    assert all(0.05 < sum(rates[layer::3]) / 4 < 0.35 for layer in range(3))
    report = sparsecomp.explain(Handwritten(16, norm=norm), x, options={"neurons": "fuse"})
    assert [one.rewritten for one in report.sites if one.rule == "unrolled_neurons"] == [True] * 3
