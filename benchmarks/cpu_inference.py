"""CPU inference, float32, in one run: CvT-13 next to transformers', CeiT-T next to its published form, and DeiT.

    python benchmarks/cpu_inference.py [--rounds 10] [--batches 1 8] [--out benchmarks/results]

Every round times every model in turn, so that a slow moment of the machine hits all of them. The table shows the
median over all rounds, and the ratio to the first of the family. The outputs are compared before anything is timed.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import timm
import torch
import torch._inductor.config
import transformers
from torch import nn

import weft
from weft.report.run import processor

sys.path.insert(0, str(Path(__file__).parents[1]))  # the tests belong to the repository, not to the package
from tests.helpers.published import OfficialCeiT

torch._inductor.config.freezing = True  # weights are constants in inference
WARM_UP, CALLS = 1, 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--out", type=Path, help="folder for a JSON file with the numbers")
    args = parser.parse_args()
    torch.manual_seed(0)

    families = [cvt_13(), ceit_tiny()]
    result = {"date": date.today().isoformat(), "machine": machine(), "milliseconds": {}, "ratio": {}}
    for batch in args.batches:
        models = {name: model for family in families for name, model in family.items()}
        medians = measure(models, torch.randn(batch, 3, 224, 224), args.rounds)
        ratios = {name: medians[next(iter(family))] / medians[name] for family in families for name in family}
        print(f"\nbatch {batch}, 224x224, float32: median of {args.rounds * CALLS} calls")
        for name, seconds in medians.items():
            print(f"  {name:32} {seconds * 1000:8.1f} ms   {batch / seconds:6.1f} pictures/s   {ratios[name]:5.2f} x")
        result["milliseconds"][batch] = {name: round(seconds * 1000, 2) for name, seconds in medians.items()}
        result["ratio"][batch] = {name: round(ratio, 3) for name, ratio in ratios.items()}
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        path = args.out / f"cpu_inference-{result['date']}.json"
        path.write_text(json.dumps(result, indent=2) + "\n")
        print(f"\nWrote {path}")


def cvt_13() -> dict[str, nn.Module]:
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
    check_equal("weft cvt_13, exact GELU, fused", models, lambda pictures: theirs(pictures).logits)
    return models


def ceit_tiny() -> dict[str, nn.Module]:
    theirs = OfficialCeiT(dim=192, heads=3).eval()
    ours = weft.convert(theirs.state_dict(), model="ceit_tiny")
    models = {
        "published CeiT-T": theirs,
        "weft ceit_tiny": ours,
        "weft ceit_tiny, fused": weft.fuse(ours),
        "timm DeiT-T": timm.create_model("deit_tiny_patch16_224").eval(),
    }
    check_equal("weft ceit_tiny, fused", models, theirs)
    return models


@torch.inference_mode()
def check_equal(ours: str, models: dict[str, nn.Module], theirs: Callable[[torch.Tensor], torch.Tensor]) -> None:
    pictures = torch.randn(2, 3, 224, 224)
    difference = (models[ours](pictures) - theirs(pictures)).abs().max().item()
    assert difference < 1e-4, f"{ours} does not compute what {next(iter(models))} does: {difference}"
    print(f"largest difference between {ours} and {next(iter(models))}: {difference:.1e}")


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
    versions = {"torch": torch.__version__, "timm": timm.__version__, "transformers": transformers.__version__}
    return {"cpu": processor(), "threads": torch.get_num_threads(), "python": platform.python_version(), **versions}


if __name__ == "__main__":
    main()
