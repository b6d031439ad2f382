"""Forms of answers: grammars of schemas and tools accept what they should and nothing else, read by llama.cpp."""

import json

import pytest
from langchain_core.utils.json import parse_partial_json
from pydantic import BaseModel

from cachegen_rag.errors import ConfigError
from cachegen_rag.integrations.langchain.grammar import (
    CallStream,
    answer_form,
    parse_calls,
    schema_grammar,
    tool_grammar,
)

DEEP: dict[str, object] = {"type": "object"}
for _ in range(3000):
    DEEP = {"type": "array", "items": DEEP}


class Inner(BaseModel):
    words: list[str]
    note: str | None = None


class Outer(BaseModel):
    inner: Inner
    count: int


ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}
NOW = {"type": "function", "function": {"name": "now", "description": "The time."}}


@pytest.fixture(scope="module")
def accepts(tiny_gguf):
    """Whether llama.cpp's sampler lets every character of a text through, and then the end."""
    import llama_cpp

    llama = llama_cpp.Llama(str(tiny_gguf), vocab_only=True, verbose=False)
    vocab = llama_cpp.llama_model_get_vocab(llama.model)

    def check(grammar: str, text: str, whole: bool = True) -> bool:
        sampler = llama_cpp.llama_sampler_init_grammar(vocab, grammar.encode(), b"root")
        assert sampler, "llama.cpp cannot parse the grammar"
        try:
            tokens = llama.tokenize(text.encode(), add_bos=False, special=False)
            for token in [*tokens, *([llama_cpp.llama_vocab_eos(vocab)] if whole else [])]:
                data = (llama_cpp.llama_token_data * 1)(llama_cpp.llama_token_data(token, 1.0, 0.0))
                candidates = llama_cpp.llama_token_data_array(data=data, size=1, selected=-1, sorted=False)
                llama_cpp.llama_sampler_apply(sampler, candidates)
                if candidates.data[0].logit == float("-inf"):
                    return False
                llama_cpp.llama_sampler_accept(sampler, token)
            return True
        finally:
            llama_cpp.llama_sampler_free(sampler)

    return check


def call(name, arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_a_schema(accepts):
    grammar = schema_grammar(json.dumps(Outer.model_json_schema()))
    assert accepts(grammar, '{"inner": {"words": ["a", "b"], "note": null}, "count": 3}')
    assert accepts(grammar, '{"inner": {"words": []}, "count": -3}')
    assert not accepts(grammar, '{"inner": {"words": [1]}, "count": 3}')
    assert not accepts(grammar, '{"count": 3}')
    assert not accepts(grammar, "Sure! Here it is")
    assert not accepts(grammar, '{"inner": {"words": []}, "count"'), "an answer does not end inside the object"


def test_forced_calls(accepts):
    grammar = answer_form([ADD, NOW], "any").grammar
    assert accepts(grammar, call("add", {"a": 1}))
    assert accepts(grammar, call("now", {}))
    assert not accepts(grammar, call("add", {"a": "x"}))
    assert not accepts(grammar, call("now", {"a": 1}))
    assert not accepts(grammar, call("sub", {"a": 1}))
    assert not accepts(grammar, "I add them.")
    assert not accepts(grammar, call("now", {}) + "\n" + call("now", {}))


def test_a_named_tool(accepts):
    grammar = answer_form([ADD, NOW], "now").grammar
    assert accepts(grammar, call("now", {}))
    assert not accepts(grammar, call("add", {"a": 1}))
    same = answer_form([ADD, NOW], {"type": "function", "function": {"name": "now"}}).grammar
    assert same == grammar


@pytest.mark.parametrize("choice", [None, "auto", False])
def test_a_free_choice(accepts, choice):
    grammar = answer_form([ADD], choice).grammar
    assert accepts(grammar, call("add", {"a": 1}))
    assert accepts(grammar, "I add them. <tool_call> is how.")
    assert accepts(grammar, "")
    assert not accepts(grammar, "<tool_call>\nadd")


def test_parallel_calls(accepts):
    grammar = answer_form([ADD], "any", parallel_tool_calls=True).grammar
    two = call("add", {"a": 1}) + "\n" + call("add", {"a": 2})
    assert accepts(grammar, two)
    assert [json.loads(c["args"]) for c in parse_calls(two)] == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize("choice", ["any", "required", True])
def test_ways_to_force(choice):
    assert answer_form([ADD], choice) == answer_form([ADD], "any")


def test_no_tools_when_none_are_wanted():
    assert answer_form([ADD], "none").grammar is None
    assert answer_form([], "any").grammar is None
    assert answer_form(grammar="root ::= [a]").grammar == "root ::= [a]"


def test_response_formats(accepts):
    schema = {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"]}
    form = answer_form(response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": schema}})
    assert accepts(form.grammar, '{"x": true}') and not accepts(form.grammar, '{"x": 1}')
    assert json.dumps(schema) in form.instructions
    form = answer_form(response_format={"type": "json_object"})
    assert accepts(form.grammar, '{"any": ["thing", 1]}') and not accepts(form.grammar, "text")
    assert answer_form(response_format={"type": "text"}).grammar is None


def test_tools_share_definitions(accepts):
    tool = {"type": "function", "function": {"name": "f", "description": "", "parameters": Outer.model_json_schema()}}
    grammar = answer_form([tool, ADD], "f").grammar
    assert accepts(grammar, call("f", {"inner": {"words": ["a"]}, "count": 1}))


def test_calls_are_read_back():
    text = "Well. " + call("add", {"a": "é\n"}) + "<tool_call>\n{broken</tool_call><tool_call>\n[1]\n</tool_call>"
    (found,) = parse_calls(text)
    assert (found["name"], json.loads(found["args"]), found["index"]) == ("add", {"a": "é\n"}, 0)
    assert parse_calls("no call") == []


HARD = {"a": 'brackets ]} and "quotes" \\', "b": [{"c": "<tool_call>"}, []], "é": None}


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_calls_come_piece_by_piece(size):
    text = call("add", HARD) + "\n" + call('odd "name"', {})
    stream = CallStream()
    pieces = [piece for i in range(0, len(text), size) for piece in stream.push(text[i : i + size])]
    assert not list(stream.finish()) and stream.calls == 2
    adjacent = [[p["index"] for p in CallStream().push(text[:i])] for i in range(len(text))]
    assert all(len(set(indices)) == len(indices) for indices in adjacent), "LangChain merges chunks, not within one"
    heads = [piece for piece in pieces if piece["name"] is not None]
    assert [(h["name"], h["index"]) for h in heads] == [("add", 0), ('odd "name"', 1)]
    assert len({h["id"] for h in heads}) == 2 and all(p["id"] is None for p in pieces if p["name"] is None)
    whole = ["".join(p["args"] for p in pieces if p["index"] == n) for n in range(2)]
    assert [json.loads(arguments) for arguments in whole] == [HARD, {}]


def test_no_beginning_of_a_call_can_be_run():
    text = call("add", HARD)
    for length in range(len(text)):
        stream = CallStream()
        pieces = [*stream.push(text[:length]), *stream.finish()]
        arguments = "".join(piece["args"] for piece in pieces)
        if stream.calls and not arguments.endswith("null}"):
            assert not isinstance(parse_partial_json(arguments), dict), arguments


@pytest.mark.parametrize(
    "arguments",
    [
        {"tools": [ADD], "tool_choice": "sub"},
        {"tools": [{"name": "x"}], "tool_choice": "any"},
        {"response_format": {"type": "xml"}},
        {"response_format": {"type": "json_schema"}},
        {"response_format": 5},
        {"tools": 5},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": DEEP}}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#/$defs/none"}}}},
    ],
)
def test_what_cannot_be_a_form(arguments):
    with pytest.raises(ConfigError):
        answer_form(**arguments)


def test_grammars_are_made_once():
    first = tool_grammar(json.dumps([ADD["function"]]), True, False)
    assert tool_grammar(json.dumps([ADD["function"]]), True, False) is first
