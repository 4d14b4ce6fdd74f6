"""Weights written out dense and gradients read at their places: kernels and operators, against index arithmetic."""

import pytest
import torch
from compile_kernel import compile_in_subprocess
from kernel_devices import DEVICES, KERNEL_DEVICES

from sparsecomp import SparseTensor
from sparsecomp.formats import BCSC, BSR, COO, CSC, CSR, NM
from sparsecomp.lowering.cache.signature import device_of
from sparsecomp.lowering.sparse import stored_places
from sparsecomp.lowering.sparse.layer import layer_product, layer_sampled
from sparsecomp.lowering.sparse.stored_places import WRITE_OUT, WriteOut
from sparsecomp.ops.sparse.dense_weight import dense_to_stored, stored_to_dense
from sparsecomp.reference.patterns import Layout, stored_by_rows
from sparsecomp.tensor.index_arrays import IndexArrays

pytestmark = pytest.mark.quick_cases(2)

SHAPES = [(1, 1), (3, 5), (7, 64), (5, 1030), (33, 300)]


def thinned(rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
    """A random matrix with an empty row and a full one, where it has as many."""
    generator = torch.Generator().manual_seed(rows * cols)
    kept = torch.rand(rows, cols, generator=generator) < 0.3
    kept[rows // 2], kept[-1] = False, True
    return (torch.randn(rows, cols, generator=generator) * kept).to(dtype)


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_write_and_read_what_is_stored(shape, dtype, device):
    dense = thinned(*shape, dtype).to(device)
    matrix = CSR.from_dense(dense)
    out = stored_places.write_out(matrix.crow, matrix.col, matrix.values, shape)
    assert torch.equal(out, dense) and out.is_contiguous()
    other = torch.randn(shape, device=device).to(dtype)
    row = torch.repeat_interleave(torch.arange(shape[0], device=device), matrix.crow.diff().long())
    for given in (other, other.mT.contiguous().mT, other.repeat(2, 2)[: shape[0], : shape[1]]):
        found = torch.full_like(matrix.values, float("nan"))
        stored_places.read_at(given, matrix.crow, matrix.col, found)
        assert torch.equal(found, other[row, matrix.col.long()])


@pytest.mark.parametrize("device", KERNEL_DEVICES)
def test_indices_may_be_wider_than_pointers_are(device):
    """The same matrix by launches that are kept: none reads indices of one dtype as those of the other."""
    dense = thinned(5, 40, torch.float32).to(device)
    matrix = CSR.from_dense(dense)
    for indices in (matrix.col.int(), matrix.col.long(), matrix.col.int()):
        pattern = matrix.crow.int(), indices
        assert torch.equal(stored_places.write_out(*pattern, matrix.values, (5, 40)), dense)
        found = torch.full_like(matrix.values, float("nan"))
        stored_places.read_at(dense, *pattern, found)
        assert torch.equal(found, matrix.values)
        x, ones = torch.randn(3, 40, device=device), torch.ones(3, 5, device=device)
        out = layer_product(x, matrix.values, pattern, None, None, Layout("csr", (1, 1), (5, 40)), "none", "")
        torch.testing.assert_close(out, x @ dense.T, rtol=1e-4, atol=1e-4)
        sampled = layer_sampled(ones, x, *pattern, "even")
        torch.testing.assert_close(sampled, x.sum(0)[matrix.col.long()], rtol=1e-4, atol=1e-4)
        copy, seen = torch.zeros_like(dense), torch.zeros(5, dtype=torch.int64, device=device)
        stored_places.refresh(*pattern, matrix.values, copy, seen)
        assert torch.equal(copy, dense)


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize(
    ("shape", "index"), [((5, 1030), torch.int32), ((33, 300), torch.int64), ((2, 5000), torch.int32)]
)
def test_every_configuration_writes_the_same(shape, index, device):
    """From a row that begins anywhere, to the last entry of memory that ends anywhere."""
    dense = thinned(*shape, torch.float32).to(device)
    matrix = CSR.from_dense(dense)
    arrays = (matrix.crow.to(index), matrix.col.to(index), matrix.values)
    problem = WriteOut(*shape, matrix.values.numel(), "float32", str(index)[6:])
    candidates = WRITE_OUT.candidates(problem, device_of(torch.device(device)))
    assert len({candidate.config["ENTRIES"] for candidate in candidates}) > 1
    for candidate in candidates:
        out = torch.full(shape, float("nan"), device=device)
        candidate.template.prepare(problem, candidate.config)(*arrays, out)
        assert torch.equal(out, dense), candidate.config


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize(
    ("format", "layout"),
    [(CSR, {}), (COO, {}), (CSC, {}), (BSR, {"block": (2, 3)}), (BCSC, {"block": (3, 2)}), (NM, {"n": 4, "m": 4})],
)
def test_operators_are_each_others_gradients(format, layout, transpose, device):
    dense = thinned(7, 10, torch.float64)
    weight = SparseTensor(format.from_dense(dense, **layout)).to(device)
    values, pattern = weight.values().requires_grad_(), [*weight.pattern.arrays]
    written = weight.pattern.layout.written()
    flip = transpose != weight.pattern.stored_by_columns(False)
    out = stored_to_dense(values, pattern, written, flip)
    assert out.is_contiguous() and torch.equal(out.cpu(), dense.mT if transpose else dense)
    factor = torch.randn(out.shape, dtype=torch.float64, device=device)
    (found,) = torch.autograd.grad((out * factor).sum(), values)
    stored = weight.with_values(torch.ones_like(values)).to_dense()
    wanted = (factor.mT if transpose else factor) * stored
    torch.testing.assert_close(weight.with_values(found).to_dense(), wanted)
    read = dense_to_stored(factor, pattern, written, flip)
    assert torch.equal(read, found) and read.shape == values.shape
    torch.library.opcheck(torch.ops.sparsecomp.stored_to_dense.default, (values, pattern, written, flip))
    torch.library.opcheck(torch.ops.sparsecomp.dense_to_stored.default, (factor, pattern, written, flip))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize(("before", "behind"), [(0, 2), (1, 0), (2, 1)])
@pytest.mark.parametrize("block", [None, (2, 4)])
def test_spare_capacity_is_neither_written_nor_read(block, before, behind, transpose, device):
    dense = thinned(8, 12, torch.float32).to(device)
    matrix = CSR.from_dense(dense) if block is None else BSR.from_dense(dense, block=block)
    values, (pointers, columns), layout = stored_by_rows(matrix)
    ends = [(columns.new_full((n,), 2), values.new_full((n, *values.shape[1:]), 9.0)) for n in (before, behind)]
    columns, values = (torch.cat([ends[0][i], one, ends[1][i]]) for i, one in enumerate((columns, values)))
    pattern, kept = [pointers + before, columns], slice(before, values.shape[0] - behind)
    out = stored_to_dense(values, pattern, layout.written(), transpose)
    assert torch.equal(out.mT if transpose else out, dense)
    again = dense_to_stored(out, pattern, layout.written(), transpose)
    assert again.shape == values.shape and torch.equal(again[kept], values[kept])


def test_one_element_a_row_keeps_its_shape():
    values, arrays, layout = stored_by_rows(NM.from_dense(torch.eye(4), n=1, m=4))
    found = dense_to_stored(torch.eye(4), list(arrays), layout.written())
    assert torch.equal(found, values) and values.shape == (4, 1)


def test_nothing_stored_is_all_zeros():
    for shape in ((3, 4), (0, 4), (3, 0)):
        values, pattern = IndexArrays.of(CSR.from_dense(torch.zeros(shape)))
        assert torch.equal(stored_to_dense(values, pattern.arrays, pattern.layout.written()), torch.zeros(shape))
        assert dense_to_stored(torch.ones(shape), pattern.arrays, pattern.layout.written()).shape == (0,)


@pytest.mark.slow(reason="builds for a GPU")
@pytest.mark.parametrize("capability", [80, 90])
def test_the_reading_kernel_builds(capability):
    printed = compile_in_subprocess(f"""
        from sparsecomp.lowering.sparse.kernels.stored_places import read_kernel
        signature = dict(dense_ptr="*fp16", crow_ptr="*i32", col_ptr="*i32", out_ptr="*fp16", dense_m="i32",
                         dense_n="i32")
        print(len(build(read_kernel, signature, dict(ENTRIES=256), {capability}, num_warps=4).asm["cubin"]) > 0)
    """)
    assert printed.strip() == "True"
