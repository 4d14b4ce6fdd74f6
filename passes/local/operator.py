"""What all spellings of a layer of fixed fan-in share: what an estimate is told of one, and the operator's call."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

import sparsecomp.ops.local.gather_dot  # noqa: F401  (registers the operators)
from sparsecomp import _compat
from sparsecomp.passes.cost.decision import Decision, fastest
from sparsecomp.passes.cost.local import FixedFanIn, decide
from sparsecomp.passes.engine.rule import Context, call, known_sizes
from sparsecomp.passes.graph.canonicalize import example_of
from sparsecomp.passes.sparse.chain import Chain, circumstances
from sparsecomp.reference.local.spread import spread_of

GATHER_DOT = torch.ops.sparsecomp.gather_dot.default


def fixed_fan_in(chain: Chain, fan: tuple[int, int], spread: str | None, kept: bool, ctx: Context) -> FixedFanIn:
    """A layer and what is fused behind it, for an estimate.

    Args:
        fan: n_out and k.
        spread, kept: as of `FixedFanIn`.
    """
    x, (*leading, inputs) = example_of(chain.dense), known_sizes(chain.dense) or [0]
    return FixedFanIn(
        ctx.device(x.device), torch.Size(leading).numel(), inputs, *fan, example_of(chain.nodes[0]).dtype,
        chain.bias is not None, chain.residual is not None, chain.activation, spread, kept,
        **circumstances(chain, ctx, x.device),
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
