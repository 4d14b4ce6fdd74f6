"""torch.compile's modes mean what they mean in torch: only max-autotune measures, unless the environment says so."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import sparsecomp
from sparsecomp import _compat
from sparsecomp.environment import Settings
from sparsecomp.formats import CSR
from sparsecomp.lowering.cache.tuning_cache import TuningCache
from sparsecomp.lowering.tuning import autotune
from sparsecomp.lowering.tuning.autotune import Tuner
from sparsecomp.lowering.tuning.ceilings import target_named
from sparsecomp.nn import SparseLinear
from sparsecomp.options import Options
from sparsecomp.passes.cost.sparse import Product, dense_layer_seconds
from sparsecomp.passes.engine.rule import replays, writes_one_row
from sparsecomp.reference.patterns import Layout


@pytest.fixture
def efforts(monkeypatch):
    """Efforts in force whenever the compiled graph runs."""
    seen = []
    compile_fx = _compat.compile_fx

    def compiling(*arguments):
        compiled = compile_fx(*arguments)

        def run(*inputs):
            seen.append(autotune.scoped_effort())
            return compiled(*inputs)

        return run

    monkeypatch.setattr(_compat, "compile_fx", compiling)
    return seen


def run(mode, environment=None):
    torch._dynamo.reset()
    layer = torch.nn.Linear(16, 16)
    options = {"implementation": "binary", "mode": mode}
    compiled = torch.compile(lambda x: layer((x >= 0.5).float()), backend="sparsecomp", options=options)
    with torch.no_grad():
        out = compiled(torch.ones(2, 16))
    torch.testing.assert_close(out, layer(torch.ones(2, 16)))
    report = sparsecomp.last_report()
    assert report is not None and report.rewritten


@pytest.mark.parametrize(
    ("mode", "effort"),
    [("default", None), ("reduce-overhead", None), ("max-autotune-no-cudagraphs", "full"), ("max-autotune", "full")],
)
def test_modes(mode, effort, efforts, monkeypatch):
    monkeypatch.setattr(autotune, "tuner", lambda: Tuner(TuningCache(None), Settings()))
    run(mode)
    assert efforts == [effort]


@pytest.mark.parametrize(("autotuned", "effort"), [("none", None), ("quick", "quick"), ("full", "full")])
@pytest.mark.parametrize("mode", ["default", "max-autotune-no-cudagraphs"])
def test_the_environment_has_the_last_word(mode, autotuned, effort, efforts, monkeypatch):
    monkeypatch.setattr(autotune, "tuner", lambda: Tuner(TuningCache(None), Settings(autotune=autotuned)))
    run(mode)
    assert efforts == [effort]


@pytest.mark.parametrize(
    ("mode", "inductor", "on_gpu"),
    [("default", {}, False), ("reduce-overhead", {}, True), ("max-autotune", {}, True),
     ("max-autotune-no-cudagraphs", {}, False), ("default", {"triton.cudagraphs": True}, True),
     ("default", {"triton.cudagraphs": False}, False)],
)  # fmt: skip
def test_cuda_graphs_are_replayed_where_a_mode_says_so_on_a_gpu(mode, inductor, on_gpu):
    options = Options(mode=mode, inductor=inductor)
    assert replays(options, torch.device("cuda")) == on_gpu and not replays(options, torch.device("cpu"))


@pytest.mark.parametrize(("mode", "by_inductor"), [("reduce-overhead", False), ("max-autotune", True)])
@pytest.mark.parametrize("how", ["mode", "options"])
def test_what_stays_dense_is_multiplied_as_in_the_mode(mode, by_inductor, how, monkeypatch):
    """Under max-autotune Inductor writes its own kernel for one row on a GPU, as it does without our operators."""
    from torch._inductor import compile_fx, config

    seen = []

    def inductor(gm, inputs, **settings):
        seen.append((settings["config_patches"], settings["decompositions"]))
        return gm.forward

    monkeypatch.setattr(compile_fx, "compile_fx", inductor)
    torch._dynamo.reset()
    layer = SparseLinear(CSR.from_dense(torch.eye(8)), requires_grad=False)
    given = {"mode": mode} if how == "mode" else {"options": {"mode": mode}}
    with torch.no_grad():
        torch.compile(layer, backend="sparsecomp", **given)(torch.ones(1, 8))
    ((patches, decompositions),) = seen
    with config.patch(patches), FakeTensorMode():
        x, weight = (torch.empty(n, 8, device="cuda", dtype=torch.float16) for n in (1, 16))
        code = make_fx(F.linear, decomposition_table=decompositions)(x, weight).code
    assert ("aten.mm" not in code) == ("aten.sum" in code) == by_inductor


@pytest.mark.parametrize(
    ("mode", "inductor", "wanted"),
    [("default", {}, False), ("reduce-overhead", {}, False), ("max-autotune", {}, True),
     ("max-autotune-no-cudagraphs", {}, True), ("default", {"coordinate_descent_tuning": True}, True),
     ("max-autotune", {"coordinate_descent_tuning": False}, False)],
)  # fmt: skip
def test_the_estimate_knows_where_inductor_writes_a_kernel_for_one_row(mode, inductor, wanted):
    assert writes_one_row(Options(mode=mode, inductor=inductor)) == wanted


def test_one_row_by_inductor_takes_what_it_was_measured_to():
    """Microseconds of a layer of one row in float16 without bias under max-autotune (`bench shared-input`, an H200)."""
    for sizes, measured in ((((4096, 4096),) * 3, 27.0), (((11008, 4096),) * 2, 44.9)):
        layers = [
            Product(torch.device("cuda"), Layout("csr", (1, 1), size), 1, 1, 9, torch.float16, True, False, False,
                    "none", "", constant=True, tuned=True, target=target_named("h200"))
            for size in sizes
        ]  # fmt: skip
        assert 0.95 < 1e6 * sum(map(dense_layer_seconds, layers)) / measured < 1.06
        for changes in ({"n": 2}, {"bias": True}, {"trained": True}, {"linear": False}):
            one = layers[0]._replace(**changes)
            assert dense_layer_seconds(one) == dense_layer_seconds(one._replace(tuned=False))
