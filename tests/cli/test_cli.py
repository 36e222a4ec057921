"""The command: quick to answer, one line for a mistake, tables for people and JSON for machines."""

import importlib
import json
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch

from tests.conftest import randomise
from tests.helpers.places import ROOT
from tests.helpers.published import hugging_face_cvt
from tests.helpers.small_runs import make_pictures
from tests.helpers.variants import NANO
from weft.cli.app import app
from weft.errors import WeftError
from weft.models.registry import FAMILIES
from weft.models.weights.release import released


def run(*args: str, code: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code] if code else [sys.executable, "-m", "weft", *args]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)


@pytest.mark.parametrize("args", [["--help"], ["models", "--help"], ["convert", "--help"], ["--version"], ["models"]])
def test_help_is_quick(args):
    """About half a second of work on a slow core, and without torch, which is what makes it so."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert run(*args).returncode == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.8  # not the clock: tests share cores
    probe = run(
        code=f"import sys; sys.argv[1:] = {args!r}\nfrom weft.cli.app import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "assert 'torch' not in sys.modules and 'timm' not in sys.modules"
    )
    assert probe.returncode == 0, probe.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="OpenMP of other systems says nothing")
@pytest.mark.parametrize(
    ("given", "spins"),
    [({}, 2000), ({"OMP_WAIT_POLICY": "passive"}, 0), ({"GOMP_SPINCOUNT": "77"}, 77)],
    ids=str,
)
def test_threads_soon_sleep(given, spins):
    """In time: the OpenMP that comes with torch says how often a thread looks before it sleeps."""
    code = f"""
import os
for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):  # which `main`, called by other tests, sets
    os.environ.pop(name, None)
os.environ |= {{"OMP_DISPLAY_ENV": "verbose", **{given!r}}}
from weft.cli.app import main
try: main()
except SystemExit: pass
import torch
"""
    told = re.findall(r"GOMP_SPINCOUNT\s*=\s*'(\w+)'", run(code=code).stderr)
    if not told:
        pytest.skip("another OpenMP than GNU's")
    assert int(told[0]) == spins


def test_help_of_every_command():
    """Each explains its arguments; none of them, nor the lists of recipes and settings, wants torch."""
    names = [name for name in app if not name.startswith("-")]
    assert {"train", "check", "eval", "predict", "demo", "recipes", "keys", "models", "convert"} <= {*names}
    calls = [[name, "--help"] for name in names] + [["recipes"], ["recipes", "quick"], ["keys"], ["keys", "lr"]]
    code = f"""
import sys
from weft.cli.app import app
for args in {calls!r}:
    try: app(args)
    except SystemExit: pass
assert "torch" not in sys.modules and "timm" not in sys.modules
"""
    done = run(code=code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Usage: weft") == len(names)
    for line in ("small-data", "optim.warmup_lr", "five minutes", "--resume", "--top"):
        assert line in done.stdout


REFUSED = {
    "train missing": "missing does not exist",
    "train empty": "empty",
    "train": "Say what to train on",
    "train demo:fashion --epoch 3": "Did you mean --epochs",
    "train demo:fashion --optim.lrr 3": "optim.lr",
    "train demo:fashion --recipe cvt-imagenett": "Did you mean",
    "train demo:fashion --config missing.yaml": "missing.yaml",
    "train demo:fashion --out taken": "taken already exists",
    "train --resume missing": "missing has no state to resume from",
    "predict missing a.jpg": "missing does not exist",
    "predict empty a.jpg": "empty holds no trained model",
    "predict model a.jpg --test.flips": "test.flip",
    "eval missing": "missing does not exist",
    "eval model empty": "empty",
    "explain ./missing a.jpg": "does not exist",
    "explain empty a.jpg": "empty holds no trained model",
    "export missing": "missing does not exist",
    "export model --data missing": "missing does not exist",
    "export model --fixed --size 3": "--size 3",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_needs_no_torch_is_refused_without_it(words, tmp_path):
    for folder in ("empty", "taken", "model"):
        (tmp_path / folder).mkdir()
    for file in ("taken/mine.txt", "model/config.json", "model/model.safetensors"):
        (tmp_path / file).write_text("{}")
    code = (
        f"import os, sys; os.chdir({str(tmp_path)!r}); sys.argv = {['weft', *words.split()]!r}\n"
        "from weft.cli.app import main\n"
        "try:\n    main()\n"
        "except SystemExit as end:\n"
        "    print(end.code, [name for name in ('torch', 'timm', 'torchvision') if name in sys.modules])"
    )
    done = run(code=code)
    assert done.stdout.splitlines()[-1] == "2 []", done.stdout + done.stderr
    assert REFUSED[words] in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "imports",
    [
        pytest.param("import weft, timm", marks=pytest.mark.slow),
        pytest.param("import timm, weft", marks=pytest.mark.slow),
        pytest.param("import weft; from timm.models import create_model", marks=pytest.mark.slow),
        "import weft, transformers, timm",  # transformers looks whether timm exists
        pytest.param("import weft, importlib; importlib.reload(weft)", marks=pytest.mark.slow),
        pytest.param("import weft.models.cvt", marks=pytest.mark.slow),
        pytest.param("from weft.cli.app import app", marks=pytest.mark.slow),
    ],
)
def test_import_registers_with_timm_in_any_order(imports):
    check = "import sys; assert not any('RegisterBehindTimm' in type(h).__name__ for h in sys.meta_path)"
    done = run(code=f"{imports}\nimport timm\n{check}\nprint(timm.create_model('cvt_nano', num_classes=7).num_classes)")
    assert done.stdout.strip() == "7", done.stderr


def test_import_hook_survives_a_failed_import(tmp_path):
    """A timm that raises once, then imports: the models are there the second time."""
    code = """
import sys, importlib, importlib.util, weft
assert importlib.util.find_spec("timm") is not None
sys.modules["torch"] = None
try:
    import timm
except ImportError:
    pass
else:
    raise SystemExit("timm imported without torch")
for name in [n for n in sys.modules if n.split(".")[0] in ("timm", "torch")]:
    del sys.modules[name]
import timm
print(len(timm.list_models("cvt_*")))
"""
    done = run(code=code)
    assert done.stdout.strip() == "5", done.stderr


def test_import_alone_is_cheap():
    code = "import sys, weft; print(sorted(m for m in sys.modules if m.startswith(('weft.', 'torch', 'timm'))))"
    assert run(code=code).stdout.strip() == "['weft.version']"


def test_the_former_name_of_explain_gives_the_same_things():
    """And is no package, so that no module of `weft.explain` is ever loaded twice."""
    import weft.analysis
    import weft.explain

    assert dir(weft.analysis) == dir(weft.explain) == sorted(weft.explain.__all__)
    assert all(getattr(weft.analysis, name) is getattr(weft.explain, name) for name in weft.explain.__all__)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("weft.analysis.similarity")


def test_models_json():
    rows = json.loads(run("models", "nano", "--json").stdout)
    families = [timm.list_models(module=family) for family in FAMILIES]  # the order of the table
    names = [name for models in families for name in models if name in NANO]
    assert [row["name"] for row in rows if "." not in row["name"]] == names
    assert {row["name"] for row in rows if "." in row["name"]} == {*released()}
    rows = {row["name"]: row for row in json.loads(run("models", "cvt_13", "--json").stdout)}
    assert rows["cvt_13.msft_in1k"] == {
        "name": "cvt_13.msft_in1k",
        "parameters": 19_997_480,
        "macs": 4_566_089_216,
        "img_size": 224,
        "paper": "CvT, arXiv:2103.15808",
        "top1": 81.6,
        "hub": "microsoft/cvt-13",
        "files": None,
        "released": False,
    }
    assert rows["cvt_13.msft_in1k_384"]["macs"] == pytest.approx(16.269e9, rel=1e-3)
    assert rows["cvt_13_nas"]["hub"] is None


def test_models_table():
    done = run("models", "ceit_tiny*")
    header, *rows = done.stdout.splitlines()
    assert header.split() == ["model", "parameters", "MACs", "pixels", "top-1", "paper", "weights"]
    *rows, _, places = rows
    assert len(rows) == 2
    assert rows[0].startswith("ceit_tiny.in1k ")
    assert "6.4 M" in rows[0]
    assert "1.40 G" in rows[0]
    assert "76.4" in rows[0]
    assert "authors' files" in rows[0]
    assert "weft convert" in places
    assert "coeusguo/ceit" in places
    assert "\x1b" not in done.stdout  # plain when piped


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["models", "ciet_tiny"], ["ciet_tiny", "Did you mean 'ceit_tiny'"]),
        (["modles"], ["modles", "models"]),
        (["models", "--jsno"], ["--jsno"]),
        (["convert", "nowhere.pth", "--model", "cvt_13", "--out", "x"], ["nowhere.pth", "does not exist"]),
        (["convert", "nowhere.pth", "--out", "x"], ["--model"]),
        (["convert", "pyproject.toml", "--model", "cvt_13", "--out", "tests"], ["tests", "choose another place"]),
        (["convert", "pyproject.toml", "--model", "cvt_13", "--out", "x"], ["pyproject.toml", "not a checkpoint"]),
        (["train", "tests", "--epoch", "3"], ["--epoch", "Did you mean --epochs"]),
        (["train", "tests", "--optim.lrr", "3"], ["optim.lrr", "Did you mean 'optim.lr'"]),
        (["train", "tests", "--epochs", "many"], ["--epochs", "many"]),
        (["train", "tests", "--balance", "sampel"], ["data.balance='sampel'", "sampler"]),
        (["predict", "nowhere"], ["No pictures given"]),
        (["recipes", "smalldata"], ["smalldata", "Did you mean 'small-data'"]),
        (["keys", "optim.lrr"], ["optim.lrr", "Did you mean 'optim.lr'"]),
    ],
)
def test_mistakes_get_one_line(args, words):
    done = run(*args)
    assert done.returncode == 2
    assert done.stdout == ""
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("weft: ")
    assert all(word in lines[0] for word in words)
    assert not (ROOT / "x").exists()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["train", "nowhere", "--out", "x"], ["nowhere", "does not exist"]),
        (["train"], ["weft train DATA"]),
        (["train", "--resume", "nowhere"], ["nowhere", "no state"]),
        (["check", "nowhere"], ["nowhere", "does not exist"]),
        (["eval", "nowhere"], ["nowhere", "run or model folder"]),
        (["predict", "nowhere", "a.png"], ["nowhere", "run or model folder"]),
    ],
)
def test_what_is_missing_is_named(args, words):
    """Those that import torch first, here in this process, which has it: `main` prints what is raised."""
    with pytest.raises(WeftError) as error:
        app(args, exit_on_error=False, print_error=False)
    assert "\n" not in str(error.value)
    assert all(word in str(error.value) for word in words)
    assert not Path("x").exists()


def test_convert_writes_a_folder_that_timm_opens(tmp_path):
    theirs = randomise(hugging_face_cvt())
    theirs.save_pretrained(tmp_path / "hf")
    out = tmp_path / "weft model"
    done = run("convert", str(tmp_path / "hf"), "--model", "cvt_13", "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert str(out) in done.stdout
    opened = timm.create_model(f"local-dir:{out}", pretrained=True).eval()
    picture = torch.randn(1, 3, 96, 96)
    with torch.no_grad():
        torch.testing.assert_close(opened(picture), theirs(picture).logits, rtol=0, atol=1e-5)


# The whole way ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    return make_pictures(tmp_path_factory.mktemp("data") / "my pictures", classes=2, each=5)


@pytest.fixture(scope="module")
def trained(pictures) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """Ten pictures, one epoch."""
    out = pictures.parent / "a run"
    small = [
        "--model",
        "cvt_nano",
        "--model.args",
        "{embed_dims: [8, 16, 16], depths: [1, 1, 1], num_heads: [1, 2, 2]}",
    ]
    options = ["--epochs", "1", "--batch=4", "--device", "cpu", "--data.val-fraction", "0.4", "--data.workers=0"]
    return out, run("train", str(pictures), "--out", str(out), *small, *options)


def is_plain(text: str) -> bool:
    """No colours, no bars, no carriage returns: fit for a file."""
    return not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", text)


def test_train(trained):
    out, done = trained
    assert done.returncode == 0, done.stderr
    assert is_plain(done.stdout)
    assert re.search(r"^epoch 1/1  train loss \d", done.stdout, flags=re.MULTILINE)
    assert str(out / "report.html") in done.stdout.splitlines()[-1]
    files = {"model.safetensors", "config.json", "config.yaml", "split.json", "metrics.jsonl", "evaluation.json"}
    assert files | {"data_report.json", "report.html", "state"} == {path.name for path in out.iterdir()}


def test_eval_is_what_training_said(trained):
    out, _ = trained
    done = run("eval", str(out), "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    found = json.loads(done.stdout)  # one object, and nothing else
    assert done.stdout.count("\n") == 1
    assert found.items() >= json.loads((out / "evaluation.json").read_text()).items()
    assert found["n"] == 4


def test_predict(trained, pictures):
    out, _ = trained
    (broken := pictures.parent / "broken.png").write_bytes(b"no picture")
    table = pictures.parent / "answers.csv"
    done = run("predict", str(out), str(pictures / "class 0"), str(broken), "--top", "1", "--csv", str(table))
    assert done.returncode == 1, done.stderr  # one is unreadable
    assert is_plain(done.stdout)
    assert done.stdout == f"Wrote {table}: 6 pictures, 1 unreadable.\n"
    header, *rows = table.read_text().splitlines()
    assert header == "name,label_1,probability_1,error"
    assert len(rows) == 6


def test_resume_of_a_finished_run_refuses_other_settings(trained):
    out, _ = trained
    before = (out / "config.yaml").read_bytes()
    done = run("train", "--resume", str(out), "--lr", "0.5")
    assert done.returncode == 2
    assert "optim.lr: 0.5" in done.stderr
    assert "--allow-changes" in done.stderr
    assert done.stderr.count("\n") == 1
    assert (out / "config.yaml").read_bytes() == before


def test_check(pictures, tmp_path):
    page = tmp_path / "check.html"
    done = run("check", str(pictures), "--out", str(page))
    assert done.returncode == 0, done.stderr
    assert is_plain(done.stdout)
    assert "10 pictures, 2 classes" in done.stdout
    assert "class 1" in page.read_text()


def test_check_finds_errors(pictures, tmp_path):
    """A picture that trains and validates: exit code 1, and one JSON object that says which."""
    for split in ("train", "val"):
        make_pictures(tmp_path / "split" / split, classes=2, each=2)  # the same pictures
    done = run("check", str(tmp_path / "split"), "--json")
    assert done.returncode == 1
    assert done.stderr == ""
    found = json.loads(done.stdout)
    assert [problem["kind"] for problem in found["problems"] if problem["severity"] == "error"] == ["leak"]
