"""Reads sparse matrices of public collections: Matrix Market files and the DLMC's .smtx patterns, without scipy."""

import gzip
from pathlib import Path

import numpy as np
import torch

from sparsecomp.formats import COO, CSR


def read(path: Path) -> COO | CSR:
    """The matrix in a `.smtx`, `.mtx` or `.mtx.gz` file.

    A file of patterns gets ones, float32; numbers are float64. Symmetric and skew-symmetric ones are expanded, and
    zeros that a file lists are stored.

    Raises:
        ValueError: another kind of file, or one that is complex or dense.
    """
    if path.suffix == ".smtx":
        return _read_smtx(path.read_text())
    if path.name.endswith((".mtx", ".mtx.gz")):
        text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        return _read_mtx(text.decode("ascii"))
    raise ValueError(f"{path.name}: needs .smtx, .mtx or .mtx.gz")


def _read_smtx(text: str) -> CSR:
    """Header (rows, columns, nnz), then row pointers, then columns, as one stream of integers."""
    lines = (line for line in text.splitlines() if not line.startswith("%"))
    numbers = np.array(" ".join(lines).replace(",", " ").split(), dtype=np.int64)
    rows, cols, nnz = numbers[:3].tolist()
    crow, col = torch.from_numpy(numbers[3:].astype(np.int32)).split([rows + 1, nnz])
    return CSR.from_arrays(crow, col, torch.ones(nnz), (rows, cols), coalesce=True)


def _read_mtx(text: str) -> COO:
    header, *lines = text.splitlines()
    layout, field, symmetry = header.lower().split()[2:5]
    if layout != "coordinate" or field not in ("real", "integer", "pattern") or symmetry == "hermitian":
        raise ValueError(f"the header is {header!r}, needs a real coordinate matrix")
    tokens = np.array(" ".join(line for line in lines if not line.startswith("%")).split(), dtype=np.float64)
    rows, cols, nnz = (int(size) for size in tokens[:3])
    table = torch.from_numpy(tokens[3:]).view(nnz, 2 if field == "pattern" else 3)
    row, col = table[:, 0].long() - 1, table[:, 1].long() - 1
    values = torch.ones(nnz) if field == "pattern" else table[:, 2].clone()
    if symmetry != "general":
        below = row != col
        mirrored = -values[below] if symmetry == "skew-symmetric" else values[below]
        row, col = torch.cat([row, col[below]]), torch.cat([col, row[below]])
        values = torch.cat([values, mirrored])
    return COO.from_triplets(row.int(), col.int(), values, (rows, cols))
