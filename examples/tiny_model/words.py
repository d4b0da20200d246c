"""Words that examples are filled with: names, cities, jobs, and made-up ones."""

from __future__ import annotations

import random

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
