"""What a transfer function is given, what it returns, and where it is registered.

A transfer function sees one canonical operator and the facts of its arguments, and says what holds for the result:

    @transfer("max_pool2d")
    def max_pool(op: CanonicalOp, facts: Facts) -> Result:
        return facts.of(op.input)
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol, TypeAlias

import torch
from torch import fx

from sparsecomp.passes.graph.canonicalize import CanonicalOp
from sparsecomp.reference.facts import SparsityFact


class LostKind(Enum):
    """Why nothing, or less than a grid of values, is known about a tensor."""

    INPUT = "input"
    MIXES = "mixes"
    SHIFTS = "shifts"
    RESCALES = "rescales"
    MUTATED = "mutated"
    UNSUPPORTED = "unsupported"
    OPAQUE = "opaque"
    NOT_A_SOURCE = "not_a_source"
    UNKNOWN_OPERAND = "unknown_operand"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Lost:
    """The reason why a value domain ended, for the report."""

    kind: LostKind
    message: str

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True, slots=True)
class Kept:
    """A fact together with the reason why it is weaker than its operands' (zeros survive, the grid does not)."""

    fact: SparsityFact
    lost: Lost


@dataclass(frozen=True, slots=True)
class Items:
    """Facts of a tuple-valued result: by index, and `rest` for every other index."""

    facts: tuple[SparsityFact | None, ...] = ()
    rest: SparsityFact | None = None

    def at(self, index: int) -> SparsityFact | None:
        """The fact of item `index`, negative indices refused unless all items are alike."""
        if 0 <= index < len(self.facts):
            return self.facts[index]
        return self.rest if index >= 0 or not self.facts else None


Result: TypeAlias = SparsityFact | Kept | Items | Lost | None
"""`None`: no operand has a fact, so the operand's own reason is passed on."""


class Facts(Protocol):
    """The facts that hold just before the operator runs."""

    def of(self, value: Any) -> SparsityFact | None:
        """The fact of a node, a Python number or bool, or a tensor constant's absence of one (None)."""
        ...

    def value(self, node: Any) -> SparsityFact | Items | None:
        """The fact or the facts of a node, tuple-valued nodes included."""
        ...

    def lost(self, value: Any) -> Lost:
        """Why nothing is known about an argument."""
        ...

    def same_value(self, a: Any, b: Any) -> bool:
        """Whether two nodes hold the same values now (one is the other's copy or alias, not written to since)."""
        ...

    def current(self, outer: fx.Node, inner: Any) -> bool:
        """Whether `inner`, an argument of `outer`, still holds what `outer` read."""
        ...

    def body(self, node: Any) -> fx.GraphModule | None:
        """The sub-graph that a `get_attr` node refers to."""
        ...

    def call_body(self, body: fx.GraphModule, args: tuple[Any, ...], caller: fx.Node) -> Result:
        """The facts of a sub-graph's outputs, given those of `args`."""
        ...


Transfer: TypeAlias = Callable[[CanonicalOp, Facts], Result]
TRANSFERS: dict[str, Transfer] = {}


def transfer(*names: str) -> Callable[[Transfer], Transfer]:
    """Registers a transfer function for canonical operator names."""

    def register(function: Transfer) -> Transfer:
        for name in names:
            if name in TRANSFERS:
                raise ValueError(f"two transfer functions for {name}")
            TRANSFERS[name] = function
        return function

    return register


def is_integer(dtype: torch.dtype | None) -> bool:
    """Whether a dtype is known to be an integer type (bool not counted)."""
    return dtype is not None and not dtype.is_floating_point and not dtype.is_complex and dtype is not torch.bool
