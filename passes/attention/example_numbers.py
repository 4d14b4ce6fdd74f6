"""What numbers that are added to scores are in the call that a graph is compiled for: whether they only keep and drop,
and in which blocks something is kept.

Inputs, buffers and parameters hold numbers by then. Those of another call may be others: it is what an estimate asks,
and no more.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from sparsecomp import _compat
from sparsecomp.passes.attention.mask import is_known
from sparsecomp.passes.attention.site import AttentionSite, mask_steps, stepped
from sparsecomp.passes.engine.rule import Context
from sparsecomp.passes.graph.canonicalize import op_of
from sparsecomp.passes.graph.operators import Trait
from sparsecomp.passes.masked.formula import computed_by
from sparsecomp.reference.attention.blocks import DEFAULT_BLOCK, SURELY_ZERO
from sparsecomp.reference.attention.scan import pairs_kept_by

_MOST = 2**26
"""Numbers that are looked at: those of the first heads of the first batch entries."""


class ExampleNumbers(NamedTuple):
    """What was seen.

    Attributes:
        only_masks: each is 0, or as good as -inf.
        share: of blocks that keep a pair.
    """

    only_masks: bool
    share: float


def example_numbers(site: AttentionSite, ctx: Context) -> ExampleNumbers | None:
    """Of the numbers that a site adds; None if they are not known. Waits for their device."""
    mask = site.mask
    found = computed_by(mask.node, mask.reader, is_computed, ctx)
    if not all(is_real(ctx.values.get(source)) for source in found.sources):
        return None
    with torch.inference_mode(False), torch.no_grad():
        numbers = found.values(ctx.values)[mask.node]
        numbers = stepped(numbers, mask_steps(numbers.dim(), site.dims))
        q_len, k_len = site.query.shape[2], site.key.shape[2]
        if not numbers.numel():
            return None
        numbers = numbers.flatten(0, 1)[: max(_MOST // (q_len * k_len), 1), None]
        only_masks = bool(((numbers == 0) | (numbers <= SURELY_ZERO)).all())
        return ExampleNumbers(only_masks, _share(pairs_kept_by(numbers, q_len, k_len)[0]))


def _share(kept: Tensor) -> float:
    """Of blocks in which some pair of (…, queries, keys) is kept."""
    height, width = DEFAULT_BLOCK
    kept = F.pad(kept, (0, -kept.shape[3] % width, 0, -kept.shape[2] % height))
    return float(kept.unflatten(3, (-1, width)).any(4).unflatten(2, (-1, height)).any(3).double().mean())


def is_computed(node: fx.Node) -> bool:
    """Whether a call gives the same numbers for the same arguments, as masks and biases are made of."""
    op = op_of(node)
    if op is None or op.out is not None or op.module is not None:
        return False
    return is_known(node) or op.has(Trait.MOVES | Trait.VIEW) or op.name == "embedding"


def is_real(value: object) -> bool:
    """Whether a value of the capture is a tensor with numbers."""
    return isinstance(value, Tensor) and not value.is_meta and not _compat.is_fake(value)
