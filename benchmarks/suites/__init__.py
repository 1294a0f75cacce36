"""All suites in the order in which they run, one module per suite."""

from collections.abc import Mapping

from benchmarks.suite import Suite
from benchmarks.suites import (
    acnml,
    audit,
    classes,
    fit,
    influence,
    last,
    probes,
    processes,
    self_influence,
    table1,
)

SUITES: Mapping[str, Suite] = {
    module.SUITE.name: module.SUITE
    for module in (influence, classes, probes, last, fit, audit, self_influence, acnml, table1, processes)
}
