"""Transposed convolutions on spikes: kernel, operator, rule and gate against torch's in float64."""

import copy
from itertools import product
from math import prod

import pytest
import torch
import torch.nn.functional as F
from compile_kernel import compile_in_subprocess
from kernel_devices import KERNEL_DEVICES, graph_of, interpreted
from rewriting import OnSpikes, Surrogate, dyadic, operators_run, rewritten, site
from snn_zoo import compiler
from spike_conv_cases import normal, sixteenths, spikes
from torch import nn

import sparsecomp
from sparsecomp import ops
from sparsecomp.lowering.cache.signature import Device
from sparsecomp.lowering.tuning.cards import H100
from sparsecomp.passes.cost import spiking as gate
from sparsecomp.reference.geometry import TransposedWindow, by_output, is_channels_last, laid_out

pytestmark = pytest.mark.quick_cases(1)

DENSE = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
SIZES = {1: (7,), 2: (4, 5), 3: (2, 4, 3)}
WINDOWS = {  # kernel, stride, padding, output padding, dilation
    "1d": TransposedWindow((3,), (2,), (1,), (1,), (1,)),
    "1d, stride and dilation share a divisor": TransposedWindow((3,), (4,), (1,), (3,), (2,)),
    "1d, fewer taps than phases": TransposedWindow((2,), (5,), (0,), (0,), (1,)),
    "2d": TransposedWindow((4, 3), (2, 3), (1, 0), (0, 1), (1, 1)),
    "2d, one step": TransposedWindow((3, 2), (1, 1), (2, 0), (0, 0), (1, 2)),
    "2d, dilated": TransposedWindow((2, 3), (3, 2), (0, 2), (3, 0), (4, 3)),
    "2d, one pixel": TransposedWindow((1, 1), (2, 1), (0, 0), (1, 0), (1, 1)),
    "3d": TransposedWindow((2, 3, 2), (2, 1, 3), (1, 1, 0), (1, 0, 2), (1, 2, 1)),
}
GEOMETRIES = pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)


def numbers(window: TransposedWindow, groups: int = 1) -> tuple:
    """torch's arguments after the bias."""
    return list(window.stride), list(window.padding), list(window.output_padding), groups, list(window.dilation)


def operands(window: TransposedWindow, channels: int = 6, outputs: int = 10, groups: int = 1):
    x = spikes((2, channels, *SIZES[len(window.kernel)]), 0.4)
    return x, sixteenths((channels, outputs // groups, *window.kernel)), normal((outputs,)).mul(8).round()


def launched(x, weight, bias, *how, digits=3, device="cpu", **promise):
    from sparsecomp.lowering.spiking.transposed_conv import launch_transposed

    given = [None if one is None else one.to(device) for one in (x, weight, bias)]
    return launch_transposed(*given, *how, digits, **promise).cpu()


@GEOMETRIES
@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("channels_last", [False, True])
def test_weights_that_fit_give_the_bits_of_float64(device, window, groups, channels_last):
    x, weight, bias = operands(window, groups=groups)
    expected = DENSE[len(window.kernel)](x.double(), weight.double(), bias.double(), *numbers(window, groups))
    out = launched(laid_out(x, channels_last), weight, bias, *numbers(window, groups), device=device)
    assert torch.equal(out.double(), expected) and is_channels_last(out) == (channels_last and x.dim() > 3)
    assert window.output_size(x.shape[2:]) == expected.shape[2:]


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize(("digits", "tolerance"), [(2, 1e-4), (3, 1e-6), (4, 2e-7)])
@pytest.mark.parametrize("channels", [16, 24, 33, 64])
def test_any_weight_is_as_exact_as_its_digits(device, digits, tolerance, channels):
    window = WINDOWS["2d"]
    x, weight = spikes((2, channels, 5, 4), 0.3), normal((channels, 40, *window.kernel))
    expected = F.conv_transpose2d(x.double(), weight.double(), None, *numbers(window))
    out = launched(x, weight, None, *numbers(window), digits=digits, device=device)
    assert (out - expected).norm() <= tolerance * expected.norm()


@GEOMETRIES
@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("groups", [1, 2])
def test_a_channel_that_bytes_do_not_hold_is_multiplied_with_its_floats(device, window, groups):
    """By output channel, beside float64; and where the factor is infinite, as eager."""
    x, weight, bias = operands(window, groups=groups)
    weight[1, 1] *= 2.0**12
    weight[0, 0].view(-1)[0] = 2.0**14
    expected = DENSE[len(window.kernel)](x.double(), weight.double(), bias.double(), *numbers(window, groups))
    out = launched(x, weight, bias, *numbers(window, groups), device=device)
    assert torch.equal(out.double(), expected)
    for value in (float("inf"), float("nan"), -0.25):
        factor = torch.tensor([value])
        scaled = torch.where(x > 0, factor, 0.0)
        expected = DENSE[len(window.kernel)](scaled.double(), weight.double(), None, *numbers(window, groups))
        promise = {"factor": factor.to(device), "binary": True}
        out = launched(scaled, weight, None, *numbers(window, groups), device=device, **promise)
        torch.testing.assert_close(out.double(), expected.float().double(), rtol=1e-6, atol=0, equal_nan=True)


@pytest.mark.parametrize("device", KERNEL_DEVICES)
def test_half_precision_rounds_once(device):
    x, weight, bias = (one.half() for one in operands(WINDOWS["2d"], 32, 48))
    expected = F.conv_transpose2d(x.double(), weight.double(), bias.double(), *numbers(WINDOWS["2d"]))
    assert torch.equal(launched(x, weight, bias, *numbers(WINDOWS["2d"]), digits=2, device=device), expected.half())


@interpreted
def test_an_empty_batch_and_a_scale():
    x, weight, bias = operands(WINDOWS["2d"])
    assert launched(x[:0], weight, bias, *numbers(WINDOWS["2d"])).shape[0] == 0
    expected = F.conv_transpose2d(x.double() * 0.25, weight.double(), None, *numbers(WINDOWS["2d"]))
    out = launched(x * 0.25, weight, None, *numbers(WINDOWS["2d"]), scale=0.25)
    assert torch.equal(out.double(), expected)


@GEOMETRIES
@pytest.mark.parametrize("groups", [1, 2])
def test_the_operator_and_what_it_lowers_to_mean_the_dense_one(window, groups):
    x, weight, bias = operands(window, groups=groups)
    how = numbers(window, groups)
    expected = DENSE[len(window.kernel)](x.double(), weight.double(), bias.double(), *how)
    assert torch.equal(ops.spike_conv_transpose(x, weight, bias, *how, 3).double(), expected)
    decompose = ops.decompositions()[torch.ops.sparsecomp.spike_conv_transpose.default]
    dense = DENSE[len(window.kernel)](x, weight, bias, *how)
    found = decompose(x, weight, bias, *how, 3)
    assert torch.equal(found.double(), expected) and found.stride() == dense.stride()
    torch.library.opcheck(torch.ops.sparsecomp.spike_conv_transpose.default, (x, weight, bias, *how, 3))
    counts = (x.to(torch.int8), weight, bias, *how, 3, 1.0, None, 20.0, True)
    torch.library.opcheck(torch.ops.sparsecomp.spike_conv_transpose_counts.default, counts)


@GEOMETRIES
@pytest.mark.parametrize("groups", [1, 2])
def test_first_and_second_derivatives_are_the_dense_operators(window, groups):
    def derivatives(call):
        x, weight, bias = (one.double().requires_grad_() for one in operands(window, groups=groups))
        given = (x, weight, bias)
        first = torch.autograd.grad(call(*given).pow(3).sum(), given, create_graph=True)
        return *first, *torch.autograd.grad(sum(g.square().sum() for g in first[:2]), (x, weight))

    how = numbers(window, groups)
    dense = derivatives(lambda *given: DENSE[len(window.kernel)](*given, *how))
    ours = derivatives(lambda *given: ops.spike_conv_transpose(*given, *how, 3))
    for one, expected in zip(ours, dense, strict=True):
        torch.testing.assert_close(one, expected)


MISFITS = {
    "channels": lambda x, w, b, how: (x[:, :4], w, b, how),
    "input dtype": lambda x, w, b, how: (x.half(), w, b, how),
    "bias size": lambda x, w, b, how: (x, w, b[:4], how),
    "groups": lambda x, w, b, how: (x, w, b, (*how[:3], 4, how[4])),
    "output padding": lambda x, w, b, how: (x, w, b, (*how[:2], [3, 3], *how[3:])),
    "no map": lambda x, w, b, how: (x[..., :1, :1], w, b, (how[0], [5, 5], *how[2:])),
    "negative padding": lambda x, w, b, how: (x, w, b, (how[0], [-1, 0], *how[2:])),
}


@pytest.mark.quick_cases(len(MISFITS))
@pytest.mark.parametrize("name", MISFITS)
def test_what_the_dense_operator_does_not_take_raises_its_error(name):
    *given, how = MISFITS[name](*operands(WINDOWS["2d"]), numbers(WINDOWS["2d"]))
    with pytest.raises(RuntimeError) as eager:
        F.conv_transpose2d(*given, *how)
    with pytest.raises(RuntimeError) as ours:
        torch.ops.sparsecomp.spike_conv_transpose.default.direct_cuda(*given, *how, 3)
    assert str(ours.value) == str(eager.value)


LAYERS = {
    "1d": (nn.ConvTranspose1d(16, 12, 3, stride=2, output_padding=1), (2, 16, 7)),
    "2d": (nn.ConvTranspose2d(16, 12, 4, stride=2, padding=1), (2, 16, 5, 4)),
    "3d": (nn.ConvTranspose3d(4, 6, 2, stride=(1, 2, 3), dilation=(2, 1, 1)), (1, 4, 3, 4, 3)),
    "grouped": (nn.ConvTranspose2d(16, 12, 3, groups=4, bias=False), (2, 16, 5, 4)),
    "no batch dimension": (nn.ConvTranspose2d(16, 12, 3, stride=2), (16, 5, 4)),
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_rewritten_and_equals_eager_to_the_bit(name):
    """Gradients too, and as a module that `optimize` sees."""
    layer, shape = copy.deepcopy(LAYERS[name])
    layer = dyadic(layer)
    x = normal(shape)
    other = copy.deepcopy(layer)
    expected, (found, report) = OnSpikes(layer)(x), rewritten(OnSpikes(other), x)
    assert site(report, "spike_conv_transpose").rewritten, site(report, "spike_conv_transpose").reason
    assert torch.equal(found, expected) and found.stride() == expected.stride()
    for result in (expected, found):
        result.square().sum().backward()
    for one, right in zip(other.parameters(), layer.parameters(), strict=True):
        torch.testing.assert_close(one.grad, right.grad)
    optimized = sparsecomp.optimize(OnSpikes(layer).eval(), x, implementation="binary")
    with torch.no_grad():
        assert torch.equal(optimized(x), expected)
        assert "sparsecomp::spike_conv_transpose" in operators_run(optimized, x)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("kind", ["transposed", "no batch dimension", "depthwise"])
def test_a_training_step_through_the_decompositions_has_eagers_gradients(kind):
    """Of the input behind a surrogate, of weights and biases; split weights, and bytes kept for the backward."""
    layer, shape, implementation = {
        "transposed": (nn.ConvTranspose2d(8, 6, 3, 2, padding=1, output_padding=1), (2, 8, 5, 4), "binary"),
        "no batch dimension": (nn.ConvTranspose1d(8, 6, 4, stride=2), (8, 5), "binary"),
        "depthwise": (nn.Conv2d(8, 8, 3, padding=1, groups=8), (2, 8, 5, 4), "direct"),
    }[kind]
    layer = dyadic(layer)
    other, x, reports = copy.deepcopy(layer), normal(shape).requires_grad_(), []
    y = x.detach().clone().requires_grad_()
    layer(Surrogate.apply(x)).square().sum().backward()
    torch._dynamo.reset()
    step = torch.compile(
        lambda x: other(Surrogate.apply(x)).square().sum(),
        backend=compiler(reports, "aot", implementation=implementation),
    )
    step(y).backward()
    assert [found.implementation for found in reports[-1].rewritten] == [implementation]
    for one, right in zip((y, *other.parameters()), (x, *layer.parameters()), strict=True):
        torch.testing.assert_close(one.grad, right.grad)


@pytest.mark.slow(reason="compiles a model twice")
def test_a_size_that_is_asked_for_is_kept():
    class Sized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = dyadic(nn.ConvTranspose2d(16, 8, 3, stride=2))

        def forward(self, x):
            return self.layer((x > 0).to(x.dtype), output_size=[12, 10])

    x, model = normal((2, 16, 5, 4)), Sized().eval()
    with torch.no_grad():
        expected = model(x)
        found, report = rewritten(model, x)
        assert site(report, "spike_conv_transpose").rewritten and expected.shape[2:] == (12, 10)
        assert torch.equal(found, expected)
        assert torch.equal(sparsecomp.optimize(model, x, implementation="binary")(x), expected)


REFUSED = {
    "analog": (nn.ConvTranspose2d(4, 4, 3), {}, "not proved to be spikes"),
    "forced": (OnSpikes(nn.ConvTranspose2d(4, 4, 3)), {"implementation": "event"}, "implementation='event' on spikes"),
    "dense": (OnSpikes(nn.ConvTranspose2d(4, 4, 3)), {"implementation": "dense"}, "'dense' was asked for"),
    "cpu": (OnSpikes(nn.ConvTranspose2d(4, 4, 3)), {"implementation": "auto"}, "no CUDA device"),
}


@pytest.mark.quick_cases(len(REFUSED))
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_left_dense_says_why(name):
    module, options, reason = REFUSED[name]
    with torch.no_grad():
        found, report = rewritten(module, normal((1, 4, 6, 6)), **options)
        assert torch.equal(found, module(normal((1, 4, 6, 6))))
    assert not site(report, "spike_conv_transpose").rewritten
    assert reason in site(report, "spike_conv_transpose").reason


def test_the_range_of_a_weight_is_that_of_its_output_channels():
    """Input channels that differ by 10^4 need more digits; output channels have scales of their own."""
    for dim, digits in ((0, 4), (1, 3)):
        layer = nn.ConvTranspose2d(16, 16, 3)
        with torch.no_grad():
            layer.weight.copy_(normal((16, 16, 3, 3)))
            layer.weight.select(dim, 0).mul_(1e3)
            _, report = rewritten(OnSpikes(layer), normal((1, 16, 4, 4)))
        assert f", {digits}, 1.0, None" in report.graph_after


def test_the_gate_counts_products_by_input_pixel():
    """Four inputs' worth of outputs each see a quarter of sixteen taps; by hand, on the portable kernel."""
    window = TransposedWindow((4, 4), (2, 2), (1, 1), (0, 0), (1, 1))
    decoder = gate.SiteInfo(
        device="cuda", itemsize=4, n=128, c=128, size=(28, 28), k=128, window=window, groups=1, digits=3, density=0.01,
        active=None, tf32=False, channels_last=True, fused=True,
    )  # fmt: skip
    operations = 2 * 128 * 28 * 28 * 128 * 128 * 16
    packing = 128 * 128 * 16 * (2 * 4 + 3) / H100.bandwidth
    assert gate.seconds_of(decoder, "binary") == pytest.approx(operations * 3 * 1.65 / 1100e12 + packing)
    read_at_full_width = 128 * 128 * 28 * 28 * 3 / H100.bandwidth
    assert gate.seconds_of(decoder, "dense") == pytest.approx(operations / 80e12 + read_at_full_width)
    assert gate.decide(decoder).implementation == "binary"
    assert set(gate.decide(decoder).seconds) == {"dense", "binary"}


def test_the_weight_of_a_transposed_convolution_is_a_convolutions_with_channels_swapped():
    """Of one step: a convolution with the taps in reverse."""
    x, weight = spikes((2, 6, 5, 4), 0.4), sixteenths((6, 5, 3, 2))
    expected = F.conv_transpose2d(x, weight, None, 1, 0, 0, 2)
    assert torch.equal(F.conv2d(x, by_output(weight, 2).flip(2, 3), None, 1, (2, 1), 1, 2), expected)
    assert torch.equal(by_output(by_output(weight, 2), 2), weight)


def test_a_problem_has_a_stand_in_of_its_sizes():
    pytest.importorskip("triton")
    from sparsecomp.lowering.spiking.convolution import Convolution
    from sparsecomp.lowering.spiking.transposed_conv import TRANSPOSED_CONV, transposed_conv_problem

    for window, groups in product(WINDOWS.values(), (1, 2)):
        shape = (2, 64, *SIZES[len(window.kernel)])
        problem = transposed_conv_problem(Convolution.of(shape, (32,), window, groups), 3)
        device = Device("A100", "8.0", "3.6.0")
        stand_in = TRANSPOSED_CONV.representative(TRANSPOSED_CONV.signature(problem, device))
        assert (stand_in.conv.n, stand_in.conv.c, stand_in.conv.k) == (2, 64, 32) and stand_in.conv.cg == 64 // groups
        assert stand_in.phases == problem.phases == prod(window.stride)
        assert TRANSPOSED_CONV.candidates(stand_in, device)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("groups", [1, 2])
def test_a_graph_replays_on_new_values(groups):
    window = WINDOWS["2d"]
    x, w, _ = (one.cuda() for one in operands(window, 32, 48, groups))
    graph, out = graph_of(lambda: ops.spike_conv_transpose(x, w, None, *numbers(window, groups), 3))
    x.copy_(torch.rand_like(x) < 0.5)
    w.copy_(torch.randn_like(w))
    graph.replay()
    torch.cuda.synchronize()
    expected = F.conv_transpose2d(x.double(), w.double(), None, *numbers(window, groups))
    assert (out - expected).norm() <= 1e-6 * expected.norm()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("channels_last", [False, True])
def test_a_compiled_layer_gives_the_dense_ones_values(dims, channels_last):
    torch.backends.cudnn.allow_tf32 = False
    layer = dyadic(getattr(nn, f"ConvTranspose{dims}d")(16, 24, 3, stride=2)).cuda()
    x = laid_out(normal((2, 16, *SIZES[dims])), channels_last).cuda()
    with torch.no_grad():
        expected = layer.double()((x > 0).double())
        layer.float()
        compiled = torch.compile(OnSpikes(layer), backend="sparsecomp", options={"implementation": "binary"})
        assert torch.equal(compiled(x).double(), expected)
        assert site(sparsecomp.last_report(), "spike_conv_transpose").rewritten


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize("channels_last", [False, True])
def test_an_operator_called_alone_lays_its_result_out_as_eager(dims, channels_last):
    x, weight, bias = operands(WINDOWS[f"{dims}d"], 16, 24)
    given = laid_out(x, channels_last).cuda(), weight.cuda(), bias.cuda()
    found = ops.spike_conv_transpose(*given, *numbers(WINDOWS[f"{dims}d"]), 3)
    assert found.stride() == DENSE[dims](*given, *numbers(WINDOWS[f"{dims}d"])).stride()


@pytest.mark.slow(reason="builds for a GPU")
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("maps", ["T=1, STRIDE_D=1, DIL_D=1, SHARED_D=1, INVERSE_D=0, D=1, OD=1, pad_d=0",
                                  "T=3, STRIDE_D=2, DIL_D=3, SHARED_D=1, INVERSE_D=1"])  # fmt: skip
def test_compiles_to_int8_tensor_core_instructions(capability, maps):
    printed = compile_in_subprocess(
        f"""
        from sparsecomp.lowering.spiking.kernels.transposed_conv import transposed_conv_kernel as kernel
        pointers = dict(x_ptr="*i8", w_ptr="*i8", scale_ptr="*fp32", weight_ptr="*fp32",
                        bias_ptr="*fp32", factor_ptr="*fp32", out_ptr="*fp32", multiplier="fp32")
        constants = dict(R=4, S=4, STRIDE_H=2, STRIDE_W=2, DIL_H=1, DIL_W=1, SHARED_H=1, SHARED_W=1, INVERSE_H=1,
                         INVERSE_W=1, GROUPS=1, DIGITS=3, HAS_BIAS=True, EVEN_C=True, VECTOR=16, BM=128, BN=64, BK=64,
                         {maps})
        types = {{n: pointers.get(n, "i32") for n in kernel.arg_names}}
        print(build(kernel, types, constants, {capability}, num_warps=4, num_stages=3).asm["ptx"])
        """
    )
    hopper = "wgmma.mma_async.sync.aligned.m64n64k32.s32.s8.s8"
    assert (hopper if capability == 90 else "mma.sync.aligned.m16n8k32") in printed
    assert "cp.async.cg.shared.global" in printed
