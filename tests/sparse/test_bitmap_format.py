"""Weights that are stored as bitmaps: what their arrays say, their kernels, and what a compiled layer runs by."""

import math

import pytest
import torch
import torch.nn.functional as F
from compile_kernel import compile_in_subprocess
from kernel_devices import KERNEL_DEVICES, needs_triton
from rewriting import rewritten_for
from silu_layer import SiluLayer
from torch import Tensor

import sparsecomp
from sparsecomp.errors import FormatError
from sparsecomp.formats import BITMAP, COO, CSR, SparseMatrix
from sparsecomp.lowering.tuning.ceilings import target_named
from sparsecomp.nn import SparseLinear
from sparsecomp.passes.cost.sparse import Product, decide
from sparsecomp.reference.patterns import Layout, stored_by_rows

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
SHAPES = ((37, 300), (16, 128), (1, 1), (5, 520))


def pruned(rows: int, cols: int, zeros: float = 0.7, dtype: torch.dtype = torch.float16) -> Tensor:
    """A weight with this share of zeros."""
    random = torch.Generator().manual_seed(rows + cols)
    kept = torch.rand(rows, cols, generator=random) >= zeros
    return (torch.randn(rows, cols, generator=random) * kept).to(dtype)


def test_a_bitmap_by_hand():
    weight = torch.zeros(17, 136)
    weight[1, 8] = 1.0  # lane 4 · 1 + 1, first tile, bit 0
    weight[9, 9] = 2.0  # the same lane, row g + 8: bit 3
    weight[1, 10] = 3.0  # the third column: bit 4
    weight[1, 45] = 4.0  # lane 4 + 1, pair 1, second tile: tile 3, bit 1
    weight[0, 24] = 5.0  # lane 3
    weight[16, 135] = 6.0  # second strip and turn: lane 0, second tile, bit 5
    matrix = BITMAP.from_dense(weight)
    assert matrix.starts.tolist() == [0, 5, 5, 5, 6] and matrix.heads.shape == (4, 320)
    assert matrix.values.tolist() == [5.0, 1.0, 2.0, 3.0, 4.0, 6.0]
    begins = matrix.heads[:, :64].contiguous().view(torch.int16)
    # from the multiple of eight before the chunk's first value
    assert begins.tolist() == [[0] * 4 + [1] * 2 + [5] * 26, [5] * 32, [5] * 32, [5] + [6] * 31]
    bits = matrix.heads[:, 64:].view(4, 32, 8)
    assert bits[0, 5].tolist() == [0b11001, 0, 0, 0b10, 0, 0, 0, 0] and bits[0, 3, 0] == 1 and bits[3, 0, 1] == 32
    assert bits.count_nonzero() == 4
    assert torch.equal(matrix.to_dense(), weight)
    # where a chunk begins a whole number of eights later, lanes begin where they did
    more = BITMAP.from_dense(torch.cat([torch.ones(16, 136), weight]))
    assert torch.equal(more.heads[2:], matrix.heads) and more.starts[2:].tolist() == [2176, 2181, 2181, 2181, 2182]


def spoilt(**changed: Tensor) -> SparseMatrix:
    good = BITMAP.from_dense(pruned(20, 300).float())
    return BITMAP.from_arrays(**{**good.arrays, **changed}, shape=good.shape)


def test_what_breaks_a_bitmap_is_named():
    good = BITMAP.from_dense(pruned(20, 300).float())
    heads = good.heads
    twice, moved = heads.clone(), heads.clone()
    moved[0, 2] += 1
    place = int((heads[0, 64:] != 255).nonzero()[0])
    twice[0, 64 + place] = 255
    for changed, why in (
        ({"starts": good.starts[1:]}, "starts is"), ({"heads": heads[:, 1:]}, "heads is"),
        ({"heads": heads.int()}, "torch.uint8"), ({"values": good.values[1:]}, "starts must ascend"),
        ({"starts": good.starts.flip(0)}, "starts must ascend"), ({"heads": twice}, "a bit for each of its values"),
        ({"heads": moved}, "where each lane begins"),
    ):  # fmt: skip
        with pytest.raises(FormatError, match=why):
            spoilt(**changed)
    wide = BITMAP.from_dense(torch.ones(16, 128))
    with pytest.raises(FormatError, match=r"must lie in the shape \(15, 128\)"):
        BITMAP.from_arrays(**wide.arrays, shape=(15, 128))


@pytest.mark.parametrize("rows", [9, 40])
@pytest.mark.parametrize("before", [1, 6])
def test_heads_that_begin_at_any_byte(before, rows):
    """Those of a single chunk are contiguous however much of them is taken."""
    dense = pruned(rows, 100).float()
    good = BITMAP.from_dense(dense)
    heads = torch.zeros(good.heads.numel() + before, dtype=torch.uint8)[before:].view(good.heads.shape)
    moved = BITMAP.from_arrays(good.starts, heads.copy_(good.heads), good.values, good.shape)
    assert torch.equal(moved.to_dense(), dense)


@pytest.mark.parametrize("shape", [(2**41, 2**42), (2**61, 2**62)])
def test_more_places_than_can_be_counted_are_refused(shape):
    one = COO.from_arrays(torch.tensor([2**40]), torch.tensor([2**41]), torch.ones(1), shape)
    with pytest.raises(FormatError, match="to CSR"):
        one.to(BITMAP)


def test_it_takes_fewer_bytes_than_narrow_columns():
    dense = pruned(1024, 1024)
    matrix = BITMAP.from_dense(dense)
    assert matrix.nbytes == 2 * matrix.nnz + 512 * 320 + 4 * 513
    assert matrix.nbytes < 0.40 * dense.nbytes


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_places_one_by_one(shape, index, device):
    from sparsecomp.lowering.sparse.bitmap_places import csr_matrix, read_dense, written_dense

    dense = pruned(*shape, 0.6, torch.float32)
    values, arrays, layout = stored_by_rows(BITMAP.from_dense(dense, index_dtype=index).to_device(device))
    assert torch.equal(written_dense(values, arrays, layout).cpu(), dense)
    for lying in (dense.to(device), dense.mT.contiguous().to(device).mT):
        out = torch.full_like(values, math.nan)
        read_dense(lying, arrays, layout, out)
        assert torch.equal(out, values)
    right = CSR.from_dense(dense, index_dtype=index)
    stored, (pointers, columns), found = csr_matrix(torch.stack([values, -values]), arrays, layout)
    assert torch.equal(stored.cpu(), torch.stack([right.values, -right.values]))
    assert torch.equal(pointers.cpu(), right.crow) and torch.equal(columns.cpu(), right.col)
    assert (found.format, found.block, found.shape) == ("csr", (1, 1), shape)


@pytest.mark.slow(reason="compiles for two GPUs in a process of its own")
def test_kernels_of_places_compile_for_gpus_that_are_not_there():
    compile_in_subprocess(
        """
        from sparsecomp.lowering.sparse.kernels import bitmap_places

        types = dict.fromkeys("M K turns dense_m dense_k".split(), "i32") | dict(
            starts_ptr="*i32", heads_ptr="*u8", values_ptr="*fp16", dense_ptr="*fp16", counts_ptr="*i32",
            ends_ptr="*i32", columns_ptr="*i32", order_ptr="*i32")
        for capability in (80, 90):
            for name in ("write", "read", "count", "order"):
                kernel = getattr(bitmap_places, f"{name}_bitmap_kernel")
                build(kernel, types, dict(STRIP=16, CHUNK=128, HEAD=320), capability, num_warps=4)
        """
    )


@needs_triton
@pytest.mark.parametrize("longest", [0, 64, 2048])
def test_the_problem_of_a_stored_bitmap(longest):
    """Without a longest chunk it is that of a weight whose zeros lie at random places."""
    from sparsecomp.lowering.sparse.bitmap_linear import random_longest
    from sparsecomp.passes.cost.sparse import problem_of

    layout = Layout("bitmap", (longest, 135270), (1100, 410))
    product = Product(torch.device("cuda"), layout, 4, 1, 135270, torch.float16, True, True, False, "silu", "")
    (operation,), problem = problem_of(product)
    assert operation.name == "bitmap_linear"
    assert (problem.m, problem.k, problem.n, problem.nnz) == (1100, 410, 4, 135270)
    assert problem.grain == 1 and problem.longest == (longest or random_longest(1100, 410, 135270, 1))


def test_the_layout_has_room_for_the_longest_chunk():
    weight = pruned(40, 300, 0.9)
    weight[16:32, 128:256] = 1.0
    _, _, layout = stored_by_rows(BITMAP.from_dense(weight))
    assert layout.block == (2048, int(weight.count_nonzero()))
    assert Layout.read(layout.written()) == layout
    weight[16:32, 128:256] = 0.0
    weight[16, 128:130] = 1.0
    count = max(int(part.count_nonzero()) for strip in weight.split(16) for part in strip.split(128, 1))
    assert stored_by_rows(BITMAP.from_dense(weight))[2].block[0] == -(-count // 64) * 64


def test_a_layer_takes_a_checkpoint_of_another_pattern():
    """Of another number of values, and with a chunk that is longer."""
    layer, other = (SparseLinear(BITMAP.from_dense(pruned(33, 264, zeros))) for zeros in (0.9, 0.2))
    assert layer.weight.pattern.layout.block[0] < other.weight.pattern.layout.block[0]
    layer.load_state_dict(other.state_dict())
    assert layer.weight.pattern.layout == other.weight.pattern.layout
    x = torch.randn(3, 264).half()
    assert torch.equal(layer(x), other(x))


def test_a_layer_trains_as_the_dense_one():
    dense = pruned(20, 40, 0.5, torch.float64)
    layer = SparseLinear(BITMAP.from_dense(dense), torch.zeros(20, dtype=torch.float64))
    weight, x = dense.clone().requires_grad_(), torch.randn(6, 40, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    layer(x).pow(2).sum().backward()
    F.linear(y := x.detach().requires_grad_(), weight).pow(2).sum().backward()
    assert x.grad is not None and y.grad is not None and weight.grad is not None and layer.values.grad is not None
    torch.testing.assert_close(x.grad, y.grad)
    at = stored_by_rows(BITMAP.from_dense((dense != 0).double() * weight.grad + (dense != 0) * 1e3))[0] - 1e3
    torch.testing.assert_close(layer.values.grad, at)
    optimizer.step()
    torch.testing.assert_close(layer.weight.to_dense(), (dense - 0.1 * weight.grad) * (dense != 0))


# -- what the compiler makes of it


def layer_of(m: int, k: int, rows: int, zeros: float = 0.7, **how: bool) -> Product:
    """For an H200."""
    nnz = round((1 - zeros) * m * k)
    return Product(
        torch.device("cuda"), Layout("bitmap", (0, nnz), (m, k)), rows, 1, nnz, torch.float16, True, False, False,
        "none", "", target=target_named("h200"), **how,
    )  # fmt: skip


@needs_triton
@pytest.mark.parametrize(
    ("rows", "how", "chosen"),
    [(1, {}, "bitmap_tiles"), (8, {}, "bitmap_tiles"), (1, {"constant": True}, "bitmap_tiles"), (64, {}, "dense"),
     (16, {"trained": True}, "dense"), (512, {"constant": True}, "dense")],
)  # fmt: skip
def test_who_decides(rows, how, chosen):
    """Many rows take the weight written out, and so does training."""
    assert decide(layer_of(11008, 4096, rows, **how)).implementation == chosen


@needs_triton
def test_a_copy_by_twos_is_a_rival_of_what_is_stored():
    from sparsecomp.passes.cost.bitmap_linear import decide as by_bitmap

    stored = layer_of(11008, 4096, 1, constant=True)
    assert by_bitmap(stored, decide(stored)) is None  # as fast by what is stored, at 70 % zeros
    product = layer_of(11008, 4096, 8, 0.9, constant=True)
    rivals = decide(product)
    found = by_bitmap(product, rivals)
    assert found is not None and found[1] == 2 and found[0].implementation == "bitmap_tiles by twos"
    assert found[0].seconds["bitmap_tiles"] == rivals.seconds["bitmap_tiles"]
    assert by_bitmap(product._replace(constant=False), rivals) is None


@needs_triton
@pytest.mark.parametrize(
    ("rows", "options", "implementation"),
    [((2,), {"frozen": True, "memory": "low"}, "bitmap"), ((2,), {}, "bitmap"), ((40,), {}, "dense"),
     ((40,), {"frozen": True}, "dense copy"), ((40,), {"precision": "exact"}, "bitmap")],
)  # fmt: skip
def test_a_layer_runs_by_what_it_stores(rows, options, implementation):
    """As for an H200, run op by op on a CPU."""
    torch.manual_seed(0)
    model = SiluLayer(BITMAP.from_dense(pruned(8192, 1032)))
    x = torch.randn(*rows, 1032).half()
    out, report, code = rewritten_for("h200", model, x, **options)
    (site,) = [one for one in report.sites if one.rule == "sparse_linear"]
    assert site.implementation == implementation and "BITMAP 8192x1032 at 70.0% sparsity" in site.reason
    assert "inf us" not in site.reason
    # what is kept sparse without a kernel of its own has no gain, and not one of 0
    assert (site.expected_gain is None) == ("precision" in options)
    assert site.expected_gain is None or 0 < site.expected_gain < 10
    exact = model.exact(x)
    assert (out - exact).norm() <= 1e-3 * exact.norm()


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("rows", [1, 8, 13, 40])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_a_layer_is_the_dense_one(rows, dtype, index):
    weight = pruned(1000, 2504, 0.6, dtype)
    layer = SparseLinear(BITMAP.from_dense(weight, index_dtype=index), requires_grad=False).cuda()
    x = torch.randn(rows, 2504, generator=torch.Generator().manual_seed(1)).to(dtype)
    exact = F.linear(x.double(), weight.double())
    found = layer(x.cuda()).cpu()
    assert (found - exact).norm() <= {2: 8e-3, 4: 1e-5}[dtype.itemsize] * exact.norm()
    x[0, 7], x[-1, 50] = math.inf, math.nan
    exact = torch.where(weight != 0, x.double()[:, None] * weight.double(), 0.0).sum(-1)
    torch.testing.assert_close(layer(x.cuda()).cpu().double(), exact, rtol=2e-2, atol=5e-1, equal_nan=True)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("before", [1, 3, 8])
def test_values_and_rows_that_begin_anywhere(before):
    """Views of other tensors, not at a multiple of 16 bytes."""
    from sparsecomp.ops.sparse.dense_weight import stored_to_dense
    from sparsecomp.ops.sparse.linear import sparse_linear

    weight = pruned(200, 1104)
    values, (starts, heads), layout = stored_by_rows(BITMAP.from_dense(weight.cuda()))
    room = torch.randn(values.numel() + before, device="cuda").half()
    moved = room[before:].copy_(values)
    lower = torch.zeros(heads.numel() + before, dtype=torch.uint8, device="cuda")
    shifted = lower[before:].view(heads.shape).copy_(heads)
    x = torch.randn(3 * 1104 + before, device="cuda").half()[before:].view(3, 1104)
    found = sparse_linear(x, moved, [starts, shifted], layout.written())
    exact = F.linear(x.double(), weight.cuda().double())
    assert (found - exact).norm() <= 1e-3 * exact.norm()
    assert torch.equal(stored_to_dense(moved, [starts, shifted], layout.written()).cpu(), weight)
    many = sparse_linear(x.expand(20, 3, 1104), moved, [starts, shifted], layout.written())
    assert (many - exact).norm() <= 1e-3 * math.sqrt(20) * exact.norm()


@pytest.mark.gpu
@needs_gpu
def test_a_chunk_that_is_longer_than_was_said_is_multiplied_all_the_same():
    """Written into the arrays that a compiled layer reads."""
    torch.compiler.reset()
    weight = pruned(8192, 4096)
    model = SiluLayer(BITMAP.from_dense(weight)).cuda()
    compiled = torch.compile(model, backend="sparsecomp", options={"mode": "reduce-overhead"})
    x = torch.randn(2, 4096, device="cuda").half()
    with torch.no_grad():
        for step in range(4):
            exact = model.exact(x)
            assert (compiled(x) - exact).norm() <= 2e-3 * exact.norm()
            if step == 1:  # as many values, all of the first strip's in its first columns
                other = BITMAP.from_dense(_left(weight))
                assert other.values.shape == model.layer.values.shape
                for name in ("starts", "heads", "values"):
                    getattr(model.layer, name).copy_(getattr(other, name))
    report = sparsecomp.last_report()
    assert report is not None
    (site,) = [one for one in report.sites if one.rule == "sparse_linear"]
    assert site.implementation == "bitmap"


def _left(weight: Tensor) -> Tensor:
    """As many values in each row, of the first 16 rows in their first columns."""
    moved = weight.clone()
    order = (weight[:16] == 0).to(torch.uint8).sort(dim=1, stable=True).indices
    moved[:16] = weight[:16].gather(1, order)
    return moved
