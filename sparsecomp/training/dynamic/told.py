"""What the compiler's report says of stored values whose pattern may change, and what a change costs.

It stands on the parameter itself, the one thing of a layer that a captured graph holds; a copy of the layer, whose
pattern nobody changes, does not have it.
"""

from torch import Tensor

from sparsecomp.nn.sparse.stored_weight import StoredWeight

_NAME = "sparsecomp_changes"


def tell(layer: StoredWeight, by: str) -> None:
    """Have the report say what changes the layer's pattern, and what it takes at the layer's size now."""
    setattr(layer.values, _NAME, f"its pattern may change ({by}): {_cost(layer)}")


def told_of(values: Tensor) -> str:
    """What `tell` said of a layer of these values; empty if nothing."""
    return getattr(values, _NAME, "")


def _cost(layer: StoredWeight) -> str:
    arrays = (layer.indices, layer.pointers, layer.transposed_pointers, layer.transposed_indices,
              layer.transposed_order, layer.transposed_source)  # fmt: skip
    values = layer.values.nbytes
    written = values + sum(array.nbytes for array in arrays if array is not None)
    room = f"up to {layer.capacity} entries" if layer.capacity else f"while it has {layer.values.numel()} entries"
    return (
        f"each change writes {_size(written)}, and {_size(values)} for the gradient and for each state of the "
        f"optimizer; nothing is compiled again {room}"
    )


def _size(count: int) -> str:
    """Bytes in a word."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} bytes"
