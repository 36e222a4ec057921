"""What is handed out: the wheel holds the whole package, and works where nothing but its dependencies is installed."""

import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import venv
import zipfile
from pathlib import Path

import pytest

from tests.helpers.places import ROOT
from weft.version import __version__

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def dist(tmp_path_factory) -> Path:
    """The sdist, and the wheel made from it, as `make dist` does; without a network."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    shutil.copytree(ROOT / "weft", source / "weft", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
    built = subprocess.run(build, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    return out


class Environment:
    """An environment in which the wheel is installed, and its dependencies are those of this one."""

    def __init__(self, folder: Path, wheel: Path):
        venv.create(folder, with_pip=True, symlinks=os.name != "nt")
        self.scripts = folder / ("Scripts" if os.name == "nt" else "bin")
        self.around = folder.parent
        subprocess.run(
            [self.scripts / "python", "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", wheel], check=True
        )
        # Folders that are named in a .pth file are searched for packages, but not for .pth files of their own: an
        # editable Weft that may be installed in them stays out of sight.
        (packages,) = folder.rglob("site-packages")
        here = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
        (packages / "dependencies.pth").write_text("\n".join(here))
        self.variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}

    def start(self, program: str, *arguments: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [self.scripts / program, *arguments],
            cwd=self.around,
            env=self.variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, program: str, *arguments: str) -> str:
        process = self.start(program, *arguments)
        output = process.communicate()[0]
        assert process.returncode == 0, output
        return output


@pytest.fixture(scope="module")
def installed(dist, tmp_path_factory) -> Environment:
    (wheel,) = dist.glob("*.whl")
    return Environment(tmp_path_factory.mktemp("installed") / "environment", wheel)


def test_wheel_and_sdist_hold_the_whole_package(dist):
    """Every file of the package, templates, recipes, tables, spaces, the catalog, the demos' pictures included."""
    files = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "weft").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    kinds = ("report/templates/report.html.j2", "recipes/demo.yaml", "catalog/catalog.json", "py.typed")
    assert {f"weft/{name}" for name in kinds} <= files
    with zipfile.ZipFile(dist / f"weft-{__version__}-py3-none-any.whl") as wheel:
        assert {name for name in wheel.namelist() if ".dist-info/" not in name} == files
    top = f"weft-{__version__}/"
    with tarfile.open(dist / f"weft-{__version__}.tar.gz") as sdist:
        packed = {name.removeprefix(top) for name in sdist.getnames()}
    assert {*files, "README.md", "CHANGELOG.md", "LICENSE", "pyproject.toml"} <= packed


def test_installed_package_is_the_one_that_runs(installed):
    code = "import weft, timm; print(weft.__file__, weft.__version__, timm.is_model('cvt_13'))"
    place, version, known = installed.run("python", "-c", code).split()
    assert Path(place).is_relative_to(installed.scripts.parent)
    assert (version, known) == (__version__, "True")
    assert installed.run("weft", "--version").strip() == __version__


def test_commands_find_their_data(installed):
    assert "cvt_13" in installed.run("weft", "models", "cvt")
    assert "vt_resnet_nano" in installed.run("weft", "recipes", "demo")
    assert "cvt-position" in installed.run("weft", "ablate")
    space = "from weft.study.search.space import read_space; print(len(read_space('', 'cvt_13', {}).choices))"
    assert int(installed.run("python", "-c", space)) > 0


def test_demo_trains(installed):
    """`weft demo` itself, until it has made some steps; then its recipe to the end, on fewer pictures."""
    demo = installed.start("weft", "demo", "--out", "begun")
    rows = installed.around / "begun" / "metrics.jsonl"
    until = time.monotonic() + 600
    while demo.poll() is None and time.monotonic() < until and not (rows.exists() and rows.read_text().strip()):
        time.sleep(0.5)
    demo.send_signal(signal.SIGINT)
    output = demo.communicate()[0]
    assert rows.read_text().strip(), output
    assert "--resume" in output

    few = ("--epochs", "1", "--fraction", "0.02", "--batch", "10", "--out", "short")
    installed.run("weft", "train", "demo:fashion", "--recipe", "demo", *few)
    page = (installed.around / "short" / "report.html").read_text()
    assert "cetnet_nano" in page
    assert "%" in installed.run("weft", "eval", "short")
