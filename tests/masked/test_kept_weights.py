"""What is kept of weights survives every write: the matrix of `write_matrix`, on masked formulas and the theta form."""

from contextlib import nullcontext

import pytest
import torch
from kept_models import FORMS, RULES, Trained, X, rewriting_backend, shrink
from torch import nn
from write_matrix import CHANGES, OPTIMIZERS, VARIANTS, check, pairs

import sparsecomp
from sparsecomp.ops import frozen_weights


@pytest.fixture(autouse=True)
def small(monkeypatch):
    shrink(monkeypatch.setattr)


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
    model = Trained("blend")
    run = torch.compile(model, backend="sparsecomp", options={"frozen": promise == "option"})
    with torch.no_grad(), nullcontext() if promise == "option" else frozen_weights():
        for _ in range(2):
            torch.testing.assert_close(run(X), model(X))
            assert "folded" in str(sparsecomp.last_report())
            for tensor in (model.weight, model.phi):
                torch.utils.swap_tensors(tensor, nn.Parameter(torch.randn(tensor.shape)))
            torch.utils.swap_tensors(model.numbers, model.numbers.flip(0))
