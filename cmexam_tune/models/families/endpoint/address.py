"""Where a server listens and what key it gets: a key stands in the environment, and in no file, log or message."""

import os
import re
from urllib.parse import urlsplit

from cmexam_tune.config import ModelConfig
from cmexam_tune.core.errors import ConfigError

NO_KEY = "EMPTY"
"""What is sent where no key is named: never a key in the environment for another address."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def address(model: ModelConfig) -> str:
    """Return `model.base_url`.

    Raises:
        ConfigError: there is none, it is no address, or it holds a key.
    """
    url = model.base_url
    if not url:
        raise ConfigError("model.base_url: family endpoint needs the server's address, e.g. http://127.0.0.1:8000/v1.")
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 - reading it checks it
    except ValueError:
        raise ConfigError("model.base_url: is no address. An example: http://127.0.0.1:8000/v1.") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            "model.base_url: must start with http:// or https:// and a host, e.g. http://127.0.0.1:8000/v1."
        )
    if parts.username or parts.password or parts.query:
        raise ConfigError(
            "model.base_url: holds a user, a password or a query, and would be written to every run. Put the key into "
            "an environment variable and its name into model.api_key_env."
        )
    return url


def key(model: ModelConfig) -> str:
    """Return the key in the environment variable that `model.api_key_env` names, or `NO_KEY` where it names none.

    Raises:
        ConfigError: no such variable, or something that is no name of one (it is not repeated: it may be the key).
    """
    name = model.api_key_env
    if name is None:
        return NO_KEY
    if not _NAME.fullmatch(name):
        raise ConfigError("model.api_key_env: must be the name of an environment variable, not the key itself.")
    shown = name if name.isupper() else "that it names"
    if not (value := os.environ.get(name, "").strip()):
        raise ConfigError(f"model.api_key_env: the environment variable {shown} is not set. Export it first.")
    if not (value.isascii() and value.isprintable()):
        raise ConfigError(f"model.api_key_env: the environment variable {shown} holds no key: only ASCII.")
    return value
