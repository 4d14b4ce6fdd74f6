"""How sparse a layer's input is, counted by hand."""

import pytest
import torch
from torch import fx, nn

from sparsecomp.density import DensityRecorder


@pytest.mark.parametrize(
    ("conv", "share_active"),
    [
        (nn.Conv2d(2, 3, 3, padding=1), 9 / 36),
        (nn.Conv2d(2, 3, 1), 1 / 36),
        (nn.Conv2d(2, 3, 2, stride=2), 1 / 9),
        (nn.Conv2d(2, 3, 3, padding=2, dilation=2), 9 / 36),
    ],
)
def test_one_spike_in_the_middle(conv, share_active):
    x = torch.zeros(1, 2, 6, 6)
    x[0, 1, 2, 2] = 1
    recorder = DensityRecorder(fx.symbolic_trace(nn.Sequential(conv)))
    recorder.run(x)
    (density,) = recorder.densities.values()
    assert density.share == 1 / 72
    assert density.active == pytest.approx(share_active)


def test_a_linear_layer_has_no_pixels():
    recorder = DensityRecorder(fx.symbolic_trace(nn.Sequential(nn.Linear(4, 2))))
    recorder.run(torch.tensor([[0.0, 1.0, 0.0, -1.0]]))
    (density,) = recorder.densities.values()
    assert (density.share, density.active) == (0.5, None)
