"""Conversations with tools: a call, or a sentence after its result; sometimes no call is due."""

from __future__ import annotations

import json
import random
from typing import Any

from conversation import Example
from talk import make_facts, make_talk
from words import WORDS, city, person


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
