"""Pictures with one figure, and what can be said of them; all from a seed."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import NamedTuple

from PIL import Image, ImageDraw

CANVAS = 96
"""Pixels of a side."""
COLOURS = {
    "red": (214, 40, 40), "green": (40, 150, 60), "blue": (40, 80, 210),
    "yellow": (240, 200, 30), "purple": (140, 50, 170), "black": (20, 20, 20),
}  # fmt: skip
SHAPES = ("circle", "square", "triangle", "cross")
PLACES = {
    "top left": (0.27, 0.27), "top right": (0.73, 0.27), "middle": (0.5, 0.5),
    "bottom left": (0.27, 0.73), "bottom right": (0.73, 0.73),
}  # fmt: skip
"""Place → its middle, in shares of the sides."""
QUESTIONS = {
    "all": ("what is this", "what do you see", "describe the picture"),
    "colour": ("what colour is it", "which colour has it"),
    "shape": ("what shape is it", "which shape is it"),
    "place": ("where is it", "in which place is it"),
}
SHARES = {"all": 3, "colour": 1, "shape": 4, "place": 1}
"""Kind of question → how often it is asked, relatively: shapes are learned last."""


class Figure(NamedTuple):
    colour: str
    shape: str
    place: str

    def answer(self, kind: str) -> str:
        where = "in the middle" if self.place == "middle" else f"at the {self.place}"
        return {
            "all": f"a {self.colour} {self.shape} {where}",
            "colour": self.colour,
            "shape": self.shape,
            "place": where,
        }[kind]


class Example(NamedTuple):
    picture: Image.Image
    figure: Figure
    kind: str
    question: str

    @property
    def answer(self) -> str:
        return self.figure.answer(self.kind)


def draw(figure: Figure, chance: random.Random) -> Image.Image:
    """Draw a figure of random size, turn and shade on a light ground."""
    ground = tuple(chance.randint(215, 255) for _ in range(3))
    picture = Image.new("RGB", (CANVAS, CANVAS), ground)
    pen = ImageDraw.Draw(picture)
    size = chance.uniform(0.16, 0.23) * CANVAS
    x, y = (CANVAS * (share + chance.uniform(-0.04, 0.04)) for share in PLACES[figure.place])
    ink = tuple(min(255, max(0, part + chance.randint(-18, 18))) for part in COLOURS[figure.colour])
    if figure.shape == "circle":
        pen.ellipse((x - size, y - size, x + size, y + size), fill=ink)
        return picture
    turn = chance.uniform(-0.2, 0.2)

    def points(*corners: tuple[float, float]) -> list[tuple[float, float]]:
        """Radius and angle from the middle → pixels."""
        return [
            (x + size * far * math.cos(at + turn), y + size * far * math.sin(at + turn))
            for far, at in corners
        ]

    quarter = math.pi / 2
    if figure.shape == "square":
        pen.polygon(points(*((1.2, quarter * (n + 0.5)) for n in range(4))), fill=ink)
    elif figure.shape == "triangle":
        corners = ((1.3, -quarter + 2 * math.pi * n / 3) for n in range(3))
        pen.polygon(points(*corners), fill=ink)
    else:
        width = round(size * 0.6)
        for first in (0.0, quarter):
            pen.line(points((1.15, first), (1.15, first + math.pi)), fill=ink, width=width)
    return picture


def examples(seed: int) -> Iterator[Example]:
    """Yield examples without end."""
    chance = random.Random(seed)
    while True:
        figure = Figure(chance.choice([*COLOURS]), chance.choice(SHAPES), chance.choice([*PLACES]))
        (kind,) = chance.choices([*QUESTIONS], weights=[SHARES[each] for each in QUESTIONS])
        yield Example(draw(figure, chance), figure, kind, chance.choice(QUESTIONS[kind]))
