"""What is read off a product of two matrices: torch's einsum of the letters computes the same, and refuses else."""

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rewriting import Examples
from torch import Tensor, fx

from sparsecomp.passes.spiking.batched_product import BatchedProduct, batched_product

SIZES = {"b": 2, "h": 3, "n": 4, "m": 5, "d": 6}
einsum, matmul = torch.einsum, torch.matmul


def read(function: Callable[[Any, Any], Any], left: str, right: str) -> tuple[BatchedProduct | None, list[Tensor]]:
    """What is found of the last node, and the numbers of its operands and of itself."""
    gm = fx.symbolic_trace(function)
    operands = [torch.randn([SIZES[letter] for letter in letters]) for letters in (left, right)]
    result = Examples(gm).run(*operands)
    (last,) = gm.graph.output_node().all_input_nodes
    return batched_product(last), [*operands, result]


TAKEN: dict[str, tuple[Callable[[Any, Any], Any], str, str]] = {
    "matmul": (lambda x, y: x @ y, "bhnd", "bhdm"),
    "mm": (lambda x, y: torch.mm(x, y), "nd", "dm"),
    "bmm": (lambda x, y: torch.bmm(x, y), "bnd", "bdm"),
    "by keyword": (lambda x, y: matmul(input=x, other=y), "hnd", "hdm"),
    "einsum": (lambda x, y: einsum("bnhd,bmhd->bhnm", x, y), "bnhd", "bmhd"),
    "einsum with spaces": (lambda x, y: einsum(" nd , md -> nm", x, y), "nd", "md"),
    "einsum of capitals": (lambda x, y: einsum("Nd,Md->NM", x, y), "nd", "md"),
    "einsum of a list": (lambda x, y: einsum("nd,dm->mn", [x, y]), "nd", "dm"),
    "einsum with dots": (lambda x, y: einsum("...nd,...md->...nm", x, y), "bhnd", "bhmd"),
    "einsum with dots behind": (lambda x, y: einsum("nd...,dm...->nm...", x, y), "ndbh", "dmbh"),
    "einsum with dots for nothing": (lambda x, y: einsum("...nd,...md->...nm", x, y), "nd", "md"),
    "einsum, one letter of the batch": (lambda x, y: einsum("...and,...amd->...anm", x, y), "bhnd", "bhmd"),
}  # fmt: skip


@pytest.mark.parametrize(("function", "left", "right"), TAKEN.values(), ids=TAKEN)
def test_letters_mean_what_is_computed(function, left, right):
    found, (x, y, result) = read(function, left, right)
    assert found is not None and found.einsum == (found.node.target is torch.einsum)
    torch.testing.assert_close(einsum(f"{found.terms[0]},{found.terms[1]}->{found.result}", x, y), result)
    for term, value in zip((*found.terms, found.result), (x, y, result), strict=True):
        assert [found.sizes[letter] for letter in term] == [*value.shape]
    letters = [found.summed, found.own(0), found.own(1)]
    assert [found.sizes[letter] for letter in letters] == [SIZES["d"], SIZES["n"], SIZES["m"]]
    assert [node.name for node in found.operands] == ["x", "y"]


LEFT: dict[str, tuple[Callable[[Any, Any], Any], str, str]] = {
    "a vector": (lambda x, y: x @ y, "nd", "d"),
    "of vectors": (lambda x, y: x @ y, "d", "d"),
    "more batches on one side": (lambda x, y: x @ y, "bnd", "dm"),
    "a batch that is broadcast": (lambda x, y: x[:1] @ y, "bnd", "bdm"),
    "to another tensor": (lambda x, y: torch.matmul(x, y, out=torch.empty(SIZES["n"], SIZES["m"])), "nd", "dm"),
    "another operator": (lambda x, y: x + y, "nd", "nd"),
    "einsum that sums two letters": (lambda x, y: einsum("nhd,mhd->nm", x, y), "nhd", "mhd"),
    "einsum that sums none": (lambda x, y: einsum("nd,md->nmd", x, y), "nd", "md"),
    "einsum that sums one operand's": (lambda x, y: einsum("nd,md->n", x, y), "nd", "md"),
    "einsum without a letter of its own": (lambda x, y: einsum("bnd,bd->bn", x, y), "bnd", "bd"),
    "einsum with two of its own": (lambda x, y: einsum("nhd,md->nhm", x, y), "nhd", "md"),
    "einsum of a diagonal": (lambda x, y: einsum("nn,nm->nm", x, y), "nn", "nm"),
    "einsum of one": (lambda x, y: einsum("nd->dn", x), "nd", "nd"),
    "einsum of three": (lambda x, y: einsum("nd,md,nm->nm", x, y, x @ y.t()), "nd", "md"),
    "einsum without a result": (lambda x, y: einsum("nd,dm", x, y), "nd", "dm"),
    "einsum with dots on one side": (lambda x, y: einsum("...nd,dm->...nm", x, y), "bnd", "dm"),
    "einsum of a batch that is broadcast": (lambda x, y: einsum("bnd,bmd->bnm", x[:1], y), "bnd", "bmd"),
}  # fmt: skip


@pytest.mark.parametrize(("function", "left", "right"), LEFT.values(), ids=LEFT)
def test_what_is_no_product_of_two_matrices(function, left, right):
    assert read(function, left, right)[0] is None


def test_of_unknown_shape_nothing_is_said():
    gm = fx.symbolic_trace(lambda x, y: x @ y)
    assert all(batched_product(node) is None for node in gm.graph.nodes)


def test_what_is_written_in_place_is_left():
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    for node in (x, y):
        node.meta["example_value"] = torch.empty(3, 3)
    assert batched_product(graph.call_function(operator.matmul, (x, y))) is not None
    assert batched_product(graph.call_function(operator.imatmul, (x, y))) is None
