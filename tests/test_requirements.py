"""The lowest versions that are declared are the ones that `make test-lowest` runs on."""

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[1]


def declared() -> dict[str, Version]:
    """The lower bound of every dependency, those of extras too."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
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
