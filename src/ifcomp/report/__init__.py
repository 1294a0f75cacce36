"""The report: one self-contained HTML file with an audit, calibration, OOD scores and coverage."""

from ifcomp.report.data import OODScores, ReliabilityPair, ReportData, collect
from ifcomp.report.examples import LayerNeighbours, Neighbour, Preview, TrainingExample
from ifcomp.report.render import build_report, current_provenance, render
from ifcomp.report.results import ShowExamples, audit_parts, class_names_of, ood_scores_of, reliability_of

__all__ = [
    "LayerNeighbours",
    "Neighbour",
    "OODScores",
    "Preview",
    "ReliabilityPair",
    "ReportData",
    "ShowExamples",
    "TrainingExample",
    "audit_parts",
    "build_report",
    "class_names_of",
    "collect",
    "current_provenance",
    "ood_scores_of",
    "reliability_of",
    "render",
]
