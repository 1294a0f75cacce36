"""A folder of a user: a module with a model, trained weights, and data files; and functions that run the command."""

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from sklearn.datasets import load_digits
from torch import nn
from typer.testing import CliRunner, Result

from ifcomp.cli.main import app
from ifcomp.cli.record import Record
from ifcomp.io.tensor_files import read_tensors, write_tensors

_COUNTER = itertools.count()

MODULE = """
from pathlib import Path

import numpy as np
import torch
from torch import nn


def build():
    print("printed by the user's code")
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 10))


def wide():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 120))


def not_a_model():
    return "text"


def broken():
    raise KeyError("weights of the layer")


def batches():
    with np.load("train.npz") as file:
        x, y = torch.tensor(file["x"]), torch.tensor(file["y"])
    return list(zip(x.split(50), y.split(50)))


class Interrupted:
    # Interrupts the command after two batches, while the file 'interrupt' exists.
    def __iter__(self):
        for number, batch in enumerate(batches()):
            if number == 2 and Path("interrupt").exists():
                raise KeyboardInterrupt
            yield batch


class FirstBatchOnly:
    def __iter__(self):
        yield batches()[0]
        raise AssertionError("the second batch was read")
"""


@dataclass(frozen=True)
class Project:
    """The folder, and the name of its module, which is unique in the process."""

    folder: Path
    module: str

    @property
    def model(self) -> str:
        return f"{self.module}:build"

    def fit_arguments(self, data: str = "npz:train.npz") -> list[str]:
        return ["fit", self.model, data, "--weights", "net.safetensors"]

    def network(self) -> nn.Module:
        """The trained model, loaded without the command."""
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 10))
        model.load_state_dict(torch.load(self.folder / "net.pt", weights_only=True))
        return model.eval()

    def arrays(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        with np.load(self.folder / f"{name}.npz") as file:
            return torch.tensor(file["x"]), torch.tensor(file["y"])


def create_project(folder: Path) -> Project:
    """200 training digits with ten wrong labels, 100 for validation, 100 inverted digits, and a trained model."""
    digits = load_digits()
    x, y = (digits.images / 16).astype(np.float32)[:, None], digits.target.copy()
    y[:200:20] = (y[:200:20] + 1) % 10
    np.savez(folder / "train.npz", x=x[:200], y=y[:200], classes=np.array([f"digit {label}" for label in range(10)]))
    np.savez(folder / "valid.npz", x=x[200:300], y=y[200:300])
    np.savez(folder / "inverted.npz", x=1 - x[300:400], y=np.full(100, 99))
    np.savez(folder / "unlabelled.npz", x=x[200:300])
    np.savez(folder / "flat.npz", x=np.ones((5, 3)))
    project = Project(folder, f"user_module_{next(_COUNTER)}")
    (folder / f"{project.module}.py").write_text(MODULE)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 10))
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(torch.tensor(x[:200])), torch.tensor(y[:200])).backward()
        optimizer.step()
    save_file(model.state_dict(), folder / "net.safetensors")
    torch.save(model.state_dict(), folder / "net.pt")
    return project


def files() -> set[str]:
    """Names in the current folder."""
    return {path.name for path in Path().iterdir()} - {"__pycache__"}


def ifcomp(*arguments: str) -> Result:
    """Run the command in this process."""
    return CliRunner().invoke(app, list(arguments), prog_name="ifcomp")


def run_json(*arguments: str, code: int = 0) -> dict[str, Any]:
    """Run the command with ``--json``, check its exit code, and return the object."""
    result = ifcomp(*arguments, "--json")
    assert result.exit_code == code, (result.output, result.exception)
    content: dict[str, Any] = json.loads(result.stdout)
    assert (content["command"], content["exit_code"]) == (arguments[0], code)
    return content


def stored_record(run: str = "run.ifcomp") -> dict[str, Any]:
    """The record in the header of a run."""
    with safe_open(run, framework="pt") as file:
        content: dict[str, Any] = json.loads(file.metadata()["ifcomp"])["record"]
        return content


def write_record(run: str, record: Record | dict[str, Any]) -> None:
    """Write a record into a run, with a correct digest."""
    tensors, content = read_tensors(run, "ifcomp")
    plain = record.to_json() if isinstance(record, Record) else record
    write_tensors(run, {name: value.clone() for name, value in tensors.items()}, "ifcomp", content | {"record": plain})


def change_record(run: str = "run.ifcomp", **changes: Any) -> None:
    """Change the record of a run without a new signature, as somebody else could."""
    write_record(run, {**stored_record(run), **changes})


def remove_record(run: str = "run.ifcomp") -> None:
    """Write the run as `IFComp.save` does, without a record."""
    tensors, content = read_tensors(run, "ifcomp")
    del content["record"]
    write_tensors(run, {name: value.clone() for name, value in tensors.items()}, "ifcomp", content)


def run_text(*arguments: str) -> str:
    """Run the command and return standard output without line breaks."""
    result = ifcomp(*arguments)
    assert result.exit_code == 0, result.output
    return " ".join(result.stdout.split())


def check_refused(*arguments: str, message: str) -> None:
    """Run the command, and check that it ends with a message and exit code 2 and leaves no file."""
    before = files()
    result = ifcomp(*arguments)
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.stderr.replace("│", " ").split())
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert files() == before
