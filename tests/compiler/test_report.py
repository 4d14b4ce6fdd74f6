"""The report says what happened at every candidate site."""

import json
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rewriting import ConvNet, OnSpikes, dyadic, rewritten, site

import sparsecomp
from sparsecomp import _compat
from sparsecomp.compiler.capture import tell_breaks
from sparsecomp.compiler.explain import explain
from sparsecomp.compiler.optimize import optimize
from sparsecomp.compiler.profile import LayerProfile, Profile
from sparsecomp.errors import InputError
from sparsecomp.passes.engine.location import user_location
from sparsecomp.report import Report, Site, last_report, merge, remember


@pytest.fixture(scope="module")
def report() -> Report:
    with torch.no_grad():
        return rewritten(ConvNet().eval(), torch.rand(2, 3, 8, 8))[1]


@pytest.fixture
def no_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rewritten graph runs op by op."""
    monkeypatch.setattr(_compat, "compile_fx", lambda gm, *_: gm.forward)


def test_every_candidate_is_listed_with_its_reason(report):
    assert [(s.rule, s.rewritten) for s in report.sites if s.rule.startswith("spike")] == [
        ("spike_conv", False), ("spike_conv", True), ("spike_linear", True),
    ]  # fmt: skip
    assert "not proved to be spikes" in report.sites[0].reason
    assert all(found.reason for found in report.sites)


def test_a_site_names_the_users_line_and_module(report):
    file, line = site(report, "spike_conv").location.rsplit(":", 1)
    assert file.endswith("rewriting.py")
    assert "self.second(x)" in Path(file).read_text().splitlines()[int(line) - 1]
    assert site(report, "spike_conv").module == "second"


def test_json_round_trips(report):
    loaded = json.loads(report.to_json())
    assert loaded["sites"][1] == {
        "rule": "spike_conv", "node": site(report, "spike_conv").node, "rewritten": True,
        "reason": site(report, "spike_conv").reason, "location": site(report, "spike_conv").location,
        "module": "second", "density": None, "density_source": "unknown", "implementation": "binary",
        "precision": "exact", "expected_gain": None, "estimate": None, "why": "", "graph": 0,
    }  # fmt: skip


def test_the_diff_shows_the_rewrite_and_its_tag(report):
    added = [line for line in report.diff().splitlines() if line.startswith("+")]
    assert any("spike_conv.default" in line for line in added)
    assert any("# sparsecomp: spike_conv: input is {0, 1}" in line for line in added)


def test_the_table_shows_every_site(report):
    text = str(report)
    assert "2 of 3 sites rewritten" in text
    assert text.count("spike_conv") >= 2


def test_brackets_in_a_reason_are_not_markup():
    report = Report(sites=[Site("spike_conv", "n", False, "padding [bold]x[/bold]")])
    assert "[bold]x[/bold]" in str(report)


def test_an_empty_report_can_be_printed():
    assert "no rule was run" in str(Report())
    assert Report().diff() == ""


def test_merging_keeps_every_graph_and_says_a_note_once():
    parts = [Report(sites=[Site("r", str(i), False, "why")], notes=["no CUDA"], graph_before=str(i)) for i in range(2)]
    merged = merge(parts, "two graphs")
    assert [found.node for found in merged.sites] == ["0", "1"]
    assert merged.notes == ["no CUDA"]
    assert merged.graph_before == "0\n\n1"


def sites(*outcomes: tuple, **shared) -> list[Site]:
    """A site each of (rewritten, gain, density), as the time steps of one layer have them."""
    return [
        Site("spike_conv", f"conv2d_{step}", done, "spikes" if done else "why not: at this step", "net.py:7", "conv",
             density, implementation="binary" if done else "dense", expected_gain=gain, why="" if done else "GATE")
        for step, (done, gain, density) in enumerate(outcomes)
    ]  # fmt: skip


def test_repeated_time_steps_are_one_row() -> None:
    report = Report(sites=sites((False, None, 0.0), (True, 1.2, 0.1), (True, 1.6, 0.3)))
    first, others = report.layers
    assert (first.name, len(first.sites), others.name) == ("conv", 1, "conv ×2")
    assert others.density == pytest.approx(0.2) and others.gains == [1.2, 1.6]
    text = str(report)
    assert text.count("net.py:7") == 2 and "conv ×2" in text and "1.20x to 1.60x" in text and "20.0%" in text


def test_layers_of_one_name_in_two_graphs_or_at_two_lines_stay_apart() -> None:
    parts = [Report(sites=sites((True, 1.0, None))) for _ in range(2)]
    assert len(merge(parts, "two").layers) == 2
    one, other = sites((True, 1.0, None)) + sites((True, 1.0, None))
    other.location = "net.py:8"
    assert len(Report(sites=[one, other]).layers) == 2


def test_the_first_line_sums_up() -> None:
    refused = [(False, None, None)] * 3
    report = Report(sites=[*sites((True, 1.1, None), (True, 1.8, None), *refused), Site("r", "n", False, "hooks: two")])
    assert str(report).splitlines()[0] == report.summary == (
        "sparsecomp, torch.compile: 2 of 6 sites rewritten, expected 1.10x to 1.80x as fast; "
        "3 dense because why not, 1 dense because hooks"
    )
    report = Report(sites=[Site("r", str(n), False, f"reason {n}") for n in range(5)])
    assert report.summary.endswith("1 dense because reason 2, 2 for other reasons")
    assert "no gain estimated" in Report(sites=sites((True, None, None))).summary


@pytest.mark.parametrize("width", [60, 80, 200])
def test_the_table_fits_the_terminal(width: int, report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    lines = str(report).splitlines()
    assert max(map(len, lines)) <= width
    assert width < 80 or ("second" in str(report) and "spike_linear" in str(report))
    profile = Profile("cpu", 1, [LayerProfile("a.very.long.path.of.a.module.in.a.deep.model", "Conv2d", 1)])
    assert max(map(len, str(profile).splitlines())) <= width


def compiled(model: torch.nn.Module | Callable, **options: Any) -> Callable:
    torch._dynamo.reset()
    return torch.compile(model, backend="sparsecomp", options={"implementation": "binary", **options})


def test_all_graphs_of_a_model_with_breaks_are_kept(no_inductor: None) -> None:
    class Broken(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = (OnSpikes(torch.nn.Linear(16, 16)) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.one(x)
            torch._dynamo.graph_break()
            return self.two(x)

    compiled(Broken())(torch.rand(2, 16))
    report = last_report()
    assert report.capture == "torch.compile, 2 graphs" and len(report.graph_breaks) == 1
    assert [(site.module, site.graph) for site in report.rewritten] == [("one.layer", 0), ("two.layer", 1)]
    compiled(OnSpikes(torch.nn.Linear(16, 16)))(torch.rand(2, 16))  # another model
    report = last_report()
    assert report.capture == "torch.compile" and len(report.sites) == 1


def test_layers_that_are_compiled_by_themselves_are_all_kept(no_inductor: None) -> None:
    class Apart(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(OnSpikes(torch.nn.Linear(16 * n, 16 * n + 16)) for n in (1, 2, 3))

        @torch._dynamo.disable(recursive=False)
        def loop(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.loop(x)

    compiled(Apart())(torch.rand(2, 16))
    report = last_report()
    assert len(report.rewritten) == 3


class Skipped(torch.nn.Module):
    """Dynamo makes no graph of it."""

    @torch.compiler.disable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.relu()


def test_a_model_that_dynamo_skips_as_a_whole_says_why(no_inductor: None) -> None:
    x, dense = torch.rand(2, 16), compiled(OnSpikes(torch.nn.Linear(16, 16)))
    dense(x)
    skipped = torch.compile(Skipped(), backend="sparsecomp")
    skipped(x)
    for report in (explain(Skipped(), x), optimize(Skipped(), x).report):
        title, why = str(report).splitlines()[0], " ".join(str(report).split())
        assert "no graph was compiled, the model runs as it is" in title and "torch.compiler.disable" in why
        assert "Skip inlining function <function Skipped.forward" in why and report.sites == []
    report = last_report(skipped)
    assert "no graph was compiled" in report.summary and "Dynamo skips it as a whole" in report.notes[0]
    assert last_report(dense).rewritten  # of the latest that was compiled, whatever was called since
    assert last_report().rewritten


def test_the_report_of_a_compiled_function_and_of_one_that_is_compiled_in_place(no_inductor: None) -> None:
    net, other = OnSpikes(torch.nn.Linear(16, 16)), OnSpikes(torch.nn.Linear(16, 16))
    function = compiled(lambda x: net(x).sum())
    other.compile(backend="sparsecomp", options={"implementation": "dense"})
    assert "not called yet" in last_report(function).notes[0]
    function(torch.rand(2, 16)), other(torch.rand(2, 16))
    assert [site.implementation for site in last_report(function).sites] == ["binary"]
    assert [site.implementation for site in last_report(other).sites] == ["dense"]
    with pytest.raises(InputError, match=r"Linear was not made by torch\.compile"):
        last_report(net.layer)
    with pytest.raises(InputError, match=r"of what `optimize` returned is its `\.report`"):
        last_report(optimize(net.layer))


class Breaks(torch.nn.Module):
    """Dynamo leaves an `nn.Sequential` in which a graph breaks to eager, with its other layers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x + 1


def test_an_empty_report_says_why_it_is_empty(no_inductor: None) -> None:
    x = torch.rand(2, 16)
    assert "no layer that a rule looks at" in explain(torch.relu, x).summary
    assert "no rule was run" in explain(torch.nn.Linear(16, 16), x, disable=["all"]).summary
    summary = explain(torch.nn.Linear(16, 16), x, disable=["spike_linear"]).summary
    assert "no layer that a rule looks at (spike_linear switched off)" in summary
    broken = torch.nn.Sequential(torch.nn.Linear(16, 16), Breaks())
    assert "what was captured has no layer" in explain(broken, x).summary
    assert "no operation on tensors" in explain(lambda x: x, x).notes[0]
    assert "in its first call" in optimize(torch.nn.Linear(16, 16)).report.notes[0]


def test_a_second_batch_size_doubles_no_rows(no_inductor: None) -> None:
    call = compiled(ConvNet().eval())
    with torch.no_grad():
        call(torch.rand(2, 3, 8, 8))
        before = last_report()
        call._orig_mod.fire1.v = call._orig_mod.fire2.v = None
        call(torch.rand(5, 3, 8, 8))
    after = last_report()
    assert before is not after
    assert [site.module for site in after.sites] == [site.module for site in before.sites]


def test_an_optimized_model_keeps_graphs_alike(no_inductor: None) -> None:
    model, x = dyadic(ConvNet()).eval(), torch.rand(2, 3, 8, 8)
    optimized = optimize(model, x, implementation="binary")
    count = len(optimized.report.sites)
    assert optimized.report.rewritten
    model.fire1.v = model.fire2.v = None
    optimized(torch.cat([x, x]))
    assert len(optimized.report.sites) == count


def test_locations_are_never_in_a_library(no_inductor: None) -> None:
    """Of a model that is made of library modules alone no line is the user's."""
    model = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(16, 16))
    compiled(model)(torch.rand(2, 16))
    report = last_report()
    assert [(site.module, site.location) for site in report.sites] == [("1", "")]


MINE, OURS = "/home/someone/model.py", str(Path(sparsecomp.__file__).parent)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ([MINE], f"{MINE}:1"), ([MINE, "/home/someone/layer.py"], "/home/someone/layer.py:2"),
        ([MINE, torch.__file__, json.__file__], f"{MINE}:1"), ([MINE, f"{OURS}/nn/layer.py"], f"{MINE}:1"),
        ([MINE, f"{OURS}/demo.py", torch.__file__], f"{OURS}/demo.py:2"), ([f"{OURS}/nn/layer.py"], ""), ([], ""),
    ],
)  # fmt: skip
def test_a_location_is_the_innermost_line_of_the_users_or_of_the_example(files: list[str], expected: str) -> None:
    node = torch.fx.Graph().placeholder("x")
    frames = [f'  File "{file}", line {line}, in forward\n    x = f(x)' for line, file in enumerate(files, 1)]
    node.meta["stack_trace"] = "\n".join(frames) or None
    assert user_location(node) == expected


def test_a_forced_rewrite_on_a_cpu_promises_nothing(report: Report) -> None:
    done = site(report, "spike_conv")
    assert done.rewritten and done.expected_gain is None and "a reference, for checking only" in done.reason
    assert "no gain estimated" in report.summary


def test_the_last_report_is_the_remembered_one():
    report = Report()
    remember(report)
    assert last_report() is report


def test_explain_names_pruned_layers_that_sparsify_would_take():
    names = "abcdefgh"
    model = torch.nn.Sequential(OrderedDict((name, torch.nn.Linear(16, 16)) for name in names)).eval()
    with torch.no_grad():
        for layer in model:
            layer.weight[:8] = 0
        model.a.weight[8, 0] = 0
        model.b.weight[0, 0] = 1  # less than half
        model.c.weight.zero_()  # not pruned: it begins so
        note = next(note for note in explain(model, torch.ones(2, 16)).notes if "FromMask" in note)
        assert "half or more of the weight is zero in a, d, e, f, g, h: sparsecomp.sparsify(model" in note
        model.c.weight[0, 0] = 1
        assert "in a, c, d, e, f, g, …:" in explain(model, torch.ones(2, 16)).notes[-1]
        taken = sparsecomp.sparsify(model, sparsecomp.FromMask(), filter=lambda layer, name: name not in "bc")
    assert [name for name, layer in taken.named_children() if type(layer) is not torch.nn.Linear] == list("adefgh")
    assert not any("FromMask" in note for note in explain(taken.b, torch.ones(2, 16)).notes)


@pytest.mark.parametrize(("graphs", "breaks", "told"), [(1, [], 0), (0, [], 1), (0, ["why"], 0), (2, ["why"], 0)])
def test_a_model_without_a_graph_is_told_why(graphs: int, breaks: list[str], told: int) -> None:
    report = Report(graphs=graphs)
    tell_breaks(report, breaks)
    assert report.graph_breaks == breaks and len(report.notes) == told
    assert all("Dynamo gives no reason" in note for note in report.notes)
