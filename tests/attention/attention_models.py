"""Attention as people write it, and masks as they compute them."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

N, WIDTH, HEADS = 150, 32, 2
"""Tokens, no multiple of a block; features; heads."""

Masking = Callable[[int], Tensor]


def by_arange(n: int) -> Tensor:
    i = torch.arange(n)
    return (i[:, None] - i[None, :]).abs() < 9


def by_tril(n: int) -> Tensor:
    return torch.ones(n, n, dtype=torch.bool).tril() & torch.ones(n, n, dtype=torch.bool).triu(-20)


def in_place(n: int) -> Tensor:
    mask = torch.zeros(n, n, dtype=torch.bool)
    mask[:, :3] = True
    mask |= torch.eye(n, dtype=torch.bool)
    return mask


def of_floats(n: int) -> Tensor:
    return torch.zeros(n, n).masked_fill(~by_arange(n), -math.inf)


def of_infinities(n: int) -> Tensor:
    return torch.full((n, n), float("-inf")).triu(1)


def with_heads(n: int) -> Tensor:
    far = torch.arange(n)[:, None] - torch.arange(n)
    return torch.stack([far >= 0, far.abs() < 5]).unsqueeze(0)


def of_keys(n: int) -> Tensor:
    return (torch.arange(n) < 40).view(1, 1, 1, n)


def strided(n: int) -> Tensor:
    far = torch.arange(n)[:, None] - torch.arange(n)
    return (far % 70 == 0) | (torch.remainder(torch.arange(n), 100) == 0)


MASKS: dict[str, Masking] = {
    one.__name__: one for one in (by_arange, by_tril, in_place, of_floats, of_infinities, with_heads, of_keys, strided)
}


def heads_of(x: Tensor) -> list[Tensor]:
    """Queries, keys and values (batch, heads, tokens, depth) of (batch, tokens, 3 · features)."""
    return [one.unflatten(-1, (HEADS, -1)).transpose(1, 2) for one in x.chunk(3, -1)]


def joined(y: Tensor) -> Tensor:
    return y.transpose(1, 2).contiguous().flatten(2)


class Written(nn.Module):
    """A layer that computes attention in one way, by a mask that it is given, or computes itself."""

    def __init__(
        self, attend: Callable[..., Tensor], masking: Masking | None = None, buffer: Tensor | None = None
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer, self.dropout = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)
        self.attend, self.masking = attend, masking
        self.register_buffer("mask", buffer)
        self.eval()

    def forward(self, x: Tensor, *masks: Tensor) -> Tensor:
        q, k, v = heads_of(self.inner(x))
        mask = masks[0] if masks else self.mask if self.masking is None else self.masking(x.shape[1])
        return self.outer(joined(self.attend(q, k, v, mask, self.dropout)))


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, dropout: nn.Module) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, mask)


# by a bool mask, True where a pair is kept


def filled(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, dropout: nn.Module) -> Tensor:
    scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
    return dropout(F.softmax(scores.masked_fill(mask == 0, float("-inf")), dim=-1)) @ v


def filled_in_place(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, dropout: nn.Module) -> Tensor:
    scores = torch.matmul(q, k.mT).div_(4.0)
    return torch.matmul(dropout(scores.masked_fill_(mask.logical_not(), -torch.inf).softmax(3)), v)


def chosen(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, dropout: nn.Module) -> Tensor:
    scores = torch.matmul(q / 4, k.permute(0, 1, 3, 2))
    return torch.matmul(torch.softmax(torch.where(mask, scores, float("-inf")), -1), v)


def chosen_the_other_way(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, dropout: nn.Module) -> Tensor:
    scores = torch.matmul(q, k.swapaxes(2, 3)) / 4
    return torch.softmax(torch.where(~mask, torch.finfo(scores.dtype).min, scores), -1) @ v


def added(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, dropout: nn.Module) -> Tensor:
    bias = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, float("-inf"))
    scores = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(q.size(-1)) + bias
    return torch.matmul(nn.functional.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype), v)


def added_in_front(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, dropout: nn.Module) -> Tensor:
    bias = (1.0 - mask.float()) * torch.finfo(torch.float32).min
    return (bias + (q * 0.3) @ k.transpose(-1, -2)).softmax(-1) @ v


def of_tensors(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, dropout: nn.Module) -> Tensor:
    scores = q @ k.transpose(-1, -2)
    scores = scores / torch.full([], v.size(-1) ** 0.5, dtype=scores.dtype, device=scores.device)
    least = torch.full([], torch.finfo(scores.dtype).min, dtype=scores.dtype, device=scores.device)
    return torch.where(mask, scores.to(scores.dtype), least).softmax(-1) @ v


def of_roots(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, dropout: nn.Module) -> Tensor:
    scores = torch.matmul(q, k.mT) / torch.sqrt(torch.tensor(k.size(-1), dtype=torch.float32))
    return scores.masked_fill(~mask, torch.tensor(-math.inf)).softmax(-1) @ v


def einsums(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, dropout: nn.Module) -> Tensor:
    q, k, v = (one.transpose(1, 2) for one in (q, k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * 0.25
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v).transpose(1, 2)


def einsums_swapped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, dropout: nn.Module) -> Tensor:
    scores = torch.einsum("xyjd, xyid -> xyij", k, q)
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    return torch.einsum("hijk,hikl->hijl", weights, v)


def capped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, dropout: nn.Module) -> Tensor:
    scores = (q @ k.mT) * 0.25 / 1.5
    return (torch.tanh(scores) * 1.5).masked_fill(~mask, float("-inf")).softmax(-1) @ v


def batches(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, dropout: nn.Module) -> Tensor:
    q, k, v = (one.reshape(-1, *one.shape[2:]) for one in (q, k, v))
    scores = torch.bmm(q, k.transpose(1, 2)).mul(0.25).masked_fill(~mask, float("-inf"))
    return torch.bmm(torch.softmax(scores, dim=2), v).view(-1, HEADS, *v.shape[1:])


BY_HAND: dict[str, Callable[..., Tensor]] = {
    one.__name__: one
    for one in (
        filled, filled_in_place, chosen, chosen_the_other_way, added, added_in_front, einsums, einsums_swapped, capped,
        batches, of_tensors, of_roots,
    )
}  # fmt: skip
