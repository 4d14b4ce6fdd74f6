"""Attention over a cache by a mask beside torch's own in float64: on a CPU, and its kernels."""

import pytest
import torch
import torch.nn.functional as F
from candidates import check_candidates, place
from compile_kernel import compile_in_subprocess
from kernel_devices import DEVICES, KERNEL_DEVICES, graph_of
from torch import Tensor

from sparsecomp.attention import masked_decode_attention
from sparsecomp.errors import FormatError
from sparsecomp.lowering.cache.signature import device_of
from sparsecomp.ops.attention.masked_decode import kept_range
from sparsecomp.reference.attention.decode_attention import Sight
from sparsecomp.reference.attention.scores import Scores

pytestmark = pytest.mark.quick_cases(2)

TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def window(batch: int, heads: int, rows: int, capacity: int) -> Tensor:
    """Of each sequence another, the last of which begins before the cache."""
    key, row = torch.arange(capacity), torch.arange(rows)[:, None]
    end = torch.linspace(capacity - rows, 5, batch).long()[:, None, None, None] + row
    return (key <= end) & (key > end - capacity // 3)


def scattered(batch: int, heads: int, rows: int, capacity: int) -> Tensor:
    """By head, with keys left out between, and nothing for a query and for the last sequence."""
    mask = torch.rand(batch, heads, rows, capacity, generator=torch.Generator().manual_seed(3)) < 0.3
    mask[..., : capacity // 4], mask[..., capacity // 2 :] = False, False
    mask[0, 0, -1], mask[-1] = False, False
    return mask


def one_for_all(batch: int, heads: int, rows: int, capacity: int) -> Tensor:
    return (torch.arange(capacity) < capacity // 2)[None, None, None]


def by_query(batch: int, heads: int, rows: int, capacity: int) -> Tensor:
    return (torch.arange(rows) % 2 == 0)[None, None, :, None]


MASKS = {one.__name__: one for one in (window, scattered, one_for_all, by_query)}
SIZES = [(3, 4, 2, 1, 128, 16, 16), (2, 6, 2, 3, 200, 40, 16), (2, 16, 1, 5, 70, 16, 16)]
"""Batch, heads, heads of keys, rows, capacity, depth, depth of values."""


def operands(sizes: tuple[int, ...], name: str, dtype: torch.dtype, device: str) -> list[Tensor]:
    """q, k, v and the mask; keys and values outside of what is read are NaN."""
    batch, heads, kv_heads, rows, capacity, depth, v_depth = sizes
    random = torch.Generator().manual_seed(capacity)
    shapes = ((batch, rows, heads, depth), (batch, capacity, kv_heads, depth), (batch, capacity, kv_heads, v_depth))
    q, k, v = (torch.randn(shape, generator=random, dtype=torch.float64).transpose(1, 2) for shape in shapes)
    mask = MASKS[name](batch, heads, rows, capacity)
    some = mask.any(1).any(1).expand(batch, capacity)
    read = some.cumsum(1).bool() & some.flip(1).cumsum(1).flip(1).bool()
    k, v = (one.masked_fill(~read[:, None, :, None], torch.nan) for one in (k, v))
    return [*(one.to(device, dtype) for one in (q, k, v)), mask.to(device)]


def expected(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None = None, cap: float = 0.0) -> Tensor:
    """By hand in float64, since torch's function has no cap."""
    group = q.shape[1] // k.shape[1]
    q, k, v = (one.double().nan_to_num() for one in (q, k, v))
    k, v = (one.repeat_interleave(group, 1) for one in (k, v))
    if not cap:
        return F.scaled_dot_product_attention(q, k, v, mask.expand(*q.shape[:3], k.shape[2]), scale=scale)
    score = cap * torch.tanh(q @ k.mT * (q.shape[3] ** -0.5 if scale is None else scale) / cap)
    return score.masked_fill(~mask, -torch.inf).softmax(-1).nan_to_num() @ v


def assert_near(found: Tensor, right: Tensor) -> None:
    assert found.isfinite().all()
    assert torch.linalg.vector_norm(found - right) <= TOLERANCE[found.dtype] * torch.linalg.vector_norm(right)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("sizes", SIZES)
def test_it_is_attention_over_what_the_mask_keeps(sizes: tuple[int, ...], name: str, device: str) -> None:
    for dtype in TOLERANCE:
        q, k, v, mask = operands(sizes, name, dtype, device)
        for how in ({}, {"scale": 0.3}, {"softcap": 2.0, "width": 20}):
            out, sums = masked_decode_attention(q, k, v, mask, **how)
            right = expected(q, k, v, mask, how.get("scale"), how.get("softcap", 0.0))
            assert out.dtype is dtype and out.is_contiguous()
            assert_near(out, right)
            assert torch.equal(sums == -torch.inf, ~mask.expand(*q.shape[:3], k.shape[2]).any(-1))


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_kernels_beside_float64(dtype: torch.dtype, sizes: tuple[int, ...], name: str, device: str) -> None:
    from sparsecomp.lowering.attention import decode_attention as lowered

    where = torch.device(device, 0) if device == "cuda" else torch.device("cpu")
    q, k, v, mask = operands(sizes, name, dtype, device)
    right = expected(q, k, v, mask)
    ranges = kept_range(mask.expand(-1, -1, -1, k.shape[2]), len(q))
    problem = lowered.problem_of(q, k, v, None, Sight(-1, 0), Scores(q.shape[3] ** -0.5), mask)
    candidates = lowered.DECODE_ATTENTION.candidates(problem, device_of(where))
    for candidate in candidates[:: -(-len(candidates) // 3)]:
        out = torch.full((*q.shape[:3], v.shape[3]), torch.nan, dtype=dtype, device=device)
        sums = torch.full(q.shape[:3], torch.nan, device=device)
        launch = candidate.template.prepare(problem, candidate.config)
        launch(q, k, v, ranges, None, None, mask.view(torch.uint8), out, sums)
        assert_near(out, right)
        assert torch.equal(sums == -torch.inf, ~mask.expand(*q.shape[:3], k.shape[2]).any(-1))


def numbers(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Slopes along the keys, -inf where a query does not see one."""
    slope = torch.arange(mask.shape[3], device=mask.device) % 9 * 0.25
    return torch.where(mask, slope, -torch.inf).to(dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MASKS)
def test_numbers_that_are_added(name: str, device: str) -> None:
    for dtype in TOLERANCE:
        q, k, v, mask = operands(SIZES[1], name, dtype, device)
        added = numbers(mask, dtype)
        out, _ = masked_decode_attention(q, k, v, added)
        right = expected(q, k, v, added.double())
        assert_near(out, right.nan_to_num())


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("name", ["scattered", "window"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_that_add_numbers_beside_float64(dtype: torch.dtype, name: str, device: str) -> None:
    from sparsecomp.lowering.attention.decode_attention import decode_attention

    q, k, v, mask = operands(SIZES[0], name, dtype, device)
    added = numbers(mask, torch.float32)
    out, sums = torch.full_like(q, torch.nan).contiguous(), torch.full(q.shape[:3], torch.nan, device=device)
    ranges, scores = kept_range(mask, len(q)), Scores(q.shape[3] ** -0.5)
    decode_attention(q, k, v, ranges, None, Sight(-1, 0), scores, out, sums, added)
    assert_near(out, expected(q, k, v, added.double()).nan_to_num())
    assert torch.equal(sums == -torch.inf, ~mask.expand(*q.shape[:3], k.shape[2]).any(-1))


def test_numbers_beside_which_nothing_is_left_of_scores() -> None:
    """A query of which all numbers are the least weighs alike what has the greatest of them, and -inf is never seen."""
    least = torch.finfo(torch.float32).min
    low = -torch.inf
    added = torch.tensor([[0.5, least, low], [least, low, least], [low] * 3, [-1e30, least, least]])
    seen, alike = torch.ops.sparsecomp.seen_numbers.default(added[None, None])
    assert seen[0, 0].tolist() == [[0.5, low, low], [0, low, 0], [low] * 3, [0, low, low]]
    assert alike[0, 0, :, 0].tolist() == [False, True, False, True]


def test_ranges() -> None:
    mask = torch.zeros(3, 2, 2, 10, dtype=torch.bool)
    mask[0, 1, 0, 4], mask[0, 0, 1, 7], mask[2, :, :, 9] = True, True, True
    assert kept_range(mask, 3).tolist() == [[4, 8], [0, 0], [9, 10]]
    assert kept_range(mask[:1], 2).tolist() == [[4, 8]] * 2
    assert kept_range(mask[..., :0], 3).tolist() == [[0, 0]] * 3


def test_what_is_no_mask_is_refused() -> None:
    q, k, v, mask = operands(SIZES[1], "scattered", torch.float32, "cpu")
    for given, how, why in [
        ((q, k, v, mask.int()), {}, "torch.bool"),
        ((q, k, v, mask[0]), {}, "kept is"),
        ((q, k, v, mask[..., :7]), {}, "kept is"),
        ((q, k, v, mask[:, :3]), {}, "kept is"),
        ((q[0], k, v, mask), {}, "kept is"),
        ((q, k.double(), v, mask), {}, "one floating dtype"),
        ((q, k, v[:, :1], mask), {}, "heads and length"),
        ((q.expand(2, 6, 3, 40).repeat(1, 1, 3, 1), k, v, mask[:, :, :1]), {}, "1 to 8"),
        ((q, k, v, mask), {"scale": float("inf")}, "scale is inf"),
        ((q, k, v, mask), {"softcap": -1.0}, "softcap is -1"),
        ((q, k, v, mask), {"width": -2}, "width is -2"),
        ((q.clone().requires_grad_(), k, v, mask), {}, "no gradients"),
        ((q, k.to("meta"), v.to("meta"), mask), {}, "several devices"),
    ]:  # fmt: skip
        with pytest.raises(FormatError, match=why):
            masked_decode_attention(*given, **how)


def test_the_registered_operators() -> None:
    q, k, v, mask = operands(SIZES[0], "scattered", torch.float64, "cpu")
    torch.library.opcheck(torch.ops.sparsecomp.kept_range.default, (mask, 3))
    for one in (mask, numbers(mask, torch.float64)):
        given = (q, k.nan_to_num(), v.nan_to_num(), one, kept_range(mask, 3), -1, 0.3, 0.0)
        torch.library.opcheck(torch.ops.sparsecomp.masked_decode.default, given)
    torch.library.opcheck(torch.ops.sparsecomp.seen_numbers.default, (numbers(mask, torch.float32),))


@pytest.mark.slow(reason="compiles the kernel for two targets")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile_and_fit_in_shared_memory(capability: int, dtype: str) -> None:
    printed = compile_in_subprocess(
        f"""
        from sparsecomp.lowering.attention.decode_attention import DECODE_ATTENTION
        from sparsecomp.lowering.attention.kernels.decode_attention import decode_parts_kernel, shared_of_parts
        from sparsecomp.lowering.cache.signature import Device, KernelSignature
        device = Device("card", "{capability / 10}", "3.6.0")
        own = dict(lengths_ptr="*i32", table_ptr="*i32", alibi_ptr="*fp32", kept_ptr="*u8", out_ptr="*fp32",
                   logsumexp_ptr="*fp32", scale="fp32", cap="fp32")
        short = {{"bfloat16": "bf16", "float32": "fp32"}}["{dtype}"]
        for depth, rows, masked, added in ((128, 1, 1, 0), (64, 8, 2, 0), (128, 1, 1, 1), (64, 8, 2, 1)):
            own["kept_ptr"] = "*fp32" if added else "*u8"
            given = dict(group=4, rows=rows, page=0, depth=depth, v_depth=depth, capped=0, biased=0, masked=1)
            given |= dict(added=1) if added else dict()
            problem = DECODE_ATTENTION.representative(KernelSignature(
                "", device, dtypes=("{dtype}",), sizes=(("batch", 4), ("kv_heads", 2), ("seen", 4096)),
                parameters=tuple(given.items())))
            problem = problem._replace(kept=(0, 1, 1, 1) if masked == 2 else problem.kept)
            candidates = [one for one in DECODE_ATTENTION.candidates(problem, device)
                          if one.config["parts"] == 4 and one.config["stages"] > 1]
            most = max(candidates, key=lambda one: shared_of_parts(problem, one.config))
            launch, _ = most.template.prepare(problem, most.config).steps[0]
            fixed = {{**dict(launch.named), "MASKED": masked}}
            options = {{name: fixed.pop(name) for name in ("num_warps", "num_stages") if name in fixed}}
            names = launch.kernel.arg_names
            types = {{n: own.get(n, "*" + short if n.endswith("_ptr") else "i32") for n in names}}
            rows_of = [n for n in names if n.endswith(("_row", "_head", "_batch"))]
            built = build(launch.kernel, types, fixed, {capability}, whole=rows_of, **options)
            print(built.metadata.shared <= shared_of_parts(problem, most.config), most.config,
                  built.metadata.shared, shared_of_parts(problem, most.config))
            print("tensor cores:", "mma.sync" in built.asm["ptx"] or "wgmma" in built.asm["ptx"])
        """
    )
    assert printed.count("tensor cores: True") == 4 and "False" not in printed, printed


@pytest.mark.slow(reason="holds several configurations against float64")
@pytest.mark.parametrize("device", KERNEL_DEVICES)
def test_the_tuner_can_check_candidates(device: str) -> None:
    from sparsecomp.lowering.attention import decode_attention as lowered

    q, k, v, mask = operands(SIZES[0], "window", torch.float32, device)
    operation = lowered.DECODE_ATTENTION
    given = lowered.problem_of(q, k, v, None, Sight(30, 0), Scores(0.25), mask)
    for one in (given, given._replace(added="bfloat16")):
        problem = operation.representative(operation.signature(one, device_of(place(device))))
        assert problem.kept and problem.added == one.added
        check_candidates(operation, problem, device, 4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
class TestOnAGpu:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    @pytest.mark.parametrize("name", MASKS)
    @pytest.mark.parametrize("sizes", [(4, 32, 8, 1, 4096, 128, 128), (2, 16, 16, 4, 3000, 64, 64)])
    def test_the_operator(self, sizes: tuple[int, ...], name: str, dtype: torch.dtype) -> None:
        q, k, v, mask = operands(sizes, name, dtype, "cuda")
        assert_near(masked_decode_attention(q, k, v, mask)[0], expected(q, k, v, mask))

    def test_a_captured_call_follows_the_mask(self) -> None:
        q, k, v, mask = operands((2, 8, 2, 1, 1024, 64, 64), "one_for_all", torch.bfloat16, "cuda")
        k, v = k.nan_to_num(), v.nan_to_num()
        graph, (out, _) = graph_of(lambda: masked_decode_attention(q, k, v, mask))
        for start in (0, 700):
            mask.zero_()
            mask[..., start : start + 100] = True
            graph.replay()
            assert_near(out, expected(q, k, v, mask))
