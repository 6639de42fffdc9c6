"""Answers in a form that the request names: a policy of random weights is held to it, whatever else is in the batch."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor

import jsonschema
import pytest

import grpo_roc_jax as g
from grpo_roc_jax.serving.answer_formats import AnswerGrammars, TurnFormat, TurnGrammar, read_format
from grpo_roc_jax.text.chat_format import make_chat
from grpo_roc_jax.text.conventions import CONVENTIONS
from grpo_roc_jax.text.tokenizer import ByteTokenizer
from tests.helpers.serving import WEATHER, served, small_policy
from tests.helpers.serving import server as server  # a fixture

pytest.importorskip("llguidance", reason="llguidance (the extra `serve`) is not installed")

ASK = {"role": "user", "content": "Say it."}
THOUGHT_OVER = {"role": "assistant", "content": "</reason>"}
ENDS = {str(small_policy()[0].tokenizer.encode(f"a{text}")[-1]): 3 for text in '"}]'}
"""Logits of tokens that end texts, objects and lists, so that answers of random weights do not grow forever."""


def closed(properties):
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


LEAF = {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}
SCHEMAS = [
    closed({"a": {"type": "string", "maxLength": 6}}),
    closed({"colour": {"enum": ["red", "grün", "藍"]}}),
    {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "minItems": 2, "maxItems": 4},
    {"type": "string", "pattern": "^(ä|ö|ü)ß?$"},
    {"$ref": "#/$defs/node", "$defs": {"node": closed({"v": {"type": "boolean"}, "next": LEAF})}},
    closed({"ключ": {"type": "boolean"}, 'a"b\\c': {"type": "null"}, "🙂": {"enum": ["\n\t"]}}),
    closed({"format": {"type": "string", "format": "password", "maxLength": 3}, "b": {"const": {"format": "path"}}}),
]


def named(schema):
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}}


def answers(server, *messages, **fields):
    return server.chat([ASK, *messages], max_tokens=150, logit_bias=ENDS, **fields)["choices"]


def test_every_finished_answer_follows_its_schema(server):
    """All schemas at once, with free requests between them, which sample what they sample alone."""
    alone = server.chat([ASK], seed=4, max_tokens=40)["choices"][0]["message"]
    with ThreadPoolExecutor(12) as pool:
        futures = [pool.submit(answers, server, THOUGHT_OVER, n=2, seed=i, **named(s)) for i, s in enumerate(SCHEMAS)]
        free = [pool.submit(server.chat, [ASK], seed=4, max_tokens=40) for _ in range(6)]
    assert all(job.result()["choices"][0]["message"] == alone for job in free)
    finished = 0
    for schema, future in zip(SCHEMAS, futures, strict=True):
        for choice in future.result():
            if choice["finish_reason"] != "length":
                finished += 1
                jsonschema.validate(json.loads(choice["message"]["content"]), schema)
    assert finished >= 1.6 * len(SCHEMAS)


CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"
LONG, FIELDS = [ASK, THOUGHT_OVER], {"seed": 6, "max_tokens": 60, "return_token_ids": True}
FORM = {"type": "json_schema", "name": "x", "schema": closed({"a": {"type": "boolean"}}), "strict": True}


FORMS = [
    (CHAT, {"messages": LONG, **named(FORM["schema"])}),
    (CHAT, {"messages": LONG, "guided_choice": ['{"a": true}', '{"a": false}']}),
    (COMPLETIONS, {"prompt": "x", "structured_outputs": {"regex": '\\{"a": (true|false)\\}'}}),
    (GENERATE, {"sampling_params": FIELDS | {"guided_json": FORM["schema"]}}),
    ("/v1/responses", {"input": LONG, "max_output_tokens": 60, "text": {"format": FORM}}),
    ("/v1/messages", {"messages": LONG, "output_config": {"format": FORM}}),
]


@pytest.mark.parametrize(("path", "body"), FORMS)
def test_every_form_of_request(server, path, body):
    status, answer = server.ask(path, FIELDS | body | ({"token_ids": [40, 50]} if path == GENERATE else {}))
    assert status == 200, answer
    ids = answer.get("choices", [answer])[0]["token_ids"]
    assert type(json.loads(small_policy()[0].tokenizer.decode(ids[:-1]))["a"]) is bool


def test_a_begun_answer_goes_on_in_its_schema(server):
    begun = {"role": "assistant", "content": '</reason>{"a": t'}
    (choice,) = answers(server, begun, **named(FORM["schema"]))
    assert json.loads('{"a": t' + choice["message"]["content"]) == {"a": True}
    body = {"messages": [ASK, begun | {"content": '</reason>{"b": '}], **named(FORM["schema"])}
    assert "has begun is not the beginning" in server.ask(CHAT, body)[1]["error"]["message"]


REFUSED = [(named({"type": "foo"}), "Invalid type: foo"), ({"guided_regex": "a", **named({})}, "both given")]
REFUSED += [({"guided_json": '{"items": ' * 700 + "true" + "}" * 700}, "recursion limit")]
REFUSED += [(named({"type": "array", "uniqueItems": True}), "uniqueItems"), ({"guided_json": "{"}, "no JSON")]
REFUSED += [(named({"type": "string", "description": "x" * 300_000}), "at most")]
REFUSED += [({"guided_grammar": "root ::= x"}, "json, regex or choice"), ({"guided_choice": []}, "at least one text")]


@pytest.mark.parametrize(("fields", "reason"), REFUSED, ids=[reason for _, reason in REFUSED])
def test_what_cannot_be_enforced_is_refused_with_its_reason(server, fields, reason):
    status, answer = server.ask(CHAT, {"messages": [ASK], **fields})
    assert status == 400 and reason in answer["error"]["message"] and "rule0" not in answer["error"]["message"]


def test_nothing_is_left_out_silently(server, monkeypatch):
    body = {"messages": [ASK], "max_tokens": 9, **named(FORM["schema"])}
    assert server.not_applied(CHAT, body) is None
    with served(enforce_formats=False) as lax:
        assert lax.not_applied(CHAT, body) == "response_format"
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with served() as bare:
        assert "pip install" in bare.ask(CHAT, body)[1]["error"]["message"]


def test_a_conversation_that_trains_is_sampled_from_the_policy_and_told_so():
    with served() as server:
        for name in ("free", "asked", "told"):
            server.session(name)
        body = {"messages": [ASK], "max_tokens": 9, "return_token_ids": True}
        options = {"temperature": 0, "top_p": 0.1, "min_tokens": 5, "top_logprobs": 2, **named(FORM["schema"])}
        asked = body | options | {"logprobs": True}
        free, held = (server.ask(f"/s/{name}{CHAT}", ask)[1] for name, ask in (("free", body), ("asked", asked)))
        assert free["choices"][0]["token_ids"] == held["choices"][0]["token_ids"]
        assert server.not_applied(CHAT, body, Authorization="Bearer /told") is None
        told = server.not_applied(CHAT, asked, Authorization="Bearer /told")
        assert set(told.split(", ")) == {*options}
        status, answer = server.ask(f"/s/told{CHAT}", body | {"logit_bias": {"5": 1}})
        assert status == 400 and "while a policy trains" in answer["error"]["message"]


@pytest.mark.parametrize("form", CONVENTIONS)
def test_turns_of_all_forms_of_calls_are_turns_of_the_grammar(form):
    """As the template writes them; where arguments are no JSON `strict` is named as what is not enforced."""
    tokenizer = ByteTokenizer()
    strict = {"weather": closed({"city": {"enum": ["Rom"]}})}
    grammars = AnswerGrammars(tokenizer)
    for most in (1, 2):
        chat = make_chat(g.TextConfig(calls=form, max_calls_per_turn=most), tokenizer)
        for answer in (None, read_format({"response_format": {"type": "json_object"}})):
            turn = TurnGrammar(chat, [WEATHER], TurnFormat(answer, strict))
            state = grammars.compiled(turn.text(), {chat.end_id}, "response_format")

            def fits(text, chat=chat, state=state):
                ids, copy = chat.raw_ids(chat.written(text)), state.deep_copy()
                return copy.try_consume_tokens(ids) == len(ids) and copy.is_accepting()

            call = '\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rom"}}\n</tool_call>'
            other = call.replace("Rom", "Ulm")
            calls = form != "pythonic" or answer is None  # nothing marks the beginning of its calls
            assert fits("so</reason>{}") and fits("</reason>hello") == (answer is None)
            assert not calls or all(map(fits, ("so</reason>" + call, "</reason>" + call, "</reason>" + call * most)))
            assert answer is not None or fits("so</reason>well," + call)
            if not turn.unenforced:
                assert not fits("</reason>" + other) and not fits("</reason>" + call + other)
                assert chat.config.max_calls_per_turn == 2 or not fits("</reason>" + call * 2)
            else:
                assert form in ("xml", "gemma", "glm", "pythonic", "olmo", "function_gemma", "gemma4")
