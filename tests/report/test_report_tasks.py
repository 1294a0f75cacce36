"""A report of results of the library."""

import json
import re
from pathlib import Path

import torch
from sklearn.datasets import load_digits

from ifcomp import IFComp
from ifcomp.report import OODScores, Preview, ReliabilityPair, build_report, current_provenance
from ifcomp.tasks.calibration import reliability_curve


def test_report_of_audit_curves_complexities_and_coverage(tmp_path: Path) -> None:
    images, labels = (torch.tensor(values)[:200] for values in load_digits(return_X_y=True))
    images = images.float() / 16
    labels[:10] = (labels[:10] + 1) % 10
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), 0.05)
    for _ in range(30):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    ifc = IFComp(model, fisher="exact").fit([(images, labels)])
    audit = ifc.audit([(images, labels)])
    path = build_report(
        tmp_path / "digits.html",
        title="Digits",
        audit=audit,
        calibration=ReliabilityPair(
            reliability_curve(model(images).detach().softmax(1), labels),
            reliability_curve(ifc.predict_proba(images, alpha=0.01), labels),
        ),
        ood=OODScores(ifc.bounded_complexity(images), {"noise": ifc.bounded_complexity(1 - images)}, 0.5),
        previews={index: Preview("image", image.view(8, 8)) for index, image in enumerate(images)},
        coverage=ifc.coverage,
        provenance=current_provenance(seed=0),
    )
    text = path.read_text(encoding="utf-8")
    assert audit.headline in text
    assert "None of" not in text
    assert "650 of the model's 650 parameters" in text
    for name in ("index", "suggested", "p_label", "label_complexity"):
        assert audit.descriptions[name] in text
    embedded = re.search(r'id="data">(.*?)</script>', text, re.DOTALL)
    assert embedded is not None
    columns = json.loads(embedded[1])["columns"]
    assert columns["index"] == audit.ranked["index"].tolist()
    assert set(range(10)) <= set(columns["index"][:12])
    assert sum(columns["is_suspect"]) == len(audit.suspects) > 5
