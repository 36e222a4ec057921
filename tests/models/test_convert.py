"""Published weights and folders: what was converted opens again, and one clear line for everything else.

That a family computes what its published weights computed is in its own file.
"""

import json
import os
import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors.torch
import timm
import torch

import weft
from tests.conftest import randomise
from tests.helpers.published import OfficialCeiT, hugging_face_cvt
from tests.helpers.variants import NANO

PICTURE = (2, 3, 96, 96)


@pytest.fixture(scope="module")
def hf_cvt():
    torch.manual_seed(0)
    return randomise(hugging_face_cvt())


@pytest.fixture(scope="module")
def official_ceit():
    torch.manual_seed(0)
    return randomise(OfficialCeiT(192, 3, img_size=96, classes=10))


def logits(model, picture):
    with torch.no_grad():
        out = model(picture)
    return getattr(out, "logits", out)


# Converted models -----------------------------------------------------------------------------------------------


def test_converted_model_owns_its_weights(hf_cvt, official_ceit):
    for theirs, name in ((hf_cvt, "cvt_13"), (official_ceit, "ceit_tiny")):
        before = {key: value.clone() for key, value in theirs.state_dict().items()}
        model = weft.convert(theirs.state_dict(), model=name)
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.add_(1)
        assert all(torch.equal(value, before[key]) for key, value in theirs.state_dict().items())
        assert (model.pretrained_cfg["num_classes"], model.num_classes) == (10, 10)
    assert model.pretrained_cfg["input_size"] == (3, 96, 96)


def test_authors_files_are_pointed_to():
    with pytest.raises(weft.WeftError, match="weft convert FILE --model ceit_tiny"):
        timm.create_model("ceit_tiny", pretrained=True)


def test_half_precision_files_become_float32(hf_cvt):
    state = {key: value.half() if value.is_floating_point() else value for key, value in hf_cvt.state_dict().items()}
    model = weft.convert(state, model="cvt_13")
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert all(p.requires_grad for p in model.parameters())


# Folders --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("cvt_nano", dict(num_classes=3)),
        ("cvt_nano", dict(num_classes=3, in_chans=1)),
        (
            "cvt_nano",
            dict(num_classes=3, in_chans=4, stride_kv=(1, 2, (1, 2, 1, 2, 2)), projection=("conv", "avg", "linear")),
        ),
        ("ceit_nano", dict(num_classes=0, img_size=(40, 56), leff_kernel=5, lca=False, i2t_layers="k7s4")),
        ("ceit_nano", dict(num_classes=7, in_chans=2, i2t_layers="none", stem_stride=2)),
    ],
)
def test_folder_round_trip(name, args, tmp_path):
    """What `save_model` writes, timm opens with all its switches, and nothing is re-initialised."""
    model = randomise(timm.create_model(name, **args))
    weft.save_model(model, tmp_path / "m")
    assert sorted(p.name for p in (tmp_path / "m").iterdir()) == ["config.json", "model.safetensors"]
    opened = timm.create_model(f"local-dir:{tmp_path / 'm'}", pretrained=True).eval()
    picture = torch.randn(2, args.get("in_chans", 3), 40, 56)
    torch.testing.assert_close(logits(opened, picture), logits(model, picture))
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert config["architecture"] == name
    assert config["pretrained_cfg"]["input_size"][0] == args.get("in_chans", 3)


def test_converted_folder_opens_in_timm(hf_cvt, tmp_path):
    hf_cvt.save_pretrained(tmp_path / "hf")
    model = weft.convert(tmp_path / "hf", model="cvt_13")
    weft.save_model(model, tmp_path / "weft")
    opened = timm.create_model(f"local-dir:{tmp_path / 'weft'}", pretrained=True).eval()
    picture = torch.randn(PICTURE)
    torch.testing.assert_close(logits(opened, picture), logits(hf_cvt, picture), rtol=0, atol=1e-5)  # still exact GELU


def test_folder_keeps_head_and_labels(tmp_path):
    model = randomise(timm.create_model("cvt_nano"))
    model.reset_classifier(2, "avg")
    weft.save_model(model, tmp_path / "m", label_names=["cat", "dog"])
    opened = timm.create_model(f"local-dir:{tmp_path / 'm'}", pretrained=True).eval()
    picture = torch.randn(1, 3, 64, 64)
    torch.testing.assert_close(logits(opened, picture), logits(model, picture))
    assert opened.pretrained_cfg["label_names"] == ["cat", "dog"]


def test_what_cannot_be_opened_is_not_saved(tmp_path):
    model = timm.create_model("cvt_nano")
    pruned = timm.create_model("ceit_nano")
    pruned.prune_intermediate_layers([0, 1])
    features = timm.create_model("cvt_nano", features_only=True)
    for wrong, word in (
        (weft.fuse(model), "fused"),
        (pruned, "prune"),
        (features, "FeatureGetterNet"),
        (timm.create_model("resnet10t"), "ResNet"),
    ):
        with pytest.raises(weft.WeftError, match=word):
            weft.save_model(wrong, tmp_path / "m")
    assert not (tmp_path / "m").exists()


def test_saved_files_are_on_disk_before_they_get_their_names(tmp_path, monkeypatch):
    """Every file that ends up in the folder was synced, as was the folder."""
    synced = set()
    monkeypatch.setattr(os, "fsync", lambda handle: synced.add(os.fstat(handle).st_ino))
    weft.save_model(timm.create_model("cvt_nano"), tmp_path / "m")
    assert {p.stat().st_ino for p in [tmp_path / "m", *(tmp_path / "m").iterdir()]} <= synced


def test_save_model_overwrites_nothing(tmp_path):
    (tmp_path / "precious.txt").write_text("keep me")
    with pytest.raises(weft.WeftError, match="already exists"):
        weft.save_model(timm.create_model("cvt_nano"), tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["precious.txt"]


def test_overwrite_replaces_a_model_and_nothing_else(tmp_path):
    small, large = (timm.create_model("cvt_nano", num_classes=n) for n in (2, 3))
    weft.save_model(small, tmp_path / "m", label_names=["a", "b"])
    (tmp_path / "m" / "precious.txt").write_text("keep me")
    with pytest.raises(weft.WeftError, match="already exists"):
        weft.save_model(large, tmp_path / "m")
    weft.save_model(large, tmp_path / "m", overwrite=True)
    opened = timm.create_model(f"local-dir:{tmp_path / 'm'}", pretrained=True)
    assert torch.equal(opened.head.weight, large.head.weight)
    assert (tmp_path / "m" / "precious.txt").read_text() == "keep me"
    (tmp_path / "m" / "config.json").write_text('{"mine": 1}')
    with pytest.raises(weft.WeftError, match=r"config.json is damaged"):
        weft.save_model(large, tmp_path / "m", overwrite=True)
    with pytest.raises(weft.WeftError, match=r"config.json is damaged"):
        large.save_pretrained(tmp_path / "m")
    assert (tmp_path / "m" / "config.json").read_text() == '{"mine": 1}'
    with pytest.raises(weft.WeftError, match=r"precious.txt already exists"):
        weft.save_model(large, tmp_path / "m" / "precious.txt", overwrite=True)


@pytest.mark.parametrize("part", ["state", "split.json"])
def test_the_model_of_a_run_is_not_replaced(tmp_path, part):
    small, large = (timm.create_model("cvt_nano", num_classes=n) for n in (2, 3))
    weft.save_model(small, tmp_path)
    (tmp_path / "config.yaml").write_text("{}")
    (tmp_path / part).mkdir() if part == "state" else (tmp_path / part).write_text("{}")
    before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    with pytest.raises(weft.WeftError, match="is a run"):
        weft.save_model(large, tmp_path, overwrite=True)
    with pytest.raises(weft.WeftError, match="is a run"):
        large.save_pretrained(tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before


@pytest.mark.parametrize("name", NANO)
def test_every_family_has_the_hubs_methods(name, tmp_path, monkeypatch):
    """And what is uploaded is what a folder has, with a card where there was none."""
    model = timm.create_model(name, num_classes=2)
    model.save_pretrained(tmp_path / "m")
    model.save_pretrained(tmp_path / "m", label_names=["a", "b"])  # again, as elsewhere
    opened = timm.create_model(f"local-dir:{tmp_path / 'm'}", pretrained=True)
    assert all(
        torch.equal(a, b) for a, b in zip(opened.state_dict().values(), model.state_dict().values(), strict=True)
    )
    uploaded = {}

    class FakeHub:
        def __init__(self, **options):
            assert options["token"] == "secret"

        def create_repo(self, repo_id, private, exist_ok):
            assert (private, exist_ok) == (True, True)
            return SimpleNamespace(repo_id=f"me/{repo_id}")

        def file_exists(self, repo_id, filename, revision):
            return False

        def upload_folder(self, repo_id, folder_path, **options):
            uploaded.update({path.name: path.read_bytes() for path in Path(folder_path).iterdir()}, **options)

    monkeypatch.setattr("huggingface_hub.HfApi", FakeHub)
    where = model.push_to_hub("mine", ["a", "b"], token="secret", private=True, commit_message="First")
    assert where == "https://huggingface.co/me/mine"
    assert uploaded["commit_message"] == "First"
    assert b'timm.create_model("hf-hub:me/mine", pretrained=True)' in uploaded["README.md"]
    for file in ("config.json", "model.safetensors"):
        assert uploaded[file] == (tmp_path / "m" / file).read_bytes()


# Plain state dicts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*NANO, "t2t_vit_7", "pvt_tiny"])
def test_a_plain_state_dict_becomes_a_folder(name, tmp_path, command):
    args = dict(num_classes=4, in_chans=1)
    model = randomise(timm.create_model(name, **args))
    torch.save(model.state_dict(), tmp_path / "plain.pt")
    code, _, err = command("convert", tmp_path / "plain.pt", "--model", name, "--out", tmp_path / "out")
    assert code == 0, err
    opened = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True).eval()
    x = torch.randn(1, args["in_chans"], *model.pretrained_cfg["input_size"][1:])
    assert torch.equal(opened(x), model(x))  # none of it is random in evaluation


def test_plain_state_dicts_of_other_sizes():
    """The size of pictures is read off the positions; another model is named where the weights fit one."""
    converted = weft.convert(timm.create_model("ceit_nano", img_size=64, num_classes=3).state_dict(), "ceit_nano")
    assert converted.pretrained_cfg["input_size"] == (3, 64, 64)
    message = refuse(timm.create_model("cvt_nano").state_dict(), model="cvt_13")
    assert "does not fit cvt_13" in message or "matches none" in message
    assert "that of cvt_13 itself" in refuse(timm.create_model("resnet10t").state_dict(), model="cvt_13")


def test_interrupted_save_leaves_no_config(tmp_path, monkeypatch):
    """config.json comes last, so its presence means the folder is complete; no temporary file stays."""
    monkeypatch.setattr(
        "weft.models.weights.folder.save_config_for_hf", lambda *a, **k: (_ for _ in ()).throw(OSError("disk full"))
    )
    with pytest.raises(OSError, match="disk full"):
        weft.save_model(timm.create_model("cvt_nano"), tmp_path / "m")
    assert [p.name for p in (tmp_path / "m").iterdir()] == ["model.safetensors"]


# Wrong files ----------------------------------------------------------------------------------------------------


class Bomb:
    """A pickle that would create a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return (os.system, (f"touch {self.path}",))


def refuse(source, model="cvt_13", **kwargs) -> str:
    with pytest.raises(weft.WeftError) as error:
        weft.convert(source, model=model, **kwargs)
    message = str(error.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("legacy", [False, True])
def test_code_in_a_pickle_never_runs(legacy, tmp_path):
    path, trace = tmp_path / "evil.pth", tmp_path / "trace"
    torch.save({"model": Bomb(trace)}, path, _use_new_zipfile_serialization=not legacy)
    message = refuse(path)
    assert "evil.pth" in message
    assert "posix.system" in message
    assert not trace.exists()


def test_code_in_a_bare_pickle_never_runs(tmp_path):
    path, trace = tmp_path / "evil.bin", tmp_path / "trace"
    path.write_bytes(pickle.dumps(Bomb(trace)))
    assert "evil.bin" in refuse(path)
    assert not trace.exists()


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize("damage", ["truncated", "empty", "text", "flipped header"])
def test_damaged_files(hf_cvt, suffix, damage, tmp_path):
    path = tmp_path / f"weights{suffix}"
    state = {"classifier.weight": torch.randn(10, 384)}
    if suffix == ".pth":
        torch.save(state, path)
    else:
        safetensors.torch.save_file(state, path)
    content = path.read_bytes()
    path.write_bytes(
        {
            "truncated": content[: len(content) // 2],
            "empty": b"",
            "text": b"not a checkpoint at all",
            "flipped header": b"\xff" * 8 + content[8:],
        }[damage]
    )
    message = refuse(path)
    assert path.name in message
    assert "expected safetensors or a torch file" in message


@pytest.mark.parametrize("legacy", [False, True])
def test_a_file_cut_anywhere(legacy, tmp_path):
    """Wherever a checkpoint ends too early, or has a wrong byte, the answer is one line."""
    whole, path = tmp_path / "whole.pth", tmp_path / "cut.pth"
    torch.save({"a": torch.zeros(3), "b": torch.zeros(2)}, whole, _use_new_zipfile_serialization=not legacy)
    content = whole.read_bytes()
    for position in range(0, len(content), max(1, len(content) // 150)):
        path.write_bytes(content[:position])
        refuse(path)
        path.write_bytes(content[:position] + b"\xff" + content[position + 1 :])
        refuse(path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("head.weight", torch.tensor(1.0)),
        ("head.weight", torch.zeros(10, 192, dtype=torch.int64)),
        ("head.weight", torch.zeros(10, 192, dtype=torch.complex64)),
        ("head.weight", torch.zeros(10, 192).to_sparse()),
        ("head.weight", torch.zeros(10, 192, device="meta")),
        ("pos_embed", torch.zeros(192)),
        ("pos_embed", torch.zeros(1, 0, 192)),
        ("pos_embed", torch.zeros(1, 6, 192)),
        ("i2t.backbone.conv.weight", torch.zeros(64)),
        ("lca.attn.qkv.weight", torch.tensor(0.0)),
        (7, torch.zeros(1)),
    ],
)
def test_tensors_of_the_wrong_kind(official_ceit, key, value):
    message = refuse({**official_ceit.state_dict(), key: value}, model="ceit_tiny")
    assert message.startswith("the state dict") or "pos_embed" in message


def test_missing_files_and_empty_folders(tmp_path):
    assert "does not exist" in refuse(tmp_path / "nowhere.pth")
    assert "model.safetensors or pytorch_model.bin" in refuse(tmp_path)


def test_other_content(official_ceit, hf_cvt, tmp_path):
    """What was expected and what was found, and what the file would fit."""
    torch.save([1, 2, 3], tmp_path / "list.pth")
    assert "found list" in refuse(tmp_path / "list.pth")
    assert "conv1.weight" in refuse({"conv1.weight": torch.zeros(64, 3, 7, 7)})
    message = refuse(official_ceit.state_dict(), model="cvt_13")
    assert "official CeiT" in message
    assert "ceit_tiny" in message
    assert "cvt_13.bogus" in refuse(hf_cvt.state_dict(), model="cvt_13.bogus")
    message = refuse(hf_cvt.state_dict(), model="cvt_21")
    assert "stages.1.blocks.2" in message
    assert "fit cvt_13" in message
    message = refuse(hf_cvt.state_dict(), num_classes=1000)
    assert "has 10 classes" in message
    assert "expected 1000" in message
    headless = {k: v for k, v in hf_cvt.state_dict().items() if not k.startswith("classifier")}
    assert "no classifier" in refuse(headless)
    torn = {**hf_cvt.state_dict(), "classifier.bias": torch.zeros(9)}
    assert "expected head.bias (10,), found (9,)" in refuse(torn)


def test_there_is_one_torch_load_and_it_is_safe():
    sources = {p: p.read_text() for p in Path(weft.__file__).parent.rglob("*.py")}
    calls = [(p.name, line) for p, text in sources.items() for line in text.splitlines() if "torch.load(" in line]
    assert [name for name, _ in calls] == ["convert.py"]
    assert "weights_only=True" in calls[0][1]
    assert not any("pickle.load" in text or "weights_only=False" in text for text in sources.values())
