"""The studies of training that stays or ends sparse: what they train, and what their tables say."""

import pytest
import torch

pytest.importorskip("sklearn", reason="scikit-learn, which ships the digits, is not installed")

from bench.masked import resu_mnist
from bench.masked.resu_mnist import Problem
from bench.sparse import algebra, dynamic, sparse_products, training_step
from sparsecomp.formats import CSR

DIGITS = Problem("digits", "MLP", 1)
WORK = {"dense": 1.0, "static": 0.1, "SET": 0.1, "Top-KAST": 0.4 / 3, "STE 2:4": 2 / 3, "SR-STE 2:4": 2 / 3}


@pytest.fixture
def digits(monkeypatch):
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    found = torch.as_tensor(images[:400], dtype=torch.float32) / 16, torch.as_tensor(labels[:400]).long()
    monkeypatch.setattr(resu_mnist, "load", lambda data: found)


@pytest.mark.parametrize("method", [*dynamic.METHODS, dynamic.RESU])
def test_every_method_ends_with_the_zeros_it_was_asked_for(method, digits):
    sparsity = {"dense": 0.0}.get(method, 0.5 if method.endswith("2:4") else 0.9)
    figures = dynamic.trained(dynamic.Run(DIGITS, method, sparsity, 1, 0))
    assert figures["reached"] == pytest.approx(sparsity, abs=0.006)  # whole rows of weights, by SRigL
    assert method not in WORK or figures["work"] == pytest.approx(WORK[method])
    if method == "gradual":  # five steps: behind each of the first four the cubic (Zhu & Gupta 2017), 0.9 from then on
        cubic = [0.9 * (1 - (1 - step / 3) ** 3) for step in range(4)]
        assert figures["work"] == pytest.approx(1 - (0.75 * sum(cubic) / 4 + 0.25 * 0.9))


def test_what_is_better_than_a_static_pattern_is_by_more_than_the_seeds():
    row = {"data": "digits", "network": "MLP", "epochs": 1, "sparsity": 0.9, "longer": 1, "sd": 0.3, "work": 0.1}
    rows = [row | {"method": name, "mean": mean} for name, mean in (("static", 90.0), ("RigL", 90.4), ("SET", 91.0))]
    rows += [row | {"method": "gradual", "mean": 89.0}, row | {"method": "RigL", "mean": 99.0, "longer": 5}]
    told = dynamic.table(rows)
    assert told.endswith("Better than a static pattern: SET at 90%. Worse: gradual at 90%.")
    assert "| RigL, 5× the steps | 99.0 ± 0.3 (0.10) |" in told


def test_a_step_s_speed_is_of_the_dense_one_in_its_mode():
    ms = {"dense, default": 6.0, "sparse by sparsecomp, default": 2.0, "dense, reduce-overhead": 5.0}
    told = training_step.table([{"sparsity": 0.9, "dtype": "float32", "ms": ms, "MiB": {"sparse by sparsecomp": 300}}])
    assert "| 90% | float32 | default | 6 | – | – | 2 (3.00), 300 MiB |  |" in told
    assert "| 90% | float32 | reduce-overhead | 5 | – | – | – |  |" in told


def test_products_of_sparse_matrices_are_timed_beside_their_peers(monkeypatch):
    monkeypatch.setattr(sparse_products, "RANDOM", 60)
    monkeypatch.setenv("SPARSECOMP_TEST_DATA", "")
    (row,) = sparse_products.run("cpu", rounds=1)
    names = {name for pair in sparse_products.COLUMNS for name in pair}
    assert set(row["ms"]) == names | {"scipy"} and "left out" not in row
    assert sparse_products.table([row]).splitlines()[2].startswith("| random 60², 1 %, squared | ")
    (_, (one, other)), = sparse_products.pairs("cpu")
    wide = one.to_dense()[:, :40].contiguous()
    for a, b in ((one, other), (CSR.from_dense(wide), CSR.from_dense(wide.mT.contiguous()))):
        dense, calls = a.to_dense() @ b.to_dense(), sparse_products.masked(a, b)
        found = [calls[name]() for name in ("masked", "masked, by columns")]
        where = sparse_products.keys_of(found[0].crow, found[0].col, dense.shape[1])
        for values in (*(one.values for one in found), calls["cuSPARSE, then the mask"]()):
            torch.testing.assert_close(values, dense.flatten()[where])
        for name, call in {**sparse_products.whole(a, b, 4000), **sparse_products.at_known(a, b)}.items():
            torch.testing.assert_close(call().to_dense(), dense, msg=name)


def test_the_table_of_patterns_names_the_peer_that_a_device_has():
    rows = [{"case": "union", "sparsecomp": 2.0, "radix sort": 3.0}]
    assert algebra.table(rows).splitlines()[0] == "| case | sparsecomp | radix sort | radix sort ÷ sparsecomp |"
    assert algebra.table([{"case": "union", "sparsecomp": 2.0, "scipy": 3.0}]).splitlines()[2].endswith("| 1.50 |")
