"""Cases and checks that the event-driven and the skipping convolution share."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sparsecomp.lowering.spiking import spike_conv

CASES = [
    pytest.param((2, 64, 7, 7), (20, 64, 3, 3), {}, id="3x3"),
    pytest.param((1, 16, 13, 9), (17, 16, 3, 3), {"stride": (2, 2)}, id="stride"),
    pytest.param((1, 17, 9, 5), (8, 17, 3, 3), {"dilation": (2, 2), "padding": (2, 2)}, id="dilation"),
    pytest.param((3, 48, 1, 1), (32, 48, 1, 1), {"padding": (0, 0)}, id="one pixel"),
    pytest.param((1, 3, 6, 6), (5, 3, 5, 5), {"padding": (2, 2)}, id="3 channels"),
    pytest.param((1, 33, 6, 10), (20, 33, 3, 2), {"padding": (0, 2), "stride": (1, 2)}, id="uneven"),
    pytest.param((1, 32, 6, 5), (32, 16, 3, 1), {"padding": (1, 0), "groups": 2}, id="groups"),
    pytest.param((1, 4, 1, 2), (260, 4, 3, 3), {"padding": (3, 2)}, id="window outside"),
]


def spikes(shape: tuple[int, ...], density: float, high: int = 1) -> Tensor:
    """Integers, `density` of them non-zero: ones, or ±1…±high where `high` > 1."""
    generator = torch.Generator().manual_seed(sum(shape))
    x = (torch.rand(shape, generator=generator) < density).float()
    if high > 1:
        x = x * torch.randint(1, high + 1, shape, generator=generator)
        x = x * (1 - 2 * torch.randint(0, 2, shape, generator=generator))
    return x


def normal(shape: tuple[int, ...], seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def sixteenths(shape: tuple[int, ...]) -> Tensor:
    return torch.randint(-16, 17, shape, generator=torch.Generator().manual_seed(0)) / 16


def run(
    x, weight, bias, implementation, stride=(1, 1), padding=(1, 1), dilation=(1, 1), groups=1, digits=3, **promise
):
    """The implementation, its output memory filled with NaN before."""
    empty = torch.empty

    def poisoned(*args, **kwargs):
        out = empty(*args, **kwargs)
        return out.fill_(float("nan")) if out.is_floating_point() else out.fill_(77)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", poisoned)
        window = (stride, padding, dilation, groups)
        return spike_conv.launch_conv(x, weight, bias, *window, digits, implementation, **promise)


def check(device, implementation, x, weight, bias, rtol=1e-6, digits=3, **window):
    """Compare with float64: relative error of the whole output, and eager's memory format."""
    x, weight = x.to(device), weight.to(device)
    bias = None if bias is None else bias.to(device)
    window = {"padding": (1, 1), **window}
    expected = F.conv2d(x.double(), weight.double(), None if bias is None else bias.double(), **window)
    out = run(x, weight, bias, implementation, digits=digits, **window)
    assert out.dtype == weight.dtype and out.shape == expected.shape
    if device == "cuda":
        eager = F.conv2d(x.to(weight.dtype), weight, bias, **window)
        for layout in (torch.contiguous_format, torch.channels_last):
            assert out.is_contiguous(memory_format=layout) == eager.is_contiguous(memory_format=layout)
    error = (out.double() - expected).norm() / expected.norm().clamp_min(1e-30)
    assert error <= rtol
    return out
