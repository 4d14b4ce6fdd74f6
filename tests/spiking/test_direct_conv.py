"""Convolutions of bytes with floats, as of depthwise layers: kernel, operator and rule against float64."""

import pytest
import torch
import torch.nn.functional as F
from compile_kernel import compile_in_subprocess
from kernel_devices import KERNEL_DEVICES
from rewriting import OnSpikes, dyadic, operators_run, rewritten, site
from spike_conv_cases import normal, run, sixteenths, spikes
from torch import nn

import sparsecomp
from sparsecomp import ops
from sparsecomp.lowering.cache.signature import Device
from sparsecomp.reference.geometry import is_channels_last, laid_out

pytestmark = pytest.mark.quick_cases(1)

DENSE = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
CASES = {  # input, output channels, groups, kernel, stride, padding, dilation
    "depthwise": ((2, 32, 7, 6), 32, 32, (3, 3), (1, 1), (1, 1), (1, 1)),
    "depthwise, two outputs each": ((1, 12, 9, 7), 24, 12, (3, 2), (2, 1), (1, 0), (1, 2)),
    "depthwise, 1d": ((2, 24, 13), 24, 24, (5,), (2,), (4,), (2,)),
    "depthwise, 3d": ((1, 8, 3, 5, 4), 8, 8, (2, 3, 3), (1, 2, 1), (1, 1, 0), (1, 1, 1)),
    "odd": ((1, 77, 5, 3), 77, 77, (3, 3), (1, 1), (1, 1), (1, 1)),
    "groups of four": ((2, 16, 5, 6), 8, 4, (3, 3), (1, 1), (1, 1), (1, 1)),
    "more than is unrolled": ((1, 4, 9, 8), 4, 4, (7, 5), (1, 1), (3, 2), (1, 1)),
    "one channel": ((2, 1, 6, 6), 1, 1, (3, 3), (1, 1), (0, 0), (1, 1)),
    "one group": ((1, 5, 4, 4), 7, 1, (1, 1), (1, 1), (0, 0), (1, 1)),
}
EACH = pytest.mark.parametrize("name", CASES)


def operands(name: str, high: int = 1):
    shape, outputs, groups, kernel, *window = CASES[name]
    weight = sixteenths((outputs, shape[1] // groups, *kernel))
    return spikes(shape, 0.4, high), weight, normal((outputs,)).mul(8).round(), (*window, groups)


def dense(x, weight, bias, stride, padding, dilation, groups):
    bias = None if bias is None else bias.double()
    return DENSE[x.dim() - 2](x.double(), weight.double(), bias, stride, padding, dilation, groups)


@EACH
@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("high", [1, 127])
def test_sums_that_float32_holds_have_the_bits_of_float64(device, name, channels_last, high):
    x, weight, bias, how = operands(name, high)
    given = [laid_out(x, channels_last).to(device), weight.to(device), bias.to(device)]
    out = run(*given, "direct", *how).cpu()
    assert torch.equal(out.double(), dense(x, weight, bias, *how))
    assert is_channels_last(out) == (channels_last and is_channels_last(laid_out(out.clone(), True)))
    assert torch.equal(run(given[0], given[1], None, "direct", *how).cpu().double(), dense(x, weight, None, *how))


@EACH
@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float16, 1e-3)])
def test_weights_of_any_range_are_as_exact_as_their_dtype(device, name, dtype, tolerance):
    x, weight, _, how = operands(name)
    weight = normal(weight.shape).to(dtype)
    weight[0] *= 1e3
    out = run(x.to(device, dtype), weight.to(device), None, "direct", *how).cpu().double()
    expected = dense(x, weight, None, *how)
    errors, norms = ((one.movedim(1, 0).flatten(1)).norm(dim=1) for one in (out - expected, expected))
    assert out.dtype is torch.float64 and (errors <= tolerance * norms).all()


@pytest.mark.parametrize("device", KERNEL_DEVICES)
def test_half_precision_rounds_once(device):
    x, weight, bias, how = operands("depthwise", high=100)
    out = run(x.half().to(device), weight.half().to(device), bias.half().to(device), "direct", *how).cpu()
    assert torch.equal(out, dense(x, weight, bias, *how).half())


@EACH
@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("value", [float("inf"), float("nan"), -0.25, 0.0])
def test_a_factor_may_be_anything(device, name, value):
    """Silence is zero whatever the factor is."""
    x, weight, bias, how = operands(name)
    factor = torch.tensor([value])
    scaled = torch.where(x > 0, factor, 0.0)
    promise = {"factor": factor.to(device), "binary": True}
    out = run(scaled.to(device), weight.to(device), bias.to(device), "direct", *how, **promise).cpu()
    torch.testing.assert_close(
        out.double(), dense(scaled, weight, bias, *how).float().double(), rtol=1e-6, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_weight_that_is_not_finite_spoils_its_channel_alone(device, bad):
    x, weight, _, how = operands("depthwise")
    weight[3, 0, 1, 1] = bad
    out = run(x.to(device), weight.to(device), None, "direct", *how).cpu()
    kept = [channel for channel in range(32) if channel != 3]
    assert torch.equal(out[:, kept].double(), dense(x, weight, None, *how)[:, kept])
    assert not out[:, 3].isfinite().any()


@EACH
def test_the_operator_and_its_gradients_are_the_dense_ones(name):
    x, weight, bias, how = operands(name)
    given = [one.double().requires_grad_() for one in (x, weight, bias)]
    window = [list(part) for part in how[:3]]
    results = [call(*given) for call in (
        lambda *tensors: ops.spike_conv(*tensors, *window, how[3], 3, "direct"),
        lambda x, weight, bias: DENSE[x.dim() - 2](x, weight, bias, *how),
    )]  # fmt: skip
    torch.testing.assert_close(*results)
    gradients = [torch.autograd.grad(result.pow(2).sum(), given) for result in results]
    for one, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(one, expected)
    counts = torch.ops.sparsecomp.spike_conv_counts.default
    more = (how[3], 3, "direct", 1.0, None, 20.0, True)
    found = counts(x.to(torch.int8), weight, bias, *window, *more)
    assert torch.equal(found.double(), dense(x, weight, bias, *how))


def test_a_depthwise_layer_is_rewritten_where_that_is_asked_for():
    layer = dyadic(nn.Conv2d(16, 16, 3, padding=1, groups=16))
    x = normal((2, 16, 6, 7))
    with torch.no_grad():
        expected = OnSpikes(layer)(x)
        found, report = rewritten(OnSpikes(layer), x, implementation="direct")
        assert site(report, "spike_conv").implementation == "direct"
        assert torch.equal(found, expected)
        optimized = sparsecomp.optimize(OnSpikes(layer).eval(), x, implementation="direct")
        assert torch.equal(optimized(x), expected)
        assert "sparsecomp::spike_conv" in operators_run(optimized, x)


def test_linear_layers_take_it_too():
    x, weight = spikes((5, 24), 0.4), sixteenths((7, 24))
    assert torch.equal(ops.spike_linear(x, weight, None, 3, "direct"), F.linear(x, weight))


def test_a_problem_has_a_stand_in_of_its_sizes():
    pytest.importorskip("triton")
    from sparsecomp.lowering.spiking.convolution import Convolution
    from sparsecomp.lowering.spiking.direct_conv import DIRECT_CONV, direct_conv_problem
    from sparsecomp.reference.geometry import Window

    for shape, outputs, groups, *window in CASES.values():
        problem = direct_conv_problem(Convolution.of(shape, (outputs,), Window(*window), groups))
        device = Device("A100", "8.0", "3.6.0")
        stand_in = DIRECT_CONV.representative(DIRECT_CONV.signature(problem, device))
        assert (stand_in.conv.cg, stand_in.conv.kg) == (problem.conv.cg, problem.conv.kg)
        assert stand_in.products == problem.products
        assert DIRECT_CONV.candidates(stand_in, device)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_compiled_depthwise_layer_reads_bytes(dtype):
    layer = dyadic(nn.Conv2d(64, 64, 3, padding=1, groups=64)).to("cuda", dtype)
    x = normal((2, 64, 9, 8)).to("cuda", dtype).contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        expected = OnSpikes(layer)(x)
        found = torch.compile(OnSpikes(layer), backend="sparsecomp", options={"implementation": "direct"})(x)
        assert site(sparsecomp.last_report(), "spike_conv").implementation == "direct"
    torch.testing.assert_close(found, expected)
    assert found.stride() == expected.stride()


@pytest.mark.slow(reason="builds for a GPU")
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("element", ["*fp32", "*fp16", "*bf16"])
@pytest.mark.parametrize(("channels", "loads"), [(64, "v4.b32"), (24, "v2.b32"), (20, "b32"), (9, "b8")])
def test_compiles_to_loads_of_as_many_bytes_as_divide_the_channels(capability, element, channels, loads):
    printed = compile_in_subprocess(
        f"""
        from math import gcd
        from sparsecomp.lowering.spiking.kernels.direct_conv import direct_conv_kernel as kernel
        pointers = dict(x_ptr="*i8", weight_ptr="{element}", bias_ptr="{element}", out_ptr="{element}",
                        multiplier="fp32")
        constants = dict(factor_ptr=None, T=1, R=3, S=3, CG=1, KG=1, HAS_BIAS=True, VECTOR=gcd({channels}, 16), BM=64,
                         BN=64, D=1, OD=1, stride_d=1, dil_d=1, pad_d=0, out_channel=1)
        types = {{n: pointers.get(n, "i32") for n in kernel.arg_names}}
        whole = ("C", "K", "out_pixel", "out_image") if {channels} % 16 == 0 else ()
        print(build(kernel, types, constants, {capability}, whole=whole, num_warps=4).asm["ptx"])
        """
    )
    assert printed.count(f"ld.global.{loads}") >= 9 and ".local" not in printed


@pytest.mark.slow(reason="builds for a GPU")
@pytest.mark.parametrize("capability", [80, 90])
def test_compiles_for_small_groups_and_any_factor(capability):
    printed = compile_in_subprocess(
        f"""
        from sparsecomp.lowering.spiking.kernels.direct_conv import direct_conv_kernel as kernel
        pointers = dict(x_ptr="*i8", weight_ptr="*fp32", bias_ptr="*fp32", factor_ptr="*fp32", out_ptr="*fp32",
                        multiplier="fp32")
        constants = dict(T=2, R=3, S=3, CG=4, KG=2, HAS_BIAS=False, VECTOR=1, BM=64, BN=64)
        types = {{n: pointers.get(n, "i32") for n in kernel.arg_names}}
        print(len(build(kernel, types, constants, {capability}, num_warps=4).asm["cubin"]) > 0)
        """
    )
    assert printed.split() == ["True"]
