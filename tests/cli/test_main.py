"""The app: version, help, exit codes, errors without tracebacks."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from project import Project, ifcomp
from typer.testing import CliRunner

from ifcomp import __version__
from ifcomp.cli.main import app
from ifcomp.errors import SettingError

COMMANDS = [command.callback.__name__ for command in app.registered_commands if command.callback is not None]


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)])
def test_version_and_help_of_every_command(command: list[str]) -> None:
    for option in ("-V", "--version"):
        result = ifcomp(*command, option)
        assert (result.exit_code, result.stdout) == (0, f"ifcomp {__version__}\n")
    short, long = ifcomp(*command, "-h"), ifcomp(*command, "--help")
    assert short.exit_code == 0
    assert short.stdout == long.stdout
    words = short.stdout.split()
    assert {"--version", "-V"} <= set(words)
    assert {"--quiet", "-q"} <= set(words)
    assert ("--json" in words) == (command != [])


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


def test_quiet_prints_only_the_answer_and_warnings(run: Project) -> None:
    loud, quiet = ifcomp("audit", "run.ifcomp"), ifcomp("audit", "run.ifcomp", "-q")
    assert quiet.stderr == ""
    assert "printed by the user's code" in loud.stderr
    answer, rest = loud.stdout.split("Wrote")
    assert quiet.stdout == answer
    assert "Next" in rest
    assert ifcomp("-q", "audit", "run.ifcomp").stdout == quiet.stdout
    np.savez("few.npz", **{name: value.numpy()[:60] for name, value in zip("xy", run.arrays("valid"), strict=True)})
    result = subprocess.run(
        [sys.executable, "-m", "ifcomp", "calibrate", "run.ifcomp", "npz:few.npz", "-q"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr.startswith("Warning: 60 held-out examples are few")


def complete(*words: str) -> set[str]:
    """What the shell offers for the last word."""
    environment = {
        "_IFCOMP_COMPLETE": "complete_bash",
        "COMP_WORDS": " ".join(words),
        "COMP_CWORD": str(len(words) - 1),
    }
    result = CliRunner().invoke(app, [], prog_name="ifcomp", env=environment)
    return set(result.stdout.split())


def test_completion() -> None:
    assert complete("ifcomp", "ca") == {"calibrate"}
    assert complete("ifcomp", "audit", "--max-") == {"--max-suspects", "--max-memory"}
    assert complete("ifcomp", "fit", "--fisher", "e") == {"exact", "empirical"}
    result = CliRunner().invoke(app, [], prog_name="ifcomp", env={"_IFCOMP_COMPLETE": "source_bash"})
    assert result.exit_code == 0
    assert "_IFCOMP_COMPLETE=complete_bash" in result.stdout


# Errors --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (["audit", "gone.ifcomp"], "StorageError", "There is no run 'gone.ifcomp'"),
        (["audit", "--sead", "1"], "NoSuchOption", "No such option: --sead"),
        (["fit", "net:build"], "MissingParameter", "Missing argument 'DATA'"),
        (["fit", "net:build", "digits", "--beta", "x"], "BadParameter", "Invalid value for '--beta'"),
        (["audt"], "UsageError", "No such command 'audt'"),
    ],
)
def test_errors_in_json_and_in_text(
    arguments: list[str], kind: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = ifcomp(*arguments, "--json")
    assert (result.exit_code, result.stderr) == (2, "")
    content = json.loads(result.stdout)
    assert content.keys() == {"command", "error", "exit_code"}
    assert (content["command"], content["exit_code"]) == (arguments[0] if arguments[0] != "audt" else None, 2)
    assert content["error"]["type"] == kind
    assert message in content["error"]["message"]
    result = ifcomp(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith(f"Error: {content['error']['message']}")


def test_an_interrupt_in_json(project: Project) -> None:
    Path("interrupt").touch()
    result = ifcomp(*project.fit_arguments(f"{project.module}:Interrupted"), "--json")
    assert result.exit_code == 130
    content = json.loads(result.stdout)
    assert (content["error"]["type"], content["exit_code"]) == ("KeyboardInterrupt", 130)
    assert "Files are either complete or unchanged" in content["error"]["message"]


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
