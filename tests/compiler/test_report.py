"""The report says what happened at every candidate site."""

import json
from pathlib import Path

import pytest
import torch
from rewriting import ConvNet, rewritten, site

from sparsecomp.report import Report, Site, last_report, merge, remember


@pytest.fixture(scope="module")
def report() -> Report:
    with torch.no_grad():
        return rewritten(ConvNet().eval(), torch.rand(2, 3, 8, 8))[1]


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
        "precision": "exact", "expected_gain": 1.0,
    }  # fmt: skip


def test_the_diff_shows_the_rewrite_and_its_tag(report):
    added = [line for line in report.diff().splitlines() if line.startswith("+")]
    assert any("spike_conv2d.default" in line for line in added)
    assert any("# sparsecomp: spike_conv: input is {0, 1}" in line for line in added)


def test_the_table_shows_every_site(report):
    text = str(report)
    assert "2 of 3 sites rewritten" in text
    assert text.count("spike_conv") >= 2


def test_brackets_in_a_reason_are_not_markup():
    report = Report(sites=[Site("spike_conv", "n", False, "padding [bold]x[/bold]")])
    assert "[bold]x[/bold]" in str(report)


def test_an_empty_report_can_be_printed():
    assert "0 of 0" in str(Report())
    assert Report().diff() == ""


def test_merging_keeps_every_graph_and_says_a_note_once():
    parts = [Report(sites=[Site("r", str(i), False, "why")], notes=["no CUDA"], graph_before=str(i)) for i in range(2)]
    merged = merge(parts, "two graphs")
    assert [found.node for found in merged.sites] == ["0", "1"]
    assert merged.notes == ["no CUDA"]
    assert merged.graph_before == "0\n\n1"


def test_the_last_report_is_the_remembered_one():
    report = Report()
    remember(report)
    assert last_report() is report
