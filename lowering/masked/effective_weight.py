"""CUDA implementations of the effective weight and its inverse, and the operations behind them.

A mask is read as what it was packed to once: 32 bits a word, and for each word the number of pruned elements before it.
Where an element lies in theta then follows from one word and one number, without a scan over its neighbours.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from sparsecomp.lowering.cache.signature import Device, KernelSignature
from sparsecomp.lowering.launch import dispatch
from sparsecomp.lowering.tuning.template import Operation

WORD = 32
"""Elements whose bits one word holds."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The kernels copy bits, of any dtype, by their size."""


class PackMask(NamedTuple):
    """A flat bool mask of `numel` elements, to be packed."""

    numel: int

    @property
    def words(self) -> int:
        """Words of the packed mask."""
        return -(-self.numel // WORD)


class Merge(NamedTuple):
    """A weight of `numel` elements, `pruned` of which come from theta, `itemsize` bytes each."""

    numel: int
    pruned: int
    itemsize: int


class Split(NamedTuple):
    """As `Merge`, taken apart; `active` and `rest` are 1 for the results that are wanted."""

    numel: int
    pruned: int
    itemsize: int
    active: int
    rest: int


def ranks(mask: Tensor) -> Tensor:
    """A contiguous bool mask of 1 to 2^31 - 2^16 elements, packed: (2, words + 1) int32.

    The first row holds the bits (the lowest is the first element, 1 is active, 0 past the end) and an unused number,
    the second the pruned elements before each word and in all.
    """
    problem = PackMask(mask.numel())
    table = torch.zeros((2, problem.words + 1), dtype=torch.int32, device=mask.device)
    dispatch.launch(PACK_MASK, problem, mask.view(torch.uint8), table)
    table[1].cumsum_(0)
    return table


def merge_pruned(weight: Tensor, theta: Tensor, table: Tensor) -> Tensor:
    """See `sparsecomp.ops.effective_weight`: contiguous operands, and a mask from :func:`ranks`."""
    out, bits = torch.empty_like(weight), _BITS[weight.itemsize]
    problem = Merge(weight.numel(), theta.numel(), weight.itemsize)
    dispatch.launch(MERGE, problem, weight.view(bits), theta.view(bits), table, out.view(bits))
    return out


def split_pruned_weight(whole: Tensor, table: Tensor, pruned: int, active: bool, rest: bool) -> tuple[Tensor, Tensor]:
    """See `sparsecomp.ops.split_pruned`: a contiguous operand, and a mask from :func:`ranks`."""
    bits = _BITS[whole.itemsize]
    kept = whole.new_empty(whole.shape if active else (0,))
    gone = whole.new_empty(pruned if rest else 0)
    if active or gone.numel():
        problem = Split(whole.numel(), pruned, whole.itemsize, int(active), int(gone.numel() > 0))
        results = (kept.view(bits) if active else None, gone.view(bits) if problem.rest else None)
        dispatch.launch(SPLIT, problem, whole.view(bits), table, *results)
    return kept, gone


def _pack_signature(problem: PackMask, device: Device) -> KernelSignature:
    return KernelSignature("pack_mask", device, dtypes=("bool", "int32"), sizes=(("numel", problem.numel),))


def _pack_representative(signature: KernelSignature) -> PackMask:
    return PackMask(int(dict(signature.sizes)["numel"]))


def _pack_operands(problem: PackMask, device: torch.device, seed: int) -> tuple[Tensor | None, ...]:
    mask = _mask(problem.numel, problem.numel // 2, device, seed)
    return mask.view(torch.uint8), torch.zeros((2, problem.words + 1), dtype=torch.int32, device=device)


def _pack_reference(problem: PackMask, operands: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    mask, _ = operands
    assert mask is not None
    padded = torch.nn.functional.pad(mask.bool(), (0, problem.words * WORD - problem.numel)).view(-1, WORD)
    bits = (padded.long() << torch.arange(WORD, device=mask.device)).sum(1)
    inside = torch.full_like(bits, WORD)
    inside[-1] = problem.numel - (problem.words - 1) * WORD
    zero = bits.new_zeros(1)
    return (torch.stack([torch.cat([bits.int().long(), zero]), torch.cat([zero, inside - padded.sum(1)])]),)


def _signature(problem: Merge | Split, device: Device) -> KernelSignature:
    wanted = () if isinstance(problem, Merge) else (("active", problem.active), ("rest", problem.rest))
    return KernelSignature(
        "merge_pruned" if isinstance(problem, Merge) else "split_pruned", device, dtypes=(f"{problem.itemsize} bytes",),
        sizes=(("numel", problem.numel),), density=problem.pruned / problem.numel,
        parameters=wanted,
    )  # fmt: skip


def _sizes(signature: KernelSignature) -> tuple[int, int, int]:
    numel = int(dict(signature.sizes)["numel"])
    return numel, int(numel * (signature.density or 0)), int(signature.dtypes[0].split()[0])


def _merge_representative(signature: KernelSignature) -> Merge:
    return Merge(*_sizes(signature))


def _split_representative(signature: KernelSignature) -> Split:
    given = dict(signature.parameters)
    return Split(*_sizes(signature), int(given["active"]), int(given["rest"]))


def _merge_operands(problem: Merge, device: torch.device, seed: int) -> tuple[Tensor | None, ...]:
    p, dtype = problem, _BITS[problem.itemsize]
    table = ranks(_mask(p.numel, p.pruned, device, seed))
    weight, theta = (_numbers(size, dtype, device, seed) for size in (p.numel, p.pruned))
    return weight, theta, table, torch.full_like(weight, 77)


def _merge_reference(problem: Merge, operands: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    weight, theta, table, _ = operands
    assert weight is not None and theta is not None and table is not None
    return (weight.masked_scatter(~_unpacked(table, problem.numel), theta),)


def _split_operands(problem: Split, device: torch.device, seed: int) -> tuple[Tensor | None, ...]:
    p, dtype = problem, _BITS[problem.itemsize]
    table = ranks(_mask(p.numel, p.pruned, device, seed))
    whole = _numbers(p.numel, dtype, device, seed)
    kept = torch.full_like(whole, 77) if p.active else None
    return whole, table, kept, whole.new_full((p.pruned,), 77) if p.rest else None


def _split_reference(problem: Split, operands: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    whole, table, *_ = operands
    assert whole is not None and table is not None
    mask = _unpacked(table, problem.numel)
    return whole.masked_fill(~mask, 0), whole[~mask]


def _mask(numel: int, pruned: int, device: torch.device, seed: int) -> Tensor:
    order = torch.rand(numel, generator=torch.Generator(device).manual_seed(seed), device=device).argsort()
    return torch.ones(numel, dtype=torch.bool, device=device).index_fill_(0, order[:pruned], False)


def _numbers(size: int, dtype: torch.dtype, device: torch.device, seed: int) -> Tensor:
    random = torch.Generator(device).manual_seed(seed)
    return torch.randint(0, 77, (size,), generator=random, device=device, dtype=dtype)


def _unpacked(table: Tensor, numel: int) -> Tensor:
    bits = table[0, :-1, None].long() >> torch.arange(WORD, device=table.device)
    return (bits & 1).bool().view(-1)[:numel]


PACK_MASK = Operation(
    "pack_mask", _pack_signature, _pack_representative, _pack_operands, (1,), _pack_reference, lambda _: 0.0
)
MERGE = Operation(
    "merge_pruned", _signature, _merge_representative, _merge_operands, (3,), _merge_reference, lambda _: 0.0
)
SPLIT = Operation(
    "split_pruned", _signature, _split_representative, _split_operands, (2, 3), _split_reference, lambda _: 0.0
)
