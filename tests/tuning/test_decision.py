"""The one record of what pays, its margin, and what the host adds, by hand."""

import pytest

from sparsecomp.lowering.tuning import host
from sparsecomp.lowering.tuning.host import Time
from sparsecomp.passes.cost.decision import MIN_GAIN, Decision, fastest
from sparsecomp.passes.cost.masked import decide_fold, decide_merge
from sparsecomp.report import Estimate

MIB = 1 << 20


def test_dense_stays_unless_another_wins_by_the_margin():
    just, short = MIN_GAIN * 1.001, MIN_GAIN * 0.999
    assert fastest({"dense": just * 1e-5, "slow": 1.0, "fast": 1e-5}).implementation == "fast"
    decision = fastest({"dense": short * 1e-5, "fast": 1e-5})
    assert decision.dense and decision.gain == pytest.approx(short)


def test_reasons_name_both_times_and_where_they_come_from():
    times = {"dense": 20e-6, "fast": 10e-6}
    assert fastest(times) == Decision("fast", "estimated 10.0 us against 20.0 us dense", times)
    reason = "slow measured 0.020 ms against 0.010 ms dense"
    times = {"dense": 10e-6, "slow": 20e-6}
    assert fastest(times, "measured") == Decision("dense", reason, times, "measured")
    assert fastest(times, "measured").estimate == Estimate(10e-6, 10e-6, "measured")
    assert fastest({"dense": 20e-6, "fast": 10e-6}).estimate == Estimate(10e-6, 20e-6, "estimated")


def test_what_has_no_kernel_has_no_estimate_and_no_gain():
    decision = fastest({"dense": 1e-6, "it": float("inf")}, rival="written out")
    assert decision.dense and decision.reason == "it has no kernel of its own for all of it, against 1.0 us written out"
    assert decision.gain is None and decision.estimate == Estimate(1e-6, 1e-6, "estimated")
    assert decision._replace(implementation="it").estimate is None


def test_without_an_estimate_there_is_none():
    for decision in (
        Decision("dense", "no estimate"),
        Decision("fast", "forced"),
        Decision("fast", "", {"dense": 1.0}),
    ):
        assert decision.estimate is None and decision.gain is None


def test_a_caller_waits_for_the_longer_of_device_and_host():
    time = Time(10e-6, 20e-6).plus(Time(5e-6, 1e-6))
    assert time == pytest.approx((15e-6, 21e-6))
    assert time.waited(replayed=True) == pytest.approx(15e-6)
    assert time.waited(replayed=False) == pytest.approx(21e-6)
    assert time.waited(replayed=False, besides=9e-6) == pytest.approx((21e-6 + 30e-6) / 2)
    assert Time(90e-6, 20e-6).waited(replayed=False, besides=9e-6) == pytest.approx(90e-6)
    assert host.besides(trained=False, products=5) == pytest.approx(45e-6 / 5)


def test_masked_weights_are_folded_from_a_size_on():
    assert decide_fold(1 << 17).implementation == "folded"
    decision = decide_fold((1 << 17) - 1)
    assert decision.dense and "131071 elements" in decision.reason and "from 131072 on" in decision.reason


@pytest.mark.parametrize(
    ("device", "by_mask", "replayed", "least"),
    [("cuda", False, False, 64 * MIB), ("cuda", True, True, 2 * MIB), ("cpu", True, False, 4 * MIB),
     ("cpu", True, True, 4 * MIB)],
)  # fmt: skip
def test_effective_weights_are_merged_from_a_size_on(device, by_mask, replayed, least):
    assert decide_merge(least, device, by_mask, replayed).implementation == "merged"
    assert decide_merge(least - 1, device, by_mask, replayed).dense


def test_effective_weights_by_positions_are_inductors_on_a_cpu():
    decision = decide_merge(1 << 40, "cpu", False, False)
    assert decision.dense and "on cpu Inductor scatters by positions as fast" in decision.reason
