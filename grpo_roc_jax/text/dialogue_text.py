"""The text around the parts of a dialogue, from a built-in template or from a published one."""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_roc_jax.text.config import CHATML_TAGS, DEFAULT_SYSTEM, LLAMA_TAGS, PublishedTemplate, TextConfig
from grpo_roc_jax.text.conventions import CONVENTIONS, CallConvention
from grpo_roc_jax.text.escape import plain_tools
from grpo_roc_jax.text.templates import (
    ChatTemplate,
    Glue,
    TemplateError,
    check_append_only,
    load_template,
    make_glue,
    reads_back,
)
from grpo_roc_jax.text.tokenizer import KNOWN_EOS, Tokenizer, published_ends, published_folder
from grpo_roc_jax.types import ToolCall

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Template:
    """How a message opens and ends; tags in these texts become special ids if the tokenizer has them."""

    header: str
    end: str
    after_end: str

    def open(self, role: str) -> str:
        return self.header.format(role=role)


_CHATML = _Template("<|im_start|>{role}\n", "<|im_end|>", "\n")
_LLAMA3 = _Template("<|start_header_id|>{role}<|end_header_id|>\n\n", "<|eot_id|>", "")


def choose_glue(
    config: TextConfig, tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]]
) -> tuple[Glue, CallConvention]:
    """The text around problems, turns and observations that `config` asks for, and how calls are written in it.

    Raises:
        ValueError: The vocabulary lacks the tokens of the template, the published template cannot be used, or it does
            not say how calls are written and there are `tools`.
    """
    if isinstance(config.template, PublishedTemplate):
        return _published_glue(config, tokenizer, tools)
    convention = CONVENTIONS["hermes" if config.calls == "auto" else config.calls]
    listed = plain_tools(tools if config.tools_section else (), tokenizer, ())
    return _built_in_glue(config, _choose_template(config, tokenizer), listed, convention), convention


def _system_text(config: TextConfig) -> str:
    return DEFAULT_SYSTEM if config.system == "default" else config.system


def _built_in_glue(
    config: TextConfig, template: _Template, tools: Sequence[Mapping[str, Any]], convention: CallConvention
) -> Glue:
    system = "\n\n".join(
        text for text in (_system_text(config), _tools_text(tools, convention) if tools else "") if text
    )
    close = template.end + template.after_end
    generate = f"{close}{template.open('assistant')}<reason>"
    return Glue(
        prompt_open=(template.open("system") + system + close if system else "") + template.open("user"),
        prompt_close=generate,
        end=template.end,
        user_open=template.after_end + template.open("user"),
        observation_open=template.after_end + template.open("user") + "<tool_response>\n",
        observation_between="\n</tool_response>\n<tool_response>\n",
        observation_close="\n</tool_response>" + generate,
    )


def published_template(config: TextConfig, *, with_tools: bool) -> ChatTemplate:
    """The template of the tokenizer's folder, with the file, variables and date of `config.template`."""
    return load_template(published_folder(config.tokenizer), config.template, with_tools=with_tools)


def _published_glue(
    config: TextConfig, tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]]
) -> tuple[Glue, CallConvention]:
    template = published_template(config, with_tools=config.tools_section and bool(tools))
    listed = plain_tools(tools if config.tools_section else (), tokenizer, template.marks)
    convention = CONVENTIONS[_chosen_form(config, template, listed, tools)]
    system_and_tools: dict[str, Any] = {"system": _system_text(config), "tools": listed}
    published = [tokenizer.decode([i]) for i in (tokenizer.eos_id, *sorted(published_ends(config.tokenizer)))]
    ends = [text for text in dict.fromkeys([*KNOWN_EOS, *published]) if text]
    glue = make_glue(template, convention, **system_and_tools, ends=ends)
    written = [text for text in vars(glue).values() if isinstance(text, str)]
    written += [template.written_call(convention, listed)] if tools else []
    if lost := sorted(mark for mark in tokenizer.left_out if any(mark in text for text in written)):
        raise TemplateError(
            f"{template.origin} writes {', '.join(lost)}, without a row in the embedding of the model; name another "
            "template in text.template.file, or a model with such a row"
        )
    difference = check_append_only(template, convention, glue, **system_and_tools)
    if difference and config.template.history == "refuse":
        raise TemplateError(
            f"{template.origin} rewrites earlier turns, {difference}; set text.template.history to append to keep what "
            "was sampled, or name a template that only appends in text.template.file"
        )
    if difference:
        log.warning(
            "%s rewrites earlier turns, %s; the dialogue keeps what was sampled (text.template.history = append)",
            template.origin,
            difference,
        )
    return glue, convention


def _chosen_form(
    config: TextConfig, template: ChatTemplate, listed: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> str:
    """Name of the form of calls: that of the settings, else the one that reads what the template writes.

    Raises:
        TemplateError: There are tools, and no form reads calls as the template writes them, or it writes none.
    """
    if config.calls != "auto":
        written = template.written_call(CONVENTIONS[config.calls], listed)
        if written and not reads_back(CONVENTIONS[config.calls], written):
            log.warning(
                "%s writes calls in another form than text.calls = %s, which is read: %r",
                template.origin,
                config.calls,
                written[:300],
            )
        return config.calls
    if not tools:
        try:
            return template.convention
        except TemplateError:
            return "hermes"
    if form := template.convention_for(listed):
        return form
    raise TemplateError(
        f"{template.origin} does not say how the model calls a tool: it writes no call and names no mark of one; set "
        f"text.calls to the form that the model writes ({', '.join(CONVENTIONS)}), or tools.enabled to nothing"
    )


def _choose_template(config: TextConfig, tokenizer: Tokenizer) -> _Template:
    llama = all(tokenizer.special(tag) is not None for tag in LLAMA_TAGS)
    chatml = all(tokenizer.special(tag) is not None for tag in CHATML_TAGS)
    if config.template.kind == "llama3" and not llama:
        raise ValueError(f"text.template = 'llama3' but the tokenizer lacks {LLAMA_TAGS}; take 'auto' or 'chatml'")
    if config.template.kind == "llama3" or (config.template.kind == "auto" and llama and not chatml):
        return _LLAMA3
    return _CHATML


def _tools_text(tools: Sequence[Mapping[str, Any]], convention: CallConvention) -> str:
    schemas = "\n".join(json.dumps(tool) for tool in tools)
    example = ToolCall("NAME", {"ARGUMENT": "VALUE"}, "")
    how_to = convention.how_to or f"To call one, write\n{convention.write_calls('', [example]).strip()}"
    return (
        "# Tools\n\nYou may call these functions. Their signatures:\n"
        f"<tools>\n{schemas}\n</tools>\n\n{how_to}\n"
        "Its output comes back inside <tool_response> </tool_response>."
    )
