"""The residual block as one operator, held against dense layers in float64 and torch's own norms and gradients."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sparsecomp.errors import FormatError
from sparsecomp.ops import residual_block
from sparsecomp.reference.local.transposed import transposed_lists

pytestmark = pytest.mark.quick_cases(2)

TOLERANCE = {torch.float64: 1e-12, torch.float32: 4e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
N = 7


def problem(
    rows: tuple[int, ...] = (3,), k: int = 3, norm: str = "rms", activation: str = "sine_abs", bias: bool = True,
    dtype: torch.dtype = torch.float64, by_sample: bool = False,
) -> tuple[list[Any], dict[str, Any]]:  # fmt: skip
    """Arguments of the operator; both layers have a pattern of their own."""
    random = torch.Generator().manual_seed(k + len(rows))

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float64).to(dtype)

    indices = [torch.randint(N, (N, k + more), generator=random, dtype=torch.int32) for more in (0, 1)]
    first, second = ([drawn(*index.shape), drawn(N)][: 1 + bias] for index in indices)
    norms = {"rms": [drawn(N)], "layer": [drawn(N), drawn(N)], "none": []}[norm]
    sine = [drawn(N).abs() + 0.1 for _ in range(4)] if activation.startswith("sine") else []
    lists = [[index, *transposed_lists(index, N)] for index in indices]
    scale = drawn(rows[0], *[1] * len(rows)) if by_sample else drawn(1)
    return [drawn(*rows, N), first, second, scale, *lists], {
        "norm": norms, "kind": norm, "eps": 1e-3, "sine": sine, "activation": activation
    }  # fmt: skip


def exactly(arguments: list[Any], settings: dict[str, Any]) -> Tensor:
    """By dense layers and torch's norms."""
    x, first, second, scale, (first_index, *_), (second_index, *_) = arguments
    kind, norm, z = settings["kind"], settings["norm"], x.double()
    if kind == "rms":
        z = F.rms_norm(z, (N,), norm[0].double(), settings["eps"])
    elif kind == "layer":
        z = F.layer_norm(z, (N,), *(one.double() for one in norm), settings["eps"])
    z = dense(z, first, first_index)
    name, _, decays = settings["activation"].partition("_")
    if name == "sine":
        amplitude, frequency, decay, phase = (one.double() for one in settings["sine"])
        by = {"abs": z.abs(), "relu": F.relu(z), "none": 0 * z}[decays]
        z = amplitude * torch.exp(-decay * by) * torch.sin(frequency * z + phase)
    else:
        z = {"relu": F.relu, "gelu": F.gelu, "tanh": torch.tanh}[name](z)
    return x.double() + scale.double() * dense(z, second, second_index)


def dense(x: Tensor, layer: list[Tensor], index: Tensor) -> Tensor:
    weight = torch.zeros(N, N, dtype=torch.float64).scatter_add(1, index.long(), layer[0].double())
    return F.linear(x, weight, layer[1].double() if layer[1:] else None)


def tensors_of(arguments: list[Any], settings: dict[str, Any]) -> list[Tensor]:
    """All that a gradient flows to, which from now on takes one."""
    x, first, second, scale, *_ = arguments
    found = [x, *first, *second, scale, *settings["norm"], *settings["sine"]]
    return [one.requires_grad_() for one in found]


ACTIVATIONS = ("relu", "tanh", "gelu", "sine_abs", "sine_relu", "sine_none")


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows", [(), (0,), (1,), (2, 3), (40,)], ids=str)
@pytest.mark.parametrize(("norm", "bias", "k"), [("rms", True, 1), ("layer", False, 3), ("none", True, 9)])
def test_it_is_the_block_of_dense_layers(norm, bias, k, rows, dtype):
    arguments, settings = problem(rows, k, norm, bias=bias, dtype=dtype)
    found, right = residual_block(*arguments, **settings), exactly(arguments, settings)
    assert found.dtype is dtype and found.shape == right.shape and found.is_contiguous()
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(found.double(), right, rtol=tolerance, atol=tolerance * 8)


@pytest.mark.parametrize("by_sample", [True, False])
@pytest.mark.parametrize(
    ("activation", "norm", "bias"), [*((one, "rms", True) for one in ACTIVATIONS), ("relu", "layer", False),
                                     ("sine_abs", "layer", True), ("gelu", "none", True)],
)  # fmt: skip
def test_gradients_are_those_of_dense_layers(activation, norm, bias, by_sample):
    arguments, settings = problem((4, 3), 3, norm, activation, bias, by_sample=by_sample)
    tensors = tensors_of(arguments, settings)
    found, right = residual_block(*arguments, **settings), exactly(arguments, settings)
    torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-12)
    grad = torch.randn_like(right)
    for one, other in zip(
        torch.autograd.grad(found, tensors, grad), torch.autograd.grad(right, tensors, grad), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("activation", "norm"), [("sine_abs", "rms"), ("tanh", "layer"), ("gelu", "none")])
def test_double_gradients_are_those_of_dense_layers(activation, norm):
    arguments, settings = problem((4,), 3, norm, activation, by_sample=True)
    tensors, random = tensors_of(arguments, settings), torch.Generator().manual_seed(0)
    twice = []
    for out in (residual_block(*arguments, **settings), exactly(arguments, settings)):
        first = torch.autograd.grad(out.square().sum(), tensors, create_graph=True)
        weights = [torch.randn(one.shape, generator=random.manual_seed(1), dtype=one.dtype) for one in first]
        total = sum((one * weight).sum() for one, weight in zip(first, weights, strict=True))
        twice.append(torch.autograd.grad(total, tensors))
    for one, other in zip(*twice, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_any_strides():
    arguments, settings = problem((40,), dtype=torch.float32)
    x = arguments[0]
    for lying in (x.mT.contiguous().mT, x.repeat(1, 2)[::2, :N], x[:1].expand(40, N)):
        found = residual_block(lying, *arguments[1:], **settings)
        torch.testing.assert_close(found.double(), exactly([lying, *arguments[1:]], settings), rtol=4e-6, atol=3e-5)


def test_autocast_computes_layers_as_torch_would():
    arguments, settings = problem((40,), dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = residual_block(*arguments, **settings)
    right = exactly(arguments, settings)
    assert found.dtype is torch.float32 and 1e-5 < (found.double() - right).norm() / right.norm() < 3e-2


def test_torch_checks_the_operator():
    arguments, settings = problem((2, 3))
    x, first, second, scale, first_index, second_index = arguments
    tensors_of(arguments, settings)
    given = (x, settings["norm"], first, settings["sine"], second, scale, first_index, second_index)
    torch.library.opcheck(torch.ops.sparsecomp.residual_block.default, (*given, "rms", 1e-3, "sine_abs", "far", True))


def test_transforms_of_torch_func():
    (x, *rest), settings = problem((3,))

    def block(x: Tensor) -> Tensor:
        return residual_block(x, *rest, **settings)

    def exact(x: Tensor) -> Tensor:
        return exactly([x, *rest], settings)

    torch.testing.assert_close(torch.func.vmap(block)(x), exact(x), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.func.jacrev(block)(x[0]), torch.func.jacrev(exact)(x[0]), rtol=1e-10, atol=1e-10)
    along = [torch.func.jvp(one, (x,), (x.cos(),))[1] for one in (block, exact)]
    torch.testing.assert_close(*along, rtol=1e-10, atol=1e-10)
    mapped = [torch.func.vmap(torch.func.grad(lambda row, one=one: one(row).sum()))(x) for one in (block, exact)]
    torch.testing.assert_close(*mapped, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "batch"}, "one of rms, layer, none"),
        ({"activation": "sine"}, "one of relu, tanh"),
        ({"sine": []}, "may have phi"),
        ({"norm": [torch.zeros(5)]}, r"need \(7,\) each"),
        ({"scale": torch.zeros(5, dtype=torch.float64)}, "one number, or one for each"),
        ({"scale": torch.zeros(1)}, "of torch.float64"),
        ({"first": [torch.zeros(7, 3)]}, "weights one dtype"),
        ({"first_index": [torch.zeros(7, 3, dtype=torch.int64)]}, "indices int32"),
        ({"second_index": [torch.zeros(6, 4, dtype=torch.int32)]}, r"need \(7, k\)"),
    ],
    ids=lambda one: next(iter(one)) if isinstance(one, dict) else "",
)
def test_operands_that_do_not_fit(change, message):
    arguments, settings = problem()
    names = ("x", "first", "second", "scale", "first_index", "second_index")
    with pytest.raises(FormatError, match=message):
        residual_block(**dict(zip(names, arguments, strict=True)) | settings | change)
