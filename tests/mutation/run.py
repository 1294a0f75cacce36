"""Mutation testing: small changes of the code that a test must detect.

Usage: ``python tests/mutation/run.py [PART ...] [--sample N] [--seed S] [--again]``. mutmut runs each part of
``tool.ifcomp.mutants`` in pyproject.toml with its tests, in the folder ``mutants/PART``. Stored results are reused.
``--sample`` limits a part to N random mutants. ``mutants/results.json`` has the outcome of every mutant.
"""

import argparse
import configparser
import json
import os
import random
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LINKED = ("src", "tests", "experiments", "benchmarks", "examples", "pyproject.toml")

#: Outcomes by exit code of mutmut; other codes mean a crash.
OUTCOMES = {None: "not tried", 0: "survived", 5: "no test", 33: "no test", 1: "killed", 3: "killed"}
OUTCOMES |= dict.fromkeys((24, -24, 36, 152, 255), "timeout")


#: Runs mutmut with an attribute of tests that pytest 9.2 has renamed.
COMMAND = """
import pytest, mutmut.__main__
if not hasattr(pytest.Item, "_nodeid"):
    pytest.Item._nodeid = property(lambda item: item.nodeid)
mutmut.__main__.cli()
"""


def prepare(folder: Path, part: dict[str, list[str] | str]) -> None:
    """Create a project folder for mutmut with the settings of a part."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in LINKED:
        if not (folder / name).exists():
            (folder / name).symlink_to(ROOT / name)
    cases = " ".join(str(part["cases"]).split())
    tests = [*part["tests"], *(["-k", cases] if cases else [])]
    settings = {
        "source_paths": "src",
        "only_mutate": "\n".join(["", *part["files"]]),
        "also_copy": "\n".join(["", "experiments", "benchmarks", "examples"]),
        "pytest_add_cli_args": "\n".join(["", "-p", "no:cacheprovider"]),
        "pytest_add_cli_args_test_selection": "\n".join(["", *tests]),
        "timeout_constant": "4",  # times 15: one minute more than the tests take
        "use_git_change_detection": "false",
    }
    parser = configparser.ConfigParser()
    parser["mutmut"] = settings
    with (folder / "setup.cfg").open("w") as file:
        parser.write(file)


def mutmut(folder: Path, names: list[str]) -> None:
    """Run mutmut in a folder on the named mutants, or on all without a result."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    command = [sys.executable, "-c", COMMAND, "run", "--max-children", "1", *names]
    if code := subprocess.run(command, cwd=folder, env=environment).returncode:
        raise SystemExit(code)


def outcomes(folder: Path) -> dict[str, str]:
    """Return the outcome of every mutant in a folder."""
    by_name: dict[str, str] = {}
    for path in sorted((folder / "mutants" / "src").rglob("*.meta")):
        codes = json.loads(path.read_text())["exit_code_by_key"]
        by_name |= {name: OUTCOMES.get(code, "crashed") for name, code in codes.items()}
    return by_name


def sampled_mutants(folder: Path, part: dict[str, list[str] | str], size: int, seed: int, again: set[str]) -> list[str]:
    """Return random mutants of a part without a result, or whose outcome is in ``again``."""
    from mutmut.mutation.file_mutation import mutate_file_contents
    from mutmut.utils.format_utils import get_mutant_name

    known = outcomes(folder)
    names = list(known) or [
        get_mutant_name(path.relative_to(ROOT), name)
        for pattern in part["files"]
        for path in sorted(ROOT.glob(pattern))
        for name in mutate_file_contents(str(path), path.read_text(), None, None).mutant_names
    ]
    random.Random(seed).shuffle(names)
    return [name for name in names[:size] if known.get(name, "not tried") in {"not tried", *again}]


def main() -> None:
    """Run the parts of the command line, or all."""
    parts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ifcomp"]["mutants"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"parts to run, of {', '.join(parts)}; default: all")
    parser.add_argument("--sample", type=int, default=10**6, metavar="N", help="largest number of mutants per part")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample")
    parser.add_argument("--again", action="store_true", help="run surviving mutants again")
    options = parser.parse_args()
    again = {"survived", "no test"} if options.again else set()
    for name in options.parts or parts:
        folder = ROOT / "mutants" / name
        prepare(folder, parts[name])
        if names := sampled_mutants(folder, parts[name], options.sample, options.seed, again):
            mutmut(folder, names)
    tried = {name: outcomes(ROOT / "mutants" / name) for name in parts}
    (ROOT / "mutants" / "results.json").write_text(json.dumps(tried, indent=1))
    for name, part in tried.items():
        print(name, {outcome: list(part.values()).count(outcome) for outcome in sorted(set(part.values()))})  # noqa: T201


if __name__ == "__main__":
    main()
