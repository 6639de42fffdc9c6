"""Settings of the text stage: which tokenizer, what the prompt says, how long an observation may be."""

from dataclasses import dataclass
from typing import Literal

CHATML_TAGS = ("<|im_start|>", "<|im_end|>")
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
"""Tags with a meaning in the dialogue. Text that is not ours (problems, observations) can never produce them."""
REWARD_TOKENS = ("<|high_reward|>", "<|low_reward|>")
"""Conditioning tokens of RC-GRPO (arXiv:2602.03025); part of the tokenizers that we make ourselves."""

DEFAULT_SYSTEM = (
    "You solve problems that have one checkable answer. Think inside <reason> </reason> and, where a computation "
    "helps, call the tool instead of computing in your head; read its output and think again. When you are sure, "
    "give the final answer once, inside <answer> </answer>."
)
DEFAULT_INSTRUCTION = "Put the final answer inside <answer> </answer> as \\boxed{...}, and nothing else in the box."


@dataclass(frozen=True)
class TextConfig:
    """Tokenizer, prompt and observation settings."""

    tokenizer: str = "toy"
    """`toy` (the small SentencePiece model that ships with the package), `bytes`, `model` (that of `model.path`), or a
    path: a SentencePiece `.model`, a `tokenizer.json`, or a folder that holds one."""
    eos_token: str = ""
    """Text of the token that ends a turn or a text, for a `tokenizer.json` that does not say; empty looks it up."""
    pad_token: str = ""
    """Text of the padding token; empty looks it up and falls back to the end token. Masks never come from ids, so a
    padding id equal to the end id is harmless."""
    added_tokens: tuple[str, ...] = ()
    """Special tokens put behind the vocabulary of a published tokenizer, such as `<|high_reward|> <|low_reward|>` for
    RC-GRPO; those it has already change nothing. Their rows of the embedding are those that the model keeps free (267
    in Qwen3, of 151 936), and the supervised stage trains them; a model without free rows is refused. Exports hold
    them."""
    template: Literal["auto", "chatml", "llama3", "model"] = "auto"
    """How roles are written. `auto` takes the one whose markers the tokenizer has as tokens, else ChatML as text; both
    open a turn with `<reason>`. `model` takes the chat template of the tokenizer's folder, as published."""
    template_file: str = ""
    """A jinja file to take instead of the folder's own chat template, under `model`."""
    history: Literal["append", "refuse"] = "append"
    """What to do when the template of `model` would rewrite earlier turns (drop their thinking): go on with what was
    sampled, which is what the policy saw and is trained on, or refuse with the difference."""
    calls: Literal["auto", "hermes", "llama3", "gemma"] = "auto"
    """How tool calls are written: Hermes tags (Qwen, rStar2), a JSON turn (Llama 3), or a `tool_code` block (Gemma).
    `auto` goes by what the template of `model` mentions, else Hermes."""
    system: str = ""
    """System text; `default` stands for the library's own. Empty with `tools_section` off: no system message, which
    is what the small models trained from scratch want."""
    tools_section: bool = False
    """Lists the tools with their JSON schemas and the call format in the system message; for published models."""
    instruction: str = ""
    """Stands once, before the problem; `default` stands for the library's own request for a boxed answer. Empty for
    models that learn the format from demonstrations."""
    observation_tokens: int = 128
    """Tokens kept of one tool observation, marker included; the middle is cut out. The published runs keep 256
    characters, which is about this many."""
    max_calls_per_turn: int = 1
    """Calls of one turn that are run; further ones are counted and ignored. At 1 the turn ends at `</tool_call>`."""

    def __post_init__(self) -> None:
        if not self.tokenizer:
            raise ValueError("text.tokenizer is empty; 'toy', 'bytes' or a path is wanted")
        if self.observation_tokens < 16:
            raise ValueError(
                f"text.observation_tokens = {self.observation_tokens}; at least 16 are wanted, "
                "as the marker of a cut needs some of them"
            )
        if self.max_calls_per_turn < 1:
            raise ValueError(f"text.max_calls_per_turn = {self.max_calls_per_turn}; at least 1 is wanted")
        if self.added_tokens and self.tokenizer in ("toy", "bytes"):
            raise ValueError(
                f"text.added_tokens = {self.added_tokens} with text.tokenizer = {self.tokenizer!r}, whose vocabulary "
                "is fixed and has the reward tokens already; leave them out, or take a published tokenizer"
            )
        if not all(self.added_tokens) or len(set(self.added_tokens)) != len(self.added_tokens):
            raise ValueError(f"text.added_tokens = {self.added_tokens}; texts, each once, are wanted")
        own = self.tokenizer in ("toy", "bytes") or self.tokenizer.endswith(".model")
        if own and (self.eos_token or self.pad_token):
            raise ValueError(
                f"text.eos_token = {self.eos_token!r}, text.pad_token = {self.pad_token!r} with text.tokenizer = "
                f"{self.tokenizer!r}, which names both itself; they are for a tokenizer.json: leave them empty"
            )
        if self.template != "model" and (self.template_file or self.history == "refuse"):
            raise ValueError(
                f"text.template_file = {self.template_file!r}, text.history = {self.history} with text.template = "
                f"{self.template}: both are about published templates; set text.template model, or leave them out"
            )
