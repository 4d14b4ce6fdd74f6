"""The tuning results of this process, for users: keep them, carry them to another machine, ask why they do not serve.

Results of the GPU's kernels are measured once and kept in ``SPARSECOMP_CACHE_DIR`` for every later process. Files are
JSON; nothing of them is evaluated, and a file with one bad value is refused whole.
"""

from collections.abc import Callable, Iterable, Mapping
from os import PathLike
from typing import TYPE_CHECKING, Any

from sparsecomp.environment import Effort
from sparsecomp.errors import InputError
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
    model_or_signatures: Callable[..., Any] | Iterable[KernelSignature | Mapping[str, str]],
    /,
    *args: Any,
    effort: Effort = "full",
    **keywords: Any,
) -> "list[Chosen]":
    """Tune ahead of use, on this machine.

    Args:
        model_or_signatures: a model or function, as for `sparsecomp.tune`; or signatures, or their fields as in an
            exported file.
        *args: the model's inputs.
        effort: ``"quick"`` measures a few promising candidates, ``"full"`` all.
        **keywords: as for `sparsecomp.tune`.

    Returns:
        What was chosen for each signature that has several candidates.

    Raises:
        TuningError: an operation is unknown, or none of its kernels could be used.
        SignatureError: fields that are no signature's.
        InputError: a model without inputs, or signatures with some.
    """
    from sparsecomp.compiler import warmup  # loads Inductor

    if callable(model_or_signatures):
        return warmup.tune(model_or_signatures, *args, effort=effort, **keywords)
    if args or keywords:
        raise InputError("signatures are tuned by themselves: give nothing but `effort` beside them")
    return warmup.tune_signatures(model_or_signatures, effort)
