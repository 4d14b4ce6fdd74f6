"""What `sparsify` makes of each layer: how much of its weight stays, by which pruner, in which format."""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from sparsecomp.errors import MaskError
from sparsecomp.formats import BSR, CSR, SparseMatrix
from sparsecomp.formats import NM as NMFormat
from sparsecomp.nn.masked.existing_mask import weight_and_mask
from sparsecomp.nn.sparse.pruning import pruned
from sparsecomp.training.pruning.pruners import Magnitude, Parts, Pruner, pruner_of


@runtime_checkable
class Config(Protocol):
    """How one layer's weight is pruned and stored."""

    @property
    def pruner(self) -> Pruner:
        """What ranks the weight, and so what it needs to know of the layer's inputs."""
        ...

    def matrix(self, layer: nn.Linear, parts: Parts) -> SparseMatrix | None:
        """The layer's sparse weight (out_features, in_features); None if the layer should stay dense."""
        ...


@dataclass(frozen=True)
class Unstructured:
    """Keep the best elements of each layer, wherever they are.

    Attributes:
        sparsity: share of each weight to leave out, in [0, 1).
        by: "magnitude", "wanda", "sparsegpt", or a pruner such as `SparseGPT(damping=0.05)`.
        format: of the weight.
    """

    sparsity: float
    by: str | Pruner = "magnitude"
    format: type[SparseMatrix] = CSR

    def __post_init__(self) -> None:
        _check_sparsity(self.sparsity)
        pruner_of(self.by)

    @property
    def pruner(self) -> Pruner:
        """See `Config`."""
        return pruner_of(self.by)

    def matrix(self, layer: nn.Linear, parts: Parts) -> SparseMatrix:
        """See `Config`."""
        weight, _ = weight_and_mask(layer)
        keep = weight.numel() - round(self.sparsity * weight.numel())
        return _stored(*self.pruner.prune(weight, keep, parts), self.format)


@dataclass(frozen=True)
class NM:
    """Keep the best n of each m neighbours along the inputs, such as 2:4.

    Attributes:
        n: elements to keep of each group.
        m: elements of a group, which must divide a layer's in_features.
        by: as of `Unstructured`.
    """

    n: int = 2
    m: int = 4
    by: str | Pruner = "magnitude"

    def __post_init__(self) -> None:
        if not (type(self.n) is type(self.m) is int and 0 < self.n <= self.m):
            raise MaskError(f"n:m is {self.n!r}:{self.m!r}: give ints, n from 1 to m")
        pruner_of(self.by)

    @property
    def pruner(self) -> Pruner:
        """See `Config`."""
        return pruner_of(self.by)

    def matrix(self, layer: nn.Linear, parts: Parts) -> SparseMatrix:
        """See `Config`."""
        weight, _ = weight_and_mask(layer)
        weight, mask = self.pruner.prune_groups(weight, self.n, self.m, parts)
        return _stored(weight, mask, NMFormat, n=self.n, m=self.m)


@dataclass(frozen=True)
class Block:
    """Keep the blocks of the largest norm.

    Attributes:
        size: rows and columns of a block, or one number for both.
        sparsity: share of blocks to leave out, in [0, 1).
        format: BSR or BCSC.
    """

    size: int | tuple[int, int]
    sparsity: float
    format: type[SparseMatrix] = BSR

    def __post_init__(self) -> None:
        _check_sparsity(self.sparsity)

    @property
    def pruner(self) -> Pruner:
        """See `Config`."""
        return Magnitude()

    def matrix(self, layer: nn.Linear, parts: Parts) -> SparseMatrix:
        """See `Config`."""
        return pruned(weight_and_mask(layer)[0], self.format, None, self.sparsity, {"block": self.size})


@dataclass(frozen=True)
class FromMask:
    """Keep what is there: the masks of torch's pruning, of parametrizations and of RESU layers, or else the zeros.

    Attributes:
        least: share of zeros from which a layer is made sparse; others stay dense.
        format: of the weight.
    """

    least: float = 0.5
    format: type[SparseMatrix] = CSR

    def __post_init__(self) -> None:
        if not (_is_number(self.least) and 0 <= self.least <= 1):
            raise MaskError(f"least is {self.least!r}: give a share of zeros from 0 to 1, such as 0.5")

    @property
    def pruner(self) -> Pruner:
        """See `Config`."""
        return Magnitude()

    def matrix(self, layer: nn.Linear, parts: Parts) -> SparseMatrix | None:
        """See `Config`."""
        weight, mask = weight_and_mask(layer)
        if 1 - mask.float().mean().item() < self.least:
            return None
        return _stored(weight, mask, self.format)


def _stored(weight: Tensor, mask: Tensor, format: type[SparseMatrix], **layout: Any) -> SparseMatrix:
    return pruned(weight, format, mask, None, layout)


def _check_sparsity(sparsity: float) -> None:
    if not (_is_number(sparsity) and 0 <= sparsity < 1):
        raise MaskError(f"sparsity is {sparsity!r}: give a share from 0 to less than 1, such as 0.9")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)

