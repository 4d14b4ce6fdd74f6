"""SPARSECOMP_DEBUG=1 finds a sparse layer whose index arrays were written to where nothing tells of it."""

import pytest
import torch
from torch import nn

from sparsecomp.errors import FrozenWeightError
from sparsecomp.formats import BSR, CSC, CSR, NM
from sparsecomp.nn import SparseLinear
from sparsecomp.nn.sparse import stored_weight
from sparsecomp.ops import Layout
from sparsecomp.ops.sparse.checked_transpose import checked_transpose


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("format", [CSR, CSC, BSR, NM])
def test_debug_finds_index_arrays_that_were_written_behind_the_layers_back(format, compiled, monkeypatch):
    monkeypatch.setenv("SPARSECOMP_DEBUG", "1")
    linear = nn.Linear(16, 8)
    mask = torch.stack([torch.tensor([1.0, 1, 0, 0] * 4).roll(row // 2 * 2) for row in range(8)])
    layout = {"block": 2} if format is BSR else {"n": 2, "m": 4} if format is NM else {}
    layer, other = (SparseLinear.from_linear(linear, format, mask=one, **layout) for one in (mask, mask.roll(2, 1)))
    run = torch.compile(layer, backend="sparsecomp") if compiled else layer
    x = torch.randn(3, 16)
    run(x).sum().backward()
    with torch.no_grad():
        layer.indices.copy_(other.indices)  # an eager call follows what torch counts
        layer.values.copy_(other.values)
    if not compiled:
        torch.testing.assert_close(layer(x), other(x))
    layer.load_state_dict(other.state_dict())
    torch.testing.assert_close(run(x), other(x))
    layer.indices.numpy()[:] = layer.indices.numpy()[::-1].copy()
    with pytest.raises(FrozenWeightError, match="NumPy alias.*load_state_dict"):
        run(x)
    layer.load_state_dict(other.state_dict())
    torch.testing.assert_close(run(x), other(x))


def test_debug_costs_nothing_where_it_is_off(monkeypatch):
    monkeypatch.delenv("SPARSECOMP_DEBUG", raising=False)
    monkeypatch.setattr(stored_weight, "checked_transpose", None)
    SparseLinear.from_linear(nn.Linear(16, 8), sparsity=0.5)(torch.randn(3, 16)).sum().backward()


def test_the_check_of_a_transpose_by_itself():
    pointers, indices = torch.tensor([0, 2, 3]), torch.tensor([0, 2, 1])
    layout = Layout("csr", (1, 1), (2, 3), ("even", "even")).written()
    # columns 0, 1 and 2 hold entries 0, 2 and 1, of rows 0, 1 and 0
    kept = [torch.tensor([0, 1, 2, 3]), torch.tensor([0, 1, 0]), torch.tensor([0, 2, 1], dtype=torch.int32)]
    assert all(map(torch.equal, checked_transpose([pointers, indices, *kept], layout), kept))
    torch.library.opcheck(torch.ops.sparsecomp.checked_transpose.default, ([pointers, indices, *kept], layout))
    for broken in (torch.tensor([0, 1, 3]), torch.tensor([0, 2, 9]), torch.tensor([3, 2, 1])):
        with pytest.raises(FrozenWeightError, match="NumPy"):
            checked_transpose([broken, indices, *kept], layout)
