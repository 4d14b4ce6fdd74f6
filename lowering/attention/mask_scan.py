"""CUDA implementation of the scan of a mask, and the operation behind it."""

from typing import NamedTuple

import torch
from torch import Tensor

from sparsecomp.lowering.attention.problem import strides_over
from sparsecomp.lowering.cache.signature import Device, KernelSignature
from sparsecomp.lowering.launch import dispatch
from sparsecomp.lowering.launch.strided import dtype_name
from sparsecomp.lowering.tuning.template import Operation
from sparsecomp.reference.attention.scan import empty_lists


class MaskScan(NamedTuple):
    """A mask; see ``sparsecomp.ops.attention.mask_scan``.

    Attributes:
        batch, heads: of the mask.
        strides: of the mask, over the lengths: 0 where it broadcasts.
        dtype: of what is added to scores, or "bool".
        kept: what a bool mask holds where a pair is kept.
    """

    batch: int
    heads: int
    q_len: int
    k_len: int
    block_q: int
    block_k: int
    strides: tuple[int, int, int, int]
    dtype: str
    kept: bool = True

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of blocks."""
        return -(-self.q_len // self.block_q), -(-self.k_len // self.block_k)

    @property
    def reads(self) -> int:
        """How often the mask is read."""
        return 1 if self.dtype == "bool" else 2


def mask_scan(mask: Tensor, q_len: int, k_len: int, block: tuple[int, int], kept: bool) -> tuple[Tensor, ...]:
    """The ten tensors of ``AttentionBlocks``; arguments as of `sparsecomp.reference.attention.scan.scanned`, where
    nothing is empty and a mask that is added is of a kernel's dtype."""
    batch, heads = mask.shape[:2]
    strides = strides_over(mask, (batch, heads, q_len, k_len))
    problem = MaskScan(batch, heads, q_len, k_len, *block, strides, dtype_name(mask), kept)
    lists = empty_lists(mask.device, (batch, heads), (q_len, k_len), block)
    dispatch.launch(MASK_SCAN, problem, mask.view(torch.uint8) if mask.dtype is torch.bool else mask, *lists)
    return lists


def _signature(problem: MaskScan, device: Device) -> KernelSignature:
    sizes = tuple((name, getattr(problem, name)) for name in ("batch", "heads", "q_len", "k_len"))
    parameters = (("block_q", problem.block_q), ("block_k", problem.block_k), ("kept", int(problem.kept)))
    return KernelSignature("mask_scan", device, dtypes=(problem.dtype,), sizes=sizes, parameters=parameters)


MASK_SCAN = Operation("mask_scan", _signature)
