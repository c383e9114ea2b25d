"""Between text and tokens: the chat template, the tokenizer, and text streamed without broken characters."""

import codecs
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import jinja2
import numpy as np
from jaxtyping import Int, Int8
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer
from tokenizers.processors import ByteLevel

from specprefill_jax.errors import ArtifactError, FileMissing, TemplateError

Message = Mapping[str, object]
"""One turn of a conversation: `role` and `content`, and whatever else the template reads."""


@dataclass(frozen=True)
class Chat:
    """What one model needs to read a conversation and to write an answer.

    `special_ids` are the tokenizer's control tokens. `vocabulary` is one more than the largest id that stands
    for text; ids from there up to the model's padded vocabulary stand for nothing.
    """

    tokenizer: Tokenizer
    template: jinja2.Template | None
    stop_ids: frozenset[int]
    special_ids: frozenset[int]
    vocabulary: int

    @classmethod
    def load(cls, tokenizer: Path, template: Path | None, stop_ids: Iterable[int]) -> "Chat":
        """Read a `tokenizer.json` and a Jinja chat template as Hugging Face models ship them.

        Raises:
            FileMissing: one of the files does not exist.
            ArtifactError: the tokenizer is unreadable or not byte-level, or a stop id stands for no token.
            TemplateError: the template is not valid Jinja.
        """
        codec = _read_tokenizer(tokenizer)
        vocabulary = max(codec.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        stops = frozenset(stop_ids)
        if unknown := sorted(stop for stop in stops if codec.id_to_token(stop) is None):
            raise ArtifactError(
                f"stop ids {unknown} stand for no token of {tokenizer}, whose ids end at {vocabulary - 1}; "
                "correct `stop_ids` in the manifest"
            )
        special = frozenset(i for i, token in codec.get_added_tokens_decoder().items() if token.special)
        compiled = None if template is None else _compile_template(_read_text(template), str(template))
        return cls(codec, compiled, stops, special, vocabulary)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        prefix: str = "",
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """The conversation as the text that the model was trained on, ready for `encode`.

        `prefix` is text that the answer begins with. `variables` are further names that a template may read
        (`tools`, `enable_thinking`, ...).

        Raises:
            TemplateError: there is no template, no message, or the template refuses these messages.
        """
        if self.template is None:
            raise TemplateError("this artifact has no chat template; use --raw to pass the text as it is")
        if not messages:
            raise TemplateError("a conversation needs at least one message")
        if prefix and not add_generation_prompt:
            raise TemplateError("a prefix begins the answer, but add_generation_prompt=False opens no answer")
        values = {"tools": None, **(variables or {})}
        try:
            text = self.template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, **values
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            raise TemplateError(f"the chat template cannot render these messages: {error}") from error
        return text + prefix

    def encode(self, text: str) -> Int[np.ndarray, "M"]:
        """Tokens of `text` as it stands: control tokens in it become their ids, and none are added."""
        return np.asarray(self.tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int32)

    def encode_with_offsets(self, text: str) -> tuple[Int[np.ndarray, "M"], Int[np.ndarray, "M 2"]]:
        """Tokens as `encode` gives them, and where in `text` the characters of each start and end.

        The spans follow one another without gaps; tokens that hold parts of one character all have it.
        """
        encoding = self.tokenizer.encode(text, add_special_tokens=False)
        offsets = np.array(encoding.offsets, dtype=np.int32).reshape(-1, 2)
        return np.asarray(encoding.ids, dtype=np.int32), offsets

    def decode(self, tokens: Sequence[int] | Int[np.ndarray, "N"], *, keep_special: bool = True) -> str:
        """Text of `tokens`; bytes that are no UTF-8 become U+FFFD."""
        return self.tokenizer.decode([int(token) for token in tokens], skip_special_tokens=not keep_special)

    def borders(self, tokens: Int[np.ndarray, "M"]) -> Int8[np.ndarray, "M"]:
        """What ends with each token: 2 a line (and the blank ones below it), 1 a sentence, 0 neither.

        A sentence ends with `.`, `!` or `?` and the quotation marks and brackets closed behind it, if space
        or the end of the prompt follows (so 3.14 is whole); with `。`, `！` or `？` it ends whatever follows.
        """
        unique, places = np.unique(tokens, return_inverse=True)
        spelled = [_bytes_of(self.tokenizer.id_to_token(int(token)) or "") for token in unique]
        text = b"".join(spelled[place] for place in places.tolist())
        ends = np.cumsum(np.array([len(piece) for piece in spelled], dtype=np.int64)[places])
        borders = np.zeros(tokens.size, dtype=np.int8)
        for kind, pattern in ((1, _SENTENCE_END), (2, _LINE_END)):
            borders[np.isin(ends, [found.end() for found in pattern.finditer(text)])] = kind
        return borders

    def detokenizer(self, *, keep_special: bool = True) -> "Detokenizer":
        """A fresh stream from tokens to text, for one answer."""
        return Detokenizer(self.tokenizer, frozenset() if keep_special else self.special_ids)


class Detokenizer:
    """Tokens in, text out, one token at a time.

    A token may hold part of a character: its bytes wait until the character is whole. The pieces, joined, are
    what decoding all tokens at once gives.
    """

    def __init__(self, tokenizer: Tokenizer, hidden_ids: frozenset[int] = frozenset()) -> None:
        self._tokenizer = tokenizer
        self._hidden_ids = hidden_ids
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """The text that `token` completes; empty while a character is unfinished."""
        spelled = None if token in self._hidden_ids else self._tokenizer.id_to_token(token)
        return "" if spelled is None else self._utf8.decode(_bytes_of(spelled))

    def flush(self) -> str:
        """What is left at the end: U+FFFD if the last character never became whole, else nothing."""
        text = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return text


def ask_about(text: str, question: str) -> str:
    """One user message that asks `question` about `text`: the text, a blank line, the question."""
    return text.rstrip("\n") + "\n\n" + question


def _one_of(letters: str) -> bytes:
    """A pattern for one of `letters` in UTF-8."""
    return b"(?:" + b"|".join(re.escape(letter.encode()) for letter in letters) + b")"


_CLOSING = _one_of("\"'\u2019\u201d»)]}」』）】*_`") + b"*"  # noqa: RUF001
_BEFORE_SPACE = _one_of(".!?…؟۔।") + _CLOSING + rb"(?=\s|\Z)"  # noqa: RUF001
_ANYWHERE = _one_of("。！？｡") + b"+" + _CLOSING  # noqa: RUF001
_SENTENCE_END = re.compile(_BEFORE_SPACE + b"|" + _ANYWHERE)
_LINE_END = re.compile(rb"[\r\n](?:[ \t\r\n]*[\r\n])?")


def _byte_letters() -> dict[str, int]:
    """The printable letter that stands for each byte in a byte-level vocabulary (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_LETTER = _byte_letters()


def _bytes_of(spelled: str) -> bytes:
    """Bytes of a vocabulary entry; an added token with a letter outside the table stands for itself."""
    if all(letter in _BYTE_OF_LETTER for letter in spelled):
        return bytes(_BYTE_OF_LETTER[letter] for letter in spelled)
    return spelled.encode()


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise FileMissing(f"{path} does not exist; the artifact is incomplete, compile it again") from error
    except UnicodeDecodeError as error:
        raise ArtifactError(f"{path} is not UTF-8 text: {error}") from error


def _read_tokenizer(path: Path) -> Tokenizer:
    text = _read_text(path)
    try:
        decoder = json.loads(text).get("decoder") or {}
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # `tokenizers` raises bare Exception for every fault of the file
        raise ArtifactError(f"{path} is not a tokenizer: {error}") from error
    if decoder.get("type") != "ByteLevel":
        raise ArtifactError(
            f"{path} decodes by {decoder.get('type')}; only byte-level tokenizers (Qwen's) are supported"
        )
    tokenizer.no_truncation()
    tokenizer.no_padding()
    # As no control tokens are added, all that is left of this step is spaces cut off from tokens' offsets.
    tokenizer.post_processor = ByteLevel(trim_offsets=False)
    return tokenizer


def _compile_template(source: str, name: str) -> jinja2.Template:
    """Compile under the rules that chat templates are written for: those of transformers.

    A template comes with the weights and is not ours to trust, so it runs in Jinja's sandbox.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise TemplateError(f"{name} is not a valid chat template: {error}") from error


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is, where Jinja's own filter escapes characters for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
