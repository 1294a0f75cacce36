"""`fit` reports the training accuracy, and warns if it is near chance."""

import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ifcomp import Checkpoint, IFComp
from ifcomp.errors import IfcompWarning, StorageError
from ifcomp.fitting import least_accuracy
from test_file_versions import change_metadata

CLASSES = 10


def model() -> nn.Module:
    """The prediction is the position of the largest input."""
    layer = nn.Linear(CLASSES, CLASSES)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(CLASSES))
        layer.bias.zero_()
    return layer.eval()


def data(correct: int, count: int = 100) -> tuple[Tensor, Tensor]:
    """Inputs whose first ``correct`` labels are predicted."""
    labels = torch.arange(count) % CLASSES
    shown = torch.where(torch.arange(count) < correct, labels, (labels + 1) % CLASSES)
    return nn.functional.one_hot(shown, CLASSES).float(), labels


@pytest.mark.parametrize("batch_size", [1, 7, 100])
@pytest.mark.parametrize("fisher", ["sampled", "exact", "empirical"])
def test_accuracy_of_the_fit(fisher: str, batch_size: int) -> None:
    x, y = data(37)
    ifc = IFComp(model(), fisher=fisher).fit(list(zip(x.split(batch_size), y.split(batch_size), strict=True)))
    assert ifc.training_accuracy == 0.37


@pytest.mark.parametrize("limit", [None, "40kB"])
def test_accuracy_does_not_depend_on_microbatches(limit: str | None) -> None:
    assert IFComp(model()).fit(data(61), max_memory=limit).training_accuracy == 0.61


def test_data_without_labels_has_no_accuracy() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ifc = IFComp(model()).fit([data(0)[0]])
    assert ifc.training_accuracy is None


def test_only_labelled_batches_count() -> None:
    (x, y), (more, _) = data(50), data(0)
    assert IFComp(model()).fit([(x, y), (more,)]).training_accuracy == 0.5


@pytest.mark.parametrize("correct", [None, 73])
def test_accuracy_is_saved(correct: int | None, tmp_path: Path) -> None:
    x, y = data(correct or 0)
    IFComp(model()).fit([x] if correct is None else [(x, y)]).save(tmp_path / "run")
    loaded = IFComp.load(tmp_path / "run", model())
    assert loaded.training_accuracy == (None if correct is None else 0.73)


def test_accuracy_of_a_resumed_fit(tmp_path: Path) -> None:
    x, y = data(37)
    batches = list(zip(x.split(10), y.split(10), strict=True))

    class Interrupted(list):
        reads = 0

        def __iter__(self) -> object:
            for batch in list.__iter__(self):
                self.reads += 1
                if self.reads == 17:  # in the second pass; checks of the data read two batches
                    raise InterruptedError
                yield batch

    with pytest.raises(InterruptedError), Checkpoint(tmp_path / "partial", 0) as checkpoint:
        IFComp(model()).fit(Interrupted(batches), checkpoint=checkpoint)
    assert (tmp_path / "partial").exists()
    with Checkpoint(tmp_path / "partial", 0) as checkpoint:
        assert IFComp(model()).fit(batches, checkpoint=checkpoint).training_accuracy == 0.37


@pytest.mark.parametrize(("classes", "least"), [(2, 0.625), (3, 0.5), (4, 0.4375), (5, 0.4), (10, 0.2), (1000, 0.002)])
def test_least_accuracy_is_twice_chance_for_five_or_more_classes(classes: int, least: float) -> None:
    assert least_accuracy(classes) == pytest.approx(least)


def test_accuracy_near_chance_warns_with_advice() -> None:
    with pytest.warns(IfcompWarning, match=r"accuracy is 19.0%; chance is 10.0%. Wrong preprocessing, or no weights\?"):
        IFComp(model()).fit(data(19))


def test_accuracy_of_twice_chance_does_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        IFComp(model()).fit(data(20))


def test_the_file_of_a_damaged_accuracy_is_refused(tmp_path: Path) -> None:
    IFComp(model()).fit([data(50)]).save(tmp_path / "run")
    for value in (1.5, -0.1, "much", True):
        change_metadata(
            tmp_path / "run", "ifcomp", lambda metadata, value=value: metadata.update(training_accuracy=value)
        )
        with pytest.raises(StorageError, match="training_accuracy is"):
            IFComp.load(tmp_path / "run", model())
