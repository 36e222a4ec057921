"""Training without the import of torch's compiler, and the compiler unharmed where it is wanted after all."""

import subprocess
import sys

import pytest
import torch

from tests.helpers.small_runs import make_pictures
from weft.engine.without_compiler import assume_constant_result, uncompiled

IMPORTING = "import sys\nfrom weft.engine.without_compiler import importing_without_compiler\n"


def tell(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", IMPORTING + code], capture_output=True, text=True, timeout=120)
    assert not done.returncode, done.stderr
    return done.stdout


def test_a_run_trains_without_the_compiler(tmp_path):
    folder, run = make_pictures(tmp_path / "pictures"), tmp_path / "run"
    settings = "model=cvt_nano img_size=32 batch=8 epochs=1 optim.warmup_epochs=0 run.report=no data.workers=0"
    options = [f"--{setting.replace('_size', '-size')}" for setting in settings.split(" ")]
    words = ["weft", "train", str(folder), "--out", str(run), "--device", "cpu", *options]
    told = tell(
        f"sys.argv = {words!r}\nfrom weft.cli.app import main\ntry:\n    main()\nexcept SystemExit:\n    pass\n"
        "heavy = ('torch._dynamo', 'torch._inductor', 'matplotlib', 'transformers')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    assert told.splitlines()[0] == f"{folder}: starting"
    assert told.splitlines()[-1] == "[]"
    assert (run / "metrics.jsonl").is_file()


def test_a_function_that_was_kept_from_the_compiler_stays_so():
    """The decorator of the stand-in does what torch's own does, once there is a compiler."""
    told = tell(
        """
with importing_without_compiler():
    import torch
    seen = []
    @torch.compiler.disable
    def apart(x):
        seen.append(torch.compiler.is_compiling())
        return x + 1
    assert type(sys.modules["torch._dynamo"]).__name__ == "_StandIn"
assert "torch._dynamo" not in sys.modules
compiled = torch.compile(lambda x: apart(x * 2) * 3, backend="eager")
print(compiled(torch.ones(1)).item(), seen, len(sys.modules["torch._dynamo"].__file__) > 0)
try:
    torch.compile(lambda x: apart(x), backend="eager", fullgraph=True)(torch.ones(1))
except torch._dynamo.exc.Unsupported:
    print("refused")
"""
    )
    assert told.splitlines() == ["9.0 [False] True", "refused"]


@pytest.mark.parametrize(
    "asking",
    [
        "import torch._dynamo; found = torch._dynamo.explain",
        "from torch._dynamo.utils import counters as found",
        "from torch._dynamo.eval_frame import OptimizedModule as found",
        "from torch._dynamo import explain as found",
        "from torch._dynamo.utils import is_compile_supported; found = is_compile_supported; assert found('cpu')",
    ],
)
def test_whoever_asks_for_more_gets_the_compiler(asking):
    told = tell(
        f"with importing_without_compiler():\n    {asking}\n    import torchvision.ops\n"
        "import torch._dynamo\nprint(found is not None, torch._dynamo.explain.__module__, "
        "type(sys.modules['torch._dynamo.utils']).__name__)"
    )
    assert told.split() == ["True", "torch._dynamo.eval_frame", "module"]


def test_constants_are_marked_as_torch_marks_them():
    ours, theirs = (lambda: 1), (lambda: 1)
    assert vars(assume_constant_result(ours)) == vars(torch.compiler.assume_constant_result(theirs)) != {}


@pytest.mark.parametrize(
    ("kind", "how"), [(torch.optim.AdamW, dict(betas=(0.8, 0.9))), (torch.optim.SGD, dict(momentum=0.9))]
)
@pytest.mark.parametrize("fused", [True, False])
def test_optimisers_compute_what_torchs_own_do(kind, how, fused):
    weights, states = [], []
    for make in (kind, uncompiled(kind)):
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(5, 3, generator=generator).requires_grad_()
        optimizer = make([weight], lr=0.1, weight_decay=0.05, fused=fused, **how)
        for _ in range(3):
            optimizer.zero_grad(set_to_none=True)
            (weight * torch.randn(5, 3, generator=generator)).square().sum().backward()
            optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        weights.append(weight.detach())
        states.append(optimizer.state_dict()["state"][0])
    assert torch.equal(*weights)
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(torch.as_tensor(states[0][key]), torch.as_tensor(states[1][key])) for key in states[0])
    assert isinstance(uncompiled(kind)([weight], lr=0.1), kind)
