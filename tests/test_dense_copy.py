"""Products of a compiled model by a dense copy of its sparse weight: equal to eager, and made anew after each write."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sparsecomp
from sparsecomp import SparseTensor, formats
from sparsecomp.nn import SparseLinear
from sparsecomp.ops import dense_copy_matmul
from sparsecomp.ops.folded_weight import FOLDS
from sparsecomp.passes import sparse_matmul
from sparsecomp.passes.sparse_cost import Decision

FORMATS = {"CSR": {}, "CSC": {}, "COO": {}, "BSR": {"block": (4, 3)}, "BCSC": {"block": 2}, "NM": {"n": 1, "m": 4}}


def sparse(name, rows=9, cols=14, seed=0):
    dense = torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed))
    kept = torch.zeros(rows, cols, dtype=torch.bool)
    kept[:, ::4] = True  # one of four is right for each format
    dense = dense * kept
    return dense, SparseTensor.from_dense(dense, getattr(formats, name), **FORMATS[name])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("flip", [False, True])
def test_products_of_every_format_are_those_of_the_dense_matrix(name, flip):
    dense, weight = sparse(name)
    if flip:
        dense, weight = dense.t(), weight.t()
    x, columns = torch.randn(2, 5, dense.shape[1]), torch.randn(3, dense.shape[1], 4)
    bias = torch.randn(dense.shape[0])
    assert torch.equal(dense_copy_matmul(weight, x, bias, linear=True), F.linear(x, dense, bias))
    torch.testing.assert_close(dense_copy_matmul(weight, columns), dense @ columns, rtol=1e-6, atol=1e-6)


def test_fakes_of_the_operator():
    dense, weight = sparse("CSR")
    pattern, layout = weight._pattern.arrays, weight._pattern.layout
    arguments = (weight.values(), pattern, torch.randn(5, 14), None, *layout, False, True)
    torch.library.opcheck(torch.ops.sparsecomp.dense_copy_product.default, arguments)
    torch.library.opcheck(torch.ops.sparsecomp.dense_copy_matmul.default, (dense, torch.randn(5, 14), None, True))


@pytest.fixture
def copied(monkeypatch):
    """The rule takes every constant weight for one that is faster dense."""
    monkeypatch.setattr(sparse_matmul, "decide", lambda product: Decision(True, "dense", 2.0, "as the test has it"))


def model(name="CSR"):
    torch.manual_seed(0)
    first = SparseLinear.from_linear(nn.Linear(14, 9), getattr(formats, name), sparsity=0.5)
    return nn.Sequential(first, nn.ReLU(), nn.Linear(9, 4))


def test_a_compiled_model_keeps_one_copy_and_sees_every_write(copied):
    layers, x = model(), torch.randn(3, 14)
    compiled = torch.compile(layers, backend="sparsecomp", fullgraph=True)
    weight = layers[0].weight

    def agrees():
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), layers(x), rtol=1e-5, atol=1e-6)

    agrees()
    made = FOLDS.made
    agrees()
    assert FOLDS.made == made
    with torch.no_grad():
        weight.mul_(-2)
    agrees()
    optimizer = torch.optim.SGD([weight], lr=0.5)
    layers(x).sum().backward()
    optimizer.step()
    agrees()
    layers.load_state_dict(model().state_dict())
    agrees()
    assert FOLDS.made == made + 3
    (site,) = [one for one in sparsecomp.last_report().sites if one.rule == "sparse_matmul" and one.rewritten]
    assert site.implementation == "dense copy" and "a dense copy is kept" in site.reason


def test_a_compiled_write_is_seen(copied):
    layers, x = model(), torch.randn(3, 14)
    compiled = torch.compile(layers, backend="sparsecomp", fullgraph=True)

    @torch.compile(backend="inductor")
    def grow(weight):
        weight.mul_(3.0)

    with torch.no_grad():
        compiled(x)
        grow(layers[0].weight)
        torch.testing.assert_close(compiled(x), layers(x), rtol=1e-5, atol=1e-6)


def test_training_makes_the_weight_dense_in_the_graph(copied):
    layers, x = model(), torch.randn(3, 14)
    compiled = torch.compile(layers, backend="sparsecomp", fullgraph=True)
    torch.testing.assert_close(compiled(x), layers(x), rtol=1e-5, atol=1e-6)
    (site,) = [one for one in sparsecomp.last_report().sites if one.rule == "sparse_matmul" and one.rewritten]
    assert site.implementation == "dense"
