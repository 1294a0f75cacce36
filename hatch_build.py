"""Makes the C library of `ifcomp.compiled` when ifcomp is installed; without a C compiler ifcomp does without it."""

import os
import shlex
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = Path(__file__).parent / "src" / "ifcomp" / "compiled"
SOURCE, FILE = FOLDER / "squares.c", FOLDER / "squares.so"
FLAGS = ("-std=gnu11", "-O3", "-fPIC", "-shared")


class CompileHook(BuildHookInterface):  # type: ignore[misc]
    """Called by hatchling before it makes a wheel, an editable one too."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and add what was made to the wheel, which is then one for this system."""
        if problem := compile_library():
            self.app.display_warning(f"ifcomp goes without its C library, more slowly: {problem}")
            return
        build_data["artifacts"].append(f"/{FILE.relative_to(Path(__file__).parent)}")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"


def compile_library(file: Path = FILE) -> str | None:
    """Make the library; what went wrong, if anything did. There is none then, not even one of before."""
    command = shlex.split(os.environ.get("CC") or "cc")
    made = file.with_suffix(f".{os.getpid()}.so")
    try:
        done = subprocess.run([*command, *FLAGS, str(SOURCE), "-o", str(made)], capture_output=True, text=True)
        problem = f"{shlex.join(command)} failed:\n{done.stderr.strip()}" if done.returncode else None
    except OSError as error:
        problem = f"there is no C compiler '{command[0]}' ({error.strerror})"
    if problem is None:
        made.replace(file)
    else:
        made.unlink(missing_ok=True)
        file.unlink(missing_ok=True)
    return problem
