"""Save and load the state of a predictor: factors, settings and results in one file."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, TypeVar

from torch import nn

from ifcomp._version import __version__
from ifcomp.curvature.factors import Relative
from ifcomp.errors import DataError, StorageError
from ifcomp.io import factor_files
from ifcomp.io.fingerprints import check_fingerprint
from ifcomp.layers.layout import Layout
from ifcomp.layers.probe import check_probe
from ifcomp.layers.wrappers import unwrapped
from ifcomp.state import FittedState
from ifcomp.tasks.calibration_result import Calibration
from ifcomp.tasks.ood_rule import OODRule

S = TypeVar("S", bound=FittedState)


def save_state(path: str | os.PathLike[str], state: FittedState, record: Mapping[str, Any] | None = None) -> None:
    """Write factors, settings, calibration, detector and an optional record to one safetensors file, atomically."""
    damping = state.damping
    options = {
        "selection": asdict(state._selection),
        "damping": damping.multiple if isinstance(damping, Relative) else damping,
        "relative_damping": isinstance(damping, Relative),
        "layouts": {name: layout.value for name, layout in state._layouts.items()},
        "probe": state._probe,
        "columns": None if state._columns is None else list(state._columns),
    }
    results = {} if state._calibration is None else {"calibration": state._calibration.to_json()}
    if state._ood_rule is not None:
        results["detector"] = state._ood_rule.to_json()
    saved = factor_files.SavedFactors(state._fitted, state._fingerprint, options, __version__, results, record)
    factor_files.save(path, saved)


def load_state(build: Callable[..., S], path: str | os.PathLike[str], model: nn.Module) -> S:
    """Read a file that `save_state` wrote.

    Args:
        build: Builds the predictor from the model and the arguments of its constructor.
        path: The file.
        model: The classifier that the factors belong to.

    Raises:
        StorageError: If the file cannot be read.
        FingerprintError: If it belongs to another model.
    """
    stored, model = factor_files.load(path), unwrapped(model)
    check_fingerprint(stored.fingerprint, model, f"The factors in '{path}'")
    options, settings = stored.options, stored.factors.settings
    try:
        value = options["damping"]
        damping = Relative(value) if options["relative_damping"] else value
        loaded = build(model, **asdict(settings), damping=damping, **options["selection"])
        layouts = {name: Layout(value) for name, value in options["layouts"].items()}
        columns = options.get("columns")
        loaded._columns = None if columns is None else tuple(map(str, columns))
        loaded._probe = options.get("probe")
        check_probe(model, loaded._probe, f"The factors in '{path}'")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise StorageError(
            f"Cannot read factors from '{path}': its settings are damaged ({error!r}). Fit again."
        ) from error
    advice = "Is the file damaged, or was the model's code changed? Fit again."
    loaded._receive(stored.factors, dict(stored.fingerprint), layouts, f"The factors in '{path}'", advice)
    restore_results(loaded, stored.results, path)
    return loaded


def restore_results(state: FittedState, results: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Restore calibration and detector from a file."""
    name = ""
    try:
        if (name := "calibration") in results:
            state.calibration = Calibration.from_json(results[name])
        if (name := "detector") in results:
            rule = OODRule.from_json(results[name])
            rule.check_fit(state._detector_identity)
            state._ood_rule = rule
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, OverflowError, DataError) as error:
        verb = {"calibration": "calibrate", "detector": "call ood_detector"}[name]
        raise StorageError(
            f"Cannot read the {name} in '{path}': it is damaged or of another version ({error!r}). Fit and "
            f"{verb} again."
        ) from error
