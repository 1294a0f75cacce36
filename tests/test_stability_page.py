"""The page of stability lists the public names and the versions of the file formats."""

import re
from importlib import resources
from pathlib import Path

import ifcomp
from ifcomp.cli import record
from ifcomp.data.corrections import decisions
from ifcomp.io import checkpoint_files, factor_files
from ifcomp.tasks import calibration_result, ood_rule

PAGE = (Path(__file__).parents[1] / "docs" / "stability.md").read_text()


def test_every_public_name_is_listed_and_exists() -> None:
    for name in ifcomp.__all__:
        assert getattr(ifcomp, name) is not None
        assert f"`{name}`" in PAGE or name == "__version__"


def test_versions_of_files_are_those_of_the_code() -> None:
    rows = [line.split("|") for line in PAGE.split("## File formats")[1].splitlines() if line.startswith("| ")]
    versions = {cells[1].split()[0].strip("`"): int(re.findall(r"\d+", cells[3])[0]) for cells in rows[1:]}
    assert versions == {
        "run": factor_files.SCHEMA,
        "calibration": calibration_result.SCHEMA,
        "detector": ood_rule.SCHEMA,
        "record": record.SCHEMA,
        "checkpoint": checkpoint_files.SCHEMA,
        "decisions.csv": int(decisions.FORMAT),
    }


def test_the_package_is_typed() -> None:
    assert resources.files("ifcomp").joinpath("py.typed").is_file()
