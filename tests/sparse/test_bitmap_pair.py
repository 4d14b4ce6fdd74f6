"""Gated pairs of layers of few rows by two bitmaps: the kernel, the operator, and when the compiler takes it."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernel_devices import graph_of, needs_triton
from rewriting import rewritten_for, site
from test_bitmap_linear import DTYPES, TOLERANCE, needs_gpu, packed
from test_gated_pair import REPLAYED, Gated, exact_pair, implementations, layer, operands, pruned
from torch import Tensor, fx

import sparsecomp
from sparsecomp.compiler.capture import Graph
from sparsecomp.errors import FormatError, FrozenWeightError
from sparsecomp.formats import BITMAP, CSR, NARROW
from sparsecomp.lowering.tuning.ceilings import target_named
from sparsecomp.options import Options
from sparsecomp.passes.cost.decision import Decision
from sparsecomp.passes.sparse import bitmap


def by_kernel(
    weights: list[Tensor], x: Tensor, grain: int, biases: list[Tensor | None], activation: str, longest: int = 0
) -> dict[str, Tensor]:
    """The pair by its kernel on a GPU, in the usual configuration and in one of two strips."""
    from sparsecomp.lowering.cache.signature import device_of
    from sparsecomp.lowering.launch.epilogue import output_of
    from sparsecomp.lowering.sparse.bitmap_linear import BitmapLinear
    from sparsecomp.lowering.sparse.bitmap_pair import BITMAP_PAIR

    device = torch.device("cuda", 0)
    stored = [CSR.from_dense(weight.to(device)) for weight in weights]
    copies = [packed(one, grain, longest) for one in stored]
    (n, k), m, x = x.shape, weights[0].shape[0], x.to(device)
    given = [None if one is None else one.to(device) for one in biases]
    out = torch.empty(n, m, dtype=x.dtype, device=device).mT
    described = output_of(out, given[0], "row", None, activation, 1.0)
    nnz, most = sum(one.values.numel() for one in stored) // 2, max(one[2] for one in copies)
    problem = BitmapLinear(m, k, n, nnz, grain, most, str(x.dtype)[6:], "int32", described)
    found: dict[str, Tensor] = {}
    for one in BITMAP_PAIR.candidates(problem, device_of(device)):
        kind = f"{one.config['STRIPS']} strips"
        if kind not in found:
            out.fill_(math.nan)
            one.template.prepare(problem, one.config)(*copies[0][0], *copies[1][0], x, *given, out)
            found[kind] = out.mT.cpu().clone()
    assert found
    return found


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("rows", [1, 8, 13])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("size", "activation", "biased"),
    [((37, 1024), "silu", True), ((1, 8), "none", False), ((20, 1104), "gelu", True), ((65, 4096), "relu", False)],
)
def test_kernels_are_the_dense_pair(rows, dtype, biased, size, activation):
    random = torch.Generator().manual_seed(rows)
    weights = [pruned(*size, which, 0.5, dtype) for which in range(2)]
    x = torch.randn(rows, size[1], generator=random).to(dtype)
    biases: list[Tensor | None] = [torch.randn(size[0], generator=random).to(dtype) if biased else None for _ in "gu"]
    exact = exact_pair(x, weights, biases, activation)
    for grain in (1, 2):
        for name, found in by_kernel(weights, x, grain, biases, activation).items():
            assert (found.double() - exact).norm() <= 2 * TOLERANCE[dtype] * exact.norm(), (grain, name)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("grain", [1, 2])
def test_nothing_is_multiplied_where_nothing_is_stored(grain, rows):
    """An infinite or missing input reaches the rows that store something there, of either weight, and no others."""
    weights = [pruned(40, 1104, which) for which in range(2)]
    x = torch.randn(rows, 1104, generator=torch.Generator().manual_seed(1)).half()
    x[0, 7], x[-1, 1050] = math.inf, math.nan
    gate, up = (torch.where(weight != 0, x.double()[:, None] * weight.double(), 0.0).sum(-1) for weight in weights)
    exact = gate.relu() * up
    assert exact.isnan().any() and exact.isfinite().any()
    for name, found in by_kernel(weights, x, grain, [None, None], "relu").items():
        torch.testing.assert_close(found.double(), exact, rtol=4e-3, atol=1.0, equal_nan=True, msg=name)


@pytest.mark.gpu
@needs_gpu
def test_chunks_that_are_too_long_are_multiplied_all_the_same():
    """Of one of the weights alone."""
    weights, x = [pruned(40, 1104, 0, 0.9), pruned(40, 1104, 0, 0.1)], torch.randn(3, 1104).half()
    exact = exact_pair(x, weights, [None, None], "silu")
    for given in (weights, weights[::-1]):
        exact = exact_pair(x, given, [None, None], "silu")
        for name, found in by_kernel(given, x, 1, [None, None], "silu", 512).items():
            assert (found.double() - exact).norm() <= 2e-3 * exact.norm(), name


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("count", [1, 9])
def test_what_is_timed_is_a_pair_of_the_same_kind(count):
    """Fresh operands of the problem that stands for all of its signature, held against the reference."""
    from sparsecomp.lowering.cache.signature import device_of
    from sparsecomp.lowering.sparse.bitmap_linear import BitmapLinear, random_longest
    from sparsecomp.lowering.sparse.bitmap_pair import BITMAP_PAIR
    from sparsecomp.lowering.tuning.trial import fault

    where = torch.device("cuda")
    longest = random_longest(100, 264, 8000, 2)
    problem = BitmapLinear.of_layer(100, 264, count, 8000, 2, longest, torch.float16, True, False, "silu")
    stands = BITMAP_PAIR.representative(BITMAP_PAIR.signature(problem, device_of(where)))
    for candidate in BITMAP_PAIR.candidates(stands, device_of(where)):
        assert fault(BITMAP_PAIR, stands, where, candidate) is None, candidate.name


@needs_triton
@pytest.mark.parametrize("zeros", [0.5, 0.7, 0.9])
@pytest.mark.parametrize("parts", [(), (11008, 11008), (4096, 1024, 1024)])
def test_all_programs_run_at_once_where_they_can(zeros, parts):
    """On 132 processors of 228 KiB of shared memory each, of which a program takes one more than its rings."""
    from sparsecomp.lowering.sparse.bitmap_linear import BitmapLinear, random_longest
    from sparsecomp.lowering.sparse.bitmap_pair import BITMAP_PAIR
    from sparsecomp.lowering.sparse.bitmap_siblings import SIBLINGS
    from sparsecomp.lowering.sparse.kernels.bitmap_walk import ring_bytes

    m = sum(parts) or 11008
    nnz = round(m * 4096 * (1 - zeros))
    problem = BitmapLinear.of_layer(
        m, 4096, 1, nnz, 2, random_longest(m, 4096, nnz, 2), torch.float16, False, False, "none"
    )._replace(parts=parts)
    operation = SIBLINGS[len(parts)] if parts else BITMAP_PAIR
    (usual, *_) = operation.candidates(problem, target_named("h200").device)
    launch: Any = usual.template.prepare(problem, usual.config)
    warps, depth = launch.named["num_warps"], launch.named["DEPTH"]
    a_processor = -(-launch.grid[0] // 132)
    assert a_processor * (ring_bytes(warps, depth, 1, problem.slot) + 1024 + 256) <= 228 * 1024
    deeper = a_processor * (ring_bytes(warps, depth + 1, 1, problem.slot) + 1024)
    assert depth == (4 if warps < 8 else 2) or deeper > 228 * 1024


# -- the operator


def arguments(weights: list[Tensor], x: Tensor, biases: list[Tensor | None], grain: int, device: str) -> list[Any]:
    """Of the operator, but for the activation."""
    copies = [packed(CSR.from_dense(weight.to(device)), grain) for weight in weights]
    (values, arrays, layout), (other, others, other_layout) = operands(CSR, weights, device)
    first, second = (None if bias is None else bias.to(device) for bias in biases)
    longest = max(one[2] for one in copies)
    weight, beside = (values, arrays, layout, copies[0][0], first), (other, others, other_layout, copies[1][0], second)
    return [x.to(device), *weight, *beside, grain, longest]


@needs_triton
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])])
@pytest.mark.parametrize("shape", [(3, 64), (2, 2, 64), (40, 64), (0, 64)])
def test_the_operator_takes_any_rows(device, shape):
    from sparsecomp.ops.sparse.bitmap_pair import bitmap_pair

    weights, x = [pruned(20, 64, which) for which in range(2)], torch.randn(shape).half()
    biases: list[Tensor | None] = [torch.randn(20).half() for _ in "gu"]
    found = bitmap_pair(*arguments(weights, x, biases, 2, device), "silu").cpu()
    exact = exact_pair(x, weights, biases, "silu")
    assert found.shape == exact.shape and found.is_contiguous()
    assert (found - exact).norm() <= 1.5e-3 * exact.norm()


@needs_triton
def test_opcheck():
    given = arguments([pruned(20, 64, which) for which in range(2)], torch.randn(3, 64).half(), [None, None], 1, "cpu")
    torch.library.opcheck(torch.ops.sparsecomp.bitmap_pair.default, (*given, "silu"))


@needs_triton
def test_operands_that_do_not_belong_together_are_refused():
    from sparsecomp.lowering.sparse.bitmap_pair import launch_bitmap_pair

    weights = [pruned(20, 64, which) for which in range(2)]
    stored = [CSR.from_dense(weight) for weight in weights]
    (first, grain, longest), (second, *_) = (packed(one) for one in stored)
    count, other = (one.values.numel() for one in stored)
    x = torch.zeros(1, 64).half()
    for one, two, values in ((first, second, (count, other + 9)), (second, first, (count, other))):
        with pytest.raises(FormatError, match="is none of"):
            launch_bitmap_pair(x, (one, two), 20, values, grain, longest, (None, None), "none")
    call = arguments(weights, x, [torch.zeros(20).half(), None], 1, "cpu")
    with pytest.raises(FormatError, match="both or none"):
        torch.ops.sparsecomp.bitmap_pair.default(*call, "silu")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("rows", [1, 4, 16])
def test_in_a_cuda_graph(rows):
    from sparsecomp.ops.sparse.bitmap_pair import bitmap_pair

    weights, x = [pruned(1000, 2504, which) for which in range(2)], torch.randn(rows, 2504).half()
    given = arguments(weights, x, [None, None], 2, "cuda")
    graph, result = graph_of(lambda: bitmap_pair(*given, "silu"))
    given[0].copy_(given[0].roll(1, 1))
    graph.replay()
    torch.cuda.synchronize()
    exact = exact_pair(x.roll(1, 1), weights, [None, None], "silu")
    assert (result.cpu() - exact).norm() <= 2e-3 * exact.norm()


# -- the rule


@pytest.fixture
def by_bitmaps(monkeypatch):
    """Layers and pairs run by bitmaps that are small enough for a test."""
    always = Decision("bitmap_tiles", "asked for", {"bitmap_tiles": 1e-9, "dense": 1e-3}), 2
    together = Decision("bitmap_pair", "asked for")
    monkeypatch.setattr(bitmap, "decide", lambda *operands: always)
    monkeypatch.setattr("sparsecomp.passes.sparse.gated_pair.decide", lambda *operands: together)


@needs_triton
@pytest.mark.parametrize(("kind", "activation"), [(CSR, "silu"), (NARROW, "gelu_tanh"), (BITMAP, "none")])
def test_layers_by_bitmaps_are_one_launch(kind, activation, by_bitmaps):
    """As for an H200, run op by op on a CPU."""
    torch.manual_seed(0)
    model, x = Gated(kind, (256, 320), (True, True), activation), torch.randn(2, 1, 320).half()
    out, report, code = rewritten_for("h200", model, x, frozen=True, verify=True)
    assert implementations(report) == ["bitmap copy", "bitmap copy", "gated pair"], site(report, "gated_pair").reason
    reason = site(report, "gated_pair").reason
    assert "in one launch by bitmap_pair, rounded once; asked for" in reason and "no bitmap" not in reason
    assert code.count("bitmap_pair.default(") == 1 and "linear.default" not in code
    exact = model.exact(x)
    assert out.shape == exact.shape and (out - exact).norm() <= 2e-3 * exact.norm()


@needs_triton
@pytest.mark.parametrize("rows", [1, 3])
def test_layers_stored_as_bitmaps_need_no_promise(rows, monkeypatch):
    """They are read as they are stored, and are no other kind for one having longer chunks than the other."""
    by_itself = Decision("bitmap_tiles", "asked for", {"bitmap_tiles": 1e-6, "dense": 2e-6})
    monkeypatch.setattr("sparsecomp.passes.sparse.linear.decided", lambda *operands: by_itself)
    model, x = Gated(BITMAP, (256, 320), (True, True)), torch.randn(rows, 320).half()
    out, report, code = rewritten_for("h200", model, x, verify=True)
    assert implementations(report) == ["bitmap", "bitmap", "gated pair"], site(report, "gated_pair").reason
    assert code.count("bitmap_pair.default(") == 1 and "constant" not in code
    exact = model.exact(x)
    assert (out - exact).norm() <= 2e-3 * exact.norm()


@needs_triton
def test_broken_promises_are_found(by_bitmaps, monkeypatch):
    """Under `SPARSECOMP_DEBUG=1`: what is kept of either layer is constants of the graph."""
    monkeypatch.setenv("SPARSECOMP_DEBUG", "1")
    model, x, options = Gated(CSR, (256, 320)), torch.randn(1, 320).half(), Options.parse(None, {"frozen": True})
    reports: list[sparsecomp.Report] = []

    def backend(gm: fx.GraphModule, example_inputs: list[Tensor]) -> Callable[..., Any]:
        reports.append(Graph.of_dynamo(gm, example_inputs, {}, options).rewrite(options, target_named("h200")))
        return gm.forward

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend)
    with torch.no_grad():
        exact = model.exact(x)
        assert (compiled(x) - exact).norm() <= 2e-3 * exact.norm()
        assert implementations(reports[0])[-1] == "gated pair"
        model.up.values.data[-1] = 7.0
        with pytest.raises(FrozenWeightError, match="values.* was promised to stay"):
            compiled(x)


@needs_triton
@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("replayed", [True, False])
def test_a_pair_saves_launches(rows, replayed):
    """Both weights are decoded in any case; what is saved counts less the larger they are."""
    from sparsecomp.passes.cost.gated_pair import decide

    gains = []
    for m, k in ((1024, 1024), (11008, 4096), (28672, 8192)):
        one = layer("csr", m, k, rows, 0.3, replayed=replayed, constant=True)
        seconds = decide(one._replace(activation="silu"), one, (2, 2)).seconds
        assert seconds["dense"] - seconds["bitmap_pair"] > one.card.launch
        gains.append(seconds["dense"] / seconds["bitmap_pair"])
    assert gains == sorted(gains, reverse=True)


@needs_triton
def test_pairs_of_sixteen_rows_stay_apart():
    """By the estimate of an H200, as measured there."""
    from sparsecomp.passes.cost.gated_pair import decide

    for m, k in ((11008, 4096), (28672, 8192)):
        one = layer("csr", m, k, 16, 0.3, constant=True)
        seconds = decide(one._replace(activation="silu"), one, (2, 2)).seconds
        assert seconds["dense"] < seconds["bitmap_pair"]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("kind", [NARROW, BITMAP])
def test_compiled_pairs_follow_their_weights(kind, by_bitmaps, monkeypatch):
    if kind is BITMAP:
        by_itself = Decision("bitmap_tiles", "asked for", {"bitmap_tiles": 1e-6, "dense": 2e-6})
        monkeypatch.setattr("sparsecomp.passes.sparse.linear.decided", lambda *operands: by_itself)
        monkeypatch.setattr(bitmap, "decide", lambda *operands: None)
    torch.compiler.reset()
    model = Gated(kind, (11008, 4096)).cuda()
    compiled = torch.compile(model, backend="sparsecomp", options={"frozen": True, "mode": REPLAYED})
    with torch.no_grad():
        for step in range(4):
            # sums of 800 products of numbers around 1 are around 30, and the largest of their products no float16
            x = torch.randn(1, 4096, device="cuda").half() / 8
            exact = model.exact(x)
            assert (compiled(x) - exact).norm() <= 2e-3 * exact.norm()
            if step == 1:
                model.up.values.mul_(2)
    report = sparsecomp.last_report()
    assert report is not None and implementations(report)[-1] == "gated pair"
