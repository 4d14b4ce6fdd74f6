"""The tables of models as called, made of rows whose speeds one can work out by hand."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from bench import table

MODES = ("default", "reduce-overhead")
MACHINE = {"gpu": "a card", "torch": "2.0", "triton": "3.0"}


def layer(rows: int, stock: float, ours: float, *, training: bool = False, **more: Any) -> dict[str, Any]:
    """A row of `bench.loop` in default mode; `frozen`, where there is one, takes what stock does."""
    whole = ("sparsecomp",) if training else ("sparsecomp", "frozen")
    times = {"stock": stock, "sparsecomp": ours, **({} if training else {"frozen": stock})}
    return {
        "layer": {"size": 512, "sparsity": 0.9, "rows": rows, "dtype": "float16", "training": training},
        "ms": {f"{which}, default": ms for which, ms in times.items()},
        "implementation": {f"{which}, default": ["CSR: it pays"] for which in whole}, **more,
    }  # fmt: skip


def network(name: str, ms: dict[str, float], **more: Any) -> dict[str, Any]:
    """A row of `bench.loop_networks`."""
    return {"network": name, "shape": [4, 2, 3], "training": False, "ms": ms, **more}


def grid(text: str, header: str) -> list[list[str]]:
    """Cells of the table whose first column has this header, without its head."""
    lines = text.split(f"| {header} |", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_layers_are_counted_by_what_ran_step_and_mode() -> None:
    rows = [layer(1, 0.97, 1.0), layer(2, 0.96, 1.0), layer(4, 4.0, 1.0), layer(8, 1.0, 2.0, training=True)]
    counts = {tuple(cells[:3]): cells[3:] for cells in grid(table.layers_as_called(rows), "layers")}
    assert counts == {
        ("sparsecomp", "inference", "default"): ["3", "2", "1.55", "0.96", "4.00"],  # (0.97 · 0.96 · 4) ** (1/3)
        ("frozen", "inference", "default"): ["3", "3", "1.00", "1.00", "1.00"],
        ("sparsecomp", "training", "default"): ["1", "0", "0.50", "0.50", "0.50"],
    }


def test_the_slowest_ten_layers_come_slowest_first() -> None:
    rows = [layer(number, 1.0, 1.0 + number) for number in range(1, 13)]
    slowest = grid(table.layers_as_called(rows), "slowest layers")
    assert [int(cells[1]) for cells in slowest] == list(range(12, 2, -1))
    assert slowest[0] == [
        "512x512 90%", "12", "float16", "inference", "sparsecomp, default", "CSR", "1.00", "13.00", "0.08",
    ]  # fmt: skip


def test_networks_stand_beside_stock_in_each_mode() -> None:
    ms = {f"{which}, {mode}": value for mode in MODES for which, value in (("stock", 3.0), ("sparsecomp", 2.0))}
    rows = [
        network("spiking", {**ms, "frozen, default": 4.0}, rates={"least": 0.1, "mean": 0.125, "most": 0.2}),
        network("mlp", {"stock, default": 0.5, "sparsecomp, default": 0.5}, training=True),
    ]
    assert grid(table.networks_as_called(rows), "network") == [
        ["spiking", "4×2×3", "12.5%", "inference", "3.00", "2.00 (1.50)", "4.00 (0.75)", "3.00", "2.00 (1.50)", "–"],
        ["mlp", "4×2×3", "–", "training", "0.500", "0.500 (1.00)", "–", "–", "–", "–"],
    ]


@pytest.mark.parametrize("tables", [table.layers_as_called, table.networks_as_called])
def test_what_was_left_out_is_told(tables: Any) -> None:
    failed = {"left out": {"reduce-overhead": "OutOfMemoryError: full"}}
    named = {"ms": {"stock, default": 1.0, "sparsecomp, default": 1.0}, "name": "one"}
    rows = [{**layer(1, 1.0, 1.0), **network(named["name"], named["ms"]), **failed}] * 2
    assert tables(rows).endswith("\n\nLeft out of 2 rows: reduce-overhead (OutOfMemoryError: full).")


def test_a_network_that_was_not_timed_is_named_with_its_reason() -> None:
    text = table.networks_as_called([network("dead", {}, **{"left out": {"default": "DeadNetworkError: 0"}})])
    assert grid(text, "network") == [] and "Left out of 1 rows: default (DeadNetworkError: 0)." in text


def test_the_tables_lead_the_results_as_soon_as_they_were_measured(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    results = tmp_path / "results"
    shutil.copytree(table.RESULTS, results, ignore=shutil.ignore_patterns("loop*.json"))
    without = table.markdown(results)
    assert "as called" not in without.lower()
    layers = [layer(1, 1.0, 0.5)]
    (results / "loop.json").write_text(json.dumps({"machine": MACHINE, "result": layers}))
    head = f"Measured on one a card, torch 2.0, Triton 3.0; milliseconds.\n\n{table.layers_as_called(layers)}\n\n"
    assert table.markdown(results) == head + without
    networks = [network("mlp", {"stock, default": 1.0, "sparsecomp, default": 1.0})]
    (results / "loop_networks.json").write_text(json.dumps({"machine": MACHINE, "result": networks}))
    assert table.networks_as_called(networks) in table.markdown(results)
