"""Narrow CSR: what its arrays say, and its kernel for few columns."""

import math

import pytest
import torch
import torch.nn.functional as F
from compile_kernel import compile_in_subprocess
from kernel_devices import KERNEL_DEVICES, graph_of, needs_triton
from rewriting import rewritten_for
from torch import Tensor, nn

import sparsecomp
from sparsecomp import ops
from sparsecomp.errors import FormatError
from sparsecomp.formats import CSR, NARROW, NM, SparseMatrix
from sparsecomp.lowering.tuning.ceilings import target_named
from sparsecomp.nn import SparseLinear
from sparsecomp.passes.cost.sparse import Product, decide
from sparsecomp.reference.patterns import Layout, stored_by_rows

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 2e-6}


def pruned(rows: int, cols: int, zeros: float = 0.7, dtype: torch.dtype = torch.float32) -> Tensor:
    """A weight with this share of zeros."""
    random = torch.Generator().manual_seed(rows + cols)
    kept = torch.rand(rows, cols, generator=random) >= zeros
    return (torch.randn(rows, cols, generator=random) * kept).to(dtype)


def test_narrow_csr_by_hand():
    dense = torch.zeros(2, 400)
    columns = [3, *range(10, 25), 30, 300]
    dense[0, columns] = torch.arange(1.0, 19.0)
    matrix = NARROW.from_dense(dense)
    assert matrix.starts.tolist() == [0, 18, 18] and matrix.chunks.tolist() == [0, 2, 2]
    assert matrix.bases.tolist() == [3, 30, 0] and matrix.bases.dtype is torch.int16
    assert matrix.indices.dtype is torch.int16 and matrix.indices.tolist()[-2:] == [0, 270]
    dense[0, 300], dense[0, 285] = 0, 18
    assert NARROW.from_dense(dense).indices.dtype is torch.uint8
    assert NARROW.from_dense(torch.eye(1, 40000)).bases.dtype is torch.int32


def test_values_are_those_of_csr():
    csr = CSR.from_dense(pruned(30, 200))
    found = csr.to()
    assert found.values.data_ptr() == csr.values.data_ptr()
    back = found.to(CSR)
    assert torch.equal(back.crow, csr.crow) and torch.equal(back.col, csr.col)


@pytest.mark.parametrize(
    "broken",
    [
        {"bases": lambda a: a[:-1]}, {"bases": lambda a: a + 200}, {"bases": lambda a: a.to(torch.uint8)},
        {"indices": lambda a: a.flip(0)}, {"indices": lambda a: a.to(torch.int8)}, {"chunks": lambda a: a + 1},
        {"starts": lambda a: a.clamp(max=5)}, {"starts": lambda a: a.flip(0)}, {"values": lambda a: a[:-1]},
    ],
)  # fmt: skip
def test_broken_arrays_are_refused(broken):
    good = NARROW.from_dense(pruned(6, 100))
    good.validate()
    arrays = {name: broken.get(name, lambda a: a)(array) for name, array in good.arrays.items()}
    with pytest.raises(FormatError):
        NARROW.from_arrays(*arrays.values(), shape=good.shape)


def test_layers_train_and_load(tmp_path):
    weight = pruned(12, 40)
    layer, x = SparseLinear(NARROW.from_dense(weight), torch.randn(12)), torch.randn(3, 40)
    exact = F.linear(x, weight.requires_grad_(), layer.bias)
    torch.testing.assert_close(layer(x), exact)
    layer(x).square().sum().backward()
    exact.square().sum().backward()
    torch.testing.assert_close(layer.values.grad, weight.grad[weight.detach() != 0])
    other = SparseLinear(NARROW.from_dense(pruned(12, 40, 0.4)))  # of another number of values
    other.bias = nn.Parameter(torch.zeros(12))
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), layer(x)) and torch.equal(other.weight.to_dense(), layer.weight.to_dense())
    path = tmp_path / "weight.safetensors"
    NARROW.from_dense(weight.detach()).save(path)
    assert torch.equal(SparseMatrix.load(path).to_dense(), weight.detach())


def product(dense: Tensor, x: Tensor, device: str, **finish) -> dict[str, Tensor]:
    """x @ dense.T by the kernel, in a configuration of each number of rows a program."""
    from sparsecomp.lowering.cache.signature import device_of
    from sparsecomp.lowering.launch.epilogue import output_of
    from sparsecomp.lowering.sparse.narrow import SPMM_NARROW, problem_of

    values, arrays, layout = stored_by_rows(NARROW.from_dense(dense).to_device(device))
    bias, residual = (None if one is None else one.to(device) for one in map(finish.get, ("bias", "residual")))
    residual = None if residual is None else residual.mT
    x, found = x.to(device).mT, {}
    out = torch.empty(x.shape[1], dense.shape[0], dtype=x.dtype, device=device).mT
    described = output_of(out, bias, "row", residual, finish.get("activation", "none"), 1.0)
    problem = problem_of(values, layout, x, out, described, arrays[0].dtype, arrays[-1].dtype)
    for one in SPMM_NARROW.candidates(problem, device_of(torch.device(device))):
        name = f"{one.config['ROWS']} rows"
        if name not in found:
            out.fill_(math.nan)
            one.template.prepare(problem, one.config)(*arrays, values, x, bias, residual, out)
            found[name] = out.mT.cpu().clone()
    return found


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("rows", [1, 2, 5, 16])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("size", "activation"), [((37, 200), "none"), ((1, 1), "relu"), ((70, 131), "gelu"), ((16, 300), "silu")]
)  # fmt: skip
def test_kernels_are_the_dense_layer(device, rows, dtype, size, activation):
    weight, random = pruned(*size, 0.6, dtype), torch.Generator().manual_seed(rows)
    x, residual = (torch.randn(rows, n, generator=random).to(dtype) for n in size[::-1])
    bias = torch.randn(size[0], generator=random).to(dtype)
    exact = F.linear(x.double(), weight.double(), bias.double()) + residual.double()
    exact = exact if activation == "none" else getattr(F, activation)(exact)
    for name, found in product(weight, x, device, bias=bias, residual=residual, activation=activation).items():
        assert (found.double() - exact).norm() <= TOLERANCE[dtype] * exact.norm(), name


@pytest.mark.parametrize("device", KERNEL_DEVICES)
def test_nothing_is_multiplied_where_nothing_is_stored(device):
    """An infinite or missing input reaches the rows that store something there, and no others."""
    weight = pruned(40, 100, 0.7, torch.float16)
    for rows in (1, 4):
        x = torch.randn(rows, 100, generator=torch.Generator().manual_seed(1)).half()
        x[0, 7], x[-1, 50] = math.inf, math.nan
        stored = weight.double() != 0
        terms = torch.where(stored, x.double()[:, None] * weight.double(), 0.0)
        exact = terms.sum(-1)
        assert exact.isnan().any() and exact.isfinite().any()
        for name, found in product(weight, x, device).items():
            torch.testing.assert_close(found.double(), exact, rtol=2e-3, atol=2e-2, equal_nan=True, msg=name)


@pytest.mark.parametrize("device", KERNEL_DEVICES)
def test_a_weight_without_values(device):
    for found in product(torch.zeros(5, 40).half(), torch.randn(2, 40).half(), device).values():
        assert torch.equal(found, torch.zeros(2, 5).half())


@pytest.mark.parametrize("device", KERNEL_DEVICES)
def test_columns_at_length(device):
    from sparsecomp.lowering.sparse.narrow import csr_matrix

    for dense in (pruned(20, 150), torch.eye(3, 40000), torch.zeros(4, 9)):
        values, arrays, layout = stored_by_rows(NARROW.from_dense(dense).to_device(device))
        _, (starts, columns), found = csr_matrix(values, arrays, layout)
        right = CSR.from_dense(dense)
        assert torch.equal(columns.cpu(), right.col) and torch.equal(starts.cpu(), right.crow)
        assert (found.format, found.shape) == ("csr", tuple(dense.shape))


@pytest.mark.slow(reason="compiles for two GPUs in a process of its own")
def test_kernels_compile_for_gpus_that_are_not_there():
    compile_in_subprocess(
        """
        from sparsecomp.lowering.sparse.kernels.narrow_columns import narrow_columns_kernel
        from sparsecomp.lowering.sparse.kernels.narrow_rows import narrow_rows_kernel, transpose_kernel

        numbers = "M N K nnz dense_k dense_n out_b out_m out_n res_b res_m res_n".split()
        types = dict.fromkeys(numbers, "i32") | dict(
            starts_ptr="*i32", chunks_ptr="*i32", bases_ptr="*i16", indices_ptr="*u8", values_ptr="*fp16",
            dense_ptr="*fp16", lying_ptr="*fp16", bias_ptr="*fp16", residual_ptr="*fp16", out_ptr="*fp16",
            scale="fp32")
        finish = dict(BIAS_ROWS=True, ACTIVATION="silu", CHUNK=16, ROWS=4)
        for capability in (80, 90):
            for columns, entries in ((1, 256), (8, 64)):
                build(narrow_rows_kernel, types, {**finish, "BN": columns, "E": entries}, capability, num_warps=1)
            build(narrow_columns_kernel, {**types, "columns_ptr": "*i32"}, dict(E=256, CHUNK=16), capability)
            build(transpose_kernel, types, dict(BK=64, BN=8), capability, num_warps=4)
        """
    )


MEASURED = {
    (11008, 4096, 0.5, 1): 0.68, (11008, 4096, 0.7, 2): 0.93, (11008, 4096, 0.7, 16): 0.34,
    (11008, 4096, 0.9, 1): 2.14, (11008, 4096, 0.9, 4): 1.53, (11008, 4096, 0.9, 16): 0.74,
    (4096, 11008, 0.5, 1): 0.74, (4096, 11008, 0.7, 1): 1.20, (4096, 11008, 0.7, 8): 0.58,
    (4096, 11008, 0.9, 1): 2.71, (4096, 11008, 0.9, 8): 1.16,
}  # fmt: skip
"""Of cuBLAS's speed, by features out and in, zeros and rows: an H200, float16, the best configuration."""


@needs_triton
@pytest.mark.parametrize("case", MEASURED)
def test_the_faster_way_is_chosen_as_measured(case):
    m, k, zeros, rows = case
    layout = Layout("narrow", (1, 1), (m, k))
    product = Product(
        torch.device("cuda"), layout, rows, 1, round(m * k * (1 - zeros)), torch.float16, True, False, False, "none",
        "", constant=True, target=target_named("h200"),
    )  # fmt: skip
    decision = decide(product)
    assert decision.implementation == ("narrow_rows" if MEASURED[case] > 1.1 else "dense")


@needs_triton
def test_more_rows_than_a_kernel_takes_are_multiplied_dense():
    layer = SparseLinear(NARROW.from_dense(pruned(256, 128, 0.9, torch.float16)), requires_grad=False)
    with torch.no_grad():
        report = sparsecomp.explain(layer, torch.randn(17, 128).half(), device="h100", mode="reduce-overhead")
    (site,) = [one for one in report.sites if one.rule == "sparse_linear"]
    assert site.implementation == "dense" and site.reason.startswith("NARROW 256x128 at 90.0% sparsity")


@needs_triton
@pytest.mark.parametrize(
    ("rows", "frozen", "found"), [(1, True, "narrow copy"), (16, True, "bitmap copy"), (1, False, "csr")]
)
def test_a_csr_layer_that_is_promised_to_stay_is_multiplied_narrow(rows, frozen, found):
    """As for an H200, run op by op on a CPU."""
    torch.manual_seed(0)
    layer = SparseLinear(CSR.from_dense(pruned(8192, 2048, 0.9, torch.float16)), requires_grad=False)
    x = torch.randn(rows, 2048).half()
    out, report, _ = rewritten_for("h200", lambda x: F.relu(layer(x)), x, frozen=frozen)
    (site,) = [one for one in report.sites if one.rule == "sparse_linear"]
    assert site.implementation == found and ("narrow columns are kept" in site.reason) == (found == "narrow copy")
    exact = F.relu(x.double() @ layer.weight.detach().to_dense().double().mT)
    assert (out - exact).norm() <= 1e-3 * exact.norm()


class Stored(nn.Module):
    """A layer by the arrays of a CSR weight behind which something else lies, within their memory."""

    def __init__(self, weight: Tensor, spare: int) -> None:
        super().__init__()
        matrix = CSR.from_dense(weight)
        self.register_buffer("crow", matrix.crow)
        self.register_buffer("col", F.pad(matrix.col, (0, spare), value=5))
        self.values = nn.Parameter(F.pad(matrix.values, (0, spare), value=9.0), requires_grad=False)
        self.layout = Layout("csr", (1, 1), matrix.shape).written()

    def forward(self, x: Tensor) -> Tensor:
        return ops.sparse_linear(x, self.values, [self.crow, self.col], self.layout)


@needs_triton
@pytest.mark.parametrize("spare", [0, 3])
def test_a_pattern_with_spare_capacity_has_no_narrow_form(spare):
    """As for an H200."""
    weight, x = pruned(4096, 4096, 0.9, torch.float16), torch.randn(1, 4096).half()
    out, report, _ = rewritten_for("h200", Stored(weight, spare), x, frozen=True)
    (site,) = report.sites
    assert (site.implementation == "narrow copy") == (spare == 0)
    exact = x.double() @ weight.double().mT
    assert (out - exact).norm() <= 1e-3 * exact.norm()


@needs_triton
def test_entries_that_become_spare_are_told_of():
    from sparsecomp.passes.sparse.linear import Narrowed

    matrix = CSR.from_dense(pruned(64, 64, 0.5, torch.float16))
    with pytest.raises(FormatError, match=r"were promised to stay, and \d+ are left"):
        Narrowed(matrix.shape)(matrix.crow.clamp(max=99), matrix.col)


@needs_triton
@pytest.mark.parametrize("kind", [CSR, NARROW])
def test_a_layer_without_features_is_left_alone(kind):
    layer = SparseLinear(kind.from_dense(torch.zeros(0, 64).half()), requires_grad=False)
    out, report, _ = rewritten_for("h200", layer, torch.randn(2, 64).half(), frozen=True, strict=True)
    (site,) = report.sites
    assert out.shape == (2, 0) and "no features" in site.reason


@needs_triton
@pytest.mark.parametrize(("rows", "auto", "low"), [(8, "dense copy", "narrow"), (400, "dense copy", "dense")])
def test_low_memory_keeps_one_weight(rows, auto, low):
    """As for an H200: what it takes to write the weight out in each call decides."""
    layer = SparseLinear(NARROW.from_dense(pruned(1024, 1024, 0.7, torch.float16)), requires_grad=False)
    for memory, found in (("auto", auto), ("low", low)):
        _, report, code = rewritten_for("h200", layer, torch.randn(rows, 1024).half(), frozen=True, memory=memory)
        assert [one.implementation for one in report.sites] == [found]
        assert ("stored_to_dense" in code) == (found == "dense")


@needs_triton
@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize(
    ("kind", "rows", "found"), [(CSR, 1, "narrow copy"), (NARROW, 24, "dense copy"), (NM, 1, "packed copy")]
)
def test_a_step_that_writes_to_a_cache_keeps_its_copies(kind, rows, found, same):
    """As for an H200; not where the cache is the memory of the weight."""
    weight = pruned(4096, 4096, 0.9, torch.float16)
    fours = weight.view(-1, 4)
    fours.scatter_(-1, fours.abs().argsort(-1)[:, :2], 0)
    groups = {"n": 2, "m": 4} if kind is NM else {}
    layer = SparseLinear(kind.from_dense(weight, **groups), requires_grad=False)
    cache = torch.zeros(4, 4096).half()
    if same:
        cache.set_(layer.values.untyped_storage(), 0, cache.shape)

    def step(x: Tensor, at: Tensor) -> Tensor:
        out = layer(x)
        cache.index_copy_(0, at, out[:1])
        return out

    x, at = torch.randn(rows, 4096).half(), torch.tensor([2])
    exact = x.double() @ weight.double().mT
    out, report, _ = rewritten_for("h200", step, x, at, frozen=True)
    (site,) = [one for one in report.sites if one.rule == "sparse_linear"]
    assert (site.implementation == found) != same
    assert (out - exact).norm() <= 1e-3 * exact.norm() and torch.equal(cache[at], out[:1])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("rows", [1, 4, 16, 40])
def test_in_a_cuda_graph(rows):
    weight, x = pruned(1000, 500, 0.7, torch.float16), torch.randn(rows, 500).half()
    layer, x = SparseLinear(NARROW.from_dense(weight), requires_grad=False).cuda(), x.cuda()
    with torch.no_grad():
        graph, result = graph_of(lambda: layer(x))
        x.copy_(x.roll(1, 1))
        graph.replay()
        torch.cuda.synchronize()
    exact = F.linear(x.double(), weight.cuda().double())
    assert (result - exact).norm() <= 1e-3 * exact.norm()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_dense_forms_on_a_device():
    weight = pruned(100, 333, 0.7, torch.float16)
    found = NARROW.from_dense(weight.cuda())
    found.validate()
    assert torch.equal(found.to_dense().cpu(), weight)
    layer = SparseLinear(found)
    from sparsecomp.ops.sparse.dense_weight import stored_to_dense

    values, arrays, layout = stored_by_rows(found)
    assert torch.equal(stored_to_dense(values, list(arrays), layout.written()).cpu(), weight)
    assert layer(torch.randn(300, 333, device="cuda").half()).shape == (300, 100)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("kind", [CSR, NARROW])
def test_compiled_layers_follow_their_weights(kind):
    torch.compiler.reset()
    weight = torch.randn(8192, 4096, device="cuda").half() * (torch.rand(8192, 4096, device="cuda") < 0.05)
    layer = SparseLinear(kind.from_dense(weight), requires_grad=False)
    options = {"frozen": True, "mode": "reduce-overhead"}
    compiled = torch.compile(lambda x: F.relu(layer(x)), backend="sparsecomp", options=options)
    with torch.no_grad():
        for step in range(4):
            x = torch.randn(1, 4096, device="cuda").half()
            exact = F.relu(x.double() @ layer.weight.detach().to_dense().double().mT)
            assert (compiled(x) - exact).norm() <= 2e-3 * exact.norm()
            if step == 1:
                layer.values.mul_(2)
    report = sparsecomp.last_report()
    assert report is not None
    found = {one.implementation for one in report.sites if one.rule == "sparse_linear"}
    assert found == {"narrow copy" if kind is CSR else "narrow"}
