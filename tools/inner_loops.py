"""Count the instructions of the forward pass's inner loops in object files of the native kernel.

    python -m tools.inner_loops build/arm/CMakeFiles/multihead_native.dir/csrc/neon.cpp.o

Prints, per object file, the instructions per score of the matrix products (two, at a head_dim of 64) and of the
exponential. They are counted, not timed: processors differ in the instructions that they execute per cycle. A matrix
product whose inner loop stores a vector on the stack is reported: its tile has more sums than there are registers.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf
from pathlib import Path

HEAD_DIM = 64
MULTIPLICATIONS = 2 * HEAD_DIM  # per score: q . k, and the weight times v

# Machines by their number in the header of an ELF file, with the programs that disassemble their code.
_PROGRAMS = {62: ("x86_64-linux-gnu-objdump", "objdump"), 183: ("aarch64-linux-gnu-objdump", "objdump")}
_FUNCTION = re.compile(r"[0-9a-f]+ <(.*)>:")
_INSTRUCTION = re.compile(r"\s*([0-9a-f]+):\s+(\S+)\s*(.*)")
_JUMP = re.compile(r"(?:j\w+|b|b\.\w+|cbn?z|tbn?z)")
_ON_STACK = re.compile(r"%[xyz]mm\d+,-?(?:0x[0-9a-f]+)?\(%r[sb]p\)")
PRODUCT_SHARE = 0.4  # of the instructions of a loop that multiply and add: exponentials and conversions have fewer
_LANES = {"xmm": 4, "ymm": 8, "zmm": 16, "4s": 4}


@dataclass(frozen=True)
class Instruction:
    """One line of a disassembly."""

    address: int
    name: str
    operands: str

    @property
    def lanes(self) -> int:
        """Floats of the vectors that it works on."""
        found = re.findall(r"xmm|ymm|zmm|4s", self.operands)
        return _LANES[found[-1]] if found else 1

    @property
    def multiplications(self) -> int:
        """How many numbers it multiplies and adds."""
        pairs = self.name in {"bfdot", "vdpbf16ps"}
        added = pairs or self.name == "fmla" or re.fullmatch(r"vfmadd\d+ps", self.name)
        return self.lanes * (2 if pairs else 1) if added else 0

    @property
    def exponentials(self) -> int:
        """How many exponents it shifts to the place of a float's exponent, once per 2^x."""
        shifts = self.name == "vpslld" and self.operands.startswith("$0x17,")
        shifts |= self.name == "shl" and self.operands.endswith("#23")
        return self.lanes if shifts else 0

    @property
    def stores_on_stack(self) -> bool:
        """Whether it stores a vector in the frame of its function."""
        return self.name.startswith("vmov") and _ON_STACK.fullmatch(self.operands) is not None


def main(paths: list[str]) -> int:
    """Print one line per object file, or an error; return 1 if there was one."""
    if not paths:
        print("Give object files of csrc/, such as build/editable/CMakeFiles/multihead_native.dir/csrc/avx2.cpp.o.")
        return 1
    print(f"Instructions per score of the forward pass, counted in its inner loops (head_dim {HEAD_DIM}):")
    for path in map(Path, paths):
        text = disassembly(path)
        print(f"  {path.name.removesuffix('.cpp.o'):<12} {described(text)}")
        for function in products_on_stack(text):
            print(f"  {'':<12} a matrix product stores its sums on the stack: {function}")
    return 0


def disassembly(path: Path) -> str:
    """Return the disassembly of an object file."""
    machine = int.from_bytes(path.read_bytes()[18:20], "little")
    program = next(filter(None, map(shutil.which, _PROGRAMS[machine])))
    command = [program, "--disassemble", "--demangle", "--no-show-raw-insn", str(path)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def described(text: str) -> str:
    """Return what the inner loops of a disassembled object cost, by the dtype of the call."""
    parts = []
    for packed, dtype in (("float", "float32"), ("(anonymous namespace)::Bfloat16", "bfloat16")):
        if f"BlockOfRows<{packed}>" not in text:  # bfloat16 is packed as float
            parts.append(f"{dtype} the same")
            continue
        weights = f"update_row<((anonymous namespace)::Statistics)0, {packed}>"
        products = cheapest(list(loops(text, f"BlockOfRows<{packed}>")), lambda each: each.multiplications)
        exponential = cheapest(list(loops(text, weights)), lambda each: each.exponentials)
        parts.append(f"{dtype}: products {products * MULTIPLICATIONS:.1f}, exponential {exponential:.2f}")
    return "; ".join(parts)


def loops(text: str, function: str) -> Iterator[list[Instruction]]:
    """Yield the innermost loops of the functions whose name contains `function`."""
    body: list[Instruction] = []  # since the start of the function, or the end of the last innermost loop
    wanted = False
    for line in text.splitlines():
        if found := _FUNCTION.fullmatch(line):
            wanted = function in found[1]
            body = []
        elif wanted and (found := _INSTRUCTION.fullmatch(line)):
            instruction = Instruction(int(found[1], 16), found[2], found[3])
            body.append(instruction)
            target = re.search(r"([0-9a-f]+) <", instruction.operands)
            if target is None or not _JUMP.fullmatch(instruction.name):
                continue
            first = int(target[1], 16)
            if not body[0].address <= first <= instruction.address:
                continue
            yield [each for each in body if each.address >= first]
            body = [instruction]  # a loop around this one starts before it


def products_on_stack(text: str) -> list[str]:
    """Return the functions with an inner loop of a matrix product that stores a vector on the stack."""
    found = []
    for loop in loops(text, ""):
        products = sum(each.multiplications > 0 for each in loop)
        if products >= PRODUCT_SHARE * len(loop) and any(each.stores_on_stack for each in loop):
            named = re.search(r"<(.*?)(?:\+0x[0-9a-f]+)?>$", loop[-1].operands)  # the jump names its function
            found.append(named[1] if named else "")
    return found


def cheapest(found: list[list[Instruction]], operations: Callable[[Instruction], int]) -> float:
    """Return the instructions per operation of the loop that needs the fewest; infinite where no loop has any."""
    counts = [(sum(map(operations, loop)), len(loop)) for loop in found]
    return min((length / count for count, length in counts if count), default=inf)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
