"""Settings: pydantic models built from keywords, a YAML file and ``CACHEGEN_RAG_...`` environment variables.

>>> settings = Settings(store={"size_limit": "2GiB"}, stream={"slo": "250ms"})
>>> settings.store.size_limit, settings.stream.slo
(2147483648, 0.25)
>>> load_settings(environment=False, store={"size_limit": "2GB!"})
Traceback (most recent call last):
    ...
cachegen_rag.errors.ConfigError: store.size_limit = '2GB!': not a size; write bytes or one like 500MB or 2GiB

Keywords win over the environment, the environment over the file, the file over the defaults. Environment and file
need the ``settings`` extra; nested fields are joined by two underscores: ``CACHEGEN_RAG_STORE__SIZE_LIMIT=2GiB``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, ValidationError, field_validator

from cachegen_rag.errors import ConfigError, MissingDependencyError

ENV_PREFIX = "CACHEGEN_RAG_"
MAX_CONTEXT = 1 << 20
"""Upper limit of ``model.n_ctx``, tokens."""
MIN_STORE_BYTES = 1 << 20
"""Lower limit of ``store.size_limit``: a smaller store could not hold one document."""

_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[kmgt]?i?b?)", re.IGNORECASE)
_SECRET_URL = re.compile(r"https?:(/*[^/]*@|.*[?#])", re.IGNORECASE | re.DOTALL)
_SCALE = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_DURATION = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>us|ms|s|sec|min|m|h|d)?", re.IGNORECASE)
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_size(value: object) -> int:
    """Bytes from an int or from text such as ``"500MB"`` (10^6) or ``"2GiB"`` (2^30). Raises ValueError."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise ValueError("not a size; write bytes or one like 500MB or 2GiB")
    unit = match["unit"].lower()
    scale = 1024 if "i" in unit else 1000
    return int(float(match["number"]) * scale ** _SCALE[unit.rstrip("b").rstrip("i")])


def parse_duration(value: object) -> float:
    """Seconds from a number or from text such as ``"250ms"``, ``"2s"``, ``"5min"`` or ``"1h"``. Raises ValueError."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    match = _DURATION.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise ValueError("not a duration; write seconds or one like 250ms, 2s, 5min or 1h")
    return float(match["number"]) * _SECONDS[(match["unit"] or "s").lower()]


Size = Annotated[int, BeforeValidator(parse_size)]
"""A number of bytes, or text such as ``"2GiB"``."""
Duration = Annotated[float, BeforeValidator(parse_duration)]
"""Seconds, or text such as ``"250ms"``."""


def user_cache() -> Path:
    """Where this user's store and index lie: ``$XDG_CACHE_HOME/cachegen-rag``, by default ``~/.cache/cachegen-rag``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "cachegen-rag"


def default_store_url() -> str:
    """The ``file://`` URL of this user's store."""
    return (user_cache() / "store").as_uri()


def check_shown_url(url: str) -> str:
    """``url``, unless it is an HTTP one with user info, query or fragment. Raises ValueError.

    Settings are shown in many places, so a URL that may hold a secret gets into none of them.
    """
    if _SECRET_URL.match(url):
        raise ValueError("holds credentials, a query or a fragment; write https://host/base and pass the token apart")
    return url


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, hide_input_in_errors=True)


class ModelSettings(_Section):
    """The model and the context it answers in."""

    path: Path | None = Field(default=None, description="GGUF file; none takes the small model of the demo extra")
    n_ctx: int = Field(
        default=8192, ge=64, le=MAX_CONTEXT, description="tokens that prompt and answer may have together"
    )
    n_batch: int = Field(default=512, ge=1, le=MAX_CONTEXT, description="tokens computed at once in a prefill")
    n_threads: int | None = Field(default=None, ge=1, description="threads that compute; none takes all cores")


class StoreSettings(_Section):
    """Where compressed KV is kept."""

    url: str = Field(default_factory=default_store_url, description="a directory, file://, memory:// or http(s)://")
    size_limit: Size = Field(
        default=10 << 30, ge=MIN_STORE_BYTES, description="bytes a directory may take before it evicts"
    )
    token: SecretStr | None = Field(default=None, description="bearer token of an HTTP store")
    tier: Path | None = Field(default=None, description="directory in which objects of an HTTP store are kept")
    salt: SecretStr | None = Field(default=None, description="keeps the keys of tenants of one store apart")
    timeout: Duration = Field(default=10.0, gt=0, description="how long one request to an HTTP store may take")

    @field_validator("url")
    @classmethod
    def _without_secrets(cls, url: str) -> str:
        return check_shown_url(url)


class CodecSettings(_Section):
    """How KV is compressed."""

    profile: Path | None = Field(
        default=None, description="profile made by `calibrate`; none takes the one shipped or generic"
    )
    level: int | None = Field(default=None, ge=0, description="0 is the finest; none takes the profile's default")


class StreamSettings(_Section):
    """How KV is fetched while a prompt is built."""

    slo: Duration | None = Field(
        default=None, gt=0, description="time to first token to keep; picks levels on a slow link"
    )


class Settings(_Section):
    """All settings. Fields are frozen; use ``model_copy(update=...)`` for another set."""

    model: ModelSettings = ModelSettings()
    store: StoreSettings = Field(default_factory=lambda: StoreSettings())
    codec: CodecSettings = CodecSettings()
    stream: StreamSettings = StreamSettings()
    index: Path = Field(
        default_factory=lambda: user_cache() / "index.jsonl",
        description="texts that `prefill` split and `ask` searches",
    )
    recompute: int | None = Field(
        None, ge=0, description="tokens recomputed at the head of each document; none measures"
    )
    store_missed: bool | None = Field(
        default=None,
        description="store documents that a request missed, when idle; none does on a store that is not remote",
    )
    shadow_fraction: float = Field(
        default=0.0, ge=0, le=1, description="of the spliced requests, how many are computed in full too, when idle"
    )
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "WARNING"


def expect(name: str, value: object, kind: type | tuple[type, ...], wanted: str) -> None:
    """Raise ConfigError unless ``value`` is of this type; True and False are no numbers."""
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ConfigError(f"{name} must be {wanted}, got {value!r:.80}")


def expect_callable(name: str, value: object) -> None:
    """Raise ConfigError unless ``value`` is a function or None."""
    if value is not None and not callable(value):
        raise ConfigError(f"{name} must be a function or None, got {value!r:.80}")


class CacheArguments(_Section):
    """The plain arguments of a :class:`cachegen_rag.KVCache`, by type and range."""

    model_config = ConfigDict(strict=True, arbitrary_types_allowed=True)

    level: int | None = Field(ge=0)
    levels: Sequence[Annotated[int, Field(ge=0)]] | None
    chunk_tokens: int = Field(ge=1)
    max_document_tokens: int | None = Field(ge=1)
    salt: str
    splice: bool
    store_missed: bool | None
    shadow_fraction: float = Field(ge=0, le=1)
    exact_bytes: int = Field(ge=0)
    slo: float | None = Field(gt=0, allow_inf_nan=False)
    loader: Callable[..., Any]
    on_request: Callable[..., Any] | None
    on_shadow: Callable[..., Any] | None

    @field_validator("salt")
    @classmethod
    def _is_unicode(cls, salt: str) -> str:
        salt.encode()  # a lone surrogate is a UnicodeEncodeError, which is a ValueError
        return salt

    @classmethod
    def check(cls, **arguments: Any) -> None:
        """Raise ConfigError, naming every argument that is wrong."""
        try:
            cls(**arguments)
        except ValidationError as error:
            raise ConfigError(explain(error)) from None


def explain(error: ValidationError) -> str:
    """One line a field: its path, the value that was given and what is accepted. Secrets are not shown.

    Nor is what may hold one: a URL, or a value that stands where a whole section belongs.
    """
    lines = []
    for item in error.errors(include_url=False):
        name = ".".join(str(part) for part in item["loc"]) or "settings"
        message = item["msg"].removeprefix("Value error, ")
        single = isinstance(item["input"], (str, int, float, Path)) or item["input"] is None
        secret = not single or _is_section(name) or name.endswith(("token", "salt", "url"))
        value = "" if secret or item["type"] == "missing" else f" = {item['input']!r:.80}"
        if item["type"] == "extra_forbidden":
            value, message = "", "no such setting"
        lines.append(f"{name}{value}: {message}")
    return "\n".join(lines)


def _is_section(name: str) -> bool:
    field = Settings.model_fields.get(name)
    return field is not None and isinstance(field.annotation, type) and issubclass(field.annotation, _Section)


def load_settings(file: str | Path | None = None, *, environment: bool = True, **values: Any) -> Settings:
    """Settings from keywords, the environment and a YAML file, in that order of precedence.

    Raises
    ------
    ConfigError
        A value is wrong or unknown (the message names every such field), or the file cannot be read.
    MissingDependencyError
        A file or environment variables are given and the ``settings`` extra is not installed.
    """
    has_environment = bool([name for name in os.environ if _is_setting(name)]) if environment else False
    try:
        if file is None and not has_environment:
            return Settings(**values)
        return _from_sources(Path(file) if file is not None else None, has_environment, values)
    except ValidationError as error:
        raise ConfigError(explain(error)) from None


def _is_setting(name: str) -> bool:
    """Whether an environment variable is one of ours; one that looks like a setting and is none is a ConfigError."""
    if not name.upper().startswith(ENV_PREFIX):
        return False
    section, nested, _ = name[len(ENV_PREFIX) :].lower().partition("__")
    if nested and section not in Settings.model_fields:
        raise ConfigError(f"environment {name}: no such setting; sections are {', '.join(Settings.model_fields)}")
    return section in Settings.model_fields


def _from_sources(file: Path | None, environment: bool, values: Mapping[str, Any]) -> Settings:
    try:
        import yaml
        from pydantic_settings import BaseSettings, EnvSettingsSource, InitSettingsSource, SettingsConfigDict
        from pydantic_settings.exceptions import SettingsError
    except ImportError as error:
        raise MissingDependencyError(
            "settings from a file or the environment need pydantic-settings and pyyaml: "
            "pip install 'cachegen-rag[settings]'"
        ) from error

    from_file: Any = {}
    if file is not None:
        try:
            from_file = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
        except yaml.YAMLError as error:  # its own text quotes the file, secrets and all
            mark = getattr(error, "problem_mark", None)
            where = f", line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
            raise ConfigError(f"cannot read settings from {file}{where}: not valid YAML") from None
        except (OSError, UnicodeError) as error:
            reason = "not UTF-8 text" if isinstance(error, UnicodeError) else error
            raise ConfigError(f"cannot read settings from {file}: {reason}") from None
        if not isinstance(from_file, dict):
            raise ConfigError(f"{file} must hold a mapping of settings, got {type(from_file).__name__}")

    class Sources(Settings, BaseSettings):
        model_config = SettingsConfigDict(
            env_prefix=ENV_PREFIX, env_nested_delimiter="__", extra="forbid", frozen=True, env_ignore_empty=True
        )

        @classmethod
        def settings_customise_sources(cls, settings_cls: type[BaseSettings], *args: Any, **sources: Any) -> Any:
            order: list[Any] = [InitSettingsSource(settings_cls, init_kwargs=dict(values))]
            if environment:
                order.append(EnvSettingsSource(settings_cls))
            return (*order, InitSettingsSource(settings_cls, init_kwargs=from_file))

    try:
        merged = Sources(recompute=None)
    except SettingsError as error:
        raise ConfigError(f"environment {ENV_PREFIX}*: {error}") from None
    return Settings(**merged.model_dump(exclude_unset=True))
