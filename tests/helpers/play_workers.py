"""Workers that train nothing, for tests of what happens around a training."""

import subprocess
import sys
from pathlib import Path

import pytest

from weft.study.cells.cell import Cell, cell_folder
from weft.study.cells.workers import WorkerPool

WORKER = """
import json, os, sys, time
from pathlib import Path
for line in sys.stdin:  # ends with the parent, as the real one does
    folder = Path(line.rstrip())
    cell = json.loads((folder / "cell.json").read_text())
    if cell["seed"] == 7:
        os._exit(3)
    if cell["seed"] == 8:
        print(json.dumps("bad luck"), flush=True)
        continue
    with open(folder / "trained.txt", "a") as file:
        file.write("x")
    if cell["seed"] == 6:
        print('"half of a li', end="", flush=True)
        os._exit(3)
    curve = [{"kind": "epoch", "epoch": 1, "step": 1, "seconds": 0.5}]  # too short for a speed
    result = {"cell": cell, "metrics": {"top1": cell["seed"] / 10}, "curve": curve, "speed": 0.0, "seconds": 1.0}
    (folder / "result.json").write_text(json.dumps(result))
    print('""', flush=True)
"""


@pytest.fixture
def play(monkeypatch, tmp_path):
    """Workers that train nothing: seed 6 ends the process while it answers, 7 at once, seed 8 fails."""

    def start_worker(self, device):
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        worker = subprocess.Popen([sys.executable, "-c", WORKER], **pipes)
        self.workers.append(worker)
        return worker

    monkeypatch.setattr(WorkerPool, "start_worker", start_worker)
    return tmp_path / "study"


def times_trained(study: Path, cell: Cell) -> int:
    return len((cell_folder(study, cell) / "trained.txt").read_text())
