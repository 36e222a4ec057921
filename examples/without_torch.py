"""An exported model without torch or Weft: onnxruntime, numpy and Pillow are all it needs.

python examples/without_torch.py export-mine picture.jpg another.png
"""

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime
from PIL import Image, ImageOps

folder, *pictures = map(Path, sys.argv[1:])
facts = json.loads((folder / "model.json").read_text())
session = onnxruntime.InferenceSession(folder / facts["file"])
classes, channels = facts["classes"], facts["input"]["shape"][3]
for picture in pictures:
    image = ImageOps.exif_transpose(Image.open(picture))
    if image.has_transparency_data:
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    if image.mode.startswith("I"):  # grey of 16 bits
        pixels = np.repeat(np.asarray(image, np.float32)[..., None] / 65535, channels, 2)
    else:
        pixels = np.asarray(image.convert("L" if channels == 1 else "RGB"), np.float32) / 255
    if facts["input"]["type"] == "uint8":
        pixels = (pixels * 255).round().astype(np.uint8)
    pixels = pixels.reshape(1, image.height, image.width, channels)  # of any size: the file does the rest
    answer = dict(zip(facts["outputs"], session.run(None, {"pictures": pixels}), strict=True))
    if "probabilities" in answer:
        best = answer["probabilities"][0].argsort()[::-1][:3]
        print(picture.name, *(f"{classes[c]} {answer['probabilities'][0, c]:.4f}" for c in best), sep="  ")
    elif "boxes" in answer:
        for box, label, score in zip(*(answer[name][0] for name in ("boxes", "labels", "scores")), strict=True):
            if score >= facts["thresholds"]["shown"]:
                print(picture.name, classes[label], f"{score:.4f}", *(f"{side:.1f}" for side in box), sep="  ")
    else:
        shares = np.bincount(answer["labels"].ravel(), minlength=len(classes)) / answer["labels"].size
        print(picture.name, *(f"{name} {share:.4f}" for name, share in zip(classes, shares, strict=True)), sep="  ")
