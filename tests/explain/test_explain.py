"""`weft explain`: what it writes, for every task, and what it says where something is wrong."""

import json
import math
import re
import weakref
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import nn

import weft
from tests.helpers.small_runs import dense, make_pictures, make_squares, refused, tiny_run
from tools import gallery
from weft.data.given import GivenPictures
from weft.data.preprocessing import Preprocessing
from weft.explain import AttentionNumbers, Measure, Similarity
from weft.explain.compare import explain_subjects
from weft.explain.exhibits import READING, Curve, Lines, Matrix, Panel, Sheet, exhibits, reading, title
from weft.explain.explain import _answers, explain, similarity_between
from weft.explain.explanation import Explanation, HeadMaps, PictureView
from weft.explain.figures import _ending, draw, write_figures
from weft.explain.heat import INK, as_panel, draw_cross, draw_squares, heat_over, heat_panel
from weft.explain.page import _chart
from weft.explain.pictures import find_masks, label_of, read_pictures
from weft.explain.saliency import grad_cam
from weft.report.figures import FORMATS, INKS
from weft.run.subjects import open_subject, open_subjects, told_apart


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    return make_pictures(tmp_path_factory.mktemp("explain") / "pictures", each=4, side=24)


@pytest.fixture(scope="module")
def run(pictures):
    return tiny_run(pictures, pictures.parent / "run", epochs=1, img_size=24).folder


# The command --------------------------------------------------------------------------------------------------------


def test_from_a_run_to_page_figures_and_numbers(run, pictures, tmp_path, command, monkeypatch):
    monkeypatch.setattr("weft.explain.explain.CLOSELY", 1)  # drawing takes the time
    monkeypatch.setitem(FORMATS, "png", {"dpi": 60})
    (tmp_path / "broken.png").write_bytes(b"no picture")
    masks = tmp_path / "masks"
    masks.mkdir()
    for number in range(4):
        Image.fromarray(np.pad(np.full((12, 12), 255, np.uint8), 6)).save(masks / f"{number}.png")
    out, shown_files = tmp_path / "out", (pictures / "class 0", tmp_path / "broken.png")
    code, text, err = command("explain", run, *shown_files, "--masks", masks, "--against", "ceit_nano", "--out", out)
    assert code == 1, err  # one is unreadable
    assert "cvt_nano: 4 pictures, 1 unreadable" in text
    assert f"Wrote {out / 'explain.html'}" in text
    parts = ["Grad-CAM and attention, 4 pictures", "receptive fields", "similarity of layers"]
    parts += ["robustness to scale and shift"]
    said = [f"{name}: {part}" for name in ("cvt_nano", "ceit_nano, random weights") for part in parts]
    assert err.splitlines()[:-1] == said
    assert re.fullmatch(r"\d\d figures", err.splitlines()[-1])

    page = (out / "explain.html").read_text(encoding="utf-8")
    assert "ceit_nano, random weights:</b> nothing of it is learned" in page
    assert "broken.png" in page
    assert not re.search(r"(?:src|href)=\"(?!data:|#)", page)  # it stands alone

    content = json.loads((out / "explain.json").read_text(encoding="utf-8"))
    ours, other = content["models"]
    assert (ours["model"], ours["trained"], ours["pictures"]) == ("cvt_nano", True, 4)
    assert (other["model"], other["trained"]) == ("ceit_nano, random weights", False)
    assert [len(model["shown"]) for model in content["models"]] == [4, 4]
    assert ours["shown"][0]["truth"] == "class 0"
    assert np.shape(ours["shown"][0]["grad_cam"]["stages.2.embed"]) == (3, 3)
    area = 12**2 / 24**2  # of the masks, which even attention hits
    assert ours["attention"][0]["foreground"]["uniform"] == pytest.approx(area, abs=0.02)
    assert ours["attention"][0]["contrast"]["uniform"] == 1
    assert {row["kind"] for row in ours["robustness"]} == {"scale", "shift"}
    assert content["similarity_between"]["rows"] != content["similarity_between"]["columns"]

    kinds = {
        "grad-cam",
        "rollout",
        "receptive-field",
        "distance",
        "local-ratio",
        "entropy",
        "foreground",
        "scale",
        "shift",
    }
    for kind in kinds:
        assert Image.open(out / f"{kind}.png").width > 90
        assert "svg" in ElementTree.parse(out / f"{kind}.svg").getroot().tag
    assert len(list(out.glob("heads-*.svg"))) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere/run", "x.png"], ["nowhere/run does not exist", "run or model folder"]),
        (["cvt_13x", "x.png"], ["no model 'cvt_13x'", "Did you mean 'cvt_13'"]),
        (["RUN"], ["No pictures given"]),
        (["RUN", "missing.png"], ["No picture can be read", "missing.png"]),
        (["RUN", "BROKEN"], ["No picture can be read", "broken.png"]),
        (["RUN", "PICTURES", "--layer", "stages.9"], ["no layer 'stages.9'"]),
        (["RUN", "PICTURES", "--layer", "head"], ["no map of the picture"]),
        (["RUN", "PICTURES", "--masks", "nothing"], ["nothing is not a folder; --masks"]),
        (["RUN", "PICTURES", "--masks", "RUN"], ["has no mask for any of the pictures"]),
        (["RUN", "PICTURES", "--of", "class 9"], ["no class 'class 9'", "Did you mean 'class"]),
        (["RUN", "PICTURES", "--out", "RUN"], ["already exists"]),
        (["RUN", "PICTURES", "--device", "tpu9"], ["tpu9"]),
    ],
)
def test_bad_input_gets_one_line(arguments, words, run, pictures, tmp_path, command):
    (tmp_path / "broken.png").write_bytes(b"no picture")
    known = {"RUN": run, "PICTURES": pictures, "BROKEN": tmp_path / "broken.png"}
    out = [] if "--out" in arguments else ["--out", tmp_path / "out"]
    refused(command("explain", *(known.get(word, word) for word in arguments), *out), *words)
    assert not (tmp_path / "out").exists()


# In Python ----------------------------------------------------------------------------------------------------------


def test_a_loaded_model_explains_itself_and_stays_as_it_is(run, pictures):
    model = weft.load(run, "cpu")
    before = model.predict(str(pictures))
    explained = model.explain(str(pictures / "class 2"), layers=["stages.0", "stages.1"], against=weft.load(run, "cpu"))
    assert model.predict(str(pictures)) == before
    assert [e.subject.name for e in explained.explanations] == ["cvt_nano (1)", "cvt_nano (2)"]
    assert list(explained.explanations[0].views[0].cams) == ["stages.0", "stages.1"]
    np.testing.assert_allclose(np.diag(explained.cross.cka), 1, atol=1e-6)  # a model beside itself
    first, second = (e.fields for e in explained.explanations)
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one.values, other.values)


@pytest.mark.parametrize("task", ["segment", "detect"])
def test_what_applies_to_masks_and_boxes(task, tmp_path):
    head, layout = {"segment": ("fpn", "masks"), "detect": ("faster-rcnn", "coco")}[task]
    data = make_squares(tmp_path / "data", layout, count=6)
    tiny_run(data, tmp_path / "run", **dense(head, epochs=1))
    files = data / ("images" if task == "segment" else "train2017")
    (explanation,) = weft.load(tmp_path / "run", "cpu").explain(str(files)).explanations
    assert explanation.fields
    assert explanation.attention[0].name == "stages.0.blocks.0.attn"  # as in the backbone
    assert explanation.similarity is not None
    assert explanation.similarity.rows[0] == "stages.0.blocks.0"
    if task == "segment":
        assert explanation.views[0].answer in weft.load(tmp_path / "run", "cpu").classes
        assert explanation.views[0].cams
    else:
        assert explanation.views[0].cams == {}
        assert any("which a detector does not give" in note for note in explanation.notes)
    assert any("classifiers" in note for note in explanation.notes)


def test_a_name_is_a_model_with_random_weights(pictures):
    subject = open_subject("vt_resnet_nano", "cpu")
    assert not subject.trained
    again = open_subject("vt_resnet_nano", "cpu")
    for one, other in zip(subject.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other)  # the same ones every time
    explanation = explain(subject, GivenPictures(str(pictures / "class 0" / "0.png")))
    found = exhibits([explanation])
    tokens = next(exhibit for exhibit in found if exhibit.kind == "tokens")
    assert [name for name, _ in tokens.rows] == ["vt.0\nmade of", "vt.0\nmeets", "vt.1\nmade of", "vt.1\nmeets"]
    assert any("at least 4 pictures" in note for note in explanation.notes)
    assert {exhibit.kind for exhibit in found} <= READING.keys()
    assert all(title(exhibit) and reading(exhibit).count(".") >= 2 for exhibit in found)


def published(monkeypatch, folder, name):
    """A model whose published weights are a file."""
    torch.manual_seed(7)
    model = timm.create_model(name)
    torch.save(model.state_dict(), folder / f"{name}.pth")
    cfg = replace(timm.get_pretrained_cfg(name), file=str(folder / f"{name}.pth"))
    monkeypatch.setitem(timm.models._registry._model_pretrained_cfgs, name, cfg)
    return model


@pytest.mark.parametrize("name", ["vt_resnet_nano", "test_vit"])  # timm's ViT has the layers of ViT-B/16
def test_a_name_can_bring_its_published_weights(name, pictures, tmp_path, monkeypatch):
    """Weights, classes and preprocessing are those of the file's author; attention is read, as in VT's figure 5."""
    model = published(monkeypatch, tmp_path, name)
    subject = open_subject(name, "cpu", pretrained=True)
    assert subject.trained
    assert subject.name == f"{name}, pretrained"
    for one, other in zip(subject.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert (subject.classes[0], subject.classes[999]) == (
        "tench, Tinca tinca",
        "toilet tissue, toilet paper, bathroom tissue",
    )
    assert subject.preprocessing.size == timm.get_pretrained_cfg(name).input_size[1:]
    explanation = explain(subject, GivenPictures(str(pictures / "class 0" / "0.png")))
    assert explanation.attention
    if name == "test_vit":
        assert all(0 < row.local_ratio.mean <= 1 for row in explanation.attention)


def test_pretrained_beside_a_run(run, pictures, tmp_path, monkeypatch):
    """Each keeps its classes and its size of pictures."""
    published(monkeypatch, tmp_path, "test_vit")
    one, other = open_subjects(str(run), "test_vit", "cpu", pretrained=True)
    assert (len(one.classes), len(other.classes)) == (3, 1000)
    assert (one.preprocessing.size, other.preprocessing.size) == ((24, 24), (160, 160))
    explained = explain_subjects([one, other], str(pictures / "class 0"))
    assert [explanation.pictures for explanation in explained.explanations] == [4, 4]


def test_pretrained_weights_that_cannot_be_had(run, pictures, command, monkeypatch):
    def unreachable(*args, **kwargs):
        raise OSError("We couldn't connect to the hub.\nCheck your connection.")

    refused(command("explain", run, pictures, "--init", "pretrained"), "--init pretrained", "names")
    refused(command("explain", "cvt_nano", pictures, "--init", "pretrained"), "No pretrained weights of cvt_nano")
    monkeypatch.setattr("weft.run.initial.check_reachable", lambda name: None)  # it answers, and then no longer
    monkeypatch.setattr("timm.models._builder.load_state_dict_from_hf", unreachable)
    monkeypatch.setattr("timm.models._builder.load_custom_from_hf", unreachable)
    refused(
        command("explain", "vit_tiny_patch16_224", pictures, "--init", "pretrained"),
        "No pretrained weights of vit_tiny_patch16_224 can be had",
        "connect to the hub.",
    )


class Plain(nn.Module):
    """A classifier that says nothing about its layers."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3)

    def forward(self, x):
        return self.conv(x).mean(dim=(2, 3))


def test_what_a_model_does_not_offer_becomes_a_note(run, pictures):
    subject = replace(open_subject(str(run), "cpu"), model=Plain().eval())
    explanation = explain(subject, GivenPictures(str(pictures)))
    assert explanation.robustness
    assert (explanation.layers, explanation.fields, explanation.similarity) == ([], [], None)
    assert sum("Plain does not say which of its layers give maps" in note for note in explanation.notes) == 1
    assert [exhibit.kind for exhibit in exhibits([explanation])] == ["scale", "shift"]


def test_layers_with_one_key_have_no_relative_entropy(run):
    """PVT at 32 pixels reduces the keys of a stage to one; its entropy is 0, and so is that of even attention."""
    keys = {"one": Measure([0.0, 0.0], 0.0), "nine": Measure([1.0, 2.0], math.log(9))}
    rows = [AttentionNumbers(name, "map", 1, entropy, None, None, None) for name, entropy in keys.items()]
    (lines,) = exhibits([Explanation(open_subject(str(run), "cpu"), [], attention=rows)])
    assert isinstance(lines, Lines)
    assert lines.labels == [("cvt_nano", ["nine"])]
    assert lines.curves[0].ys == pytest.approx([1.5 / math.log(9)])


def test_one_batch_at_a_time_is_on_the_device(run, pictures, monkeypatch):
    for name, value in {"pictures.BATCH": 4, "explain.FIELD_PICTURES": 4}.items():
        monkeypatch.setattr(f"weft.explain.{name}", value)
    made, most = [], []

    def normalise(self, x, as_always=Preprocessing.normalise):
        most.append(sum(ref() is not None for ref in made))
        made.append(weakref.ref(y := as_always(self, x)))
        return y

    monkeypatch.setattr(Preprocessing, "normalise", normalise)
    explain(open_subject(str(run), "cpu"), GivenPictures(str(pictures)))
    assert len(most) > 9
    assert max(most) <= 1  # the one before, which a loop still names


def test_a_picture_of_another_size_leaves_the_similarity_to_the_others(tmp_path):
    data = make_squares(tmp_path / "data", "masks", count=6)
    tiny_run(data, tmp_path / "run", **dense("fpn", epochs=1))
    Image.new("RGB", (40, 72)).save(tmp_path / "odd.png")
    files = [tmp_path / "odd.png", *sorted((data / "images").iterdir())]
    (explanation,) = weft.load(tmp_path / "run", "cpu").explain(files).explanations
    assert explanation.similarity is not None
    assert explanation.similarity.n == 6


def test_models_that_see_differently_are_compared_by_what_each_sees(run, pictures):
    one = open_subject(str(run), "cpu")
    other = replace(one, name="other", preprocessing=replace(one.preprocessing, size=(32, 32)))
    found, explanations = GivenPictures(str(pictures)), [Explanation(subject, []) for subject in (one, other)]
    cross = similarity_between(explanations, found)
    assert cross is not None
    assert cross.n == 12
    assert 0.3 < cross.cka[0][0] < 1 - 1e-6  # the same weights, not the same pixels
    itself = similarity_between([explanations[0]] * 2, found)
    assert itself is not None
    assert itself.cka[0][0] == pytest.approx(1)


def test_models_with_other_pictures_of_one_size_are_not_compared_and_say_so(run, pictures, tmp_path):
    """What keeps its shape comes in other batches than what is cut to a square."""
    for i, side in enumerate((24, 24, 24, 24, 40)):
        Image.new("RGB", (24, side)).save(tmp_path / f"{i}.png")
    one = open_subject(str(run), "cpu")
    other = replace(one, name="other", preprocessing=replace(one.preprocessing, size=(24, 99), crop_mode="fit"))
    explanations = [Explanation(subject, []) for subject in (one, other)]
    assert similarity_between(explanations, GivenPictures(str(tmp_path))) is None
    assert "Its layers are not compared with those of cvt_nano" in explanations[1].notes[-1]


@pytest.mark.parametrize(("parts", "answer"), [((0.7, 0.1, 0.2), "b"), ((1.0, 0.0, 0.0), "background")])
def test_a_segmenter_is_asked_for_more_than_the_background(parts, answer, run):
    counts = [round(10 * part) for part in parts]
    given = torch.cat([torch.full((count,), i) for i, count in enumerate(counts)])

    class Fixed(nn.Module):
        def forward(self, x):
            return {"out": nn.functional.one_hot(given, 3).T.reshape(1, 3, 2, 5).float()}

    subject = replace(open_subject(str(run), "cpu"), model=Fixed(), classes=["background", "a", "b"], per_pixel=True)
    found = _answers(subject, torch.zeros(1, 3, 2, 5))
    assert found is not None
    classes, shares = found
    assert subject.classes[int(classes)] == answer
    assert shares.item() == pytest.approx(parts[int(classes)])


@pytest.mark.parametrize("name", ["class 0", "class 2"])
def test_grad_cam_is_of_the_class_that_is_asked_for(name, run, pictures):
    model = weft.load(run, "cpu")
    files = [str(pictures / "class 1" / f"{i}.png") for i in range(2)]
    (found,) = model.explain(files, of=name).explanations
    x = found.subject.see(read_pictures(GivenPictures(files), found.subject, None, [], [])[0].pictures)
    wanted = grad_cam(model.model, x, found.layers[0], [model.classes.index(name)] * 2)
    for i, view in enumerate(found.views):
        assert view.answer == name
        assert view.sureness == pytest.approx(model.model(x).softmax(1)[i, model.classes.index(name)].item(), rel=1e-4)
        np.testing.assert_allclose(view.cams[found.layers[0]], wanted[i] / wanted[i].max(), atol=1e-5)


@pytest.mark.parametrize(
    ("places", "names"),
    [
        (["runs/a/model", "runs/b/model"], ["m (a/model)", "m (b/model)", "other"]),
        (["runs/a", "runs/b"], ["m (a)", "m (b)", "other"]),
        (["x/y/model", "model"], ["m (y/model)", "m (HERE/model)", "other"]),
    ],
)
def test_models_of_one_name_are_told_apart_by_their_places(places, names, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    subject = open_subject(str(run), "cpu")
    subjects = [replace(subject, name="m"), replace(subject, name="m"), replace(subject, name="other")]
    found = [one.name for one in told_apart(subjects, [*places, "elsewhere/model"])]
    assert found == [name.replace("HERE", tmp_path.name) for name in names]


# Masks --------------------------------------------------------------------------------------------------------------


def save_masks(folder, **values):
    """Masks of one value each, by path without ending."""
    for path, value in values.items():
        file = folder / f"{path}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((24, 24), value, np.uint8)).save(file)


def test_masks_are_found_by_name_and_cut_like_their_picture(run, pictures, tmp_path):
    subject = open_subject(str(run), "cpu")
    (tmp_path / "deep").mkdir()
    left = np.zeros((24, 24), np.uint8)
    left[:, :12] = 7
    Image.fromarray(left).save(tmp_path / "deep" / "0.png")
    bare, found = [], GivenPictures(str(pictures / "class 0"))
    read, others = read_pictures(found, subject, find_masks(tmp_path, found.names), [], bare)
    assert read.masks is not None
    assert (len(read.names), len(others.names), others.masks) == (1, 3, None)
    assert read.masks[0].float().mean() == pytest.approx(0.5, abs=0.03)
    assert not read.masks[0, :, -1].any()
    assert [line.split(": ")[1] for line in bare] == ["there is none of the same name"] * 3


def test_masks_of_equal_names_belong_to_their_folders(run, pictures, tmp_path):
    """Classes number their pictures each from 0 on."""
    save_masks(tmp_path, **{f"{kind}/0": value for kind, value in (("class 0", 255), ("class 1", 0))})
    found = GivenPictures([str(pictures / f"class {i}" / "0.png") for i in range(3)])
    subject = open_subject(str(run), "cpu")
    read, other = read_pictures(found, subject, find_masks(tmp_path, found.names), [], [])
    assert read.masks is not None
    assert read.masks.float().mean(dim=(1, 2)).tolist() == [1, 0]
    assert other.masks is None  # that of another class is none


@pytest.mark.parametrize(
    ("masks", "names", "words"),
    [
        (["a/0", "b/0"], ["0.jpg"], r"0\.jpg could have the mask .*a.0\.png or .*b.0\.png; put the masks into folders"),
        (["0"], ["x/a/0.jpg", "x/b/0.jpg"], r"The mask .*0\.png could be that of x/a/0\.jpg or x/b/0\.jpg; put the"),
    ],
)
def test_masks_of_unknown_pictures_are_refused(masks, names, words, tmp_path):
    save_masks(tmp_path, **dict.fromkeys(masks, 1))
    with pytest.raises(weft.WeftError, match=words):
        find_masks(tmp_path, names)


@pytest.mark.parametrize("kind", ["palette", "colours"])
def test_what_is_not_0_in_a_mask_is_foreground_whatever_its_colours(kind, run, tmp_path):
    values = np.zeros((24, 24), np.uint8)
    values[:12, :12] = 1
    if kind == "palette":
        mask = Image.fromarray(values, "P")
        mask.putpalette([255, 255, 255, 0, 0, 0])  # 0 is white, 1 is black
    else:
        mask = Image.fromarray(values[..., None] * np.array([0, 0, 1], np.uint8))  # a blue that is nearly black
    mask.save(tmp_path / "x.png")
    Image.new("RGB", (24, 24)).save(tmp_path / "x.jpg")
    subject = open_subject(str(run), "cpu")
    subject = replace(subject, preprocessing=replace(subject.preprocessing, crop_pct=1.0))
    masks = {str(tmp_path / "x.jpg"): tmp_path / "x.png"}
    (read,) = read_pictures(GivenPictures(str(tmp_path / "x.jpg")), subject, masks, [], [])
    assert read.masks is not None
    assert read.masks.float().mean().item() == 0.25


def test_masks_without_foreground_get_a_note(run, pictures, tmp_path):
    save_masks(tmp_path, **dict.fromkeys("0123", 0))
    explained = explain_subjects([open_subject(str(run), "cpu")], str(pictures / "class 0"), masks=tmp_path)
    assert "The masks have no foreground to compare with." in explained.explanations[0].notes
    assert "foreground" not in {exhibit.kind for exhibit in explained.exhibits()}


# Drawing ------------------------------------------------------------------------------------------------------------


def test_colours_follow_the_values():
    picture = np.full((10, 20, 3), 128, np.uint8)
    values = np.zeros((2, 4))
    values[0, 3] = 1
    painted = heat_over(picture, values)
    assert painted.shape == (112, 224, 3) == as_panel(picture).shape
    brightness = painted.sum(axis=2)
    assert np.unravel_index(brightness.argmax(), brightness.shape) > (0, 168)
    assert (heat_panel(values)[:56, 168:] == heat_panel(values)[0, -1]).all()
    marked = draw_cross(painted, (5, 10), (10, 20))
    assert (marked[58, 118] == INK).all()
    framed = draw_squares(np.zeros((100, 100, 3), np.uint8), (50, 50), (25.0, 25.0), [10.0])
    assert np.argwhere((framed == INK).all(axis=2)).min(axis=0).tolist() == [40, 40]


def test_a_model_has_the_same_colour_in_all_charts():
    """Also where the other one has no curve."""
    curve = Curve("second", [1, 2], [0.5, 1], [], model=1)
    chart = _chart(Lines("distance", "", "layer", "pixels", [curve], [], models=2))
    assert chart is not None
    assert ([line.ink for line in chart.lines], chart.legend) == ([2], True)
    figure = draw(Lines("distance", "", "layer", "pixels", [curve], [], models=2))
    assert [line.get_color() for line in figure.axes[0].lines] == [INKS[1]]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["second"]


def test_what_hardly_differs_does_not_look_as_if_it_did():
    picture, values = np.full((8, 8, 3), 128, np.uint8), np.array([[1.0, 1.01], [0.99, 1.0]])
    assert (
        np.ptp(heat_over(picture, values, 0.99, 2.0).astype(int))
        < 25
        < np.ptp(heat_over(picture, values, 0.99).astype(int))
    )


def test_figures_have_names_of_their_own_and_no_dates(tmp_path):
    panel = Panel(np.zeros((8, 8, 3), np.uint8), "costs $5 or $6")
    found = [
        Sheet("grad-cam", "a/b", ["x"], [("one", [panel, Panel(None)])]),
        Sheet("grad-cam", "a b", [], [("two", [panel])]),
        Lines("entropy", "", "layer", "y", [Curve("m", [1, 2], [0.5, 1], [[0.4, 0.6], [1, 1]])], []),
        Matrix("similarity", "m", ["a"], ["b", "c"], np.array([[0.2, 1.0]])),
    ]
    (tmp_path / "again").mkdir()
    stems = write_figures(found, tmp_path)
    assert stems == ["grad-cam-a-b-1", "grad-cam-a-b-2", "entropy", "similarity-m"]
    write_figures(found, tmp_path / "again")
    for stem in stems:
        for ending in ("png", "svg"):
            assert (tmp_path / f"{stem}.{ending}").read_bytes() == (
                tmp_path / "again" / f"{stem}.{ending}"
            ).read_bytes()
    assert "costs $5 or $6" in (tmp_path / "grad-cam-a-b-1.svg").read_text(encoding="utf-8")


def test_the_gallery_shows_runs_on_their_own_pictures(run, tmp_path, monkeypatch):
    monkeypatch.setattr(gallery, "PAGE", tmp_path / "gallery.md")
    gallery.write([run], tmp_path / "pictures" / "gallery", count=4, foreground=[])
    page = (tmp_path / "gallery.md").read_text(encoding="utf-8")
    assert "`cvt_nano` | 24 x 24 | top-1" in page
    assert "may not be passed on" not in page
    files = re.findall(r"\]\((pictures/gallery/.*?)\)", page)
    assert len(files) > 6
    assert all((tmp_path / file).stat().st_size > 500 for file in files)


def test_the_gallery_draws_outlines_of_what_may_not_be_passed_on(run, pictures, tmp_path, monkeypatch):
    monkeypatch.setattr(gallery, "PAGE", tmp_path / "gallery.md")
    drawn = []
    monkeypatch.setattr(gallery, "exhibits", lambda found, cross: drawn.extend(v for e in found for v in e.views) or [])
    gallery.write([run], tmp_path / "gallery", count=4, foreground=[], outlines=[pictures.name])
    page = (tmp_path / "gallery.md").read_text(encoding="utf-8")
    assert f"The photographs of {pictures.name} may not be passed on: line drawings" in page
    assert "24 x 24" in page  # what the model saw, not how large the drawing is
    for view in drawn:
        assert view.pixels.shape == (224, 224, 1)
        assert all(0 <= place < 224 for heads in view.heads for place in heads.asked or ())
    assert drawn
    with pytest.raises(weft.WeftError, match=rf"No run is on mnist; the data sets are {pictures.name}"):
        gallery.write([run], tmp_path / "gallery", count=4, foreground=[], outlines=["mnist"])


@pytest.mark.parametrize("side", [32, 160])
def test_an_outline_is_dark_where_things_end_and_white_elsewhere(side):
    picture = np.full((side, side, 3), 40, np.uint8)
    picture[:, side // 2 :] = (200, 90, 90)
    drawing = gallery.outline(picture)[..., 0]
    assert (drawing[:, 108:116] < 128).all()
    assert (drawing[:, :80] == 255).all()
    assert (drawing[:, 144:] == 255).all()
    assert (gallery.outline(np.zeros((side, side, 1), np.uint8)) == 255).all()


def test_the_gallery_shows_one_model_beside_another_and_not_all_figures(run):
    """Of three models: the similarity of two and between these, and the heads of two."""
    subject, one = open_subject(str(run), "cpu"), Similarity(["a"], ["a"], [[1.0]], 9)
    heads = [HeadMaps("a", np.ones((1, 2, 2)), None)]
    views = [PictureView(f"{i}", np.zeros((4, 4, 3), np.uint8), heads=heads) for i in range(2)]
    found = [Explanation(replace(subject, name=name), [], views) for name in "xyz"]
    for explanation in found[:2]:
        explanation.similarity = one
    details = [e.detail for e in gallery.chosen(exhibits(found, one))]
    assert details == ["x, 0", "y, 0", "x", "y", "x (rows) and y (columns)"]


def test_numbers_of_wordnet_get_their_names():
    assert gallery.spoken(["n01440764", "bus", "n0144"]) == ["tench", "bus", "n0144"]


@pytest.mark.parametrize(
    ("name", "label"), [("data/val/bus/1.png", 1), ("T-shirt/top/2.png", 0), ("x/bus/y/3.png", -1)]
)
def test_the_folder_of_a_picture_may_name_its_class(name, label, run):
    subject = replace(open_subject(str(run), "cpu"), classes=["T-shirt/top", "bus", "us"])
    assert label_of(subject, name) == label


@pytest.mark.parametrize(
    ("text", "inches", "shown"),
    [("made of\nhead.pyramid.tokenizers.0", 1, "made of\n…amid.tokenizers.0"), ("vt.0", 0.1, "vt.0")],
)
def test_long_names_of_layers_keep_their_ends(text, inches, shown):
    assert _ending(text, inches) == shown
    assert all(len(line) <= max(4, 18 * inches) for line in shown.splitlines())
