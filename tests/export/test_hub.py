"""To the hub and back, by a stand-in for it: a server that speaks as much of its protocol as is needed."""

import base64
import hashlib
import http.server
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

import weft
from tests.helpers.places import ROOT
from tests.helpers.small_runs import command, dense, make_pictures, make_squares, refused, tiny_run
from tests.helpers.variants import SMALL
from weft.export.hub import card
from weft.export.weights import write_weights

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(http.server.BaseHTTPRequestHandler):
    files: dict[str, bytes]
    repository: str

    def answer(self, content: object, code: int = 200, **headers: str) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(code)
        for name, value in {"Content-Length": str(len(body)), "X-Repo-Commit": COMMIT, **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_GET(self) -> None:
        found = re.fullmatch(r"/me/model/resolve/[^/]+/(.+)", self.path.split("?")[0])
        if found and found[1] in self.files:
            body = self.files[found[1]]
            self.answer(body, ETag=f'"{hashlib.sha1(body).hexdigest()}"', Accept_Ranges="bytes")
        elif found or not self.path.startswith("/api/models/me/model"):
            self.answer({"error": "not there"}, 404, X_Error_Code="EntryNotFound" if found else "RepoNotFound")
        elif "/tree/" in self.path:
            rows = [{"type": "file", "path": k, "size": len(v), "oid": "0" * 40} for k, v in self.files.items()]
            self.answer(rows)
        else:
            siblings = [{"rfilename": name} for name in self.files]
            facts = {"id": "me/model", "modelId": "me/model", "sha": COMMIT, "siblings": siblings, "private": False}
            self.answer({**facts, "tags": ["timm"], "library_name": "timm", "downloads": 0})

    do_HEAD = do_GET

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.path == "/api/repos/create":
            self.answer({"url": f"http://{self.headers['Host']}/me/model", "id": "me/model"})
        elif "/preupload/" in self.path:
            rows = [{"path": row["path"], "uploadMode": "regular"} for row in json.loads(body)["files"]]
            self.answer({"files": [{**row, "shouldIgnore": False, "oid": None} for row in rows]})
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            where = f"http://{self.headers['Host']}/me/model/commit/{COMMIT}"
            self.answer({"commitUrl": where, "commitOid": COMMIT, "success": True})
        else:
            self.answer({}, 200)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub():
    """The address of an empty hub."""
    Hub.files = {}
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("hub")
    pictures = make_pictures(root / "pictures")
    tiny_run(pictures, root / "run", model="vt_resnet_nano", model__args=SMALL["vt_resnet_nano"], epochs=1)
    return root / "run"


def elsewhere(code: str, endpoint: str, home: Path) -> str:
    """A process of its own, since the address of the hub is read when its library is imported."""
    variables = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_TOKEN": "x", "PYTHONPATH": str(ROOT)}
    variables |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "*"}
    variables.pop("HF_HUB_OFFLINE", None)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=variables, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_there_and_back(run, hub, tmp_path):
    """What Weft pushes, Weft, timm and transformers open, and all of them compute what the run computes."""
    code = f"""
import sys, torch, weft, timm
from weft.cli.app import app
app(["push", {str(run)!r}, "me/model"], result_action="return_value")
x = torch.randn(2, 3, 16, 16)
with torch.no_grad():
    own = weft.load({str(run)!r}, "cpu").model(x)
    again = weft.load("hub:me/model", "cpu")
    assert torch.equal(again.model(x), own)
    assert again.classes == ["class 0", "class 1", "class 2"]
    assert torch.equal(timm.create_model("hf-hub:me/model", pretrained=True).eval()(x), own)
    from transformers import AutoModelForImageClassification
    theirs = AutoModelForImageClassification.from_pretrained("me/model").eval()
    assert torch.allclose(theirs(x).logits, own, atol=1e-6)
    assert theirs.config.id2label[1] == "class 1"
from weft.export.hub import push
for use in (lambda: weft.load("hub:me/other"), lambda: push({str(run)!r}, "me/model")):
    try:
        use()
    except weft.WeftError as error:
        print("refused:", error)
push({str(run)!r}, "me/model", replace=True)
"""
    said = elsewhere(code, hub, tmp_path)
    assert "weft.load('hub:me/model') opens it" in said
    assert "refused: hub:me/other cannot be fetched" in said
    assert "refused: me/model holds a model; add --replace" in said
    assert {*Hub.files} >= {"config.json", "model.safetensors", "README.md"}
    written = Hub.files["README.md"].decode()
    assert 'weft.load("hub:me/model")' in written
    assert "| top-1 |" in written
    assert "`class 2`" in written
    assert "36 pictures, of which 7 were kept to measure it" in written
    assert "- 1 epoch in" in written
    assert "AutoModelForImageClassification.from_pretrained" in written
    (index,) = yaml.safe_load(written.split("---")[1])["model-index"]
    measured = json.loads((run / "evaluation.json").read_text())["top1"]
    assert index["results"][0]["metrics"] == [{"type": "top1", "name": "top-1", "value": round(measured, 4)}]
    assert "state" not in " ".join(Hub.files)


def test_card_names_the_version_that_trained(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    config = json.loads((tmp_path / "run/config.json").read_text())
    config["weft"]["version"] = "0.0.7"
    (tmp_path / "run/config.json").write_text(json.dumps(config))
    assert "trained with Weft 0.0.7" in card(tmp_path / "run", weft.load(tmp_path / "run", "cpu"), "me/model")


def test_no_network(run, tmp_path):
    """A port on which nobody listens: one line, no traceback."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
        code = f"""
import weft
from weft.export.hub import push
try:
    push({str(run)!r}, "me/model")
except weft.WeftError as error:
    print("refused:", error)
"""
        said = elsewhere(code, address, tmp_path)
    assert said.startswith(f"refused: {address} cannot be reached: ")
    assert len(said.splitlines()) == 1


def test_values_of_masks_go_along(tmp_path):
    """Values that stand for classes in masks are known to whoever opens the weights, without the run."""
    data = make_squares(tmp_path / "masks", "masks")
    for path in (data / "masks").iterdir():
        Image.fromarray(np.asarray(Image.open(path)) * 10 + 10).save(path)
    tiny_run(data, tmp_path / "run", **dense("fpn", epochs=1))
    (tmp_path / "folder").mkdir()
    write_weights(tmp_path / "run", tmp_path / "folder/model.safetensors")
    own, again = (weft.load(tmp_path / name, "cpu").task for name in ("run", "folder"))
    assert list(own.mask_values) == list(again.mask_values) == [10, 20, 30]  # pyright: ignore
    assert again.mask_colours == own.mask_colours  # pyright: ignore


def test_mistakes(run, tmp_path):
    refused(command("push", run, "model"), "owner/name")
    refused(command("push", tmp_path / "none", "me/model"), "does not exist")
