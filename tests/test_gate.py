"""The gate is a pure function: its decisions follow from numbers one can work out by hand."""

import json
import re
from dataclasses import replace

import pytest

from bench import table
from sparsecomp import gate

STAGE1 = gate.SiteInfo(
    device="cuda", itemsize=4, n=128, c=64, h=56, w=56, k=64, r=3, s=3, out_h=56, out_w=56, groups=1, digits=3,
    density=None, active=None, tf32=False, channels_last=False, fused=True,
)  # fmt: skip


def test_a_float32_convolution_is_worth_the_int8_tensor_cores():
    decision = gate.decide(STAGE1)
    operations = 2 * 128 * 56 * 56 * 64 * 64 * 9
    assert decision.strategy == "binary"
    assert decision.expected_gain == pytest.approx(gate.H100.int8 / (3 * gate.H100.dense_fp32), rel=0.5)
    assert operations / gate.H100.dense_fp32 > 1e-4


def test_the_cpu_stays_dense():
    decision = gate.decide(replace(STAGE1, device="cpu"))
    assert (decision.strategy, decision.expected_gain) == ("dense", 1.0)
    assert "CPU" in decision.reason


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"groups": 64}, "1 channels a group"), ({"c": 3}, "3 -> 64 channels"), ({"k": 10}, "64 -> 10 channels")],
)
def test_channels_that_cannot_fill_a_tensor_core_stay_dense(change, reason):
    decision = gate.decide(replace(STAGE1, **change))
    assert decision.strategy == "dense"
    assert reason in decision.reason


def test_a_rewrite_that_does_not_pay_is_not_made():
    decision = gate.decide(replace(STAGE1, itemsize=2, channels_last=True))
    assert decision.strategy == "dense"
    assert "would not pay" in decision.reason


def test_events_win_only_where_there_are_few():
    quiet = replace(STAGE1, density=0.001, n=1024, c=512, k=512, h=7, w=7, out_h=7, out_w=7)
    assert gate.decide(quiet).strategy == "event"
    assert gate.decide(replace(quiet, density=0.5)).strategy == "binary"


def test_idle_pixels_are_skipped_where_most_are():
    assert gate.decide(replace(STAGE1, active=0.1, density=0.02)).strategy == "skip"
    assert gate.decide(replace(STAGE1, active=1.0, density=0.2)).strategy == "binary"


def test_a_forced_implementation_promises_nothing_on_the_cpu():
    assert gate.estimate(replace(STAGE1, device="cpu"), "event") == 1.0


MEASURED = [  # 3x3 stages at batch 128 on an H100, ms: dense in the precision named, binary with its digits
    ((64, 56), True, 4, 3, 0.158, 0.113),
    ((128, 28), True, 4, 3, 0.091, 0.083),
    ((256, 14), True, 4, 3, 0.074, 0.069),
    ((512, 7), True, 4, 3, 0.093, 0.075),
    ((128, 28), False, 4, 3, 0.34, 0.083),
    ((128, 28), True, 2, 2, 0.053, 0.067),
    ((256, 14), True, 2, 2, 0.042, 0.053),
]


@pytest.mark.parametrize(("stage", "tf32", "itemsize", "digits", "dense", "binary"), MEASURED)
def test_estimates_are_within_half_of_the_measured_times(stage, tf32, itemsize, digits, dense, binary):
    c, size = stage
    site = replace(
        STAGE1, c=c, k=c, h=size, w=size, out_h=size, out_w=size,
        tf32=tf32, itemsize=itemsize, digits=digits, channels_last=True,
    )  # fmt: skip
    width = 128 * c * size * size * (itemsize - 1) / gate.H100.bandwidth
    assert gate._dense_seconds(site, gate.H100) - width == pytest.approx(dense * 1e-3, rel=0.5)
    assert gate._binary_seconds(site, gate.H100) == pytest.approx(binary * 1e-3, rel=0.5)


ROWS = [row for row in json.loads((table.RESULTS / "snn_conv.json").read_text())["result"] if "dtype" in row]


def _named(row: dict) -> str:
    return "{case} {dtype} {density} {spikes}".format(**row)


@pytest.mark.parametrize("row", ROWS, ids=_named)
def test_what_the_gate_chooses_was_measured_not_slower_than_dense(row):
    decision, dense = table.decision(row)
    chosen = dense if decision.strategy == "dense" else row["ms"][decision.strategy]
    assert dense / chosen > 0.95


@pytest.mark.parametrize("row", [row for row in ROWS if row["case"].startswith("conv")], ids=_named)
def test_what_it_chooses_in_a_compiled_graph_was_measured_not_slower_than_dense(row):
    decision, dense = table.decision({**row, "density": 0.15, "active": 1.0}, fused=True)
    itemsize = 2 if row["dtype"] == "float16" else 4
    c, size = (int(number) for number in re.search(r"->(\d+) @(\d+)", row["case"]).groups())
    width = 128 * c * size * size * (itemsize - 1) / gate.H100.bandwidth * 1e3  # the bytes the neuron need not write
    chosen = dense + width if decision.strategy == "dense" else row["ms"]["binary from bytes"]
    assert (dense + width) / chosen > 0.95
    assert decision.strategy == ("binary" if itemsize == 4 and size >= 7 else "dense")


def test_the_gate_finds_most_of_the_measured_gains():
    found = [table.decision(row) for row in ROWS]
    gains = [min(row["ms"][s] for s in ("binary", "event", "skip") if s in row["ms"]) for row in ROWS]
    worth = [(d, dense / ours) for (d, dense), ours in zip(found, gains, strict=True) if dense / ours > 1.25]
    taken = [d.strategy != "dense" for d, _ in worth]
    assert len(worth) >= 10 and sum(taken) / len(taken) > 0.75
