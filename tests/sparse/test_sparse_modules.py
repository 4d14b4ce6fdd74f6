"""What a user does with a module beside training it: transforms of its weight, parametrizations, other patterns, parts
of checkpoints, several forwards before a backward. Each is compared with a dense layer, or with the one it should be.
"""

import copy
import gc
import socket
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from matrices import of_every_format
from torch import Tensor, func, nn
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint

from sparsecomp import SparseTensor, ops
from sparsecomp.errors import FormatError, SparseOperatorError
from sparsecomp.formats import BCSC, BITMAP, BSR, COO, CSC, CSR, NARROW, NM, SparseMatrix
from sparsecomp.nn import SparseEmbedding, SparseLinear
from sparsecomp.tensor.index_arrays import IndexArrays

pytestmark = pytest.mark.quick_cases(2)

LAYOUTS: dict[type[SparseMatrix], dict[str, Any]] = of_every_format({
    CSR: {"sparsity": 0.5}, CSC: {"sparsity": 0.5}, COO: {"sparsity": 0.5}, BSR: {"block": (2, 4), "sparsity": 0.5},
    BCSC: {"block": 2, "sparsity": 0.5}, NM: {"n": 2, "m": 4}, NARROW: {"sparsity": 0.5}, BITMAP: {"sparsity": 0.5},
})  # fmt: skip
FEW = (CSR, CSC, BSR, NM, NARROW, BITMAP)


def layer_of(format: type[SparseMatrix] = CSR, seed: int = 0, rows: int = 6, cols: int = 8) -> SparseLinear:
    torch.manual_seed(seed)
    return SparseLinear.from_linear(nn.Linear(cols, rows), format, **LAYOUTS[format]).double()


def table_of(seed: int) -> SparseEmbedding:
    torch.manual_seed(seed)
    return SparseEmbedding.from_embedding(nn.Embedding(7, 8), sparsity=0.5).double()


def written_out(layer: SparseLinear | SparseEmbedding, values: Tensor) -> Tensor:
    """These values at the layer's places."""
    return layer.weight.detach().with_values(values.detach()).to_dense()


def rows(count: int = 5) -> Tensor:
    return torch.randn(count, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


# -- the weight as a tensor

SPELLINGS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "linear": lambda w, x, b: F.linear(x, w, b),
    "T": lambda w, x, b: x @ w.T + b,
    "transpose": lambda w, x, b: torch.matmul(x, w.transpose(0, 1)) + b,
    "left": lambda w, x, b: (w @ x.mT).mT + b,
    "mv": lambda w, x, b: torch.mv(w, x[0]) + b,
    "addmm": lambda w, x, b: torch.addmm(b, x, w.t(), beta=0.5, alpha=2.0),
    "addmm by row": lambda w, x, b: torch.addmm(b[:5, None], x, w.t()),
    "addmm left": lambda w, x, b: torch.addmm(b[:, None], w, x.mT, alpha=0.5).mT,
    "to_dense": lambda w, x, b: x @ (w.to_dense() if isinstance(w, SparseTensor) else w).mT + b,
}


class Functional(nn.Module):
    """A layer's weight in a user's own forward."""

    def __init__(self, layer: SparseLinear | SparseEmbedding, forward: Callable[..., Tensor]) -> None:
        super().__init__()
        self.layer, self.how = layer, forward

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.layer, SparseLinear) and self.layer.bias is not None
        return self.how(self.layer.weight, x, self.layer.bias).tanh().square().sum(-1)


class Both:
    """A module with a sparse weight and the same formula of a dense one that is masked."""

    def __init__(self, format: type[SparseMatrix], spelling: str) -> None:
        self.layer, how = layer_of(format), SPELLINGS[spelling]
        self.module, mask = Functional(self.layer, how), written_out(self.layer, torch.ones_like(self.layer.values))
        values, bias = self.layer.values.detach(), self.layer.bias.detach()
        self.sparse = {"layer.values": values, "layer.bias": bias}
        self.of_dense = lambda q, x: how(q["layer.values"] * mask, x, q["layer.bias"]).tanh().square().sum(-1)
        self.dense = self.widened(self.sparse)

    def of_sparse(self, p: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(self.module, p, (x,))

    def widened(self, p: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**p, "layer.values": written_out(self.layer, p["layer.values"])}

    def close(self, transform: Callable[..., Any], *, wide: bool = False) -> None:
        """The same by both, where `wide` means that the result is one number a parameter."""
        found, wanted = transform(self.of_sparse, self.sparse), transform(self.of_dense, self.dense)
        torch.testing.assert_close(self.widened(found) if wide else found, wanted)


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize(("format", "spelling"), [
    *((CSC, spelling) for spelling in SPELLINGS), *((format, "addmm left") for format in LAYOUTS if format is not CSC),
    *((format, "linear") for format in LAYOUTS if format is not CSC), (NM, "to_dense"), (BSR, "to_dense"),
])  # fmt: skip
def test_a_weight_in_transforms_is_a_dense_one(format, spelling):
    both, x = Both(format, spelling), rows()
    batch, change = torch.stack([x, 2 * x]), torch.randn_like(x)
    both.close(lambda f, p: func.grad(lambda p: f(p, x).sum())(p), wide=True)
    both.close(lambda f, p: func.grad(lambda x: f(p, x).sum())(x))
    both.close(lambda f, p: func.jvp(f, (p, x), ({name: 2 * value for name, value in p.items()}, change)))
    both.close(lambda f, p: func.jvp(func.grad(lambda p: f(p, x).sum()), (p,), (p,))[1], wide=True)
    both.close(lambda f, p: func.hessian(lambda x: f(p, x).sum())(x))
    both.close(lambda f, p: func.vmap(f, in_dims=(None, 0))(p, batch))
    both.close(lambda f, p: func.vmap(f, in_dims=(0, None))({n: torch.stack([v, -v]) for n, v in p.items()}, x))
    # parameters that the transform does not know, and a backward behind it
    func.grad(lambda x: both.module(x).sum())(x).square().sum().backward()
    leaves = {name: value.clone().requires_grad_() for name, value in both.dense.items()}
    func.grad(lambda x: both.of_dense(leaves, x).sum())(x).square().sum().backward()
    torch.testing.assert_close(written_out(both.layer, both.layer.values.grad), leaves["layer.values"].grad)


@pytest.mark.slow(reason="compiles training")
@pytest.mark.parametrize(("spelling", "backend"), [
    ("linear", "sparsecomp"), ("left", "aot_eager"), ("addmm by row", "sparsecomp"), ("T", "eager"),
    ("to_dense", "aot_eager"),
])  # fmt: skip
def test_a_weight_in_a_compiled_forward(spelling, backend):
    both, x = Both(CSC, spelling), rows()
    torch.compile(lambda x: both.module(x).sum(), backend=backend, fullgraph=True)(x).backward()
    wanted = func.grad(lambda p: both.of_dense(p, x).sum())(both.dense)
    torch.testing.assert_close(written_out(both.layer, both.layer.values.grad), wanted["layer.values"])
    inside = torch.compile(func.grad(lambda p: both.of_sparse(p, x).sum()), backend=backend)
    torch.testing.assert_close(both.widened(inside(both.sparse)), wanted)


def test_rows_of_a_weight_in_transforms():
    table, index = table_of(0), torch.tensor([1, 3, 3])
    module = Functional(table, lambda: 0)
    module.forward = lambda index: F.embedding(index, table.weight).square().sum()  # pyright: ignore
    values = table.values.detach()
    found = func.grad(lambda values: functional_call(module, {"layer.values": values}, (index,)))(values)
    dense = written_out(table, values).requires_grad_()
    F.embedding(index, dense).square().sum().backward()
    torch.testing.assert_close(written_out(table, found), dense.grad * (written_out(table, torch.ones_like(values))))


def test_what_a_weight_in_a_transform_does_not_take():
    layer, x = layer_of(), rows()
    module = Functional(layer, lambda w, x, b: F.linear(x, 2 * w))
    with pytest.raises(SparseOperatorError, match="call to_dense"):
        func.grad(lambda values: functional_call(module, {"layer.values": values}, (x,)).sum())(layer.values.detach())


def test_products_by_arrays_in_transforms():
    values, stored = IndexArrays.of(layer_of().weight.matrix)
    pattern, layout = stored.arrays, stored.layout
    x, dense = rows().mT.contiguous(), written_out(layer_of(), values)
    found = func.grad(lambda x: ops.spmm(values, pattern, x, layout).square().sum())(x)
    torch.testing.assert_close(found, func.grad(lambda x: (dense @ x).square().sum())(x))
    a = torch.randn(6, 5, dtype=torch.float64)
    found = func.jvp(lambda a: ops.sddmm(a, x, pattern, layout), (a,), (a,))[1]
    torch.testing.assert_close(written_out(layer_of(), found), (a @ x.mT) * (dense != 0))


@pytest.mark.parametrize("size", [4, 6])
def test_a_bias_by_row_of_a_linear_product(size):
    torch.manual_seed(0)
    weight, x, bias = SparseTensor.from_dense(torch.randn(6, 8)), torch.randn(size, 8), torch.randn(size, 1)
    weight, bias = weight.requires_grad_(), bias.requires_grad_()
    out = torch.addmm(bias, x, weight.T)
    torch.testing.assert_close(out, bias + x @ weight.detach().to_dense().T)
    (out * torch.arange(6.0)).sum().backward()
    torch.testing.assert_close(bias.grad, torch.full((size, 1), 15.0))


# -- parametrizations and masks of the values


class Tanh(nn.Module):
    def forward(self, value: Tensor) -> Tensor:
        return value.tanh()

    def right_inverse(self, value: Tensor) -> Tensor:
        return value.atanh()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("format", FEW)
@pytest.mark.usefixtures("op_by_op")
def test_values_take_a_parametrization(format):
    layer, plain, x = layer_of(format), layer_of(format), rows()
    parametrize.register_parametrization(layer, "values", Tanh())
    free = plain.values.detach().atanh().requires_grad_()
    dense = F.linear(x, torch.zeros(6, 8).double(), plain.bias) + F.linear(x, plain.weight)
    functional_call(plain, {"values": free.tanh()}, (x,)).square().sum().backward()
    for call in (layer, torch.compile(layer, backend="sparsecomp")):
        layer.zero_grad()
        out = call(x)
        torch.testing.assert_close(out, dense)
        out.square().sum().backward()
        torch.testing.assert_close(layer.get_parameter("parametrizations.values.original").grad, free.grad)
    name = {"parametrizations.values.original": 2 * free.detach()}
    torch.testing.assert_close(
        functional_call(layer, name, (x,)), functional_call(plain, {"values": (2 * free).tanh()}, (x,))
    )
    torch.testing.assert_close(copy.deepcopy(layer)(x), dense)
    parametrize.remove_parametrizations(layer, "values")
    assert type(layer) is SparseLinear and layer.state_dict().keys() == plain.state_dict().keys()
    torch.testing.assert_close(layer(x), dense)


def test_weight_norm_divides_by_the_norm_of_all_values():
    layer, x = layer_of(), rows()
    dense = written_out(layer, layer.values)
    parametrizations.weight_norm(layer, "values", dim=None)
    with torch.no_grad():
        layer.parametrizations["values"].original0.fill_(3.0)
    torch.testing.assert_close(layer(x), F.linear(x, 3 * dense / dense.norm(), layer.bias))


@pytest.mark.parametrize("format", FEW)
def test_a_parametrized_or_pruned_layer_takes_a_checkpoint_of_another_pattern(format):
    x = rows()
    hows = (
        lambda layer: parametrize.register_parametrization(layer, "values", Tanh()),
        lambda layer: prune.l1_unstructured(layer, "values", 0.5),
    )
    for how in hows:
        one, other = how(layer_of(format, 0)), how(layer_of(format, 1))
        other.load_state_dict(one.state_dict())
        gradients = []
        for layer in (one, other):
            leaf = x.clone().requires_grad_()
            layer(leaf).square().sum().backward()
            gradients.append([leaf.grad, *(parameter.grad for parameter in layer.parameters())])
        torch.testing.assert_close(gradients[0], gradients[1])


def test_pruned_values_are_zero_and_learn_nothing():
    layer, x = layer_of(), rows()
    wanted = layer.values.detach().clone()
    prune.l1_unstructured(layer, "values", 0.5)
    wanted[wanted.abs() < wanted.abs().median()] = 0
    wanted[wanted.abs().argsort()[:12]] = 0
    torch.testing.assert_close(layer(x), F.linear(x, written_out(layer, wanted), layer.bias))
    layer(x).square().sum().backward()
    assert torch.equal(layer.values_orig.grad != 0, wanted != 0)
    prune.remove(layer, "values")
    assert torch.equal(layer.values.detach(), wanted)


# -- other patterns


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("backend", [None, "eager", "sparsecomp"])
@pytest.mark.parametrize("format", FEW)
def test_functional_call_with_another_layers_state(format, backend):
    layer, other, leaf = layer_of(format, 0), layer_of(format, 1), rows().requires_grad_()
    call = lambda state, x: functional_call(layer, state, (x,))  # noqa: E731
    call = torch.compile(call, backend=backend) if backend else call
    state = {name: value.detach().clone() for name, value in other.state_dict().items()}
    state["values"].requires_grad_()
    out, wanted = call(state, leaf), other(leaf)
    torch.testing.assert_close(out, wanted)
    found = torch.autograd.grad(out.square().sum(), [leaf, state["values"]])
    torch.testing.assert_close(found, torch.autograd.grad(wanted.square().sum(), [leaf, other.values]))


def uneven(longest: int) -> SparseEmbedding:
    """A table of 10 entries whose longest row has so many."""
    dense = torch.zeros(5, 8)
    dense[0, :longest] = 1
    dense[torch.arange(10 - longest) % 4 + 1, torch.arange(10 - longest) // 4] = 2
    return SparseEmbedding(CSR.from_dense(dense))


def test_functional_call_of_a_table_with_longer_rows():
    short, long, index = uneven(2), uneven(8), torch.arange(5)
    torch.testing.assert_close(functional_call(short, long.state_dict(), (index,)), written_out(long, long.values))


def test_an_ensemble_of_layers_with_patterns_of_their_own():
    build, x = lambda seed: nn.Sequential(layer_of(seed=seed), nn.Tanh(), layer_of(seed=seed, cols=6)), rows()
    models = [build(seed) for seed in range(3)]
    parameters, buffers = func.stack_module_state(models)
    base = copy.deepcopy(models[0]).to("meta")
    loss = lambda p, b, x: functional_call(base, (p, b), (x,)).square().sum()  # noqa: E731
    found = func.vmap(func.grad(loss), in_dims=(0, 0, None))(parameters, buffers, x)
    for number, model in enumerate(models):
        model(x).square().sum().backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(found[name][number], parameter.grad)


def test_a_part_of_a_checkpoint_is_checked_and_taken_with_all_that_follows():
    layer, other, leaf = layer_of(seed=0), layer_of(seed=1), rows().requires_grad_()
    state = {name: value for name, value in other.state_dict().items() if name in ("pointers", "indices")}
    layer.load_state_dict(state, strict=False)
    layer(leaf).square().sum().backward()
    found, leaf.grad = leaf.grad, None
    F.linear(leaf, written_out(other, layer.values), layer.bias).square().sum().backward()
    torch.testing.assert_close(found, leaf.grad)
    before = copy.deepcopy(layer.state_dict())
    larger = SparseLinear.from_linear(nn.Linear(8, 6), sparsity=0.25).state_dict()
    for part in (("values",), ("pointers", "indices"), ("indices",)):
        with pytest.raises(FormatError):
            layer.load_state_dict({name: larger[name] for name in part}, strict=False)
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())


def test_loading_keeps_the_memory_that_a_captured_graph_reads():
    layer = layer_of(seed=0)
    where = {name: value.data_ptr() for name, value in (*layer.named_buffers(), *layer.named_parameters())}
    layer.load_state_dict(layer_of(seed=1).state_dict())
    assert where == {name: value.data_ptr() for name, value in (*layer.named_buffers(), *layer.named_parameters())}


def test_a_weight_without_numbers_is_refused():
    with pytest.raises(FormatError, match="meta device"):
        SparseLinear.from_linear(nn.Linear(8, 6, device="meta"), sparsity=0.5)


# -- between forward and backward


def send_buffers(module: nn.Module) -> None:
    """What DistributedDataParallel does at each forward, and until torch 2.12 counts as a write."""
    for buffer in module.buffers():
        buffer.copy_(buffer.clone())


@pytest.mark.parametrize("format", FEW)
def test_index_arrays_are_written_again_before_a_backward(format):
    model, x = nn.Sequential(layer_of(format), nn.Tanh(), layer_of(format, cols=6)), rows()
    (model(x) - model(2 * x)).square().sum().backward()
    wanted = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    first = model(x)
    send_buffers(model)
    (first - model(2 * x)).square().sum().backward()
    torch.testing.assert_close([parameter.grad for parameter in model.parameters()], wanted)


def test_a_write_to_what_a_backward_needs_is_an_error_as_in_eager():
    layer, x, state = layer_of(), rows().requires_grad_(), layer_of(seed=1).state_dict()
    for write in (lambda x: layer.values.mul_(2), lambda x: x.mul_(2), lambda x: layer.load_state_dict(state)):
        given = x * 1
        out = layer(given)
        with torch.no_grad():
            write(given)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_a_table_that_takes_another_pattern_goes_backward_by_its_own():
    table, index = table_of(0), torch.tensor([1, 3, 3])
    mask = written_out(table, torch.ones_like(table.values))
    same = copy.deepcopy(table)
    for layer in (table, same):
        out = layer(index)
        layer.load_state_dict(table_of(1).state_dict() if layer is table else same.state_dict())
        out.sum().backward()
    torch.testing.assert_close(table.values.grad, same.values.grad)
    counts = torch.bincount(index, minlength=7)[:, None] * mask
    torch.testing.assert_close(written_out(same, same.values.grad), counts.double())
    send_buffers(same)
    torch.testing.assert_close(same(index), written_out(same, same.values)[index])


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("way", ["reentrant", "not reentrant", "on the CPU", "traced", "exported", "compiled"])
@pytest.mark.parametrize("format", [CSR, NM])
def test_ways_to_run_a_module(format, way):
    model, x = nn.Sequential(layer_of(format), nn.Tanh(), layer_of(format, cols=6)), rows().requires_grad_()
    model(x).square().sum().backward()
    wanted = [x.grad, *(parameter.grad for parameter in model.parameters())]
    x.grad = None
    model.zero_grad()
    if way == "on the CPU":
        with torch.autograd.graph.save_on_cpu():
            out = model(x)
    elif way == "traced":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch.jit is deprecated
            out = torch.jit.trace(model, x)(x)
    elif way == "exported":
        out = torch.export.export(model, (x,)).module()(x)
        torch.testing.assert_close(out, model(x))
        return
    elif way == "compiled":
        out = torch.compile(lambda x: checkpoint(model, x, use_reentrant=False), backend="sparsecomp")(x)
    else:
        out = checkpoint(model, x, use_reentrant=way == "reentrant")
    out.square().sum().backward()
    torch.testing.assert_close([x.grad, *(parameter.grad for parameter in model.parameters())], wanted)


@pytest.mark.slow(reason="compiles a training step")
def test_a_compiled_training_step_with_its_optimizer():
    layer, x = layer_of(), rows()
    other = copy.deepcopy(layer)

    def step(layer: SparseLinear, optimizer: torch.optim.Optimizer) -> Tensor:
        optimizer.zero_grad()
        loss = layer(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.01) for one in (layer, other)]
    compiled = torch.compile(lambda: step(layer, optimizers[0]), backend="sparsecomp")
    for _ in range(3):  # a compiled AdamW counts its steps in float32
        torch.testing.assert_close(compiled(), step(other, optimizers[1]), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(layer.values, other.values, rtol=1e-5, atol=1e-6)


# -- two processes


def _process(rank: int, port: int) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    for options in ({}, {"find_unused_parameters": True}, {"static_graph": True}):
        _two_forwards(rank, options)
    _longer_rows(rank)
    gc.collect()  # the last owner of a process group must not be DistributedDataParallel: its end would never come
    dist.destroy_process_group()


def _two_forwards(rank: int, options: dict[str, Any]) -> None:
    build = lambda seed: nn.Sequential(layer_of(CSC, seed), nn.Tanh(), layer_of(NM, seed, cols=6))  # noqa: E731
    model, alone = build(rank), build(0)
    both = DistributedDataParallel(model, **options)
    x = torch.randn(2, 2, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    (both(x[0, rank]) - both(x[1, rank])).square().mean().backward()
    (alone(x[0].flatten(0, 1)) - alone(x[1].flatten(0, 1))).square().mean().backward()
    if not options.get("static_graph"):  # torch's own has none of the two
        with both.no_sync():
            both(x[0, rank]).square().mean().backward()
        both(x[1, rank]).square().mean().backward()
        for inputs in x:
            alone(inputs.flatten(0, 1)).square().mean().backward()
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def _longer_rows(rank: int) -> None:
    table = uneven(2 if rank else 8)
    both = DistributedDataParallel(table)
    torch.testing.assert_close(both(torch.arange(5)), written_out(uneven(8), uneven(8).values))


@pytest.mark.slow(reason="starts processes")
def test_two_processes_with_two_forwards_and_gradients_that_add_up():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(_process, args=(port,), nprocs=2)


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("write", ["copy", "swap", "copy into new memory"])
@pytest.mark.parametrize("kind", LAYOUTS)
def test_index_arrays_written_in_place_are_followed(kind, write):
    """As who averages or sends whole states does; the transpose that a layer keeps must follow."""
    torch.manual_seed(3)
    layer, other = (SparseLinear.from_linear(nn.Linear(24, 16), kind, **LAYOUTS[kind]) for _ in range(2))
    layer(torch.randn(2, 24)).sum().backward()
    if write == "copy into new memory":
        layer.to_empty(device="cpu")
    for own, given in zip(layer.state_dict().values(), other.state_dict().values(), strict=True):
        if write != "swap":
            with torch.no_grad():
                own.copy_(given)
    if write == "swap":
        for name in other.state_dict():
            if name != "bias":
                torch.utils.swap_tensors(getattr(layer, name), getattr(other, name))
    x = torch.randn(3, 24, requires_grad=True)
    weight, bias = layer.weight.detach().to_dense().double(), layer.bias.detach().double()
    out = layer(x)
    (gradient,) = torch.autograd.grad(out.square().sum(), x)
    wanted = x.detach().double() @ weight.T + bias
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient.double(), 2 * wanted @ weight, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "layout"),
    [(BSR, {"block": (0, 4)}), (BSR, {"block": (-4, 4)}), (BCSC, {"block": 0}), (NM, {"n": 0, "m": 0})],
)
def test_sizes_that_no_block_has_are_refused(kind, layout):
    more = {} if kind is NM else {"sparsity": 0.5}
    with pytest.raises(FormatError):
        SparseLinear.from_linear(nn.Linear(8, 8), kind, **layout, **more)


@pytest.mark.parametrize("size", [1, 5])
def test_a_bias_has_a_number_for_each_row(size):
    with pytest.raises(FormatError, match=r"needs \(4,\)"):
        SparseLinear(CSR.from_dense(torch.eye(4)), torch.ones(size))


# -- torch.fx


def test_a_sparse_layer_is_one_node_for_torch_fx_as_a_dense_one_is():
    model = nn.Sequential(SparseEmbedding(CSR.from_dense(torch.eye(6))), layer_of(cols=6).float(), nn.Tanh())
    index = torch.tensor([[0, 3], [5, 5]])
    graph = torch.fx.symbolic_trace(model)
    assert [(node.op, str(node.target)) for node in graph.graph.nodes] == [
        ("placeholder", "input"), *(("call_module", name) for name in "012"), ("output", "output")
    ]  # fmt: skip
    for change in (lambda: None, lambda: model[1].load_state_dict(layer_of(seed=5, cols=6).float().state_dict())):
        change()
        assert torch.equal(graph(index), model(index))
    graph(index).sum().backward()
    found, model[1].values.grad = model[1].values.grad, None
    model(index).sum().backward()
    assert torch.equal(found, model[1].values.grad)


def test_a_sparse_layer_that_torch_fx_cannot_take_as_one_node_says_why():
    hooked = nn.Sequential(layer_of())
    hooked[0].register_forward_hook(lambda *_: None)
    for model in (hooked, layer_of()):
        with pytest.raises(SparseOperatorError, match="one node"):
            torch.fx.symbolic_trace(model)
