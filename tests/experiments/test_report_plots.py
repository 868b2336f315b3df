"""Pictures of reports: several panels, published figures beside ours."""

from __future__ import annotations

import numpy as np
import pytest

from scrlearn.errors import InputError
from scrlearn.evaluation import Interval, interval
from scrlearn.experiments import plots

NAN = Interval(float("nan"), float("nan"), 0)


def titles(figure: plots.Figure) -> list[str]:
    return [axes.get_title(loc="left") for axes in figure.axes if axes.get_visible()]


def test_memory_maps_have_a_panel_each_with_every_image_in_its_place() -> None:
    rng = np.random.default_rng(0)
    maps = {name: (rng.normal(size=(n, 2)), np.arange(n) % 4) for name, n in (("ER", 12), ("MIR", 8), ("SCR", 4))}
    figure = plots.memory_maps(maps)
    assert titles(figure) == ["ER", "MIR", "SCR"]
    for axes, (places, labels) in zip(figure.axes, maps.values(), strict=False):
        drawn = np.vstack([np.asarray(points.get_offsets()) for points in axes.collections])
        np.testing.assert_allclose(drawn, np.vstack([places[labels == c] for c in range(4)]))
    assert figure.axes[0].get_xlabel() == "12 images, 4 classes"


def test_one_class_has_one_look_in_all_maps() -> None:
    figure = plots.memory_maps({"a": ([[0.0, 0.0]], [7]), "b": ([[1.0, 1.0], [2.0, 2.0]], [3, 7])})
    looks = [axes.collections[-1].get_facecolor().tolist() for axes in figure.axes]
    assert looks[0] == looks[1]


def test_an_empty_memory_is_said() -> None:
    figure = plots.memory_maps({"ER": (np.zeros((0, 2)), np.zeros(0, dtype=int))})
    assert [text.get_text() for text in figure.axes[0].texts] == ["the memory is empty"]


def test_confusions_share_their_scale() -> None:
    figure = plots.confusions({"ER": [[0, 4], [0, 4]], "SCR": [[3, 1], [1, 3]]}, ["a", "b"], task_sizes=[1, 1])
    assert titles(figure)[:2] == ["ER", "SCR"]
    images = [axes.images[0] for axes in figure.axes[:2]]
    np.testing.assert_allclose(images[0].get_array(), [[0, 100], [0, 100]])
    np.testing.assert_allclose(images[1].get_array(), [[75, 25], [25, 75]])
    assert {image.get_clim() for image in images} == {(0, 100)}
    assert len(figure.axes) == 3  # one bar of colours for both


def test_published_figures_are_diamonds_at_their_bars() -> None:
    ours = {"ER": (interval([0.1]), interval([0.2])), "MIR": (interval([0.3]), interval([0.4]))}
    paper = {"ER": (Interval(0.12, 0.01, 10), None), "MIR": (None, Interval(0.5, 0.01, 10))}
    figure = plots.softmax_vs_ncm(ours, paper=paper)
    axes = figure.axes[0]
    points = [
        (float(x), float(y)) for line in axes.get_lines() if line.get_marker() == "D" for x, y in line.get_xydata()
    ]
    bars = sorted(axes.patches, key=lambda bar: bar.get_x())  # type: ignore[attr-defined]
    assert [y for _, y in points] == pytest.approx([12, 50])
    for (x, _), bar in zip(points, (bars[0], bars[3]), strict=True):
        assert bar.get_x() < x < bar.get_x() + bar.get_width()  # type: ignore[attr-defined]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["softmax", "nearest class mean", "the paper"]
    assert axes.get_ylim()[1] > 50


def test_bars_in_groups() -> None:
    figure = plots.accuracy_bars(
        {"scr": [interval([0.1]), NAN], "scr+": [interval([0.2]), interval([0.4])]}, ["1k", "2k"], title="x"
    )
    axes = figure.axes[0]
    heights = {round(bar.get_x() + bar.get_width() / 2, 2): bar.get_height() for bar in axes.patches}  # type: ignore[attr-defined]
    assert heights == pytest.approx({-0.2: 10, 0.8: 0, 0.2: 20, 1.2: 40})
    assert sorted(text.get_text() for text in axes.texts) == ["10.0", "20.0", "40.0", "–"]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["1k", "2k"]


def test_an_ordered_ablation_has_its_numbers() -> None:
    axes = plots.ablation(["1", "2"], [interval([0.2]), interval([0.25])], xlabel="x").axes[0]
    assert [text.get_text() for text in axes.texts] == ["20.0", "25.0"]


def test_bad_data_is_said() -> None:
    with pytest.raises(InputError, match="no method"):
        plots.memory_maps({})
    with pytest.raises(InputError, match="N × d"):
        plots.memory_maps({"a": ([[0.0, 1.0]], [0, 1])})
    with pytest.raises(InputError, match="no method"):
        plots.confusions({}, ["a"])
    with pytest.raises(InputError, match="as many bars"):
        plots.accuracy_bars({"a": [interval([0.1])]}, ["x", "y"], title="x")
