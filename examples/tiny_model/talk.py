"""Talk, and facts about Jackfield: questions in several wordings, with one answer."""

from __future__ import annotations

import random
from typing import Any

from conversation import Example, turn

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


def make_talk(rng: random.Random) -> Any:
    return phrased(rng, TALK, "talk")


def make_facts(rng: random.Random) -> Any:
    return phrased(rng, FACTS, "facts")
