"""Sparse layers and parameters: what they keep of dense ones, how patterns change, and two processes."""

import copy
import gc
import os
import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn

from sparsecomp import SparseTensor, optimize
from sparsecomp.errors import FormatError, PatternError, SparseOperatorError
from sparsecomp.formats import BCSC, BSR, COO, CSC, CSR, NM
from sparsecomp.nn import (
    AllowGrowth,
    AllowShrinkage,
    ExactPattern,
    SparseEmbedding,
    SparseLinear,
    SparseParameter,
    synchronize,
)


def largest(weight: torch.Tensor, kept: int) -> torch.Tensor:
    """The weight with its `kept` largest elements."""
    bound = weight.abs().flatten().sort(descending=True).values[kept - 1]
    return weight * (weight.abs() >= bound)


@pytest.mark.parametrize("format", [COO, CSR, CSC])
def test_a_linear_layer_keeps_its_largest_weights(format):
    linear = nn.Linear(10, 8).eval()
    layer = SparseLinear.from_linear(linear, format, sparsity=0.7)
    wanted = largest(linear.weight.detach(), 24)
    assert torch.equal(layer.weight.detach().to_dense(), wanted)
    assert layer.bias is linear.bias and not layer.training and layer.weight.format == format.__name__
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
            block = layer.weight.detach().to_dense()[2 * i : 2 * i + 2, 4 * j : 4 * j + 4]
            dense = weight[2 * i : 2 * i + 2, 4 * j : 4 * j + 4]
            assert torch.equal(block, dense if norms[i][j] >= bound else torch.zeros_like(dense))
    x = torch.randn(3, 10)
    torch.testing.assert_close(layer(x), F.linear(x, layer.weight.to_dense(), linear.bias))


def test_a_linear_layer_keeps_two_of_four():
    linear = nn.Linear(10, 6)
    layer = SparseLinear.from_linear(linear, NM, n=2, m=4)
    kept, weight = layer.weight.detach().to_dense(), linear.weight.detach()
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
    assert torch.equal(layer.weight.detach().to_dense(), linear.weight.detach() * torch.eye(4))
    layer(torch.ones(1, 4)).sum().backward()
    assert torch.equal(layer.weight.grad.to_dense(), torch.eye(4))


def test_arguments_that_do_not_fit():
    linear = nn.Linear(8, 8)
    for arguments, message in (
        ({}, "one of them"),
        ({"mask": torch.eye(8), "sparsity": 0.5}, "one of them"),
        ({"sparsity": 1.5}, "0 to 1"),
        ({"format": NM, "n": 2, "m": 4, "sparsity": 0.5}, "leave it out"),
        ({"mask": torch.eye(4)}, "needs the weight's"),
        ({"format": BSR, "sparsity": 0.5}, "BSR needs block="),
        ({"format": BSR, "block": (2, 2), "mask": torch.eye(8)}, "cuts through blocks"),
        ({"format": NM, "n": 1, "m": 4, "mask": torch.ones(8, 8)}, "at most 1"),
    ):
        with pytest.raises(FormatError, match=message):
            SparseLinear.from_linear(linear, **arguments)
    with pytest.raises(FormatError, match="padding_idx"):
        SparseEmbedding.from_embedding(nn.Embedding(4, 2, padding_idx=0), sparsity=0.5)
    with pytest.raises(FormatError, match="needs one of CSR"):
        SparseEmbedding.from_embedding(nn.Embedding(4, 2), BSR, block=(1, 1), sparsity=0.5)
    with pytest.raises(FormatError, match="AllowGrowth"):
        SparseParameter(CSR.from_dense(torch.eye(2)), "growth")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(("format", "layout"), [(CSR, {}), (COO, {}), (NM, {"n": 1, "m": 3})])
@pytest.mark.parametrize("compiled", [False, True])
def test_an_embedding_looks_rows_up_and_learns(format, layout, compiled):
    torch._dynamo.reset()
    table = nn.Embedding(9, 5)
    how = layout or {"sparsity": 0.6}
    layer = SparseEmbedding.from_embedding(table, format, **how)
    dense = layer.weight.detach().to_dense().requires_grad_()
    index = torch.tensor([[0, 3, 3], [8, 1, 0]])
    call = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
    out, factor = call(index), torch.randn(2, 3, 5)
    assert torch.equal(out, dense[index])
    (out * factor).sum().backward()
    (F.embedding(index, dense) * factor).sum().backward()
    stored = SparseTensor(layer.weight.matrix).with_values(torch.ones_like(layer.weight.values())).to_dense()
    torch.testing.assert_close(layer.weight.grad.to_dense(), dense.grad * stored)
    torch.optim.Adam(layer.parameters(), lr=0.1).step()
    assert layer(index[:0]).shape == (0, 3, 5)


def adam_by_hand(weight: torch.Tensor, grads: list[torch.Tensor], lr: float) -> torch.Tensor:
    """Adam's published update, on dense tensors in float64."""
    first, second, weight = torch.zeros_like(weight), torch.zeros_like(weight), weight.double()
    for step, grad in enumerate(grads, 1):
        first = 0.9 * first + 0.1 * grad
        second = 0.999 * second + 0.001 * grad**2
        weight = weight - lr * (first / (1 - 0.9**step)) / ((second / (1 - 0.999**step)).sqrt() + 1e-8)
    return weight


@pytest.mark.parametrize(
    ("format", "layout", "step"), [(CSR, {}, 1), (CSC, {}, 1), (BSR, {"block": (2, 2)}, 2), (COO, {}, 1)]
)
def test_a_parameter_grows_with_its_gradient(format, layout, step):
    weight = torch.randn(8, 8) * torch.eye(8 // step).repeat_interleave(step, 0).repeat_interleave(step, 1)
    more = torch.ones(8, 8).tril()
    small, large = format.from_dense(weight, **layout), format.from_dense(more, **layout)
    parameter = SparseParameter(small, AllowGrowth)
    optimizer = torch.optim.Adam([parameter], lr=0.1)
    grads = []
    for pattern in (small, large, large):
        values = torch.randn(pattern.values.shape)
        parameter.grad = SparseTensor(pattern.with_values(values))
        grads.append(parameter.grad.to_dense().double())
        optimizer.step()
    torch.testing.assert_close(
        parameter.detach().to_dense(), adam_by_hand(weight, grads, 0.1).float(), rtol=1e-5, atol=1e-6
    )
    assert parameter.matrix.nnz == large.nnz
    with pytest.raises(PatternError, match="AllowGrowth keeps"):
        parameter.grad = SparseTensor(small)
    x = torch.randn(3, 8)
    torch.testing.assert_close(F.linear(x, parameter), x @ parameter.detach().to_dense().T)


@pytest.mark.parametrize("format", [CSR, CSC])
def test_a_compiled_layer_follows_its_pattern(format):
    torch._dynamo.reset()
    layer = SparseLinear.from_linear(nn.Linear(6, 6), format, mask=torch.eye(6), mode=AllowGrowth)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x = torch.randn(3, 6)
    for pattern in (torch.eye(6), torch.ones(6, 6).tril(), torch.ones(6, 6)):
        layer.weight.grad = SparseTensor(format.from_dense(pattern))
        torch.optim.SGD([layer.weight], lr=0.1).step()
        layer.zero_grad()
        dense = layer.weight.detach().to_dense()
        out = compiled(x)
        torch.testing.assert_close(out, F.linear(x, dense, layer.bias))
        out.sum().backward()
        torch.testing.assert_close(layer.weight.grad.to_dense(), x.sum(0).expand(6, 6) * pattern)
        assert layer.weight.matrix.nnz == pattern.sum()


def test_a_parameter_shrinks_with_its_gradient_and_an_exact_one_does_not():
    weight = torch.randn(6, 6).tril()
    small = CSR.from_dense(torch.eye(6))
    parameter = SparseParameter(CSR.from_dense(weight), AllowShrinkage)
    optimizer = torch.optim.SGD([parameter], lr=0.5, momentum=0.9)
    parameter.grad = SparseTensor(CSR.from_dense(torch.ones(6, 6).tril()))
    optimizer.step()
    parameter.grad = SparseTensor(small)
    optimizer.step()
    wanted = torch.diag(weight.diagonal() - 0.5 - 0.5 * (0.9 + 1))
    torch.testing.assert_close(parameter.detach().to_dense(), wanted)
    assert parameter.matrix.nnz == 6
    with pytest.raises(PatternError, match="cannot take"):
        parameter.grad = SparseTensor(CSR.from_dense(weight))
    exact = SparseParameter(CSR.from_dense(weight), ExactPattern)
    with pytest.raises(PatternError, match="stores other elements"):
        exact.grad = SparseTensor(small)
    fixed = SparseParameter(NM.from_dense(torch.eye(4), n=1, m=4), AllowGrowth)
    with pytest.raises(PatternError, match="N:M"):
        fixed.grad = SparseTensor(NM.from_dense(torch.eye(4).flip(0), n=1, m=4))


def test_layers_in_a_model_survive_copies_and_optimize():
    model = nn.Sequential(SparseLinear.from_linear(nn.Linear(8, 8), sparsity=0.5), nn.ReLU(), nn.Linear(8, 2)).eval()
    x = torch.randn(3, 8)
    copied = copy.deepcopy(model)
    copied.load_state_dict(model.state_dict())
    assert torch.equal(copied(x), model(x)) and list(model.state_dict()) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert "format=CSR" in repr(model)
    better = optimize(model, x)
    torch.testing.assert_close(better(x), model(x))
    assert better.report.rewritten


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(SparseLinear.from_linear(nn.Linear(8, 6), sparsity=0.5), nn.ReLU(), nn.Linear(6, 2))


def _process(rank: int, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    other = nn.Sequential(SparseLinear(CSR.from_dense(torch.eye(4) if rank else torch.eye(4).flip(0))))
    with pytest.raises(PatternError, match="different elements of 0.weight"):
        synchronize(other)
    _refused_as_it_is(rank)
    _train_as_one(rank)
    gc.collect()  # the last owner of a process group must not be DistributedDataParallel: its end would never come
    dist.destroy_process_group()


def _refused_as_it_is(rank: int) -> None:
    """Without `synchronize` every process gets an error, at construction or, if told not to broadcast, in backward."""
    model = _model()
    with torch.no_grad():
        model[0].weight.mul_(1 + rank)
    before = model[0].weight.detach().to_dense()
    for frozen in (False, True):
        model[0].weight.requires_grad_(not frozen)
        with pytest.raises(SparseOperatorError, match=r"sparsecomp\.nn\.synchronize"):
            nn.parallel.DistributedDataParallel(model)
    model[0].weight.requires_grad_()
    for as_view in (False, True):
        both = nn.parallel.DistributedDataParallel(model, init_sync=False, gradient_as_bucket_view=as_view)
        with pytest.raises(SparseOperatorError, match=r"sparsecomp\.nn\.synchronize"):
            both(torch.ones(2, 8)).sum().backward()
        model.zero_grad()
    assert torch.equal(model[0].weight.detach().to_dense(), before)


def _train_as_one(rank: int) -> None:
    model, alone = _model(), _model()
    with torch.no_grad():
        model[0].weight.mul_(1 + rank)  # the second process starts elsewhere, and must follow the first
    both = nn.parallel.DistributedDataParallel(synchronize(model))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (both, alone)]
    x = torch.randn(3, 2, 4, 8, generator=torch.Generator().manual_seed(1))
    for step in range(3):
        for each in optimizers:
            each.zero_grad()
        both(x[step, rank]).square().mean().backward()
        alone(x[step].flatten(0, 1)).square().mean().backward()
        for each in optimizers:
            each.step()
    for found, wanted in zip(model.parameters(), alone.parameters(), strict=True):
        sparse = isinstance(found, SparseTensor)
        torch.testing.assert_close(found.to_dense() if sparse else found, wanted.to_dense() if sparse else wanted)


def test_two_processes_train_as_one():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(_process, args=(port,), nprocs=2)
