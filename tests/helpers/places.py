"""Where tests find the repository, and the real pictures that are not part of it."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]
DATA = Path(os.environ.get("WEFT_DATA", ROOT.parent / "shared/data"))
