"""Small trained models, once for all tests of the server."""

import io
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.helpers.serving import Served, models_of, serving
from tests.helpers.small_runs import dense, make_pictures, make_squares, tiny_run

pytest.importorskip("fastapi")


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run of each task."""
    root = tmp_path_factory.mktemp("served")
    made = {
        "classes": tiny_run(make_pictures(root / "pictures"), root / "classes", epochs=1),
        "masks": tiny_run(make_squares(root / "squares"), root / "masks", **dense("fpn", epochs=2)),
        "objects": tiny_run(make_squares(root / "boxes", "coco"), root / "objects", **dense("mask-rcnn", epochs=2)),
    }
    return {name: Path(run.folder) for name, run in made.items()}


@pytest.fixture(scope="session")
def served(runs: dict[str, Path]) -> Iterator[Served]:
    """A server with all of them and the usual limits."""
    with serving(models_of(*runs.values()), decoders=2) as found:
        yield found


@pytest.fixture
def classifier(runs: dict[str, Path]) -> Callable[[], list]:
    return lambda: models_of(runs["classes"])


def encoded(pixels: np.ndarray, kind: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, **options)
    return file.getvalue()


@pytest.fixture(scope="session")
def photo() -> bytes:
    return encoded(np.random.default_rng(0).integers(0, 255, (40, 50, 3), np.uint8), "JPEG")
