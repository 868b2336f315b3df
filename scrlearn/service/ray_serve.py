"""Answers from several machines: one learner, here, and copies of its model on Ray Serve that follow it.

A snapshot goes to the copies through Ray's object store: every machine fetches it once, and none needs a disk that the
others see.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import hashlib
import logging
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from scrlearn.cluster import connected, import_ray
from scrlearn.errors import InputError
from scrlearn.images import Array
from scrlearn.service.answers import Answerer, Reply
from scrlearn.service.core import Service
from scrlearn.service.encoders import make_encoder
from scrlearn.service.model import Answer, Replica, ServedClassifier
from scrlearn.service.problems import Problem
from scrlearn.service.settings import Limits, ModelConfig

log = logging.getLogger("scrlearn.service")
LOOK_SECONDS = 0.05
HEARTBEAT_SECONDS = 1.0
NOTHING = -1  # the place of a copy that has no model yet
SILENT_SECONDS = 15.0  # who has not been heard of for so long is gone
FOLLOW_SECONDS = 10.0
ANSWER_SECONDS = 10.0
TRIES = 3
AT_ONCE = 32  # questions under way to each copy


@dataclass(frozen=True)
class RayPlan:
    """Where copies of the model answer, and how many.

    Parameters
    ----------
    address
        "local", or the address of a cluster that this machine is part of; see `scrlearn.cluster.connected`.
    replicas
        How many copies.
    cpus, gpus
        What each is given; with a GPU it answers from there. `cpus` is also the number of its threads.

    Examples
    --------
    >>> RayPlan(replicas=0)
    Traceback (most recent call last):
    ...
    scrlearn.errors.InputError: 0 replicas were asked for; expected 1 or more.
    """

    address: str = "local"
    replicas: int = 2
    cpus: int = 1
    gpus: float = 0

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise InputError(f"{self.replicas} replicas were asked for; expected 1 or more.")
        if self.address.startswith("ray://"):
            raise InputError(
                f'The learner cannot be outside of the cluster, as "{self.address}" asks for: Ray Serve does not reach '
                "that far. Start it on a machine of the cluster, with auto or HOST:PORT."
            )


@dataclass(frozen=True)
class FarCopy:
    """What comes back from the copy that answered: its place in the journal, and the stored images it named."""

    sequence: int
    images: dict[int, Tensor]


# ------------------------------------------------------------------------------------------------------------ the board


class Board:
    """An actor that holds the newest snapshot, and knows how far each copy has followed."""

    def __init__(self) -> None:
        self.current: tuple[int, list[Any]] | None = None
        self.heard: dict[str, tuple[int, float]] = {}
        self.changed = asyncio.Condition()

    async def publish(self, sequence: int, snapshot: list[Any]) -> None:
        """There is a newer model; the snapshot is a reference, in a list so that it is not looked up here."""
        async with self.changed:
            self.current = sequence, snapshot
            self.changed.notify_all()

    async def after(self, name: str, sequence: int) -> tuple[int, list[Any]] | None:
        """The newest model when it is another than the one with this sequence, which `name` has; None: not yet."""
        if sequence != NOTHING:  # it has something to answer with
            self.heard[name] = sequence, time.monotonic()
        async with self.changed:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT_SECONDS):
                    await self.changed.wait_for(lambda: self.current is not None and self.current[0] != sequence)
                    return self.current
        return None

    async def look(self) -> tuple[int | None, dict[str, int]]:
        """The newest model's sequence, and those of the copies that were heard of lately."""
        since = time.monotonic() - SILENT_SECONDS
        self.heard = {name: (place, at) for name, (place, at) in self.heard.items() if at >= since}
        return self.current and self.current[0], {name: place for name, (place, _) in self.heard.items()}


# ----------------------------------------------------------------------------------------------------------- the copies


class Predictor:
    """A copy of the model on some machine of the cluster: a replica, in the words of Ray Serve.

    Parameters
    ----------
    board
        Where snapshots come from.
    config, limits
        Settings of the service.
    plan
        What this copy may use.
    encoder
        A module of your own, with any weights.
    """

    def __init__(
        self, board: Any, config: ModelConfig, limits: Limits, plan: RayPlan, encoder: nn.Module | None = None
    ) -> None:
        self.ray = import_ray()
        torch.set_num_threads(plan.cpus)
        self.board, self.quantile = board, limits.quantile
        self.device = "cuda" if plan.gpus else "cpu"
        self.encoder = encoder or make_encoder(config)
        self.name = f"{socket.gethostname()}-{uuid.uuid4().hex[:8]}"
        while (first := self._newer(NOTHING)) is None:
            pass
        self.replica: Replica = first
        # how many may wait is counted where they come in
        self.answerer = Answerer(lambda: self.replica, limits.questions * plan.replicas, limits.answer_batch)
        self.thread = threading.Thread(target=self._keep_following, name="scr-follow", daemon=True)
        self.thread.start()

    def _newer(self, sequence: int) -> Replica | None:
        found = self.ray.get(self.board.after.remote(self.name, sequence))
        if found is None:
            return None
        newest, (snapshot,) = found
        model = unpack(self.ray.get(snapshot), self.device, copy.deepcopy(self.encoder))
        return Replica(model, newest, self.quantile)

    def _keep_following(self) -> None:
        while True:
            try:
                self.replica = self._newer(self.replica.sequence) or self.replica
            except self.ray.exceptions.RayError as error:
                log.warning("The learner cannot be followed: %s", str(error).splitlines()[0])
                time.sleep(HEARTBEAT_SECONDS)

    def check_health(self) -> None:
        """Ray Serve asks now and then, and replaces a copy that raises."""
        if not self.thread.is_alive():
            raise RuntimeError("It no longer follows the learner.")

    async def answer(self, images: Array, neighbours: int) -> tuple[int, list[Answer], dict[int, Array]]:
        """The place in the journal of the model that answers, its answers, and the stored images they name."""
        reply = await asyncio.wrap_future(self.answerer.ask(torch.from_numpy(np.array(images)), neighbours))
        slots = {near.slot for answer in reply.answers for near in answer.neighbours}
        pictures = {slot: reply.replica.images[slot].numpy() for slot in slots}
        return reply.replica.sequence, reply.answers, pictures


def pack(model: ServedClassifier) -> bytes:
    """A model as the bytes of a snapshot: safetensors and JSON, nothing executable.

    >>> from scrlearn.service.model import make_model
    >>> model = make_model(ModelConfig("er", memory_size=20, image_size=8, channels=1, device="cpu"))
    >>> unpack(pack(model), "cpu").digest() == model.digest()
    True
    """
    with tempfile.TemporaryDirectory(prefix="scrlearn-") as folder:
        return model.save(Path(folder) / "model.scr").read_bytes()


def unpack(data: bytes, device: str, encoder: nn.Module | None = None) -> ServedClassifier:
    """The model that `pack` took, on this device."""
    with tempfile.TemporaryDirectory(prefix="scrlearn-") as folder:
        path = Path(folder) / "model.scr"
        path.write_bytes(data)
        return ServedClassifier.load(path, encoder=encoder, device=device)


# ---------------------------------------------------------------------------------------------------------- the learner


class RayAnswerer(Answerer):
    """Asks the copies, and answers itself as long as there is none, or none that can.

    Parameters
    ----------
    service
        The learner.
    plan
        How many copies there shall be.
    board, handle
        Where the copies look for snapshots, and how they are asked.
    """

    def __init__(self, service: Service, plan: RayPlan, board: Any, handle: Any) -> None:
        self.ray, self.service, self.board, self.handle = import_ray(), service, board, handle
        self._troubles = (self.ray.exceptions.RayError, import_ray("ray.serve.exceptions").RayServeException)
        limits = service.limits
        super().__init__(lambda: service.replica, limits.questions, limits.answer_batch)
        self._far_most, self._far_images = limits.questions * plan.replicas, 0
        self._pool = ThreadPoolExecutor(AT_ONCE * plan.replicas, thread_name_prefix="scr-ask")
        self._lock = threading.Lock()
        self._hopes: list[tuple[float, Future[bool]]] = []
        self._sent: tuple[int, Any] | None = None
        self._looked = 0.0
        self._at: dict[str, int] = {}
        self._over = threading.Event()
        self._leader = threading.Thread(target=self._lead, name="scr-lead", daemon=True)
        self._leader.start()

    @property
    def waiting(self) -> int:
        """Images that wait for an answer, here or elsewhere."""
        return super().waiting + self._far_images

    def places(self) -> dict[str, int]:
        """The copies, and the place in the journal up to which each has learned."""
        return dict(self._at)

    # ---------------------------------------------------------------- asking

    def ask(self, images: Tensor, neighbours: int = 0) -> Future[Reply]:
        """Ask a copy about images (uint8, N×C×H×W)."""
        if self._over.is_set() or not self._at:
            return super().ask(images, neighbours)
        with self._lock:
            if self._far_images and self._far_images + len(images) > self._far_most:
                detail = f"{self._far_images} images wait for an answer already. Try again in a moment."
                raise Problem("busy", detail, retry_after=1)
            self._far_images += len(images)
        future = self._pool.submit(self._ask, images, neighbours)
        future.add_done_callback(lambda _: self._answered(len(images)))
        return future

    def _answered(self, images: int) -> None:
        with self._lock:
            self._far_images -= images

    def _ask(self, images: Tensor, neighbours: int) -> Reply:
        for _ in range(TRIES):
            try:
                found = self.handle.answer.remote(images.numpy(), neighbours).result(timeout_s=ANSWER_SECONDS)
            except TimeoutError:
                break
            except self._troubles as error:  # it died with the question, which may be asked again
                log.warning("A copy of the model did not answer: %s", str(error).splitlines()[0])
                continue
            sequence, answers, pictures = found
            with self._lock:
                self.answered += len(answers)
            far = FarCopy(sequence, {slot: torch.from_numpy(np.array(image)) for slot, image in pictures.items()})
            return Reply(answers, far)
        return super().ask(images, neighbours).result()

    # ---------------------------------------------------------------- leading

    def when_following(self, sequence: int) -> Future[bool]:
        """Done when every copy has learned this entry (True), or has not for long after the learner has (False)."""
        future: Future[bool] = Future()

        def published(learned: Future[bool]) -> None:
            if learned.cancelled() or not learned.result() or self._over.is_set():
                _settle(future, not learned.cancelled() and learned.result())
            else:
                with self._lock:
                    self._hopes.append((time.monotonic() + FOLLOW_SECONDS, future))

        self.service.worker.when_published(sequence).add_done_callback(published)
        return future

    def _lead(self) -> None:
        """The thread that shows every new copy to the board, and sees who has taken it."""
        while not self._over.wait(LOOK_SECONDS):
            due = self._hopes or time.monotonic() - self._looked >= HEARTBEAT_SECONDS
            if due or self._sent is None or self._sent[0] != self.service.replica.sequence:
                try:
                    self._show()
                except self.ray.exceptions.RayError as error:
                    log.warning("The copies of the model cannot be reached: %s", str(error).splitlines()[0])
                    self._at = {}
                    self._over.wait(HEARTBEAT_SECONDS)

    def _show(self) -> None:
        with self._lock:
            hopes = list(self._hopes)
        replica = self.service.replica  # after the hopes: it has learned what they wait for
        if self._sent is None or self._sent[0] != replica.sequence:
            self._sent = replica.sequence, self.ray.put(pack(replica.model))
        newest, at = self.ray.get(self.board.look.remote(), timeout=ANSWER_SECONDS)
        if newest != replica.sequence:  # also when the board was lost and has begun anew
            self.ray.get(self.board.publish.remote(replica.sequence, [self._sent[1]]), timeout=ANSWER_SECONDS)
        if len(at) != len(self._at):
            log.info("%d copies of the model answer.", len(at))
        self._at, self._looked = at, time.monotonic()
        reached = all(place >= replica.sequence for place in at.values())
        over = [hope for hope in hopes if reached or hope[0] < self._looked]
        for hope in over:
            _settle(hope[1], reached)
        with self._lock:
            self._hopes = [hope for hope in self._hopes if hope not in over]

    def retire(self) -> None:
        """Ask the copies no longer; what comes now is answered here."""
        self._over.set()
        self._leader.join()
        for _, future in self._hopes:
            _settle(future, False)
        self._pool.shutdown()


def _settle(future: Future[bool], value: bool) -> None:
    if future.set_running_or_notify_cancel():
        future.set_result(value)


@contextlib.contextmanager
def predictors(service: Service, plan: RayPlan, encoder: nn.Module | None = None) -> Iterator[RayAnswerer]:
    """Copies of a service's model answer, for as long as this lasts.

    Parameters
    ----------
    service
        The learner; its own thread answers no more, unless no copy can.
    plan
        Where, and how many.
    encoder
        The module of your own that the service was given.
    """
    with connected(plan.address) as ray:
        serve = import_ray("ray.serve")
        affinity = import_ray("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy
        here = affinity(ray.get_runtime_context().get_node_id(), soft=False)
        board = ray.remote(Board).options(num_cpus=0, max_restarts=-1, scheduling_strategy=here).remote()
        place = f"{socket.gethostname()}:{service.folder.path.absolute()}"
        name = f"scrlearn-{hashlib.sha256(place.encode()).hexdigest()[:12]}"
        serve.start(proxy_location="Disabled")  # requests come in at the learner, with its token and its limits
        deployment = serve.deployment(
            Predictor,
            num_replicas=plan.replicas,
            max_ongoing_requests=AT_ONCE,
            health_check_period_s=5,
            graceful_shutdown_timeout_s=5,
            ray_actor_options={"num_cpus": plan.cpus, "num_gpus": plan.gpus},
        )
        bound = deployment.bind(board, service.config, service.limits, plan, encoder)
        target = serve.RunTarget(bound, name=name, route_prefix=None)
        (handle,) = serve.run_many([target], wait_for_applications_running=False)
        answerer, before = RayAnswerer(service, plan, board, handle), service.answerer
        service.answerer, service.when_answering = answerer, answerer.when_following
        before.stop()
        try:
            yield answerer
        finally:
            service.when_answering = service.worker.when_published
            answerer.retire()
            serve.delete(name)
            if not serve.status().applications:
                serve.shutdown()
            ray.kill(board)
