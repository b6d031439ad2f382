"""A model's chat template, rendered around placeholders: what callers say never passes through the template engine."""

from __future__ import annotations

import functools
import re
import secrets
from typing import Any

from cachegen_rag.errors import ConfigError

# Private-use characters, which no template produces or strips, and a number that nobody outside this process knows:
# what a caller hands to the template (roles are checked, template_args are not) cannot act as a placeholder.
_OPEN, _CLOSE = f"\ue000{secrets.randbits(64)}.", "\ue001"
PLACEHOLDER = re.compile(re.escape(_OPEN) + "(b|e|[0-9]+)" + _CLOSE)
"""Splits what was rendered; in between stand a part's number, or b and e for the template's BOS and EOS."""
_BOS, _EOS = f"{_OPEN}b{_CLOSE}", f"{_OPEN}e{_CLOSE}"


def placeholder(number: int) -> str:
    """What stands for part ``number`` while the template is rendered."""
    return f"{_OPEN}{number}{_CLOSE}"


def render(source: str, turns: list[dict[str, str]], generation: bool, arguments: dict[str, Any]) -> str:
    """Render messages; a template that refuses system ones gets them in front of the first user message.

    Raises ConfigError if the template cannot be read or refuses the messages.
    """
    import jinja2

    template = _template(source)

    def fill(messages: list[dict[str, str]]) -> str:
        return str(
            template.render(
                messages=messages, add_generation_prompt=generation, bos_token=_BOS, eos_token=_EOS, **arguments
            )
        )

    try:
        return fill(turns)
    except jinja2.TemplateError as error:
        system = [t["content"] for t in turns if t["role"] == "system"]
        others = [dict(t) for t in turns if t["role"] != "system"]
        if system and others:
            others[0]["content"] = "\n\n".join([*system, others[0]["content"]])
            try:
                return fill(others)
            except jinja2.TemplateError:
                pass
        raise ConfigError(f"the model's chat template refuses these messages: {error}") from error


def render_plain(turns: list[dict[str, str]], generation: bool) -> str:
    """What a model without a template gets: ``Role: content`` lines."""

    def line(role: str, content: str) -> str:
        return f"{content}\n\n" if role == "system" else f"{role.title()}: {content}\n"

    return "".join(line(**turn) for turn in turns) + ("Assistant:" if generation else "")


@functools.lru_cache(maxsize=16)
def _template(source: str) -> Any:
    """Compile a chat template as transformers does, in jinja2's sandbox: a template is the model file's, not ours."""
    import jinja2
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise ConfigError(f"the model's chat template cannot be read: {error}") from error


def _raise(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    from datetime import datetime

    return datetime.now().strftime(form)
