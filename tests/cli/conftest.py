"""A furnished folder as the current one, with a run, and a configuration folder of its own."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from workshop import Workshop, forget, furnish, ifcomp


@pytest.fixture(scope="session")
def configuration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("configuration")


@pytest.fixture(scope="session")
def furnished(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return furnish(tmp_path_factory.mktemp("workshop"))


@pytest.fixture(autouse=True)
def own_configuration(configuration: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(configuration))


@pytest.fixture
def workshop(furnished: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workshop]:
    """The current folder, furnished anew for each test; the module is shared."""
    shutil.copytree(furnished.folder, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    yield Workshop(tmp_path, furnished.module)
    forget(tmp_path)


@pytest.fixture
def run(workshop: Workshop) -> Workshop:
    """The same with a run, ``run.ifcomp``."""
    found = ifcomp(*workshop.fit_arguments())
    assert found.exit_code == 0, found.output
    return workshop
