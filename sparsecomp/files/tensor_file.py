"""Safetensors files with a JSON header of version and digest, for sparse matrices and checkpoints alike.

The digest over header and tensors makes every altered byte an error. Nothing in a file is unpickled or evaluated.
"""

import errno
import hashlib
import json
import os
import reprlib
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from sparsecomp.errors import SparsecompError
from sparsecomp.files.json_text import loads
from sparsecomp.files.whole_file import check_regular, written_whole


class Kind(NamedTuple):
    """A kind of file: where its header is, which version, and how a file that is not of it is refused."""

    key: str
    version: int
    refusal: type[SparsecompError]
    unreadable: str
    """What is said of a file without its header, after the path."""


def write(path: str | PathLike[str], kind: Kind, content: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write a header of JSON `content`, and the tensors, whole or not at all.

    Raises:
        OSError: the file cannot be written.
    """
    # safetensors refuses tensors that share memory or have gaps
    own = {name: value.detach().cpu().clone(memory_format=torch.contiguous_format) for name, value in tensors.items()}
    header = {"version": kind.version, **content}
    header["digest"] = _digest(header, own)
    try:
        with written_whole(Path(path)) as partial:
            save_file(own, partial, {kind.key: json.dumps(header)})
    except SafetensorError as error:
        raise OSError(f"{path} could not be written: {error}") from error


def read(path: str | PathLike[str], kind: Kind) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The header and the tensors, on the CPU, of what `write` wrote.

    Raises:
        kind.refusal: no whole safetensors file, of another kind or version, or altered.
        OSError: the file cannot be read.
    """
    check_regular(path)
    with open(path, "rb"):
        pass  # a forbidden file is an OSError, not a bad file
    try:
        with safe_open(os.fspath(path), "pt") as file:
            header = loads((file.metadata() or {})[kind.key])
            # copies: the file may change under a mapping
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        version, digest = header["version"], header.pop("digest", None)
    except SafetensorError as error:
        raise kind.refusal(f"{path} is no whole safetensors file ({error}): it was truncated or altered") from error
    except (KeyError, TypeError, ValueError) as error:
        raise kind.refusal(f"{path} {kind.unreadable}") from error
    except (RuntimeError, MemoryError) as error:
        raise OSError(errno.ENOMEM, f"it does not fit into memory ({error})", os.fspath(path)) from error
    if version != kind.version:
        raise kind.refusal(f"{path} has version {reprlib.repr(version)}, this sparsecomp reads version {kind.version}")
    if digest != _digest(header, tensors):
        raise kind.refusal(f"{path} was altered: its contents do not match its digest")
    return header, tensors


def _digest(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of the header without its digest, and of each tensor's name, dtype, shape and bytes."""
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else b"")
    return digest.hexdigest()
