"""Files that say the same thing say it alike: pyproject.toml, the workflow, the hooks, the Makefile, the pages."""

import os
import re
import shutil
import subprocess
import tomllib
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from tests.helpers.places import ROOT


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def read_yaml(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text())


def test_every_python_that_is_promised_is_tested():
    promised = project()["project"]
    named = [line.rpartition(" ")[2] for line in promised["classifiers"] if "Python :: 3." in line]
    (job,) = read_yaml(".github/workflows/ci.yml")["jobs"].values()
    assert job["strategy"]["matrix"]["python"] == named
    assert promised["requires-python"] == f">={named[0]}"
    assert project()["tool"]["pyright"]["pythonVersion"] == named[0]
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    assert os.access(ROOT / ".ci/run", os.X_OK)


def test_hooks_use_the_ruff_that_is_pinned():
    (hooks,) = read_yaml(".pre-commit-config.yaml")["repos"]
    (pinned,) = [
        one for one in map(Requirement, project()["project"]["optional-dependencies"]["lint"]) if one.name == "ruff"
    ]
    assert hooks["rev"].removeprefix("v") in pinned.specifier
    assert [hook["id"] for hook in hooks["hooks"]] == ["ruff-check", "ruff-format"]


def test_container_is_as_the_project_is():
    """A Python that is promised, the serving extra, no root, all files that the package is built from."""
    text = (ROOT / "Dockerfile").read_text()
    assert re.search(r"^ARG PYTHON=(.*)$", text, re.MULTILINE)[1] in " ".join(project()["project"]["classifiers"])
    assert '".[serve]"' in text
    assert re.findall(r"^USER (.*)$", text, re.MULTILINE) == ["10001"]
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = re.findall(r"^COPY (?!--)(.*) \./", text, re.MULTILINE)
    assert {name for line in copied for name in line.split()} == allowed
    assert all((ROOT / name).exists() for name in allowed)


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="hadolint is not installed")
def test_container_passes_hadolint():
    told = subprocess.run(["hadolint", ROOT / "Dockerfile"], capture_output=True, text=True, check=False)
    assert (told.returncode, told.stdout) == (0, "")


def test_targets_exist():
    """Every `make TARGET` in the pages, and every target is listed as such."""
    text = (ROOT / "Makefile").read_text()
    targets = {*re.findall(r"^([a-z-]+):", text, flags=re.MULTILINE)}
    (phony,) = re.findall(r"^\.PHONY: (.*)$", text, flags=re.MULTILINE)
    assert {*phony.split()} == targets
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / ".ci/run"]
    named = {
        name
        for page in pages
        for name in re.findall(r"(?:^|`| {4})make ([a-z-]+)", page.read_text(), flags=re.MULTILINE)
    }
    assert {"test", "demo", "docs"} <= named <= targets
