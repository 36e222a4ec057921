"""metrics.jsonl: what a kill may have cut is dropped, and what a hand has damaged is never thrown away."""

import pytest

from tests.helpers.small_runs import command, make_pictures, refused, tiny_run
from weft.engine.log import read_rows
from weft.errors import WeftError

ROW = '{"kind": "step", "step": 1, "epoch": 0.5, "loss": 1.0}\n'


@pytest.mark.parametrize("torn", ['{"kind": "st', "\x00\x00\x00", "garbage"])
def test_a_torn_last_line_is_dropped(tmp_path, torn):
    (tmp_path / "metrics.jsonl").write_text(2 * ROW + torn)
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1, 1]


@pytest.mark.parametrize(
    "line", ["garbage", "null", "[]", "{}", '{"kind": []}', '{"kind": "step", "step": null}', "[" * 9999]
)
def test_a_damaged_line_before_it_is_named(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_text(f"{ROW}{line}\n{ROW}")
    with pytest.raises(WeftError, match=r"metrics\.jsonl: line 2 is no row of a log"):
        read_rows(tmp_path / "metrics.jsonl")


def test_resuming_keeps_a_damaged_log(tmp_path):
    run = tiny_run(make_pictures(tmp_path / "data"), tmp_path / "run").folder
    log = run / "metrics.jsonl"
    first, second, *rest = log.read_text().splitlines(keepends=True)
    log.write_text("".join([first, "garbage\n", *rest]))
    before = log.read_bytes()
    refused(command("train", "--resume", run, "--allow-changes", "--run.epochs", "5"), "line 2")
    assert log.read_bytes() == before
    log.write_text("".join([first, second, *rest]))
    assert command("train", "--resume", run, "--allow-changes", "--run.epochs", "5")[0] == 0
    assert [row["epoch"] for row in read_rows(log) if row["kind"] == "epoch"] == [1, 2, 3, 4, 5]
