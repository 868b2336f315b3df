"""The house as a whole: what importing it pulls in, which room may know which, and that it names no one's machine."""

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

import scrlearn

ROOT = Path(scrlearn.__file__).resolve().parents[1]
PACKAGE = ROOT / "scrlearn"

# What every room may use, then the rooms in the order the data walks through them; imports go down this list only.
# The head that grows (classifiers) is a part of the network (models), so it stands before it.
GROUND = ("errors", "files", "randomness", "devices", "checkpoint", "images", "labels")
ROOMS = (
    *("data", "augment", "classifiers", "models", "losses", "memory", "learners", "engine", "estimator"),
    *("evaluation", "experiments", "export", "service", "cli", "__main__"),
)
# asked for by name from the outside only, and then lazily
FACE = "__init__"


def room(name):
    """The room of a module; a file beside a room that has its name in front (augment_fused) belongs to it."""
    front = name.partition("_")[0]
    return front if front in ROOMS else name


def room_of(path):
    return room(path.relative_to(PACKAGE).parts[0].removesuffix(".py"))


def imported(path):
    """The rooms a file imports when it runs; what is imported for types alone does not count."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports by a relative name"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            first, _, rest = name.partition(".")
            if first == "scrlearn" and rest and not rest.startswith("__"):
                yield room(rest.split(".")[0])


FILES = sorted(PACKAGE.rglob("*.py"))


def test_every_file_is_in_a_room_of_the_plan():
    assert len(FILES) > 50
    assert {room_of(path) for path in FILES} <= {*GROUND, *ROOMS, FACE}


@pytest.mark.parametrize("name", sorted({room_of(path) for path in FILES} - {FACE}))
def test_imports_go_down_the_list_of_rooms(name):
    allowed = GROUND if name in GROUND else (*GROUND, *ROOMS[: ROOMS.index(name) + 1])
    for path in FILES:
        if room_of(path) == name:
            wrong = sorted(set(imported(path)) - set(allowed))
            assert not wrong, f"{path.relative_to(ROOT)} knows of {', '.join(wrong)}"


def test_the_ground_floor_has_no_circles():
    order = {name: set(imported(PACKAGE / f"{name}.py")) for name in GROUND}
    while order:
        free = [name for name, needs in order.items() if not needs & order.keys()]
        assert free, f"these import each other: {sorted(order)}"
        for name in free:
            del order[name]


def test_the_check_of_imports_sees_them(tmp_path):
    file = tmp_path / "a.py"
    file.write_text(
        "from typing import TYPE_CHECKING\nimport scrlearn\nimport scrlearn.cli as c, os\n"
        "from scrlearn import __version__\nfrom scrlearn.augment_fused import a\n"
        "if TYPE_CHECKING:\n    from scrlearn.service import page\n"
        "def f():\n    from scrlearn.memory.buffer import Memory\n    from scrlearn import engine\n"
    )
    assert sorted(imported(file)) == ["augment", "cli", "engine", "memory"]


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
