"""CUDA graphs: the same bits as eager steps, alone and side by side, stopped and resumed."""

import pytest
import torch

from scrlearn.checkpoint import digest
from scrlearn.data import class_incremental
from scrlearn.data.base import ArrayImages, Dataset
from scrlearn.engine import START, GraphRunner, Position, side_by_side, train
from scrlearn.learners import METHODS, make_learner

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Quiet:
    """Hooks that watch nothing, or stop after some batches."""

    def __init__(self, stop_at=None):
        self.stop_at = stop_at

    def batch_learned(self, position, loss):
        if position == self.stop_at:
            raise KeyboardInterrupt

    def task_ended(self, task):
        pass

    def finishing(self, step, steps):
        pass

    def stream_ended(self):
        pass


@pytest.fixture(scope="module")
def stream():
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(1200) % 6
    images = torch.randint(0, 64, (1200, 3, 32, 32), generator=generator)
    images[:, 0] += 30 * labels[:, None, None]
    images = images.clamp(0, 255).to(torch.uint8)
    dataset = Dataset("made", ArrayImages(images, labels), ArrayImages(images[:60], labels[:60]), tuple("abcdef"))
    return class_incremental(dataset, tasks=3, seed=0)


def learner(method="scr", seed=0, **options):
    options = {"memory_size": 60, "memory_batch": 20, **options}
    if method in ("offline",):
        options.pop("memory_batch")
    return make_learner(method, image_shape=(3, 32, 32), device="cuda", seed=seed, **options)


def same_room(one, stream):
    """What the engine reserves ahead, so that states can be compared."""
    one.reserve(len(stream.class_names))
    return one


@pytest.mark.parametrize("method", [name for name in METHODS if name != "offline"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_graphs_give_the_bits_of_eager_steps(method, precision, stream):
    eager = same_room(learner(method, precision=precision), stream)
    train(eager, stream, Quiet())
    recorded = learner(method, precision=precision)
    side_by_side([recorded], [stream], [Quiet()], [START])
    assert digest(recorded.state_dict()) == digest(eager.state_dict())


def test_side_by_side_is_the_same_as_alone(stream):
    alone = []
    for seed in range(3):
        one = learner(seed=seed)
        side_by_side([one], [stream], [Quiet()], [START])
        alone.append(digest(one.state_dict()))
    many = [learner(seed=seed) for seed in range(3)]
    side_by_side(many, [stream] * 3, [Quiet()] * 3, [START] * 3)
    assert [digest(one.state_dict()) for one in many] == alone


@pytest.mark.parametrize("place", [Position(0, 3), Position(0, 30), Position(1, 17)])
def test_stopped_and_resumed_is_the_same_as_never_stopped(place, stream):
    whole = learner(review=True)
    side_by_side([whole], [stream], [Quiet()], [START])
    stopped = learner(review=True)
    with pytest.raises(KeyboardInterrupt):
        side_by_side([stopped], [stream], [Quiet(place)], [START])
    torch.cuda.synchronize()
    again = learner(review=True)
    again.load_state_dict(stopped.state_dict())
    side_by_side([again], [stream], [Quiet()], [place])
    assert digest(again.state_dict()) == digest(whole.state_dict())


def test_features_through_graphs_are_those_of_eager_calls(stream):
    one = learner("er")
    train(one, stream, Quiet())
    images = stream.dataset.test.images.cuda()
    with torch.no_grad():
        expected = [one.features(part) for part in images.split(20)]
        one.runner = GraphRunner(one)
        for _ in range(3):  # as it is, as it is, recorded
            found = [one.features(part) for part in images.split(20)]
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
