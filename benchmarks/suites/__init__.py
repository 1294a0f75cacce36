"""All suites, in the order in which they run: one file each."""

from collections.abc import Mapping

from benchmarks.suite import Suite
from benchmarks.suites import (
    acnml,
    classes,
    fit,
    growth,
    influence,
    last,
    probes,
    processes,
    self_influence,
    table1,
)

SUITES: Mapping[str, Suite] = {
    module.SUITE.name: module.SUITE
    for module in (influence, classes, probes, last, fit, self_influence, acnml, growth, table1, processes)
}
