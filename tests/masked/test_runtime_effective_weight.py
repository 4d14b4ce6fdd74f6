"""The effective weight against the textbook formula, and its gradients against float64 differences."""

import pytest
import torch

from sparsecomp.errors import MaskError
from sparsecomp.nn.masked.effective_weight import effective_weight, gather_pruned, load_theta_, scatter_pruned
from sparsecomp.nn.masked.mask import SparseMask


def _case(shape, dtype=torch.float32, density=0.3):
    generator = torch.Generator().manual_seed(1)
    mask = SparseMask(torch.rand(shape, generator=generator) < density)
    weight = torch.randn(shape, generator=generator, dtype=dtype)
    return weight, torch.randn(mask.pruned.numel(), generator=generator, dtype=dtype), mask


@pytest.mark.parametrize("shape", [(8, 6), (4, 3, 3, 3), (7,), (0,), (0, 4)])
@pytest.mark.parametrize("density", [0.0, 0.3, 1.1])
def test_both_forms_are_the_formula_bit_for_bit(shape, density):
    weight, theta, mask = _case(shape, density=density)
    m = mask.mask.float()
    expected = m * weight + (1 - m) * scatter_pruned(theta, mask)
    separate = effective_weight(weight, theta, mask)
    shared = load_theta_(weight.clone(), theta, mask)
    assert torch.equal(separate, expected) and torch.equal(shared, expected)
    assert torch.equal(gather_pruned(shared, mask), theta)
    assert torch.equal(weight, _case(shape, density=density)[0]), "the separate form leaves W as it was"


def test_gradients():
    weight, theta, mask = _case((5, 4), torch.float64)
    weight.requires_grad_(), theta.requires_grad_()
    assert torch.autograd.gradcheck(lambda w, t: effective_weight(w, t, mask), (weight, theta))
    x = torch.randn(3, 4, dtype=torch.float64)
    (x @ effective_weight(weight, theta, mask).T).square().sum().backward()
    dense = load_theta_(weight.detach().clone(), theta.detach(), mask).requires_grad_()
    (x @ dense.T).square().sum().backward()
    assert torch.equal(theta.grad, gather_pruned(dense.grad, mask))
    assert torch.equal(weight.grad, dense.grad * mask.mask)


def test_theta_moves_although_the_weight_is_frozen():
    weight, theta, mask = _case((5, 4))
    before = theta.clone()
    theta.requires_grad_()
    optimizer = torch.optim.SGD([theta], lr=0.1)
    effective_weight(weight, theta, mask).sum().backward()
    optimizer.step()
    assert weight.grad is None
    torch.testing.assert_close(theta.detach(), before - 0.1)


def test_mask_changed_before_backward_and_dead_nan():
    weight, theta, mask = _case((5, 4))
    pruned = mask.pruned.clone()
    weight.view(-1)[pruned] = torch.nan
    weight.requires_grad_()
    out = effective_weight(weight, theta, mask)
    assert not out.isnan().any()
    mask.update(torch.ones(5, 4))
    out.sum().backward()
    assert weight.grad.view(-1)[pruned].eq(0).all() and weight.grad.sum() == 20 - pruned.numel()


def test_parts_that_do_not_fit():
    weight, theta, mask = _case((5, 4))
    before = weight.clone()
    for call in (effective_weight, load_theta_):
        for bad in ((weight, theta[1:], mask), (weight.T, theta, mask), (weight.to("meta"), theta, mask)):
            with pytest.raises(MaskError):
                call(*bad)
    with pytest.raises(MaskError, match="float64"):
        effective_weight(weight, theta.double(), mask)
    assert torch.equal(weight, before)
