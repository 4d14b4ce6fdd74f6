"""The state of one prunable weight: dense, sparse, or resurrecting, with theta in the weight's own memory.

During a RESU phase theta lies in the pruned positions of the parameter. So a forward pass is the plain one, whoever
reads the parameter sees W_eff, and dL/dW_eff is the parameter's gradient: its gather at P is theta's. Had the active
part and theta been two tensors, a frozen W would have had no gradient at all and theta none to take its own from.
"""

from collections.abc import Mapping
from enum import IntEnum
from typing import Any, Self

import torch
from torch import Tensor, nn

from sparsecomp.errors import MaskError
from sparsecomp.nn.masked.mask import SparseMask, check_before_load
from sparsecomp.ops.masked.effective_weight import effective_weight
from sparsecomp.ops.masked.elementwise import gather_pruned
from sparsecomp.reference.sharding import parted, whole


class Mode(IntEnum):
    """What a weight's elements are: all trained; the pruned ones zero; or theta in place of the pruned ones."""

    DENSE = 0
    SPARSE = 1
    RESU = 2


class MaskedWeight(nn.Module):
    """Mask and mode of a weight, which every method takes: the module it belongs to keeps it as its parameter.

    The mask and the mode are persistent buffers, so that state_dict, deepcopy and `to` carry them. It starts DENSE,
    with all elements active. Nothing of it reads from the device but what reads the mask's index lists first.

    Args:
        weight: of any shape.
    """

    code: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.mask = SparseMask(torch.ones_like(weight, dtype=torch.bool, requires_grad=False))
        # beside the mask: NCCL broadcasts no buffer of the CPU
        self.register_buffer("code", torch.zeros((), dtype=torch.uint8, device=weight.device))
        self._mode = Mode.DENSE
        self.register_load_state_dict_pre_hook(check_before_load)
        self.register_load_state_dict_post_hook(_read_mode)

    @property
    def mode(self) -> Mode:
        """The weight's mode."""
        return self._mode

    def train(self, mode: bool = True) -> Self:
        """As torch's; the mode is read anew, as others may have written its buffer: averaged models, broadcasts."""
        _read_mode(self)
        return super().train(mode)

    def effective(self, weight: Tensor) -> Tensor:
        """The weight as the function has it: itself, but SPARSE, where pruned elements are zero whatever it holds.

        So a step of momentum or decay on a pruned element changes no result; its gradient is zero.
        """
        return torch.where(self.mask.mask, weight, 0) if self._mode is Mode.SPARSE else weight

    def apply_(self, weight: Tensor) -> None:
        """Zero the pruned elements of a SPARSE weight in place; leave others alone."""
        if self._mode is Mode.SPARSE:
            self.mask.apply_(weight)

    def prune_(self, weight: Tensor, mask: Tensor) -> None:
        """Take `mask` (True: active) and zero the rest of a DENSE or SPARSE weight, which is SPARSE then.

        Raises:
            MaskError: the mask does not fit, or the weight is in its RESU phase; nothing is changed.
        """
        self._expect(Mode.DENSE, Mode.SPARSE, advice="commit_ ends the RESU phase")
        self._take(weight, mask)

    def enter_resu_(self, weight: Tensor, theta: Tensor | None = None) -> None:
        """Begin the RESU phase of a SPARSE weight, with `theta` (1-d, ascending flat positions) at its pruned places.

        Without `theta` it is zero, so that the function stays the same to the bit; any other changes it.

        Raises:
            MaskError: the weight has no mask yet, or theta is not one number a pruned element; nothing is changed.
        """
        self._expect(Mode.SPARSE, advice="a RESU phase needs a mask: call prune_ first")
        self.mask.check_weight(weight)
        if theta is None:
            self.mask.apply_(weight)
        elif theta.shape != (self.mask.pruned_count,):
            raise MaskError(
                f"theta is {tuple(theta.shape)}, the mask has {self.mask.pruned_count} pruned elements: gather theta "
                "again after a change of the mask"
            )
        else:
            with torch.no_grad():
                resurrecting = effective_weight(whole(weight), theta.to(weight.dtype), self.mask.mask)
                weight.copy_(parted(resurrecting, weight))
        self._switch(Mode.RESU)

    def theta(self, weight: Tensor) -> Tensor:
        """A copy of theta, 1-d; MaskError outside of a RESU phase."""
        self._expect(Mode.RESU, advice="enter_resu_ begins one")
        return gather_pruned(whole(weight.detach()), self.mask.mask, self.mask.pruned_count)

    def theta_grad(self, weight: Tensor) -> Tensor:
        """dL/dtheta: the weight's gradient at the pruned places, 1-d.

        Raises:
            MaskError: there is none, because no backward pass reached the weight or it is frozen.
        """
        self._expect(Mode.RESU, advice="enter_resu_ begins one")
        if weight.grad is None:
            frozen = "" if weight.requires_grad else " (requires_grad is False: freeze the active part otherwise)"
            raise MaskError(f"the weight has no gradient{frozen}, so theta has none: call backward first")
        return gather_pruned(whole(weight.grad), self.mask.mask, self.mask.pruned_count)

    def commit_(self, weight: Tensor, mask: Tensor) -> None:
        """End the RESU phase with another `mask`: what it keeps stays, the rest becomes zero, the weight SPARSE.

        Raises:
            MaskError: the mask does not fit, or there is no RESU phase; nothing is changed.
        """
        self._expect(Mode.RESU, advice="enter_resu_ begins one")
        self._take(weight, mask)

    def densify_(self, weight: Tensor) -> None:
        """Make all elements active, with the values they have (zero, or theta), and the weight DENSE."""
        self.mask.check_weight(weight)
        self.apply_(weight)
        self.mask.update(torch.ones_like(self.mask.mask))
        self._switch(Mode.DENSE)

    def check_state(self, state: Mapping[str, Any], prefix: str = "") -> None:
        """MaskError if `state` (of state_dict) holds a mask that does not fit, a mode that there is not, or one
        of the two alone."""
        code = state.get(f"{prefix}code")
        if code is not None:
            _check_code(code, f"{prefix}code")
        self.mask.check_state(state, f"{prefix}mask.")
        if (code is None) != (f"{prefix}mask.mask" not in state):
            raise MaskError(f"the state has one of {prefix}code and {prefix}mask.mask: give both, or none")

    def extra_repr(self) -> str:
        return f"{self._mode.name}, {tuple(self.mask.mask.shape)}"

    def _take(self, weight: Tensor, mask: Tensor) -> None:
        self.mask.check_weight(weight)
        self.mask.update(mask)
        self._switch(Mode.SPARSE)
        self.mask.apply_(weight)

    def _switch(self, mode: Mode) -> None:
        self._mode = mode
        self.code.fill_(int(mode))

    def _expect(self, *modes: Mode, advice: str) -> None:
        if self._mode not in modes:
            wanted = " or ".join(mode.name for mode in modes)
            raise MaskError(f"the weight is {self._mode.name}, {wanted} is needed: {advice}")


def _check_code(code: Any, name: str) -> None:
    value = code.item() if isinstance(code, Tensor) and code.dim() == 0 else code
    if not isinstance(value, int | float) or value not in list(Mode):
        raise MaskError(f"{name} is {value}: it is one of {', '.join(f'{m:d} ({m.name})' for m in Mode)}")


def _read_mode(masked: MaskedWeight, _: Any = None) -> None:
    # a buffer of the meta device holds nothing yet, one from to_empty anything
    if not masked.code.is_meta:
        _check_code(masked.code, "code")
        masked._mode = Mode(int(masked.code))
