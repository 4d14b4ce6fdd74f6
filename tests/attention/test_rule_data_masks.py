"""Masks that are data are scanned in each call, once for all layers, and dropout is drawn anew in each call."""

import math
from collections.abc import Callable

import attention_models as models
import pytest
import torch
import torch.nn.functional as F
from attention_models import N, Written, heads_of, sdpa
from kernel_devices import needs_triton
from rewriting import rewritten, site
from test_rule_block_attention import Refused, becomes_one, filled_with, judged, stays, tokens
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import sparsecomp
from sparsecomp._compat import FakeTensorMode

LOWEST = torch.finfo(torch.float32).min


def padding() -> Tensor:
    """Two sequences, of which only some tokens are there."""
    return (torch.arange(N) < torch.tensor([[N], [70]]))[:, None, None]


MASKS: dict[str, Callable[[], Tensor]] = {
    "padding": padding,
    "padding of a causal model": lambda: padding() & models.by_tril(N),
    "one for all": lambda: models.by_tril(N),
    "added": lambda: models.of_infinities(N),
    "biases": lambda: torch.randn(2, 1, N, N, generator=torch.Generator().manual_seed(5)),
    "queries without keys": lambda: padding().mT & padding(),
    "queries without keys, by the least number": lambda: torch.zeros(2, 1, N, N).masked_fill(~padding().mT, LOWEST),
}


@pytest.mark.parametrize("name", MASKS)
def test_inputs_of_torchs_function(name: str) -> None:
    """Of queries whose mask is the least number everywhere, what float32 gives is not what float64 does."""
    mask = MASKS[name]()
    model = Refused(F.scaled_dot_product_attention)
    found, seen = judged(model, tokens(), mask)
    assert seen.rewritten and "scanned in each call" in seen.reason, seen.reason
    torch.testing.assert_close(found, model(tokens(), mask), atol=2e-6, rtol=1e-4)


@pytest.mark.parametrize("name", ["filled", "chosen", "einsums", "batches"])
def test_inputs_of_attention_by_hand(name: str) -> None:
    mask = padding() if name != "batches" else padding().expand(2, models.HEADS, N, N).flatten(0, 1)
    with torch.no_grad():
        becomes_one(Written(models.BY_HAND[name]), tokens(), mask)


COMPUTED: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "of the scores": lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, (q @ k.mT) > 0),
    "documents": lambda q, k, v, m: F.scaled_dot_product_attention(
        q, k, v, (ids := (q[:, 0, :, 0].abs() > 2).cumsum(-1))[:, None, :, None] == ids[:, None, None]
    ),
    "a bias of positions": lambda q, k, v, m: F.scaled_dot_product_attention(
        q, k, v, torch.arange(N).float().expand(N, N)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", COMPUTED)
def test_masks_that_are_computed_of_data(name: str) -> None:
    model = Refused(COMPUTED[name])
    found, seen = judged(model, tokens())
    assert seen.rewritten, seen.reason
    torch.testing.assert_close(found, model(tokens()), atol=2e-6, rtol=1e-4)


@pytest.mark.parametrize("attend", [F.scaled_dot_product_attention, filled_with(-math.inf)])
def test_queries_without_keys_give_what_eager_gives(attend: Callable[..., Tensor]) -> None:
    model, mask = Refused(attend), padding().mT & padding()
    with torch.no_grad():
        found, seen = judged(model, tokens(), mask)
    assert seen.rewritten and bool(found.isnan().any()) == (attend is not F.scaled_dot_product_attention)
    torch.testing.assert_close(found, model(tokens(), mask), equal_nan=True, atol=2e-6, rtol=1e-4)


@pytest.mark.parametrize("kv", [1, 2])
@pytest.mark.parametrize("added", [False, True])
def test_gradients_of_queries_without_keys_are_those_of_eager(added: bool, kv: int) -> None:
    """NaN spreads to all values of the head, and to keys if it was added, and nowhere else."""
    random = torch.Generator().manual_seed(0)
    given = [torch.randn(2, n, 40, 8, generator=random, requires_grad=True) for n in (2, kv, kv)]
    mask = torch.rand(2, 2, 40, 40, generator=random) < 0.5
    mask[1, 0, 5] = False
    mask = torch.zeros(mask.shape).masked_fill(~mask, -math.inf) if added else mask

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        if kv == 1:
            k, v = k.expand(-1, 2, -1, -1), v.expand(-1, 2, -1, -1)
        if added:
            return (q @ k.mT + mask).softmax(-1) @ v
        return filled_with(-math.inf)(q, k, v, mask)

    found, seen = judged(attend, *given, mask)
    assert seen.rewritten, seen.reason
    right = attend(*given, mask)
    assert right.isnan().any() and not right.isnan().all()
    pairs = zip((found, *torch.autograd.grad(found.square().sum(), given)),
                (right, *torch.autograd.grad(right.square().sum(), given)), strict=True)  # fmt: skip
    for one, other in pairs:
        torch.testing.assert_close(one, other, equal_nan=True, rtol=1e-4, atol=5e-5)


@pytest.mark.parametrize("low", [-1e9, -1e4, 3e4])
def test_gradients_of_a_query_all_of_whose_numbers_are_large(low: float) -> None:
    """Of 1e9 float32 has no place for the logarithm of a sum, nor eager's scores, which are all equal beside it."""
    random = torch.Generator().manual_seed(0)
    given = [torch.randn(2, 2, 40, 8, generator=random, requires_grad=True) for _ in range(3)]
    mask = torch.zeros(2, 1, 40, 40).masked_fill(torch.rand(2, 1, 40, 40, generator=random) < 0.5, low)
    mask[1, 0, 5] = low

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return (q @ k.mT + mask).softmax(-1) @ v

    found, seen = judged(attend, *given, mask)
    assert seen.rewritten, seen.reason
    exact = given if low == -1e9 else [one.detach().double().requires_grad_() for one in given]
    right = attend(*exact, mask.to(exact[0].dtype))
    pairs = zip((found, *torch.autograd.grad(found.square().sum(), given)),
                (right, *torch.autograd.grad(right.square().sum(), exact)), strict=True)  # fmt: skip
    for one, other in pairs:
        torch.testing.assert_close(one, other.float(), rtol=1e-4, atol=5e-5)


WRITES: dict[str, tuple[Callable[..., Tensor], bool]] = {
    "result": (lambda q, k, v, y: y.mul_(2), True),
    "part of the result": (lambda q, k, v, y: (y[..., 0].zero_(), y)[1], True),
    "returned result": (lambda q, k, v, y: y.transpose(1, 2), True),
    "query": (lambda q, k, v, y: (q.mul_(2), y + q)[1], False),
}


@pytest.mark.parametrize("name", WRITES)
def test_gradients_read_nothing_that_is_written_to(name: str) -> None:
    """As written by hand they read neither the result, nor, where no key has a gradient, the query."""
    random = torch.Generator().manual_seed(0)
    x, k, v = (torch.randn(1, 2, 40, 8, generator=random) for _ in range(3))
    then, rewrites = WRITES[name]

    def attend(x: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        q = x * 2
        return then(q, k, v, filled_with(-math.inf)(q, k, v, mask))

    def gradient(result: Tensor) -> Tensor:
        if name == "returned result":
            result.mul_(3)
        return torch.autograd.grad(result.square().sum(), x)[0]

    x.requires_grad_()
    found, seen = judged(attend, x, k, v, models.by_tril(40))
    assert seen.rewritten == rewrites, seen.reason
    torch.testing.assert_close(gradient(found), gradient(attend(x, k, v, models.by_tril(40))), rtol=1e-4, atol=5e-5)


@pytest.mark.parametrize("rows", [40, 1])
@pytest.mark.parametrize("written", ["function", "in place"])
def test_autocast_rounds_the_least_number_to_infinity(written: str, rows: int) -> None:
    """Where numbers are added in another dtype than theirs: zeros by torch's function, NaN by hand."""
    random = torch.Generator().manual_seed(0)
    q = torch.randn(2, 2, rows, 8, generator=random)
    k, v = (torch.randn(2, 2, 40, 8, generator=random).bfloat16() for _ in range(2))
    mask = torch.rand(2, 1, rows, 40, generator=random) < 0.5
    mask[1, 0, 0] = False

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        added = torch.zeros(mask.shape).masked_fill(~mask, LOWEST)
        if written == "function":
            return F.scaled_dot_product_attention(q, k, v, added)
        scores = q @ k.mT
        scores += added
        return scores.softmax(-1).to(v.dtype) @ v

    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found, report = rewritten(attend, q, k, v, mask, strict=True)
        right = attend(q, k, v, mask)
    assert site(report, "decode_attention" if rows == 1 else "block_attention").rewritten
    nothing = torch.zeros(2, 8) if written == "function" else torch.full((2, 8), math.nan)
    torch.testing.assert_close(found[1, :, 0].float(), nothing, equal_nan=True)
    torch.testing.assert_close(found.nan_to_num(), right.nan_to_num(), rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("lengths", [(20, 20), (100, 100)])
@pytest.mark.parametrize("rows", [1, None])
def test_a_mask_of_numbers_that_drops_every_pair_of_a_sequence(lengths: tuple[int, int], rows: int | None) -> None:
    """What lies behind the end of a list reads no number of the mask, which may have one row, or fewer than a block."""
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 2, n, 8, generator=random, requires_grad=True) for n in (*lengths, lengths[1]))
    mask = torch.zeros(2, 1, rows or lengths[0], lengths[1])
    mask[1], mask[0, ..., 7:] = -math.inf, -math.inf
    found, seen = judged(F.scaled_dot_product_attention, q, k, v, mask)
    assert seen.rewritten, seen.reason
    right = F.scaled_dot_product_attention(q, k, v, mask)
    torch.testing.assert_close(found, right, atol=2e-6, rtol=1e-4)
    grads = [torch.autograd.grad(one.square().sum(), [q, k, v]) for one in (found, right)]
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("added", [False, True])
def test_gradients_lie_as_a_graph_is_told(added: bool) -> None:
    """Heads behind tokens, as models have them: what is compiled behind the operator reads them by these strides."""
    random, fake = torch.Generator().manual_seed(0), FakeTensorMode()
    q, k, v = (torch.randn(2, 20, 2, 8, generator=random).transpose(1, 2) for _ in range(3))
    mask = torch.rand(2, 2, 20, 20, generator=random) < 0.5
    mask[:, :, 3] = False
    mask = torch.zeros(mask.shape).masked_fill(~mask, -math.inf) if added else mask
    lists = list(torch.ops.sparsecomp.scanned_mask.default(mask, 20, 20, 32, 64, True))
    how = (0.3, 0.0, None, mask if added else None, None, 65536, True)
    given = (q, q, k, v, *torch.ops.sparsecomp.block_attention.default(q, k, v, lists, *how), None, lists, *how)
    op = torch.ops.sparsecomp.block_attention_gradients.default
    with fake:
        told = op(*pytree.tree_map_only(Tensor, fake.from_tensor, given))
    for one, other in zip(op(*given), told, strict=True):
        assert one.stride() == other.stride()


STAY: dict[str, tuple[Callable[..., Tensor], Callable[[], Tensor], str]] = {
    "a finite number": (filled_with(LOWEST), padding, "no -inf"),
    "of whole numbers": (
        lambda q, k, v, m: (q @ k.mT + m).softmax(-1) @ v, lambda: padding().long(), "adds numbers of torch.int64"
    ),
    "scaled afterwards": (
        lambda q, k, v, m: ((q @ k.mT + m) * 0.5).softmax(-1) @ v, lambda: models.of_floats(N), "times 0.5"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STAY)
def test_what_stays(name: str) -> None:
    attend, mask, told = STAY[name]
    with torch.no_grad():
        assert told in stays(Refused(attend), tokens(), mask()).reason


def test_dropout_that_keeps_next_to_nothing_stays() -> None:
    model = Refused(lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m, dropout_p=1 - 1e-6))
    assert "fewer weights than one in 65536" in judged(model, tokens(), padding())[1].reason


@pytest.mark.parametrize("attend", [sdpa, models.filled])
def test_gradients_of_a_model_with_padding(attend: Callable[..., Tensor]) -> None:
    model, x = Written(attend), tokens().requires_grad_()
    found, seen = judged(model, x, padding())
    assert seen.rewritten
    grads = torch.autograd.grad(found.square().sum(), [x, *model.parameters()])
    right = torch.autograd.grad(model(x, padding()).square().sum(), [x, *model.parameters()])
    for one, other in zip(grads, right, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


class Layers(nn.Module):
    """Layers that read one mask, each a view of its own."""

    def __init__(self, change: Callable[[Tensor], object] | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Written(sdpa) for _ in range(3)])
        self.change = change

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        mask = mask.clone()
        for layer in self.layers:
            x = layer(x, mask[:, None, None, : x.shape[1]])
            if self.change is not None:
                self.change(mask)
        return x


def scans(text: str) -> int:
    return text.count("torch.ops.sparsecomp.scanned_mask.default(")


def test_layers_share_a_scan() -> None:
    model, mask = Layers(), padding()[:, 0, 0]
    found, report = rewritten(model, tokens(), mask)
    assert scans(report.graph_after) == 1
    torch.testing.assert_close(found, model(tokens(), mask), atol=1e-5, rtol=1e-4)


def test_a_mask_that_is_written_to_between_layers_is_scanned_again() -> None:
    model, mask = Layers(lambda one: one[:, :30].fill_(False)), padding()[:, 0, 0]
    found, report = rewritten(model, tokens(), mask)
    assert scans(report.graph_after) == 3
    torch.testing.assert_close(found, model(tokens(), mask), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("same", [False, True])
def test_a_scan_is_shared_though_the_graph_writes_to_other_memory(same: bool) -> None:
    def twice(x: Tensor, mask: Tensor, cache: Tensor) -> Tensor:
        q, k, v = heads_of(x.repeat(1, 1, 3))
        first = F.scaled_dot_product_attention(q, k, v, mask[:, None, None])
        cache.logical_not_()
        return F.scaled_dot_product_attention(first, k, v, mask[:, None, None])

    def given() -> tuple[Tensor, Tensor]:
        mask = padding()[:, 0, 0].contiguous()
        return mask, mask.view(-1) if same else torch.zeros(3, dtype=torch.bool)

    found, report = rewritten(twice, tokens(), *given())
    assert scans(report.graph_after) == 1 + same
    torch.testing.assert_close(found, twice(tokens(), *given()), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("change", [lambda mask, view: mask.logical_not_(), lambda mask, view: view.logical_not_()])
def test_one_view_that_is_written_to_between_layers_is_scanned_again(change: Callable[..., Tensor]) -> None:
    def twice(x: Tensor, mask: Tensor) -> Tensor:
        view, (q, k, v) = mask[:, None, None], heads_of(x.repeat(1, 1, 3))
        first = F.scaled_dot_product_attention(q, k, v, view)
        change(mask, view)
        return F.scaled_dot_product_attention(first, k, v, view)

    mask = padding()[:, 0, 0].contiguous()
    found, report = rewritten(twice, tokens(), mask.clone())
    assert scans(report.graph_after) == 2
    torch.testing.assert_close(found, twice(tokens(), mask), atol=1e-5, rtol=1e-4)


def test_without_a_promise_a_buffer_is_data() -> None:
    model = Written(sdpa, buffer=models.by_tril(N))
    with torch.no_grad():
        assert "scanned" in becomes_one(model, tokens()).reason


@needs_triton
@pytest.mark.parametrize(
    ("mask", "density", "share"),
    [(True, None, 0.75), (True, 0.1, 0.1), (True, 1.0, 1.0), (-torch.inf, None, 0.25), (1.0, None, 1.0)],
)
@pytest.mark.slow(reason="runs a model of a card's sizes")
def test_on_a_card_the_share_that_is_assumed_decides(mask: float, density: float | None, share: float) -> None:
    class Heads(nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            heads = x.unflatten(-1, (-1, 64)).transpose(1, 2)
            return F.scaled_dot_product_attention(heads, heads, heads, mask)

    x = torch.zeros(8, 2048, 1024, dtype=torch.bfloat16)
    filled = torch.full((8, 1, 1, 2048), mask, dtype=torch.bool if mask is True else torch.bfloat16)
    if mask == -torch.inf:
        filled[..., :512] = 0
    with torch.no_grad():
        report = sparsecomp.explain(Heads(), x, filled, device="h100", mode="reduce-overhead", density=density)
    seen = site(report, "block_attention")
    assert seen.rewritten == (share < 1) and (share < 1 or seen.why == "GATE"), seen.reason
    assert f"{share:.0%} of its blocks are assumed to be kept" in seen.reason


@pytest.mark.slow(reason="compiles models")
def test_the_whole_compiler() -> None:
    model = Layers()
    compiled = torch.compile(model, backend="sparsecomp", options={"implementation": "skip"})
    for training in (False, True):
        for mask in (padding()[:, 0, 0], torch.ones(2, N, dtype=torch.bool), torch.rand(2, N) < 0.1):
            with torch.set_grad_enabled(training):
                found = compiled(tokens(), mask)
            torch.testing.assert_close(found, model(tokens(), mask), atol=1e-5, rtol=1e-4)
            if training:
                found.sum().backward()


# dropout


class Dropped(Written):
    """Heads of ones as values: the result is the sum of the weights that are kept, enlarged."""

    def forward(self, x: Tensor, *masks: Tensor) -> Tensor:
        q, k, v = heads_of(self.inner(x))
        return self.attend(q, k, torch.ones_like(v) + 0 * v, masks[0], self.dropout)


def dropping(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, dropout: nn.Module) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, mask, dropout_p=0.25)


@pytest.mark.parametrize("attend", [dropping, models.filled])
def test_dropout_drops_as_often_as_torchs(attend: Callable[..., Tensor]) -> None:
    model = Dropped(attend, models.by_arange)
    model.dropout.p = 0.25
    model.train()
    mask = torch.ones(N, N, dtype=torch.bool) if attend is dropping else None
    call = (lambda x: model(x, mask)) if attend is dropping else (lambda x: model(x, models.by_arange(N)))
    with torch.no_grad():
        found, report = rewritten(call, tokens(), strict=True)
        eager = call(tokens())
    seen = site(report, "block_attention")
    assert seen.rewritten and "drops other weights" in seen.reason
    assert abs(float(found.mean()) - 1) < 0.02 and float(found.std()) > 0.01
    assert abs(float(found.std()) / float(eager.std()) - 1) < 0.1


@pytest.mark.slow(reason="compiles a model")
def test_dropout_is_drawn_anew_in_each_call_and_by_torchs_generator() -> None:
    model = Dropped(models.filled, models.by_arange).train()
    compiled = torch.compile(
        lambda x: model(x, models.by_arange(N)), backend="sparsecomp", options={"implementation": "skip"}
    )
    results = []
    for _ in range(2):
        torch.manual_seed(7)
        results.append([compiled(tokens()) for _ in range(2)])
    assert not torch.equal(*results[0])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_gradients_through_dropout_are_of_what_was_kept() -> None:
    """The result is linear in the values: its gradients by them, times them, give it again."""
    model = Written(lambda q, k, v, mask, dropout: dropping(q.detach(), k.detach(), v, mask, dropout), models.by_tril)
    model.inner.bias.data.zero_()
    model.outer = nn.Identity()  # pyright: ignore[reportAttributeAccessIssue]
    weight = model.inner.weight
    found, seen = judged(model, tokens())
    assert seen.rewritten
    (by,) = torch.autograd.grad(found.square().sum() / 2, [weight])
    torch.testing.assert_close((by * weight).sum(), found.square().sum(), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("call", [
    lambda q, k, v, m: F.alpha_dropout((q @ k.mT).masked_fill(~m, -math.inf).softmax(-1), 0.1, training=True) @ v,
    lambda q, k, v, m: F.dropout2d((q @ k.mT).masked_fill(~m, -math.inf).softmax(-1), 0.1, training=True) @ v,
])  # fmt: skip
def test_other_dropouts_are_no_dropout_of_ours(call: Callable[..., Tensor]) -> None:
    _, report = rewritten(Refused(call), tokens())
    assert not any(one.rewritten for one in report.sites if one.rule == "block_attention")
