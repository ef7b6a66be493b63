"""Chats become text by a model's own template, as the transformers library renders it, and say what the model wrote.

A chat is a list of messages: `role` and `content`, or `from` and `value` as in ShareGPT's files. The template is that
of the tokenizer's folder.
"""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from hpctrain.config.errors import DataError
from hpctrain.config.paths import is_file, read_bytes, read_json

FIELDS = ("messages", "conversations")
"""Fields of a record that hold its chat, unless another field is named."""
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bard": "assistant", "bing": "assistant"}
ASSISTANT = "assistant"
TEMPLATE_FILE, CONFIG_FILE = "chat_template.jinja", "tokenizer_config.json"
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
BEGIN, END, OTHER = "\ufdd0", "\ufdd1", "\ufdd2"
"""Code points that no text contains. The first two enclose the output of `{% generation %}` and are removed again. The
third stands in for an answer, to see where the answer begins."""


class Chat(NamedTuple):
    """The messages of one record, each with a role and what was said."""

    messages: tuple[Mapping[str, Any], ...]
    tools: list | None = None

    @property
    def num_bytes(self) -> int:
        return sum(len(str(message.get("content") or "").encode(errors="replace")) for message in self.messages)


def chat_of(record: Mapping[str, Any], value: Sequence, where: str) -> Chat:
    """Return a record's chat. Raises DataError for a malformed message."""
    messages = []
    for number, message in enumerate(value, 1):
        if not isinstance(message, Mapping):
            raise DataError(f"{where}: message {number} is {message!r:.60}, and no table with role and content")
        if "role" in message:
            messages.append({key: value for key, value in message.items() if value is not None or key == "content"})
        elif isinstance(message.get("from"), str) and "value" in message:
            role = SHAREGPT_ROLES.get(message["from"], message["from"])
            messages.append({"role": role, "content": message["value"]})
        else:
            names = ", ".join(map(str, message))
            raise DataError(f"{where}: message {number} has neither role nor from and value (it has: {names:.80})")
    tools = record.get("tools")
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except ValueError:
            raise DataError(f"{where}: tools is text and no JSON: {tools:.60}") from None
    if tools and not isinstance(tools, list):
        raise DataError(f"{where}: tools is {tools!r:.60} and no list")
    return Chat(tuple(messages), tools or None)


class ChatTemplate:
    """A template of Jinja, in the environment that the transformers library gives it."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], origin: str):
        """`special_tokens` are `bos_token` and the like. Raises DataError where `source` is no valid template."""
        from jinja2 import TemplateError

        self._origin, self._special, self._error = origin, special_tokens, TemplateError
        self._marks = bool(re.search(r"{%-?\s*generation", source))
        try:
            self._template = _environment().from_string(source)
        except TemplateError as error:
            raise DataError(f"{origin}: the chat template cannot be read: {error}") from None

    def render(self, chat: Chat, where: str) -> tuple[str, list[tuple[int, int]]]:
        """Return the text of a chat, and the spans of it that are the assistant's, which the model is to learn.

        These are the spans inside `{% generation %}`, where the template has it. Else each span begins after the
        template's prompt for an answer, and includes the token that ends the answer. Raises DataError, with `where`.
        """
        text = self._text(chat, len(chat.messages), False, where)
        if self._marks:
            return _unmarked(text)
        learnt = []
        for number, message in enumerate(chat.messages):
            if message["role"] != ASSISTANT:
                continue
            if number:
                before = self._text(chat, number, True, where)
            else:  # templates look at the first message, so they cannot write a chat without any
                other = chat._replace(messages=({**message, "content": OTHER},))
                before = self._text(other, 1, False, where).partition(OTHER)[0]
            after = self._text(chat, number + 1, False, where).rstrip()
            if not (text.startswith(before) and text.startswith(after) and len(before) <= len(after)):
                raise DataError(
                    f"{where}: {self._origin} writes message {number + 1} in another way where others follow, so nobody"
                    " can say which tokens are the assistant's; enclose them in {% generation %} … {% endgeneration %}"
                )
            learnt.append((len(before), len(after)))
        return text, learnt

    def _text(self, chat: Chat, count: int, asks: bool, where: str) -> str:
        try:
            return self._template.render(
                messages=[*chat.messages[:count]],
                tools=chat.tools,
                documents=None,
                add_generation_prompt=asks,
                **self._special,
            )
        except (self._error, TypeError, ValueError, KeyError) as error:
            raise DataError(f"{where}: {self._origin} cannot write this chat: {error}") from None


def _unmarked(text: str) -> tuple[str, list[tuple[int, int]]]:
    """Return a text without its marks, and the spans that the marks enclosed."""
    parts, learnt, at = re.split(f"([{BEGIN}{END}])", text), [], 0
    begin = None
    for part in parts:
        if part == BEGIN:
            begin = at
        elif part == END and begin is not None:
            learnt.append((begin, at))
            begin = None
        else:
            at += len(part)
    return "".join(part for part in parts if part not in (BEGIN, END)), learnt


def _environment():
    """Return the environment of Jinja in which templates are written: sandboxed, with the functions that they call."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """Marks what `{% generation %}` encloses."""

        tags = {"generation"}  # noqa: RUF012 - so Jinja declares it

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

        def _mark(self, caller) -> str:
            return f"{BEGIN}{caller()}{END}"

    def raise_exception(message: str):
        raise TemplateError(message)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
        options = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().astimezone().strftime(form)
    return environment


def read_template(folder: Path) -> ChatTemplate | None:
    """Return the chat template of a tokenizer's folder; None where it has none. Raises DataError."""
    path, config = folder / TEMPLATE_FILE, {}
    if is_file(folder / CONFIG_FILE):
        config = read_json(folder / CONFIG_FILE, DataError, "a tokenizer's config")
    source: Any = config.get("chat_template")
    if is_file(path):
        source = read_bytes(path).decode(errors="replace")
    if isinstance(source, list):
        source = {each.get("name"): each.get("template") for each in source}.get("default")
    if not isinstance(source, str):
        return None
    origin = str(path if is_file(path) else folder / CONFIG_FILE)
    special: dict[str, str] = {}
    for name in SPECIAL_TOKENS:
        value = config.get(name)
        content = value.get("content") if isinstance(value, Mapping) else value
        if isinstance(content, str):
            special[name] = content
    return ChatTemplate(source, special, origin)
