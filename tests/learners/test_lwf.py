"""Learning without Forgetting: its loss against the formula, written out; its teacher; its state."""

import copy

import pytest
import torch
from digit_stream import SHAPE, accuracy, assert_resumes, digits, learn, make, stream

from scrlearn.errors import InputError
from scrlearn.losses import distillation_loss


def written_out(student, teacher, y, tasks, temperature, known):
    """The loss by loops over images and classes, in float64; distillation as KL, over the classes in `known`."""
    student, teacher = student.double(), teacher.double()
    finite = [c for c in range(student.shape[1]) if torch.isfinite(student[0, c])]
    cross_entropy = distillation = 0.0
    for row, label in enumerate(y.tolist()):
        total = sum(torch.exp(student[row, c]) for c in finite)
        cross_entropy -= torch.log(torch.exp(student[row, label]) / total)
        p = torch.softmax(teacher[row, known] / temperature, 0)
        q = torch.softmax(student[row, known] / temperature, 0)
        for c in range(len(known)):
            distillation += p[c] * torch.log(p[c] / q[c])
    share = 1 / (tasks + 1)
    return (share * cross_entropy + (1 - share) * temperature**2 * distillation) / len(y)


def logits(network, x):
    return copy.deepcopy(network).train().logits(x).detach()


@pytest.mark.parametrize(("ahead", "known"), [(0, [0, 1, 2, 3]), (10, list(range(10)))])
def test_loss_is_the_formula(ahead, known):
    learner = learn(make("lwf", classes_ahead=ahead, memory_size=0, distillation_temperature=3.0), tasks=2)
    teacher = copy.deepcopy(learner.network)
    task = list(stream(tasks=3))[2]
    learner.learn(*task[0])  # so that student and teacher differ
    x, y = task[1]
    expected = written_out(logits(learner.network, x), logits(teacher, x), y, 2, 3.0, known)
    torch.testing.assert_close(learner.learn(x, y).double(), expected)


def test_gradient_is_that_of_the_cross_entropy_form():
    """The released code minimises −Σ p log q · T²: the same up to the teacher's entropy, so the same gradient."""
    torch.manual_seed(0)
    student, teacher = torch.randn(5, 7, requires_grad=True), torch.randn(5, 7)
    p = torch.softmax(teacher / 2, 1)
    other = -(p * torch.log_softmax(student / 2, 1)).sum(1).mean() * 4
    (a,) = torch.autograd.grad(distillation_loss(student, teacher), student)
    (b,) = torch.autograd.grad(other, student)
    torch.testing.assert_close(a, b)
    entropy = -(p * torch.log(p)).sum(1).mean() * 4
    torch.testing.assert_close(distillation_loss(student, teacher), other - entropy)


def test_teacher_is_the_network_of_the_last_task_and_stays_put():
    learner = make("lwf", memory_size=0)
    first, second = stream(tasks=2)
    for x, y in first:
        learner.learn(x, y)
    learner.end_task()
    kept = copy.deepcopy(learner.network)
    for x, y in second:
        learner.learn(x, y)
    for own, old in zip(learner.teacher.network.parameters(), kept.parameters(), strict=True):
        assert torch.equal(own, old)
    assert learner.teacher.network.head.active.nonzero().flatten().tolist() == [0, 1]
    learner.end_task()
    for own, new in zip(learner.teacher.network.parameters(), learner.network.parameters(), strict=True):
        assert torch.equal(own, new)


def test_first_task_is_fine_tuning():
    lwf, plain = make("lwf", memory_size=0), make("fine-tune", memory_size=0)
    for x, y in next(stream()):
        assert torch.equal(lwf.learn(x, y), plain.learn(x, y))


def test_keeps_more_of_the_first_task_than_fine_tuning():
    def left(method):
        learner = learn(make(method, memory_size=0, classes_ahead=4), tasks=2, batches=30)
        x, y = digits()
        scores = learner.scores(x[y < 2], "softmax")[:, :2]  # among the two classes of the first task
        return (scores.argmax(1) == y[y < 2]).float().mean().item(), accuracy(learner, "softmax")

    assert left("lwf") > left("fine-tune")


def test_a_forgotten_class_is_no_longer_taught():
    learner = learn(make("lwf", memory_size=20), tasks=2)
    learner.forget(1)
    x, y = list(stream(tasks=3))[2][0]
    assert torch.isfinite(learner.learn(x, y))
    assert (learner.predict(x) != 1).all()


def test_a_head_that_grows():
    learner = learn(make("lwf", memory_size=0), tasks=2)
    x, y = digits(10)
    loss = learner.learn(x, y + 20)
    assert torch.isfinite(loss)
    assert learner.teacher.network.head.capacity == learner.network.head.capacity == 32


@pytest.mark.parametrize("place", [(0, 2), (1, 0), (2, 3)])
def test_resumes_in_the_middle_of_a_task(place):
    assert_resumes(lambda: make("lwf", memory_size=20, averaging=0.9), *place)


def test_resumes_with_a_head_that_has_grown():
    def build():
        return make("lwf", memory_size=0, classes_ahead=20)

    learner = learn(build(), tasks=2)
    x, y = digits(10)
    learner.learn(x, y + 20)
    other = build()
    other.load_state_dict(learner.state_dict())
    assert torch.equal(other.learn(x, y), learner.learn(x, y))


@pytest.mark.filterwarnings("ignore:.*have no image in memory")
@pytest.mark.parametrize("options", [{"memory_size": 0}, {"memory_size": 3}, {"memory_size": 0, "classifier": "ncm"}])
@pytest.mark.parametrize("batch", [1, 10])
def test_survives_small_streams(options, batch):
    learner = learn(make("lwf", **options), batches=3, batch=batch)
    assert all(torch.isfinite(w).all() for w in learner.weights)
    x, _ = digits(10)
    for classifier in learner.classifiers:
        assert len(learner.predict(x, classifier)) == 10


def test_a_single_class():
    learner = make("lwf", memory_size=5)
    for _ in range(3):
        learner.learn(torch.zeros(1, *SHAPE, dtype=torch.uint8), torch.tensor([0]))
        learner.end_task()
    assert learner.predict(torch.zeros(2, *SHAPE, dtype=torch.uint8)).tolist() == [0, 0]


def test_temperature_out_of_range():
    with pytest.raises(InputError, match="distillation_temperature"):
        make("lwf", distillation_temperature=0.0)
