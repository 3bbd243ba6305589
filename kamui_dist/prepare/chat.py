"""Supervised examples: which parts of a prompt with its completion, or of a chat, are targets. No torch.

A chat template is a Jinja program from a stranger. It runs in Jinja's sandbox, sees the record, and can do nothing but
return text. What it returns is cut into parts by one of two ways: the template marks its assistant parts itself with
{% generation %}, or the parts are found by rendering the chat up to each message, since a template says the same about
a message whatever follows it. A template that does not is refused.

The name of a special token, such as <|im_end|>, means that token where the template writes it. Inside a message it is
text like any other: nobody can end a turn by writing so.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from kamui_dist.errors import UserError
from kamui_dist.prepare.records import BadRecord

# Without a template of the tokenizer's own. Each turn starts with its role; the end-of-document token ends an answer.
DEFAULT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\\n' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
_UNUSED = [chr(c) for c in range(0xFDD0, 0xFDF0)]  # code points that stand for no character, by Unicode's promise

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


class Part(NamedTuple):
    """Text to encode on its own, or one special token; and whether its tokens are targets."""

    content: str | int
    target: bool


class Template(NamedTuple):
    """A chat template and the names of the tokens that it may use. Pickles, unlike what Jinja makes of it."""

    source: str
    where: str  # for errors
    bos_token: str = ""
    eos_token: str = ""


def find_template(tokenizer: str | Path, given: str | Path | None, eos_token: str) -> Template:
    """The template of `given` (a file), else of tokenizer_config.json or chat_template.jinja beside the tokenizer, else
    the default one. eos_token: the separator's name, where no tokenizer_config.json names another.

    Raises UserError with the path for a file that cannot be read.
    """
    path = Path(tokenizer).expanduser().absolute()
    folder = path if path.is_dir() else path.parent
    config: dict[str, Any] = {}
    config_file = folder / "tokenizer_config.json"
    if str(tokenizer) != "bytes" and config_file.is_file():
        try:
            config = json.loads(_read(config_file))
        except ValueError as error:
            raise UserError(f"{config_file} is not JSON: {error}") from error
        if not isinstance(config, dict):
            raise UserError(f"{config_file} is not a JSON object")
    names = {"bos_token": _token(config.get("bos_token")), "eos_token": _token(config.get("eos_token")) or eos_token}
    if given is not None:
        file = Path(given).expanduser().absolute()
        return Template(_read(file), str(file), **names)
    beside = folder / "chat_template.jinja"
    if str(tokenizer) != "bytes" and beside.is_file():
        return Template(_read(beside), str(beside), **names)
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        template = next((t.get("template") for t in template if t.get("name") == "default"), None)
    if isinstance(template, str):
        return Template(template, f"the chat_template of {config_file}", **names)
    return Template(DEFAULT_TEMPLATE, "the default template", names["bos_token"], eos_token)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the chat template {path}: {error}") from error


def _token(value: Any) -> str:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


class Chat:
    """Cuts chats into parts. special_tokens: their ids by name. Raises UserError if the template does not compile."""

    def __init__(self, template: Template, special_tokens: dict[str, int]) -> None:
        self._template, self._special = template, special_tokens
        names = sorted(filter(None, special_tokens), key=lambda name: (-len(name), name))  # the longest one first
        self._names = re.compile("|".join(map(re.escape, names))) if names else None
        self._marks: list[str] = []  # of the chat being rendered: inside a name, start and end of a generation block
        self._render = self._compile()

    def _compile(self) -> Callable[..., str]:
        import jinja2
        from jinja2.ext import Extension
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        marks = self._marks

        class Generation(Extension):
            tags = {"generation"}  # noqa: RUF012 - jinja2's own protocol

            def parse(self, parser: Any) -> Any:
                line = next(parser.stream).lineno
                body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
                return jinja2.nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

            def _marked(self, caller: Any) -> str:
                return marks[1] + str(caller()) + marks[2]

        class Namespace(jinja2.utils.Namespace):
            def __setitem__(self, name: str, value: Any) -> None:
                check_name(name)
                super().__setitem__(name, value)

        def check_name(name: str) -> None:
            if name.startswith("_"):  # __class__ and its kind would lead out of the sandbox
                raise jinja2.exceptions.SecurityError(f"{name!r} in a namespace")

        def namespace(*pairs: Any, **more: Any) -> Namespace:
            attributes = dict(*pairs, **more)
            for name in attributes:
                check_name(name)
            return Namespace(attributes)

        def raise_exception(message: str) -> None:
            raise jinja2.TemplateError(message)

        def tojson(value: Any, indent: int | None = None, ensure_ascii: bool = False, **more: Any) -> str:
            return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, **more)

        # Options, names and extensions as Hugging Face's apply_chat_template has them, but for strftime_now: the same
        # text shall give the same tokens tomorrow.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
        )
        environment.globals = {
            "range": environment.globals["range"],
            "namespace": namespace,
            "dict": lambda **pairs: pairs,
            "raise_exception": raise_exception,
        }
        environment.filters["tojson"] = tojson
        try:
            return environment.from_string(self._template.source).render
        except jinja2.TemplateError as error:
            raise UserError(f"{self._template.where} is not a Jinja template: {error}") from error

    def parts(self, messages: Any, where: str, more: dict[str, Any] | None = None) -> list[Part]:
        """The parts of one chat, in order. more: what else the record has for the template (tools, ...).

        Raises BadRecord if `messages` is no chat, or the template fails on it, or says different things about a message
        depending on what follows.
        """
        if not isinstance(messages, list) or not messages:
            raise BadRecord(f"{where}: messages is not a list with at least one message")
        for message in messages:
            if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
                raise BadRecord(f"{where}: a message is not an object with role and content")
            role = message["role"]
            if role not in _ROLES and f"<|{role}|>" in self._special:  # templates write roles so
                raise BadRecord(f"{where}: the role {role!r} is the name of a special token")
        everything = json.dumps([messages, more], ensure_ascii=False, default=str) + self._template.source
        self._marks[:] = [c for c in _UNUSED if c not in everything][:3]
        if len(self._marks) < 3:
            raise BadRecord(f"{where} has too many code points that Unicode keeps for internal use")
        messages, more = self._guarded(messages), self._guarded(more or {})

        def render(upto: int, ask: bool) -> str:
            names = {"bos_token": self._template.bos_token, "eos_token": self._template.eos_token}
            try:
                return self._render(**{**more, **names, "messages": messages[:upto], "add_generation_prompt": ask})
            except Exception as error:  # it is the template's: any kind
                what = f"messages 1 to {upto}" if upto < len(messages) else "the chat"
                raise BadRecord(f"{where}: {self._template.where} fails on {what}: {_first_line(error)}") from error

        whole = render(len(messages), False)
        if self._marks[1] in whole:
            pieces = self._marked_pieces(whole, where)
        else:
            pieces = self._prefix_pieces(whole, messages, render, where)
        return [part for text, target in pieces for part in self._split(text, target)]

    def _guarded(self, value: Any) -> Any:
        """`value` with a mark inside each special token's name."""
        if isinstance(value, str) and self._names is not None:
            return self._names.sub(lambda m: m[0][:1] + self._marks[0] + m[0][1:], value)
        if isinstance(value, dict):
            return {key: self._guarded(v) for key, v in value.items()}
        return [self._guarded(v) for v in value] if isinstance(value, list) else value

    def _marked_pieces(self, whole: str, where: str) -> list[tuple[str, bool]]:
        _, start, end = self._marks
        pieces = []
        for number, text in enumerate(whole.split(start)):
            answer, found, rest = text.partition(end) if number else ("", end, text)
            if not found or end in rest:
                raise BadRecord(f"{where}: {self._template.where} has a generation block inside another")
            pieces += [(answer, True), (rest, False)]
        return pieces

    def _prefix_pieces(
        self, whole: str, messages: list[Any], render: Callable[[int, bool], str], where: str
    ) -> list[tuple[str, bool]]:
        pieces, done = [], 0
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before, after = render(i, True), render(i + 1, False)
            if not (whole.startswith(after) and after.startswith(before) and len(before) >= done):
                raise BadRecord(
                    f"{where}: {self._template.where} writes message {i + 1} in another way when it is the last one, so"
                    " the answers cannot be told from the rest; put {% generation %} and {% endgeneration %} around them"
                    " in the template"
                )
            pieces += [(whole[done : len(before)], False), (whole[len(before) : len(after)], True)]
            done = len(after)
        return [*pieces, (whole[done:], False)]

    def _split(self, text: str, target: bool) -> list[Part]:
        """One piece as text and special tokens. White space after the last special token of an answer (the line end
        behind <|im_end|>) is not generated, so it is not a target.
        """
        parts: list[Part] = []
        position = 0
        for match in self._names.finditer(text) if self._names is not None else ():
            parts += [Part(text[position : match.start()], target), Part(self._special[match[0]], target)]
            position = match.end()
        rest = text[position:]
        parts.append(Part(rest, target and not (parts and not rest.strip())))
        mark = self._marks[0]
        return [
            Part(p.content.replace(mark, ""), p.target) if isinstance(p.content, str) else p
            for p in parts
            if p.content != ""
        ]


def _first_line(error: BaseException) -> str:
    return (str(error) or repr(error)).splitlines()[0]
