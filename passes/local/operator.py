"""What all spellings of a layer of fixed fan-in share: what an estimate is told of one, and the operator's call."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

import sparsecomp.ops.local.gather_dot  # noqa: F401  (registers the operators)
from sparsecomp import _compat
from sparsecomp.passes.cost.decision import Decision, fastest
from sparsecomp.passes.cost.local import FixedFanIn, decide
from sparsecomp.passes.engine.constants import promised_node
from sparsecomp.passes.engine.rule import Context, call, known_sizes
from sparsecomp.passes.graph.canonicalize import example_of
from sparsecomp.passes.sparse.chain import Chain, circumstances
from sparsecomp.reference.local.connectivity import check_index
from sparsecomp.reference.local.spread import spread_of
from sparsecomp.reference.local.transposed import transposed_lists

GATHER_DOT = torch.ops.sparsecomp.gather_dot.default


def fixed_fan_in(
    chain: Chain, fan: tuple[int, int], spread: str | None, kept: bool, ctx: Context, followed: bool = False
) -> FixedFanIn:
    """A layer and what is fused behind it, for an estimate.

    Args:
        fan: n_out and k.
        spread, kept, followed: as of `FixedFanIn`.
    """
    x, (*leading, inputs) = example_of(chain.dense), known_sizes(chain.dense) or [0]
    return FixedFanIn(
        ctx.device(x.device), torch.Size(leading).numel(), inputs, *fan, example_of(chain.nodes[0]).dtype,
        chain.bias is not None, chain.residual is not None, chain.activation, spread, kept,
        followed=followed, **circumstances(chain, ctx, x.device),
    )  # fmt: skip


def beside(layer: FixedFanIn, otherwise: Decision) -> Decision:
    """Whether the operator is faster than what runs the layer otherwise, which is `dense` here, whatever it is."""
    ours = decide(layer).seconds.get("gather_dot")
    theirs = otherwise.seconds.get(otherwise.implementation)
    if ours is None or theirs is None:
        return Decision("dense", "no estimate")
    return fastest({"gather_dot": ours, "dense": theirs}, rival=otherwise.implementation)


def spread_now(index: fx.Node, fan: tuple[int, int], ctx: Context) -> str | None:
    """How far apart outputs read now, which decides nothing but speed; None if that is unknown."""
    value = ctx.values.get(index)
    if value is None or _compat.is_fake(value) or value.numel() != fan[0] * fan[1]:
        return None
    return spread_of(value.detach().reshape(fan).int())


class _List(NamedTuple):
    """One of the lists of the transpose of an index: pointers or order."""

    inputs: int
    fan: tuple[int, int]
    which: int

    def __call__(self, index: Tensor) -> Tensor:
        read = check_index(index.reshape(self.fan), self.inputs, self.fan[0])
        return transposed_lists(read, self.inputs)[self.which]


def lists_of(
    index: fx.Node, layer: FixedFanIn, otherwise: Sequence[fx.Node], like: fx.Node, ctx: Context
) -> Sequence[fx.Node]:
    """The lists of the transpose as constants of the graph, which no backward looks at; `otherwise` where no gradient
    needs them, or nobody promised that the index stays."""
    held = ctx.constant(index)
    if held is None or not layer.trained:
        return otherwise
    names, fan = [f"the index `{index.target}`"], (layer.outputs, layer.fan_in)
    return [promised_node(like, _List(layer.inputs, fan, which), [index], [held], names) for which in (0, 1)]


def operator_of(
    chain: Chain, x: fx.Node, weight: fx.Node, index: fx.Node, bias: Any, transposed: Sequence[fx.Node],
    spread: str | None,
) -> fx.Node:  # fmt: skip
    """The operator in the place of a chain.

    Args:
        x, weight, index, bias, transposed: as of `sparsecomp.ops.gather_dot`.
    """
    last = chain.nodes[-1]
    return call(
        last.graph, last, GATHER_DOT, x, weight, index, bias, chain.residual, list(transposed), chain.activation,
        spread or "far",
    )  # fmt: skip
