"""Parameter counts, dropout and pretrained weights of the networks."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from experiments.datasets import IMAGENET, MissingDataError
from experiments.models import MODELS, LeNet, build, pretrained
from ifcomp.errors import SettingError


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("lenet", 61_706),
        ("lenet-dropout", 61_706),
        ("resnet20", 269_722),
        ("resnet56", 853_018),
        ("resnet18", 11_173_962),
        ("resnet18-dropout", 11_173_962),
        ("resnet18-width32", 2_797_610),
    ],
)
def test_parameter_counts(name: str, parameters: int) -> None:
    assert sum(value.numel() for value in build(name).parameters()) == parameters


@pytest.mark.parametrize("name", [name for name in MODELS if "width" in name or "18" not in name])
def test_dropout_acts_in_training_mode_only(name: str) -> None:
    torch.manual_seed(0)
    model = build(name, num_classes=7)
    x = torch.randn(2, 1, 28, 28) if name.startswith("lenet") else torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(model.eval()(x), model(x))
        assert model(x).shape == (2, 7)
        assert torch.equal(model.train()(x), model(x)) == ("dropout" not in name)


def test_dropout_does_not_change_the_state_dict() -> None:
    assert LeNet(dropout=0.3).state_dict().keys() == LeNet().state_dict().keys()
    assert build("resnet18-width32-dropout").state_dict().keys() == build("resnet18-width32").state_dict().keys()


def test_unknown_names_are_refused() -> None:
    with pytest.raises(SettingError, match="resnet56"):
        build("alexnet")
    with pytest.raises(SettingError, match="resnet56"):
        pretrained("lenet")


def test_weights_come_from_the_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IFCOMP_DATA", str(tmp_path))
    with pytest.raises(MissingDataError, match=r"resnet20-12fca82f\.safetensors"):
        pretrained("resnet20")
    torch.manual_seed(0)
    original = build("resnet20")
    (tmp_path / "weights").mkdir()
    save_file(original.state_dict(), tmp_path / "weights/resnet20-12fca82f.safetensors")
    model, normalisation = pretrained("resnet20")
    assert normalisation == IMAGENET
    assert not model.training
    assert torch.equal(model.linear.weight, original.linear.weight)
