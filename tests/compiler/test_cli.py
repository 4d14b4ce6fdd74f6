"""`python -m sparsecomp cache|env|tune`: what a user sees of the tuning results."""

import ast
import dataclasses
import io
import json
import os
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import sparsecomp
from sparsecomp import cache
from sparsecomp.__main__ import main
from sparsecomp.errors import InputError, OptionError, SignatureError
from sparsecomp.lowering.cache.signature import Device, KernelSignature
from sparsecomp.lowering.cache.tuning_cache import CacheWarning, TuningCache, default_cache
from sparsecomp.lowering.tuning.cards import H100 as H100_CARD
from sparsecomp.lowering.tuning.cards import Ceilings
from sparsecomp.lowering.tuning.ceilings import target_named

H100 = Device("NVIDIA H100 80GB HBM3", "9.0", "3.6.0")
FAST = "conv@1:BK=64"
SLOW = "conv@1:BK=32"
LATER = "conv@1:BK=128"
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
STATES = ("best", "not verified", "not measured yet", "rejected: relative error 1e-1")


def signature(op: str = "binary_conv", size: int = 100, device: Device = H100) -> KernelSignature:
    return KernelSignature(op, device, ("int8", "float32"), sizes=(("pixels", size),), parameters=(("R", 3),))


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of two entries and a fact, which is the process's."""
    monkeypatch.setenv("SPARSECOMP_CACHE_DIR", str(tmp_path / "cache"))
    times, rejected = {FAST: 0.125, SLOW: 0.5, "wrong@1:BK=16": 0.1}, {"wrong@1:BK=16": "relative error 1e-1"}
    default_cache().put(signature(), times=times, verified=[FAST], rejected=rejected)
    default_cache().put(signature(), postponed={LATER: "quick"})
    default_cache().put(signature("lif"), times={"lif@2:BLOCK=[bold]": 1.0})
    default_cache().put_fact("ceilings", H100, {"bandwidth": 3.0e12})
    return tmp_path


def printed(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    assert main([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out


def answer(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> Any:
    return json.loads(printed(capsys, *arguments, "--json"))


def test_ls(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = answer(capsys, "cache", "ls")
    assert (first["op"], first["best"], first["ms"], first["candidates"]) == ("binary_conv", FAST, 0.125, 3)
    assert (second["op"], second["best"], second["ms"]) == ("lif", None, None)
    assert first["problem"] == "int8,float32 R=3 pixels=128"
    table = printed(capsys, "cache", "ls")
    assert FAST in table and "0.125" in table and H100.name in table and "lif" in table
    assert "binary_conv" not in printed(capsys, "cache", "ls", "--op", "lif")
    assert "the first 1" in printed(capsys, "cache", "ls", "--limit", "1")


def test_show(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (item["id"] for item in answer(capsys, "cache", "ls"))
    shown = answer(capsys, "cache", "show", first)
    assert shown["fields"] == signature().fields and shown["best"] == FAST and shown["times"][SLOW] == 0.5
    lines = printed(capsys, "cache", "show", first[:8]).splitlines()
    states = [line for line in lines if "BK=" in line]
    for state, line in zip(STATES, states, strict=True):
        assert state in line
    assert "[bold]" in printed(capsys, "cache", "show", second)


def test_export_and_import(capsys: pytest.CaptureFixture[str], directory: Path) -> None:
    file, other = directory / "h100.json", directory / "other"
    assert "2 entries" in printed(capsys, "cache", "export", file)
    group = {"gpu": H100.name, "triton": "3.6.0", "entries": 2, "used_here": False}
    assert answer(capsys, "cache", "import", file, "--cache-dir", other) == {"entries": 2, "devices": [group]}
    there = TuningCache(other / "tuning.sqlite")
    found = there.get(signature())
    assert found is not None and found.best == FAST and there.fact("ceilings", H100) == {"bandwidth": 3.0e12}
    # another cache's database will do, too
    assert "2 entries" in printed(
        capsys, "cache", "import", other / "tuning.sqlite", "--cache-dir", directory / "third"
    )


def test_import_says_whose_results_there_are_and_which_are_not_used_here(
    capsys: pytest.CaptureFixture[str], directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Device("NVIDIA H200", "9.0", "3.7.1")
    monkeypatch.setattr(cache, "devices_here", lambda: frozenset([here]))
    default_cache().put(signature(device=here), times={FAST: 1.0})
    cache.export(directory / "both.json")
    lines = printed(capsys, "cache", "import", directory / "both.json", "--cache-dir", directory / "other").splitlines()
    foreign = (
        f"2 entries of {H100.name} with Triton 3.6.0: not used on this machine, which has NVIDIA H200 with Triton 3.7.1"
    )
    assert [line.strip() for line in lines[1:]] == [foreign, "1 entry of NVIDIA H200 with Triton 3.7.1"]
    with pytest.warns(CacheWarning) as told:
        assert cache.import_(directory / "both.json") == 3
    assert [(str(one.message), one.filename) for one in told] == [(foreign, __file__)]


def test_another_cards_imported_ceilings_are_known_to_explain(directory: Path) -> None:
    fast = dataclasses.replace(H100_CARD, bandwidth=9e12, capability="10.3")
    ceilings = {field.name: getattr(fast, field.name) for field in dataclasses.fields(Ceilings)}
    default_cache().put_fact("ceilings", Device("NVIDIA B300 SXM", "10.3", "3.7.1"), ceilings)
    model, x = torch.nn.Linear(64, 64), torch.ones(8, 64)
    assert "estimated for NVIDIA B300 SXM" in sparsecomp.explain(model, x, device="b300").capture
    assert target_named("b300").card == fast
    with pytest.raises(OptionError, match=r"'nvidia' names none .* or several: .*'NVIDIA H100 .*'NVIDIA B30"):
        sparsecomp.explain(model, x, device="nvidia")


def test_stats_prune_and_clear(capsys: pytest.CaptureFixture[str], directory: Path) -> None:
    triton = pytest.importorskip("triton")
    found = answer(capsys, "cache", "stats")
    assert found["entries"] == 2 and found["writable"] and found["path"] == str(directory / "cache" / "tuning.sqlite")
    assert "tuning.sqlite" in printed(capsys, "cache", "stats")
    here = Device("interpreter", "", triton.__version__)
    default_cache().put(signature(device=here), times={FAST: 1.0})
    assert answer(capsys, "cache", "prune") == {"entries": 0}
    assert answer(capsys, "cache", "prune", "--only-device", "cpu") == {"entries": 2}
    assert [item["gpu"] for item in answer(capsys, "cache", "ls")] == ["interpreter"]
    assert "1 entry dropped" in printed(capsys, "cache", "clear")
    assert answer(capsys, "cache", "ls") == []


def test_env(capsys: pytest.CaptureFixture[str], directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton")
    monkeypatch.setenv("SPARSECOMP_AUTOTUNE", "quick")
    found = answer(capsys, "env")
    assert (found["torch"], found["triton"]) == (torch.__version__, triton.__version__)
    assert found["settings"]["autotune"] == "quick" and found["settings"]["cache_dir"] == str(directory / "cache")
    assert found["cache"]["entries"] == 2 and found["facts"][0]["values"] == {"bandwidth": 3.0e12}
    assert len(found["devices"]) == torch.cuda.device_count()
    table = printed(capsys, "env")
    assert "settings autotune" in table and "ceilings bandwidth" in table and "3e+12" in table


MODEL = """
import torch
from beside import WIDTH

def factory():
    return torch.nn.Linear(WIDTH, 4), torch.ones(2, WIDTH)

def broken():
    raise KeyError("no such layer")

def leaves():
    raise SystemExit(7)

not_a_function = 3
"""


@pytest.fixture
def model(directory: Path) -> Path:
    (directory / "beside.py").write_text("WIDTH = 3")
    (directory / "model.py").write_text(MODEL)
    (directory / "typo.py").write_text("def factory(:")
    return directory / "model.py"


def test_tune(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    seen = []

    def tune(model: torch.nn.Module, inputs: torch.Tensor, effort: str, options: None) -> None:
        seen.append((model(inputs).shape, effort))
        default_cache().put(signature("lif"), times={FAST: len(seen)}, verified=[FAST])

    monkeypatch.setattr(sparsecomp, "tune", tune)
    (tuned,) = answer(capsys, "tune", f"{model}:factory")
    assert tuned["op"] == "lif" and tuned["ms"] == 1.0 and tuned["candidates"] == 2
    assert "1 kernel signatures tuned" in printed(capsys, "tune", f"{model}:factory", "--effort", "quick")
    assert seen == [((2, 4), "full"), ((2, 4), "quick")]
    assert str(model.parent) not in sys.path


@NO_GPU
def test_tune_on_a_cpu_says_why_there_is_nothing_to_tune(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    assert "nothing to tune: there is no CUDA device" in printed(capsys, "tune", f"{model}:factory")
    assert "nothing to tune" not in capsys.readouterr().err
    with pytest.warns(UserWarning, match="nothing to tune: there is no CUDA device"):
        assert sparsecomp.tune(torch.nn.Linear(3, 4), torch.ones(2, 3)) == []
    assert answer(capsys, "tune", f"{model}:factory") == []


def test_a_model_in_a_file_is_explained_and_profiled(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    assert answer(capsys, "explain", f"{model}:factory")["sites"][0]["rule"] == "spike_linear"
    assert "0 of 1 sites rewritten" in printed(capsys, "explain", f"{model}:factory")
    page = model.with_suffix(".html")
    assert "estimated for NVIDIA H100" in printed(
        capsys, "explain", f"{model}:factory", "--device", "h100", "--html", page
    )
    assert "estimated for NVIDIA H100" in page.read_text()
    assert answer(capsys, "profile", f"{model}:factory")["layers"][0]["kind"] == "Linear"
    assert "Linear" in printed(capsys, "profile", f"{model}:factory")


@pytest.mark.parametrize("verb", ["explain", "profile", "tune"])
def test_every_verb_on_a_model_takes_the_compilers_options_and_a_step(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model: Path, verb: str
) -> None:
    seen = []
    original = getattr(sparsecomp, verb)

    def watched(model: torch.nn.Module, *inputs: torch.Tensor, **given: Any) -> Any:
        seen.append((model.training, torch.is_grad_enabled(), given["options"]))
        return original(model, *inputs, **given)

    monkeypatch.setattr(sparsecomp, verb, watched)
    given = "--option", "precision=exact", "--option", "frozen=True", "--option", "disable=spike_conv,spike_linear"
    answer(capsys, verb, f"{model}:factory", *given, "--step", "inference")
    answer(capsys, verb, f"{model}:factory", "--step", "training")
    wanted = {"precision": "exact", "frozen": True, "disable": ("spike_conv", "spike_linear")}
    assert seen == [(False, False, wanted), (True, True, None)] and torch.is_grad_enabled()
    for written in ("('spike_conv', 'spike_linear')", "['spike_conv']", "'spike_conv, spike_linear'", "()"):
        answer(capsys, verb, f"{model}:factory", "--option", f"disable={written}")
        rules = ast.literal_eval(written)
        assert list(seen.pop()[2]["disable"]) == ([*rules] if isinstance(rules, tuple | list) else rules.split(", "))
    refused = {"frozn=True": "did you mean 'frozen'", "frozen": "--option frozen", "density=2": "in [0, 1]"}
    for bad, message in refused.items():
        assert main([verb, f"{model}:factory", "--option", bad]) == 2
        assert message in capsys.readouterr().err
    assert len(seen) == 2


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"sparsecomp {sparsecomp.__version__}\n"


def test_the_installed_command_is_this_one() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    module, _, name = project["scripts"]["sparsecomp"].partition(":")
    assert getattr(import_module(module), name) is main


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["cache", "show", "zz"], "0 entries"),
        (["cache", "show", ""], "2 entries"),
        (["cache", "import", "{}/missing.json"], "cannot be read"),
        (["cache", "import", "{}/model.py"], "model.py: this is no JSON"),
        (["cache", "export", "{}/no/such/directory.json"], "cannot be written"),
        (["cache", "prune", "--only-device", "toaster"], "no device"),
        (["cache", "prune", "--only-device", "cuda:99"], "not there"),
        pytest.param(["demo", "--device", "cuda"], "'cuda' is not there", marks=NO_GPU),
        (["demo", "--implementation", "bianry"], "use one of"),
        (["explain", "{}/model.py:factory", "--device", "toaster"], "'NVIDIA H100 80GB HBM3'"),
        (["tune", "{}/model.py"], "needs MODEL.py:factory"),
        (["tune", "{}/missing.py:factory"], "no such file"),
        (["tune", "{}/model.py:missing"], "no function 'missing'"),
        (["tune", "{}/model.py:not_a_function"], "no function 'not_a_function'"),
        (["tune", "{}/model.py:broken"], "KeyError: 'no such layer'"),
        (["tune", "{}/model.py:leaves"], "SystemExit: 7"),
        (["tune", "{}/typo.py:factory"], "SyntaxError"),
        (["explain", "{}/model.py:broken", "--html", "{}/no/report.html"], "no folder"),
        (["explain", "{}/model.py:factory", "--html", "{}/a\0b.html"], "NUL"),
        (["cache", "export", "{}/a\0b.json"], "NUL"),
    ],
)
def test_a_failure_is_one_line_and_exit_code_two(
    capsys: pytest.CaptureFixture[str], directory: Path, model: Path, arguments: list[str], message: str
) -> None:
    assert main([argument.format(directory) for argument in arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and err.startswith("error: ") and err.count("\n") == 1
    assert main([*(argument.format(directory) for argument in arguments), "--json"]) == 2
    failure = json.loads(capsys.readouterr().out)
    assert failure["error"] == err.removeprefix("error: ").strip() and failure["exit_code"] == 2


def test_what_a_models_file_prints_is_no_part_of_the_json(capsys: pytest.CaptureFixture[str], directory: Path) -> None:
    (directory / "loud.py").write_text(MODEL.replace("import torch\n", "import torch\nprint('loading')\n", 1))
    (directory / "beside.py").write_text("WIDTH = 3")
    answer(capsys, "profile", f"{directory / 'loud.py'}:factory")


def test_a_malformed_environment_is_a_failure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARSECOMP_DEBUG", "yes")
    assert main(["env"]) == 2
    assert "SPARSECOMP_DEBUG='yes'" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["cache"], ["cache", "burn"], ["tune"], ["cache", "ls", "--limit", "many"]])
def test_bad_arguments_exit_with_two(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert "usage:" in capsys.readouterr().err
    assert main([*arguments, "--json"]) == 2
    out, err = capsys.readouterr()
    assert json.loads(out)["type"] == "UsageError" and err == ""


def test_the_command_loads_neither_triton_nor_inductor(directory: Path) -> None:
    code = """
import sys
from sparsecomp.__main__ import main
code = main(["cache", "stats", "--json"])
print([name for name in sys.modules if name.split(".")[0] == "triton" or name.startswith("torch._inductor")])
sys.exit(code)
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=os.environ)
    assert done.stdout.splitlines()[-1] == "[]" and '"entries": 2' in done.stdout


@pytest.mark.filterwarnings("ignore:.*not used on this machine")
def test_the_module_gives_what_the_cache_gives(directory: Path) -> None:
    assert sparsecomp.cache is cache and "cache" in dir(sparsecomp)
    assert (
        cache.export(directory / "x.json") == cache.merge(directory / "x.json") == cache.import_(directory / "x.json")
    )
    assert cache.stats().entries == 2 and cache.explain_miss(signature()) is None
    miss = cache.explain_miss(signature(size=1000))
    assert miss is not None and miss.differing == (("size.pixels", "1024", "128"),)
    assert cache.explain_miss(signature().fields) is None  # as `cache show --json` writes them
    assert cache.prune(H100) == 0 and cache.clear() == 2


@pytest.mark.parametrize("given", [3, None, "lif", {1: 2}, [signature()]])
def test_what_is_no_signature_is_refused(given: Any) -> None:
    with pytest.raises(InputError, match="signature"):
        cache.explain_miss(given)
    with pytest.raises(InputError, match="signature"):
        cache.warmup(given if isinstance(given, dict | str) else [given])


def test_what_is_missing_of_a_signature_is_named() -> None:
    with pytest.raises(SignatureError, match="'gpu' is missing"):
        cache.explain_miss({"op": "lif"})


def test_results_are_forgotten_for_a_device_that_is_there_only() -> None:
    for given in ("cuda:99", "toaster", 3):
        with pytest.raises(OptionError, match="is no device|is not there"):
            cache.prune(given)
    assert cache.stats().entries == 2


@pytest.mark.filterwarnings("ignore:.*not used on this machine")
def test_replaced_results_are_chosen_by_anew(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    from sparsecomp.lowering.launch import dispatch

    forgotten = []
    monkeypatch.setattr(dispatch, "forget", lambda: forgotten.append(True))
    cache.export(directory / "x.json")
    assert forgotten == []
    for count, replace in enumerate((lambda: cache.import_(directory / "x.json"), cache.prune, cache.clear), 1):
        replace()
        assert len(forgotten) == count


def test_a_reader_that_has_enough_of_the_output_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "pipe").open("w") as pipe:

        class Closed(io.StringIO):
            def write(self, text: str) -> int:
                raise BrokenPipeError(32, "Broken pipe")

            def fileno(self) -> int:
                return pipe.fileno()

        monkeypatch.setattr(sys, "stdout", Closed())
        assert main(["cache", "stats", "--json", "--cache-dir", str(tmp_path)]) == 0
