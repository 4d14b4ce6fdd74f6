"""The tuning results of this process, for users: keep them, carry them to another machine, ask why they do not serve.

Results of the GPU's kernels are measured once and kept in ``SPARSECOMP_CACHE_DIR`` for every later process. Files are
JSON; nothing of them is evaluated, and a file with one bad value is refused whole.
"""

from collections.abc import Iterable, Mapping
from os import PathLike
from typing import TYPE_CHECKING, Any

from torch import nn

from sparsecomp.environment import Effort
from sparsecomp.lowering.cache.signature import Device, KernelSignature
from sparsecomp.lowering.cache.tuning_cache import Miss, Stats, default_cache

if TYPE_CHECKING:
    from sparsecomp.lowering.tuning.autotune import Chosen

__all__ = ["clear", "explain_miss", "export", "import_", "merge", "prune", "stats", "warmup"]


def export(path: str | PathLike[str]) -> int:
    """Write all results to a JSON file, whole or not at all; returns the number of entries.

    Raises:
        CacheError: the file cannot be written.
    """
    return default_cache().export(path)


def import_(path: str | PathLike[str]) -> int:
    """Add the results that :func:`export` wrote, all or nothing; own measurements stay. Returns the number of entries.

    Results count for the GPU model and the Triton version they were measured with; others do no harm.

    Raises:
        CacheError: the file cannot be read, or one value in it is not what it should be.
    """
    return default_cache().import_(path)


def merge(other: str | PathLike[str]) -> int:
    """As :func:`import_`, from an exported file or another cache's ``tuning.sqlite``.

    Raises:
        CacheError: as there.
    """
    return default_cache().merge(other)


def stats() -> Stats:
    """Hits and misses of this process, and what is stored where."""
    return default_cache().stats()


def explain_miss(signature: KernelSignature) -> Miss | None:
    """Which fields differ from the nearest results; None if there are results for ``signature``."""
    return default_cache().explain_miss(signature)


def prune(device: Device | None = None) -> int:
    """Forget results of other GPUs and other Triton versions than ``device``'s, and what is beyond the cache's bounds.

    Returns:
        The number of entries that went.
    """
    return default_cache().prune(device)


def clear() -> int:
    """Forget everything; returns the number of entries that went."""
    return default_cache().clear()


def warmup(
    model_or_signatures: nn.Module | Iterable[KernelSignature | Mapping[str, str]],
    example_inputs: Any = None,
    effort: Effort = "full",
) -> "list[Chosen]":
    """Tune ahead of use, on this machine.

    Args:
        model_or_signatures: a model, which is compiled and run once on ``example_inputs`` and left as it was; or
            signatures, or their fields as in an exported file.
        example_inputs: a tensor or a tuple of positional arguments.
        effort: ``"quick"`` measures a few promising candidates, ``"full"`` all.

    Returns:
        What was chosen for each signature that has several candidates.

    Raises:
        TuningError: an operation is unknown, or none of its kernels could be used.
        SignatureError: fields that are no signature's.
        ValueError: a model without example inputs.
    """
    from sparsecomp.compiler.warmup import warmup as tune  # loads Inductor

    return tune(model_or_signatures, example_inputs, effort)
