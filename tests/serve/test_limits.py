"""Clients and pictures that would take more than their share: room, time, memory, connections."""

import socket
import threading
import time
from contextlib import ExitStack, closing
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.helpers.serving import form, models_of, serving
from tests.serve.conftest import encoded

POST = b"POST /predict HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: "


def soon(is_so, seconds: float = 20) -> bool:
    """Whether something becomes so."""
    end = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def counted(served, line: str) -> bool:
    return line in served.service.metrics.text().decode()


def peak() -> float:
    """The most memory in megabytes that this process has had since `forget_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmHWM"))) / 1024


def forget_peak() -> float:
    Path("/proc/self/clear_refs").write_text("5")
    return peak()


@pytest.mark.parametrize("task", ["masks", "objects"])
def test_i1_what_a_model_looks_at_is_bounded(runs, task):
    """A picture of one colour is a small file, however many pixels it has: the server's own memory is looked at."""
    flat = encoded(np.full((750, 750, 3), 90, np.uint8))
    with serving(models_of(runs[task]), seen_pixels=50_000) as served:
        served.predict(encoded(np.full((220, 220, 3), 90, np.uint8)))  # what is there for ever, is there now
        before = forget_peak()
        (row,) = served.predict(flat).json()["pictures"]
        assert row["size"] == [750, 750]
        assert row.get("notes", []) == (["the model saw it as 223 x 223 pixels"] if task == "masks" else [])
        assert peak() - before < 100
        too_large = served.predict(encoded(np.zeros((800, 800), np.uint8)))
        assert too_large.status_code == 422
        assert "more than the limit of 600000" in too_large.json()["error"]


def test_i1_what_a_batch_looks_at_is_bounded(runs):
    """Several pictures that are each small enough do not go together where all of them are not."""
    (model,) = models_of(runs["masks"])
    answers, sizes = model.answers, []

    def answer(pictures):
        sizes.append(sum(one.pixels[0].numel() for one in pictures))
        time.sleep(0.2)
        return answers(pictures)

    model.answers = answer
    picture = encoded(np.full((100, 100, 3), 90, np.uint8))
    with serving([model], seen_pixels=25_000) as served:
        sizes.clear()
        assert served.client.post("/predict", files=form(*[("a.png", picture)] * 6)).status_code == 200
    assert sum(sizes) == 60_000
    assert max(sizes) == 20_000


def test_s2_slow_readers_are_closed(classifier):
    """Whoever asks and asks, and reads nothing of it, keeps no connection; whoever reads slowly has time."""
    with serving(classifier(), seconds=0.5) as served, ExitStack() as stack:
        for _ in range(3):
            connection = stack.enter_context(closing(socket.create_connection(("127.0.0.1", served.port))))
            connection.sendall(b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n" * 200)
        assert soon(lambda: counted(served, 'weft_connections_cut_total{why="unread"} 3.0'))
        assert soon(lambda: not served.server.server_state.connections)


def test_s2_a_slow_reader_that_reads_has_all_of_it(classifier):
    with serving(classifier(), seconds=0.2) as served:
        with closing(socket.socket()) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
            connection.connect(("127.0.0.1", served.port))
            connection.sendall(b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n")
            time.sleep(0.8)
            answer = b""
            while more := connection.recv(65536):
                answer += more
                time.sleep(0.02)
        assert answer.endswith(b"</html>") or b"</html>" in answer[-20:]


def test_s3_too_many_connections_are_told_so(classifier):
    with serving(classifier()) as served, ExitStack() as stack:
        for _ in range(served.server.config.http_protocol_class.most):
            stack.enter_context(closing(socket.create_connection(("127.0.0.1", served.port))))
        assert soon(lambda: len(served.server.server_state.connections) >= 256)
        told = httpx.get(f"{served.url}health", timeout=20)
        assert told.status_code == 503
        assert told.headers["retry-after"] == "5"
        assert "too many connections" in told.json()["error"]
        assert counted(served, 'weft_connections_cut_total{why="crowded"} 1.0')


def test_s3_the_silent_take_no_room(classifier, photo):
    with serving(classifier(), queue=2) as served, ExitStack() as stack:
        for _ in range(6):
            connection = stack.enter_context(closing(socket.create_connection(("127.0.0.1", served.port))))
            connection.sendall(POST + b"5000\r\n\r\nabc")
        assert soon(lambda: served.service.admission.bytes == 18)
        assert served.predict(photo).status_code == 200


def test_s3_work_of_clients_who_went_away_is_dropped(classifier, photo):
    (model,) = classifier()
    answers, looked_at = model.answers, []

    def answer(pictures):
        looked_at.append(len(pictures))
        time.sleep(0.5)
        return answers(pictures)

    with serving([model], batch=1) as served:
        served.service.batchers["classes"].answer = answer
        with ExitStack() as stack:
            for _ in range(5):
                connection = stack.enter_context(closing(socket.create_connection(("127.0.0.1", served.port))))
                connection.sendall(POST + b"%d\r\n\r\n" % len(photo) + photo)
            assert soon(lambda: served.service.admission.pictures == 5)
        line = 'weft_requests_total{path="/predict",status="499"} 5.0'
        assert soon(lambda: counted(served, line))
        assert served.service.admission.pictures == 0
        time.sleep(1.2)
        assert sum(looked_at) <= 2  # the one under way, and one that was taken before it was withdrawn


def test_s3_a_house_that_is_full_after_decoding_says_when_to_come_again(classifier, photo):
    two = form(("a.jpg", photo), ("b.jpg", photo))
    with serving(classifier()) as served:
        house = served.service.admission
        house.most_bytes = len(photo) + 100
        alone = served.predict(photo)
        assert alone.status_code == 503
        assert int(alone.headers["retry-after"]) >= 1
        sent = len(httpx.Request("POST", served.url, files=two).read())
        house.most_bytes = sent + 1000  # for the 768 bytes of one of them
        both = served.client.post("/predict", files=two)
        assert both.status_code == 200
        (missing,) = [row for row in both.json()["pictures"] if "error" in row]
        assert missing["status"] == 503
        assert missing["retry_after"] >= 1
        assert house.pictures == house.bytes == 0


@pytest.mark.parametrize("named", [b"", b'; filename="a.png"'])
def test_s2_parts_of_a_form_are_limited_while_they_come(served, named):
    part = b'--edge\r\ncontent-disposition: form-data; name="a"' + named + b"\r\n\r\n\r\n"
    head = {"content-type": "multipart/form-data; boundary=edge"}
    begun = time.monotonic()
    answer = served.client.post("/predict", content=part * 100_000 + b"--edge--\r\n", headers=head)
    assert answer.status_code == 413
    assert "at most 128 pictures" in answer.json()["error"]
    assert time.monotonic() - begun < 5


def test_s4_not_ready_while_the_model_fails(classifier, photo):
    """A device whose error stays has every answer fail; the server says so until the model answers again."""
    (model,) = classifier()
    with serving([model]) as served:
        well = model.answers

        def fail(pictures):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        model.answers = served.service.batchers["classes"].answer = fail
        assert served.client.get("/ready").status_code == 200
        assert served.predict(photo).status_code == 500
        for _ in range(3):
            assert served.client.get("/ready").status_code == 503
            time.sleep(0.1)
        model.answers = served.service.batchers["classes"].answer = well
        assert soon(lambda: served.client.get("/ready").status_code == 200)
        served.loop.call_soon_threadsafe(served.service.batchers["classes"]._task.cancel)
        assert soon(lambda: served.client.get("/ready").status_code == 503)


def test_s7_slow_requests_are_finished_too(classifier, photo):
    """One that takes its time to arrive, and then for its answer, both within the limit."""
    (model,) = classifier()
    answers = model.answers
    with serving([model], seconds=3) as served:
        go = threading.Event()

        def answer(pictures):
            go.wait(2.3)
            return answers(pictures)

        served.service.batchers["classes"].answer = answer
        with closing(socket.create_connection(("127.0.0.1", served.port), timeout=20)) as connection:
            connection.sendall(POST + b"%d\r\n\r\n" % len(photo) + photo[:100])
            time.sleep(0.2)
            served.server.should_exit = True
            time.sleep(2.2)
            connection.sendall(photo[100:])
            assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")


def test_the_time_of_every_part_is_measured(served, photo):
    assert served.predict(photo).status_code == 200
    for part in ("read", "decode", "model", "words"):
        assert counted(served, f'weft_part_seconds_count{{part="{part}"}}')


def test_logs_have_a_line_for_each_fault(classifier, monkeypatch, caplog):
    told = {"status": 422, "error": "it cannot be decoded", "detail": "ValueError: one\ntwo\x1b[2J"}

    async def ask(*_):
        return told, b""

    with serving(classifier()) as served:
        monkeypatch.setattr(served.service.decoders._all[0], "ask", ask)
        assert served.predict(b"x").status_code == 422
    (record,) = [one for one in caplog.records if "ValueError" in one.getMessage()]
    assert record.getMessage().isprintable()


def test_every_refusal_is_described(served):
    said = served.client.get("/openapi.json").json()["paths"]["/predict"]["post"]["responses"]
    assert {*said} == {str(n) for n in (200, 400, 401, 403, 404, 408, 413, 415, 422, 500, 503, 504)}
