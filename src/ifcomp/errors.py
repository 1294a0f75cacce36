"""Errors and warnings of the library. Every message contains the given value, what is allowed and the remedy."""


class IfcompError(Exception):
    """Base class of all errors that the library raises on purpose."""


class IfcompWarning(UserWarning):
    """Warning: results are computed, but are probably not what the user wants."""


class SettingError(IfcompError, ValueError):
    """A setting (beta, damping, alpha, layers, ...) is not allowed."""


class MemoryLimitError(SettingError):
    """More memory is needed than is allowed or available; names the amount and the purpose."""


class ModelError(IfcompError):
    """The model cannot be used as it is."""


class UncoveredParametersError(ModelError):
    """Trainable parameters cannot be covered; lists all of them with their shares."""


class NonFiniteError(IfcompError):
    """A weight, input, logit or factor is NaN or infinite."""


class DataError(IfcompError):
    """The data cannot be used."""


class EmptyDataError(DataError):
    """The data has no examples."""


class LengthChangedError(DataError):
    """Two passes over the data have different numbers of examples."""


class LabelError(DataError):
    """Labels are missing, not integers, or outside 0 ... K-1."""


class LogitsError(DataError):
    """The model's output is not a [batch, classes] tensor with at least two classes."""


class PrecisionError(DataError):
    """The model and its inputs have different floating-point types."""


class NotFittedError(IfcompError):
    """A result was requested before `fit` or `load`."""


class NotCalibratedError(NotFittedError):
    """A result was requested that needs `calibrate`."""


class StorageError(IfcompError):
    """A file cannot be read or written."""


class CheckpointError(StorageError):
    """A checkpoint cannot be written, or the work cannot be resumed from it."""


class FingerprintError(StorageError):
    """Factors belong to another model; lists the differences."""


class MissingPackageError(IfcompError, ImportError):
    """An optional package cannot be imported; names the command that installs it."""
