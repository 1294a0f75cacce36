"""Self-test of a device: errors and times of small models, see `ifcomp.selftest_oracle`."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from ifcomp.errors import SettingError
from ifcomp.predictor import IFComp
from ifcomp.selftest_oracle import CASES, SelftestCase, build_model, dense_results, make_inputs

#: Largest allowed error, relative to the largest value.
LIMITS = {torch.float64: 1e-9, torch.float32: 1e-4}

#: Largest allowed difference between fits of two devices. Rounding rotates eigenvectors of close eigenvalues.
REFIT_LIMITS = {torch.float64: 1e-6, torch.float32: 1e-2}

#: Absolute damping in beta-free units.
_DAMPING = 1e-3

#: Examples of the fit, and examples that are scored.
_TRAINING, _SCORED = 12, 8


@dataclass
class CaseResult:
    """Errors and times of one case in one precision.

    Attributes:
        name: The case.
        dtype: Precision of the model.
        errors: Error of each check, relative to the largest value; NaN if the check raised an exception.
        limits: Largest allowed error of each check.
        exceptions: First line of the exception of each check that raised one.
        fit_seconds: Time of the fit on the device.
        score_seconds: Time of the influence of all labels of eight examples.
    """

    name: str
    dtype: str
    errors: dict[str, float] = field(default_factory=dict)
    limits: dict[str, float] = field(default_factory=dict)
    exceptions: dict[str, str] = field(default_factory=dict)
    fit_seconds: float = math.nan
    score_seconds: float = math.nan

    @property
    def failed(self) -> tuple[str, ...]:
        """Names of the checks that failed."""
        return tuple(check for check, error in self.errors.items() if not error <= self.limits[check])

    @property
    def worst(self) -> str:
        """Name of the check with the largest error relative to its limit; a failed check first."""
        order = [*self.failed, *sorted(self.errors, key=lambda check: -self.errors[check] / self.limits[check])]
        return order[0]


def run_selftest(device: str, cases: Sequence[SelftestCase] = CASES) -> list[CaseResult]:
    """Run all cases in float32 and, where the device has it, in float64.

    Args:
        device: Name of the device, such as "cpu", "cuda:0" or "mps".
        cases: Models to run.

    Raises:
        SettingError: If the device is not available.
    """
    place = check_device(device)
    with _full_precision(place):
        return [_run_case(case, place, dtype) for case in cases for dtype in _dtypes(place)]


def check_device(name: str) -> torch.device:
    """Return the device, or raise SettingError if it cannot be used."""
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = _first_line(error).split(". ")[0].rstrip(".")
        raise SettingError(
            f"The device '{name}' is not available: {reason}. Give a device that PyTorch can use, such as cpu, "
            "cuda:0 or mps."
        ) from error
    return device


def _dtypes(device: torch.device) -> list[torch.dtype]:
    try:
        torch.zeros(1, dtype=torch.float64, device=device)
    except (TypeError, RuntimeError):
        return [torch.float32]
    return [torch.float32, torch.float64]


@contextmanager
def _full_precision(device: torch.device) -> Iterator[None]:
    """Switch TensorFloat-32 off, which rounds convolutions on CUDA to three digits."""
    flags = torch.backends.cudnn.flags(enabled=True, allow_tf32=False) if device.type == "cuda" else nullcontext()
    with flags:
        yield


# One case ------------------------------------------------------------------------------------------------------------


def _run_case(case: SelftestCase, device: torch.device, dtype: torch.dtype) -> CaseResult:
    result = CaseResult(case.name, str(dtype).removeprefix("torch."))
    model, training, inputs = build_model(case), make_inputs(case, _TRAINING, 1), make_inputs(case, _SCORED, 2)
    known: dict[str, Tensor] = {}
    ifc = _predictor(model, device, dtype)
    given = _typed(inputs, dtype).to(device)

    def fit() -> float:
        data = [_typed(training, dtype).to(device)]
        ifc.fit(data, progress=False)  # compiles and loads kernels
        start = time.perf_counter()
        ifc.fit(data, progress=False)
        result.fit_seconds = time.perf_counter() - start
        assert ifc.factors is not None
        moments, known["influence"] = dense_results(build_model(case), training, inputs, ifc.factors.blocks, _DAMPING)
        return max(_error(ifc.factors.blocks[name].second_moments, value) for name, value in moments.items())

    def influence() -> float:
        ifc.influence(given)  # memory is measured in the first call
        start = time.perf_counter()
        known["scored"] = ifc.influence(given)
        result.score_seconds = time.perf_counter() - start
        return _error(known["scored"], known["influence"])

    def scores_on_cpu() -> float:
        assert ifc.factors is not None
        copy = IFComp.from_factors(
            build_model(case).to(dtype), ifc.factors.to(torch.device("cpu")), damping=_DAMPING, sua=False
        )
        labels = torch.arange(_SCORED) % ifc.factors.num_classes
        here, there = ifc.score([(given, labels)], progress=False), copy.score([(_typed(inputs, dtype), labels)])
        columns = [(torch.tensor(here.frame[name].to_numpy()), there.frame[name].to_numpy()) for name in there.frame]
        return max(_error(value, torch.tensor(truth)) for value, truth in columns)

    def fit_on_cpu() -> float:
        copy = _predictor(build_model(case), torch.device("cpu"), dtype).fit([_typed(training, dtype)], progress=False)
        return _error(known["scored"], copy.influence(_typed(inputs, dtype)))

    def batch_of_one() -> float:
        return _error(torch.cat([ifc.influence(example) for example in given.split(1)]), known["scored"])

    def save_and_load() -> float:
        with tempfile.TemporaryDirectory() as folder:
            ifc.save(Path(folder) / "factors")
            return _error(IFComp.load(Path(folder) / "factors", ifc.model).influence(given), known["scored"])

    checks = {
        "second moments": fit,
        "influence": influence,
        "scores on the CPU": scores_on_cpu,
        "fit on the CPU": fit_on_cpu,
        "batch of 1": batch_of_one,
        "save and load": save_and_load,
    }
    for name, check in checks.items():
        result.limits[name] = (REFIT_LIMITS if check is fit_on_cpu else LIMITS)[dtype]
        try:
            result.errors[name] = check()
        except Exception as error:  # a device may lack an operation, which is a result of the test
            result.errors[name], result.exceptions[name] = math.nan, _first_line(error)
    return result


def _predictor(model: nn.Module, device: torch.device, dtype: torch.dtype) -> IFComp:
    return IFComp(model.to(dtype).to(device), fisher="exact", damping=_DAMPING, sua=False)


def _typed(inputs: Tensor, dtype: torch.dtype) -> Tensor:
    return inputs.to(dtype) if inputs.is_floating_point() else inputs


def _error(value: Tensor, truth: Tensor) -> float:
    """Largest difference, relative to the largest value."""
    value, truth = (part.detach().cpu().double() for part in (value, truth))
    largest = float(truth.abs().max())
    return float((value - truth).abs().max()) / (largest or 1.0)


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
