"""Buffers that follow from others keep their contents in `to_empty`, which leaves the others without any."""

import pytest
import torch
from torch import Tensor, nn

from sparsecomp.formats import BITMAP, CSR, NARROW, NM
from sparsecomp.nn import GeoSparseLinear, SparseLinear

_KEPT = ("transposed_pointers", "transposed_indices", "transposed_order", "transposed_source")


def geo_of(seed: int) -> GeoSparseLinear:
    index = torch.randint(24, (16, 3), generator=torch.Generator().manual_seed(seed))
    return GeoSparseLinear(24, 16, index)


def sparse_of(kind: type, **layout: float) -> SparseLinear:
    return SparseLinear.from_linear(nn.Linear(24, 16), kind, **layout)


_LAYERS = {
    "CSR": lambda seed: sparse_of(CSR, sparsity=0.8),
    "NARROW": lambda seed: sparse_of(NARROW, sparsity=0.8),
    "BITMAP": lambda seed: sparse_of(BITMAP, sparsity=0.8),
    "NM": lambda seed: sparse_of(NM, n=2, m=4),
    "local": geo_of,
}


def kept_of(layer: nn.Module) -> dict[str, Tensor]:
    return {name: getattr(layer, name).clone() for name in _KEPT if hasattr(layer, name)}


@pytest.mark.parametrize("make", _LAYERS.values(), ids=_LAYERS)
def test_they_stay_what_they_were_made_of(make):
    torch.manual_seed(3)
    layer = make(0)
    layer(torch.randn(2, 24)).sum().backward()
    before = kept_of(layer)
    layer.to_empty(device="cpu")
    assert len(before) >= 3
    for name, array in before.items():
        assert torch.equal(getattr(layer, name), array)


@pytest.mark.parametrize("make", _LAYERS.values(), ids=_LAYERS)
def test_a_layer_from_the_meta_device_takes_a_state(make):
    """As who builds a large model where it takes no memory, and then loads it."""
    torch.manual_seed(4)
    given, layer = make(1), make(1).to("meta")
    assert all(array.is_meta for array in layer.buffers())
    layer.to_empty(device="cpu")
    with torch.no_grad():
        for name, own in layer.state_dict().items():
            own.copy_(given.state_dict()[name])
    x = torch.randn(3, 24, requires_grad=True)
    found, wanted = (torch.autograd.grad(one(x).square().sum(), (x, *one.parameters())) for one in (layer, given))
    torch.testing.assert_close(found, wanted)
