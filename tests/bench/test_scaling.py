"""The benchmark of several processes counts what is sent, on a CPU."""

import pytest

from bench.sparse import scaling


@pytest.mark.slow(reason="starts processes")
def test_bytes_that_are_sent_are_those_of_stored_values():
    rows = list(scaling.run(scaling.mlp(width=40, layers=3, rows=4, sparsity=0.9), (1, 2), "cpu"))
    assert [(row["network"], row["world"]) for row in rows] == [
        ("dense", 1), ("sparse", 1), ("dense", 2), ("sparse", 2),
    ]  # fmt: skip
    wanted = {"dense": 3 * (40 * 40 + 40) * 4, "sparse": 3 * (160 + 40) * 4}
    for row in rows:
        assert (row["reduced"], row["broadcast"]) == (wanted[row["network"]], 0)
        assert row["ms"] > 0 and row["compiled s"] > 0
    assert scaling.table(rows).count("\n") == 5
