"""The benchmark of layers of fixed fan-in: rivals compute the same, cases cover what they should, and its tables."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from bench import documents
from bench.local import speed, speeds, verbs
from bench.local.patterns import PATTERNS, index_of, radius_for
from bench.local.speed import Case

CASE = Case("cpu", "table", 49, 5, 3, "random", "float32", training=False)


def row(ms: dict[str, float], **changed: Any) -> dict[str, Any]:
    return {"layer": CASE._replace(**changed)._asdict(), "ms": ms}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_rivals_are_the_dense_layer_with_scattered_weights(pattern: str) -> None:
    case = CASE._replace(pattern=pattern)
    layer = speed.layer_of(case)
    weight = torch.zeros(49, 49).index_put(
        (torch.arange(49)[:, None].expand(49, 5), layer.in_index_per_out.long()), layer.weight, accumulate=True
    )
    for name in ("sparsecomp", "plain by sparsecomp", "Inductor", "cuSPARSE"):
        rival = speed.MAKERS[name](case, layer)
        torch.testing.assert_close(rival.module(rival.x), F.linear(rival.x, weight, layer.bias))


def test_every_pattern_has_k_inputs_of_its_grid() -> None:
    assert [radius_for(k) for k in (1, 2, 9, 10, 25, 26, 49, 50)] == [0, 1, 1, 2, 2, 3, 3, 4]
    for k in speed.FAN_INS:
        local, random = (index_of(256, k, pattern) for pattern in PATTERNS)
        assert local.shape == random.shape == (256, k) and 0 <= int(random.min()) <= int(random.max()) < 256
    middle = index_of(256, 9, "local")[8 * 16 + 8].sort().values
    assert middle.tolist() == [8 * 16 + 8 + 16 * down + right for down in (-1, 0, 1) for right in (-1, 0, 1)]


def test_the_grid_is_small_and_any_two_sizes_meet() -> None:
    cases = list(speed.grid_cases("cuda"))
    assert len(cases) <= 60 and len(set(cases)) == len(cases)
    assert len({(case.n, case.k) for case in cases}) == len(speed.SIZES) * len(speed.FAN_INS)
    assert len({(case.n, case.rows) for case in cases}) == len(speed.SIZES) * len(speed.ROWS)
    assert len({(case.k, case.rows) for case in cases}) == len(speed.FAN_INS) * len(speed.ROWS)
    assert len({(case.pattern, case.training) for case in cases}) == 4
    assert max(case.n for case in speed.curve_cases("cuda")) == 2**20
    every = [case for part in speed.PARTS.values() for device in ("cpu", "cuda") for case in part(device)]
    assert [Case.of(json.loads(json.dumps({"layer": case._asdict()}))) for case in every] == every


def test_an_error_is_relative_to_the_exact_result() -> None:
    layer = speed.layer_of(CASE)
    call = speed.Timed(speed.Rival(speed.Plain(layer), torch.randn(3, 49), None), "default", CASE)
    assert speed.error_of(layer, call) < 1e-6
    compiled, call.compiled = call.compiled, lambda x: 1.01 * compiled(x)
    assert speed.error_of(layer, call) == 0.01


def test_speeds_stand_beside_inductor_in_their_mode() -> None:
    ms = {"sparsecomp, default": 0.5, "Inductor, default": 2.0, "sparsecomp, graph": 0.01, "Inductor, graph": 0.2,
          "cuSPARSE, default": 4.0}  # fmt: skip
    text = speeds.table([{**row(ms), "floor ms": 0.005, "left out": {"psann": "ModuleNotFoundError: none"}}])
    name = "| n=49, k=5, random | 3 | inference |"
    assert f"{name} default | 0.5 (4.0) | 2 | 4 (0.5) | – |" in text
    assert f"{name} graph | 0.0100 (20.0) | 0.200 | – | 0.0050 |".replace("0.200", "0.2") in text
    assert text.endswith("Left out of 1 rows: psann (ModuleNotFoundError: none).")


def test_the_grid_is_counted_and_its_slowest_come_first() -> None:
    given = ((4, 4.0), (9, 0.25))
    rows = [row({"sparsecomp, default": 1.0, "Inductor, default": ms}, part="grid", n=n) for n, ms in given]
    text = speeds.table([*rows, row({"sparsecomp, default": 1.0}, part="grid")])
    assert "| sparsecomp | inference | default | 2 | 1 | 1.00 | 0.25 | 4.00 |" in text
    slowest = "| n=9, k=5, random | 3 | inference | sparsecomp, default | 0.25 | 1 | 0.25 |"
    assert text.index(slowest) < text.index("| n=4,")


def test_the_curve_tells_what_a_weight_and_row_cost() -> None:
    one = row({"sparsecomp, default": 0.001, "Inductor, default": 0.002}, part="curve", n=1000, k=10, rows=10)
    assert "| n=1000, k=10, random | 10 | 0.0010 (2.0) | 0.0020 | 10.00 |" in speeds.table([one])  # 1 us for 100,000
    assert speeds.plot([one], "a card").panels["random"]["Inductor, default"] == [(1000, 0.002)]


def test_documents_say_what_is_not_measured(tmp_path: Path) -> None:
    part = documents.PARTS["docs/results.md"]["geo-speed"]
    assert part(tmp_path) == "Not measured yet: `python -m bench geo-speed` does."
    found = {"machine": {"gpu": "none", "cpu": "x86", "torch": "2"}, "result": [], "manifest": {"left out": {"a": "b"}}}
    (tmp_path / "geo_speed.json").write_text(json.dumps(found))
    assert part(tmp_path) == "Measured on x86, torch 2; milliseconds.\n\n\n\na is left out: b."


@pytest.mark.slow(reason="compiles, in another process")
def test_cases_are_measured_and_not_measured_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--out", str(tmp_path), "--device", "cpu", "--parts", "grid", "curve", "--most", "1"]
    verbs.main("geo-speed", given)
    path = tmp_path / "geo_speed.json"
    rows = json.loads(path.read_text())["result"]
    assert [set(one["ms"]) for one in rows] == [
        {"sparsecomp, default", "plain by sparsecomp, default", "Inductor, default"},
        {"sparsecomp, default", "Inductor, default"},
    ]
    assert all("left out" not in one and max(one["error"].values()) < 1e-6 for one in rows)
    capsys.readouterr()
    verbs.main("geo-speed", given)
    assert json.loads(path.read_text())["result"] == rows and "of 2, " not in capsys.readouterr().out
