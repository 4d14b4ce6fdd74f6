"""What is offered, what it should cost and what is then chosen, written down: a cost model that changes shows here.

`python -m tests.tuning.test_cost_table` writes the table anew. A change of it is to be held against measured times
(`python -m bench`), for the table only says what the models say.
"""

import itertools
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from sparsecomp.lowering.attention.added_gradient import AddedGradient
from sparsecomp.lowering.attention.bias_table import TableGradient
from sparsecomp.lowering.attention.decode_attention import DecodeAttention
from sparsecomp.lowering.attention.document_lists import DocumentLists
from sparsecomp.lowering.attention.element_attention import ElementAttention
from sparsecomp.lowering.attention.mask_scan import MaskScan
from sparsecomp.lowering.attention.problem import BlockAttention
from sparsecomp.lowering.cache.signature import Device
from sparsecomp.lowering.launch.epilogue import Output
from sparsecomp.lowering.launch.strided import Strides
from sparsecomp.lowering.local.gather_dot import GatherDot
from sparsecomp.lowering.local.gather_dot_input import GatherDotInput
from sparsecomp.lowering.local.gather_dot_weight import GatherDotWeight
from sparsecomp.lowering.local.residual_block import ResidualBlock
from sparsecomp.lowering.masked.effective_weight import Merge, PackMask, Split
from sparsecomp.lowering.masked.select_largest import SelectLargest
from sparsecomp.lowering.masked.selective_step import SelectiveStep
from sparsecomp.lowering.sparse.active_linear import ActiveLinear
from sparsecomp.lowering.sparse.bitmap_linear import BitmapLinear, random_longest
from sparsecomp.lowering.sparse.narrow import SpmmNarrow
from sparsecomp.lowering.sparse.packed_linear import PackedLinear
from sparsecomp.lowering.sparse.sddmm import Sddmm
from sparsecomp.lowering.sparse.spmm_bsr import BlockStrides, SpmmBsr
from sparsecomp.lowering.sparse.spmm_csr import SpmmCsr
from sparsecomp.lowering.sparse.spmm_nm import SpmmNM
from sparsecomp.lowering.sparse.stored_places import WriteOut
from sparsecomp.lowering.spiking.binary_conv import BinaryConv, binary_conv_problem
from sparsecomp.lowering.spiking.conv_lif import conv_lif_problem
from sparsecomp.lowering.spiking.conv_neuron import Described, conv_neuron_problem
from sparsecomp.lowering.spiking.convolution import Convolution, Maps
from sparsecomp.lowering.spiking.direct_conv import DirectConv, direct_conv_problem
from sparsecomp.lowering.spiking.event_conv import Accumulate, FindEvents, PackEvents
from sparsecomp.lowering.spiking.fused_layer import FusedLayer
from sparsecomp.lowering.spiking.implementations import SiteInfo
from sparsecomp.lowering.spiking.lif import Lif
from sparsecomp.lowering.spiking.neuron import Axis, Neurons
from sparsecomp.lowering.spiking.neuron_gradients import NeuronGradients
from sparsecomp.lowering.spiking.packing import Cast, CastStrided, PackWeight
from sparsecomp.lowering.spiking.skip_conv import ListRows
from sparsecomp.lowering.spiking.spike_matmul import BatchStrides, SpikeMatmul
from sparsecomp.lowering.spiking.transposed_conv import TransposedConv, transposed_conv_problem
from sparsecomp.lowering.tuning.cards import H100
from sparsecomp.lowering.tuning.cost import rank, seconds
from sparsecomp.lowering.tuning.limits import fits_registers, fits_shared
from sparsecomp.lowering.tuning.operations import all_operations
from sparsecomp.passes.cost import cpu as cpu_cost
from sparsecomp.passes.cost import local as local_cost
from sparsecomp.passes.cost import sparse as sparse_cost
from sparsecomp.passes.cost import spiking as gate
from sparsecomp.passes.cost.decision import Decision
from sparsecomp.passes.cost.dense import DenseWork, conv_work, matmul_work, time_of
from sparsecomp.passes.cost.sparse import Product
from sparsecomp.reference.geometry import TransposedWindow, Window
from sparsecomp.reference.neuron import neuron_of
from sparsecomp.reference.patterns import Layout

pytest.importorskip("triton")  # templates hold their kernels

TABLE = Path(__file__).with_name("cost_table.json")
DEVICES = {name: Device(name, capability, "3.6.0") for name, capability in
           {"H100": "9.0", "A100": "8.0", "RTX": "8.6"}.items()}  # fmt: skip


def _out(m: int, n: int, dtype: str) -> Output:
    return Output(Strides(m * n, n, 1), dtype, "", "", "", Strides(0, 0, 0), "none", 1.0)


def _csr(m: int, k: int, n: int, batch: int, share: float, variation: int, dtype: str, col: int = 1) -> SpmmCsr:
    nnz, dense = int(m * k * share), Strides(k * n, n if col == 1 else 1, col)
    return SpmmCsr(
        m, k, n, batch, nnz, variation, nnz, dense, dtype, dtype, "int32", _out(m, n, dtype)
    )  # fmt: skip


def _bsr(m: int, k: int, n: int, side: int, share: float, variation: int, dtype: str) -> SpmmBsr:
    height, width = m // side, k // side
    blocks = int(height * width * share)
    values, dense = BlockStrides(0, side * side, side, 1), Strides(0, n, 1)
    return SpmmBsr(
        m, k, n, 1, side, side, height, width, blocks, variation, values, dense, dtype, dtype, "int32",
        _out(m, n, dtype),
    )  # fmt: skip


def _packed(m: int, k: int, n: int, pair: bool = False) -> PackedLinear:
    return PackedLinear.of_layer(m, k, n, torch.float16, pair, False, "silu" if pair else "none", pair)


def _bitmap(m: int, k: int, n: int, density: float) -> BitmapLinear:
    nnz = round(m * k * density)
    longest = random_longest(m, k, nnz, 1)
    return BitmapLinear.of_layer(m, k, n, nnz, 1, longest, torch.float16, False, False, "none")


def _narrow(m: int, k: int, n: int, density: float, dtype: str) -> SpmmNarrow:
    lying = Strides(0, 1, k)
    out = _out(m, n, dtype)._replace(strides=Strides(0, 1, m))
    return SpmmNarrow(m, k, n, 1, round(m * k * density), lying, dtype, dtype, "int32", "uint8", out)


def _nm(m: int, k: int, n: int, keep: int, group: int, dtype: str) -> SpmmNM:
    groups = k // group
    row = groups * keep
    return SpmmNM(m, k, n, 1, keep, group, 0, row, row, Strides(0, n, 1), dtype, dtype, _out(m, n, dtype))


def _sddmm(m: int, n: int, d: int, batch: int, share: float, variation: int, dtype: str) -> Sddmm:
    nnz = int(m * n * share)
    return Sddmm(
        m, n, d, batch, nnz, variation, Strides(m * d, d, 1), Strides(n * d, d, 1), nnz, 1.0, dtype, dtype, "int32"
    )  # fmt: skip


def _conv(n: int, c: int, size: int, side: int, groups: int, digits: int, select: str = "all") -> BinaryConv:
    window = Window((side, side), (1, 1), (side // 2, side // 2), (1, 1))
    shapes = (n, c, size, size), (c, c // groups, side, side)
    return binary_conv_problem(Convolution.of(*shapes, window, groups), digits, select)


def _fired(n: int, c: int, size: int, side: int, steps: int, connect: str = "") -> FusedLayer:
    conv = Convolution.of((n * steps, c, size, size), (c,), Window.centred((side, side), (1, 1)))
    neuron = (0.0, 1e-5, 2.0, 1.0, 0.0, steps, "lif", True, False, False, True, True, True)
    return conv_lif_problem(conv, 3, neuron, connect=connect)


def _described(n: int, c: int, size: int, steps: int, dtype: str) -> FusedLayer:
    conv = Convolution.of((n * steps, c, size, size), (c,), Window.centred((3, 3), (1, 1)), dtype=dtype)
    neuron = neuron_of("t0 = add v0 x; t1 = ge t0 n0; t2 = where t1 n1 t0; spike t1; v0 t2")
    neurons = Described(
        steps, neuron, dtype, 1e-5, (False,) * 6, (0.0,) * 2, (0.0,) * 8, (False,) * 2, (False,) * 6, True, True, True
    )
    return conv_neuron_problem(conv, 2, neurons, added="int8" if steps > 1 else "")


def _direct(n: int, c: int, size: int, groups: int) -> DirectConv:
    window = Window.centred((3, 3), (1, 1))
    return direct_conv_problem(Convolution.of((n, c, size, size), (c,), window, groups))


def _transposed(n: int, c: int, size: int, side: int, stride: int) -> TransposedConv:
    window = TransposedWindow((side,) * 2, (stride,) * 2, (0, 0), (0, 0), (1, 1))
    return transposed_conv_problem(Convolution.of((n, c, size, size), (c,), window), 3)


def _heads(m: int, n: int, k: int, heads: int, dtype: str) -> SpikeMatmul:
    """32 images' heads: queries by tokens, times keys that are transposed."""
    a = BatchStrides(m * heads * k, k, heads * k, 1)
    b = BatchStrides(n * heads * k, k, 1, heads * k)
    return SpikeMatmul(m, n, k, 32, heads, a, b, 0.25, dtype)


def _accumulate(n: int, c: int, size: int, density: float, dtype: str) -> Accumulate:
    window = Window.centred((3, 3), (1, 1))
    conv = Convolution.of((n, c, size, size), (c, c, 3, 3), window, dtype=dtype, has_bias=True)
    return Accumulate(conv, int(n * c * size * size * density), 132)


def _channels_first(problem: Accumulate) -> Accumulate:
    out = problem.conv.out._replace(pixel=1, channel=prod(problem.conv.out_size))
    return problem._replace(conv=problem.conv._replace(out=out))


def _listed(n: int, size: int, k: int, side: int, stride: int, dtype: str) -> ListRows:
    window = Window.centred((side, side), (stride, stride))
    return ListRows(Convolution.of((n, k, size, size), (k, k, side, side), window, dtype=dtype))


def _site(n: int, c: int, size: int, side: int, **changes: Any) -> SiteInfo:
    site = SiteInfo(
        device="cuda", itemsize=4, n=n, c=c, size=(size, size), k=c, window=Window.centred((side, side), (1, 1)),
        groups=1, digits=3, density=0.01, active=0.25, tf32=False, channels_last=True, fused=True,
    )  # fmt: skip
    return site._replace(**changes)


CSR, BSR, NM = ("csr", (1, 1), 600), ("bsr", (16, 16), 60), ("nm", (2, 4), 32000)


def _product(kind: tuple[str, tuple[int, int], int], n: int, dtype: torch.dtype, flags: str) -> Product:
    """S is (128, 256), or 250 rows of N:M, which cuSPARSELt never takes; `flags` name what is true of it."""
    format, block, entries = kind
    layout = Layout(format, block, (250 if format == "nm" else 128, 256), ("mixed", "mixed"))
    return Product(
        torch.device("cuda"), layout, n, 1, entries, dtype, "linear" in flags, "bias" in flags, "residual" in flags,
        "relu" if "relu" in flags else "none", "",
        "constant" in flags, "trained" in flags, "hosted" not in flags,
    )  # fmt: skip


DENSE: dict[str, Callable[[torch.dtype], DenseWork]] = {
    "matmul": lambda dtype: matmul_work([64, 64], [64, 64], [64, 64], dtype),
    "matmul of batches": lambda dtype: matmul_work([8, 4096, 512], [512, 2048], [8, 4096, 2048], dtype),
    "conv of 64": lambda dtype: conv_work([32, 64, 56, 56], [64, 64, 3, 3], [32, 64, 56, 56], dtype, False),
    "conv of 65": lambda dtype: conv_work([32, 64, 56, 56], [65, 64, 3, 3], [32, 65, 56, 56], dtype, False),
    "conv in groups, channels last": lambda dtype: conv_work(
        [32, 256, 56, 56], [256, 64, 3, 3], [32, 256, 56, 56], dtype, True
    ),
}


def _of_dense(work: Callable[[torch.dtype], DenseWork], dtype: torch.dtype) -> list[Any]:
    """Seconds of the device and of the host, if they are known."""
    return [*(time_of(work(dtype), H100) or ())]


def _read_off(layout: Layout, transpose: bool, linear: bool) -> list[Any]:
    """What kernels see of a matrix with 20 elements or blocks times a batch."""
    dense = [2, 3, 40] if linear else [5, 96, 7]
    product = Product.of(layout, 20, transpose, dense, linear, torch.empty(1), True, False, "relu", trained=False)
    (format, block, (m, k), (skew, _)), *rest = product[1:]
    return [str((format, block, m, k, *rest[:3], skew, *rest[3:]))]


def _as_rewritten(decision: Decision) -> list[Any]:
    """Whether a sparse layer runs dense, what runs, what the rewrite gains, and why."""
    return [decision.dense, decision.implementation, 1.0 if decision.dense else decision.gain, decision.reason]


def _said(decision: Decision) -> list[Any]:
    """What was decided, the gain, 1 where none is estimated, and why."""
    return [decision.implementation, decision.gain or 1.0, decision.reason]


def _fixed_fan_in(device: str, n: int, k: int, rows: int, dtype: torch.dtype, flags: str) -> local_cost.FixedFanIn:
    """A layer of n inputs and outputs that read k each; `flags` name what is true of it."""
    spread = next((word for word in ("near", "far") if word in flags), None)
    return local_cost.FixedFanIn(
        torch.device(device), rows, n, n, k, dtype, "finished" in flags, "finished" in flags,
        "relu" if "finished" in flags else "none", spread, "kept" in flags, "trained" in flags,
        "replayed" in flags, 4 if "busy" in flags else 1, (DEVICES["H100"], H100),
    )  # fmt: skip


def _of_fixed_fan_in(layer: local_cost.FixedFanIn) -> list[Any]:
    """Of a layer, and of a block of it and one that reads twice as many: what runs, why, and the times of each way."""
    block = local_cost.decide_block(layer, layer._replace(fan_in=2 * layer.fan_in))
    return [*_said(local_cost.decide(layer)), *_said(block), *block.seconds.values()]


HALF_AND_FLOAT = (torch.float16, torch.float32)
DECISIONS: dict[str, Callable[[], list[Any]]] = {
    **{
        f"product {kind[0]} {n} {str(dtype)[6:]} {flags}": partial(
            lambda product: [
                *sparse_cost.sparse_seconds(product, DEVICES["H100"], H100), sparse_cost.dense_seconds(product, H100),
                sparse_cost.compare(product, DEVICES["H100"], H100).reason.partition(";")[0],
            ],
            _product(kind, n, dtype, flags),
        )
        for kind in (CSR, BSR, NM)
        for n in (1, 512)
        for dtype in HALF_AND_FLOAT
        for flags in ("", "linear bias relu constant", "trained", "trained hosted", "linear residual hosted")
    },
    "large product": lambda: [
        sparse_cost.dense_seconds(
            _product(CSR, 8192, dtype, "constant")._replace(layout=Layout("csr", (1, 1), (4096, 4096))), H100
        )
        for dtype in HALF_AND_FLOAT
    ],
    **{
        f"on a CPU {kind[0]} {dtype} {flags}": partial(
            lambda product: _as_rewritten(sparse_cost.decide(product)),
            _product(kind, 64, dtype, flags)._replace(device=torch.device("cpu")),
        )
        for kind in (CSR, BSR, NM) for dtype in HALF_AND_FLOAT for flags in ("linear", "trained", "constant")
    },
    **{
        f"product of {format} {transpose} {linear}": partial(
            _read_off, Layout(format, block, (96, 40), ("even", "skewed")), transpose, linear,
        )
        for format, block in (("csr", (1, 1)), ("bsr", (8, 4)), ("nm", (2, 4)))
        for transpose in (False, True)
        for linear in (False, True)
    },
    **{
        f"cpu {format} {n} {trained}": partial(
            lambda work, trained: [
                cpu_cost.sparse_on_cpu(work, trained), cpu_cost.dense_on_cpu(work, trained, False),
                cpu_cost.dense_on_cpu(work, trained, True),
            ],
            cpu_cost.Work(format, entry, 128, 256, n, 3000), trained,
        )
        for format, entry in (("csr", ()), ("bsr", (16, 8)), ("nm", ()))
        for n in (1, 64)
        for trained in (False, True)
    },
    **{
        f"fixed fan-in {device} {n} {k} {rows} {str(dtype)[6:]} {flags}": partial(
            _of_fixed_fan_in, _fixed_fan_in(device, n, k, rows, dtype, flags)
        )
        for device, n, k, rows, dtype, each in (
            ("cuda", 16384, 8, 1024, torch.float32,
             ("", "kept replayed", "trained", "trained kept busy", "finished far")),
            ("cuda", 300, 5, 1, torch.float16, ("", "near", "trained")),
            ("cpu", 4096, 8, 2, torch.float32, ("", "kept", "trained", "trained kept")),
            ("cuda", 300, 5, 1, torch.float64, ("",)), ("meta", 300, 5, 1, torch.float32, ("",)),
        )
        for flags in each
    },
    **{
        f"dense {str(dtype)[6:]} {work}": partial(_of_dense, DENSE[work], dtype)
        for dtype in (*HALF_AND_FLOAT, torch.float64)
        for work in DENSE
    },
    **{
        f"site {n} {c} {size} {changes}": partial(
            lambda site: [*_said(gate.decide(site)), gate.event_pays_below(site),
                          *(gate.forced(site, name).gain for name in ("binary", "direct", "event", "skip"))],
            _site(n, c, size, side)._replace(**changes),
        )
        for n, c, size, side in ((128, 64, 56, 3), (1, 512, 7, 3), (256, 128, 1, 1))
        for changes in (
            {}, {"trained": True}, {"hosted": True}, {"trained": True, "hosted": True}, {"itemsize": 2, "digits": 2},
            {"density": None, "active": None}, {"tf32": True, "channels_last": False}, {"fused": False},
            {"density": 0.001, "active": 0.02}, {"groups": 2}, {"groups": 8}, {"c": 40}, {"k": 72}, {"device": "cpu"},
            {"groups": 4, "k": 96}, {"window": TransposedWindow((4, 4), (2, 2), (1, 1), (0, 0), (1, 1))},
            {"density": 0.0002, "active": 0.001, "trained": True},
        )
    },
}  # fmt: skip

STEP = ("float32", "float32", "int32", "float32")


def _finished(outputs: int, dtype: str) -> Output:
    return Output(Strides(0, outputs, 1), dtype, dtype, "column", "", Strides(0, 0, 0), "relu", 1.0)


def _neuron(numel: int, steps: int) -> Neurons:
    step = neuron_of("t0 = mul v0 n0; t1 = add t0 x; t2 = ge t1 p0; t3 = where t2 n1 t1; spike t2; v0 t3")
    axes = (Axis(16, 4), *[Axis(1, 1)] * 5)
    given = (True, *[False] * 5)
    return Neurons(numel, numel, numel, axes, (0.0,) * 2, (0.5,) * 8, steps, step, (True, False), given, True)


# a window on long heads, and wide ones in groups; what is strided costs nothing
ATTENTIONS = [
    BlockAttention(4, 16, 1, 4096, 4096, 64, 64, 128, 128, 5, 5, False, False, "bfloat16", 0.1, ()),
    BlockAttention(1, 32, 4, 32768, 32768, 128, 128, 128, 64, 17, 9, False, True, "float16", 0.1, ()),
    BlockAttention(2, 4, 2, 300, 77, 40, 24, 32, 64, 2, 7, True, True, "float32", 0.1, ()),
    BlockAttention(1, 8, 8, 2048, 2048, 256, 256, 64, 64, 6, 6, False, False, "bfloat16", 0.1, ()),
    BlockAttention(1, 8, 8, 2048, 2048, 64, 64, 64, 64, 6, 6, False, False, "float16", 0.1, (), added="float32",
                   kept=50_000),
]  # fmt: skip

# a bias of each head, one of short windows of many sequences, and one by keys
BIASES = [
    AddedGradient(*ATTENTIONS[0])._replace(added="bfloat16", added_sizes=(1, 16, 4096, 4096)),
    AddedGradient(2048, 4, 1, 49, 49, 32, 32, 64, 64, 1, 1, False, True, "float16", 0.1, (), added="float16",
                  added_sizes=(1, 4, 49, 49)),
    AddedGradient(*ATTENTIONS[2])._replace(added="float32", added_sizes=(2, 4, 1, 77)),
]  # fmt: skip

# one pair of a hundred and one of twenty, by heads; small heads in groups
ELEMENTS = [
    ElementAttention(4, 16, 1, 4096, 4096, 64, 64, 167_772, False, False, "bfloat16", 0.1, ()),
    ElementAttention(1, 8, 4, 4096, 8192, 128, 128, 8 * 1_677_722, False, True, "float16", 0.1, ()),
    ElementAttention(2, 4, 2, 300, 77, 40, 24, 2000, False, False, "float32", 0.1, ()),
]

PROBLEMS: dict[str, list[Any]] = {
    "element_attention": ELEMENTS, "elements_by_query": ELEMENTS, "elements_by_key": ELEMENTS,
    "block_attention": ATTENTIONS, "attention_by_query": ATTENTIONS, "attention_by_key": ATTENTIONS,
    "spike_attention": [
        BlockAttention(8, 8, 1, 1024, 1024, 64, 64, 64, 64, 3, 3, False, False, "float16", 0.125, (), result="float32"),
        ATTENTIONS[2]],
    "attention_by_added": BIASES,
    "table_gradient": [TableGradient(4096**2, 257, 16, 1, 4096**2, -1, "int64", "bfloat16"),
                       TableGradient(1024**2, 32, 12, 1, 1024**2, -1, "int64", "float32"),
                       TableGradient(4096, 20_000, 512, 512, 1, 0, "int64", "bfloat16")],
    "decode_attention": [
        DecodeAttention(16, 8, 4, 1, 65536, 0, 0, 0, 128, 128, (), "bfloat16", 0.1, 4095, 0),
        DecodeAttention(1, 2, 16, 8, 4096, 16, 300, 256, 96, 40, (), "float16", 0.1, -1, 0),
        DecodeAttention(3, 4, 1, 2, 100, 0, 0, 0, 64, 64, (), "float32", 0.1, 33, 4),
        DecodeAttention(8, 8, 4, 1, 32768, 0, 0, 0, 128, 128, (), "bfloat16", 0.1, -1, 0, kept=(0, 0, 0, 1))],
    "document_lists": [DocumentLists(64, 32768, 32768, 64, 64, 65536, 0, 2304)],
    "mask_scan": [MaskScan(4, 1, 4096, 4096, 64, 64, (0, 0, 0, 1), "bool"),
                  MaskScan(2, 8, 1000, 777, 64, 32, (1, 1, 1, 1), "float32")],
    "binary_conv": [_conv(32, 64, 56, 3, 1, 3), _conv(1, 512, 7, 3, 1, 2), _conv(8, 128, 14, 1, 2, 4),
                    _conv(32, 256, 14, 3, 1, 3, "rows"), _conv(4, 96, 9, 5, 1, 3)],
    "direct_conv": [_direct(32, 64, 56, 64), _direct(1, 500, 7, 500), _direct(8, 32, 14, 4)],
    "transposed_conv": [_transposed(32, 64, 56, 4, 2), _transposed(1, 500, 7, 3, 1), _transposed(8, 32, 14, 2, 4)],
    "pack_weight": [PackWeight.of(torch.empty(64, 64, 3, 3), 3), PackWeight.of(torch.empty(512, 500).half(), 2)],
    "cast": [Cast(100_003, 0, False, "float32"), Cast(5000, 3, True, "float16")],
    "cast_strided": [CastStrided(Maps(2, 40, (7, 5), (1400, 35, 5, 1), "float32")),
                     CastStrided(Maps(32, 256, (14, 14), (50176, 196, 14, 1), "float16"))],
    "lif": [Lif(960, 960, 960, 16, 60, 0, 1e-5, 2.0, 1.0, 0.0, 3, "lif", True, False, True, True, True, True),
            Lif(10**6, 10**6, 10**6, 64, 1, 0, 1e-5, 2.0, 1.0, 0.0, 4, "if", True, False, False, False, False, False)],
    "conv_lif": [
        _fired(32, 64, 56, 3, 4), _fired(1, 512, 7, 3, 1), _fired(8, 96, 14, 1, 6), _fired(2, 20, 9, 3, 16),
        _fired(32, 64, 56, 3, 4, "add"),
    ],
    "conv_neuron": [_described(32, 64, 56, 4, "float16"), _described(2, 20, 9, 1, "float32")],
    "neuron": [_neuron(960, 3), _neuron(10**6, 4)],
    "neuron_gradients": [NeuronGradients(_neuron(960, 3), (False,) * 2, (True,) * 8),
                         NeuronGradients(_neuron(10**6, 20), (True, False), (False,) * 8)],
    "find_events": [FindEvents(1000, 56, 64, 4000, "float32"), FindEvents(30, 7, 500, 999, "float16")],
    "pack_events": [PackEvents(Maps(64, 64, (3, 3), (576, 9, 3, 1), "float32"), False),
                    PackEvents(Maps(500, 300, (), (300, 1), "float16"), True)],
    "event_conv": [_accumulate(32, 64, 56, 0.02, "float32"), _accumulate(2, 512, 7, 0.1, "float16"),
                   _channels_first(_accumulate(2, 96, 14, 0.05, "float32"))],
    "scan_pixels": [Maps(2, 64, (28, 14), (12544, 1, 896, 64), "float32"),
                    Maps(32, 500, (224, 7), (24500, 49, 7, 1), "float16")],
    "list_rows": [_listed(2, 14, 64, 3, 1, "float32"), _listed(4, 100, 20, 1, 2, "float16")],
    "spike_conv": [_site(128, 64, 56, 3), _site(1, 512, 7, 3, density=None),
                     _site(8, 256, 14, 1, itemsize=2, digits=2), _site(512, 256, 1, 1, active=None),
                     _site(32, 128, 28, 3, fused=False, density=0.3),
                     _site(32, 128, 28, 3, groups=2, channels_last=False), _site(4, 64, 9, 5, active=0.7, tf32=True)],
    "spike_matmul": [_heads(64, 64, 32, 12, "float32"), _heads(32, 32, 64, 12, "float16"),
                     _heads(196, 64, 196, 8, "float32"), _heads(300, 5, 1000, 1, "int32")],
    "spmm_csr": [_csr(512, 512, 64, 1, 0.1, 0, "float32"), _csr(4096, 4096, 512, 1, 0.05, 1, "float16", col=4096),
                 _csr(1000, 3000, 1, 1, 0.01, 2, "bfloat16"), _csr(300, 200, 33, 8, 0.5, 3, "float32"),
                 _csr(2048, 1024, 16, 1, 0.02, 1, "float32", col=1024), _csr(64, 64, 2048, 1, 0.3, 0, "float16"),
                 _csr(256, 256, 32, 1, 0.2, 1, "float32")],
    "spmm_bsr": [_bsr(1024, 1024, 512, 16, 0.1, 0, "float16"), _bsr(4096, 4096, 64, 64, 0.05, 1, "float32"),
                 _bsr(2048, 1024, 1, 32, 0.3, 0, "bfloat16"), _bsr(96, 120, 40, 8, 0.5, 2, "float32")],
    "spmm_nm": [_nm(1024, 1024, 512, 2, 4, "float16"), _nm(4096, 4096, 16, 1, 4, "float32"),
                _nm(300, 600, 77, 4, 8, "bfloat16"), _nm(128, 300, 200, 3, 5, "float16")],
    "spmm_narrow": [_narrow(11008, 4096, 1, 0.3, "float16"), _narrow(4096, 11008, 1, 0.1, "bfloat16"),
                    _narrow(11008, 4096, 4, 0.2, "float16"), _narrow(11008, 4096, 8, 0.1, "float16"),
                    _narrow(11008, 4096, 16, 0.1, "float16"), _narrow(300, 200, 3, 0.5, "float32")],
    "narrow_pair": [_narrow(11008, 4096, 1, 0.3, "float16"), _narrow(4096, 11008, 1, 0.1, "bfloat16"),
                    _narrow(11008, 4096, 8, 0.1, "float16"), _narrow(300, 200, 3, 0.5, "float32")],
    "csr_pair": [_csr(2048, 1024, 4, 1, 0.1, 1, "float16", 1024), _csr(512, 4096, 2, 1, 0.2, 0, "bfloat16", 4096),
                 _csr(300, 200, 16, 1, 0.5, 2, "float32", 200)],
    "packed_linear": [_packed(11008, 4096, 1), _packed(4096, 11008, 8), _packed(11008, 4096, 4, True),
                      _packed(100, 60, 3), _packed(28672, 8192, 1, True)._replace(dtype="bfloat16")],
    "bitmap_pair": [_bitmap(11008, 4096, 1, 0.3), _bitmap(4096, 4096, 9, 0.5)],
    "bitmap_two": [_bitmap(2048, 4096, 1, 0.3)._replace(parts=(1024, 1024))],
    "narrow_two": [_narrow(2048, 4096, 8, 0.1, "float16")._replace(parts=(1024, 1024))],
    "narrow_three": [_narrow(12288, 4096, 1, 0.1, "float16")._replace(parts=(4096,) * 3)],
    "packed_two": [_packed(2048, 4096, 8)._replace(parts=(1024, 1024))],
    "packed_three": [_packed(12288, 4096, 1)._replace(parts=(4096,) * 3)],
    "bitmap_three": [_bitmap(12288, 4096, 1, 0.3)._replace(parts=(4096,) * 3),
                     _bitmap(6144, 4096, 16, 0.3)._replace(parts=(4096, 1024, 1024))],
    "bitmap_linear": [_bitmap(11008, 4096, 1, 0.3), _bitmap(4096, 11008, 16, 0.5), _bitmap(100, 64, 3, 0.1),
                      _bitmap(28672, 8192, 8, 0.2)._replace(dtype="bfloat16")],
    "sddmm": [_sddmm(1024, 1024, 64, 1, 0.05, 0, "float16"), _sddmm(4096, 2048, 256, 1, 0.01, 1, "float32"),
              _sddmm(128, 128, 33, 16, 0.4, 2, "float32"),
              _sddmm(512, 512, 1, 1, 0.1, 0, "float32")._replace(a=Strides(512, 1, 512)),
              _sddmm(2048, 2048, 2048, 1, 0.1, 0, "bfloat16")],
    "write_out": [WriteOut(8192, 8192, 8192 * 820, "float32", "int32"), WriteOut(512, 700, 4000, "float16", "int64")],
    "pack_mask": [PackMask(10**6), PackMask(77)],
    "merge_pruned": [Merge(10**6, 700_000, 4), Merge(1000, 10, 2)],
    "split_pruned": [Split(10**6, 700_000, 4, 1, 1), Split(1000, 10, 2, 0, 1)],
    "selective_step": [SelectiveStep("full", 700_000, 10**6, 1, 0, 0.9, 0.999, 0.1, 0.1, 1e-8, 0.0, *STEP),
                       SelectiveStep("full", 10, 1000, 0, 1, 0.9, 0.999, 0.1, 0.1, 1e-8, 0.1, *STEP)],
    "select_largest": [SelectLargest(10**6, "float32", "int32"), SelectLargest(99, "float16", "int64")],
    "gather_dot": [
        GatherDot(rows, n, n, k, n, lines, dtype, _finished(n, dtype)) for rows, n, k, lines, dtype in (
        (1024, 4096, 8, 32, "float32"), (1024, 16384, 8, 3, "float16"), (1, 300, 5, 10, "bfloat16"))],
    "gather_dot_input": [GatherDotInput(1024, 4096, 4096, 8, 4096, "float32"),
                         GatherDotInput(3, 500, 90, 5, 90, "bfloat16")],
    "gather_dot_weight": [GatherDotWeight(1024, 4096, 4096, 8, 4096, 4096, "float32"),
                          GatherDotWeight(3, 500, 90, 5, 500, 90, "bfloat16")],
    "active_linear": [ActiveLinear(28672, 8192, True, "float16"), ActiveLinear(100, 50, False, "float32")],
    "residual_block": [
        ResidualBlock(rows, n, k, k, n, rows, "rms", "sine_abs", (1, 2, 3, 2), True, dtype, dtype, 1e-5)
        for rows, n, k, dtype in ((1024, 4096, 8, "bfloat16"), (256, 16384, 8, "float32"), (1, 300, 5, "float16"))],
}  # fmt: skip


def decided(name: str) -> list[Any]:
    """What a cost model says and chooses; numbers to seven digits."""
    return [float(f"{value:.7g}") if isinstance(value, float) else value for value in DECISIONS[name]()]


@pytest.mark.quick_cases(40)
@pytest.mark.parametrize("name", DECISIONS)
def test_decisions_are_those_of_the_table(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    for value, expected in zip(decided(name), json.loads(TABLE.read_text())[name], strict=True):
        assert value == (pytest.approx(expected, rel=1e-6) if isinstance(expected, float) else expected)


def cases() -> Iterator[tuple[str, int]]:
    return ((op, which) for op, problems in PROBLEMS.items() for which in range(len(problems)))


def found(op: str, which: int) -> dict[str, list[Any]]:
    """By card and template: how many configurations, the first by estimate, its microseconds, and those of all.

    Of a template that cannot run it: 0 and why.
    """
    answer = {}
    for card, device in DEVICES.items():
        candidates = all_operations()[op].candidates(PROBLEMS[op][which], device)
        for name, group in itertools.groupby(candidates, key=lambda candidate: candidate.template.name):
            ranked = rank(list(group), PROBLEMS[op][which], H100)
            times = [seconds(candidate, PROBLEMS[op][which], H100) * 1e6 for candidate in ranked]
            numbers = [float(f"{number:.7g}") for number in (times[0], sum(times))]
            answer[f"{op} {which} {card} {name}"] = [len(ranked), str(ranked[0].config), *numbers]
        for name, reason in all_operations()[op].refusals(PROBLEMS[op][which], device).items():
            answer[f"{op} {which} {card} {name}"] = [0, reason]
    return answer


@pytest.mark.quick_cases(40)
@pytest.mark.parametrize(("op", "which"), list(cases()))
def test_costs_are_those_of_the_table(op: str, which: int) -> None:
    written = {name: row for name, row in json.loads(TABLE.read_text()).items() if name.startswith(f"{op} {which} ")}
    answer = found(op, which)
    assert answer.keys() == written.keys()
    for name, (count, config, *times) in written.items():
        assert answer[name][:2] == [count, config], name
        assert answer[name][2:] == pytest.approx(times, rel=1e-6), name


@pytest.mark.parametrize("op", PROBLEMS)
def test_every_problem_has_a_signature_under_which_its_times_are_kept(op: str) -> None:
    operation, device = all_operations()[op], next(iter(DEVICES.values()))
    for problem in PROBLEMS[op]:
        signature = operation.signature(problem, device)
        assert signature.op == op and signature.key
        if operation.representative is not None:
            again = operation.signature(operation.representative(signature), device)
            assert again.key == signature.key, problem


def test_the_table_has_every_operation() -> None:
    assert set(PROBLEMS) == set(all_operations()) - {"semi_structured"}  # whose times are cuSPARSELt's


# At most 2^28 elements of a dense matrix, 2^27 of sums; 2^31 - 1 of an operand of cuSPARSELt's.
BOUNDS: list[tuple[str, str, Any, Any, str]] = [
    # operation, template, what it just takes, what it just does not, and why
    ("sddmm", "sddmm_dense", _sddmm(99, 99, 8, 1, 0.1, 0, "float16"), {"d": 7}, "a depth below 8"),
    ("sddmm", "sddmm_dense", _sddmm(2**14, 2**13, 8, 2, 0, 0, "float16"), {"n": 2**13 + 1}, "268435456 elements"),
    ("sddmm", "sddmm_few", _sddmm(99, 99, 64, 1, 0.1, 0, "float16")._replace(b=Strides(0, 1, 99)), {"d": 65},
     "a depth of 65"),
    ("sddmm", "sddmm_few", _sddmm(99, 99, 8, 1, 0.1, 0, "float16")._replace(b=Strides(0, 1, 99)),
     {"b": Strides(0, 8, 1)}, "does not lie by columns"),
    ("spmm_csr", "spmm_csr_few", _csr(99, 99, 64, 1, 0.1, 0, "float16", col=99), {"n": 65}, "65 columns"),
    ("spmm_csr", "spmm_csr_few", _csr(99, 99, 8, 1, 0.1, 0, "float16", col=99), {"dense": Strides(0, 8, 1)},
     "in one piece"),
    ("spmm_csr", "spmm_csr_dense", _csr(99, 99, 8, 1, 0.1, 0, "float16"), {"n": 7}, "fewer than 8 columns"),
    ("spmm_csr", "spmm_csr_dense", _csr(99, 99, 8, 1, 0.1, 0, "bfloat16"), {"dense_dtype": "float16"}, "one dtype"),
    ("spmm_csr", "spmm_csr_dense", _csr(99, 99, 8, 1, 0.1, 0, "float16"), {"dtype": "float32"}, "spmm_csr_halves"),
    ("spmm_csr", "spmm_csr_dense", _csr(2**14, 2**13, 8, 2, 0, 0, "float16"), {"m": 2**14 + 1, "values_batch": 1},
     "268435456 elements"),
    ("spmm_csr", "spmm_csr_halves", _csr(99, 99, 8, 1, 0.1, 0, "float32"), {"n": 7}, "fewer than 8 columns"),
    ("spmm_csr", "spmm_csr_halves", _csr(99, 99, 8, 1, 0.1, 0, "float32"), {"dense_dtype": "float16"}, "splits"),
    ("spmm_csr", "spmm_csr_halves", _csr(2**14, 2**13, 8, 1, 0, 0, "float32"), {"m": 2**14 + 1}, "268435456 elements"),
    ("spmm_csr", "spmm_csr_rows", _csr(9, 9, 8, 1, 0.1, 0, "float32"), {"dtype": "float64"}, "use the reference"),
    ("spmm_bsr", "spmm_bsr", _bsr(64, 64, 8, 16, 0.1, 0, "float16"), {"dense_dtype": "float32"}, "one dtype"),
    ("spmm_bsr", "spmm_bsr", _bsr(64, 64, 8, 16, 0.1, 0, "float16")._replace(block_columns=2**27 - 1),
     {"block_columns": 2**27}, "deeper than 2^31"),
    ("spmm_nm", "spmm_nm", _nm(64, 64, 8, 2, 4, "float16"), {"dense_dtype": "float32"}, "one dtype"),
    ("spmm_narrow", "narrow_rows", _narrow(64, 64, 16, 0.1, "float16"), {"n": 17}, "by CSR's kernels"),
    ("spmm_narrow", "narrow_rows", _narrow(64, 64, 1, 0.1, "float16"), {"batch": 2}, "by CSR's kernels"),
    ("spmm_narrow", "narrow_rows", _narrow(1, 2**27 - 1, 1, 1e-6, "float16"), {"k": 2**27}, "too many columns"),
    ("spmm_narrow", "narrow_rows", _narrow(64, 64, 1, 0.1, "float16"), {"dtype": "float64"}, "use the reference"),
    ("narrow_pair", "narrow_pair", _narrow(64, 64, 16, 0.1, "float16"), {"n": 17}, "by CSR's kernels"),
    ("csr_pair", "csr_pair", _csr(99, 99, 8, 1, 0.1, 0, "float16", col=99), {"n": 1}, "beside others"),
    ("csr_pair", "csr_pair", _csr(99, 99, 8, 1, 0.1, 0, "float16", col=99), {"filled": True}, "filled up"),
    ("csr_pair", "csr_pair", _csr(99, 99, 8, 1, 0.1, 0, "float16", col=99), {"batch": 2}, "a batch"),
    ("packed_linear", "packed_row", _packed(64, 64, 1), {"n": 2}, "a row by lanes"),
    ("packed_linear", "packed_row", _packed(64, 64, 1), {"order": "fragments"}, "by fragments"),
    ("packed_linear", "packed_fragments", _packed(64, 64, 8), {"n": 9}, "or 8 by fragments"),
    ("packed_linear", "packed_fragments", _packed(64, 64, 8), {"k": 66}, "whole groups"),
    ("packed_linear", "packed_fragments", _packed(64, 64, 8), {"dtype": "float32"}, "float16 or bfloat16"),
    ("bitmap_linear", "bitmap_tiles", _bitmap(64, 64, 16, 0.3), {"n": 17}, "1 to 16"),
    ("bitmap_pair", "bitmap_pair", _bitmap(64, 64, 16, 0.3), {"n": 17}, "1 to 16"),
    ("bitmap_three", "bitmap_three", _bitmap(64, 64, 16, 0.3)._replace(parts=(32, 16, 16)), {"n": 17}, "1 to 16"),
    ("bitmap_linear", "bitmap_tiles", _bitmap(64, 64, 16, 0.3), {"k": 68}, "multiples of 8"),
    ("bitmap_linear", "bitmap_tiles", _bitmap(64, 64, 16, 0.3), {"dtype": "float32"}, "float16 or bfloat16"),
]  # fmt: skip


@pytest.mark.parametrize(("op", "template", "taken", "change", "why"), BOUNDS)
def test_a_template_refuses_from_its_bound_on(op: str, template: str, taken: Any, change: Any, why: str) -> None:
    assert template not in all_operations()[op].refusals(taken, DEVICES["H100"])
    assert why in all_operations()[op].refusals(taken._replace(**change), DEVICES["H100"])[template]


@pytest.mark.parametrize(
    ("capability", "most"),
    [("8.0", 163 * 1024), ("8.6", 99 * 1024), ("8.9", 99 * 1024), ("9.0", 227 * 1024), ("10.0", 227 * 1024),
     ("10.3", 227 * 1024), ("12.0", 99 * 1024), ("8.8", 99 * 1024), ("9.9", 227 * 1024), ("99.0", 99 * 1024),
     ("", 99 * 1024)],
)  # fmt: skip
def test_shared_memory_is_what_nvidia_says(capability: str, most: int) -> None:
    """What a block can opt in to (CUDA C++ Programming Guide, technical specifications).

    An unlisted capability has the least of its generation, and one of no known generation the least of all."""
    device = Device("card", capability, "3.6.0")
    assert fits_shared(most, device) and not fits_shared(most + 1, device)


@pytest.mark.parametrize(("entry", "like"), [((), "csr"), ((4, 4), "bsr")])
def test_a_format_without_rates_takes_a_cpu_as_long_as_one_of_the_same_entries(entry: Any, like: str) -> None:
    new, known = (cpu_cost.Work(format, entry, 64, 96, 8, 500) for format in ("new", like))
    for trained in (False, True):
        assert cpu_cost.sparse_on_cpu(new, trained) == cpu_cost.sparse_on_cpu(known, trained)


@pytest.mark.parametrize("op", PROBLEMS)
def test_sizes_of_tiles_are_powers_of_two(op: str) -> None:
    """Triton's ranges and warps are; stages are a few, and what else a configuration has is on or off."""
    for problem, device in itertools.product(PROBLEMS[op], DEVICES.values()):
        for candidate in all_operations()[op].candidates(problem, device):
            for name, value in candidate.config.items():
                fits = 0 < value < 8 if name == "stages" else value & (value - 1) == 0
                assert fits, f"{candidate.name}: {name} is {value}"


def test_registers_hold_192_sums_a_thread() -> None:
    assert fits_registers(192 * 128, 4) and not fits_registers(192 * 128 + 1, 4)


def main() -> int:
    torch.get_num_threads = lambda: 2
    rows = {name: row for op, which in cases() for name, row in found(op, which).items()}
    rows |= {name: decided(name) for name in DECISIONS}
    lines = (f"{json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
    TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
