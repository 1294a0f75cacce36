"""Whatever a file holds, reading it gives the library's own error: no code runs, nothing hangs, memory is bounded."""

from __future__ import annotations

import faulthandler
import json
import os
import pickle
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import hostile_files as hostile
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from safetensors.torch import load, save
from torch import nn

from experiments import runs as training
from experiments.reproduce import record as results
from ifcomp import IFComp
from ifcomp.cli.model import load_weights, read_weights
from ifcomp.cli.record import SCHEMA, read_record
from ifcomp.data.corrections import open_labels, read_decisions
from ifcomp.data.sources import SourceOptions, open_source
from ifcomp.data.sources.parquet import read_chunks
from ifcomp.errors import (
    CheckpointError,
    DataError,
    IfcompError,
    MemoryLimitError,
    ModelError,
    SettingError,
    StorageError,
)
from ifcomp.integrations.kronfluence import factors_from_kronfluence
from ifcomp.io.checkpoint_files import read_checkpoint
from ifcomp.io.factor_files import ENTRY
from ifcomp.io.tensor_files import write_tensors
from ifcomp.memory import as_bytes
from ifcomp.oracle.pairs import PairFile
from ifcomp.report.images import thumbnail

#: Memory that refusing a file may take.
ALLOWED = 150 * 2**20


@cache
def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3)).eval()


@cache
def fitted() -> IFComp:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    return IFComp(network()).fit([(x, torch.arange(8) % 3)], progress=False)


def read_folder(path: Path) -> None:
    list(open_source(f"folder:{path.parent}").batches())


def read_weights_into_a_model(path: Path) -> None:
    load_weights(nn.Sequential(nn.Linear(4, 3)), read_weights(str(path)), "a:b", str(path))


@dataclass(frozen=True)
class Reader:
    """Something that reads files: how it is called, how its files are called, and what it raises."""

    read: Callable[[Path], object]
    name: str
    error: type[IfcompError]


READERS = {
    "factors": Reader(lambda path: IFComp.load(path, network()), "run.ifcomp", StorageError),
    "safetensors": Reader(read_weights_into_a_model, "net.safetensors", ModelError),
    "torch": Reader(read_weights_into_a_model, "net.pt", ModelError),
    "npz": Reader(lambda path: open_source(f"npz:{path}"), "data.npz", DataError),
    "parquet": Reader(lambda path: open_source(f"parquet:{path}"), "data.parquet", DataError),
    "csv": Reader(lambda path: open_source(f"csv:{path}"), "data.csv", DataError),
    "csv-labels": Reader(lambda path: open_labels(f"csv:{path}"), "data.csv", DataError),
    "decisions": Reader(lambda path: read_decisions(str(path)), "decisions.csv", DataError),
    "image": Reader(read_folder, "images/1.png", DataError),
    "thumbnail": Reader(thumbnail, "1.png", DataError),
    "record": Reader(lambda path: read_record(str(path)), "run.ifcomp", StorageError),
    "pairs": Reader(PairFile, "pairs.jsonl", StorageError),
    "checkpoint": Reader(lambda path: read_checkpoint(path, {}), "run.partial", CheckpointError),
    "training": Reader(training._read, "state.safetensors", StorageError),
    "results": Reader(lambda path: results.read(path.parent), f"study/{results.FILE}", StorageError),
    "kronfluence": Reader(
        lambda path: factors_from_kronfluence(path.parent, network(), num_classes=3),
        "ekfac/factor_arguments.json",
        StorageError,
    ),
}


@pytest.fixture(autouse=True)
def _no_hang() -> Iterator[None]:
    """A reader that waits for ever ends the tests instead."""
    faulthandler.dump_traceback_later(600, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


def written(tmp_path: Path, reader: str, content: bytes | None) -> Path:
    path = tmp_path / READERS[reader].name
    path.parent.mkdir(exist_ok=True)
    if content is not None:
        path.write_bytes(content)
    return path


def refusal(reader: str, path: Path, words: str | None = None) -> str:
    """What a reader says of a file that it refuses without taking much memory."""
    before = peak_memory(reset=True)
    with pytest.raises(READERS[reader].error, match=words) as caught:
        READERS[reader].read(path)
    assert peak_memory() - before < ALLOWED
    return str(caught.value)


def peak_memory(reset: bool = False) -> int:
    """The most memory that this process has had, since the last reset; 0 where the system does not tell."""
    if reset:
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status")
    found = re.search(r"VmHWM:\s*(\d+) kB", status.read_text()) if status.exists() else None
    return 1024 * int(found[1]) if found else 0


# What is no file -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reader", READERS)
def test_folders_are_refused(reader: str, tmp_path: Path) -> None:
    path = written(tmp_path, reader, None)
    path.mkdir()
    refusal(reader, path)


@pytest.mark.parametrize("reader", READERS)
def test_pipes_are_refused_without_waiting_for_a_writer(reader: str, tmp_path: Path) -> None:
    path = written(tmp_path, reader, None)
    os.mkfifo(path)
    assert "pipe" in refusal(reader, path)


@pytest.mark.parametrize("reader", sorted(READERS.keys() - {"image"}))
def test_devices_are_refused_without_reading_for_ever(reader: str, tmp_path: Path) -> None:
    path = written(tmp_path, reader, None)
    path.symlink_to("/dev/zero")
    assert "device" in refusal(reader, path)


@pytest.mark.parametrize("reader", READERS)
def test_sockets_are_refused(reader: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, reader, None)
    monkeypatch.chdir(path.parent)  # names of sockets must be short
    with socket.socket(socket.AF_UNIX) as endpoint:
        endpoint.bind(path.name)
        refusal(reader, path)


@pytest.mark.parametrize("reader", sorted(READERS.keys() - {"pairs"}))
def test_empty_files_are_refused(reader: str, tmp_path: Path) -> None:
    refusal(reader, written(tmp_path, reader, b""))


@pytest.mark.parametrize("reader", READERS)
def test_files_without_permission_are_refused(reader: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("private")
    path = written(folder, reader, b"secret")
    path.chmod(0)
    root = os.geteuid() == 0
    if root:  # who may read everything; nobody else may look into pytest's folders
        for place in path.parents:
            if place.stat().st_mode & 0o005 != 0o005:
                place.chmod(0o755)
        os.seteuid(65534)
    try:
        said = refusal(reader, path)
    finally:
        if root:
            os.seteuid(0)
    assert re.search("[Pp]ermission", said)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("content", [b"\x00" * 64, b"[" * 100_000, b"\xff\xfe" * 50, b"{}", b'{"schema": 1}'])
def test_other_content_is_refused(reader: str, content: bytes, tmp_path: Path) -> None:
    refusal(reader, written(tmp_path, reader, content))


@pytest.mark.parametrize("depth", [60, 900, 100_000])
def test_nested_records_are_refused(depth: int, tmp_path: Path) -> None:
    entries = {"model": '"a:b"', "weights": "null", "data": '"digits"', "class_names": "null", "examples": "3"}
    entries |= {"schema": str(SCHEMA), "digest": '"0"'}
    for options in ("{}", f'{{"mean": {"[" * depth}1{"]" * depth}}}'):
        text = ", ".join(f'"{name}": {value}' for name, value in (entries | {"options": options}).items())
        path = written(tmp_path, "record", save({"a": torch.ones(2)}, {ENTRY: f'{{"record": {{{text}}}}}'}))
        if options == "{}":
            READERS["record"].read(path)
    refusal("record", path, "nested too deeply")


@pytest.mark.parametrize("reader", ["pairs", "kronfluence", "results"])
def test_text_of_gigabytes_is_refused(reader: str, tmp_path: Path) -> None:
    path = written(tmp_path, reader, b"")
    os.truncate(path, 2**32)  # takes no room on the disk
    refusal(reader, path, "more than the")


# Pickles -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", ["pickle", "zip", "legacy", "tar", "nested"])
def test_no_pickle_is_executed(reader: str, kind: str, tmp_path: Path) -> None:
    mark = tmp_path / "exploded"
    trap = hostile.Trap(mark)
    content = {
        "pickle": lambda: pickle.dumps(trap),
        "zip": lambda: hostile.saved({"weight": trap}),
        "legacy": lambda: hostile.saved({"weight": trap}, _use_new_zipfile_serialization=False),
        "tar": lambda: hostile.torch_tar(trap),
        "nested": lambda: hostile.saved({"state_dict": {"0.weight": torch.ones(3, 4), "0.bias": [trap]}}),
    }[kind]()
    refusal(reader, written(tmp_path, reader, content))
    assert not mark.exists()
    pickle.loads(pickle.dumps(trap))  # noqa: S301  (the trap works)
    assert mark.exists()


def test_objects_in_arrays_and_tables_are_not_unpickled(tmp_path: Path) -> None:
    mark = tmp_path / "exploded"
    traps = np.array([[hostile.Trap(mark)]], object)
    assert "never unpickled" in refusal("npz", written(tmp_path, "npz", hostile.arrays(x=traps)))
    kind = {b"ARROW:extension:name": b"arrow.py_extension_type", b"ARROW:extension:metadata": pickle.dumps(traps[0, 0])}
    schema = pa.schema([pa.field("a", pa.binary(), metadata=kind)])
    path = tmp_path / "data.parquet"
    pq.write_table(pa.table([[pickle.dumps(traps[0, 0])]], schema=schema), path)
    refusal("parquet", path, "not numeric|pickle-based deserialization .* disabled")  # by us, or by older pyarrow
    assert not mark.exists()


@pytest.mark.parametrize(
    "program",
    [
        b"\x80\x02c__builtin__\nbytearray\n\x8a\x05\x00\x00\x00\x00\x10\x85R.",  # 64 GB of zeros
        b"\x80\x02cposix\nsystem\nX\x04\x00\x00\x00true\x85R.",
        b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x04true\x85R.",  # protocol 4
        b"\x80\x02(X\x04\x00\x00\x00trueiposix\nsystem\n.",  # an older instruction to call
        b"\x80\x02.",
        b"\x80\x02]q\x00K\x01K\x02u.",
        b"",
    ],
)
def test_programs_that_do_more_than_rebuild_tensors_are_refused(program: bytes, tmp_path: Path) -> None:
    refusal("torch", written(tmp_path, "torch", hostile.torch_zip(program)))


@pytest.mark.parametrize(
    "name", ["DATA.PKL", "Data.pkl", "code/__torch__.py", "constants.pkl", "data/0/1", "../data.pkl", "data.pkl/"]
)
@pytest.mark.parametrize("is_first", [True, False])
def test_other_members_of_a_torch_archive_are_refused(name: str, is_first: bool, tmp_path: Path) -> None:
    """Readers differ in which of two names they take, so an archive has the names of torch.save only."""
    hidden = {f"archive/{name}": b"\x80\x02c__builtin__\nbytearray\n\x8a\x05\x00\x00\x00\x80\x00\x85R."}
    parts = hostile.torch_members({"weight": torch.ones(2)})
    content = hostile.stored_zip(hidden | parts if is_first else parts | hidden)
    refusal("torch", written(tmp_path, "torch", content), "members are not those of a torch.save file")


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_archives_that_can_be_read_in_two_ways_are_refused(tmp_path: Path) -> None:
    parts = hostile.torch_members({"weight": torch.ones(2)})
    plain = hostile.stored_zip(parts)
    read_weights(str(written(tmp_path, "torch", plain)))
    refusal("torch", written(tmp_path, "torch", plain + plain), "something precedes the archive")
    twice = [*parts.items(), *((name, content) for name, content in parts.items() if name.endswith("data.pkl"))]
    refusal("torch", written(tmp_path, "torch", hostile.stored_zip(twice)), "members are not those")
    other = {f"other/{name.partition('/')[2]}": content for name, content in parts.items() if "pkl" not in name}
    pickled = {name: content for name, content in parts.items() if "pkl" in name}
    refusal("torch", written(tmp_path, "torch", hostile.stored_zip(other | pickled)), "members are not those")
    big = {name: b"big" if name.endswith("byteorder") else content for name, content in parts.items()}
    refusal("torch", written(tmp_path, "torch", hostile.stored_zip(big)), "big-endian")


def test_torchscript_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, "torch", b"")
    torch.jit.script(torch.nn.Linear(2, 2)).save(str(path))
    refusal("torch", path, "members are not those of a torch.save file")


def test_pickles_with_places_for_billions_of_objects_are_refused(tmp_path: Path) -> None:
    program = b"\x80\x02}r\xff\xff\xff\xff."  # LONG_BINPUT: a table of 64 GB in the reader of Python
    refusal("torch", written(tmp_path, "torch", hostile.torch_zip(program)), "more objects than it has bytes")


def test_tensors_beyond_their_storage_are_refused(tmp_path: Path) -> None:
    """The pickle claims more elements than the storage has: in the tensor, or in the storage itself."""
    parts = hostile.torch_members({"weight": torch.arange(4, dtype=torch.float32)})
    for before, after in ((b"K\x04", b"K\x08"), (b"K\x00K\x04", b"K\x01K\x04"), (b"K\x01", b"K\x02")):
        changed = {
            name: content.replace(before, after) if name.endswith("data.pkl") else content
            for name, content in parts.items()
        }
        assert changed != parts
        refusal("torch", written(tmp_path, "torch", hostile.stored_zip(changed)))


@pytest.mark.parametrize(
    "content",
    [
        {"weight": torch.arange(6.0).view(2, 3).T, "again": torch.arange(4).bool()},
        {"state_dict": {"a": torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))}, "epoch": 3, "lr": 0.1},
        torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)).state_dict(),
        {"shared": torch.arange(9)[2:5], "empty": torch.ones(0, 3), "zero_axes": torch.tensor(1.5)},
    ],
    ids=["strides", "nested", "state_dict", "views"],
)
def test_torch_files_are_read_as_torch_reads_them(content: dict[str, Any], tmp_path: Path) -> None:
    path = written(tmp_path, "torch", hostile.saved(content))
    expected = torch.load(path, weights_only=True)
    expected = expected.get("state_dict", expected)
    loaded = read_weights(str(path))
    assert list(loaded) == list(expected)
    for name, value in expected.items():
        assert (loaded[name].dtype, loaded[name].stride()) == (value.dtype, value.stride())
        assert torch.equal(loaded[name], value)


# Bombs ---------------------------------------------------------------------------------------------------------------


def test_archives_that_swell_are_refused(tmp_path: Path) -> None:
    array = hostile.npy((hostile.BOMB // 4, 4), content=bytes(hostile.BOMB))
    bomb = hostile.npz(x=array)
    assert len(bomb) < hostile.BOMB / 100
    refusal("npz", written(tmp_path, "npz", bomb), "expand to")
    refusal("npz", written(tmp_path, "npz", hostile.with_sizes(bomb, 1000)))  # a directory that plays it down
    del array
    refusal("torch", written(tmp_path, "torch", hostile.deflated_weights()), "compressed")


@pytest.mark.parametrize("shape", [(2**62, 1), (2**40, 3), (2**31, 2**31), (-1, 4), (0, 2**62), (2**62, 0)])
def test_arrays_that_claim_more_than_they_hold_are_refused(shape: tuple[int, ...], tmp_path: Path) -> None:
    refusal("npz", written(tmp_path, "npz", hostile.npz(x=hostile.npy(shape, content=b"1234"))))


def test_tables_that_swell_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    pq.write_table(pa.table({"a": pa.array(np.zeros(50_000_000, np.float32))}), path)
    assert path.stat().st_size < 10**6
    refusal("parquet", path, "expand to")


def test_few_long_lists_are_refused_before_they_are_decoded(tmp_path: Path) -> None:
    """A column of one number, repeated: 1,000 rows of 100,000 values in a few kilobytes."""
    path, rows, length = tmp_path / "data.parquet", 1000, 100_000
    lists = pa.ListArray.from_arrays(np.arange(rows + 1) * length, pa.array(np.zeros(rows * length, np.float32)))
    pq.write_table(pa.table({"a": lists}), path)
    del lists
    assert path.stat().st_size < 10**5
    refusal("parquet", path, "expand to")


def test_labels_without_values_that_claim_a_shape_are_refused(tmp_path: Path) -> None:
    """Such an array takes no memory, but cannot be converted to another type."""
    arrays = {"x": hostile.npy((1, 2), content=bytes(2)), "y": hostile.npy((0, 2**62))}
    refusal("npz", written(tmp_path, "npz", hostile.npz(**arrays)), "must be integers of shape")


@pytest.mark.parametrize("kind", ["lists", "texts"])
def test_chunks_of_long_rows_are_small(kind: str, tmp_path: Path) -> None:
    """A hundred rows of 4 MB in a few kilobytes: few rows are decoded at a time, also when labels are corrected."""
    path, length = tmp_path / "data.parquet", 2**22
    lists = pa.ListArray.from_arrays([0, length // 4], pa.array(np.zeros(length // 4, np.float32)))
    rows = pa.concat_arrays([lists if kind == "lists" else pa.array(["a" * length])] * 100)
    pq.write_table(pa.table({"a": rows, "label": [0, 1] * 50}), path, compression="zstd")
    del rows
    assert path.stat().st_size < 10**5
    with pq.ParquetFile(path) as file:
        chunks = read_chunks(file, str(path))
        with pytest.raises(ValueError, match="expand to"):
            assert next(chunks).num_rows < 5


class CountedName(str):
    """A name that counts its comparisons."""

    comparisons = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        CountedName.comparisons += 1
        return str.__eq__(self, other)


def test_columns_are_compared_in_linear_time(tmp_path: Path) -> None:
    names = [f"column {number}" for number in range(200)]
    path = tmp_path / "data.parquet"
    pq.write_table(pa.table({name: [0.0, 1.0] for name in names}), path)
    CountedName.comparisons = 0
    with pq.ParquetFile(path) as file:
        assert sum(chunk.num_rows for chunk in read_chunks(file, str(path), list(map(CountedName, names)))) == 2
    assert CountedName.comparisons < 20 * len(names)


def test_lists_that_swell_are_refused(tmp_path: Path) -> None:
    path, rows, length = tmp_path / "data.parquet", 800_000, 100
    values = pa.array(np.zeros(rows * length, np.float32))
    pq.write_table(pa.table({"a": pa.FixedSizeListArray.from_arrays(values, length)}), path)
    del values
    assert path.stat().st_size < 10**6
    refusal("parquet", path, "expand to")


@pytest.mark.parametrize("target", ["1.png", "2.png"])
def test_loops_of_links_are_refused_as_images(target: str, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "1.png").symlink_to(target)
    (tmp_path / "a" / "2.png").symlink_to("1.png")
    with pytest.raises(DataError, match="Cannot read"):
        open_source(f"folder:{tmp_path}")


@pytest.mark.parametrize("reader", ["csv", "csv-labels", "decisions"])
@pytest.mark.parametrize(
    ("start", "unit", "message"),
    [
        (b"a,label\n", b"1", "more than 4,194,304 bytes"),  # one endless cell
        (b"a,label\n", b"1,", "more than 4,194,304 bytes"),  # one endless row
        (b"a,label\n", b'"\n",', "more than 65,536 lines"),  # one row with endless lines
        (b"a,label\n", b"\n", "more than 65,536 lines"),
        (b"a,label\n" + b"12," * 1_390_000 + b"\n", b"", "line 2 has 1,390,001 cells, but the header has 2"),
        (b'a,label\n1,"', b"123456\n", "field larger than field limit"),  # a quotation that never ends
        (b"", b"a,", "more than 4,194,304 bytes"),  # an endless header
    ],
    ids=["cell", "row", "lines", "blank lines", "cells", "quotation", "header"],
)
def test_endless_rows_are_refused(tmp_path: Path, reader: str, start: bytes, unit: bytes, message: str) -> None:
    if reader == "decisions":
        start = start.replace(b"a,label", b"index,decision")
    refusal(reader, written(tmp_path, reader, start + unit * (10**8 // max(1, len(unit)))), message)


def test_metadata_of_columns_that_would_end_the_process_are_not_looked_at() -> None:
    """Fuzzing found this file: pyarrow 26 aborts when it is asked for the metadata of its second column."""
    refusal("parquet", Path(__file__).with_name("wrong_histogram.parquet"), "histogram")


def test_long_labels_are_kept_once(tmp_path: Path) -> None:
    path, rows = tmp_path / "data.parquet", 20_000
    labels = pa.DictionaryArray.from_arrays(pa.array([0, 1] * (rows // 2), pa.int32()), ["a" * 50_000, "b" * 50_000])
    table = pa.table({"label": labels, "x": np.arange(rows, dtype=np.float32)})
    pq.write_table(table, path, store_schema=False)
    before = peak_memory(reset=True)
    source = open_source(f"parquet:{path}")
    assert peak_memory() - before < ALLOWED < rows * 50_000
    assert source.labels is not None
    assert source.labels[:3].tolist() == [0, 1, 0]


def test_what_does_not_fit_in_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ifcomp.io.untrusted.available", lambda device: 1000)
    x = np.random.default_rng(0).normal(size=(100, 4)).astype(np.float32)
    refusal("npz", written(tmp_path, "npz", hostile.arrays(x=x)), "only 1.0 kB of memory are available")
    monkeypatch.setattr("ifcomp.data.sources.folder.available", lambda device: 10**6)
    Image.new("RGB", (40, 40)).save(written(tmp_path, "image", b""))
    with pytest.raises(MemoryLimitError, match="--image-size or a smaller --batch-size"):
        open_source(f"folder:{tmp_path / 'images'}")
    assert len(open_source(f"folder:{tmp_path / 'images'}", SourceOptions(batch_size=2))) == 1


@pytest.mark.parametrize("reader", ["image", "thumbnail"])
@pytest.mark.parametrize("size", [(60_000, 60_000), (10_000, 10_000), (2**31 - 1, 2**31 - 1), (0, 5)])
def test_images_that_claim_too_much_are_refused(reader: str, size: tuple[int, int], tmp_path: Path) -> None:
    refusal(reader, written(tmp_path, reader, hostile.png(*size)))


@pytest.mark.parametrize("reader", ["image", "thumbnail"])
@pytest.mark.parametrize("kind", ["png", "jpeg", "gif", "bmp", "webp", "tiff", "ppm"])
def test_truncated_images_are_refused(reader: str, kind: str, tmp_path: Path) -> None:
    path = written(tmp_path, reader, None)
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3)).astype(np.uint8)).save(path, kind)
    whole = path.read_bytes()
    READERS[reader].read(path)
    for share in (0.01, 0.3, 0.8):
        path.write_bytes(whole[: int(share * len(whole))])
        refusal(reader, path)


def test_postscript_which_starts_a_program_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, "thumbnail", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n")
    refusal("thumbnail", path, "Formats are PNG")


# Headers that lie ----------------------------------------------------------------------------------------------------

WEIGHT = {"dtype": "F32", "shape": [3, 4], "data_offsets": [0, 48]}
BIAS = {"dtype": "F32", "shape": [3], "data_offsets": [48, 60]}


def header(**changes: Any) -> dict[str, Any]:
    return {"0.weight": {**WEIGHT, **changes}, "0.bias": BIAS}


LIES: dict[str, bytes] = {
    "overlap": hostile.safetensors({"0.weight": WEIGHT, "0.bias": {**BIAS, "data_offsets": [40, 52]}}, bytes(60)),
    "same bytes twice": hostile.safetensors({"0.weight": WEIGHT, "0.copy": WEIGHT}, bytes(48)),
    "hole": hostile.safetensors({"0.weight": WEIGHT, "0.bias": {**BIAS, "data_offsets": [52, 64]}}, bytes(64)),
    "gigabytes": hostile.safetensors(header(shape=[2**30, 4], data_offsets=[0, 2**34]), bytes(60)),
    "more elements than numbers go": hostile.safetensors(header(shape=[2**62, 2**62]), bytes(60)),
    "length beyond the file": hostile.safetensors(header(), bytes(60), length=10**6),
    "length of exabytes": hostile.safetensors(header(), bytes(60), length=2**64 - 1),
    "no length": b"\x10",
    "unknown type": hostile.safetensors(header(dtype="Q99"), bytes(60)),
    "type of another size": hostile.safetensors(header(dtype="F64"), bytes(60)),
    "shape that does not match": hostile.safetensors(header(shape=[3, 5]), bytes(60)),
    "negative shape": hostile.safetensors(header(shape=[-3, -4]), bytes(60)),
    "backward offsets": hostile.safetensors(header(data_offsets=[48, 0]), bytes(60)),
    "missing bytes": hostile.safetensors(header(), bytes(59)),
    "more bytes": hostile.safetensors(header(), bytes(61)),
    "duplicate keys": hostile.safetensors(
        b'{"0.weight":%s,"0.weight":%s}' % ((json.dumps(WEIGHT).encode(),) * 2), bytes(60)
    ),
    "metadata of another type": hostile.safetensors({"__metadata__": {"ifcomp": 3}, **header()}, bytes(60)),
    "metadata that is a list": hostile.safetensors({"__metadata__": [], **header()}, bytes(60)),
    "nesting": hostile.safetensors(b'{"a":' + b"[" * 50_000 + b"]" * 50_000 + b"}"),
    "whole numbers for weights": hostile.safetensors(header(dtype="I32"), bytes(60)),
    "a path for a name": hostile.safetensors({"../../0.weight": WEIGHT, "/0.bias": BIAS}, bytes(60)),
}


@pytest.mark.parametrize("reader", ["factors", "safetensors", "checkpoint"])
@pytest.mark.parametrize("lie", LIES)
def test_headers_that_lie_are_refused(reader: str, lie: str, tmp_path: Path) -> None:
    refusal(reader, written(tmp_path, reader, LIES[lie]))
    assert [path.name for path in tmp_path.iterdir()] == [READERS[reader].name]


def test_the_header_without_lies_is_read(tmp_path: Path) -> None:
    read_weights_into_a_model(written(tmp_path, "safetensors", hostile.safetensors(header(), bytes(60))))


# Content that lies ---------------------------------------------------------------------------------------------------


def in_safetensors(tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> bytes:
    try:
        return save(tensors, metadata)
    except KeyError as error:  # how older ones say it
        pytest.skip(f"this version of safetensors writes no {error}")


def damaged_fit(tmp_path: Path, change: Callable[[dict[str, Any], dict[str, torch.Tensor]], object]) -> Path:
    path = tmp_path / "run.ifcomp"
    fitted().save(path)
    content = path.read_bytes()
    metadata = json.loads(json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]["ifcomp"])
    tensors = load(content)
    change(metadata, tensors)
    if (words := json.dumps(metadata)).count("@deep"):
        path.write_bytes(in_safetensors(tensors, {"ifcomp": words.replace('"@deep"', "[" * 9000 + "]" * 9000)}))
    else:
        write_tensors(path, tensors, "ifcomp", metadata)
    return path


DAMAGE: dict[str, Callable[[dict[str, Any], dict[str, torch.Tensor]], object]] = {
    "types of 8 bits": lambda m, t: t.update({"0/second_moments": t["0/second_moments"].to(torch.float8_e5m2)}),
    "types of 64 bits": lambda m, t: t.update({name: value.double() for name, value in t.items()}),
    "complex numbers": lambda m, t: t.update({"0/basis.inputs": t["0/basis.inputs"].to(torch.complex64)}),
    "long eigenvectors": lambda m, t: t["0/basis.inputs"].mul_(1e30),
    "short eigenvectors": lambda m, t: t["0/basis.outputs"].zero_(),
    "flat eigenvectors": lambda m, t: t.update({"0/basis.inputs": torch.ones(5)}),
    "infinite eigenvectors": lambda m, t: t["0/basis.inputs"].fill_(torch.inf),
    "negative second moments": lambda m, t: t["0/second_moments"].neg_(),
    "a count beyond numbers": lambda m, t: m.update(count=1e400),
    "a count of 10**30": lambda m, t: m.update(count=10**30),
    "a count that is true": lambda m, t: m.update(count=True),
    "a count in words": lambda m, t: m.update(count="8"),
    "blocks that are one word": lambda m, t: m.update(blocks="0"),
    "a block that is a list": lambda m, t: m.update(blocks=[["0"]]),
    "a block that is a number": lambda m, t: m.update(blocks=[0]),
    "a fingerprint in pairs": lambda m, t: m.update(fingerprint=[[1, 2], ["a", "b"]]),
    "a version that is a list": lambda m, t: m.update(version=[]),
    "nested metadata": lambda m, t: m.update(options="@deep"),
    "a schema that is a list": lambda m, t: m.update(schema=[1]),
    "a path for a block": lambda m, t: m.update(blocks=["../../0"]),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_fits_that_cannot_be_are_refused(damage: str, tmp_path: Path) -> None:
    refusal("factors", damaged_fit(tmp_path, DAMAGE[damage]))


def test_a_fit_that_was_not_damaged_is_read(tmp_path: Path) -> None:
    IFComp.load(damaged_fit(tmp_path, lambda m, t: None), network())


@pytest.mark.parametrize("kind", [torch.int64, torch.complex64], ids=str)
def test_weights_of_another_type_are_not_filled_in_silently(kind: torch.dtype, tmp_path: Path) -> None:
    weights = {"0.weight": torch.ones(3, 4, dtype=kind), "0.bias": torch.ones(3)}
    path = written(tmp_path, "safetensors", in_safetensors(weights))
    refusal("safetensors", path, r"of another type: 0.weight torch\.")


def test_weights_of_another_kind_are_not_filled_in_silently(tmp_path: Path) -> None:
    for weight in (torch.empty(3, 4, device="meta"), torch.ones(3, 4).to_sparse()):
        path = written(tmp_path, "torch", hostile.saved({"0.weight": weight, "0.bias": torch.ones(3)}))
        refusal("torch", path)


def test_tensors_that_repeat_one_number_a_trillion_times_are_refused(tmp_path: Path) -> None:
    weight = torch.ones(1).as_strided((10**6, 10**6), (0, 0))
    path = written(tmp_path, "torch", hostile.saved({"0.weight": weight, "0.bias": torch.ones(3)}))
    refusal("torch", path, "of another shape")


@pytest.mark.parametrize(
    "line",
    [
        '{"key": "k", "label": "one"}',
        '{"key": "k", "label": 1e400, "log_probability": 0, "log_base": 0, "iterations": 1, "converged": true, '
        '"criterion": 0, "gradient": 0}',
        '{"key": "k", "label": 1, "log_probability": "x", "log_base": 0, "iterations": 1, "converged": true, '
        '"criterion": 0, "gradient": 0}',
    ],
)
def test_results_of_the_wrong_type_are_refused(line: str, tmp_path: Path) -> None:
    refusal("pairs", written(tmp_path, "pairs", line.encode()), "Line 1")


# Names ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a\0b", "~\0", "\ud800", "x" * 10_000])
@pytest.mark.parametrize("kind", ["npz", "parquet", "csv", "folder"])
def test_names_that_no_file_can_have_are_refused(kind: str, name: str) -> None:
    with pytest.raises((DataError, SettingError)):
        open_source(f"{kind}:{name}")
    with pytest.raises(ModelError):
        read_weights(name)
    with pytest.raises(StorageError):
        IFComp.load(name, network())


def test_names_of_classes_that_are_no_text_can_be_shown(tmp_path: Path) -> None:
    classes = np.array(["\ud800", "b"])
    source = open_source(f"npz:{written(tmp_path, 'npz', hostile.arrays(x=np.ones((2, 3)), classes=classes))}")
    assert source.class_names == ("\\ud800", "b")
    folder = os.path.join(os.fsencode(tmp_path / "images"), b"\xff\xfe")
    os.makedirs(folder)
    Image.new("RGB", (4, 4)).save(os.path.join(os.fsdecode(folder), "1.png"))
    found = open_source(f"folder:{tmp_path / 'images'}")
    assert (found.class_names, found.names) == (("\\udcff\\udcfe",), ("\\udcff\\udcfe/1.png",))
    assert len(list(found.batches())) == 1


def test_class_folders_that_cannot_be_looked_into_are_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        Image.new("RGB", (4, 4)).save(tmp_path / name / "1.png")
    assert len(open_source(f"folder:{tmp_path}")) == 2
    look = os.scandir

    def scandir(path: Any) -> Any:
        if str(path).endswith("/b"):
            raise PermissionError(13, "Permission denied", str(path))
        return look(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(DataError, match=r"/b'.*Permission denied"):
        open_source(f"folder:{tmp_path}")


@pytest.mark.parametrize("text", ["9" * 400 + "GB", "9" * 5000, "1.5e3GB", "nan", "-1", "1" + "0" * 40])
def test_sizes_beyond_numbers_are_refused(text: str) -> None:
    with pytest.raises(SettingError, match="max_memory"):
        as_bytes(text)


@pytest.mark.parametrize(
    "given",
    [
        {"mean": (float("nan"),)},
        {"std": (float("inf"),)},
        {"mean": "abc"},
        {"batch_size": 1.5},
        {"batch_size": True},
        {"image_size": 10**6},
        {"label_column": 3},
        {"grey": "yes"},
    ],
)
def test_options_that_mean_nothing_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(SettingError):
        SourceOptions(**given)
