"""CPU inference: Weft's CvT-13 next to transformers' CvT-13 and timm's DeiT-S, float32, in one run.

    python benchmarks/cpu_inference.py [--rounds 10] [--batches 1 8] [--out benchmarks/results]

Every round times every model in turn, so that a slow moment of the machine hits all of them. The table shows the
median over all rounds, and the ratio to transformers. The outputs are compared before anything is timed.
"""

import argparse
import json
import platform
import statistics
import time
from datetime import date
from pathlib import Path

import timm
import torch
import torch._inductor.config
import transformers
from torch import nn

import weft

torch._inductor.config.freezing = True  # weights are constants in inference
WARM_UP, CALLS = 1, 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--out", type=Path, help="folder for a JSON file with the numbers")
    args = parser.parse_args()
    torch.manual_seed(0)

    theirs = transformers.CvtForImageClassification(transformers.CvtConfig(num_labels=1000)).eval()
    ours = weft.convert(theirs.state_dict(), model="cvt_13")
    quick = weft.create_model("cvt_13").eval()
    models = {
        "transformers CvT-13": theirs,
        "weft cvt_13, exact GELU": ours,
        "weft cvt_13, exact GELU, fused": weft.fuse(ours),
        "weft cvt_13, fused": weft.fuse(quick),
        "weft cvt_13, fused, compiled": torch.compile(weft.fuse(quick)),
        "timm DeiT-S": timm.create_model("deit_small_patch16_224").eval(),
    }
    check_equal(models["weft cvt_13, exact GELU, fused"], theirs)

    result = {"date": date.today().isoformat(), "machine": machine(), "milliseconds": {}, "ratio": {}}
    for batch in args.batches:
        medians = measure(models, torch.randn(batch, 3, 224, 224), args.rounds)
        base = medians["transformers CvT-13"]
        print(f"\nbatch {batch}, 224x224, float32: median of {args.rounds * CALLS} calls")
        for name, seconds in medians.items():
            print(f"  {name:32} {seconds * 1000:8.1f} ms   {batch / seconds:6.1f} pictures/s   {base / seconds:5.2f} x")
        result["milliseconds"][batch] = {name: round(seconds * 1000, 2) for name, seconds in medians.items()}
        result["ratio"][batch] = {name: round(base / seconds, 3) for name, seconds in medians.items()}
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        path = args.out / f"cpu_inference-{result['date']}.json"
        path.write_text(json.dumps(result, indent=2) + "\n")
        print(f"\nWrote {path}")


@torch.inference_mode()
def check_equal(ours: nn.Module, theirs: nn.Module) -> None:
    picture = torch.randn(2, 3, 224, 224)
    difference = (ours(picture) - theirs(picture).logits).abs().max().item()
    assert difference < 1e-4, f"the models do not compute the same: {difference}"
    print(f"largest difference between fused Weft and transformers: {difference:.1e}")


@torch.inference_mode()
def measure(models: dict[str, nn.Module], pictures: torch.Tensor, rounds: int) -> dict[str, float]:
    for model in models.values():
        model(pictures)  # compiles what is to be compiled
    times: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(rounds):
        for name, model in models.items():
            for call in range(WARM_UP + CALLS):
                start = time.perf_counter()
                model(pictures)
                if call >= WARM_UP:
                    times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def machine() -> dict[str, str | int]:
    cpu = next(
        (line.split(":")[1].strip() for line in cpu_info() if line.startswith("model name")), platform.processor()
    )
    versions = {"torch": torch.__version__, "timm": timm.__version__, "transformers": transformers.__version__}
    return {"cpu": cpu, "threads": torch.get_num_threads(), "python": platform.python_version(), **versions}


def cpu_info() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


if __name__ == "__main__":
    main()
