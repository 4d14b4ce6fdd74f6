"""Launches a kernel with little host work: what Triton derives from the arguments is derived once a signature.

Triton binds, specialises and hashes every argument of every launch, tens of microseconds for the kernels here. A launch
of the same signature (dtypes, alignment, sizes, constants, device) compiles to the same kernel, so it is remembered and
called directly.
"""

from typing import Any

import torch
from torch import Tensor

_ALIGNMENT = 16
_MOST_REMEMBERED = 4096
"""Signatures kept by a launcher; with ever new sizes the oldest is forgotten and derived again."""


class Launcher:
    """A Triton or Gluon kernel with its remembered launches.

    Args:
        kernel: a ``@triton.jit`` or ``@gluon.jit`` function whose run-time arguments come before its constants.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._remembered: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}

    def __call__(
        self, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any], **options: int
    ) -> None:
        """Launch over ``grid`` on the device of the first argument, on its current stream.

        Args:
            arguments: tensors, numbers and None, in the kernel's order.
            constants: all the kernel's ``constexpr`` arguments by name.
            options: Triton's own, such as ``num_warps``.
        """
        device = arguments[0].device.index
        if device is None or device == torch.cuda.current_device():
            self._launch(device, grid, arguments, constants, options)
        else:
            with torch.cuda.device(device):
                self._launch(device, grid, arguments, constants, options)

    def _launch(
        self,
        device: int | None,
        grid: tuple[int, ...],
        arguments: tuple[Any, ...],
        constants: dict[str, Any],
        options: dict[str, int],
    ) -> None:
        key = (device, *map(_specialised, arguments), *constants.values(), *options.values())
        found = self._remembered.get(key)
        if found is not None:
            compiled, tail = found
            compiled[grid + (1,) * (3 - len(grid))](*arguments, *tail)
            return
        compiled = self._kernel[grid](*arguments, **constants, **options)
        if compiled is not None:  # the interpreter compiles nothing
            if len(self._remembered) >= _MOST_REMEMBERED:
                self._remembered.pop(next(iter(self._remembered)), None)
            tail = tuple(constants[name] for name in self._kernel.arg_names[len(arguments) :])
            self._remembered[key] = (compiled, tail)


def _specialised(argument: Any) -> Any:
    """What Triton compiles a kernel for; numbers stand for themselves, since sizes recur."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % _ALIGNMENT == 0
    return argument
