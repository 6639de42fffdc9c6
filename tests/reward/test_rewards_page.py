"""Each row of the table in docs/rewards.md holds, under both settings."""

import re
from contextlib import closing
from pathlib import Path

from grpo_roc_jax.reward.verify import Verifier

PAGE = Path(__file__).parents[2] / "docs" / "rewards.md"
ROWS = re.findall(r"^\| `(.+)` \| `(.+)` \| (yes|no) \| (yes|no) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)


def test_every_row_of_the_table_holds():
    lines = PAGE.read_text(encoding="utf-8").split("| answer | reference |")[1].splitlines()
    assert len(ROWS) == sum(line.startswith("| `") for line in lines) >= 30, "the table is read whole"
    for strict, column in ((False, 2), (True, 3)):
        with closing(Verifier(workers=1, strict=strict)) as pool:
            verdicts = pool.compare([row[:2] for row in ROWS])
        pairs = zip(ROWS, verdicts, strict=True)
        assert [row for row, verdict in pairs if (verdict == "correct") != (row[column] == "yes")] == []
