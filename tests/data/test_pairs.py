"""Pictures with masks and boxes: the geometry against torchvision's, and what must hold for every draw."""

import io
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torchvision import tv_tensors
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as F

from tests.helpers.places import DATA
from weft.config import AugmentConfig
from weft.data.augment.pairs import (
    IGNORE,
    CropView,
    DetectAugmentation,
    SegmentAugmentation,
    align,
    colours,
    draw_colours,
    recolour,
    varied,
)
from weft.data.boxes.objects import Objects
from weft.data.boxes.shapes import draw, encode
from weft.data.preprocessing import Preprocessing
from weft.data.read import MAX_PIXELS, BadPicture, OpenedPicture, header

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
seeds = st.integers(0, 2**62)
sides = st.integers(1, 60)


def preprocessing(**changes: Any) -> Preprocessing:
    usual = dict(size=(0, 0), channels=3, depth=8, mean=MEAN, std=STD, interpolation="bilinear", crop_pct=1.0)
    return Preprocessing(**{**usual, "crop_mode": "fit", "max_pixels": MAX_PIXELS, **changes})  # type: ignore[arg-type]


def scene(height: int, width: int, seed: int = 0, blocks: int = 5) -> tuple[np.ndarray, np.ndarray]:
    """Blocks of a few classes, and a picture whose red channel is 20 times the class: so each shows the other."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 6, (blocks, blocks), dtype=np.uint8)
    mask = coarse[np.arange(height)[:, None] * blocks // height, np.arange(width) * blocks // width]
    picture = np.stack([mask * 20, np.full_like(mask, 9), mask], axis=2)
    return picture, mask


COORDINATES = Preprocessing((0, 0), 2, 32, (-1.0, -1.0), (1.0, 1.0), "bilinear", 1.0, "fit", MAX_PIXELS)


def coordinates(height: int, width: int) -> np.ndarray:
    """A picture that says of each pixel where its centre is: so it shows where resizing brought it."""
    return np.moveaxis(np.indices((height, width)) + 0.5, 0, 2).astype(np.float32)


def rectangles(height: int, width: int, boxes: Any, **changes: Any) -> Objects:
    boxes = np.array(boxes, np.float32).reshape(-1, 4)
    n = len(boxes)
    shapes = []
    for left, top, right, bottom in boxes.astype(int):
        mask = np.zeros((height, width), bool)
        mask[top:bottom, left:right] = True
        shapes.append(encode(mask))
    usual: dict[str, Any] = dict(labels=np.arange(n), crowd=np.zeros(n, bool), area=np.zeros(n, np.float32))
    return Objects(**{"boxes": boxes, **usual, "shapes": shapes, "size": (height, width), **changes})


@st.composite
def views(draw: st.DrawFn) -> tuple[tuple[int, int], CropView]:
    height, width = draw(sides), draw(sides)
    h, w = draw(st.integers(1, height)), draw(st.integers(1, width))
    box = draw(st.integers(0, height - h)), draw(st.integers(0, width - w)), h, w
    size = draw(sides), draw(st.integers(2, 60))  # torch fails at a width of 1, which has a test of its own
    return (height, width), CropView(box, size, draw(st.booleans()), draw(st.booleans()))


def by_torchvision(tensor: Any, view: CropView, **options: Any) -> Any:
    tensor = F.resize(F.crop(tensor, *view.box), list(view.size), **options)
    tensor = F.horizontal_flip(tensor) if view.flip else tensor
    return F.vertical_flip(tensor) if view.vflip else tensor


# -- a view ------------------------------------------------------------------------------------------------------------


@given(views(), seeds)
@settings(max_examples=60, deadline=None)
def test_views_are_torchvisions(drawn: tuple[tuple[int, int], CropView], seed: int) -> None:
    """Pixels and boxes as torchvision moves them; masks as its exact nearest neighbour."""
    (height, width), view = drawn
    rng = np.random.default_rng(seed % 2**32)
    pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    with OpenedPicture(pixels, None) as opened:
        found = view.picture(opened, preprocessing(), "bilinear")
    expected = by_torchvision(tv_tensors.Image(torch.from_numpy(pixels).permute(2, 0, 1)), view, antialias=True)
    assert (found.int() - expected.int()).abs().max() <= 1

    mask = rng.integers(0, 256, (height, width), dtype=np.uint8)
    nearest = by_torchvision(torch.from_numpy(mask)[None], view, interpolation=InterpolationMode.NEAREST_EXACT)[0]
    ties = [(2 * np.arange(n) + 1) * side % (2 * n) == 0 for n, side in zip(view.size, view.box[2:], strict=True)]
    clear = ~(ties[0][:, None] | ties[1])  # torch, in float32, rounds some of the others the wrong way
    assert np.array_equal(view.mask(mask)[clear], nearest.numpy()[clear])

    corners = np.sort(rng.uniform(0, 1, (7, 2, 2)), axis=1) * [width, height]
    boxes = corners.reshape(7, 4).astype(np.float32)
    theirs = tv_tensors.BoundingBoxes(  # type: ignore[call-arg]
        torch.from_numpy(boxes), format="XYXY", canvas_size=(height, width), clamping_mode=None
    )
    np.testing.assert_allclose(view.boxes(boxes), by_torchvision(theirs, view).numpy(), atol=1e-3)


@given(views())
@settings(max_examples=30, deadline=None)
def test_mirrored_twice_is_as_before(drawn: tuple[tuple[int, int], CropView]) -> None:
    (height, width), view = drawn
    _, mask = scene(height, width)
    whole = CropView((0, 0, height, width), (height, width), view.flip, view.vflip)
    assert np.array_equal(whole.mask(whole.mask(mask)), mask)
    boxes = np.array([[0, 0, 0.5, 1], [1, 2, 3, 4]], np.float32)
    np.testing.assert_allclose(whole.boxes(whole.boxes(boxes)), boxes, atol=1e-4)


@given(views())
@settings(max_examples=30, deadline=None)
def test_boxes_lie_around_their_masks(drawn: tuple[tuple[int, int], CropView]) -> None:
    """The pixels of a filled rectangle after any view are those whose centres lie in its box after that view."""
    (height, width), view = drawn
    mask = np.zeros((height, width), bool)
    mask[height // 3 :, width // 4 : width // 2 + 1] = True
    box = np.array([[width // 4, height // 3, width // 2 + 1, height]])
    left, top, right, bottom = view.boxes(box)[0]
    y, x = np.mgrid[: view.size[0], : view.size[1]] + 0.5
    edge = min(np.abs(v - e).min() for v, e in ((x, left), (x, right), (y, top), (y, bottom)))
    if edge > 1e-3:  # else a centre lies on an edge, and belongs to either side
        assert np.array_equal(view.mask(mask), (x > left) & (x < right) & (y > top) & (y < bottom))


# -- pictures and masks ------------------------------------------------------------------------------------------------


@given(sides, sides, sides, sides, seeds, st.sampled_from([0, 1]))
@settings(max_examples=60, deadline=None)
def test_picture_and_mask_stay_together(height: int, width: int, h: int, w: int, seed: int, axis: int) -> None:
    """Of a picture of its own coordinates, whose mask has the rows or the columns for classes."""
    mask = np.indices((height, width))[axis].astype(np.uint8)
    config = AugmentConfig(rescale=[0.5, 2.0], vflip=0.5, interpolation="bilinear")
    found, target = SegmentAugmentation(config, COORDINATES, (h, w)).pair(coordinates(height, width), mask, seed)
    assert found.shape == (2, h, w)
    assert found.is_contiguous()
    assert target.shape == (h, w)
    assert target.dtype == torch.uint8
    padded = target == IGNORE
    assert (found[axis] - target - 0.5)[~padded].abs().max() <= 1  # half a pixel, and more at borders of smaller ones
    assert (found[:, padded] == -1).all()
    assert (found[:, ~padded] > 0).all()


def test_seeds_decide_everything() -> None:
    picture, mask = scene(40, 50)
    boxes = rectangles(40, 50, [[3, 4, 20, 30], [10, 10, 45, 39]])
    config = AugmentConfig(img_size=32, photometric=1.0, vflip=0.5, interpolation="random", short_sides=[24, 32, 40])
    pairs: list[Any] = [
        (SegmentAugmentation(config, preprocessing(), (32, 48)), mask),
        (DetectAugmentation(config, preprocessing()), boxes),
    ]
    for augmentation, target in pairs:
        random.seed(1)
        before = random.random()
        random.seed(1)
        first = [augmentation.pair(picture, target, 2**62 + seed) for seed in range(12)]
        assert random.random() == before
        again = pickle.loads(pickle.dumps(augmentation))  # as workers get it
        for seed in reversed(range(12)):
            repeated = again.pair(picture, target, 2**62 + seed)
            torch.testing.assert_close(repeated, first[seed], rtol=0, atol=0)
        assert len({found.numpy().tobytes() for found, _ in first}) > 9


def test_class_limit() -> None:
    """A picture of sky with a little street: windows that show only one are drawn again."""
    mask = np.zeros((100, 100), np.uint8)
    mask[80:] = 1
    mask[:, :5] = IGNORE
    picture = np.zeros((100, 100, 3), np.uint8)
    shares = {}
    for limit in (0.75, 1.0):
        config = AugmentConfig(rescale=[1.0, 1.0], class_limit=limit)
        targets = [SegmentAugmentation(config, preprocessing(), (40, 40)).pair(picture, mask, s)[1] for s in range(60)]
        shares[limit] = np.mean([varied(target.numpy(), 0.75) for target in targets])
    assert shares[0.75] > 0.7 > 0.3 > shares[1.0]  # one window in six will do, so ten draws find it in five of six
    assert not varied(np.full((3, 3), IGNORE, np.uint8), 0.5)
    assert varied(np.array([[0, 0, 1, 255]], np.uint8), 0.67)
    assert not varied(np.array([[0, 0, 1, 255]], np.uint8), 0.66)


def test_the_factor_is_relative_to_evaluations_size() -> None:
    picture, mask = scene(40, 80)
    config = AugmentConfig(rescale=[1.0, 1.0], flip=0.0, interpolation="bilinear")
    normal = preprocessing(size=(20, 60))
    found, target = SegmentAugmentation(config, normal, (20, 40)).pair(picture, mask, 0)
    assert (found.int() - normal.picture(picture).int()).abs().max() <= 1
    assert torch.equal(target, torch.from_numpy(mask[1::2, 1::2]))


@pytest.mark.parametrize(("dtype", "depth", "channels"), [("uint16", 16, 1), ("uint8", 8, 5), ("float32", 32, 5)])
def test_other_depths_and_channels(dtype: str, depth: int, channels: int, tmp_path: Path) -> None:
    top = 1 if dtype == "float32" else np.iinfo(dtype).max
    np.save(tmp_path / "a.npy", np.full((30, 40, channels), top / 2).astype(dtype))
    normal = preprocessing(depth=depth, channels=channels, mean=(0.25,) * channels, std=(1.0,) * channels)
    config = AugmentConfig(img_size=24, photometric=1.0, interpolation="bicubic")
    _, mask = scene(30, 40)
    found, _ = SegmentAugmentation(config, normal, (64, 64)).pair(tmp_path / "a.npy", mask, 5)
    assert found.dtype == (torch.uint8 if depth == 8 else torch.float32)
    assert found.shape == (channels, 64, 64)
    assert found[0, 63, 63].item() == pytest.approx(64 if depth == 8 else 0.25)
    found, _ = DetectAugmentation(config, normal).pair(tmp_path / "a.npy", rectangles(30, 40, []), 5)
    assert found.shape == (channels, 24, 32)


def test_shrinking_decoder_shows_the_same() -> None:
    smooth = np.random.default_rng(0).integers(0, 256, (12, 16, 3), dtype=np.uint8)
    image, buffer = Image.fromarray(smooth).resize((1600, 1200), Image.Resampling.BICUBIC), io.BytesIO()
    image.save(buffer, "JPEG", quality=95)
    _, mask = scene(1200, 1600)
    config = AugmentConfig(rescale=[0.1, 0.2])
    augmentation = SegmentAugmentation(config, preprocessing(), (96, 96))
    for seed in range(4):
        small, whole = (augmentation.pair(file, mask, seed)[0] for file in (buffer.getvalue(), image))
        assert (small.int() - whole.int()).abs().float().mean() < 3


# -- colours -----------------------------------------------------------------------------------------------------------


def test_colours_are_torchvisions() -> None:
    """Saturation everywhere; hue where turning in RGB and in HSV are the same: by a third of the circle."""
    picture = torch.rand(3, 20, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64) / 2 + 0.25

    def mapped(saturation: float, turn: float) -> torch.Tensor:
        return torch.einsum("ij,jhw->ihw", torch.from_numpy(colours(saturation, turn)), picture)

    for saturation in (0.5, 1.0, 1.3):
        expected = F.adjust_saturation(picture, saturation)
        torch.testing.assert_close(mapped(saturation, 0.0), expected, atol=2e-3, rtol=0)  # its luma is rounded
    for turn in (-1 / 3, 1 / 3):
        torch.testing.assert_close(mapped(1.0, turn), F.adjust_hue(picture, turn), atol=1e-6, rtol=0)
    assert (F.rgb_to_grayscale(mapped(0.0, 0.1)) - mapped(0.0, 0.1)[:1]).abs().max() < 2e-3


@pytest.mark.parametrize("channels", [1, 3, 5])
def test_distortion_is_the_same_at_all_depths(channels: int) -> None:
    eight = torch.randint(0, 256, (channels, 16, 16), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    changed = []
    for seed in range(40):
        found = []
        for picture, depth in ((eight, 8), (eight / 255, 16)):
            random.seed(seed)
            found.append(recolour(picture, draw_colours(1.0, channels, depth), depth))
        assert found[0].dtype == torch.uint8
        torch.testing.assert_close(found[0] / 255, found[1], atol=0.51 / 255, rtol=0)
        changed.append(not torch.equal(found[0], eight))
    assert 0.6 < np.mean(changed) < 1  # one in 4, or in 16, is left as it is
    random.seed(0)
    assert torch.equal(recolour(eight, draw_colours(0.0, channels, 8), 8), eight)


# -- pictures and objects ----------------------------------------------------------------------------------------------


@given(st.integers(8, 60), st.integers(8, 60), st.integers(4, 60), seeds, st.sampled_from(["random", "resize", "cut"]))
@settings(max_examples=90, deadline=None)
def test_objects_follow_the_picture(height: int, width: int, short: int, seed: int, crop: Any) -> None:
    """Boxes and masks lie where the picture, of its own coordinates, says that the objects were."""
    boxes = [[1, 1, width // 2, height - 1], [width // 2, 2, width - 1, height // 2], [0, 0, width, height]]
    cut: Any = dict(crop="resize", cut_short_sides=[10, 40], cut_sides=[6, 30])
    how: Any = cut if crop == "cut" else dict(crop=crop)
    config = AugmentConfig(img_size=short, vflip=0.5, interpolation="bilinear", **how)
    augmentation = DetectAugmentation(config, COORDINATES)
    found, target = augmentation.pair(coordinates(height, width), rectangles(height, width, boxes), seed)
    if crop == "random":
        assert found.shape == (2, short, short)
    assert target["masks"].shape == (len(target["labels"]), *found.shape[1:])
    y, x = found
    for box, label, mask in zip(target["boxes"], target["labels"], target["masks"], strict=True):
        left, top, right, bottom = boxes[label]
        depth = torch.stack([x - left, right - x, y - top, bottom - y]).amin(0)  # how far inside the object
        assert mask[depth > 1].all()
        assert not mask[depth < -1].any()
        assert np.abs(box.numpy() - tight(mask.numpy())).max() <= 1
    assert target["labels"][-1] == 2  # the one that is everywhere


def test_sizes_are_detections() -> None:
    """As torchvision's detection transform: 800 on the short side, at most 1333 on the long one."""
    config = AugmentConfig(short_sides=[800], long_side=1333, flip=0.0)
    for height, width in ((480, 640), (640, 427), (200, 900)):
        found, _ = DetectAugmentation(config, preprocessing(channels=1, mean=(0.5,), std=(0.5,))).pair(
            np.zeros((height, width), np.uint8), rectangles(height, width, []), 0
        )
        scale = min(800 / min(height, width), 1333 / max(height, width))
        assert tuple(found.shape[1:]) == pytest.approx((height * scale, width * scale), abs=0.5)
    drawn = set()
    config = AugmentConfig(short_sides=[16, 24, 32], flip=0.0)
    for seed in range(30):
        drawn.add(
            DetectAugmentation(config, preprocessing()).pair(scene(40, 50)[0], rectangles(40, 50, []), seed)[0].shape[1]
        )
    assert drawn == {16, 24, 32}


def test_half_of_the_pictures_are_cut_as_in_detr() -> None:
    """Resized to 400, 500 or 600, then 384 to 600 of height and width cut, then the short side 480 to 800."""
    config = AugmentConfig(
        short_sides=[480, 800], long_side=1333, cut_short_sides=[400, 500, 600], cut_sides=[384, 600], flip=0.0
    )
    augmentation = DetectAugmentation(config, preprocessing())
    views = []
    for seed in range(600):
        random.seed(seed)
        views.append(augmentation._view((480, 640)))
    cut = [view for view in views if view.box != (0, 0, 480, 640)]
    assert 0.42 < len(cut) / len(views) < 0.58
    assert {view.size for view in views if view not in cut} == {(480, 640), (800, 1067)}
    # What may be cut of a picture of 480 x 640: at 400 x 533, at 500 x 667, and at 600 x 800.
    seen = set()
    for view in cut:
        top, left, height, width = view.box
        assert 0 <= top <= 480 - height
        assert 0 <= left <= 640 - width
        fits = [
            first
            for first, (tall, wide) in {400: (400, 533), 500: (500, 600), 600: (600, 600)}.items()
            if 383 <= height * first / 480 <= tall + 1 and 383 <= width * first / 480 <= wide + 1
        ]
        assert fits
        seen |= set(fits) if len(fits) == 1 else set()
        scale = min(s / side for s, side in zip(view.size, (height, width), strict=True))
        assert min(view.size) in (480, 800)
        assert view.size == pytest.approx((height * scale, width * scale), abs=3)  # the shape is kept
        assert max(view.size) <= 1333
    assert seen == {400, 500, 600}


def test_what_is_left_out() -> None:
    """Crowds, specks, objects outside of the picture and shapes without pixels."""
    boxes = [[5, 5, 20, 20], [5, 5, 20, 20], [5, 5, 5.5, 30], [60, 5, 70, 20], [30, 30, 48, 48]]
    shapes = [*rectangles(50, 50, boxes).shapes[:4], encode(np.zeros((50, 50), bool))]
    objects = rectangles(50, 50, boxes, crowd=np.array([False, True, False, False, False]), shapes=shapes)
    config = AugmentConfig(img_size=50, flip=0.0)
    picture = np.zeros((50, 50, 3), np.uint8)
    _, target = DetectAugmentation(config, preprocessing()).pair(picture, objects, 0)
    assert target["labels"].tolist() == [0]
    assert target["boxes"].tolist() == [boxes[0]]
    _, target = DetectAugmentation(config, preprocessing()).pair(picture, rectangles(50, 50, boxes, shapes=[]), 0)
    assert target["labels"].tolist() == [0, 1, 4]
    assert "masks" not in target
    _, target = DetectAugmentation(config, preprocessing()).pair(picture, rectangles(50, 50, []), 0)
    assert target["boxes"].shape == (0, 4)
    assert target["masks"].shape == (0, 50, 50)


# -- EXIF --------------------------------------------------------------------------------------------------------------

STORED = {  # what a camera writes for an upright scene, by the orientation it claims
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.swapaxes(0, 1),
    6: lambda a: np.rot90(a),
    7: lambda a: a[::-1, ::-1].swapaxes(0, 1),
    8: lambda a: np.rot90(a, -1),
}


def stored(picture: np.ndarray, orientation: int) -> bytes:
    exif, buffer = Image.Exif(), io.BytesIO()
    exif[274] = orientation
    Image.fromarray(np.ascontiguousarray(STORED[orientation](picture))).save(buffer, "PNG", exif=exif)
    return buffer.getvalue()


@pytest.mark.parametrize("orientation", STORED)
def test_masks_and_boxes_follow_exif(orientation: int) -> None:
    """Targets made upright, and those made for the pixels as they are stored where rotation swaps the sides."""
    picture, mask = scene(20, 30)
    upright = rectangles(20, 30, [[3, 4, 10, 18], [11, 0, 30, 7]])
    file = stored(picture, orientation)
    targets = [(mask, upright)]
    if orientation >= 5:
        turned = [np.ascontiguousarray(STORED[orientation](drawn(upright, i))) for i in range(2)]
        boxes = np.array([tight(m) for m in turned], np.float32)
        shapes = [encode(m) for m in turned]
        before = Objects(boxes, upright.labels, upright.crowd, upright.area, shapes, (30, 20))
        targets.append((np.ascontiguousarray(STORED[orientation](mask)), before))
    config = AugmentConfig(img_size=20, interpolation="nearest", rescale=[1.0, 1.0], vflip=0.5)
    for masks, objects in targets:
        found, target = SegmentAugmentation(config, preprocessing(), (20, 30)).pair(file, masks, 3)
        assert torch.equal(found[2], target)
        aligned = align(objects, header(file))
        np.testing.assert_array_equal(aligned.boxes, upright.boxes)
        assert all(np.array_equal(drawn(aligned, i), drawn(upright, i)) for i in range(2))
        expected = DetectAugmentation(config, preprocessing()).pair(picture, upright, 3)
        torch.testing.assert_close(DetectAugmentation(config, preprocessing()).pair(file, objects, 3), expected)


def drawn(objects: Objects, i: int) -> np.ndarray:
    assert objects.size is not None
    return draw(objects.shapes[i], *objects.size)


def tight(mask: np.ndarray) -> list[int]:
    y, x = np.nonzero(mask)
    return [x.min(), y.min(), x.max() + 1, y.max() + 1]


@pytest.mark.parametrize(("orientation", "shape"), [(1, (30, 20)), (3, (30, 20)), (6, (20, 29)), (6, (31, 20))])
def test_other_sizes_name_both(orientation: int, shape: tuple[int, int]) -> None:
    file = stored(scene(20, 30)[0], orientation)
    found = f"{shape[1]} x {shape[0]}.*30 x 20"
    with pytest.raises(BadPicture, match=f"mask.*{found}"):
        align(np.zeros(shape, np.uint8), header(file))
    with pytest.raises(BadPicture, match=f"boxes.*{found}"):
        align(rectangles(*shape, []), header(file))
    anywhere = rectangles(*shape, [], size=None)
    assert align(anywhere, header(file)) is anywhere


def test_real_pictures() -> None:
    folder = DATA
    masks = sorted(folder.rglob("masks/*.png"))[:5]
    if not masks:
        pytest.skip("no masks/*.png under ../shared/data or WEFT_DATA")
    augmentation = SegmentAugmentation(AugmentConfig(photometric=1.0), preprocessing(), (360, 480))
    for file in masks:
        picture = next((file.parents[1] / "images").glob(file.stem + ".*"))
        found, target = augmentation.pair(picture, np.asarray(Image.open(file)), 1)
        assert found.shape[1:] == target.shape == (360, 480)
        assert found.float().std() > 10
