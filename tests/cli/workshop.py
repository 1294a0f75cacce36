"""A folder such as a user of the command has: a module with a model, its weights, and data in files."""

import itertools
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from sklearn.datasets import load_digits
from torch import nn
from typer.testing import CliRunner, Result

from ifcomp.cli.main import app

NUMBERS = itertools.count()

MODULE = """
import torch
from torch import nn

def build():
    print("the user's own words")
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 10))

def wide():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 120))

def batches():
    with __import__("numpy").load("train.npz") as file:
        x, y = torch.tensor(file["x"]), torch.tensor(file["y"])
    return list(zip(x.split(50), y.split(50)))

def nothing():
    return "no model"

def broken():
    raise KeyError("weights of the layer")
"""


@dataclass(frozen=True)
class Workshop:
    """The folder, and the name of its module, which no other folder uses."""

    folder: Path
    module: str

    @property
    def model(self) -> str:
        return f"{self.module}:build"

    def fit_arguments(self) -> list[str]:
        return ["fit", self.model, "npz:train.npz", "--weights", "net.safetensors"]

    def network(self) -> nn.Module:
        """The trained model, made without the command."""
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 10))
        model.load_state_dict(torch.load(self.folder / "net.pt", weights_only=True))
        return model.eval()

    def arrays(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        with np.load(self.folder / f"{name}.npz") as file:
            return torch.tensor(file["x"]), torch.tensor(file["y"])


def furnish(folder: Path) -> Workshop:
    """200 training digits with ten wrong labels, 100 for validation, 100 inverted ones, and a trained model."""
    found = load_digits()
    x, y = (found.images / 16).astype(np.float32)[:, None], found.target.copy()
    y[:200:20] = (y[:200:20] + 1) % 10
    np.savez(folder / "train.npz", x=x[:200], y=y[:200], classes=np.array([f"digit {label}" for label in range(10)]))
    np.savez(folder / "valid.npz", x=x[200:300], y=y[200:300])
    np.savez(folder / "strange.npz", x=1 - x[300:400], y=np.full(100, 99))
    workshop = Workshop(folder, f"workshop_{next(NUMBERS)}")
    (folder / f"{workshop.module}.py").write_text(MODULE)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 10))
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(torch.tensor(x[:200])), torch.tensor(y[:200])).backward()
        optimizer.step()
    save_file(model.state_dict(), folder / "net.safetensors")
    torch.save(model.state_dict(), folder / "net.pt")
    return workshop


def ifcomp(*arguments: str) -> Result:
    """Run the command in this process."""
    return CliRunner().invoke(app, list(arguments), prog_name="ifcomp")


def forget(folder: Path) -> None:
    """Take the folder off the path again, where importing the user's module put it."""
    while str(folder) in sys.path:
        sys.path.remove(str(folder))
