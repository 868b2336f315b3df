"""The losses against their formulas written as plain loops, their gradients, and their corners."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from scrlearn.losses import Mixture, Narrow, cross_entropy_loss, distillation_loss, supervised_contrastive_loss


def unit(rows, dim, seed, dtype=torch.float64):
    random = torch.Generator().manual_seed(seed)
    return torch.nn.functional.normalize(torch.randn(rows, dim, dtype=dtype, generator=random), dim=1)


def eq3_by_loops(z, y, temperature):
    """Eq. 3 of the paper in Python's floats, averaged over the anchors; an empty sum over P(i) is 0."""
    z, y = z.tolist(), y.tolist()
    similarity = [[sum(a * b for a, b in zip(u, v, strict=True)) / temperature for v in z] for u in z]
    total = 0.0
    for i in range(len(z)):
        others = [j for j in range(len(z)) if j != i]
        positives = [p for p in others if y[p] == y[i]]
        if not positives:
            continue
        largest = max(similarity[i][j] for j in others)
        denominator = largest + math.log(sum(math.exp(similarity[i][j] - largest) for j in others))
        total += -sum(similarity[i][p] - denominator for p in positives) / len(positives)
    return total / len(z)


@settings(max_examples=60, deadline=None)
@given(
    labels=st.lists(st.integers(0, 4), min_size=1, max_size=14),
    dim=st.integers(1, 8),
    temperature=st.floats(0.01, 5.0),
    seed=st.integers(0, 2**32),
)
def test_contrastive_loss_equals_plain_loops(labels, dim, temperature, seed):
    z, y = unit(len(labels), dim, seed), torch.tensor(labels)
    expected = eq3_by_loops(z, y, temperature)
    assert supervised_contrastive_loss(z, y, temperature).item() == pytest.approx(expected, abs=1e-6, rel=1e-9)


def test_contrastive_loss_equals_plain_loops_in_the_precision_and_size_of_a_step():
    y = torch.arange(110) % 10
    z = torch.cat([unit(110, 128, 0, torch.float32), unit(110, 128, 1, torch.float32)])
    expected = eq3_by_loops(z, torch.cat([y, y]), 0.1)
    assert supervised_contrastive_loss(z, torch.cat([y, y])).item() == pytest.approx(expected, rel=1e-6)


@settings(max_examples=15, deadline=None)
@given(labels=st.lists(st.integers(0, 2), min_size=2, max_size=8), seed=st.integers(0, 2**32))
def test_contrastive_gradient(labels, seed):
    z, y = unit(len(labels), 4, seed).requires_grad_(), torch.tensor(labels)
    assert torch.autograd.gradcheck(lambda z: supervised_contrastive_loss(z, y, 0.3), (z,), atol=1e-6)


@pytest.mark.parametrize("rows", [1, 2, 7])
@pytest.mark.parametrize("temperature", [0.01, 0.1, 1.0])
def test_one_sample_per_class_is_zero_with_a_zero_gradient(rows, temperature):
    z = unit(rows, 5, 3, torch.float32).requires_grad_()
    loss = supervised_contrastive_loss(z, torch.arange(rows), temperature)
    (gradient,) = torch.autograd.grad(loss, z)
    assert loss.item() == 0.0
    assert torch.equal(gradient, torch.zeros_like(gradient))


def test_one_sample_per_class_in_two_views_is_finite_and_teaches():
    z = torch.cat([unit(6, 5, 0, torch.float32), unit(6, 5, 1, torch.float32)]).requires_grad_()
    loss = supervised_contrastive_loss(z, torch.arange(6).repeat(2), 0.01)
    (gradient,) = torch.autograd.grad(loss, z)
    assert loss.isfinite()
    assert gradient.isfinite().all()
    assert gradient.abs().max() > 0


def test_one_anchor_without_a_positive_among_others_adds_nothing_but_counts_as_an_anchor():
    z, y = unit(5, 4, 0), torch.tensor([0, 0, 1, 1, 2])
    assert supervised_contrastive_loss(z, y, 0.5).item() == pytest.approx(eq3_by_loops(z, y, 0.5), abs=1e-12)
    leaf = z.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(supervised_contrastive_loss(leaf, y, 0.5), leaf)
    assert gradient.isfinite().all()
    assert gradient[4].abs().max() > 0  # it is a negative of the others


@settings(max_examples=25, deadline=None)
@given(st.permutations(range(9)), st.permutations(range(3)), st.integers(0, 2**32))
def test_order_of_rows_and_names_of_classes_do_not_matter(rows, names, seed):
    z, y = unit(9, 6, seed), torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 2])
    shuffled = supervised_contrastive_loss(z[list(rows)], torch.tensor(names)[y][list(rows)], 0.2)
    assert shuffled.item() == pytest.approx(supervised_contrastive_loss(z, y, 0.2).item(), abs=1e-10)


def test_pulling_a_class_together_lowers_the_loss():
    z, y = unit(8, 6, 5), torch.arange(8) % 2
    centres = unit(2, 6, 6)
    losses = [
        supervised_contrastive_loss(torch.nn.functional.normalize((1 - a) * z + a * centres[y], dim=1), y).item()
        for a in (0.0, 0.5, 0.9)
    ]
    assert losses == sorted(losses, reverse=True)


# ---------------------------------------------------------------- rows of two classes


def mixed_by_loops(z, y, other, share, temperature):
    """Every pair counts as much as the two rows are of one class, summed over all classes."""
    z, y, other, share = (values.tolist() for values in (z, y, other, share))
    n, total = len(z), 0.0
    much = [dict.fromkeys((y[i], other[i]), 0.0) for i in range(n)]
    for i in range(n):
        much[i][y[i]] += 1 - share[i]
        much[i][other[i]] += share[i]
    for i in range(n):
        others = [j for j in range(n) if j != i]
        products = {j: sum(a * b for a, b in zip(z[i], z[j], strict=True)) / temperature for j in others}
        below = math.log(sum(math.exp(value) for value in products.values())) if others else 0.0
        weights = {j: sum(much[i][c] * much[j].get(c, 0.0) for c in much[i]) for j in others}
        if sum(weights.values()) > 0:
            total -= sum(weights[j] * (products[j] - below) for j in others) / sum(weights.values())
    return total / n


rows_of_two = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 3), st.sampled_from([0.0, 0.25, 0.6, 1.0])), min_size=1, max_size=10
)


@settings(max_examples=60, deadline=None)
@given(rows=rows_of_two, temperature=st.floats(0.05, 2.0), seed=st.integers(0, 2**32))
def test_contrastive_loss_of_rows_of_two_classes_equals_plain_loops(rows, temperature, seed):
    y, other, share = (torch.tensor(column) for column in zip(*rows, strict=True))
    z = unit(len(rows), 4, seed)
    found = supervised_contrastive_loss(z, y, temperature, Mixture(other, share)).item()
    assert found == pytest.approx(mixed_by_loops(z, y, other, share, temperature), abs=1e-6, rel=1e-6)


@settings(max_examples=10, deadline=None)
@given(rows=rows_of_two, seed=st.integers(0, 2**32))
def test_gradient_of_rows_of_two_classes(rows, seed):
    y, other, share = (torch.tensor(column) for column in zip(*rows, strict=True))
    z = unit(len(rows), 3, seed).requires_grad_()
    mixture = Mixture(other, share)
    assert torch.autograd.gradcheck(lambda z: supervised_contrastive_loss(z, y, 0.3, mixture), (z,), atol=1e-6)


# ---------------------------------------------------------------- other views that count more


def weighed_by_loops(z, y, other, share, temperature, view_weight):
    """As `mixed_by_loops`, with the pair (i, i ± half) counting so many times as much."""
    z, y, other, share = (values.tolist() for values in (z, y, other, share))
    n, total = len(z), 0.0
    for i in range(n):
        others = [j for j in range(n) if j != i]
        products = {j: sum(a * b for a, b in zip(z[i], z[j], strict=True)) / temperature for j in others}
        below = math.log(sum(math.exp(value) for value in products.values()))
        weights = {}
        for j in others:
            own = {y[i]: 1 - share[i]} if share[i] == 0 else {}
            own = own or {c: (1 - share[i]) * (c == y[i]) + share[i] * (c == other[i]) for c in (y[i], other[i])}
            theirs = {c: (1 - share[j]) * (c == y[j]) + share[j] * (c == other[j]) for c in own}
            weights[j] = sum(own[c] * theirs[c] for c in own) * (view_weight if abs(i - j) == n // 2 else 1)
        if sum(weights.values()) > 0:
            total -= sum(weights[j] * (products[j] - below) for j in others) / sum(weights.values())
    return total / n


@settings(max_examples=40, deadline=None)
@given(
    images=rows_of_two,
    view_weight=st.sampled_from([0.5, 3.0, 20.0]),
    mixed=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_the_other_view_counts_so_many_times_as_much(images, view_weight, mixed, seed):
    y, other, share = (torch.tensor(column).repeat(2) for column in zip(*images, strict=True))
    share[: len(images)] = 0.0
    z, temperature = unit(len(y), 4, seed), 0.3
    mixture = Mixture(other, share) if mixed else None
    found = supervised_contrastive_loss(z, y, temperature, mixture, view_weight).item()
    shown = share if mixed else torch.zeros_like(share)
    assert found == pytest.approx(weighed_by_loops(z, y, other, shown, temperature, view_weight), abs=1e-6, rel=1e-6)
    leaf = z.clone().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda z: supervised_contrastive_loss(z, y, temperature, mixture, view_weight), (leaf,), atol=1e-6
    )


# ---------------------------------------------------------------- anchors that are told from some classes alone


def narrow_by_loops(z, y, share, other, temperature, rows, classes):
    """A(i) of such an anchor holds rows of those classes alone."""
    n, total = len(z), 0.0
    for i in range(n):
        others = [j for j in range(n) if j != i and (not rows[i] or y[j] in classes)]
        products = {j: float(z[i] @ z[j]) / temperature for j in others}
        much = [
            {c: (1 - share[k]) * (c == y[k]) + share[k] * (c == other[k]) for c in (y[k], other[k])} for k in range(n)
        ]
        weights = {j: sum(much[i][c] * much[j].get(c, 0.0) for c in much[i]) for j in others}
        if sum(weights.values()) > 0:
            below = math.log(sum(math.exp(value) for value in products.values()))
            total -= sum(weights[j] * (products[j] - below) for j in others) / sum(weights.values())
    return total / n


@settings(max_examples=60, deadline=None)
@given(
    images=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 3), st.sampled_from([0.0, 0.4, 1.0]), st.booleans()),
        min_size=1,
        max_size=9,
    ),
    classes=st.lists(st.integers(0, 3), min_size=1, max_size=4),
    mixed=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_anchors_that_are_told_from_some_classes_alone(images, classes, mixed, seed):
    y, other, share, rows = (torch.tensor(column) for column in zip(*images, strict=True))
    z, narrow = unit(len(y), 4, seed), Narrow(rows, torch.tensor(classes))
    mixture = Mixture(other, share) if mixed else None
    shown = (share if mixed else torch.zeros_like(share)).tolist()
    expected = narrow_by_loops(z, y.tolist(), shown, other.tolist(), 0.3, rows.tolist(), classes)
    found = supervised_contrastive_loss(z, y, 0.3, mixture, narrow=narrow)
    assert found.item() == pytest.approx(expected, abs=1e-6, rel=1e-6)
    leaf = z.clone().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda z: supervised_contrastive_loss(z, y, 0.3, mixture, narrow=narrow), (leaf,), atol=1e-6
    )


def test_cross_entropy_of_rows_that_are_told_from_some_classes_alone():
    logits = torch.tensor([[1.0, 2.0, 0.5, 0.0], [0.0, 1.0, 0.3, 3.0], [2.0, 0.1, 0.2, 0.3]], dtype=torch.float64)
    y, narrow = torch.tensor([0, 3, 2]), Narrow(torch.tensor([True, False, True]), torch.tensor([0, 2, 0]))
    known = [[0, 2], [0, 1, 2, 3], [0, 2]]
    own = [
        math.log(sum(math.exp(row[c]) for c in columns)) - row[label]
        for row, columns, label in zip(logits.tolist(), known, y.tolist(), strict=True)
    ]
    leaf = logits.clone().requires_grad_()
    loss = cross_entropy_loss(leaf, y, narrow=narrow)
    (gradient,) = torch.autograd.grad(loss, leaf)
    assert loss.item() == pytest.approx(sum(own) / 3, abs=1e-12)
    assert not gradient[0, [1, 3]].any()
    # a piece of a class that is left out, but covers nothing, changes nothing
    mixture = Mixture(torch.tensor([1, 1, 1]), torch.tensor([0.0, 0.25, 0.0], dtype=torch.float64))
    leaf = logits.clone().requires_grad_()
    loss = cross_entropy_loss(leaf, y, mixture, narrow)
    own[1] = 0.75 * own[1] + 0.25 * (math.log(sum(math.exp(v) for v in logits[1].tolist())) - 1.0)
    assert loss.item() == pytest.approx(sum(own) / 3, abs=1e-12)
    assert torch.autograd.grad(loss, leaf)[0].isfinite().all()


def test_with_a_large_weight_only_the_other_view_attracts():
    """Then it is the loss of contrastive learning without labels, which tells every image from every other."""
    z, y = unit(12, 5, 0), torch.tensor([0, 0, 0, 1, 1, 1]).repeat(2)
    alone = supervised_contrastive_loss(z, torch.arange(6).repeat(2), 0.2).item()
    assert supervised_contrastive_loss(z, y, 0.2, view_weight=1e9).item() == pytest.approx(alone, rel=1e-6)
    assert supervised_contrastive_loss(z, y, 0.2).item() != pytest.approx(alone, rel=1e-3)


def test_rows_that_are_wholly_of_one_class_give_the_plain_losses():
    z, logits = unit(12, 5, 0), 3 * unit(12, 6, 1)
    y, other = torch.arange(12) % 3, torch.arange(12) % 4
    for share, classes in ((torch.zeros(12), y), (torch.ones(12), other)):
        mixture = Mixture(other, share)
        plain = supervised_contrastive_loss(z, classes, 0.2).item()
        assert supervised_contrastive_loss(z, y, 0.2, mixture).item() == pytest.approx(plain, abs=1e-12)
        entropy = cross_entropy_loss(logits, classes).item()
        assert cross_entropy_loss(logits, y, mixture).item() == pytest.approx(entropy, abs=1e-12)


def test_cross_entropy_of_rows_of_two_classes():
    logits = torch.tensor([[1.0, 2.0, -torch.inf, 0.0], [0.0, 1.0, -torch.inf, 3.0]], dtype=torch.float64)
    y, other, share = torch.tensor([0, 3]), torch.tensor([1, 1]), torch.tensor([0.25, 0.5], dtype=torch.float64)
    logs = [[v - math.log(sum(math.exp(u) for u in row)) for v in row] for row in logits.tolist()]
    expected = -(0.75 * logs[0][0] + 0.25 * logs[0][1] + 0.5 * logs[1][3] + 0.5 * logs[1][1]) / 2
    leaf = logits.clone().requires_grad_()
    loss = cross_entropy_loss(leaf, y, Mixture(other, share))
    (gradient,) = torch.autograd.grad(loss, leaf)
    assert loss.item() == pytest.approx(expected, abs=1e-12)
    assert not gradient[:, 2].any()


# ---------------------------------------------------------------- distillation


def distillation_by_loops(student, teacher, temperature):
    """T² KL(teacher ‖ student) over the classes the teacher has, mean over the rows."""
    total = 0.0
    for s, t in zip(student.tolist(), teacher.tolist(), strict=True):
        known = [c for c in range(len(t)) if math.isfinite(t[c])]
        p = [math.exp(t[c] / temperature) for c in known]
        q = [math.exp(s[c] / temperature) for c in known]
        p, q = [v / sum(p) for v in p], [v / sum(q) for v in q]
        total += sum(a * (math.log(a) - math.log(b)) for a, b in zip(p, q, strict=True))
    return total / len(student) * temperature**2


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 5),
    classes=st.integers(1, 6),
    unknown=st.integers(0, 3),
    temperature=st.floats(0.5, 5.0),
    seed=st.integers(0, 2**32),
)
def test_distillation_equals_plain_loops(rows, classes, unknown, temperature, seed):
    random = torch.Generator().manual_seed(seed)
    student = torch.randn(rows, classes + unknown, dtype=torch.float64, generator=random) * 3
    teacher = torch.randn(rows, classes + unknown, dtype=torch.float64, generator=random) * 3
    teacher[:, classes:] = -torch.inf
    expected = distillation_by_loops(student, teacher, temperature)
    assert distillation_loss(student, teacher, temperature).item() == pytest.approx(expected, abs=1e-9)


def test_distillation_gradient_and_what_the_teacher_does_not_know():
    random = torch.Generator().manual_seed(0)
    student = torch.randn(3, 6, dtype=torch.float64, generator=random)
    student[:, 5] = -torch.inf  # a class neither of them has met
    teacher = torch.randn(3, 6, dtype=torch.float64, generator=random)
    teacher[:, 3:] = -torch.inf
    student.requires_grad_()
    (gradient,) = torch.autograd.grad(distillation_loss(student, teacher), student)
    assert not gradient[:, 3:].any()
    p, q = torch.softmax(teacher / 2, 1), torch.softmax(student.masked_fill(teacher.isinf(), -torch.inf) / 2, 1)
    torch.testing.assert_close(gradient, 2**2 * (q - p) / 2 / 3)


def test_a_teacher_without_classes_teaches_nothing():
    student = torch.randn(3, 4, requires_grad=True)
    teacher = torch.randn(3, 4)
    teacher[1] = -torch.inf
    loss = distillation_loss(student, teacher)
    (gradient,) = torch.autograd.grad(loss, student)
    assert torch.equal(gradient[1], torch.zeros(4))
    rest = distillation_loss(student[[0, 2]], teacher[[0, 2]])
    assert loss.item() == pytest.approx(2 / 3 * rest.item(), rel=1e-5)


def test_distillation_of_a_student_that_answers_as_its_teacher_is_zero():
    logits = torch.tensor([[2.0, -1.0, 0.5]]).requires_grad_()
    loss = distillation_loss(logits, logits.detach() + 7.0)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert loss.item() == pytest.approx(0.0, abs=1e-6)
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), atol=1e-6, rtol=0)


# ---------------------------------------------------------------- cross-entropy


def test_cross_entropy_leaves_out_classes_not_met():
    logits = torch.tensor([[1.0, 2.0, -torch.inf, 0.0], [0.0, 1.0, -torch.inf, 3.0]], dtype=torch.float64)
    y = torch.tensor([0, 3])
    expected = sum(
        -row[label] + math.log(sum(math.exp(v) for v in row if math.isfinite(v)))
        for row, label in zip(logits.tolist(), y.tolist(), strict=True)
    )
    leaf = logits.clone().requires_grad_()
    loss = cross_entropy_loss(leaf, y)
    (gradient,) = torch.autograd.grad(loss, leaf)
    assert loss.item() == pytest.approx(expected / 2, abs=1e-12)
    assert not gradient[:, 2].any()


# ---------------------------------------------------------------- as one kernel


@pytest.mark.device
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnTheDevice:
    @pytest.mark.parametrize("narrowed", [False, True])
    @pytest.mark.parametrize("view_weight", [1.0, 4.0])
    @pytest.mark.parametrize("temperature", [0.07, 1.0])
    @pytest.mark.parametrize("mixed", [False, True])
    @pytest.mark.parametrize(("rows", "classes"), [(220, 12), (8, 3), (30, 1000), (2, 1), (1, 1), (2020, 100)])
    def test_the_kernel_and_its_gradient_are_those_of_the_formula(
        self, rows, classes, mixed, temperature, view_weight, narrowed
    ):
        random = torch.Generator().manual_seed(rows)
        z = F.normalize(torch.randn(rows, 128, generator=random), dim=1)
        y, other = torch.randint(classes, (2, rows), generator=random)
        share = torch.rand(rows, generator=random).sub(0.3).clamp_(min=0)
        near, exact = z.cuda().requires_grad_(), z.double().requires_grad_()
        narrow = Narrow(torch.arange(rows) % 3 == 0, y[:4]) if narrowed else None
        there = Narrow(narrow.rows.cuda(), narrow.classes.cuda()) if narrow else None
        found = supervised_contrastive_loss(
            near, y.cuda(), temperature, Mixture(other.cuda(), share.cuda()) if mixed else None, view_weight, there
        )
        assert "SupervisedContrastive" in type(found.grad_fn).__name__
        mixture = Mixture(other, share.double()) if mixed else None
        expected = supervised_contrastive_loss(exact, y, temperature, mixture, view_weight, narrow)
        torch.testing.assert_close(found.detach().cpu().double(), expected.detach(), rtol=1e-4, atol=1e-5)
        (gradient,), (right,) = torch.autograd.grad(3 * found, near), torch.autograd.grad(3 * expected, exact)
        torch.testing.assert_close(
            gradient.cpu().double(), right, rtol=1e-3, atol=1e-4 * right.abs().max().item() + 1e-9
        )

    @pytest.mark.parametrize(("rows", "classes", "met"), [(220, 128, 100), (220, 16, 10), (5, 1000, 1000), (1, 1, 1)])
    def test_cross_entropy_of_rows_of_two_classes(self, rows, classes, met):
        random = torch.Generator().manual_seed(rows)
        logits = 3 * torch.randn(rows, classes, generator=random)
        logits[:, met:] = -torch.inf
        y, other = torch.randint(met, (2, rows), generator=random)
        share = torch.rand(rows, generator=random).sub(0.3).clamp_(min=0)
        near, exact = logits.cuda().requires_grad_(), logits.double().requires_grad_()
        found = cross_entropy_loss(near, y.cuda(), Mixture(other.cuda(), share.cuda()))
        assert "CrossEntropy" in type(found.grad_fn).__name__
        expected = cross_entropy_loss(exact, y, Mixture(other, share.double()))
        torch.testing.assert_close(found.detach().cpu().double(), expected.detach(), rtol=1e-5, atol=1e-6)
        (gradient,), (right,) = torch.autograd.grad(2 * found, near), torch.autograd.grad(2 * expected, exact)
        torch.testing.assert_close(gradient.cpu().double(), right, rtol=1e-4, atol=1e-8)

    def test_it_gives_the_same_bits_every_time(self):
        z = F.normalize(torch.randn(220, 128, generator=torch.Generator().manual_seed(0)), dim=1).cuda()
        y = torch.arange(220).cuda() % 7
        assert len({supervised_contrastive_loss(z, y, 0.1).item() for _ in range(5)}) == 1
