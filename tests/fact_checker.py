"""Runs a graph and checks, at every read, that the values lie in the domain the analysis claims for them.

This is the oracle of the analysis' tests: a claim is compared with what torch computes, never with another claim.
"""

from typing import Any

import torch
from torch import fx

from sparsecomp.passes.facts.analysis import Analysis, analyse
from sparsecomp.reference.facts import SparsityFact, is_dyadic

ULPS = 8


class FactChecker(fx.Interpreter):
    """Executes `gm` and raises AssertionError where a value contradicts its fact."""

    def __init__(self, gm: fx.GraphModule, analysis: Analysis | None = None) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.analysis = analysis or analyse(gm)

    def run_node(self, n: fx.Node) -> Any:
        for argument in n.all_input_nodes:
            self._check(argument, self.analysis.fact(argument, at=n), f"read by {n.name}")
        result = super().run_node(n)
        if isinstance(result, torch.Tensor):
            self.env[n] = result
            self._check(n, self._fact_after(n), "as computed")
        return result

    def _fact_after(self, n: fx.Node) -> SparsityFact | None:
        history = self.analysis.histories.get(n, [])
        born = self.analysis.order[n]
        value = next((value for position, value in reversed(history) if position == born), None)
        return value if isinstance(value, SparsityFact) else None

    def _check(self, node: fx.Node, fact: SparsityFact | None, when: str) -> None:
        value = self.env.get(node)
        if fact is None or not isinstance(value, torch.Tensor):
            return
        factor = fact.scale
        if isinstance(factor, str):
            factor = self._factor(factor)
        check_values(value, fact, factor, f"{node.name} {when}: {fact.described()}")

    def _factor(self, name: str) -> torch.Tensor:
        for node, value in self.env.items():
            if node.name == name:
                return value
        found: Any = self.module
        for part in name.split("."):
            found = getattr(found, part)
        return found


def check_values(value: torch.Tensor, fact: SparsityFact, factor: float | torch.Tensor, message: str) -> None:
    """Asserts that every element of `value` obeys `fact`."""
    wide = value.detach().to(torch.float64)
    finite = torch.isfinite(wide)
    if isinstance(fact.scale, str) and not bool(torch.isfinite(torch.as_tensor(factor)).all()):
        return  # every claim assumes a finite factor
    assert not fact.finite or bool(finite.all()), f"not finite: {message}"
    wide = wide[finite]
    eps = torch.finfo(value.dtype).eps if value.dtype.is_floating_point else 0.0
    wide_factor = factor if isinstance(factor, torch.Tensor) else torch.tensor(factor, dtype=torch.float64)
    scale = wide_factor.detach().to(value.dtype if value.dtype.is_floating_point else torch.float64)
    scale = scale.to(torch.float64)
    if not fact.integral:
        _within(wide, fact.lo, fact.hi, message)
        return
    if not bool(torch.isfinite(scale)):
        # a number beyond the dtype still makes zeros of zeros
        assert bool((wide == 0).all()), message
        return
    if float(scale) == 0.0:
        assert bool((wide == 0).all()), message
        return
    grid = torch.round(wide / scale)
    exact = fact.exact and is_dyadic(fact.scale)
    tolerance = 0.0 if exact else ULPS * eps
    error = (wide - grid * scale).abs()
    assert bool((error <= tolerance * torch.clamp(wide.abs(), min=1.0)).all()), f"off the grid: {message}"
    assert bool((error[grid == 0] == 0).all()), f"inexact zero: {message}"
    _within(grid, fact.lo, fact.hi, message)


def _within(values: torch.Tensor, lo: int | None, hi: int | None, message: str) -> None:
    assert lo is None or bool((values >= lo).all()), f"below: {message}: {values.min() if values.numel() else ''}"
    assert hi is None or bool((values <= hi).all()), f"above: {message}: {values.max() if values.numel() else ''}"


def check(gm: fx.GraphModule, *inputs: Any) -> FactChecker:
    """Runs `gm` on `inputs` under the checker; gives the checker, with its analysis."""
    checker = FactChecker(gm)
    with torch.no_grad():
        checker.run(*inputs)
    return checker


def fact_at(analysis: Analysis, operator: str, argument: int = 0, which: int = 0) -> SparsityFact | None:
    """The fact of an argument of the `which`-th call whose target's name contains `operator`."""
    calls = [node for node in analysis.graph.nodes if _calls(node, operator)]
    node = calls[which]
    return analysis.fact(node.args[argument], at=node)


def _calls(node: fx.Node, operator: str) -> bool:
    if not node.op.startswith("call"):
        return False
    return operator in (getattr(node.target, "__name__", None) or str(node.target))
