"""Requests with images: a form with files, or JSON with base64; read in memory, whatever is in them."""

from __future__ import annotations

import base64
import binascii
import json
from dataclasses import dataclass, field
from typing import Any

from scrlearn.service.problems import Problem
from scrlearn.service.settings import Limits

FIELDS = ("images", "labels")
_ODD_NUMBERS = 4  # a few parts more than images and labels may come in a form


@dataclass
class Upload:
    """Image files and labels, as they were sent."""

    images: list[bytes] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)

    def labels_for_each(self) -> list[str]:
        """One label for each image; a single label stands for all."""
        if len(self.labels) == 1:
            return self.labels * len(self.images)
        if len(self.labels) != len(self.images):
            raise Problem(
                "invalid",
                f"There are {len(self.images)} images but {len(self.labels)} labels. Send one label for each image, in "
                "the same order, or a single one for all.",
            )
        return self.labels


def read_upload(content_type: str, body: bytes, limits: Limits) -> Upload:
    """Images and labels from a request's body.

    Examples
    --------
    >>> upload = read_upload("application/json", b'{"images": ["aGk="], "labels": ["cat"]}', Limits())
    >>> upload.images, upload.labels
    ([b'hi'], ['cat'])
    """
    kind = content_type.partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        upload = _read_form(content_type, body, limits)
    elif kind == "application/json":
        upload = _read_json(body, limits)
    else:
        raise Problem(
            "media-type",
            f'The content type is "{kind[:100]}"; send multipart/form-data with files, or application/json.',
        )
    if not upload.images:
        raise Problem("invalid", 'There are no images; send at least one as "images".')
    return upload


# -------------------------------------------------------------------- JSON


def _read_json(body: bytes, limits: Limits) -> Upload:
    try:
        content = json.loads(body)
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "it is not text in UTF-8, or nested too deep"
        raise Problem("malformed", f"The body is no JSON: {reason}.") from None
    if not isinstance(content, dict):
        raise Problem("invalid", 'The body must be an object: {"images": ["<base64>", ...], "labels": ["cat", ...]}.')
    unknown = [name for name in content if name not in FIELDS]
    if unknown:
        raise Problem("invalid", f"There is no field {unknown[0][:50]!r}; known: images, labels.")
    images, labels = _strings(content, "images"), _strings(content, "labels")
    _check_count(len(images), len(labels), limits)
    return Upload([_from_base64(text, number) for number, text in enumerate(images)], labels)


def _strings(content: dict[str, Any], name: str) -> list[str]:
    value = content.get(name, [])
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise Problem("invalid", f'"{name}" must be a list of strings.')
    return value


def _from_base64(text: str, number: int) -> bytes:
    if text.startswith("data:"):
        head, comma, text = text.partition(",")
        if not comma or not head.endswith(";base64"):
            raise Problem("bad-image", f"Image {number} is a data URL that is not base64.", image=number)
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise Problem("bad-image", f"Image {number} is no base64.", image=number) from None


# -------------------------------------------------------------------- forms


def _read_form(content_type: str, body: bytes, limits: Limits) -> Upload:
    upload = Upload()
    for name, data in _parts(content_type, body, 2 * limits.images + _ODD_NUMBERS):
        if name == "images":
            upload.images.append(data)
        elif name == "labels":
            try:
                upload.labels.append(data.decode())
            except UnicodeDecodeError:
                raise Problem("invalid", f"Label {len(upload.labels)} is not text in UTF-8.") from None
        else:
            raise Problem("invalid", f"There is no field {name[:50]!r}; known: images, labels.")
    _check_count(len(upload.images), len(upload.labels), limits)
    return upload


def _parts(content_type: str, body: bytes, most: int) -> list[tuple[str, bytes]]:
    """Name and content of each part of a form."""
    from python_multipart.exceptions import ParseError
    from python_multipart.multipart import MultipartParser, parse_options_header

    boundary = parse_options_header(content_type)[1].get(b"boundary")
    if not boundary:
        raise Problem("malformed", "The form's content type names no boundary.")
    collected = _Collector(most)
    try:
        parser = MultipartParser(boundary, collected.callbacks())  # type: ignore[arg-type]
        parser.write(body)
        parser.finalize()
    except ParseError:
        raise Problem("malformed", "The form cannot be read: its parts are not as its boundary says.") from None
    if not collected.ended:
        raise Problem("malformed", "The form is cut short: its end is missing.")
    names = [parse_options_header(disposition)[1].get(b"name", b"") for disposition in collected.dispositions]
    return [(name.decode(errors="replace"), bytes(data)) for name, data in zip(names, collected.contents, strict=True)]


class _Collector:
    """Takes what the parser of a form finds, in memory."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.dispositions: list[bytes] = []
        self.contents: list[bytearray] = []
        self.ended = False
        self._name = bytearray()
        self._value = bytearray()

    def callbacks(self) -> dict[str, Any]:
        """What to call for each thing found."""
        return {
            "on_part_begin": self._begin,
            "on_header_field": lambda data, start, end: self._name.extend(data[start:end]),
            "on_header_value": lambda data, start, end: self._value.extend(data[start:end]),
            "on_header_end": self._header,
            "on_part_data": lambda data, start, end: self.contents[-1].extend(data[start:end]),
            "on_end": self._end,
        }

    def _begin(self) -> None:
        if len(self.contents) >= self.most:
            raise Problem("too-large", f"The form has more than {self.most} parts.")
        self.dispositions.append(b"")
        self.contents.append(bytearray())

    def _header(self) -> None:
        if self._name.lower() == b"content-disposition":
            self.dispositions[-1] = bytes(self._value)
        self._name.clear()
        self._value.clear()

    def _end(self) -> None:
        self.ended = True


def _check_count(images: int, labels: int, limits: Limits) -> None:
    if max(images, labels) > limits.images:
        raise Problem(
            "too-large", f"There are {images} images and {labels} labels; at most {limits.images} in one request."
        )
