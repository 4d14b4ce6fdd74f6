"""A weight's mask as a bool tensor; its two index lists are of the mask that is there, whoever wrote it."""

from collections.abc import Mapping
from typing import Any

import torch

from sparsecomp.errors import MaskError
from sparsecomp.formats.indices import index_dtype_for
from sparsecomp.reference.sharding import local, parted


def checked_mask(mask: torch.Tensor, shape: torch.Size, device: torch.device) -> torch.Tensor:
    """`mask` as a fresh bool tensor; MaskError for another shape or device, or a value other than 0 and 1."""
    if mask.shape != shape:
        raise MaskError(f"the mask has shape {tuple(mask.shape)}; {tuple(shape)} is needed: build it from its weight")
    if mask.device != device:
        raise MaskError(f"the mask is on {mask.device}, its weight on {device}: move it with mask.to({str(device)!r})")
    if mask.dtype == torch.bool:
        return mask.detach().clone(memory_format=torch.contiguous_format)
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise MaskError("the mask holds values other than 0 and 1: compare the scores with a threshold first")
    return mask.detach().to(torch.bool).contiguous()


class SparseMask(torch.nn.Module):
    """The partition of a weight's elements in active (True) and pruned (False).

    The mask is a persistent bool buffer of the weight's shape, so state_dict, deepcopy and `to` carry it. The index
    lists are flat positions in ascending order, int32 where the weight has fewer than 2**31 elements. They are
    computed in each use, which waits for the device: no counter tells of every write to a mask.

    Raises MaskError for a mask of another shape or device, or with a value other than 0 and 1; the old mask stays.
    """

    mask: torch.Tensor

    def __init__(self, mask: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", checked_mask(mask, mask.shape, mask.device))
        self.register_load_state_dict_pre_hook(check_before_load)
        self.register_load_state_dict_post_hook(_keep_bool)

    def update(self, mask: torch.Tensor) -> None:
        """Take another partition of the same shape and device, in the same storage."""
        self.mask.copy_(checked_mask(mask, self.mask.shape, self.mask.device))

    @property
    def active(self) -> torch.Tensor:
        """Flat positions of the active elements, int32 or int64, ascending."""
        return positions_of(self.mask)

    @property
    def pruned(self) -> torch.Tensor:
        """Flat positions of the pruned elements, int32 or int64, ascending."""
        return positions_of(~self.mask)

    @property
    def pruned_count(self) -> int:
        """How many elements are pruned."""
        return self.mask.numel() - int(self.mask.count_nonzero())

    @property
    def sparsity(self) -> float:
        """Share of pruned elements; 0 for an empty mask."""
        return self.pruned_count / max(self.mask.numel(), 1)

    def check_weight(self, weight: torch.Tensor) -> None:
        """MaskError unless `weight` has the mask's shape and device."""
        if weight.shape != self.mask.shape or weight.device != self.mask.device:
            raise MaskError(
                f"the weight is {tuple(weight.shape)} on {weight.device}, the mask {tuple(self.mask.shape)} on "
                f"{self.mask.device}: use the mask of this weight"
            )

    def apply_(self, weight: torch.Tensor) -> torch.Tensor:
        """Zero the pruned elements of `weight` in place, NaN and infinity too; MaskError if it does not fit."""
        self.check_weight(weight)
        with torch.no_grad():
            local(weight).masked_fill_(local(parted(~self.mask, weight)), 0)
        return weight

    def check_state(self, state: Mapping[str, Any], prefix: str = "") -> None:
        """MaskError unless the mask in `state` (of state_dict; none is no error) has this shape and only 0 and 1."""
        saved = state.get(f"{prefix}mask")
        if saved is not None:
            checked_mask(saved, self.mask.shape, saved.device)


def positions_of(chosen: torch.Tensor) -> torch.Tensor:
    """Flat positions of the True, int32 or int64, ascending; waits for the device."""
    return chosen.reshape(-1).nonzero().reshape(-1).to(index_dtype_for(chosen.numel()))


def check_before_load(module: Any, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
    """The hook by which a module with `check_state` refuses a state before any of it is taken."""
    module.check_state(state, prefix)


def _keep_bool(module: Any, _: Any) -> None:
    # a state that is assigned, not copied, brings its own dtype
    module.mask = module.mask.to(torch.bool)
