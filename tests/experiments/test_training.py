"""Training of tiny networks: resuming to the same bits, caching, early stopping; augmentation by hand."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from experiments import runs, training
from experiments.datasets import MNIST, Batches, Dataset, convert, load, separate
from experiments.models import build
from experiments.recipes import Recipe
from experiments.runs import Trained
from experiments.training import evaluate, shift_and_mirror, train
from ifcomp.errors import LabelError, NonFiniteError, SettingError, StorageError

RECIPE = Recipe("one-cycle", 3, 0.05, tail_epochs=2, batch_size=50, checkpoint_every=2, augment=True)


@pytest.fixture(scope="module")
def data() -> tuple[Dataset, Dataset]:
    return separate(convert(load("digits", "train").first(300), 28, 1), 80)


def _train(data: tuple[Dataset, Dataset], folder: Path, **options: object) -> Trained:
    settings = {"model": "lenet-dropout", "recipe": RECIPE, "seed": 0, **options}
    model, recipe = settings.pop("model"), settings.pop("recipe")
    return train(model, data[0], recipe, normalisation=MNIST, validation=data[1], folder=folder, **settings)


def _same_bits(first_run: Trained, second_run: Trained) -> bool:
    rows = [[replace(row, seconds=0.0) for row in run.epochs] for run in (first_run, second_run)]
    names = sorted(path.name for path in first_run.folder.glob("*.safetensors"))
    if rows[0] != rows[1] or names != sorted(path.name for path in second_run.folder.glob("*.safetensors")):
        return False
    for name in names:
        left, right = load_file(first_run.folder / name), load_file(second_run.folder / name)
        if left.keys() != right.keys() or not all(torch.equal(left[key], right[key]) for key in left):
            return False
    return True


class Killed(BaseException):
    pass


@pytest.mark.parametrize("model", ["lenet-dropout", "resnet20"])
def test_killed_at_any_step_and_resumed_to_the_same_bits(
    model: str, data: tuple[Dataset, Dataset], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = RECIPE
    if model == "resnet20":
        data = convert(data[0].first(24), 32, 3), convert(data[1].first(8), 32, 3)
        recipe = replace(RECIPE, batch_size=12, epochs=2, tail_epochs=1)
    normalisation = MNIST if model != "resnet20" else replace(MNIST, mean=(0.1,) * 3, std=(0.3,) * 3)

    def run(folder: str) -> Trained:
        options = {"normalisation": normalisation, "seed": 7, "validation": data[1], "folder": tmp_path / folder}
        return train(model, data[0], recipe, **options)

    whole, step, kills = run("whole"), training._step, 0
    for patience in (1, 4, 3, 9, 2, 100):
        countdown = iter(range(patience))

        def dying(
            session: object, x: Tensor, y: Tensor, rate: float, countdown: object = countdown
        ) -> tuple[Tensor, Tensor]:
            if next(countdown, None) is None:
                raise Killed
            return step(session, x, y, rate)

        monkeypatch.setattr(training, "_step", dying)
        try:
            resumed = run("killed")
        except Killed:
            kills += 1
    assert kills >= 2
    assert _same_bits(whole, resumed)
    assert len(whole.epochs) == recipe.total_epochs


def test_killed_while_writing(data: tuple[Dataset, Dataset], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, save = _train(data, tmp_path / "whole"), runs._save
    for name in ("epoch-0002.safetensors", "best.safetensors", "state.safetensors"):

        def dying(path: Path, *content: object, fatal: str = name) -> None:
            if path.name == fatal:
                raise Killed
            save(path, *content)

        monkeypatch.setattr(runs, "_save", dying)
        with pytest.raises(Killed):
            _train(data, tmp_path / name)
        monkeypatch.setattr(runs, "_save", save)
        assert _same_bits(whole, _train(data, tmp_path / name))


def test_until_stops_and_a_later_call_resumes(data: tuple[Dataset, Dataset], tmp_path: Path) -> None:
    first = _train(data, tmp_path / "parts", until=2)
    assert [row.epoch for row in first.epochs] == [1, 2]
    assert _same_bits(_train(data, tmp_path / "parts"), _train(data, tmp_path / "whole"))


def test_a_finished_training_is_reused(
    data: tuple[Dataset, Dataset], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = _train(data, tmp_path)
    monkeypatch.setattr(training, "_step", None)
    again = _train(data, tmp_path)
    assert again == first
    assert json.loads((first.folder / "log.json").read_text())["epochs"][-1]["epoch"] == 5


def test_every_setting_is_part_of_the_identity(data: tuple[Dataset, Dataset], tmp_path: Path) -> None:
    train_data, validation = data
    labels = train_data.labels.clone()
    labels[0] = (labels[0] + 1) % 10
    variants = [
        _train(data, tmp_path, until=0),
        _train(data, tmp_path, until=0, seed=1),
        _train(data, tmp_path, until=0, model="lenet"),
        _train(data, tmp_path, until=0, recipe=replace(RECIPE, rate=0.04)),
        _train((replace(train_data, labels=labels), validation), tmp_path, until=0),
        _train((train_data, validation.first(10)), tmp_path, until=0),
    ]
    assert len({variant.folder for variant in variants}) == len(variants)
    assert _train(data, tmp_path, until=0).folder == variants[0].folder


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("IFCOMP_CACHE", str(tmp_path))
    assert runs.cache_folder() == tmp_path
    monkeypatch.delenv("IFCOMP_CACHE")
    assert runs.cache_folder() == Path.home() / ".cache/ifcomp/experiments"


def test_stored_weights(data: tuple[Dataset, Dataset], tmp_path: Path) -> None:
    run = _train(data, tmp_path)
    assert [kept.epoch for kept in run.checkpoints] == [2, 4, 5]
    assert [kept.epoch for kept in run.tail] == [4, 5]
    assert [kept.learning_rate for kept in run.tail] == [pytest.approx(0.01)] * 2
    accuracies = [row.validation_accuracy for row in run.epochs]
    assert run.best_epoch == 1 + accuracies.index(max(accuracies))
    batches = Batches(data[1], MNIST)
    for which, epoch in (("last", 5), ("best", run.best_epoch), (2, 2)):
        row = run.epochs[epoch - 1]
        assert evaluate(run.model(which), batches) == (row.validation_loss, row.validation_accuracy)
    plain = build("lenet-dropout")
    plain.load_state_dict(load_file(run.checkpoints[-1].path))
    assert torch.equal(plain.fc3.weight, run.model().fc3.weight)
    assert not run.model().training
    with pytest.raises(SettingError, match="one of 2, 4, 5"):
        run.model(3)


def test_one_epoch_is_plain_sgd(data: tuple[Dataset, Dataset], tmp_path: Path) -> None:
    recipe = Recipe("steps", 2, 0.02, milestones=(1,), batch_size=300)
    run = _train(data, tmp_path, model="lenet", recipe=recipe)
    torch.manual_seed(training._epoch_seed(0, 0))
    model = build("lenet").train()
    optimizer = torch.optim.SGD(model.parameters(), 0.02, momentum=0.9, weight_decay=5e-4, nesterov=True)
    for rate in (0.02, 0.004):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        F.cross_entropy(model(MNIST(data[0].images)), data[0].labels).backward()
        optimizer.step()
    for actual, expected in zip(run.model().parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)


def test_early_stop(data: tuple[Dataset, Dataset], tmp_path: Path) -> None:
    run = _train(data, tmp_path, recipe=Recipe("steps", 30, 1e-12, patience=2))
    assert (len(run.epochs), run.best_epoch) == (3, 1)
    assert _train(data, tmp_path, recipe=Recipe("steps", 30, 1e-12, patience=2)).epochs == run.epochs


def test_training_learns_and_does_not_change_the_random_state(data: tuple[Dataset, Dataset], tmp_path: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    run = _train(data, tmp_path, model="lenet", recipe=Recipe("one-cycle", 12, 0.05, batch_size=20))
    assert torch.equal(torch.rand(3), expected)
    assert run.epochs[-1].validation_accuracy > 0.85
    assert run.epochs[-1].loss < run.epochs[0].loss / 4


def test_errors(data: tuple[Dataset, Dataset], tmp_path: Path) -> None:
    with pytest.raises(LabelError, match="no labels"):
        _train((replace(data[0], labels=None), data[1]), tmp_path)
    with pytest.raises(NonFiniteError, match="rate below"):
        _train(data, tmp_path, recipe=Recipe("steps", 5, 1e6))
    bare = train("lenet", data[0], RECIPE, normalisation=MNIST, seed=0, folder=tmp_path, until=1)
    with pytest.raises(SettingError, match="no validation data"):
        bare.model("best")
    (bare.folder / "state.safetensors").write_bytes(b"damaged")
    with pytest.raises(StorageError, match="Delete the folder"):
        bare.model()
    with pytest.raises(StorageError, match="Delete the folder"):
        train("lenet", data[0], RECIPE, normalisation=MNIST, seed=0, folder=tmp_path)


def test_evaluate_by_hand() -> None:
    logits = torch.tensor([[2.0, 0.0], [0.0, 1.0], [0.0, 3.0]])
    data = Dataset("made", torch.arange(3, dtype=torch.uint8).reshape(3, 1, 1), torch.tensor([0, 0, 1]), ("a", "b"))

    class Fixed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return logits[(x.flatten() * 255).round().long()]

    plain = replace(MNIST, mean=(0.0,), std=(1.0,))
    loss, accuracy = evaluate(Fixed(), Batches(data, plain, 2))
    expected = sum(float(torch.log1p(torch.exp(torch.tensor(gap)))) for gap in (-2.0, 1.0, -3.0)) / 3
    assert loss == pytest.approx(expected, abs=1e-6)
    assert accuracy == pytest.approx(2 / 3)


@pytest.mark.parametrize("channels", [(), (3,)])
def test_shift_and_mirror_by_hand(channels: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(1, 256, (400, 6, 7, *channels), dtype=torch.uint8, generator=generator)
    moved = shift_and_mirror(images, torch.Generator().manual_seed(1), reach=2)
    seen = set()
    for image, actual in zip(images, moved, strict=True):
        padded = torch.zeros(10, 11, *channels, dtype=torch.uint8)
        padded[2:8, 2:9] = image
        options = {
            (dy, dx, flip): padded[dy : dy + 6, dx : dx + 7].flip(1) if flip else padded[dy : dy + 6, dx : dx + 7]
            for dy in range(5)
            for dx in range(5)
            for flip in (False, True)
        }
        matches = [key for key, option in options.items() if torch.equal(option, actual)]
        assert len(matches) == 1
        seen.add(matches[0])
    assert len(seen) == 50
