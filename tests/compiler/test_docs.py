"""The README says what the code does: options, environment variables, columns, paths and the test command."""

import re
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import table as results
from bench.__main__ import STUDIES, SUITES
from sparsecomp import environment, formats
from sparsecomp.environment import Settings
from sparsecomp.options import Options
from sparsecomp.passes.rules import RULES
from sparsecomp.report import Report

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def table(first_header: str) -> dict[str, list[str]]:
    """Rows of the README's table whose first column has this header, by their first cell without backticks."""
    lines = README.split(f"\n| {first_header} |", 1)[1].splitlines()[2:]
    rows: dict[str, list[str]] = {}
    for line in lines:
        if not line.startswith("|"):
            break
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        rows[cells[0].strip("`")] = cells[1:]
    return rows


def test_every_option_and_no_other_with_its_default() -> None:
    made = {item.name: item.default_factory for item in fields(Options) if item.default_factory is not MISSING}
    defaults = {item.name: made[item.name]() if item.name in made else item.default for item in fields(Options)}
    shown = {name: cells[0].strip("`") for name, cells in table("option").items()}
    assert shown == {name: repr(value).replace("'", '"') for name, value in defaults.items()}


@pytest.mark.parametrize("option", ["precision", "implementation", "neurons", "mode"])
def test_every_value_in_the_table_is_one(option: str) -> None:
    documented = re.findall(r"`([\w-]+)`", table("option")[option][1])
    assert documented
    for value in documented:
        Options(**{option: value})
    with pytest.raises(Exception, match="use one of") as caught:
        Options(**{option: "no such value"})
    known = re.findall(r"'([\w-]+)'", str(caught.value).split("use one of")[1])
    assert set(known) - {"default"} <= set(documented)


def test_every_promise() -> None:
    default, meaning = table("option")["frozen"]
    with pytest.raises(Exception, match="use one of") as caught:
        Options(frozen="no such value")
    known = str(caught.value).split("use one of ")[1].replace("'", '"').split(", ")
    assert known == re.findall(r"`([^`]+)`", default + meaning)


def test_every_rule() -> None:
    shown = re.findall(r"`(\w+)`", table("option")["disable"][1])
    assert sorted({*shown} - {"all"}) == sorted(rule.name for rule in RULES)


def test_every_environment_variable() -> None:
    sources = [path for name in ("sparsecomp", "passes", "lowering") for path in (ROOT / name).rglob("*.py")]
    read = {name for path in sources for name in re.findall(r"SPARSECOMP_[A-Z_]+", path.read_text())}
    assert f"\n{environment.markdown()}\n\n" in README
    assert read == set(table("environment variable")) == {item.metadata["variable"] for item in fields(Settings)}


def test_every_column_of_the_report() -> None:
    assert list(table("column")) == [str(column.header) for column in Report().to_table().columns]


def test_every_path_of_the_layout_exists() -> None:
    section = README.split("## Where things are")[1].split("##")[0]
    paths = [path.strip(",") for line in re.findall(r"^    (\S+, \S+|\S+)", section, re.M) for path in line.split()]
    assert len(paths) >= 8
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_continuous_integration_runs_the_command_of_the_readme() -> None:
    section = README.split("## Test it")[1]
    command = re.search(r"```bash\n(.*)\n```", section)
    assert command is not None
    assert f"\n({command.group(1)}) ||" in (ROOT / ".ci" / "run").read_text()


def test_the_results_are_the_benchmarks_own_and_nothing_else() -> None:
    pytest.importorskip("triton")
    between = README.split("<!-- results -->")[1].split("<!-- /results -->")[0]
    assert between.strip() == results.markdown().strip()


def test_every_suite_of_a_gpu_is_named() -> None:
    sentence = README.split("On a CUDA machine `python -m bench` with ")[1].split("measures again")[0]
    named = set(re.findall(r"`([\w-]+)`", sentence)) | {"snn-conv", "snn-network"}  # the two of `snn`
    assert named == set(SUITES) - {"card", "cpu", "table", *STUDIES}


def test_the_sparse_example_runs_and_its_file_holds_the_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section = README.split("## Sparse weights")[1].split("\n## ")[0]
    code = re.search(r"```python\n(.*?)```", section, re.S)
    assert code is not None
    monkeypatch.chdir(tmp_path)
    torch.compiler.reset()  # other tests may have taken nn.Sequential's forward to Dynamo's limit of compilations
    names: dict[str, Any] = {}
    exec(code.group(1), names)
    weight, gradient = names["pruned"][0].weight, names["pruned"][0].values.grad
    stored = formats.CSR.load("weight.safetensors")
    assert stored.nnz == round(0.1 * 512 * 256)
    assert torch.equal(stored.to_dense(), weight.to_dense())
    assert gradient.shape == stored.values.shape and gradient.any()
