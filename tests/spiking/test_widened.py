"""Which floats are proved to be widened bytes, or made of such by what rules make in bytes."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rewriting import Examples
from torch import Tensor, fx

from sparsecomp.passes.spiking.widened import made_of_bytes

MADE = {
    "widened": (lambda b, x: b.to(torch.half), True),
    "moved": (lambda b, x: b.to(torch.half).flatten(0, 1), True),
    "pooled, and a sum": (lambda b, x: F.max_pool2d(b.to(torch.half), 2) + F.max_pool2d(b.to(torch.half), 2), True),
    "of bytes and of floats": (lambda b, x: b.to(torch.half) + x, False),
    "a product": (lambda b, x: b.to(torch.half) * 2, False),
    "floats": (lambda b, x: F.max_pool2d(x, 2), False),
    "averaged": (lambda b, x: F.avg_pool2d(b.to(torch.half), 2), False),
}


@pytest.mark.parametrize("name", MADE)
def test_what_is_made_of_bytes(name: str) -> None:
    make, expected = MADE[name]
    gm = fx.symbolic_trace(lambda b, x: make(b, x))
    shape = 1, 2, 4, 4
    Examples(gm).run(torch.ones(shape, dtype=torch.int8), torch.ones(shape, dtype=torch.half))
    kept: Any = SimpleNamespace(analysis=SimpleNamespace(unchanged=lambda *_: True))
    made = gm.graph.output_node().args[0]
    assert isinstance(made, fx.Node) and made_of_bytes(made, kept) == expected
    written: Any = SimpleNamespace(analysis=SimpleNamespace(unchanged=lambda *_: False))
    assert not made_of_bytes(made, written) or name != "moved"
    assert isinstance(make(torch.ones(shape, dtype=torch.int8), torch.ones(shape).half()), Tensor)
