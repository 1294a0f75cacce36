"""Tests of named data run in an empty folder."""

import sys
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def scratch_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path
