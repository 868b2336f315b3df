"""Digits as a stream of two-class tasks, and an encoder small enough for many short runs."""

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

from scrlearn.checkpoint import digest
from scrlearn.learners import make_learner

SHAPE = (1, 8, 8)


def encoder(features=16):
    """A little network with BatchNorm, so that training and evaluation differ."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(128, features), nn.ReLU()
    )


def digits(count=None):
    images, labels = load_digits(return_X_y=True)
    x = torch.from_numpy((images[:count] * 15).astype(np.uint8)).view(-1, *SHAPE)
    return x, torch.from_numpy(labels[:count])


def stream(tasks=3, batches=4, batch=10):
    """Tasks of two classes each: lists of batches."""
    x, y = digits()
    for task in range(tasks):
        mine = (y // 2) == task
        yield list(zip(x[mine].split(batch), y[mine].split(batch), strict=True))[:batches]


def make(method, **options):
    options = {"encoder": encoder(), "precision": "fp32", "device": "cpu", "seed": 0} | options
    return make_learner(method, image_shape=SHAPE, **options)


def learn(learner, **options):
    """Go through a stream to its end."""
    for task in stream(**options):
        for x, y in task:
            learner.learn(x, y)
        learner.end_task()
    learner.finish()
    return learner


def accuracy(learner, classifier=None):
    x, y = digits()
    met = learner.met[: learner.num_classes].nonzero().flatten()
    mine = torch.isin(y, met)
    return (learner.predict(x[mine], classifier) == y[mine]).float().mean().item()


def assert_resumes(build, stop_task, stop_batch, **options):
    """A learner that was saved in the middle of a task, and one built anew from that, end with the same bits."""
    whole, resumed = build(), None
    for number, task in enumerate(stream(**options)):
        for place, (x, y) in enumerate(task):
            if (number, place) == (stop_task, stop_batch):
                resumed = build()
                resumed.load_state_dict(_copied(whole.state_dict()))
                assert digest(resumed.state_dict()) == digest(whole.state_dict())
            for learner in filter(None, (whole, resumed)):
                learner.learn(x, y)
        for learner in filter(None, (whole, resumed)):
            learner.end_task()
    for learner in (whole, resumed):
        learner.finish()
    assert digest(resumed.state_dict()) == digest(whole.state_dict())
    x, _ = digits(50)
    for classifier in whole.classifiers:
        assert torch.equal(whole.scores(x, classifier), resumed.scores(x, classifier))


def _copied(state):
    return {k: _copied(v) if isinstance(v, dict) else v.clone() if torch.is_tensor(v) else v for k, v in state.items()}
