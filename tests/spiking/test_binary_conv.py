"""The byte-split convolution against float64, through the interpreter and on the GPU."""

import re
from math import gcd

import pytest
import torch
import torch.nn.functional as F
from compile_kernel import compile_in_subprocess
from kernel_devices import KERNEL_DEVICES

import sparsecomp.ops  # noqa: F401  registers the ops
from sparsecomp.reference.digits import SPREAD, join_weight, split_weight

pytestmark = pytest.mark.quick_cases(1)

TOLERANCE = {2: 1e-4, 3: 1e-6, 4: 2e-7}


def spikes(shape, density, device, high=1):
    generator = torch.Generator().manual_seed(sum(shape))
    x = (torch.rand(shape, generator=generator) < density).float()
    return (x * torch.randint(1, high + 1, shape, generator=generator)).to(device)


def relative_error(out, expected):
    return ((out.double().cpu() - expected.cpu()).norm() / expected.norm().cpu().clamp_min(1e-30)).item()


def run(x, w, bias, stride=(1, 1), padding=(1, 1), dilation=(1, 1), groups=1, digits=3, channels_last=False):
    from sparsecomp.lowering.spiking import spike_conv
    from sparsecomp.lowering.spiking.packing import to_bytes

    window = (stride, padding, dilation, groups, digits, "binary", 1.0, None, SPREAD)
    return spike_conv.launch_counts(to_bytes(x), w, bias, *window, channels_last)


@pytest.mark.parametrize("digits", [2, 3, 4])
def test_split_weight_error_is_bounded_by_the_largest_weight_of_the_channel(digits):
    w = torch.randn(8, 5, 3, 3, generator=torch.Generator().manual_seed(0))
    planes, scale = split_weight(w, digits)
    error = (join_weight(planes, scale, (3, 3), 5) - w.double()).abs().amax((1, 2, 3))
    assert (error <= w.double().abs().amax((1, 2, 3)) * 2.0 ** (1 - 8 * digits)).all()


def test_split_weight_is_exact_for_small_multiples_of_a_power_of_two():
    w = torch.randint(-16, 17, (8, 5, 3, 3), generator=torch.Generator().manual_seed(0)) / 16
    planes, scale = split_weight(w, 2)
    assert torch.equal(join_weight(planes, scale, (3, 3), 5), w.double())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_split_weight_turns_a_channel_with_a_bad_weight_to_nan(bad):
    w = torch.ones(2, 3, 1, 1)
    w[1, 2] = bad
    _, scale = split_weight(w, 3)
    assert torch.isfinite(scale[0]) and torch.isnan(scale[1])


def test_split_weight_of_zeros_is_zero():
    planes, scale = split_weight(torch.zeros(4, 3, 3, 3), 3)
    assert not planes.any() and torch.isfinite(scale).all()


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("digits", [2, 3, 4])
@pytest.mark.parametrize(
    ("shape", "kernel", "args"),
    [
        ((2, 64, 7, 7), (48, 64, 3, 3), {}),
        ((1, 16, 13, 9), (17, 16, 3, 3), {"stride": (2, 2)}),
        ((1, 17, 5, 5), (8, 17, 3, 3), {"dilation": (2, 2), "padding": (2, 2)}),
        ((2, 48, 1, 1), (32, 48, 1, 1), {"padding": (0, 0)}),
        ((1, 32, 6, 5), (32, 16, 3, 1), {"groups": 2, "padding": (1, 0), "stride": (1, 2)}),
        ((1, 3, 8, 8), (5, 3, 5, 5), {"padding": (2, 2)}),
    ],
)
def test_matches_float64(device, digits, shape, kernel, args):
    x = spikes(shape, 0.3, device)
    w = torch.randn(kernel, generator=torch.Generator().manual_seed(1)).to(device)
    bias = torch.randn(kernel[0], generator=torch.Generator().manual_seed(2)).to(device)
    args = {"padding": (1, 1), **args}
    expected = F.conv2d(x.double(), w.double(), bias.double(), **args)
    assert relative_error(run(x, w, bias, digits=digits, **args), expected) < TOLERANCE[digits]


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("channels_last", [False, True])
def test_bit_exact_for_weights_that_fit_and_counts_up_to_127(device, channels_last):
    x = spikes((2, 32, 6, 7), 0.5, device, high=127)
    x[0] = -x[0]
    w = (torch.randint(-16, 17, (40, 32, 3, 3), generator=torch.Generator().manual_seed(0)) / 16).to(device)
    expected = F.conv2d(x.double(), w.double(), padding=1)
    out = run(x, w, None, channels_last=channels_last)
    assert torch.equal(out.double(), expected)
    assert out.is_contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("fill", ["zero", "one", "corner"])
def test_all_zero_all_one_and_one_corner_spike(device, fill):
    x = torch.full((1, 16, 7, 7), 1.0 if fill == "one" else 0.0, device=device)
    if fill == "corner":
        x[0, 15, 6, 6] = 1
    w = torch.randn(16, 16, 3, 3, generator=torch.Generator().manual_seed(1)).to(device)
    bias = torch.randn(16, generator=torch.Generator().manual_seed(2)).to(device)
    expected = F.conv2d(x.double(), w.double(), bias.double(), padding=1)
    # at most 144 weights are summed, each off by half a unit of 2^-23 of the largest
    atol = 144 * w.abs().max().item() * 2.0**-24
    torch.testing.assert_close(run(x, w, bias).double(), expected, rtol=2e-7, atol=atol)


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_rounds_once(device, dtype):
    if device == "cpu" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter computes bf16 stores wrong")
    x = spikes((1, 64, 6, 6), 0.2, device).to(dtype)
    w = torch.randn(32, 64, 3, 3, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    expected = F.conv2d(x.double(), w.double(), padding=1)
    out = run(x, w, None, digits=2)
    assert out.dtype == dtype
    assert relative_error(out, expected) < 2.0 ** (-11 if dtype == torch.float16 else -8)


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("layout", ["nchw", "channels_last", "sliced"])
def test_prescan_casts_any_layout(device, dtype, layout):
    from sparsecomp.lowering.spiking.packing import to_bytes

    x = spikes((2, 70, 9, 5), 0.4, device, high=4).to(dtype)
    if layout == "channels_last":
        x = x.contiguous(memory_format=torch.channels_last)
    if layout == "sliced":
        x = x[:, 1::2, ::2, :]
    out = to_bytes(x)
    assert torch.equal(out.cpu(), x.cpu().to(torch.int8))
    assert out.permute(0, 2, 3, 1).is_contiguous()


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("digits", [2, 3, 4])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "linear"])
def test_pack_weight_kernel_equals_split_weight(device, digits, layout):
    from sparsecomp.lowering.spiking.packing import pack_weight

    w = torch.randn(6, 40, 3, 2, generator=torch.Generator().manual_seed(3))
    w[0] = 0
    w[1, 2] = float("nan")
    w[2, 3] = float("inf")
    w[3] *= 1e-30
    w[4, 0] = 1e30
    w[5, 1, 0, 0] = torch.tensor(1 - 2.0**-24)
    w = w[:, :, 0, 0] if layout == "linear" else w
    if layout == "channels_last":
        w = w.contiguous(memory_format=torch.channels_last)
    planes, scale = pack_weight(w.to(device), digits)
    expected_planes, expected_scale = split_weight(w, digits)
    torch.testing.assert_close(scale.cpu(), expected_scale, rtol=0, atol=0, equal_nan=True)
    finite = torch.isfinite(expected_scale)
    assert torch.equal(planes.cpu()[:, finite], expected_planes[:, finite])


@pytest.mark.slow(reason="builds for a GPU")
@pytest.mark.parametrize("capability", [80, 90])
def test_pack_weight_and_prescan_compile(capability):
    printed = compile_in_subprocess(
        f"""
        from sparsecomp.lowering.spiking.kernels.pack_weight import pack_weight_kernel
        from sparsecomp.lowering.spiking.kernels.prescan import cast_flat_kernel, cast_strided_kernel
        constants = dict(R=3, S=3, DIGITS=3, BITS=23, TOP=0.996, BLOCK=1024)
        pointers = dict(w_ptr="*fp32", planes_ptr="*i8", scale_ptr="*fp32", x_ptr="*fp32", out_ptr="*i8",
                        spread="fp32", inverse="fp32")
        flat = dict(count_ptr=None, BINARY=False, BLOCK=4096)
        for kernel, constants in ((pack_weight_kernel, constants), (cast_flat_kernel, flat),
                                  (cast_strided_kernel, dict(BINARY=True, BC=64, BP=64))):
            types = {{n: pointers.get(n, "i32") for n in kernel.arg_names}}
            print(len(build(kernel, types, constants, {capability}, num_warps=4).asm["cubin"]) > 0)
        """
    )
    assert printed.split() == ["True"] * 3


@pytest.mark.slow(reason="builds for a GPU")
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("maps", ["T=1, VOLUMES=False, D=1, OD=1, stride_d=1, dil_d=1", "T=3, VOLUMES=True"])
def test_compiles_to_int8_tensor_core_instructions(capability, maps):
    printed = compile_in_subprocess(
        f"""
        from sparsecomp.lowering.spiking.kernels.binary_conv import binary_conv_kernel as kernel
        pointers = dict(x_ptr="*i8", w_ptr="*i8", scale_ptr="*fp32", weight_ptr="*fp32",
                        bias_ptr="*fp32", factor_ptr="*fp32", out_ptr="*fp32", multiplier="fp32")
        constants = dict(count_ptr=None, rows_ptr=None, R=3, S=3, GROUPS=1, DIGITS=3, HAS_BIAS=True, EVEN_C=True,
                         VECTOR=16, BM=128, BN=64, BK=64, {maps})
        types = {{n: pointers.get(n, "i32") for n in kernel.arg_names}}
        built = build(kernel, types, constants, {capability}, num_warps=4, num_stages=3)
        print(built.asm["ptx"])
        """
    )
    hopper = "wgmma.mma_async.sync.aligned.m64n64k32.s32.s8.s8"
    instruction = hopper if capability == 90 else "mma.sync.aligned.m16n8k32"
    assert instruction in printed


@pytest.mark.slow(reason="builds for a GPU")
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(("channels", "size"), [(24, 8), (20, 4), (17, 1)])
def test_channels_that_fill_no_tile_are_loaded_by_as_many_bytes_as_divide_them(capability, channels, size):
    printed = compile_in_subprocess(
        f"""
        from sparsecomp.lowering.spiking.kernels.binary_conv import binary_conv_kernel as kernel
        pointers = dict(x_ptr="*i8", w_ptr="*i8", scale_ptr="*fp32", weight_ptr="*fp32",
                        bias_ptr="*fp32", factor_ptr="*fp32", out_ptr="*fp32", multiplier="fp32")
        constants = dict(count_ptr=None, rows_ptr=None, R=3, S=3, GROUPS=1, DIGITS=3, HAS_BIAS=True, EVEN_C=False,
                         VECTOR={gcd(channels, 16)}, BM=64, BN=64, BK=32, T=1, VOLUMES=False, D=1, OD=1,
                         stride_d=1, dil_d=1)
        types = {{n: pointers.get(n, "i32") for n in kernel.arg_names}}
        print(build(kernel, types, constants, {capability}, whole=("K", "CP"), num_warps=4, num_stages=3).asm["ptx"])
        """
    )
    copied = set(re.findall(r"cp\.async\.c[ag]\.shared\.global .*, 0x(\w+), ", printed))
    # of the weight, which is padded, 16 bytes; below 4 there is no such copy of the input
    assert copied == ({"10", f"{size:x}"} if size > 1 else {"10"})


@pytest.mark.slow(reason="builds for a GPU")
@pytest.mark.parametrize("volumes", [False, True])
def test_compiles_for_one_output_channel(volumes):
    """Triton makes a constant of an argument that is 1."""
    printed = compile_in_subprocess(
        f"""
        from sparsecomp.lowering.spiking.kernels.binary_conv import binary_conv_kernel as kernel
        pointers = dict(x_ptr="*i8", w_ptr="*i8", scale_ptr="*fp32", weight_ptr="*fp32",
                        bias_ptr="*fp32", factor_ptr="*fp32", out_ptr="*fp32", multiplier="fp32")
        constants = dict(count_ptr=None, rows_ptr=None, R=1, S=1, GROUPS=1, DIGITS=3, HAS_BIAS=True, EVEN_C=True,
                         VECTOR=1, BM=64, BN=32, BK=32, K=1, D=1, H=1, W=1, OD=1, OH=1, OW=1, stride_d=1, pad_d=1,
                         dil_d=1, T=1, VOLUMES={volumes})
        types = {{n: pointers.get(n, "i32") for n in kernel.arg_names}}
        print(len(build(kernel, types, constants, 90, num_warps=4).asm["cubin"]) > 0)
        """
    )
    assert printed.split() == ["True"]


@pytest.mark.slow(reason="builds for a GPU")
@pytest.mark.parametrize(("digits", "blocks"), [(2, (256, 64, 64)), (3, (128, 128, 64)), (4, (128, 64, 64))])
def test_hopper_kernel_compiles_without_spills_and_overlaps_its_products(digits, blocks):
    printed = compile_in_subprocess(
        f"""
        from triton.experimental.gluon._runtime import GluonASTSource
        from sparsecomp.lowering.spiking.kernels.binary_conv_hopper import binary_conv_hopper_kernel as kernel
        BM, BN, BK = {blocks}
        pointers = dict(x_ptr="*i8", w_ptr="*i8", scale_ptr="*fp32", weight_ptr="*fp32",
                        bias_ptr="*fp32", factor_ptr="*fp32", out_ptr="*fp32", multiplier="fp32")
        constants = dict(count_ptr=None, rows_ptr=None, R=3, S=3, GROUPS=1, DIGITS={digits}, HAS_BIAS=True,
                         BM=BM, BN=BN, BK=BK, STAGES=4, num_warps=8)
        types = {{n: pointers.get(n, "i32") for n in kernel.arg_names}}
        built = build(kernel, types, constants, 90, source=GluonASTSource, num_warps=8)
        print(built.asm["ptx"])
        """
    )
    assert "wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8" in printed
    assert f"wgmma.wait_group.sync.aligned {1 if digits == 2 else 2}" in printed.replace("\t", " ")
    assert ".local" not in printed
