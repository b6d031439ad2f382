"""Where a remote store is and who asks: URLs and credentials, checked before anything is sent."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from pydantic import SecretStr

from cachegen_rag.errors import ConfigError


def check_url(url: str) -> str:
    """``url`` without a trailing slash, if it is one of an HTTP store. Raises ConfigError.

    The message never quotes the URL, only its host: user info, query and fragment may be secrets.
    """
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:  # its text quotes the URL
        raise ConfigError("the store's URL is malformed") from None
    if "@" in parts.netloc:
        raise ConfigError("the store's URL holds credentials; pass token= or auth= instead")
    if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment:
        raise ConfigError("an HTTP store is https://host/base without query or fragment")
    if any(c <= " " or c == "\\" for c in url) or ".." in parts.path.split("/"):
        raise ConfigError("the store's URL holds characters that do not belong there (spaces, backslashes, ..)")
    if parts.scheme == "http" and not _loopback(host):
        raise ConfigError(f"http://{host:.100}: plain http is for loopback addresses only; use https")
    return url.rstrip("/")


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def secret(value: str | SecretStr) -> str:
    text = value.get_secret_value() if isinstance(value, SecretStr) else value
    if not isinstance(text, str) or not text.isprintable() or not text.isascii():
        raise ConfigError("the store's credentials hold characters that cannot be sent in a header")
    return text


def bearer(token: str | SecretStr | None) -> dict[str, str]:
    return {} if token is None else {"Authorization": f"Bearer {secret(token)}"}
