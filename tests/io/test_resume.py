"""Killed work is resumed to the same bits."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from resumable_jobs import JOBS, Kill, Killed, data, fit, network, result_bytes, score
from torch import Tensor

from ifcomp import Checkpoint, IFComp
from ifcomp.data.batches import as_batches
from ifcomp.io import resumable
from ifcomp.io.resumable import NO_CHECKPOINT, ResumableWork
from ifcomp.state import fit_together


@pytest.mark.parametrize("midway", [False, True], ids=["after_write", "during_write"])
@pytest.mark.parametrize("name", JOBS)
def test_resuming_from_every_checkpoint_gives_the_same_bits(
    name: str, midway: bool, kill: Kill, tmp_path: Path
) -> None:
    job, total = JOBS[name]
    path = tmp_path / "work.partial"
    count = kill(0)
    expected = result_bytes(job(path))
    assert count == [total]
    for number in range(1, total + 1):
        kill(number, midway)
        with pytest.raises(Killed):
            job(path)
        assert path.exists() is (number > 1 or not midway)
        count = kill(0)
        assert result_bytes(job(path)) == expected
        assert count == [total - number + midway]  # saved work is not repeated
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", JOBS)
def test_work_that_is_killed_repeatedly_gives_the_same_bits(name: str, kill: Kill, tmp_path: Path) -> None:
    job, total = JOBS[name]
    expected = result_bytes(job(tmp_path / "other"))
    for _ in range(total):
        kill(1)
        with pytest.raises(Killed):
            job(tmp_path / "work.partial")
    kill(0)
    assert result_bytes(job(tmp_path / "work.partial")) == expected


def test_a_checkpoint_does_not_change_the_result(tmp_path: Path) -> None:
    model = network()
    predictors = [IFComp(model, 0.7, label_samples=2), IFComp(model, 1.0, fisher="exact")]
    fit_together(predictors, data())
    assert result_bytes(fit(tmp_path / "work.partial")) == result_bytes(predictors)
    frame = predictors[0].fit(data()).score(data()).frame
    with Checkpoint(tmp_path / "rows", 0) as checkpoint:
        scores = predictors[0].score(data(), checkpoint=checkpoint).frame
    pd.testing.assert_frame_equal(scores, frame, check_exact=True)


@pytest.mark.parametrize("options", [{}, {"probes": 2}, {"seen": False}], ids=["labels", "probes", "unseen"])
@pytest.mark.parametrize("labelled", [True, False])
def test_rows_of_all_options_are_restored(options: dict[str, Any], labelled: bool, kill: Kill, tmp_path: Path) -> None:
    ifc = IFComp(network()).fit(data())
    batches = data() if labelled else [x for x, _ in data()]
    expected = ifc.score(batches, **options).frame
    for number in (2, 1):
        kill(number)
        with pytest.raises(Killed), Checkpoint(tmp_path / "rows", 0) as checkpoint:
            ifc.score(batches, checkpoint=checkpoint, **options)
    kill(0)
    with Checkpoint(tmp_path / "rows", 0) as checkpoint:
        scores = ifc.score(batches, checkpoint=checkpoint, **options).frame
    pd.testing.assert_frame_equal(scores, expected, check_exact=True)


def test_an_error_of_the_data_keeps_the_checkpoint(tmp_path: Path) -> None:
    class Broken(list[Any]):
        def __iter__(self) -> Iterator[Any]:
            yield from data()[:2]
            raise OSError("the network drive is gone")

    with pytest.raises(OSError, match="drive is gone") as caught:
        fit(tmp_path / "work.partial", batches=Broken())
    assert "Repeat the same command or call to resume it" in caught.value.__notes__[0]
    assert [path.name for path in tmp_path.iterdir()] == ["work.partial"]
    assert result_bytes(fit(tmp_path / "work.partial")) == result_bytes(fit(tmp_path / "other"))


def test_short_work_writes_no_checkpoint(kill: Kill, tmp_path: Path) -> None:
    count = kill(0)
    fit(tmp_path / "work.partial", every=3600)
    assert count == [0]


def test_seconds_between_checkpoints(kill: Kill, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clock = iter(range(0, 10_000, 10))
    monkeypatch.setattr(resumable.time, "monotonic", lambda: next(clock))
    count = kill(0)
    score(tmp_path / "work.partial", every=15)  # started at 0, checked at 10, 20 and 40, saved at 30
    assert count == [1]


def test_checkpoints_work_in_threads(tmp_path: Path) -> None:
    expected, results = result_bytes(fit(tmp_path / "main")), {}
    models = [network() for _ in range(3)]  # created here, because threads share the random generator

    def work(number: int) -> None:
        results[number] = result_bytes(fit(tmp_path / f"thread{number}", model=models[number]))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == dict.fromkeys(range(3), expected)


# Settings -----------------------------------------------------------------------------------------------------------


def sum_in_microbatches(work: ResumableWork, size: int) -> Tensor:
    """Sum all tokens in two stages. The microbatch size of new work is ``size``; resumed work keeps its own."""
    total = torch.zeros(2, dtype=torch.int64)
    for number, stage in enumerate(("first", "second")):
        resumable.restore_tensors({"total": total}, work.begin_stage(stage, lambda: {"total": total}))
        if work.is_complete(stage):
            continue
        for batch in work.remaining_batches(as_batches(data())):
            sizes = work.settings.setdefault("microbatch sizes", {})
            sizes.setdefault(f"{stage} {batch.size}", size)
            for microbatch in batch.split(sizes[f"{stage} {batch.size}"]):
                total[number] += microbatch.args[0].sum()
    return total


def run(path: Path, size: int) -> dict[str, Any]:
    """Run `sum_in_microbatches` with a checkpoint and return the final settings."""
    with Checkpoint(path, 0) as checkpoint, checkpoint.resume({"work": "sum"}, ["first", "second"], 100) as work:
        assert sum_in_microbatches(work, size).tolist() == [sum(int(x.sum()) for x, _ in data())] * 2
        return work.settings


def test_settings_of_new_work_are_empty(tmp_path: Path) -> None:
    with Checkpoint(tmp_path / "work", 0) as checkpoint, checkpoint.resume({}, ["first"], 100) as work:
        assert work.settings == {}


@pytest.mark.parametrize("number", range(1, 7))
def test_settings_are_restored_from_every_checkpoint(number: int, kill: Kill, tmp_path: Path) -> None:
    path = tmp_path / "work"
    kill(number)
    with pytest.raises(Killed):
        run(path, size=2)
    kill(0)
    names = [f"{stage} {size}" for stage in ("first", "second") for size in (5, 3, 4)]
    expected = dict(zip(names, [2] * number + [9] * (6 - number), strict=True))
    assert run(path, size=9) == {"microbatch sizes": expected}
    assert run(path, size=9) == {"microbatch sizes": dict.fromkeys(names, 9)}  # finished work leaves nothing behind


@pytest.mark.parametrize("value", [{1: 2}, (1, 2), torch.ones(1)], ids=["integer_key", "tuple", "tensor"])
def test_settings_that_are_not_plain_json_are_refused(value: Any, tmp_path: Path) -> None:
    with Checkpoint(tmp_path / "work", 0) as checkpoint, checkpoint.resume({}, ["first"], 100) as work:
        work.begin_stage("first", dict)
        work.settings["size"] = value
        with pytest.raises(TypeError, match="JSON"):
            work.save_if_due()


def test_settings_without_a_checkpoint_are_not_shared_between_runs() -> None:
    NO_CHECKPOINT.settings["size"] = 3
    assert NO_CHECKPOINT.settings == {}
