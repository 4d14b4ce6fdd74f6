"""The spike ops as torch sees them: schema, fake, autograd, and the decomposition that Inductor applies."""

import pytest
import torch
import torch.nn.functional as F

import sparsecomp.ops as ops

torch.manual_seed(0)


def sample(dtype=torch.float32, bias=True):
    x = (torch.rand(2, 16, 7, 6) < 0.3).to(dtype).requires_grad_()
    w = torch.randn(8, 16, 3, 3, dtype=dtype, requires_grad=True)
    return x, w, torch.randn(8, dtype=dtype, requires_grad=True) if bias else None


WINDOW = ([1, 2], [1, 1], [1, 1], 1, 3, "binary")


@pytest.mark.parametrize("bias", [True, False])
def test_opcheck_conv2d(bias):
    torch.library.opcheck(torch.ops.sparsecomp.spike_conv2d.default, (*sample(bias=bias), *WINDOW))


def test_opcheck_linear():
    x = (torch.rand(3, 2, 32) < 0.3).float().requires_grad_()
    w, b = torch.randn(8, 32, requires_grad=True), torch.randn(8, requires_grad=True)
    torch.library.opcheck(torch.ops.sparsecomp.spike_linear.default, (x, w, b, 3, "binary"))


@pytest.mark.parametrize("shape", [(8, 16, 3, 3), (8, 40)])
def test_opcheck_pack_weight(shape):
    torch.library.opcheck(torch.ops.sparsecomp.pack_weight.default, (torch.randn(shape), 3))


def test_opcheck_packed():
    planes, scale = ops.split_weight(torch.randn(8, 16, 3, 3), 3)
    x8 = (torch.rand(2, 16, 7, 6) < 0.3).to(torch.int8).to(memory_format=torch.channels_last)
    args = (x8, planes, scale, None, [3, 3], [1, 1], [1, 1], [1, 1], 1, torch.float32, False)
    torch.library.opcheck(torch.ops.sparsecomp.spike_conv2d_packed.default, args)


def test_gradients_equal_the_dense_operators_in_float64():
    x, w, b = sample(torch.float64)
    out = ops.spike_conv2d(x, w, b, *WINDOW)
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
    decompose = ops.decompositions()[torch.ops.sparsecomp.spike_conv2d.default]
    out = decompose(x, w, b, *WINDOW)
    expected = F.conv2d(x, w, b, *WINDOW[:4])
    assert out.stride() == expected.stride()
    exact = F.conv2d(x.double(), w.double(), b.double(), *WINDOW[:4])
    assert (out - exact).norm() / exact.norm() < 1e-6


def test_mixed_devices_and_dtypes_raise_what_the_dense_operator_raises():
    x, w, b = (t.detach() for t in sample())
    with pytest.raises(RuntimeError) as ours:
        ops.spike_conv2d(x.half(), w, b, *WINDOW)
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
def test_a_second_derivative_is_refused_rather_than_wrong(layer):
    x, w, _ = sample(torch.float64)
    if layer == "linear":
        x, w = x.detach().flatten(1).requires_grad_(), w.detach().flatten(1)[:, :1].expand(8, 672).requires_grad_()
        out = ops.spike_linear(x, w, None, 3, "binary")
    else:
        out = ops.spike_conv2d(x, w, None, *WINDOW)
    torch.autograd.grad(out.sum(), w, retain_graph=True)
    with pytest.raises(NotImplementedError, match="create_graph"):
        torch.autograd.grad(out.square().sum(), w, create_graph=True)


def _misfits():
    x, w, b = (t.detach() for t in sample())
    yield "channels", (x[:, :8].contiguous(), w, b)
    yield "input dtype", (x.half(), w, b)
    yield "weight dtype", (x, w.half(), None)
    yield "bias dtype", (x, w, b.half())
    yield "bias size", (x, w, b[:4])


@pytest.mark.parametrize("operands", [pytest.param(operands, id=name) for name, operands in _misfits()])
def test_kernels_see_only_operands_that_the_dense_operator_takes(operands):
    from sparsecomp.ops.spike_conv import _cuda_conv2d, _cuda_linear

    with pytest.raises(RuntimeError) as eager:
        F.conv2d(*operands, *WINDOW[:4])
    with pytest.raises(RuntimeError) as ours:
        _cuda_conv2d(*operands, *WINDOW)
    assert str(ours.value) == str(eager.value)
    x, w, b = operands
    with pytest.raises(RuntimeError):
        _cuda_linear(x.flatten(1), w.flatten(1)[:, :5], b, 3, "binary")


def test_a_double_layer_keeps_double_precision():
    from sparsecomp.ops.spike_conv import _cuda_conv2d

    x, w, b = (t.detach() for t in sample(torch.float64))
    torch.testing.assert_close(_cuda_conv2d(x, w, b, *WINDOW), F.conv2d(x, w, b, *WINDOW[:4]), rtol=0, atol=0)
