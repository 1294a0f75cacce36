"""``ifcomp estimate``, and ``--max-memory`` of the other commands."""

import shlex
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from project import Project, ifcomp, run_json, run_text, stored_record


def test_text_has_layers_and_totals(project: Project) -> None:
    text = run_text("estimate", project.model, "npz:train.npz", "--weights", "net.safetensors")
    for part in ("layer", "disk", "linear", "fit:", "score:", "200 examples", "ifcomp fit"):
        assert part in text


def test_json(run: Project) -> None:
    content = run_json("estimate", run.model, "npz:train.npz", "--layers", "last", "--examples", "1000")
    assert content["examples"] == 1000
    assert [layer["name"] for layer in content["layers"]] == ["3"]
    reference = 1000 * 12  # penultimate features
    assert content["disk"] == 4 * (13 * 13 + 10 * 10 + 13 * 10 + reference)
    assert content["fit_seconds"] > 0
    assert content["written"] == []


def test_memory_limit_changes_no_result(run: Project) -> None:
    frames = []
    for options in ([], ["--max-memory", "300kB"]):
        fitted = ifcomp(*run.fit_arguments(), "--out", "other.ifcomp", *options)
        assert fitted.exit_code == 0, fitted.output
        scored = ifcomp("score", "other.ifcomp", "npz:valid.npz", "--out", "scores.csv", *options)
        assert scored.exit_code == 0, scored.output
        frames.append(pd.read_csv("scores.csv"))
    pd.testing.assert_frame_equal(frames[0], frames[1], rtol=1e-4)


@pytest.mark.parametrize("command", ["fit", "score", "estimate"])
def test_too_small_memory_limit(command: str, run: Project) -> None:
    arguments = {
        "fit": run.fit_arguments(),
        "score": ["score", "run.ifcomp", "npz:valid.npz"],
        "estimate": ["estimate", run.model, "npz:train.npz"],
    }
    result = ifcomp(*arguments[command], "--max-memory", "1kB")
    assert result.exit_code == 2
    assert "max_memory is 1.0 kB" in result.stderr
    assert "bytes" in result.stderr
    assert ifcomp(*arguments[command], "--max-memory", "much").exit_code == 2


def next_commands(output: str) -> list[list[str]]:
    """The commands that were printed as next steps, as words for the shell."""
    lines = [line.removeprefix("Next") for line in output.splitlines() if line.startswith("Next")]
    return [shlex.split(line.rpartition("  ")[0])[1:] for line in lines]


def test_next_step_has_all_options_and_runs(project: Project) -> None:
    x, y = (part.numpy() for part in project.arrays("train"))
    np.savez("my data.npz", x=(255 * x).astype(np.uint8), y=y)
    options = ["--weights", "net.safetensors", "--mean", "0.1", "--std", "0.5", "--batch-size", "64"]
    options += ["--layers", "1,3*", "--fisher", "sampled", "--label-samples", "2", "--sua", "no", "--max-memory", "2GB"]
    result = ifcomp("estimate", project.model, "my data.npz", *options, "--device", "cpu:0")
    assert result.exit_code == 0, result.output
    [command] = next_commands(result.stdout)
    assert command[:3] == ["fit", project.model, "my data.npz"]
    assert set(command[3:]) >= {*options, "--device", "cpu:0"}
    result = ifcomp(*command)
    assert result.exit_code == 0, result.output
    stored = stored_record()
    assert (stored["data"], stored["options"]) == ("npz:my data.npz", {"batch_size": 64, "mean": [0.1], "std": [0.5]})
    audit, ood, calibrate = next_commands(result.stdout)
    assert ood == ["ood", "run.ifcomp", "DATA", "--held-out", "DATA", "--device", "cpu:0"]
    assert calibrate == ["calibrate", "run.ifcomp", "DATA", "--device", "cpu:0"]
    result = ifcomp(*audit)
    assert result.exit_code == 0, result.output
    [report] = next_commands(result.stdout)
    assert report == ["report", "run.ifcomp", "--device", "cpu:0"]
    assert ifcomp(*report).exit_code == 0


def test_next_step_of_an_audit_without_a_run_runs(project: Project) -> None:
    arguments = ["--model", project.model, "--weights", "net.safetensors", "--data", "train.npz", "--mean", "0"]
    result = ifcomp("audit", *arguments)
    assert result.exit_code == 0, result.output
    [command] = next_commands(result.stdout)
    assert set(command) >= {*arguments, "--report"}
    assert ifcomp(*command).exit_code == 0
    assert Path("audit.html").exists()


@pytest.mark.filterwarnings("ignore:100 held-out examples are few")
@pytest.mark.parametrize("command", ["score", "predict"])
def test_next_step_after_other_commands_runs(run: Project, command: str) -> None:
    result = ifcomp(command, "run.ifcomp", "npz:unlabelled.npz", "--batch-size", "50", "--model", run.model)
    assert result.exit_code == 0, result.output
    step, *_ = next_commands(result.stdout)
    expected = ["ood", "run.ifcomp", "npz:unlabelled.npz", "--held-out", "DATA", "--model", run.model]
    assert step == [*expected, "--batch-size", "50"]
    assert ifcomp(*("npz:valid.npz" if word == "DATA" else word for word in step)).exit_code == 0
