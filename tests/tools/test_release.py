"""Weights that come with the package: small, whole, found without a network; and the tool that makes them of a run."""

import json
import os
import re
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from types import SimpleNamespace

import pytest
import timm
import torch
import yaml
from safetensors.torch import load_file, save_file

import weft
from tests.helpers.places import ROOT
from tests.helpers.small_runs import TINY, command, make_pictures
from tools.release import MOST, release
from tools.release import card as card_of
from weft.cli.train import DEMOS
from weft.data.demo import fashion_mnist
from weft.errors import WeftError
from weft.models import variants
from weft.models.weights import release as mechanism
from weft.models.weights.release import FOLDER, add_released, released
from weft.run.recipes import find_recipe

ALL_OF_THEM = 12_000_000  # bytes


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run whose network has a switch that leaves no trace in the shapes of its weights."""
    folder = tmp_path_factory.mktemp("run")
    args = {**TINY["model__args"], "stride_kv": 1}
    weft.train(make_pictures(folder / "pictures"), out=folder / "run", **{**TINY, "model__args": args})
    return folder / "run"


@pytest.fixture
def shelf(run, tmp_path, monkeypatch):
    """The run, released into a folder that stands for the package's, under the tag `test`."""
    release(run, "test", "made up", "none", tmp_path)
    registry = sys.modules["timm.models._registry"]
    monkeypatch.setattr(mechanism, "FOLDER", tmp_path)
    for name in ("_model_pretrained_cfgs", "_model_default_cfgs"):
        monkeypatch.setattr(registry, name, dict(getattr(registry, name)))
    mechanism.released.cache_clear()
    cfgs = {"cvt_nano": timm.models.DefaultCfg()}
    add_released(cfgs)
    cfg = cfgs["cvt_nano"].cfgs["test"]
    cfg.architecture, cfg.tag = "cvt_nano", "test"
    registry._model_pretrained_cfgs["cvt_nano.test"] = cfg
    yield tmp_path / "cvt_nano.test"
    mechanism.released.cache_clear()


def test_what_is_released_is_small_and_in_the_wheel():
    sizes = [(FOLDER / name / "model.safetensors").stat().st_size for name in released()]
    assert sizes
    assert max(sizes) <= MOST
    assert sum(sizes) <= ALL_OF_THEM
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["weft"]
    for file in FOLDER.glob("*/*"):
        path = file.relative_to(ROOT / "weft").as_posix()
        assert any(fnmatch(path, pattern) for pattern in patterns), path


CIFAR = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


@pytest.mark.parametrize(
    ("classes", "begins"),
    [
        (["cell", "no cell"], True),
        (["Dog", "Cat"], False),  # perhaps its own pictures, by which it would be judged
        (["dog", "cat", "cow", "sheep"], True),
        (["dog", "cat", "horse", "sheep"], False),
        (CIFAR, False),
        (list("0123456789"), True),
    ],
)
def test_trainings_on_other_pictures_begin_with_weights_of_many_kinds(classes, begins):
    assert mechanism.weights_of_many_kinds() == ("vt_resnet_nano.weft_cifar10",)
    assert mechanism.have_learned(classes) != begins


@pytest.mark.parametrize("task", [*DEMOS])
def test_demos_begin_with_weights_of_their_model(task, monkeypatch):
    asked = {}
    stopped = SimpleNamespace(stopped=True, interrupted=False)
    monkeypatch.setattr("weft.run.train.train_since", lambda start, data, **given: asked.update(given) or stopped)
    command("demo", task)
    assert asked["init"] in released()
    assert find_recipe(asked["recipe"])["model.name"] == asked["init"].partition(".")[0]


@pytest.mark.parametrize("name", released())
def test_a_release_says_what_it_is_and_answers_without_a_network(name):
    """In a process of its own, which may not look at the hub; the folder gives the same answers."""
    card = (FOLDER / name / "README.md").read_text()
    assert re.search(r"^- Licence of the data: ", card, flags=re.MULTILINE)
    assert re.search(r"^- [Tt]op-1: \d+\.\d+% of [\d,]+ pictures", card, flags=re.MULTILINE)
    code = f"""
import timm, torch, weft.models
model = timm.create_model("{name}", pretrained=True).eval()
x = torch.linspace(-1, 1, model.in_chans * 64 * 64).sin().reshape(1, model.in_chans, 64, 64)
x = torch.nn.functional.interpolate(x, model.pretrained_cfg["input_size"][1:])
with torch.inference_mode():
    print(model(x)[0].tolist())
"""
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": "/nowhere"}
    told = subprocess.run([sys.executable, "-c", code], env=offline, capture_output=True, text=True, check=True).stdout
    model = weft.load(FOLDER / name, "cpu").model
    size = model.pretrained_cfg["input_size"]
    x = torch.linspace(-1, 1, size[0] * 64 * 64).sin().reshape(1, size[0], 64, 64)
    with torch.inference_mode():
        expected = model(torch.nn.functional.interpolate(x, size[1:]))[0]
    torch.testing.assert_close(torch.tensor(json.loads(told)), expected, rtol=1e-4, atol=1e-4)


def test_the_card_of_the_demo_tells_its_accuracy():
    """Counted without Weft's evaluation, on the pictures that come with the package."""
    name = "vt_resnet_nano.weft_fashion"
    pictures, labels, _ = fashion_mnist("test")
    model = timm.create_model(name, pretrained=True).eval()
    mean, std = model.pretrained_cfg["mean"][0], model.pretrained_cfg["std"][0]
    x = (torch.tensor(pictures)[:, None] / 255 - mean) / std
    with torch.inference_mode():
        answers = torch.cat([model(part).argmax(1) for part in x.split(100)])
    right = (answers == torch.tensor(labels)).float().mean().item()
    (told,) = re.findall(r"Top-1: ([\d.]+)%", (FOLDER / name / "README.md").read_text())
    assert 100 * right == pytest.approx(float(told), abs=0.15)


def test_bare_names_stay_networks_for_any_pictures():
    """As they are without the tags: classes, channels and size are not those of a release."""
    for name in {name.partition(".")[0] for name in released()}:
        cfg = timm.get_pretrained_cfg(name)
        assert cfg is not None
        assert not cfg.has_weights
        assert timm.create_model(name, device="meta").in_chans == 3
        with pytest.raises(WeftError, match=rf"{name}\.\w+ come with Weft"):
            timm.create_model(name, pretrained=True)


def test_a_release_begins_other_trainings():
    model = timm.create_model("vt_resnet_nano.weft_fashion", pretrained=True, in_chans=3, num_classes=5, img_size=32)
    stored = load_file(FOLDER / "vt_resnet_nano.weft_fashion" / "model.safetensors")
    assert torch.equal(
        model.state_dict()["resnet.layer1.0.conv1.weight"], stored["resnet.layer1.0.conv1.weight"].float()
    )
    assert model.head.weight.shape[0] == 5


def test_training_goes_on_from_a_release(tmp_path):
    """On colour pictures, which have other means than those the weights have seen."""
    settings = {key: value for key, value in TINY.items() if not key.startswith("model")}
    settings |= dict(model="vt_resnet_nano.weft_fashion", init="pretrained", epochs=1, lr=1e-9, run__report=False)
    weft.train(make_pictures(tmp_path / "pictures"), out=tmp_path / "run", **settings)
    trained, name = load_file(tmp_path / "run" / "model.safetensors"), "resnet.layer1.0.conv1.weight"
    stored = load_file(FOLDER / "vt_resnet_nano.weft_fashion" / "model.safetensors")
    torch.testing.assert_close(trained[name], stored[name].float(), rtol=0, atol=1e-4)
    assert len(weft.load(tmp_path / "run", "cpu").preprocessing.mean) == 3


def test_a_run_is_released_with_its_answers(run, shelf):
    """Up to the rounding of bf16; with its switch, which timm is not told."""
    own = weft.load(run, "cpu").model
    found = timm.create_model("cvt_nano.test", pretrained=True).eval()
    assert found.stages[0].blocks[0].attn.conv_proj_k.conv.stride == (1, 1)
    assert variants.released_args("cvt_nano.test")["stride_kv"] == 1
    _, (*_, last) = found.forward_intermediates(torch.zeros(1, 3, 16, 16))
    assert found.pretrained_cfg["pool_size"] == last.shape[2:]
    x = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        torch.testing.assert_close(found(x), own(x), rtol=0.05, atol=0.05)
    kinds = {weight.dtype for weight in load_file(shelf / "model.safetensors").values() if weight.ndim > 1}
    assert kinds == {torch.bfloat16}


def test_a_card_tells_no_places(run, shelf):
    card = (shelf / "README.md").read_text()
    assert str(run.parent) not in card
    assert "epochs: 3" in card
    metrics = json.loads((run / "evaluation.json").read_text())
    assert f"{metrics['top1']:.2%} of {metrics['n']:,} pictures" in card


def test_a_card_names_first_weights_and_teacher_without_their_folders(run, tmp_path):
    """Runs have them by absolute paths, as they do files of masks and classes."""
    (tmp_path / "evaluation.json").write_bytes((run / "evaluation.json").read_bytes())
    for init, teacher, expected in (
        ("/home/me/runs/first", "/home/me/runs/large", ("first", "large")),
        ("host:/home/me/resnet18.pt", "regnety_160.deit_in1k", ("host:resnet18.pt", "regnety_160.deit_in1k")),
        ("pretrained", "hf-hub:owner/name", ("pretrained", "hf-hub:owner/name")),
    ):
        data = {"source": "/home/me/data", "masks": "/home/me/masks", "classes": "/home/me/classes.txt"}
        settings = {"data": data, "model": {"init": init}, "loss": {"teacher": teacher}}
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
        text = card_of(tmp_path, "any", "made up", "none")
        assert "/home" not in text
        told = yaml.safe_load(text.split("```yaml")[1].split("```")[0])
        assert (told["model"]["init"], told["loss"]["teacher"]) == expected


def test_what_is_too_large_or_there_is_refused(run, shelf, tmp_path):
    with pytest.raises(WeftError, match="exists"):
        release(run, "test", "made up", "none", tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    for name in ("config.json", "evaluation.json", "config.yaml"):
        (other / name).write_bytes((run / name).read_bytes())
    save_file({"a": torch.zeros(1300, 1000)}, other / "model.safetensors")
    with pytest.raises(WeftError, match=r"2\.6 MB"):
        release(other, "large", "made up", "none", tmp_path)
    assert not (tmp_path / "cvt_nano.large").exists()
