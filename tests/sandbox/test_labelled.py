"""The kinds of labelled programs, and the ratio of tool errors that follows from them."""

from grpo_roc_jax.sandbox.result import ERROR_KINDS
from grpo_roc_jax.tools import CodeCall, ToolsConfig, make_executor
from tests.helpers.labelled import LABELLED


def test_every_kind_is_right() -> None:
    calls = [
        CodeCall(str(number), "python_code_with_standard_io", {"code": code}, None)
        for number, (_, code) in enumerate(LABELLED)
    ]
    with make_executor(ToolsConfig(workers=4, roots=1, wall_s=2.0, cpu_s=2.0)) as executor:
        results = executor.run(calls)
    wrong = [(code, kind, r.kind) for (kind, code), r in zip(LABELLED, results, strict=True) if r.kind != kind]
    assert wrong == []
    assert not any(result.infra for result in results)
    assert [result.counts_as_error for result in results] == [kind in ERROR_KINDS for kind, _ in LABELLED]
