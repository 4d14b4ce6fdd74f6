"""What a user has set to be the default, device or dtype, is of his own tensors: ours lie and count as theirs.

Where there is no GPU the meta device stands for one: a tensor that lands there is lost.
"""

import ast
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from package_modules import ROOT, modules
from torch import nn
from torch.utils import _device

import sparsecomp
from sparsecomp.attention import Documents, RandomKeys, attention
from sparsecomp.compiler.capture import Graph
from sparsecomp.formats import BSR, COO, CSC, CSR, best
from sparsecomp.formats.indices import sorted_keys
from sparsecomp.options import Options
from sparsecomp.runtime import SET

ON_PURPOSE = {
    "sparsecomp/demo.py": "is a program",
    "sparsecomp/nn/local/activations.py": "makes parameters, as torch's layers do",
    "sparsecomp/nn/local/block.py": "likewise",
    "sparsecomp/reference/local/connectivity.py": "runs within torch.device('cpu')",
    "lowering/tuning/autotune.py": "asks in which modes it runs",
    "lowering/tuning/ceilings.py": "likewise",
}


def of_default_device() -> Iterator[str]:
    """Each call of a function of torch's that makes a tensor on the default device unless told another."""
    makers = {getattr(one, "__name__", "") for one in _device._device_constructors()}
    for path in modules().values():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in makers:
                told = any(keyword.arg in ("device", None) for keyword in node.keywords)
                if ast.unparse(node.func.value) == "torch" and not told:
                    yield f"{path.relative_to(ROOT)}:{node.lineno} {ast.unparse(node)}"


def test_every_tensor_that_is_made_is_told_where() -> None:
    found = list(of_default_device())
    files = {one.partition(":")[0] for one in found}
    assert not [one for one in found if one.partition(":")[0] not in ON_PURPOSE]
    assert files == set(ON_PURPOSE), "a file needs its reason no longer"


@contextmanager
def elsewhere() -> Iterator[None]:
    """Within, torch makes tensors on a device that the operands are not on."""
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("format", [COO, CSR, CSC, BSR])
def test_a_matrix_becomes_torchs_where_it_is(format):
    dense = torch.randn(6, 8) * (torch.rand(6, 8) < 0.4)
    matrix = format.from_dense(dense, **({"block": 2} if format is BSR else {}))
    with elsewhere():
        found = matrix.to_torch()
    assert found.device.type == "cpu" and torch.equal(found.to_dense(), dense)


def test_a_pattern_draws_the_same_keys():
    x = torch.randn(1, 2, 40, 8)
    with elsewhere():
        found = attention(x, x, x, RandomKeys(5, seed=11))
        documents = Documents.of_lengths([3, 2], 7)
    mask = RandomKeys(5, seed=11).to_dense(40)
    assert torch.equal(mask.sum(-1), torch.full((1, 1, 40), 5))
    torch.testing.assert_close(found, nn.functional.scaled_dot_product_attention(x, x, x, mask))
    assert documents.ids.device.type == "cpu" and (documents.ids[0, :5] == torch.tensor([0, 0, 0, 1, 1])).all()


@pytest.mark.parametrize("sparsity", [0.4, 0.9])  # few and many free places are drawn from in two ways
def test_a_pattern_grows_by_the_same_elements(sparsity):
    grown = []
    for context in (nullcontext, elsewhere):
        torch.manual_seed(0)
        model, x = nn.Sequential(nn.Linear(16, 16)), torch.randn(4, 16)
        with context():
            sparsecomp.sparsify(model, sparsecomp.Unstructured(sparsity))
            growing = SET(model, torch.optim.SGD(model.parameters(), lr=0.1), end=10, every=1, fraction=0.5)
            for _ in range(3):
                model(x).square().sum().backward()
                growing.update()
        grown.append(model.state_dict())
    assert all(torch.equal(one, other) for one, other in zip(*(state.values() for state in grown), strict=True))


def test_many_keys_are_sorted_where_they_are():
    keys = torch.randint(1000, (2**14,))  # fewer are sorted by torch
    with elsewhere():
        found, order = sorted_keys(keys, 1000)
    assert torch.equal(found, keys.sort().values) and torch.equal(keys[order], found)


def test_the_best_format_is_the_same():
    matrix = CSR.from_dense(torch.eye(16).repeat(1, 2))
    with elsewhere():
        found = best(matrix)
    assert found.reasons == best(matrix).reasons


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_factor_of_spikes_is_not_rounded_to_the_default_dtype(dtype):
    """Kernels read which spikes are there, and multiply by the number that the operator is given."""
    layer, graphs = nn.Linear(16, 8), []
    options = Options.parse(None, {"implementation": "binary"})

    def backend(gm: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        Graph.of_dynamo(gm, inputs, {}, options).rewrite(options)
        graphs.append(gm.graph)
        return gm.forward

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        torch.compile(lambda x: layer((x > 0).float() * 0.3), backend=backend)(torch.randn(4, 16, dtype=torch.float32))
    finally:
        torch.set_default_dtype(before)
    (node,) = (node for node in graphs[0].nodes if node.target is torch.ops.sparsecomp.spike_linear.default)
    assert float(np.float32(0.3)) in node.args
