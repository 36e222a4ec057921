"""Preprocessing and augmentation against timm's, picture by picture."""

import io
import pickle
import random

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import auto_augment, create_transform
from timm.data.mixup import Mixup, cutmix_bbox_and_lam, mixup_target
from timm.data.random_erasing import RandomErasing
from timm.data.transforms import RandomResizedCropAndInterpolation

from tests.helpers.places import DATA
from weft.config import AugmentConfig
from weft.data.augment.mix import BatchAugmentation, cut_box, erased_box
from weft.data.augment.ops import TENSOR_OPS
from weft.data.augment.picture import Augmentation, random_box
from weft.data.preprocessing import Preprocessing, resize, to_channels_first
from weft.data.read import MAX_PIXELS, BadPicture
from weft.errors import WeftError

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
RNG = np.random.default_rng(0)


def picture(height: int, width: int, seed: int = 0) -> Image.Image:
    """Noise on a few scales, so that every way to resize and to round shows."""
    rng = np.random.default_rng(seed)
    layers = [Image.fromarray(rng.integers(0, 256, (n, n, 3), dtype=np.uint8)).resize((width, height)) for n in (4, 40)]
    return Image.blend(*layers, 0.5)


def preprocessing(**changes: object) -> Preprocessing:
    usual = dict(size=(32, 32), channels=3, depth=8, mean=MEAN, std=STD, interpolation="bicubic", crop_pct=0.875)
    return Preprocessing(**{**usual, "crop_mode": "center", "max_pixels": MAX_PIXELS, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(50, 70), (71, 50), (224, 224), (20, 13)])
@pytest.mark.parametrize("crop_mode", ["center", "squash"])
@pytest.mark.parametrize(("crop_pct", "interpolation"), [(0.875, "bicubic"), (1.0, "bilinear"), (0.9, "lanczos")])
def test_evaluation_is_timms_bit_for_bit(shape, crop_mode, crop_pct, interpolation) -> None:
    image = picture(*shape)
    ours = preprocessing(crop_mode=crop_mode, crop_pct=crop_pct, interpolation=interpolation)
    theirs = create_transform(
        32, mean=MEAN, std=STD, crop_pct=crop_pct, crop_mode=crop_mode, interpolation=interpolation
    )
    torch.testing.assert_close(ours.normalise(ours.picture(image)[None])[0], theirs(image), rtol=0, atol=0)
    assert torch.equal(ours.picture(np.asarray(image)), ours.picture(image))


def test_evaluation_of_other_than_squares() -> None:
    """As timm, which takes bilinear here whatever was asked for."""
    ours = preprocessing(size=(24, 40), interpolation="bilinear")
    theirs = create_transform((24, 40), mean=MEAN, std=STD, crop_pct=0.875, interpolation="bilinear")
    for shape in ((50, 70), (90, 60), (24, 40)):
        image = picture(*shape)
        assert torch.equal(ours.normalise(ours.picture(image)[None])[0], theirs(image))


@pytest.mark.parametrize("shape", [(480, 640), (427, 640), (640, 333), (100, 900), (9, 700), (37, 37)])
def test_fitting_is_detections_up_to_rounding(shape: tuple[int, int]) -> None:
    """torchvision's detection models resize by the same factor, and round down where we round to the nearest."""
    from torchvision.models.detection.transform import GeneralizedRCNNTransform

    ours = preprocessing(size=(60, 100), crop_mode="fit", interpolation="bilinear")
    theirs = GeneralizedRCNNTransform(60, 100, [0.0] * 3, [1.0] * 3)
    image = picture(*shape)
    (_, height, width), expected = ours.picture(image).shape, theirs.resize(torch.zeros(3, *shape))[0].shape[1:]
    assert (height, width) == ours.fitted(*shape)
    assert all(0 <= side - other <= 1 for side, other in zip((height, width), expected, strict=True))
    resized = image.resize((width, height), Image.Resampling.BILINEAR)
    assert torch.equal(ours.picture(image), to_channels_first(resized, 8))
    kept = preprocessing(size=(0, 0), crop_mode="fit")
    assert torch.equal(kept.picture(image), to_channels_first(image, 8))
    deep = preprocessing(size=(60, 100), crop_mode="fit", depth=16, channels=5)
    assert deep.picture(np.zeros((*shape, 5), np.uint16)).shape == (5, height, width)


def test_evaluation_of_real_pictures() -> None:
    folder = DATA
    files = sorted(folder.rglob("*.JPEG"))[:10]
    if not files:
        pytest.skip("no JPEGs under ../shared/data or WEFT_DATA")
    ours, theirs = preprocessing(size=(224, 224)), create_transform(224, mean=MEAN, std=STD, interpolation="bicubic")
    for file in files:
        expected = theirs(Image.open(file).convert("RGB"))
        assert torch.equal(ours.normalise(ours.picture(file)[None])[0], expected)


@pytest.mark.parametrize(("dtype", "depth", "top"), [("uint16", 16, 65535), ("float32", 32, 1), ("uint8", 8, 255)])
@pytest.mark.parametrize("channels", [1, 5])
def test_other_depths_and_channels(dtype: str, depth: int, top: int, channels: int) -> None:
    plain = (np.linspace(0.1, 0.9, channels) * top).astype(dtype)
    array = np.broadcast_to(plain, (40, 50, channels)).copy()
    normal = preprocessing(depth=depth, channels=channels, mean=(0.5,) * channels, std=(0.25,) * channels)
    for tensor in (normal.picture(array), Augmentation(AugmentConfig(), normal).picture(array, 3)):
        assert tensor.shape == (channels, 32, 32)
        assert tensor.dtype == (torch.uint8 if depth == 8 else torch.float32)
        expected = (torch.tensor(plain.astype(np.float64) / top) - 0.5) / 0.25
        torch.testing.assert_close(normal.normalise(tensor[None])[0, :, 9, 9].double(), expected, atol=1e-5, rtol=0)


def test_depths_meet_in_the_same_range() -> None:
    eight, sixteen = np.array([[0, 128, 255]], np.uint8), np.array([[0, 128 * 257, 65535]], np.uint16)
    assert torch.equal(to_channels_first(sixteen, 8), to_channels_first(eight, 8))
    assert torch.equal(to_channels_first(sixteen, 16), to_channels_first(eight, 16))
    with pytest.raises(BadPicture, match="floating"):
        to_channels_first(np.zeros((1, 1), np.float32), 8)


def test_preprocessing_survives_json() -> None:
    assert Preprocessing.from_dict(preprocessing().to_dict()) == preprocessing()
    with pytest.raises(WeftError, match="interpolation"):
        Preprocessing.from_dict({"size": [3, 3]})


@pytest.mark.parametrize("size", [(50, 70), (10, 300), (300, 10), (1, 1)])
def test_random_box_is_timms(size: tuple[int, int]) -> None:
    image = Image.new("L", size[::-1])
    for seed in range(50):
        random.seed(seed)
        expected = RandomResizedCropAndInterpolation.get_params(image, (0.08, 1), (3 / 4, 4 / 3))
        random.seed(seed)
        assert random_box(size, [0.08, 1], [3 / 4, 4 / 3]) == expected


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear", "lanczos", "nearest"])
def test_training_crop_is_timms_up_to_rounding(interpolation: str) -> None:
    image = picture(90, 120)
    config = AugmentConfig(interpolation=interpolation, flip=0.0)
    theirs = RandomResizedCropAndInterpolation(32, interpolation=interpolation)
    for seed in range(8):
        random.seed(seed)
        expected = torch.from_numpy(np.array(theirs(image))).permute(2, 0, 1)
        difference = (Augmentation(config, preprocessing()).picture(image, seed).int() - expected.int()).abs()
        assert difference.max() <= 2
        assert difference.float().mean() < 0.05


def test_shrinking_decoder_shows_the_same() -> None:
    buffer = io.BytesIO()
    picture(900, 1200).save(buffer, "JPEG", quality=95)
    augmentation = Augmentation(AugmentConfig(scale=[0.5, 1.0]), preprocessing(size=(96, 96)))
    for seed in range(5):
        small, whole = augmentation.picture(buffer.getvalue(), seed), augmentation.picture(picture(900, 1200), seed)
        assert (small.int() - whole.int()).abs().float().mean() < 5


@pytest.mark.parametrize("crop", ["random-resized", "random", "resize"])
def test_crops_have_the_size(crop: str) -> None:
    for shape in ((32, 32), (10, 50), (50, 10), (100, 90)):
        config = AugmentConfig(crop=crop, pad=4, interpolation="random", vflip=0.5)  # type: ignore[arg-type]
        assert Augmentation(config, preprocessing()).picture(picture(*shape), 1).shape == (3, 32, 32)


POLICIES = [
    "rand-m9-mstd0.5-inc1",
    "rand-m9-n3-mstd0.5-tweights",
    "original",
    "v0r-mstd0.5",
    "3a",
    "augmix-m3",
    "trivial",
]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("channels", [1, 3])
def test_augmentation_is_a_function_of_the_seed(policy: str, channels: int) -> None:
    normal = preprocessing(channels=channels, mean=MEAN[:channels], std=STD[:channels])
    augmentation = Augmentation(AugmentConfig(policy=policy, color_jitter=0.4), normal)
    image = picture(40, 50)
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    before = random.random(), np.random.rand(), torch.rand(1).item()
    first = [augmentation.picture(image, 2**62 + seed) for seed in range(20)]
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    augmentation.picture(image, 5)
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == before  # the caller's draws are its own
    again = pickle.loads(pickle.dumps(augmentation))  # as workers get it
    assert all(torch.equal(again.picture(image, 2**62 + seed), first[seed]) for seed in reversed(range(20)))
    assert len({tensor.numpy().tobytes() for tensor in first}) == 20


BICUBIC = dict(fillcolor=(124, 116, 104), resample=Image.Resampling.BICUBIC)
BILINEAR = dict(fillcolor=(124, 116, 104), resample=Image.Resampling.BILINEAR)
LEVELS = {
    "invert": [()],
    "posterize": [(1,), (3,), (7,)],
    "solarize": [(0,), (77,), (256,)],
    "solarize_add": [(0,), (40,), (110,)],
    "brightness": [(0.1,), (0.73,), (1.0,), (1.9,)],
    "shear_x": [(-0.29765432,), (0.11235813,)],
    "shear_y": [(-0.29765432,), (0.11235813,)],
    "translate_x_rel": [(-0.45,), (0.21345678,), (0.0,)],
    "translate_y_rel": [(-0.45,), (0.21345678,)],
    "translate_x_abs": [(-100.0,), (7.31702175,), (900.0,)],
    "translate_y_abs": [(-100.0,), (7.31702175,), (900.0,)],
}


@pytest.mark.parametrize("slow", TENSOR_OPS, ids=lambda op: op.__name__)
def test_operations_on_tensors_are_timms(slow) -> None:
    image = picture(60, 80)
    tensor = to_channels_first(image, 8).contiguous()
    for args in LEVELS[slow.__name__]:
        for options in (BICUBIC, BILINEAR):
            expected = to_channels_first(slow(image, *args, **dict(options)), 8).int()
            difference = (TENSOR_OPS[slow](tensor, *args, **options).int() - expected).abs()
            moved = slow.__name__[:5] in ("shear", "trans")
            assert difference.max() <= moved
            assert (difference > 0).float().mean() < 1e-3


def test_no_bit_left_is_black() -> None:
    tensor = to_channels_first(picture(8, 8), 8)
    assert not TENSOR_OPS[auto_augment.posterize](tensor, 0).any()


def test_resizing_is_pillows_up_to_rounding() -> None:
    image = picture(100, 120)
    for mode in ("bilinear", "bicubic"):
        for size in ((32, 32), (150, 130), (100, 40), (1, 30), (30, 1), (1, 1)):
            expected = to_channels_first(resize(image, size, mode), 8)
            assert (resize(to_channels_first(image, 8), size, mode).int() - expected.int()).abs().max() <= 2


@pytest.mark.parametrize(
    ("config", "changes", "words"),
    [
        (dict(policy="rnd-m9"), {}, "Did you mean 'rand'"),
        (dict(policy="rand-q9"), {}, "not one of timm"),
        (dict(policy="rand-m9"), dict(depth=16), "16 bits"),
        (dict(color_jitter=0.4), dict(channels=5), "5 channels"),
    ],
)
def test_policies_that_do_not_fit_are_refused(config: dict, changes: dict, words: str) -> None:
    with pytest.raises(WeftError, match=words):
        Augmentation(AugmentConfig(**config), preprocessing(**changes))


# -- whole batches -----------------------------------------------------------------------------------------------------


def batch(n: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(n, 3, 24, 20, generator=generator), torch.arange(n) % 5


@pytest.mark.parametrize("kind", ["mixup", "cutmix", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_mixing_is_timms(kind: str, smoothing: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """timm's Mixup with our draws in the place of its own."""
    config = AugmentConfig(mixup=0.8, cutmix=1.0, switch_prob=float(kind == "cutmix"), mix_prob=float(kind != "none"))
    ours = BatchAugmentation(config, smoothing, 5, False)
    for seed in range(5):
        pictures, labels = batch()
        lam, box = ours.draw(np.random.default_rng(seed), 24, 20)
        theirs = Mixup(0.8, 1.0, label_smoothing=smoothing, num_classes=5)
        monkeypatch.setattr(theirs, "_params_per_batch", lambda lam=lam, box=box: (lam, box is not None))
        monkeypatch.setattr("timm.data.mixup.cutmix_bbox_and_lam", lambda *_, lam=lam, box=box, **__: (box, lam))
        before = pictures.clone()
        found = ours(pictures, labels, seed)
        assert torch.equal(pictures, before)
        for mine, expected in zip(found, theirs(pictures, labels), strict=True):
            torch.testing.assert_close(mine, expected, rtol=0, atol=1e-6)


def test_cut_boxes_are_timms(monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(50):
        lam, y, x = RNG.random(), int(RNG.integers(24)), int(RNG.integers(20))
        draws = iter((y, x))
        monkeypatch.setattr(np.random, "randint", lambda *_, draws=draws, **__: next(draws))
        assert cut_box(lam, 24, 20, y, x) == tuple(cutmix_bbox_and_lam((24, 20), lam)[0])


def test_erasing_has_timms_statistics() -> None:
    """Share of pictures erased, and mean area: ours and timm's over many draws."""
    pictures = torch.zeros(2000, 1, 20, 24)
    ours, _ = BatchAugmentation(AugmentConfig(erase=0.4), 0.0, 5, False)(pictures, torch.zeros(2000).long(), 0)
    random.seed(0)
    theirs = RandomErasing(0.4, mode="pixel", device="cpu")(pictures.clone())
    for erased in (ours, theirs):
        hit = (erased != 0).flatten(1).any(1)
        assert abs(hit.float().mean() - 0.4) < 0.03
        assert abs(erased[erased != 0].std() - 1) < 0.02
    areas = [(erased != 0).float().flatten(1).mean(1) for erased in (ours, theirs)]
    assert abs(areas[0].mean() - areas[1].mean()) < 0.006
    assert not pictures.any()
    boxes = [erased_box(np.random.default_rng(seed), 20, 24) for seed in range(200)]
    assert all(b is not None and 0 <= b[0] < b[1] <= 20 and 0 <= b[2] < b[3] <= 24 for b in boxes)


def test_labels_without_mixing() -> None:
    pictures, labels = batch()
    assert BatchAugmentation(AugmentConfig(), 0.0, 5, False)(pictures, labels, 0)[1] is labels
    smooth = BatchAugmentation(AugmentConfig(), 0.1, 5, False)(pictures, labels, 0)[1]
    torch.testing.assert_close(smooth, mixup_target(labels, 5, smoothing=0.1))


def test_several_labels_per_picture_mix() -> None:
    pictures, _ = batch()
    labels = torch.randint(0, 2, (8, 5)).float()
    ours = BatchAugmentation(AugmentConfig(mixup=1.0), 0.1, 5, True)
    lam, _ = ours.draw(np.random.default_rng(4), 24, 20)
    smooth = labels * 0.9 + 0.05
    torch.testing.assert_close(ours(pictures, labels, 4)[1], lam * smooth + (1 - lam) * smooth.flip(0))
