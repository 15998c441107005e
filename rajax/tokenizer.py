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
import jinja2.sandbox
import tokenizers
import tokenizers.decoders

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
        """The tokens of a text; with `add_special_tokens` also those that the model expects around one."""
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of tokens. Bytes that are no UTF-8 come out as the replacement character."""
        return self.backend.decode([int(t) for t in tokens], skip_special_tokens=skip_special_tokens)

    def decode_stream(self) -> Callable[[int], str]:
        """A function from each next token to the text that it completes, which may be empty."""
        decoder = tokenizers.decoders.DecodeStream(skip_special_tokens=True)
        return lambda token: decoder.step(self.backend, int(token)) or ""

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
        # The same environment as transformers', so that templates find what they were written for.
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        try:
            return environment.from_string(self.chat_template).render(
                messages=list(messages), add_generation_prompt=add_generation_prompt, **self.special_tokens
            )
        except (jinja2.TemplateError, TypeError, KeyError) as error:
            raise ChatTemplateError(f"the chat template refused the conversation: {error}") from error

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
    ) -> list[int]:
        """The tokens of `render_chat`; the template writes all special tokens itself."""
        text = self.render_chat(messages, add_generation_prompt=add_generation_prompt)
        return self.encode(text, add_special_tokens=False)


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """Loads the tokenizer of a checkpoint or of a Hugging Face directory.

    Raises:
      CheckpointError: tokenizer.json is missing or damaged.
    """
    path = Path(path)
    file = path / "tokenizer.json"
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
    settings = read_json(path / "tokenizer_config.json") if (path / "tokenizer_config.json").exists() else {}
    return Tokenizer(backend, _chat_template(path, settings), _special_tokens(settings))


def _chat_template(path: Path, settings: Mapping[str, Any]) -> str | None:
    if (path / "chat_template.jinja").exists():
        return (path / "chat_template.jinja").read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {t.get("name"): t.get("template") for t in template}
        return named.get("default")
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


def _tojson(value: Any, indent: int | None = None) -> str:
    # Jinja's own filter escapes HTML, which a prompt must not.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
