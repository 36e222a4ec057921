"""Models that had other default arguments before: their runs and folders open, resume and start others as they were."""

import json
from pathlib import Path

import pytest
import timm
import torch
import yaml
from safetensors.torch import save_file

import weft
from tests.helpers.small_runs import make_pictures, tiny_run
from weft.config import Config, override
from weft.engine.lock import STATE
from weft.heads.folder import open_model
from weft.models.weights.former import FORMER, former_args
from weft.run.resume import read_settings
from weft.run.start import model_of_init

NAS = FORMER["cvt_13_nas"].args


def forget(file: Path, read, write) -> None:
    """Takes the arguments out of a file, as if the model had them by default."""
    content = read(file.read_text())
    args = content["model_args"] if "model_args" in content else content["model"]["args"]
    for key in NAS:
        del args[key]
    file.write_text(write(content))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model folder of version 0.1.0."""
    model = timm.create_model("cvt_13_nas", num_classes=3, **NAS)
    folder = weft.save_model(model, tmp_path_factory.mktemp("former") / "nas")
    forget(folder / "config.json", json.loads, json.dumps)
    return folder


def test_the_former_network_is_told_by_its_weights(folder):
    file, picture = folder / "model.safetensors", torch.randn(1, 3, 64, 64)
    assert former_args("cvt_13_nas", {}, file) == NAS
    opened, _ = open_model(folder)
    expected = timm.create_model("cvt_13_nas", num_classes=3, **NAS).eval()
    expected.load_state_dict(opened.state_dict())
    with torch.no_grad():
        assert torch.equal(opened.eval()(picture), expected(picture))
    assert former_args("cvt_13", {}, file) == {}  # which never was another
    assert former_args("cvt_13_nas", dict(mlp_ratio=4.0), file) == {}  # who gives one knows the model of today


def test_the_model_of_today_stays_what_it_is(tmp_path):
    model = timm.create_model("cvt_13_nas", num_classes=3).eval()
    folder, picture = weft.save_model(model, tmp_path / "nas"), torch.randn(1, 3, 64, 64)
    assert former_args("cvt_13_nas", {}, folder / "model.safetensors") == {}
    with torch.no_grad():
        assert torch.equal(open_model(folder)[0].eval()(picture), model(picture))


def test_a_run_starts_from_the_former_network(folder):
    found = model_of_init(override(Config(), {"model.init": str(folder)}))
    assert found["model.name"] == "cvt_13_nas"
    assert {key: found["model.args"][key] for key in NAS} == NAS


def test_a_broken_file_is_left_to_those_who_load_it(tmp_path):
    (tmp_path / "torn.safetensors").write_bytes(b"no tensors")
    for name in ("torn", "missing"):
        assert former_args("cvt_13_nas", {}, tmp_path / f"{name}.safetensors") == {}


@pytest.mark.parametrize(("hidden", "former"), [(768, NAS), (384, {})])
def test_settings_of_a_run_that_goes_on(tmp_path, hidden, former):
    (tmp_path / STATE).parent.mkdir()
    save_file({"model.stages.1.blocks.0.mlp.fc1.weight": torch.zeros(hidden, 192)}, tmp_path / STATE)
    (tmp_path / "config.yaml").write_text("model:\n  name: cvt_13_nas\n  args: {act_layer: gelu}\n")
    assert read_settings(tmp_path).model.args == {**former, "act_layer": "gelu"}


@pytest.mark.slow
def test_a_run_of_the_former_network_goes_on(tmp_path):
    """With the settings of version 0.1.0, and then again with what it wrote itself."""
    data, run = make_pictures(tmp_path / "pictures"), tmp_path / "run"
    tiny_run(data, run, model="cvt_13_nas", model__args=dict(NAS), epochs=1, img_size=32)
    forget(run / "config.yaml", yaml.safe_load, yaml.safe_dump)
    forget(run / "config.json", json.loads, json.dumps)
    assert weft.load(run, device="cpu").model.stages[1].blocks[0].mlp.fc1.out_features == 768
    for epochs in (2, 3):
        weft.train(resume=run, epochs=epochs, allow_changes=True, quiet=True)
        assert weft.load(run, device="cpu").model.stages[1].blocks[0].mlp.fc1.out_features == 768
