"""Looks, under ``SPARSECOMP_DEBUG=1``, whether what a graph keeps as a constant still is what it was made of."""

import torch
from torch import Tensor

from sparsecomp.errors import FrozenWeightError
from sparsecomp.ops.library import TAGS, library

library.define("promised(Tensor kept, Tensor[] sources, Tensor[] seen, str name) -> Tensor", tags=TAGS)


def promised(kept: Tensor, sources: list[Tensor], seen: list[Tensor], name: str) -> Tensor:
    """A copy of `kept`, which was made of `sources` when they held what is `seen`.

    Args:
        name: of the sources, for the error.

    Raises:
        FrozenWeightError: a source holds something else.
    """
    return torch.ops.sparsecomp.promised.default(kept, sources, seen, name)


def _promised(kept: Tensor, sources: list[Tensor], seen: list[Tensor], name: str) -> Tensor:
    capturing = kept.is_cuda and torch.cuda.is_current_stream_capturing()  # a graph cannot ask
    if not capturing and not all(torch.equal(source, one) for source, one in zip(sources, seen, strict=True)):
        raise FrozenWeightError(
            f"{name} was promised to stay, but it was written to: compile without the option frozen, or compile again "
            "after the write"
        )
    return kept.clone()


for _device in ("CPU", "CUDA"):
    library.impl("promised", _promised, _device)
torch.library.register_fake("sparsecomp::promised", lambda kept, sources, seen, name: kept.clone(), lib=library)
