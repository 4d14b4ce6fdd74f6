"""Convolutions of signals, images and volumes are one path: geometry, packing, prescans, operators and references."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from kernel_devices import KERNEL_DEVICES

from sparsecomp import ops
from sparsecomp.lowering.cache.signature import Device
from sparsecomp.lowering.spiking.binary_conv import BINARY_CONV, binary_conv_problem
from sparsecomp.lowering.spiking.convolution import Convolution
from sparsecomp.lowering.spiking.event_conv import find_events
from sparsecomp.lowering.spiking.packing import pack_weight, to_bytes
from sparsecomp.lowering.spiking.skip_conv import scan_pixels
from sparsecomp.lowering.spiking.spike_conv import launch_conv
from sparsecomp.reference.digits import split_weight
from sparsecomp.reference.geometry import Window, is_channels_last, laid_out, lies_channels_last, output_size

pytestmark = pytest.mark.quick_cases(1)

SIZES = {1: (11,), 2: (5, 7), 3: (3, 5, 4)}
WINDOWS = {
    1: Window((3,), (2,), (1,), (2,)),
    2: Window((3, 2), (1, 2), (1, 0), (2, 1)),
    3: Window((2, 3, 1), (1, 2, 1), (1, 1, 0), (1, 1, 2)),
}
DENSE = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
DIMS = pytest.mark.parametrize("dims", (1, 2, 3))


def operands(dims: int, density: float = 0.1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(dims)
    x = (torch.rand(2, 16, *SIZES[dims], generator=random) < density).float()
    weight = torch.randn(24, 16, *WINDOWS[dims].kernel, generator=random)
    return x, weight, torch.randn(24, generator=random)


@DIMS
@pytest.mark.parametrize("channels_last", [False, True])
def test_a_convolution_knows_the_shape_and_the_strides_of_its_output(dims, channels_last):
    x, weight, bias = operands(dims)
    expected = DENSE[dims](x.double(), weight.double(), bias.double(), *WINDOWS[dims][1:])
    conv = Convolution.of(x.shape, weight.shape, WINDOWS[dims], channels_last=channels_last, has_bias=True)
    assert (conv.m, conv.k, conv.in_pixels, conv.taps) == (
        expected[:, 0].numel(), 24, x[:, 0].numel(), weight[0, 0].numel()
    )  # fmt: skip
    out = conv.poisoned_output(torch.device("cpu"))
    assert out.shape == expected.shape and out.isnan().all()
    assert lies_channels_last(out) if channels_last else out.is_contiguous()
    torch.testing.assert_close(conv.reference(x, weight, bias, None), expected)


@DIMS
def test_operators_take_every_number_of_dimensions_on_a_cpu(dims):
    x, weight, bias = operands(dims)
    window = [list(numbers) for numbers in WINDOWS[dims][1:]]
    out = ops.spike_conv(x, weight, bias, *window, 1, 3, "binary")
    torch.testing.assert_close(out, DENSE[dims](x, weight, bias, *window))
    for channels_last in (False, True):
        more = (1, 3, "binary", 1.0, None, 20.0, channels_last)
        counts = torch.ops.sparsecomp.spike_conv_counts.default
        torch.testing.assert_close(counts(x.to(torch.int8), weight, bias, *window, *more), out, rtol=1e-5, atol=1e-5)
        torch.library.opcheck(counts, (x.to(torch.int8), weight, bias, *window, *more))


@DIMS
def test_gradients_are_the_dense_operators(dims):
    x, weight, bias = (one.requires_grad_() for one in operands(dims))
    wide = [one.detach().double().requires_grad_() for one in (x, weight, bias)]
    window = [list(part) for part in WINDOWS[dims][1:]]
    found = ops.spike_conv(x, weight, bias, *window, 1, 3, "binary")
    expected = DENSE[dims](*wide, *window)
    grad = torch.randn(found.shape, generator=torch.Generator().manual_seed(5))
    found.backward(grad)
    expected.backward(grad.double())
    for one, other in zip((x, weight, bias), wide, strict=True):
        torch.testing.assert_close(one.grad.double(), other.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("implementation", ["binary", "direct", "event", "skip"])
@pytest.mark.parametrize("channels_last", [False, True])
def test_signals_are_convolved_as_they_are(device, implementation, channels_last):
    x, weight, bias = operands(1)
    given = laid_out(x, channels_last).to(device)
    out = launch_conv(given, weight.to(device), bias.to(device), *WINDOWS[1][1:], 1, 3, implementation)
    expected = F.conv1d(x.double(), weight.double(), bias.double(), *WINDOWS[1][1:])
    assert is_channels_last(out) == channels_last
    torch.testing.assert_close(out.cpu().double(), expected, rtol=1e-5, atol=1e-5)


@DIMS
@pytest.mark.parametrize("device", KERNEL_DEVICES)
def test_first_passes_take_every_number_of_dimensions(device, dims):
    x, weight, _ = operands(dims)
    for layout, flipped in product((False, True), (False, True)):
        given = laid_out(x, layout).to(device)
        given, expected = (given.mT, x.mT) if flipped else (given, x)
        assert torch.equal(to_bytes(given).cpu(), expected.to(torch.int8))
        x8, active, _ = scan_pixels(given)
        assert torch.equal(x8.cpu(), expected.to(torch.int8)) and lies_channels_last(x8)
        assert torch.equal(active.cpu().bool(), expected.any(1))
        planes, scales = pack_weight(laid_out(weight, layout).to(device), 3)
        for found, right in zip((planes, scales), split_weight(weight, 3), strict=True):
            assert torch.equal(found.cpu(), right)
    assert find_events(laid_out(x, channels_last=True).to(device)).total.item() == x.count_nonzero()


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("implementation", ["binary", "direct", "event", "skip"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float16, 1e-3)])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("channels_last", [False, True])
def test_volumes_are_convolved_on_int8_tensor_cores(device, implementation, dtype, tolerance, groups, channels_last):
    """Beside float64, by channel; a weight far above the others' takes its channel out of the bytes."""
    x, weight, bias = (one.to(dtype) for one in operands(3, density=0.3))
    weight = weight[:, : 16 // groups].clone()
    weight[5, 3, 1, 2, 0] = 1e3
    given = laid_out(x, channels_last).to(device)
    out = launch_conv(given, weight.to(device), bias.to(device), *WINDOWS[3][1:], groups, 3, implementation)
    expected = F.conv3d(x.double(), weight.double(), bias.double(), *WINDOWS[3][1:], groups)
    assert is_channels_last(out) == channels_last
    errors, norms = ((one.movedim(1, 0).flatten(1)).norm(dim=1) for one in (out.cpu().double() - expected, expected))
    assert (errors <= tolerance * norms).all()


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize(("kernel", "stride", "padding", "dilation"), [*product((1, 3), (1, 2), (0, 2), (1, 2))])
def test_frames_are_walked_as_torch_walks_them(device, kernel, stride, padding, dilation):
    random = torch.Generator().manual_seed(kernel)
    x = (torch.rand(1, 8, 6, 4, 3, generator=random) < 0.5).float()
    weight = torch.randn(16, 8, kernel, 2, 2, generator=random)
    how = (stride, 1, 1), (padding, 1, 0), (dilation, 1, 1)
    out = launch_conv(x.to(device), weight.to(device), None, *how, 1, 3, "binary")
    expected = F.conv3d(x.double(), weight.double(), None, *how)
    torch.testing.assert_close(out.cpu().double(), expected, rtol=1e-5, atol=1e-5)


def test_a_kernel_that_indexes_images_refuses_volumes_by_name():
    pytest.importorskip("triton")
    x, weight, _ = operands(3)
    problem = binary_conv_problem(Convolution.of(x.shape, weight.shape, WINDOWS[3]), 3)
    refusals = BINARY_CONV.refusals(problem, Device("H100", "9.0", "3.6.0"))
    assert "binary_conv" not in refusals and "padding" in refusals["binary_conv_hopper"]
    whole = problem._replace(conv=problem.conv._replace(c=64))
    assert BINARY_CONV.refusals(whole, Device("H100", "9.0", "3.6.0")) == {
        "binary_conv_hopper": "it indexes images, not maps of 3 dimensions"
    }
    assert problem.numbers[:7] == (problem.conv.m, *problem.conv.size, *problem.conv.out_size)
    assert {name: problem.constants[name] for name in "TRS"} == dict(zip("TRS", WINDOWS[3].kernel, strict=True))
    stand_in = BINARY_CONV.representative(BINARY_CONV.signature(problem, Device("A100", "8.0", "3.6.0")))
    assert stand_in.conv.size == SIZES[3] and stand_in.conv.window.stride == WINDOWS[3].stride


@pytest.mark.quick_cases(1)
def test_the_size_of_a_result_is_torchs():
    for size, kernel, stride, padding, dilation in product(range(5, 12), (1, 2, 3), (1, 2, 3), (0, 1, 2), (1, 2)):
        out = F.conv1d(torch.empty(1, 1, size), torch.empty(1, 1, kernel), None, stride, padding, dilation)
        assert output_size([size], [kernel], [stride], [padding], [dilation]) == [out.shape[-1]]


@pytest.mark.quick_cases(8)
@pytest.mark.parametrize(
    ("shape", "both"),
    [((2, 3, 4, 5), False), ((2, 1, 4, 5), True), ((2, 3, 1, 1), True), ((2, 3, 4), False), ((2, 3, 1), True),
     ((2, 3, 4, 5, 2), False), ((2, 1, 4, 5, 2), True)],
)  # fmt: skip
def test_channels_last_is_what_is_not_contiguous_too(shape, both):
    plain = torch.zeros(shape)
    moved = plain.movedim(1, -1).contiguous().movedim(-1, 1)
    assert lies_channels_last(moved) and lies_channels_last(plain) == both
    assert is_channels_last(moved) == (not both) and not is_channels_last(plain)
    assert not lies_channels_last(torch.zeros(*shape[:-1], 2 * shape[-1] + 2)[..., ::2])
    for x in (plain, moved):
        assert laid_out(x, True).stride()[1] == 1 or both
        assert laid_out(x, False).is_contiguous() and lies_channels_last(laid_out(x, True))
