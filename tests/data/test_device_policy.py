"""The policy on the device against timm's on Pillow images: each operation, whole policies, what is drawn."""

import random
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from timm.data import auto_augment

from tests.helpers.places import DATA
from tests.helpers.small_runs import make_pictures, tiny_run
from weft import WeftError
from weft.config import AugmentConfig, Config
from weft.data.augment.device_policy import CODES, DevicePolicy, DrawnOperation, fits, perform
from weft.data.augment.picture import Augmentation
from weft.data.demo import fashion_mnist
from weft.data.preprocessing import Preprocessing, to_pillow
from weft.data.read import MAX_PIXELS
from weft.run import session
from weft.run.choose import fill
from weft.tasks.classify.task import Classify

MEAN = (0.485, 0.456, 0.406)
FILL = (124, 116, 104)
USUAL = "rand-m9-mstd0.5-inc1"
NAMES = sorted({*auto_augment._RAND_INCREASING_TRANSFORMS, "Posterize", "Solarize", "Color"})
MOVES = ("Rotate", "ShearX", "ShearY", "TranslateXRel", "TranslateYRel")
MODES = [Image.Resampling.BICUBIC, Image.Resampling.BILINEAR, Image.Resampling.NEAREST]


def preprocessing(channels: int = 3, depth: int = 8) -> Preprocessing:
    mean = (*MEAN, 0.5, 0.5)[:channels]
    return Preprocessing((32, 32), channels, depth, mean, (0.2,) * channels, "bicubic", 0.9, "center", MAX_PIXELS)


def policy(text: str = USUAL, channels: int = 3, **settings: Any) -> DevicePolicy:
    return DevicePolicy(AugmentConfig(policy=text, **settings), preprocessing(channels))


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8))


def clothes() -> torch.Tensor:
    """(8, 3, 28, 28): three pieces of clothing as the channels of each picture; large black areas, many edges."""
    return torch.from_numpy(fashion_mnist("train")[0][:24].copy()).view(8, 3, 28, 28)


def dull() -> torch.Tensor:
    """(8, 3, 19, 30): few values each, one of them alone in the last."""
    return noise(8, 3, 19, 30) % torch.tensor([200, 90, 40, 12, 5, 3, 2, 1]).view(8, 1, 1, 1).byte() + 17


def photographs() -> torch.Tensor:
    folder = DATA
    files = sorted(folder.rglob("*.JPEG"))[::50][:8]
    if not files:
        pytest.skip("no JPEGs under ../shared/data or WEFT_DATA")
    pixels = [np.asarray(Image.open(file).convert("RGB").resize((60, 45))) for file in files]
    return torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).contiguous()


PICTURES = {"noise": lambda: noise(8, 3, 31, 17), "clothes": clothes, "dull": dull, "photographs": photographs}


def by_timm(name: str, picture: torch.Tensor, args: tuple[float, ...], mode: Image.Resampling) -> torch.Tensor:
    """timm's operation on one (C, h, w) picture."""
    if name.startswith("Posterize") and args[0] < 1:
        return torch.zeros_like(picture)  # which Pillow refuses since version 13
    image = auto_augment.NAME_TO_OP[name](to_pillow(picture), *args, fillcolor=FILL[: len(picture)], resample=mode)
    return torch.from_numpy(np.array(image)).view(*picture.shape[1:], -1).permute(2, 0, 1)


def steps(name: str, levels: list[float], mode: Image.Resampling, channels: int = 3) -> list[list[DrawnOperation]]:
    arguments = auto_augment.LEVEL_TO_ARG[name] or (lambda *_: ())
    operation = auto_augment.NAME_TO_OP[name]
    return [[DrawnOperation(operation, arguments(level, {}), mode, FILL[:channels])] for level in levels]


def check(found: torch.Tensor, expected: torch.Tensor, moved: bool, mode: Image.Resampling, often: float) -> None:
    """The same values; where they were interpolated one off, and not more `often`."""
    difference = (found.int() - expected.int()).abs()
    if moved and mode == Image.Resampling.NEAREST:  # Pillow finds the pixel in fixed point, so sometimes another
        assert (difference > 0).float().mean() < 0.01
    else:
        assert difference.max() <= moved
        assert (difference > 0).float().mean() <= often * moved


@pytest.mark.parametrize("kind", PICTURES)
@pytest.mark.parametrize("name", NAMES)
def test_operations_are_timms(name: str, kind: str) -> None:
    pictures = PICTURES[kind]()

    @settings(max_examples=4, deadline=None, derandomize=True)
    @given(st.lists(st.floats(0, 10), min_size=8, max_size=8), st.integers(0, 99), st.sampled_from(MODES))
    def compare(levels: list[float], signs: int, mode: Image.Resampling) -> None:
        random.seed(signs)
        drawn = steps(name, levels, mode)
        found = perform(drawn, pictures)
        expected = [by_timm(name, picture, s.args, mode) for picture, [s] in zip(pictures, drawn, strict=True)]
        # Pillow rounds 7 - 1e-12 down to 6, which is frequent at levels such as 1e-5
        check(found, torch.stack(expected), name in MOVES, mode, often=1.0)

    compare()


@pytest.mark.parametrize("name", NAMES)
def test_grey_pictures(name: str) -> None:
    pictures, mode = clothes()[:, :1], Image.Resampling.BICUBIC
    drawn = steps(name, list(np.linspace(0, 9.7, 8)), mode, channels=1)
    expected = [by_timm(name, picture, s.args, mode) for picture, [s] in zip(pictures, drawn, strict=True)]
    check(perform(drawn, pictures), torch.stack(expected), name in MOVES, mode, often=0.005)


@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (2, 2), (3, 2), (3, 3), (5, 64)])
@pytest.mark.parametrize("name", NAMES)
def test_smallest_pictures(name: str, shape: tuple[int, int]) -> None:
    [drawn] = steps(name, [6.3], Image.Resampling.BILINEAR)
    picture = noise(3, *shape)
    expected = by_timm(name, picture, drawn[0].args, Image.Resampling.BILINEAR)
    assert (perform([drawn], picture[None])[0].int() - expected.int()).abs().max() <= (name in MOVES)


@pytest.mark.parametrize("text", [USUAL, "rand-m7-n4-p0.9-mstd101", "rand-m15-n3-mstd2-mmax12", "rand-m8-tweights"])
@pytest.mark.parametrize("interpolation", ["random", "bicubic", "lanczos"])
def test_whole_policies_are_timms(text: str, interpolation: str) -> None:
    """With the same seed timm draws the same and arrives at the same, whole batches at once or not."""
    ours = policy(text, interpolation=interpolation)  # type: ignore[arg-type]
    hparams: dict[str, Any] = dict(img_mean=FILL)
    if interpolation != "random":
        hparams["interpolation"] = Image.Resampling.BICUBIC
    theirs = auto_augment.rand_augment_transform(text, hparams)
    for number, picture in enumerate(clothes().repeat(5, 1, 1, 1)):
        if any(s.operation is auto_augment.posterize and s.args[0] < 1 for s in ours.draw(1, number)[0]):
            continue  # Pillow's refusal again
        random.seed(number), np.random.seed(number)
        if theirs.choice_weights is None:  # as Augmentation draws it, from one generator
            image = to_pillow(picture)
            for op in random.choices(theirs.ops, k=theirs.num_layers):
                image = op(image)
        else:
            image = theirs(to_pillow(picture))
        expected = torch.from_numpy(np.array(image)).permute(2, 0, 1)
        difference = (ours(picture[None], number)[0].int() - expected.int()).abs()
        # a later equalisation makes more of a difference of one
        assert (difference > 2).float().mean() < 0.01, ours.draw(1, number)


def test_distribution() -> None:
    """Operations alike often, each of two with probability 0.5, the magnitude about 9, cut off at 10, either sign."""
    count = 12_000
    drawn = policy().draw(count, 0)
    lengths = Counter(map(len, drawn))
    operations = Counter(step.operation for each in drawn for step in each)
    assert operations.keys() == {auto_augment.NAME_TO_OP[name] for name in auto_augment._RAND_INCREASING_TRANSFORMS}
    assert chi_square([lengths[0], lengths[1], lengths[2]], [count / 4, count / 2, count / 4]) < 13.8  # p = 0.001
    assert chi_square(list(operations.values()), [count / 15] * 15) < 36.1
    pairs = Counter(tuple(step.operation for step in each) for each in drawn if len(each) == 2)
    assert chi_square(list(pairs.values()), [lengths[2] / 225] * 225) < 294
    degrees = np.array([s.args[0] for each in drawn for s in each if s.operation is auto_augment.rotate])
    magnitudes = np.abs(degrees) / 3
    assert abs((degrees > 0).mean() - 0.5) < 0.06
    assert abs(np.median(magnitudes) - 9) < 0.07
    assert abs((magnitudes < 8.5).mean() - 0.1587) < 0.045  # one standard deviation below
    assert magnitudes.max() == 10
    assert 0 < (magnitudes == 10).mean() < 0.05


def test_weighted_choice() -> None:
    """timm's weights, and no operation twice on a picture."""
    drawn = policy("rand-m9-p1-tweights").draw(3000, 1)
    first = Counter(each[0].operation for each in drawn)
    weights = auto_augment._RAND_WEIGHTED_0
    expected = {name: 3000 * weight / sum(weights.values()) for name, weight in weights.items()}
    found = [first[auto_augment.NAME_TO_OP[name]] for name in expected]
    assert chi_square(found, list(expected.values())) < 36.1
    assert all(len({step.operation for step in each}) == 2 for each in drawn)


def chi_square(found: list[int], expected: list[float]) -> float:
    return sum((f - e) ** 2 / e for f, e in zip(found, expected, strict=True))


@pytest.mark.parametrize("text", [USUAL, "rand-m9-n3-mstd0.5-tweights"])
def test_function_of_pictures_and_seed(text: str) -> None:
    pictures = noise(16, 3, 20, 24)
    before, ours = pictures.clone(), policy(text, interpolation="random")
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    first = ours(pictures, 2**62 + 5)
    draws = random.random(), np.random.rand(), torch.rand(1).item()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == draws  # the caller's draws are its own
    assert torch.equal(pictures, before)
    assert torch.equal(policy(text, interpolation="random")(pictures, 2**62 + 5), first)
    assert not torch.equal(ours(pictures, 6), first)
    assert first.shape == pictures.shape
    assert first.dtype == torch.uint8


def test_pictures_do_not_touch_each_other() -> None:
    pictures, ours = noise(64, 3, 16, 12), policy("rand-m9-n3-mstd0.5-inc1")
    drawn = ours.draw(64, 3)
    alone = [perform([drawn[i]], pictures[i : i + 1]) for i in range(64)]
    difference = (ours(pictures, 3).int() - torch.cat(alone).int()).abs()
    assert (difference > 2).float().mean() < 1e-3  # sums of several pictures may be taken in another order


@pytest.mark.parametrize("count", [0, 1])
def test_nothing_to_do(count: int) -> None:
    pictures = noise(count, 3, 8, 8)
    assert torch.equal(policy("rand-m9-p0")(pictures, 0), pictures)


def test_no_value_is_read_back() -> None:
    """Tensors without values: whatever would wait for the device fails here."""
    ours = policy("rand-m9-n4-p1-mstd0.5-inc1", interpolation="random")
    operations = {step.operation for each in ours.draw(64, 0) for step in each}
    assert operations == CODES.keys()
    found = ours(torch.empty(64, 3, 24, 20, dtype=torch.uint8, device="meta"), 0)
    assert found.shape == (64, 3, 24, 20)
    assert found.device.type == "meta"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("text", [USUAL, "rand-m7-n4-p1-mstd0.5"])
def test_gpu(text: str) -> None:
    pictures, ours = noise(64, 3, 96, 80), policy(text, interpolation="random")
    on_device = pictures.pin_memory().to("cuda", non_blocking=True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = ours(on_device, 0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert (((found.cpu().int() - ours(pictures, 0).int()).abs()) > 2).float().mean() < 1e-3


# In a run -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "channels", "depth", "expected"),
    [
        (USUAL, 3, 8, True),
        ("rand-m9-tweights", 1, 8, True),
        ("rand-m9-t3a", 3, 8, False),  # blurs
        (USUAL, 4, 8, False),
        (USUAL, 3, 16, False),
        ("original", 3, 8, False),
        ("trivial", 3, 8, False),
        ("", 3, 8, False),
    ],
)
def test_what_can_be_done_on_a_device(text: str, channels: int, depth: int, expected: bool) -> None:
    assert fits(text, channels, depth) == expected
    side = {"median": 40, "q95": 40, "max": 40}
    report: Any = SimpleNamespace(
        task="classify", has_shapes=False, width=side, height=side, channels=channels, depth=depth, pictures=100
    )
    for device, wanted in (("cuda", expected), ("cpu", False)):
        filled, _ = fill(Config(augment=AugmentConfig(policy=text)), (), report, 100, torch.device(device))
        assert filled.augment.on_device == ("yes" if wanted else "no")
    if not expected:
        with pytest.raises(WeftError, match="on_device"):
            DevicePolicy(AugmentConfig(policy=text, on_device="yes"), preprocessing(channels, depth))


def test_readers_leave_the_policy_out() -> None:
    image = to_pillow(clothes()[0])
    left_out = Augmentation(AugmentConfig(policy=USUAL, on_device="yes", color_jitter=0.4), preprocessing())
    without = Augmentation(AugmentConfig(), preprocessing())
    assert all(torch.equal(left_out.picture(image, seed), without.picture(image, seed)) for seed in range(10))


def test_training_and_report_show_the_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reported, seen = [], []
    monkeypatch.setattr(session, "write_report", lambda run, *_: reported.append(run.augmented.pictures))
    prepare = Classify.prepare
    monkeypatch.setattr(Classify, "prepare", lambda *args: seen.append(prepare(*args)) or seen[-1])
    data = make_pictures(tmp_path / "data")
    plain = dict(epochs=1, augment__mixup=0, augment__cutmix=0, augment__erase=0)
    for name, text in (("with", USUAL), ("without", "")):
        tiny_run(data, tmp_path / name, augment__policy=text, augment__on_device="yes", **plain)
    with_policy, without = reported
    assert with_policy.shape == without.shape
    assert with_policy.dtype == torch.uint8
    changed = (with_policy != without).flatten(1).any(1)
    assert 2 <= changed.sum() <= 8  # of 8 pictures three quarters
    first, first_without = seen[0][0], seen[len(seen) // 2][0]
    assert torch.equal((first != first_without).flatten(1).any(1), changed)
