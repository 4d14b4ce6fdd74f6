"""Matrices for tests: every format there is, and real ones with what was counted in them independently."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest

from sparsecomp.formats.base import FORMATS

Format = TypeVar("Format")
T = TypeVar("T")

FOLDER = Path(os.environ.get("SPARSECOMP_TEST_DATA", Path(__file__).parents[2] / "shared" / "data")) / "matrices"


class Real(NamedTuple):
    """A file and its figures, as the folder's README gives them (rounded as there)."""

    file: str
    shape: tuple[int, int]
    nnz: int
    row_mean: float
    row_max: int
    row_variation: float
    empty_rows: int


_TABLE = [
    Real("swin_tiny_unstructured50_attn_proj.smtx", (96, 96), 4608, 48.0, 71, 0.21, 0),
    Real("dlmc_rn50_mag0.7_b2g2.smtx", (128, 1152), 44236, 345.6, 533, 0.19, 0),
    Real("dlmc_transformer_mag0.9_enc2_ffn1.smtx", (2048, 512), 104857, 51.2, 226, 0.44, 28),
    Real("dlmc_transformer_vd0.98_dec5_ffn1.smtx", (2048, 512), 1373, 0.7, 118, 11.47, 2032),
    Real("dlmc_transformer_vd0.98_enc5_ffn1_nnz0.smtx", (2048, 512), 0, 0.0, 0, 0.0, 2048),
    Real("bcsstk13.mtx.gz", (2003, 2003), 83883, 41.9, 95, 0.54, 0),
    Real("ca-CondMat.mtx.gz", (23133, 23133), 186936, 8.1, 280, 1.32, 0),
    Real("p2p-Gnutella31.mtx.gz", (62586, 62586), 147892, 2.4, 78, 1.86, 46199),
]

REAL = [
    pytest.param(
        real,
        id=real.file.split(".")[0],
        marks=pytest.mark.skipif(
            not (FOLDER / real.file).exists(),
            reason=f"no real matrices: set SPARSECOMP_TEST_DATA ({FOLDER / real.file} is not there)",
        ),
    )
    for real in _TABLE
]


def of_every_format(listed: Mapping[Format, T]) -> dict[Format, T]:
    """A table by format, by its name or class, that leaves none out, so that tests know a new one.

    Raises:
        LookupError: it does.
    """
    return _complete(listed, set(FORMATS), lambda key: key if isinstance(key, str) else key.__name__)


def of_every_layout(listed: Mapping[Format, T]) -> dict[Format, T]:
    """A table by layout in which operators take matrices, by its name or class; "2:4" is one of "nm" besides."""
    return _complete(
        listed, {kind.OPERAND for kind in FORMATS.values()} | ({"2:4"} & set(listed)),
        lambda key: key if isinstance(key, str) else key.OPERAND,
    )  # fmt: skip


def _complete(listed: Mapping[Format, T], known: set[Any], name_of: Callable[[Any], str]) -> dict[Format, T]:
    names = {name_of(key) for key in listed}
    if names != known:
        raise LookupError(f"a test's table has {sorted(names)}, there are {sorted(known)}")
    return dict(listed)


# what a conversion to each format is told, of blocks that divide few shapes
LAYOUTS: dict[str, dict[str, Any]] = of_every_format(
    {
        "COO": {}, "CSR": {}, "CSC": {}, "BSR": {"block": (2, 3)}, "BCSC": {"block": (3, 2)}, "NM": {"n": 4, "m": 4},
        "NARROW": {}, "BITMAP": {},
    }
)  # fmt: skip
