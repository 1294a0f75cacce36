"""The command itself: version, help, exit codes, errors without tracebacks."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner, Result

from ifcomp import __version__
from ifcomp.cli.main import app
from ifcomp.errors import SettingError


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), prog_name="ifcomp")


def test_version() -> None:
    found = run("--version")
    assert found.exit_code == 0
    assert found.stdout == f"ifcomp {__version__}\n"


def test_module_is_the_command() -> None:
    found = subprocess.run([sys.executable, "-m", "ifcomp", "--version"], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout, found.stderr) == (0, f"ifcomp {__version__}\n", "")


def test_without_arguments_shows_help() -> None:
    assert "Usage: ifcomp" in " ".join(run().output.split())


def test_every_help_ends_with_an_example() -> None:
    for arguments in [(), *((command.callback.__name__,) for command in app.registered_commands)]:
        found = run(*arguments, "--help")
        assert found.exit_code == 0
        last = found.stdout.strip().splitlines()[-1]
        assert last.strip().startswith(f"Example: ifcomp {' '.join(arguments)}".strip())


@pytest.mark.parametrize("arguments", [["dmo"], ["demo", "--sed", "1"], ["demo", "--seed", "-1"], ["demo", "extra"]])
def test_wrong_use_exits_with_2(arguments: list[str]) -> None:
    found = run(*arguments)
    assert found.exit_code == 2
    assert found.stdout == ""
    assert "Traceback" not in found.stderr


def test_own_errors_end_with_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise SettingError("alpha must be at least 0, but is [bold]-1[/bold].")

    monkeypatch.setattr("ifcomp.cli.demo_study.run", fail)
    found = run("demo")
    assert found.exit_code == 2
    assert found.stdout == ""
    assert found.stderr == "Error: alpha must be at least 0, but is [bold]-1[/bold].\n"


def test_other_errors_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("ifcomp.cli.demo_study.run", fail)
    assert isinstance(run("demo").exception, ZeroDivisionError)
