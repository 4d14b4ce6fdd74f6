"""Float32 convolutions by products of halves: kernel and operator against float64, for numbers of any range."""

import math

import pytest
import torch
import torch.nn.functional as F
from compile_kernel import compile_in_subprocess
from kernel_devices import KERNEL_DEVICES, graph_of, needs_triton
from torch import Tensor, nn

import sparsecomp
from sparsecomp import ops
from sparsecomp.compiler.capture import Graph
from sparsecomp.lowering.tuning.ceilings import target_named
from sparsecomp.options import Options
from sparsecomp.passes.engine.rule import Why
from sparsecomp.reference.geometry import is_channels_last, laid_out

pytestmark = pytest.mark.quick_cases(1)

NAN, INF = math.nan, math.inf
CASES = {  # input, output channels, kernel, stride, padding, dilation
    "of a ResNet": ((1, 3, 21, 19), 64, (7, 7), (2, 2), (3, 3), (1, 1)),
    "of a VGG": ((2, 3, 9, 10), 64, (3, 3), (1, 1), (1, 1), (1, 1)),
    "odd": ((3, 5, 8, 6), 33, (3, 2), (2, 1), (0, 1), (1, 2)),
    "one pixel": ((70, 17, 1, 1), 130, (1, 1), (1, 1), (0, 0), (1, 1)),
    "one channel": ((1, 1, 12, 5), 3, (5, 5), (1, 1), (4, 0), (1, 1)),
}
EACH = pytest.mark.parametrize("name", CASES)


def operands(name: str, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, tuple[tuple[int, int], ...]]:
    shape, outputs, kernel, *window = CASES[name]
    random = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(shape, generator=random), torch.randn((outputs, shape[1], *kernel), generator=random)
    return x, weight, torch.randn(outputs, generator=random), tuple(window)


def exact(x: Tensor, weight: Tensor, bias: Tensor | None, window: tuple[tuple[int, int], ...]) -> Tensor:
    return F.conv2d(x.double(), weight.double(), None if bias is None else bias.double(), *window)


def launched(
    x: Tensor, weight: Tensor, bias: Tensor | None, window: tuple[tuple[int, int], ...], device: str,
    channels_last: bool = False,
) -> Tensor:  # fmt: skip
    from sparsecomp.lowering.spiking.halves_conv import launch_halves_conv, takes_images

    given = [None if one is None else one.to(device) for one in (x, weight, bias)]
    assert takes_images(*given)
    return launch_halves_conv(*given, *map(list, window), channels_last).cpu()


def float32_error(x: Tensor, weight: Tensor, window: tuple[tuple[int, int], ...]) -> Tensor:
    """By output: what float32 sums of rounded products, in any order, may be wrong by."""
    depth = weight[0].numel()
    return exact(x.abs(), weight.abs(), None, window) * depth * 2.0**-24


@pytest.mark.quick_cases(1)
@EACH
@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("layouts", [(False, False, False), (True, True, True), (True, False, False)])
def test_sums_are_float32_s(name, layouts, device):
    x, weight, bias, window = operands(name)
    x, weight = laid_out(x, layouts[0]), laid_out(weight, layouts[1])
    out, expected = launched(x, weight, bias, window, device, layouts[2]), exact(x, weight, bias, window)
    assert (out - expected).norm() <= 3e-7 * expected.norm() and out.dtype is torch.float32
    assert is_channels_last(out) == (layouts[2] and is_channels_last(laid_out(out.clone(), True)))
    assert torch.equal(launched(x, weight, None, window, device), launched(x, weight, 0 * bias, window, device))


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("sizes", [(1e-20, 1e25), (1e15, 1e-30), (1e-30, 1.0), (1e18, 1e18), (1e-25, 1e-12)])
def test_numbers_of_any_size(sizes, device):
    """Pixels and channels of other sizes than their neighbours, some beyond what halves hold, none lost."""
    x, weight, _, window = operands("of a VGG")
    x[0] *= sizes[0]
    weight[1::2] *= sizes[1]
    x[1, :, 4:] *= 1e-8
    out, expected = launched(x, weight, None, window, device), exact(x, weight, None, window)
    assert ((out - expected).abs() <= float32_error(x, weight, window) + 1e-44).all()


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("name", ["of a VGG", "of a ResNet"])
def test_small_numbers_beside_large_ones_are_not_lost(name, device):
    """A large input that meets a weight of zero leaves sums that only small numbers make."""
    x, weight, _, window = operands(name)
    x[:, 0], weight[:, 0] = x[:, 0] * 1e12, 0.0
    out, expected = launched(x, weight, None, window, device), exact(x, weight, None, window)
    assert ((out - expected).abs() <= float32_error(x, weight, window)).all() and expected.abs().max() < 100


@pytest.mark.parametrize("device", KERNEL_DEVICES)
def test_zeros_and_subnormal_numbers(device):
    x, weight, bias, window = operands("of a VGG")
    assert torch.equal(launched(0 * x, weight, bias, window, device), bias[:, None, None].expand(2, 64, 9, 10))
    assert not launched(x, 0 * weight, None, window, device).any()
    tiny = x * 1e-40
    out, expected = launched(tiny, weight, None, window, device), exact(tiny, weight, None, window)
    assert (out - expected).abs().max() <= 27 * 1.5e-45 and expected.abs().max() > 1e-40


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("value", [INF, -INF, NAN])
@pytest.mark.parametrize("place", ["input", "weight"])
def test_what_is_not_finite_is_float32_s(place, value, device):
    """Without padding, of whose zeros libraries differ on whether they are multiplied."""
    x, weight, bias, window = operands("of a VGG")
    window = (window[0], (0, 0), window[2])
    if place == "input":
        x[1, 2, 3, 4] = value
    else:
        weight[5, 1, 2, 0], x[0, :, 0] = value, 0.0
    out, expected = launched(x, weight, bias, window, device), exact(x, weight, bias, window)
    assert 0 < (~expected.isfinite()).sum() < expected.numel()
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("device", KERNEL_DEVICES)
def test_operands_of_any_strides(device):
    x, weight, bias, window = operands("odd")
    wide = torch.full((3, 7, 8, 12), NAN)
    wide[:, 1:6, :, ::2] = x
    turned = weight.permute(3, 0, 2, 1).contiguous().permute(1, 3, 2, 0)
    assert not turned.is_contiguous() and torch.equal(turned, weight)
    out = launched(wide[:, 1:6, :, ::2], turned, bias, window, device)
    assert torch.equal(out, launched(x, weight, bias, window, device))


def test_the_operator_and_its_gradients_are_the_dense_ones():
    x, weight, bias, window = operands("odd")
    given = [one.double().requires_grad_() for one in (x, weight, bias)]
    out, expected = ops.halves_conv(*given, *window, True), F.conv2d(*given, *window)
    assert is_channels_last(out)
    torch.testing.assert_close(out, expected)
    gradients = [torch.autograd.grad(one.square().sum(), given) for one in (out, expected)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)
    without = torch.autograd.grad(ops.halves_conv(*given[:2], None, *window).sum(), given[1])
    torch.testing.assert_close(without, torch.autograd.grad(F.conv2d(*given[:2], None, *window).sum(), given[1]))


@pytest.mark.slow(reason="traces the operator many times")
def test_the_operator_passes_opcheck():
    x, weight, bias, window = operands("odd")
    for channels_last in (True, False):
        given = (x.requires_grad_(), weight.requires_grad_(), bias, *map(list, window), channels_last)
        torch.library.opcheck(torch.ops.sparsecomp.halves_conv.default, given)


@pytest.mark.slow(reason="compiles for two GPUs in a process of its own")
def test_the_kernel_compiles_for_gpus_that_are_not_there():
    compile_in_subprocess(
        """
        from sparsecomp.lowering.spiking.kernels.halves_conv import halves_conv_kernel as kernel

        numbers = ("M H W OH OW K x_n x_c x_h x_w stride_h stride_w pad_h pad_w dil_h dil_w "
                   "out_pixel out_channel out_image width low").split()
        types = {name: "i32" for name in numbers} | dict(
            x_ptr="*fp32", weight_ptr="*fp32", halves_ptr="*fp16", factor_ptr="*fp32", bias_ptr="*fp32",
            out_ptr="*fp32")
        for capability in (80, 90):
            for side, bk in ((7, 32), (3, 32)):
                for axis in (0, 1):
                    tile = dict(BM=128, BN=64, BK=bk)
                    built = build(kernel, types, dict(C=3, R=side, S=side, CHANNELS_INNER=True, P=axis, **tile),
                                  capability, whole=("K", "width", "low"), num_warps=8, num_stages=2)
                    assert ("wgmma" if capability == 90 else "mma.sync") in built.asm["ptx"]
        """
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_in_a_cuda_graph():
    x, weight, bias, window = (one.cuda() if isinstance(one, Tensor) else one for one in operands("of a ResNet"))
    graph, result = graph_of(lambda: ops.halves_conv(x, weight, bias, *window))
    x.copy_(x.roll(1, -1) * 1e3)
    weight.mul_(1e-9)
    graph.replay()
    torch.cuda.synchronize()
    expected = exact(x, weight, bias, window)
    assert (result - expected).norm() <= 3e-7 * expected.norm()


class Stem(nn.Module):
    """A convolution of images, a neuron and a convolution of spikes."""

    def __init__(self, channels: int = 3, **more) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False, **more)
        self.second = nn.Conv2d(64, 64, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second((self.first(x) > 0.5).float())


@pytest.fixture
def no_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def explained(model: nn.Module, channels: int = 3, batch: int = 32, **options):
    """The rule's sites on an H100 that need not be there."""
    with torch.no_grad():
        x = torch.empty(batch, channels, 224, 224)
        report = sparsecomp.explain(model, x, device="h100", **{"mode": "reduce-overhead", **options})
    return [one for one in report.sites if one.rule == "halves_conv"]


@needs_triton
@pytest.mark.usefixtures("no_tf32")
@pytest.mark.slow(reason="traces a ResNet")
def test_the_stem_of_an_exact_network_is_a_site():
    (site,) = explained(Stem(), precision="exact")
    assert site.rewritten and (site.implementation, site.precision, site.module) == ("halves", "exact", "first")
    assert site.estimate is not None and site.estimate.gain > 1.5
    assert explained(Stem()) == [], "nobody asked for it"


@needs_triton
@pytest.mark.usefixtures("no_tf32")
@pytest.mark.parametrize(
    ("model", "options"),
    [
        (Stem(), {"precision": "tf32"}), (Stem(), {"precision": "half"}),
        (Stem(), {"precision": "exact", "implementation": "dense"}),
        (Stem(), {"precision": "exact", "disable": ("halves_conv",)}),
        (Stem(32), {"precision": "exact", "channels": 32, "batch": 1}),
    ],
    ids=["tf32", "half", "dense", "disabled", "many channels"],
)  # fmt: skip
def test_what_is_no_site(model, options):
    assert explained(model, **options) == []


@pytest.mark.slow(reason="traces a ResNet")
@needs_triton
def test_where_tf32_is_allowed_it_is_what_runs():
    """The default of torch: nothing is said of it unless an exact result is asked for."""
    assert torch.backends.cudnn.allow_tf32 and explained(Stem()) == []
    (site,) = explained(Stem(), precision="exact")
    assert not site.rewritten and site.why == Why.GATE.name and "TF32" in site.reason


@needs_triton
@pytest.mark.usefixtures("no_tf32")
@pytest.mark.parametrize("trained", [False, True])
def test_the_rewritten_graph_gives_the_layer_s_result(trained):
    """As for an H100, run op by op on a CPU, where the operator is the dense one."""
    model, results = Stem(), []
    x = torch.randn(1, 3, 224, 224).expand(32, -1, -1, -1)

    def backend(gm, inputs):
        parsed = Options.parse(None, {"verify": True, "strict": True, "mode": "reduce-overhead", "precision": "exact"})
        results.append(Graph.of_dynamo(gm, inputs, {}, parsed).rewrite(parsed, target_named("h100")))
        return gm.forward

    with torch.set_grad_enabled(trained):
        first = nn.Sequential(model.first)
        found, right = torch.compile(first, backend=backend)(x), first(x)
    # of a training step the forward alone gains, and the margin is of the whole
    expected = ["dense" if trained else "halves"]
    assert [one.implementation for one in results[0].sites if one.rule == "halves_conv"] == expected
    torch.testing.assert_close(found, right)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.usefixtures("no_tf32")
@pytest.mark.parametrize("channels_last", [False, True])
def test_compiled_stems_are_as_exact_as_float32(channels_last):
    torch.compiler.reset()
    model, x = Stem().cuda(), torch.randn(32, 3, 224, 224, device="cuda")
    if channels_last:
        model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    first = nn.Sequential(model.first)
    options = {"mode": "reduce-overhead", "precision": "exact"}
    compiled = torch.compile(first, backend="sparsecomp", options=options)
    with torch.no_grad():
        for _ in range(3):
            out = compiled(x)
            model.first.weight.data.mul_(1.5)  # a write that nothing tells of
        right = nn.functional.conv2d(x.double(), model.first.weight.double() / 1.5, None, 2, 3)
    assert "halves" in {one.implementation for one in sparsecomp.last_report(compiled).sites}
    assert (out - right).norm() <= 5e-7 * right.norm() and out.stride() == first(x).stride()
