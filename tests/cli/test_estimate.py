"""``ifcomp estimate``, and ``--max-memory`` of the commands that work through data."""

import json

import pandas as pd
import pytest
from workshop import Workshop, ifcomp


def test_shows_layers_and_totals(workshop: Workshop) -> None:
    found = ifcomp("estimate", workshop.model, "npz:train.npz", "--weights", "net.safetensors")
    assert found.exit_code == 0, found.output
    for part in ("layer", "disk", "linear", "fit:", "score:", "200 examples", "ifcomp fit"):
        assert part in found.stdout


def test_json_has_what_a_fit_then_takes(run: Workshop) -> None:
    found = ifcomp("estimate", run.model, "npz:train.npz", "--layers", "last", "--examples", "1000", "--json")
    assert found.exit_code == 0, found.output
    facts = json.loads(found.stdout)
    assert facts["command"] == "estimate"
    assert facts["examples"] == 1000
    assert [layer["name"] for layer in facts["layers"]] == ["3"]
    assert facts["disk"] == 4 * (13 * 13 + 10 * 10 + 13 * 10)
    assert facts["fit_seconds"] > 0
    assert facts["written"] == []


def test_a_limit_changes_no_result(run: Workshop) -> None:
    frames = []
    for options in ([], ["--max-memory", "300kB"]):
        fitted = ifcomp(*run.fit_arguments(), "--out", "other.ifcomp", *options)
        assert fitted.exit_code == 0, fitted.output
        scored = ifcomp("score", "other.ifcomp", "npz:valid.npz", "--out", "scores.csv", *options)
        assert scored.exit_code == 0, scored.output
        frames.append(pd.read_csv("scores.csv"))
    pd.testing.assert_frame_equal(frames[0], frames[1], rtol=1e-4)


@pytest.mark.parametrize("command", ["fit", "score", "estimate"])
def test_too_little_is_an_error_that_says_what_is_needed(command: str, run: Workshop) -> None:
    arguments = {
        "fit": run.fit_arguments(),
        "score": ["score", "run.ifcomp", "npz:valid.npz"],
        "estimate": ["estimate", run.model, "npz:train.npz"],
    }
    found = ifcomp(*arguments[command], "--max-memory", "1kB")
    assert found.exit_code == 2
    assert "max_memory is 1.0 kB" in found.stderr
    assert "bytes" in found.stderr
    assert ifcomp(*arguments[command], "--max-memory", "much").exit_code == 2
