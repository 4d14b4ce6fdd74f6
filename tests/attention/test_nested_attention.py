"""Nested tensors of torch in packed attention, each sequence beside torch's attention on it alone."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sparsecomp.attention import attention, causal, packed_attention
from sparsecomp.errors import FormatError

Q_LENGTHS, K_LENGTHS = (5, 1, 40), (9, 3, 64)


def nested(lengths: tuple[int, ...], heads: int, seed: int) -> tuple[Tensor, list[Tensor]]:
    """(batch, tokens, heads, 8), and its sequences."""
    random = torch.Generator().manual_seed(seed)
    parts = [torch.randn(n, heads, 8, generator=random) for n in lengths]
    return torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True), parts


def alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of one sequence (tokens, heads, depth), heads of keys shared."""
    q, k, v = (one.transpose(0, 1)[None] for one in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)[0].transpose(0, 1)


@pytest.mark.parametrize("heads_first", [False, True])
def test_each_sequence_attends_to_its_own(heads_first: bool) -> None:
    (q, qs), (k, ks), (v, _) = nested(Q_LENGTHS, 4, 0), nested(K_LENGTHS, 2, 1), nested(K_LENGTHS, 2, 1)
    values = torch.nested.nested_tensor_from_jagged(v.values(), k.offsets())
    given = [one.transpose(1, 2) if heads_first else one for one in (q, k, values)]
    found = packed_attention(*given)
    assert found.shape == given[0].shape  # the same size of tokens, too
    found = found.transpose(1, 2) if heads_first else found
    leaves = [[one.requires_grad_() for one in parts] for parts in (qs, ks)]
    right = [alone(one, other, other) for one, other in zip(*leaves, strict=True)]
    for one, other in zip(found.unbind(), right, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    (by_q,) = torch.autograd.grad(found.values().square().sum(), q)
    grads = torch.autograd.grad(sum(one.square().sum() for one in right), qs)
    for one, other in zip(by_q.unbind(), grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_sequence_may_be_causal_and_results_add_up() -> None:
    x, parts = nested(Q_LENGTHS, 2, 0)
    found = x + packed_attention(x, x, x, causal=True)
    for one, part in zip(found.unbind(), parts, strict=True):
        kept = torch.ones(len(part), len(part), dtype=torch.bool).tril()
        heads = part.transpose(0, 1)
        right = F.scaled_dot_product_attention(heads, heads, heads, kept).transpose(0, 1) + part
        torch.testing.assert_close(one, right, rtol=1e-4, atol=1e-5)


def test_what_is_not_taken_says_so() -> None:
    x, parts = nested(Q_LENGTHS, 2, 0)
    plain, other = torch.cat(parts), nested(K_LENGTHS, 2, 1)[0]
    strided = torch.nested.nested_tensor(parts)
    for given in ((x, plain, plain), (plain, x, x), (strided, strided, strided)):
        with pytest.raises(FormatError, match="needs to be nested, in the layout torch.jagged"):
            packed_attention(*given)
    with pytest.raises(FormatError, match="the same tensor"):
        packed_attention(x, other, x)
    with pytest.raises(FormatError, match="leave out"):
        packed_attention(x, x, x, x.offsets().int())
    with pytest.raises(FormatError, match="needs offsets"):
        packed_attention(plain, plain, plain)
    with pytest.raises(FormatError, match="packed_attention takes nested"):
        attention(x.transpose(1, 2), x.transpose(1, 2), x.transpose(1, 2), causal())
