"""Sparse matrices as files: arrays, and a header that says what they are."""

from collections.abc import Mapping
from os import PathLike
from typing import Any, NamedTuple

from torch import Tensor

from sparsecomp.errors import FormatError
from sparsecomp.files import tensor_file

_KIND = tensor_file.Kind(
    "sparsecomp", 1, FormatError, "has no readable sparsecomp header: it is another file, or was altered"
)


class Stored(NamedTuple):
    """What a file holds; nothing of it is checked beyond its digest."""

    format: str
    shape: list[int]
    layout: dict[str, Any]
    arrays: dict[str, Tensor]


def save_arrays(
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
    header = {
        "format": name,
        "shape": list(shape),
        "layout": dict(layout),
        "dtype": str(arrays["values"].dtype).removeprefix("torch."),
    }
    tensor_file.write(path, _KIND, header, arrays)


def load_arrays(path: str | PathLike[str]) -> Stored:
    """Read a file onto the CPU.

    Raises:
        FormatError: no whole safetensors file, not by `save`, of another version, or altered.
        OSError: the file cannot be read.
    """
    header, arrays = tensor_file.read(path, _KIND)
    try:
        return Stored(str(header["format"]), header["shape"], dict(header["layout"]), arrays)
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"{path} {_KIND.unreadable}") from error
