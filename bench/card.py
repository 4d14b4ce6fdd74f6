"""What a new card does: its record for `sparsecomp/lowering/tuning/cards.py`, ready to paste.

Its ceilings, and the shares of them that whole layers reach. The shares of tiles were fitted to the timings of many
configurations, and a new card is taken to reach the H100's.
"""

import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields, replace
from statistics import mean
from typing import Any

import torch

from bench import table
from sparsecomp.lowering.cache.signature import device_of
from sparsecomp.lowering.tuning.cards import H100, ByPrecision, Card, Ceilings
from sparsecomp.lowering.tuning.ceilings import measure
from sparsecomp.passes.cost import spiking as gate

_DENSITY = 0.05
"""Of the spikes: the densest that events are meant for, where their products are most of the time."""
_NARROW = 64
"""Channels of the stage that counts as narrow; the others are wide."""
_CEILINGS = tuple(field.name for field in fields(Ceilings))
_SHARES = (
    "matmul", "conv", "conv_channels_last", "narrow", "int8_narrow", "int8_two_digits", "events_float32", "events_half",
)  # fmt: skip
"""What layers tell."""


def run() -> Iterator[dict[str, Any]]:
    """The ceilings, and the layers that the shares are made of, as they are measured."""
    from bench.spiking import snn_conv  # loads Triton

    device = torch.device("cuda", torch.cuda.current_device())
    yield {"case": "ceilings", "capability": device_of(device).capability, **asdict(measure(device))}
    for dtype in (torch.float32, torch.float16):
        for channels, size in snn_conv.STAGES:
            yield snn_conv.conv_row(channels, size, _DENSITY, dtype)
        yield snn_conv.linear_row(4096, _DENSITY, dtype)


def record(rows: Sequence[dict[str, Any]]) -> Card:
    """The card that gave the rows of `run`."""
    layers, ceilings = rows[1:], {name: rows[0][name] for name in ("capability", *_CEILINGS)}
    linear, wide, narrow = (_rates(layers, kind) for kind in ("linear", "wide", "narrow"))
    # the two that `measure` takes from the H100
    tf32, int8 = linear["float32 dense tf32"], 3 * wide["float32 binary from bytes"]
    card = replace(H100, **{**ceilings, "tf32": tf32, "int8": int8})
    last, narrow_last = (_shares(rates, card, " channels_last") for rates in (wide, narrow))
    return replace(
        card, matmul=_shares(linear, card), conv=_shares(wide, card, " nchw"), conv_channels_last=last,
        narrow=ByPrecision(*(a / b for a, b in zip(narrow_last, last, strict=True))),
        int8_narrow=3 * narrow["float32 binary from bytes"] / int8,
        int8_two_digits=2 * wide["float16 binary from bytes"] / int8,
        events_float32=_events(layers, "float32", card), events_half=_events(layers, "float16", card),
    )  # fmt: skip


def pasted(card: Card, gpu: str, torch_version: str) -> str:
    """The record as Python, with its line of `KNOWN`."""
    name = re.sub(r"\W+", "_", gpu.removeprefix("NVIDIA ")).upper()
    arguments = ", ".join(f"{field}={_written(getattr(card, field))}" for field in (*_CEILINGS, "capability", *_SHARES))
    body = textwrap.fill(arguments, 116, initial_indent="    ", subsequent_indent="    ")
    source = f'"""{gpu}, torch {torch_version}, measured by `python -m bench card`."""'
    return f'{name} = Card(\n{body},\n)  # fmt: skip\n{source}\n\nin KNOWN: "{gpu}": {name},'


def _written(value: float | str | ByPrecision) -> str:
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, ByPrecision):
        return f"ByPrecision({', '.join(f'{share:.3g}' for share in value)})"
    return str(int(value)) if float(value).is_integer() and value < 1e9 else f"{value:.3g}"


def _kind(row: dict[str, Any]) -> str:
    site = table.site_of(row)
    return "linear" if site.is_linear else "narrow" if site.k <= _NARROW else "wide"


def _rates(rows: Sequence[dict[str, Any]], kind: str) -> dict[str, float]:
    """Operations a second, by dtype and implementation: the mean over rows of a kind."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if _kind(row) == kind:
            for name, ms in row["ms"].items():
                found.setdefault(f"{row['dtype']} {name}", []).append(_operations(row) / (ms * 1e-3))
    return {name: mean(rates) for name, rates in found.items()}


def _shares(rates: dict[str, float], card: Card, layout: str = "") -> ByPrecision:
    return ByPrecision(
        rates[f"float32 dense fp32{layout}"] / card.fp32, rates[f"float32 dense tf32{layout}"] / card.tf32,
        rates[f"float16 dense fp16{layout}"] / card.half,
    )  # fmt: skip


def _operations(row: dict[str, Any]) -> float:
    s = table.site_of(row)
    return 2.0 * s.n * s.out_pixels * s.k * s.c * s.taps


def _events(rows: Sequence[dict[str, Any]], dtype: str, card: Card) -> float:
    """Operations of events to a byte of bandwidth: what is left of their time once events are found and written."""
    rates = []
    for row in rows:
        if _kind(row) == "wide" and row["dtype"] == dtype:
            rest = gate.seconds_of(table.site_of(row)._replace(density=0.0), "event", card)
            rates.append(_operations(row) * row["density"] / (row["ms"]["event"] * 1e-3 - rest))
    return mean(rates) / card.bandwidth
