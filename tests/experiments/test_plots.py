"""Figures: right labels, nothing outside the paper, the same bytes twice."""

from __future__ import annotations

import errno
import functools
import itertools
import math
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection, PolyCollection
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.text import Text
from PIL import Image

from scrlearn.errors import InputError
from scrlearn.evaluation import Interval, confusion_matrix, interval
from scrlearn.experiments import plots

pytestmark = pytest.mark.filterwarnings("error")

NAN = math.nan
UNKNOWN = Interval(NAN, NAN, 0)
LONG = [f"a rather long class name, number {i}" for i in range(20)]


def curves(methods: int, tasks: int, seeds: int) -> dict[str, list[list[float]]]:
    rng = np.random.default_rng(0)
    return {f"method {i}": (0.2 + 0.06 * i + 0.05 * rng.random((seeds, tasks))).tolist() for i in range(methods)}


def counts(classes: int, *, no_answer: bool = False) -> np.ndarray:
    rng = np.random.default_rng(classes)
    true = rng.integers(0, classes, 20 * classes)
    answers = np.where(rng.random(len(true)) < 0.6, true, rng.integers(-1 if no_answer else 0, classes, len(true)))
    return confusion_matrix(true, answers, classes, no_answer_column=no_answer)


def clusters(n: int, classes: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(n)
    labels = np.arange(n) % classes
    return 3 * rng.normal(size=(classes, 8))[labels] + rng.normal(size=(n, 8)), labels


def some_matrices(keep: float, seeds: int = 2, tasks: int = 3) -> list[np.ndarray]:
    rng = np.random.default_rng(seeds)
    i, j = np.indices((tasks, tasks))
    return [np.where(j <= i, 0.95 * keep ** np.maximum(i - j, 0) + 0.02 * rng.random(i.shape), 0) for _ in range(seeds)]


FIGURES: dict[str, Callable[[], Figure]] = {
    "one curve": lambda: plots.accuracy_over_tasks({"scr": [[0.9]]}),
    "three curves": lambda: plots.accuracy_over_tasks(curves(3, 5, 3)),
    "many curves": lambda: plots.accuracy_over_tasks(curves(12, 10, 2), title="CIFAR-100, M = 2,000"),
    "weights": lambda: plots.head_weights([0.1, 0.2, 0.3], [NAN, -0.1, 0.0]),
    "weights of seeds": lambda: plots.head_weights([[0.1, 0.2], [0.2, 0.2]], [[NAN, -0.1], [NAN, 0.0]]),
    "two classes": lambda: plots.confusion(counts(2), ["cat", "dog"], title="A title " * 12),
    "twenty long names": lambda: plots.confusion(counts(20, no_answer=True), LONG, task_sizes=[2] * 10),
    "hundred classes": lambda: plots.confusion(counts(100), range(100), task_sizes=[10] * 10),
    "hundred, no tasks": lambda: plots.confusion(counts(100, no_answer=True), range(100)),
    "t-SNE": lambda: plots.memory_tsne(*clusters(60, 20), LONG, 0),
    "t-SNE, many classes": lambda: plots.memory_tsne(*clusters(60, 30), range(30), 0),
    "softmax and NCM": lambda: plots.softmax_vs_ncm(
        {"ER": (interval([0.1, 0.12]), interval([0.2, 0.22])), "ASER_μ": (UNKNOWN, interval([0.3]))}
    ),
    "run times": lambda: plots.run_times({"scr": interval([18.0, 19.0]), "gss": interval([812.0]), "x": UNKNOWN}),
    "ablation, numbers": lambda: plots.ablation(
        [10, 100, 1000], [interval([0.2, 0.21]), interval([0.3]), UNKNOWN], xlabel="memory batch", chosen=100
    ),
    "ablation, names": lambda: plots.ablation(
        ["random", "ASER", "ASER retrieval only", "ASER update only", "GSS"],
        [interval([0.3, 0.3 + 0.01 * i]) for i in range(5)],
        xlabel="memory management",
        ordered=False,
    ),
    "demo": lambda: plots.demo_picture(
        {"scr": some_matrices(0.97), "er": some_matrices(0.8), "fine-tune": some_matrices(0.0)}
    ),
}


@functools.cache
def drawn(name: str) -> Figure:
    return FIGURES[name]()


def texts_of(figure: Figure) -> list[Text]:
    return [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()]  # type: ignore[attr-defined]


def x_ticks(axes: Axes) -> list[str]:
    return [tick.get_text() for tick in axes.get_xticklabels()]


def y_ticks(axes: Axes) -> list[str]:
    return [tick.get_text() for tick in axes.get_yticklabels()]


def legend_texts(figure: Figure) -> list[str]:
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


@pytest.mark.parametrize("name", FIGURES)
def test_nothing_lies_outside_the_figure(name: str) -> None:
    figure = drawn(name)
    with plots._own_style():
        box, paper = figure.get_tightbbox(), figure.bbox_inches
    assert box.x0 >= 0
    assert box.y0 >= 0
    assert box.x1 <= paper.x1
    assert box.y1 <= paper.y1


@pytest.mark.parametrize("name", [name for name in FIGURES if "long" not in name])
def test_labels_do_not_overlap(name: str) -> None:
    for axes in drawn(name).axes:
        for ticks in (axes.get_xticklabels(), axes.get_yticklabels()):
            boxes = [tick.get_window_extent() for tick in ticks if tick.get_text()]
            # a turned label's bounding box says nothing about its letters
            if not any(tick.get_rotation() for tick in ticks):
                assert not any(a.overlaps(b) for a, b in itertools.pairwise(boxes))


ONE_OF_EACH = [name for name in FIGURES if not name.startswith(("one", "many", "twenty")) and "," not in name]


@pytest.mark.parametrize("name", [*ONE_OF_EACH, "ablation, numbers", "ablation, names"])
def test_the_same_data_gives_the_same_bytes(name: str, tmp_path: Path) -> None:
    """Drawn twice, and saved twice."""
    drawings = [drawn(name), FIGURES[name]()]
    for ending in ("png", "svg"):
        first, anew = (plots.save(figure, tmp_path / f"{i}.{ending}") for i, figure in enumerate(drawings))
        assert first.read_bytes() == anew.read_bytes()
    before = (tmp_path / "0.svg").read_bytes()
    assert plots.save(drawings[0], tmp_path / "0.svg").read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["0.png", "0.svg", "1.png", "1.svg"]


def test_files_are_what_their_names_say_and_carry_no_date(tmp_path: Path) -> None:
    figure = drawn("three curves")
    with Image.open(plots.save(figure, tmp_path / "a.PNG")) as image:
        assert image.format == "PNG"
        assert min(image.size) > 500
        assert not {"Software", "Creation Time"} & set(image.info)
    text = plots.save(figure, tmp_path / "a.svg").read_text()
    assert ElementTree.fromstring(text).tag == "{http://www.w3.org/2000/svg}svg"
    assert "<dc:date>" not in text
    assert matplotlib.__version__ not in text


def test_bytes_do_not_depend_on_the_process_or_the_persons_settings(tmp_path: Path) -> None:
    (tmp_path / "matplotlibrc").write_text("font.size: 20\naxes.facecolor: yellow\nsvg.fonttype: none\n")
    program = (
        "import sys; from scrlearn.experiments import plots\n"
        "for path in sys.argv[1:]: plots.save(plots.accuracy_over_tasks({'a': [[.9, .8], [.8, .7]]}), path)\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    there = [tmp_path / "there.png", tmp_path / "there.svg"]
    settings = {"MATPLOTLIBRC": str(tmp_path), "PYTHONHASHSEED": "7"}
    subprocess.run([sys.executable, "-c", program, *map(str, there)], check=True, env={**os.environ, **settings})
    figure = plots.accuracy_over_tasks({"a": [[0.9, 0.8], [0.8, 0.7]]})
    for path in there:
        assert plots.save(figure, tmp_path / f"here{path.suffix}").read_bytes() == path.read_bytes()


@pytest.fixture
def fonts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of the fonts that this machine has, to be filled."""
    names: list[str] = []
    monkeypatch.setattr(plots.font_manager, "get_font_names", lambda: names)
    plots._further_fonts.cache_clear()
    yield names
    plots._further_fonts.cache_clear()


def test_letters_that_no_font_has_are_told_once_for_a_picture(tmp_path: Path, fonts: list[str]) -> None:
    figure = plots.confusion(np.eye(2), ["猫 x", "中猫"])
    with pytest.warns(UserWarning, match="No font") as told:
        plots.save(figure, tmp_path / "a.png")
    assert [str(one.message) for one in told] == ["No font on this machine has 中猫: a.png shows boxes instead."]


def test_other_warnings_of_a_drawing_are_still_heard() -> None:
    with pytest.warns(RuntimeWarning, match="said"), plots._own_style() as missing:
        warnings.warn("said", RuntimeWarning, stacklevel=1)
    assert missing == set()


def test_fonts_for_other_scripts_come_after_the_own_one(fonts: list[str]) -> None:
    fonts += ["Malgun Gothic", "Comic Sans", "Yu Gothic"]
    with plots._own_style():
        assert matplotlib.rcParams["font.family"] == ["DejaVu Sans", "Yu Gothic", "Malgun Gothic"]


def test_the_persons_settings_come_back() -> None:
    before = dict(matplotlib.rcParams)
    FIGURES["demo"]()
    with pytest.raises(InputError):
        plots.accuracy_over_tasks({})
    assert dict(matplotlib.rcParams) == before


def test_only_png_and_svg(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"\.png or \.svg"):
        plots.save(drawn("weights"), tmp_path / "a.jpg")
    assert not os.listdir(tmp_path)


def test_a_full_disk_keeps_the_old_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = plots.save(drawn("weights"), tmp_path / "a.png")
    old = path.read_bytes()

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space left"):
        plots.save(drawn("demo"), path)
    assert path.read_bytes() == old
    assert os.listdir(tmp_path) == ["a.png"]


def test_curves_show_mean_and_interval_in_percent() -> None:
    seeds = [[0.9, 0.5], [1.0, 0.7], [0.8, 0.6]]
    axes = plots.accuracy_over_tasks({"scr": seeds}).axes[0]
    (line,) = axes.get_lines()
    np.testing.assert_array_equal(line.get_xdata(), [1, 2])
    np.testing.assert_allclose(line.get_ydata(), [90, 60])
    (band,) = [c for c in axes.collections if isinstance(c, PolyCollection)]
    corners = band.get_paths()[0].vertices
    second = interval([0.5, 0.7, 0.6])
    found = {round(float(y), 6) for x, y in corners if x == 2}
    assert found == {round(second.low * 100, 6), round(second.high * 100, 6)}
    assert max(corners[:, 1]) == 100  # a share cannot be more
    assert axes.get_xlabel() == "tasks learned"
    assert "%" in axes.get_ylabel()
    assert axes.get_ylim()[0] == 0


def test_one_seed_has_no_band() -> None:
    assert not plots.accuracy_over_tasks({"scr": [[0.9, 0.5]]}).axes[0].collections


def test_legend_names_the_lines_in_the_order_they_end() -> None:
    figure = plots.accuracy_over_tasks({"low": [[0.9, 0.1]], "_high$x$": [[0.5, 0.8]], "middle": [[0.9, 0.4]]})
    assert legend_texts(figure) == ["_high$x$", "middle", "low"]
    lines = figure.axes[0].get_lines()
    drawn = {line.get_ydata()[-1]: (line.get_color(), line.get_marker()) for line in lines}  # type: ignore[index]
    handles = [(h.get_color(), h.get_marker()) for h in figure.legends[0].legend_handles]  # type: ignore[union-attr]
    assert handles == [drawn[80.0], drawn[40.0], drawn[10.0]]
    assert len(set(handles)) == 3


def test_confusion_rows_are_the_truth() -> None:
    matrix = confusion_matrix(true=[0, 0, 0, 0, 1, 2], predicted=[2, 2, 2, 0, 1, 2], num_classes=3)
    axes = plots.confusion(matrix, ["ant", "bee", "cow"]).axes[0]
    assert axes.get_ylabel() == "true class"
    assert axes.get_xlabel() == "predicted class"
    assert y_ticks(axes) == x_ticks(axes) == ["ant", "bee", "cow"]
    assert list(axes.get_yticks()) == list(axes.get_xticks()) == [0, 1, 2]
    (image,) = [child for child in axes.get_children() if isinstance(child, AxesImage)]
    shown = np.asarray(image.get_array())
    row, column = y_ticks(axes).index("ant"), x_ticks(axes).index("cow")
    assert shown[row, column] == 75  # three of four ants were called cows
    assert shown[column, row] == 0
    assert axes.get_ylim()[0] > axes.get_ylim()[1]  # the first class is on top
    numbers = {text.get_position(): text.get_text() for text in axes.texts}
    assert numbers == {(2, 0): "75", (0, 0): "25", (1, 1): "100", (2, 2): "100"}


def test_names_are_never_read_as_formulas() -> None:
    names = [r"$\frac$", "_hidden", "a_b^c"]
    figures = [
        plots.confusion(np.eye(3), names, title=names[0]),
        plots.memory_tsne(np.eye(3), [0, 1, 2], names, 0),
        plots.run_times(dict.fromkeys(names, interval([1.0]))),
    ]
    for figure in figures:
        assert set(names) <= {text.get_text() for text in texts_of(figure)}


def test_confusion_with_no_answers_and_a_class_without_images() -> None:
    matrix = confusion_matrix(true=[0, 0, 0, 0], predicted=[0, -1, -1, -1], num_classes=2, no_answer_column=True)
    axes = plots.confusion(matrix, ["a", "b"]).axes[0]
    assert x_ticks(axes) == ["a", "b", "–"]
    assert "no answer" in axes.get_xlabel()
    shown = np.ma.filled(axes.images[0].get_array(), np.nan)
    assert shown[0].tolist() == [25, 0, 75]
    assert np.isnan(shown[1]).all()


def test_confusion_of_many_classes_counts_tasks() -> None:
    axes = plots.confusion(counts(30), range(30), task_sizes=[10, 5, 15]).axes[0]
    assert x_ticks(axes) == y_ticks(axes) == ["1", "2", "3"]
    assert list(axes.get_yticks()) == [4.5, 12, 22]  # the middles of classes 0..9, 10..14, 15..29
    assert axes.get_ylabel() == "true class, by task"
    borders = {float(line.get_ydata()[0]) for line in axes.get_lines() if len(set(line.get_ydata())) == 1}  # type: ignore[arg-type, index]
    assert borders == {9.5, 14.5}
    assert not axes.texts


def test_confusion_of_many_classes_without_tasks_counts_classes() -> None:
    axes = plots.confusion(counts(100, no_answer=True), range(100)).axes[0]
    assert y_ticks(axes) == [str(int(tick)) for tick in axes.get_yticks()]
    assert x_ticks(axes) == [*y_ticks(axes), "–"]
    assert axes.get_xticks()[-1] == 100


@pytest.mark.parametrize("n", [0, 1, 2, 3, 4, 5, 6, 12])
def test_tsne_of_few_points(n: int) -> None:
    points, labels = clusters(n, 3)
    figure = plots.memory_tsne(points, labels, ["_a", "b$1$", "c"], seed=0)
    axes = figure.axes[0]
    drawn = [c for c in axes.collections if isinstance(c, PathCollection)]
    assert sum(len(c.get_offsets()) for c in drawn) == n  # type: ignore[arg-type]
    assert all(np.isfinite(np.asarray(c.get_offsets())).all() for c in drawn)
    assert legend_texts(figure) == ["_a", "b$1$", "c"][:n]
    assert axes.get_xlabel().startswith("t-SNE" if n >= 5 else "principal components")
    assert texts_of(figure)


@pytest.mark.parametrize("points", [np.ones((10, 4)), np.arange(10.0)[:, None], np.repeat(np.eye(2), 5, axis=0)])
def test_tsne_of_odd_points(points: np.ndarray) -> None:
    """All alike, one dimension, only two different ones."""
    figure = plots.memory_tsne(points, np.zeros(10, dtype=int), ["a"], seed=0)
    assert np.isfinite(np.asarray(figure.axes[0].collections[0].get_offsets())).all()


def test_tsne_keeps_clusters_together() -> None:
    points, labels = clusters(90, 3)
    figure = plots.memory_tsne(points, labels, ["a", "b", "c"], seed=1)
    groups = [np.asarray(c.get_offsets()) for c in figure.axes[0].collections]
    centres = np.array([group.mean(axis=0) for group in groups])
    for i, group in enumerate(groups):
        nearest = np.linalg.norm(group[:, None] - centres, axis=2).argmin(axis=1)
        assert (nearest == i).mean() > 0.9


def test_tsne_draws_no_more_than_asked_and_says_so() -> None:
    points, labels = clusters(50, 3)
    axes = plots.memory_tsne(points, labels, ["a", "b", "c"], seed=0, max_points=20).axes[0]
    assert sum(len(c.get_offsets()) for c in axes.collections) == 20  # type: ignore[arg-type]
    assert axes.get_xlabel() == "t-SNE; 20 of 50 images"


def test_tsne_pairs_of_colour_and_marker_are_unique() -> None:
    pairs = {(style["color"], style["marker"]) for style in map(plots._point_style, range(100))}
    assert len(pairs) == 100
    assert not plots.memory_tsne(*clusters(42, 21), range(21), 0).legends
    assert len(legend_texts(plots.memory_tsne(*clusters(40, 20), range(20), 0))) == 20


def test_tsne_leaves_its_input_alone() -> None:
    points, labels = clusters(10, 2)
    before = points.copy(), labels.copy()
    plots.memory_tsne(points, labels, ["a", "b"], 0)
    np.testing.assert_array_equal(points, before[0])
    np.testing.assert_array_equal(labels, before[1])


def test_softmax_bar_is_left_of_the_ncm_bar() -> None:
    figure = plots.softmax_vs_ncm({"ER": (interval([0.1]), interval([0.2])), "MIR": (interval([0.3]), interval([0.4]))})
    axes = figure.axes[0]
    bars = sorted(axes.patches, key=lambda bar: bar.get_x())  # type: ignore[attr-defined]
    assert [bar.get_height() for bar in bars] == pytest.approx([10, 20, 30, 40])  # type: ignore[attr-defined]
    assert x_ticks(axes) == ["ER", "MIR"]
    assert legend_texts(figure) == ["softmax", "nearest class mean"]
    assert bars[0].get_hatch() != bars[1].get_hatch()
    assert [text.get_text() for text in axes.texts] == ["10.0", "30.0", "20.0", "40.0"]


def test_run_times_from_short_to_long_in_seconds() -> None:
    axes = plots.run_times({"slow": interval([90.0, 110.0]), "none": UNKNOWN, "fast": interval([0.5])}).axes[0]
    assert y_ticks(axes) == ["fast", "slow", "none"]
    assert [text.get_text() for text in axes.texts] == ["0.500", "100 ± 127", "not measured"]
    assert axes.get_xlabel() == "seconds"
    assert axes.get_ylim()[0] > axes.get_ylim()[1]


@pytest.mark.parametrize("ordered", [True, False])
def test_ablation(ordered: bool) -> None:
    values = [interval([0.2, 0.3]), interval([0.4, 0.4])]
    axes = plots.ablation([0.1, 1.0], values, xlabel="temperature", ordered=ordered, chosen=0.1).axes[0]
    assert x_ticks(axes) == ["0.1", "1.0"]
    assert [tick.get_fontweight() for tick in axes.get_xticklabels()] == ["bold", "normal"]
    assert axes.get_xlabel().startswith("temperature")
    assert "%" in axes.get_ylabel()
    if ordered:
        np.testing.assert_allclose(axes.get_lines()[-1].get_ydata(), [25, 40])
    else:
        assert [bar.get_height() for bar in axes.patches] == pytest.approx([25, 40])  # type: ignore[attr-defined]


def test_head_weights_begin_without_old_classes() -> None:
    figure = plots.head_weights(new=[0.1, 0.2], old=[NAN, -0.3])
    data = [list(line.get_ydata()) for line in figure.axes[0].get_lines()]  # type: ignore[arg-type]
    assert [0.1, 0.2] in data
    assert any(math.isnan(values[0]) and values[1] == -0.3 for values in data)
    assert legend_texts(figure) == ["new classes", "old classes"]


def test_demo_shows_both_sides_of_the_same_matrices() -> None:
    keeps, forgets = [[1.0, 0.0], [0.9, 0.7]], [[1.0, 0.0], [0.0, 0.9]]
    figure = plots.demo_picture({"scr": [keeps], "fine-tune": [forgets]}, title="Split Digits")
    left, right = figure.axes
    assert [list(line.get_ydata()) for line in left.get_lines()] == [[100, pytest.approx(80)], [100, 45]]  # type: ignore[arg-type]
    assert [bar.get_height() for bar in right.patches] == pytest.approx([90, 70, 0, 90])  # type: ignore[attr-defined]
    assert legend_texts(figure) == ["scr: 80.0 % at the end", "fine-tune: 45.0 % at the end"]
    assert (left.get_xlabel(), right.get_xlabel()) == ("tasks learned", "task")
    assert x_ticks(right) == ["1", "2"]
    assert "%" in left.get_ylabel()
    assert "%" in right.get_ylabel()


BAD: dict[str, tuple[Callable[[], object], str]] = {
    "no method": (lambda: plots.accuracy_over_tasks({}), "no method"),
    "percent": (lambda: plots.accuracy_over_tasks({"scr": [[90.0]]}), "fractions"),
    "ragged": (lambda: plots.accuracy_over_tasks({"scr": [[0.9], [0.9, 0.8]]}), "same length"),
    "empty": (lambda: plots.accuracy_over_tasks({"scr": []}), "shape"),
    "names": (lambda: plots.confusion([[1, 0], [0, 1]], ["a"]), "1 class names"),
    "sizes": (lambda: plots.confusion([[1, 0], [0, 1]], ["a", "b"], task_sizes=[3]), "add up"),
    "negative": (lambda: plots.confusion([[-1, 0], [0, 1]], ["a", "b"]), "counts"),
    "NaN": (lambda: plots.memory_tsne([[NAN, 1.0]], [0], ["a"], 0), "diverged"),
    "label": (lambda: plots.memory_tsne([[0.0, 1.0]], [1], ["a"], 0), "from 0 to 0"),
    "rows": (lambda: plots.memory_tsne([[0.0, 1.0]], [0, 0], ["a"], 0), "N × d"),
    "no bars": (lambda: plots.softmax_vs_ncm({}), "no method"),
    "no times": (lambda: plots.run_times({}), "no method"),
    "bars in percent": (lambda: plots.softmax_vs_ncm({"a": (interval([10.0]), interval([0.1]))}), "fractions"),
    "ablation": (lambda: plots.ablation([1], [], xlabel="x"), "as many"),
    "weights": (lambda: plots.head_weights([0.1], [0.1, 0.2]), "same number"),
    "tasks": (lambda: plots.demo_picture({"a": [[[1.0]]], "b": [np.eye(2)]}), "different numbers of tasks"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_data_is_said_clearly(name: str) -> None:
    draw, message = BAD[name]
    with pytest.raises(InputError, match=message):
        draw()
