"""Attention of spikes with a known mask becomes one operator over its blocks; any other stays, and says why."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from kernel_devices import needs_triton
from rewriting import Surrogate, rewritten, rewritten_for, site, spikes
from torch import Tensor, nn

import sparsecomp
from sparsecomp.attention import LocalWindow, spiking_attention
from sparsecomp.report import Site

T, B, N, C, H = 2, 2, 70, 16, 4
RULE = "spike_attention"
Model = Callable[[Tensor, Tensor, Tensor], Tensor]


def split(x: Tensor) -> Tensor:
    """(T, B, N, C) as Spikformer makes it (T, B, heads, N, width)."""
    return x.reshape(*x.shape[:3], H, -1).permute(0, 1, 3, 2, 4)


def heads(x: Tensor) -> Tensor:
    return split(spikes(x))


def columns(x: Tensor) -> Tensor:
    return heads(x).transpose(-1, -2)


def tokens(x: Tensor) -> Tensor:
    return spikes(x).unflatten(-1, (H, -1))


def qk(q: Tensor, k: Tensor) -> Tensor:
    return heads(q) @ heads(k).transpose(-2, -1)


def near(x: Tensor, far: int = 9) -> Tensor:
    """The mask of a window, of the tokens of (T, B, N, C)."""
    i = torch.arange(x.shape[2], device=x.device)
    return (i[:, None] - i).abs() < far


def before(x: Tensor) -> Tensor:
    return torch.ones(x.shape[2], x.shape[2], dtype=x.dtype).tril()


def by_head(x: Tensor) -> Tensor:
    i = torch.arange(x.shape[2])
    return torch.stack([(i[:, None] - i).abs() < far for far in (1, 2, 30, 60)])


TAKEN: dict[str, Model] = {
    "multiplied": lambda q, k, v: (qk(q, k) * near(q)) @ heads(v) * 0.125,
    "multiplied by numbers": lambda q, k, v: (before(q) * qk(q, k)) @ heads(v),
    "in place": lambda q, k, v: qk(q, k).mul_(near(q).to(q.dtype)) @ heads(v),
    "filled": lambda q, k, v: qk(q, k).masked_fill(~near(q), 0) @ heads(v),
    "filled in place": lambda q, k, v: qk(q, k).masked_fill_(near(q).logical_not(), 0.0) @ heads(v),
    "chosen": lambda q, k, v: torch.where(near(q), qk(q, k), 0.0) @ heads(v),
    "chosen the other way": lambda q, k, v: torch.where(~near(q), 0.0, qk(q, k)) @ heads(v),
    "tril as a function": lambda q, k, v: (qk(q, k) * torch.tril(torch.ones(N, N, dtype=q.dtype))) @ heads(v),
    "scaled on the way": lambda q, k, v: ((qk(q, k) * 0.25) * near(q) / 2) @ heads(v),
    "by heads": lambda q, k, v: (qk(q, k) * by_head(q)) @ heads(v),
    "by keys": lambda q, k, v: (qk(q, k) * (torch.arange(N) < 40)) @ heads(v),
    "einsum": lambda q, k, v: torch.einsum(
        "tbhnm,tbmhd->tbnhd", torch.einsum("tbnhd,tbmhd->tbhnm", tokens(q), tokens(k)) * near(q), tokens(v)),
    "einsum, turned": lambda q, k, v: torch.einsum(
        "tbmhd,tbhnm->tbhdn", tokens(v), torch.einsum("tbmhd,tbnhd->tbhnm", tokens(k), tokens(q)) * near(q)),
    "of columns": lambda q, k, v: ((columns(q).mT @ columns(k)) * near(q)) @ columns(v).mT,
    "four dimensions": lambda q, k, v: ((heads(q)[0] @ columns(k)[0]) * near(q)) @ heads(v)[0],
    "bmm": lambda q, k, v: torch.bmm(torch.bmm(heads(q).flatten(0, 2), columns(k).flatten(0, 2)) * near(q),
                                     heads(v).flatten(0, 2)),
    "mm": lambda q, k, v: (spikes(q[0, 0]).mm(spikes(k[0, 0]).t()) * near(q)).mm(spikes(v[0, 0])),
    "counts": lambda q, k, v: (((heads(q) + heads(-q)) @ columns(k)) * near(q)) @ (heads(v) - 2 * heads(v - 1)),
    "many": lambda q, k, v: (((heads(q) * 1000) @ columns(k)) * near(q)) @ heads(v),
    "quarters": lambda q, k, v: (((heads(q) * 0.25) @ columns(k)) * near(q)) @ (heads(v) * 0.5),
    "fewer keys": lambda q, k, v: ((heads(q) @ columns(k)[..., :50]) * near(q)[:, :50]) @ heads(v)[..., :50, :],
    "with dropout": lambda q, k, v: (torch.dropout(qk(q, k), 0.5, False) * near(q)) @ heads(v),
}  # fmt: skip
LEFT: dict[str, tuple[Model, str]] = {
    "an analog value": (lambda q, k, v: (qk(q, k) * near(q)) @ split(v), "`permute_2`: `L_v_` is an input"),
    "an analog query": (lambda q, k, v: ((split(q) @ columns(k)) * near(q)) @ heads(v), "not proved to be spikes"),
    "a mask that is data": (lambda q, k, v: (qk(q, k) * (q[0, 0, :, 0] > 0)) @ heads(v), "an input of the graph"),
    "a bias": (lambda q, k, v: (qk(q, k) * (near(q) * 0.5)) @ heads(v), "other numbers than 0 and 1"),
    "not a power of two": (lambda q, k, v: (qk(q, k) * near(q) * 0.3) @ heads(v), "0.3 between its products"),
    "read twice": (lambda q, k, v: (a := qk(q, k) * near(q)) @ heads(v) + a.sum(), "reads its scores too"),
    "masked twice": (lambda q, k, v: (qk(q, k) * near(q) * before(q)) @ heads(v), "more than once"),
    "too large": (lambda q, k, v: (qk(q, k) * near(q)) @ (heads(v) * 4000 * 100), "may be rounded"),
    "keys first": (lambda q, k, v: columns(v) @ ((heads(k) @ columns(q)) * near(q)), "not of queries, and then"),
    "heads between": (lambda q, k, v: torch.einsum("tbnhm,tbmhd->tbnhd", torch.einsum(
        "tbnhd,tbmhd->tbnhm", tokens(q), tokens(k)) * near(q)[:, None], tokens(v)), "not of queries, and then"),
    "a mask of batch entries": (
        lambda q, k, v: (qk(q, k) * near(q).expand(B, 1, N, N)) @ heads(v), "broader than its scores"),
    "written between": (lambda q, k, v: rewrites_the_first(q, k, v), "is written to"),
}  # fmt: skip
NO_SITE: dict[str, Model] = {
    "analog": lambda q, k, v: ((split(q) @ split(k).mT) * near(q)) @ split(v),
    "no mask": lambda q, k, v: qk(q, k) @ heads(v),
    "softmax": lambda q, k, v: (qk(q, k) * near(q)).softmax(-1) @ heads(v),
    "filled with another number": lambda q, k, v: qk(q, k).masked_fill(~near(q), 1.0) @ heads(v),
    "added": lambda q, k, v: (qk(q, k) + near(q)) @ heads(v),
}


def rewrites_the_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    first = heads(q).contiguous()
    scores = first @ columns(k)
    first.zero_()
    return (scores * near(q)) @ heads(v)


def inputs(n: int = N, seed: int = 0, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(T, B, n, C, generator=generator).to(dtype) for _ in range(3)]


def judged(model: Callable[..., Any], *given: Tensor, **options: Any) -> tuple[Tensor, list[Site]]:
    found, report = rewritten(model, *given, strict=True, **options)
    return found, [one for one in report.sites if one.rule == RULE]


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("name", TAKEN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_bits_and_strides_are_eagers(name: str, dtype: torch.dtype) -> None:
    model, operands = TAKEN[name], inputs(dtype=dtype)
    with torch.no_grad():
        found, (seen,) = judged(model, *operands)
        expected, exact = model(*operands), model(*(operand.double() for operand in operands))
    if name == "many" and dtype is torch.float16:
        assert not seen.rewritten and "may be rounded" in seen.reason
    else:
        assert seen.rewritten, seen.reason
        assert torch.equal(found.double(), exact)
    assert torch.equal(found, expected) and found.stride() == expected.stride() and found.dtype is dtype


@pytest.mark.quick_cases(len(LEFT))
@pytest.mark.parametrize("name", LEFT)
def test_what_stays_as_written_says_why(name: str) -> None:
    model, reason = LEFT[name]
    found, (seen,) = judged(model, *inputs())
    assert not seen.rewritten and reason in seen.reason, seen.reason
    torch.testing.assert_close(found, model(*inputs()))


@pytest.fixture
def tf32() -> Iterator[None]:
    """Products may use TF32."""
    matmul: Any = torch.backends.cuda.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, "tf32"
    yield
    matmul.fp32_precision = before


@pytest.mark.usefixtures("tf32")
def test_scores_that_tf32_rounds_stay_as_written() -> None:
    _, (seen,) = judged(TAKEN["many"], *inputs())
    assert not seen.rewritten and "scores up to 4000" in seen.reason
    assert judged(TAKEN["multiplied"], *inputs())[1][0].rewritten


@pytest.mark.parametrize("name", NO_SITE)
def test_what_is_no_site(name: str) -> None:
    assert judged(NO_SITE[name], *inputs())[1] == []


def test_nothing_is_left_of_what_was_written() -> None:
    _, report = rewritten(TAKEN["multiplied"], *inputs(), strict=True)
    graph = "\n".join(line for line in report.graph_after.splitlines() if not line.strip().startswith("#"))
    assert graph.count("sparsecomp.counted_attention") == 1
    assert not any(word in graph for word in ("arange", "abs", "matmul", " @ "))


class Buffered(nn.Module):
    """With its mask as a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(N, N).tril())

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (qk(q, k) * self.mask) @ heads(v)


def test_a_buffer_needs_a_promise() -> None:
    found, (seen,) = judged(Buffered(), *inputs())
    assert seen.why == "MASK_NOT_FROZEN" and torch.equal(found, Buffered()(*inputs()))
    found, (seen,) = judged(Buffered(), *inputs(), frozen="buffers")
    assert seen.rewritten and "promise" in seen.reason and torch.equal(found, Buffered()(*inputs()))


@pytest.mark.slow(reason="compiles models")
def test_a_promised_mask_that_is_written_to_all_the_same() -> None:
    model = Buffered()
    compiled = torch.compile(model, backend="sparsecomp", options={"frozen": "buffers", "implementation": "skip"})
    with torch.no_grad():
        assert torch.equal(compiled(*inputs()), model(*inputs()))
        model.mask.copy_(near(inputs()[0]))
        assert torch.equal(compiled(*inputs()), model(*inputs()))
        model.mask.fill_(0.5)
        with pytest.raises(sparsecomp.errors.FrozenWeightError, match="other numbers than 0 and 1"):
            compiled(*inputs())


def test_under_autocast() -> None:
    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return (qk(q, k) * near(q)) @ heads(v)

    found, (seen,) = judged(model, *inputs())
    assert seen.rewritten and found.dtype is torch.bfloat16
    assert torch.equal(found, TAKEN["multiplied"](*(one.double() for one in inputs())).mul(8).bfloat16())


class Block(nn.Module):
    """Attention of spikes as spiking transformers are trained."""

    def __init__(self, masking: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.masking = nn.Linear(C, 3 * C), masking

    def forward(self, x: Tensor) -> Tensor:
        fired: Any = Surrogate.apply(self.inner(x))
        q, k, v = (split(one) for one in fired.chunk(3, -1))
        return (q @ k.transpose(-2, -1)).masked_fill(~self.masking(x).bool(), 0) @ v * 0.125


def test_gradients_of_a_network_are_those_of_eager() -> None:
    x, results = inputs()[0], []
    for run in (lambda model: rewritten(model, x, strict=True), lambda model: (model(x), None)):
        model = Block(by_head)
        out, report = run(model)
        out.square().sum().backward()
        assert report is None or site(report, RULE).rewritten, site(report, RULE).reason
        results.append((out.detach(), *(parameter.grad for parameter in model.parameters())))
    assert torch.equal(results[0][0], results[1][0]) and results[0][1].any()
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.slow(reason="compiles a model")
def test_trained_through_inductor() -> None:
    x, model = inputs()[0], Block(near)
    compiled = torch.compile(model, backend="sparsecomp", options={"implementation": "skip"})
    grads = [torch.autograd.grad(run(x).square().sum(), list(model.parameters())) for run in (compiled, model)]
    report = sparsecomp.last_report(compiled)
    assert report is not None and site(report, RULE).rewritten
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("seed", range(6))
def test_random_programs(seed: int) -> None:
    draw = random.Random(seed)
    n, most, far = draw.randint(1, 140), draw.choice([1, 3]), draw.randint(0, 60)
    masking = draw.choice([before, near, lambda x: near(x, far), lambda x: ~near(x, far), lambda x: near(x, 3) | (
        torch.arange(x.shape[2]) < far)])  # fmt: skip
    how = draw.choice(["multiply", "fill", "where"])
    scale = draw.choice([0.125, 1.0, 2.0])

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (sum((heads(x - level) for level in range(1, most)), heads(x)) for x in (q, k, v))
        mask, scores = masking(v.transpose(2, 3).flatten(3)), q @ k.transpose(-2, -1) * scale
        if how == "multiply":
            return (scores * mask) @ v
        mask = mask.bool()
        return (scores.masked_fill(~mask, 0) if how == "fill" else torch.where(mask, scores, 0.0)) @ v

    found, (seen,) = judged(model, *inputs(n, seed))
    assert seen.rewritten, seen.reason
    assert torch.equal(found.double(), model(*(one.double() for one in inputs(n, seed))))


@needs_triton
def test_what_pays_on_a_card() -> None:
    """Of 1024 tokens most blocks of a window are empty, and scores never lie in memory; few tokens are one block."""
    long = [torch.randn(1, 1, 1024, 64) for _ in range(3)]
    found, report, code = rewritten_for("H100", TAKEN["multiplied"], *long)
    seen = site(report, RULE)
    assert seen.rewritten and "counted_attention" in code and torch.equal(found, TAKEN["multiplied"](*long))
    assert "empty" in seen.reason and seen.estimate is not None
    small = [torch.randn(1, 1, 16, 16) for _ in range(3)]
    _, report, _ = rewritten_for("H100", TAKEN["multiplied"], *small)
    assert not site(report, RULE).rewritten and "would not pay" in site(report, RULE).reason


def test_a_call_by_name_is_told_that_its_operands_are_counts() -> None:
    pattern = LocalWindow(9, 9)

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return spiking_attention(heads(q), heads(k), heads(v), pattern, scale=0.3)

    found, report = rewritten(model, *inputs(), strict=True)
    assert site(report, RULE).rewritten and "multiplied as float16" in site(report, RULE).reason
    assert "counted_attention" in report.graph_after and torch.equal(found, model(*inputs()))
    _, (seen,) = judged(lambda q, k, v: spiking_attention(heads(q), split(k), heads(v), pattern), *inputs())
    assert not seen.rewritten and "`L_k_` is an input" in seen.reason


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_on_a_gpu_compiled_and_trained(dtype: torch.dtype, mode: str) -> None:
    model = Block(near).to("cuda", dtype)
    x = torch.randn(2, 3, 777, C, device="cuda", dtype=dtype)
    compiled: Any = torch.compile(model, backend="sparsecomp", options={"implementation": "skip", "mode": mode})
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(compiled(x), model(x))
    weight = torch.randn(2, 3, H, 777, C // H, device="cuda", dtype=dtype)
    grads = [torch.autograd.grad((run(x) * weight).sum(), list(model.parameters())) for run in (compiled, model)]
    report = sparsecomp.last_report(compiled)
    assert report is not None and site(report, RULE).rewritten, site(report, RULE).reason
    for one, other in zip(*grads, strict=True):
        error = torch.linalg.vector_norm(one.double() - other.double()) / torch.linalg.vector_norm(other.double())
        assert error <= (1e-5 if dtype is torch.float32 else 2e-2)
