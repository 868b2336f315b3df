"""Encoders by name, for the command line. A name is only ever taken from the person who starts the service."""

from __future__ import annotations

import importlib
import os
import sys

from torch import nn

from scrlearn.errors import InputError
from scrlearn.randomness import seeded
from scrlearn.service.settings import DEFAULT_ENCODER, ModelConfig


def make_encoder(config: ModelConfig) -> nn.Module | None:
    """The encoder of this name; None for the built-in one.

    Examples
    --------
    >>> make_encoder(ModelConfig()) is None
    True
    >>> make_encoder(ModelConfig(encoder="resnet"))
    Traceback (most recent call last):
    ...
    scrlearn.errors.InputError: There is no encoder "resnet". Give "reduced-resnet18", "timm:NAME", or \
"PACKAGE.MODULE:FUNCTION" with a function that gives a torch module.
    """
    if config.encoder == DEFAULT_ENCODER:
        return None
    source, colon, name = config.encoder.partition(":")
    if not colon or not source or not name:
        raise InputError(
            f'There is no encoder "{config.encoder}". Give "{DEFAULT_ENCODER}", "timm:NAME", or '
            '"PACKAGE.MODULE:FUNCTION" with a function that gives a torch module.'
        )
    with seeded(config.seed, "encoder"):  # its first weights are part of what must come out the same again
        encoder = _timm(name, config) if source == "timm" else _function(source, name)
    if not isinstance(encoder, nn.Module):
        raise InputError(f"{config.encoder} gave a {type(encoder).__name__}; a torch.nn.Module is needed.")
    return encoder


def _timm(name: str, config: ModelConfig) -> object:
    try:
        import timm
    except ImportError:
        raise InputError(f'Encoder "timm:{name}" needs timm: pip install timm.') from None
    try:
        return timm.create_model(name, pretrained=False, num_classes=0, in_chans=config.channels)
    except Exception as error:  # timm raises many kinds for a name it does not know
        raise InputError(f'timm has no model "{name}": {error}.') from error


def _function(module: str, name: str) -> object:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # a file beside the person's work, as `python -m` finds it
    try:
        return getattr(importlib.import_module(module), name)()
    except (ImportError, AttributeError, TypeError) as error:
        raise InputError(f'The encoder "{module}:{name}" cannot be made: {error}.') from error
