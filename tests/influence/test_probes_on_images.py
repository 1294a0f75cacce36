"""Two probes instead of all labels on real images. The environment variable IFCOMP_DATA names the folder."""

import os
from pathlib import Path

import pytest
import torch

from experiments.datasets import DATA_VARIABLE, MNIST, Batches, load
from experiments.recipes import Recipe
from experiments.training import train
from ifcomp import IFComp, Relative
from ifcomp.tasks.metrics import auroc

pytestmark = pytest.mark.skipif(DATA_VARIABLE not in os.environ, reason=f"{DATA_VARIABLE} is not set")

IMAGES = 400


def test_two_probes_detect_as_well_as_all_labels(tmp_path: Path) -> None:
    digits = load("mnist", "train").first(8000)
    recipe = Recipe("one-cycle", 4, 0.05)
    trained = train("lenet", digits, recipe, normalisation=MNIST, seed=0, folder=tmp_path, progress=False)
    ifc = IFComp(trained.model(), beta=0.66, fisher="exact", damping=Relative(1e-4))
    ifc.fit(Batches(digits.first(2000), MNIST), progress=False)

    def surprise(name: str, probes: int | None) -> torch.Tensor:
        batches = Batches(load(name).first(IMAGES), MNIST)
        return torch.tensor(ifc.score(batches, probes=probes, progress=False).column("expected_influence"))

    in_distribution = {probes: surprise("mnist", probes) for probes in (None, 2)}
    for name in ("fashion-mnist", "kmnist", "notmnist"):
        scores = {probes: torch.cat([in_distribution[probes], surprise(name, probes)]).numpy() for probes in (None, 2)}
        exact, probed = (100 * auroc(scores[probes], [0] * IMAGES + [1] * IMAGES) for probes in (None, 2))
        assert exact > 90
        assert probed > exact - 0.3, name
