"""Runs PTX that is written by hand as one warp would, on a machine without a GPU.

Its 32 lanes are arrays; of PTX it knows what our kernels write. Copies are whole at once, so that a wait for one that
nobody asked for, which would hang a GPU, is an error, and so is each access that is not aligned or out of bounds.
"""

import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

LANES = np.arange(32)
_BINARY: dict[str, Callable[..., Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "and": operator.and_, "xor": operator.xor,
    "shl": operator.lshift, "shr": operator.rshift, "min": np.minimum, "or": operator.or_,
}  # fmt: skip
_COMPARED: dict[str, Callable[..., Any]] = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "ge": operator.ge, "gt": operator.gt,
}  # fmt: skip
_NOTHING = ("fence", "bar")
_REGION = 40
"""Bits of an address within one of the tensors of global memory; those above say which."""


class Warp:
    """A warp with its memory.

    Args:
        tensors: global memory; the address of the i-th is `(i + 1) << 40`.
        shared: bytes of shared memory, which `global_smem` names.
        number: of the warp in its block.
    """

    def __init__(self, tensors: list[np.ndarray], shared: int, number: int) -> None:
        self._memory = [np.zeros(shared, np.uint8), *(one.reshape(-1).view(np.uint8) for one in tensors)]
        self._number = number
        self._barriers: dict[int, list[int]] = {}
        """By address: bytes that are waited for, and how many times all of them came."""
        self._registers: dict[str, np.ndarray] = {}

    def run(self, text: str, operands: Mapping[str, int]) -> dict[str, np.ndarray]:
        """What the text leaves in its operands; those that it reads are numbers."""
        self._registers = {name: _all(value) for name, value in operands.items()}
        labels, statements = _parsed(text)
        counter, active, together = 0, np.ones(32, bool), -1
        while counter < len(statements):
            if counter == together:
                active, together = np.ones(32, bool), -1
            mask, name, arguments = self._guarded(statements[counter])
            mask, counter = mask & active, counter + 1
            if name.startswith("bra"):
                parts = mask.any() and not (mask == active).all()
                assert not parts or together < 0, "of a warp that parts no lane parts again"
                if parts:  # who jumps waits there for the others
                    active, together = active & ~mask, labels[arguments[0]]
                elif mask.any():
                    counter = labels[arguments[0]]
            elif name.split(".")[0] not in _NOTHING:
                self._step(mask, name, arguments)
        return {name: value for name, value in self._registers.items() if name.startswith("$")}

    def _guarded(self, statement: str) -> tuple[np.ndarray, str, list[str]]:
        guard = re.match(r"@(!?)(\w+) ", statement)
        mask = np.ones(32, bool)
        if guard is not None:
            mask = self._get(guard[2]).astype(bool) ^ bool(guard[1])
            statement = statement[guard.end() :]
        name, _, rest = statement.partition(" ")
        return mask, name, [one.strip() for one in re.split(r",(?![^{]*})", rest)]

    def _step(self, mask: np.ndarray, name: str, arguments: list[str]) -> None:
        parts = name.split(".")
        special = {"mbarrier": self._barrier, "cp": self._copy, "ld": self._load, "mma": self._mma}
        if parts[0] in special:
            special[parts[0]](mask, parts, arguments)
            return
        values = [self._get(one) for one in arguments[1:]]
        if parts[0] == "elect":
            self._put(arguments[0].removeprefix("_|"), LANES == 0, mask)
            return
        if parts[0] == "setp":
            found = _COMPARED[parts[1]](_word(values[0]), _word(values[1]))
            found = found & values[2].astype(bool) if parts[2] == "and" else found
        elif parts[0] == "prmt":
            octets = [_word(one).astype(np.uint32).view(np.uint8).reshape(32, 4) for one in values[:2]]
            chosen = [int(values[2][0]) >> 4 * place & 7 for place in range(4)]
            found = np.concatenate(octets, 1)[:, chosen].copy().view(np.uint32)[:, 0].astype(np.uint64)
        elif parts[0] in ("mov", "cvt"):
            found = _word(values[0]) if "u32" in parts and parts[0] == "cvt" else values[0]
        else:
            wide = "wide" in parts or parts[-1] in ("b64", "s64", "u64", "pred")
            if "wide" in parts or not wide:
                values = [_word(one) for one in values]
            found = values[0] * values[1] + values[2] if parts[0] == "mad" else _BINARY[parts[0]](*values)
            found = found if wide else _word(found)
        self._put(arguments[0], found, mask)

    def _get(self, operand: str) -> np.ndarray:
        if operand == "%tid.x":
            return (LANES + 32 * self._number).astype(np.uint64)
        if operand == "global_smem":
            return _all(0)
        if operand.startswith("0f"):
            return np.full(32, int(operand[2:], 16), np.uint32).view(np.float32)
        if re.fullmatch(r"-?\d+|0x[0-9a-f]+", operand):
            return _all(int(operand, 0))
        return self._registers[operand]

    def _put(self, register: str, value: np.ndarray, mask: np.ndarray) -> None:
        before = self._registers.get(register, np.full(32, 12345).astype(value.dtype))
        self._registers[register] = np.where(mask, value, before)

    def _address(self, operand: str) -> np.ndarray:
        inside = re.fullmatch(r"\[(\w+)(?:\+(\d+))?]", operand)
        assert inside is not None, operand
        return self._get(inside[1]) + np.uint64(int(inside[2] or 0))

    def _bytes(self, address: int, size: int) -> np.ndarray:
        tensor, at = self._memory[address >> _REGION], address & ((1 << _REGION) - 1)
        assert at + size <= len(tensor), f"{size} bytes at {at} of {len(tensor)}"
        return tensor[at : at + size]

    def _load(self, mask: np.ndarray, parts: list[str], arguments: list[str]) -> None:
        registers, address = re.findall(r"\w+", arguments[0]), self._address(arguments[1])
        assert not ((address[mask] >> np.uint64(_REGION) == 0) ^ ("shared" in parts)).any()
        size = int(parts[-1][1:]) // 8
        assert not (address[mask] % np.uint64(size * len(registers))).any(), f"not aligned: {' '.join(parts)}"
        for place, register in enumerate(registers):
            found = np.zeros(32, np.uint64)
            for lane in LANES[mask]:
                found[lane] = int.from_bytes(self._bytes(int(address[lane]) + place * size, size).tobytes(), "little")
            self._put(register, found, mask)

    def _barrier(self, mask: np.ndarray, parts: list[str], arguments: list[str]) -> None:
        if parts[1] == "try_wait":
            assert mask.all()
            waited, times = self._barriers[int(self._address(arguments[1])[0])]
            assert not waited and times % 2 != int(self._get(arguments[2])[0]), "it would wait for ever"
            self._put(arguments[0], np.ones(32, bool), mask)
        elif parts[1] == "init":
            for lane in LANES[mask]:
                self._barriers[int(self._address(arguments[0])[lane])] = [0, 0]
        else:
            for lane in LANES[mask]:
                self._barriers[int(self._address(arguments[1])[lane])][0] += int(self._get(arguments[2])[lane])

    def _copy(self, mask: np.ndarray, parts: list[str], arguments: list[str]) -> None:
        target, source, size, barrier = (
            self._get(one) if one[0] != "[" else self._address(one) for one in arguments
        )  # fmt: skip
        for lane in LANES[mask]:
            many = int(size[lane])
            assert many > 0 and not (int(target[lane]) | int(source[lane]) | many) % 16
            self._bytes(int(target[lane]), many)[:] = self._bytes(int(source[lane]), many)
            state = self._barriers[int(barrier[lane])]
            state[0] -= many
            state[1] += state[0] == 0

    def _mma(self, mask: np.ndarray, parts: list[str], arguments: list[str]) -> None:
        """m16n8k16 of float16, as the PTX ISA says where its operands lie."""
        assert mask.all() and parts[3] == "m16n8k16" and parts[-2] == "f16"
        sums, a, b, _ = (re.findall(r"\w+", one) for one in arguments)
        left, right, row, quad = np.zeros((16, 16)), np.zeros((16, 8)), LANES // 4, LANES % 4
        for register, name in enumerate(a):
            for which, values in enumerate(self._halves(name)):
                left[row + 8 * (register % 2), 2 * quad + which + 8 * (register // 2)] = values
        for register, name in enumerate(b):
            for which, values in enumerate(self._halves(name)):
                right[2 * quad + which + 8 * register, row] = values
        for register, name in enumerate(sums):
            added = (left @ right)[row + 8 * (register // 2), 2 * quad + register % 2]
            self._put(name, (self._get(name) + added).astype(np.float32), mask)

    def _halves(self, register: str) -> np.ndarray:
        return _word(self._get(register)).astype(np.uint32).view(np.float16).reshape(32, 2).T.astype(np.float64)


def _all(value: int) -> np.ndarray:
    return np.full(32, value & (2**64 - 1), np.uint64)


def _word(value: np.ndarray) -> np.ndarray:
    return value & np.uint64(2**32 - 1)


def _parsed(text: str) -> tuple[dict[str, int], list[str]]:
    """Where each label stands, and statements without declarations."""
    labels: dict[str, int] = {}
    statements: list[str] = []
    for statement in re.sub(r"(\w+):(?!:)", r"\1:;", text.strip()[1:-1]).split(";"):
        found = " ".join(statement.split())
        if found.endswith(":"):
            labels[found[:-1]] = len(statements)
        elif found and not found.startswith("."):
            statements.append(found)
    return labels, statements
