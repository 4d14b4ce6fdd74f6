"""The light first passes as operations: weights to signed bytes, spikes to one byte an element."""

from typing import NamedTuple

import torch
from torch import Tensor

from sparsecomp.lowering.cache.signature import Device, KernelSignature
from sparsecomp.lowering.launch import dispatch
from sparsecomp.lowering.launch.strided import dtype_name, random_tensor, strided
from sparsecomp.lowering.spiking.convolution import Maps, Selection, as_image, planar
from sparsecomp.lowering.tuning.template import Operation
from sparsecomp.reference.digits import SPREAD, padded_channels, split_weight
from sparsecomp.reference.geometry import laid_out, lies_channels_last


class PackWeight(NamedTuple):
    """A weight, to be split in `digits` bytes.

    `spread`: as in `sparsecomp.reference.digits.channel_scale`.
    """

    weight: Maps
    digits: int
    spread: float = SPREAD

    @classmethod
    def of(cls, weight: Tensor, digits: int, spread: float = SPREAD) -> "PackWeight":
        """The split of a weight (K, C, …)."""
        return cls(Maps.of(planar(weight)), digits, spread)

    @property
    def cp(self) -> int:
        """Input channels as stored."""
        return padded_channels(self.weight.c)

    @property
    def planes(self) -> tuple[int, int, int]:
        """Shape of the bytes: planes, output channels, and the bytes of one channel in one plane."""
        return self.digits, self.weight.outer, self.weight.pixels * self.cp


class Cast(NamedTuple):
    """`numel` numbers of dense memory to counts of one byte, all or only if a count exceeds `limit`.

    Attributes:
        inverse: the whole numbers are the elements times this.
        binary: they are 1 where the elements are not zero.
    """

    numel: int
    limit: int
    counted: bool
    dtype: str
    inverse: float = 1.0
    binary: bool = False


class CastStrided(NamedTuple):
    """Numbers of any strides to counts of one byte in channels-last memory; see `Cast`."""

    x: Maps
    inverse: float = 1.0
    binary: bool = False


def pack_weight(weight: Tensor, digits: int, spread: float = SPREAD) -> tuple[Tensor, Tensor]:
    """`split_weight` on CUDA, in one launch.

    Every call packs anew: nothing shows that a weight was written to through `.data`, so nothing can be kept.
    """
    problem = PackWeight.of(weight, digits, spread)
    planes = torch.empty(problem.planes, dtype=torch.int8, device=weight.device)
    scale = torch.empty(weight.shape[:1], dtype=torch.float32, device=weight.device)
    if scale.numel():
        dispatch.launch(PACK_WEIGHT, problem, planar(weight), planes, scale)
    return planes, scale


def to_bytes(
    x: Tensor, select: Selection | None = None, scale: float = 1.0, binary: bool = False
) -> Tensor:
    """The prescan: `x` (N, C, …) as counts of one byte, channels last; see `sparsecomp.ops.spike_conv`.

    `select`: the result is only needed, and in dense memory only made, where it says so.
    """
    if x.dtype is torch.int8:
        return laid_out(x, channels_last=True)
    n, c, *size = x.shape
    out = torch.empty((n, *size, c), dtype=torch.int8, device=x.device)
    view = out.movedim(-1, 1)
    if x.numel() == 0:
        return view
    inverse = 1.0 / scale if not binary else 1.0
    if lies_channels_last(x):
        count, limit = (None, 0) if select is None else (select.count, select.limit)
        dispatch.launch(CAST, Cast(x.numel(), limit, count is not None, dtype_name(x), inverse, binary), x, out, count)
    else:
        x = planar(x)
        dispatch.launch(CAST_STRIDED, CastStrided(Maps.of(x), inverse, binary), x, out)
    return view


def _pack_signature(problem: PackWeight, device: Device) -> KernelSignature:
    weight = problem.weight
    layout = "channels last" if weight.strides[1] == 1 else "channels first"
    return KernelSignature(
        "pack_weight", device, dtypes=(weight.dtype, "int8"), layouts=(layout,),
        sizes=(("k", weight.outer), ("c", weight.c)), parameters=(("taps", weight.pixels), ("digits", problem.digits)),
    )  # fmt: skip


def _pack_representative(signature: KernelSignature) -> PackWeight:
    sizes, given = dict(signature.sizes), dict(signature.parameters)
    k, c, taps = int(sizes["k"]), int(sizes["c"]), int(given["taps"])
    strides = (taps * c, 1, c) if signature.layouts[0] == "channels last" else (taps * c, taps, 1)
    return PackWeight(Maps(k, c, (taps,), strides, signature.dtypes[0]), int(given["digits"]))


def _pack_operands(problem: PackWeight, device: torch.device, seed: int) -> tuple[Tensor | None, ...]:
    weight, random = problem.weight, torch.Generator(device).manual_seed(seed)
    w = random_tensor((weight.outer, weight.c, *weight.size), weight.strides, weight.dtype, random)
    planes = torch.full(problem.planes, 77, dtype=torch.int8, device=device)
    return w, planes, torch.full((weight.outer,), float("nan"), device=device)


def _pack_reference(problem: PackWeight, operands: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    assert operands[0] is not None
    return split_weight(operands[0], problem.digits, problem.spread)


def _cast_signature(problem: Cast, device: Device) -> KernelSignature:
    counted = (("counted", int(problem.counted)),)
    return KernelSignature(
        "cast", device, dtypes=(problem.dtype, "int8"), sizes=(("numel", problem.numel),), parameters=counted
    )


def _cast_representative(signature: KernelSignature) -> Cast:
    counted = bool(dict(signature.parameters)["counted"])
    return Cast(int(dict(signature.sizes)["numel"]), 0, counted, signature.dtypes[0])


def _cast_operands(problem: Cast, device: torch.device, seed: int) -> tuple[Tensor | None, ...]:
    x = _whole_numbers(problem.numel, problem.dtype, device, seed)
    count = torch.full((1,), problem.limit + 1, dtype=torch.int32, device=device) if problem.counted else None
    return x, torch.full((problem.numel,), 77, dtype=torch.int8, device=device), count


def _strided_signature(problem: CastStrided, device: Device) -> KernelSignature:
    x = problem.x
    sizes = tuple(zip("nchw", (x.outer, x.c, *as_image(x.size, 1)), strict=True))
    innermost = min(zip(x.strides[1:], "c" + "dhw"[-len(x.size) :], strict=True))[1]
    return KernelSignature("cast_strided", device, dtypes=(x.dtype, "int8"), layouts=(innermost,), sizes=sizes)


def _strided_representative(signature: KernelSignature) -> CastStrided:
    sizes = dict(signature.sizes)
    n, c, h, w = (int(sizes[name]) for name in "nchw")
    order = {"w": (c * h * w, h * w, w, 1), "h": (c * h * w, h * w, 1, h), "c": (c * h * w, 1, w * c, c)}
    return CastStrided(Maps(n, c, (h, w), order[signature.layouts[0]], signature.dtypes[0]))


def _strided_operands(problem: CastStrided, device: torch.device, seed: int) -> tuple[Tensor | None, ...]:
    p = problem.x
    x = strided((p.outer, p.c, *p.size), p.strides, lambda size: _whole_numbers(size, p.dtype, device, seed))
    return x, torch.full((p.outer, *p.size, p.c), 77, dtype=torch.int8, device=device)


def _cast_reference(problem: Cast, operands: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    assert operands[0] is not None
    return (operands[0].to(torch.int8),)


def _strided_reference(problem: CastStrided, operands: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    assert operands[0] is not None
    return (operands[0].movedim(1, -1).to(torch.int8),)


def _whole_numbers(size: int, dtype: str, device: torch.device, seed: int) -> Tensor:
    random = torch.Generator(device).manual_seed(seed)
    return torch.randint(-127, 77, (size,), generator=random, device=device).to(getattr(torch, dtype))


PACK_WEIGHT = Operation(
    "pack_weight", _pack_signature, _pack_representative, _pack_operands, (1, 2), _pack_reference, lambda _: 0.0
)
CAST = Operation(
    "cast", _cast_signature, _cast_representative, _cast_operands, (1,), _cast_reference, lambda _: 0.0
)
CAST_STRIDED = Operation(
    "cast_strided", _strided_signature, _strided_representative, _strided_operands, (1,), _strided_reference,
    lambda _: 0.0,
)  # fmt: skip
