"""The tables of layers of few rows, of gated pairs and of generation, from rows as the benchmarks give them."""

from importlib.util import find_spec

import pytest

from bench.sparse import few_rows, gated_pairs, shared_input, two_of_four


def test_layers_of_few_rows():
    layer = {"out": 64, "k": 32, "rows": 1, "zeros": 0.7}
    times = {"dense": 0.03, "NARROW": 0.02}, {"dense": 0.03, "bitmap": 0.01}
    rows = [{"layer": layer, "ms": ms} for ms in times]
    lines = few_rows.table(rows).splitlines()
    assert lines[2:] == [
        "| 64x32 | 70% | 1 | 0.0300 | 0.0200 (1.50) | – |", "| 64x32 | 70% | 1 | 0.0300 | – | 0.0100 (3.00) |"
    ]  # fmt: skip


def test_layers_of_few_rows_of_two_of_four():
    layer = {"out": 64, "k": 32, "rows": 1, "dtype": "float16"}
    rows = [{"layer": layer, "ms": {"dense": 0.03, "packed": 0.02, "ordinary": 0.06}}]
    assert two_of_four.table(rows).splitlines()[2:] == [
        "| 64x32 | float16 | 1 | 0.0300 | 0.0200 (1.50) | – | 0.0600 (0.50) |"
    ]


def test_gated_pairs():
    pair = {"form": "NARROW", "out": 64, "k": 32, "zeros": 0.7, "rows": 1}
    rows = [
        {"pair": pair, "ms": {"stock": 0.06, "apart": 0.04, "pair": 0.03}, "estimate, ms": {"apart": 3.0, "pair": 2.0}},
        {"pair": pair, "ms": {"stock": 0.06, "apart": 0.04}, "estimate, ms": {}},
    ]
    assert gated_pairs.table(rows).splitlines()[2:] == [
        "| 64x32 | NARROW | 70% | 1 | 0.0600 | 0.0400 (1.50) | 0.0300 (2.00) | 1.33 | 1.50 |",
        "| 64x32 | NARROW | 70% | 1 | 0.0600 | 0.0400 (1.50) | – | – | – |",
    ]


def test_layers_on_one_input():
    layers = {"outs": [64, 32], "k": 48, "zeros": 0.5, "rows": 1}
    ms = {"stock": 0.04, "stock, one layer": 0.02, "max-autotune": 0.05, "apart": 0.02, "together": 0.01}
    rows = [{"layers": layers, "ms": ms, "estimate, ms": {"apart": 3.0, "together": 2.0}}, {"layers": layers, "ms": {}}]
    assert shared_input.table(rows).splitlines()[2:] == [
        "| 64 + 32 | 48 | bitmap of twos | 50% | 1 | 0.0400 | 0.0200 (2.00) | 0.0500 (0.80) | 0.0200 (2.00) "
        "| 0.0100 (4.00) | 2.00 | 1.50 |",
        "| 64 + 32 | 48 | bitmap of twos | 50% | 1 | 0.0000 | – | – | – | – | – | – |",
    ]


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed: pip install transformers")
@pytest.mark.slow(reason="imports transformers")
def test_generation():
    from bench.sparse import generation

    rows = [
        {"who": who, "batch": 8, "zeros": zeros, "tokens a second": speed, "MiB": 10.0, "MiB held": 20.0, **more}
        for who, zeros, speed, more in (
            ("stock, max-autotune", 0.7, 50.0, {}), ("sparsecomp", 0.9, 100.0, {"as dense": 0.995}),
            ("sparsecomp, one weight", 0.9, 90.0, {"as dense": 0.995}),
            ("stock", 0.7, 40.0, {}),
        )
    ]  # fmt: skip
    rows.append({"who": "sparsecomp", "batch": 1, "zeros": 0.5, "left out": {"tokens a second": "RuntimeError"}})
    assert generation.table(rows).splitlines()[2:] == [
        "| 8 | stock | 40 | 10 | 20 | – |", "| 8 | stock, max-autotune | 50 | 10 | 20 | – |",
        "| 8 | sparsecomp, 90% zeros | 100 (2.00) | 10 | 20 | 99.5% |",
        "| 8 | sparsecomp, one weight, 90% zeros | 90 (1.80) | 10 | 20 | 99.5% |",
    ]  # fmt: skip
