"""Wheels have the C library where there is a compiler, and go without it where there is none."""

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[2]
LIBRARY = "ifcomp/compiled/squares.so"

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


def build_script() -> ModuleType:
    found = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def wheel(tmp_path: Path, **environment: str) -> tuple[str, set[str]]:
    """The name of a wheel that is made in a copy of the project, and what is in it."""
    project, target = tmp_path / "project", tmp_path / "wheels"
    project.mkdir()
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, project)
    shutil.copytree(ROOT / "src", project / "src", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(target)]
    subprocess.run(command, cwd=project, env={**os.environ, **environment}, check=True, capture_output=True)
    (made,) = target.iterdir()
    return made.name, set(ZipFile(made).namelist())


@needs_compiler
@pytest.mark.skipif(sys.platform != "linux", reason="systems are named differently elsewhere")
def test_a_wheel_for_this_system(tmp_path: Path) -> None:
    name, files = wheel(tmp_path)
    assert name.endswith(f"-py3-none-linux_{platform.machine()}.whl")
    assert {LIBRARY, "ifcomp/compiled/squares.c", "ifcomp/py.typed"} <= files


def test_a_wheel_for_every_system_without_a_compiler(tmp_path: Path) -> None:
    name, files = wheel(tmp_path, CC="no-such-compiler")
    assert name.endswith("-py3-none-any.whl")
    assert LIBRARY not in files
    assert "ifcomp/compiled/__init__.py" in files


@needs_compiler
@pytest.mark.parametrize(
    ("compiler", "problem"),
    [("cc", None), ("", None), ("no-such-compiler -m32", "no C compiler 'no-such"), ("cc -no-such-flag", "failed")],
)
def test_what_went_wrong(compiler: str, problem: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library of before is gone, too: it may be of another version."""
    monkeypatch.setenv("CC", compiler)
    (tmp_path / "it.so").touch()
    found = build_script().compile_library(tmp_path / "it.so")
    assert found is None if problem is None else problem in found
    assert [file.name for file in tmp_path.iterdir()] == ([] if problem else ["it.so"])
