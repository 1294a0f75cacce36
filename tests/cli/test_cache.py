"""What one command scored is not computed again by another, and a cache is used only if it is right and the user's."""

import re
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from project import Project, ifcomp, run_json
from safetensors.torch import load_file, save_file

from ifcomp import IFComp
from ifcomp.cli.cache import open_cache
from ifcomp.cli.cached_results import audit_from_parts, audit_parts
from ifcomp.cli.options import DataOptions, ModelOptions
from ifcomp.cli.run import open_run
from ifcomp.detection import OODDetector
from ifcomp.errors import IfcompWarning
from ifcomp.tasks.audit import LabelAudit

CACHE = Path("run.ifcomp.cache/audit.safetensors")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the verbs that were computed, in order."""
    made: list[str] = []

    def counted(owner: type, name: str) -> Callable[..., Any]:
        verb = getattr(owner, name)

        def call(*arguments: Any, **settings: Any) -> Any:
            made.append(name)
            return verb(*arguments, **settings)

        return call

    for owner, name in ((IFComp, "audit"), (IFComp, "score"), (OODDetector, "table")):
        monkeypatch.setattr(owner, name, counted(owner, name))
    return made


def page() -> str:
    """The report without the time at which it was written."""
    return re.sub(r"\d{4}-\d\d-\d\d[^<\"]*", "", Path("report.html").read_text())


def audit_calls(calls: list[str], *arguments: str) -> int:
    """Audit, and return how often the audit was computed."""
    calls.clear()
    run_json("audit", "run.ifcomp", *arguments)
    return calls.count("audit")


def test_report_after_audit_computes_nothing_and_is_the_same(run: Project, calls: list[str]) -> None:
    assert ifcomp("report", "run.ifcomp").exit_code == 0
    expected = page()
    shutil.rmtree("run.ifcomp.cache")
    first = run_json("audit", "run.ifcomp", "--top", "20")
    table = Path("audit.csv").read_bytes()
    calls.clear()
    assert ifcomp("report", "run.ifcomp").exit_code == 0
    assert page() == expected
    assert run_json("audit", "run.ifcomp", "--top", "20") == first
    assert Path("audit.csv").read_bytes() == table
    assert calls == []


@pytest.mark.filterwarnings("ignore:100 held-out examples are few")
def test_report_after_ood_scores_nothing_again(run: Project, calls: list[str]) -> None:
    arguments = ("ood", "run.ifcomp", "npz:inverted.npz", "--held-out", "npz:valid.npz")
    first = run_json(*arguments)
    table = Path("ood.csv").read_bytes()
    assert calls == ["table"]
    assert ifcomp("report", "run.ifcomp").exit_code == 0
    calls.clear()
    assert ifcomp("report", "run.ifcomp", "--ood", "npz:inverted.npz").exit_code == 0
    assert run_json("ood", "run.ifcomp", "npz:inverted.npz")["top"] == first["top"]
    assert Path("ood.csv").read_bytes() == table
    assert calls == []
    assert ifcomp(*arguments, "--tpr", "0.5").exit_code == 0  # another detector
    assert calls == ["table"]


@pytest.mark.filterwarnings("ignore:100 held-out examples are few")
def test_one_table_per_data_set_and_only_the_latest_are_stored(run: Project) -> None:
    opened = open_run("run.ifcomp", ModelOptions())
    sources = [opened.open_data(f"npz:{name}.npz", DataOptions(), labelled=False) for name in ("inverted", "train")]
    ifc = opened.load_predictor(*sources)
    cache = replace(open_cache(opened, ifc), max_tables=1)
    for tpr in (0.9, 0.8):
        cache.ood_table(sources[0], ifc.ood_detector(run.arrays("valid")[0], tpr))
        assert len(tables()) == 1
    first = tables()
    cache.ood_table(sources[1], ifc.detector)
    assert len(tables()) == 1
    assert tables() != first


def tables() -> list[str]:
    """Names of the stored tables of OOD scores."""
    return [file.name for file in CACHE.parent.glob("ood-*")]


def test_other_data_weights_factors_or_reference_are_computed(run: Project, calls: list[str]) -> None:
    assert audit_calls(calls) == 1
    assert audit_calls(calls) == 0
    assert audit_calls(calls, "--reference", "npz:valid.npz") == 1
    assert audit_calls(calls) == 1  # only the latest audit is stored
    x, y = run.arrays("train")
    y[3] = (y[3] + 1) % 10
    np.savez("relabelled.npz", x=x.numpy(), y=y.numpy())
    assert audit_calls(calls, "npz:relabelled.npz") == 1
    assert audit_calls(calls) == 1
    assert ifcomp(*run.fit_arguments(), "--beta", "0.5").exit_code == 0
    assert audit_calls(calls) == 1
    state = load_file("net.safetensors")
    save_file({name: value * 1.01 for name, value in state.items()}, "net.safetensors")
    assert ifcomp(*run.fit_arguments(), "--beta", "0.5").exit_code == 0
    assert audit_calls(calls) == 1


@pytest.mark.parametrize("how", ["value", "text", "truncated", "unsigned", "folder"])
def test_damaged_or_forged_cache_is_ignored(run: Project, calls: list[str], how: str) -> None:
    expected = run_json("audit", "run.ifcomp")
    content = CACHE.read_bytes()
    if how == "value":  # one bit of the last tensor
        CACHE.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif how == "text":
        CACHE.write_bytes(content.replace(b"noise_rate", b"noise_bait"))
    elif how == "truncated":
        CACHE.write_bytes(content[:-100])
    elif how == "unsigned":
        save_file(load_file(CACHE), CACHE, {"content": "{}", "signature": ""})
    else:
        CACHE.unlink()
        CACHE.mkdir()
    calls.clear()
    assert run_json("audit", "run.ifcomp") == expected
    assert calls.count("audit") == 1


def test_cache_of_another_user_is_ignored(
    run: Project, calls: list[str], tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert audit_calls(calls, "--trust-run") == 1
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("another_user")))
    assert audit_calls(calls, "--trust-run") == 1


def test_folder_that_cannot_be_created_is_no_error(run: Project, calls: list[str]) -> None:
    Path("run.ifcomp.cache").write_text("a file")
    assert audit_calls(calls) == 1
    assert audit_calls(calls) == 1
    assert Path("run.ifcomp.cache").read_text() == "a file"


def test_nothing_is_stored_in_a_linked_folder(run: Project, calls: list[str]) -> None:
    """A link that comes with a run of somebody else may lead to any folder."""
    Path("elsewhere").mkdir()
    Path("run.ifcomp.cache").symlink_to("elsewhere")
    assert audit_calls(calls) == 1
    assert list(Path("elsewhere").iterdir()) == []


def test_warnings_of_a_stored_result_are_repeated(run: Project) -> None:
    opened = open_run("run.ifcomp", ModelOptions())
    source = opened.open_data(None, DataOptions())
    ifc = opened.load_predictor(source)

    def warned() -> LabelAudit:
        warnings.warn("few predictors", IfcompWarning, stacklevel=1)
        return ifc.audit(source.batches())

    def never() -> LabelAudit:
        raise AssertionError("computed again")

    audits = []
    for compute in (warned, never):
        with pytest.warns(IfcompWarning, match="few predictors") as caught:
            audits.append(open_cache(opened, ifc).audit(source, None, compute))
        assert len(caught) == 1
    pd.testing.assert_frame_equal(audits[0].frame, audits[1].frame, check_exact=True)
    assert audits[0].settings == audits[1].settings


def test_an_audit_survives_its_parts(project: Project) -> None:
    audit = IFComp(project.network()).audit([project.arrays("train")])
    audit = audit.with_names([f"digit {label}" for label in range(10)], [f"é{row}" for row in range(200)])
    tensors, plain = audit_parts(audit)
    copy = audit_from_parts(tensors, plain)
    for name in ("frame", "weights"):
        pd.testing.assert_frame_equal(getattr(copy, name), getattr(audit, name), check_exact=True)
    pd.testing.assert_frame_equal(copy.why(3), audit.why(3), check_exact=True)
    assert (copy.headline, copy.noise_rate, copy.memorised) == (audit.headline, audit.noise_rate, audit.memorised)
    np.testing.assert_array_equal(copy.pred_probs, audit.pred_probs)
