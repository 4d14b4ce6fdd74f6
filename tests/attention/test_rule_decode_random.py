"""Random steps that decode, whose layers write to caches, copies, masks and positions, give what eager gives.

Each layer takes another way to repeat heads, to mask and to attend; what was read before a write must not be read
after.
"""

import math
import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from rewriting import rewritten
from torch import Tensor, nn

BATCH, KV_HEADS, KEYS, DEPTH = 2, 2, 40, 8
LOWEST = torch.finfo(torch.float32).min

REPEATS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "expanded": lambda x, n: x[:, :, None].expand(BATCH, KV_HEADS, n, KEYS, DEPTH).reshape(BATCH, -1, KEYS, DEPTH),
    "flattened": lambda x, n: x.unsqueeze(2).expand(-1, -1, n, -1, -1).flatten(1, 2),
    "copied": lambda x, n: x[:, :, None].expand(-1, -1, n, -1, -1).contiguous().view(BATCH, -1, KEYS, DEPTH),
    "interleaved": lambda x, n: x.repeat_interleave(n, dim=1),
}
ROWS = torch.ones(KEYS, KEYS, dtype=torch.bool).tril()
MASKS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "window": lambda mask, at: ((torch.arange(KEYS) <= at) & (torch.arange(KEYS) > at - 9))[:, None],
    "given": lambda mask, at: mask,
    "causal padding": lambda mask, at: mask & (torch.arange(KEYS) <= at)[:, None],
    "rows of a buffer": lambda mask, at: ROWS[at[..., 0].clamp(0, KEYS - 1)][:, None],
    "opposite": lambda mask, at: ~mask,
}  # fmt: skip
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda mask: mask,
    "a view": lambda mask: mask[..., :KEYS],
    "a copy": lambda mask: mask[..., :KEYS].contiguous(),
    "the opposite of the opposite": lambda mask: ~~mask,
}
WRITES: dict[str, Callable[["Layer"], object]] = {
    "cache": lambda one: (one.k[:, :, 5:9].fill_(0.3), one.v[:, :, 3].fill_(1)),
    "scaled cache": lambda one: (one.k.mul_(0.5), one.v.add_(0.1)),
    "copies": lambda one: (one.keys.mul_(0.7), one.values[:, :, 4].fill_(0.2)),
    "mask": lambda one: one.mask[..., 2:20].logical_not_(),
    "view of the mask": lambda one: one.seen.logical_not_(),
    "position": lambda one: one.at.add_(1),
    "queries": lambda one: one.q.mul_(1.1),
    "numbers": lambda one: one.numbers[..., 3:9].fill_(0),
    **dict.fromkeys(("nothing", "nothing more", "nothing at all", "nothing again"), lambda one: None),
}  # fmt: skip


class Layer:
    """What the writes of a layer can reach."""

    q: Tensor
    k: Tensor
    v: Tensor
    keys: Tensor
    values: Tensor
    mask: Tensor
    seen: Tensor
    at: Tensor
    numbers: Tensor


def by_hand(masked: Callable[[Tensor, Layer], Tensor]) -> Callable[..., Tensor]:
    def attend(one: Layer, write: Callable[[Layer], object]) -> Tensor:
        scores = masked(one.q @ one.keys.transpose(-1, -2) * 0.3, one)
        write(one)
        return scores.softmax(-1) @ one.values

    return attend


def by_function(mask: Callable[[Layer], Tensor]) -> Callable[..., Tensor]:
    def attend(one: Layer, write: Callable[[Layer], object]) -> Tensor:
        given = mask(one)
        write(one)
        return F.scaled_dot_product_attention(one.q, one.keys, one.values, given)

    return attend


ATTENDS: dict[str, Callable[..., Tensor]] = {
    "function": by_function(lambda one: one.seen),
    "function, numbers": by_function(lambda one: one.numbers),
    "function, cast": by_function(lambda one: one.numbers.double().float()),
    "filled": by_hand(lambda scores, one: scores.masked_fill(~one.seen, -math.inf)),
    "filled in place": by_hand(lambda scores, one: scores.masked_fill_(one.seen.logical_not(), LOWEST)),
    "chosen": by_hand(lambda scores, one: torch.where(one.seen, scores, -math.inf)),
    "added": by_hand(lambda scores, one: scores + one.numbers),
    "least added": by_hand(lambda scores, one: scores + torch.where(one.seen, 0.0, LOWEST)),
    "capped": by_hand(lambda scores, one: (torch.tanh(scores) * 2).masked_fill(~one.seen, -math.inf)),
}


class Steps(nn.Module):
    """One to three layers, all of whose choices follow from a seed."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        choose = random.Random(seed)
        self.rows, self.group = choose.choice((1, 1, 3)), choose.choice((1, 2, 2))
        self.masking = choose.choice(list(MASKS))
        kinds = (REPEATS, VIEWS, ATTENDS, WRITES, WRITES, WRITES)
        self.layers = [tuple(choose.choice(list(kind)) for kind in kinds) for _ in range(choose.choice((1, 2, 3)))]

    def inputs(self) -> list[Tensor]:
        """q, k, v, a mask, and positions, some of which are not in the cache."""
        shapes = ((BATCH, KV_HEADS * self.group, self.rows, DEPTH), *((BATCH, KV_HEADS, KEYS, DEPTH),) * 2)
        mask = torch.rand(BATCH, 1, self.rows, KEYS) < 0.4
        return [*(torch.randn(shape) for shape in shapes), mask, torch.randint(-3, KEYS + 12, (BATCH, 1, 1))]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, at: Tensor) -> tuple[Tensor, ...]:
        one = Layer()
        one.q, one.k, one.v, one.at = q, k, v, at
        one.mask = MASKS[self.masking](mask, at + torch.arange(self.rows)[:, None])
        for repeat, view, attend, first, between, last in self.layers:
            one.keys, one.values = (REPEATS[repeat](x, self.group) for x in (one.k, one.v))
            one.seen = VIEWS[view](one.mask)
            one.numbers = torch.zeros(one.seen.shape).masked_fill(~one.seen, -math.inf)
            WRITES[first](one)
            found = ATTENDS[attend](one, WRITES[between])
            WRITES[last](one)
            one.q = one.q + found.nan_to_num(0.5)
        return one.q, one.k, one.v


@pytest.mark.quick_cases(1)
@pytest.mark.slow_cases(5)
@pytest.mark.parametrize("first", range(0, 200, 10))
def test_random_steps(first: int) -> None:
    sites = []
    for seed in range(first, first + 10):
        torch.manual_seed(seed)
        model = Steps(seed)
        given = model.inputs()
        with torch.no_grad():
            right = model(*(one.clone() for one in given))
            found, report = rewritten(model, *(one.clone() for one in given), strict=True)
        sites += [one.rewritten for one in report.sites if one.rule == "decode_attention"]
        for one, other in zip(found, right, strict=True):
            torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-3, msg=lambda told, seed=seed: f"{seed}: {told}")
    assert sum(sites) > 2  # or this says little
