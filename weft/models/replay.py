"""Inference without waiting for Python: a model's launches are recorded once for a shape, and replayed as one."""

import torch
from torch import Tensor, nn

WARM_UPS = 3  # passes in front of a recording, in which libraries choose kernels and reserve memory


def replay(model: nn.Module, most: int = 4) -> nn.Module:
    """A model that launches nothing twice: what it did on the GPU for a batch of some shape is recorded and replayed.

        fast = weft.replay(weft.fuse(model).cuda())
        with torch.inference_mode():
            logits = fast(pictures)

    In eval mode and without gradients; every other call goes to the model as it is. The recording, a CUDA graph, takes
    memory of its own for each shape, so that only the `most` shapes that came last are kept. Weights may change in
    place, but not move.
    """
    return Replayed(model, most)


class Replayed(nn.Module):
    """See `replay`."""

    def __init__(self, model: nn.Module, most: int):
        super().__init__()
        self.model = model
        self.train(model.training)
        self.most = most
        self._recordings: dict[tuple[object, ...], tuple[torch.cuda.CUDAGraph, Tensor, Tensor]] = {}

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_cuda or torch.is_grad_enabled() or self.training or torch.compiler.is_compiling():
            return self.model(x)
        key = (x.shape, x.stride(), x.dtype, x.device, torch.is_autocast_enabled("cuda"))
        recording = self._recordings.pop(key, None) or self._record(x)
        self._recordings[key] = recording  # the last in the dictionary is the last that was used
        while len(self._recordings) > self.most:
            del self._recordings[next(iter(self._recordings))]
        graph, given, found = recording
        given.copy_(x)
        graph.replay()
        return found.clone()

    def _record(self, x: Tensor) -> tuple[torch.cuda.CUDAGraph, Tensor, Tensor]:
        given = x.clone()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                self.model(given)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = self.model(given)
        return graph, given, found
