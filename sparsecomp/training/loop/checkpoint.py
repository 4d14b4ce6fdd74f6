"""Checkpoints of a training run in one safetensors file: a tree of plain values in JSON, its tensors beside it.

Nothing is pickled, so reading a file runs no code of it. A file is written whole or not at all, and a digest makes an
altered one an error.
"""

from collections.abc import Mapping
from os import PathLike
from typing import Any

import torch

from sparsecomp.errors import CheckpointError
from sparsecomp.files import tensor_file
from sparsecomp.nn.sparse.stored_weight import StoredWeight

_KIND = tensor_file.Kind(
    "sparsecomp.checkpoint", 1, CheckpointError, "has no readable header of a checkpoint: it is another file"
)

_DEEPEST = 100
"""Of a tree; the file's JSON nests three times as deep."""


def save_tree(path: str | PathLike[str], tree: Mapping[str, Any]) -> None:
    """Write a tree of dicts, lists, tuples, str, int, float, bool, None and tensors; tensors are copied to the CPU.

    Raises:
        CheckpointError: the tree holds something else.
        OSError: the file cannot be written.
    """
    tensors: dict[str, torch.Tensor] = {}
    packed = _packed(tree, tensors, "")
    tensor_file.write(path, _KIND, {"tree": packed}, tensors)


def load_tree(path: str | PathLike[str]) -> dict[str, Any]:
    """Read what `save_tree` wrote, tensors on the CPU.

    Raises:
        CheckpointError: no whole checkpoint, of another version, or altered.
        OSError: the file cannot be read.
    """
    header, tensors = tensor_file.read(path, _KIND)
    try:
        return _unpacked(header["tree"], tensors)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path} {_KIND.unreadable}") from error


def check_same_model(state: Mapping[str, Any], model: torch.nn.Module) -> None:
    """CheckpointError unless `state` has the names, shapes and dtypes of the model's state_dict.

    How many entries a sparse layer stores may differ.
    """
    sized = {
        f"{name}.{own}" if name else own for name, layer in model.named_modules(remove_duplicate=False)
        if isinstance(layer, StoredWeight) for own in layer.stored_names
    }  # fmt: skip
    own = {name: _form(value, name in sized) for name, value in model.state_dict().items()}
    theirs = {name: _form(value, name in sized) for name, value in state.items()}
    if own == theirs:
        return
    differing = sorted(name for name in own.keys() | theirs.keys() if own.get(name) != theirs.get(name))
    name = differing[0]
    raise CheckpointError(
        f"the checkpoint is of another model: {len(differing)} entries differ, such as {name}, which is "
        f"{theirs.get(name, 'missing')} in the file and {own.get(name, 'missing')} here. Build the model it was made of"
    )


def _form(value: Any, stored: bool) -> str:
    """Dtype and shape; of what is stored without how many."""
    if not isinstance(value, torch.Tensor):
        return repr(value)
    return f"{value.dtype} {('…', *value.shape[1:]) if stored else tuple(value.shape)}"


def _packed(value: Any, tensors: dict[str, torch.Tensor], place: str, deep: int = 0) -> Any:
    """JSON for `value`: [kind, content] where JSON has no such kind, and the value itself where it has."""
    if deep > _DEEPEST:
        raise CheckpointError(f"{place[:80]}… is nested more than {_DEEPEST} deep: a checkpoint holds no such tree")

    def inside(part: Any, at: Any) -> Any:
        return _packed(part, tensors, f"{place}/{at}", deep + 1)

    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided:
            raise CheckpointError(f"{place} is a tensor of layout {value.layout}: a checkpoint holds strided ones")
        # numbered, as a key may hold what separates places; a file's names are UTF-8, which has no lone surrogates
        name = f"{len(tensors)}{place}".encode(errors="replace").decode()
        tensors[name] = value
        return ["tensor", name]
    if isinstance(value, Mapping):
        return ["dict", [[_key(key, place), inside(part, key)] for key, part in value.items()]]
    if type(value) in (list, tuple):
        return [type(value).__name__, [inside(part, at) for at, part in enumerate(value)]]
    raise CheckpointError(f"{place} is a {type(value).__name__}: a checkpoint holds tensors and JSON's types alone")


def _key(key: Any, place: str) -> str | int:
    if type(key) not in (str, int):
        raise CheckpointError(f"{place} has the key {key!r}: keys are str or int")
    return key


def _unpacked(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if not isinstance(value, list):
        return value
    kind, content = value
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: _unpacked(part, tensors) for key, part in content}
    parts = [_unpacked(part, tensors) for part in content]
    return tuple(parts) if kind == "tuple" else parts
