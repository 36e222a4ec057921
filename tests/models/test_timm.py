"""timm's own tests/test_models.py, untouched, on our models: ten tests each or more, all passed, none skipped."""

import os
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest
import timm
import torch

import weft
from tests.helpers.places import ROOT

TEST_FILE = ROOT / ".cache" / f"timm-{timm.__version__}" / "test_models.py"
TESTS = {  # what timm asks of a model
    "test_model_forward",
    "test_model_backward",
    "test_model_forward_torchscript",
    "test_model_forward_features",
    "test_model_forward_intermediates_features",
    "test_model_forward_intermediates",
    "test_model_forward_fx",
    "test_model_backward_fx",
    "test_model_forward_fx_torchscript",
}


QUICK = ["cvt_nano"]  # a minute each; all others by `make test-all`


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in weft.list_models()]
)
@pytest.mark.timeout(1800)
def test_timm_tests_pass(name, tmp_path):
    assert TEST_FILE.is_file(), f"{TEST_FILE} is missing; `make timm-tests` fetches it."
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.helpers.timm_plugin", "-p", "no:cacheprovider"]
    command += [str(TEST_FILE), "-c", os.devnull, f"--rootdir={ROOT}", "-k", name, f"--junitxml={report}"]
    environment = {**os.environ, "WEFT_TIMM_MODELS": name, "TIMEOUT": "1200"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    outcomes: dict[str, str] = {}
    for case in ET.parse(report).iter("testcase"):
        test = case.attrib["name"].split("[")[0]
        problems = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
        outcomes[test] = "".join(problems) or outcomes.get(test, "passed")
    picture = torch.empty(1, 3, 64, 64, device="meta")
    has_map = timm.create_model(name, device="meta").forward_features(picture).ndim == 4
    configuration = "test_model_default_cfgs" if has_map else "test_model_default_cfgs_non_std"
    assert {*outcomes} >= TESTS | {configuration}, done.stdout[-3000:]  # newer versions of timm ask more
    assert {*outcomes.values()} == {"passed"}, done.stdout[-3000:]
