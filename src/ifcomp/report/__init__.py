"""The report: one self-contained HTML file with an audit, calibration, complexity and coverage."""

from ifcomp.report.data import ComplexityGroups, Preview, ReliabilityPair, ReportData, TrainingExample, collect
from ifcomp.report.render import build_report, current_provenance, render

__all__ = [
    "ComplexityGroups",
    "Preview",
    "ReliabilityPair",
    "ReportData",
    "TrainingExample",
    "build_report",
    "collect",
    "current_provenance",
    "render",
]
