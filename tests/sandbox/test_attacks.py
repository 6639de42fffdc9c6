"""Attack programs at every level that this host offers; the effects of each are checked from outside."""

from collections.abc import Sequence

import pytest

from grpo_roc_jax.sandbox import _probing, isolation
from tests.helpers.arena import Arena
from tests.helpers.attacks import ATTACKS, FORGING, HOSTILE, Attack

LEVELS = isolation.LEVELS


@pytest.fixture(scope="module")
def probe() -> _probing.Probe:
    return _probing.probe_host()


def test_no_program_gets_through_a_strong_level_but_one() -> None:
    exempt = {attack.name for attack in FORGING}
    strong = {"L2", "L3", "L4"}
    known = [a.name for a in ATTACKS if strong & set(a.through.split()) and a.name not in exempt]
    # Threads are counted by looking now and then where the host has no own user to count them by.
    assert known == ["proc_thread_bomb"]


def suite(level: str, attacks: Sequence[Attack] = ATTACKS, together: int = 1) -> list[str]:
    """Faults of the attacks at a level, each with the name of the attack. Where several run together and something is
    wrong, they run again one by one."""
    arena, faults = Arena(level), []
    try:
        for first in range(0, len(attacks), together):
            batch = attacks[first : first + together]
            failures = arena.attack(*batch)
            alone = [fault for attack in batch for fault in arena.attack(attack)] if failures and together > 1 else []
            faults += alone or failures
        faults += arena.strays()
    finally:
        arena.close()
    return faults


def test_hostile_programs_at_the_best_level(probe: _probing.Probe) -> None:
    if not probe.available:
        pytest.skip(probe.table())
    assert suite(probe.available[-1], HOSTILE, together=6) == []


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_every_program(level: str, probe: _probing.Probe) -> None:
    if level not in probe.available:
        pytest.skip(f"{level} cannot be reached here\n{probe.table()}")
    assert suite(level) == []
