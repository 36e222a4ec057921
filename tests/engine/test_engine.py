"""What surrounds the loop: the model a run starts from, what is chosen, what is said, whole small runs of each kind."""

import csv
import json
import math
import subprocess
import sys

import numpy as np
import pytest
import safetensors.torch
import timm
import timm.data
import torch
from PIL import Image

import weft
from tests.helpers.places import ROOT
from tests.helpers.small_runs import TINY, make_pictures, state_of, tiny_run
from weft import WeftError
from weft.config import Config, override
from weft.data.check.check import check
from weft.data.sources.open import open_source
from weft.engine.log import Screen, format_duration, read_rows
from weft.engine.loop import Trainer
from weft.engine.state import read_header
from weft.models.weights.convert import load_weights
from weft.run.build import load_init, make_model
from weft.run.choose import choose_recipe, fill
from weft.tasks.policy import usual_model


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    return make_pictures(tmp_path_factory.mktemp("data") / "pictures")


@pytest.fixture(scope="module")
def run(pictures, tmp_path_factory):
    return tiny_run(pictures, tmp_path_factory.mktemp("runs") / "run", epochs=2).folder


# The run folder -------------------------------------------------------------------------------------------------


def test_run_folder_holds_what_is_promised(run):
    names = "model.safetensors config.json config.yaml metrics.jsonl split.json evaluation.json report.html state"
    assert set(names.split()) <= {path.name for path in run.iterdir()}
    rows = [row for row in read_rows(run / "metrics.jsonl") if row["kind"] == "epoch"]
    best = next(row for row in reversed(rows) if row["best"])
    evaluation = json.loads((run / "evaluation.json").read_text())
    assert evaluation["top1"] == best["val_top1"]  # to the last digit: the same pictures, the same batches
    assert evaluation["loss"] == best["val_loss"]


def test_timm_opens_the_folder_with_the_same_answers(run, pictures):
    model = timm.create_model(f"local-dir:{run}", pretrained=True).eval()
    file = next(pictures.rglob("*.png"))
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
    with torch.no_grad(), Image.open(file) as image:
        expected = model(transform(image)[None]).softmax(1)[0]
    predicted = weft.load(run).predict(file, top=3)[0]
    order = [weft.load(run).classes.index(label) for label in predicted.labels]
    torch.testing.assert_close(torch.tensor(predicted.probabilities), expected[order], rtol=1e-4, atol=1e-5)


def test_state_says_all_that_a_resumed_run_depends_on(run):
    header = read_header(run)
    assert header.keys() >= {"progress", "versions", "config", "classes", "preprocessing", "fingerprint", "processes"}
    assert header["versions"].keys() >= {"weft", "commit", "python", "torch", "timm"}
    kinds = {key.split(".")[0] for key in state_of(run)}
    assert kinds >= {"model", "optim"}


# What it starts from --------------------------------------------------------------------------------------------


def made(settings, *, classes=3, channels=3, size):
    config = override(Config(), {**settings, "data.task": "classify", "data.channels": channels})
    return make_model(config, classes=[str(i) for i in range(classes)], size=(size, size)).model


def test_init_takes_all_but_the_classifier_of_other_classes(run):
    model = made({"model.name": "cvt_nano", "model.args": TINY["model__args"]}, classes=5, size=16)
    head = model.get_classifier().weight.clone()
    changed = load_init(model, load_weights(run), str(run))
    weights = safetensors.torch.load_file(run / "model.safetensors")
    assert all(torch.equal(v, weights[k]) for k, v in model.state_dict().items() if not k.startswith("head."))
    assert torch.equal(model.get_classifier().weight, head)
    assert any("head.weight" in line for line in changed)


def test_init_adapts_the_first_convolution_to_other_channels(run):
    model = made({"model.name": "cvt_nano", "model.args": TINY["model__args"]}, channels=1, size=16)
    [line] = load_init(model, load_weights(run), str(run))
    assert "3 to 1 channels" in line


def test_init_resizes_positions():
    args = {"model.name": "ceit_nano", "model.args": dict(embed_dim=16, depth=1, num_heads=2, i2t_channels=4)}
    changed = load_init(made(args, size=64), made(args, size=32).state_dict(), "small")
    assert any("pos_embed" in line for line in changed)


def test_init_of_another_model_is_refused_with_the_tensors(run):
    model = made({"model.name": "ceit_nano"}, size=32)
    with pytest.raises(WeftError, match=r"tensors differ, such as .*expected.*found"):
        load_init(model, load_weights(run), str(run))


def test_fine_tuning_starts_from_the_run(pictures, run, tmp_path):
    settings = dict(epochs=1, init=str(run), recipe="finetune", freeze="backbone", run__ema=0)
    tuned = tiny_run(pictures, tmp_path / "tuned", **settings).folder
    before, after = (safetensors.torch.load_file(folder / "model.safetensors") for folder in (run, tuned))
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    assert changed == {"head.weight", "head.bias"}


# What is chosen -------------------------------------------------------------------------------------------------


def chosen(folder, device="cpu", given=(), **settings):
    config = override(Config(), {"data.source": str(folder), **settings})
    report = check(open_source(str(folder)), None, quick=True, config=config.data)
    return fill(config, given, report, report.pictures, torch.device(device))


def test_small_pictures_stay_as_they_are(pictures):
    config, why = chosen(pictures)
    assert config.model.name == usual_model("cpu", 16).model
    assert (config.augment.img_size, config.augment.crop, config.augment.pad) == (16, "random", 2)
    assert config.data.channels == 3
    assert config.run.batch == 8
    assert all(name in " ".join(why) for name in ("model", "img_size", "batch"))


def test_large_pictures_on_a_gpu_get_a_large_model(tmp_path):
    folder = make_pictures(tmp_path / "pictures", side=240, each=3)
    config, _ = chosen(folder, "cuda")
    assert (config.model.name, config.augment.img_size) == (usual_model("cuda", 240).model, 224)
    config, _ = chosen(folder, "cpu")
    assert "nano" in config.model.name
    assert config.augment.img_size < 224


def test_what_was_set_is_never_changed(pictures):
    settings = {"model.name": "vitae_tiny", "augment.img_size": 32, "run.batch": 5, "data.workers": 1}
    config, _ = chosen(pictures, given=["augment.crop"], **settings, **{"augment.crop": "resize", "data.channels": 1})
    assert (config.model.name, config.augment.img_size, config.run.batch) == ("vitae_tiny", 32, 5)
    assert (config.augment.crop, config.data.channels, config.data.workers) == ("resize", 1, 1)
    assert config.model.args == {"stem_stride": 1}  # a grid of 2 x 2 would not do


@pytest.mark.parametrize(
    ("count", "init", "name"), [(50, "", "small-data"), (10**6, "", "large-data"), (9, "x", "finetune")]
)
def test_recipe_follows_the_data(count, init, name):
    assert choose_recipe(override(Config(), {"model.init": init}), "classify", count) == name


# Kinds of data and of training ----------------------------------------------------------------------------------


def test_multi_label_table(pictures, tmp_path):
    files = sorted(pictures.rglob("*.png"))
    with open(tmp_path / "labels.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["path", "label"])
        for i, path in enumerate(files):
            writer.writerow([path, "red|warm" if "class 0" in str(path) else ["green", "blue|cold"][i % 2]])
    result = tiny_run(tmp_path / "labels.csv", tmp_path / "run", epochs=2)
    row = [row for row in read_rows(result.folder / "metrics.jsonl") if row["kind"] == "epoch"][-1]
    assert row.keys() >= {"val_map", "val_f1"}
    assert 0 < result.metrics["map"] <= 1
    assert weft.load(result.folder).multilabel


@pytest.mark.parametrize("recipe", ["auto", "quick", "small-data"])  # the last has a policy
@pytest.mark.parametrize("depth", [8, 16, 32])
def test_other_channels_and_depths_train(tmp_path, depth, recipe):
    """Five channels as arrays; 16-bit grey, whose mean is measured on the data; a single TIFF of floats among these."""
    rng = np.random.default_rng(0)
    for label in range(2):
        (tmp_path / "data" / str(label)).mkdir(parents=True)
        for i in range(8):
            if depth == 8:
                array = rng.integers(0, 200, (16, 16, 5), dtype=np.uint8) + np.uint8(50 * label)
                np.save(tmp_path / "data" / str(label) / f"{i}.npy", array)
            else:
                array = rng.integers(0, 20_000, (16, 16)).astype(np.uint16) + np.uint16(30_000 * label)
                Image.fromarray(array).save(tmp_path / "data" / str(label) / f"{i}.png")
    if depth == 32:
        Image.fromarray(rng.random((16, 16), np.float32)).save(tmp_path / "data" / "0" / "float.tif")
    folder = tiny_run(tmp_path / "data", tmp_path / "run", epochs=1, recipe=recipe).folder
    preprocessing = weft.load(folder).preprocessing
    assert (preprocessing.channels, preprocessing.depth) == (5 if depth == 8 else 1, depth)
    assert all(0.1 < mean < 0.7 for mean in preprocessing.mean)


def test_small_values_are_brought_to_the_same_spread(tmp_path):
    """Of floats near 0 the deviation, rounded to four digits, would be 0, and every answer no number."""
    rng = np.random.default_rng(0)
    for label in range(2):
        (tmp_path / "data" / str(label)).mkdir(parents=True)
        for i in range(8):
            array = rng.random((16, 16), np.float32) * np.float32(1e-5)
            Image.fromarray(array).save(tmp_path / "data" / str(label) / f"{i}.tif")
    result = tiny_run(tmp_path / "data", tmp_path / "run", epochs=1)
    preprocessing = weft.load(result.folder).preprocessing
    assert preprocessing.mean == pytest.approx([0.5e-5], rel=0.1)
    assert preprocessing.std == pytest.approx([1e-5 / 12**0.5], rel=0.1)


@pytest.mark.parametrize("distill", ["soft", "hard"])
def test_student_learns_from_a_run(pictures, run, tmp_path, distill):
    settings = dict(epochs=1, teacher=str(run), loss__distill=distill, loss__distill_weight=1.0)
    taught = tiny_run(pictures, tmp_path / "taught", **settings).folder
    plain = tiny_run(pictures, tmp_path / "plain", epochs=1).folder
    first = [read_rows(folder / "metrics.jsonl")[0]["loss"] for folder in (taught, plain)]
    assert first[0] != first[1]  # the labels have no weight


@pytest.mark.parametrize("balance", ["sampler", "loss", "logit-adjust"])
def test_balance_changes_training(pictures, run, tmp_path, balance):
    folder = tiny_run(pictures, tmp_path / "run", epochs=2, balance=balance).folder
    assert math.isfinite(read_rows(folder / "metrics.jsonl")[-1]["train_loss"])
    if balance == "sampler":  # the classes are equally many already, so weights change nothing else
        assert any(
            not torch.equal(a, b) for a, b in zip(state_of(folder).values(), state_of(run).values(), strict=True)
        )


def test_cosine_reaches_its_end_and_warm_up_its_top(pictures, tmp_path):
    settings = dict(epochs=4, optim__warmup_epochs=1, optim__lr=0.01, optim__lr_batch=0, optim__min_lr=1e-4)
    rows = read_rows(tiny_run(pictures, tmp_path / "run", **settings).folder / "metrics.jsonl")
    rates = [row["lr"] for row in rows if row["kind"] == "step"]
    assert rates[0] == pytest.approx(1e-5, rel=0.2)  # the recipe's own start
    assert max(rates) == pytest.approx(0.01 * (1 + math.cos(math.pi / 4)) / 2, rel=0.01)
    assert rates[-1] < 0.002


def test_model_learns_what_can_be_learned(tmp_path):
    """Three colours are three classes: a run that works gets them all, and says so everywhere alike."""
    pictures = make_pictures(tmp_path / "pictures", each=40)
    settings = dict(epochs=8, optim__lr=0.01, optim__lr_batch=0, model__drop_path=0.0)
    result = tiny_run(pictures, tmp_path / "run", **settings)
    assert result.metrics["top1"] > 0.95
    predictions = result.load().predict(pictures)
    right = [prediction.labels[0] in prediction.name for prediction in predictions]
    assert np.mean(right) > 0.95


# What is said ---------------------------------------------------------------------------------------------------


def test_lines_without_a_terminal_have_no_control_characters(pictures, tmp_path, capsys):
    tiny_run(pictures, tmp_path / "run", epochs=1, quiet=False)
    out = capsys.readouterr().out
    assert "epoch 1/1" in out
    assert "report.html" in out
    assert not [c for c in out if not c.isprintable() and c != "\n"]


def test_quiet_says_nothing(pictures, tmp_path, capsys):
    tiny_run(pictures, tmp_path / "run", epochs=1)
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (90, "1:30"), (5400, "1:30:00"), (-3, "0:00")])
def test_clock(seconds, text):
    assert format_duration(seconds) == text


def test_tensorboard_gets_the_numbers(pictures, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = tiny_run(pictures, tmp_path / "run", epochs=2, run__tensorboard=True).folder
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    rows = [row for row in read_rows(folder / "metrics.jsonl") if row["kind"] == "epoch"]
    assert [event.value for event in events.Scalars("val_top1")] == pytest.approx([row["val_top1"] for row in rows])


def test_screen_shows_a_bar_on_a_terminal(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    screen = Screen(quiet=False)
    screen.console._force_terminal = True
    screen.start(total_epochs=3)
    news = {"loss": 1.5, "accuracy": 0.25, "pictures_per_second": 1234.0}
    screen.step(2, 5, 10, news, left=61)
    screen.step(2, 6, 10, {**news, "pictures_per_second": 0.0}, left=0)  # which nobody has measured yet
    shown = screen.bar.tasks[0]
    assert (shown.completed, shown.total) == (5, 10)
    assert "25.0%" in shown.fields["news"]
    assert "1,234 pictures/s" in shown.fields["news"]
    assert "1:01 left" in shown.fields["news"]
    screen.close()


def test_trainer_is_fed_in_the_order_of_its_plan(monkeypatch, pictures, tmp_path):
    """Whatever the number of readers, step k gets the pictures of plan.step(k)."""
    seen = []
    original = Trainer.train_step

    def train_step(self, step, batch):
        seen.append(sorted(batch.index.tolist()) == sorted(draw.index for draw in self.run.plan.step(step)))
        return original(self, step, batch)

    monkeypatch.setattr(Trainer, "train_step", train_step)
    tiny_run(pictures, tmp_path / "run", epochs=2, data__workers=2)
    assert len(seen) == 6
    assert all(seen)


COMPUTED_BEFORE = """
import sys
import torch
from tests.helpers.small_runs import tiny_run

torch.set_num_threads(4)
torch.randn(4096, 256).log_softmax(1)  # starts OpenMP's threads, which forked readers do not have
tiny_run(sys.argv[1], sys.argv[2], img_size=160, batch=32, epochs=1, data__workers=2)
"""


def test_a_script_that_has_computed_before_can_train_with_readers(tmp_path):
    """A reader that entered OpenMP's pool, which it has inherited without its threads, would wait for them forever."""
    data = make_pictures(tmp_path / "pictures", each=24)
    script = [sys.executable, "-c", COMPUTED_BEFORE, data, tmp_path / "run"]
    subprocess.run(script, cwd=ROOT, check=True, timeout=300)
    assert (tmp_path / "run" / "report.html").exists()
