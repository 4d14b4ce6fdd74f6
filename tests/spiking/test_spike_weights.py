"""Weights and factors of any value: every implementation gives what the dense operator gives in float64."""

import pytest
import torch
import torch.nn.functional as F
from kernel_devices import KERNEL_DEVICES
from spike_conv_cases import normal, run, spikes

from sparsecomp.lowering.launch import dispatch
from sparsecomp.lowering.spiking.convolution import Selection
from sparsecomp.lowering.spiking.packing import to_bytes
from sparsecomp.reference.digits import (
    SPREAD,
    channel_scale,
    digit_bits,
    join_weight,
    largest_mantissa,
    multiplied_weight,
    padded_channels,
    split_weight,
)

pytestmark = pytest.mark.quick_cases(1)

STRATEGIES = ["binary", "direct", "event", "skip"]


def error(found, expected):
    """Largest relative error of an output channel; what is not finite has to be the same."""
    found, expected = found.cpu().double(), expected.cpu()
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.isinf(), expected.isinf())
    difference = torch.where(expected.isfinite(), found - expected, 0.0).flatten(2).norm(dim=2)
    size = torch.where(expected.isfinite(), expected, 0.0).flatten(2).norm(dim=2)
    return (difference / size.clamp_min(1e-44)).max().item()


def outlier(value: float):
    """One great weight a channel, whose input never fires."""
    weight = normal((20, 16, 3, 3))
    weight[:, 0, 0, 0] = value
    return weight


def scaled(value: float):
    return normal((20, 16, 3, 3)) * value


def one(value: float):
    weight = normal((20, 16, 3, 3))
    weight[3, 5, 1, 1] = value
    return weight


def halves():
    weight = normal((20, 16, 3, 3))
    weight[:, ::2] *= 1e-6
    return weight


WEIGHTS = {
    **{f"outlier {value:.0e}": outlier(value) for value in (1e2, 1e3, 1e5, 1e7, 1e30)},
    "subnormal": scaled(1e-41), "nearly subnormal": scaled(1e-36), "great": scaled(1e37), "halves": halves(),
    "zero": torch.zeros(20, 16, 3, 3), "nan": one(float("nan")), "inf": one(float("inf")), "-inf": one(float("-inf")),
}  # fmt: skip


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("implementation", STRATEGIES)
@pytest.mark.parametrize("weight", WEIGHTS.values(), ids=WEIGHTS)
def test_weights_of_any_range(device, implementation, weight):
    x = spikes((2, 16, 7, 6), 0.04 if implementation == "event" else 0.3)
    x[:, 0], x[1, 5] = 0, 1
    x[0, :, :4] = 0
    bias = normal((20,), seed=2) * weight.nan_to_num(0, 0, 0).abs().amax().clamp(max=1)
    expected = F.conv2d(x.double(), weight.double(), bias.double(), padding=1)
    out = run(x.to(device), weight.to(device), bias.to(device), implementation)
    # sums of subnormal numbers are off by half a unit in the last place
    assert error(out, expected) < (1e-2 if weight.nan_to_num().abs().amax() < 1e-38 else 1.5e-6)


FACTORS = [0.0, -0.3, 1e-20, 1e30, float("inf"), float("-inf"), float("nan")]


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("implementation", STRATEGIES)
@pytest.mark.parametrize("layout", ["nchw", "bytes"])
@pytest.mark.parametrize("value", FACTORS)
def test_factors_of_any_value(device, implementation, layout, value):
    fired = spikes((3, 16, 5, 6), 0.02 if implementation == "event" else 0.3)
    fired[0], factor, weight = 1, torch.tensor([value]), normal((20, 16, 3, 3))
    weight[0] = weight[0].abs()
    x = fired * factor
    x[2] = 0  # no factor has touched these
    expected = F.conv2d(x.double(), weight.double(), padding=1)
    if layout == "bytes":
        x = ((x.abs() > 0).to(torch.int8) - x.isnan().to(torch.int8)).contiguous(memory_format=torch.channels_last)
    promise = {"factor": factor.to(device), "binary": True}
    out = run(x.to(device), weight.to(device), None, implementation, **promise)
    assert error(out, expected) < 1.5e-6


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("implementation", STRATEGIES)
@pytest.mark.parametrize(("scale", "binary"), [(0.25, False), (2.0**-10, False), (1 / 3, True), (-1.5, True)])
def test_scales(device, implementation, scale, binary):
    counts = spikes((2, 16, 5, 6), 0.1, high=1 if binary else 100)
    weight, bias = normal((20, 16, 3, 3)), normal((20,), seed=2)
    scale = torch.tensor(scale).item()
    expected = F.conv2d(counts.double() * scale, weight.double(), bias.double(), padding=1)
    x = (counts * scale).to(device)
    out = run(x, weight.to(device), bias.to(device), implementation, scale=scale, binary=binary)
    assert error(out, expected) < 1.5e-6


@pytest.mark.parametrize("device", KERNEL_DEVICES)
def test_half_precision_is_rounded_once_whatever_the_scale(device):
    """Sums of counts beyond the range of a half, and weights that a half could not hold after the scale."""
    x, scale = torch.full((2, 64, 4, 4), 100.0) / 128, 1 / 128
    for weight in (normal((16, 64, 3, 3)).abs() * 30, normal((16, 64, 3, 3)) * 1e-5):
        expected = F.conv2d(x.double(), weight.half().double(), padding=1)
        out = run(x.half().to(device), weight.half().to(device), None, "binary", digits=2, scale=scale)
        assert error(out, expected) < 2.0**-11


@pytest.mark.parametrize("digits", [2, 3, 4])
def test_a_channel_is_marked_where_most_weights_are_too_small_next_to_its_largest(digits):
    """By the definition: the lower median of the non-zero magnitudes, from a sort."""
    generator = torch.Generator().manual_seed(digits)
    w = torch.randn(300, 24, generator=generator)
    w *= 10 ** (3 * torch.randn(300, 24, generator=generator) * torch.linspace(0, 1, 300)[:, None])
    w[:, ::3] = 0
    w[7] = 0
    w[8, 1], w[9, 1] = float("nan"), float("inf")
    scale = channel_scale(w.abs(), digits, SPREAD)
    for row, found in zip(w.abs(), scale, strict=True):
        used = row[row != 0].sort().values
        if not torch.isfinite(row).all():
            assert found.isnan()
        elif used.numel() == 0:
            assert found > 0
        else:
            assert (found > 0) == (used[(len(used) - 1) // 2] * SPREAD >= used[-1])


@pytest.mark.parametrize("digits", [2, 3, 4])
def test_no_digit_is_lost_in_silence(digits):
    """The weight that is multiplied with is within the stated error of the weight, in medians of its channel."""
    generator = torch.Generator().manual_seed(0)
    spread = torch.linspace(0, 2, 200)[:, None, None, None]
    w = torch.randn(200, 40, 1, 1, generator=generator)
    w = w * 10 ** (spread * torch.randn(200, 40, 1, 1, generator=generator))
    off = (multiplied_weight(w, digits, SPREAD) - w.double()).abs().flatten(1).amax(1)
    assert (off <= w.double().abs().flatten(1).median(1).values * SPREAD * 2.0 ** (1 - 8 * digits)).all()
    planes, scale = split_weight(w, digits)
    assert (scale < 0).any() and (scale > 0).any()
    kept = join_weight(planes, scale, (1, 1), 40)[scale > 0]
    assert torch.equal(kept, multiplied_weight(w, digits, SPREAD)[scale > 0])


@pytest.mark.quick_cases(12)
@pytest.mark.parametrize(
    ("weights", "digits", "exponent", "sign"),
    [
        # 1 is 2^14 of 2^15 steps; what is above 127 · 257 of them needs steps of twice the size
        ([1.0], 2, -14, 1), ([32639 / 32768], 2, -15, 1), ([32640 / 32768], 2, -14, 1), ([1.0], 3, -22, 1),
        ([0.0, 0.0], 2, -15, 1), ([], 2, -15, 1), ([2.0**-111], 2, -125, 1), ([2.0**-113], 2, -126, -1),
        # lost where half of those that are not zero are below a twentieth of the greatest
        ([1.0, 0.051, 0.051, 0.0], 2, -14, 1), ([1.0, 0.049, 0.049, 0.0], 2, -14, -1), ([1.0, 0.049], 2, -14, -1),
        ([1.0, 1.0, 0.049], 2, -14, 1),
    ],
)  # fmt: skip
def test_the_scale_of_a_channel_by_hand(weights, digits, exponent, sign):
    magnitudes = torch.tensor([weights, weights])
    assert channel_scale(magnitudes, digits, 20.0).tolist() == [sign * 2.0**exponent] * 2


def test_a_channel_that_is_not_finite_has_no_scale():
    magnitudes = torch.tensor([[1.0, torch.inf], [torch.nan, 1.0], [1.0, 2.0]])
    assert channel_scale(magnitudes, 3, 20.0).isnan().tolist() == [True, True, False]


def test_channels_are_padded_to_whole_steps():
    assert [padded_channels(count) for count in (1, 32, 33, 64, 65, 96, 129)] == [32, 32, 64, 64, 128, 128, 192]
    assert [largest_mantissa(digits) * 2 ** digit_bits(digits) for digits in (2, 3)] == [0x7F7F, 0x7F7F7F]


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("selected", [None, (5, 0), (5, 7)])
def test_bytes_are_made_where_the_device_asks_for_them(selected, monkeypatch):
    """A launch that is told of a count does nothing unless that passes the limit."""
    launched = []
    monkeypatch.setattr(dispatch, "launch", lambda operation, problem, *tensors: launched.append((problem, tensors)))
    x = torch.rand(2, 8, 3, 3).contiguous(memory_format=torch.channels_last)
    count = None if selected is None else torch.tensor([selected[0]], dtype=torch.int32)
    out = to_bytes(x, None if count is None else Selection(count, selected[1]), scale=0.5)
    ((problem, tensors),) = launched
    assert tensors[-1] is count and (problem.limit, problem.inverse) == (0 if selected is None else selected[1], 2.0)
    assert out.dtype is torch.int8 and out.shape == x.shape
