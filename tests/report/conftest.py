"""A large report, written once for all tests because it takes seconds."""

import numpy as np
import pytest
from report_cases import LargeReport, make_audit

from ifcomp.report import Preview, build_report


@pytest.fixture(scope="session")
def large_report(tmp_path_factory: pytest.TempPathFactory) -> LargeReport:
    audit = make_audit(100_000, classes=10, suspects=100_000)
    pixels = np.random.default_rng(0).integers(0, 256, (300, 64, 64, 3), dtype=np.uint8)
    previews = {
        int(index): Preview("image", pixels[rank]) for rank, index in enumerate(audit.ranked["index"].head(300))
    }
    path = tmp_path_factory.mktemp("large") / "large.html"
    return LargeReport(build_report(path, title="Large", audit=audit, previews=previews), audit)
