"""Dense copies of sparse weights that one row is multiplied by are one, where the estimate says so."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernel_devices import needs_triton
from rewriting import rewritten_for, site
from test_bitmap_linear import needs_gpu
from test_shared_input import Attending, product, runs_as
from torch import Tensor, fx

import sparsecomp
from bench.table import RESULTS
from sparsecomp.compiler.capture import Graph
from sparsecomp.errors import FrozenWeightError
from sparsecomp.formats import CSR, NARROW
from sparsecomp.lowering.tuning.ceilings import target_named
from sparsecomp.options import Options
from sparsecomp.passes.cost.decision import Decision
from sparsecomp.passes.cost.shared_copies import TOGETHER, decide
from sparsecomp.passes.engine.constants import Constants
from sparsecomp.passes.sparse import bitmap


@pytest.fixture
def dense(monkeypatch):
    """Layers are faster dense."""
    always = Decision("dense", "asked for", {"narrow_rows": 3e-6, "dense": 1e-6})
    monkeypatch.setattr("sparsecomp.passes.sparse.linear.decided", lambda *operands: always)
    monkeypatch.setattr(bitmap, "decide", lambda *operands: None)


@needs_triton
@pytest.mark.parametrize(("kind", "shape"), [(CSR, (1, 264)), (NARROW, (1, 1, 264))])
@pytest.mark.parametrize("debug", [False, True])
def test_copies_on_one_row_are_one(kind, shape, debug, dense, monkeypatch):
    """As for an H200, run on a CPU; the layers' own copies are not kept then, and broken promises are found."""
    if debug:
        monkeypatch.setenv("SPARSECOMP_DEBUG", "1")
    model, x, options = Attending(kind=kind), torch.randn(shape).half(), Options.parse(None, {"frozen": True})
    kept: list[Any] = []

    def backend(gm: fx.GraphModule, example_inputs: list[Tensor]) -> Callable[..., Any]:
        kept.append(Graph.of_dynamo(gm, example_inputs, {}, options).rewrite(options, target_named("h200")))
        Constants(gm, example_inputs)
        kept.append(gm)
        return gm.forward

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend)
    with torch.no_grad():
        out, exact = compiled(x), model.exact(x)
        report, gm = kept
        assert runs_as(report) == 3 * ["dense copy"] + ["shared copy"]
        assert "one dense copy; estimated" in site(report, "shared_copies").reason
        weights = [one for name, one in gm.named_buffers() if "constant" in name and one.dim() == 2]
        assert len(weights) == 1 and weights[0].shape == (96 + 40 + 33, 264)
        for found, right in zip(out, exact, strict=True):
            assert found.shape == right.shape and found.is_contiguous()
            assert (found - right).norm() <= 1e-3 * right.norm()
        if debug:
            model.layers[1].values.data[-1] = 7.0
            with pytest.raises(FrozenWeightError, match="was promised to stay"):
                compiled(x)


def in_two_ways(x: Tensor, *layers: Any) -> Any:
    return layers[0](x), layers[1](x + 1), layers[2](x - 1)


def written(x: Tensor, *layers: Any) -> Any:
    x = x * 2
    first = layers[0](x)
    x.add_(1)
    return first, layers[1](x), layers[2](x)


@needs_triton
@pytest.mark.parametrize(
    ("how", "shape", "biased", "options"),
    [(None, (2, 264), False, {"frozen": True}), (None, (1, 264), True, {"frozen": True}), (None, (1, 264), False, {}),
     (in_two_ways, (1, 264), False, {"frozen": True}),
     (None, (1, 264), False, {"frozen": True, "inductor": {"coordinate_descent_tuning": True}})],
)  # fmt: skip
def test_other_copies_stay_by_themselves(how, shape, biased, options, dense):
    model, x = Attending(how, biased=biased), torch.randn(shape).half()
    out, report, code = rewritten_for("h200", model, x, **options)
    assert {one.rule for one in report.sites} == {"sparse_linear"} and "narrow" not in code


@needs_triton
def test_what_is_written_to_between_keeps_copies_apart(dense):
    model, x = Attending(written), torch.randn(1, 264).half()
    out, report, _ = rewritten_for("h200", model, x, frozen=True)
    assert "written to between" in site(report, "shared_copies").reason
    wanted = [one(place) for one, place in zip(model.layers, (2 * x, 2 * x + 1, 2 * x + 1), strict=True)]
    for one, right in zip(out, wanted, strict=True):
        assert (one - right).norm() <= 2e-3 * right.norm()


@needs_triton
def test_the_estimate_decides(dense, monkeypatch):
    slower = Decision("dense", "one layer estimated 2 us against 1 us as 3 layers")
    monkeypatch.setattr("sparsecomp.passes.sparse.shared_copies.decide", lambda *operands: slower)
    _, report, code = rewritten_for("h200", Attending(), torch.randn(1, 264).half(), frozen=True)
    assert site(report, "shared_copies").reason.endswith("as 3 layers") and "narrow" not in code


def test_large_layers_gain_little():
    gains = []
    for m, k in ((1024, 1024), (4096, 4096), (28672, 8192)):
        decision = decide([product(m, k, 1) for _ in range(3)])
        gains.append(decision.seconds["dense"] / decision.seconds[TOGETHER])
        assert decision.dense == (gains[-1] < 1.03)
    assert gains == sorted(gains, reverse=True) and gains[1] > 1.1


MEASURED = RESULTS / "shared_input.json"


@pytest.mark.skipif(not MEASURED.exists(), reason="not measured yet: python -m bench shared-input")
def test_one_layer_is_chosen_where_it_was_measured_to_be_faster():
    """Under cuBLAS; of one row."""
    for row in json.loads(MEASURED.read_text())["result"]:
        outs, k, zeros, rows, *_ = row["layers"].values()
        if rows == 1:
            decision = decide([product(m, k, 1, 1 - zeros) for m in outs])
            assert decision.dense == (row["ms"]["stock"] < 1.03 * row["ms"]["stock, one layer"])


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_copies_follow_their_weights(mode, dense):
    torch.compiler.reset()
    model = Attending(rows=(1024, 256, 256), size=512).cuda()
    compiled = torch.compile(model, backend="sparsecomp", options={"frozen": True, "mode": mode})
    with torch.no_grad():
        for step in range(4):
            x = torch.randn(1, 512, device="cuda").half()
            for found, exact in zip(compiled(x), model.exact(x), strict=True):
                assert (found - exact).norm() <= 2e-3 * exact.norm()
            if step == 1:
                model.layers[1].values.mul_(2)
    report = sparsecomp.last_report()
    assert report is not None and runs_as(report)[-1] == "shared copy"
