"""Weights to start from, by a word: `host` and `pretrained`, from files and from the cache."""

import http.server
import threading
import time
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
import safetensors.torch
import timm
import torch

import weft
from tests.helpers.small_runs import command, make_pictures, refused, tiny_run
from weft import WeftError
from weft.config import Config, override, read_yaml
from weft.engine.log import read_rows
from weft.models.weights.release import released_folder
from weft.run.build import make_model
from weft.run.choose import read_preprocessing
from weft.run.data import absolute
from weft.run.initial import cached_weights, create_pretrained, host_weights, model_for

RESNET = dict(depths=(1, 1, 1), widths=(8, 16, 32))


def made(**settings):
    names = {key.replace("__", "."): value for key, value in settings.items()}
    config = override(Config(), {"data.task": "classify", "data.channels": 3, **names})
    return make_model(config, classes=["a", "b"], size=(32, 32))


@pytest.fixture
def resnet(tmp_path) -> Path:
    """A file of weights as torchvision and timm name those of a ResNet-18."""
    torch.manual_seed(1)
    file = tmp_path / "resnet.safetensors"
    safetensors.torch.save_file(timm.create_model("resnet18", num_classes=7).state_dict(), file)
    return file


def test_a_hybrid_begins_with_the_weights_of_its_host(resnet):
    found = made(model__name="vt_resnet18", model__init=f"host:{resnet}")
    state, host = found.model.state_dict(), safetensors.torch.load_file(resnet)
    shared = {key: value for key, value in host.items() if key.split(".")[0] in ("conv1", "bn1", "layer1", "layer3")}
    assert len(shared) > 30
    assert all(torch.equal(state[f"resnet.{key}"], value) for key, value in shared.items())
    assert "new" in found.changed[0]


@pytest.mark.parametrize("task", ["segment", "detect"])
def test_a_backbone_begins_with_the_weights_of_its_host(resnet, task):
    head = {"segment": "fpn", "detect": "faster-rcnn"}[task]
    made_dense = made(
        augment__img_size=64, data__task=task, model__name="vt_resnet18", model__head=head, model__init=f"host:{resnet}"
    )
    state, host = made_dense.model.state_dict(), safetensors.torch.load_file(resnet)
    key = next(key for key in state if key.endswith("resnet.layer1.0.conv1.weight"))
    assert torch.equal(state[key], host["layer1.0.conv1.weight"])


def test_a_run_from_a_host_can_be_resumed_without_it(resnet, tmp_path):
    """Trained with the file, resumed without: the state has the weights, config.yaml the strides."""
    pictures = make_pictures(tmp_path / "pictures", side=32)
    settings = dict(model="vt_resnet18", model__args={}, img_size=32, init=f"host:{resnet}", recipe="quick")
    run = tiny_run(pictures, tmp_path / "run", **{**settings, "epochs": 1}).folder
    resnet.unlink()
    weft.train(resume=run, epochs=2, allow_changes=True, quiet=True)
    assert [row["epoch"] for row in read_rows(run / "metrics.jsonl") if row["kind"] == "epoch"] == [1, 2]


@pytest.mark.parametrize(
    ("init", "model", "settings"),
    [
        ("pretrained", "auto", {"model.name": "cvt_13"}),
        ("host", "auto", {"model.name": "vt_resnet18"}),
        ("host", "vt_resnet50", {"model.args.bottleneck_stride": "3x3"}),
        ("host:resnet101", "vt_resnet101", {"model.args.bottleneck_stride": "3x3"}),
        ("host:FILE", "vt_resnet50", {}),  # whose strides are those of the model, or are told
        ("pretrained", "ceit_tiny", {}),
        ("", "auto", {}),
        ("vt_resnet_nano.weft_cifar10", "auto", {"model.name": "vt_resnet_nano"}),
        ("vt_resnet_nano.weft_cifar10", "vt_resnet_nano", {}),
    ],
)
def test_words_choose_a_model_that_has_weights(init, model, settings, resnet):
    assert model_for(init.replace("FILE", str(resnet)), model) == settings


def test_weights_that_come_with_weft_are_found_by_name():
    stored = safetensors.torch.load_file(released_folder("vt_resnet_nano.weft_cifar10") / "model.safetensors")
    found = made(model__name="vt_resnet_nano", model__init="vt_resnet_nano.weft_cifar10").model.state_dict()
    assert all(torch.equal(found[key], value.float()) for key, value in stored.items() if not key.startswith("head."))
    assert "head.weight" in stored
    dense = made(
        data__task="segment", augment__img_size=64, model__head="fpn", model__name="vt_resnet_nano",
        model__init="vt_resnet_nano.weft_cifar10",
    )  # fmt: skip
    state = dense.model.state_dict()
    key = next(key for key in state if key.endswith("resnet.layer1.0.conv1.weight"))
    assert torch.equal(state[key], stored["resnet.layer1.0.conv1.weight"].float())


NAMED = "vt_resnet_nano.weft_cifar10"
NOBODY_SAID = dict(recipe="auto", epochs=1, batch=0, model="vt_resnet_nano", device="cpu", run__report=False)


@pytest.mark.parametrize(
    ("said", "begins"),
    [
        ({}, NAMED),
        ({"init": "scratch"}, ""),
        ({"config": "model: {init: scratch}"}, ""),
        ({"model__args": {"num_tokens": 8}}, ""),
        ({"model__args": {"stem_stride": 2}}, NAMED),
        ({"model__args__stem_stride": 2}, NAMED),
        ({"recipe": "quick"}, ""),
    ],
    ids=str,
)
def test_a_run_begins_with_them_where_nobody_says_otherwise(tmp_path, capsys, said, begins):
    pictures = make_pictures(tmp_path / "pictures", side=32, each=5)
    if "config" in said:
        (tmp_path / "mine.yaml").write_text(said["config"])
        said = {"config": tmp_path / "mine.yaml"}
    weft.train(pictures, out=tmp_path / "run", **{**NOBODY_SAID, **said})
    assert read_yaml(tmp_path / "run" / "config.yaml")["model.init"] == begins
    assert (f"begins with {NAMED}, which comes with Weft" in capsys.readouterr().out) == bool(begins)


def test_pictures_are_normalised_as_those_of_the_weights_only_where_they_are_alike(tmp_path):
    """Photographs of 8 bits have the deviations of the weights, other channels and deeper values their own."""
    own = {}
    for name, kind in (("colour", np.uint8), ("deep", np.float32)):
        for label in range(2):
            (tmp_path / name / str(label)).mkdir(parents=True)
            for number in range(4):
                values = np.random.default_rng(number).uniform(0, 250, (32, 32, 3)).astype(kind)
                np.save(tmp_path / name / str(label) / f"{number}.npy", values)
        run = tmp_path / f"run-{name}"
        weft.train(tmp_path / name, out=run, **NOBODY_SAID)
        assert read_yaml(run / "config.yaml")["model.init"] == NAMED
        found = read_preprocessing(str(run))
        assert found is not None
        own[name] = found.mean
    assert own["colour"] == read_preprocessing(str(released_folder(NAMED))).mean
    assert min(own["deep"]) > 50


@pytest.mark.parametrize(
    ("init", "meant"),
    [("vt_resnet_nano.weft_cifar1", "vt_resnet_nano.weft_cifar10"), ("pretraind", "pretrained"), ("scrach", "scratch")],
)
def test_misspelt_weights_are_refused_at_once(tmp_path, init, meant):
    """Before a word is said on the pictures."""
    answer = command("train", make_pictures(tmp_path / "pictures", each=2), "--init", init)
    refused(answer, f"--init {init}", f"Did you mean '{meant}'?")
    assert "classes" not in answer[1]


def test_what_has_no_host_is_told():
    with pytest.raises(WeftError, match=r"ceit_tiny; name them with --init host:FILE"):
        host_weights("host", "ceit_tiny")
    with pytest.raises(WeftError, match="neither a file nor a model"):
        host_weights("host:resnet_of_mine", "vt_resnet18")


def in_cache(monkeypatch, folder: Path, repository: str, name: str) -> Path:
    """Weights of `name` where an earlier download would have left them, and no way to any other place."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr("weft.run.initial.try_to_load_from_cache", _looking_in(folder))
    monkeypatch.setattr("socket.socket", None)
    snapshot = folder / f"models--{repository.replace('/', '--')}" / "snapshots" / "abc"
    (snapshot.parents[1] / "refs").mkdir(parents=True)
    (snapshot.parents[1] / "refs" / "main").write_text("abc")
    snapshot.mkdir(parents=True)
    torch.manual_seed(2)
    safetensors.torch.save_file(timm.create_model(name).state_dict(), snapshot / "model.safetensors")
    return snapshot / "model.safetensors"


def _looking_in(folder: Path):
    return lambda repository, file: huggingface_hub.try_to_load_from_cache(repository, file, cache_dir=folder)


@pytest.mark.parametrize(
    ("name", "repository"), [("resnet18.a1_in1k", "timm/resnet18.a1_in1k"), ("cvt_13.msft_in1k", "microsoft/cvt-13")]
)
def test_weights_in_the_cache_need_no_network(monkeypatch, tmp_path, name, repository):
    assert cached_weights(name.split(".")[0]) is None or "a1" not in name
    file = in_cache(monkeypatch, tmp_path, repository, name.split(".")[0])
    assert cached_weights(name) == file
    if name.startswith("resnet"):
        state = create_pretrained(name, num_classes=3).state_dict()
        assert torch.equal(state["layer1.0.conv1.weight"], safetensors.torch.load_file(file)["layer1.0.conv1.weight"])
        host = host_weights("host", "vt_resnet18")
        assert torch.equal(host["conv1.weight"], safetensors.torch.load_file(file)["conv1.weight"])


def test_embedded_data_beside_a_folder_of_their_name(monkeypatch, tmp_path):
    (tmp_path / "nuclei").mkdir()
    monkeypatch.chdir(tmp_path)
    assert absolute("demo:nuclei") == "demo:nuclei"
    assert absolute("nuclei") == str(tmp_path / "nuclei")
    assert absolute("host:nuclei") == f"host:{tmp_path / 'nuclei'}"


class Silent(http.server.BaseHTTPRequestHandler):
    """A hub that takes a minute to answer."""

    def do_HEAD(self):
        time.sleep(60)


@pytest.fixture
def silent_hub():
    """The address of a server that never answers."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Silent) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("place", ["closed", "silent"])
def test_without_a_network_one_line_comes_soon_and_no_folder_stays(monkeypatch, silent_hub, tmp_path, place):
    """No retries, whether the hub refuses or says nothing."""
    monkeypatch.setattr("weft.run.initial.try_to_load_from_cache", _looking_in(tmp_path / "cache"))
    address = silent_hub if place == "silent" else "http://127.0.0.1:9"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
    monkeypatch.setattr("weft.run.initial.ANSWER_SECONDS", 0.5)
    out, began = tmp_path / "run", time.monotonic()
    data = make_pictures(tmp_path / "pictures")
    answer = command("train", data, "--init", "pretrained", "--epochs", 1, "--device", "cpu", "--out", out)
    refused(answer, "No pretrained weights of cvt_13", "127.0.0.1 does not answer", "name a file or a folder")
    assert time.monotonic() - began < 20
    assert not out.exists()
