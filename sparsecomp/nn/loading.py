"""Loading a whole model's state: all of it is checked before anything of the model changes.

torch loads layer after layer, so that the tenth may refuse what nine have taken; and it has no way to tell a layer how
strict to be about its pattern.
"""

import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from sparsecomp.errors import CheckpointError, FormatError, InputError, MaskError
from sparsecomp.nn.masked.masked_weight import MaskedWeight
from sparsecomp.nn.sparse.stored_weight import StoredWeight, told_of_dropped


def load_state_dict(
    model: nn.Module, state: Mapping[str, Any], *, strict: bool = True, assign: bool = False,
    strict_pattern: bool = False,
) -> Any:  # fmt: skip
    """`model.load_state_dict(state, strict, assign)`, which changes nothing where it refuses.

    Sparse layers take the checkpoint's pattern with its values; one that has a dense weight in the checkpoint takes
    what its own pattern stores, and a warning says how many other non-zero weights that leaves out.

    Model and checkpoint may be compiled or not: the names that `torch.compile` adds are left out of account. Names and
    sizes are compared as they stand in both otherwise: a model whose own hooks rename what they load is loaded by its
    `load_state_dict`.

    Args:
        model: any module; a sparse layer alone, too.
        state: what `state_dict` returned, of this or a dense model.
        strict: whether names must be the same.
        assign: keep the checkpoint's tensors instead of copying them.
        strict_pattern: refuse a checkpoint whose sparse layers store other elements than the model's, or whose dense
            weights have non-zeros elsewhere.

    Returns:
        Missing and unexpected names, as torch returns them.

    Raises:
        InputError: `model` is no module, or `state` no mapping.
        CheckpointError: missing or unexpected names, something that is no tensor, or a tensor of another size or that
            cannot be copied: without contents, quantized or of one of torch's sparse layouts.
        FormatError: a sparse layer's part is no matrix of the layer's format and shape, or of another pattern where
            that is strict.
        MaskError: the mask of a RESU layer does not fit.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"model is a {type(model).__name__}, needs an nn.Module")
    if not isinstance(state, Mapping):
        raise InputError(f"state is a {type(state).__name__}: give what state_dict returned, or torch.load of its file")
    own, state = model.state_dict(), _with_names_of(model, state)
    _refuse(_unusable(own, state, assign))
    read, of_patterns, dropped = state, set[str](), 0
    for name, part in model.named_modules(remove_duplicate=False):
        prefix = f"{name}." if name else ""
        with _naming(name):
            if isinstance(part, StoredWeight):
                found = part.read_state(read, prefix, strict_pattern or part.strict_pattern)
                read, dropped = found.state, dropped + found.dropped
                of_patterns |= {f"{prefix}{one}" for one in part.stored_names}
            elif isinstance(part, MaskedWeight):
                part.check_state(read, prefix)
    _refuse(_faults(own, read, strict, of_patterns))
    if dropped:
        warnings.warn(told_of_dropped(dropped), stacklevel=2)
    return model.load_state_dict(_with_versions(read, getattr(state, "_metadata", {})), strict, assign)


def _refuse(faults: Iterator[str]) -> None:
    if told := "; ".join(faults):
        raise CheckpointError(f"{told}. Nothing was loaded")


@contextmanager
def _naming(layer: str) -> Iterator[None]:
    """What a layer refuses is told with its name."""
    try:
        yield
    except (FormatError, MaskError) as error:
        raise type(error)(f"{layer or 'the layer'}: {error}. Nothing was loaded") from error


def _unusable(own: Mapping[str, Any], given: Mapping[str, Any], assign: bool) -> Iterator[str]:
    """What cannot be read, or copied into the model: torch finds it once the layers before have been loaded."""
    for name, theirs in given.items():
        # a dense weight takes the place of a sparse layer's values
        mine = own.get(name, own.get(f"{name.removesuffix('weight')}values") if name.endswith("weight") else None)
        if not isinstance(mine, Tensor):
            continue
        if not isinstance(theirs, Tensor):
            yield f"{name} is a {type(theirs).__name__}, needs a tensor"
        elif theirs.is_meta and not (mine.is_meta or assign):
            yield f"{name} is a meta tensor, which has no contents: give one that has, or assign=True"
        elif (theirs.layout, theirs.is_quantized) != (mine.layout, mine.is_quantized) and not is_lazy(mine):
            kind = "quantized" if theirs.is_quantized else str(theirs.layout)
            yield f"{name} is a {kind} tensor, needs one as the model's: convert it, such as by dequantize or to_dense"


def _faults(
    own: Mapping[str, Any], given: Mapping[str, Any], strict: bool, of_patterns: set[str]
) -> Iterator[str]:
    """What torch would refuse: `of_patterns` names tensors whose sizes are checked elsewhere."""
    lacking, unknown = own.keys() - given.keys(), given.keys() - own.keys()
    prefixes = sorted(name.removesuffix("weight") for name in lacking if name.endswith("weight"))
    if strict and (sparse := [prefix.rstrip(".") or "itself" for prefix in prefixes if f"{prefix}values" in unknown]):
        yield f"sparse in the checkpoint, dense in the model: {', '.join(sparse)}; sparsify the model before loading"
    for what, names in (("lacks", lacking), ("has no place for", unknown)):
        if strict and names:
            subject = "the checkpoint" if what == "lacks" else "the model"
            yield f"{subject} {what} {', '.join(sorted(names))}: strict=False leaves that out of account"
    for name in sorted((own.keys() & given.keys()) - of_patterns):
        mine, theirs = own[name], given[name]
        if not isinstance(mine, Tensor) or is_lazy(mine):
            continue
        if mine.shape != theirs.shape and (mine.dim() or theirs.shape != (1,)):  # as torch does for a number
            yield f"{name} has shape {tuple(theirs.shape)}, the model's {tuple(mine.shape)}"


def _with_names_of(model: nn.Module, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """The state under the names that the model's modules have, wherever `torch.compile` wrapped any."""
    _refuse(f"the checkpoint has a key {name!r}, needs names" for name in state if not isinstance(name, str))
    prefixes = {"": ""} | {
        f"{name}.".replace(_WRAPPED, ""): f"{name}." for name, _ in model.named_modules(remove_duplicate=False) if name
    }

    def renamed(name: str) -> str:
        plain = name.replace(_WRAPPED, "")
        owner = plain[: plain.rfind(".") + 1]
        return prefixes.get(owner, owner) + plain[len(owner) :]

    if all(renamed(name) == name for name in state):
        return state
    versions = getattr(state, "_metadata", {})
    return _with_versions(
        {renamed(name): value for name, value in state.items()},
        {renamed(f"{name}.")[:-1]: version for name, version in versions.items()},
    )


def _with_versions(state: Mapping[str, Any], versions: Mapping[str, Any]) -> Mapping[str, Any]:
    """The state with its modules' versions, as torch keeps them."""
    found = OrderedDict(state)
    found._metadata = versions  # pyright: ignore
    return found


_WRAPPED = "_orig_mod."
