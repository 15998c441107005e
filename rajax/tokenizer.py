"""Text to tokens and back, and conversations to prompts, from Hugging Face's tokenizer files."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils
import tokenizers

from rajax.checkpoint import CheckpointError, read_json


class ChatTemplateError(ValueError):
    """The checkpoint has no chat template, or its template refused the conversation."""


class Tokenizer:
    """A `tokenizers` tokenizer with the checkpoint's chat template.

    Attributes:
      backend: the `tokenizers.Tokenizer`.
      chat_template: the Jinja source, or None.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, chat_template: str | None, special_tokens: Mapping[str, str]
    ):
        self.backend = backend
        self.chat_template = chat_template
        self.special_tokens = dict(special_tokens)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The tokens of a text; with `add_special_tokens` also those that the model expects around one.

        Raises:
          ValueError: half of a surrogate pair, which is no text. Python reads bytes that are no UTF-8 as such.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"the text is not valid Unicode: {error}") from error
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of tokens. Bytes that are no UTF-8 come out as the replacement character."""
        return self.backend.decode([int(t) for t in tokens], skip_special_tokens=skip_special_tokens)

    def decode_stream(self) -> Callable[[int], str]:
        """A function from each next token to the text that it completes, which may be empty.

        `tokenizers.decoders.DecodeStream` is not it: some tokens that spell no UTF-8, as a model may well make
        them, end it with an exception.
        """
        # Tokens whose text is out, for what they say about spaces, and those held back.
        window: list[int] = []
        shown = 0

        def step(token: int) -> str:
            nonlocal window, shown
            window.append(int(token))
            before, now = self.decode(window[:shown]), self.decode(window)
            # The replacement character may be the beginning of a character whose other bytes are to come.
            if len(now) <= len(before) or now.endswith("\ufffd"):
                return ""
            window, shown = window[shown:], len(window) - shown
            return now[len(before) :]

        return step

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
    ) -> str:
        """A conversation as the text that the model was trained on.

        Args:
          messages: [{"role": "user", "content": "..."}, ...].
          add_generation_prompt: end with the opening of an assistant's message.

        Raises:
          ChatTemplateError: there is no template, or it refused the messages.
        """
        if self.chat_template is None:
            raise ChatTemplateError("this checkpoint has no chat template; give a plain prompt instead")
        try:
            return (
                _environment()
                .from_string(self.chat_template)
                .render(
                    messages=list(messages),
                    tools=None,
                    documents=None,
                    add_generation_prompt=add_generation_prompt,
                    **self.special_tokens,
                )
            )
        except Exception as error:  # a template is a program, and fails in as many ways
            raise ChatTemplateError(
                f"the chat template refused the conversation: {type(error).__name__}: {error}"
            ) from error

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
    ) -> list[int]:
        """The tokens of `render_chat`; the template writes all special tokens itself."""
        text = self.render_chat(messages, add_generation_prompt=add_generation_prompt)
        return self.encode(text, add_special_tokens=False)


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """Loads the tokenizer of a checkpoint or of a Hugging Face directory.

    Raises:
      CheckpointError: tokenizer.json is missing, or it or a file beside it is damaged.
    """
    path = Path(path)
    file = path / "tokenizer.json"
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a directory")
    if not file.exists():
        hint = ""
        if (path / "tokenizer.model").exists():
            hint = "; it has tokenizer.model only: save the tokenizer with transformers once, as a fast one"
        raise CheckpointError(f"{file} is missing{hint}")
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises plain Exception
        raise CheckpointError(f"{file} is not a readable tokenizer: {error}") from error
    backend.no_padding()
    backend.no_truncation()
    settings: dict[str, Any] = {}
    # Older directories have the special tokens in a file of their own.
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (path / name).exists():
            settings |= read_json(path / name)
    return Tokenizer(backend, _chat_template(path, settings), _special_tokens(settings))


def _chat_template(path: Path, settings: Mapping[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.exists():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{file} is not readable text: {error}") from error
    template = settings.get("chat_template")
    if isinstance(template, list) and all(isinstance(t, dict) for t in template):
        template = {t.get("name"): t.get("template") for t in template}.get("default")
    if template is not None and not isinstance(template, str):
        raise CheckpointError(
            f"{path / 'tokenizer_config.json'}: chat_template must be text or a list of named ones, "
            f"found {type(template).__name__}"
        )
    return template


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token and the like, which templates name; their values are strings or objects."""
    tokens = {}
    for name, value in settings.items():
        if name.endswith("_token"):
            content = value.get("content") if isinstance(value, dict) else value
            if isinstance(content, str):
                tokens[name] = content
    return tokens


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """The same as transformers', so that templates find what they were written for, and nothing else."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    environment.globals["namespace"] = _Namespace
    return environment


class _Generation(jinja2.ext.Extension):
    """The tag around what an assistant says, which only training asks for."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(
            parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line
        )


class _Namespace(jinja2.utils.Namespace):
    """A template's variables, but none under Python's own names, by which the sandbox knows objects."""

    def __init__(self, /, *args: Any, **kwargs: Any):
        super().__init__()
        for name, value in dict(*args, **kwargs).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise jinja2.sandbox.SecurityError(f"a namespace may not hold {name!r}")
        super().__setitem__(name, value)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which a prompt must not.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
