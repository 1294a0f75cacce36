"""Optional packages are imported only where they are used. A missing package is named with its extra."""

import subprocess
import sys
from pathlib import Path

import pytest

from ifcomp.errors import MissingPackageError
from ifcomp.optional import requires_package

#: Optional packages cannot be imported.
ABSENT = """
import sys

OPTIONAL = {"pyarrow", "pytorch_ood", "cleanlab", "datasets", "torchvision", "kronfluence", "laplace", "transformers"}

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in OPTIONAL:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
import importlib
import ifcomp
from ifcomp.errors import MissingPackageError

def attempt(action):
    try:
        action()
    except MissingPackageError as error:
        print(error)
"""

INTEGRATIONS = """
assert not any(name.startswith("ifcomp.integrations") for name in sys.modules)
importlib.import_module("ifcomp.integrations.kronfluence")
importlib.import_module("ifcomp.integrations.sklearn")
attempt(lambda: importlib.import_module("ifcomp.integrations.pytorch_ood"))
"""

PARQUET = """
import pandas as pd
from ifcomp import IFComp, ScoreTable
from ifcomp.cli.output import check_target
from ifcomp.data.sources import open_source
table = ScoreTable(pd.DataFrame({"index": [0]}), {})
table.to_csv("scores.csv")
open_source("digits")
attempt(lambda: table.to_parquet("scores.parquet"))
attempt(lambda: open_source("parquet:data.parquet"))
attempt(lambda: check_target("scores.parquet", (".csv", ".parquet")))
"""

NO_PYARROW = "pyarrow cannot be imported (No module named 'pyarrow'). Install it with: pip install 'ifcomp[parquet]'"


def run(code: str, folder: Path) -> list[str]:
    """Run the code in a process without optional packages and return the lines that it prints."""
    command = [sys.executable, "-c", ABSENT + code]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder).stdout.splitlines()


def test_missing_packages_of_integrations_are_named_with_their_extra(tmp_path: Path) -> None:
    assert run(INTEGRATIONS, tmp_path) == [
        "pytorch-ood cannot be imported (No module named 'pytorch_ood'). Install it with: pip install 'ifcomp[ood]'",
    ]


def test_parquet_files_need_an_extra_and_csv_files_do_not(tmp_path: Path) -> None:
    assert run(PARQUET, tmp_path) == [NO_PYARROW] * 3
    assert [path.name for path in tmp_path.iterdir()] == ["scores.csv"]


@pytest.mark.parametrize("problem", [ImportError("no such file"), RuntimeError("operator does not exist")])
def test_failed_imports_become_typed_errors(problem: Exception) -> None:
    with (
        pytest.raises(MissingPackageError, match=r"pip install 'ifcomp\[ood\]'") as caught,
        requires_package("x", "ood"),
    ):
        raise problem
    assert caught.value.__cause__ is problem
    assert str(problem) in str(caught.value)


def test_other_errors_are_not_converted() -> None:
    with pytest.raises(KeyError), requires_package("x", "ood"):
        raise KeyError("y")
