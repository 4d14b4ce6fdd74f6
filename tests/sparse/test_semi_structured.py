"""2:4 products through cuSPARSELt: a library that stands in for it on the CPU, and the real one on a GPU."""

import ctypes
import gc
import json
import math
import os
import weakref
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from compile_kernel import compile_in_subprocess
from fake_cusparselt import half_of_each_four, installed
from kernel_devices import KERNEL_DEVICES, graph_of

from bench.table import RESULTS
from sparsecomp import ops
from sparsecomp.errors import FormatError, LibraryError
from sparsecomp.formats import NM
from sparsecomp.lowering.cache.signature import Device
from sparsecomp.lowering.launch import dispatch
from sparsecomp.lowering.launch.epilogue import Output
from sparsecomp.lowering.launch.strided import Strides
from sparsecomp.lowering.sparse import cusparselt, semi_structured
from sparsecomp.lowering.sparse.cusparselt import Algorithm, Matmul, MatmulPlan
from sparsecomp.lowering.sparse.semi_structured import SEMI_STRUCTURED, spmm_semi_structured
from sparsecomp.lowering.sparse.spmm_nm import SpmmNM
from sparsecomp.lowering.tuning import autotune, host
from sparsecomp.lowering.tuning.cards import H100
from sparsecomp.lowering.tuning.ceilings import target_named
from sparsecomp.lowering.tuning.trial import fault, relative_error
from sparsecomp.nn import SparseLinear
from sparsecomp.passes.cost import sparse as sparse_cost
from sparsecomp.passes.cost.decision import Decision
from sparsecomp.passes.sparse import chain
from sparsecomp.reference.memo import Memo
from sparsecomp.reference.patterns import Layout

template = pytest.importorskip("sparsecomp.lowering.sparse.kernels.semi_structured")  # needs Triton

pytestmark = pytest.mark.quick_cases(2)

CARD = Device("NVIDIA H100 80GB HBM3", "9.0", "3.6.0")
TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 8e-3}
GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]
ACTIVATIONS = {
    "none": lambda x: x, "relu": F.relu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu, "sigmoid": torch.sigmoid, "tanh": torch.tanh,
}  # fmt: skip


def forget():
    for cached in (template.offered, semi_structured.refusal):
        cached.cache_clear()
    dispatch.forget()


@pytest.fixture
def library(monkeypatch):
    """A library that works on the host, on what passes for an H100, where it is always the faster."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("TRITON_INTERPRET is off: kernels are compiled for a GPU")
    fake = installed(monkeypatch)
    for module in (semi_structured, autotune):
        monkeypatch.setattr(module, "device_of", lambda device: CARD)
    monkeypatch.setattr(semi_structured, "slower", lambda problem, device: None)
    monkeypatch.setattr(semi_structured, "MEMO", Memo())
    forget()
    yield fake
    forget()
    assert not fake.faults, fake.faults[0]


@pytest.fixture(params=DEVICES)
def device(request, monkeypatch):
    """Where products run: on the CPU with the stand-in, on a GPU with the library that torch came with."""
    if request.param == "cpu":
        request.getfixturevalue("library")
    else:
        if cusparselt.missing() is not None:
            pytest.skip(f"no cuSPARSELt: {cusparselt.missing()}")
        monkeypatch.setattr(semi_structured, "slower", lambda problem, device: None)
        forget()
    return torch.device(request.param, 0) if request.param == "cuda" else torch.device("cpu")


class Case:
    """A product activation(scale · W @ dense + residual + bias) with its float64 result, `out` full of NaN."""

    def __init__(
        self, device, m=32, k=64, n=24, dtype=torch.float16, columns=(True, True), pad=0, bias=True, residual=False,
        seed=0, filled=True,
    ):  # fmt: skip
        self.weight = half_of_each_four(m, k, seed, filled).to(device, dtype)
        matrix = NM.from_dense(self.weight, n=2, m=4)
        self.values, self.indices = matrix.values, matrix.indices
        random = torch.Generator().manual_seed(seed)
        numbers = [torch.randn(shape, generator=random).to(device, dtype) for shape in ((k, n), (m, n), (m,))]
        self.dense, self.residual = laid_out(numbers[0], columns[0], pad), laid_out(numbers[1], columns[1], pad)
        self.bias = numbers[2]
        self.given = {"bias": self.bias, "bias_axis": "row"} if bias else {}
        self.given |= {"residual": self.residual} if residual else {}
        self.out = laid_out(torch.full((m, n), math.nan, dtype=dtype, device=device), columns[1], pad)

    def run(self, **more):
        return spmm_semi_structured(self.values, self.indices, self.dense, self.out, **self.given, **more)

    def exact(self, activation="none", scale=1.0):
        result = scale * (self.weight.double() @ self.dense.double())
        if "bias" in self.given:
            result += self.bias.double()[:, None]
        if "residual" in self.given:
            result += self.residual.double()
        return ACTIVATIONS[activation](result)

    def check(self, activation="none", scale=1.0):
        assert relative_error(self.out, self.exact(activation, scale)) <= TOLERANCE[self.out.dtype]


def laid_out(matrix, columns, pad):
    """The same numbers with columns (or rows) side by side, and `pad` elements of NaN between them."""
    lines = matrix.mT if columns else matrix
    memory = torch.full((lines.shape[0], lines.shape[1] + pad), math.nan, dtype=matrix.dtype, device=matrix.device)
    view = memory[:, : lines.shape[1]].copy_(lines)
    return view.mT if columns else view


def problem(**changes):
    """4096 cubed in float16 as a linear layer's, with bias and relu; changes of `output` start with out_."""
    m, k, n = (changes.pop(name, 4096) for name in ("m", "k", "n"))
    output = Output(Strides(0, 1, m), "float16", "float16", "row", "", Strides(0, 0, 0), "relu", 1.0)
    output = output._replace(**{name[4:]: changes.pop(name) for name in list(changes) if name.startswith("out_")})
    groups = -(-k // 4)
    found = SpmmNM(m, k, n, 1, 2, 4, 0, 2 * groups, 2 * groups, Strides(0, 1, k), "float16", "float16", output)
    return found._replace(**changes)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=["half", "bfloat16"])
@pytest.mark.parametrize("columns", [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize(("pad", "bias", "residual", "activation", "scale"), [
    (0, False, False, "none", 1.0), (0, True, False, "relu", 1.0), (8, True, True, "relu", -0.5),
    (8, False, True, "gelu", 2.0), (0, True, False, "gelu_tanh", 1.0), (0, False, False, "silu", 1.0),
    (0, True, False, "sigmoid", 1.0), (8, False, False, "tanh", 1.0),
])  # fmt: skip
def test_products_agree_with_float64(device, dtype, columns, pad, bias, residual, activation, scale):
    case = Case(device, dtype=dtype, columns=columns, pad=pad, bias=bias, residual=residual)
    assert case.run(activation=activation, scale=scale)
    case.check(activation, scale)
    if pad:  # between the lines nothing is written
        lines = case.out.mT if columns[1] else case.out
        outside = lines.as_strided((lines.shape[0] - 1, pad), lines.stride(), lines.storage_offset() + lines.shape[1])
        assert outside.isnan().all()


def test_a_copy_is_made_once_and_again_after_a_write(library):
    case = Case("cpu")
    for writes in range(3):
        for _ in range(2):
            assert case.run()
            case.check()
        assert library.calls["cusparseLtSpMMACompress2"] == writes + 1
        case.values.mul_(-3), case.weight.mul_(-3)


WRITES = {
    "through data": lambda case: (case.values.data.mul_(-2), case.weight.mul_(-2)),
    "of one number": lambda case: (
        case.values.data[0, :1].fill_(4),
        case.weight[0, case.indices[0, 0].long()].fill_(4),
    ),
    "of places alone": lambda case: (
        case.indices.data.copy_(3 - case.indices),
        case.weight.copy_(case.weight.unflatten(1, (-1, 4)).flip(2).flatten(1)),
    ),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_write_that_nobody_sees_is_noticed_on_the_device(device, write):
    case = Case(device, residual=True)
    case.run(activation="gelu")
    WRITES[write](case)
    case.out.fill_(math.nan)
    case.run(activation="gelu")
    case.check("gelu")


@pytest.mark.parametrize("filled", [True, False])
def test_a_promise_begins_with_a_copy_of_its_own_and_buys_that_nobody_looks(device, filled):
    case = Case(device, bias=False, filled=filled)
    case.run()
    WRITES["through data"](case)  # before the promise
    with ops.frozen_weights():
        case.run()
        case.check()
        kept = case.out.clone()
        case.values.data.mul_(-2)  # which breaks it
        case.run()
        assert torch.equal(case.out, kept) != filled


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_stored_is_not_multiplied(device, bad):
    """By the library, which fills groups up with zeros, and by the kernel that takes over after a hidden write."""
    case = Case(device, residual=True)
    case.weight.view(32, 16, 4)[:4, 1] = 0  # groups of zeros alone
    matrix = NM.from_dense(case.weight, n=2, m=4)
    case.values, case.indices = matrix.values, matrix.indices
    plain = case.dense.clone()
    for place in range(8):
        case.dense.copy_(plain)[place] = 0
        without, reads = case.exact("relu"), case.weight[:, place] != 0
        case.dense[place] = bad
        wanted = torch.where(reads[:, None], case.exact("relu"), without)
        for promise in (nullcontext(), ops.frozen_weights()):
            with promise:
                case.out.fill_(0.5)
                case.run(activation="relu")
            torch.testing.assert_close(case.out.double(), wanted, rtol=2e-3, atol=2e-3, equal_nan=True)
        case.values.data.mul_(2), case.weight.mul_(2)


@pytest.mark.parametrize("device", KERNEL_DEVICES)
def test_a_fingerprint_tells_values_apart(device):
    """One changed element of many, two swapped, all negated, groups moved."""
    values = torch.randn(16, 24, generator=torch.Generator().manual_seed(1)).half().to(device)
    indices = torch.randint(4, (16 * 24,), generator=torch.Generator().manual_seed(1)).to(device, torch.uint8)
    words = template.fingerprint(values, indices)
    assert torch.equal(words, template.fingerprint(values.clone(), indices.clone())) and words.shape == (8,)
    for other in (indices.flip(0), indices.roll(8), indices ^ (torch.arange(16 * 24, device=device) == 383)):
        assert not torch.equal(words, template.fingerprint(values, other))
    large = torch.zeros(2**15 * 5, dtype=torch.float16, device=device)
    changed = large.clone()
    changed[-1] = 1.0
    swapped = values.clone()
    swapped[3, :2] = values[3, :2].flip(0)
    moved = values.roll(8, 1)
    for one, other in ((values, swapped), (values, -values), (values, moved), (large, changed)):
        places = torch.zeros(one.numel(), dtype=torch.uint8, device=device)
        assert not torch.equal(template.fingerprint(one, places), template.fingerprint(other, places))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("version", "plans"), [((0, 8, 0), 1), ((0, 7, 1), 64)])
@pytest.mark.slow(reason="many plans")
def test_biases_share_a_plan_where_the_library_is_known_to_take_others(monkeypatch, library, version, plans):
    """Otherwise each has its own, and those of biases long gone are destroyed."""
    fake = installed(monkeypatch, version=version)
    case = Case("cpu")
    biases = [torch.randn(32).half() for _ in range(80)]
    for case.bias in (*biases, *biases[::-1]):
        case.given["bias"] = case.bias
        case.out.fill_(math.nan)
        case.run()
        case.check()
    gc.collect()
    made = [value for value in fake.structures.values() if isinstance(value, tuple) and len(value) == 2]
    assert len(made) == plans and not fake.faults
    assert fake.calls["cusparseLtMatmulPlanInit"] == (1 if plans == 1 else 80 + 80 - 64)


@pytest.mark.slow(reason="the interpreter runs a whole weight")
def test_a_copy_goes_with_its_weight(library):
    case = Case("cpu")
    case.run()
    memo = semi_structured.MEMO
    assert len(memo) == 1
    case.run()
    memory = weakref.ref(memo.of(semi_structured.copied, (case.values, case.indices), "guarded").compressed)
    del case
    gc.collect()
    assert memory() is None
    assert len(memo) == 0
    forget()
    gc.collect()
    left = [value for value in library.structures.values() if not (isinstance(value, dict) and "a" in value)]
    # the library has no function that destroys the description of a product
    assert left == ["handle"]


def test_parts_of_a_product_are_offered_where_tiles_leave_processors_of_the_card_idle(library, monkeypatch):
    """Four tiles of 128 by 128."""
    for k, processors, parts in ((4096, 4, {1}), (4352, 5, {1, 2, 4})):
        monkeypatch.setattr(template, "card_of", lambda device, count=processors: replace(H100, processors=count))
        candidates = SEMI_STRUCTURED.candidates(problem(m=256, k=k, n=256), CARD)
        assert {one.config["split_k"] for one in candidates} == parts


def test_every_algorithm_is_offered_and_tried(library):
    output = Output(Strides(0, 1, 64), "float16", "", "", "", Strides(0, 0, 0), "none", 1.0)
    given = problem(m=64, k=2048, n=16)._replace(output=output)
    candidates = SEMI_STRUCTURED.candidates(given, CARD)
    found = [tuple(one.config[name] for name in ("algorithm", "split_k", "split_k_mode")) for one in candidates]
    assert found == [(number, *split) for split in ((1, 0), (2, 1), (2, 2)) for number in (1, 3, 2, 0)]
    for candidate, (number, split_k, _) in zip(candidates, found, strict=True):
        why = fault(SEMI_STRUCTURED, given, torch.device("cpu"), candidate)
        if number % 2 and split_k > 1:  # odd ones of the stand-in take no parts
            assert why == "LibraryError: cusparseLtMatmulPlanInit returned CUSPARSE_STATUS_NOT_SUPPORTED (10)"
        else:
            assert why is None and library.products[-1] == (number, split_k, candidate.config["split_k_mode"])
    signature = SEMI_STRUCTURED.signature(given, CARD)
    assert dict(signature.parameters)["cusparselt"] == "0.8.0"
    assert SEMI_STRUCTURED.signature(SEMI_STRUCTURED.representative(signature), CARD).key == signature.key


REFUSED = {
    "1:4": (problem(keep=1), "sparse tensor cores take 2:4, not 1:4"),
    "batch": (problem(batch=2), "a batch is not bound"),
    "rows": (problem(m=4104), "multiples of 16 and columns of 8, not 4104"),
    "depth": (problem(k=4104), "not 4096, 4104 and 4096"),
    "columns": (problem(n=12), "not 4096, 4096 and 12"),
    "size": (problem(m=65536, k=65536, n=8), "more than 2147483647 elements"),
    "values": (problem(values_row=4096), "rows of the values"),
    "strided": (problem(dense=Strides(0, 2, 4096)), "dense has strides"),
    "overlapping": (problem(dense=Strides(0, 1, 2048)), "dense has strides"),
    "uneven": (problem(out_strides=Strides(0, 4100, 1)), "the result has strides"),
    "float32": (problem(dtype="float32", dense_dtype="float32", out_dtype="float32"), "float32 times float32"),
    "wider result": (problem(out_dtype="float32"), "to float32 is not bound"),
    "bias by column": (problem(out_bias_axis="column"), "by columns"),
    "bias of float32": (problem(out_bias="float32"), "not one of float32"),
    "residual": (
        problem(out_residual="float16", out_residual_strides=Strides(0, 4096, 1)), "lie in memory as the result",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_say_why(library, name):
    given, why = REFUSED[name]
    assert why in SEMI_STRUCTURED.refusals(given, CARD)["cusparselt"]
    assert not SEMI_STRUCTURED.candidates(given, CARD)
    assert not library.calls.get("cusparseLtMatmulDescriptorInit")


def test_devices_without_sparse_tensor_cores_are_refused(library):
    for capability, why in (("7.5", "capability 7.5"), ("", "no CUDA device")):
        found = SEMI_STRUCTURED.refusals(problem(), Device("a card", capability, "3.6.0"))
        assert why in found["cusparselt"]


def test_other_tensors_go_to_other_kernels(library):
    """Unaligned ones, batches and empty ones are left alone; what fits nothing is an error."""
    case = Case("cpu")
    memory = torch.zeros(case.dense.numel() + 1).half()
    unaligned = memory[1:].view(24, 64).mT
    for dense, out in ((unaligned, case.out), (case.dense[None], case.out[None]), (case.dense[:, :0], case.out[:, :0])):
        assert not spmm_semi_structured(case.values, case.indices, dense, out)
    assert not spmm_semi_structured(case.values[:, :-2], case.indices[:, :-2], case.dense, case.out)
    assert case.out.isnan().all() and not library.products
    with pytest.raises(FormatError, match="bias has shape"):
        spmm_semi_structured(case.values, case.indices, case.dense, case.out, bias=case.bias[:16], bias_axis="row")


def test_a_library_that_refuses_a_shape_is_quoted(monkeypatch, library):
    monkeypatch.setattr(cusparselt, "algorithms", lambda handle, product: cusparselt.check_status("cusparseLtInit", 4))
    forget()
    assert "cusparseLtInit returned CUSPARSE_STATUS_ARCH_MISMATCH (4)" in str(SEMI_STRUCTURED.refusals(problem(), CARD))
    assert not Case("cpu").run()


def test_a_library_that_fails_late_is_not_asked_again(monkeypatch, library):
    asked = []

    def refuse(*described):
        asked.append(described)
        cusparselt.check_status("cusparseLtMatmulPlanInit", 10)

    monkeypatch.setattr(semi_structured, "refused_late", set())
    monkeypatch.setattr(template, "MatmulPlan", refuse)
    case = Case("cpu")
    for _ in range(2):
        assert not case.run() and case.out.isnan().all()
    assert len(asked) == 1


@pytest.mark.parametrize(("options", "message"), [
    ({"version": (0, 6, 3)}, "version 0.6.3: 0.7 or later"), ({"version": (1, 0, 0)}, "version 1.0.0"),
    ({"drop": ("cusparseLtSpMMACompress2",)}, "no function cusparseLtSpMMACompress2"),
])  # fmt: skip
def test_libraries_that_cannot_be_used(monkeypatch, options, message):
    with pytest.raises(LibraryError, match=message):
        installed(monkeypatch, **options)


def test_a_library_that_is_not_found(monkeypatch):
    def refuse(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "PyDLL", refuse)
    monkeypatch.setattr(cusparselt, "loaded_library", cusparselt.loaded_library.__wrapped__)
    reason = cusparselt.missing()
    assert reason is not None and reason.startswith("cuSPARSELt was not found (libcusparseLt.so.0: libcusparseLt.so.0")
    assert "install nvidia-cusparselt" in reason
    forget()
    decision = sparse_cost.compare(linear_of(4096, 4096), CARD, H100)
    assert "not on sparse tensor cores: cuSPARSELt was not found" in decision.reason
    forget()


def test_the_handle_is_of_the_device_that_is_asked_for_or_current(monkeypatch):
    monkeypatch.setattr(cusparselt, "loaded_library", lambda: None)
    monkeypatch.setattr(cusparselt, "handle_of", lambda device: device)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert cusparselt.current_handle() == torch.device("cuda", 3)
    assert cusparselt.current_handle(torch.device("cuda", 1)) == torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(LibraryError, match="no CUDA device"):
        cusparselt.current_handle()


def test_small_products_stay_with_the_ordinary_kernels_and_large_ones_do_not(monkeypatch):
    """By the estimates, which the other tests here replace; 4096 cubed was measured 1.6 times as fast as dense."""
    installed(monkeypatch)
    monkeypatch.setattr(semi_structured, "device_of", lambda device: CARD)
    monkeypatch.setattr(semi_structured, "card_of", lambda device: H100)
    forget()

    def refused(m, k, n):
        out = Output(Strides(0, 1, m), "float16", "", "", "", Strides(0, 0, 0), "none", 1.0)
        problem = SpmmNM(m, k, n, 1, 2, 4, 0, k // 2, k // 2, Strides(0, 1, k), "float16", "float16", out)
        return semi_structured.refusal(problem, torch.device("cpu"))

    assert refused(4096, 4096, 4096) is None
    assert "on sparse tensor cores against" in refused(256, 256, 16)
    case = Case("cpu", 256, 256, 16)
    assert not case.run() and case.out.isnan().all()
    forget()


def test_arguments_reach_the_library_as_its_header_has_them(library):
    """Orders, leading dimensions, attributes and data types, which the stand-in decodes from memory."""
    handle = cusparselt.current_handle()
    bias = torch.zeros(32).bfloat16()
    plan = MatmulPlan(handle, Matmul(32, 64, 16, "bfloat16", True, 72, False, 24, True, True), Algorithm(2, 4, 2),
                bias.data_ptr())  # fmt: skip
    ((described, chosen),) = (
        value for value in library.structures.values() if isinstance(value, tuple) and len(value) == 2
    )
    assert described == {
        "a": (32, 64, 64, 14, 2), "b": (64, 16, 72, 14, 1), "d": (32, 16, 24, 14, 2), "relu": 1,
        "bias": bias.data_ptr(),
    }  # fmt: skip
    assert chosen == {0: 2, 3: 4, 4: 2} and plan.workspace_bytes == 64
    with pytest.raises(LibraryError, match=r"cusparseLtMatmulPlanInit returned CUSPARSE_STATUS_NOT_SUPPORTED \(10\)"):
        MatmulPlan(handle, Matmul(32, 64, 16, "float16", True, 64, True, 32, False, False), Algorithm(7))
    with pytest.raises(LibraryError, match="float16 or bfloat16 is needed"):
        MatmulPlan(handle, Matmul(32, 64, 16, "float32", True, 64, True, 32, False, False), Algorithm(0))


def test_structures_are_aligned_and_large():
    for structure in [cusparselt.Opaque() for _ in range(8)]:
        address = ctypes.addressof(structure._as_parameter_)
        assert address % 64 == 0 and ctypes.sizeof(structure._as_parameter_) == 16384
        assert not any(structure._as_parameter_.raw)


def linear_of(size, n, dtype=torch.float16):
    return sparse_cost.Product(
        torch.device("cuda"), Layout("nm", (2, 4), (size, size)), n, 1, size * size // 2, dtype, True, True, False,
        "relu", f"NM {size}x{size} at 50.0% sparsity",
    )  # fmt: skip


def test_sparse_tensor_cores_pay_for_large_products_only(library):
    """On an H100 a 2:4 product of 4096 cubed took 0.128 ms, the dense one 0.208 ms with its relu."""
    large = sparse_cost.compare(linear_of(4096, 4096), CARD, H100)
    assert large.implementation == "cusparselt" and not large.dense and 1.2 < large.gain < 2.2
    seconds, name = sparse_cost.sparse_seconds(linear_of(4096, 4096), CARD, H100)
    assert name == "cusparselt" and seconds == pytest.approx(0.14e-3, rel=0.15)
    assert sparse_cost.compare(linear_of(512, 64), CARD, H100).implementation != "cusparselt"
    single = sparse_cost.compare(linear_of(4096, 4096, torch.float32), CARD, H100)
    assert "not on sparse tensor cores: float32 times float32" in single.reason


MEASURED = json.loads((RESULTS / "two_of_four.json").read_text())["result"]
FEW = [row for row in MEASURED if "cuSPARSELt" in row["ms"]]


@pytest.mark.parametrize("row", FEW, ids=lambda row: " ".join(map(str, row["layer"].values())))
def test_the_estimate_of_few_rows_is_what_was_measured(row, library):
    """By the best algorithm, in parts where it has few tiles, of which the estimate knows nothing; in bfloat16 twice as
    slow as cuBLAS."""
    device, card = target_named("h200")
    m, k, n, dtype = row["layer"].values()
    product = sparse_cost.Product(
        torch.device("cuda"), Layout("nm", (2, 4), (m, k)), n, 1, m * k // 2, getattr(torch, dtype), True, False, False,
        "none", "", constant=True, target=(device, card),
    )  # fmt: skip
    with ops.frozen_weights():
        (*_, library_alone), problem = sparse_cost.problem_of(product)
        found, _ = sparse_cost.fastest_candidate(library_alone.candidates(problem, device), problem, product, card)
        decision = sparse_cost.decide(product)
    ms, in_parts = row["ms"], m == 4096
    assert 0.9 < found.device / ms["cuSPARSELt"] * 1e3 < (1.5 if in_parts and dtype == "float16" else 1.1)
    faster = ms["cuSPARSELt"] < ms["dense"]
    assert (decision.implementation == "cusparselt") == faster and faster == (dtype == "float16" and not in_parts)


@pytest.mark.parametrize("replayed", [True, False])
def test_under_a_promise_the_estimate_counts_no_guard(library, replayed):
    """Which reads values and indices in each call, in a launch of its own, and ends in another."""
    layer = linear_of(4096, 1024)._replace(replayed=replayed, products=10**9)
    guarded, name = sparse_cost.product_time(layer, CARD, H100)
    with ops.frozen_weights():
        alone, same = sparse_cost.product_time(layer, CARD, H100)
        assert semi_structured.refusal(problem(guarded=False), torch.device("cpu")) is None
    assert name == same == "cusparselt"
    read = 4096 * 2048 * (2 + 1) / H100.bandwidth
    assert guarded.device - alone.device == pytest.approx(read + 2 * H100.launch, rel=1e-6)
    assert guarded.host - alone.host == pytest.approx(0.0 if replayed else 2 * host.LAUNCH)


def test_a_promise_is_asked_for_where_kernels_are_chosen(monkeypatch):
    """64 rows of a small layer: the guard takes longer than the library saves."""
    installed(monkeypatch)
    monkeypatch.setattr(semi_structured, "device_of", lambda device: CARD)
    monkeypatch.setattr(semi_structured, "card_of", lambda device: H100)
    monkeypatch.setattr(semi_structured, "MEMO", Memo())
    forget()
    case = Case("cpu", 1024, 1024, 64, filled=False)
    monkeypatch.setattr(dispatch, "launch", lambda operation, given, *tensors: launched.append(given.guarded))
    launched: list[bool] = []
    assert not case.run()
    with ops.frozen_weights():
        assert case.run()
    assert not case.run() and launched == [False]
    forget()


def test_times_without_a_guard_are_kept_apart(library):
    """So is what is timed: the operands hold no fingerprint to compare with."""
    given = problem(m=64, k=2048, n=16, guarded=False)
    signature = SEMI_STRUCTURED.signature(given, CARD)
    assert signature.key != SEMI_STRUCTURED.signature(given._replace(guarded=True), CARD).key
    assert SEMI_STRUCTURED.representative(signature).guarded is False
    kept = [SEMI_STRUCTURED.operands(one, torch.device("cpu"), 0)[3] for one in (given, given._replace(guarded=True))]
    assert kept[0] is None and kept[1] is not None


def test_the_operator_picks_it(library):
    """What `ops.spmm` runs on CUDA, with the operands of a linear layer."""
    implementation = torch.ops.sparsecomp.spmm.default.direct_cuda
    case = Case("cpu", m=48, k=32, n=40)
    arguments = ("nm", [2, 4], [48, 32], ["even", "even"], False, "row", "relu", 1.0, None, True)
    out = implementation(case.values, [case.indices], case.dense, case.bias, None, *arguments)
    assert len(library.products) == 1
    assert relative_error(out, case.exact("relu")) <= 1e-3
    # by columns there is no such bias: the ordinary kernel
    out = implementation(
        case.values, [case.indices], case.dense, case.bias[:40], None, *arguments[:5], "column", *arguments[6:]
    )
    expected = F.relu(case.weight.double() @ case.dense.double() + case.bias[:40].double())
    assert len(library.products) == 1 and relative_error(out, expected) <= 1e-3


@pytest.mark.slow(reason="builds for a GPU")
@pytest.mark.parametrize("capability", [80, 90])
def test_the_guard_builds(capability):
    """Both kernels, for both dtypes, with tensor cores and without spilling registers to the stack."""
    printed = compile_in_subprocess(
        f"""
from sparsecomp.lowering.sparse.kernels.semi_structured import fingerprint_kernel, guarded_kernel
words = dict(values_ptr="*fp16", indices_ptr="*u8", out_ptr="*u8", words="i32", steps="i32")
print(len(build(fingerprint_kernel, words, dict(PARTS=512, B=1024), {capability}, num_warps=4).asm["cubin"]) > 0)
for element in ("*fp16", "*bf16"):
    types = {{name: element if name.endswith("_ptr") else "i32" for name in guarded_kernel.arg_names}}
    types |= dict(indices_ptr="*u8", scratch_ptr="*u8", kept_ptr="*u8", scale="fp32")
    constants = dict(residual_ptr=None, BIAS_ROWS=True, ACTIVATION="relu", PRECISION="ieee", BM=128, BN=128, G=16,
                     GROUP=8, PARTS=512, E=8, dense_k=1, out_m=1)
    built = build(guarded_kernel, types, constants, {capability}, num_warps=8, num_stages=3)
    print("wgmma.mma_async" in built.asm["ptx"] or "mma.sync" in built.asm["ptx"])
"""
    )
    assert printed.split() == ["True"] * 3


@pytest.fixture
def cuda(monkeypatch):
    """The real library on a GPU."""
    if cusparselt.missing() is not None:
        pytest.skip(f"no cuSPARSELt: {cusparselt.missing()}")
    monkeypatch.setattr(semi_structured, "slower", lambda problem, device: None)
    forget()
    yield torch.device("cuda", torch.cuda.current_device())
    forget()


def on_gpu(test):
    for mark in GPU:
        test = mark(test)
    return test


@on_gpu
@pytest.mark.parametrize("dtype", TOLERANCE, ids=["half", "bfloat16"])
@pytest.mark.parametrize("shape", [(16, 16, 8), (4096, 1024, 512), (1008, 2064, 88), (11008, 4096, 16)])
def test_sizes_on_the_gpu(cuda, dtype, shape):
    case = Case(cuda, *shape, dtype=dtype)
    if not case.run(activation="relu"):
        pytest.skip(f"the library takes no {shape}")
    case.check("relu")


@on_gpu
def test_algorithms_of_the_library(cuda):
    for given in (problem(m=512, k=1024, n=256), problem(m=256, k=8192, n=64, out_activation="none")):
        given = given._replace(dense=given.dense._replace(column=given.k))
        candidates = SEMI_STRUCTURED.candidates(given, CARD)
        assert candidates
        for candidate in candidates[:: max(len(candidates) // 12, 1)]:
            why = fault(SEMI_STRUCTURED, given, cuda, candidate)
            refused = why is not None and ("MatmulPlanInit returned" in why or "AlgSetAttribute returned" in why)
            assert why is None or refused, (candidate, why)


@on_gpu
def test_a_graph_sees_new_inputs_biases_and_weights(cuda):
    case = Case(cuda, 256, 512, 128)
    graph, _ = graph_of(lambda: case.run(activation="relu"))
    for factor in (1.0, -2.0):
        case.dense.copy_(torch.randn_like(case.dense))
        case.bias.copy_(torch.randn_like(case.bias))
        case.values.mul_(factor), case.weight.mul_(factor)
        case.out.fill_(math.nan)
        graph.replay()
        case.check("relu")
    case.run(activation="relu")  # makes another copy, while the graph goes on with its own
    graph.replay()
    case.check("relu")


@on_gpu
def test_a_graph_without_a_call_before_it(cuda):
    """The copy is made in the graph, by each replay."""
    Case(cuda, 256, 512, 128, seed=1).run()  # plans and kernels
    case = Case(cuda, 256, 512, 128)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.run()
    case.values.mul_(3), case.weight.mul_(3)
    graph.replay()
    case.check()


@on_gpu
def test_streams_wait_for_the_copy(cuda, monkeypatch):
    monkeypatch.setattr(semi_structured, "slower", lambda problem, device: None)
    semi_structured.refusal.cache_clear()
    case = Case(cuda, 2048, 2048, 64)
    torch.cuda.synchronize()
    case.run()
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        case.out.fill_(math.nan)
        case.run()
    other.synchronize()
    case.check()


@on_gpu
def test_a_layer_and_its_compiled_form(cuda, monkeypatch):
    torch.manual_seed(0)
    layer = SparseLinear.from_linear(torch.nn.Linear(512, 256).half(), NM, n=2, m=4).to(cuda)
    x = torch.randn(2, 64, 512, device=cuda).half()
    before = len(semi_structured.MEMO)
    expected = F.relu(x.double() @ layer.weight.detach().to_dense().double().mT + layer.bias.double())
    with torch.no_grad():
        assert relative_error(F.relu(layer(x)), expected) <= 1e-3
        assert len(semi_structured.MEMO) == before + 1
        monkeypatch.setattr(chain, "decide", lambda product: Decision("", "sparse is faster"))
        compiled = torch.compile(torch.nn.Sequential(layer, torch.nn.ReLU()), backend="sparsecomp")
        assert relative_error(compiled(x), expected) <= 1e-3
        layer.values.mul_(-1)
        expected = F.relu(x.double() @ layer.weight.detach().to_dense().double().mT + layer.bias.double())
        assert relative_error(compiled(x), expected) <= 1e-3
