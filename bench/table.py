"""The tables of README.md and docs/results.md, made from the JSON files that the benchmarks wrote."""

import json
import re
import statistics
from pathlib import Path
from typing import Any

from bench.as_called import beside, counted, left_out, step_of
from bench.spiking.networks import PRECISIONS
from bench.timing import MODES
from sparsecomp.passes.cost import spiking as gate
from sparsecomp.passes.cost.decision import Decision
from sparsecomp.reference.geometry import Window

RESULTS = Path(__file__).parent / "results"
_VARIANTS = ("eager", "stock compile", "stock compile, reduce-overhead", "sparsecomp", "sparsecomp, reduce-overhead")
_CONV_COLUMNS = {
    "cuDNN fp32": "dense fp32 nchw",
    "TF32": "dense tf32 channels_last",
    "fp16": "dense fp16 channels_last",
    "binary": "binary",
    "binary from bytes": "binary from bytes",
    "event": "event",
    "skip": "skip",
}


def markdown(results: Path = RESULTS) -> str:
    """All tables as Markdown, with the machine in front.

    Args:
        results: folder with `snn_sew_resnet34.json`, `snn_conv.json`, `tuning.json`, `spmm.json`,
            `semi_structured.json` and `resu.json`, and perhaps `loop.json` and `loop_networks.json`.

    Raises:
        FileNotFoundError: one of the others is missing; run `python -m bench` on a GPU first.
    """
    network = json.loads((results / "snn_sew_resnet34.json").read_text())
    layers = json.loads((results / "snn_conv.json").read_text())
    parts = [
        *_as_called(results),
        _measured_on(layers["machine"]),
        _network(network["result"]),
        _layers([row for row in layers["result"] if row["case"].startswith("conv")]),
        _linears([row for row in layers["result"] if row["case"].startswith("linear")]),
        *(_single(row) for row in layers["result"] if "dtype" not in row),
        _tuning(json.loads((results / "tuning.json").read_text())["result"]),
        *(
            table(json.loads((results / name).read_text())["result"])
            for name, table in (
                ("spmm.json", _products), ("semi_structured.json", _semi_structured), ("resu.json", _resu)
            )
        ),
    ]
    return "\n\n".join(parts) + "\n"


def decision(row: dict[str, Any], fused: bool = False) -> tuple[Decision, float]:
    """What the gate picks for a measured layer, and the time of its rival.

    The rival is the dense operator at torch's default precision: TF32 for convolutions, float32 for linear layers.
    """
    half, linear = row["dtype"] == "float16", row["case"].startswith("linear")
    rival = "fp16" if half else "fp32" if linear else "tf32"
    decided = gate.decide(site_of(row, fused))
    return decided, row["ms"][f"dense {rival}" + ("" if linear else " channels_last")]


def site_of(row: dict[str, Any], fused: bool = False) -> gate.SiteInfo:
    """What the gate sees of a measured layer.

    `fused`: in a compiled graph, where the neuron writes bytes; run op by op otherwise.
    """
    half, linear = row["dtype"] == "float16", row["case"].startswith("linear")
    numbers = [int(number) for number in re.findall(r"\d+", row["case"])]
    n, c, size, r = (numbers[0], numbers[1], 1, 1) if linear else (128, numbers[2], numbers[4], 3)
    return gate.SiteInfo(
        device="cuda", itemsize=2 if half else 4, n=n, c=c, size=(size, size), k=c,
        window=Window.centred((r, r), (1, 1)), groups=1, digits=2 if half else 3,
        density=row["density"], active=row.get("active"),
        tf32=not half and not linear, channels_last=True, fused=fused,
    )  # fmt: skip


def _measured_on(machine: dict[str, str]) -> str:
    return f"Measured on one {machine['gpu']}, torch {machine['torch']}, Triton {machine['triton']}; milliseconds."


def _as_called(results: Path) -> list[str]:
    parts = []
    for name, tables in (("loop.json", layers_as_called), ("loop_networks.json", networks_as_called)):
        if (results / name).exists():
            found = json.loads((results / name).read_text())
            parts += [_measured_on(found["machine"]), tables(found["result"])]
    return parts


def headline(results: Path = RESULTS) -> str:
    """How fast layers and networks are as called, of stock compile's speed, in one short table."""
    layers, networks = (json.loads((results / name).read_text()) for name in ("loop.json", "loop_networks.json"))
    variants = [(which, mode) for mode in MODES for which in ("sparsecomp", "frozen")]
    grid = [["model", "step", *(mode + ", frozen" * (which == "frozen") for which, mode in variants)]]
    on_layers, on_networks = (_card(found["machine"]) for found in (layers, networks))
    groups: dict[tuple[str, str], dict[tuple[str, str], list[float]]] = {}
    for call in beside("stock", layers["result"]):
        group = f"layers, {call.row['layer']['dtype']}", step_of(call.row["layer"])
        groups.setdefault(group, {}).setdefault((call.which, call.mode), []).append(call.speed)
    for (name, step), speeds in sorted(groups.items(), key=lambda item: (item[0][1], item[0][0])):
        grid.append([f"{name} ({on_layers})", step, *(_mean_and_range(speeds.get(one)) for one in variants)])
    for row in sorted(networks["result"], key=lambda row: (row["training"], row["network"])):
        found = {(call.which, call.mode): f"{call.speed:.2f}" for call in beside("stock", [row])}
        if found:
            grid.append([f"{row['network']} ({on_networks})", step_of(row), *(found.get(one, "–") for one in variants)])
    return markdown_grid(grid)


def _card(machine: dict[str, str]) -> str:
    return machine["gpu"].removeprefix("NVIDIA ").split()[0]


def _mean_and_range(speeds: list[float] | None) -> str:
    if not speeds:
        return "–"
    return f"{statistics.geometric_mean(speeds):.2f} ({min(speeds):.2f} to {max(speeds):.2f})"


def layers_as_called(rows: list[dict[str, Any]]) -> str:
    """How many layers of `bench.loop` are no slower than stock, and the slowest ten."""
    title = (
        "As called: compiled square layers (`SparseLinear`, then ReLU) beside stock compile of the dense layer with "
        "the same zeros. Loops of calls, host included, in turns in one process; a training step is forward, backward "
        "and SGD; float32 is exact in both. `frozen`: with the option `frozen=True`. Speeds are of stock's:"
    )
    calls = list(beside("stock", rows))
    slowest = [["slowest layers", "rows", "dtype", "step", "mode", "ran as", "stock", "ours", "speed"]]
    for call in sorted(calls, key=lambda call: call.speed)[:10]:
        layer, ran = call.row["layer"], call.row["implementation"][f"{call.which}, {call.mode}"]
        slowest.append([
            f"{layer['size']}x{layer['size']} {layer['sparsity']:.0%}", str(layer["rows"]), layer["dtype"],
            step_of(layer), f"{call.which}, {call.mode}", ", ".join(one.partition(":")[0] for one in ran),
            _ms(call.rival), _ms(call.ms), f"{call.speed:.2f}",
        ])  # fmt: skip
    return "\n\n".join([title, markdown_grid(counted(calls)), markdown_grid(slowest), *left_out(rows)])


def networks_as_called(rows: list[dict[str, Any]]) -> str:
    """The networks of `bench.loop_networks`, but for dead ones, whose times mean nothing."""
    title = (
        "Whole networks as called, in the same way; TF32 is allowed to both, and spiking networks are reset before "
        "each call. In brackets the speed, of stock's:"
    )
    variants = [(mode, which) for mode in MODES for which in ("stock", "sparsecomp", "frozen")]
    grid = [["network", "input", "fires", "step", *(f"{which}, {mode}" for mode, which in variants)]]
    for row in sorted(rows, key=lambda row: (row["training"], row["network"])):
        if not row["ms"]:
            continue
        times = {f"{call.which}, {call.mode}": f"{_ms(call.ms)} ({call.speed:.2f})" for call in beside("stock", [row])}
        times |= {key: _ms(ms) for key, ms in row["ms"].items() if key not in times}
        fires = f"{row['rates']['mean']:.1%}" if "rates" in row else "–"
        cells = [times.get(f"{which}, {mode}", "–") for mode, which in variants]
        grid.append([row["network"], "×".join(map(str, row["shape"])), fires, step_of(row), *cells])
    notes = [f"{row['network']}, {step_of(row)}: {row['note']}." for row in rows if "note" in row]
    return "\n\n".join([title, markdown_grid(grid), *notes, *left_out(rows)])


def _network(result: dict[str, Any]) -> str:
    t, n, _, h, w = result["shape"]
    rates = result["rates"].values()
    title = (
        f"SEW-ResNet-34, T={t}, batch {n}, {h}×{w}, inference; every layer fires at "
        f"{min(rates):.1%} to {max(rates):.1%}. channels_last, except eager:"
    )
    rows = [["precision", *_VARIANTS]]
    for precision in PRECISIONS:
        times = [result["ms"].get(f"{precision}/{variant}") for variant in _VARIANTS]
        rows.append([precision + (" (ours: exact)" if precision == "fp32" else ""), *map(_ms, times)])
    return title + "\n\n" + markdown_grid(rows)


def _layers(rows: list[dict[str, Any]]) -> str:
    title = (
        "3×3 convolutions, batch 128, channels_last, no bias; prescan and packing of the weight included, except "
        "`from bytes` (spikes that the neuron already wrote as bytes). `clustered`: nine of ten 8×8 blocks are empty; "
        "`vgg9`, `resnet19`: real maps of trained networks (Prosperity's, MIT licence), rolled about to fill the batch:"
    )
    grid = [["layer", "dtype", "spikes", *_CONV_COLUMNS, "gate"]]
    for row in rows:
        spikes = f"{row['density']:.1%}" + ("" if row["spikes"] == "independent" else f" {row['spikes']}")
        times = [_ms(row["ms"].get(key)) for key in _CONV_COLUMNS.values()]
        case, chosen = row["case"].removeprefix("conv 3x3 "), decision(row)[0].implementation
        grid.append([case, row["dtype"], spikes, *times, chosen])
    return title + "\n\n" + markdown_grid(grid)


def _linears(rows: list[dict[str, Any]]) -> str:
    columns = {"cuBLAS fp32": "dense fp32", "TF32": "dense tf32", "fp16": "dense fp16", "binary": "binary"}
    columns["event"] = "event"
    grid = [["linear", "dtype", "density", *columns, "gate"]]
    for row in rows:
        times = [_ms(row["ms"].get(key)) for key in columns.values()]
        case = row["case"].removeprefix("linear ")
        grid.append([case, row["dtype"], f"{row['density']:.0%}", *times, decision(row)[0].implementation])
    return markdown_grid(grid)


def _tuning(rows: list[dict[str, Any]]) -> str:
    from bench import tuning  # loads Triton

    found = tuning.summary([row for row in rows if "problem" in row])
    host = next(row for row in rows if "us" in row)
    process, share = (next(row for row in rows if row["case"] == case) for case in _TWICE)
    return "\n\n".join([
        f"Tuned against default configurations, {found['cases']} problems of the spiking suite: "
        f"{found['gain']:.3f} times as fast in the geometric mean, {found['least']:.2f} to {found['most']:.2f}.",
        _single(host),
        "Three spiking convolutions under `SPARSECOMP_AUTOTUNE=quick`, with empty caches and then in another process: "
        + "; ".join(_process(process[which]) for which in ("first", "second")) + ".",
        f"Spiking ResNet-34, compiled by a second process: our passes take {share['second']['passes_s']:.2f} of "
        f"{share['second']['compile_s']:.1f} s.",
    ])  # fmt: skip


def _products(rows: list[dict[str, Any]]) -> str:
    """Sparse products: what an untuned call takes, and how many times as fast it is as its peer."""
    groups: dict[tuple[str, str], dict[int, str]] = {}
    sampled = [["sampled product, depth 512", "dtype", "ours", "sampled_addmm", "dense"]]
    for row in rows:
        times = row.get("ms", {})
        if "chosen" not in times:
            continue
        if "d" in row:
            dense = times.get("dense fp32" if row["dtype"] == "float32" else "dense fp16")
            figures = [_ms(times["chosen"]), _ms(times.get("sampled_addmm")), _ms(dense)]
            sampled.append([row["case"].removeprefix("sddmm "), row["dtype"], *figures])
        else:
            groups.setdefault((row["case"], row["dtype"]), {})[row["n"]] = _beside_peer(times)
    columns = sorted({n for found in groups.values() for n in found})
    table = [["sparse times dense", "dtype", *(f"{n} columns" for n in columns)]]
    table += [[*key, *(found.get(n, "–") for n in columns)] for key, found in groups.items()]
    summaries = [["geometric mean, least and most", "cases", "mean", "least", "most"]]
    summaries += [
        [row["case"], str(row["cases"]), *(f"{row[name]:.2f}" for name in ("mean", "least", "most"))]
        for row in rows if "mean" in row
    ]  # fmt: skip
    return "\n\n".join([
        "Sparse products, CUDA graph replays: milliseconds of an untuned call and, in brackets, how many times as fast "
        "as its peer it is (cuSPARSE for CSR, torch's Triton kernel for BSR, cuSPARSELt for 2:4):",
        markdown_grid(table), markdown_grid(sampled), markdown_grid(summaries),
        *(_single(row) for row in rows if row.get("group") == "epilogue" or "us" in row),
    ])  # fmt: skip


def _beside_peer(times: dict[str, float]) -> str:
    from bench.sparse import spmm  # loads Triton

    peer = next((times[name] for name in spmm.PEERS if name in times), None)
    return _ms(times["chosen"]) + (f" ({peer / times['chosen']:.2f})" if peer else "")


def _semi_structured(rows: list[dict[str, Any]]) -> str:
    """2:4 layers on sparse tensor cores beside dense ones."""
    names = ("dense", "torch 2:4", "ordinary", "ours", "ours tuned", "ours tuned, frozen")
    table = [["2:4 linear + bias + ReLU", "rows", "dtype", *names]]
    for row in rows:
        if "rows" in row:
            times = [_ms(row["ms"].get(name)) for name in names]
            table.append([row["case"].removeprefix("2:4 "), str(row["rows"]), row["dtype"], *times])
    host = next(row for row in rows if "us" in row)
    return "\n\n".join([
        "2:4 weights by cuSPARSELt; `ours` checks in each call that the weight is still what was compressed, `frozen` "
        "(`ops.frozen_weights()`) does not; `ordinary` is the same weight on ordinary tensor cores:",
        markdown_grid(table), _single(host),
    ])  # fmt: skip


def _resu(rows: list[dict[str, Any]]) -> str:
    """RESU: each row as it was measured."""
    table = [["RESU", "ours", "beside", "times as fast", "over the bytes' floor"]]
    others = []
    for row in rows:
        times, gain = row.get("ms", {}), next((key for key in row if key.startswith("gain over ")), None)
        if "ours" not in times or gain is None:
            others.append(row)
            continue
        rivals = [f"{name} {_ms(ms)}" for name, ms in times.items() if name not in ("ours", "floor")]
        floor = f"{times['ours'] / times['floor']:.2f}" if "floor" in times else "–"
        faster = f"{row[gain]:.2f} {gain.removeprefix('gain over ')}"
        table.append([row["case"], _ms(times["ours"]), ", ".join(rivals), faster, floor])
    lines = [_single(row) for row in others if {"us", "MiB"} & row.keys()]
    notes = [f"{row['case']}: {row['note']}." for row in rows if "note" in row]
    title = "RESU, CUDA graph replays; `times as fast` as the rival that is named:"
    return "\n\n".join([title, markdown_grid(table), *lines, *notes])


_TWICE = ("second process", "share of the passes")


def _process(figures: dict[str, Any]) -> str:
    return (
        f"{figures['timings']} timings, {figures['triton compilations']} Triton compilations, "
        f"{figures['compile_s']:.1f} s to the first result"
    )


def _single(row: dict[str, Any]) -> str:
    unit = next(unit for unit in ("ms", "us", "MiB") if unit in row)
    figures, unit = row[unit], "µs" if unit == "us" else unit
    return f"{row['case']}: " + ", ".join(f"{name} {_plain(value)} {unit}" for name, value in figures.items()) + "."


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}" if value < 1 else f"{value:.2f}"


def markdown_grid(rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + " --- |" * len(rows[0]), *lines[1:]])


def _plain(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
