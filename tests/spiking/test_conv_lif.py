"""A convolution and its neurons in one launch, held against the two launches that it replaces, bit for bit."""

import pytest
import torch
from kernel_devices import KERNEL_DEVICES

import sparsecomp.ops as ops
from sparsecomp.reference.digits import SPREAD

pytestmark = pytest.mark.quick_cases(2)


def neuron_arguments(charge="lif", decay=True, reset=0.0, v=None, norm=None, threshold=0.7, device="cpu"):
    rate = torch.tensor(0.37, device=device) if charge == "plif" else None
    return (v, 0.1, *(norm or (None,) * 4), 1e-5, charge, 1.7, rate, decay, threshold, reset)


def statistics(channels, device, affine=True):
    random = torch.Generator().manual_seed(1)
    mean, gamma, beta = (torch.randn(channels, generator=random).to(device) for _ in range(3))
    var = (torch.rand(channels, generator=random) + 0.5).to(device)
    return (mean, var, gamma, beta) if affine else (mean, var, None, None)


def both(x, weight, bias, window, groups, digits, channels_last, steps, neuron, scale=1.0, keep=True):
    """Spikes and last membranes of one launch, and of the two launches."""
    from sparsecomp.lowering.spiking import conv_lif, lif, spike_conv
    from sparsecomp.lowering.spiking.packing import to_bytes

    counts = to_bytes(x)
    how = (*window, groups, digits)
    fused = conv_lif.launch_conv_lif(
        counts, weight, bias, *how, scale, SPREAD, channels_last, steps, *neuron, keep
    )  # fmt: skip
    current = spike_conv.launch_counts(counts, weight, bias, *how, "binary", scale, None, SPREAD, channels_last)
    apart = lif.launch_lif(current.unflatten(0, (steps, -1)), *neuron)
    return fused, apart


def sample(shape, kernel, device, seed=0, high=1):
    random = torch.Generator().manual_seed(seed)
    x = (torch.rand(shape, generator=random) < 0.3) * torch.randint(1, high + 1, shape, generator=random)
    weight = torch.randn(kernel, generator=random) / 4
    return x.to(device, torch.int8), weight.to(device), torch.randn(kernel[0], generator=random).to(device) / 8


PLANE = ([1, 1], [1, 1], [1, 1])


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("charge", ["if", "lif", "plif"])
@pytest.mark.parametrize(("decay", "reset"), [(True, 0.0), (False, 0.25), (True, None), (False, None)])
@pytest.mark.parametrize("norm", ["none", "plain", "affine"])
@pytest.mark.parametrize("steps", [1, 3, 4])
def test_bits_equal_the_two_launches(device, charge, decay, reset, norm, steps):
    x, weight, bias = sample((2 * steps, 32, 5, 3), (40, 32, 3, 3), device)
    norms = None if norm == "none" else statistics(40, device, norm == "affine")
    neuron = neuron_arguments(charge, decay, reset, norm=norms, device=device)
    fused, apart = both(x, weight, None if norm == "affine" else bias, PLANE, 1, 3, True, steps, neuron)
    assert 0.02 < fused[0].float().mean() < 0.98
    torch.testing.assert_close(fused, apart, rtol=0, atol=0, check_stride=True)
