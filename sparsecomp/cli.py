"""The commands of `sparsecomp`: look at a model, tune it, look into the tuning results and carry them, and the demo.

Each command makes one JSON value and may show it as a table. A failure has exit code 2 and is a message on stderr or,
under ``--json``, the value. What a model's own file prints goes to stderr then.
"""

import argparse
import ast
import json
import os
import platform
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from dataclasses import asdict
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from importlib.util import module_from_spec, spec_from_file_location
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

import sparsecomp
from sparsecomp import cache
from sparsecomp.environment import Settings
from sparsecomp.errors import CacheError, OptionError, SparsecompError
from sparsecomp.lowering.cache.tuning_cache import Entry, default_cache, read_results
from sparsecomp.options import Options
from sparsecomp.report import rendered

_FAILED = 2
_LISTED = 100
_COLUMNS = ("id", "op", "gpu", "triton", "problem", "best", "ms", "candidates")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the process's exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if any("\0" in text for text in given):
            raise _UsageError("an argument has a NUL character, which no path or name can have", "")
        parsed = _parser().parse_args(given)
        if parsed.cache_dir is not None:
            os.environ["SPARSECOMP_CACHE_DIR"] = parsed.cache_dir
        code = parsed.run(parsed) or 0
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # whoever read the output has enough of it, as `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (_UsageError, SparsecompError, OSError, ImportError) as error:
        if "--json" in given:
            _print_json({"error": str(error), "type": type(error).__name__.strip("_"), "exit_code": _FAILED})
        else:
            print(f"error: {error}", getattr(error, "usage", ""), sep="\n", end="", file=sys.stderr)
        return _FAILED


class _UsageError(Exception):
    """Arguments that no command takes."""

    def __init__(self, message: str, usage: str) -> None:
        super().__init__(message)
        self.usage = usage


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Leave it to `main` how a failure is told."""
        raise _UsageError(message, self.format_usage())


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="sparsecomp", description="A sparsity compiler for PyTorch.")
    parser.add_argument("--version", action="version", version=f"sparsecomp {sparsecomp.__version__}")
    common = _Parser(add_help=False)
    common.add_argument("--json", action="store_true", help="print one JSON value and nothing else")
    common.add_argument("--cache-dir", metavar="DIR", help="use the tuning results in this directory")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_cache_commands(commands.add_parser("cache", help="look at and carry tuning results"), common)
    env = commands.add_parser("env", parents=[common], help="versions, devices, settings, what is known of the card")
    env.set_defaults(run=_env)
    _add_model_commands(commands, common)
    demo = commands.add_parser(
        "demo", parents=[common], help="train a small spiking network on digits, compile it, compare"
    )
    demo.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: CUDA where there is one")
    demo.add_argument(
        "--implementation", default="auto",
        help="auto: what pays, where it pays; binary, direct, event or skip: everywhere; dense: nowhere",
    )
    demo.set_defaults(run=_demo)
    return parser


def _add_model_commands(commands: Any, common: argparse.ArgumentParser) -> None:
    def add(name: str, run: Callable[[argparse.Namespace], None], text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, parents=[common], help=text)
        command.add_argument("target", metavar="MODEL.py:factory", help="factory() returns (model, input or tuple)")
        command.add_argument(
            "--option", metavar="NAME=VALUE", action="append", default=[],
            help="an option of the compiler, as often as wanted: precision=exact, frozen=True, disable=spike_conv",
        )  # fmt: skip
        command.add_argument(
            "--step", choices=("inference", "training"), help="the model's mode and gradients; as they are by default"
        )
        command.set_defaults(run=run)
        return command

    explain = add("explain", _explain, "what would be rewritten in a model, and why")
    explain.add_argument("--device", metavar="CARD", help="estimate for a card that need not be here, such as h100")
    explain.add_argument("--html", metavar="FILE", help="write the report as a page, with the graphs")
    add("profile", _profile, "time, density and empty blocks of each layer of a model")
    tune = add("tune", _tune, "measure the kernels that a model uses, ahead of its use")
    tune.add_argument("--effort", choices=("quick", "full"), default="full", help="how many candidates to measure")


def _add_cache_commands(parser: argparse.ArgumentParser, common: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="cache_command", required=True)

    def add(name: str, run: Callable[[argparse.Namespace], None], text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, parents=[common], help=text)
        command.set_defaults(run=run)
        return command

    ls = add("ls", _ls, "list the entries")
    ls.add_argument("--op", help="of this operation only")
    ls.add_argument("--limit", type=int, default=_LISTED, help=f"the most entries to list, {_LISTED} by default")
    show = add("show", _show, "one entry with all its candidates")
    show.add_argument("id", help="as listed, or the beginning of it")
    add("export", _export, "write everything to a JSON file").add_argument("path", type=Path)
    imports = add("import", _import, "add an exported file, or another cache's database; own results stay")
    imports.add_argument("path", type=Path)
    prune = add("prune", _prune, "drop entries beyond the cache's bounds")
    prune.add_argument(
        "--only-device", metavar="DEVICE", help="and those of any GPU or Triton but this device's, such as cuda"
    )
    add("clear", _clear, "drop everything")
    add("stats", _stats, "how much is stored, and where")


def _ls(given: argparse.Namespace) -> None:
    entries = default_cache().entries(given.op)
    listed = list(islice(entries, max(given.limit, 0)))
    _print_entries(given, listed)
    if not given.json and next(entries, None) is not None:
        print(f"the first {len(listed)}; --limit lists more")


def _print_entries(given: argparse.Namespace, entries: Iterable[Entry]) -> None:
    summaries = [_summary(entry) for entry in entries]
    if given.json:
        return _print_json(summaries)
    _print_table(_COLUMNS, ([summary[column] for column in _COLUMNS] for summary in summaries))


def _summary(entry: Entry) -> dict[str, Any]:
    fields = entry.fields
    named = [f"{name.partition('.')[2]}={value}" for name, value in fields.items() if "." in name]
    shares = [f"{name}={fields[name]}" for name in ("density", "rows") if fields.get(name, "unknown") != "unknown"]
    return {
        "id": _id(entry),
        "op": fields["op"],
        "gpu": fields["gpu"],
        "triton": fields["triton"],
        "problem": " ".join([fields.get("dtypes", ""), *named, *shares]),
        "best": entry.best,
        "ms": None if entry.best is None else entry.times[entry.best],
        "candidates": len(entry.times.keys() | entry.rejected.keys()),
    }


def _id(entry: Entry) -> str:
    return sha256(entry.key.encode()).hexdigest()[:12]


def _show(given: argparse.Namespace) -> None:
    found = [entry for entry in default_cache().entries() if _id(entry).startswith(given.id)]
    if len(found) != 1:
        raise CacheError(f"{len(found)} entries have an id that begins with {given.id!r}: `cache ls` lists the ids")
    (entry,) = found
    if given.json:
        return _print_json({"id": _id(entry), "best": entry.best, **entry.to_json()})
    _print_table(("field", "value"), ((name, value) for name, value in entry.fields.items() if value))
    names = entry.times.keys() | entry.rejected.keys() | entry.verified | entry.postponed.keys()
    names = sorted(names, key=lambda name: _rank(entry, name))
    _print_table(("candidate", "ms", "state"), ((name, entry.times.get(name), _state(entry, name)) for name in names))


def _rank(entry: Entry, name: str) -> tuple[bool, float, str]:
    return name in entry.rejected, entry.times.get(name, float("inf")), name


def _state(entry: Entry, name: str) -> str:
    if name in entry.rejected:
        return f"rejected: {entry.rejected[name]}"
    if name in entry.postponed:
        return "not measured yet"
    return "best" if name == entry.best else "verified" if name in entry.verified else "not verified"


def _export(given: argparse.Namespace) -> None:
    _print_count(given, cache.export(given.path), f"exported to {given.path}")


def _import(given: argparse.Namespace) -> None:
    document = read_results(given.path)
    count, groups = default_cache().take(document), cache.by_device(document)
    if given.json:
        return _print_json({"entries": count, "devices": [asdict(group) for group in groups]})
    _print_count(given, count, f"read from {given.path}")
    for group in groups:
        print(f"  {group}")


def _prune(given: argparse.Namespace) -> None:
    _print_count(given, cache.prune(given.only_device), "dropped")


def _clear(given: argparse.Namespace) -> None:
    _print_count(given, cache.clear(), "dropped")


def _print_count(given: argparse.Namespace, count: int, what: str) -> None:
    if given.json:
        return _print_json({"entries": count})
    print(f"{count} {'entry' if count == 1 else 'entries'} {what}")


def _stats(given: argparse.Namespace) -> None:
    _print_pairs(given, _stored())


def _stored() -> dict[str, Any]:
    found = asdict(cache.stats())
    return {name: found[name] for name in ("path", "writable", "entries", "bytes")}


def _env(given: argparse.Namespace) -> None:
    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    found: dict[str, Any] = {
        "sparsecomp": sparsecomp.__version__,
        "torch": torch.__version__,
        "triton": _installed("triton"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "devices": [f"{device.name} ({device.major}.{device.minor})" for device in devices],
        "settings": asdict(Settings.from_environment()),
        "cache": _stored(),
        "facts": [fact.to_json() for fact in default_cache().facts()],
    }
    if given.json:
        return _print_json(found)
    rows = [(name, found[name]) for name in ("sparsecomp", "torch", "triton", "python", "platform")]
    rows += [("device", name) for name in found["devices"] or ["no CUDA device"]]
    rows += [(f"{group} {name}", value) for group in ("settings", "cache") for name, value in found[group].items()]
    for fact in default_cache().facts():
        rows += [(f"{fact.name} {name}, {fact.device.name}", value) for name, value in fact.values.items()]
    _print_table(("what", "value"), rows)


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _explain(given: argparse.Namespace) -> None:
    if given.html is not None and not Path(given.html).parent.is_dir():  # before the model is run, which may take long
        raise OptionError(f"--html {given.html}: there is no folder {Path(given.html).parent}")
    report = _on_model(given, sparsecomp.explain, device=given.device)
    if given.html is not None:
        report.to_html(given.html)
    print(report.to_json() if given.json else str(report))


def _profile(given: argparse.Namespace) -> None:
    profile = _on_model(given, sparsecomp.profile)
    print(profile.to_json() if given.json else str(profile))


def _tune(given: argparse.Namespace) -> None:
    before = {entry.key: entry for entry in default_cache().entries()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "nothing to tune")  # it is printed below
        _on_model(given, sparsecomp.tune, effort=given.effort)
    tuned = [entry for entry in default_cache().entries() if before.get(entry.key) != entry]
    if tuned or given.json:
        _print_entries(given, tuned)
    done = f"{len(tuned)} kernel signatures tuned; results are in {cache.stats().path or 'memory'}"
    if not given.json:
        print(done if tuned else _untuned())


def _untuned() -> str:
    if torch.cuda.is_available():
        return "nothing to tune: the model uses no kernel that has several candidates, or all were measured before"
    from sparsecomp.compiler.warmup import NO_CUDA  # loads Inductor

    return NO_CUDA


def _on_model(given: argparse.Namespace, verb: Callable[..., Any], **keywords: Any) -> Any:
    """What a verb makes of the model in the user's file."""
    options = dict(map(_option, given.option))
    Options.parse(options=options)  # before the file is run, which may take long
    quiet = redirect_stdout(sys.stderr) if given.json else nullcontext()
    with _others_failures(given.target), _progress(f"{given.command} {given.target}"), quiet:
        made = _factory(given.target)()
        if not isinstance(made, tuple) or len(made) != 2:
            raise OptionError(f"{given.target} returns a {type(made).__name__}: it must return (model, input or tuple)")
        model, inputs = made
        if given.step is not None and isinstance(model, torch.nn.Module):
            model.train(given.step == "training")
        with torch.set_grad_enabled(given.step != "inference"):
            inputs = inputs if isinstance(inputs, tuple) else (inputs,)
            return verb(model, *inputs, options=options or None, **keywords)


def _option(text: str) -> tuple[str, Any]:
    """A name and a value as in Python, where texts need no quotes."""
    name, equals, value = text.partition("=")
    if not equals:
        raise OptionError(f"--option {text}: give a name and a value, such as frozen=True")
    read: Any = value
    with suppress(ValueError, SyntaxError, TypeError, MemoryError, RecursionError):  # else a text without quotes
        read = ast.literal_eval(value)
    if name == "disable" and isinstance(read, str):
        read = tuple(rule.strip() for rule in read.split(","))
    return name, read


@contextmanager
def _progress(text: str) -> Iterator[Callable[[str], None]]:
    """Show on a terminal what is going on; gives what changes the text."""
    with Console(stderr=True).status(text) as status:
        yield status.update


@contextmanager
def _others_failures(target: str) -> Iterator[None]:
    """Whatever goes wrong in the user's file is told in one line."""
    try:
        yield
    except SparsecompError:
        raise
    except (Exception, SystemExit) as error:
        raise OptionError(f"{target}: {type(error).__name__}: {error}") from error


def _factory(target: str) -> Callable[[], tuple[Any, Any]]:
    file, colon, name = target.rpartition(":")
    if not colon:
        raise OptionError(f"{target!r}: needs MODEL.py:factory, a file and the name of a function in it")
    if not Path(file).is_file():
        raise OptionError(f"{file}: there is no such file")
    path = Path(file).resolve()
    spec = spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise OptionError(f"{file}: this is no Python file")
    module = module_from_spec(spec)
    sys.path.insert(0, str(path.parent))  # as for a script
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
    if not callable(getattr(module, name, None)):
        raise OptionError(f"{file} has no function {name!r}")
    return getattr(module, name)


def _demo(given: argparse.Namespace) -> int:
    Options(implementation=given.implementation)
    from sparsecomp.demo import run  # loads Inductor and scikit-learn

    with _progress("loading the digits") as say:
        return run(given.device, given.implementation, given.json, say)


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, default=str))


def _print_pairs(given: argparse.Namespace, pairs: dict[str, Any]) -> None:
    if given.json:
        return _print_json(pairs)
    _print_table(("what", "value"), pairs.items())


def _print_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    table = Table(*columns, box=SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        table.add_row(*(Text(_written(value), overflow="fold") for value in row))
    print(rendered(table))


def _written(value: Any) -> str:
    if value is None or value == ():
        return "-"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
