"""A convolution and its neurons in one launch, held against the two launches that it replaces, bit for bit."""

import pytest
import torch
from kernel_devices import KERNEL_DEVICES

import sparsecomp.ops  # noqa: F401  (registers the operators)
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


def assert_same(fused, apart):
    for ours, theirs in zip(fused, apart, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
        of_several = [dim for dim, size in enumerate(ours.shape) if size > 1 and ours.numel()]
        assert [ours.stride(dim) for dim in of_several] == [theirs.stride(dim) for dim in of_several]


PLANE = ([1, 1], [1, 1], [1, 1])


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize(
    ("charge", "decay", "reset", "norm", "steps"),
    [
        ("lif", True, 0.0, "affine", 4), ("if", False, 0.25, "none", 3), ("plif", True, None, "plain", 2),
        ("lif", False, None, "none", 1), ("plif", False, 0.0, "affine", 5), ("if", True, None, "affine", 8),
        ("lif", True, 0.25, "plain", 16), ("lif", False, 0.25, "affine", 4), ("plif", True, 0.25, "none", 4),
        ("if", False, 0.0, "plain", 1), ("lif", True, None, "affine", 6),
    ],
)  # fmt: skip
def test_bits_equal_the_two_launches(device, charge, decay, reset, norm, steps):
    x, weight, bias = sample((2 * steps, 64, 5, 3), (72, 64, 3, 3), device)
    norms = None if norm == "none" else statistics(72, device, norm == "affine")
    neuron = neuron_arguments(charge, decay, reset, norm=norms, device=device)
    fused, apart = both(x, weight, None if norm == "affine" else bias, PLANE, 1, 3, True, steps, neuron)
    assert 0.02 < fused[0].float().mean() < 0.98
    assert_same(fused, apart)


LAYERS = {
    "contiguous": ((8, 32, 5, 4), (40, 32, 3, 3), PLANE, 1, 3, False),
    "strided": ((8, 32, 9, 7), (33, 32, 3, 2), ([2, 1], [1, 0], [1, 2]), 1, 2, True),
    "four digits": ((4, 64, 4, 4), (32, 64, 3, 3), PLANE, 1, 4, True),
    "groups": ((8, 64, 5, 3), (96, 32, 3, 3), PLANE, 2, 3, True),
    "odd channels": ((8, 19, 5, 3), (21, 19, 3, 3), PLANE, 1, 3, True),
    "one output channel": ((8, 32, 4, 3), (1, 32, 3, 3), PLANE, 1, 3, True),
    "linear": ((36, 40, 1, 1), (70, 40), ([1, 1], [0, 0], [1, 1]), 1, 3, True),
    "signals": ((8, 32, 9), (40, 32, 3), ([2], [1], [1]), 1, 3, True),
    "volumes": ((8, 16, 3, 4, 3), (24, 16, 3, 1, 2), ([1, 2, 1], [1, 0, 1], [1, 1, 1]), 1, 3, True),
    "no outputs": ((8, 32, 2, 2), (8, 32, 3, 3), ([1, 1], [0, 0], [1, 1]), 1, 3, True),
    "no images": ((0, 32, 5, 5), (8, 32, 3, 3), PLANE, 1, 3, True),
}


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_every_kind(name, device):
    shape, kernel, window, groups, digits, channels_last = LAYERS[name]
    x, weight, bias = sample(shape, kernel, device, high=3)
    neuron = neuron_arguments("lif", norm=statistics(kernel[0], device), device=device)
    fused, apart = both(x, weight, bias, window, groups, digits, channels_last, 4, neuron)
    assert_same(fused, apart)


@pytest.mark.parametrize("device", KERNEL_DEVICES)
def test_membranes_scales_and_weights_that_lose_their_digits(device):
    """One channel of the weight has an outlier, one is not finite: both are multiplied with their floats."""
    x, weight, bias = sample((8, 32, 6, 5), (40, 32, 3, 3), device)
    weight[3, 1, 1, 1] *= 1e5
    weight[7, 2, 0, 1] = torch.nan
    start = torch.linspace(-2, 0.6, 2 * 40 * 30, device=device).view(2, 40, 6, 5)
    neuron = neuron_arguments("lif", v=start.contiguous(memory_format=torch.channels_last), device=device)
    fused, apart = both(x, weight, bias, PLANE, 1, 3, True, 4, neuron, scale=0.25)
    torch.testing.assert_close(fused, apart, rtol=0, atol=0, equal_nan=True)
    assert fused[1][:, 7].isnan().any() and not fused[1][:, :7].isnan().any()
    without, _ = both(x, weight, bias, PLANE, 1, 3, True, 4, neuron, scale=0.25, keep=False)
    assert torch.equal(without[0], fused[0]) and without[1].shape == (0,)
