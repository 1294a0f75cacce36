"""Typed errors: each says what was given, what is allowed and what to do."""


class IfcompError(Exception):
    """Base of every error that the library raises on purpose."""


class IfcompWarning(UserWarning):
    """Results can be computed, but are probably not what is wanted; the message says why and what to do."""


class SettingError(IfcompError, ValueError):
    """A setting (beta, damping, alpha, layers, ...) is outside what is allowed."""


class MemoryLimitError(SettingError):
    """More memory is needed than is allowed or there; the message says how much, for what, and what to do."""


class ModelError(IfcompError):
    """The model itself cannot be used as it is."""


class UncoveredParametersError(ModelError):
    """Some trainable parameters cannot be covered; the message lists all of them with their shares."""


class NonFiniteError(IfcompError):
    """A weight, input, logit or factor is NaN or infinite; the message says which."""


class DataError(IfcompError):
    """The data given to fit or score cannot be used."""


class EmptyDataError(DataError):
    """There was not a single example."""


class LengthChangedError(DataError):
    """The second pass over the data saw another number of examples than the first."""


class LabelError(DataError):
    """Labels are missing, not integers, or outside 0 ... K-1."""


class LogitsError(DataError):
    """The model's output is not a [batch, classes] tensor with at least two classes."""


class PrecisionError(DataError):
    """The model and its inputs have different floating-point types."""


class NotFittedError(IfcompError):
    """A score was asked for before `fit` or `load`."""


class StorageError(IfcompError):
    """A file cannot be read or written as factors."""


class CheckpointError(StorageError):
    """What is left of unfinished work cannot be gone on from, or not be written; says why and what to do."""


class FingerprintError(StorageError):
    """Saved factors belong to another model; the message says what differs."""


class MissingPackageError(IfcompError, ImportError):
    """An optional package is needed here but cannot be imported; the message says how to install it."""
