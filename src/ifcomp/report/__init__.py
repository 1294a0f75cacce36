"""The report: one self-contained HTML file with an audit, calibration, complexity and coverage."""

from ifcomp.report.data import ComplexityGroups, ReliabilityPair, ReportData, collect
from ifcomp.report.examples import LayerNeighbours, Neighbour, Preview, TrainingExample
from ifcomp.report.render import build_report, current_provenance, render
from ifcomp.report.results import ShowExamples, audit_parts, class_names_of, complexity_of, reliability_of

__all__ = [
    "ComplexityGroups",
    "LayerNeighbours",
    "Neighbour",
    "Preview",
    "ReliabilityPair",
    "ReportData",
    "ShowExamples",
    "TrainingExample",
    "audit_parts",
    "build_report",
    "class_names_of",
    "collect",
    "complexity_of",
    "current_provenance",
    "reliability_of",
    "render",
]
