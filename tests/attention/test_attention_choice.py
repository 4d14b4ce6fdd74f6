"""By which way attention over a pattern is computed: all give the same, and the estimates choose as they should."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from kernel_devices import needs_triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from sparsecomp.attention import (
    AttentionBlocks,
    AttentionPattern,
    FromTensor,
    LocalWindow,
    PerHead,
    RandomKeys,
    attention,
    attention_choice,
    big_bird,
)
from sparsecomp.attention.choice import AttentionChoice, AttentionWork, chosen_way
from sparsecomp.errors import ConfigError, FormatError, PatternError

WAYS = ("blocks", "elements", "dense")
PATTERNS: dict[str, AttentionPattern] = {
    "window": LocalWindow(9, 4), "random": RandomKeys(5, seed=0), "heads": PerHead((LocalWindow(3, 0), RandomKeys(4))),
    "nothing": ~LocalWindow(None, None),
}  # fmt: skip


def operands(q_len: int, k_len: int, heads: int = 2, kv_heads: int = 2, dtype=torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, heads, q_len, 16), (2, kv_heads, k_len, 16), (2, kv_heads, k_len, 16))
    return [torch.randn(shape, generator=generator, dtype=dtype, requires_grad=True) for shape in shapes]


def expected(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, mask, scale=0.3, enable_gqa=q.shape[1] != k.shape[1])


@pytest.mark.parametrize("by", (*WAYS, "auto"))
@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_all_ways_give_the_same(by: str, name: str, kv_heads: int) -> None:
    pattern, inputs = PATTERNS[name], operands(40, 50, kv_heads=kv_heads)
    found = attention(*inputs, pattern, scale=0.3, by=by)
    right = expected(*inputs, pattern.to_dense(40, 50))
    torch.testing.assert_close(found, right)
    weight = torch.linspace(-1, 1, found.numel(), dtype=found.dtype).view_as(found)
    for one, other in zip(*(torch.autograd.grad(out, inputs, weight) for out in (found, right)), strict=True):
        torch.testing.assert_close(one, other)


def test_lists_of_pairs_are_made_once() -> None:
    pattern, inputs = RandomKeys(3, seed=5), operands(30, 30)
    attention(*inputs, pattern, by="elements")
    kept = pattern.kept_elements(30, 30, inputs[0].device)
    attention(*inputs, pattern, by="elements")
    assert pattern.kept_elements(30, 30, inputs[0].device) is kept


@pytest.mark.slow(reason="compiles")
@pytest.mark.parametrize("by", WAYS)
def test_compiled_in_one_graph(by: str) -> None:
    pattern, inputs = LocalWindow(6, 2), operands(40, 40, dtype=torch.float32)
    compiled = torch.compile(lambda *of: attention(*of, pattern, by=by), backend="aot_eager", fullgraph=True)
    right = expected(*(one.double() for one in inputs), pattern.to_dense(40))
    found = torch.compile(lambda *of: attention(*of, pattern, scale=0.3, by=by), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(found(*inputs).double(), right, atol=2e-6, rtol=1e-5)
    assert compiled(*inputs).shape == right.shape


@pytest.mark.slow(reason="compiles")
def test_a_compiled_function_knows_the_way() -> None:
    """As on a GPU, where `attention` asks for it."""
    pattern = LocalWindow(6, 2) | RandomKeys(3)

    def step(x: Tensor) -> Tensor:
        work = (1, 2, 2, len(range(x.shape[2])), 40, 16, 16, x.dtype, x.device, x.requires_grad, True)
        return x + (1 if pattern.way((32, 32), *work) == "blocks" else 2)

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    for length in (40, 48, 56):  # of the third on sizes are dynamic
        x = torch.zeros(1, 2, length, 16)
        assert compiled(x).eq(1).all()


def test_what_is_no_way_is_refused() -> None:
    inputs = operands(20, 20)
    for by, given in (("sparse", {}), ("dense", {"softcap": 1.0}), ("dense", {"alibi": torch.zeros(2)})):
        with pytest.raises(ConfigError, match="by is"):
            attention(*inputs, LocalWindow(3, 0), by=by, **given)
    with pytest.raises(PatternError, match="no pattern"):
        attention_choice(*inputs, torch.ones(20, 20))  # pyright: ignore[reportArgumentType]


def test_off_a_gpu_it_is_blocks() -> None:
    choice = attention_choice(*operands(20, 20), LocalWindow(3, 0))
    assert choice.by == "blocks" and not choice.seconds and str(choice).startswith("blocks: no estimate")


@pytest.mark.parametrize("empty", ["batch", "q_len", "k_len", "v_depth"])
def test_what_is_empty_is_not_estimated(empty: str) -> None:
    work = AttentionWork(1, 2, 2, 40, 40, 16, 16, torch.float32, torch.device("cuda"), False, True)
    work = work._replace(**{empty: 0})
    choice = chosen_way(work, LocalWindow(3, 0).to_blocks(work.q_len, work.k_len))
    assert choice.by == "blocks" and not choice.seconds


SCATTERED = FromTensor(torch.rand(4096, 4096, generator=torch.Generator().manual_seed(0)) < 0.002)


@needs_triton
@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("name", "pattern", "length", "plain", "by"),
    [("window", LocalWindow(256, 0), 4096, True, "blocks"), ("big bird", big_bird(64), 4096, True, "blocks"),
     ("scattered", SCATTERED, 4096, True, "elements"), ("capped", SCATTERED, 4096, False, "elements"),
     ("short", LocalWindow(60, 0), 64, True, "dense")],
)  # fmt: skip
def test_the_estimates_of_an_h100_choose(
    name: str, pattern: AttentionPattern, length: int, plain: bool, by: str
) -> None:
    from sparsecomp.attention.choice import compared_ways
    from sparsecomp.lowering.tuning.ceilings import target_named

    blocks = pattern.to_blocks(length)
    for trained in (False, True):
        sizes = (4, 16, 16, length, length, 64, 64)
        work = AttentionWork(*sizes, torch.bfloat16, torch.device("cuda"), trained, plain)
        choice = compared_ways(work, blocks, *target_named("h100"))
        sparse = min(choice.seconds["blocks"], choice.seconds["elements"])
        assert choice.by == by and choice.seconds[by] <= sparse, str(choice)
        assert ("dense" in choice.seconds) == plain
        assert "of blocks empty" in str(choice) and f"us by {by}" in choice.reason


@needs_triton
def test_more_heads_than_a_grid_has_are_not_taken_by_single_pairs() -> None:
    from sparsecomp.attention.choice import compared_ways
    from sparsecomp.lowering.attention.element_attention import elements_problem
    from sparsecomp.lowering.tuning.ceilings import target_named
    from sparsecomp.reference.attention.scores import Scores

    pattern = LocalWindow(3, 0)
    for batch, taken in ((2**12 - 1, True), (2**12, False)):
        work = AttentionWork(batch, 16, 16, 32, 32, 16, 16, torch.float16, torch.device("cuda"), True, True)
        choice = compared_ways(work, pattern.to_blocks(32), *target_named("h100"))
        assert ("elements" in choice.seconds) == taken
    q, lists = torch.empty(1, 1, 32, 16).expand(batch, 16, 32, 16), pattern.kept_elements(32, 32, torch.device("cpu"))
    with pytest.raises(FormatError, match="by parts of the batch"):
        elements_problem(q, q, q, lists[2:], Scores(1.0), ())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("by", (*WAYS, "auto"))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_ways_on_a_gpu(by: str, dtype: torch.dtype) -> None:
    pattern = (RandomKeys(40, seed=0) | LocalWindow(20, 0)) & ~LocalWindow(0, 0)
    inputs = [torch.randn(2, 4, 700, 64, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3)]
    doubles = [one.detach().double().requires_grad_() for one in inputs]
    found = attention(*inputs, pattern, scale=0.3, by=by)
    right = expected(*doubles, pattern.to_dense(700, device="cuda"))
    grads = (torch.autograd.grad(out.double().square().sum(), of) for out, of in ((found, inputs), (right, doubles)))
    bound = {torch.float32: 2e-5, torch.bfloat16: 3e-2}[dtype]
    for one, other in zip((found, *next(grads)), (right, *next(grads)), strict=True):
        assert float((one.double() - other).norm() / other.norm()) < bound
    assert attention_choice(*inputs, pattern).by in WAYS


@needs_triton
@pytest.mark.parametrize("wide", [False, True])
def test_blocks_and_parts_are_chosen_once_and_are_constants_of_a_graph(
    wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a card: within a compiled function, too, without a break."""
    from sparsecomp.attention import functional
    from sparsecomp.attention import pattern as patterns

    asked = []

    def of_faster_block(blocks: AttentionBlocks, make: Callable[[], AttentionBlocks], *how: object) -> AttentionBlocks:
        asked.append(how)
        return make() if wide else blocks

    monkeypatch.setattr(functional, "has_kernels", lambda *operands: True)
    monkeypatch.setattr(patterns, "of_faster_block", of_faster_block)
    monkeypatch.setattr(patterns, "chosen_way", lambda *work: AttentionChoice("blocks", {}, "", 3))
    pattern, x = LocalWindow(5, 0) | LocalWindow(0, 2), torch.randn(1, 2, 70, 16)
    seen = []

    def backend(gm: torch.fx.GraphModule, inputs: object) -> object:
        (call,) = [node for node in gm.graph.nodes if "block_attention" in str(node.target)]
        seen.append(call.args[-1])
        return gm

    def attend(x: Tensor) -> Tensor:
        return functional.attention(x, x, x, pattern, by="blocks")

    compiled = torch.compile(attend, backend=backend, fullgraph=True)
    right = F.scaled_dot_product_attention(x, x, x, pattern.to_dense(70))
    for call in (compiled, attend, attend):
        torch.testing.assert_close(call(x), right, rtol=1e-4, atol=1e-5)
    assert seen == [3] and asked == [(16, torch.float32, False)]
    assert any(name.startswith(f"_kept_70_70_{128 if wide else 64}_") for name in vars(pattern))
