"""The command trains missing networks and reuses cached ones."""

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from experiments import prepare_models, training
from experiments.prepare_models import PRESETS, main, trained
from ifcomp.errors import SettingError


@pytest.fixture
def command() -> typer.Typer:
    app = typer.Typer()
    app.command()(main)
    return app


def test_digits(command: typer.Typer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IFCOMP_CACHE", str(tmp_path))
    trained(PRESETS["digits"]["digits"], until=1)
    first = CliRunner().invoke(command, ["--preset", "digits"])
    assert first.exit_code == 0
    assert first.output.startswith("digits: validation accuracy 0.9")
    monkeypatch.setattr(training, "_step", None)
    assert CliRunner().invoke(command, ["--preset", "digits", "--only", "digits"]).output == first.output
    assert [path.parent for path in tmp_path.glob("*/log.json")] == [trained(PRESETS["digits"]["digits"]).folder]


def test_unknown_names_are_refused() -> None:
    with pytest.raises(SettingError, match="digits, mnist"):
        main("imagenet")
    with pytest.raises(SettingError, match="fashion-30"):
        main("mnist", "fashion-31")


def test_the_order_and_the_ensemble() -> None:
    names = list(PRESETS["mnist"])
    assert names[:5] == ["mnist", "fashion", "fashion-dropout", "fashion-symmetric", "fashion-asymmetric"]
    ensemble = [PRESETS["mnist"][name] for name in names[5:]]
    assert [job.seed for job in ensemble] == list(range(1, 31))
    assert len({(job.model, job.recipe) for job in ensemble}) == 1
    assert prepare_models.WITH_TAIL.tail_epochs == 30
