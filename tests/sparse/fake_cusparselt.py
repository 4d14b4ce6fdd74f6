"""A library with cuSPARSELt's functions that works on the host's memory, called through the C ABI as the real one is.

It records structures by address, refuses what the documentation says the real one refuses, and computes in float32.
Its compressed form is its own: two values of each group of four, and then where they were.
"""

import ctypes
import traceback

import numpy as np
import torch

from sparsecomp.lowering.sparse import cusparselt

INVALID, INTERNAL_ERROR, NOT_SUPPORTED = 3, 7, 10
_DTYPES = {2: torch.float16, 14: torch.bfloat16}


def tensor_at(address, count, dtype):
    """`count` elements of memory."""
    size = count * dtype.itemsize
    return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=dtype)


def written(address, kind, value):
    kind.from_address(address).value = value
    return 0


class FakeLibrary:
    """Attributes named as the library's functions; `calls` counts them by name.

    Args:
        version: what it says it is.
        algorithms: how many it has; odd ones take no `split_k`.
        drop: functions it does not have.
    """

    def __init__(self, version=(0, 8, 0), algorithms=4, drop=()):
        self._version, self._algorithms = version, algorithms
        self.structures, self.calls, self.products, self.faults = {}, {}, [], []
        signatures = {**cusparselt.SIGNATURES, cusparselt.DESTROY_SELECTION: (ctypes.c_void_p,)}
        for name, arguments in signatures.items():
            if name not in drop:
                setattr(self, name, ctypes.CFUNCTYPE(ctypes.c_int, *arguments)(self._recorded(name)))

    def _recorded(self, name):
        inner = getattr(self, "_" + name.removeprefix("cusparseLt"))

        def call(*arguments):
            self.calls[name] = self.calls.get(name, 0) + 1
            try:
                return inner(*arguments) or 0
            except Exception:  # ctypes would only print it
                self.faults.append(traceback.format_exc())
                return INTERNAL_ERROR

        return call

    def _GetProperty(self, which, value):
        return written(value, ctypes.c_int, self._version[which])

    def _Init(self, handle):
        assert handle % 16 == 0
        self.structures[handle] = "handle"

    def _DenseDescriptorInit(self, handle, memory, rows, cols, ld, alignment, kind, order):
        least = rows if order == 1 else cols
        if self.structures.get(handle) != "handle" or rows % 8 or cols % 8 or ld % 8 or ld < least or alignment != 16:
            return INVALID
        self.structures[memory] = (rows, cols, ld, kind, order)

    def _StructuredDescriptorInit(self, handle, memory, rows, cols, ld, alignment, kind, order, sparsity):
        if rows % 16 or cols % 16 or (ld, order, sparsity) != (cols, 2, 0):
            return INVALID
        self.structures[memory] = (rows, cols, ld, kind, order)

    def _MatDescriptorDestroy(self, memory):
        del self.structures[memory]

    def _MatmulDescriptorInit(self, handle, memory, op_a, op_b, a, b, c, d, compute):
        if (op_a, op_b, compute) != (0, 0, 2) or c != d:
            return NOT_SUPPORTED
        self.structures[memory] = {"a": self.structures[a], "b": self.structures[b], "d": self.structures[d]}

    def _MatmulDescSetAttribute(self, handle, memory, attribute, data, size):
        kind = {0: ctypes.c_int, 8: ctypes.c_void_p}[attribute]
        assert size == ctypes.sizeof(kind)
        self.structures[memory][{0: "relu", 8: "bias"}[attribute]] = kind.from_address(data).value

    def _MatmulAlgSelectionInit(self, handle, memory, matmul, default):
        self.structures[memory] = {0: 0, 3: 1, 4: 0}

    def _MatmulAlgSelectionDestroy(self, memory):
        del self.structures[memory]

    def _MatmulAlgSetAttribute(self, handle, memory, attribute, data, size):
        self.structures[memory][attribute] = ctypes.c_int.from_address(data).value

    def _MatmulAlgGetAttribute(self, handle, memory, attribute, data, size):
        return written(data, ctypes.c_int, {1: self._algorithms}[attribute])

    def _MatmulPlanInit(self, handle, memory, matmul, selection):
        chosen = self.structures[selection]
        if chosen[0] >= self._algorithms or chosen[0] % 2 and chosen[3] != 1:
            return NOT_SUPPORTED
        described = self.structures[matmul]
        if described.get("bias") is None:
            described = {**described, "bias": None}  # one that is bound later counts for nothing
        # 0.8 reads it at each product; that others do is not known
        self.structures[memory] = (described if self._version[1] == 8 else dict(described), dict(chosen))

    def _MatmulPlanDestroy(self, memory):
        del self.structures[memory]

    def _MatmulGetWorkspace(self, handle, plan, size):
        return written(size, ctypes.c_size_t, 64 if self.structures[plan][1][3] > 1 else 0)

    def _SpMMACompressedSize2(self, handle, weight, size, scratch):
        rows, cols, *_ = self.structures[weight]
        written(scratch, ctypes.c_size_t, 128)
        return written(size, ctypes.c_size_t, rows * cols * 3)

    def _SpMMACompress2(self, handle, weight, is_sparse_a, op, dense, out, scratch, stream):
        assert (is_sparse_a, op) == (1, 0) and scratch
        rows, cols, _, kind, _ = self.structures[weight]
        full = tensor_at(dense, rows * cols, _DTYPES[kind]).view(rows, cols // 4, 4)
        # NaN is not zero; the largest two by place, as hardware keeps no third
        places = torch.argsort((full != 0).byte(), dim=-1, descending=True, stable=True)[..., :2].sort(-1).values
        kept = full.gather(-1, places)
        count = rows * cols // 2
        tensor_at(out, count, full.dtype).copy_(kept.flatten())
        tensor_at(out + rows * cols, count, torch.uint8).copy_(places.flatten())

    def _Matmul(self, handle, plan, alpha, a, b, beta, c, d, workspace, streams, count):
        product, chosen = self.structures[plan]
        assert count == 1 and (chosen[3] == 1 or workspace)
        rows, cols, _, kind, _ = product["a"]
        values = tensor_at(a, rows * cols // 2, _DTYPES[kind]).view(rows, -1, 2).float()
        places = tensor_at(a + rows * cols, rows * cols // 2, torch.uint8).view(rows, -1, 2).long()
        out, dense = matrix_at(d, product["d"]), matrix_at(b, product["b"]).float()
        place = (places + 4 * torch.arange(cols // 4)[:, None]).view(rows, -1)
        # the two that it keeps of each four are multiplied, be they zero
        sums = torch.stack([one @ dense[at] for one, at in zip(values.view(rows, -1), place, strict=True)])
        result = ctypes.c_float.from_address(alpha).value * sums
        if ctypes.c_float.from_address(beta).value:
            result += matrix_at(c, product["d"]).float()
        if product.get("bias"):
            result += tensor_at(product["bias"], rows, _DTYPES[kind])[:, None].float()
        out.copy_(result.relu() if product.get("relu") else result)
        self.products.append((chosen[0], chosen[3], chosen[4]))


def matrix_at(address, described):
    """The matrix of a dense descriptor; elements between its lines are not touched."""
    rows, cols, ld, kind, order = described
    lines, length = (cols, rows) if order == 1 else (rows, cols)
    found = tensor_at(address, (lines - 1) * ld + length, _DTYPES[kind]).as_strided((lines, length), (ld, 1))
    return found.mT if order == 1 else found


def installed(monkeypatch, **options):
    """Have the fake stand for the library on every device."""
    fake = FakeLibrary(**options)
    library = cusparselt.Library(fake)
    handle = cusparselt.make_handle(library)
    monkeypatch.setattr(cusparselt, "loaded_library", lambda: library)
    monkeypatch.setattr(cusparselt, "current_handle", lambda device=None: handle)
    return fake


def half_of_each_four(rows, cols, seed=0, filled=True):
    """A dense float32 matrix with two numbers in each four of a row, or fewer if `filled`, none of them zero."""
    random = np.random.default_rng(seed)
    order = random.random((rows, cols // 4, 4)).argsort(-1)
    keep = (order < 2) & ~((order == 1) & (random.random((rows, cols // 4, 4)) < 0.1 * filled))
    numbers = random.normal(size=(rows, cols // 4, 4)) * keep
    return torch.from_numpy(numbers.reshape(rows, cols)).float()
