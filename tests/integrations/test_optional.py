"""Optional packages are not imported by the library, and a missing one is named with its extra."""

import subprocess
import sys

CODE = """
import sys

OPTIONAL = {"pytorch_ood", "cleanlab", "datasets", "torchvision", "kronfluence"}

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in OPTIONAL:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
import importlib
import ifcomp
assert not any(name.startswith("ifcomp.integrations") for name in sys.modules)
importlib.import_module("ifcomp.integrations.kronfluence")
importlib.import_module("ifcomp.integrations.sklearn")
for package in ("pytorch_ood", "cleanlab"):
    try:
        importlib.import_module(f"ifcomp.integrations.{package}")
    except ifcomp.errors.MissingPackageError as error:
        print(error)
"""


def test_missing_packages_are_named_with_their_extra() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "pytorch-ood cannot be imported (No module named 'pytorch_ood'). Install it with: pip install \"ifcomp[ood]\"",
        "cleanlab with Datalab cannot be imported (No module named 'cleanlab'). "
        'Install it with: pip install "ifcomp[cleanlab]"',
    ]
