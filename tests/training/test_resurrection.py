"""Theta apart from its weight: its gradient, and its selective step against the closed form of the consistency."""

import pytest
import torch

from sparsecomp.errors import MaskError
from sparsecomp.runtime import MaskedWeight, ResurrectionEmbedding, RESUUpdater


def test_noise_is_left_alone_and_drift_moves_after_the_warm_up():
    generator = torch.Generator().manual_seed(0)
    theta = torch.zeros(20000)
    updater = RESUUpdater(theta, lr=0.1)
    for step in range(60):
        gradient = torch.randn(20000, generator=generator)
        gradient[:10] = 2.0
        updater.step(gradient)
        if step < 10:
            assert theta.eq(0).all(), "C is not meaningful yet"
    # |m| / v of normal noise: sqrt((1 - beta) / (1 + beta)) = 0.229
    assert updater.consistency()[10:].mean().item() == pytest.approx(0.229, abs=0.01)
    assert updater.consistency().max() <= 1
    torch.testing.assert_close(theta[:10], torch.full((10,), -0.2 * 50))


def test_unselected_elements_keep_their_bits():
    theta = torch.full((4,), 3.0)
    updater = RESUUpdater(theta, lr=0.1)
    for step in range(40):
        updater.step(torch.tensor([1.0, 0.0, (-1.0) ** step, 1.0]))
    assert theta[1:3].tolist() == [3.0, 3.0] and theta[0] < 3


def test_bad_settings():
    with pytest.raises(MaskError):
        RESUUpdater(torch.zeros(3), lr=0.1, beta=1.0)
    with pytest.raises(MaskError):
        RESUUpdater(torch.zeros(3), lr=0.1).step(torch.zeros(4))


def case(shape=(5, 4), density=0.3):
    """A weight, and what is known of it with a random mask."""
    random = torch.Generator().manual_seed(1)
    weight, masked = torch.randn(shape, generator=random), MaskedWeight(torch.empty(shape))
    masked.mask.update(torch.rand(shape, generator=random) < density)
    return weight, masked


@pytest.mark.parametrize("shape", [(8, 6), (4, 3, 3, 3), (7,), (0,), (0, 4)])
@pytest.mark.parametrize("density", [0.0, 0.3, 1.1])
def test_in_the_weights_memory_theta_gives_the_same_bits(shape, density):
    weight, masked = case(shape, density)
    m = masked.mask.mask.float()
    masked.prune_(shared := weight.clone(), masked.mask.mask)
    embedding = ResurrectionEmbedding.of(weight, masked.mask)
    apart = embedding(weight * 2).detach()
    assert torch.equal(apart, m * (weight * 2) + (1 - m) * weight)
    shared.copy_(m * (weight * 2))
    masked.enter_resu_(shared, embedding.theta)
    assert torch.equal(shared, apart) and torch.equal(masked.theta(shared), embedding.theta)


def test_a_theta_that_does_not_fit_changes_nothing():
    weight, masked = case()
    masked.prune_(weight, masked.mask.mask)
    before, theta = weight.clone(), ResurrectionEmbedding(masked.mask).theta
    for bad in (theta[1:], theta[:, None], theta.to("meta")):
        with pytest.raises(MaskError):
            masked.enter_resu_(weight, bad)
    assert torch.equal(weight, before) and masked.mode == 1
    for bad in (weight.T, weight.double(), weight.to("meta")):
        with pytest.raises(MaskError, match="the weight"):
            ResurrectionEmbedding(masked.mask)(bad)


def test_theta_moves_although_the_weight_is_frozen():
    weight, masked = case()
    embedding = ResurrectionEmbedding.of(weight, masked.mask)
    before = embedding.theta.detach().clone()
    embedding(weight).sum().backward()
    torch.optim.SGD(embedding.parameters(), lr=0.1).step()
    assert weight.grad is None
    torch.testing.assert_close(embedding.theta.detach(), before - 0.1)


def test_nan_in_a_pruned_element_reaches_nothing():
    weight, masked = case()
    embedding = ResurrectionEmbedding(masked.mask)
    weight[~masked.mask.mask] = torch.nan
    out = embedding(weight.requires_grad_())
    assert not out.isnan().any()
    out.sum().backward()
    assert torch.equal(weight.grad, masked.mask.mask.float())
    out = embedding(weight)
    masked.mask.update(torch.ones(5, 4))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
