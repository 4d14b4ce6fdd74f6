"""A gated pair of layers of few rows, of two weights of one format, as operations of one launch each:

    out = activation(weight @ x.mT + bias) · (other_weight @ x.mT + other_bias)

A problem is that of either layer alone: with the activation, a bias where both have one, and as many values as the two
weights have on average. Where the distances of two in NARROW are of two dtypes, `distance` is both, as `uint8+int16`,
which hang on how far values lie apart. A pair of 2:4 with packed positions is `lowering.sparse.packed_linear`'s.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sparsecomp.lowering.cache.signature import Device, KernelSignature, device_of
from sparsecomp.lowering.launch.dispatch import prepared, recorded
from sparsecomp.lowering.launch.epilogue import described_output
from sparsecomp.lowering.launch.strided import name_of
from sparsecomp.lowering.launch.watch import allocate
from sparsecomp.lowering.sparse.launcher import launcher_of
from sparsecomp.lowering.sparse.narrow import SPMM_NARROW, SpmmNarrow
from sparsecomp.lowering.sparse.spmm_csr import SPMM_CSR
from sparsecomp.lowering.tuning.template import Operation
from sparsecomp.reference.patterns import Layout

_Launch = Callable[..., None]


def paired(name: str, alone: Operation[Any]) -> Operation[Any]:
    """The operation on pairs of what `alone` takes one of.

    Its operands are the arrays of one weight, those of the other, dense, both biases and the output.
    """
    representative, operands, reference, tolerance = (
        alone.representative, alone.operands, alone.reference, alone.tolerance
    )  # fmt: skip
    assert representative and operands and reference and tolerance

    def signature(problem: Any, device: Device) -> KernelSignature:
        return replace(alone.signature(problem, device), op=name)

    def of_pair(problem: Any, device: torch.device, seed: int) -> tuple[Tensor | None, ...]:
        *weight, dense, bias, _, out = operands(_one_of(problem, 0), device, seed)
        *other, _, other_bias, _, _ = operands(_one_of(problem, 1), device, seed + 1)
        return *weight, *other, dense, bias, other_bias, out

    def product(problem: Any, given: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
        *weights, dense, bias, other_bias, out = given
        half, plain = len(weights) // 2, problem.output._replace(activation="none")
        (gate,) = reference(problem, (*weights[:half], dense, bias, None, out))
        (up,) = reference(problem._replace(output=plain), (*weights[half:], dense, other_bias, None, out))
        return (gate * up,)

    return Operation(name, signature, representative, of_pair, (2 * alone.results[0] - 3,), product, tolerance)


def _one_of(problem: Any, place: int) -> Any:
    """The problem of one of the weights alone, but for the activation."""
    distances = problem.distance.split("+") if isinstance(problem, SpmmNarrow) else ()
    return problem._replace(distance=distances[place]) if len(distances) > 1 else problem


NARROW_PAIR = paired("narrow_pair", SPMM_NARROW)
CSR_PAIR = paired("csr_pair", SPMM_CSR)
PAIRS = {"narrow": NARROW_PAIR, "csr": CSR_PAIR}
"""By format."""


def pair_product(
    x: Tensor, weight: Sequence[Tensor], other: Sequence[Tensor], biases: tuple[Tensor | None, Tensor | None],
    layout: Layout, activation: str,
) -> Tensor | None:  # fmt: skip
    """activation(x @ S.mT + a bias) · (x @ T.mT + the other bias), rounded once.

    Args:
        x: (..., k), contiguous; all tensors are.
        weight, other: values of S and of T, and the index arrays of each.
        biases: (m,) each, of one dtype; both or none.
        layout: of both.

    Returns:
        (..., m), contiguous; None if no kernel takes the operands.
    """
    (values, *arrays), (other_values, *other_arrays) = weight, other
    if layout.format not in PAIRS:
        return None
    mean = (values.numel() + other_values.numel() + 1) // 2
    dtypes, other_dtypes = (tuple(one.dtype for one in own) for own in (weight, other))
    launch = _pair(
        x.device, x.shape[:-1].numel(), x.dtype, mean, dtypes, other_dtypes,
        None if biases[0] is None else biases[0].dtype, layout, activation,
    )  # fmt: skip
    if launch is None:
        return None
    out = allocate((x.shape[:-1].numel(), layout.shape[0]), (layout.shape[0], 1), x.dtype, x.device)
    launch(*arrays, values, *other_arrays, other_values, x, *biases, out)
    return out if x.dim() == 2 else out.view(*x.shape[:-1], layout.shape[0])


@recorded
def _pair(
    device: torch.device, rows: int, dtype: torch.dtype, entries: int, dtypes: tuple[torch.dtype, ...],
    other_dtypes: tuple[torch.dtype, ...], bias: torch.dtype | None, layout: Layout, activation: str,
) -> _Launch | None:  # fmt: skip
    (m, k), narrow = layout.shape, layout.format == "narrow"
    own = len(dtypes) - narrow  # of NARROW's arrays the last are the distances
    if rows * m * k * entries == 0 or dtypes[:own] != other_dtypes[:own]:
        return None
    values = torch.empty(entries, dtype=dtypes[0], device="meta")
    dense, out = (torch.empty(rows, size, dtype=dtype, device="meta").mT for size in (k, m))
    described = described_output(out, "row", bias, None, activation)
    problem = launcher_of(layout).problem_of(values, layout, dense, out, described, dtypes[1])
    if narrow:
        problem = problem._replace(distance="+".join(dict.fromkeys(map(name_of, (dtypes[-1], other_dtypes[-1])))))
    pair = PAIRS[layout.format]
    return prepared(pair, problem, device) if pair.candidates(problem, device_of(device)) else None
