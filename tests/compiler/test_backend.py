"""torch.compile(backend="sparsecomp") end to end, through Inductor."""

import copy
import logging
import re

import pytest
import torch
from rewriting import AttributeLIF, ConvNet, OnSpikes, SurrogateLIF, dyadic, site
from torch import nn

import sparsecomp
from sparsecomp import _compat
from sparsecomp.compiler import backend
from sparsecomp.nn import SparseLinear


def _input(batch: int = 2, seed: int = 0) -> torch.Tensor:
    return 4 * torch.randn(batch, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def _reset(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, AttributeLIF):
            module.v = None


@pytest.mark.slow(reason="Inductor compiles a whole network")
def test_a_spiking_network_end_to_end():
    eager = dyadic(ConvNet()).eval()
    model = copy.deepcopy(eager)
    compiled = torch.compile(model, backend="sparsecomp", options={"implementation": "binary"}, fullgraph=True)
    with torch.no_grad():
        for round in range(2):
            for call in range(3):
                x = _input(seed=3 * round + call)
                torch.testing.assert_close(compiled(x), eager(x), rtol=0, atol=0)
            _reset(eager), _reset(model)
    report = sparsecomp.last_report()
    assert [found.rewritten for found in report.sites if found.rule.startswith("spike_")] == [False, True, True]


@pytest.mark.slow(reason="compiles training")
def test_training_end_to_end():
    eager = dyadic(ConvNet(SurrogateLIF))
    model = copy.deepcopy(eager)
    x = _input()
    eager(x).square().sum().backward()
    compiled = torch.compile(model, backend="sparsecomp", options={"implementation": "binary"})
    compiled(x).square().sum().backward()
    assert site(sparsecomp.last_report(), "spike_conv").rewritten
    for p, q in zip(eager.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.quick_cases(1)
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU may rewrite this network")
@pytest.mark.parametrize("strategy", ["event", "skip"])
@pytest.mark.parametrize("layer", [nn.Conv2d(16, 16, 3, padding=1), nn.Linear(8, 16)], ids=["conv2d", "linear"])
@pytest.mark.slow(reason="Inductor compiles forward and backward")
def test_event_and_skip_go_through_inductor_with_gradients(strategy, layer):
    model, x = OnSpikes(dyadic(layer)), torch.randn(2, 16, 8, 8, generator=torch.Generator().manual_seed(0))
    expected = model(x)
    seed = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    gradients = torch.autograd.grad(expected, layer.parameters(), seed)
    found = torch.compile(model, backend="sparsecomp", options={"implementation": strategy})(x)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    for ours, eager in zip(torch.autograd.grad(found, layer.parameters(), seed), gradients, strict=True):
        torch.testing.assert_close(ours, eager)
    rule = "spike_conv" if isinstance(layer, nn.Conv2d) else "spike_linear"
    assert site(sparsecomp.last_report(), rule).implementation == strategy


def test_without_a_rewrite_inductor_gets_the_graph_untouched(monkeypatch):
    seen = []

    def compile_fx(gm, inputs, mode, patches, decompositions):
        seen.append((gm.code, mode, dict(patches), decompositions))
        return gm.forward

    monkeypatch.setattr(_compat, "compile_fx", compile_fx)
    graphs = []
    model, x = OnSpikes(nn.Conv2d(16, 16, 3)), torch.randn(1, 16, 6, 6)
    with torch.no_grad():
        torch.compile(model, backend=lambda gm, _: graphs.append(gm.code) or gm)(x)
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(model, backend="sparsecomp")(x)
    assert seen == [(graphs[0], "default", {}, None)]
    assert any("no CUDA device" in note for note in sparsecomp.last_report().notes)


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune-no-cudagraphs"])
def test_modes_mean_what_they_mean_in_torch(monkeypatch, mode):
    from torch._inductor import compile_fx as module
    from torch._inductor import list_mode_options

    seen = []

    def inductor(gm, inputs, **settings):
        seen.append(settings)
        return gm.forward

    monkeypatch.setattr(module, "compile_fx", inductor)
    torch.compile(nn.Linear(4, 4), backend="sparsecomp", mode=mode)(torch.ones(1, 4))
    assert seen == [{"config_patches": list_mode_options(mode)}]


def test_inductor_options_reach_inductor(monkeypatch):
    seen = []
    monkeypatch.setattr(_compat, "compile_fx", lambda gm, i, mode, patches, d: seen.append(patches) or gm.forward)
    options = {"inductor": {"max_fusion_size": 3}}
    torch.compile(nn.Linear(4, 4), backend="sparsecomp", options=options)(torch.ones(1, 4))
    assert seen == [{"max_fusion_size": 3}]


def test_caches_are_keyed_by_our_sources_and_options(monkeypatch):
    tags = []

    def compile_fx(gm, *_):
        tags.append(torch.compiler.config.cache_key_tag)
        return gm.forward

    monkeypatch.setattr(_compat, "compile_fx", compile_fx)
    model, x = OnSpikes(nn.Conv2d(16, 16, 3)), torch.randn(1, 16, 6, 6)
    before = torch.compiler.config.cache_key_tag
    for precision in ("exact", "tf32"):
        torch._dynamo.reset()
        options = {"implementation": "binary", "precision": precision}
        torch.compile(model, backend="sparsecomp", options=options)(x)
    assert tags[0] != tags[1]
    as_written = SparseLinear.from_linear(nn.Linear(16, 16), sparsity=0.5)  # an operator of ours that no rule touches
    torch.compile(as_written, backend="sparsecomp", options={"disable": ("all",)})(torch.ones(1, 16))
    assert len(tags) == 3
    assert all(tag.startswith(before) and backend.sources_hash() in tag for tag in tags)
    assert torch.compiler.config.cache_key_tag == before


@pytest.mark.slow(reason="Inductor compiles twice")
@pytest.mark.skipif(
    torch.__version__.startswith("2.12."), reason="Inductor of torch 2.12 keeps no graph with decompositions of its own"
)
def test_compilation_caches_hit():
    from torch._inductor.utils import fresh_cache

    counters = torch._dynamo.utils.counters
    model, x = OnSpikes(nn.Conv2d(16, 16, 3)), torch.randn(1, 16, 6, 6)
    with torch.no_grad(), fresh_cache():
        for kind in ("miss", "hit"):
            torch._dynamo.reset()
            counters.clear()
            torch.compile(model, backend="sparsecomp", options={"implementation": "binary"})(x)
            assert site(sparsecomp.last_report(), "spike_conv").rewritten
            assert counters["aot_autograd"][f"autograd_cache_{kind}"] == 1


def test_no_break_and_no_recompile_that_inductor_does_not_have(monkeypatch):
    monkeypatch.setattr(_compat, "compile_fx", lambda gm, *_: gm.forward)

    def compilations(name) -> int:
        torch._dynamo.reset()
        counter = torch._dynamo.utils.counters
        counter.clear()
        model = dyadic(ConvNet()).eval()
        compiled = torch.compile(model, backend=name)
        with torch.no_grad():
            for batch in (2, 2, 1, 3):
                for _ in range(2):
                    compiled(_input(batch))
                _reset(model)
        assert not counter["graph_break"]
        return counter["stats"]["unique_graphs"]

    assert compilations("sparsecomp") == compilations("eager")


def test_torch_logs_knows_our_name():
    torch._logging.set_logs(modules={"sparsecomp": logging.DEBUG})
    try:
        assert logging.getLogger("sparsecomp").isEnabledFor(logging.DEBUG)
    finally:
        torch._logging.set_logs()


def test_explain_measures_names_breaks_and_leaves_no_mark():
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.neuron, self.conv = AttributeLIF(), nn.Conv2d(3, 16, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.neuron(x)
            torch._dynamo.graph_break()
            return self.conv(self.neuron(x))

    model, x = Broken(), _input()
    for _ in range(2):  # a second call is not answered from Dynamo's cache
        report = sparsecomp.explain(model, x)
        assert model.neuron.v is None
        found = site(report, "spike_conv")
        assert found.density_source == "measured"
        assert len(report.graph_breaks) == 1
        assert "2 graphs" in report.capture
    once = (x >= 1.0).float()
    assert found.density == pytest.approx(((x * (1 - once) * 0.5 + once) >= 1.0).float().mean().item())


def test_explain_without_anything_sparse():
    report = sparsecomp.explain(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.ones(1, 4))
    assert [found.rewritten for found in report.sites] == [False]
    assert report.graph_before == report.graph_after != ""


def test_generated_code_calls_our_operators_directly():
    """Without the dispatcher, which takes the host several times as long as a launch."""
    from torch._inductor.utils import run_and_get_code

    layer = SparseLinear.from_linear(nn.Linear(64, 64), sparsity=0.9)
    with torch.no_grad(), torch._inductor.config.patch(force_disable_caches=True):
        found, (code,) = run_and_get_code(torch.compile(layer, backend="sparsecomp"), torch.ones(4, 64))
        torch.testing.assert_close(found, layer(torch.ones(4, 64)))
    calls = re.findall(r"torch\.ops\.sparsecomp\.(\w+)\.default(\.direct_cpu)?\(", code)
    assert calls and all(direct for _, direct in calls)
