"""Corruptions: shape, determinism and increasing severity of all; single ones by hand or against other libraries."""

import colorsys
import io
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits, load_sample_images
from torch import Tensor

from experiments.corruptions import CORRUPTIONS, HELD_OUT, SEVERITIES, blur, corrupt, digital, held_out, noise
from experiments.corruptions.registry import REGISTRY, Streams, streams
from experiments.corruptions.sampling import positions, sample, smear, transform
from experiments.corruptions.weather import _clouds, _frost_texture
from ifcomp.errors import DataError, SettingError

ALL = (*CORRUPTIONS, *HELD_OUT)
DETERMINISTIC = {  # no random numbers
    *("defocus_blur", "zoom_blur", "gaussian_blur", "brightness", "contrast", "pixelate", "jpeg_compression"),
    *("saturate", "posterize"),
}


def _colour() -> Tensor:
    """Return forty crops of two photos, [40, 32, 32, 3]."""
    photos = [np.asarray(Image.fromarray(photo).resize((160, 128))) for photo in load_sample_images().images]
    crops = [photo.reshape(4, 32, 5, 32, 3).transpose(0, 2, 1, 3, 4).reshape(-1, 32, 32, 3) for photo in photos]
    return torch.from_numpy(np.concatenate(crops))


def _grey() -> Tensor:
    """Return forty digits of 28x28 pixels."""
    digits = (load_digits().images[:40] * 255 / 16).astype(np.uint8)
    return torch.from_numpy(np.stack([np.asarray(Image.fromarray(digit).resize((28, 28))) for digit in digits]))


IMAGES: dict[str, Tensor] = {"colour": _colour(), "grey": _grey()}
kinds = pytest.mark.parametrize("kind", ["colour", "grey"])


def _streams(seed: int = 0) -> Streams:
    return streams("test", seed)


def _random(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).random(shape, np.float32)


def test_names() -> None:
    assert len(CORRUPTIONS) == 19
    assert not set(CORRUPTIONS) & set(HELD_OUT)
    assert set(ALL) == REGISTRY.keys()
    assert all(len(corruption.parameters) == 5 for corruption in REGISTRY.values())


@kinds
@pytest.mark.parametrize("name", ALL)
def test_form_determinism_and_severity(name: str, kind: str) -> None:
    images = IMAGES[kind]
    before = images.clone()
    results = [corrupt(images, name, severity) for severity in SEVERITIES]
    assert torch.equal(images, before)
    assert torch.equal(results[0], images)
    for result in results:
        assert result.dtype == torch.uint8
        assert result.shape == images.shape
    assert torch.equal(corrupt(images, name, 3), results[3])
    assert torch.equal(corrupt(images[:7], name, 3), results[3][:7])
    assert torch.equal(corrupt(images, name, 3, seed=1), results[3]) == (name in DETERMINISTIC)
    absolute = [float((result.double() - images).abs().mean()) for result in results]
    squared = [float((result.double() - images).square().mean()) for result in results]
    assert all(left < right for left, right in pairwise(absolute)), absolute
    assert all(left < right for left, right in pairwise(squared)), squared


@pytest.mark.parametrize("name", [*(name for name in CORRUPTIONS if name.endswith("blur")), "pixelate"])
@pytest.mark.parametrize("severity", [1, 5])
def test_blurs_do_not_change_a_plain_area(name: str, severity: int) -> None:
    plain = torch.full((2, 32, 32, 3), 77, dtype=torch.uint8)
    assert torch.equal(corrupt(plain, name, severity), plain)


def test_invalid_settings_are_refused() -> None:
    images = IMAGES["colour"]
    with pytest.raises(SettingError, match="gaussian_noise"):
        corrupt(images, "rain", 1)
    with pytest.raises(SettingError, match="0, 1, 2, 3, 4, 5"):
        corrupt(images, "snow", 6)
    for wrong in (images.float(), images[0, 0], images.permute(0, 3, 1, 2)):
        with pytest.raises(DataError, match="uint8"):
            corrupt(wrong, "snow", 1)
    assert corrupt(images[:0], "jpeg_compression", 1).shape == (0, 32, 32, 3)


def test_moments_of_noise() -> None:
    grey = np.full((200, 32, 32, 1), 0.4, np.float32)
    expected: list[tuple[Callable[..., np.ndarray], float, float]] = [
        (noise.gaussian_noise, 0.1, 0.1),
        (noise.speckle_noise, 0.1, 0.04),
        (noise.shot_noise, 50, (0.4 / 50) ** 0.5),
    ]
    for apply, parameter, deviation in expected:
        result = apply(grey, _streams(), parameter)
        assert result.mean() == pytest.approx(0.4, abs=0.002)
        assert result.std() == pytest.approx(deviation, rel=0.01)


def test_impulse_noise_by_counting() -> None:
    result = noise.impulse_noise(np.full((100, 32, 32, 3), 0.4, np.float32), _streams(), 0.05)
    values, counts = np.unique(result, return_counts=True)
    assert values.tolist() == [0, pytest.approx(0.4), 1]
    assert counts[[0, 2]] / result.size == pytest.approx([0.025, 0.025], rel=0.05)


def test_glass_swaps_only_neighbouring_pixels() -> None:
    images = np.tile(np.arange(100, dtype=np.float32).reshape(1, 10, 10, 1), (50, 1, 1, 1))
    result = blur.glass_blur(images, _streams(), (0.0, 0.5))
    assert np.array_equal(np.sort(result.reshape(50, -1)), images.reshape(50, -1))
    assert 0.3 < (result != images).mean() < 0.9
    assert np.array_equal(blur.glass_blur(images, _streams(), (0.0, 0.0)), images)


def test_motion_along_a_row_by_hand() -> None:
    images = _random(2, 5, 20, 1)
    result = smear(images, np.zeros(2), 1, 1.0)
    weights = np.exp([-0.5, 0.0, -0.5]) / np.exp([-0.5, 0.0, -0.5]).sum()
    expected = weights[0] * images[:, :, :-2] + weights[1] * images[:, :, 1:-1] + weights[2] * images[:, :, 2:]
    assert result[:, :, 1:-1] == pytest.approx(expected, abs=1e-5)
    upright = smear(images.transpose(0, 2, 1, 3), np.full(2, np.pi / 2), 1, 1.0)
    assert upright == pytest.approx(result.transpose(0, 2, 1, 3), abs=1e-5)


def test_sampling_by_hand() -> None:
    images = _random(3, 6, 8, 2)
    rows, columns = positions(images)
    assert sample(images, rows, columns) == pytest.approx(images, abs=1e-6)
    half = sample(images, rows, columns + 0.5)
    assert half[:, :, :-1] == pytest.approx((images[:, :, :-1] + images[:, :, 1:]) / 2, abs=1e-5)
    beyond = sample(images, rows - 2, columns)
    assert beyond[:, :2] == pytest.approx(images[:, [1, 0]], abs=1e-5)  # mirrored at the edge
    quarter = np.array([[[0.0, 1.0], [-1.0, 0.0]]])
    square = images[:, :6, :6]
    assert transform(square, quarter, np.zeros((1, 2))) == pytest.approx(np.rot90(square, 1, (1, 2)), abs=1e-5)
    shifted = transform(square, np.eye(2)[None], np.array([[1.0, 2.0]]))
    assert shifted[:, :5, :4] == pytest.approx(square[:, 1:, 2:], abs=1e-5)


def test_rotation_goes_both_ways() -> None:
    images = np.zeros((60, 15, 15, 1), np.float32)
    images[:, 7, 13] = 1
    result = held_out.rotation(images, _streams(), 90.0)
    ends = {tuple(np.unravel_index(image.argmax(), (15, 15))) for image in result[..., 0]}
    assert ends == {(1, 7), (13, 7)}


def test_pixelate_by_hand() -> None:
    images = _random(2, 8, 6, 3)
    means = images.reshape(2, 4, 2, 3, 2, 3).mean((2, 4))
    assert digital.pixelate(images, _streams(), 0.5) == pytest.approx(means.repeat(2, 1).repeat(2, 2), abs=1e-6)
    row = np.array([0.0, 3.0, 6.0], np.float32).reshape(1, 1, 3, 1).repeat(3, 1)
    cells = [(0 + 3 / 2) / 1.5, (3 / 2 + 6) / 1.5]  # two cells of one and a half pixels
    assert digital.pixelate(row, _streams(), 0.67)[0, 0].ravel().tolist() == pytest.approx([cells[0], *cells[1:] * 2])


def test_jpeg_agrees_with_pillow() -> None:
    for images in IMAGES.values():
        stream = io.BytesIO()
        Image.fromarray(images[3].numpy()).save(stream, "JPEG", quality=40)
        assert np.array_equal(corrupt(images, "jpeg_compression", 5)[3].numpy(), np.asarray(Image.open(stream)))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("brightness", lambda hue, saturation, value: (hue, saturation, min(1.0, value + 0.3))),
        ("saturate", lambda hue, saturation, value: (hue, min(1.0, 3 * saturation), value)),
    ],
)
def test_light_and_colour_against_colorsys(name: str, change: Callable[..., tuple[float, float, float]]) -> None:
    images = IMAGES["colour"][:2, ::4, ::4]
    result = corrupt(images, name, 5)
    for before, after in zip(images.reshape(-1, 3).tolist(), result.reshape(-1, 3).tolist(), strict=True):
        expected = colorsys.hsv_to_rgb(*change(*colorsys.rgb_to_hsv(*(value / 255 for value in before))))
        assert after == pytest.approx([255 * value for value in expected], abs=0.51)


def test_light_and_contrast_of_grey_by_hand() -> None:
    images = IMAGES["grey"]
    assert torch.equal(corrupt(images, "saturate", 5), (3 * images.int()).clamp(max=255).byte())
    bright = corrupt(images, "brightness", 5).double()
    assert (bright - (images + 0.3 * 255).clamp(max=255)).abs().max() <= 0.51
    mean = images.double().mean((1, 2), keepdim=True)
    assert (corrupt(images, "contrast", 5) - (mean + 0.15 * (images - mean))).abs().max() <= 0.51


def test_tones_by_hand() -> None:
    images = np.array([0.0, 0.2, 0.4, 0.6, 1.0], np.float32).reshape(1, 1, 5, 1).repeat(40, 0)
    assert held_out.posterize(images, _streams(), 3)[0].ravel().tolist() == [0, 0, 0.5, 0.5, 1]
    changed = held_out.gamma(images, _streams(), 2.0)
    result = {tuple(np.round(row, 4)) for row in changed.reshape(40, 5).tolist()}
    assert result == {(0, 0.04, 0.16, 0.36, 1), (0, 0.4472, 0.6325, 0.7746, 1)}


def test_cutout_is_one_complete_square() -> None:
    result = held_out.cutout(np.ones((50, 28, 28, 1), np.float32), _streams(), 0.4)[..., 0]
    for image in result:
        rows, columns = np.nonzero(image == 0.5)
        assert len(rows) == 11 * 11
        assert np.ptp(rows) == np.ptp(columns) == 10


def test_defocus_is_an_even_disk() -> None:
    point = np.zeros((1, 11, 11, 1), np.float32)
    point[0, 5, 5] = 1
    result = blur.defocus_blur(point, _streams(), 2.0)[0, ..., 0]
    assert result.sum() == pytest.approx(1)
    assert np.array_equal(result, result.T)
    assert np.array_equal(result, result[::-1])
    assert result[5, 4] == result[5, 5] == result[6, 6]
    assert (result > 0).sum() == 21  # all pixels closer than 2.5 but the corners of 5x5


def test_textures() -> None:
    clouds = _clouds(np.random.default_rng(0), (3, 32, 32), 1.8)
    assert clouds.min((1, 2)).tolist() == [0, 0, 0]
    assert clouds.max((1, 2)).tolist() == [1, 1, 1]
    ice = _frost_texture()
    assert ice.min() == 0
    assert ice.max() == 1
    assert 0.1 < ice.std() < 0.4
    neighbours = [np.abs(np.diff(ice, axis=axis, append=np.take(ice, [0], axis))) for axis in (0, 1)]
    assert max(step[-1].mean() / step[:-1].mean() for step in (neighbours[0], neighbours[1].T)) < 1.5  # periodic
