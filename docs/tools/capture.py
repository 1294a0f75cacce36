"""Run the examples of the documentation and capture their output.

``python -m docs.tools.capture`` runs every example into ``docs/outputs``, and every marked block of the README and the
pages in a folder with ``examples/own_model``, and puts the output below it:

- ``<!-- run: python -->`` before a block of Python, which is followed by a block of text;
- ``<!-- run: shell -->`` before a console block, whose lines with ``$`` are run one after the other.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))
OUTPUTS = ROOT / "docs" / "outputs"

#: Examples that are started in several processes.
PROCESSES = {"several_processes": 2}

_PYTHON = re.compile(r"(<!-- run: python -->\n+```python\n)(.*?)(```\n+```text\n)(.*?)(```)", re.DOTALL)
_SHELL = re.compile(r"(<!-- run: shell -->\n+```console\n)(.*?)(```)", re.DOTALL)

_RUN = (
    "import sys, runpy, torch; from experiments.torchvision_shim import declare_missing_operators; "
    "declare_missing_operators(); torch.set_num_threads(1); sys.argv = sys.argv[1:]; "
    "runpy.run_path(sys.argv[0], run_name='__main__')"
)


def environment() -> dict[str, str]:
    """The environment of this process with the source of the library, its commands, one thread and 100 columns."""
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    search = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, "PYTHONPATH": paths, "PATH": search, "OMP_NUM_THREADS": "1", "COLUMNS": "100"}


def run_example(name: str, folder: str) -> str:
    """Run an example and return its output; errors are raised."""
    script = str(ROOT / "examples" / f"{name}.py")
    start = [sys.executable, "-c", _RUN, script]
    if name in PROCESSES:
        start = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={PROCESSES[name]}", script]
    return subprocess.run(start, cwd=folder, env=environment(), check=True, stdout=subprocess.PIPE, text=True).stdout


def run_python(code: str, folder: str) -> str:
    """Run a block of Python and return its output."""
    start = [sys.executable, "-c", code]
    return subprocess.run(start, cwd=folder, env=environment(), check=True, stdout=subprocess.PIPE, text=True).stdout


def run_shell(block: str, folder: str) -> str:
    """Run a console block; return it with the output below each line of ``$``."""
    shown = []
    for line in re.findall(r"^\$ (.+)$", block, re.MULTILINE):
        call = subprocess.run(
            line, shell=True, cwd=folder, env=environment(), check=True, capture_output=True, text=True
        )
        shown.append(f"$ {line}\n{call.stdout}")
    return re.sub(r"[ \t]+\n", "\n", "".join(shown))


def refreshed(markdown: str, folder: str) -> str:
    """Return the page with the current output of its marked blocks."""
    markdown = _SHELL.sub(lambda found: found[1] + run_shell(found[2], folder) + found[3], markdown)
    return _PYTHON.sub(lambda found: found[1] + found[2] + found[3] + run_python(found[2], folder) + found[5], markdown)


def pages() -> list[Path]:
    """Every page with marked blocks."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page for page in found if "<!-- run: " in page.read_text()]


def main(names: list[str]) -> None:
    """Run everything, or only the named examples and pages (by file name)."""
    OUTPUTS.mkdir(exist_ok=True)
    for name in EXAMPLES:
        if not names or name in names:
            with tempfile.TemporaryDirectory() as folder:
                (OUTPUTS / f"{name}.txt").write_text(run_example(name, folder))
    for page in pages():
        if not names or page.name in names:
            with tempfile.TemporaryDirectory() as folder:
                shutil.copytree(ROOT / "examples" / "own_model", folder, dirs_exist_ok=True)
                page.write_text(refreshed(page.read_text(), folder))


if __name__ == "__main__":
    main(sys.argv[1:])
