"""What makes a tuning result valid for another call: exact where kernels differ, bucketed where they do not.

Two calls with one signature share their tuned configuration. Sizes fall into buckets of powers of two, density into
steps of a factor of two, and rows by their mean length and how uneven they are, so that a model whose batch changes
does not tune for ever. A signature names the device and the compiler; each candidate carries the hash of its own source
(``template.Template.version``), so that a changed kernel is timed again and the others are not.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib.util import find_spec
from json import dumps

import sympy
import torch

from sparsecomp.errors import SignatureError
from sparsecomp.reference.patterns import evenness

Size = int | sympy.Expr


@dataclass(frozen=True)
class Device:
    """What a measurement depends on beside the problem.

    Attributes:
        name: the GPU's name, or ``"interpreter"``.
        capability: compute capability, such as ``"9.0"``; ``""`` without a GPU.
        triton: Triton's version.
    """

    name: str
    capability: str
    triton: str

    @property
    def is_hopper(self) -> bool:
        """Whether Hopper's warpgroup instructions (compute capability 9.x only) exist."""
        return self.capability.startswith("9.")


@cache
def device_of(device: torch.device) -> Device:
    """The identity of ``device``; anything but a CUDA device is Triton's interpreter."""
    import triton

    if device.type != "cuda":
        return Device("interpreter", "", triton.__version__)
    major, minor = torch.cuda.get_device_capability(device)
    return Device(torch.cuda.get_device_name(device), f"{major}.{minor}", triton.__version__)


@cache
def has_triton() -> bool:
    """Whether Triton is installed; it is not loaded."""
    return find_spec("triton") is not None


NO_TRITON = "Triton is not installed: pip install 'sparsecomp[gpu]'"


def devices_here() -> frozenset[Device]:
    """Whose results count on this machine: of its GPUs, else of Triton's interpreter; of none without Triton."""
    if not has_triton():
        return frozenset()
    places = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return frozenset(map(device_of, places or [torch.device("cpu")]))


@dataclass(frozen=True)
class Rows:
    """How the nonzeros of a sparse operand lie in its rows: mean count a row, and deviation over mean."""

    mean: float
    variation: float


@dataclass(frozen=True)
class KernelSignature:
    """One kind of kernel call.

    Attributes:
        op: name of the operation, such as ``"binary_conv"``.
        device: where it runs.
        dtypes: of the operands and results, in the operation's order.
        accumulator: dtype that sums are kept in.
        formats: sparse formats of the operands with their block or N:M, such as ``"bsr16x16"``; empty if all are dense.
        index: dtype of the indices of sparse operands; ``""`` without any.
        layouts: memory layouts of the operands that may have several.
        epilogue: what is fused behind the product, such as ``"bias+relu"``; ``""`` for nothing.
        sizes: sizes that vary from call to call, by name; an expression where Dynamo left it symbolic. Bucketed.
        parameters: facts a kernel is specialised on, by name. Exact.
        density: share of nonzeros, None if unknown. Bucketed.
        rows: distribution over rows, None if unknown. Bucketed.
    """

    op: str
    device: Device
    dtypes: tuple[str, ...] = ()
    accumulator: str = ""
    formats: tuple[str, ...] = ()
    index: str = ""
    layouts: tuple[str, ...] = ()
    epilogue: str = ""
    sizes: tuple[tuple[str, Size], ...] = ()
    parameters: tuple[tuple[str, int | str], ...] = ()
    density: float | None = None
    rows: Rows | None = None

    def bind(self, values: Mapping[str, int]) -> "KernelSignature":
        """This signature with the symbols of its sizes replaced by numbers, by the symbols' names."""
        sizes = tuple((name, _bound(size, values)) for name, size in self.sizes)
        return replace(self, sizes=sizes)

    @cached_property
    def fields(self) -> Mapping[str, str]:
        """Every field as text, sizes and shares as their buckets; two equal mappings are one signature.

        Raises:
            SignatureError: a size is still symbolic.
        """
        found = {
            "op": self.op, "dtypes": ",".join(self.dtypes), "accumulator": self.accumulator,
            "formats": ",".join(self.formats), "index": self.index, "layouts": ",".join(self.layouts),
            "epilogue": self.epilogue, "density": density_bucket(self.density), "rows": row_bucket(self.rows),
            "gpu": self.device.name, "capability": self.device.capability, "triton": self.device.triton,
        }  # fmt: skip
        found |= {f"size.{name}": str(size_bucket(size)) for name, size in self.sizes}
        found |= {f"parameter.{name}": str(value) for name, value in self.parameters}
        return dict(sorted(found.items()))

    @cached_property
    def key(self) -> str:
        """:attr:`fields` as canonical JSON."""
        return dumps(self.fields, separators=(",", ":"))


def size_bucket(size: Size) -> int:
    """The smallest power of two that is no smaller than ``size``; 0 for 0.

    Raises:
        SignatureError: ``size`` is symbolic or negative.
    """
    if isinstance(size, sympy.Expr) and not size.is_Integer:
        raise SignatureError(f"size {size} is symbolic: bind() its symbols before asking for a kernel")
    if size < 0:
        raise SignatureError(f"size {size} is negative: give the operand's real size")
    return 1 << (int(size) - 1).bit_length() if size > 0 else 0


def density_bucket(density: float | None) -> str:
    """The power of two at or above ``density``, down to 2^-16; ``"unknown"`` for None and ``"0"`` for 0.

    Raises:
        SignatureError: not a number in [0, 1].
    """
    if density is None:
        return "unknown"
    if not 0 <= density <= 1:
        raise SignatureError(f"density {density} is not in [0, 1]: give nonzeros over elements")
    if density == 0:
        return "0"
    return f"2^{max(math.ceil(math.log2(density)), -16)}"


def row_bucket(rows: Rows | None) -> str:
    """Mean nonzeros a row as a power of two, and their :func:`evenness`."""
    if rows is None:
        return "unknown"
    return f"{size_bucket(math.ceil(rows.mean))} {evenness(rows.variation)}"


def _bound(size: Size, values: Mapping[str, int]) -> Size:
    if not isinstance(size, sympy.Expr):
        return size
    known = [(symbol, values[str(symbol)]) for symbol in size.free_symbols if str(symbol) in values]
    bound = size.subs(known, simultaneous=True)
    return int(bound) if bound.is_Integer else bound
