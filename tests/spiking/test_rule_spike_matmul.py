"""Which products of two tensors become `spike_matmul`, and that it gives eager's bits, strides and gradients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rewriting import Examples, Surrogate, rewritten, site, spikes
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd

import sparsecomp
from sparsecomp._compat import FakeTensorMode
from sparsecomp.lowering.cache.signature import Device
from sparsecomp.lowering.tuning.cards import H100
from sparsecomp.lowering.tuning.ceilings import Target
from sparsecomp.options import Options
from sparsecomp.passes import pipeline
from sparsecomp.passes.cost.spike_matmul import SpikeProduct, decide
from sparsecomp.passes.spiking import spike_linear, spike_matmul
from sparsecomp.report import Report

CARD = Device("NVIDIA H100 80GB HBM3", "9.0", "3.6.0")
T, B, N, C, H = 2, 2, 6, 16, 4


def heads(x: Tensor) -> Tensor:
    """(T, B, N, C) as Spikformer makes it (T, B, heads, N, width)."""
    return spikes(x).reshape(*x.shape[:3], H, -1).permute(0, 1, 3, 2, 4)


def widths(x: Tensor) -> Tensor:
    return spikes(x).unflatten(-1, (H, -1))


TAKEN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "spikformer": lambda q, k: heads(q) @ heads(k).transpose(-2, -1),
    "of columns": lambda q, k: heads(q).mT @ heads(k),
    "bmm": lambda q, k: torch.bmm(spikes(q[0]), spikes(k[0]).mT),
    "mm": lambda q, k: spikes(q[0, 0]).mm(spikes(k[0, 0]).t()),
    "einsum": lambda q, k: torch.einsum("tbnhd,tbmhd->tbhnm", widths(q), widths(k)),
    "einsum, turned": lambda q, k: torch.einsum("tbnhd,tbmhd->tbmhn", widths(q), widths(k)),
    "einsum, batch last": lambda q, k: torch.einsum("tbnhd,tbmhd->nmthb", widths(q), widths(k)),
    "einsum, turned, batch last": lambda q, k: torch.einsum("tbhdn,tbdmh->mnthb", widths(q).permute(0, 1, 3, 4, 2),
                                                            widths(k).permute(0, 1, 4, 2, 3)),
    "einsum of a list": lambda q, k: torch.einsum("... n d, ... m d -> ... m n", [heads(q), heads(k)]),
    "counts": lambda q, k: (heads(q) + heads(-q) + heads(q - 1)) @ (heads(k) * 100).mT,
    "scales": lambda q, k: (heads(q) * 0.25) @ (heads(k) * 2 - heads(-k) * 0.5).mT,
}  # fmt: skip
LEFT: dict[str, tuple[Callable[[Tensor, Tensor], Any], str]] = {
    "a third": (lambda q, k: (heads(q) * (1 / 3)) @ heads(k).mT, "spikes times 0.333"),
    "large counts": (lambda q, k: (heads(q) * 130 + heads(q - 1)) @ heads(k).mT, "`add` is integers 0..131"),
    "positive": (lambda q, k: heads(q) @ k.relu().unflatten(-1, (H, -1)).permute(0, 1, 3, 4, 2), "is values 0..inf"),
    "double": (lambda q, k: heads(q.double()) @ heads(k.double()).mT, "only float32, float16 and bfloat16"),
    "empty": (lambda q, k: spikes(q[0, :0]) @ spikes(k[0, :0]).mT, "nothing to gain"),
    "one operand": (lambda q, k: heads(q) @ k.unflatten(-1, (H, -1)).permute(0, 1, 3, 4, 2),
                    "matmul on spikes is not supported"),
    "broadcast": (lambda q, k: heads(q) @ heads(k)[:1].mT, "matmul on spikes is not supported"),
}  # fmt: skip


def inputs(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(T, B, N, C, generator=generator).to(dtype) for _ in range(2)]


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("name", TAKEN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_and_strides_are_eagers(name, dtype):
    model, operands = TAKEN[name], inputs(dtype)
    with torch.no_grad():
        found, report = rewritten(model, *operands, strict=True)
        expected = model(*operands)
    assert site(report, "spike_matmul").rewritten, site(report, "spike_matmul").reason
    assert torch.equal(found, expected) and found.stride() == expected.stride() and found.dtype is dtype
    assert not [one for one in report.sites if one.rule == "spike_linear"]


@pytest.mark.quick_cases(len(LEFT))
@pytest.mark.parametrize("name", LEFT)
def test_what_stays_dense_says_why(name):
    model, reason = LEFT[name]
    with torch.no_grad():
        _, report = rewritten(model, *inputs(), strict=True)
    (left,) = [one for one in report.sites if one.rule in ("spike_matmul", "spike_linear")]
    assert not left.rewritten and reason in left.reason


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"implementation": "auto"}, "no CUDA device: dense is faster on the CPU"),
        ({"implementation": "dense"}, "implementation='dense' was asked for"),
        ({"implementation": "event"}, "matmul with implementation='event' on spikes is not supported"),
        ({"disable": ("spike_matmul",)}, None),
    ],
)
def test_options_are_obeyed(options, reason):
    with torch.no_grad():
        _, report = rewritten(TAKEN["spikformer"], *inputs(), strict=True, **options)
    found = [one for one in report.sites if one.rule == "spike_matmul"]
    assert [one.reason for one in found] == ([] if reason is None else [found[0].reason])
    assert reason is None or (reason in found[0].reason and not found[0].rewritten)


@pytest.mark.parametrize(
    ("counts", "depth", "taken"),
    [((127, 127), 133_144, True), ((127, 127), 133_145, False), ((-128, -128), 2**17 - 1, True),
     ((-128, -128), 2**17, False), ((-128, 64), 2**17, True), ((-128, 64), 2**18, False)],
)  # fmt: skip
def test_sums_that_could_pass_32_bits_stay_dense(counts, depth, taken):
    """The greatest sum is that of the products of the largest counts: 127 · 127 · 133144 is below 2^31, by 4072."""
    one, other = counts
    operands = torch.ones(2, depth), torch.ones(3, depth)
    with torch.no_grad():
        found, report = rewritten(lambda a, b: (spikes(a) * one) @ (spikes(b) * other).mT, *operands, strict=True)
    last = site(report, "spike_matmul")
    assert last.rewritten == taken and (taken or last.reason == f"sums over {depth} inputs could pass 32 bits")
    torch.testing.assert_close(found, torch.full((2, 3), float(one * other * depth)), rtol=1e-3, atol=0)


@pytest.mark.parametrize("amp", [False, True])
def test_gradients_are_eagers(amp):
    fire: Any = Surrogate.apply

    def model(q, k):
        q, k = (fire(x).unflatten(-1, (H, -1)).transpose(2, 3) for x in (q, k))
        return q @ k.mT

    results = []
    for run in (model, lambda *operands: rewritten(model, *operands, strict=True)[0]):
        operands = [x.requires_grad_() for x in inputs()]
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            out = run(*operands)
        seed = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
        results.append((out, *torch.autograd.grad(out, operands, seed.to(out.dtype))))
    for found, expected in zip(*results[::-1], strict=True):
        assert torch.equal(found, expected) and found.dtype is expected.dtype


@pytest.mark.parametrize("trained", [False, True])
def test_a_later_write_is_no_matter_without_gradients(trained):
    def model(q, k):
        q = heads(q)
        scores = q @ heads(k).mT
        return scores + q.zero_().sum()

    with torch.set_grad_enabled(trained):
        found, report = rewritten(model, *inputs(), strict=True)
    assert torch.equal(found, model(*inputs()))
    assert site(report, "spike_matmul").rewritten != trained


def test_bytes_are_multiplied_under_inductor():
    def model(q, k):
        return (heads(q) * 0.5) @ heads(k).mT

    operands = inputs()
    with torch.no_grad():
        compiled = sparsecomp.optimize(model, *operands, implementation="binary")
        assert torch.equal(compiled(*operands), model(*operands))
    traced = []
    decompositions = sparsecomp.ops.decompositions()
    run = aot_autograd(fw_compiler=lambda gm, _: traced.append(gm) or gm, decompositions=decompositions)

    def backend(gm, example_inputs):
        pipeline.run_rules(gm, Options(implementation="binary"), rules=[spike_matmul.RULE])
        return run(gm, example_inputs)

    torch._dynamo.reset()
    with torch.no_grad():
        assert torch.equal(torch.compile(model, backend=backend)(*operands), model(*operands))
    (counted,) = traced[0].graph.find_nodes(
        op="call_function", target=torch.ops.sparsecomp.spike_matmul_counts.default
    )
    assert [one.meta["val"].dtype for one in counted.all_input_nodes] == [torch.int8] * 2


def test_the_gate_takes_many_heads_in_a_graph_and_no_small_product():
    pytest.importorskip("triton")
    many = SpikeProduct(4096, 64, 64, 32, torch.float32, fused=True, trained=False, hosted=False)
    taken = decide(many, CARD, H100)
    # dense writes and reads operands of four bytes, and results; bytes leave mostly the results
    assert taken.implementation == "binary" and 1.2 < taken.gain < 2.5
    # the host casts two operands and launches a product, where torch does the latter alone
    assert decide(many._replace(batch=1, hosted=True, fused=False), CARD, H100).dense
    assert decide(many._replace(fused=False), CARD, H100).gain < taken.gain
    trained = decide(many._replace(trained=True), CARD, H100)
    assert trained.gain < taken.gain


@pytest.mark.parametrize(("batch", "taken"), [(4096, True), (1, False)])
def test_an_estimate_for_a_card_decides(batch, taken):
    pytest.importorskip("triton")
    with FakeTensorMode():
        q, k = (torch.empty(batch, 64, 32, device="cuda") for _ in range(2))
    gm = fx.symbolic_trace(lambda q, k: spikes(q) @ spikes(k).mT)
    Examples(gm).run(q, k)
    with torch.no_grad():
        report = pipeline.run_rules(
            gm, Options(mode="reduce-overhead"), target=Target(CARD, H100), rules=[spike_matmul.RULE, spike_linear.RULE]
        )
    assert isinstance(report, Report)
    (found,) = report.sites
    assert found.rewritten == taken and found.estimate is not None
