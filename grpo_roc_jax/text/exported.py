"""The built-in dialogue as a jinja chat template, so that servers prompt an exported model as in training.

It opens every assistant turn with `<reason>`, as the rStar2 template does (arXiv:2508.20722, Fig. 3). It is made of
the same strings that `ChatFormat` uses, so it renders a conversation to the tokens of training.
"""

import json

from grpo_roc_jax.text.chat_format import ChatFormat
from grpo_roc_jax.text.conventions import CONVENTIONS
from grpo_roc_jax.text.forms import PYTHON_TOOL, CallForm
from grpo_roc_jax.types import ToolCall

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
{%- set said = said[8:] if said.startswith('<reason>') else said -%}
{%- set said = said.rstrip('\\n') if message.tool_calls and TRIM_TEXT else said -%}
{{- close.text + said -}}
{%- for call in message.tool_calls or [] -%}
{%- set call = call.function if call.function is defined else call -%}
{%- set given = call.arguments if call.arguments is string else call.arguments | tojson -%}
WRITE_CALL
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
_JSON_CALL = """
{{- (CALL_BETWEEN if not loop.first else CALL_OPEN if said | trim else CALL_ALONE) + call.name + CALL_MIDDLE -}}
{{- given + (CALL_CLOSE if loop.last else '') -}}
"""
_CODE_CALL = """
{%- set code = call.arguments.code if call.arguments is mapping and call.arguments | length == 1 else '' -%}
{%- set code = code if call.name == PYTHON_TOOL and code is string else '' -%}
{%- set key = (code | trim)[1:] | trim if (code | trim)[:1] == '{' else '' -%}
{%- if code | trim and '<python>' not in code and '</python>' not in code
    and not key.startswith('"name"') and not key.startswith('"arguments"') -%}
{{- '\\n<python>' + code + '</python>' -}}
{%- else -%}
{%- set given = given | replace('</python>', '<\\\\/python>') -%}
{{- '\\n<python>{"name": "' + call.name + '", "arguments": ' + given + '}</python>' -}}
{%- endif -%}
"""
_XML_CALL = """
{%- if call.arguments is string or '</parameter>' in given or '<parameter=' in given or '</function>' in given
    or '</tool_call>' in given -%}
{{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' + given + '}\\n</tool_call>' -}}
{%- else -%}
{{- '\\n<tool_call>\\n<function=' + call.name + '>\\n' -}}
{%- for key, value in call.arguments.items() -%}
{{- '<parameter=' + key + '>\\n' + (value if value is string else value | tojson) + '\\n</parameter>\\n' -}}
{%- endfor -%}
{{- '</function>\\n</tool_call>' -}}
{%- endif -%}
"""
_OWN_CALLS = {"code": _CODE_CALL, "xml": _XML_CALL}
_NO_CALL = "{{- raise_exception('tool_calls: this template cannot write the FORM form; put the calls into content') -}}"


def exported_template(chat: ChatFormat) -> str:
    """A jinja template of the dialogue of `chat`.

    The tools of training are written out in its system message. A system message of the conversation replaces that
    message entirely. Tool outputs are rendered as the server passes them, neither escaped nor cut. Structured calls are
    written in the form of the run; the template refuses them in a form of which it would have to know more than names
    and arguments.
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
    form = next(name for name, other in CONVENTIONS.items() if other is chat.convention)
    values["TRIM_TEXT"] = form != "hermes"  # before calls, as in demonstrations
    if form in _OWN_CALLS:
        values["PYTHON_TOOL"] = PYTHON_TOOL
        write_call = _OWN_CALLS[form]
    elif texts := _texts_around(chat.convention):
        values |= texts
        write_call = _JSON_CALL
    else:
        write_call = _NO_CALL.replace("FORM", form)
    lines = [f"{{%- set {name} = {json.dumps(value, ensure_ascii=False)} -%}}" for name, value in values.items()]
    return "\n".join(lines) + _BODY.replace("WRITE_CALL", write_call.strip())


def _texts_around(form: CallForm) -> dict[str, str]:
    """The texts around the names and the JSON arguments of calls; empty for a form that writes more than these."""
    before, name, arguments = "xBEFOREx", "xNAMEx", {"xKEYx": 1}
    call, given = ToolCall(name, arguments, ""), json.dumps(arguments)
    one, two, three = (form.write_calls(before, [call] * number) for number in (1, 2, 3))
    opening, _, rest = one.partition(name)
    middle, _, close = rest.partition(given)
    alone, written = form.write_calls("", [call]).partition(name)[0], f"{name}{middle}{given}"
    between = two.removeprefix(f"{opening}{written}").removesuffix(f"{written}{close}")
    if not opening.startswith(before) or three != f"{opening}{written}{between}{written}{between}{written}{close}":
        return {}
    texts = {"CALL_OPEN": opening.removeprefix(before), "CALL_ALONE": alone, "CALL_MIDDLE": middle}
    return texts | {"CALL_BETWEEN": between, "CALL_CLOSE": close}
