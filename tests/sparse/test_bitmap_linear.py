"""Layers of few rows by a bitmap: how it lies, what a warp does with it, and when the compiler takes it."""

import itertools
import json
import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from compile_kernel import compile_in_subprocess
from kernel_devices import graph_of, needs_triton
from ptx_warp import LANES, Warp
from rewriting import rewritten_for
from silu_layer import SiluLayer
from torch import Tensor

import sparsecomp
from bench.table import RESULTS
from sparsecomp.errors import FormatError
from sparsecomp.formats import BITMAP, CSR, NARROW, SparseMatrix
from sparsecomp.lowering.tuning.ceilings import target_named
from sparsecomp.passes.cost.decision import Decision
from sparsecomp.passes.cost.sparse import Product, decide
from sparsecomp.reference.patterns import Layout, stored_by_rows

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
DTYPES = (torch.float16, torch.bfloat16)
TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 8e-3}


def pruned(rows: int, cols: int, zeros: float = 0.7, dtype: torch.dtype = torch.float16) -> Tensor:
    """A weight with this share of zeros."""
    random = torch.Generator().manual_seed(rows + cols)
    kept = torch.rand(rows, cols, generator=random) >= zeros
    return (torch.randn(rows, cols, generator=random) * kept).to(dtype)


def packed(matrix: SparseMatrix, grain: int = 1, longest: int = 0) -> tuple[list[Tensor], int, int]:
    """Starts, heads and values, grain and the longest chunk."""
    from sparsecomp.lowering.sparse.bitmap_linear import BitmapChunks, longest_chunk

    values, arrays, layout = stored_by_rows(matrix)
    longest = longest or longest_chunk(arrays, layout, grain)
    return list(BitmapChunks(layout.written(), grain)(values, *arrays)), grain, longest


@needs_triton
def test_a_chunk_by_hand():
    weight = torch.zeros(17, 136).half()
    weight[1, 8] = 1.0  # lane 4 · 1 + 1, first tile, bit 0
    weight[9, 9] = 2.0  # the same lane, row g + 8: bit 3
    weight[1, 10] = 3.0  # the third column: bit 4
    weight[1, 45] = 4.0  # lane 4 + 1, pair 1, second tile: tile 3, bit 1
    weight[0, 24] = 5.0  # lane 3
    weight[16, 135] = 6.0  # second strip and turn: lane 0, pair 0, second tile, bit 5
    for kind in (CSR, NARROW):
        (starts, heads, values), _, longest = packed(kind.from_dense(weight))
        assert starts.tolist() == [0, 5, 5, 5, 6] and starts.dtype is torch.int32 and longest == 5
        assert heads.shape == (4, 320) and heads.dtype is torch.uint8
        begins = heads[:, :64].contiguous().view(torch.int16)
        assert begins[0].tolist() == [0] * 4 + [1] * 2 + [5] * 26 and begins[1].tolist() == [5] * 32
        assert begins[3].tolist() == [5] + [6] * 31
        bits = heads[0, 64:].view(32, 8)
        assert bits[5].tolist() == [0b11001, 0, 0, 0b10, 0, 0, 0, 0] and bits[3, 0] == 1 and bits.count_nonzero() == 3
        assert values.tolist() == [5.0, 1.0, 2.0, 3.0, 4.0, 6.0, 0.0, 0.0]
        assert heads[3, 64:].view(32, 8)[0].tolist() == [0, 32, 0, 0, 0, 0, 0, 0]
        assert not heads[1:3, 64:].any() and heads[3, 64:].count_nonzero() == 1


@needs_triton
def test_a_chunk_of_twos_by_hand():
    weight = torch.zeros(9, 129).half()
    weight[1, 9] = 1.0  # lane 4 · 1 + 1, first tile, bit 0
    weight[8, 8], weight[8, 9] = 2.0, 3.0  # lane 1, row g + 8: bit 1
    weight[1, 47] = 4.0  # lane 4 + 1, pair 1, second tile: tile 3, bit 2
    weight[0, 128], weight[8, 128] = 5.0, 6.0  # the second chunk, which begins at the sixth value
    (starts, heads, values), _, longest = packed(CSR.from_dense(weight), 2)
    assert longest == 6 and starts.tolist() == [0, 6, 10] and heads.shape == (2, 192)
    begins = heads[:, :64].contiguous().view(torch.int16)
    assert begins.tolist() == [[0] * 2 + [2] * 4 + [6] * 26, [6] + [10] * 31]
    words = heads[0, 64:].view(torch.int32)
    assert words[1] == 2 and words[5] == 1 + (1 << 4 * 3 + 2) and words.count_nonzero() == 2
    assert values.tolist() == [2.0, 3.0, 0.0, 1.0, 0.0, 4.0, 5.0, 0.0, 6.0] + [0.0] * 7  # room for twos of each


@needs_triton
@pytest.mark.parametrize("grain", [1, 2])
@pytest.mark.parametrize("zeros", [0.0, 0.5, 0.9, 1.0])
def test_a_weight_comes_back(zeros, grain):
    from sparsecomp.lowering.sparse.bitmap_linear import unpacked

    weight = pruned(37, 600, zeros)
    matrix = CSR.from_dense(weight)
    matrix.values[::5] = 0.0  # stored all the same
    row, column, values = unpacked(*packed(matrix, grain)[0], 600, grain)
    found = CSR.from_dense(torch.zeros(37, 600).index_put((row, column), torch.tensor(1.0)))
    assert torch.equal(found.col, matrix.col) and torch.equal(found.crow, matrix.crow)
    assert torch.equal(torch.zeros(37, 600).half().index_put((row, column), values), matrix.to_dense())


@needs_triton
def test_the_pattern_decides_what_is_stored():
    """A zero that is stored is a value, and of other values in the same places the rest stays."""
    matrix = CSR.from_dense(pruned(20, 256))
    matrix.values[::3] = 0.0
    starts, heads, values = packed(matrix)[0]
    others, other_heads, other = packed(CSR(matrix.crow, matrix.col, matrix.values + 1.0, matrix.shape))[0]
    assert torch.equal(starts, others) and torch.equal(heads, other_heads)
    assert torch.equal(values[: matrix.nnz] + 1.0, other[: matrix.nnz])


@needs_triton
@pytest.mark.parametrize("grain", [1, 2])
@pytest.mark.parametrize(("before", "behind"), [(0, 3), (2, 0), (2, 3)])
def test_spare_capacity_is_not_stored(before, behind, grain):
    """Beside the entries of the pointers lies anything, such as columns that there are not."""
    from sparsecomp.lowering.sparse.bitmap_linear import BitmapChunks, longest_chunk, unpacked

    weight = pruned(32, 264)
    matrix, columns, junk = CSR.from_dense(weight), torch.tensor([7, 9999, 263]).int(), torch.full((3,), 9.0).half()
    values = torch.cat([junk[:before], matrix.values, junk[:behind]])
    arrays = matrix.crow + before, torch.cat([columns[:before], matrix.col, columns[:behind]])
    layout = Layout("csr", (1, 1), (32, 264))
    longest = longest_chunk(arrays, layout, grain)
    assert longest == longest_chunk((matrix.crow, matrix.col), layout, grain)
    copy = BitmapChunks(layout.written(), grain)(values, *arrays)
    assert copy[2].numel() == -(-grain * values.numel() // 8) * 8
    row, column, found = unpacked(*copy, 264, grain)
    assert torch.equal(torch.zeros(32, 264).half().index_put((row, column), found), weight)


def walked(
    weight: Tensor, x: Tensor, grain: int, warps: int, depth: int, strips: int, index: str = "int32", longest: int = 0,
    group: tuple[int, int] = (0, 1),
) -> np.ndarray:  # fmt: skip
    """weight @ x.mT (m, n) by the PTX of the kernel.

    Args:
        group: which weight of how many that a program's warps divide among them.
    """
    from sparsecomp.formats.lanes import CHUNK, head_bytes
    from sparsecomp.lowering.sparse.kernels.bitmap_walk import ring_bytes, walk

    (starts, heads, values), _, longest = packed(CSR.from_dense(weight), grain, longest)
    starts, head = starts.to(getattr(torch, index)), head_bytes(grain)
    (m, k), n, slot, halves = weight.shape, x.shape[0], head + -(-longest // 8) * 16 + 16, -(-x.shape[0] // 8)
    all_strips, turns, sums = -(-m // 16), -(-k // CHUNK), 4 * strips * halves
    text = walk("float16", index, grain, head, warps, group[1], depth, strips, halves, slot, k % CHUNK == 0)
    found = np.zeros((16 * (all_strips + strips), 8 * halves))
    own = range(warps * group[0] // group[1], warps * (group[0] + 1) // group[1])
    for block, number in itertools.product(range(-(-all_strips // strips)), own):
        tensors = [one.numpy() for one in (starts, heads, values, x)]
        numbers = (1 << 40, 2 << 40, 3 << 40, 4 << 40, block * strips, all_strips - 1, turns, k, n)
        operands = {f"${sums * (1 + place)}": value for place, value in enumerate(numbers)}
        given = Warp(tensors, ring_bytes(warps, depth, strips, slot), number).run(text, operands)
        for strip, half, register in itertools.product(range(strips), range(halves), range(4)):
            rows = 16 * (block * strips + strip) + LANES // 4 + 8 * (register // 2)
            value = given[f"${4 * (strip * halves + half) + register}"]
            found[rows, 8 * half + 2 * (LANES % 4) + register % 2] += value
    assert not np.nan_to_num(found[:, n:]).any()
    return found[:m, :n]


@needs_triton
@pytest.mark.parametrize(
    ("size", "rows", "zeros", "warps", "depth", "strips"),
    [((37, 512), 3, 0.5, 2, 2, 1), ((33, 648), 11, 0.7, 2, 3, 2), ((16, 256), 16, 0.0, 1, 2, 1),
     ((20, 64), 1, 0.98, 2, 2, 1), ((16, 1408), 1, 0.9, 1, 4, 2)],
)  # fmt: skip
@pytest.mark.parametrize("grain", [1, 2])
def test_what_a_warp_does_is_the_product(grain, size, rows, zeros, warps, depth, strips):
    weight, x = pruned(*size, zeros), torch.randn(rows, size[1], generator=torch.Generator().manual_seed(rows)).half()
    exact = weight.double().numpy() @ x.double().numpy().T
    found = walked(weight, x, grain, warps, depth, strips)
    assert np.linalg.norm(found - exact) <= 1e-6 * np.linalg.norm(exact)
    if size[1] < 512:
        assert np.array_equal(walked(weight, x, grain, warps, depth, strips, "int64"), found)


@needs_triton
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize(("grain", "warps", "strips", "rows"), [(1, 4, 1, 3), (2, 2, 2, 11), (2, 8, 1, 1)])
def test_half_of_the_warps_take_all_turns_of_a_weight(grain, warps, strips, rows, which):
    weight, x = pruned(40, 648), torch.randn(rows, 648, generator=torch.Generator().manual_seed(rows)).half()
    exact = weight.double().numpy() @ x.double().numpy().T
    found = walked(weight, x, grain, warps, 2, strips, group=(which, 2))
    assert np.linalg.norm(found - exact) <= 1e-6 * np.linalg.norm(exact)


@needs_triton
@pytest.mark.parametrize("strips", [1, 2])
def test_a_warp_of_a_chunk_that_is_too_long_has_no_sums(strips):
    """And reads none of it that was not copied; other strips have theirs."""
    weight, x = pruned(64, 384, 0.9), torch.randn(3, 384, generator=torch.Generator().manual_seed(1)).half()
    weight[40, 128:256] = 1.0  # the third strip's second turn
    exact = weight.double().numpy() @ x.double().numpy().T
    _, _, longest = packed(CSR.from_dense(weight))
    found = walked(weight, x, 1, 1, 2, strips, longest=longest - 70)
    spoilt = np.zeros(64, bool)
    spoilt[32 : 48 if strips == 1 else 64] = True
    assert np.isnan(found[spoilt]).all()
    assert np.linalg.norm((found - exact)[~spoilt]) <= 1e-6 * np.linalg.norm(exact)


def product(matrix: SparseMatrix, x: Tensor, grain: int = 1, longest: int = 0, **finish) -> dict[str, Tensor]:
    """x @ matrix.T by the kernel on a GPU, in the usual configuration and in one of two strips."""
    from sparsecomp.lowering.cache.signature import device_of
    from sparsecomp.lowering.launch.epilogue import output_of
    from sparsecomp.lowering.sparse.bitmap_linear import BITMAP_LINEAR, BitmapLinear

    device = torch.device("cuda", 0)
    copy, _, longest = packed(matrix.to_device(device), grain, longest)
    (n, k), m, x = x.shape, matrix.shape[0], x.to(device)
    bias, residual = (None if one is None else one.to(device) for one in map(finish.get, ("bias", "residual")))
    residual = None if residual is None else residual.mT
    out = torch.empty(n, m, dtype=x.dtype, device=device).mT
    described = output_of(out, bias, "row", residual, finish.get("activation", "none"), 1.0)
    problem = BitmapLinear(m, k, n, matrix.values.numel(), grain, longest, str(x.dtype)[6:], "int32", described)
    found: dict[str, Tensor] = {}
    for one in BITMAP_LINEAR.candidates(problem, device_of(device)):
        kind = f"{one.config['STRIPS']} strips"
        if kind not in found:
            out.fill_(math.nan)
            one.template.prepare(problem, one.config)(*copy, x, bias, residual, out)
            found[kind] = out.mT.cpu().clone()
    assert found
    return found


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("rows", [1, 8, 13])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("size", "activation"), [((37, 1024), "none"), ((1, 8), "relu"), ((20, 1104), "gelu"), ((65, 4096), "silu")]
)  # fmt: skip
def test_kernels_are_the_dense_layer(rows, dtype, size, activation):
    weight, random = pruned(*size, 0.6, dtype), torch.Generator().manual_seed(rows)
    x, residual = (torch.randn(rows, n, generator=random).to(dtype) for n in size[::-1])
    bias = torch.randn(size[0], generator=random).to(dtype)
    exact = F.linear(x.double(), weight.double(), bias.double()) + residual.double()
    exact = exact if activation == "none" else getattr(F, activation)(exact)
    matrix = CSR.from_dense(weight)
    found = {
        (grain, name): one for grain in (1, 2)
        for name, one in product(matrix, x, grain, bias=bias, residual=residual, activation=activation).items()
    }  # fmt: skip
    for name, one in found.items():
        assert (one.double() - exact).norm() <= TOLERANCE[dtype] * exact.norm(), name


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("grain", [1, 2])
def test_nothing_is_multiplied_where_nothing_is_stored(grain, rows):
    """An infinite or missing input reaches the rows that store something there, be it zero, and no others."""
    weight = pruned(40, 1104)
    matrix = CSR.from_dense(weight)
    matrix.values[::50] = 0.0
    x = torch.randn(rows, 1104, generator=torch.Generator().manual_seed(1)).half()
    x[0, 7], x[-1, 1050], x[-1, 0] = math.inf, math.nan, -math.inf
    exact = torch.where(weight != 0, x.double()[:, None] * matrix.to_dense().double(), 0.0).sum(-1)
    assert exact.isnan().any() and exact.isfinite().any()
    for name, found in product(matrix, x, grain).items():
        torch.testing.assert_close(found.double(), exact, rtol=2e-3, atol=5e-2, equal_nan=True, msg=name)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("grain", "longest"), [(1, 350), (2, 160)])
def test_a_weight_whose_chunks_are_too_long_is_multiplied_all_the_same(grain, longest):
    weight, x = pruned(40, 1104, 0.2), torch.randn(3, 1104, generator=torch.Generator().manual_seed(1)).half()
    exact = x.double() @ weight.double().mT
    for name, found in product(CSR.from_dense(weight), x, grain, longest).items():
        assert (found.double() - exact).norm() <= 1e-3 * exact.norm(), name


@pytest.mark.slow(reason="compiles in a process of its own")
def test_kernels_compile_for_a_gpu_that_is_not_there():
    """As they rely on: their rings begin where shared memory does, and no register is spilled."""
    printed = compile_in_subprocess(
        """
        import re
        from triton.experimental.gluon._runtime import GluonASTSource

        from sparsecomp.formats.lanes import CHUNK, TILES, UNIT, head_bytes
        from sparsecomp.lowering.sparse.kernels.bitmap_pair import bitmap_pair_kernel
        from sparsecomp.lowering.sparse.kernels.bitmap_siblings import bitmap_siblings_kernel
        from sparsecomp.lowering.sparse.kernels.bitmap_tiles import bitmap_tiles_kernel
        from sparsecomp.lowering.sparse.kernels.bitmap_walk import ring_bytes

        def check(kernel, more, dtype, index, grain, strips, halves, warps, whole, none=()):
            kind = {"float16": "*fp16", "bfloat16": "*bf16"}[dtype]
            own = {"starts_ptr": "*i" + index[3:], "heads_ptr": "*u8"}
            types = {name: next((one for end, one in own.items() if name.endswith(end)), kind)
                     if name.endswith("_ptr") else "i32" for name in kernel.arg_names} | {"scale": "fp32"}
            constants = dict(
                ACTIVATION="silu", DTYPE=dtype, INDEX=index, GRAIN=grain, TILES=TILES, CHUNK=CHUNK,
                HEAD=head_bytes(grain), UNIT=UNIT, SLOT=1920, WHOLE=whole, HALVES=halves, STRIPS=strips,
                DEPTH=2, num_warps=warps, **more) | dict.fromkeys(none)
            built = build(kernel, types, constants, 90, GluonASTSource, ("K", "M", "second_M", "third_M", "out_n"),
                          num_warps=warps, maxnreg=64 * strips)
            ptx, rings = built.asm["ptx"], ring_bytes(warps, 2, strips, 1920)
            assert ptx.count("mma.sync") == TILES * strips * halves and ptx.count("cp.async.bulk") == 6 * strips
            assert built.metadata.shared >= -(-rings // 128) * 128 + 128
            before = ptx[: ptx.index("mbarrier.init")]
            (at,) = {int(one) for one in re.findall(r"(?:stmatrix|st\\.shared).*?\\[%r\\d+(?:\\+(\\d+))?\\]", before)}
            print(at - rings)

        for case in (("float16", "int32", 1, 1, 1, 4, True), ("bfloat16", "int64", 2, 2, 2, 2, False),
                     ("float16", "int32", 1, 1, 2, 8, True)):
            check(bitmap_tiles_kernel, {"BIAS_ROWS": True}, *case)
        for case in (("float16", "int32", 2, 1, 1, 4, True), ("bfloat16", "int64", 1, 2, 2, 8, False)):
            check(bitmap_pair_kernel, {}, *case)
            check(bitmap_siblings_kernel, {}, *case)
        third = [name for name in bitmap_siblings_kernel.arg_names if name.startswith("third") and name != "third_M"]
        check(bitmap_siblings_kernel, {}, "float16", "int32", 2, 1, 1, 2, True, none=["bias_ptr", *third])
        """
    )
    # the store that keeps the rings is the line behind them
    assert all(0 <= int(line) < 128 for line in printed.split())


@needs_triton
@pytest.mark.parametrize(
    ("kind", "grain", "rows", "frozen", "found"),
    [(CSR, 1, (2,), True, True), (NARROW, 1, (2, 4), True, True), (CSR, 2, (16,), True, True),
     (CSR, 1, (1,), False, False)],
)  # fmt: skip
def test_a_layer_that_is_promised_to_stay_is_multiplied_by_a_bitmap(monkeypatch, kind, grain, rows, frozen, found):
    """As for an H200, run op by op on a CPU; the layer is too small for the estimate."""
    from sparsecomp.passes.sparse import bitmap

    always = Decision("bitmap_tiles", "asked for", {"bitmap_tiles": 1e-9, "dense": 1e-3}), grain
    monkeypatch.setattr(bitmap, "decide", lambda *operands: always)
    torch.manual_seed(0)
    model, x = SiluLayer(kind.from_dense(pruned(100, 264))), torch.randn(*rows, 264).half()
    out, report, code = rewritten_for("h200", model, x, frozen=frozen)
    (site,) = [one for one in report.sites if one.rule == "sparse_linear"]
    assert ("bitmap_linear" in code) == (site.implementation == "bitmap copy") == found
    assert (f"a bitmap with the values is kept, {0.0218 if grain == 1 else 0.0346} MiB" in site.reason) == found
    exact = model.exact(x)
    assert out.shape == exact.shape and (out - exact).norm() <= 1e-3 * exact.norm()


MEASURED = json.loads((RESULTS / "few_rows.json").read_text())["result"]
"""Layers of an H200, float16."""
BITMAPS = [row for row in MEASURED if "bitmap" in row["ms"]]
ODD = ((28672, 8192, 1, 0.9), (4096, 11008, 8, 0.5), (11008, 4096, 2, 0.5))
"""Where twos took less time than the fit says, NARROW or a bit a place being chosen, or a bit a place more."""


def name_of(row: dict[str, Any]) -> str:
    """For the test's name."""
    return " ".join(map(str, row["layer"].values()))


def layer_of(row: dict[str, Any], format: str = "narrow") -> Product:
    """The layer, of which a copy may be kept."""
    m, k, rows, zeros = row["layer"].values()
    nnz = round(m * k * (1 - zeros))
    layout = Layout(format, (0, nnz) if format == "bitmap" else (1, 1), (m, k))
    return Product(
        torch.device("cuda"), layout, rows, 1, nnz, torch.float16, True, False, False, "none", "", constant=True,
        target=target_named("h200"),
    )  # fmt: skip


@needs_triton
@pytest.mark.parametrize("stored", ["NARROW", "BITMAP"])
@pytest.mark.parametrize("row", MEASURED, ids=name_of)
def test_the_estimates_choose_what_was_measured_to_be_fastest(row, stored):
    """Of cuBLAS, what is stored and bitmaps; or what was slower by little more than timings spread."""
    from sparsecomp.passes.cost.bitmap_linear import decide as by_bitmap

    product = layer_of(row, stored.lower())
    offered = {"dense", stored, *(() if stored == "BITMAP" else ("bitmap",)), "bitmap of twos"}
    ms = {name: time for name, time in row["ms"].items() if name in offered}
    rivals = decide(product)
    bitmap = by_bitmap(product, rivals)
    if bitmap is not None:
        chosen = {1: "bitmap", 2: "bitmap of twos"}[bitmap[1]]
    else:
        chosen = "dense" if rivals.dense else stored
    lost = 1.1 if tuple(row["layer"].values()) in ODD else 1.06
    assert ms[chosen] <= lost * min(ms.values()), chosen


@needs_triton
@pytest.mark.parametrize("grain", [1, 2])
@pytest.mark.parametrize("row", BITMAPS, ids=name_of)
def test_the_estimate_is_what_was_measured(row, grain, monkeypatch):
    from sparsecomp.passes.cost import bitmap_linear

    monkeypatch.setattr(bitmap_linear, "OFFERED", (grain,))
    product, us = layer_of(row), 1e3 * row["ms"]["bitmap" if grain == 1 else "bitmap of twos"]
    found = bitmap_linear.decide(product, Decision("dense", "", {"dense": 2e-6 * us}))
    assert found is not None and found[0].implementation == "bitmap_tiles" and found[1] == grain
    assert 0.87 < found[0].seconds["bitmap_tiles"] / us * 1e6 < 1.15
    if grain == 1:  # what is stored is read by the same kernel
        ours = decide(layer_of(row, "bitmap")).seconds["bitmap_tiles"]
        assert ours == found[0].seconds["bitmap_tiles"] and 0.87 < 1e3 * ours / row["ms"]["BITMAP"] < 1.15
    assert bitmap_linear.decide(product, Decision("dense", "", {"dense": 0.7e-6 * us})) is None


@needs_triton
@pytest.mark.parametrize("changes", [{"n": 17}, {"dtype": torch.float32}, {"constant": False}, {"linear": False}])
def test_other_layers_keep_no_bitmap(changes):
    from sparsecomp.passes.cost.bitmap_linear import decide as by_bitmap

    slow = Decision("dense", "", {"dense": 1.0})
    product = layer_of(MEASURED[0])
    assert by_bitmap(product, slow) is not None and by_bitmap(product._replace(**changes), slow) is None


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("rows", [1, 4, 16, 40])
@pytest.mark.parametrize("grain", [1, 2])
def test_in_a_cuda_graph(grain, rows):
    from sparsecomp.ops.sparse.bitmap_linear import bitmap_linear

    weight, x = pruned(1000, 2504), torch.randn(rows, 2504).half().cuda()
    values, arrays, layout = stored_by_rows(CSR.from_dense(weight.cuda()))
    operands = packed(CSR.from_dense(weight.cuda()), grain)
    graph, result = graph_of(lambda: bitmap_linear(x, values, list(arrays), layout.written(), *operands))
    x.copy_(x.roll(1, 1))
    graph.replay()
    torch.cuda.synchronize()
    exact = F.linear(x.double(), weight.cuda().double())
    assert (result - exact).norm() <= 1e-3 * exact.norm()


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("kind", [CSR, NARROW])
def test_compiled_layers_follow_their_weights(kind):
    torch.compiler.reset()
    model = SiluLayer(kind.from_dense(pruned(8192, 4096))).cuda()
    compiled = torch.compile(model, backend="sparsecomp", options={"frozen": True, "mode": "reduce-overhead"})
    with torch.no_grad():
        for step in range(4):
            x = torch.randn(2, 4096, device="cuda").half()
            exact = model.exact(x)
            assert (compiled(x) - exact).norm() <= 2e-3 * exact.norm()
            if step == 1:
                model.layer.values.mul_(2)
            if step == 2 and kind is CSR:  # another pattern, written into the same memory, with a chunk that is longer
                ends = model.layer.pointers[:33].tolist()
                for begin, end in itertools.pairwise(ends):
                    model.layer.indices[begin:end] = torch.arange(end - begin, device="cuda")
    report = sparsecomp.last_report()
    assert report is not None
    (site,) = [one for one in report.sites if one.rule == "sparse_linear"]
    assert site.implementation == "bitmap copy"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])])
@pytest.mark.parametrize("shape", [(3, 64), (2, 2, 64), (40, 64), (0, 64)])
@needs_triton
def test_the_operator_takes_any_rows(device, shape):
    from sparsecomp.ops.sparse.bitmap_linear import bitmap_linear

    weight = pruned(20, 64)
    values, arrays, layout = stored_by_rows(CSR.from_dense(weight).to_device(device))
    x, residual, bias = torch.randn(shape).half(), torch.randn(*shape[:-1], 20).half(), torch.randn(20).half()
    given, operands = [one.to(device) for one in (x, bias, residual)], packed(CSR.from_dense(weight).to_device(device))
    found = bitmap_linear(
        given[0], values, list(arrays), layout.written(), *operands, *given[1:], activation="relu"
    ).cpu()  # fmt: skip
    exact = F.relu(F.linear(x.double(), weight.double(), bias.double()) + residual.double())
    assert found.shape == exact.shape and (found - exact).norm() <= 1e-3 * exact.norm()


@needs_triton
def test_operands_that_do_not_belong_together_are_refused():
    from sparsecomp.lowering.sparse.bitmap_linear import launch_bitmap_linear

    copy, *how = packed(CSR.from_dense(pruned(20, 64)))
    x, nnz = torch.zeros(1, 64).half(), int((pruned(20, 64) != 0).sum())
    starts, heads, values = copy
    for one, many in (
        ([starts[1:], heads, values], nnz), ([starts, heads[:1], values], nnz), ([starts, heads, values[8:]], nnz),
        (copy, nnz + 99),
    ):  # fmt: skip
        with pytest.raises(FormatError, match="is none of"):
            launch_bitmap_linear(x, one, 20, many, *how, None, None, "none")


@needs_triton
def test_a_weight_that_is_stored_as_a_bitmap_is_its_own_copy():
    """Whatever the number of its values; copies have room for eights."""
    from sparsecomp.lowering.sparse.bitmap_linear import checked_copy

    matrix = BITMAP.from_dense(pruned(20, 64))
    arrays, nnz = list(matrix.arrays.values()), matrix.nnz
    found = checked_copy(arrays, 20, 64, nnz, 1)
    assert nnz % 8 and all(one is other for one, other in zip(found, arrays, strict=True))
    with pytest.raises(FormatError, match="is none of"):
        checked_copy(arrays, 20, 64, nnz + 1, 1)
