"""The order of the methods known from the paper, on Split Digits with five seeds; and a short real stream."""

from __future__ import annotations

import json
import os

import pytest

from scrlearn.data import available
from scrlearn.errors import InputError
from scrlearn.experiments import RunConfig, run
from scrlearn.experiments.digits_table import JSON, OPTIONS, PAGE, ROWS, accuracy, main, markdown, measure
from scrlearn.learners import METHODS

FLOOR = 0.2  # knowing the two digits of the last task alone
REPLAYING = ("er", "mir", "gss", "aser")
KNOWN = set(METHODS)  # now, before a test may add one of its own

pytestmark = pytest.mark.filterwarnings("ignore:.*have no image in memory")


@pytest.mark.slow
@pytest.mark.timeout(7200)
class TestOrder:
    @pytest.fixture(scope="class")
    def results(self):
        return measure([method for method in ROWS if method not in ("lwf", "icarl", "scr+")])

    def test_without_replay_little_more_than_the_last_task_is_known(self, results):
        for method in ("fine-tune", "ewc++", "a-gem"):
            assert accuracy(results, method, "softmax").mean < FLOOR + 0.05, method

    def test_replay_is_above(self, results):
        lower = max(accuracy(results, method, "softmax").mean for method in ("fine-tune", "ewc++", "a-gem"))
        assert accuracy(results, "er", "softmax").mean > lower + 0.15
        assert accuracy(results, "er", "softmax").low > lower

    def test_the_nearest_class_mean_is_above_softmax(self, results):
        for method in ("a-gem", *REPLAYING):
            ncm, softmax = (accuracy(results, method, classifier).mean for classifier in ("ncm", "softmax"))
            assert ncm > softmax + 0.03, method

    def test_supervised_contrastive_replay_is_on_top(self, results):
        scr = accuracy(results, "scr", "ncm")
        others = [accuracy(results, m, c).mean for m in ("a-gem", *REPLAYING) for c in ("softmax", "ncm")]
        assert scr.low > max(others)
        assert scr.mean > max(others) + 0.05

    def test_offline_is_above_all(self, results):
        offline = accuracy(results, "offline", "softmax").mean
        for method in results:
            if method != "offline":
                for classifier in results[method][0].by_classifier:
                    assert offline > accuracy(results, method, classifier).mean, (method, classifier)


def test_the_command_writes_every_figure_with_what_it_was_made_by(tmp_path, capsys):
    main(["--methods", "fine-tune,scr", "--seeds", "2", "--memory", "20", "--limit", "10", "--out", str(tmp_path)])
    written = json.loads((tmp_path / JSON).read_text(encoding="utf-8"))
    assert written["command"].startswith("python -m scrlearn.experiments.digits_table --seeds 2 --memory 20 --out")
    assert written["command"].endswith("--limit 10 --methods fine-tune,scr")
    assert {"date", "versions", "machine", "memory_size", "seeds"} <= written.keys()
    assert (written["seeds"], written["memory_size"], written["machine"]["precision"]) == ([0, 1], 20, "fp32")
    page = (tmp_path / PAGE).read_text(encoding="utf-8")
    for method in ("fine-tune", "scr"):
        figures = written["methods"][method]["by_classifier"]
        assert set(figures) == {"softmax", "ncm"}
        for figure in (f["average_accuracy"] for f in figures.values()):
            assert figure["mean"] == pytest.approx(sum(figure["values"]) / 2)
            assert f"{100 * figure['mean']:.1f} ± {100 * figure['half_width']:.1f}" in page
    again = run(RunConfig(method="fine-tune", memory_size=20, limit=10, seed=1, precision="fp32", device="cpu"))
    for classifier, figures in written["methods"]["fine-tune"]["by_classifier"].items():
        assert figures["average_accuracy"]["values"][1] == again.by_classifier[classifier]["average_accuracy"]
    assert page in capsys.readouterr().out


def test_one_seed_has_no_interval():
    results = measure(["fine-tune"], seeds=1, memory_size=20, limit=10)
    assert "±" not in markdown(results, "a command").split("|---")[1]


def test_every_method_has_a_row_and_a_wrong_name_is_refused_first():
    assert set(ROWS) == KNOWN - {"scr+wide"}  # the same method with another encoder
    assert OPTIONS.keys() <= KNOWN
    with pytest.raises(InputError, match="no method"):
        measure(["fine-tune", "fine-tone"], seeds=1)


@pytest.mark.slow
@pytest.mark.data
@pytest.mark.timeout(3600)
def test_a_short_stream_of_real_photographs_is_learned_on_the_cpu():
    if not os.environ.get("SCRLEARN_DATA"):
        pytest.skip("SCRLEARN_DATA is not set: it says where the real data sets lie")
    (cifar,) = [item for item in available() if item.name == "cifar10"]
    if not cifar.present:
        pytest.skip(f"cifar10 is not at {cifar.where}")
    config = RunConfig(
        dataset="cifar10", method="scr", memory_size=200, limit=60, device="cpu", options={"memory_batch": 50}
    )
    result = run(config, pictures=False)
    assert (result.images, len(result.tasks)) == (600, 5)
    assert result.average_accuracy > 0.15  # one class in ten would be 0.1
    assert result.accuracy_matrix[0][0] > 0.55  # the first two classes, right after they were learned
