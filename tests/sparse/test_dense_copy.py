"""A dense copy that is kept follows every write to its weight, row by row, and a replayed call too."""

import pytest
import torch
from compile_kernel import compile_in_subprocess
from kernel_devices import KERNEL_DEVICES, graph_of
from torch import Tensor
from write_matrix import WRITES

import sparsecomp
from sparsecomp.formats import CSR
from sparsecomp.nn import SparseLinear
from sparsecomp.ops.sparse import dense_copy as copies
from sparsecomp.ops.sparse.dense_copy import DenseCopy, dense_copy, keep_dense_copy
from sparsecomp.reference.memo import MEMO
from sparsecomp.reference.patterns import Layout

pytestmark = pytest.mark.quick_cases(2)

SHAPES = [(1, 1), (3, 5), (7, 64), (5, 1030), (9, 300)]
_OP = torch.ops.sparsecomp.dense_copy.default


@pytest.fixture(autouse=True)
def _everywhere(monkeypatch):
    """The interpreter's tensors are a CPU's."""
    monkeypatch.setattr(copies, "DEVICES", ("cpu", "cuda"))


def thinned(shape: tuple[int, int], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A random matrix of as many entries for each seed, among them rows without any."""
    random = torch.Generator().manual_seed(seed)
    rows, cols = shape
    places = torch.randperm(rows * cols, generator=random)[: max(rows * cols // 3, 1)]
    dense = torch.zeros(rows * cols)
    dense[places] = torch.randn(places.numel(), generator=random)
    return dense.view(shape).to(dtype)


def arrays_of(dense: Tensor, index: torch.dtype = torch.int32, device: str = "cpu") -> tuple[Tensor, list[Tensor]]:
    matrix = CSR.from_dense(dense)
    return matrix.values.to(device), [matrix.crow.to(device, index), matrix.col.to(device, index)]


def written(shape: tuple[int, int]) -> str:
    return Layout("csr", (1, 1), shape).written()


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_copy_is_the_matrix_whatever_it_was(shape, dtype, index, device):
    values, pattern = arrays_of(thinned(shape, 0, dtype), index, device)
    assert keep_dense_copy(values, Layout("csr", (1, 1), shape))
    found = [_OP.direct_cuda(values, pattern, written(shape)) for _ in range(2)]
    assert found[0].data_ptr() == found[1].data_ptr() and torch.equal(found[0].cpu(), thinned(shape, 0, dtype))
    for seed in (1, 1, 2):
        given, arrays = arrays_of(thinned(shape, seed, dtype), index)
        for mine, its in zip((values, *pattern), (given, *arrays), strict=True):
            mine.data.copy_(its)
        assert torch.equal(_OP.direct_cuda(values, pattern, written(shape)).cpu(), thinned(shape, seed, dtype))


@pytest.mark.parametrize("device", KERNEL_DEVICES)
def test_only_rows_that_changed_are_written(device):
    values, pattern = arrays_of(thinned((9, 40), 0), device=device)
    keep_dense_copy(values, Layout("csr", (1, 1), (9, 40)))
    copy = _OP.direct_cuda(values, pattern, written((9, 40)))
    copy.fill_(7.0)  # what no user may do shows what a call writes
    row = int((pattern[0] > 3).nonzero()[0]) - 1
    values[3] = -0.0 if values[3] > 0 else 0.0
    found = _OP.direct_cuda(values, pattern, written((9, 40)))
    assert [bool((line == 7.0).all()) for line in found] == [at != row for at in range(9)]


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize(
    ("value", "other"), [(0.0, -0.0), (float("nan"), 1.0), (1.0, float("inf")), (1.0, 1.0 + 2**-23)]
)
def test_any_other_bits_are_seen(value, other, device):
    values, pattern = arrays_of(torch.full((1, 3), 5.0), device=device)
    values[1] = value
    keep_dense_copy(values, Layout("csr", (1, 1), (1, 3)))
    assert torch.equal(_OP.direct_cuda(values, pattern, written((1, 3)))[0].view(torch.int32), values.view(torch.int32))
    values[1] = other
    assert torch.equal(_OP.direct_cuda(values, pattern, written((1, 3)))[0].view(torch.int32), values.view(torch.int32))


@pytest.mark.parametrize("device", KERNEL_DEVICES)
def test_values_that_change_places_are_seen(device):
    """Sums that did not count with columns, or counted rows together, would not tell."""
    values, pattern = arrays_of(torch.tensor([[1.0, 2.0, 0.0], [0.0, 3.0, 4.0]]), device=device)
    keep_dense_copy(values, Layout("csr", (1, 1), (2, 3)))
    _OP.direct_cuda(values, pattern, written((2, 3)))
    values.copy_(torch.tensor([2.0, 1.0, 3.0, 4.0]))
    assert _OP.direct_cuda(values, pattern, written((2, 3))).tolist() == [[2, 1, 0], [0, 3, 4]]
    pattern[1].copy_(torch.tensor([0, 2, 0, 2]))
    assert _OP.direct_cuda(values, pattern, written((2, 3))).tolist() == [[2, 0, 1], [3, 0, 4]]
    pattern[0].copy_(torch.tensor([0, 1, 4]))
    pattern[1].copy_(torch.tensor([0, 0, 1, 2]))
    assert _OP.direct_cuda(values, pattern, written((2, 3))).tolist() == [[2, 0, 0], [1, 3, 4]]


@pytest.mark.parametrize("device", KERNEL_DEVICES)
def test_spare_capacity_is_not_read(device):
    values, pattern = arrays_of(thinned((4, 50), 0), device=device)
    values, pattern[1] = (torch.cat([one, one.new_full((5,), 49)]) for one in (values, pattern[1]))
    keep_dense_copy(values, Layout("csr", (1, 1), (4, 50)))
    for spare in (49.0, float("nan")):
        values[-5:] = spare
        assert torch.equal(_OP.direct_cuda(values, pattern, written((4, 50))).cpu(), thinned((4, 50), 0))


def test_other_memory_has_another_copy_which_goes_with_it():
    layout = Layout("csr", (1, 1), (4, 61))

    def copied() -> list[DenseCopy]:
        return [one for one in MEMO.results(DenseCopy) if one.dense.shape == layout.shape]

    values = torch.randn(50)
    assert keep_dense_copy(values, layout) and keep_dense_copy(values, layout) and len(copied()) == 1
    other = values.clone()
    assert len(copied()) == 1 and keep_dense_copy(other, layout) and len(copied()) == 2
    del values
    assert len(copied()) == 1


def test_values_of_eight_bytes_have_none():
    assert not keep_dense_copy(torch.ones(3, dtype=torch.float64), Layout("csr", (1, 1), (3, 4)))


def test_writes_are_no_broken_promise(monkeypatch):
    monkeypatch.setenv("SPARSECOMP_DEBUG", "1")
    values, _ = arrays_of(thinned((4, 6), 0))
    assert keep_dense_copy(values, Layout("csr", (1, 1), (4, 6)))
    values.add_(1)
    assert keep_dense_copy(values, Layout("csr", (1, 1), (4, 6)))


def test_a_cpu_writes_it_out(monkeypatch):
    monkeypatch.setattr(copies, "DEVICES", ("cuda",))
    values, pattern = arrays_of(thinned((4, 6), 0))
    assert not keep_dense_copy(values, Layout("csr", (1, 1), (4, 6)))
    found = [dense_copy(values, pattern, written((4, 6))) for _ in range(2)]
    assert torch.equal(found[0], thinned((4, 6), 0)) and found[0].data_ptr() != found[1].data_ptr()


@pytest.mark.slow(reason="compiles for two GPUs in a process of its own")
def test_the_kernel_compiles_for_gpus_that_are_not_there():
    compile_in_subprocess(
        """
        from sparsecomp.lowering.sparse.kernels.stored_places import refresh_kernel

        for value in ("fp16", "bf16", "fp32"):
            for index in ("i32", "i64"):
                types = {
                    "crow_ptr": f"*{index}", "col_ptr": f"*{index}", "values_ptr": f"*{value}", "full_ptr": f"*{value}",
                    "seen_ptr": "*i64", "width": "i32", "whole": "i32",
                }
                for capability in (80, 90):
                    build(refresh_kernel, types, dict(ZEROS=1024, ENTRIES=512, VECTOR=16), capability, num_warps=8)
        """
    )


# -- as a user gets it


def layer_of(seed: int, dtype: torch.dtype = torch.float16) -> SparseLinear:
    return SparseLinear(CSR.from_dense(thinned((512, 512), seed, dtype)), requires_grad=False).cuda()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("way", [way for way in WRITES if way != "numpy"])  # no array is on a GPU's memory
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_layers_follow_every_write(mode, way):
    layer, x = layer_of(0), torch.randn(2048, 512, device="cuda", dtype=torch.float16)
    compiled = torch.compile(layer, backend="sparsecomp", options={"mode": mode})
    with torch.no_grad():
        for seed in (0, 0, 1, 1, 2):
            other = layer_of(seed)
            for name, given in other.state_dict().items():
                WRITES[way](getattr(layer, name), given)
            for _ in range(4):  # noted down, replayed
                found = compiled(x).float()
            wanted = x.double() @ thinned((512, 512), seed, torch.float16).cuda().double().mT
            torch.testing.assert_close(found.double(), wanted, rtol=1e-2, atol=1e-1)
    report = sparsecomp.last_report()
    assert report is not None
    (site,) = (one for one in report.sites if one.rule == "sparse_linear")
    assert "is kept and compared with it in each call" in site.reason


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_layers_of_the_same_values_at_other_places_share_no_copy():
    one, other, x = layer_of(0), layer_of(1), torch.randn(2048, 512, device="cuda", dtype=torch.float16)
    other.values = one.values
    weights = [layer.weight.detach().to_dense().double().mT for layer in (one, other)]
    compiled = torch.compile(lambda x: (one(x), other(x)), backend="sparsecomp")
    with torch.no_grad():
        for _ in range(4):
            for found, weight in zip(compiled(x), weights, strict=True):
                torch.testing.assert_close(found.double(), x.double() @ weight, rtol=1e-2, atol=1e-1)
    report = sparsecomp.last_report()
    assert report is not None and not [one for one in report.sites if "is kept and compared" in one.reason]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_captured_graph_follows_writes():
    values, pattern = arrays_of(thinned((64, 96), 0), device="cuda")
    keep_dense_copy(values, Layout("csr", (1, 1), (64, 96)))
    graph, found = graph_of(lambda: _OP.direct_cuda(values, pattern, written((64, 96))))
    for seed in (0, 1, 1, 2):
        given, arrays = arrays_of(thinned((64, 96), seed))
        for mine, its in zip((values, *pattern), (given, *arrays), strict=True):
            mine.data.copy_(its)
        graph.replay()
        assert torch.equal(found.cpu(), thinned((64, 96), seed))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_without_room_keeps_none(monkeypatch):
    monkeypatch.setattr(copies, "SHARE", 0.0)
    values, _ = arrays_of(thinned((64, 96), 0), device="cuda")
    assert not keep_dense_copy(values, Layout("csr", (1, 1), (64, 96)))
