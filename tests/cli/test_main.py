"""The app: version, help, exit codes, errors without tracebacks."""

import subprocess
import sys

import pytest
from project import ifcomp

from ifcomp import __version__
from ifcomp.cli.main import app
from ifcomp.errors import SettingError


def test_version() -> None:
    result = ifcomp("--version")
    assert result.exit_code == 0
    assert result.stdout == f"ifcomp {__version__}\n"


def test_python_m_ifcomp() -> None:
    result = subprocess.run([sys.executable, "-m", "ifcomp", "--version"], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, f"ifcomp {__version__}\n", "")


def test_help_without_arguments() -> None:
    assert "Usage: ifcomp" in " ".join(ifcomp().output.split())


def test_every_help_ends_with_an_example() -> None:
    for arguments in [(), *((command.callback.__name__,) for command in app.registered_commands)]:
        result = ifcomp(*arguments, "--help")
        assert result.exit_code == 0
        last = result.stdout.strip().splitlines()[-1]
        assert last.strip().startswith(f"Example: ifcomp {' '.join(arguments)}".strip())


@pytest.mark.parametrize("arguments", [["dmo"], ["demo", "--sed", "1"], ["demo", "--seed", "-1"], ["demo", "extra"]])
def test_usage_errors(arguments: list[str]) -> None:
    result = ifcomp(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Traceback" not in result.stderr


def test_errors_of_the_library_are_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: int) -> None:
        raise SettingError("alpha must be at least 0, but is [bold]-1[/bold].")

    monkeypatch.setattr("ifcomp.cli.demo_study.load_data", fail)
    result = ifcomp("demo")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr == "Error: alpha must be at least 0, but is [bold]-1[/bold].\n"


def test_other_errors_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: int) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("ifcomp.cli.demo_study.load_data", fail)
    assert isinstance(ifcomp("demo").exception, ZeroDivisionError)
