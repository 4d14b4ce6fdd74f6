"""Layers of fixed fan-in: modes, compiled and not, checkpoints, writes to the index."""

import copy

import pytest
import torch
import torch.nn.functional as F
from kernel_devices import DEVICES, graph_of
from torch import Tensor, nn
from torch._inductor.compile_fx import compile_fx

from sparsecomp.compiler.backend import sparsecomp_backend
from sparsecomp.errors import CheckpointError, ConfigError, FormatError
from sparsecomp.nn import GeoSparseLinear, adopt_patterns, build_geo_connectivity
from sparsecomp.nn.local import linear
from sparsecomp.ops import gather_dot

MODES = ("compiled", "gather", "scatter")


def index_of(seed: int = 0, shape: tuple[int, int] = (5, 7), k: int = 4) -> Tensor:
    return build_geo_connectivity(shape, k=k, pattern="random", radius=2, seed=seed)


def layer_of(mode: str = "compiled", bias: bool = True, seed: int = 0) -> GeoSparseLinear:
    torch.manual_seed(0)
    return GeoSparseLinear(35, 35, index_of(seed), bias=bias, compute_mode=mode).double()


def dense(layer: GeoSparseLinear) -> Tensor:
    """The weight written out."""
    index = layer.in_index_per_out.long()
    return layer.weight.new_zeros(layer.out_features, layer.in_features).scatter_add(1, index, layer.weight)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_is_the_dense_layer_with_its_gradients(mode, bias, device):
    layer = layer_of(mode, bias).to(device)
    for rows in ((), (0,), (1,), (2, 3), (40,), (1000,)):
        x = torch.randn(*rows, 35, dtype=torch.float64, device=device, requires_grad=True)
        operands = (x, *layer.parameters())
        found, right = layer(x), F.linear(x, dense(layer), layer.bias)
        torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-12)
        grad = torch.randn_like(right)
        for one, other in zip(
            torch.autograd.grad(found, operands, grad), torch.autograd.grad(right, operands, grad), strict=True
        ):
            torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_modes_agree_in_half_precision_to_the_last_rounding(dtype):
    x = torch.randn(40, 35).to(dtype)
    layers = [layer_of(mode).to(dtype) for mode in MODES]
    right = F.linear(x.double(), dense(layers[0].double()), layers[0].bias).to(dtype)
    layers[0].to(dtype)
    for layer in layers:
        torch.testing.assert_close(layer(x), right, rtol=2 * torch.finfo(dtype).eps, atol=1e-3)


@pytest.mark.parametrize("mode", MODES)
def test_autocast(mode):
    layer = layer_of(mode).float()
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.randn(3, 35)).dtype is torch.bfloat16


@pytest.mark.parametrize("inner", [compile_fx, sparsecomp_backend], ids=["inductor", "sparsecomp"])
@pytest.mark.slow(reason="compiles")
def test_one_graph_serves_every_batch(inner):
    torch.compiler.reset()
    layer, graphs = layer_of().float(), []

    def backend(gm, inputs):
        graphs.append(gm)
        return inner(gm, inputs)

    compiled = torch.compile(layer, backend=backend, dynamic=True, fullgraph=True)
    for rows in (3, 8, 40, 2):
        x = torch.randn(rows, 35, requires_grad=True)
        found, right = compiled(x), F.linear(x, dense(layer), layer.bias)
        torch.testing.assert_close(found, right)
        grads = [torch.autograd.grad(one.square().sum(), (x, layer.weight)) for one in (found, right)]
        torch.testing.assert_close(*grads)
    assert len(graphs) == 1


@pytest.mark.parametrize(("gradients", "inputs"), [(False, 4), (True, 7)])
def test_a_graph_without_gradients_has_no_lists_of_the_transpose(gradients, inputs):
    torch.compiler.reset()
    layer, graphs = layer_of(), []

    def backend(gm, inputs):
        graphs.append(gm)
        return gm

    x = torch.randn(3, 35, dtype=torch.float64)
    with torch.set_grad_enabled(gradients):
        found = torch.compile(layer, backend=backend, fullgraph=True)(x)
    torch.testing.assert_close(found, F.linear(x, dense(layer), layer.bias))
    assert sum(node.op == "placeholder" for node in graphs[0].graph.nodes) == inputs  # x, weight, bias, index, lists


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow(reason="compiles"))])
def test_a_write_to_the_index_is_seen(compiled):
    torch.compiler.reset()
    layer = layer_of()
    call = torch.compile(layer, backend="aot_eager") if compiled else layer
    x = torch.randn(1000, 35, dtype=torch.float64, requires_grad=True)
    for seed in (1, 2):
        right = F.linear(x, dense(layer), layer.bias)
        for one, other in zip(
            torch.autograd.grad(call(x).square().sum(), (x, layer.weight)),
            torch.autograd.grad(right.square().sum(), (x, layer.weight)), strict=True,
        ):  # fmt: skip
            torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)
        layer.in_index_per_out.copy_(index_of(seed))
    if not compiled:
        layer.in_index_per_out[0, 0] = 35
        with pytest.raises(FormatError, match="0 to 34"):
            layer(x)


def test_a_cpu_gathers_what_takes_less_time_than_a_call(monkeypatch):
    calls = []

    def counted(x, *rest, **more):
        calls.append(len(x))
        return gather_dot(x, *rest, **more)

    monkeypatch.setattr(linear, "gather_dot", counted)
    layer = layer_of()
    for trained, most in ((False, 2**14 // (35 * 4)), (True, 2**17 // (35 * 4))):
        with torch.set_grad_enabled(trained):
            for rows in (most, most + 1):
                x = torch.randn(rows, 35, dtype=torch.float64)
                torch.testing.assert_close(layer(x), F.linear(x, dense(layer), layer.bias), rtol=1e-12, atol=1e-12)
        assert calls.pop() == most + 1 and not calls


@pytest.mark.parametrize("rows", [3, 200])
def test_more_places_than_inputs(rows):
    layer = GeoSparseLinear(3, 40, torch.randint(3, (40, 17), generator=torch.Generator().manual_seed(2))).double()
    x, grad = torch.randn(rows, 3, dtype=torch.float64, requires_grad=True), torch.randn(rows, 40, dtype=torch.float64)
    x_row, operands = x.detach().requires_grad_(), (x, *layer.parameters())
    found = torch.autograd.grad(
        gather_dot(x, layer.weight, layer.in_index_per_out, layer.bias), operands, grad_outputs=grad
    )
    right = torch.autograd.grad(F.linear(x, dense(layer), layer.bias), operands, grad_outputs=grad)
    torch.testing.assert_close(found, right, rtol=1e-11, atol=1e-11)
    layer(x_row.repeat(300, 1)).sum().backward()
    torch.testing.assert_close(x_row.grad, 300 * dense(layer).sum(0).expand(rows, 3))


@pytest.mark.parametrize("rows", [4, 1000])
def test_an_ensemble_under_vmap(rows):
    layers, x = [layer_of(seed=seed) for seed in range(3)], torch.randn(rows, 35, dtype=torch.float64)
    state = torch.func.stack_module_state(layers)
    found = torch.vmap(lambda *state: torch.func.functional_call(layers[0], state, (x,)))(*state)
    torch.testing.assert_close(found, torch.stack([F.linear(x, dense(one), one.bias) for one in layers]))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rows", [1, 3000])
def test_an_input_of_another_dtype_is_refused_whatever_its_size(mode, rows):
    for dtype in (torch.float32, torch.int64):
        with pytest.raises(FormatError, match="one.* dtype"):
            layer_of(mode)(torch.ones(rows, 35, dtype=dtype))


def test_checkpoints_carry_the_pattern():
    layer, other = layer_of(), layer_of(seed=1)
    state = layer.state_dict()
    assert sorted(state) == ["bias", "in_index_per_out", "weight"]
    same = layer_of()
    nn.init.zeros_(same.weight)
    same.load_state_dict(state)
    assert torch.equal(same.weight, layer.weight)
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(CheckpointError, match="another seed.*adopt_patterns"):
        other.load_state_dict({key: value + 1 if key != "in_index_per_out" else value for key, value in state.items()})
    assert all(torch.equal(before[key], value) for key, value in other.state_dict().items())
    model, lists = nn.Sequential(other), other.transposed_order
    adopt_patterns(model)
    model.load_state_dict({f"0.{key}": value for key, value in state.items()})
    assert other.transposed_order is lists  # where a captured graph reads it
    x = torch.randn(1000, 35, dtype=torch.float64, requires_grad=True)
    for one, right in zip(
        torch.autograd.grad(other(x).square().sum(), x), torch.autograd.grad(layer(x).square().sum(), x), strict=True
    ):
        torch.testing.assert_close(one, right, rtol=1e-12, atol=1e-12)


def test_a_checkpoint_that_does_not_fit_is_refused():
    layer = layer_of()
    adopt_patterns(layer)
    for index in (torch.full((35, 4), 35), index_of(k=3, shape=(5, 6)), torch.zeros(35, 4)):
        with pytest.raises(FormatError, match="in_index_per_out"):
            layer.load_state_dict(layer.state_dict() | {"in_index_per_out": index})
    assert torch.equal(layer.in_index_per_out, index_of())


def test_a_layer_on_the_meta_device_takes_a_checkpoint():
    layer = layer_of()
    with torch.device("meta"):
        empty = GeoSparseLinear(35, 35, torch.zeros(35, 4, dtype=torch.int32))
    state = {key: value.long() if key == "in_index_per_out" else value for key, value in layer.state_dict().items()}
    empty.load_state_dict(state, assign=True)
    assert empty.in_index_per_out.dtype is torch.int32
    x = torch.randn(40, 35, dtype=torch.float64, requires_grad=True)
    for one, right in zip(
        torch.autograd.grad(empty(x).square().sum(), x), torch.autograd.grad(layer(x).square().sum(), x), strict=True
    ):
        torch.testing.assert_close(one, right, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("device", DEVICES[1:])
@pytest.mark.parametrize("mode", MODES)
def test_in_a_cuda_graph(mode, device):
    layer = layer_of(mode).float().to(device)
    x = torch.randn(64, 35, device=device, requires_grad=True)
    graph, found = graph_of(lambda: torch.autograd.grad(layer(x).square().sum(), (x, layer.weight)))
    with torch.no_grad():
        x.normal_()
    adopt_patterns(layer)
    layer.load_state_dict(layer_of(seed=1).state_dict())
    graph.replay()
    wanted = torch.autograd.grad(F.linear(x, dense(layer), layer.bias).square().sum(), (x, layer.weight))
    for one, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, right, rtol=1e-4, atol=1e-4)


def test_copies_and_dtypes():
    layer = copy.deepcopy(layer_of())
    assert layer.to(torch.float16).in_index_per_out.dtype is torch.int32
    assert "35, 35, k=4 (4 distinct)" in repr(layer)
    meta = layer.to("meta")
    assert meta(torch.empty(3, 35, device="meta", dtype=torch.float16)).shape == (3, 35)


INDEX = torch.zeros(5, 2, dtype=torch.int64)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((4, 5, INDEX, "hash"), ConfigError, "needs one of compiled, gather, scatter"),
        ((0, 5, INDEX, "gather"), ConfigError, "in_features is 0"),
        ((4, 2.5, INDEX, "gather"), ConfigError, "out_features is 2.5"),
        ((4, 6, INDEX, "gather"), FormatError, r"needs \(6, k\)"),
        ((4, 5, INDEX[:, 0], "gather"), FormatError, r"shape \(5,\)"),
        ((4, 5, INDEX[:, :0], "gather"), FormatError, "k 1 or more"),
        ((4, 5, INDEX + 4, "gather"), FormatError, "needs 0 to 3"),
        ((4, 5, INDEX - 1, "gather"), FormatError, "from -1"),
        ((4, 5, INDEX.float(), "gather"), FormatError, "int32 or int64"),
        ((4, 5, [[0]], "gather"), FormatError, "is list"),
    ],
)
def test_arguments_that_do_not_fit(arguments, error, message):
    *sizes, mode = arguments
    with pytest.raises(error, match=message):
        GeoSparseLinear(*sizes, compute_mode=mode)


def test_an_input_that_does_not_fit():
    for mode in MODES:
        with pytest.raises(FormatError, match=r"needs \(..., 35\)"):
            layer_of(mode)(torch.randn(3, 34, dtype=torch.float64))
