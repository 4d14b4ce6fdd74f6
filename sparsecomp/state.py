"""Puts a module back as it was: tracing, calibrating and checking must not leave a mark on the user's model.

Neurons keep their state wherever they like: in buffers, plain attributes, dicts, lists. So a snapshot keeps every
container of every module, and a copy of every tensor in them that may be written to in place.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


class Snapshot:
    """The state of a module and its submodules at one moment.

    Parameters are kept by identity only: a forward pass does not write to them.
    """

    def __init__(self, module: nn.Module) -> None:
        self._containers: list[tuple[Any, Any]] = []
        self._tensors: list[tuple[torch.Tensor, int, torch.Tensor]] = []
        self._seen: set[int] = set()
        for submodule in module.modules():
            self._keep(submodule.__dict__)

    def changed(self) -> list[str]:
        """Names of attributes that differ from the snapshot."""
        names = []
        for container, before in self._containers:
            names += _differences(container, before)
        written = any(tensor._version != version for tensor, version, _ in self._tensors)
        return names + (["a tensor written in place"] if written else [])

    def restore(self) -> None:
        """Put everything back, in place."""
        for container, before in self._containers:
            container.clear()
            container.extend(before) if isinstance(container, list) else container.update(before)
        with torch.no_grad():
            for tensor, version, before in self._tensors:
                if tensor._version != version:
                    tensor.copy_(before)

    def _keep(self, value: Any) -> None:
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, dict | list | set):
            self._containers.append((value, value.copy()))
        elif isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter) and not value.is_inference():
            self._tensors.append((value, value._version, value.detach().clone()))
        for item in _items(value):
            self._keep(item)


@contextmanager
def undone(module: nn.Module) -> Iterator[Snapshot]:
    """Whatever happens inside, `module` and the random number generators are as before afterwards."""
    snapshot = Snapshot(module)
    devices = list(range(torch.cuda.device_count()))
    with torch.random.fork_rng(devices=devices):
        try:
            yield snapshot
        finally:
            snapshot.restore()


def _items(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return list(value) if isinstance(value, list | tuple) else []


def _differences(container: Any, before: Any) -> list[str]:
    if not isinstance(container, dict):
        same = len(container) == len(before) and all(a is b for a, b in zip(container, before, strict=False))
        return [] if same or container == before else ["an item of a list or set"]
    keys = [key for key in {**container, **before} if container.get(key) is not before.get(key)]
    return [str(key) for key in keys if not _equal(container.get(key), before.get(key))]


def _equal(a: Any, b: Any) -> bool:
    return isinstance(a, int | float | str | bool) and type(a) is type(b) and a == b
