"""`python -m sparsecomp demo`: what it prints, and that a forced rewrite changes no prediction."""

import contextlib
import io
import json

import pytest
import torch
from torch import nn

from sparsecomp import demo
from sparsecomp.__main__ import main

SLOW = pytest.mark.slow(reason="trains or compiles a network")

pytest.importorskip("sklearn")

IMPLEMENTATION = "binary"


@pytest.fixture(scope="module")
def run() -> dict:
    """One run of the command, with the rewrite forced, as JSON."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = main(["demo", "--device", "cpu", "--implementation", IMPLEMENTATION, "--json"])
    return {"code": code, **json.loads(printed.getvalue())}


@SLOW
def test_learns_and_compiles_without_failures(run: dict) -> None:
    assert run["code"] == 0 and run["failures"] == []
    assert run["accuracy_eager"] > 0.9
    assert run["accuracy_compiled"] == pytest.approx(run["accuracy_eager"], abs=demo.MAX_FLIPS)


@SLOW
def test_layers_on_spikes_are_rewritten_and_the_one_on_pixels_is_not(run: dict) -> None:
    layers = {site["module"]: site for site in run["report"]["sites"] if site["rule"] in ("spike_conv", "spike_linear")}
    assert {name: site["rewritten"] for name, site in layers.items()} == {"conv1": False, "conv2": True, "linear": True}
    assert layers["conv2"]["implementation"] == IMPLEMENTATION
    assert "not proved to be spikes" in layers["conv1"]["reason"]
    assert "demo.py" in layers["conv2"]["location"]


@SLOW
def test_densities_are_measured(run: dict) -> None:
    assert set(run["densities"]) >= {"conv2", "linear"}
    assert all(0 < density < 1 for density in run["densities"].values())


@SLOW
def test_says_why_a_cpu_stays_dense(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(demo, "train", lambda x, y: demo.DigitsNet().eval())
    monkeypatch.setattr(demo, "MIN_ACCURACY", 0.0)
    assert demo.run(device="cpu") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "0 of" in text
    assert "dense is faster on the CPU" in " ".join(text.replace("│", " ").split())
    assert "predictions differ" in text and "ms" in text


@SLOW
def test_an_untrained_network_and_a_wrong_compiler_fail() -> None:
    class Wrong(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            flip = torch.compiler.is_compiling()
            return torch.eye(10)[[3 if flip else 2]].expand(len(x), 10)

    outcome = demo.compare(Wrong().eval(), torch.zeros(4, 1, 8, 8), torch.tensor([2, 2, 2, 2]))
    assert outcome.flips == 4
    assert [failure.split(" ")[0] for failure in outcome.failures] == ["compiled"]
    outcome.accuracy_eager = 0.3
    assert any("learnt too little" in failure for failure in outcome.failures)


def test_the_split_is_the_same_every_time_and_disjoint() -> None:
    first, second = demo.digits(), demo.digits()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert len(first[0]) + len(first[2]) == 1797 and len(first[2]) == 359


def test_training_leaves_the_global_random_stream_alone() -> None:
    x, y, _, _ = demo.digits()
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    demo.train(x[:32], y[:32], epochs=1)
    assert torch.equal(torch.rand(3), expected)


def test_gradient_of_fire_is_the_surrogate() -> None:
    membrane = torch.tensor([-0.5, 0.0, 2.0], requires_grad=True)
    spikes = demo.Fire.apply(membrane)
    spikes.sum().backward()
    assert spikes.tolist() == [0.0, 1.0, 1.0]
    assert membrane.grad is not None
    torch.testing.assert_close(membrane.grad, 1 / (1 + (torch.pi * membrane.detach()) ** 2))


def test_the_network_gives_rates_of_each_class() -> None:
    x = torch.rand(3, 1, 8, 8)
    with torch.no_grad():
        rates = demo.DigitsNet(width=4, votes=8)(x)
    assert rates.shape == (3, demo.CLASSES) and rates.min() >= 0 and rates.max() <= 1
    counts = rates * demo.TIME_STEPS * 8  # of 8 neurons that fire or not at each step
    torch.testing.assert_close(counts, counts.round())


def test_lif_by_hand() -> None:
    # v: 0.6, 0.3 + 0.6 = 0.9, 0.45 + 0.6 = 1.05 fires, reset, 0.6
    spikes = demo.LIF()(torch.full((4, 1), 0.6))
    assert spikes.flatten().tolist() == [0.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize("arguments", [[], ["train"], ["demo", "--implementation", "bianry"]])
def test_bad_arguments_exit_with_two(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_a_missing_compiler_is_told_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def compare(*_: object) -> None:
        raise RuntimeError("InvalidCxxCompiler: No working C++ compiler found in torch._inductor.config.cpp.cxx")

    monkeypatch.setattr(demo, "train", lambda *_: nn.Identity())
    monkeypatch.setattr(demo, "compare", compare)
    assert main(["demo", "--device", "cpu"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "error: torch.compile found no C++ compiler, which a CPU needs: install g++, or set CXX"
    ]
