"""`--help`: sections and kinds on one screen; `--help SECTION` shows every setting of a section."""

import dataclasses
import textwrap
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from grpo_roc_jax.hints.other_names import advice, close_to
from grpo_roc_jax.settings.layers import is_axis, is_section, item_axis, known_keys
from grpo_roc_jax.settings.options import Axis, as_text, default_of, described, fields_of, type_of

WIDTH = 110


def help_text(config_type: type, words: Sequence[str], prog: str) -> str:
    """The overview, or the settings of the section that the first word names."""
    section = words[0].lstrip("-") if words else ""
    return "\n".join(_section(config_type, section) if section else _overview(config_type, prog))


def _overview(config_type: type, prog: str) -> Iterator[str]:
    yield f"usage: {prog} [CONFIG.yaml ...] [--section.field value ...]"
    yield ""
    yield first_sentence(config_type.__doc__ or "")
    yield "A kind is chosen by name (--advantage pass_at_k); its settings follow (--advantage.k 4)."
    yield f"{prog} --help SECTION shows every setting of a section with its default."
    yield ""
    about = described(config_type)
    plain = []
    for name in fields_of(config_type):
        field_type = type_of(config_type, name)
        axis = axis_of(field_type)
        if axis is not None:
            listed = "list of kinds" if item_axis(field_type) else "kind"
            yield from _row(name, f"{listed}: {', '.join(axis.choices())}")
        elif section := section_of(field_type):
            listed = "" if is_section(field_type) else "list: "
            yield from _row(name, listed + first_sentence(section.__doc__ or about.get(name, "")))
        else:
            plain.append(name)
    yield from _row("(top level)", ", ".join(plain))


def axis_of(field_type: Any) -> type[Axis] | None:
    """The axis that a field chooses from, alone or as a list; None for other fields."""
    return field_type if is_axis(field_type) else item_axis(field_type)


def section_of(field_type: Any) -> type | None:
    """The section of a field, alone or as a list; None for other fields."""
    item = (typing.get_args(field_type) or (None,))[0] if typing.get_origin(field_type) is tuple else field_type
    return item if is_section(item) else None


def _section(config_type: type, name_given: str) -> Iterator[str]:
    """The settings of a section, a choice (`advantage.baseline`), a kind (`shaping.overlong`) or one field."""
    names = name_given.split(".")
    holders: list[type] = [config_type]
    """Where the next name may be a field: a section, or the kinds of an axis."""
    for depth, name in enumerate(names):
        flag = f"--{'.'.join(names[: depth + 1])}"
        kinds = [cls for cls in holders if name in (getattr(cls, "kind", ""), "kind")]
        owner = next((cls for cls in holders if name in fields_of(cls)), None)
        if owner is None and kinds:  # `shaping.overlong`: one of these kinds
            holders = kinds
            continue
        if owner is None:
            yield from _absent(config_type, name_given, names[:depth], holders)
            return
        field_type = type_of(owner, name)
        axis = axis_of(field_type)
        if axis is None and section_of(field_type) is None:
            yield from _setting(owner, name, flag)
            return
        holders = list(axis.choices().values()) if axis else [section_of(field_type)]
        title = (axis or holders[0]).__doc__
    if not issubclass(holders[0], Axis):
        yield first_sentence(title or "")
        for name in fields_of(holders[0]):
            yield from _setting(holders[0], name, f"--{name_given}.{name}")
        return
    yield from textwrap.wrap(f"{name_given}: {first_sentence(title or '')}", WIDTH)
    for cls in holders:
        yield ""
        yield from textwrap.wrap(f"kind {cls.kind}: {first_sentence(cls.__doc__ or '')}", WIDTH, subsequent_indent="  ")
        for name in fields_of(cls):
            yield from _setting(cls, name, f"  --{name_given}.{name}")


def _absent(config_type: type, name_given: str, above: list[str], holders: list[type]) -> Iterator[str]:
    """What to ask for instead of a section or setting that does not exist, and the names that exist."""
    here = list(dict.fromkeys(field for cls in holders for field in fields_of(cls)))
    near = close_to(name_given.split(".")[len(above)], here)
    meant = (
        f"did you mean '{'.'.join([*above, near])}'?"
        if near
        else advice(name_given, name_given, tuple(known_keys(config_type)))
    )
    yield f"there is no {name_given}" + (f"; {meant}" if meant else "")
    if not meant:
        yield from textwrap.wrap(f"{'.'.join(above) or 'sections'}: {', '.join(here)}", WIDTH, subsequent_indent="  ")


def _setting(cls: type, name: str, flag: str) -> Iterator[str]:
    field_type, default = type_of(cls, name), default_of(fields_of(cls)[name])
    axis = axis_of(field_type)
    shown = "no default" if default is dataclasses.MISSING else f"default: {as_text(default)}"
    literals = typing.get_args(field_type) if typing.get_origin(field_type) is typing.Literal else ()
    choices = ", ".join(axis.choices() if axis else map(str, literals))
    text = f"{flag}{f' {{{choices}}}' if choices else ''} ({shown})"
    yield from textwrap.wrap(text, WIDTH, subsequent_indent=" " * 6, break_on_hyphens=False)
    yield from textwrap.wrap(described(cls).get(name, ""), WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)


def _row(name: str, text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=f"  {name:<14} ", subsequent_indent=" " * 17) or [f"  {name}"]


def first_sentence(text: str) -> str:
    """The text up to the first full stop, on one line."""
    one_line = " ".join(text.split())
    head, stop, _ = one_line.partition(". ")
    return head + ("." if stop else "")
