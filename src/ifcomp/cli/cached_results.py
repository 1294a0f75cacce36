"""Results as tensors and plain JSON, for the cache of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from pandas.api.types import is_bool_dtype, is_numeric_dtype
from torch import Tensor

from ifcomp.evidence.members import Evidence, Member
from ifcomp.tasks.audit import LabelAudit
from ifcomp.tasks.ood_rule import OODRule
from ifcomp.tasks.ood_table import OODTable


def ood_parts(table: OODTable) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return frame and nearest training examples of a table of OOD scores as tensors by name and plain JSON."""
    tensors = {} if table.nearest is None else {"nearest": _tensor(table.nearest.astype(np.int32))}
    return tensors, {"frame": _put_frame(tensors, "frame", table.frame)}


def ood_from_parts(rule: OODRule, tensors: Mapping[str, Tensor], plain: Mapping[str, Any]) -> OODTable:
    """Return the table of `ood_parts` for the rule of its detector."""
    nearest = tensors["nearest"].numpy() if "nearest" in tensors else None
    return OODTable(_get_frame(tensors, "frame", plain["frame"]), rule, nearest=nearest)


def audit_parts(audit: LabelAudit) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return an audit with all its evidence as tensors by name and plain JSON."""
    evidence = audit.evidence
    tensors = {
        "pred_probs": _tensor(audit.pred_probs),
        "labels": _tensor(evidence.labels),
        "reference_labels": _tensor(evidence.reference_labels),
    }
    for place, member in enumerate(evidence.members):
        tensors[f"members/{place}"] = _tensor(member.probabilities)
    for place, neighbours in enumerate(evidence.neighbours.values()):
        tensors[f"neighbours/{place}"] = _tensor(neighbours.astype(np.int32))
    plain = {
        "frame": _put_frame(tensors, "frame", audit.frame),
        "weights": _put_frame(tensors, "weights", audit.weights),
        "influential": None if audit.influential is None else _put_frame(tensors, "influential", audit.influential),
        "noise_rate": float(audit.noise_rate),
        "memorised": float(audit.memorised),
        "settings": dict(audit.settings),
        "members": [[member.layer, member.predictor, member.is_trained] for member in evidence.members],
        "neighbours": list(evidence.neighbours),
        "is_left_out": evidence.is_left_out,
    }
    return tensors, plain


def audit_from_parts(tensors: Mapping[str, Tensor], plain: Mapping[str, Any]) -> LabelAudit:
    """Return the audit of `audit_parts`."""
    members = [
        Member(layer, predictor, tensors[f"members/{place}"].numpy(), is_trained)
        for place, (layer, predictor, is_trained) in enumerate(plain["members"])
    ]
    neighbours = {layer: tensors[f"neighbours/{place}"].numpy() for place, layer in enumerate(plain["neighbours"])}
    labels, reference_labels = tensors["labels"].numpy(), tensors["reference_labels"].numpy()
    columns = plain["influential"]
    return LabelAudit(
        _get_frame(tensors, "frame", plain["frame"]),
        tensors["pred_probs"].numpy(),
        plain["noise_rate"],
        plain["memorised"],
        _get_frame(tensors, "weights", plain["weights"]),
        Evidence(labels, members, neighbours, reference_labels, plain["is_left_out"]),
        plain["settings"],
        None if columns is None else _get_frame(tensors, "influential", columns),
    )


def _tensor(values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.array(values, order="C"))


def _put_frame(tensors: dict[str, Tensor], prefix: str, frame: pd.DataFrame) -> list[list[Any]]:
    """Add the numeric columns to the tensors. Returns the names of all columns, with the values of the others."""
    columns: list[list[Any]] = []
    for name in map(str, frame.columns):
        is_tensor = is_numeric_dtype(frame[name]) or is_bool_dtype(frame[name])
        columns.append([name, None if is_tensor else frame[name].tolist()])
        if is_tensor:
            tensors[f"{prefix}/{name}"] = _tensor(frame[name].to_numpy())
    return columns


def _get_frame(tensors: Mapping[str, Tensor], prefix: str, columns: Sequence[Sequence[Any]]) -> pd.DataFrame:
    return pd.DataFrame(
        {name: tensors[f"{prefix}/{name}"].numpy() if values is None else values for name, values in columns}
    )
