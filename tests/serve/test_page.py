"""The page in a real browser: Chromium, through Playwright, against a real server."""

import base64
import csv
import io
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from pycocotools.coco import COCO

from tests.helpers.serving import models_of, serving
from tests.serve.conftest import encoded
from weft.serve.models import ServedModel
from weft.serve.samples import fashion_samples

sync_api = pytest.importorskip("playwright.sync_api", reason="the page's tests need playwright")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="the page's tests need Chromium: apt-get install chromium")
WAIT = 20_000  # milliseconds; the machine may be busy


@pytest.fixture(scope="module")
def chromium() -> Iterator:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


class Tab:
    """A page of the browser that remembers what went wrong in it, and whom it called."""

    def __init__(self, context, url: str) -> None:
        self.faults, self.calls = [], []
        self.page = context.new_page()
        self.page.set_default_timeout(WAIT)
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("dialog", lambda dialog: self.faults.append(f"dialog {dialog.message}"))
        self.page.on("console", lambda told: self.faults.append(told.text) if "Content Security" in told.text else None)
        self.page.on("request", lambda request: self.calls.append(request.url))
        self.page.goto(url)

    def upload(self, *files: tuple[str, bytes]) -> None:
        given = [{"name": name, "mimeType": "application/octet-stream", "buffer": data} for name, data in files]
        self.page.set_input_files("#files", given)

    def choose(self, model: str, beside: str = "") -> None:
        self.page.wait_for_selector("#models:not([hidden])")
        self.page.select_option("#model", model)
        self.page.select_option("#beside", beside)

    def see(self, text: str, where: str = "#stage") -> None:
        self.page.locator(where, has_text=text).first.wait_for()

    def until(self, expression: str) -> None:
        """Waits for something to be true in the page, whose policy lets no other script look."""
        end = time.monotonic() + WAIT / 1000
        while not self.page.evaluate(expression):
            assert time.monotonic() < end, expression
            self.page.wait_for_timeout(20)

    def pixels(self, name: str) -> np.ndarray:
        """The canvas of a model's answer."""
        data = self.page.evaluate(f"document.querySelector('canvas[data-name={name}]').toDataURL()")
        return np.asarray(Image.open(io.BytesIO(base64.b64decode(data.partition(",")[2]))).convert("RGB"))

    def slide(self, key: str, value: float) -> None:
        self.page.locator(f"[data-key='{key}']").fill(str(value))


@pytest.fixture
def tab(chromium, served) -> Iterator[Tab]:
    context = chromium.new_context()
    found = Tab(context, served.url)
    yield found
    assert found.faults == []
    assert {call for call in found.calls if not call.startswith((served.url, "data:", "blob:"))} == set()
    context.close()


@pytest.fixture(scope="module")
def picture(runs) -> bytes:
    return (runs["masks"].parent / "squares/images/1.png").read_bytes()


def test_upload_and_result(tab, served, picture):
    tab.upload(("one.png", picture))
    (row,) = served.predict(picture).json()["pictures"]
    tab.see(row["labels"][0])
    names = tab.page.locator("#stage .bars .name").all_inner_texts()
    values = tab.page.locator("#stage .bars .value").all_inner_texts()
    assert names == row["labels"]
    assert [float(value.split()[0]) for value in values] == pytest.approx(
        [100 * one for one in row["probabilities"]], abs=0.51
    )
    assert tab.page.locator("#status").inner_text().startswith("one.png: ")
    assert tab.pixels("classes").shape[0] % 48 == 0  # the picture, enlarged by whole numbers


def test_mask_overlay_with_opacity_and_switches(tab, served, picture):
    tab.choose("masks")
    tab.upload(("one.png", picture))
    (row,) = served.predict(picture, model="masks").json()["pictures"]
    tab.see("class 1")
    described = next(one for one in served.client.get("/models").json()["models"] if one["name"] == "masks")
    colours = {
        name: tuple(bytes.fromhex(c[1:])) for name, c in zip(described["classes"], described["colours"], strict=True)
    }

    def part(name: str) -> float:
        return float((tab.pixels("masks") == colours[name]).all(axis=2).mean())

    tab.slide("alpha-masks", 1)
    for name, share in row["shares"].items():  # with nothing shining through, the canvas is the mask
        assert part(name) == pytest.approx(share, abs=0.01)
    first = next(iter(row["shares"]))
    tab.page.uncheck(f"[data-key='class-masks-{described['classes'].index(first)}']")
    assert part(first) == 0
    tab.slide("alpha-masks", 0)
    bare = tab.pixels("masks").astype(int)
    grown = np.asarray(Image.open(io.BytesIO(picture)).resize(bare.shape[1::-1], Image.Resampling.NEAREST)).astype(int)
    assert np.abs(bare - grown).max() <= 1


def test_boxes_by_class_and_score(tab, served, picture):
    tab.choose("objects")
    tab.upload(("one.png", picture))
    tab.see("at least so sure")
    (row,) = served.predict(picture, model="objects", score=0.05).json()["pictures"]
    tab.slide("score-objects", 0.05)
    counts = {name: sum(o["category_name"] == name for o in row["objects"]) for name in ("red", "green")}
    shown = tab.page.locator("#stage .bars li").all_inner_texts()
    assert {text.split()[0]: int(text.split()[1]) for text in shown} == {k: v for k, v in counts.items() if v}
    full = tab.pixels("objects")
    for box in tab.page.locator("#stage .bars input").all():
        box.uncheck()
    bare = tab.pixels("objects")
    assert (full != bare).any()
    tab.slide("score-objects", 1)
    tab.see("Nothing that the model is so sure of")
    assert (tab.pixels("objects") == bare).all()


def test_a_text_file_is_refused_and_others_are_not(tab, picture):
    tab.upload(("diary.jpg", b"Dear diary"), ("good.png", picture))
    tab.see("Not a picture in one of the formats")
    tab.page.click("#history button:has-text('good.png')")
    tab.see("class")
    assert tab.page.locator("#stage .problem").count() == 0
    assert tab.page.locator("#history .bad").count() == 1


def test_too_large_is_said_without_sending(tab):
    tab.page.wait_for_selector("#models:not([hidden])")
    tab.page.evaluate("state.limits.bytes = 1000")
    before = len(tab.calls)
    tab.upload(("large.png", bytes(2000)))
    tab.see("Larger than")
    assert not any("/predict" in call for call in tab.calls[before:])


def test_slow_network_shows_progress(tab):
    tab.page.wait_for_selector("#models:not([hidden])")
    noise = encoded(np.random.default_rng(0).integers(0, 255, (200, 200, 3), np.uint8))  # 120 kB
    session = tab.page.context.new_cdp_session(tab.page)
    slow = {"offline": False, "latency": 100, "downloadThroughput": 50_000, "uploadThroughput": 60_000}
    session.send("Network.enable")
    session.send("Network.emulateNetworkConditions", slow)
    tab.upload(("noise.png", noise))
    tab.until("/Sending, \\d+ %|Looking/.test(document.querySelector('.waits')?.innerText ?? '')")
    tab.see("class 0", "#stage .bars")


def test_server_gone_and_back(chromium, runs, picture):
    with serving(models_of(runs["classes"])) as first:
        context = chromium.new_context()
        tab = Tab(context, first.url)
        tab.page.wait_for_selector("#models:not([hidden])")
    tab.upload(("one.png", picture))
    tab.see("The server does not answer", "#away")
    assert tab.page.locator("#history button").count() == 1  # nothing is lost
    with serving(models_of(runs["classes"]), port=first.port):
        tab.see("class", "#stage .bars")
        tab.page.wait_for_selector("#away", state="hidden")
    assert tab.faults == []
    context.close()


def test_overload_is_waited_out(tab, picture):
    """A 503 with Retry-After is no error to the person: the page comes again."""
    tab.page.wait_for_selector("#models:not([hidden])")
    answers = iter([503, 503])

    def busy(route):
        if next(answers, 0):
            route.fulfill(status=503, headers={"Retry-After": "1"}, body=json.dumps({"error": "full"}))
        else:
            route.continue_()

    tab.page.route("**/predict*", busy)
    tab.upload(("one.png", picture))
    tab.see("class", "#stage .bars")


def test_two_tabs_and_a_reload(chromium, served, picture):
    context = chromium.new_context()
    one, other = Tab(context, served.url), Tab(context, served.url)
    one.upload(("first.png", picture))
    other.upload(("second.png", picture), ("third.png", picture))
    for tab in (one, other):
        tab.see("class", "#stage .bars")
    assert one.page.locator("#history button").count() == 1
    assert other.page.locator("#history button").count() == 2
    other.until("JSON.parse(sessionStorage.getItem('weft') ?? '[]').length === 2")
    other.page.reload()
    other.see("third.png", "#history")
    other.see("class", "#stage .bars")
    assert other.page.locator("#history button").count() == 2
    assert one.faults == other.faults == []
    context.close()


def test_why(tab, picture):
    tab.upload(("one.png", picture))
    tab.page.click("text=Why?")
    tab.see("Grad-CAM", "[role=tab]")
    assert tab.page.locator("[role=tabpanel] figure img").count() >= 2
    chosen = tab.page.locator("[data-key=of-classes]").input_value()
    another = next(name for name in ("class 0", "class 1", "class 2") if name != chosen)
    tab.page.select_option("[data-key=of-classes]", another)
    tab.until(f"document.querySelector('[role=tabpanel] figcaption')?.innerText.includes('{another}')")
    tab.page.focus("[role=tab]")
    tab.page.keyboard.press("ArrowRight")
    assert tab.page.locator("[role=tab][aria-selected=true]").inner_text() == "Attention rollout"
    tab.slide("strength-classes", 0.25)
    assert tab.page.locator("figure img + img").first.evaluate("image => image.style.opacity") == "0.25"


def test_two_models_side_by_side(tab, picture):
    tab.choose("masks", "objects")
    tab.upload(("one.png", picture))
    tab.see("class 0", "[data-model=masks]")
    tab.see("at least so sure", "[data-model=objects]")
    place = "document.querySelector(`[data-model=${name}]`).getBoundingClientRect().toJSON()"
    boxes = tab.page.evaluate(f"['masks', 'objects'].map(name => {place})")  # at once: the page may still be moving
    assert boxes[0]["y"] == boxes[1]["y"]
    assert boxes[0]["x"] + boxes[0]["width"] <= boxes[1]["x"]


@pytest.mark.parametrize("way", ["paste", "drop"])
def test_paste_and_drop(tab, picture, way):
    tab.page.wait_for_selector("#models:not([hidden])")
    event = {
        "paste": "new ClipboardEvent('paste', {clipboardData: data})",
        "drop": "new DragEvent('drop', {dataTransfer: data, bubbles: true, cancelable: true})",
    }[way]
    tab.page.evaluate(
        "bytes => { const data = new DataTransfer(); data.items.add(new File([new Uint8Array(bytes)], 'p.png'));"
        f" document.body.dispatchEvent({event.replace('data})', 'data, bubbles: true})')}); }}",
        list(picture),
    )
    tab.see("class", "#stage .bars")
    tab.see("p.png", "#history")


def test_by_keyboard_alone(tab, picture):
    """Choosing, going through the pictures, looking inside: nothing needs a mouse."""
    tab.upload(("a.png", picture), ("b.png", picture))
    tab.see("class", "#stage .bars")
    reached = set()
    tab.page.evaluate("document.activeElement.blur()")
    for _ in range(24):
        tab.page.keyboard.press("Tab")
        reached.add(tab.page.evaluate("document.activeElement.id || document.activeElement.innerText || ''"))
    assert {"files", "model", "csv", "clear", "Why?", "Save PNG"} <= reached
    first = tab.page.locator("[aria-current=true]").inner_text()
    tab.page.evaluate("document.activeElement.blur()")
    tab.page.keyboard.press("Control+ArrowLeft")
    tab.page.evaluate(  # Alt+Left, which in earnest would leave the page
        "document.body.dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowLeft', altKey: true, bubbles: true}))"
    )
    assert tab.page.locator("[aria-current=true]").inner_text() == first
    tab.page.keyboard.press("ArrowLeft")
    assert tab.page.locator("[aria-current=true]").inner_text() != first


@pytest.mark.parametrize(("chooser", "key"), [("files", "Enter"), ("files", "Space"), ("photo", "Enter")])
def test_chooser_by_keyboard(chromium, served, picture, chooser, key):
    """Whoever comes to a button by Tab sees it there, and opens it with a key."""
    context = chromium.new_context(has_touch=True, reduced_motion="reduce")
    tab = Tab(context, served.url)
    opened = []  # whoever begins to listen at the key comes too late
    tab.page.on("filechooser", lambda found: opened.append(found))
    tab.page.wait_for_selector("#models:not([hidden])")
    label = tab.page.locator(f"label[for={chooser}]")
    room = {name: value + by for (name, value), by in zip(label.bounding_box().items(), (-8, -8, 16, 16), strict=True)}
    bare = tab.page.screenshot(clip=room)
    while tab.page.evaluate("document.activeElement.id") != chooser:
        tab.page.keyboard.press("Tab")
    assert label.evaluate("label => getComputedStyle(label).outline").endswith("solid 3px")
    assert tab.page.screenshot(clip=room) != bare
    tab.page.keyboard.press(key)
    end = time.monotonic() + WAIT / 1000
    while not opened and time.monotonic() < end:
        tab.page.wait_for_timeout(20)
    opened[0].set_files({"name": "chosen.png", "mimeType": "image/png", "buffer": picture})
    tab.see("class", "#stage .bars")
    assert tab.faults == []
    context.close()


def test_many_pictures_are_decoded_a_few_at_a_time(tab, served):
    """No more than a few whole pictures are in memory at once, and none in the end."""
    tab.page.wait_for_selector("#models:not([hidden])")
    tab.page.evaluate("""() => {
        const decode = window.createImageBitmap;
        window.seen = { open: 0, most: 0 };
        window.createImageBitmap = async (...given) => {
            seen.most = Math.max(seen.most, ++seen.open);
            const bitmap = await decode(...given), close = bitmap.close;
            bitmap.close = () => { seen.open--; close.call(bitmap); };
            return bitmap;
        };
    }""")
    large = encoded(np.random.default_rng(0).integers(0, 255, (12, 16, 3), np.uint8).repeat(100, 0).repeat(100, 1))
    tab.upload(*((f"{i}.png", large) for i in range(12)))
    tab.until("document.querySelectorAll('#history img').length === 12")
    tab.until("window.seen.open === 0")
    assert 1 <= tab.page.evaluate("seen.most") <= 3
    sides = "state.items.map(item => Math.max(item.picture.naturalWidth, item.picture.naturalHeight))"
    assert set(tab.page.evaluate(sides)) == {640}
    assert tab.pixels("classes").shape == (1050, 1400, 3)  # the one on the stage is sharper than what is kept
    tab.page.click("#history button:has-text('3.png')")
    tab.until("state.large.id === state.current && state.large.picture?.width === 1400")
    assert tab.page.evaluate("seen.open") == 0


def test_what_is_held_stays(tab, picture):
    """While somebody drags a slider of one model, the answer of the other comes; nothing is taken from the hand."""
    tab.choose("masks", "objects")
    waiting = []
    tab.page.route("**/predict?model=objects*", lambda route: waiting.append(route))
    tab.upload(("one.png", picture))
    slider = tab.page.locator("[data-key=alpha-masks]")
    slider.scroll_into_view_if_needed()
    slider.evaluate("input => { input.held = true; }")
    tab.page.locator("#history button").evaluate("button => { button.held = true; }")
    box = slider.bounding_box()
    middle = box["y"] + box["height"] / 2
    tab.page.mouse.move(box["x"] + box["width"] / 2, middle)
    tab.page.mouse.down()
    waiting.pop().continue_()
    tab.see("at least so sure", "[data-model=objects]")
    tab.page.mouse.move(box["x"] + box["width"] - 2, middle, steps=4)
    tab.page.mouse.up()
    assert slider.evaluate("input => input.held") is True
    assert tab.page.locator("#history button").evaluate("button => button.held") is True
    assert float(slider.input_value()) > 0.9
    assert tab.page.evaluate("viewOf(currentItem(), 'masks').alpha") > 0.9


def test_a_refusal_ends_with_one_full_stop(tab, picture):
    tab.page.wait_for_selector("#models:not([hidden])")
    errors = iter(["no answer within 2 seconds.", "no room"])
    tab.page.route("**/predict*", lambda route: route.fulfill(status=504, body=json.dumps({"error": next(errors)})))
    for name, shown in (("a.png", "No answer within 2 seconds."), ("b.png", "No room.")):
        tab.upload((name, picture))
        tab.see(shown, "#stage .problem")
        assert tab.page.locator("#stage .problem").inner_text() == shown


def test_downloads(tab, served, picture, tmp_path):
    tab.choose("masks", "objects")
    tab.upload(('=1+1,"x".png', picture), ("b.png", picture))
    tab.until("document.querySelectorAll('#history b').length === 4")
    tab.until("![...document.querySelectorAll('#history b')].some(b => b.innerText === '…')")
    with tab.page.expect_download() as download:
        tab.page.click("#csv")
    rows = list(csv.DictReader(io.StringIO(Path(download.value.path()).read_text())))
    assert {row["picture"] for row in rows} == {'\'=1+1,"x".png', "b.png"}
    (told,) = served.predict(picture, model="masks").json()["pictures"]
    mine = {row["class"]: float(row["value"]) for row in rows if row["picture"] == "b.png" and row["model"] == "masks"}
    assert mine == pytest.approx(told["shares"], abs=1e-3)
    with tab.page.expect_event("download", lambda one: "objects" in one.suggested_filename) as download:
        tab.page.click("#coco")
    (told,) = served.predict(picture, model="objects", score=0.05).json()["pictures"]
    coco = COCO(str(download.value.path()))
    assert len(coco.getAnnIds(imgIds=[1])) == len(told["objects"])
    if told["objects"]:
        assert coco.annToMask(coco.loadAnns(coco.getAnnIds(imgIds=[1]))[0]).shape == (48, 48)
    tab.choose("masks")
    with tab.page.expect_download() as download:
        tab.page.click("#coco")
    coco = COCO(str(download.value.path()))
    (mask,) = served.predict(picture, model="masks").json()["pictures"]
    parts = {coco.cats[one["category_id"]]["name"]: coco.annToMask(one).mean() for one in coco.imgToAnns[1]}
    assert parts == pytest.approx(mask["shares"], abs=1e-3)
    with tab.page.expect_download() as download:
        tab.page.click("text=Save PNG")
    assert (np.asarray(Image.open(download.value.path()).convert("RGB")) == tab.pixels("masks")).all()


def test_names_of_files_are_text(tab, picture):
    """S5: what a file is called runs nowhere."""
    name = "<img src=x onerror=alert(1)><script>alert(2)</script>.png"
    tab.upload((name, picture))
    tab.see("class", "#stage .bars")
    tab.see(name, "#history")
    assert tab.page.locator("img[src=x]").count() == 0


def test_a_token_is_asked_for(chromium, runs, picture):
    token = "a-token-of-twenty-letters"
    with serving(models_of(runs["classes"]), host="0.0.0.0", token=token) as served:
        context = chromium.new_context()
        tab = Tab(context, f"http://127.0.0.1:{served.port}/")
        for given in ("wrong", token):
            tab.page.fill("#token", given)
            tab.page.click("#ask button")
        tab.page.wait_for_selector("#models:not([hidden])")
        tab.upload(("one.png", picture))
        tab.see("class", "#stage .bars")
        assert tab.faults == []
        context.close()


def test_samples_can_be_tried(chromium, runs):
    with serving(models_of(runs["classes"]), fashion_samples()) as served:
        context = chromium.new_context()
        tab = Tab(context, served.url)
        tab.page.wait_for_selector("#samples:not([hidden])")
        assert tab.page.locator("#samples img").count() == 10
        tab.page.click("#samples button >> nth=3")
        tab.see("class", "#stage .bars")
        assert tab.faults == []
        context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("device", ["desk", "phone"])
def test_accessible(chromium, served, picture, scheme, device):
    """axe-core finds nothing, and nothing is wider than the screen: empty, answered, explained, refused."""
    axe_of = pytest.importorskip("axe_playwright_python.sync_playwright")
    size = {"width": 390, "height": 800} if device == "phone" else {"width": 1200, "height": 800}
    context = chromium.new_context(
        color_scheme=scheme, viewport=size, has_touch=device == "phone", reduced_motion="reduce"
    )
    tab = Tab(context, served.url)
    axe = axe_of.Axe()

    def check(what: str) -> None:
        found = axe.run(tab.page).response["violations"]
        assert [(one["id"], [node["target"] for node in one["nodes"]]) for one in found] == [], what
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= size["width"], what

    tab.page.wait_for_selector("#models:not([hidden])")
    assert tab.page.locator("label.camera").is_visible() == (device == "phone")
    check("empty")
    tab.upload(("one.png", picture))
    tab.see("class", "#stage .bars")
    tab.page.click("text=Why?")
    tab.see("Grad-CAM", "[role=tab]")
    check("explained")
    tab.choose("masks", "objects")
    tab.see("at least so sure")
    check("two models")
    tab.upload(("a long name that goes on and on without any end to be seen.jpg", b"text"))
    tab.see("Not a picture")
    check("refused")
    tab.page.goto(f"{served.url}docs")
    check("docs")
    assert tab.faults == []
    context.close()


def test_models_have_any_name(chromium, runs, picture):
    """A run's folder may be called anything: labels lead to their controls, and ids are ids."""
    axe_of = pytest.importorskip("axe_playwright_python.sync_playwright")
    (model,) = models_of(runs["classes"])
    names = ["my run", 'a "b" #1']
    with serving([ServedModel(name, model.predictor) for name in names]) as served:
        context = chromium.new_context(reduced_motion="reduce")
        tab = Tab(context, served.url)
        tab.choose(*names)
        tab.upload(("one.png", picture))
        for number in range(2):
            tab.page.locator("#stage > section").nth(number).get_by_text("Why?").click()
            tab.page.locator("#stage > section").nth(number).get_by_role("tab").first.wait_for()
        ids = tab.page.evaluate("[...document.querySelectorAll('[id]')].map(element => element.id)")
        assert [one for one in ids if len(one.split()) != 1 or ids.count(one) > 1] == []
        found = axe_of.Axe().run(tab.page).response["violations"]
        assert [(one["id"], [node["target"] for node in one["nodes"]]) for one in found] == []
        assert tab.page.get_by_label("for the class").count() == 2
        assert tab.faults == []
        context.close()
