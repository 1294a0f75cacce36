"""A run: opening it, loading its predictor and data, predicting with it, and writing it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import typer
from torch import Tensor

from ifcomp import IFComp
from ifcomp.cli.model import load_checked_model
from ifcomp.cli.options import DataOptions, ModelOptions
from ifcomp.cli.output import one_line
from ifcomp.cli.record import Record, read_record
from ifcomp.data.batches import as_batches
from ifcomp.data.checks import check_labels
from ifcomp.data.sources import KINDS as SOURCE_KINDS
from ifcomp.data.sources import PREFIXES, IndexedBatches, Source, SourceOptions, complete_name, open_source, source_kind
from ifcomp.distributed import process_info
from ifcomp.errors import DataError, LabelError, SettingError, StorageError
from ifcomp.io.checkpoints import Checkpoint
from ifcomp.io.files import remove_scratch_files
from ifcomp.layers.forward import run_model
from ifcomp.progress import track
from ifcomp.storage import save_state
from ifcomp.tasks.calibration import ReliabilityCurve, calibration_summary, reliability_curve


@dataclass(frozen=True, eq=False)
class Run:
    """A run whose record has been read, or a model without a run. No user code has been imported yet.

    Attributes:
        path: The file written by ``ifcomp fit``; None without a run.
        options: The model options of the command line.
        record: The record of the run, or None if there is none or it is not trusted.
    """

    path: str | None
    options: ModelOptions
    record: Record | None

    @property
    def model(self) -> str:
        """Name of the model, ``package.module:factory``."""
        return self.options.model or (self.record.model if self.record else self._refuse("the model with --model"))

    @property
    def weights(self) -> str | None:
        """File of the weights."""
        if self.options.weights or self.record is None or self.record.weights is None:
            return self.options.weights
        return self._located(self.record.weights)

    @property
    def folder(self) -> str:
        """The folder of the fit, to which the names in the record are relative; the current folder without one."""
        if self.path is None or self.record is None:
            return os.curdir
        return os.path.normpath(os.path.join(os.path.dirname(self.path), self.record.folder))

    def _located(self, path: str) -> str:
        """Return a path of the record: in the folder of the fit, or in the current folder if it is only there."""
        there = os.path.normpath(os.path.join(self.folder, os.path.expanduser(path)))
        return path if os.path.exists(path) and not os.path.exists(there) else there

    def _folder_of_module(self, spec: str) -> str:
        """Return the folder of the fit if the module of a factory is in it, else the current folder."""
        module = os.path.join(self.folder, spec.partition(":")[0].partition(".")[0])
        return self.folder if os.path.isdir(module) or os.path.isfile(f"{module}.py") else os.curdir

    @property
    def training_data(self) -> str | None:
        """Name of the training data, or None if there is no record."""
        if self.record is None:
            return None
        prefix, colon, path = self.record.data.partition(":")
        return f"{prefix}:{self._located(path)}" if colon and prefix in SOURCE_KINDS else self.record.data

    def load_predictor(self, *sources: Source) -> IFComp:
        """Load the model, check it on each of the sources, and load the fit, if any."""
        folder = os.curdir if self.options.model else self._folder_of_module(self.model)
        model, _ = load_checked_model(self.model, self.weights, self.options.device, *sources, folder=folder)
        return IFComp(model, skip_uncovered=True) if self.path is None else IFComp.load(self.path, model)

    def save(self, ifc: IFComp) -> None:
        """Write the predictor to the file of the run, with the record that it has."""
        assert self.path is not None
        write_run(self.path, ifc, read_record(self.path))

    def open_data(
        self,
        spec: str | None,
        reading: DataOptions,
        *,
        labelled: bool = True,
        secondary: bool = False,
        like: Source | None = None,
    ) -> Source:
        """Open data.

        Args:
            spec: Name of the data; None is the training data.
            reading: How to read it. Options that are not given are those of the training data.
            labelled: Whether the labels are classes of the model. If not, they are dropped.
            secondary: Whether ``reading`` was given for other data of the command. Then options that do not apply to
                this kind of data are ignored instead of refused.
            like: Other data with the same feature columns, for tables.
        """
        record = self.record
        missing = "the data" if self.path else "the data with --data"
        name = complete_name(spec or self.training_data or self._refuse(missing))
        names = record.class_names if record is not None and labelled else None
        options = self._data_options(name, reading, secondary)
        if like is not None:
            options = options.with_defaults(
                SourceOptions(feature_columns=like.feature_columns), source_kind(name).options
            )
        # The label column of the record may be missing in new data; one that was named may not.
        needs_labels = labelled and (spec is None or reading.label_column is not None)
        folder = os.curdir if spec else self._folder_of_module(name)
        source = open_source(name, options, class_names=names, labelled=needs_labels, folder=folder)
        if spec is None and record is not None:
            _check_unchanged(source, record)
        return source if labelled else source.unlabelled()

    def inputs(self, *names: str | None) -> tuple[str | None, ...]:
        """Return the names of all files that a command reads: those of the run, and further ones."""
        return (self.path, self.weights, self.training_data, *names)

    def is_training_data(self, spec: str | None) -> bool:
        """Return whether the name is that of the training data; None is."""
        return spec is None or (self.training_data is not None and complete_name(spec) == self.training_data)

    def class_names(self, source: Source) -> tuple[str, ...] | None:
        """Return the class names of the run, or those of the data if the run has none."""
        if self.record is not None and self.record.class_names:
            return tuple(self.record.class_names)
        return source.class_names

    def label_column(self, spec: str, reading: DataOptions) -> str | None:
        """Return the label column with which data is read; None for the default."""
        return self._data_options(spec, reading, secondary=True).label_column

    def _data_options(self, name: str, reading: DataOptions, secondary: bool) -> SourceOptions:
        options, allowed = reading.parse(), source_kind(name).options
        if secondary:
            options = SourceOptions().with_defaults(options, allowed)
        return options if self.record is None else options.with_defaults(stored_options(self.record), allowed)

    def _refuse(self, missing: str) -> NoReturn:
        """Raise an error: something must be named because the record is missing or not trusted."""
        if self.path is None:
            raise SettingError(f"Without a run of 'ifcomp fit' this command needs {missing}.")
        record = read_record(self.path)
        if record is None:
            raise SettingError(
                f"The run '{self.path}' was not written by 'ifcomp fit' and does not contain the names of model and "
                f"data. Add {missing} to the command."
            )
        names = {"data": record.data, "--model": record.model, "--weights": record.weights}
        listed = " ".join(f"{key} {shlex.quote(one_line(name))}" for key, name in names.items() if name)
        raise SettingError(
            f"You did not write the run '{self.path}' on this computer, so the code and files that it names are not "
            f"used. If you know them, add them to the command: {listed}. If you trust the author of the run, add "
            "--trust-run."
        )


def _check_unchanged(source: Source, record: Record) -> None:
    """Raise DataError if the data is not that of the fit."""
    if isinstance(source.data, IndexedBatches) and len(source) != record.examples:
        raise DataError(
            f"'{source.spec}' has {len(source):,} examples now, but the run was fitted on {record.examples:,}. "
            "Fit again, or give the data on the command line to use it as it is."
        )
    if source.digest() != record.digest:
        raise DataError(
            f"'{source.spec}' differs from the data of the fit: other inputs, labels or order. Fit again, or give the "
            "data on the command line to use it as it is."
        )


def open_run(path: str | None, options: ModelOptions) -> Run:
    """Read the record of a run and decide whether it is trusted. None stands for a model without a run."""
    if path is None:
        return Run(None, options, None)
    if os.path.isdir(path) or (os.path.isfile(path) and os.path.splitext(path)[1].lower() in PREFIXES):
        raise SettingError(
            f"'{path}' is data, not a run of 'ifcomp fit'. Give the run first. 'ifcomp audit' works without a run: "
            f"--model package.module:factory --weights FILE --data {shlex.quote(path)}."
        )
    if not os.path.isfile(path):
        raise StorageError(f"There is no run '{path}'. Create one with 'ifcomp fit MODEL DATA --out {path}'.")
    record = read_record(path)
    is_trusted = record is not None and (options.trust_run or record.is_trusted)
    return Run(path, options, record if is_trusted else None)


def stored_options(record: Record) -> SourceOptions:
    """Return the options with which the training data was read."""
    try:
        stored: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in record.options.items()
        }
        return SourceOptions(**stored)
    except (TypeError, SettingError) as error:
        raise StorageError(f"The record of the run is damaged ({one_line(str(error))}). Fit again.") from error


def recorded_options(options: SourceOptions, source: Source) -> dict[str, Any]:
    """Return the options to store in a record. Those of a table include its feature columns.

    Later data is then matched by the names of the columns, in any order.
    """
    columns = {} if source.feature_columns is None else {"feature_columns": list(source.feature_columns)}
    return {**options.given(), **columns}


def check_labelled(source: Source) -> None:
    """Raise LabelError if the data has no labels."""
    first = next(as_batches(source.batches()), None)
    if first is not None and first.labels is None:
        remedy = "" if source.feature_columns is None else " Name their column with --label-column."
        raise LabelError(f"'{source.spec}' has no labels, but this command needs them.{remedy}")


# Predictions ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Predictions:
    """Class probabilities of N examples.

    Attributes:
        model: Softmax of the model, [N, K].
        calibrated: Calibrated pNML distribution, [N, K].
        labels: [N], or None if the data has no labels.
        sets: Prediction sets, [N, K] booleans, or None.
    """

    model: Tensor
    calibrated: Tensor
    labels: Tensor | None
    sets: Tensor | None = None

    @property
    def covered(self) -> float | None:
        """Share of labels in the prediction sets; None without labels or sets."""
        if self.labels is None or self.sets is None:
            return None
        return float(self.sets.gather(1, self.labels.unsqueeze(1)).double().mean())

    def metrics(self) -> dict[str, dict[str, float]]:
        """Return the calibration metrics of "model" and "calibrated". Needs labels."""
        assert self.labels is not None
        return {name: calibration_summary(getattr(self, name), self.labels) for name in ("model", "calibrated")}

    def curves(self) -> dict[str, ReliabilityCurve]:
        """Return the reliability curves of "model" and "calibrated". Needs labels."""
        assert self.labels is not None
        return {name: reliability_curve(getattr(self, name), self.labels) for name in ("model", "calibrated")}


def predict_source(
    ifc: IFComp,
    source: Source,
    alpha: float | None = None,
    keep_argmax: bool = True,
    coverage: float | None = None,
) -> Predictions:
    """Predict all examples of a source in one pass.

    Args:
        ifc: Fitted predictor.
        source: Inputs, with or without labels.
        alpha: As for `IFComp.predict_proba`.
        keep_argmax: As for `IFComp.predict_proba`.
        coverage: Coverage of prediction sets; None builds none.
    """
    model, calibrated, labels = [], [], []
    device = next(ifc.model.parameters()).device
    for batch in as_batches(track(source.batches(), "predicting", None if process_info().rank == 0 else False)):
        with torch.no_grad():
            model.append(run_model(ifc.model, batch.to(device)).cpu().double().softmax(1))
        calibrated.append(ifc.predict_proba(batch.inputs, alpha, keep_argmax=keep_argmax).cpu())
        if batch.labels is not None:
            labels.append(check_labels(batch, model[-1].shape[1]))
    distribution, sets = torch.cat(calibrated), None
    if coverage is not None and ifc.calibration is not None:
        ifc.calibration.set_rule.warn_if_too_few(coverage)
        sets = torch.from_numpy(ifc.calibration.set_rule.sets(distribution.numpy(), coverage))
    return Predictions(torch.cat(model), distribution, torch.cat(labels) if labels else None, sets)


# Writing -------------------------------------------------------------------------------------------------------------


def write_run(path: str, ifc: IFComp, record: Record | None) -> None:
    """Write a fit and its record to one file. Atomic."""
    save_state(path, ifc, None if record is None else record.to_json())


@contextmanager
def resumable(every: float, output: str) -> Iterator[Checkpoint]:
    """Open a checkpoint beside the output file. Only one command at a time can use it.

    Temporary files of a killed command are removed first.

    Args:
        every: Seconds between two saves.
        output: File that the command writes.
    """
    with Checkpoint(f"{output}.partial", every, on_interrupt=_print_stopping) as checkpoint:
        if process_info().rank == 0:
            remove_scratch_files(output)
        yield checkpoint


def _print_stopping() -> None:
    typer.echo("Stopping after this batch. Press Ctrl-C again to stop immediately.", err=True)
