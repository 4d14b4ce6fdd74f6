"""The mask that a layer already has, whichever way it got one, beside the numbers written out."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

from sparsecomp.errors import MaskError
from sparsecomp.nn import RESULinear
from sparsecomp.nn.masked.existing_mask import bias_of, has_mask, is_trained, weight_and_mask
from sparsecomp.runtime import Mode

W = torch.tensor([[1.0, 0.0, -2.0], [3.0, 4.0, 0.0]])
KEPT = torch.tensor([[True, True, False], [False, True, False]])


def plain() -> nn.Linear:
    layer = nn.Linear(3, 2)
    layer.weight = nn.Parameter(W.clone())
    return layer


class Masking(nn.Module):
    """A parametrization that keeps tensors by name, and multiplies by the first."""

    def __init__(self, **buffers: Tensor) -> None:
        super().__init__()
        for name, value in buffers.items():
            self.register_buffer(name, value)

    def forward(self, weight: Tensor) -> Tensor:
        return weight * next(self.buffers())


def by_prune() -> nn.Module:
    layer = prune.custom_from_mask(plain(), "weight", KEPT)
    layer.weight_orig.data.mul_(2)  # the attribute has the former numbers until the next call
    return layer


def by_parametrization(**buffers: Tensor) -> nn.Module:
    layer = plain()
    parametrize.register_parametrization(layer, "weight", Masking(**buffers))
    return layer


def by_two() -> nn.Module:
    layer = by_parametrization(mask=KEPT.float())
    parametrize.register_parametrization(layer, "weight", Masking(my_mask=torch.tensor([1.0, 0, 1]).expand(2, 3) * 1))
    return layer


def by_resu(mode: Mode) -> nn.Module:
    layer = RESULinear(3, 2)
    layer.weight.data.copy_(W)
    if mode is not Mode.DENSE:
        layer.masked.prune_(layer.weight, KEPT)
        layer.weight.data.copy_(W)  # an optimizer may leave numbers at pruned places
    if mode is Mode.RESU:
        layer.masked.enter_resu_(layer.weight)
    return layer


def with_buffer(name: str) -> nn.Module:
    layer = plain()
    layer.register_buffer(name, KEPT.float())
    return layer


MASKED = W * KEPT
CASES = {
    "none": (plain, W, W != 0, False),
    "torch's pruning": (by_prune, 2 * MASKED, KEPT, True),
    "a parametrization": (lambda: by_parametrization(mask=KEPT.float()), MASKED, KEPT, True),
    "one with more buffers": (
        lambda: by_parametrization(my_mask_0=KEPT.float(), scale=torch.zeros(2, 3)), MASKED, KEPT, True),
    "one with a mask of rows": (
        lambda: by_parametrization(mask=torch.tensor([[1.0], [0.0]])), W * torch.tensor([[1.0], [0.0]]),
        torch.tensor([[True, False, True], [False] * 3]), False),
    "two": (by_two, MASKED * torch.tensor([1, 0, 1]), KEPT & torch.tensor([True, False, True]), True),
    "RESU before it prunes": (lambda: by_resu(Mode.DENSE), W, torch.ones(2, 3).bool(), False),
    "RESU": (lambda: by_resu(Mode.SPARSE), MASKED, KEPT, True),
    "the pruned weight's copy alone": (lambda: with_buffer("weight_orig"), W, W != 0, False),
    "a buffer that is no mask of torch's": (lambda: with_buffer("weight_mask"), W, W != 0, True),
}  # fmt: skip


@pytest.mark.parametrize(("make", "weight", "mask", "has"), CASES.values(), ids=CASES)
def test_weight_and_mask(make, weight, mask, has):
    layer = make()
    found, kept = weight_and_mask(layer)
    assert torch.equal(found, weight) and torch.equal(kept, mask) and kept.dtype is torch.bool
    assert not found.requires_grad and has_mask(layer) == has


def test_theta_is_no_weight_to_prune():
    with pytest.raises(MaskError, match="RESU phase"):
        weight_and_mask(by_resu(Mode.RESU))


@pytest.mark.parametrize("trained", [True, False])
def test_a_bias_is_the_parameter_or_what_is_made_of_it(trained):
    assert bias_of(nn.Linear(3, 2, bias=False)) is None
    layer = plain().requires_grad_(trained)
    assert bias_of(layer) is layer.bias
    kept = torch.tensor([True, False])
    prune.custom_from_mask(layer, "bias", kept)
    layer.weight.requires_grad_(not trained)
    found = bias_of(layer)
    assert isinstance(found, nn.Parameter) and found.requires_grad == trained == is_trained(layer, "bias")
    assert torch.equal(found, layer.bias_orig * kept) and is_trained(layer) != trained
