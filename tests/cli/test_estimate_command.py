"""``ifcomp estimate``, and ``--max-memory`` of the other commands."""

import pandas as pd
import pytest
from project import Project, ifcomp, run_json, run_text


def test_text_has_layers_and_totals(project: Project) -> None:
    text = run_text("estimate", project.model, "npz:train.npz", "--weights", "net.safetensors")
    for part in ("layer", "disk", "linear", "fit:", "score:", "200 examples", "ifcomp fit"):
        assert part in text


def test_json(run: Project) -> None:
    content = run_json("estimate", run.model, "npz:train.npz", "--layers", "last", "--examples", "1000")
    assert content["examples"] == 1000
    assert [layer["name"] for layer in content["layers"]] == ["3"]
    assert content["disk"] == 4 * (13 * 13 + 10 * 10 + 13 * 10)
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
