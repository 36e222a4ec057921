"""Packs a run into the model of `weft serve demo`: its weights in half precision, its configuration as it is.

    weft train demo:fashion --recipe demo --model vt_resnet_nano --epochs 16 --out runs/served-demo
    python -m tools.served_demo runs/served-demo

The first takes about half an hour of two cores and reached 88.6 % of the 1,000 test pictures.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from weft.files import write_tensors, write_text

FOLDER = Path(__file__).parents[1] / "weft" / "serve" / "fashion"


def pack(run: Path, folder: Path = FOLDER) -> None:
    """Writes what `weft.load` needs, and nothing about where the run was made."""
    folder.mkdir(exist_ok=True)
    weights = load_file(run / "model.safetensors")
    half = {name: w.half() if w.dtype == torch.float32 else w for name, w in weights.items()}
    write_tensors(folder / "model.safetensors", half, {"format": "pt"})
    write_text(folder / "config.json", (run / "config.json").read_text(encoding="utf-8"))


if __name__ == "__main__":
    pack(Path(sys.argv[1]))
