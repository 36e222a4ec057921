"""The commands around training: `weft train`, `weft demo`, and the lists of recipes and settings."""

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from weft.cli.options import Flag, Keys, Quiet, end_as_interrupted, print_columns, say, settings_of
from weft.engine.start import RunStart
from weft.errors import WeftError, did_you_mean
from weft.words import shell

if TYPE_CHECKING:
    from weft.run.result import Run


def train(
    data: str = "",
    /,
    *,
    model: str | None = None,
    head: str | None = None,
    task: str | None = None,
    recipe: str = "",
    init: str | None = None,
    epochs: int | None = None,
    minutes: float | None = None,
    img_size: int | None = None,
    batch: str | None = None,
    lr: float | None = None,
    val: str | None = None,
    fraction: float | None = None,
    balance: str | None = None,
    freeze: str | None = None,
    teacher: str | None = None,
    patience: int | None = None,
    seed: int | None = None,
    device: str | None = None,
    out: str = "",
    config: str = "",
    resume: str = "",
    allow_changes: Annotated[bool, Flag] = False,
    quiet: Quiet = False,
    keys: Keys = [],  # noqa: B006  cyclopts never changes it
) -> None:
    """Train on your pictures: to classify them or, with masks or boxes, to segment or detect.

    Every setting has a default that works.

    Parameters
    ----------
    data
        A folder with one folder of pictures per class, or with images and masks, or with boxes (COCO, VOC, YOLO); a CSV
        file, tar shards, NAME:ROOT of a known set, demo:fashion or demo:nuclei.
    model
        A name of `weft models`, or any of timm's; by default chosen from the data.
    head
        fpn, vt-fpn or upernet to segment, mask-rcnn or faster-rcnn to detect.
    task
        classify, segment or detect; by default what the data are for.
    recipe
        A name of `weft recipes`, or a YAML file; by default `auto`, which fits pictures, machine and time.
    init
        Start from these weights: `pretrained` (published for the model), `host` (of the network it was built on),
        host:NAME or host:FILE, a run or model folder, a checkpoint file, or the name of weights that come with Weft;
        `scratch` starts from none.
    epochs
        Passes over the training pictures.
    minutes
        A time budget instead: as many epochs as fit.
    img_size
        Side of the pictures the model sees.
    batch
        Pictures per step, or `auto`. What does not fit into memory is computed in parts.
    lr
        Peak learning rate.
    val
        Validation pictures, where DATA does not hold them.
    fraction
        Train on this part of the training pictures only.
    balance
        Against rare classes: sampler, loss or logit-adjust.
    freeze
        What stays as it is: backbone, norm, or beginnings of parameter names.
    teacher
        Learn from this model, too: a run folder or a timm model.
    patience
        Stop after so many epochs without improvement.
    seed
        Of everything random.
    device
        auto, cpu, cuda or cuda:N.
    out
        The folder to make; by default a new one under runs/.
    config
        Settings from a YAML file, such as a run's config.yaml.
    resume
        A run to go on with.
    allow_changes
        Resume although data or settings have changed.
    quiet
        Say nothing but errors.
    keys
        Any setting of `weft keys`, more simply written as --optim.lr 0.001.
    """
    from weft.run.train import train_since

    short = dict(task=task, head=head, model=model, init=init, epochs=epochs, minutes=minutes, img_size=img_size)
    short |= dict(batch=batch, lr=lr, val=val, fraction=fraction, balance=balance, freeze=freeze, teacher=teacher)
    settings = {**short, "patience": patience, "seed": seed, "device": device, **settings_of(keys)}
    run = train_since(
        RunStart.of_command(),
        data,
        recipe=recipe,
        config=config,
        out=out,
        resume=resume,
        allow_changes=allow_changes,
        quiet=quiet,
        **settings,
    )
    end_as_interrupted(run.interrupted)


DEMO_INIT = "vt_resnet_nano.weft_cifar10"  # weights that come with the package, for the model of all three recipes


@dataclass(frozen=True)
class Demo:
    """Data and recipe of a demonstration, and the sentence on its outcome, which names metrics in braces."""

    data: str
    recipe: str
    outcome: str
    predict: str  # what follows `weft predict RUN`


DEMOS = {
    "classify": Demo(
        "demo:fashion",
        "demo",
        "A classifier of clothes, trained on 6,000 pictures of 28 x 28 pixels, is right on {top1:.1%} of 1,000 others.",
        "some.jpg",
    ),
    "segment": Demo(
        "demo:nuclei",
        "demo-segment",
        "A model that tells cell nuclei from their background reaches a mean IoU of {miou:.1%} on 64 other pictures.",
        "some.jpg --out answers/",
    ),
    "detect": Demo(
        "demo:nuclei",
        "demo-detect",
        "A model that finds and outlines each cell nucleus reaches a mask AP of {mask_ap:.1%} (AP50 {mask_ap50:.1%})"
        " on 64 other pictures.",
        "some.jpg --out answers/",
    ),
}


def demo(
    task: Literal["classify", "segment", "detect"] = "classify",
    /,
    *,
    out: str = "",
    quiet: Annotated[bool, Flag] = False,
) -> None:
    """Train a small model on the pictures that come with Weft: the whole way in minutes, without a GPU.

    Parameters
    ----------
    task
        Classify clothes, segment cell nuclei from their background, or detect each of them.
    out
        The folder to make; by default a new one under runs/.
    quiet
        Say nothing but errors.
    """
    from weft.run.train import train_since

    chosen = DEMOS[task]
    start = RunStart.of_command()
    run = train_since(start, chosen.data, recipe=chosen.recipe, out=out, quiet=quiet, task=task, init=DEMO_INIT)
    if not quiet and not run.stopped:
        say(*_next_steps(chosen, run))
    end_as_interrupted(run.interrupted)


def _next_steps(demo: Demo, run: "Run") -> list[str]:
    outcome = demo.outcome.format_map(defaultdict(float, run.metrics))
    look = f"Look at {run.folder / 'report.html'}; then try it on your own pictures:"
    steps = (
        "weft check my_pictures/",
        "weft train my_pictures/",
        f"{shell('weft', 'predict', run.folder)} {demo.predict}",
    )
    return ["", outcome, look, *(f"  {step}" for step in steps)]


def recipes(name: str = "", /) -> None:
    """List the recipes, or print one.

    Parameters
    ----------
    name
        A recipe such as cvt-imagenet, or a YAML file. Without it, all recipes with one line each.
    """
    from weft.run.recipes import AUTO, AUTO_LINE, recipe_names, recipe_text

    if name:
        say(*recipe_text(name).splitlines())
    else:
        print_columns([[AUTO, AUTO_LINE], *([name, line] for name, line in recipe_names())])


def keys(filter: str = "", /) -> None:
    """List the settings of a training run: type, default, what each does. Any is an option: --optim.lr 3e-4.

    Parameters
    ----------
    filter
        Part of a key or of its explanation, such as lr. Without it, all keys.
    """
    from weft.config import describe_keys, known_keys

    rows = [row for row in describe_keys() if filter.lower() in " ".join(row).lower()]
    if not rows:
        raise WeftError(f"No setting matches {filter!r}." + did_you_mean(filter, list(known_keys())))
    print_columns(rows)
