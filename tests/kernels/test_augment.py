"""The kernels of augmentation against their references, in Triton's interpreter and, where one is, on a GPU."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.helpers.kernel_checks import DEVICE
from weft.kernels.ops.augment import BICUBIC, BILINEAR, NEAREST, Code, Step, augment_step
from weft.kernels.ops.mix import Mix, mix_pictures
from weft.kernels.tuning.launches import forced

pytestmark = pytest.mark.filterwarnings("error:The kernel")  # that it does not run here, and its reference did

FILL = (124, 116, 104)
ARGUMENTS = {  # extremes and what lies between
    Code.POSTERIZE: (-1, 0, 3, 8),
    Code.SOLARIZE: (0, 26, 255, 256),
    Code.SOLARIZE_ADD: (0, 99, 128),
    Code.SHEAR_X: (-0.3, 0.0, 0.123),
    Code.SHEAR_Y: (-0.3, 0.0, 0.123),
    Code.TRANSLATE_X: (-0.45, 0.3, 0.5),
    Code.TRANSLATE_Y: (-0.45, 0.3, 0.5),
    Code.ROTATE: (-30.0, 4.2, 27.0),
}


def rows_of(code: Code, mode: int) -> Tensor:
    """(n, 4): the operation with each of its arguments."""
    arguments = np.array(ARGUMENTS.get(code, (0.1, 0.7, 1.0, 1.9)))
    angles = np.radians(arguments) * (code == Code.ROTATE)
    by = np.cos(angles) if code == Code.ROTATE else arguments
    columns = [np.full_like(by, code, dtype=float), by, np.sin(angles), np.full_like(by, mode, dtype=float)]
    return torch.from_numpy(np.stack(columns, axis=1)).float()


def pixels(*shape: int, top: int = 256) -> Tensor:
    return torch.from_numpy(np.random.default_rng(sum(shape)).integers(0, top, shape, dtype=np.uint8))


def compare(pictures: Tensor, rows: Tensor, first: int = 0) -> None:
    """The same values, and at most one off where they were interpolated, which is rare."""
    fill, before = FILL[: pictures.shape[1]], pictures.clone()
    found = augment_step.launch(pictures.to(DEVICE), rows.to(DEVICE), first, fill).cpu()
    difference = (found.int() - augment_step.reference(pictures, rows, first, fill).int()).abs()
    moved = rows[:, first] >= Code.SHEAR_X
    assert found.dtype == torch.uint8
    assert difference[~moved].sum() == 0
    assert not moved.any() or difference[moved].max() <= 1
    assert (difference > 0).float().mean() < 0.01
    assert torch.equal(pictures, before)


@pytest.mark.parametrize("code", Code)
@settings(max_examples=5, derandomize=True)
@given(
    channels=st.sampled_from([1, 3]),
    height=st.integers(1, 30),
    width=st.integers(1, 30),
    mode=st.sampled_from([NEAREST, BILINEAR, BICUBIC]),
    top=st.sampled_from([1, 3, 100, 256]),
)
def test_step(code: Code, channels: int, height: int, width: int, mode: int, top: int) -> None:
    rows = rows_of(code, mode)
    compare(pixels(len(rows), channels, height, width, top=top), rows)


@pytest.mark.parametrize("code", [Code.CONTRAST, Code.AUTO_CONTRAST, Code.EQUALIZE, Code.SHARPNESS, Code.ROTATE])
def test_more_pixels_than_a_block(code: Code) -> None:
    with forced(dict(BLOCK=64)):
        rows = rows_of(code, BICUBIC)
        compare(pixels(len(rows), 3, 11, 13), rows)


def test_each_picture_has_its_own_step_anywhere_in_its_row() -> None:
    rows = torch.cat([rows_of(code, BICUBIC)[:1] for code in Code])
    packed = torch.full((len(rows), 11), 7.0)
    packed[:, 5 : 5 + len(Step)] = rows
    pictures = pixels(len(rows), 3, 9, 14)
    compare(pictures, packed, first=5)
    compare(pictures, packed[:, 3:], first=2)  # of which rows are further apart than they are long


def test_neither_pictures_nor_order_of_memory_matter() -> None:
    rows = rows_of(Code.COLOR, BICUBIC)
    assert augment_step.launch(pixels(0, 3, 4, 4).to(DEVICE), rows[:0].to(DEVICE), 0, FILL).shape == (0, 3, 4, 4)
    compare(pixels(len(rows), 3, 6, 5).to(memory_format=torch.channels_last), rows)


# Normalising, erasing, mixing -----------------------------------------------------------------------------------


@settings(max_examples=25, derandomize=True)
@given(
    shape=st.tuples(st.integers(0, 5), st.integers(1, 4), st.integers(1, 20), st.integers(1, 20)),
    erases=st.booleans(),
    kind=st.sampled_from(["none", "mixup", "cutmix", "nothing"]),
    boxes=st.tuples(*[st.integers(0, 25)] * 4),
)
def test_mix(shape: tuple[int, ...], erases: bool, kind: str, boxes: tuple[int, ...]) -> None:
    rows = torch.zeros(shape[0], 3 + Mix.COLUMNS)[:, 3:]  # of which rows are further apart than they are long
    rows[:, : Mix.KEPT] = torch.tensor(boxes).sort()[0][[0, 2, 1, 3]] * torch.rand(shape[0], 4)
    rows[:, Mix.KEPT], rows[:, Mix.GIVEN] = (1, 0) if kind == "nothing" else (0.3, 0.7)
    if kind == "cutmix":
        rows[:, Mix.CUT :] = torch.tensor(boxes).sort()[0][[0, 2, 1, 3]]
    statistics = torch.rand(2, shape[1], 1, 1) / 2 + 0.2
    tensors = [pixels(*shape), rows, *statistics, torch.randn(shape) if erases else None]
    there = [None if tensor is None else tensor.to(DEVICE) for tensor in tensors]
    found = mix_pictures.launch(*there, kind != "none").cpu()
    torch.testing.assert_close(found, mix_pictures.reference(*tensors, kind != "none"), rtol=2e-6, atol=2e-6)
