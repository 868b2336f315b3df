"""The thread that answers: questions that wait are answered together, by the copy of the model of that moment."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from scrlearn.service.model import Answer, Replica
from scrlearn.service.problems import Problem, stopping


class Source(Protocol):
    """What is told of the copy of the model that answered: its place in the journal, and stored images by slot."""

    @property
    def sequence(self) -> int:
        """The last journal entry it has learned."""
        ...

    @property
    def images(self) -> Tensor | Mapping[int, Tensor]:
        """The stored images that the answers name."""
        ...


@dataclass(frozen=True)
class Reply:
    """Answers to one question, and the copy of the model that gave them."""

    answers: list[Answer]
    replica: Source


@dataclass(frozen=True)
class _Question:
    images: Tensor
    neighbours: int
    future: Future[Reply]


class Answerer:
    """A queue of questions with a bound, and one thread that answers what has gathered in it.

    There is no waiting for more: while one batch is answered the next gathers, so batches grow with the load.

    Parameters
    ----------
    replica
        Gives the copy of the model to answer with.
    most
        Images that may wait; more are refused.
    batch
        Images answered together.
    """

    def __init__(self, replica: Callable[[], Replica], most: int, batch: int) -> None:
        self._replica, self._most, self._batch = replica, most, batch
        self._waiting: deque[_Question] = deque()
        self._images = 0
        self._changed = threading.Condition()
        self._stopping = False
        self.answered = 0
        self._thread = threading.Thread(target=self._run, name="scr-answers", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Images that wait for an answer."""
        return self._images

    def places(self) -> dict[str, int] | None:
        """The copies elsewhere, and the place in the journal up to which each has learned; None: all is here."""
        return None

    def ask(self, images: Tensor, neighbours: int = 0) -> Future[Reply]:
        """Ask about images (uint8, N×C×H×W)."""
        future: Future[Reply] = Future()
        with self._changed:
            if self._stopping:
                raise stopping()
            if self._images and self._images + len(images) > self._most:
                detail = f"{self._images} images wait for an answer already. Try again in a moment."
                raise Problem("busy", detail, retry_after=1)
            self._waiting.append(_Question(images, neighbours, future))
            self._images += len(images)
            self._changed.notify()
        return future

    def stop(self) -> None:
        """Answer what waits, then end."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while questions := self._next():
            try:
                self._answer(questions)
            except BaseException as error:  # whoever asked must hear of it, and the thread must live on
                for question in questions:
                    if not question.future.done():
                        question.future.set_exception(error)

    def _next(self) -> list[_Question]:
        """Wait for questions; an empty list means the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._stopping)
            taken: list[_Question] = []
            images = 0
            while self._waiting and (not taken or images + len(self._waiting[0].images) <= self._batch):
                question = self._waiting.popleft()
                self._images -= len(question.images)
                images += len(question.images)
                taken.append(question)
            return taken

    def _answer(self, questions: list[_Question]) -> None:
        asked = [question for question in questions if question.future.set_running_or_notify_cancel()]
        if not asked:
            return
        replica = self._replica()
        most = max(question.neighbours for question in asked)
        answers = replica.answer(torch.cat([question.images for question in asked]), most)
        self.answered += len(answers)
        for question in asked:
            mine, answers = answers[: len(question.images)], answers[len(question.images) :]
            question.future.set_result(Reply(_trimmed(mine, question.neighbours), replica))


def _trimmed(answers: list[Answer], neighbours: int) -> list[Answer]:
    return [Answer(a.label, a.confidence, a.classes, a.neighbours[:neighbours]) for a in answers]
