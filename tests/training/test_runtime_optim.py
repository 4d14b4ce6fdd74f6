"""The selective step on theta against the closed form of its consistency."""

import pytest
import torch

from sparsecomp.errors import MaskError
from sparsecomp.training.resu.optim import RESUUpdater


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
