"""Index arithmetic that every format shares: the width of an index, pointers and rows, sorting and grouping.

Positions are computed in int64; where rows times columns exceeds even that, pairs are sorted in two steps instead of
by one number, so that nothing wraps.
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsecomp.errors import FormatError

INDEX_DTYPES = (torch.int32, torch.int64)
_INT32_MAX = torch.iinfo(torch.int32).max
_INT64_MAX = torch.iinfo(torch.int64).max
_MANY = 2**14
"""Keys from which on packing them pays."""


def index_dtype_for(*sizes: int) -> torch.dtype:
    """The narrower of int32 and int64 that can hold every size (a dimension or a number of stored elements)."""
    return torch.int32 if max(sizes, default=0) <= _INT32_MAX else torch.int64


def choose_index_dtype(forced: torch.dtype | None, at_least: torch.dtype | None, *sizes: int) -> torch.dtype:
    """The index dtype of a new matrix.

    Args:
        forced: what the caller asked for, or None.
        at_least: the dtype of the matrix it is made from, or None; kept unless `sizes` need a wider one.
        sizes: dimensions and numbers of stored elements that must fit.

    Raises:
        FormatError: `forced` is no index dtype, or too narrow.
    """
    needed = index_dtype_for(*sizes)
    if forced is None:
        return torch.int64 if torch.int64 in (needed, at_least) else torch.int32
    if forced not in INDEX_DTYPES:
        raise FormatError(f"index dtype is {forced}, needs torch.int32 or torch.int64")
    if needed is torch.int64 and forced is torch.int32:
        raise FormatError(f"size {max(sizes)} does not fit in int32 indices: use index_dtype=torch.int64")
    return forced


def rows_of(pointers: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Row of each of `count` entries, of `dtype`, from pointers (rows + 1,) that begin at 0 and end at `count`."""
    return torch.repeat_interleave(pointers.diff(), output_size=count).to(dtype)


def lines_of(pointers: Tensor, first: int, last: int) -> Tensor:
    """Row of each entry from `first` to `last` - 1, int64; on a CPU these are the entries that the pointers span.

    Reads nothing from a GPU, where entries before and behind those of the pointers count to the rows next to them.
    """
    if not pointers.is_cuda:  # 20 times as fast as a search, but torch looks at the counts
        return torch.repeat_interleave(pointers[1:].long() - pointers[:-1], output_size=last - first)
    return searched_lines(pointers, first, last)


def searched_lines(pointers: Tensor, first: int, last: int) -> Tensor:
    """`lines_of` on a GPU."""
    places = torch.arange(first, last, dtype=pointers.dtype, device=pointers.device)
    lines = torch.searchsorted(pointers.contiguous(), places, right=True).sub_(1)
    return lines.clamp_(0, max(pointers.numel() - 2, 0))


def spread_lines(pointers: Tensor, count: int) -> Tensor:
    """Row of each of `count` entries, int64, and any of those around the pointers'. Reads nothing from a GPU."""
    if pointers.is_cuda or not pointers.numel():
        return searched_lines(pointers, 0, count)
    first, last = pointers[[0, -1]].tolist()
    return F.pad(lines_of(pointers, first, last), (first, count - last))


def pointers_of(rows: Tensor, n_rows: int, dtype: torch.dtype) -> Tensor:
    """Pointers (n_rows + 1,) of `dtype` into ascending `rows` (entries,)."""
    # one pass over the rows; a search for each edge takes several times as long
    return torch.ops.aten._convert_indices_from_coo_to_csr.default(
        rows.contiguous(), n_rows, out_int32=dtype is torch.int32
    )


def pair_keys(major: Tensor, minor: Tensor, shape: tuple[int, int]) -> Tensor | None:
    """One number a pair that orders pairs by (major, minor), or None where the numbers would exceed int64."""
    numel = shape[0] * shape[1]
    if numel > _INT64_MAX:
        return None
    dtype = index_dtype_for(numel)
    # of one dtype: torch adds two dtypes at a third of the speed
    return major.to(dtype).mul(shape[1]).add_(minor.to(dtype))


def sorted_keys(keys: Tensor, bound: int) -> tuple[Tensor, Tensor]:
    """`keys` (entries,), int32 or int64 of 0 to bound - 1, sorted, and the stable permutation, int64, that does it."""
    places = max(keys.numel() - 1, 0).bit_length()
    digits = max(bound - 1, 0).bit_length()
    numpy = None if keys.device.type != "cpu" or keys.numel() < _MANY or places + digits > 64 else _numpy()
    if numpy is None or type(keys) is not Tensor:
        return torch.sort(keys, stable=True)
    # a key and its place in one number: no permutation has to be carried along, and numpy's sort of plain numbers is
    # vectorised, many times as fast as torch's
    packed = torch.arange(keys.numel(), device=keys.device).add_(keys.long(), alpha=1 << places)
    packed.numpy().view(numpy.uint64).sort()
    order = packed & ((1 << places) - 1)
    packed >>= places
    if places + digits == 64:
        packed &= (1 << digits) - 1  # the shift has copied the sign
    return packed.to(keys.dtype), order


def sorted_union(one: Tensor, other: Tensor) -> Tensor:
    """Two ascending arrays of keys as one, repeats included."""
    # numpy's stable sort finds the two runs and merges them in one pass
    return sort_keys(torch.cat([one, other]), "stable")


def sort_keys(keys: Tensor, kind: Literal["quicksort", "stable"] = "quicksort") -> Tensor:
    """`keys` sorted; their memory may be used. `kind` is numpy's, on a CPU."""
    if keys.device.type == "cpu" and type(keys) is Tensor and _numpy() is not None:
        keys.numpy().sort(kind=kind)  # torch's sort carries a permutation along
        return keys
    return keys.sort().values


def select_keys(keys: Tensor, kept: Tensor, count: int | None = None) -> Tensor:
    """Those of `keys` of which `kept` is true; nothing is read from a device if their `count` is known."""
    if keys.device.type == "cpu" and type(keys) is type(kept) is Tensor and _numpy() is not None:
        return torch.from_numpy(keys.numpy()[kept.numpy()])  # five times as fast as torch's
    if count is None:
        return keys[kept]
    return keys.index_select(0, torch.nonzero_static(kept, size=count).squeeze(1))


def _numpy() -> Any:
    """The module, which torch needs not; None if it is not installed."""
    try:
        import numpy
    except ImportError:
        return None
    return numpy


def sorted_pairs(major: Tensor, minor: Tensor, shape: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor | None]:
    """Pairs sorted by (major, minor), and the stable permutation (entries,), int64, that sorts them.

    None for a permutation means that they ascend strictly already. Reads one flag from the device.
    """
    keys = pair_keys(major, minor, shape)
    if keys is None:
        by_minor = torch.sort(minor, stable=True).indices
        order = by_minor[torch.sort(major[by_minor], stable=True).indices]
        return major[order], minor[order], order
    if bool((keys[1:] > keys[:-1]).all()):
        return major, minor, None
    keys, order = sorted_keys(keys, shape[0] * shape[1])
    # divided, because gathering both from everywhere takes longer
    high = torch.div(keys, shape[1], rounding_mode="floor")
    return high.to(major.dtype), keys.sub_(high, alpha=shape[1]).to(minor.dtype), order


def sorted_within(major: Tensor, minor: Tensor, shape: tuple[int, int]) -> tuple[Tensor, Tensor | None]:
    """`minor` ascending within each run of `major`, which ascends, and the permutation; as `sorted_pairs`."""
    keys = pair_keys(major, minor, shape)
    if keys is None:
        _, minor, order = sorted_pairs(major, minor, shape)
        return minor, order
    if bool((keys[1:] > keys[:-1]).all()):
        return minor, None
    keys, order = sorted_keys(keys, shape[0] * shape[1])
    return keys.sub_(major.to(keys.dtype), alpha=shape[1]).to(minor.dtype), order


def places_in(keys: Tensor, wanted: Tensor) -> Tensor:
    """Where each of `wanted` is among the ascending `keys`, or -1: int64; nothing is read from a device."""
    if not keys.numel():
        return torch.full_like(wanted, -1, dtype=torch.int64)
    places = torch.searchsorted(keys, wanted).clamp_(max=keys.numel() - 1)
    return places.masked_fill_(keys[places] != wanted, -1)


def take_or_zero(values: Tensor, places: Tensor) -> Tensor:
    """`values` (entries,) at each of these places, and 0 where the place is -1."""
    if not values.numel():
        return values.new_zeros(places.shape)
    return values.index_select(0, places.clamp(min=0)).masked_fill(places < 0, 0)


def has_repeats(major: Tensor, minor: Tensor) -> bool:
    """Whether a pair follows an equal one; reads one flag from the device."""
    return bool(((minor[1:] == minor[:-1]) & (major[1:] == major[:-1])).any())


def groups_of(major: Tensor, minor: Tensor) -> tuple[Tensor, Tensor]:
    """Runs of equal pairs among sorted ones: where each begins (groups,), and which each pair is in (entries,); int64.

    Reads the number of groups from the device.
    """
    first = torch.ones(major.shape, dtype=torch.bool, device=major.device)
    torch.logical_or(major[1:] != major[:-1], minor[1:] != minor[:-1], out=first[1:])
    return first.nonzero().squeeze(1), first.cumsum(0) - 1


def take(values: Tensor, dim: int, order: Tensor | None) -> Tensor:
    """`values` permuted along `dim`; as they are if `order` is None."""
    return values if order is None else values.index_select(dim, order)


def sum_groups(values: Tensor, dim: int, group: Tensor, n_groups: int) -> Tensor:
    """Sum of `values` along `dim` by group (entries,); half precision accumulates in float32."""
    wide = values.float() if values.dtype in (torch.float16, torch.bfloat16) else values
    shape = list(values.shape)
    shape[dim] = n_groups
    return wide.new_zeros(shape).index_add(dim, group, wide).to(values.dtype)
