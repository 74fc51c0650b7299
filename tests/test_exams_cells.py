"""Options and answers in every form that released files and their re-exports use."""

import pytest

from cmexam_tune.exams import Cells, UnreadableRow

WANTED = {"A": "0.5 mg/kg", "B": "1 mg/kg", "C": "肝 脏", "D": "以上均非"}
TEXTS = list(WANTED.values())


def marked(mark, letters="ABCD", join="\n"):
    return join.join(f"{letter}{mark}{text}" for letter, text in zip(letters, TEXTS, strict=True))


@pytest.mark.parametrize("mark", [" ", "\t", "\u3000", ".", "、", "．", ":", "：", ". ", "、 ", " 、", ")", "  "])
@pytest.mark.parametrize("letters", ["ABCD", "abcd", "ＡＢＣＤ"])
@pytest.mark.parametrize("join", ["\n", "\r\n", "\\n", " "])
def test_marks_letters_and_joins(mark, letters, join):
    cells = Cells()
    assert cells.options(marked(mark, letters, join)) == WANTED
    assert ("options joined by backslash-n" in cells.repairs) == (join == "\\n")
    assert ("options in one line" in cells.repairs) == (join == " ")
    assert ("option letters normalized" in cells.repairs) == (letters != "ABCD")


@pytest.mark.parametrize(
    ("value", "repair"),
    [
        (WANTED, None),
        ({**WANTED, "E": "", "F": " "}, "empty option left out"),
        (dict(reversed(WANTED.items())), "options sorted"),
        ([{"key": k, "value": v} for k, v in WANTED.items()], None),
        (str([{"key": k, "value": v} for k, v in WANTED.items()]), None),
        ([f"{k}. {v}" for k, v in WANTED.items()], None),
        (TEXTS, None),
        ("B 1 mg/kg\nA 0.5 mg/kg\nC 肝 脏\nD 以上均非", "options sorted"),
        ("A 0.5 mg/kg\n\nB 1 mg/kg\nC 肝\n脏\nD 以上均非\n", "option text over several lines"),
        ("(A) 0.5 mg/kg\n(B) 1 mg/kg\n（C）肝 脏\n（D）以上均非", None),
    ],
)
def test_other_shapes(value, repair):
    cells = Cells()
    assert cells.options(value) == WANTED
    assert cells.repairs == ([repair] if repair else []) or set(cells.repairs) == {repair}


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("A .5 mg\nB 5 mg", {"A": ".5 mg", "B": "5 mg"}),
        ("A原发病\nB出血部位", {"A": "原发病", "B": "出血部位"}),
        ("A 甲\nB 乙\nB超检查\nC 丙", {"A": "甲", "B": "乙 B超检查", "C": "丙"}),
        ("A 1\nB 肝\nC ++", {"A": "1", "B": "肝", "C": "++"}),
        (r"A \alpha\beta B \nu", {"A": r"\alpha\beta", "B": r"\nu"}),
        ("A 甲\nB 乙\nC", {"A": "甲", "B": "乙"}),
        ("\n".join(f"{c} {i}" for i, c in enumerate("ABCDEFGHIJ")), {c: str(i) for i, c in enumerate("ABCDEFGHIJ")}),
    ],
)
def test_texts_are_kept_whole(text, options):
    assert Cells().options(text) == options


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, "fewer than 2 options"),
        ("A 甲", "fewer than 2 options"),
        ("\n".join(f"{c} x" for c in "ABCDEFGHIJK"), "more than 10 options"),
        ("A 甲\nB 乙\nA 丙", "two options with one letter"),
        ("甲\n乙", "options without letters"),
        ({"1": "甲", "2": "乙"}, "option letter is not one of A to Z"),
    ],
)
def test_options_that_cannot_be(value, reason):
    with pytest.raises(UnreadableRow, match=f"^{reason}$"):
        Cells().options(value)


@pytest.mark.parametrize(
    ("value", "wanted", "repairs"),
    [
        ("C", "C", []),
        ("ACD", "ACD", []),
        (" AC\n", "AC", []),
        ("DCA", "ACD", ["answer letters sorted"]),
        ("ac", "AC", ["answer letters normalized"]),
        ("ＡＣ", "AC", ["answer letters normalized"]),
        ("A, C，D；E", "ACDE", ["answer letters normalized"]),
        ("A、C和D", "ACD", ["answer letters normalized"]),
        ("答案：C", "C", ["answer letters normalized"]),
        (["D", "A"], "AD", ["answer letters sorted"]),
        ("ABA", "AB", ["answer letter repeated"]),
        ("", None, []),
        (None, None, []),
        (float("nan"), None, ["the word nan or null as a missing value"]),
    ],
)
def test_answers(value, wanted, repairs):
    cells = Cells()
    assert cells.answer(value) == wanted
    assert cells.repairs == repairs


@pytest.mark.parametrize("value", ["?", "A1", "以上", "A甲"])
def test_answers_that_are_none(value):
    with pytest.raises(UnreadableRow, match=r"^unreadable answer$"):
        Cells().answer(value)


@pytest.mark.parametrize("sign", " ,;:/|.、。[]'\"()和与及&+-\t\u3000")
def test_separators_of_answers_are_ignored(sign):
    assert Cells().answer(f"A{sign}B") == "AB"
