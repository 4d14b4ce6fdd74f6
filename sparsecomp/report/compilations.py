"""The reports of a model's compiled graphs, and which model was compiled latest."""

from collections.abc import Hashable
from weakref import WeakKeyDictionary

from sparsecomp.errors import InputError
from sparsecomp.report.report import Report, merge

_NOT_SEEN = "the model was not called yet, or Dynamo skips it as a whole: sparsecomp.explain(model, x) says why"


class Compilations:
    """The reports of one model's compiled graphs. One that is compiled anew, for another batch size, has one report."""

    def __init__(self) -> None:
        self._reports: dict[Hashable, Report] = {}

    def add(self, graph: Hashable, report: Report) -> None:
        """Keep the report of a graph, in place of an earlier one of the same; the model becomes the latest."""
        global _last
        self._reports[graph] = report
        _last = self

    def report(self, capture: str = "torch.compile") -> Report:
        """All graphs in one report."""
        return merge(self._reports.values(), capture)


_by_model: WeakKeyDictionary[object, Compilations] = WeakKeyDictionary()
_last: Compilations | Report = Compilations()


def compilations_of(model: object | None) -> Compilations:
    """The compilations of what one call of `torch.compile` made; new ones if that is not known."""
    return Compilations() if model is None else _by_model.setdefault(model, Compilations())


def last_report(model: object | None = None) -> Report:
    """The report of the model that was compiled latest in this process, of all its graphs.

    A model that Dynamo skips as a whole is never compiled, so that the latest one is another: `last_report(model)`
    tells of this one.

    Args:
        model: what `torch.compile` returned, or a module on which `compile` was called.

    Raises:
        InputError: `model` was not compiled.
    """
    found = _last if model is None else _of_model(model)
    report = found.report() if isinstance(found, Compilations) else found
    if not report.graphs:
        report.note(_NOT_SEEN)
    return report


def _of_model(model: object) -> Compilations:
    from sparsecomp import _compat  # loads Dynamo, and so Triton

    compiled = _compat.compilation_of(model)
    if compiled is None:
        raise InputError(
            f"{type(model).__name__} was not made by torch.compile: give what that returned; the report of "
            "what `optimize` returned is its `.report`"
        )
    return _by_model.get(compiled, Compilations())


def remember(report: Report) -> None:
    """Make `report` the latest one."""
    global _last
    _last = report
