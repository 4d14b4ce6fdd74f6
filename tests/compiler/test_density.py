"""How sparse a layer's input is, counted by hand."""

import pytest
import torch
from torch import fx, nn

from sparsecomp.compiler.density import DensityRecorder


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


@pytest.mark.parametrize(
    ("conv", "shape", "active"),
    [
        (nn.Conv2d(2, 3, 3, padding="same"), (1, 2, 6, 6), None),
        (nn.Conv2d(2, 3, 3), (2, 6, 6), None),
        (nn.Conv1d(2, 3, 3), (1, 2, 6), None),
        (nn.Conv2d(2, 3, 3, stride=2), (4, 2, 7, 5), 1.0),
        (nn.Conv2d(2, 4, 3, groups=2), (4, 2, 3, 3), 1.0),
    ],
)
def test_pixels_are_counted_for_batches_of_images(conv, shape, active):
    recorder = DensityRecorder(fx.symbolic_trace(nn.Sequential(conv)))
    recorder.run(torch.ones(shape))
    (density,) = recorder.densities.values()
    assert (density.share, density.active) == (1.0, active)


def test_of_nothing_nothing_is_measured():
    recorder = DensityRecorder(fx.symbolic_trace(nn.Sequential(nn.Conv2d(2, 3, 3))))
    assert recorder.run(torch.ones(0, 2, 6, 6)).shape == (0, 3, 4, 4) and recorder.densities == {}
