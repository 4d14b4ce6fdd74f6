"""What must hold for a program: its facts, and what its rewritten graph computes.

Facts are compared with the values that flow. Results and gradients of the rewritten graph are compared with eager, and
where they differ by more than rounding, with float64: they may be no worse than eager's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

import sparsecomp.ops  # noqa: F401  (registers the operators)
from sparsecomp.options import Options
from sparsecomp.passes import pipeline
from sparsecomp.passes.facts.analysis import analyse
from sparsecomp.passes.facts.registry import LostKind
from tests.fact_checker import FactChecker
from tests.fuzz.program import Program, annotate

_TO_DOUBLE = {"float": "double", "half": "double", "bfloat16": "double"}
_HALVES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Failure:
    """What went wrong: `kind` names the property that does not hold."""

    kind: str
    detail: str


@dataclass(frozen=True)
class Outcome:
    """What became of a program: its first failure, and whether forced sparse operators replaced a layer."""

    failure: Failure | None
    rewritten: bool = False


class Broken(Exception):
    """Eager itself refuses the program, or its backward pass."""


@dataclass
class Case:
    """A graph and what it is called with.

    Attributes:
        training: gradients are asked for.
        exact: float64 computes the same function.
    """

    gm: fx.GraphModule
    inputs: list[Tensor]
    training: bool
    exact: bool

    def fresh(self) -> list[Tensor]:
        """Copies of the inputs, which a call may write to."""
        return [value.detach().clone().requires_grad_(value.requires_grad) for value in self.inputs]


@dataclass
class Result:
    """Outputs of a call, and gradients of those of its inputs that have some."""

    outputs: list[Tensor]
    gradients: list[Tensor | None]
    written: list[Tensor]


def run(gm: fx.GraphModule, inputs: Sequence[Tensor], training: bool) -> Result:
    """One call, and its backward pass.

    Raises:
        Broken: torch refuses it.
    """
    try:
        torch.manual_seed(0)
        with torch.set_grad_enabled(training):
            outputs = list(gm.forward(*inputs))
            return Result([out.detach().clone() for out in outputs], _gradients(outputs, inputs), list(inputs))
    except RuntimeError as error:
        raise Broken(str(error)) from error


def _gradients(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor | None]:
    leaves = [value for value in inputs if value.requires_grad]
    total = None
    for out in outputs:
        if out.requires_grad:
            weight = (torch.arange(out.numel()) % 5 - 2).reshape(out.shape).to(out.dtype)
            term = (out * weight).sum().double()
            total = term if total is None else total + term
    if total is None or not leaves:
        return []
    return list(torch.autograd.grad(total, leaves, allow_unused=True))


def check(case: Case) -> Outcome:
    """The first property that does not hold, if any.

    Raises:
        Broken: eager refuses the program.
    """
    expected = run(case.gm, case.fresh(), case.training)
    failure = _facts(case, case.gm, "fact") or _facts(case, _without_examples(case.gm), "fact without shapes")
    if failure is not None:
        return Outcome(failure)
    exact = _in_float64(case)
    binary, dense = (_rewrite(case, way, expected, exact) for way in ("binary", "dense"))
    return Outcome(binary.failure or dense.failure, binary.rewritten)


def _facts(case: Case, gm: fx.GraphModule, kind: str) -> Failure | None:
    analysis = analyse(gm)
    for why in analysis.reasons.values():
        if why.kind is LostKind.FAILED:
            return Failure("the analysis fails", str(why))
    try:
        torch.manual_seed(0)
        with torch.set_grad_enabled(case.training):
            FactChecker(gm, analysis).run(*case.fresh())
    except AssertionError as error:
        return Failure(kind, str(error).split("\n\nWhile executing")[0])
    return None


def _without_examples(gm: fx.GraphModule) -> fx.GraphModule:
    bare = _copied(gm)
    for node in bare.graph.nodes:
        node.meta.clear()
    return bare


def _copied(gm: fx.GraphModule) -> fx.GraphModule:
    """The same graph, nodes anew; stand-ins are shared."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    return fx.GraphModule(torch.nn.Module(), graph)


def _rewrite(case: Case, implementation: str, expected: Result, exact: Result | None) -> Outcome:
    gm = _copied(case.gm)
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    values = {node: value for node, value in zip(placeholders, case.inputs, strict=True) if "weight" in node.name}
    options = Options(implementation=implementation, neurons="fuse", strict=True, verify=True)
    try:
        with torch.set_grad_enabled(case.training):
            report = pipeline.run_rules(gm, options, values=values)
    except Exception as error:
        return Outcome(Failure(f"the rewrite fails ({implementation})", f"{type(error).__name__}: {error}"))
    if not report.rewritten:
        return Outcome(None)
    try:
        found = run(gm, case.fresh(), case.training)
    except Broken as error:
        return Outcome(Failure(f"the rewritten graph fails ({implementation})", str(error)), True)
    return Outcome(_compared(found, expected, exact, implementation), True)


def _compared(found: Result, expected: Result, exact: Result | None, implementation: str) -> Failure | None:
    for kind in ("outputs", "gradients", "written"):
        ours, theirs = getattr(found, kind), getattr(expected, kind)
        judges = [None] * len(theirs) if exact is None else getattr(exact, kind)
        if len(ours) != len(theirs):
            return Failure(f"{kind} ({implementation})", f"{len(ours)} of {len(theirs)}")
        for place, (one, eager, judge) in enumerate(zip(ours, theirs, judges, strict=True)):
            problem = _difference(one, eager, judge)
            if problem:
                return Failure(f"{kind} ({implementation})", f"number {place}: {problem}")
    return None


def _difference(one: Tensor | None, eager: Tensor | None, judge: Tensor | None) -> str:
    """How a tensor differs from eager's by more than rounding and from float64 by more than eager; empty if not."""
    if one is None or eager is None:
        given = one if one is not None else eager
        return "" if given is None or not given.any() else "a gradient on one side only"
    if (one.dtype, one.shape) != (eager.dtype, eager.shape):
        return f"{one.dtype} {tuple(one.shape)} for {eager.dtype} {tuple(eager.shape)}"
    a, b = one.detach().double(), eager.detach().double()
    eps = torch.finfo(one.dtype).eps if one.is_floating_point() else 0.0
    finite = b[b.isfinite()].abs()
    room = 16 * eps * max(1.0, float(finite.max()) if finite.numel() else 1.0)
    if torch.allclose(a, b, rtol=0, atol=room, equal_nan=True):
        return ""
    if judge is not None:
        c = judge.detach().double()
        ours, theirs = ((value - c).abs().nan_to_num(0.0, float("inf")) for value in (a, b))
        same_holes = torch.equal(a.isnan(), c.isnan())
        if same_holes and bool((ours <= 2 * theirs + room).all()):
            return ""
    worst = int((a - b).abs().nan_to_num(float("inf")).argmax())
    return f"{one.flatten()[worst]} for eager's {eager.flatten()[worst]}"


def _in_float64(case: Case) -> Result | None:
    """The program in float64, None where that is another program, or one that torch refuses."""
    if not case.exact:
        return None
    gm = _copied(case.gm)
    for node in gm.graph.nodes:
        node.args, node.kwargs = fx.node.map_aggregate((node.args, node.kwargs), _widened)
        if node.op == "call_method":
            node.target = _TO_DOUBLE.get(str(node.target), node.target)
    gm.recompile()
    wide = [value.detach().clone() for value in case.inputs]
    wide = [value.double() if value.is_floating_point() else value for value in wide]
    for value, old in zip(wide, case.inputs, strict=True):
        value.requires_grad_(old.requires_grad)
    try:
        return run(gm, wide, case.training)
    except Broken:
        return None


def _widened(argument: Any) -> Any:
    return torch.float64 if argument in _HALVES and isinstance(argument, torch.dtype) else argument


def minimised(case: Case, failure: Failure, tries: int = 300) -> Case:
    """A smaller program of which the same property does not hold."""
    best, before = case, -1
    while before != len(best.gm.graph.nodes) and tries > 0:
        before = len(best.gm.graph.nodes)
        for name in [node.name for node in reversed(best.gm.graph.nodes)]:
            for change in (_drop_output, _replace, _erase):
                tries -= 1
                smaller = change(best, name)
                if smaller is not None and _fails_alike(smaller, failure):
                    best = smaller
                    break
    return best


def _fails_alike(case: Case, failure: Failure) -> bool:
    try:
        annotate(case.gm, case.inputs)
        found = check(case).failure
    except Exception:
        return False
    return found is not None and found.kind == failure.kind


def _edited(case: Case, name: str) -> tuple[Case, fx.Node | None]:
    twin = Case(_copied(case.gm), list(case.inputs), case.training, case.exact)
    return twin, next((node for node in twin.gm.graph.nodes if node.name == name), None)


def _drop_output(case: Case, name: str) -> Case | None:
    twin, node = _edited(case, name)
    output = next(iter(reversed(twin.gm.graph.nodes)))
    if node is None or node not in output.all_input_nodes or len(output.args[0]) < 2:
        return None
    output.args = (tuple(one for one in output.args[0] if one is not node),)
    twin.gm.recompile()
    return twin


def _replace(case: Case, name: str) -> Case | None:
    twin, node = _edited(case, name)
    if node is None or not node.op.startswith("call") or not node.users:
        return None
    source = next((one for one in node.all_input_nodes if _alike(one, node)), None)
    if source is None:
        return None
    node.replace_all_uses_with(source)
    twin.gm.graph.erase_node(node)
    twin.gm.recompile()
    return twin


def _alike(a: fx.Node, b: fx.Node) -> bool:
    one, other = a.meta.get("example_value"), b.meta.get("example_value")
    both = isinstance(one, Tensor) and isinstance(other, Tensor)
    return both and one.shape == other.shape and one.dtype == other.dtype


def _erase(case: Case, name: str) -> Case | None:
    twin, node = _edited(case, name)
    if node is None or node.users or node.op == "output":
        return None
    if node.op == "placeholder":
        place = [one.name for one in twin.gm.graph.nodes if one.op == "placeholder"].index(name)
        del twin.inputs[place]
    twin.gm.graph.erase_node(node)
    twin.gm.recompile()
    return twin


def reproducer(case: Case) -> str:
    """The program as code, and its inputs."""
    lines = [case.gm.code.strip()]
    placeholders = [node.name for node in case.gm.graph.nodes if node.op == "placeholder"]
    for name, value in zip(placeholders, case.inputs, strict=True):
        grad = ", requires_grad=True" if value.requires_grad else ""
        lines.append(f"{name} = torch.tensor({value.tolist()}, dtype={value.dtype}{grad})")
    return "\n".join([*lines, f"# training={case.training}"])


def case_of(program: Program) -> Case:
    """The finished program.

    Raises:
        Broken: torch refuses it on stand-ins.
    """
    try:
        gm = program.finish()
    except (RuntimeError, ArithmeticError) as error:
        raise Broken(str(error)) from error
    return Case(gm, list(program.inputs.values()), program.training, program.exact)
