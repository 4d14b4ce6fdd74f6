"""Puts a module back as it was: tracing, calibrating and checking must not leave a mark on the user's model.

Neurons keep their state wherever they like: in buffers, plain attributes, dicts, lists. So a snapshot keeps every
container of every module, and a copy of every tensor in them that may be written to in place.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy


class _Tensor:
    """A tensor, the memory it had and what that held. Writes through `.data` count, which no version counter shows."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._memory, self._values = tensor, tensor.detach(), tensor.detach().clone()
        self._version = tensor._version
        self._plain = _is_plain(tensor)

    def written(self) -> bool:
        """Whether the tensor has other memory or other values."""
        return self._moved() or self._overwritten()

    def restore(self) -> None:
        """Give the tensor its memory and values back."""
        if self._moved():
            self._tensor.data = self._memory
        if self._overwritten():
            self._tensor.copy_(self._values)

    def _moved(self) -> bool:
        tensor, memory = self._tensor, self._memory
        if not self._plain:
            return False
        return not _is_plain(tensor) or tensor.dtype is not memory.dtype or not tensor.is_set_to(memory)

    def _overwritten(self) -> bool:
        if not self._plain:
            return self._tensor._version != self._version
        a, b = self._tensor, self._values
        return bool(((a != b) & ((a == a) | (b == b))).any())  # NaN for NaN is the same


class Snapshot:
    """The state of a module and its submodules, and of other values such as its inputs, at one moment."""

    def __init__(self, module: nn.Module, *values: Any) -> None:
        self._containers: list[tuple[Any, Any]] = []
        self._tensors: list[_Tensor] = []
        self._generators: list[tuple[torch.Generator, torch.Tensor]] = []
        self._seen: set[int] = set()
        for submodule in module.modules():
            self._keep(submodule.__dict__)
        self._keep(values)

    def changed(self) -> list[str]:
        """Names of attributes that differ from the snapshot."""
        names = []
        for container, before in self._containers:
            names += _differences(container, before)
        written = any(tensor.written() for tensor in self._tensors)
        return names + (["a tensor written in place"] if written else [])

    def restore(self) -> None:
        """Put everything back, in place."""
        for container, before in self._containers:
            container.clear()
            container.extend(before) if isinstance(container, list) else container.update(before)
        with torch.no_grad():
            for tensor in self._tensors:
                tensor.restore()
        for generator, state in self._generators:
            generator.set_state(state)

    def _keep(self, value: Any) -> None:
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, dict | list | set):
            self._containers.append((value, value.copy()))
        elif isinstance(value, torch.Generator):
            self._generators.append((value, value.get_state()))
        elif isinstance(value, torch.Tensor) and not is_lazy(value) and not value.is_inference():
            self._tensors.append(_Tensor(value))
        for item in _items(value):
            self._keep(item)


@contextmanager
def undone(module: nn.Module, *values: Any) -> Iterator[Snapshot]:
    """Whatever happens inside, `module`, `values` and the random number generators are as before afterwards."""
    snapshot, numbers = Snapshot(module, *values), random.getstate()
    devices = list(range(torch.cuda.device_count()))
    with torch.random.fork_rng(devices=devices):
        try:
            yield snapshot
        finally:
            snapshot.restore()
            random.setstate(numbers)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether memory and values can be looked at; of sparse, fake and wrapped tensors only the version is known."""
    strided = tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_quantized
    return strided and type(tensor) in (torch.Tensor, nn.Parameter)


def _items(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return list(value) if isinstance(value, list | tuple) else []


def _differences(container: Any, before: Any) -> list[str]:
    if isinstance(container, set):
        return [] if container == before else ["an item of a set"]
    if isinstance(container, list):
        # not by ==, which asks a tensor whether it is true
        same = len(container) == len(before) and all(
            a is b or _equal(a, b) for a, b in zip(container, before, strict=True)
        )
        return [] if same else ["an item of a list"]
    keys = [key for key in {**container, **before} if container.get(key) is not before.get(key)]
    return [str(key) for key in keys if not _equal(container.get(key), before.get(key))]


def _equal(a: Any, b: Any) -> bool:
    return isinstance(a, int | float | str | bool) and type(a) is type(b) and a == b
