"""Products of three tensors of spikes are computed in the cheaper order, to the same bits, or stay as written."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from rewriting import Surrogate, rewritten, site, spikes
from torch import Tensor

from sparsecomp.passes.spiking.batched_product import batched_product

T, B, N, C, H = 2, 2, 20, 16, 4


def split(x: Tensor) -> Tensor:
    """(T, B, N, C) as Spikformer makes it (T, B, heads, N, width)."""
    return x.reshape(*x.shape[:3], H, -1).permute(0, 1, 3, 2, 4)


def heads(x: Tensor) -> Tensor:
    return split(spikes(x))


def columns(x: Tensor) -> Tensor:
    """(T, B, heads, width, N), as spikingjelly and QKFormer keep it."""
    return heads(x).transpose(-1, -2)


def widths(x: Tensor) -> Tensor:
    return spikes(x).unflatten(-1, (H, -1))


def qk(q: Tensor, k: Tensor) -> Tensor:
    return heads(q) @ heads(k).transpose(-2, -1)


def stored(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    attention = qk(q, k)
    return (attention @ heads(v)) * attention.sum()


def written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    attention, values = qk(q, k), heads(v).contiguous()
    return attention @ values.mul_(2)


def rewrites_the_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    first = heads(q).contiguous()
    attention = first @ heads(k).transpose(-2, -1)
    first.zero_()
    return attention @ heads(v)


def switched(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    attention = qk(q, k)
    with torch.enable_grad():
        return attention @ heads(v)


TAKEN: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "spikformer": lambda q, k, v: (qk(q, k) @ heads(v)) * 0.125,
    "scaled between": lambda q, k, v: (qk(q, k) * 0.25) @ heads(v),
    "scaled by division": lambda q, k, v: (qk(q, k) / 8) @ heads(v),
    "scaled everywhere": lambda q, k, v: ((heads(q) * 0.5 @ (heads(k) * 2).mT) * 0.25) @ (heads(v) * 0.125),
    "with dropout": lambda q, k, v: torch.dropout(qk(q, k), 0.5, False) @ heads(v),
    "from the right": lambda q, k, v: columns(v) @ (heads(k) @ columns(q)),
    "of columns": lambda q, k, v: (columns(q).mT @ columns(k)) @ columns(v).mT,
    "functions": lambda q, k, v: torch.matmul(torch.matmul(heads(q), columns(k)), other=heads(v)),
    "bmm": lambda q, k, v: torch.bmm(torch.bmm(*(a(b).flatten(0, 2) for a, b in ((heads, q), (columns, k)))),
                                     heads(v).flatten(0, 2)),
    "mm": lambda q, k, v: torch.mm(spikes(q[0, 0]).mm(spikes(k[0, 0]).t()), spikes(v[0, 0])),
    "counts": lambda q, k, v: ((heads(q) + heads(-q)) @ columns(k)) @ (heads(v) + 2 * heads(v - 1)),
    "signed": lambda q, k, v: ((heads(q) - heads(-q)) @ columns(k)) @ heads(v),
    "einsum": lambda q, k, v: torch.einsum(
        "tbhnm,tbmhd->tbnhd", torch.einsum("tbnhd,tbmhd->tbhnm", widths(q), widths(k)), widths(v)),
    "einsum of a list": lambda q, k, v: torch.einsum(
        "...ij, ...jd -> ...id", [torch.einsum("...id,...jd->...ij", heads(q), heads(k)) * 0.5, heads(v)]),
    "einsum, turned": lambda q, k, v: torch.einsum(
        "tbmhd,tbhnm->tbnhd", widths(v), torch.einsum("tbmhd,tbnhd->tbhnm", widths(k), widths(q))),
    "einsum behind matmul": lambda q, k, v: torch.einsum("tbhnm,tbmhd->tbhdn", qk(q, k), widths(v)),
    "matmul behind einsum": lambda q, k, v: torch.einsum("tbnhd,tbmhd->tbhnm", widths(q), widths(k)) @ heads(v),
}  # fmt: skip
LEFT: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Any], str]] = {
    "cheap already": (lambda q, k, v: heads(q) @ (columns(k) @ heads(v)), "other order multiplies 3200 pairs"),
    "an analog operand": (lambda q, k, v: qk(q, k) @ split(v), "known range: `L_v_` is an input"),
    "not a power of two": (lambda q, k, v: (qk(q, k) * 0.3) @ heads(v), "the number 0.3 behind it, is no power of two"),
    "a power of two in the end": (lambda q, k, v: ((qk(q, k) * 3) / 3) @ heads(v), "the number 0.333"),
    "too large": (lambda q, k, v: qk(q, k) @ (heads(v) * 4000 * 100), "sums up to 32000000 pass 16777216"),
    "unbounded": (lambda q, k, v: qk(q, k) @ split(v.round()), "of a known range: too little is known"),
    "written in place": (written, "is written to in place"),
    "written between": (rewrites_the_first, "is written to in place"),
    "gradients switched between": (switched, "gradients are switched"),
}  # fmt: skip
NO_SITE: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "analog": lambda q, k, v: (q @ k.mT) @ v,
    "read twice": stored,
    "softmax": lambda q, k, v: qk(q, k).softmax(-1) @ heads(v),
    "broadcast": lambda q, k, v: qk(q, k) @ heads(v)[:1],
    "a square": lambda q, k, v: (both := qk(q, k)) @ both,
    "of a vector": lambda q, k, v: (spikes(q[0, 0]) @ spikes(k[0, 0]).t()) @ spikes(v[0, 0, :, 0]),
    "factor is a tensor": lambda q, k, v: (qk(q, k) * k.sum()) @ heads(v),
    "in place": lambda q, k, v: qk(q, k).mul_(2) @ heads(v),
    "two letters": lambda q, k, v: torch.einsum(
        "nm,mhd->nhd", torch.einsum("nhd,mhd->nm", widths(q)[0, 0], widths(k)[0, 0]), widths(v)[0, 0]),
    "a diagonal": lambda q, k, v: torch.einsum("...nn,...nd->...nd", qk(q, k), heads(v)),
}  # fmt: skip


def inputs(n: int = N, seed: int = 0, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(T, B, n, C, generator=generator).to(dtype) for _ in range(3)]


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("name", TAKEN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_bits_and_strides_are_eagers(name, dtype):
    model, operands = TAKEN[name], inputs(dtype=dtype)
    with torch.no_grad():
        found, report = rewritten(model, *operands, strict=True, disable=("spike_linear",))
        expected = model(*operands)
        exact = model(*(operand.double() for operand in operands))
    assert site(report, "reorder_products").rewritten, site(report, "reorder_products").reason
    assert torch.equal(found, expected) and found.stride() == expected.stride() and found.dtype is dtype
    assert torch.equal(found.double(), exact)


@pytest.mark.quick_cases(len(LEFT))
@pytest.mark.parametrize("name", LEFT)
def test_what_stays_as_written_says_why(name):
    model, reason = LEFT[name]
    with torch.no_grad():
        found, report = rewritten(model, *inputs(), strict=True)
        torch.testing.assert_close(found, model(*inputs()))
    (left,) = [one for one in report.sites if one.rule == "reorder_products" and one.why == "NOT_REORDERED"][:1]
    assert reason in left.reason and left.reason.startswith("the products stay in their order: ")


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("name", NO_SITE)
def test_what_is_no_product_of_three(name):
    with torch.no_grad():
        found, report = rewritten(NO_SITE[name], *inputs(), strict=True)
        torch.testing.assert_close(found, NO_SITE[name](*inputs()))
    assert not [one for one in report.sites if one.rule == "reorder_products"]


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize(
    ("dtype", "n", "counts", "bound"),
    [
        # heads of width 4: sums over n tokens of n x 4 coincidences, in their greatest
        (torch.float16, 512, 1, None), (torch.float16, 513, 1, "sums up to 2052 pass 2048"),
        (torch.bfloat16, 64, 1, None), (torch.bfloat16, 65, 1, "sums up to 260 pass 256"),
        (torch.float32, 64, 256, None), (torch.float32, 65, 256, "sums up to 17039360 pass 16777216"),
    ],
)  # fmt: skip
def test_the_bound_up_to_which_every_sum_is_exact(dtype, n, counts, bound):
    def model(q, k, v):
        return (spikes(q) * counts @ (spikes(k) * counts).mT) @ spikes(v)

    operands = [torch.ones(1, n, 4, dtype=dtype) for _ in range(3)]  # every count at its greatest
    with torch.no_grad():
        found, report = rewritten(model, *operands, strict=True)
    one = site(report, "reorder_products")
    assert one.rewritten == (bound is None) and (bound is None or bound in one.reason)
    if bound is None:
        assert found.unique().item() == n * 4 * counts**2


@pytest.fixture
def allowed():
    """Sets what float32 products on a CPU may round their operands to."""
    matmul = torch.backends.mkldnn.matmul
    before = matmul.fp32_precision
    yield lambda precision: setattr(matmul, "fp32_precision", precision)
    matmul.fp32_precision = before


@pytest.mark.parametrize(
    ("precision", "n", "taken"), [("tf32", 2048, True), ("tf32", 2049, False), ("bf16", 257, False)]
)
def test_operands_survive_the_rounding_that_the_user_allows(allowed, precision, n, taken):
    allowed(precision)
    operands = [torch.randn(1, n, 4) for _ in range(3)]
    with torch.no_grad():
        _, report = rewritten(lambda q, k, v: (spikes(q) @ spikes(k).mT) @ spikes(v), *operands, strict=True)
    assert site(report, "reorder_products").rewritten == taken


@pytest.mark.parametrize("amp", [False, True])
def test_gradients_are_those_of_float64_to_rounding(amp):
    fire: Any = Surrogate.apply

    def model(q, k, v):
        q, k, v = (fire(x).unflatten(-1, (H, -1)).transpose(2, 3) for x in (q, k, v))
        return ((q @ k.mT) @ v) * 0.125

    seed = torch.randn(T, B, H, N, C // H, generator=torch.Generator().manual_seed(3))
    results = []
    for dtype in (torch.float64, torch.float32):
        operands = [x.to(dtype).requires_grad_() for x in inputs()]
        if dtype is torch.float64:
            out = model(*operands)
        else:
            with torch.autocast("cpu", torch.bfloat16) if amp else nullcontext():
                out, report = rewritten(model, *operands, strict=True)
            assert site(report, "reorder_products").rewritten and (out.dtype is torch.bfloat16) == amp
        out.backward(seed.to(out.dtype))
        results.append((out.detach(), *(operand.grad for operand in operands)))
    (expected, *exact), (found, *gradients) = results
    assert torch.equal(found.double(), expected)
    for mine, theirs in zip(gradients, exact, strict=True):
        error = (mine.double() - theirs).norm() / theirs.norm()
        assert error < (1e-2 if amp else 1e-6)


def test_float16_is_not_reordered_where_its_gradients_could_overflow():
    operands = [x.requires_grad_() for x in inputs(dtype=torch.float16)]
    _, report = rewritten(TAKEN["spikformer"], *operands, strict=True)
    assert "gradients of float16 could overflow" in site(report, "reorder_products").reason


def test_of_four_tensors_the_first_three_are_reordered():
    def model(q, k, v):
        return ((qk(q, k) @ heads(v)) @ heads(q).mT) @ heads(k)

    with torch.no_grad():
        found, report = rewritten(model, *inputs(), strict=True, disable=("spike_matmul",))
        assert torch.equal(found, model(*inputs()))
    assert [one.rewritten for one in report.sites if one.rule == "reorder_products"] == [True]
    assert report.graph_after.count("torch.matmul(") == 2


def marked(dim: int) -> list[Tensor]:
    """Inputs of which one size is to be any."""
    operands = inputs()
    for operand in operands:
        torch._dynamo.mark_dynamic(operand, dim)
    return operands


def test_a_batch_of_any_size():
    operands = marked(1)
    with torch.no_grad():
        found, report = rewritten(TAKEN["spikformer"], *operands, strict=True)
        assert torch.equal(found, TAKEN["spikformer"](*operands))
    assert site(report, "reorder_products").rewritten


def test_any_number_of_tokens_has_no_bound():
    with torch.no_grad():
        _, report = rewritten(TAKEN["spikformer"], *marked(2), strict=True)
    assert site(report, "reorder_products").why == "UNKNOWN_SHAPE"


def test_the_rule_can_be_left_out_and_dense_is_obeyed():
    with torch.no_grad():
        _, report = rewritten(TAKEN["spikformer"], *inputs(), disable=("reorder_products",))
        assert not [one for one in report.sites if one.rule == "reorder_products"]
        _, report = rewritten(TAKEN["spikformer"], *inputs(), implementation="dense")
    assert site(report, "reorder_products").why == "FORCED_DENSE"


def test_no_analog_product_is_read_as_einsum_of_another_form():
    graph = torch.fx.symbolic_trace(lambda a, b: torch.einsum("ij,jk", a, b)).graph
    assert all(batched_product(node) is None for node in graph.nodes)
