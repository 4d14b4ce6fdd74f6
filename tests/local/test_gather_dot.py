"""The operator of fixed fan-in, held against a dense layer whose weight has the k weights scattered, in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sparsecomp.errors import FormatError
from sparsecomp.ops import gather_dot
from sparsecomp.reference.local.transposed import kept_lists, lists_fit, transposed_lists

pytestmark = pytest.mark.quick_cases(2)

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def problem(inputs: int = 13, outputs: int = 11, k: int = 5, dtype: torch.dtype = torch.float64, rows: tuple = (3,)):
    """x, weight, index and bias; inputs repeat within a row, and some input is read by nobody."""
    generator = torch.Generator().manual_seed(inputs * outputs + k)
    index = torch.randint(0, max(inputs - 1, 1), (outputs, k), generator=generator, dtype=torch.int32)
    index[0] = index[0, 0]
    x, weight, bias = (
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        for shape in ((*rows, inputs), (outputs, k), (outputs,))
    )
    return x, weight, index, bias


def scattered(weight: Tensor, index: Tensor, inputs: int) -> Tensor:
    """The dense weight (outputs, inputs)."""
    dense = weight.new_zeros(index.shape[0], inputs, dtype=torch.float64)
    return dense.scatter_add(1, index.long(), weight.double())


def close(found: Tensor, right: Tensor, dtype: torch.dtype) -> None:
    assert found.dtype is dtype and found.shape == right.shape
    torch.testing.assert_close(found.double(), right, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * 4)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows", [(), (0,), (1,), (2, 3), (40,), (300,)], ids=str)
@pytest.mark.parametrize("k", [1, 5])
def test_it_is_a_dense_layer(k, rows, dtype):
    x, weight, index, bias = problem(k=k, dtype=dtype, rows=rows)
    right = F.linear(x.double(), scattered(weight, index, 13), bias.double())
    found = gather_dot(x, weight, index, bias, transposed=transposed_lists(index, 13))
    close(found, right, dtype)
    assert found.is_contiguous()


def test_all_inputs_are_a_dense_layer():
    x, weight, _, bias = problem(13, 11, 13)
    index = torch.arange(13, dtype=torch.int32).repeat(11, 1)
    torch.testing.assert_close(gather_dot(x, weight, index, bias), F.linear(x, weight, bias), rtol=1e-12, atol=1e-12)


def test_any_strides():
    x, weight, index, bias = problem(14, rows=(40,))
    for lying in (x.mT.contiguous().mT, x.repeat(1, 2)[::2, ::2], x[:1].expand(40, 14)):
        assert not lying.is_contiguous()
        right = F.linear(lying, scattered(weight, index, 14), bias)
        torch.testing.assert_close(gather_dot(lying, weight, index, bias), right, rtol=1e-12, atol=1e-12)


ACTIVATIONS = {
    "none": lambda y: y, "relu": F.relu, "gelu": F.gelu, "silu": F.silu, "sigmoid": torch.sigmoid, "tanh": torch.tanh,
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_are_a_dense_layers(activation):
    x, weight, index, bias = (one.requires_grad_(one.is_floating_point()) for one in problem(rows=(2, 20)))
    residual = torch.randn(2, 20, 11, dtype=torch.float64, requires_grad=True)
    lists = transposed_lists(index, 13)
    found = gather_dot(x, weight, index, bias, residual=residual, transposed=lists, activation=activation)
    right = ACTIVATIONS[activation](F.linear(x, scattered(weight, index, 13), bias) + residual)
    torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-12)
    grad, operands = torch.randn_like(right), (x, weight, bias, residual)
    for one, other in zip(
        torch.autograd.grad(found, operands, grad), torch.autograd.grad(right, operands, grad), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("kept", [True, False])
def test_gradients_by_finite_differences(kept):
    x, weight, index, bias = problem(5, 4, 3, rows=(2,))
    lists = transposed_lists(index, 5) if kept else ()
    operands = [one.requires_grad_() for one in (x, weight, bias)]

    def layer(x, weight, bias):
        return gather_dot(x, weight, index, bias, transposed=lists)

    assert torch.autograd.gradcheck(layer, operands)
    assert torch.autograd.gradgradcheck(layer, operands)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_are_summed_in_float32(dtype):
    index = torch.arange(4096, dtype=torch.int32)[None]
    x, weight = torch.ones(1, 4096, dtype=dtype), torch.ones(1, 4096, dtype=dtype)
    weight[0, 0] = 2**-7  # a sum of halves would stop growing long before 4095
    assert gather_dot(x, weight, index).item() == torch.tensor(4095.0078125).to(dtype).item()


def test_autocast_is_that_of_a_linear_layer():
    x, weight, index, bias = problem(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = gather_dot(x, weight, index, bias)
        assert found.dtype is F.linear(x, weight.new_zeros(11, 13)).dtype is torch.bfloat16
    close(found, F.linear(x.double(), scattered(weight, index, 13), bias.double()), torch.bfloat16)


def test_torch_checks_the_operators():
    x, weight, index, bias = problem(rows=(2, 3))
    lists, grad = list(transposed_lists(index, 13)), torch.randn(2, 3, 11, dtype=torch.float64)
    x, weight, grad = x.requires_grad_(), weight.requires_grad_(), grad.requires_grad_()
    ops = torch.ops.sparsecomp
    torch.library.opcheck(ops.gather_dot.default, (x, weight, index, bias, None, lists, "gelu", "far"))
    for some in (lists, list(kept_lists(index, 13))):
        torch.library.opcheck(ops.gather_dot_input.default, (grad, weight, index, some, 13))
    torch.library.opcheck(ops.gather_dot_weight.default, (x, grad, index, lists))


def test_transforms_of_torch_func():
    x, weight, index, _ = problem(5, 4, 3)

    def layer(x):
        return gather_dot(x, weight, index)

    dense = scattered(weight, index, 5)
    torch.testing.assert_close(torch.func.jacrev(layer)(x[0]), dense, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.func.vmap(layer)(x), x @ dense.T, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.func.jvp(layer, (x,), (x,))[1], x @ dense.T, rtol=1e-12, atol=1e-12)


def test_transposed_lists_are_the_transpose():
    _, _, index, _ = problem(13, 11, 5)
    pointers, order = transposed_lists(index, 13)
    for column in range(13):
        places = order[pointers[column] : pointers[column + 1]].tolist()
        assert places == [place for place, read in enumerate(index.flatten().tolist()) if read == column]
    assert lists_fit(index, 13, (pointers, order)) and not lists_fit(index, 14, (pointers, order))
    assert not lists_fit(index[1:], 13, (pointers, order))


def test_lists_of_another_index_are_not_believed():
    x, weight, index, _ = problem(rows=(40,))
    grad = torch.randn(40, 11, dtype=torch.float64)
    others = index.flip(1, 0), index[1:], torch.cat([index, index])
    for stale in ([*kept_lists(others[0], 13)], *([*make(one, 13)] for make in (kept_lists, transposed_lists)
                                                  for one in others[1:])):  # fmt: skip
        found = torch.ops.sparsecomp.gather_dot_input(grad, weight, index, stale, 13)
        torch.testing.assert_close(found, grad @ scattered(weight, index, 13), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"index": torch.zeros(11, 5, dtype=torch.int64)}, "int32"),
        ({"index": torch.zeros(11, 4, dtype=torch.int32)}, r"\(n_out, k\)"),
        ({"weight": torch.zeros(11, 5)}, "one floating dtype"),
        ({"bias": torch.zeros(5)}, "bias and residual"),
        ({"residual": torch.zeros(3, 5)}, "bias and residual"),
        ({"transposed": [torch.zeros(3)]}, "pointers and order"),
        ({"activation": "sine"}, "needs one of none, relu"),
    ],
    ids=lambda one: next(iter(one)) if isinstance(one, dict) else "",
)
def test_operands_that_do_not_fit(change, message):
    x, weight, index, bias = problem()
    with pytest.raises(FormatError, match=message):
        gather_dot(**{"x": x, "weight": weight, "index": index, "bias": bias} | change)
