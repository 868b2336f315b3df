"""The durable HTTP service: it learns from labelled images as they arrive, and answers at the same time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = ["Client", "Limits", "ModelConfig", "Service", "ServiceError", "create_app", "serve"]

if TYPE_CHECKING:
    from scrlearn.service.app import create_app
    from scrlearn.service.client import Client, ServiceError
    from scrlearn.service.core import Service
    from scrlearn.service.run import serve
    from scrlearn.service.settings import Limits, ModelConfig

_HOME = {
    "Client": "client",
    "ServiceError": "client",
    "Limits": "settings",
    "ModelConfig": "settings",
    "Service": "core",
    "create_app": "app",
    "serve": "run",
}


def __getattr__(name: str) -> Any:
    # a client needs neither torch nor FastAPI, so each name brings only what it needs
    if name in _HOME:
        from importlib import import_module

        return getattr(import_module(f"scrlearn.service.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
