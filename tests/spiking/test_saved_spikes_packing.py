"""How one tensor is handed from forward to backward: in how many bytes, and that the backward gets it as it was.

Forward and backward are traced apart and packed, so that a case takes milliseconds.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from sparsecomp.passes.spiking.saved_spikes import _pack_saved

FLOATS = torch.float32
CHANNELS_LAST = torch.channels_last
cast: Any = torch.ops.prims.convert_element_type.default


def spikes(x: Tensor, dtype: torch.dtype = FLOATS) -> Tensor:
    return cast(x > 0, dtype)


def counts(x: Tensor, most: int) -> Tensor:
    return torch.clamp(torch.round(torch.nan_to_num(spikes(x) * most)), 0, most)


def steps(x: Tensor, count: int) -> list[Tensor]:
    """So many tensors of a row or more each, made of different numbers."""
    return [spikes(x.roll(step, 1)) for step in range(count)]


def packed(make: Callable[[Tensor], Tensor], x: Tensor, low: bool, returned: bool = False) -> tuple[Tensor, Tensor]:
    """What forward hands over of what `make` gives, and the same in the backward; held against the tensor itself."""
    forward = make_fx(lambda x: [y := make(x), y] if returned else [x + 1, make(x)], tracing_mode="fake")(x)
    saved = forward.graph.output_node().args[0][1]
    graph = fx.Graph()
    given = graph.placeholder(saved.name)
    given.meta = {"val": saved.meta["val"]}
    graph.output(graph.call_function(torch.ops.aten.alias.default, (given,)))
    backward = fx.GraphModule({}, graph)
    expected = make(x)
    _pack_saved(forward, backward, 1, low)
    _, handed = forward(x)
    found = backward(handed)
    assert found.dtype == expected.dtype and torch.equal(found, expected) and found.stride() == expected.stride()
    assert expected.unique().numel() > 1
    return handed, expected


X = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
MAPS = torch.randn(8, 4, 3, 2, generator=torch.Generator().manual_seed(1))

# bytes handed over by default and under low memory, for 48 numbers
CASES: dict[str, tuple[Callable[[Tensor], Tensor], Tensor, int, int]] = {
    "spikes": (spikes, X, 48, 6),
    "spikes of halves": (lambda x: spikes(x, torch.float16), X, 48, 6),
    "bools": (lambda x: x > 0, X, 48, 6),
    "up to 3": (lambda x: spikes(x) + spikes(x - 1) + spikes(x + 1), X, 48, 12),
    "up to 2": (lambda x: spikes(x) + spikes(x - 1), X, 48, 12),
    "up to 15": (lambda x: spikes(x) * 15, X, 48, 24),
    "up to 16": (lambda x: spikes(x) * 16, X, 48, 48),
    "up to 255": (lambda x: spikes(x) * 255, X, 48, 48),
    "up to 256": (lambda x: spikes(x) * 256, X, 192, 192),
    "negative": (lambda x: spikes(x) - spikes(-x), X, 192, 192),
    "scaled": (lambda x: spikes(x) * 0.25, X, 48, 6),
    "scaled counts": (lambda x: (spikes(x) + spikes(x - 1)) * 4, X, 48, 24),  # up to 8
    "quarters": (lambda x: (spikes(x) + spikes(x - 1)) * 0.25, X, 48, 12),
    "thirds": (lambda x: spikes(x) * 0.3, X, 192, 192),
    "anything": (lambda x: x * 2, X, 192, 192),
    "an input": (lambda x: x, X, 192, 192),
    "views": (lambda x: torch.ops.aten.view.default(spikes(x), [4, 12]), X, 48, 12),
    "rows of no number that divides": (lambda x: spikes(x[:7]), X, 42, 42),
    "six rows": (lambda x: spikes(x[:6]), X, 36, 18),
    "transposed": (lambda x: spikes(x).t(), X, 192, 192),
    "images": (spikes, MAPS, 192, 24),
    "channels last": (lambda x: spikes(x.contiguous(memory_format=CHANNELS_LAST)), MAPS, 192, 24),
    "channels last counts": (lambda x: spikes(x.contiguous(memory_format=CHANNELS_LAST)) * 3, MAPS, 192, 48),
    # ---- put together step by step: a byte has one element of each
    "two steps": (lambda x: torch.cat(steps(x, 2)), X, 48, 48),
    "eight steps": (lambda x: torch.cat(steps(x, 8)), X, 48, 48),
    "nine steps": (lambda x: torch.cat(steps(x, 9)), X, 432, 54),
    "one step": (lambda x: torch.cat(steps(x, 1)), X, 48, 6),
    "steps of counts": (lambda x: torch.cat([one * 3 for one in steps(x, 4)]), X, 48, 48),
    "five steps of counts": (lambda x: torch.cat([one * 3 for one in steps(x, 5)]), X, 240, 60),
    "steps along another dimension": (lambda x: torch.cat(steps(x, 2), 1), X, 96, 12),
    "steps of other sizes": (lambda x: torch.cat([spikes(x), spikes(x[:4])]), X, 72, 18),
    "steps of bools": (lambda x: torch.cat([x > 0, x > 1]), X, 48, 48),
    "steps seen as another shape": (
        lambda x: torch.ops.aten.view.default(torch.cat(steps(x, 4)), [4, 48]), X, 48, 48),
    "steps that a view cuts": (lambda x: torch.ops.aten.view.default(torch.cat(steps(x, 4)), [2, 96]), X, 192, 96),
    "steps of bools, seen as numbers": (lambda x: cast(torch.cat([x > 0, x > 1]), FLOATS), X, 48, 48),
    "steps that are multiplied": (lambda x: torch.cat(steps(x, 2)) * 2, X, 96, 24),
}  # fmt: skip


@pytest.mark.parametrize("low", [False, True], ids=["auto", "low"])
@pytest.mark.parametrize(("make", "x", "auto_bytes", "low_bytes"), CASES.values(), ids=CASES)
def test_bytes_handed_over(make, x, auto_bytes, low_bytes, low):
    handed, _ = packed(make, x, low)
    assert handed.nbytes == (low_bytes if low else auto_bytes)


def test_what_the_user_gets_is_handed_over_as_it_is():
    handed, expected = packed(spikes, X, True, returned=True)
    assert handed.dtype is torch.float32 and handed.shape == expected.shape


def test_a_byte_has_an_element_of_each_step_the_first_lowest():
    handed, _ = packed(lambda x: torch.cat(steps(x, 3)), X, False)
    by_hand = sum((X.roll(step, 1) > 0).int() << step for step in range(3))
    assert torch.equal(handed.int(), by_hand)
