"""Small models with masked weights for `write_matrix`, compiled by a backend that rewrites them and runs op by op."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from masked_models import SPELLINGS, Masked
from torch import Tensor, fx, nn
from write_matrix import Form

from sparsecomp.compiler.capture import Graph
from sparsecomp.options import Options
from sparsecomp.passes.cost import masked as masked_cost

SIZE = (12, 10)
RULES: list[str] = []
"""Implementations of the sites that were rewritten."""


def rewriting_backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """sparsecomp's rewrite, run op by op."""
    options = Options.parse(options={"strict": True})
    report = Graph.of_dynamo(gm, inputs, {}, options).rewrite(options)
    RULES.extend(str(site.implementation) for site in report.rewritten)
    return gm.forward


def shrink(patch: Callable[..., None] = setattr) -> None:
    """Have the rules take small weights too."""
    patch(masked_cost, "LEAST_FOLDED", 1)
    patch(masked_cost, "LEAST_MERGED", dict.fromkeys((*masked_cost.LEAST_MERGED, "cpu"), 1))
    RULES.clear()


class Trained(nn.Module):
    """A layer of a spelling's, whose parameters all take part."""

    def __init__(self, spelling: str) -> None:
        super().__init__()
        inner = Masked(SPELLINGS[spelling], shape=SIZE)
        used = {"blend": ("phi",), "where phi": ("phi",), "masked_scatter": ("theta",)}.get(spelling, ())
        for name in ("weight", "bias", *used):
            setattr(self, name, getattr(inner, name))
        for name in ("mask", "numbers"):
            self.register_buffer(name, getattr(inner, name))
        self.effective = SPELLINGS[spelling]

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.effective(self), self.bias)


X = torch.randn(3, SIZE[1], generator=torch.Generator().manual_seed(2))
FORMS = {
    spelling: Form(lambda spelling=spelling: Trained(spelling), X, ("mask", "numbers"))
    for spelling in ("mask * weight", "numbers * weight", "blend", "where", "masked_fill", "masked_scatter")
}
