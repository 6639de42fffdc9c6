"""The built-in dialogue as a jinja chat template, so that servers prompt an exported model as in training.

It opens every assistant turn with `<reason>`, as the rStar2 template does (arXiv:2508.20722, Fig. 3). It is made of
the same strings that `ChatFormat` uses, so it renders a conversation to the tokens of training.
"""

import json

from grpo_roc_jax.text.chat_format import ChatFormat

_BODY = """
{%- if messages[0].role == 'system' -%}
{%- set turns = messages[1:] -%}
{{- SYSTEM_OPEN + messages[0].content + SYSTEM_CLOSE -}}
{%- else -%}
{%- set turns = messages -%}
{{- PROMPT_OPEN -}}
{%- endif -%}
{%- set close = namespace(text='') -%}
{%- for message in turns -%}
{%- set before = turns[loop.index0 - 1].role if not loop.first else '' -%}
{%- if message.role == 'user' -%}
{%- if loop.first -%}
{{- INSTRUCTION + message.content -}}
{%- elif before == 'assistant' -%}
{{- USER_OPEN + message.content -}}
{%- else -%}
{{- raise_exception('a user message follows an assistant message or stands first') -}}
{%- endif -%}
{%- set close.text = PROMPT_CLOSE -%}
{%- elif message.role == 'tool' -%}
{%- if before not in ('assistant', 'tool') -%}
{{- raise_exception('a tool message follows an assistant or a tool message') -}}
{%- endif -%}
{{- (BETWEEN if before == 'tool' else OBSERVATION_OPEN) + message.content -}}
{%- set close.text = OBSERVATION_CLOSE -%}
{%- elif message.role == 'assistant' -%}
{%- set said = (message.content or '') | string -%}
{{- close.text + (said[8:] if said.startswith('<reason>') else said) -}}
{%- for call in message.tool_calls or [] -%}
{%- set call = call.function if call.function is defined else call -%}
{{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' -}}
{{- (call.arguments if call.arguments is string else call.arguments | tojson) + '}\\n</tool_call>' -}}
{%- endfor -%}
{{- END -}}
{%- set close.text = '' -%}
{%- else -%}
{{- raise_exception('unknown role ' + message.role) -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- close.text -}}
{%- endif -%}
"""


def exported_template(chat: ChatFormat) -> str:
    """A jinja template of the dialogue of `chat`.

    The tools of training are written out in its system message. A system message of the conversation replaces that
    message entirely. Tool outputs are rendered as the server passes them, neither escaped nor cut.
    """
    glue = chat.glue
    header = glue.user_open.lstrip("\n")
    values = {
        "PROMPT_OPEN": glue.prompt_open,
        "SYSTEM_OPEN": header.replace("user", "system"),
        "SYSTEM_CLOSE": glue.end + glue.user_open,
        "INSTRUCTION": chat.instruction,
        "USER_OPEN": glue.user_open,
        "PROMPT_CLOSE": glue.prompt_close,
        "END": glue.end,
        "OBSERVATION_OPEN": glue.observation_open,
        "BETWEEN": glue.observation_between,
        "OBSERVATION_CLOSE": glue.observation_close,
    }
    lines = [f"{{%- set {name} = {json.dumps(value, ensure_ascii=False)} -%}}" for name, value in values.items()]
    return "\n".join(lines) + _BODY
