"""Inference without waiting for Python: a model's launches are recorded once for a shape, and replayed as one."""

import torch
from torch import Tensor, nn

from weft.errors import WeftError, check_positive

WARM_UPS = 3  # passes in front of a recording, in which libraries choose kernels and reserve memory


def replay(model: nn.Module, *, most: int = 4) -> nn.Module:
    """A model that launches nothing twice: what it did on the GPU for a batch of some shape is recorded and replayed.

        fast = weft.replay(weft.fuse(model).cuda())
        with torch.inference_mode():
            logits = fast(pictures)

    On a GPU, in eval mode and without gradients; every other call goes to the model as it is. The recording, a CUDA
    graph, takes memory of its own for each shape, so that only the `most` shapes that came last are kept. Weights may
    change in place, but not move.
    """
    if not isinstance(model, nn.Module):
        raise WeftError(f"weft.replay takes a model, not {type(model).__name__}; make one with weft.create_model.")
    check_positive(most=most)
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
        if not x.is_cuda or torch.is_grad_enabled() or self.model.training or torch.compiler.is_compiling():
            return self.model(x)
        with torch.cuda.device(x.device):  # streams and graphs are those of the current one
            key = circumstances(x)
            recording = self._recordings.pop(key, None) or self._record(x)
            self._recordings[key] = recording  # the last in the dictionary is the last that was used
            while len(self._recordings) > self.most:
                del self._recordings[next(iter(self._recordings))]
            graph, given, found = recording
            given.copy_(x)
            graph.replay()
            return found.clone()

    def _record(self, x: Tensor) -> tuple[torch.cuda.CUDAGraph, Tensor, Tensor]:
        given = writable_copy(x)
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


def circumstances(x: Tensor) -> tuple[object, ...]:
    """All that decides what a model launches for `x`, and what kind of tensor it gives."""
    amp = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else None
    return x.shape, x.stride(), x.dtype, x.device, amp, torch.is_inference_mode_enabled()


def writable_copy(x: Tensor) -> Tensor:
    """One that may be written to later, outside of inference mode, too."""
    with torch.inference_mode(False), torch.no_grad():
        return x.clone()
