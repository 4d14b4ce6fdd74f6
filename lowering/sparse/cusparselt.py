"""cuSPARSELt, NVIDIA's library for 2:4 sparse tensor cores, called through ctypes.

torch has an operator for it that builds handle, descriptors and plan anew in each call, 0.45 to 1 ms on the host. Here
they are objects that are kept. Names, numbers and signatures are those of the library's public header cusparseLt.h,
which did not change between 0.7.1 and 0.10.0 in what is used here; meanings are of its documentation
(https://docs.nvidia.com/cuda/cusparselt).
"""

import ctypes
import importlib.util
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsecomp.errors import LibraryError

SONAME = "libcusparseLt.so.0"
_OLDEST, _BEFORE = (0, 7), (1, 0)
"""Versions this was written for: the first, and the first that is none."""
_STATUSES = (
    "SUCCESS", "NOT_INITIALIZED", "ALLOC_FAILED", "INVALID_VALUE", "ARCH_MISMATCH", "MAPPING_ERROR",
    "EXECUTION_FAILED", "INTERNAL_ERROR", "MATRIX_TYPE_NOT_SUPPORTED", "ZERO_PIVOT", "NOT_SUPPORTED",
    "INSUFFICIENT_RESOURCES",
)  # fmt: skip
_REBINDING = ((0, 8),)
"""Versions whose plans were seen to read the bias's address at each product (0.8.0, H100); no document promises it."""
_OPAQUE_BYTES, _OPAQUE_ALIGNMENT = 16384, 64
"""Room for an opaque structure: they had 11024 bytes at most, 1024 or 512 in the versions above."""
_ALIGNMENT = 16
"""Of every matrix, in bytes."""
SOME_BIAS = _ALIGNMENT
"""Stands for an address that is bound later: a plan made with none has no bias for good."""

_TYPES = {"float16": 2, "bfloat16": 14}  # cudaDataType
_COLUMN_MAJOR, _ROW_MAJOR = 1, 2
_PLAIN = 0  # an operand as it is, not transposed
_SUMS_IN_FLOAT32 = 2
_HALF_OF_EACH_FOUR = 0
_DEFAULT_SELECTION = 0
_RELU, _BIAS_POINTER = 0, 8
_ALGORITHM, _ALGORITHMS, _SPLIT_K, _SPLIT_K_MODE = 0, 1, 3, 4

_P, _I, _L, _U, _S = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_uint32, ctypes.c_size_t
SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cusparseLtGetProperty": (_I, _P),
    "cusparseLtInit": (_P,),
    "cusparseLtDenseDescriptorInit": (_P, _P, _L, _L, _L, _U, _I, _I),
    "cusparseLtStructuredDescriptorInit": (_P, _P, _L, _L, _L, _U, _I, _I, _I),
    "cusparseLtMatDescriptorDestroy": (_P,),
    "cusparseLtMatmulDescriptorInit": (_P, _P, _I, _I, _P, _P, _P, _P, _I),
    "cusparseLtMatmulDescSetAttribute": (_P, _P, _I, _P, _S),
    "cusparseLtMatmulAlgSelectionInit": (_P, _P, _P, _I),
    "cusparseLtMatmulAlgSetAttribute": (_P, _P, _I, _P, _S),
    "cusparseLtMatmulAlgGetAttribute": (_P, _P, _I, _P, _S),
    "cusparseLtMatmulPlanInit": (_P, _P, _P, _P),
    "cusparseLtMatmulPlanDestroy": (_P,),
    "cusparseLtMatmulGetWorkspace": (_P, _P, _P),
    "cusparseLtMatmul": (_P, _P, _P, _P, _P, _P, _P, _P, _P, _P, ctypes.c_int32),
    "cusparseLtSpMMACompressedSize2": (_P, _P, _P, _P),
    "cusparseLtSpMMACompress2": (_P, _P, _I, _I, _P, _P, _P, _P),
}
DESTROY_SELECTION = "cusparseLtMatmulAlgSelectionDestroy"
"""Of 0.8 and later: earlier selections hold nothing to be freed."""


class Library:
    """The functions used here, with a status that is not success raised.

    Args:
        functions: what `ctypes` loaded, or what stands in for it.

    Raises:
        LibraryError: a function is missing, or the version is not one of those that this was written for.
    """

    def __init__(self, functions: Any) -> None:
        for name, arguments in SIGNATURES.items():
            function = getattr(functions, name, None)
            if function is None:
                raise LibraryError(f"{SONAME} has no function {name}: install cuSPARSELt 0.7 or later")
            function.argtypes, function.restype = arguments, ctypes.c_int
        self.functions = functions
        self.destroy_selection = getattr(functions, DESTROY_SELECTION, None)
        if self.destroy_selection is not None:
            self.destroy_selection.argtypes, self.destroy_selection.restype = (_P,), ctypes.c_int
        self.matmul: Callable[..., int] = functions.cusparseLtMatmul
        self.version = tuple(self._property(which) for which in range(3))
        if not _OLDEST <= self.version[:2] < _BEFORE:
            found = ".".join(map(str, self.version))
            raise LibraryError(f"{SONAME} is version {found}: 0.7 or later of 0.x is needed")

    @property
    def rebinds(self) -> bool:
        """Whether a plan takes another bias after it was made."""
        return self.version[:2] in _REBINDING

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function.

        Raises:
            LibraryError: with the function's name and its status.
        """
        check_status(name, getattr(self.functions, name)(*arguments))

    def _property(self, which: int) -> int:
        value = ctypes.c_int()
        self.call("cusparseLtGetProperty", which, ctypes.byref(value))
        return value.value


def check_status(name: str, status: int) -> None:
    """Raise LibraryError if a function of the library returned anything but success."""
    if status:
        known = f"CUSPARSE_STATUS_{_STATUSES[status]}" if 0 < status < len(_STATUSES) else "a status that is not known"
        raise LibraryError(f"{name} returned {known} ({status})")


@cache
def loaded_library() -> Library:
    """The library: the one that torch has loaded already, else where the loader or a wheel beside torch has one.

    Raises:
        LibraryError: there is none, or one that cannot be used; says where was looked.
    """
    reasons = []
    for place in (SONAME, *map(str, _wheels())):
        try:
            # PyDLL keeps the interpreter's lock: a launch takes a few microseconds, less than taking the lock again can
            return Library(ctypes.PyDLL(place))
        except (OSError, LibraryError) as error:
            reasons.append(f"{place}: {error}")
    raise LibraryError(
        f"cuSPARSELt was not found ({'; '.join(reasons)}): install nvidia-cusparselt-cu13 (or -cu12), as torch's CUDA "
        "wheels do"
    )


def missing() -> str | None:
    """Why there is no library, None if there is one."""
    try:
        loaded_library()
    except LibraryError as error:
        return str(error)
    return None


def _wheels() -> Iterator[Path]:
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations if spec else None) or ():
        for package in ("cusparselt", "cu13", "cu12"):
            path = Path(folder) / package / "lib" / SONAME
            if path.exists():
                yield path


class Matmul(NamedTuple):
    """activation(scale · W @ dense + residual + bias), W (m, k) in 2:4 and dense (k, n).

    Attributes:
        m, k, n: multiples of 16, 16 and 8.
        dtype: "float16" or "bfloat16", of everything; sums are float32.
        dense_columns: dense's columns lie contiguous, otherwise its rows.
        dense_stride: elements from one column (or row) of dense to the next, a multiple of 8.
        out_columns, out_stride: of the result, and of the residual.
        bias: whether there is one, (m,).
        relu: the activation, or none.
    """

    m: int
    k: int
    n: int
    dtype: str
    dense_columns: bool
    dense_stride: int
    out_columns: bool
    out_stride: int
    bias: bool
    relu: bool


class Algorithm(NamedTuple):
    """How the library multiplies.

    Attributes:
        number: 0 to `algorithms()` - 1.
        split_k: parts that k is summed in.
        split_k_mode: 0 for the library's own, else as cusparseLtSplitKMode_t has it.
    """

    number: int
    split_k: int = 1
    split_k_mode: int = 0


class Opaque:
    """Zeroed memory for one of the library's structures, which its functions take as an argument."""

    def __init__(self) -> None:
        memory = (ctypes.c_char * (_OPAQUE_BYTES + _OPAQUE_ALIGNMENT))()
        start = -ctypes.addressof(memory) % _OPAQUE_ALIGNMENT
        self._as_parameter_ = (ctypes.c_char * _OPAQUE_BYTES).from_buffer(memory, start)

    def destroyed_by(self, function: Callable[[Any], int]) -> None:
        """Have it destroyed with this object; not at the interpreter's end, when the driver may be gone."""
        weakref.finalize(self, function, self._as_parameter_).atexit = False


@dataclass(frozen=True, eq=False)
class Handle:
    """The library on one device."""

    library: Library
    memory: Opaque

    def call(self, name: str, *arguments: Any) -> None:
        """A function that takes the handle first; see `Library.call`."""
        self.library.call(name, self.memory, *arguments)


@cache
def handle_of(device: torch.device) -> Handle:
    """The handle of a CUDA device with its index, made once.

    Raises:
        LibraryError: there is no library, or it does not take the device.
    """
    with torch.cuda.device(device):
        return make_handle(loaded_library())


def current_handle(device: torch.device | None = None) -> Handle:
    """The handle of a CUDA device, by default the current one; see `handle_of`."""
    loaded_library()
    if not torch.cuda.is_available():
        raise LibraryError("cuSPARSELt was found, but no CUDA device")
    return handle_of(torch.device("cuda", torch.cuda.current_device()) if device is None else device)


def make_handle(library: Library) -> Handle:
    """A handle for the current device."""
    memory = Opaque()
    library.call("cusparseLtInit", memory)
    return Handle(library, memory)


class MatmulPlan:
    """A product made ready, which may take a quarter of a second: with its device current, callable with addresses.

    Args:
        bias: address of the bias, if the product has one.

    Attributes:
        workspace_bytes: memory that a call needs.

    Raises:
        LibraryError: the library does not take the product, or not with this algorithm.
    """

    def __init__(
        self, handle: Handle, product: Matmul, algorithm: Algorithm, bias: int | None = None, scale: float = 1.0
    ) -> None:
        self._handle, self._bias = handle, bias
        self._parts = _Parts(handle, product, bias)
        self._parts.select(algorithm)
        self._memory = Opaque()
        handle.call("cusparseLtMatmulPlanInit", self._memory, self._parts.matmul, self._parts.selection)
        self._memory.destroyed_by(handle.library.functions.cusparseLtMatmulPlanDestroy)
        size = ctypes.c_size_t()
        handle.call("cusparseLtMatmulGetWorkspace", self._memory, ctypes.byref(size))
        self.workspace_bytes = size.value
        self._scale, self._one, self._zero = ctypes.c_float(scale), ctypes.c_float(1.0), ctypes.c_float(0.0)
        self._lock = threading.Lock()

    def __call__(
        self, compressed: int, dense: int, bias: int | None, residual: int | None, out: int, workspace: int | None,
        stream: int,
    ) -> None:  # fmt: skip
        """Queue the product on a stream; everything is an address, of memory that the stream may use.

        Args:
            bias: where it is not the plan's, the library must be one that `rebinds`.

        Raises:
            LibraryError: with the library's status.
        """
        beta = self._zero if residual is None else self._one
        library = self._handle.library
        with self._lock:
            if bias != self._bias:
                if not library.rebinds:
                    raise LibraryError(f"a plan of cuSPARSELt {library.version} keeps its bias: make one for each")
                self._parts.bind(bias)
                self._bias = bias
            status = library.matmul(
                self._handle.memory, self._memory, ctypes.byref(self._scale), compressed, dense, ctypes.byref(beta),
                out if residual is None else residual, out, workspace, ctypes.byref(ctypes.c_void_p(stream)), 1,
            )  # fmt: skip
        if status:
            check_status("cusparseLtMatmul", status)


class _Parts:
    """The structures that a plan is made of, which live as long as it."""

    def __init__(self, handle: Handle, product: Matmul, bias: int | None) -> None:
        self._handle, p = handle, product
        self._weight = structured(handle, p.m, p.k, p.dtype)
        self._dense = _matrix(handle, p.k, p.n, p.dtype, p.dense_columns, p.dense_stride)
        self._out = _matrix(handle, p.m, p.n, p.dtype, p.out_columns, p.out_stride)
        self.matmul, self.selection = Opaque(), Opaque()
        handle.call(
            "cusparseLtMatmulDescriptorInit", self.matmul, _PLAIN, _PLAIN, self._weight, self._dense, self._out,
            self._out, _SUMS_IN_FLOAT32,
        )  # fmt: skip
        if p.relu:
            self._describe(_RELU, ctypes.c_int(1))
        if p.bias:
            self.bind(bias)
        handle.call("cusparseLtMatmulAlgSelectionInit", self.selection, self.matmul, _DEFAULT_SELECTION)
        if handle.library.destroy_selection is not None:
            self.selection.destroyed_by(handle.library.destroy_selection)

    def _describe(self, attribute: int, value: Any) -> None:
        size = ctypes.sizeof(value)
        self._handle.call("cusparseLtMatmulDescSetAttribute", self.matmul, attribute, ctypes.byref(value), size)

    def bind(self, bias: int | None) -> None:
        """Say where the bias is."""
        self._describe(_BIAS_POINTER, ctypes.c_void_p(bias))

    def select(self, algorithm: Algorithm) -> None:
        """Choose an algorithm; what is left at its default is not set."""
        self._set(_ALGORITHM, algorithm.number)
        if algorithm.split_k != 1:
            self._set(_SPLIT_K, algorithm.split_k)
        if algorithm.split_k_mode:
            self._set(_SPLIT_K_MODE, algorithm.split_k_mode)

    def algorithms(self) -> int:
        """How many there are to choose from."""
        value = ctypes.c_int()
        self._handle.call(
            "cusparseLtMatmulAlgGetAttribute", self.selection, _ALGORITHMS, ctypes.byref(value), ctypes.sizeof(value)
        )
        return value.value

    def _set(self, attribute: int, value: int) -> None:
        given = ctypes.c_int(value)
        size = ctypes.sizeof(given)
        self._handle.call("cusparseLtMatmulAlgSetAttribute", self.selection, attribute, ctypes.byref(given), size)


def algorithms(handle: Handle, product: Matmul) -> int:
    """How many algorithms the library has for a product.

    Raises:
        LibraryError: it does not take the product.
    """
    return _Parts(handle, product, bias=SOME_BIAS).algorithms()


def compress(handle: Handle, weight: Tensor, into: Tensor | None = None) -> Tensor:
    """A dense weight (m, k), contiguous, with two of each four numbers of a row zero, as the library wants it.

    Queued on the current stream; what the weight holds is not checked: of more than two, some are lost.

    Args:
        into: an earlier result for a weight of this shape, to be overwritten.

    Returns:
        uint8, opaque; any plan of this m, k and dtype takes it.

    Raises:
        LibraryError: the library does not take the shape or dtype.
    """
    m, k = weight.shape
    described = structured(handle, m, k, str(weight.dtype)[6:])
    sizes = [ctypes.c_size_t(), ctypes.c_size_t()]
    handle.call("cusparseLtSpMMACompressedSize2", described, *map(ctypes.byref, sizes))
    size, scratch_size = (size.value for size in sizes)
    out = torch.empty(size, dtype=torch.uint8, device=weight.device) if into is None else into
    scratch = torch.empty(scratch_size, dtype=torch.uint8, device=weight.device)
    handle.call(
        "cusparseLtSpMMACompress2", described, 1, _PLAIN, weight.data_ptr(), out.data_ptr(),
        scratch.data_ptr() if scratch_size else None, stream_of(weight),
    )  # fmt: skip
    return out


def stream_of(tensor: Tensor) -> int:
    """The current stream of a tensor's device, as the library takes it; 0 off CUDA."""
    return torch.cuda.current_stream(tensor.device).cuda_stream if tensor.is_cuda else 0


def structured(handle: Handle, m: int, k: int, dtype: str) -> Opaque:
    """The descriptor of a weight (m, k) in 2:4, rows contiguous."""
    memory = Opaque()
    handle.call(
        "cusparseLtStructuredDescriptorInit", memory, m, k, k, _ALIGNMENT, _type(dtype), _ROW_MAJOR, _HALF_OF_EACH_FOUR
    )
    memory.destroyed_by(handle.library.functions.cusparseLtMatDescriptorDestroy)
    return memory


def _matrix(handle: Handle, rows: int, cols: int, dtype: str, columns: bool, stride: int) -> Opaque:
    memory = Opaque()
    order = _COLUMN_MAJOR if columns else _ROW_MAJOR
    handle.call("cusparseLtDenseDescriptorInit", memory, rows, cols, stride, _ALIGNMENT, _type(dtype), order)
    memory.destroyed_by(handle.library.functions.cusparseLtMatDescriptorDestroy)
    return memory


def _type(dtype: str) -> int:
    if dtype not in _TYPES:
        raise LibraryError(f"no 2:4 product of {dtype} is bound: float16 or bfloat16 is needed")
    return _TYPES[dtype]
