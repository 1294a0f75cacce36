"""The report: one self-contained HTML file with an audit, calibration, OOD scores and coverage."""

from ifcomp.report.data import OODScores, ReliabilityPair, ReportData, collect
from ifcomp.report.examples import LayerNeighbours, Neighbour, OODExample, Preview, TrainingExample
from ifcomp.report.render import build_report, current_provenance, render
from ifcomp.report.results import (
    ShowExamples,
    audit_parts,
    class_names_of,
    flagged_examples,
    ood_scores_of,
    reliability_of,
    training_data_of,
)

__all__ = [
    "LayerNeighbours",
    "Neighbour",
    "OODExample",
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
    "flagged_examples",
    "ood_scores_of",
    "reliability_of",
    "render",
    "training_data_of",
]
