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


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(
            (name, value)
            for name in ("max_tokens", "seed", "top_k", "logprobs", "repeat_last_n")
            for value in (1.5, "3")
        ),
        *((name, value) for name in ("temperature", "top_p", "repeat_penalty") for value in ("1", None, [1])),
        ("top_k", 1 << 40),
        ("repeat_penalty", 1e-320),
        ("presence_penalty", -1e308),
        ("stop", (1,)),
        ("stop", 5),
        ("grammar", 5),
        ("grammar", "root ::= \0"),
        ("grammar", 'root ::= "\ud800"'),
        ("grammar", "root ::= " + "(" * 200_000 + '"a"' + ")" * 200_000),
        ("grammar", "root ::= " + "(" * 201 + '"a"' + ")" * 201),
        ("grammar", 'root ::= "' + "a" * (1 << 18) + '"'),
    ],
    ids=lambda value: f"{value!r:.20}",
)
def test_settings_that_no_engine_could_take(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=field) as caught:
        Sampling(**{field: value})
    assert len(str(caught.value)) < 200


def test_settings_that_are_made_plain() -> None:
    given: dict[Any, tuple[str, ...]] = {None: (), "ab": ("ab",), ("a", "b"): ("a", "b")}
    for stop, wanted in given.items():
        assert Sampling(stop=stop).stop == wanted
    assert Sampling(stop=["a"]).stop == ("a",)  # type: ignore[arg-type]
    assert Sampling(temperature=1e-39).temperature == 0.0
    Sampling(grammar='root ::= "' + "(" * 500 + r'\"(" [(\](] # ' + "(" * 500 + "\n")  # no groups among them
    Sampling(grammar="root ::= " + "(" * 200 + '"a"' + ")" * 200)


@pytest.mark.parametrize("repeat_last_n", [2**31 - 1, 2**40])
def test_penalties_look_back_over_the_context_at_most(tiny_model: Any, repeat_last_n: int) -> None:
    def ids(last: int) -> list[int]:
        with tiny_model.session() as session:
            session.decode([5, 6, 7])
            sampling = Sampling(max_tokens=8, repeat_penalty=1.3, repeat_last_n=last)
            return [token.id for token in session.generate(sampling)]

    assert ids(repeat_last_n) == ids(tiny_model.n_ctx)
