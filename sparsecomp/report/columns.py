"""The columns of the report, on the terminal and on the page: a new one is a line of `COLUMNS`."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import PurePath

from sparsecomp.report.site import Layer


class Bar(Enum):
    """How long the bar of a number is on the page."""

    NONE = "none"
    SHARE = "the number itself"
    OF_MOST = "a share of the column's largest"


@dataclass(frozen=True, slots=True)
class Column:
    """One column.

    Attributes:
        title: its heading.
        text: what it says of a layer.
        number: what the page sorts it by, where that is a number.
        bar: what the page draws.
        on_terminal: whether the terminal has room for it.
    """

    title: str
    text: Callable[[Layer], str]
    number: Callable[[Layer], float | None] = lambda layer: None
    bar: Bar = Bar.NONE
    on_terminal: bool = True


def _place(layer: Layer) -> str:
    file, _, line = layer.site.location.rpartition(":")
    return f"{PurePath(file).name}:{line}" if file else ""


def _runs_as(layer: Layer) -> str:
    site = layer.site
    return f"{site.implementation}, {site.precision}" if site.precision else site.implementation


def _density(layer: Layer) -> str:
    assumed = " assumed" if layer.site.density_source == "assumed" else ""
    return "" if layer.density is None else f"{layer.density:.1%}{assumed}"


def _time(layer: Layer) -> str:
    estimate = layer.site.estimate
    return "" if layer.seconds is None or estimate is None else f"{layer.seconds * 1e6:.1f} us {estimate.source}"


def span(gains: list[float]) -> str:
    """Speed-ups in a word, from the least to the most."""
    least, most = f"{min(gains):.2f}x", f"{max(gains):.2f}x"
    return least if least == most else f"{least} to {most}"


COLUMNS = (
    Column("rule", lambda layer: layer.site.rule),
    Column("site", lambda layer: layer.name),
    Column("location", _place),
    Column("runs as", _runs_as),
    Column("density", _density, lambda layer: layer.density, Bar.SHARE),
    Column("time", _time, lambda layer: layer.seconds, Bar.OF_MOST, on_terminal=False),
    Column(
        "gain", lambda layer: span(layer.gains) if layer.gains else "", lambda layer: max(layer.gains, default=None)
    ),
    Column("reason", lambda layer: layer.site.reason),
)
