"""A model of Weft in LitServe, as LitServe's documentation does it: the peer of benchmarks/serve.py."""

from typing import Any

import litserve
import torch
from fastapi import UploadFile

from weft.serve.models import open_models
from weft.tasks.classify.predict import named


class WeftApi(litserve.LitAPI):
    """The same model, preprocessing and answer as `weft serve`."""

    def __init__(self, run: str, where: str, batch: int) -> None:
        options: Any = dict(max_batch_size=batch, batch_timeout=0.005) if batch > 1 else {}
        super().__init__(**options)
        self.run, self.where, self.batched = run, where, batch > 1

    def setup(self, device: str) -> None:
        self.predictor = open_models([self.run], self.where)[0].predictor

    def decode_request(self, request: UploadFile) -> torch.Tensor:
        return self.predictor.preprocessing.picture(request.file.read())

    def batch(self, inputs: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(inputs)

    def predict(self, x: torch.Tensor) -> Any:
        return self.predictor.answers(x if self.batched else x[None])

    def unbatch(self, output: list[Any]) -> list[Any]:
        return output

    def encode_response(self, output: Any) -> dict[str, Any]:
        answer = output if self.batched else output[0]
        found = named("a.jpg", answer, self.predictor.classes, 5, self.predictor.multilabel)
        return {"pictures": [{"name": found.name, "labels": found.labels, "probabilities": found.probabilities}]}
