"""Derivatives of attention of every kind, where queries, keys and values are one tensor or made of one another."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sparsecomp.attention import attention, causal

TOKENS = 5
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
OPERANDS: dict[str, Callable[[Attend], Callable[[Tensor], Tensor]]] = {
    "one tensor": lambda attend: lambda x: attend(x, x, x),
    "keys of queries": lambda attend: lambda x: attend(x, x * 2, x.flip(2)),
    "a constant": lambda attend: lambda x: attend(x, x.detach(), x),
}


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    kept = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    return (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~kept, -torch.inf).softmax(-1) @ v


def ours(by: str) -> Attend:
    return lambda q, k, v: attention(q, k, v, causal(), by=by)


def given() -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    x, along = (torch.randn(3, 2, TOKENS, 4, generator=random, dtype=torch.float64) for _ in range(2))
    return x, along


def _twice(f: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
    x, along = given()
    x.requires_grad_()
    (once,) = torch.autograd.grad(f(x).square().sum(), x, create_graph=True)
    return once.detach(), torch.autograd.grad((once * along).sum(), x)[0]


def _summed(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: f(x).square().sum()


DERIVATIVES: dict[str, Callable[[Callable[[Tensor], Tensor]], tuple[Tensor, ...]]] = {
    "of gradients": _twice,
    "func.grad": lambda f: (torch.func.grad(_summed(f))(given()[0]),),
    "of each": lambda f: (torch.vmap(torch.func.grad(lambda x: _summed(f)(x[None])))(given()[0]),),
    "forward": lambda f: torch.func.jvp(f, given()[:1], given()[1:]),
    "forward of gradients": lambda f: torch.func.jvp(torch.func.grad(_summed(f)), given()[:1], given()[1:]),
    "gradients of forward": lambda f: (
        torch.func.grad(lambda x: torch.func.jvp(f, (x,), given()[1:])[1].square().sum())(given()[0]),
    ),
}  # fmt: skip


@pytest.mark.quick_cases(8)
@pytest.mark.parametrize("by", ["blocks", "elements"])
@pytest.mark.parametrize("operands", OPERANDS)
@pytest.mark.parametrize("kind", DERIVATIVES)
def test_derivatives_are_those_of_attention_by_hand(kind: str, operands: str, by: str) -> None:
    derivative, taken = DERIVATIVES[kind], OPERANDS[operands]
    for found, right in zip(derivative(taken(ours(by))), derivative(taken(by_hand)), strict=True):
        torch.testing.assert_close(found, right)
