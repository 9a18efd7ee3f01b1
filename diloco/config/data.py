"""The section [data] of a run file: the built-in corpus, or streams of documents.

What must agree between sites is identity; where a site keeps its copy is local, and that the copies
are equal is checked by the digest of the text, tokenizer included, with which an island joins.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from diloco.config.classes import Identity, Local, Needs, Policy, Section
from diloco.config.fields import tuples


def _one_or_several(value: Any) -> Any:
    return (value,) if isinstance(value, str) else tuples(value)


#: A string stands for an array of one.
Patterns: TypeAlias = Annotated[tuple[str, ...], BeforeValidator(_one_or_several)]
#: Part of dotted paths, so without dots.
SourceName: TypeAlias = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")]


class SourceConfig(Section):
    """One stream of documents: files of this site, or a data set of the Hugging Face hub."""

    files: Local[Patterns] = Field(
        default=(),
        description="Paths or globs, in this order, a glob's matches sorted: *.parquet, *.jsonl, "
        "*.json, and all others are text; .gz and .zst may follow. Token ids: *.bin, next to "
        "*.idx, and *.npy",
    )
    hub: Identity[str] = Field(
        default="", description="Data set of the hub, instead of files: OWNER/NAME"
    )
    subset: Annotated[Identity[str], Needs("hub")] = Field(
        default="", description="Configuration of the hub's data set; empty: its default"
    )
    split: Annotated[Identity[str], Needs("hub")] = Field(
        default="train", min_length=1, description="Split of the hub's data set"
    )
    revision: Annotated[Local[str], Needs("hub")] = Field(
        default="main",
        min_length=1,
        description="Branch, tag or commit of the hub's data set; islands need the same commit",
    )
    field: Identity[str] = Field(
        default="text", min_length=1, description="Column or key of a record that is the document"
    )
    document: Annotated[Identity[Literal["paragraph", "line", "file"]], Needs("files")] = Field(
        default="paragraph",
        description="What one document of a text file is: a paragraph ends at an empty line",
    )
    weight: Identity[float] = Field(
        default=1.0, gt=0, description="Share of the training tokens, relative to other sources"
    )
    repeat: Local[bool] = Field(
        default=False,
        description="Whether the source starts again at its end; false: its end is an error",
    )

    @field_validator("hub")
    @classmethod
    def _check_one_origin(cls, value: str, info: ValidationInfo) -> str:
        files = info.data.get("files")
        if files is not None and bool(files) == bool(value):
            raise ValueError(
                "give files or hub, not both"
                if value
                else 'give files = "PATH or GLOB" or hub = "OWNER/NAME"'
            )
        return value


class DataConfig(Section):
    """Where text comes from and how it becomes sequences of tokens."""

    source: Identity[Literal["stdlib", "streams"]] = Field(
        default="stdlib",
        description="Text: sources of Python's standard library, bytes as tokens, or the tables "
        "[data.sources.NAME], which make streams the default",
    )
    sequence_length: Identity[int] = Field(ge=1, description="Tokens of one sequence")
    sources: Identity[dict[SourceName, SourceConfig]] = Field(
        default={}, description="Streams by name, mixed by weight; the names must agree everywhere"
    )
    tokenizer: Annotated[Local[str], Needs("source", "streams")] = Field(
        default="bytes",
        min_length=1,
        description='Of streams: "bytes", or a Hugging Face tokenizer as a tokenizer.json, a '
        "directory that holds one, or a hub name",
    )
    separator: Annotated[Identity[str], Needs("source", "streams")] = Field(
        default="",
        description="Token of the tokenizer that ends a document; empty: its eos_token, bytes: 255",
    )
    held_out_documents: Annotated[Identity[int], Needs("source", "streams")] = Field(
        default=500,
        ge=1,
        description="First documents of each stream, kept for evaluation: no island trains on them",
    )
    shuffle_window: Annotated[Identity[int], Needs("source", "streams")] = Field(
        default=512, ge=1, description="Sequences of a stream that are shuffled together; 1: none"
    )
    handover_samples: Policy[int] = Field(
        default=8192,
        ge=1,
        description="Samples of an island that may be trained on twice when another goes on with "
        "its text, with outer.merge on_arrival, at least two inner steps': it tells where it is at "
        "once when half of them are drawn, and waits rather than draw more untold. A coordinator "
        "that does not answer within 1s is not waited for until it does: what is drawn meanwhile "
        "is warned of and counted, not bounded",
    )

    @model_validator(mode="before")
    @classmethod
    def _choose_source(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and data.get("sources") and "source" not in data:
            return {**data, "source": "streams"}
        return data

    @field_validator("sources")
    @classmethod
    def _check_sources(
        cls, value: dict[str, SourceConfig], info: ValidationInfo
    ) -> dict[str, SourceConfig]:
        source = info.data.get("source")
        if source == "streams" and not value:
            raise ValueError('data.source = "streams" needs a table [data.sources.NAME]')
        if source == "stdlib" and value:
            raise ValueError('data.source = "stdlib" is given as well; remove one of the two')
        return value

    @field_validator("separator")
    @classmethod
    def _check_separator(cls, value: str, info: ValidationInfo) -> str:
        if value and info.data.get("tokenizer") == "bytes":
            raise ValueError('has no effect on data.tokenizer = "bytes"; remove it')
        return value
