"""The torch.compile backend: rewrite Dynamo's graph, then let Inductor compile it.

Rewriting happens here, not in Inductor's post-grad hooks, because those are skipped whenever a compilation cache hits.
A graph in which nothing was rewritten goes to Inductor exactly as it came.
"""

import hashlib
import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial, wraps
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import fx

import sparsecomp.ops
from sparsecomp import _compat
from sparsecomp.compiler.capture import Graph
from sparsecomp.errors import SparsecompError
from sparsecomp.lowering.cache import artifact
from sparsecomp.ops.library import DIRECT, KEPT
from sparsecomp.options import Options
from sparsecomp.passes.engine.constants import Constants
from sparsecomp.passes.engine.rule import Density
from sparsecomp.passes.spiking import saved_spikes
from sparsecomp.passes.spiking.byte_frames import sum_maps
from sparsecomp.report import Compilations, Report, compilations_of

log = logging.getLogger("sparsecomp")
artifact.install()


@_compat.passes_errors(SparsecompError)
def sparsecomp_backend(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | Options | None = None,
) -> Callable[..., Any]:
    """The backend behind `torch.compile(model, backend="sparsecomp")`.

    Args:
        gm: Dynamo's graph.
        example_inputs: its inputs.
        mode: torch.compile's mode, with torch's meaning.
        options: see `Options`. torch passes them on only when the model is first called; an `Options` is checked where
            it is made.

    Returns:
        The compiled function.

    Raises:
        OptionError: an unknown option or value.
        RuleError: a rule failed, under `options={"strict": True}`.
    """
    compilations = compilations_of(_compat.compiled_by())
    return compile_graph(gm, example_inputs, Options.parse(mode, options), {}, compilations)


def compile_graph(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    densities: Mapping[str, Density],
    compilations: Compilations,
) -> Callable[..., Any]:
    """Rewrite and compile one graph of a model, whose report goes to the model's `compilations`."""
    graph, notes = Graph.of_dynamo(gm, example_inputs, densities, options), []
    with _effort(options, notes.append):
        report = graph.rewrite(options)
    for note in notes:
        report.note(note)
    report.graph_breaks = _compat.graph_break_of(gm)
    compilations.add(_identity(graph), report)
    log.info("%d of %d sites rewritten", len(report.rewritten), len(report.sites))
    _compat.call_directly(frozenset(DIRECT), frozenset(KEPT), _REPLAYED)
    if report.changed:
        sum_maps(gm)
    partition = _partition(graph, options)
    if partition is not None:
        report.note(_SAVED)
    if not report.changed and partition is None and not _has_ours(gm):
        return _compat.compile_fx(gm, example_inputs, options.mode, options.inductor, None)
    constants = Constants(gm, example_inputs)
    with _compat.cache_key(f"sparsecomp:{sources_hash()}:{options.cache_key()}"):
        decompositions = sparsecomp.ops.decompositions
        compiled = _compat.compile_fx(gm, example_inputs, options.mode, options.inductor, decompositions, partition)

    return _tuning(options, report, _following(constants, report, compiled) if constants else compiled)


def _following(constants: Constants, report: Report, compiled: Callable[..., Any]) -> Callable[..., Any]:
    """What looks before each call whether the constants are still those of its inputs."""
    inner = _compat.undisabled(compiled)  # Dynamo keeps off a backend's function and all that it calls

    @wraps(compiled)
    def run(*arguments: Any) -> Any:
        if constants.follow(arguments):
            report.note(_NOT_FROZEN)
        return inner(*arguments)

    return run


def _tuning(options: Options, report: Report, compiled: Callable[..., Any]) -> Callable[..., Any]:
    """What tunes kernels in each call, if they are to be: under CUDA graphs in the warm-up one, since nothing can be
    measured during capture."""
    if not _tunes(options):
        return compiled

    @wraps(compiled)
    def run(*arguments: Any) -> Any:
        with _effort(options, report.note):
            return compiled(*arguments)

    return run


def _has_ours(gm: fx.GraphModule) -> bool:
    """Whether an operator of ours is in a graph, or in one within it: a cached one must not outlive our code."""
    graphs = (module.graph for module in gm.modules() if isinstance(module, fx.GraphModule))
    return any(getattr(node.target, "namespace", "") == "sparsecomp" for graph in graphs for node in graph.nodes)


def _partition(graph: Graph, options: Options) -> _compat.Partition | None:
    """How a graph that trains a spiking network is cut in forward and backward, if not as torch does it."""
    trains = graph.gradients and any(value.requires_grad for value in graph.values.values())
    if "all" in options.disable or not trains or not saved_spikes.has_spikes(graph.gm):
        return None
    return partial(saved_spikes.partitioned, low=options.memory == "low")


_REPLAYED = "sparsecomp.lowering.launch.replay.Replayed"
_SAVED = "the backward gets spikes as bits, and computes membranes again"
_NOT_FROZEN = "a weight that the option frozen promises to stay was replaced or written to: its constant was made anew"


def _identity(graph: Graph) -> Hashable:
    """The same for a graph that is compiled anew, such as for another batch size.

    That is of the same code, and the code of a layer's class serves all its layers: they differ in their parameters.
    """
    parameters = [id(value) for value in graph.values.values() if isinstance(value, torch.nn.Parameter)]
    return _compat.compiled_frame(), *parameters


def _tunes(options: Options) -> bool:
    return options.mode.startswith("max-autotune")


def _effort(options: Options, note: Callable[[str], None]) -> AbstractContextManager[Any]:
    """Within it all candidates of a kernel are measured at its signature's first launch, under max-autotune."""
    if not _tunes(options):
        return nullcontext()
    from sparsecomp.lowering.tuning.autotune import effort_scope  # not for those who tune nothing

    return effort_scope("full", note=note)


@cache
def sources_hash() -> str:
    """A hash of sparsecomp's own code: a cached graph must not outlive the operators it was compiled with."""
    packages = [find_spec(name) for name in ("sparsecomp", "sparsecomp.passes", "sparsecomp.lowering")]
    folders = [Path(folder) for package in packages if package for folder in package.submodule_search_locations or ()]
    digest = hashlib.sha256()
    for source in sorted({path for folder in folders for path in folder.rglob("*.py")}):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]
