"""Looks, under `SPARSECOMP_DEBUG=1`, whether what a constant of a graph was worked out of is what it was then."""

import torch
from torch import Tensor

from sparsecomp.ops.library import TAGS, implement, library
from sparsecomp.reference.memo import check_kept

library.define("promised(Tensor kept, Tensor[] sources, Tensor[] seen, str[] names) -> Tensor", tags=TAGS)


def _promised(kept: Tensor, sources: list[Tensor], seen: list[Tensor], names: list[str]) -> Tensor:
    """A copy of `kept`, which was made of `sources`, called `names`, when they held what is `seen`."""
    if not (kept.is_cuda and torch.cuda.is_current_stream_capturing()):  # a graph cannot ask
        check_kept(sources, seen, names)
    return kept.clone()


implement("promised", _promised, fake=lambda kept, sources, seen, names: kept.clone())
