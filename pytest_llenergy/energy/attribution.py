# SPDX-License-Identifier: Apache-2.0
"""Split the joules of a CPU package between the test's processes and others, on a busy host.

The counter of a package includes every process of the host. While others use it, the joules above idle are
split by CPU time, as Kepler and Scaphandre do:

    E = P_idle · t + s · (E_package - P_idle · t),  s = CPU time of the test / CPU time of the host

Idle power stays with the test, which holds the CPUs of the host, so that E becomes the joules of the package
as the others leave. If idle power is unknown, all joules are split (P_idle = 0), as in Scaphandre.

A CPU second of one process may cost more than one of another, by up to a factor k. It sets the limits: the
share of the test is s / (s + k (1 - s)) at least, and s / (s + (1 - s) / k) at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from pytest_llenergy import real_time
from pytest_llenergy.energy.cpu_time import TICK_S, ProcessTree, read_cpu_time
from pytest_llenergy.energy.uncertainty import Attributed, Power, Variances, WindowEnergy

if TYPE_CHECKING:
    from pytest_llenergy.energy.meters.base import Domain
    from pytest_llenergy.energy.quiet_gaps import Quiet
    from pytest_llenergy.record.record import Flag

#: Others are busy if they use more cores than this, and more CPU time than is significant with ticks of 10 ms
#: (seconds). Below that, the joules of the package are those of the test.
BUSY_CORES, BUSY_S = 0.25, 0.05

#: k for a package. An assumption, wider than the error of models that ignore that two threads share a core:
#: 20.5 % on average and 31.5 % at worst (Zhai et al., HaPPy, USENIX ATC 2014).
PACKAGE_RATIO = 1.5

#: k for memory: CPU time does not tell who uses it.
MEMORY_RATIO = float("inf")

#: Shortest gap whose CPU use is known well enough (seconds), with ticks of 10 ms.
SHORTEST_GAP_S = 0.1


def is_busy(cpu_s: float, duration_s: float) -> bool:
    """Return whether so many CPU seconds in a stretch of time are significant."""
    return cpu_s > max(BUSY_CORES * duration_s, BUSY_S)


class CpuUse(NamedTuple):
    """CPU seconds of the test's processes, of others, and stolen by the hypervisor, in a stretch of time."""

    own_s: float
    other_s: float
    stolen_s: float
    duration_s: float

    @property
    def busy(self) -> bool:
        """Whether others use the host."""
        return is_busy(self.other_s, self.duration_s)

    @property
    def share(self) -> float:
        """CPU time of the test over that of the host."""
        return self.own_s / (self.own_s + self.other_s)


class CpuReading(NamedTuple):
    """CPU seconds at a monotonic moment: of the host, stolen by its hypervisor, of the test's processes."""

    time_s: float
    busy_s: float
    stolen_s: float
    own_s: float

    def until(self, later: CpuReading, least_own_s: float = 0.0) -> CpuUse:
        """Return the use between two readings, at least ``least_own_s`` of it by the test."""
        own_s = max(later.own_s - self.own_s, least_own_s)
        other_s = max(0.0, later.busy_s - self.busy_s - own_s)
        return CpuUse(own_s, other_s, later.stolen_s - self.stolen_s, later.time_s - self.time_s)


def read_cpu(processes: ProcessTree) -> CpuReading:
    """Read the CPU time of the host and of the test's processes."""
    host = read_cpu_time()
    own_s = processes.cpu_time_s()
    return CpuReading(real_time.monotonic(), host.busy_s, host.stolen_s, own_s)


class Split(NamedTuple):
    """How the joules of a domain are split in one round or window.

    ``idle`` is its idle power, ``None`` if others never paused.
    """

    use: CpuUse
    idle: Power | None
    ratio: float

    def part(self, whole: WindowEnergy, duration_s: float) -> Attributed | None:
        """Return the part of the test; ``None`` without energy."""
        if whole.energy_j is None or duration_s <= 0:
            return None
        whole_j, share, ratio = whole.energy_j, self.use.share, self.ratio
        most_w = whole_j / duration_s
        idle, high_w = (self.idle, self.idle.watts) if self.idle else (Power(0.0, 0.0), most_w)
        low_share = share / (share + ratio * (1 - share))
        high_share = share / (share + (1 - share) / ratio) if share else 0.0

        def part_j(idle_w: float, of_share: float) -> float:
            idle_j = min(idle_w, most_w) * duration_s
            return idle_j + of_share * (whole_j - idle_j)

        # The CPU time of others is known to a tick, that of the test much better.
        u_share = share * TICK_S / (self.use.own_s + self.use.other_s)
        above_j = whole_j - min(idle.watts, most_w) * duration_s
        idle_u_j = (1 - share) * idle.u_watts * duration_s
        variances = Variances(attribution=(u_share * above_j) ** 2 + idle_u_j**2)
        energy = WindowEnergy(part_j(idle.watts, share), whole.variances.scale(share**2) + variances)
        return Attributed(energy, whole_j, part_j(idle.watts, low_share), part_j(high_w, high_share))


def choose_split(
    domain: Domain,
    use: CpuUse,
    gaps: Sequence[tuple[Power | Quiet | None, CpuUse]] = (),
    rest: dict[str, Power] | None = None,
) -> Split | None:
    """Return how to split the joules of a domain, or ``None`` if they are all those of the test.

    ``gaps`` are those before and after the work. ``rest`` keeps the power of each domain in the last gap in
    which others were quiet, and is updated.
    """
    if domain.cpu_ratio is None:
        return None
    quiet = [
        power
        for power, gap in gaps
        if power and gap.duration_s >= SHORTEST_GAP_S and gap.other_s <= BUSY_CORES * gap.duration_s
    ]
    rest = {} if rest is None else rest
    if quiet:
        watts = sum(power.watts for power in quiet) / len(quiet)
        rest[domain.name] = Power(watts, max(power.u_watts for power in quiet))
    if not use.busy:
        return None
    return Split(use, rest.get(domain.name), domain.cpu_ratio)


def attribution_flags(splits: Sequence[Split]) -> list[Flag]:
    """Return the flag of joules that were split, of one or more domains."""
    if not splits:
        return []
    from pytest_llenergy.record.record import Flag

    use, idle = splits[0].use, [split.idle for split in splits]
    detail = f"others used {use.other_s:.3g} of {use.own_s + use.other_s:.3g} CPU s: "
    known = [each.watts for each in idle if each is not None]
    if len(known) < len(idle):
        detail += "joules are split by CPU time, all of them since idle power is unknown"
    else:
        detail += f"joules above idle ({sum(known):.3g} W) are split by CPU time"
    return [Flag(name="attributed", severity="note", detail=detail)]
