"""Opening what was trained; predicting and evaluating agree with validation; one line for everything that is wrong."""

import csv
import io
import json
import os
import shutil

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import weft
from tests.conftest import randomise
from tests.helpers.small_runs import CVT, make_pictures, tiny_run
from weft.config import Config, override, to_yaml
from weft.data.loader import eval_batches
from weft.data.preprocessing import Preprocessing
from weft.data.sources.open import open_source
from weft.data.split import load_split, make_split, save_split
from weft.errors import WeftError
from weft.models.weights.folder import write_model
from weft.run.evaluate import evaluate, find_pictures
from weft.tasks.classify.metrics import ClassifyMeter
from weft.tasks.classify.task import EVAL_BATCH

PREPROCESSING = Preprocessing((28, 28), 1, 8, (0.3,), (0.35,), "bicubic", 1.0, "center", 10**6)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of an untrained run on the embedded pictures."""
    folder = tmp_path_factory.mktemp("run")
    source = open_source("demo:fashion")
    torch.manual_seed(0)
    model = randomise(timm.create_model("cvt_nano", num_classes=10, in_chans=1))
    write_model(model, folder, classes=source.classes, preprocessing=PREPROCESSING.to_dict(), multilabel=False)
    config = override(Config(), {"data.source": "demo:fashion"})
    save_split(make_split(source, config.data, seed=0), source, folder / "split.json")
    (folder / "config.yaml").write_text(to_yaml(config))
    return folder


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Files of all kinds: class folders with four pictures, a damaged one, a text and a hidden folder."""
    root = tmp_path_factory.mktemp("pictures")
    source = open_source("demo:fashion")
    for i in range(4):
        file = root / source.classes[source.labels[i]].replace("/", "-") / f"ä {i}.png"
        file.parent.mkdir(exist_ok=True)
        Image.fromarray(source.open(i)).save(file)
    (root / "broken.JPG").write_bytes(b"no picture")
    (root / "notes.txt").write_text("no picture either")
    (root / ".thumbs").mkdir()
    shutil.copy(file, root / ".thumbs" / "small.png")
    return root


# Agreement --------------------------------------------------------------------------------------------------------


def test_validation_evaluation_and_prediction_agree_to_the_last_digit(run):
    """Validation as the training loop does it, `evaluate` with worker processes, and `predict` on the same pictures."""
    predictor = weft.load(run)
    source, indices, what = find_pictures(run)
    assert what == "1,000 validation pictures of demo:fashion, by the run's own split"
    indices = indices[:300]  # in three batches
    model = timm.create_model(f"local-dir:{run}", pretrained=True).eval()
    meter = ClassifyMeter(10)
    with torch.no_grad():
        for batch in eval_batches(source, PREPROCESSING, indices, batch=EVAL_BATCH, workers=0, pin=False):
            meter.add(model(PREPROCESSING.normalise(batch.pictures)), batch.labels)
    evaluation = evaluate(predictor, source, indices, workers=1)
    metrics = evaluation.metrics()
    assert meter.result() == {key: metrics[key] for key in meter.result()}
    assert evaluation.names == [source.names[i] for i in indices]

    predictions = predictor.predict([source.open(i) for i in indices], top=10)
    first = [p.labels[0] for p in predictions]
    labels = [source.classes[i] for i in source.labels[indices]]
    assert np.mean([a == b for a, b in zip(first, labels, strict=True)]) == metrics["top1"]
    each = torch.from_numpy(evaluation.logits).double().softmax(dim=1).sort(dim=1, descending=True, stable=True)[0]
    assert [p.probabilities for p in predictions] == each.tolist()


def test_eval_prints_one_json_object_and_nothing_else(run, command):
    _, out, err = command("eval", run, "--json", "--split", "val")
    metrics = json.loads(out)
    assert (out.count("\n"), err) == (1, "")
    assert metrics["n"] == sum(row["n"] for row in metrics["per_class"]) == sum(map(sum, metrics["confusion"])) == 1000
    _, out, err = command("eval", run, "demo:fashion")  # the run's own data, so its own split
    what = "1,000 validation pictures of demo:fashion, by the run's own split"
    lines = evaluate(weft.load(run), *find_pictures(run)[:2]).lines(metrics)
    assert (out.splitlines(), err) == ([what, *"\n".join(lines).splitlines()], "")
    assert "Most confused: " in out


# What is evaluated ------------------------------------------------------------------------------------------------


def test_own_split_is_the_stored_one(run):
    source, indices, _ = find_pictures(run)
    np.testing.assert_array_equal(indices, load_split(run / "split.json", source).val)
    assert len(find_pictures(run, split="all")[1]) == 7000
    np.testing.assert_array_equal(find_pictures(run, split="train")[1], load_split(run / "split.json", source).train)
    with pytest.raises(WeftError, match="no test pictures; choose --split train or val or all"):
        find_pictures(run, split="test")
    with pytest.raises(WeftError, match="choose from 'train', 'val', 'test', 'all'"):
        find_pictures(run, split="valid")


def test_classes_of_other_data_are_matched_by_name(run, tmp_path):
    source = open_source("demo:fashion")
    for name in ("Bag", "Ankle boot", "Coat"):  # in another order, and not all of them
        for i in np.flatnonzero(source.labels == source.classes.index(name))[:2]:
            (tmp_path / name).mkdir(exist_ok=True)
            Image.fromarray(source.open(i)).save(tmp_path / name / f"{i}.png")
    other, indices, what = find_pictures(run, str(tmp_path))
    assert what == f"6 pictures of {tmp_path}"
    evaluation = evaluate(weft.load(run), other, indices)
    assert evaluation.classes == source.classes
    for name, label in zip(evaluation.names, evaluation.labels, strict=True):
        assert name.startswith(source.classes[label])
    (tmp_path / "Coat").rename(tmp_path / "Coats")
    with pytest.raises(WeftError, match=r"'Coats'.*Did you mean 'Coat'"):
        evaluate(weft.load(run), *find_pictures(run, str(tmp_path))[:2])


def test_unreadable_pictures_are_left_out(run, command, tmp_path):
    for name in ("Bag", "Coat"):
        (tmp_path / name).mkdir()
        Image.new("L", (28, 28)).save(tmp_path / name / "a.png")
    (tmp_path / "Bag" / "b.png").write_bytes(b"broken")
    _, out, _ = command("eval", run, tmp_path)
    assert out.startswith(f"3 pictures of {tmp_path}; 1 cannot be read\n")
    (tmp_path / "Bag" / "a.png").unlink()
    (tmp_path / "Coat" / "a.png").write_bytes(b"broken")
    code, _, err = command("eval", run, tmp_path)
    assert (code, err) == (2, f"weft: {tmp_path}: none of the 2 pictures to evaluate can be read.\n")


def test_models_without_class_names_are_matched_by_position(tmp_path):
    weft.save_model(timm.create_model("cvt_nano", num_classes=10, in_chans=1, img_size=28), tmp_path)
    predictor = weft.load(tmp_path)
    assert predictor.classes == [str(i) for i in range(10)]
    assert predictor.preprocessing.size == (28, 28)
    source = open_source("demo:fashion")
    evaluation = evaluate(predictor, source, np.arange(5))
    np.testing.assert_array_equal(evaluation.labels, source.labels[:5])
    with pytest.raises(WeftError, match="no data of its own"):
        find_pictures(tmp_path)


def test_any_valid_label_counts(run):
    source = open_source("demo:fashion")
    source.valid = np.ones((len(source), 10), bool)
    assert evaluate(weft.load(run), source, np.arange(20)).metrics()["top1"] == 1


# Predicting -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("least", "wanted", "fast"), [(4, True, True), (5, True, False), (4, False, False)])
def test_many_pictures_are_worth_compiling_kernels(run, monkeypatch, tmp_path, least, wanted, fast):
    """Unless the run was trained without them."""
    from weft.run import predictor as predictor_module

    run = shutil.copytree(run, tmp_path / "run")
    settings = (run / "config.yaml").read_text()
    assert "  fast: true" in settings
    (run / "config.yaml").write_text(settings.replace("  fast: true", f"  fast: {str(wanted).lower()}"))

    seen = []
    monkeypatch.setattr(predictor_module, "WORTH_COMPILING", least)
    monkeypatch.setattr(predictor_module, "fast_on", lambda model, device: seen.append((model, device.type)))
    predictor = weft.load(run, device="cpu")
    source = open_source("demo:fashion")
    predictor.predict([source.open(i) for i in range(4)])
    evaluate(predictor, source, np.arange(4))
    assert seen == [(predictor.model, "cpu")] * 2 * fast


@pytest.mark.parametrize("wanted", [True, False])
def test_a_copy_for_inference_on_a_cpu_is_fused_unless_the_run_was_trained_plainly(run, tmp_path, wanted):
    """It answers alike, and the model stays what it was."""
    run = shutil.copytree(run, tmp_path / "run")
    settings = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(settings.replace("  fast: true", f"  fast: {str(wanted).lower()}"))
    plain = weft.load(run, device="cpu")
    before = {name: value.clone() for name, value in plain.model.state_dict().items()}
    quick = plain.for_inference()
    assert getattr(quick.model, "fused", False) == wanted
    assert (quick.model is plain.model) != wanted
    source = open_source("demo:fashion")
    pictures = torch.stack([plain.preprocessing.picture(source.open(i)) for i in range(4)])
    for answer, expected in zip(quick.answers(pictures), plain.answers(pictures), strict=True):
        torch.testing.assert_close(answer.softmax(0), expected.softmax(0), atol=1e-5, rtol=0)
    for name, value in plain.model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_pictures_come_as_files_folders_patterns_images_and_arrays(run, pictures):
    predictor = weft.load(run)
    files = sorted(pictures.rglob("ä *.png"), key=lambda p: p.name)[:2]
    images = [Image.open(file) for file in files]
    arrays = [np.asarray(image) for image in images]
    expected = [(p.labels, p.probabilities) for p in predictor.predict(arrays)]
    for given in (files, [str(file) for file in files], images):
        assert [(p.labels, p.probabilities) for p in predictor.predict(given)] == expected
    assert [p.name for p in predictor.predict(arrays)] == ["picture 0", "picture 1"]
    assert predictor.predict(arrays[0], top=2)[0].labels == expected[0][0][:2]
    found = [os.path.basename(p.name) for p in predictor.predict(pictures)]
    assert sorted(found) == ["broken.JPG", *(f"ä {i}.png" for i in range(4))]
    assert [p.name for p in predictor.predict(str(pictures / "**" / "ä 1.*"))] == [str(files[1])]


def test_bad_pictures_have_an_error_and_stop_nobody(run, pictures, tmp_path):
    wanted = [pictures / "broken.JPG", pictures / "missing.png", tmp_path, next(pictures.rglob("ä 0.png"))]
    *bad, good = weft.load(run).predict(wanted)
    assert [p.labels for p in bad] == [[], [], []]
    assert "not a picture" in bad[0].error
    assert [p.error for p in bad[1:]] == ["no such file or folder", "a folder without pictures"]
    assert (good.error, len(good.labels)) == ("", 5)


def test_several_labels_have_probabilities_of_their_own(run, tmp_path):
    model = timm.create_model(f"local-dir:{run}", pretrained=True).eval()
    classes = [f"c{i}" for i in range(10)]
    write_model(model, tmp_path, classes=classes, preprocessing=PREPROCESSING.to_dict(), multilabel=True)
    predictor, source = weft.load(tmp_path), open_source("demo:fashion")
    (prediction,) = predictor.predict(source.open(0), top=10)
    x = PREPROCESSING.normalise(PREPROCESSING.picture(source.open(0))[None])
    expected = model(x)[0].double().sigmoid().sort(descending=True).values
    np.testing.assert_allclose(prediction.probabilities, expected.detach())


def test_predict_writes_a_table_csv_and_json(run, command, pictures, tmp_path):
    code, out, err = command(
        "predict", run, pictures, "--top", 2, "--csv", tmp_path / "p.csv", "--json", tmp_path / "p"
    )
    assert (code, err) == (1, "")  # one is unreadable
    assert out.endswith("5 pictures, 1 unreadable.\n")
    _, table, _ = command("predict", run, pictures)
    assert len(table.splitlines()) == 5
    assert "cannot be read: not a picture" in table
    found = json.loads((tmp_path / "p").read_text())
    assert [sorted(p) for p in found] == [["error", "labels", "name", "probabilities"]] * 5
    rows = list(csv.DictReader(io.StringIO((tmp_path / "p.csv").read_text())))
    assert [row["name"] for row in rows] == [p["name"] for p in found]
    for row, p in zip(rows, found, strict=True):
        labels = [row["label_1"], row["label_2"]] if p["labels"] else []
        assert (labels, row["error"]) == (p["labels"], p["error"])


def test_predict_on_standard_output_is_json_alone(run, command, pictures):
    _, out, err = command("predict", run, pictures, "--json", "-")
    assert len(json.loads(out)) == 5
    assert err == ""


TABLES = {
    "header.csv": "label,path\nx,{}\nx,{}\n",
    "windows.tsv": "File\tnote\r\n{}\tx\r\n{}\ty\r\n",
    "list.txt": "{}\n\n{}\n",
}


@pytest.mark.parametrize("table", TABLES)
def test_predict_takes_a_table_of_paths(run, command, pictures, tmp_path, monkeypatch, table):
    """Paths count from the table, or from here, in the order of the table."""
    names = sorted(path.relative_to(pictures).as_posix() for path in pictures.glob("*/ä*.png"))[:2][::-1]
    shutil.copytree(pictures, tmp_path / "data" / "img")
    (tmp_path / "data" / table).write_text(TABLES[table].format(*(f"img/{name}" for name in names)))
    _, expected, _ = command("predict", run, *(pictures / name for name in names), "--json", "-")
    for folder, there in ((tmp_path, tmp_path / "data" / table), (tmp_path / "data", tmp_path / table)):
        if not there.exists():
            shutil.move(tmp_path / "data" / table, there)
        monkeypatch.chdir(folder)
        code, out, err = command("predict", run, there, "--json", "-")
        assert code == 0, err
        found = json.loads(out)
        assert all(row["name"].endswith(name) for row, name in zip(found, names, strict=True))
        assert [row["labels"] for row in found] == [row["labels"] for row in json.loads(expected)]


def test_predict_says_what_is_wrong_with_a_table(run, command, tmp_path):
    (tmp_path / "a.csv").write_text("size,label\n3,x\n")
    code, _, err = command("predict", run, tmp_path / "a.csv")
    assert (code, "none of which is called path" in err) == (2, True)
    (tmp_path / "a.csv").write_text("path\nnowhere.png\n")
    code, out, _ = command("predict", run, tmp_path / "a.csv", "--json", "-")
    assert (code, json.loads(out)[0]["name"]) == (1, str(tmp_path / "nowhere.png"))


def test_predict_fails_where_everything_does(run, command, pictures):
    code, out, _ = command("predict", run, pictures / "broken.JPG", pictures / "none*")
    assert code == 1
    assert "no such file or folder" in out
    assert command("predict", run)[::2] == (
        2,
        "weft: No pictures given; name files, folders or patterns.\n",
    )


# Opening ----------------------------------------------------------------------------------------------------------


def break_weights(folder, change):
    data = bytearray((folder / "model.safetensors").read_bytes())
    (folder / "model.safetensors").write_bytes(change(data))


def change_config(folder, **entries):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | entries))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (shutil.rmtree, "does not exist; give a run or model folder"),
        (lambda f: (f / "model.safetensors").unlink(), "no trained model: model.safetensors missing"),
        (lambda f: [p.unlink() for p in f.iterdir()], "no trained model: config.json and model.safetensors missing"),
        (lambda f: break_weights(f, lambda d: d[: len(d) // 2]), "model.safetensors is truncated"),
        (lambda f: break_weights(f, lambda d: b""), "model.safetensors is truncated"),
        (lambda f: break_weights(f, lambda d: b"\xff" * 8 + d[8:]), "model.safetensors is truncated"),
        (lambda f: (f / "config.json").write_text("{"), "config.json is damaged"),
        (lambda f: (f / "config.json").write_text("[]"), "config.json is damaged"),
        (lambda f: change_config(f, architecture="cvt_nine"), "there is no model 'cvt_nine'"),
        (lambda f: change_config(f, architecture="ceit_nano"), "tensors differ"),
        (lambda f: change_config(f, label_names=["a", "b"]), "2 label_names for 10 classes"),
        (
            lambda f: change_config(
                f, num_classes=2, label_names=["a", "b"], model_args=dict(num_classes=2, in_chans=1)
            ),
            r"2 classes\): 2 tensors differ, such as head.bias: expected \(2,\), found \(10,\)",
        ),
    ],
)
def test_what_cannot_be_opened_is_told_in_one_line(run, tmp_path, change, words):
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    change(folder)
    with pytest.raises(WeftError, match=words) as error:
        weft.load(folder)
    assert "\n" not in str(error.value)


def test_run_is_computed_as_it_was_validated(run, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    for precision, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float32), ("auto", torch.float32)):
        config = override(Config(), {"run.precision": precision, "run.channels_last": True})
        (folder / "config.yaml").write_text(to_yaml(config))
        predictor = weft.load(folder, device="cpu")
        assert predictor.dtype == dtype
    weights = [p for p in predictor.model.parameters() if p.ndim == 4 and min(p.shape[1:]) > 1]
    assert all(p.is_contiguous(memory_format=torch.channels_last) for p in weights)


def test_mirrored_pictures_count_as_much(tmp_path, command):
    """`test.flip`: the mean of the logits of both, in training's validation, `weft eval`, and wherever the run goes."""
    data = make_pictures(tmp_path / "data", side=24)
    run = tiny_run(data, tmp_path / "run", img_size=24, test__flip=True, augment__flip=0.0).folder
    trained = weft.load(run)
    once = weft.load(run, settings={"test.flip": False})
    picture = np.asarray(Image.open(data / "class 1" / "3.png"))
    seen = torch.stack([trained.preprocessing.picture(Image.fromarray(p)) for p in (picture, picture[:, ::-1])])
    alone = once.infer(seen)
    torch.testing.assert_close(trained.infer(seen[:1]), alone.mean(0, keepdim=True))
    assert not torch.allclose(alone[0], alone[1])
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = [row for row in rows if row["kind"] == "epoch"][-1]
    source, indices, _ = find_pictures(run)
    assert evaluate(trained, source, indices).metrics()["loss"] == pytest.approx(last["val_loss"])
    for name in ("model.safetensors", "config.json"):
        (tmp_path / "folder").mkdir(exist_ok=True)
        shutil.copy(run / name, tmp_path / "folder")
    torch.testing.assert_close(weft.load(tmp_path / "folder").infer(seen), trained.infer(seen))
    said = json.loads(command("eval", run, "--json", "--flip")[1])
    assert said["notes"] == ["Used with test.flip True."]
    assert said["loss"] == pytest.approx(last["val_loss"])


def test_answers_that_are_no_numbers_measure_nothing(tmp_path, command):
    """Weights that are numbers, and far too large: 0 % would be said of a model that never answered."""
    data = make_pictures(tmp_path / "data")
    run = tiny_run(data, tmp_path / "run").folder
    weights = {
        key: value * 1e30 if value.is_floating_point() else value
        for key, value in load_file(run / "model.safetensors").items()
    }
    save_file(weights, run / "model.safetensors")
    for words in (("eval", run), ("eval", run, "--json"), ("explain", run, data, "--out", tmp_path / "out")):
        code, said, err = command(*words)
        assert (code, said) == (2, ""), words
        assert "damaged, or far too large" in err
    options = ("--model", "cvt_nano", "--recipe", "quick", "--epochs", 3, "--batch", 4, "--data.workers", 0)
    options += tuple(f"--model.args.{key}={value}" for key, value in CVT.items()) + ("--img-size", 16)
    code, _, err = command("train", data, "--init", run, *options, "--out", tmp_path / "other")
    assert code == 2
    assert "weights it begins with" in err
    assert "--optim.lr" not in err
