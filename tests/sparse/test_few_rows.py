"""Bitmaps and narrow CSR: what their arrays say, and their kernels for few columns."""

import math

import pytest
import torch
import torch.nn.functional as F
from compile_kernel import compile_in_subprocess
from kernel_devices import KERNEL_DEVICES, graph_of, needs_triton
from torch import Tensor, nn

import sparsecomp
from sparsecomp.errors import FormatError
from sparsecomp.formats import BITMAP, CSR, NARROW, SparseMatrix
from sparsecomp.formats.bitmap import packed, unpacked
from sparsecomp.nn import SparseLinear
from sparsecomp.reference.patterns import stored_by_rows

FORMATS = pytest.mark.parametrize("kind", [BITMAP, NARROW])
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 2e-6}


def pruned(rows: int, cols: int, zeros: float = 0.7, dtype: torch.dtype = torch.float32) -> Tensor:
    """A weight with this share of zeros."""
    random = torch.Generator().manual_seed(rows + cols)
    kept = torch.rand(rows, cols, generator=random) >= zeros
    return (torch.randn(rows, cols, generator=random) * kept).to(dtype)


def test_a_bitmap_by_hand():
    dense = torch.zeros(2, 35)
    dense[0, [1, 31, 34]] = torch.tensor([5.0, 6.0, 7.0])
    dense[1, 0] = 8.0
    matrix = BITMAP.from_dense(dense)
    assert matrix.indices.tolist() == [[2 - 2**31, 4], [1, 0]]
    assert matrix.offsets.tolist() == [[0, 2], [0, 1]] and matrix.starts.tolist() == [0, 3, 4]
    assert matrix.values.tolist() == [5, 6, 7, 8]
    # 2 rows of 2 words at 6 bytes, 3 starts and 4 values at 4
    assert matrix.nbytes == 2 * 2 * 6 + 3 * 4 + 4 * 4
    assert torch.equal(packed(unpacked(matrix.indices)), matrix.indices)


def test_narrow_csr_by_hand():
    dense = torch.zeros(2, 400)
    columns = [3, *range(10, 25), 30, 300]
    dense[0, columns] = torch.arange(1.0, 19.0)
    matrix = NARROW.from_dense(dense)
    assert matrix.starts.tolist() == [0, 18, 18] and matrix.chunks.tolist() == [0, 2, 2]
    assert matrix.bases.tolist() == [3, 30] and matrix.bases.dtype is torch.int16
    assert matrix.indices.dtype is torch.int16 and matrix.indices.tolist()[-2:] == [0, 270]
    dense[0, 300], dense[0, 285] = 0, 18
    assert NARROW.from_dense(dense).indices.dtype is torch.uint8
    assert NARROW.from_dense(torch.eye(1, 40000)).bases.dtype is torch.int32


@FORMATS
def test_values_are_those_of_csr(kind):
    csr = CSR.from_dense(pruned(30, 200))
    found = csr.to(kind)
    assert found.values.data_ptr() == csr.values.data_ptr()
    back = found.to(CSR)
    assert torch.equal(back.crow, csr.crow) and torch.equal(back.col, csr.col)


@pytest.mark.parametrize(
    ("kind", "broken"),
    [
        (BITMAP, {"offsets": lambda a: a + 1}), (BITMAP, {"indices": lambda a: a | 1}),
        (BITMAP, {"starts": lambda a: a.flip(0)}), (BITMAP, {"values": lambda a: a[:-1]}),
        (BITMAP, {"offsets": lambda a: a.int()}), (NARROW, {"bases": lambda a: a[:-1]}),
        (NARROW, {"bases": lambda a: a + 200}), (NARROW, {"indices": lambda a: a.flip(0)}),
        (NARROW, {"chunks": lambda a: a + 1}), (NARROW, {"starts": lambda a: a.clamp(max=5)}),
        (NARROW, {"indices": lambda a: a.to(torch.int8)}),
    ],
)  # fmt: skip
def test_broken_arrays_are_refused(kind, broken):
    good = kind.from_dense(pruned(6, 100))
    good.validate()
    arrays = {name: broken.get(name, lambda a: a)(array) for name, array in good.arrays.items()}
    with pytest.raises(FormatError):
        kind.from_arrays(*arrays.values(), shape=good.shape)


def test_rows_too_long_for_a_bitmap_are_refused():
    with pytest.raises(FormatError, match="use CSR"):
        BITMAP.from_dense(torch.ones(1, 2**15))
    assert BITMAP.from_dense(torch.ones(1, 2**15 - 1)).nnz == 2**15 - 1


@FORMATS
def test_layers_train_and_load(kind, tmp_path):
    weight = pruned(12, 40)
    layer, x = SparseLinear(kind.from_dense(weight), torch.randn(12)), torch.randn(3, 40)
    exact = F.linear(x, weight.requires_grad_(), layer.bias)
    torch.testing.assert_close(layer(x), exact)
    layer(x).square().sum().backward()
    exact.square().sum().backward()
    torch.testing.assert_close(layer.values.grad, weight.grad[weight.detach() != 0])
    other = SparseLinear(kind.from_dense(pruned(12, 40, 0.4)))  # of another number of values
    other.bias = nn.Parameter(torch.zeros(12))
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), layer(x)) and torch.equal(other.weight.to_dense(), layer.weight.to_dense())
    path = tmp_path / "weight.safetensors"
    kind.from_dense(weight.detach()).save(path)
    assert torch.equal(SparseMatrix.load(path).to_dense(), weight.detach())


def product(
    kind: type[SparseMatrix], dense: Tensor, x: Tensor, device: str, kernel: str = "", **finish
) -> dict[str, Tensor]:  # fmt: skip
    """x @ dense.T by each kernel of a format, in a configuration with and without splits where it has such."""
    from sparsecomp.lowering.cache.signature import device_of
    from sparsecomp.lowering.launch.epilogue import output_of
    from sparsecomp.lowering.sparse.launcher import launcher_of

    values, arrays, layout = stored_by_rows(kind.from_dense(dense).to_device(device))
    bias, residual = (None if one is None else one.to(device) for one in map(finish.get, ("bias", "residual")))
    residual = None if residual is None else residual.mT
    launcher, found = launcher_of(layout), {}
    (operation,) = launcher.operations(layout)
    x = x.to(device).mT
    for splits in (1, 2):
        out = torch.full((x.shape[1], dense.shape[0]), math.nan, dtype=x.dtype, device=device).mT
        described = output_of(out, bias, "row", residual, finish.get("activation", "none"), 1.0)
        problem = launcher.problem_of(values, layout, x, out, described, arrays[0].dtype)
        for one in operation.candidates(problem, device_of(torch.device(device))):
            name = f"{one.template.name} {splits}"
            if one.config.get("splits", splits) == splits and name not in found:
                one.template.prepare(problem, one.config)(*arrays, values, x, bias, residual, out)
                found[name] = out.mT.cpu().clone()
    return found


@pytest.mark.quick_cases(4)
@FORMATS
@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("rows", [1, 2, 5, 16, 33])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("size", "activation"), [((37, 200), "none"), ((1, 1), "relu"), ((70, 131), "gelu"), ((16, 300), "silu")]
)  # fmt: skip
def test_kernels_are_the_dense_layer(kind, device, rows, dtype, size, activation):
    weight, random = pruned(*size, 0.6, dtype), torch.Generator().manual_seed(rows)
    x, residual = (torch.randn(rows, n, generator=random).to(dtype) for n in size[::-1])
    bias = torch.randn(size[0], generator=random).to(dtype)
    exact = F.linear(x.double(), weight.double(), bias.double()) + residual.double()
    exact = exact if activation == "none" else getattr(F, activation)(exact)
    for name, found in product(kind, weight, x, device, bias=bias, residual=residual, activation=activation).items():
        assert (found.double() - exact).norm() <= TOLERANCE[dtype] * exact.norm(), name


@FORMATS
@pytest.mark.parametrize("device", KERNEL_DEVICES)
def test_nothing_is_multiplied_where_nothing_is_stored(kind, device):
    """An infinite or missing input reaches the rows that store something there, and no others."""
    weight = pruned(40, 100, 0.7, torch.float16)
    for rows in (1, 4):
        x = torch.randn(rows, 100, generator=torch.Generator().manual_seed(1)).half()
        x[0, 7], x[-1, 50] = math.inf, math.nan
        stored = weight.double() != 0
        terms = torch.where(stored, x.double()[:, None] * weight.double(), 0.0)
        exact = terms.sum(-1)
        assert exact.isnan().any() and exact.isfinite().any()
        for name, found in product(kind, weight, x, device).items():
            torch.testing.assert_close(found.double(), exact, rtol=2e-3, atol=2e-2, equal_nan=True, msg=name)


@FORMATS
@pytest.mark.parametrize("device", KERNEL_DEVICES)
def test_a_weight_without_values(kind, device):
    for found in product(kind, torch.zeros(5, 40).half(), torch.randn(2, 40).half(), device).values():
        assert torch.equal(found, torch.zeros(2, 5).half())


@pytest.mark.slow(reason="compiles for two GPUs in a process of its own")
def test_kernels_compile_for_gpus_that_are_not_there():
    compile_in_subprocess(
        """
        from sparsecomp.lowering.sparse.kernels.bitmap import bitmap_finish_kernel
        from sparsecomp.lowering.sparse.kernels.bitmap_rows import bitmap_rows_kernel
        from sparsecomp.lowering.sparse.kernels.bitmap_tiles import bitmap_tiles_kernel
        from sparsecomp.lowering.sparse.kernels.narrow_rows import narrow_rows_kernel

        names = "M N K words span splits dense_k dense_n out_b out_m out_n res_b res_m res_n".split()
        types = dict.fromkeys(names, "i32") | dict(
            starts_ptr="*i32", chunks_ptr="*i32", bases_ptr="*i16", indices_ptr="*u8", offsets_ptr="*i16",
            bits_ptr="*i32", values_ptr="*fp16", dense_ptr="*fp16", bias_ptr="*fp16", residual_ptr="*fp16",
            out_ptr="*fp16", sums_ptr="*fp32", scale="fp32")
        finish = dict(BIAS_ROWS=True, ACTIVATION="silu")
        for capability in (80, 90):
            build(bitmap_tiles_kernel, types, dict(PRECISION="ieee", BM=64, BN=16, BK=64), capability, num_warps=4)
            build(bitmap_rows_kernel, types, dict(N=2, BM=16, BK=256), capability, num_warps=4)
            build(bitmap_finish_kernel, types, {**finish, "SPLITS": 4, "BM": 32, "BN": 16, "Q": 16}, capability,
                  num_warps=4)
            build(narrow_rows_kernel, types, {**finish, "CHUNK": 16, "BM": 2, "BN": 4, "E": 64}, capability,
                  num_warps=2)
        """
    )


@needs_triton
@FORMATS
@pytest.mark.parametrize("rows", [1, 16])
def test_a_compiled_layer_is_multiplied_as_stored_where_that_pays(kind, rows):
    """On an H100 that need not be there."""
    layer = SparseLinear(kind.from_dense(pruned(4096, 2048, 0.9, torch.float16)), requires_grad=False)
    x = torch.randn(rows, 2048).half()
    with torch.no_grad():
        report = sparsecomp.explain(layer, x, device="h100", mode="reduce-overhead")
    (site,) = [one for one in report.sites if one.rule == "sparse_linear"]
    assert site.estimate is not None and kind.__name__ in site.reason


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@FORMATS
@pytest.mark.parametrize("rows", [1, 4, 16, 40])
def test_in_a_cuda_graph(kind, rows):
    weight, x = pruned(1000, 500, 0.7, torch.float16), torch.randn(rows, 500).half()
    layer, x = SparseLinear(kind.from_dense(weight), requires_grad=False).cuda(), x.cuda()
    with torch.no_grad():
        graph, result = graph_of(lambda: layer(x))
        x.copy_(x.roll(1, 1))
        graph.replay()
        torch.cuda.synchronize()
    exact = F.linear(x.double(), weight.cuda().double())
    assert (result - exact).norm() <= 1e-3 * exact.norm()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@FORMATS
def test_dense_forms_on_a_device(kind):
    weight = pruned(100, 333, 0.7, torch.float16)
    found = kind.from_dense(weight.cuda())
    found.validate()
    assert torch.equal(found.to_dense().cpu(), weight)
    layer = SparseLinear(found)
    from sparsecomp.ops.sparse.dense_weight import stored_to_dense

    values, arrays, layout = stored_by_rows(found)
    assert torch.equal(stored_to_dense(values, list(arrays), layout.written()).cpu(), weight)
    assert layer(torch.randn(300, 333, device="cuda").half()).shape == (300, 100)
