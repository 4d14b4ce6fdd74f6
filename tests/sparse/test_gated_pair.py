"""Gated pairs of sparse layers of few rows: kernels of narrow CSR and CSR, and when the compiler makes one launch."""

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compile_kernel import compile_in_subprocess
from kernel_devices import DEVICES, KERNEL_DEVICES, graph_of, needs_triton
from rewriting import rewritten_for, site
from torch import Tensor, fx, nn

import sparsecomp
from bench.table import RESULTS
from sparsecomp.compiler.capture import Graph
from sparsecomp.errors import FormatError, FrozenWeightError
from sparsecomp.formats import CSR, NARROW, NM, SparseMatrix
from sparsecomp.lowering.tuning.ceilings import target_named
from sparsecomp.nn import SparseLinear
from sparsecomp.ops.sparse.gated_pair import gated_pair
from sparsecomp.options import Options
from sparsecomp.passes.cost.decision import MIN_GAIN, Decision
from sparsecomp.passes.cost.gated_pair import decide
from sparsecomp.passes.cost.sparse import Product
from sparsecomp.passes.engine.constants import Constants
from sparsecomp.passes.engine.rule import Context
from sparsecomp.passes.sparse import linear, packed
from sparsecomp.reference.patterns import Layout, stored_by_rows

REPLAYED = "reduce-overhead"
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 3e-6}
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x, "relu": F.relu, "gelu": F.gelu, "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "sigmoid": torch.sigmoid, "tanh": torch.tanh,
}  # fmt: skip


def pruned(rows: int, cols: int, which: int, zeros: float = 0.7, dtype: torch.dtype = torch.float16) -> Tensor:
    """A weight with this share of zeros; the `which`-th one has more of them."""
    random = torch.Generator().manual_seed(rows + cols + which)
    kept = torch.rand(rows, cols, generator=random) >= zeros + 0.1 * which
    return (torch.randn(rows, cols, generator=random) * kept).to(dtype)


def exact_pair(
    x: Tensor, weights: list[Tensor], biases: Sequence[Tensor | None], activation: str
) -> Tensor:  # fmt: skip
    """In float64."""
    gate, up = (
        F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        for weight, bias in zip(weights, biases, strict=True)
    )
    return ACTIVATIONS[activation](gate) * up


# -- kernels


def found_by(
    kind: type[SparseMatrix], weights: list[Tensor], x: Tensor, device: str, biases: list[Tensor | None],
    activation: str,
) -> dict[str, Tensor]:  # fmt: skip
    """The pair by its kernel, in a configuration of each number of rows a program."""
    from sparsecomp.lowering.cache.signature import device_of
    from sparsecomp.lowering.launch.epilogue import output_of
    from sparsecomp.lowering.sparse.gated_pair import PAIRS
    from sparsecomp.lowering.sparse.launcher import launcher_of

    stored = [stored_by_rows(kind.from_dense(weight).to_device(device)) for weight in weights]
    (values, arrays, layout), x, found = stored[0], x.to(device).mT, {}
    first, second = (None if one is None else one.to(device) for one in biases)
    out = torch.empty(x.shape[1], weights[0].shape[0], dtype=x.dtype, device=device).mT
    described = output_of(out, first, "row", None, activation, 1.0)
    problem = launcher_of(layout).problem_of(values, layout, x, out, described, arrays[0].dtype)
    flat = [array for values, arrays, _ in stored for array in (*arrays, values)]
    for one in PAIRS[layout.format].candidates(problem, device_of(torch.device(device))):
        name = f"{one.config.get('ROWS', one.config.get('BR'))} rows"
        if name not in found:
            out.fill_(math.nan)
            one.template.prepare(problem, one.config)(*flat, x, first, second, out)
            found[name] = out.mT.cpu().clone()
    assert found
    return found


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("kind", [NARROW, CSR])
@pytest.mark.parametrize("rows", [2, 5, 16])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    ("size", "activation"),
    [((5, 90), "silu"), ((1, 5), "none"), ((18, 131), "gelu"), ((9, 300), "gelu_tanh"), ((9, 40), "relu"),
     ((5, 60), "sigmoid"), ((5, 61), "tanh")],
)
def test_kernels_are_the_dense_pair(device, kind, rows, dtype, biased, size, activation):
    random = torch.Generator().manual_seed(rows)
    weights = [pruned(*size, which, 0.3, dtype) for which in range(2)]
    weights[1][size[0] // 2] = 0  # a row that the other weight alone stores something of
    x = torch.randn(rows, size[1], generator=random).to(dtype)
    biases: list[Tensor | None] = [torch.randn(size[0], generator=random).to(dtype) if biased else None for _ in "gu"]
    exact = exact_pair(x, weights, biases, activation)
    for name, found in found_by(kind, weights, x, device, biases, activation).items():
        assert (found.double() - exact).norm() <= TOLERANCE[dtype] * exact.norm(), name


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize(("kind", "rows"), [(NARROW, 1), (NARROW, 4), (CSR, 4)])
def test_nothing_is_multiplied_where_nothing_is_stored(device, kind, rows):
    """An infinite or missing input reaches the rows that store something there, of either weight, and no others."""
    weights = [pruned(10, 100, which, 0.5) for which in range(2)]
    x = torch.randn(rows, 100, generator=torch.Generator().manual_seed(1)).half()
    x[0, 7], x[-1, 50] = math.inf, math.nan
    gate, up = (
        torch.where(weight != 0, x.double()[:, None] * weight.double(), 0.0).sum(-1) for weight in weights
    )
    exact = gate.relu() * up
    assert exact.isnan().any() and exact.isinf().any() and exact.isfinite().any()
    for name, found in found_by(kind, weights, x, device, [None, None], "relu").items():
        torch.testing.assert_close(found.double(), exact, rtol=4e-3, atol=4e-2, equal_nan=True, msg=name)


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("form", ["narrow", "narrow of two dtypes", "csr"])
def test_what_is_timed_is_a_pair_of_the_same_kind(device, form):
    """Fresh operands of the problem that stands for all of its signature, held against the reference."""
    from sparsecomp.lowering.cache.signature import device_of
    from sparsecomp.lowering.launch.epilogue import described_output
    from sparsecomp.lowering.sparse.gated_pair import PAIRS
    from sparsecomp.lowering.sparse.launcher import launcher_of
    from sparsecomp.lowering.tuning.trial import fault

    layout = Layout("csr" if form == "csr" else "narrow", (1, 1), (12, 64))
    x, out = (torch.empty(3, size, dtype=torch.float16, device="meta").mT for size in (64, 12))
    described = described_output(out, "row", torch.float16, None, "silu")
    values = torch.empty(300, dtype=torch.float16, device="meta")
    problem = launcher_of(layout).problem_of(values, layout, x, out, described)
    if form == "narrow of two dtypes":
        problem = problem._replace(distance="uint8+int16")
    pair, where = PAIRS[layout.format], torch.device(device)
    signature = pair.signature(problem, device_of(where))
    stands = pair.representative(signature)
    assert pair.signature(stands, device_of(where)).key == signature.key
    flat = pair.operands(stands, where, 0)
    half = len(flat[:-4]) // 2
    assert not torch.equal(flat[half - 1], flat[2 * half - 1]) and flat[-2] is not None
    assert (flat[half - 2].dtype != flat[2 * half - 2].dtype) == ("two dtypes" in form)
    candidate = pair.candidates(stands, device_of(where))[0]
    assert fault(pair, stands, where, candidate) is None


@pytest.mark.slow(reason="compiles for two GPUs in a process of its own")
def test_kernels_compile_for_gpus_that_are_not_there():
    compile_in_subprocess(
        """
        from sparsecomp.lowering.sparse.kernels.csr_pair import csr_pair_kernel
        from sparsecomp.lowering.sparse.kernels.narrow_pair import narrow_pair_kernel

        arrays = dict(starts="*i32", chunks="*i32", bases="*i16", indices="*u8", crow="*i32", col="*i32",
                      values="*fp16", bias="*fp16")
        types = {f"{which}{name}_ptr": kind for name, kind in arrays.items() for which in ("", "other_")}
        types |= dict.fromkeys(("dense_ptr", "out_ptr"), "*fp16")
        types |= dict.fromkeys("M N dense_k dense_n out_m out_n".split(), "i32")
        for capability in (80, 90):
            for columns, entries in ((1, 256), (8, 64)):
                constants = dict(ACTIVATION="silu", CHUNK=16, ROWS=4, BN=columns, E=entries)
                build(narrow_pair_kernel, types, constants, capability, num_warps=1)
            constants = dict(ACTIVATION="gelu_tanh", BR=8, BN=8, E=32)
            build(csr_pair_kernel, types, constants, capability, num_warps=4)
        """
    )


# -- the operator


def operands(kind: type[SparseMatrix], weights: list[Tensor], device: str) -> list[tuple[Tensor, list[Tensor], str]]:
    """Values, index arrays and layout of each weight."""
    found = [stored_by_rows(kind.from_dense(weight).to_device(device)) for weight in weights]
    return [(values, list(arrays), layout.written()) for values, arrays, layout in found]


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("device", [*KERNEL_DEVICES, pytest.param("plain", id="reference")])
@pytest.mark.parametrize("kind", [NARROW, CSR])
@pytest.mark.parametrize("shape", [(2, 60), (2, 2, 60), (40, 60), (0, 60)])
def test_the_operator_takes_any_rows(device, kind, shape):
    where = "cuda" if device == "cuda" else "cpu"
    weights = [pruned(20, 60, which) for which in range(2)]
    (values, arrays, layout), (other, other_arrays, _) = operands(kind, weights, where)
    x, biases = torch.randn(shape).half(), [torch.randn(20).half() for _ in range(2)]
    call = torch.ops.sparsecomp.gated_pair.default
    call = call.direct_cpu if device == "plain" else call.direct_cuda
    first, second = (bias.to(where) for bias in biases)
    found = call(x.to(where), values, arrays, first, other, other_arrays, second, layout, "silu").cpu()
    exact = exact_pair(x, weights, biases, "silu")
    assert found.shape == exact.shape and found.is_contiguous()
    assert (found - exact).norm() <= 1.5e-3 * exact.norm()


@pytest.mark.parametrize("device", KERNEL_DEVICES)
def test_one_weight_may_spread_more_than_the_other(device):
    """The distances of the one then take two bytes, those of the other one; a launch is of such and such a weight."""
    near = pruned(8, 900, 0, 0.3)
    far, call = near.clone(), torch.ops.sparsecomp.gated_pair.default.direct_cuda
    far[:, 100:800] = 0
    x = torch.randn(1, 900).half()
    for weights in ([near, far], [far, near]):
        (values, arrays, layout), (other, other_arrays, _) = operands(NARROW, weights, device)
        assert {arrays[-1].dtype, other_arrays[-1].dtype} == {torch.uint8, torch.int16}
        found = call(x.to(device), values, arrays, None, other, other_arrays, None, layout, "silu").cpu()
        exact = exact_pair(x, weights, [None, None], "silu")
        assert (found - exact).norm() <= 1e-3 * exact.norm()


@pytest.mark.parametrize("device", DEVICES)
def test_operands_that_do_not_belong_together_are_refused(device):
    weights = [pruned(20, 60, which) for which in range(2)]
    (values, arrays, layout), (other, other_arrays, _) = operands(CSR, weights, device)
    x, bias = torch.randn(2, 60, device=device).half(), torch.randn(20, device=device).half()
    good = [x, values, arrays, None, other, other_arrays, None, layout, "silu"]
    bad = {
        "another dtype or shape": (3, bias), "x is": (0, x[:, 1:]), "needs": (4, other.float()),
        "values": (4, other[:-1]), "layout": (7, "csr 1x1 21x60 even even"),
    }  # fmt: skip
    for call in (gated_pair, torch.ops.sparsecomp.gated_pair.default.direct_cuda):
        for match, (place, given) in bad.items():
            with pytest.raises(FormatError, match=None if match == "layout" else match):
                call(*good[:place], given, *good[place + 1 :])


# -- the rule


class Gated(nn.Module):
    """A gated pair of sparse layers."""

    def __init__(
        self, kind: type[SparseMatrix], size: tuple[int, int], biased: tuple[bool, bool] = (False, False),
        activation: str = "silu", dtype: torch.dtype = torch.float16,
    ) -> None:  # fmt: skip
        super().__init__()
        self.activation = activation
        self.gate, self.up = (
            SparseLinear(
                _stored(kind, *size, which, dtype), torch.randn(size[0]).to(dtype) if biased[which] else None,
                requires_grad=False,
            )
            for which in range(2)
        )  # fmt: skip

    def forward(self, x: Tensor) -> Any:
        return self.up(x) * ACTIVATIONS[self.activation](self.gate(x))

    def exact(self, x: Tensor) -> Tensor:
        """In float64."""
        both = [self.gate, self.up]
        return exact_pair(
            x, [one.weight.detach().to_dense() for one in both], [one.bias for one in both], self.activation
        )


def _stored(kind: type[SparseMatrix], rows: int, cols: int, which: int, dtype: torch.dtype) -> SparseMatrix:
    weight = pruned(rows, cols, which, 0.0 if kind is NM else 0.8, dtype)
    if kind is not NM:
        return kind.from_dense(weight)
    groups = weight.view(rows, -1, 4)
    return NM.from_dense(groups.scatter(-1, groups.abs().argsort(-1)[..., :2], 0.0).view(rows, cols), n=2, m=4)


@pytest.fixture
def kept_anyhow(monkeypatch):
    """Under the promise layers are packed, or their columns narrowed, that are small enough for a test."""
    always, by_estimate = Decision("packed_row", "asked for"), linear.decided

    def decided(product: Product, ctx: Context) -> Decision:
        if not product.constant or product.layout.format == "nm":
            return by_estimate(product, ctx)
        ours = 1e-6 if product.layout.format == "narrow" else 3e-6
        return Decision("narrow_rows", "asked for", {"narrow_rows": ours, "dense": 2e-6})

    monkeypatch.setattr(packed, "decide", lambda product, rivals: always)
    monkeypatch.setattr(linear, "decided", decided)


FORMS = {
    "packed": (NM, (24, 40), 2, True), "narrow": (NARROW, (256, 320), 1, False),
    "narrow of several rows": (NARROW, (256, 320), 4, False), "csr": (CSR, (256, 320), 3, False),
    "narrow copy": (CSR, (256, 320), 1, True),
}  # fmt: skip
"""Format, features out and in, rows, and whether the layers are promised to stay."""


def implementations(report: sparsecomp.Report) -> list[str]:
    """What each site runs as."""
    return [one.implementation for one in report.sites]


@needs_triton
@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("form", FORMS)
def test_a_gated_pair_is_one_launch(form, kept_anyhow):
    """As for an H200, run op by op on a CPU."""
    torch.manual_seed(0)
    kind, size, rows, frozen = FORMS[form]
    model, x = Gated(kind, size), torch.randn(rows, 1, size[1]).half()
    out, report, code = rewritten_for("h200", model, x, frozen=frozen, verify=True)
    alone = {NM: "packed copy", NARROW: "narrow", CSR: "narrow copy" if frozen else "csr"}[kind]
    assert implementations(report) == [alone, alone, "gated pair"], site(report, "gated_pair").reason
    assert "linear.default" not in code and code.count("_pair.default") == 1
    reason = site(report, "gated_pair").reason
    assert reason.startswith("silu of `") and "rounded once; estimated" in reason
    exact = model.exact(x)
    assert out.shape == exact.shape and (out - exact).norm() <= 2e-3 * exact.norm()


@pytest.mark.quick_cases(3)
@needs_triton
@pytest.mark.parametrize("kind", [NM, NARROW])
@pytest.mark.parametrize("activation", ["none", "relu", "gelu", "gelu_tanh", "sigmoid", "tanh"])
def test_activations_and_biases_come_along(kind, activation, kept_anyhow):
    torch.manual_seed(1)
    size = (24, 40) if kind is NM else (256, 320)
    model, x = Gated(kind, size, (True, True), activation), torch.randn(2, size[1]).half()
    out, report, _ = rewritten_for("h200", model, x, frozen=kind is NM)
    assert implementations(report)[-1] == "gated pair"
    exact = model.exact(x)
    assert (out - exact).norm() <= 2e-3 * exact.norm()


class Apart(Gated):
    """A pair that is multiplied in another way."""

    def __init__(self, how: Callable[[Gated, Tensor], Any], kind: type[SparseMatrix], **more: Any) -> None:
        super().__init__(kind, (24, 40) if kind is NM else (256, 320), **more)
        self.how = how

    def forward(self, x: Tensor) -> Any:
        return self.how(self, x)


def up_twice(model: Gated, x: Tensor) -> tuple[Tensor, Tensor]:
    up = model.up(x)
    return up * F.silu(model.gate(x)), up


def gate_twice(model: Gated, x: Tensor) -> tuple[Tensor, Tensor]:
    gate = model.gate(x)
    return model.up(x) * F.silu(gate), gate


def added(model: Gated, x: Tensor) -> Tensor:
    return (model.up(x) + x[..., :1].expand(*x.shape[:-1], model.up.out_features)) * F.silu(model.gate(x))


def written(model: Gated, x: Tensor) -> tuple[Tensor, Tensor]:
    x = x * 2
    up, gate = model.up(x), F.silu(model.gate(x))
    x.add_(1)
    return up * gate, x


REASONS = {
    up_twice: (NM, "is read by others too"), gate_twice: (NARROW, "is read by others too"),
    added: (NARROW, "something is added"), written: (NM, "an operand is written to"),
}  # fmt: skip


@needs_triton
@pytest.mark.parametrize("how", REASONS)
def test_what_else_reads_a_layer_keeps_a_pair_apart(how, kept_anyhow):
    kind, reason = REASONS[how]
    model = Apart(how, kind)
    x = torch.randn(1, model.gate.in_features).half()
    out, report, code = rewritten_for("h200", model, x, frozen=kind is NM)
    found = site(report, "gated_pair")
    assert not found.rewritten and reason in found.reason and "_pair.default" not in code
    torch.testing.assert_close(out, model.how(model, x), rtol=4e-3, atol=4e-2)


def of_another(model: Gated, x: Tensor) -> Tensor:
    return model.up(x) * F.silu(model.gate(x + 1))


def of_both(model: Gated, x: Tensor) -> Tensor:
    return F.relu(model.up(x)) * F.silu(model.gate(x))


def squared(model: Gated, x: Tensor) -> Tensor:
    up = model.up(x)
    return up * up


@needs_triton
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("how", [of_another, of_both, squared])
def test_other_products_are_no_pairs(how):
    _, report, code = rewritten_for("h200", Apart(how, NARROW), torch.randn(1, 320).half())
    assert {one.rule for one in report.sites} == {"sparse_linear"} and "_pair.default" not in code


@needs_triton
@pytest.mark.parametrize("kind", [NM, NARROW])
def test_a_bias_of_one_layer_alone_keeps_a_pair_apart(kind, kept_anyhow):
    model = Gated(kind, (24, 40) if kind is NM else (256, 320), (True, False))
    _, report, _ = rewritten_for("h200", model, torch.randn(1, model.gate.in_features).half(), frozen=kind is NM)
    assert "whether there is a bias" in site(report, "gated_pair").reason


@needs_triton
def test_layers_of_two_formats_stay_apart():
    model = Gated(NARROW, (256, 320))
    model.up = SparseLinear(_stored(CSR, 256, 320, 1, torch.float16), requires_grad=False)
    _, report, _ = rewritten_for("h200", model, torch.randn(2, 320).half())
    assert "differ in their format" in site(report, "gated_pair").reason


@needs_triton
@pytest.mark.parametrize("activation", ["silu", "relu"])
def test_in_training_a_pair_stays_apart(activation):
    model = Gated(NARROW, (256, 320), activation=activation)
    for layer in (model.gate, model.up):
        layer.values.requires_grad_()
    x = torch.randn(1, 320).half()
    report = sparsecomp.explain(model, x, device="h200", mode=REPLAYED)
    assert "gradients are asked for" in site(report, "gated_pair").reason
    with torch.no_grad():
        report = sparsecomp.explain(model, x, device="h200", mode=REPLAYED)
    assert site(report, "gated_pair").rewritten


@needs_triton
def test_the_estimate_decides(monkeypatch):
    monkeypatch.setattr(
        "sparsecomp.passes.sparse.gated_pair.decide", lambda *layers: Decision("dense", "estimated 2 us against 1 us")
    )
    _, report, code = rewritten_for("h200", Gated(NARROW, (256, 320)), torch.randn(1, 320).half())
    assert site(report, "gated_pair").reason.endswith("estimated 2 us against 1 us") and "_pair" not in code


@needs_triton
@pytest.mark.parametrize(("kind", "together"), [(NARROW, True), (NARROW, False), (CSR, True)])
def test_layers_by_bitmaps_are_a_pair_of_what_they_store(kind, together, monkeypatch):
    """As for an H200, run op by op on a CPU; nothing is kept then that nobody reads."""
    from sparsecomp.passes.sparse import bitmap

    seen: list[Any] = []

    def chosen(gate: Product, up: Product, grains: tuple[int, int]) -> Decision:
        seen.append(grains)
        return Decision("one launch" if together else "dense", "asked for")

    always = Decision("bitmap_tiles", "asked for", {"bitmap_tiles": 1e-9, "dense": 1e-3}), 2
    monkeypatch.setattr(bitmap, "decide", lambda *operands: always)
    monkeypatch.setattr("sparsecomp.passes.sparse.gated_pair.decide", chosen)
    options, kept = Options.parse(None, {"frozen": True, "mode": REPLAYED}), []
    model, x = Gated(kind, (256, 320), (True, True)), torch.randn(2, 320).half()

    def backend(gm: fx.GraphModule, example_inputs: list[Tensor]) -> Callable[..., Any]:
        report = Graph.of_dynamo(gm, example_inputs, {}, options).rewrite(options, target_named("h200"))
        Constants(gm, example_inputs)
        kept.append((report, gm.code, [name for name, _ in gm.named_buffers() if "constant" in name]))
        return gm.forward

    torch._dynamo.reset()
    with torch.no_grad():
        out = torch.compile(model, backend=backend)(x)
    ((report, code, constants),) = kept
    exact = model.exact(x)
    assert (out - exact).norm() <= 2e-3 * exact.norm() and seen == [(2, 2)]
    assert len(constants) == (0 if together else 6) and code.count("bitmap_linear.default(") == (0 if together else 2)
    assert (implementations(report)[-1] == "gated pair") == ("no bitmap is kept" in site(report, "gated_pair").reason)
    assert site(report, "gated_pair").rewritten == together


def layer(format: str, m: int, k: int, rows: int, share: float, **more: Any) -> Product:
    """The product of a layer, as for an H200."""
    layout = Layout(format, (2, 4) if format == "nm" else (1, 1), (m, k))
    return Product(
        torch.device("cuda"), layout, rows, 1, round(m * k * share), torch.float16, True, False, False, "none", "",
        target=target_named("h200"), **more,
    )  # fmt: skip


@pytest.mark.quick_cases(3)
@needs_triton
@pytest.mark.parametrize(("format", "rows"), [("nm", 1), ("narrow", 1), ("narrow", 8), ("csr", 4)])
@pytest.mark.parametrize("replayed", [True, False])
def test_a_pair_saves_launches(format, rows, replayed):
    """Both weights are read in any case; of eight rows and more, large narrow ones are faster apart."""
    gains = []
    for m, k in ((1024, 1024), (11008, 4096)):
        one = layer(format, m, k, rows, 0.5 if format == "nm" else 0.2, replayed=replayed)
        decision = decide(one._replace(activation="silu"), one)
        (name,) = (name for name in decision.seconds if name != "dense")
        saved = decision.seconds["dense"] - decision.seconds[name]
        assert saved > one.card.launch or (format, rows, m) == ("narrow", 8, 11008)
        gains.append(decision.seconds["dense"] / decision.seconds[name])
        assert decision.dense is (gains[-1] < 1.03)
    assert gains[0] > gains[1]


MEASURED = json.loads((RESULTS / "gated_pairs.json").read_text())["result"]


def pair_of(row: dict[str, Any]) -> str:
    """For the test's name."""
    return " ".join(map(str, row["pair"].values()))


BITMAPS = {"bitmap": 1, "bitmap of twos": 2}
"""Copies beside NARROW, by how many neighbours share a bit."""


@needs_triton
@pytest.mark.parametrize("row", MEASURED, ids=pair_of)
def test_a_pair_is_one_launch_where_that_was_faster(row):
    form, m, k, zeros, rows = row["pair"].values()
    kind, grain = {"2:4": "nm"}.get(form, form.lower()), BITMAPS.get(form, 0)
    one, ms = layer("narrow" if grain else kind, m, k, rows, 1 - zeros), row["ms"]
    seconds = decide(one._replace(activation="silu"), one, (grain, grain)).seconds
    (name,) = (name for name in seconds if name != "dense" and (name == "bitmap_pair") == bool(grain))
    assert 0.85 < seconds[name] / ms["pair"] * 1e3 < 1.32
    gain = ms["apart"] / ms["pair"]
    assert (seconds["dense"] < MIN_GAIN * seconds[name]) == (gain < 1) or 0.98 < gain < 1.05


ALONE = {
    tuple(row["layer"].values()): row["ms"] for row in json.loads((RESULTS / "few_rows.json").read_text())["result"]
}  # fmt: skip
"""Milliseconds of layers, by features out and in, rows and zeros."""


@needs_triton
@pytest.mark.parametrize("row", [row for row in MEASURED if row["pair"]["form"] in ("NARROW", "CSR")], ids=pair_of)
def test_a_pair_is_weighed_against_the_bitmaps_that_run_apart(row):
    form, m, k, zeros, rows = row["pair"].values()
    one, ms = layer(form.lower(), m, k, rows, 1 - zeros, constant=True), row["ms"]["pair"]
    seconds = decide(one._replace(activation="silu"), one, (2, 2)).seconds
    (name,) = seconds.keys() - {"dense", "bitmap_pair"}
    product = 3 * m * rows * 2 / one.card.bandwidth + one.card.launch  # a kernel of Inductor's
    gain = (2 * ALONE[m, k, rows, zeros]["bitmap of twos"] + 1e3 * product) / ms
    assert (seconds["dense"] < MIN_GAIN * seconds[name]) == (gain < 1) or 0.98 < gain < 1.1


@needs_triton
@pytest.mark.parametrize(("format", "rows", "why"), [("narrow", 17, "17 columns"), ("csr", 1, "beside others")])
def test_rows_that_no_kernel_takes_as_a_pair_stay_apart(format, rows, why):
    one = layer(format, 256, 320, rows, 0.2)
    decision = decide(one, one)
    assert decision.dense and why in decision.reason


@needs_triton
@pytest.mark.parametrize("kind", [NM, CSR])
def test_broken_promises_are_found(kind, monkeypatch, kept_anyhow):
    """Under `SPARSECOMP_DEBUG=1`, of the pattern of either layer: what is kept of it are constants of the graph."""
    monkeypatch.setenv("SPARSECOMP_DEBUG", "1")
    model = Gated(kind, (24, 40) if kind is NM else (256, 320))
    x, options = torch.randn(1, model.gate.in_features).half(), Options.parse(None, {"frozen": True, "mode": REPLAYED})
    reports: list[sparsecomp.Report] = []

    def backend(gm: fx.GraphModule, example_inputs: list[Tensor]) -> Callable[..., Any]:
        reports.append(Graph.of_dynamo(gm, example_inputs, {}, options).rewrite(options, target_named("h200")))
        return gm.forward

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend)
    with torch.no_grad():
        compiled(x)
        assert implementations(reports[0])[-1] == "gated pair"
        model.up.indices.data[-1] -= 1
        with pytest.raises(FrozenWeightError, match="indices.* was promised to stay"):
            compiled(x)


# -- on a GPU


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("kind", "rows"), [(NARROW, 1), (NARROW, 4), (NARROW, 16), (CSR, 2), (CSR, 16)])
def test_in_a_cuda_graph(kind, rows):
    weights = [pruned(1000, 500, which) for which in range(2)]
    (values, arrays, layout), (other, other_arrays, _) = operands(kind, weights, "cuda")
    x, biases = torch.randn(rows, 500).half(), [torch.randn(1000).half() for _ in range(2)]
    x, on_device = x.cuda(), [bias.cuda() for bias in biases]
    graph, result = graph_of(
        lambda: gated_pair(x, values, arrays, on_device[0], other, other_arrays, on_device[1], layout, "gelu")
    )
    x.copy_(x.roll(1, 1))
    graph.replay()
    torch.cuda.synchronize()
    exact = exact_pair(x.cpu(), weights, list(biases), "gelu")
    assert (result.cpu() - exact).norm() <= 1e-3 * exact.norm()


COMPILED: dict[str, tuple[type[SparseMatrix], int, dict[str, Any]]] = {
    "packed": (NM, 1, {"frozen": True}), "narrow": (NARROW, 1, {}), "narrow by bitmaps": (NARROW, 4, {"frozen": True}),
    "narrow frozen": (NARROW, 4, {"frozen": True, "memory": "low"}),
    "narrow copy": (CSR, 1, {"frozen": True, "memory": "low"}), "csr": (CSR, 2, {}),
    "by the host": (NARROW, 1, {"mode": "default"}),
}  # fmt: skip
"""Format, rows and options. With little memory no bitmaps are kept, which two layers in CSR would rather run by."""


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("form", COMPILED)
@pytest.mark.parametrize("biased", [False, True])
def test_a_compiled_pair_follows_its_weights(form, biased, monkeypatch):
    torch.compiler.reset()
    kind, rows, options = COMPILED[form]
    together = Decision("one launch", "whatever the estimate says")
    monkeypatch.setattr("sparsecomp.passes.sparse.gated_pair.decide", lambda *layers: together)
    model = Gated(kind, (11008, 4096), (biased, biased)).cuda()
    compiled = torch.compile(model, backend="sparsecomp", options={"mode": REPLAYED, **options})
    with torch.no_grad():
        for step in range(4):
            # sums of 2048 products of numbers around 1 are around 60, and the largest of their products no float16
            x = torch.randn(rows, 4096, device="cuda").half() / 8
            exact = model.exact(x)
            assert (compiled(x) - exact).norm() <= 2e-3 * exact.norm()
            if step == 1:
                model.up.values.mul_(2)
            if step == 2:
                model.gate.values.mul_(-1)
    report = sparsecomp.last_report()
    assert report is not None and implementations(report)[-1] == "gated pair"
