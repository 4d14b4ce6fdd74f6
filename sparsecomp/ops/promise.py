"""Looks, under ``SPARSECOMP_DEBUG=1``, whether what something was worked out of still is what it was then.

Bits are compared, not numbers: NaN that stays is no write, and -0.0 in the place of 0.0 is one.
"""

from collections.abc import Sequence

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


def check_kept(sources: Sequence[Tensor], seen: Sequence[Tensor], names: Sequence[str]) -> None:
    """Look whether `sources` hold what was `seen`; waits for the device.

    Args:
        names: of each source, for the error.

    Raises:
        FrozenWeightError: one holds something else.
    """
    for source, one, name in zip(sources, seen, names, strict=True):
        if source.dtype is not one.dtype or source.shape != one.shape or not torch.equal(_bytes(source), _bytes(one)):
            raise FrozenWeightError(
                f"{name} ({source.dtype}, {'x'.join(map(str, source.shape))}) was promised to stay, but it was "
                "written to: write to it outside of sparsecomp.ops.frozen_weights(), compile without the option "
                "frozen, or compile again after the write"
            )


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def _promised(kept: Tensor, sources: list[Tensor], seen: list[Tensor], name: str) -> Tensor:
    if not (kept.is_cuda and torch.cuda.is_current_stream_capturing()):  # a graph cannot ask
        check_kept(sources, seen, [name] * len(sources))
    return kept.clone()


for _device in ("CPU", "CUDA"):
    library.impl("promised", _promised, _device)
torch.library.register_fake("sparsecomp::promised", lambda kept, sources, seen, name: kept.clone(), lib=library)
