"""2:4 layers of few rows with packed positions: how these lie, the kernels, and when the compiler takes them."""

import itertools
import json
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compile_kernel import compile_in_subprocess
from kernel_devices import DEVICES, KERNEL_DEVICES, graph_of, needs_triton
from rewriting import rewritten_for
from silu_layer import SiluLayer
from torch import Tensor

import sparsecomp
from bench.table import RESULTS
from sparsecomp.errors import FormatError
from sparsecomp.formats import NM
from sparsecomp.lowering.tuning.ceilings import target_named
from sparsecomp.nn import SparseLinear
from sparsecomp.passes.cost.sparse import Product, decide
from sparsecomp.reference.patterns import Layout

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
DTYPES = (torch.float16, torch.bfloat16)
TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 8e-3}


def pruned(rows: int, cols: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A weight with two of four elements, some of them at other places than the magnitude says."""
    random = torch.Generator().manual_seed(rows + cols)
    groups = torch.randn(rows, cols // 4, 4, generator=random)
    dropped = torch.rand(groups.shape, generator=random).argsort(-1)[..., :2]
    return groups.scatter_(-1, dropped, 0.0).view(rows, cols).to(dtype)


def two_of_four(rows: int, cols: int) -> NM:
    """Such a weight, in float16."""
    return NM.from_dense(pruned(rows, cols, torch.float16), n=2, m=4)


def product(matrix: NM, x: Tensor, device: str, other: tuple[NM, Tensor] | None = None, **finish) -> dict[str, Tensor]:
    """x @ matrix.T by the kernel of so many rows, in every configuration; times that of another matrix and bias."""
    from sparsecomp.lowering.cache.signature import device_of
    from sparsecomp.lowering.launch.epilogue import output_of
    from sparsecomp.lowering.sparse.packed_linear import PACKED_LINEAR, PackedLinear, PackedPositions, order_for

    def arrays(one: NM) -> tuple[Tensor, Tensor]:
        return one.values.to(device), PackedPositions(order_for(n))(one.indices.to(device))

    (n, k), m, x = x.shape, matrix.shape[0], x.to(device)
    bias, residual = (None if one is None else one.to(device) for one in map(finish.get, ("bias", "residual")))
    residual = None if residual is None else residual.mT
    others = (None, None, None) if other is None else (*arrays(other[0]), other[1].to(device))
    out = torch.empty(n, m, dtype=x.dtype, device=device).mT
    described = output_of(out, bias, "row", residual, finish.get("activation", "none"), 1.0)
    problem = PackedLinear(m, k, n, order_for(n), other is not None, str(x.dtype)[6:], described)
    found: dict[str, Tensor] = {}
    for one in PACKED_LINEAR.candidates(problem, device_of(torch.device(device))):
        kind = str(one.config) if device == "cuda" else f"{one.config['BLOCKS']} blocks"
        if kind in found:
            continue
        out.fill_(math.nan)
        launch = one.template.prepare(problem, one.config)
        launch(*arrays(matrix), *others[:2], x, bias, others[2], residual, out)
        found[kind] = out.mT.cpu().clone()
    assert found
    return found


@needs_triton
def test_positions_by_lanes():
    from sparsecomp.lowering.sparse.packed_linear import PackedPositions, unpacked_columns

    indices = torch.tensor([0, 1], dtype=torch.uint8).repeat(1, 300)
    indices[0, :2] = torch.tensor([1, 3])  # group 0: step 0 of lane 0 in block 0
    indices[0, 2 * 33 : 2 * 34] = torch.tensor([0, 2])  # group 33: step 1 of lane 1
    indices[0, 2 * 257 : 2 * 258] = torch.tensor([2, 3])  # group 257: step 0 of lane 1 in block 1
    found = PackedPositions("lanes")(indices)
    usual = 0x44444444  # 0 and 1, eight times
    assert found.shape == (1, 64) and found.dtype is torch.int32
    assert found[0, 0] == usual + (1 | 3 << 2) - 4 and found[0, 1] == usual + ((2 << 2) - 4 << 4)
    assert found[0, 32 + 1] == usual - 4 + (2 | 3 << 2) and found[0, 32 + 13] == usual
    assert torch.equal(unpacked_columns(found, 1, 1200)[0], torch.arange(600) // 2 * 4 + indices[0])
    with pytest.raises(FormatError, match="k / 2"):
        PackedPositions("lanes")(indices[0])


@needs_triton
def test_positions_by_fragments_are_where_a_product_reads_them():
    """`mma.sp`, m16n8k32: row r, stored pair p of a product is of thread p % 4, the first pairs in its first registers;
    its positions are bits 4 · (p % 4) and on, for the lower rows 16 and on, of word `product % 4` of thread p // 4 of
    the four, or of the two behind for the last four products of a turn."""
    from sparsecomp.lowering.sparse.packed_linear import PackedPositions, unpacked_columns

    matrix = NM.from_dense(pruned(37, 600), n=2, m=4)
    words = PackedPositions("fragments")(matrix.indices)
    assert words.shape == (3, 3, 128) and words.dtype is torch.int32
    indices = matrix.indices.view(37, 150, 2).tolist()
    for row, turn, number, pair in itertools.product(range(37), range(3), range(8), range(8)):
        # a thread loads four groups in a step of two products, of which each takes two
        group = 64 * turn + 16 * (number // 2) + 4 * (pair % 4) + 2 * (number % 2) + pair // 4
        thread = 4 * (row % 8) + pair // 4 + 2 * (number // 4)
        both = int(words[row // 16, turn, 4 * thread + number % 4]) >> (4 * (pair % 4) + 16 * (row % 16 // 8)) & 15
        assert [both & 3, both >> 2] == (indices[row][group] if group < 150 else [0, 1])
    assert torch.equal(unpacked_columns(words, 37, 600), torch.arange(300) // 2 * 4 + matrix.indices)


ROWS = [("interpreter", 1), *(("cuda", rows) for rows in (1, 2, 5, 8))]
"""Where kernels run: sparse tensor cores, which take several rows, nowhere but on a GPU."""
WHERE = [
    pytest.param(*KERNEL_DEVICES[place == "cuda"].values, rows, marks=KERNEL_DEVICES[place == "cuda"].marks,
                 id=f"{place}-{rows}")
    for place, rows in ROWS
]  # fmt: skip


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(("device", "rows"), WHERE)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("size", "activation"), [((37, 1024), "none"), ((1, 4), "relu"), ((20, 1100), "gelu"), ((65, 4096), "silu")]
)  # fmt: skip
def test_kernels_are_the_dense_layer(device, rows, dtype, size, activation):
    weight, random = pruned(*size, dtype), torch.Generator().manual_seed(rows)
    x, residual = (torch.randn(rows, n, generator=random).to(dtype) for n in size[::-1])
    bias = torch.randn(size[0], generator=random).to(dtype)
    exact = F.linear(x.double(), weight.double(), bias.double()) + residual.double()
    exact = exact if activation == "none" else getattr(F, activation)(exact)
    matrix = NM.from_dense(weight, n=2, m=4)
    for name, one in product(matrix, x, device, bias=bias, residual=residual, activation=activation).items():
        assert (one.double() - exact).norm() <= TOLERANCE[dtype] * exact.norm(), name


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("device", "rows"), WHERE)
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_are_the_dense_pair(device, rows, dtype):
    random = torch.Generator().manual_seed(rows)
    weights = [pruned(9, size, dtype)[:, :1100] for size in (1100, 1104)]
    x, *biases = (torch.randn(size, generator=random).to(dtype) for size in ((rows, 1100), (9,), (9,)))
    sums = [F.linear(x.double(), w.double(), bias.double()) for w, bias in zip(weights, biases, strict=True)]
    exact = F.silu(sums[0]) * sums[1]
    first, second = (NM.from_dense(weight, n=2, m=4) for weight in weights)
    for name, one in product(first, x, device, (second, biases[1]), bias=biases[0], activation="silu").items():
        assert (one.double() - exact).norm() <= TOLERANCE[dtype] * exact.norm(), name


@pytest.mark.parametrize(("device", "rows"), WHERE)
def test_nothing_is_multiplied_where_nothing_is_stored(device, rows):
    """An infinite or missing input reaches the rows that store something there, and no others: no filler either."""
    weight = pruned(20, 1100, torch.float16)
    weight[:, :8] = 0.0  # groups of filler alone
    weight[3, 7] = 2.0
    x = torch.randn(rows, 1100, generator=torch.Generator().manual_seed(1)).half()
    x[0, 7], x[-1, 1050], x[-1, 0] = math.inf, math.nan, -math.inf
    exact = torch.where(weight != 0, x.double()[:, None] * weight.double(), 0.0).sum(-1)
    assert exact.isnan().any() and exact.isfinite().any()
    for name, found in product(NM.from_dense(weight, n=2, m=4), x, device).items():
        torch.testing.assert_close(found.double(), exact, rtol=2e-3, atol=5e-2, equal_nan=True, msg=name)


@pytest.mark.slow(reason="compiles for two GPUs in a process of its own")
def test_kernels_compile_for_gpus_that_are_not_there():
    compile_in_subprocess(
        """
        from triton.experimental.gluon._runtime import GluonASTSource

        from sparsecomp.lowering.sparse.kernels.packed_fragments import packed_fragments_kernel
        from sparsecomp.lowering.sparse.kernels.packed_row import packed_row_kernel

        numbers = "M N groups words turns out_b out_m out_n res_b res_m res_n".split()
        own = "values other_values x bias other_bias residual out".split()
        finish = dict(BIAS_ROWS=True, ACTIVATION="silu")
        alone = dict.fromkeys(("other_values_ptr", "other_positions_ptr", "other_bias_ptr"))
        whole = ("groups", "words", "M", "out_n")
        for capability, (dtype, kind) in ((80, ("bfloat16", "*bf16")), (90, ("float16", "*fp16"))):
            types = dict.fromkeys(numbers, "i32") | dict.fromkeys([f"{one}_ptr" for one in own], kind)
            types |= dict(positions_ptr="*i32", other_positions_ptr="*i32", scale="fp32")
            for pair, tiles, warps in ((False, 1, 8), (True, 2, 4)):
                constants = {**finish, **({} if pair else alone), "PAIR": pair}
                build(packed_row_kernel, types, {**constants, "EVEN": pair, "ROWS": tiles, "BLOCKS": 4, "LANES": 32,
                      "STEPS": 8}, capability, whole=whole, num_warps=1)
                constants |= {"DTYPE": dtype, "WHOLE": tiles == 1, "TILES": tiles, "num_warps": warps}
                built = build(packed_fragments_kernel, types, constants, capability, GluonASTSource, whole,
                              num_warps=warps)
                assert built.asm["ptx"].count("mma.sp") == 8 * tiles * (1 + pair)
        """
    )


@needs_triton
@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("rows", "out", "frozen", "found"),
    [((1,), 4096, True, "packed copy"), ((8,), 1024, True, "dense copy"), ((1, 2), 12288, True, "packed copy"),
     ((9,), 4096, True, "dense copy"), ((1,), 4096, False, "nm")],
)  # fmt: skip
@pytest.mark.slow_cases(3)
def test_a_layer_that_is_promised_to_stay_is_multiplied_packed(rows, out, frozen, found):
    """As for an H200, run op by op on a CPU."""
    torch.manual_seed(0)
    model, x = SiluLayer(two_of_four(out, 4096)), torch.randn(*rows, 4096).half()
    result, report, code = rewritten_for("h200", model, x, frozen=frozen)
    assert ("packed_linear" in code) == (found == "packed copy")
    (site,) = [one for one in report.sites if one.rule == "sparse_linear"]
    kept = f"packed positions are kept, {out // 2048} MiB" in site.reason
    assert site.implementation == found and kept == (found == "packed copy")
    exact = model.exact(x)
    assert result.shape == exact.shape and (result - exact).norm() <= 1e-3 * exact.norm()


MEASURED = json.loads((RESULTS / "two_of_four.json").read_text())["result"]


def measured_at(row: dict[str, Any]) -> str:
    """Which layer a row of results is of."""
    return " ".join(map(str, row["layer"].values()))


@needs_triton
@pytest.mark.parametrize("row", MEASURED, ids=measured_at)
def test_the_estimate_is_what_was_measured(row):
    """Up to eight rows packed positions were the fastest, with more dense or cuSPARSELt, which is not here."""
    from sparsecomp.passes.cost.packed_linear import decide as packed

    m, k, rows, dtype = row["layer"].values()
    product = Product(
        torch.device("cuda"), Layout("nm", (2, 4), (m, k)), rows, 1, m * k // 2, getattr(torch, dtype), True, False,
        False, "none", "", constant=True, target=target_named("h200"),
    )  # fmt: skip
    decision, ms = packed(product, decide(product)), row["ms"]
    assert (decision is not None) == ("packed" in ms) == (rows <= 8)
    if decision is not None:
        assert decision.implementation == ("packed_row" if rows == 1 else "packed_fragments")
        seconds = decision.seconds[decision.implementation]
        assert 0.85 < seconds / ms["packed"] * 1e3 < 1.15
        assert 0.85 < decision.seconds["dense"] / seconds / (ms["dense"] / ms["packed"]) < 1.15
    assert packed(product._replace(layout=Layout("nm", (1, 4), (m, k))), decide(product)) is None


@needs_triton
def test_other_groups_and_dtypes_are_not_packed():
    for n, dtype in ((1, torch.float16), (2, torch.float32)):
        matrix = NM.from_dense(torch.eye(512, 512, dtype=dtype), n=n, m=4)
        layer = SparseLinear(matrix, requires_grad=False)
        with torch.no_grad():
            report = sparsecomp.explain(
                layer, torch.randn(1, 512).to(dtype), device="h200", mode="reduce-overhead", frozen=True
            )
        (site,) = [one for one in report.sites if one.rule == "sparse_linear"]
        assert site.implementation != "packed copy"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(3, 64), (2, 2, 64), (40, 64), (0, 64)])
def test_the_operator_takes_any_rows(device, shape):
    from sparsecomp.lowering.sparse.packed_linear import PackedPositions
    from sparsecomp.ops.sparse.packed_linear import packed_linear

    weight = pruned(20, 64, torch.float16)
    matrix = NM.from_dense(weight, n=2, m=4).to(device)
    x, residual, bias = torch.randn(shape).half(), torch.randn(*shape[:-1], 20).half(), torch.randn(20).half()
    given = [one.to(device) for one in (x, bias, residual)]
    found = packed_linear(
        given[0],
        matrix.values,
        matrix.indices,
        PackedPositions("fragments")(matrix.indices),
        *given[1:],
        activation="relu",
    ).cpu()
    exact = F.relu(F.linear(x.double(), weight.double(), bias.double()) + residual.double())
    assert found.shape == exact.shape and (found - exact).norm() <= 1e-3 * exact.norm()


@needs_triton
def test_operands_that_do_not_belong_together_are_refused():
    from sparsecomp.lowering.sparse.packed_linear import PackedPositions, launch_packed_linear

    matrix = NM.from_dense(pruned(20, 64, torch.float16), n=2, m=4)
    x, good = torch.zeros(1, 64).half(), (matrix.values, PackedPositions("lanes")(matrix.indices))
    for values, words in ((good[0][:, 2:], good[1]), (good[0], good[1][:, 1:]), (good[0], good[1][None])):
        with pytest.raises(FormatError, match="not of 2:4 in 20 rows"):
            launch_packed_linear(x, values, words, None, None, "none")
        with pytest.raises(FormatError, match="not of 2:4 in 20 rows"):
            launch_packed_linear(x, *good, None, None, "none", (values, words, None))


@needs_triton
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("device", DEVICES)
def test_what_is_added_has_the_shape_of_the_result(device):
    """As many numbers in another shape are others; on a GPU a bias of fewer would be read beyond its end."""
    from sparsecomp.lowering.sparse.packed_linear import PackedPositions

    matrix = NM.from_dense(pruned(4, 64, torch.float16), n=2, m=4).to(device)
    weight = (matrix.values, matrix.indices, PackedPositions("fragments")(matrix.indices))
    x, bias = torch.zeros(2, 64, device=device).half(), torch.zeros(4, device=device).half()
    linear, pair = (getattr(torch.ops.sparsecomp, name).default for name in ("packed_linear", "packed_pair"))
    for shape in ((4, 2), (8,), (1, 2, 4)):
        for call in (linear, linear.direct_cuda):  # refused before anything is launched
            with pytest.raises(FormatError, match="residual"):
                call(x, *weight, None, torch.zeros(shape, device=device).half(), "none")
    with pytest.raises(FormatError, match="another dtype or shape"):
        pair.direct_cuda(x, *weight, bias, *weight, bias[:2], "none")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("rows", [1, 4, 8])
def test_in_a_cuda_graph(rows):
    from sparsecomp.lowering.sparse.packed_linear import PackedPositions
    from sparsecomp.ops.sparse.packed_linear import packed_linear

    weight, x = pruned(1000, 2500, torch.float16), torch.randn(rows, 2500).half().cuda()
    matrix = NM.from_dense(weight.cuda(), n=2, m=4)
    positions = PackedPositions("lanes" if rows == 1 else "fragments")(matrix.indices)
    graph, result = graph_of(lambda: packed_linear(x, matrix.values, matrix.indices, positions))
    x.copy_(x.roll(1, 1))
    graph.replay()
    torch.cuda.synchronize()
    exact = F.linear(x.double(), weight.cuda().double())
    assert (result - exact).norm() <= 1e-3 * exact.norm()


@pytest.mark.gpu
@needs_gpu
def test_compiled_layers_follow_their_weights():
    torch.compiler.reset()
    model = SiluLayer(two_of_four(8192, 4096)).cuda()
    options = {"frozen": True, "mode": "reduce-overhead"}
    compiled = torch.compile(model, backend="sparsecomp", options=options)
    with torch.no_grad():
        for step in range(4):
            x = torch.randn(1, 4096, device="cuda").half()
            exact = model.exact(x)
            assert (compiled(x) - exact).norm() <= 2e-3 * exact.norm()
            if step == 1:
                model.layer.values.mul_(2)
            if step == 2:  # another pattern, written into the same memory
                model.layer.indices.copy_((3 - model.layer.indices).view(8192, -1, 2).flip(-1).flatten(1))
    report = sparsecomp.last_report()
    assert report is not None
    (site,) = [one for one in report.sites if one.rule == "sparse_linear"]
    assert site.implementation == "packed copy"
