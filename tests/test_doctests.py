"""The examples in the docstrings of `IFComp` run and print what they show."""

import copy
import doctest
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

from ifcomp import IFComp

#: Methods that must have an example.
VERBS = (
    *("fit", "audit", "ood_detector", "calibrate", "predict_proba", "predict_set", "prune", "explain", "report"),
    *("score", "save", "load"),
)

TESTS = {test.name.removeprefix("IFComp").lstrip("."): test for test in doctest.DocTestFinder().find(IFComp, "IFComp")}


@cache
def names() -> dict[str, Any]:
    """The names that the examples use."""
    digits = load_digits()
    x, y = torch.tensor(digits.data / 16).float(), torch.tensor(digits.target)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    train, held_out = (order[:400], order[400:800])
    labels = y[train].clone()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    for _ in range(40):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[train]), labels).backward()
        optimizer.step()
    labels[:2] = (labels[:2] + 1) % 10
    return {"model": model.eval(), "train": (x[train], labels), "held_out": (x[held_out], y[held_out])}


@cache
def fitted() -> IFComp:
    return IFComp(names()["model"]).fit(names()["train"])


@pytest.mark.parametrize(
    "name", [name for name, test in TESTS.items() if test.examples], ids=lambda name: name or "IFComp"
)
def test_examples(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    test = copy.copy(TESTS[name])
    x, y = names()["held_out"]
    test.globs = {"IFComp": IFComp, "ifc": copy.copy(fitted()), "x": x, "y": y, **names()}
    printed: list[str] = []
    results = doctest.DocTestRunner().run(test, out=printed.append)
    assert results.attempted
    assert not results.failed, "".join(printed)


def test_every_verb_has_an_example() -> None:
    assert [name for name in VERBS if not TESTS[name].examples] == []
