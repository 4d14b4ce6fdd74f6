"""The parts of documents and the plots that are made of results, from rows whose speeds one can work out by hand."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench import documents, plots, table


def layer(size: int, rows: int, dtype: str, training: bool, **ms: float) -> dict[str, Any]:
    """A row of `loop.json`; stock takes 1 ms."""
    what = {"size": size, "sparsity": 0.9, "rows": rows, "dtype": dtype, "training": training}
    return {"layer": what, "ms": {"stock, default": 1.0} | {f"{which}, default": time for which, time in ms.items()}}


@pytest.fixture
def results(tmp_path: Path) -> Path:
    layers = [
        layer(2048, 1, "float32", False, sparsecomp=2.0, frozen=0.5),
        layer(4096, 1, "float32", False, sparsecomp=0.5, frozen=0.125),
        layer(256, 1, "float32", False, sparsecomp=1.0, frozen=1.0),
        layer(4096, 512, "float16", True, sparsecomp=1.25),
    ]
    network = {"network": "net", "training": False, "ms": {"stock, default": 3.0, "frozen, default": 2.0}}
    dead = {"network": "dead", "training": False, "ms": {}}
    networks = [network, dead]
    for name, gpu, rows in (("loop", "H100 80GB HBM3", layers), ("loop_networks", "H200", networks)):
        written = {"machine": {"gpu": f"NVIDIA {gpu}"}, "result": rows}
        (tmp_path / f"{name}.json").write_text(json.dumps(written))
    return tmp_path


def test_the_headline_has_means_and_ranges_of_layers_and_the_speed_of_each_network(results: Path) -> None:
    assert table.headline(results).splitlines()[2:] == [
        "| layers, float32 (H100) | inference | 1.00 (0.50 to 2.00) | 2.52 (1.00 to 8.00) | – | – |",
        "| layers, float16 (H100) | training | 0.80 (0.80 to 0.80) | – | – | – |",
        "| net (H200) | inference | – | 1.50 | – | – |",
    ]


def test_a_plot_of_layers_has_the_geometric_mean_of_large_ones(results: Path) -> None:
    makers = {name: plots.MAKERS[name](results) for name in ("layers.svg", "layers_frozen.svg", "layers_training.svg")}
    assert makers["layers.svg"].panels == {"float32": {"1 row": [(90.0, 1.0)]}, "float16": {}}
    assert makers["layers_frozen.svg"].panels["float32"] == {"1 row": [(90.0, 4.0)]}  # of 2 and 8
    assert makers["layers_training.svg"].panels["float16"] == {"512 rows": [(90.0, 0.8)]}
    assert "H100 80GB HBM3" in makers["layers.svg"].title


def test_a_document_without_the_place_of_a_part_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "ROOT", tmp_path)
    monkeypatch.setattr(documents, "PARTS", {"page.md": {"part": lambda results: "made\n"}})
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- part -->\nold\n<!-- /part -->\nafter\n")
    documents.write(tmp_path)
    assert page.read_text() == "before\n<!-- part -->\n\nmade\n\n<!-- /part -->\nafter\n"
    page.write_text("<!-- part -->\n")
    with pytest.raises(ValueError, match="page.md needs one"):
        documents.write(tmp_path)
