"""Each row of the table in docs/rewards.md holds, under both settings."""

import re
from pathlib import Path

import pytest

from grpo_roc_jax.reward.verify import Verifier

PAGE = Path(__file__).parents[2] / "docs" / "rewards.md"
ROWS = re.findall(r"^\| `(.+)` \| `(.+)` \| (yes|no) \| (yes|no) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.fixture(scope="module")
def verifiers():
    pools = [Verifier(workers=1), Verifier(workers=1, strict=True)]
    yield pools
    for pool in pools:
        pool.close()


def test_the_table_is_read_whole():
    lines = PAGE.read_text(encoding="utf-8").split("| answer | reference |")[1].splitlines()
    assert len(ROWS) == sum(line.startswith("| `") for line in lines) >= 30


@pytest.mark.parametrize(("answer", "gold", "default", "strict"), ROWS)
def test_row(verifiers, answer, gold, default, strict):
    said = [pool.compare([(answer, gold)])[0] == "correct" for pool in verifiers]
    assert said == [default == "yes", strict == "yes"]
