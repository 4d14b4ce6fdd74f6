"""A kernel launch in all but its tensors, with little host work.

Triton binds, specialises and hashes every argument of every launch and asks the driver about every pointer, tens of
microseconds for the kernels here. A `Launch` knows everything but the addresses: it lets Triton compile and launch
once, and then fills the addresses into the parameter block that Triton's own launcher would build, and calls the
driver.
"""

import ctypes
import struct
import threading
from functools import cache, reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor

from sparsecomp.lowering.launch import watch
from sparsecomp.lowering.tuning import host

ALIGNMENT = 16
"""Bytes that the widest loads want their address to be a multiple of."""
_FORMATS = {
    "i1": "<b", "i8": "<b", "i16": "<h", "i32": "<i", "i64": "<q", "u1": "<B", "u8": "<B", "u16": "<H", "u32": "<I",
    "u64": "<Q", "fp32": "<f", "f32": "<f", "fp64": "<d",
}  # fmt: skip


def aligned(tensor: Tensor) -> Tensor:
    """The tensor, or a copy where it begins anywhere, as a view may."""
    return tensor if tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone()


class Launch:
    """One launch of a kernel, callable with its tensors.

    Args:
        kernel: a `@triton.jit` or `@gluon.jit` function: tensors first, then numbers, then constants.
        grid: programs along each axis.
        numbers: its run-time numbers, in its order.
        constants: its `constexpr` arguments by name, `num_warps` too if it is one.
        options: Triton's own, such as `num_warps`.

    Attributes:
        named: constants and options.
        direct: what launches past Triton, once that is known to be possible.

    A launch belongs to one device. Its tensors always have the dtypes of the first call, and are None in the same
    places.
    """

    def __init__(
        self, kernel: Any, grid: tuple[int, ...], numbers: tuple[Any, ...], constants: dict[str, Any], **options: int
    ) -> None:
        self.kernel = kernel
        self.grid = grid
        self.numbers = numbers
        self.named = {**constants, **options}
        self.direct: DirectLaunch | None = None
        self._undecided = True

    host_seconds = host.LAUNCH

    def __call__(self, *tensors: Tensor | None) -> None:
        """Launch on the current stream of the device of the first tensor."""
        direct = self.direct
        if direct is not None and direct.is_free():
            pointers = [tensor.data_ptr() for tensor in tensors if tensor is not None]
            if not reduce(or_, pointers, 0) % ALIGNMENT:
                direct.launch(pointers)
                self._tell(tensors)
                return
        first = tensors[0]
        assert first is not None
        if first.is_cuda and first.get_device() != torch.cuda.current_device():
            with torch.cuda.device(first.device):
                self._through_triton(tensors)
        else:
            self._through_triton(tensors)
        self._tell(tensors)

    def _tell(self, tensors: tuple[Tensor | None, ...]) -> None:
        if watch.HERE.watcher is not None:
            watch.HERE.watcher.launched(self, tensors)

    def _through_triton(self, tensors: tuple[Tensor | None, ...]) -> None:
        compiled = self.kernel[self.grid](*tensors, *self.numbers, **self.named)
        aligned = all(tensor is None or tensor.data_ptr() % ALIGNMENT == 0 for tensor in tensors)
        if self._undecided and aligned and compiled is not None:  # the interpreter compiles nothing
            self._undecided = False
            first = tensors[0]
            assert first is not None
            arguments = [*tensors, *self.numbers]
            self.direct = DirectLaunch.of(compiled, self.grid, arguments, first.get_device())


class DirectLaunch:
    """Calls `cuLaunchKernel` with a parameter block of its own.

    The block is what Triton's launchers (3.6 to 3.9) build: the arguments that are no constants, in order, and two
    scratch pointers. The kernel was compiled for addresses that are multiples of 16; others go through Triton.
    """

    def __init__(self, compiled: Any, grid: tuple[int, ...], pointers: int, slots: list[bytes], device: int) -> None:
        from triton import knobs
        from triton.runtime import driver

        active: Any = driver.active
        self._keep_loaded = compiled
        self._device = device
        self._stream_of = active.get_current_stream
        self._stream = ctypes.c_void_p()
        self._several = torch.cuda.device_count() != 1
        # who listens to launches hears them from Triton only
        self._hooks = knobs.runtime
        self._enter, self._leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
        self._entering, self._leaving = _listeners(self._enter), _listeners(self._leave)
        self._pointers = pointers
        self._values = (ctypes.c_uint64 * len(slots))(*(int.from_bytes(slot, "little") for slot in slots))
        base = ctypes.addressof(self._values)
        self._parameters = (ctypes.c_void_p * len(slots))(*(base + 8 * i for i in range(len(slots))))
        size = [ctypes.c_uint(extent) for extent in (*grid, *(1,) * (3 - len(grid)))]
        block = [ctypes.c_uint(32 * compiled.metadata.num_warps), ctypes.c_uint(1), ctypes.c_uint(1)]
        self._head = (ctypes.c_void_p(compiled.function), *size, *block, ctypes.c_uint(compiled.metadata.shared))
        self._launch = cuda_driver().cuLaunchKernel
        self._lock = threading.Lock()

    @classmethod
    def of(cls, compiled: Any, grid: tuple[int, ...], arguments: list[Any], device: int) -> "DirectLaunch | None":
        """None where the kernel needs more than a plain launch, which stays Triton's business."""
        metadata = compiled.metadata
        special = (
            metadata.num_ctas != 1
            or metadata.launch_cooperative_grid
            or metadata.launch_pdl
            or metadata.global_scratch_size
            or metadata.profile_scratch_size
        )
        types = list(compiled.src.signature.values())[: len(arguments)]
        passed = [(kind, value) for kind, value in zip(types, arguments, strict=True) if kind != "constexpr"]
        known = all(kind.startswith("*") or kind in _FORMATS for kind, _ in passed)
        if special or not known or 0 in grid:
            return None
        slots = [_slot(kind, value) for kind, value in passed] + [bytes(8), bytes(8)]
        pointers = sum(kind.startswith("*") for kind, _ in passed)
        if pointers != sum(isinstance(value, Tensor) for value in arguments):
            return None
        return cls(compiled, grid, pointers, slots, device)

    @property
    def listeners(self) -> tuple[int, int, int]:
        """Equal for launches that are free together."""
        return id(self._enter), id(self._leave), self._device

    def is_free(self) -> bool:
        """Whether a launch may pass Triton by now: nobody listens, and this is the current device."""
        return not (
            self._entering
            or self._leaving
            or self._hooks.launch_enter_hook is not self._enter
            or self._hooks.launch_exit_hook is not self._leave
            or (self._several and torch.cuda.current_device() != self._device)
        )

    def launch(self, pointers: list[int]) -> None:
        """Launch on the current stream; the addresses are multiples of 16, and the launch is free."""
        stream = self._stream_of(self._device)
        with self._lock:
            if stream != (self._stream.value or 0):
                self._stream = ctypes.c_void_p(stream)
            self._values[: self._pointers] = pointers
            status = self._launch(*self._head, self._stream, self._parameters, None)
        if status:
            raise RuntimeError(f"cuLaunchKernel failed with CUDA error {status}: see CUDA's documentation of CUresult")


def _slot(kind: str, value: Any) -> bytes:
    packed = struct.pack("<Q", value.data_ptr()) if kind.startswith("*") else struct.pack(_FORMATS[kind], value)
    return packed.ljust(8, b"\0")


def _listeners(hook: Any) -> list[Any]:
    """Triton's own list of them, which grows as they come; the one there is where a hook was put in its place."""
    return getattr(hook, "calls", [] if hook is None else [hook])


@cache
def cuda_driver() -> ctypes.PyDLL:
    # PyDLL keeps the interpreter's lock: a launch takes a few microseconds, less than taking the lock again can
    return ctypes.PyDLL("libcuda.so.1")
