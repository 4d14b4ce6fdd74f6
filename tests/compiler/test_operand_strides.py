"""Kernels read operands wherever their numbers lie: slices, transposes and expanded vectors give what copies would.

Each operator with an implementation of its own for CUDA has an example here, which the reference computes of contiguous
tensors and the kernels of the same numbers in other places. What lies between them is another number, so that a kernel
that reads by address alone is wrong. A kept transpose is ours and contiguous; it is left out.
"""

import pkgutil
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from kernel_devices import KERNEL_DEVICES
from torch import Tensor
from torch.utils._pytree import tree_map

import sparsecomp.ops
from sparsecomp.attention import blocks_of, elements_of_mask
from sparsecomp.formats import CSR, NARROW
from sparsecomp.ops.attention.masked_decode import kept_range
from sparsecomp.ops.sparse import dense_copy
from sparsecomp.reference.digits import SPREAD
from sparsecomp.reference.patterns import Layout
from sparsecomp.tensor.index_arrays import IndexArrays

for _module in pkgutil.walk_packages(sparsecomp.ops.__path__, "sparsecomp.ops."):
    import_module(_module.name)

pytestmark = pytest.mark.quick_cases(4)
OPS = torch.ops.sparsecomp
ELSEWHERE = {
    "dense_linear_relu": "is a product of torch's",
    "selective_step": "writes to its operands, and refuses averages that are not contiguous",
}
EXAMPLES: dict[str, Callable[[], tuple[Any, ...]]] = {}


@pytest.fixture(autouse=True)
def _copies_everywhere(monkeypatch):
    """The interpreter's tensors are a CPU's."""
    monkeypatch.setattr(dense_copy, "DEVICES", ("cpu", "cuda"))


def example(*names: str) -> Callable[[Callable[..., tuple[Any, ...]]], Callable[..., tuple[Any, ...]]]:
    """Enter arguments of an operator; of several by the same function, which is told the part behind a space."""

    def enter(make: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
        for name in names:
            _, space, which = name.partition(" ")
            EXAMPLES[name] = (lambda which=which: make(which)) if space else make
        return make

    return enter


def fired(*shape: int) -> Tensor:
    return (torch.rand(shape) < 0.3).float()


def matrix(rows: int, columns: int) -> list[Tensor]:
    """Values, pointers and indices."""
    stored = CSR.from_dense(torch.randn(rows, columns) * (torch.rand(rows, columns) < 0.4))
    return [stored.values, stored.crow, stored.col]


def weight() -> tuple[Tensor, list[Tensor], Any]:
    """Values, index arrays and layout of a matrix (5, 7)."""
    values, pattern = IndexArrays.of(CSR.from_dense(torch.randn(5, 7) * (torch.rand(5, 7) < 0.4)))
    return values, list(pattern.arrays), pattern.layout


WINDOW = ([1, 1], [1, 1], [1, 1])


@example(*(f"spike_conv {how}" for how in ("binary", "direct", "event", "skip")))
def _spike_conv(how):
    return fired(2, 6, 5, 7), torch.randn(4, 3, 3, 3), torch.randn(4), *WINDOW, 2, 3, how


@example(*(f"spike_linear {how}" for how in ("binary", "event")))
def _spike_linear(how):
    return fired(5, 7), torch.randn(4, 7), torch.randn(4), 3, how


@example("spike_conv_counts")
def _spike_conv_counts():
    counts = fired(2, 6, 5, 7).to(torch.int8)
    return counts, torch.randn(4, 6, 3, 3), torch.randn(4), *WINDOW, 1, 3, "binary", 1.0, None, SPREAD, True


@example("spike_conv_transpose")
def _spike_conv_transpose():
    return fired(2, 6, 5, 7), torch.randn(6, 4, 3, 3), torch.randn(4), [2, 1], [1, 1], [1, 0], 1, [1, 1], 3


@example("spike_conv_transpose_counts")
def _spike_conv_transpose_counts():
    x, *rest = _spike_conv_transpose()
    return x.to(torch.int8), *rest, 1.0, None, SPREAD, False


@example("spike_matmul")
def _spike_matmul():
    return fired(2, 3, 5, 7), fired(2, 3, 7, 4)


@example("spike_matmul_counts")
def _spike_matmul_counts():
    return *(one.to(torch.int8) for one in _spike_matmul()), 1.0, torch.float32


def by_channel() -> list[Tensor]:
    """Mean, variance, gain and bias of five channels."""
    return [torch.randn(5), torch.rand(5) + 0.5, torch.randn(5), torch.randn(5)]


@example("lif")
def _lif():
    return torch.randn(3, 2, 5, 4), torch.randn(2, 5, 4), 0.0, *by_channel(), 1e-5, "lif", 2.0, None, True, 0.1, 0.0


@example("conv_lif")
def _conv_lif():
    layer = fired(6, 6, 5, 7).to(torch.int8), torch.randn(5, 6, 3, 3), torch.randn(5), *WINDOW, 1, 3, 1.0, SPREAD, False
    neuron = torch.randn(2, 5, 5, 7), 0.0, *by_channel(), 1e-5, "lif", 2.0, None, True, 0.1, 0.0
    return *layer, 3, *neuron, True, fired(3, 2, 5, 5, 7).to(torch.int8), "add", torch.randn(3, 2, 5, 5, 7), True


NEURON = "t0 = mul v0 p0; t1 = add t0 x; t2 = ge t1 n0; "


@example("neuron")
def _neuron():
    step = NEURON + "t3 = where t2 n1 t1; spike t2; v0 t3"
    return torch.randn(3, 2, 5, 4), [torch.randn(2, 5, 4)], [0.0], [torch.rand(5, 1)], [0.3, 0.0], step, True


@example("conv_neuron")
def _conv_neuron():
    layer = fired(6, 6, 5, 7).to(torch.int8), torch.randn(5, 6, 3, 3), torch.randn(5), *WINDOW, 1, 3, 1.0, SPREAD, False
    step = NEURON + "t3 = where t2 n1 t1; spike t2; v0 t3"
    neuron = 1e-5, [torch.randn(2, 5, 5, 7)], [0.0], [torch.rand(5)], [0.3, 0.0], step, True
    joins = fired(3, 2, 5, 5, 7).to(torch.int8), "add", torch.randn(3, 2, 5, 5, 7), True
    return *layer, 3, *by_channel(), *neuron, *joins


@example("trained_neuron")
def _trained_neuron():
    *given, _, _, _ = _neuron()
    return *given, [1.0], NEURON + "t3 = fire t2 t1; spike t3; v0 t1; b0 = exp u; pull b0", 1


@example("neuron_gradients")
def _neuron_gradients():
    *given, times = _trained_neuron()
    return [torch.randn(3, 2, 5, 4), torch.randn(2, 5, 4)], *given, [True, True, True], times


def neighbours() -> tuple[Tensor, Tensor]:
    """A weight and what its rows read of seven inputs."""
    return torch.randn(4, 3), torch.randint(7, (4, 3), dtype=torch.int32)


@example("gather_dot")
def _gather_dot():
    return torch.randn(5, 7), *neighbours(), torch.randn(4), torch.randn(5, 4), [], "gelu", "mixed"


@example("gather_dot_input")
def _gather_dot_input():
    return torch.randn(5, 4), *neighbours(), [], 7


@example("gather_dot_weight")
def _gather_dot_weight():
    return torch.randn(5, 7), torch.randn(5, 4), neighbours()[1], []


@example("residual_block")
def _residual_block():
    index = [torch.randint(7, (7, 3), dtype=torch.int32)]
    layer = [torch.randn(7, 3), torch.randn(7)]
    sine = [torch.rand(7) for _ in range(3)]
    how = "rms", 1e-5, "sine_abs", "mixed", True
    return torch.randn(5, 7), [torch.rand(7)], layer, sine, layer, torch.randn(5, 1), index, index, *how


@example("table_rows_gradient")
def _table_rows_gradient():
    return torch.randn(5, 7, 3), torch.randint(-9, 9, (5, 7)), 9, 4


@example("row_softmax")
def _row_softmax():
    values, pointers, _ = matrix(5, 7)
    return torch.stack([values, 2 * values]), pointers


@example("row_softmax_gradient")
def _row_softmax_gradient():
    values, pointers = _row_softmax()
    return torch.randn_like(values), torch.rand_like(values), pointers


@example("sparse_linear", "sparse_linear turned")
def _sparse_linear(which=""):
    values, pattern, layout = weight()
    rows, columns = (5, 7)[:: -1 if which else 1]
    x, bias, residual = torch.randn(3, columns), torch.randn(rows), torch.randn(3, rows)
    return x, values, pattern, bias, residual, layout.written(), bool(which), "relu", ""


@example("sparse_linear_values")
def _sparse_linear_values():
    _, pattern, layout = weight()
    return torch.randn(3, 7), torch.randn(3, 5), pattern, layout.written(), False


@example("spmm", "spmm turned")
def _spmm(which=""):
    values, pattern, layout = weight()
    rows, columns = (5, 7)[:: -1 if which else 1]
    dense, bias, residual = torch.randn(2, columns, 3), torch.randn(3), torch.randn(2, rows, 3)
    values = torch.stack([values, 2 * values])
    return values, pattern, dense, bias, residual, *layout, bool(which), "column", "relu", 0.5, None, False


@example("sddmm")
def _sddmm():
    _, pattern, layout = weight()
    return torch.randn(2, 5, 3), torch.randn(2, 7, 3), pattern, *layout, 0.5


@example("stored_to_dense")
def _stored_to_dense():
    values, pattern, layout = weight()
    return values, pattern, layout.written(), False


@example("dense_copy")
def _dense_copy():
    """Of values that have a copy; others are written out."""
    values, pattern, layout = weight()
    assert dense_copy.keep_dense_copy(values, layout)
    return values, pattern, layout.written()


@example("dense_to_stored")
def _dense_to_stored():
    _, pattern, layout = weight()
    return torch.randn(5, 7), pattern, layout.written(), False


@example("stored_rows")
def _stored_rows():
    values, *pattern = matrix(5, 7)
    return values, torch.tensor([[4, 0], [2, 2]]), *pattern, 7


@example("stored_rows_gradient")
def _stored_rows_gradient():
    return torch.randn(2, 2, 7), torch.tensor([[4, 0], [2, 2]]), *matrix(5, 7)[1:], 7


@example("whole_product")
def _whole_product():
    return *matrix(5, 6), *matrix(6, 7), 7, None


@example("turned_pattern")
def _turned_pattern():
    return *matrix(5, 6)[1:], 6


@example("row_products")
def _row_products():
    return *matrix(5, 6), *matrix(6, 7), *matrix(5, 7)[1:], 7


@example("row_dots")
def _row_dots():
    return *matrix(5, 6), *matrix(7, 6), *matrix(5, 7)[1:], 6


@example("effective_weight")
def _effective_weight():
    mask = torch.rand(6, 9) < 0.4
    return torch.randn(6, 9), torch.randn(int((~mask).sum())), mask


@example("split_pruned")
def _split_pruned():
    _, theta, mask = _effective_weight()
    return torch.randn(6, 9), mask, len(theta), True, True


@example("select_largest")
def _select_largest():
    return torch.randn(100), torch.tensor(7)


@example("active_linear")
def _active_linear():
    return torch.randn(1, 7).relu(), torch.randn(7, 4), torch.zeros(1, dtype=torch.int32), torch.randn(4)


def packed(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Values, indices and positions of a 2:4 weight (4, 12); a CPU does not read the last."""
    indices = torch.tensor([0, 2], dtype=torch.uint8).repeat(4, 3)
    return torch.randn(4, 6, dtype=dtype), indices, torch.zeros(1, 1, 128, dtype=torch.int32)


@example("packed_linear")
def _packed_linear():
    return torch.randn(5, 12), *packed(), torch.randn(4), torch.randn(5, 4), "relu"


@example("packed_pair")
def _packed_pair():
    return torch.randn(5, 12), *packed(), torch.randn(4), *packed(), torch.randn(4), "silu"


def by_bitmap() -> tuple[Tensor, list[Tensor], str, list[Tensor]]:
    """Values, index arrays, layout and copy of a weight (4, 16); a CPU does not read the last."""
    values, pattern = IndexArrays.of(CSR.from_dense(torch.randn(4, 16) * (torch.rand(4, 16) < 0.5)))
    copy = [torch.zeros(2, dtype=torch.int32), torch.zeros(1, 320, dtype=torch.uint8), torch.zeros(values.numel())]
    return values, list(pattern.arrays), pattern.layout.written(), copy


@example("bitmap_linear")
def _bitmap_linear():
    return torch.randn(5, 16), *by_bitmap(), 1, 64, torch.randn(4), torch.randn(5, 4), "relu"


@example("bitmap_pair")
def _bitmap_pair():
    first, second = by_bitmap(), by_bitmap()
    return torch.randn(5, 16), *first, torch.randn(4), *second, torch.randn(4), 1, 64, "silu"


@example("siblings bitmap", "siblings narrow", "siblings nm")
def _siblings(which=""):
    biases = [torch.randn(4) for _ in range(2)]
    if which == "nm":
        values, indices, positions = zip(packed(), packed(), strict=True)
        layouts = [Layout("nm", (2, 4), (4, 12)).written()] * 2
        return torch.randn(5, 12), [*values], [*indices], layouts, [*positions], biases, 0, 0, "relu"
    if which == "narrow":
        kept = [torch.randn(4, 9) * (torch.rand(4, 9) < 0.5) for _ in range(2)]
        values, patterns = zip(*(IndexArrays.of(NARROW.from_dense(one)) for one in kept), strict=True)
        arrays, layouts = ([*one.arrays] for one in patterns), [one.layout.written() for one in patterns]
        return torch.randn(5, 9), [*values], sum(arrays, []), layouts, [], biases, 0, 0, "relu"
    values, arrays, layouts, copies = zip(by_bitmap(), by_bitmap(), strict=True)
    return torch.randn(5, 16), [*values], sum(arrays, []), [*layouts], sum(copies, []), biases, 1, 64, "relu"


@example("gated_pair csr", "gated_pair narrow")
def _gated_pair(which=""):
    kept = [torch.randn(6, 9) * (torch.rand(6, 9) < 0.5) for _ in range(2)]
    (values, pattern), (other, other_pattern) = (
        IndexArrays.of((CSR if which == "csr" else NARROW).from_dense(one)) for one in kept
    )
    arrays, others = list(pattern.arrays), list(other_pattern.arrays)
    layout = pattern.layout.written()
    return torch.randn(5, 9), values, arrays, torch.randn(6), other, others, torch.randn(6), layout, "silu"


def attended() -> tuple[list[Tensor], Tensor]:
    """Queries, keys and values, and a mask."""
    shapes = (2, 4, 5, 8), (2, 2, 9, 8), (2, 2, 9, 6)
    return [torch.randn(shape) for shape in shapes], torch.rand(1, 4, 5, 9) < 0.5


@example("element_attention")
def _element_attention():
    operands, mask = attended()
    return *operands, list(elements_of_mask(mask)[2:]), 0.3, 2.0, torch.randn(4)


@example("element_attention_gradients")
def _element_attention_gradients():
    *operands, lists, scale, softcap, alibi = _element_attention()
    found = OPS.element_attention(*operands, lists, scale, softcap, alibi)
    return torch.randn(2, 4, 5, 6), *operands, *found, torch.randn(2, 4, 5), lists, scale, softcap, alibi


@example("block_attention")
def _block_attention():
    operands, mask = attended()
    added = torch.randn(1, 4, 5, 9)
    return *operands, list(blocks_of(mask, (32, 32))[4:]), 0.3, 2.0, torch.randn(4), added, torch.tensor([5]), 50000


@example("spike_attention", "counted_attention", "spike_attention_counts counts")
def _spike_attention(which=""):
    """Of counts, of which no product of half precision is rounded."""
    _, mask = attended()
    q, k, v = (torch.randint(3, (2, 4, *own)).float() for own in ((5, 8), (9, 8), (9, 6)))
    lists = list(blocks_of(mask, (32, 32))[4:])
    return (q.half(), k.half(), v.half(), lists, 0.5, torch.float32) if which else (q, k, v, lists, 0.5)


@example("block_attention_gradients")
def _block_attention_gradients():
    *operands, lists, scale, softcap, alibi, added, seed, kept = _block_attention()
    scoring = scale, softcap, alibi, added, seed, kept
    found = OPS.block_attention(*operands, lists, *scoring)
    return torch.randn(2, 4, 5, 6), *operands, *found, torch.randn(2, 4, 5), lists, *scoring, False, 0, True


@example("decode_attention", "decode_attention paged")
def _decode_attention(which=""):
    lengths, table = torch.tensor([9, 4], dtype=torch.int32), torch.tensor([[1, 0, 2], [3, 5, 4]], dtype=torch.int32)
    caches = [torch.randn(*((6, 2, 4) if which else (2, 2, 9)), depth) for depth in (8, 6)]
    return torch.randn(2, 4, 2, 8), *caches, lengths, table if which else None, 3, 1, 0.3, 0.0, torch.randn(4)


@example("masked_decode")
def _masked_decode():
    kept = torch.rand(2, 1, 2, 9) < 0.6
    q, k, v = (torch.randn(shape) for shape in ((2, 4, 2, 8), (2, 2, 9, 8), (2, 2, 9, 6)))
    return q, k, v, kept, kept_range(kept, 2), -1, 0.3, 0.0


@example("packed_blocks")
def _packed_blocks():
    offsets = torch.tensor([0, 3, 9], dtype=torch.int32)
    return offsets, offsets, 9, 9, 32, 32, 4, 0


@example("scanned_mask", "scanned_mask added")
def _scanned_mask(which=""):
    return torch.randn(1, 4, 5, 9) if which else torch.rand(1, 4, 5, 9) < 0.4, 5, 9, 32, 32


# -- where the numbers lie


def every_other(tensor: Tensor) -> Tensor:
    """In every other place of each dimension of a larger tensor, which holds another number between."""
    between = True if tensor.dtype is torch.bool else 77
    larger = torch.full([2 * size for size in tensor.shape], between, dtype=tensor.dtype, device=tensor.device)
    return larger[tuple(slice(1, None, 2) for _ in tensor.shape)].copy_(tensor)


def turned(tensor: Tensor) -> Tensor:
    """The dimensions the other way round in memory; of a vector, as `every_other`."""
    around = list(range(tensor.dim()))[::-1]
    return tensor.permute(around).contiguous().permute(around) if tensor.dim() > 1 else every_other(tensor)


def of_one_number(tensor: Tensor) -> Tensor:
    """A vector of floats, along whichever dimension, that is one of its numbers, expanded; others as they are."""
    is_vector = tensor.is_floating_point() and tensor.dim() and max(tensor.shape) == tensor.numel()
    return tensor.flatten()[:1].expand(tensor.numel()).view(tensor.shape) if is_vector else tensor


def test_every_kernel_has_an_example():
    names = {name[12:] for name in torch._C._dispatch_get_all_op_names() if name.startswith("sparsecomp::")}
    overloads = [(name, getattr(OPS, name).default) for name in names]
    own = {name for name, one in overloads if getattr(one, "direct_cuda", 0) is not getattr(one, "direct_cpu", 0)}
    assert own - set(ELSEWHERE) == {name.partition(" ")[0] for name in EXAMPLES}


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("lying", [every_other, turned, of_one_number])
@pytest.mark.parametrize("name", EXAMPLES)
def test_a_kernel_reads_operands_wherever_they_lie(name, lying, device):
    torch.manual_seed(0)
    overload, given = getattr(OPS, name.partition(" ")[0]).default, list(EXAMPLES[name]())
    elsewhere = tree_map(lambda one: lying(one.to(device)) if isinstance(one, Tensor) else one, given)
    there = tree_map(lambda one: lying(one) if isinstance(one, Tensor) else one, given)
    same = tree_map(lambda one: one.contiguous() if isinstance(one, Tensor) else one, there)
    calls = overload.direct_cuda(*elsewhere), overload.direct_cpu(*there), overload.direct_cpu(*same)
    found, by_reference, expected = (one if isinstance(one, tuple | list) else (one,) for one in calls)
    for one, other, right in zip(found, by_reference, expected, strict=True):
        torch.testing.assert_close(one.cpu(), right, rtol=2e-4, atol=2e-4, equal_nan=True)
        torch.testing.assert_close(other, right, rtol=2e-4, atol=2e-4, equal_nan=True)
