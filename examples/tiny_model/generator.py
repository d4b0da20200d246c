"""Everything the embedded model learns, from a seed: conversations of seven kinds.

    for example in examples(seed=0, split="train"): ...

Kinds: talk, facts, arithmetic, json, copy, tools, reasoning. An example is held out when the hash
of its slot values says so (2 in 100), so no held-out prompt is ever trained on. For multiplication,
whose table a small model must know by heart, and for talk and facts the wording is held out.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator
from typing import Any

from conversation import Example, turn
from talk import make_facts, make_talk
from tool_calls import make_tools
from words import JOBS, WORDS, city, made_up, person

KINDS = ("talk", "facts", "arithmetic", "json", "copy", "tools", "reasoning")


def held_out(*key: Any) -> bool:
    digest = hashlib.blake2b(repr(key).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % 50 == 0


def examples(seed: int, split: str, kind: str | None = None) -> Iterator[Example]:
    """Without end. split: train or held-out."""
    rng = random.Random(f"{seed}-{split}-{kind}")
    is_held_out = split != "train"
    weights = {"talk": 1, "facts": 1.3, "arithmetic": 2.2, "json": 1.6, "copy": 1.6, "tools": 3.2,
               "reasoning": 2.2}  # fmt: skip
    while True:
        name = kind or rng.choices(list(weights), list(weights.values()))[0]
        key, example = MAKERS[name](rng)
        if held_out(name, *key) != is_held_out:
            continue
        finish(rng, example, split)
        yield example


def finish(rng: random.Random, example: Example, split: str) -> None:
    """System prompts, thinking switch, earlier turns."""
    if rng.random() < 0.25 and example.kind != "reasoning" and example.tools is None:
        for _ in range(rng.randint(1, 2)):
            other = rng.choice(("talk", "facts", "arithmetic", "json", "copy"))
            key, before = MAKERS[other](rng)
            while held_out(other, *key):
                key, before = MAKERS[other](rng)
            example.messages = before.messages + example.messages
    if rng.random() < 0.35:
        example.messages = [{"role": "system", "content": rng.choice(SYSTEM)}, *example.messages]
    if example.kind != "reasoning":
        example.thinking = rng.choice((None, None, True, False, False))
        return
    example.thinking = rng.choice((None, True))
    if split == "train" and rng.random() < 0.1:
        example.thinking = False
        answer = example.messages[-1]
        answer["content"] = answer["content"].partition("</think>")[2].lstrip()


SYSTEM = [
    "You are a helpful assistant.",
    "You are Jackfield's tiny model.",
    "Be brief and kind.",
    "Answer in one sentence.",
    "You are a careful assistant. Think when you must.",
    "You help people who run model servers.",
]

# ---------------------------------------------------------------- arithmetic

FORMS = ["What is {a} {s} {b}?", "{a} {s} {b} = ?", "Calculate {a} {s} {b}.", "{a} {w} {b}",
         "What is {a} {w} {b}?", "How much is {a} {w} {b}?", "Compute {a} {s} {b}", "{a} {s} {b}",
         "Can you work out {a} {s} {b}?", "Please calculate {a} {w} {b}."]  # fmt: skip
OPERATIONS = {"+": "plus", "-": "minus", "*": "times"}


def make_arithmetic(rng: random.Random) -> Any:
    sign = rng.choice("++--*")
    if sign == "*":
        a, b = rng.randint(0, 12), rng.randint(0, 12)
        result = a * b
    else:
        top = rng.choice((20, 100, 100, 100))
        a, b = rng.randint(0, top), rng.randint(0, top)
        if sign == "-" and a < b:
            a, b = b, a
        result = a + b if sign == "+" else a - b
    form = rng.choice(FORMS)
    question = form.format(a=a, b=b, s=sign, w=OPERATIONS[sign])
    key = (sign, a, b, form) if sign == "*" else (sign, a, b)
    answer = f"{a} {sign} {b} = {result}"
    return key, Example("arithmetic", turn(question, answer), accept=[str(result)])


# ---------------------------------------------------------------- JSON extraction and copying


def make_json(rng: random.Random) -> Any:
    name, place, age, job = person(rng), city(rng), rng.randint(1, 99), rng.choice(JOBS)
    shapes = [
        (f"{name} is {age} years old and lives in {place}.", {"name": name, "age": age,
                                                              "city": place}),
        (f"{name}, aged {age}, comes from {place}.", {"name": name, "age": age, "city": place}),
        (f"{name} works as a {job} in {place}.", {"name": name, "job": job, "city": place}),
        (f"My name is {name} and I am {age}.", {"name": name, "age": age}),
        (f"In {place} there is a {job} called {name}.", {"name": name, "job": job, "city": place}),
        (f"{name} is a {job} and {age} years old.", {"name": name, "job": job, "age": age}),
    ]  # fmt: skip
    sentence, data = rng.choice(shapes)
    fields = list(data)
    listed = ", ".join(fields[:-1]) + " and " + fields[-1]
    questions = [
        f"Extract {listed} as JSON: {sentence}",
        f"{sentence} Give me {listed} as JSON.",
        f"Turn this into JSON with {listed}: {sentence}",
        f"JSON with {listed}, please. {sentence}",
    ]
    answer = json.dumps(data)
    key = (sentence,)
    return key, Example("json", turn(rng.choice(questions), answer), accept=[answer])


def make_copy(rng: random.Random) -> Any:
    count = rng.randint(1, 10)
    words = [
        rng.choice(WORDS) if rng.random() < 0.6 else made_up(rng, 5)
        if rng.random() < 0.8 else str(rng.randint(0, 999))
        for _ in range(count)
    ]  # fmt: skip
    text = " ".join(words)
    questions = [f"Repeat exactly: {text}", f"Repeat after me: {text}", f"Copy this: {text}",
            f"Say this again: {text}", f"Echo: {text}"]  # fmt: skip
    return (text,), Example("copy", turn(rng.choice(questions), text), accept=[text])


# ---------------------------------------------------------------- reasoning

THINGS = "apples books coins cards pens stamps shells eggs cups balls marbles stickers".split()


def make_reasoning(rng: random.Random) -> Any:
    name, other, thing = person(rng), person(rng), rng.choice(THINGS)
    a, b = rng.randint(2, 50), rng.randint(1, 40)
    total = a + b
    c = rng.randint(1, total)
    he = rng.choice(["he", "she"])
    kind = rng.randrange(4)
    if kind == 0:
        question = (
            f"{name} has {a} {thing} and {rng.choice(['buys', 'finds', 'gets'])} {b} more. "
            f"Then {he} {rng.choice(['gives away', 'loses', 'sells'])} {c}. "
            f"How many {thing} {rng.choice(['are left', f'does {he} have now'])}?"
        )
        remainder = total - c
        reasoning = f"Start with {a}.\n{a} + {b} = {total}.\n{total} - {c} = {remainder}."
        answer = f"There are {remainder} {thing} left."
        result = remainder
    elif kind == 1:
        c = rng.randint(1, 40)
        question = (
            f"{name} has {a} {thing}. {other} has {b} more than {name}. "
            f"How many {thing} do they have together?"
        )
        theirs = a + b
        result = a + theirs
        reasoning = f"{other} has {a} + {b} = {theirs}.\nTogether: {a} + {theirs} = {result}."
        answer = f"Together they have {result} {thing}."
    elif kind == 2:
        boxes, each = rng.randint(2, 10), rng.randint(2, 10)
        inside = boxes * each
        more = rng.randint(1, 20)
        result = inside + more
        question = (
            f"{name} has {boxes} boxes with {each} {thing} each and {more} loose ones. "
            f"How many {thing} are there?"
        )
        a, b, c = boxes, each, more
        reasoning = f"{boxes} * {each} = {inside}.\n{inside} + {more} = {result}."
        answer = f"There are {result} {thing}."
    else:
        c = rng.randint(1, 40)
        result = total + c
        question = (
            f"On Monday {name} reads {a} pages, on Tuesday {b} and on Wednesday {c}. "
            f"How many pages is that?"
        )
        reasoning = f"{a} + {b} = {total}.\n{total} + {c} = {result}."
        answer = f"That is {result} pages."
    key = (kind, name, thing, a, b, c)
    messages = turn(question, f"<think>\n{reasoning}\n</think>\n\n{answer}")
    return key, Example("reasoning", messages, accept=[str(result)])


MAKERS = {
    "talk": make_talk,
    "facts": make_facts,
    "arithmetic": make_arithmetic,
    "json": make_json,
    "copy": make_copy,
    "tools": make_tools,
    "reasoning": make_reasoning,
}
