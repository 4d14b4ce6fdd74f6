"""Neurons write spikes at full width where their one reader would widen them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hand_written import currents
from rewriting import rewritten
from torch import Tensor

RULE = "wide_spikes"


def fired(x: Tensor) -> Tensor:
    v, out = torch.zeros_like(x[0]), []
    for step in x:
        v = v + (step - v) * 0.5
        out.append((v >= 0.7).to(v))
        v = v * (1 - out[-1])
    return torch.stack(out)


def layers(x: Tensor) -> Any:
    """A dense layer reads them, as one widened tensor."""
    return fired(x).flatten(0, 1) @ x[0].transpose(0, 1)


def written_to(x: Tensor) -> Any:
    """What is read is written to afterwards."""
    spikes = fired(x)
    spikes.mul_(3)
    return spikes


def twice(x: Tensor) -> Any:
    """Steps are read one by one, too."""
    v, out = torch.zeros_like(x[0]), []
    for step in x:
        v = v + (step - v) * 0.5
        out.append((v >= 0.7).to(v))
        v = v * (1 - out[-1])
    return torch.stack(out), out[1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("run", "taken"), [(layers, True), (written_to, True), (twice, False)])
def test_where_one_reader_widens_them(run: Callable[[Tensor], Any], taken: bool, dtype: torch.dtype) -> None:
    x = currents(4, 6, 5).to(dtype)
    with torch.no_grad():
        found, report = rewritten(run, x, neurons="fuse", implementation="auto", strict=True)
        expected = run(x)
    assert [one.rewritten for one in report.sites if one.rule == RULE] == [True] * taken
    assert ("i8[" not in report.graph_after) == taken and "neuron.default" in report.graph_after
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
