"""The package as a whole: what importing it pulls in, and that no file of the project names someone's machine."""

import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

import scrlearn

ROOT = Path(scrlearn.__file__).resolve().parents[1]

# ---------------------------------------------------------------- what an import pulls in

# extras, tools for tests, and what only one room needs, by the name they are imported by
NOT_IN_THE_CORE = (
    *("fastapi", "starlette", "uvicorn", "pydantic", "prometheus_client", "multipart", "ray", "optuna", "onnx"),
    *("onnxruntime", "onnxscript", "timm", "torchvision", "triton", "pyarrow", "tensorboard", "mkdocs", "pytest"),
    *("hypothesis", "matplotlib", "IPython"),
)


def modules_after(statements):
    program = f"{statements}\nimport sys\nprint(' '.join(sorted({{name.partition('.')[0] for name in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    return set(done.stdout.split())


@functools.cache
def brought_along():
    """What the dependencies import themselves: torch for CUDA imports triton, for one."""
    return modules_after("import torch, sklearn, scipy, typer, rich")


def test_importing_the_package_is_light():
    loaded = modules_after("import scrlearn; scrlearn.__version__")
    assert "scrlearn" in loaded
    assert not loaded & {"torch", "numpy", "sklearn", "PIL", "rich", "typer", *NOT_IN_THE_CORE}


def test_the_classifier_needs_none_of_the_extras():
    program = "from scrlearn import OnlineClassifier; OnlineClassifier('scr').get_params()"
    assert not (modules_after(program) & set(NOT_IN_THE_CORE)) - brought_along()


def test_the_runner_and_the_command_line_need_none_of_the_extras():
    assert not (modules_after("import scrlearn.cli, scrlearn.experiments") & set(NOT_IN_THE_CORE)) - brought_along()


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'OnlineClasifier'"):
        _ = scrlearn.OnlineClasifier
    assert set(scrlearn.__all__) == {"OnlineClassifier", "__version__"}


# ---------------------------------------------------------------- the project speaks of itself alone

FOLDERS = ("scrlearn", "tests", "benchmarks", "docs", "results", ".ci")
TEXT = {".py", ".md", ".toml", ".txt", ".yml", ".yaml", ".json", ".cfg", ".css", ".js", ".html", ".csv", ".svg", ""}
# folders of one machine or one person, written out
MACHINE_PATH = re.compile(r"(?<![\w.~-])/(?:home|root|work|Users|tmp|mnt|media|scratch|workspace)/\w", re.ASCII)


def project_files():
    """Text files of the project, without what was built or downloaded."""
    if not (ROOT / "pyproject.toml").is_file():
        pytest.skip("the package is installed without its project")
    yield from (path for path in ROOT.iterdir() if path.is_file() and path.suffix in TEXT)
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and path.suffix in TEXT and "__pycache__" not in path.parts:
                yield path


def test_no_file_names_a_path_of_a_machine():
    found, seen = [], 0
    for path in project_files():
        seen += 1
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if MACHINE_PATH.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    assert seen > 100
    assert not found, "\n".join(found)


def test_the_check_of_paths_sees_them():
    for bad in ("open('" + "/ho" + "me/ann/x')", "root: " + "/tm" + "p/data", "[" + "/wo" + "rk/a.txt]"):
        assert MACHINE_PATH.search(bad), bad
    for good in ("http://x.org/home/a", "$HOME/a", "a/tmp/b", "and/or", "tmp_path / 'x'", "~/work/x", "../work/x"):
        assert not MACHINE_PATH.search(good), good
