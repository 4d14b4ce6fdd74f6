"""Layers whose weights are pruned and resurrected, and the switch that makes them of a model's own layers.

The layers are torch's: their parameters keep names and identity, so that optimizers, tied weights and checkpoints stay
valid. Each has a `sparsecomp.nn.masked.masked_weight.MaskedWeight` beside each weight, and computes with what that
calls effective. Outside of a layer's own forward its `weight` is the parameter, as ever.
"""

from collections.abc import Iterable
from typing import Any, Self, cast

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils import prune

from sparsecomp.errors import InputError, MaskError
from sparsecomp.nn.attention.multihead import SparseMultiheadAttention
from sparsecomp.nn.masked.attention import PROJECTIONS, RESUMultiheadAttention, adopt_attention
from sparsecomp.nn.masked.existing_mask import weight_and_mask
from sparsecomp.nn.masked.layer_state import Masked, guard_state, settled, shared_mask
from sparsecomp.nn.masked.masked_weight import MaskedWeight, Mode
from sparsecomp.nn.masked.sparse_attention import RESUSparseMultiheadAttention


class _OneWeight(nn.Module):
    """What layers with one weight share."""

    weight: Tensor
    masked: MaskedWeight

    @property
    def mode(self) -> Mode:
        """The weight's mode: DENSE, SPARSE or RESU."""
        return self.masked.mode

    def masked_weights(self) -> Masked:
        """The layer's weight, by its name."""
        return {"weight": (cast(nn.Parameter, self.weight), self.masked)}

    def train(self, mode: bool = True) -> Self:
        """As torch's; to be evaluated, pruned elements are zeroed in memory, for those who read it directly."""
        return settled(super().train(mode), mode)


class RESULinear(_OneWeight, nn.Linear):
    """`torch.nn.Linear` with a weight that can be pruned and resurrected; takes the same arguments."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _adopt_one(self, {})

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.masked.effective(self.weight), self.bias)


class RESUConv2d(_OneWeight, nn.Conv2d):
    """`torch.nn.Conv2d` with a weight that can be pruned and resurrected; takes the same arguments."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _adopt_one(self, {})

    def forward(self, input: Tensor) -> Tensor:
        return self._conv_forward(input, self.masked.effective(self.weight), self.bias)


def wrap_module(model: nn.Module, skip: Iterable[str] = ()) -> nn.Module:
    """Make prunable, in place, every `Linear`, `Conv2d` and `MultiheadAttention` of a model, and return the model.

    So is a `SparseMultiheadAttention`, whose pattern stays. Parameters, hooks, device, dtype and training flag stay;
    only the classes change, and a mask is added to each weight. Modules of other classes, derived ones too, are left as
    they are. Weights that are tied share a mask; a module of another class that reads the same weight, such as an
    embedding, sees what the memory holds.

    A linear layer or convolution that `torch.nn.utils.prune` masks keeps its mask and is SPARSE; the hook and its
    buffer go, and the parameter that was `weight_orig`, which optimizers know, is `weight` again.

    Args:
        skip: names of modules (as in `named_modules`) to leave dense, with what they contain.

    Raises:
        InputError: `model` is no module.
        MaskError: a name of no module or of an attention's part, or a layer whose weight is computed from other
            parameters; the model is unchanged.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"model is a {type(model).__name__}, needs an nn.Module")
    skip = tuple(skip)
    modules = dict(model.named_modules())
    unknown = [name for name in skip if name not in modules]
    if unknown:
        raise MaskError(f"skip names {', '.join(map(repr, unknown))}, which are no modules: see named_modules()")
    parts = [name for name in skip if isinstance(modules[name], NonDynamicallyQuantizableLinear)]
    if parts:
        raise MaskError(f"skip names {', '.join(parts)}, a part of an attention: skip the attention as a whole")
    known = {id(weight): masked for weight, masked in masked_weights(model).values()}
    taken = {
        name: module for name, module in modules.items()
        if type(module) in _ADOPT and not any(name == one or name.startswith(f"{one}.") for one in skip)
    }  # fmt: skip
    for name, module in taken.items():
        if not _is_pruned_alone(module, model):
            _check_own_weights(name, module)
    for module in taken.values():
        mask = _end_pruning(module)
        module.__class__ = _ADOPT[type(module)]
        adopt = adopt_attention if isinstance(module, RESUMultiheadAttention) else _adopt_one
        adopt(module, known)
        if mask is not None:
            cast(MaskedWeight, module.masked).prune_(cast(Tensor, module.weight), mask)
    return model


def masked_weights(model: nn.Module) -> Masked:
    """All weights of a model that can be pruned, by their names in it; a tied one once, by its first name."""
    found, seen = {}, set()
    for prefix, module in model.named_modules():
        if not isinstance(module, _OneWeight | RESUMultiheadAttention):
            continue
        for name, (weight, masked) in module.masked_weights().items():
            if id(weight) not in seen:
                seen.add(id(weight))
                found[f"{prefix}.{name}" if prefix else name] = (weight, masked)
    return found


def _check_own_weights(name: str, module: nn.Module) -> None:
    own = dict(module.named_parameters(remove_duplicate=False))
    for weight in ("weight", *PROJECTIONS, "out_proj.weight"):
        value: Any = module
        for part in weight.split("."):
            value = getattr(value, part, None)
        if isinstance(value, Tensor) and weight not in own:
            raise MaskError(
                f"{weight} of {name or 'the model'} is no parameter but computed from others, as by weight_norm or "
                "torch's pruning of attention or of a shared weight: make it one again (torch.nn.utils.prune.remove), "
                "store it sparse (sparsecomp.sparsify) or put the layer in skip"
            )


def _is_pruned_alone(module: nn.Module, model: nn.Module) -> bool:
    """Whether torch's pruning masks a layer's weight, and no other layer of the model has the same one."""
    if not _is_pruned(module):
        return False
    parameters = (one for layer in model.modules() for one in layer.parameters(recurse=False))
    return sum(one is module.weight_orig for one in parameters) == 1


def _is_pruned(module: nn.Module) -> bool:
    return isinstance(getattr(module, "weight_orig", None), nn.Parameter) and prune.is_pruned(module)


def _end_pruning(module: nn.Module) -> Tensor | None:
    """Make the weight that torch's pruning masks a parameter again, the one that it was; its mask, if it had one."""
    if not _is_pruned(module):
        return None
    _, mask = weight_and_mask(module)
    prune.remove(module, "weight")
    return mask


def _adopt_one(module: nn.Module, known: dict[int, MaskedWeight]) -> None:
    module.masked = shared_mask(cast(Tensor, module.weight), known)
    guard_state(module)


_ADOPT: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: RESULinear, nn.Conv2d: RESUConv2d, nn.MultiheadAttention: RESUMultiheadAttention,
    SparseMultiheadAttention: RESUSparseMultiheadAttention,
}  # fmt: skip
