"""Sparse matrices as safetensors files: arrays, and a versioned JSON header that says what they are.

A digest over header and arrays makes every altered byte an error. Nothing in a file is unpickled or evaluated.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from sparsecomp.errors import FormatError
from sparsecomp.whole_file import written_whole

VERSION = 1
_KEY = "sparsecomp"


class Stored(NamedTuple):
    """What a file holds; nothing of it is checked beyond its digest."""

    format: str
    shape: list[int]
    layout: dict[str, Any]
    arrays: dict[str, Tensor]


def save(
    path: str | PathLike[str],
    name: str,
    shape: tuple[int, int],
    layout: Mapping[str, Any],
    arrays: Mapping[str, Tensor],
) -> None:
    """Write a file whole or not at all: beside its place first, then moved there.

    Raises:
        OSError: it cannot be written.
    """
    # safetensors refuses arrays that share memory or have gaps
    own = {key: array.detach().cpu().clone(memory_format=torch.contiguous_format) for key, array in arrays.items()}
    header = {
        "version": VERSION,
        "format": name,
        "shape": list(shape),
        "layout": dict(layout),
        "dtype": str(arrays["values"].dtype).removeprefix("torch."),
    }
    header["digest"] = _digest(header, own)
    target = Path(path).resolve()
    try:
        with written_whole(target) as partial:
            save_file(own, partial, {_KEY: json.dumps(header)})
    except SafetensorError as error:
        raise OSError(f"{path} could not be written: {error}") from error


def load(path: str | PathLike[str]) -> Stored:
    """Read a file onto the CPU.

    Raises:
        FormatError: no whole safetensors file, not by `save`, of another version, or altered.
        OSError: the file cannot be read.
    """
    with open(path, "rb"):
        pass  # a missing or forbidden file is an OSError, not a bad file
    try:
        with safe_open(os.fspath(path), "pt") as file:
            header = json.loads((file.metadata() or {})[_KEY])
            # copies: the file may change under a mapping
            arrays = {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118
        version = header["version"]
        stored = Stored(str(header["format"]), header["shape"], dict(header["layout"]), arrays)
    except SafetensorError as error:
        raise FormatError(f"{path} is no whole safetensors file ({error}): it was truncated or altered") from error
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise FormatError(f"{path} has no readable sparsecomp header: it is another file, or was altered") from error
    if version != VERSION:
        raise FormatError(f"{path} has version {version}, this sparsecomp reads version {VERSION}")
    digest = header.pop("digest", None)
    if digest != _digest(header, arrays):
        raise FormatError(f"{path} was altered: its contents do not match its digest")
    return stored


def _digest(header: Mapping[str, Any], arrays: Mapping[str, Tensor]) -> str:
    """SHA-256 of the header without its digest, and of each array's name, dtype, shape and bytes."""
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype} {tuple(array.shape)}".encode())
        digest.update(array.view(torch.uint8).numpy().data if array.numel() else b"")
    return digest.hexdigest()
