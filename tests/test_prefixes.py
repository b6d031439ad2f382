"""Learning which leading combinations are worth storing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachegen_rag.errors import ConfigError
from cachegen_rag.prefixes import PrefixLearner, run_key
from cachegen_rag.prompt import Prompt, Segment
from cachegen_rag.splice import leading_runs


def prompt_of(*documents: str, question: int = 0) -> Prompt:
    segments = [Segment("text", (1, 2, 3))]
    for name in documents:
        segments += [Segment("document", tuple(10 + ord(c) for c in name)), Segment("text", (4,))]
    return Prompt((*segments[:-1], Segment("text", (5, 6, 7 + question))))


def test_a_run_is_wanted_once_it_recurs():
    learner = PrefixLearner(1000, 1)
    learner.observe(prompt_of("aaaa", "bb"))
    assert learner.wanted() == {} and learner.admit(prompt_of("aaaa", "bb")) == 0
    learner = PrefixLearner(1000, 1, min_count=1.5)
    learner.observe(prompt_of("aaaa", "bb"))
    learner.observe(prompt_of("aaaa", "c", question=1))
    first = prompt_of("aaaa", "bb", question=9)
    assert list(learner.wanted().values()) == [3, 4]  # the prefix, and what document a adds to it
    assert learner.admit(first) == 2
    learner.observe(first)
    assert learner.admit(first) == 4
    assert learner.admit(prompt_of("x")) == 1
    assert learner.evict([run_key(first, 2), "gone"]) == ["gone"]


def test_the_budget_goes_to_the_most_frequent_runs():
    learner = PrefixLearner(10 * 7, 10, min_count=1.5)
    for _ in range(4):
        learner.observe(prompt_of("aaaa"))
    for _ in range(2):
        learner.observe(prompt_of("bb"))
    assert learner.wanted() == {run_key(prompt_of("aaaa"), 1): 3, run_key(prompt_of("aaaa"), 2): 4}


def test_frequencies_fade():
    learner = PrefixLearner(1000, 1, min_count=1.5, half_life=5)
    for _ in range(3):
        learner.observe(prompt_of("old"))
    for n in range(20):
        learner.observe(prompt_of("new", question=n))
    assert learner.admit(prompt_of("old")) == 1  # the prefix is shared
    assert learner.admit(prompt_of("new")) == 2


requests = st.lists(st.lists(st.sampled_from(["a", "bb", "ccc", ""]), max_size=3), max_size=25)


@given(requests, st.integers(0, 60), st.integers(1, 40))
def test_wanted_runs_fit_the_budget_and_have_their_parents(asked, budget, nodes):
    learner = PrefixLearner(budget, 1.0, min_count=1.0, half_life=50, max_nodes=nodes)
    for documents in asked:
        learner.observe(prompt_of(*documents))
    wanted = learner.wanted()
    assert sum(wanted.values()) <= budget
    for documents in asked:
        prompt = prompt_of(*documents)
        runs = [n for n in sorted(leading_runs(prompt)) if prompt.offsets[n] > 0]
        keys = list(dict.fromkeys(run_key(prompt, n) for n in runs))
        flags = [key in wanted for key in keys]
        assert flags == sorted(flags, reverse=True)  # once a run is not wanted, nothing longer is
        assert learner.admit(prompt) == max((n for n in runs if run_key(prompt, n) in wanted), default=0)


@pytest.mark.parametrize(
    "wrong", [{"budget_bytes": -1}, {"bytes_per_token": 0}, {"half_life": 0}, {"max_nodes": 0}], ids=str
)
def test_numbers_out_of_range_are_named(wrong):
    with pytest.raises(ConfigError, match="prefix learning needs"):
        PrefixLearner(**({"budget_bytes": 1, "bytes_per_token": 1.0} | wrong))
