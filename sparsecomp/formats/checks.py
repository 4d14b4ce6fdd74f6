"""What arrays must be to become a sparse matrix: one error a fault, and few reads from the device.

Types, sizes and devices are known on the host and are checked one by one. Facts about contents are `Invariant`s, whose
flags come from the device together.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsecomp.errors import FormatError
from sparsecomp.formats.indices import INDEX_DTYPES, index_dtype_for

VALUE_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# leaves room to round a dimension up to whole blocks in int64
_MAX_DIMENSION = 2**62


class Invariant(NamedTuple):
    """A fact about contents.

    Attributes:
        name: what must hold, as the error says it.
        broken: bool, any shape, True where it does not hold.
        found: describes the first such place, given its flat position.
    """

    name: str
    broken: Tensor
    found: Callable[[int], str]


def require(invariants: Sequence[Invariant]) -> None:
    """Raise FormatError for the first invariant that is broken; one read from the device if none is."""
    flags = torch.stack([invariant.broken.any() for invariant in invariants]).tolist()
    if True in flags:
        invariant = invariants[flags.index(True)]
        place = int(invariant.broken.flatten().to(torch.uint8).argmax())
        raise FormatError(f"{invariant.name}: {invariant.found(place)}")


def check_shape(shape: Sequence[int]) -> tuple[int, int]:
    """`shape` as two ints.

    Raises:
        FormatError: not two non-negative ints.
    """
    sizes = tuple(shape) if isinstance(shape, Sequence) else (shape,)
    if len(sizes) != 2 or any(type(size) is not int or not 0 <= size <= _MAX_DIMENSION for size in sizes):
        raise FormatError(f"shape is {shape!r}, needs two ints (rows, columns) of 0 to 2**62")
    return sizes[0], sizes[1]


def check_threshold(threshold: float) -> None:
    """Raise FormatError unless `threshold` is a number of 0 or more."""
    if not isinstance(threshold, int | float | Tensor) or not threshold >= 0:
        raise FormatError(f"threshold is {threshold!r}, needs a number of 0 or more")


def check_tensor(name: str, value: Any) -> None:
    """Raise FormatError unless `value` is a dense tensor."""
    if not isinstance(value, Tensor):
        raise FormatError(f"{name} is a {type(value).__name__}, needs a torch.Tensor")
    if value.layout is not torch.strided:
        raise FormatError(f"{name} has layout {value.layout}, needs a dense tensor: see from_torch")


def check_values(name: str, values: Tensor, dims: int) -> None:
    """Raise FormatError unless `values` is a floating-point tensor of `dims` dimensions or one more, the batch."""
    check_tensor(name, values)
    if values.dtype not in VALUE_DTYPES:
        raise FormatError(f"{name} has dtype {values.dtype}, needs float16, bfloat16, float32 or float64: convert it")
    if values.dim() not in (dims, dims + 1):
        raise FormatError(f"{name} has shape {tuple(values.shape)}, needs {dims} dimensions; {dims + 1} with a batch")


def check_indices(indices: Mapping[str, Tensor], values: Tensor, *sizes: int) -> None:
    """Raise FormatError unless all are flat, of one index dtype wide enough for `sizes`, and with `values`."""
    for name, index in indices.items():
        check_tensor(name, index)
        if index.dtype not in INDEX_DTYPES:
            raise FormatError(f"{name} has dtype {index.dtype}, needs torch.int32 or torch.int64")
        if index.dim() != 1:
            raise FormatError(f"{name} has shape {tuple(index.shape)}, needs one dimension")
        if index.device != values.device:
            raise FormatError(f"{name} is on {index.device}, values on {values.device}: move them to one device")
    (one, first), (other, second) = indices.items()
    if first.dtype is not second.dtype:
        raise FormatError(f"{one} has dtype {first.dtype} and {other} {second.dtype}: they need the same")
    if first.dtype is torch.int32 and index_dtype_for(*sizes) is torch.int64:
        raise FormatError(f"size {max(sizes)} does not fit in the int32 indices {one}, {other}: they need torch.int64")


def check_length(name: str, length: int, needed: int, why: str) -> None:
    """Raise FormatError unless `length` is what is needed."""
    if length != needed:
        raise FormatError(f"{name} has {length} entries, needs {needed} ({why})")


def in_range(name: str, index: Tensor, size: int) -> Invariant:
    """Each of `index` lies in 0..size-1."""
    return Invariant(
        f"{name} must lie in the shape",
        (index < 0) | (index >= size),
        lambda place: f"{name}[{place}] is {int(index.flatten()[place])}, needs 0 to {size - 1}",
    )


def check_slice(start: int, stop: int, size: int, step: int = 1) -> None:
    """Raise FormatError unless 0 <= start <= stop <= size, and both are at a block's edge."""
    if not 0 <= start <= stop <= size:
        raise FormatError(f"slice is {start} to {stop}, needs 0 <= start <= stop <= {size}")
    if start % step or (stop % step and stop != size):
        raise FormatError(f"slice is {start} to {stop}, needs multiples of the block's {step}, or {size} as its end")
