"""Declared dependencies: `make test-lowest` installs their lower bounds, and the extra `all` includes every extra."""

import re
import tomllib
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[1]


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def extras() -> dict[str, list[str]]:
    """Dependencies of each extra except `all`."""
    return {name: lines for name, lines in project()["optional-dependencies"].items() if name != "all"}


def declared() -> dict[str, Version]:
    """Lower bounds of all dependencies, including those of extras."""
    lines = [*project()["dependencies"], *(line for extra in extras().values() for line in extra)]
    bounds = {}
    for requirement in map(Requirement, lines):
        (bound,) = requirement.specifier
        assert bound.operator == ">=", f"{requirement}: {bound} is not a lower bound"
        bounds[requirement.name] = Version(bound.version)
    return bounds


def pins(file: str) -> dict[str, Version]:
    found = re.findall(r"^([\w-]+)(?:\[\w+\])?==(\S+)$", (ROOT / file).read_text(), re.MULTILINE)
    return {name.lower(): Version(version) for name, version in found}


def test_the_lowest_versions_are_the_declared_bounds() -> None:
    bounds, lowest = declared(), pins("requirements-lowest.txt")
    assert {name: lowest.get(name) for name in bounds} == bounds


def test_what_is_installed_is_no_older_than_declared() -> None:
    installed = pins("requirements.txt")
    assert [name for name, bound in declared().items() if installed[name] < bound] == []


def test_the_extra_all_includes_every_extra() -> None:
    (line,) = project()["optional-dependencies"]["all"]
    requirement = Requirement(line)
    assert requirement.name == project()["name"]
    assert requirement.extras == set(extras())
