"""From the file of a run, and what the user adds, to a predictor and data."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, NoReturn

from ifcomp import IFComp
from ifcomp.cli.models import load_model, try_model
from ifcomp.cli.options import DataChoice, ModelChoice
from ifcomp.cli.runs import Record, read_record, record_path
from ifcomp.data.batches import as_batches
from ifcomp.data.sources import IndexedBatches, Source, SourceOptions, open_source, source_kind
from ifcomp.errors import DataError, LabelError, SettingError, StorageError


@dataclass(frozen=True, eq=False)
class Run:
    """A run whose record has been looked at; nothing is imported yet.

    Attributes:
        path: The file of the fit.
        choice: What the user says of the model.
        record: Of the run, if it is believed.
    """

    path: str
    choice: ModelChoice
    record: Record | None

    def source(self, spec: str | None, reading: DataChoice, *, labelled: bool = True, beside: bool = False) -> Source:
        """Open data.

        Args:
            spec: Its name; None is the training data.
            reading: How to read it; what is not said is as for the training data.
            labelled: Whether its labels are of the model's classes; else it comes without.
            beside: Whether it is not what ``reading`` is about, so that options for another kind of data are ignored.
        """
        record = self.record
        name = spec or (record.data if record is not None else self._refuse("the data"))
        options = self._options(name, reading, beside)
        names = record.class_names if record is not None and labelled else None
        source = open_source(name, options, class_names=names, labelled=labelled)
        if spec is None and record and isinstance(source.data, IndexedBatches) and len(source) != record.examples:
            raise DataError(
                f"'{record.data}' has {len(source):,} examples now, but the run was fitted on {record.examples:,}. "
                "Fit again, or name the data."
            )
        return source if labelled else source.unlabelled()

    def predictor(self, *sources: Source) -> IFComp:
        """Make the model, try it on the data, and load the fit."""
        model = load_model(self.model, self.weights, self.choice.device)
        for source in sources:
            try_model(model, source, self.model)
        loaded = IFComp.load(self.path, model)
        if self.record is not None and read_record(self.path) != self.record:
            raise StorageError(f"'{self.path}' was replaced by another fit while it was read. Run this again.")
        return loaded

    def calibration(self) -> tuple[float, bool]:
        """Alpha and whether to keep the predicted class, as 'ifcomp calibrate' chose them."""
        if self.record is not None and self.record.alpha is not None:
            return self.record.alpha, self.record.keep_argmax
        if self.record is None and read_record(self.path) is not None:
            self._refuse("what was calibrated")
        raise SettingError(f"'{self.path}' is not calibrated. Use the run that 'ifcomp calibrate RUN DATA' writes.")

    @property
    def model(self) -> str:
        """Name of the model."""
        return self.choice.model or (self.record.model if self.record else self._refuse("the model with --model"))

    @property
    def weights(self) -> str | None:
        """File of its weights."""
        return self.choice.weights or (self.record.weights if self.record else None)

    def new_record(self, training: Source, reading: DataChoice, ifc: IFComp) -> Record:
        """The record of another fit of the same model, on data that was opened ``beside`` other data."""
        assert ifc.factors is not None
        options, names = self._options(training.spec, reading, beside=True).given(), self.class_names(training)
        return Record(
            self.model, self.weights, training.spec, options, list(names) if names else None, ifc.factors.count
        )

    def is_training_data(self, spec: str | None) -> bool:
        """Whether a name is that of the data that the run was fitted on."""
        return spec is None or (self.record is not None and spec == self.record.data)

    def class_names(self, source: Source) -> tuple[str, ...] | None:
        """Names of the classes, as far as the run or its data know them."""
        if self.record is not None and self.record.class_names:
            return tuple(self.record.class_names)
        return source.class_names

    def _options(self, name: str, reading: DataChoice, beside: bool) -> SourceOptions:
        options, allowed = reading.parsed(), source_kind(name).options
        if beside:
            options = SourceOptions().with_defaults(options, allowed)
        return options if self.record is None else options.with_defaults(_stored_options(self.record), allowed)

    def _refuse(self, what: str) -> NoReturn:
        record = read_record(self.path)
        if record is None:
            raise SettingError(
                f"There is no record '{record_path(self.path)}' beside the run, so name {what} yourself."
            )
        weights = f" --weights {record.weights}" if record.weights else ""
        raise SettingError(
            f"'{record_path(self.path)}' was not written by you in this folder, so the code and files that it names "
            f"are not used. Go to the folder where you fitted the run, or name them yourself if you know them: "
            f"data {record.data}, --model {record.model}{weights}. If you trust whoever wrote it, add --trust-run."
        )


def find_run(path: str, choice: ModelChoice) -> Run:
    """Look at a run and its record."""
    if not os.path.isfile(path):
        raise StorageError(f"There is no run '{path}'. Make one with 'ifcomp fit MODEL DATA --out {path}'.")
    record = read_record(path)
    return Run(path, choice, record if record is not None and (choice.trust_run or record.is_own) else None)


def check_labelled(source: Source) -> None:
    """Raise LabelError if the data has no labels."""
    first = next(as_batches(source.batches()), None)
    if first is not None and first.labels is None:
        raise LabelError(f"'{source.spec}' has no labels, but they are needed here.")


def _stored_options(record: Record) -> SourceOptions:
    try:
        stored: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in record.options.items()
        }
        return SourceOptions(**stored)
    except (TypeError, SettingError) as error:
        raise StorageError(f"The record of the run is damaged ({error}). Fit again.") from error
