"""Layers by bitmaps that read one x are one launch: the operation, the operator, and when the compiler makes it."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rewriting import rewritten_for, site
from kernel_devices import graph_of, needs_triton
from test_bitmap_linear import needs_gpu, packed, pruned
from torch import Tensor, nn

import sparsecomp
from sparsecomp.formats import CSR, NARROW, SparseMatrix
from sparsecomp.nn import SparseLinear
from sparsecomp.passes.cost.decision import Decision
from sparsecomp.passes.sparse import bitmap


class Attending(nn.Module):
    """Queries, keys and values, and a layer that takes what was made of them."""

    def __init__(self, kind: type[SparseMatrix] = CSR, rows: Sequence[int] = (96, 40, 33), biased: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            SparseLinear(kind.from_dense(pruned(m, 264)), torch.randn(m).half() if biased else None, requires_grad=False)
            for m in rows
        )

    def forward(self, x: Tensor) -> Any:
        return tuple(layer(x) for layer in self.layers)

    def exact(self, x: Tensor) -> list[Tensor]:
        """In float64."""
        return [
            F.linear(x.double(), one.weight.detach().to_dense().double(), None if one.bias is None else one.bias.double())
            for one in self.layers
        ]


@pytest.fixture
def by_bitmaps(monkeypatch):
    """Layers run by bitmaps that are small enough for a test."""
    always = Decision("bitmap_tiles", "asked for", {"bitmap_tiles": 1e-9, "dense": 1e-3}), 2
    monkeypatch.setattr(bitmap, "decide", lambda *operands: always)


@needs_triton
@pytest.mark.parametrize(("kind", "biased", "shape"), [(CSR, False, (2, 264)), (NARROW, True, (2, 3, 264))])
def test_layers_on_one_x_are_one_launch(kind, biased, shape, by_bitmaps):
    torch.manual_seed(0)
    model, x = Attending(kind, biased=biased), torch.randn(shape).half()
    out, report, code = rewritten_for("h200", model, x, frozen=True, verify=True)
    assert [one.implementation for one in report.sites] == 3 * ["bitmap copy"] + ["shared input"]
    assert code.count("bitmap_siblings.default(") == 1 and "bitmap_linear" not in code
    for found, exact in zip(out, model.exact(x), strict=True):
        assert found.shape == exact.shape and found.is_contiguous() and (found - exact).norm() <= 1e-3 * exact.norm()
