"""The spike ops as torch sees them: schema, fake, autograd, and the decomposition that Inductor applies."""

import math

import pytest
import torch
import torch.nn.functional as F
from kernel_devices import interpreted

import sparsecomp.ops as ops
from sparsecomp.errors import InputError

conv_cuda = torch.ops.sparsecomp.spike_conv.default.direct_cuda
linear_cuda = torch.ops.sparsecomp.spike_linear.default.direct_cuda
torch.manual_seed(0)

pytestmark = pytest.mark.quick_cases(2)


def sample(dtype=torch.float32, bias=True):
    x = (torch.rand(2, 16, 7, 6) < 0.3).to(dtype).requires_grad_()
    w = torch.randn(8, 16, 3, 3, dtype=dtype, requires_grad=True)
    return x, w, torch.randn(8, dtype=dtype, requires_grad=True) if bias else None


WINDOW = ([1, 2], [1, 1], [1, 1], 1, 3, "binary")


@pytest.mark.parametrize("bias", [True, False])
def test_opcheck_conv2d(bias):
    torch.library.opcheck(torch.ops.sparsecomp.spike_conv.default, (*sample(bias=bias), *WINDOW))


def test_opcheck_linear():
    x = (torch.rand(3, 2, 32) < 0.3).float().requires_grad_()
    w, b = torch.randn(8, 32, requires_grad=True), torch.randn(8, requires_grad=True)
    torch.library.opcheck(torch.ops.sparsecomp.spike_linear.default, (x, w, b, 3, "binary"))


@pytest.mark.parametrize("implementation", ["binary", "direct", "event", "skip"])
@pytest.mark.parametrize("factor", [None, torch.tensor([0.3])])
def test_opcheck_counts(implementation, factor):
    counts = (torch.rand(2, 16, 7, 6) < 0.3).to(torch.int8).to(memory_format=torch.channels_last)
    window = ([1, 1], [1, 1], [1, 1], 1, 3, implementation, 1.0, factor, 20.0, False)
    args = (counts, torch.randn(8, 16, 3, 3), None, *window)
    torch.library.opcheck(torch.ops.sparsecomp.spike_conv_counts.default, args)


def test_gradients_equal_the_dense_operators_in_float64():
    x, w, b = sample(torch.float64)
    out = ops.spike_conv(x, w, b, *WINDOW)
    seed = torch.randn_like(out)
    got = torch.autograd.grad(out, (x, w, b), seed)
    expected = torch.autograd.grad(F.conv2d(x, w, b, *WINDOW[:4]), (x, w, b), seed)
    for g, e in zip(got, expected, strict=True):
        torch.testing.assert_close(g, e)


def test_linear_gradients_equal_the_dense_operators_in_float64():
    x = (torch.rand(3, 2, 32) < 0.3).double().requires_grad_()
    w = torch.randn(8, 32, dtype=torch.float64, requires_grad=True)
    b = torch.randn(8, dtype=torch.float64, requires_grad=True)
    seed = torch.randn(3, 2, 8, dtype=torch.float64)
    got = torch.autograd.grad(ops.spike_linear(x, w, b, 3, "binary"), (x, w, b), seed)
    for g, e in zip(got, torch.autograd.grad(F.linear(x, w, b), (x, w, b), seed), strict=True):
        torch.testing.assert_close(g, e)


@pytest.mark.parametrize("channels_last", [False, True])
def test_decomposition_keeps_value_and_strides(channels_last):
    x, w, b = (t.detach() for t in sample())
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    decompose = ops.decompositions()[torch.ops.sparsecomp.spike_conv.default]
    out = decompose(x, w, b, *WINDOW)
    expected = F.conv2d(x, w, b, *WINDOW[:4])
    assert out.stride() == expected.stride()
    exact = F.conv2d(x.double(), w.double(), b.double(), *WINDOW[:4])
    assert (out - exact).norm() / exact.norm() < 1e-6


def test_mixed_devices_and_dtypes_raise_what_the_dense_operator_raises():
    x, w, b = (t.detach() for t in sample())
    with pytest.raises(RuntimeError) as ours:
        ops.spike_conv(x.half(), w, b, *WINDOW)
    with pytest.raises(RuntimeError) as eager:
        F.conv2d(x.half(), w, b, *WINDOW[:4])
    assert str(ours.value) == str(eager.value)


@pytest.mark.parametrize("rows", [(0,), (), (2, 0)])
def test_linear_gradients_of_an_empty_or_single_input(rows):
    x, w = torch.ones(*rows, 8, requires_grad=True), torch.randn(4, 8, requires_grad=True)
    got = torch.autograd.grad(ops.spike_linear(x, w, None, 3, "binary").sum(), (x, w))
    for g, e in zip(got, torch.autograd.grad(F.linear(x, w).sum(), (x, w)), strict=True):
        torch.testing.assert_close(g, e)


@pytest.mark.parametrize("layer", ["conv2d", "linear"])
def test_second_derivatives_equal_the_dense_operators(layer):
    x, w, b = sample(torch.float64)
    dense, ours = (lambda x, w: F.conv2d(x, w, b, *WINDOW[:4])), (lambda x, w: ops.spike_conv(x, w, b, *WINDOW))
    if layer == "linear":
        x, w = x.detach().flatten(2).requires_grad_(), torch.randn(8, 42, dtype=torch.float64, requires_grad=True)
        dense, ours = F.linear, (lambda x, w: ops.spike_linear(x, w, None, 3, "binary"))
    found = []
    for call in (dense, ours):
        first = torch.autograd.grad(call(x, w).pow(3).sum(), (x, w), create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in first), (x, w)))
    for mine, expected in zip(*found[::-1], strict=True):
        torch.testing.assert_close(mine, expected)


@pytest.mark.parametrize("written", ["x", "w"])
def test_a_write_to_what_the_backward_needs_is_the_error_that_eager_raises(written):
    for call in (lambda x, w: F.conv2d(x, w, None, *WINDOW[:4]), lambda x, w: ops.spike_conv(x, w, None, *WINDOW)):
        x, w, _ = sample()
        x, w = x.detach().clone(), w.detach().clone()
        operands = {"x": x, "w": w}
        operands["w" if written == "x" else "x"].requires_grad_()
        out = call(x, w)
        operands[written].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


FACTORS = [0.0, -0.0, float("nan"), float("inf"), float("-inf"), -0.3, 1e-30, 6e4, 1e36, 1e-42]


@pytest.mark.parametrize("value", FACTORS)
@pytest.mark.parametrize("implementation", ["binary", "direct", "event", "skip"])
def test_a_factor_of_any_value_gives_what_the_dense_operator_gives(value, implementation):
    """Through the decomposition, with windows of silence, of spikes alone, and of zeros that no factor has touched."""
    spikes = (torch.rand(3, 4, 6, 6, generator=torch.Generator().manual_seed(0)) < 0.4).float()
    spikes[0], spikes[1] = 0, 1
    factor, w = torch.tensor([value]), torch.randn(8, 4, 3, 3)
    w[0] = w[0].abs()
    x = torch.cat([spikes * factor, torch.zeros(1, 4, 6, 6)])
    expected = F.conv2d(x.double(), w.double(), padding=1)
    args = (w, None, [1, 1], [1, 1], [1, 1], 1, 3, implementation, 1.0, factor, True)
    decomposed = ops.decompositions()[torch.ops.sparsecomp.spike_conv.default](x, *args)
    for found in (decomposed, ops.spike_conv(x, *args)):
        atol = 1e-5 * abs(value) + 1e-44 if math.isfinite(value) else 0
        torch.testing.assert_close(found.double(), expected.float().double(), rtol=2e-6, atol=atol, equal_nan=True)


def _misfits():
    x, w, b = (t.detach() for t in sample())
    yield "channels", (x[:, :8].contiguous(), w, b)
    yield "input dtype", (x.half(), w, b)
    yield "weight dtype", (x, w.half(), None)
    yield "bias dtype", (x, w, b.half())
    yield "bias size", (x, w, b[:4])


@pytest.mark.parametrize("operands", [pytest.param(operands, id=name) for name, operands in _misfits()])
def test_kernels_see_only_operands_that_the_dense_operator_takes(operands):
    with pytest.raises(RuntimeError) as eager:
        F.conv2d(*operands, *WINDOW[:4])
    with pytest.raises(RuntimeError) as ours:
        conv_cuda(*operands, *WINDOW)
    assert str(ours.value) == str(eager.value)
    x, w, b = operands
    with pytest.raises(RuntimeError):
        linear_cuda(x.flatten(1), w.flatten(1)[:, :5], b, 3, "binary")


def test_a_double_layer_keeps_double_precision():
    x, w, b = (t.detach() for t in sample(torch.float64))
    torch.testing.assert_close(conv_cuda(x, w, b, *WINDOW), F.conv2d(x, w, b, *WINDOW[:4]), rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(3, 6), (2, 3, 6), (2, 3, 4, 6)])
def test_a_result_is_no_view_and_may_be_written_to(shape):
    x, weight = (torch.rand(shape) < 0.5).float(), torch.randn(4, 6, requires_grad=True)
    out = ops.spike_linear(x, weight, torch.zeros(4, requires_grad=True), 3, "binary")
    out.mul_(2)
    out.sum().backward()
    torch.testing.assert_close(weight.grad, 2 * x.flatten(0, -2).sum(0).expand(4, 6))


@pytest.mark.parametrize("dims", [1, 2])
def test_a_convolution_s_result_is_no_view_either(dims):
    x, weight = (torch.ones(2, 3, *[4] * dims) > 0).float(), torch.ones(5, 3, *[1] * dims, requires_grad=True)
    out = ops.spike_conv(x, weight, None, [1] * dims, [0] * dims, [1] * dims, 1, 2, "binary")
    out.mul_(2).sum().backward()
    assert out.eq(6).all() and weight.grad.eq(2 * 2 * 4**dims).all()


@pytest.mark.parametrize("digits", [0, 1, 5])
def test_kernels_have_two_to_four_bytes_a_weight(digits):
    x, weight = torch.ones(2, 3, 4, 4), torch.ones(3, 3, 1, 1)
    window, neuron = ([1, 1], [0, 0], [1, 1], 1), (0.0, "if", 2.0, None, False, 1.0, 0.0)
    nothing = (None, 0.0, None, None, None, None)
    for call in (
        lambda: ops.spike_conv(x, weight, None, *window, digits, "binary"),
        lambda: ops.spike_linear(x[..., 0, 0], weight[..., 0, 0], None, digits, "binary"),
        lambda: ops.spike_conv_transpose(x, weight, None, [1, 1], [0, 0], [0, 0], 1, [1, 1], digits),
        lambda: ops.conv_lif(x.to(torch.int8), weight, None, *window, digits, 1.0, 20.0, True, 1, *nothing, *neuron),
    ):  # fmt: skip
        with pytest.raises(InputError, match=f"digits is {digits}: 2, 3 or 4"):
            call()


def test_a_factor_and_a_scale_are_one_too_many():
    x, weight, both = torch.ones(2, 3, 4, 4), torch.ones(3, 3, 1, 1), {"scale": 0.5, "factor": torch.tensor(3.0)}
    for call in (
        lambda: ops.spike_conv(x, weight, None, *WINDOW[:4], 3, "binary", **both),
        lambda: ops.spike_linear(x[..., 0, 0], weight[..., 0, 0], None, 3, "binary", **both),
        lambda: ops.spike_conv_transpose(x, weight, None, [1, 1], [0, 0], [0, 0], 1, [1, 1], 3, **both),
    ):
        with pytest.raises(InputError, match="leave one of the two out"):
            call()


def test_vmap_is_a_call_for_each():
    """Of several weights, with lists of numbers among the other arguments."""
    x, w, b = sample()
    several = torch.stack([w, 2 * w, -w]).detach()
    found = torch.vmap(lambda w: ops.spike_conv(x.detach(), w, b.detach(), *WINDOW))(several)
    expected = torch.stack([F.conv2d(x, w, b, *WINDOW[:4]) for w in several])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


CHANGED = {
    # operands that the kernels do not take, though the dense operator does
    "nothing": lambda x, w, b: (x, w, b),
    "bytes": lambda x, w, b: (x.to(torch.int8), w, b),
    "half": lambda x, w, b: (x.half(), w.half(), b.half()),
    "no bias": lambda x, w, b: (x, w, None),
    "double": lambda x, w, b: (x.double(), w.double(), b.double()),
    "one image": lambda x, w, b: (x[0], w, b),
}
TAKEN = ("nothing", "bytes", "half", "no bias")


@pytest.mark.parametrize("name", CHANGED)
@pytest.mark.parametrize("groups", [1, 2])
def test_which_operands_the_kernels_see(name, groups, monkeypatch):
    from sparsecomp.lowering.spiking import spike_conv as lowered
    seen = []
    monkeypatch.setattr(lowered, "launch_conv", lambda *given: seen.append(given))
    monkeypatch.setattr(lowered, "launch_linear", lambda *given: seen.append(given))
    x, w, b = (tensor.detach() for tensor in sample())
    x, w, b = CHANGED[name](x, w[:, : 16 // groups], b)
    window = ([1, 2], [1, 1], [1, 1], groups, 3, "binary", 1.0, None, False, 20.0)
    out = conv_cuda(x, w, b, *window)
    if name in TAKEN:
        assert seen == [(x, w, b, *window)]
    else:
        assert not seen
        torch.testing.assert_close(out, F.conv2d(x, w, b, *window[:4]))
    seen.clear()
    x, w = x.flatten(1), w.flatten(1)[:, :1].expand(-1, x.flatten(1).shape[1])
    out = linear_cuda(x, w, b, *window[4:])
    if name in (*TAKEN, "one image"):
        assert seen == [(x, w, b, *window[4:])]
    else:
        assert not seen
        torch.testing.assert_close(out, F.linear(x, w, b))


@pytest.mark.parametrize("elements", [0, 1])
def test_kernels_take_a_weight_of_one_element_but_not_of_none(elements, monkeypatch):
    from sparsecomp.lowering.spiking import spike_conv as lowered
    monkeypatch.setattr(lowered, "launch_linear", lambda *given: "launched")
    out = linear_cuda(torch.ones(3, elements), torch.ones(1, elements), None, 3, "binary")
    assert out == "launched" if elements else torch.equal(out, torch.zeros(3, 1))


def test_groups_that_do_not_divide_are_the_dense_operators_business():
    x, w, b = (tensor.detach() for tensor in sample())
    for weight, bias, groups in ((w[:, :5], b, 3), (w[:7, :8], b[:7], 2)):
        with pytest.raises(RuntimeError, match="groups"):
            conv_cuda(x, weight, bias, [1, 1], [0, 0], [1, 1], groups, 3, "binary")


@pytest.mark.parametrize("size", [(), (16,), (3, 16), (2, 3, 16)])
def test_a_linear_layer_of_any_dimensions(size, monkeypatch):
    from sparsecomp.lowering.spiking import spike_conv as lowered
    monkeypatch.setattr(lowered, "launch_linear", lambda *given: "kernel")
    if not size:
        with pytest.raises(RuntimeError):
            linear_cuda(torch.ones(size), torch.ones(4, 16), None, 3, "binary")
        return
    assert linear_cuda(torch.ones(size), torch.ones(4, 16), None, 3, "binary") == "kernel"


@pytest.mark.quick_cases(8)
@pytest.mark.parametrize(("scale", "factor"), [(1.0, None), (0.5, None), (1.0, 3.0)])
@pytest.mark.parametrize("layer", ["linear", "conv"])
def test_gradients_of_counts_in_bytes_are_those_of_their_products(layer, scale, factor):
    """By hand, as a plain product with what the bytes stand for."""
    counts = torch.tensor([[1, 0, 1], [0, 1, 1]], dtype=torch.int8)
    x = counts.double() * (scale if factor is None else factor)
    weight = torch.arange(12.0).view(4, 3).requires_grad_()
    named = {"scale": scale, "factor": None if factor is None else torch.tensor(factor), "binary": factor is not None}
    if layer == "linear":
        out = ops.spike_linear(counts, weight, None, 3, "binary", **named)
    else:
        window = [1, 1], [0, 0], [1, 1], 1
        out = ops.spike_conv(counts[..., None, None], weight[..., None, None], None, *window, 3, "binary", **named)
    grad = torch.arange(8.0).view(2, 4) - 3
    torch.testing.assert_close(out.flatten(1).double(), x @ weight.double().T)
    out.backward(grad.view(out.shape))
    torch.testing.assert_close(weight.grad.double(), grad.double().T @ x)


@interpreted
@pytest.mark.parametrize("implementation", ["binary", "direct", "event", "skip"])
@pytest.mark.parametrize("size", [(2, 3, 0, 8), (2, 3, 8, 1)])
def test_a_window_that_has_no_place_is_an_error_as_in_eager(size, implementation):
    x, w, window = torch.ones(size), torch.randn(4, 3, 3, 4), ([1, 1], [1, 1], [1, 1])
    with pytest.raises(RuntimeError, match="Kernel size can't be greater"):
        F.conv2d(x, w, None, *window)
    with pytest.raises(InputError, match="would give maps of"):
        conv_cuda(x, w, None, *window, 1, 3, implementation)
