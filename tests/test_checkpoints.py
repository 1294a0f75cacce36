"""Work that is stopped anywhere goes on to the same bits, and never from what belongs to other work."""

import errno
import json
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ifcomp import Checkpoint, IFComp, Relative
from ifcomp.errors import CheckpointError, DataError, IfcompError, SettingError, StorageError
from ifcomp.io import checkpoints
from ifcomp.predictor import fit_together

SIZES = (5, 3, 4)
BATCHES = len(SIZES)
MATRICES = 4  # of two linear layers: inputs and outputs


class Network(nn.Module):
    """Every kind of block: embedding, Kronecker, normalisation, and a parameter that no rule covers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.hidden = nn.Linear(6, 5)
        self.norm = nn.LayerNorm(5)
        self.scale = nn.Parameter(torch.ones(5))
        self.head = nn.Linear(5, 3)
        self.calls = 0

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        return self.head(torch.tanh(self.norm(self.hidden(self.embedding(tokens).mean(1)))) * self.scale)


def network(seed: int = 0) -> Network:
    torch.manual_seed(seed)
    return Network().eval()


def data() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randint(7, (size, 4), generator=generator), torch.randint(3, (size,), generator=generator))
        for size in SIZES
    ]


def fit(path: Path, every: float = 0.0, batches: Any = None, model: Network | None = None) -> list[IFComp]:
    """Two fits together: of the outputs of linear layers and of the embedding there are four more matrices."""
    model = network() if model is None else model
    predictors = [IFComp(model, 0.7, label_samples=2), IFComp(model, 1.0, fisher="exact")]
    with Checkpoint(path, every) as checkpoint:
        fit_together(predictors, data() if batches is None else batches, checkpoint=checkpoint)
    return predictors


def score(path: Path, every: float = 0.0, batches: Any = None) -> pd.DataFrame:
    with Checkpoint(path, every) as checkpoint:
        ifc = IFComp(network()).fit(data())
        return ifc.score(data() if batches is None else batches, damping=1e-3, checkpoint=checkpoint).frame


def bits(found: list[IFComp] | pd.DataFrame) -> dict[str, bytes]:
    """Everything in the result."""
    if isinstance(found, pd.DataFrame):
        return {f"{number} {name}": np.asarray(found[name]).tobytes() for number, name in enumerate(found)}
    named = {}
    for number, ifc in enumerate(found):
        assert ifc.factors is not None
        named[f"{number} count"] = bytes([ifc.factors.count])
        for name, block in ifc.factors.blocks.items():
            basis = (block.basis.inputs, block.basis.outputs) if block.basis else ()
            for part, tensor in enumerate((block.second_moments, *basis)):
                if tensor is not None:
                    named[f"{number} {name} {part}"] = tensor.numpy().tobytes()
    return named


Job = Callable[..., Any]
JOBS: dict[str, tuple[Job, int]] = {"fit": (fit, 2 * BATCHES + MATRICES + 4), "score": (score, BATCHES)}


class Killed(BaseException):
    """Not an error that anybody handles."""


@pytest.fixture
def kill(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, bool], list[int]]:
    """End the process, so to speak, at a checkpoint: once it is written, or in the middle of it."""
    whole = checkpoints._SavedWork._save

    def at(number: int, midway: bool) -> list[int]:
        written = [0]

        def torn(tensors: dict[str, Tensor], path: Path, **_: Any) -> None:
            Path(path).write_bytes(b"half of i")
            raise Killed

        def save(self: Any) -> None:
            written[0] += 1
            if written[0] == number and midway:
                with monkeypatch.context() as patch:
                    patch.setattr(checkpoints, "save_file", torn)
                    whole(self)
            whole(self)
            if written[0] == number:
                raise Killed

        monkeypatch.setattr(checkpoints._SavedWork, "_save", save)
        return written

    return at


@pytest.mark.parametrize("midway", [False, True], ids=["written", "being_written"])
@pytest.mark.parametrize("name", JOBS)
def test_killed_at_every_checkpoint_and_resumed_to_the_same_bits(
    name: str, midway: bool, kill: Callable[..., list[int]], tmp_path: Path
) -> None:
    job, total = JOBS[name]
    path = tmp_path / "work.partial"
    written = kill(0, False)
    expected = bits(job(path))
    assert written == [total]
    for number in range(1, total + 1):
        kill(number, midway)
        with pytest.raises(Killed):
            job(path)
        assert path.exists() is (number > 1 or not midway)
        written = kill(0, False)
        assert bits(job(path)) == expected
        assert written == [total - number + midway]  # what was done is not done again
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", JOBS)
def test_killed_again_and_again(name: str, kill: Callable[..., list[int]], tmp_path: Path) -> None:
    job, total = JOBS[name]
    expected = bits(job(tmp_path / "other"))
    for _ in range(total):
        kill(1, False)
        with pytest.raises(Killed):
            job(tmp_path / "work.partial")
    kill(0, False)
    assert bits(job(tmp_path / "work.partial")) == expected


def test_the_result_is_that_without_a_checkpoint(tmp_path: Path) -> None:
    model = network()
    alone = [IFComp(model, 0.7, label_samples=2), IFComp(model, 1.0, fisher="exact")]
    fit_together(alone, data())
    assert bits(fit(tmp_path / "work.partial")) == bits(alone)
    frame = alone[0].fit(data()).score(data()).frame
    with Checkpoint(tmp_path / "rows", 0) as checkpoint:
        pd.testing.assert_frame_equal(alone[0].score(data(), checkpoint=checkpoint).frame, frame, check_exact=True)


@pytest.mark.parametrize("options", [{}, {"probes": 2}, {"seen": False}], ids=["labels", "probes", "unseen"])
@pytest.mark.parametrize("labelled", [True, False])
def test_rows_come_back_in_all_forms(
    options: dict[str, Any], labelled: bool, kill: Callable[..., list[int]], tmp_path: Path
) -> None:
    ifc = IFComp(network()).fit(data())
    batches = data() if labelled else [x for x, _ in data()]
    expected = ifc.score(batches, **options).frame
    for number in (2, 1, 0):
        kill(number, False)
        checkpoint = Checkpoint(tmp_path / "rows", 0)
        if number:
            with pytest.raises(Killed), checkpoint:
                ifc.score(batches, checkpoint=checkpoint, **options)
        else:
            with checkpoint:
                found = ifc.score(batches, checkpoint=checkpoint, **options).frame
    pd.testing.assert_frame_equal(found, expected, check_exact=True)


def test_short_work_writes_nothing(kill: Callable[..., list[int]], tmp_path: Path) -> None:
    written = kill(0, False)
    fit(tmp_path / "work.partial", every=3600)
    assert written == [0]


def test_seconds_between_checkpoints(
    kill: Callable[..., list[int]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clock = iter(range(0, 10_000, 10))
    monkeypatch.setattr(checkpoints.time, "monotonic", lambda: next(clock))
    written = kill(0, False)
    score(tmp_path / "work.partial", every=15)  # started at 0, asked at 10, 20 and 40, saved at 30
    assert written == [1]


# What belongs to other work -----------------------------------------------------------------------------------------


@pytest.fixture
def left(kill: Callable[..., list[int]], tmp_path: Path) -> Path:
    """The checkpoint of a fit that was killed after two batches of the second pass."""
    path = tmp_path / "work.partial"
    kill(BATCHES + MATRICES + 2, False)
    with pytest.raises(Killed), Checkpoint(path, 0) as checkpoint:
        IFComp(network(), layers=["hidden", "head"]).fit(data(), checkpoint=checkpoint)
    kill(0, False)
    return path


def goes_on(path: Path, batches: Any = None, seed: int = 0, **options: Any) -> None:
    limit = options.pop("max_memory", None)
    with Checkpoint(path, 0) as checkpoint:
        ifc = IFComp(network(seed), **{"layers": ["hidden", "head"], **options})
        ifc.fit(data() if batches is None else batches, max_memory=limit, checkpoint=checkpoint)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"seed": 1}, "model: "),
        ({"beta": 0.5}, "settings: [{'beta': 1.0"),
        ({"label_samples": 2}, "settings: "),
        ({"layers": ["head"]}, "selection: "),
        ({"max_memory": "1GB"}, "max_memory: None there, 1000000000 here"),
    ],
)
def test_other_work_is_refused_with_what_differs(left: Path, changed: dict[str, Any], said: str) -> None:
    before = left.read_bytes()
    with pytest.raises(CheckpointError) as caught:
        goes_on(left, **changed)
    assert said in str(caught.value)
    assert "delete it to start anew" in str(caught.value)
    assert left.read_bytes() == before


def test_scores_do_not_go_on_from_a_fit(left: Path) -> None:
    ifc = IFComp(network()).fit(data())
    with pytest.raises(CheckpointError, match="work: fit there, score here"), Checkpoint(left) as checkpoint:
        ifc.score(data(), checkpoint=checkpoint)


def test_scores_of_another_fit_or_damping_are_refused(kill: Callable[..., list[int]], tmp_path: Path) -> None:
    def scored(batches: int, **options: Any) -> None:
        ifc = IFComp(network()).fit(data()[:batches])
        with Checkpoint(tmp_path / "rows", 0) as checkpoint:
            ifc.score(data(), checkpoint=checkpoint, **options)

    kill(1, False)
    with pytest.raises(Killed):
        scored(3)
    kill(0, False)
    with pytest.raises(CheckpointError, match="fit: "):
        scored(2)
    with pytest.raises(CheckpointError, match=r"damping: Relative\(multiple=0.1\) there, Relative\(multiple=1\) here"):
        scored(3, damping=Relative(1))
    with pytest.raises(CheckpointError, match="options: "):
        scored(3, alpha=0.5)
    scored(3)


def reordered() -> list[tuple[Tensor, Tensor]]:
    (x, y), *rest = data()
    return [(x.flip(0), y.flip(0)), *rest]


def relabelled() -> list[tuple[Tensor, Tensor]]:
    (x, y), *rest = data()
    return [(x, (y + 1) % 3), *rest]


@pytest.mark.parametrize(
    "batches",
    [
        reordered(),
        relabelled(),
        data()[::-1],
        data()[:1],
        [(torch.cat([x for x, _ in data()]), torch.cat([y for _, y in data()]))],
        [part for x, y in data() for part in zip(x.split(2), y.split(2), strict=True)],
    ],
    ids=["order", "labels", "batches", "fewer", "larger_batches", "smaller_batches"],
)
def test_other_data_is_refused(left: Path, batches: Any) -> None:
    before = left.read_bytes()
    with pytest.raises(CheckpointError, match="not what it was") as caught:
        goes_on(left, batches)
    assert not hasattr(caught.value, "__notes__")  # doing the same again would not help
    assert left.read_bytes() == before
    goes_on(left)


def test_data_that_lost_its_end_is_refused_as_ever(left: Path) -> None:
    with pytest.raises(DataError, match="The first pass saw 12 examples, the second 8"):
        goes_on(left, data()[:2])


def test_a_loader_that_shuffles_is_refused_at_once(tmp_path: Path) -> None:
    x, y = data()[0]
    loader = DataLoader(TensorDataset(x, y), 2, shuffle=True)
    with pytest.raises(DataError, match="shuffle=False"):
        fit(tmp_path / "work.partial", batches=loader)
    with pytest.raises(DataError, match="shuffle=False"):
        score(tmp_path / "work.partial", batches=loader)
    score(tmp_path / "work.partial", batches=DataLoader(TensorDataset(x, y), 2))


def rewritten(path: Path, change: Callable[[dict[str, Any], dict[str, Tensor]], None]) -> None:
    with safe_open(path, framework="pt") as file:
        content = json.loads(file.metadata()["ifcomp-checkpoint"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    change(content, tensors)
    save_file(tensors, path, metadata={"ifcomp-checkpoint": json.dumps(content)})


DAMAGES: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-100]),
    "foreign": lambda path: save_file({"x": torch.ones(2)}, path),
    "schema": lambda path: rewritten(path, lambda content, _: content.update(schema=1)),
    "stage": lambda path: rewritten(path, lambda content, _: content.update(stage="lunch")),
    "no_key": lambda path: rewritten(path, lambda content, _: content.pop("key")),
    "shape": lambda path: rewritten(path, lambda _, tensors: tensors.update({"common/basis/1": torch.ones(1, 1, 1)})),
    "sums": lambda path: rewritten(path, lambda _, tensors: tensors.update({"own/moments/0/head": torch.ones(1)})),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused(damage: str, left: Path) -> None:
    DAMAGES[damage](left)
    with pytest.raises(CheckpointError, match="Delete it to start anew"):
        goes_on(left)
    assert left.exists()


# The context --------------------------------------------------------------------------------------------------------


def test_one_checkpoint_is_for_one_piece_of_work(tmp_path: Path) -> None:
    ifc, checkpoint = IFComp(network()), Checkpoint(tmp_path / "work.partial")
    with pytest.raises(SettingError, match="in a with statement"):
        ifc.fit(data(), checkpoint=checkpoint)
    with checkpoint:
        ifc.fit(data(), checkpoint=checkpoint)
        with pytest.raises(SettingError, match="for one fit or score"):
            ifc.score(data(), checkpoint=checkpoint)
        with pytest.raises(SettingError, match="entered twice"), checkpoint:
            pass
    with checkpoint:
        ifc.score(data(), checkpoint=checkpoint)


@pytest.mark.parametrize("every", [-1, float("nan"), float("inf"), "60", True, None])
def test_seconds_are_a_number(every: Any) -> None:
    with pytest.raises(SettingError, match="seconds of at least 0"):
        Checkpoint("work.partial", every)


def test_an_error_keeps_the_file_and_says_so(tmp_path: Path) -> None:
    class Broken(list[Any]):
        def __iter__(self) -> Iterator[Any]:
            yield from data()[:2]
            raise OSError("the network drive is gone")

    with pytest.raises(OSError, match="drive is gone") as caught:
        fit(tmp_path / "work.partial", batches=Broken())
    assert "Do the same again to go on" in caught.value.__notes__[0]
    assert [path.name for path in tmp_path.iterdir()] == ["work.partial"]
    assert bits(fit(tmp_path / "work.partial")) == bits(fit(tmp_path / "other"))


def test_a_second_process_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "work.partial"
    enter = f"from ifcomp.io.files import locked\nwith locked({str(path)!r}): pass"  # without waiting for torch
    call = [sys.executable, "-c", enter]
    with Checkpoint(path):
        ended = subprocess.run(call, capture_output=True, text=True, check=False)
        assert "StorageError: Another process is at work on" in ended.stderr
        with pytest.raises(StorageError, match="Another process"), Checkpoint(path):
            pass
    subprocess.run(call, check=True)
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_writer_left_is_removed(tmp_path: Path) -> None:
    for name in (".work.partial.0123abcd", ".work.partial-1.0123abcd", ".other.0123abcd", ".work.partial.mine"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "half").write_text("half")
    with Checkpoint(tmp_path / "work.partial"):
        pass
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == [".other.0123abcd", ".work.partial-1.0123abcd", ".work.partial.mine"]


# SIGINT -------------------------------------------------------------------------------------------------------------


class Interrupting(list[Any]):
    """Batches, some of which come with a SIGINT."""

    def __init__(self, *numbers: int) -> None:
        super().__init__(data())
        self.given, self.numbers = 0, numbers

    def __iter__(self) -> Iterator[Any]:
        for batch in data():
            for _ in range(self.numbers.count(self.given)):
                signal.raise_signal(signal.SIGINT)
            self.given += 1
            yield batch


@pytest.mark.parametrize("at", range(2 * BATCHES))
def test_an_interruption_waits_for_the_batch_and_saves(at: int, tmp_path: Path) -> None:
    batches = Interrupting(at)
    with pytest.raises(KeyboardInterrupt) as caught:
        fit(tmp_path / "work.partial", every=3600, batches=batches)
    if at:  # the first batch is asked for before there is anything to save
        assert batches.given == at + 1
        assert "Do the same again" in caught.value.__notes__[0]
        assert (tmp_path / "work.partial").exists()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert bits(fit(tmp_path / "work.partial")) == bits(fit(tmp_path / "other"))


def test_a_second_interruption_does_not_wait(tmp_path: Path) -> None:
    told: list[None] = []
    batches = Interrupting(1, 1)
    with pytest.raises(KeyboardInterrupt), Checkpoint(tmp_path / "p", 3600, notice=lambda: told.append(None)) as kept:
        IFComp(network()).fit(batches, checkpoint=kept)
    assert (batches.given, len(told)) == (1, 1)
    assert list(tmp_path.iterdir()) == []


def test_an_interruption_at_the_end_is_not_forgotten(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Tensor, "div_", lambda self, *_: signal.raise_signal(signal.SIGINT) or self)
    with pytest.raises(KeyboardInterrupt), Checkpoint(tmp_path / "work.partial") as checkpoint:
        IFComp(network()).fit(data(), checkpoint=checkpoint)


def test_the_handler_of_others_is_left_alone(tmp_path: Path) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGINT, lambda *_: heard.append(1))
    try:
        fit(tmp_path / "work.partial", batches=Interrupting(1))
    finally:
        signal.signal(signal.SIGINT, before)
    assert heard == [1]


def test_checkpoints_work_in_threads(tmp_path: Path) -> None:
    expected, found = bits(fit(tmp_path / "main")), {}
    models = [network() for _ in range(3)]  # their weights come from the generator that all threads share

    def work(number: int) -> None:
        found[number] = bits(fit(tmp_path / f"thread{number}", model=models[number]))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == dict.fromkeys(range(3), expected)


# Disks --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "No space left on device"), SafetensorError("I/O error: No space left on device (28)")],
    ids=["os", "safetensors"],
)
def test_a_disk_that_fills_up_costs_only_what_is_not_saved(
    name: str, error: Exception, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    job, path, written = JOBS[name][0], tmp_path / "work.partial", [0]

    def full(*arguments: Any, **options: Any) -> None:
        written[0] += 1
        if written[0] == 3:
            raise error
        save_file(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "save_file", full)
        with pytest.raises(CheckpointError, match=r"No space left.*unchanged.*go on"):
            job(path)
    assert list(tmp_path.iterdir()) == [path]
    with safe_open(path, framework="pt") as file:
        assert json.loads(file.metadata()["ifcomp-checkpoint"])["position"] == sum(SIZES[:2])
    assert bits(job(path)) == bits(job(tmp_path / "other"))


def test_too_little_room_is_found_before_the_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def usage(_: Path) -> Any:
        return type("Usage", (), {"free": 500})

    monkeypatch.setattr("ifcomp.io.files.shutil.disk_usage", usage)
    model = network()
    words = r"about [\d,]+ bytes are needed .* only 500 are free"
    with pytest.raises(StorageError, match=words), Checkpoint(tmp_path / "work.partial") as checkpoint:
        IFComp(model).fit(data(), checkpoint=checkpoint)
    before = model.calls
    IFComp(model).fit(data())
    assert model.calls == 2 * before + 3 * BATCHES  # one call a batch, in pass 2 another for the bare parameter


@pytest.mark.parametrize("kind", ["missing", "file"])
def test_a_folder_that_cannot_be_written_is_found_before_the_work(kind: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="folder that exists and is writable"), Checkpoint(tmp_path / kind / "work"):
        pytest.fail("was entered")


def mounted(folder: Path, options: str) -> bool:
    try:
        call = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        return subprocess.run(call, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts small disks, which needs rights that not everybody has."""
    made: list[Path] = []

    def mount(options: str) -> Path:
        folder = tmp_path / f"disk{len(made)}"
        folder.mkdir()
        if not mounted(folder, options):
            pytest.skip("no right to mount a disk")
        made.append(folder)
        return folder

    yield mount
    for folder in made:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_real_disk_that_is_full(disk: Callable[[str], Path], tmp_path: Path) -> None:
    folder = disk("size=256k")
    ifc = IFComp(network()).fit(data())
    ifc.save(folder / "run.ifcomp")
    before = (folder / "run.ifcomp").read_bytes()
    (folder / "filler").write_bytes(bytes(shutil.disk_usage(folder).free))
    with pytest.raises(StorageError, match="bytes are needed"):
        fit(folder / "work.partial")
    with pytest.raises(StorageError, match=r"No space left.*unchanged"):
        IFComp(network(), layers=["hidden"]).fit(data()).save(folder / "other.ifcomp")
    with pytest.raises(StorageError, match=r"No space left.*unchanged"):
        ifc.save(folder / "run.ifcomp")
    assert (folder / "run.ifcomp").read_bytes() == before
    assert sorted(path.name for path in folder.iterdir()) == ["filler", "run.ifcomp"]


def test_a_real_disk_that_is_read_only(disk: Callable[[str], Path]) -> None:
    folder = disk("size=64k,ro")
    with pytest.raises(StorageError, match="Read-only file system"):
        fit(folder / "work.partial")
    with pytest.raises(IfcompError, match="Read-only file system"):
        IFComp(network()).fit(data()).save(folder / "run.ifcomp")
