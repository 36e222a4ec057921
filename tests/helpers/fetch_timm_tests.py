"""Fetches tests/test_models.py of the installed timm from its source distribution; the wheel does not have it."""

import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import version
from pathlib import Path

from tests.helpers.places import ROOT


def main() -> None:
    timm_version = version("timm")
    target = ROOT / ".cache" / f"timm-{timm_version}" / "test_models.py"
    if target.is_file():
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "timm"]
        subprocess.run([*command, f"timm=={timm_version}", "--dest", folder], check=True)
        (archive,) = Path(folder).glob("*.tar.gz")
        with tarfile.open(archive) as tar:
            member = tar.extractfile(f"timm-{timm_version}/tests/test_models.py")
            assert member is not None
            content = member.read()
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(content)
    print(f"Fetched {target.relative_to(Path.cwd())}")


if __name__ == "__main__":
    main()
