"""Write the reports of the gallery and the pictures of the README: ``python -m docs.tools.gallery [NAME ...]``.

The reports of images and texts read public data from the folder in ``IFCOMP_DATA``. The picture of the report needs
Chromium on the path and the package playwright.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from PIL import Image
from sklearn.datasets import load_breast_cancer
from torch import Tensor, nn

from experiments import datasets, models
from experiments.label_audit import texts
from ifcomp import IFComp
from ifcomp.report import Preview

ASSETS = Path(__file__).resolve().parents[1] / "assets"
GALLERY = ASSETS / "gallery"
#: Position of the suspect in the picture of the README.
PICTURED = 1
TREC = ("description", "entity", "abbreviation", "human", "number", "location")


def images() -> None:
    """CIFAR-10 with the labels of one annotator (CIFAR-10N) and the published ResNet-20."""
    model, normalise = models.pretrained("resnet20")
    data = datasets.load("cifar10", "train")
    chosen = torch.from_numpy(np.random.default_rng(0).permutation(50_000)[:1_200])
    labels = torch.from_numpy(datasets.read_npz("cifar10-noisy-labels", "cifar10n.npz", "random_label1")).long()
    held_out, new = datasets.load("cifar10", "test").first(400), datasets.load("tinyimagenet").first(100)
    x, y = normalise(data.images[chosen]), labels[chosen]
    train = list(zip(x.split(250), y.split(250), strict=True))
    ifc = IFComp(model).fit(train)
    audit = ifc.audit(train).with_names(data.class_names, [f"image {index}" for index in chosen.tolist()])
    held = list(zip(normalise(held_out.images).split(200), held_out.labels.split(200), strict=True))
    gate, calibration = ifc.ood_detector(held), ifc.calibrate(held)

    def previews(pictures: np.ndarray, indices: Sequence[int]) -> list[Preview]:
        """Larger pictures are stored as WebP, in fewer bytes."""
        return [Preview("image", Image.fromarray(pictures[index]).resize((64, 64))) for index in indices]

    ifc.report(
        GALLERY / "images.html",
        title="CIFAR-10: labels of one annotator",
        audit=audit,
        ood=gate.table([normalise(new.images)]),
        calibration=calibration,
        previews=partial(previews, data.images[chosen].numpy()),
        ood_previews=partial(previews, new.images.numpy()),
    )


def text() -> None:
    """TREC questions with 8 % wrong labels, and a small transformer that has memorised them."""
    torch.manual_seed(0)
    labels, questions = texts._read("trec_train")
    order = torch.randperm(len(labels))[:3_000]
    labels, questions = labels[order], [questions[index] for index in order.tolist()]
    vocabulary = texts.build_vocabulary(questions)
    x = texts.encode(questions, vocabulary)
    given = labels.clone()
    wrong = torch.randperm(2_400)[:192]
    given[wrong] = (labels[wrong] + torch.randint(1, len(TREC), (len(wrong),))) % len(TREC)
    model = train(texts.Transformer(len(vocabulary) + 2, len(TREC)), x[:2_400], given[:2_400], 25)
    ifc = IFComp(model).fit([(x[:2_400], given[:2_400])])
    audit = ifc.audit([(x[:2_400], given[:2_400])]).with_names(TREC, questions[:2_400])
    calibration = ifc.calibrate([(x[2_400:], labels[2_400:])])
    ifc.report(GALLERY / "text.html", title="TREC: types of questions", audit=audit, calibration=calibration)


def table() -> None:
    """The Wisconsin data of scikit-learn with 8 % wrong labels, and a small network that has memorised them."""
    torch.manual_seed(0)
    data = load_breast_cancer(as_frame=True)
    frame = data.data.sample(frac=1, random_state=0)
    truth = pd.Series(data.target_names[data.target[frame.index]], index=frame.index)
    given = truth[:369].copy()
    wrong = given.sample(29, random_state=0).index
    given[wrong] = given[wrong].map({"benign": "malignant", "malignant": "benign"})
    given = given.astype("category")
    scaled = (frame - frame[:369].mean()) / frame[:369].std()
    x, y = torch.tensor(scaled[:369].to_numpy()).float(), torch.tensor(given.cat.codes.to_numpy()).long()
    net = nn.Sequential(nn.Linear(30, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))
    ifc = IFComp(train(net, x, y, 200)).fit((scaled[:369], given))
    audit = ifc.audit((scaled[:369], given))
    calibration = ifc.calibrate((scaled[369:], truth[369:].astype(given.dtype)))
    rows = [{name: f"{value:.4g}" for name, value in row.items()} for row in frame[:369].to_dict("records")]

    def previews(indices: Sequence[int]) -> list[Preview]:
        return [Preview("row", rows[index], f"patient {frame.index[index]}") for index in indices]

    ifc.report(
        GALLERY / "table.html",
        title="Tumours: benign or malignant",
        audit=audit,
        calibration=calibration,
        previews=previews,
    )


def train(model: nn.Module, x: Tensor, y: Tensor, epochs: int) -> nn.Module:
    """Train a network until it has memorised its labels."""
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    for _ in range(epochs):
        for batch in torch.randperm(len(y)).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
    return model.eval()


def picture() -> None:
    """Draw the drawer of a suspect of the images, for the README."""
    from playwright.sync_api import sync_playwright

    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=options)
        page = browser.new_page(viewport={"width": 1180, "height": 720})
        page.goto((GALLERY / "images.html").as_uri())
        page.locator("button.why").nth(PICTURED).click()
        page.wait_for_timeout(500)
        page.screenshot(path=ASSETS / "report.png")
        browser.close()


REPORTS: dict[str, Callable[[], None]] = {"images": images, "text": text, "table": table, "picture": picture}


def main(names: list[str]) -> None:
    """Write all reports and the picture, or those that are named."""
    torch.set_num_threads(1)
    GALLERY.mkdir(parents=True, exist_ok=True)
    for name in names or REPORTS:
        REPORTS[name]()


if __name__ == "__main__":
    main(sys.argv[1:])
