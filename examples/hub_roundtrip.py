"""A model as a folder in the layout of the Hugging Face hub: written, then opened by timm, the same to the last bit.

python examples/hub_roundtrip.py [--model cetnet_nano] [--out hub-model]
"""

import argparse
from pathlib import Path

import timm
import torch

import weft


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="cetnet_nano", choices=weft.list_models())
    parser.add_argument("--out", type=Path, default=Path("hub-model"))
    args = parser.parse_args()
    torch.manual_seed(0)

    classes = ["cat", "dog", "horse"]
    model = timm.create_model(args.model, num_classes=len(classes)).eval()
    folder = weft.save_model(model, args.out, label_names=classes)
    print(f"Wrote {folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}")

    # This folder is what a repository of the hub holds. One line uploads it, after `hf auth login`:
    #     huggingface_hub.HfApi().upload_folder(repo_id="you/model", folder_path=folder)
    # and everybody who has Weft installed opens it with
    #     timm.create_model("hf-hub:you/model", pretrained=True)
    opened = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()

    picture = torch.randn(1, *opened.pretrained_cfg["input_size"])
    with torch.inference_mode():
        equal = torch.equal(model(picture), opened(picture))
    print(f"label names: {', '.join(opened.pretrained_cfg['label_names'])}")
    print(f"equal logits: {equal}")


if __name__ == "__main__":
    main()
