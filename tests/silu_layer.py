"""A sparse layer and what is fused behind it, for tests of the kernels and rules of layers of few rows."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsecomp.formats import SparseMatrix
from sparsecomp.nn import SparseLinear


class SiluLayer(nn.Module):
    """SiLU of a layer with this weight, and a bias in float16, in inference."""

    def __init__(self, weight: SparseMatrix) -> None:
        super().__init__()
        self.layer = SparseLinear(weight, torch.randn(weight.shape[0]).half(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., features) to (..., features)."""
        return F.silu(self.layer(x))

    def exact(self, x: Tensor) -> Tensor:
        """In float64."""
        assert self.layer.bias is not None
        return F.silu(F.linear(x.double(), self.layer.weight.detach().to_dense().double(), self.layer.bias.double()))
