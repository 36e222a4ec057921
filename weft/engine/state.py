"""The state that a run resumes from, exactly where it stopped: one file, `state/last.safetensors`, always whole.

Tensors (weights, weight average, optimiser) lie in the file under their names; all else is JSON in its header. There is
no state of a random generator in it, because none is needed: order of the data, augmentation, mixing and drop path of a
step are functions of the seed and the number of the step. No pickle, so a state from elsewhere runs no code.
"""

import contextlib
import errno
import functools
import importlib.metadata
import json
import platform
import subprocess
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from weft.documents import parse_json
from weft.engine.lock import STATE, check_state
from weft.engine.optim import Ema
from weft.errors import WeftError
from weft.files import write_tensors
from weft.version import __version__
from weft.words import shell

MEMORY_NOTE = Path("state") / "micro_batch"  # what a process that ran out of memory asks of the next attempt
FORMAT = 1
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)  # a disk, or what somebody may have of it


@dataclass
class RunProgress:
    """The progress of a run: all that changes besides tensors."""

    total_steps: int = 0  # where it ends
    stretch: float = 1.0  # of the schedule, to what a time budget allows
    step: int = 0  # optimiser steps done
    validated: int = 0  # epochs whose validation is done
    best: float | None = None  # validation metric of the kept model
    best_loss: float | None = None  # and its loss, which decides where the metric is the same
    best_epoch: int = 0
    epoch_loss: float = 0.0  # sums over the steps of the running epoch
    epoch_steps: int = 0
    validation_pictures: int = 0  # where minutes are too few to validate on all; 0: all
    validation_seconds: float = 0.0  # of the last validation, ...
    closing_seconds: float = 0.0  # ... and of what follows the last one: only where there are minutes
    seconds: float = 0.0  # of work so far, in all sessions
    micro_batch: int = 0  # pictures at once on one device
    bf16: bool = False  # on a CPU that was found to be faster so
    threads: int = 0  # likewise, with fewer of them than usual; 0: as many as usual, or as config says
    skipped: list[int] = field(default_factory=list)  # steps whose batch gave no finite gradient
    bad: dict[str, str] = field(default_factory=dict)  # files that could not be read, and why
    scaler: dict[str, float] = field(default_factory=dict)  # loss scaling of fp16

    def is_better(self, score: float | None, loss: float | None) -> bool:
        """Whether a model beats the kept one: of equal ones that with the smaller loss or, without one, the later."""
        if self.best is None or score is None or score != self.best:
            return self.best is None or score is None or score > self.best
        return loss is None or self.best_loss is None or loss < self.best_loss


# Writing and reading --------------------------------------------------------------------------------------------


def gather_tensors(
    model: nn.Module, ema: Ema | None, optimizer: torch.optim.Optimizer, keep: bool = True
) -> dict[str, Tensor]:
    """All tensors of a state on the CPU, by name; what lies there already is not copied.

    Sharded ones are put together, so every process must take part, also one that does not `keep` them.
    """
    tensors = {f"model.{key}": value for key, value in model.state_dict().items()}
    if ema is not None:
        tensors |= {f"ema.{key}": value for key, value in ema.module.state_dict().items()}
    for name, parameter in model.named_parameters():
        tensors |= {f"optim.{name}:{key}": value for key, value in optimizer.state.get(parameter, {}).items()}
    parts = ((key, full_tensor(value).detach()) for key, value in tensors.items())
    return {key: value.contiguous().cpu() for key, value in parts if keep}


def snapshot(model: nn.Module, ema: Ema | None, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """A copy of all tensors, for `load_tensors`."""
    return {key: value.clone() for key, value in gather_tensors(model, ema, optimizer).items()}


def full_tensor(tensor: Tensor) -> Tensor:
    """A sharded tensor put together; any other as it is."""
    whole: Any = getattr(tensor, "full_tensor", None)  # of a DTensor, which is slow to import
    return whole() if whole else tensor


def is_finite(model: nn.Module) -> bool:
    return all(bool(full_tensor(p).isfinite().all()) for p in model.parameters())


def write_state(run: Path, tensors: dict[str, Tensor], progress: RunProgress, facts: dict[str, Any]) -> None:
    """`facts` is what a later session compares: configuration, classes, fingerprint of the data."""
    header = {"format": FORMAT, "progress": asdict(progress), "versions": versions(), **facts}
    metadata = {"weft": json.dumps(header)}
    try:
        write_tensors(run / STATE, tensors, metadata)
    except OSError as error:
        raise save_error(run, error) from error


def save_error(run: Path, error: OSError) -> WeftError:
    what = "the disk is full" if error.errno in DISK_FULL else str(error)
    then = f" The last saved state is intact; free some space, then: {shell('weft', 'train', '--resume', run)}"
    return WeftError(f"{run} could not be saved: {what}.{then if (run / STATE).exists() else ''}")


def read_header(run: Path) -> dict[str, Any]:
    """The JSON part of a run's state."""
    path = run / STATE
    check_state(run)
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            header = parse_json((file.metadata() or {})["weft"], path)
        if header["format"] != FORMAT:
            raise WeftError(f"{path} has format {header['format']}; this version of Weft reads format {FORMAT}.")
        header["progress"] = RunProgress(**header["progress"])
    except WeftError:
        raise
    except Exception as error:  # a damaged file can raise anything
        raise WeftError(f"{path} is truncated, or not the state of a run ({type(error).__name__}).") from error
    return header


def load_state(run: Path, model: nn.Module, ema: Ema | None, optimizer: torch.optim.Optimizer) -> RunProgress:
    """Loads a run's state into model, average and optimiser."""
    progress = read_header(run)["progress"]
    try:
        tensors = safetensors.torch.load_file(run / STATE)
    except Exception as error:
        raise WeftError(f"{run / STATE} is truncated or damaged ({type(error).__name__}).") from error
    load_tensors(tensors, model, ema, optimizer)
    return progress


def load_tensors(
    tensors: dict[str, Tensor], model: nn.Module, ema: Ema | None, optimizer: torch.optim.Optimizer
) -> None:
    """Puts the tensors of `gather_tensors` back to where they were."""
    _load_module(model, tensors, "model.")
    if ema is not None:
        _load_module(ema.module, tensors, "ema.")
    _load_optimizer(optimizer, model, tensors)


def _load_module(module: nn.Module, tensors: dict[str, Tensor], prefix: str) -> None:
    own = module.state_dict()
    found = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
    different = sorted(own.keys() ^ found.keys()) or [k for k in own if own[k].shape != found[k].shape]
    if different:
        raise WeftError(f"The state belongs to another model: {', '.join(different[:3])} differ.")
    module.load_state_dict({key: _laid_out_like(own[key], value) for key, value in found.items()})


def _load_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, tensors: dict[str, Tensor]) -> None:
    names = {parameter: name for name, parameter in model.named_parameters()}
    state: dict[int, dict[str, Tensor]] = {}
    by_name: dict[str, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        if key.startswith("optim."):
            name, _, what = key.removeprefix("optim.").rpartition(":")
            by_name.setdefault(name, {})[what] = value
    order = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, parameter in enumerate(order):
        if names[parameter] in by_name:
            found = by_name[names[parameter]]
            state[index] = {
                # a copy of numbers, too: one tensor that lies in the file keeps its place on disk when it is replaced
                k: _laid_out_like(parameter, v) if v.shape == parameter.shape else v.clone()
                for k, v in found.items()
            }
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _laid_out_like(own: Tensor, value: Tensor) -> Tensor:
    """`value` laid out in memory, or over the processes, as `own` is: fused optimisers rely on it."""
    mesh: Any = getattr(own, "device_mesh", None)  # of a DTensor, which is slow to import
    if mesh is not None:
        from torch.distributed.tensor import distribute_tensor

        return distribute_tensor(value.to(own.device), mesh, own.placements)  # pyright: ignore[reportAttributeAccessIssue]
    return torch.empty_like(own, dtype=value.dtype, device=value.device).copy_(value)


@functools.cache
def versions() -> dict[str, str]:
    """Versions of all that a run was made with."""
    found = {name: importlib.metadata.version(name) for name in ("torch", "torchvision", "timm", "numpy", "pillow")}
    return {"weft": __version__, "commit": _commit(), "python": platform.python_version(), **found}


def _commit() -> str:
    """The commit of a working copy of Weft; nothing where it was installed as a package."""
    home = Path(__file__).parents[2]
    if not (home / ".git").exists():
        return ""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["git", "-C", str(home), "rev-parse", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True, timeout=5).stdout.strip()
    return ""
