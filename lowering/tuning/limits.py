"""What a block may use on a device, so that no configuration is offered that cannot launch."""

from sparsecomp.lowering.cache.signature import Device
from sparsecomp.lowering.tuning.cards import shared_bytes

_MOST_ACCUMULATORS = 192
"""32-bit accumulators a thread can hold beside addresses within its 255 registers."""


def fits_shared(bytes_used: int, device: Device) -> bool:
    """Whether a block may use this much shared memory."""
    return bytes_used <= shared_bytes(device.capability)


def fits_registers(accumulators: int, warps: int) -> bool:
    """Whether `accumulators` 32-bit values of a block fit in the registers of `warps` warps."""
    return accumulators <= warps * 32 * _MOST_ACCUMULATORS
