"""README.md and docs/ say what the code does: options, variables, columns, reasons, paths, figures and commands."""

import re
from dataclasses import MISSING, fields
from pathlib import Path

import pytest

from bench import documents, plots
from bench.suites import STUDIES, SUITES
from sparsecomp import environment
from sparsecomp.environment import Settings
from sparsecomp.options import Options
from sparsecomp.passes.engine.rule import Why
from sparsecomp.passes.find_rules import RULES
from sparsecomp.report import Report

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGES = {path.name: path.read_text() for path in (ROOT / "docs").glob("*.md")}


def table(first_header: str, text: str = README) -> dict[str, list[str]]:
    """Rows of a document's table whose first column has this header, by their first cell without backticks."""
    lines = text.split(f"\n| {first_header} |", 1)[1].splitlines()[2:]
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
    assert f"\n{environment.markdown()}\n\n" in PAGES["options.md"]
    shown = set(table("environment variable", PAGES["options.md"]))
    assert read == shown == {item.metadata["variable"] for item in fields(Settings)}


def test_every_reason_says_what_to_do() -> None:
    headings = re.findall(r"^### `(\w+)`: (.+)\n\n[^#\n]", PAGES["troubleshooting.md"], re.M)
    assert sorted(name for name, _ in headings) == sorted(why.name for why in Why)


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
    assert f"\nreadme() {{ {command.group(1)}; }}\ncheck tests readme\n" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize("file", documents.PARTS)
def test_the_results_are_the_benchmarks_own_and_nothing_else(file: str) -> None:
    pytest.importorskip("triton")
    assert (ROOT / file).read_text() == documents.filled(file)


def test_the_plots_show_the_results_and_each_is_shown() -> None:
    drawn = {path.name: plots.figures_of(path) for path in plots.PLOTS.iterdir()}
    assert drawn == {name: plot.figures for name, plot in plots.plots().items()}
    assert set(re.findall(r"plots/(\w+\.svg)", PAGES["performance.md"])) == set(drawn)


def test_every_suite_of_a_gpu_is_named() -> None:
    sentence = re.split(r"machine\s`python -m bench` with ", PAGES["results.md"])[1].split("measures")[0]
    assert set(re.findall(r"`([\w-]+)`", sentence)) == set(SUITES) - {"card", "cpu", *STUDIES}


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) < 200


def test_every_link_of_the_readme_leads_somewhere() -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    assert len(links) >= 10
    for link in links:
        path, _, heading = link.partition("#")
        text = (ROOT / path).read_text()
        titles = (re.sub(r"[^\w -]", "", title).strip().lower() for title in re.findall(r"^#+ (.+)$", text, re.M))
        assert not heading or heading in {title.replace(" ", "-") for title in titles}


def test_every_example_has_its_place_in_the_docs() -> None:
    shown = re.findall(r"\{literalinclude\} \.\./examples/(\w+\.py)", PAGES["examples.md"])
    assert sorted(shown) == sorted(path.name for path in (ROOT / "examples").glob("*.py"))
