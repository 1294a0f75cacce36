"""The report: one self-contained HTML file with an audit, calibration, complexity and coverage."""

from ifcomp.report.data import ComplexityGroups, ReliabilityPair, ReportData, collect
from ifcomp.report.examples import LayerNeighbours, Neighbour, Preview, TrainingExample
from ifcomp.report.render import build_report, current_provenance, render

__all__ = [
    "ComplexityGroups",
    "LayerNeighbours",
    "Neighbour",
    "Preview",
    "ReliabilityPair",
    "ReportData",
    "TrainingExample",
    "build_report",
    "collect",
    "current_provenance",
    "render",
]
