"""The graph in the report, and the gain of the whole model that is worked out from it."""

from pathlib import Path

import networkx
import pytest
import torch
from rewriting import ConvNet, OnSpikes, rewritten, site
from torch import fx, nn

import sparsecomp
from sparsecomp.errors import OptionError, RuleError
from sparsecomp.lowering.tuning import host
from sparsecomp.lowering.tuning.cards import H100
from sparsecomp.options import Options
from sparsecomp.passes import pipeline
from sparsecomp.passes.cost.dense import conv_work, matmul_work, time_of
from sparsecomp.passes.record import Record
from sparsecomp.report import Estimate, Node, Report, merge
from sparsecomp.report.node import Timing


def node(name: str, *inputs: str, seconds: float | None = None, dense: float | None = None) -> Node:
    timing = Timing.UNKNOWN if seconds is None else Timing.ESTIMATED
    return Node(name, "op", inputs, timing=timing, seconds=seconds, dense_seconds=dense)


def diamond() -> Report:
    """x → a → (b, c) → d: b takes 5 s for 20, c takes 10 s as ever, d is not known."""
    nodes = [
        Node("x", "input", timing=Timing.NONE), node("a", "x", seconds=1.0, dense=1.0),
        node("b", "a", seconds=5.0, dense=20.0), node("c", "a", seconds=10.0, dense=10.0), node("d", "b", "c"),
    ]  # fmt: skip
    return Report(after=nodes)


def test_a_convolution_under_vmap_is_in_the_graph() -> None:
    conv, x = nn.Conv2d(2, 3, 3), torch.ones(4, 1, 2, 5, 5)
    found, report = rewritten(lambda x: torch.func.vmap(lambda one: conv(one))(x) + 1, x, strict=True)
    torch.testing.assert_close(found, conv(x.flatten(0, 1)).unflatten(0, (4, 1)) + 1)
    (layer,) = (one for one in report.after if one.op == "conv2d")
    assert layer.timing is Timing.UNKNOWN


def test_the_gain_of_a_model_is_that_of_the_sum_and_of_the_longest_path() -> None:
    gain = diamond().model_gain()
    assert gain is not None
    assert (gain.dense_seconds, gain.seconds) == (31.0, 16.0) and gain.serial == pytest.approx(31 / 16)
    # dense by way of b, and now by way of c
    assert (gain.dense_path, gain.path) == (21.0, 11.0) and gain.critical == pytest.approx(21 / 11)
    assert (gain.estimated, gain.others) == (3, 1)


def test_graphs_of_one_model_run_one_after_another() -> None:
    merged = merge([diamond(), diamond()], "two")
    gain = merged.model_gain()
    assert gain is not None and (gain.seconds, gain.path) == (32.0, 22.0)
    assert set(merged.graph()) == {*"xabcd", *(f"1:{name}" for name in "xabcd")}
    assert merged.graph().has_edge("1:a", "1:c") and not merged.graph().has_edge("a", "1:c")


def test_without_a_time_no_gain_is_claimed() -> None:
    assert Report().model_gain() is None and Report(after=[node("a")]).model_gain() is None


@pytest.fixture(scope="module")
def estimated() -> Report:
    with torch.no_grad():
        model, x = ConvNet().eval(), torch.rand(32, 3, 56, 56)
        return sparsecomp.explain(model, x, device="h100", mode="reduce-overhead", implementation="binary")


def test_nodes_say_what_is_known_of_them(estimated: Report) -> None:
    nodes = estimated.graph().nodes
    done = site(estimated, "spike_conv")
    assert done.estimate is not None and done.expected_gain == pytest.approx(
        done.estimate.dense_seconds / done.estimate.seconds
    )
    (layer,) = (data for data in nodes.values() if data["op"] == "sparsecomp::spike_conv")
    assert layer == {
        "op": "sparsecomp::spike_conv", "rule": "spike_conv", "implementation": "binary", "timing": "estimated",
        "density": done.density, "seconds": done.estimate.seconds, "dense_seconds": done.estimate.dense_seconds,
        "location": done.location, "module": "second", "graph": 0,
    }  # fmt: skip
    assert any(data.get("fact") == "{0, 1} from ge" for data in nodes.values())
    assert all(data["timing"] == "none" for data in nodes.values() if data["op"] in ("input", "parameter", "output"))


def test_the_gain_counts_what_stays_dense(estimated: Report) -> None:
    gain, first = estimated.model_gain(), estimated.graph().nodes["conv2d"]
    assert gain is not None and gain.others > 0 and str(gain) in estimated.summary
    assert first["timing"] == "estimated" and first["seconds"] == first["dense_seconds"] > 0
    sites = [found.estimate for found in estimated.sites if found.estimate is not None]
    assert gain.seconds == pytest.approx(sum(one.seconds for one in sites) + first["seconds"])
    assert gain.serial < max(found.expected_gain or 0 for found in estimated.sites)


def test_the_graph_before_is_dense(estimated: Report) -> None:
    before = {one.name: one for one in estimated.before}
    replaced = before[site(estimated, "spike_conv").node]
    estimate = site(estimated, "spike_conv").estimate
    assert replaced.op == "conv2d" and estimate is not None and replaced.seconds == estimate.dense_seconds
    assert not any(one.implementation or one.rule for one in estimated.before)
    assert "spike_conv" in estimated.graph_after and "spike_conv" not in estimated.graph_before != ""


def test_a_network_reads_the_graph_from_a_file(estimated: Report, tmp_path: Path) -> None:
    path = tmp_path / "model.graphml"
    networkx.write_graphml(estimated.graph(), path)
    read = networkx.read_graphml(path)
    assert dict(read.nodes(data=True)) == dict(estimated.graph().nodes(data=True))
    assert set(read.edges) == set(estimated.graph().edges)


def test_on_this_machine_nothing_is_estimated_of_spikes_without_a_gpu() -> None:
    with torch.no_grad():
        _, report = rewritten(OnSpikes(nn.Linear(16, 16)), torch.rand(2, 16))
    assert report.model_gain() is None
    (layer,) = (data for data in report.graph().nodes.values() if data["op"] == "sparsecomp::spike_linear")
    assert layer["timing"] == "not estimated" and "seconds" not in layer


def test_on_a_cpu_linear_layers_that_stay_count_in_the_gain_of_the_whole() -> None:
    sparse = sparsecomp.nn.SparseLinear.from_linear(nn.Linear(2048, 2048), sparsity=0.98)
    model = nn.Sequential(sparse, nn.ELU(), nn.Linear(2048, 64))
    with torch.no_grad():
        report = sparsecomp.explain(model, torch.rand(8, 2048))
    (done,), gain = report.rewritten, report.model_gain()
    assert gain is not None and (gain.estimated, gain.others) == (2, 1) and done.expected_gain is not None
    assert done.estimate is not None and done.expected_gain > gain.serial == gain.critical > 1
    # by `bench/results/cpu.json`: 3 us for the host, and for each weight 0.15 ns and 0.0125 a row of the input
    rest = 3e-6 + 2048 * 64 * (0.15 + 0.0125 * 8) * 1e-9 / torch.get_num_threads()
    assert gain.seconds == pytest.approx(done.estimate.seconds + rest)


@pytest.mark.parametrize(("dtype", "known"), [(torch.float32, True), (torch.float64, False), (torch.float16, False)])
def test_on_a_cpu_other_products_are_not_estimated(dtype: torch.dtype, known: bool) -> None:
    def forward(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, w) @ w + nn.functional.conv1d(x[None], w[..., None])[0, 0, 0]

    with torch.no_grad():
        report = sparsecomp.explain(forward, torch.rand(4, 4, dtype=dtype), torch.rand(4, 4, dtype=dtype))
    timed = {data["op"]: "seconds" in data for data in report.graph().nodes.values()}
    assert timed["linear"] is known and not timed["matmul"] and not timed["conv1d"]


class TwoLines(nn.Module):
    """A sparse layer whose ReLU stands on a line of its own, and a dense one behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.sparse = sparsecomp.nn.SparseLinear.from_linear(nn.Linear(512, 512), sparsity=0.98)
        self.dense = nn.Linear(512, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.sparse(x)
        x = torch.relu(x)
        return self.dense(x)


@pytest.mark.parametrize("verb", ["explain", "optimize"])
def test_a_sparse_layer_has_its_fact_its_module_and_its_line(verb: str) -> None:
    with torch.no_grad():
        made = getattr(sparsecomp, verb)(TwoLines().eval(), torch.rand(64, 512))
    report = made if verb == "explain" else made.report
    (layer,) = (data for data in report.graph().nodes.values() if data["op"] == "sparsecomp::sparse_linear")
    file, _, line = layer["location"].rpartition(":")
    assert Path(file).read_text().splitlines()[int(line) - 1].strip() == "x = self.sparse(x)"
    assert layer["module"] == "sparse" and layer["fact"].startswith("values 0..inf, NaN possible")
    behind = site(report, "spike_linear")  # the fused ReLU makes zeros, as its own node would
    assert behind.why == "WRONG_DOMAIN" and behind.module == "dense"


def test_a_card_that_is_not_there_is_said_to_be_estimated(estimated: Report) -> None:
    assert estimated.summary.startswith("sparsecomp, torch.compile, estimated for NVIDIA H100 80GB HBM3: ")
    assert not any("CUDA" in note for note in estimated.notes)


@pytest.mark.slow(reason="estimates every kernel of a card")
def test_a_sparse_layer_is_estimated_for_a_card() -> None:
    pytest.importorskip("triton")  # estimates ask the kernels' templates
    model = sparsecomp.nn.SparseLinear.from_linear(nn.Linear(4096, 4096), sparsity=0.98)
    with torch.no_grad():
        x, card = torch.rand(512, 4096), "nvidia h100 80gb hbm3"
        report = sparsecomp.explain(model, x, device=card, mode="reduce-overhead")
    (found,) = report.sites
    assert found.implementation == "csr" and found.expected_gain is not None and found.expected_gain > 1.03


@pytest.mark.parametrize("device", ["a100", "h", "", "80"])
def test_an_unknown_card_is_refused_with_those_that_are_known(device: str) -> None:
    with pytest.raises(OptionError, match="NVIDIA H100 80GB HBM3"):
        sparsecomp.explain(nn.Linear(2, 2), torch.rand(1, 2), device=device)


def test_an_input_of_that_name_is_still_an_input() -> None:
    class OnDevice(nn.Module):
        def forward(self, x: torch.Tensor, device: str = "cpu") -> torch.Tensor:
            return x.to(device)

    assert sparsecomp.explain(OnDevice(), torch.rand(2), kwargs={"device": "cpu"}).sites == []


def test_dense_products_by_hand() -> None:
    """4096 cubed in float16 at the 800 TFLOP/s of the H100's record, and a copy-bound product by its bytes."""
    time = time_of(matmul_work([4096, 4096], [4096, 4096], [4096, 4096], torch.float16), H100)
    assert time is not None and time.device == pytest.approx(2 * 4096**3 / 800e12 + 2e-6) and time.host == host.MATMUL
    thin = time_of(matmul_work([1, 4096], [4096, 4096], [1, 4096], torch.float32), H100)
    assert thin is not None and thin.device == pytest.approx(4 * (4096**2 + 2 * 4096) / 3.0e12 + 2e-6)
    conv = time_of(conv_work([8, 64, 14, 14], [128, 32, 3, 3], [8, 128, 14, 14], torch.float16, False), H100)
    assert conv is not None and conv.host == host.CONV
    work = conv_work([8, 64, 14, 14], [128, 32, 3, 3], [8, 128, 14, 14], torch.float16, False)
    assert work.operations == 2 * 8 * 128 * 14 * 14 * 32 * 9
    assert time_of(matmul_work([2, 2], [2, 2], [2, 2], torch.float64), H100) is None


def test_a_decision_that_is_overruled_has_the_estimate_of_what_runs() -> None:
    decision = sparsecomp.passes.cost.decision.fastest({"dense": 1.0, "sparse": 2.0})
    assert decision.estimate == Estimate(1.0, 1.0)
    assert decision._replace(implementation="sparse").estimate == Estimate(2.0, 1.0)
    assert decision._replace(implementation="another").estimate is None


@pytest.mark.fails_inside
def test_a_graph_that_cannot_be_reported_costs_the_report_its_graph_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ValueError("a strange node")

    monkeypatch.setattr(Record, "graphs", fail)
    with torch.no_grad():
        _, report = rewritten(OnSpikes(nn.Linear(16, 16)), torch.rand(2, 16))
        assert report.rewritten and report.after == [] and any("a strange node" in note for note in report.notes)
        with pytest.raises(RuleError, match="a strange node"):
            sparsecomp.explain(nn.Linear(2, 2), torch.rand(1, 2), strict=True)


def test_what_a_rewrite_is_made_of_is_counted_once() -> None:
    """A sparse layer that is written out is a dense one, which the rule for spikes has no row of its own for."""
    pytest.importorskip("triton")  # estimates ask the kernels' templates
    layer = sparsecomp.nn.SparseLinear.from_linear(nn.Linear(256, 256), sparsity=0.5)
    with torch.no_grad():
        report = sparsecomp.explain(
            OnSpikes(layer), torch.rand(64, 256), device="h100", frozen=True, mode="reduce-overhead"
        )
    done = site(report, "sparse_linear")
    gain = report.model_gain()
    assert done.implementation == "dense copy" and [one.rule for one in report.sites] == ["sparse_linear"]
    assert gain is not None and done.estimate is not None and gain.seconds == done.estimate.seconds


def test_what_a_node_is_called_by_its_kind():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.bias, self.layer = nn.Parameter(torch.zeros(3)), nn.Linear(3, 3)

        def forward(self, x):
            return self.layer(x).add(self.bias)

    report = pipeline.run_rules(fx.symbolic_trace(Model()), Options())
    assert [(node.name, node.op) for node in report.before] == [
        ("x", "input"), ("layer", "layer"), ("bias", "parameter"), ("add", "add"), ("output", "output")
    ]  # fmt: skip
