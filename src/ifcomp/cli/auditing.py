"""The audit of a run and its report, for ``ifcomp audit`` and ``ifcomp report``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ifcomp import Checkpoint, IFComp
from ifcomp.cli import options
from ifcomp.cli.explaining import explanations
from ifcomp.cli.opened import Run
from ifcomp.curvature.factors import Damping
from ifcomp.data.sources import Source
from ifcomp.errors import SettingError
from ifcomp.report import build_report, current_provenance
from ifcomp.tasks.mislabel import AUDIT_DAMPING, LabelAudit, audit_labels

#: Suspicious examples that a report shows with a picture.
PREVIEWS = 200

#: Suspicious examples that a report shows with the training examples behind their labels.
EXPLAINED = 50


def check_shares(fraction: float | None, noise_rate: float | None) -> None:
    """Raise SettingError if both say how many labels are suspects."""
    if fraction is not None and noise_rate is not None:
        raise SettingError("Give --fraction or --noise-rate, not both: each says how many labels are suspects.")


def audit_damping(text: str | None) -> Damping:
    """What ``--damping`` says, or the default of audits."""
    given = options.damping(text)
    return AUDIT_DAMPING if given is None else given


def audit_run(
    ifc: IFComp,
    source: Source,
    damping: Damping,
    fraction: float | None,
    noise_rate: float | None,
    checkpoint: Checkpoint | None = None,
) -> LabelAudit:
    """Score the data and sort its labels."""
    scores = ifc.score(source.batches(), damping=damping, checkpoint=checkpoint)
    return audit_labels(scores, fraction=fraction, noise_rate=noise_rate)


def write_report(
    path: str,
    opened: Run,
    ifc: IFComp,
    source: Source,
    audit: LabelAudit,
    damping: Damping,
    title: str | None = None,
    more: Mapping[str, Any] | None = None,
) -> None:
    """Write the report of an audit: the first examples in pictures, what stands behind the labels of suspects (with the
    damping of the audit), and ``more`` parts of `build_report`.
    """
    names: Sequence[str] | None = opened.class_names(source)
    first = audit.frame["index"].head(PREVIEWS).tolist()
    own = opened.is_training_data(source.spec)
    behind = explanations(ifc, source, audit.suspects["index"].head(EXPLAINED).tolist(), damping) if own else None
    build_report(
        path,
        title=title or f"Labels of {source.spec}",
        audit=audit,
        previews=dict(zip(first, source.preview(first), strict=True)),
        class_names=names,
        provenance=current_provenance(
            run=opened.path, model=opened.model, weights=opened.weights, data=source.spec, seed=ifc.settings.seed
        ),
        coverage=ifc.coverage,
        explanations=behind,
        max_previews=PREVIEWS,
        **(more or {}),
    )
