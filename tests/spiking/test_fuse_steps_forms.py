"""How a loop over time may be spelled: what joins its steps, what of it stays, and that both compute the same.

Graphs are traced by fx and rewritten by this one rule, so that a spelling takes milliseconds.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from rewriting import Examples, spikes
from torch import Tensor, fx
from torch.nn.functional import conv2d, linear, max_pool2d

from sparsecomp.options import Options
from sparsecomp.passes import pipeline
from sparsecomp.passes.spiking import fuse_steps

T, B = 4, 2


def numbers(*sizes: int) -> Tensor:
    """Small whole numbers, of which sums are exact."""
    return torch.randint(-9, 10, sizes, generator=torch.Generator().manual_seed(sum(sizes))).float()


class Net(NamedTuple):
    """Weights: two of linear layers, one of a square one, one of a convolution, and two biases."""

    w: Tensor = numbers(6, 4)
    v: Tensor = numbers(6, 4) + 1
    q: Tensor = numbers(4, 4)
    k: Tensor = numbers(6, 4, 1, 1)
    b: Tensor = numbers(6)
    c: Tensor = numbers(6) + 1


FLAT, IMAGES, ONE = (T, B, 4), (T, B, 4, 3, 3), (T, 1, 4)


def rewritten(function: Callable[[Any, Net], Tensor], *sizes: int) -> Counter[str]:
    """How often each function is called once the rule has run, of which the result is eager's; and its sites."""
    gm, inputs = (
        fx.symbolic_trace(lambda x, w, v, q, k, b, c: function(x, Net(w, v, q, k, b, c))),
        (numbers(*sizes), *Net()),
    )
    expected = Examples(gm).run(*inputs)
    report = pipeline.run_rules(gm, Options(implementation="binary", strict=True, verify=True), rules=[fuse_steps.RULE])
    found = gm(*inputs)
    assert torch.equal(found, expected) and found.stride() == expected.stride()
    names = (node.target if isinstance(node.target, str) else node.target.__name__
             for node in gm.graph.nodes if node.op.startswith("call_"))  # fmt: skip
    return Counter(names) + Counter(sites=len(report.sites))


def layers(steps: list[Tensor], n: Net) -> Tensor:
    return torch.stack([linear(step, n.w) for step in steps])


def images(steps: list[Tensor], n: Net) -> list[Tensor]:
    return [conv2d(step, n.k) for step in steps]


# what is called how often: of `numbers` and `spikes`, of the joined inputs, of what one call gives
INPUTS: dict[str, tuple[Callable[[Any, Net], Tensor], dict[str, int]]] = {
    "each": (lambda x, n: layers([(s := spikes(x))[0], s[1], s[2], s[3]], n), {"flatten": 1, "narrow": 0, "cat": 0}),
    "selected": (lambda x, n: layers([s.select(0, t) for s in [spikes(x)] for t in range(T)], n),
                 {"flatten": 1, "cat": 0}),
    "the first": (lambda x, n: layers([s[t] for s in [spikes(x)] for t in range(2)], n), {"flatten": 1, "narrow": 1}),
    "the last": (lambda x, n: layers([s[t] for s in [spikes(x)] for t in (1, 2, 3)], n), {"flatten": 1, "narrow": 1}),
    "backwards": (lambda x, n: layers([s[t] for s in [spikes(x)] for t in (3, 2, 1, 0)], n), {"flatten": 0, "cat": 1}),
    "some": (lambda x, n: layers([s[t] for s in [spikes(x)] for t in (0, 2)], n), {"flatten": 0, "cat": 1}),
    "from behind": (lambda x, n: layers([s[t] for s in [spikes(x)] for t in (-3, -2, -1)], n),
                    {"flatten": 0, "cat": 1}),
    "of the batch": (lambda x, n: layers([s.select(1, t) for s in [spikes(x)] for t in range(B)], n), {"cat": 1}),
    "of two": (lambda x, n: layers([spikes(x)[0], spikes(x + 1)[1]], n), {"flatten": 0, "cat": 1}),
    "apart": (lambda x, n: layers([spikes(x[t]) for t in range(T)], n), {"flatten": 0, "cat": 1}),
    "unbound": (lambda x, n: layers([s[t] for s in [spikes(x).unbind()] for t in range(2)], n),
                {"flatten": 1, "narrow": 1, "cat": 0}),
    "unbound from the batch": (lambda x, n: layers([s[t] for s in [spikes(x).unbind(1)] for t in range(B)], n),
                               {"flatten": 0, "cat": 1}),
}  # fmt: skip


@pytest.mark.parametrize(("function", "expected"), INPUTS.values(), ids=INPUTS)
def test_inputs_are_joined(function, expected):
    found = rewritten(function, *FLAT)
    assert found["linear"] == found["unflatten"] == found["sites"] == 1 and not found["stack"]
    assert {name: found[name] for name in expected} == expected


LOOPS: dict[str, tuple[Callable[[Any, Net], Tensor], tuple[int, ...], dict[str, int]]] = {
    # ---- which calls are alike
    "another weight": (lambda s, n: linear(s[0], n.w) + linear(s[1], n.v), FLAT, {"linear": 2, "sites": 0}),
    "two of each": (lambda s, n: linear(s[0], n.w) + linear(s[1], n.v) + linear(s[2], n.w) + linear(s[3], n.v), FLAT,
                    {"linear": 2}),
    "another bias": (lambda s, n: linear(s[0], n.w, bias=n.b) + linear(s[1], n.w, bias=n.c), FLAT,
                     {"linear": 2, "sites": 0}),
    "the same bias": (lambda s, n: linear(s[0], n.w, bias=n.b) + linear(s[1], n.w, bias=n.b), FLAT, {"linear": 1}),
    "another size": (lambda s, n: linear(s[0], n.w)[:1] + linear(s[1][:1], n.w), FLAT, {"linear": 2, "sites": 0}),
    "other strides": (lambda s, n: linear(s[0], n.w) + linear(s[1].t().contiguous().t(), n.w), FLAT,
                      {"linear": 2, "sites": 0}),
    "the same input": (lambda s, n: linear(s[0], n.w) + linear(s[0], n.w), FLAT, {"linear": 2, "sites": 0}),
    "one step": (lambda s, n: linear(s[0], n.w) + s[1].sum(), FLAT, {"linear": 1, "flatten": 0, "cat": 0, "sites": 0}),
    "one in the other": (lambda s, n: linear(linear(s[0], n.q), n.q), FLAT, {"linear": 2, "sites": 0}),
    # ---- what reads the results
    "sum": (lambda s, n: linear(s[0], n.w) + linear(s[1], n.w), FLAT, {"linear": 1, "select": 2}),
    "stacked elsewhere": (lambda s, n: torch.stack([linear(one, n.w) for one in s], 1), FLAT,
                          {"linear": 1, "stack": 1, "select": T}),
    "stacked backwards": (lambda s, n: torch.stack([linear(one, n.w) for one in s][::-1]), FLAT,
                          {"linear": 1, "stack": 1, "select": T}),
    "stacked and read": (lambda s, n: torch.stack(r := [linear(one, n.w) for one in s]) + r[1], FLAT,
                         {"linear": 1, "stack": 0, "select": 1, "unflatten": 1}),
    "concatenated": (lambda s, n: torch.cat([linear(one, n.w) for one in s]),
                     FLAT, {"linear": 1, "cat": 1, "select": T}),
    # ---- what else is joined
    "pooled": (lambda s, n: torch.stack([max_pool2d(one, 2) for one in images(s, n)]), IMAGES,
               {"conv2d": 1, "max_pool2d": 1, "select": 0}),
    "pooled to two": (lambda s, n: torch.stack([max_pool2d(one, 2) + max_pool2d(one, 3) for one in images(s, n)]),
                      IMAGES,
                      {"conv2d": 1, "max_pool2d": 2, "select": 2 * T}),
    "pooled twice alike": (lambda s, n: torch.stack([max_pool2d(one, 2) + max_pool2d(one, 2) for one in images(s, n)]),
                           IMAGES, {"conv2d": 1, "max_pool2d": 2 * T, "select": T}),
    "only one is pooled": (lambda s, n: max_pool2d((r := images(s, n))[0], 3) + sum(r[1:]), IMAGES,
                           {"conv2d": 1, "max_pool2d": 1, "select": T}),
    "made by a pool": (lambda s, n: torch.stack(images([max_pool2d(one, 2) for one in s], n)), IMAGES,
                       {"conv2d": 1, "max_pool2d": 1, "flatten": 1, "cat": 0}),
    "made by arithmetic": (lambda s, n: torch.stack(images([one * 2 for one in s], n)), IMAGES,
                           {"conv2d": 1, "mul": T, "cat": 1}),
    "made by casts": (lambda s, n: torch.stack([linear(one.to(torch.float64), w) for w in [n.w.double()] for one in s]),
                      FLAT, {"linear": 1, "to": T + 1, "cat": 1}),
    "flattened": (lambda s, n: torch.stack([one.flatten(1) for one in images(s, n)]), IMAGES,
                  {"conv2d": 1, "flatten": 2, "select": 0}),
    "flattened from behind": (lambda s, n: torch.stack([one.flatten(-3) for one in images(s, n)]), IMAGES,
                              {"conv2d": 1, "flatten": 2, "select": 0}),
    "flattened with the batch": (lambda s, n: torch.stack([one.flatten(0, 1) for one in images(s, n)]), IMAGES,
                                 {"conv2d": 1, "flatten": 2, "select": 0}),
    "viewed": (lambda s, n: torch.stack([one.view(B, -1) for one in images(s, n)]), IMAGES,
               {"conv2d": 1, "view": 0, "reshape": 1, "select": 0}),
    "reshaped": (lambda s, n: torch.stack([one.reshape(B, 6, 9) for one in images(s, n)]), IMAGES,
                 {"conv2d": 1, "reshape": 1, "select": 0}),
    "viewed as one": (lambda s, n: torch.stack([one.view(-1) for one in images(s, n)]), IMAGES,
                      {"conv2d": 1, "view": T, "reshape": 0, "select": T}),
    "viewed with other rows": (lambda s, n: torch.stack([one.view(2 * B, -1) for one in images(s, n)]), IMAGES,
                               {"conv2d": 1, "view": T, "reshape": 0, "select": T}),
    "viewed as bits": (lambda s, n: torch.stack([linear(one, n.w).view(torch.int32) for one in s]), FLAT,
                       {"linear": 1, "view": T, "select": T}),
    "unsqueezed": (lambda s, n: torch.stack([linear(one, n.w).unsqueeze(0) for one in s]), FLAT,
                   {"linear": 1, "unsqueeze": 0, "select": 0}),
    "unsqueezed from behind": (lambda s, n: torch.stack([linear(one, n.w).unsqueeze(-3) for one in s]), FLAT,
                               {"linear": 1, "unsqueeze": 0, "select": 0}),
    "unsqueezed elsewhere": (lambda s, n: torch.stack([linear(one, n.w).unsqueeze(1) for one in s]), FLAT,
                             {"linear": 1, "unsqueeze": 1, "select": 0}),
    "a row": (lambda s, n: torch.stack([linear(one, n.w)[0] for one in s]),
              ONE, {"linear": 1, "getitem": T, "stack": 0}),
    "a selected row": (lambda s, n: torch.stack([linear(one, n.w).select(0, 0) for one in s]), ONE,
                       {"linear": 1, "select": 0, "stack": 0}),
    "a row of two": (lambda s, n: torch.stack([linear(one, n.w)[0] for one in s]), FLAT,
                     {"linear": 1, "stack": 1, "select": T}),
    "the last row": (lambda s, n: torch.stack([linear(one, n.w)[-1] for one in s]), ONE,
                     {"linear": 1, "stack": 1, "select": T}),
    "a column": (lambda s, n: torch.stack([linear(one, n.w).select(1, 0) for one in s]), ONE,
                 {"linear": 1, "stack": 1, "select": 2 * T}),
    # ---- what must stay
    "written to": (lambda s, n: torch.stack([linear(one, n.w).add_(1) for one in s]), FLAT, {"linear": T, "add_": T}),
    "mixes rows": (lambda s, n: torch.stack([one.t() @ n.w.t()[:B] for one in s]), FLAT, {"matmul": T, "sites": 0}),
}  # fmt: skip


@pytest.mark.quick_cases(12)
@pytest.mark.parametrize(("function", "sizes", "expected"), LOOPS.values(), ids=LOOPS)
def test_loops(function, sizes, expected):
    def run(x: Any, n: Net) -> Tensor:
        s = spikes(x)
        return function([s[t] for t in range(T)], n)

    found = rewritten(run, *sizes)
    assert {name: found[name] for name in expected} == expected


def test_layers_on_anything_else_stay():
    found = rewritten(lambda x, n: layers([x[0], x[1]], n), *FLAT)
    assert found["linear"] == 2 and not found["sites"]


def test_the_last_step_of_a_cut_loop_stays_as_it_was(monkeypatch):
    monkeypatch.setattr(fuse_steps, "MOST_BYTES", 2 * B * 6 * 4)  # two steps of a linear layer's result
    found = rewritten(lambda x, n: layers([s[t] for s in [spikes(x)] for t in range(3)], n), *FLAT)
    assert found["linear"] == 2 and found["flatten"] == 1 and found["getitem"] == 3
