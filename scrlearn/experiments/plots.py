"""Figures: each function takes data and returns a matplotlib Figure; `save` writes it as PNG or SVG.

Accuracies come in as fractions and are drawn in percent. Colours are those of Okabe and Ito ("Color Universal Design",
2008), which people with any colour vision can tell apart; wherever a colour says something, a marker, a hatch or a
place says it too. The same data gives the same bytes: nothing of the date, the version, the person's own matplotlib
settings or the number of threads enters a file, and pyplot's global state is never touched.
"""

from __future__ import annotations

import functools
import io
import math
import os
import re
import textwrap
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, ParamSpec

import matplotlib
import numpy as np
from matplotlib import font_manager
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.legend import Legend
from matplotlib.legend_handler import HandlerTuple
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from numpy.typing import ArrayLike, NDArray

from scrlearn.errors import InputError, suggest
from scrlearn.evaluation import Interval, average_accuracy, average_over_time, interval
from scrlearn.files import atomic_write

# Okabe and Ito's eight, the two that are faint or heavy on white (black, yellow) last.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "*", "h", "d")  # 13: with 8 colours, 104 pairs
HATCHES = ("", "//", "..", "xx", "\\\\", "++", "oo", "--")
DASHES = ("-", "--", ":", "-.")
GREY = "#595959"
# for names of classes in other scripts: what Linux, macOS and Windows have
FURTHER_FONTS = (
    "Noto Sans CJK JP",
    "Noto Sans CJK SC",
    "WenQuanYi Micro Hei",
    "Hiragino Sans",
    "PingFang SC",
    "Apple SD Gothic Neo",
    "Yu Gothic",
    "Microsoft YaHei",
    "Malgun Gothic",
    "Noto Sans Devanagari",
    "Nirmala UI",
    "Arial Unicode MS",
)
_NO_GLYPH = re.compile(r"Glyph (\d+) ")
LABELLED_CLASSES = 20  # up to so many classes are named in a figure

_STYLE: Any = {
    "font.family": ["DejaVu Sans"],  # comes with matplotlib: the same letters on every machine
    "font.size": 10.0,
    "axes.titlesize": 11.0,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.edgecolor": GREY,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "xtick.labelcolor": "black",
    "ytick.labelcolor": "black",
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "hatch.linewidth": 0.6,
    "figure.constrained_layout.h_pad": 0.09,
    "figure.constrained_layout.w_pad": 0.09,
    "text.parse_math": False,  # a class may be called "a$b$"
    "svg.hashsalt": "scrlearn",
    "svg.fonttype": "path",
}
_STYLE_LOCK = threading.RLock()  # matplotlib's settings belong to the whole process

_P = ParamSpec("_P")
Curves = Mapping[str, Sequence[Sequence[float]]]
Floats = NDArray[np.float64]


@contextmanager
def _own_style() -> Iterator[set[str]]:
    """Draw by this page's settings alone, and put the person's back afterwards; gives letters that no font has."""
    missing: set[str] = set()
    with _STYLE_LOCK, matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE | {"font.family": [*_STYLE["font.family"], *_further_fonts()]})
        with warnings.catch_warnings(record=True) as caught:
            warnings.filterwarnings("always", message=_NO_GLYPH.pattern)
            yield missing
    for warning in caught:
        # matplotlib says it of each letter, each time it is drawn
        if (letter := _NO_GLYPH.match(str(warning.message))) is not None:
            missing.add(chr(int(letter[1])))
        else:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


@functools.cache
def _further_fonts() -> list[str]:
    """Fonts of this machine with letters that DejaVu lacks; they are asked for these alone."""
    here = set(font_manager.get_font_names())
    return [name for name in FURTHER_FONTS if name in here]


def _styled(draw: Callable[_P, Figure]) -> Callable[_P, Figure]:
    @functools.wraps(draw)
    def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> Figure:
        with _own_style():
            figure = draw(*args, **kwargs)
            # The layout moves a little with every drawing: let it settle, then hold it, so that all files are alike.
            for _ in range(2):
                figure.draw_without_rendering()
            figure.set_layout_engine("none")
            return figure

    return wrapper


def save(figure: Figure, path: str | os.PathLike[str], dpi: int = 150) -> Path:
    """Write a figure as PNG or SVG, by the path's ending; the file appears whole or not at all.

    >>> import tempfile
    >>> path = save(head_weights(new=[0.2, 0.3], old=[0.0, 0.1]), Path(tempfile.mkdtemp()) / "weights.svg")
    >>> path.read_text().startswith("<?xml")
    True
    """
    path = Path(path)
    ending = path.suffix.lower().removeprefix(".")
    if ending not in ("png", "svg"):
        raise InputError(f'Figures are written as .png or .svg, not as "{path.name}".{suggest(ending, ["png", "svg"])}')
    buffer = io.BytesIO()
    with _own_style() as missing:
        # The canvases are made here, so that no backend is chosen for the whole process.
        if ending == "png":
            FigureCanvasAgg(figure)
            figure.savefig(buffer, format="png", dpi=dpi, metadata={"Software": None})
        else:
            FigureCanvasSVG(figure)
            figure.savefig(buffer, format="svg", dpi=dpi, metadata={"Date": None, "Creator": None})
    if missing:
        letters = "".join(sorted(missing)[:10]) + "…" * (len(missing) > 10)
        warnings.warn(f"No font on this machine has {letters}: {path.name} shows boxes instead.", stacklevel=2)
    return atomic_write(path, buffer.getvalue())


# --------------------------------------------------------------------------------------------------- lines over tasks


@_styled
def accuracy_over_tasks(
    curves: Curves, *, title: str = "Accuracy over tasks", ylabel: str = "average accuracy on tasks seen (%)"
) -> Figure:
    """Mean accuracy on the tasks seen so far, one line per method, with the 95% interval over seeds as a band.

    Parameters
    ----------
    curves
        For each method's name its curves, one per seed: ``curves["scr"][seed][task]`` (fractions), as
        `scrlearn.evaluation.average_over_time` gives them.
    title, ylabel
        The words on the figure.

    Example
    -------
    >>> figure = accuracy_over_tasks({"scr": [[1.0, 0.9], [0.98, 0.88]], "fine-tune": [[1.0, 0.5], [0.99, 0.5]]})
    >>> figure.axes[0].get_xlabel()
    'tasks learned'
    """
    table = _tables(curves)
    figure, axes = _figure(6.4 if len(table) < 2 else 7.6, 4.2)
    _lines(axes, table, percent=True)
    _percent_axis(axes, ylabel, top=max(_highest(rows) for rows in table.values()))
    _title(axes, title)
    if len(table) > 1:
        handles = dict(zip(table, _line_handles(len(table)), strict=True))
        names = sorted(table, key=lambda name: -np.nan_to_num(interval(table[name][:, -1]).mean))  # as the lines end
        _legend(figure, [handles[name] for name in names], names, loc="outside right upper")
    return figure


@_styled
def head_weights(
    new: Sequence[float] | Sequence[Sequence[float]],
    old: Sequence[float] | Sequence[Sequence[float]],
    *,
    title: str = "Weights of the last layer",
) -> Figure:
    """Mean weight of the softmax layer for the newest task's classes and for the older ones (task-recency bias).

    Parameters
    ----------
    new, old
        One value per task, or one such list per seed. ``old`` has NaN at the first task: nothing is old then.
    title
        Title of the figure.
    """
    table = {"new classes": _table("new", new), "old classes": _table("old", old)}
    lengths = {name: rows.shape[1] for name, rows in table.items()}
    if len(set(lengths.values())) > 1:
        raise InputError(f"Weights of new and old classes cover {lengths} tasks; expected the same number for both.")
    figure, axes = _figure(6.4, 3.8)
    axes.axhline(0.0, color=GREY, linewidth=0.8)
    _lines(axes, table, percent=False)
    axes.set_ylabel("mean weight")
    _title(axes, title)
    _legend(figure, _line_handles(2), list(table), loc="outside right upper")
    return figure


def _table(name: str, rows: Any) -> Floats:
    """Per-seed curves as seeds × tasks; one curve alone is one seed."""
    try:
        table = np.array(rows, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise InputError(f'The curves of "{name}" must be one list per seed, all of the same length.') from error
    if table.ndim == 1:
        table = table[None]
    if table.ndim != 2 or not table.size or np.isinf(table).any():
        raise InputError(f'The curves of "{name}" have shape {table.shape}; expected seeds × tasks of finite numbers.')
    return table


def _tables(curves: Mapping[str, Any]) -> dict[str, Floats]:
    if not curves:
        raise InputError("There is nothing to draw: no method was given.")
    tables = {str(name): _table(str(name), rows) for name, rows in curves.items()}
    for name, rows in tables.items():
        _check_fractions(name, rows)
    return tables


def _check_fractions(name: str, values: ArrayLike) -> None:
    array = np.asarray(values, dtype=np.float64)
    known = array[~np.isnan(array)]
    if known.size and (known.min() < 0 or known.max() > 1):
        wrong = known.min() if known.min() < 0 else known.max()
        raise InputError(f'"{name}" holds the accuracy {wrong:g}; expected fractions between 0 and 1.')


def _lines(axes: Axes, table: Mapping[str, Floats], percent: bool) -> None:
    longest, scale = 1, 100.0 if percent else 1.0
    for i, rows in enumerate(table.values()):
        points = [interval(column) for column in rows.T]
        x = np.arange(1, len(points) + 1)
        mean, low, high = (np.array(values) * scale for values in _ends(points))
        style = _line_style(i)
        # Above the axes' edge a marker at 100% would be cut in half.
        axes.plot(x, mean, **style, clip_on=False, zorder=3 + i)
        if any(point.n > 1 for point in points):
            if percent:  # the interval of values near 100% reaches beyond what can be
                low, high = np.clip(low, 0, 100), np.clip(high, 0, 100)
            axes.fill_between(x, low, high, color=style["color"], alpha=0.18 if len(table) <= 5 else 0.1, linewidth=0)
        longest = max(longest, len(points))
    axes.set_xlim(0.8 if longest > 1 else 0.5, longest + (0.2 if longest > 1 else 0.5))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10, min_n_ticks=1))
    axes.set_xlabel("tasks learned")
    axes.grid(axis="y")


def _ends(points: Sequence[Interval]) -> tuple[list[float], list[float], list[float]]:
    return [p.mean for p in points], [p.low for p in points], [p.high for p in points]


def _line_style(i: int) -> dict[str, Any]:
    colour = PALETTE[i % len(PALETTE)]
    return {
        "color": colour,
        "marker": MARKERS[i % len(MARKERS)],
        "linestyle": DASHES[i // len(PALETTE) % len(DASHES)],
        "linewidth": 2.0,
        "markersize": 6.0,
        "markeredgecolor": "white" if colour != PALETTE[-1] else GREY,  # yellow alone is too faint
        "markeredgewidth": 0.8,
    }


def _line_handles(count: int) -> list[Line2D]:
    return [Line2D([], [], **_line_style(i)) for i in range(count)]


def _highest(rows: Floats) -> float:
    """The top of the highest band, as a fraction."""
    highs = [high for high in _ends([interval(column) for column in rows.T])[2] if not math.isnan(high)]
    return min(max(highs, default=1.0), 1.0)


# ------------------------------------------------------------------------------------------------------------- bars


@_styled
def softmax_vs_ncm(
    bars: Mapping[str, tuple[Interval, Interval]],
    *,
    title: str = "Softmax against nearest class mean",
    paper: Mapping[str, tuple[Interval | None, Interval | None]] | None = None,
) -> Figure:
    """Two bars per method: the accuracy of the same training run with the softmax and with the NCM classifier.

    Parameters
    ----------
    bars
        For each method its ``(softmax, ncm)`` intervals, in fractions.
    title
        Title of the figure.
    paper
        Published means to show beside them, in the same form.
    """
    _some(bars)
    groups = {
        "softmax": [softmax for softmax, _ in bars.values()],
        "nearest class mean": [ncm for _, ncm in bars.values()],
    }
    figure, axes = _figure(max(5.0, 2.0 + 1.1 * len(bars)), 4.2)
    known = [(paper or {}).get(name, (None, None)) for name in bars]
    published = [[pair[i] for pair in known] for i in range(2)]
    _grouped_bars(axes, groups, [str(name) for name in bars], numbers=True, published=published if paper else None)
    _title(axes, title)
    handles, names = [*_bar_handles(2), *_published_handle(paper)], [*groups, "the paper"]
    _legend(figure, handles, names[: len(handles)], loc="outside upper right", ncols=len(handles))
    return figure


@_styled
def accuracy_bars(
    groups: Mapping[str, Sequence[Interval]], names: Sequence[object], *, title: str, xlabel: str = ""
) -> Figure:
    """Bars side by side: one group for each of `names`, in it one bar for each of `groups`.

    Parameters
    ----------
    groups
        For each kind of bar its accuracy (fractions) in every group; NaN where there is none.
    names
        Of the groups.
    title, xlabel
        The words on the figure.

    Example
    -------
    >>> figure = accuracy_bars({"scr": [interval([0.3])], "scr+": [interval([0.4])]}, ["M = 2k"], title="Beyond")
    >>> [text.get_text() for text in figure.legends[0].get_texts()]
    ['scr', 'scr+']
    """
    _some(groups)
    if any(len(points) != len(names) for points in groups.values()) or not len(names):
        raise InputError(f"There are {len(names)} groups; expected at least one, and as many bars of every kind.")
    figure, axes = _figure(max(5.0, 1.6 + 0.55 * len(groups) * len(names)), 4.2)
    _grouped_bars(axes, groups, [str(name) for name in names], numbers=True)
    axes.set_xlabel(xlabel)
    _title(axes, title)
    _legend(figure, _bar_handles(len(groups)), list(groups), loc="outside right upper")
    return figure


@_styled
def run_times(bars: Mapping[str, Interval], *, title: str = "Run time, training and inference") -> Figure:
    """One bar per method: seconds for a whole run, longest at the bottom.

    Parameters
    ----------
    bars
        For each method the interval of its seconds.
    title
        Title of the figure.
    """
    _some(bars)
    ordered = sorted(bars.items(), key=lambda item: (math.isnan(item[1].mean), item[1].mean))
    figure, axes = _figure(7.0, 1.3 + 0.36 * len(ordered))
    points = [point for _, point in ordered]
    places = np.arange(len(points))
    axes.barh(places, [point.mean for point in points], height=0.68, color=PALETTE[0])
    axes.errorbar([p.mean for p in points], places, xerr=_half_widths(points), **_ERROR_BAR)
    longest = max((point.high for point in points if not math.isnan(point.mean)), default=0.0) or 1.0
    for place, point in enumerate(points):
        text = "not measured" if math.isnan(point.mean) else _seconds(point)
        axes.text((0.0 if math.isnan(point.mean) else point.high) + 0.015 * longest, place, text, va="center", size=9)
    axes.set_yticks(places, [_short(name) for name, _ in ordered])
    axes.set_xlim(0, longest * 1.24)
    axes.set_ylim(len(points) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("seconds")
    axes.grid(axis="x")
    _title(axes, title)
    return figure


@_styled
def ablation(
    x_labels: Sequence[object],
    intervals: Sequence[Interval],
    *,
    xlabel: str,
    title: str = "Ablation",
    ordered: bool = True,
    ylabel: str = "average accuracy (%)",
    chosen: object | None = None,
) -> Figure:
    """Accuracy for each value of one choice.

    Parameters
    ----------
    x_labels, intervals
        The values and the accuracy (fractions) of each.
    xlabel
        What is varied, such as "memory batch" or "temperature".
    title
        Title of the figure.
    ordered
        True for numbers, which a line connects; False for alternatives, which get bars.
    ylabel
        What is measured.
    chosen
        The value that is the default, if it shall be marked.
    """
    if len(x_labels) != len(intervals) or not len(intervals):
        raise InputError(f"{len(x_labels)} values and {len(intervals)} intervals; expected as many, at least one.")
    names = [str(label) for label in x_labels]
    figure, axes = _figure(max(4.6, 1.6 + (0.75 if ordered else 1.0) * len(names)), 3.8)
    if ordered:
        _check_fractions(title, [point.mean for point in intervals])
        mean = [point.mean * 100 for point in intervals]
        axes.errorbar(range(len(names)), mean, yerr=_half_widths(intervals) * 100, **_ERROR_BAR)
        axes.plot(range(len(names)), mean, **_line_style(0), zorder=5)
        axes.set_xticks(range(len(names)), [_short(name) for name in names])
        axes.set_xlim(-0.4, len(names) - 0.6)
        for place, point in enumerate(intervals):
            if not math.isnan(point.mean):
                _above(axes, place, point.high * 100, f"{point.mean * 100:.1f}")
        axes.grid(axis="y")
        _percent_axis(axes, ylabel, top=_top(intervals), headroom=1.12)
    else:
        _grouped_bars(axes, {"": list(intervals)}, names, numbers=True, ylabel=ylabel)
    if chosen in x_labels:
        tick = axes.get_xticklabels()[list(x_labels).index(chosen)]
        tick.set_fontweight("bold")
        xlabel = f"{xlabel}  (bold: the default)"
    axes.set_xlabel(xlabel)
    _title(axes, title)
    return figure


_ERROR_BAR: dict[str, Any] = {"fmt": "none", "ecolor": "black", "elinewidth": 1.1, "capsize": 3, "zorder": 4}


def _grouped_bars(
    axes: Axes,
    groups: Mapping[str, Sequence[Interval]],
    names: Sequence[str],
    *,
    numbers: bool,
    ylabel: str = "average accuracy (%)",
    published: Sequence[Sequence[Interval | None]] | None = None,
) -> None:
    """One group per name, one bar in it for each of ``groups``; fractions in, percent out."""
    width = 0.8 / len(groups)
    for i, (label, points) in enumerate(groups.items()):
        _check_fractions(label, [point.mean for point in points])
        places = np.arange(len(points)) + (i - (len(groups) - 1) / 2) * width
        mean = np.array([point.mean * 100 for point in points])
        axes.bar(places, np.nan_to_num(mean), width * 0.94, **_bar_style(i))
        axes.errorbar(places, mean, yerr=_half_widths(points) * 100, **_ERROR_BAR)
        for place, point in zip(places, points, strict=True):
            if math.isnan(point.mean):
                _above(axes, place, 0.0, "–")
            elif numbers:
                _above(axes, place, point.high * 100, f"{point.mean * 100:.1f}")
        if published:
            # at the side of the bar, where neither the interval nor the number is
            known = [(place, point) for place, point in zip(places, published[i], strict=True) if point is not None]
            x, y = [place + 0.3 * width for place, _ in known], [100 * point.mean for _, point in known]
            axes.plot(x, y, **_PUBLISHED)
    axes.set_xticks(range(len(names)), [textwrap.fill(_short(name, 30), 11) for name in names])
    axes.tick_params(axis="x", length=0)
    axes.set_xlim(-0.6, len(names) - 0.4)
    axes.grid(axis="y")
    shown = [*groups.values(), *([point for point in points if point is not None] for points in published or ())]
    _percent_axis(axes, ylabel, top=max(_top(points) for points in shown if points), headroom=1.10 if numbers else 1.04)


_PUBLISHED: dict[str, Any] = {
    "linestyle": "none",
    "marker": "D",
    "markersize": 5.5,
    "markerfacecolor": "white",
    "markeredgecolor": "black",
    "zorder": 6,
}


def _published_handle(paper: object) -> list[Line2D]:
    return [Line2D([], [], **_PUBLISHED)] if paper else []


def _above(axes: Axes, x: float, y: float, text: str) -> None:
    axes.annotate(text, (x, y), xytext=(0, 4), textcoords="offset points", ha="center", va="bottom", fontsize=8)


def _bar_style(i: int) -> dict[str, Any]:
    hatch = HATCHES[i % len(HATCHES)]
    return {"color": PALETTE[i % len(PALETTE)], "hatch": hatch, "edgecolor": "white", "linewidth": 0.0}


def _bar_handles(count: int) -> list[Patch]:
    return [Patch(facecolor=style.pop("color"), **style) for style in map(_bar_style, range(count))]


def _half_widths(points: Sequence[Interval]) -> Floats:
    return np.array([point.half_width for point in points], dtype=np.float64)


def _top(points: Sequence[Interval]) -> float:
    return min(max((point.high for point in points if not math.isnan(point.mean)), default=1.0), 1.0)


def _seconds(point: Interval) -> str:
    digits = 0 if point.mean >= 100 else 1 if point.mean >= 1 else 3
    return point.format(scale=1, digits=digits) if point.n > 1 else f"{point.mean:.{digits}f}"


def _percent(values: Sequence[float]) -> str:
    point = interval(values)
    return f"{point if point.n > 1 else f'{point.mean * 100:.1f}'} %"


def _some(bars: Mapping[str, object]) -> None:
    if not bars:
        raise InputError("There is nothing to draw: no method was given.")


# -------------------------------------------------------------------------------------------------- confusion matrix


@_styled
def confusion(
    matrix: ArrayLike,
    class_names: Sequence[object],
    *,
    task_sizes: Sequence[int] | None = None,
    title: str = "Confusion matrix",
) -> Figure:
    """Heat map of a confusion matrix: rows are true classes, columns predicted ones, each row in percent of its images.

    Up to 20 classes are named on both axes; with more, lines show the borders of the tasks and the axes count tasks.

    Parameters
    ----------
    matrix
        Counts, as `scrlearn.evaluation.confusion_matrix` gives them, with or without the column for no answer.
    class_names
        The name of each class, in the order of the rows.
    task_sizes
        How many classes each task brings, in that order; draws the borders.
    title
        Title of the figure.

    Example
    -------
    >>> figure = confusion([[8, 2], [0, 10]], ["cat", "dog"])
    >>> figure.axes[0].get_ylabel(), [tick.get_text() for tick in figure.axes[0].get_yticklabels()]
    ('true class', ['cat', 'dog'])
    """
    counts = _checked_confusion(matrix, class_names, task_sizes)
    side = min(8.0, 3.2 + 0.36 * len(counts)) if len(counts) <= LABELLED_CLASSES else 6.4
    figure, axes = _figure(side + 1.0, side, layout="compressed")  # made for axes of a fixed aspect
    _confusion_bar(figure, _draw_confusion(axes, counts, class_names, task_sizes), [axes])
    _title(axes, title)
    return figure


@_styled
def confusions(
    matrices: Mapping[str, ArrayLike], class_names: Sequence[object], *, task_sizes: Sequence[int] | None = None
) -> Figure:
    """Several confusion matrices side by side, with one scale of colours.

    Parameters
    ----------
    matrices
        By the title of each; see `confusion`.
    class_names, task_sizes
        See `confusion`; the same for all.

    Example
    -------
    >>> figure = confusions({"ER": [[1, 9], [0, 10]], "SCR": [[8, 2], [1, 9]]}, ["cat", "dog"])
    >>> [axes.get_title(loc="left") for axes in figure.axes[:2]]
    ['ER', 'SCR']
    """
    _some(matrices)
    counts = {name: _checked_confusion(matrix, class_names, task_sizes) for name, matrix in matrices.items()}
    side = min(6.4, 2.6 + 0.3 * len(class_names)) if len(class_names) <= LABELLED_CLASSES else 5.0
    figure = Figure(figsize=(side * len(counts) + 1.0, side), layout="compressed")
    FigureCanvasAgg(figure)
    panels = list(figure.subplots(1, len(counts), squeeze=False)[0])
    for axes, (name, matrix) in zip(panels, counts.items(), strict=True):
        image = _draw_confusion(axes, matrix, class_names, task_sizes)
        axes.set_title(name)
    _confusion_bar(figure, image, panels)
    return figure


def _draw_confusion(
    axes: Axes, counts: Floats, class_names: Sequence[object], task_sizes: Sequence[int] | None
) -> AxesImage:
    rows, columns = counts.shape
    total = counts.sum(axis=1, keepdims=True)
    share = np.divide(100.0 * counts, total, out=np.full(counts.shape, np.nan), where=total > 0)
    named = rows <= LABELLED_CLASSES
    colours = matplotlib.colormaps["Blues"].with_extremes(bad="#CCCCCC")
    norm = PowerNorm(1.0 if named else 0.5, 0, 100)  # without numbers, small shares must be seen too
    image = axes.imshow(share, cmap=colours, norm=norm, interpolation="nearest", aspect="equal")
    by_task = "" if named or task_sizes is None else ", by task"
    axes.set_xlabel(f"predicted class{by_task}{'' if columns == rows else '  (–: no answer)'}")
    axes.set_ylabel(f"true class{by_task}")
    if named:
        _name_classes(axes, [_short(str(name)) for name in class_names], columns)
        _cell_numbers(axes, share)
    else:
        _count_tasks(axes, rows, columns, task_sizes)
    _task_borders(axes, rows, columns, task_sizes)
    return image


def _confusion_bar(figure: Figure, image: AxesImage, panels: list[Axes]) -> None:
    share = 0.046 / len(panels)
    bar = figure.colorbar(image, ax=panels, fraction=share, pad=0.03 / len(panels), ticks=[0, 20, 40, 60, 80, 100])
    bar.set_label("share of the true class's images (%)")
    bar.outline.set_visible(False)


def _checked_confusion(matrix: ArrayLike, class_names: Sequence[object], task_sizes: Sequence[int] | None) -> Floats:
    counts = np.array(matrix, dtype=np.float64)
    classes = len(class_names)
    if not classes or counts.shape not in ((classes, classes), (classes, classes + 1)):
        raise InputError(
            f"The confusion matrix has shape {counts.shape} and there are {classes} class names; expected one row and "
            "one column per name (and at most one more column, for no answer)."
        )
    if not np.isfinite(counts).all() or counts.min() < 0:
        raise InputError("The confusion matrix must hold counts: finite numbers, 0 or more.")
    if task_sizes is not None and (sum(task_sizes) != classes or min(task_sizes, default=0) < 1):
        raise InputError(
            f"The tasks' sizes {list(task_sizes)} do not add up to the {classes} classes, or one of them is empty."
        )
    return counts


def _name_classes(axes: Axes, names: Sequence[str], columns: int) -> None:
    axes.set_yticks(range(len(names)), names)
    axes.set_xticks(range(columns), [*names, "–"][:columns])
    if max(map(len, names)) > 2:
        for tick in axes.get_xticklabels():
            tick.set(rotation=45, ha="right", rotation_mode="anchor")
    axes.tick_params(length=0)


def _cell_numbers(axes: Axes, share: Floats) -> None:
    size = 9 if len(share) <= 10 else 6.5
    for (i, j), value in np.ndenumerate(share):
        if value >= 0.5:  # what would read 0 stays empty (and so does NaN)
            colour = "white" if value > 55 else "black"
            axes.text(j, i, f"{value:.0f}", ha="center", va="center", color=colour, fontsize=size)


def _count_tasks(axes: Axes, rows: int, columns: int, task_sizes: Sequence[int] | None) -> None:
    """Ticks for many classes: one per task in its middle, or every so many classes."""
    no_answer = ["–"] if columns > rows else []
    if task_sizes is None:
        ticks = [int(t) for t in MaxNLocator(integer=True, nbins=10).tick_values(0, rows - 1) if 0 <= t < rows]
        labels = [str(t) for t in ticks]
    else:
        ends = np.cumsum(task_sizes)
        middles = ends - np.array(task_sizes) / 2 - 0.5
        step = math.ceil(len(ends) / LABELLED_CLASSES)
        ticks, labels = list(middles[::step]), [str(t + 1) for t in range(0, len(ends), step)]
        axes.tick_params(length=0)
    axes.set_yticks(ticks, labels)
    axes.set_xticks([*ticks, rows][: len(ticks) + len(no_answer)], labels + no_answer)


def _task_borders(axes: Axes, rows: int, columns: int, task_sizes: Sequence[int] | None) -> None:
    for spine in axes.spines.values():
        spine.set_visible(True)
    borders = [] if task_sizes is None else [float(end) - 0.5 for end in np.cumsum(task_sizes)[:-1]]
    if columns > rows:
        axes.axvline(rows - 0.5, color="black", linewidth=1.2)
    for border in borders:
        axes.axhline(border, color=GREY, linewidth=0.5)
        axes.axvline(border, color=GREY, linewidth=0.5)


# -------------------------------------------------------------------------------------------------- t-SNE of the memory


def memory_tsne(
    embeddings: ArrayLike,
    labels: ArrayLike,
    class_names: Sequence[object],
    seed: int = 0,
    *,
    title: str = "Embeddings of the memory",
    max_points: int | None = 1000,
    iterations: int = 500,
) -> Figure:
    """Where the memory's images lie in the embedding space, in two dimensions; one colour and marker per class.

    Parameters
    ----------
    embeddings
        One row per image.
    labels
        Class index of each row: its place in ``class_names``.
    class_names
        Names for the legend, which is drawn for up to 20 classes.
    seed
        Seed of t-SNE, and of the choice of points. The picture depends on nothing else.
    title
        Title of the figure.
    max_points
        Draw at most so many images, chosen at random; None for all. t-SNE of 1,000 takes a second, of 5,000 with twice
        the iterations most of a minute.
    iterations
        Steps of t-SNE, 250 or more.

    References
    ----------
    van der Maaten and Hinton, "Visualizing Data using t-SNE", JMLR 2008.
    """
    x, y = _checked_embeddings(embeddings, labels, class_names)
    total = len(x)
    if max_points is not None and total > max_points:
        kept = np.sort(np.random.default_rng(seed).choice(total, size=max_points, replace=False))
        x, y = x[kept], y[kept]
    places, how = two_dimensions(x, seed, iterations)  # outside the style's lock: this is the slow part
    count = f"{len(x):,}" if len(x) == total else f"{len(x):,} of {total:,}"
    return _draw_embedding(places, y, class_names, title, f"{how}; {count} image{'' if total == 1 else 's'}")


@_styled
def _draw_embedding(
    places: Floats, y: NDArray[np.int64], class_names: Sequence[object], title: str, note: str
) -> Figure:
    present = [int(c) for c in np.unique(y)]
    legend = 0 < len(present) <= LABELLED_CLASSES
    figure, axes = _figure(7.2 if legend else 5.8, 5.4)
    _scatter(axes, places, y)
    axes.set_xlabel(note)
    _title(axes, title)
    if legend:
        handles = [Line2D([], [], linestyle="", markersize=7, **_legend_point(c)) for c in present]
        _legend(figure, handles, [str(class_names[c]) for c in present], loc="outside right upper")
    return figure


@_styled
def memory_maps(maps: Mapping[str, tuple[ArrayLike, ArrayLike]]) -> Figure:
    """Several memories side by side, each as t-SNE has laid it out already; a colour and marker stand for a class.

    Parameters
    ----------
    maps
        By the title of each: the place of every image (N × 2) and its class.

    Example
    -------
    >>> figure = memory_maps({"ER": ([[0.0, 1.0], [1.0, 0.0]], [0, 1]), "SCR": ([[0.0, 0.0]], [0])})
    >>> [axes.get_title(loc="left") for axes in figure.axes]
    ['ER', 'SCR']
    """
    _some(maps)
    checked = {
        str(name): _checked_embeddings(places, labels, range(int(np.max(labels, initial=0)) + 1))
        for name, (places, labels) in maps.items()
    }
    columns = min(len(checked), 2)
    rows = math.ceil(len(checked) / columns)
    figure = Figure(figsize=(4.7 * columns, 4.6 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, (name, (places, y)) in zip(panels, checked.items(), strict=False):
        _scatter(axes, places, y)
        axes.set_title(name)
        axes.set_xlabel(f"{len(y):,} images, {len(np.unique(y))} classes")
    for axes in panels[len(checked) :]:
        axes.set_visible(False)
    return figure


def _scatter(axes: Axes, places: Floats, y: NDArray[np.int64]) -> None:
    size = 26.0 if len(y) <= 500 else 14.0
    for c in map(int, np.unique(y)):
        axes.scatter(places[y == c, 0], places[y == c, 1], s=size, **_point_style(c))
    if not len(y):
        axes.text(0.5, 0.5, "the memory is empty", ha="center", va="center", transform=axes.transAxes)
    axes.set(xticks=[], yticks=[])
    axes.margins(0.06)
    for spine in axes.spines.values():
        spine.set_visible(True)


def _checked_embeddings(
    embeddings: ArrayLike, labels: ArrayLike, class_names: Sequence[object]
) -> tuple[Floats, NDArray[np.int64]]:
    x, y = np.array(embeddings, dtype=np.float64), np.array(labels)
    if x.size == 0 and y.size == 0:
        return np.zeros((0, 2)), np.zeros(0, dtype=np.int64)
    if x.ndim != 2 or y.shape != x.shape[:1]:
        raise InputError(f"Embeddings have shape {x.shape} and labels {y.shape}; expected N × d and N.")
    if not np.isfinite(x).all():
        raise InputError("The embeddings contain NaN or infinite values; the encoder has diverged.")
    if not np.issubdtype(y.dtype, np.integer) or y.min() < 0 or y.max() >= len(class_names):
        raise InputError(f"Labels must be integers from 0 to {len(class_names) - 1}: each the place of a class name.")
    return x, y.astype(np.int64)


def two_dimensions(x: Floats, seed: int, iterations: int = 1000) -> tuple[Floats, str]:
    """t-SNE, or the principal plane where t-SNE has nothing to work with; and which of the two it was."""
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]  # comes with scikit-learn

    with threadpool_limits(limits=1):  # the order of sums over threads would move the points
        plane = _principal_plane(x)
        spread = float(plane[:, 0].std()) if len(x) else 0.0
        if len(x) < 5 or spread == 0.0:
            return plane, "principal components (too few different images for t-SNE)"
        start = (plane / spread * 1e-4).astype(np.float32)
        tsne = TSNE(perplexity=min(30.0, (len(x) - 1) / 3), init=start, random_state=seed, max_iter=iterations)
        return np.asarray(tsne.fit_transform(x.astype(np.float32)), dtype=np.float64), "t-SNE"


def _principal_plane(x: Floats) -> Floats:
    """The first two principal components, with zeros where there are fewer and signs that do not depend on LAPACK."""
    plane = np.zeros((len(x), 2))
    if len(x) > 1:
        u, s, _ = np.linalg.svd(x - x.mean(axis=0), full_matrices=False)
        found = min(2, s.size)
        scores = u[:, :found] * s[:found]
        largest = scores[np.abs(scores).argmax(axis=0), np.arange(found)]
        plane[:, :found] = scores * np.where(largest < 0, -1.0, 1.0)
    return plane


def _point_style(c: int) -> dict[str, Any]:
    colour, marker = PALETTE[c % len(PALETTE)], MARKERS[c % len(MARKERS)]
    return {"color": colour, "marker": marker, "edgecolors": "white" if colour != PALETTE[-1] else GREY, "lw": 0.4}


def _legend_point(c: int) -> dict[str, Any]:
    style = _point_style(c)
    return {"color": style["color"], "marker": style["marker"], "mec": style["edgecolors"], "mew": 0.4}


# ------------------------------------------------------------------------------------------------------------ the demo


_BESIDE: dict[str, Any] = {"handler_map": {tuple: HandlerTuple(ndivide=None)}, "handlelength": 4.0}


@_styled
def demo_picture(matrices: Mapping[str, Sequence[ArrayLike]], *, title: str = "Learning without forgetting") -> Figure:
    """One picture for a newcomer: accuracy over the tasks, and what is left of each task at the end.

    Parameters
    ----------
    matrices
        For each method its accuracy matrices (fractions), one per seed.
    title
        Title over both panels.

    Example
    -------
    >>> forgets, keeps = [[1.0, 0.0], [0.0, 1.0]], [[1.0, 0.0], [0.9, 0.9]]
    >>> figure = demo_picture({"scr": [keeps], "fine-tune": [forgets]})
    >>> [axes.get_title(loc="left") for axes in figure.axes]
    ['While learning: the tasks seen so far', 'At the end: each task']
    """
    _some(matrices)
    curves = _tables({name: [average_over_time(m) for m in runs] for name, runs in matrices.items()})
    final = _tables({name: [np.asarray(m, dtype=np.float64)[-1] for m in runs] for name, runs in matrices.items()})
    tasks = {name: rows.shape[1] for name, rows in final.items()}
    if len(set(tasks.values())) > 1:
        raise InputError(f"The methods learned different numbers of tasks: {tasks}; expected the same for all.")
    figure = Figure(figsize=(11.0, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    _lines(left, curves, percent=True)
    _percent_axis(left, "average accuracy (%)", top=1.0)
    left.set_title("While learning: the tasks seen so far")
    bars = {name: [interval(column) for column in rows.T] for name, rows in final.items()}
    count = next(iter(tasks.values()))
    _grouped_bars(right, bars, [str(t + 1) for t in range(count)], numbers=False, ylabel="accuracy (%)")
    _percent_axis(right, "accuracy (%)", top=1.0)
    right.set_xlabel("task")
    right.set_title("At the end: each task")
    names = [f"{name}: {_percent([average_accuracy(m) for m in runs])} at the end" for name, runs in matrices.items()]
    handles = list(zip(_bar_handles(len(names)), _line_handles(len(names)), strict=True))
    _legend(figure, handles, names, loc="outside lower center", ncols=min(len(names), 3), **_BESIDE)
    figure.suptitle(title, fontsize=13, fontweight="bold")
    return figure


# ------------------------------------------------------------------------------------------------------- shared parts


def _figure(
    width: float, height: float, layout: Literal["constrained", "compressed"] = "constrained"
) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout=layout)
    FigureCanvasAgg(figure)
    return figure, figure.subplots()


def _title(axes: Axes, title: str) -> None:
    """A title that stays inside the figure: about nine bold letters to the inch."""
    width = axes.figure.bbox.width / axes.figure.dpi
    axes.set_title(textwrap.fill(title, max(20, int(width * 9))))


def _percent_axis(axes: Axes, ylabel: str, top: float, headroom: float = 1.04) -> None:
    """From 0 to just above the highest value: a cut axis would make small differences look large."""
    top = 1.0 if top > 0.85 else max(top, 0.01)
    axes.set_ylim(0, top * 100 * headroom)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 2.5, 5, 10]))
    axes.set_ylabel(ylabel)


def _legend(figure: Figure, handles: Sequence[Any], names: Sequence[str], **options: Any) -> Legend:
    legend = figure.legend(list(handles), [str(i) for i in range(len(names))], **options)
    for text, name in zip(legend.get_texts(), names, strict=True):
        text.set_text(_short(name, 40))  # set afterwards: matplotlib leaves out labels that begin with "_"
    return legend


def _short(name: str, longest: int = 18) -> str:
    """A long name without its middle: names often differ only at their ends."""
    name = " ".join(name.split())
    tail = (longest - 1) // 2
    return name if len(name) <= longest else f"{name[: longest - 1 - tail]}…{name[-tail:]}"
