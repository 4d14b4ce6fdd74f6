"""What `sparsify` makes of each layer: how much of its weight stays, by which pruner, in which format."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from numbers import Real
from typing import Any, Protocol, cast, runtime_checkable

from torch import Tensor, nn

from sparsecomp.errors import MaskError, typed_arguments
from sparsecomp.formats import BSR, CSR, SparseMatrix
from sparsecomp.formats import NM as NMFormat
from sparsecomp.formats.base import FORMATS
from sparsecomp.formats.bsr import check_block
from sparsecomp.nn.masked.existing_mask import weight_and_mask
from sparsecomp.nn.sparse.pruning import pruned
from sparsecomp.training.pruning.budgets import BUDGETS
from sparsecomp.training.pruning.pruners import Magnitude, Parts, Pruner, pruner_of

Shapes = Mapping[str, Sequence[int]]


@runtime_checkable
class Pruning(Protocol):
    """How one layer's weight is pruned and stored."""

    @property
    def pruner(self) -> Pruner:
        """What ranks the weight, and so what it needs to know of the layer's inputs."""
        ...

    def matrix(self, layer: nn.Linear, parts: Parts) -> SparseMatrix | None:
        """The layer's sparse weight (out_features, in_features); None if the layer should stay dense."""
        ...

    def shared(self, shapes: Shapes) -> "Mapping[str, Pruning]":
        """What each of a model's layers gets, by the shapes of their weights."""
        ...


class _Told:
    """Names its settings in messages, a format by the name of its class."""

    def shared(self, shapes: Shapes) -> Mapping[str, Any]:
        """See `Pruning`: the same for each."""
        return dict.fromkeys(shapes, self)

    def __repr__(self) -> str:
        given: Any = self
        settings = ", ".join(f"{one.name}={_named(getattr(self, one.name))}" for one in fields(given))
        return f"{type(self).__name__}({settings})"


@dataclass(frozen=True, repr=False)
class _Ranked(_Told):
    """What a pruner chooses.

    Attributes:
        by: "magnitude", "wanda", "sparsegpt", or a pruner such as `SparseGPT(damping=0.05)`.
    """

    by: str | Pruner = field(default="magnitude", kw_only=True)

    def __post_init__(self) -> None:
        pruner_of(self.by)

    @property
    def pruner(self) -> Pruner:
        """See `Pruning`."""
        return pruner_of(self.by)


class _Budgeted(_Told):
    """A sparsity that layers share."""

    sparsity: float
    budget: str

    def _check_budget(self) -> None:
        _check_share("sparsity", self.sparsity, below=1)
        if self.budget not in BUDGETS:
            raise MaskError(f"budget is {self.budget!r}: give one of {', '.join(BUDGETS)}")

    def shared(self, shapes: Shapes) -> Mapping[str, Any]:
        """See `Pruning`."""
        if self.budget == "uniform":
            return super().shared(shapes)
        kept, given = BUDGETS[self.budget](shapes, self.sparsity), cast(Any, self)
        sizes = {name: max(math.prod(shape), 1) for name, shape in shapes.items()}
        return {name: replace(given, sparsity=1 - kept[name] / size, budget="uniform") for name, size in sizes.items()}


@typed_arguments(MaskError)
@dataclass(frozen=True, repr=False)
class Unstructured(_Budgeted, _Ranked):
    """Keep the best elements of each layer, wherever they are.

    Attributes:
        sparsity: share of each weight to leave out, in [0, 1).
        by: "magnitude", "wanda", "sparsegpt", or a pruner such as `SparseGPT(damping=0.05)`.
        format: of the weight.
        budget: "uniform", the same sparsity in each layer; or "erk", by Erdos-Renyi-Kernel, that of all together.
    """

    sparsity: float
    format: type[SparseMatrix] = CSR
    budget: str = field(default="uniform", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_budget()
        _check_format(self.format, ())

    def matrix(self, layer: nn.Linear, parts: Parts) -> SparseMatrix:
        """See `Pruning`."""
        weight, _ = weight_and_mask(layer)
        keep = weight.numel() - round(self.sparsity * weight.numel())
        return _stored(*self.pruner.prune(weight, keep, parts), self.format)


@typed_arguments(MaskError)
@dataclass(frozen=True, repr=False)
class ConstantFanIn(_Budgeted, _Ranked):
    """Keep the best elements of each row, as many in each: where SRigL begins.

    Attributes:
        sparsity: share of each row to leave out, in [0, 1).
        by: as of `Unstructured`.
        budget: as of `Unstructured`; the counts are rounded to those of whole rows.
    """

    sparsity: float
    budget: str = field(default="uniform", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_budget()

    def matrix(self, layer: nn.Linear, parts: Parts) -> SparseMatrix:
        """See `Pruning`."""
        weight, _ = weight_and_mask(layer)
        columns = weight.shape[1]
        keep = columns - round(self.sparsity * columns)
        return _stored(*self.pruner.prune_groups(weight, keep, columns, parts), CSR)


@typed_arguments(MaskError)
@dataclass(frozen=True, repr=False)
class NM(_Ranked):
    """Keep the best n of each m neighbours along the inputs, such as 2:4.

    Attributes:
        n: elements to keep of each group.
        m: elements of a group, which must divide a layer's in_features.
        by: as of `Unstructured`.
    """

    n: int = 2
    m: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.n) is not int or type(self.m) is not int or not 0 < self.n <= self.m:
            raise MaskError(f"n:m is {self.n!r}:{self.m!r}: give whole numbers, n from 1 to m, such as NM(2, 4)")

    def matrix(self, layer: nn.Linear, parts: Parts) -> SparseMatrix:
        """See `Pruning`."""
        weight, _ = weight_and_mask(layer)
        weight, mask = self.pruner.prune_groups(weight, self.n, self.m, parts)
        return _stored(weight, mask, NMFormat, n=self.n, m=self.m)


@typed_arguments(MaskError)
@dataclass(frozen=True, repr=False)
class Block(_Budgeted):
    """Keep the blocks of the largest norm.

    Attributes:
        size: rows and columns of a block, or one number for both.
        sparsity: share of blocks to leave out, in [0, 1).
        format: BSR or BCSC.
        budget: as of `Unstructured`.
    """

    size: int | tuple[int, int]
    sparsity: float
    format: type[SparseMatrix] = BSR
    budget: str = field(default="uniform", kw_only=True)

    def __post_init__(self) -> None:
        self._check_budget()
        _check_format(self.format, ("block",))
        check_block(self.size)

    @property
    def pruner(self) -> Pruner:
        """See `Pruning`."""
        return Magnitude()

    def matrix(self, layer: nn.Linear, parts: Parts) -> SparseMatrix:
        """See `Pruning`."""
        return pruned(weight_and_mask(layer)[0], self.format, None, self.sparsity, {"block": self.size})


@typed_arguments(MaskError)
@dataclass(frozen=True, repr=False)
class FromMask(_Told):
    """Keep what is there: the masks of torch's pruning, of parametrizations and of RESU layers, or else the zeros.

    Attributes:
        least: share of zeros from which a layer is made sparse; others stay dense.
        format: of the weight.
    """

    least: float = 0.5
    format: type[SparseMatrix] = CSR

    def __post_init__(self) -> None:
        _check_share("least", self.least)
        _check_format(self.format, ())

    @property
    def pruner(self) -> Pruner:
        """See `Pruning`."""
        return Magnitude()

    def matrix(self, layer: nn.Linear, parts: Parts) -> SparseMatrix | None:
        """See `Pruning`."""
        weight, mask = weight_and_mask(layer)
        if 1 - mask.float().mean().item() < self.least:
            return None
        return _stored(weight, mask, self.format)


def _stored(weight: Tensor, mask: Tensor, format: type[SparseMatrix], **layout: Any) -> SparseMatrix:
    return pruned(weight, format, mask, None, layout)


def _named(value: Any) -> str:
    return value.__name__ if isinstance(value, type) else repr(value)


def _check_share(name: str, share: Any, below: float = math.inf) -> None:
    """Raise MaskError unless it is a number from 0 to 1, and below a bound."""
    given = float(share) if isinstance(share, Real) and not isinstance(share, bool) else math.nan
    if not 0 <= given <= 1 or given >= below:
        least = "less than 1" if below == 1 else "1"
        raise MaskError(f"{name} is {share!r}: give a share from 0 to {least}, such as 0.9")


def _check_format(format: Any, layout: tuple[str, ...]) -> None:
    """Raise MaskError unless it is a format that needs to be told no more than this layout."""
    if not (isinstance(format, type) and issubclass(format, SparseMatrix)) or layout != format.LAYOUT:
        fitting = ", ".join(name for name, kind in FORMATS.items() if layout == kind.LAYOUT)
        raise MaskError(f"format is {_named(format)}: give one of sparsecomp.formats that fits the config: {fitting}")
