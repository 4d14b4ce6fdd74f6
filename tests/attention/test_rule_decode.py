"""Few queries over a static cache are attended by what their mask keeps, and give what eager gives in float64."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from kernel_devices import needs_triton
from rewriting import rewritten, site
from torch import Tensor, nn

import sparsecomp
from sparsecomp.report import Site

pytestmark = pytest.mark.quick_cases(3)

CAPACITY, WINDOW, DEPTH = 64, 10, 16
LOWEST = torch.finfo(torch.float32).min
Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def operands(rows: int = 1, kv_heads: int = 2, heads: int = 4) -> list[Tensor]:
    random = torch.Generator().manual_seed(rows)
    shapes = ((2, heads, rows, DEPTH), *((2, kv_heads, CAPACITY, DEPTH),) * 2)
    return [torch.randn(shape, generator=random) for shape in shapes]


def window(position: Tensor, rows: int = 1) -> Tensor:
    """(batch, 1, rows, keys) of positions (batch,) of the first row."""
    query = position[:, None] + torch.arange(rows)
    key = torch.arange(CAPACITY)
    return ((key <= query[..., None]) & (key > query[..., None] - WINDOW))[:, None]


def repeated(x: Tensor) -> Tensor:
    """As transformers repeats keys and values."""
    batch, heads, length, depth = x.shape
    return x[:, :, None, :, :].expand(batch, heads, 2, length, depth).reshape(batch, heads * 2, length, depth)


def grouped(q: Tensor) -> Tensor:
    """Queries by the head of keys that they share."""
    return q.unflatten(1, (2, 2))


def of_infinities(mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape).masked_fill(~mask, -math.inf)


def slope() -> Tensor:
    return torch.arange(CAPACITY) * 0.1


def by_hand(masked: Callable[[Tensor, Tensor], Tensor]) -> Attend:
    return lambda q, k, v, m: masked((q @ repeated(k).transpose(2, 3)) * 0.25, m).softmax(-1) @ repeated(v)


ATTENDS: dict[str, Attend] = {
    "repeated": lambda q, k, v, m: F.scaled_dot_product_attention(q, repeated(k), repeated(v), m),
    "interleaved": lambda q, k, v, m: F.scaled_dot_product_attention(
        q, k.repeat_interleave(2, 1), v.repeat_interleave(2, dim=1), m, scale=0.4
    ),
    "unsqueezed": lambda q, k, v, m: F.scaled_dot_product_attention(
        q, *(x.unsqueeze(2).expand(-1, -1, 2, -1, -1).contiguous().flatten(1, 2) for x in (k, v)), m
    ),
    "grouped": lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m, enable_gqa=True),
    "infinities": lambda q, k, v, m: F.scaled_dot_product_attention(q, repeated(k), repeated(v), of_infinities(m)),
    "least numbers": lambda q, k, v, m: F.scaled_dot_product_attention(
        q, repeated(k), repeated(v), torch.where(m, torch.tensor(0.0), LOWEST)
    ),
    "other numbers": lambda q, k, v, m: F.scaled_dot_product_attention(
        q, repeated(k), repeated(v), torch.where(m, slope(), -math.inf)
    ),
    "other numbers by hand": by_hand(lambda s, m: s + torch.where(m, slope(), -math.inf)),
    "other numbers and the least": by_hand(lambda s, m: s + torch.where(m, slope(), LOWEST)),
    "a small number": by_hand(lambda s, m: s + torch.where(m, 0.0, -1e9)),
    "filled": by_hand(lambda s, m: s.masked_fill(~m, -math.inf)),
    "filled with the least": by_hand(lambda s, m: s.masked_fill(m.logical_not(), LOWEST)),
    "chosen": by_hand(lambda s, m: torch.where(m, s, -math.inf)),
    "added": by_hand(lambda s, m: s + of_infinities(m)),
    "least numbers added": by_hand(lambda s, m: s + torch.where(m, 0.0, LOWEST)),
    "capped": by_hand(lambda s, m: (torch.tanh(s / 2.0) * 2.0).masked_fill(~m, -math.inf)),
    "einsums": lambda q, k, v, m: torch.einsum(
        "bhqk,bkhd->bhqd",
        torch.einsum("bhqd,bkhd->bhqk", q[:, :2], k.transpose(1, 2)).masked_fill(~m, -math.inf).softmax(-1),
        v.transpose(1, 2),
    ),
    "behind tokens": lambda q, k, v, m: F.scaled_dot_product_attention(
        q, *(x[:, :, :, None, :].expand(-1, -1, -1, 2, -1).reshape(2, CAPACITY, 4, DEPTH).transpose(1, 2)
             for x in (k.transpose(1, 2), v.transpose(1, 2))), m
    ),
    "behind tokens, interleaved": lambda q, k, v, m: F.scaled_dot_product_attention(
        q, *(x.swapaxes(1, 2).repeat_interleave(2, -2).permute(0, 2, 1, 3) for x in (k, v)), m
    ),
    "one for all heads": lambda q, k, v, m: F.scaled_dot_product_attention(q, k[:, 1:], v[:, 1:], m),
    "one for all heads by hand": lambda q, k, v, m: (
        (q @ k[:, :1].mT).masked_fill(~m, -math.inf).softmax(-1) @ v[:, :1]
    ),
    "groups": lambda q, k, v, m: F.scaled_dot_product_attention(
        grouped(q), k[:, :, None], v[:, :, None].expand(-1, -1, 2, -1, -1), m[:, :, None]
    ).flatten(1, 2),
    "groups by hand": lambda q, k, v, m: (
        (grouped(q) @ k.unsqueeze(2).mT * 0.5).masked_fill(~m[:, :, None], -math.inf).softmax(-1) @ v[:, :, None]
    ).reshape(q.shape),
    "einsums of groups": lambda q, k, v, m: torch.einsum(
        "bkgst,btkd->bskgd",
        torch.einsum("bkgsd,bktd->bkgst", grouped(q), k).masked_fill(~m[:, :, None], -math.inf).softmax(-1),
        v.transpose(1, 2),
    ).flatten(2, 3).transpose(1, 2),
    "three dimensions": lambda q, k, v, m: F.scaled_dot_product_attention(
        *(x[:, 0] for x in (q, k, v)), m[:, 0]
    ),
}  # fmt: skip
CACHED = {"repeated", "interleaved", "unsqueezed", "infinities", "least numbers", "filled", "added", "capped",
          "behind tokens", "behind tokens, interleaved"}  # fmt: skip
"""Some whose heads of keys are repeated."""
NANS = {"filled", "chosen", "other numbers by hand", "added", "capped", "einsums", "one for all heads by hand",
        "groups by hand", "einsums of groups"}  # fmt: skip
"""By hand, with -inf."""


OF_NUMBERS = {"other numbers", "other numbers by hand", "other numbers and the least", "a small number"}
"""That are read themselves, and bound no window."""


class Step(nn.Module):
    """A step that decodes: it writes a key and a value at a position, and attends."""

    def __init__(self, attend: Attend, rows: int = 1) -> None:
        super().__init__()
        self.attend, self.rows = attend, rows

    def forward(self, q: Tensor, k: Tensor, v: Tensor, position: Tensor) -> Tensor:
        return self.attend(q, k, v, window(position, self.rows))


def judged(model: Callable[..., Tensor], *inputs: Tensor, **options: object) -> tuple[Tensor, Site, str]:
    """The result of what a model was rewritten to, its site, and the graph."""
    with torch.no_grad():
        found, report = rewritten(model, *inputs, strict=True, **options)
    return found, site(report, "decode_attention"), report.graph_after


def in_doubles(model: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return model(*(one.double() if one.is_floating_point() else one for one in inputs))
    finally:
        torch.set_default_dtype(default)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", ATTENDS)
def test_a_window_at_positions_that_the_device_knows(name: str, rows: int) -> None:
    """Of each sequence another, one within the first window; all found by one graph."""
    model, (q, k, v) = Step(ATTENDS[name], rows), operands(rows)
    found, seen, graph = judged(model, q, k, v, torch.tensor([30, 4]))
    assert seen.rewritten, seen.reason
    most = CAPACITY if name in OF_NUMBERS else WINDOW + rows - 1
    assert (f"at most {WINDOW} of a query" in seen.reason) == (name not in OF_NUMBERS)
    assert f"{most} of {CAPACITY} keys" in seen.reason
    torch.testing.assert_close(found.double(), in_doubles(model, q, k, v, torch.tensor([30, 4])), atol=2e-6, rtol=1e-4)
    if name in CACHED:  # what repeated the heads is gone
        code = "".join(line.split("#")[0] for line in graph.splitlines())
        assert not any(one in code for one in (".repeat_interleave(", ".reshape(", ".flatten(")), graph


@pytest.mark.parametrize("name", ATTENDS)
def test_queries_that_see_nothing_give_what_eager_gives(name: str) -> None:
    """Positions before the cache and behind it: zeros, NaN, or the mean of all values."""
    model, (q, k, v), position = Step(ATTENDS[name], 3), operands(3), torch.tensor([-2, CAPACITY + 8])
    found, seen, _ = judged(model, q, k, v, position)
    assert seen.rewritten, seen.reason
    right = model(q, k, v, position)
    assert right.isnan().any() == (name in NANS)
    torch.testing.assert_close(found, right, equal_nan=True, atol=2e-6, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    model, given = Step(ATTENDS["repeated"]), [one.to(dtype) for one in operands()]
    found, seen, _ = judged(model, *given, torch.tensor([30, 4]))
    assert seen.rewritten and found.dtype is dtype, seen.reason
    right = in_doubles(model, *given, torch.tensor([30, 4]))
    assert torch.linalg.vector_norm(found.double() - right) <= 8e-3 * torch.linalg.vector_norm(right)


def test_a_number_that_is_infinite_in_the_scores_dtype() -> None:
    """The least of float32, in bfloat16: a query that keeps nothing gives NaN."""
    model = Step(by_hand(lambda s, m: torch.where(m, s, LOWEST)))
    given, position = [one.bfloat16() for one in operands()], torch.tensor([-2, 30])
    found, seen, _ = judged(model, *given, position)
    assert seen.rewritten and found[0].isnan().all(), seen.reason
    torch.testing.assert_close(found, model(*given, position), equal_nan=True, atol=2e-2, rtol=2e-2)


WIDTHS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], int | None]] = {
    "of a distance": (lambda key, at: (at[:, None] - key >= 0) & (at[:, None] - key < 7), 7),
    "closed": (lambda key, at: (at[:, None] >= key).logical_and(at[:, None] <= key + 5), 6),
    "times one": (lambda key, at: (key + 3 <= at.view(-1, 1)) * (-key < -at.view(-1, 1) + 12), 9),
    "two windows": (lambda key, at: (key <= at[:, None]) & (key > at[:, None] - 20) & (key > at[:, None] - 4), 4),
    "farther than any": (lambda key, at: (key <= at[:, None]) & (key > at[:, None] - 2**40), 2**40),
    "never": (lambda key, at: (key < at[:, None]) & (key > at[:, None] + 3), 0),
    "causal": (lambda key, at: key <= at[:, None], None),
    "two positions": (lambda key, at: (key <= at[:, None]) & (key > at.flip(0)[:, None] - 8), None),
    "either": (lambda key, at: (key <= at[:, None]) & ((key > at[:, None] - 8) | (key < 2)), None),
    "twice as far": (lambda key, at: (key <= 2 * at[:, None]) & (key > at[:, None] - 8), None),
    "of a step": (lambda key, at: (2 * key <= at[:, None]) & (2 * key > at[:, None] - 8), None),
    "of floats": (lambda key, at: (key <= at[:, None] * 0.5) & (key > at[:, None] * 0.5 - 8), None),
    "given": (lambda key, at: at[:, None] != key, None),
    "of bytes": (lambda key, at: (key <= at[:, None].to(torch.uint8)) & (key > at[:, None] - 8), None),
    "of keys in bytes": (lambda key, at: (key.char() <= at[:, None]) & (key.char() > at[:, None] - 8), None),
}


@pytest.mark.parametrize("name", WIDTHS)
def test_the_width_that_is_proved_is_the_widest_there_is(name: str) -> None:
    """What is not known is read as the mask has it, all the same."""
    masking, width = WIDTHS[name]

    def step(q: Tensor, k: Tensor, v: Tensor, position: Tensor) -> Tensor:
        mask = masking(torch.arange(CAPACITY), position)[:, None, None]
        return F.scaled_dot_product_attention(q, repeated(k), repeated(v), mask)

    position = torch.tensor([30, 33])
    found, seen, _ = judged(step, *operands(), position)
    assert seen.rewritten, seen.reason
    assert (f"at most {width} of a query" in seen.reason) if width is not None else ("at most" not in seen.reason)
    if width is not None and width < CAPACITY:
        assert masking(torch.arange(CAPACITY), position).sum(-1).max() == width
    torch.testing.assert_close(found.double(), in_doubles(step, *operands(), position), atol=2e-6, rtol=1e-4)


def test_a_mask_that_is_given() -> None:
    """With keys left out between, by head, as data has it."""
    mask = torch.rand(2, 4, 1, CAPACITY, generator=torch.Generator().manual_seed(3)) < 0.2
    found, seen, _ = judged(ATTENDS["repeated"], *operands(), mask)
    assert seen.rewritten, seen.reason
    right = in_doubles(ATTENDS["repeated"], *operands(), mask)
    torch.testing.assert_close(found.double(), right, atol=2e-6, rtol=1e-4)


class Layers(nn.Module):
    """Layers that write to caches and read one mask."""

    def __init__(self, change: Callable[[Tensor], object] | None = None) -> None:
        super().__init__()
        self.change = change

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, position: Tensor) -> Tensor:
        for layer in range(2):
            k[:, :, position], v[:, :, position] = q[:, :2] + layer, q[:, 2:] * 2
            q = q + ATTENDS["filled"](q, k, v, mask[:, None])  # a view of each layer's own
            if self.change is not None:
                self.change(mask)
        return q


@pytest.mark.parametrize("change", [None, lambda mask: mask[..., :26].fill_(False)])
def test_layers_share_what_is_found_of_a_mask_unless_it_is_written_to(change: Callable[..., object] | None) -> None:
    model, mask, at = Layers(change), window(torch.tensor([30, 30]))[:, 0], torch.tensor([30])
    found, seen, graph = judged(model, *operands(), mask.clone(), at)
    assert seen.rewritten, seen.reason
    assert graph.count("masked_decode.default(") == 2
    assert graph.count("kept_range.default(") == (1 if change is None else 2)
    torch.testing.assert_close(found, model(*operands(), mask.clone(), at), atol=1e-5, rtol=1e-4)


def written_on_the_way(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = (q @ repeated(k).mT).masked_fill(~mask, -math.inf)
    values = repeated(v)
    values[:, :, 25:] = 0
    return scores.softmax(-1) @ values


def mask_written_on_the_way(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    mask = mask.clone()
    scores = torch.where(mask, q @ repeated(k).mT, -math.inf)
    mask.logical_not_()
    return scores.softmax(-1) @ repeated(v)


def cache_written_after_it_was_repeated(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    keys, values = repeated(k), repeated(v)
    k[:, :, 20:], v[:, :, 20:] = 0, 0
    return F.scaled_dot_product_attention(q, keys, values, mask)


def copies_written_to(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    keys, values = k.repeat_interleave(2, 1), repeated(v)
    keys.mul_(0.5)
    return F.scaled_dot_product_attention(q, keys, values, mask)


def copies_written_to_before_they_are_viewed(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    wide = k[:, :, None].expand(-1, -1, 2, -1, -1).contiguous()
    wide.mul_(0.5)
    return F.scaled_dot_product_attention(q, wide.flatten(1, 2), repeated(v), mask)


def opposite_written_to(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    dropped = ~mask
    dropped[..., :26] = True
    return F.scaled_dot_product_attention(q, repeated(k), repeated(v), ~dropped)


def numbers_written_to(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    numbers = of_infinities(mask)
    numbers[..., 3:9] = 0
    return F.scaled_dot_product_attention(q, repeated(k), repeated(v), numbers.double().float())


def positions_written_to(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    position = torch.tensor([20, 30])
    kept = window(position)
    position += 10
    return F.scaled_dot_product_attention(q, repeated(k), repeated(v), kept & mask)


def a_query_for_many(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (q @ repeated(k).mT).masked_fill(~mask.expand(-1, -1, 3, -1), -math.inf).softmax(-1) @ repeated(v)


STAY: dict[str, tuple[Attend, str]] = {
    "its mask is broader": (a_query_for_many, "broader"),
    "a small number": (by_hand(lambda s, m: s.masked_fill(~m, -1e9)), "no -inf"),
    "shrunk afterwards": (by_hand(lambda s, m: (s * 1e30).masked_fill(~m, -1e30) * 1e-30), "no -inf"),
    "added, then shrunk": (by_hand(lambda s, m: (s * 1e30 + torch.where(m, 0.0, -1e31)) * 1e-30), "no -inf"),
    "dropout": (
        lambda q, k, v, m: F.scaled_dot_product_attention(q, repeated(k), repeated(v), m, 0.5), "drops weights"
    ),
    "the mask is written to": (mask_written_on_the_way, "mask is written to"),
    "a transposed cache": (
        lambda q, k, v, m: F.scaled_dot_product_attention(
            q, k.repeat(1, 2, 1, 1).transpose(2, 3).contiguous().transpose(2, 3), v.repeat(1, 2, 1, 1), m
        ),
        "side by side",
    ),
    "under autocast": (
        torch.autocast("cpu", torch.bfloat16)(by_hand(lambda s, m: s.masked_fill(~m, -math.inf))),
        "not of torch.bfloat16",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STAY)
def test_what_stays(name: str) -> None:
    attend, told = STAY[name]
    mask = window(torch.tensor([30, 4]))
    found, seen, _ = judged(attend, *operands(), mask.clone(), disable=("block_attention",))
    assert not seen.rewritten and told in seen.reason, seen.reason
    if name != "dropout":
        torch.testing.assert_close(found, attend(*operands(), mask.clone()))


@pytest.mark.slow(reason="many models")
@pytest.mark.parametrize(
    "attend",
    [written_on_the_way, cache_written_after_it_was_repeated, copies_written_to, opposite_written_to,
     copies_written_to_before_they_are_viewed, numbers_written_to, positions_written_to],
)  # fmt: skip
def test_what_is_written_to_meanwhile_is_not_read_instead(attend: Attend) -> None:
    mask = window(torch.tensor([30, 24]))
    found, _, _ = judged(attend, *operands(), mask)
    torch.testing.assert_close(found, attend(*operands(), mask), atol=2e-6, rtol=1e-4)


@pytest.mark.parametrize("number", [-math.inf, LOWEST, 0.0, 2.0])
@pytest.mark.parametrize("attend", [ATTENDS["repeated"], by_hand(lambda s, m: s + m)])
def test_numbers_that_are_an_input(attend: Attend, number: float) -> None:
    """Of a mask of four dimensions, as transformers makes it; the first query of the first sequence sees nothing."""
    mask = torch.zeros(2, 1, 3, CAPACITY).masked_fill(~window(torch.tensor([30, 24]), 3), number)
    mask[0, :, 0] = number

    found, seen, _ = judged(attend, *operands(3), mask)
    assert seen.rewritten, seen.reason
    torch.testing.assert_close(found, attend(*operands(3), mask), atol=2e-6, rtol=1e-4, equal_nan=True)


def test_with_gradients_it_stays() -> None:
    q, k, v = operands()
    _, report = rewritten(ATTENDS["repeated"], q.requires_grad_(), k, v, window(torch.tensor([30, 4])), strict=True)
    seen = site(report, "decode_attention")
    assert not seen.rewritten and "gradients" in seen.reason


def test_many_queries_are_another_rules() -> None:
    rows = 9
    q, k, v = operands(rows)
    with torch.no_grad():
        _, report = rewritten(Step(ATTENDS["grouped"], rows), q, k, v, torch.tensor([30, 4]), strict=True)
    assert not [one for one in report.sites if one.rule == "decode_attention"]
    assert site(report, "block_attention").rewritten


def test_without_being_forced_a_cpu_stays() -> None:
    _, seen, _ = judged(Step(ATTENDS["repeated"]), *operands(), torch.tensor([30, 4]), implementation="auto")
    assert not seen.rewritten and seen.why == "GATE" and "no estimate" in seen.reason


@needs_triton
@pytest.mark.slow(reason="judges models of a card's sizes")
@pytest.mark.parametrize(
    ("attend", "far", "density", "found"),
    [
        ("alone", 1024, None, True), ("alone", None, None, False), ("alone", None, 0.1, True),
        ("repeated", None, None, True), ("repeated", 1024, None, True),
    ],
)  # fmt: skip
def test_on_a_card_a_window_and_repeated_heads_decide(
    attend: str, far: int | None, density: float | None, found: bool
) -> None:
    """All of a cache is read, by estimate, unless more is known; a copy of each head's keys is never read."""

    def step(q: Tensor, k: Tensor, v: Tensor, position: Tensor) -> Tensor:
        key = torch.arange(k.shape[2], device=q.device)
        mask = key <= position[:, None]
        mask = mask if far is None else mask & (key > position[:, None] - far)
        k, v = (k, v) if attend == "alone" else (repeated(k), repeated(v))
        return F.scaled_dot_product_attention(q, k, v, mask[:, None, None])

    heads = 8 if attend == "alone" else 4
    given = [torch.zeros(4, n, m, 128, dtype=torch.bfloat16) for n, m in ((8, 1), (heads, 8192), (heads, 8192))]
    with torch.no_grad():
        report = sparsecomp.explain(
            step, *given, torch.zeros(4, dtype=torch.long), device="h100", mode="reduce-overhead", density=density
        )
    seen = site(report, "decode_attention")
    assert seen.rewritten == found, seen.reason
    assert found or ("option density" in seen.reason and "8192 of 8192 keys" in seen.reason)
    if found:
        assert (seen.expected_gain or 0) > 2


@pytest.mark.slow(reason="compiles a model")
def test_the_whole_compiler() -> None:
    model = Layers()
    compiled = torch.compile(model, backend="sparsecomp", options={"implementation": "skip"})
    for at in (30, 31, 60):
        mask, (q, k, v), (_, keys, values) = window(torch.tensor([at, at]))[:, 0], operands(), operands()
        with torch.no_grad():
            found, right = compiled(q, k, v, mask, torch.tensor([at])), model(q, keys, values, mask, torch.tensor([at]))
        torch.testing.assert_close(found, right, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(k, keys)
    assert all(one.rewritten for one in sparsecomp.last_report(compiled).sites if one.rule == "decode_attention")


class Decoder(nn.Module):
    """Layers with static caches in buffers, in the place of a model."""

    def __init__(self, far: int, device: str) -> None:
        super().__init__()
        self.far = far
        random = torch.Generator(device).manual_seed(0)
        for name in ("k_0", "v_0", "k_1", "v_1"):
            cache = torch.randn(2, 2, 2048, 64, generator=random, device=device, dtype=torch.bfloat16)
            self.register_buffer(name, cache)

    def forward(self, q: Tensor, position: Tensor) -> Tensor:
        slot = torch.arange(2048, device=q.device)
        mask = (slot <= position[:, None]) & (slot > position[:, None] - self.far)
        for layer in (0, 1):
            k, v = getattr(self, f"k_{layer}"), getattr(self, f"v_{layer}")
            k.index_copy_(2, position[:1], q[:, :2])
            q = q + F.scaled_dot_product_attention(q, repeated(k), repeated(v), mask[:, None, None])
        return q


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("far", [100, 4000])
def test_on_a_gpu_it_follows_the_position_without_compiling_anew(far: int, mode: str) -> None:
    model, right = Decoder(far, "cuda"), Decoder(far, "cuda")
    compiled = torch.compile(
        model, backend="sparsecomp", fullgraph=True, options={"mode": mode, "implementation": "skip"}
    )
    random = torch.Generator("cuda").manual_seed(1)
    for at in (3, 500, 501, 2047):
        q = torch.randn(2, 4, 1, 64, generator=random, device="cuda", dtype=torch.bfloat16)
        position = torch.tensor([at, at // 2], device="cuda")
        with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=at > 3):
            found, expected = compiled(q, position).clone(), right(q, position)
        assert torch.linalg.vector_norm(found - expected) <= 2e-2 * torch.linalg.vector_norm(expected)
        assert torch.equal(model.k_0, right.k_0)
    sites = [one for one in sparsecomp.last_report(compiled).sites if one.rule == "decode_attention"]
    assert [one.rewritten for one in sites] == [True, True]
