"""`python -m bench geo`, `geo-sweep` and `geo-speed`: what they take, and the files that they write.

All three go on from the rows that their file has, as long as the same machine wrote it: what is there is not run again.
"""

import argparse
import math
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from bench import plots
from bench.local import problems, scores, speed, speeds, study
from bench.saving import known, save
from bench.timing import MODES, machine, place

Row = dict[str, Any]
Case = TypeVar("Case")


def main(verb: str, arguments: Sequence[str]) -> int:
    """Run one of them."""
    parser = argparse.ArgumentParser(f"python -m bench {verb}", description=VERBS[verb].__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench/results"), help="folder of the results")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin nothing after so many")
    (_speed_options if verb == "geo-speed" else _study_options)(parser)
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    VERBS[verb](given)
    return 0


def _study_options(parser: argparse.ArgumentParser) -> None:
    names = tuple(problems.PROBLEMS)
    parser.add_argument("--problems", nargs="+", default=names, choices=names)
    for name, values in study.AXES.items():
        kind, told = type(values[0]), " ".join(map(str, values))
        if kind is bool:
            parser.add_argument(f"--{name}", nargs="+", default=values, type=_boolean, help="no and yes, if not given")
        else:
            known_values = values if kind is str else None
            parser.add_argument(f"--{name}", nargs="+", default=values, type=kind, choices=known_values, help=told)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, help="instead of as many as each problem has")


def _boolean(text: str) -> bool:
    if text not in ("no", "yes"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither no nor yes")
    return text == "yes"


def _speed_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", nargs="+", default=tuple(speed.PARTS), choices=tuple(speed.PARTS))
    parser.add_argument("--modes", nargs="+", choices=MODES, help="of torch.compile; on a CPU default alone")
    parser.add_argument("--workers", type=int, default=1, help="processes that compile cases side by side")
    parser.add_argument("--most", type=int, help="cases of each part")


def geo(given: argparse.Namespace) -> None:
    """Networks on a grid beside dense ones of as many parameters, one setting varied at a time."""
    _study(given, "geo", study.around)


def geo_sweep(given: argparse.Namespace) -> None:
    """The same, with all combinations of the settings."""
    _study(given, "geo_sweep", study.product)


def _study(
    given: argparse.Namespace, name: str, choices: Callable[[study.Axes], Iterable[dict[str, Any]]]
) -> None:  # fmt: skip
    axes = {axis: tuple(getattr(given, axis)) for axis in study.AXES}
    found, missing = problems.available(tuple(given.problems))
    wanted = study.runs(choices(axes), found, given.device, given.seeds, given.epochs)
    path = given.out / f"{name}.json"
    rows = known(path)
    done = {study.Run.of(row) for row in rows}
    told = study.manifest(found, missing, axes, given.seeds)
    left = [run for run in wanted if run not in done]
    for row in _counted((study.trained(run) for run in left), len(left), given.seconds):
        rows.append(row)
        save(path, rows, manifest=told)
    save(path, rows, manifest=told)
    scores.write_csv(rows, path.with_suffix(".csv"))
    _draw(scores.plot(rows, place(machine())), path, "linear")
    print(scores.table(rows), *(f"{one} is left out: {why}." for one, why in missing.items()), sep="\n\n")


def geo_speed(given: argparse.Namespace) -> None:
    """Layers of fixed fan-in as called, beside Inductor, cuSPARSE, dense layers and psann."""
    path = given.out / "geo_speed.json"
    rows = known(path)
    done = {speed.Case.of(row) for row in rows}
    wanted = [case for part in given.parts for case in list(speed.PARTS[part](given.device))[: given.most]]
    left = [case for case in wanted if case not in done]
    modes = given.modes or (MODES if given.device == "cuda" else MODES[:1])
    measured = speed.run(left, modes, given.workers, given.seconds) if left else iter(())
    for row in _counted(measured, len(left), math.inf):
        rows.append(row)
        save(path, rows)
    _draw(speeds.plot(rows, place(machine())), path, "log")
    print(speeds.table(rows))


VERBS: dict[str, Callable[[argparse.Namespace], None]] = {
    "geo": geo, "geo-sweep": geo_sweep, "geo-speed": geo_speed,
}  # fmt: skip


def _counted(rows: Iterable[Row], total: int, seconds: float) -> Iterable[Row]:
    """Rows, each printed with how many there are and how long the rest will take, until `seconds` are over."""
    start, count = time.monotonic(), 0
    for count, row in enumerate(rows, 1):
        passed = time.monotonic() - start
        print(f"{count} of {total}, {(total - count) * passed / count / 60:.0f} min left: {row}", flush=True)
        yield row
        if passed > seconds:
            break
    if count < total:
        print(f"{total - count} are left: run it again", flush=True)


def _draw(plot: plots.Plot, path: Path, y: str) -> None:
    """Where there is something to draw, and matplotlib."""
    if not any(plot.panels.values()):
        return
    try:
        plots.draw(plot, path.with_suffix(".svg"), y)
    except ImportError as error:
        print(f"no plot: {error}: pip install 'sparsecomp[bench]'")
