"""The checklist of reliability, line by line: S1 to S7 of serving; I1 to I6 are those of `test_pictures.py`."""

import gc
import io
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.places import ROOT
from tests.helpers.serving import form, serving
from tests.helpers.small_runs import refused
from tests.serve.conftest import encoded
from weft.errors import WeftError
from weft.serve.server import leave_to_live, serve
from weft.serve.service import Service
from weft.serve.settings import ServeSettings

TOKEN = "a-token-of-twenty-letters"


def slow(model, seconds: float):
    """The model, with answers that take a while."""
    answers = model.answers

    def answer(pictures):
        time.sleep(seconds)
        return answers(pictures)

    model.answers = answer
    return model


def memory(pids: list[int]) -> float:
    """Megabytes that these processes have for themselves, those that they share left out."""
    total = 0
    for pid in pids:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            rows = dict(line.split()[:2] for line in file.readlines()[1:])
        total += int(rows["Private_Dirty:"]) + int(rows["Private_Clean:"])
    return total / 1024


def test_s1_listens_to_this_machine_alone_unless_told_and_with_a_token(command, classifier):
    assert ServeSettings().host == "127.0.0.1"
    refused(command("serve", "nothing", "--host", "0.0.0.0"), "token", "--host 0.0.0.0")
    refused(command("serve", "nothing", "--host", "::"), "token")
    for host in ("127.0.0.1", "localhost", "::1", "127.8.8.8"):
        ServeSettings(host=host).check()
    with pytest.raises(WeftError, match="at least 16"):
        ServeSettings(host="0.0.0.0", token="short").check()
    with serving(classifier(), host="0.0.0.0", token=TOKEN) as served:
        client, url = served.client, f"http://127.0.0.1:{served.port}"
        for path in ("/models", "/metrics", "/samples"):
            assert client.get(url + path).status_code == 401
            assert client.get(url + path, headers={"authorization": f"Bearer {TOKEN}x"}).status_code == 401
            assert client.get(url + path, headers={"authorization": TOKEN}).status_code == 401
            for scheme in ("Bearer", "bearer"):
                assert client.get(url + path, headers={"authorization": f"{scheme} {TOKEN}"}).status_code == 200
        assert client.post(url + "/predict", content=b"x").status_code == 401
        for path in ("/", "/health", "/ready"):
            assert client.get(url + path).status_code == 200


def test_s1_pages_of_others_are_not_answered(served, photo):
    """Neither a page elsewhere whose script calls us, nor one whose name was made to lead here."""
    ask = {"content": photo}
    assert served.client.post("/predict", **ask, headers={"origin": "https://elsewhere.example"}).status_code == 403
    assert served.client.post("/predict", **ask, headers={"host": "elsewhere.example"}).status_code == 403
    own = served.url.rstrip("/")
    assert served.client.post("/predict", **ask, headers={"origin": own}).status_code == 200


def test_s2_bytes_are_limited_while_they_come(classifier, photo):
    with serving(classifier(), max_bytes=100_000) as served:
        assert served.predict(photo).status_code == 200
        assert served.predict(bytes(100_001)).status_code == 413  # announced
        many = (bytes(1000) for _ in range(500))
        assert served.client.post("/predict", content=many).status_code == 413  # not announced: chunked
        large = served.client.post("/predict", files=form(("a.jpg", photo), ("b.jpg", bytes(200_000))))
        assert large.status_code == 413
        head = b"POST /predict HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\ncontent-length: "
        answer = served.raw(head + b"99999999999\r\n\r\n")  # a false one, with nothing behind it
        assert b" 413 " in answer.split(b"\r\n")[0]
        short = served.raw(head + b"10\r\n\r\n" + bytes(500))  # and one with more: the rest is no part of it
        assert b" 415 " in short.split(b"\r\n")[0]
        assert served.service.admission.bytes == served.service.admission.pictures == 0


def test_s2_pixels_and_kinds_are_limited(classifier, photo):
    with serving(classifier(), max_pixels=1999) as served:
        answer = served.predict(photo)  # 40 x 50
        assert answer.status_code == 422
        assert "50 x 40 pixels are more than the limit of 1999" in answer.json()["error"]
        assert served.predict(b"%PDF-1.4 and so on").status_code == 415
        assert served.predict(b"").status_code == 400


@pytest.mark.parametrize(
    "beginning",
    [
        b"",
        b"POST /pre",
        b"POST /predict HTTP/1.1\r\nhost: 127.0.0.1\r\n",
        b"POST /predict HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 5000\r\n\r\nabc",
    ],
    ids=["nothing", "line", "headers", "body"],
)
def test_s2_slow_clients_are_closed(classifier, beginning):
    with serving(classifier(), seconds=0.5) as served:
        begun = time.monotonic()
        answer = served.raw(beginning)
        took = time.monotonic() - begun
        assert 0.4 < took < 5
        assert (b" 408 " in answer) == (b"5000" in beginning)  # whoever can be told why is told
        assert served.client.get("/health").status_code == 200


def test_s2_heads_without_end_are_cut(served):
    with pytest.raises((ConnectionError, BrokenPipeError)):
        served.raw(b"GET / HTTP/1.1\r\nx: " + bytes([97]) * 10**7)


def test_s2_trailers_without_end_are_cut(served):
    """What follows the last chunk of a body belongs to no limit of the body."""
    head = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n"
    with pytest.raises((ConnectionError, BrokenPipeError)):
        served.raw(head, b"a1: bbbbbbbb\r\n" * 1_000_000)


def test_s2_blank_lines_keep_no_connection(classifier):
    def keep_open(connection):
        for _ in range(45):  # nine seconds; the patience is one and a half
            connection.sendall(b"\r\n")
            time.sleep(0.2)

    with serving(classifier(), seconds=0.5) as served:
        address = ("127.0.0.1", served.port)
        with closing(socket.create_connection(address, timeout=10)) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b"200" in connection.recv(65536)
            with pytest.raises(ConnectionError):
                keep_open(connection)


def test_s3_a_full_queue_says_so_at_once(classifier, photo):
    """While the model holds all that there is room for; they are answered, and nothing is left behind."""
    (model,) = classifier()
    answers, go = model.answers, threading.Event()
    go.set()

    def answer(pictures):
        assert go.wait(60)
        return answers(pictures)

    model.answers = answer
    with serving([model], queue=4, batch=1) as served, ThreadPoolExecutor(4) as pool:
        go.clear()
        held = [pool.submit(served.predict, photo) for _ in range(4)]
        while served.service.admission.pictures < 4:
            time.sleep(0.005)
        head = b"POST /predict HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
        asked, took = head % len(photo) + photo, []
        for _ in range(20):
            begun = time.monotonic()
            refusal = served.raw(asked)  # each a client of its own: who was refused is not heard again for a moment
            took.append(time.monotonic() - begun)
            assert refusal.startswith(b"HTTP/1.1 503 ")
            assert 1 <= int(refusal.partition(b"retry-after: ")[2].partition(b"\r\n")[0]) <= 60
        assert np.median(took) < 0.05  # not all: the machine may be busy with something else
        assert not any(one.done() for one in held)
        go.set()
        assert [one.result().status_code for one in held] == [200] * 4
        assert served.service.admission.pictures == served.service.admission.bytes == 0


def test_s3_more_pictures_than_the_queue_holds_are_refused(classifier, photo):
    with serving(classifier(), queue=4) as served:
        assert served.client.post("/predict", files=form(*[("a.jpg", photo)] * 4)).status_code == 200
        assert served.client.post("/predict", files=form(*[("a.jpg", photo)] * 5)).status_code == 413


def test_s3_a_deadline_drops_the_work(classifier, photo):
    (model,) = classifier()
    looked_at = []
    answers = model.answers

    def answer(pictures):
        looked_at.append(len(pictures))
        time.sleep(0.8)
        return answers(pictures)

    with serving([model], seconds=0.5, batch=1) as served, ThreadPoolExecutor(4) as pool:
        model.answers = served.service.batchers["classes"].answer = answer
        statuses = [one.status_code for one in pool.map(lambda _: served.predict(photo), range(4))]
        assert statuses == [504] * 4
        time.sleep(1.2)
        assert sum(looked_at) <= 2  # the one under way, and one that was taken before it was withdrawn
        assert served.service.admission.pictures == 0


def test_s3_memory_stays_the_same(served, photo):
    """A leak shows in each of three rounds, or by leaps in two; the soak asks for longer.

    One round may take a lot once: a batch of a new size, or a thread that comes.
    """

    def ask(n: int) -> None:
        with ThreadPoolExecutor(8) as pool:
            assert {one.status_code for one in pool.map(lambda _: served.predict(photo), range(n))} == {200}

    ask(300)
    pids = [os.getpid(), *served.service.decoders.pids]
    taken = [memory(pids)]
    for _ in range(3):
        ask(400)
        taken.append(memory(pids))
    calmest, calmer, _ = sorted(later - earlier for earlier, later in pairwise(taken))
    assert calmest < 2
    assert calmest + calmer < 8


def test_s4_health_answers_under_full_load(runs, photo):
    """Within 100 ms, while large pictures are decoded and the model is busy."""
    from tests.helpers.serving import models_of

    large = encoded(np.random.default_rng(0).integers(0, 255, (1500, 2000, 3), np.uint8), "JPEG")
    (model,) = models_of(runs["classes"])
    with serving([slow(model, 0.1)], decoders=2, queue=64) as served, ThreadPoolExecutor(16) as pool:
        work = [pool.submit(served.predict, large) for _ in range(48)]
        took = []
        while not all(one.done() for one in work):
            for path in ("/health", "/ready"):
                begun = time.monotonic()
                assert served.client.get(path).status_code == 200
                took.append(time.monotonic() - begun)
            time.sleep(0.01)
        assert {one.result().status_code for one in work} == {200}
        assert len(took) > 10
        assert np.median(took) < 0.1


def test_s4_the_collector_passes_over_what_is_there_from_the_start():
    """A look at all modules takes long, with nobody answered meanwhile."""

    def look() -> float:
        begun = time.perf_counter()
        gc.collect()
        return time.perf_counter() - begun

    gc.collect()
    before = look()
    leave_to_live()
    try:
        assert look() < before / 4
    finally:
        gc.unfreeze()


@pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities of their own on Linux alone")
def test_s4_what_computes_steps_back(served):
    own = os.getpriority(os.PRIO_PROCESS, 0)
    below = [os.getpriority(os.PRIO_PROCESS, pid) for pid in served.service.decoders.pids]
    below.append(
        served.service.computing.submit(lambda: os.getpriority(os.PRIO_PROCESS, threading.get_native_id())).result()
    )
    assert below == [min(19, own + 5)] * 3


@pytest.mark.parametrize("when", ["before", "while"])
def test_s4_a_decoder_that_dies_is_replaced(classifier, photo, when):
    with serving(classifier()) as served:
        (pid,) = served.service.decoders.pids
        if when == "before":
            os.kill(pid, signal.SIGKILL)
        else:
            os.kill(pid, signal.SIGSTOP)
            threading.Timer(0.2, os.kill, (pid, signal.SIGKILL)).start()
        answer = served.predict(photo)
        assert answer.status_code == 200
        assert served.service.decoders.pids != [pid]
        assert "weft_decoders_ended 1.0" in served.client.get("/metrics").text


def test_s4_a_picture_that_hangs_its_decoder_is_given_up(classifier, photo):
    with serving(classifier(), decode_seconds=0.5) as served:
        os.kill(served.service.decoders.pids[0], signal.SIGSTOP)
        answer = served.predict(photo)
        assert answer.status_code == 422
        assert "0.5 seconds" in answer.json()["error"]
        assert served.predict(photo).status_code == 200


def test_s4_decoders_end_with_their_server():
    """However that ends: they do not listen to SIGTERM, and nobody may have to wait for them."""
    program = (
        "import asyncio\n"
        "from tests.helpers.made_pictures import preprocessing\n"
        "from weft.serve.decoders import DecoderPool, PictureWay\n"
        "async def main():\n"
        "    ways = [PictureWay(preprocessing(), False, 1000, 1000)]\n"
        "    pool = DecoderPool(ways, count=1, seconds=1)\n"
        "    await pool.start()\n"
        "    print(*pool.pids, flush=True)\n"
        "    raise SystemExit('an error')\n"
        "asyncio.run(main())\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program]
    told = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240, check=False)
    assert told.stderr.endswith("an error\n")
    assert not Path(f"/proc/{int(told.stdout)}").exists()


@pytest.mark.parametrize(
    "sent",
    [
        b"/etc/passwd",
        b"file:///etc/passwd",
        b"http://127.0.0.1:1/picture.jpg",
        b'{"url": "http://127.0.0.1:1/picture.jpg"}',
        b"\x80\x04\x95\x1c\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94\x8c\x04true\x94\x85\x94R\x94.",
    ],
    ids=["path", "file", "url", "json", "pickle"],
)
def test_s5_nothing_is_fetched_or_unpickled(served, sent):
    for answer in (served.predict(sent), served.client.post("/predict", files=form(("a.jpg", sent)))):
        assert answer.status_code == 415
    assert served.client.post("/predict", data={"picture": "/etc/passwd"}).status_code in (400, 415)


def test_s5_an_array_of_objects_is_not_unpickled(served, tmp_path):
    class Harm:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "harm",))

    file = io.BytesIO()
    np.save(file, np.array([[Harm()]], object), allow_pickle=True)
    assert served.predict(file.getvalue()).status_code == 422
    assert not (tmp_path / "harm").exists()


def test_s5_errors_have_an_id_and_no_insides(classifier, photo, caplog):
    (model,) = classifier()
    with serving([model]) as served:

        def fail(pictures):
            raise RuntimeError(f"at {__file__}")

        served.service.batchers["classes"].answer = fail
        answer = served.predict(photo)
        assert answer.status_code == 500
        told = answer.json()
        assert {*told} == {"error", "id"}
        assert "Traceback" not in answer.text
        assert "/" not in told["error"]
        assert told["id"] == answer.headers["x-request-id"]
        (record,) = [one for one in caplog.records if told["id"] in one.getMessage()]
        assert "RuntimeError" in str(record.exc_info)
        for path in ("/nothing", "/samples/x", "/../../etc/passwd", "/samples/99"):
            assert {*served.client.get(path).json()} == {"error", "id"}
        assert served.predict(photo, top=0).json()["error"].startswith("top: ")


def test_s5_names_of_files_stay_text(served, photo):
    name = "../../<img src=x onerror=alert(1)>\u202e.jpg"
    (row,) = served.client.post("/predict", files=form((name, photo))).json()["pictures"]
    assert row["name"] == "<img src=x onerror=alert(1)>.jpg"
    assert served.predict(photo).headers["content-type"] == "application/json"
    assert served.predict(photo).headers["x-content-type-options"] == "nosniff"


def test_s6_models_are_chosen_at_the_start(served, photo, runs):
    """By names of the list alone; nothing takes a model, and no path is one."""
    assert [one["name"] for one in served.client.get("/models").json()["models"]] == [*runs]
    for name in (str(runs["classes"]), "../classes", "demo", "nothing"):
        answer = served.predict(photo, model=name)
        assert answer.status_code == 404
        assert str(runs["classes"]) not in answer.json()["error"]
    described = served.client.get("/openapi.json").json()["paths"]
    posts = {path for path, methods in described.items() if {*methods} - {"get"}}
    assert posts == {"/predict", "/explain"}
    assert served.client.post("/models", content=photo).status_code == 405


def test_s7_requests_under_way_are_finished(classifier, photo):
    (model,) = classifier()
    with serving([slow(model, 0.5)], batch=1) as served, ThreadPoolExecutor(4) as pool:
        work = [pool.submit(served.predict, photo) for _ in range(3)]
        while served.service.admission.pictures < 3:
            time.sleep(0.005)
        served.server.should_exit = True
        assert [one.result().status_code for one in work] == [200] * 3
    with pytest.raises(OSError, match="refused"), closing(socket.create_connection(("127.0.0.1", served.port))):
        pass


def test_s7_the_command_stops_gracefully(runs, photo):
    """SIGTERM while a request is on its way: it is answered, the command says so and ends with 0, nothing is left
    alone.
    """
    import httpx

    command = [sys.executable, "-m", "weft", "serve", str(runs["classes"]), "--port", "0", "--decoders", "1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as weft:
        assert weft.stdout is not None
        first = weft.stdout.readline()
        address = weft.stdout.readline().split()[1]
        assert first.startswith("classes: cvt_nano, 3 classes")
        assert httpx.get(f"{address}ready").status_code == 200
        if sys.platform == "linux":  # commands end quietly when nobody reads on; a server must not, when a client goes
            ignored = re.search(r"SigIgn:\s*(\w+)", Path(f"/proc/{weft.pid}/status").read_text())
            assert ignored is not None
            assert int(ignored[1], 16) >> (signal.SIGPIPE - 1) & 1
        port = int(address.rstrip("/").rpartition(":")[2])
        with closing(socket.create_connection(("127.0.0.1", port), timeout=20)) as connection:
            head = f"POST /predict HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(photo)}\r\n\r\n".encode()
            connection.sendall(head + photo[:100])
            time.sleep(0.2)
            weft.send_signal(signal.SIGTERM)
            time.sleep(0.3)
            connection.sendall(photo[100:])
            assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
        rest, errors = weft.communicate(timeout=30)
    assert rest == "Stopped.\n"
    assert errors == ""
    assert weft.returncode == 0


def test_a_server_that_cannot_start_says_so_in_a_line(monkeypatch, runs):
    async def start(self):
        raise RuntimeError("CUDA out of memory\nmore of it")

    monkeypatch.setattr(Service, "start", start)
    monkeypatch.setenv("WEFT_TOKEN", TOKEN)
    monkeypatch.setattr("signal.signal", lambda *_: None)  # of the process that tests
    with pytest.raises(WeftError, match=r"cannot be served: CUDA out of memory$"):
        serve([str(runs["classes"])], ServeSettings(port=0))
    assert "WEFT_TOKEN" not in os.environ  # which the processes that decode would have
