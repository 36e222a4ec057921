"""A whole training step as one recording: augmentation, passes, clipping, optimiser and weight average.

Python takes longer to launch the kernels of a small model's step than a GPU takes to run them. A step whose inputs have
the same shapes as those before is recorded, as a CUDA graph, and replayed from then on; the first ones are launched one
by one, by the same code, and give the same numbers.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from weft.fast.recording.graphs import GraphPool, Key, capturing, stream_for_recordings, try_recording, writable_copy
from weft.fast.replay import WARM_UPS, free_cache
from weft.fast.swap import replaying


class RecordedStep:
    """Runs `compute(*inputs)`, which works on a run's weights in place and gives one tensor, launched or replayed.

    `state()` names the memory it works on: where that has moved, the step is recorded anew.
    """

    def __init__(self, compute: Callable[..., Tensor], state: Callable[[], Key]):
        self.compute, self.state = compute, state
        self.failed = False  # what cannot be recorded is not tried again
        self.forget()

    def forget(self) -> None:
        """Frees the memory of the recording."""
        self._graph: Any = None
        self._key: Key | None = None
        self._inputs: list[Tensor] = []
        self._output: Tensor | None = None
        self._seen = 0

    @property
    def holds_memory(self) -> bool:
        return self._graph is not None

    def __call__(self, inputs: Sequence[Tensor]) -> Tensor:
        """The result, which the next call may write over. All inputs are on the GPU."""
        key = *((x.shape, x.dtype, x.stride()) for x in inputs), *self.state()
        if key != self._key:
            self.forget()
            self._key = key
        with on_stream_for_recordings(inputs[0].device):
            if self._graph is None and not self.failed and self._seen >= WARM_UPS:
                self._record(inputs)
            if self._graph is None:
                self._seen += 1
                return self.compute(*inputs)
            for own, x in zip(self._inputs, inputs, strict=True):
                own.copy_(x)
            self._graph.replay()
            assert self._output is not None
            return self._output

    def _record(self, inputs: Sequence[Tensor]) -> None:
        recorded = try_recording(lambda: self._capture(inputs), inputs[0])
        if recorded is None:
            self.failed = True
        else:
            self._graph, self._inputs, self._output = recorded

    def _capture(self, inputs: Sequence[Tensor]) -> tuple[Any, list[Tensor], Tensor]:
        free_cache()
        graph, own = torch.cuda.CUDAGraph(), [writable_copy(x) for x in inputs]
        with capturing(graph, GraphPool()):
            output = self.compute(*own)
        return graph, own, output


@contextmanager
def on_stream_for_recordings(device: torch.device) -> Iterator[None]:
    """Runs what is launched here where recordings are made, after all before it and before all behind it.

    Autograd and libraries remember the stream that weights were first used in, and a recording must not wait for
    another one. Fused forms know that they are replayed, so that all steps give the same numbers.
    """
    with torch.cuda.device(device):
        stream, current = stream_for_recordings(torch.cuda.current_device()), torch.cuda.current_stream()
        stream.wait_stream(current)
        token = replaying.set(True)
        try:
            with torch.cuda.stream(stream):
                yield
        finally:
            replaying.reset(token)
            current.wait_stream(stream)
