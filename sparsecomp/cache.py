"""The tuning results of this process, for users: keep them, carry them to another machine, ask why they do not serve.

Results of the GPU's kernels are measured once and kept in ``SPARSECOMP_CACHE_DIR`` for every later process. Files are
JSON; nothing of them is evaluated, and a file with one bad value is refused whole.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch

from sparsecomp.environment import Effort
from sparsecomp.errors import InputError, OptionError
from sparsecomp.lowering.cache.entry import Document
from sparsecomp.lowering.cache.signature import Device, KernelSignature, device_of, devices_here
from sparsecomp.lowering.cache.tuning_cache import CacheWarning, Miss, Stats, default_cache, read_results

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

    Results count for the GPU model and the Triton version they were measured with; others do no harm, and a
    `CacheWarning` says how many of whose there are.

    Raises:
        CacheError: the file cannot be read, or one value in it is not what it should be.
    """
    return _take(path)


def merge(other: str | PathLike[str]) -> int:
    """As :func:`import_`, from an exported file or another cache's ``tuning.sqlite``.

    Raises:
        CacheError: as there.
    """
    return _take(other)


def _take(path: str | PathLike[str]) -> int:
    document = read_results(path)
    for group in by_device(document):
        if not group.used_here:
            warnings.warn(str(group), CacheWarning, stacklevel=3)
    return default_cache().take(document)


@dataclass(frozen=True)
class Group:
    """Results of one device.

    Attributes:
        gpu, triton: where they were measured.
        entries: how many there are.
        used_here: whether they count on this machine.
    """

    gpu: str
    triton: str
    entries: int
    used_here: bool

    def __str__(self) -> str:
        many = f"{self.entries} {'entry' if self.entries == 1 else 'entries'} of {self.gpu} with Triton {self.triton}"
        return many if self.used_here else f"{many}: not used on this machine, which has {_here()}"


def by_device(document: Document) -> list[Group]:
    """Whose results a file holds, the most first."""
    here = devices_here()
    counts = Counter(entry.device for entry in document.entries).most_common()
    return [Group(device.name, device.triton, count, device in here) for device, count in counts]


def _here() -> str:
    gpus = [f"{device.name} with Triton {device.triton}" for device in devices_here() if device.capability]
    return " and ".join(gpus) or "no CUDA device with Triton"


def stats() -> Stats:
    """Hits and misses of this process, and what is stored where."""
    return default_cache().stats()


def explain_miss(signature: KernelSignature | Mapping[str, str]) -> Miss | None:
    """Which fields differ from the nearest results; None if there are results for ``signature``, or for its fields.

    Raises:
        InputError: this is neither a signature nor fields.
        SignatureError: fields that are no signature's.
    """
    from sparsecomp.compiler import warmup  # loads Inductor

    return default_cache().explain_miss(warmup.signature_of(signature))


def prune(device: str | torch.device | Device | None = None) -> int:
    """Forget results of other GPUs and other Triton versions than ``device``'s, and what is beyond the cache's bounds.

    Args:
        device: such as ``"cuda"``; None forgets what is beyond the bounds only.

    Returns:
        The number of entries that went.

    Raises:
        OptionError: there is no such device here.
    """
    return default_cache().prune(device if device is None or isinstance(device, Device) else _identity(device))


def _identity(device: str | torch.device) -> Device:
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise OptionError(f"{device!r} is no device: use cuda, cuda:1 or cpu") from None
    count = torch.cuda.device_count()
    if found.type == "cuda" and (found.index or 0) >= count:
        raise OptionError(f"{device!r} is not there: this machine has {count} CUDA devices")
    return device_of(found)


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
        InputError: a model without inputs, signatures with some, or something that is neither.
        OptionError: an unknown effort or option.
    """
    from sparsecomp.compiler import warmup  # loads Inductor

    if callable(model_or_signatures):
        return warmup.tune(model_or_signatures, *args, effort=effort, **keywords)
    if args or keywords:
        raise InputError("signatures are tuned by themselves: give nothing but `effort` beside them")
    return warmup.tune_signatures(model_or_signatures, effort)
