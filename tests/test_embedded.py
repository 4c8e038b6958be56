"""What comes with the package: an English text, and a task whose answers cannot be had by counting letters."""

import collections
import hashlib
import json
import statistics
import subprocess
import sys

import pytest

from fc_eval.evaluate.data import EMBEDDED
from fc_eval.evaluate.embedded.text import embedded_text

ITEMS = [json.loads(line) for line in (EMBEDDED / "everyday.jsonl").read_text(encoding="ascii").splitlines()]


def test_the_text_is_long_english_prose_and_always_the_same():
    text = embedded_text()
    words = text.lower().split()
    assert len(text) > 300_000  # over 2048 x 40 tokens with any tokenizer
    assert words.count("the") > 0.03 * len(words)
    code = (
        "import hashlib; from fc_eval.evaluate.embedded.text import embedded_text;"
        "print(hashlib.sha256(embedded_text().encode()).hexdigest())"
    )
    other = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONHASHSEED": "5"},
        cwd=EMBEDDED.parents[2],
    )
    assert other.stdout.strip() == hashlib.sha256(text.encode()).hexdigest()


def test_items_are_well_formed():
    assert len(ITEMS) >= 100
    assert [item["id"] for item in ITEMS] == [f"everyday-{i:03d}" for i in range(1, len(ITEMS) + 1)]
    for item in ITEMS:
        assert set(item) == {"id", "topic", "context", "choices", "gold"}
        assert 2 <= len(item["choices"]) <= 4
        assert 0 <= item["gold"] < len(item["choices"])
        for text in (item["context"], *item["choices"]):
            assert text == text.strip()
            assert text
            assert "  " not in text
        assert item["context"][0].isupper()
        assert item["context"][-1] not in ".?!"  # it is continued


def test_nothing_comes_twice():
    contexts = [item["context"].lower() for item in ITEMS]
    assert len(set(contexts)) == len(contexts)
    # Nor do beginnings: the same story with another end would count twice.
    assert len({" ".join(context.split()[:5]) for context in contexts}) == len(contexts)
    for item in ITEMS:
        assert len({choice.lower() for choice in item["choices"]}) == len(item["choices"])
    # A right answer that is right everywhere could be learned instead of understood.
    right = collections.Counter(item["choices"][item["gold"]] for item in ITEMS)
    assert max(right.values()) <= 2


def test_topics_vary():
    topics = collections.Counter(item["topic"] for item in ITEMS)
    assert len(topics) >= 10
    assert max(topics.values()) < len(ITEMS) / 5


@pytest.mark.parametrize("number", [2, 3, 4])
def test_right_answers_stand_in_every_position_equally_often(number):
    places = collections.Counter(item["gold"] for item in ITEMS if len(item["choices"]) == number)
    assert set(places) == set(range(number))
    assert max(places.values()) - min(places.values()) <= 1


def chance():
    return statistics.mean(1 / len(item["choices"]) for item in ITEMS)


def guess_by(measure, pick):
    """Accuracy of always taking the choice with the largest (or smallest) measure, ties shared."""
    shares = []
    for item in ITEMS:
        values = [measure(choice) for choice in item["choices"]]
        best = pick(values)
        shares.append((values[item["gold"]] == best) / values.count(best))
    return statistics.mean(shares)


@pytest.mark.parametrize("measure", [len, lambda text: len(text.split())], ids=["letters", "words"])
@pytest.mark.parametrize("pick", [max, min])
def test_length_does_not_give_the_answer_away(measure, pick):
    spread = (chance() * (1 - chance()) / len(ITEMS)) ** 0.5
    assert abs(guess_by(measure, pick) - chance()) < 2 * spread  # within what guessing at random gives


def test_right_and_wrong_answers_are_equally_long():
    right = [len(item["choices"][item["gold"]]) for item in ITEMS]
    wrong = [len(c) for item in ITEMS for i, c in enumerate(item["choices"]) if i != item["gold"]]
    error = (statistics.variance(right) / len(right) + statistics.variance(wrong) / len(wrong)) ** 0.5
    assert abs(statistics.mean(right) - statistics.mean(wrong)) < 2 * error


def test_repeating_words_of_the_context_does_not_give_the_answer_away():
    def overlap(item, choice):
        words = set(item["context"].lower().replace(",", "").split())
        return sum(word in words for word in choice.lower().split())

    hits = []
    for item in ITEMS:
        values = [overlap(item, choice) for choice in item["choices"]]
        hits.append((values[item["gold"]] == max(values)) / values.count(max(values)))
    assert statistics.mean(hits) < chance() + 0.1


def test_items_load_as_lm_eval_wants_them():
    from fc_eval.evaluate.embedded.everyday import load

    split = load(version=1.0)["test"]
    assert len(split) == len(ITEMS)
    assert split[3] == ITEMS[3]
