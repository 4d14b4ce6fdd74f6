"""The torch.compile backend: rewrite Dynamo's graph, then let Inductor compile it.

Rewriting happens here, not in Inductor's post-grad hooks, because those are skipped whenever a compilation cache hits.
A graph in which nothing was rewritten goes to Inductor exactly as it came.
"""

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, wraps
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import fx

import sparsecomp.ops
from sparsecomp import _compat
from sparsecomp.lowering.cache import artifact
from sparsecomp.ops.library import DIRECT
from sparsecomp.options import Options
from sparsecomp.passes import pipeline
from sparsecomp.passes.engine.rule import Density
from sparsecomp.passes.rules import parse_options
from sparsecomp.report import Report, remember

log = logging.getLogger("sparsecomp")
artifact.install()

NO_CUDA = "no CUDA device: layers on spikes stay dense unless an implementation is forced"


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
        options: see `Options`.

    Returns:
        The compiled function.

    Raises:
        OptionError: an unknown option or value.
        RuleError: a rule failed, under `options={"strict": True}`.
    """
    return compile_graph(gm, example_inputs, parse_options(mode, options), {})[0]


def compile_graph(
    gm: fx.GraphModule, example_inputs: Sequence[Any], options: Options, densities: Mapping[str, Density]
) -> tuple[Callable[..., Any], Report]:
    """Rewrite and compile one graph; `densities` are measured ones, by `passes.rule.site_key`."""
    notes: list[str] = []
    with _effort(options, notes.append):
        report = pipeline.run(gm, options, values=input_values(gm, example_inputs), densities=densities)
    for note in notes:
        report.note(note)
    note_device(report)
    remember(report)
    log.info("%d of %d sites rewritten", len(report.rewritten), len(report.sites))
    _compat.call_directly(frozenset(DIRECT))
    if not report.rewritten:
        return _compat.compile_fx(gm, example_inputs, options.mode, options.inductor, None), report
    with _compat.cache_key(f"sparsecomp:{sources_hash()}:{options.cache_key()}"):
        decompositions = sparsecomp.ops.decompositions
        compiled = _compat.compile_fx(gm, example_inputs, options.mode, options.inductor, decompositions)

    @wraps(compiled)
    def run(*arguments: Any) -> Any:
        # under CUDA graphs kernels are tuned in the warm-up call: nothing can be measured during capture
        with _effort(options, report.note):
            return compiled(*arguments)

    return (run if _tunes(options) else compiled), report


def _tunes(options: Options) -> bool:
    return options.mode.startswith("max-autotune")


def _effort(options: Options, note: Callable[[str], None]) -> AbstractContextManager[Any]:
    """Within it all candidates of a kernel are measured at its signature's first launch, under max-autotune."""
    if not _tunes(options):
        return nullcontext()
    from sparsecomp.lowering.tuning.autotune import effort_scope  # not for those who tune nothing

    return effort_scope("full", note=note)


def input_values(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> dict[fx.Node, torch.Tensor]:
    """The real tensors that a graph's placeholders stand for."""
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    pairs = zip(placeholders, example_inputs, strict=False)
    return {node: value for node, value in pairs if isinstance(value, torch.Tensor)}


def note_device(report: Report) -> None:
    """Say once a report, and once a process in the log, that there is no GPU."""
    if not torch.cuda.is_available():
        report.note(NO_CUDA)
        _log_once(NO_CUDA)


@cache
def _log_once(message: str) -> None:
    log.info(message)


@cache
def sources_hash() -> str:
    """A hash of sparsecomp's own code: a cached graph must not outlive the operators it was compiled with."""
    packages = [find_spec(name) for name in ("sparsecomp", "sparsecomp.passes", "sparsecomp.lowering")]
    folders = [Path(folder) for package in packages if package for folder in package.submodule_search_locations or ()]
    digest = hashlib.sha256()
    for source in sorted({path for folder in folders for path in folder.rglob("*.py")}):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]
