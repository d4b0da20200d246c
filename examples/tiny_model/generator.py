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
from dataclasses import dataclass, field
from typing import Any

KINDS = ("talk", "facts", "arithmetic", "json", "copy", "tools", "reasoning")


@dataclass
class Example:
    """One conversation. The last message is the answer to learn, and to be judged by."""

    kind: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    thinking: bool | None = None
    """The template's enable_thinking; None: not set."""
    accept: list[str] = field(default_factory=list)
    """What the answer must equal (talk, facts, copy) or contain as its last number (the rest)."""


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

# ---------------------------------------------------------------- talk and facts

OPENERS = ["", "", "", "Hey, ", "Hi! ", "Hello! ", "Oh, ", "So, ", "Well, ", "OK, ", "Please, ",
           "Good day! ", "Tell me, ", "Quick question: ", "I wonder: ", "Excuse me, "]  # fmt: skip
CLOSERS = ["", "", "", " Thanks!", " Thank you.", " Please.", " I am curious.", " :)", " Go on.",
           " Just wondering.", " In short, please."]  # fmt: skip

TALK: list[tuple[list[str], str]] = [
    (["Hello", "Hi", "Hey there", "Hello there", "Good morning", "Good evening", "Greetings"],
     "Hello! How can I help you?"),
    (["How are you?", "How are you doing?", "How is it going?", "Are you well?",
      "How do you feel?"],
     "I am well, thank you. What can I do for you?"),
    (["Thank you!", "Thanks a lot!", "Many thanks!", "That was helpful.", "Great, thank you!"],
     "You are welcome!"),
    (["Goodbye!", "Bye!", "See you later!", "Good night!", "I have to go now."],
     "Goodbye! Come back soon."),
    (["Who are you?", "What are you?", "What is your name?", "Introduce yourself.",
      "Are you a person?"],
     "I am the tiny model that ships with Jackfield."),
    (["What can you do?", "How can you help me?", "What are you good at?", "What are your skills?"],
     "I can chat, add numbers, extract JSON, repeat text, call tools and reason a little."),
    (["Tell me a joke.", "Say something funny.", "Do you know a joke?", "Make me laugh."],
     "Why did the token cross the road? To get to the next position."),
    (["What is your favourite colour?", "Which colour do you like?", "What colour is best?"],
     "I like the deep blue of a summer evening."),
    (["I am sad.", "I feel down today.", "I had a bad day.", "Today was hard."],
     "I am sorry to hear that. Do you want to talk about it?"),
    (["I am happy!", "I had a great day!", "Today was wonderful!", "I feel great!"],
     "That is lovely to hear!"),
    (["Can you sing?", "Sing me a song.", "Do you like music?"],
     "I cannot sing, but I like the rhythm of words."),
    (["Are you smart?", "Are you clever?", "Are you a big model?", "How big are you?"],
     "I am small: fewer than three million parameters."),
    (["Say something nice.", "Cheer me up.", "Give me a compliment."],
     "You ask good questions, and that is a gift."),
    (["Good luck!", "Have a nice day!", "Take care!", "Enjoy your day!"],
     "Thank you, the same to you!"),
]  # fmt: skip

FACTS: list[tuple[list[str], str]] = [
    (["What is Jackfield?", "Describe Jackfield.", "What does Jackfield do?",
      "Explain Jackfield to me.", "Tell me about Jackfield."],
     "Jackfield is an LLM serving engine built as an asyncio plugin framework."),
    (["What does the name Jackfield mean?", "Why is it called Jackfield?",
      "Where does the name Jackfield come from?", "What is a jackfield?"],
     "A jackfield is a patch panel: sockets first, and anything can be plugged into them."),
    (["How do plugins get into Jackfield?", "How are plugins found?",
      "How does Jackfield discover plugins?", "How do I add a plugin?"],
     "Plugins are found through the entry-point group jackfield."),
    (["Which page lists the hooks?", "Where are the hooks?", "Where do I find every hook?",
      "Which file describes the hooks?"],
     "Every hook is on one page: core/hooks.py."),
    (["Where does the GPU worker run?", "Is the worker in another process?",
      "Where is the worker?", "Does Jackfield use a separate worker process?"],
     "The GPU worker runs in the same process, on a thread of its own."),
    (["How do I start the server?", "How do I serve a model?", "Which command starts the server?",
      "How can I run the server?"],
     "Run jackfield serve, and talk to it with any OpenAI client."),
    (["How do I see the demo?", "Which command shows the demo?", "How can I try Jackfield?"],
     "Run make demo in a fresh clone."),
    (["How do I run the tests?", "Which command runs the tests?", "How can I test Jackfield?"],
     "Run make test in a fresh clone."),
    (["What is a step plan?", "What is in a StepPlan?",
      "What does the scheduler send to the worker?"],
     "A step plan tells the worker which tokens to compute, and carries only differences."),
    (["How many steps are in flight?", "How many steps run at once?",
      "Does Jackfield schedule ahead?"],
     "Two steps are in flight: the next one is scheduled while this one runs."),
    (["What is prefix caching?", "How does prefix caching work?", "Explain prefix caching."],
     "Equal prefixes share their KV blocks, found by chained hashes."),
    (["What happens when memory runs out?", "What is preemption?",
      "What does the scheduler do without free blocks?"],
     "The last request is preempted and computed again later."),
    (["Which licence does Jackfield have?", "How is Jackfield licensed?", "Is Jackfield free?"],
     "Jackfield is licensed under Apache-2.0."),
    (["Which languages is Jackfield written in?", "What is Jackfield written in?",
      "Which language do I need for a plugin?"],
     "Jackfield is written in Python, with kernels in Triton."),
    (["Which models does Jackfield serve?", "Which architectures are supported?",
      "Can Jackfield serve Qwen3?"],
     "Llama, Mistral, Qwen2 and Qwen3, and whatever plugins add."),
    (["How do I abort a request?", "How can I cancel a request?",
      "What happens when I leave the loop?"],
     "Leave the loop or cancel the task, and the request is aborted at once."),
    (["What is chunked prefill?", "Explain chunked prefill.", "How are long prompts handled?"],
     "Long prompts are split over several steps, mixed with decoding."),
    (["Who owns the device?", "Which thread owns the GPU?", "Who may touch the GPU?"],
     "The worker thread owns the device, and nobody else touches it."),
]  # fmt: skip


def phrased(rng: random.Random, table: list[tuple[list[str], str]], kind: str) -> Any:
    number = rng.randrange(len(table))
    questions, answer = table[number]
    question, opener, closer = rng.choice(questions), rng.choice(OPENERS), rng.choice(CLOSERS)
    if opener and opener[-2] in ",:" and not question.startswith(("I ", "Jackfield", "GPU")):
        text = opener + question[0].lower() + question[1:]
    else:
        text = opener + question
    if text[-1].isalpha() and rng.random() < 0.5:
        text += rng.choice(".!")
    text += closer
    return (text,), Example(kind, turn(text, answer), accept=[answer])


def turn(question: str, answer: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def make_talk(rng: random.Random) -> Any:
    return phrased(rng, TALK, "talk")


def make_facts(rng: random.Random) -> Any:
    return phrased(rng, FACTS, "facts")


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


# ---------------------------------------------------------------- words

NAMES = """Anna Ben Clara David Emma Felix Grace Hugo Ines Jonas Kira Leo Mia Noah Olga Paul Rosa
Sam Tina Uma Victor Wanda Xenia Yusuf Zoe Maria Tom Lucy Peter Julia Marco Nina Oscar Petra Ravi
Sara Theo Vera Walter Aisha Boris Chen Diego Elena Farid Greta Hana Ivan Jana Karl Lena Mateo Nora
Omar Priya Quinn Rita Sven Tara Ulla Vito Wei Yara Zane Alice Bob Carol Dan Eve Frank""".split()
CITIES = """Lisbon Paris Berlin Madrid Rome Vienna Prague Oslo Dublin Athens Warsaw Zurich Cairo
Lagos Nairobi Delhi Mumbai Tokyo Osaka Seoul Hanoi Lima Quito Bogota Boston Chicago Dallas Denver
Miami Seattle Toronto Montreal Sydney Perth Auckland Geneva Milan Naples Porto Seville Lyon Munich
Hamburg Cologne Krakow Riga Vilnius Tallinn Helsinki London York Leeds Bergen Ghent""".split()
CITIES += ["New York", "San Diego", "Cape Town", "Hong Kong", "Buenos Aires", "Mexico City"]
JOBS = "nurse teacher baker pilot farmer lawyer painter singer writer doctor engineer cook".split()
WORDS = """apple river stone cloud green quick brown lazy fox house garden window table chair music
light paper small large silver golden winter summer spring autumn morning evening north south east
west bread water fire earth wind star moon sun tree leaf flower grass bird fish horse sheep cat dog
red blue yellow black white seven eight nine ten open close happy quiet loud soft hard early late
engine socket plugin token batch kernel cache block thread server model prompt""".split()
LETTERS = "aeiou", "bcdfghjklmnprstvwz"


def made_up(rng: random.Random, longest: int = 4) -> str:
    """A pronounceable word that is in no list."""
    return "".join(
        rng.choice(LETTERS[1]) + rng.choice(LETTERS[0]) + rng.choice(["", "", rng.choice("nrslt")])
        for _ in range(rng.randint(1, longest - 1))
    )


def person(rng: random.Random) -> str:
    return rng.choice(NAMES) if rng.random() < 0.75 else made_up(rng).capitalize()


def city(rng: random.Random) -> str:
    return rng.choice(CITIES) if rng.random() < 0.75 else made_up(rng).capitalize()


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


# ---------------------------------------------------------------- tools


def text_field(rng: random.Random, description: str, **extra: Any) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string", **extra}
    if rng.random() < 0.6:
        schema["description"] = description
    return schema


def function(rng: random.Random, name: str, about: str, fields: dict[str, Any]) -> dict[str, Any]:
    schema: dict[str, Any] = {"name": name}
    if rng.random() < 0.8:
        schema["description"] = about
    schema["parameters"] = {"type": "object", "properties": fields}
    if rng.random() < 0.8:
        schema["parameters"]["required"] = list(fields)
    return {"type": "function", "function": schema}


def tool_weather(rng: random.Random) -> Any:
    place = city(rng)
    name = rng.choice(["get_weather", "get_weather", "weather", "current_weather"])
    about = rng.choice(["Get the current weather in a city", "Weather of a city",
                        "Get the weather"])  # fmt: skip
    tool = function(
        rng, name, about, {"city": text_field(rng, rng.choice(["The city", "City name"]))}
    )
    question = rng.choice(["What is the weather in {0}?", "How is the weather in {0}?",
                      "Is it sunny in {0}?", "Tell me the weather in {0}.", "Weather in {0}?",
                      "Do I need an umbrella in {0}?"])  # fmt: skip
    degrees = rng.randint(-20, 40)
    sky = rng.choice(["sunny", "cloudy", "rainy", "snowy", "windy", "foggy", "clear"])
    result = {"city": place, "temperature": degrees, "condition": sky}
    reply = f"It is {degrees} degrees and {sky} in {place}."
    return tool, question.format(place), name, {"city": place}, result, reply


def tool_time(rng: random.Random) -> Any:
    place = city(rng)
    name = rng.choice(["get_time", "current_time", "clock"])
    tool = function(rng, name, "Get the current time in a city",
                    {"city": text_field(rng, "The city")})  # fmt: skip
    question = rng.choice(["What time is it in {0}?", "Tell me the time in {0}.", "Time in {0}?",
                      "How late is it in {0}?"])  # fmt: skip
    hour = f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}"
    return (tool, question.format(place), name, {"city": place}, {"city": place, "time": hour},
            f"It is {hour} in {place}.")  # fmt: skip


def tool_calculator(rng: random.Random) -> Any:
    a, b, sign = rng.randint(10, 9999), rng.randint(10, 9999), rng.choice("+-*")
    expression = f"{a} {sign} {b}"
    name = rng.choice(["calculator", "calculate", "evaluate"])
    tool = function(rng, name, "Evaluate an expression",
                    {"expression": text_field(rng, "The expression")})  # fmt: skip
    question = rng.choice(["Use the calculator for {0}.", "Please calculate {0} with the tool.",
                      "Evaluate {0} for me.", "Compute {0} with the calculator."])  # fmt: skip
    value = rng.randint(0, 99999)
    return (tool, question.format(expression), name, {"expression": expression}, {"result": value},
            f"The result is {value}.")  # fmt: skip


def tool_search(rng: random.Random) -> Any:
    query = " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 4)))
    name = rng.choice(["search", "web_search", "find"])
    tool = function(rng, name, "Search the web", {"query": text_field(rng, "What to look for")})
    question = rng.choice(["Search for {0}.", "Look up {0}.", "Find something about {0}.",
                      "Search the web for {0}."])  # fmt: skip
    title = " ".join(rng.choice(WORDS) for _ in range(2))
    return (
        tool,
        question.format(query),
        name,
        {"query": query},
        {"title": title},
        f"I found: {title}.",
    )


def tool_convert(rng: random.Random) -> Any:
    units = rng.sample(["EUR", "USD", "GBP", "JPY", "CHF", "SEK", "INR"], 2)
    amount = rng.randint(1, 999)
    name = rng.choice(["convert_currency", "convert", "exchange"])
    tool = function(rng, name, "Convert an amount of money", {
        "amount": {"type": "number"}, "from": text_field(rng, "Currency"),
        "to": text_field(rng, "Currency"),
    })  # fmt: skip
    question = rng.choice(["Convert {0} {1} to {2}.", "How much is {0} {1} in {2}?",
                      "Change {0} {1} into {2}."]).format(amount, *units)  # fmt: skip
    value = rng.randint(1, 9999)
    arguments = {"amount": amount, "from": units[0], "to": units[1]}
    return (tool, question, name, arguments, {"value": value, "currency": units[1]},
            f"That is {value} {units[1]}.")  # fmt: skip


def tool_message(rng: random.Random) -> Any:
    to, text = person(rng), " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 5)))
    name = rng.choice(["send_message", "message", "send_text"])
    tool = function(rng, name, "Send a message to a person",
                    {"to": text_field(rng, "Who"), "text": text_field(rng, "What")})  # fmt: skip
    question = rng.choice(["Tell {0}: {1}", "Send {0} this message: {1}", "Write to {0}: {1}"])
    return (tool, question.format(to, text), name, {"to": to, "text": text}, {"status": "sent"},
            f"I sent your message to {to}.")  # fmt: skip


TOOLS = (tool_weather, tool_weather, tool_time, tool_calculator, tool_search, tool_convert,
         tool_message)  # fmt: skip


def make_tools(rng: random.Random) -> Any:
    calls = [maker(rng) for maker in rng.sample(TOOLS, rng.randint(1, 3))]
    tools = list({m[0]["function"]["name"]: m[0] for m in calls}.values())
    if rng.random() < 0.15:
        key, plain = rng.choice((make_talk, make_facts))(rng)
        plain.kind, plain.tools = "tools", tools
        return (*key, "plain"), plain
    tool, question, name, arguments, result, reply = calls[0]
    if tool not in tools:
        tools.append(tool)
        tools = [t for t in tools if t is tool or t["function"]["name"] != name]
    rng.shuffle(tools)
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    accept = [json.dumps({"name": name, "arguments": arguments})]
    if rng.random() < 0.4:
        messages.append({"role": "tool", "content": json.dumps(result)})
        messages.append({"role": "assistant", "content": reply})
        accept = [reply]
    return (question,), Example("tools", messages, tools=tools, accept=accept)


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
