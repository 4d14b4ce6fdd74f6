"""Tuning results ride in torch's compilation artifacts (`torch.compiler.save_cache_artifacts`), where torch has them.

Each entry that this process reads or writes is recorded as the JSON of :mod:`sparsecomp.lowering.cache.entry`;
loading checks it like any file. Torch refuses to load artifacts of a type that nobody has registered: a process that
loads some must have imported the backend first, as `torch.compile(model, backend="sparsecomp")` does.
"""

import warnings
from collections.abc import Callable
from functools import cache
from hashlib import sha256

from sparsecomp import _compat
from sparsecomp.errors import CacheError
from sparsecomp.lowering.cache.entry import Entry, dump, parse
from sparsecomp.lowering.cache.tuning_cache import CacheWarning, default_cache, observers

TYPE = "sparsecomp"


@cache
def install() -> bool:
    """Record from now on, and load what was recorded; False where this torch offers no artifacts of others."""
    record = _compat.register_artifact(TYPE, load_artifact)
    if record is not None:
        observers.append(_recorder(record))
    return record is not None


def load_artifact(content: bytes) -> None:
    """Add one artifact's results to the process's cache; bad ones are a warning, since others load beside it."""
    try:
        default_cache().take(parse(content))
    except CacheError as error:
        warnings.warn(f"an artifact's tuning results were left out: {error}", CacheWarning, stacklevel=2)


def _recorder(record: Callable[[str, bytes], None]) -> Callable[[Entry], None]:
    def observe(entry: Entry) -> None:
        record(sha256(entry.key.encode()).hexdigest(), "".join(dump([entry], [])).encode())

    return observe
