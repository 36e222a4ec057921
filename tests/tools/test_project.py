"""Files that say the same thing say it alike: pyproject.toml, the workflow, the hooks, the Makefile, the pages."""

import os
import re
import tomllib
from typing import Any

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
