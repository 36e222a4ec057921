"""What the launchers ask about the GPU."""

from functools import cache

import torch


@cache
def processors(device: torch.device) -> int:
    """The number of multiprocessors; two in the interpreter, where that is enough for a loop."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
