"""The benchmarks by name: the module of `bench` that does each, and what of the command line it takes.

A module is imported when it runs, since most load Triton. Its rows are saved as they come, and its table is printed.
"""

from argparse import Namespace
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench.saving import save_each, save_last

Row = dict[str, Any]
Rows = Iterable[Row]


def _its_table(module: Any, rows: list[Row]) -> str:
    return module.table(rows) if hasattr(module, "table") else ""


class Suite(NamedTuple):
    """A benchmark.

    Attributes:
        module: its name within `bench`.
        rows: what it measures, from the module and the command line.
        told: what is printed in the end.
        saved: how rows are saved.
        needs_gpu: whether it needs a CUDA device.
    """

    module: str
    rows: Callable[[Any, Namespace], Rows]
    told: Callable[[Any, list[Row]], str] = _its_table
    needs_gpu: bool = True
    saved: Callable[[Path, Rows], list[Row]] = save_each


def _layers(module: Any, rows: list[Row]) -> str:
    from bench import table

    return table.layers_as_called(rows)


def _networks(module: Any, rows: list[Row]) -> str:
    from bench import table

    return table.networks_as_called(rows)


def _precisions(module: Any, given: Namespace) -> tuple[str, ...]:
    found = tuple(given.precision or module.PRECISIONS)
    if not set(found) <= set(module.PRECISIONS):
        raise SystemExit(f"--precision {' '.join(found)}: this suite has {', '.join(module.PRECISIONS)}")
    return found


def _nothing(module: Any, rows: list[Row]) -> str:
    return ""


def _record(module: Any, rows: list[Row]) -> str:
    return module.pasted(module.record(rows), torch.cuda.get_device_name(), torch.__version__)


def _study(module: str) -> Suite:
    return Suite(module, lambda study, given: study.run(), needs_gpu=False)


STUDIES = {
    "prune-minilm": _study("masked.prune_minilm"), "resu-mnist": _study("masked.resu_mnist"),
    "algebra": _study("sparse.algebra"), "dynamic": _study("sparse.dynamic"),
}  # fmt: skip
"""What is no benchmark of speed alone, and runs without a GPU."""

SUITES: dict[str, Suite] = {
    "loop": Suite(
        "loop", lambda m, a: m.run(m.grid(sizes=tuple(a.sizes or m.SIZES)), a.modes, workers=a.workers or 1), _layers
    ),
    "loop-networks": Suite(
        "loop_networks", lambda m, a: m.run(a.names or m.NETWORKS, a.modes, workers=a.workers or 1), _networks
    ),
    "snn-conv": Suite("spiking.snn_conv", lambda m, a: m.run(a.data and a.data / "spikes")),
    "snn-network": Suite(
        "spiking.snn_network",
        lambda m, a: m.run(a.network, precisions=_precisions(m, a), labels=tuple(a.names or ())), saved=save_last,
    ),
    "snn-training": Suite(
        "spiking.snn_training",
        lambda m, a: m.run(
            a.modes, a.names or tuple(m.NETWORKS), _precisions(m, a), a.steps or (m.STEPS,), a.batches,
            a.workers or 1, a.threads,
        ),
    ),
    "snn-latency": Suite(
        "spiking.latency",
        lambda m, a: m.run(
            a.names or m.NAMES, a.modes, a.steps or m.STEPS, a.batches or m.BATCHES, a.workers or 1, a.threads
        ),
    ),
    "spike-layers": Suite(
        "spiking.spike_layers", lambda m, a: m.run(a.modes, tuple(a.names or m.KINDS), a.workers or 8)
    ),
    "conv-neuron": Suite("spiking.conv_neuron", lambda m, a: m.run(a.workers or 8)),
    "conv-neuron-half": Suite("spiking.conv_neuron_half", lambda m, a: m.run(a.workers or 8)),
    "tuning": Suite("tuning", lambda m, a: m.run()),
    "spmm": Suite("sparse.spmm", lambda m, a: m.run(a.data)),
    "semi-structured": Suite("sparse.semi_structured", lambda m, a: m.run()),
    "sparse-products": Suite("sparse.sparse_products", lambda m, a: m.run()),
    "pattern-algebra": Suite("sparse.algebra", lambda m, a: m.run_on_gpu()),
    "active-inputs": Suite("sparse.active_inputs", lambda m, a: m.run(a.workers or 1)),
    "few-rows": Suite("sparse.few_rows", lambda m, a: m.run()),
    "few-rows-candidates": Suite(
        "sparse.few_rows", lambda m, a: m.candidates(a.workers or 8, a.names or ()), _nothing
    ),
    "shared-input": Suite("sparse.shared_input", lambda m, a: m.run(a.workers or 8, a.names or m.FORMS)),
    "shared-input-candidates": Suite("sparse.shared_input", lambda m, a: m.candidates(), _nothing),
    "gated-pairs": Suite("sparse.gated_pairs", lambda m, a: m.run(a.workers or 8, a.names or m.FORMS)),
    "two-of-four": Suite("sparse.two_of_four", lambda m, a: m.run()),
    "two-of-four-candidates": Suite("sparse.two_of_four", lambda m, a: m.candidates(a.workers or 8), _nothing),
    "generation": Suite("sparse.generation", lambda m, a: m.run(a.workers or 6, a.names or (*m.STOCK, *m.OURS))),
    "training-step": Suite("sparse.training_step", lambda m, a: m.run(a.modes, a.workers or 1)),
    "scaling": Suite(
        "sparse.scaling", lambda m, a: m.run([case for name in a.names or ["mlp"] for case in m.NETWORKS[name]()])
    ),
    "resu": Suite("masked.resu", lambda m, a: m.run()),
    "attention": Suite("attention.block_attention", lambda m, a: m.run(a.names, a.workers or 8)),
    "attention-long": Suite("attention.long", lambda m, a: m.run(a.names or m.PARTS, a.workers or 8)),
    "masked-attention": Suite("attention.masked_models", lambda m, a: m.run(a.modes, a.workers or 1)),
    "attention-data": Suite("attention.data_masks", lambda m, a: m.run(a.modes, a.workers or 1)),
    "spiking-attention": Suite("attention.spiking", lambda m, a: m.run(a.modes)),
    "trained-biases": Suite("attention.trained_biases", lambda m, a: m.run(a.workers or 1)),
    "attention-packed": Suite("attention.packed", lambda m, a: m.run()),
    "attention-candidates": Suite("attention.candidates", lambda m, a: m.run(a.workers or 8)),
    "element-attention": Suite("attention.elements", lambda m, a: m.run()),
    "element-candidates": Suite("attention.elements", lambda m, a: m.candidates(a.workers or 8), lambda m, rows: ""),
    "static-cache": Suite("attention.static_cache", lambda m, a: m.run(a.modes)),
    "decode": Suite("attention.decode", lambda m, a: m.run()),
    "decode-candidates": Suite("attention.decode", lambda m, a: m.candidates(a.workers or 8), lambda m, rows: ""),
    "card": Suite("card", lambda m, a: m.run(), _record),
    "cpu": Suite("cpu", lambda m, a: [m.run()], needs_gpu=False, saved=save_last),
    **STUDIES,
}
