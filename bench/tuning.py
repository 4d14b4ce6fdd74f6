"""What tuning finds over the defaults, what a launch costs the host, and that a second process tunes nothing.

Every candidate of every problem of the spiking suite is timed, so that the cost model can be held against the times.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from math import exp, log
from pathlib import Path
from typing import Any

import torch

from bench.timing import host_us
from sparsecomp.environment import Settings
from sparsecomp.lowering.cache.signature import Device, device_of
from sparsecomp.lowering.cache.tuning_cache import TuningCache
from sparsecomp.lowering.spiking.binary_conv import BinaryConv, binary_conv_problem
from sparsecomp.lowering.spiking.convolution import Convolution, Maps
from sparsecomp.lowering.spiking.event_conv import SPARSEST_OVERFLOW, Accumulate
from sparsecomp.lowering.spiking.lif import Lif
from sparsecomp.lowering.spiking.packing import Cast, PackWeight
from sparsecomp.lowering.tuning.autotune import Tuner, effort_scope
from sparsecomp.lowering.tuning.cards import H100, Card
from sparsecomp.lowering.tuning.ceilings import card_of
from sparsecomp.lowering.tuning.cost import rank
from sparsecomp.lowering.tuning.operations import all_operations
from sparsecomp.ops import lif, spike_conv, spike_linear
from sparsecomp.reference.digits import SPREAD
from sparsecomp.reference.geometry import Window

H100_DEVICE = Device("NVIDIA H100 80GB HBM3", "9.0", "3.6.0")
"""Where the committed results were measured."""
STAGES = ((64, 56), (128, 28), (256, 14), (512, 7))


def problems() -> Iterator[tuple[str, dict[str, Any]]]:
    """The spiking suite: stages of a ResNet at several batches and precisions, its stride-2 layers, linear layers.

    An operation, and what its function in `_PROBLEMS` makes a problem of.
    """
    for digits, dtype in ((3, "float32"), (2, "float32"), (2, "float16")):
        for c, size in STAGES:
            yield "binary_conv", {"n": 128, "c": c, "size": size, "k": c, "digits": digits, "dtype": dtype}
    for c, size in STAGES:
        yield "binary_conv", {"n": 8, "c": c, "size": size, "k": c}
    for c, size in STAGES[:3]:
        yield "binary_conv", {"n": 128, "c": c, "size": size, "k": 2 * c, "stride": 2}
    yield "binary_conv", {"n": 128, "c": 64, "size": 56, "k": 128, "side": 1, "stride": 2}
    for rows in (512, 4096):
        yield "binary_conv", {"n": rows, "c": 4096, "size": 1, "k": 4096, "side": 1}
    for c, size in STAGES:
        for name in ("lif", "pack_weight", "cast", "event_conv"):
            yield name, {"c": c, "size": size}


def _conv(
    n: int, c: int, size: int, k: int, side: int = 3, stride: int = 1, digits: int = 3, dtype: str = "float32"
) -> BinaryConv:
    window = Window.centred((side, side), (stride, stride))
    return binary_conv_problem(Convolution.of((n, c, size, size), (k, c, side, side), window, dtype=dtype), digits)


def _lif(c: int, size: int) -> Lif:
    numel = 32 * c * size * size
    return Lif(numel, numel, numel, c, 1, 0.0, 1e-5, 2.0, 1.0, 0.0, 4, "lif", True, False, False, True, True, True)


def _pack_weight(c: int, size: int) -> PackWeight:
    return PackWeight(Maps(c, c, (3, 3), (9 * c, 1, 3 * c, c), "float32"), 3)


def _cast(c: int, size: int) -> Cast:
    return Cast(128 * c * size * size, 0, False, "float32")


def _events(c: int, size: int) -> Accumulate:
    conv = Convolution.of((128, c, size, size), (c, c, 3, 3), Window.centred((3, 3), (1, 1)))
    return Accumulate(conv, 128 * c * size * size // SPARSEST_OVERFLOW, processors=132)


_PROBLEMS: dict[str, Callable[..., Any]] = {
    "binary_conv": _conv, "lif": _lif, "pack_weight": _pack_weight, "cast": _cast, "event_conv": _events
}


def run() -> Iterator[dict[str, Any]]:
    """One row a problem, with the time of each candidate; then a summary, host times, and a second process."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        cache = TuningCache(Path(folder) / "bench.sqlite")
        for name, numbers in problems():
            rows.append(_row(cache, name, numbers))
            yield rows[-1]
    yield _printed({"case": "summary", **summary(rows)})
    yield _printed({"case": "host microseconds of one eager call of a tuned op", "us": _host()})
    yield _printed({"case": "second process", **_twice("small", SPARSECOMP_AUTOTUNE="quick")})
    yield _printed({"case": "share of the passes", **_twice("spiking_resnet34")})


def _row(cache: TuningCache, name: str, numbers: dict[str, Any]) -> dict[str, Any]:
    device, tuner, problem = torch.device("cuda", 0), Tuner(cache, Settings()), _PROBLEMS[name](**numbers)
    operation, where = all_operations()[name], device_of(device)
    candidates = operation.candidates(problem, where)
    with effort_scope("full", note=print):
        chosen = tuner.choose(operation, problem, device).candidate
    entry = cache.get(operation.signature(problem, where))
    assert entry is not None
    timed = [one for one in candidates if one.name in entry.times]
    times = {f"{one.template.name}:{one.config}": entry.times[one.name] for one in timed}
    row = {
        "case": name, "problem": numbers, "ms": times, "tuned": f"{chosen.template.name}:{chosen.config}",
        "rejected": dict(entry.rejected),
    }  # fmt: skip
    gain = times[ranked(row, card_of(device), where)[0]] / times[row["tuned"]]
    print(f"{name} {numbers}: {row['tuned']} {times[row['tuned']]:.4f} ms, {gain:.3f} x the default", flush=True)
    return row


def problem_of(row: dict[str, Any]) -> Any:
    """The problem that a row of this benchmark measured."""
    return _PROBLEMS[row["case"]](**row["problem"])


def ranked(row: dict[str, Any], card: Card = H100, device: Device = H100_DEVICE) -> list[str]:
    """The measured candidates of a row by name, the cheapest by the present cost model first."""
    problem = problem_of(row)
    order = rank(all_operations()[row["case"]].candidates(problem, device), problem, card)
    names = [f"{one.template.name}:{one.config}" for one in order]
    return [name for name in names if name in row["ms"]]


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Gain of the tuned over the default configurations: geometric mean, least and most."""
    gains = [row["ms"][ranked(row)[0]] / row["ms"][row["tuned"]] for row in rows]
    mean = exp(sum(map(log, gains)) / len(gains))
    return {"gain": mean, "least": min(gains), "most": max(gains), "cases": len(gains)}


def _host() -> dict[str, float]:
    """Host time of ops on inputs so small that the device is never the limit."""
    x = (torch.rand(1, 64, 8, 8, device="cuda") < 0.1).float().contiguous(memory_format=torch.channels_last)
    weight, matrix = torch.randn(64, 64, 3, 3, device="cuda"), torch.randn(64, 64, device="cuda")
    currents = torch.randn(4, 1, 64, 8, 8, device="cuda")
    spikes, rows, one = x.to(torch.int8), (torch.rand(64, 64, device="cuda") < 0.1).float(), [1, 1]
    counts = torch.ops.sparsecomp.spike_conv_counts.default
    neuron = (None, 0.0, None, None, None, None, 0.0, "lif", 2.0, None, True, 1.0, 0.0)
    calls = {
        "lif": lambda: lif(currents, *neuron),
        "spike_conv_counts": lambda: counts(
            spikes, weight, None, one, one, one, 1, 3, "binary", 1.0, None, SPREAD, True
        ),
        "spike_linear": lambda: spike_linear(rows, matrix, None, 3, "binary"),
    }
    for strategy in ("binary", "event", "skip"):
        calls[f"spike_conv {strategy}"] = lambda s=strategy: spike_conv(x, weight, None, one, one, one, 1, 3, s)
    calls["conv2d (cuDNN)"] = lambda: torch.nn.functional.conv2d(x, weight, None, 1, 1)
    calls["relu"] = lambda: torch.relu(currents)
    return {name: host_us(call) for name, call in calls.items()}


_CHILD = """
import json, sys, torch, triton, sparsecomp
from bench.spiking import networks  # thresholds as they are: whether it fires makes no difference to what is compiled
from bench.spiking.snn_network import Variant, measure
from sparsecomp.lowering.tuning import autotune
compiled = []
triton.knobs.compilation.listener = lambda *args, cache_hit=False, **kw: compiled.append(cache_hit)
net = getattr(networks, sys.argv[1])().cuda()
x = torch.rand(4, 8, 3, 64, 64, device="cuda")
found = measure(net, x, "fp32", Variant("sparsecomp", "sparsecomp"))
report = sparsecomp.last_report()
print(json.dumps({
    "timings": autotune.tuner().stats.timings, "triton compilations": compiled.count(False),
    "compile_s": found["compile_s"], "passes_s": sum(step.seconds for step in report.passes),
}))
"""


def _twice(network: str, **environment: str) -> dict[str, Any]:
    """A network compiled by two processes that share caches, empty for the first."""
    with tempfile.TemporaryDirectory() as folder:
        caches = ("SPARSECOMP_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
        env = os.environ | {name: f"{folder}/{name}" for name in caches} | environment
        command = [sys.executable, "-c", _CHILD, network]
        done = [subprocess.run(command, env=env, capture_output=True, text=True, check=True) for _ in range(2)]
    first, second = (json.loads(child.stdout.splitlines()[-1]) for child in done)
    return {"network": network, "first": first, "second": second}


def _printed(row: dict[str, Any]) -> dict[str, Any]:
    print(row, flush=True)
    return row
