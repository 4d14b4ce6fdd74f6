"""What formats do by way of CSR that neither torch nor scipy has: their transpose, and their foreign layouts."""

from abc import ABC
from typing import Any

from torch import Tensor

from sparsecomp.formats.base import SparseMatrix
from sparsecomp.formats.compressed import Compressed
from sparsecomp.formats.csr import CSR


class ThroughCSR(SparseMatrix, ABC):
    """A matrix by rows that is CSR to others. What fills it up, as the zeros of a group, is left out there."""

    @property
    def mT(self) -> Compressed:
        """The transposed matrix as CSC, in whose order the values are copied."""
        return self.to(CSR).mT

    def to_torch(self) -> Tensor:
        """A torch tensor in CSR layout."""
        return self.to(CSR).to_torch()

    def to_scipy(self) -> Any:
        """A `scipy.sparse.csr_array`; otherwise as `CSR.to_scipy`."""
        return self.to(CSR).to_scipy()
