"""Sparse matrices: COO, CSR, CSC, BSR, BCSC and N:M, conversions between them, files and inspection.

    csr = CSR.from_dense(weight)
    bsr = csr.to(BSR, block=(16, 16))
    bsr.save("weight.safetensors")
"""

from sparsecomp.formats.base import SparseMatrix
from sparsecomp.formats.coo import COO
from sparsecomp.formats.csr import CSC, CSR

__all__ = ["COO", "CSC", "CSR", "SparseMatrix"]
