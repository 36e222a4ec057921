"""The recipe `auto`: what a run does where nobody says, from its pictures, its model and the time it has.

One rule for all data, printed by `weft recipes auto`. It begins with how many pictures the run can see: its time, times
what the machine trains on in a second. The sources are docs/training.md's.

Model and size    The row of weft/catalog/measured.json that reaches most after so many pictures. A model that was
                  asked for gets the largest size, up to its own, at which it can see 6,400 pictures.
Length            Epochs that were asked for, or what fits --minutes; else about 20 minutes of a CPU, 10 of a GPU,
                  and 10 to 300 epochs.
Batch             About 400 steps, of 8 to 32 pictures on a CPU and 32 to 256 on a GPU: fewer steps learn too little,
                  and larger batches compute hardly faster.
Learning rate     AdamW at 4e-3 for less than 15 epochs, 3e-3 below 40, 2e-3 below 200, then 1e-3, in batches of 32
                  or less; more for larger ones, by the cube root (twice as much for 256). Half of it for models
                  without a convolutional trunk. Wider trunks than nano take 0.4 of it in batches of 32, rising to all
                  of it in batches of 256, where they were fitted. Short runs want high rates.
Warm-up           A tenth of the run, at most 5 epochs; then a cosine to zero.
Augmentation      Crops and flips; of small pictures flips alone below 15 epochs. Erasing from 20 epochs on, where
                  100,000 pictures are seen: in fewer the model is still learning what there is.
                  RandAugment from 80 on (magnitude 6), stronger from 200 on (9): a run that sees a picture ten times
                  has no time for its disguises. Nano models, which overfit less, stay at the weaker one.
Mixing            Mixup and cutmix in half of the batches from 80 epochs on, in most from 200 on (not of nano models),
                  and none in the last third of the run: what is learnt last is whole pictures.
Depth, smoothing  No stochastic depth below 80 epochs. Labels smoothed by 0.1, weight decay 0.05, always. No average of
                  the weights: the rate ends at zero.
Other pictures    Of 16 bits or floats: no RandAugment, since deeper values are often measured ones. The number of
                  classes decides nothing.
Weights           Where nobody says how to begin, and pictures are fewer than 50,000, vt_resnet_nano begins with the
                  weights that come with it, unless these know most of the classes. Nano models take the rates of a
                  beginning at random: their weights are from small pictures of few kinds. Larger ones take a tenth,
                  falling by 0.75 from layer to layer. Augmentation and mixing by the length, as from scratch, since a
                  long run on few pictures learns them by heart.
Masks             vt_resnet_mini, on a CPU vt_resnet_nano with a narrow FPN. The largest window, up to 512 pixels, of
                  which 4,000 can be seen; batches of 8 (a GPU: 32), AdamW at 2e-3 (5e-4 without a convolutional trunk;
                  a tenth from weights, as above; with stronger changes of colour from those that were asked for), an
                  average of the weights over some 25 steps of batches. Cross-entropy and dice, to which rare classes
                  are as dear as common ones. A GPU with time for 16,000 windows shows small pictures that are alike in
                  size 1.5 times as large: thin things fall between strides of 4.
Boxes             Likewise: the largest side, up to 800, of which 1,500 pictures can be seen; batches of 4 (16), 1e-3.
                  What masks and boxes cost was estimated from a few trainings, not fitted.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

from weft.catalog.measured import PHOTO, SMALL, SMALL_SIDE, Measured, best, measured, usual_speed

Settings = dict[str, Any]

USUAL_SECONDS = {"cpu": 20 * 60.0, "cuda": 10 * 60.0}  # of a run, where nobody said
EPOCHS = (10, 300)  # ... and what it has then
LEAST_SEEN = 6_400  # pictures below which hardly anything is learnt
TUNED = "cvt_13"  # what --init pretrained takes
LEAST_TUNED = 128  # pixels of a picture that weights of 224 are adapted to: they know objects of that size
SIZES = (224, 192, 160, 128, 96, 64)
STEPS = 400
BATCHES = {"cpu": (8, 32), "cuda": (32, 256)}
RATE_BATCH = 32  # pictures up to which rates hold as they are
LARGE_BATCH = 256  # ... and at which wide trunks were fitted
WIDE = 0.4  # of the rate of nano models: what wider trunks take in batches of RATE_BATCH
NARROW = "vt_resnet_nano"
NANO = ("vt_resnet_nano", "ceit_nano", "vitae_nano", "cvt_nano", "cetnet_nano")  # Weft's own: nobody published weights
LIGHT = 15  # epochs below which small pictures are only mirrored
ERASES, ERASES_SEEN = 20, 100_000  # epochs, and pictures seen, below which nothing is erased
MIXES, MIXES_MORE = 80, 200  # epochs
WHOLE_AT_LAST = 1 / 3  # of a run that mixes
CONVOLUTIONAL = ("vt_resnet", "resnet", "convnext", "efficientnet", "regnet")  # trunks that take twice the rate
FEW = 50_000  # pictures below which trained weights are worth far more than time


@dataclass(frozen=True)
class Situation:
    """The situation of a run: pictures, a machine, time, and what was said."""

    pictures: int  # that train
    side: int  # the short one of a usual picture, or that which it is to be shown with
    long: int  # the longest one where pictures are alike in size; 0 where they are not, or are to be shown otherwise
    depth: int  # bits of a channel
    device: str  # cpu or cuda
    pace: float  # times as fast as the machine of the table
    seconds: float  # for training; 0: nobody said
    epochs: float  # that were asked for; 0: nobody did
    model: str  # that was asked for; "" where none was
    size: int  # likewise, or 0
    weights: bool  # whether it was asked to begin with trained ones
    packaged: tuple[str, ...] = ()  # names of those that come with Weft, where nobody said how it begins
    known: bool = False  # whether these have learned most of the classes already

    @property
    def time(self) -> float:
        return self.seconds or USUAL_SECONDS[self.device]

    def is_gentle(self, model: str) -> bool:
        """Whether weights know much that is to be kept: those of nano models are from small pictures of few kinds."""
        return self.weights and model not in NANO

    def seen(self, speed: float) -> float:
        """Pictures that a run sees which trains on so many a second; with repetition."""
        if self.epochs:
            return self.epochs * self.pictures
        seen = self.time * speed
        if self.seconds:
            return seen
        return min(max(seen, EPOCHS[0] * self.pictures), EPOCHS[1] * self.pictures)


def classify_settings(now: Situation) -> tuple[Settings, list[str]]:
    """The settings of a classifier, and why: model, size and everything that depends on the length."""
    chosen, speed, why = _choose(now)
    seen = now.seen(speed)
    epochs = seen / now.pictures
    batch = _batch(now.device, seen)
    settings = {**chosen, "run.batch": batch}
    if not now.epochs:
        settings["run.epochs"] = max(1, round(epochs))
    model = chosen.get("model.name", now.model)
    settings |= _packaged(now, model)
    decide = finetune_settings if now.is_gentle(model) else scratch_settings
    settings |= decide(epochs, seen, batch, model)
    settings["run.val_epochs"] = _validated(epochs)
    if epochs < LIGHT and now.side <= SMALL_SIDE:
        settings["augment.crop"] = "resize"  # small pictures are not even shifted
    if now.depth != 8:
        settings.pop("augment.policy", None)  # deeper values are often measured ones, which colours would change
    return settings, why + _reasons(now, settings, epochs, speed)


def _packaged(now: Situation, model: str) -> Settings:
    """The weights that come with Weft for this model, where it begins with those."""
    fitting = [name for name in now.packaged if name.partition(".")[0] == model]
    return {"model.init": fitting[0]} if fitting and now.pictures < FEW and not now.known else {}


def scratch_settings(epochs: float, seen: float, batch: int, model: str) -> Settings:
    """Decides how strongly a run of so many epochs is augmented and driven that begins at random."""
    rate = next((rate for most, rate in ((15, 4e-3), (40, 3e-3), (200, 2e-3)) if epochs < most), 1e-3)
    rate = _for_batch(rate * _of_model(model, batch), batch)
    settings = {**_schedule(rate, epochs), **_augmentation(epochs, model)}
    if _erases(epochs, seen):
        settings["augment.erase"] = 0.25
    return settings if epochs >= MIXES else settings | {"model.drop_path": 0.0}


def _of_model(model: str, batch: int) -> float:
    """The part of a rate that a model takes; between the two batches at which wide trunks were fitted, a power."""
    if not model.startswith(CONVOLUTIONAL):
        return 0.5
    if model == NARROW:
        return 1.0
    way = math.log(batch / RATE_BATCH) / math.log(LARGE_BATCH / RATE_BATCH)
    return WIDE ** (1 - min(1.0, max(0.0, way)))


def finetune_settings(epochs: float, seen: float, batch: int, model: str) -> Settings:
    """Decides how trained weights are adapted: gently, and the first layers least."""
    settings = {**_schedule(_for_batch(3e-4, batch), epochs), **_augmentation(epochs, model)}
    return settings | {"optim.layer_decay": 0.75, "augment.erase": 0.1 if _erases(epochs, seen) else 0.0}


def _erases(epochs: float, seen: float) -> bool:
    """Whether a part of a picture is hidden: not as long as a model is short of pictures, not of variety."""
    return epochs >= ERASES and seen >= ERASES_SEEN


def _for_batch(rate: float, batch: int) -> float:
    """A rate for a larger batch than that of the CPUs on which rates were compared: a cautious power of its size."""
    return float(f"{rate * max(1.0, batch / RATE_BATCH) ** (1 / 3):.2g}")


def _augmentation(epochs: float, model: str) -> Settings:
    """Crops alone, or, where a run is long enough to learn its pictures by heart, disguises and mixtures of them."""
    settings = {"augment.scale": [0.35, 1.0], "loss.smoothing": 0.1}
    if epochs < MIXES:
        return settings
    strong = epochs >= MIXES_MORE and "nano" not in model
    return settings | {
        "augment.scale": [0.25, 1.0],
        "augment.policy": f"rand-m{9 if strong else 6}-mstd0.5-inc1",
        "augment.mixup": 0.2,
        "augment.cutmix": 1.0,
        "augment.mix_prob": 0.8 if strong else 0.5,
        "augment.mix_until": round(1 - WHOLE_AT_LAST, 3),
    }


def _schedule(rate: float, epochs: float) -> Settings:
    return {
        "optim.name": "adamw",
        "optim.lr": rate,
        "optim.weight_decay": 0.05,
        "optim.clip": 1.0,
        "optim.schedule": "cosine",
        "optim.warmup_epochs": round(min(5.0, epochs / 10), 3),
        "optim.warmup_lr": rate / 100,
        "optim.min_lr": 1e-6,
    }


def _batch(device: str, seen: float) -> int:
    least, most = BATCHES[device]
    batch = least
    while batch < most and seen / (2 * batch) >= STEPS:
        batch *= 2
    return batch


# Masks and boxes --------------------------------------------------------------------------------------------------


def segment_settings(now: Situation) -> tuple[Settings, list[str]]:
    """The settings of a model that labels pixels: windows as large as leave time for enough of them."""
    shown = _shown(now)
    settings, why = _dense(replace(now, side=shown), WINDOWS, {"channels": 64, "head_channels": 64})
    settings["loss.kind"] = "ce+dice"
    if shown > now.side:
        settings |= {"test.short_side": shown, "test.long_side": round(ENLARGED * now.long)}
        why.append(f"pictures shown with a short side of {shown} pixels, not {now.side}: for what is thin or small")
    colours = (
        1.0 if now.is_gentle(settings.get("model.name", now.model)) else 0.5
    )  # weights can be adapted to the light of the few pictures there are
    augment = {"rescale": [0.5, 2.0], "class_limit": 0.75, "photometric": colours}
    augment |= {"flip": 0.5, "interpolation": "bilinear"}
    return settings | {f"augment.{name}": value for name, value in augment.items()}, why


def _shown(now: Situation) -> int:
    """The short side of a picture to label: its own, or more where a GPU has the time and windows have the room."""
    large, most = round(ENLARGED * now.side), WINDOWS.sizes[0]
    if now.device != "cuda" or now.size or not now.long or now.side >= most:
        return now.side
    window = min(most, max(WINDOWS.sizes[-1], large // 32 * 32))
    seen = now.seen(_speed(now, *WINDOWS.seconds[now.device], window))
    return large if seen >= ENLARGED_SEEN else now.side


def detect_settings(now: Situation) -> tuple[Settings, list[str]]:
    """The settings of a detector: pictures as large as leave time for enough of them."""
    head = {"channels": 64, "box_width": 256, "proposals": 200, "roi_samples": 64}
    settings, why = _dense(now, DETECTED, head)
    augment = {"crop": "random", "rescale": [0.6, 1.5], "photometric": 0.5, "flip": 0.5, "interpolation": "bilinear"}
    return settings | {f"augment.{name}": value for name, value in augment.items()}, why


@dataclass(frozen=True)
class DenseRule:
    """The costs and needs of training on masks or boxes, on the machines of the table."""

    seconds: dict[str, tuple[float, float]]  # by device, of a picture: in any case, and for each of its pixels
    least: int  # pictures below which little is learnt
    sizes: range  # sides, largest first
    batch: int  # on a CPU; a GPU takes four times as many
    rate: float  # for a convolutional trunk


WINDOWS = DenseRule({"cpu": (0.0008, 5.8e-7), "cuda": (0.0, 2e-8)}, 4_000, range(512, 63, -32), 8, 2e-3)
DETECTED = DenseRule({"cpu": (0.018, 1.5e-6), "cuda": (0.01, 3e-8)}, 1_500, range(800, 127, -32), 4, 1e-3)
ENLARGED, ENLARGED_SEEN = 1.5, 16_000  # times as large; windows that there must be time for
BACKBONES = {  # under a head: benchmarks/results/choices-2026-11-18.json for the CPU's
    "cpu": ("vt_resnet_nano", {"stem_stride": 2}),
    "cuda": ("vt_resnet_mini", {"stem_stride": 2}),
}


def _dense(now: Situation, rule: DenseRule, small_head: Settings) -> tuple[Settings, list[str]]:
    each, pixel = rule.seconds[now.device]
    size = now.size or next(
        (s for s in rule.sizes if s <= max(now.side, 64) and _speed(now, each, pixel, s) * now.time >= rule.least),
        min(rule.sizes[-1], now.side),
    )
    speed = _speed(now, each, pixel, size)
    seen = now.seen(speed)
    epochs = seen / now.pictures
    on_cpu = now.device == "cpu"
    settings: Settings = {}
    name, args = BACKBONES[now.device]
    if now.model in ("", name):
        settings |= {f"model.args.{key}": value for key, value in args.items()}
        settings |= {} if now.model else {"model.name": name}
    if on_cpu:
        settings |= {f"model.head_args.{name}": value for name, value in small_head.items()}
    model = now.model or settings.get("model.name", "")
    settings |= _packaged(now, model)
    rate = rule.rate if model.startswith(CONVOLUTIONAL) else rule.rate / 4
    rate /= 10 if now.is_gentle(model) else 1
    batch = rule.batch if on_cpu else 4 * rule.batch
    average = min(max(0.9, round(1 - 25 * batch / seen, 4)), 0.9999)
    settings |= {**_schedule(rate, epochs), "augment.img_size": size, "run.batch": batch, "run.ema": average}
    if epochs < MIXES:
        settings["model.drop_path"] = 0.0
    if not now.epochs:
        settings["run.epochs"] = max(1, round(epochs))
    settings["run.val_epochs"] = _validated(epochs)
    why = [
        f"recipe auto: {_length(now, epochs)}, at {size} pixels to see enough of them",
        f"lr {rate:g}, weights averaged with {average:g}: for {seen / batch:,.0f} steps of {batch} pictures",
    ]
    if not now.model:
        why.append(f"model {model}" + " under a narrow head: for a CPU" * on_cpu)
    return settings, why + _why_begun(now, settings)


def _speed(now: Situation, each: float, pixel: float, size: int) -> float:
    return now.pace / (each + pixel * size**2)


def _validated(epochs: float) -> int:
    """Epochs from one validation to the next: some thirty in a run."""
    return max(1, round(epochs / 30))


def usual_model(device: str, side: int) -> Measured:
    """The row of the table that is best where a recipe was named and a model was not."""
    kind = SMALL if side <= SMALL_SIDE else PHOTO
    row = best((row for row in measured() if row.kind == kind), device, 1.0, USUAL_SECONDS[device])
    assert row is not None, "each kind of pictures was measured on each kind of device"
    return row


# Model and size --------------------------------------------------------------------------------------------------


def _choose(now: Situation) -> tuple[Settings, float, list[str]]:
    """Settings of the model and its size, pictures a second on this machine, and the reason."""
    kind = SMALL if now.side <= SMALL_SIDE else PHOTO
    rows = [row for row in measured() if row.kind == kind and now.model in ("", row.model)]
    rows = [row.at(now.size or (now.side if kind == SMALL else row.size)) for row in rows]
    row = best(rows, now.device, now.pace, now.time, now.epochs * now.pictures)
    if row is None or (now.model and now.is_gentle(now.model)):
        return _size_of_other(now)
    chosen: Settings = {} if now.model else {"model.name": row.model}
    chosen |= {f"model.args.{name}": value for name, value in row.args.items()}
    if kind == PHOTO and not now.size:
        chosen["augment.img_size"] = row.size
    speed = now.pace * row.speed[now.device]
    return chosen, speed, _why_model(now, row, speed)


def _why_model(now: Situation, row: Measured, speed: float) -> list[str]:
    args = ", ".join(f"{name} {value}" for name, value in row.args.items())
    if now.model:
        return [f"{args}: faster for its time; --model.args says otherwise"] if args else []
    known = len(row.curve) > 1 and now.seen(speed) >= row.curve[0][0] / 2
    tells = known and not _packaged(now, row.model)  # curves are of beginnings at random
    reached = f", to about {row.reached(now.seen(speed)):.0%} on {row.data}" if tells else ""
    told = f"by the table of measurements it gets furthest in this time{reached}"
    return [f"model {row.model}{f' with {args}' if args else ''}: {told}"]


def _size_of_other(now: Situation) -> tuple[Settings, float, list[str]]:
    """The largest size at which a model that was not measured sees enough pictures in its time."""
    own = now.size or 224
    speed = usual_speed(now.model, own, now.device) or usual_speed("vt_resnet18", own, now.device) or 1.0
    speed *= now.pace
    if now.size or now.side <= SMALL_SIDE:
        return {}, speed, []
    seen = {size: now.time * speed * (own / size) ** 2 for size in SIZES if size <= own}
    least = LEAST_TUNED if now.is_gentle(now.model) else SIZES[-1]
    size = next((size for size in seen if seen[size] >= LEAST_SEEN or size <= least), least)
    if size == own:
        return {}, speed, []
    told = f"img_size {size}: at {own} pixels {now.model} would see too few pictures in the time there is"
    return {"augment.img_size": size}, speed * (own / size) ** 2, [told]


def _length(now: Situation, epochs: float) -> str:
    """`12.5 epochs of 1,000 pictures`; what is less than one is so many pictures."""
    if epochs < 1:
        return f"{max(1, round(epochs * now.pictures)):,} of {now.pictures:,} pictures, once"
    return f"{epochs:.3g} {'epoch' if epochs == 1 else 'epochs'} of {now.pictures:,} pictures"


def _reasons(now: Situation, settings: Settings, epochs: float, speed: float) -> list[str]:
    strength = "light augmentation" if epochs < MIXES else "strong augmentation, mixing until the last third"
    start = "weights to start from" if now.weights or "model.init" in settings else "from scratch"
    why = [f"recipe auto: {start}, {_length(now, epochs)}: {strength}"]
    if not (now.epochs or now.seconds):
        minutes = epochs * now.pictures / speed / 60
        told = f"epochs {settings['run.epochs']}: some {minutes:.0f} minutes here"
        why.append(f"{told}; --minutes or --epochs say otherwise")
    return why + _why_begun(now, settings)


def _why_begun(now: Situation, settings: Settings) -> list[str]:
    """Says how a run begins that was not told, and what few photographs lose without weights of a million others."""
    begun, model = settings.get("model.init"), settings.get("model.name", now.model)
    why = [f"begins with {begun}, which comes with Weft; --init scratch begins at random"] if begun else []
    if now.known and (unused := _packaged(replace(now, known=False), model)):
        why = [f"begins at random: {unused['model.init']} knows most of these classes, and perhaps their pictures"]
    tuned = now.time * now.pace * (usual_speed(TUNED, LEAST_TUNED, now.device) or 0.0)
    if now.weights or now.side <= SMALL_SIDE or now.pictures >= FEW or tuned < now.pictures:
        return why  # ... or there is no time to show each picture once to a model that has such weights
    start = "these weights are small" if begun else "from scratch"
    told = f"{start}: --init pretrained downloads 80 MB once and usually brings far more"
    return [*why, f"{told} from {now.pictures:,} pictures"]
