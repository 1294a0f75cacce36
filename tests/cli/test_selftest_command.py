"""``ifcomp selftest``, on the CPU."""

import itertools
from pathlib import Path

import pytest
import torch
from project import ifcomp, run_json
from torch import nn

from ifcomp.errors import SettingError
from ifcomp.selftest import run_selftest
from ifcomp.selftest_oracle import CASES, SelftestCase
from pretended_device import DEVICE, pretended_device

WRONG = """
import itertools

from torch import nn

from ifcomp.selftest_oracle import CASES, SelftestCase

calls = itertools.count()


def build():
    # Other weights at every call, so the oracle has another model than the device.
    model = nn.Sequential(nn.Linear(5, 3))
    model[0].weight.data *= 1 + next(calls)
    return model


def wrong():
    return [CASES[0], SelftestCase("other weights", build, (5,))]


def none():
    return []
"""


@pytest.mark.second_tier
def test_cpu_passes() -> None:
    content = run_json("selftest")
    assert content["exit_code"] == 0
    assert content["passed"]
    assert {row["name"] for row in content["results"]} == {case.name for case in CASES}
    assert {row["dtype"] for row in content["results"]} == {"float32", "float64"}
    assert len(content["results"]) == 2 * len(CASES)
    for row in content["results"]:
        assert len(row["errors"]) == 6
        limit = 1e-12 if row["dtype"] == "float64" else 1e-5
        assert max(row["errors"].values()) < limit
        assert min(row["fit_seconds"], row["score_seconds"]) > 0


def test_a_wrong_case_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wrong_cases.py").write_text(WRONG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    result = ifcomp("selftest", "--cases", "wrong_cases:wrong")
    assert result.exit_code == 1
    rows = {line.split("  ")[0].strip(): line for line in result.stdout.splitlines() if "float" in line}
    assert "FAILED" in rows["other weights"]
    assert "passed" in rows["mlp"]
    assert "other weights, float64, influence: error" in result.stdout
    assert "Please report" in " ".join(result.stdout.split())
    content = run_json("selftest", "--cases", "wrong_cases:wrong", code=1)
    assert not content["passed"]
    assert [bool(row["failed"]) for row in content["results"]] == [False, False, True, True]
    assert ifcomp("selftest", "--cases", "wrong_cases:none").exit_code == 2


@pytest.mark.parametrize("device", ["meta", "nonsense", "cuda:99"])
def test_unavailable_device(device: str) -> None:
    result = ifcomp("selftest", "--device", device)
    assert result.exit_code == 2
    assert f"The device '{device}' is not available" in result.stderr
    assert result.stdout == ""
    with pytest.raises(SettingError):
        run_selftest(device)


def test_an_exception_is_a_failure() -> None:
    class Broken(nn.Linear):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            if value.dtype == torch.float32:
                raise NotImplementedError("no such operation on this device")
            return super().forward(value)

    single, double = run_selftest("cpu", [SelftestCase("broken", lambda: Broken(3, 3), (3,))])
    assert set(single.failed) == set(single.errors)
    assert single.exceptions["second moments"] == "no such operation on this device"
    assert double.failed == ()


def test_wrong_weights_fail_each_comparison_with_the_cpu() -> None:
    calls = itertools.count()

    def build() -> nn.Module:
        model = nn.Linear(3, 3)
        model.weight.data *= 1 + next(calls)
        return model

    single, _ = run_selftest("cpu", [SelftestCase("wrong", build, (3,))])
    assert {"second moments", "influence", "scores on the CPU", "fit on the CPU"} <= set(single.failed)


def test_a_device_without_float64_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    with pretended_device(monkeypatch):
        results = run_selftest(str(DEVICE), [case for case in CASES if case.name in ("mlp", "batchnorm", "embedding")])
    assert [result.dtype for result in results] == ["float32"] * 3
    assert [(result.failed, result.exceptions) for result in results] == [((), {})] * 3
