from __future__ import annotations

import copy
import math
from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from scrlearn.checkpoint import digest, load_checkpoint, save_checkpoint
from scrlearn.errors import InputError
from scrlearn.learners.base import Learner
from scrlearn.learners.methods import make_learner
from scrlearn.memory.aser import ABSENT, VALUES, adversarial_shapley, class_ranks, draw, knn_shapley

SHAPE = (1, 8, 8)


def utility(subset: tuple[int, ...], distance: list[float], label: list[int], wanted: int, k: int) -> float:
    nearest = sorted(subset, key=lambda i: (distance[i], i))[:k]
    return sum(label[i] == wanted for i in nearest) / k


def shapley_by_definition(distance: list[float], label: list[int], wanted: int, k: int) -> list[float]:
    """The Shapley value as it is defined: the mean marginal gain over all subsets, weighted by their size."""
    n = len(label)
    values = []
    for i in range(n):
        others = [j for j in range(n) if j != i]
        total = 0.0
        for size in range(n):
            weight = math.factorial(size) * math.factorial(n - size - 1) / math.factorial(n)
            for subset in combinations(others, size):
                gain = utility((*subset, i), distance, label, wanted, k) - utility(subset, distance, label, wanted, k)
                total += weight * gain
        values.append(total)
    return values


def matrix_by_definition(
    eval_features: Tensor, eval_labels: list[int], cand_features: Tensor, cand_labels: list[int], k: int
) -> Tensor:
    rows = []
    for point, wanted in zip(eval_features, eval_labels, strict=True):
        distance = [float((point - other).square().sum()) for other in cand_features]
        rows.append(shapley_by_definition(distance, cand_labels, wanted, k))
    return torch.tensor(rows, dtype=torch.float64).reshape(len(eval_labels), len(cand_labels))


@st.composite
def games(draw_one: st.DrawFn, largest: int = 6) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
    """Whole numbers seen from points between them, so that no two distances are equal."""
    places = draw_one(st.lists(st.integers(-40, 40), min_size=1, max_size=largest, unique=True))
    labels = draw_one(st.lists(st.integers(0, 2), min_size=len(places), max_size=len(places)))
    points = draw_one(st.lists(st.integers(-40, 40), min_size=1, max_size=3))
    wanted = draw_one(st.lists(st.integers(0, 2), min_size=len(points), max_size=len(points)))
    k = draw_one(st.integers(1, largest + 2))
    eval_features = torch.tensor(points, dtype=torch.float64)[:, None] + 0.3
    cand_features = torch.tensor(places, dtype=torch.float64)[:, None]
    return eval_features, torch.tensor(wanted), cand_features, torch.tensor(labels), k


# ---------------------------------------------------------------- Shapley values


@given(games())
@settings(max_examples=60, deadline=None)
def test_values_equal_the_definition_over_all_subsets(game: tuple[Tensor, Tensor, Tensor, Tensor, int]) -> None:
    eval_features, eval_labels, cand_features, cand_labels, k = game
    expected = matrix_by_definition(eval_features, eval_labels.tolist(), cand_features, cand_labels.tolist(), k)
    torch.testing.assert_close(knn_shapley(*game), expected, rtol=0, atol=1e-12)


@given(games(largest=7), st.integers(0, 2**7 - 1))
@settings(max_examples=60, deadline=None)
def test_absent_candidates_are_worth_nothing_and_change_nothing(
    game: tuple[Tensor, Tensor, Tensor, Tensor, int], mask: int
) -> None:
    eval_features, eval_labels, cand_features, cand_labels, k = game
    absent = torch.tensor([bool(mask >> i & 1) for i in range(len(cand_labels))])
    values = knn_shapley(eval_features, eval_labels, cand_features, cand_labels.masked_fill(absent, ABSENT), k)
    assert (values[:, absent] == 0).all()
    expected = matrix_by_definition(
        eval_features, eval_labels.tolist(), cand_features[~absent], cand_labels[~absent].tolist(), k
    )
    torch.testing.assert_close(values[:, ~absent], expected, rtol=0, atol=1e-12)


@given(games(largest=30))
@settings(max_examples=50, deadline=None)
def test_values_share_out_what_all_candidates_earn(game: tuple[Tensor, Tensor, Tensor, Tensor, int]) -> None:
    eval_features, eval_labels, cand_features, cand_labels, k = game
    everyone = tuple(range(len(cand_labels)))
    for row, point, wanted in zip(knn_shapley(*game), eval_features, eval_labels.tolist(), strict=True):
        distance = (cand_features - point).abs().flatten().tolist()
        assert float(row.sum()) == pytest.approx(utility(everyone, distance, cand_labels.tolist(), wanted, k))


def test_an_absent_evaluation_image_has_a_row_of_zeros() -> None:
    labels = torch.tensor([0, ABSENT, 1])
    values = knn_shapley(torch.rand(2, 4), torch.tensor([ABSENT, 1]), torch.rand(3, 4), labels, 2)
    assert (values[0] == 0).all()
    assert values[1].abs().sum() > 0


def test_candidates_of_one_class_are_exactly_equal() -> None:
    values = knn_shapley(torch.rand(5, 7), torch.zeros(5).long(), torch.rand(37, 7), torch.zeros(37).long(), 3)
    assert values.unique().numel() == 1


def test_distances_survive_features_far_from_the_origin() -> None:
    generator = torch.Generator().manual_seed(0)
    eval_features, cand_features = torch.rand(9, 16, generator=generator), torch.rand(30, 16, generator=generator)
    labels = torch.arange(30) % 3
    near = knn_shapley(eval_features, labels[:9], cand_features, labels, 3)
    far = knn_shapley((eval_features + 100).float(), labels[:9], (cand_features + 100).float(), labels, 3)
    assert (near == far).float().mean() > 0.95


def test_the_number_of_neighbours_must_be_positive() -> None:
    with pytest.raises(InputError, match="neighbours is 0"):
        knn_shapley(torch.rand(1, 2), torch.zeros(1).long(), torch.rand(1, 2), torch.zeros(1).long(), 0)


def test_value_types_without_any_evaluation_image_look_at_the_stream_alone() -> None:
    cooperative, adversarial = torch.zeros(3, 2), torch.tensor([[0.5, -0.5], [0.0, -1.0]])
    none = torch.zeros(3, dtype=torch.bool)
    assert adversarial_shapley(cooperative, adversarial, none, "mu").tolist() == [-0.25, 0.75]
    assert adversarial_shapley(cooperative, adversarial, none, "asv").tolist() == [0.0, 1.0]
    assert adversarial_shapley(cooperative, adversarial, none, "neg_sv").tolist() == [-0.5, 1.5]


# ---------------------------------------------------------------- sampling


@given(st.lists(st.integers(0, 5), min_size=1, max_size=60), st.integers(1, 4), st.integers(0, 2**31))
@settings(max_examples=80, deadline=None)
def test_a_class_balanced_sample_takes_n_of_each_class_or_all(labels: list[int], n: int, seed: int) -> None:
    classes = torch.tensor(labels)
    generator = torch.Generator().manual_seed(seed)
    ranks = class_ranks(classes, generator)
    room = min(6 * n, len(labels))
    first = draw(classes, ranks < n, room, generator)
    second = draw(classes, (ranks >= n) & (ranks < 2 * n), room, generator)
    for drawn, before in ((first, 0), (second, n)):
        slots = drawn.slots[drawn.present].tolist()
        assert len(drawn.slots) == room
        assert len(set(slots)) == len(slots)
        assert classes[slots].tolist() == drawn.labels[drawn.present].tolist()
        for label in range(6):
            held = labels.count(label)
            assert sum(labels[slot] == label for slot in slots) == min(n, max(0, held - before))
    assert not set(first.slots[first.present].tolist()) & set(second.slots[second.present].tolist())


def test_a_class_balanced_sample_is_uniform_within_each_class() -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.tensor([0] * 4 + [1] * 10)[torch.randperm(14, generator=generator)]
    times, n = 3000, 2
    drawn = torch.stack([class_ranks(labels, generator) < n for _ in range(times)]).double().mean(0)
    for label, held in ((0, 4), (1, 10)):
        expected = n / held
        error = 4.5 * math.sqrt(expected * (1 - expected) / times)
        assert (drawn[labels == label] - expected).abs().max() < error


def test_draw_is_uniform_over_the_allowed_and_never_takes_another() -> None:
    generator = torch.Generator().manual_seed(0)
    labels, allowed = torch.arange(8), torch.tensor([True, False] * 4)
    counts, first, times = torch.zeros(8), torch.zeros(8), 2000
    for _ in range(times):
        drawn = draw(labels, allowed, 2, generator)
        counts[drawn.slots] += 1
        first[drawn.slots[0]] += 1
    assert (counts[~allowed] == 0).all()
    assert (counts[allowed] / times - 0.5).abs().max() < 0.05
    assert (first[allowed] / times - 0.25).abs().max() < 0.05


# ---------------------------------------------------------------- the policies


def small_encoder() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 5))


def learner_of(method: str = "aser", **options: Any) -> Any:
    given = {"image_shape": SHAPE, "encoder": small_encoder(), "device": "cpu", "precision": "fp32", "memory_size": 20}
    return make_learner(method, **(given | options))


def images(count: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (count, *SHAPE), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def filled(learner: Learner, labels: list[int]) -> Learner:
    """A learner whose memory holds images of these classes."""
    y = torch.tensor(labels)
    learner.reserve(int(y.max()) + 1)
    learner.met.index_fill_(0, y, True)
    if learner.network.head is not None:
        learner.network.head.meet(y)
    learner.memory.write(torch.arange(len(y)), images(len(y), seed=1), y)
    learner.memory.advance(len(y))
    return learner


def features(learner: Learner, x: Tensor) -> Tensor:
    return torch.cat([learner.network.eval().features(image[None]) for image in x]).detach().double()


def recording(policy: Any) -> list[Any]:
    """Remember what the policy samples."""
    sample, seen = policy.sample, []

    def sample_and_remember(*arguments: Any) -> Any:
        seen.append(sample(*arguments))
        return seen[-1]

    policy.sample = sample_and_remember
    return seen


def present(learner: Learner, drawn: Any) -> tuple[list[int], Tensor, list[int]]:
    slots = drawn.slots[drawn.present]
    x, y = learner.memory.read(slots)
    return slots.tolist(), features(learner, x), y.tolist()


def slots_of(learner: Learner, x: Tensor) -> list[int]:
    """Where these images lie in memory."""
    return [int((learner.memory.images[:-1] == image).flatten(1).all(1).nonzero()) for image in x]


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("seed", range(4))
def test_retrieval_takes_the_largest_values_of_the_papers_definition(value: str, seed: int) -> None:
    labels = [0] * 9 + [1] * 6 + [2] * 4 + [3]
    learner = filled(learner_of(per_class=2, value=value, neighbours=3, seed=seed), labels)
    x, y = images(3, seed=7 + seed), torch.tensor([0, 3, 4])
    seen = recording(learner.retrieve)
    chosen_x, chosen_y = learner.retrieve(learner, x, y, 4)
    slots, cand_features, cand_labels = present(learner, seen[0][0])
    assert sorted(cand_labels) == [0, 0, 1, 1, 2, 2, 3]
    adversarial = matrix_by_definition(features(learner, x), y.tolist(), cand_features, cand_labels, 3)
    if value == "neg_sv":
        worth = -adversarial.sum(0)
    else:
        _, eval_features, eval_labels = present(learner, seen[0][1])
        assert sorted(eval_labels) == [0, 0, 1, 1, 2, 2]
        cooperative = matrix_by_definition(eval_features, eval_labels, cand_features, cand_labels, 3)
        mean = cooperative.mean(0) - adversarial.mean(0)
        worth = mean if value == "mu" else cooperative.max(0).values - adversarial.min(0).values
    chosen = slots_of(learner, chosen_x)
    assert len(set(chosen)) == 4
    assert [labels[slot] for slot in chosen] == chosen_y.tolist()
    got = torch.stack([worth[slots.index(slot)] for slot in chosen])
    torch.testing.assert_close(got, worth.sort(descending=True).values[:4], rtol=0, atol=1e-5)


@pytest.mark.parametrize("seed", range(6))
def test_update_gives_up_the_smallest_sums_of_the_papers_definition(seed: int) -> None:
    labels = [0] * 5 + [1] * 4 + [2] * 3
    learner = filled(learner_of(per_class=2, memory_size=12, seed=seed), labels)
    before = learner.memory.images[:-1].clone()
    x, y = images(3, seed=30 + seed), torch.tensor([0, 2, 3])
    learner.reserve(4)
    seen = recording(learner.update)
    learner.update(learner, x, y)
    candidates, evaluation, minority = seen[0]
    slots, cand_features, cand_labels = present(learner_with(learner, before, labels), candidates)
    _, eval_features, eval_labels = present(learner_with(learner, before, labels), evaluation)
    assert not set(slots) & set(evaluation.slots[evaluation.present].tolist())
    stream = features(learner, x)
    eval_features = torch.cat([eval_features, stream[minority >= 0]])
    eval_labels += minority[minority >= 0].tolist()
    sums = matrix_by_definition(
        eval_features, eval_labels, torch.cat([cand_features, stream]), cand_labels + y.tolist(), 3
    ).sum(0)
    changed = (learner.memory.images[:-1] != before).flatten(1).any(1).nonzero().flatten().tolist()
    entered = [i for i in range(3) if (learner.memory.images[:-1] == x[i]).flatten(1).all(1).any()]
    assert set(changed) <= set(slots)
    assert len(changed) == len(entered)
    left = [slots.index(slot) for slot in changed] + [len(slots) + i for i in range(3) if i not in entered]
    torch.testing.assert_close(sums[left].sort().values, sums.sort().values[:3], rtol=0, atol=1e-5)
    for i in entered:
        assert int(learner.memory.labels[slots_of(learner, x[i : i + 1])]) == int(y[i])


def learner_with(learner: Learner, stored: Tensor, labels: list[int]) -> Learner:
    """The same learner with the memory as it was before."""
    other = copy.copy(learner)
    other.memory = copy.copy(learner.memory)
    other.memory.images = torch.cat([stored, stored[:1]])
    other.memory.labels = torch.tensor([*labels, ABSENT])
    return other


def test_update_lets_an_image_in_for_each_that_leaves() -> None:
    learner = filled(learner_of(per_class=1, memory_size=12), [0] * 12)
    learner.reserve(2)
    learner.met[1] = True
    candidates, _, _ = learner.update.sample(learner, torch.tensor([1, 1, 1]))
    assert int(candidates.present.sum()) == 2
    values = torch.tensor([0.5, 0.1, 0.3, 0.2, 0.0])  # two stored candidates, then the batch
    slots = learner.update.settle(learner, values, candidates)
    assert slots.tolist() == [int(candidates.slots[1]), 12, 12]
    assert learner.update.settle(learner, torch.ones(5), candidates).tolist() == [12, 12, 12]
    # smallest three: both stored ones and the last image
    both = learner.update.settle(learner, torch.tensor([0.1, 0.2, 0.9, 0.8, 0.0]), candidates).tolist()
    assert both[2] == 12
    assert sorted(both[:2]) == sorted(candidates.slots.tolist())


def test_a_class_is_a_minority_below_a_random_share_of_the_memory() -> None:
    labels = [0] * 10 + [1] * 2
    learner = filled(learner_of(per_class=1, memory_size=12), labels)
    learner.reserve(3)
    learner.met[2] = True
    y = torch.tensor([0, 1, 2])
    chosen = torch.stack([learner.update.sample(learner, y)[2] for _ in range(1000)])
    assert (chosen[:, 0] == ABSENT).all()  # holds more than 1/3
    assert (chosen[:, 2] == 2).all()  # holds nothing
    # U(0, 1/3) lies above 2/12 half of the time
    assert float((chosen[:, 1] == 1).double().mean()) == pytest.approx(0.5, abs=0.06)


def test_classes_known_ahead_count_in_the_update() -> None:
    learner = filled(learner_of(per_class=1, classes_ahead=5, memory_size=20), [0] * 10 + [1] * 10)
    candidates, evaluation, _ = learner.update.sample(learner, torch.tensor([0]))
    assert int(candidates.present.sum()) == 5
    assert int(evaluation.present.sum()) == 2
    learner = filled(learner_of(per_class=1, memory_size=20), [0] * 10 + [1] * 10)
    assert int(learner.update.sample(learner, torch.tensor([0]))[0].present.sum()) == 2


def test_images_per_class_follow_the_number_of_classes() -> None:
    for classes, capacity, expected in ((1, 400, 90), (10, 200, 9), (100, 2000, 2), (10, 40, 2), (30, 20, 1)):
        learner = learner_of(memory_size=capacity)
        learner.reserve(classes)
        learner.met[:classes] = True
        n = int(learner.retrieve.images_per_class(learner))
        assert n == expected
        assert min(n * classes, capacity) <= learner.retrieve.room(learner, classes) <= capacity


def test_room_made_ahead_changes_no_draw() -> None:
    drawn = []
    for reserved in (3, 40):
        learner = filled(learner_of(per_class=2, memory_size=20), [0] * 10 + [1] * 6 + [2] * 4)
        learner.reserve(reserved)
        parts = [*learner.retrieve.sample(learner), *learner.update.sample(learner, torch.tensor([0, 2]))[:2]]
        drawn.append([part.slots[part.present].tolist() for part in parts])
    assert drawn[0] == drawn[1]


def test_random_images_make_up_the_number_where_candidates_are_few() -> None:
    learner = filled(learner_of(per_class=1, memory_size=20), [0] * 10 + [1] * 10)
    seen = recording(learner.retrieve)
    chosen = slots_of(learner, learner.retrieve(learner, images(2), torch.tensor([0, 1]), 15)[0])
    assert len(set(chosen)) == 15
    assert set(chosen[:2]) == set(seen[0][0].slots[seen[0][0].present].tolist())
    everything, _ = learner.retrieve(learner, images(2), torch.tensor([0, 1]), 100)
    assert sorted(slots_of(learner, everything)) == list(range(20))


def test_until_the_memory_is_full_images_are_drawn_at_random_and_all_are_stored() -> None:
    learner = learner_of(memory_size=30)
    learner.retrieve.sample = learner.update.sample = None  # must not be asked
    for batch in range(3):
        learner.learn(images(10, seed=batch), torch.arange(10) % 2)
    assert learner.memory.full
    assert slots_of(learner, images(10, seed=1)) == list(range(10, 20))


def test_the_policies_leave_the_network_as_it_was() -> None:
    learner = filled(make_learner("aser", image_shape=SHAPE, memory_size=8, device="cpu"), [0, 1] * 4)
    learner.set_training(True)
    before = digest(learner.network.state_dict())
    learner.retrieve(learner, images(2), torch.tensor([0, 1]), 3)
    learner.update(learner, images(2), torch.tensor([0, 1]))
    assert digest(learner.network.state_dict()) == before
    assert all(module.training for module in learner.network.modules())


class NothingLeavesTheDevice(TorchDispatchMode):
    """Refuses what would wait for a device or make a shape depend on values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in {"_local_scalar_dense", "nonzero", "masked_select", "unique_consecutive", "_unique2"}, name
        if name in {"index", "index_put", "index_put_"}:
            assert not any(i is not None and i.dtype == torch.bool for i in args[1]), "indexing with a mask"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("per_class", [None, 2])
def test_a_step_is_graph_safe(value: str, per_class: int | None) -> None:
    learner = filled(learner_of(value=value, per_class=per_class), [0] * 9 + [1] * 11)
    learner.reserve(3)
    with NothingLeavesTheDevice():
        learner.step(images(4), torch.tensor([0, 1, 2, 2]))
        with pytest.raises(AssertionError):
            torch.ones(2)[torch.tensor([True, False])]


def test_the_signature_follows_what_shapes_depend_on() -> None:
    learner = learner_of(per_class=2, memory_size=20)
    learner.learn(images(10), torch.arange(10) % 2)
    filling = learner.signature(10)
    learner.learn(images(10), torch.arange(10) % 2)
    full = learner.signature(10)
    learner.learn(images(10), torch.arange(10) % 2)
    assert filling != full == learner.signature(10)
    learner.reserve(4)
    assert learner.signature(10) != full


# ---------------------------------------------------------------- whole learners


def digits(*classes: int) -> tuple[Tensor, Tensor]:
    data = load_digits()
    keep = [i for i, label in enumerate(data.target) if label in classes]
    x = torch.tensor(data.images[keep] * 255 / 16).round().to(torch.uint8)[:, None]
    return x, torch.tensor(data.target[keep]).long()


def accuracy_after_three_tasks(method: str, **options: Any) -> tuple[Any, float]:
    learner = learner_of(method, memory_size=60, seed=3, **options)
    for task in ((0, 1), (2, 3), (4, 5)):
        x, y = digits(*task)
        for batch in torch.arange(len(y)).split(10):
            learner.learn(x[batch], y[batch])
    x, y = digits(0, 1, 2, 3, 4, 5)
    return learner, float((learner.predict(x) == y).double().mean())


def test_earlier_digits_are_remembered() -> None:
    _, floor = accuracy_after_three_tasks("fine-tune")
    assert floor < 0.35  # the last task alone
    for value in VALUES:
        learner, accuracy = accuracy_after_three_tasks("aser", value=value)
        assert accuracy > floor + 0.2
        stored = learner.memory.contents()[1].bincount()
        assert len(stored) == 6
        assert stored.min() > 0


@pytest.mark.parametrize("method", ["aser", "scr"])
@pytest.mark.parametrize(
    ("memory_size", "batch", "classes"),
    [(3, 10, 4), (20, 10, 1), (20, 1, 3), (1, 10, 3), (2, 7, 9), (100, 10, 4)],
    ids=["small memory", "one class", "batches of one", "one slot", "classes without a slot", "half full"],
)
def test_odd_streams_are_survived(method: str, memory_size: int, batch: int, classes: int) -> None:
    for per_class in (None, 2):
        learner = learner_of(
            method, memory_size=memory_size, retrieve="aser", update="aser", per_class=per_class, classifier="softmax"
        )
        for step in range(8):
            y = (torch.arange(batch) + step) % classes
            assert torch.isfinite(learner.learn(images(batch, seed=step), y))
        stored_x, stored_y = learner.memory.contents()
        assert len(stored_y) == min(memory_size, 8 * batch)
        assert ((stored_y >= 0) & (stored_y < classes)).all()
        assert len(stored_x.flatten(1).unique(dim=0)) == len(stored_x)
        assert torch.isfinite(learner.scores(images(5))[:, :classes]).all()


@pytest.mark.parametrize("parts", [{"retrieve": "aser"}, {"update": "aser"}, {"retrieve": "aser", "update": "aser"}])
def test_scr_works_with_either_policy(parts: dict[str, str]) -> None:
    learner = learner_of("scr", memory_size=40, memory_batch=30, seed=1, **parts)
    for task in ((0, 1), (2, 3)):
        x, y = digits(*task)
        for batch in torch.arange(200).split(10):
            learner.learn(x[batch], y[batch])
    x, y = digits(0, 1, 2, 3)
    assert (learner.predict(x) == y).double().mean() > 0.65


@pytest.mark.parametrize("method", ["aser", "scr"])
def test_a_resumed_run_is_bit_for_bit_the_run_that_was_not_stopped(method: str, tmp_path: Any) -> None:
    def build() -> Any:
        return learner_of(method, retrieve="aser", update="aser", memory_size=25, memory_batch=10, per_class=2)

    x, y = digits(0, 1, 2, 3)
    batches = torch.arange(120).split(10)
    straight = build()
    for batch in batches[:6]:
        straight.learn(x[batch], y[batch])
    save_checkpoint(tmp_path / "half", straight.state_dict(), {})
    resumed = build()
    resumed.load_state_dict(load_checkpoint(tmp_path / "half")[0])
    for batch in batches[6:]:
        straight.learn(x[batch], y[batch])
        resumed.learn(x[batch], y[batch])
    assert digest(resumed.state_dict()) == digest(straight.state_dict())


def test_a_forgotten_class_makes_room_again() -> None:
    learner = filled(learner_of(per_class=2), [0] * 10 + [1] * 10)
    learner.forget(0)
    assert not learner.memory.full
    for step in range(3):
        learner.learn(images(5, seed=step), torch.full((5,), 2))
    assert learner.memory.full
    assert set(learner.memory.contents()[1].tolist()) == {1, 2}


def test_options_reach_both_policies_and_mistakes_are_explained() -> None:
    learner = learner_of("scr", retrieve="aser", update="aser", per_class=3, neighbours=5, value="asv")
    assert (learner.retrieve.per_class, learner.retrieve.neighbours, learner.retrieve.value) == (3, 5, "asv")
    assert (learner.update.per_class, learner.update.neighbours) == (3, 5)
    assert learner_of("aser").objective.joint
    for options, message in (
        ({"value": "negsv"}, 'Did you mean "neg_sv"'),
        ({"per_class": 0}, "per_class is 0"),
        ({"neighbours": 0}, "neighbours is 0"),
        ({"memory_size": 0}, "memory_size"),
    ):
        with pytest.raises(InputError, match=message):
            learner_of("aser", **options)
