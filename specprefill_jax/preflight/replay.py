"""One wave's way through instructions, in order: when it waits, and for how long."""

from __future__ import annotations

import re
from collections.abc import Sequence

from specprefill_jax.preflight.cost import instruction_cost
from specprefill_jax.preflight.isa import Instruction

# Cycles from an access to its value: assumptions, with which public measurements of llama.cpp on this GPU
# come out (docs/radeon-780m.md).
VMEM_LATENCY, SCRATCH_LATENCY, LDS_LATENCY, SMEM_LATENCY, BARRIER = 600, 300, 70, 200, 40

_COUNT = re.compile(r"(vmcnt|lgkmcnt)\((\d+)\)")
_STORES = re.compile(r"s_waitcnt_vscnt \w+, (\w+)")


def replay(instructions: Sequence[Instruction], wave: int, *, repeated: bool) -> float:
    """Cycles that one wave alone takes, in order, with its waits; of a later turn where it is `repeated`."""
    costs = {name: instruction_cost(name, wave) for name in {one.name for one in instructions}}
    waits = {one.text: _waits(one.text) for one in instructions if one.name.startswith("s_waitcnt")}
    now, turn_began, lds_free, vmem_free = 0.0, 0.0, 0.0, 0.0
    pending: dict[str, list[float]] = {"vmcnt": [], "lgkmcnt": [], "vscnt": []}
    for _ in range(3 if repeated else 1):
        turn_began = now
        for instruction in instructions:
            name, cost = instruction.name, costs[instruction.name]
            for counter, left in waits.get(instruction.text, ()):
                while len(pending[counter]) > left:
                    now = max(now, pending[counter].pop(0))
            if name.startswith("ds_"):
                lds_free = max(now, lds_free) + cost.lds
                pending["lgkmcnt"].append(lds_free + LDS_LATENCY)
                now += wave / 32
            elif cost.vmem:
                vmem_free = max(now, vmem_free) + cost.vmem
                arrives = vmem_free + (SCRATCH_LATENCY if cost.scratch else VMEM_LATENCY)
                pending["vscnt" if cost.stored else "vmcnt"].append(arrives)
                now += wave / 32
            else:
                if name.startswith(("s_load", "s_buffer")):
                    pending["lgkmcnt"].append(now + SMEM_LATENCY)
                now += BARRIER if name == "s_barrier" else max(1.0, cost.valu)
    return now - turn_began


def _waits(text: str) -> tuple[tuple[str, int], ...]:
    """The counters that an instruction waits for, and to what they must fall."""
    if text.startswith("s_waitcnt "):
        return tuple((counter, int(left)) for counter, left in _COUNT.findall(text))
    found = _STORES.match(text)
    return (("vscnt", int(found[1], 0)),) if found else ()
