"""What a compilation did and did not do, and why: a rewrite nobody can inspect is a rewrite nobody can trust."""

from sparsecomp.report.compilations import Compilations, compilations_of, last_report, remember
from sparsecomp.report.node import Node
from sparsecomp.report.report import PassRecord, Report, merge
from sparsecomp.report.site import Estimate, Layer, Site
from sparsecomp.report.text import rendered

__all__ = [
    "Compilations", "Estimate", "Layer", "Node", "PassRecord", "Report", "Site", "compilations_of", "last_report",
    "merge", "remember", "rendered",
]  # fmt: skip
