"""Runs a product in every schedule that takes it, not only in the one that would be chosen."""

from collections.abc import Callable, Iterator
from unittest import mock

import torch

from sparsecomp.lowering.cache.signature import device_of
from sparsecomp.lowering.launch import dispatch
from sparsecomp.lowering.tuning.cards import H100
from sparsecomp.lowering.tuning.cost import rank
from sparsecomp.lowering.tuning.template import of_operation


def captured(call: Callable[[], None]):
    """The operation, problem and tensors that `call` would dispatch."""
    found = []

    def note(operation, problem, *tensors):
        found.append((operation, problem, tensors))

    with mock.patch.object(dispatch, "launch", note):
        call()
    return found[0] if found else None


def schedules(call: Callable[[], None], out: torch.Tensor, configs: int = 1) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and result of each template in some configurations; `call` writes `out`, which is NaN before.

    The configuration that is expected to be fastest, and with `configs` = 2 the one expected last too.
    """
    found = captured(call)
    assert found is not None, "nothing was dispatched"
    operation, problem, tensors = found
    device = device_of(out.device)
    ran = 0
    for template in of_operation(operation.name):
        if template.refuse(problem, device) is not None:
            continue
        able = [one for one in operation.candidates(problem, device) if one.template is template]
        ranked = rank(able, problem, H100)
        for candidate in [ranked[0], ranked[-1]][:configs]:
            out.fill_(float("nan"))
            template.prepare(problem, candidate.config)(*tensors)
            yield f"{template.name} {candidate.config}", out.clone()
            ran += 1
    assert ran, f"no schedule takes {problem}"
