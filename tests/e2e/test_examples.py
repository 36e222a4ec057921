"""The example scripts, run as a person runs them, at sizes that a test can afford."""

import os
import re
import subprocess
import sys

import pytest
import timm

import weft  # noqa: F401  registers the models
from tests.helpers.places import ROOT
from weft.data.demo import nuclei


def run(script: str, *args: str) -> str:
    command = [sys.executable, str(ROOT / "examples" / script), *args]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses(printed: str) -> list[float]:
    return [float(value) for value in re.findall(r"(?:step|epoch) +\d+  loss (\d+\.\d+)", printed)]


@pytest.mark.parametrize(("split", "n"), [("train", 224), ("val", 64)])
def test_nuclei(split, n):
    pictures, masks = nuclei(split)
    assert pictures.shape == masks.shape == (n, 256, 256)
    for picture, mask in zip(pictures, masks, strict=True):
        count = mask.max()
        assert 1 <= count <= 101
        assert set(mask.ravel()) == set(range(count + 1))  # every nucleus has pixels
        assert picture[mask > 0].mean() > 2 * picture[mask == 0].mean()  # and they lie where it is bright


@pytest.mark.parametrize("encoder", ["cetnet_nano", pytest.param("ceit_nano", marks=pytest.mark.slow)])
def test_segmentation_learns(encoder):
    printed = run("segmentation_smp.py", "--encoder", encoder, "--epochs", "5", "--size", "64")
    first, *_, last = losses(printed)
    assert last < 0.95 * first
    assert re.search(r"intersection over union on the training pictures: \d+\.\d%", printed)


@pytest.mark.slow
def test_detection_learns():
    printed = run("detection_torchvision.py", "--steps", "3", "--size", "64")
    assert all(name in printed for name in ("classifier", "box_reg", "mask", "objectness", "rpn_box_reg"))
    first, _, last = losses(printed)
    assert last < first


@pytest.mark.parametrize(
    "model", ["cetnet_nano", *(pytest.param(n, marks=pytest.mark.slow) for n in ("vitae_nano", "vt_resnet_nano"))]
)
def test_hub_roundtrip(tmp_path, model):
    folder = tmp_path / "hub model"
    printed = run("hub_roundtrip.py", "--model", model, "--out", str(folder))
    assert "equal logits: True" in printed
    assert "cat, dog, horse" in printed
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors"}
    assert timm.create_model(f"local-dir:{folder}", pretrained=True).num_classes == 3
