"""Layers in NARROW and of 2:4 that read one x are one launch: kernels, operator, and when the compiler makes it.

Of those by bitmaps `test_shared_input` has the same.
"""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compile_kernel import compile_in_subprocess
from kernel_devices import KERNEL_DEVICES, graph_of, needs_triton
from rewriting import rewritten_for, site
from test_few_rows import TOLERANCE
from test_few_rows import pruned as unstructured
from test_packed_linear import pruned as halved
from test_shared_input import needs_gpu, runs_as
from torch import Tensor, nn

from sparsecomp.errors import FormatError
from sparsecomp.formats import NARROW, NM, SparseMatrix
from sparsecomp.lowering.tuning.ceilings import target_named
from sparsecomp.nn import SparseLinear
from sparsecomp.passes.cost.decision import Decision
from sparsecomp.passes.cost.sparse import Product
from sparsecomp.passes.sparse import linear, packed
from sparsecomp.reference.patterns import Layout, stored_by_rows

FORMATS = ("narrow", "nm")


def matrix_of(format: str, m: int, k: int, dtype: torch.dtype) -> SparseMatrix:
    if format == "nm":
        return NM.from_dense(halved(m, k, dtype), n=2, m=4)
    return NARROW.from_dense(unstructured(m, k, 0.7, dtype))


def weights_of(matrices: list[SparseMatrix], rows: int) -> list[list[Tensor]]:
    """Arrays of each as kernels read them."""
    from sparsecomp.lowering.sparse.packed_linear import PackedPositions, order_for

    found = []
    for matrix in matrices:
        values, arrays, layout = stored_by_rows(matrix)
        packed = layout.format == "nm"
        found.append([values, PackedPositions(order_for(rows))(arrays[0])] if packed else [*arrays, values])
    return found


def by_kernel(
    matrices: list[SparseMatrix], x: Tensor, device: str, biases: list[Tensor], activation: str
) -> dict[str, list[Tensor]]:  # fmt: skip
    """The products, in a configuration of each number of rows a program."""
    from sparsecomp.lowering.cache.signature import device_of
    from sparsecomp.lowering.launch.epilogue import output_of
    from sparsecomp.lowering.launch.strided import dtype_name, strides_of
    from sparsecomp.lowering.sparse import narrow_siblings, packed_siblings
    from sparsecomp.lowering.sparse.narrow import SpmmNarrow
    from sparsecomp.lowering.sparse.packed_linear import PackedLinear, order_for
    from sparsecomp.lowering.sparse.siblings import sibling_operands

    (n, k), count, is_packed = x.shape, len(matrices), isinstance(matrices[0], NM)
    weights = weights_of([one.to_device(device) for one in matrices], n)
    x, parts = x.to(device), tuple(one.shape[0] for one in matrices)
    given: list[Tensor | None] = [one.to(device) for one in biases] or [None] * count
    outs = [torch.empty(n, m, dtype=x.dtype, device=device) for m in parts]
    described = output_of(outs[0].mT, given[0], "row", None, activation, 1.0)
    if is_packed:
        operation = packed_siblings.SIBLINGS[count]
        problem: Any = PackedLinear(sum(parts), k, n, order_for(n), False, dtype_name(x), described, parts)
    else:
        operation, stored = narrow_siblings.SIBLINGS[count], sum(one.values.numel() for one in matrices)
        kinds = (dtype_name(weights[0][-1]), dtype_name(x), "int32", dtype_name(weights[0][3]))
        problem = SpmmNarrow(sum(parts), k, n, 1, stored, strides_of(x.mT), *kinds, described, parts)
    operands, found = sibling_operands(weights, x if is_packed else x.mT, given, outs), {}
    for one in operation.candidates(problem, device_of(torch.device(device))):
        name = f"{one.config.get('ROWS', one.config.get('TILES'))} rows or tiles"
        if name not in found:
            for out in outs:
                out.fill_(math.nan)
            one.template.prepare(problem, one.config)(*operands)
            found[name] = [out.cpu().clone() for out in outs]
    assert found
    return found


WHERE = [
    pytest.param(device, format, rows, marks=[*marks.marks], id=f"{marks.id} {format} {rows}")
    for device, marks in (("cpu", KERNEL_DEVICES[0]), ("cuda", KERNEL_DEVICES[1]))
    for format in FORMATS for rows in (1, 2, 5, 8)
    if device == "cuda" or format == "narrow" or rows == 1
]  # fmt: skip
"""Sparse tensor cores, which take several rows, are nowhere but on a GPU."""


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(("device", "format", "rows"), WHERE)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("parts", "k", "activation", "biased"),
    [((40, 17, 33), 260, "none", False), ((17, 66), 1100, "silu", True), ((1, 1, 5), 8, "none", True)],
)  # fmt: skip
def test_kernels_are_the_dense_layers(device, format, rows, dtype, parts, k, activation, biased):
    random = torch.Generator().manual_seed(rows)
    matrices = [matrix_of(format, m, k, dtype) for m in parts]
    x = torch.randn(rows, k, generator=random).to(dtype)
    biases = [torch.randn(m, generator=random).to(dtype) for m in parts] if biased else []
    for name, found in by_kernel(matrices, x, device, biases, activation).items():
        for place, (one, matrix) in enumerate(zip(found, matrices, strict=True)):
            bias = biases[place].double() if biased else None
            exact = F.linear(x.double(), matrix.to_dense().double(), bias)
            exact = exact if activation == "none" else getattr(F, activation)(exact)
            assert (one.double() - exact).norm() <= TOLERANCE[dtype] * exact.norm(), (name, place)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("device", "format", "rows"), WHERE)
def test_nothing_is_multiplied_where_nothing_is_stored(device, format, rows):
    """An infinite or missing input reaches the rows that store something there, and no others."""
    matrices = [matrix_of(format, m, 1104, torch.float16) for m in (20, 33)]
    x = torch.randn(rows, 1104, generator=torch.Generator().manual_seed(1)).half()
    x[0, 7], x[-1, 1050] = math.inf, math.nan
    for name, found in by_kernel(matrices, x, device, [], "none").items():
        for one, matrix in zip(found, matrices, strict=True):
            weight = matrix.to_dense()
            exact = torch.where(weight != 0, x.double()[:, None] * weight.double(), 0.0).sum(-1)
            assert exact.isnan().any() and exact.isfinite().any()
            torch.testing.assert_close(one.double(), exact, rtol=2e-3, atol=5e-2, equal_nan=True, msg=name)


@needs_triton
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("count", [2, 3])
def test_what_is_timed_is_of_the_same_kind(format, count):
    """The problem that stands for a signature has the parts, and the reference those of its operands."""
    from sparsecomp.lowering.cache.signature import device_of
    from sparsecomp.lowering.sparse import narrow_siblings, packed_siblings
    from sparsecomp.lowering.sparse.siblings import siblings_problem
    from sparsecomp.passes.cost.alone import problem_alone

    operation = {"narrow": narrow_siblings, "nm": packed_siblings}[format].SIBLINGS[count]
    each = [problem_alone(product(format, m, 264, 1), 0) for m in (40, 33, 17)[:count]]
    problem, device = siblings_problem(each), device_of(torch.device("cpu"))
    signature = operation.signature(problem, device)
    stands = operation.representative(signature)
    assert operation.signature(stands, device).key == signature.key and len(stands.parts) == count
    assert sum(stands.parts) == stands.m
    operands = operation.operands(stands, torch.device("cpu"), 0)
    outs = operation.reference(stands, operands)
    assert [one.shape for one in outs] == [operands[place].shape for place in operation.results]


@pytest.mark.slow(reason="compiles for two GPUs in a process of its own")
def test_kernels_compile_for_gpus_that_are_not_there():
    compile_in_subprocess(
        """
        from triton.experimental.gluon._runtime import GluonASTSource

        from sparsecomp.lowering.sparse.kernels.narrow_siblings import narrow_siblings_kernel
        from sparsecomp.lowering.sparse.kernels.packed_siblings import (
            packed_fragments_siblings_kernel, packed_row_siblings_kernel)

        def types_of(kernel, kind):
            ends = {"starts_ptr": "*i32", "chunks_ptr": "*i32", "bases_ptr": "*i16", "indices_ptr": "*u8",
                    "positions_ptr": "*i32"}
            return {name: next((one for end, one in ends.items() if name.endswith(end)), kind)
                    if name.endswith("_ptr") else "i32" for name in kernel.arg_names}

        def check(kernel, kind, constants, capability, *more, **options):
            for is_third in (True, False):
                third = [one for one in kernel.arg_names if one.startswith("third") and one.endswith("_ptr")]
                none = dict.fromkeys([] if is_third else [*third, "bias_ptr", "second_bias_ptr"])
                yield build(kernel, types_of(kernel, kind), {**constants, **none}, capability, *more, **options)

        for capability, (dtype, kind) in ((80, ("bfloat16", "*bf16")), (90, ("float16", "*fp16"))):
            for columns, entries in ((1, 256), (8, 64)):
                constants = dict(ACTIVATION="silu", CHUNK=16, ROWS=4, BN=columns, E=entries)
                assert len([*check(narrow_siblings_kernel, kind, constants, capability, num_warps=1)]) == 2
            constants = dict(ACTIVATION="silu", EVEN=True, ROWS=2, BLOCKS=2, LANES=32, STEPS=8)
            assert len([*check(packed_row_siblings_kernel, kind, constants, capability, num_warps=1)]) == 2
            constants = dict(ACTIVATION="silu", DTYPE=dtype, WHOLE=False, TILES=2, num_warps=4)
            for built in check(packed_fragments_siblings_kernel, kind, constants, capability, GluonASTSource,
                               num_warps=4):
                assert built.asm["ptx"].count("mma.sp") == 16
        """
    )


# -- the operator


def arguments(matrices: list[SparseMatrix], x: Tensor, biases: list[Tensor], device: str) -> list[Any]:
    """Of the operator, but for the activation."""
    stored = [stored_by_rows(one.to_device(device)) for one in matrices]
    rows = x.shape[:-1].numel()
    packed = isinstance(matrices[0], NM)
    copies = [one[1] for one in weights_of([one.to_device(device) for one in matrices], rows)] if packed else []
    return [
        x.to(device), [values for values, *_ in stored], [array for _, arrays, _ in stored for array in arrays],
        [layout.written() for *_, layout in stored], copies, [one.to(device) for one in biases], 0, 0,
    ]  # fmt: skip


@needs_triton
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", [(1, 64), (3, 64), (2, 2, 64), (40, 64), (0, 64)])
@pytest.mark.parametrize("biased", [False, True])
def test_the_operator_takes_any_rows(device, format, shape, biased):
    from sparsecomp.ops.sparse.siblings import siblings

    matrices, x = [matrix_of(format, m, 64, torch.float16) for m in (20, 33)], torch.randn(shape).half()
    biases = [torch.randn(one.shape[0]).half() for one in matrices] if biased else []
    found = siblings(*arguments(matrices, x, biases, device), "relu")
    for place, (one, matrix) in enumerate(zip(found, matrices, strict=True)):
        bias = biases[place].double() if biased else None
        exact = F.relu(F.linear(x.double(), matrix.to_dense().double(), bias))
        assert one.shape == exact.shape and one.is_contiguous()
        assert (one.cpu() - exact).norm() <= 1e-3 * exact.norm()


@needs_triton
@pytest.mark.parametrize("format", FORMATS)
def test_opcheck(format):
    given = arguments([matrix_of(format, m, 64, torch.float16) for m in (20, 33)], torch.randn(1, 64).half(), [], "cpu")
    torch.library.opcheck(torch.ops.sparsecomp.siblings.default, (*given, "silu"))


@needs_triton
def test_operands_that_do_not_belong_together_are_refused():
    from sparsecomp.lowering.sparse.packed_siblings import launch_packed_siblings

    (values, positions), (other, _) = weights_of([matrix_of("nm", m, 64, torch.float16) for m in (20, 33)], 1)
    given = [(values, positions), (other, positions)]
    with pytest.raises(FormatError, match="not of 2:4 in 33 rows"):
        launch_packed_siblings(torch.zeros(1, 64).half(), given, [None] * 2, "none")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("rows", [1, 4])
def test_in_a_cuda_graph(format, rows):
    from sparsecomp.ops.sparse.siblings import siblings

    matrices = [matrix_of(format, m, 2504, torch.float16) for m in (1000, 300, 290)]
    x = torch.randn(rows, 2504).half()
    given = arguments(matrices, x, [], "cuda")
    graph, results = graph_of(lambda: torch.cat(siblings(*given), 1))
    given[0].copy_(given[0].roll(1, 1))
    graph.replay()
    torch.cuda.synchronize()
    exact = x.roll(1, 1).double() @ torch.cat([one.to_dense() for one in matrices]).double().mT
    assert (results.cpu() - exact).norm() <= 1e-3 * exact.norm()


# -- the rule


class Attending(nn.Module):
    """Layers on one x."""

    def __init__(self, format: str, rows: tuple[int, ...] = (96, 40, 33), biased: bool = False, k: int = 264) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            SparseLinear(matrix_of(format, m, k, torch.float16), torch.randn(m).half() if biased else None,
                         requires_grad=False)
            for m in rows
        )  # fmt: skip

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(layer(x) for layer in self.layers)

    def exact(self, x: Tensor) -> list[Tensor]:
        """In float64."""
        biases = [None if one.bias is None else one.bias.double() for one in self.layers]
        dense = [one.weight.detach().to_dense().double() for one in self.layers]
        return [F.linear(x.double(), *one) for one in zip(dense, biases, strict=True)]


@pytest.fixture
def few_rows(monkeypatch):
    """Layers run by the kernels for few rows that are small enough for a test, and no bitmaps."""
    narrow = Decision("narrow_rows", "asked for", {"narrow_rows": 1e-6, "dense": 2e-6})
    halves = Decision("packed_row", "asked for", {"packed_row": 1e-7, "dense": 2e-6})
    monkeypatch.setattr(linear, "decided", lambda *operands: narrow)
    monkeypatch.setattr(linear, "bitmap_plan", lambda *operands: None)
    monkeypatch.setattr(packed, "decide", lambda one, rivals: halves if one.layout.format == "nm" else None)


@needs_triton
@pytest.mark.parametrize(("format", "name"), [("narrow", "narrow_three"), ("nm", "packed_{kind}_three")])
@pytest.mark.parametrize(("biased", "shape"), [(False, (1, 264)), (True, (2, 3, 264))])
def test_layers_on_one_x_are_one_launch(format, name, biased, shape, few_rows):
    """As for an H200, run op by op on a CPU."""
    torch.manual_seed(0)
    model, x = Attending(format, biased=biased), torch.randn(shape).half()
    out, report, code = rewritten_for("h200", model, x, frozen=True, verify=True)
    assert runs_as(report) == 3 * [{"narrow": "narrow", "nm": "packed copy"}[format]] + ["shared input"]
    wanted = name.format(kind="row" if len(shape) == 2 else "fragments")
    start = f"`layers.0`, `layers.1` and `layers.2` in one launch by {wanted}; estimated"
    assert site(report, "shared_input").reason.startswith(start)
    assert code.count("siblings.default(") == 1 and "packed_linear" not in code and "sparse_linear" not in code
    for found, exact in zip(out, model.exact(x), strict=True):
        assert found.shape == exact.shape and found.is_contiguous() and (found - exact).norm() <= 1e-3 * exact.norm()


@needs_triton
def test_layers_of_two_forms_are_launches_of_their_own(few_rows):
    model = Attending("narrow", (96, 40))
    model.layers[1] = Attending("nm", (40,)).layers[0]
    _, report, code = rewritten_for("h200", model, torch.randn(1, 264).half(), frozen=True)
    assert "shared input" not in runs_as(report) and "siblings" not in code


def product(format: str, m: int, k: int, rows: int, share: float = 0.3, **more: Any) -> Product:
    """A layer on an H200."""
    block = (2, 4) if format == "nm" else (1, 1)
    entries = round((0.5 if format == "nm" else share) * m * k)
    return Product(
        torch.device("cuda"), Layout(format, block, (m, k)), rows, 1, entries, torch.float16, True, False, False,
        "none", "", constant=True, target=target_named("h200"), **more,
    )  # fmt: skip


@needs_triton
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("replayed", [True, False])
def test_one_launch_saves_what_launches_take(format, rows, replayed):
    from sparsecomp.passes.cost.siblings import decide_siblings

    gains = []
    for m, k in ((512, 512), (4096, 4096), (16384, 8192)):
        layers = [product(format, one, k, rows, replayed=replayed) for one in (m, m // 4, m // 4)]
        decision = decide_siblings(layers, 0)
        (name,) = decision.seconds.keys() - {"dense"}
        if replayed:
            assert decision.seconds["dense"] - decision.seconds[name] > 2 * layers[0].card.launch
        gains.append(decision.seconds["dense"] / decision.seconds[name])
    assert gains == sorted(gains, reverse=True) and gains[0] > 1.3


@needs_triton
def test_rows_that_no_kernel_takes_stay_apart():
    from sparsecomp.passes.cost.siblings import decide_siblings

    decision = decide_siblings([product("narrow", 256, 320, 17) for _ in range(2)], 0)
    assert decision.dense and "17 columns" in decision.reason


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("mode", ["reduce-overhead", "default"])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("rows", [1, 5])
def test_compiled_layers_follow_their_weights(mode, format, rows, few_rows):
    import sparsecomp

    torch.compiler.reset()
    model = Attending(format, (4096, 1024, 1024), k=4096).cuda()
    compiled = torch.compile(model, backend="sparsecomp", options={"frozen": True, "mode": mode})
    with torch.no_grad():
        for step in range(4):
            x = torch.randn(rows, 4096, device="cuda").half()
            for found, exact in zip(compiled(x), model.exact(x), strict=True):
                assert (found - exact).norm() <= 2e-3 * exact.norm()
            if step == 1:
                model.layers[1].values.mul_(2)
    report = sparsecomp.last_report()
    assert report is not None and runs_as(report)[-1] == "shared input"
