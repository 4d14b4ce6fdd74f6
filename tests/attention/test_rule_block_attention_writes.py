"""Masks that are written to in unusual ways and places, and results that lie otherwise: never a wrong number."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from attention_models import by_tril
from rewriting import rewritten, site
from torch import Tensor

pytestmark = pytest.mark.quick_cases(2)

N = 70
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def operands(n: int = N) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, n, 2, 8, generator=generator).transpose(1, 2) for _ in range(3)]


def becomes(attend: Attend, rewritten_: bool, told: str = "") -> None:
    """Judge whether it is rewritten, and that it gives what eager gives in float64."""
    torch.manual_seed(1)
    right = attend(*(one.double() for one in operands()))
    torch.manual_seed(1)
    found, report = rewritten(attend, *operands(), strict=True)
    seen = site(report, "block_attention")
    assert seen.rewritten == rewritten_ and told in seen.reason, seen.reason
    torch.testing.assert_close(found.double(), right, atol=2e-6, rtol=1e-4, equal_nan=True)


def upper() -> Tensor:
    return torch.ones(N, N, dtype=torch.bool).triu(1)


def drawn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.ones(N, N, dtype=torch.bool)
    mask.bernoulli_(0.5)
    return F.scaled_dot_product_attention(q, k, v, mask)


def on_the_diagonal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.zeros(N, N, dtype=q.dtype)
    mask.fill_diagonal_(-math.inf)
    return F.scaled_dot_product_attention(q, k, v, mask)


def through_a_view(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.ones(N, N, dtype=torch.bool)
    mask.view(-1).copy_((q[0, 0] @ k[0, 0].mT > 0).view(-1))
    return F.scaled_dot_product_attention(q, k, v, mask)


def through_a_view_and_again(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.ones(N, N, dtype=torch.bool)
    mask.view(-1).bernoulli_(0.5)
    mask |= torch.eye(N, dtype=torch.bool)
    return F.scaled_dot_product_attention(q, k, v, mask)


@pytest.mark.parametrize("attend", [drawn, on_the_diagonal, through_a_view, through_a_view_and_again])
def test_a_write_that_is_no_part_of_the_formula_makes_a_mask_data(attend: Attend) -> None:
    becomes(attend, True, "scanned in each call")


def filled_then_written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    dropped = upper()
    scores = (q @ k.mT).masked_fill(dropped, -math.inf)
    dropped &= torch.ones(N, N, dtype=torch.bool).triu(9)
    return scores.softmax(-1) @ v


def chosen_then_written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    kept = by_tril(N)
    scores = torch.where(kept, q @ k.mT, -math.inf)
    kept |= ~upper()
    return scores.softmax(-1) @ v


def written_between_two(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    kept = torch.zeros(N, N, dtype=torch.bool)
    kept[:, :3] = True
    once = F.scaled_dot_product_attention(q, k, v, kept)
    kept |= torch.eye(N, dtype=torch.bool)
    return F.scaled_dot_product_attention(once, k, v, kept)


def data_then_written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    dropped = (q @ k.mT > 0).tril(-1)
    scores = (q @ k.mT).masked_fill(dropped, -math.inf)
    dropped.fill_(True)
    return scores.softmax(-1) @ v


def test_data_that_is_written_to_before_the_result_stays() -> None:
    becomes(data_then_written, False, "written to before the result")


@pytest.mark.parametrize("attend", [filled_then_written, chosen_then_written, written_between_two])
def test_what_is_written_after_a_mask_was_read_does_not_count(attend: Attend) -> None:
    becomes(attend, True)


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).masked_fill(upper(), -math.inf).softmax(-1) @ v


def one_reader_writes(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    found = by_hand(q, k, v)
    one, other = found.reshape(-1), found.reshape(2, -1)
    one.mul_(3)
    return other * 1


def itself_if_contiguous(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    found = by_hand(q, k, v)
    one, other = found.contiguous(), found.flatten()
    one.mul_(3)
    return other * 1


def viewed_again(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return by_hand(q, k, v).flatten(0, 1).view(-1)


@pytest.mark.parametrize("attend", [one_reader_writes, itself_if_contiguous, viewed_again])
def test_readers_cannot_tell_that_a_result_lies_as_the_queries_do(attend: Attend) -> None:
    becomes(attend, True)


def a_query_for_many(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q[:, :, :1] @ k.mT).masked_fill(upper(), -math.inf).softmax(-1) @ v


def a_batch_for_many(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    masks = torch.stack([upper(), upper().triu(3)])[:, None]
    return (q @ k.mT).masked_fill(masks, -math.inf).softmax(-1) @ v


@pytest.mark.parametrize("attend", [a_query_for_many, a_batch_for_many])
def test_a_mask_that_broadcasts_its_scores_stays(attend: Attend) -> None:
    becomes(attend, False, "broader")


def negated_twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (((q @ k.mT) * -1).masked_fill(upper(), -math.inf) * -1).softmax(-1) @ v


def filled_then_shrunk(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q @ k.mT * 1e30).masked_fill(upper(), -1e30) * 1e-30).softmax(-1) @ v


def added_then_shrunk(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q @ k.mT * 1e30 + upper() * -1e31) * 1e-30).softmax(-1) @ v


def shrunk(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q @ k.mT).masked_fill(upper(), -math.inf) / 4).softmax(-1) @ v


@pytest.mark.parametrize(
    ("attend", "found"),
    [(negated_twice, False), (filled_then_shrunk, False), (added_then_shrunk, False), (shrunk, True)],
)
def test_masked_scores_may_be_scaled_to_what_no_longer_drops(attend: Attend, found: bool) -> None:
    becomes(attend, found)


def scores_given_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.empty(2, N, N, dtype=q.dtype)
    weights = torch.bmm(q[0], k[0].mT, out=scores).masked_fill(upper(), -math.inf).softmax(-1)
    return torch.cat((weights @ v[0], scores), -1)


def weights_given_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.empty(2, N, N, dtype=q.dtype)
    found = torch.softmax((q[0] @ k[0].mT).masked_fill(upper(), -math.inf), -1, out=weights) @ v[0]
    return torch.cat((found, weights), -1)


@pytest.mark.parametrize("attend", [scores_given_out, weights_given_out])
def test_what_is_written_to_another_tensor_is_no_site(attend: Attend) -> None:
    found, report = rewritten(attend, *operands())
    assert not [one for one in report.sites if one.rule == "block_attention"]
    torch.testing.assert_close(found, attend(*operands()))


def filled_with_nan(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).masked_fill(upper(), math.nan).softmax(-1) @ v


def scaled_by_nan(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, ~upper(), scale=math.nan)


@pytest.mark.parametrize("attend", [filled_with_nan, scaled_by_nan])
def test_a_number_that_is_none_is_not_taken_for_a_small_one(attend: Attend) -> None:
    becomes(attend, False)


def shared_and_built_in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    kept = torch.zeros(N, N, dtype=torch.bool)
    kept[:, :3] = True
    kept |= torch.eye(N, dtype=torch.bool)
    for _ in range(3):
        q = F.scaled_dot_product_attention(q, k, v, kept)
    return q


def test_layers_that_read_a_mask_one_after_another_only_read_it() -> None:
    _, report = rewritten(shared_and_built_in_place, *operands(), strict=True)
    assert [one.rewritten for one in report.sites if one.rule == "block_attention"] == [True] * 3
    becomes(shared_and_built_in_place, True)


def scale_written_to(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scale = torch.full([], 4.0)
    scale.mul_(2)
    return (q @ k.mT / scale).masked_fill(~mask, -torch.inf).softmax(-1) @ v


def view_of_a_scale_written_to(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scale = torch.tensor(4.0)
    scale.view(1).add_(2)
    return torch.where(mask, q @ k.mT * scale, -torch.inf).softmax(-1) @ v


@pytest.mark.parametrize("attend", [scale_written_to, view_of_a_scale_written_to])
def test_a_number_that_is_written_to_is_not_read_instead(attend: Callable[..., Tensor]) -> None:
    mask = by_tril(40)
    q, k, v = (torch.randn(1, 2, 40, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    with torch.no_grad():
        found, report = rewritten(attend, q, k, v, mask, strict=True)
    assert not any(one.rewritten for one in report.sites if one.rule == "block_attention")
    torch.testing.assert_close(found, attend(q, k, v, mask))
