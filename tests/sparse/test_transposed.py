"""A kept transpose follows every write to a matrix's index arrays, seen by a version counter or not.

What is expected comes from the dense weight that the written arrays describe.
"""

import pytest
import torch
import torch.nn.functional as F
from compile_kernel import compile_in_subprocess
from kernel_devices import DEVICES, KERNEL_DEVICES, graph_of
from margins import Margins
from matrices import of_every_format
from torch import Tensor
from write_matrix import WRITES

from sparsecomp import SparseTensor
from sparsecomp.formats import BCSC, BITMAP, BSR, COO, CSC, CSR, NARROW, NM
from sparsecomp.nn import SparseEmbedding, SparseLinear
from sparsecomp.ops.sparse.dense_weight import stored_to_dense
from sparsecomp.reference.patterns import Layout, kept_transpose, ordered_by_rows, transposed_arrays
from sparsecomp.tensor.index_arrays import IndexArrays

pytestmark = pytest.mark.quick_cases(2)

FORMATS = of_every_format({
    "CSR": (CSR, {}), "CSC": (CSC, {}), "COO": (COO, {}), "BSR": (BSR, {"block": (2, 3)}),
    "BCSC": (BCSC, {"block": (2, 3)}), "NM": (NM, {"n": 2, "m": 4}), "NARROW": (NARROW, {}),
    "BITMAP": (BITMAP, {}),
})  # fmt: skip
BY_FORMAT = pytest.mark.parametrize("format", FORMATS)
ROWS, COLS = 9, 14  # COLS is no multiple of 3 nor 4: blocks and groups reach beyond the shape


def weight(format: str, seed: int) -> Tensor:
    """A dense weight; those of a format store as many entries, in other rows and columns for another seed."""
    random = torch.Generator().manual_seed(seed)
    values = torch.randn(ROWS, COLS, generator=random)
    if format == "NM":
        groups = torch.rand(ROWS, 4, 4, generator=random).topk(2).indices
        return values * torch.zeros(ROWS, 4, 4).scatter_(-1, groups, 1).flatten(1)[:, :COLS]
    height, width = FORMATS[format][1].get("block", (1, 1))
    lines, columns = -(-ROWS // height), -(-COLS // width)
    mask = torch.zeros(lines * columns)
    mask[torch.randperm(lines * columns, generator=random)[: lines * columns // 3]] = 1
    blocks = mask.view(lines, columns).repeat_interleave(height, 0).repeat_interleave(width, 1)
    return values * blocks[:ROWS, :COLS]


def layer_of(format: str, seed: int, device: str = "cpu") -> SparseLinear:
    kind, how = FORMATS[format]
    return SparseLinear(kind.from_dense(weight(format, seed), **how)).to(device)


def step(run, x: Tensor) -> tuple[Tensor, Tensor]:
    leaf = x.detach().requires_grad_()
    out = run(leaf)
    (grad,) = torch.autograd.grad(out.square().sum(), leaf)
    return out.detach(), grad


def agrees(found: tuple[Tensor, Tensor], x: Tensor, dense: Tensor) -> None:
    dense, x = dense.double(), x.detach().cpu().double()
    torch.testing.assert_close(found[0].cpu().double(), x @ dense.mT, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[1].cpu().double(), 2 * (x @ dense.mT) @ dense, rtol=1e-4, atol=1e-4)


@pytest.mark.quick_cases(8)
@pytest.mark.parametrize("way", WRITES)
@BY_FORMAT
@pytest.mark.parametrize("backend", [None, "sparsecomp"])
def test_layers_are_right_after_every_write(backend, format, way):
    layer, x = layer_of(format, 0), torch.randn(5, COLS)
    run = torch.compile(layer, backend=backend) if backend else layer
    agrees(step(run, x), x, weight(format, 0))
    for seed in (1, 2):
        for name, given in layer_of(format, seed).state_dict().items():
            WRITES[way](layer.get_parameter(name) if name == "values" else layer.get_buffer(name), given)
        for _ in range(2):
            agrees(step(run, x), x, weight(format, seed))
        torch.testing.assert_close(layer.weight.matrix.to_dense(), weight(format, seed))
        agrees(step(lambda leaf: F.linear(leaf, layer.weight), x), x, weight(format, seed))


def test_a_compiled_write_is_followed():
    layer, other, x = layer_of("CSR", 0), layer_of("CSR", 1), torch.randn(5, COLS)

    @torch.compile(backend="aot_eager")
    def become(values: Tensor, *arrays: Tensor) -> None:
        for mine, its in zip((layer.values.data, layer.pointers, layer.indices), (values, *arrays), strict=True):
            mine.copy_(its)

    step(layer, x)
    become(other.values.detach(), other.pointers, other.indices)
    agrees(step(layer, x), x, weight("CSR", 1))


@pytest.mark.parametrize("format", ["CSR", "CSC"])
def test_other_numbers_of_entries_within_spare_capacity(format):
    layer, x = layer_of(format, 0), torch.randn(5, COLS)
    layer.reserve(60)
    step(layer, x)
    for part in (1.0, 0.3, 0.0, 0.8):
        dense = weight(format, 3) * (torch.rand(ROWS, COLS) < part)
        other = SparseLinear(FORMATS[format][0].from_dense(dense))
        count = other.values.numel()
        layer.values.detach().numpy()[:count] = other.values.detach()
        layer.indices.numpy()[:count] = other.indices
        layer.pointers.numpy()[:] = other.pointers
        agrees(step(layer, x), x, dense)
        assert layer.weight.matrix.nnz == layer.state_dict()["indices"].numel() == count
        torch.testing.assert_close(layer.weight.matrix.to_dense(), dense)


@BY_FORMAT
def test_a_sparse_tensor_is_right_after_a_write(format):
    kind, how = FORMATS[format]
    sparse, other = (SparseTensor(kind.from_dense(weight(format, seed), **how)) for seed in (0, 1))
    x = torch.randn(5, COLS)
    step(lambda leaf: F.linear(leaf, sparse), x)
    for mine, its in zip((sparse.values(), *sparse.pattern.arrays), (other.values(), *other.pattern.arrays),
                         strict=True):  # fmt: skip
        mine.numpy()[...] = its
    agrees(step(lambda leaf: F.linear(leaf, sparse), x), x, weight(format, 1))


@pytest.mark.parametrize("device", DEVICES)
def test_rows_that_become_longer_are_looked_up_whole(device):
    table = torch.zeros(5, 8)
    table[:, :2] = torch.randn(5, 2)
    layer = SparseEmbedding(CSR.from_dense(table)).to(device)
    index = torch.tensor([[3, 0], [0, 2]], device=device)
    assert torch.equal(layer(index).cpu(), table[index.cpu()])
    layer.pointers.data.copy_(torch.tensor([0, 8, 8, 9, 9, 10]))
    layer.indices.data.copy_(torch.tensor([*range(8), 5, 6]))
    layer(index).square().sum().backward()
    dense = torch.zeros(5, 8)
    values = layer.values.detach().cpu()
    dense[0], dense[2, 5], dense[4, 6] = values[:8], values[8], values[9]
    assert torch.equal(layer(index).cpu(), dense[index.cpu()])
    wanted = torch.tensor([4.0] * 8 + [2.0, 0.0]) * values
    torch.testing.assert_close(layer.values.grad.cpu(), wanted)


def test_looked_up_rows_are_as_their_schema_says():
    values, (pointers, columns), _ = arrays_of("CSR", 0)
    index = torch.tensor([[1, 2], [2, 0]])
    ops = torch.ops.sparsecomp
    torch.library.opcheck(ops.stored_rows.default, (values.requires_grad_(), index, pointers, columns, COLS))
    torch.library.opcheck(ops.stored_rows_gradient.default, (torch.randn(2, 2, COLS), index, pointers, columns, COLS))


# -- the kernels


def arrays_of(format: str, seed: int, index: torch.dtype = torch.int32) -> tuple[Tensor, list[Tensor], Layout]:
    kind, how = FORMATS[format]
    values, pattern = IndexArrays.of(kind.from_dense(weight(format, seed), **how))
    own = [array.to(index) if array.dtype in (torch.int32, torch.int64) else array for array in pattern.arrays]
    return values, own, pattern.layout


def become(mine: list[Tensor], its: list[Tensor]) -> None:
    for one, other in zip(mine, its, strict=True):
        one.data.copy_(other)


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@BY_FORMAT
def test_the_kernel_follows_a_write_and_keeps_what_it_made(format, index, device):
    from sparsecomp.lowering.sparse.transposed import transposed_matrix

    values, own, layout = arrays_of(format, 0, index)
    own = [array.to(device) for array in own]
    kept = list(kept_transpose(own, layout))
    for seed in (0, 1, 1, 2):
        values, given, _ = arrays_of(format, seed, index)
        become(own, given)
        found = transposed_matrix(values.to(device), [*own, *kept], layout)
        pointers, indices, order, _ = kept_transpose(given, layout)
        count = int(pointers[-1])
        assert found.pointers is kept[0] and found.indices is kept[1]
        assert torch.equal(found.pointers.cpu(), pointers) and torch.equal(found.indices[:count].cpu(), indices[:count])
        assert torch.equal(kept[2][:count].cpu(), order[:count])
        moved = ordered_by_rows(values, given, layout)[0].flatten(0, -1 - len(layout.entry))[order.long()]
        assert torch.equal(found.values[:count].cpu(), (moved.mT if layout.entry else moved)[:count])
        assert torch.equal(kept[3].cpu(), kept_transpose(given, layout)[3])


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("width", [3, 1500])
def test_a_batch_of_more_values_than_a_program_moves(width, device):
    from sparsecomp.lowering.sparse.transposed import transposed_matrix

    dense = torch.randn(3, width, generator=torch.Generator().manual_seed(0))
    stored, pattern = IndexArrays.of(CSR.from_dense(dense))
    own = [array.to(device) for array in pattern.arrays]
    kept = [array.to(device) for array in kept_transpose(pattern.arrays, pattern.layout)]
    values = torch.stack([stored, -stored]).to(device)
    own[1].data.copy_(own[1].view(3, width).flip(1).flatten())  # every row the other way round
    found = transposed_matrix(values, [*own, *kept], pattern.layout)
    wanted = dense.flip(1).mT.flatten()
    assert torch.equal(found.values.cpu(), torch.stack([wanted, -wanted]))


INVALID = {
    "columns that are none": ([0, 2, 4, 6], [0, 9, -3, 1, 3, 2]),
    "columns in no order, one of them twice": ([0, 2, 4, 6], [3, 0, 1, 1, 2, 0]),
    "pointers that fall": ([0, 5, 2, 6], [0, 1, 0, 1, 2, 3]),
    "pointers beyond the entries": ([0, 2, 40, 900], [0, 1, 0, 1, 2, 3]),
    "pointers below 0": ([-7, 2, -4, 6], [0, 1, 0, 1, 2, 3]),
    "pointers that begin later": ([2, 3, 3, 5], [0, 1, 2, 0, 1, 3]),
}


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("invalid", INVALID)
def test_arrays_of_no_matrix_lead_nowhere_outside_of_memory(invalid, device):
    """What lies in the arrays and in the shape is transposed, each entry once, in the row that claims it first."""
    from sparsecomp.lowering.sparse.transposed import transposed_matrix

    layout = Layout("csr", (1, 1), (3, 4))
    own = [torch.tensor([0, 2, 4, 6], device=device), torch.tensor([0, 1, 0, 1, 2, 3], device=device)]
    margins = Margins(kept_transpose(own, layout), device)
    kept = margins.inner
    pointers, columns = INVALID[invalid]
    become(own, [torch.tensor(pointers), torch.tensor(columns)])
    values, entries, done = torch.arange(1.0, 7), [], 0
    for row in range(3):
        end = min(pointers[row + 1], 6)
        entries += [(columns[at], row, at) for at in range(max(pointers[row], done), end) if 0 <= columns[at] < 4]
        done = max(done, end)
    for _ in range(2):
        found = transposed_matrix(values.to(device), [*own, *kept], layout)
        count = int(found.pointers[-1])
        ends = found.pointers.tolist()
        triples = [
            (column, int(found.indices[at]), int(kept[2][at]))
            for column in range(4) for at in range(ends[column], ends[column + 1])
        ]  # fmt: skip
        assert count == len(entries) and sorted(triples) == sorted(entries)
        assert torch.equal(found.values[:count].cpu(), values[kept[2][:count].cpu()])
        assert margins.are_untouched()


def test_a_cpu_leaves_out_columns_that_are_none():
    layout = Layout("csr", (1, 1), (3, 4))
    own = [torch.tensor([0, 2, 4, 6]), torch.tensor([0, 1, 0, 1, 2, 3])]
    kept = list(kept_transpose(own, layout))
    own[1].numpy()[:] = [0, 9, -3, 1, 3, 2]
    for _ in range(2):
        pointers, rows, order = transposed_arrays([*own, *kept], layout)
        assert pointers.tolist() == [0, 1, 2, 3, 4] and rows[:4].tolist() == [0, 1, 2, 2]
        assert order[:4].tolist() == [0, 3, 5, 4] and pointers is kept[0]


def test_a_cpu_sees_pointers_that_are_written_alone():
    layout = Layout("csr", (1, 1), (3, 4))
    own = [torch.tensor([0, 2, 4, 6]), torch.tensor([0, 1, 0, 1, 2, 3])]
    kept = list(kept_transpose(own, layout))
    own[0].numpy()[:] = [0, 2, 5, 6]  # the entry in column 2 is one of the second row now
    x, values = torch.randn(5, 3), torch.arange(1.0, 7)
    dense = torch.tensor([[1.0, 2, 0, 0], [3, 4, 5, 0], [0, 0, 0, 6]])
    arguments = (x, values, [*own, *kept], None, None, layout.written(), True, "none", "")
    torch.testing.assert_close(torch.ops.sparsecomp.sparse_linear.default(*arguments), x @ dense)
    assert torch.equal(kept[1], torch.tensor([0, 1, 0, 1, 1, 2]))
    torch.library.opcheck(torch.ops.sparsecomp.sparse_linear.default, arguments)


@pytest.mark.parametrize("device", KERNEL_DEVICES)
def test_a_weight_written_out_by_its_transpose(device):
    values, own, layout = arrays_of("CSR", 0)
    own = [array.to(device) for array in own]
    pattern = [*own, *kept_transpose(own, layout)]
    values, given, _ = arrays_of("CSR", 1)
    become(own, given)
    out = torch.ops.sparsecomp.stored_to_dense.default.direct_cuda(values.to(device), pattern, layout.written(), True)
    assert torch.equal(out.cpu(), weight("CSR", 1).mT)
    assert torch.equal(stored_to_dense(values, given, layout.written()), weight("CSR", 1))


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_kernels_of_looked_up_rows(index, dtype, device):
    ops, table = torch.ops.sparsecomp, (torch.randn(7, 1300) * (torch.rand(7, 1300) < 0.4)).to(dtype)
    table[2] = 0
    matrix = CSR.from_dense(table)
    arrays = [array.to(device) for array in (matrix.crow.to(index), matrix.col.to(index))]
    at = torch.tensor([[6, 2, 0], [6, 6, 3]])
    out = ops.stored_rows.default.direct_cuda(matrix.values.to(device), at.to(device), *arrays, 1300)
    assert torch.equal(out.cpu(), table[at])
    grad = torch.randn(2, 3, 1300).to(dtype)
    found = ops.stored_rows_gradient.default.direct_cuda(grad.to(device), at.to(device), *arrays, 1300)
    dense = torch.zeros(7, 1300, dtype=torch.float64).index_add_(0, at.flatten(), grad.double().flatten(0, 1))
    row = torch.repeat_interleave(torch.arange(7), matrix.crow.diff())
    tolerance = 1e-2 if dtype is torch.bfloat16 else 1e-5
    torch.testing.assert_close(found.cpu().double(), dense[row, matrix.col.long()], rtol=tolerance, atol=tolerance)
    beyond = ops.stored_rows.default.direct_cuda(
        matrix.values.to(device), torch.tensor([7, -1], device=device), *arrays, 1300
    )
    assert beyond.isnan().all()
    ops.stored_rows_gradient.default.direct_cuda(
        grad[0, :2].to(device), torch.tensor([7, -1], device=device), *arrays, 1300
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@BY_FORMAT
@pytest.mark.parametrize("backend", [None, "sparsecomp"])
def test_graphs_of_a_training_step_replay_on_other_patterns(backend, format):
    layer, x = layer_of(format, 0, "cuda"), torch.randn(5, COLS, device="cuda", requires_grad=True)
    run = torch.compile(layer, backend=backend) if backend else layer

    def call() -> tuple[Tensor, ...]:
        out = run(x)
        return out, *torch.autograd.grad(out.square().sum(), x)

    call()
    graph, found = graph_of(call)
    for seed in (0, 1, 1, 2):
        other = layer_of(format, seed, "cuda")
        for name, given in other.state_dict().items():
            getattr(layer, name).data.copy_(given)
        for _ in range(2):
            graph.replay()
            torch.cuda.synchronize()
            agrees(found, x, weight(format, seed))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_large_patterns_are_followed_by_many_programs():
    """More programs than a GPU runs at a time, and rows of more entries than one of them looks at."""
    random = torch.Generator("cuda").manual_seed(0)
    layers = []
    for _ in range(2):
        kept = torch.rand(4096, 4096, device="cuda", generator=random).topk(1500).indices
        dense = torch.zeros(4096, 4096, device="cuda").scatter_(1, kept, torch.rand(kept.shape, device="cuda") + 0.5)
        layers.append((SparseLinear(CSR.from_dense(dense)), dense))
    (layer, first), (other, second) = layers
    x = torch.randn(64, 4096, device="cuda")
    for dense in (first, second, second):
        if dense is second:
            for mine, its in ((layer.values, other.values), (layer.indices, other.indices)):
                mine.data.copy_(its)
        _, grad = step(layer, x)
        wanted = 2 * (x.double() @ dense.double().mT) @ dense.double()
        assert (grad.double() - wanted).norm() < 1e-4 * wanted.norm()


@pytest.mark.slow(reason="builds for a GPU")
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(("index", "own", "group", "width"), [("i32", "i32", 0, 1), ("i64", "i64", 0, 256),
                                                              ("i32", "u8", 4, 1)])  # fmt: skip
def test_the_kernels_build(index, own, group, width, capability):
    printed = compile_in_subprocess(f"""
        from sparsecomp.lowering.sparse.kernels.looked_up import add_rows_kernel, write_rows_kernel
        from sparsecomp.lowering.sparse.kernels.transposed import reorder_kernel
        numbers = dict.fromkeys(("batch", "rows", "cols", "lines", "entries", "width"), "i32")
        kept = dict.fromkeys(("pointers_ptr", "indices_ptr", "source_ptr", "crow_ptr", "col_ptr"), "*{index}")
        own = dict.fromkeys(("own_pointers_ptr", "own_indices_ptr"), "*{own}")
        data = dict(values_ptr="*fp16", order_ptr="*i32", out_ptr="*fp16", index_ptr="*i64", grad_ptr="*fp16")
        signature = numbers | kept | own | data
        constants = dict(KEEP=2, GROUP={group}, WIDTH={width}, E=16, B=1024)
        built = [build(reorder_kernel, signature, constants, {capability}, num_warps=4),
                 build(write_rows_kernel, signature, dict(ZEROS=1024, ENTRIES=128), {capability}, num_warps=1),
                 build(add_rows_kernel, signature | dict(out_ptr="*fp32"), dict(ENTRIES=128), {capability})]
        print(all(len(one.asm["cubin"]) > 0 for one in built))
    """)
    assert printed.strip() == "True"
