"""The study of networks on a grid in small: both networks get the same, and what is told of them is in the rows."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import saving
from bench.local import problems, scores, study, verbs
from bench.local.study import Run, Setting

pytestmark = pytest.mark.usefixtures("one_thread")

TEACHER = ["--problems", "local teacher", "--k", "4", "8", "--depth", "1", "--activation", "relu", "--dtype", "float32",
           "--compiled", "no", "--seeds", "2", "--epochs", "1", "--device", "cpu"]  # fmt: skip


def setting(**changed: Any) -> Setting:
    return Setting(data="local teacher", **{**study.MIDDLE, **changed}, epochs=1, device="cpu")


def row(network: str, seed: int, score: float, **changed: Any) -> dict[str, Any]:
    """What a run would give, 1 ms a step."""
    told = {"parameters": 100, "matches": True, "score": score, "step_ms": 1.0, "wall_s": 1.0, "compile_s": 0.0}
    return {**setting(**changed)._asdict(), "network": network, "seed": seed, **told}


def both(sparse: dict[int, float], dense: dict[int, float], **changed: Any) -> list[dict[str, Any]]:
    """Rows of scores by seed."""
    given = {"sparse": sparse, "dense": dense}
    return [row(name, seed, score, **changed) for name, found in given.items() for seed, score in found.items()]


def test_rows_of_a_split_are_each_in_one_part_and_standardised_by_training() -> None:
    x = torch.arange(100.0)[:, None] * torch.tensor([1.0, 0.0])  # the second says nothing
    parts = problems.split(problems.Problem(x, x[:, :1].clone(), (1, 2), 1), seed=3)
    assert len(parts.test_x) == 20 and len(parts.x) == 80
    assert len(torch.cat([parts.x, parts.test_x])[:, 0].unique()) == 100
    torch.testing.assert_close(parts.x.mean(0), torch.zeros(2))
    torch.testing.assert_close(parts.x.std(0), torch.tensor([1.0, 0.0]))
    torch.testing.assert_close(parts.y, parts.x[:, :1])
    assert not torch.equal(parts.test_x, problems.split(problems.Problem(x, x, (1, 2), 1), seed=4).test_x)


def test_scores_are_those_of_scikit_learn() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    torch.manual_seed(0)
    wanted = torch.randn(50, 3)
    found = wanted + torch.randn(50, 3)
    numbers = problems.Problem(wanted, wanted, (1, 3), 1)
    assert numbers.score(found, wanted) == pytest.approx(100 * metrics.r2_score(wanted.double(), found.double()))
    classes = problems.Problem(wanted, wanted.argmax(1), (1, 3), 1)
    right = metrics.accuracy_score(wanted.argmax(1), found.argmax(1))
    assert classes.score(found, wanted.argmax(1)) == pytest.approx(100 * right) and classes.outputs == 3


def test_the_teacher_is_the_same_in_each_process_and_leaves_the_random_stream() -> None:
    torch.manual_seed(5)
    first = torch.rand(1)
    torch.manual_seed(5)
    made = problems.PROBLEMS["local teacher"]()
    assert torch.equal(torch.rand(1), first) and made.digest == problems.PROBLEMS["local teacher"]().digest
    assert made.y.std(0).min() > 0.1, "it says something"


def test_one_setting_is_varied_at_a_time_or_all() -> None:
    axes = {"k": (4, 8), "depth": (1, 3), "activation": ("relu",), "dtype": ("float32",), "compiled": (False,)}
    found = [(one["k"], one["depth"]) for one in study.around(axes)]
    assert found == [(8, 1), (4, 1), (8, 3)]  # 8 is the middle, and of depth the first is, as 2 is not there
    assert {(one["k"], one["depth"]) for one in study.product(axes)} == {(4, 1), (4, 3), (8, 1), (8, 3)}
    assert len(list(study.around(study.AXES))) == 1 + 3 + 2 + 4 + 1 + 1


@pytest.mark.parametrize("k", study.AXES["k"])
def test_both_networks_have_as_many_parameters(k: int) -> None:
    rows = [study.trained(Run(setting(k=k, depth=1), network, 0)) for network in study.NETWORKS]
    assert rows[1]["matches"] and rows[1]["parameters"] == pytest.approx(rows[0]["parameters"], rel=0.01)
    assert rows[0]["steps"] == rows[1]["steps"] == 3200 // study.BATCH
    assert rows[0] == {**rows[0], **setting(k=k, depth=1)._asdict()}


def test_a_run_gives_the_same_again_and_learns() -> None:
    run = Run(setting()._replace(epochs=3), "sparse", 1)
    first, again = study.trained(run), study.trained(run)
    assert first["score"] == again["score"] > 50
    assert Run.of(json.loads(json.dumps(first))) == run


def test_a_network_is_better_if_its_mean_is_higher_by_more_than_both_deviations() -> None:
    rows = [
        *both({0: 90, 1: 91, 2: 92}, {0: 80, 1: 81, 2: 82}), *both({0: 50, 2: 52}, {0: 51, 2: 53}, k=4),
        *both({0: 10, 1: 11}, {0: 20, 1: 21}, k=16), *both({0: 1}, {0: 99}, k=32), row("sparse", 0, 1.0, depth=4),
    ]  # fmt: skip
    found = scores.pairs(rows)
    assert [pair.better for pair in found] == ["sparse", None, "dense", None]
    assert found[0].scores["sparse"] == (91, 1) and str(found[3].scores["sparse"]) == "1.0 ± –"
    text = scores.table(rows)
    assert "Dense wins in 1 of 4 settings (local teacher 1 of 4)." in text
    assert "Sparse wins in 1 of 4 settings (local teacher 1 of 4). In 2 the means" in text
    assert "| local teacher | k=8, 2 blocks, relu, float32 | 100 / 100 | 91.0 ± 1.0 | 81.0 ± 1.0 | sparse |" in text
    assert scores.plot(rows, "a card").panels["local teacher"] == {
        "sparse": [(4, 51.0), (8, 91.0), (16, 10.5), (32, 1.0)],
        "dense": [(4, 52.0), (8, 81.0), (16, 20.5), (32, 99.0)],
    }


def test_a_study_goes_on_from_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    out = ["--out", str(tmp_path)]
    verbs.main("geo-sweep", [*TEACHER, *out, "--seconds", "0"])
    path = tmp_path / "geo_sweep.json"
    first = json.loads(path.read_text())["result"]
    assert len(first) == 1, "one run, then the time was over"
    verbs.main("geo-sweep", [*TEACHER, *out])
    found = json.loads(path.read_text())
    assert found["result"][:1] == first and len({Run.of(one) for one in found["result"]}) == 8
    assert found["manifest"]["problems"]["local teacher"]["rows"] == 4000
    with path.with_suffix(".csv").open() as file:
        assert [float(line["score"]) for line in csv.DictReader(file)] == [one["score"] for one in found["result"]]
    assert path.with_suffix(".svg").read_text().startswith("<?xml")

    def never(run: Run) -> None:
        raise AssertionError(f"{run} is in the file")

    monkeypatch.setattr(study, "trained", never)
    verbs.main("geo-sweep", [*TEACHER, *out])
    monkeypatch.setattr(saving, "machine", lambda: {"gpu": "another"})
    with pytest.raises(AssertionError, match="is in the file"):
        verbs.main("geo-sweep", [*TEACHER, *out])


def test_data_that_is_not_installed_is_left_out_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> problems.Problem:
        raise ModuleNotFoundError("No module named 'mlxtend'")

    monkeypatch.setitem(problems.PROBLEMS, "gone", missing)
    found, left_out = problems.available(("gone", "local teacher"))
    assert list(found) == ["local teacher"] and "mlxtend" in left_out["gone"]
