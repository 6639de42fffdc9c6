"""The tool-error ratio on labelled programs, compared with one that is read from the text of the observation."""

from dataclasses import replace

import pytest

from grpo_roc_jax.sandbox.result import ERROR_KINDS
from grpo_roc_jax.tools import CodeCall, ToolsConfig, make_executor, observe
from tests.helpers.labelled import LABELLED

CONFIG = ToolsConfig(workers=4, roots=1, wall_s=2.0, cpu_s=2.0, observation="rstar2")


@pytest.fixture(scope="module")
def results() -> list:
    with make_executor(CONFIG) as executor:
        calls = [
            CodeCall(str(number), "python_code_with_standard_io", {"code": code}, None)
            for number, (_, code) in enumerate(LABELLED)
        ]
        return executor.run(calls)


def test_every_kind_is_right(results: list, capsys: pytest.CaptureFixture) -> None:
    assert len(LABELLED) >= 60
    wrong = [(code, kind, r.kind) for (kind, code), r in zip(LABELLED, results, strict=True) if r.kind != kind]
    assert wrong == []
    assert not any(result.infra for result in results)
    errors = sum(result.counts_as_error for result in results)
    assert errors == sum(kind in ERROR_KINDS for kind, _ in LABELLED)
    missed, flagged = text_match(results)
    with capsys.disabled():
        print(
            f"\ntool-error ratio {errors}/{len(results)}, all right; the word 'error' in the text would miss "
            f"{missed} of {errors} failures and flag {flagged} of {len(results) - errors} good calls: "
            f"{(missed + flagged) / len(results):.0%} wrong"
        )
    assert missed and flagged


def text_match(results: list) -> tuple[int, int]:
    """Failures that a search for 'error' in the observation misses, and good calls that it flags."""
    texts = [
        observe(replace(r, error_type=said(r)), code, CONFIG) for r, (_, code) in zip(results, LABELLED, strict=True)
    ]
    found = ["error" in text.lower() for text in texts]
    missed = sum(result.counts_as_error and not hit for result, hit in zip(results, found, strict=True))
    return missed, sum(result.ok and hit for result, hit in zip(results, found, strict=True))


def said(result) -> str:
    """The error type in the text. Other executors do not print the types that only this one has."""
    own = {"EarlyExit", "SystemExit"}
    return "exit" if result.error_type in own else result.error_type
