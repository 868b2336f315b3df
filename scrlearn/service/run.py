"""Running the service: a socket, a server, and an orderly end."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scrlearn.cluster import connected
from scrlearn.errors import InputError
from scrlearn.service.settings import Limits

if TYPE_CHECKING:
    import uvicorn

    from scrlearn.service.core import Service
    from scrlearn.service.ray_serve import RayPlan

GRACE_SECONDS = 30


def serve(
    state: str | os.PathLike[str],
    config: Mapping[str, Any] | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    token: str | None = None,
    hosts: frozenset[str] = frozenset(),
    limits: Limits | None = None,
    ready: Callable[[str], None] = lambda address: None,
    ray: RayPlan | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT; then finish, write a snapshot, and return.

    Parameters
    ----------
    state, config, limits
        See `Service`.
    host, port
        Where to listen; port 0: any that is free. Anything but this machine itself needs a token.
    token
        What `Authorization: Bearer` must hold.
    hosts
        Further host names that requests without a token may come to.
    ready
        Called with the address when the service listens.
    ray
        Let copies of the model answer on a Ray cluster; None: answer here.
    """
    _check_installed()
    import uvicorn

    from scrlearn.service.app import create_app
    from scrlearn.service.core import Service
    from scrlearn.service.guard import Access, is_loopback

    access = Access(token, hosts)
    if token is None and not is_loopback(host):
        raise InputError(
            f'Host "{host}" can be reached from other machines, so a token is needed: --token-file FILE with a secret, '
            "made for instance by: openssl rand -hex 32"
        )
    listener = _listen(host, port)
    with listener, _reached(ray), Service(state, config, limits=limits) as service, _spread(service, ray):
        app = create_app(service, access)

        class Server(uvicorn.Server):
            """Lets go of whoever waits for something to be learned, so that the end does not wait for them."""

            def handle_exit(self, sig: int, frame: Any) -> None:
                service.release()
                app.state.demo.close()
                super().handle_exit(sig, frame)

        settings = uvicorn.Config(
            app,
            http="h11",  # one parser, whatever else is installed: others refuse more, and not as problem documents
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=GRACE_SECONDS,
        )
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
        shown = f"[{host}]" if ":" in host else host
        server = Server(settings)
        with _signals_are_no_errors(server), _what_is_loaded_stays():
            ready(f"http://{shown}:{listener.getsockname()[1]}")
            server.run(sockets=[listener])


def _reached(ray: RayPlan | None) -> contextlib.AbstractContextManager[object]:
    """The cluster, before anything else: one that cannot be reached is said at once."""
    return contextlib.nullcontext() if ray is None else connected(ray.address)


def _spread(service: Service, ray: RayPlan | None) -> contextlib.AbstractContextManager[object]:
    if ray is None:
        return contextlib.nullcontext()
    from scrlearn.service.ray_serve import predictors

    return predictors(service, ray)


def _check_installed() -> None:
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import python_multipart  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise InputError(f"The service needs {error.name}: pip install 'scrlearn[serve]'.") from None


def _listen(host: str, port: int) -> socket.socket:
    """The socket, before anything else: a port in use is said at once."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (socket.gaierror, UnicodeError) as error:
        raise InputError(f'There is no host "{host}": {error}.') from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise InputError(f"{host}:{port} cannot be listened on: {error.strerror}. Choose another --port.") from error
    return listener


@contextlib.contextmanager
def _signals_are_no_errors(server: uvicorn.Server) -> Iterator[None]:
    """Signals end the server, also before it listens to them; the one it raises again after its end does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: object) -> None:
        server.should_exit = True

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _what_is_loaded_stays() -> Iterator[None]:
    """Looking for garbage among all the objects of the libraries takes 0.2 s, in which nothing else runs; so do not."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def read_token(path: Path) -> str:
    """The secret in a file; spaces and line ends around it do not count."""
    try:
        text = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f'The token file "{path}" cannot be read: {error}.') from error
    if not text:
        raise InputError(f'The token file "{path}" is empty. Make a secret, for instance: openssl rand -hex 32')
    # systemd lets the service's user in by an access list, which shows as a right of the group
    ours = os.environ.get("CREDENTIALS_DIRECTORY") == str(path.parent)
    if os.name == "posix" and not ours and path.stat().st_mode & 0o077:
        logging.getLogger("scrlearn.service").warning('Others can read "%s": chmod 600 %s', path, path)
    return text
