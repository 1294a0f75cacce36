"""Folders of images."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from source_helpers import read_all

from ifcomp.data.sources import SourceOptions, open_source
from ifcomp.errors import DataError, EmptyDataError

RNG = np.random.default_rng(0)


def write_image(name: str, pixels: Any = None, mode: str | None = None, **settings: Any) -> np.ndarray:
    """Write an image, by default 6 x 5 random colours, and return its pixels [H, W, C]."""
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    pixels = RNG.integers(0, 256, (6, 5, 3)).astype(np.uint8) if pixels is None else pixels
    image = Image.fromarray(pixels)
    (image.convert(mode) if mode else image).save(name, **settings)
    return pixels


def test_subfolders_are_classes() -> None:
    written = {name: write_image(f"f/{name}.png") for name in ("dog/2", "dog/10", "cat/b", "cat/a/deep")}
    Path("f/cat/notes.txt").write_text("not an image")
    Path("f/.hidden").mkdir()
    Path("f/cat/.DS_Store.png").write_text("not an image")
    source = open_source("folder:f", SourceOptions(batch_size=3))
    assert source.class_names == ("cat", "dog")
    x, y = read_all(source)
    order = ["cat/a/deep", "cat/b", "dog/10", "dog/2"]
    expected = np.stack([written[name] for name in order]).transpose(0, 3, 1, 2) / 255
    np.testing.assert_allclose(x.numpy(), expected, rtol=1e-6)
    assert y is not None
    assert y.tolist() == [0, 0, 1, 1]
    previews = source.preview([3, 0])
    assert [preview.name for preview in previews] == ["dog/2.png", "cat/a/deep.png"]
    np.testing.assert_array_equal(np.asarray(previews[0].content), written["dog/2"])


def test_known_class_names_number_the_subfolders() -> None:
    write_image("f/dog/1.png")
    source = open_source("folder:f", class_names=["ant", "cat", "dog"])
    assert source.labels is not None
    assert source.labels.tolist() == [2]
    assert source.class_names == ("ant", "cat", "dog")
    with pytest.raises(DataError, match=r"not classes of the fit: dog. Its classes are ant, cat"):
        open_source("folder:f", class_names=["ant", "cat"])


def test_images_without_subfolders_have_no_labels() -> None:
    write_image("f/1.png")
    source = open_source("folder:f")
    assert (read_all(source)[1], source.class_names, len(source)) == (None, None, 1)
    write_image("f/cat/1.png")
    with pytest.raises(DataError, match=r"'1.png' is in none of them"):
        open_source("folder:f")


def test_images_are_resized_and_converted_to_grey() -> None:
    first = write_image("f/a/1.png", RNG.integers(0, 256, (9, 4, 3)).astype(np.uint8))
    write_image("f/b/2.jpg")
    with pytest.raises(DataError, match=r"'a/1.png' has 4x9 pixels, 'b/2.jpg' 5x6. Give --image-size"):
        open_source("folder:f")
    options = SourceOptions(image_size=8, grey=True, mean=(0.5,), std=(0.25,))
    x, _ = read_all(open_source("folder:f", options))
    assert x.shape == (2, 1, 8, 8)
    expected = np.asarray(Image.fromarray(first).convert("L").resize((8, 8), Image.Resampling.BILINEAR)) / 255
    np.testing.assert_allclose(x[0, 0].numpy(), (expected - 0.5) / 0.25, atol=1e-5)


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "1", "LA", "CMYK"])
def test_all_modes_become_rgb(mode: str) -> None:
    write_image(f"f/a/1.{'tif' if mode == 'CMYK' else 'png'}", mode=mode)
    assert read_all(open_source("folder:f"))[0].shape == (1, 3, 6, 5)


def test_transparent_palettes_do_not_warn() -> None:
    write_image("f/a/1.png", mode="P", transparency=bytes(range(200)))
    assert read_all(open_source("folder:f"))[0].shape == (1, 3, 6, 5)


def test_images_with_16_bits_are_refused() -> None:
    write_image("f/a/1.png", np.full((4, 4), 40_000, np.uint16))
    with pytest.raises(DataError, match=r"mode 'I(;16)?', but at most 8 bits"):
        open_source("folder:f")


def test_links_out_of_the_folder_are_refused() -> None:
    write_image("secret/1.png")
    write_image("f/a/1.png")
    os.symlink(Path("f/a/1.png").resolve(), "f/a/2.png")
    assert len(open_source("folder:f")) == 2
    os.symlink("f", "g")
    assert len(open_source("folder:g")) == 2
    os.symlink(Path("secret/1.png").resolve(), "f/a/3.png")
    with pytest.raises(DataError, match="leads out of 'f'"):
        open_source("folder:f")
    Path("f/a/3.png").unlink()
    os.symlink(Path("secret").resolve(), "f/b")
    with pytest.raises(DataError, match="link to a folder"):
        open_source("folder:f")


def test_images_with_too_many_pixels_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    write_image("f/a/1.png", np.zeros((40, 40, 3), np.uint8))
    for limit in (1000, 100):  # Pillow warns at the first and raises at the second
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
        with pytest.raises(DataError, match="far too much memory"):
            open_source("folder:f")


def test_damaged_images_are_refused() -> None:
    write_image("f/a/1.png")
    Path("f/a/2.png").write_bytes(b"not an image")
    with pytest.raises(DataError, match=r"Cannot read .*2.png' as an image"):
        open_source("folder:f")
    content = Path("f/a/1.png").read_bytes()
    Path("f/a/2.png").write_bytes(content[: len(content) - 60])
    with pytest.raises(DataError, match=r"Cannot decode .*2.png"):
        list(open_source("folder:f").batches())


def test_missing_and_empty_folders_are_refused() -> None:
    with pytest.raises(DataError, match="no folder 'gone'"):
        open_source("folder:gone")
    Path("file").write_text("")
    with pytest.raises(DataError, match="is a file"):
        open_source("folder:file")
    Path("empty/cat").mkdir(parents=True)
    with pytest.raises(EmptyDataError, match="no images in 'empty'"):
        open_source("folder:empty")
