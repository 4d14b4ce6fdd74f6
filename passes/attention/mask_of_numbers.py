"""Whether numbers that are added to scores are a mask: each is 0, or as good as -inf.

Models make such numbers of booleans or of whole numbers, in many ways: by `where`, `masked_fill`, a product with the
least number there is, or as the sum of such masks. Other numbers are biases, of which no block is empty. It is what an
estimate asks, and no more: what is computed follows the numbers.
"""

from torch import fx

from sparsecomp.passes.graph.canonicalize import CanonicalOp, example_of, op_of
from sparsecomp.passes.graph.operators import Trait
from sparsecomp.reference.attention.blocks import SURELY_ZERO

_FILLED = {"zeros": 0.0, "zeros_like": 0.0, "new_zeros": 0.0}
_NUMBERS = frozenset({"full", "full_like", "new_full", "tensor", "scalar_tensor"})
_CHOICES = frozenset({"minimum", "maximum", "min", "max"})
_MOST_CALLS = 64
"""That are looked at, of one mask."""


def is_mask_of_numbers(mask: fx.Node, reader: fx.Node) -> bool:
    """Whether each number is 0 or as good as -inf where `reader` reads them, as far as the graph shows."""
    return _Numbers(reader).keep_or_drop(mask)


class _Numbers:
    """What was found of the nodes that are known where one call reads them."""

    def __init__(self, reader: fx.Node) -> None:
        self._found: dict[fx.Node, bool] = {}
        self._before = set()
        for node in reader.graph.nodes:
            if node is reader:
                break
            self._before.add(node)

    def keep_or_drop(self, value: object) -> bool:
        """Whether each number of a value is 0 or as good as -inf."""
        if isinstance(value, int | float) and not isinstance(value, bool):
            return value == 0 or value <= SURELY_ZERO
        if not isinstance(value, fx.Node) or len(self._found) > _MOST_CALLS:
            return False
        if value not in self._found:
            self._found[value] = True  # of a write in place to itself
            op = op_of(value)
            self._found[value] = op is not None and self._of_call(op) and all(map(self._stays, self._writers(value)))
        return self._found[value]

    def _writers(self, value: fx.Node) -> list[fx.Node]:
        """Calls that write to a tensor before it is read."""
        ops = [(user, op_of(user)) for user in value.users if user in self._before]
        return [user for user, op in ops if op is not None and op.inplace and op.input is value]

    def _stays(self, writer: fx.Node) -> bool:
        op = op_of(writer)
        return op is not None and self._of_call(op)

    def _of_call(self, op: CanonicalOp) -> bool:
        one, other = op.input, op.get("other")
        if op.out is not None:
            return False
        if op.name in _FILLED:
            return True
        if op.name in _NUMBERS:
            return self.keep_or_drop(op.get("fill_value", op.get("data", op.get("s"))))
        if op.name == "where":
            return self.keep_or_drop(op.get("input")) and self.keep_or_drop(other)
        if op.name == "masked_fill":
            return self.keep_or_drop(op.get("value")) and (self.keep_or_drop(one) or _is_where_not_zero(op))
        if op.name == "setitem":
            return self.keep_or_drop(one) and self.keep_or_drop(op.get("value"))
        if op.name == "mul":
            return self._of_product(one, other)
        if op.name == "add":
            return op.get("alpha") in (1, None) and self.keep_or_drop(one) and self.keep_or_drop(other)
        if op.name in _CHOICES:
            return isinstance(other, fx.Node) and self.keep_or_drop(one) and self.keep_or_drop(other)
        if op.name == "log":
            return _is_of_booleans(one)
        passes = op.is_identity or op.name in ("tril", "triu") or op.has(Trait.VIEW | Trait.MOVES | Trait.SAME)
        return (passes or _casts(op)) and self.keep_or_drop(one)

    def _of_product(self, one: object, other: object) -> bool:
        """Of one number, which drops, with any; of numbers that keep or drop, with booleans or more of these."""
        low = [value for value in (one, other) if isinstance(value, int | float) and value <= SURELY_ZERO]
        kept = [value for value in (one, other) if self.keep_or_drop(value) and not isinstance(value, int | float)]
        beside = [value for value in (one, other) if value not in kept]
        return bool(low) or (bool(kept) and all(_is_of_booleans(value) for value in beside))


def _casts(op: CanonicalOp) -> bool:
    example = example_of(op.node)
    return op.has(Trait.CAST) and example is not None and example.dtype.is_floating_point


def _is_of_booleans(value: object) -> bool:
    """Whether a value is of booleans, or of casts of these."""
    while isinstance(value, fx.Node):
        example, op = example_of(value), op_of(value)
        if example is not None and not example.dtype.is_floating_point:
            return True
        if op is None or not op.has(Trait.CAST | Trait.VIEW):
            return False
        value = op.input
    return False


def _is_where_not_zero(op: CanonicalOp) -> bool:
    """Whether a `masked_fill` replaces all but zeros: its mask is what it fills, cast to booleans or compared to 0."""
    mask = op.get("mask")
    chosen = op_of(mask) if isinstance(mask, fx.Node) else None
    if chosen is None or chosen.input is not op.input:
        return False
    return chosen.has(Trait.CAST) or (chosen.name == "ne" and chosen.get("other") == 0)
