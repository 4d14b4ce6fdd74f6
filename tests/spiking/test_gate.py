"""The gate is a pure function: its decisions follow from numbers one can work out by hand."""

import json
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import sympy
import torch
from rewriting import OnSpikes
from torch import fx

import sparsecomp
from bench import table
from sparsecomp._compat import FakeTensorMode
from sparsecomp.lowering.cache.signature import Device
from sparsecomp.lowering.cache.tuning_cache import TuningCache
from sparsecomp.lowering.tuning.cards import H100
from sparsecomp.lowering.tuning.cost import break_even
from sparsecomp.passes.cost import spiking as gate
from sparsecomp.passes.graph.canonicalize import CanonicalOp
from sparsecomp.passes.spiking import operand as spike_operand
from sparsecomp.reference.geometry import Window

STAGE1 = gate.SiteInfo(
    device="cuda", itemsize=4, n=128, c=64, size=(56, 56), k=64, window=Window.centred((3, 3), (1, 1)), groups=1,
    digits=3, density=None, active=None, tf32=False, channels_last=False, fused=True,
)  # fmt: skip
QUIET = STAGE1._replace(n=1024, c=512, k=512, size=(7, 7), density=0.001)


def test_a_float32_convolution_is_worth_the_int8_tensor_cores():
    decision = gate.decide(STAGE1)
    operations = 2 * 128 * 56 * 56 * 64 * 64 * 9
    assert decision.implementation == "binary"
    # 1100 of int8 operations for three digits against 80 of float32, both in 1e12 a second
    assert decision.gain == pytest.approx(1100 / (3 * 80), rel=0.5)
    assert decision.reason.endswith(f"against {gate.seconds_of(STAGE1, 'dense') * 1e6:.1f} us dense")
    assert gate.seconds_of(STAGE1, "dense") == pytest.approx(operations / 80e12, rel=0.15)


def test_the_cpu_stays_dense():
    decision = gate.decide(STAGE1._replace(device="cpu"))
    assert (decision.implementation, decision.gain) == ("dense", None)
    assert "CPU" in decision.reason


DEPTHWISE = STAGE1._replace(groups=64, tf32=True, channels_last=True)


def test_a_depthwise_layer_takes_its_memorys_time():
    """Bytes in and float32 out, beside float32 in and out, written by the neuron before: 4 + 4 + 3 bytes to 1 + 4."""
    decision = gate.decide(DEPTHWISE)
    assert decision.implementation == "direct" and decision.gain == pytest.approx(11 / 5, rel=0.01)
    assert gate.decide(DEPTHWISE._replace(fused=False)).implementation == "dense"  # 13 bytes with the pass before
    assert "direct" not in gate.decide(STAGE1).seconds
    half = gate.decide(DEPTHWISE._replace(itemsize=2, digits=2, fused=False))
    assert half.implementation == "dense"


@pytest.mark.parametrize("groups", [8, 16])
def test_groups_of_few_channels_stay_dense_where_their_products_take_the_time(groups):
    site = DEPTHWISE._replace(groups=groups)
    per_output = 9 * 64 // groups
    expected = 2 * 128 * 64 * 56 * 56 * per_output / (0.14 * 50e12)
    assert gate.seconds_of(site, "direct") == pytest.approx(expected)
    assert gate.decide(site).implementation == "dense"


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_depthwise_layer_is_taken_where_the_host_is_not_what_takes_the_time(mode):
    with torch.no_grad():
        layer = torch.nn.Conv2d(64, 64, 3, groups=64).eval()
        report = sparsecomp.explain(OnSpikes(layer), torch.rand(64, 64, 32, 32), device="h100", mode=mode)
    (found,) = report.sites
    assert found.implementation == ("direct" if mode == "reduce-overhead" else "dense")


@pytest.mark.parametrize(("change", "tile", "rate"), [
    # 100 outputs are multiplied as 128
    ({"k": 100}, (64, 128), 1100e12),
    # 44 inputs as 64, which takes the portable kernel, as narrow as 64 outputs are, and loads four at a time
    ({"c": 44}, (64, 64), 1100e12 * 0.65 / 1.65 / 4),
    # 40 inputs too, by eight
    ({"c": 40}, (64, 64), 1100e12 * 0.65 / 1.65 / 2),
])  # fmt: skip
def test_tiles_that_channels_do_not_fill_cost_as_whole_ones(change, tile, rate):
    seconds = gate.seconds_of(STAGE1._replace(channels_last=True, **change), "binary")
    operations = 2 * 128 * 56 * 56 * 9 * tile[0] * tile[1] * 3
    assert seconds == pytest.approx(operations / rate + H100.launch)  # the weight is split in a launch of its own


@pytest.mark.parametrize("strategy", ["binary", "direct"])
def test_bytes_in_another_order_are_copied_first(strategy):
    """Into channels-last, at half of the bandwidth; maps of one pixel, and what a prescan writes, lie so."""
    crossed, straight = (gate.seconds_of(STAGE1._replace(channels_last=last), strategy) for last in (False, True))
    size = 128 * 64 * 56 * 56
    assert crossed - straight == pytest.approx(2 * size / (0.5 * H100.bandwidth) + H100.launch)
    for other in (STAGE1._replace(fused=False), STAGE1._replace(size=(1, 1), window=Window.centred((1, 1), (1, 1)))):
        assert gate.seconds_of(other, strategy) == gate.seconds_of(other._replace(channels_last=True), strategy)


def test_a_few_odd_outputs_gain_nothing_where_launches_are_what_takes_the_time():
    classifier = STAGE1._replace(n=256, c=512, k=10, size=(1, 1), window=Window.centred((1, 1), (1, 1)))
    assert gate.decide(classifier).implementation == "dense"
    assert gate.decide(classifier._replace(n=2**16)).implementation == "binary"


def test_a_rewrite_that_does_not_pay_is_not_made():
    decision = gate.decide(STAGE1._replace(itemsize=2, channels_last=True))
    assert decision.implementation == "dense"
    assert decision.reason.startswith("binary estimated")


def test_the_report_says_once_that_it_would_not_pay():
    with torch.no_grad():
        report = sparsecomp.explain(OnSpikes(torch.nn.Linear(16, 16).eval()), torch.rand(4, 16), device="h100")
    (found,) = report.sites
    assert found.why == "GATE" and found.reason.startswith("it would not pay: binary estimated")


def test_events_win_only_where_there_are_few():
    assert gate.decide(QUIET).implementation == "event"
    assert gate.decide(QUIET._replace(density=0.5)).implementation == "binary"


def test_idle_pixels_are_skipped_where_most_are():
    assert gate.decide(STAGE1._replace(active=0.1, density=0.02)).implementation == "skip"
    assert gate.decide(STAGE1._replace(active=1.0, density=0.2)).implementation == "binary"


def test_a_forced_implementation_promises_nothing_on_the_cpu():
    decision = gate.forced(STAGE1._replace(device="cpu"), "event")
    assert decision.gain is None and decision.estimate is None and "for checking only" in decision.reason


def test_the_reason_names_the_density_at_which_events_stop_to_win():
    below = gate.event_pays_below(QUIET)
    assert f"event pays below {below:.2%} density" in gate.decide(QUIET).reason
    assert gate.decide(QUIET._replace(density=0.99 * below)).implementation == "event"
    assert gate.decide(QUIET._replace(density=1.01 * below)).implementation == "binary"
    assert gate.event_pays_below(QUIET._replace(density=None)) is None
    assert "no density" in gate.decide(QUIET._replace(n=1)).reason


def test_the_break_even_density_of_a_symbolic_batch_holds_at_every_batch():
    batch, density = sympy.Symbol("s0", integer=True, positive=True), sympy.Symbol("density", nonnegative=True)
    event = gate.expression(QUIET, "event", H100, n=batch, density=density)
    dense = gate.expression(QUIET, "dense", H100, n=batch)
    bound = break_even(event, dense, density)
    assert bound.free_symbols == {batch}
    assert bound.subs(batch, 1) < 0
    for n in (64, 128, 4096):
        there = QUIET._replace(n=n, density=float(bound.subs(batch, n)))
        assert gate.seconds_of(there, "event") == pytest.approx(gate.seconds_of(there, "dense"), rel=1e-9)


@pytest.mark.parametrize("strategy", ["dense", "binary", "direct", "event", "skip"])
def test_on_a_card_of_half_the_rates_everything_but_waiting_takes_twice_as_long(strategy):
    rates = {name: getattr(H100, name) / 2 for name in ("bandwidth", "fp32", "tf32", "half", "int8")}
    site = QUIET._replace(active=1.0)
    waiting = {"event": 35e-6, "skip": 15e-6, "dense": 0.0}.get(strategy, H100.launch)
    slower = gate.seconds_of(site, strategy, replace(H100, **rates)) - waiting
    assert slower == pytest.approx(2 * (gate.seconds_of(site, strategy) - waiting))


HOSTED = STAGE1._replace(hosted=True)
TINY = HOSTED._replace(n=1, size=(14, 14))


def test_a_product_that_lengthens_the_hosts_path_is_not_made_where_the_host_decides():
    """Equal devices' work of microseconds, so the hosts' 24 and 28 us are what a call takes."""
    assert gate.seconds_of(TINY, "dense") < 24e-6 and gate.seconds_of(TINY, "binary") < 28e-6
    decision = gate.decide(TINY)
    assert decision.implementation == "dense" and "28.0 us against 24.0 us" in decision.reason
    assert gate.decide(TINY, measured={"dense": 0.02, "binary": 0.005}).implementation == "dense"
    replayed = TINY._replace(hosted=False)
    assert gate.decide(replayed, measured={"dense": 0.02, "binary": 0.005}).implementation == "binary"
    # a card with more to do than its host does not wait for it
    assert gate.decide(HOSTED) == gate.decide(STAGE1)


def test_in_training_a_product_saves_one_of_three():
    """Dense forward and both gradients are three products; ours is one of them, the widening of bytes comes on top."""
    site = STAGE1._replace(trained=True)
    forward, ours = gate.seconds_of(STAGE1._replace(fused=False), "dense"), gate.seconds_of(STAGE1, "binary")
    dense = gate.seconds_of(STAGE1, "dense") + 2 * forward
    widened = 128 * 64 * 56 * 56 * 5 / H100.bandwidth
    decision = gate.decide(site)
    assert decision.implementation == "binary"
    assert decision.gain == pytest.approx(dense / (ours + 2 * forward + widened))
    assert decision.gain < gate.decide(STAGE1).gain
    # what gains a tenth alone gains too little among three, and what the host does is counted for all of them
    measured = {"dense": 0.1, "binary": 0.09}
    assert gate.decide(STAGE1, measured=measured).implementation == "binary"
    assert gate.decide(site, measured=measured).implementation == "dense"
    tiny = TINY._replace(trained=True)
    assert gate.as_called(tiny, "dense", 1e-6) == pytest.approx(3 * 24e-6)
    assert gate.as_called(tiny, "binary", 1e-6) == pytest.approx(28e-6 + 2 * 24e-6 + 8e-6)


def test_linear_layers_have_a_shorter_host_path_of_their_own():
    linear = TINY._replace(size=(1, 1), window=Window.centred((1, 1), (1, 1)))
    assert gate.as_called(linear, "dense", 1e-6) == pytest.approx(16e-6)


def test_no_density_is_named_where_the_host_takes_the_time():
    assert gate.event_pays_below(QUIET._replace(n=1, hosted=True)) is None


def test_events_pay_at_no_density_below_zero():
    """The break-even of a batch of one is negative."""
    assert gate.event_pays_below(QUIET._replace(n=1)) == 0.0


def test_the_costs_of_events_by_hand():
    """Both forms of the weight are packed, three passes of two reads and a write; then traffic and the sums."""
    site = QUIET._replace(density=0.0)
    weights, values = 512 * 512 * 9, 1024 * 512 * 49
    packing = weights * (2 * 4 + 3)
    traffic = (values * 4 + weights * 4 + values * 4) / 0.75
    expected = (2 * packing + traffic) / H100.bandwidth + 35e-6
    assert gate.seconds_of(site, "event") == pytest.approx(expected, rel=1e-6)


def test_measured_times_win_over_estimates():
    assert gate.decide(STAGE1).implementation == "binary"
    slow = gate.decide(STAGE1, measured={"dense": 0.2, "binary": 0.21})
    assert (slow.implementation, slow.gain) == ("dense", pytest.approx(0.2 / 0.21))
    assert slow.reason == "binary measured 0.210 ms against 0.200 ms dense"
    fast = gate.decide(STAGE1, measured={"dense": 0.2, "binary": 0.11})
    assert (fast.implementation, fast.reason) == ("binary", "measured 0.110 ms against 0.200 ms dense")


@pytest.mark.parametrize("measured", [{}, {"binary": 9.0}, {"dense": 1e-6}, {"dense": 1.0, "event": 1e-6}])
def test_times_that_leave_nothing_to_compare_change_nothing(measured):
    """Without the density, events cannot be told to serve the site."""
    assert gate.decide(STAGE1, measured=measured) == gate.decide(STAGE1)


def test_the_signature_holds_whatever_changes_the_times():
    device = Device("NVIDIA H100 80GB HBM3", "9.0", "3.6.0")
    key = STAGE1.signature(device).key
    assert STAGE1._replace(n=100, size=(50, 60)).signature(device).key == key
    others = (
        {"n": 129}, {"c": 128}, {"k": 128}, {"window": Window.centred((1, 3), (1, 1))},
        {"window": Window.centred((3, 1), (1, 1))}, {"window": Window.centred((3, 3), (2, 2))}, {"groups": 4},
        {"digits": 2}, {"itemsize": 2}, {"tf32": True}, {"channels_last": True}, {"fused": False}, {"density": 0.1},
        {"active": 0.1},
    )  # fmt: skip
    keys = {STAGE1._replace(**change).signature(device).key for change in others}
    assert len(keys | {key}) == 1 + len(others)


def test_the_tuning_cache_is_asked_for_sites_on_a_gpu_only(monkeypatch):
    pytest.importorskip("triton")
    device, found = Device("NVIDIA H100 80GB HBM3", "9.0", "3.6.0"), TuningCache(None)
    found.put(
        STAGE1.signature(device), times={"dense": 0.2, "binary": 0.11, "skip": 0.01}, rejected={"skip": "it is wrong"}
    )
    monkeypatch.setattr(spike_operand, "default_cache", lambda: found)
    monkeypatch.setattr(spike_operand, "device_of", lambda where: device)
    monkeypatch.setattr(spike_operand, "card_of", lambda where: replace(H100, processors=1))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def card(where: str):
        x = fx.Graph().placeholder("x")
        with FakeTensorMode():
            x.meta["example_value"] = torch.empty(128, 64, 56, 56, device=where)
        op = CanonicalOp("conv2d", {"input": x}, x)
        return spike_operand.card_and_times(SimpleNamespace(op=op), STAGE1._replace(device=where))

    assert card("cuda") == (replace(H100, processors=1), {"dense": 0.2, "binary": 0.11})
    assert card("cpu") == (H100, None)


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
    site = STAGE1._replace(
        c=c, k=c, size=(size, size),
        tf32=tf32, itemsize=itemsize, digits=digits, channels_last=True,
    )  # fmt: skip
    width = 128 * c * size * size * (itemsize - 1) / H100.bandwidth
    assert gate.seconds_of(site, "dense") - width == pytest.approx(dense * 1e-3, rel=0.5)
    assert gate.seconds_of(site, "binary") == pytest.approx(binary * 1e-3, rel=0.5)


ROWS = [row for row in json.loads((table.RESULTS / "snn_conv.json").read_text())["result"] if "dtype" in row]


def _named(row: dict) -> str:
    return "{case} {dtype} {density} {spikes}".format(**row)


@pytest.mark.parametrize("row", ROWS, ids=_named)
def test_what_the_gate_chooses_was_measured_not_slower_than_dense(row):
    decision, dense = table.decision(row)
    chosen = dense if decision.implementation == "dense" else row["ms"][decision.implementation]
    assert dense / chosen > 0.95


@pytest.mark.parametrize("row", [row for row in ROWS if row["case"].startswith("conv")], ids=_named)
def test_what_it_chooses_in_a_compiled_graph_was_measured_not_slower_than_dense(row):
    decision, dense = table.decision({**row, "density": 0.15, "active": 1.0}, fused=True)
    itemsize = 2 if row["dtype"] == "float16" else 4
    c, size = (int(number) for number in re.search(r"->(\d+) @(\d+)", row["case"]).groups())
    width = 128 * c * size * size * (itemsize - 1) / H100.bandwidth * 1e3  # the bytes the neuron need not write
    chosen = dense + width if decision.implementation == "dense" else row["ms"]["binary from bytes"]
    assert (dense + width) / chosen > 0.95
    assert decision.implementation == ("binary" if itemsize == 4 and size >= 7 else "dense")


def test_the_gate_finds_most_of_the_measured_gains():
    found = [table.decision(row) for row in ROWS]
    gains = [min(row["ms"][s] for s in ("binary", "event", "skip") if s in row["ms"]) for row in ROWS]
    worth = [(d, dense / ours) for (d, dense), ours in zip(found, gains, strict=True) if dense / ours > 1.25]
    taken = [d.implementation != "dense" for d, _ in worth]
    assert len(worth) >= 10 and sum(taken) / len(taken) > 0.75
