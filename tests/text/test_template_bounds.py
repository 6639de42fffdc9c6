"""Templates that would write 10 GB or never end are refused in bounded time and memory; others render as before."""

import time

import jinja2
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from grpo_roc_jax.text import template_bounds
from grpo_roc_jax.text.template_bounds import BoundedEnvironment
from grpo_roc_jax.text.templates import ChatTemplate, TemplateError

DOUBLE = "{%% set ns = namespace(x=%s) %%}{%% for i in range(60) %%}%s{%% endfor %%}"
BOMBS = {
    "output": "{% for i in range(99999) %}{% for j in range(99999) %}xxxxxxxxxx{% endfor %}{% endfor %}",
    "silent": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "texts": "{% for i in 'x'*9999 %}{% for j in 'x'*9999 %}{% endfor %}{% endfor %}",
    "repeat": "{{ 'x' * 10000000000 }}",
    "lists": "{{ [1] * 10000000000 }}",
    "plus": DOUBLE % ("'x'", "{% set ns.x = ns.x + ns.x %}"),
    "tilde": DOUBLE % ("'x'", "{% set ns.x = ns.x ~ ns.x %}"),
    "block": DOUBLE % ("'x'", "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}"),
    "quotes": DOUBLE % ("'\"'", "{% set ns.x = ns.x|tojson %}"),
    "digits": DOUBLE % ("9", "{% set ns.x = ns.x * ns.x %}"),
    "macro": "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% else %}x{% endif %}{% endmacro %}{{ m(60) }}",
    "recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "power": "{{ 9 ** 9 ** 9 }}",
    "center": "{{ 'x'|center(10000000000) }}",
    "ljust": "{{ 'x'.ljust(10000000000) }}",
    "format": "{{ '%10000000000d'|format(1) }}",
    "percent": "{{ '%*d' % (10000000000, 1) }}",
    "braces": "{{ '{:>10000000000}'.format(1) }}",
    "nested": "{{ '{:>{}}'.format(1, 10000000000) }}",
    "indent": "{{ 'x\ny'|indent(10000000000) }}",
    "tojson": "{{ [1]|tojson(indent=10000000000) }}",
    "replace": "{{ ('x'*1000000)|replace('x', 'y'*1000000) }}",
    "join": "{{ ('y'*1000000).join(['x']*1000000) }}",
    "iterator": "{{ range(99999)|map('string')|join('y'*9999) }}",
    "batch": "{{ [1]|batch(10000000000, 'x')|list }}",
    "lipsum": "{{ lipsum(n=100000) }}",
    **{
        f"nested lists {after}": "{% set a = [1] * 1000000 %}{% set b = [a] * 1000000 %}{{ b" + after + " }}"
        for after in ("", "|tojson", "|string", "|pprint", " ~ ''", "|upper", "|sum(start=[])", "|join")
    },
    "joined items": "{{ ''.join(['x' * 1000000] * 1000000) }}",
    "translate": "{{ ('x' * 1000000).translate({120: 'y' * 1000000}) }}",
    "tabs": "{{ ('\t' * 1000000).expandtabs(1000000) }}",
    "bytes": "{{ 'x'.encode() * 10000000000 }}",
    "fields": "{{ ('{0}' * 1000000).format('x' * 1000000) }}",
    "widths": "{{ ('{:999999}' * 1000000).format(1) }}",
    "percents": "{{ ('%999999d' * 100000) % (1,) }}",
    "indent lines": "{{ ('x\n' * 1000000)|indent(1000000) }}",
    "indent text": "{{ ('x\n' * 1000000)|indent('x' * 1000000) }}",
    "wrap": "{{ ('x ' * 100000)|wordwrap(1, wrapstring='x' * 1000000) }}",
    "json lines": "{{ ([1] * 1000000)|tojson(indent=1000000) }}",
    "attributes": "{{ {'a': ['x' * 1000000] * 1000000}|xmlattr }}",
    "deep": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
}


SLOW = [name for name in BOMBS if name.startswith("nested lists")][1:]
"""They differ in what writes the list out."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in BOMBS]
)
def test_a_bomb_is_refused_with_one_message(name, monkeypatch):
    monkeypatch.setattr(template_bounds, "LONGEST_S", 0.2)
    begun = time.process_time()
    with pytest.raises(TemplateError) as caught:
        ChatTemplate(BOMBS[name], {}, "theirs").render([{"role": "user", "content": "hi"}])
    assert time.process_time() - begun < 5 and str(caught.value).startswith("theirs: ") and len(str(caught.value)) < 300


HARMLESS = (
    "{{ messages[0].content ~ '|' ~ 1 ~ none }}",
    "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ loop.last }}{{ m['content']|trim }}{% endfor %}",
    "{% for m in messages[::-1] if m.role == 'user' %}{{ m.content }}{% else %}none{% endfor %}",
    "{% for k, v in {'a': 1, 'b': 2}.items() %}{{ k }}={{ v }};{% endfor %}",
    "{% for x in messages|selectattr('role', 'equalto', 'user') %}{{ loop.first }}{{ loop.nextitem }}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n ** 2 % 3 }}",
    "{{ '%05.1f|%s' % (2.5, 'x') }}{{ '%s'|format('a') }}{{ '{:>5}'.format(7) }}{{ 'a-b'.split('-')|join(', ') }}",
    "{% macro m(a, b='c') %}[{{ a }}{{ b }}{{ caller() }}]{% endmacro %}{% call m('x') %}y{% endcall %}",
    "{%- set t -%}  a {{ 'b' }} {%- endset -%}{{ t|upper }}{{ {'a': [1, 2]}|tojson }}{{ 'x'|center(9) }}",
    "{% for i in range(3) recursive %}{{ i }}{% if i == 0 %}{{ loop([7, 8]) }}{% endif %}{% endfor %}",
    "{% macro m(function, context) %}{{ function }}{{ context }}{% endmacro %}{{ m(function='f', context='c') }}",
    "{% set ns = namespace(function='f', context='c', template='t') %}{{ ns.function ~ ns.context ~ ns.template }}",
    "{{ dict(function='f', self=1, context=2) }}{{ '{function}{self}'.format(function='f', self=1) }}",
    "{{ 'a\nb'|indent(2) }}{{ 'aXb'|replace('X', 'yy') }}{{ [3, 1, 2]|sort|list }}{{ range(4)|sum }}{{ 2 + 3 * 4 }}",
)


@pytest.mark.parametrize("source", HARMLESS)
def test_other_templates_render_as_in_the_environment_without_bounds(source):
    messages = [{"role": role, "content": f" {role} "} for role in ("system", "user", "assistant")]
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    bounded = BoundedEnvironment(trim_blocks=True, lstrip_blocks=True)
    variables = {"messages": messages, "template": "t", "self": "s", "context": "c"}
    expected = plain.from_string(source).render(variables)
    assert expected and bounded.render(bounded.from_string(source), **variables) == expected


def test_a_template_that_is_rendered_again_has_its_rounds_again():
    environment = BoundedEnvironment()
    template = environment.from_string("{% for i in range(99999) %}{% endfor %}x")
    assert {environment.render(template) for _ in range(12)} == {"x"}
    rounds = "{% for i in range(12) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(jinja2.TemplateError):
        environment.render(environment.from_string(rounds))
