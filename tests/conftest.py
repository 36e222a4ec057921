import multiprocessing
import os
from importlib.metadata import version
from importlib.util import find_spec

import pytest

# Some virtual machines show AMX, and end whoever uses it: torch's library would, for products in bfloat16.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import torch
from hypothesis import settings
from torch import nn

settings.register_profile("weft", deadline=None)  # how long a case takes is the machine's affair
settings.load_profile("weft")

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton: its kernels then run on the CPU

torch.backends.cudnn.allow_tf32 = False  # float32 is compared with float64

if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") and version("triton").startswith("3.6."):
    # Its loops read their bounds by way of arrays with one element, which numpy 2.4 no longer takes for numbers.
    from triton.runtime import interpreter

    def patch_tensor(tensor, *args, patch=interpreter._patch_lang_tensor):
        patch(tensor, *args)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    interpreter._patch_lang_tensor = patch_tensor

# Before any test starts the server: it is there once for all of them, and forks what it has imported.
multiprocessing.set_forkserver_preload(
    ["tests.helpers.small_runs", "weft.run.session", "timm", "torch.distributed.fsdp", "pytest"]
)

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # one process per core; more threads would only wait for each other


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def randomise(model: nn.Module) -> nn.Module:
    """BatchNorm statistics and norm parameters as after training, so that leaving one out shows; eval mode."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, std=0.1)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
        if isinstance(module, nn.BatchNorm2d | nn.LayerNorm):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.1)
    return model.eval()


@pytest.fixture
def command():
    """Runs `weft` in this process; returns its exit code, standard output and standard error."""
    from tests.helpers import small_runs

    return small_runs.command
