"""The parts of README.md and docs/ that are made of the benchmarks' results, each between two comments that name it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import table
from bench.attention import (
    block_attention,
    data_masks,
    decode,
    elements,
    long,
    masked_models,
    packed,
    spiking,
    static_cache,
    trained_biases,
)
from bench.local import scores, speeds
from bench.masked import prune_minilm, resu_mnist
from bench.sparse import (
    active_inputs,
    algebra,
    dynamic,
    few_rows,
    gated_pairs,
    scaling,
    shared_input,
    sparse_products,
    training_step,
    two_of_four,
)
from bench.spiking import conv_neuron, conv_neuron_half, snn_training, spike_layers
from bench.timing import place

ROOT = Path(__file__).parents[1]

Part = Callable[[Path], str]
"""Markdown of a folder of results."""


def _study(name: str, rows_to_table: Callable[..., str]) -> Part:
    return lambda results: rows_to_table(json.loads((results / f"{name}.json").read_text())["result"])


def _if_measured(name: str, rows_to_table: Callable[[list[dict[str, Any]]], str], unit: str = "; milliseconds") -> Part:
    """Of a study with its machine; which one does it, where nobody has yet."""

    def part(results: Path) -> str:
        path = results / f"{name}.json"
        if not path.exists():
            return f"Not measured yet: `python -m bench {name.replace('_', '-')}` does."
        found = json.loads(path.read_text())
        on = f"Measured on {place(found['machine'])}, torch {found['machine']['torch']}{unit}."
        missing = found.get("manifest", {}).get("left out", {})
        left_out = [f"{data} is left out: {why}." for data, why in missing.items()]
        return "\n\n".join([on, rows_to_table(found["result"]), *left_out])

    return part


def _generation(rows: list[dict[str, Any]]) -> str:
    from bench.sparse import generation  # needs transformers

    return generation.table(rows)


PARTS: dict[str, dict[str, Part]] = {
    "README.md": {"headline": table.headline},
    "docs/results.md": {
        "results": table.markdown,
        "resu-mnist": _study("resu_mnist", resu_mnist.table),
        "prune-minilm": _study("prune_minilm", prune_minilm.table),
        "algebra": _if_measured("algebra", algebra.table),
        "pattern-algebra": _if_measured("pattern_algebra", algebra.table),
        "sparse-products": _if_measured("sparse_products", sparse_products.table),
        "dynamic": _if_measured("dynamic", dynamic.table, ""),
        "training-step": _if_measured("training_step", training_step.table),
        "spike-layers": _if_measured("spike_layers", spike_layers.table),
        "conv-neuron": _if_measured("conv_neuron", conv_neuron.table),
        "conv-neuron-half": _if_measured("conv_neuron_half", conv_neuron_half.table),
        "snn-training": _if_measured("snn_training", snn_training.table),
        "attention": _if_measured("attention", block_attention.table),
        "attention-long": _if_measured("attention_long", long.table),
        "masked-attention": _if_measured("masked_attention", masked_models.table),
        "attention-data": _if_measured("attention_data", data_masks.table),
        "trained-biases": _if_measured("trained_biases", trained_biases.table),
        "attention-packed": _if_measured("attention_packed", packed.table),
        "spiking-attention": _if_measured("spiking_attention", spiking.table),
        "decode": _if_measured("decode", decode.table),
        "static-cache": _if_measured("static_cache", static_cache.table),
        "element-attention": _if_measured("element_attention", elements.table),
        "active-inputs": _if_measured("active_inputs", active_inputs.table),
        "few-rows": _if_measured("few_rows", few_rows.table),
        "two-of-four": _if_measured("two_of_four", two_of_four.table),
        "gated-pairs": _if_measured("gated_pairs", gated_pairs.table),
        "shared-input": _if_measured("shared_input", shared_input.table),
        "generation": _if_measured("generation", _generation, ""),
        "scaling": _if_measured("scaling", scaling.table),
        "geo-speed": _if_measured("geo_speed", speeds.table),
        "geo": _if_measured("geo", scores.table),
        "geo-cuda": _if_measured("geo_cuda", scores.table),
    },
}


def filled(file: str, results: Path = table.RESULTS) -> str:
    """The text of a document with its parts made anew.

    Raises:
        ValueError: a pair of comments is not there once.
    """
    text = (ROOT / file).read_text()
    for name, part in PARTS[file].items():
        start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        if text.count(start) != 1 or text.count(end) != 1:
            raise ValueError(f"{file} needs one {start} and one {end}")
        before, after = text.split(start)[0], text.split(end)[1]
        text = f"{before}{start}\n\n{part(results).strip()}\n\n{end}{after}"
    return text


def write(results: Path = table.RESULTS) -> None:
    """Make the parts of every document anew, in place."""
    for file in PARTS:
        (ROOT / file).write_text(filled(file, results))
