"""Attention over a cache beside torch's by the mask of what a query sees, in float64: on a CPU, and its kernels."""

from typing import Any

import pytest
import torch
from candidates import check_candidates, place
from compile_kernel import compile_in_subprocess
from kernel_devices import DEVICES, KERNEL_DEVICES, graph_of, needs_triton
from torch import Tensor

from sparsecomp.attention import LocalWindow, decode_attention
from sparsecomp.errors import FormatError
from sparsecomp.lowering.cache.signature import Device, device_of
from sparsecomp.reference.attention.decode_attention import Sight
from sparsecomp.reference.attention.scores import Scores

pytestmark = pytest.mark.quick_cases(1)

TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def cache(
    batch: int, heads: int, kv_heads: int, rows: int, capacity: int, depth: int, v_depth: int, lengths: list[int],
    dtype: torch.dtype = torch.float64, device: str = "cpu",
) -> list[Tensor]:  # fmt: skip
    """q, k, v and lengths; what lies behind a sequence's end is NaN."""
    random = torch.Generator().manual_seed(capacity + depth)
    shapes = ((batch, rows, heads, depth), (batch, capacity, kv_heads, depth), (batch, capacity, kv_heads, v_depth))
    q, k, v = (torch.randn(shape, generator=random, dtype=torch.float64).transpose(1, 2) for shape in shapes)
    for one in (k, v):
        for sequence, length in enumerate(lengths):
            one[sequence, :, length:] = torch.nan
    return [*(one.to(device, dtype) for one in (q, k, v)), torch.tensor(lengths, dtype=torch.int32, device=device)]


def paged(k: Tensor, v: Tensor, page: int) -> tuple[Tensor, Tensor, Tensor]:
    """The cache as pages in disorder, and where they are."""
    batch, each = len(k), k.shape[2] // page
    order = torch.randperm(batch * each, generator=torch.Generator().manual_seed(1)).to(k.device)
    pools = []
    for one in (k, v):
        pages = one.unflatten(2, (each, page)).transpose(1, 2).flatten(0, 1)
        # as caches lie: (pages, page, heads, depth)
        pools.append(pages[torch.argsort(order)].transpose(1, 2).contiguous().transpose(1, 2))
    return pools[0], pools[1], order.view(batch, each).int()


def expected(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, window: int | None = None, sinks: int = 0,
    scale: float | None = None, softcap: float = 0.0, alibi: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Sequence by sequence over nothing but its own keys, by the mask of a pattern, in float64."""
    rows, group = q.shape[2], q.shape[1] // k.shape[1]
    outs, sums = [], []
    for sequence, length in enumerate(lengths.tolist()):
        one, keys, values = (x[sequence].double() for x in (q, k[:, :, :length], v[:, :, :length]))
        keys, values = (x.repeat_interleave(group, 0) for x in (keys, values))
        square = LocalWindow(window, 0).to_dense(length, device=q.device)[0, 0]
        mask = torch.cat((square.new_zeros(max(rows - length, 0), length), square[-rows:]))
        position = torch.arange(length - rows, length, device=q.device)[:, None]
        key = torch.arange(length, device=q.device)
        mask = mask | ((key < sinks) & (key <= position))
        score = one @ keys.mT * (q.shape[3] ** -0.5 if scale is None else scale)
        score = softcap * torch.tanh(score / softcap) if softcap else score
        if alibi is not None:
            score = score + alibi.double()[:, None, None] * (key - position)
        score = score.masked_fill(~mask, -torch.inf)
        outs.append(torch.softmax(score, -1).nan_to_num(0.0) @ values)
        sums.append(score.logsumexp(-1) if length else score.new_full(score.shape[:2], -torch.inf))
    return torch.stack(outs), torch.stack(sums)


CASES: list[tuple[tuple[int, ...], list[int], dict[str, Any]]] = [
    # batch, heads, heads of k, rows, capacity, depth, depth of v; lengths; how
    ((3, 4, 2, 1, 128, 16, 16), [128, 70, 1], {}),
    ((3, 4, 2, 1, 256, 16, 24), [250, 70, 3], {"window": 40}),
    ((2, 6, 2, 3, 192, 40, 16), [191, 100], {"window": 33, "sinks": 5, "scale": -0.3}),
    ((2, 2, 2, 8, 128, 16, 16), [128, 12], {"window": 0, "sinks": 70}),
    ((2, 8, 1, 2, 128, 32, 32), [128, 65], {"softcap": 2.0, "biased": True, "window": 64}),
    ((4, 2, 1, 4, 64, 16, 16), [64, 0, 2, 31], {"sinks": 1}),
    ((1, 16, 1, 5, 64, 16, 16), [50], {"window": 30}),  # more queries than a tile holds
]


def settings(how: dict[str, Any], heads: int, device: str) -> dict[str, Any]:
    given = dict(how)
    if given.pop("biased", False):
        given["alibi"] = -torch.arange(1, heads + 1, device=device) * 0.02
    return given


def assert_near(found: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor], dtype: torch.dtype) -> None:
    for one, other in zip(found, right, strict=True):
        assert torch.equal(one.isfinite(), other.isfinite())
        one, other = (x.double().masked_fill(~x.isfinite(), 0) for x in (one, other))
        assert torch.linalg.vector_norm(one - other) <= TOLERANCE[dtype] * torch.linalg.vector_norm(other)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("page", [0, 16])
@pytest.mark.parametrize(("sizes", "lengths", "how"), CASES, ids=str)
def test_it_is_attention_over_what_a_query_sees(sizes, lengths, how, page, device):
    for dtype in TOLERANCE:
        q, k, v, length = cache(*sizes, lengths, dtype, device)
        given = settings(how, sizes[1], device)
        right = expected(q, k, v, length, **given)
        k, v, table = paged(k, v, page) if page else (k, v, None)
        out, logsumexp = decode_attention(q, k, v, length, table=table, **given)
        assert out.dtype is dtype and out.is_contiguous()
        assert_near((out, logsumexp), right, dtype)


@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("page", [0, 8, 64])
@pytest.mark.parametrize(("sizes", "lengths", "how"), CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_kernels_beside_float64(dtype, sizes, lengths, how, page, device):
    """Each of some configurations: one part and several, of which some are empty, a page in a tile and tiles in one."""
    from sparsecomp.lowering.attention import decode_attention as lowered

    where = torch.device(device, 0) if device == "cuda" else torch.device("cpu")
    q, k, v, length = cache(*sizes, lengths, dtype, device)
    given = settings(how, sizes[1], device)
    right = expected(q, k, v, length, **given)
    k, v, table = paged(k, v, page) if page else (k, v, None)
    sight = Sight(-1 if how.get("window") is None else how["window"], how.get("sinks", 0))
    scores = Scores(how.get("scale", sizes[5] ** -0.5), how.get("softcap", 0.0), given.get("alibi"))
    problem = lowered.problem_of(q, k, v, table, sight, scores)
    candidates = lowered.DECODE_ATTENTION.candidates(problem, device_of(where))
    assert candidates
    for candidate in candidates[:: -(-len(candidates) // 3)]:
        out = torch.full((*q.shape[:3], sizes[6]), torch.nan, dtype=dtype, device=device)
        logsumexp = torch.full(q.shape[:3], torch.nan, device=device)
        launch = candidate.template.prepare(problem, candidate.config)
        launch(q, k, v, length, table, given.get("alibi"), None, out, logsumexp)
        assert_near((out, logsumexp), right, dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_pages_and_lengths_that_are_none(dtype, device):
    """What leaves the window may lose its page; what is seen may not. A GPU only knows when it reads."""
    q, k, v, lengths = cache(4, 2, 1, 2, 128, 16, 16, [128, 100, 90, 33], dtype, device)
    right, _ = expected(q, k, v, lengths, window=30, sinks=1)
    k, v, table = paged(k, v, 16)
    table[:, 1:3] = torch.tensor([-7, 10**9], dtype=torch.int32)
    table[0, 7], table[1, 6], table[3, 1] = -1, len(k), table[3, 1].clamp(0, 3)
    table[3, 1:3] = table[2, 6]
    for given, wrong in ((lengths, (0, 1)), (torch.tensor([-1, 129, 90, 0], dtype=torch.int32), (0, 1))):
        out, logsumexp = decode_attention(q, k, v, given.to(device), table=table, window=30, sinks=1)
        assert out[list(wrong)].isnan().all() and logsumexp[list(wrong)].isnan().all()
        torch.testing.assert_close(out[2].double(), right[2], rtol=1e-5, atol=1e-5)
    assert not out[3].any() and logsumexp[3].eq(-torch.inf).all()


def test_what_is_no_cache_is_refused():
    q, k, v, lengths = cache(2, 4, 2, 1, 64, 16, 16, [64, 3])
    table = torch.zeros(2, 2, dtype=torch.int32)
    for given, how, why in [
        ((q[0], k, v, lengths), {}, "four dimensions"),
        ((q, k.float(), v, lengths), {}, "one floating dtype"),
        ((q, k, v[:, :1], lengths), {}, "heads and length"),
        ((q[:1], k, v, lengths[:1]), {}, "one batch"),
        ((q[:, :3], k, v, lengths), {}, "must divide"),
        ((q.expand(2, 4, 9, 16), k, v, lengths), {}, "1 to 8"),
        ((q, k, v, lengths.long()), {}, "int32"),
        ((q, k, v, lengths), {"table": table.long()}, "int32"),
        ((q, k, v, lengths), {"window": -1}, "window is -1"),
        ((q, k, v, lengths), {"sinks": -1}, "sinks is -1"),
        ((q, k, v, lengths), {"scale": float("nan")}, "scale is nan"),
        ((q, k, v, lengths), {"softcap": -1.0}, "softcap is -1"),
        ((q, k, v, lengths), {"alibi": torch.zeros(2)}, "alibi is"),
        ((q.clone().requires_grad_(), k, v, lengths), {}, "no gradients"),
        ((q, k, v, lengths.to("meta")), {}, "several devices"),
    ]:  # fmt: skip
        with pytest.raises(FormatError, match=why):
            decode_attention(*given, **how)
    with torch.no_grad():
        decode_attention(q.clone().requires_grad_(), k, v, lengths)


def test_a_cache_without_anything():
    lengths = torch.zeros(2, dtype=torch.int32)
    out, logsumexp = decode_attention(torch.ones(2, 4, 1, 16), *(torch.ones(2, 2, 0, 16),) * 2, lengths)
    assert not out.any() and logsumexp.eq(-torch.inf).all()
    empty = torch.ones(0, 2, 16, 16), torch.ones(0, 2, 16, 16)
    table = torch.zeros(2, 3, dtype=torch.int32)
    assert decode_attention(torch.ones(2, 4, 1, 16), *empty, lengths + 1, table=table)[0].isnan().all()
    assert decode_attention(torch.ones(0, 4, 1, 16), *(torch.ones(0, 2, 8, 16),) * 2, lengths[:0])[0].numel() == 0


def test_the_registered_operator():
    how = {"window": 20, "sinks": 2}
    q, k, v, lengths = cache(2, 4, 2, 1, 64, 16, 16, [64, 60])
    k, v, table = paged(k, v, 16)
    given = (q, k, v, lengths, table, how.get("window", -1), how.get("sinks", 0), 0.3, 0.0, None)
    torch.library.opcheck(torch.ops.sparsecomp.decode_attention.default, given)


@pytest.mark.slow(reason="compiles a model")
def test_compiled_in_one_graph():
    def step(*given: Tensor) -> Tensor:
        return decode_attention(*given, window=20)[0] + 1

    given = cache(2, 4, 2, 1, 64, 16, 16, [64, 30], torch.float32)
    given[1], given[2] = (one.nan_to_num() for one in given[1:3])
    with torch.no_grad():
        found = torch.compile(step, backend="sparsecomp", fullgraph=True)(*given)
        torch.testing.assert_close(found, step(*given))


@pytest.mark.slow(reason="compiles the kernel for two targets")
@pytest.mark.slow_cases(2)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile_and_fit_in_shared_memory(capability, dtype):
    printed = compile_in_subprocess(
        f"""
        from sparsecomp.lowering.attention.decode_attention import DECODE_ATTENTION
        from sparsecomp.lowering.attention.kernels.decode_attention import decode_parts_kernel, merge_parts_kernel
        from sparsecomp.lowering.attention.kernels.decode_attention import shared_of_parts
        from sparsecomp.lowering.cache.signature import Device, KernelSignature
        device = Device("card", "{capability / 10}", "3.6.0")
        own = dict(lengths_ptr="*i32", table_ptr="*i32", alibi_ptr="*fp32", out_ptr="*fp32", logsumexp_ptr="*fp32",
                   parts_ptr="*fp32", sums_ptr="*fp32", scale="fp32", cap="fp32")
        short = {{"bfloat16": "bf16", "float32": "fp32"}}["{dtype}"]
        largest = {256 if dtype == "bfloat16" else 128}
        for depth, rows, page in ((64, 1, 16), (128, 1, 256), (128, 8, 0), (largest, 8, 16)):
            given = dict(group=4, rows=rows, page=page, depth=depth, v_depth=depth, capped=1, biased=1, masked=0)
            problem = DECODE_ATTENTION.representative(KernelSignature(
                "", device, dtypes=("{dtype}",), sizes=(("batch", 4), ("kv_heads", 2), ("seen", 4096)),
                parameters=tuple(given.items())))
            candidates = [one for one in DECODE_ATTENTION.candidates(problem, device)
                          if one.config["parts"] == 4 and one.config["stages"] > 1]
            most = max(candidates, key=lambda one: shared_of_parts(problem, one.config))
            for launch, _ in most.template.prepare(problem, most.config).steps:
                fixed = dict(launch.named)
                options = {{name: fixed.pop(name) for name in ("num_warps", "num_stages") if name in fixed}}
                names = launch.kernel.arg_names
                types = {{n: own.get(n, "*" + short if n.endswith("_ptr") else "i32") for n in names}}
                rows_of = [n for n in names if n.endswith(("_row", "_head", "_batch"))]
                built = build(launch.kernel, types, fixed, {capability}, whole=rows_of, **options)
                print(built.metadata.shared <= shared_of_parts(problem, most.config), most.config,
                      built.metadata.shared, shared_of_parts(problem, most.config))
                if launch.kernel is decode_parts_kernel:
                    print("tensor cores:", "mma.sync" in built.asm["ptx"] or "wgmma" in built.asm["ptx"],
                          "cp.async:", "cp.async" in built.asm["ptx"])
        """
    )
    assert printed.count("tensor cores: True") == 4 and "False" not in printed, printed


@needs_triton
def test_every_depth_has_kernels_on_every_card():
    from sparsecomp.lowering.attention import decode_attention as lowered

    for capability in ("8.0", "8.6", "9.0"):
        for dtype, depth in ((torch.float32, 128), (torch.bfloat16, 256), (torch.float16, 16)):
            q, k = torch.empty(1, 8, 8, depth, dtype=dtype), torch.empty(1, 1, 64, depth, dtype=dtype)
            problem = lowered.problem_of(q, k, k, None, Sight(-1, 0), Scores(1.0))
            assert lowered.DECODE_ATTENTION.candidates(problem, Device("card", capability, "3.6.0"))
            signature = lowered.DECODE_ATTENTION.signature(problem, Device("card", capability, "3.6.0"))
            again = lowered.DECODE_ATTENTION.representative(signature)
            assert lowered.DECODE_ATTENTION.signature(again, Device("card", capability, "3.6.0")).key == signature.key


@pytest.mark.slow(reason="holds several configurations against float64")
@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("page", [0, 16])
def test_the_tuner_can_check_candidates(page, device):
    from sparsecomp.lowering.attention import decode_attention as lowered

    q, k, v, _ = cache(2, 4, 2, 2, 64, 16, 16, [64, 60], torch.float32)
    k, v, table = paged(k, v, page) if page else (k, v, None)
    operation = lowered.DECODE_ATTENTION
    signature = operation.signature(
        lowered.problem_of(q, k, v, table, Sight(30, 0), Scores(0.25)), device_of(place(device))
    )
    check_candidates(operation, operation.representative(signature), device, 4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
class TestOnAGpu:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    @pytest.mark.parametrize("page", [0, 1, 16, 64, 256])
    @pytest.mark.parametrize(
        ("heads", "kv_heads", "rows", "depth", "how"),
        [(32, 8, 1, 128, {"window": 1000}), (16, 16, 4, 64, {"window": 777, "sinks": 4}), (128, 1, 8, 96, {}),
         (8, 2, 1, 80, {"softcap": 30.0, "window": 2000})],
    )  # fmt: skip
    def test_the_operator(self, heads, kv_heads, rows, depth, how, page, dtype):
        lengths = [4096, 3000, 17, 0, 2048]
        q, k, v, length = cache(5, heads, kv_heads, rows, 4096, depth, depth, lengths, dtype, "cuda")
        right = expected(q, k, v, length, **how)
        k, v, table = paged(k, v, page) if page else (k, v, None)
        assert_near(decode_attention(q, k, v, length, table=table, **how), right, dtype)

    def test_a_captured_call_follows_the_lengths(self):
        q, k, v, lengths = cache(2, 8, 2, 1, 1024, 64, 64, [1000, 1000], torch.bfloat16, "cuda")
        graph, (out, _) = graph_of(lambda: decode_attention(q, k, v, lengths, window=100))
        for given in ([400, 7], [1000, 999]):
            lengths.copy_(torch.tensor(given, dtype=torch.int32))
            graph.replay()
            assert torch.equal(out, decode_attention(q, k, v, lengths, window=100)[0])
            right, _ = expected(q, k, v, lengths, window=100)
            assert torch.linalg.vector_norm(out.double() - right) <= 1.6e-2 * torch.linalg.vector_norm(right)

    def test_two_calls_give_the_same_bits(self):
        q, k, v, lengths = cache(2, 8, 2, 1, 4096, 64, 64, [4000, 3000], torch.bfloat16, "cuda")
        assert torch.equal(decode_attention(q, k, v, lengths)[0], decode_attention(q, k, v, lengths)[0])
