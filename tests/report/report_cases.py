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


@dataclass(frozen=True)
class AuditCase:
    """The attributes of an audit that a report needs."""

    frame: pd.DataFrame
    threshold: float | None = 3.0
    noise_rate: float | None = 0.05
    settings: Mapping[str, Any] = field(default_factory=lambda: {"beta": 1.0, "alpha": 1.0})
    descriptions: Mapping[str, str] = field(default_factory=lambda: {"error": "-log p of the given label in nats"})


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
    """Random scores, most suspicious first, with indices that differ from ranks."""
    generator = np.random.default_rng(seed)
    error, parametric = generator.exponential(2.0, examples), generator.exponential(0.5, examples)
    order = np.argsort(-(error + parametric), kind="stable")
    label = generator.integers(0, classes, examples)
    frame = pd.DataFrame(
        {
            "rank": np.arange(1, examples + 1),
            "index": order,
            "label": label,
            "suggested_label": (label + generator.integers(1, classes, examples)) % classes,
            "label_probability": np.exp(-error[order]),
            "suggested_probability": generator.uniform(0, 1, examples) * (1 - np.exp(-error[order])),
            "error": error[order],
            "parametric_complexity": parametric[order],
            "stochastic_complexity": (error + parametric)[order],
            "label_complexity": (0.9 * (error + parametric))[order],
            "surprise": generator.exponential(1.0, examples),
            "is_suspect": np.arange(examples) < suspects,
        }
    )
    return AuditCase(frame)


def make_curve(shift: float) -> CurveCase:
    confidence = np.array([0.5, 0.7, 0.9, 0.98])
    return CurveCase(confidence, confidence - shift, np.array([10, 20, 30, 40]), shift)
