"""A client for Python programs: retries what may be retried, and never teaches the same images twice."""

from __future__ import annotations

import base64
import io
import json
import os
import random
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import quote, urlencode

from scrlearn.errors import InputError, ScrlearnError

ImageLike: TypeAlias = Any
"""A path, the bytes of an image file, a PIL image, or a uint8 NumPy array H×W×C or H×W."""

AGAIN = frozenset({408, 429, 502, 503, 504})
SLOWEST = 30.0


class ServiceError(ScrlearnError):
    """The service refused, or could not be reached.

    Parameters
    ----------
    message
        What the service said.
    status
        The HTTP status; 0: no answer came.
    code
        The problem's name, such as "bad-image".
    """

    def __init__(self, message: str, status: int = 0, code: str = "unreachable") -> None:
        super().__init__(message)
        self.status, self.code = status, code


class Client:
    """Talks to a service.

    A request that fails on the way, or is refused because the service is busy or restarting, is sent again, after the
    time the service asks for or a growing pause. `learn` and `forget` carry an idempotency key, so that sending again
    is safe: what arrived the first time is not done twice.

    Parameters
    ----------
    url
        Where the service is.
    token
        Its token, where it has one.
    retries
        How many times to send a request again.
    timeout
        Seconds to wait for an answer.

    Examples
    --------
    >>> client = Client("http://127.0.0.1:8000")
    >>> client.learn(["cat.jpg", "dog.jpg"], ["cat", "dog"], wait=10)  # doctest: +SKIP
    {'accepted': 2, 'first': 1, 'last': 2, 'repeated': False, 'learned': True}
    >>> client.predict(["who.jpg"])[0]["label"]  # doctest: +SKIP
    'cat'
    """

    def __init__(
        self, url: str = "http://127.0.0.1:8000", token: str | None = None, *, retries: int = 5, timeout: float = 90.0
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise InputError(f'"{url}" is no address of a service; it begins with http:// or https://.')
        self.url, self.token = url.rstrip("/"), None if token is None else _header("token", token.strip())
        self.retries, self.timeout = retries, timeout
        self._sleep: Callable[[float], None] = time.sleep

    # ---------------------------------------------------------------- verbs

    def learn(
        self, images: Sequence[ImageLike], labels: Sequence[str] | str, *, wait: float = 0, key: str | None = None
    ) -> dict[str, Any]:
        """Teach images. When this returns they are on the server's disk.

        Parameters
        ----------
        images
            Paths, bytes of image files, PIL images, or uint8 arrays H×W×C or H×W.
        labels
            One for each image, or one for all.
        wait
            Seconds to wait for the images to be learned; the answer's "learned" says whether they were.
        key
            The idempotency key; a new one unless given. Give your own to go on with it after your program's crash.
        """
        one = isinstance(labels, str) or not isinstance(labels, Iterable)
        names = [_text(label) for label in ([labels] if one else labels)]
        body = {"images": _encode_all(images), "labels": names}
        return self._call("POST", "/v1/learn", {"wait": wait}, body, key or new_key())

    def predict(self, images: Sequence[ImageLike]) -> list[dict[str, Any]]:
        """What is on each image: label (None: unknown), confidence, and the most likely classes with distances."""
        return self._ask("/v1/predict", {}, images)

    def nearest(self, images: Sequence[ImageLike], k: int = 5) -> list[dict[str, Any]]:
        """As `predict`, with the k nearest stored images of each."""
        return self._ask("/v1/nearest", {"k": k}, images)

    def forget(self, label: str, *, key: str | None = None) -> dict[str, Any]:
        """Forget a class and everything stored of it."""
        return self._call("DELETE", f"/v1/classes/{quote(_text(label), safe='')}", {}, None, key or new_key())

    def classes(self) -> list[dict[str, Any]]:
        """The classes, in the order of their first appearance."""
        found: list[dict[str, Any]] = self._call("GET", "/v1/classes")["classes"]
        return found

    def memory(self, label: str | None = None, page: int = 100) -> Iterator[dict[str, Any]]:
        """The stored images, one after the other: slot, label, and image as a data URL."""
        offset = 0
        while True:
            asked = {"offset": offset, "limit": page} | ({} if label is None else {"label": label})
            images = self._call("GET", "/v1/memory", asked)["images"]
            yield from images
            offset += len(images)
            if len(images) < page:
                return

    def map(self) -> dict[str, Any]:
        """The stored images as points of a plane."""
        return self._call("GET", "/v1/map")

    def state(self, *, digest: bool = False) -> dict[str, Any]:
        """How things stand."""
        return self._call("GET", "/v1/state", {"digest": "true"} if digest else {})

    def healthy(self) -> bool:
        """Whether the service answers and learns; asked once."""
        try:
            self._send("GET", f"{self.url}/healthz", None, {})
        except (ServiceError, OSError, HTTPException):
            return False
        return True

    # ---------------------------------------------------------------- sending

    def _ask(self, path: str, query: dict[str, Any], images: Sequence[ImageLike]) -> list[dict[str, Any]]:
        answer = self._call("POST", path, query, {"images": _encode_all(images)})
        found: list[dict[str, Any]] = answer["predictions"]
        return found

    def _call(
        self,
        method: str,
        path: str,
        query: dict[str, Any] | None = None,
        body: dict[str, Any] | None = None,
        key: str | None = None,
    ) -> dict[str, Any]:
        url = f"{self.url}{path}" + (f"?{urlencode(query)}" if query else "")
        data = None if body is None else json.dumps(body).encode()
        headers = {"Accept": "application/json"} | ({"Content-Type": "application/json"} if data is not None else {})
        headers |= {"Idempotency-Key": _header("key", key)} if key is not None else {}
        for attempt in range(self.retries + 1):
            try:
                return self._send(method, url, data, headers)
            except _Again as again:
                if attempt == self.retries:
                    raise again.error from None
                self._sleep(again.pause(attempt))
        raise AssertionError("unreachable")

    def _send(self, method: str, url: str, data: bytes | None, headers: dict[str, str]) -> dict[str, Any]:
        token = {} if self.token is None else {"Authorization": f"Bearer {self.token}"}
        request = urllib.request.Request(url, data, {**headers, **token}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=self.timeout) as response:
                answer: dict[str, Any] = json.load(response)
                return answer
        except urllib.error.HTTPError as error:
            problem = _problem(error)
            if error.code in AGAIN:
                raise _Again(problem, error.headers.get("Retry-After")) from None
            raise problem from None
        except (OSError, HTTPException, ValueError) as error:  # no connection, or an answer cut short
            reason = getattr(error, "reason", error)
            raise _Again(ServiceError(f"{self.url} did not answer: {reason}. Is the service running there?")) from None


class _Again(ServiceError):
    """A failure after which the request may be sent again."""

    def __init__(self, error: ServiceError, retry_after: str | None = None) -> None:
        super().__init__(str(error), error.status, error.code)
        self.error, self.retry_after = error, retry_after

    def pause(self, attempt: int) -> float:
        """Seconds to wait: what the service asked for, else twice as long each time, spread at random."""
        if self.retry_after is not None and self.retry_after.isdigit():
            return min(SLOWEST, float(self.retry_after)) * random.uniform(1.0, 1.25)
        return float(min(SLOWEST, 0.2 * 2**attempt) * random.uniform(0.5, 1.0))


def new_key() -> str:
    """An idempotency key that was never used."""
    return uuid.uuid4().hex


def _header(name: str, value: str) -> str:
    """A value that can be sent; what it is stays out of the message, since it may be a secret."""
    if not (value.isascii() and value.isprintable()):
        raise InputError(f"The {name} must be printable ASCII on one line.")
    return value


def _text(label: Any) -> str:
    """A label as it is sent; a missing one is no class."""
    try:
        missing = label is None or bool(label != label)
    except (TypeError, ValueError):  # such as pandas.NA, which does not even differ from itself
        missing = True
    if missing:
        raise InputError(f"A label is {label!r}: it is missing. Leave its image out, or name the class.")
    return str(label)


def _problem(error: urllib.error.HTTPError) -> ServiceError:
    try:
        document = json.loads(error.read(65536))
        return ServiceError(str(document["detail"]), error.code, str(document["code"]))
    except (ValueError, KeyError, TypeError, OSError, HTTPException):
        return ServiceError(f"The service answered {error.code} {error.reason}.", error.code, "unexpected")


def _encode_all(images: Sequence[ImageLike]) -> list[str]:
    shape = tuple(getattr(images, "shape", ()))
    one = isinstance(images, str | bytes | bytearray | memoryview | os.PathLike) or not isinstance(images, Iterable)
    if one or len(shape) == 2 or (len(shape) == 3 and shape[2] in (1, 3, 4)):
        raise InputError("One image was given where a list of images is expected: give [image].")
    return [_encode(image) for image in images]


def _encode(image: ImageLike) -> str:
    if isinstance(image, str | os.PathLike):
        image = Path(image).read_bytes()
    if not isinstance(image, bytes | bytearray | memoryview):
        image = _png(image)
    return base64.b64encode(image).decode()


def _png(image: Any) -> bytes:
    """A PIL image or an array as a file."""
    import numpy as np
    from PIL import Image

    if not isinstance(image, Image.Image):
        pixels = np.asarray(image)
        flat = pixels.ndim == 2 or (pixels.ndim == 3 and pixels.shape[2] in (1, 2, 3, 4))
        if pixels.dtype != np.uint8 or not flat:
            raise InputError(
                f"An image of {pixels.dtype} and shape {pixels.shape} was given; use a path, bytes, a PIL image, or a "
                "uint8 array H×W×C or H×W."
            )
        image = Image.fromarray(pixels[:, :, 0] if pixels.ndim == 3 and pixels.shape[2] == 1 else pixels)
    if image.mode == "I" and image.format == "TIFF" and max(getattr(image, "tag_v2", {}).get(258, (32,))) > 16:
        raise InputError('A PIL image has 32 bits (mode I); bring it to 0 to 255, then image.convert("L").')
    file = io.BytesIO()
    try:
        _upright(image).save(file, "PNG")
    except (OSError, ValueError) as error:
        raise InputError(f"A PIL image of mode {image.mode} cannot be sent ({error}); convert it to RGB.") from error
    return file.getvalue()


def _upright(image: Any) -> Any:
    """A PIL image as a PNG can hold it, turned as its EXIF says, which the PNG would not keep."""
    from PIL import ImageOps

    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16"):  # in whatever order of bytes; Pillow would cut every value above 255 for RGB
        image = image.convert("I")
    if image.mode in ("1", "L", "LA", "P", "RGB", "RGBA", "F"):
        return image
    return image.convert({"I": "I;16", "La": "LA", "RGBa": "RGBA", "PA": "RGBA"}.get(image.mode, "RGB"))
