"""Operations of policies on tensors, against timm's on Pillow images."""

import pytest
from PIL import Image
from timm.data import auto_augment

from tests.helpers.made_pictures import picture
from weft.data.augment.ops import TENSOR_OPS
from weft.data.preprocessing import to_channels_first

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
