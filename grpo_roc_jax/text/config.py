"""Settings of the text stage: which tokenizer, what the prompt says, how long an observation may be."""

import datetime
import json
from dataclasses import field
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge

from grpo_roc_jax.settings.options import AtLeast1, Axis, kind, settings

CHATML_TAGS = ("<|im_start|>", "<|im_end|>")
LLAMA_TAGS = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
PROTOCOL_TAGS = (
    "<reason>",
    "</reason>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<answer>",
    "</answer>",
    "<tools>",
    "</tools>",
)
"""Tags with a meaning in the dialogue. Text from outside (problems, observations) can never produce them."""
REWARD_TOKENS = ("<|high_reward|>", "<|low_reward|>")
"""Conditioning tokens of RC-GRPO (arXiv:2602.03025); part of the built-in tokenizers."""

DEFAULT_SYSTEM = (
    "You solve problems that have one checkable answer. Think inside <reason> </reason> and, where a computation "
    "helps, call the tool instead of computing in your head; read its output and think again. When you are sure, "
    "give the final answer once, inside <answer> </answer>."
)
DEFAULT_INSTRUCTION = "Put the final answer inside <answer> </answer> as \\boxed{...}, and nothing else in the box."


class TokenizerSource(Axis, axis="text.tokenizer"):
    """The origin of the tokenizer."""

    other = "file"
    path: ClassVar[str] = ""
    """Path of a file or folder; empty for the built-in tokenizers."""
    eos_token: ClassVar[str] = ""
    pad_token: ClassVar[str] = ""
    added_tokens: ClassVar[tuple[str, ...]] = ()


@kind("toy")
class ToyTokenizer(TokenizerSource):
    """The small SentencePiece model that ships with the package; it has the reward tokens of RC-GRPO."""


@kind("bytes")
class ByteLevelTokenizer(TokenizerSource):
    """One token per byte; it has the reward tokens of RC-GRPO."""


@settings
class PublishedTokenizer(TokenizerSource):
    """A tokenizer that was published with a model."""

    eos_token: str = ""
    """Text of the token that ends a turn or a text, for a `tokenizer.json` that does not say; empty looks it up."""
    pad_token: str = ""
    """Text of the padding token; empty looks it up and falls back to the end token. Masks never come from ids, so a
    padding id equal to the end id is harmless."""
    added_tokens: tuple[str, ...] = ()
    """Special tokens appended to the vocabulary, such as `<|high_reward|> <|low_reward|>` for RC-GRPO; tokens that it
    already has change nothing. They use the embedding rows that the model leaves unused (267 in Qwen3, of 151 936),
    and the supervised stage trains them; a model without unused rows is refused. Exported models contain them."""

    def __post_init__(self) -> None:
        if not all(self.added_tokens) or len(set(self.added_tokens)) != len(self.added_tokens):
            raise ValueError(f"text.tokenizer.added_tokens = {self.added_tokens}; must be texts, each given once")


@kind("model")
class ModelTokenizer(PublishedTokenizer):
    """The tokenizer of `model.path`."""


@kind("file")
class TokenizerFile(PublishedTokenizer):
    """A SentencePiece `.model`, a `tokenizer.json`, a folder that holds one, or a GGUF file (`FILE.gguf`,
    `package:NAME`); its path alone is enough."""

    path: str = ""
    """Path of the file or folder."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.path:
            raise ValueError("text.tokenizer is empty; must be toy, bytes, model or a path")
        if self.path.endswith(".model") and (self.eos_token or self.pad_token):
            raise ValueError(
                f"text.tokenizer: eos_token = {self.eos_token!r}, pad_token = {self.pad_token!r} with {self.path!r}, "
                "which names both itself; they are for a tokenizer.json: leave them empty"
            )


OF_CONVERSATIONS = ("messages", "tools", "add_generation_prompt")
"""Variables of a template that no setting changes."""


class Template(Axis, axis="text.template"):
    """How roles are written."""


@kind("auto")
class AutoTemplate(Template):
    """The built-in template whose markers the tokenizer has as tokens, else ChatML as text. The built-in ones open a
    turn with `<reason>`."""


@kind("chatml")
class ChatMLTemplate(Template):
    """ChatML: `<|im_start|>role`."""


@kind("llama3")
class Llama3Template(Template):
    """Llama 3: `<|start_header_id|>role<|end_header_id|>`."""


@kind("model")
class PublishedTemplate(Template):
    """The chat template of the tokenizer's folder, as published."""

    file: str = ""
    """A jinja file to use instead of the folder's own."""
    history: Literal["append", "refuse"] = "append"
    """What to do when the template would rewrite earlier turns (drop their thinking): keep what was sampled, which is
    what the policy saw and is trained on, or refuse with the difference."""
    variables: tuple[str, ...] = ()
    """Further variables of the template: `name=value` with JSON or text as value, such as `enable_thinking=false`."""
    date: str = ""
    """The date (YYYY-MM-DD) of a template that asks for today's (`strftime_now`, `date_string`). Empty: the day on
    which the run began, written to its `config.yaml`, so that a resumed run renders alike."""

    def __post_init__(self) -> None:
        wrong = [text for text in self.variables if not text.partition("=")[0].isidentifier() or "=" not in text]
        if wrong:
            raise ValueError(f"text.template.variables = {wrong}; must be name=value, such as enable_thinking=false")
        try:
            datetime.date.fromisoformat(self.date or "2000-01-01")
        except ValueError:
            raise ValueError(f"text.template.date = {self.date!r}; must be YYYY-MM-DD") from None
        if own := [name for name in OF_CONVERSATIONS if name in self.given]:
            raise ValueError(
                f"text.template.variables sets {', '.join(own)}, which come from the conversation; leave them out"
            )

    @property
    def given(self) -> dict[str, Any]:
        """`variables` by name, and `date_string`, which Llama's templates read, if a date is set."""
        day = datetime.date.fromisoformat(self.date).strftime("%d %b %Y") if self.date else ""
        values = {"date_string": day} if day else {}
        for text in self.variables:
            name, _, value = text.partition("=")
            try:
                values[name] = json.loads(value)
            except (RecursionError, ValueError):
                values[name] = value
        return values


@settings
class TextConfig:
    """Tokenizer, prompt and observation settings."""

    tokenizer: TokenizerSource = field(default_factory=ToyTokenizer)
    """The origin of the tokenizer: a kind, or a path."""
    template: Template = field(default_factory=AutoTemplate)
    """How roles are written."""
    calls: Literal[
        "auto",
        "hermes",
        "xml",
        "llama3",
        "pythonic",
        "gemma",
        "function_gemma",
        "gemma4",
        "mistral",
        "mistral_args",
        "olmo",
        "phi",
        "granite",
        "glm",
        "deepseek",
        "deepseek_v31",
        "kimi",
        "harmony",
        "code",
    ] = "auto"
    """How tool calls are written, by family; `docs/models.md` shows each form. `auto` renders a call with a published
    template and takes the form that reads it; a run with tools whose template writes calls that none reads, or says
    nothing of calls, is refused. The built-in templates have Hermes tags. `code` is the shortest form, for a model that
    learns to call here."""
    system: str = ""
    """System text; `default` stands for the library's own. Empty with `tools_section` off: no system message, which
    suits the small models trained from scratch."""
    tools_section: bool = False
    """Lists the tools with their JSON schemas and the call format in the system message; for published models."""
    instruction: str = ""
    """Text before the problem; `default` stands for the library's own request for a boxed answer. Empty for models
    that learn the format from demonstrations."""
    observation_tokens: Annotated[int, Ge(16)] = 128
    """Tokens kept of one tool observation, marker included; the middle is cut out. The published runs keep 256
    characters, which is about this many."""
    max_calls_per_turn: AtLeast1 = 1
    """Calls of one turn that are run; further ones are counted and ignored. At 1 the turn ends at `</tool_call>`."""
