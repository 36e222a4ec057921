"""Weights and config.json, as Weft and timm open them: a run's model without what training left beside it."""

import shutil
from pathlib import Path

import numpy as np
import torch

from weft.documents import read_json, to_json
from weft.export.form import Answers, ExportForm
from weft.files import write_text
from weft.run.predictor import facts_of_data, load


def write_weights(run: Path, path: Path) -> None:
    """The weights as `path`, the configuration beside them.

    The number of classes stands in it once: timm takes it from there, transformers gives it a second time. What the
    run's report on its data says about answers, such as the values that masks are written with, goes along.
    """
    shutil.copyfile(run / "model.safetensors", path)
    config = read_json(run / "config.json")
    if entry := config.get("weft"):
        entry.update(facts_of_data(run, entry))
    (config.get("model_args") or {}).pop("num_classes", None)
    write_text(path.with_name("config.json"), to_json(config, indent=2))


class WeightsFile:
    """A folder of weights that is opened anew and used as the form is."""

    def __init__(self, path: Path, form: ExportForm):
        settings = None if form.predictor.task.whole_pictures else {}
        self.form = type(form)(load(path.parent, "cpu", settings)).eval()

    @torch.no_grad()
    def __call__(self, pictures: np.ndarray) -> Answers:
        found = self.form(torch.from_numpy(pictures))
        return {name: value.numpy() for name, value in zip(self.form.outputs, found, strict=True)}
