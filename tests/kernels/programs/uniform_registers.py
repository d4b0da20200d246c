"""Uniform registers that machine code reads before anything wrote them.

ptxas 12.8 was seen to compute descriptors of tensor-core products from such registers
(kernels/assembler.py): wrong results, or an illegal memory access. This finds it without a GPU.
Programs that import it assemble as on a machine with a new driver.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from pathlib import Path

import triton

from jackfield.kernels.assembler import VARIABLE, shipped_assemblers, sound_assembler

chosen = sound_assembler(shipped_assemblers(), (99, 0))
if chosen is not None and VARIABLE not in os.environ:
    triton.knobs.nvidia.ptxas = chosen.path

NVDISASM = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
REGISTER = re.compile(r"\bUR(\d+)\b")
WRITERS = ("R2UR", "S2UR", "CS2UR", "VOTEU", "REDUX")
"""Instructions that write a uniform register, besides those whose name begins with U."""
READERS = ("UISETP", "UFSETP", "UPLOP3", "UTMALDG", "UTMASTG", "UTMAREDG", "UTMAPF", "UBLKCP",
           "UTMACCTL", "UTMACMDFLUSH", "USETMAXREG")  # fmt: skip
"""Instructions whose name begins with U that write none."""
PADDING = "UPRMT"
"""Puts bytes together, of which those that fill up a word may be anything."""


def _registers(instruction: str) -> tuple[list[int], list[int]]:
    """Return the uniform registers that it writes, and those that it reads."""
    name, _, arguments = re.sub(r"^@!?U?P\w+ +", "", instruction).partition(" ")
    base = name.split(".")[0]
    writes = base in WRITERS or (base.startswith("U") and base not in READERS)
    written: list[int] = []
    read: list[int] = []
    for place, match in enumerate(REGISTER.finditer(arguments)):
        number, before = int(match[1]), arguments[: match.start()]
        wide = ".64" in name or ".WIDE" in name
        if writes and place == 0 and re.fullmatch(r"\s*(!?U?P\w+, *)*", before):
            written += [number, number + 1] if wide else [number]
        elif before.endswith("gdesc["):
            # Descriptors of both factors; the first may be in registers of threads instead.
            threads = re.findall(r"(?<![U\w])R\d+", before)
            first = 2 if base == "HGMMA" and len(threads) > 1 else 0
            read += range(number + first, number + 4)
        elif before.endswith("desc[") or (".64" in name and base.startswith("U")):
            read += [number, number + 1]
        else:
            read.append(number)
    return written, read


def unwritten_reads(cubin: bytes) -> list[str]:
    """Return the instructions that read a uniform register which nothing wrote, on some path."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(NVDISASM), "-c", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    code: list[str] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(code)
        elif instruction := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            code.append(instruction[1].strip())
    followers: list[list[int]] = []
    for place, instruction in enumerate(code):
        target = re.search(r"\bBRA\b.*`\((\.L_x_\d+)\)", instruction)
        ends = target or re.search(r"\bEXIT\b", instruction)
        goes_on = not ends or re.search(r"U?P\d|BRA\.", instruction.partition("`")[0])
        next_places = [place + 1] if goes_on and place + 1 < len(code) else []
        followers.append(next_places + ([labels[target[1]]] if target else []))
    registers = [_registers(instruction) for instruction in code]
    known: dict[int, frozenset[int]] = {0: frozenset()}
    waiting = [0]
    while waiting:
        place = waiting.pop()
        after = known[place] | frozenset(registers[place][0])
        for follower in followers[place]:
            joined = after & known.get(follower, after)
            if known.get(follower) != joined:
                known[follower] = joined
                waiting.append(follower)
    return [
        code[place]
        for place, written in known.items()
        if not code[place].startswith(PADDING) and set(registers[place][1]) - written - {63}
    ]
