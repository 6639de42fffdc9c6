"""The edits that are written by hand fit the modules as they are."""

import ast

from tests.endurance.mutants import ROOT, WRITTEN, written_mutants


def test_written_mutants_change_their_module_and_leave_it_python():
    mutants = written_mutants()
    assert [mutant.new for mutant in mutants] == [new for *_, new in WRITTEN]
    for mutant in mutants:
        source = (ROOT / mutant.path).read_bytes()
        assert mutant.old.encode() == source[slice(*mutant.span)] and mutant.text(source) != source
        assert ast.dump(ast.parse(mutant.text(source))) != ast.dump(ast.parse(source))
