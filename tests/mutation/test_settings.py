"""The settings of mutation testing name files and tests that exist."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PARTS: dict[str, dict[str, Any]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ifcomp"]["mutants"]


@pytest.mark.parametrize("part", PARTS.values(), ids=list(PARTS))
def test_files_and_tests_exist(part: dict[str, Any]) -> None:
    paths = [*part["files"], *part["tests"]]
    assert [path for path in paths if not any(ROOT.glob(path))] == []
