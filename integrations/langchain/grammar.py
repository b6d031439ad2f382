"""What a model may answer, as a GBNF grammar: a JSON schema, or calls of tools. A small model cannot break it."""

from __future__ import annotations

import functools
import json
import re
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from cachegen_rag.errors import ConfigError

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_HEAD = re.compile(OPEN + r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=[{\[])')
ANY_JSON: dict[str, Any] = {"type": "object"}


@dataclass(frozen=True)
class Form:
    """The form of an answer: its grammar (None: free text) and what the model is told about it."""

    grammar: str | None = None
    instructions: str = ""
    calls: bool = False


def answer_form(
    tools: Sequence[dict[str, Any]] | None = None,
    tool_choice: Any = None,
    parallel_tool_calls: bool = False,
    response_format: dict[str, Any] | None = None,
    grammar: str | None = None,
) -> Form:
    """The form that ``bind``-able arguments ask for. Tools win over a response format, both over ``grammar``.

    Raises
    ------
    ConfigError
        An argument is malformed, or ``tool_choice`` names no tool.
    """
    if tools is not None and not isinstance(tools, (list, tuple)):
        raise ConfigError(f"tools must be a list of tools, got {type(tools).__name__}")
    if tools and tool_choice != "none":
        return _tool_form([_function(tool) for tool in tools], tool_choice, parallel_tool_calls)
    if response_format is not None:
        schema = _schema(response_format)
        if schema is None:
            return Form()
        told = "" if schema == ANY_JSON else f" It follows this JSON schema:\n{_dumps(schema)}"
        return Form(schema_grammar(_dumps(schema)), f"Answer with one JSON object and nothing else.{told}")
    return Form(grammar)


def parse_calls(text: str) -> list[dict[str, Any]]:
    """The tool calls in an answer: name, arguments as JSON text, id, index. Incomplete ones are left out."""
    calls: list[dict[str, Any]] = []
    for piece in text.split(OPEN)[1:]:
        try:
            call = json.loads(piece.partition(CLOSE)[0], strict=False)
            name, arguments = call["name"], call.get("arguments", {})
        except (ValueError, TypeError, KeyError, AttributeError):
            continue
        args = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        calls.append({"name": name, "args": args, "id": _call_id(), "index": len(calls)})
    return calls


def _call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


class CallStream:
    """Tool calls in an answer that grows: the name and an id of each, then its arguments as they come."""

    def __init__(self) -> None:
        self.calls = 0  # that have begun
        self._rest = ""
        self._closers: list[str] = []  # of the arguments under way, outermost first
        self._in_string = self._escaped = False

    def push(self, text: str) -> Iterator[dict[str, Any]]:
        """What ``text`` adds to each call: its name and id the first time (None then on), arguments, index."""
        self._rest += text
        if self._closers:
            yield self._more(self._arguments())
        while not self._closers and (head := _HEAD.search(self._rest)) is not None:
            self._rest = self._rest[head.end() :]
            self.calls += 1
            yield {**self._more(self._arguments()), "name": json.loads(head[1]), "id": _call_id()}

    def finish(self) -> Iterator[dict[str, Any]]:
        """The answer has ended. A call that has not gets a bracket that closes nothing: nobody may run it."""
        if self._closers:
            wrong = "]" if self._closers[-1] == "}" else "}"
            yield self._more(("n" if self._escaped else "") + ('"' if self._in_string else "") + wrong)

    def _more(self, arguments: str) -> dict[str, Any]:
        return {"name": None, "args": arguments, "id": None, "index": self.calls - 1}

    def _arguments(self) -> str:
        """Take what belongs to the arguments of the call under way."""
        for n, char in enumerate(self._rest):
            if self._in_string:
                self._in_string = self._escaped or char != '"'
                self._escaped = char == "\\" and not self._escaped
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._closers.append("}" if char == "{" else "]")
            elif char in "}]":
                self._closers.pop()
                if not self._closers:
                    piece, self._rest = self._rest[: n + 1], self._rest[n + 1 :]
                    return piece
        piece, self._rest = self._rest, ""
        return piece


def _tool_form(functions: list[dict[str, Any]], choice: Any, parallel: bool) -> Form:
    if isinstance(choice, dict):
        choice = choice.get("function", {}).get("name")
    forced = choice in ("any", "required", True)
    if choice not in (None, "auto", "any", "required", True, False):
        functions = [f for f in functions if f["name"] == choice]
        forced = True
        if not functions:
            raise ConfigError(f"tool_choice {choice!r} names none of the tools that are bound")
    lines = "\n".join(_dumps(f) for f in functions)
    told = (
        f"You can call functions. These are their JSON descriptions:\n{lines}\n"
        f'To call one, answer with\n{OPEN}\n{{"name": "the function", "arguments": {{...}}}}\n{CLOSE}\nand no more.'
    )
    return Form(tool_grammar(_dumps(functions), forced, parallel), told, calls=True)


@functools.lru_cache(maxsize=256)
def schema_grammar(schema: str) -> str:
    """GBNF of a JSON schema. Raises ConfigError for a schema that cannot be one."""
    return _converted(json.loads(schema), "root")


@functools.lru_cache(maxsize=256)
def tool_grammar(functions: str, forced: bool, parallel: bool) -> str:
    """GBNF of calls of these functions; unless ``forced``, text that does not begin like a call is an answer, too."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": f["name"]}, "arguments": f["parameters"]},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for f in json.loads(functions)
    ]
    rules = _converted(calls[0] if len(calls) == 1 else {"oneOf": calls}, "call")
    one = rf'"{OPEN}\n" call "\n{CLOSE}"'
    many = rf'{one} ("\n" {one})*' if parallel else one
    root = many if forced else f"{many} | ([^<] [^\\x00]*)?"
    return f"root ::= {root}\n{rules}"


def _converted(schema: Any, root: str) -> str:
    from llama_cpp.llama_grammar import SchemaConverter

    try:
        converter = SchemaConverter(prop_order={}, allow_fetch=False, dotall=False, raw_pattern=False)
        resolved = converter.resolve_refs(schema, "schema")
        converter.visit(resolved, "" if root == "root" else root)
        return str(converter.format_grammar())
    except (ValueError, KeyError, TypeError, AssertionError, AttributeError, RecursionError) as error:
        raise ConfigError(f"this JSON schema cannot be made a grammar: {error}") from error


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    from langchain_core.utils.json_schema import dereference_refs

    try:
        function = dict(tool["function"])
        parameters = dereference_refs(function.get("parameters") or {"type": "object", "properties": {}})
        parameters = {key: value for key, value in parameters.items() if key not in ("$defs", "definitions")}
        return {"name": str(function["name"]), "description": function.get("description", ""), "parameters": parameters}
    except (KeyError, TypeError) as error:
        raise ConfigError(f"a tool needs a function with a name and parameters, got {tool!r:.200}") from error


def _schema(response_format: dict[str, Any]) -> dict[str, Any] | None:
    kind = response_format.get("type") if isinstance(response_format, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return dict(response_format.get("schema") or ANY_JSON)
    if kind == "json_schema":
        named = response_format.get("json_schema") or {}
        schema = named.get("schema") or response_format.get("schema")
        if isinstance(schema, dict):
            return schema
    raise ConfigError(
        f"response_format must be text, json_object or json_schema with a schema, got {response_format!r:.200}"
    )


def _dumps(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"a schema or tool is no JSON, or nested too deep: {error}") from error
