"""ResNet as first published: against torchvision with its strides moved, and with real weights on real pictures."""

import io
import zipfile

import pytest
import timm
import torch
import torchvision
from PIL import Image
from torchvision.transforms.v2.functional import normalize, pil_to_tensor

import weft  # noqa: F401  registers the models
from tests.conftest import randomise
from tests.helpers.places import DATA
from weft.models.weights.convert import load_weights
from weft.run.build import load_init

WEIGHTS = DATA / "resnet50-imagenet" / "resnet50_v1_fp16.safetensors"
PICTURES = DATA / "imagenette-subset" / "val.zip"
IMAGENETTE = [0, 217, 482, 491, 497, 566, 569, 571, 574, 701]  # its classes in ImageNet, in the order of their folders


@pytest.mark.parametrize(("name", "theirs"), [("resnet50_v1", "resnet50"), ("resnet101_v1", "resnet101")])
def test_is_torchvisions_with_other_strides(name, theirs):
    expected = randomise(getattr(torchvision.models, theirs)())
    for stage in (expected.layer2, expected.layer3, expected.layer4):
        stage[0].conv1.stride, stage[0].conv2.stride = (2, 2), (1, 1)
    ours = timm.create_model(name).eval()
    ours.load_state_dict(expected.state_dict())
    picture = torch.randn(1, 3, 57, 70)
    with torch.no_grad():
        torch.testing.assert_close(ours(picture), expected(picture), rtol=1e-4, atol=1e-4)


def test_real_weights_on_real_pictures():
    """79.3 % of all 800 pictures are put right among the 1000 classes, with torchvision's strides some 66 %."""
    if not (WEIGHTS.is_file() and PICTURES.is_file()):
        pytest.skip(f"{WEIGHTS} or {PICTURES} is not there; WEFT_DATA names the folder that holds their folders")
    model = timm.create_model("resnet50_v1").eval()
    assert load_init(model, load_weights(WEIGHTS), WEIGHTS.name) == []
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    with zipfile.ZipFile(PICTURES) as archive:
        names = sorted(name for name in archive.namelist() if name.endswith(".JPEG"))
        folders = sorted({name.split("/")[0] for name in names})
        chosen = names[::20]  # four of each class
        pictures = torch.stack([pil_to_tensor(Image.open(io.BytesIO(archive.read(name)))) for name in chosen])
    cfg = model.pretrained_cfg
    labels = torch.tensor([IMAGENETTE[folders.index(name.split("/")[0])] for name in chosen])
    with torch.no_grad():
        logits = model(normalize(pictures / 255, cfg["mean"], cfg["std"]))
    assert (logits.argmax(1) == labels).float().mean() > 0.7
    among_ten = torch.tensor(IMAGENETTE)[logits[:, IMAGENETTE].argmax(1)]
    assert (among_ten == labels).float().mean() > 0.95


@pytest.mark.parametrize(("classes", "changed"), [(7, ["fc.bias and fc.weight for other classes: new"]), (0, [])])
def test_weights_start_other_classifiers_and_backbones(classes, changed):
    if not WEIGHTS.is_file():
        pytest.skip(f"{WEIGHTS} is not there; WEFT_DATA names the folder that holds its folder")
    model = timm.create_model("resnet50_v1", num_classes=classes)
    assert load_init(model, load_weights(WEIGHTS), WEIGHTS.name) == changed
