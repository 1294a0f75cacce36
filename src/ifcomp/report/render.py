"""Rendering of a report as one HTML file."""

from __future__ import annotations

import base64
import hashlib
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib import resources
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup
from numpy.typing import ArrayLike

from ifcomp._version import __version__
from ifcomp.io.files import atomic_write
from ifcomp.layers.coverage import Coverage
from ifcomp.report import charts, summary
from ifcomp.report.data import Audit, OODScores, ReliabilityPair, ReportData, collect
from ifcomp.report.examples import LayerNeighbours, Neighbour, OODExample, Preview, TrainingExample
from ifcomp.report.payload import class_texts, preview_content, table_payload

#: Headings of the columns.
COLUMN_TITLES = {
    "rank": "Rank",
    "index": "Example",
    "label": "Given",
    "suggested": "Suggested",
    "p_label": "p given",
    "p_suggested": "p suggested",
    "score": "Suspicion",
    "label_complexity": "Label complexity",
}

_ENVIRONMENT = Environment(
    loader=PackageLoader("ifcomp.report"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_ENVIRONMENT.filters |= {"px": "{:.1f}".format, "thousands": "{:,}".format}


def build_report(
    path: str | os.PathLike[str],
    *,
    title: str,
    audit: Audit | None = None,
    calibration: ReliabilityPair | None = None,
    ood: OODScores | None = None,
    explanations: Mapping[int, Iterable[TrainingExample | tuple[Any, ...]]] | None = None,
    neighbours: Mapping[int, Iterable[LayerNeighbours]] | None = None,
    previews: Mapping[int, Preview] | None = None,
    class_names: Sequence[str] | None = None,
    provenance: Mapping[str, Any] | None = None,
    coverage: Coverage | None = None,
    max_previews: int = 200,
    predictions: ArrayLike | None = None,
    apply_command: str | None = None,
) -> Path:
    """Write a report: one self-contained HTML file. Atomic.

    Larger = more surprising, more suspicious; codelengths are in nats. Parts that are not given are left out, and
    hints name the options that add them.

    Args:
        path: File to write.
        title: Heading of the report.
        audit: A label audit, such as `ifcomp.tasks.audit.LabelAudit`.
        calibration: Reliability curves before and after calibration.
        ood: Scores of held-out and new inputs, and the threshold of the detector.
        explanations: Training examples that support and contradict the label of a suspect, by index of the suspect;
            each a `TrainingExample` or a tuple of its fields.
        neighbours: Nearest examples of a suspect per layer, largest weight first, by index of the suspect.
        previews: Previews of examples by index; the most suspicious ones are used.
        class_names: Names of the classes 0 ... K-1.
        provenance: Origin of the results, such as the result of `current_provenance`.
        coverage: Parameters that the fit covers: `IFComp.coverage`.
        max_previews: Largest number of examples with a preview.
        predictions: Class that the model predicts for every audited example, [n].
        apply_command: Command that carries out the decisions, shown next to their export. None stands for one without
            the name of the data.

    Returns:
        The path.

    Raises:
        SettingError: If there is nothing to report, or a setting is invalid.
        DataError: If a part is invalid; names the part.
        StorageError: If the file cannot be written.
    """
    page = render(
        collect(
            title=title,
            audit=audit,
            calibration=calibration,
            ood=ood,
            explanations=explanations,
            neighbours=neighbours,
            previews=previews,
            class_names=class_names,
            provenance=provenance,
            coverage=coverage,
            max_previews=max_previews,
            predictions=predictions,
            apply_command=apply_command,
        )
    )
    with atomic_write(path) as scratch:
        scratch.write_text(page, encoding="utf-8", errors="replace")
    return Path(path)


def render(data: ReportData) -> str:
    """Return the report as HTML. All text of the user is escaped, and only the script of the page may run."""
    style, script = _source("report.css"), _source("report.js")
    audit = data.audit
    return _ENVIRONMENT.get_template("report.html.jinja").render(
        data=data,
        policy=_policy(style, script),
        style=style,
        script=script,
        answers=summary.answers(data),
        hints=summary.hints(data),
        confusions=() if audit is None else summary.confusions(audit),
        matrices=_matrices(data),
        gallery=[] if data.ood is None else [_gallery_item(example, data) for example in data.ood.examples],
        classes=[] if audit is None else class_texts(audit, data.class_names),
        payload=None if audit is None else _json(table_payload(audit, data)),
        unshown=audit is not None and bool(data.previews) and audit.frame["is_suspect"].sum() > data.max_previews,
        reliability=None if data.calibration is None else charts.reliability(data.calibration),
        ood_chart=None if data.ood is None else charts.histogram(data.ood.groups, data.ood.threshold),
        layers=[] if audit is None else audit.weights.to_dict("records"),
        columns=[] if audit is None else _column_titles(audit),
        version=__version__,
    )


def current_provenance(**more: Any) -> dict[str, str]:
    """Return date, versions and platform, together with the given entries, such as ``command`` or ``seed``."""
    packages = {name: version(name) for name in ("torch", "numpy", "pandas", "scikit-learn")}
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "ifcomp": __version__,
        "python": platform.python_version(),
        **packages,
        "platform": platform.platform(),
        **{name: str(value) for name, value in more.items()},
    }


def _matrices(data: ReportData) -> dict[str, summary.Matrix | None]:
    """Return the confusion matrices of the page by name; None for those of too many classes."""
    if data.audit is None:
        return {}
    frame, classes = data.audit.frame, len(class_texts(data.audit, data.class_names))
    suspects = frame[frame["is_suspect"].astype(bool)]
    matrices = {"suggested": summary.matrix(suspects["label"].tolist(), suspects["suggested"].tolist(), classes)}
    if data.predictions is not None:
        predicted = data.predictions.tolist()
        classes = max(classes, max(predicted) + 1)
        matrices = {"predicted": summary.matrix(frame["label"].tolist(), predicted, classes), **matrices}
    return matrices


def _gallery_item(example: OODExample, data: ReportData) -> dict[str, Any]:
    """Return the texts and previews of a flagged input."""

    def name_of(label: int) -> str:
        return str(label) if data.class_names is None else data.class_names[label]

    def near_item(near: Neighbour) -> dict[str, Any]:
        return {"index": near.index, "label": name_of(near.label), "preview": _shown(near.preview)}

    return {
        "data": example.data,
        "index": example.index,
        "score": example.score,
        "prediction": name_of(example.prediction),
        "confidence": example.confidence,
        "preview": _shown(example.preview),
        "nearest": [near_item(near) for near in example.nearest],
    }


def _shown(preview: Preview | None) -> dict[str, Any] | None:
    return None if preview is None else preview_content(preview)


def _source(name: str) -> Markup:
    """Read a file of the page, which is trusted and not escaped."""
    text = resources.files("ifcomp.report").joinpath("templates", name).read_text(encoding="utf-8")
    return Markup(text)


def _json(value: Any) -> Markup:
    """Return JSON that cannot end its script element: <, >, & and characters beyond ASCII are escaped."""
    return htmlsafe_json_dumps(value, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def _policy(style: str, script: str) -> str:
    """Return a Content-Security-Policy that allows our style and script by hash, and images from data URIs."""

    def digest(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    return (
        f"default-src 'none'; script-src {digest(script)}; style-src {digest(style)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _column_titles(audit: Audit) -> list[dict[str, str]]:
    return [
        {"name": name, "title": title}
        for name, title in COLUMN_TITLES.items()
        if name == "rank" or name in audit.frame.columns
    ]
