"""The study of label audits: metrics, baselines, resumed results and the page."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from experiments.label_audit import ablation, baselines, metrics, page, run
from experiments.label_audit.cases import Case, corrupt
from experiments.label_audit.fitting import Plan, memorise
from experiments.label_audit.texts import bags, build_vocabulary, encode
from ifcomp.evidence.members import Member
from ifcomp.evidence.pool import pool_weights


def arrays(count: int = 60, classes: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(count, classes, generator=generator, dtype=torch.float64)
    return logits, torch.randint(classes, (count,), generator=generator)


def test_scores_equal_slow_computations() -> None:
    logits, labels = arrays()
    for i, (row, label) in enumerate(zip(logits.numpy(), labels.tolist(), strict=True)):
        p = np.exp(row) / np.exp(row).sum()
        target = np.eye(len(row))[label]
        assert baselines.loss(logits, labels)[i] == pytest.approx(-np.log(p[label]))
        assert baselines.margin(logits, labels)[i] == pytest.approx(np.delete(row, label).max() - row[label])
        assert baselines.el2n(logits, labels)[i] == pytest.approx(np.sqrt(((p - target) ** 2).sum()))


def test_neighbours_leave_the_example_out() -> None:
    features, labels = arrays(300, 5)
    unit = (features / features.norm(dim=1, keepdim=True)).numpy()
    shares = baselines.neighbours(features, labels, k=7)
    for i in (0, 251, 299):
        others = [j for j in np.argsort(-(unit @ unit[i])) if j != i][:7]
        assert shares[i] == pytest.approx(np.mean([labels[j] != labels[i] for j in others]))


def test_cleanlab_finds_planted_labels() -> None:
    clean = torch.arange(200) % 4
    given = corrupt(clean, "symmetric", 0.1, 4, seed=0)
    result = baselines.cleanlab(given, torch.full((200, 4), 0.05).scatter(1, clean[:, None], 0.85))
    np.testing.assert_array_equal(result.flags, (given != clean).numpy())
    assert result.noise_rate == pytest.approx(0.1, abs=0.01)
    assert result.accuracy == pytest.approx(0.9)
    assert metrics.ranking(result.score, given != clean) == 1.0


def test_metrics() -> None:
    wrong, flags = [True, True, False, False], [True, False, True, False]
    assert metrics.f1(flags, wrong) == pytest.approx(0.5)
    assert metrics.f1(flags, [False] * 4) is None
    assert metrics.ranking([3, 1, 2, 0], wrong) == pytest.approx(0.75)
    assert metrics.ranking([3, 1, 2, 0], [False] * 4) is None


@pytest.mark.parametrize("kind", ["symmetric", "asymmetric"])
def test_corrupt_changes_an_exact_number_of_labels(kind: str) -> None:
    labels = torch.arange(100) % 5
    changed = corrupt(labels, kind, 0.2, 5, seed=1)
    wrong = changed != labels
    assert wrong.sum() == 20
    assert kind == "symmetric" or bool((changed[wrong] == (labels[wrong] + 1) % 5).all())


def test_sentences() -> None:
    vocabulary = build_vocabulary(["a cat .", "A dog ."])
    ids = encode(["a cat .", ""], vocabulary)
    assert vocabulary == {".": 2, "a": 3}
    assert ids[0, :4].tolist() == [3, 1, 2, 0]
    assert ids[1, 0] == 1
    assert bags(ids, 4)[0].tolist() == [0, 1, 1, 1]


class Interrupted(nn.Linear):
    """A model whose forward pass is interrupted once, after a number of calls."""

    calls, limit = 0, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.limit:
            raise KeyboardInterrupt
        return super().forward(x)


@pytest.mark.parametrize("limit", [1, 5, 6])
def test_a_training_resumes_with_the_same_bits(tmp_path: Path, limit: int) -> None:
    """Every epoch has one step and one evaluation."""
    (x, y), plan = arrays(40), Plan(epochs=4, target=2.0)
    models = [seeded_model() for _ in range(3)]
    memorise(models[0], x.float(), y, plan, 0)
    models[1].limit = limit
    with pytest.raises(KeyboardInterrupt):
        memorise(models[1], x.float(), y, plan, 0, tmp_path / "state.safetensors")
    memorise(models[2], x.float(), y, plan, 0, tmp_path / "state.safetensors")
    assert torch.equal(models[0].weight, models[2].weight)


def seeded_model() -> Interrupted:
    torch.manual_seed(0)
    return Interrupted(4, 4)


class SmallTask:
    """A task that counts how often its case is built."""

    name, seeds, is_development, built = "table-small-symmetric", (0,), True, 0

    def cases(self, seed: int) -> Mapping[str, Callable[[], Case]]:
        return {"last": self._case}

    def fold_probabilities(self, seed: int, may_train: bool) -> Tensor | None:
        return arrays()[0].softmax(1) if may_train else None

    def _case(self) -> Case:
        self.built += 1
        x, labels = arrays()
        wrong = torch.arange(60) < 12
        return Case(nn.Linear(4, 4).eval(), x.float(), labels, wrong, 4, x, 1)


def parts(value: float) -> dict[str, Any]:
    flags = {"f1": value, "flagged": value, "noise_rate": value}
    auroc = dict.fromkeys(page.SCORES, value - 0.3)
    return {
        "scores": {"accuracy": 1.0, "memorised_wrong": 1.0, "auroc": auroc, "in-sample cleanlab": flags},
        "audit": {"auroc": value, "memorised": value, **flags},
    }


def test_existing_parts_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = SmallTask()
    monkeypatch.setattr(run, "score_part", lambda case, with_complexity: parts(0.9)["scores"])
    monkeypatch.setattr(run, "audit_part", lambda case: parts(0.9)["audit"])
    assert run.complete(task, 0, "last", tmp_path, folds=False)
    assert not run.complete(task, 0, "last", tmp_path, folds=False)
    assert task.built == 1
    assert run.complete(task, 0, "last", tmp_path, folds=True)
    assert not run.complete(task, 0, "last", tmp_path, folds=True)
    result = json.loads(run.result_file(tmp_path, task.name, 0, "last").read_text())
    assert {"scores", "audit", "folds"} <= result.keys()
    assert result["folds"]["memorised"] == pytest.approx(1 - result["folds"]["accuracy"])


def test_the_page_has_means_over_seeds(tmp_path: Path) -> None:
    for seed, value in enumerate((0.9, 0.8)):
        head = {"task": "text-mr", "seed": seed, "stage": "last", "development": False, "wrong": 0.3}
        (tmp_path / f"text-mr_s{seed}_last.json").write_text(json.dumps(head | parts(value)))
    row = next(line for line in page.build(page.read(tmp_path)).splitlines() if line.startswith("| text-mr | last"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[:5] == ["text-mr", "last", "2", "100.0", "55.0"]
    assert cells[-1] == "**85.0** ± 7.1"


def test_the_ablation_is_averaged_over_groups_of_tasks(tmp_path: Path) -> None:
    names = ("table-a-symmetric", "table-b-asymmetric", "table-a-symmetric-5", "table-a-clean", "text-trec")
    rows = {
        name: {"the audit": {"auroc": 0.5 + index / 10, "f1": 0.4, "flagged": 0.03}} for index, name in enumerate(names)
    }
    (tmp_path / "ablation.json").write_text(json.dumps(rows))
    lines = page.ablation_table(tmp_path / "ablation.json")
    assert "| pool | tables, 20 % wrong | tables, 5 % wrong | TREC | clean, flagged |" in lines
    assert "| the audit | 55.0 / 40.0 | 70.0 / 40.0 | 90.0 / 40.0 | 3.0 |" in lines
    assert page.ablation_table(tmp_path / "missing.json") == []


def test_the_figure(tmp_path: Path) -> None:
    assert not page.draw(tmp_path, tmp_path / "figure.png")
    rows = {
        str(epoch): {"loss": 0.5, "audit": 0.9, "label complexity": 0.6, "memorised_wrong": 0.1} for epoch in (1, 2)
    }
    (tmp_path / "epochs_small.json").write_text(json.dumps(rows))
    assert page.draw(tmp_path, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 1000


def test_the_ablation_starts_from_the_weights_of_the_library() -> None:
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 4, 400)
    members = []
    for index, strength in enumerate((1.0, 0.5, 2.0, 4.0)):
        logits = generator.normal(size=(400, 4)) + strength * np.eye(4)[labels]
        p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        members.append(Member(str(index), "votes", p.astype(np.float32), is_trained=index > 0))
    expected = pool_weights(members, labels).weight
    np.testing.assert_allclose(ablation.weights(members, labels, ablation.Pool()), expected, atol=1e-3)
