"""Synthetic inputs of a report, small and large."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

#: Names that run code or end their element unless they are escaped.
EVIL_NAMES = (
    "<script>window.pwned = 1</script>",
    "</script><script>window.pwned = 2</script>",
    '"><img src=x onerror="window.pwned = 3">',
    "</title><svg onload='window.pwned = 4'>",
    '=HYPERLINK("http://example.invalid")',
    "{{ 7 * 7 }} &amp; \u2028\u2029 \udcff",
)

#: More of them: comments, links, templates, line separators, ends of other elements.
MORE_EVIL_NAMES = (
    "<!--<script>window.pwned = 5",
    "javascript:window.pwned=6//",
    "'\"`><b onmouseover=window.pwned=7>",
    "</style></textarea></noscript><!--",
    "@SUM(1+1)*cmd|' /C calc'!A0",
    "${window.pwned = 8}{% raw %}\u2028window.pwned = 9\u2029]]>--> \udcff",
)


WEIGHTS = pd.DataFrame(
    {
        "layer": ["input", "conv", "model"],
        "predictor": ["votes", "readout", "model"],
        "weight": [1.0, 0.5, 0.0],
        "support": [0.9, 0.8, 1.0],
        "echo": [0.1, 0.2, 1.0],
    }
)


@dataclass(frozen=True)
class AuditCase:
    """The attributes of an audit that a report needs."""

    frame: pd.DataFrame
    headline: str = "A headline of the audit."
    noise_rate: float = 0.05
    weights: pd.DataFrame = field(default_factory=WEIGHTS.copy)
    settings: Mapping[str, Any] = field(default_factory=lambda: {"seed": 0})
    descriptions: Mapping[str, str] = field(default_factory=lambda: {"score": "larger = more suspicious"})

    @property
    def ranked(self) -> pd.DataFrame:
        return self.frame.sort_values("score", ascending=False, kind="stable")


@dataclass(frozen=True)
class CurveCase:
    """Bins of a reliability curve."""

    confidence: Any
    accuracy: Any
    count: Any
    ece: float


@dataclass(frozen=True)
class LargeReport:
    """A written report of 100,000 rows, all of them suspects, and its audit."""

    path: Path
    audit: AuditCase


def make_audit(examples: int = 60, classes: int = 4, suspects: int = 30, seed: int = 0) -> AuditCase:
    """Random scores in the order of the data; the suspects have the largest ones."""
    generator = np.random.default_rng(seed)
    score = generator.normal(0, 3, examples)
    label = generator.integers(0, classes, examples)
    frame = pd.DataFrame(
        {
            "index": np.arange(examples),
            "label": label,
            "suggested": (label + generator.integers(1, classes, examples)) % classes,
            "score": score,
            "p_label": generator.uniform(0, 0.5, examples),
            "p_suggested": generator.uniform(0, 0.5, examples),
            "is_suspect": (-score).argsort().argsort() < suspects,
            "label_complexity": generator.exponential(1.0, examples),
        }
    )
    return AuditCase(frame)


def make_curve(shift: float) -> CurveCase:
    confidence = np.array([0.5, 0.7, 0.9, 0.98])
    return CurveCase(confidence, confidence - shift, np.array([10, 20, 30, 40]), shift)
