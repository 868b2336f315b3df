"""What can go wrong, in the words and numbers of HTTP (RFC 9457), without any web framework."""

from __future__ import annotations

from typing import Any

from scrlearn.errors import ScrlearnError

PROBLEMS: dict[str, tuple[int, str]] = {
    "malformed": (400, "The request cannot be read"),
    "unauthorised": (401, "A token is needed"),
    "forbidden": (403, "Not from here"),
    "not-found": (404, "Not found"),
    "method-not-allowed": (405, "Method not allowed"),
    "too-slow": (408, "The request took too long to arrive"),
    "too-large": (413, "Too large"),
    "media-type": (415, "Unsupported media type"),
    "invalid": (422, "Invalid input"),
    "bad-image": (422, "An image cannot be used"),
    "key-reused": (422, "The idempotency key belongs to another request"),
    "too-many-classes": (422, "Too many classes"),
    "busy": (429, "Too busy"),
    "internal": (500, "Internal error"),
    "stopping": (503, "The service is stopping"),
    "learning-stopped": (503, "Learning has stopped"),
    "not-written": (503, "The journal cannot be written"),
    "disk-full": (507, "No space left"),
}


class Problem(ScrlearnError):
    """A refusal that a person, and a program, can act on.

    Parameters
    ----------
    code
        A key of `PROBLEMS`; it fixes the status and the title.
    detail
        What was given, what was expected, what to do.
    retry_after
        Seconds after which trying again makes sense.
    **extra
        Further members of the problem document.

    Examples
    --------
    >>> problem = Problem("busy", "2,000 images wait to be learned.", retry_after=3)
    >>> problem.status, problem.document()["title"]
    (429, 'Too busy')
    """

    def __init__(self, code: str, detail: str, *, retry_after: float | None = None, **extra: Any) -> None:
        super().__init__(detail)
        self.code, self.detail, self.extra = code, detail, extra
        self.status, self.title = PROBLEMS[code]
        self.retry_after = None if retry_after is None else max(1, round(retry_after))

    def document(self) -> dict[str, Any]:
        """The problem as JSON."""
        about = {"type": "about:blank", "title": self.title, "status": self.status, "detail": self.detail}
        return about | {"code": self.code} | self.extra

    def headers(self) -> dict[str, str]:
        """Headers that belong to the answer."""
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        return headers | ({"WWW-Authenticate": "Bearer"} if self.status == 401 else {})


def stopping() -> Problem:
    """What is said to those who come while the service ends."""
    return Problem("stopping", "The service is being stopped. Try again when it is back.", retry_after=5)
