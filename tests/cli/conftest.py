"""Fixtures: a user's project as the current folder, with and without a run, and an empty configuration folder."""

import shutil
from pathlib import Path

import pytest
from project import Project, create_project, ifcomp


@pytest.fixture(scope="session")
def configuration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("configuration")


@pytest.fixture(autouse=True)
def _set_configuration(configuration: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(configuration))


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Project:
    return create_project(tmp_path_factory.mktemp("project"))


@pytest.fixture
def project(template: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """A copy of the project in the current folder; the module is shared."""
    shutil.copytree(template.folder, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return Project(tmp_path, template.module)


@pytest.fixture
def run(project: Project) -> Project:
    """The project with a run, ``run.ifcomp``."""
    result = ifcomp(*project.fit_arguments())
    assert result.exit_code == 0, result.output
    return project
