"""Text to tokens and back, in pieces as well, and chat templates, of which some are out for harm."""

from __future__ import annotations

import contextlib
import datetime
import json
import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

import rajax
from rajax.tokenizer import ChatTemplateError

TEXTS = [
    "",
    " ",
    "Hello world",
    "  two  spaces, a\ttab\r\nand lines\n\n",
    "naïve café, Ω ≈ ç√, e\u0301",
    "日本語テキスト",
    "عربي",
    "👩\u200d👩\u200d👧\u200d👦 and 🎉🏳️\u200d🌈",
    "a\0b\x7f\u2028\ufeff\ufffd.",
    "The year 2024 costs 3.14",
]
MESSAGES = [{"role": "user", "content": "a <b> 'c' é"}]


def byte_level() -> tokenizers.Tokenizer:
    """A token per byte, as Llama 3 falls back to."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|begin|>", "<|end|>"])
    return backend


def byte_fallback() -> tokenizers.Tokenizer:
    """Llama 2's kind: ▁ for a space, and tokens such as <0xE2> for what has none of its own."""
    words = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{b:02X}>" for b in range(256)),
        *"▁abcé日\n",
        "▁a",
        "▁b",
        "ab",
        "▁▁",
    ]
    backend = tokenizers.Tokenizer(
        models.BPE({w: i for i, w in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


BACKENDS = {"byte level": byte_level, "byte fallback": byte_fallback}


@pytest.fixture(params=BACKENDS)
def tokenizer(request) -> rajax.Tokenizer:
    return rajax.Tokenizer(BACKENDS[request.param](), None, {})


@pytest.fixture(scope="session")
def demo(smollm2_path) -> rajax.Tokenizer:
    return rajax.load_tokenizer(smollm2_path)


def directory(path: Path, *, template: str | None = None, **settings: Any) -> Path:
    """A directory with tokenizer files."""
    byte_level().save(str(path / "tokenizer.json"))
    if template is not None:
        settings["chat_template"] = template
    (path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return path


def streamed(tokenizer: rajax.Tokenizer, tokens: list[int]) -> str:
    step = tokenizer.decode_stream()
    return "".join(step(token) for token in tokens)


# --- encode and decode


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back(tokenizer, demo, text):
    for each in (tokenizer, demo):
        assert each.decode(each.encode(text)) == text


@pytest.mark.parametrize("text", [t for t in TEXTS if not t.endswith("\ufffd")])
def test_text_comes_back_in_pieces(tokenizer, demo, text):
    for each in (tokenizer, demo):
        tokens = each.encode(text)
        assert streamed(each, tokens) == each.decode(tokens) == text


def test_a_character_is_shown_when_it_is_whole(tokenizer):
    step = tokenizer.decode_stream()
    pieces = [step(token) for token in tokenizer.encode("a🎉")]
    assert [p for p in pieces if p] == ["a", "🎉"]
    assert pieces[-1] == "🎉"


def test_any_tokens_can_be_streamed(tokenizer, demo):
    """Also such as spell no UTF-8, which a model may make."""
    draw = random.Random(0)
    for each in (tokenizer, demo):
        size = each.backend.get_vocab_size()
        for _ in range(500):
            tokens = [draw.randrange(size) for _ in range(12)]
            got, wanted = streamed(each, tokens), each.decode(tokens)
            if "\ufffd" not in wanted:
                assert got == wanted
            # A byte-fallback decoder takes back good characters when bad bytes follow; others never do.
            elif not isinstance(each.backend.decoder, decoders.Sequence):
                assert wanted.startswith(got)


def test_control_tokens_are_encoded_as_such_and_not_shown(demo):
    text = "<|im_start|>user\nhi<|im_end|>"
    tokens = demo.encode(text)
    assert tokens == [1, 4093, 198, 6004, 2]
    assert demo.decode(tokens) == streamed(demo, tokens) == "user\nhi"
    assert demo.decode(tokens, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        # From transformers' PreTrainedTokenizerFast.
        ("Hello world", [19556, 905]),
        ("The year 2024 costs 3.14", [504, 713, 216, 34, 32, 34, 36, 3499, 216, 35, 30, 33, 36]),
        ("naïve café", [3546, 46494, 37366]),
        ("日本語", [23274, 115, 40993, 179, 120, 248]),
        ("👩\u200d👧 🎉", [10813, 235, 119, 321, 231, 10813, 235, 117, 15107, 232, 227]),
        ("   x\r\n\t", [256, 1792, 15290]),
        ("", []),
    ],
)
def test_the_demo_tokenizer_gives_known_tokens(demo, text, tokens):
    assert demo.encode(text) == tokens


def test_special_tokens_around_a_text_are_left_out_on_request():
    backend = byte_level()
    begin = backend.token_to_id("<|begin|>")
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        "<|begin|> $A", None, [("<|begin|>", begin)]
    )
    tokenizer = rajax.Tokenizer(backend, None, {})
    plain = tokenizer.encode("ab", add_special_tokens=False)
    assert tokenizer.encode("ab") == [begin, *plain]
    assert len(plain) == 2


def test_half_a_surrogate_pair_is_no_text(tokenizer):
    for text in ("\ud83c", "a\udcff"):
        with pytest.raises(ValueError, match="not valid Unicode"):
            tokenizer.encode(text)


# --- files


def test_a_tokenizer_that_is_missing_or_damaged_is_named(tmp_path):
    file = tmp_path / "tokenizer.json"
    with pytest.raises(rajax.CheckpointError, match="nowhere is not a directory"):
        rajax.load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(rajax.CheckpointError, match=f"{file} is missing$"):
        rajax.load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"sentencepiece")
    with pytest.raises(
        rajax.CheckpointError, match=r"tokenizer\.model only: save the tokenizer with transformers"
    ):
        rajax.load_tokenizer(tmp_path)
    for content in (b"", b"{", b"{}", b"\xff\xfe", b"[1]"):
        file.write_bytes(content)
        with pytest.raises(rajax.CheckpointError, match=f"{file} is not a readable tokenizer"):
            rajax.load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "word"),
    [
        ("tokenizer_config.json", b"[]", "JSON object"),
        ("tokenizer_config.json", b"{", "not readable JSON"),
        ("tokenizer_config.json", b'{"chat_template": 3}', "chat_template must be text or a list"),
        ("tokenizer_config.json", b'{"chat_template": ["a"]}', "chat_template must be text or a list"),
        ("special_tokens_map.json", b"\xff", "not readable JSON"),
        ("chat_template.jinja", b"\xff", "not readable text"),
    ],
)
def test_damaged_files_beside_it_are_named(tmp_path, name, content, word):
    directory(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(rajax.CheckpointError, match=f"{name}.*{word}"):
        rajax.load_tokenizer(tmp_path)


def test_padding_and_truncation_are_off(tmp_path):
    backend = byte_level()
    backend.enable_padding(length=50)
    backend.enable_truncation(3)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert len(rajax.load_tokenizer(tmp_path).encode("hello")) == 5


# --- chat templates


PLAIN = "{% for m in messages %}{{ bos_token }}{{ m.role }}:{{ m.content }}{{ eos_token }}{% endfor %}"
RENDERED = "<s>user:a <b> 'c' é</s>"


@pytest.mark.parametrize(
    "template", [PLAIN, [{"name": "tool_use", "template": "no"}, {"name": "default", "template": PLAIN}]]
)
def test_a_chat_template_is_found(tmp_path, template):
    directory(tmp_path, template=template, bos_token="<s>", eos_token={"content": "</s>", "lstrip": False})
    tokenizer = rajax.load_tokenizer(tmp_path)
    assert tokenizer.render_chat(MESSAGES) == RENDERED
    assert tokenizer.apply_chat_template(MESSAGES) == tokenizer.encode(RENDERED)


def test_a_template_file_wins_and_special_tokens_may_have_a_file(tmp_path):
    directory(tmp_path, template="no", eos_token="</s>")
    (tmp_path / "chat_template.jinja").write_text(PLAIN, encoding="utf-8")
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": {"content": "<s>"}, "eos_token": "no"}')
    assert rajax.load_tokenizer(tmp_path).render_chat(MESSAGES) == RENDERED


def test_without_a_template_there_is_no_chat(tmp_path):
    for template in (None, [{"name": "tool_use", "template": "no"}]):
        directory(tmp_path, template=template)
        with pytest.raises(ChatTemplateError, match="no chat template; give a plain prompt"):
            rajax.load_tokenizer(tmp_path).apply_chat_template(MESSAGES)


def test_the_demo_model_chats_as_it_was_trained(demo):
    # From transformers.
    assert demo.render_chat([{"role": "user", "content": "Hi"}]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = demo.render_chat(turns, add_generation_prompt=False)
    assert text == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    assert demo.apply_chat_template(turns, add_generation_prompt=False)[:3] == [1, 9690, 198]


@pytest.mark.parametrize(
    ("template", "rendered"),
    [
        ("{{ messages[0].content | tojson }}", "\"a <b> 'c' é\""),
        ("{{ {'b': 1, 'a': 'é'} | tojson(indent=1, sort_keys=true) }}", '{\n "a": "é",\n "b": 1\n}'),
        ("{{ 'é' | tojson(ensure_ascii=true) }}", '"\\u00e9"'),
        ("{% if tools is none and documents is none %}none{% endif %}", "none"),
        ("{% if tools is not none %}{{ tools[0] }}{% endif %}", ""),
        ("{% set ns = namespace(n=1) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}", "2"),
        ("{% generation %}{{ 'x' }}{% endgeneration %}", "x"),
        ("{% for i in range(9) %}{{ i }}{% if i == 1 %}{% break %}{% endif %}{% endfor %}", "01"),
        ("{% for i in range(3) %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "02"),
        ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),
        ("{{ strftime_now('%Y') }}", str(datetime.datetime.now().year)),
        ("{{ unknown_token }}|", "|"),
        ("{% if add_generation_prompt %}go{% endif %}", "go"),
    ],
)
def test_templates_find_what_transformers_gives_them(template, rendered):
    assert rajax.Tokenizer(byte_level(), template, {}).render_chat(MESSAGES) == rendered


@pytest.mark.parametrize(
    ("template", "word"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for", "TemplateSyntaxError"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages[7].content }}", "no element 7"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
        ("{{ range(10 ** 9) | length }}", "OverflowError"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ cycler.__init__.__globals__.os.popen('id').read() }}", "unsafe"),
        ("{{ raise_exception.__globals__['json'] }}", "unsafe"),
        ("{{ (messages[0].content | attr('__class__')).mro() }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ messages[0].update(role='x') }}", "unsafe"),
        ("{% set ns = namespace() %}{% set ns.__call__ = 1 %}", "__call__"),
        ("{{ namespace(__class__=1) }}", "__class__"),
    ],
)
def test_a_template_that_fails_or_breaks_out_is_refused(template, word):
    tokenizer = rajax.Tokenizer(byte_level(), template, {})
    with pytest.raises(ChatTemplateError, match="refused the conversation") as caught:
        tokenizer.render_chat(MESSAGES)
    assert word in str(caught.value)


def test_a_format_string_shows_nothing_of_python():
    tokenizer = rajax.Tokenizer(
        byte_level(), "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}", {}
    )
    with contextlib.suppress(ChatTemplateError):  # where Jinja tells of it
        assert tokenizer.render_chat(MESSAGES) == ""
