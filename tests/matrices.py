"""Real matrices for tests: where they lie, and what was counted in them independently."""

import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest

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

# what a conversion to each format is told, of blocks that divide few shapes
LAYOUTS: dict[str, dict[str, Any]] = {
    "COO": {},
    "CSR": {},
    "CSC": {},
    "BSR": {"block": (2, 3)},
    "BCSC": {"block": (3, 2)},
    "NM": {"n": 4, "m": 4},
    "NARROW": {},
}
