"""What Prometheus reads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from scrlearn.service.core import Service

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    """Counters of one service, in a registry of its own."""

    def __init__(self, service: Service) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.requests = Counter(
            "scrlearn_requests", "Requests answered.", ["method", "path", "status"], registry=self.registry
        )
        self.seconds = Histogram(
            "scrlearn_request_seconds",
            "Time to the end of the answer.",
            ["path"],
            registry=self.registry,
            buckets=BUCKETS,
        )
        self.registry.register(_Now(service))

    def observe(self, method: str, path: str, status: int, seconds: float) -> None:
        """Count a request."""
        self.requests.labels(method, path, str(status)).inc()
        self.seconds.labels(path).observe(seconds)

    def text(self) -> bytes:
        """All of them."""
        return bytes(generate_latest(self.registry))


class _Now:
    """How things stand at the moment of asking."""

    def __init__(self, service: Service) -> None:
        self.service = service

    def describe(self) -> list[Any]:
        return []

    def collect(self) -> Iterator[Metric]:
        service, worker, replica = self.service, self.service.worker, self.service.replica
        counters: dict[str, tuple[str, float]] = {
            "images_learned": ("Images ever learned.", worker.images),
            "images_lost": ("Images that were damaged in the journal.", worker.lost),
            "images_answered": ("Images answered since the start.", service.answerer.answered),
        }
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(f"scrlearn_{name}", text, value=value)
        gauges: dict[str, tuple[str, float]] = {
            "images_pending": ("Images accepted and not yet learned.", service.pending),
            "images_waiting": ("Images waiting for an answer.", service.answerer.waiting),
            "images_stored": ("Images in memory.", len(replica.stored)),
            "classes": ("Classes known.", len(replica.labels)),
            "steps": ("Learning steps.", replica.steps),
            "speed": ("Images learned in a second.", worker.speed),
            "accepted_sequence": ("Last entry of the journal.", service.journal.last),
            "learned_sequence": ("Last entry learned.", worker.learned),
            "published_sequence": ("Last entry that answers know of.", worker.published),
            "snapshot_sequence": ("Last entry in a snapshot.", worker.snapshots[0].sequence if worker.snapshots else 0),
            "disk_bytes": ("Bytes of the state directory.", service.folder.used_bytes()),
            "problems": ("Things that are wrong now.", len(worker.troubles)),
            "failed": ("1 when learning has stopped.", int(worker.failed)),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"scrlearn_{name}", text, value=value)
