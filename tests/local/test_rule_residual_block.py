"""Residual blocks in compiled graphs: each way that the estimate may choose, which it chooses, and when it is asked."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from rewriting import rewritten, site
from torch import Tensor, fx, nn

import sparsecomp
from sparsecomp.compiler.capture import Graph
from sparsecomp.lowering.cache.signature import Device
from sparsecomp.lowering.tuning.cards import H100
from sparsecomp.lowering.tuning.ceilings import Target
from sparsecomp.nn import GeoSparseResidualBlock, build_geo_connectivity
from sparsecomp.options import Options
from sparsecomp.passes.cost import local as cost
from sparsecomp.passes.cost.decision import Decision
from sparsecomp.passes.local import residual_block as rule
from sparsecomp.report import Report

pytestmark = pytest.mark.quick_cases(2)

WAYS = ("residual_block", "gather_dot", "dense")
SETTINGS: dict[str, dict[str, Any]] = {
    "sine": {}, "sine with a phase": {"activation_type": "phase_psann", "norm": "layer"},
    "relu": {"activation_type": "relu", "norm": "none", "bias": False}, "tanh": {"activation_type": "tanh"},
    "gelu": {"activation_type": "gelu", "norm": "layer", "drop_path": 0.5},
}  # fmt: skip


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    """A CPU's blocks stay as they are written."""
    monkeypatch.setattr(GeoSparseResidualBlock, "is_one_operator", lambda self, x: True)


def block_of(**settings: Any) -> GeoSparseResidualBlock:
    torch.manual_seed(0)
    return GeoSparseResidualBlock(12, build_geo_connectivity((3, 4), k=4), residual_alpha_init=0.5, **settings).eval()


def by_parts(block: GeoSparseResidualBlock, x: Tensor) -> Tensor:
    return x + block.alpha * block.drop_path(block.fc2(block.act(block.fc1(block.norm(x)))))


X = torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_operator_of_a_block_gives_what_its_parts_do(settings, dtype):
    block, x = block_of(**SETTINGS[settings]).train().to(dtype), X.to(dtype)
    torch.manual_seed(3)
    found = block(x)
    torch.manual_seed(3)
    wanted = by_parts(block, x)
    assert found.dtype is dtype and (found - wanted).norm() <= 16 * torch.finfo(dtype).eps * wanted.norm()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_each_way(settings, dtype, way, monkeypatch):
    monkeypatch.setattr(rule, "decide_block", lambda *layers: Decision(way, "said so"))
    block, x = block_of(**SETTINGS[settings]).to(dtype), X.to(dtype)
    with torch.no_grad():
        out, report = rewritten(block, x, implementation="auto", strict=True)
        wanted = by_parts(block, x)
    found, code = site(report, "gather_dot"), re.sub("#.*", "", report.graph_after)
    assert found.rewritten and found.implementation == way and "4 and 4 inputs for each of 12 outputs" in found.reason
    assert code.count("residual_block.default") == (way == "residual_block")
    assert code.count("gather_dot.default") == 2 * (way == "gather_dot")
    assert out.dtype is dtype and (out - wanted).norm() <= 16 * torch.finfo(dtype).eps * wanted.norm()


@pytest.mark.slow(reason="Inductor compiles")
@pytest.mark.slow_cases(2)
@pytest.mark.parametrize(("settings", "way"), [*(("gelu", way) for way in WAYS), ("sine", "dense")])
def test_gradients_of_each_way(settings, way, monkeypatch):
    monkeypatch.setattr(rule, "decide_block", lambda *layers: Decision(way, "said so"))
    block, x = block_of(**SETTINGS[settings]), X.clone().requires_grad_()
    torch.compiler.reset()
    call = torch.compile(block, backend="sparsecomp", fullgraph=True, options={"strict": True})
    tensors = [x, *block.parameters()]
    found, right = (torch.autograd.grad(out.square().sum(), tensors) for out in (call(x), by_parts(block, x)))
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert site(sparsecomp.last_report(), "gather_dot").implementation == way


def test_what_a_cpu_and_a_user_decide():
    """On a CPU there is an estimate of layers only; `dense` was asked for."""
    block = block_of(activation_type="relu")
    with torch.no_grad():
        out, report = rewritten(block, X, implementation="auto", strict=True)
        torch.testing.assert_close(out, by_parts(block, X))
        assert site(report, "gather_dot").implementation == "dense"
        _, report = rewritten(block, X, implementation="dense", strict=True)
    assert site(report, "gather_dot").why == "FORCED_DENSE"


@pytest.mark.parametrize("unknown", ["l_x_", "index"])
def test_of_unknown_sizes_nothing_is_decided(unknown, monkeypatch):
    known = rule.known_sizes
    monkeypatch.setattr(rule, "known_sizes", lambda node: None if unknown in str(node).lower() else known(node))
    block = block_of()
    with torch.no_grad():
        found, report = rewritten(block, X, strict=True, implementation="auto")
    assert site(report, "gather_dot").why == "UNKNOWN_SHAPE"
    torch.testing.assert_close(found, block(X))


def test_op_by_op_it_stays_one_operator(monkeypatch):
    """Written out, each of its many steps would be a launch."""
    monkeypatch.setattr(rule, "decide_block", lambda *layers: Decision("dense", "said so"))
    reports: list[Report] = []

    def backend(gm: fx.GraphModule, example_inputs: Any) -> Any:
        options = Options.parse(None, {"strict": True})
        graph = replace(Graph.of_dynamo(gm, example_inputs, {}, options), eager=True)
        reports.append(graph.rewrite(options))
        return gm.forward

    block = block_of()
    torch.compiler.reset()
    torch.testing.assert_close(torch.compile(block, backend=backend)(X), by_parts(block, X))
    assert site(reports[0], "gather_dot").implementation == "residual_block"


def test_one_graph_for_any_batch(monkeypatch):
    monkeypatch.setattr(rule, "decide_block", lambda *layers: Decision("residual_block", "said so"))
    block = block_of(activation_type="tanh")
    torch.compiler.reset()
    call = torch.compile(block, backend="sparsecomp", fullgraph=True, dynamic=True, options={"strict": True})
    with torch.no_grad():
        for rows in (4, 7, 5):
            with torch._dynamo.config.patch(error_on_recompile=rows != 4):
                torch.testing.assert_close(call(X[:1].expand(rows, 5, 12)), by_parts(block, X[:1]).expand(rows, 5, 12))


def test_a_block_stays_where_an_operand_is_written_to():
    block = block_of(activation_type="relu")

    def forward(x: Tensor) -> Tensor:
        x = x.clone()
        out = torch.ops.sparsecomp.residual_block.default(
            x, [], [block.fc1.weight], [], [block.fc2.weight], block.alpha, [block.fc1.in_index_per_out],
            [block.fc2.in_index_per_out], "none", 0.0, "relu", "far", False,
        )  # fmt: skip
        x.zero_()
        return out[0]

    with torch.no_grad():
        out, report = rewritten(forward, X, implementation="auto", strict=True)
        torch.testing.assert_close(out, forward(X))
    assert "an operand is written to" in site(report, "gather_dot").reason


@pytest.mark.parametrize(
    ("n", "rows", "trained", "replayed", "way"),
    [
        (4096, 1024, False, True, "residual_block"), (4096, 1024, True, True, "residual_block"),
        (256, 2048, False, True, "residual_block"), (16384, 1, False, True, "dense"),
        (65536, 64, False, True, "gather_dot"), (256, 4, True, False, "dense"), (256, 0, False, True, "dense"),
    ],
)  # fmt: skip
def test_what_is_estimated_to_be_faster_on_a_card(n, rows, trained, replayed, way):
    pytest.importorskip("triton")
    layer = cost.FixedFanIn(
        torch.device("cuda"), rows, n, n, 8, torch.bfloat16, True, False, "none", "far", True, trained, replayed, 1,
        Target(Device("H100", "9.0", "3.6.0"), H100),
    )  # fmt: skip
    decision = cost.decide_block(layer, layer)
    assert set(decision.seconds) == set(WAYS) and decision.implementation == way, dict(decision.seconds)


CHANGES: dict[str, Any] = {
    "a hook": lambda block: block.fc1.register_forward_hook(lambda *_: None),
    "another activation": lambda block: setattr(block, "act", nn.SiLU()),
    "another form of one": lambda block: setattr(block, "act", nn.GELU(approximate="tanh")),
    "another dtype": lambda block: block.fc2.double(),
    "another mode": lambda block: setattr(block.fc1, "compute_mode", "gather"),
    "a weight that is computed": lambda block: nn.utils.parametrizations.weight_norm(block.fc2),
    "a pruned weight": lambda block: nn.utils.prune.l1_unstructured(block.fc1, "weight", 0.5),
}


def test_a_blockis_one_operator_on_a_gpu_only_as_it_was_made(monkeypatch):
    monkeypatch.undo()
    assert not block_of().is_one_operator(X)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    for settings in SETTINGS.values():
        block = block_of(**settings)
        assert block.is_one_operator(X) and block.half().is_one_operator(X.half())
        assert not any(block.is_one_operator(x) for x in (X, X.double(), X.half()[0, 0], X.half()[..., :5]))
    for name, change in CHANGES.items():
        block = block_of()
        change(block)
        assert not block.is_one_operator(X), name
