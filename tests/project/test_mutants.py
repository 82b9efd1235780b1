"""The lists of scripts/mutants.py fit the sources. That script runs the mutants: it takes many minutes."""

import pytest
from processes import ROOT
from script_modules import load_script

mutants = load_script("scripts/mutants.py")
MUTANTS = mutants.read_lists()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_fits_the_sources(mutant):
    source = (ROOT / mutant.file).read_text()
    begin, end, mistake = mutant.find_piece(source)
    assert source[begin:end] != mistake
    for test in mutant.tests:
        file, _, function = test.partition("::")
        wanted = f'TEST_CASE("{function}' if mutants.is_program(test) else f"def {function.partition('[')[0]}"
        assert wanted in (ROOT / "tests" / file).read_text()


def test_five_of_a_hundred_may_survive_if_argued():
    assert sum(bool(mutant.argued) for mutant in MUTANTS) <= 0.05 * len(MUTANTS)


@pytest.mark.parametrize("file", sorted({mutant.file for mutant in MUTANTS if mutant.in_cpp}))
def test_switches_do_not_overlap(file):
    own = [mutant for mutant in MUTANTS if mutant.file == file]
    source = mutants.with_switches((ROOT / file).read_text(), own)
    assert all(f"{mutants.SWITCH} == {mutant.number}u" in source for mutant in own)


def test_a_text_that_is_not_there_once_is_refused():
    lost = mutants.Mutant("lost", "csrc/x.cpp", "a «b → c» d", ())
    for source in ("a x d", "a b d a b d"):
        with pytest.raises(ValueError, match="found . times in csrc/x.cpp, wants 1"):
            lost.find_piece(source)
    with pytest.raises(ValueError, match="marks no piece"):
        mutants.Mutant("bare", "csrc/x.cpp", "a b d", ()).find_piece("a b d")


def test_two_mistakes_in_one_piece():
    pair = [mutants.Mutant(name, "csrc/x.cpp", f"x = «1 → {value}»;", ()) for name, value in (("a", 2), ("b", 3))]
    a, b = (mutant.number for mutant in pair)
    expected = f"x = (attnpack_mutant == {b}u ? (3) : ((attnpack_mutant == {a}u ? (2) : (1))));"
    assert mutants.with_switches("x = 1;", pair).splitlines()[1] == expected


@pytest.mark.parametrize("marked", ["cat({«a, b → b, a»})", "f(«g(x), y → y»)"])
def test_commas_that_would_become_operators_are_refused(marked):
    """`on ? (b, a) : (a, b)` drops the first of a list."""
    mutant = mutants.Mutant("comma", "csrc/a.cpp", marked, ())
    with pytest.raises(ValueError, match="comma"):
        mutant.find_piece(marked.replace("«", "").partition(" → ")[0] + marked.rpartition("»")[2])


@pytest.mark.parametrize("marked", ["f(i «< → <=» n)", "f(«x += → x =» y)", "f(n« → + 1»)", "f(«n → »)"])
def test_operators_without_operands_are_refused(marked):
    with pytest.raises(ValueError, match="marks no expression"):
        mutants.Mutant("operator", "csrc/a.cpp", marked, ()).find_piece("")


def test_operators_with_operands_are_taken():
    for code in ("i < n", "i++", "--i", "*p", "&x", "-x", "!x", "::f(x)", "f<int>", 'x == "+"', "a && !b"):
        assert mutants.is_operand(code)


def test_commas_in_brackets_are_taken():
    for code in ("f(a, b)", "f<int, 2>(a)", "f({a, b}, c[d])", "a < b"):
        assert not mutants.is_list(code)
