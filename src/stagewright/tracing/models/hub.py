"""Configs from the Hugging Face hub: out of the local cache when they are there, else over the network."""

from __future__ import annotations

import os
import socket
import urllib.request
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import urlparse

from stagewright.errors import InputError, nearest


def hub_config(identifier: str, bundled: Iterable[str]) -> Path:
    """Return the path of the config.json of the model `identifier` (`owner/name`).

    `bundled` are the names the argument was compared with before; the nearest of them is suggested by the
    `InputError` that is raised when the config cannot be had.
    """
    from huggingface_hub import constants, hf_hub_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RemoteEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        return Path(hf_hub_download(identifier, "config.json", local_files_only=True))
    except LocalEntryNotFoundError:
        pass
    try:
        if constants.HF_HUB_OFFLINE:
            raise LocalEntryNotFoundError("HF_HUB_OFFLINE is set")
        if not _reachable(constants.ENDPOINT):
            raise LocalEntryNotFoundError(f"{urlparse(constants.ENDPOINT).hostname} cannot be reached")
        return Path(hf_hub_download(identifier, "config.json", etag_timeout=5))
    except LocalEntryNotFoundError as error:
        why = f"its config.json is not in the local cache and this machine is offline ({error})"
        fix = "connect, or copy the config.json here and give its path"
    except GatedRepoError:
        why, fix = "access to it is gated", "accept its licence on its page, then run `hf auth login`"
    except RepositoryNotFoundError:
        why, fix = (
            "the hub has no such public model",
            "check the spelling, or run `hf auth login` if it is private",
        )
    except RemoteEntryNotFoundError:
        why, fix = "it has no config.json", "name a model in the transformers format"
    except (HfHubHTTPError, OSError) as error:
        why, fix = (
            f"the hub did not answer ({type(error).__name__})",
            "try again, or give the path of a config.json",
        )
    last = identifier.rsplit("/", 1)[-1].lower()
    raise InputError(
        f"'{identifier}' was looked up as a bundled config{nearest(last, bundled)}, as a path and as a "
        f"Hugging Face id, but none can be used: {why}; {fix}"
    )


def _reachable(endpoint: str) -> bool:
    """Return whether the hub's host name resolves; saves an offline user half a minute of retries.

    A machine behind a proxy need not resolve names, so there the question is left to the proxy.
    """
    if urllib.request.getproxies().get("https") or os.environ.get("ALL_PROXY"):
        return True
    try:
        socket.getaddrinfo(urlparse(endpoint).hostname, 443)
    except OSError:
        return False
    return True
