"""Recipes hold what the papers say, load, and tell the truth in their heads."""

import json
import math
import re
import tomllib

import pytest
import timm
from timm.data.auto_augment import auto_augment_policy, rand_augment_transform

import weft  # noqa: F401  registers the models
from tests.cli.test_cli import run
from tests.helpers.places import ROOT
from weft.catalog.cost import count_macs
from weft.config import Config, known_keys, override, read_yaml
from weft.engine.optim import learning_rate, make_optimizer
from weft.errors import WeftError
from weft.heads import make_segmenter
from weft.heads.folder import DenseSpec, build_dense
from weft.models.vt import Transformer
from weft.run.build import create, model_args
from weft.run.choose import check_task_settings
from weft.run.recipes import FOLDER, find_recipe, recipe_names
from weft.run.start import asked_length
from weft.tasks.policy import usual_model

NAMES = [name for name, _ in recipe_names()]
EVERYDAY = [
    "camvid", "demo", "demo-detect", "demo-segment", "detect", "finetune", "large-data", "quick", "segment",
    "small-data",
]  # fmt: skip
COCO = 118_287  # training pictures
CLASSES = {"vt-fpn-coco-stuff": 54, "vt-fpn-lip": 20, "cetnet-upernet-ade20k": 150, "camvid": 11, "segment": 11}
NOT_COMPUTED = (
    "demo", "demo-detect", "demo-segment", "quick", "detect", "cetnet-mask-rcnn-1x", "cetnet-mask-rcnn-3x",
)  # fmt: skip

AUG_D = {
    "augment.crop": "random-resized", "augment.scale": [0.08, 1.0], "augment.ratio": [3 / 4, 4 / 3],
    "augment.flip": 0.5, "augment.policy": "rand-m9-mstd0.5-inc1", "augment.erase": 0.25, "augment.mixup": 0.8,
    "augment.cutmix": 1.0, "augment.mix_prob": 1.0, "augment.switch_prob": 0.5, "augment.interpolation": "bicubic",
    "loss.smoothing": 0.1,
}  # fmt: skip
CROP_AND_FLIP = {
    "augment.scale": [0.08, 1.0], "augment.flip": 0.5, "augment.erase": 0.0, "augment.mixup": 0.0,
    "augment.cutmix": 0.0,
}  # fmt: skip
ADAMW = {"optim.name": "adamw", "optim.betas": [0.9, 0.999], "optim.eps": 1e-8, "optim.schedule": "cosine"}
SGD = {"optim.name": "sgd", "optim.momentum": 0.9}
VT_FPN = {
    "data.task": "segment", "run.sync_bn": True, "loss.kind": "ce", "test.scales": [1.0], "test.flip": False,
}  # fmt: skip
MASK_RCNN = {
    "data.task": "detect", "augment.short_sides": list(range(480, 801, 32)), "augment.long_side": 1333,
    "augment.flip": 0.5, "augment.photometric": 0.0, "optim.schedule": "step", "optim.gamma": 0.1, "run.sync_bn": True,
    "augment.cut_short_sides": [400, 500, 600], "augment.cut_sides": [384, 600],
    "model.head_args": {  # mmdetection's Mask R-CNN
        "anchor_sizes": [32, 64, 128, 256, 512], "roi_aligned": True, "roi_sampling": 0, "box_loss": "l1",
        "low_quality_matches": True,
    },
}  # fmt: skip


def settings(*parts, size=224, epochs, batch, warmup=0, decay, repeats=1, cooldown=0, clip=0, ema=0, **model):
    values = {
        "augment.img_size": size, "run.epochs": epochs, "run.batch": batch, "optim.warmup_epochs": warmup,
        "optim.weight_decay": decay, "augment.repeats": repeats, "optim.cooldown_epochs": cooldown, "optim.clip": clip,
        "run.ema": ema, "model.frozen_mode": False, "model.drop": 0.0,
        "model.proj_drop": 0.0,
    }  # fmt: skip
    for part in parts:
        values |= part
    return values | {f"model.{key}": value for key, value in model.items()}


# What the papers and their codes say, typed in from them. Rates (first, peak, last) are at the batch of the recipe.
PUBLISHED = {
    "ceit-imagenet": settings(
        AUG_D, ADAMW, epochs=300, batch=1024, warmup=5, decay=0.05, repeats=3, cooldown=10, drop_path=0.1
    ),
    "ceit-base-imagenet": settings(
        AUG_D, ADAMW, epochs=100, batch=1024, warmup=5, decay=0.05, repeats=3, cooldown=10, name="ceit_base",
        drop_path=0.1,
    ),
    "ceit-384": settings(
        AUG_D, ADAMW, {"optim.schedule": "constant"}, size=384, epochs=30, batch=1024, decay=1e-8, repeats=3,
        frozen_mode=True,
    ),
    "ceit-transfer": settings(AUG_D, ADAMW, epochs=100, batch=512, warmup=2, decay=1e-8),
    "vitae-imagenet": settings(
        AUG_D, ADAMW, {"augment.interpolation": "random", "run.ema_eval": True}, epochs=300, batch=512, warmup=10,
        decay=0.05, cooldown=10, ema=0.99996, drop_path=0.1,
    ),
    "vitae-tiny-imagenet": settings(
        AUG_D, ADAMW, {"augment.interpolation": "random", "run.ema_eval": True}, epochs=300, batch=512, warmup=10,
        decay=0.03, cooldown=10, ema=0.99996, drop_path=0.1, name="vitae_tiny",
    ),
    "vitae-384": settings(
        AUG_D, ADAMW, {"augment.interpolation": "random", "optim.schedule": "constant"}, size=384, epochs=30,
        batch=1024, decay=1e-8, drop_path=0.1,
    ),
    "vitae-transfer": settings(
        AUG_D, ADAMW, {"augment.interpolation": "random"}, epochs=100, batch=512, warmup=2, decay=1e-8
    ),
    "vitae-cifar": settings(
        AUG_D, ADAMW, {"augment.interpolation": "random", "run.ema_eval": True}, epochs=1000, batch=512, warmup=10,
        decay=0.03, cooldown=10, ema=0.99996, drop_path=0.1, name="vitae_tiny",
    ),
    "t2t-vit-imagenet": settings(
        AUG_D, ADAMW, {"augment.interpolation": "random", "run.ema_eval": True}, epochs=300, batch=512, warmup=10,
        decay=0.05, cooldown=310 - 300, ema=0.99996, drop_path=0.1, name="t2t_vit_14",
    ),
    "pvt-imagenet": settings(
        AUG_D, ADAMW, epochs=300, batch=8 * 128, warmup=5, decay=0.05, repeats=3, drop_path=0.1,
        name="pvt_small",
    ),
    "cvt-imagenet": settings(
        AUG_D, ADAMW, epochs=300, batch=2048, warmup=5, decay=0.05, cooldown=10, drop_path=0.1, name="cvt_13"
    ),
    "cvt-21-imagenet": settings(
        AUG_D, ADAMW, epochs=300, batch=2048, warmup=5, decay=0.1, cooldown=10, repeats=3, drop_path=0.1, name="cvt_21"
    ),
    "cvt-w24-imagenet22k": settings(
        AUG_D, ADAMW, epochs=90, batch=2048, warmup=5, decay=0.1, cooldown=10, drop_path=0.3, name="cvt_w24"
    ),
    "cvt-imagenet22k": settings(
        AUG_D, ADAMW, epochs=90, batch=2048, warmup=5, decay=0.05, cooldown=10, drop_path=0.1, name="cvt_13"
    ),
    "cvt-384": settings(
        CROP_AND_FLIP, SGD, {"augment.eval_crop": 1.0, "augment.eval_resize": "squash", "run.steps": 20_000}, size=384,
        epochs=8, batch=512, decay=0.0,
    ),
    "cvt-transfer": settings(
        CROP_AND_FLIP, SGD, {"augment.eval_crop": 1.0, "augment.eval_resize": "squash", "run.steps": 10_000}, size=384,
        epochs=103, batch=512, decay=0.0,
    ),
    "cetnet-imagenet": settings(AUG_D, ADAMW, epochs=300, batch=1024, warmup=20, decay=0.05, clip=5.0),
    "cetnet-384": settings(
        AUG_D, ADAMW, {"augment.eval_crop": 1.0, "augment.eval_resize": "squash"}, size=384, epochs=30, batch=512,
        warmup=5, decay=1e-8, clip=5.0,
    ),
    "vt-default": settings(
        CROP_AND_FLIP, SGD, {"optim.schedule": "step", "loss.smoothing": 0.0, "augment.policy": "", "loss.teacher": ""},
        epochs=90, batch=256, decay=4e-5,
    ),
    "vt-advanced": settings(
        CROP_AND_FLIP,
        {
            "optim.name": "rmsprop", "optim.momentum": 0.9, "optim.eps": 1e-3, "optim.alpha": 0.9,
            "optim.schedule": "exponential", "augment.policy": "original", "loss.smoothing": 0.1,
            "loss.teacher": "fbnetv3_g.ra2_in1k", "loss.distill": "soft", "loss.distill_weight": 0.8,
            "run.sync_bn": True, "run.ema_eval": True,
        },
        epochs=400, batch=2048, warmup=5, decay=1e-5, ema=0.99985, drop_path=0.1, drop=0.2, proj_drop=0.2,
        name="vt_resnet18_table8",
    ),
    "vt-fpn-coco-stuff": settings(
        VT_FPN, SGD,
        {
            "optim.schedule": "step", "optim.gamma": 0.1, "augment.flip": 0.5, "augment.photometric": 0.0,
            "optim.milestones": pytest.approx([60_000 / (COCO // 32), 80_000 / (COCO // 32)], rel=1e-4),
            "test.short_side": 800, "test.mode": "whole", "run.steps": 90_000,
            "augment.rescale": [640 / 800, 800 / 800], "augment.class_limit": 1.0,
        },
        size=800, epochs=90_000 // (COCO // 32), batch=32, warmup=pytest.approx(1000 / (COCO // 32), rel=1e-4),
        decay=1e-4, name="resnet50_v1", head="vt-fpn",
    ),
    "vt-fpn-lip": settings(
        VT_FPN, SGD,
        {"optim.schedule": "poly", "augment.flip": 0.0},  # left and right are classes
        size=473, epochs=150, batch=96, decay=5e-4, name="resnet50_v1", head="vt-fpn",
    ),
    "cetnet-upernet-ade20k": settings(
        ADAMW,
        {
            "data.task": "segment", "optim.schedule": "poly", "optim.power": 1.0, "augment.flip": 0.5,
            "augment.rescale": [0.5, 2.0], "augment.class_limit": 0.75, "augment.photometric": 1.0,
            "test.short_side": 512, "test.long_side": 2048, "test.mode": "whole", "run.sync_bn": True,
            "loss.kind": "ce", "loss.aux_weight": 0.4,
        },
        size=512, epochs=math.ceil(160_000 * 16 / 20_210), batch=16,
        warmup=pytest.approx(1500 * 16 / 20_210, rel=0.01), decay=0.01, name="cetnet_tiny", head="upernet",
        drop_path=0.3,  # Swin's rates of dense training, not those of its classifiers
    ),
    "cetnet-mask-rcnn-1x": settings(
        ADAMW, MASK_RCNN, {"optim.milestones": [8, 11]}, size=800, epochs=12, batch=16,
        warmup=pytest.approx(1000 * 16 / COCO, rel=0.01), decay=0.05, name="cetnet_tiny", head="mask-rcnn",
        drop_path=0.1,
    ),
    "cetnet-mask-rcnn-3x": settings(
        ADAMW, MASK_RCNN, {"optim.milestones": [27, 33]}, size=800, epochs=36, batch=16,
        warmup=pytest.approx(1000 * 16 / COCO, rel=0.01), decay=0.05, name="cetnet_tiny", head="mask-rcnn",
        drop_path=0.2,
    ),
}  # fmt: skip
# First, highest and last learning rate at the recipe's own batch: of the first step, and where the schedule has ended.
RATES = {
    "ceit-imagenet": (1e-6, 1e-3, 1e-5),
    "ceit-base-imagenet": (1e-6, 1e-3, 1e-5),
    "ceit-384": (5e-6, 5e-6, 5e-6),
    "ceit-transfer": (1e-6, 5e-4, 1e-5),
    "vitae-imagenet": (1e-6, 5e-4, 1e-5),
    "vitae-tiny-imagenet": (1e-6, 1e-3, 1e-5),
    "vitae-384": (5e-6, 5e-6, 5e-6),
    "vitae-transfer": (1e-6, 5e-4, 1e-5),
    "vitae-cifar": (1e-6, 1e-3, 1e-5),
    "t2t-vit-imagenet": (1e-6, 5e-4, 1e-5),
    "pvt-imagenet": (1e-6, 1e-3, 1e-5),
    "cvt-imagenet": (1e-6, 2e-3, 1e-5),
    "cvt-imagenet22k": (1e-6, 2e-3, 1e-5),
    "cvt-21-imagenet": (1e-6, 2e-3, 1e-5),
    "cvt-w24-imagenet22k": (1e-6, 2e-3, 1e-5),
    "cvt-384": (0.003, 0.003, 0.0),
    "cvt-transfer": (0.003, 0.003, 0.0),
    "cetnet-imagenet": (1e-6, 1e-3, 1e-5),  # Swin's 5e-7, 5e-4, 5e-6 for 512 pictures
    "cetnet-384": (2e-8, 2e-5, 2e-7),
    "vt-default": (0.1, 0.1, 1e-4),
    "vt-advanced": (0.01, 0.16, 0.16 * 0.9875**395),
    "vt-fpn-coco-stuff": (4e-5, 0.04, 4e-4),
    "vt-fpn-lip": (0.01, 0.01, 0.0),
    "cetnet-upernet-ade20k": (6e-11, 6e-5, 0.0),
    "cetnet-mask-rcnn-1x": (1e-7, 1e-4, 1e-6),
    "cetnet-mask-rcnn-3x": (1e-7, 1e-4, 1e-6),
}


def config_of(name):
    return override(Config(), find_recipe(name))


def value_of(config, key):
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def head_of(name):
    lines = (FOLDER / f"{name}.yaml").read_text().split("\n\n")[0].splitlines()
    assert all(line.startswith("#") for line in lines)
    return re.sub(r"\s+", " ", " ".join(line.lstrip("#") for line in lines))


def test_every_recipe_is_known_here():
    assert sorted([*PUBLISHED, *EVERYDAY]) == sorted(NAMES)
    assert RATES.keys() == PUBLISHED.keys()


@pytest.mark.parametrize("name", PUBLISHED)
def test_values_are_the_papers(name):
    config = config_of(name)
    for key, expected in PUBLISHED[name].items():
        assert value_of(config, key) == (pytest.approx(expected) if isinstance(expected, float | list) else expected), (
            key
        )


@pytest.mark.parametrize("name", RATES)
def test_learning_rates_are_the_papers(name):
    config = config_of(name)
    batch, epochs = config.run.batch, config.run.epochs
    warm = config.optim.warmup_epochs
    first, highest, last = RATES[name]
    assert config.optim.lr_batch in (batch, 512)
    assert learning_rate(config.optim, batch, 0, epochs) == pytest.approx(first)
    almost = learning_rate(config.optim, batch, warm - 1e-6 if warm else 0, epochs)
    assert almost == pytest.approx(highest, rel=1e-4)
    assert learning_rate(config.optim, batch, epochs, epochs) == pytest.approx(last)


@pytest.mark.parametrize("name", NAMES)
def test_recipe_fits_the_code(name):
    """Models exist and take the arguments, timm understands policy and teacher, the optimiser can be made."""
    config = config_of(name)
    if config.augment.policy.startswith("rand"):
        rand_augment_transform(config.augment.policy, {})
    elif config.augment.policy:
        auto_augment_policy(config.augment.policy)
    if config.loss.teacher:
        assert timm.get_pretrained_cfg(config.loss.teacher).has_weights
    if config.model.head != "auto":
        check_task_settings(config)
    if config.model.name != "auto":
        make_optimizer(make_on_meta(config), config.optim, config.run.batch or 64)
    if config.optim.schedule in ("cosine", "poly"):
        assert config.optim.min_lr < config.optim.lr
    if config.model.name != "auto" and not config.model.init and config.optim.name == "adamw":
        assert config.run.epochs > config.optim.warmup_epochs


def make_on_meta(config):
    """The model of a recipe, without weights."""
    name, task, classes = config.model.name, config.data.task, ["one", "two"]
    if task == "auto":
        return timm.create_model(name, device="meta", drop_path_rate=config.model.drop_path)
    head = "mask-rcnn" if config.model.head == "auto" else config.model.head  # what the data have decides
    spec = DenseSpec(task, name, config.model.args, 3, head, config.model.head_args, classes)
    backbone = timm.create_model(name, num_classes=0, device="meta", **config.model.args)
    return build_dense(spec, override(config, {"model.head": head}), backbone)


@pytest.mark.parametrize(
    ("name", "rate"),
    [
        ("ceit_small", 0.1), ("vitae_13m", 0.1), ("cvt_21", 0.1), ("cvt_w24", 0.3),
        ("cetnet_tiny", 0.2),
    ],
)  # fmt: skip
def test_models_bring_their_stochastic_depth(name, rate):
    """Recipes leave it to the model where sizes differ; and the last block has all of it."""
    model = timm.create_model(name, device="meta")
    rates = [module.drop_prob for module in model.modules() if hasattr(module, "drop_prob")]
    assert max(rates) == pytest.approx(rate)


@pytest.mark.parametrize(
    ("model", "tokens"),
    [("vt_resnet18_table8", 2), ("vt_resnet34_table8", 2), ("vt_resnet50", 2), ("vt_resnet101", 2), ("resnet18", 0)],
)
def test_dropout_of_vts_advanced_recipe(model, tokens):
    """Before the classifier, and in every transformer; the plain ResNets of table 8 have none of these."""
    config = override(config_of("vt-advanced"), {"model.name": model})
    made = create(model, {**model_args(config.model, (64, 64)), "device": "meta"}, 10, 3, False)
    assert made.drop_rate == 0.2 if model == "resnet18" else made.head_drop.p == 0.2
    drops = [module.drop.p for module in made.modules() if isinstance(module, Transformer)]
    assert drops == [0.2] * tokens


@pytest.mark.parametrize("name", NAMES)
def test_head_says_what_it_must(name):
    head = head_of(name)
    command = f"weft {name.replace('-', ' ')} " if name.startswith("demo") else f"--recipe {name}"
    assert command in head.partition("Command:")[2]
    assert re.search(r"Command: weft .* Cost: .* Expected: ", head)
    if name in PUBLISHED:
        assert ("Cost: not computed" if name in NOT_COMPUTED else "computed, not measured") in head
        assert re.search("(not|Not) repeated with Weft", head)


SLOW = (  # MACs have to be counted first
    "cetnet-384", "cvt-w24-imagenet22k", "cetnet-upernet-ade20k", "segment", "vt-fpn-coco-stuff", "vt-fpn-lip",
)  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else [])
        for name in NAMES
        if name not in NOT_COMPUTED
    ],
)
def test_costs_are_computed_right(name):
    """Pictures per second are 50 TFLOP/s over three passes of two operations for each MAC; hours follow."""
    config, head = config_of(name), head_of(name)
    pictures = re.search(r"for (?:the )?([\d,]+) pictures", head)
    count = int(pictures[1].replace(",", "")) if pictures else 1_281_167
    window = re.search(r"in windows of (\d+) pixels with ([\w-]+)", head)
    size, dense = (int(window[1]), window[2]) if window else (config.augment.img_size or 224, "")
    assert size == config.augment.img_size or not config.augment.img_size
    assert dense == config.model.head or config.model.head == "auto"
    seen = (config.run.epochs + config.optim.cooldown_epochs) * count
    if config.run.steps:
        seen = config.run.steps * config.run.batch
    costs = re.findall(r"(\w+) ([\d,.]+) pictures/s, ([\d,.]+) h", head)
    assert costs
    if config.model.name != "auto":
        assert config.model.name in [model for model, _, _ in costs]
    for model, speed, hours in costs:
        expected = 50e12 / 6 / (segmenter_macs(model, dense, CLASSES[name], size) if dense else macs(model, size))
        assert float(speed.replace(",", "")) == pytest.approx(expected, rel=0.01), model
        assert float(hours.replace(",", "")) == pytest.approx(seen / expected / 3600, rel=0.02), model


def macs(name, size):
    catalog = json.loads((ROOT / "weft/catalog/catalog.json").read_text())
    known = [m["macs"] for m in catalog if m["name"].split(".")[0] == name and m["img_size"] == size]
    return known[0] if known else count_macs(timm.create_model(name, img_size=size, device="meta"), (3, size, size))


def segmenter_macs(name, head, classes, size):
    backbone = timm.create_model(name, num_classes=0, device="meta")
    return count_macs(make_segmenter(backbone, head, classes), (3, size, size))


# Finding --------------------------------------------------------------------------------------------------------


def test_recipe_from_a_file(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("optim:\n  lr: 3e-4\nrun:\n  epochs: 7\n")
    config = override(Config(), find_recipe(str(file)))
    assert (config.optim.lr, config.run.epochs) == (3e-4, 7)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("cvt-imagnet", "Did you mean 'cvt-imagenet'"),
        ("nowhere.yaml", "nowhere.yaml does not exist"),
        ("zzz", "`weft recipes` lists them"),
        ("", "`weft recipes` lists them"),
    ],
)
def test_unknown_recipe(name, text):
    with pytest.raises(WeftError, match=text) as caught:
        find_recipe(name)
    assert "\n" not in str(caught.value)


def test_package_takes_the_recipes_along():
    package_data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["weft"]
    assert {file.name for pattern in package_data for file in (ROOT / "weft").glob(pattern)} >= {
        f"{name}.yaml" for name in NAMES
    }


def test_page_names_every_recipe():
    page = (ROOT / "docs/recipes.md").read_text()
    assert [name for name in NAMES if f"`{name}`" not in page] == []


# Commands -------------------------------------------------------------------------------------------------------


def test_command_lists_recipes():
    lines = run("recipes").stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["auto", *NAMES]
    assert all(len(line.split()) > 3 for line in lines)


def test_command_prints_a_recipe(tmp_path):
    printed = run("recipes", "vt-advanced").stdout
    file = tmp_path / "copy.yaml"
    file.write_text(printed)
    assert read_yaml(file) == find_recipe("vt-advanced")
    assert printed.startswith("# VT-ResNet")


def test_command_prints_the_rule():
    printed = run("recipes", "auto").stdout
    assert "Learning rate     AdamW at 4e-3 for less than 15 epochs" in printed
    assert all(title in printed for title in ("Model and size", "Augmentation", "Mixing", "Masks", "Boxes"))


@pytest.mark.parametrize(("device", "side"), [("cpu", 32), ("cuda", 32), ("cpu", 224), ("cuda", 224)])
def test_page_recommends_the_model_that_is_chosen(device, side):
    advice = (ROOT / "docs/models.md").read_text().split("## What all models take")[0]
    assert f"`{usual_model(device, side).model}`" in advice


def test_command_lists_keys():
    lines = run("keys").stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(known_keys())
    assert any(re.search(r"optim\.lr +float +0\.001 +peak learning rate", line) for line in lines)
    some = run("keys", "WARMUP").stdout
    assert [line.split()[0] for line in some.splitlines()] == ["optim.warmup_epochs", "optim.warmup_lr"]


@pytest.mark.parametrize(
    ("args", "text"), [(["recipes", "smal-data"], "small-data"), (["keys", "optim.lrr"], "optim.lr")]
)
def test_commands_tell_mistakes_in_one_line(args, text):
    done = run(*args)
    assert done.returncode == 2
    assert text in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("args", [["recipes"], ["recipes", "quick"], ["keys"]])
def test_commands_are_light(args):
    code = (
        f"import sys; sys.argv[1:] = {args!r}\nfrom weft.cli.app import main\nmain()\nassert 'torch' not in sys.modules"
    )
    assert run(code=code).returncode == 0


@pytest.mark.parametrize(
    ("given", "minutes"),
    [({}, 5), ({"run.epochs": 2}, 0), ({"run.steps": 9}, 0), ({"run.epochs": 2, "run.minutes": 1}, 1)],
)
def test_epochs_that_were_asked_for_beat_a_recipes_minutes(given, minutes):
    assert override(Config(), {**find_recipe("quick"), **asked_length(given)}).run.minutes == minutes
