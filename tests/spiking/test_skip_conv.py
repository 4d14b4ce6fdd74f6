"""The convolution on non-idle pixels against float64, through the interpreter and on the GPU."""

import pytest
import torch
import torch.nn.functional as F
from kernel_devices import KERNEL_DEVICES
from spike_conv_cases import CASES, check, normal, sixteenths, spikes

from sparsecomp.lowering.spiking import skip_conv, spike_conv
from sparsecomp.lowering.spiking.convolution import Convolution
from sparsecomp.reference.geometry import Window

pytestmark = [pytest.mark.parametrize("device", KERNEL_DEVICES), pytest.mark.quick_cases(2)]


def block_spikes(shape, empty, density=0.2, block=4, high=1):
    """Spikes of `density` in a share of square blocks of pixels, none in the others (`empty` of all)."""
    n, _, h, w = shape
    quiet = torch.rand((n, 1, h, w), generator=torch.Generator().manual_seed(5))[:, :, ::block, ::block] < empty
    mask = F.interpolate((~quiet).float(), scale_factor=block)[:, :, :h, :w]
    return spikes(shape, density, high) * mask


@pytest.mark.parametrize("empty", [0.5, 0.9])
@pytest.mark.parametrize("layout", ["nchw", "channels_last"])
@pytest.mark.parametrize(("shape", "kernel", "window"), CASES)
def test_matches_float64(device, empty, layout, shape, kernel, window):
    x = block_spikes(shape, empty)
    x = x.contiguous(memory_format=torch.channels_last) if layout == "channels_last" else x
    check(device, "skip", x, normal(kernel), normal(kernel[:1], seed=2), **window)


@pytest.mark.parametrize("density", [0.0, 1.0])
def test_all_idle_and_none_idle(device, density):
    check(device, "skip", spikes((2, 16, 9, 7), density), normal((16, 16, 3, 3)), normal((16,), seed=2))


def test_one_corner_spike(device):
    x = torch.zeros(1, 16, 7, 7)
    x[0, 15, 6, 6] = 1
    check(device, "skip", x, normal((16, 16, 3, 3)), None)


@pytest.mark.parametrize("layout", ["nchw", "channels_last", "sliced"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_bit_exact_for_signed_counts(device, layout, dtype):
    x = block_spikes((1, 70, 16, 9), 0.6, high=127).to(dtype)
    if layout == "channels_last":
        x = x.contiguous(memory_format=torch.channels_last)
    if layout == "sliced":
        x = x[:, ::2, 1::2]
    check(device, "skip", x, sixteenths((40, x.shape[1], 3, 3)), None, rtol=0)


def test_half_precision_rounds_once(device):
    x = block_spikes((1, 64, 8, 8), 0.5).half()
    check(device, "skip", x, normal((32, 64, 3, 3)).half(), None, rtol=2.0**-11, digits=2)


def test_no_images(device):
    assert check(device, "skip", torch.zeros(0, 16, 5, 5), normal((8, 16, 3, 3)), None).shape == (0, 8, 5, 5)


def test_a_bad_weight_spoils_its_channel_in_idle_pixels(device):
    weight = normal((3, 16, 1, 1)).to(device)
    weight[1, 2] = float("inf")
    args = ((1, 1), (0, 0), (1, 1), 1, 3, "skip")
    out = spike_conv.launch_conv(torch.zeros(1, 16, 4, 4, device=device), weight, None, *args)
    assert torch.isnan(out[:, 1]).all() and not out[:, [0, 2]].any()


def test_linear_skips_idle_rows(device):
    x, weight, bias = spikes((6, 50, 65), 0.2), normal((20, 65)), normal((20,), seed=2)
    x[::2] = 0
    out = spike_conv.launch_linear(x.to(device), weight.to(device), bias.to(device), 3, "skip")
    expected = F.linear(x.double(), weight.double(), bias.double())
    assert (out.cpu().double() - expected).norm() / expected.norm() < 1e-6


@pytest.mark.parametrize("window", [Window((3, 3), (1, 1), (1, 1), (1, 1)), Window((5, 3), (2, 1), (2, 0), (1, 2))])
def test_lists_exactly_the_pixels_whose_window_is_not_idle(device, window):
    x = block_spikes((3, 20, 12, 11), 0.8)
    out = torch.empty(3, 8, *window.output_size((12, 11)), device=device)
    conv = Convolution.of(x.shape, (8, 20), window, channels_last=False, has_bias=True)
    scale, bias = torch.ones(8, device=device), normal((8,)).to(device)
    x8, select = skip_conv.list_rows(x.to(device), scale, bias, conv, out)
    assert torch.equal(x8.cpu(), x.to(torch.int8))
    active = x.any(1, keepdim=True).float()
    seen = F.conv2d(active, torch.ones(1, 1, *window.kernel), None, *window[1:])[:, 0] > 0
    rows = select.rows[: select.count.item()].cpu().sort().values
    assert torch.equal(rows.long(), seen.reshape(-1).nonzero()[:, 0])
    idle = out.permute(0, 2, 3, 1)[~seen.to(device)]
    assert torch.equal(idle, bias.expand_as(idle))
