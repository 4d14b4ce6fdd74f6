"""The event-driven convolution against float64, through the interpreter and on the GPU."""

import pytest
import torch
import torch.nn.functional as F
from kernel_devices import KERNEL_DEVICES
from spike_conv_cases import CASES, check, normal, sixteenths, spikes

from sparsecomp.lowering.spiking import event_conv, spike_conv
from sparsecomp.lowering.spiking.convolution import Convolution
from sparsecomp.reference.geometry import Window

pytestmark = [pytest.mark.parametrize("device", KERNEL_DEVICES), pytest.mark.quick_cases(1)]

SQUARE = Window((3, 3), (1, 1), (1, 1), (1, 1))


def channels_last(x):
    return x.contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(("layout", "density"), [("nchw", 0.05), ("channels_last", 0.01)])
@pytest.mark.parametrize(("shape", "kernel", "window"), CASES)
def test_matches_float64(device, layout, density, shape, kernel, window):
    x = spikes(shape, density)
    x = channels_last(x) if layout == "channels_last" else x
    check(device, "event", x, normal(kernel), normal(kernel[:1], seed=2), **window)


@pytest.mark.parametrize("density", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("layout", ["nchw", "channels_last"])
def test_any_density_and_more_events_than_the_list_holds(device, density, layout):
    x = spikes((1, 16, 7, 7), density)
    x = channels_last(x) if layout == "channels_last" else x
    check(device, "event", x, normal((16, 16, 3, 3)), normal((16,), seed=2))


def test_one_corner_spike(device):
    x = torch.zeros(1, 16, 7, 7)
    x[0, 15, 6, 6] = 1
    check(device, "event", x, normal((16, 16, 3, 3)), None, rtol=1e-7)


@pytest.mark.parametrize("density", [0.03, 0.5])
@pytest.mark.parametrize(
    ("layout", "dtype"),
    [("nchw", torch.float32), ("channels_last", torch.float32), ("channels_last", torch.int8), ("sliced", torch.int8)],
)
def test_bit_exact_for_signed_counts(device, density, layout, dtype):
    x = spikes((1, 70, 6, 7), density, high=127).to(dtype)
    if layout == "channels_last":
        x = channels_last(x)
    if layout == "sliced":
        x = x[:, ::2, 1::2]
    check(device, "event", x, sixteenths((10, x.shape[1], 3, 3)), None, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_rounds_once(device, dtype):
    if device == "cpu" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter computes bf16 stores wrong")
    x = channels_last(spikes((1, 64, 6, 6), 0.05)).to(dtype)
    rtol = 2.0 ** (-11 if dtype == torch.float16 else -8)
    check(device, "event", x, normal((32, 64, 3, 3)).to(dtype), None, rtol=rtol)


def test_no_images(device):
    out = check(device, "event", torch.zeros(0, 16, 5, 5), normal((8, 16, 3, 3)), None)
    assert out.shape == (0, 8, 5, 5)


@pytest.mark.parametrize("density", [0.02, 0.5])
def test_linear(device, density):
    x, weight, bias = spikes((3, 5, 65), density), normal((20, 65)), normal((20,), seed=2)
    out = spike_conv.launch_linear(x.to(device), weight.to(device), bias.to(device), 3, "event")
    expected = F.linear(x.double(), weight.double(), bias.double())
    assert (out.cpu().double() - expected).norm() / expected.norm() < 1e-6


@pytest.mark.parametrize(("channels", "width"), [(3, 9), (16, 13), (33, 6), (64, 7)])
def test_prescan_lists_every_event_of_a_pixel_in_order(device, channels, width):
    x = channels_last(spikes((2, channels, 6, width), 0.03, high=127))
    events = event_conv.find_events(x.to(device))
    starts, codes = events.starts.cpu(), events.codes.cpu()
    flat = x.permute(0, 2, 3, 1).reshape(-1, width * channels)
    assert events.total.item() == flat.count_nonzero() <= events.capacity
    for row, line in enumerate(flat):
        found = codes[starts[row, 0] : starts[row, width]]
        where = found & 0xFFFF
        assert torch.equal(where.long(), line.nonzero()[:, 0])
        assert torch.equal((found & ~0xFFFF).view(torch.float32), line[where.long()])
        pixels = torch.searchsorted(where.long(), torch.arange(width + 1) * channels)
        assert torch.equal(pixels, (starts[row] - starts[row, 0]).long())


def test_result_repeats_bit_for_bit(device):
    x, weight = channels_last(spikes((2, 64, 4, 4), 0.05)).to(device), normal((20, 64, 3, 3)).to(device)
    args = ((1, 1), (1, 1), (1, 1), 1, 3, "event")
    first = spike_conv.launch_conv(x, weight, None, *args)
    assert all(torch.equal(first, spike_conv.launch_conv(x, weight, None, *args)) for _ in range(2))


def test_nothing_is_written_when_the_list_overflows(device):
    x, weight = channels_last(torch.ones(1, 16, 5, 5)).to(device), normal((16, 16, 3, 3)).to(device)
    out = torch.full((1, 16, 5, 5), 7.0, device=device)
    conv = Convolution.of(x.shape, weight.shape, SQUARE, channels_last=False)
    select = event_conv.event_conv(x, weight, torch.ones(16, device=device), None, None, conv, out)
    assert select.count.item() == 400 > select.limit
    assert (out == 7).all()


@pytest.mark.parametrize("implementation", ["event", "skip", "binary"])
def test_a_write_that_bumps_no_version_counter_is_seen(device, implementation):
    x, layer = channels_last(spikes((1, 16, 5, 5), 0.02)).to(device), torch.nn.Conv2d(16, 16, 3, bias=False).to(device)
    with torch.no_grad():
        layer.weight.copy_(normal((16, 16, 3, 3)))
    args = ((1, 1), (1, 1), (1, 1), 1, 3, implementation)
    before, version = spike_conv.launch_conv(x, layer.weight, None, *args), layer.weight._version
    layer.weight.data.mul_(2)
    assert layer.weight._version == version
    assert torch.equal(spike_conv.launch_conv(x, layer.weight, None, *args), before * 2)


WIDE = Window((1, 1), (1, 1), (0, 0), (1, 1))


@pytest.mark.parametrize(
    ("shape", "window", "groups", "served"),
    [
        ((1, 64, 1, 512), SQUARE, 1, True),
        ((1, 32, 1, 1024), SQUARE, 1, True),
        ((1, 1, 1, 2**16 + 1), SQUARE, 1, False),  # an event has 16 bits for its place
        ((1, 1, 1, 1025), SQUARE, 1, False),  # words of one image row
        ((1, 4, 4, 4), SQUARE, 2, False),
        ((2**21, 32, 4, 7), WIDE, 1, True),
        ((2**21, 32, 4, 8), WIDE, 1, False),  # 2^31 elements pass the offsets of 32 bits
        ((1, 4, 9, 9), Window((3, 3), (1, 1), (1, 1), (2, 2)), 1, True),
        ((1, 4, 9, 9), Window((4, 3), (1, 1), (1, 1), (2, 2)), 1, False),  # 12 stretches
    ],
)
def test_what_the_event_kernels_can_hold(device, shape, window, groups, served):
    assert event_conv.serves(torch.empty(shape, device="meta"), window, groups) == served


def test_rows_too_long_for_the_event_code_take_the_binary_path(device, monkeypatch):
    taken = []
    monkeypatch.setattr(spike_conv, "event_conv", lambda *operands: taken.append(operands))
    x = spikes((1, 1, 1, 1030), 0.01)
    check(device, "event", x, normal((16, 1, 1, 3)), None, padding=(0, 1))
    assert not taken
