"""Boxes that are cut out and resized by the kernel, next to torch's antialiased `interpolate`."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.data.preprocessing import resize
from weft.kernels.ops.crop import MODES, crop_resize, reference_crop, resize_in_float

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
sides = st.integers(1, 40)


@st.composite
def rows_in(draw, height: int, width: int, window: tuple[int, int]) -> list[int]:
    """A box within a picture of this size, whether it is mirrored, an interpolation, and its part of a window."""
    h, w = draw(st.integers(1, height)), draw(st.integers(1, width))
    top, left = draw(st.integers(0, height - h)), draw(st.integers(0, width - w))
    mirrored, mode = [draw(st.integers(0, 1)), draw(st.integers(0, 1))], draw(st.integers(0, len(MODES) - 1))
    return [
        top,
        left,
        h,
        w,
        *mirrored,
        mode,
        *(draw(st.sampled_from([side, draw(st.integers(1, side))])) for side in window),
    ]


@pytest.mark.filterwarnings("error:The kernel")
@settings(max_examples=25)
@given(st.data(), st.integers(1, 4), st.sampled_from([1, 3]), st.integers(2, 20), st.integers(2, 20))
def test_kernel_is_within_one_of_the_reference(data, batch, channels, height, width):
    sizes = [(data.draw(sides), data.draw(sides)) for _ in range(batch)]
    rows = torch.tensor([data.draw(rows_in(*size, (height, width))) for size in sizes], dtype=torch.float32)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    lengths = torch.tensor([channels * h * w for h, w in sizes])
    pixels = torch.randint(0, 256, (int(lengths.sum()),), generator=generator, dtype=torch.uint8)
    args = pixels, lengths.cumsum(0) - lengths, torch.tensor(sizes), rows
    most = max(h for h, _ in sizes)
    expected = reference_crop(*args, channels, height, width, most)
    found = crop_resize.run(*(x.to(DEVICE) for x in args), channels, height, width, most).cpu()
    assert (found.int() - expected.int()).abs().max() <= 1


@pytest.mark.filterwarnings("error:The kernel")
@pytest.mark.parametrize("mode", range(len(MODES)))
@pytest.mark.parametrize("shown", [(13, 17), (19, 7), (29, 31)])
def test_kernel_is_seldom_off(mode, shown):
    """Where sides have a common divisor many values lie half way between two bytes, and either is right; not here."""
    size, start = torch.tensor([[37, 41]]), torch.zeros(1, dtype=torch.int64)
    pixels = torch.randint(0, 256, (3 * 37 * 41,), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    row = torch.tensor([[2.0, 5, 23, 36, 1, 0, mode, *shown]])
    args = pixels, start, size, row
    expected = reference_crop(*args, 3, 29, 31, 37)
    found = crop_resize.run(*(x.to(DEVICE) for x in args), 3, 29, 31, 37).cpu()
    assert (found != expected).float().mean() <= 0.02


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [[8, 9], [40, 31], [19, 23]])
def test_reference_without_bytes_is_within_one(mode, size):
    """On a GPU torch resizes no bytes, so that the reference computes in floating point there."""
    picture = torch.randint(0, 256, (1, 3, 19, 23), dtype=torch.uint8)
    expected = torch.nn.functional.interpolate(picture, size, mode=mode, antialias=True)
    assert (resize_in_float(picture, size, mode).int() - expected.int()).abs().max() <= 1


@pytest.mark.parametrize("mode", MODES)
def test_a_width_of_one_is_resized(mode):
    """Which torch gets wrong, so that readers ask Pillow."""
    picture = torch.randint(0, 256, (3, 19, 1), dtype=torch.uint8)
    row = torch.tensor([[0.0, 0, 19, 1, 0, 0, MODES.index(mode), 8, 1]])
    start, size = torch.zeros(1, dtype=torch.int64), torch.tensor([[19, 1]])
    found = reference_crop(picture.flatten(), start, size, row, 3, 8, 1, 19)[0]
    assert (found.int() - resize(picture, (8, 1), mode).int()).abs().max() <= 1


@pytest.mark.parametrize("mode", MODES)
def test_reference_is_what_readers_do(mode):
    """The same box by the function that readers resize with."""
    picture = torch.randint(0, 256, (3, 19, 23), dtype=torch.uint8)
    row = torch.tensor([[4.0, 2, 13, 17, 1, 0, MODES.index(mode), 8, 9]])
    start, size = torch.zeros(1, dtype=torch.int64), torch.tensor([[19, 23]])
    found = reference_crop(picture.flatten(), start, size, row, 3, 10, 9, 19)[0]
    assert torch.equal(found[:, :8], resize(picture[:, 4:17, 2:19], (8, 9), mode).flip(2))
    assert not found[:, 8:].any()
