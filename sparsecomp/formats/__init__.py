"""Sparse matrices: COO, CSR, CSC, BSR, BCSC, N:M, narrow CSR, bitmaps; conversions, batches, files, inspection.

    csr = CSR.from_dense(weight)
    bsr = csr.to(BSR, block=(16, 16))
    bsr.save("weight.safetensors")
    y = bsr @ x
    print(best(csr))
"""

from sparsecomp.formats.base import SparseMatrix
from sparsecomp.formats.batch import Ragged, cat, ragged, stack
from sparsecomp.formats.best_format import BestFormat, FormatEstimate, best
from sparsecomp.formats.bitmap import BITMAP
from sparsecomp.formats.bounded_product import bounded_matmul
from sparsecomp.formats.bsr import BCSC, BSR
from sparsecomp.formats.coo import COO
from sparsecomp.formats.csr import CSC, CSR
from sparsecomp.formats.masked_product import masked_matmul
from sparsecomp.formats.narrow import NARROW
from sparsecomp.formats.nm import NM
from sparsecomp.formats.pattern import Pattern
from sparsecomp.formats.statistics import Statistics

__all__ = [
    "BCSC",
    "BITMAP",
    "BSR",
    "COO",
    "CSC",
    "CSR",
    "NARROW",
    "NM",
    "BestFormat",
    "FormatEstimate",
    "Pattern",
    "Ragged",
    "SparseMatrix",
    "Statistics",
    "best",
    "bounded_matmul",
    "cat",
    "masked_matmul",
    "ragged",
    "stack",
]
