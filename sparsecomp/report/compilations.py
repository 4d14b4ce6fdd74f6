"""The reports of a model's compiled graphs, and which model was compiled latest."""

from collections.abc import Hashable
from weakref import WeakKeyDictionary

from sparsecomp.report.report import Report, merge


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
_last: Compilations | Report | None = None


def compilations_of(model: object | None) -> Compilations:
    """The compilations of what one call of `torch.compile` made; new ones if that is not known."""
    return Compilations() if model is None else _by_model.setdefault(model, Compilations())


def last_report() -> Report | None:
    """The report of the model that was compiled latest in this process, of all its graphs; None before the first."""
    return _last.report() if isinstance(_last, Compilations) else _last


def remember(report: Report) -> None:
    """Make `report` the latest one."""
    global _last
    _last = report
