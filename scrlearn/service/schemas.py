"""What the service answers, as data: the schemas of the OpenAPI description."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Strict(BaseModel):
    """A document with these members and no others."""

    model_config = ConfigDict(extra="forbid")


class ProblemDocument(BaseModel):
    """An error (RFC 9457)."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    code: str = Field(description="A name for programs, such as bad-image or busy.")


class Learned(Strict):
    """Images were accepted: they are in the journal, on disk."""

    accepted: int = Field(description="Images accepted with this request.")
    first: int = Field(description="Place of the first image in the journal.")
    last: int = Field(description="Place of the last image in the journal.")
    repeated: bool = Field(
        description="Whether this idempotency key had been accepted before; nothing is learned twice."
    )
    learned: bool = Field(description="Whether the model that answers has learned them already.")


class ClassNear(Strict):
    """A class and how near an image is to it."""

    label: str
    confidence: float = Field(
        description="How likely the class is, from 0 to 1, judged by the stored images; all classes together have 1."
    )
    distance: float | None = Field(description="From the image's features to the class's prototype, 0 to 2.")
    nearest: float | None = Field(
        description="From the image's features to the nearest stored image of the class, 0 to 2; null: none is stored."
    )
    threshold: float | None = Field(
        description="If `nearest` is larger, the class does not take the image for its own; null: it takes any."
    )


class NeighbourImage(Strict):
    """A stored image near the one asked about."""

    slot: int = Field(description="Its place in the memory, as in /v1/memory.")
    label: str
    distance: float = Field(description="From the features of the image asked about, 0 to 2.")
    image: str = Field(description="The image as a data URL (PNG).")


class Prediction(Strict):
    """What is on an image."""

    label: str | None = Field(description="The label; null when the image is near nothing that was learned.")
    unknown: bool = Field(description="Whether the image is near nothing that was learned.")
    confidence: float = Field(description="Of the most likely class, even where the image is unknown.")
    classes: list[ClassNear] = Field(description="The most likely classes, best first; five at most.")
    neighbours: list[NeighbourImage] = Field(description="The nearest stored images; only from /v1/nearest.")


class Predictions(Strict):
    """What is on each image, in their order."""

    model: int = Field(description="Place in the journal up to which the model that answered has learned.")
    predictions: list[Prediction]


class KnownClass(Strict):
    """A class."""

    label: str
    learned: int = Field(description="Images ever learned of it.")
    stored: int = Field(description="Images of it in memory.")
    threshold: float | None = Field(
        description="How far from the nearest of these another image of it may be; null: any distance."
    )


class Classes(Strict):
    """All classes, in the order of their first appearance."""

    model: int
    classes: list[KnownClass]


class StoredImage(Strict):
    """An image of the memory."""

    slot: int
    label: str
    image: str = Field(description="The image as a data URL (PNG).")


class MemoryPage(Strict):
    """A part of the memory."""

    model: int
    total: int = Field(description="Stored images, of the label asked for or of all.")
    offset: int
    images: list[StoredImage]


class Point(Strict):
    """A stored image on the map."""

    slot: int
    label: str
    x: float
    y: float


class MemoryMap(Strict):
    """The memory as points of a plane."""

    model: int
    method: Literal["pca"] = "pca"
    explained: float = Field(description="Share of the features' variance that the map shows.")
    points: list[Point]


class Recent(Strict):
    """What the model said of the last images just before it learned them."""

    images: int = Field(description="How many there are, of classes it had met.")
    right: int = Field(description="How many of the answers were right.")


class Digest(Strict):
    """A fingerprint of the model that answers."""

    sequence: int
    sha256: str


class State(Strict):
    """How things stand."""

    status: Literal["ok", "recovering", "failed"]
    problems: list[str] = Field(description="What is wrong now.")
    notes: list[str] = Field(description="What was wrong with the files at the start, and was made good.")
    version: str = Field(description="Of scrlearn.")
    model: dict[str, Any] = Field(description="What the state was made with.")
    classes: int
    steps: int = Field(description="Learning steps.")
    images: int = Field(description="Images ever learned.")
    lost: int = Field(description="Images that were damaged on disk.")
    stored: int = Field(description="Images in memory.")
    accepted: int = Field(description="Place of the last entry in the journal.")
    learned: int = Field(description="Place up to which the model has learned.")
    published: int = Field(description="Place up to which the model that answers has learned.")
    replicas: dict[str, int] | None = Field(
        description="With --ray, the copies on other machines and the place up to which each has learned; null without."
    )
    pending: int = Field(description="Images accepted and not yet learned.")
    speed: float = Field(description="Images learned in a second.")
    recent: Recent
    snapshot: int | None = Field(description="Place up to which the newest snapshot has learned; null: there is none.")
    disk_bytes: int = Field(description="Bytes of the state directory.")
    memory_bytes: int = Field(description="Bytes of memory that the process uses.")
    uptime: float = Field(description="Seconds since the start.")
    digest: Digest | None


class Forgotten(Strict):
    """A class was forgotten."""

    label: str
    sequence: int
    erased: bool = Field(
        description="Whether nothing of it is left on disk; false: that will be done as soon as possible."
    )
    repeated: bool


class Health(Strict):
    """Whether the service works."""

    status: Literal["ok", "recovering", "failed"]
