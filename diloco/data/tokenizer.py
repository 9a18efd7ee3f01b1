"""Text to token ids: bytes, or a Hugging Face tokenizer, without whatever it adds of its own.

Documents are UTF-8 bytes. A tokenizer is known by a digest, so that two sites can find out whether
theirs are the same wherever they keep them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from diloco.errors import ConfigError
from diloco.extras import missing, require

if TYPE_CHECKING:
    import tokenizers

Tokens: TypeAlias = npt.NDArray[np.int32]

#: What a hub name looks like: NAME or OWNER/NAME.
_HUB_NAME = re.compile(r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$")


class Tokenizer(Protocol):
    """Turns documents into token ids.

    Attributes:
        digest: Names the tokenizer: equal for equal ones.
        vocab_size: Token ids are below this.
        separator: Id of the token that ends a document; no text has it.
    """

    digest: str
    vocab_size: int
    separator: int

    def encode(self, texts: Sequence[bytes]) -> list[Tokens]:
        """Give each document's ids, int32, without separators."""
        ...

    def encode_measured(self, text: bytes) -> tuple[Tokens, Tokens]:
        """Give a document's ids and the bytes of text that each stands for, both int32 [n]."""
        ...

    def measure(self, ids: Tokens) -> tuple[Tokens, bool]:
        """Give the bytes of text that ids without a separator stand for, int32 [n], n > 0.

        Their sum is that of the text that they stand for; and whether that of each is known.
        """
        ...


class ByteTokenizer:
    """Bytes as ids; the separator is 255, a byte that no UTF-8 text has."""

    digest = "bytes"
    vocab_size = 256
    separator = 0xFF

    def encode(self, texts: Sequence[bytes]) -> list[Tokens]:
        """Give each document's bytes."""
        return [np.frombuffer(text, dtype=np.uint8).astype(np.int32) for text in texts]

    def encode_measured(self, text: bytes) -> tuple[Tokens, Tokens]:
        """Give a document's bytes, each of which stands for itself."""
        tokens = np.frombuffer(text, dtype=np.uint8).astype(np.int32)
        return tokens, np.ones_like(tokens)

    def measure(self, ids: Tokens) -> tuple[Tokens, bool]:
        """Give one for each."""
        return np.ones_like(ids), True


class HuggingFaceTokenizer:
    """A tokenizer.json; special tokens in the text are text, and none are added to it."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, *, separator: int, digest: str) -> None:
        """Keep the tokenizer and switch off what depends on more than the text.

        Args:
            tokenizer: Changed in place.
            separator: Id of the token that ends a document.
            digest: Of the file that it was read from.
        """
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True
        self._tokenizer = tokenizer
        self.separator = separator
        self.vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self.digest = f"{digest}/{separator}"

    def encode(self, texts: Sequence[bytes]) -> list[Tokens]:
        """Give each document's ids."""
        encodings = self._tokenizer.encode_batch_fast(
            [text.decode() for text in texts], add_special_tokens=False
        )
        return [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]

    def encode_measured(self, text: bytes) -> tuple[Tokens, Tokens]:
        """Give a document's ids and the bytes from the end of one to the end of the next.

        A character that several tokens share counts for the first of them.
        """
        decoded = text.decode()
        encoding = self._tokenizer.encode(decoded, add_special_tokens=False)
        code_points = np.frombuffer(decoded.encode("utf-32-le"), dtype=np.uint32)
        widths = 1 + (code_points > 0x7F) + (code_points > 0x7FF) + (code_points > 0xFFFF)
        offset_of = np.concatenate([[0], np.cumsum(widths)])
        ends = offset_of[np.array([end for _, end in encoding.offsets], dtype=np.int64)]
        num_bytes = np.diff(np.maximum.accumulate(ends), prepend=0)
        return np.array(encoding.ids, dtype=np.int32), num_bytes.astype(np.int32)

    def measure(self, ids: Tokens) -> tuple[Tokens, bool]:
        """Decode ids and encode their text again; bytes are spread evenly if other ids come out."""
        text = self._tokenizer.decode(ids.tolist(), skip_special_tokens=False).encode()
        again, num_bytes = self.encode_measured(text)
        if np.array_equal(again, ids):
            return num_bytes, True
        bounds = np.arange(len(ids) + 1, dtype=np.int64) * len(text) // len(ids)
        return np.diff(bounds).astype(np.int32), False


def open_tokenizer(name: str, separator: str) -> Tokenizer:
    """Open the tokenizer that `data.tokenizer` names.

    Args:
        name: "bytes", a tokenizer.json, a directory that holds one, or a hub name.
        separator: Token that ends a document; empty: the eos_token of tokenizer_config.json.

    Raises:
        ConfigError: If there is none of that name, it cannot be read, or the separator is unknown.
    """
    if name == "bytes":
        return ByteTokenizer()
    path, config_path = _find(name)
    try:
        from tokenizers import Tokenizer as Implementation
    except ImportError as error:
        raise missing(f'data.tokenizer = "{name}"', "tokenizers") from error
    try:
        text = path.read_text()
        tokenizer = Implementation.from_str(text)
    except Exception as error:  # the package raises bare Exception for whatever it cannot read
        raise ConfigError(
            f'data.tokenizer = "{name}": {path} is not a tokenizer.json: {error}'
        ) from error
    chosen = separator or _eos_token(config_path)
    token = tokenizer.token_to_id(chosen) if chosen else None
    if token is None:
        added = tokenizer.get_added_tokens_decoder().values()
        known = ", ".join(f'"{token.content}"' for token in added if token.special)
        problem = f'has no token "{chosen}"' if chosen else "does not name its eos_token"
        raise ConfigError(
            f'data.tokenizer = "{name}" {problem}; set data.separator to the token that ends a '
            f"document, such as one of its special tokens: {known or 'it has none'}"
        )
    digest = blake3(text.encode()).hexdigest()
    return HuggingFaceTokenizer(tokenizer, separator=token, digest=digest)


def is_hub_tokenizer(name: str) -> bool:
    """Whether a tokenizer is asked for at the hub: no file or directory here has that name."""
    is_name = _HUB_NAME.match(name) is not None and not name.endswith(".json")
    return is_name and name != "bytes" and not Path(name).exists()


def _find(name: str) -> tuple[Path, Path | None]:
    """Find tokenizer.json and tokenizer_config.json, which may be absent."""
    path = Path(name)
    if path.is_dir():
        path = path / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(
                f'data.tokenizer = "{name}": the directory has no tokenizer.json; save one there '
                "with tokenizer.save_pretrained(DIRECTORY) of a fast tokenizer"
            )
    if path.is_file():
        config_path = path.with_name("tokenizer_config.json")
        return path, config_path if config_path.is_file() else None
    if not is_hub_tokenizer(name):
        raise ConfigError(
            f'data.tokenizer = "{name}": no such file or directory below {Path.cwd()}; give '
            '"bytes", a tokenizer.json, a directory that holds one, or a hub name'
        )
    return _download(name)


def _download(name: str) -> tuple[Path, Path | None]:
    require(f'data.tokenizer = "{name}", a name of the hub,', "huggingface_hub")
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    try:
        path = Path(hf_hub_download(name, "tokenizer.json"))
        try:
            config_path = Path(hf_hub_download(name, "tokenizer_config.json"))
        except EntryNotFoundError:
            return path, None
    except (OSError, ValueError, EntryNotFoundError) as error:
        raise ConfigError(
            f'data.tokenizer = "{name}": no such file or directory below {Path.cwd()}, and the '
            f"Hugging Face hub gives no tokenizer.json of that name: {error}"
        ) from error
    return path, config_path


def _eos_token(config_path: Path | None) -> str:
    """Read the eos_token, which is a string or an object with a content; empty if unnamed."""
    if config_path is None:
        return ""
    try:
        eos: Any = json.loads(config_path.read_text()).get("eos_token")
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {config_path} next to the tokenizer: {error}") from error
    return str(eos["content"] if isinstance(eos, dict) else eos or "")
