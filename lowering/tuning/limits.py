"""What a block may use on a device, so that no configuration is offered that cannot launch."""

from sparsecomp.lowering.cache.signature import Device

_SHARED_BYTES = {"8.0": 166_912, "8.6": 101_376, "8.7": 166_912, "8.9": 101_376, "9.0": 232_448, "10.0": 232_448}
"""Shared memory a block can opt in to, by compute capability (CUDA C++ Programming Guide, technical specifications)."""
_LEAST_SHARED = 101_376
_MOST_ACCUMULATORS = 192
"""32-bit accumulators a thread can hold beside addresses within its 255 registers."""


def fits_shared(bytes_used: int, device: Device) -> bool:
    """Whether a block may use this much shared memory; unknown devices are taken for the smallest."""
    return bytes_used <= _SHARED_BYTES.get(device.capability, _LEAST_SHARED)


def fits_registers(accumulators: int, warps: int) -> bool:
    """Whether `accumulators` 32-bit values of a block fit in the registers of `warps` warps."""
    return accumulators <= warps * 32 * _MOST_ACCUMULATORS
