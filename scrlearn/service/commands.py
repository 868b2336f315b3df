"""`scr serve`: the command."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from scrlearn.service.ray_serve import RayPlan

# what needs torch or FastAPI is imported by the command, so that help stays quick


def serve(
    state: Annotated[Path, typer.Option(help="Directory of the state; made if it is not there.")],
    method: Annotated[str | None, typer.Option(help="A name of `scr methods`. (default: scr)")] = None,
    memory: Annotated[int | None, typer.Option(min=1, help="Images kept. (default: 2000)")] = None,
    image_size: Annotated[int | None, typer.Option(min=1, help="Side of the images learned. (default: 32)")] = None,
    grey: Annotated[
        bool | None, typer.Option("--grey/--colour", help="One channel or three. (default: colour)")
    ] = None,
    encoder: Annotated[
        str | None,
        typer.Option(help="reduced-resnet18, timm:NAME, or PACKAGE.MODULE:FUNCTION. (default: reduced-resnet18)"),
    ] = None,
    classifier: Annotated[str | None, typer.Option(help="How to answer. (default: the method's)")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Images learned in one step. (default: 10)")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Fixes everything random. (default: 0)")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:1. (default: auto)")] = None,
    precision: Annotated[str | None, typer.Option(help="auto, bf16, tf32, fp32. (default: auto)")] = None,
    threads: Annotated[
        int | None, typer.Option(min=0, help="Threads of a learning step. (default: half of the cores)")
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option("--option", "-O", metavar="NAME=VALUE", help="Any option of the method (`scr methods NAME`)."),
    ] = None,
    host: Annotated[str, typer.Option(help="Where to listen; beyond this machine only with a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8000,
    token_file: Annotated[Path | None, typer.Option(help="File with the secret that clients must send.")] = None,
    allow_host: Annotated[
        list[str] | None, typer.Option(help="A further host name to answer to without a token (that of a proxy).")
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Answer from a Ray cluster: local, auto or HOST:PORT."),
    ] = None,
    replicas: Annotated[int, typer.Option(min=1, help="With --ray: copies of the model that answer.")] = 2,
    replica_cpus: Annotated[int, typer.Option(min=1, help="With --ray: CPUs and threads of each.")] = 1,
    replica_gpus: Annotated[float, typer.Option(min=0, help="With --ray: GPUs of each.")] = 0,
    known_share: Annotated[
        float, typer.Option(min=0.5, max=1.0, help="Share of its stored images that a class takes for its own.")
    ] = 0.95,
) -> None:
    """Serve a model that learns over HTTP, and survives any crash: teach it, ask it, look at it in a browser.

    A new state directory is made with the options given; an old one is gone on with, and options may be left out.
    """
    from scrlearn.service.run import read_token
    from scrlearn.service.run import serve as run
    from scrlearn.service.settings import Limits

    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    chosen = {
        "method": method,
        "memory_size": memory,
        "image_size": image_size,
        "channels": None if grey is None else 1 if grey else 3,
        "encoder": encoder,
        "classifier": classifier,
        "batch_size": batch_size,
        "seed": seed,
        "device": device,
        "precision": precision,
        "threads": threads,
        "options": named_values(option) if option else None,
    }
    run(
        state,
        {name: value for name, value in chosen.items() if value is not None},
        host=host,
        port=port,
        token=None if token_file is None else read_token(token_file),
        hosts=frozenset(allow_host or ()),
        limits=Limits(quantile=known_share),
        ray=None if ray is None else _plan(ray, replicas, replica_cpus, replica_gpus),
        ready=lambda address: typer.echo(f"Serving {state} on {address}"),
    )


def _plan(address: str, replicas: int, cpus: int, gpus: float) -> RayPlan:
    from scrlearn.service.ray_serve import RayPlan

    return RayPlan(address, replicas, cpus, gpus)


def named_values(given: list[str]) -> dict[str, Any]:
    """NAME=VALUE; the value is JSON where it is JSON, else text."""
    options: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise typer.BadParameter(f'"{text}" is not NAME=VALUE, such as temperature=0.2.', param_hint="--option")
        name = name.replace("-", "_")
        if name in options:
            raise typer.BadParameter(f"{name} was given twice.", param_hint="--option")
        try:
            options[name] = json.loads(value)
        except json.JSONDecodeError:
            options[name] = value
    return options
