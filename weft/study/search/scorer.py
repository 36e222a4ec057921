"""Scores networks of a space without training them: each inherits the weights of a trained supernet."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from weft.data.loader import Batch, eval_batches, reading_workers
from weft.data.split import load_split
from weft.run.evaluate import find_pictures
from weft.run.predictor import Predictor, load
from weft.study.search.space import Point
from weft.study.search.supernet import Supernet, recalibrate

SCORED = 2000  # validation pictures that a network is scored on, at most: they stay in memory
CALIBRATION = 8  # batches of training pictures from which a network's BatchNorm gets its statistics
BATCH = 64


class SupernetScorer:
    """Validation accuracy of subnets, with the weights of a trained supernet and statistics of their own."""

    def __init__(self, run: Path, device: str, seed: int):
        predictor = load(run, device)
        assert isinstance(predictor.model, Supernet)
        self.predictor, self.supernet = predictor, predictor.model
        source, val, _ = find_pictures(run, split="val")
        train = load_split(run / "split.json", source).train
        rng = np.random.default_rng(seed)

        def read(indices: np.ndarray, most: int) -> list[Batch]:
            chosen = np.sort(rng.permutation(indices)[:most])
            common: Any = dict(batch=BATCH, workers=reading_workers(-1, len(chosen)), pin=False)
            batches = eval_batches(source, predictor.preprocessing, chosen, **common)
            return [batch for batch in batches if len(batch.pictures)]

        self.source, self.calibration, self.scored = source, read(train, CALIBRATION * BATCH), read(val, SCORED)
        self.scored_indices = np.concatenate([batch.index.numpy() for batch in self.scored])

    def __call__(self, point: Point) -> dict[str, Any]:
        """The metrics of `weft eval` for the network at a point."""
        task, network = self.predictor.task, self.supernet.subnet(point)
        with torch.autocast(task.device.type, task.dtype, enabled=task.dtype != torch.float32):
            pictures = (batch.pictures.to(task.device) for batch in self.calibration)
            recalibrate(network, (task.preprocessing.normalise(batch) for batch in pictures))
        predictor, collector = Predictor(network, task), task.collector(self.source, self.scored_indices)
        for batch in self.scored:
            collector.update(predictor.infer(batch.pictures), batch)
        return collector.evaluation().metrics()
