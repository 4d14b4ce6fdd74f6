"""Sparse layers: what they keep of dense ones, and that whatever torch does with parameters it does with theirs.

A layer's weight is an ordinary parameter of its stored values, so each test compares it with a dense layer whose
gradient is masked, or with the same layer elsewhere.
"""

import copy
import gc
import io
import pickle
import socket
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
import torch.nn.functional as F
from matrices import of_every_format
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import swa_utils

from sparsecomp import SparseTensor, load_state_dict, optimize
from sparsecomp.errors import CheckpointError, FormatError, InputError, MaskError
from sparsecomp.formats import BCSC, BITMAP, BSR, COO, CSC, CSR, NARROW, NM, SparseMatrix
from sparsecomp.nn import SparseEmbedding, SparseLinear, wrap_module

pytestmark = pytest.mark.quick_cases(2)

LAYOUTS: dict[type[SparseMatrix], dict[str, Any]] = of_every_format({
    CSR: {"sparsity": 0.5}, CSC: {"sparsity": 0.5}, COO: {"sparsity": 0.5}, BSR: {"block": (2, 4), "sparsity": 0.5},
    BCSC: {"block": 2, "sparsity": 0.5}, NM: {"n": 2, "m": 4}, NARROW: {"sparsity": 0.5}, BITMAP: {"sparsity": 0.5},
})  # fmt: skip


def largest(weight: Tensor, kept: int) -> Tensor:
    """The weight with its `kept` largest elements."""
    bound = weight.abs().flatten().sort(descending=True).values[kept - 1]
    return weight * (weight.abs() >= bound)


def dense_of(layer: SparseLinear | SparseEmbedding, values: Tensor | None = None) -> Tensor:
    """The layer's weight, or other values at its places, written out."""
    weight = layer.weight.detach()
    return (weight if values is None else weight.with_values(values.detach())).to_dense()


def mask_of(layer: SparseLinear | SparseEmbedding) -> Tensor:
    return dense_of(layer, torch.ones_like(layer.values))


# -- from dense layers


@pytest.mark.parametrize("format", [COO, CSR, CSC])
def test_a_linear_layer_keeps_its_largest_weights(format):
    linear = nn.Linear(10, 8).eval()
    layer = SparseLinear.from_linear(linear, format, sparsity=0.7)
    wanted = largest(linear.weight.detach(), 24)
    assert torch.equal(dense_of(layer), wanted)
    assert layer.bias is linear.bias and not layer.training and layer.format == format.__name__
    x = torch.randn(2, 3, 10)
    torch.testing.assert_close(layer(x), F.linear(x, wanted, linear.bias))
    assert SparseLinear.from_linear(nn.Linear(4, 4, bias=False), sparsity=1.0)(torch.ones(2, 4)).eq(0).all()


@pytest.mark.parametrize("format", [BSR, BCSC])
def test_a_linear_layer_keeps_its_largest_blocks(format):
    linear = nn.Linear(10, 7)
    layer = SparseLinear.from_linear(linear, format, sparsity=0.5, block=(2, 4))
    weight = linear.weight.detach()
    norms = [[float(weight[2 * i : 2 * i + 2, 4 * j : 4 * j + 4].norm()) for j in range(3)] for i in range(4)]
    bound = sorted(sum(norms, []), reverse=True)[5]
    for i in range(4):
        for j in range(3):
            block = dense_of(layer)[2 * i : 2 * i + 2, 4 * j : 4 * j + 4]
            dense = weight[2 * i : 2 * i + 2, 4 * j : 4 * j + 4]
            assert torch.equal(block, dense if norms[i][j] >= bound else torch.zeros_like(dense))
    x = torch.randn(3, 10)
    torch.testing.assert_close(layer(x), F.linear(x, dense_of(layer), linear.bias))


def test_a_linear_layer_keeps_two_of_four():
    linear = nn.Linear(10, 6)
    layer = SparseLinear.from_linear(linear, NM, n=2, m=4)
    kept, weight = dense_of(layer), linear.weight.detach()
    for row in range(6):
        for start in (0, 4, 8):
            group = weight[row, start : start + 4]
            places = set(group.abs().sort(descending=True).indices[:2].tolist())
            assert set(kept[row, start : start + 4].nonzero().flatten().tolist()) == places
    x = torch.randn(3, 10)
    torch.testing.assert_close(layer(x), F.linear(x, kept, linear.bias))


def test_a_mask_says_what_is_stored_even_where_the_weight_is_zero():
    linear = nn.Linear(4, 4)
    with torch.no_grad():
        linear.weight[0] = 0
    layer = SparseLinear.from_linear(linear, mask=torch.eye(4))
    assert torch.equal(dense_of(layer), linear.weight.detach() * torch.eye(4))
    layer(torch.ones(1, 4)).sum().backward()
    assert torch.equal(dense_of(layer, layer.values.grad), torch.eye(4))


def test_arguments_that_do_not_fit():
    linear = nn.Linear(8, 8)
    for arguments, message in (
        ({}, "one of them"),
        ({"mask": torch.eye(8), "sparsity": 0.5}, "one of them"),
        ({"sparsity": 1.5}, "0 to 1"),
        ({"format": NM, "n": 2, "m": 4, "sparsity": 0.5}, "leave it out"),
        ({"mask": torch.eye(4)}, r"mask has shape \(4, 4\), needs to be a tensor of the weight's shape \(8, 8\)"),
        ({"mask": [1, 0]}, "mask is a list, needs to be a tensor"),
        ({"format": BSR, "sparsity": 0.5}, "BSR needs block="),
        ({"format": BSR, "block": (2, 2), "mask": torch.eye(8)}, "cuts through blocks"),
        ({"format": NM, "n": 1, "m": 4, "mask": torch.ones(8, 8)}, "at most 1"),
    ):
        with pytest.raises(FormatError, match=message):
            SparseLinear.from_linear(linear, **arguments)
    for other in (None, nn.Conv2d(4, 4, 3), nn.Embedding(4, 4)):
        with pytest.raises(FormatError, match=f"the layer is a {type(other).__name__}, needs an nn.Linear"):
            SparseLinear.from_linear(other, sparsity=0.5)  # pyright: ignore[reportArgumentType]
    with pytest.raises(FormatError, match="the layer is a Linear, needs an nn.Embedding"):
        SparseEmbedding.from_embedding(linear, sparsity=0.5)  # pyright: ignore[reportArgumentType]
    with pytest.raises(FormatError, match="padding_idx"):
        SparseEmbedding.from_embedding(nn.Embedding(4, 2, padding_idx=0), sparsity=0.5)
    with pytest.raises(FormatError, match="needs one of .*CSR"):
        SparseEmbedding.from_embedding(nn.Embedding(4, 2), BSR, block=(1, 1), sparsity=0.5)
    with pytest.raises(FormatError, match="needs a matrix"):
        SparseLinear(torch.eye(2))  # pyright: ignore[reportArgumentType]
    with pytest.raises(FormatError, match=r"needs \(\.\.\., 8\)"):
        SparseLinear.from_linear(linear, sparsity=0.5)(torch.ones(2, 7))


# -- gradients


@pytest.mark.parametrize("format", LAYOUTS)
def test_gradients_are_those_of_a_masked_layer(format):
    torch.manual_seed(0)
    layer = SparseLinear.from_linear(nn.Linear(10, 6), format, **LAYOUTS[format])
    dense = dense_of(layer).requires_grad_()
    x, other = (torch.randn(2, 3, 10, generator=torch.Generator().manual_seed(1)).requires_grad_() for _ in range(2))
    functional = lambda x: F.linear(x, layer.weight, layer.bias)  # noqa: E731
    for forward in (layer, functional, lambda x: x @ layer.weight.t() + layer.bias):
        forward(x).square().sum().backward()
        F.linear(other, dense, layer.bias.detach()).square().sum().backward()
        torch.testing.assert_close(dense_of(layer, layer.values.grad), dense.grad * mask_of(layer))
        torch.testing.assert_close(x.grad, other.grad)
        layer.zero_grad()
        x.grad = other.grad = dense.grad = None


def test_a_layer_that_learns_only_later():
    linear = nn.Linear(10, 6).requires_grad_(False)
    layer = SparseLinear.from_linear(linear, sparsity=0.5)
    assert not layer.values.requires_grad and layer.transposed_order is None
    layer.requires_grad_()
    layer(torch.ones(2, 10)).sum().backward()
    torch.testing.assert_close(dense_of(layer, layer.values.grad), 2 * mask_of(layer))


@pytest.mark.parametrize(("format", "layout"), [(CSR, {}), (COO, {}), (NM, {"n": 1, "m": 3})])
@pytest.mark.parametrize("compiled", [False, True])
def test_an_embedding_looks_rows_up_and_learns(format, layout, compiled):
    layer = SparseEmbedding.from_embedding(nn.Embedding(9, 5), format, **(layout or {"sparsity": 0.6}))
    dense = dense_of(layer).requires_grad_()
    index = torch.tensor([[0, 3, 3], [8, 1, 0]])
    call = torch.compile(layer, backend="sparsecomp", fullgraph=True) if compiled else layer
    out, factor = call(index), torch.randn(2, 3, 5)
    assert torch.equal(out, dense[index])
    (out * factor).sum().backward()
    (F.embedding(index, dense) * factor).sum().backward()
    torch.testing.assert_close(dense_of(layer, layer.values.grad), dense.grad * mask_of(layer))
    assert layer(index[:0]).shape == (0, 3, 5)


# -- optimizers

_SETTINGS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-3, "nesterov": True},
    "AdamW": {"lr": 0.01, "amsgrad": True},
    "LBFGS": {"lr": 0.5, "max_iter": 3},
}
# SparseAdam takes torch's sparse gradients only, Muon matrices only
OPTIMIZERS = sorted(
    name for name in torch.optim.__all__ if name not in ("Optimizer", "SparseAdam", "Muon")
    and isinstance(getattr(torch.optim, name), type)
)  # fmt: skip
WAYS = ("default", "foreach", "fused", "compiled", "scaled", "clipped")


class Pair:
    """A network with sparse weights, and the same with dense ones whose gradients are masked."""

    def __init__(self, format: type[SparseMatrix]) -> None:
        torch.manual_seed(0)
        layers = nn.Linear(10, 12), nn.Linear(12, 6)
        first, second = (SparseLinear.from_linear(layer, format, **LAYOUTS[format]) for layer in layers)
        self.sparse = nn.Sequential(first, nn.GELU(), second)
        self.dense = nn.Sequential(nn.Linear(10, 12), nn.GELU(), nn.Linear(12, 6))
        with torch.no_grad():
            for found, layer in ((self.dense[0], first), (self.dense[2], second)):
                found.weight.copy_(dense_of(layer))
                found.bias.copy_(layer.bias)
                mask = mask_of(layer)
                found.weight.register_hook(lambda grad, mask=mask: grad * mask)

    def losses(self, step: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(5, 10, generator=generator), torch.randn(5, 6, generator=generator)
        return [F.mse_loss(model(x), y) for model in (self.sparse, self.dense)]

    def check(self, **tolerance: float) -> None:
        for found, wanted in zip((self.sparse[0], self.sparse[2]), (self.dense[0], self.dense[2]), strict=True):
            torch.testing.assert_close(dense_of(found), wanted.weight.detach(), **tolerance)
            torch.testing.assert_close(found.bias, wanted.bias, **tolerance)


def optimizer_of(name: str, way: str, model: nn.Module) -> torch.optim.Optimizer | None:
    """None where torch's own optimizer has no such way."""
    settings = _SETTINGS.get(name, {"lr": 0.01})
    if way in ("foreach", "fused"):
        settings = {**settings, way: True}
    try:
        return getattr(torch.optim, name)(model.parameters(), **settings)
    except (TypeError, RuntimeError) as error:
        assert "foreach" in str(error) or "fused" in str(error)
        return None


def step(optimizer: torch.optim.Optimizer, loss: Callable[[], Tensor], model: nn.Module, way: str) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        found = loss()
        found.backward()
        if way == "clipped":
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        return found

    if isinstance(optimizer, torch.optim.LBFGS):
        optimizer.step(closure)
    elif way == "scaled":
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        optimizer.zero_grad()
        scaler.scale(loss()).backward()
        scaler.step(optimizer)
        scaler.update()
    else:
        closure()
        (torch.compile(optimizer.step, backend="eager") if way == "compiled" else optimizer.step)()


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_trains_as_with_a_masked_weight(name, way):
    # Adafactor's factors are of a matrix's rows and columns: on stored values it is another algorithm
    if name == "Adafactor" or (name == "LBFGS" and way in ("scaled", "clipped")):
        pytest.skip("torch's own algorithm depends on a parameter's shape, or takes no scaled step")
    pair = Pair((CSR, BSR, NM, CSC)[OPTIMIZERS.index(name) % 4])
    models = (pair.sparse, pair.dense)
    optimizers = [optimizer_of(name, way, model) for model in models]
    if optimizers[0] is None or optimizers[1] is None:
        pytest.skip(f"torch.optim.{name} has no {way}")
    for number in range(3):
        for which, (optimizer, model) in enumerate(zip(optimizers, models, strict=True)):
            step(optimizer, lambda which=which, number=number: pair.losses(number)[which], model, way)
        pair.check(rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["Adafactor", "Muon"])
def test_optimizers_of_matrices_step(name):
    pair = Pair(NM)  # whose values are a matrix
    kind = getattr(torch.optim, name)
    optimizer = kind([pair.sparse[0].values, pair.sparse[2].values], lr=0.01)
    before = pair.losses(0)[0]
    before.backward()
    optimizer.step()
    assert pair.losses(0)[0] < before


@pytest.mark.slow(reason="compiles with gradients")
@pytest.mark.parametrize("format", LAYOUTS)
@pytest.mark.parametrize("backend", ["sparsecomp", "inductor"])
@pytest.mark.slow_cases(3)
def test_compiled_training_and_evaluation_between_steps(format, backend):
    pair = Pair(format)
    eager, pair.sparse = pair.sparse, torch.compile(pair.sparse, backend=backend, fullgraph=True)
    optimizers = [torch.optim.AdamW(model.parameters(), fused=True) for model in (eager, pair.dense)]
    x = torch.randn(4, 10)
    for number in range(3):
        for which, optimizer in enumerate(optimizers):
            optimizer.zero_grad()
            pair.losses(number)[which].backward()
            optimizer.step()
        with torch.no_grad():
            torch.testing.assert_close(pair.sparse(x), eager(x))
            torch.testing.assert_close(eager(x), pair.dense(x), rtol=1e-4, atol=1e-5)


def test_float16_autocast_with_a_gradient_scaler():
    layer = SparseLinear.from_linear(nn.Linear(64, 64), sparsity=0.75)
    optimizer, scaler = torch.optim.AdamW(layer.parameters()), torch.amp.GradScaler("cpu", init_scale=256.0)
    x, before = torch.randn(4, 64), layer.values.detach().clone()
    with torch.autocast("cpu", torch.float16):
        out = layer(x)
    assert out.dtype is torch.float16
    torch.testing.assert_close(out.double(), F.linear(x.double(), dense_of(layer).double(), layer.bias.double()),
                               rtol=1e-2, atol=1e-2)  # fmt: skip
    scaler.scale(out.float().square().mean()).backward()
    scaler.step(optimizer)
    assert layer.values.grad.dtype is torch.float32 and not torch.equal(layer.values, before)
    # Adam's first step moves each value by lr, whatever its gradient, and decays it by lr · 0.01
    moved = (layer.values - before * (1 - 1e-5)).abs()
    torch.testing.assert_close(moved[layer.values.grad != 0], torch.full_like(moved, 1e-3)[layer.values.grad != 0],
                               rtol=1e-2, atol=1e-6)  # fmt: skip


# -- averages, copies, moves


@pytest.mark.slow(reason="Inductor compiles")
@pytest.mark.parametrize("average", ["mean", "ema", "swa foreach", "data"])
def test_averaged_models(average):
    pair = Pair(CSR)
    how = {
        "ema": {"avg_fn": swa_utils.get_ema_avg_fn(0.5)},
        "swa foreach": {"multi_avg_fn": swa_utils.get_swa_multi_avg_fn()},
    }.get(average, {})
    averages = [swa_utils.AveragedModel(model, **how) for model in (pair.sparse, pair.dense)]
    compiled = torch.compile(averages[0].module, backend="sparsecomp")
    x = torch.randn(3, 10)
    for scale in (1.0, 3.0, 0.5):
        with torch.no_grad():
            for model, averaged in zip((pair.sparse, pair.dense), averages, strict=True):
                for parameter, kept in zip(model.parameters(), averaged.module.parameters(), strict=True):
                    parameter.mul_(scale)
                    if average == "data":
                        kept.data.lerp_(parameter.data, 0.25)
                if average != "data":
                    averaged.update_parameters(model)
            torch.testing.assert_close(compiled(x), averages[1](x))


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("move", ["double", "half", "cpu", "to_empty", "bfloat16"])
def test_moves_with_a_loss_alive(move, swap):
    layer = SparseLinear.from_linear(nn.Linear(8, 8), sparsity=0.75)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    loss = layer(torch.randn(4, 8)).square().mean()
    loss.backward()
    optimizer.step()
    dense, state = dense_of(layer), copy.deepcopy(layer.state_dict())
    del loss
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        getattr(layer, move)(**({"device": "cpu"} if move == "to_empty" else {}))
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    if move == "to_empty":
        layer.load_state_dict(state)
    assert layer.indices.dtype is torch.int32
    assert torch.equal(dense_of(layer), dense.to(layer.values.dtype))
    x = torch.randn(2, 8).to(layer.values.dtype)
    torch.testing.assert_close(layer(x), F.linear(x, dense_of(layer), layer.bias))


def test_a_layer_converts_while_its_loss_is_alive():
    layer = SparseLinear.from_linear(nn.Linear(8, 8), sparsity=0.75)
    loss = layer(torch.randn(4, 8)).square().mean()
    assert layer.double().values.dtype is torch.float64
    loss.backward()


@pytest.mark.slow(reason="compiles training")
def test_copies_train_apart():
    model = nn.Sequential(SparseLinear.from_linear(nn.Linear(8, 6), sparsity=0.5), nn.ReLU())
    compiled, x = torch.compile(model, backend="sparsecomp"), torch.randn(3, 8)
    before = compiled(x).detach()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other(x).sum().backward()
        torch.optim.SGD(other.parameters(), lr=0.1).step()
        assert torch.equal(compiled(x), before) and not torch.equal(other(x), before)
        torch.testing.assert_close(other(x), F.relu(F.linear(x, dense_of(other[0]), other[0].bias)))


@pytest.mark.slow(reason="finite differences")
@pytest.mark.parametrize("format", LAYOUTS)
def test_derivatives_of_every_order_and_mode_are_those_of_the_dense_layer(format):
    func, x, tangent = torch.func, torch.randn(8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    layers = [SparseLinear.from_linear(nn.Linear(8, 8), format, **LAYOUTS[format]).double() for _ in range(2)]
    model = nn.Sequential(layers[0], nn.Tanh(), layers[1])
    first, second = ((dense_of(layer), layer.bias) for layer in layers)

    def dense(x: Tensor) -> Tensor:
        return F.linear(F.linear(x, *first).tanh(), *second)

    def close(transform: Callable[..., Any]) -> None:
        torch.testing.assert_close(transform(model), transform(dense))

    close(lambda f: func.jvp(f, (x,), (tangent,)))
    close(lambda f: func.jacfwd(f)(x))
    close(lambda f: func.hessian(f)(x))
    close(lambda f: func.jacrev(func.jacfwd(f))(x))
    close(lambda f: func.jacrev(func.jacrev(f))(x))
    with forward_ad.dual_level():
        close(lambda f: forward_ad.unpack_dual(f(forward_ad.make_dual(x, tangent))).tangent)
    compiled = torch.compile(lambda: func.jvp(model, (x,), (tangent,)), backend="sparsecomp")
    torch.testing.assert_close(compiled(), func.jvp(dense, (x,), (tangent,)))


def test_tangents_of_values_and_of_a_tensor_product():
    layer = SparseLinear.from_linear(nn.Linear(8, 6), sparsity=0.5)
    x, tangent = torch.randn(3, 8), torch.randn(3, 8)
    values, change = layer.values.detach(), torch.randn_like(layer.values)

    def out(values: Tensor) -> Tensor:
        return torch.func.functional_call(layer, {"values": values}, (x,))

    _, pushed = torch.func.jvp(out, (values,), (change,))
    torch.testing.assert_close(pushed, out(change) - layer.bias)  # linear in the values
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(F.linear(forward_ad.make_dual(x, tangent), layer.weight)).tangent
    torch.testing.assert_close(found, tangent @ dense_of(layer).mT)


@pytest.mark.slow(reason="compiles training")
def test_one_row_without_a_batch_has_a_gradient_by_the_bias():
    layer = SparseLinear.from_linear(nn.Linear(8, 6), sparsity=0.5)
    weights = torch.randn(6)
    for call in (layer, torch.compile(layer, backend="sparsecomp")):
        layer.zero_grad()
        (call(torch.randn(8)) * weights).sum().backward()
        torch.testing.assert_close(layer.bias.grad, weights)


def test_transforms_of_an_embedding():
    table = SparseEmbedding.from_embedding(nn.Embedding(5, 4), sparsity=0.5)
    values, index = table.values.detach(), torch.tensor([1, 3, 3])

    def loss(values: Tensor) -> Tensor:
        return torch.func.functional_call(table, {"values": values}, (index,)).square().sum()

    found = torch.func.grad(loss)(values)
    table(index).square().sum().backward()
    torch.testing.assert_close(found, table.values.grad)
    torch.testing.assert_close(torch.func.jvp(loss, (values,), (values,))[1], 2 * loss(values))  # Euler's theorem


@pytest.mark.parametrize("format", [BSR, BCSC])
@pytest.mark.parametrize("size", [(0, 8), (8, 0), (0, 0)])
def test_blocks_of_a_layer_without_features(format, size):
    layer = SparseLinear.from_linear(nn.Linear(*size), format, block=4, sparsity=0.5)
    torch.testing.assert_close(layer(torch.randn(3, size[0])), layer.bias.expand(3, size[1]))


def test_a_format_that_is_no_class_is_named():
    with pytest.raises(FormatError, match="format is 'csr', needs a class"):
        SparseLinear.from_linear(nn.Linear(8, 6), "csr", sparsity=0.5)  # pyright: ignore


def test_functional_call_and_transforms():
    model = SparseLinear.from_linear(nn.Linear(8, 6), sparsity=0.5)
    x = torch.randn(3, 8)
    doubled = {name: 2 * value.detach() for name, value in model.named_parameters()}
    out = torch.func.functional_call(model, doubled, (x,))
    torch.testing.assert_close(out, 2 * model(x))
    parameters = {name: value.detach() for name, value in model.named_parameters()}

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, parameters, (x,)).square().sum()

    found = torch.func.grad(loss)(parameters)
    model(x).square().sum().backward()
    torch.testing.assert_close(found["values"], model.values.grad)
    rows = torch.func.jacrev(lambda x: model(x))(x[0])
    torch.testing.assert_close(rows, dense_of(model))
    torch.testing.assert_close(torch.func.vmap(model)(x), model(x))
    compiled = torch.compile(lambda parameters: torch.func.grad(loss)(parameters), backend="sparsecomp")
    torch.testing.assert_close(compiled(parameters)["values"], model.values.grad)


def test_values_are_swapped_after_compiling():
    model, x = SparseLinear.from_linear(nn.Linear(8, 6), sparsity=0.5), torch.randn(3, 8)
    compiled = torch.compile(model, backend="sparsecomp")
    with torch.no_grad():
        compiled(x)
        torch.utils.swap_tensors(model.values, nn.Parameter(torch.zeros_like(model.values)))
        torch.testing.assert_close(compiled(x), model.bias.expand(3, 6))


# -- files and processes


def build(seed: int, format: type[SparseMatrix] = CSR) -> nn.Sequential:
    torch.manual_seed(seed)
    first = SparseLinear.from_linear(nn.Linear(8, 6), format, **LAYOUTS[format])
    return nn.Sequential(first, nn.ReLU(), nn.Linear(6, 2))


@pytest.mark.parametrize("format", LAYOUTS)
def test_a_freshly_built_model_takes_a_checkpoint_with_its_pattern(format, tmp_path):
    one, x = build(0, format), torch.randn(3, 8)
    torch.save(one.state_dict(), tmp_path / "model.pt")
    save_file(one.state_dict(), tmp_path / "model.safetensors")
    dcp.save(one.state_dict(), checkpoint_id=tmp_path / "distributed")
    distributed = build(1, format)
    same = copy.deepcopy(one.state_dict())
    dcp.load(same, checkpoint_id=tmp_path / "distributed")
    pickled = torch.load(tmp_path / "model.pt", weights_only=True)
    for state in (pickled, load_file(tmp_path / "model.safetensors"), same):
        for how in ({}, {"assign": True}):
            other = build(1, format)
            other.load_state_dict(state, **how)
            assert torch.equal(other(x), one(x)) and not torch.equal(distributed(x), one(x))
            other(x).sum().backward()
            one.zero_grad()
            one(x).sum().backward()
            torch.testing.assert_close(other[0].values.grad, one[0].values.grad)


def test_checkpoints_of_version_0_1_hold_a_sparse_tensor():
    one, other = build(0), build(1)
    state = {"0.weight": nn.Parameter(one[0].weight.detach()), **{
        name: value for name, value in one.state_dict().items() if not name.startswith("0.") or name == "0.bias"
    }}  # fmt: skip
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    x = torch.randn(3, 8)
    assert torch.equal(other(x), one(x))
    with pytest.raises(FormatError, match="both weight and values"):
        other.load_state_dict({**one.state_dict(), "0.weight": torch.zeros(6, 8)})


@pytest.mark.parametrize("format", LAYOUTS)
def test_a_dense_checkpoint_loads_by_the_layers_mask(format):
    dense, sparse, x = nn.Linear(8, 6), build(0, format)[0], torch.randn(3, 8)
    stored = sparse.weight.detach().with_values(torch.ones_like(sparse.values)).to_dense() != 0
    with pytest.warns(UserWarning, match=f"^weight: {int((~stored).sum())} non-zero weights .* dropped"):
        sparse.load_state_dict(dense.state_dict())
    assert torch.equal(sparse.weight.to_dense(), dense.weight * stored)
    with torch.no_grad():
        dense.weight.mul_(stored)
    load_state_dict(sparse, dense.state_dict(), strict_pattern=True)  # drops nothing: no warning, no refusal
    torch.testing.assert_close(sparse(x), nn.functional.linear(x, dense.weight * stored, dense.bias))
    sparse(x).sum().backward()
    model = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2))
    whole = build(0, format)
    state = {name: value for name, value in whole.state_dict().items() if not name.startswith("0.")}
    whole.load_state_dict(state | {f"0.{name}": value for name, value in dense.state_dict().items()})
    assert torch.equal(whole[0](x), sparse(x)) and len(model) == 3


@pytest.mark.parametrize("format", LAYOUTS)
def test_a_strict_pattern_refuses_another(format):
    one, other = build(0, format), build(1, format)
    before = copy.deepcopy(one.state_dict())
    state = {name[2:]: value for name, value in other.state_dict().items() if name.startswith("0.")}
    with pytest.raises(FormatError, match="^the layer: .* as many, but its indices differ"):
        load_state_dict(one[0], state, strict_pattern=True)
    if format is not NM:
        fewer = SparseLinear.from_linear(nn.Linear(8, 6), format, **LAYOUTS[format] | {"sparsity": 0.9}).state_dict()
        sizes = rf"values \({fewer['values'].shape[0]}.*the layer's are values \({one[0].values.shape[0]}"
        with pytest.raises(FormatError, match=sizes):
            load_state_dict(one[0], fewer, strict_pattern=True)
    one[0].strict_pattern = True
    for load in (lambda state: one.load_state_dict(state), lambda state: load_state_dict(one, state)):
        with pytest.raises(FormatError, match="strict"):
            load(other.state_dict())
        assert all(torch.equal(value, before[name]) for name, value in one.state_dict().items())
        load({**before, "0.values": before["0.values"] * 2})
        assert torch.equal(one[0].values, before["0.values"] * 2)
        load(before)
    one[0].strict_pattern = False
    load_state_dict(one[0], state)
    x = torch.randn(3, 8)
    assert torch.equal(one[0](x), other[0](x))


def deep(seed: int) -> nn.Sequential:
    """Sparse, plain, sparse and resurrectable layers."""
    last = SparseLinear.from_linear(nn.Linear(4, 8), sparsity=0.5)
    model = nn.Sequential(build(seed), nn.BatchNorm1d(2), nn.Linear(2, 4), last, wrap_module(nn.Linear(8, 3)))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for one in model.parameters():
            one.copy_(torch.randn(one.shape, generator=generator))
    mask = torch.rand(3, 8, generator=generator) < 0.5
    cast(Any, model[4]).masked.prune_(model[4].weight, mask)
    return model.eval()


REFUSED: dict[str, tuple[Callable[[dict[str, Tensor]], Any], dict[str, Any], type[Exception], str]] = {
    "another pattern": (lambda state: state, {"strict_pattern": True}, FormatError, "pattern is strict"),
    "another shape of the last sparse layer": (
        lambda state: state | {"3.indices": state["3.indices"] + 4}, {}, FormatError, "no CSR matrix"
    ),
    "a mask": (lambda state: state | {"4.masked.mask.mask": torch.full((3, 8), 2)}, {}, MaskError, "other than 0"),
    "another size": (lambda state: state | {"2.bias": torch.ones(3)}, {}, CheckpointError, r"2.bias has shape \(3,"),
    "no tensor": (lambda state: state | {"2.bias": 3}, {}, CheckpointError, "2.bias is a int"),
    "too little": (
        lambda state: {name: one for name, one in state.items() if name != "2.bias"}, {}, CheckpointError,
        "lacks 2.bias",
    ),
    "sparse layers for dense ones": (
        lambda state: {"2.values" if name == "2.weight" else name: one for name, one in state.items()}, {},
        CheckpointError, "sparse in the checkpoint, dense in the model: 2; sparsify",
    ),
    "too much": (lambda state: state | {"5.bias": torch.ones(3)}, {}, CheckpointError, "no place for 5.bias"),
    "no state": (lambda state: [*state], {}, InputError, "state is a list"),
    "a name that is none": (lambda state: state | {3: torch.ones(3)}, {}, CheckpointError, "key 3, needs names"),
    "a batch too many": (lambda state: state | {"3.values": state["3.values"][None]}, {}, FormatError, "^3: .*values"),
    "a batch of a tensor without contents": (
        lambda state: state | {"3.values": state["3.values"][None].to("meta")}, {"assign": True}, FormatError,
        "^3: .*values",
    ),
} | {
    f"{name} {what}": (
        lambda state, name=name, change=change: state | {name: change(state[name])}, {}, CheckpointError,
        f"^{name} is a .*{message}.* Nothing was loaded",
    )
    for name in ("1.weight", "3.values", "3.indices", "3.bias", "4.masked.code")
    for what, change, message in (
        ("without contents", lambda one: one.to("meta"), "meta tensor.*assign=True"),
        ("quantized", lambda one: torch.quantize_per_tensor(one.float(), 0.1, 0, torch.qint8), "quantized"),
        ("of torch's sparse layout", lambda one: one.to_sparse(), "torch.sparse_coo"),
        ("of a text", lambda one: "text", "str, needs a tensor"),
        ("of a list", lambda one: [1.0], "list, needs a tensor"),
        ("of nothing", lambda one: None, "NoneType, needs a tensor"),
    )
}  # fmt: skip


@pytest.mark.quick_cases(len(REFUSED))
@pytest.mark.parametrize("fault", REFUSED)
def test_a_whole_model_refuses_before_it_takes_anything(fault):
    model, other = deep(0), deep(1)
    change, how, error, message = REFUSED[fault]
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(error, match=message):
        load_state_dict(model, change(dict(other.state_dict())), **how)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("how", [{}, {"assign": True}, {"strict": False}])
def test_a_whole_model_takes_what_another_had(how):
    model, other, x = deep(0), deep(1), torch.randn(3, 8)
    found = load_state_dict(model, other.state_dict(), **how)
    assert not found.missing_keys and not found.unexpected_keys and torch.equal(model(x), other(x))
    load_state_dict(model, other.state_dict(), strict_pattern=True, **how)
    part = {name: value * 0 for name, value in other.state_dict().items() if name == "2.bias"}
    assert load_state_dict(model, part | {"more": torch.ones(1)}, strict=False).unexpected_keys == ["more"]
    assert model[2].bias.eq(0).all()
    stored = ("3.values", "3.pointers", "3.indices")
    plain = {name: value for name, value in other.state_dict().items() if name not in stored}
    weight, stored = torch.randn(8, 4), mask_of(model[3])
    with pytest.warns(UserWarning, match=f"^{int((~stored.bool()).sum())} non-zero weights .* dropped"):
        load_state_dict(model, plain | {"3.weight": weight})
    assert torch.equal(dense_of(model[3]), weight * stored)
    with pytest.raises(FormatError, match="^3: the checkpoint's dense weight has 16 non-zero.*strict"):
        load_state_dict(model, plain | {"3.weight": 2 * weight}, strict_pattern=True)
    assert torch.equal(dense_of(model[3]), weight * stored)


def test_names_that_compiling_adds_do_not_count():
    x = torch.randn(3, 8)
    wrap = lambda model: torch.compile(model, backend="eager")  # noqa: E731
    for save, load in ((wrap, lambda model: model), (lambda model: model, wrap), (wrap, wrap)):
        model, other = deep(0), deep(1)
        state, target = save(other).state_dict(), load(model)
        assert not load_state_dict(target, state).missing_keys and torch.equal(model(x), other(x))
    inner, other = deep(0), deep(1)
    inner[0] = wrap(inner[0])
    load_state_dict(inner, other.state_dict())
    assert torch.equal(inner(x), other(x))
    back = deep(2)
    load_state_dict(back, inner.state_dict())
    assert torch.equal(back(x), other(x))


def test_a_checkpoint_that_does_not_fit_changes_nothing_and_names_both_sizes():
    layer = build(0)[0]
    state = layer.state_dict()
    before = copy.deepcopy(state)
    larger = SparseLinear(CSR.from_dense(torch.eye(7, 9)), torch.zeros(7)).state_dict()
    other = SparseLinear(NM.from_dense(torch.eye(6, 8), n=1, m=4), torch.zeros(6)).state_dict()
    for given, message in (
        (larger, rf"values \(7,\), pointers \(8,\).*layer's are values \({len(before['values'])},\), pointers \(7,\)"),
        ({**state, "bias": torch.zeros(3)}, r"bias has shape \(3,\), the layer's \(6,\)"),
        ({"weight": torch.zeros(8, 6), "bias": torch.zeros(6)}, r"dense \(8, 6\), the layer's CSR \(6, 8\)"),
        (other, r"torch.uint8.*values \(6, 2\).*layer's are values"),
    ):
        with pytest.raises(FormatError, match=message):
            layer.load_state_dict(given)
        assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())


@pytest.mark.parametrize("format", LAYOUTS)
def test_reductions_of_a_weight_have_gradients(format):
    layer = build(0, format)[0]
    whole = layer.weight.to_dense().detach().requires_grad_()
    stored = layer.weight.detach().with_values(torch.ones_like(layer.values)).to_dense()
    for reduce in (torch.sum, torch.mean, torch.linalg.vector_norm, lambda w: w.abs().sum()):
        layer.values.grad = whole.grad = None
        reduce(layer.weight).backward()
        reduce(whole).backward()
        found = layer.weight.detach().with_values(layer.values.grad).to_dense()
        torch.testing.assert_close(found, whole.grad * stored)


def test_an_input_that_is_no_tensor_is_named():
    layer, table = build(0)[0], SparseEmbedding(CSR.from_dense(torch.eye(3)))
    for given in (None, [1.0], "x"):
        for module in (layer, table):
            with pytest.raises(FormatError, match=f"is a {type(given).__name__}"):
                module(given)


@pytest.mark.parametrize("format", LAYOUTS)
def test_a_weights_matrix_within_compiled_code(format):
    layer, x = build(0, format)[0], torch.randn(3, 8)

    def stored(x):
        return x * layer.weight.matrix.nnz if hasattr(layer.weight, "matrix") else x

    assert torch.equal(torch.compile(stored, backend="eager")(x), x * layer.weight.matrix.nnz)


def test_a_checkpoint_that_is_no_matrix_is_refused():
    one = build(0)
    state = one.state_dict()
    before = copy.deepcopy(state)
    state = {**state, "0.indices": state["0.indices"] + 8, "0.values": state["0.values"] * 2}
    with pytest.raises(FormatError, match="ascend|lie in the shape"):
        one.load_state_dict(state)
    spare = {**before, "0.pointers": before["0.pointers"].clamp(max=20)}
    with pytest.raises(FormatError, match="compact"):
        one.load_state_dict(spare)
    assert all(torch.equal(value, before[name]) for name, value in one.state_dict().items())


def _hogwild(model: nn.Module) -> None:
    with torch.no_grad():
        model[0].values.mul_(3)


@pytest.mark.slow(reason="starts processes")
def test_shared_memory_is_read_as_another_process_writes_it():
    model, x = build(0), torch.randn(3, 8)
    compiled = torch.compile(model, backend="sparsecomp")
    with torch.no_grad():
        compiled(x)
    model.share_memory()
    worker = mp.get_context("spawn").Process(target=_hogwild, args=(model,))
    worker.start()
    worker.join()
    assert worker.exitcode == 0
    exact = F.relu(F.linear(x, 3 * dense_of(build(0)[0]), model[0].bias))
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), F.linear(exact, model[2].weight, model[2].bias))


def _process(rank: int, port: int) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    _train_as_one(rank)
    _train_sharded(rank)
    gc.collect()  # the last owner of a process group must not be DistributedDataParallel: its end would never come
    dist.destroy_process_group()


def _train_as_one(rank: int) -> None:
    model, alone = build(rank), build(0)  # the second process starts elsewhere, and must follow the first
    both = nn.parallel.DistributedDataParallel(model)
    compiled = torch.compile(model, backend="sparsecomp")
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (both, alone)]
    x = torch.randn(3, 2, 4, 8, generator=torch.Generator().manual_seed(1))
    for number in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        both(x[number, rank]).square().mean().backward()
        alone(x[number].flatten(0, 1)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
        with torch.no_grad():
            torch.testing.assert_close(compiled(x[0, 0]), alone(x[0, 0]))


def _train_sharded(rank: int) -> None:
    """FSDP2 splits the stored values among processes, an odd number of them too."""
    model, alone = build(0), build(0)
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, alone)]
    x = torch.randn(3, 2, 4, 8, generator=torch.Generator().manual_seed(1))
    for number in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(x[number, rank]).square().mean().backward()
        alone(x[number].flatten(0, 1)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    whole = cast(Any, model[0].values).full_tensor()
    torch.testing.assert_close(whole, alone[0].values.detach(), rtol=1e-4, atol=1e-6)


@pytest.mark.slow(reason="starts processes")
def test_two_processes_train_as_one_without_a_special_call():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(_process, args=(port,), nprocs=2)


def test_layers_in_a_model_survive_optimize():
    model = build(0).eval()
    x = torch.randn(3, 8)
    names = ["0.values", "0.bias", "0.pointers", "0.indices", "2.weight", "2.bias"]
    assert list(model.state_dict()) == names and "format=CSR" in repr(model)
    better = optimize(model, x)
    torch.testing.assert_close(better(x), model(x))
    assert better.report.rewritten and list(better.state_dict()) == names


def test_a_view_of_the_weight_shares_its_memory():
    layer = SparseLinear.from_linear(nn.Linear(8, 6), CSC, sparsity=0.5)
    assert isinstance(layer.weight, SparseTensor) and layer.weight.requires_grad and layer.weight.format == "CSC"
    assert layer.weight.values().data_ptr() == layer.values.data_ptr()
    (2 * layer.weight).to_dense().sum().backward()
    assert torch.equal(layer.values.grad, torch.full_like(layer.values, 2))


def test_a_meta_layer_computes_shapes():
    layer = SparseLinear.from_linear(nn.Linear(8, 6), sparsity=0.5).to("meta")
    assert layer(torch.empty(2, 3, 8, device="meta")).shape == (2, 3, 6)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("make", [
    lambda sparsity: SparseLinear.from_linear(nn.Linear(8, 6), sparsity=sparsity),
    lambda sparsity: SparseEmbedding.from_embedding(nn.Embedding(6, 8), sparsity=sparsity),
    lambda sparsity: SparseEmbedding.from_embedding(nn.Embedding(6, 8), NARROW, sparsity=sparsity),
    lambda sparsity: SparseEmbedding.from_embedding(nn.Embedding(6, 8), BITMAP, sparsity=sparsity),
])  # fmt: skip
def test_layers_on_the_meta_device_take_a_checkpoint(make, assign):
    made = make(0.5)
    layer = copy.deepcopy(make(0.75)).to("meta")
    layer = layer if assign else layer.to_empty(device="cpu")
    layer.load_state_dict({name: one.clone() for name, one in made.state_dict().items()}, assign=assign)
    assert torch.equal(dense_of(layer), dense_of(made))
    x = torch.tensor([[5, 0], [2, 2]]) if isinstance(made, SparseEmbedding) else torch.randn(3, 8)
    for one in (layer, made):
        one(x).square().sum().backward()
    torch.testing.assert_close(layer(x), made(x))
    torch.testing.assert_close(layer.values.grad, made.values.grad)


def test_a_checkpoint_of_another_size_leaves_no_gradient_of_the_old_one():
    one, other = (SparseLinear.from_linear(nn.Linear(8, 8), sparsity=sparsity) for sparsity in (0.5, 0.9))
    one(torch.ones(2, 8)).sum().backward()
    one.load_state_dict(other.state_dict())
    assert one.values.grad is None
    one(torch.ones(2, 8)).sum().backward()
    assert one.values.grad.shape == other.values.shape


def test_a_checkpoint_of_other_things_than_tensors_is_refused():
    layer = SparseLinear.from_linear(nn.Linear(8, 8), sparsity=0.5)
    before = layer.weight.detach().to_dense()
    for name, other in (("values", [1, 2]), ("bias", 3), ("indices", "x"), ("weight", 0.5)):
        with pytest.raises(FormatError, match=f"{name} must be tensors"):
            layer.load_state_dict({**layer.state_dict(), name: other})
    assert torch.equal(layer.weight.detach().to_dense(), before)


@pytest.mark.parametrize("bias", [False, True, 3, [0.0] * 6, torch.ones(5), torch.ones(6, 1)])
def test_a_bias_is_a_tensor_or_none(bias):
    matrix = CSR.from_dense(torch.eye(6, 8))
    with pytest.raises(FormatError, match=r"bias (is|has shape) .*needs \(6,\): a tensor of one number a row, or None"):
        SparseLinear(matrix, bias=bias)
    assert SparseLinear(matrix, bias=torch.ones(6)).bias.requires_grad and SparseLinear(matrix).bias is None
