"""The documentation says what the code does: links, tables, commands and examples are held to it."""

from __future__ import annotations

import ast
import dataclasses
import doctest
import functools
import importlib.util
import re
import shlex
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import typer

from scrlearn.cli import app
from scrlearn.data import SOURCES
from scrlearn.experiments import Result
from scrlearn.learners import METHODS, Learner
from scrlearn.learners.methods import PARTS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
TEXTS = [*PAGES, ROOT / "CONTRIBUTING.md"]
RUN = "<!-- run: python -->"

FENCED = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def prose(page: Path) -> str:
    """A page without its code blocks."""
    return FENCED.sub("", page.read_text(encoding="utf-8"))


def blocks(page: Path, *languages: str) -> list[tuple[str, str]]:
    found = FENCED.findall(page.read_text(encoding="utf-8"))
    return [(language, code) for _, language, code in found if language in languages]


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


generate = load("generate")


# ---------------------------------------------------------------- pages and links


def test_every_page_is_in_the_navigation_and_every_entry_exists() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    named = re.findall(r"[\w/+-]+\.md", navigation)
    assert len(named) == len(set(named))
    pages = {str(page.relative_to(DOCS)) for page in PAGES}
    assert set(named) - pages == set(), "mkdocs.yml names pages that do not exist"
    assert pages - set(named) == set(), "pages that are not in the nav of mkdocs.yml"


def slug(heading: str) -> str:
    """The anchor of a heading."""
    plain = re.sub(r"[^\w\s-]", "", heading.replace("`", "")).strip().lower()
    return re.sub(r"[-\s]+", "-", plain)


def anchors(page: Path) -> set[str]:
    return {slug(heading) for heading in re.findall(r"^#+ (.+)$", prose(page), flags=re.MULTILINE)}


@pytest.mark.parametrize("page", TEXTS, ids=name_of)
def test_links_resolve(page: Path) -> None:
    for groups in LINK.findall(INLINE.sub("", prose(page))):
        target = "".join(groups)
        if re.match(r"https?://", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.is_file(), f"{name_of(page)} links to {target}, which does not exist"
        # mkdocs would leave a link out of docs/ dangling
        assert page.parent == ROOT or file.is_relative_to(DOCS), f"{name_of(page)} links out of docs/: {target}"
        if anchor:
            assert anchor in anchors(file), f"{name_of(page)} links to {target}; there is no such heading"


@pytest.mark.parametrize("page", TEXTS, ids=name_of)
def test_files_that_are_named_exist(page: Path) -> None:
    for code in INLINE.findall(prose(page)):
        for path in re.findall(r"(?<![\w/.])(?:scrlearn|tests|benchmarks|docs|results)/[\w/.-]+", code):
            assert "NAME" in path or (ROOT / path).exists(), f"{name_of(page)} names {path}, which does not exist"


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    named = {
        target
        for page in TEXTS
        for target in re.findall(r"(?:^|`)make ([a-z-]+)", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    }
    assert "demo" in named
    assert named <= targets


# ---------------------------------------------------------------- methods


MEASURED = (
    "search",
    "effects",
    "means",
    "beyond",
    "answers",
    "engines",
    "gpu-steps",
    "gpu-runs",
    "speed",
    "steps",
    "against-plain",
)


def facts(text: str) -> dict[str, list[tuple[str, ...]]]:
    """Names and values in the generated tables; words about them are refreshed whenever the site is built."""
    found = {}
    for _, what, content, _ in generate.BLOCK.findall(text):
        if what == "other-commands":  # complete on the site; a new command is no reason to fail here
            continue
        if what.startswith(MEASURED):  # to the letter
            found[what] = [(line,) for line in content.splitlines()]
            continue
        rows = [line.split(" | ") for line in content.splitlines() if line.startswith("| ")]
        found[what] = [tuple(row[:2] if what.startswith(("options", "command")) else row[:1]) for row in rows]
    return found


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=name_of)
def test_generated_tables_are_up_to_date(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    expected = facts(generate.refreshed(text))
    assert facts(text) == expected, f"{name_of(page)} is out of date: run python docs/generate.py"
    assert all(len(rows) > 2 for rows in expected.values())


def test_the_generator_notices_and_mends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n\n<!-- generated: options er -->\nold\n<!-- end -->\n\nafter\n", encoding="utf-8")
    with mock.patch.object(generate, "DOCS", tmp_path):
        assert generate.main(["--check"]) == 1
        assert "old" in page.read_text(encoding="utf-8")
        assert generate.main([]) == 0
        assert generate.main(["--check"]) == 0
    text = page.read_text(encoding="utf-8")
    assert "page.md is out of date" in capsys.readouterr().out
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "| `memory_batch` | `10` |" in text


def option_table(page: Path) -> dict[str, Any]:
    rows = re.findall(r"^\| `(\w+)` \| `(.+?)` \| (.+) \|$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert all(len(meaning) > 3 for _, _, meaning in rows)
    return {option: ast.literal_eval(default) for option, default, _ in rows}


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_its_page(method: str) -> None:
    page = DOCS / "methods" / generate.page_of(method)
    assert option_table(page) == METHODS[method].parameters()
    text = page.read_text(encoding="utf-8")
    for heading in ("The formula", "The algorithm", "Run it", "Options", "Reference"):
        assert f"\n## {heading}\n" in text
    assert re.search(r"^## Against ", text, flags=re.MULTILINE)
    assert "$$" in text
    assert f"--method {method}" in text
    assert f'OnlineClassifier("{method}"' in text
    assert f"[`{method}`]({page.name})" in (page.parent / "index.md").read_text(encoding="utf-8")


def test_no_page_of_a_method_that_is_gone() -> None:
    pages = {page.name for page in (DOCS / "methods").glob("*.md")} - {"index.md"}
    assert pages == {generate.page_of(method) for method in METHODS}


def test_a_part_without_a_word_about_its_option_is_refused() -> None:
    class Silent(PARTS["retrieve"]["random"]):  # type: ignore[misc]
        """Says nothing."""

        def __init__(self, loudness: int = 0) -> None:
            self.loudness = loudness

    with mock.patch.dict(PARTS["retrieve"], {"random": Silent}), pytest.raises(SystemExit, match="loudness"):  # type: ignore[arg-type]
        generate.options("er")


# ---------------------------------------------------------------- commands


def commands_in_blocks() -> Iterator[tuple[str, str]]:
    """Every `scr …` of a shell block, with the page it stands on."""
    for page in TEXTS:
        for line in (line for _, code in blocks(page, "bash", "sh") for line in code.splitlines()):
            if re.match(r"scr( |$)", line):
                yield name_of(page), line


@pytest.fixture(scope="module")
def parse() -> Any:
    """Reads a command as `scr` does, and gives what its function would be called with."""
    command = typer.main.get_command(app)
    seen: list[dict[str, Any]] = []

    def note(**given: Any) -> None:
        seen.append(given)

    def replace(part: Any) -> None:
        for inner in getattr(part, "commands", {}).values():
            replace(inner)
            if not getattr(inner, "commands", None):
                inner.callback = note

    replace(command)

    def parse(words: list[str]) -> dict[str, Any]:
        seen.clear()
        with mock.patch.object(warnings, "showwarning", warnings.showwarning):
            command.main(words, prog_name="scr", standalone_mode=False)
        return seen[0] if seen else {}

    return parse


@pytest.mark.parametrize(("page", "command"), sorted(set(commands_in_blocks())))
def test_commands_parse(page: str, command: str, parse: Any) -> None:
    words = shlex.split(command.removesuffix("&"), comments=True)[1:]  # the shell's own sign
    given = parse(words)
    assert given
    if words[0] == "run":
        check_run(given)
    if words[:2] in (["data", "check"], ["data", "download"]):
        assert given["name"] in SOURCES or given["name"].startswith("folder:")
    if words[0] == "methods":
        assert given["name"] is None or given["name"] in METHODS


@pytest.mark.parametrize("page", TEXTS, ids=name_of)
def test_commands_in_the_text_exist(page: Path) -> None:
    """In running text a command may be there in part (`scr run --out DIR`): its words and options must exist."""
    top = typer.main.get_command(app)
    for code in INLINE.findall(prose(page)):
        if not re.match(r"scr [a-z-]", code):
            continue
        command: Any = top
        for word in shlex.split(code.replace("…", ""))[1:]:
            if getattr(command, "commands", None) and not word.startswith("-"):
                assert word in command.commands, f"{name_of(page)}: there is no command {code}"
                command = command.commands[word]
            elif word.startswith("-"):
                names = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
                assert word in names | {"--help"}, f"{name_of(page)}: {code} has no {word}"


def check_run(given: dict[str, Any]) -> None:
    assert given["dataset"] in SOURCES or given["dataset"].startswith("folder:")
    if given["method"] == "NAME":  # to be replaced by the reader
        return
    options = dict(option.split("=", 1) for option in given["option"] or [])
    chosen = {role: value for role, value in options.items() if role in PARTS}
    assert options.keys() <= METHODS[given["method"]].parameters(**chosen).keys()


def test_the_parser_refuses_what_the_command_line_refuses(parse: Any) -> None:
    for words in (["run", "--metod", "scr"], ["runn"], ["data", "check"], ["run", "--seeds", "0"]):
        with pytest.raises(Exception, match=r"No such|Missing|greater|range|runn"):
            parse(words)


def test_every_command_has_its_section() -> None:
    page = DOCS / "command-line.md"
    text = page.read_text(encoding="utf-8")
    shown = generate.refreshed(text)
    for words, command in generate.commands().items():
        section = re.split(r"\n##+ ", shown.partition(f"## scr {words}\n")[2])[0]
        if f"\n## scr {words}\n" in text:
            assert f"\nscr {words}" in section, f"command-line.md has no example of scr {words}"
        for name in (opt for p in command.params for opt in p.opts if opt.startswith("--") and opt != "--help"):
            assert f"`{name}" in section, f"command-line.md does not name {name} of scr {words}"
    by_hand = set(re.findall(r"^## scr (.+)$", text, flags=re.MULTILINE))
    assert {"run", "methods", "data list", "predict", "demo"} <= by_hand <= set(generate.commands())


def test_fields_of_a_result_exist() -> None:
    section = (DOCS / "reproducibility.md").read_text(encoding="utf-8").partition("\n## Results\n")[2]
    cells = re.findall(r"^\| (`.+?) \|", section.partition("\n## ")[0], flags=re.MULTILINE)
    named = {name for cell in cells for name in INLINE.findall(cell)}
    fields = {field.name for field in dataclasses.fields(Result)}
    assert named <= fields
    assert fields - named <= {"format", "images", "steps"}


# ---------------------------------------------------------------- examples


RUNNABLE = [page for page in PAGES if RUN in page.read_text(encoding="utf-8")]


@pytest.mark.parametrize("page", RUNNABLE, ids=name_of)
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All Python of a page, in the order in which it stands there, in one namespace and an empty folder."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "page"}
    tables = [METHODS, *PARTS.values()]
    copies = [dict(table) for table in tables]
    try:
        for language, code in blocks(page, "python", "pycon"):
            if language == "python":
                exec(compile(code, str(page), "exec"), names)
            else:
                check_session(code, names, page)
    finally:
        for known, copy in zip(tables, copies, strict=True):
            known.clear()  # type: ignore[attr-defined]
            known.update(copy)  # type: ignore[attr-defined]


def test_pages_with_examples_run_them() -> None:
    names = {str(page.relative_to(DOCS)) for page in RUNNABLE}
    assert {"index.md", "data.md", "reproducibility.md", "your-method.md"} <= names
    assert {f"methods/{generate.page_of(method)}" for method in METHODS} <= names


def check_session(code: str, names: dict[str, Any], page: Path) -> None:
    example = doctest.DocTestParser().get_doctest(code, names, page.name, str(page), 0)
    assert example.examples
    report: list[str] = []
    runner = doctest.DocTestRunner()
    runner.run(example, out=report.append, clear_globs=False)
    names.update(example.globs)
    assert not report, "".join(report)


def test_your_own_method_is_shown_whole() -> None:
    """The worked example has each kind of part, and each is used under a name."""
    code = "".join(code for _, code in blocks(DOCS / "your-method.md", "python"))
    for base in ("Retrieval", "Update", "Objective", "Replay"):
        assert re.search(rf"class \w+\({base}\):", code)
    assert code.count("METHODS[") == 2
    assert "load_state_dict" in code


def test_methods_of_a_learner_that_are_named_exist() -> None:
    section = (DOCS / "your-method.md").read_text(encoding="utf-8").partition("What a learner with state of its own")[2]
    cells = re.findall(r"^\| (`.+?) \|", section.partition("\n## ")[0], flags=re.MULTILINE)
    named = [name for cell in cells for name in INLINE.findall(cell)]
    assert len(named) > 5
    for name in named:
        assert callable(getattr(Learner, name)), f"a learner has no {name}"


# ---------------------------------------------------------------- the plan of the house


@functools.cache
def import_order() -> list[str]:
    section = (DOCS / "architecture.md").read_text(encoding="utf-8").partition("### Import order")[2]
    return FENCED.findall(section)[0][2].split()


def room_of(module: str) -> str:
    parts = module.split(".")
    room = parts[1] if len(parts) > 1 else ""
    return room.partition("_")[0] if room.partition("_")[0] in import_order() else room


def imports(tree: ast.AST) -> Iterator[str]:
    """Modules of the package that are imported when the program runs, anywhere in a file."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == "scrlearn":
            yield from (f"scrlearn.{name.name}" for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        yield from imports(node)


def test_imports_go_down_the_list_only() -> None:
    order = import_order()
    package = ROOT / "scrlearn"
    for file in sorted(package.rglob("*.py")):
        room = room_of("scrlearn." + ".".join(file.relative_to(package).with_suffix("").parts))
        if room in ("__init__", "__main__"):
            continue
        assert room in order, f"docs/architecture.md does not name {room} in its import order"
        for module in imports(ast.parse(file.read_text(encoding="utf-8"))):
            other = room_of(module)
            if module.startswith("scrlearn.") and other in order:
                assert order.index(other) <= order.index(room), f"{name_of(file)} imports the later {module}"


def test_every_room_is_in_the_plan() -> None:
    plan = FENCED.findall((DOCS / "architecture.md").read_text(encoding="utf-8"))[0][2]
    cellar = prose(DOCS / "architecture.md")
    package = ROOT / "scrlearn"
    rooms = [f"{path.name}/" for path in package.iterdir() if any(path.glob("*.py"))]
    rooms += [path.name for path in package.glob("*.py") if room_of(f"scrlearn.{path.stem}") == path.stem]
    rooms = [room for room in rooms if not room.startswith("_")]
    for room in rooms:
        named = re.search(rf"^  {re.escape(room)} ", plan, flags=re.MULTILINE) or f"`{room}`" in cellar
        assert named, f"docs/architecture.md does not name {room}: give it a line, and a place in the import order"
    assert {room.rstrip("/").removesuffix(".py") for room in rooms} == set(import_order())


# ---------------------------------------------------------------- the site


def test_formulas_are_drawn() -> None:
    pytest.importorskip("markdown")
    extension = load("extension")
    for page in PAGES:
        for latex in extension.DOLLARS.findall(FENCED.sub("", page.read_text(encoding="utf-8"))):
            assert 'd="M' in extension.svg(latex)


@pytest.mark.slow
def test_the_site_builds(tmp_path: Path) -> None:
    for module in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(module)
    site = tmp_path / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(site)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    html = (site / "api" / "index.html").read_text(encoding="utf-8")
    assert 'id="scrlearn.estimator.OnlineClassifier"' in html
    assert ".. math::" not in html
    for page in site.rglob("*.html"):  # nothing is fetched from elsewhere
        assert not re.search(r'<(?:script|link|img)[^>]+(?:src|href)="https?://', page.read_text(encoding="utf-8"))
    assert not list(site.rglob("*.py"))
