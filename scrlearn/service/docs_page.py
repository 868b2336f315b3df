"""The description of the interface as one plain page: nothing is loaded from anywhere else."""

from __future__ import annotations

import base64
import hashlib
from html import escape
from typing import Any

STYLE = """
:root { color-scheme: light dark }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
code, pre { font-family: ui-monospace, monospace; font-size: .9em }
section { border-top: 1px solid #8888; margin-top: 2rem }
h2 { font-size: 1.1rem } table { border-collapse: collapse }
td, th { border: 1px solid #8888; padding: .2rem .6rem; text-align: left; vertical-align: top }
"""
_HASH = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
POLICY = f"default-src 'none'; style-src 'sha256-{_HASH}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


def render(openapi: dict[str, Any]) -> str:
    """The page for an OpenAPI description.

    Examples
    --------
    >>> info = {"title": "T", "description": "D", "version": "1"}
    >>> "<h1>T 1</h1>" in render({"info": info, "paths": {}})
    True
    """
    info = openapi["info"]
    parts = [
        _operation(method.upper(), path, operation)
        for path, methods in openapi["paths"].items()
        for method, operation in methods.items()
    ]
    title = f"{escape(info['title'])} {escape(info['version'])}"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head><body><main><h1>{title}</h1>'
        f'<p>{escape(info["description"])}</p><p>For programs: <a href="/openapi.json">openapi.json</a></p>'
        f"{''.join(parts)}</main></body></html>"
    )


def _operation(method: str, path: str, operation: dict[str, Any]) -> str:
    content: dict[str, Any] = operation.get("requestBody", {}).get("content", {})
    fields = {k: v for body in content.values() for k, v in body["schema"]["properties"].items()}  # alike in each kind
    named = [(p["name"], p["in"], p.get("description", "")) for p in operation.get("parameters", [])]
    named += [(name, "body", field.get("description", "")) for name, field in fields.items()]
    parameters = "".join(
        f"<tr><td><code>{escape(name)}</code></td><td>{escape(where)}</td><td>{escape(about)}</td></tr>"
        for name, where, about in named
    )
    table = f"<table><tr><th>parameter</th><th>in</th><th></th></tr>{parameters}</table>" if parameters else ""
    bodies = ", ".join(f"<code>{escape(kind)}</code>" for kind in content)
    body = f"<p>Body: {bodies}</p>" if bodies else ""
    statuses = ", ".join(f"{escape(code)} {escape(r['description'])}" for code, r in operation["responses"].items())
    return (
        f"<section><h2><code>{method} {escape(path)}</code></h2><p>{escape(operation.get('description', ''))}</p>"
        f"{table}{body}<p>Answers: {statuses}</p></section>"
    )
