"""CUDA implementation of the block lists of packed documents, and the operation behind it."""

from typing import NamedTuple

from torch import Tensor

from sparsecomp.lowering.cache.signature import Device, KernelSignature
from sparsecomp.lowering.launch import dispatch
from sparsecomp.lowering.tuning.template import Operation
from sparsecomp.reference.attention.packed import PackedDocuments, empty_lists_of


class DocumentLists(NamedTuple):
    """Documents one behind another; see ``sparsecomp.reference.attention.packed.PackedDocuments``.

    Attributes:
        documents: how many.
        tiles: for how many there is room.
    """

    documents: int
    q_len: int
    k_len: int
    block_q: int
    block_k: int
    before: int
    after: int
    tiles: int

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of blocks."""
        return -(-self.q_len // self.block_q), -(-self.k_len // self.block_k)


def document_lists(q_offsets: Tensor, k_offsets: Tensor, packed: PackedDocuments) -> tuple[Tensor, ...]:
    """The ten tensors of ``AttentionBlocks``; int32 offsets, contiguous; neither side is empty."""
    lists = empty_lists_of(q_offsets, packed)
    problem = DocumentLists(len(q_offsets) - 1, *packed, len(lists[4]))
    dispatch.launch(DOCUMENT_LISTS, problem, q_offsets, k_offsets, *lists)
    return lists


def _signature(problem: DocumentLists, device: Device) -> KernelSignature:
    sizes = tuple((name, getattr(problem, name)) for name in ("documents", "q_len", "k_len"))
    parameters = tuple((name, getattr(problem, name)) for name in ("block_q", "block_k"))
    return KernelSignature("document_lists", device, dtypes=("int32",), sizes=sizes, parameters=parameters)


DOCUMENT_LISTS = Operation("document_lists", _signature)
