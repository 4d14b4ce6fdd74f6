"""The record that a new card prints: the rows that the H100 gave make the H100's record, and it is Python to paste."""

import json
from dataclasses import asdict
from typing import Any

import pytest

from bench import card
from bench.table import RESULTS
from sparsecomp.lowering.tuning.cards import H100, ByPrecision, Card

KINDS = {
    ("conv", "float32"): 0.05,
    ("conv", "float16"): 0.01,
    ("linear", "float32"): 0.05,
    ("linear", "float16"): 0.05,
}
"""Densities at which the H100 was measured: of float16 the densest that is for events."""


@pytest.fixture
def rows() -> list[dict[str, Any]]:
    """Those of the H100's committed results that `bench card` measures."""
    found = [{"case": "ceilings", **asdict(H100)}]
    for row in json.loads((RESULTS / "snn_conv.json").read_text())["result"]:
        if row.get("spikes") != "independent" or row["case"].startswith("linear 512"):
            continue
        density = KINDS[row["case"].split()[0], row["dtype"]]
        if row["density"] == pytest.approx(density, rel=0.05):
            # float16 in channels-first memory was not measured then
            found.append({**row, "ms": {"dense fp16 nchw": 1.0, **row["ms"]}})
    return found


def numbers(value: float | ByPrecision) -> tuple[float, ...]:
    return (value.tf32, value.half) if isinstance(value, ByPrecision) else (value,)


def test_the_h100s_rows_make_the_h100s_record(rows: list[dict[str, Any]]) -> None:
    """The record rounds earlier runs; of float32 it takes cuDNN's best stage for all, so that is left out here."""
    found = card.record(rows)
    assert (found.tf32, found.int8) == pytest.approx((H100.tf32, H100.int8), rel=0.03)
    assert found.conv.tf32 == pytest.approx(H100.conv.tf32, rel=0.1)
    for name in ("matmul", "conv_channels_last", "narrow", "int8_narrow", "int8_two_digits"):
        assert numbers(getattr(found, name)) == pytest.approx(numbers(getattr(H100, name)), rel=0.25), name
    for name in ("events_float32", "events_half"):
        assert getattr(found, name) == pytest.approx(getattr(H100, name), rel=0.3), name
    assert found.gathered == H100.gathered and found.tile_half == H100.tile_half


def test_what_is_printed_is_the_record(rows: list[dict[str, Any]]) -> None:
    found, names = card.record(rows), dict[str, Any](Card=Card, ByPrecision=ByPrecision)
    text = card.pasted(found, "NVIDIA H200 NVL", "2.13.0")
    code, known = text.split("\n\n")
    exec(code, names)
    assert known == 'in KNOWN: "NVIDIA H200 NVL": H200_NVL,'
    for name, value in asdict(names["H200_NVL"]).items():
        assert name == "capability" or value == pytest.approx(asdict(found)[name], rel=5e-3), name
    assert names["H200_NVL"].capability == "9.0"
    assert max(map(len, text.splitlines())) <= 120
