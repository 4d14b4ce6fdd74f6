"""Buffers that follow from other buffers, and whose last one tells what they were made of.

`to_empty` gives a module memory without contents. A source in memory that its allocator had given before may then look
right beside lists that are not, and a kernel's counters in it may be anything. So these buffers move as what they hold.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def moved_whole(module: nn.Module, names: Sequence[str], device: Callable[[], torch.device]) -> Iterator[None]:
    """Within it, as `_apply` runs, the buffers of these names are None; then they go, with contents, to the device."""
    kept = {name: module._buffers[name] for name in names}
    module._buffers.update(dict.fromkeys(names))
    try:
        yield
    finally:
        for name, array in kept.items():
            module._buffers[name] = None if array is None else _moved(array, device(), name == names[-1])


def _moved(array: Tensor, device: torch.device, is_source: bool) -> Tensor:
    if not array.is_meta or device.type == "meta":
        return array.to(device)
    fresh = torch.zeros_like(array, device=device)
    if is_source:
        fresh[:-2] = -1  # what no index is; the two behind it are a kernel's counters
    return fresh
