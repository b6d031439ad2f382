"""The settings that every engine takes."""

from __future__ import annotations

from typing import Any

import pytest

from cachegen_rag.errors import ConfigError
from cachegen_rag.models.base import Sampling


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("top_p", 1.5),
        ("min_p", -0.1),
        ("repeat_penalty", 0.0),
        ("max_tokens", -1),
        ("stop", ("",)),
        ("logprobs", -1),
        ("repeat_last_n", -2),
        ("frequency_penalty", float("inf")),
        ("presence_penalty", float("nan")),
    ],
)
def test_settings_out_of_range(tiny_model: Any, field: str, value: Any) -> None:
    with tiny_model.session() as session:
        session.decode([1])
        with pytest.raises(ConfigError, match=field):
            session.generate(Sampling(**{field: value}))


def test_the_ends_of_the_ranges() -> None:
    Sampling(0, 0.0, 0, 0.0, 0.0, 1e-3, 0.0, 0.0, -1, 0, (), None, 0)
    Sampling(top_p=1.0, min_p=1.0, repeat_last_n=0, stop=("x",), max_tokens=None)
