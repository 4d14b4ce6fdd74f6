"""What is kept of weights survives every write: the matrix of `write_matrix`, on masked formulas and the theta form."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from test_masked_weight_rule import SPELLINGS, Masked
from torch import Tensor, fx, nn
from write_matrix import CHANGES, OPTIMIZERS, VARIANTS, Form, check, pairs

import sparsecomp
from sparsecomp.compiler.backend import input_values
from sparsecomp.ops import frozen_weights
from sparsecomp.options import Options
from sparsecomp.passes import pipeline
from sparsecomp.passes.cost import masked as masked_cost

SIZE = (12, 10)
RULES: list[str] = []
"""Implementations of the sites that were rewritten."""


def rewriting_backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """sparsecomp's rewrite, run op by op."""
    report = pipeline.run(gm, Options.parse(None, {"strict": True}), values=input_values(gm, inputs))
    RULES.extend(str(site.implementation) for site in report.rewritten)
    return gm.forward


def shrink(patch: Callable[..., None] = setattr) -> None:
    """Have the rules take small weights too."""
    patch(masked_cost, "LEAST_FOLDED", 1)
    patch(masked_cost, "LEAST_MERGED", dict.fromkeys((*masked_cost.LEAST_MERGED, "cpu"), 1))
    RULES.clear()


@pytest.fixture(autouse=True)
def small(monkeypatch):
    shrink(monkeypatch.setattr)


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


CASES = list(pairs(list(FORMS), OPTIMIZERS, VARIANTS, list(CHANGES)))


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_every_way_to_write_and_every_optimizer(case):
    form, optimizer, variant, change = case
    check(FORMS[form], optimizer, variant, change, rewriting_backend)
    assert "folded dense" in RULES and ("merged" in RULES) == (form == "masked_scatter")


@pytest.mark.parametrize("promise", ["option", "context"])
def test_tensors_can_be_swapped_for_others(promise):
    """torch refuses where anything refers to a tensor weakly."""
    torch._dynamo.reset()
    model = Trained("blend")
    run = torch.compile(model, backend="sparsecomp", options={"frozen": promise == "option"})
    with torch.no_grad(), nullcontext() if promise == "option" else frozen_weights():
        for _ in range(2):
            torch.testing.assert_close(run(X), model(X))
            assert "folded" in str(sparsecomp.last_report())
            for tensor in (model.weight, model.phi):
                torch.utils.swap_tensors(tensor, nn.Parameter(torch.randn(tensor.shape)))
            torch.utils.swap_tensors(model.numbers, model.numbers.flip(0))
